//! Files to documents, with the place of everything that cannot be used.
//!
//! A `.txt` file holds documents separated by blank lines; a `.jsonl` file one record a line; a `.json` file an array
//! of records; a `.parquet` file one document a row; any other text file (source code, named or matched by a glob) is
//! one document. A record is an object with a text field, or instruction data ([`super::chat`]). All but `.json` and
//! whole files are streamed, a batch of documents at a time.

use std::io::BufRead;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde_json::Value;

use super::document::Document;
use super::format::{self, Content, unreadable};
use super::{DataSpec, Tokenizer, parquet};
use crate::config::json;
use crate::error::{Error, Result, counted};

/// Bytes of text that are tokenised at once, by all cores.
const BATCH_BYTES: usize = 8 << 20;

/// What a record that cannot be used does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnBadRecord {
    /// It ends the run, with its place.
    Stop,
    /// It is left out and counted; the first one's place is reported.
    Skip,
}

/// What was read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Count {
    /// Documents.
    pub documents: u64,
    /// Those of which only answers count.
    pub chats: u64,
}

/// Reads documents of one spec, tokenises them in batches and counts what happens to them.
struct Reader<'a> {
    spec: &'a DataSpec,
    tokenizer: &'a Tokenizer,
    skipped: u64,
    first_skipped: Option<String>,
    empty: u64,
    count: Count,
    batch: Vec<Document>,
    batch_bytes: usize,
    sink: &'a mut dyn FnMut(&[u32]) -> Result<()>,
}

/// Reads `files` in order and gives each document's ids to `sink`, as [`Document::encode`] makes them.
pub(super) fn tokenize(
    spec: &DataSpec,
    tokenizer: &Tokenizer,
    files: &[PathBuf],
    notices: &mut Vec<String>,
    sink: &mut dyn FnMut(&[u32]) -> Result<()>,
) -> Result<Count> {
    let mut reader = Reader {
        spec,
        tokenizer,
        skipped: 0,
        first_skipped: None,
        empty: 0,
        count: Count::default(),
        batch: Vec::new(),
        batch_bytes: 0,
        sink,
    };
    for path in files {
        reader.file(path)?;
    }
    reader.flush()?;
    if let Some(first) = reader.first_skipped {
        let were = if reader.skipped == 1 { "was" } else { "were" };
        notices.push(format!("{} {were} skipped, the first: {first}", counted(reader.skipped, "records")));
    }
    if reader.empty > 0 {
        let were = if reader.empty == 1 { "was" } else { "were" };
        notices.push(format!("{} {were} left out", counted(reader.empty, "empty documents")));
    }
    Ok(reader.count)
}

/// The refusal of texts without a token, with what was left out of them.
pub(super) fn refuse_empty(spec: &DataSpec, files: usize, notices: &[String]) -> Error {
    let why: String = notices.iter().map(|notice| format!("; {notice}")).collect();
    let files = counted(files as u64, "files");
    Error::Usage(format!("the data is empty: no token was found in {files}{why}; give {} with text", spec.flag))
}

impl Reader<'_> {
    fn file(&mut self, path: &Path) -> Result<()> {
        let (content, compression) = format::of(path)?;
        if content == Content::Parquet {
            return self.parquet(path);
        }
        let mut source = format::open(path, compression)?;
        match content {
            Content::Documents => self.documents(path, &mut *source),
            Content::Lines => self.lines(path, &mut *source),
            Content::Json => self.json(path, &mut *source),
            _ => self.whole(path, &mut *source),
        }
    }

    /// A document ends at a line that is empty or blank; line ends may be LF, CRLF or CR.
    fn documents(&mut self, path: &Path, source: &mut dyn BufRead) -> Result<()> {
        let (mut line, mut document, mut spoiled) = (Vec::new(), String::new(), false);
        let (mut offset, mut number) = (0, 0);
        loop {
            line.clear();
            if source.read_until(b'\n', &mut line).map_err(|e| unreadable(path, &e))? == 0 {
                break;
            }
            number += 1;
            let text = match str::from_utf8(&line) {
                Ok(text) if number == 1 => text.strip_prefix('\u{FEFF}').unwrap_or(text),
                Ok(text) => text,
                Err(e) => {
                    let at = e.valid_up_to();
                    let reason = format!("byte 0x{:02x} at offset {} is not UTF-8", line[at], offset + at);
                    self.bad(path, number, &reason)?;
                    spoiled = true;
                    offset += line.len();
                    continue;
                }
            };
            for part in text.split_inclusive(['\n', '\r']) {
                if !part.trim().is_empty() {
                    document.push_str(part);
                } else if part == "\n" && document.ends_with('\r') && !text.starts_with('\n') {
                    // The second half of CRLF.
                    document.push('\n');
                } else {
                    self.end_document(&mut document, &mut spoiled)?;
                }
            }
            offset += line.len();
        }
        self.end_document(&mut document, &mut spoiled)
    }

    /// Gives what lies before a blank line, unless a line of it is bad.
    fn end_document(&mut self, document: &mut String, spoiled: &mut bool) -> Result<()> {
        let text = document.trim_end_matches(['\n', '\r']);
        if !text.is_empty() && !std::mem::take(spoiled) {
            self.give(Document::plain(text.into()))?;
        }
        *spoiled = false;
        document.clear();
        Ok(())
    }

    fn whole(&mut self, path: &Path, source: &mut dyn BufRead) -> Result<()> {
        let mut bytes = Vec::new();
        source.read_to_end(&mut bytes).map_err(|e| unreadable(path, &e))?;
        match String::from_utf8(bytes) {
            Ok(text) => self.give(Document::plain(text.strip_prefix('\u{FEFF}').map(str::to_owned).unwrap_or(text))),
            Err(e) => {
                let (at, bytes) = (e.utf8_error().valid_up_to(), e.as_bytes());
                let line = 1 + bytes[..at].iter().filter(|byte| **byte == b'\n').count();
                self.bad(path, line, &format!("byte 0x{:02x} at offset {at} is not UTF-8", bytes[at]))
            }
        }
    }

    /// One JSON object a line. Lines end with LF; U+2028 and its like are part of the text.
    fn lines(&mut self, path: &Path, source: &mut dyn BufRead) -> Result<()> {
        let mut line = Vec::new();
        for number in 1.. {
            line.clear();
            if source.read_until(b'\n', &mut line).map_err(|e| unreadable(path, &e))? == 0 {
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
            match parsed.and_then(|value| self.record(value)) {
                Ok(document) => self.give(document)?,
                Err(reason) => self.bad(path, number, &reason)?,
            }
        }
        Ok(())
    }

    /// A JSON array of records; a file that begins with an object is taken for lines.
    fn json(&mut self, path: &Path, source: &mut dyn BufRead) -> Result<()> {
        loop {
            let bytes = source.fill_buf().map_err(|e| unreadable(path, &e))?;
            let blank = bytes.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
            match bytes.get(blank) {
                Some(b'[') => break,
                // A file of blanks alone has no lines either.
                Some(_) => return self.lines(path, source),
                None if bytes.is_empty() => return Ok(()),
                None => source.consume(blank),
            }
        }
        let mut bytes = Vec::new();
        source.read_to_end(&mut bytes).map_err(|e| unreadable(path, &e))?;
        let value = json::parse(&bytes).map_err(|reason| Error::Usage(format!("{}: {reason}", path.display())))?;
        let Value::Array(records) = value else { unreachable!("the text begins with [") };
        drop(bytes);
        for (index, value) in records.into_iter().enumerate() {
            match self.record(value) {
                Ok(document) => self.give(document)?,
                Err(reason) => self.bad(path, index + 1, &reason)?,
            }
        }
        Ok(())
    }

    fn parquet(&mut self, path: &Path) -> Result<()> {
        let mut row = 0;
        let spec = self.spec;
        parquet::read(path, &spec.text_field, &mut |value| {
            row += 1;
            match value.map(str::from_utf8) {
                Some(Ok(text)) => self.give(Document::plain(text.into())),
                Some(Err(_)) => self.bad(path, row, &format!("\"{}\" in this row is not UTF-8", spec.text_field)),
                None => self.bad(path, row, &format!("\"{}\" in this row is null", spec.text_field)),
            }
        })
    }

    /// The document of a JSON record: its text field, else its instruction.
    fn record(&self, value: Value) -> std::result::Result<Document, String> {
        let field = &self.spec.text_field;
        let Value::Object(mut object) = value else {
            return Err(format!("an object with \"{field}\" was expected"));
        };
        match object.get_mut(field) {
            Some(Value::String(text)) => Ok(Document::plain(std::mem::take(text))),
            Some(other) => Err(format!("\"{field}\" is {other}, a string was expected")),
            None => self.tokenizer.chat().document(&object)?.ok_or_else(|| {
                format!(
                    "there is no \"{field}\", no \"messages\" and no \"prompt\" with \"completion\" (the record has \
                     {}); name another with --text_field",
                    object.keys().map(|k| format!("\"{k}\"")).collect::<Vec<_>>().join(", ")
                )
            }),
        }
    }

    fn give(&mut self, document: Document) -> Result<()> {
        if document.text.is_empty() {
            self.empty += 1;
            return Ok(());
        }
        self.batch_bytes += document.text.len();
        self.batch.push(document);
        if self.batch_bytes >= BATCH_BYTES { self.flush() } else { Ok(()) }
    }

    /// Tokenises the batch, each document by itself, and hands it on in order.
    fn flush(&mut self) -> Result<()> {
        let batch = std::mem::take(&mut self.batch);
        self.batch_bytes = 0;
        let encode = |document: &Document| document.encode(self.spec, self.tokenizer);
        let encoded: Vec<Result<Vec<u32>>> = batch.par_iter().map(encode).collect();
        for (document, ids) in batch.iter().zip(encoded) {
            self.count.documents += 1;
            self.count.chats += u64::from(document.answers.is_some());
            (self.sink)(&ids?)?;
        }
        Ok(())
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
