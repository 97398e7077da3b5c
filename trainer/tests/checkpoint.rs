//! Checkpoints: a resumed run is the uninterrupted one, any number of ranks reads what any number wrote, and what
//! is not sound is never taken.

mod support;

use castor_kernels::{
    Backend, DType, Tier,
    cpu::{Cpu, CpuOptions},
    link::{Link, LinkOptions},
};
use castor_runtime::plan::Rehearse;
use castor_runtime::{
    Category, GroupId,
    layout::Sharding,
    plan::Budgets,
    policy::{AutoPolicy, DevicePolicy, PlacementPolicy},
};
use castor_trainer::rates::Rates;
use castor_trainer::{
    activations::Keep,
    blueprint::{Blueprint, Options, formats},
    checkpoint::{self, Checkpoint, Data, Facts, Saver},
    config::ModelConfig,
    data::Order,
    engine::{Engine, StepInputs},
    inputs::MicroBatch,
    loss_scale::Dynamic,
    optimizer::{Clip, Optimizer},
    parity::Batch,
    settings::{AsyncSave, Every, OutputSettings, Resume},
    source::TensorSource,
    weights::{ExportDType, HfFolder, RandomWeights, hf_tensors},
};
use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};
use support::{adamw, options, plenty, shared};

const SEQUENCE: u64 = 8;
const ROWS: u64 = 2;
const UNSHARDED: Sharding = Sharding { parameters: false, gradients: false, optimizer: false };
const ZERO1: Sharding = Sharding { optimizer: true, ..UNSHARDED };
const ZERO3: Sharding = Sharding { parameters: true, gradients: true, optimizer: true };

/// A model of the given vocabulary, small enough for debug builds and with shards that do not come out even.
fn small(folder: &Path, vocabulary: u64, tied: bool) -> PathBuf {
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocabulary, "hidden_size": 24,
        "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 12, "hidden_act": "silu", "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": tied, "attention_bias": false, "mlp_bias": false,
    });
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    folder.to_owned()
}

fn small_options(folder: &Path) -> Options {
    options(folder, ROWS, SEQUENCE, 1)
}

fn facts(options: &Options) -> Facts {
    Facts::of(options, Data { rows: 100, rows_per_step: 4, order: Order::Shuffled { seed: 5 } })
}

/// Weights of a run: of the folder if it has any.
fn first_weights(folder: &Path, config: &ModelConfig) -> Box<dyn TensorSource> {
    match folder.join("model.safetensors").exists() {
        true => Box::new(HfFolder::open(folder, config).unwrap().0),
        false => Box::new(RandomWeights::new(config, 3)),
    }
}

/// A rank without weights.
fn bare(options: Options, policy: &dyn PlacementPolicy, budgets: Budgets, link: Option<Link>) -> Engine {
    let cpu = CpuOptions { device_bytes: Some(budgets.device), threads: Some(1), link, ..CpuOptions::default() };
    let cpu: Arc<dyn Backend> = Arc::new(Cpu::new(cpu).unwrap());
    let blueprint = Blueprint::new(options, cpu.as_ref());
    let plan = blueprint.plan(cpu.as_ref(), &Rates::assumed("cpu"), policy, budgets, None, Rehearse::ToRun).unwrap();
    Engine::new(cpu, &blueprint, plan).unwrap()
}

fn alone(options: Options) -> Engine {
    bare(options, &DevicePolicy, plenty(), None)
}

fn loaded(options: Options, folder: &Path) -> Engine {
    let source = first_weights(folder, &options.config);
    let mut engine = alone(options);
    engine.load(&*source).unwrap();
    engine
}

/// The batch that rank `rank` of `world` takes at step `step`; all ranks' rows together are the same for all worlds.
fn batch(options: &Options, step: u64, rank: u64, world: u64) -> Batch {
    let rows = ROWS * 3 / world;
    let id = |place: u64| (place * 7919 % options.config.vocab_size) as i32;
    let first = (step * 6 + rank * rows) * SEQUENCE;
    let ids: Vec<i32> = (first..first + rows.min(options.batch) * SEQUENCE).map(id).collect();
    Batch { sequence: SEQUENCE, labels: ids.clone(), ids }
}

/// Makes steps, in as many micro-batches as the options say; every loss and norm in bits.
fn train(engine: &mut Engine, steps: std::ops::Range<u64>) -> Vec<[u64; 2]> {
    let mut bits = Vec::new();
    for step in steps {
        let (rank, world) = {
            let backend = engine.manager().backend();
            (u64::from(backend.rank()), u64::from(backend.world()))
        };
        let batch = batch(engine.options(), step, rank, world);
        let each = batch.ids.len() / engine.options().micro_batches as usize;
        let parts = batch.ids.chunks(each).zip(batch.labels.chunks(each));
        let micros: Vec<MicroBatch> = parts.map(|(ids, labels)| MicroBatch { ids, labels, starts: None }).collect();
        let tokens = engine.total(batch.micro().counted(SEQUENCE)).unwrap();
        bits.extend(engine.step(&StepInputs { micros: &micros, tokens }).unwrap());
    }
    bits.extend(engine.finish().unwrap());
    bits.iter().map(|result| [result.loss.to_bits(), result.grad_norm.to_bits()]).collect()
}

fn weights(engine: &mut Engine) -> Vec<u32> {
    let groups = 0..engine.groups().count() as u32;
    groups.flat_map(|group| engine.read_group(GroupId(group)).unwrap()).map(f32::to_bits).collect()
}

/// All states of the model at one rank, gradients aside: what resharding must keep.
fn states(engine: &mut Engine) -> Vec<Vec<u8>> {
    let layout = engine.manager().layout().clone();
    let chunks = layout.chunk_ids().filter(|chunk| chunk.role() != castor_runtime::Role::Gradient);
    chunks.map(|chunk| engine.manager().read_chunk(chunk).unwrap()).collect()
}

fn save(run: &Path, engine: &mut Engine) -> PathBuf {
    let facts = facts(engine.options());
    checkpoint::save(run, &facts, None, engine).unwrap();
    run.join(format!("checkpoint-{}", engine.progress().step))
}

fn find(run: &Path, resume: &Resume, options: &Options) -> (Option<Checkpoint>, String) {
    let backend = Cpu::new(CpuOptions::default()).unwrap();
    let (found, notices) = checkpoint::find(resume, run, &facts(options), &backend).unwrap();
    (found, notices.join("\n"))
}

fn refusal(run: &Path, resume: &Resume, options: &Options) -> String {
    let backend = Cpu::new(CpuOptions::default()).unwrap();
    let error = checkpoint::find(resume, run, &facts(options), &backend).unwrap_err();
    assert_eq!(error.exit_code(), 2, "{error}");
    error.to_string()
}

/// Models of the reference if they are here, else of our own.
fn models(folder: &Path) -> Vec<PathBuf> {
    match shared("cases/trajectory") {
        Some(cases) => vec![cases.join("init_tied"), cases.join("init_vocab257")],
        None => [(48, true), (257, false)]
            .map(|(vocabulary, tied)| {
                let folder = folder.join(vocabulary.to_string());
                fs::create_dir(&folder).unwrap();
                small(&folder, vocabulary, tied)
            })
            .to_vec(),
    }
}

#[test]
fn resumed_is_uninterrupted_bit_for_bit() {
    let temporary = tempfile::tempdir().unwrap();
    let nvme = tempfile::tempdir().unwrap();
    let sophia = Optimizer::Sophia { beta1: 0.965, beta2: 0.99, rho: 0.04, weight_decay: 0.1, every: 2 };
    for folder in models(temporary.path()) {
        for (dtype, moments, optimizer, clip) in [
            (DType::F32, DType::F32, adamw(0.9, 0.95, 0.1), Clip::Exact),
            (DType::Bf16, DType::Q8, adamw(0.9, 0.95, 0.1), Clip::Exact),
            (DType::Bf16, DType::Bf16, sophia, Clip::Exact),
            (DType::F16, DType::F32, adamw(0.9, 0.95, 0.1), Clip::Exact),
            (DType::F32, DType::F32, adamw(0.9, 0.95, 0.1), Clip::Lagged),
        ] {
            let options = |sharding| {
                let mut options = small_options(&folder);
                options.formats = formats(dtype, dtype, moments);
                options.optimizer = Some(optimizer);
                // So small that the norm of the step before, which the checkpoint holds, is used.
                (options.clip, options.max_norm) = (clip, 0.1);
                options.sharding = sharding;
                options.keep.fill(Keep::Block);
                options.loss_scale = (dtype == DType::F16).then(|| Dynamic { window: 2, ..Dynamic::default() });
                options
            };
            let mut whole = loaded(options(ZERO3), &folder);
            let expected = train(&mut whole, 0..7);
            let expected_weights = weights(&mut whole);

            let run = tempfile::tempdir().unwrap();
            let mut before = loaded(options(UNSHARDED), &folder);
            assert_eq!(train(&mut before, 0..4), expected[..4]);
            save(run.path(), &mut before);
            // A save changes nothing for the run that goes on.
            assert_eq!(train(&mut before, 4..7), expected[4..]);

            let (checkpoint, said) = find(run.path(), &Resume::Latest, &options(ZERO3));
            assert!(said.contains("step 4"), "{said}");
            let checkpoint = checkpoint.unwrap();
            let tight = smallest(&options(ZERO3), nvme.path());
            let cases: [(Sharding, &dyn PlacementPolicy, Budgets); 3] = [
                (UNSHARDED, &DevicePolicy, plenty()),
                (ZERO3, &DevicePolicy, plenty()),
                (ZERO3, &AutoPolicy::USUAL, tight),
            ];
            for (sharding, policy, budgets) in cases {
                let what =
                    format!("{} {dtype:?} {moments:?} {clip:?} {sharding:?} {}", folder.display(), policy.name());
                let on_disk = budgets.nvme > 0;
                let mut after = bare(options(sharding), policy, budgets, None);
                assert_eq!(after.manager().ledger().total(Tier::Nvme) > 0, on_disk, "{what}");
                checkpoint.restore(&mut after).unwrap();
                assert_eq!(train(&mut after, 4..7), expected[4..], "{what}");
                assert!(weights(&mut after) == expected_weights, "{what}");
                assert_eq!(after.progress(), before.progress(), "{what}");
            }
        }
    }
}

/// Budgets that leave no room for the model on the device, and some of it on the disk.
fn smallest(options: &Options, nvme: &Path) -> Budgets {
    let cpu = Cpu::new(CpuOptions::default()).unwrap();
    let blueprint = Blueprint::new(options.clone(), &cpu);
    let budgets = |device: u64, host: u64| Budgets { device, host, nvme: 1 << 30, nvme_folder: Some(nvme.to_owned()) };
    let fits = |device: u64, host: u64| {
        blueprint
            .plan(&cpu, &Rates::assumed("cpu"), &AutoPolicy::USUAL, budgets(device, host), None, Rehearse::ToRun)
            .is_ok()
    };
    let least = |fits: &dyn Fn(u64) -> bool| {
        let (mut low, mut high) = (0, 1 << 30);
        while low + 4_096 < high {
            let middle = (low + high) / 2;
            if fits(middle) { high = middle } else { low = middle }
        }
        high
    };
    let device = least(&|device| fits(device, 1 << 30));
    let host = least(&|host| fits(device, host));
    budgets(device, host)
}

/// Runs one engine per rank on its thread.
fn ranks<T: Send>(options: &Options, world: u32, body: impl Fn(&mut Engine) -> T + Sync) -> Vec<T> {
    let links = Link::in_process(world, LinkOptions { shards: options.shards, ..LinkOptions::default() }).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = links
            .into_iter()
            .map(|link| {
                let (options, body) = (options.clone(), &body);
                scope.spawn(move || body(&mut bare(options, &DevicePolicy, plenty(), Some(link))))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Finds and restores on every rank.
fn restore(run: &Path, engine: &mut Engine) {
    let (facts, backend) = (facts(engine.options()), Arc::clone(engine.manager().backend()));
    let (found, _) = checkpoint::find(&Resume::Latest, run, &facts, &*backend).unwrap();
    found.unwrap().restore(engine).unwrap();
}

/// One rank's checkpoint read by two, theirs by three, and so on back to one: the same states.
#[test]
fn any_number_of_ranks_reads_what_any_number_wrote() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = small(temporary.path(), 257, true);
    for (dtype, moments) in [(DType::F32, DType::F32), (DType::Bf16, DType::Bf16), (DType::Bf16, DType::Q8)] {
        let mut options = small_options(&folder);
        options.formats = formats(dtype, dtype, moments);
        let mut first = loaded(options.clone(), &folder);
        train(&mut first, 0..3);
        let (expected, expected_weights) = (states(&mut first), weights(&mut first));
        let run = tempfile::tempdir().unwrap();
        save(run.path(), &mut first);
        for (world, sharding) in [(2, ZERO3), (3, ZERO1), (2, UNSHARDED), (3, ZERO3)] {
            options.sharding = sharding;
            let results = ranks(&options, world, |engine| {
                restore(run.path(), engine);
                let weights = weights(engine);
                save(run.path(), engine);
                weights
            });
            assert!(results.iter().all(|weights| *weights == expected_weights), "{world} ranks, {sharding:?}");
            let written = fs::read_dir(run.path().join("checkpoint-3")).unwrap().count();
            assert_eq!(written, world as usize + 2, "a file per rank, the model's shape and the manifest");
        }
        let mut last = alone(options);
        restore(run.path(), &mut last);
        assert!(states(&mut last) == expected, "{dtype:?} {moments:?}");
    }
}

/// Of ranks that hold the same only one writes; any others read it, and these what any others wrote.
#[test]
fn replicas_write_once_and_read_what_others_wrote() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = small(temporary.path(), 257, false);
    let run = tempfile::tempdir().unwrap();
    let mut options = small_options(&folder);
    options.formats = formats(DType::Bf16, DType::F32, DType::Q8);
    let mut first = loaded(options.clone(), &folder);
    train(&mut first, 0..3);
    let (expected, expected_weights) = (states(&mut first), weights(&mut first));
    save(run.path(), &mut first);
    for (world, shards) in [(4, Some(2)), (3, None), (4, Some(1)), (6, Some(3))] {
        options.shards = shards;
        let results = ranks(&options, world, |engine| {
            restore(run.path(), engine);
            let weights = weights(engine);
            save(run.path(), engine);
            checkpoint::save_model(run.path(), "bytes", engine).unwrap();
            weights
        });
        assert!(results.iter().all(|weights| *weights == expected_weights), "{world} ranks, {shards:?}");
        let written = fs::read_dir(run.path().join("checkpoint-3")).unwrap().count();
        assert_eq!(written, shards.unwrap_or(world) as usize + 2, "a file per shard, the shape and the manifest");
    }
    options.shards = None;
    let mut last = alone(options);
    restore(run.path(), &mut last);
    assert!(states(&mut last) == expected);
}

/// Ranks that stop and come back go on as if they had not.
#[test]
fn ranks_resume_bit_for_bit() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = small(temporary.path(), 257, false);
    let run = tempfile::tempdir().unwrap();
    for (world, shards, sharding) in [(2, None, ZERO1), (2, None, ZERO3), (4, Some(2), ZERO3)] {
        let mut options = small_options(&folder);
        (options.sharding, options.shards) = (sharding, shards);
        let whole = ranks(&options, world, |engine| {
            engine.load(&RandomWeights::new(&engine.options().config.clone(), 3)).unwrap();
            let mut bits = train(engine, 0..3);
            save(run.path(), engine);
            bits.extend(train(engine, 3..6));
            bits
        });
        let resumed = ranks(&options, world, |engine| {
            restore(run.path(), engine);
            train(engine, 3..6)
        });
        assert_eq!(whole[0][3..], resumed[0], "{world} ranks, {sharding:?}");
        assert_eq!(whole[1], whole[0]);
    }
}

/// A run whose micro-batches are summed over the ranks one by one goes on in other rounds as if it had not stopped.
#[test]
fn ranks_resume_bit_for_bit_in_other_rounds() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = small(temporary.path(), 257, false);
    let run = tempfile::tempdir().unwrap();
    let mut options = options(&folder, ROWS, SEQUENCE, ROWS);
    (options.sharding, options.sync_each_batch, options.round) = (ZERO3, true, 1);
    let whole = ranks(&options, 2, |engine| {
        engine.load(&RandomWeights::new(&engine.options().config.clone(), 3)).unwrap();
        let mut bits = train(engine, 0..3);
        save(run.path(), engine);
        bits.extend(train(engine, 3..6));
        bits
    });
    options.round = ROWS;
    let resumed = ranks(&options, 2, |engine| {
        restore(run.path(), engine);
        train(engine, 3..6)
    });
    assert_eq!(whole[0][3..], resumed[0]);
    assert_eq!(whole[1], whole[0]);
}

/// What one, three and four ranks wrote two go on from: but for the order of sums it is the same run.
#[test]
fn two_ranks_go_on_from_what_any_number_wrote() {
    const STEP_ROWS: u64 = 12;
    let temporary = tempfile::tempdir().unwrap();
    let folder = small(temporary.path(), 257, true);
    let of_world = |world: u32| {
        let mut options = small_options(&folder);
        (options.sharding, options.batch) = (ZERO3, STEP_ROWS / u64::from(world));
        options
    };
    let go_on = |engine: &mut Engine, steps: std::ops::Range<u64>| -> Vec<f64> {
        let (rank, rows) = (u64::from(engine.manager().backend().rank()), engine.options().batch);
        let id = |place: u64| (place * 7919 % 257) as i32;
        let mut results = Vec::new();
        for step in steps {
            let first = (step * STEP_ROWS + rank * rows) * SEQUENCE;
            let ids: Vec<i32> = (first..first + rows * SEQUENCE).map(id).collect();
            let batch = Batch { sequence: SEQUENCE, labels: ids.clone(), ids };
            let tokens = engine.total(batch.micro().counted(SEQUENCE)).unwrap();
            results.extend(engine.step(&StepInputs { micros: &[batch.micro()], tokens }).unwrap());
        }
        results.extend(engine.finish().unwrap());
        results.iter().map(|result| result.loss).collect()
    };
    for writers in [1, 3, 4] {
        let run = tempfile::tempdir().unwrap();
        let expected = ranks(&of_world(writers), writers, |engine| {
            engine.load(&RandomWeights::new(&engine.options().config.clone(), 3)).unwrap();
            go_on(engine, 0..3);
            save(run.path(), engine);
            go_on(engine, 3..6)
        });
        let resumed = ranks(&of_world(2), 2, |engine| {
            restore(run.path(), engine);
            go_on(engine, 3..6)
        });
        for (step, (loss, expected)) in resumed[0].iter().zip(&expected[0]).enumerate() {
            support::close(&format!("written by {writers}, step {step} after it"), *loss, *expected, 1e-6);
        }
    }
}

/// A run that saves so often, and keeps one checkpoint.
fn output(run: &Path, save: Every) -> OutputSettings {
    OutputSettings {
        dir: run.to_owned(),
        save,
        async_save: AsyncSave::On,
        save_total_limit: Some(1),
        save_model: false,
        resume: Resume::No,
        logging: Every::Never,
        eval: Every::Never,
        eval_data: Vec::new(),
        eval_fraction: 0.0,
    }
}

/// Saves as a run of these settings does.
fn saver(output: &OutputSettings, engine: &mut Engine) -> Saver {
    let facts = facts(engine.options());
    Saver::new(output, facts, None, engine).unwrap()
}

/// What a run that saves nothing goes on from after a change of its plan is gone again, and nothing else is: not the
/// checkpoint that it was resumed from, however few are kept.
#[test]
fn what_a_run_goes_on_from_takes_no_other_place() {
    let temporary = tempfile::tempdir().unwrap();
    let run = tempfile::tempdir().unwrap();
    let folder = small(temporary.path(), 257, false);
    let new = || bare(small_options(&folder), &DevicePolicy, plenty(), None);
    let mut engine = new();
    engine.load(&RandomWeights::new(&small_options(&folder).config, 3)).unwrap();
    train(&mut engine, 0..1);
    saver(&output(run.path(), Every::Steps(1)), &mut engine).save(&mut engine).unwrap();
    train(&mut engine, 1..2);
    let output = output(run.path(), Every::Never);
    let mut saver = saver(&output, &mut engine);
    assert!(saver.save_to_go_on(&mut engine).unwrap().records.is_empty(), "it is no save of the run's");
    assert_eq!(saver.on_disk(), Some(2));
    let mut again = new();
    Saver::go_on(&output, 2, &mut again).unwrap();
    assert_eq!(train(&mut again, 2..4), train(&mut engine, 2..4));
    let left = fs::read_dir(run.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>();
    assert_eq!(left, ["checkpoint-1"]);
}

/// Every file of a checkpoint but the manifest, which holds nothing else of the states.
fn files(checkpoint: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(checkpoint).unwrap().map(|entry| entry.unwrap());
    let named = entries.map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap()));
    let mut files: Vec<_> = named.filter(|(name, _)| name != "manifest.json").collect();
    files.sort();
    files
}

/// A checkpoint that is written while the run goes on is the one that holds it, whatever is where; and the run is the
/// same.
#[test]
fn saves_beside_the_run_write_what_was_there_when_they_began() {
    let temporary = tempfile::tempdir().unwrap();
    let nvme = tempfile::tempdir().unwrap();
    let folder = small(temporary.path(), 257, false);
    for (dtype, moments) in [(DType::F32, DType::F32), (DType::Bf16, DType::Q8)] {
        let options = |snapshots| {
            let mut options = small_options(&folder);
            options.formats = formats(dtype, dtype, moments);
            options.keep.fill(Keep::Block);
            Options { snapshots, sharding: ZERO3, ..options }
        };
        let tight = smallest(&options(true), nvme.path());
        let host = Budgets { device: tight.device, ..plenty() };
        let cases: [(&dyn PlacementPolicy, Budgets); 3] =
            [(&DevicePolicy, plenty()), (&AutoPolicy::USUAL, host), (&AutoPolicy::USUAL, tight)];
        for (policy, budgets) in cases {
            let run = |snapshots| {
                let run = tempfile::tempdir().unwrap();
                let mut engine = bare(options(snapshots), policy, budgets.clone(), None);
                engine.load(&RandomWeights::new(&options(false).config, 3)).unwrap();
                let ledger = engine.manager().ledger();
                assert_eq!(ledger.reserved(Tier::Host, Category::Snapshot) > 0, snapshots);
                let mut saver = saver(&output(run.path(), Every::Steps(1)), &mut engine);
                let mut bits = train(&mut engine, 0..2);
                let first = saver.save(&mut engine).unwrap();
                assert_eq!(first.records.len(), usize::from(!snapshots), "a save beside the run has not ended");
                bits.extend(train(&mut engine, 2..4));
                let second = saver.save(&mut engine).unwrap();
                assert_eq!(second.records.len(), 1, "one save at a time");
                let first = first.records.first().unwrap_or(&second.records[0]);
                assert!(first.step == 2 && first.held_seconds <= first.seconds, "{first:?}");
                assert!(saver.save(&mut engine).unwrap().notices.len() <= 1, "the same step is not saved again");
                bits.extend(train(&mut engine, 4..6));
                saver.settle(&mut engine).unwrap();
                assert!(!saver.is_ready());
                (bits, files(&run.path().join("checkpoint-4")), fs::read_dir(run.path()).unwrap().count())
            };
            let (held, beside) = (run(false), run(true));
            assert!(held == beside, "{dtype:?} {moments:?} {}", policy.name());
            assert_eq!(beside.2, 1, "the checkpoint before is gone");
        }
    }
}

/// The same of ranks, whether they share the states or hold the same, which agree when all have written.
#[test]
fn ranks_save_beside_the_run() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = small(temporary.path(), 257, true);
    for (world, shards) in [(3, None), (4, Some(2))] {
        let run = |snapshots| {
            let run = tempfile::tempdir().unwrap();
            let mut options = small_options(&folder);
            options.formats = formats(DType::Bf16, DType::F32, DType::Q8);
            (options.sharding, options.shards, options.snapshots) = (ZERO3, shards, snapshots);
            let bits = ranks(&options, world, |engine| {
                engine.load(&RandomWeights::new(&engine.options().config.clone(), 3)).unwrap();
                let mut saver = saver(&output(run.path(), Every::Steps(1)), engine);
                let mut bits = train(engine, 0..1);
                saver.save(engine).unwrap();
                for step in 1..4 {
                    bits.extend(train(engine, step..step + 1));
                    // As the loop does: all ranks go on together.
                    let ready = engine.total(u64::from(saver.is_ready())).unwrap() == u64::from(world);
                    if ready {
                        saver.advance(engine).unwrap();
                    }
                }
                saver.settle(engine).unwrap();
                bits
            });
            (bits, files(&run.path().join("checkpoint-1")))
        };
        assert!(run(false) == run(true), "{world} ranks, {shards:?}");
    }
}

#[test]
fn damage_is_named_and_the_checkpoint_before_is_taken() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = small(temporary.path(), 48, true);
    let run = tempfile::tempdir().unwrap();
    let options = small_options(&folder);
    let mut engine = loaded(options.clone(), &folder);
    train(&mut engine, 0..1);
    save(run.path(), &mut engine);
    train(&mut engine, 1..2);
    let latest = save(run.path(), &mut engine);
    let step = |found: Option<Checkpoint>| found.unwrap().progress().step;
    assert_eq!(step(find(run.path(), &Resume::Latest, &options).0), 2);

    let file = latest.join("rank-0.bin");
    let sound = fs::read(&file).unwrap();
    let manifest = latest.join("manifest.json");
    let described = fs::read(&manifest).unwrap();
    let mut flipped = sound.clone();
    flipped[sound.len() / 2] ^= 1;
    let edited = String::from_utf8(described.clone()).unwrap().replace("\"applied\": 2", "\"applied\": 3").into_bytes();
    assert_ne!(edited, described);
    for (path, whole, bad) in [
        (&file, &sound, &sound[..sound.len() - 1]),
        (&file, &sound, &flipped[..]),
        (&file, &sound, &[]),
        (&manifest, &described, &described[..described.len() / 2]),
        (&manifest, &described, &edited[..]),
        (&manifest, &described, &[]),
    ] {
        fs::write(path, bad).unwrap();
        let named = path.display().to_string();
        let (found, said) = find(run.path(), &Resume::Latest, &options);
        assert_eq!(step(found), 1);
        assert!(said.contains(&named), "{said}");
        let refused = refusal(run.path(), &Resume::From(latest.clone()), &options);
        assert!(refused.contains(&named), "{refused}");
        fs::write(path, whole).unwrap();
    }
    assert_eq!(step(find(run.path(), &Resume::From(latest.clone()), &options).0), 2);
    // One that begins before the latest says so.
    let (found, said) = find(run.path(), &Resume::From(run.path().join("checkpoint-1")), &options);
    assert!(step(found) == 1 && said.contains("checkpoint-2 is of an earlier run"), "{said}");
    assert!(find(run.path(), &Resume::No, &options).1.contains("checkpoint-2 is of an earlier run"));
    // The run's folder stands for its latest.
    assert_eq!(step(find(Path::new("."), &Resume::From(run.path().into()), &options).0), 2);

    fs::remove_file(latest.join("rank-0.bin")).unwrap();
    fs::write(run.path().join("checkpoint-1/rank-0.bin"), "").unwrap();
    let refused = refusal(run.path(), &Resume::Latest, &options);
    assert!(refused.contains("checkpoint-1/rank-0.bin") && refused.contains("checkpoint-2/rank-0.bin"), "{refused}");
}

/// Each rank checks a part of the files; what one finds, all know.
#[test]
fn all_ranks_pass_over_what_one_finds_damaged() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = small(temporary.path(), 48, true);
    let run = tempfile::tempdir().unwrap();
    let steps = ranks(&small_options(&folder), 2, |engine| {
        engine.load(&RandomWeights::new(&engine.options().config.clone(), 3)).unwrap();
        save(run.path(), engine);
        train(engine, 0..1);
        let latest = save(run.path(), engine);
        let (facts, backend) = (facts(engine.options()), Arc::clone(engine.manager().backend()));
        if backend.rank() == 0 {
            let file = latest.join("rank-1.bin");
            let mut bytes = fs::read(&file).unwrap();
            bytes[100] ^= 1;
            fs::write(&file, bytes).unwrap();
        }
        backend.exchange(&[]).unwrap();
        let (found, said) = checkpoint::find(&Resume::Latest, run.path(), &facts, &*backend).unwrap();
        assert!(said.iter().any(|line| line.contains("checkpoint-1/rank-1.bin")), "{said:?}");
        found.unwrap().progress().step
    });
    assert_eq!(steps, [0, 0]);
}

#[test]
fn names_alone_make_no_checkpoint() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = small(temporary.path(), 48, true);
    let run = tempfile::tempdir().unwrap();
    let options = small_options(&folder);
    fs::create_dir(run.path().join("checkpoint-999")).unwrap();
    let (found, said) = find(run.path(), &Resume::Latest, &options);
    assert!(found.is_none() && said.contains("checkpoint-999"), "{said}");
    let nowhere = run.path().join("nowhere");
    assert!(find(&nowhere, &Resume::Latest, &options).0.is_none());
    assert!(refusal(run.path(), &Resume::From(nowhere), &options).contains("nowhere"));

    // Killed in the middle of a save.
    let mut engine = loaded(options.clone(), &folder);
    let killed = run.path().join("checkpoint-7.tmp");
    fs::create_dir(&killed).unwrap();
    fs::write(killed.join("rank-0.bin"), "half of it").unwrap();
    train(&mut engine, 0..1);
    save(run.path(), &mut engine);
    assert!(!killed.exists());
    assert_eq!(find(run.path(), &Resume::Latest, &options).0.unwrap().progress().step, 1);
    assert!(run.path().join("checkpoint-999").exists(), "what is no checkpoint is not ours to remove");
}

#[test]
fn what_does_not_match_is_refused_with_both_values() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = small(temporary.path(), 48, true);
    let run = tempfile::tempdir().unwrap();
    let options = small_options(&folder);
    save(run.path(), &mut loaded(options.clone(), &folder));
    let sophia = Optimizer::Sophia { beta1: 0.965, beta2: 0.99, rho: 0.04, weight_decay: 0.1, every: 2 };
    type Change<'a> = (&'a dyn Fn(&mut Options), [&'a str; 3]);
    let changes: [Change; 6] = [
        (&|o| o.config.hidden_size = 32, ["model.hidden_size", "24", "32"]),
        (&|o| o.formats = formats(DType::Bf16, DType::F32, DType::F32), ["formats.parameter", "f32", "bf16"]),
        (&|o| o.formats.first = DType::Q8, ["formats.first", "f32", "q8"]),
        (&|o| o.optimizer = Some(sophia), ["optimizer.name", "adamw", "sophia"]),
        (&|o| o.optimizer = Some(adamw(0.9, 0.99, 0.1)), ["optimizer.beta2", "0.95", "0.99"]),
        (&|o| o.seed = 6, ["seed", "5", "6"]),
    ];
    for (change, words) in changes {
        let mut changed = options.clone();
        change(&mut changed);
        let refused = refusal(run.path(), &Resume::Latest, &changed);
        assert!(words.iter().all(|word| refused.contains(word)), "{refused}");
    }
    let mut changed = options.clone();
    changed.schedule.total = 90;
    let (found, said) = find(run.path(), &Resume::Latest, &changed);
    assert!(found.is_some() && said.contains("schedule.total was 1 ") && said.contains("is 90"), "{said}");
    let other = Facts::of(&options, Data { rows: 100, rows_per_step: 8, order: Order::Shuffled { seed: 5 } });
    let error = Checkpoint::open(&run.path().join("checkpoint-0")).unwrap().allow(&other).unwrap_err();
    assert!(error.to_string().contains("gradient_accumulation_steps"), "{error}");
}

#[test]
fn old_checkpoints_go_by_number_and_never_the_new_one() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = small(temporary.path(), 48, true);
    let run = tempfile::tempdir().unwrap();
    let mut engine = loaded(small_options(&folder), &folder);
    let facts = facts(engine.options());
    let names = || {
        let entries = fs::read_dir(run.path()).unwrap();
        let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    for step in 0..11 {
        train(&mut engine, step..step + 1);
        if step >= 7 {
            checkpoint::save(run.path(), &facts, Some(2), &mut engine).unwrap();
        }
    }
    assert_eq!(names(), ["checkpoint-10", "checkpoint-11"]);
    // From here, one that came back from an earlier step.
    let mut earlier = loaded(small_options(&folder), &folder);
    train(&mut earlier, 0..2);
    checkpoint::save(run.path(), &facts, Some(1), &mut earlier).unwrap();
    assert_eq!(names(), ["checkpoint-2"]);
    // The same step again takes the place of the old one.
    let mut again = loaded(small_options(&folder), &folder);
    train(&mut again, 0..2);
    checkpoint::save(run.path(), &facts, Some(1), &mut again).unwrap();
    assert_eq!(names(), ["checkpoint-2"]);
}

#[test]
fn a_folder_that_cannot_be_written_fails_on_every_rank_and_leaves_what_was_there() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = small(temporary.path(), 48, true);
    let run = tempfile::tempdir().unwrap();
    let options = small_options(&folder);
    let errors = ranks(&options, 2, |engine| {
        engine.load(&RandomWeights::new(&engine.options().config.clone(), 3)).unwrap();
        save(run.path(), engine);
        let file = run.path().join("checkpoint-0/manifest.json");
        let facts = facts(engine.options());
        checkpoint::save(&file, &facts, None, engine).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("checkpoint-0/manifest.json")), "{errors:?}");
    assert!(errors[1].contains("rank 0"), "{errors:?}");
    // Facts of another world: the rows of a step are the same, so the checkpoint may be taken by one rank.
    assert_eq!(find(run.path(), &Resume::Latest, &options).0.unwrap().world(), 2);
}

/// Every tensor of a folder, by name.
fn read_all(folder: &Path, config: &ModelConfig) -> Vec<Vec<f32>> {
    let (source, _) = HfFolder::open(folder, config).unwrap();
    let tensors = hf_tensors(config).into_iter().map(|(name, shape)| {
        let mut values = vec![0.0; shape.iter().product::<u64>() as usize];
        source.read(&name, 0, &mut values).unwrap();
        values
    });
    tensors.collect()
}

#[test]
fn exported_weights_are_the_run_s() {
    let temporary = tempfile::tempdir().unwrap();
    let tokenizer = temporary.path().join("own.json");
    fs::write(&tokenizer, "{}").unwrap();
    let tokenizer = tokenizer.display().to_string();
    for (vocabulary, tied, dtype) in [(257, false, DType::F32), (48, true, DType::Bf16), (257, true, DType::F16)] {
        let folder = small(temporary.path(), vocabulary, tied);
        let run = tempfile::tempdir().unwrap();
        let mut options = small_options(&folder);
        options.formats = formats(dtype, DType::F32, DType::F32);
        let results = ranks(&options, 3, |engine| {
            engine.load(&RandomWeights::new(&engine.options().config.clone(), 3)).unwrap();
            train(engine, 0..2);
            save(run.path(), engine);
            checkpoint::save_model(run.path(), "bytes", engine).unwrap();
            // Written again, it takes the place of the old one.
            checkpoint::save_model(run.path(), &tokenizer, engine).unwrap();
            let weights: Vec<Vec<f32>> =
                (0..engine.groups().count() as u32).map(|g| engine.read_group(GroupId(g)).unwrap()).collect();
            let tensors = hf_tensors(&engine.options().config).into_iter().map(|(name, _)| {
                let part = engine.groups().part(&name);
                engine.slice(part, &weights[part.group.index()]).to_vec()
            });
            tensors.collect::<Vec<_>>()
        });
        let out = run.path().join("exported");
        checkpoint::export(run.path(), &out, ExportDType::F32).unwrap();
        assert!(read_all(&out, &options.config) == results[0], "{dtype:?}");
        let (read, _) = ModelConfig::from_json_file(&out.join("config.json")).unwrap();
        assert_eq!(read, options.config);

        // As trained: rounded as the run rounds, so the two agree in that type.
        let narrow = run.path().join("narrow");
        let stored = match dtype {
            DType::F32 => ExportDType::F32,
            DType::F16 => ExportDType::F16,
            _ => ExportDType::Bf16,
        };
        checkpoint::export(&run.path().join("checkpoint-2"), &narrow, stored).unwrap();
        assert!(read_all(&narrow, &options.config) == read_all(&run.path().join("model"), &options.config));
        assert!(!run.path().join("model.tmp").exists() && run.path().join("model/tokenizer.json").exists());
        assert!(checkpoint::export(run.path(), &out, stored).unwrap_err().to_string().contains("not an empty"));
    }
}
