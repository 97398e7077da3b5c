//! Forward and backward against the reference: logits, losses, norms and every gradient.
//!
//! Tolerances are those of the reference's own arithmetic: f32 sums in another order differ by about 1e-6 of a tensor's
//! norm, so 1e-4 leaves no room for a wrong term; 16-bit weights and activations round at 2⁻⁸ or 2⁻¹¹.

mod support;

use castor_kernels::DType;
use castor_trainer::{
    activations::Keep,
    blueprint::{Options, formats},
    parity::{self, Batch},
};
use std::path::Path;
use support::{close, engine, inputs, json, options, shared};

/// Models of other families than Llama, in `inputs/models`.
const FAMILIES: [&str; 2] = ["qwen2", "mistral"];
const GOLDEN: [&str; 3] = ["mha", "gqa_tied", "llama3_rope"];

fn golden(case: &str, change: impl Fn(&mut Options)) -> Option<parity::Report> {
    let folder = shared("golden")?.join(case);
    Some(compare(&folder, change))
}

fn compare(folder: &Path, change: impl Fn(&mut Options)) -> parity::Report {
    let batch = Batch::read(&folder.join("batch.safetensors")).unwrap();
    let mut options = options(folder, batch.rows(), batch.sequence, 1);
    options.optimizer = None;
    change(&mut options);
    let mut engine = engine(options, folder);
    let expect = folder.join("expect.safetensors");
    let report = parity::run(&mut engine, &batch, Some(&expect), None, 1e-4).unwrap();
    let expected = json(&folder.join("expect.json"));
    assert_eq!(report.tokens, expected["tokens"].as_u64().unwrap());
    // Logits, and one gradient per named tensor.
    assert_eq!(report.errors().count(), 1 + engine.groups().parts().len());
    report
}

#[track_caller]
fn passes(report: &parity::Report, tolerance: f64) {
    let (name, error) = report.worst().unwrap();
    assert!(error <= tolerance, "{name}: {error:.2e}\n{report}");
}

#[test]
fn golden_cases_in_f32() {
    for case in GOLDEN {
        let Some(report) = golden(case, |_| {}) else {
            return;
        };
        passes(&report, 1e-4);
        let expected = json(&shared("golden").unwrap().join(case).join("expect.json"));
        close(case, report.loss, expected["loss"].as_f64().unwrap(), 1e-6);
        let norm = expected["grad_norm"].as_f64().unwrap();
        close(case, report.grad_norm, norm, 1e-5);
    }
}

#[test]
fn golden_cases_with_plain_attention() {
    for case in GOLDEN {
        let Some(report) = golden(case, |options| options.fused_attention = false) else {
            return;
        };
        passes(&report, 1e-4);
    }
}

#[test]
fn golden_cases_with_logits_in_small_chunks() {
    for case in GOLDEN {
        let chunks = |options: &mut Options| options.logits_bytes = 1;
        let Some(report) = golden(case, chunks) else {
            return;
        };
        passes(&report, 1e-4);
    }
}

#[test]
fn golden_cases_in_sixteen_bits() {
    for case in GOLDEN {
        for (dtype, tolerance) in [(DType::Bf16, 3e-2), (DType::F16, 4e-3)] {
            let precision = |options: &mut Options| {
                options.formats = formats(dtype, dtype, DType::F32);
            };
            let Some(report) = golden(case, precision) else {
                return;
            };
            passes(&report, tolerance);
            let expected = json(&shared("golden").unwrap().join(case).join("expect.json"));
            close(case, report.loss, expected["loss"].as_f64().unwrap(), 1e-2);
            let norm = expected["grad_norm"].as_f64().unwrap();
            close(case, report.grad_norm, norm, 1e-2);
        }
    }
}

#[test]
fn what_is_kept_changes_no_bit() {
    for case in GOLDEN {
        let results = |keep: Vec<Keep>| {
            let folder = shared("golden")?.join(case);
            let batch = Batch::read(&folder.join("batch.safetensors")).unwrap();
            let mut options = options(&folder, batch.rows(), batch.sequence, 1);
            options.optimizer = None;
            options.keep = keep;
            let mut engine = engine(options, &folder);
            let counted = batch.micro().counted(batch.sequence);
            Some(parity::compute(&mut engine, &batch, counted).unwrap())
        };
        let Some(all) = results(vec![Keep::All; 2]) else {
            return;
        };
        for keep in [
            vec![Keep::Selective; 2],
            vec![Keep::Ffn; 2],
            vec![Keep::Block; 2],
            vec![Keep::Block, Keep::Selective],
            vec![Keep::All, Keep::Block],
        ] {
            let other = results(keep.clone()).unwrap();
            for (name, (_, values)) in &all.tensors {
                assert_eq!(values, &other.tensors[name].1, "{case} {keep:?} {name}");
            }
        }
    }
}

#[test]
fn other_families() {
    for case in FAMILIES {
        let folder = inputs("models").join(case);
        let expected = json(&folder.join("expect.json"));
        let (loss, norm) = (expected["loss"].as_f64().unwrap(), expected["grad_norm"].as_f64().unwrap());
        for (keep, fused) in [(Keep::All, true), (Keep::Block, false)] {
            let report = compare(&folder, |options| {
                options.keep.fill(keep);
                options.fused_attention = fused;
            });
            passes(&report, 1e-4);
            close(case, report.loss, loss, 1e-6);
            close(case, report.grad_norm, norm, 1e-5);
        }
        let report = compare(&folder, |options| options.formats = formats(DType::Bf16, DType::Bf16, DType::F32));
        passes(&report, 3e-2);
    }
}

#[test]
fn oracle_cases() {
    let Some(folder) = shared("cases/model_oracle") else {
        return;
    };
    let expected = json(&folder.join("expected.json"));
    let rows = expected["input_ids"].as_array().unwrap();
    let ids: Vec<i32> =
        rows.iter().flat_map(|row| row.as_array().unwrap()).map(|id| id.as_i64().unwrap() as i32).collect();
    let batch = Batch { sequence: ids.len() as u64 / rows.len() as u64, labels: ids.clone(), ids };
    for (case, expected) in expected["cases"].as_object().unwrap() {
        let folder = folder.join(case);
        let mut options = options(&folder, batch.rows(), batch.sequence, 1);
        options.optimizer = None;
        let mut engine = engine(options, &folder);
        let counted = batch.micro().counted(batch.sequence);
        let results = parity::compute(&mut engine, &batch, counted).unwrap();
        let values = |name: &str| &results.tensors[name].1;
        let loss = expected["loss"].as_f64().unwrap();
        close(case, f64::from(values("loss")[0]), loss, 1e-6);
        let norm = expected["grad_norm"].as_f64().unwrap();
        close(case, f64::from(values("grad_norm")[0]), norm, 1e-5);
        let last: Vec<f32> =
            expected["logits_last_first8"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect();
        let vocabulary = engine.options().config.vocab_size as usize;
        let start = (batch.sequence as usize - 1) * vocabulary;
        let logits = &values("logits")[start..start + 8];
        let error = parity::relative_error(logits, &last);
        assert!(error < 1e-4, "{case}: logits {logits:?} instead of {last:?}");
        for (name, norm) in expected["grad_l2"].as_object().unwrap() {
            let gradient = values(&format!("grad.{name}"));
            let square: f64 = gradient.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
            close(name, square.sqrt(), norm.as_f64().unwrap(), 1e-4);
        }
    }
}
