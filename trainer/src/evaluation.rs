//! The loss on rows that are not trained on: a file of their own (`--eval_data`), or the end of the training data
//! (`--eval_fraction`).

use crate::data::{self, Order, PackedRows, Sampler};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::rendezvous::World;
use crate::settings::Settings;
use crate::step_rows::StepRows;
use std::ops::Range;

/// The rows of `--eval_data`, if it is given, and notices.
///
/// # Errors
/// If the data cannot be used.
pub fn open(settings: &Settings, vocabulary: u64) -> Result<(Option<PackedRows>, Vec<String>)> {
    let inputs = &settings.output.eval_data;
    if inputs.is_empty() {
        return Ok((None, Vec::new()));
    }
    let flag = "--eval_data";
    let spec = data::DataSpec { inputs: inputs.clone(), flag, ..settings.data.clone() };
    let opened = data::open(&spec, &settings.tokenizer, settings.max_length, vocabulary);
    let (rows, said) = opened.map_err(|error| match error {
        // A message that does not say so by itself would be taken for one about --data.
        Error::Usage(reason) if !reason.contains(flag) => Error::Usage(format!("{flag}: {reason}")),
        other => other,
    })?;
    Ok((Some(rows), said.into_iter().map(|notice| format!("evaluation: {notice}")).collect()))
}

/// Rows that a run evaluates on.
#[derive(Clone, Debug)]
pub struct Evaluation<'a> {
    /// Where they are.
    pub rows: &'a PackedRows,
    /// Which.
    pub range: Range<u64>,
}

/// What an evaluation found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Found {
    /// Mean loss of the tokens that count; NaN if none does.
    pub loss: f64,
    /// Tokens that count.
    pub tokens: u64,
}

impl Evaluation<'_> {
    /// The mean over all tokens of all ranks, each once. All ranks must call it; [`Engine::finish`] first.
    ///
    /// # Errors
    /// If a row cannot be read or the world below refuses.
    pub fn run(&self, engine: &mut Engine, world: &World, settings: &Settings) -> Result<Found> {
        let count = self.range.end - self.range.start;
        let mut sampler = Sampler::new(count, Order::Sequential, world.rank, world.world, settings.batch_size, 1);
        let mut batch = StepRows::new(settings.max_length, settings.data.document_mask);
        let (mut loss, mut tokens) = (0.0, 0);
        for step in 0..sampler.steps_per_epoch() {
            let mut lists = sampler.step(step);
            for row in lists.iter_mut().flatten().flatten() {
                *row += self.range.start;
            }
            batch.fill(self.rows, &lists)?;
            tokens += engine.total(batch.counted())?;
            let micros: Vec<_> = batch.micros().collect();
            loss += engine.evaluate(&micros)?;
        }
        Ok(Found { loss: loss / tokens as f64, tokens })
    }
}
