//! Bytes, streams and operators: how the hardware does it.
//!
//! This crate owns memory, order and arithmetic. It does not know what a chunk, a layer or a plan is.
//! It is the only crate of Castor that may be `unsafe`; everything it offers is behind safe types that
//! check their bounds.
//!
//! Read in this order: [`memory`] (what a place is), [`stream`] (what order is), [`ops`] (what can be
//! computed), [`backend`] (the one trait), then the backends: [`cpu`] (the truth, with an emulated
//! device), [`dry`] (allocates nothing, counts everything) and [`cuda`].

pub mod error;
pub mod memory;
pub mod stream;
pub mod ops;
pub mod backend;
pub mod rng;
pub mod numeric;
pub mod block_io;
pub mod link;
pub mod dry;
pub mod cpu;
pub mod cuda;

pub use backend::{Backend, Collectives, Device, Memory, Order};
pub use error::{Error, Result};
pub use memory::{DType, Span, Tier, View};
pub use ops::Operators;
pub use stream::{Mark, Stream};
