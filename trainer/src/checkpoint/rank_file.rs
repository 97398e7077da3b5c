//! `rank-R.bin`: shard R of every chunk, one after the other, each as its elements are stored.
//!
//! All ranks' files are laid out alike: groups in order, and of each group parameter, master, first and second
//! moment, as far as the formats have them; a shard is 1 ⁄ shards of the padded group. Nothing lies between. Owns
//! that layout, and the bytes' way between it and chunks.

use crate::error::{Error, Result};
use castor_kernels::{DType, memory::Q8_BLOCK};
use castor_runtime::{ChunkId, Role, StatefulTensorMgr, layout::Layout};
use std::fs::File;
use std::io::{Read, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3Default;

/// Bytes checked at a time.
const PIECE: usize = 4 << 20;

/// Name of a rank's file.
pub(super) fn name(rank: u64) -> String {
    format!("rank-{rank}.bin")
}

/// What a file must be to be the one that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Digest {
    /// Its length.
    pub bytes: u64,
    /// xxh3 of its bytes.
    pub xxh3: u64,
}

/// The chunks of a file, in order.
pub(super) fn chunks(layout: &Layout) -> impl Iterator<Item = ChunkId> + '_ {
    layout.chunk_ids().filter(|chunk| chunk.role() != Role::Gradient)
}

/// Bytes of one chunk in one rank's file.
fn shard_bytes(layout: &Layout, chunk: ChunkId) -> u64 {
    layout.dtype(chunk).bytes(layout.shard_elements(chunk.group()))
}

/// Bytes of one rank's file.
pub(crate) fn bytes(layout: &Layout) -> u64 {
    chunks(layout).map(|chunk| shard_bytes(layout, chunk)).sum()
}

/// Where elements `first .. first + taken` lie in bytes that hold `held` elements: one range, and for 8-bit moments,
/// of which whole blocks are taken, a second with their scales.
fn ranges(dtype: DType, held: u64, first: u64, taken: u64) -> impl Iterator<Item = Range<usize>> {
    let range = |first: u64, end: u64| first as usize..end as usize;
    let (elements, scales) = match dtype {
        DType::Q8 => {
            debug_assert!([held, first, taken].iter().all(|count| count.is_multiple_of(Q8_BLOCK)));
            let scale = |element: u64| held + element / Q8_BLOCK * 4;
            (range(first, first + taken), Some(range(scale(first), scale(first + taken))))
        }
        plain => (range(plain.bytes(first), plain.bytes(first + taken)), None),
    };
    std::iter::once(elements).chain(scales)
}

/// Writes the file of shard `own` to `path`, chunk by chunk, and waits until it is on disk.
///
/// # Errors
/// If a tier or the file system refuses; with path, offset and bytes.
pub(super) fn write(path: &Path, manager: &mut StatefulTensorMgr, own: u64) -> Result<Digest> {
    let mut file = Written::create(path)?;
    let mut bytes = Vec::new();
    for part in parts(manager, own) {
        bytes.resize((part.1.end - part.1.start) as usize, 0);
        manager.read_ranges(&[part], &mut bytes)?;
        file.write(&bytes)?;
    }
    file.finish()
}

/// Shard `own` of every chunk as ranges of what this rank stores, in the order of the file.
pub(super) fn parts(manager: &StatefulTensorMgr, own: u64) -> Vec<(ChunkId, Range<u64>)> {
    let of_chunk = |chunk: ChunkId| {
        let (begin, held) = manager.stored_range(chunk);
        let shard = manager.layout().shard_elements(chunk.group());
        let ranges = ranges(manager.dtype(chunk), held, shard * own - begin, shard);
        ranges.map(move |range| (chunk, range.start as u64..range.end as u64))
    };
    chunks(manager.layout()).flat_map(of_chunk).collect()
}

/// A file that is being written and summed.
pub(super) struct Written {
    path: PathBuf,
    file: File,
    bytes: u64,
    sum: Xxh3Default,
}

impl Written {
    /// Begins the file.
    ///
    /// # Errors
    /// If it cannot be created.
    pub fn create(path: &Path) -> Result<Written> {
        let file = File::create(path).map_err(|error| refused(path, "create", 0, 0, &error))?;
        Ok(Written { path: path.to_owned(), file, bytes: 0, sum: Xxh3Default::new() })
    }

    /// Appends.
    ///
    /// # Errors
    /// If the file system refuses.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let written = self.file.write_all(bytes);
        written.map_err(|error| refused(&self.path, "write", self.bytes, bytes.len() as u64, &error))?;
        self.bytes += bytes.len() as u64;
        self.sum.update(bytes);
        Ok(())
    }

    /// Waits until all is on disk.
    ///
    /// # Errors
    /// If the file system refuses.
    pub fn finish(self) -> Result<Digest> {
        self.file.sync_all().map_err(|error| refused(&self.path, "sync", 0, self.bytes, &error))?;
        Ok(Digest { bytes: self.bytes, xxh3: self.sum.digest() })
    }
}

/// Reads a whole file and holds it against what was written.
///
/// # Errors
/// [`Error::Failed`] naming the file and both values.
pub(super) fn verify(path: &Path, expected: &Digest) -> Result<()> {
    let mut file = File::open(path).map_err(|error| refused(path, "open", 0, 0, &error))?;
    let mut found = Digest { bytes: 0, xxh3: 0 };
    let mut sum = Xxh3Default::new();
    let mut piece = vec![0; PIECE];
    loop {
        let read = file.read(&mut piece);
        match read.map_err(|error| refused(path, "read", found.bytes, PIECE as u64, &error))? {
            0 => break,
            count => {
                sum.update(&piece[..count]);
                found.bytes += count as u64;
            }
        }
    }
    found.xxh3 = sum.digest();
    if found.bytes != expected.bytes {
        return Err(wrong_length(path, found.bytes, expected.bytes));
    }
    if found != *expected {
        return Err(Error::Failed(format!(
            "{}: the checksum is {:016x} and {:016x} was written: the file is damaged",
            path.display(),
            found.xxh3,
            expected.xxh3
        )));
    }
    Ok(())
}

/// A file was cut off, or grew.
pub(super) fn wrong_length(path: &Path, found: u64, expected: u64) -> Error {
    Error::Failed(format!("{}: the file has {found} bytes and {expected} were written", path.display()))
}

/// All ranks' files of a checkpoint, to read from.
pub(super) struct RankFiles {
    layout: Layout,
    /// By chunk: its offset in each file.
    offsets: Vec<u64>,
    files: Vec<(PathBuf, File)>,
}

impl RankFiles {
    /// Opens the files in `folder` that a run laid out as `layout` wrote.
    ///
    /// # Errors
    /// If one cannot be opened.
    pub fn open(folder: &Path, layout: Layout) -> Result<RankFiles> {
        let open = |rank| {
            let path = folder.join(name(rank));
            let file = File::open(&path).map_err(|error| refused(&path, "open", 0, 0, &error))?;
            Ok((path, file))
        };
        let files = (0..layout.shards).map(open).collect::<Result<_>>()?;
        let mut offsets = vec![0; layout.groups.len() * Role::ALL.len()];
        let mut next = 0;
        for chunk in chunks(&layout) {
            offsets[chunk.index()] = next;
            next += shard_bytes(&layout, chunk);
        }
        Ok(RankFiles { layout, offsets, files })
    }

    /// Fills `out` with elements `first .. first + count` of a chunk, as stored. Padding beyond what the run that
    /// wrote the files had is zero, as every padding is. 8-bit moments come in whole blocks.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn read(&self, chunk: ChunkId, first: u64, count: u64, out: &mut [u8]) -> Result<()> {
        let dtype = self.layout.dtype(chunk);
        assert_eq!(out.len() as u64, dtype.bytes(count), "{chunk:?}: wrong number of bytes");
        let shard = self.layout.shard_elements(chunk.group());
        let end = (first + count).min(shard * self.layout.shards);
        if end < first + count {
            out.fill(0);
        }
        let mut at = first;
        while at < end {
            let (rank, within) = (at / shard, at % shard);
            let taken = (shard - within).min(end - at);
            let (path, file) = &self.files[rank as usize];
            let targets = ranges(dtype, count, at - first, taken);
            for (source, target) in ranges(dtype, shard, within, taken).zip(targets) {
                let offset = self.offsets[chunk.index()] + source.start as u64;
                let length = target.len() as u64;
                file.read_exact_at(&mut out[target], offset)
                    .map_err(|error| refused(path, "read", offset, length, &error))?;
            }
            at += taken;
        }
        Ok(())
    }
}

fn refused(path: &Path, call: &'static str, offset: u64, bytes: u64, error: &std::io::Error) -> Error {
    let reason = match error.kind() {
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
            format!("{error}; free space there, or save elsewhere with --output_dir")
        }
        std::io::ErrorKind::NotFound if call == "create" => {
            format!("{error}; --output_dir must be one folder for all hosts")
        }
        _ => error.to_string(),
    };
    Error::Kernels(castor_kernels::Error::File { path: path.to_owned(), call, offset, bytes, reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_named_with_path_and_bytes() {
        let mut full = Written::create(Path::new("/dev/full")).unwrap();
        let error = full.write(&[0; 100]).unwrap_err().to_string();
        assert!(error.contains("/dev/full") && error.contains("100 bytes") && error.contains("space"), "{error}");
    }

    #[test]
    fn blocks_of_moments_bring_their_scales() {
        assert!(ranges(DType::F32, 1024, 256, 512).eq(std::iter::once(1024..3072)));
        assert!(ranges(DType::Q8, 1024, 256, 512).eq([256..768, 1028..1036]));
    }
}
