//! `memory.json`: what every byte of every tier was for, at every tick of a step.
//!
//! Plain data: the runtime's ledger and plan fill it, the page and the summary read it. Each table of bytes has
//! one row per category and one column per tick.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::write_whole;
use crate::error::{Error, Result};

/// Name of the file in the run's folder.
pub const FILE: &str = "memory.json";
/// Version of the form; a reader refuses a newer one.
pub const VERSION: u32 = 1;

/// One rank's memory during one steady step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MemoryReport {
    /// [`VERSION`]
    pub version: u32,
    /// Whose memory it is.
    pub rank: u32,
    /// Number of ranks.
    pub world: u32,
    /// Names of the ticks, in order: "block 3 forward".
    pub ticks: Vec<String>,
    /// Device, host and NVMe, those that are used.
    pub tiers: Vec<TierReport>,
    /// Bytes moved per step.
    pub links: Vec<LinkReport>,
    /// Every chunk.
    pub chunks: Vec<ChunkReport>,
    /// Wall time of a steady step.
    pub step_seconds: f64,
    /// Time of it during which the step waited for a move.
    pub stall_seconds_per_step: f64,
}

/// A tier over the step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TierReport {
    /// "device", "host" or "nvme".
    pub tier: String,
    /// What may be used.
    pub budget_bytes: u64,
    /// Categories, in the order of the rows of both tables.
    pub categories: Vec<String>,
    /// The plan's bytes, category × tick. May be empty.
    pub predicted: Vec<Vec<u64>>,
    /// The ledger's bytes, category × tick. May be empty.
    pub measured: Vec<Vec<u64>>,
    /// Largest sum over a tick, by the plan; it may lie within a tick and exceed every column.
    pub predicted_peak_bytes: u64,
    /// The same by the ledger, over the whole run.
    pub measured_peak_bytes: u64,
    /// What the arenas took from the system, where that differs from what is used of them.
    pub reserved_bytes: Option<u64>,
    /// What the system says is in use: the driver's figure, or the process's peak resident memory.
    pub system_bytes: Option<u64>,
}

impl TierReport {
    /// Sum over the categories at each tick.
    pub fn totals(table: &[Vec<u64>]) -> Vec<u64> {
        let ticks = table.iter().map(Vec::len).max().unwrap_or(0);
        (0..ticks).map(|tick| table.iter().filter_map(|row| row.get(tick)).sum()).collect()
    }
}

/// A link between tiers or ranks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LinkReport {
    /// "host to device", "gather", ….
    pub link: String,
    /// By the plan.
    pub planned_bytes_per_step: u64,
    /// Where the copies were issued.
    pub counted_bytes_per_step: u64,
    /// Time during which the link was busy, if it was measured.
    pub busy_seconds_per_step: Option<f64>,
}

/// A chunk and its home.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChunkReport {
    /// What it is of: "block 3", "embedding".
    pub group: String,
    /// "parameter", "gradient", "master", "first moment", "second moment".
    pub role: String,
    /// This rank's bytes of it.
    pub bytes: u64,
    /// Its home tier.
    pub home: String,
}

impl MemoryReport {
    /// Writes `memory.json`.
    ///
    /// # Errors
    /// [`Error::Failed`] with path and reason.
    pub fn write(&self, run_dir: &Path) -> Result<()> {
        let path = run_dir.join(FILE);
        let bytes = serde_json::to_vec(self).map_err(|error| Error::Failed(format!("{}: {error}", path.display())))?;
        write_whole(&path, &bytes)
    }

    /// Reads a folder's `memory.json`; none if there is no such file.
    ///
    /// # Errors
    /// [`Error::Usage`] with path and reason, also for a table whose rows do not fit its categories and ticks.
    pub fn read(run_dir: &Path) -> Result<Option<MemoryReport>> {
        let path = run_dir.join(FILE);
        let bad = |reason: String| Error::Usage(format!("{}: {reason}", path.display()));
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(bad(error.to_string())),
        };
        let report: MemoryReport = serde_json::from_slice(&bytes).map_err(|error| bad(error.to_string()))?;
        if report.version > VERSION {
            return Err(bad(format!("is of version {}, this program reads up to {VERSION}", report.version)));
        }
        for tier in &report.tiers {
            for (name, table) in [("predicted", &tier.predicted), ("measured", &tier.measured)] {
                let fits =
                    table.len() == tier.categories.len() && table.iter().all(|row| row.len() == report.ticks.len());
                if !table.is_empty() && !fits {
                    return Err(bad(format!(
                        "{name} bytes of tier {} are not {} categories × {} ticks",
                        tier.tier,
                        tier.categories.len(),
                        report.ticks.len()
                    )));
                }
            }
        }
        Ok(Some(report))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_and_read_back_and_a_misfit_is_named() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(MemoryReport::read(folder.path()).unwrap(), None);
        let mut report = MemoryReport {
            version: VERSION,
            world: 1,
            ticks: vec!["a".into(), "b".into()],
            tiers: vec![TierReport {
                tier: "device".into(),
                categories: vec!["parameters".into()],
                measured: vec![vec![1, 2]],
                ..TierReport::default()
            }],
            ..MemoryReport::default()
        };
        report.write(folder.path()).unwrap();
        assert_eq!(MemoryReport::read(folder.path()).unwrap().as_ref(), Some(&report));
        report.tiers[0].measured[0].pop();
        report.write(folder.path()).unwrap();
        let message = MemoryReport::read(folder.path()).unwrap_err().to_string();
        assert!(message.contains("1 categories × 2 ticks"), "{message}");
    }

    #[test]
    fn totals_add_categories() {
        assert_eq!(TierReport::totals(&[vec![1, 2], vec![10, 20]]), [11, 22]);
        assert!(TierReport::totals(&[]).is_empty());
    }
}
