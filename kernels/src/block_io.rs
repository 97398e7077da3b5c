//! The NVMe tier's file: one file of fixed size, read and written in whole blocks past the page cache.
//!
//! Owns the file, the way it is driven (a [`Rung`]) and the checksums of what was written. The file has no
//! name in its folder, so nothing stays behind however the process ends. It does not know what lies where.
//! One thread may read while another writes.

mod checksums;
mod queue;

use crate::{Error, Result};
use checksums::Checksums;
use parking_lot::Mutex;
use queue::{MapQueue, Queue, RingQueue, Transfer, Workers};
use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Offsets, lengths and memory addresses are multiples of this.
pub const BLOCK_BYTES: u64 = 4096;

/// How a file is driven, best first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rung {
    /// io_uring past the page cache.
    Ring,
    /// Threads with pread and pwrite past the page cache.
    Direct,
    /// Threads with pread and pwrite through the page cache.
    Buffered,
    /// A shared map of the file. I/O errors on it kill the process: the last resort.
    Mapped,
}

impl Rung {
    /// All rungs, best first.
    pub const ALL: [Rung; 4] = [Rung::Ring, Rung::Direct, Rung::Buffered, Rung::Mapped];

    /// For reports.
    pub const fn name(self) -> &'static str {
        match self {
            Rung::Ring => "io_uring, direct",
            Rung::Direct => "pread/pwrite threads, direct",
            Rung::Buffered => "pread/pwrite threads, buffered",
            Rung::Mapped => "memory map",
        }
    }
}

/// How to drive the file.
#[derive(Clone, Debug)]
pub struct BlockOptions {
    /// This rung and no other. None: the best that works here.
    pub rung: Option<Rung>,
    /// Whether what is read back is compared with the checksum of what was written.
    pub checksums: bool,
    /// Spans whose checksums are kept; those beyond are not checked.
    pub checksums_count: usize,
}

impl Default for BlockOptions {
    fn default() -> Self {
        BlockOptions { rung: None, checksums: true, checksums_count: 16384 }
    }
}

/// A nameless file of fixed size.
pub struct BlockFile {
    // Queues before workers: the order in which they may drop.
    reads: Mutex<Box<dyn Queue>>,
    writes: Mutex<Box<dyn Queue>>,
    _workers: Option<Workers>,
    /// To do to the file what a bad disk would.
    #[cfg(test)]
    file: Arc<File>,
    path: PathBuf,
    bytes: u64,
    rung: Rung,
    registered: AtomicBool,
    refused: Vec<(Rung, String)>,
    checksums: Option<Mutex<Checksums>>,
}

impl BlockFile {
    /// Takes `bytes` (rounded up to whole blocks) of the file system of `folder`, which must exist, and
    /// tries the rungs.
    ///
    /// # Errors
    /// [`Error::File`] if the folder cannot be written, has not the room, or no allowed rung works.
    pub fn create(folder: &Path, bytes: u64, options: &BlockOptions) -> Result<BlockFile> {
        let bytes = bytes.max(1).div_ceil(BLOCK_BYTES) * BLOCK_BYTES;
        let (file, path) = open_nameless(folder)?;
        take(&file, &path, bytes)?;
        let file = Arc::new(file);
        let mut refused = Vec::new();
        for rung in Rung::ALL {
            if options.rung.is_some_and(|only| only != rung) {
                continue;
            }
            match drive(&file, rung) {
                Ok((reads, writes, workers)) => {
                    return Ok(BlockFile {
                        reads: Mutex::new(reads),
                        writes: Mutex::new(writes),
                        _workers: workers,
                        #[cfg(test)]
                        file,
                        path,
                        bytes,
                        rung,
                        registered: AtomicBool::new(false),
                        refused,
                        checksums: options.checksums.then(|| Mutex::new(Checksums::new(options.checksums_count))),
                    });
                }
                Err(error) => refused.push((rung, error.to_string())),
            }
        }
        let tried: Vec<String> = refused.iter().map(|(rung, why)| format!("{}: {why}", rung.name())).collect();
        Err(Error::File {
            path,
            call: "probe",
            offset: 0,
            bytes: BLOCK_BYTES,
            reason: format!("no way of driving the file works ({}); choose a folder on another disk", tried.join("; ")),
        })
    }

    /// How it is driven.
    pub fn rung(&self) -> Rung {
        self.rung
    }

    /// The better rungs that do not work here, and why.
    pub fn refused(&self) -> &[(Rung, String)] {
        &self.refused
    }

    /// Whether host memory is registered with the kernel, which spares it a look-up per request.
    pub fn registered(&self) -> bool {
        self.registered.load(Ordering::Relaxed)
    }

    /// Length in bytes, whole blocks.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Registers memory that reads and writes will use, where the rung can and the system allows it; else
    /// everything works the same without.
    ///
    /// # Safety
    /// The memory stays mapped for as long as the file lives.
    pub(crate) unsafe fn register(&self, base: *mut u8, bytes: u64) {
        // SAFETY: passed on to the caller.
        let both = unsafe { self.reads.lock().register(base, bytes) && self.writes.lock().register(base, bytes) };
        self.registered.store(both, Ordering::Relaxed);
    }

    /// Fills `out` from `offset` on. Returns when it is there and, if exactly this span was written and
    /// its checksum kept, found to be what was written.
    ///
    /// # Errors
    /// [`Error::File`]: the disk refused, or the checksum differs.
    ///
    /// # Panics
    /// If offset, length or address are not whole blocks or the span lies outside of the file.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let bytes = out.len() as u64;
        let transfer = Transfer { write: false, address: out.as_mut_ptr(), bytes, offset };
        self.check(&transfer);
        // SAFETY: `out` is borrowed for the whole call, which returns only when no request is in flight.
        let result = unsafe { queue::carry_out(self.reads.lock().as_mut(), transfer) };
        result.map_err(|(piece, error)| failure(&self.path, "read", piece.offset, u64::from(piece.bytes), &error))?;
        let Some(checksums) = &self.checksums else { return Ok(()) };
        let Some(written) = checksums.lock().get(offset, bytes) else { return Ok(()) };
        let read = checksums::of(out);
        if read != written {
            return Err(Error::File {
                path: self.path.clone(),
                call: "read",
                offset,
                bytes,
                reason: format!(
                    "checksum {read:016x} differs from {written:016x} at the time of writing: the disk, its driver \
                     or another process changed the data; resume from the last checkpoint on another disk"
                ),
            });
        }
        Ok(())
    }

    /// Writes `bytes` from `offset` on. Returns when the disk has taken them.
    ///
    /// # Errors
    /// [`Error::File`]: the disk refused.
    ///
    /// # Panics
    /// If offset, length or address are not whole blocks or the span lies outside of the file.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let length = bytes.len() as u64;
        let transfer = Transfer { write: true, address: bytes.as_ptr().cast_mut(), bytes: length, offset };
        self.check(&transfer);
        if let Some(checksums) = &self.checksums {
            checksums.lock().forget(offset, length);
        }
        // SAFETY: `bytes` is borrowed for the whole call, which returns only when no request is in flight;
        // a write only reads it.
        let result = unsafe { queue::carry_out(self.writes.lock().as_mut(), transfer) };
        result.map_err(|(piece, error)| failure(&self.path, "write", piece.offset, u64::from(piece.bytes), &error))?;
        if let Some(checksums) = &self.checksums {
            let sum = checksums::of(bytes);
            checksums.lock().keep(offset, length, sum);
        }
        Ok(())
    }

    #[track_caller]
    fn check(&self, transfer: &Transfer) {
        let Transfer { address, bytes, offset, .. } = *transfer;
        let whole = [offset, bytes, address.addr() as u64].iter().all(|n| n.is_multiple_of(BLOCK_BYTES));
        assert!(whole, "file transfer of {bytes} bytes at offset {offset}, address {address:p}: not whole blocks");
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        assert!(inside, "file transfer of {bytes} bytes at {offset} in a file of {} bytes", self.bytes);
    }
}

/// A new file in `folder` without a name there, and a path to call it by.
fn open_nameless(folder: &Path) -> Result<(File, PathBuf)> {
    use std::hash::{BuildHasher, Hasher};
    let random = std::hash::RandomState::new().build_hasher().finish();
    let path = folder.join(format!("castor-nvme-{}-{random:016x}", std::process::id()));
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    if let Ok(file) = rustix::fs::open(folder, flags | OFlags::TMPFILE, Mode::RUSR | Mode::WUSR) {
        return Ok((file.into(), path));
    }
    // A file system without nameless files: unlinked right after it is opened.
    let refused = |call, error: rustix::io::Errno| failure(&path, call, 0, 0, &error.into());
    let file = rustix::fs::open(&path, flags | OFlags::CREATE | OFlags::EXCL, Mode::RUSR | Mode::WUSR)
        .map_err(|e| refused("open", e))?;
    rustix::fs::unlink(&path).map_err(|e| refused("unlink", e))?;
    Ok((file.into(), path))
}

/// Takes the whole file's room from its file system, so that a full disk shows here and not in a step.
fn take(file: &File, path: &Path, bytes: u64) -> Result<()> {
    use rustix::fs::{FallocateFlags, fallocate, fstatvfs};
    use rustix::io::Errno;
    // Asked before, since some file systems fill up to the brim before they refuse.
    if let Ok(system) = fstatvfs(file) {
        let free = system.f_bavail.saturating_mul(system.f_frsize);
        if bytes > free {
            let mut error = failure(path, "fallocate", 0, bytes, &Errno::NOSPC.into());
            if let Error::File { reason, .. } = &mut error {
                reason.push_str(&format!(" ({free} bytes are free here)"));
            }
            return Err(error);
        }
    }
    loop {
        match fallocate(file, FallocateFlags::empty(), 0, bytes) {
            Ok(()) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => break,
            Err(error) => return Err(failure(path, "fallocate", 0, bytes, &error.into())),
        }
    }
    use std::os::unix::fs::FileExt;
    let zeros = vec![0; 1 << 20];
    let mut offset = 0;
    while offset < bytes {
        let piece = (zeros.len() as u64).min(bytes - offset);
        file.write_all_at(&zeros[..piece as usize], offset).map_err(|e| failure(path, "write", offset, piece, &e))?;
        offset += piece;
    }
    file.sync_data().map_err(|e| failure(path, "fdatasync", 0, bytes, &e))
}

type Driven = (Box<dyn Queue>, Box<dyn Queue>, Option<Workers>);

/// Sets up `rung` and sends one block there and back on it.
fn drive(file: &Arc<File>, rung: Rung) -> io::Result<Driven> {
    let direct = matches!(rung, Rung::Ring | Rung::Direct);
    let flags = rustix::fs::fcntl_getfl(&**file)?;
    rustix::fs::fcntl_setfl(&**file, if direct { flags | OFlags::DIRECT } else { flags - OFlags::DIRECT })?;
    let mut driven: Driven = match rung {
        Rung::Ring => {
            let ring = || RingQueue::new(Arc::clone(file));
            (Box::new(ring()?), Box::new(ring()?), None)
        }
        Rung::Direct | Rung::Buffered => {
            let (reads, writes, workers) = Workers::start(file)?;
            (Box::new(reads), Box::new(writes), Some(workers))
        }
        Rung::Mapped => {
            let map = Arc::new(memmap2::MmapRaw::map_raw(&**file)?);
            (Box::new(MapQueue::new(Arc::clone(&map))), Box::new(MapQueue::new(map)), None)
        }
    };
    #[repr(align(4096))]
    struct Block([u8; BLOCK_BYTES as usize]);
    let mut block = Block([0xA5; BLOCK_BYTES as usize]);
    let mut there_and_back = |write| {
        let address = block.0.as_mut_ptr();
        let transfer = Transfer { write, address, bytes: BLOCK_BYTES, offset: 0 };
        let queue = if write { &mut driven.1 } else { &mut driven.0 };
        // SAFETY: the block outlives the call, which returns only when no request is in flight.
        let result = unsafe { queue::carry_out(queue.as_mut(), transfer) };
        block.0.iter_mut().for_each(|byte| *byte ^= if write { 0xFF } else { 0 });
        result.map_err(|(_, error)| error)
    };
    there_and_back(true)?;
    there_and_back(false)?;
    if block.0.iter().any(|&byte| byte != 0xA5) {
        return Err(io::Error::other("a block came back with other bytes"));
    }
    Ok(driven)
}

/// The system's error in words, with what to try.
fn failure(path: &Path, call: &'static str, offset: u64, bytes: u64, error: &io::Error) -> Error {
    use io::ErrorKind as Kind;
    let hint = match error.kind() {
        Kind::StorageFull | Kind::QuotaExceeded => "; give a smaller NVMe budget, free space, or choose another folder",
        Kind::FileTooLarge => "; raise the file size limit (ulimit -f) or give a smaller NVMe budget",
        Kind::ReadOnlyFilesystem | Kind::PermissionDenied => "; choose a folder that this user may write",
        Kind::NotFound | Kind::NotADirectory => "; the folder must exist",
        _ => "",
    };
    Error::File { path: path.to_path_buf(), call, offset, bytes, reason: format!("{error}{hint}") }
}

#[cfg(test)]
mod tests;
