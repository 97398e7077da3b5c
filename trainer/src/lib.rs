//! The ZeRO-3 Llama trainer, its launcher and its memory report.
#![forbid(unsafe_code)]

pub mod activations;
pub mod config;
pub mod doctor;
pub mod error;
pub mod launcher;
pub mod rendezvous;
pub mod report;
pub mod source;
mod step;
pub mod weights;
