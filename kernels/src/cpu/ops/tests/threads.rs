//! The number of threads does not show in the bits.

use super::super::attention::{self, Shape};
use super::super::linear::{self, Residual};
use super::super::moments::{Gradient, Moment, Weights};
use super::super::{attention_plain, classify, embed, norm, reduce, swiglu, update};
use super::layers::buckets;
use super::{normals, poison};
use crate::ops::{AdamW, Classify, Into, Update};
use half::bf16;

fn with_threads(threads: usize, work: impl FnOnce() -> Vec<Vec<u8>> + Send) -> Vec<Vec<u8>> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads for a test");
    pool.install(work)
}

fn bytes<T: bytemuck::Pod>(values: &[T]) -> Vec<u8> {
    bytemuck::cast_slice(values).to_vec()
}

fn dense() -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    let shape = linear::Shape { tokens: 300, inputs: 90, outputs: 270 };
    let (x, w) = (normals::<bf16>(1, 300 * 90), normals::<bf16>(2, 270 * 90));
    let d_y = normals::<bf16>(3, 300 * 270);
    let (mut y, mut d_x, mut d_w) = (poison::<bf16>(300 * 270), poison::<bf16>(300 * 90), poison::<f32>(270 * 90));
    linear::forward(&x, &w, None, Residual::None, &mut y, shape);
    linear::backward_input(&d_y, &w, &mut d_x, shape, Into::Replace);
    linear::backward_weight(&d_y, &x, &mut d_w, shape, Into::Replace);
    let mut d_bias = poison::<f32>(270);
    reduce::bias_backward(&d_y, 300, &mut d_bias, Into::Replace);
    let weight = normals::<bf16>(4, 90);
    let (mut out, mut rstd, mut d_weight) = (poison::<bf16>(300 * 90), poison::<f32>(300), poison::<f32>(90));
    norm::rmsnorm(&x, &weight, &mut out, &mut rstd, 1e-5);
    norm::rmsnorm_backward_weight(&d_x, &x, &rstd, &mut d_weight, Into::Replace);
    norm::rmsnorm_backward_input(&out, &x, &weight, &rstd, &mut d_x);
    all.extend([bytes(&y), bytes(&d_x), bytes(&d_w), bytes(&d_bias), bytes(&out), bytes(&rstd), bytes(&d_weight)]);
    let mut gated = poison::<bf16>(300 * 135);
    swiglu::forward(&y, &mut gated, 135);
    swiglu::backward(swiglu::Target::InPlace(&mut gated), &mut y, 135);
    let (mut targets, mut losses) = (vec![5; 300], poison::<f32>(300));
    let what = Classify::Sampled { scale: 0.1, seed: 3, first_token: 0 };
    classify::classify(&mut y, &mut targets, &mut losses, 270, what);
    let ids: Vec<i32> = (0..300).map(|t| t * 7 % 111).collect();
    let (order, starts) = buckets(&ids);
    let mut d_table = poison::<f32>(200 * 90);
    embed::backward(&ids, &order, &starts, &x, &mut d_table, 90, Into::Replace);
    all.extend([bytes(&gated), bytes(&y), bytes(&targets), bytes(&losses), bytes(&d_table)]);
    all
}

fn attend() -> Vec<Vec<u8>> {
    let shape = Shape { sequence: 150, heads: 4, kv_heads: 2, head_dim: 8 };
    let (qkv, d_out) = (normals::<f32>(1, 300 * shape.packed()), normals::<f32>(2, 300 * shape.width()));
    let (mut out, mut stats) = (poison::<f32>(d_out.len()), poison::<f32>(300 * 4));
    let mut d_qkv = poison::<f32>(qkv.len());
    let starts: Vec<i32> = (0..300).map(|t| t % 150 / 70 * 70).collect();
    let starts = attention::Starts(Some(&starts));
    attention::forward(&qkv, starts, &mut out, &mut stats, &mut poison::<f32>(300 * 4), shape);
    attention::backward(&qkv, starts, &out, &stats, &d_out, &mut d_qkv, shape);
    let mut all = vec![bytes(&out), bytes(&stats), bytes(&d_qkv)];
    let mut scratch = poison::<f32>(attention_plain::backward_scratch(&shape));
    attention_plain::forward(&qkv, starts, &mut out, &mut stats, &mut scratch, shape);
    attention_plain::backward(&qkv, starts, &d_out, &mut d_qkv, &mut scratch, shape);
    all.extend([bytes(&out), bytes(&stats), bytes(&d_qkv)]);
    all
}

fn step() -> Vec<Vec<u8>> {
    let count = 70_001;
    let (mut p, gradient) = (normals::<f32>(1, count), normals::<bf16>(2, count));
    let mut first = vec![bf16::ZERO; count];
    let (mut codes, mut scales) = (vec![0u8; count], vec![[0u8; 4]; count.div_ceil(256)]);
    let sums = (reduce::sum(&p), reduce::square_sum(&gradient));
    let part = update::Part {
        weights: Weights::F32(&mut p),
        gradient: Gradient::Bf16(&gradient),
        first: Moment::Bf16(&mut first),
        second: Moment::Q8(&mut codes, &mut scales),
        decayed: 40_000,
        seed: 3,
        first_element: 1000,
    };
    let rule =
        AdamW { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, inv_bias1: 10.0, inv_bias2: 20.0 };
    update::update(Update::AdamW(rule), part, 0.5);
    vec![bytes(&p), bytes(&first), codes, bytes(&scales), bytes(&[sums.0]), bytes(&[sums.1])]
}

#[test]
fn dense_operators_have_the_same_bits_on_one_and_three_threads() {
    assert_eq!(with_threads(1, dense), with_threads(3, dense));
}

#[test]
fn attention_has_the_same_bits_on_one_and_three_threads() {
    assert_eq!(with_threads(1, attend), with_threads(3, attend));
}

#[test]
fn updates_and_sums_have_the_same_bits_on_one_and_three_threads() {
    assert_eq!(with_threads(1, step), with_threads(3, step));
}
