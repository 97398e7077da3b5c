//! Linear, norm, activation, embedding, rotation and classifier.

use super::super::linear::{self, Residual, Shape};
use super::super::{attention, classify, embed, norm, rope, swiglu};
use super::{Rounded, assert_close, normals, plus, poison, wide};
use crate::cpu::truth;
use crate::ops::{Classify, IGNORED, Into};
use half::{bf16, f16};

/// Runs a generic check in all compute types.
macro_rules! in_all_types {
    ($name:ident, $check:ident) => {
        #[test]
        fn $name() {
            $check::<f32>();
            $check::<f16>();
            $check::<bf16>();
        }
    };
}

in_all_types!(linear_is_the_truth, check_linear);
in_all_types!(rmsnorm_is_the_truth, check_norm);
in_all_types!(swiglu_is_the_truth, check_swiglu);
in_all_types!(embedding_is_the_truth, check_embed);
in_all_types!(rope_is_the_truth_and_its_inverse, check_rope);
in_all_types!(classify_is_the_truth, check_classify);

fn check_linear<T: Rounded>() {
    // One row and one column; less than a tile; more than a tile in rows and columns; in depth.
    for (tokens, inputs, outputs) in [(1, 3, 1), (37, 70, 19), (131, 17, 300), (5, 1100, 7)] {
        let shape = Shape { tokens, inputs, outputs };
        let (x, w) = (normals::<T>(1, tokens * inputs), normals::<T>(2, outputs * inputs));
        let (bias, residual) = (normals::<T>(3, outputs), normals::<T>(4, tokens * outputs));
        let product = truth::linear(&wide(&x), &wide(&w), &[], inputs);
        let with_bias = truth::linear(&wide(&x), &wide(&w), &wide(&bias), inputs);
        let sum = plus(&with_bias, &wide(&residual));

        let mut y = poison::<T>(tokens * outputs);
        linear::forward(&x, &w, None, Residual::None, &mut y, shape);
        assert_close("x·wᵀ", &y, &product, inputs);
        let mut y = poison::<T>(tokens * outputs);
        linear::forward(&x, &w, Some(&bias), Residual::Other(&residual), &mut y, shape);
        assert_close("x·wᵀ + bias + residual", &y, &sum, inputs + 2);
        let mut y = residual.clone();
        linear::forward(&x, &w, Some(&bias), Residual::Target, &mut y, shape);
        assert_close("x·wᵀ + bias + y", &y, &sum, inputs + 2);

        let d_y = normals::<T>(5, tokens * outputs);
        let d_x_truth = truth::linear_backward_input(&wide(&d_y), &wide(&w), inputs);
        let mut d_x = poison::<T>(tokens * inputs);
        linear::backward_input(&d_y, &w, &mut d_x, shape, Into::Replace);
        assert_close("d_x", &d_x, &d_x_truth, outputs);
        let mut d_x = x.clone();
        linear::backward_input(&d_y, &w, &mut d_x, shape, Into::Add);
        assert_close("d_x + x", &d_x, &plus(&d_x_truth, &wide(&x)), outputs + 1);

        let d_w_truth = truth::linear_backward_weight(&wide(&d_y), &wide(&x), inputs, outputs);
        let mut d_w = poison::<T>(outputs * inputs);
        linear::backward_weight(&d_y, &x, &mut d_w, shape, Into::Replace);
        assert_close("d_w", &d_w, &d_w_truth, tokens);
        let before = normals::<f32>(6, outputs * inputs);
        let mut d_w = before.clone();
        linear::backward_weight(&d_y, &x, &mut d_w, shape, Into::Add);
        assert_close("f32 d_w + before", &d_w, &plus(&d_w_truth, &wide(&before)), tokens + 1);
    }
}

fn check_norm<T: Rounded>() {
    for (tokens, hidden) in [(1, 1), (37, 50), (300, 7)] {
        let (x, weight) = (normals::<T>(1, tokens * hidden), normals::<T>(2, hidden));
        let (out_truth, rstd_truth) = truth::rmsnorm(&wide(&x), &wide(&weight), 1e-5);
        let (mut out, mut rstd) = (poison::<T>(tokens * hidden), poison::<f32>(tokens));
        norm::rmsnorm(&x, &weight, &mut out, &mut rstd, 1e-5);
        assert_close("out", &out, &out_truth, hidden + 4);
        assert_close("rstd", &rstd, &rstd_truth, hidden + 4);

        let (d_out, residual) = (normals::<T>(3, tokens * hidden), normals::<T>(4, tokens * hidden));
        let (d_x_truth, d_weight_truth) =
            truth::rmsnorm_backward(&wide(&d_out), &wide(&x), &wide(&weight), &rstd_truth);
        let mut d_x = residual.clone();
        norm::rmsnorm_backward_input(&d_out, &x, &weight, &rstd, &mut d_x);
        // Each of three factors and a difference; rstd's error multiplies everything.
        assert_close("d_x", &d_x, &plus(&d_x_truth, &wide(&residual)), 2 * hidden + 12);
        let mut d_weight = poison::<T>(hidden);
        norm::rmsnorm_backward_weight(&d_out, &x, &rstd, &mut d_weight, Into::Replace);
        assert_close("d_weight", &d_weight, &d_weight_truth, tokens + hidden + 4);
        let before = normals::<f32>(5, hidden);
        let mut d_weight = before.clone();
        norm::rmsnorm_backward_weight(&d_out, &x, &rstd, &mut d_weight, Into::Add);
        let truth = plus(&d_weight_truth, &wide(&before));
        assert_close("f32 d_weight + before", &d_weight, &truth, tokens + hidden + 5);
    }
}

fn check_swiglu<T: Rounded>() {
    let (tokens, ffn) = (5, 37);
    let gate_up = normals::<T>(1, tokens * 2 * ffn);
    let truth = truth::swiglu(&wide(&gate_up), ffn);
    let mut out = poison::<T>(tokens * ffn);
    swiglu::forward(&gate_up, &mut out, ffn);
    assert_close("out", &out, &truth, 8);

    let d_out = normals::<T>(2, tokens * ffn);
    let gradient_truth = truth::swiglu_backward(&wide(&d_out), &wide(&gate_up), ffn);
    let mut apart = (gate_up.clone(), poison::<T>(tokens * ffn));
    swiglu::backward(swiglu::Target::Apart(&d_out, &mut apart.1), &mut apart.0, ffn);
    assert_close("d_gate_up", &apart.0, &gradient_truth, 12);
    assert_eq!(apart.1, out, "the forward's result again, bit for bit");
    let mut in_place = (gate_up.clone(), d_out.clone());
    swiglu::backward(swiglu::Target::InPlace(&mut in_place.1), &mut in_place.0, ffn);
    assert_eq!(in_place, apart);
    let mut nowhere = gate_up.clone();
    swiglu::backward(swiglu::Target::Nowhere(&d_out), &mut nowhere, ffn);
    assert_eq!(nowhere, apart.0);
    // Saturated gates: no NaN from infinities inside.
    let mut gate_up = vec![T::narrow(-300.0), T::narrow(300.0), T::narrow(2.0), T::narrow(2.0)];
    let mut out = poison::<T>(2);
    swiglu::forward(&gate_up, &mut out, 2);
    assert_eq!(wide(&out), [0.0, 600.0]);
    swiglu::backward(swiglu::Target::Nowhere(&[T::narrow(1.0); 2]), &mut gate_up, 2);
    assert_eq!(wide(&gate_up), [0.0, 2.0, 0.0, 300.0]);
}

/// `(order, starts)` of ids: positions sorted stably by id, and the bounds of equal ones.
pub fn buckets(ids: &[i32]) -> (Vec<i32>, Vec<i32>) {
    let mut order: Vec<i32> = (0..ids.len() as i32).collect();
    order.sort_by_key(|&t| ids[t as usize]);
    let id = |i: usize| ids[order[i] as usize];
    let mut starts: Vec<i32> = (0..ids.len()).filter(|&i| i == 0 || id(i) != id(i - 1)).map(|i| i as i32).collect();
    starts.push(ids.len() as i32);
    (order, starts)
}

fn check_embed<T: Rounded>() {
    let (tokens, hidden, vocabulary) = (37, 10, 150);
    let mut ids: Vec<i32> = (0..tokens).map(|t| (crate::rng::bits(9, t, 0) % vocabulary as u64) as i32).collect();
    ids[..8].copy_from_slice(&[0, 149, 63, 64, 63, 149, 0, 0]);
    let table = normals::<T>(1, vocabulary * hidden);
    let mut out = poison::<T>(ids.len() * hidden);
    embed::forward(&ids, &table, &mut out, hidden);
    assert_eq!(wide(&out), truth::embed(&ids, &wide(&table), hidden));

    let d_out = normals::<T>(2, ids.len() * hidden);
    let truth = truth::embed_backward(&ids, &wide(&d_out), hidden, vocabulary);
    let (order, starts) = buckets(&ids);
    let mut d_table = poison::<T>(vocabulary * hidden);
    embed::backward(&ids, &order, &starts, &d_out, &mut d_table, hidden, Into::Replace);
    assert_close("d_table", &d_table, &truth, 5);
    let before = normals::<f32>(3, vocabulary * hidden);
    let mut d_table = before.clone();
    embed::backward(&ids, &order, &starts, &d_out, &mut d_table, hidden, Into::Add);
    assert_close("f32 d_table + before", &d_table, &plus(&truth, &wide(&before)), 6);
}

fn check_rope<T: Rounded>() {
    let shape = attention::Shape { sequence: 37, heads: 6, kv_heads: 2, head_dim: 10 };
    let heads = truth::Heads { sequence: 37, heads: 6, kv_heads: 2, head_dim: 10 };
    let mut table = vec![0.0f32; 37 * 10];
    for (i, angle) in (0..37 * 5).map(|i| (i, (i / 5) as f32 / 10f32.powf((i % 5) as f32))) {
        table[i / 5 * 10 + i % 5] = angle.cos();
        table[i / 5 * 10 + 5 + i % 5] = angle.sin();
    }
    let qkv = normals::<T>(1, 2 * 37 * shape.packed());
    let documents: Vec<i32> = (0..2 * 37).map(|t| t % 37 / 10 * 10).collect();
    for (inverse, starts) in [(false, None), (true, None), (false, Some(&documents[..])), (true, Some(&documents))] {
        let (mut got, mut truth) = (qkv.clone(), wide(&qkv));
        rope::rope(&mut got, &table, starts, shape, inverse);
        truth::rope(&mut truth, &wide(&table), starts, heads, inverse);
        assert_close("rotated", &got, &truth, 3);
        rope::rope(&mut got, &table, starts, shape, !inverse);
        // Back where it came from, but for the roundings of two rotations of numbers up to √2 larger.
        for (got, was) in wide(&got).iter().zip(wide(&qkv)) {
            assert!((got - was).abs() <= 16.0 * T::UNIT, "{got} was {was}");
        }
    }
}

fn check_classify<T: Rounded>() {
    let (tokens, vocabulary) = (37, 97);
    let logits: Vec<T> = normals::<f32>(1, tokens * vocabulary).iter().map(|x| T::narrow(4.0 * x)).collect();
    let mut targets: Vec<i32> = (0..tokens as i32).map(|t| t * 5 % 97).collect();
    targets[3] = IGNORED;
    targets[36] = IGNORED;
    let (losses_truth, gradient_truth) = truth::classify(&wide(&logits), &targets, vocabulary, 0.25);
    for what in [Classify::Loss, Classify::Gradient { scale: 0.25 }] {
        let (mut got, mut losses, mut kept) = (logits.clone(), poison::<f32>(tokens), targets.clone());
        classify::classify(&mut got, &mut kept, &mut losses, vocabulary, what);
        assert_close("losses", &losses, &losses_truth, 16);
        assert_eq!(kept, targets);
        if what != Classify::Loss {
            assert_close("gradient", &got, &gradient_truth, 16);
        }
    }
    assert_eq!(classify::first_invalid(&targets, vocabulary), None);
    assert_eq!(classify::first_invalid(&[0, IGNORED, 97], 97), Some(2));
    assert_eq!(classify::first_invalid(&[-1], 97), Some(0));
}

#[test]
fn logits_that_overflow_alone_give_a_finite_loss() {
    let mut logits = [3e38f32, -3e38, 0.0];
    let (mut targets, mut losses) = ([0], [f32::NAN]);
    classify::classify(&mut logits, &mut targets, &mut losses, 3, Classify::Gradient { scale: 1.0 });
    assert_eq!((losses, logits), ([0.0], [0.0, 0.0, 0.0]));
}

#[test]
fn sampled_targets_follow_the_softmax_and_give_its_gradient() {
    let (rows, vocabulary) = (20_000, 5);
    let row = [0.5f32, -1.0, f32::NEG_INFINITY, 2.0, 1.0];
    let mut logits = row.repeat(rows);
    let mut targets = vec![1; rows];
    targets[7] = IGNORED;
    let mut losses = poison::<f32>(rows);
    let what = Classify::Sampled { scale: 0.5, seed: 11, first_token: 100 };
    classify::classify(&mut logits, &mut targets, &mut losses, vocabulary, what);
    assert_eq!((targets[7], losses[7]), (IGNORED, 0.0));
    let sum: f64 = row.iter().map(|x| (*x as f64).exp()).sum();
    for (v, x) in row.iter().enumerate() {
        let p = (*x as f64).exp() / sum;
        let count = targets.iter().filter(|&&t| t == v as i32).count() as f64;
        let deviation = (rows as f64 * p * (1.0 - p)).sqrt();
        // Five standard deviations of a binomial count (the draw is seeded: it passes always or never).
        assert!((count - rows as f64 * p).abs() <= 5.0 * deviation + 1.0, "{v}: {count} of {rows}, p {p}");
    }
    // The gradient is that of the drawn targets, and a shifted call draws the same for the same token.
    let wide_row = row.map(|x| x as f64).repeat(rows);
    let (_, gradient) = truth::classify(&wide_row, &targets, vocabulary, 0.5);
    assert_close("gradient", &logits, &gradient, 16);
    let (mut one, mut target, mut loss) = (row.to_vec(), [0], [f32::NAN]);
    let what = Classify::Sampled { scale: 0.5, seed: 11, first_token: 100 + 4321 };
    classify::classify(&mut one, &mut target, &mut loss, vocabulary, what);
    assert_eq!(target[0], targets[4321]);
}
