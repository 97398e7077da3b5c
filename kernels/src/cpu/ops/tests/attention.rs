//! Both attention paths against the truth and each other, grouped heads and odd lengths included.

use super::super::attention::{self, Shape, Starts};
use super::super::attention_plain as plain;
use super::{Rounded, assert_close, normals, poison, wide};
use crate::cpu::truth;
use half::{bf16, f16};

/// (batch, shape): grouped heads with an odd length; one head over three tiles; one token; wide heads that
/// fill a tile exactly.
fn cases() -> [(usize, Shape); 4] {
    let shape = |sequence, heads, kv_heads, head_dim| Shape { sequence, heads, kv_heads, head_dim };
    [(2, shape(37, 6, 2, 10)), (1, shape(150, 1, 1, 4)), (3, shape(1, 2, 1, 6)), (1, shape(64, 2, 2, 80))]
}

/// Document masks of a case: none, one document a row, documents of every length whose borders fall on, before and
/// within tiles.
fn masks(batch: usize, sequence: usize) -> Vec<Option<Vec<i32>>> {
    let documents = |lengths: &[usize]| {
        let mut starts = Vec::new();
        for row in 0..batch {
            let mut start = 0;
            for length in lengths.iter().cycle().skip(row) {
                starts.extend(std::iter::repeat_n(start as i32, (*length).min(sequence - start)));
                start += length;
                if start >= sequence {
                    break;
                }
            }
        }
        starts
    };
    vec![None, Some(vec![0; batch * sequence]), Some(documents(&[64, 3, 1, 33])), Some(documents(&[5, 1, 80]))]
}

struct Results<T> {
    out: Vec<T>,
    stats: Vec<f32>,
    d_qkv: Vec<T>,
}

fn run<T: Rounded>(qkv: &[T], starts: Option<&[i32]>, d_out: &[T], shape: Shape, fused: bool) -> Results<T> {
    let starts = Starts(starts);
    let tokens = qkv.len() / shape.packed();
    let mut results =
        Results { out: poison(tokens * shape.width()), stats: poison(tokens * shape.heads), d_qkv: poison(qkv.len()) };
    let Results { out, stats, d_qkv } = &mut results;
    if fused {
        attention::forward(qkv, starts, out, stats, &mut poison::<f32>(tokens * shape.heads), shape);
        attention::backward(qkv, starts, out, stats, d_out, d_qkv, shape);
    } else {
        plain::forward(qkv, starts, out, stats, &mut poison::<f32>(plain::forward_scratch(&shape)), shape);
        plain::backward(qkv, starts, d_out, d_qkv, &mut poison::<f32>(plain::backward_scratch(&shape)), shape);
    }
    results
}

fn check<T: Rounded>() {
    let cases = cases().into_iter();
    for (batch, shape, starts) in cases.flat_map(|(b, s)| masks(b, s.sequence).into_iter().map(move |m| (b, s, m))) {
        let starts = starts.as_deref();
        let Shape { sequence, heads, kv_heads, head_dim } = shape;
        let truth_shape = truth::Heads { sequence, heads, kv_heads, head_dim };
        let tokens = batch * sequence;
        let qkv = normals::<T>(1, tokens * shape.packed());
        let d_out = normals::<T>(2, tokens * shape.width());
        let (out, stats) = truth::attention(&wide(&qkv), starts, truth_shape);
        let d_qkv = truth::attention_backward(&wide(&qkv), starts, &wide(&d_out), truth_shape);
        // Sums over D and S, and the exponential of a score of magnitude 4 whose error it multiplies.
        let operations = head_dim + sequence + 8;
        for fused in [true, false] {
            let got = run(&qkv, starts, &d_out, shape, fused);
            let name = if fused { "fused" } else { "plain" };
            assert_close(&format!("{name} out"), &got.out, &out, operations);
            assert_close(&format!("{name} stats"), &got.stats, &stats, operations);
            // The fused backward takes Σ out·d_out from the rounded output. Its D rounding errors of random
            // sign make an error of √D roundings, which 1/√D then scales: one rounding of the largest.
            let rounded = if fused { (T::UNIT / f32::UNIT / 4.0) as usize } else { 0 };
            assert_close(&format!("{name} d_qkv"), &got.d_qkv, &d_qkv, operations + rounded);
        }
    }
}

#[test]
fn both_paths_are_the_truth_in_f32() {
    check::<f32>();
}

#[test]
fn both_paths_are_the_truth_in_f16() {
    check::<f16>();
}

#[test]
fn both_paths_are_the_truth_in_bf16() {
    check::<bf16>();
}

/// A mask that hides nothing changes no bit.
#[test]
fn one_document_a_row_is_no_mask() {
    for (batch, shape) in cases() {
        let tokens = batch * shape.sequence;
        let (qkv, d_out) = (normals::<f32>(1, tokens * shape.packed()), normals::<f32>(2, tokens * shape.width()));
        for fused in [true, false] {
            let [with, without] =
                [Some(&vec![0; tokens][..]), None].map(|starts| run(&qkv, starts, &d_out, shape, fused));
            assert_eq!((with.out, with.stats, with.d_qkv), (without.out, without.stats, without.d_qkv));
        }
    }
}

#[test]
fn large_scores_do_not_overflow() {
    let shape = Shape { sequence: 70, heads: 2, kv_heads: 1, head_dim: 8 };
    // Scores in the thousands: without the running maximum every power would be infinite.
    let qkv: Vec<f32> = normals::<f32>(3, 70 * shape.packed()).iter().map(|x| 60.0 * x).collect();
    let d_out = normals::<f32>(4, 70 * shape.width());
    for fused in [true, false] {
        let got = run(&qkv, None, &d_out, shape, fused);
        assert!(got.out.iter().chain(&got.stats).chain(&got.d_qkv).all(|x| x.is_finite()), "fused {fused}");
    }
}
