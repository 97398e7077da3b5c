//! The CPU backend: the truth, and an *emulated device*.
//!
//! Its device tier is a capped arena in host memory, its copy engines are threads with a settable
//! bandwidth, and its compute stream is the calling thread, so every move is real, overlap can be
//! measured and ordering mistakes show without a GPU.

mod ops;
