//! `manifest.json`: what a checkpoint is, and what its files must be. It sums itself up in its last field.

use super::facts::Facts;
use super::rank_file::{self, Digest};
use super::{failed, folder};
use crate::engine::Progress;
use crate::error::{Error, Result};
use castor_runtime::layout::Formats;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::Path;
use xxhash_rust::xxh3::xxh3_64;

/// Name of the file.
pub(super) const FILE: &str = "manifest.json";
/// Name of the model's shape beside it.
pub(super) const CONFIG: &str = "config.json";
/// Version of the layout of a checkpoint.
const VERSION: u32 = 1;
/// What stands before the manifest's own sum.
const OWN_SUM: &str = ",\n  \"xxh3\": \"";

/// What a checkpoint is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Manifest {
    /// Version of the layout of a checkpoint.
    version: u32,
    /// Version of castor that wrote it.
    castor: String,
    /// Ranks that wrote it: one for each shard.
    pub world: u64,
    /// How far the run was.
    pub progress: Progress,
    /// Element types of the chunks.
    pub formats: Formats,
    /// What the run was.
    pub facts: Facts,
    /// All files but this one.
    files: Vec<Entry>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Entry {
    name: String,
    bytes: u64,
    /// Hexadecimal: JSON's numbers end at 2^53.
    xxh3: String,
}

impl Manifest {
    /// A checkpoint of these files, in any order.
    pub fn new(
        progress: Progress,
        formats: Formats,
        facts: Facts,
        world: u64,
        files: impl IntoIterator<Item = (String, Digest)>,
    ) -> Manifest {
        let entry = |(name, digest): (String, Digest)| Entry {
            name,
            bytes: digest.bytes,
            xxh3: format!("{:016x}", digest.xxh3),
        };
        Manifest {
            version: VERSION,
            castor: env!("CARGO_PKG_VERSION").into(),
            world,
            progress,
            formats,
            facts,
            files: files.into_iter().map(entry).collect(),
        }
    }

    /// Writes it into a folder, so that it is there whole or not at all.
    ///
    /// # Errors
    /// If the file system refuses.
    pub fn write(&self, into: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self).map_err(|error| Error::Failed(error.to_string()))?;
        let sum = xxh3_64(text.as_bytes());
        let body = text.strip_suffix("\n}").expect("a pretty object ends with its brace on a line");
        let (unfinished, path) = (into.join(format!("{FILE}.tmp")), into.join(FILE));
        let mut file = rank_file::Written::create(&unfinished)?;
        file.write(format!("{body}{OWN_SUM}{sum:016x}\"\n}}\n").as_bytes())?;
        file.finish()?;
        fs::rename(&unfinished, &path).map_err(|error| failed(&path, "rename", &error))?;
        folder::sync(into)
    }

    /// Reads that of a checkpoint's folder, and checks that all files are there in full length.
    ///
    /// # Errors
    /// [`Error::Failed`] naming the file that is missing, cut off, damaged or of another version.
    pub fn read(from: &Path) -> Result<Manifest> {
        let path = from.join(FILE);
        let refuse = |reason: String| Error::Failed(format!("{}: {reason}", path.display()));
        let text = fs::read_to_string(&path)
            .map_err(|error| refuse(format!("{error}; without it the checkpoint is not complete")))?;
        let damaged = || refuse("the file is cut off or damaged".into());
        let (body, sum) = text.rsplit_once(OWN_SUM).ok_or_else(damaged)?;
        if sum != format!("{:016x}\"\n}}\n", xxh3_64(format!("{body}\n}}").as_bytes())) {
            return Err(damaged());
        }
        let value: serde_json::Value =
            serde_json::from_str(&text).map_err(|error| refuse(format!("not a manifest: {error}")))?;
        if value["version"] != VERSION {
            return Err(refuse(format!(
                "version {} of the layout; this castor reads version {VERSION}",
                value["version"]
            )));
        }
        let manifest: Manifest =
            serde_json::from_value(value).map_err(|error| refuse(format!("not a manifest: {error}")))?;
        for (name, digest) in manifest.files() {
            let file = from.join(name);
            let found = fs::metadata(&file).map_err(|error| failed(&file, "open", &error))?.len();
            if found != digest.bytes {
                return Err(rank_file::wrong_length(&file, found, digest.bytes));
            }
        }
        Ok(manifest)
    }

    /// All files but the manifest, and what they must be.
    pub fn files(&self) -> impl Iterator<Item = (&str, Digest)> {
        self.files.iter().map(|entry| {
            // What is no number matches no file.
            let xxh3 = u64::from_str_radix(&entry.xxh3, 16).unwrap_or_default();
            (entry.name.as_str(), Digest { bytes: entry.bytes, xxh3 })
        })
    }
}
