//! A save in flight: ranks write their files, then rank 0 makes a checkpoint of them.
//!
//! With snapshots both happen on threads beside the run, without them at once. Between the two, and at the end, all
//! ranks hear from each other how it went: that is for the thread that trains, at a moment at which every rank's own
//! part is done ([`InFlight::is_ready`]).

use super::facts::Facts;
use super::manifest::{self, Manifest};
use super::rank_file::{self, Digest, Written};
use super::snapshot::Snapshot;
use super::{agree, failed, folder, share};
use crate::config::ModelConfig;
use crate::engine::{Engine, Progress};
use crate::error::{Error, Result};
use crate::report::log::SaveRecord;
use castor_kernels::Backend;
use castor_runtime::Bytes;
use castor_runtime::layout::Formats;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// What is saved and where: all that is needed once the run has gone on.
pub(super) struct Job {
    run_dir: PathBuf,
    facts: Facts,
    /// Checkpoints kept.
    limit: Option<u64>,
    config: ModelConfig,
    formats: Formats,
    progress: Progress,
    /// Ranks that write.
    shards: u64,
    /// Bytes of a rank's file.
    bytes: u64,
    /// Whether the run goes on meanwhile.
    beside: bool,
}

/// A rank's part of one stage: on a thread of its own, or done.
enum Work<T> {
    Beside(JoinHandle<T>),
    Done(T),
}

/// A rank's file, if it writes one, and the memory that it was written from.
type File = (Option<Snapshot>, Result<Option<Digest>>);

enum Stage {
    /// Ranks write their files.
    Files(Work<File>),
    /// Rank 0 adds what is missing, gives the folder its name and removes old checkpoints; what to tell the user.
    Whole(Work<Result<Vec<String>>>),
}

/// See the module.
pub(super) struct InFlight {
    job: Arc<Job>,
    stage: Stage,
    began: Instant,
    /// For how long the run waited.
    held: Duration,
}

/// What became of a save.
pub(super) enum Advanced {
    /// The next stage has begun.
    Goes(InFlight),
    /// The checkpoint is on disk: its figures, and what to tell the user.
    Saved(SaveRecord, Vec<String>),
}

impl<T: Send + 'static> Work<T> {
    fn is_ready(&self) -> bool {
        match self {
            Work::Beside(thread) => thread.is_finished(),
            Work::Done(_) => true,
        }
    }

    fn wait(self) -> Result<T> {
        match self {
            Work::Done(value) => Ok(value),
            Work::Beside(thread) => {
                thread.join().map_err(|_| Error::Failed("the thread that writes the checkpoint panicked".into()))
            }
        }
    }

    /// Starts `work` on a thread, or does it.
    fn start(beside: bool, work: impl FnOnce() -> T + Send + 'static) -> Result<Work<T>> {
        if !beside {
            return Ok(Work::Done(work()));
        }
        let thread = thread::Builder::new().name("checkpoint".into()).spawn(work);
        thread
            .map(Work::Beside)
            .map_err(|error| Error::Failed(format!("no thread for the checkpoint ({error}); give --async_save off")))
    }
}

impl Job {
    /// What there is to save of `engine` now.
    pub fn of(run_dir: &Path, facts: &Facts, limit: Option<u64>, engine: &mut Engine) -> Job {
        let layout = engine.manager().layout();
        let (shards, bytes) = (layout.shards, rank_file::bytes(layout));
        let options = engine.options();
        Job {
            run_dir: run_dir.to_owned(),
            facts: facts.clone(),
            limit,
            config: options.config.clone(),
            formats: options.formats,
            progress: engine.progress(),
            shards,
            bytes,
            beside: options.snapshots,
        }
    }

    fn unfinished(&self) -> PathBuf {
        folder::unfinished(&self.run_dir, self.progress.step)
    }

    fn place(&self) -> PathBuf {
        folder::of_step(&self.run_dir, self.progress.step)
    }

    /// Makes the folder to write into.
    fn begin(&self) -> Result<()> {
        let unfinished = self.unfinished();
        folder::clean(&self.run_dir)?;
        fs::create_dir_all(&unfinished).map_err(|error| failed(&unfinished, "create", &error))
    }

    /// All ranks' files are on disk: adds what is missing, gives the folder its name and removes old ones. Returns
    /// what to tell the user.
    fn complete(&self, digests: &[String]) -> Result<Vec<String>> {
        let unfinished = self.unfinished();
        let mut files = Vec::new();
        for (rank, said) in (0..).zip(digests) {
            let name = rank_file::name(rank);
            let digest =
                parse(said).ok_or_else(|| Error::Failed(format!("rank {rank} runs another version of castor")))?;
            let path = unfinished.join(&name);
            if fs::metadata(&path).map_or(true, |file| file.len() != digest.bytes) {
                return Err(Error::Failed(format!(
                    "{}: rank {rank} wrote it, and rank 0 does not see it; --output_dir must be one folder for all hosts",
                    path.display()
                )));
            }
            files.push((name, digest));
        }
        let mut config = Written::create(&unfinished.join(manifest::CONFIG))?;
        config.write(format!("{:#}\n", self.config.to_json("float32")).as_bytes())?;
        files.push((manifest::CONFIG.into(), config.finish()?));
        Manifest::new(self.progress, self.formats, self.facts.clone(), self.shards, files).write(&unfinished)?;
        folder::put_in_place(&unfinished, &self.place())?;
        Ok(prune(&self.run_dir, self.progress.step, self.limit))
    }

    /// The checkpoint is on disk.
    fn saved(&self, took: Duration, held: Duration, mut notices: Vec<String>) -> Advanced {
        let (took, held) = (took.as_secs_f64(), held.as_secs_f64());
        let waited = if self.beside { format!(", of which the run waited {held:.2} s") } else { String::new() };
        let (place, bytes) = (self.place(), Bytes(self.bytes));
        notices.insert(0, format!("saved {} ({bytes} per rank in {took:.2} s{waited})", place.display()));
        let record = SaveRecord { step: self.progress.step, bytes: self.bytes, seconds: took, held_seconds: held };
        Advanced::Saved(record, notices)
    }
}

impl InFlight {
    /// Begins a save; with `snapshot` this rank's states are in it when this returns. All ranks must call it, with no
    /// step open.
    ///
    /// # Errors
    /// If rank 0 cannot make the folder: on every rank.
    pub fn begin(job: Job, engine: &mut Engine, snapshot: &mut Option<Snapshot>) -> Result<InFlight> {
        let began = Instant::now();
        let backend = Arc::clone(engine.manager().backend());
        let rank = u64::from(backend.rank());
        agree(&*backend, if rank == 0 { job.begin() } else { Ok(()) })?;
        let path = job.unfinished().join(rank_file::name(rank));
        let manager = engine.manager();
        // Ranks beyond the first of each shard hold the same again. What fails here the others hear when all are ready.
        let done = |snapshot, outcome: Result<_>| Work::Done((snapshot, outcome));
        let files = match snapshot.take() {
            _ if rank >= job.shards => done(None, Ok(None)),
            None => done(None, rank_file::write(&path, manager, rank).map(Some)),
            Some(mut held) => match held.take(manager, rank) {
                Err(error) => done(Some(held), Err(error)),
                Ok(()) => Work::start(true, move || {
                    let written = held.write(&path).map(Some);
                    (Some(held), written)
                })
                .unwrap_or_else(|error| done(None, Err(error))),
            },
        };
        Ok(InFlight { job: Arc::new(job), stage: Stage::Files(files), began, held: began.elapsed() })
    }

    /// Whether this rank's part of the stage is done.
    pub fn is_ready(&self) -> bool {
        match &self.stage {
            Stage::Files(work) => work.is_ready(),
            Stage::Whole(work) => work.is_ready(),
        }
    }

    /// Ends it without hearing from the others, where that can be done: the only rank, and rank 0 once all files are
    /// written. Returns what to tell the user.
    pub fn rescue(self, world: u32) -> Vec<String> {
        let whole = match self.stage {
            Stage::Whole(work) => work.wait().flatten(),
            Stage::Files(work) if world == 1 => work.wait().and_then(|(_, written)| match written? {
                Some(digest) => self.job.complete(&[said(&digest)]),
                None => Ok(Vec::new()),
            }),
            Stage::Files(_) => return Vec::new(),
        };
        match whole {
            Ok(notices) => [vec![format!("saved {}", self.job.place().display())], notices].concat(),
            Err(error) => vec![format!("{} was not saved: {error}", self.job.place().display())],
        }
    }

    /// Waits for this rank's part of the stage, hears of the others', and begins the next. All ranks must call it.
    ///
    /// # Errors
    /// If a rank's part failed: on every rank; then nothing unfinished is left.
    pub fn advance(self, backend: &dyn Backend, snapshot: &mut Option<Snapshot>) -> Result<Advanced> {
        let InFlight { job, stage, began, held } = self;
        let entered = Instant::now();
        let outcome = match stage {
            Stage::Files(work) => files_done(work, &job, backend, snapshot).map(|stage| (Some(stage), Vec::new())),
            Stage::Whole(work) => whole_done(work, backend).map(|notices| (None, notices)),
        };
        let held = held + entered.elapsed();
        match outcome {
            Ok((Some(stage), _)) => Ok(Advanced::Goes(InFlight { job, stage, began, held })),
            Ok((None, notices)) => Ok(job.saved(began.elapsed(), held, notices)),
            Err(error) => {
                if backend.rank() == 0 {
                    // The first error is the one to report; what cannot be removed now goes at the next save.
                    let _ = folder::remove(&job.unfinished());
                }
                Err(error)
            }
        }
    }
}

/// This rank's file is written; all ranks tell what theirs are, and rank 0 goes on.
fn files_done(
    work: Work<File>,
    job: &Arc<Job>,
    backend: &dyn Backend,
    snapshot: &mut Option<Snapshot>,
) -> Result<Stage> {
    let written = work.wait().and_then(|(held, written)| {
        *snapshot = held;
        written
    });
    let mut digests = share(backend, written.map(|digest| digest.as_ref().map(said).unwrap_or_default()))?;
    digests.truncate(job.shards as usize);
    if backend.rank() != 0 {
        return Ok(Stage::Whole(Work::Done(Ok(Vec::new()))));
    }
    let whole = Arc::clone(job);
    let work = Work::start(job.beside, move || whole.complete(&digests));
    // The others hear of it at the end of the stage that they have begun.
    Ok(Stage::Whole(work.unwrap_or_else(|error| Work::Done(Err(error)))))
}

/// Rank 0 has made the checkpoint, or failed: all hear which. What to tell the user.
fn whole_done(work: Work<Result<Vec<String>>>, backend: &dyn Backend) -> Result<Vec<String>> {
    let (notices, outcome) = match work.wait().flatten() {
        Ok(notices) => (notices, Ok(())),
        Err(error) => (Vec::new(), Err(error)),
    };
    agree(backend, outcome).map(|()| notices)
}

/// A file's digest as ranks tell it to each other.
fn said(digest: &Digest) -> String {
    format!("{} {:016x}", digest.bytes, digest.xxh3)
}

fn parse(digest: &str) -> Option<Digest> {
    let (bytes, xxh3) = digest.split_once(' ')?;
    Some(Digest { bytes: bytes.parse().ok()?, xxh3: u64::from_str_radix(xxh3, 16).ok()? })
}

/// Removes checkpoints of the lowest steps until `limit` are left; never the one of step `new`.
fn prune(run_dir: &Path, new: u64, limit: Option<u64>) -> Vec<String> {
    let Some(limit) = limit else { return Vec::new() };
    let others = || -> Result<Vec<u64>> {
        let mut steps = folder::steps(run_dir)?;
        // What is no checkpoint is not ours to remove, and does not count.
        steps.retain(|step| *step != new && folder::of_step(run_dir, *step).join(manifest::FILE).exists());
        let surplus = (steps.len() as u64 + 1).saturating_sub(limit.max(1)) as usize;
        steps.truncate(surplus);
        Ok(steps)
    };
    let removed = others().and_then(|steps| steps.into_iter().try_for_each(|step| folder::remove_step(run_dir, step)));
    // The run is saved; an old checkpoint too many is no reason to end it.
    removed.err().map(|error| format!("an old checkpoint stays: {error}")).into_iter().collect()
}
