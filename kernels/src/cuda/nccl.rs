//! Sums and gathers across GPUs through NCCL, on the collective stream.
//!
//! Bound here and not through generated bindings: those do not find `libnccl.so.2` where PyTorch installs it,
//! and return C enums as Rust enums. Communicators are made over the ranks' [`Link`]: one of all ranks, and where data
//! is split over a part of them one of that part and one of the ranks that hold the same shard.
//!
//! The thread of the steps calls them and the watcher ends them: a lock lies between the two.
//!
//! NCCL adds in its own order, which is fixed for a given machine and world: results repeat, but with more
//! than two ranks they can differ in the last bits from the CPU backend's rank order.

use super::Ptr;
use super::driver::{DeviceArena, check};
use super::loader::nccl_function;
use super::watch::Progress;
use crate::link::Link;
use crate::{Among, DType, Error, Result};
use cudarc::driver::CudaContext;
use cudarc::driver::sys::{self, CUstream};
use parking_lot::Mutex;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// `ncclUniqueId`
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

type Comm = *mut c_void;

struct Library {
    unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    init_rank: unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int) -> c_int,
    async_error: unsafe extern "C" fn(Comm, *mut c_int) -> c_int,
    abort: unsafe extern "C" fn(Comm) -> c_int,
    destroy: unsafe extern "C" fn(Comm) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    last_error: unsafe extern "C" fn(Comm) -> *const c_char,
    all_gather: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Comm, CUstream) -> c_int,
    reduce_scatter: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, CUstream) -> c_int,
    all_reduce: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, CUstream) -> c_int,
}

/// `ncclSum`
const SUM: c_int = 0;
/// `ncclUint8`
const BYTES: c_int = 1;
/// `ncclInProgress`
const IN_PROGRESS: c_int = 7;

/// Bytes of the collectives of [`Nccl::warm_up`], ascending: by the size NCCL chooses algorithm and protocol, and each
/// has buffers of its own.
const WARM_UP: [u64; 4] = [64, 256 << 10, 4 << 20, 256 << 20];

/// One rank's communicators.
pub(crate) struct Nccl {
    library: Library,
    /// The first is of all ranks, the others of the ranks among which it is not the same. After [`Nccl::abort`]: why.
    comms: Mutex<Result<Vec<Comm>>>,
    /// In the order of [`Among`]: which communicator; none among oneself alone.
    of: [Option<usize>; 3],
    /// Whether [`Nccl::join`] is over.
    joined: AtomicBool,
    progress: Progress,
    rank: u32,
}

// SAFETY: the communicators are handles, which are used under the lock.
unsafe impl Send for Nccl {}
// SAFETY: as above.
unsafe impl Sync for Nccl {}

impl Nccl {
    /// Opens the library for the ranks of `link`, of which there are several. Its communicators are to be made by
    /// [`Nccl::join`].
    pub(crate) fn new(context: &Arc<CudaContext>, link: &Link) -> Result<Self> {
        // SAFETY: the C types of nccl.h, version 2.
        let library = unsafe {
            Library {
                unique_id: nccl_function("ncclGetUniqueId")?,
                init_rank: nccl_function("ncclCommInitRank")?,
                async_error: nccl_function("ncclCommGetAsyncError")?,
                abort: nccl_function("ncclCommAbort")?,
                destroy: nccl_function("ncclCommDestroy")?,
                error_string: nccl_function("ncclGetErrorString")?,
                last_error: nccl_function("ncclGetLastError")?,
                all_gather: nccl_function("ncclAllGather")?,
                reduce_scatter: nccl_function("ncclReduceScatter")?,
                all_reduce: nccl_function("ncclAllReduce")?,
            }
        };
        let mut last = 0;
        let of = [Among::All, Among::Shards, Among::Replicas].map(|among| match link.ranks_among(among).len() as u32 {
            1 => None,
            all if all == link.world() => Some(0),
            _ => {
                last += 1;
                Some(last)
            }
        });
        Ok(Nccl {
            library,
            comms: Mutex::new(Ok(Vec::new())),
            of,
            joined: AtomicBool::new(false),
            progress: Progress::new(context)?,
            rank: link.rank(),
        })
    }

    /// Joins the ranks of `link`: makes the communicators and has them warm up on `stream`, for only then NCCL connects
    /// them. Blocks until all have come.
    pub(crate) fn join(&self, context: &Arc<CudaContext>, link: &Link, stream: CUstream) -> Result<()> {
        let mut made = 0;
        for among in [Among::All, Among::Shards, Among::Replicas] {
            if self.of[among as usize] == Some(made) {
                self.make(link, among)?;
                made += 1;
            }
        }
        self.warm_up(context, u64::from(link.shards()), stream)?;
        self.joined.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Has every kind of collective done once on `stream`, in all types that ranks sum, and waits. NCCL takes memory of
    /// the device for each when it first comes, and later the arena has left none.
    fn warm_up(&self, context: &Arc<CudaContext>, shards: u64, stream: CUstream) -> Result<()> {
        let largest = WARM_UP[WARM_UP.len() - 1];
        let memory = DeviceArena::new(context, 2 * largest)?;
        // SAFETY: the memory just taken, on the stream that the collectives are given next.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(memory.base, 0, memory.bytes as usize, stream) })?;
        for bytes in WARM_UP {
            for dtype in [DType::F32, DType::F64, DType::Bf16, DType::F16] {
                let elements = (bytes / dtype.bytes(1)).next_multiple_of(shards);
                let full = Ptr { address: memory.base, dtype, elements };
                let shard = Ptr { address: memory.base + largest, dtype, elements: elements / shards };
                for among in [Among::All, Among::Shards, Among::Replicas] {
                    self.all_reduce(among, stream, full)?;
                }
                self.reduce_scatter(stream, full, shard)?;
                self.all_gather(stream, shard, full)?;
            }
        }
        // SAFETY: a live stream. Where a peer is gone the watcher ends what it waits for.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream) })
    }

    /// Whether [`Nccl::join`] is over.
    pub(crate) fn joined(&self) -> bool {
        self.joined.load(Ordering::Relaxed)
    }

    /// How far the collectives are, and before them the making of each communicator.
    pub(crate) fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Makes a communicator of these ranks. All ranks of the link make one at a time, each with its own.
    fn make(&self, link: &Link, among: Among) -> Result<()> {
        let ranks = link.ranks_among(among);
        let first = ranks[0];
        let mut id = UniqueId([0; 128]);
        let mut made = Ok(());
        if link.rank() == first {
            // SAFETY: writes one id.
            made = self.check("ncclGetUniqueId", unsafe { (self.library.unique_id)(&mut id) });
        }
        // Exchanged even after a failure, so that the others do not wait for it.
        let told = link.exchange(if link.rank() == first && made.is_ok() { &id.0 } else { &[] })?;
        made?;
        let id = told.get(first as usize).and_then(|bytes| <[u8; 128]>::try_from(bytes.as_slice()).ok());
        let Some(id) = id else {
            return Err(Error::Peer { rank: first, reason: "it could not start NCCL; see its own message".into() });
        };
        let place = ranks.iter().take_while(|&&rank| rank != link.rank()).count();
        let mut comm: Comm = std::ptr::null_mut();
        let status = self.progress.here(among, || {
            // SAFETY: writes one communicator; the context of this rank's device is current.
            unsafe { (self.library.init_rank)(&mut comm, ranks.len() as c_int, UniqueId(id), place as c_int) }
        });
        // What a failed call left in the handle is not ours to destroy.
        self.check("ncclCommInitRank", status)?;
        self.comms.lock().as_mut().map_err(|why| why.clone())?.push(comm);
        Ok(())
    }

    /// Gives `stream` a collective of these ranks. False: this rank is alone among them.
    fn collective(
        &self,
        among: Among,
        stream: CUstream,
        name: &'static str,
        call: impl FnOnce(Comm) -> c_int,
    ) -> Result<bool> {
        let Some(place) = self.of[among as usize] else { return Ok(false) };
        let called = self.progress.around(among, stream, || match &*self.comms.lock() {
            Ok(comms) => self.check(name, call(comms[place])),
            Err(why) => Err(why.clone()),
        })?;
        called.map(|()| true)
    }

    fn check(&self, call: &str, status: c_int) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        let text = |pointer: *const c_char| {
            if pointer.is_null() {
                return String::new();
            }
            // SAFETY: NCCL returns static, NUL-terminated text.
            unsafe { CStr::from_ptr(pointer) }.to_string_lossy().replace('\n', " ")
        };
        // SAFETY: both take any value; the text is that of the last failure whatever the communicator, which may be
        // null.
        let (name, last) = unsafe {
            (text((self.library.error_string)(status)), text((self.library.last_error)(std::ptr::null_mut())))
        };
        Err(Error::Device {
            call: call.to_owned(),
            reason: format!(
                "rank {}: NCCL: {name}{}{last}; NCCL_DEBUG=WARN says more",
                self.rank,
                if last.is_empty() { "" } else { ": " }
            ),
        })
    }

    /// A failure noticed by NCCL's own threads, such as a peer that is gone. Nothing is said during a call and after
    /// [`Nccl::abort`].
    pub(crate) fn failure(&self) -> Result<()> {
        let Some(comms) = self.comms.try_lock() else { return Ok(()) };
        for &comm in comms.iter().flatten() {
            let mut state = 0;
            // SAFETY: a live communicator; writes one int.
            let status = unsafe { (self.library.async_error)(comm, &mut state) };
            self.check("ncclCommGetAsyncError", status)?;
            if state != IN_PROGRESS {
                self.check("a collective", state)?;
            }
        }
        Ok(())
    }

    /// `full` becomes all shards in order. False: this rank holds the only one.
    pub(crate) fn all_gather(&self, stream: CUstream, shard: Ptr, full: Ptr) -> Result<bool> {
        // Bytes are bytes: any type can be gathered.
        let count = shard.dtype.bytes(shard.elements) as usize;
        self.collective(Among::Shards, stream, "ncclAllGather", |comm| {
            // SAFETY: device memory checked against its arena; sizes checked by the caller.
            unsafe { (self.library.all_gather)(shard.address as _, full.address as _, count, BYTES, comm, stream) }
        })
    }

    /// `shard` becomes this rank's part of the sum. False: this rank holds the only shard.
    pub(crate) fn reduce_scatter(&self, stream: CUstream, full: Ptr, shard: Ptr) -> Result<bool> {
        let (count, dtype) = (shard.elements as usize, data_type(shard.dtype)?);
        let (from, to) = (full.address as *const c_void, shard.address as *mut c_void);
        self.collective(Among::Shards, stream, "ncclReduceScatter", |comm| {
            // SAFETY: as above.
            unsafe { (self.library.reduce_scatter)(from, to, count, dtype, SUM, comm, stream) }
        })
    }

    /// `view` becomes the sum. False: this rank is alone among these.
    pub(crate) fn all_reduce(&self, among: Among, stream: CUstream, view: Ptr) -> Result<bool> {
        let (count, dtype) = (view.elements as usize, data_type(view.dtype)?);
        self.collective(among, stream, "ncclAllReduce", |comm| {
            // SAFETY: as above; in place is allowed.
            unsafe { (self.library.all_reduce)(view.address as _, view.address as _, count, dtype, SUM, comm, stream) }
        })
    }

    /// Ends the communicators without waiting for anyone, after a failure: collectives on the device end, unfinished,
    /// and later ones fail with `why`. Waits for a call in progress, and for the device.
    pub(crate) fn abort(&self, why: &Error) {
        // Held to the end: nobody takes the streams away meanwhile.
        let mut state = self.comms.lock();
        let Ok(comms) = std::mem::replace(&mut *state, Err(why.clone())) else { return };
        let abort = self.library.abort;
        // Side by side: each first asks its kernels to end and then waits for the stream, where another's may hang.
        thread::scope(|scope| {
            for comm in comms {
                let comm = comm as usize;
                // SAFETY: a live communicator, ended once.
                let end = move || unsafe { abort(comm as Comm) };
                if thread::Builder::new().spawn_scoped(scope, end).is_err() {
                    end();
                }
            }
        });
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        // A communicator that failed would wait for its peers for ever if it were destroyed politely.
        let end = if self.failure().is_err() { self.library.abort } else { self.library.destroy };
        for comm in self.comms.get_mut().iter_mut().flatten() {
            // SAFETY: a live communicator, ended once.
            unsafe { end(*comm) };
        }
    }
}

/// `ncclDataType_t`
fn data_type(dtype: DType) -> Result<c_int> {
    match dtype {
        DType::I32 => Ok(2),
        DType::F16 => Ok(6),
        DType::F32 => Ok(7),
        DType::F64 => Ok(8),
        DType::Bf16 => Ok(9),
        other => Err(Error::Unsupported {
            what: format!("a collective over {other:?}"),
            backend: "cuda",
            instead: "f32, f64, f16, bf16 or i32".into(),
        }),
    }
}
