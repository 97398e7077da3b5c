//! `castor train`: the loop over steps, and what it says and writes.
//!
//! A *session* is what one process makes of a run. It goes by one plan or, where that changes on the way, by several in
//! turn: a [`Leg`] is the part by one plan, with the hardware that is opened for it. Owns what outlives a leg ([`Run`])
//! and the way from leg to leg; the steps of one are in `steps`, changes of the plan in `change`, words and files in
//! `words`.

mod change;
mod steps;
mod words;

use crate::blueprint::{Blueprint, Options};
use crate::checkpoint::{self, Facts, Saver};
use crate::config::ModelConfig;
use crate::data::{self, PackedRows, Sampler, held_out};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::estimate::Estimate;
use crate::evaluation::{self, Evaluation, Found};
use crate::launcher;
use crate::rendezvous::World;
use crate::replan::Stopwatch;
use crate::report::log::RunLog;
use crate::report::metrics;
use crate::report::progress::Progress;
use crate::session::{self, Hardware};
use crate::settings::{Every, Settings};
use crate::source::Rows;
use crate::{agreement, auto};
use castor_kernels::Tier;
use change::Change;
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
    let opened = Instant::now();
    let hardware = Hardware::open(settings, &world)?;
    let opened_s = opened.elapsed().as_secs_f64();
    notices.extend(hardware.notices.iter().cloned());
    let micros = settings
        .gradient_accumulation_steps
        .min(sampler.rows_in(0).div_ceil(u64::from(world.world) * settings.batch_size));
    let mut options =
        session::options(settings, config.clone(), settings.max_length as u64, settings.batch_size, micros, steps);
    options.evaluates = evaluation.is_some();
    options.shards = session::shards(settings, world.world, world.local_world)?;
    let planned = Instant::now();
    let (blueprint, plan, estimate, said) = auto::plan_saving(settings, options.clone(), &hardware, world.world)?;
    let planning_s = planned.elapsed().as_secs_f64();
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
    let cadence = (steps, &output.save, output.async_save, &output.eval, output.save_model, settings.memory.replan);
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
    let saver = Saver::new(&settings.output, facts.clone(), begun, &mut engine)?;
    let signal = Arc::new(AtomicUsize::new(0));
    for kind in launcher::ending_signals() {
        signal_hook::flag::register_usize(kind, Arc::clone(&signal), kind as usize)
            .map_err(|error| Error::Failed(format!("signal {kind} cannot be watched: {error}")))?;
    }
    let begun = begun.unwrap_or(0);
    let opened_s = opened_s + reserved_s;
    let mut leg = Leg::of(hardware, blueprint, engine, saver, estimate, Opening { opened_s, planning_s });
    let mut run = Run {
        settings,
        world: &world,
        config: &config,
        options,
        facts,
        rows: &rows,
        examples: training.end,
        evaluation,
        evaluated: None,
        sampler,
        steps,
        begun,
        signal,
        speaks,
        progress: Progress::quiet(steps),
        log: None,
        losses: Mean::default(),
        records: 0,
        skipped: 0,
        tokens: 0,
        samples: 0,
        measured: !settings.memory.replan,
        changes: 0,
        device_peak: 0,
        save_s: None,
        deaf: false,
    };
    if speaks {
        run.introduce(&mut leg, &notices)?;
    }
    let began = Instant::now();
    let (leg, interrupted) = run.legs(leg)?;
    let seconds = began.elapsed().as_secs_f64();
    run.end(leg, interrupted, seconds)
}

/// What a session has, whatever its plan.
struct Run<'a> {
    settings: &'a Settings,
    world: &'a World,
    config: &'a ModelConfig,
    /// What is computed with, all but what the planner decides.
    options: Options,
    facts: Facts,
    rows: &'a PackedRows,
    /// Rows that are trained on.
    examples: u64,
    evaluation: Option<Evaluation<'a>>,
    /// After which step the last evaluation was, and what it found.
    evaluated: Option<(u64, Found)>,
    sampler: Sampler,
    steps: u64,
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
    /// Whether its steps were measured, or shall not be.
    measured: bool,
    /// How often the plan changed.
    changes: u64,
    /// Most device bytes of any leg.
    device_peak: u64,
    /// Seconds that the last save took.
    save_s: Option<f64>,
    /// Whether requests cannot be taken away, and so are not looked at.
    deaf: bool,
}

/// A sum and of how many.
#[derive(Default)]
struct Mean {
    sum: f64,
    count: u64,
}

/// Seconds that the beginning of a leg took.
#[derive(Clone, Copy)]
struct Opening {
    /// To open the hardware and take the memory.
    opened_s: f64,
    /// To plan.
    planning_s: f64,
}

/// The part of a session that goes by one plan.
struct Leg {
    hardware: Hardware,
    blueprint: Blueprint,
    engine: Engine,
    saver: Saver,
    /// Of a step, by the rates that it was planned with.
    estimate: Estimate,
    opening: Opening,
    /// Steps before it, of all sessions.
    begun: u64,
    /// Steps made.
    made: u64,
    /// Those of them since the window was last empty.
    warm: u64,
    stopwatch: Stopwatch,
}

impl Leg {
    /// A leg whose engine has made no step.
    fn of(
        hardware: Hardware,
        blueprint: Blueprint,
        engine: Engine,
        saver: Saver,
        estimate: Estimate,
        opening: Opening,
    ) -> Leg {
        let begun = engine.progress().step;
        let stopwatch = Stopwatch::default();
        Leg { hardware, blueprint, engine, saver, estimate, opening, begun, made: 0, warm: 0, stopwatch }
    }

    fn live(&mut self, tier: Tier) -> u64 {
        self.engine.manager().ledger().total(tier)
    }

    /// A step was begun.
    fn stepped(&mut self) {
        self.made += 1;
        self.warm = self.engine.manager().warm_passes();
        self.stopwatch.stepped();
    }
}

/// How a leg ends.
enum Ended {
    /// With the last step.
    AtTheEnd,
    /// By the signal that asked for it.
    By(i32),
    /// For another plan.
    For(Box<Change>),
}

impl Run<'_> {
    /// All steps, or those until a signal ended them early: that signal. Also the last leg.
    fn legs(&mut self, mut leg: Leg) -> Result<(Leg, Option<i32>)> {
        loop {
            self.device_peak = self.device_peak.max(leg.live(Tier::Device));
            let ended = match self.leg(&mut leg) {
                Ok(ended) => ended,
                // A failure in the middle of the step leaves the figures of what was reached (known faults E).
                Err(error) => {
                    let said = leg.saver.rescue(&mut leg.engine);
                    self.lament(&said);
                    return Err(error);
                }
            };
            leg = match ended {
                Ended::AtTheEnd => return Ok((leg, None)),
                Ended::By(signal) => return Ok((leg, Some(signal))),
                Ended::For(change) => self.change_over(leg, *change).inspect_err(|_| self.lament(&[]))?,
            };
        }
    }

    /// What is said of a session that failed, after what came of its save in flight.
    fn lament(&self, said: &[String]) {
        if self.speaks {
            said.iter().for_each(|line| eprintln!("castor: {line}"));
            eprintln!(
                "castor: the run ended after step {}; {}",
                self.begun + self.records,
                metrics::max_cuda_usage(self.device_peak)
            );
            eprintln!("castor: {}", checkpoint::way_back(&self.settings.output.dir));
        }
    }

    /// What comes after the last leg.
    fn end(&mut self, mut leg: Leg, interrupted: Option<i32>, seconds: f64) -> Result<()> {
        self.conclude(&mut leg, seconds)?;
        let doubtful = leg.engine.progress().loss_scale.doubtful();
        if doubtful > 0 && interrupted.is_none() {
            return Err(Error::Failed(format!(
                "loss or gradient norm of {} was not finite, so that neither a checkpoint nor the model is written after \
                 it; lower --lr, or check the data and the weights for NaN; {}",
                if doubtful == 1 { "the last step".into() } else { format!("the last {doubtful} steps") },
                checkpoint::way_back(&self.settings.output.dir)
            )));
        }
        if interrupted.is_none() && self.settings.output.save_model {
            let folder = leg.saver.save_model(&self.settings.tokenizer, &mut leg.engine)?;
            if self.speaks {
                println!("The model: {}", folder.display());
            }
        }
        // One that comes after the last step asks for what is happening anyway, and is heard by this rank alone.
        match interrupted.or(self.signalled()) {
            None => Ok(()),
            Some(signal) => Err(Error::Interrupted(signal)),
        }
    }

    /// The signal that this rank has had.
    fn signalled(&self) -> Option<i32> {
        let signal = self.signal.load(Ordering::Relaxed) as i32;
        (signal != 0).then_some(signal)
    }

    /// Steps between log lines.
    fn logging_steps(&self) -> u64 {
        match self.settings.output.logging {
            Every::Steps(steps) => steps,
            Every::Fraction(part) => ((self.steps as f64 * part).ceil() as u64).max(1),
            Every::Never | Every::Epoch => self.steps,
        }
    }
}
