//! The scalar definitions that every backend repeats bit for bit: updates, rounding, split master.
//!
//! Only IEEE operations (+ − × ÷ √) in the written order, never contracted: `update.cu` is compiled with
//! `--fmad=false` and follows these lines one by one.

use crate::ops::{AdamW, Sophia};

/// f32 → bf16, ties away from zero (not to even): with this rule the remainder of [`split`] always fits in
/// 16 bits, so a split master and a full f32 master give the same weights. Infinities stay; NaN stays NaN.
#[inline]
pub const fn round_bf16(x: f32) -> u16 {
    // As if the middle were drawn: what is cut off goes up from its half on.
    round_bf16_stochastic(x, 0x8000)
}

/// The bits of infinity; the magnitude of what is not a number is above it.
pub(crate) const INFINITE: u32 = f32::INFINITY.to_bits();

/// bf16 bits → f32.
#[inline]
pub const fn widen_bf16(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// f32 master → (bf16 weight, 16-bit remainder).
#[inline]
pub const fn split(master: f32) -> (u16, i16) {
    let weight = round_bf16(master);
    (weight, master.to_bits().wrapping_sub((weight as u32) << 16) as i16)
}

/// (bf16 weight, remainder) → the exact f32 master.
#[inline]
pub const fn join(weight: u16, remainder: i16) -> f32 {
    f32::from_bits(((weight as u32) << 16).wrapping_add(remainder as i32 as u32))
}

/// f32 → bf16 by stochastic rounding with 16 random bits: up with the probability of the part cut off.
#[inline]
pub const fn round_bf16_stochastic(x: f32, random: u16) -> u16 {
    let (bits, magnitude) = (x.to_bits(), x.to_bits() & 0x7FFF_FFFF);
    let rounded = if magnitude > INFINITE {
        bits | 0x40_0000
    } else if magnitude == INFINITE {
        bits
    } else {
        bits.wrapping_add(random as u32)
    };
    (rounded >> 16) as u16
}

/// f32 → f16, to nearest even.
#[inline]
pub const fn round_f16(x: f32) -> u16 {
    half::f16::from_f32_const(x).to_bits()
}

/// f16 bits → f32.
#[inline]
pub const fn widen_f16(bits: u16) -> f32 {
    half::f16::from_bits(bits).to_f32_const()
}

/// One AdamW step of one element: `(parameter, first, second)` after it. `gradient` is unscaled and clipped.
#[inline]
pub fn adamw(h: &AdamW, decays: bool, parameter: f32, gradient: f32, first: f32, second: f32) -> (f32, f32, f32) {
    let first = h.beta1 * first + (1.0 - h.beta1) * gradient;
    let second = h.beta2 * second + ((1.0 - h.beta2) * gradient) * gradient;
    let kept = if decays { parameter * (1.0 - h.lr * h.weight_decay) } else { parameter };
    let step = (first * h.inv_bias1) / ((second * h.inv_bias2).sqrt() + h.eps);
    (kept - h.lr * step, first, second)
}

/// One Sophia-G step of one element: `(parameter, first)` after it. The ratio is at most 1 whatever the
/// Hessian is (zero, negative, not a number).
#[inline]
pub fn sophia(h: &Sophia, decays: bool, parameter: f32, gradient: f32, first: f32, hessian: f32) -> (f32, f32) {
    let first = h.beta1 * first + (1.0 - h.beta1) * gradient;
    let kept = if decays { parameter * (1.0 - h.lr * h.weight_decay) } else { parameter };
    let curvature = h.rho * hessian;
    let curvature = if curvature > 0.0 { curvature } else { 0.0 };
    let ratio = first.abs() / (curvature + 1e-15);
    let ratio = if ratio < 1.0 { ratio } else { 1.0 };
    let step = if first == 0.0 { 0.0 } else { ratio.copysign(first) };
    (kept - h.lr * step, first)
}

/// One step of Sophia's Hessian estimate of one element (Gauss-Newton-Bartlett): the estimate after it.
/// `gradient` is that of the sampled targets, unscaled, of the mean over `tokens`.
#[inline]
pub fn hessian(beta2: f32, tokens: f32, gradient: f32, hessian: f32) -> f32 {
    beta2 * hessian + ((1.0 - beta2) * tokens) * (gradient * gradient)
}

/// Seed of the stochastic rounding of [`hessian`]'s result where it is not kept in f32 (counter 0, the lane of
/// a second moment): the result's own bits, since that operator has no seed. The same whatever the sharding.
#[inline]
pub const fn hessian_seed(result: f32) -> u64 {
    result.to_bits() as u64
}

/// Lanes of [`crate::rng`] for the stochastic rounding of an element: its first and its second moment, in
/// bf16 (16 bits of [`crate::rng::bits`]).
pub const BF16_LANES: [u64; 2] = [0, 1];

/// As [`BF16_LANES`], in Q8 ([`crate::rng::uniform`]).
pub const Q8_LANES: [u64; 2] = [2, 3];

/// Scale of a Q8 block of first moments, from its largest magnitude: codes are -127..=127, linear.
#[inline]
pub fn q8_first_scale(largest: f32) -> f32 {
    largest / 127.0
}

/// First moment → Q8 code, stochastically rounded with a uniform number.
#[inline]
pub fn q8_first_code(x: f32, scale: f32, uniform: f32) -> i8 {
    let ratio = if scale > 0.0 { x / scale } else { 0.0 };
    whole_byte((ratio + uniform).floor().clamp(-127.0, 127.0)) as i8
}

/// Q8 code → first moment.
#[inline]
pub fn q8_first_value(code: i8, scale: f32) -> f32 {
    code as f32 * scale
}

/// Scale of a Q8 block of second moments, from its largest: codes are linear in the square root, code c
/// meaning (c+1)·scale. There is no code for zero in a block that is not all zero: a small second moment
/// rounded to zero would make its element's next update enormous; rounded up, it only makes it smaller.
#[inline]
pub fn q8_second_scale(largest: f32) -> f32 {
    largest.sqrt() / 256.0
}

/// Second moment (≥ 0) → Q8 code, stochastically rounded with a uniform number.
#[inline]
pub fn q8_second_code(x: f32, scale: f32, uniform: f32) -> u8 {
    let ratio = if scale > 0.0 { x.sqrt() / scale - 1.0 } else { 0.0 };
    whole_byte((ratio + uniform).floor().clamp(0.0, 255.0))
}

/// The low byte of a whole number of at most 22 bits, 0 of what is not a number: as a cast to an integer and then to a
/// byte, which vectors have no instruction for.
#[inline]
fn whole_byte(x: f32) -> u8 {
    // Beside this number the last bit of the significand stands for 1.
    const SHIFT: f32 = 12_582_912.0;
    let x = if x.is_nan() { 0.0 } else { x };
    (x + SHIFT).to_bits() as u8
}

/// Q8 code → second moment.
#[inline]
pub fn q8_second_value(code: u8, scale: f32) -> f32 {
    let root = (code as f32 + 1.0) * scale;
    root * root
}

/// The value of an expression, compiled for the widest registers of the machine: AVX-512, AVX2 or none of them. The
/// bits stay the same: Rust never contracts or reorders floating point, wider registers only do more lanes at once.
/// What the expression calls is compiled so only where it is inlined.
macro_rules! vectorised {
    ($work:expr) => {
        // Without the attribute a closure that is not short stays a function of its own, compiled for none of them.
        $crate::numeric::dispatched(
            #[inline(always)]
            || $work,
        )
    };
}
pub(crate) use vectorised;

/// What [`vectorised`] expands to.
#[inline(always)]
pub(crate) fn dispatched<R>(work: impl FnOnce() -> R) -> R {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn with_avx512<R>(work: impl FnOnce() -> R) -> R {
        work()
    }
    #[target_feature(enable = "avx2")]
    fn with_avx2<R>(work: impl FnOnce() -> R) -> R {
        work()
    }
    use std::arch::is_x86_feature_detected as has;
    if has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl") {
        // SAFETY: the processor has all that the function is compiled for, as just checked.
        unsafe { with_avx512(work) }
    } else if has!("avx2") {
        // SAFETY: the processor has AVX2, as just checked.
        unsafe { with_avx2(work) }
    } else {
        work()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_is_exact_for_every_kind_of_float() {
        let mut counter = 0;
        for exponent in 0..255u32 {
            for _ in 0..64 {
                counter += 1;
                let low = crate::rng::bits(1, counter, 0) as u32 & 0x807F_FFFF;
                for mantissa in [low, low & 0xFFFF_0000 | 0x8000, low | 0xFFFF, low & 0xFFFF_0000] {
                    let x = f32::from_bits(mantissa | exponent << 23);
                    let (weight, remainder) = split(x);
                    if widen_bf16(weight).is_finite() {
                        assert_eq!(join(weight, remainder).to_bits(), x.to_bits(), "{x:e}");
                    }
                }
            }
        }
    }

    #[test]
    fn sophia_never_moves_more_than_lr() {
        let h = Sophia { lr: 0.1, beta1: 0.9, rho: 0.04, weight_decay: 0.0 };
        for hessian in [-1.0, 0.0, 1e-30, f32::NAN, f32::INFINITY, 5.0] {
            let (p, _) = sophia(&h, false, 1.0, 3.0, 0.5, hessian);
            assert!((1.0 - p).abs() <= 0.1 + 1e-6 && p.is_finite(), "{hessian}: {p}");
        }
    }

    #[test]
    fn q8_codes_enclose_the_value_and_keep_the_largest() {
        for i in 0..2000 {
            let x = crate::rng::normal(3, i);
            let scale = q8_first_scale(4.0);
            let [low, high] = [0.0, 0.999_999_94].map(|r| q8_first_value(q8_first_code(x, scale, r), scale));
            assert!(low <= x * 1.00001 + 1e-6 && x <= high + 1e-6 && high - low <= scale * 1.001, "{x}");
            let second = x * x;
            let scale = q8_second_scale(16.0);
            let [low, high] = [0.0, 0.999_999_94].map(|r| q8_second_value(q8_second_code(second, scale, r), scale));
            // Below the smallest code there is nothing to round down to.
            assert!(low <= second * 1.00001 || low == scale * scale, "{second} {low}");
            assert!(high >= second * 0.9999 && low > 0.0, "{second} {high}");
        }
        assert_eq!(q8_first_value(q8_first_code(-4.0, q8_first_scale(4.0), 0.0), q8_first_scale(4.0)), -4.0);
        for random in [0.0, 0.5, 0.999_999_94] {
            let scale = q8_second_scale(16.0);
            assert_eq!(q8_second_value(q8_second_code(16.0, scale, random), scale), 16.0);
        }
        assert_eq!(q8_first_code(0.0, q8_first_scale(0.0), 0.9), 0);
        assert_eq!(q8_second_value(q8_second_code(0.0, 0.0, 0.9), 0.0), 0.0);
    }
}
