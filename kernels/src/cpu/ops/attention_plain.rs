//! Causal attention that materialises the S×S scores of one head at a time: the check of the fused path, and
//! what a machine without a fused kernel does. Heads in turn, rows of a head in parallel.

use super::attention::{Shape, Starts, TILE, load};
use super::matrix::{Matrix, multiply};
use super::{Element, exp, with_scratch};
use rayon::prelude::*;

/// Floats of scratch that [`forward`] takes: the scores.
pub const fn forward_scratch(shape: &Shape) -> usize {
    shape.sequence * shape.sequence
}

/// Floats of scratch that [`backward`] takes: probabilities, gradient of the scores, gradients of k and v.
pub const fn backward_scratch(shape: &Shape) -> usize {
    2 * shape.sequence * shape.sequence + 2 * shape.sequence * shape.head_dim
}

/// The query rows of one task: tokens `first..first + rows`.
fn rows_of(task: usize, rows: usize) -> std::ops::Range<usize> {
    task * TILE..task * TILE + rows
}

/// `scores[i,:] = softmax(q_i·kᵀ/√D)` over the keys from the row's start up to i, 0 elsewhere; answers the rows' log-sum-exps
/// through `stat`. `scores`: the `[rows, S]` of the tokens `tokens` of one sequence.
fn softmax_rows<T: Element>(
    qkv: &[T],
    starts: Starts<'_>,
    tokens: std::ops::Range<usize>,
    head: usize,
    scores: &mut [f32],
    shape: Shape,
    mut stat: impl FnMut(usize, f32),
) {
    let (d, sequence) = (shape.head_dim, shape.sequence);
    let (rows, start) = (tokens.len(), tokens.start);
    with_scratch((rows + sequence) * d, |scratch| {
        let (q, k) = scratch.split_at_mut(rows * d);
        let q = load(qkv, shape.packed(), tokens, shape.q(head), d, q);
        let k = load(qkv, shape.packed(), 0..sequence, shape.k(head / shape.group()), d, k);
        multiply(Matrix::new(q, rows, d, d), Matrix::new(k, sequence, d, d).transposed(), scores, false);
    });
    for (i, scores) in scores.chunks_exact_mut(sequence).enumerate() {
        let (seen, hidden) = scores.split_at_mut(start + i + 1);
        let (before, seen) = seen.split_at_mut(starts.at(start + i));
        before.fill(0.0);
        seen.iter_mut().for_each(|s| *s *= shape.scale());
        let max = seen.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        seen.iter_mut().for_each(|s| *s = exp(*s - max));
        let total: f32 = seen.iter().sum();
        seen.iter_mut().for_each(|s| *s /= total);
        hidden.fill(0.0);
        stat(i, max + total.ln());
    }
}

/// As [`super::attention::forward`], with [`forward_scratch`] floats of scratch.
pub fn forward<T: Element>(
    qkv: &[T],
    starts: Starts<'_>,
    out: &mut [T],
    stats: &mut [f32],
    scratch: &mut [f32],
    shape: Shape,
) {
    let (d, sequence) = (shape.head_dim, shape.sequence);
    let batches = qkv.chunks_exact(sequence * shape.packed()).zip(out.chunks_exact_mut(sequence * shape.width()));
    let batches = batches.zip(stats.chunks_exact_mut(sequence * shape.heads)).enumerate();
    for (batch, ((qkv, out), stats)) in batches {
        let starts = starts.of(batch, sequence);
        for (head, stats) in stats.chunks_exact_mut(sequence).enumerate() {
            let rows = out.par_chunks_mut(TILE * shape.width()).zip(stats.par_chunks_mut(TILE));
            rows.zip(scratch.par_chunks_mut(TILE * sequence)).enumerate().for_each(|(task, ((out, stats), scores))| {
                let rows = stats.len();
                let scores = &mut scores[..rows * sequence];
                softmax_rows(qkv, starts, rows_of(task, rows), head, scores, shape, |i, stat| stats[i] = stat);
                with_scratch((sequence + rows) * d, |scratch| {
                    let (v, o) = scratch.split_at_mut(sequence * d);
                    let v = load(qkv, shape.packed(), 0..sequence, shape.v(head / shape.group()), d, v);
                    let p = Matrix::new(scores, rows, sequence, sequence);
                    multiply(p, Matrix::new(v, sequence, d, d), o, false);
                    for (out, o) in out.chunks_exact_mut(shape.width()).zip(o.chunks_exact(d)) {
                        T::narrow_slice(o, &mut out[shape.q(head)..][..d]);
                    }
                });
            });
        }
    }
}

/// As [`super::attention::backward`], with [`backward_scratch`] floats of scratch. Needs neither the output
/// nor the log-sum-exps: the softmax is taken again.
pub fn backward<T: Element>(
    qkv: &[T],
    starts: Starts<'_>,
    d_out: &[T],
    d_qkv: &mut [T],
    scratch: &mut [f32],
    shape: Shape,
) {
    let (d, sequence) = (shape.head_dim, shape.sequence);
    let (p, rest) = scratch.split_at_mut(sequence * sequence);
    let (d_s, rest) = rest.split_at_mut(sequence * sequence);
    let (d_k, rest) = rest.split_at_mut(sequence * d);
    let d_v = &mut rest[..sequence * d];
    let batches = qkv.chunks_exact(sequence * shape.packed()).zip(d_out.chunks_exact(sequence * shape.width()));
    let batches = batches.zip(d_qkv.chunks_exact_mut(sequence * shape.packed())).enumerate();
    for (batch, ((qkv, d_out), d_qkv)) in batches {
        let starts = starts.of(batch, sequence);
        for kv in 0..shape.kv_heads {
            for member in 0..shape.group() {
                let head = kv * shape.group() + member;
                score_gradients(qkv, starts, d_out, d_qkv, p, d_s, head, shape);
                let columns = d_k.par_chunks_mut(TILE * d).zip(d_v.par_chunks_mut(TILE * d));
                let (p, d_s) = (&*p, &*d_s);
                columns.enumerate().for_each(|(task, (d_k, d_v))| {
                    with_scratch(sequence * d, |rows| {
                        let columns = d_k.len() / d;
                        let rows = load(qkv, shape.packed(), 0..sequence, shape.q(head), d, rows);
                        let d_s = Matrix::new(&d_s[task * TILE..], sequence, columns, sequence).transposed();
                        multiply(d_s, Matrix::new(rows, sequence, d, d), d_k, member > 0);
                        let rows = load(d_out, shape.width(), 0..sequence, shape.q(head), d, rows);
                        let p = Matrix::new(&p[task * TILE..], sequence, columns, sequence).transposed();
                        multiply(p, Matrix::new(rows, sequence, d, d), d_v, member > 0);
                    });
                });
            }
            for (t, row) in d_qkv.chunks_exact_mut(shape.packed()).enumerate() {
                T::narrow_slice(&d_k[t * d..][..d], &mut row[shape.k(kv)..][..d]);
                T::narrow_slice(&d_v[t * d..][..d], &mut row[shape.v(kv)..][..d]);
            }
        }
    }
}

/// One query head: fills `p` and `d_s` (the scale included) `[S,S]`, and the head's q columns of `d_qkv`.
fn score_gradients<T: Element>(
    qkv: &[T],
    starts: Starts<'_>,
    d_out: &[T],
    d_qkv: &mut [T],
    p: &mut [f32],
    d_s: &mut [f32],
    head: usize,
    shape: Shape,
) {
    let (d, sequence) = (shape.head_dim, shape.sequence);
    let rows = d_qkv.par_chunks_mut(TILE * shape.packed()).zip(p.par_chunks_mut(TILE * sequence));
    rows.zip(d_s.par_chunks_mut(TILE * sequence)).enumerate().for_each(|(task, ((d_qkv, p), d_s))| {
        let rows = p.len() / sequence;
        let tokens = rows_of(task, rows);
        softmax_rows(qkv, starts, tokens.clone(), head, p, shape, |_, _| ());
        with_scratch((2 * rows + sequence) * d, |scratch| {
            let (d_o, rest) = scratch.split_at_mut(rows * d);
            let (d_q, kv) = rest.split_at_mut(rows * d);
            let d_o = load(d_out, shape.width(), tokens, shape.q(head), d, d_o);
            let v = load(qkv, shape.packed(), 0..sequence, shape.v(head / shape.group()), d, kv);
            multiply(Matrix::new(d_o, rows, d, d), Matrix::new(v, sequence, d, d).transposed(), d_s, false);
            for (p, d_s) in p.chunks_exact(sequence).zip(d_s.chunks_exact_mut(sequence)) {
                let mean: f32 = p.iter().zip(&*d_s).map(|(p, d)| p * d).sum();
                for (d_s, p) in d_s.iter_mut().zip(p) {
                    *d_s = p * (*d_s - mean) * shape.scale();
                }
            }
            let k = load(qkv, shape.packed(), 0..sequence, shape.k(head / shape.group()), d, kv);
            multiply(Matrix::new(d_s, rows, sequence, sequence), Matrix::new(k, sequence, d, d), d_q, false);
            for (row, d_q) in d_qkv.chunks_exact_mut(shape.packed()).zip(d_q.chunks_exact(d)) {
                T::narrow_slice(d_q, &mut row[shape.q(head)..][..d]);
            }
        });
    });
}
