//! The binary `castor`.
fn main() {}
