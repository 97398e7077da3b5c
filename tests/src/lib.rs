//! Support for the integration tests: a backend that simulates, and small engines that must agree.

pub mod engines;
pub mod simulation;
