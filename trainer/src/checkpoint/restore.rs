//! Coming back: which checkpoint to go on from, whether it is sound, and its chunks for any number of ranks.

use super::facts::Facts;
use super::manifest::{self, Manifest};
use super::rank_file::{self, RankFiles};
use super::{agree, folder, share};
use crate::config::ModelConfig;
use crate::engine::{Engine, Progress};
use crate::error::{Error, Result, counted};
use crate::model::{Shape, groups};
use crate::settings::Resume;
use castor_kernels::Backend;
use castor_runtime::ChunkId;
use castor_runtime::layout::{Formats, Layout, Sharding};
use std::path::{Path, PathBuf};

/// A checkpoint whose manifest was read and whose files are there in full length.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    manifest: Manifest,
}

impl Checkpoint {
    /// Opens the checkpoint in `folder`.
    ///
    /// # Errors
    /// Naming the file that is missing, cut off or damaged.
    pub fn open(folder: &Path) -> Result<Checkpoint> {
        Ok(Checkpoint { folder: folder.to_owned(), manifest: Manifest::read(folder)? })
    }

    /// The checkpoint in `folder`, checked; or of a run's folder, the latest that is sound. The second value says
    /// why others were passed over.
    ///
    /// # Errors
    /// If there is none.
    pub fn locate(folder: &Path) -> Result<(Checkpoint, Vec<String>)> {
        let sound = |folder: &Path| -> Result<Checkpoint> {
            let checkpoint = Checkpoint::open(folder)?;
            checkpoint.verify(0, 1)?;
            Ok(checkpoint)
        };
        let steps = folder::steps(folder)?;
        if steps.is_empty() {
            return Ok((sound(folder)?, Vec::new()));
        }
        let mut notices = Vec::new();
        for step in steps.into_iter().rev() {
            match sound(&folder::of_step(folder, step)) {
                Ok(checkpoint) => return Ok((checkpoint, notices)),
                Err(error) => notices.push(passed_over(&error)),
            }
        }
        Err(none_sound(folder, &notices))
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// How far the run was.
    pub const fn progress(&self) -> Progress {
        self.manifest.progress
    }

    /// Number of ranks that wrote it: one for each shard.
    pub const fn world(&self) -> u64 {
        self.manifest.world
    }

    /// Element types of its chunks.
    pub(super) const fn formats(&self) -> Formats {
        self.manifest.formats
    }

    /// The model's shape.
    ///
    /// # Errors
    /// If its file cannot be read.
    pub(super) fn config(&self) -> Result<ModelConfig> {
        Ok(ModelConfig::from_json_file(&self.folder.join(manifest::CONFIG))?.0)
    }

    /// Whether a run of these facts may go on from here. Returns what to tell the user.
    ///
    /// # Errors
    /// [`Error::Usage`] naming what does not match, with both values.
    pub fn allow(&self, facts: &Facts) -> Result<Vec<String>> {
        let name = self.folder.file_name().unwrap_or(self.folder.as_os_str()).to_string_lossy();
        self.manifest.facts.allow(facts, &name)
    }

    /// Sums up every `of`-th file from number `share` on, so that `of` ranks check each once.
    ///
    /// # Errors
    /// Naming the file that is not what was written.
    pub fn verify(&self, share: u64, of: u64) -> Result<()> {
        let mine = self.manifest.files().skip(share as usize).step_by(of as usize);
        for (name, digest) in mine {
            rank_file::verify(&self.folder.join(name), &digest)?;
        }
        Ok(())
    }

    /// Fills all chunks that this rank stores, and sets the run's progress. Each rank reads its element ranges from
    /// whichever files hold them. The engine must have the same model and formats ([`Checkpoint::allow`]) and have
    /// made no step.
    ///
    /// # Errors
    /// If a file cannot be read or a tier refuses.
    pub fn restore(&self, engine: &mut Engine) -> Result<()> {
        let files = self.files()?;
        let manager = engine.manager();
        let chunks: Vec<ChunkId> = rank_file::chunks(manager.layout()).collect();
        let mut bytes = Vec::new();
        for chunk in chunks {
            let (first, count) = manager.stored_range(chunk);
            bytes.resize(manager.dtype(chunk).bytes(count) as usize, 0);
            files.read(chunk, first, count, &mut bytes)?;
            manager.write_chunk(chunk, &bytes)?;
        }
        engine.resume(self.manifest.progress);
        Ok(())
    }

    /// The ranks' files.
    ///
    /// # Errors
    /// If one cannot be opened.
    pub(super) fn files(&self) -> Result<RankFiles> {
        let unsharded = Sharding { parameters: false, gradients: false, optimizer: false };
        let groups = groups::specs(&Shape::from(&self.config()?));
        RankFiles::open(&self.folder, Layout::new(groups, self.manifest.formats, unsharded, self.manifest.world))
    }
}

/// The checkpoint that a run of these facts in `run_dir` goes on from, checked by all ranks together; none if it
/// begins anew. All ranks must call it. The second value holds what to tell the user.
///
/// # Errors
/// [`Error::Usage`] if the checkpoint that was asked for is not sound or does not match, or of those in the run's
/// folder none is sound.
pub fn find(
    resume: &Resume,
    run_dir: &Path,
    facts: &Facts,
    backend: &dyn Backend,
) -> Result<(Option<Checkpoint>, Vec<String>)> {
    let (within, asked) = match resume {
        Resume::No => return Ok((None, later(run_dir, 0)?)),
        Resume::Latest => (run_dir, false),
        Resume::From(folder) => (folder.as_path(), true),
    };
    let mut notices = Vec::new();
    let steps = candidates(within, backend, &mut notices)?;
    let checkpoint = match steps.is_empty() {
        true if asked => checked(within, backend).map_err(|error| match error {
            Error::Failed(reason) => Error::Usage(reason),
            other => other,
        })?,
        true => {
            notices.push(format!("{}: there is no checkpoint yet, training begins at step 1", within.display()));
            return Ok((None, notices));
        }
        false => latest_sound(within, &steps, backend, &mut notices)?,
    };
    notices.extend(checkpoint.allow(facts)?);
    if asked {
        notices.extend(later(run_dir, checkpoint.progress().step)?);
    }
    notices.push(format!("going on after step {} from {}", checkpoint.progress().step, checkpoint.folder.display()));
    let (then, now) = (checkpoint.world(), backend.shards());
    if then != u64::from(now) {
        let then = counted(then, "shards");
        notices.push(format!("it was written in {then} and is read in {now}: sums may round otherwise from here on"));
    }
    Ok((Some(checkpoint), notices))
}

/// What to say of checkpoints in the run's folder that are ahead of where the run begins.
fn later(run_dir: &Path, begins: u64) -> Result<Vec<String>> {
    let ahead = folder::steps(run_dir)?.into_iter().rfind(|step| *step > begins);
    let said = |step| {
        let folder = folder::of_step(run_dir, step);
        format!("{} is of an earlier run, and `--resume latest` takes it unless it is removed", folder.display())
    };
    Ok(ahead.map(said).into_iter().collect())
}

fn latest_sound(within: &Path, steps: &[u64], backend: &dyn Backend, notices: &mut Vec<String>) -> Result<Checkpoint> {
    for step in steps.iter().rev() {
        match checked(&folder::of_step(within, *step), backend) {
            Err(error @ Error::Kernels(castor_kernels::Error::Peer { .. })) => return Err(error),
            Err(error) => notices.push(passed_over(&error)),
            found => return found,
        }
    }
    Err(none_sound(within, notices))
}

/// Steps of the checkpoints in a folder as rank 0 sees it, ascending. What has the name of one and no manifest was
/// never one.
fn candidates(within: &Path, backend: &dyn Backend, notices: &mut Vec<String>) -> Result<Vec<u64>> {
    let mut list = || -> Result<String> {
        let mut steps = folder::steps(within)?;
        steps.retain(|step| {
            let folder = folder::of_step(within, *step);
            let whole = folder.join(manifest::FILE).exists();
            if !whole {
                notices.push(format!("{} is not complete and is ignored", folder.display()));
            }
            whole
        });
        Ok(steps.iter().map(u64::to_string).collect::<Vec<_>>().join(" "))
    };
    let listed = share(backend, if backend.rank() == 0 { list() } else { Ok(String::new()) })?;
    let steps = listed.first().map_or("", String::as_str).split_whitespace();
    Ok(steps.filter_map(|step| step.parse().ok()).collect())
}

/// Opens a checkpoint and has all ranks check a part of its files.
fn checked(folder: &Path, backend: &dyn Backend) -> Result<Checkpoint> {
    let (rank, world) = (u64::from(backend.rank()), u64::from(backend.world()));
    let opened = Checkpoint::open(folder).and_then(|checkpoint| {
        checkpoint.verify(rank, world)?;
        Ok(checkpoint)
    });
    match opened {
        Ok(checkpoint) => agree(backend, Ok(())).map(|()| checkpoint),
        Err(error) => Err(agree(backend, Err(error)).err().unwrap_or_else(|| unreachable!("an error was given"))),
    }
}

fn passed_over(error: &Error) -> String {
    format!("{error}; this checkpoint is passed over")
}

fn none_sound(within: &Path, notices: &[String]) -> Error {
    Error::Usage(format!("{}: no checkpoint is sound: {}", within.display(), notices.join("; ")))
}
