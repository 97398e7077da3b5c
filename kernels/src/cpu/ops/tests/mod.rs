//! The operators against the f64 truth, in every compute type, on odd sizes and poisoned outputs.

mod attention;
mod layers;
mod scalar;
mod storages;
mod threads;
mod update;

use super::Element;
use half::{bf16, f16};

/// A compute type with its unit roundoff: the largest relative error of one rounding.
trait Rounded: Element + PartialEq + std::fmt::Debug {
    const UNIT: f64;
}

impl Rounded for f32 {
    const UNIT: f64 = 1.0 / 16_777_216.0;
}

impl Rounded for f16 {
    const UNIT: f64 = 1.0 / 2048.0;
}

impl Rounded for bf16 {
    const UNIT: f64 = 1.0 / 256.0;
}

/// `count` normal numbers of type `T`.
fn normals<T: Element>(seed: u64, count: usize) -> Vec<T> {
    (0..count).map(|i| T::narrow(crate::rng::normal(seed, i as u64))).collect()
}

/// An output full of NaN: whoever reads it, or leaves a hole, is found out.
fn poison<T: Element>(count: usize) -> Vec<T> {
    vec![T::narrow(f32::NAN); count]
}

fn wide<T: Element>(values: &[T]) -> Vec<f64> {
    values.iter().map(|x| x.widen() as f64).collect()
}

/// Asserts |got − truth| ≤ unit·|truth| + operations·2⁻²⁴·largest: one rounding of the result to its type,
/// and f32 roundings before it, of which there are `operations` in the worst case, each relative to numbers no
/// larger than a few times the largest result (which the factor 4 allows for).
#[track_caller]
fn assert_close<T: Rounded>(what: &str, got: &[T], truth: &[f64], operations: usize) {
    assert_eq!(got.len(), truth.len(), "{what}: lengths");
    let largest = truth.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    let inner = 4.0 * operations as f64 * f32::UNIT * largest;
    for (i, (got, truth)) in got.iter().zip(truth).enumerate() {
        let error = (got.widen() as f64 - truth).abs();
        let allowed = T::UNIT * truth.abs() * 1.01 + inner;
        assert!(error <= allowed, "{what}[{i}]: {got:?} instead of {truth}, {error:e} > {allowed:e}");
    }
}

/// Element by element sum.
fn plus(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}
