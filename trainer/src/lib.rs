//! The ZeRO-3 Llama trainer, its launcher and its memory report.
#![forbid(unsafe_code)]

pub mod cli;
pub mod config;
pub mod doctor;
pub mod error;
pub mod plugin;
pub mod settings;
pub mod source;
mod step;
pub mod weights;
