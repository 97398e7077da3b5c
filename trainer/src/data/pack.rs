//! `castor data pack`: text tokenised once, streamed into a token file that every later run maps.
//!
//! The file has llm.c's format (u16 ids where the vocabulary allows, else u32), so llm.c reads it too. A
//! manifest beside it says what it was made from.

use std::fs::{self, File};
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::Path;

use serde_json::json;

use super::{DataSpec, Tokenizer, files, text, tokens};
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
    /// Documents.
    pub documents: u64,
    /// What to tell the user.
    pub notices: Vec<String>,
}

/// Tokenises the spec's text into `folder/tokens.bin` and `folder/manifest.json`, holding one document at a time.
///
/// # Errors
/// [`Error::Usage`] for input that cannot be used or an output that exists; [`Error::Failed`] if writing fails.
pub fn pack(spec: &DataSpec, tokenizer: &Tokenizer, folder: &Path) -> Result<PackSummary> {
    let path = folder.join(TOKENS_FILE);
    let failed = |call: &str, e: &std::io::Error| Error::Failed(format!("{}: {call} failed: {e}", path.display()));
    if path.exists() {
        return Err(Error::Usage(format!("{}: exists already; choose another --out", path.display())));
    }
    let mut notices = Vec::new();
    let inputs = files::expand(&spec.inputs, &mut notices)?;
    if let Some(packed) = inputs.iter().find(|path| tokens::is_token_file(path)) {
        return Err(Error::Usage(format!("{}: holds tokens already", packed.display())));
    }
    fs::create_dir_all(folder).map_err(|e| failed("create", &e))?;
    let wide = tokenizer.vocabulary() > 1 << 16;
    let temporary = folder.join(format!("{TOKENS_FILE}.tmp-{}", std::process::id()));
    let mut file = BufWriter::with_capacity(1 << 20, File::create(&temporary).map_err(|e| failed("create", &e))?);
    let written: Result<(u64, u64)> = (|| {
        let mut count = 0u64;
        file.write_all(&header(wide, 0)).map_err(|e| failed("write", &e))?;
        let documents = text::tokenize(spec, tokenizer, &inputs, &mut notices, &mut |ids| {
            count += ids.len() as u64;
            for id in ids {
                let bytes = id.to_le_bytes();
                file.write_all(if wide { &bytes } else { &bytes[..2] }).map_err(|e| failed("write", &e))?;
            }
            Ok(())
        })?;
        let stated = u32::try_from(count).ok().filter(|count| *count > 0).ok_or_else(|| {
            Error::Usage(match count {
                0 => return text::refuse_empty(inputs.len(), &notices),
                _ => format!("{count} tokens are more than a file's header can state ({}); pack in parts", u32::MAX),
            })
        })?;
        file.seek(SeekFrom::Start(0)).map_err(|e| failed("seek", &e))?;
        file.write_all(&header(wide, stated)).map_err(|e| failed("write", &e))?;
        file.flush().and_then(|()| file.get_ref().sync_all()).map_err(|e| failed("sync", &e))?;
        let manifest = json!({
            "tokens": count,
            "documents": documents,
            "tokenizer": tokenizer.name(),
            "vocabulary": tokenizer.vocabulary(),
            "bos": tokenizer.bos().filter(|_| spec.bos),
            "eos": tokenizer.eos().filter(|_| spec.eos),
            "inputs": inputs.iter().map(|p| p.display().to_string()).collect::<Vec<_>>(),
        });
        fs::write(folder.join(MANIFEST_FILE), format!("{manifest:#}\n")).map_err(|e| failed("write", &e))?;
        fs::rename(&temporary, &path).map_err(|e| failed("rename", &e))?;
        Ok((count, documents))
    })();
    if written.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_file(&temporary);
    }
    let (tokens, documents) = written?;
    Ok(PackSummary { tokens, documents, notices })
}

/// llm.c's header: 256 words, of which the first three count.
fn header(wide: bool, count: u32) -> Vec<u8> {
    let (magic, version) = if wide { tokens::LLMC_U32 } else { tokens::LLMC_U16 };
    let mut header: Vec<u8> = [magic, version, count].iter().flat_map(|word| word.to_le_bytes()).collect();
    header.resize(1024, 0);
    header
}
