//! The final weights: what a run leaves for other programs.

use super::export::Stored;
use super::restore::Checkpoint;
use super::{agree, failed, folder};
use crate::config::ModelConfig;
use crate::data;
use crate::engine::Engine;
use crate::error::Result;
use crate::source::TensorSource;
use crate::weights::{self, ExportDType};
use castor_kernels::DType;
use castor_runtime::{GroupId, layout::Layout};
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What belongs to a tokenizer; the first is it.
const TOKENIZER_FILES: [&str; 4] =
    ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"];
/// Bytes of tensors of a weight file, at most: what transformers cuts at.
pub(super) const FILE_BYTES: u64 = 5_000_000_000;

/// The type of exported weights that loses nothing the run computed with.
const fn stored_as(parameter: DType) -> ExportDType {
    match parameter {
        DType::Bf16 => ExportDType::Bf16,
        DType::F16 => ExportDType::F16,
        _ => ExportDType::F32,
    }
}

/// Bytes of the final weights.
pub(super) fn bytes(layout: &Layout) -> u64 {
    layout.formats.parameter.bytes(layout.used())
}

/// Writes the weights as a Hugging Face folder `model` in `run_dir`, in place of an older one, with the files of
/// `tokenizer` (its folder or file; `bytes` has none). All ranks must call it; rank 0 writes, a group of tensors
/// at a time. Returns the folder.
///
/// # Errors
/// If rank 0 cannot write: on every rank. An older folder is as it was.
pub fn save_model(run_dir: &Path, tokenizer: &str, engine: &mut Engine) -> Result<PathBuf> {
    let backend = Arc::clone(engine.manager().backend());
    let (config, formats) = (engine.options().config.clone(), engine.options().formats);
    let source = Gathered { engine: RefCell::new(engine), held: RefCell::default() };
    let written = match backend.rank() {
        0 => write(run_dir, tokenizer, &config, formats.parameter, &source),
        _ => Ok(()),
    };
    // The other ranks give what they store of every group, whether rank 0 could write it or not.
    let rest = source.read_rest();
    agree(&*backend, written.and(rest))?;
    Ok(folder::of_model(run_dir))
}

/// As [`save_model`], from a checkpoint that is on disk already: for rank 0 alone.
///
/// # Errors
/// If a file cannot be read or written. An older folder is as it was.
pub(super) fn save_model_of(checkpoint: &Path, run_dir: &Path, tokenizer: &str) -> Result<PathBuf> {
    let checkpoint = Checkpoint::open(checkpoint)?;
    write(run_dir, tokenizer, &checkpoint.config()?, checkpoint.formats().parameter, &Stored::open(&checkpoint)?)?;
    Ok(folder::of_model(run_dir))
}

fn write(
    run_dir: &Path,
    tokenizer: &str,
    config: &ModelConfig,
    parameter: DType,
    source: &dyn TensorSource,
) -> Result<()> {
    let unfinished = folder::unfinished_model(run_dir);
    folder::remove(&unfinished)?;
    let written = weights::export(&unfinished, config, stored_as(parameter), FILE_BYTES, source)
        .and_then(|()| if tokenizer == "bytes" { Ok(()) } else { copy_tokenizer(Path::new(tokenizer), &unfinished) })
        .and_then(|()| folder::put_in_place(&unfinished, &folder::of_model(run_dir)));
    if written.is_err() {
        // The first error is the one to report.
        let _ = folder::remove(&unfinished);
    }
    written
}

fn copy_tokenizer(from: &Path, into: &Path) -> Result<()> {
    let copy = |file: &Path, name: &str| {
        let target = into.join(name);
        std::fs::copy(file, &target).map(drop).map_err(|error| failed(&target, "copy", &error))
    };
    if data::is_gguf(from) {
        return data::write_gguf_tokenizer(from, into);
    }
    if from.is_file() {
        return copy(from, TOKENIZER_FILES[0]);
    }
    for name in TOKENIZER_FILES {
        let file = from.join(name);
        if file.is_file() {
            copy(&file, name)?;
        }
    }
    Ok(())
}

/// The engine's weights, asked for in the order of the groups.
struct Gathered<'a> {
    engine: RefCell<&'a mut Engine>,
    held: RefCell<Held>,
}

/// The groups read so far, and the last one's weights.
#[derive(Default)]
struct Held {
    read: u32,
    weights: Vec<f32>,
}

impl Gathered<'_> {
    /// Reads the next group.
    fn advance(&self) -> Result<()> {
        let mut held = self.held.borrow_mut();
        let group = GroupId(held.read);
        held.read += 1;
        held.weights = self.engine.borrow_mut().read_group(group)?;
        Ok(())
    }

    /// Reads all groups that were not.
    fn read_rest(&self) -> Result<()> {
        let groups = self.engine.borrow().groups().count();
        while u64::from(self.held.borrow().read) < groups {
            self.advance()?;
        }
        Ok(())
    }
}

impl TensorSource for Gathered<'_> {
    fn read(&self, name: &str, first: u64, out: &mut [f32]) -> Result<()> {
        let part = self.engine.borrow().groups().part(name).clone();
        while self.held.borrow().read <= part.group.0 {
            self.advance()?;
        }
        let held = self.held.borrow();
        assert_eq!(held.read, part.group.0 + 1, "{name} is asked for after its group");
        let first = (part.offset + first) as usize;
        out.copy_from_slice(&held.weights[first..first + out.len()]);
        Ok(())
    }
}
