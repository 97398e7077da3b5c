//! A run's record: `train_log.jsonl`, and the two result files that Hugging Face's scripts write.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::progress::{Rate, StepRecord};
use super::write_whole;
use crate::error::{Error, Result};

/// Name of the log in the run's folder.
pub const FILE: &str = "train_log.jsonl";

/// A line of the log.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Line {
    /// Begins a session: configuration, plan, machine; whatever the run wants to remember.
    Header { run: Value },
    /// A step.
    Step(StepRecord),
    /// An evaluation.
    Evaluation(EvaluationRecord),
    /// A checkpoint that is on disk.
    Save(SaveRecord),
    /// A change of the plan within a session.
    Plan(PlanRecord),
    /// Ends a session: its metrics, or why it ended.
    Footer { results: Value },
}

/// What an evaluation found.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvaluationRecord {
    /// Steps made before it.
    pub step: u64,
    /// Mean loss of the tokens that count.
    #[serde(deserialize_with = "super::progress::finite_or_nan")]
    pub loss: f64,
    /// Tokens that count.
    pub tokens: u64,
}

/// A checkpoint that was written.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SaveRecord {
    /// The step that it is of.
    pub step: u64,
    /// Bytes of each rank's file.
    pub bytes: u64,
    /// Seconds from its beginning until it was on disk under its name.
    pub seconds: f64,
    /// Seconds of those for which the run waited.
    pub held_seconds: f64,
}

/// A change of the plan while a session goes on, and what became of the plan before.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PlanRecord {
    /// Steps made before it.
    pub step: u64,
    /// Why: "measured", or the budgets that were asked for.
    pub reason: String,
    /// Seconds of a step of the plan before, as planned by the rates of the new one.
    pub before_s: f64,
    /// Seconds of a step of the new plan.
    pub after_s: f64,
    /// Seconds of a step as measured, where that is the reason.
    pub measured_s: Option<f64>,
    /// Seconds from the last step of the plan before to the first of the new one.
    pub took_s: f64,
    /// What the new plan may use, bytes by tier.
    pub budgets: BTreeMap<String, u64>,
    /// Bytes by link of the last step of the plan before, as planned.
    pub planned_bytes: BTreeMap<String, u64>,
    /// The same as counted.
    pub counted_bytes: BTreeMap<String, u64>,
}

/// Why no run goes on in a folder; none if one does, as far as its log can say: the file is locked meanwhile.
///
/// # Errors
/// [`Error::Failed`] if the log cannot be opened.
pub fn goes_on(run_dir: &Path) -> Result<Option<String>> {
    let path = run_dir.join(FILE);
    let file = match File::open(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Ok(Some(format!(
                "it is not the folder of a run, for it holds no {FILE}; give a run's --output_dir"
            )));
        }
        file => file.map_err(|error| Error::Failed(format!("{}: {error}", path.display())))?,
    };
    // A file system that knows no locks cannot say, and the run that is there may.
    let free = flock(&file, FlockOperation::NonBlockingLockShared).is_ok();
    Ok(free.then(|| "no run goes on there; budgets of one that is to start are flags of `castor train`".into()))
}

/// Refuses a folder in which another run writes its log: each would remove and replace what the other saves.
///
/// # Errors
/// [`Error::Usage`] if one does. What cannot be said, as on a file system that knows no locks, is no reason.
pub fn refuse_two(run_dir: &Path) -> Result<()> {
    let Ok(file) = File::open(run_dir.join(FILE)) else { return Ok(()) };
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Err(Errno::WOULDBLOCK) => Err(taken(run_dir)),
        _ => Ok(()),
    }
}

fn taken(run_dir: &Path) -> Error {
    let dir = run_dir.display();
    Error::Usage(format!("--output_dir {dir}: a run goes on there; give another folder, or wait until it has ended"))
}

/// The log while it is written. Each line is on disk, as far as the system is concerned, before the next step.
pub struct RunLog {
    file: File,
    path: PathBuf,
}

impl RunLog {
    /// Opens the log of a session, behind those of earlier sessions, and writes its header. A session that goes on
    /// `after` a step takes out first what is of later steps and will be again: each step is in the log once.
    ///
    /// # Errors
    /// [`Error::Failed`] with path and reason; [`Error::Usage`] if what is there is no log.
    pub fn begin(run_dir: &Path, after: Option<u64>, header: Value) -> Result<RunLog> {
        let path = run_dir.join(FILE);
        let failed =
            |error: std::io::Error| Error::Failed(format!("{} cannot be opened for writing: {error}", path.display()));
        std::fs::create_dir_all(run_dir).map_err(failed)?;
        refuse_two(run_dir)?;
        take_out_later(&path, after)?;
        // What no report could read at the end is refused before the first step.
        RunLog::read(run_dir)?;
        let file = OpenOptions::new().create(true).append(true).open(&path).map_err(failed)?;
        // For [`goes_on`] and [`refuse_two`]; a file system that knows no locks is no reason not to train.
        if flock(&file, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK) {
            return Err(taken(run_dir));
        }
        let mut log = RunLog { file, path };
        log.line(&Line::Header { run: header })?;
        Ok(log)
    }

    /// Writes a step.
    ///
    /// # Errors
    /// [`Error::Failed`] with path and reason.
    pub fn step(&mut self, record: &StepRecord) -> Result<()> {
        self.line(&Line::Step(record.clone()))
    }

    /// Writes an evaluation.
    ///
    /// # Errors
    /// [`Error::Failed`] with path and reason.
    pub fn evaluation(&mut self, record: &EvaluationRecord) -> Result<()> {
        self.line(&Line::Evaluation(*record))
    }

    /// Writes a save.
    ///
    /// # Errors
    /// [`Error::Failed`] with path and reason.
    pub fn save(&mut self, record: &SaveRecord) -> Result<()> {
        self.line(&Line::Save(*record))
    }

    /// Writes a change of the plan.
    ///
    /// # Errors
    /// [`Error::Failed`] with path and reason.
    pub fn plan(&mut self, record: &PlanRecord) -> Result<()> {
        self.line(&Line::Plan(record.clone()))
    }

    /// Ends the session.
    ///
    /// # Errors
    /// [`Error::Failed`] with path and reason.
    pub fn end(mut self, results: Value) -> Result<()> {
        self.line(&Line::Footer { results })
    }

    fn line(&mut self, line: &Line) -> Result<()> {
        let failed = |reason: String| {
            Error::Failed(format!(
                "{}: a line cannot be written: {reason}; make room there, or give --output_dir a folder on another disk",
                self.path.display()
            ))
        };
        let mut text = serde_json::to_vec(line).map_err(|error| failed(error.to_string()))?;
        text.push(b'\n');
        self.file.write_all(&text).map_err(|error| failed(error.to_string()))
    }

    /// Reads the log of a folder; none if there is no such file.
    ///
    /// A step that was trained again after a resume counts once, with its last values; a last line cut by a crash
    /// is left out.
    ///
    /// # Errors
    /// [`Error::Usage`] with file, line and reason.
    pub fn read(run_dir: &Path) -> Result<Option<Run>> {
        let path = run_dir.join(FILE);
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::Usage(unreadable(&path, error))),
        };
        let mut run = Run::default();
        let (mut steps, mut evaluations) = (BTreeMap::new(), BTreeMap::new());
        let cut = !text.ends_with('\n');
        let lines: Vec<&str> = text.lines().collect();
        for (index, line) in lines.iter().enumerate() {
            match serde_json::from_str(line) {
                Ok(Line::Header { run: header }) => (run.header, run.footer) = (header, None),
                Ok(Line::Footer { results }) => run.footer = Some(results),
                Ok(Line::Step(record)) => {
                    // A resumed session repeats steps from its checkpoint on: those after it never happened.
                    drop(steps.split_off(&record.step));
                    drop(evaluations.split_off(&record.step));
                    steps.insert(record.step, record);
                }
                Ok(Line::Evaluation(record)) => {
                    evaluations.insert(record.step, record);
                }
                Ok(Line::Save(record)) => run.saves.push(record),
                Ok(Line::Plan(record)) => run.plans.push(record),
                Err(_) if cut && index + 1 == lines.len() => {}
                Err(error) => {
                    let reason = format!("line {} is no line of a log ({error})", index + 1);
                    return Err(Error::Usage(unreadable(&path, reason)));
                }
            }
        }
        run.steps = steps.into_values().collect();
        run.evaluations = evaluations.into_values().collect();
        Ok(Some(run))
    }
}

/// What is said of a log that cannot be read, and what helps.
fn unreadable(path: &Path, reason: impl std::fmt::Display) -> String {
    format!("{}: {reason}; move the file away, no run needs it to go on", path.display())
}

/// Takes out of the log at `path` what is of steps `after` that one, and a last line that a crash cut off. The file is
/// exchanged for the new one in a single step; what a crash in the middle left of that is removed or written again.
fn take_out_later(path: &Path, after: Option<u64>) -> Result<()> {
    let unfinished = path.with_extension("jsonl.tmp");
    let failed = |at: &Path, error: std::io::Error| Error::Failed(format!("{}: {error}", at.display()));
    match std::fs::remove_file(&unfinished) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(failed(&unfinished, error)),
        _ => {}
    }
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(Error::Usage(unreadable(path, error))),
    };
    let stays = |line: &&str| {
        let step = match serde_json::from_str(line) {
            Ok(Line::Step(record)) => record.step,
            Ok(Line::Evaluation(record)) => record.step,
            Ok(Line::Save(record)) => record.step,
            Ok(Line::Plan(record)) => record.step,
            // What is broken is for the reader to name.
            Ok(Line::Header { .. } | Line::Footer { .. }) | Err(_) => 0,
        };
        line.ends_with('\n') && after.is_none_or(|after| step <= after)
    };
    let kept: String = text.split_inclusive('\n').filter(stays).collect();
    if kept == text {
        return Ok(());
    }
    let write = || {
        let mut file = File::create(&unfinished)?;
        file.write_all(kept.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&unfinished, path)
    };
    write().map_err(|error| failed(&unfinished, error))
}

/// A log that was read.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// The last session's header.
    pub header: Value,
    /// Every step once, in order.
    pub steps: Vec<StepRecord>,
    /// Every evaluation, in order.
    pub evaluations: Vec<EvaluationRecord>,
    /// Every save of all sessions, in the order in which they ended.
    pub saves: Vec<SaveRecord>,
    /// Every change of the plan within a session, in order.
    pub plans: Vec<PlanRecord>,
    /// The last session's end; none if it never got there.
    pub footer: Option<Value>,
}

/// The tokenizer that the log beside `folder` says its run had, `bytes` or a path that is there: of a run's model or
/// checkpoint.
pub fn recorded_tokenizer(folder: &Path) -> Option<String> {
    let run = RunLog::read(folder.canonicalize().ok()?.parent()?).ok()??;
    run.tokenizer().filter(|name| *name == "bytes" || Path::new(name).exists()).map(str::to_owned)
}

impl Run {
    /// What the user chose that makes results inexact, if anything.
    pub fn inexact(&self) -> Option<&str> {
        self.header.get("inexact")?.as_str()
    }

    /// The tokenizer that the last session had, `bytes` or a path, if it is known.
    pub fn tokenizer(&self) -> Option<&str> {
        self.header.get("tokenizer")?.as_str()
    }

    /// How often the run was saved, the seconds that took in all, and for how many of those it waited.
    pub fn saving(&self) -> Option<(usize, f64, f64)> {
        let sum = |of: fn(&SaveRecord) -> f64| self.saves.iter().map(of).sum::<f64>();
        (!self.saves.is_empty()).then(|| (self.saves.len(), sum(|save| save.seconds), sum(|save| save.held_seconds)))
    }

    /// Tokens per second over the last steady steps.
    pub fn tokens_per_second(&self) -> Option<f64> {
        let mut rate = Rate::default();
        for step in &self.steps {
            rate.push(step.tokens, step.seconds);
        }
        rate.tokens_per_second()
    }
}

/// Writes `train_results.json` (or as `of` names it), and adds the same values to `all_results.json`: raw values,
/// sorted, indented by four.
///
/// # Errors
/// [`Error::Failed`] with path and reason.
pub fn write_results(run_dir: &Path, of: &str, values: &BTreeMap<String, Value>) -> Result<()> {
    write_whole(&run_dir.join(format!("{of}_results.json")), &pretty(values))?;
    let all = run_dir.join("all_results.json");
    // A file of an earlier session that cannot be read any more is replaced.
    let mut merged: BTreeMap<String, Value> =
        std::fs::read(&all).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
    merged.extend(values.clone());
    write_whole(&all, &pretty(&merged))
}

fn pretty(values: &BTreeMap<String, Value>) -> Vec<u8> {
    let mut bytes = Vec::new();
    let indent = serde_json::ser::PrettyFormatter::with_indent(b"    ");
    let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, indent);
    // Writing strings and numbers to memory cannot fail.
    let _ = values.serialize(&mut serializer);
    bytes.push(b'\n');
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn record(step: u64, loss: f64) -> StepRecord {
        StepRecord { step, loss, tokens: 10, seconds: 0.1, ..StepRecord::default() }
    }

    #[test]
    fn what_was_written_is_read_and_a_resumed_step_counts_once() {
        let folder = tempfile::tempdir().unwrap();
        let run_dir = folder.path().join("run");
        let mut log = RunLog::begin(&run_dir, None, json!({"session": 1})).unwrap();
        for step in 1..=5 {
            log.step(&record(step, step as f64)).unwrap();
            log.evaluation(&EvaluationRecord { step, loss: f64::NAN, tokens: 0 }).unwrap();
        }
        drop(log);
        let mut log = RunLog::begin(&run_dir, None, json!({"session": 2})).unwrap();
        for step in 3..=4 {
            log.step(&record(step, 30.0)).unwrap();
        }
        log.step(&record(5, f64::NAN)).unwrap();
        log.evaluation(&EvaluationRecord { step: 5, loss: 2.5, tokens: 7 }).unwrap();
        for step in [3, 5] {
            log.save(&SaveRecord { step, bytes: 100, seconds: 2.0, held_seconds: 0.25 }).unwrap();
        }
        log.end(json!({"train_loss": 1.5})).unwrap();
        let run = RunLog::read(&run_dir).unwrap().unwrap();
        assert_eq!(run.header, json!({"session": 2}));
        let losses: Vec<f64> = run.steps.iter().map(|step| step.loss).collect();
        assert_eq!(losses[..4], [1.0, 2.0, 30.0, 30.0]);
        assert!(losses[4].is_nan());
        let steps: Vec<u64> = run.evaluations.iter().map(|evaluation| evaluation.step).collect();
        assert_eq!(steps, [1, 2, 5]);
        assert!(run.evaluations[0].loss.is_nan());
        assert_eq!(run.evaluations[2], EvaluationRecord { step: 5, loss: 2.5, tokens: 7 });
        assert_eq!(run.footer, Some(json!({"train_loss": 1.5})));
        assert_eq!(run.saving(), Some((2, 4.0, 0.5)));
    }

    /// What a resumed session does again is in the log once, whatever a crash did to the last line.
    #[test]
    fn a_resumed_session_takes_out_what_it_does_again() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = RunLog::begin(folder.path(), None, json!({"session": 1})).unwrap();
        for step in 1..=5 {
            log.step(&record(step, step as f64)).unwrap();
            log.evaluation(&EvaluationRecord { step, loss: 1.0, tokens: 1 }).unwrap();
            log.save(&SaveRecord { step, bytes: 1, seconds: 1.0, held_seconds: 1.0 }).unwrap();
        }
        log.end(json!({"train_loss": 3.0})).unwrap();
        let path = folder.path().join(FILE);
        let whole = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, format!("{whole}{{\"kind\":\"st")).unwrap();
        let unfinished = folder.path().join("train_log.jsonl.tmp");
        std::fs::write(&unfinished, "of a crash inside of this").unwrap();
        let mut log = RunLog::begin(folder.path(), Some(2), json!({"session": 2})).unwrap();
        log.step(&record(3, 30.0)).unwrap();
        drop(log);
        assert!(!unfinished.exists());
        let text = std::fs::read_to_string(&path).unwrap();
        let first: Vec<&str> = whole
            .lines()
            .filter(|line| !["3", "4", "5"].iter().any(|step| line.contains(&format!("\"step\":{step},"))))
            .collect();
        assert!(text.starts_with(&first.join("\n")), "the rest is as it was: {text}");
        let count = |what: &str| text.matches(what).count();
        assert_eq!((count("\"kind\":\"step\""), count("\"evaluation\""), count("\"save\"")), (3, 2, 2), "{text}");
        assert_eq!((count("\"header\""), count("\"footer\"")), (2, 1), "{text}");
        let run = RunLog::read(folder.path()).unwrap().unwrap();
        assert_eq!(run.steps.iter().map(|step| step.loss).collect::<Vec<_>>(), [1.0, 2.0, 30.0]);
        assert_eq!(run.footer, None, "the last session has not ended");
    }

    #[test]
    fn changes_of_the_plan_are_kept_and_a_log_that_is_written_is_locked() {
        let folder = tempfile::tempdir().unwrap();

        assert!(goes_on(folder.path()).unwrap().is_some_and(|why| why.contains("not the folder of a run")));
        let mut log = RunLog::begin(folder.path(), None, Value::Null).unwrap();
        let moved = BTreeMap::from([("host to device".into(), 7)]);
        let plans = [3, 9].map(|step| PlanRecord {
            step,
            reason: "measured".into(),
            measured_s: (step == 3).then_some(0.25),
            planned_bytes: moved.clone(),
            ..PlanRecord::default()
        });
        plans.iter().try_for_each(|plan| log.plan(plan)).unwrap();
        assert_eq!(goes_on(folder.path()).unwrap(), None);
        let second = RunLog::begin(folder.path(), Some(3), Value::Null).map(|_| ()).unwrap_err();
        assert!(second.to_string().contains("a run goes on there"), "{second}");
        assert_eq!(RunLog::read(folder.path()).unwrap().unwrap().plans.len(), 2, "the log of the first is as it was");
        drop(log);
        assert!(goes_on(folder.path()).unwrap().is_some_and(|why| why.contains("no run goes on")));
        assert_eq!(RunLog::read(folder.path()).unwrap().unwrap().plans, plans);
        drop(RunLog::begin(folder.path(), Some(5), Value::Null).unwrap());
        assert_eq!(RunLog::read(folder.path()).unwrap().unwrap().plans, plans[..1], "the other never happened");
    }

    #[test]
    fn a_cut_last_line_is_left_out_and_a_broken_middle_one_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = RunLog::begin(folder.path(), None, Value::Null).unwrap();
        log.step(&record(1, 1.0)).unwrap();
        drop(log);
        let path = folder.path().join(FILE);
        let whole = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, format!("{whole}{{\"kind\":\"st")).unwrap();
        assert_eq!(RunLog::read(folder.path()).unwrap().unwrap().steps.len(), 1);
        std::fs::write(&path, format!("{{\"kind\":\n{whole}")).unwrap();
        let message = RunLog::read(folder.path()).unwrap_err().to_string();
        assert!(message.contains("train_log.jsonl: line 1 is no line") && message.contains("move"), "{message}");
        let begun = RunLog::begin(folder.path(), None, Value::Null);
        assert_eq!(begun.err().map(|error| error.to_string()), Some(message), "before the first step");
        std::fs::write(&path, [0xff, 0xfe]).unwrap();
        let message = RunLog::begin(folder.path(), Some(1), Value::Null).err().unwrap().to_string();
        assert!(message.contains("UTF-8; move the file away"), "{message}");
    }

    #[test]
    fn result_files_are_sorted_and_merged() {
        let folder = tempfile::tempdir().unwrap();
        let all = folder.path().join("all_results.json");
        std::fs::write(&all, "{\"eval_loss\": 2.5, \"epoch\": 1.0}").unwrap();
        let values = BTreeMap::from([("train_loss".into(), json!(4.0)), ("epoch".into(), json!(2.0))]);
        write_results(folder.path(), "train", &values).unwrap();
        let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
        assert_eq!(read("train_results.json"), "{\n    \"epoch\": 2.0,\n    \"train_loss\": 4.0\n}\n");
        assert_eq!(
            read("all_results.json"),
            "{\n    \"epoch\": 2.0,\n    \"eval_loss\": 2.5,\n    \"train_loss\": 4.0\n}\n"
        );
    }
    #[test]
    fn a_full_disk_is_named_with_the_way_out() {
        let path = PathBuf::from("/dev/full");
        let mut log = RunLog { file: OpenOptions::new().write(true).open(&path).unwrap(), path };
        let said = log.step(&record(1, 1.0)).unwrap_err().to_string();
        assert!(said.contains("/dev/full: a line cannot be written: No space left"), "{said}");
        assert!(said.contains("make room there, or give --output_dir a folder on another disk"), "{said}");
    }
}
