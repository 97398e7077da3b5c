//! From files to training rows: text or tokens in, rows of S tokens and the order of their use out.
//!
//! Owns the tokenizer, the readers of text, instruction and token files, packing into rows ([`PackedRows`], a [`Rows`]),
//! the order of rows over epochs and ranks ([`Sampler`]) and `castor data pack`. Everything is a function of
//! the files and the seed, so all ranks agree without talking. It never guesses: a file whose format is not
//! plain from its name and header is refused with the flag that says it.
//!
//! [`Rows`]: crate::source::Rows

mod borders;
mod bpe;
mod chat;
mod cuts;
mod document;
mod files;
mod format;
mod gguf_tokenizer;
mod pack;
mod packed;
mod parquet;
mod sampler;
mod text;
mod tokenizer;
mod tokens;
mod words;

use std::path::{Path, PathBuf};

pub use pack::{PackSummary, pack};
pub use packed::PackedRows;
pub use sampler::{Order, Sampler, held_out};
pub use text::OnBadRecord;
pub use tokenizer::{Tokenizer, is_gguf, write_gguf_tokenizer};
pub use tokens::{TokenFile, TokenFormat};

use crate::error::{Error, Result, counted};

/// What `--data` and its companions ask for.
#[derive(Clone, Debug)]
pub struct DataSpec {
    /// Files, folders and globs, as given.
    pub inputs: Vec<String>,
    /// What they are given with, for messages: `--data`.
    pub flag: &'static str,
    /// Name of the text in a JSON record, or of a parquet file's column.
    pub text_field: String,
    /// What a record that cannot be used does.
    pub on_bad_record: OnBadRecord,
    /// Format of token files whose header does not say it.
    pub token_format: Option<TokenFormat>,
    /// Whether each document begins with the tokenizer's BOS.
    pub bos: bool,
    /// Whether each document ends with the tokenizer's EOS.
    pub eos: bool,
    /// Whether a token attends within its own document only: rows then know where documents begin.
    pub document_mask: bool,
}

impl DataSpec {
    /// The given inputs, everything else at its default: BOS and EOS added, the first bad record stops.
    pub fn new(inputs: Vec<String>) -> DataSpec {
        DataSpec {
            inputs,
            flag: "--data",
            text_field: "text".into(),
            on_bad_record: OnBadRecord::Stop,
            token_format: None,
            bos: true,
            eos: true,
            document_mask: false,
        }
    }
}

/// Opens the data as rows of `length` tokens for a model with `vocabulary` table rows. `tokenizer` is a name for
/// [`Tokenizer::open`], which happens only if there is text. The second value holds
/// what to tell the user: how much was read, what was left over, what was skipped.
///
/// # Errors
/// [`Error::Usage`] naming file and line or offset; or how many tokens the smallest usable data would have.
pub fn open(spec: &DataSpec, tokenizer: &str, length: usize, vocabulary: u64) -> Result<(PackedRows, Vec<String>)> {
    let mut notices = Vec::new();
    let paths = files::expand(spec, &mut notices)?;
    let (tokens, texts): (Vec<PathBuf>, Vec<PathBuf>) = paths.into_iter().partition(|path| tokens::is_token_file(path));
    if !tokens.is_empty() && !texts.is_empty() {
        return Err(Error::Usage(format!(
            "{} mixes token files ({}) and text ({}); pack the text first with `castor data pack`",
            spec.flag,
            tokens[0].display(),
            texts[0].display()
        )));
    }
    let rows = if tokens.is_empty() {
        let tokenizer = &Tokenizer::open(tokenizer)?;
        tokenizer.check_fits(vocabulary)?;
        if spec.token_format.is_some() {
            notices.push("--token_format is accepted and changes nothing: there is text only, no token file".into());
        }
        let (mut ids, mut starts) = (Vec::new(), Vec::new());
        let count = text::tokenize(spec, tokenizer, &texts, &mut notices, &mut |document| {
            if spec.document_mask {
                starts.push(ids.len() as u64);
            }
            ids.extend_from_slice(document);
            Ok(())
        })?;
        if ids.is_empty() {
            return Err(text::refuse_empty(spec, texts.len(), &notices));
        }
        notices.push(format!(
            "{} from {} in {}, each document {}",
            counted(ids.len() as u64, "tokens"),
            counted(count.documents, "documents"),
            counted(texts.len() as u64, "files"),
            tokenizer.framing(spec.bos, spec.eos)
        ));
        if count.chats > 0 {
            let counted = ids.iter().filter(|id| *id & document::SILENT == 0).count();
            notices.push(format!("{} documents are instructions, {counted} tokens count in the loss", count.chats));
        }
        PackedRows::from_ids(ids, starts, length)
    } else {
        let mut files = Vec::with_capacity(tokens.len());
        for path in &tokens {
            let mut file = TokenFile::open(path, spec.token_format)?;
            file.check_vocabulary(vocabulary)?;
            if spec.document_mask && !file.knows_documents() {
                let marks = marks(path, tokenizer)?;
                let say = |id: Option<u32>| id.map_or("none".into(), |id| id.to_string());
                notices.push(format!(
                    "{}: no index of documents is beside it; they are told apart by BOS {} and EOS {}",
                    path.display(),
                    say(marks.bos),
                    say(marks.eos)
                ));
                file.tell_documents_by(marks);
            }
            files.push(file);
        }
        PackedRows::from_files(files, length)
    }?;
    notices.push(rows.summary());
    Ok((rows, notices))
}

/// The ids between documents, for a token file that does not say where they begin.
fn marks(path: &Path, tokenizer: &str) -> Result<borders::Marks> {
    let refuse = |reason: String| {
        Error::Usage(format!(
            "{}: no index of documents is beside it, so --document_mask needs BOS or EOS of --tokenizer {tokenizer}, and \
             {reason}; name the tokenizer that the file was made with, or pack the text with `castor data pack`",
            path.display()
        ))
    };
    let tokenizer = Tokenizer::open(tokenizer).map_err(|error| refuse(error.to_string()))?;
    let marks = borders::Marks { bos: tokenizer.bos(), eos: tokenizer.eos() };
    if marks.bos.or(marks.eos).is_none() { Err(refuse("it has neither".into())) } else { Ok(marks) }
}

#[cfg(test)]
mod tests;
