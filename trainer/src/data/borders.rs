//! Where documents begin in a token file: by an index beside the tokens, else by BOS and EOS.
//!
//! `castor data pack` writes `tokens.documents` beside `tokens.bin`: the number of each document's first token, u64
//! little-endian, ascending. A Megatron index says the same in sequences. Other files have documents only as far as
//! their ids say so.

use castor_kernels::FileMap;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Where the index of documents of a token file is, if it has one.
pub(super) fn index_of(path: &Path) -> PathBuf {
    path.with_extension("documents")
}

/// Where documents begin.
#[derive(Debug)]
pub(super) enum Borders {
    /// First tokens, as a file holds them.
    Index(FileMap),
    /// First tokens, ascending.
    Starts(Vec<u64>),
    /// By ids.
    Marks(Marks),
}

/// Ids between documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Marks {
    /// A document begins with it.
    pub bos: Option<u32>,
    /// A document begins after it, unless it is BOS too: then it begins one.
    pub eos: Option<u32>,
}

impl Borders {
    /// The index beside the token file `path` of `tokens` tokens, if there is one.
    ///
    /// # Errors
    /// [`Error::Usage`] if it is not of that file.
    pub fn beside(path: &Path, tokens: u64) -> Result<Option<Borders>> {
        let index = index_of(path);
        if !index.is_file() {
            return Ok(None);
        }
        let map = FileMap::open(&index)?;
        let borders = Borders::Index(map);
        let (count, last) = (borders.count(), borders.count().checked_sub(1).map(|last| borders.start(last)));
        let Borders::Index(map) = &borders else { unreachable!("it was made above") };
        let whole = map.bytes().len().is_multiple_of(8);
        if !whole || count == 0 || borders.start(0) != 0 || last.is_some_and(|last| last > tokens) {
            return Err(Error::Usage(format!(
                "{}: {count} document starts up to token {} do not belong to the {tokens} tokens of {}; they are of \
                 different runs",
                index.display(),
                last.unwrap_or(0),
                path.display()
            )));
        }
        Ok(Some(borders))
    }

    fn count(&self) -> usize {
        match self {
            Borders::Index(map) => map.bytes().len() / 8,
            Borders::Starts(starts) => starts.len(),
            Borders::Marks(_) => 0,
        }
    }

    fn start(&self, document: usize) -> u64 {
        match self {
            Borders::Index(map) => {
                let bytes = map.bytes().as_chunks::<8>().0.get(document);
                bytes.map_or(u64::MAX, |bytes| u64::from_le_bytes(*bytes))
            }
            Borders::Starts(starts) => starts.get(document).copied().unwrap_or(u64::MAX),
            Borders::Marks(_) => u64::MAX,
        }
    }

    /// Fills `out` with the position, within a row of `ids` that begins at token `first`, where each token's document
    /// begins: 0 for one that began before the row.
    pub fn fill(&self, first: u64, ids: &[i32], out: &mut [i32]) {
        if let Borders::Marks(marks) = self {
            return marks.fill(ids, out);
        }
        // The first document that begins after the row's first token.
        let (mut low, mut next) = (0, self.count());
        while low < next {
            let middle = low.midpoint(next);
            if self.start(middle) > first {
                next = middle;
            } else {
                low = middle + 1;
            }
        }
        let mut start = 0;
        for (position, slot) in out.iter_mut().enumerate() {
            while self.start(next) <= first + position as u64 {
                start = position as i32;
                next += 1;
            }
            *slot = start;
        }
    }
}

impl Marks {
    fn fill(self, ids: &[i32], out: &mut [i32]) {
        let is = |id: i32, mark: Option<u32>| mark.is_some() && u32::try_from(id).ok() == mark;
        let ends = self.eos.filter(|_| self.eos != self.bos);
        let mut start = 0;
        for (position, slot) in out.iter_mut().enumerate() {
            if is(ids[position], self.bos) || position > 0 && is(ids[position - 1], ends) {
                start = position as i32;
            }
            *slot = start;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_are_counted_from_the_row() {
        let borders = Borders::Starts(vec![0, 3, 4, 4, 9]);
        let mut out = [0; 5];
        borders.fill(0, &[0; 5], &mut out);
        assert_eq!(out, [0, 0, 0, 3, 4]);
        borders.fill(5, &[0; 5], &mut out);
        assert_eq!(out, [0, 0, 0, 0, 4]);
        borders.fill(9, &[0; 5], &mut out);
        assert_eq!(out, [0; 5]);
    }

    #[test]
    fn bos_begins_a_document_and_eos_ends_one() {
        let starts = |bos, eos, ids: &[i32]| {
            let mut out = vec![0; ids.len()];
            Marks { bos, eos }.fill(ids, &mut out);
            out
        };
        assert_eq!(starts(Some(1), Some(2), &[5, 2, 1, 6, 2, 7]), [0, 0, 2, 2, 2, 5]);
        assert_eq!(starts(None, Some(2), &[5, 2, 6, 6, 2]), [0, 0, 2, 2, 2]);
        // One id for both, as GPT-2 has it, begins a document whether the file's maker put it before or behind.
        assert_eq!(starts(Some(2), Some(2), &[2, 5, 2, 6]), [0, 0, 2, 2]);
        assert_eq!(starts(None, None, &[1, 2]), [0, 0]);
    }
}
