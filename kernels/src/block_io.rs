//! skeleton
#![allow(missing_docs)]
use crate::Result;
use std::path::Path;
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rung { Uring, Pool, Buffered, Mapped }
#[derive(Clone, Debug)]
pub struct BlockOptions { pub rung: Option<Rung>, pub checksums: bool }
impl Default for BlockOptions { fn default() -> Self { BlockOptions { rung: None, checksums: true } } }
pub struct BlockFile { bytes: u64 }
impl BlockFile {
    pub fn create(_folder: &Path, bytes: u64, _options: &BlockOptions) -> Result<BlockFile> { Ok(BlockFile { bytes }) }
    pub fn rung(&self) -> Rung { Rung::Pool }
    pub fn bytes(&self) -> u64 { self.bytes }
    pub fn read(&self, _offset: u64, _out: &mut [u8]) -> Result<()> { Ok(()) }
    pub fn write(&self, _offset: u64, _bytes: &[u8]) -> Result<()> { Ok(()) }
    /// # Safety
    /// x
    pub(crate) unsafe fn register(&self, _base: *mut u8, _bytes: u64) {}
}
