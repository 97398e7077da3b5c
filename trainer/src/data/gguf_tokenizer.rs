//! The tokenizer in a GGUF file, as the `tokenizer.json` that the model's Hugging Face folder would hold.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::error::{Error, Result};
use crate::weights::Gguf;

/// How Llama 3 cuts text into words.
const LLAMA3_WORDS: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
/// Token kinds of GGUF that are found in text before it is cut into words.
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;

/// The two files of a tokenizer.
pub(super) struct Files {
    /// `tokenizer.json`
    pub tokenizer: Value,
    /// `tokenizer_config.json`: the special tokens and the chat template.
    pub config: Value,
}

/// What `path` holds of a tokenizer.
///
/// # Errors
/// [`Error::Usage`] if there is none, or of a kind that is not read.
pub(super) fn files(path: &Path) -> Result<Files> {
    let file = Gguf::open(path)?;
    let refuse = |reason: String| Error::Usage(format!("{}: {reason}", path.display()));
    let instead = "give the model's tokenizer.json with --tokenizer";
    let value = |key: &str| file.value(&format!("tokenizer.ggml.{key}"));
    match value("model").as_str() {
        Some("gpt2") => {}
        Some(other) => {
            return Err(refuse(format!("holds a tokenizer of kind \"{other}\", and gpt2 is read; {instead}")));
        }
        None => return Err(refuse(format!("holds no tokenizer; {instead}"))),
    }
    let byte_level =
        |words: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": words});
    let sequence = |first: Value, words: bool| json!({"type": "Sequence", "pretokenizers": [first, byte_level(words)]});
    let (words, whole_words_first) = match value("pre").as_str() {
        None | Some("gpt-2" | "default") => (byte_level(true), false),
        Some("smollm") => (sequence(json!({"type": "Digits", "individual_digits": true}), true), false),
        Some("llama-bpe" | "llama3" | "llama-v3") => {
            let split =
                json!({"type": "Split", "pattern": {"Regex": LLAMA3_WORDS}, "behavior": "Isolated", "invert": false});
            (sequence(split, false), true)
        }
        Some(other) => {
            return Err(refuse(format!("its tokenizer cuts words by \"{other}\", which is not known; {instead}")));
        }
    };
    let list =
        |key: &str| value(key).as_array().ok_or_else(|| refuse(format!("tokenizer.ggml.{key} is missing; {instead}")));
    let (tokens, kinds, merges) = (list("tokens")?, list("token_type")?, list("merges")?);
    let (mut vocabulary, mut added) = (Map::new(), Vec::new());
    for (id, token) in tokens.iter().enumerate() {
        let text = token.as_str().ok_or_else(|| refuse(format!("token {id} is {token}, a text was expected")))?;
        vocabulary.insert(text.into(), id.into());
        if let Some(kind @ (CONTROL | USER_DEFINED)) = kinds.get(id).and_then(Value::as_u64) {
            added.push(json!({
                "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": kind == CONTROL,
            }));
        }
    }
    let special = |key: &str| value(key).as_u64().and_then(|id| tokens.get(usize::try_from(id).ok()?)).cloned();
    Ok(Files {
        tokenizer: json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added,
            "normalizer": null,
            "pre_tokenizer": words,
            "post_processor": null,
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                "ignore_merges": whole_words_first, "vocab": vocabulary, "merges": merges,
            },
        }),
        config: json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": special("bos_token_id"),
            "eos_token": special("eos_token_id"),
            "chat_template": file.value("tokenizer.chat_template"),
        }),
    })
}
