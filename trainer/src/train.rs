//! `castor train`: the loop over steps, and what it says and writes.

use crate::checkpoint::{self, Facts, Saved, Saver};
use crate::config::ModelConfig;
use crate::data::{self, PackedRows, Sampler, held_out};
use crate::engine::{Engine, Outcome, StepInputs, StepResult};
use crate::error::{Error, Result};
use crate::evaluation::{self, Evaluation, Found};
use crate::inputs::MicroBatch;
use crate::launcher;
use crate::optimizer::Clip;
use crate::rendezvous::World;
use crate::report::log::{self, EvaluationRecord, RunLog};
use crate::report::metrics::{self, Header, TrainMetrics};
use crate::report::progress::{self, Progress, StepRecord};
use crate::report::{self, PAGE, html};
use crate::session::{self, Hardware};
use crate::settings::{Resume, Settings};
use crate::source::Rows;
use crate::{account, agreement, auto, step_rows::StepRows};
use castor_kernels::Tier;
use castor_runtime::Pass;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Trains as `settings` say, as the rank that the environment names.
///
/// # Errors
/// [`Error::Usage`] for bad input, [`Error::DoesNotFit`] before anything is allocated, [`Error::Interrupted`]
/// after a signal, and what the world refuses.
pub fn main(settings: &Settings) -> Result<()> {
    let world = World::from_env()?;
    let speaks = world.rank == 0;
    let (config, mut notices) = settings.model_shape()?;
    let (rows, said) = data::open(&settings.data, &settings.tokenizer, settings.max_length, config.vocab_size)?;
    notices.extend(said);
    notices.extend(settings.notices.iter().cloned());
    let (apart, said) = evaluation::open(settings, config.vocab_size)?;
    notices.extend(said);
    let (training, held_out) = held_out(rows.len(), settings.output.eval_fraction);
    let evaluation = match &apart {
        Some(apart) => Some(Evaluation { rows: apart, range: 0..apart.len() }),
        None if held_out.is_empty() => None,
        None => Some(Evaluation { rows: &rows, range: held_out }),
    };
    let sampler = Sampler::new(
        training.end,
        settings.order,
        world.rank,
        world.world,
        settings.batch_size,
        settings.gradient_accumulation_steps,
    );
    let settings = &settings.with_epochs_of(sampler.steps_per_epoch());
    let steps = settings.total_steps(&sampler);
    let hardware = Hardware::open(settings, &world)?;
    notices.extend(hardware.notices.iter().cloned());
    let micros = settings
        .gradient_accumulation_steps
        .min(sampler.rows_in(0).div_ceil(u64::from(world.world) * settings.batch_size));
    let mut options =
        session::options(settings, config.clone(), settings.max_length as u64, settings.batch_size, micros, steps);
    options.evaluates = evaluation.is_some();
    options.shards = session::shards(settings, world.world, world.local_world)?;
    let (blueprint, plan, estimate, said) = auto::plan_saving(settings, options, &hardware, world.world)?;
    notices.extend(said);
    if speaks {
        let rates = hardware.rates.origin(settings.memory.nvme.is_some());
        notices.push(format!("estimated {estimate}; rates {rates}"));
        notices.extend(estimate.wear(&plan, world.local_world, settings.memory.nvme_endurance));
        checkpoint::prepare(settings, blueprint.layout())?;
    }
    let facts = Facts::of(
        blueprint.options(),
        checkpoint::Data { rows: training.end, rows_per_step: sampler.rows_per_step(), order: settings.order },
    );
    let output = &settings.output;
    let cadence = (steps, &output.save, output.async_save, &output.eval, output.save_model);
    agreement::same(
        &*hardware.backend,
        &[
            ("flags or data", format!("{facts:?} {:?} {cadence:?}", blueprint.options())),
            ("plans", format!("{:?}", plan.placement)),
        ],
    )?;
    let (from, said) = checkpoint::find(&settings.output.resume, &settings.output.dir, &facts, &*hardware.backend)?;
    notices.extend(said);
    let began = Instant::now();
    let mut engine = session::engine(Arc::clone(&hardware.backend), &blueprint, plan)?;
    let reserved_s = began.elapsed().as_secs_f64();
    match &from {
        Some(checkpoint) => checkpoint.restore(&mut engine)?,
        None => notices.extend(session::load(settings, &mut engine)?),
    }
    let filled_s = began.elapsed().as_secs_f64() - reserved_s;
    notices.push(format!("memory was taken in {reserved_s:.1} s and filled in {filled_s:.1} s"));
    let begun = from.map(|checkpoint| checkpoint.progress().step);
    let saver = Saver::new(&settings.output, facts, begun, &mut engine)?;
    let signal = Arc::new(AtomicUsize::new(0));
    for kind in launcher::ending_signals() {
        signal_hook::flag::register_usize(kind, Arc::clone(&signal), kind as usize)
            .map_err(|error| Error::Failed(format!("signal {kind} cannot be watched: {error}")))?;
    }
    let mut run = Run {
        settings,
        world: &world,
        config: &config,
        rows: &rows,
        examples: training.end,
        evaluation,
        evaluated: None,
        sampler,
        steps,
        engine,
        saver,
        begun: begun.unwrap_or(0),
        signal,
        speaks,
        progress: Progress::quiet(steps),
        log: None,
        losses: Mean::default(),
        records: 0,
        skipped: 0,
        tokens: 0,
        samples: 0,
    };
    if speaks {
        run.introduce(&notices)?;
    }
    let began = Instant::now();
    let outcome = run.train();
    let seconds = began.elapsed().as_secs_f64();
    match outcome {
        // A failure in the middle of the step leaves the figures of what was reached (known faults E).
        Err(error) => {
            let said = run.saver.rescue(&mut run.engine);
            if speaks {
                said.iter().for_each(|line| eprintln!("castor: {line}"));
                let peak = run.engine.manager().ledger().total(Tier::Device);
                eprintln!(
                    "castor: the run ended after step {}; {}",
                    run.begun + run.records,
                    metrics::max_cuda_usage(peak)
                );
                eprintln!("castor: {}", run.saver.way_back());
            }
            Err(error)
        }
        Ok(interrupted) => {
            run.conclude(seconds)?;
            let doubtful = run.engine.progress().loss_scale.doubtful();
            if doubtful > 0 && interrupted.is_none() {
                return Err(Error::Failed(format!(
                    "loss or gradient norm of {} was not finite, so that neither a checkpoint nor the model is written after \
                     it; lower --lr, or check the data and the weights for NaN; {}",
                    if doubtful == 1 { "the last step".into() } else { format!("the last {doubtful} steps") },
                    run.saver.way_back()
                )));
            }
            if interrupted.is_none() && settings.output.save_model {
                let folder = run.saver.save_model(&settings.tokenizer, &mut run.engine)?;
                if speaks {
                    println!("The model: {}", folder.display());
                }
            }
            // One that comes after the last step asks for what is happening anyway, and is heard by this rank alone.
            match interrupted.or(run.signalled()) {
                None => Ok(()),
                Some(signal) => Err(Error::Interrupted(signal)),
            }
        }
    }
}

struct Run<'a> {
    settings: &'a Settings,
    world: &'a World,
    config: &'a ModelConfig,
    rows: &'a PackedRows,
    /// Rows that are trained on.
    examples: u64,
    evaluation: Option<Evaluation<'a>>,
    /// After which step the last evaluation was, and what it found.
    evaluated: Option<(u64, Found)>,
    sampler: Sampler,
    steps: u64,
    engine: Engine,
    saver: Saver,
    /// Steps that earlier sessions made.
    begun: u64,
    /// The signal that asks this rank to end; 0: none.
    signal: Arc<AtomicUsize>,
    speaks: bool,
    progress: Progress,
    log: Option<RunLog>,
    /// Of the losses that are finite.
    losses: Mean,
    records: u64,
    /// Steps of this session whose norm was not finite.
    skipped: u64,
    tokens: u64,
    samples: u64,
}

/// A sum and of how many.
#[derive(Default)]
struct Mean {
    sum: f64,
    count: u64,
}

/// See [`Run::agree`].
struct Agreed {
    /// Tokens that count over all ranks.
    tokens: u64,
    /// The signal by which a rank was told to stop, the lowest rank's: all end with it.
    signal: Option<i32>,
    /// Whether a save is in flight and every rank is ready for its next stage.
    saved: bool,
}

impl Run<'_> {
    /// What is said before the first step.
    fn introduce(&mut self, notices: &[String]) -> Result<()> {
        let directory = &self.settings.output.dir;
        std::fs::create_dir_all(directory).map_err(|error| {
            Error::Usage(format!("--output_dir {}: {error}; give a folder that can be written", directory.display()))
        })?;
        for notice in notices {
            eprintln!("castor: {notice}");
        }
        let budgets = self.engine.manager().plan().budgets.clone();
        let ledger = *self.engine.manager().ledger();
        eprint!("{}", account::placement(self.engine.manager()));
        let header = Header {
            examples: self.examples,
            epochs: (self.steps as f64 / self.sampler.steps_per_epoch() as f64).ceil() as u64,
            batch_per_device: self.settings.batch_size,
            total_batch: self.sampler.rows_per_step(),
            accumulation: self.settings.gradient_accumulation_steps,
            steps: self.steps,
            parameters: self.config.parameters(),
        };
        print!("{}", header.block());
        println!("{}", metrics::model_params(self.config.parameters()));
        println!("{}", metrics::booster_init_cuda(ledger.total(Tier::Device)));
        println!("{}", metrics::booster_init_cpu(report::peak_host_bytes().unwrap_or(0)));
        let device = self.engine.manager().backend().device();
        let after = (self.settings.output.resume != Resume::No).then_some(self.begun);
        self.log = Some(RunLog::begin(
            directory,
            after,
            json!({
                "castor": env!("CARGO_PKG_VERSION"),
                "world": self.world.world,
                "plugin": self.settings.memory.plugin.name,
                "backend": device.backend,
                "device": device.name,
                "parameters": self.config.parameters(),
                "steps": self.steps,
                "tokenizer": self.tokenizer(),
                "inexact": self.inexact(),
            }),
        )?);
        let logging = match self.settings.output.logging {
            crate::settings::Every::Steps(steps) => steps,
            crate::settings::Every::Fraction(part) => ((self.steps as f64 * part).ceil() as u64).max(1),
            crate::settings::Every::Never | crate::settings::Every::Epoch => self.steps,
        };
        let shown = progress::Budgets { device: budgets.device, host: budgets.host, nvme: budgets.nvme };
        self.progress = Progress::start(self.steps, self.begun, logging, shown);
        Ok(())
    }

    /// What makes results inexact, in this session or one that it goes on from.
    fn inexact(&self) -> Option<&'static str> {
        let before = self.engine.progress().lagged;
        let of_before = before.then_some("gradients of earlier sessions were clipped by the norm of the step before");
        self.settings.optimizer.inexact().or(of_before)
    }

    /// What `castor sample` finds the tokenizer by: `bytes`, or its whole path. Of token files one that was not named is
    /// not known.
    fn tokenizer(&self) -> Option<String> {
        let name = &self.settings.tokenizer;
        if name == "bytes" {
            return self.rows.is_of_text().then(|| name.clone());
        }
        Some(std::fs::canonicalize(name).ok()?.display().to_string())
    }

    /// All steps, or those until a signal ended them early: that signal.
    fn train(&mut self) -> Result<Option<i32>> {
        let mut batch = StepRows::new(self.settings.max_length, self.settings.data.document_mask);
        let mut began = Instant::now();
        let mut open: Option<StepRecord> = None;
        for step in self.begun..self.steps {
            batch.fill(self.rows, &self.sampler.step(step))?;
            let Agreed { tokens, signal, saved } = self.agree(batch.counted())?;
            if saved {
                let saved = self.saver.advance(&mut self.engine)?;
                self.note(&saved)?;
            }
            if signal.is_some() {
                let last = self.engine.finish()?;
                self.close(open, last)?;
                let saved = self.saver.save_interrupted(&mut self.engine)?;
                self.note(&saved)?;
                return Ok(signal);
            }
            let micros: Vec<MicroBatch> = batch.micros().collect();
            let result = self.engine.step(&StepInputs { micros: &micros, tokens })?;
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
                device_bytes: self.live(Tier::Device),
                host_bytes: self.live(Tier::Host),
                nvme_bytes: self.live(Tier::Nvme),
                moved_bytes: account::moved(&self.engine.manager().last_traffic(Pass::Train)),
                ..StepRecord::default()
            };
            let closing = open.replace(record);
            self.close(closing, result)?;
            if step + 1 == self.begun.saturating_add(self.settings.memory.warmup_steps) {
                self.engine.manager().end_warm_up();
            }
            if self.saver.is_due(step + 1, self.steps) {
                let last = self.engine.finish()?;
                let closing = open.take();
                self.close(closing, last)?;
                let saved = self.saver.save(&mut self.engine)?;
                self.note(&saved)?;
                began = Instant::now();
            }
            if self.settings.output.eval.is_due(step + 1, self.steps) && self.evaluation.is_some() {
                let last = self.engine.finish()?;
                let closing = open.take();
                self.close(closing, last)?;
                self.evaluate()?;
                began = Instant::now();
            }
        }
        let last = self.engine.finish()?;
        self.close(open, last)?;
        if self.evaluated.is_none_or(|(step, _)| step != self.steps) {
            self.evaluate()?;
        }
        let saved = self.saver.settle(&mut self.engine)?;
        self.note(&saved)?;
        Ok(None)
    }

    /// Says and logs what came of saving.
    fn note(&mut self, saved: &Saved) -> Result<()> {
        if let Some(log) = &mut self.log {
            saved.records.iter().try_for_each(|record| log.save(record))?;
        }
        if self.speaks {
            saved.notices.iter().for_each(|line| self.progress.say(line));
        }
        Ok(())
    }

    fn live(&mut self, tier: Tier) -> u64 {
        self.engine.manager().ledger().total(tier)
    }

    /// The signal that this rank has had.
    fn signalled(&self) -> Option<i32> {
        let signal = self.signal.load(Ordering::Relaxed) as i32;
        (signal != 0).then_some(signal)
    }

    /// What all ranks must know alike before a step in which `counted` tokens of this one count.
    fn agree(&mut self, counted: u64) -> Result<Agreed> {
        let own = Agreed { tokens: counted, signal: self.signalled(), saved: self.saver.is_ready() };
        if self.world.world == 1 {
            return Ok(own);
        }
        let mut message = counted.to_le_bytes().to_vec();
        // Signals are numbered below 65.
        message.extend([own.signal.unwrap_or(0) as u8, u8::from(own.saved)]);
        let answers = self.engine.manager().backend().exchange(&message)?;
        let mut all = Agreed { tokens: 0, signal: None, saved: true };
        for (rank, answer) in answers.iter().enumerate() {
            let Some((count, [signal, saved])) = answer.split_first_chunk::<8>() else {
                return Err(Error::Failed(format!("rank {rank} runs another version of castor")));
            };
            all.tokens += u64::from_le_bytes(*count);
            all.signal = all.signal.or((*signal != 0).then_some(i32::from(*signal)));
            all.saved &= *saved != 0;
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
                self.progress.say(&not_finite(record.step, &result, self.settings.optimizer.clip));
            }
        }
        if let Some(log) = &mut self.log {
            log.step(&record)?;
        }
        self.progress.step(&record);
        Ok(())
    }

    /// Evaluates after the steps made so far, says and logs it.
    fn evaluate(&mut self) -> Result<()> {
        let Some(evaluation) = &self.evaluation else { return Ok(()) };
        let found = evaluation.run(&mut self.engine, self.world, self.settings)?;
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

    /// What is said and written after the last step.
    fn conclude(&mut self, seconds: f64) -> Result<()> {
        self.progress.finish();
        if !self.speaks {
            return Ok(());
        }
        let steps = self.records;
        let non_embedding = self.config.parameters() - self.config.vocab_size * self.config.hidden_size;
        let trained = TrainMetrics {
            epoch: (self.begun + steps) as f64 / self.sampler.steps_per_epoch() as f64,
            total_flos: 6.0 * self.tokens as f64 * non_embedding as f64,
            train_loss: (self.losses.count > 0).then(|| self.losses.sum / self.losses.count as f64),
            train_runtime: seconds,
            train_samples: self.samples,
            train_steps: steps,
            train_tokens: self.tokens,
        };
        let directory = &self.settings.output.dir;
        let step_seconds = self.progress.rate().seconds_per_step().unwrap_or(seconds / steps.max(1) as f64);
        let memory = account::memory(self.engine.manager(), self.world, steps, step_seconds);
        memory.write(directory)?;
        let mut results = trained.values();
        results.extend(self.inexact().map(|why| ("inexact".into(), json!(why))));
        log::write_results(directory, "train", &results)?;
        if let Some((_, found)) = self.evaluated {
            let values = BTreeMap::from([
                ("eval_loss".into(), json!(found.loss)),
                ("perplexity".into(), json!(found.loss.exp())),
                ("eval_tokens".into(), json!(found.tokens)),
            ]);
            log::write_results(directory, "eval", &values)?;
        }
        if let Some(log) = self.log.take() {
            log.end(json!(results))?;
        }
        let log = RunLog::read(directory)?;
        let title = directory.file_name().map_or("run".into(), |name| name.to_string_lossy().into_owned());
        report::write_whole(&directory.join(PAGE), html::page(&title, log.as_ref(), Some(&memory)).as_bytes())?;
        print!("{}", trained.block());
        if self.skipped > 0 {
            println!("{} of {steps} updates were skipped: the gradient norm was not finite", self.skipped);
        }
        println!("{}", metrics::max_cuda_usage(self.engine.manager().ledger().total(Tier::Device)));
        print!("{}", report::summary(log.as_ref(), Some(&memory)));
        println!("The report: {}", directory.join(PAGE).display());
        Ok(())
    }
}

/// What is said of the first step without an update.
fn not_finite(step: u64, result: &StepResult, clip: Clip) -> String {
    let scale = match result.loss_scale {
        1.0 => String::new(),
        scale => format!(" at the loss scale {scale:e}"),
    };
    let kept = match clip {
        Clip::Exact => "the update is skipped and the weights stay as they are",
        Clip::Lagged => "groups of such gradients are not updated",
    };
    format!(
        "step {step}: loss {:.4}, gradient norm {:.4}{scale}: the norm is not finite, so {kept}; such steps are counted \
         from here on, and a run that makes only such ends with an error",
        result.loss, result.grad_norm
    )
}
