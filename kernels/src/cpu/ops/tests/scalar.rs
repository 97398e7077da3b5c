//! The scalar functions, conversions and sums.

use super::super::{Element, convert, exp, reduce};
use super::{assert_close, normals, poison, wide};
use crate::ops::control;
use half::{bf16, f16};

#[test]
fn exp_is_within_two_units_in_the_last_place() {
    for i in 0..100_000 {
        let x = -87.2 + 175.5 * (i as f32 / 100_000.0);
        let truth = (x as f64).exp();
        let error = (exp(x) as f64 - truth).abs() / truth;
        assert!(error <= 2.0 * f32::EPSILON as f64, "exp({x}) is off by {error:e}");
    }
    assert_eq!(exp(0.0), 1.0);
    assert_eq!(exp(f32::NEG_INFINITY), 0.0);
    assert_eq!(exp(-1e30), 0.0);
    assert_eq!(exp(1e30), f32::INFINITY);
    assert!(exp(f32::NAN).is_nan());
}

#[test]
fn narrowing_rounds_to_nearest_even_in_slices_and_one_by_one() {
    let values: Vec<f32> =
        (0..3000).map(|i| f32::from_bits(0x3000_0000 + (crate::rng::bits(5, i, 0) as u32 & 0x1FFF_F000))).collect();
    let (mut half, mut brain) = (poison::<f16>(3000), poison::<bf16>(3000));
    f16::narrow_slice(&values, &mut half);
    bf16::narrow_slice(&values, &mut brain);
    for (i, &x) in values.iter().enumerate() {
        assert_eq!(half[i], f16::narrow(x));
        assert_eq!(brain[i], bf16::narrow(x));
    }
    assert_eq!(bf16::narrow(1.0 + 1.0 / 256.0).to_f32(), 1.0);
    assert_eq!(bf16::narrow(1.0 + 3.0 / 256.0).to_f32(), 1.0 + 4.0 / 256.0);
}

#[test]
fn a_cast_there_and_back_is_exact() {
    let source: Vec<bf16> = normals(1, 70_001);
    let (mut middle, mut back) = (poison::<f32>(source.len()), poison::<bf16>(source.len()));
    convert::cast(&source, &mut middle);
    convert::cast(&middle, &mut back);
    assert_eq!(source, back);
}

#[test]
fn sums_have_the_truth_and_find_what_is_not_finite() {
    let values: Vec<f32> = normals(2, 30_001);
    let truth: f64 = wide(&values).iter().sum();
    // Leaves of 4096 terms: their rounding errors, relative to a partial sum of magnitude √4096.
    assert!((reduce::sum(&values) as f64 - truth).abs() < 4096.0 * 64.0 / 16_777_216.0);
    let squares: f64 = wide(&values).iter().map(|x| x * x).sum();
    // In f64 only the order differs.
    assert!((reduce::square_sum(&values) - squares).abs() < 1e-12 * squares);
    for bad in [f32::NAN, f32::INFINITY] {
        let mut values = values.clone();
        values[20_000] = bad;
        assert!(!reduce::square_sum(&values).is_finite());
    }
    assert!(reduce::square_sum(&[f32::MAX; 100]).is_finite(), "squares of large numbers fit into f64");
    let d_y: Vec<bf16> = normals(3, 700 * 131);
    let mut d_bias = poison::<f32>(131);
    reduce::bias_backward(&d_y, 700, &mut d_bias, crate::ops::Into::Replace);
    assert_close("d_bias", &d_bias, &crate::cpu::truth::bias_backward(&wide(&d_y), 131), 256);
}

#[test]
fn the_norm_closes_with_clipping_scale_and_overflow() {
    let at = |scalars: [f32; 4], i: u64| scalars[i as usize];
    // norm = sqrt(9 + 16·1)·… : slots of scaled gradients, scale 4 → norm 5/4.
    let clipped = reduce::norm_finish(&[9.0, 16.0], 0.5, 4.0);
    assert_eq!(at(clipped, control::NORM), 1.25);
    assert_eq!(at(clipped, control::FINITE), 1.0);
    assert_eq!(at(clipped, control::MULTIPLIER), (0.5 / (1.25f32 + 1e-6)) / 4.0);
    assert_eq!(at(reduce::norm_finish(&[9.0, 16.0], 0.0, 4.0), control::MULTIPLIER), 0.25);
    assert_eq!(at(reduce::norm_finish(&[9.0, 16.0], 100.0, 4.0), control::MULTIPLIER), 0.25);
    for bad in [f64::NAN, f64::INFINITY] {
        let skipped = reduce::norm_finish(&[1.0, bad], 1.0, 2.0);
        assert_eq!((at(skipped, control::MULTIPLIER), at(skipped, control::FINITE)), (0.0, 0.0));
    }
}
