//! A document between reading and packing: its text and which of it counts in the loss; then its ids.

use std::ops::Range;

use super::{DataSpec, Tokenizer};
use crate::error::Result;

/// Set in an id whose token does not count in the loss. No vocabulary reaches it: ids are i32 further on.
pub(super) const SILENT: u32 = 1 << 31;

/// A document as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Document {
    /// All of its text.
    pub text: String,
    /// The parts of the text that count, in order; `None`: all of it.
    pub answers: Option<Vec<Range<usize>>>,
    /// Whether BOS and EOS are part of the text: nothing is added around it.
    pub framed: bool,
}

impl Document {
    /// Text of which everything counts.
    pub fn plain(text: String) -> Document {
        Document { text, answers: None, framed: false }
    }

    /// The document's ids, [`SILENT`] in those that do not count, with BOS and EOS as `spec` asks. EOS counts if the
    /// token before it does.
    ///
    /// # Errors
    /// If the tokenizer refuses the text.
    pub fn encode(&self, spec: &DataSpec, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
        let mut ids = Vec::with_capacity(self.text.len() / 3 + 2);
        let frame = |asked: bool, id: Option<u32>| id.filter(|_| asked && !self.framed);
        let silent = if self.answers.is_some() { SILENT } else { 0 };
        ids.extend(frame(spec.bos, tokenizer.bos()).map(|id| id | silent));
        match &self.answers {
            None => tokenizer.encode(&self.text, &mut ids)?,
            Some(answers) => {
                // A token counts if it begins in an answer: one that begins before it was not asked for alone.
                let mut next = answers.iter().peekable();
                tokenizer.encode_placed(&self.text, &mut |id, begins| {
                    while next.next_if(|answer| answer.end <= begins).is_some() {}
                    let counts = next.peek().is_some_and(|answer| answer.start <= begins);
                    ids.push(if counts { id } else { id | SILENT });
                })?;
            }
        }
        let last = ids.last().map_or(0, |id| id & SILENT);
        ids.extend(frame(spec.eos, tokenizer.eos()).map(|id| id | last));
        Ok(ids)
    }
}
