//! The head: final norm, logits in chunks of tokens, loss and its gradient.
//!
//! Logits exist for one chunk at a time: the classifier turns them into gradients in place, and the chunk's two
//! gradient products follow before the next chunk's logits replace them. The output matrix is either the
//! head group's own or, tied, the embedding table; the caller passes the right views.

use super::Shape;
use castor_kernels::{
    Backend, View,
    ops::{Classify, Into},
};

/// Where one micro-batch's head works. T = B·S rows.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// T
    pub tokens: u64,
    /// Rows of logits that exist at once.
    pub chunk: u64,
    /// The last block's output `[T,C]`.
    pub hidden: View,
    /// The normed output `[T,C]`.
    pub normed: View,
    /// f32 `[T]`
    pub rstd: View,
    /// `[chunk,V]`
    pub logits: View,
    /// Gradient of the normed output `[T,C]`.
    pub d_normed: View,
    /// f32 `[T]`
    pub losses: View,
    /// Scratch of the norm.
    pub scratch: View,
}

/// The output matrix `[V,C]` and the final norm `[C]`, or their gradients.
#[derive(Clone, Copy, Debug)]
pub struct Tensors {
    /// `[V,C]`
    pub output: View,
    /// `[C]`
    pub norm: View,
}

/// Computes the losses `[T]` alone. `observe` sees each chunk's logits `[rows,V]` and its first row before they
/// are destroyed.
pub fn losses(
    ops: &dyn Backend,
    shape: &Shape,
    w: &Tensors,
    targets: View,
    m: &Memory,
    observe: &mut dyn FnMut(View, u64) -> castor_kernels::Result<()>,
) -> castor_kernels::Result<()> {
    norm(ops, shape, w, m);
    for (first, rows) in chunks(m) {
        let logits = logits(ops, shape, w, m, first, rows);
        observe(logits, first)?;
        let (targets, losses) = (targets.part(first, rows), m.losses.part(first, rows));
        ops.classify(logits, targets, losses, rows, shape.vocabulary, Classify::Loss);
    }
    Ok(())
}

/// Computes the losses `[T]`, the gradient `d_hidden` `[T,C]` of the last block's output and the gradients `d`.
/// With [`Classify::Sampled`] the chunks count tokens on from `first_token`.
pub fn forward_backward(
    ops: &dyn Backend,
    shape: &Shape,
    w: &Tensors,
    targets: View,
    m: &Memory,
    what: Classify,
    d_hidden: View,
    d: &Tensors,
    into: Into,
) {
    norm(ops, shape, w, m);
    let mut into_output = into;
    for (first, rows) in chunks(m) {
        let logits = logits(ops, shape, w, m, first, rows);
        let (targets, losses) = (targets.part(first, rows), m.losses.part(first, rows));
        ops.classify(logits, targets, losses, rows, shape.vocabulary, advanced(what, first));
        let normed = part(m.normed, shape, first, rows);
        let d_normed = part(m.d_normed, shape, first, rows);
        let product = shape.logits(rows);
        ops.linear_backward_weight(logits, normed, d.output, product, into_output);
        ops.linear_backward_input(logits, w.output, d_normed, product, Into::Replace);
        into_output = Into::Add;
    }
    ops.zero(d_hidden);
    ops.rmsnorm_backward(
        m.d_normed,
        m.hidden,
        w.norm,
        m.rstd,
        d_hidden,
        d.norm,
        m.scratch,
        m.tokens,
        shape.hidden,
        into,
    );
}

fn norm(ops: &dyn Backend, shape: &Shape, w: &Tensors, m: &Memory) {
    ops.rmsnorm(m.hidden, w.norm, m.normed, m.rstd, m.tokens, shape.hidden, shape.eps);
}

fn logits(ops: &dyn Backend, shape: &Shape, w: &Tensors, m: &Memory, first: u64, rows: u64) -> View {
    let logits = m.logits.part(0, rows * shape.vocabulary);
    let normed = part(m.normed, shape, first, rows);
    ops.linear(normed, w.output, None, None, logits, shape.logits(rows));
    logits
}

fn part(view: View, shape: &Shape, first: u64, rows: u64) -> View {
    view.part(first * shape.hidden, rows * shape.hidden)
}

/// `(first, rows)` of each chunk.
fn chunks(m: &Memory) -> impl Iterator<Item = (u64, u64)> + use<> {
    let (tokens, chunk) = (m.tokens, m.chunk);
    (0..tokens.div_ceil(chunk)).map(move |index| {
        let first = index * chunk;
        (first, chunk.min(tokens - first))
    })
}

/// `what` for tokens that come `by` later.
pub const fn advanced(what: Classify, by: u64) -> Classify {
    match what {
        Classify::Sampled { scale, seed, first_token } => {
            Classify::Sampled { scale, seed, first_token: first_token + by }
        }
        other => other,
    }
}
