//! Tokens cut into rows of S: no padding, nothing repeated, the remainder said.

use super::TokenFile;
use super::borders::Borders;
use super::document::SILENT;
use crate::error::{Error, Result, counted};
use crate::source::Rows;
use castor_kernels::ops::IGNORED;

/// Rows of S tokens over ids in memory or over mapped token files. A row begins where the last one ended, so
/// documents run across rows. Every token is its own label, unless the data says that it does not count (the model is
/// never asked for a row's first token).
#[derive(Debug)]
pub struct PackedRows {
    ids: Ids,
    /// First row of each file, and the number of all rows at the end. One part for ids in memory.
    starts: Vec<u64>,
    length: usize,
    remainder: u64,
}

#[derive(Debug)]
enum Ids {
    /// And where documents begin.
    Memory(Vec<u32>, Borders),
    Files(Vec<TokenFile>),
}

impl PackedRows {
    /// Rows over `ids`, with the mark `SILENT` (the top bit) where a token does not count. Documents begin at
    /// `documents`, ascending; without any each row is one.
    ///
    /// # Errors
    /// If there are fewer ids than one row, with the number that is needed.
    pub fn from_ids(ids: Vec<u32>, documents: Vec<u64>, length: usize) -> Result<PackedRows> {
        let tokens = ids.len() as u64;
        PackedRows::new(Ids::Memory(ids, Borders::Starts(documents)), &[tokens], length)
    }

    /// Rows over token files; each file's remainder is its own.
    ///
    /// # Errors
    /// If no file holds one row, with the number of tokens that is needed.
    pub fn from_files(files: Vec<TokenFile>, length: usize) -> Result<PackedRows> {
        let tokens: Vec<u64> = files.iter().map(TokenFile::len).collect();
        PackedRows::new(Ids::Files(files), &tokens, length)
    }

    fn new(ids: Ids, tokens: &[u64], length: usize) -> Result<PackedRows> {
        assert!(length > 0, "a row has at least one token");
        let mut starts = vec![0];
        let mut remainder = 0;
        for tokens in tokens {
            starts.push(starts[starts.len() - 1] + tokens / length as u64);
            remainder += tokens % length as u64;
        }
        let rows = PackedRows { ids, starts, length, remainder };
        if rows.is_empty() {
            let most = tokens.iter().max().copied().unwrap_or(0);
            return Err(Error::Usage(match most {
                0 => "the data is empty: no token was found".into(),
                _ => format!(
                    "the data has {} and one sequence needs {length}; give at least {length} tokens or \
                     --max_length {most}",
                    counted(most, "tokens")
                ),
            }));
        }
        Ok(rows)
    }

    /// Whether this process made the tokens, from text, so that its tokenizer is theirs.
    pub const fn is_of_text(&self) -> bool {
        matches!(self.ids, Ids::Memory(..))
    }

    /// One line for the log: rows, length and what is left over.
    pub fn summary(&self) -> String {
        format!(
            "{} of {} tokens, {} left over at the end",
            counted(self.len(), "sequences"),
            self.length,
            counted(self.remainder, "tokens")
        )
    }

    /// File of a row, and its first token within it.
    fn place(&self, index: u64) -> (usize, u64) {
        let part = self.starts.partition_point(|start| *start <= index) - 1;
        (part, (index - self.starts[part]) * self.length as u64)
    }

    /// Tokens that fill no row.
    pub const fn remainder(&self) -> u64 {
        self.remainder
    }
}

impl Rows for PackedRows {
    fn len(&self) -> u64 {
        self.starts[self.starts.len() - 1]
    }

    fn length(&self) -> usize {
        self.length
    }

    fn row(&self, index: u64, ids: &mut [i32], labels: &mut [i32]) -> Result<()> {
        assert!(index < self.len(), "row {index} of {}", self.len());
        assert_eq!((ids.len(), labels.len()), (self.length, self.length));
        let (part, first) = self.place(index);
        match &self.ids {
            Ids::Memory(all, _) => {
                for ((id, label), source) in ids.iter_mut().zip(&mut *labels).zip(&all[first as usize..]) {
                    *id = (*source & !SILENT) as i32;
                    *label = if source & SILENT == 0 { *id } else { IGNORED };
                }
            }
            Ids::Files(files) => {
                files[part].read(first, ids);
                labels.copy_from_slice(ids);
                for (label, index) in labels.iter_mut().zip(first..) {
                    if files[part].is_silent(index) {
                        *label = IGNORED;
                    }
                }
            }
        }
        Ok(())
    }

    fn starts(&self, index: u64, ids: &[i32], starts: &mut [i32]) -> Result<()> {
        let (part, first) = self.place(index);
        match &self.ids {
            Ids::Memory(_, documents) => documents.fill(first, ids, starts),
            Ids::Files(files) => files[part].starts(first, ids, starts),
        }
        Ok(())
    }
}
