//! The ZeRO-3 Llama trainer, its launcher and its memory report.
#![forbid(unsafe_code)]

pub mod config;
pub mod error;
pub mod source;
