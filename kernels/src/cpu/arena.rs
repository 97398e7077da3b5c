//! One tier's memory of the CPU backend: an anonymous, page-aligned map taken once and never resized.
//!
//! Owns the map. Does not know who uses which part of it, nor in which order: that is what streams and
//! marks are for.

use crate::{Error, Result, Tier};
use std::ptr::NonNull;

/// Memory of one tier. Zero bytes until written.
pub(crate) struct Arena {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: an arena is an address and a length that never change; the memory behind it belongs to the
// process, not to a thread. Access is through raw pointers whose users order themselves.
unsafe impl Send for Arena {}
// SAFETY: as above; `&Arena` gives nothing but the address and the length.
unsafe impl Sync for Arena {}

impl Arena {
    /// Takes `bytes` bytes for `tier`.
    ///
    /// # Errors
    /// [`Error::Exhausted`] if the machine has less available, or the system refuses the map.
    pub(crate) fn new(tier: Tier, bytes: u64) -> Result<Arena> {
        let refused =
            |available: u64, hint: String| Error::Exhausted { tier: tier.name(), asked: bytes, available, hint };
        if bytes == 0 {
            return Ok(Arena { base: NonNull::dangling(), bytes: 0 });
        }
        // The system would promise more than it has and kill the process when the promise is called in.
        let available = available_memory();
        if bytes > available {
            return Err(refused(available, "give a smaller budget for this tier, or free memory".into()));
        }
        let Ok(length) = usize::try_from(bytes) else {
            return Err(refused(available, "this is beyond the address space".into()));
        };
        use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
        // SAFETY: a new private map at an address of the system's choice touches no existing memory.
        let base = unsafe {
            mmap_anonymous(std::ptr::null_mut(), length, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        }
        .map_err(|e| refused(available, format!("mmap said: {e}")))?;
        // Fewer page faults and TLB misses. Only advice: a system without huge pages works the same.
        // SAFETY: the range is the map just made; this advice changes no contents.
        let _ = unsafe { madvise(base, length, Advice::LinuxHugepage) };
        let Some(base) = NonNull::new(base.cast::<u8>()) else {
            return Err(refused(available, "mmap gave address 0".into()));
        };
        Ok(Arena { base, bytes: length })
    }

    /// First byte. Valid for [`Arena::bytes`] bytes for as long as the arena lives.
    pub(crate) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Length in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes as u64
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: exactly the map of `new`, and whoever could use it holds a reference to the arena.
            let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
        }
    }
}

/// Bytes of memory that the machine could give without swapping: `MemAvailable` of the kernel, or no limit
/// where the kernel does not say.
pub(crate) fn available_memory() -> u64 {
    let Ok(text) = std::fs::read_to_string("/proc/meminfo") else {
        return u64::MAX;
    };
    text.lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.split_whitespace().next())
        .and_then(|kib| kib.parse::<u64>().ok())
        .map_or(u64::MAX, |kib| kib.saturating_mul(1024))
}
