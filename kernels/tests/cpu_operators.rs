//! The CPU backend's operators through the trait: views into slices, shared views, kept failures, control.

use castor_kernels::cpu::{Cpu, CpuOptions, truth};
use castor_kernels::ops::{AdamW, Attention, Classify, IGNORED, Into, Linear, State, Update, control};
use castor_kernels::rng::normal;
use castor_kernels::{Collectives, DType, Memory, Operators, Order, Result, Span, Stream, Tier, View};
use half::{bf16, f16};
use std::cell::Cell;

const BYTES: u64 = 1 << 20;

/// A backend and the end of what is taken of each of its arenas.
struct Bench {
    cpu: Cpu,
    taken: [Cell<u64>; 2],
}

impl Bench {
    fn new() -> Bench {
        let options = CpuOptions { device_bytes: Some(BYTES), threads: Some(2), ..CpuOptions::default() };
        let cpu = Cpu::new(options).expect("threads for a test");
        for tier in [Tier::Device, Tier::Host] {
            cpu.reserve(tier, BYTES, None).expect("a megabyte");
        }
        Bench { cpu, taken: Default::default() }
    }

    /// A view of bytes that are all ones: NaN in every floating type.
    fn view(&self, tier: Tier, dtype: DType, elements: u64) -> View {
        let taken = &self.taken[tier.index()];
        let span = Span::new(tier, taken.get(), dtype.bytes(elements));
        taken.set(span.end().next_multiple_of(256));
        self.cpu.upload(span, &vec![0xFF; span.bytes as usize]).expect("the arena is in memory");
        View { span, dtype }
    }

    fn put<T: bytemuck::Pod>(&self, dtype: DType, values: &[T]) -> View {
        self.put_on(Tier::Device, dtype, values)
    }

    fn put_on<T: bytemuck::Pod>(&self, tier: Tier, dtype: DType, values: &[T]) -> View {
        let view = self.view(tier, dtype, values.len() as u64);
        self.cpu.upload(view.span, bytemuck::cast_slice(values)).expect("the arena is in memory");
        view
    }

    fn get<T: bytemuck::Pod>(&self, view: View) -> Vec<T> {
        let mut values = vec![T::zeroed(); view.span.bytes as usize / size_of::<T>()];
        self.cpu.download(view.span, bytemuck::cast_slice_mut(&mut values)).expect("no operator failed");
        values
    }

    fn join(&self) -> Result<()> {
        self.cpu.join(self.cpu.mark(Stream::Compute))
    }
}

fn normals(seed: u64, count: usize) -> Vec<f32> {
    (0..count).map(|i| normal(seed, i as u64)).collect()
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|x| *x as f64).collect()
}

/// Sums of at most 64 products of numbers around 1 in f32: errors of 64 roundings.
fn assert_close(got: &[f32], truth: &[f64]) {
    assert_eq!(got.len(), truth.len());
    for (got, truth) in got.iter().zip(truth) {
        let allowed = 64.0 * 6e-8 * (8.0 + truth.abs());
        assert!((*got as f64 - truth).abs() <= allowed, "{got} instead of {truth}");
    }
}

#[test]
fn a_residual_may_be_the_target_itself() {
    let bench = Bench::new();
    let (x, w, y) = (normals(1, 5 * 7), normals(2, 3 * 7), normals(3, 5 * 3));
    let shape = Linear { tokens: 5, inputs: 7, outputs: 3 };
    let views = [&x, &w, &y].map(|values| bench.put(DType::F32, values));
    let apart = bench.view(Tier::Device, DType::F32, 15);
    bench.cpu.linear(views[0], views[1], None, Some(views[2]), apart, shape);
    bench.cpu.linear(views[0], views[1], None, Some(views[2]), views[2], shape);
    let product = truth::linear(&wide(&x), &wide(&w), &[], 7);
    let truth: Vec<f64> = product.iter().zip(&y).map(|(p, y)| p + *y as f64).collect();
    assert_close(&bench.get(apart), &truth);
    assert_eq!(bench.get::<f32>(apart), bench.get::<f32>(views[2]));
}

#[test]
fn the_activation_may_replace_its_gradient() {
    let bench = Bench::new();
    let (gate_up, d_out) = (normals(1, 3 * 10), normals(2, 3 * 5));
    let forward = bench.view(Tier::Device, DType::F32, 15);
    let one = bench.put(DType::F32, &gate_up);
    bench.cpu.swiglu(one, forward, 3, 5);
    let gradient = bench.put(DType::F32, &d_out);
    bench.cpu.swiglu_backward(gradient, one, Some(gradient), 3, 5);
    assert_eq!(bench.get::<f32>(gradient), bench.get::<f32>(forward));
    assert_close(&bench.get(one), &truth::swiglu_backward(&wide(&d_out), &wide(&gate_up), 5));
}

#[test]
fn attention_takes_the_scratch_that_it_asks_for() {
    let documents: Vec<i32> = (0..74).map(|t| t % 37 / 9 * 9).collect();
    for (fused, documents) in [(true, None), (false, None), (true, Some(&documents[..])), (false, Some(&documents))] {
        let bench = Bench::new();
        let starts = documents.map(|documents| bench.put(DType::I32, documents));
        let (batch, sequence, heads, kv_heads, head_dim) = (2, 37, 6, 2, 10);
        let shape = Attention { batch, sequence, heads, kv_heads, head_dim, fused, deterministic: true };
        let heads = truth::Heads { sequence: 37, heads: 6, kv_heads: 2, head_dim: 10 };
        let (qkv, d_out) = (normals(1, 74 * 100), normals(2, 74 * 60));
        let (packed, gradient) = (bench.put(DType::F32, &qkv), bench.put(DType::F32, &d_out));
        let [out, stats, d_qkv] = [74 * 60, 74 * 6, 74 * 100].map(|count| bench.view(Tier::Device, DType::F32, count));
        // Scratch in the compute type or any other: it is bytes.
        let bytes = bench.cpu.attention_scratch_bytes(shape, DType::F32, documents.is_some());
        let scratch = bench.view(Tier::Device, DType::Bf16, bytes / 2);
        bench.cpu.attention(packed, starts, out, stats, scratch, shape);
        bench.cpu.attention_backward(packed, starts, out, stats, gradient, d_qkv, scratch, shape);
        let (out_truth, stats_truth) = truth::attention(&wide(&qkv), documents, heads);
        assert_close(&bench.get(out), &out_truth);
        assert_close(&bench.get(stats), &stats_truth);
        assert_close(&bench.get(d_qkv), &truth::attention_backward(&wide(&qkv), documents, &wide(&d_out), heads));
    }
}

#[test]
fn tokens_outside_of_the_vocabulary_are_kept_for_the_next_join() {
    let bench = Bench::new();
    let table = bench.put(DType::F32, &normals(1, 12));
    let out = bench.view(Tier::Device, DType::F32, 12);
    let ids = bench.put(DType::I32, &[0, 3, 2]);
    bench.cpu.embed(ids, table, out, 3, 4, 3);
    let error = bench.join().expect_err("token 3 of a vocabulary of 3").to_string();
    assert!(error.contains("token 3 at position 1 is not within 0..3"), "{error}");

    let bench = Bench::new();
    let logits = bench.put(DType::F32, &normals(1, 12));
    let targets = bench.put(DType::I32, &[1, IGNORED, -1]);
    let losses = bench.view(Tier::Device, DType::F32, 3);
    bench.cpu.classify(logits, targets, losses, 3, 4, Classify::Gradient { scale: 1.0 });
    let error = bench.join().expect_err("target -1").to_string();
    assert!(error.contains("token -1 at position 2 is not within 0..4"), "{error}");
}

#[test]
fn types_that_no_operator_has_are_kept_for_the_next_join() {
    let bench = Bench::new();
    let view = bench.put(DType::I32, &[1, 2]);
    bench.cpu.square_sum(view, bench.view(Tier::Device, DType::F64, 1));
    let error = bench.join().expect_err("integers").to_string();
    assert!(error.contains("square_sum of type I32"), "{error}");
}

#[test]
fn zero_and_cast_reach_every_element() {
    let bench = Bench::new();
    let source = bench.put(DType::F32, &[1.0f32, -2.5, 1.0 + 1.0 / 256.0]);
    let target = bench.view(Tier::Host, DType::Bf16, 3);
    bench.cpu.cast(source, target);
    assert_eq!(bench.get::<bf16>(target), [1.0, -2.5, 1.0].map(bf16::from_f32));
    bench.cpu.zero(target);
    assert_eq!(bench.get::<u16>(target), [0; 3]);
}

/// What [`tail`] leaves, as bytes.
struct Tail {
    before: Vec<u8>,
    weights: Vec<u8>,
    moments: [Vec<u8>; 2],
    scalars: Vec<f32>,
}

/// A step's end: slots, norm, update. The state is on `tier`, its moments Q8.
fn tail(bench: &Bench, tier: Tier, gradient: &[f32]) -> Tail {
    let count = gradient.len();
    let parameters: Vec<bf16> = normals(1, count).into_iter().map(bf16::from_f32).collect();
    let gradient = bench.put_on(tier, DType::F32, gradient);
    let moment = || {
        let view = bench.view(tier, DType::Q8, count as u64);
        bench.cpu.zero(view);
        view
    };
    let state = State {
        parameter: bench.put_on(tier, DType::Bf16, &parameters),
        gradient,
        master: Some(bench.put_on(tier, DType::Rem16, &vec![0i16; count])),
        first: moment(),
        second: moment(),
        decayed: 100,
        seed: 4,
        first_element: 512,
    };
    let slots = bench.view(Tier::Device, DType::F64, 2);
    bench.cpu.zero(slots);
    bench.cpu.square_sum(gradient, slots.part(1, 1));
    let scalars = bench.view(Tier::Device, DType::F32, control::COUNT);
    bench.cpu.norm_finish(slots, 1.0, 2.0, scalars);
    let rule =
        AdamW { lr: 0.1, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1, inv_bias1: 10.0, inv_bias2: 100.0 };
    bench.cpu.update(Update::AdamW(rule), state, scalars);
    Tail {
        before: bytemuck::cast_slice(&parameters).to_vec(),
        weights: bench.get(state.parameter),
        moments: [bench.get(state.first), bench.get(state.second)],
        scalars: bench.get(scalars),
    }
}

#[test]
fn an_update_is_the_same_on_device_and_host_and_does_not_happen_after_an_overflow() {
    // A count that leaves the scales behind the codes unaligned.
    let mut gradient = normals(9, 1001);
    let bench = Bench::new();
    let device = tail(&bench, Tier::Device, &gradient);
    let host = tail(&bench, Tier::Host, &gradient);
    assert_eq!((&device.weights, &device.moments), (&host.weights, &host.moments));
    assert_ne!(device.weights, device.before, "the weights moved");
    let norm = (gradient.iter().map(|g| (*g as f64).powi(2)).sum::<f64>().sqrt() / 2.0) as f32;
    assert_eq!(device.scalars[control::NORM as usize], norm);
    assert_eq!(device.scalars[control::FINITE as usize], 1.0);

    gradient[1000] = f32::INFINITY;
    let skipped = tail(&bench, Tier::Device, &gradient);
    assert_eq!(skipped.weights, skipped.before, "the weights stay");
    assert!(skipped.moments.iter().flatten().all(|b| *b == 0), "the moments stay");
}

#[test]
fn gradients_of_16_bit_models_may_be_kept_in_f32() {
    let bench = Bench::new();
    let small = |seed, count| normals(seed, count).into_iter().map(bf16::from_f32).collect::<Vec<_>>();
    let (d_y, x) = (small(1, 6 * 4), small(2, 6 * 5));
    let (d_y_view, x_view) = (bench.put(DType::Bf16, &d_y), bench.put(DType::Bf16, &x));
    let before = normals(3, 4 * 5);
    let d_w = bench.put(DType::F32, &before);
    let shape = Linear { tokens: 6, inputs: 5, outputs: 4 };
    bench.cpu.linear_backward_weight(d_y_view, x_view, d_w, shape, Into::Add);
    let wide = |values: &[bf16]| values.iter().map(|x| x.to_f64()).collect::<Vec<_>>();
    let truth = truth::linear_backward_weight(&wide(&d_y), &wide(&x), 5, 4);
    let truth: Vec<f64> = truth.iter().zip(&before).map(|(t, b)| t + *b as f64).collect();
    assert_close(&bench.get(d_w), &truth);
}

/// A sum of two of up to 24 bits each is exact in f64, so what must come is that, rounded once. For 16 bits too: a
/// rounding to f32 before it moves no result, having more than twice their bits.
#[test]
fn an_accumulation_is_rounded_once() {
    fn check<T: bytemuck::Pod>(dtype: DType, narrow: fn(f64) -> T, widen: fn(T) -> f64) {
        let bench = Bench::new();
        let of = |seed, scale: f64| normals(seed, 1003).into_iter().map(|x| narrow(f64::from(x) * scale)).collect();
        let (source, before): (Vec<T>, Vec<T>) = (of(1, 1.0), of(2, 40.0));
        let (from, target) = (bench.put(dtype, &source), bench.put(dtype, &before));
        bench.cpu.accumulate(from, target).expect("a type with sums");
        let truth: Vec<T> = source.iter().zip(&before).map(|(s, b)| narrow(widen(*s) + widen(*b))).collect();
        assert!(
            bytemuck::cast_slice::<T, u8>(&bench.get::<T>(target)) == bytemuck::cast_slice::<T, u8>(&truth),
            "{dtype:?}"
        );
        assert!(
            bytemuck::cast_slice::<T, u8>(&bench.get::<T>(from)) == bytemuck::cast_slice::<T, u8>(&source),
            "{dtype:?}"
        );
    }
    check(DType::F32, |x| x as f32, f64::from);
    check(DType::F16, f16::from_f64, f16::to_f64);
    check(DType::Bf16, bf16::from_f64, bf16::to_f64);
}
