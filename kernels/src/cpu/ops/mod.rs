//! Operators on slices: obvious loops, and the fast paths held to them.
