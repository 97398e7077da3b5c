//! The scalar definitions that every backend repeats bit for bit: updates, rounding, split master.
//!
//! Only IEEE operations (+ − × ÷ √) in the written order, never contracted: `update.cu` is compiled with
//! `--fmad=false` and follows these lines one by one.

use crate::ops::{AdamW, Sophia};

/// f32 → bf16, ties away from zero (not to even): with this rule the remainder of [`split`] always fits in
/// 16 bits, so a split master and a full f32 master give the same weights. Infinities stay; NaN stays NaN.
#[inline]
pub const fn round_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if bits & 0x7FFF_FFFF > 0x7F80_0000 {
        return ((bits >> 16) | 0x40) as u16;
    }
    if bits & 0x7F80_0000 == 0x7F80_0000 {
        return (bits >> 16) as u16;
    }
    (bits.wrapping_add(0x8000) >> 16) as u16
}

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
    let bits = x.to_bits();
    if bits & 0x7F80_0000 == 0x7F80_0000 {
        return round_bf16(x);
    }
    (bits.wrapping_add(random as u32) >> 16) as u16
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
}
