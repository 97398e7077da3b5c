//! Glue between the NVMe engines and [`crate::block_io`]: which file call a span of the tier becomes.

use crate::block_io::{BlockFile, BlockOptions};
use crate::{Error, Result};
use std::path::Path;

/// The NVMe tier's arena: one file, taken in full when it is made.
pub(crate) struct NvmeArena {
    file: BlockFile,
    /// Length in bytes.
    pub(crate) bytes: u64,
}

/// What file offsets, lengths and addresses are multiples of.
pub(crate) const BLOCK_BYTES: u64 = 4096;

impl NvmeArena {
    pub(crate) fn new(folder: Option<&Path>, bytes: u64, options: &BlockOptions) -> Result<Self> {
        let Some(folder) = folder else {
            return Err(Error::Unsupported {
                what: "an NVMe tier without a folder".into(),
                backend: "cuda",
                instead: "name a folder on a local disk".into(),
            });
        };
        Ok(NvmeArena { file: BlockFile::create(folder, bytes, options)?, bytes })
    }

    /// Tells the file of memory that it will read to and write from.
    ///
    /// # Safety
    /// The memory stays mapped for as long as the file lives.
    pub(crate) unsafe fn register(&self, base: *mut u8, bytes: u64) {
        // SAFETY: passed on to the caller.
        unsafe { self.file.register(base, bytes) };
    }

    /// Reads into host memory.
    ///
    /// # Safety
    /// `target` must be `bytes` of memory that nothing else uses meanwhile.
    pub(crate) unsafe fn read(&self, offset: u64, target: *mut u8, bytes: u64) -> Result<()> {
        // SAFETY: passed on to the caller.
        self.file.read(offset, unsafe { std::slice::from_raw_parts_mut(target, bytes as usize) })
    }

    /// Writes from host memory.
    ///
    /// # Safety
    /// `source` must be `bytes` of memory that nothing writes meanwhile.
    pub(crate) unsafe fn write(&self, offset: u64, source: *const u8, bytes: u64) -> Result<()> {
        // SAFETY: passed on to the caller.
        self.file.write(offset, unsafe { std::slice::from_raw_parts(source, bytes as usize) })
    }
}
