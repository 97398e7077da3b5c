//! The runtime's error: shortage, or the world below.

use crate::units::Bytes;
use castor_kernels::Tier;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// A tier's budget does not hold what must be there at once.
    #[error(
        "{tier} memory: the budget of {} is short by {} ({what}); largest users: {}; {}",
        Bytes(*budget), Bytes(*short_by), largest(largest_users), advice(*tier)
    )]
    OutOfRoom {
        /// The tier.
        tier: Tier,
        /// What could not be placed.
        what: String,
        /// Its budget in bytes.
        budget: u64,
        /// Bytes missing.
        short_by: u64,
        /// Who uses the tier, largest first: name and bytes.
        largest_users: Vec<(String, u64)>,
    },
    /// The hardware layer refused.
    #[error(transparent)]
    Kernels(#[from] castor_kernels::Error),
}

fn largest(users: &[(String, u64)]) -> String {
    let shown: Vec<String> = users.iter().take(4).map(|(name, bytes)| format!("{name} {}", Bytes(*bytes))).collect();
    shown.join(", ")
}

const fn advice(tier: Tier) -> &'static str {
    match tier {
        Tier::Device => {
            "raise --device_memory, lower --batch_size, --gradient_accumulation_steps or --max_length, or choose --recompute full"
        }
        Tier::Host => "raise --host_memory, or --nvme_capacity of a disk: --nvme DIR",
        Tier::Nvme => "raise --nvme_capacity or choose a folder on a larger disk",
    }
}
