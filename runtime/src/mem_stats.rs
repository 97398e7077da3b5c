//! `MemStatsCollector`: what each tick really held, learned in the warm-up and frozen after it.

use crate::ledger::{ByCategory, Category, Ledger};
use crate::schedule::Pass;
use crate::units::{GroupId, Tick};
use castor_kernels::Tier;

/// What was live at one tick.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TickStats {
    /// What the step did.
    pub name: &'static str,
    /// For which group.
    pub group: GroupId,
    /// Live bytes of device, host and nvme by category, the most during the tick in any recorded pass.
    pub live: [ByCategory; 3],
}

/// Records the first passes, then is read only.
#[derive(Default, Debug)]
pub struct MemStatsCollector {
    ticks: [Vec<TickStats>; Pass::ALL.len()],
    now: usize,
    frozen: bool,
}

/// Categories that are not model data.
const NON_MODEL: [Category; 4] = [Category::Activations, Category::Inputs, Category::Workspace, Category::Driver];

impl MemStatsCollector {
    /// A tick begins.
    pub fn begin(&mut self, pass: Pass, tick: Tick, name: &'static str, group: GroupId) {
        if !self.frozen {
            let ticks = &mut self.ticks[pass.index()];
            let known = ticks.get(tick.index()).is_some_and(|stats| stats.name == name && stats.group == group);
            if !known {
                ticks.truncate(tick.index());
                ticks.push(TickStats { name, group, live: Default::default() });
            }
            self.now = tick.index();
        }
    }

    /// What is live now; the most of each category during the tick is kept.
    pub fn record(&mut self, pass: Pass, ledger: &Ledger) {
        if self.frozen {
            return;
        }
        if let Some(stats) = self.ticks[pass.index()].get_mut(self.now) {
            for (tier, most) in Tier::ALL.into_iter().zip(&mut stats.live) {
                for (most, live) in most.iter_mut().zip(ledger.live(tier)) {
                    *most = (*most).max(*live);
                }
            }
        }
    }

    /// Ends the warm-up.
    pub fn freeze(&mut self) {
        self.frozen = true;
    }

    /// Whether the warm-up is over.
    pub const fn frozen(&self) -> bool {
        self.frozen
    }

    /// What was seen.
    pub fn ticks(&self, pass: Pass) -> &[TickStats] {
        &self.ticks[pass.index()]
    }

    /// Bytes of the device that are not model data at a tick.
    pub fn non_model_bytes(&self, pass: Pass, tick: Tick) -> u64 {
        self.ticks[pass.index()]
            .get(tick.index())
            .map_or(0, |stats| NON_MODEL.into_iter().map(|c| stats.live[Tier::Device.index()][c.index()]).sum())
    }

    /// Bytes of a device `budget` that model data may use at a tick.
    pub fn room_at(&self, pass: Pass, tick: Tick, budget: u64) -> u64 {
        budget.saturating_sub(self.non_model_bytes(pass, tick))
    }
}
