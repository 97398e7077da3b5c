//! Plans: homes and sizes decided before anything is allocated, with what a rehearsal on the dry backend
//! says they will cost.

use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::ledger::{Category, Ledger};
use crate::mem_stats::TickStats;
use crate::policy::{Placement, PlacementPolicy, PolicyView};
use crate::schedule::{Pass, Schedule};
use crate::tensor_mgr::StatefulTensorMgr;
use crate::transfer::Traffic;
use castor_kernels::{Backend, Tier};
use std::path::PathBuf;
use std::sync::Arc;

/// Bytes to which places in a window are rounded.
pub const GRANULE: u64 = 256;
/// Bytes to which places in files and staging are rounded: what direct I/O asks.
pub const FILE_GRANULE: u64 = 4096;

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
}

/// What a rehearsal found.
#[derive(Clone, Debug, Default)]
pub struct Prediction {
    /// Reserved bytes of each tier by category.
    pub ledger: Ledger,
    /// Most bytes of the window in use at once.
    pub window_peak: u64,
    /// Bytes per link of each steady pass.
    pub traffic: [Traffic; 3],
    /// Live bytes at each tick of each pass.
    pub ticks: [Vec<TickStats>; 3],
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
    pub schedules: [Schedule; 3],
    /// What it will cost.
    pub predicted: Prediction,
}

/// A rehearsal: runs every pass that the run has, twice (the second is the steady one), on the given manager.
pub type Rehearsal<'a> = &'a dyn Fn(&mut StatefulTensorMgr) -> Result<()>;

impl Plan {
    /// Plans for `layout` under `budgets`. `dry` makes a fresh counting backend; `driver_bytes` is what the real
    /// device's driver holds beside the arena.
    ///
    /// # Errors
    /// [`Error::OutOfRoom`] with the shortage and the largest users if no placement of the policy fits.
    pub fn make(
        layout: &Layout,
        fixed: Fixed,
        policy: &dyn PlacementPolicy,
        budgets: Budgets,
        lookahead_bytes: Option<u64>,
        driver_bytes: u64,
        dry: &dyn Fn() -> Arc<dyn Backend>,
        rehearse: Rehearsal<'_>,
    ) -> Result<Plan> {
        let schedules = Self::record(layout, &fixed, dry, rehearse)?;
        let workspace = dry().workspace_bytes();
        let mut view = PolicyView {
            layout,
            schedule: &schedules[Pass::Train.index()],
            room: [0; 3],
            taken: Default::default(),
            lookahead_bytes,
            window_shortage: 0,
        };
        for (tier, fixed) in [(Tier::Device, &fixed.device), (Tier::Host, &fixed.host)] {
            let mut taken: Vec<(String, u64)> =
                fixed.iter().map(|(category, bytes)| (category.name().to_string(), *bytes)).collect();
            if tier == Tier::Device {
                taken.push((Category::Workspace.name().into(), workspace));
                taken.push((Category::Driver.name().into(), driver_bytes));
            }
            view.taken[tier.index()] = taken;
        }
        for tier in Tier::ALL {
            let taken: u64 = view.taken[tier.index()].iter().map(|(_, bytes)| bytes).sum();
            let budget = budgets.of(tier);
            if taken > budget {
                let mut largest_users = view.taken[tier.index()].clone();
                largest_users.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
                let what = "before any model data".into();
                return Err(Error::OutOfRoom { tier, what, budget, short_by: taken - budget, largest_users });
            }
            view.room[tier.index()] = budget - taken;
        }
        // A window can be too small although its sum suffices (holes between copies of different sizes): the
        // rehearsal finds out, and the policy is asked again with what was missing.
        for _ in 0..8 {
            let placement = policy.place(&view)?;
            let mut plan = Plan {
                policy: policy.name(),
                placement,
                fixed: fixed.clone(),
                budgets: budgets.clone(),
                schedules: schedules.clone(),
                predicted: Prediction::default(),
            };
            let mut manager = StatefulTensorMgr::new(dry(), layout.clone(), plan.clone())?;
            manager.reserve_driver(driver_bytes);
            match rehearse(&mut manager) {
                Ok(()) => {
                    plan.predicted = manager.observed();
                    return Ok(plan);
                }
                Err(Error::OutOfRoom { tier: Tier::Device, short_by, .. }) => {
                    view.window_shortage += short_by.div_ceil(GRANULE) * GRANULE;
                }
                Err(other) => return Err(other),
            }
        }
        let placement = policy.place(&view)?;
        Err(Error::OutOfRoom {
            tier: Tier::Device,
            what: "the window stays fragmented".into(),
            budget: budgets.device,
            short_by: view.window_shortage,
            largest_users: vec![("window".into(), placement.window_bytes)],
        })
    }

    /// Records the schedules with everything on an unlimited device.
    fn record(
        layout: &Layout,
        fixed: &Fixed,
        dry: &dyn Fn() -> Arc<dyn Backend>,
        rehearse: Rehearsal<'_>,
    ) -> Result<[Schedule; 3]> {
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
            predicted: Prediction::default(),
        };
        let mut manager = StatefulTensorMgr::new(dry(), layout.clone(), plan)?;
        rehearse(&mut manager)?;
        Ok(manager.recorded())
    }

    /// Bytes of a tier that the plan will take: its peak, for everything is reserved at the start.
    pub fn peak(&self, tier: Tier) -> u64 {
        self.predicted.ledger.total(tier)
    }
}
