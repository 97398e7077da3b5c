//! The driver's context, checked calls, kept failures, and the two arenas (device and pinned host).
//!
//! It owns memory. It does not know streams (see `marks`) or what the bytes mean.

use crate::{Error, Result};
use cudarc::driver::sys::{self, CUdeviceptr, CUresult};
use cudarc::driver::{CudaContext, DriverError};
use parking_lot::Mutex;
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Turns a driver's answer into a result that names the call.
pub(crate) fn check(call: &'static str, code: CUresult) -> Result<()> {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(refusal(call, DriverError(code))) }
}

/// A driver's refusal as this crate's error.
pub(crate) fn refusal(call: &'static str, error: DriverError) -> Error {
    let name = error.error_name().map_or_else(|_| format!("{:?}", error.0), |n| n.to_string_lossy().into_owned());
    let text = error.error_string().map_or_else(|_| String::new(), |t| format!(", {}", t.to_string_lossy()));
    Error::Device { call: call.to_owned(), reason: format!("{name}{text}") }
}

/// The first failure of queued work: kept until somebody joins, and from then on returned by every join,
/// because what was computed after it cannot be trusted.
#[derive(Default)]
pub(crate) struct Failures {
    any: AtomicBool,
    first: Mutex<Option<Error>>,
}

impl Failures {
    /// Keeps a failure, unless an earlier one is kept already.
    pub(crate) fn keep<T>(&self, result: Result<T>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                self.first.lock().get_or_insert(error);
                self.any.store(true, Ordering::Release);
                None
            }
        }
    }

    /// The kept failure.
    pub(crate) fn check(&self) -> Result<()> {
        if !self.any.load(Ordering::Acquire) {
            return Ok(());
        }
        self.first.lock().clone().map_or(Ok(()), Err)
    }
}

/// Opens the primary context of a device. Event tracking of cudarc is off: order is this crate's business.
pub(crate) fn open_context(ordinal: usize) -> Result<Arc<CudaContext>> {
    let context = CudaContext::new(ordinal).map_err(|error| match error.0 {
        CUresult::CUDA_ERROR_INVALID_DEVICE => Error::Device {
            call: "cuDeviceGet".into(),
            reason: format!("there is no CUDA device {ordinal}; see `castor doctor` for those there are"),
        },
        _ => refusal("cuDevicePrimaryCtxRetain", error),
    })?;
    // SAFETY: no memory or stream of cudarc's own is used, so nothing relies on its tracking.
    unsafe { context.disable_event_tracking() };
    Ok(context)
}

/// Device memory of exactly the bytes asked for.
pub(crate) struct DeviceArena {
    context: Arc<CudaContext>,
    /// Address of the first byte; 0 if `bytes` is 0.
    pub(crate) base: CUdeviceptr,
    /// Length in bytes.
    pub(crate) bytes: u64,
}

impl DeviceArena {
    pub(crate) fn new(context: &Arc<CudaContext>, bytes: u64) -> Result<Self> {
        let mut base = 0;
        if bytes > 0 {
            // SAFETY: writes one address; the context is current (the caller bound it).
            let code = unsafe { sys::cuMemAlloc_v2(&mut base, bytes as usize) };
            if code == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
                let (free, _) = context.mem_get_info().map_err(|e| refusal("cuMemGetInfo", e))?;
                return Err(Error::Exhausted {
                    tier: "device",
                    asked: bytes,
                    available: free as u64,
                    hint: "lower --device-memory, or stop the other processes that use this GPU".into(),
                });
            }
            check("cuMemAlloc", code)?;
        }
        Ok(DeviceArena { context: context.clone(), base, bytes })
    }
}

impl Drop for DeviceArena {
    fn drop(&mut self) {
        if self.base != 0 && self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated in `new`, freed once. A failure at the end of life has no one to go to.
            let _ = unsafe { sys::cuMemFree_v2(self.base) };
        }
    }
}

/// Host memory is registered in pieces of this many bytes, so that several threads can do it. A copy must
/// not cross from one registered piece into the next: see [`HostArena::pieces`].
const PIECE_BYTES: u64 = 1 << 30;

/// Threads that touch and register the host arena.
const PINNING_THREADS: usize = 8;

/// Pinned host memory: one anonymous mapping with huge pages, registered with the driver. Plain pages, so
/// that the NVMe ring can use the same bytes.
pub(crate) struct HostArena {
    context: Arc<CudaContext>,
    /// First byte; dangling if `bytes` is 0.
    pub(crate) base: *mut u8,
    /// Length in bytes as asked for.
    pub(crate) bytes: u64,
    mapped_bytes: u64,
}

// SAFETY: the arena is plain memory at a fixed address; who may touch which part when is decided by the
// order of streams, which is the contract of `Memory` and `Order`.
unsafe impl Send for HostArena {}
// SAFETY: as above.
unsafe impl Sync for HostArena {}

impl HostArena {
    pub(crate) fn new(context: &Arc<CudaContext>, bytes: u64) -> Result<Self> {
        const HUGE_PAGE: u64 = 2 << 20;
        if bytes == 0 {
            return Ok(HostArena {
                context: context.clone(),
                base: std::ptr::NonNull::dangling().as_ptr(),
                bytes,
                mapped_bytes: 0,
            });
        }
        let exhausted =
            |hint: String| Error::Exhausted { tier: "host", asked: bytes, available: available_host_bytes(), hint };
        if bytes > available_host_bytes() {
            return Err(exhausted("lower --host-memory: pinned memory cannot be swapped out".into()));
        }
        let mapped_bytes = bytes.next_multiple_of(HUGE_PAGE);
        // SAFETY: a new anonymous mapping; the kernel chooses the address.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped_bytes as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(exhausted(format!("mmap failed: {}", std::io::Error::last_os_error())));
        }
        // SAFETY: the mapping just made. Advice only: without huge pages it is merely slower.
        unsafe { libc::madvise(base, mapped_bytes as usize, libc::MADV_HUGEPAGE) };
        // From here on, dropping the arena undoes the mapping and what is registered of it.
        let arena = HostArena { context: context.clone(), base: base.cast(), bytes, mapped_bytes };
        arena.pin()?;
        Ok(arena)
    }

    /// Touches every page and registers every piece, from several threads: the zeroing of pages by the
    /// kernel is what takes the time.
    fn pin(&self) -> Result<()> {
        let next = AtomicUsize::new(0);
        let failures = Failures::default();
        let pieces = self.mapped_bytes.div_ceil(PIECE_BYTES) as usize;
        std::thread::scope(|scope| {
            for _ in 0..PINNING_THREADS.min(pieces) {
                scope.spawn(|| {
                    if failures.keep(self.context.bind_to_thread().map_err(|e| refusal("cuCtxSetCurrent", e))).is_none()
                    {
                        return;
                    }
                    loop {
                        let piece = next.fetch_add(1, Ordering::Relaxed);
                        if piece >= pieces || failures.check().is_err() {
                            return;
                        }
                        failures.keep(self.pin_piece(piece as u64 * PIECE_BYTES));
                    }
                });
            }
        });
        failures.check()
    }

    fn pin_piece(&self, offset: u64) -> Result<()> {
        const PAGE: u64 = 4096;
        let bytes = PIECE_BYTES.min(self.mapped_bytes - offset);
        // SAFETY: the piece lies inside the mapping, and no other thread has it.
        unsafe {
            let start = self.base.add(offset as usize);
            for page in (0..bytes).step_by(PAGE as usize) {
                start.add(page as usize).write_volatile(0);
            }
            check(
                "cuMemHostRegister",
                sys::cuMemHostRegister_v2(start.cast::<c_void>(), bytes as usize, sys::CU_MEMHOSTREGISTER_PORTABLE),
            )
        }
        .map_err(|error| match error {
            Error::Device { call, reason } => Error::Device {
                call,
                reason: format!("{reason} (pinning {bytes} bytes; raise `ulimit -l` or lower --host-memory)"),
            },
            other => other,
        })
    }

    /// The parts of `bytes` from `offset` on that lie in one registered piece each: `(offset, bytes)`.
    pub(crate) fn pieces(offset: u64, bytes: u64) -> impl Iterator<Item = (u64, u64)> {
        let end = offset + bytes;
        let mut at = offset;
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let part = (at / PIECE_BYTES + 1) * PIECE_BYTES;
            let start = at;
            at = part.min(end);
            Some((start, at - start))
        })
    }
}

impl Drop for HostArena {
    fn drop(&mut self) {
        if self.mapped_bytes == 0 {
            return;
        }
        let bound = self.context.bind_to_thread().is_ok();
        for offset in (0..self.mapped_bytes).step_by(PIECE_BYTES as usize) {
            if bound {
                // SAFETY: the start of a piece of this mapping. Of a piece that was never registered the
                // driver says so, and nothing is lost.
                let _ = unsafe { sys::cuMemHostUnregister(self.base.add(offset as usize).cast()) };
            }
        }
        // SAFETY: mapped in `new`, unmapped once.
        unsafe { libc::munmap(self.base.cast(), self.mapped_bytes as usize) };
    }
}

/// Host bytes that the control group's limit still leaves. Without a limit the kernel's own estimate is not
/// used to refuse: there are machines whose memory grows as it is touched.
fn available_host_bytes() -> u64 {
    let text = |name| std::fs::read_to_string(format!("/sys/fs/cgroup/memory.{name}")).unwrap_or_default();
    let number = |name| text(name).trim().parse::<u64>().ok();
    let used = number("current").unwrap_or(0).saturating_sub(cached_bytes(&text("stat")));
    number("max").map_or(u64::MAX, |limit| limit.saturating_sub(used))
}

/// Of the bytes that a control group uses those of files, by its `memory.stat`: the kernel takes them away where they
/// are wanted. After a checkpoint they fill the group to its limit.
fn cached_bytes(stat: &str) -> u64 {
    let bytes =
        |line: &str| line.strip_prefix("active_file ").or(line.strip_prefix("inactive_file "))?.parse::<u64>().ok();
    stat.lines().filter_map(bytes).sum()
}

/// A registered page of host memory that the device sees at the same time: counters and small results.
pub(crate) struct SharedPage {
    context: Arc<CudaContext>,
    base: *mut u8,
    device: CUdeviceptr,
}

// SAFETY: accessed only through atomics or through slots handed out to one user at a time.
unsafe impl Send for SharedPage {}
// SAFETY: as above.
unsafe impl Sync for SharedPage {}

impl SharedPage {
    /// Bytes of the page.
    pub(crate) const BYTES: usize = 4096;

    pub(crate) fn new(context: &Arc<CudaContext>) -> Result<Self> {
        // SAFETY: a new anonymous mapping of one page; it is zero.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                Self::BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(Error::Exhausted {
                tier: "host",
                asked: Self::BYTES as u64,
                available: 0,
                hint: format!("mmap failed: {}", std::io::Error::last_os_error()),
            });
        }
        let mut page = SharedPage { context: context.clone(), base: base.cast(), device: 0 };
        // SAFETY: the mapping just made; writes one address.
        unsafe {
            let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
            check("cuMemHostRegister", sys::cuMemHostRegister_v2(base, Self::BYTES, flags))?;
            check("cuMemHostGetDevicePointer", sys::cuMemHostGetDevicePointer_v2(&mut page.device, base, 0))?;
        }
        Ok(page)
    }

    /// Host address of a byte of the page.
    pub(crate) fn host(&self, offset: usize) -> *mut u8 {
        assert!(offset < Self::BYTES);
        // SAFETY: inside the page.
        unsafe { self.base.add(offset) }
    }

    /// Device address of a byte of the page.
    pub(crate) fn device(&self, offset: usize) -> CUdeviceptr {
        assert!(offset < Self::BYTES);
        self.device + offset as u64
    }
}

impl Drop for SharedPage {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: registered in `new` (or not, and then the driver says so).
            let _ = unsafe { sys::cuMemHostUnregister(self.base.cast()) };
        }
        // SAFETY: mapped in `new`, unmapped once.
        unsafe { libc::munmap(self.base.cast(), Self::BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_files_hold_of_a_group_is_not_in_use() {
        assert_eq!(cached_bytes("anon 7\nfile 60\ninactive_file 20\nactive_file 30\nunevictable 1\n"), 50);
        assert_eq!(cached_bytes(""), 0);
    }

    #[test]
    fn pieces_never_cross_a_registration() {
        let spans = [(0, 1), (PIECE_BYTES - 1, 2), (5, 3 * PIECE_BYTES), (PIECE_BYTES, PIECE_BYTES), (7, 0)];
        for (offset, bytes) in spans {
            let mut at = offset;
            for (start, length) in HostArena::pieces(offset, bytes) {
                assert_eq!(start, at);
                assert!(length > 0 && start / PIECE_BYTES == (start + length - 1) / PIECE_BYTES);
                at += length;
            }
            assert_eq!(at, offset + bytes);
        }
    }
}
