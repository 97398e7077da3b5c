//! Cross entropy over the vocabulary, its gradient in place, and targets drawn from the model itself.

use super::{Element, exp, with_scratch};
use crate::numeric::vectorised;
use crate::ops::{Classify, IGNORED};
use crate::rng;
use rayon::prelude::*;

/// First row whose target is neither a token nor [`IGNORED`].
pub fn first_invalid(targets: &[i32], vocabulary: usize) -> Option<usize> {
    targets.iter().position(|&t| t != IGNORED && usize::try_from(t).map_or(true, |t| t >= vocabulary))
}

/// See [`crate::Operators::classify`]. logits `[T,V]`, targets and losses `[T]`. A target that is no token
/// counts as [`IGNORED`].
pub fn classify<T: Element>(
    logits: &mut [T],
    targets: &mut [i32],
    losses: &mut [f32],
    vocabulary: usize,
    what: Classify,
) {
    let rows = logits.par_chunks_exact_mut(vocabulary).zip(targets).zip(losses).enumerate();
    rows.for_each(|(row, ((logits, target), loss))| {
        if usize::try_from(*target).map_or(true, |t| t >= vocabulary) {
            *loss = 0.0;
            if what != Classify::Loss {
                logits.fill(T::zeroed());
            }
            return;
        }
        with_scratch(vocabulary, |powers| {
            T::widen_slice(logits, powers);
            let max = powers.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            vectorised!({
                for x in powers.iter_mut() {
                    *x = exp(*x - max);
                }
            });
            if let Classify::Sampled { seed, first_token, .. } = what {
                *target = draw(powers, rng::uniform(seed, first_token + row as u64, 0)) as i32;
            }
            let target = *target as usize;
            let sum = vectorised!(interleaved_sum(powers));
            *loss = sum.ln() - (logits[target].widen() - max);
            if let Classify::Gradient { scale } | Classify::Sampled { scale, .. } = what {
                let factor = scale / sum;
                for x in powers.iter_mut() {
                    *x *= factor;
                }
                powers[target] -= scale;
                T::narrow_slice(powers, logits);
            }
        });
    });
}

/// The first token whose cumulative power exceeds `uniform` of the total, summed in order of the vocabulary;
/// the last one with any power where rounding leaves none.
fn draw(powers: &[f32], uniform: f32) -> usize {
    let total: f32 = powers.iter().sum();
    let goal = uniform * total;
    let mut running = 0.0;
    for (token, power) in powers.iter().enumerate() {
        running += power;
        if running > goal {
            return token;
        }
    }
    powers.iter().rposition(|&p| p > 0.0).unwrap_or(0)
}

/// Σ values in 16 interleaved partial sums: a vocabulary of 10⁵ summed one by one would lose three digits.
#[inline(always)]
fn interleaved_sum(values: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut sums = [0.0f32; LANES];
    let (whole, rest) = values.as_chunks::<LANES>();
    for chunk in whole {
        for lane in 0..LANES {
            sums[lane] += chunk[lane];
        }
    }
    for (sum, value) in sums.iter_mut().zip(rest) {
        *sum += value;
    }
    sums.iter().sum()
}
