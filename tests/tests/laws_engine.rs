//! What placement may not change, on the real engine: the same bits at one number of ranks whatever the plugin,
//! policy, budgets, prefetch, tiers and recompute level (L6), the same losses at every number of ranks, and peaks
//! and bytes per link as the plan said (L1, L2, L4).

use castor_kernels::{DType, Tier};
use castor_runtime::GroupId;
use castor_runtime::plan::Budgets;
use castor_runtime::plan::Rehearse;
use castor_runtime::policy::{AutoPolicy, DevicePolicy, HostPolicy, PlacementPolicy, StaticPolicy};
use castor_tests::engines::{ADAMW, MICROS, ROWS, Rows, Run, SHARDINGS, SOPHIA, Setup, options, plenty};
use castor_trainer::activations::Keep;
use castor_trainer::blueprint::formats;
use castor_trainer::engine::StepInputs;
use castor_trainer::optimizer::{Clip, Optimizer};
use castor_trainer::rates::Rates;
use std::path::Path;

/// About one block's weights.
const SMALL: u64 = 80 << 10;
const STEPS: u64 = 4;
/// Sums over ranks in another order make losses differ by less than this over a few steps.
const TOLERANCE: f64 = 1e-5;

const HOST: HostPolicy = HostPolicy { parameters: true, optimizer: true };
const OPTIMIZER_ON_HOST: HostPolicy = HostPolicy { parameters: false, optimizer: true };
const HALF: StaticPolicy = StaticPolicy { offload_param_frac: 0.5, offload_optim_frac: 0.5 };
const POLICIES: [&(dyn PlacementPolicy + Sync); 5] =
    [&DevicePolicy, &HOST, &OPTIMIZER_ON_HOST, &HALF, &AutoPolicy::USUAL];

fn setup(world: u32, dtype: DType, optimizer: Optimizer, tied: bool) -> Setup<'static> {
    Setup {
        options: options(u64::from(world), dtype, optimizer, tied),
        world,
        policy: &DevicePolicy,
        budgets: plenty(),
        prefetch: None,
    }
}

/// The run, held to its plan: peaks per tier, and bytes per link where no other pass comes between the steps.
fn train(setup: &Setup, what: &str) -> Vec<Run> {
    let runs = setup.train(STEPS);
    for (rank, run) in runs.iter().enumerate() {
        held_to_plan(setup, run, &format!("{what}, rank {rank}"));
    }
    for run in &runs[1..] {
        assert!(run.bits == runs[0].bits, "{what}: the ranks disagree");
    }
    runs
}

fn held_to_plan(setup: &Setup, run: &Run, what: &str) {
    assert_eq!(run.departures, 0, "{what}");
    for tier in Tier::ALL {
        assert_eq!(run.plan.peak(tier), run.ledger.total(tier), "L1: {what}, {tier}");
        assert!(run.ledger.total(tier) <= run.plan.budgets.of(tier), "L2: {what}, {tier}");
    }
    let updated = run.traffic.iter().any(|counted| counted.updated > 0);
    assert_eq!(updated, setup.options.updates_on_host > 0, "{what}: the host's cores update their share");
    if setup.options.optimizer == Some(ADAMW) {
        for (step, counted) in run.traffic.iter().enumerate() {
            assert_eq!(*counted, run.plan.predicted.step(step as u64), "L4: {what}, step {step}");
        }
    }
}

/// Every policy × prefetch with plenty; then, with everything kept and with nothing kept, `auto` in budgets down to
/// the least that plans, on two tiers and on three. With plenty the recompute level goes round, and the number of
/// groups that the host's cores update, and at one rank the sharding and, without a tied table, the number of
/// micro-batches that go together.
fn any_placement(mut setup: Setup<'static>, disk: &Path) {
    let reference = train(&setup, "reference");
    let check = |setup: &Setup<'static>, what: &str| {
        let what = format!("{what}, {}, prefetch {:?}, {:?}", setup.policy.name(), setup.prefetch, setup.options.keep);
        assert!(train(setup, &what)[0].bits == reference[0].bits, "L6: {what} ends in other bits");
    };
    let on_host = setup.options.may_update_on_host(setup.world.into());
    let mut case = 0;
    for policy in POLICIES {
        for prefetch in [Some(0), Some(SMALL), None] {
            (setup.policy, setup.prefetch) = (policy, prefetch);
            setup.options.keep = [case, case / 4, case / 2].map(|level| Keep::ALL[level % 4]).to_vec();
            if setup.world == 1 {
                setup.options.sharding = SHARDINGS[case % 4];
                if !setup.options.config.tie_word_embeddings {
                    setup.options.round = 1 + case as u64 % MICROS;
                }
            }
            setup.options.updates_on_host = if on_host { [0, 1, 3, 5, 2][case % 5] } else { 0 };
            case += 1;
            check(&setup, "plenty");
        }
    }
    for (keep, prefetches) in [(Keep::All, [Some(0), None]), (Keep::Block, [Some(SMALL), None])] {
        setup.options.keep.fill(keep);
        setup.options.updates_on_host = if on_host && keep == Keep::Block { 2 } else { 0 };
        setup.policy = &AutoPolicy::USUAL;
        for prefetch in prefetches {
            setup.prefetch = prefetch;
            for (budgets, what) in tight(&setup, disk) {
                setup.budgets = budgets;
                check(&setup, what);
            }
        }
        for policy in [&HOST as &(dyn PlacementPolicy + Sync), &HALF] {
            setup.policy = policy;
            setup.budgets = on_disk(plenty().device, disk);
            setup.budgets.host = setup.least_host();
            check(&setup, "least host");
        }
    }
}

/// Budgets from those under which something must leave the device to the least that plan.
fn tight(setup: &Setup<'static>, disk: &Path) -> [(Budgets, &'static str); 4] {
    let mut setup = setup.clone();
    setup.budgets = plenty();
    setup.policy = &DevicePolicy;
    let all = setup.least_device();
    setup.policy = &AutoPolicy::USUAL;
    let least = setup.least_device();
    let half = (least + all) / 2;
    let two = |device| Budgets { device, ..plenty() };
    let mut three = |device| {
        setup.budgets = on_disk(device, disk);
        Budgets { host: setup.least_host(), ..setup.budgets.clone() }
    };
    [
        (two(half), "half on the device"),
        (two(least), "least device"),
        (three(half), "half on the device, least host"),
        (three(least), "least device and host"),
    ]
}

fn on_disk(device: u64, disk: &Path) -> Budgets {
    Budgets { device, nvme: 16 << 20, nvme_folder: Some(disk.to_owned()), ..plenty() }
}

fn one_rank(dtype: DType, optimizer: Optimizer, tied: bool) {
    let disk = tempfile::tempdir().expect("a folder");
    any_placement(setup(1, dtype, optimizer, tied), disk.path());
}

#[test]
fn one_rank_f32_adamw() {
    one_rank(DType::F32, ADAMW, false);
}

#[test]
fn one_rank_f32_sophia_tied() {
    one_rank(DType::F32, SOPHIA, true);
}

#[test]
fn one_rank_bf16_adamw_tied() {
    one_rank(DType::Bf16, ADAMW, true);
}

#[test]
fn one_rank_bf16_sophia() {
    one_rank(DType::Bf16, SOPHIA, false);
}

#[test]
fn one_rank_fp16_adamw() {
    one_rank(DType::F16, ADAMW, false);
}

#[test]
fn two_ranks_f32_adamw_tied() {
    let disk = tempfile::tempdir().expect("a folder");
    any_placement(setup(2, DType::F32, ADAMW, true), disk.path());
}

#[test]
fn three_ranks_bf16_sophia() {
    let disk = tempfile::tempdir().expect("a folder");
    any_placement(setup(3, DType::Bf16, SOPHIA, false), disk.path());
}

/// Updates that do not wait for the norm: gradients with homes or without, by the number of micro-batches that go
/// together. Where nothing is clipped they end in the bits of those that wait.
fn lagged(world: u32, dtype: DType, optimizer: Optimizer, tied: bool) {
    let disk = tempfile::tempdir().expect("a folder");
    let setup = setup(world, dtype, optimizer, tied);
    let clipped_by = |clip: Clip, max_norm: f32| {
        let mut setup = setup.clone();
        (setup.options.clip, setup.options.max_norm) = (clip, max_norm);
        setup
    };
    let bits = |setup: &Setup<'static>| train(setup, "lagged").swap_remove(0).bits;
    // Whole groups of one rank, and of all.
    for (sharding, shards) in SHARDINGS.into_iter().flat_map(|sharding| [(sharding, Some(1)), (sharding, None)]) {
        let [lagged, exact] = [Clip::Lagged, Clip::Exact].map(|clip| {
            let mut setup = clipped_by(clip, 0.0);
            (setup.options.sharding, setup.options.shards) = (sharding, shards);
            bits(&setup)
        });
        assert!(lagged == exact, "unclipped, the same bits: {sharding:?} among {shards:?}");
    }
    let clipped = clipped_by(Clip::Lagged, 0.1);
    assert!(bits(&clipped) != bits(&clipped_by(Clip::Lagged, 0.0)), "this norm clips");
    any_placement(clipped, disk.path());
}

#[test]
fn lagged_one_rank_bf16_adamw() {
    lagged(1, DType::Bf16, ADAMW, false);
}

#[test]
fn lagged_one_rank_f32_sophia_tied() {
    lagged(1, DType::F32, SOPHIA, true);
}

#[test]
fn lagged_two_ranks_bf16_adamw() {
    lagged(2, DType::Bf16, ADAMW, false);
}

#[test]
fn lagged_three_ranks_f32_adamw_tied() {
    lagged(3, DType::F32, ADAMW, true);
}

/// At each number of ranks every sharding ends in the same bits, and all numbers of ranks in the same losses.
#[test]
fn shardings_and_worlds() {
    for tied in [false, true] {
        let alone = train(&setup(1, DType::F32, ADAMW, tied), "alone");
        for world in 1..=4 {
            assert_eq!(ROWS % u64::from(world), 0);
            let mut setup = setup(world, DType::F32, ADAMW, tied);
            let mut reference: Option<Vec<u64>> = None;
            for sharding in SHARDINGS {
                setup.options.sharding = sharding;
                for policy in [&DevicePolicy as &(dyn PlacementPolicy + Sync), &OPTIMIZER_ON_HOST, &HALF] {
                    setup.policy = policy;
                    let what = format!("{world} ranks, tied {tied}, {sharding:?}, {}", policy.name());
                    let run = train(&setup, &what).swap_remove(0);
                    for (ours, theirs) in run.losses.iter().zip(&alone[0].losses) {
                        let error = (ours - theirs).abs() / theirs.abs();
                        assert!(error < TOLERANCE, "{what}: loss {ours} instead of {theirs}");
                    }
                    let reference = reference.get_or_insert_with(|| run.bits.clone());
                    assert!(run.bits == *reference, "L6: {what} ends in other bits");
                }
            }
        }
    }
}

/// The plan's count is the run's long after the rehearsal has seen the steps repeat, on three tiers and ranks.
#[test]
fn bytes_per_link_of_many_steps() {
    let disk = tempfile::tempdir().expect("a folder");
    for world in 1..=3 {
        let mut setup = setup(world, DType::Bf16, ADAMW, true);
        setup.policy = &AutoPolicy::USUAL;
        let mut moved = [0, 0];
        for (budgets, what) in tight(&setup, disk.path()) {
            setup.budgets = budgets;
            for run in setup.train(30) {
                held_to_plan(&setup, &run, &format!("{what}, {world} ranks"));
                moved[0] += run.traffic[29].host_to_device;
                moved[1] += run.traffic[29].nvme_read;
            }
        }
        assert!(moved.iter().all(|bytes| *bytes > 0), "{world} ranks move {moved:?} bytes: that shows nothing");
    }
}

/// The emulated device is a cap: it takes the predicted peak, and a hundredth less is too little.
#[test]
fn the_peak_is_what_the_device_gives() {
    use castor_kernels::Backend;
    use castor_kernels::cpu::{Cpu, CpuOptions};
    use castor_trainer::blueprint::Blueprint;
    use castor_trainer::engine::Engine;
    use std::sync::Arc;

    let mut setup = setup(1, DType::F32, ADAMW, false);
    setup.policy = &AutoPolicy::USUAL;
    setup.budgets.device = setup.least_device() + SMALL;
    let peak = setup.plan().expect("it fits").peak(Tier::Device);
    let opens = |cap: u64| {
        let options = CpuOptions { device_bytes: Some(cap), threads: Some(1), ..CpuOptions::default() };
        let backend: Arc<dyn Backend> = Arc::new(Cpu::new(options).expect("threads"));
        let blueprint = Blueprint::new(setup.options.clone(), &*backend);
        let plan = blueprint
            .plan(&*backend, &Rates::assumed("cpu"), setup.policy, setup.budgets.clone(), None, Rehearse::ToRun)
            .expect("it fits");
        Engine::new(backend, &blueprint, plan).is_ok()
    };
    assert!(opens(peak));
    assert!(!opens(peak - peak / 100));
}

/// Passes that depart from the record (gradients alone, evaluations between steps, weights read) find room and
/// change nothing, in the least budgets too (L8).
#[test]
fn other_passes_in_between() {
    let disk = tempfile::tempdir().expect("a folder");
    for (world, optimizer) in [(1, ADAMW), (1, SOPHIA), (2, ADAMW)] {
        let mut setup = setup(world, DType::F32, optimizer, true);
        setup.options.evaluates = true;
        let reference = mixed(&setup);
        let tight = tight(&setup, disk.path());
        setup.policy = &AutoPolicy::USUAL;
        for (budgets, what) in tight {
            setup.budgets = budgets;
            setup.options.updates_on_host = if what == "half on the device" { 3 } else { 0 };
            assert!(mixed(&setup) == reference, "L8: {what}, {world} ranks, {optimizer:?}");
        }
    }
}

/// Losses, evaluations and gradients in bits, of a run in which everything happens between the steps.
fn mixed(setup: &Setup) -> Vec<Vec<u64>> {
    setup.on_ranks(|rank, mut engine| {
        let mut bits = Vec::new();
        for step in 0..6 {
            let rows = Rows::new(step, rank, u64::from(setup.world), setup.options.config.vocab_size);
            let micros: Vec<_> = rows.micros().collect();
            let inputs = StepInputs { micros: &micros, tokens: rows.tokens };
            if step % 3 == 1 {
                engine.finish().expect("the last step");
                bits.push(engine.gradients(&inputs).expect("gradients").grad_norm.to_bits());
                for group in (0..engine.groups().count() as u32).map(GroupId) {
                    let gradient = engine.read_gradient(group, 1.0).expect("a gradient");
                    bits.extend(gradient.iter().map(|value| u64::from(value.to_bits())));
                }
            }
            if step % 2 == 0 {
                bits.push(engine.evaluate(&micros).expect("an evaluation").to_bits());
            }
            let before = engine.step(&inputs).expect("a step");
            bits.extend(before.map(|result| result.loss.to_bits()));
        }
        bits
    })
}

/// With each micro-batch's gradient summed over the ranks by itself, how many of them go together changes no bit
/// either, whatever of the weights is split, on all tiers; and the losses are those of one rank.
fn sums_of_each_micro_batch(world: u32, dtype: DType, gradients: DType, optimizer: Optimizer, tied: bool) {
    let disk = tempfile::tempdir().expect("a folder");
    let setup_of = |world| {
        let mut setup = setup(world, dtype, optimizer, tied);
        // As many as there are, so that the steps are those of the plan.
        setup.options.micro_batches = (ROWS / u64::from(world)).div_ceil(setup.options.batch);
        setup.options.round = setup.options.micro_batches;
        setup.options.formats = formats(dtype, gradients, DType::F32);
        setup
    };
    let mut setup = setup_of(world);
    let at_the_end = train(&setup, "summed at the end");
    let alone = train(&setup_of(1), "alone");
    setup.options.sync_each_batch = true;
    let reference = train(&setup, "summed one by one");
    if gradients == DType::F32 && dtype == DType::F32 {
        for other in [&at_the_end, &alone] {
            for (ours, theirs) in reference[0].losses.iter().zip(&other[0].losses) {
                assert!((ours - theirs).abs() / theirs.abs() < TOLERANCE, "loss {ours} instead of {theirs}");
            }
        }
    }
    let all = setup.options.micro_batches;
    let rounds = if tied { all..=all } else { 1..=all };
    let check = |setup: &Setup<'static>, what: &str| {
        let what = format!("{what}, {}, rounds of {}", setup.policy.name(), setup.options.round);
        assert!(train(setup, &what)[0].bits == reference[0].bits, "L6: {what} ends in other bits");
    };
    for (case, round) in rounds.flat_map(|round| (0..POLICIES.len()).map(move |case| (case, round))) {
        setup.options.round = round;
        setup.options.sharding = SHARDINGS[2 + (case + round as usize) % 2];
        setup.policy = POLICIES[case];
        setup.prefetch = [Some(0), Some(SMALL), None][(case + round as usize) % 3];
        check(&setup, "plenty");
    }
    setup.policy = &AutoPolicy::USUAL;
    setup.prefetch = None;
    for (sharding, round) in [(2, all), (3, if tied { all } else { 1 })] {
        (setup.options.sharding, setup.options.round) = (SHARDINGS[sharding], round);
        setup.budgets = plenty();
        for (budgets, what) in tight(&setup, disk.path()) {
            setup.budgets = budgets;
            check(&setup, what);
        }
    }
}

#[test]
fn sums_of_each_micro_batch_two_ranks_f32_adamw() {
    sums_of_each_micro_batch(2, DType::F32, DType::F32, ADAMW, false);
}

#[test]
fn sums_of_each_micro_batch_three_ranks_bf16_sophia() {
    sums_of_each_micro_batch(3, DType::Bf16, DType::Bf16, SOPHIA, false);
}

#[test]
fn sums_of_each_micro_batch_two_ranks_bf16_adamw_tied() {
    sums_of_each_micro_batch(2, DType::Bf16, DType::F32, ADAMW, true);
}
