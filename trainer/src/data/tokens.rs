//! Token files: llm.c, Megatron (`.idx` + `.bin`) and nanoGPT, mapped, never copied whole.
//!
//! A file that `castor data pack` made of instruction data has a mask beside it (`tokens.mask` of `tokens.bin`): a bit
//! for each token, the lowest of a byte first, set where the token does not count in the loss.
//!
//! Offsets are 64-bit throughout. A headerless nanoGPT file cannot be told from any other bytes, so it is
//! read only when the format is named.

use std::io::Read;
use std::path::Path;

use castor_kernels::FileMap;

use super::borders::{Borders, Marks};
use crate::error::{Error, Result};

/// Bytes of an llm.c header: 256 little-endian i32.
const LLMC_HEADER: usize = 1024;
/// llm.c's magic and version for u16 ids (GPT-2's vocabulary).
pub(super) const LLMC_U16: (u32, u32) = (20_240_520, 1);
/// llm.c's magic and version for u32 ids (Llama 3's vocabulary).
pub(super) const LLMC_U32: (u32, u32) = (20_240_801, 7);
/// llm.c's evaluation files: several-choice questions, not a stream of tokens.
const LLMC_EVAL: u32 = 20_240_522;
/// First bytes of a Megatron index.
const MEGATRON: &[u8; 9] = b"MMIDIDX\0\0";

/// A token file's format, where its header does not say it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenFormat {
    /// Header of 256 i32, then u16 or u32 ids.
    LlmC,
    /// Bare u16 ids.
    NanoGpt,
    /// `.bin` with an `.idx` beside it.
    Megatron,
}

/// Whether `path` is read as tokens rather than as text.
pub(super) fn is_token_file(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "bin")
}

/// Where the mask of a token file is, if it has one.
pub(super) fn mask_of(path: &Path) -> std::path::PathBuf {
    path.with_extension("mask")
}

/// A mapped file of token ids.
#[derive(Debug)]
pub struct TokenFile {
    map: FileMap,
    /// First byte of the ids.
    start: usize,
    width: Width,
    tokens: u64,
    documents: Option<u64>,
    mask: Option<FileMap>,
    borders: Option<Borders>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Width {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    I64,
}

impl Width {
    const fn bytes(self) -> u64 {
        match self {
            Width::U8 | Width::I8 => 1,
            Width::U16 | Width::I16 => 2,
            Width::U32 | Width::I32 => 4,
            Width::I64 => 8,
        }
    }
}

impl TokenFile {
    /// Opens `path` (the `.bin`). Without `format` the header decides, or an `.idx` beside it.
    ///
    /// # Errors
    /// [`Error::Usage`] if header, size and index do not agree, naming what was found.
    pub fn open(path: &Path, format: Option<TokenFormat>) -> Result<TokenFile> {
        let refuse = |reason: String| Error::Usage(format!("{}: {reason}", path.display()));
        if !path.is_file() {
            return Err(refuse("there is no such token file".into()));
        }
        let map = FileMap::open(path)?;
        if map.bytes().is_empty() {
            return Err(refuse("the file has zero bytes".into()));
        }
        let index = path.with_extension("idx");
        let format = format.unwrap_or(if index.exists() { TokenFormat::Megatron } else { TokenFormat::LlmC });
        // The ids of one layout read as another's are still ids: nothing later would notice.
        if format != TokenFormat::Megatron && is_megatron_index(&index) {
            return Err(refuse(format!(
                "{} beside it is a Megatron index, and --token_format is {}; leave the flag out, or move the index away",
                index.display(),
                if format == TokenFormat::NanoGpt { "nanogpt" } else { "llmc" }
            )));
        }
        let mut file = match format {
            TokenFormat::LlmC => llmc(map).map_err(refuse),
            TokenFormat::NanoGpt => nanogpt(map).map_err(refuse),
            TokenFormat::Megatron => megatron(map, &index),
        }?;
        let mask = mask_of(path);
        if mask.is_file() {
            let map = FileMap::open(&mask)?;
            let (bytes, expected) = (map.bytes().len() as u64, file.tokens.div_ceil(8));
            if bytes != expected {
                return Err(Error::Usage(format!(
                    "{}: has {bytes} bytes, and {} tokens in {} need {expected}; they are of different runs",
                    mask.display(),
                    file.tokens,
                    path.display()
                )));
            }
            file.mask = Some(map);
        }
        if file.borders.is_none() {
            file.borders = Borders::beside(path, file.tokens)?;
        }
        Ok(file)
    }

    /// Whether token `index` does not count in the loss; it must lie in the file.
    pub fn is_silent(&self, index: u64) -> bool {
        self.mask.as_ref().is_some_and(|mask| mask.bytes()[(index / 8) as usize] >> (index % 8) & 1 == 1)
    }

    /// Whether it is known where documents begin.
    pub(super) const fn knows_documents(&self) -> bool {
        self.borders.is_some()
    }

    /// Documents begin and end with these ids.
    pub(super) fn tell_documents_by(&mut self, marks: Marks) {
        self.borders = Some(Borders::Marks(marks));
    }

    /// Fills `out` with the position, within the row of `ids` that begins at token `first`, of each token's document's
    /// first token. Where no documents are known the row is one.
    pub(super) fn starts(&self, first: u64, ids: &[i32], out: &mut [i32]) {
        match &self.borders {
            Some(borders) => borders.fill(first, ids, out),
            None => out.fill(0),
        }
    }

    /// Number of ids.
    pub const fn len(&self) -> u64 {
        self.tokens
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.tokens == 0
    }

    /// Number of documents, where the format records it.
    pub const fn documents(&self) -> Option<u64> {
        self.documents
    }

    /// Fills `out` with the ids from `first` on; the range must lie in the file.
    pub fn read(&self, first: u64, out: &mut [i32]) {
        for (index, id) in (first..).zip(out) {
            // `check_vocabulary` has shown that every id fits.
            *id = self.id(index) as i32;
        }
    }

    /// Refuses ids outside a table of `vocabulary` rows. Reads the whole file once, unless its ids are too
    /// narrow to be outside.
    ///
    /// # Errors
    /// [`Error::Usage`] with the first such id and its place.
    pub fn check_vocabulary(&self, vocabulary: u64) -> Result<()> {
        if self.width == Width::U16 && vocabulary > u64::from(u16::MAX) {
            return Ok(());
        }
        let inside = 0..vocabulary as i64;
        match (0..self.tokens).find(|index| !inside.contains(&self.id(*index))) {
            None => Ok(()),
            Some(index) => Err(Error::Usage(format!(
                "{}: token {index} (byte {}) is {}, outside the model's vocab_size {vocabulary}; the file was \
                 made with another tokenizer",
                self.map.path().display(),
                self.start as u64 + index * self.width.bytes(),
                self.id(index)
            ))),
        }
    }

    fn id(&self, index: u64) -> i64 {
        let at = self.start + (index * self.width.bytes()) as usize;
        let bytes = &self.map.bytes()[at..at + self.width.bytes() as usize];
        match (self.width, bytes) {
            (Width::U8, [a]) => i64::from(*a),
            (Width::I8, [a]) => i64::from(*a as i8),
            (Width::U16, [a, b]) => i64::from(u16::from_le_bytes([*a, *b])),
            (Width::I16, [a, b]) => i64::from(i16::from_le_bytes([*a, *b])),
            (Width::U32, [a, b, c, d]) => i64::from(u32::from_le_bytes([*a, *b, *c, *d])),
            (Width::I32, [a, b, c, d]) => i64::from(i32::from_le_bytes([*a, *b, *c, *d])),
            (Width::I64, _) => le(bytes, 0, 8).unwrap_or_default() as i64,
            _ => unreachable!("the slice is as long as the width"),
        }
    }
}

/// `bytes` (1 to 8) bytes at `at` as a little-endian number; None beyond the end.
fn le(data: &[u8], at: usize, bytes: usize) -> Option<u64> {
    let slice = data.get(at..at.checked_add(bytes)?)?;
    Some(slice.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
}

/// Whether a file is a Megatron index.
fn is_megatron_index(path: &Path) -> bool {
    let mut magic = [0; MEGATRON.len()];
    std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && magic == *MEGATRON
}

fn llmc(map: FileMap) -> std::result::Result<TokenFile, String> {
    let data = map.bytes();
    let word = |index: usize| le(data, index * 4, 4).map(|word| word as u32);
    let (Some(magic), Some(version), Some(tokens)) = (word(0), word(1), word(2)) else {
        return Err("too short for the 1024-byte header of an llm.c token file".into());
    };
    let width = match (magic, version) {
        LLMC_U16 => Width::U16,
        LLMC_U32 => Width::U32,
        (LLMC_EVAL, _) => {
            return Err("this is an llm.c evaluation file (multiple choice), not training tokens".into());
        }
        (magic, version) if magic == LLMC_U16.0 || magic == LLMC_U32.0 => {
            return Err(format!(
                "llm.c token file of version {version}; versions {} (magic {}) and {} (magic {}) are read",
                LLMC_U16.1, LLMC_U16.0, LLMC_U32.1, LLMC_U32.0
            ));
        }
        _ => {
            return Err(format!(
                "the first word is {magic}, the magic of no known token file ({} and {} are llm.c's); a headerless \
                 u16 file needs --token_format nanogpt",
                LLMC_U16.0, LLMC_U32.0
            ));
        }
    };
    let expected = LLMC_HEADER as u64 + u64::from(tokens) * width.bytes();
    if data.len() as u64 != expected {
        return Err(format!(
            "the header states {tokens} tokens, which makes {expected} bytes, and the file has {}",
            data.len()
        ));
    }
    Ok(TokenFile { start: LLMC_HEADER, width, tokens: tokens.into(), documents: None, mask: None, borders: None, map })
}

fn nanogpt(map: FileMap) -> std::result::Result<TokenFile, String> {
    let bytes = map.bytes().len() as u64;
    if !bytes.is_multiple_of(2) {
        return Err(format!("{bytes} bytes are not a whole number of u16 tokens"));
    }
    Ok(TokenFile { start: 0, width: Width::U16, tokens: bytes / 2, documents: None, mask: None, borders: None, map })
}

/// The index must describe the `.bin` exactly: a pair from two runs is the usual accident.
fn megatron(map: FileMap, path: &Path) -> Result<TokenFile> {
    let refuse = |reason: String| Error::Usage(format!("{}: {reason}", path.display()));
    if !path.is_file() {
        return Err(refuse("the index of this Megatron token file is missing".into()));
    }
    let index = FileMap::open(path)?;
    let data = index.bytes();
    if !data.starts_with(MEGATRON) {
        return Err(refuse("not a Megatron index: it does not begin with MMIDIDX".into()));
    }
    let cut = || refuse("the index is cut off".into());
    match le(data, 9, 8).ok_or_else(cut)? {
        1 => {}
        version => {
            return Err(refuse(format!("index version {version}; version 1 is read")));
        }
    }
    let width = match le(data, 17, 1).ok_or_else(cut)? {
        1 => Width::U8,
        2 => Width::I8,
        3 => Width::I16,
        4 => Width::I32,
        5 => Width::I64,
        8 => Width::U16,
        code @ (6 | 7) => {
            return Err(refuse(format!("dtype code {code} is a float, not token ids")));
        }
        code => return Err(refuse(format!("unknown dtype code {code}"))),
    };
    let sequences = le(data, 18, 8).ok_or_else(cut)?;
    let documents = le(data, 26, 8).ok_or_else(cut)?;
    // 34 bytes, then i32 lengths, i64 byte offsets, i64 document boundaries.
    let expected = u128::from(sequences) * 12 + u128::from(documents) * 8 + 34;
    if expected != data.len() as u128 {
        return Err(refuse(format!(
            "{sequences} sequences and {documents} document boundaries make {expected} bytes, and the index has {}",
            data.len()
        )));
    }
    let lengths = 34;
    let offsets = lengths + sequences as usize * 4;
    let mut tokens = 0u64;
    for sequence in 0..sequences as usize {
        let length = le(data, lengths + sequence * 4, 4).ok_or_else(cut)? as u32;
        let offset = le(data, offsets + sequence * 8, 8).ok_or_else(cut)?;
        if length > i32::MAX as u32 || offset != tokens * width.bytes() {
            return Err(refuse(format!(
                "sequence {sequence} has length {} at byte {offset}, where byte {} was expected; the index is damaged",
                length as i32,
                tokens * width.bytes()
            )));
        }
        tokens += u64::from(length);
    }
    let bin = map.bytes().len() as u64;
    if tokens * width.bytes() != bin {
        return Err(refuse(format!(
            "the index describes {} bytes of tokens and {} has {bin}; they are of different runs",
            tokens * width.bytes(),
            map.path().display()
        )));
    }
    let mut starts = Vec::with_capacity(documents as usize);
    for document in 0..documents.saturating_sub(1) as usize {
        let sequence = le(data, lengths + sequences as usize * 12 + document * 8, 8).ok_or_else(cut)?;
        // A document without sequences begins where the tokens end.
        let offset = if sequence < sequences { le(data, offsets + sequence as usize * 8, 8) } else { Some(bin) };
        starts.push(offset.ok_or_else(cut)? / width.bytes());
    }
    if !starts.is_sorted() {
        return Err(refuse("its document boundaries do not ascend; the index is damaged".into()));
    }
    let borders = (!starts.is_empty()).then_some(Borders::Starts(starts));
    Ok(TokenFile { start: 0, width, tokens, documents: Some(documents.saturating_sub(1)), mask: None, borders, map })
}
