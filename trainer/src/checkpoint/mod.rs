//! Checkpoints: everything that a run needs to go on bit for bit, and how it comes back.
//!
//! A checkpoint is a folder `checkpoint-STEP` of the run's folder:
//!
//! | file | holds |
//! |---|---|
//! | `rank-R.bin` | rank R's part of every chunk but the gradients, as it is stored (`rank_file.rs`) |
//! | `config.json` | the model's shape, as Hugging Face writes it |
//! | `manifest.json` | progress, what must match, length and checksum of every file: written last |
//!
//! The folder is made as `checkpoint-STEP.tmp` and renamed when all of it is on disk, so a folder with the final
//! name is whole, and a crash at any byte leaves the checkpoints before as they were. Each element is written once,
//! by the rank whose shard it would be with everything sharded, whatever the plugin shards: the files depend on the
//! number of shards alone (of ranks with the same shard the first writes), and a run of any number reads the element
//! ranges that it stores ([`Checkpoint::restore`]).
//!
//! A save holds the run until the files are on disk, or, with snapshots, until the states are copied to host memory,
//! from which threads write them while the run goes on. Either way it is one save at a time, and all ranks agree before
//! the folder gets its name.
//!
//! What random numbers and rows come next follows from seed and step, so no generator is saved.

mod export;
mod facts;
mod folder;
mod in_flight;
mod manifest;
mod model;
mod rank_file;
mod restore;
mod save;
mod snapshot;

pub use export::{export, stored};
pub use facts::{Data, Facts};
pub use folder::not_a_model;
pub use model::save_model;
pub(crate) use rank_file::bytes as rank_bytes;
pub use restore::{Checkpoint, find};
pub use save::{Saved, Saver, prepare, room, save, way_back};

use crate::error::{Error, Result};
use castor_kernels::Backend;
use serde::{Deserialize, Serialize};

/// What a rank tells the others about its part of the work.
#[derive(Serialize, Deserialize)]
enum Word {
    Done(String),
    Failed(String),
}

/// Lets all ranks know how each fared, and what it has to say: all ranks' words, in rank order, or the failure of
/// the first that failed. All ranks must call it.
pub(crate) fn share(backend: &dyn Backend, mine: Result<String>) -> Result<Vec<String>> {
    let word = match &mine {
        Ok(said) => Word::Done(said.clone()),
        Err(error) => Word::Failed(error.to_string()),
    };
    let message = serde_json::to_vec(&word).map_err(|error| Error::Failed(error.to_string()))?;
    let words = backend.exchange(&message);
    mine?;
    let mut said = Vec::new();
    for (rank, word) in words?.iter().enumerate() {
        match serde_json::from_slice(word) {
            Ok(Word::Done(text)) => said.push(text),
            Ok(Word::Failed(reason)) => return Err(Error::Failed(format!("rank {rank}: {reason}"))),
            Err(_) => return Err(Error::Failed(format!("rank {rank} runs another version of castor"))),
        }
    }
    Ok(said)
}

/// As [`share`], for ranks with nothing to say.
pub(crate) fn agree(backend: &dyn Backend, mine: Result<()>) -> Result<()> {
    share(backend, mine.map(|()| String::new())).map(drop)
}

/// A failed call on a file or folder.
fn failed(path: &std::path::Path, call: &str, error: &std::io::Error) -> Error {
    Error::Failed(format!("{}: {call} failed: {error}", path.display()))
}
