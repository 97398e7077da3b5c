//! Operators on slices: one family a file, the fast paths held to [`super::truth`].
//!
//! Laws of this folder: inputs are widened to f32 and sums taken in f32 (f64 for norms); work is split
//! between threads over rows, heads or columns, or into blocks whose size does not depend on the number of
//! threads, so that results have the same bits on any machine of one instruction set; temporary memory is
//! [`with_scratch`]'s, which after the first calls does not grow (the packing buffers inside a product are
//! `matrixmultiply`'s: it takes and frees them in each call).

pub mod attention;
pub mod attention_plain;
pub mod classify;
pub mod convert;
pub mod embed;
pub mod linear;
pub mod matrix;
pub mod moments;
pub mod norm;
pub mod reduce;
pub mod rope;
pub mod swiglu;
pub mod update;

use crate::DType;
use crate::numeric::vectorised;
use crate::ops::Into;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::cell::Cell;

/// A Rust type that stands for a [`DType`].
pub trait Typed: bytemuck::Pod + Send + Sync {
    /// The type that it stands for.
    const DTYPE: DType;
}

impl Typed for f64 {
    const DTYPE: DType = DType::F64;
}

impl Typed for f32 {
    const DTYPE: DType = DType::F32;
}

impl Typed for f16 {
    const DTYPE: DType = DType::F16;
}

impl Typed for bf16 {
    const DTYPE: DType = DType::Bf16;
}

impl Typed for i32 {
    const DTYPE: DType = DType::I32;
}

impl Typed for i16 {
    const DTYPE: DType = DType::Rem16;
}

/// A type that operators compute with: widened to f32, narrowed with round to nearest even.
pub trait Element: Typed {
    /// Exact.
    fn widen(self) -> f32;

    /// Rounds to nearest even.
    fn narrow(value: f32) -> Self;

    /// The f32 slice that this already is, where no widening is needed.
    fn as_f32(source: &[Self]) -> Option<&[f32]>;

    /// `target[i] = source[i]`, equal lengths.
    fn widen_slice(source: &[Self], target: &mut [f32]) {
        assert_eq!(source.len(), target.len());
        vectorised!({
            for (t, s) in target.iter_mut().zip(source) {
                *t = s.widen();
            }
        });
    }

    /// `target[i] = source[i]` rounded, equal lengths.
    fn narrow_slice(source: &[f32], target: &mut [Self]) {
        assert_eq!(source.len(), target.len());
        vectorised!({
            for (t, s) in target.iter_mut().zip(source) {
                *t = Self::narrow(*s);
            }
        });
    }
}

impl Element for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(value: f32) -> f32 {
        value
    }

    fn as_f32(source: &[f32]) -> Option<&[f32]> {
        Some(source)
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        crate::numeric::widen_bf16(self.to_bits())
    }

    #[inline(always)]
    fn narrow(value: f32) -> bf16 {
        bf16::from_f32(value)
    }

    fn as_f32(_: &[bf16]) -> Option<&[f32]> {
        None
    }
}

impl Element for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }

    #[inline(always)]
    fn narrow(value: f32) -> f16 {
        f16::from_f32(value)
    }

    fn as_f32(_: &[f16]) -> Option<&[f32]> {
        None
    }

    fn widen_slice(source: &[f16], target: &mut [f32]) {
        source.convert_to_f32_slice(target);
    }

    fn narrow_slice(source: &[f32], target: &mut [f16]) {
        target.convert_from_f32_slice(source);
    }
}

/// `target (+)= result`, rounded once.
#[inline]
pub fn store<T: Element>(result: &[f32], target: &mut [T], into: Into) {
    match into {
        Into::Replace => T::narrow_slice(result, target),
        Into::Add => {
            for (t, r) in target.iter_mut().zip(result) {
                *t = T::narrow(t.widen() + r);
            }
        }
    }
}

/// Lends `length` floats of this thread's temporary memory, with unspecified contents. Allocates only when
/// `length` is larger than ever before on this thread. Nested calls are correct but allocate.
pub fn with_scratch<R>(length: usize, work: impl FnOnce(&mut [f32]) -> R) -> R {
    thread_local! {
        static SCRATCH: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    }
    let mut scratch = SCRATCH.take();
    if scratch.len() < length {
        scratch.resize(length, 0.0);
    }
    let result = work(&mut scratch[..length]);
    SCRATCH.set(scratch);
    result
}

/// Σ a·b in f32, in 16 interleaved partial sums that are then added pairwise.
#[inline(always)]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut sums = [0.0f32; LANES];
    let (a_whole, a_rest) = a.as_chunks::<LANES>();
    let (b_whole, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_whole.iter().zip(b_whole) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    for (lane, (a, b)) in a_rest.iter().zip(b_rest).enumerate() {
        sums[lane] += a * b;
    }
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            sums[lane] += sums[lane + width];
        }
        width /= 2;
    }
    sums[0]
}

/// e^x within 2 units in the last place, from additions and multiplications only, so that it vectorises
/// and has the same bits whatever the C library. Results below the normal range are 0, above 2^127.5
/// infinite; NaN stays NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // x = n·ln 2 + r (Cody and Waite's reduction: ln 2 in two parts, the first with trailing zeros, so that
    // n·high is exact); e^r from its Taylor series, whose remainder for |r| ≤ ln 2 / 2 is below 1e-8.
    const SHIFT: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let shifted = x * std::f32::consts::LOG2_E + SHIFT;
    let n = shifted - SHIFT;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    let mut series = 1.0 / 5040.0;
    series = series * r + 1.0 / 720.0;
    series = series * r + 1.0 / 120.0;
    series = series * r + 1.0 / 24.0;
    series = series * r + 1.0 / 6.0;
    series = series * r + 0.5;
    series = (series * r) * r + r;
    // The low bits of `shifted` are n: moved into the exponent they are 2^n.
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3F80_0000));
    let value = (series + 1.0) * power;
    let value = if x < -87.3 { 0.0 } else { value };
    if x > 88.37 { f32::INFINITY } else { value }
}

/// 1/(1+e^-x)
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

#[cfg(test)]
mod tests;
