//! The ZeRO-3 Llama trainer, its launcher and its memory report.
#![forbid(unsafe_code)]

pub mod activations;
pub mod config;
pub mod data;
pub mod engine;
pub mod error;
pub mod inputs;
pub mod loss_scale;
pub mod lr;
pub mod model;
pub mod optimizer;
pub mod parity;
pub mod source;
mod step;
pub mod weights;
