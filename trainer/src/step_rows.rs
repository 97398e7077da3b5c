//! The rows of one step, read into micro-batches.

use crate::error::Result;
use crate::inputs::MicroBatch;
use crate::source::Rows;
use castor_kernels::ops::IGNORED;

/// Buffers of a step's micro-batches; they grow once.
pub(crate) struct StepRows {
    length: usize,
    ids: Vec<Vec<i32>>,
    labels: Vec<Vec<i32>>,
    /// Document starts, with document masks.
    starts: Option<Vec<Vec<i32>>>,
    used: usize,
}

impl StepRows {
    /// For rows of `length` tokens, with document masks if `documents`.
    pub fn new(length: usize, documents: bool) -> StepRows {
        StepRows { length, ids: Vec::new(), labels: Vec::new(), starts: documents.then(Vec::new), used: 0 }
    }

    /// Reads the rows that a sampler dealt; a missing row becomes one in which nothing counts.
    ///
    /// # Errors
    /// If a row cannot be read.
    pub fn fill(&mut self, rows: &dyn Rows, dealt: &[Vec<Option<u64>>]) -> Result<()> {
        self.used = dealt.len();
        self.ids.resize_with(self.ids.len().max(self.used), Vec::new);
        self.labels.resize_with(self.labels.len().max(self.used), Vec::new);
        for ((micro, ids), labels) in dealt.iter().zip(&mut self.ids).zip(&mut self.labels) {
            ids.clear();
            ids.resize(micro.len() * self.length, 0);
            labels.clear();
            labels.resize(micro.len() * self.length, IGNORED);
            let places = ids.chunks_exact_mut(self.length).zip(labels.chunks_exact_mut(self.length));
            for (row, (ids, labels)) in micro.iter().zip(places) {
                if let Some(row) = row {
                    rows.row(*row, ids, labels)?;
                }
            }
        }
        self.fill_starts(rows, dealt)
    }

    /// With document masks a document's first token is asked of nobody: the token before it is another document's.
    fn fill_starts(&mut self, rows: &dyn Rows, dealt: &[Vec<Option<u64>>]) -> Result<()> {
        let Some(all) = &mut self.starts else { return Ok(()) };
        all.resize_with(all.len().max(self.used), Vec::new);
        let micros = dealt.iter().zip(&self.ids).zip(&mut self.labels).zip(all);
        for (((micro, ids), labels), starts) in micros {
            starts.clear();
            starts.resize(ids.len(), 0);
            let places = ids.chunks_exact(self.length).zip(labels.chunks_exact_mut(self.length));
            for (row, ((ids, labels), starts)) in micro.iter().zip(places.zip(starts.chunks_exact_mut(self.length))) {
                let Some(row) = row else { continue };
                rows.starts(*row, ids, starts)?;
                for (position, (label, start)) in labels.iter_mut().zip(&*starts).enumerate() {
                    if position == *start as usize {
                        *label = IGNORED;
                    }
                }
            }
        }
        Ok(())
    }

    /// The micro-batches.
    pub fn micros(&self) -> impl Iterator<Item = MicroBatch<'_>> {
        (0..self.used).map(|micro| MicroBatch {
            ids: &self.ids[micro],
            labels: &self.labels[micro],
            starts: self.starts.as_ref().map(|starts| starts[micro].as_slice()),
        })
    }

    /// Tokens that count on this rank.
    pub fn counted(&self) -> u64 {
        self.micros().map(|micro| micro.counted(self.length as u64)).sum()
    }
}
