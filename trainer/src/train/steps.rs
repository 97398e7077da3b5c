//! The steps of a leg, and what all ranks agree on before each.

use super::{Ended, Leg, Run, words};
use crate::account;
use crate::checkpoint::Saved;
use crate::engine::{Outcome, StepInputs, StepResult};
use crate::error::{Error, Result};
use crate::evaluation::Found;
use crate::inputs::MicroBatch;
use crate::replan::request::Request;
use crate::report::log::EvaluationRecord;
use crate::report::progress::StepRecord;
use crate::step_rows::StepRows;
use castor_kernels::Tier;
use castor_runtime::Pass;
use std::time::Instant;

/// See [`Run::agree`].
struct Agreed {
    /// Tokens that count over all ranks.
    tokens: u64,
    /// The signal by which a rank was told to stop, the lowest rank's: all end with it.
    signal: Option<i32>,
    /// Whether a save is in flight and every rank is ready for its next stage.
    saved: bool,
    /// Whether rank 0 was asked for other budgets.
    asked: bool,
}

impl Run<'_> {
    /// The steps of a leg, to the last or until something ends it.
    pub(super) fn leg(&mut self, leg: &mut Leg) -> Result<Ended> {
        let mut batch = StepRows::new(self.settings.max_length, self.settings.data.document_mask);
        let mut began = Instant::now();
        let mut open: Option<StepRecord> = None;
        for step in leg.begun..self.steps {
            batch.fill(self.rows, &self.sampler.step(step))?;
            let Agreed { tokens, signal, saved, asked } = self.agree(leg, batch.counted())?;
            if saved {
                let saved = leg.saver.advance(&mut leg.engine)?;
                self.note(&saved)?;
            }
            if let Some(signal) = signal {
                let last = leg.engine.finish()?;
                self.close(open, last)?;
                let saved = leg.saver.save_interrupted(&mut leg.engine)?;
                self.note(&saved)?;
                return Ok(Ended::By(signal));
            }
            if let Some(change) = self.other_plan(leg, asked, &mut began)? {
                let last = leg.engine.finish()?;
                self.close(open.take(), last)?;
                let saved = leg.saver.save_to_go_on(&mut leg.engine)?;
                self.note(&saved)?;
                if leg.saver.on_disk() == Some(step) {
                    return Ok(Ended::For(change));
                }
                self.say("the plan stays as it is, for there is no checkpoint to go on from; ask again");
                leg.stopwatch.interrupted();
                began = Instant::now();
            }
            let micros: Vec<MicroBatch> = batch.micros().collect();
            let result = leg.engine.step(&StepInputs { micros: &micros, tokens })?;
            leg.stepped();
            let rows = self.sampler.rows_in(step);
            self.samples += rows;
            self.tokens += rows * self.settings.max_length as u64;
            let seconds = began.elapsed().as_secs_f64();
            began = Instant::now();
            let (epoch, _) = self.sampler.position(step);
            let within = (step + 1 - epoch * self.sampler.steps_per_epoch()) as f64;
            let record = StepRecord {
                step: step + 1,
                epoch: epoch as f64 + within / self.sampler.steps_per_epoch() as f64,
                tokens: rows * self.settings.max_length as u64,
                counted_tokens: tokens,
                seconds,
                device_bytes: leg.live(Tier::Device),
                host_bytes: leg.live(Tier::Host),
                nvme_bytes: leg.live(Tier::Nvme),
                moved_bytes: account::moved(&leg.engine.manager().last_traffic(Pass::Train)),
                ..StepRecord::default()
            };
            let closing = open.replace(record);
            self.close(closing, result)?;
            if leg.made == self.settings.memory.warmup_steps {
                leg.engine.manager().end_warm_up();
            }
            if leg.saver.is_due(step + 1, self.steps) {
                let last = leg.engine.finish()?;
                let closing = open.take();
                self.close(closing, last)?;
                let saved = leg.saver.save(&mut leg.engine)?;
                self.note(&saved)?;
                leg.stopwatch.interrupted();
                began = Instant::now();
            }
            if self.settings.output.eval.is_due(step + 1, self.steps) && self.evaluation.is_some() {
                let last = leg.engine.finish()?;
                let closing = open.take();
                self.close(closing, last)?;
                self.evaluate(leg)?;
                leg.stopwatch.interrupted();
                began = Instant::now();
            }
        }
        let last = leg.engine.finish()?;
        self.close(open, last)?;
        if self.evaluated.is_none_or(|(step, _)| step != self.steps) {
            self.evaluate(leg)?;
        }
        let saved = leg.saver.settle(&mut leg.engine)?;
        self.note(&saved)?;
        Ok(Ended::AtTheEnd)
    }

    /// Says and logs what came of saving.
    fn note(&mut self, saved: &Saved) -> Result<()> {
        if let Some(log) = &mut self.log {
            saved.records.iter().try_for_each(|record| log.save(record))?;
        }
        self.save_s = saved.records.last().map(|record| record.seconds).or(self.save_s);
        saved.notices.iter().for_each(|line| self.say(line));
        Ok(())
    }

    /// Says it beside the steps, on the rank that speaks.
    pub(super) fn say(&self, line: &str) {
        if self.speaks {
            self.progress.say(line);
        }
    }

    /// What all ranks must know alike before a step in which `counted` tokens of this one count.
    fn agree(&mut self, leg: &mut Leg, counted: u64) -> Result<Agreed> {
        let own = Agreed {
            tokens: counted,
            signal: self.signalled(),
            saved: leg.saver.is_ready(),
            asked: self.speaks && !self.deaf && Request::waits(&self.settings.output.dir),
        };
        if self.world.world == 1 {
            return Ok(own);
        }
        let mut message = counted.to_le_bytes().to_vec();
        // Signals are numbered below 65.
        message.extend([own.signal.unwrap_or(0) as u8, u8::from(own.saved), u8::from(own.asked)]);
        let answers = leg.engine.manager().backend().exchange(&message)?;
        let mut all = Agreed { tokens: 0, signal: None, saved: true, asked: false };
        for (rank, answer) in answers.iter().enumerate() {
            let Some((count, [signal, saved, asked])) = answer.split_first_chunk::<8>() else {
                return Err(Error::Failed(format!("rank {rank} runs another version of castor")));
            };
            all.tokens += u64::from_le_bytes(*count);
            all.signal = all.signal.or((*signal != 0).then_some(i32::from(*signal)));
            all.saved &= *saved != 0;
            all.asked |= *asked != 0;
        }
        Ok(all)
    }

    /// A step's result has come: the record is complete.
    fn close(&mut self, record: Option<StepRecord>, result: Option<StepResult>) -> Result<()> {
        let (Some(mut record), Some(result)) = (record, result) else { return Ok(()) };
        record.loss = result.loss;
        record.grad_norm = result.grad_norm;
        record.learning_rate = result.lr;
        record.skipped = result.outcome != Outcome::Updated;
        self.records += 1;
        if result.loss.is_finite() {
            self.losses.sum += result.loss;
            self.losses.count += 1;
        }
        if result.outcome == Outcome::NothingCounts && self.speaks {
            self.progress.say(&format!("step {}: no token counts on any rank, nothing was updated", record.step));
        }
        if result.outcome == Outcome::NotFinite {
            self.skipped += 1;
            if self.skipped == 1 && self.speaks {
                self.progress.say(&words::not_finite(record.step, &result, self.settings.optimizer.clip));
            }
        }
        if let Some(log) = &mut self.log {
            log.step(&record)?;
        }
        self.progress.step(&record);
        Ok(())
    }

    /// Evaluates after the steps made so far, says and logs it.
    fn evaluate(&mut self, leg: &mut Leg) -> Result<()> {
        let Some(evaluation) = &self.evaluation else { return Ok(()) };
        let found = evaluation.run(&mut leg.engine, self.world, self.settings)?;
        let step = self.begun + self.records;
        self.evaluated = Some((step, found));
        if let Some(log) = &mut self.log {
            log.evaluation(&EvaluationRecord { step, loss: found.loss, tokens: found.tokens })?;
        }
        if self.speaks {
            let Found { loss, tokens } = found;
            self.progress.say(&format!("eval_loss {loss:.4} after step {step} ({tokens} tokens)"));
        }
        Ok(())
    }
}
