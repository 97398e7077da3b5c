//! Whole runs against the reference: losses, norms and weights over steps, and laws between runs of our own.

mod support;

use castor_kernels::DType;
use castor_runtime::{
    GroupId,
    plan::Budgets,
    policy::{AutoPolicy, HostPolicy, PlacementPolicy, StaticPolicy},
};
use castor_trainer::{
    activations::Keep,
    blueprint::{Options, formats},
    engine::{Engine, EstimateLabels, Outcome, StepInputs, StepResult},
    inputs::MicroBatch,
    loss_scale::Dynamic,
    lr::{Convention, Decay, Schedule},
    optimizer::Optimizer,
    parity::Batch,
};
use safetensors::SafeTensors;
use std::path::Path;
use support::{adamw, close, engine, engine_with, inputs, json, options, plenty, shared, tight};

const GOLDEN: [&str; 3] = ["mha", "gqa_tied", "llama3_rope"];
/// Sums in another order make losses differ by less than this over ten steps; a GPU's powers and exponentials are
/// rounded otherwise too.
fn tolerance() -> f64 {
    if support::on_cuda() { 1e-4 } else { 1e-5 }
}

/// Runs steps over windows of batches and returns every result.
fn run(engine: &mut Engine, windows: &[&[Batch]]) -> Vec<StepResult> {
    let mut results = Vec::new();
    for window in windows {
        let micros: Vec<MicroBatch> = window.iter().map(Batch::micro).collect();
        let tokens = window.iter().map(|b| b.micro().counted(b.sequence)).sum();
        let inputs = StepInputs { micros: &micros, tokens };
        results.extend(engine.step(&inputs).unwrap());
    }
    results.extend(engine.finish().unwrap());
    results
}

fn golden_batches(folder: &Path) -> Vec<Batch> {
    let path = folder.join("batch.safetensors");
    (0..10).map(|index| Batch::read_numbered(&path, index).unwrap()).collect()
}

fn golden_options(folder: &Path, micro_batches: u64) -> Options {
    options(folder, 3, 40, micro_batches)
}

#[track_caller]
fn follows(case: &str, results: &[StepResult], expected: &serde_json::Value) {
    let numbers = |key: &str| -> Vec<f64> {
        let list = expected[key].as_array().unwrap();
        list.iter().map(|x| x.as_f64().unwrap()).collect()
    };
    let (losses, norms) = (numbers("losses"), numbers("grad_norms"));
    assert_eq!(results.len(), losses.len());
    for ((result, loss), norm) in results.iter().zip(losses).zip(norms) {
        let what = format!("{case} step {}", result.step);
        assert_eq!(result.outcome, Outcome::Updated);
        close(&format!("{what} loss"), result.loss, loss, tolerance());
        close(&format!("{what} norm"), result.grad_norm, norm, 1e-4);
    }
}

#[test]
fn golden_adamw() {
    let Some(golden) = shared("golden") else {
        return;
    };
    for case in GOLDEN {
        let folder = golden.join(case);
        let expected = json(&folder.join("expect.json"));
        let batches = golden_batches(&folder);
        for (key, accumulate) in [("adamw", 1), ("adamw_accumulate2", 2)] {
            let mut engine = engine(golden_options(&folder, accumulate as u64), &folder);
            let windows: Vec<&[Batch]> = batches.chunks(accumulate).collect();
            let results = run(&mut engine, &windows);
            follows(&format!("{case} {key}"), &results, &expected[key]);
        }
    }
}

/// Matrices decay, much; the biases of Qwen2 are trained and do not.
#[test]
fn other_families() {
    for case in ["qwen2", "mistral"] {
        let folder = inputs("models").join(case);
        let batches = golden_batches(&folder);
        let options = Options { optimizer: Some(adamw(0.9, 0.95, 10.0)), ..options(&folder, 2, 24, 1) };
        let mut engine = engine(options, &folder);
        let windows: Vec<&[Batch]> = batches.chunks(1).collect();
        let results = run(&mut engine, &windows);
        follows(case, &results, &json(&folder.join("expect.json"))["adamw"]);
    }
}

#[test]
fn golden_sophia_with_given_labels() {
    let Some(golden) = shared("golden") else {
        return;
    };
    for case in GOLDEN {
        let folder = golden.join(case);
        let expected = json(&folder.join("expect.json"));
        let batches = golden_batches(&folder);
        let mut options = golden_options(&folder, 1);
        options.optimizer =
            Some(Optimizer::Sophia { beta1: 0.965, beta2: 0.99, rho: 0.04, weight_decay: 0.1, every: 2 });
        let mut engine = engine(options, &folder);
        let labels = std::fs::read(folder.join("sophia_labels.safetensors")).unwrap();
        let labels = SafeTensors::deserialize(&labels).unwrap();
        let mut results = Vec::new();
        for (index, batch) in batches.iter().enumerate() {
            if index % 2 == 0 {
                let mut drawn = batch.clone();
                let sampled = labels.tensor(&format!("sampled_labels.{}", index / 2)).unwrap();
                let mut sampled =
                    sampled.data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as i32);
                for row in drawn.labels.chunks_exact_mut(batch.sequence as usize) {
                    row[0] = -100;
                    row[1..].fill_with(|| sampled.next().unwrap());
                }
                engine.estimate(&drawn.micro(), EstimateLabels::Given).unwrap();
            }
            let micros = [batch.micro()];
            let tokens = batch.micro().counted(batch.sequence);
            let inputs = StepInputs { micros: &micros, tokens };
            results.extend(engine.train(&inputs).unwrap());
        }
        results.extend(engine.finish().unwrap());
        follows(&format!("{case} sophia"), &results, &expected["sophia_g"]);
    }
}

#[test]
fn trajectories_of_the_reference_trainer() {
    let Some(folder) = shared("cases/trajectory") else {
        return;
    };
    let tokens = json(&folder.join("tokens.json"));
    let rows: Vec<Vec<i32>> = serde_json::from_value(tokens).unwrap();
    let expected = json(&folder.join("expected.json"));
    for (name, expected) in expected["runs"].as_object().unwrap() {
        let args = &expected["args"];
        let number = |key: &str, default: f64| args[key].as_f64().unwrap_or(default);
        let (rows_each, window) = (number("mb", 0.0) as usize, number("ga", 0.0) as usize);
        let epochs = number("epochs", 0.0) as usize;
        let betas = args["bet"].as_array().map_or([0.9, 0.999], |b| [b[0].as_f64().unwrap(), b[1].as_f64().unwrap()]);
        let batches: Vec<Batch> = rows
            .chunks(rows_each)
            .map(|rows| Batch { sequence: rows[0].len() as u64, ids: rows.concat(), labels: rows.concat() })
            .collect();
        let epoch: Vec<&[Batch]> = batches.chunks(window).collect();
        let windows = epoch.repeat(epochs);
        let model = folder.join(args["init"].as_str().unwrap());
        let largest = epoch.iter().map(|w| w.len()).max().unwrap() as u64;
        let mut options = options(&model, rows_each as u64, batches[0].sequence, largest);
        options.optimizer = Some(adamw(betas[0], betas[1], 0.01));
        options.max_norm = number("clip", 1.0) as f32;
        options.schedule = Schedule {
            base: 5e-3,
            decay: Decay::Cosine,
            convention: Convention::HuggingFace,
            min_ratio: 0.0,
            warmup: 2,
            total: windows.len() as u64,
        };
        let mut engine = engine(options, &model);
        let log = expected["log"].as_array().unwrap();
        assert_eq!(log.len(), windows.len(), "{name}");
        for (window, expected) in windows.iter().zip(log) {
            let what = format!("{name} step {}", expected["step"]);
            let value = |key: &str| expected[key].as_f64().unwrap();
            let result = run(&mut engine, &[window])[0];
            close(&what, result.loss, value("loss"), tolerance());
            // A large rate multiplies the rounding of single weights by up to 100 a step; the gradient's norm
            // shows it first.
            let norm = value("grad_norm_before_clip");
            close(&what, result.grad_norm, norm, 1e-3);
            assert!((result.lr - value("lr_used")).abs() < 1e-12, "{what}: {}", result.lr);
            assert_eq!(result.tokens, expected["target_tokens"].as_u64().unwrap());
            let weights = sum_of_weights(&mut engine);
            close(&what, weights, value("sum_abs_params"), tolerance());
        }
    }
}

fn sum_of_weights(engine: &mut Engine) -> f64 {
    (0..engine.groups().count() as u32)
        .map(|group| {
            let weights = engine.read_group(GroupId(group)).unwrap();
            weights.iter().map(|&w| f64::from(w.abs())).sum::<f64>()
        })
        .sum()
}

/// Losses, norms and final weights of ten steps, in bits.
fn bits(engine: &mut Engine, folder: &Path, accumulate: usize) -> Vec<u64> {
    let batches = golden_batches(folder);
    let windows: Vec<&[Batch]> = batches.chunks(accumulate).collect();
    let results = run(engine, &windows);
    let mut bits: Vec<u64> = results.iter().flat_map(|r| [r.loss.to_bits(), r.grad_norm.to_bits()]).collect();
    for group in 0..engine.groups().count() as u32 {
        let weights = engine.read_group(GroupId(group)).unwrap();
        bits.extend(weights.iter().map(|w| u64::from(w.to_bits())));
    }
    bits
}

fn sophia(every: u64) -> Optimizer {
    Optimizer::Sophia { beta1: 0.965, beta2: 0.99, rho: 0.04, weight_decay: 0.1, every }
}

/// L6: the same bits whatever the policy, the budget and what is kept.
#[test]
fn placement_and_recompute_change_no_bit() {
    let Some(golden) = shared("golden") else {
        return;
    };
    let folder = golden.join("gqa_tied");
    let nvme = tempfile::tempdir().unwrap();
    for (dtype, moments, optimizer) in [
        (DType::F32, DType::F32, adamw(0.9, 0.95, 0.1)),
        (DType::Bf16, DType::Bf16, adamw(0.9, 0.95, 0.1)),
        (DType::Bf16, DType::Q8, adamw(0.9, 0.95, 0.1)),
        (DType::F32, DType::F32, sophia(3)),
    ] {
        let make = |keep: Keep| {
            let mut options = golden_options(&folder, 2);
            options.formats = formats(dtype, dtype, moments);
            options.keep = vec![keep; 2];
            options.optimizer = Some(optimizer);
            options
        };
        let mut plain_engine = engine(make(Keep::All), &folder);
        let plain = bits(&mut plain_engine, &folder, 2);
        let model = plain_engine.manager().layout().model_bytes();
        let tight = tight(&make(Keep::Block), model * 3 / 4, model * 3 / 8, nvme.path());
        let host = HostPolicy { parameters: true, optimizer: true };
        let half = StaticPolicy { offload_param_frac: 0.5, offload_optim_frac: 0.5 };
        let cases: [(&dyn PlacementPolicy, Budgets, Keep); 4] = [
            (&host, plenty(), Keep::All),
            (&half, plenty(), Keep::Selective),
            (&AutoPolicy::USUAL, plenty(), Keep::Ffn),
            (&AutoPolicy::USUAL, tight, Keep::Block),
        ];
        for (policy, budgets, keep) in cases {
            let what = format!("{dtype:?} {moments:?} {} {keep:?}", policy.name());
            let mut engine = engine_with(make(keep), &folder, policy, budgets);
            assert!(plain == bits(&mut engine, &folder, 2), "{what}");
            let moved = engine.manager().traffic();
            // The squeezed run has used every tier.
            assert!(keep != Keep::Block || moved.nvme_read > 0 && moved.host_to_device > 0, "{what}: {moved:?}");
        }
    }
}

/// A 16-bit remainder beside the bf16 weight is as good as an f32 master.
#[test]
fn split_masters_are_full_masters() {
    let Some(golden) = shared("golden") else {
        return;
    };
    let folder = golden.join("mha");
    let run = |master: DType| {
        let mut options = golden_options(&folder, 1);
        options.formats = formats(DType::Bf16, DType::F32, DType::F32);
        options.formats.master = Some(master);
        bits(&mut engine(options, &folder), &folder, 1)
    };
    assert!(run(DType::Rem16) == run(DType::F32));
}

/// Sixteen-bit training follows the f32 trajectory to the precision of its activations.
#[test]
fn sixteen_bits_follow_the_reference() {
    let Some(golden) = shared("golden") else {
        return;
    };
    let folder = golden.join("llama3_rope");
    let expected = json(&folder.join("expect.json"));
    let batches = golden_batches(&folder);
    let windows: Vec<&[Batch]> = batches.chunks(1).collect();
    for dtype in [DType::Bf16, DType::F16] {
        let mut options = golden_options(&folder, 1);
        options.formats = formats(dtype, DType::F32, DType::F32);
        options.loss_scale = (dtype == DType::F16).then(|| Dynamic { initial: 1024.0, ..Dynamic::default() });
        let results = run(&mut engine(options, &folder), &windows);
        for (result, loss) in results.iter().zip(expected["adamw"]["losses"].as_array().unwrap()) {
            assert_eq!(result.outcome, Outcome::Updated);
            close("loss", result.loss, loss.as_f64().unwrap(), 1e-2);
        }
    }
}

/// L9: a step whose gradients overflow changes nothing, is counted, and makes the scale fall.
#[test]
fn overflow_skips_the_update_and_lowers_the_scale() {
    let Some(golden) = shared("golden") else {
        return;
    };
    let folder = golden.join("mha");
    let batches = golden_batches(&folder);
    let mut options = golden_options(&folder, 1);
    options.formats = formats(DType::F16, DType::F16, DType::F32);
    options.loss_scale = Some(Dynamic { initial: 1e9, ..Dynamic::default() });
    let mut engine = engine(options, &folder);
    let before = sum_of_weights(&mut engine);
    let first = run(&mut engine, &[&batches[..1]])[0];
    assert_eq!(first.outcome, Outcome::NotFinite);
    assert_eq!(before.to_bits(), sum_of_weights(&mut engine).to_bits());
    let windows: Vec<&[Batch]> = batches.chunks(1).cycle().take(40).collect();
    let results = run(&mut engine, &windows);
    let last = results.last().unwrap();
    assert_eq!(last.outcome, Outcome::Updated);
    assert!(last.loss_scale < 1e9);
    let progress = engine.progress();
    let skipped = results.iter().filter(|r| r.outcome == Outcome::NotFinite);
    assert_eq!(progress.not_finite, 1 + skipped.count() as u64);
    assert_eq!(progress.applied + progress.not_finite, 41);
}

/// A step in which no token counts computes nothing; one of its micro-batches may also be so.
#[test]
fn masked_steps_and_micro_batches() {
    let Some(golden) = shared("golden") else {
        return;
    };
    let folder = golden.join("gqa_tied");
    let batches = golden_batches(&folder);
    let mut masked = batches[1].clone();
    masked.labels.fill(-100);
    let mut with = engine(golden_options(&folder, 2), &folder);
    let before = sum_of_weights(&mut with);
    let nothing = run(&mut with, &[&[masked.clone()]])[0];
    assert_eq!(nothing.outcome, Outcome::NothingCounts);
    assert_eq!(before.to_bits(), sum_of_weights(&mut with).to_bits());
    assert_eq!(with.progress().nothing_counts, 1);

    let mut without = engine(golden_options(&folder, 2), &folder);
    let padded = run(&mut with, &[&[batches[0].clone(), masked]])[0];
    let plain = run(&mut without, &[&batches[..1]])[0];
    assert_eq!(padded.loss.to_bits(), plain.loss.to_bits());
    close("norm", padded.grad_norm, plain.grad_norm, 1e-6);
}

/// Labels drawn from the model: the same draw every time, and training that goes down.
#[test]
fn sophia_with_its_own_labels_trains() {
    let Some(golden) = shared("golden") else {
        return;
    };
    let folder = golden.join("mha");
    let batches = golden_batches(&folder);
    let windows: Vec<&[Batch]> = std::iter::repeat_n(&batches[..1], 12).collect();
    let losses = || -> Vec<u64> {
        let mut options = golden_options(&folder, 1);
        options.optimizer = Some(sophia(4));
        let results = run(&mut engine(options, &folder), &windows);
        results.iter().map(|r| r.loss.to_bits()).collect()
    };
    let first = losses();
    assert_eq!(first, losses());
    let loss = |index: usize| f64::from_bits(first[index]);
    assert!(loss(11) < loss(0) - 0.1, "{} to {}", loss(0), loss(11));
}

/// Evaluation between steps is the loss of the weights as they are, and leaves training untouched.
#[test]
fn evaluation_changes_nothing() {
    let Some(golden) = shared("golden") else {
        return;
    };
    let folder = golden.join("gqa_tied");
    let batches = golden_batches(&folder);
    let mut plain = engine(golden_options(&folder, 1), &folder);
    let mut evaluated = engine(golden_options(&folder, 1), &folder);
    for batch in &batches {
        let micros = [batch.micro()];
        let tokens = batch.micro().counted(batch.sequence);
        let before = evaluated.evaluate(&micros).unwrap() / tokens as f64;
        let window = std::slice::from_ref(batch);
        let a = run(&mut plain, &[window])[0];
        let b = run(&mut evaluated, &[window])[0];
        assert_eq!(a.loss.to_bits(), b.loss.to_bits());
        assert_eq!(before.to_bits(), b.loss.to_bits());
    }
}
