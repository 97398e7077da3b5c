//! Support of the integration tests: a backend whose streams run in a random order and may fail.

pub mod simulation;
