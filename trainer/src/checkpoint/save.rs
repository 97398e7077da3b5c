//! Saving: when a run saves, one save at a time, and what must be so before the first.

use super::facts::Facts;
use super::in_flight::{Advanced, InFlight, Job};
use super::restore::Checkpoint;
use super::snapshot::Snapshot;
use super::{agree, failed, folder, model, rank_file};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::report::log::{self, SaveRecord};
use crate::settings::{Every, OutputSettings, Settings};
use castor_runtime::layout::Layout;
use castor_runtime::{Bytes, limits};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// When a run saves, where, and how many checkpoints it keeps.
///
/// Of an engine with snapshots a save goes on beside the run: [`Saver::save`] returns once the states are copied, and
/// [`Saver::advance`] and [`Saver::settle`] see to the rest.
pub struct Saver {
    run_dir: PathBuf,
    every: Every,
    limit: Option<u64>,
    facts: Facts,
    /// The step whose checkpoint the run goes on from.
    begun: Option<u64>,
    /// The step that this session saved last, or is saving.
    saved: Option<u64>,
    /// The step that this session saved last and that is on disk.
    on_disk: Option<u64>,
    /// Where the states are copied to; none while it is being written, and on ranks that write nothing.
    snapshot: Option<Snapshot>,
    in_flight: Option<InFlight>,
}

/// What came of saving.
#[derive(Debug, Default)]
pub struct Saved {
    /// Checkpoints that are on disk now.
    pub records: Vec<SaveRecord>,
    /// What to tell the user.
    pub notices: Vec<String>,
}

impl Saver {
    /// Saves `engine` as `output` asks. `begun` is the step whose checkpoint the run goes on from.
    ///
    /// # Errors
    /// If there is no memory for the snapshots that the engine was planned with.
    pub fn new(output: &OutputSettings, facts: Facts, begun: Option<u64>, engine: &mut Engine) -> Result<Saver> {
        Ok(Saver {
            run_dir: output.dir.clone(),
            every: output.save,
            // Where the run itself saves nothing, what it goes on from after a change of the plan is gone again: for
            // that no other checkpoint makes room.
            limit: output.save_total_limit.filter(|_| output.save != Every::Never),
            facts,
            begun,
            saved: None,
            on_disk: None,
            snapshot: snapshot_of(engine)?,
            in_flight: None,
        })
    }

    /// Whether the run is to be saved after step `done` of `total`: as often as asked, and at the end.
    pub fn is_due(&self, done: u64, total: u64) -> bool {
        self.every.is_due(done, total) || done == total && self.every != Every::Never
    }

    /// Saves a run that ends early, if it is one that saves, and waits until all is on disk.
    ///
    /// # Errors
    /// As [`Saver::save`].
    pub fn save_interrupted(&mut self, engine: &mut Engine) -> Result<Saved> {
        match self.every {
            Every::Never => self.settle(engine),
            _ => self.save_to_go_on(engine),
        }
    }

    /// Saves a run that goes on from there at once, whether it is one that saves or not, and waits until all is on
    /// disk.
    ///
    /// # Errors
    /// As [`Saver::save`].
    pub fn save_to_go_on(&mut self, engine: &mut Engine) -> Result<Saved> {
        let mut saved = self.save(engine)?;
        saved.extend(self.settle(engine)?);
        let passing = self.every == Every::Never && self.on_disk == Some(engine.progress().step);
        Ok(if passing { Saved::default() } else { saved })
    }

    /// Goes on from what [`Saver::save_to_go_on`] saved after `step` with an engine that made no step. Where the run is
    /// not one that saves, nothing is left of it. All ranks must call it.
    ///
    /// # Errors
    /// If a rank cannot read it: on every rank.
    pub fn go_on(output: &OutputSettings, step: u64, engine: &mut Engine) -> Result<()> {
        let folder = folder::of_step(&output.dir, step);
        let restored = Checkpoint::open(&folder).and_then(|checkpoint| checkpoint.restore(engine));
        let backend = Arc::clone(engine.manager().backend());
        agree(&*backend, restored)?;
        match output.save == Every::Never && backend.rank() == 0 {
            true => folder::remove_step(&output.dir, step),
            false => Ok(()),
        }
    }

    /// The step whose checkpoint this saver wrote last, and that is on disk.
    pub const fn on_disk(&self) -> Option<u64> {
        self.on_disk
    }

    /// Whether a save goes on beside the run.
    pub const fn is_saving(&self) -> bool {
        self.in_flight.is_some()
    }

    /// Saves the run as it is, unless it just did or the last step casts doubt on the weights
    /// ([`LossScale::doubtful`](crate::loss_scale::LossScale::doubtful)): no good checkpoint shall make room for them.
    /// First waits for the save in flight. All ranks must call it, after [`Engine::finish`].
    ///
    /// # Errors
    /// As [`save`].
    pub fn save(&mut self, engine: &mut Engine) -> Result<Saved> {
        let mut saved = self.settle(engine)?;
        let step = engine.progress().step;
        if engine.progress().loss_scale.doubtful() > 0 {
            saved.notices.push(format!("nothing is saved after step {step}: its loss or gradient norm is not finite"));
            return Ok(saved);
        }
        if [self.begun, self.saved].contains(&Some(step)) {
            return Ok(saved);
        }
        let job = job(&self.run_dir, &self.facts, self.limit, engine)?;
        self.in_flight = Some(InFlight::begin(job, engine, &mut self.snapshot)?);
        self.saved = Some(step);
        if !engine.options().snapshots {
            saved.extend(self.settle(engine)?);
        }
        Ok(saved)
    }

    /// Whether this rank's part of the save in flight is done, so that [`Saver::advance`] would not wait for it.
    pub fn is_ready(&self) -> bool {
        self.in_flight.as_ref().is_some_and(InFlight::is_ready)
    }

    /// Takes the save in flight a stage further: for when all ranks are ready. All ranks must call it.
    ///
    /// # Errors
    /// As [`save`].
    pub fn advance(&mut self, engine: &mut Engine) -> Result<Saved> {
        let mut saved = Saved::default();
        if let Some(save) = self.in_flight.take() {
            match save.advance(&**engine.manager().backend(), &mut self.snapshot)? {
                Advanced::Goes(save) => self.in_flight = Some(save),
                Advanced::Saved(record, notices) => {
                    self.on_disk = Some(record.step);
                    saved.records.push(record);
                    saved.notices = notices;
                }
            }
        }
        Ok(saved)
    }

    /// Waits until no save is in flight. All ranks must call it.
    ///
    /// # Errors
    /// As [`save`].
    pub fn settle(&mut self, engine: &mut Engine) -> Result<Saved> {
        let mut saved = Saved::default();
        while self.in_flight.is_some() {
            saved.extend(self.advance(engine)?);
        }
        Ok(saved)
    }

    /// The run has failed: makes a checkpoint of what is in flight if that takes no other rank. Returns what to tell
    /// the user.
    pub fn rescue(&mut self, engine: &mut Engine) -> Vec<String> {
        let world = engine.manager().backend().world();
        match self.in_flight.take() {
            Some(save) => save.rescue(world),
            None => Vec::new(),
        }
    }

    /// Writes the final weights: as [`save_model`](super::save_model), which all ranks must call. What was just
    /// saved is not gathered again but read from there by rank 0.
    ///
    /// # Errors
    /// As [`save_model`](super::save_model).
    ///
    /// # Panics
    /// If a save is in flight.
    pub fn save_model(&self, tokenizer: &str, engine: &mut Engine) -> Result<PathBuf> {
        assert!(self.in_flight.is_none(), "a save is in flight");
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

impl Saved {
    fn extend(&mut self, later: Saved) {
        self.records.extend(later.records);
        self.notices.extend(later.notices);
    }
}

/// Writes a checkpoint of `engine` into `run_dir`; once it is on disk, of the others those of the lowest steps are
/// removed until `limit` are left. All ranks must call it, after [`Engine::finish`]. Returns what to tell the user,
/// on rank 0.
///
/// # Errors
/// If a rank cannot write: on every rank, with path and bytes. Checkpoints that were there before still are, and
/// nothing unfinished is left.
///
/// # Panics
/// If a step is open.
pub fn save(run_dir: &Path, facts: &Facts, limit: Option<u64>, engine: &mut Engine) -> Result<Vec<String>> {
    let mut snapshot = snapshot_of(engine)?;
    let mut save = InFlight::begin(job(run_dir, facts, limit, engine)?, engine, &mut snapshot)?;
    let backend = Arc::clone(engine.manager().backend());
    loop {
        match save.advance(&*backend, &mut snapshot)? {
            Advanced::Goes(next) => save = next,
            Advanced::Saved(_, notices) => return Ok(notices),
        }
    }
}

/// Where a run that failed can go on from, as is said to the user.
pub fn way_back(run_dir: &Path) -> String {
    // What is there, and not what was begun: a save in flight may not have ended.
    match folder::steps(run_dir).unwrap_or_default().last() {
        Some(step) => {
            let folder = folder::of_step(run_dir, *step);
            format!("the last checkpoint is {}, and --resume latest goes on from it", folder.display())
        }
        None => "no checkpoint was saved to go on from (--save_steps)".into(),
    }
}

/// Refuses a checkpoint for which the disk of `run_dir` has no room.
///
/// # Errors
/// [`Error::Failed`] with both numbers.
pub fn room(run_dir: &Path, layout: &Layout) -> Result<()> {
    let bytes = rank_file::bytes(layout) * layout.shards;
    let available = limits::disk_available_bytes(run_dir).map_err(|error| failed(run_dir, "statvfs", &error))?;
    match available < bytes {
        true => Err(Error::Failed(format!(
            "a checkpoint to go on from takes {} and {} are free in {}",
            Bytes(bytes),
            Bytes(available),
            run_dir.display()
        ))),
        false => Ok(()),
    }
}

/// What there is to save, once no step is open.
fn job(run_dir: &Path, facts: &Facts, limit: Option<u64>, engine: &mut Engine) -> Result<Job> {
    assert!(engine.finish()?.is_none(), "a step is open: its outcome would be lost");
    Ok(Job::of(run_dir, facts, limit, engine))
}

/// The memory for this rank's snapshots, if the engine was planned with them and this rank writes.
fn snapshot_of(engine: &mut Engine) -> Result<Option<Snapshot>> {
    let wanted = engine.options().snapshots;
    let manager = engine.manager();
    let (rank, layout) = (u64::from(manager.backend().rank()), manager.layout());
    (wanted && rank < layout.shards).then(|| Snapshot::new(rank_file::bytes(layout))).transpose()
}

/// Makes a run's folder ready: it is there, free of what crashes left, files can be written, and a checkpoint and the
/// final model fit, as far as they are asked for.
///
/// # Errors
/// [`Error::Usage`] with both numbers, why nothing can be written, or that the final model would replace the first.
pub fn prepare(settings: &Settings, layout: &Layout) -> Result<()> {
    let (output, run_dir) = (&settings.output, &settings.output.dir);
    let checkpoint = if output.save == Every::Never { 0 } else { rank_file::bytes(layout) * layout.shards };
    let model = if output.save_model { model::bytes(layout) } else { 0 };
    let bytes = checkpoint + model;
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
    // Before cleaning, for a save of a run that goes on there is no crash's leaving.
    log::refuse_two(run_dir)?;
    folder::clean(run_dir)?;
    let available = limits::disk_available_bytes(run_dir).map_err(|error| failed(run_dir, "statvfs", &error))?;
    if available < bytes {
        let (what, less) = match (checkpoint > 0, model > 0) {
            (true, true) => ("a checkpoint and the final model take", ", --save_steps 0 or --no_save_model"),
            (true, false) => ("a checkpoint takes", " or --save_steps 0"),
            _ => ("the final model takes", " or --no_save_model"),
        };
        return Err(refuse(format!(
            "{what} {} ({bytes} bytes) and {} ({available} bytes) are free; give a folder on a larger disk{less}",
            Bytes(bytes),
            Bytes(available)
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blueprint::formats;
    use crate::config::ModelConfig;
    use crate::model::{Shape, groups};
    use crate::settings::raw::{Origin, Raw};
    use castor_kernels::DType;
    use castor_runtime::layout::Sharding;

    /// A disk without room is refused with the ways out that are left.
    #[test]
    fn what_no_disk_holds() {
        let huge = serde_json::json!({"vocab_size": 1 << 24, "hidden_size": 1 << 18, "intermediate_size": 1 << 18,
            "num_hidden_layers": 512, "num_attention_heads": 2048});
        let (config, _) = ModelConfig::from_value(&huge, Path::new("huge.json")).unwrap();
        let whole = Sharding { parameters: false, gradients: false, optimizer: false };
        let formats = formats(DType::F32, DType::F32, DType::F32);
        let layout = Layout::new(groups::specs(&Shape::from(&config)), formats, whole, 1);
        let folder = tempfile::tempdir().unwrap();
        for (save_steps, save_model, takes, way_out) in [
            ("1", "true", "a checkpoint and the final model take", "larger disk, --save_steps 0 or --no_save_model"),
            ("1", "false", "a checkpoint takes", "larger disk or --save_steps 0"),
            ("0", "true", "the final model takes", "larger disk or --no_save_model"),
        ] {
            let mut raw = Raw::default();
            let output = folder.path().display().to_string();
            for (key, value) in [("output_dir", &*output), ("save_steps", save_steps), ("save_model", save_model)] {
                raw.set(key, vec![value.into()], Origin::Flag).unwrap();
            }
            let settings = Settings::resolve(&raw, Vec::new()).unwrap();
            let said = prepare(&settings, &layout).unwrap_err().to_string();
            assert!(said.contains(takes) && said.ends_with(way_out), "{said}");
        }
    }
}
