//! The ledger: who holds which bytes of which tier, at every tick.

use crate::units::Role;
use castor_kernels::Tier;
use serde::{Deserialize, Serialize};

/// What bytes are held for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// Weights at home.
    Parameter,
    /// Gradients at home.
    Gradient,
    /// Masters at home.
    Master,
    /// First moments at home.
    First,
    /// Second moments at home.
    Second,
    /// Working copies on the device of chunks whose home is elsewhere or sharded.
    Window,
    /// Host memory through which bytes pass between disk and device.
    Staging,
    /// Activations and their scratch.
    Activations,
    /// Token ids, targets, losses, control scalars.
    Inputs,
    /// Scratch of GEMM and attention libraries.
    Workspace,
    /// What the driver and its libraries hold beside the arena.
    Driver,
    /// Host memory to which a checkpoint is copied, and pinned memory on the way there.
    Snapshot,
}

impl Category {
    /// All categories.
    pub const ALL: [Category; 12] = [
        Category::Parameter,
        Category::Gradient,
        Category::Master,
        Category::First,
        Category::Second,
        Category::Window,
        Category::Staging,
        Category::Activations,
        Category::Inputs,
        Category::Workspace,
        Category::Driver,
        Category::Snapshot,
    ];

    /// Position in [`Category::ALL`].
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Category::Parameter => "parameters",
            Category::Gradient => "gradients",
            Category::Master => "master",
            Category::First => "first moment",
            Category::Second => "second moment",
            Category::Window => "window",
            Category::Staging => "staging",
            Category::Activations => "activations",
            Category::Inputs => "inputs",
            Category::Workspace => "workspace",
            Category::Driver => "driver",
            Category::Snapshot => "snapshot",
        }
    }

    /// The category of a role's chunks at home.
    pub const fn home(role: Role) -> Category {
        match role {
            Role::Parameter => Category::Parameter,
            Role::Gradient => Category::Gradient,
            Role::Master => Category::Master,
            Role::First => Category::First,
            Role::Second => Category::Second,
        }
    }
}

/// Bytes of one tier by category.
pub type ByCategory = [u64; Category::ALL.len()];

/// Bytes of every tier by category: reserved for good, and in use now.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Ledger {
    reserved: [ByCategory; 3],
    live: [ByCategory; 3],
}

impl Ledger {
    /// Notes `bytes` reserved, and live until [`Ledger::set_live`] says otherwise.
    pub fn reserve(&mut self, tier: Tier, category: Category, bytes: u64) {
        self.reserved[tier.index()][category.index()] += bytes;
        self.live[tier.index()][category.index()] += bytes;
    }

    /// Notes how many of a category's reserved bytes are in use.
    ///
    /// # Panics
    /// If that is more than was reserved (L1).
    pub fn set_live(&mut self, tier: Tier, category: Category, bytes: u64) {
        let reserved = self.reserved[tier.index()][category.index()];
        assert!(bytes <= reserved, "L1: {bytes} bytes of {} in use on {tier}, {reserved} reserved", category.name());
        self.live[tier.index()][category.index()] = bytes;
    }

    /// Reserved bytes of a category.
    pub const fn reserved(&self, tier: Tier, category: Category) -> u64 {
        self.reserved[tier.index()][category.index()]
    }

    /// All reserved bytes of a tier: its peak, for nothing is allocated later (L3).
    pub fn total(&self, tier: Tier) -> u64 {
        self.reserved[tier.index()].iter().sum()
    }

    /// Bytes in use by category.
    pub const fn live(&self, tier: Tier) -> &ByCategory {
        &self.live[tier.index()]
    }

    /// Reserved bytes of a tier by category, largest first.
    pub fn largest_users(&self, tier: Tier) -> Vec<(String, u64)> {
        let mut users: Vec<_> = Category::ALL
            .into_iter()
            .map(|category| (category.name().to_string(), self.reserved(tier, category)))
            .filter(|(_, bytes)| *bytes > 0)
            .collect();
        users.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        users
    }
}
