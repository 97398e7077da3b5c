//! The ZeRO-3 trainer of Llama-family models, its launcher and its memory report.
//!
//! What to compute: [`config`] and [`settings`] say what is wanted, [`model`] and the step write it out,
//! [`blueprint`] plans it, [`engine`] runs the plan, [`replan`] finds a better one meanwhile, [`data`] and [`weights`]
//! feed it, [`checkpoint`] keeps it, [`launcher`] and [`rendezvous`] make ranks of it, [`report`] says what happened,
//! [`sample`] shows what was learnt.
#![forbid(unsafe_code)]

pub mod account;
pub mod activations;
pub mod agreement;
pub mod auto;
pub mod blueprint;
pub mod checkpoint;
pub mod cli;
pub mod config;
pub mod data;
pub mod doctor;
pub mod engine;
pub mod error;
pub mod estimate;
pub mod evaluation;
mod gradient;
pub mod inputs;
pub mod launcher;
pub mod loss_scale;
pub mod lr;
pub mod measure;
pub mod model;
pub mod optimizer;
pub mod parity;
pub mod plan;
pub mod plugin;
pub mod rates;
pub mod rendezvous;
pub mod replan;
pub mod report;
pub mod sample;
pub mod session;
pub mod settings;
pub mod source;
mod step;
mod step_rows;
pub mod train;
pub mod weights;
