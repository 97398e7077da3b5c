//! Several ranks: the same training whatever is split over how many.

mod support;

use castor_kernels::{DType, link::Link};
use castor_runtime::{
    GroupId,
    layout::Sharding,
    policy::{AutoPolicy, DevicePolicy, HostPolicy, PlacementPolicy},
};
use castor_trainer::{
    blueprint::{Options, formats},
    engine::{StepInputs, StepResult},
    inputs::MicroBatch,
    optimizer::Optimizer,
    parity::Batch,
};
use std::path::Path;
use support::{close, engine_of_rank, options, plenty, ranks, shared};

const NOTHING: Sharding = Sharding { parameters: false, gradients: false, optimizer: false };
const ZERO1: Sharding = Sharding { optimizer: true, ..NOTHING };
const ZERO2: Sharding = Sharding { gradients: true, ..ZERO1 };
const ZERO3: Sharding = Sharding { parameters: true, ..ZERO2 };

/// Rows of a step, over all ranks: divisible by every world size tested.
const ROWS: usize = 24;

const HOST: HostPolicy = HostPolicy { parameters: true, optimizer: true };
const SOPHIA: Optimizer = Optimizer::Sophia { beta1: 0.965, beta2: 0.99, rho: 0.04, weight_decay: 0.1, every: 2 };

/// What a run leaves: its results and all weights.
type Outcome = (Vec<StepResult>, Vec<f32>);

/// Five steps of two dozen rows, each rank taking its part of the rows, in the micro-batches of `options`.
fn train(options: &Options, folder: &Path, policy: &(dyn PlacementPolicy + Sync), world: u32) -> Outcome {
    let rank = |rank: u32, link: Option<Link>| {
        let each = ROWS / world as usize;
        let mut options = options.clone();
        options.batch = each as u64 / options.micro_batches;
        let mut engine = engine_of_rank(options.clone(), folder, policy, plenty(), link);
        let mut results = Vec::new();
        for step in 0..5 {
            let batch = rows_of(folder, step, rank as usize * each, each);
            let tokens = each * batch.sequence as usize / options.micro_batches as usize;
            let micros = batch.ids.chunks(tokens).zip(batch.labels.chunks(tokens));
            let micros: Vec<_> = micros.map(|(ids, labels)| MicroBatch { ids, labels, starts: None }).collect();
            let counted = micros.iter().map(|micro| micro.counted(batch.sequence)).sum();
            let tokens = engine.total(counted).unwrap();
            results.extend(engine.step(&StepInputs { micros: &micros, tokens }).unwrap());
        }
        results.extend(engine.finish().unwrap());
        let groups = engine.groups().count() as u32;
        let weights = (0..groups).flat_map(|group| engine.read_group(GroupId(group)).unwrap()).collect();
        (results, weights)
    };
    let mut outcomes = ranks(world, options.shards, rank);
    let first = outcomes.swap_remove(0);
    for other in outcomes {
        same("ranks disagree", &first, &other);
    }
    first
}

/// Rows `first .. first + count` of step `step`, from the golden batches of three rows.
fn rows_of(folder: &Path, step: usize, first: usize, count: usize) -> Batch {
    let path = folder.join("batch.safetensors");
    let mut all = Batch { sequence: 0, ids: Vec::new(), labels: Vec::new() };
    for index in 0..ROWS / 3 {
        let batch = Batch::read_numbered(&path, (step * 2 + index) % 10).unwrap();
        all.sequence = batch.sequence;
        all.ids.extend(batch.ids);
        all.labels.extend(batch.labels);
    }
    let sequence = all.sequence as usize;
    let range = first * sequence..(first + count) * sequence;
    Batch { sequence: all.sequence, ids: all.ids[range.clone()].to_vec(), labels: all.labels[range].to_vec() }
}

#[track_caller]
fn same(what: &str, a: &Outcome, b: &Outcome) {
    assert_eq!((a.0.len(), a.1.len()), (b.0.len(), b.1.len()), "{what}: steps and weights");
    for (a, b) in a.0.iter().zip(&b.0) {
        assert_eq!(a.loss.to_bits(), b.loss.to_bits(), "{what}: loss of step {}", a.step);
        assert_eq!(a.grad_norm.to_bits(), b.grad_norm.to_bits(), "{what}: norm of step {}", a.step);
    }
    assert!(a.1.iter().zip(&b.1).all(|(a, b)| a.to_bits() == b.to_bits()), "{what}: weights");
}

/// Losses and norms of two runs that sum in different orders: within these relative errors.
#[track_caller]
fn near(what: &str, a: &Outcome, b: &Outcome, loss: f64, norm: f64) {
    assert_eq!(a.0.len(), b.0.len(), "{what}: steps");
    for (a, b) in a.0.iter().zip(&b.0) {
        let what = format!("{what}, step {}", a.step);
        assert_eq!(a.tokens, b.tokens, "{what}");
        close(&what, a.loss, b.loss, loss);
        close(&what, a.grad_norm, b.grad_norm, norm);
    }
}

/// AdamW in f32 on a step's rows, in so many micro-batches.
fn of_rows(folder: &Path, micro_batches: u64) -> Options {
    options(folder, ROWS as u64, 40, micro_batches)
}

/// L6: what is split and where it lies changes no bit.
#[test]
fn sharding_and_placement_change_no_bit() {
    let Some(folder) = shared("golden/gqa_tied") else { return };
    for (dtype, moments, optimizer) in [(DType::F32, DType::F32, None), (DType::Bf16, DType::Bf16, Some(SOPHIA))] {
        let with = |sharding: Sharding| {
            let mut options = of_rows(&folder, 1);
            options.formats = formats(dtype, dtype, moments);
            options.sharding = sharding;
            options.optimizer = optimizer.or(options.optimizer);
            options
        };
        let plain = train(&with(ZERO3), &folder, &DevicePolicy, 2);
        for (name, sharding) in [("ddp", NOTHING), ("zero1", ZERO1), ("zero2", ZERO2)] {
            let other = train(&with(sharding), &folder, &DevicePolicy, 2);
            same(&format!("{name} {dtype:?}"), &plain, &other);
        }
        let offloaded = train(&with(ZERO3), &folder, &HOST, 2);
        same(&format!("zero3 offload {dtype:?}"), &plain, &offloaded);
        let optimizer_on_host = HostPolicy { parameters: false, optimizer: true };
        let offloaded = train(&with(ZERO2), &folder, &optimizer_on_host, 2);
        same(&format!("zero2 offload {dtype:?}"), &plain, &offloaded);
        let auto = train(&with(ZERO3), &folder, &AutoPolicy::USUAL, 2);
        same(&format!("auto {dtype:?}"), &plain, &auto);
    }
}

/// Four ranks of which every two hold the same shards: the same training as four that split everything, whatever of it
/// is split, in one order of sums (L6). Ranks that disagree in a bit are found by `train`.
#[test]
fn replicas_train_as_one() {
    for case in ["mha", "gqa_tied"] {
        let Some(folder) = shared(&format!("golden/{case}")) else { return };
        let with = |sharding: Sharding, shards: Option<u32>| {
            let mut options = of_rows(&folder, 1);
            (options.sharding, options.shards) = (sharding, shards);
            options
        };
        let one = train(&with(ZERO3, None), &folder, &DevicePolicy, 1);
        let split = train(&with(ZERO3, None), &folder, &DevicePolicy, 4);
        for shards in [1, 2] {
            let pairs = train(&with(ZERO3, Some(shards)), &folder, &DevicePolicy, 4);
            near(&format!("{case} in {shards} of 4 shards"), &pairs, &split, 1e-6, 1e-5);
            near(&format!("{case} in {shards} shards and one rank"), &pairs, &one, 1e-5, 1e-4);
            let what = |name: &str| format!("{case}: {name} in {shards} shards");
            for (name, sharding) in [("zero1", ZERO1), ("zero2", ZERO2)] {
                let other = train(&with(sharding, Some(shards)), &folder, &DevicePolicy, 4);
                same(&what(name), &pairs, &other);
            }
            same(&what("host"), &pairs, &train(&with(ZERO3, Some(shards)), &folder, &HOST, 4));
        }
    }
}

/// Replicas hold the same moments in all formats, and share Hessian estimates.
#[test]
fn replicas_stay_alike_in_all_formats() {
    let Some(folder) = shared("golden/gqa_tied") else { return };
    for (moments, optimizer) in [(DType::Q8, None), (DType::Bf16, Some(SOPHIA))] {
        let mut options = of_rows(&folder, 1);
        options.formats = formats(DType::Bf16, DType::Bf16, moments);
        options.optimizer = optimizer.or(options.optimizer);
        options.shards = Some(2);
        let pairs = train(&options, &folder, &DevicePolicy, 4);
        options.sharding = ZERO1;
        same(&format!("{moments:?}"), &pairs, &train(&options, &folder, &AutoPolicy::USUAL, 4));
    }
}

/// Micro-batches whose gradients are summed over the ranks one by one: however many go together, whatever is split and
/// wherever it lives, the bits are the same, with replicas too; and the losses are those of one sum, and of one rank.
#[test]
fn micro_batches_summed_one_by_one() {
    let Some(folder) = shared("golden/mha") else { return };
    for (world, shards) in [(2, None), (4, Some(2))] {
        let mut options = of_rows(&folder, 3);
        options.shards = shards;
        let at_once = train(&options, &folder, &DevicePolicy, world);
        let one = train(&Options { shards: None, ..options.clone() }, &folder, &DevicePolicy, 1);
        options.sync_each_batch = true;
        let reference = train(&options, &folder, &DevicePolicy, world);
        for other in [&at_once, &one] {
            near(&format!("{world} ranks"), &reference, other, 1e-5, 1e-4);
        }
        for (sharding, policy) in [(ZERO2, &AutoPolicy::USUAL as &(dyn PlacementPolicy + Sync)), (ZERO3, &HOST)] {
            for round in [1, 2] {
                (options.sharding, options.round) = (sharding, round);
                let what = format!("{world} ranks, {}, rounds of {round}", policy.name());
                same(&what, &reference, &train(&options, &folder, policy, world));
            }
        }
    }
    // Without ranks to sum over it says nothing.
    let mut options = of_rows(&folder, 3);
    let plain = train(&options, &folder, &DevicePolicy, 1);
    options.sync_each_batch = true;
    same("one rank", &plain, &train(&options, &folder, &DevicePolicy, 1));
}

/// More ranks change the order of sums and nothing else.
#[test]
fn world_sizes_agree() {
    for case in ["mha", "gqa_tied"] {
        let Some(folder) = shared(&format!("golden/{case}")) else { return };
        let mut options = of_rows(&folder, 1);
        options.sharding = ZERO3;
        let one = train(&options, &folder, &DevicePolicy, 1);
        for world in [2, 3, 4, 6, 8] {
            let many = train(&options, &folder, &DevicePolicy, world);
            near(&format!("{case} on {world} ranks"), &many, &one, 1e-5, 1e-4);
        }
    }
}
