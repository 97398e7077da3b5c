//! AdamW, Sophia-G and Sophia's Hessian over a state in any of its types.
//!
//! Elements are independent except within a Q8 block, so any split at multiples of [`BLOCK`] gives the same
//! bits. Each block is widened to f32 on the stack, updated as [`crate::numeric`] says, and written back, all of it
//! compiled for wide registers: memory bounds it, or, with 16- and 8-bit moments, their random numbers.

use super::moments::{BLOCK, Gradient, Moment, Weights, Which};
use crate::numeric::vectorised;
use crate::ops::Update;
use crate::{numeric, rng};

/// Elements below which a split is not worth a task.
const TASK: usize = 64 * BLOCK;

/// How far ahead memory is asked for, in elements: what comes while a block is computed.
const AHEAD: usize = BLOCK;

/// What [`update`] works on: equal element counts.
pub struct Part<'a> {
    /// Written; read for the master.
    pub weights: Weights<'a>,
    /// Read.
    pub gradient: Gradient<'a>,
    /// Read and written.
    pub first: Moment<'a>,
    /// Read; written by AdamW.
    pub second: Moment<'a>,
    /// Weight decay applies to the elements before this one.
    pub decayed: u64,
    /// Seed of stochastic rounding.
    pub seed: u64,
    /// Number of the first element within the model.
    pub first_element: u64,
}

impl Part<'_> {
    fn halves(self, at: usize) -> (Self, Self) {
        let (weights, weights_rest) = self.weights.split_at(at);
        let (gradient, gradient_rest) = self.gradient.split_at(at);
        let (first, first_rest) = self.first.split_at(at);
        let (second, second_rest) = self.second.split_at(at);
        let left = Part { weights, gradient, first, second, ..self };
        let right = Part {
            weights: weights_rest,
            gradient: gradient_rest,
            first: first_rest,
            second: second_rest,
            decayed: self.decayed.saturating_sub(at as u64),
            seed: self.seed,
            first_element: self.first_element + at as u64,
        };
        (left, right)
    }
}

/// One update with gradients multiplied by `multiplier`.
///
/// # Panics
/// If the parts of the state differ in length.
pub fn update(update: Update, part: Part<'_>, multiplier: f32) {
    let count = part.weights.len();
    assert!(
        part.gradient.len() == count && part.first.len() == count && part.second.len() == count,
        "an update's weights, gradient and moments have one length"
    );
    split(update, part, multiplier);
}

fn split(update: Update, part: Part<'_>, multiplier: f32) {
    if part.weights.len() <= TASK {
        return sequential(update, part, multiplier);
    }
    let middle = part.weights.len().div_ceil(BLOCK).div_ceil(2) * BLOCK;
    let (left, right) = part.halves(middle);
    rayon::join(|| split(update, left, multiplier), || split(update, right, multiplier));
}

fn sequential(update: Update, mut part: Part<'_>, multiplier: f32) {
    let count = part.weights.len();
    let writes_second = matches!(update, Update::AdamW(_));
    let rounds = part.first.is_rounded() || writes_second && part.second.is_rounded();
    vectorised!({
        let (mut p, mut g, mut m, mut v) = ([0.0; BLOCK], [0.0; BLOCK], [0.0; BLOCK], [0.0; BLOCK]);
        let mut starts = [0; BLOCK];
        for start in (0..count).step_by(BLOCK) {
            let length = BLOCK.min(count - start);
            let (p, g) = (&mut p[..length], &mut g[..length]);
            let (m, v) = (&mut m[..length], &mut v[..length]);
            let ahead = start + AHEAD;
            part.weights.prefetch(ahead, length);
            part.gradient.prefetch(ahead, length);
            part.first.prefetch(ahead, length);
            part.second.prefetch(ahead, length);
            part.weights.read(start, p);
            part.gradient.read(start, multiplier, g);
            part.first.read(Which::First, start, m);
            part.second.read(Which::Second, start, v);
            let decayed = part.decayed.saturating_sub(start as u64).min(length as u64) as usize;
            elements(update, true, &mut p[..decayed], &g[..decayed], &mut m[..decayed], &mut v[..decayed]);
            elements(update, false, &mut p[decayed..], &g[decayed..], &mut m[decayed..], &mut v[decayed..]);
            if rounds {
                rng::fill_starts(part.seed, part.first_element + start as u64, &mut starts);
            }
            part.weights.write(start, p);
            part.first.write(Which::First, start, m, &starts);
            if writes_second {
                part.second.write(Which::Second, start, v, &starts);
            }
        }
    });
}

#[inline(always)]
fn elements(update: Update, decays: bool, p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
    let all = p.iter_mut().zip(g).zip(m).zip(v);
    match update {
        Update::AdamW(h) => {
            for (((p, g), m), v) in all {
                (*p, *m, *v) = numeric::adamw(&h, decays, *p, *g, *m, *v);
            }
        }
        Update::Sophia(h) => {
            for (((p, g), m), v) in all {
                (*p, *m) = numeric::sophia(&h, decays, *p, *g, *m, *v);
            }
        }
    }
}

/// `hessian = β2·hessian + (1−β2)·tokens·g²` with g the gradient times `multiplier`.
///
/// # Panics
/// If the lengths differ.
pub fn hessian(gradient: Gradient<'_>, mut hessian: Moment<'_>, beta2: f32, tokens: f32, multiplier: f32) {
    let count = hessian.len();
    assert_eq!(gradient.len(), count, "a Hessian has its gradient's length");
    if count > TASK {
        let middle = count.div_ceil(BLOCK).div_ceil(2) * BLOCK;
        let (gradient, gradient_rest) = gradient.split_at(middle);
        let (left, right) = hessian.split_at(middle);
        rayon::join(
            || self::hessian(gradient, left, beta2, tokens, multiplier),
            || self::hessian(gradient_rest, right, beta2, tokens, multiplier),
        );
        return;
    }
    vectorised!({
        let (mut g, mut h, mut starts) = ([0.0; BLOCK], [0.0; BLOCK], [0; BLOCK]);
        for start in (0..count).step_by(BLOCK) {
            let length = BLOCK.min(count - start);
            let (g, h) = (&mut g[..length], &mut h[..length]);
            gradient.read(start, multiplier, g);
            hessian.read(Which::Second, start, h);
            for ((h, g), start) in h.iter_mut().zip(g).zip(&mut starts) {
                *h = numeric::hessian(beta2, tokens, *g, *h);
                *start = rng::start(numeric::hessian_seed(*h), 0);
            }
            hessian.write(Which::Second, start, h, &starts);
        }
    });
}
