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

/// A standard normal number: element `counter` of [`fill_normal`].
pub fn normal(seed: u64, counter: u64) -> f32 {
    let (even, odd) = normal_pair(seed, counter / 2);
    if counter.is_multiple_of(2) { even } else { odd }
}

/// Standard normal numbers: elements `first ..` of the sequence `seed`. Host only: initial weights.
pub fn fill_normal(seed: u64, first: u64, out: &mut [f32]) {
    let head = out.len().min((first % 2) as usize);
    let (head, pairs) = out.split_at_mut(head);
    if let [value] = head {
        *value = normal(seed, first);
    }
    for (pair, values) in (first.div_ceil(2)..).zip(pairs.chunks_mut(2)) {
        let (even, odd) = normal_pair(seed, pair);
        values[0] = even;
        if let Some(value) = values.get_mut(1) {
            *value = odd;
        }
    }
}

/// Two independent normal numbers (Box–Muller) from 64 bits: 40 for the radius, which reaches 7.4 standard
/// deviations, 24 for the angle.
fn normal_pair(seed: u64, pair: u64) -> (f32, f32) {
    let bits = bits(seed, pair, 1);
    let uniform = ((bits >> 24) + 1) as f32 * (1.0 / 1_099_511_627_776.0);
    let angle = (bits & 0xFF_FFFF) as f32 * (std::f32::consts::TAU / 16_777_216.0);
    let radius = (-2.0 * uniform.ln()).sqrt();
    let (sin, cos) = angle.sin_cos();
    (radius * cos, radius * sin)
}

#[inline]
const fn mix(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
