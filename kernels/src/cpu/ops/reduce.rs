//! Sums with a fixed order: over all elements, over the rows of a matrix, and the closing of the norm.

use super::{Element, store};
use crate::numeric::vectorised;
use crate::ops::{Into, control};
use rayon::prelude::*;
use std::ops::Range;

/// Elements that are summed in one go; larger sums are trees over such leaves.
const LEAF: usize = 4096;
/// Columns that one task of [`column_sums`] owns.
const COLUMNS: usize = 64;
/// Rows whose sum is finished before it is added to the total: keeps the rounding error of long sums small.
const ROWS: usize = 256;

/// Σ values in f32.
pub fn sum(values: &[f32]) -> f32 {
    tree(values, &|leaf: &[f32]| leaf.iter().sum(), &|a: f32, b: f32| a + b)
}

/// Σ x² in f64. Not finite if any element is not.
pub fn square_sum<T: Element>(x: &[T]) -> f64 {
    let leaf = |leaf: &[T]| {
        const LANES: usize = 8;
        vectorised!({
            let mut sums = [0.0f64; LANES];
            let (whole, rest) = leaf.as_chunks::<LANES>();
            for chunk in whole {
                for lane in 0..LANES {
                    let value = chunk[lane].widen() as f64;
                    sums[lane] += value * value;
                }
            }
            for (sum, x) in sums.iter_mut().zip(rest) {
                let value = x.widen() as f64;
                *sum += value * value;
            }
            sums.iter().sum()
        })
    };
    tree(x, &leaf, &|a: f64, b: f64| a + b)
}

/// The shape of the tree depends on the length alone, so the bits do not depend on the threads.
fn tree<T: Sync, S: Send>(values: &[T], leaf: &(impl Fn(&[T]) -> S + Sync), add: &(impl Fn(S, S) -> S + Sync)) -> S {
    if values.len() <= LEAF {
        return leaf(values);
    }
    let middle = values.len().div_ceil(LEAF).div_ceil(2) * LEAF;
    let (left, right) = values.split_at(middle);
    let (left, right) = rayon::join(|| tree(left, leaf, add), || tree(right, leaf, add));
    add(left, right)
}

/// `target[c] (+)= Σ_{t<rows} term(t, c)`, rows in order in blocks of [`ROWS`]. `add(t, columns, sums)` adds
/// row t's terms of these columns to `sums`.
pub fn column_sums<G: Element>(
    rows: usize,
    target: &mut [G],
    into: Into,
    add: impl Fn(usize, Range<usize>, &mut [f32]) + Sync,
) {
    target.par_chunks_mut(COLUMNS).enumerate().for_each(|(block, target)| {
        let columns = block * COLUMNS..block * COLUMNS + target.len();
        let mut total = [0.0f32; COLUMNS];
        for start in (0..rows).step_by(ROWS) {
            let mut partial = [0.0f32; COLUMNS];
            vectorised!({
                for t in start..(start + ROWS).min(rows) {
                    add(t, columns.clone(), &mut partial[..columns.len()]);
                }
            });
            for (total, partial) in total.iter_mut().zip(partial) {
                *total += partial;
            }
        }
        store(&total[..target.len()], target, into);
    });
}

/// `d_bias (+)= Σ_t d_y[t,:]`. d_y `[T, outputs]`.
pub fn bias_backward<T: Element, G: Element>(d_y: &[T], tokens: usize, d_bias: &mut [G], into: Into) {
    let outputs = d_bias.len();
    column_sums(tokens, d_bias, into, |t, columns, sums| {
        for (sum, d) in sums.iter_mut().zip(&d_y[t * outputs..][columns]) {
            *sum += d.widen();
        }
    });
}

/// Closes the norm: see [`crate::Operators::norm_finish`]. The result in the layout of [`control`].
pub fn norm_finish(slots: &[f64], max_norm: f32, loss_scale: f32) -> [f32; control::COUNT as usize] {
    let norm = (slots.iter().sum::<f64>().sqrt() / loss_scale as f64) as f32;
    let finite = norm.is_finite();
    let clip = if max_norm == 0.0 { 1.0 } else { (max_norm / (norm + 1e-6)).min(1.0) };
    let mut out = [0.0; control::COUNT as usize];
    out[control::MULTIPLIER as usize] = if finite { clip / loss_scale } else { 0.0 };
    out[control::NORM as usize] = norm;
    out[control::FINITE as usize] = if finite { 1.0 } else { 0.0 };
    out
}
