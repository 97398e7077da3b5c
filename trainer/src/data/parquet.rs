//! One text column of a parquet file, row by row.
//!
//! The parquet crate reads the file's structure and encodings. Pages are decompressed here, with the decoders that
//! Castor has anyway: the crate's own zstd is C.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use flate2::bufread::MultiGzDecoder;
use parquet::basic::{Compression, Type};
use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::column::reader::ColumnReaderImpl;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::file::serialized_reader::SerializedPageReader;

use super::format;
use crate::error::{Error, Result};

/// Rows read at a time.
const ROWS: usize = 256;
/// The format states page sizes as i32: more than this is no page.
const PAGE_BYTES_MAX: u64 = i32::MAX as u64;

/// Gives the values of `column`, in the order of rows; `None` where a value is null.
///
/// # Errors
/// If the file is not sound, has no rows, or no such column of strings; or what `give` returns.
pub(super) fn read(path: &Path, column: &str, give: &mut dyn FnMut(Option<&[u8]>) -> Result<()>) -> Result<()> {
    let refuse = |reason: String| Error::Usage(format!("{}: {reason}", path.display()));
    let damaged = |error: ParquetError| match error {
        ParquetError::NYI(what) => refuse(what),
        error => refuse(format!("not a parquet file, damaged or cut off ({}); copy it again", one_line(&error))),
    };
    let file = File::open(path).map_err(|e| format::unreadable(path, &e))?;
    let bytes = Arc::new(file.try_clone().map_err(|e| format::unreadable(path, &e))?);
    let file_bytes = file.metadata().map_err(|e| format::unreadable(path, &e))?.len();
    let reader = SerializedFileReader::new(file).map_err(damaged)?;
    let metadata = reader.metadata();
    let columns = metadata.file_metadata().schema_descr();
    let names: Vec<String> = columns.columns().iter().map(|c| c.path().string()).collect();
    let index = names.iter().position(|name| name == column).ok_or_else(|| {
        refuse(format!(
            "there is no column \"{column}\" (the file has {}); name another with --text_column",
            names.iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ")
        ))
    })?;
    let described = columns.column(index);
    if described.physical_type() != Type::BYTE_ARRAY || described.max_rep_level() != 0 {
        return Err(refuse(format!(
            "column \"{column}\" holds {}, strings were expected; name another with --text_column",
            described.physical_type()
        )));
    }
    if metadata.file_metadata().num_rows() == 0 {
        return Err(refuse("the file has 0 rows".into()));
    }
    for group in metadata.row_groups() {
        let stored = group.column(index);
        // The crate asserts what the file merely states.
        let begins = stored.dictionary_page_offset().unwrap_or(stored.data_page_offset());
        let inside = |at: i64| u64::try_from(at).is_ok_and(|at| at <= file_bytes);
        if !inside(begins) || !inside(stored.data_page_offset()) || !inside(stored.compressed_size()) {
            return Err(refuse("damaged: a column lies outside of the file; copy it again".into()));
        }
        let codec = stored.compression();
        // As if uncompressed: the crate then gives pages as they lie in the file.
        let raw = stored.clone().into_builder().set_compression(Compression::UNCOMPRESSED).build().map_err(damaged)?;
        let rows = usize::try_from(group.num_rows()).map_err(|_| refuse("a row group has a negative size".into()))?;
        let pages = SerializedPageReader::new(Arc::clone(&bytes), &raw, rows, None).map_err(damaged)?;
        let pages = Box::new(Decompressed { pages, codec });
        let mut reader = ColumnReaderImpl::<ByteArrayType>::new(described.clone(), pages);
        let optional = described.max_def_level();
        let (mut values, mut levels): (Vec<ByteArray>, Vec<i16>) = Default::default();
        loop {
            values.clear();
            levels.clear();
            let (rows, _, _) = reader.read_records(ROWS, Some(&mut levels), None, &mut values).map_err(damaged)?;
            if rows == 0 {
                break;
            }
            let mut present = values.iter();
            for row in 0..rows {
                let null = levels.get(row).is_some_and(|level| *level < optional);
                give(if null { None } else { present.next().map(ByteArray::data) })?;
            }
        }
    }
    Ok(())
}

fn one_line(error: &ParquetError) -> String {
    error.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Pages as the encodings' decoders want them.
struct Decompressed {
    pages: SerializedPageReader<File>,
    codec: Compression,
}

impl Decompressed {
    /// The page's bytes decompressed from `start` on.
    fn bytes(&self, stored: Bytes, start: usize) -> parquet::errors::Result<Bytes> {
        if self.codec == Compression::UNCOMPRESSED {
            return Ok(stored);
        }
        let damaged = |reason: String| ParquetError::General(format!("a page cannot be decompressed: {reason}"));
        let (levels, packed) =
            stored.split_at_checked(start).ok_or_else(|| damaged("it is shorter than its levels".into()))?;
        let mut out = levels.to_vec();
        if packed.is_empty() {
            return Ok(out.into());
        }
        let read = match self.codec {
            Compression::SNAPPY => {
                let values = snap::raw::Decoder::new().decompress_vec(packed).map_err(|e| damaged(e.to_string()))?;
                out.extend(values);
                return Ok(out.into());
            }
            Compression::GZIP(_) => MultiGzDecoder::new(packed).take(PAGE_BYTES_MAX).read_to_end(&mut out),
            Compression::ZSTD(_) => format::zstd(packed).take(PAGE_BYTES_MAX).read_to_end(&mut out),
            other => {
                return Err(ParquetError::NYI(format!(
                    "pages compressed with {other} are not read; write it with snappy, gzip or zstd"
                )));
            }
        };
        read.map_err(|e| damaged(e.to_string()))?;
        Ok(out.into())
    }
}

impl PageReader for Decompressed {
    fn get_next_page(&mut self) -> parquet::errors::Result<Option<Page>> {
        let Some(mut page) = self.pages.get_next_page()? else { return Ok(None) };
        match &mut page {
            Page::DataPage { buf, .. } | Page::DictionaryPage { buf, .. } => {
                *buf = self.bytes(std::mem::take(buf), 0)?;
            }
            // The levels of these pages are never compressed.
            Page::DataPageV2 { buf, def_levels_byte_len, rep_levels_byte_len, is_compressed: true, .. } => {
                let levels = *def_levels_byte_len as usize + *rep_levels_byte_len as usize;
                *buf = self.bytes(std::mem::take(buf), levels)?;
            }
            Page::DataPageV2 { .. } => {}
        }
        Ok(Some(page))
    }

    fn peek_next_page(&mut self) -> parquet::errors::Result<Option<PageMetadata>> {
        self.pages.peek_next_page()
    }

    fn skip_next_page(&mut self) -> parquet::errors::Result<()> {
        self.pages.skip_next_page()
    }

    fn at_record_boundary(&mut self) -> parquet::errors::Result<bool> {
        self.pages.at_record_boundary()
    }
}

impl Iterator for Decompressed {
    type Item = parquet::errors::Result<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}
