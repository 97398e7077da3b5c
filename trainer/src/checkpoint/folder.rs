//! The run's folder: which checkpoints are there, and how one appears or disappears in a single step.

use super::failed;
use crate::error::Result;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

const PREFIX: &str = "checkpoint-";
const UNFINISHED: &str = ".tmp";
/// Name of the folder with the final weights, and of all its unfinished forms.
const MODEL: &str = "model";
const UNFINISHED_MODEL: &str = "model.tmp";

/// Folder of step `step`'s checkpoint.
pub(super) fn of_step(run_dir: &Path, step: u64) -> PathBuf {
    run_dir.join(format!("{PREFIX}{step}"))
}

/// Where it is while it is not whole.
pub(super) fn unfinished(run_dir: &Path, step: u64) -> PathBuf {
    run_dir.join(format!("{PREFIX}{step}{UNFINISHED}"))
}

/// Folder of the final weights.
pub(super) fn of_model(run_dir: &Path) -> PathBuf {
    run_dir.join(MODEL)
}

/// Where they are while they are not whole.
pub(super) fn unfinished_model(run_dir: &Path) -> PathBuf {
    run_dir.join(UNFINISHED_MODEL)
}

/// Steps for which there is a folder with a checkpoint's name, ascending by number; none where there is no `run_dir`.
///
/// # Errors
/// If the folder cannot be listed.
pub(super) fn steps(run_dir: &Path) -> Result<Vec<u64>> {
    let named = |name: &String| {
        let step = name.strip_prefix(PREFIX)?.parse().ok()?;
        // `checkpoint-007` is somebody else's.
        (*name == format!("{PREFIX}{step}") && run_dir.join(name).is_dir()).then_some(step)
    };
    let mut steps: Vec<u64> = names(run_dir)?.iter().filter_map(named).collect();
    steps.sort_unstable();
    Ok(steps)
}

/// Why `path` is no model to start from although it holds one: it is a checkpoint, or the folder of a run.
pub fn not_a_model(path: &Path) -> Option<String> {
    let shown = path.display();
    if path.join(super::manifest::FILE).is_file() && path.join(super::rank_file::name(0)).is_file() {
        return Some(format!(
            "{shown} is a checkpoint of Castor: --resume {shown} goes on from it, and `castor export {shown} DIR` writes its \
             weights as a folder for --model"
        ));
    }
    let saved = steps(path).unwrap_or_default().last().map(|step| of_step(path, *step));
    if path.join(super::manifest::CONFIG).is_file() || saved.is_none() && !of_model(path).is_dir() {
        return None;
    }
    Some(match of_model(path) {
        model if model.is_dir() => format!("{shown} is the folder of a run; its final model is {}", model.display()),
        _ => format!(
            "{shown} is the folder of a run; `castor export {shown} DIR` writes the weights of its latest checkpoint"
        ),
    })
}

/// Removes what crashes left behind.
///
/// # Errors
/// If something cannot be removed.
pub(super) fn clean(run_dir: &Path) -> Result<()> {
    for name in names(run_dir)? {
        if name.starts_with(PREFIX) && name.ends_with(UNFINISHED) || name.starts_with(UNFINISHED_MODEL) {
            remove(&run_dir.join(name))?;
        }
    }
    Ok(())
}

/// Removes a checkpoint. Under its own name it is whole until it is gone.
///
/// # Errors
/// If it cannot be removed.
pub(super) fn remove_step(run_dir: &Path, step: u64) -> Result<()> {
    let (folder, doomed) = (of_step(run_dir, step), unfinished(run_dir, step));
    fs::rename(&folder, &doomed).map_err(|error| failed(&folder, "rename", &error))?;
    sync(run_dir)?;
    remove(&doomed)
}

/// Removes a folder with all that is in it, if it is there.
///
/// # Errors
/// If it cannot be removed.
pub(super) fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(failed(folder, "remove", &error)),
        _ => Ok(()),
    }
}

/// Gives the whole folder `new` the name `place`. What had that name is exchanged for it in the same step, where the
/// file system can, and then removed.
///
/// # Errors
/// If it cannot be renamed; then `place` is as it was.
pub(super) fn put_in_place(new: &Path, place: &Path) -> Result<()> {
    if place.exists() {
        match renameat_with(CWD, new, CWD, place, RenameFlags::EXCHANGE) {
            Ok(()) => {
                sync(parent(place))?;
                return remove(new);
            }
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => remove(place)?,
            Err(error) => return Err(failed(place, "rename", &error.into())),
        }
    }
    fs::rename(new, place).map_err(|error| failed(place, "rename", &error))?;
    sync(parent(place))
}

/// Makes the names in a folder as durable as the files.
///
/// # Errors
/// If the system refuses.
pub(super) fn sync(folder: &Path) -> Result<()> {
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(|error| failed(folder, "sync", &error))
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn names(run_dir: &Path) -> Result<Vec<String>> {
    let entries = match fs::read_dir(run_dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(|error| failed(run_dir, "list", &error))?,
    };
    // Names that are not text are not ours.
    Ok(entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_numbers_and_leftovers_are_none() {
        let run = tempfile::tempdir().unwrap();
        for name in ["checkpoint-10", "checkpoint-9", "checkpoint-007", "checkpoint-8.tmp", "checkpoint-x", "model"] {
            fs::create_dir(run.path().join(name)).unwrap();
        }
        fs::write(run.path().join("checkpoint-11"), "a file").unwrap();
        fs::create_dir(run.path().join("model.tmp.tmp-12")).unwrap();
        assert_eq!(steps(run.path()).unwrap(), [9, 10]);
        clean(run.path()).unwrap();
        let is_there = |name: &str| run.path().join(name).exists();
        assert!(!is_there("checkpoint-8.tmp") && !is_there("model.tmp.tmp-12"));
        assert!(is_there("checkpoint-x") && is_there("model"));
        assert!(steps(&run.path().join("nowhere")).unwrap().is_empty());
    }

    #[test]
    fn a_folder_takes_the_place_of_another() {
        let run = tempfile::tempdir().unwrap();
        let (new, place) = (run.path().join("new"), run.path().join("place"));
        for content in ["first", "second"] {
            fs::create_dir(&new).unwrap();
            fs::write(new.join("file"), content).unwrap();
            put_in_place(&new, &place).unwrap();
            assert_eq!(fs::read_to_string(place.join("file")).unwrap(), content);
            assert!(!new.exists());
        }
    }
}
