//! `castor data pack`: text tokenised once, streamed into a token file that every later run maps.
//!
//! The file has llm.c's format (u16 ids where the vocabulary allows, else u32), so llm.c reads it too. Beside it, a
//! mask says which tokens do not count in the loss, if there are any, an index where documents begin, and a manifest
//! what it was made from.

use std::fs::{self, Permissions};
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde_json::json;
use tempfile::NamedTempFile;

use super::document::SILENT;
use super::{DataSpec, Tokenizer, borders, files, text, tokens};
use crate::error::{Error, Result};

/// Name of the token file in the output folder.
const TOKENS_FILE: &str = "tokens.bin";
/// Name of the manifest.
const MANIFEST_FILE: &str = "manifest.json";

/// What was packed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackSummary {
    /// Tokens written, BOS and EOS included.
    pub tokens: u64,
    /// Tokens that count in the loss.
    pub counted: u64,
    /// Documents.
    pub documents: u64,
    /// What to tell the user.
    pub notices: Vec<String>,
}

/// Tokenises the spec's text into `folder/tokens.bin`, `folder/tokens.documents`, `folder/tokens.mask` if not all of it
/// counts, and `folder/manifest.json`, holding one batch of documents at a time.
///
/// # Errors
/// [`Error::Usage`] for input that cannot be used or an output that exists; [`Error::Failed`] if writing fails.
pub fn pack(spec: &DataSpec, tokenizer: &Tokenizer, folder: &Path) -> Result<PackSummary> {
    let path = folder.join(TOKENS_FILE);
    if let Some(old) =
        [path.clone(), tokens::mask_of(&path), borders::index_of(&path)].iter().find(|path| path.exists())
    {
        return Err(Error::Usage(format!("{}: exists already; choose another --out", old.display())));
    }
    let mut notices = Vec::new();
    let inputs = files::expand(spec, &mut notices)?;
    if let Some(packed) = inputs.iter().find(|path| tokens::is_token_file(path)) {
        return Err(Error::Usage(format!("{}: holds tokens already", packed.display())));
    }
    fs::create_dir_all(folder).map_err(|e| failed(&path, "create", &e))?;
    let mut output = Output::create(&path, tokenizer.vocabulary() > 1 << 16)?;
    let documents = text::tokenize(spec, tokenizer, &inputs, &mut notices, &mut |ids| output.write(ids))?.documents;
    if output.count == 0 {
        return Err(text::refuse_empty(spec, inputs.len(), &notices));
    }
    let (tokens, counted) = output.finish()?;
    let manifest = json!({
        "tokens": tokens,
        "counted_tokens": counted,
        "documents": documents,
        "tokenizer": tokenizer.name(),
        "vocabulary": tokenizer.vocabulary(),
        "bos": tokenizer.bos().filter(|_| spec.bos),
        "eos": tokenizer.eos().filter(|_| spec.eos),
        "inputs": inputs.iter().map(|p| p.display().to_string()).collect::<Vec<_>>(),
    });
    let at = folder.join(MANIFEST_FILE);
    fs::write(&at, format!("{manifest:#}\n")).map_err(|e| failed(&at, "write", &e))?;
    Ok(PackSummary { tokens, counted, documents, notices })
}

/// The token file and its mask while they are written; what is not finished is removed.
struct Output {
    path: PathBuf,
    wide: bool,
    tokens: BufWriter<NamedTempFile>,
    mask: BufWriter<NamedTempFile>,
    documents: BufWriter<NamedTempFile>,
    bytes: Vec<u8>,
    /// The mask's present byte.
    bits: u8,
    count: u64,
    silent: u64,
}

impl Output {
    fn create(path: &Path, wide: bool) -> Result<Output> {
        let folder = path.parent().unwrap_or(Path::new("."));
        let create = || {
            // For whom the umask lets: by itself a temporary file is for its owner alone.
            let open = Permissions::from_mode(0o666);
            let file = tempfile::Builder::new().prefix(".castor-pack-").permissions(open).tempfile_in(folder);
            file.map(|file| BufWriter::with_capacity(1 << 20, file)).map_err(|e| failed(path, "create", &e))
        };
        let (mut tokens, mask, documents) = (create()?, create()?, create()?);
        tokens.write_all(&header(wide, 0)).map_err(|e| failed(path, "write", &e))?;
        let path = path.to_path_buf();
        Ok(Output { path, wide, tokens, mask, documents, bytes: Vec::new(), bits: 0, count: 0, silent: 0 })
    }

    /// Writes one document.
    fn write(&mut self, ids: &[u32]) -> Result<()> {
        self.documents.write_all(&self.count.to_le_bytes()).map_err(|e| failed(&self.path, "write", &e))?;
        self.bytes.clear();
        for id in ids {
            let bytes = (id & !SILENT).to_le_bytes();
            self.bytes.extend_from_slice(if self.wide { &bytes } else { &bytes[..2] });
        }
        self.tokens.write_all(&self.bytes).map_err(|e| failed(&self.path, "write", &e))?;
        self.bytes.clear();
        for id in ids {
            let silent = id & SILENT != 0;
            self.silent += u64::from(silent);
            self.bits |= u8::from(silent) << (self.count % 8);
            self.count += 1;
            if self.count.is_multiple_of(8) {
                self.bytes.push(std::mem::take(&mut self.bits));
            }
        }
        self.mask.write_all(&self.bytes).map_err(|e| failed(&self.path, "write", &e))
    }

    /// Completes the files and gives them their names. Returns the tokens, and those that count.
    fn finish(mut self) -> Result<(u64, u64)> {
        let stated = u32::try_from(self.count).map_err(|_| {
            Error::Usage(format!(
                "{} tokens are more than a file's header can state ({}); pack in parts",
                self.count,
                u32::MAX
            ))
        })?;
        let path = &self.path;
        if !self.count.is_multiple_of(8) {
            self.mask.write_all(&[self.bits]).map_err(|e| failed(path, "write", &e))?;
        }
        self.tokens.seek(SeekFrom::Start(0)).map_err(|e| failed(path, "seek", &e))?;
        self.tokens.write_all(&header(self.wide, stated)).map_err(|e| failed(path, "write", &e))?;
        let keep = |file: BufWriter<NamedTempFile>, name: &Path| {
            let file = file.into_inner().map_err(|e| failed(name, "write", e.error()))?;
            file.as_file().sync_all().map_err(|e| failed(name, "sync", &e))?;
            file.persist(name).map(drop).map_err(|e| failed(name, "rename", &e.error))
        };
        // The tokens last: without them there is nothing.
        if self.silent > 0 {
            keep(self.mask, &tokens::mask_of(path))?;
        }
        keep(self.documents, &borders::index_of(path))?;
        keep(self.tokens, path)?;
        Ok((self.count, self.count - self.silent))
    }
}

fn failed(path: &Path, call: &str, error: &std::io::Error) -> Error {
    Error::Failed(format!("{}: {call} failed: {error}", path.display()))
}

/// llm.c's header: 256 words, of which the first three count.
fn header(wide: bool, count: u32) -> Vec<u8> {
    let (magic, version) = if wide { tokens::LLMC_U32 } else { tokens::LLMC_U16 };
    let mut header: Vec<u8> = [magic, version, count].iter().flat_map(|word| word.to_le_bytes()).collect();
    header.resize(1024, 0);
    header
}
