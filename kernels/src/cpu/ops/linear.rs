//! Products of a linear layer: forward, gradient of the input, gradient of the weight.
//!
//! One blocked product serves all three. A task owns [`ROWS`] rows of the result and walks them in tiles of
//! [`COLUMNS`] columns, each summed over the inner dimension in steps of [`DEPTH`]; operands of 16 bits are
//! widened one panel at a time. Tile sizes are constants, so the bits do not depend on the threads.

use super::matrix::{Matrix, multiply};
use super::{Element, store, with_scratch};
use crate::ops::Into;
use rayon::prelude::*;
use std::ops::Range;

/// Rows of the result that one task computes.
const ROWS: usize = 128;
/// Columns of a tile.
const COLUMNS: usize = 256;
/// Inner products are summed over this many terms before the next panels are read.
const DEPTH: usize = 1024;

/// Shape of a layer: x `[tokens, inputs]`, w `[outputs, inputs]`, y `[tokens, outputs]`.
#[derive(Clone, Copy)]
pub struct Shape {
    /// T
    pub tokens: usize,
    /// Columns of x and w.
    pub inputs: usize,
    /// Rows of w, columns of y.
    pub outputs: usize,
}

/// What is added to a product before it is rounded.
pub enum Residual<'a, T> {
    /// Nothing.
    None,
    /// What the target holds.
    Target,
    /// Another matrix of the target's shape.
    Other(&'a [T]),
}

/// `y = x·wᵀ (+ bias) (+ residual)`, rounded once.
pub fn forward<T: Element>(x: &[T], w: &[T], bias: Option<&[T]>, residual: Residual<'_, T>, y: &mut [T], shape: Shape) {
    let x = Operand { data: x, width: shape.inputs, inner_is_row: false };
    let w = Operand { data: w, width: shape.inputs, inner_is_row: false };
    product(x, w, y, shape.outputs, shape.inputs, |row, columns, tile, target| {
        if let Some(bias) = bias {
            for (t, b) in tile.iter_mut().zip(&bias[columns.clone()]) {
                *t += b.widen();
            }
        }
        match residual {
            Residual::None => T::narrow_slice(tile, target),
            Residual::Target => store(tile, target, Into::Add),
            Residual::Other(other) => {
                let start = row * shape.outputs;
                let other = &other[start + columns.start..start + columns.end];
                for ((t, o), sum) in target.iter_mut().zip(other).zip(tile) {
                    *t = T::narrow(*sum + o.widen());
                }
            }
        }
    });
}

/// `d_x (+)= d_y·w`.
pub fn backward_input<T: Element>(d_y: &[T], w: &[T], d_x: &mut [T], shape: Shape, into: Into) {
    let d_y = Operand { data: d_y, width: shape.outputs, inner_is_row: false };
    let w = Operand { data: w, width: shape.inputs, inner_is_row: true };
    product(d_y, w, d_x, shape.inputs, shape.outputs, |_, _, tile, target| store(tile, target, into));
}

/// `d_w (+)= d_yᵀ·x`.
pub fn backward_weight<T: Element, G: Element>(d_y: &[T], x: &[T], d_w: &mut [G], shape: Shape, into: Into) {
    let d_y = Operand { data: d_y, width: shape.outputs, inner_is_row: true };
    let x = Operand { data: x, width: shape.inputs, inner_is_row: true };
    product(d_y, x, d_w, shape.inputs, shape.tokens, |_, _, tile, target| store(tile, target, into));
}

/// One side of a product as it lies in memory. Its outer dimension becomes the result's rows or columns, its
/// inner one is summed over.
#[derive(Clone, Copy)]
struct Operand<'a, T> {
    data: &'a [T],
    /// Elements in a row of the memory.
    width: usize,
    /// Whether a row of the memory holds one inner index (else one outer index).
    inner_is_row: bool,
}

impl<T: Element> Operand<'_, T> {
    /// The part of the given outer and inner indices as `[outer, inner]`; `space` holds it where it has to be
    /// widened.
    fn panel<'s>(&'s self, outer: Range<usize>, inner: Range<usize>, space: &'s mut [f32]) -> Matrix<'s> {
        let (rows, columns) = if self.inner_is_row { (inner, outer) } else { (outer, inner) };
        let (height, width) = (rows.len(), columns.len());
        let matrix = if let Some(data) = T::as_f32(self.data) {
            Matrix::new(&data[rows.start * self.width + columns.start..], height, width, self.width)
        } else {
            for (row, space) in rows.zip(space.chunks_exact_mut(width)) {
                let start = row * self.width;
                T::widen_slice(&self.data[start + columns.start..start + columns.end], space);
            }
            Matrix::new(space, height, width, width)
        };
        if self.inner_is_row { matrix.transposed() } else { matrix }
    }
}

/// `out[i,j] = finish(Σ_k a[i,k]·b[j,k])`. `finish(row, columns, tile, target)` gets a piece of a row of sums
/// and the same piece of `out`, whose rows have `width` elements.
fn product<A: Element, B: Element, O: Element>(
    a: Operand<'_, A>,
    b: Operand<'_, B>,
    out: &mut [O],
    width: usize,
    depth: usize,
    finish: impl Fn(usize, Range<usize>, &mut [f32], &mut [O]) + Sync,
) {
    if out.is_empty() {
        return;
    }
    out.par_chunks_mut(ROWS * width).enumerate().for_each(|(block, out)| {
        let height = out.len() / width;
        let rows = block * ROWS..block * ROWS + height;
        with_scratch((ROWS + COLUMNS) * DEPTH + ROWS * COLUMNS, |scratch| {
            let (a_space, rest) = scratch.split_at_mut(ROWS * DEPTH);
            let (b_space, tile) = rest.split_at_mut(COLUMNS * DEPTH);
            for start in (0..width).step_by(COLUMNS) {
                let columns = start..(start + COLUMNS).min(width);
                let tile = &mut tile[..height * columns.len()];
                for k in (0..depth.max(1)).step_by(DEPTH) {
                    let inner = k..(k + DEPTH).min(depth);
                    let a = a.panel(rows.clone(), inner.clone(), a_space);
                    let b = b.panel(columns.clone(), inner, b_space);
                    multiply(a, b.transposed(), tile, k > 0);
                }
                for (i, tile) in tile.chunks_exact_mut(columns.len()).enumerate() {
                    let target = &mut out[i * width + columns.start..i * width + columns.end];
                    finish(rows.start + i, columns.clone(), tile, target);
                }
            }
        });
    });
}
