//! A counter-based generator: the same bits on every backend, in any order, from (seed, counter, lane).
//!
//! Two rounds of a 64-bit finaliser (the constants are those of SplitMix64: Steele, Lea, Flood, "Fast
//! splittable pseudorandom number generators", 2014). Only integer arithmetic, so a CUDA kernel repeats it
//! exactly.

/// 64 random bits of `counter` in the sequence `seed`, lane `lane`.
#[inline]
pub const fn bits(seed: u64, counter: u64, lane: u64) -> u64 {
    lane_bits(start(seed, counter), lane)
}

/// What all lanes of a counter have in common: the first round.
#[inline]
pub const fn start(seed: u64, counter: u64) -> u64 {
    mix(seed ^ counter.wrapping_mul(COUNTER))
}

/// What a counter is multiplied with.
const COUNTER: u64 = 0x9E37_79B9_7F4A_7C15;

/// The [`start`]s of the counters from `first` on.
#[inline(always)]
pub fn fill_starts(seed: u64, first: u64, out: &mut [u64]) {
    let mut product = first.wrapping_mul(COUNTER);
    for start in out {
        *start = mix(seed ^ product);
        product = product.wrapping_add(COUNTER);
    }
}

/// [`bits`] of a lane, from the counter's [`start`].
#[inline]
pub const fn lane_bits(start: u64, lane: u64) -> u64 {
    mix(start.wrapping_add(lane.wrapping_mul(0xD1B5_4A32_D192_ED03)))
}

/// A uniform number in [0, 1) with 24 bits.
#[inline]
pub const fn uniform(seed: u64, counter: u64, lane: u64) -> f32 {
    unit((bits(seed, counter, lane) >> 40) as u32)
}

/// The number in [0, 1) of 24 bits.
#[inline]
pub const fn unit(bits: u32) -> f32 {
    // As an i32, which vectors convert at once.
    bits as i32 as f32 * (1.0 / 16_777_216.0)
}

/// A standard normal number: element `counter` of [`fill_normal`].
pub fn normal(seed: u64, counter: u64) -> f32 {
    let mut pair = [0.0; 2];
    fill_normal(seed, counter / 2 * 2, &mut pair);
    pair[(counter % 2) as usize]
}

/// Standard normal numbers: elements `first ..` of the sequence `seed`. Host only: initial weights.
pub fn fill_normal(seed: u64, first: u64, out: &mut [f32]) {
    crate::numeric::vectorised!({
        let mut block = [0.0; 2 * PAIRS];
        let (mut at, mut begin) = (0, (first % 2) as usize);
        while at < out.len() {
            normals(seed, (first + at as u64) / 2, &mut block);
            let count = (out.len() - at).min(2 * PAIRS - begin);
            out[at..at + count].copy_from_slice(&block[begin..begin + count]);
            (at, begin) = (at + count, 0);
        }
    });
}

/// Pairs that are made at a time, each the same whatever the others are.
const PAIRS: usize = 16;

/// Independent normal numbers (Box–Muller), a pair from each 64 bits: 40 for the radius, which reaches 7.4 standard
/// deviations, 24 for the angle. Only sums, products and roots of f32, so the bits do not depend on the machine.
#[inline(always)]
fn normals(seed: u64, first_pair: u64, out: &mut [f32; 2 * PAIRS]) {
    let bits: [u64; PAIRS] = std::array::from_fn(|pair| bits(seed, first_pair + pair as u64, 1));
    let radius: [f32; PAIRS] = std::array::from_fn(|pair| {
        let uniform = ((bits[pair] >> 24) + 1) as f32 * (1.0 / 1_099_511_627_776.0);
        (-2.0 * logarithm(uniform)).max(0.0).sqrt()
    });
    for pair in 0..PAIRS {
        let (sin, cos) = sine_and_cosine((bits[pair] & 0xFF_FFFF) as u32);
        out[2 * pair] = radius[pair] * cos;
        out[2 * pair + 1] = radius[pair] * sin;
    }
}

/// ln x for a normal x above 0, to 2 units in the last place: x = 2^e·m with m around 1, and a minimax polynomial of
/// m − 1 (S. Moshier's, Cephes Mathematical Library).
#[inline(always)]
fn logarithm(x: f32) -> f32 {
    // sqrt(1/2) as bits: what lies above it and below its double has exponent 0.
    let shifted = x.to_bits().wrapping_sub(0x3F35_04F3);
    let exponent = (shifted as i32) >> 23;
    let m = f32::from_bits((shifted & 0x7F_FFFF) + 0x3F35_04F3) - 1.0;
    let mut poly = 7.037_683_6e-2;
    for factor in [
        -1.151_461e-1,
        1.167_699_9e-1,
        -1.242_014_1e-1,
        1.424_932_3e-1,
        -1.666_805_8e-1,
        2.000_071_5e-1,
        -2.499_999_4e-1,
        3.333_333e-1,
    ] {
        poly = poly * m + factor;
    }
    let exponent = exponent as f32;
    let square = m * m;
    m * square * poly + exponent * -2.121_944_4e-4 - 0.5 * square + m + exponent * 0.693_359_4
}

/// Sine and cosine of `turn`/2²⁴ of a full turn: polynomials of an eighth of a turn either way (Cephes).
#[inline(always)]
fn sine_and_cosine(turn: u32) -> (f32, f32) {
    // The nearest quarter turn, and what is left: −2²¹ to 2²¹.
    let quarter = (turn + (1 << 21)) >> 22;
    let rest = turn as i32 - (quarter << 22) as i32;
    let x = rest as f32 * (std::f32::consts::TAU / 16_777_216.0);
    let square = x * x;
    let sin = ((-1.951_529_6e-4 * square + 8.332_161e-3) * square - 1.666_665_5e-1) * square * x + x;
    let cos =
        ((2.443_315_7e-5 * square - 1.388_731_6e-3) * square + 4.166_664_6e-2) * square * square - 0.5 * square + 1.0;
    let (a, b) = if quarter & 1 == 0 { (sin, cos) } else { (cos, sin) };
    (if quarter & 2 == 0 { a } else { -a }, if (quarter + 1) & 2 == 0 { b } else { -b })
}

#[inline]
const fn mix(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithms_and_angles_against_f64() {
        for at in 0..200_000u64 {
            let x = ((bits(1, at, 0) >> 24 >> (at % 40)) + 1) as f32 * (1.0 / 1_099_511_627_776.0);
            let exact = f64::from(x).ln();
            assert!((f64::from(logarithm(x)) - exact).abs() <= 2.4e-7 * exact.abs(), "ln {x} is {exact}");
            let turn = (bits(2, at, 0) & 0xFF_FFFF) as u32;
            let angle = f64::from(turn) / 16_777_216.0 * std::f64::consts::TAU;
            let (sin, cos) = sine_and_cosine(turn);
            // Half a unit in the last place of 1, and the polynomials' error beside it.
            assert!(
                (f64::from(sin) - angle.sin()).abs() < 1.2e-7 && (f64::from(cos) - angle.cos()).abs() < 1.2e-7,
                "{turn}"
            );
        }
        assert_eq!(logarithm(1.0), 0.0);
    }

    /// Any piece of the sequence is that piece of the whole, and the whole is standard normal.
    #[test]
    fn normals_are_normal_wherever_they_begin() {
        let mut whole = vec![0.0; 400_001];
        fill_normal(7, 0, &mut whole);
        for (first, count) in [(0, 1), (1, 1), (1, 2), (31, 70), (32, 64), (333, 1000), (400_000, 1)] {
            let mut piece = vec![0.0; count];
            fill_normal(7, first as u64, &mut piece);
            assert_eq!(piece, whole[first..first + count], "{count} from {first}");
            assert_eq!(normal(7, first as u64), whole[first]);
        }
        let moment = |power: i32| whole.iter().map(|x| f64::from(*x).powi(power)).sum::<f64>() / whole.len() as f64;
        // Five standard errors of each mean: the variances are 1, 2, 15 and 96.
        for (power, exact, variance) in [(1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0f64)] {
            let error = (moment(power) - exact).abs();
            assert!(error < 5.0 * (variance / whole.len() as f64).sqrt(), "moment {power} is off by {error}");
        }
    }
}
