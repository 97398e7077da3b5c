//! Updates in every storage, held to [`crate::numeric`] element by element.

use super::super::moments::{Gradient, Moment, Weights};
use super::super::update::{self, Part};
use super::{normals, wide};
use crate::ops::{AdamW, Sophia, Update};
use crate::{numeric, rng};
use half::{bf16, f16};

const RULE: AdamW =
    AdamW { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, inv_bias1: 10.0, inv_bias2: 20.0 };
/// More than a task, and not whole blocks.
const COUNT: usize = 33_001;
const DECAYED: usize = 20_100;

/// Runs `work` with a part of f32 moments over `weights` and the given gradient.
fn step(update: Update, weights: Weights<'_>, gradient: Gradient<'_>, first: &mut [f32], second: &mut [f32]) {
    let (first, second) = (Moment::F32(first), Moment::F32(second));
    let part = Part { weights, gradient, first, second, decayed: DECAYED as u64, seed: 1, first_element: 0 };
    update::update(update, part, 0.5);
}

#[test]
fn every_kind_of_weights_follows_the_same_f32_master() {
    let start: Vec<f32> = normals(1, COUNT);
    let gradient: Vec<f16> = normals(2, COUNT);
    let (first, second) = (normals::<f32>(3, COUNT), vec![0.1f32; COUNT]);
    let run = |weights: Weights<'_>| {
        let (mut m, mut v) = (first.clone(), second.clone());
        step(Update::AdamW(RULE), weights, Gradient::F16(&gradient), &mut m, &mut v);
        (m, v)
    };
    let mut p = start.clone();
    let moments = run(Weights::F32(&mut p));
    for i in 0..COUNT {
        let g = gradient[i].to_f32() * 0.5;
        let truth = numeric::adamw(&RULE, i < DECAYED, start[i], g, first[i], second[i]);
        assert_eq!((p[i], moments.0[i], moments.1[i]), truth, "element {i}");
    }

    let brain: Vec<bf16> = p.iter().map(|x| bf16::from_bits(numeric::round_bf16(*x))).collect();
    let (mut weight, mut master) = (vec![bf16::ZERO; COUNT], start.clone());
    assert_eq!(run(Weights::Bf16Master(&mut weight, &mut master)), moments);
    assert_eq!((&weight, &master), (&brain, &p));

    let (mut weight, mut rest): (Vec<bf16>, Vec<i16>) =
        start.iter().map(|x| numeric::split(*x)).map(|(weight, rest)| (bf16::from_bits(weight), rest)).unzip();
    assert_eq!(run(Weights::Bf16Split(&mut weight, &mut rest)), moments);
    assert_eq!(weight, brain);
    assert!(weight.iter().zip(&rest).zip(&p).all(|((w, r), p)| numeric::join(w.to_bits(), *r) == *p));

    let (mut weight, mut master) = (vec![f16::ZERO; COUNT], start.clone());
    assert_eq!(run(Weights::F16Master(&mut weight, &mut master)), moments);
    assert_eq!((weight, &master), (p.iter().map(|x| f16::from_f32(*x)).collect(), &p));
}

#[test]
fn sophia_follows_its_definition_and_leaves_the_hessian() {
    let rule = Sophia { lr: 0.01, beta1: 0.96, rho: 0.04, weight_decay: 0.1 };
    let start: Vec<f32> = normals(1, COUNT);
    let gradient: Vec<bf16> = normals(2, COUNT);
    let (first, hessian) = (normals::<f32>(3, COUNT), normals::<f32>(4, COUNT));
    let (mut p, mut m, mut h) = (start.clone(), first.clone(), hessian.clone());
    step(Update::Sophia(rule), Weights::F32(&mut p), Gradient::Bf16(&gradient), &mut m, &mut h);
    assert_eq!(h, hessian);
    for i in 0..COUNT {
        let g = gradient[i].to_f32() * 0.5;
        assert_eq!((p[i], m[i]), numeric::sophia(&rule, i < DECAYED, start[i], g, first[i], hessian[i]));
    }
}

/// State with bf16 first and Q8 second moments.
#[derive(Clone, PartialEq, Debug)]
struct Small {
    p: Vec<f32>,
    first: Vec<bf16>,
    codes: Vec<u8>,
    scales: Vec<[u8; 4]>,
}

impl Small {
    fn new() -> Self {
        Small {
            p: normals(1, COUNT),
            first: normals(2, COUNT),
            codes: (0..COUNT).map(|i| rng::bits(5, i as u64, 0) as u8).collect(),
            scales: vec![0.001f32.to_ne_bytes(); COUNT.div_ceil(256)],
        }
    }

    /// Updates elements `from..to`, as the rank that owns them would.
    fn step(&mut self, gradient: &[f32], from: usize, to: usize) {
        let part = Part {
            weights: Weights::F32(&mut self.p[from..to]),
            gradient: Gradient::F32(&gradient[from..to]),
            first: Moment::Bf16(&mut self.first[from..to]),
            second: Moment::Q8(&mut self.codes[from..to], &mut self.scales[from / 256..to.div_ceil(256)]),
            decayed: DECAYED.saturating_sub(from) as u64,
            seed: 77,
            first_element: 5000 + from as u64,
        };
        update::update(Update::AdamW(RULE), part, 1.0);
    }
}

#[test]
fn stochastic_rounding_does_not_depend_on_the_sharding() {
    let gradient: Vec<f32> = normals(6, COUNT);
    let (mut whole, mut sharded) = (Small::new(), Small::new());
    whole.step(&gradient, 0, COUNT);
    let bounds = [0, 256, 256 * 70, COUNT];
    for pair in bounds.windows(2) {
        sharded.step(&gradient, pair[0], pair[1]);
    }
    assert_eq!(whole, sharded);
    // And element by element it is what the definitions say.
    let before = Small::new();
    for i in (0..COUNT).step_by(17) {
        let v = numeric::q8_second_value(before.codes[i], 0.001);
        let m = before.first[i].to_f32();
        let (p, m, _) = numeric::adamw(&RULE, i < DECAYED, before.p[i], gradient[i], m, v);
        let random = rng::bits(77, 5000 + i as u64, 0) as u16;
        assert_eq!((whole.p[i], whole.first[i].to_bits()), (p, numeric::round_bf16_stochastic(m, random)));
    }
}

#[test]
fn small_moments_drift_as_large_ones_do() {
    // A constant gradient over many steps with all 16- and 8-bit moments: without stochastic rounding an
    // average with 1 − β2 = 0.001 would stop moving. The f32 moments are the truth; the mean over the
    // elements of an unbiased rounding is off by its deviation (below 3 % of a value) / √elements.
    let count = 2048;
    let rule = AdamW { beta2: 0.999, lr: 0.0, inv_bias1: 1.0, inv_bias2: 1.0, ..RULE };
    let gradient = vec![1.0f32; count];
    let (mut m, mut v) = (vec![0.0f32; count], vec![0.0f32; count]);
    let (mut m16, mut v16) = (vec![bf16::ZERO; count], vec![bf16::ZERO; count]);
    let (mut m8, mut v8) = ((vec![0u8; count], vec![[0u8; 4]; 8]), (vec![0u8; count], vec![[0u8; 4]; 8]));
    let mut p = vec![0.0f32; count];
    for seed in 0..300 {
        let pairs = [
            (Moment::F32(&mut m), Moment::F32(&mut v)),
            (Moment::Bf16(&mut m16), Moment::Bf16(&mut v16)),
            (Moment::Q8(&mut m8.0, &mut m8.1), Moment::Q8(&mut v8.0, &mut v8.1)),
        ];
        for (first, second) in pairs {
            let (weights, gradient) = (Weights::F32(&mut p), Gradient::F32(&gradient));
            let part = Part { weights, gradient, first, second, decayed: 0, seed, first_element: 0 };
            update::update(Update::AdamW(rule), part, 1.0);
        }
    }
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let scale = |s: &[u8; 4]| f32::from_ne_bytes(*s);
    let first8: Vec<f64> =
        m8.0.iter().enumerate().map(|(i, c)| numeric::q8_first_value(*c as i8, scale(&m8.1[i / 256])) as f64).collect();
    let second8: Vec<f64> =
        v8.0.iter().enumerate().map(|(i, c)| numeric::q8_second_value(*c, scale(&v8.1[i / 256])) as f64).collect();
    for (got, truth) in [
        (mean(&wide(&m16)), m[0] as f64),
        (mean(&wide(&v16)), v[0] as f64),
        (mean(&first8), m[0] as f64),
        (mean(&second8), v[0] as f64),
    ] {
        assert!((got / truth - 1.0).abs() < 0.02, "{got} instead of {truth}");
    }
}

#[test]
fn a_block_of_8_bits_has_no_vanishing_second_moment() {
    let mut gradient = vec![1e-6f32; 256];
    gradient[0] = 1.0;
    let mut p = vec![0.0f32; 256];
    let (mut m, mut codes, mut scales) = (vec![0.0f32; 256], vec![0u8; 256], [[0u8; 4]]);
    for seed in 0..20 {
        let part = Part {
            weights: Weights::F32(&mut p),
            gradient: Gradient::F32(&gradient),
            first: Moment::F32(&mut m),
            second: Moment::Q8(&mut codes, &mut scales),
            decayed: 0,
            seed,
            first_element: 0,
        };
        update::update(Update::AdamW(AdamW { inv_bias1: 1.0, inv_bias2: 1.0, ..RULE }), part, 1.0);
    }
    // 20 steps of at most lr·(1−β1)/√(1−β2) each, whatever the rounding did.
    assert!(p.iter().all(|p| p.abs() < 20.0 * 0.01 * 4.5), "{p:?}");
}

#[test]
fn the_hessian_follows_its_definition() {
    let gradient: Vec<f16> = normals(1, COUNT);
    let start: Vec<f32> = normals::<f32>(2, COUNT).iter().map(|x| x * x).collect();
    let mut full = start.clone();
    update::hessian(Gradient::F16(&gradient), Moment::F32(&mut full), 0.99, 64.0, 0.25);
    for i in 0..COUNT {
        assert_eq!(full[i], numeric::hessian(0.99, 64.0, gradient[i].to_f32() * 0.25, start[i]));
    }
    let brain: Vec<bf16> = start.iter().map(|x| bf16::from_f32(*x)).collect();
    let mut got = brain.clone();
    update::hessian(Gradient::F16(&gradient), Moment::Bf16(&mut got), 0.99, 64.0, 0.25);
    for i in 0..COUNT {
        let result = numeric::hessian(0.99, 64.0, gradient[i].to_f32() * 0.25, brain[i].to_f32());
        let random = rng::bits(numeric::hessian_seed(result), 0, 1) as u16;
        assert_eq!(got[i].to_bits(), numeric::round_bf16_stochastic(result, random));
    }
}
