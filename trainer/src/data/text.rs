//! Text files to documents, with the place of everything that cannot be used.
//!
//! A `.txt` file holds documents separated by blank lines; a `.jsonl` file one object with a text field a
//! line; a `.json` file an array of such objects; any other text file (source code, named or matched by a
//! glob) is one document.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{DataSpec, Tokenizer};
use crate::config::json;
use crate::error::{Error, Result, counted};

/// What a record that cannot be used does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnBadRecord {
    /// It ends the run, with its place.
    Stop,
    /// It is left out and counted; the first one's place is reported.
    Skip,
}

/// Reads documents of one spec and counts what happens to them.
struct Reader<'a> {
    spec: &'a DataSpec,
    skipped: u64,
    first_skipped: Option<String>,
    empty: u64,
    document: &'a mut dyn FnMut(&str) -> Result<()>,
}

/// Reads `files` in order and gives each document's ids, framed by BOS and EOS as the spec says, to `sink`.
/// Returns the number of documents.
pub(super) fn tokenize(
    spec: &DataSpec,
    tokenizer: &Tokenizer,
    files: &[PathBuf],
    notices: &mut Vec<String>,
    sink: &mut dyn FnMut(&[u32]) -> Result<()>,
) -> Result<u64> {
    let (mut ids, mut documents) = (Vec::new(), 0);
    let mut document = |text: &str| {
        ids.clear();
        ids.extend(tokenizer.bos().filter(|_| spec.bos));
        tokenizer.encode(text, &mut ids)?;
        ids.extend(tokenizer.eos().filter(|_| spec.eos));
        documents += 1;
        sink(&ids)
    };
    let mut reader = Reader { spec, skipped: 0, first_skipped: None, empty: 0, document: &mut document };
    for path in files {
        reader.file(path)?;
    }
    if let Some(first) = reader.first_skipped {
        let were = if reader.skipped == 1 { "was" } else { "were" };
        notices.push(format!("{} {were} skipped, the first: {first}", counted(reader.skipped, "records")));
    }
    if reader.empty > 0 {
        let were = if reader.empty == 1 { "was" } else { "were" };
        notices.push(format!("{} {were} left out", counted(reader.empty, "empty documents")));
    }
    Ok(documents)
}

/// The refusal of texts without a token, with what was left out of them.
pub(super) fn refuse_empty(files: usize, notices: &[String]) -> Error {
    let why: String = notices.iter().map(|notice| format!("; {notice}")).collect();
    let files = counted(files as u64, "files");
    Error::Usage(format!("the data is empty: no token was found in {files}{why}; give --data with text"))
}

/// The refusal of a columnar file, with the way out.
pub(super) fn refuse_columnar(path: &Path) -> Error {
    Error::Usage(format!(
        "{}: parquet and arrow files are not read; convert once with `python -c \"import datasets; \
         datasets.load_dataset('parquet', data_files='{0}')['train'].to_json('data.jsonl')\"` and give data.jsonl",
        path.display()
    ))
}

impl Reader<'_> {
    fn file(&mut self, path: &Path) -> Result<()> {
        let ending = path.extension().and_then(|e| e.to_str()).map(str::to_ascii_lowercase);
        match ending.as_deref() {
            Some("jsonl" | "ndjson") => self.lines(path),
            Some("json") => self.json(path),
            Some("parquet" | "arrow") => Err(refuse_columnar(path)),
            Some(packed @ ("gz" | "zst" | "xz" | "bz2" | "zip" | "tar")) => Err(Error::Usage(format!(
                "{}: compressed files (.{packed}) are not read; decompress it first",
                path.display()
            ))),
            Some("txt") => self.text(path, true),
            _ => self.text(path, false),
        }
    }

    fn text(&mut self, path: &Path, split: bool) -> Result<()> {
        let bytes = std::fs::read(path).map_err(|e| unreadable(path, &e))?;
        let text = match str::from_utf8(&bytes) {
            Ok(text) => text.strip_prefix('\u{FEFF}').unwrap_or(text),
            Err(e) => {
                let at = e.valid_up_to();
                let line = 1 + bytes[..at].iter().filter(|byte| **byte == b'\n').count();
                return self.bad(path, line, &format!("byte 0x{:02x} at offset {at} is not UTF-8", bytes[at]));
            }
        };
        if !split {
            return self.give(text);
        }
        // A document ends at a line that is empty or blank; line ends may be LF, CRLF or CR.
        let mut start = 0;
        let mut at = 0;
        while at < text.len() {
            let end = text[at..].find(['\n', '\r']).map_or(text.len(), |n| at + n);
            let next = if text[end..].starts_with("\r\n") { end + 2 } else { (end + 1).min(text.len()) };
            if text[at..end].trim().is_empty() {
                if at > start {
                    self.give(text[start..at].trim_end_matches(['\n', '\r']))?;
                }
                start = next;
            }
            at = next;
        }
        if start < text.len() {
            self.give(text[start..].trim_end_matches(['\n', '\r']))?;
        }
        Ok(())
    }

    /// One JSON object a line. Lines end with LF; U+2028 and its like are part of the text.
    fn lines(&mut self, path: &Path) -> Result<()> {
        let mut file = BufReader::with_capacity(1 << 20, File::open(path).map_err(|e| unreadable(path, &e))?);
        let mut line = Vec::new();
        for number in 1.. {
            line.clear();
            if file.read_until(b'\n', &mut line).map_err(|e| unreadable(path, &e))? == 0 {
                break;
            }
            let mut record = line.trim_ascii();
            if number == 1 {
                record = record.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(record).trim_ascii();
            }
            if record.is_empty() {
                continue;
            }
            let parsed = str::from_utf8(record)
                .map_err(|e| {
                    let at = e.valid_up_to();
                    format!("byte 0x{:02x} at column {} is not UTF-8", record[at], at + 1)
                })
                .and_then(|_| json::parse(record).map_err(|e| e.replace(" at line 1 column", " at column")));
            match parsed.and_then(|value| self.record(&value)) {
                Ok(text) => self.give(&text)?,
                Err(reason) => self.bad(path, number, &reason)?,
            }
        }
        Ok(())
    }

    /// A JSON array of records; a file that begins with an object is taken for lines.
    fn json(&mut self, path: &Path) -> Result<()> {
        let mut first = [0; 1];
        let begins = {
            use std::io::Read;
            let mut file = BufReader::new(File::open(path).map_err(|e| unreadable(path, &e))?);
            loop {
                match file.read(&mut first).map_err(|e| unreadable(path, &e))? {
                    0 => break None,
                    _ if first[0].is_ascii_whitespace() => {}
                    _ => break Some(first[0]),
                }
            }
        };
        if begins != Some(b'[') {
            return self.lines(path);
        }
        let Value::Array(records) = json::read(path)? else { unreachable!("the text begins with [") };
        for (index, value) in records.iter().enumerate() {
            match self.record(value) {
                Ok(text) => self.give(&text)?,
                Err(reason) => self.bad(path, index + 1, &reason)?,
            }
        }
        Ok(())
    }

    fn record(&self, value: &Value) -> std::result::Result<String, String> {
        let field = &self.spec.text_field;
        let object = value.as_object().ok_or_else(|| format!("an object with \"{field}\" was expected"))?;
        match object.get(field) {
            Some(Value::String(text)) => Ok(text.clone()),
            Some(other) => Err(format!("\"{field}\" is {other}, a string was expected")),
            None if object.contains_key("messages") => Err(format!(
                "the record has \"messages\" and no \"{field}\"; chats are not rendered here, write each as text"
            )),
            None => Err(format!(
                "there is no \"{field}\" (the record has {}); name another with --text_field",
                object.keys().map(|k| format!("\"{k}\"")).collect::<Vec<_>>().join(", ")
            )),
        }
    }

    fn give(&mut self, text: &str) -> Result<()> {
        if text.is_empty() {
            self.empty += 1;
            return Ok(());
        }
        (self.document)(text)
    }

    fn bad(&mut self, path: &Path, line: usize, reason: &str) -> Result<()> {
        let place = format!("{}:{line}: {reason}", path.display());
        match self.spec.on_bad_record {
            OnBadRecord::Stop => Err(Error::Usage(format!("{place} (--on_bad_record skip leaves such records out)"))),
            OnBadRecord::Skip => {
                self.skipped += 1;
                self.first_skipped.get_or_insert(place);
                Ok(())
            }
        }
    }
}

fn unreadable(path: &Path, error: &std::io::Error) -> Error {
    Error::Usage(format!("{}: cannot be read: {error}", path.display()))
}
