//! The ZeRO-3 Llama trainer, its launcher and its memory report.
#![forbid(unsafe_code)]

pub mod cli;
pub mod config;
pub mod data;

pub mod error;
pub mod plugin;
pub mod settings;
pub mod source;
pub mod weights;
