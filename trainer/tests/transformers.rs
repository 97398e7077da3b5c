//! What Castor leaves, loaded by Hugging Face transformers: every weight is found, and logits, loss and gradients are
//! those that Castor computes from the same folder.
//!
//! Needs a Python with torch, transformers and safetensors, `python3` or the one that `CASTOR_TEST_PYTHON` names, and is
//! skipped, said aloud, where there is none.

#[path = "support/binary.rs"]
mod binary;

use binary::{accepts, output};
use castor_trainer::{config::ModelConfig, weights::hf_tensors};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};
use std::{ffi::OsString, path::Path, process::Command};

/// Prints the class of a model and writes what it computes.
const REFERENCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/inputs/transformers/reference.py");
const SEQUENCE: usize = 24;

/// Ends with 0 where the packages are there; to import them takes seconds.
const FOUND: &str = "import sys, importlib.util as i; \
                     sys.exit(not all(i.find_spec(name) for name in ['torch', 'transformers', 'safetensors']))";

/// A Python with the packages.
fn python() -> Option<OsString> {
    let chosen = std::env::var_os("CASTOR_TEST_PYTHON");
    let is_chosen = chosen.is_some();
    let python = chosen.unwrap_or_else(|| "python3".into());
    let tried = Command::new(&python).args(["-c", FOUND]).output();
    if tried.is_ok_and(|output| output.status.success()) {
        return Some(python);
    }
    assert!(!is_chosen, "CASTOR_TEST_PYTHON is {python:?}, which has no torch, transformers and safetensors");
    eprintln!("skipped: python3 has no torch, transformers and safetensors; name one that has: CASTOR_TEST_PYTHON");
    None
}

/// Two rows of which not every token counts.
fn write_batch(path: &Path, vocabulary: u64) {
    let ids: Vec<i64> = (0..2 * SEQUENCE as u64).map(|i| (i * i * 31 % vocabulary) as i64).collect();
    let labels: Vec<i64> = ids.iter().enumerate().map(|(i, &id)| if i % 7 == 3 { -100 } else { id }).collect();
    let view = |values| TensorView::new(Dtype::I64, vec![2, SEQUENCE], bytemuck::cast_slice(values)).unwrap();
    safetensors::serialize_to_file([("input_ids", view(&ids)), ("labels", view(&labels))], None, path).unwrap();
}

/// A model of `shape`, trained a few steps, is transformers' `class`, and the same, as the run left it and as it is
/// exported.
#[track_caller]
fn is_the_same_in_transformers(class: &str, shape: Value) {
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut model = json!({
        "vocab_size": 259, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
        "bos_token_id": 256, "eos_token_id": [257, 10], "pad_token_id": 300,
    });
    for (key, value) in shape.as_object().unwrap() {
        model[key] = value.clone();
    }
    std::fs::write(folder.join("model.json"), model.to_string()).unwrap();
    std::fs::write(folder.join("text.txt"), "The quick brown fox jumps over the lazy dog.".repeat(9)).unwrap();
    write_batch(&folder.join("batch.safetensors"), 259);
    accepts(
        folder,
        "train --config model.json --data text.txt --max_length 24 --batch_size 4 --max_steps 3 --save_steps 3 --lr 1e-2 \
         --lr_scheduler_type constant --weight_decay 0.1 --backend cpu --output_dir out",
        None,
    );
    accepts(folder, "export out exported --dtype bf16", None);
    let models = [("out/model", "run.safetensors"), ("exported", "exported.safetensors")];
    let reference = Command::new(&python)
        .args([REFERENCE, "batch.safetensors"])
        .args(models.iter().flat_map(|(model, expect)| [model, expect]))
        .current_dir(folder)
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .unwrap();
    assert!(reference.status.success(), "{}", String::from_utf8_lossy(&reference.stderr));
    let is = format!("{class} bos 256 eos [257, 10]\n");
    assert_eq!(String::from_utf8_lossy(&reference.stdout), is.repeat(2));
    for (model, expect) in models {
        // f32 sums in another order differ by about 1e-6 of a tensor's norm.
        let words = format!(
            "parity --model {model} --batch batch.safetensors --expect {expect} --tolerance 1e-4 --backend cpu"
        );
        let parity = output(folder, &words, None);
        let told = String::from_utf8_lossy(&parity.stdout);
        assert!(parity.status.success(), "{told}{}", String::from_utf8_lossy(&parity.stderr));
        let (config, _) = ModelConfig::from_json_file(&folder.join(model).join("config.json")).unwrap();
        // Logits, loss, norm and a gradient per tensor.
        let all = 3 + hf_tensors(&config).len();
        assert!(told.contains(&format!("compared  {all} of {all} tensors")), "{told}");
    }
}

#[test]
fn llama() {
    is_the_same_in_transformers("LlamaForCausalLM", json!({"model_type": "llama"}));
}

#[test]
fn llama_with_fewer_kv_heads_a_tied_head_and_stretched_positions() {
    let scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16});
    let shape = json!({"model_type": "llama", "num_key_value_heads": 2, "tie_word_embeddings": true,
        "rope_theta": 500000.0, "rope_scaling": scaling});
    is_the_same_in_transformers("LlamaForCausalLM", shape);
}

#[test]
fn llama_with_biases() {
    let shape = json!({"model_type": "llama", "num_key_value_heads": 1, "head_dim": 16, "attention_bias": true,
        "mlp_bias": true});
    is_the_same_in_transformers("LlamaForCausalLM", shape);
}

#[test]
fn qwen2() {
    let shape = json!({"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": true,
        "use_sliding_window": false, "sliding_window": 8, "max_window_layers": 2});
    is_the_same_in_transformers("Qwen2ForCausalLM", shape);
}

#[test]
fn qwen2_within_its_window() {
    let shape = json!({"model_type": "qwen2", "num_key_value_heads": 1, "use_sliding_window": true,
        "sliding_window": SEQUENCE, "max_window_layers": 1});
    is_the_same_in_transformers("Qwen2ForCausalLM", shape);
}

#[test]
fn mistral_within_its_window() {
    let shape = json!({"model_type": "mistral", "num_key_value_heads": 2, "head_dim": 16, "sliding_window": SEQUENCE});
    is_the_same_in_transformers("MistralForCausalLM", shape);
}
