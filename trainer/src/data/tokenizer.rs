//! Text to token ids: the embedded byte-level tokenizer, or a `tokenizer.json`.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::config::json;
use crate::error::{Error, Result};

/// Beginning-of-document id of the byte tokenizer.
const BYTES_BOS: u32 = 256;
/// End-of-document id of the byte tokenizer.
const BYTES_EOS: u32 = 257;
/// Ids of the byte tokenizer: 256 bytes, BOS, EOS, and a padding id that packed rows never use but that
/// fine-tuning tools expect to exist.
const BYTES_VOCABULARY: u64 = 259;

/// Names that real vocabularies give to the two ids, tried in order when no `tokenizer_config.json` says it.
const BOS_NAMES: &[&str] = &["<s>", "<|begin_of_text|>", "<|startoftext|>", "<|endoftext|>"];
const EOS_NAMES: &[&str] = &["</s>", "<|end_of_text|>", "<|endoftext|>"];

/// A tokenizer. BOS and EOS are added by the packer, explicitly, never by the tokenizer's own template: what
/// templates do differs between uploads of the same model.
pub struct Tokenizer {
    kind: Kind,
    bos: Option<u32>,
    eos: Option<u32>,
    vocabulary: u64,
    name: String,
}

enum Kind {
    Bytes,
    File(Box<tokenizers::Tokenizer>),
}

impl Tokenizer {
    /// The embedded tokenizer: ids 0–255 are bytes, 256 BOS, 257 EOS, 258 padding. It needs no file and
    /// loses nothing.
    pub fn bytes() -> Tokenizer {
        Tokenizer {
            kind: Kind::Bytes,
            bos: Some(BYTES_BOS),
            eos: Some(BYTES_EOS),
            vocabulary: BYTES_VOCABULARY,
            name: "bytes".into(),
        }
    }

    /// The tokenizer that `--tokenizer` names: `bytes`, a `tokenizer.json`, or a folder that holds one.
    ///
    /// # Errors
    /// [`Error::Usage`] if there is none or it cannot be read.
    pub fn open(name: &str) -> Result<Tokenizer> {
        if name == "bytes" {
            return Ok(Tokenizer::bytes());
        }
        let mut path = PathBuf::from(name);
        if path.is_dir() {
            if !path.join("tokenizer.json").exists() && path.join("tokenizer.model").exists() {
                return Err(Error::Usage(format!(
                    "{name}: tokenizer.model (sentencepiece) is not read; load it once with transformers' \
                     AutoTokenizer and save_pretrained, which writes tokenizer.json"
                )));
            }
            path.push("tokenizer.json");
        }
        if !path.is_file() {
            return Err(Error::Usage(format!(
                "--tokenizer {name}: {} is not there; give a tokenizer.json, its folder, or `bytes`",
                path.display()
            )));
        }
        // The strict reader first: it places mistakes, which the tokenizer's own reader does not.
        json::read(&path)?;
        let refuse = |e| Error::Usage(format!("{}: not a tokenizer: {e}", path.display()));
        let mut inner = tokenizers::Tokenizer::from_file(&path).map_err(refuse)?;
        // Files saved from a running pipeline carry its truncation, which would cut documents silently.
        inner.with_truncation(None).map_err(refuse)?;
        inner.with_padding(None);
        let ids = inner.get_vocab(true);
        let vocabulary = ids.values().max().map_or(0, |id| u64::from(*id) + 1);
        let config = beside(&path, "tokenizer_config.json")?;
        let special = |key: &str, usual: &[&str]| -> Result<Option<u32>> {
            if let Some(name) = config.as_ref().and_then(|c| token_name(&c[key])) {
                return ids.get(name).copied().map(Some).ok_or_else(|| {
                    Error::Usage(format!(
                        "{}: tokenizer_config.json names {key} {name:?}, which the vocabulary does not have",
                        path.display()
                    ))
                });
            }
            Ok(usual.iter().find_map(|name| ids.get(*name).copied()))
        };
        Ok(Tokenizer {
            bos: special("bos_token", BOS_NAMES)?,
            eos: special("eos_token", EOS_NAMES)?,
            vocabulary,
            name: path.display().to_string(),
            kind: Kind::File(Box::new(inner)),
        })
    }

    /// Appends the ids of `text` alone to `ids`.
    ///
    /// # Errors
    /// If the tokenizer refuses the text.
    pub fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        match &self.kind {
            Kind::Bytes => ids.extend(text.bytes().map(u32::from)),
            Kind::File(inner) => {
                let encoding =
                    inner.encode_fast(text, false).map_err(|e| Error::Failed(format!("{}: {e}", self.name)))?;
                ids.extend_from_slice(encoding.get_ids());
            }
        }
        Ok(())
    }

    /// Id at the beginning of a document, if the vocabulary has one.
    pub const fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Id at the end of a document, if the vocabulary has one.
    pub const fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// One more than the largest id, added tokens included.
    pub const fn vocabulary(&self) -> u64 {
        self.vocabulary
    }

    /// `bytes`, or the file's path.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What [`crate::data`] adds around a document, in words for the log.
    pub fn framing(&self, bos: bool, eos: bool) -> String {
        let part = |asked: bool, id: Option<u32>, what: &str| match (asked, id) {
            (true, Some(id)) => format!("{what} {id}"),
            (true, None) => format!("no {what} (the vocabulary has none)"),
            (false, _) => format!("no {what}"),
        };
        format!("with {} and {}", part(bos, self.bos, "BOS"), part(eos, self.eos, "EOS"))
    }

    /// Refuses a model whose table has fewer rows than there are ids.
    ///
    /// # Errors
    /// [`Error::Usage`] with both numbers.
    pub fn check_fits(&self, vocabulary: u64) -> Result<()> {
        if self.vocabulary > vocabulary {
            return Err(Error::Usage(format!(
                "the tokenizer {} has ids up to {} (added tokens included) and the model's vocab_size is \
                 {vocabulary}; give the tokenizer of this model, or a model with vocab_size of at least {}",
                self.name,
                self.vocabulary - 1,
                self.vocabulary
            )));
        }
        Ok(())
    }
}

fn beside(path: &Path, name: &str) -> Result<Option<Value>> {
    let other = path.with_file_name(name);
    if other.is_file() { json::read(&other).map(Some) } else { Ok(None) }
}

/// A special token is given as a string or as an object with `content`.
fn token_name(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value["content"].as_str())
}
