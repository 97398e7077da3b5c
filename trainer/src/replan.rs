//! A second plan while a run goes on: what the first steps measured, whether another plan is worth its change, and the
//! budgets that somebody asks for ([`request`]).
//!
//! It plans and compares; the run itself changes over ([`crate::train`]). All ranks decide here from the same numbers,
//! rank 0's, and come to the same (L7).

pub mod request;

use crate::blueprint::{Blueprint, Options};
use crate::error::Result;
use crate::estimate::Estimate;
use crate::plugin::Placement as Preference;
use crate::rates::Rates;
use crate::session::Hardware;
use crate::settings::{Recompute, Settings};
use castor_kernels::Stream;
use castor_runtime::StatefulTensorMgr;
use castor_runtime::clock::Times;
use castor_runtime::plan::{Plan, Rehearse};
use castor_runtime::policy::{Placement, PlacementPolicy, PolicyView};
use castor_runtime::timeline::StepTime;
use castor_runtime::transfer::Traffic;
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// Steps that are left out: the first fills caches and an empty window.
const LEFT_OUT: u64 = 1;
/// Steps that are measured.
const MEASURED: u64 = 3;
/// A link that was busy for less than this part of the time says nothing of its rate.
const BUSY: f64 = 0.05;
/// The least part of a step that another plan must save.
const WORTH: f64 = 0.03;

/// What steps of a run took.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Seconds of a step.
    pub step_s: f64,
    /// Of those, for which arithmetic waited for moves.
    pub waited_s: f64,
    /// Bytes per busy second from host to device, where it was busy enough to say; likewise the others.
    pub host_to_device: Option<f64>,
    /// From device to host.
    pub device_to_host: Option<f64>,
    /// In collectives.
    pub collectives: Option<f64>,
    /// From disk to host.
    pub nvme_read: Option<f64>,
    /// From host to disk.
    pub nvme_write: Option<f64>,
    /// Of host memory, by its cores' updates.
    pub host_updates: Option<f64>,
}

/// The clocks at a border between two steps.
struct Reading {
    at: Instant,
    times: Times,
    traffic: Traffic,
}

/// What the measured steps took; none if the clocks lost some of it.
pub type Looked = Option<Measured>;

/// Reads the clocks around a few steps that nothing interrupts.
#[derive(Default)]
pub struct Stopwatch {
    steps: u64,
    from: Option<Reading>,
}

impl Stopwatch {
    /// Something came between two steps: a save, an evaluation.
    pub fn interrupted(&mut self) {
        *self = Stopwatch::default();
    }

    /// Another step was begun.
    pub const fn stepped(&mut self) {
        self.steps += 1;
    }

    /// Looks between two steps, each time. Waits for all that was issued where the measured steps begin and where they
    /// end; then returns what they took, or that the clocks lost some of it.
    ///
    /// # Errors
    /// If work of a step failed.
    pub fn look(&mut self, manager: &mut StatefulTensorMgr) -> Result<Option<Looked>> {
        if self.steps == LEFT_OUT {
            self.from = Some(Reading::now(manager)?);
        }
        let Some(from) = self.from.take_if(|_| self.steps == LEFT_OUT + MEASURED) else { return Ok(None) };
        Ok(Some(from.until(&Reading::now(manager)?)))
    }
}

impl Reading {
    fn now(manager: &mut StatefulTensorMgr) -> Result<Reading> {
        manager.settle()?;
        Ok(Reading { at: Instant::now(), times: manager.times(), traffic: manager.traffic() })
    }

    fn until(&self, later: &Reading) -> Option<Measured> {
        if later.times.lost > self.times.lost {
            return None;
        }
        let seconds = later.at.duration_since(self.at).as_secs_f64();
        let moved = later.traffic.since(&self.traffic);
        let rate = |stream: Stream, bytes: u64| {
            let [from, to] = [self, later].map(|reading| reading.times.busy_ns[stream.index()].unwrap_or(0));
            let busy_s = (to - from) as f64 * 1e-9;
            (bytes > 0 && busy_s > BUSY * seconds).then(|| bytes as f64 / busy_s)
        };
        let steps = MEASURED as f64;
        Some(Measured {
            step_s: seconds / steps,
            waited_s: (later.times.stall_ns - self.times.stall_ns) as f64 * 1e-9 / steps,
            host_to_device: rate(Stream::HostToDevice, moved.host_to_device),
            device_to_host: rate(Stream::DeviceToHost, moved.device_to_host),
            collectives: rate(Stream::Collective, moved.gathered + moved.reduced),
            nvme_read: rate(Stream::NvmeRead, moved.nvme_read),
            nvme_write: rate(Stream::NvmeWrite, moved.nvme_write),
            host_updates: rate(Stream::Host, moved.updated),
        })
    }
}

impl Measured {
    /// `rates`, by which a step was to take the times `planned` and move `bytes`, put right by what was measured: links
    /// that were busy enough by their own bytes, and all arithmetic alike by its seconds.
    pub fn rates(&self, planned: &StepTime, bytes: &Traffic, rates: &Rates) -> Rates {
        let (computed, expected) = (self.step_s - self.waited_s, planned.step_s - planned.waited_s.iter().sum::<f64>());
        let slower = if computed > 0.0 && expected > 0.0 { computed / expected } else { 1.0 };
        // Beside updates by the host's cores copies are slower, planned as well as measured.
        let beside = planned.busy_s[Stream::Host.index()] > 0.0;
        let faster = |measured: Option<f64>, rate: f64, stream: Stream, bytes: u64| {
            let busy_s = planned.busy_s[stream.index()];
            let expected = if beside && busy_s > 0.0 { bytes as f64 / busy_s } else { rate };
            measured.map_or(1.0, |measured| measured / expected)
        };
        let up = faster(self.host_to_device, rates.host_to_device, Stream::HostToDevice, bytes.host_to_device);
        let down = faster(self.device_to_host, rates.device_to_host, Stream::DeviceToHost, bytes.device_to_host);
        Rates {
            products: rates.products / slower,
            attention: rates.attention / slower,
            device_memory: rates.device_memory / slower,
            host_to_device: rates.host_to_device * up,
            device_to_host: rates.device_to_host * down,
            host_to_device_beside_updates: rates.host_to_device_beside_updates * up,
            device_to_host_beside_updates: rates.device_to_host_beside_updates * down,
            host_updates: rates.host_updates.map(|updates| updates.map(|rate| self.host_updates.unwrap_or(rate))),
            collectives: self.collectives.unwrap_or(rates.collectives),
            nvme_read: self.nvme_read.unwrap_or(rates.nvme_read),
            nvme_write: self.nvme_write.unwrap_or(rates.nvme_write),
            ..*rates
        }
    }
}

/// What a change of the plan is weighed by.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stakes {
    /// Steps to come.
    pub steps: u64,
    /// Seconds that the change takes: saving, opening the hardware, loading.
    pub change_s: f64,
    /// Seconds of a step as measured.
    pub measured_s: f64,
}

impl Stakes {
    /// Whether steps of `after_s` seconds are worth a change from those of `before_s`, both as planned by what was
    /// measured. What the planner is off by in `before_s` it may be off by in the difference too.
    pub fn are_worth(&self, before_s: f64, after_s: f64) -> bool {
        let saved = before_s - after_s;
        saved >= WORTH * before_s
            && saved > (before_s - self.measured_s).abs()
            && saved * self.steps as f64 > self.change_s
    }
}

/// Whether settings leave the planner anything to decide.
pub fn is_open(settings: &Settings, options: &Options) -> bool {
    let memory = &settings.memory;
    let placement = matches!(memory.plugin.placement, Preference::DeviceFirst | Preference::Auto);
    let updates = memory.plugin.spills() && memory.cpu_update.is_none();
    placement
        || updates
        || memory.recompute == Recompute::Auto
        || memory.prefetch.is_none()
        || options.micro_batches > 1
}

/// The plan that is there, as a policy.
struct AsItIs<'a>(&'a Plan);

impl PlacementPolicy for AsItIs<'_> {
    fn name(&self) -> &'static str {
        self.0.policy
    }

    fn place(&self, _: &PolicyView<'_>) -> castor_runtime::Result<Placement> {
        Ok(self.0.placement.clone())
    }
}

/// How long a step of a plan takes on `hardware`, at its rates.
///
/// # Errors
/// If it cannot be rehearsed again.
pub fn timed(blueprint: &Blueprint, plan: &Plan, hardware: &Hardware) -> Result<Estimate> {
    let (backend, rates) = (&*hardware.backend, &hardware.rates);
    let prefetch = Some(plan.placement.lookahead_bytes);
    let again = blueprint.plan(backend, rates, &AsItIs(plan), plan.budgets.clone(), prefetch, Rehearse::ToCompare)?;
    Ok(Estimate::of(&again))
}

/// Whether two plans are one and the same to a run.
pub fn are_same(a: (&Blueprint, &Plan), b: (&Blueprint, &Plan)) -> bool {
    let way = |(blueprint, plan): (&Blueprint, &Plan)| format!("{:?} {:?}", blueprint.options(), plan.placement);
    way(a) == way(b)
}

/// Whether a step that takes `before_s` could be made so much faster that looking for a better plan is worth its time
/// too, where no plan takes less than `floor_s` and planning takes `planning_s`.
pub fn is_worth_looking(stakes: &Stakes, before_s: f64, floor_s: f64, planning_s: f64) -> bool {
    let with_planning = Stakes { change_s: stakes.change_s + planning_s, measured_s: before_s, ..*stakes };
    with_planning.are_worth(before_s, floor_s)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rates::HostUpdates;

    const STAKES: Stakes = Stakes { steps: 100, change_s: 5.0, measured_s: 1.0 };

    #[test]
    fn a_change_must_save_more_than_it_takes_than_a_little_and_than_the_planner_is_off() {
        assert!(STAKES.are_worth(1.0, 0.9));
        assert!(!STAKES.are_worth(1.0, 0.98), "2 % of a step");
        assert!(!STAKES.are_worth(1.0, 1.1));
        assert!(!Stakes { steps: 49, ..STAKES }.are_worth(1.0, 0.9), "4.9 s for 5");
        assert!(!Stakes { measured_s: 1.2, ..STAKES }.are_worth(1.0, 0.9), "off by 0.2 s, for 0.1");
        assert!(is_worth_looking(&STAKES, 1.0, 0.5, 44.0) && !is_worth_looking(&STAKES, 1.0, 0.5, 46.0));
    }

    #[test]
    fn rates_are_put_right_by_what_was_measured() {
        let assumed = Rates::assumed("cuda");
        let measured = Measured {
            step_s: 5.0,
            waited_s: 1.0,
            host_to_device: Some(2.0 * assumed.host_to_device),
            device_to_host: None,
            collectives: None,
            nvme_read: None,
            nvme_write: Some(3.0),
            host_updates: Some(9.0),
        };
        let mut planned = StepTime { step_s: 3.0, ..StepTime::default() };
        planned.waited_s[Stream::HostToDevice.index()] = 1.0;
        let expected = Rates {
            products: assumed.products / 2.0,
            attention: assumed.attention / 2.0,
            device_memory: assumed.device_memory / 2.0,
            host_to_device: 2.0 * assumed.host_to_device,
            host_to_device_beside_updates: 2.0 * assumed.host_to_device_beside_updates,
            host_updates: Some(HostUpdates { f32: 9.0, bf16: 9.0, q8: 9.0 }),
            nvme_write: 3.0,
            ..assumed
        };
        let bytes = Traffic { host_to_device: assumed.host_to_device as u64, ..Traffic::default() };
        assert_eq!(measured.rates(&planned, &bytes, &assumed), expected);
        // Half as fast as the link would be alone was expected beside the host's updates.
        planned.busy_s[Stream::Host.index()] = 1.0;
        planned.busy_s[Stream::HostToDevice.index()] = 2.0;
        let beside = measured.rates(&planned, &bytes, &assumed);
        assert_eq!(beside.host_to_device, 4.0 * assumed.host_to_device);
        let nothing = Measured { step_s: 0.0, host_to_device: None, nvme_write: None, host_updates: None, ..measured };
        assert_eq!(nothing.rates(&planned, &bytes, &assumed), assumed);
    }
}
