//! `castor export`: a checkpoint's weights as a Hugging Face folder, streamed from the ranks' files.

use super::model::FILE_BYTES;
use super::rank_file::RankFiles;
use super::restore::Checkpoint;
use crate::config::ModelConfig;
use crate::engine::widen;
use crate::error::Result;
use crate::model::{Shape, groups::Groups};
use crate::source::TensorSource;
use crate::weights::{self, ExportDType};
use castor_kernels::{DType, numeric};
use castor_runtime::{GroupId, Role, layout::Formats};
use std::path::Path;

/// Writes the exact weights of a checkpoint (of a run's folder, the latest) to the folder `out`. Needs neither a
/// device nor memory for a model. Returns what to tell the user.
///
/// # Errors
/// If the checkpoint is not sound, or `out` is not empty or cannot be written.
pub fn export(checkpoint: &Path, out: &Path, dtype: ExportDType) -> Result<Vec<String>> {
    let (checkpoint, mut notices) = Checkpoint::locate(checkpoint)?;
    weights::export(out, &checkpoint.config()?, dtype, FILE_BYTES, &Stored::open(&checkpoint)?)?;
    notices.push(format!("{} in {}", checkpoint.folder().display(), out.display()));
    Ok(notices)
}

/// The model of a checkpoint: its shape and its exact weights, in the ranks' files.
///
/// # Errors
/// If a file cannot be opened.
pub fn stored(checkpoint: &Checkpoint) -> Result<(ModelConfig, Box<dyn TensorSource>)> {
    Ok((checkpoint.config()?, Box::new(Stored::open(checkpoint)?)))
}

/// Weights in the ranks' files.
pub(super) struct Stored {
    files: RankFiles,
    groups: Groups,
    formats: Formats,
}

impl Stored {
    /// The weights of a checkpoint.
    ///
    /// # Errors
    /// If a file cannot be opened.
    pub fn open(checkpoint: &Checkpoint) -> Result<Stored> {
        let groups = Groups::new(&Shape::from(&checkpoint.config()?));
        Ok(Stored { files: checkpoint.files()?, groups, formats: checkpoint.formats() })
    }

    fn bytes(&self, group: GroupId, role: Role, dtype: DType, first: u64, count: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; dtype.bytes(count) as usize];
        self.files.read(group.chunk(role), first, count, &mut bytes)?;
        Ok(bytes)
    }
}

impl TensorSource for Stored {
    fn read(&self, name: &str, first: u64, out: &mut [f32]) -> Result<()> {
        let part = self.groups.part(name);
        let (first, count) = (part.offset + first, out.len() as u64);
        let parameter = self.formats.parameter;
        let stored = |role, dtype| self.bytes(part.group, role, dtype, first, count);
        match self.formats.master {
            None => out.copy_from_slice(&widen(&stored(Role::Parameter, parameter)?, parameter)),
            Some(DType::Rem16) => {
                let (weights, rests) = (stored(Role::Parameter, parameter)?, stored(Role::Master, DType::Rem16)?);
                let halves = weights.chunks_exact(2).zip(rests.chunks_exact(2));
                for (value, (weight, rest)) in out.iter_mut().zip(halves) {
                    let (weight, rest) = ([weight[0], weight[1]], [rest[0], rest[1]]);
                    *value = numeric::join(u16::from_le_bytes(weight), i16::from_le_bytes(rest));
                }
            }
            Some(master) => out.copy_from_slice(&widen(&stored(Role::Master, master)?, master)),
        }
        Ok(())
    }
}
