//! Causal attention without the S×S scores: streaming softmax over tiles of [`TILE`] queries × keys.
//!
//! A task owns [`TILE`] tokens of one sequence and writes their whole rows: forward their outputs, backward
//! the gradients of their q (walking the keys before them) and of their k and v (walking the queries after
//! them). Scores are therefore computed twice in the backward, in exchange for which no two tasks write
//! the same row, nothing of size S is buffered and every sum has one order: query heads of a kv head in
//! turn, tokens ascending.

use super::matrix::{Matrix, multiply};
use super::{Element, dot, exp, with_scratch};
use crate::numeric::vectorised;
use rayon::prelude::*;

/// Queries and keys of a tile.
pub const TILE: usize = 64;

/// Shape of attention over packed q, k, v; see [`crate::ops::Attention`].
#[derive(Clone, Copy)]
pub struct Shape {
    /// S
    pub sequence: usize,
    /// H
    pub heads: usize,
    /// K
    pub kv_heads: usize,
    /// D
    pub head_dim: usize,
}

impl Shape {
    /// Columns of q, k, v packed.
    pub const fn packed(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Columns of the output: H·D.
    pub const fn width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Query heads that share a kv head.
    pub const fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// First column of query head `head`.
    pub const fn q(&self, head: usize) -> usize {
        head * self.head_dim
    }

    /// First column of kv head `head`'s keys.
    pub const fn k(&self, head: usize) -> usize {
        (self.heads + head) * self.head_dim
    }

    /// First column of kv head `head`'s values.
    pub const fn v(&self, head: usize) -> usize {
        (self.heads + self.kv_heads + head) * self.head_dim
    }

    /// 1/√D
    pub fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// The tokens of tile `tile` of a sequence.
    fn tile(&self, tile: usize) -> std::ops::Range<usize> {
        tile * TILE..((tile + 1) * TILE).min(self.sequence)
    }

    fn tiles(&self) -> usize {
        self.sequence.div_ceil(TILE)
    }
}

/// The first position that each token of a sequence sees: 0, or as [`crate::Operators::attention`] says.
#[derive(Clone, Copy)]
pub struct Starts<'a>(pub Option<&'a [i32]>);

impl<'a> Starts<'a> {
    /// Those of sequence `batch` of `[B,S]`.
    pub fn of(self, batch: usize, sequence: usize) -> Starts<'a> {
        Starts(self.0.map(|starts| &starts[batch * sequence..][..sequence]))
    }

    /// Of token `token` of a sequence.
    pub fn at(&self, token: usize) -> usize {
        self.0.map_or(0, |starts| starts[token] as usize)
    }

    /// The first tile of keys that a tile of queries sees: starts never decrease.
    fn first_tile(&self, queries: usize) -> usize {
        self.at(queries * TILE) / TILE
    }
}

/// Columns `first..first + head_dim` of rows `tokens` of `source` (rows of `width`), widened and densely
/// packed at the start of `target`, which is returned cut to size.
pub fn load<'s, T: Element>(
    source: &[T],
    width: usize,
    tokens: std::ops::Range<usize>,
    first: usize,
    head_dim: usize,
    target: &'s mut [f32],
) -> &'s mut [f32] {
    let target = &mut target[..tokens.len() * head_dim];
    for (token, row) in tokens.zip(target.chunks_exact_mut(head_dim)) {
        T::widen_slice(&source[token * width + first..][..head_dim], row);
    }
    target
}

/// Cuts a slice into pieces of the given lengths.
fn pieces<const N: usize>(mut scratch: &mut [f32], lengths: [usize; N]) -> [&mut [f32]; N] {
    lengths.map(|length| scratch.split_off_mut(..length).expect("scratch is the sum of its pieces"))
}

/// out `[T, H·D]`; stats `[B,H,S]`: log-sum-exp of each row; scratch `[T, H]`, where tasks leave it first.
pub fn forward<T: Element>(
    qkv: &[T],
    starts: Starts<'_>,
    out: &mut [T],
    stats: &mut [f32],
    scratch: &mut [f32],
    shape: Shape,
) {
    let Shape { sequence, heads, .. } = shape;
    let batches = qkv.par_chunks_exact(sequence * shape.packed());
    batches
        .zip(out.par_chunks_exact_mut(sequence * shape.width()))
        .zip(scratch.par_chunks_exact_mut(sequence * heads))
        .enumerate()
        .for_each(|(batch, ((qkv, out), sums))| {
            let starts = starts.of(batch, sequence);
            let tiles = out.par_chunks_mut(TILE * shape.width()).zip(sums.par_chunks_mut(TILE * heads));
            tiles.enumerate().for_each(|(tile, (out, sums))| forward_tile(qkv, starts, out, sums, tile, shape));
        });
    stats.par_chunks_exact_mut(sequence).enumerate().for_each(|(row, stats)| {
        let (batch, head) = (row / heads, row % heads);
        for (s, stat) in stats.iter_mut().enumerate() {
            *stat = scratch[(batch * sequence + s) * heads + head];
        }
    });
}

/// `qkv`, `starts`: one sequence. `out`, `sums`: this tile's rows.
fn forward_tile<T: Element>(qkv: &[T], starts: Starts<'_>, out: &mut [T], sums: &mut [f32], tile: usize, shape: Shape) {
    let d = shape.head_dim;
    let lengths = [TILE * d, TILE * d, TILE * d, TILE * d, TILE * TILE, TILE, TILE];
    with_scratch(lengths.iter().sum(), |scratch| {
        let [q, k, v, o, s, max, total] = pieces(scratch, lengths);
        for head in 0..shape.heads {
            let kv = head / shape.group();
            let q = load_scaled_q(qkv, tile, head, q, shape);
            let rows = q.len() / d;
            let o = &mut o[..rows * d];
            o.fill(0.0);
            max.fill(f32::NEG_INFINITY);
            total.fill(0.0);
            for keys in starts.first_tile(tile)..=tile {
                let k = load(qkv, shape.packed(), shape.tile(keys), shape.k(kv), d, k);
                let v = load(qkv, shape.packed(), shape.tile(keys), shape.v(kv), d, v);
                let columns = k.len() / d;
                let s = &mut s[..rows * columns];
                multiply(Matrix::new(q, rows, d, d), Matrix::new(k, columns, d, d).transposed(), s, false);
                for (i, s) in s.chunks_exact_mut(columns).enumerate() {
                    if keys == tile {
                        s[i + 1..].fill(f32::NEG_INFINITY);
                    }
                    let hidden = starts.at(tile * TILE + i).saturating_sub(keys * TILE).min(columns);
                    s[..hidden].fill(f32::NEG_INFINITY);
                    let correction = absorb(s, &mut max[i], &mut total[i]);
                    for o in &mut o[i * d..(i + 1) * d] {
                        *o *= correction;
                    }
                }
                multiply(Matrix::new(s, rows, columns, columns), Matrix::new(v, columns, d, d), o, true);
            }
            for (i, o) in o.chunks_exact_mut(d).enumerate() {
                let inverse = 1.0 / total[i];
                for o in o.iter_mut() {
                    *o *= inverse;
                }
                T::narrow_slice(o, &mut out[i * shape.width() + head * d..][..d]);
                sums[i * shape.heads + head] = max[i] + total[i].ln();
            }
        }
    });
}

/// Turns a row's scores into powers relative to its new maximum; what was summed before must be multiplied
/// by the answer.
fn absorb(scores: &mut [f32], max: &mut f32, total: &mut f32) -> f32 {
    let before = *max;
    let now = scores.iter().copied().fold(before, f32::max);
    if now == f32::NEG_INFINITY {
        // A tile before the row's document.
        scores.fill(0.0);
        return 1.0;
    }
    vectorised!({
        for s in scores.iter_mut() {
            *s = exp(*s - now);
        }
    });
    let correction = exp(before - now);
    *max = now;
    *total = *total * correction + scores.iter().sum::<f32>();
    correction
}

fn load_scaled_q<'s, T: Element>(
    qkv: &[T],
    tile: usize,
    head: usize,
    target: &'s mut [f32],
    shape: Shape,
) -> &'s mut [f32] {
    let q = load(qkv, shape.packed(), shape.tile(tile), shape.q(head), shape.head_dim, target);
    let scale = shape.scale();
    q.iter_mut().for_each(|x| *x *= scale);
    q
}

/// One batch element of the backward's inputs.
#[derive(Clone, Copy)]
struct Sequence<'a, T> {
    /// `[S, (H+2K)·D]`
    qkv: &'a [T],
    /// `[S, H·D]`
    out: &'a [T],
    /// `[S, H·D]`
    d_out: &'a [T],
    /// `[H, S]`
    stats: &'a [f32],
    starts: Starts<'a>,
    shape: Shape,
}

/// A task's tiles in f32.
struct Tiles<'s> {
    /// Scaled queries.
    q: &'s mut [f32],
    k: &'s mut [f32],
    v: &'s mut [f32],
    out: &'s mut [f32],
    d_out: &'s mut [f32],
    /// Row sums of out·d_out.
    delta: &'s mut [f32],
    /// Probabilities `[queries, keys]`.
    p: &'s mut [f32],
    /// Gradient of the scores `[queries, keys]`.
    d_s: &'s mut [f32],
    /// Gradient of q, or of k.
    first: &'s mut [f32],
    /// Gradient of v.
    second: &'s mut [f32],
}

/// Gradient of q, k, v from the log-sum-exp of the rows. Shapes as in [`crate::Operators::attention_backward`].
pub fn backward<T: Element>(
    qkv: &[T],
    starts: Starts<'_>,
    out: &[T],
    stats: &[f32],
    d_out: &[T],
    d_qkv: &mut [T],
    shape: Shape,
) {
    let (packed, width) = (shape.sequence * shape.packed(), shape.sequence * shape.width());
    let rows = shape.sequence * shape.heads;
    d_qkv.par_chunks_exact_mut(packed).enumerate().for_each(|(b, d_qkv)| {
        let sequence = Sequence {
            qkv: &qkv[b * packed..][..packed],
            out: &out[b * width..][..width],
            d_out: &d_out[b * width..][..width],
            stats: &stats[b * rows..][..rows],
            starts: starts.of(b, shape.sequence),
            shape,
        };
        d_qkv.par_chunks_mut(TILE * shape.packed()).enumerate().for_each(|(tile, d_qkv)| {
            let (d, square) = (TILE * shape.head_dim, TILE * TILE);
            let lengths = [d, d, d, d, d, TILE, square, square, d, d];
            with_scratch(lengths.iter().sum(), |scratch| {
                let [q, k, v, out, d_out, delta, p, d_s, first, second] = pieces(scratch, lengths);
                let mut tiles = Tiles { q, k, v, out, d_out, delta, p, d_s, first, second };
                for head in 0..shape.heads {
                    sequence.backward_q(&mut tiles, tile, head, d_qkv);
                }
                for kv in 0..shape.kv_heads {
                    sequence.backward_kv(&mut tiles, tile, kv, d_qkv);
                }
            });
        });
    });
}

impl<T: Element> Sequence<'_, T> {
    fn load_queries(&self, t: &mut Tiles<'_>, tile: usize, head: usize) {
        let (shape, d) = (self.shape, self.shape.head_dim);
        load_scaled_q(self.qkv, tile, head, t.q, shape);
        let d_out = load(self.d_out, shape.width(), shape.tile(tile), shape.q(head), d, t.d_out);
        let out = load(self.out, shape.width(), shape.tile(tile), shape.q(head), d, t.out);
        for ((delta, out), d_out) in t.delta.iter_mut().zip(out.chunks_exact(d)).zip(d_out.chunks_exact(d)) {
            *delta = dot(out, d_out);
        }
    }

    fn load_keys(&self, t: &mut Tiles<'_>, tile: usize, kv: usize) {
        let (shape, d) = (self.shape, self.shape.head_dim);
        load(self.qkv, shape.packed(), shape.tile(tile), shape.k(kv), d, t.k);
        load(self.qkv, shape.packed(), shape.tile(tile), shape.v(kv), d, t.v);
    }

    /// Fills `p` and `d_s` of two loaded tiles: p = e^(score − log-sum-exp), d_s = p·(d_out·vᵀ − delta).
    /// Answers the numbers of queries and keys.
    fn scores(&self, t: &mut Tiles<'_>, queries: usize, keys: usize, head: usize) -> (usize, usize) {
        let (shape, d) = (self.shape, self.shape.head_dim);
        let (tokens, columns) = (shape.tile(queries), shape.tile(keys).len());
        let rows = tokens.len();
        let (p, d_s) = (&mut t.p[..rows * columns], &mut t.d_s[..rows * columns]);
        multiply(Matrix::new(t.q, rows, d, d), Matrix::new(t.k, columns, d, d).transposed(), p, false);
        multiply(Matrix::new(t.d_out, rows, d, d), Matrix::new(t.v, columns, d, d).transposed(), d_s, false);
        let stats = &self.stats[head * shape.sequence..][tokens];
        for (i, (p, d_s)) in p.chunks_exact_mut(columns).zip(d_s.chunks_exact_mut(columns)).enumerate() {
            let (stat, delta) = (stats[i], t.delta[i]);
            let end = if keys == queries { i + 1 } else { columns };
            let hidden = self.starts.at(queries * TILE + i).saturating_sub(keys * TILE).min(end);
            vectorised!({
                for (p, d_s) in p[hidden..end].iter_mut().zip(&mut d_s[hidden..end]) {
                    *p = exp(*p - stat);
                    *d_s = *p * (*d_s - delta);
                }
            });
            for row in [p, d_s] {
                row[..hidden].fill(0.0);
                row[end..].fill(0.0);
            }
        }
        (rows, columns)
    }

    fn backward_q(&self, t: &mut Tiles<'_>, tile: usize, head: usize, d_qkv: &mut [T]) {
        let (shape, d) = (self.shape, self.shape.head_dim);
        self.load_queries(t, tile, head);
        let first = self.starts.first_tile(tile);
        for keys in first..=tile {
            self.load_keys(t, keys, head / shape.group());
            let (rows, columns) = self.scores(t, tile, keys, head);
            let d_s = Matrix::new(t.d_s, rows, columns, columns);
            multiply(d_s, Matrix::new(t.k, columns, d, d), t.first, keys > first);
        }
        let scale = shape.scale();
        t.first.iter_mut().for_each(|x| *x *= scale);
        keep(t.first, d_qkv, shape.q(head), shape);
    }

    fn backward_kv(&self, t: &mut Tiles<'_>, tile: usize, kv: usize, d_qkv: &mut [T]) {
        let (shape, d) = (self.shape, self.shape.head_dim);
        self.load_keys(t, tile, kv);
        let mut begun = false;
        for head in kv * shape.group()..(kv + 1) * shape.group() {
            // Starts never decrease: behind the first tile of queries that sees none of these keys none does.
            for queries in (tile..shape.tiles()).take_while(|queries| self.starts.first_tile(*queries) <= tile) {
                self.load_queries(t, queries, head);
                let (rows, columns) = self.scores(t, queries, tile, head);
                let d_s = Matrix::new(t.d_s, rows, columns, columns).transposed();
                let p = Matrix::new(t.p, rows, columns, columns).transposed();
                multiply(d_s, Matrix::new(t.q, rows, d, d), t.first, begun);
                multiply(p, Matrix::new(t.d_out, rows, d, d), t.second, begun);
                begun = true;
            }
        }
        keep(t.first, d_qkv, shape.k(kv), shape);
        keep(t.second, d_qkv, shape.v(kv), shape);
    }
}

/// Rounds a dense `[rows, D]` tile into the columns from `first` on of packed rows.
fn keep<T: Element>(source: &[f32], rows: &mut [T], first: usize, shape: Shape) {
    let d = shape.head_dim;
    for (row, source) in rows.chunks_exact_mut(shape.packed()).zip(source.chunks_exact(d)) {
        T::narrow_slice(source, &mut row[first..first + d]);
    }
}
