//! The memory of an update in all its types, read and written [`BLOCK`] elements at a time as f32.
//!
//! The arithmetic is [`crate::numeric`]'s; here is only how each type is packed.

use super::Element;
use crate::{numeric, rng};
use bytemuck::pod_read_unaligned;
use half::{bf16, f16};

/// Elements handled at once: those that share a scale in Q8.
pub const BLOCK: usize = crate::memory::Q8_BLOCK as usize;

/// Weights with what is needed to get their f32 master.
pub enum Weights<'a> {
    /// The weights are their own master.
    F32(&'a mut [f32]),
    /// bf16 weights and a full f32 master.
    Bf16Master(&'a mut [bf16], &'a mut [f32]),
    /// bf16 weights and the 16 bits that they lack.
    Bf16Split(&'a mut [bf16], &'a mut [i16]),
    /// f16 weights and a full f32 master.
    F16Master(&'a mut [f16], &'a mut [f32]),
}

impl<'a> Weights<'a> {
    /// Elements.
    pub fn len(&self) -> usize {
        match self {
            Weights::F32(w) => w.len(),
            Weights::Bf16Master(w, _) => w.len(),
            Weights::Bf16Split(w, _) => w.len(),
            Weights::F16Master(w, _) => w.len(),
        }
    }

    /// Both sides of element `at`.
    pub fn split_at(self, at: usize) -> (Self, Self) {
        macro_rules! halves {
            ($kind:path, $w:ident, $m:ident) => {{
                let ((w, w_rest), (m, m_rest)) = ($w.split_at_mut(at), $m.split_at_mut(at));
                ($kind(w, m), $kind(w_rest, m_rest))
            }};
        }
        match self {
            Weights::F32(w) => {
                let (w, rest) = w.split_at_mut(at);
                (Weights::F32(w), Weights::F32(rest))
            }
            Weights::Bf16Master(w, m) => halves!(Weights::Bf16Master, w, m),
            Weights::Bf16Split(w, m) => halves!(Weights::Bf16Split, w, m),
            Weights::F16Master(w, m) => halves!(Weights::F16Master, w, m),
        }
    }

    /// Asks for the memory of the elements from `first` on.
    #[inline(always)]
    pub fn prefetch(&self, first: usize, count: usize) {
        match self {
            Weights::F32(m) => prefetch(m, first, count),
            Weights::Bf16Master(w, m) => {
                prefetch(w, first, count);
                prefetch(m, first, count);
            }
            Weights::Bf16Split(w, r) => {
                prefetch(w, first, count);
                prefetch(r, first, count);
            }
            Weights::F16Master(w, m) => {
                prefetch(w, first, count);
                prefetch(m, first, count);
            }
        }
    }

    /// The masters from element `first` on.
    #[inline(always)]
    pub fn read(&self, first: usize, target: &mut [f32]) {
        let range = first..first + target.len();
        match self {
            Weights::F32(m) | Weights::Bf16Master(_, m) | Weights::F16Master(_, m) => {
                target.copy_from_slice(&m[range]);
            }
            Weights::Bf16Split(w, r) => {
                for ((t, w), r) in target.iter_mut().zip(&w[range.clone()]).zip(&r[range]) {
                    *t = numeric::join(w.to_bits(), *r);
                }
            }
        }
    }

    /// The other way: new masters, and the weights that follow from them.
    #[inline(always)]
    pub fn write(&mut self, first: usize, source: &[f32]) {
        let range = first..first + source.len();
        match self {
            Weights::F32(w) => w[range].copy_from_slice(source),
            Weights::Bf16Master(w, m) => {
                m[range.clone()].copy_from_slice(source);
                for (w, s) in w[range].iter_mut().zip(source) {
                    *w = bf16::from_bits(numeric::round_bf16(*s));
                }
            }
            Weights::Bf16Split(w, r) => {
                for ((w, r), s) in w[range.clone()].iter_mut().zip(&mut r[range]).zip(source) {
                    let (weight, remainder) = numeric::split(*s);
                    (*w, *r) = (bf16::from_bits(weight), remainder);
                }
            }
            Weights::F16Master(w, m) => {
                m[range.clone()].copy_from_slice(source);
                f16::narrow_slice(source, &mut w[range]);
            }
        }
    }
}

/// A gradient in any compute type.
#[derive(Clone, Copy)]
pub enum Gradient<'a> {
    /// f32
    F32(&'a [f32]),
    /// f16
    F16(&'a [f16]),
    /// bf16
    Bf16(&'a [bf16]),
}

impl Gradient<'_> {
    /// Elements.
    pub fn len(&self) -> usize {
        match self {
            Gradient::F32(g) => g.len(),
            Gradient::F16(g) => g.len(),
            Gradient::Bf16(g) => g.len(),
        }
    }

    /// Both sides of element `at`.
    pub fn split_at(self, at: usize) -> (Self, Self) {
        match self {
            Gradient::F32(g) => (Gradient::F32(&g[..at]), Gradient::F32(&g[at..])),
            Gradient::F16(g) => (Gradient::F16(&g[..at]), Gradient::F16(&g[at..])),
            Gradient::Bf16(g) => (Gradient::Bf16(&g[..at]), Gradient::Bf16(&g[at..])),
        }
    }

    /// Asks for the memory of the elements from `first` on.
    #[inline(always)]
    pub fn prefetch(&self, first: usize, count: usize) {
        match self {
            Gradient::F32(g) => prefetch(g, first, count),
            Gradient::F16(g) => prefetch(g, first, count),
            Gradient::Bf16(g) => prefetch(g, first, count),
        }
    }

    /// The gradients from element `first` on, each multiplied.
    #[inline(always)]
    pub fn read(&self, first: usize, multiplier: f32, target: &mut [f32]) {
        let range = first..first + target.len();
        match self {
            Gradient::F32(g) => target.copy_from_slice(&g[range]),
            Gradient::F16(g) => f16::widen_slice(&g[range], target),
            Gradient::Bf16(g) => {
                for (t, g) in target.iter_mut().zip(&g[range]) {
                    *t = g.widen();
                }
            }
        }
        target.iter_mut().for_each(|g| *g *= multiplier);
    }
}

/// A moment (or Hessian) in any of its types.
pub enum Moment<'a> {
    /// f32
    F32(&'a mut [f32]),
    /// bf16, stochastically rounded
    Bf16(&'a mut [bf16]),
    /// Codes, and the bytes of one f32 scale per [`BLOCK`] of them.
    Q8(&'a mut [u8], &'a mut [[u8; 4]]),
}

/// Which moment: decides the Q8 code and the lane of the random numbers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Which {
    /// First moment: signed.
    First,
    /// Second moment or Hessian: not negative.
    Second,
}

impl<'a> Moment<'a> {
    /// Elements.
    pub fn len(&self) -> usize {
        match self {
            Moment::F32(m) => m.len(),
            Moment::Bf16(m) => m.len(),
            Moment::Q8(codes, _) => codes.len(),
        }
    }

    /// Both sides of element `at`, a multiple of [`BLOCK`].
    pub fn split_at(self, at: usize) -> (Self, Self) {
        match self {
            Moment::F32(m) => {
                let (m, rest) = m.split_at_mut(at);
                (Moment::F32(m), Moment::F32(rest))
            }
            Moment::Bf16(m) => {
                let (m, rest) = m.split_at_mut(at);
                (Moment::Bf16(m), Moment::Bf16(rest))
            }
            Moment::Q8(codes, scales) => {
                let (codes, codes_rest) = codes.split_at_mut(at);
                let (scales, scales_rest) = scales.split_at_mut(at / BLOCK);
                (Moment::Q8(codes, scales), Moment::Q8(codes_rest, scales_rest))
            }
        }
    }

    /// Whether it is written in fewer bits than f32, which takes random numbers.
    pub fn is_rounded(&self) -> bool {
        !matches!(self, Moment::F32(_))
    }

    /// Asks for the memory of the elements from `first` on.
    #[inline(always)]
    pub fn prefetch(&self, first: usize, count: usize) {
        match self {
            Moment::F32(m) => prefetch(m, first, count),
            Moment::Bf16(m) => prefetch(m, first, count),
            Moment::Q8(codes, _) => prefetch(codes, first, count),
        }
    }

    /// The moments of the block that starts at element `first`, a multiple of [`BLOCK`].
    #[inline(always)]
    pub fn read(&self, which: Which, first: usize, target: &mut [f32]) {
        let range = first..first + target.len();
        match self {
            Moment::F32(m) => target.copy_from_slice(&m[range]),
            Moment::Bf16(m) => {
                for (t, m) in target.iter_mut().zip(&m[range]) {
                    *t = m.widen();
                }
            }
            Moment::Q8(codes, scales) => {
                let scale: f32 = pod_read_unaligned(&scales[first / BLOCK]);
                let all = target.iter_mut().zip(&codes[range]);
                match which {
                    Which::First => all.for_each(|(t, code)| *t = numeric::q8_first_value(*code as i8, scale)),
                    Which::Second => all.for_each(|(t, code)| *t = numeric::q8_second_value(*code, scale)),
                }
            }
        }
    }

    /// The other way; `starts` are those of [`rng::start`] that round each element (not read where nothing is rounded).
    #[inline(always)]
    pub fn write(&mut self, which: Which, first: usize, source: &[f32], starts: &[u64]) {
        let range = first..first + source.len();
        match self {
            Moment::F32(m) => m[range].copy_from_slice(source),
            Moment::Bf16(m) => {
                let random = random(starts, numeric::BF16_LANES[which as usize], 0);
                for ((m, s), random) in m[range].iter_mut().zip(source).zip(random) {
                    *m = bf16::from_bits(numeric::round_bf16_stochastic(*s, random as u16));
                }
            }
            Moment::Q8(codes, scales) => {
                let largest = largest_magnitude(source);
                let scale = match which {
                    Which::First => numeric::q8_first_scale(largest),
                    Which::Second => numeric::q8_second_scale(largest),
                };
                scales[first / BLOCK] = scale.to_ne_bytes();
                let random = random(starts, numeric::Q8_LANES[which as usize], 40);
                let all = codes[range].iter_mut().zip(source).zip(random);
                match which {
                    Which::First => all.for_each(|((code, s), random)| {
                        *code = numeric::q8_first_code(*s, scale, rng::unit(random)) as u8;
                    }),
                    Which::Second => all.for_each(|((code, s), random)| {
                        *code = numeric::q8_second_code(*s, scale, rng::unit(random));
                    }),
                }
            }
        }
    }
}

/// Asks for the cache lines of `count` elements from `first` on, as far as there are so many.
#[inline(always)]
fn prefetch<T>(memory: &[T], first: usize, count: usize) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    const LINE: usize = 64;
    let end = memory.len().min(first + count);
    for at in (first..end).step_by(LINE / size_of::<T>()) {
        // SAFETY: a prefetch reads nothing; the address is of an element.
        unsafe { _mm_prefetch::<_MM_HINT_T0>((&raw const memory[at]).cast()) };
    }
}

/// 32 random bits of a lane for each element, from bit `shift` on. In a loop of their own: one over numbers of 64 and
/// of 32 bits would take as many at a time as there are of 64 in a register.
#[inline(always)]
fn random(starts: &[u64], lane: u64, shift: u32) -> [u32; BLOCK] {
    let mut random = [0; BLOCK];
    for (random, start) in random.iter_mut().zip(starts) {
        *random = (rng::lane_bits(*start, lane) >> shift) as u32;
    }
    random
}

/// The largest |x|, 0 of none; what is not a number does not count.
#[inline(always)]
fn largest_magnitude(values: &[f32]) -> f32 {
    // Magnitudes are in the order of their bits, and integers have the same maximum in whatever order they are taken.
    let largest = values.iter().map(|x| x.to_bits() & 0x7FFF_FFFF).fold(0, u32::max);
    if largest <= numeric::INFINITE {
        return f32::from_bits(largest);
    }
    values.iter().fold(0.0, |largest, x| x.abs().max(largest))
}
