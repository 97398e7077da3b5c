//! Every storage of a state against one obvious loop, element by element and bit for bit: all types of weights,
//! gradients and moments, both rules, lengths that are not whole blocks, borders of decay, and numbers at the ends.

use super::super::moments::{BLOCK, Gradient, Moment, Weights};
use super::super::update::{self, Part};
use crate::ops::{AdamW, Sophia, Update};
use crate::{numeric, rng};
use half::{bf16, f16};

const SEED: u64 = 77;
const FIRST_ELEMENT: u64 = 5000;
const MULTIPLIER: f32 = 0.75;

const RULES: [Update; 2] = [
    Update::AdamW(AdamW {
        lr: 0.01,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        inv_bias1: 10.0,
        inv_bias2: 20.0,
    }),
    Update::Sophia(Sophia { lr: 0.01, beta1: 0.96, rho: 0.04, weight_decay: 0.1 }),
];

/// Numbers whose roundings and quotients are not like others'.
const SPECIAL: [f32; 16] = [
    0.0,
    -0.0,
    1e-45,
    -1e-40,
    f32::MIN_POSITIVE,
    1e-20,
    -1e-20,
    1.003_906_2,
    -1.003_906_2,
    65504.0,
    1e20,
    -1e30,
    f32::MAX,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
];

/// A state in one of its types.
#[derive(Clone)]
enum Stored {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    Q8(Vec<u8>, Vec<[u8; 4]>),
}

impl Stored {
    /// Normal numbers, not negative where `square`, with special ones among them if asked.
    fn new(kind: usize, seed: u64, count: usize, square: bool, special: bool) -> Stored {
        let values = (0..count).map(|i| {
            let x = if special && i % 5 == 2 {
                SPECIAL[rng::bits(seed, i as u64, 9) as usize % SPECIAL.len()]
            } else {
                rng::normal(seed, i as u64)
            };
            if square { x.abs() } else { x }
        });
        match kind {
            0 => Stored::F32(values.collect()),
            1 => Stored::Bf16(values.map(bf16::from_f32).collect()),
            2 => Stored::F16(values.map(f16::from_f32).collect()),
            _ => {
                let codes = (0..count).map(|i| rng::bits(seed, i as u64, 8) as u8).collect();
                let scale = |block| if special && block % 2 == 1 { 0.0f32 } else { 0.001 };
                Stored::Q8(codes, (0..count.div_ceil(BLOCK)).map(|block| scale(block).to_ne_bytes()).collect())
            }
        }
    }

    fn gradient(&self) -> Gradient<'_> {
        match self {
            Stored::F32(g) => Gradient::F32(g),
            Stored::F16(g) => Gradient::F16(g),
            Stored::Bf16(g) => Gradient::Bf16(g),
            Stored::Q8(..) => unreachable!("gradients have no 8 bits"),
        }
    }

    fn moment(&mut self) -> Moment<'_> {
        match self {
            Stored::F32(m) => Moment::F32(m),
            Stored::Bf16(m) => Moment::Bf16(m),
            Stored::Q8(codes, scales) => Moment::Q8(codes, scales),
            Stored::F16(_) => unreachable!("moments have no f16"),
        }
    }

    fn value(&self, i: usize, second: bool) -> f32 {
        match self {
            Stored::F32(x) => x[i],
            Stored::F16(x) => x[i].to_f32(),
            Stored::Bf16(x) => x[i].to_f32(),
            Stored::Q8(codes, scales) => {
                let scale = f32::from_ne_bytes(scales[i / BLOCK]);
                let root = (f32::from(codes[i]) + 1.0) * scale;
                if second { root * root } else { f32::from(codes[i] as i8) * scale }
            }
        }
    }

    /// The obvious way to write: `values` are all of the state's.
    fn store(&mut self, values: &[f32], second: bool) {
        let counter = |i: usize| FIRST_ELEMENT + i as u64;
        match self {
            Stored::F32(x) => x.copy_from_slice(values),
            Stored::Bf16(x) => {
                for (i, value) in values.iter().enumerate() {
                    let random = rng::bits(SEED, counter(i), u64::from(second)) as u16;
                    x[i] = rounded(*value, u32::from(random));
                }
            }
            Stored::Q8(codes, scales) => {
                for (i, value) in values.iter().enumerate() {
                    let block = &values[i / BLOCK * BLOCK..values.len().min((i / BLOCK + 1) * BLOCK)];
                    let largest = block.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
                    let scale = if second { largest.sqrt() / 256.0 } else { largest / 127.0 };
                    scales[i / BLOCK] = scale.to_ne_bytes();
                    let random = rng::bits(SEED, counter(i), 2 + u64::from(second)) >> 40;
                    let uniform = random as f32 / 16_777_216.0;
                    let ratio = if second { value.sqrt() / scale - 1.0 } else { value / scale };
                    let ratio = if scale > 0.0 { ratio } else { 0.0 };
                    let code = (ratio + uniform).floor();
                    codes[i] =
                        if second { code.clamp(0.0, 255.0) as u8 } else { code.clamp(-127.0, 127.0) as i8 as u8 };
                }
            }
            Stored::F16(_) => unreachable!("moments have no f16"),
        }
    }

    fn bits(&self) -> Vec<u32> {
        match self {
            Stored::Q8(codes, scales) => {
                let scales = scales.iter().map(|scale| same_nan(f32::from_ne_bytes(*scale)));
                codes.iter().map(|code| u32::from(*code)).chain(scales).collect()
            }
            Stored::F32(x) => x.iter().map(|x| same_nan(*x)).collect(),
            Stored::F16(x) => x.iter().map(|x| same_nan(x.to_f32())).collect(),
            Stored::Bf16(x) => x.iter().map(|x| same_nan(x.to_f32())).collect(),
        }
    }
}

/// The bits of a number; all that are none are one, for of two such operands either may go on.
fn same_nan(x: f32) -> u32 {
    if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }
}

/// bf16 after `add` to the part that is cut off.
fn rounded(x: f32, add: u32) -> bf16 {
    if x.is_nan() {
        return bf16::NAN;
    }
    let add = if x.is_infinite() { 0 } else { add };
    bf16::from_bits(((x.to_bits() + add) >> 16) as u16)
}

/// Weights with their masters in one of the four ways.
enum Kept {
    F32(Vec<f32>),
    Bf16Master(Vec<bf16>, Vec<f32>),
    Bf16Split(Vec<bf16>, Vec<i16>),
    F16Master(Vec<f16>, Vec<f32>),
}

impl Kept {
    fn new(kind: usize, masters: &[f32]) -> Kept {
        let count = masters.len();
        match kind {
            0 => Kept::F32(masters.to_vec()),
            1 => Kept::Bf16Master(vec![bf16::ZERO; count], masters.to_vec()),
            2 => {
                let parts = masters.iter().map(|x| numeric::split(*x));
                let (weights, rest) = parts.map(|(weight, rest)| (bf16::from_bits(weight), rest)).unzip();
                Kept::Bf16Split(weights, rest)
            }
            _ => Kept::F16Master(vec![f16::ZERO; count], masters.to_vec()),
        }
    }

    fn weights(&mut self) -> Weights<'_> {
        match self {
            Kept::F32(w) => Weights::F32(w),
            Kept::Bf16Master(w, m) => Weights::Bf16Master(w, m),
            Kept::Bf16Split(w, r) => Weights::Bf16Split(w, r),
            Kept::F16Master(w, m) => Weights::F16Master(w, m),
        }
    }

    /// Asserts that the masters are these, and that the weights follow from them.
    fn assert(&self, masters: &[f32], what: &str) {
        let (weights, kept): (Vec<f32>, Vec<f32>) = match self {
            Kept::F32(w) => (w.clone(), w.clone()),
            Kept::Bf16Master(w, m) => (w.iter().map(|w| w.to_f32()).collect(), m.clone()),
            Kept::Bf16Split(w, r) => {
                let joined = |(w, r): (&bf16, &i16)| ((u32::from(w.to_bits()) << 16) as i64 + i64::from(*r)) as u32;
                let kept = w.iter().zip(r).map(|pair| f32::from_bits(joined(pair))).collect();
                (w.iter().map(|w| w.to_f32()).collect(), kept)
            }
            Kept::F16Master(w, m) => (w.iter().map(|w| w.to_f32()).collect(), m.clone()),
        };
        for (i, master) in masters.iter().enumerate() {
            let weight = match self {
                Kept::F32(_) => *master,
                Kept::Bf16Master(..) | Kept::Bf16Split(..) => rounded(*master, 0x8000).to_f32(),
                Kept::F16Master(..) => f16::from_f32(*master).to_f32(),
            };
            // A master that rounds to infinity is not kept by a split.
            let holds = same_nan(kept[i]) == same_nan(*master)
                || matches!(self, Kept::Bf16Split(..)) && weight.is_infinite() && master.is_finite();
            assert!(holds, "{what}: master {i} is {} instead of {master}", kept[i]);
            assert_eq!(same_nan(weights[i]), same_nan(weight), "{what}: weight {i}");
        }
    }
}

#[test]
fn every_storage_has_the_bits_of_the_obvious_loop() {
    for (weights, gradient, first, second) in
        (0..4 * 3 * 3 * 3).map(|case| (case % 4, case / 4 % 3, case / 12 % 3, case / 36))
    {
        // Moments have no f16: their third type is the one of 8 bits.
        let moment = |kind: usize| if kind == 2 { 3 } else { kind };
        for (count, decayed, special) in
            [(1, 1, false), (300, 100, true), (769, 769, false), (769, 0, true), (256, 300, true)]
        {
            for rule in RULES {
                let what = format!("{weights} {gradient} {first} {second} of {count}, {decayed} decayed, {rule:?}");
                check(rule, [weights, gradient, moment(first), moment(second)], count, decayed, special, &what);
            }
        }
    }
}

fn check(
    rule: Update,
    [weights, gradient, first, second]: [usize; 4],
    count: usize,
    decayed: usize,
    special: bool,
    what: &str,
) {
    let Stored::F32(masters) = Stored::new(0, 1, count, false, special) else { unreachable!("asked for f32") };
    let gradient = Stored::new(gradient, 2, count, false, special);
    let mut first = Stored::new(first, 3, count, false, special);
    let mut second = Stored::new(second, 4, count, true, special);

    // The obvious loop.
    let mut kept = Kept::new(weights, &masters);
    let masters: Vec<f32> = match &kept {
        // What a split holds of a master that rounds to infinity is infinite.
        Kept::Bf16Split(w, r) => w.iter().zip(r).map(|(w, r)| numeric::join(w.to_bits(), *r)).collect(),
        _ => masters,
    };
    let all: Vec<(f32, f32, f32)> = (0..count)
        .map(|i| {
            let g = gradient.value(i, false) * MULTIPLIER;
            let (m, v) = (first.value(i, false), second.value(i, true));
            match rule {
                Update::AdamW(rule) => numeric::adamw(&rule, i < decayed, masters[i], g, m, v),
                Update::Sophia(rule) => {
                    let (p, m) = numeric::sophia(&rule, i < decayed, masters[i], g, m, v);
                    (p, m, v)
                }
            }
        })
        .collect();
    let column = |of: fn(&(f32, f32, f32)) -> f32| all.iter().map(of).collect::<Vec<f32>>();
    let (mut true_first, mut true_second) = (first.clone(), second.clone());
    true_first.store(&column(|x| x.1), false);
    if let Update::AdamW(_) = rule {
        true_second.store(&column(|x| x.2), true);
    }

    let part = Part {
        weights: kept.weights(),
        gradient: gradient.gradient(),
        first: first.moment(),
        second: second.moment(),
        decayed: decayed as u64,
        seed: SEED,
        first_element: FIRST_ELEMENT,
    };
    update::update(rule, part, MULTIPLIER);
    kept.assert(&column(|x| x.0), what);
    assert_eq!(first.bits(), true_first.bits(), "{what}: first moments");
    assert_eq!(second.bits(), true_second.bits(), "{what}: second moments");
}
