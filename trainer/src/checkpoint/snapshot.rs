//! A rank's file in host memory: the states as they were at a step, while later steps change them.
//!
//! Plain memory, not pinned: taken and touched once, before the first step, so that a copy of the states costs neither
//! page faults nor memory that the plan does not know of.

use super::rank_file::{self, Digest, Written};
use crate::error::{Error, Result};
use castor_runtime::{Bytes, StatefulTensorMgr};
use memmap2::MmapMut;
use rayon::prelude::*;
use std::path::Path;

/// Bytes of a page, which are there once one of them is written.
const PAGE: usize = 4096;
/// Bytes that one thread touches at a time.
const TOUCHED_AT_ONCE: usize = 2 << 20;
/// Bytes written at a time.
const PIECE: usize = 4 << 20;

/// The bytes of one rank's file.
pub(super) struct Snapshot {
    bytes: MmapMut,
}

impl Snapshot {
    /// Memory for a file of `bytes` bytes.
    ///
    /// # Errors
    /// If the system has none.
    pub fn new(bytes: u64) -> Result<Snapshot> {
        let mut map = MmapMut::map_anon(bytes as usize).map_err(|error| {
            Error::Failed(format!(
                "{} of host memory for snapshots were refused: {error}; give --async_save off or free memory",
                Bytes(bytes)
            ))
        })?;
        // Only advice: a system without huge pages works the same.
        let _ = map.advise(memmap2::Advice::HugePage);
        map.par_chunks_mut(TOUCHED_AT_ONCE).for_each(|part| part.iter_mut().step_by(PAGE).for_each(|byte| *byte = 0));
        Ok(Snapshot { bytes: map })
    }

    /// Copies the states of shard `own`.
    ///
    /// # Errors
    /// If a tier refuses.
    pub fn take(&mut self, manager: &mut StatefulTensorMgr, own: u64) -> Result<()> {
        Ok(manager.read_ranges(&rank_file::parts(manager, own), &mut self.bytes)?)
    }

    /// Writes the file, and waits until it is on disk.
    ///
    /// # Errors
    /// If the file system refuses; with path, offset and bytes.
    pub fn write(&self, path: &Path) -> Result<Digest> {
        let mut file = Written::create(path)?;
        self.bytes.chunks(PIECE).try_for_each(|piece| file.write(piece))?;
        file.finish()
    }
}
