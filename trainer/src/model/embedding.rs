//! The embedding: rows of a table picked by token ids, and the table's gradient.

use super::Shape;
use castor_kernels::{Backend, View, ops::Into};

/// A micro-batch's token ids on the device, and their order for the table's gradient.
#[derive(Clone, Copy, Debug)]
pub struct Ids {
    /// i32 `[T]`
    pub ids: View,
    /// i32 `[T]`: token positions sorted stably by id.
    pub order: View,
    /// i32 `[distinct + 1]`: bounds of equal ids in `order`.
    pub starts: View,
    /// Number of different ids.
    pub distinct: u64,
    /// T
    pub tokens: u64,
}

/// `out[t,:] = table[ids[t],:]`; out `[T,C]`.
pub fn forward(ops: &dyn Backend, shape: &Shape, ids: &Ids, table: View, out: View) {
    ops.embed(ids.ids, table, out, ids.tokens, shape.hidden, shape.vocabulary);
}

/// The table's gradient `[V,C]` from the first block's input gradient `[T,C]`.
pub fn backward(ops: &dyn Backend, shape: &Shape, ids: &Ids, d_out: View, d_table: View, into: Into) {
    ops.embed_backward(
        ids.ids,
        ids.order,
        ids.starts,
        ids.distinct,
        d_out,
        d_table,
        ids.tokens,
        shape.hidden,
        shape.vocabulary,
        into,
    );
}
