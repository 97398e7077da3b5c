//! The real binary, run to its end outside of any world.
#![allow(dead_code, reason = "each test file uses its part")]

use std::path::Path;
use std::process::{Command, Output, Stdio};

/// `castor` with `words`, one of which may be `last`, a text with blanks.
pub fn output(folder: &Path, words: &str, last: Option<&str>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_castor"));
    command.args(words.split_whitespace()).args(last).current_dir(folder).stdin(Stdio::null());
    // The rates that a user has measured are no part of a test.
    command.env("XDG_CACHE_HOME", folder);
    for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
        command.env_remove(name);
    }
    command.output().unwrap()
}

/// As [`output`]; it must succeed. Standard output.
#[track_caller]
pub fn accepts(folder: &Path, words: &str, last: Option<&str>) -> String {
    let output = output(folder, words, last);
    assert!(output.status.success(), "castor {words}\n{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// As [`output`]; it must end with exit code 2. Standard error.
#[track_caller]
pub fn refuses(folder: &Path, words: &str) -> String {
    let output = output(folder, words, None);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "castor {words}\n{said}");
    said
}

/// A number of a JSON file.
pub fn number(path: &Path, key: &str) -> f64 {
    let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice::<serde_json::Value>(&bytes).unwrap()[key].as_f64().unwrap()
}

/// A folder with the shape of a tiny model for the byte tokenizer, `model.json`.
pub fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let shape = r#"{"model_type": "llama", "vocab_size": 259, "hidden_size": 48, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": false}"#;
    std::fs::write(folder.path().join("model.json"), shape).unwrap();
    folder
}

/// As [`folder`], with a text to train on, `text.txt`.
pub fn folder_with_text() -> tempfile::TempDir {
    let folder = folder();
    std::fs::write(folder.path().join("text.txt"), "The quick brown fox jumps over the lazy dog. ".repeat(40)).unwrap();
    folder
}
