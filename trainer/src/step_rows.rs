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
    used: usize,
}

impl StepRows {
    /// For rows of `length` tokens.
    pub fn new(length: usize) -> StepRows {
        StepRows { length, ids: Vec::new(), labels: Vec::new(), used: 0 }
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
        Ok(())
    }

    /// The micro-batches.
    pub fn micros(&self) -> impl Iterator<Item = MicroBatch<'_>> {
        self.ids.iter().zip(&self.labels).take(self.used).map(|(ids, labels)| MicroBatch { ids, labels, starts: None })
    }

    /// Tokens that count on this rank.
    pub fn counted(&self) -> u64 {
        self.micros().map(|micro| micro.counted(self.length as u64)).sum()
    }
}
