//! Bytes, streams and operators: how the hardware does it.
//!
//! This crate owns memory, order and arithmetic. It does not know what a chunk, a layer or a plan is.
//! It is the only crate of Castor that may be `unsafe`; everything it offers is behind safe types that
//! check their bounds.
//!
//! Read in this order: [`memory`] (what a place is), [`stream`] (what order is), [`ops`] (what can be
//! computed), [`backend`] (the one trait), then the backends: [`cpu`] (the truth, with an emulated
//! device), [`dry`] (allocates nothing, counts everything) and [`cuda`].

pub mod backend;
pub mod block_io;
pub mod cpu;
pub mod cuda;
pub mod dry;
pub mod error;
pub mod file_map;
pub mod link;
pub mod memory;
pub mod numeric;
pub mod ops;
pub mod rng;
mod route;
pub mod stream;

pub use backend::{Among, Backend, Collectives, Device, Memory, Order};
pub use error::{Error, Result};
pub use file_map::FileMap;
pub use memory::{DType, Span, Tier, View};
pub use ops::Operators;
pub use stream::{Mark, Stream};
