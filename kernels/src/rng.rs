//! A counter-based generator: the same bits on every backend, in any order, from (seed, counter, lane).
//!
//! Two rounds of a 64-bit finaliser (the constants are those of SplitMix64: Steele, Lea, Flood, "Fast
//! splittable pseudorandom number generators", 2014). Only integer arithmetic, so a CUDA kernel repeats it
//! exactly.

/// 64 random bits of `counter` in the sequence `seed`, lane `lane`.
#[inline]
pub const fn bits(seed: u64, counter: u64, lane: u64) -> u64 {
    mix(mix(seed ^ counter.wrapping_mul(0x9E37_79B9_7F4A_7C15)).wrapping_add(lane.wrapping_mul(0xD1B5_4A32_D192_ED03)))
}

/// A uniform number in [0, 1) with 24 bits.
#[inline]
pub const fn uniform(seed: u64, counter: u64, lane: u64) -> f32 {
    (bits(seed, counter, lane) >> 40) as f32 * (1.0 / 16_777_216.0)
}

/// A standard normal number (Box–Muller over two uniform numbers). Host only: initial weights.
pub fn normal(seed: u64, counter: u64) -> f32 {
    let u = 1.0 - (bits(seed, counter, 1) >> 11) as f64 * (1.0 / 9_007_199_254_740_992.0);
    let v = (bits(seed, counter, 2) >> 11) as f64 * (1.0 / 9_007_199_254_740_992.0);
    ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
}

#[inline]
const fn mix(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
