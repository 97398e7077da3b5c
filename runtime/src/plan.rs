//! Plans: homes and sizes decided before anything is allocated, with what a rehearsal on the dry backend
//! says they will cost.

use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::ledger::{Category, Ledger};
use crate::mem_stats::TickStats;
use crate::policy::{Placement, PlacementPolicy, PolicyView};
use crate::schedule::{Pass, Schedule};
use crate::tensor_mgr::StatefulTensorMgr;
use crate::timeline::{Pace, StepTime};
use crate::transfer::Traffic;
use castor_kernels::{Backend, Tier};
use std::path::PathBuf;
use std::sync::Arc;

/// Bytes to which places in a window are rounded.
pub const GRANULE: u64 = 256;
/// Bytes to which places in files and staging are rounded: what direct I/O asks.
pub const FILE_GRANULE: u64 = 4096;

/// `bytes` as a place in `tier` takes them.
pub const fn placed_bytes(tier: Tier, bytes: u64) -> u64 {
    let granule = match tier {
        Tier::Device => GRANULE,
        Tier::Host | Tier::Nvme => FILE_GRANULE,
    };
    bytes.div_ceil(granule) * granule
}

/// What may be used of each tier, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Budgets {
    /// Device memory of this rank, the driver's share included.
    pub device: u64,
    /// Pinned host memory of this rank.
    pub host: u64,
    /// Disk space of this rank, and the folder it is in.
    pub nvme: u64,
    /// Where the files go.
    pub nvme_folder: Option<PathBuf>,
}

impl Budgets {
    /// Bytes of a tier.
    pub const fn of(&self, tier: Tier) -> u64 {
        match tier {
            Tier::Device => self.device,
            Tier::Host => self.host,
            Tier::Nvme => self.nvme,
        }
    }
}

/// Memory that the trainer wants beside model data, reserved for the whole run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fixed {
    /// On the device.
    pub device: Vec<(Category, u64)>,
    /// On the host.
    pub host: Vec<(Category, u64)>,
    /// Plain host memory beside the arena that holds a checkpoint while it is written.
    pub snapshot: u64,
}

/// What a rehearsal found.
#[derive(Clone, Debug, Default)]
pub struct Prediction {
    /// Reserved bytes of each tier by category.
    pub ledger: Ledger,
    /// Most bytes of the window in use at once.
    pub window_peak: u64,
    /// Bytes per link of the training steps from the first on; from step `cycle` on the steps repeat.
    pub train: Vec<Traffic>,
    /// First step of the part of `train` that repeats for ever.
    pub cycle: usize,
    /// Bytes per link of one pass of the other kinds, between two training steps.
    pub traffic: [Traffic; Pass::ALL.len()],
    /// Times of those training steps at the pace that was planned with.
    pub times: Vec<StepTime>,
    /// Live bytes at each tick of each pass.
    pub ticks: [Vec<TickStats>; Pass::ALL.len()],
}

impl Prediction {
    /// Bytes per link of training step number `step` (from 0) of an uninterrupted run.
    pub fn step(&self, step: u64) -> Traffic {
        let (step, period) = (step as usize, self.train.len() - self.cycle);
        if step < self.train.len() { self.train[step] } else { self.train[self.cycle + (step - self.cycle) % period] }
    }

    /// Times of a steady training step, averaged over the steps that repeat; without the first, into an empty window,
    /// where others follow it.
    pub fn steady_time(&self) -> StepTime {
        let first = self.cycle.max(usize::from(self.times.len() > 1));
        StepTime::mean(&self.times[first.min(self.times.len())..])
    }

    /// Bytes per link of a steady training step, averaged over the steps that repeat.
    pub fn steady(&self) -> Traffic {
        let steps = &self.train[self.cycle..];
        let mean = |link: fn(&Traffic) -> u64| steps.iter().map(link).sum::<u64>() / (steps.len() as u64).max(1);
        Traffic {
            host_to_device: mean(|t| t.host_to_device),
            device_to_host: mean(|t| t.device_to_host),
            nvme_read: mean(|t| t.nvme_read),
            nvme_write: mean(|t| t.nvme_write),
            gathered: mean(|t| t.gathered),
            reduced: mean(|t| t.reduced),
            updated: mean(|t| t.updated),
        }
    }
}

/// Steps after which a rehearsal stops looking for the point from which steps repeat, and the window is emptied.
const LONGEST_REHEARSAL: usize = 32;

/// Fewer of them where a step is long: beside so many ticks an empty window is soon filled, and rehearsing takes time.
const REHEARSED_TICKS: usize = 50_000;

/// Steps that are enough to compare plans: the second begins with a window as a step leaves it.
const COMPARED: usize = 3;

/// How long to rehearse.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rehearse {
    /// Until the time of a steady step is known about: to compare plans, not to run one.
    ToCompare,
    /// Until every step of a run is known.
    ToRun,
}

/// A plan.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Name of the policy that made it.
    pub policy: &'static str,
    /// Homes and sizes.
    pub placement: Placement,
    /// The trainer's fixed memory.
    pub fixed: Fixed,
    /// What it was made for.
    pub budgets: Budgets,
    /// The recorded uses of each pass.
    pub schedules: [Schedule; Pass::ALL.len()],
    /// Training steps after which the window is emptied, where steps would not repeat soon of themselves.
    pub fresh_every: Option<u64>,
    /// What it will cost.
    pub predicted: Prediction,
}

/// A rehearsal: runs one pass of the given kind on the given manager.
pub type Rehearsal<'a> = &'a dyn Fn(&mut StatefulTensorMgr, Pass) -> Result<()>;

impl Plan {
    /// Plans for `layout` under `budgets`, for a run that has these `passes` on hardware of this `pace`. `dry` makes a
    /// fresh counting backend; `driver_bytes` is what the real device's driver holds beside the arena. `length` says
    /// what the plan is for.
    ///
    /// # Errors
    /// [`Error::OutOfRoom`] with the shortage and the largest users if no placement of the policy fits.
    pub fn make(
        layout: &Layout,
        fixed: Fixed,
        policy: &dyn PlacementPolicy,
        budgets: Budgets,
        lookahead_bytes: Option<u64>,
        pace: Pace,
        driver_bytes: u64,
        dry: &dyn Fn() -> Arc<dyn Backend>,
        passes: &[Pass],
        rehearse: Rehearsal<'_>,
        length: Rehearse,
    ) -> Result<Plan> {
        let workspace = dry().workspace_bytes();
        let (mut room, mut all_taken) = ([0; 3], <[Vec<(String, u64)>; 3]>::default());
        for (tier, wanted) in [(Tier::Device, &fixed.device), (Tier::Host, &fixed.host)] {
            // As the manager will reserve them (L2).
            let reserved = |category: Category, bytes| (category.name().to_string(), placed_bytes(tier, bytes));
            let mut taken: Vec<(String, u64)> =
                wanted.iter().map(|(category, bytes)| reserved(*category, *bytes)).collect();
            if tier == Tier::Device {
                taken.push(reserved(Category::Workspace, workspace));
                taken.push((Category::Driver.name().into(), driver_bytes));
            } else if fixed.snapshot > 0 {
                let (name, bytes) = reserved(Category::Snapshot, fixed.snapshot);
                match taken.iter_mut().find(|(user, _)| *user == name) {
                    Some((_, stages)) => *stages += bytes,
                    None => taken.push((name, bytes)),
                }
            }
            all_taken[tier.index()] = taken;
        }
        for tier in Tier::ALL {
            let taken: u64 = all_taken[tier.index()].iter().map(|(_, bytes)| bytes).sum();
            let budget = budgets.of(tier);
            if taken > budget {
                let mut largest_users = std::mem::take(&mut all_taken[tier.index()]);
                largest_users.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
                let what = "before any model data".into();
                return Err(Error::OutOfRoom { tier, what, budget, short_by: taken - budget, largest_users });
            }
            room[tier.index()] = budget - taken;
        }
        // Not before it is known that anything is left for what is rehearsed.
        let schedules = Self::record(layout, &fixed, dry, passes, rehearse)?;
        let mut view = PolicyView {
            layout,
            schedule: &schedules[Pass::Train.index()],
            room,
            taken: all_taken,
            lookahead_bytes,
            window_shortage: 0,
        };
        // A window can be too small although its sum suffices (holes between copies of different sizes): the
        // rehearsal finds out, and the policy is asked again with what was missing.
        let longest = match length {
            Rehearse::ToCompare => COMPARED,
            Rehearse::ToRun => {
                let ticks = schedules[Pass::Train.index()].len();
                (REHEARSED_TICKS / ticks.max(1)).clamp(COMPARED, LONGEST_REHEARSAL)
            }
        };
        let mut refused = None;
        // One step from an empty window is all that must fit: what does so is kept, in case nothing better is found.
        let mut least: Option<Plan> = None;
        for _ in 0..8 {
            let placement = match policy.place(&view) {
                Ok(placement) => placement,
                Err(error) => {
                    refused = Some(error);
                    break;
                }
            };
            let mut plan = Plan {
                policy: policy.name(),
                placement,
                fixed: fixed.clone(),
                budgets: budgets.clone(),
                schedules: schedules.clone(),
                fresh_every: None,
                predicted: Prediction::default(),
            };
            let mut most = longest;
            let short_by = loop {
                let mut manager = StatefulTensorMgr::rehearsing(dry(), layout.clone(), plan.clone(), pace)?;
                manager.reserve_driver(driver_bytes);
                let mut steps = 0;
                match Self::predict(&mut manager, passes, rehearse, most, &mut steps) {
                    Ok((predicted, fresh_every)) => {
                        (plan.predicted, plan.fresh_every) = (predicted, fresh_every);
                        if most > 1 {
                            return Ok(plan);
                        }
                        least = Some(plan.clone());
                        break 0;
                    }
                    // So many went well from an empty window: it is emptied after as many.
                    Err(Error::OutOfRoom { tier: Tier::Device, .. })
                        if steps > 1 || (steps == 1 && least.is_none()) =>
                    {
                        most = steps;
                    }
                    Err(Error::OutOfRoom { tier: Tier::Device, short_by, .. }) => break short_by,
                    Err(other) => return Err(other),
                }
            };
            // A window full of holes may be short by next to nothing, and next to nothing would not help.
            let more = short_by.max(plan.placement.window_bytes / 16);
            view.window_shortage += more.div_ceil(GRANULE) * GRANULE;
        }
        match (least, refused) {
            (Some(plan), _) => Ok(plan),
            (None, Some(error)) => Err(error),
            (None, None) => Err(Error::OutOfRoom {
                tier: Tier::Device,
                what: "the window stays fragmented".into(),
                budget: budgets.device,
                short_by: view.window_shortage,
                largest_users: vec![("window".into(), policy.place(&view)?.window_bytes)],
            }),
        }
    }

    /// Records the schedules with everything on an unlimited device.
    fn record(
        layout: &Layout,
        fixed: &Fixed,
        dry: &dyn Fn() -> Arc<dyn Backend>,
        passes: &[Pass],
        rehearse: Rehearsal<'_>,
    ) -> Result<[Schedule; Pass::ALL.len()]> {
        let mut homes = vec![None; layout.groups.len() * crate::units::Role::ALL.len()];
        for chunk in layout.chunk_ids() {
            homes[chunk.index()] = Some(Tier::Device);
        }
        let unlimited = layout.group_ids().map(|g| layout.full_bytes(g.chunk(crate::units::Role::Parameter)) * 8).sum();
        let plan = Plan {
            policy: "recording",
            placement: Placement { homes, window_bytes: unlimited, staging_bytes: 0, lookahead_bytes: 0 },
            fixed: fixed.clone(),
            budgets: Budgets::default(),
            schedules: Default::default(),
            fresh_every: None,
            predicted: Prediction::default(),
        };
        let mut manager = StatefulTensorMgr::new(dry(), layout.clone(), plan)?;
        for &pass in passes {
            rehearse(&mut manager, pass)?;
        }
        Ok(manager.recorded())
    }

    /// Rehearses at most `longest` training steps, of which `steps` counts those that went well, until the manager is
    /// in a state in which it was before (from there on the steps repeat), then one pass of each other kind. Also
    /// [`Plan::fresh_every`].
    fn predict(
        manager: &mut StatefulTensorMgr,
        passes: &[Pass],
        rehearse: Rehearsal<'_>,
        longest: usize,
        steps: &mut usize,
    ) -> Result<(Prediction, Option<u64>)> {
        let (mut train, mut times, mut seen) = (Vec::new(), Vec::new(), Vec::new());
        let (cycle, fresh_every) = loop {
            let signature = manager.signature();
            if let Some(step) = seen.iter().position(|earlier| *earlier == signature) {
                break (step, None);
            }
            if train.len() == longest {
                break (0, Some(longest as u64));
            }
            seen.push(signature);
            rehearse(manager, Pass::Train)?;
            train.push(manager.last_traffic(Pass::Train));
            times.extend(manager.last_time());
            *steps = train.len();
        };
        *steps = 0;
        for &pass in passes.iter().filter(|pass| **pass != Pass::Train) {
            rehearse(manager, pass)?;
        }
        Ok((Prediction { train, times, cycle, ..manager.observed() }, fresh_every))
    }

    /// Bytes of a tier that the plan will take: its peak, for everything is reserved at the start.
    pub fn peak(&self, tier: Tier) -> u64 {
        self.predicted.ledger.total(tier)
    }
}
