//! Saving: every rank writes its file, rank 0 makes a checkpoint of them and drops old ones.

use super::facts::Facts;
use super::manifest::{self, Manifest};
use super::rank_file::{self, Digest, Written};
use super::{agree, failed, folder, model, share};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::settings::{Every, OutputSettings, Settings};
use castor_runtime::layout::Layout;
use castor_runtime::{Bytes, limits};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// When a run saves, where, and how many checkpoints it keeps.
pub struct Saver {
    run_dir: PathBuf,
    every: Every,
    limit: Option<u64>,
    facts: Facts,
    /// The step whose checkpoint the run goes on from.
    begun: Option<u64>,
    /// The step that this session saved last.
    saved: Option<u64>,
}

impl Saver {
    /// Saves as `output` asks. `begun` is the step whose checkpoint the run goes on from.
    pub fn new(output: &OutputSettings, facts: Facts, begun: Option<u64>) -> Saver {
        Saver {
            run_dir: output.dir.clone(),
            every: output.save,
            limit: output.save_total_limit,
            facts,
            begun,
            saved: None,
        }
    }

    /// Whether the run is to be saved after step `done` of `total`: as often as asked, and at the end.
    pub fn is_due(&self, done: u64, total: u64) -> bool {
        self.every.is_due(done, total) || done == total && self.every != Every::Never
    }

    /// Saves a run that ends early, if it is one that saves.
    ///
    /// # Errors
    /// As [`Saver::save`].
    pub fn save_interrupted(&mut self, engine: &mut Engine) -> Result<Vec<String>> {
        if self.every == Every::Never { Ok(Vec::new()) } else { self.save(engine) }
    }

    /// Saves the run as it is, unless it just did. All ranks must call it, after [`Engine::finish`]. Returns what to
    /// tell the user.
    ///
    /// # Errors
    /// As [`save`].
    pub fn save(&mut self, engine: &mut Engine) -> Result<Vec<String>> {
        let step = engine.progress().step;
        if [self.begun, self.saved].contains(&Some(step)) {
            return Ok(Vec::new());
        }
        let notices = save(&self.run_dir, &self.facts, self.limit, engine)?;
        self.saved = Some(step);
        Ok(notices)
    }

    /// Writes the final weights: as [`save_model`](super::save_model), which all ranks must call. What was just
    /// saved is not gathered again but read from there by rank 0.
    ///
    /// # Errors
    /// As [`save_model`](super::save_model).
    pub fn save_model(&self, tokenizer: &str, engine: &mut Engine) -> Result<PathBuf> {
        let step = engine.progress().step;
        if self.saved != Some(step) {
            return model::save_model(&self.run_dir, tokenizer, engine);
        }
        match engine.manager().backend().rank() {
            0 => model::save_model_of(&folder::of_step(&self.run_dir, step), &self.run_dir, tokenizer),
            _ => Ok(folder::of_model(&self.run_dir)),
        }
    }
}

/// Writes a checkpoint of `engine` into `run_dir`; once it is on disk, of the others those of the lowest steps are
/// removed until `limit` are left. All ranks must call it, after [`Engine::finish`]. Returns what to tell the user.
///
/// # Errors
/// If a rank cannot write: on every rank, with path and bytes. Checkpoints that were there before still are, and
/// nothing unfinished is left.
///
/// # Panics
/// If a step is open.
pub fn save(run_dir: &Path, facts: &Facts, limit: Option<u64>, engine: &mut Engine) -> Result<Vec<String>> {
    assert!(engine.finish()?.is_none(), "a step is open: its outcome would be lost");
    let began = Instant::now();
    let backend = Arc::clone(engine.manager().backend());
    let rank = u64::from(backend.rank());
    let step = engine.progress().step;
    let unfinished = folder::unfinished(run_dir, step);
    agree(&*backend, if rank == 0 { begin(run_dir, &unfinished) } else { Ok(()) })?;
    // Ranks beyond the first of each shard hold the same again.
    let shards = backend.shards() as usize;
    let written = match rank < shards as u64 {
        true => rank_file::write(&unfinished.join(rank_file::name(rank)), engine.manager(), rank)
            .map(|digest| format!("{} {:016x}", digest.bytes, digest.xxh3)),
        false => Ok(String::new()),
    };
    let saved = share(&*backend, written).and_then(|digests| match rank {
        0 => agree(&*backend, complete(run_dir, &unfinished, facts, engine, &digests[..shards])),
        _ => agree(&*backend, Ok(())),
    });
    if let Err(error) = saved {
        if rank == 0 {
            // The first error is the one to report; what cannot be removed now goes at the next save.
            let _ = folder::remove(&unfinished);
        }
        return Err(error);
    }
    let mut notices = Vec::new();
    if rank == 0 {
        let (place, bytes) = (folder::of_step(run_dir, step), rank_file::bytes(engine.manager().layout()));
        let seconds = began.elapsed().as_secs_f64();
        notices.push(format!("saved {} ({} per rank in {seconds:.2} s)", place.display(), Bytes(bytes)));
        notices.extend(prune(run_dir, step, limit));
    }
    Ok(notices)
}

/// Makes the folder to write into.
fn begin(run_dir: &Path, unfinished: &Path) -> Result<()> {
    folder::clean(run_dir)?;
    fs::create_dir_all(unfinished).map_err(|error| failed(unfinished, "create", &error))
}

/// All ranks' files are on disk: adds what is missing, and gives the folder its name.
fn complete(run_dir: &Path, unfinished: &Path, facts: &Facts, engine: &mut Engine, digests: &[String]) -> Result<()> {
    let mut files = Vec::new();
    for (rank, said) in (0..).zip(digests) {
        let name = rank_file::name(rank);
        let digest = parse(said).ok_or_else(|| Error::Failed(format!("rank {rank} runs another version of castor")))?;
        let path = unfinished.join(&name);
        if fs::metadata(&path).map_or(true, |file| file.len() != digest.bytes) {
            return Err(Error::Failed(format!(
                "{}: rank {rank} wrote it, and rank 0 does not see it; --output_dir must be one folder for all hosts",
                path.display()
            )));
        }
        files.push((name, digest));
    }
    let options = engine.options();
    let mut config = Written::create(&unfinished.join(manifest::CONFIG))?;
    config.write(format!("{:#}\n", options.config.to_json("float32")).as_bytes())?;
    files.push((manifest::CONFIG.into(), config.finish()?));
    let progress = engine.progress();
    Manifest::new(progress, options.formats, facts.clone(), digests.len() as u64, files).write(unfinished)?;
    folder::put_in_place(unfinished, &folder::of_step(run_dir, progress.step))
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

/// Makes a run's folder ready: it is there, free of what crashes left, files can be written, and a checkpoint and the
/// final model fit, as far as they are asked for.
///
/// # Errors
/// [`Error::Usage`] with both numbers, why nothing can be written, or that the final model would replace the first.
pub fn prepare(settings: &Settings, layout: &Layout) -> Result<()> {
    let (output, run_dir) = (&settings.output, &settings.output.dir);
    let checkpoint = if output.save == Every::Never { 0 } else { rank_file::bytes(layout) * layout.shards };
    let bytes = checkpoint + if output.save_model { model::bytes(layout) } else { 0 };
    let refuse = |reason: String| Error::Usage(format!("--output_dir {}: {reason}", run_dir.display()));
    let same = || Some(settings.model.as_ref()?.canonicalize().ok()? == folder::of_model(run_dir).canonicalize().ok()?);
    if output.save_model && same() == Some(true) {
        return Err(refuse("the final model would replace that of --model; choose another or --no_save_model".into()));
    }
    let write = || {
        fs::create_dir_all(run_dir)?;
        tempfile::tempfile_in(run_dir)
    };
    write().map_err(|error| refuse(format!("{error}; give a folder in which files can be written")))?;
    folder::clean(run_dir)?;
    let available = limits::disk_available_bytes(run_dir).map_err(|error| failed(run_dir, "statvfs", &error))?;
    if available < bytes {
        return Err(refuse(format!(
            "a checkpoint and the final model take {} ({bytes} bytes) and {} ({available} bytes) are free; give a \
             folder on a larger disk, --save_steps 0 or --no_save_model",
            Bytes(bytes),
            Bytes(available)
        )));
    }
    Ok(())
}
