//! Text to token ids: the embedded byte-level tokenizer, a `tokenizer.json`, or what a GGUF file holds.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::chat::ChatTemplate;
use super::gguf_tokenizer;
use super::words::Words;
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
    chat: ChatTemplate,
}

enum Kind {
    Bytes,
    /// The second: remembered words, where they can be known.
    File(Box<tokenizers::Tokenizer>, Option<Box<Words>>),
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
            chat: ChatTemplate::new(None, String::new(), String::new()),
        }
    }

    /// The tokenizer that `--tokenizer` names: `bytes`, a `tokenizer.json`, a folder that holds one, or a GGUF file.
    ///
    /// # Errors
    /// [`Error::Usage`] if there is none or it cannot be read.
    pub fn open(name: &str) -> Result<Tokenizer> {
        if name == "bytes" {
            return Ok(Tokenizer::bytes());
        }
        if name.is_empty() {
            return Err(Error::Usage(
                "--tokenizer names nothing; give a tokenizer.json, its folder, a GGUF file, or `bytes`".into(),
            ));
        }
        let mut path = PathBuf::from(name);
        if is_gguf(&path) {
            let files = gguf_tokenizer::files(&path)?;
            let inner = files.tokenizer.to_string().parse();
            let inner: tokenizers::Tokenizer =
                inner.map_err(|e| Error::Usage(format!("{name}: its tokenizer is not sound: {e}")))?;
            return Tokenizer::of(inner, &files.tokenizer, name.into(), Named::of(&files.config));
        }
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
        let file = json::read(&path)?;
        let inner = tokenizers::Tokenizer::from_file(&path)
            .map_err(|e| Error::Usage(format!("{}: not a tokenizer: {e}", path.display())))?;
        let config = beside(&path, "tokenizer_config.json")?;
        let mut named = config.as_ref().map(Named::of).unwrap_or_default();
        let template = path.with_file_name("chat_template.jinja");
        if template.is_file() {
            let text = std::fs::read_to_string(&template)
                .map_err(|e| Error::Usage(format!("{}: cannot be read: {e}", template.display())))?;
            named.chat = Some(text);
        }
        Tokenizer::of(inner, &file, path.display().to_string(), named)
    }

    /// A tokenizer of the library, written as `file`, with the special tokens that its configuration names.
    ///
    /// # Errors
    /// If the vocabulary lacks one of them.
    fn of(mut inner: tokenizers::Tokenizer, file: &Value, name: String, named: Named) -> Result<Tokenizer> {
        // Files saved from a running pipeline carry its truncation, which would cut documents silently.
        inner.with_truncation(None).map_err(|e| Error::Usage(format!("{name}: not a tokenizer: {e}")))?;
        inner.with_padding(None);
        // It would add nothing, and shorten the places of tokens by their blanks.
        inner.with_post_processor(None::<tokenizers::PostProcessorWrapper>);
        let ids = inner.get_vocab(true);
        let vocabulary = ids.values().max().map_or(0, |id| u64::from(*id) + 1);
        let special = |key: &str, token: &Option<String>, usual: &[&str]| match token {
            Some(token) => ids.get(token).copied().map(Some).ok_or_else(|| {
                Error::Usage(format!("{name}: {key} is stated to be {token:?}, which the vocabulary does not have"))
            }),
            None => Ok(usual.iter().find_map(|token| ids.get(*token).copied())),
        };
        let bos = special("bos_token", &named.bos, BOS_NAMES)?;
        let eos = special("eos_token", &named.eos, EOS_NAMES)?;
        let text = |id: Option<u32>| id.and_then(|id| inner.id_to_token(id)).unwrap_or_default();
        let chat = ChatTemplate::new(named.chat, text(bos), text(eos));
        Ok(Tokenizer {
            bos,
            eos,
            vocabulary,
            name,
            chat,
            kind: Kind::File(Box::new(inner), Words::of(file).map(Box::new)),
        })
    }

    /// Appends the ids of `text` alone to `ids`.
    ///
    /// # Errors
    /// If the tokenizer refuses the text.
    pub fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        match &self.kind {
            Kind::Bytes => ids.extend(text.bytes().map(u32::from)),
            Kind::File(inner, words) => {
                let encode = |text: &str| match inner.encode_fast(text, false) {
                    Ok(encoding) => Ok(encoding.get_ids().to_vec()),
                    Err(error) => Err(Error::Failed(format!("{}: {error}", self.name))),
                };
                match words {
                    Some(words) => words.encode(text, ids, encode)?,
                    None => ids.extend(encode(text)?),
                }
            }
        }
        Ok(())
    }

    /// Gives each id of `text` with the byte of the text at which its token begins.
    ///
    /// # Errors
    /// If the tokenizer refuses the text.
    pub(super) fn encode_placed(&self, text: &str, give: &mut dyn FnMut(u32, usize)) -> Result<()> {
        match &self.kind {
            Kind::Bytes => text.bytes().enumerate().for_each(|(at, byte)| give(u32::from(byte), at)),
            Kind::File(inner, _) => {
                let encoding = inner.encode(text, false).map_err(|e| Error::Failed(format!("{}: {e}", self.name)))?;
                for (id, (begins, _)) in encoding.get_ids().iter().zip(encoding.get_offsets()) {
                    give(*id, *begins);
                }
            }
        }
        Ok(())
    }

    /// The text of `ids`, special tokens left out. Bytes that form no character become U+FFFD.
    ///
    /// # Errors
    /// If the tokenizer refuses the ids.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        match &self.kind {
            Kind::Bytes => {
                let bytes: Vec<u8> = ids.iter().filter_map(|id| u8::try_from(*id).ok()).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Kind::File(inner, _) => inner.decode(ids, true).map_err(|e| Error::Failed(format!("{}: {e}", self.name))),
        }
    }

    /// How a chat is written.
    pub(super) const fn chat(&self) -> &ChatTemplate {
        &self.chat
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

/// Writes the tokenizer of the GGUF file `path` into a Hugging Face folder.
///
/// # Errors
/// If the file has none that is read, or a file cannot be written.
pub fn write_gguf_tokenizer(path: &Path, folder: &Path) -> Result<()> {
    let files = gguf_tokenizer::files(path)?;
    for (name, value) in [("tokenizer.json", files.tokenizer), ("tokenizer_config.json", files.config)] {
        let file = folder.join(name);
        std::fs::write(&file, format!("{value:#}\n"))
            .map_err(|e| Error::Failed(format!("{}: write failed: {e}", file.display())))?;
    }
    Ok(())
}

/// Whether `path` is taken for a GGUF file, by its name.
pub fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"))
}

/// What a tokenizer's files say beside its vocabulary.
#[derive(Default)]
struct Named {
    bos: Option<String>,
    eos: Option<String>,
    /// The chat template.
    chat: Option<String>,
}

impl Named {
    /// From a `tokenizer_config.json`. Of several chat templates the one named `default` is meant.
    fn of(config: &Value) -> Named {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let chat = match &config["chat_template"] {
            Value::Array(several) => {
                several.iter().find(|one| one["name"] == "default").and_then(|one| text(&one["template"]))
            }
            one => text(one),
        };
        let token = |key: &str| token_name(&config[key]).map(str::to_owned);
        Named { bos: token("bos_token"), eos: token("eos_token"), chat }
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
