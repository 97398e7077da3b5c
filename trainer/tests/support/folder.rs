//! The real binary in a folder of its own, where every refusal must be one sentence.
#![allow(dead_code, reason = "each test file uses its part")]

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

/// A folder with a tiny model, a text and whatever a test adds.
pub struct Folder(tempfile::TempDir);

impl Folder {
    pub fn new() -> Folder {
        let folder = Folder(tempfile::tempdir().unwrap());
        folder.write(
            "model.json",
            r#"{"model_type": "llama", "vocab_size": 259, "hidden_size": 48, "intermediate_size": 96,
                "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": false}"#,
        );
        folder.write("text.txt", "The quick brown fox jumps over the lazy dog. ".repeat(40));
        folder
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        std::fs::write(self.path(name), content).unwrap();
    }

    /// `castor` with words, in this folder and outside of any world.
    pub fn castor(&self, words: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_castor"));
        command.args(words.split_whitespace()).current_dir(self.0.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // The rates that a user has measured are no part of a test.
        command.env("XDG_CACHE_HOME", self.path("cache"));
        for (name, _) in std::env::vars() {
            let of_a_world = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];
            if of_a_world.contains(&name.as_str()) || name.starts_with("SLURM_") || name.starts_with("OMPI_") {
                command.env_remove(name);
            }
        }
        command
    }

    pub fn output(&self, words: &str) -> Output {
        self.castor(words).output().unwrap()
    }

    /// Runs to the end with exit code 0; standard output and error.
    #[track_caller]
    pub fn accepts(&self, words: &str) -> (String, String) {
        let output = self.output(words);
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(0), "castor {words}\n{err}");
        (out, err)
    }

    /// Ends with `code` and one sentence in which each of `parts` occurs; the sentence.
    #[track_caller]
    pub fn refuses(&self, words: &str, code: i32, parts: &[&str]) -> String {
        let output = self.output(words);
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "castor {words}\n{err}");
        let (last, before) =
            err.lines().collect::<Vec<_>>().split_last().map(|(l, b)| (l.to_string(), b.len())).unwrap();
        assert!(last.starts_with("castor: error: "), "castor {words}\n{err}");
        assert_eq!(before, 0, "more than one line: castor {words}\n{err}");
        for part in parts {
            assert!(last.contains(part), "castor {words}: no {part:?} in: {last}");
        }
        last
    }
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}
