//! Runs whose loss or gradient norm is not finite: what is said, what is kept, and how they end.

#[path = "support/binary.rs"]
mod binary;

use binary::{accepts, folder_with_text, number, output};
use std::path::Path;

const TRAIN: &str = "train --config model.json --data text.txt --max_length 16 --batch_size 2 --lr_scheduler_type constant \
                     --backend cpu --device_memory 8MiB --host_memory 8MiB --output_dir out";
/// After one update the weights are of no use: no later norm is finite.
const RUIN: &str = "--lr 1e30";

/// Exit code, standard output and error.
fn ends(folder: &Path, words: &str) -> (Option<i32>, String, String) {
    let output = output(folder, words, None);
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// Names in the run's folder that begin with `checkpoint-`.
fn checkpoints(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder.join("out")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name.starts_with("checkpoint-")).collect();
    names.sort();
    names
}

/// It ends with an error after ten steps without an update; what was saved before stays, and the run goes on from there.
#[test]
fn a_run_that_diverges_ends_and_keeps_what_was_good() {
    let folder = folder_with_text();
    let folder = folder.path();
    accepts(folder, &format!("{TRAIN} --max_steps 4 --save_steps 2 --save_total_limit 2"), None);
    let weights = || std::fs::read(folder.join("out/model/model.safetensors")).unwrap();
    let before = weights();
    let again = format!("{TRAIN} --max_steps 60 --save_steps 2 --save_total_limit 2 --resume latest");
    for launcher in ["", "run --nproc_per_node 2 "] {
        let again = match launcher {
            "" => again.clone(),
            // As many rows a step.
            _ => again.replace("--batch_size 2", "--batch_size 1"),
        };
        let (code, out, err) = ends(folder, &format!("{launcher}{again} {RUIN}"));
        assert_eq!(code, Some(1), "{err}");
        assert!(err.contains("of the last 10 steps was not finite") && err.contains("lower --lr"), "{err}");
        assert!(err.contains("the last checkpoint is out/checkpoint-4, and --resume latest goes on from it"), "{err}");
        let said = out.lines().filter(|line| line.contains("the norm is not finite")).collect::<Vec<_>>();
        assert!(said.len() == 1 && said[0].starts_with("step 6: "), "once, at the first: {out}");
        assert!(out.contains("nothing is saved after step 6: its loss or gradient norm is not finite"), "{out}");
        assert_eq!(checkpoints(folder), ["checkpoint-2", "checkpoint-4"]);
        assert_eq!(weights(), before, "the model of the run before");
    }
    accepts(folder, &again.replace("60", "6"), None);
    assert_eq!(checkpoints(folder), ["checkpoint-4", "checkpoint-6"]);
}

/// One too short for that ends with an error all the same: its weights are of no use. The report is written.
#[test]
fn a_short_run_that_diverges_leaves_no_model() {
    let folder = folder_with_text();
    let folder = folder.path();
    let (code, out, err) = ends(folder, &format!("{TRAIN} --max_steps 3 {RUIN} --save_steps 3"));
    assert_eq!(code, Some(1), "{err}");
    assert!(err.contains("loss or gradient norm of the last 2 steps was not finite, so that neither"), "{err}");
    assert!(err.contains("no checkpoint was saved"), "{err}");
    assert!(out.contains("2 of 3 updates were skipped: the gradient norm was not finite"), "{out}");
    assert!(!folder.join("out/model").exists() && checkpoints(folder).is_empty());
    let log = std::fs::read_to_string(folder.join("out/train_log.jsonl")).unwrap();
    let first: serde_json::Value = serde_json::from_str(log.lines().nth(1).unwrap()).unwrap();
    let mean = number(&folder.join("out/train_results.json"), "train_loss");
    assert_eq!(mean, first["loss"].as_f64().unwrap(), "the mean of the losses that are numbers");
}

/// A loss scale that nothing survives: the weights stay as they were, which is said, and it does not go on for ever.
#[test]
fn a_loss_scale_beyond_sense() {
    let folder = folder_with_text();
    let folder = folder.path();
    let fp16 = format!("{TRAIN} --fp16 --loss_scale 1e30");
    let (code, out, err) = ends(folder, &format!("{fp16} --max_steps 50 --save_steps 0"));
    assert_eq!(code, Some(1), "{err}");
    assert!(
        err.contains("the gradient norm of the last 10 steps was not finite, with the loss scale at its minimum"),
        "{err}"
    );
    assert!(out.contains("at the loss scale 1e30") && out.contains("the weights stay as they are"), "{out}");
    // The losses were numbers: the state is as good as before, and is saved.
    let out = accepts(folder, &format!("{fp16} --max_steps 3 --save_steps 3"), None);
    assert!(out.contains("3 of 3 updates were skipped"), "{out}");
    assert!(folder.join("out/model").exists());
    assert_eq!(checkpoints(folder), ["checkpoint-3"]);
}
