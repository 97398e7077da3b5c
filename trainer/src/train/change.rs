//! Changes of the plan: when another one is taken, and the way from leg to leg.
//!
//! The other plan is made while the run still goes by the present one; nothing is given up for one that does not fit.
//! Then the run does what an interrupted and resumed one does, within the process: it saves, drops engine and hardware,
//! opens both anew and goes on from the checkpoint, with the same bits.

use super::{Leg, Opening, Run, words};
use crate::blueprint::Blueprint;
use crate::checkpoint::{self, Saver};
use crate::error::{Error, Result};
use crate::estimate::Estimate;
use crate::rates::Rates;
use crate::replan::request::Request;
use crate::replan::{self, Looked, Measured, Stakes};
use crate::report::log::PlanRecord;
use crate::session::{self, Hardware};
use crate::{account, agreement, auto};
use castor_kernels::{Backend, Tier};
use castor_runtime::Pass;
use castor_runtime::plan::{Budgets, Plan};
use serde::{Serialize, de::DeserializeOwned};
use std::sync::Arc;
use std::time::Instant;

/// Bytes that a disk of which nothing is known reads or writes per second.
const DISK_BYTES_PER_S: f64 = 0.2e9;

/// The plan of the next leg.
pub(super) struct Change {
    /// When it was begun to be made.
    since: Instant,
    budgets: Budgets,
    rates: Rates,
    planned: Planned,
    record: PlanRecord,
}

/// A plan with all that belongs to it.
struct Planned {
    blueprint: Blueprint,
    plan: Plan,
    estimate: Estimate,
    notice: Option<String>,
    seconds: f64,
}

impl Run<'_> {
    /// Between two steps: the other plan that the run is to go by from here on, if there is one. Where a plan is looked
    /// for `clock` is put forward by the time that this takes.
    ///
    /// # Errors
    /// If a peer is gone, or work of a step failed.
    pub(super) fn other_plan(
        &mut self,
        leg: &mut Leg,
        asked: bool,
        clock: &mut Instant,
    ) -> Result<Option<Box<Change>>> {
        // There is no checkpoint to go on from before a step was made, and none is made of weights in doubt.
        if leg.made == 0 || leg.engine.progress().loss_scale.doubtful() > 0 {
            return Ok(None);
        }
        if asked {
            leg.stopwatch.interrupted();
        }
        let looked = if self.measured { None } else { self.look(leg)? };
        let since = Instant::now();
        let change = match looked {
            _ if asked => self.by_request(leg, since)?,
            Some(looked) => self.by_measured_rates(leg, looked, since)?,
            None => return Ok(None),
        };
        *clock += since.elapsed();
        Ok(change.map(Box::new))
    }

    /// What the first steps took, once they are made.
    fn look(&mut self, leg: &mut Leg) -> Result<Option<Looked>> {
        if leg.saver.is_saving() {
            leg.stopwatch.interrupted();
        }
        let looked = leg.stopwatch.look(leg.engine.manager())?;
        self.measured = looked.is_some();
        Ok(looked)
    }

    /// The plan by budgets that rank 0 was asked for.
    fn by_request(&mut self, leg: &mut Leg, since: Instant) -> Result<Option<Change>> {
        let backend = Arc::clone(&leg.hardware.backend);
        let Some(request) = told(&*backend, &self.take_request())? else { return Ok(None) };
        let stays = |reason: Error| format!("{request}: {reason}; the run goes on by the plan that it has");
        let (present, room) = (&leg.hardware.budgets, &leg.hardware.room);
        let budgets = match all(&*backend, request.budgets(present, room))? {
            Ok(budgets) => budgets,
            Err(reason) => {
                self.say(&stays(reason));
                return Ok(None);
            }
        };
        let hardware = planning(leg, leg.hardware.rates, budgets)?;
        let planned = match self.plan(&hardware) {
            Ok(planned) => planned,
            Err(reason @ Error::DoesNotFit(_)) => {
                self.say(&stays(reason));
                return Ok(None);
            }
            Err(other) => return Err(other),
        };
        let Hardware { budgets, rates, .. } = hardware;
        let present = leg.engine.manager().plan();
        let same = replan::are_same((&leg.blueprint, present), (&planned.blueprint, &planned.plan));
        let fits = Tier::ALL.into_iter().all(|tier| present.peak(tier) <= budgets.of(tier));
        let too_large = || Error::DoesNotFit("the present plan is too large".into());
        let fits = all(&*backend, fits.then_some(()).ok_or_else(too_large))?.is_ok();
        let (before_s, after_s) = (leg.estimate.time.step_s, planned.estimate.time.step_s);
        let stakes = told(&*backend, &self.stakes(leg, before_s))?;
        if same || fits && !stakes.are_worth(before_s, after_s) {
            self.progress.go_on(words::shown(&budgets));
            leg.hardware.budgets = budgets;
            self.say(&format!(
                "{request}: the plan fits and stays as it is; none is so much better that a change is worth it"
            ));
            return Ok(None);
        }
        if let Err(reason) = self.room_to_save(leg)? {
            self.say(&stays(reason));
            return Ok(None);
        }
        let record = PlanRecord { reason: request.to_string(), before_s, ..PlanRecord::default() };
        Ok(Some(Change { since, budgets, rates, planned, record }))
    }

    /// The plan by the rates that the first steps showed, if it is worth the change.
    fn by_measured_rates(&mut self, leg: &mut Leg, looked: Looked, since: Instant) -> Result<Option<Change>> {
        let backend = Arc::clone(&leg.hardware.backend);
        let own = looked.map(|measured| (measured, self.stakes(leg, measured.step_s), leg.opening.planning_s));
        let found: Option<(Measured, Stakes, f64)> = told(&*backend, &own)?;
        let Some((measured, stakes, planning_s)) = found.filter(|_| replan::is_open(self.settings, &self.options))
        else {
            return Ok(None);
        };
        let estimated_s = leg.estimate.time.step_s;
        let bytes = leg.engine.manager().plan().predicted.steady();
        let rates = measured.rates(&leg.estimate.time, &bytes, &leg.hardware.rates);
        let hardware = planning(leg, rates, leg.hardware.budgets.clone())?;
        let present = match replan::timed(&leg.blueprint, leg.engine.manager().plan(), &hardware) {
            Ok(present) => present,
            // A shorter rehearsal can find a window too full of holes that a longer one found good.
            Err(Error::DoesNotFit(_)) => return Ok(None),
            Err(other) => return Err(other),
        };
        (leg.hardware.rates, leg.estimate) = (hardware.rates, present);
        let before_s = present.time.step_s;
        let floor_s = auto::floor_s(self.settings, &self.options, &hardware, self.world.world);
        if !replan::is_worth_looking(&stakes, before_s, floor_s, planning_s) {
            return Ok(None);
        }
        let planned = match self.plan(&hardware) {
            Ok(planned) => planned,
            Err(Error::DoesNotFit(_)) => return Ok(None),
            Err(other) => return Err(other),
        };
        let (after_s, took_s) = (planned.estimate.time.step_s, planned.seconds);
        let found = format!(
            "the first steps took {:.3} s each, estimated were {estimated_s:.3} s; at the rates that they show the plan \
             takes {before_s:.3} s a step and the best other {after_s:.3} s (planned in {took_s:.1} s)",
            measured.step_s
        );
        let same = replan::are_same((&leg.blueprint, leg.engine.manager().plan()), (&planned.blueprint, &planned.plan));
        if same || !stakes.are_worth(before_s, after_s) || self.room_to_save(leg)?.is_err() {
            self.say(&format!("{found}: the plan stays as it is"));
            return Ok(None);
        }
        self.say(&format!("{found}: the run changes over, which is reckoned to take {:.1} s", stakes.change_s));
        let Hardware { budgets, rates, .. } = hardware;
        let measured_s = Some(measured.step_s);
        let record = PlanRecord { reason: "measured".into(), before_s, measured_s, ..PlanRecord::default() };
        Ok(Some(Change { since, budgets, rates, planned, record }))
    }

    /// Goes over to the plan of `change`, from the checkpoint that was just written.
    ///
    /// # Errors
    /// If the hardware cannot be opened again, or the checkpoint not be read; then it is still there.
    pub(super) fn change_over(&mut self, mut leg: Leg, change: Change) -> Result<Leg> {
        let Change { since, budgets, rates, planned, mut record } = change;
        let step = leg.engine.progress().step;
        let manager = leg.engine.manager();
        record.step = step;
        record.after_s = planned.estimate.time.step_s;
        record.planned_bytes = account::moved(&manager.plan().predicted.step(leg.warm.saturating_sub(1)));
        record.counted_bytes = account::moved(&manager.last_traffic(Pass::Train));
        let room = leg.hardware.room.clone();
        let held = Arc::downgrade(&leg.hardware.backend);
        drop(leg);
        assert_eq!(held.strong_count(), 0, "the hardware is given back before it is opened again");
        let opened = Instant::now();
        let hardware = Hardware::again(self.settings, self.world, budgets, room, rates)?;
        let Planned { blueprint, plan, estimate, notice, seconds } = planned;
        agreement::same(&*hardware.backend, &[("plans", format!("{:?}", plan.placement))])?;
        let mut engine = session::engine(Arc::clone(&hardware.backend), &blueprint, plan)?;
        let opening = Opening { opened_s: opened.elapsed().as_secs_f64(), planning_s: seconds };
        let output = &self.settings.output;
        Saver::go_on(output, step, &mut engine)?;
        let saver = Saver::new(output, self.facts.clone(), Some(step), &mut engine)?;
        record.took_s = since.elapsed().as_secs_f64();
        let tiers = Tier::ALL.into_iter().map(|tier| (tier.name().to_string(), hardware.budgets.of(tier)));
        record.budgets = tiers.filter(|(_, bytes)| *bytes > 0).collect();
        self.changes += 1;
        ::metrics::counter!("castor_plan_changes_total").increment(1);
        self.progress.go_on(words::shown(&hardware.budgets));
        self.say(&format!(
            "another plan from step {} on ({}): estimated {estimate}; the change took {:.1} s",
            step + 1,
            record.reason,
            record.took_s
        ));
        notice.iter().for_each(|line| self.say(line));
        self.say(account::placement(engine.manager()).trim_end());
        if let Some(log) = &mut self.log {
            log.plan(&record)?;
        }
        Ok(Leg::of(hardware, blueprint, engine, saver, estimate, opening))
    }

    /// The best plan by the budgets and rates of `hardware`.
    fn plan(&self, hardware: &Hardware) -> Result<Planned> {
        let began = Instant::now();
        let options = self.options.clone();
        let (blueprint, plan, estimate, notice) =
            auto::plan_saving(self.settings, options, hardware, self.world.world)?;
        Ok(Planned { blueprint, plan, estimate, notice, seconds: began.elapsed().as_secs_f64() })
    }

    /// What waits in the run's folder, on the rank that looks there.
    fn take_request(&mut self) -> Option<Request> {
        if !self.speaks {
            return None;
        }
        match Request::take(&self.settings.output.dir) {
            Ok(request) => request,
            Err(error) => {
                // What cannot be taken away would be there before every step.
                self.deaf = matches!(error, Error::Failed(_));
                self.say(&format!("{error}; the run goes on by the plan that it has"));
                None
            }
        }
    }

    /// Whether there is room for the checkpoint to go on from, as rank 0 sees it.
    fn room_to_save(&self, leg: &Leg) -> Result<Result<()>> {
        let own =
            if self.speaks { checkpoint::room(&self.settings.output.dir, leg.blueprint.layout()) } else { Ok(()) };
        all(&*leg.hardware.backend, own)
    }

    /// What a change is weighed by where a step was measured to take so long: a checkpoint is written and read, and
    /// hardware opened.
    fn stakes(&self, leg: &Leg, measured_s: f64) -> Stakes {
        let bytes = checkpoint::rank_bytes(leg.blueprint.layout()) as f64 * f64::from(self.world.local_world);
        let change_s = 2.0 * self.save_s.unwrap_or(bytes / DISK_BYTES_PER_S) + leg.opening.opened_s;
        Stakes { steps: self.steps - leg.engine.progress().step, change_s, measured_s }
    }
}

/// The hardware of `leg` for planning by other rates and budgets: rank 0's rates, and the poorest rank's budgets.
fn planning(leg: &Leg, rates: Rates, budgets: Budgets) -> Result<Hardware> {
    let Hardware { backend, room, .. } = &leg.hardware;
    let (rates, budgets) = agreement::common(&**backend, rates, budgets)?;
    Ok(Hardware { backend: Arc::clone(backend), budgets, room: room.clone(), rates, notices: Vec::new() })
}

/// What rank 0 has to say, on all ranks. All ranks must call it.
fn told<T: Serialize + DeserializeOwned>(backend: &dyn Backend, own: &T) -> Result<T> {
    let unreadable =
        |error: serde_json::Error| Error::Failed(format!("rank 0 runs another version of castor ({error})"));
    let words = backend.exchange(&serde_json::to_vec(own).map_err(unreadable)?)?;
    serde_json::from_slice(&words[0]).map_err(unreadable)
}

/// What this rank found, if no rank was refused; else the first refusal, on all ranks. All ranks must call it.
fn all<T>(backend: &dyn Backend, own: Result<T>) -> Result<Result<T>> {
    let (word, own) = match own {
        Ok(own) => (Ok(()), Some(own)),
        Err(error) => (Err(error), None),
    };
    match (checkpoint::agree(backend, word), own) {
        (Err(error @ Error::Kernels(_)), _) => Err(error),
        (Err(error), _) => Ok(Err(error)),
        (Ok(()), Some(own)) => Ok(Ok(own)),
        (Ok(()), None) => unreachable!("a refusal is an error on every rank"),
    }
}
