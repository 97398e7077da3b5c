//! What a file holds, by its name, and its bytes as they were before compression.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use crate::error::{Error, Result};

/// Bytes that are read from a file at a time.
const PIECE: usize = 1 << 20;

/// What a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// `.txt`: documents separated by blank lines.
    Documents,
    /// `.jsonl`, `.ndjson`: a record a line.
    Lines,
    /// `.json`: an array of records, or lines.
    Json,
    /// `.parquet`: a column of documents.
    Parquet,
    /// Any other name, given or matched by a glob: one document.
    Whole,
}

/// How a file is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compression {
    None,
    Gzip,
    Zstd,
}

/// What `path` holds by its name: `a.jsonl.gz` is compressed lines.
///
/// # Errors
/// If it is of a kind that is not read, with what to do.
pub(super) fn of(path: &Path) -> Result<(Content, Compression)> {
    let refuse = |reason: String| Err(Error::Usage(format!("{}: {reason}", path.display())));
    let (inner, compression) = match ending(path).as_deref() {
        Some("gz") => (path.with_extension(""), Compression::Gzip),
        Some("zst") => (path.with_extension(""), Compression::Zstd),
        _ => (path.to_path_buf(), Compression::None),
    };
    let content = match ending(&inner).as_deref() {
        Some("txt") => Content::Documents,
        Some("jsonl" | "ndjson") => Content::Lines,
        Some("json") => Content::Json,
        Some("parquet") if compression == Compression::None => Content::Parquet,
        Some("parquet") => return refuse("a parquet file is compressed inside; decompress it first".into()),
        Some("arrow") => {
            return refuse("arrow files are not read; save it with the datasets library's to_parquet".into());
        }
        Some(packed @ ("gz" | "zst" | "tgz" | "xz" | "bz2" | "zip" | "tar")) => {
            return refuse(format!(".{packed} files are not read, only single files in .gz or .zst; unpack it first"));
        }
        _ => Content::Whole,
    };
    Ok((content, compression))
}

/// The file's ending in lower case, without the dot.
pub(super) fn ending(path: &Path) -> Option<String> {
    path.extension().and_then(|e| e.to_str()).map(str::to_ascii_lowercase)
}

/// The decompressed bytes of `path`.
///
/// # Errors
/// If it cannot be opened. What is wrong with compressed data shows when it is read.
pub(super) fn open(path: &Path, compression: Compression) -> Result<Box<dyn BufRead>> {
    let file = BufReader::with_capacity(PIECE, File::open(path).map_err(|e| unreadable(path, &e))?);
    Ok(match compression {
        Compression::None => Box::new(file),
        Compression::Gzip => Box::new(BufReader::with_capacity(PIECE, MultiGzDecoder::new(file))),
        Compression::Zstd => Box::new(BufReader::with_capacity(PIECE, zstd(file))),
    })
}

/// The decompressed bytes of a zstd stream.
pub(super) fn zstd(source: impl BufRead) -> impl Read {
    Frames { source, decoder: FrameDecoder::new() }
}

/// A failed read of `path`, as the user's error.
pub(super) fn unreadable(path: &Path, error: &io::Error) -> Error {
    Error::Usage(match ending(path).as_deref() {
        Some("gz" | "zst") if error.raw_os_error().is_none() => {
            format!("{}: is damaged or cut off ({error}); copy it again", path.display())
        }
        _ => format!("{}: cannot be read: {error}", path.display()),
    })
}

/// zstd's frames one after the other, as tools that compress in parallel write them.
struct Frames<R> {
    source: R,
    decoder: FrameDecoder,
}

impl<R: BufRead> Frames<R> {
    /// Begins the next frame; false at the end of the stream.
    fn next(&mut self) -> io::Result<bool> {
        loop {
            if self.source.fill_buf()?.is_empty() {
                return Ok(false);
            }
            match self.decoder.reset(&mut self.source) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame { length, .. })) => {
                    let skipped = io::copy(&mut self.source.by_ref().take(length.into()), &mut io::sink())?;
                    if skipped < length.into() {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(error) => return Err(io::Error::other(error.to_string())),
            }
        }
    }
}

impl<R: BufRead> Read for Frames<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        loop {
            if self.decoder.can_collect() > 0 {
                return self.decoder.read(out);
            }
            if !self.decoder.is_finished() {
                self.decoder
                    .decode_blocks(&mut self.source, BlockDecodingStrategy::UptoBlocks(1))
                    .map_err(|error| io::Error::other(error.to_string()))?;
                continue;
            }
            if let Some(stated) = self.decoder.get_checksum_from_data()
                && self.decoder.get_calculated_checksum() != Some(stated)
            {
                return Err(io::Error::other("a checksum does not match"));
            }
            if !self.next()? {
                return Ok(0);
            }
        }
    }
}
