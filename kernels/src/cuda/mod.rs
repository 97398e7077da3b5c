//! The CUDA backend: one rank on one NVIDIA GPU.
//!
//! Read in this order: `loader` (finds the libraries; nothing of CUDA is touched before it passed), `driver`
//! (context, arenas, kept failures), `marks` (streams and order), `engine` and `nvme` (host threads beside
//! the streams), `launch` (Castor's own kernels), `gemm` (cuBLASLt), `cudnn` (attention), `nccl` (other
//! ranks), `watch` (notices one that is gone), and `operators`, which sends each operator to one of them.

mod algorithms;
mod cudnn;
mod cudnn_backend;
mod cudnn_graph;
mod driver;
mod engine;
mod gemm;
mod gemm_choice;
mod gemm_layout;
pub(crate) mod launch;
mod launch_attention;
mod launch_update;
mod loader;
mod marks;
pub(crate) mod modules;
mod nccl;
mod nvme;
pub mod nvrtc;
mod operators;
pub mod programs;
mod watch;

pub use loader::{Found, LIBRARIES_VARIABLE, Usable, device_count, survey};
pub use watch::LastResort;

use crate::block_io::BlockOptions;
use crate::link::Link;
use crate::{Among, Backend, Collectives, DType, Device, Error, Mark, Memory, Order, Result, Span, Stream, Tier, View};
use cudarc::driver::CudaContext;
use cudarc::driver::sys::{self, CUstream};
use driver::{DeviceArena, Failures, HostArena, SharedPage, check, refusal};
use engine::{HostBytes, Job, Worker};
use gemm::Workspace;
use marks::{Engine, Marks};
use nvme::NvmeArena;
use parking_lot::Mutex;
use rayon::prelude::*;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use watch::Watcher;

/// Bytes of host memory that one thread copies at a time.
const COPIED_AT_ONCE: usize = 1 << 20;

/// Device bytes left free for what libraries load later: kernels come to the device on first use.
const LATER_BYTES: u64 = 512 << 20;

/// A typed range of device memory, by address: a view whose bounds were checked.
#[derive(Clone, Copy)]
pub(crate) struct Ptr {
    /// `CUdeviceptr` of the first element.
    pub address: u64,
    /// Type of the elements.
    pub dtype: DType,
    /// Number of elements.
    pub elements: u64,
}

/// How a rank uses its GPU.
#[derive(Default)]
pub struct CudaOptions {
    /// Number of the device, as CUDA counts those that the process may see.
    pub ordinal: usize,
    /// The same bits in every run on this machine. A matrix product's algorithm is measured only where the choice
    /// will be found again: by a rank alone, with a cache folder. Ranks beside each other take the remembered one,
    /// or the library's first.
    pub deterministic: bool,
    /// Allow TensorFloat-32 in f32 matrix products (10 bits of mantissa instead of 23).
    pub tf32: bool,
    /// Use Castor's own attention kernel even where cuDNN could be used: to compare the two.
    pub own_attention: bool,
    /// How Castor's own attention kernel is cut, where that fits; None: [`programs::Tiles::Large`].
    pub attention_tiles: Option<programs::Tiles>,
    /// Keep device times of marks, for [`Order::elapsed_ns`].
    pub timed: bool,
    /// How the file of the NVMe tier is read and written.
    pub block: BlockOptions,
    /// The other ranks. None: one rank.
    pub link: Option<Link>,
    /// Ends the process where a peer's failure leaves the thread that uses the backend hanging in the driver or in
    /// NCCL. None: it hangs on.
    pub last_resort: Option<LastResort>,
}

/// One rank on one GPU.
///
/// All calls come from one thread at a time. Dropping it waits for what was issued.
pub struct Cuda {
    // In the order of dropping: threads, then libraries, then memory, then streams.
    watcher: Option<Watcher>,
    workers: [Worker; 3],
    nccl: Option<Arc<nccl::Nccl>>,
    cudnn: Result<cudnn::Cudnn>,
    gemm: gemm::Gemm,
    launcher: launch::Launcher,
    controls: operators::HostControls,
    nvme: OnceLock<Arc<NvmeArena>>,
    host: OnceLock<HostArena>,
    device: OnceLock<DeviceArena>,
    workspace: Mutex<Workspace>,
    failures: Arc<Failures>,
    marks: Arc<Marks>,
    context: Arc<CudaContext>,
    link: Option<Arc<Link>>,
    block: BlockOptions,
    name: String,
}

impl Cuda {
    /// Takes a GPU: finds the libraries, opens the context, makes streams, compiles (or loads) the kernels
    /// and joins the other ranks.
    ///
    /// # Errors
    /// [`Error::Library`] if the driver or a required library is missing; [`Error::Device`] if the device
    /// refuses; [`Error::Peer`] if another rank does not come.
    pub fn new(options: CudaOptions) -> Result<Cuda> {
        loader::preflight()?;
        let context = driver::open_context(options.ordinal)?;
        let name = context.name().map_err(|e| refusal("cuDeviceGetName", e))?;
        let failures = Arc::new(Failures::default());
        let marks = Arc::new(Marks::new(&context, options.timed)?);
        let launcher = launch::Launcher::new(&context, options.attention_tiles.unwrap_or(programs::Tiles::Large))?;
        let alone = options.link.as_ref().is_none_or(|link| link.world() == 1);
        let tunes = !options.deterministic || (alone && algorithms::remembers());
        let gemm = gemm::Gemm::new(&name, options.tf32, tunes)?;
        // Absent or unusable cuDNN is no failure: `attention_backend` tells, and our own kernel is used.
        let cudnn = match options.own_attention {
            false => cudnn::Cudnn::new(&name, marks.stream(Stream::Compute)),
            true => Err(Error::Library { library: "libcudnn.so.9".into(), reason: "not wanted".into() }),
        };
        let link = options.link.map(Arc::new);
        let (mut nccl, mut watcher) = (None, None);
        if let Some(link) = link.as_ref().filter(|link| link.world() > 1) {
            let made = Arc::new(nccl::Nccl::new(&context, link)?);
            watcher = Some(Watcher::start(link.clone(), made.clone(), failures.clone(), options.last_resort)?);
            if let Err(error) = made.join(&context, link, marks.stream(Stream::Collective)) {
                let error = watch::traced(error, link);
                made.abort(&error);
                return Err(error);
            }
            nccl = Some(made);
        }
        let worker = |engine| Worker::start(engine, marks.clone(), failures.clone());
        Ok(Cuda {
            watcher,
            workers: [worker(Engine::NvmeRead)?, worker(Engine::NvmeWrite)?, worker(Engine::Host)?],
            nccl,
            cudnn,
            gemm,
            launcher,
            controls: operators::HostControls::new(SharedPage::new(&context)?),
            nvme: OnceLock::new(),
            host: OnceLock::new(),
            device: OnceLock::new(),
            workspace: Mutex::new(Workspace { address: 0, bytes: 0 }),
            failures,
            marks,
            context,
            link,
            block: options.block,
            name,
        })
    }

    /// Which attention is used for 16-bit types: cuDNN's version, or why Castor's own kernel.
    pub fn attention_backend(&self) -> String {
        match &self.cudnn {
            Ok(cudnn) => format!("cuDNN {}", cudnn.version()),
            Err(error) => format!("own kernel ({error})"),
        }
    }

    /// Address of a device view.
    #[track_caller]
    fn ptr(&self, view: View) -> Ptr {
        assert!(view.span.tier == Tier::Device, "{view:?} is not on the device");
        let Some(arena) = self.device.get() else { panic!("{view:?} is used before the device tier is reserved") };
        inside(view.span, arena.bytes);
        Ptr { address: arena.base + view.span.offset, dtype: view.dtype, elements: view.elements() }
    }

    /// Address of a host span.
    #[track_caller]
    fn host_bytes(&self, span: Span) -> HostBytes {
        assert!(span.tier == Tier::Host, "{span:?} is not on the host");
        let Some(arena) = self.host.get() else { panic!("{span:?} is used before the host tier is reserved") };
        inside(span, arena.bytes);
        // SAFETY: inside the arena, as just checked.
        HostBytes { address: unsafe { arena.base.add(span.offset as usize) }, bytes: span.bytes }
    }

    #[track_caller]
    fn file(&self, span: Span) -> &Arc<NvmeArena> {
        let Some(file) = self.nvme.get() else { panic!("{span:?} is used before the NVMe tier is reserved") };
        inside(span, file.bytes);
        assert!(
            span.offset.is_multiple_of(nvme::BLOCK_BYTES) && span.bytes.is_multiple_of(nvme::BLOCK_BYTES),
            "{span:?} is not whole blocks of {} bytes",
            nvme::BLOCK_BYTES
        );
        file
    }

    /// Issues work on the compute stream; a refusal is kept for the next join.
    fn compute(&self, work: impl FnOnce(CUstream) -> Result<()>) {
        self.failures.keep(self.marks.bind().and_then(|()| work(self.marks.stream(Stream::Compute))));
    }

    fn worker(&self, engine: Engine) -> &Worker {
        &self.workers[engine as usize]
    }

    fn join_all(&self) -> Result<()> {
        for stream in Stream::ALL {
            self.join(self.mark(stream))?;
        }
        Ok(())
    }

    /// Tells the file of the host memory that it will read to and write from, whichever came last.
    fn introduce(&self) {
        if let (Some(file), Some(host)) = (self.nvme.get(), self.host.get())
            && host.bytes > 0
        {
            // SAFETY: the host arena is dropped after the file, as the fields stand.
            unsafe { file.register(host.base, host.bytes) };
        }
    }
}

#[track_caller]
fn inside(span: Span, bytes: u64) {
    assert!(span.end() <= bytes, "{span:?} is outside of its arena of {bytes} bytes");
}

impl Drop for Cuda {
    fn drop(&mut self) {
        let drain = || {
            for stream in [Stream::Compute, Stream::HostToDevice, Stream::DeviceToHost, Stream::Collective] {
                // SAFETY: a live stream. A failure at the end of life has no one to go to.
                let _ = unsafe { sys::cuStreamSynchronize(self.marks.stream(stream)) };
            }
        };
        if self.marks.bind().is_err() {
            return;
        }
        if std::thread::panicking() {
            let reason = "it panicked, which is a bug of Castor".into();
            self.failures.keep::<()>(Err(Error::Device { call: "work of this rank".into(), reason }));
        }
        if let Err(why) = self.failures.check() {
            // Peers must not wait for this rank, nor it for them.
            if let Some(link) = &self.link {
                link.abandon();
            }
            if let Some(nccl) = &self.nccl {
                nccl.abort(&why);
            }
        }
        drain();
        // Only now: a peer that is gone can leave the streams hanging here too.
        drop(self.watcher.take());
    }
}

impl Memory for Cuda {
    fn reserve(&self, tier: Tier, bytes: u64, folder: Option<&Path>) -> Result<()> {
        self.marks.bind()?;
        let fresh = match tier {
            Tier::Device => self.device.set(DeviceArena::new(&self.context, bytes)?).is_ok(),
            Tier::Host => self.host.set(HostArena::new(&self.context, bytes)?).is_ok(),
            Tier::Nvme if bytes == 0 => true,
            Tier::Nvme => self.nvme.set(Arc::new(NvmeArena::new(folder, bytes, &self.block)?)).is_ok(),
        };
        assert!(fresh, "the {tier} tier was reserved before");
        self.introduce();
        Ok(())
    }

    fn upload(&self, target: Span, bytes: &[u8]) -> Result<()> {
        self.join_all()?;
        let target = target.part(0, bytes.len() as u64);
        if target.tier == Tier::Host {
            self.write_host(target, bytes);
            return Ok(());
        }
        let at = self.ptr(target.view(DType::Q8)).address;
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the target was checked against its arena. The copy may return while its last part is on its
        // way from the driver's buffer, and our streams do not wait for the default one: so we do.
        unsafe {
            check("cuMemcpyHtoD", sys::cuMemcpyHtoD_v2(at, bytes.as_ptr().cast(), bytes.len()))?;
            check("cuStreamSynchronize", sys::cuStreamSynchronize(std::ptr::null_mut()))
        }
    }

    fn download(&self, source: Span, out: &mut [u8]) -> Result<()> {
        self.join_all()?;
        let source = source.part(0, out.len() as u64);
        if source.tier == Tier::Host {
            self.read_host(source, out);
            return Ok(());
        }
        let at = self.ptr(source.view(DType::Q8)).address;
        if out.is_empty() {
            return Ok(());
        }
        // SAFETY: the source was checked against its arena; returns when the bytes are there.
        check("cuMemcpyDtoH", unsafe { sys::cuMemcpyDtoH_v2(out.as_mut_ptr().cast(), at, out.len()) })
    }

    fn write_host(&self, target: Span, bytes: &[u8]) {
        let target = self.host_bytes(target.part(0, bytes.len() as u64));
        // SAFETY: inside the arena; nobody uses the target, as the caller promises.
        let target = unsafe { std::slice::from_raw_parts_mut(target.address, bytes.len()) };
        // One core copies at a tenth of what the memory gives.
        let parts = target.par_chunks_mut(COPIED_AT_ONCE).zip(bytes.par_chunks(COPIED_AT_ONCE));
        parts.for_each(|(target, bytes)| target.copy_from_slice(bytes));
    }

    fn read_host(&self, source: Span, out: &mut [u8]) {
        let source = self.host_bytes(source.part(0, out.len() as u64));
        // SAFETY: inside the arena; nobody writes the source, as the caller promises.
        unsafe { std::ptr::copy_nonoverlapping(source.address, out.as_mut_ptr(), out.len()) };
    }
}

impl Order for Cuda {
    fn mark(&self, stream: Stream) -> Mark {
        if let Some(engine) = Engine::of(stream) {
            let number = self.marks.issue(engine);
            self.worker(engine).send(Job::Report(number));
            return Mark { stream, number };
        }
        let mark = self.marks.bind().and_then(|()| self.marks.record(stream));
        // Where nothing can be recorded any more nothing will be waited for; the join says why.
        self.failures.keep(mark).unwrap_or(Mark { stream, number: 0 })
    }

    fn wait(&self, stream: Stream, mark: Mark) {
        if mark.number == 0 || mark.stream == stream {
            return;
        }
        match Engine::of(stream) {
            Some(engine) => self.worker(engine).send(Job::Wait(mark)),
            None => {
                self.failures.keep(self.marks.bind().and_then(|()| self.marks.stream_wait(stream, mark)));
            }
        }
    }

    fn join(&self, mark: Mark) -> Result<()> {
        self.marks.bind()?;
        match &self.nccl {
            // A peer that is gone leaves the stream hanging until the watcher notices: not a wait for the driver.
            Some(_) => {
                while self.failures.check().is_ok() && self.failures.keep(self.marks.reached(mark)) == Some(false) {
                    std::thread::yield_now();
                }
            }
            None => {
                self.failures.keep(self.marks.join(mark));
            }
        }
        self.failures.check()
    }

    fn reached(&self, mark: Mark) -> bool {
        let reached = self.marks.bind().and_then(|()| self.marks.reached(mark));
        // After a failure nobody may wait for ever.
        self.failures.keep(reached).unwrap_or(true)
    }

    fn elapsed_ns(&self, from: Mark, to: Mark) -> Option<u64> {
        self.marks.bind().ok()?;
        self.marks.elapsed_ns(from, to)
    }

    fn copy(&self, stream: Stream, source: Span, target: Span) -> Result<()> {
        assert_eq!(source.bytes, target.bytes, "a copy from {source:?} to {target:?}");
        if source.bytes == 0 {
            return Ok(());
        }
        self.marks.bind()?;
        match (stream, source.tier, target.tier) {
            (Stream::NvmeRead, Tier::Nvme, Tier::Host) => {
                let (file, target) = (self.file(source).clone(), self.host_bytes(target));
                self.worker(Engine::NvmeRead).send(Job::Read { file, offset: source.offset, target });
                Ok(())
            }
            (Stream::NvmeWrite, Tier::Host, Tier::Nvme) => {
                let (file, source) = (self.file(target).clone(), self.host_bytes(source));
                self.worker(Engine::NvmeWrite).send(Job::Write { file, offset: target.offset, source });
                Ok(())
            }
            (Stream::NvmeRead | Stream::NvmeWrite | Stream::Host, _, _)
            | (_, Tier::Nvme, _)
            | (_, _, Tier::Nvme)
            | (_, Tier::Host, Tier::Host) => Err(Error::Unsupported {
                what: format!("a copy from {} to {} on stream {stream:?}", source.tier, target.tier),
                backend: "cuda",
                instead: "files are read on nvme_read and written on nvme_write, each to or from the host".into(),
            }),
            _ => self.copy_on(stream, source, target),
        }
    }
}

impl Cuda {
    fn copy_on(&self, stream: Stream, source: Span, target: Span) -> Result<()> {
        let queue = self.marks.stream(stream);
        let device = |span: Span| self.ptr(span.view(DType::Q8)).address;
        if source.tier == target.tier {
            let (from, to) = (device(source), device(target));
            // SAFETY: both spans were checked against the arena.
            return check("cuMemcpyDtoDAsync", unsafe {
                sys::cuMemcpyDtoDAsync_v2(to, from, source.bytes as usize, queue)
            });
        }
        let (host, there) = if source.tier == Tier::Host { (source, target) } else { (target, source) };
        let (base, there) = (self.host_bytes(host).address, device(there));
        for (offset, bytes) in HostArena::pieces(host.offset, host.bytes) {
            let at = offset - host.offset;
            // SAFETY: parts of two spans that were checked against their arenas; the host's is registered.
            unsafe {
                let address = base.add(at as usize);
                if source.tier == Tier::Host {
                    let code = sys::cuMemcpyHtoDAsync_v2(there + at, address.cast(), bytes as usize, queue);
                    check("cuMemcpyHtoDAsync", code)?;
                } else {
                    let code = sys::cuMemcpyDtoHAsync_v2(address.cast(), there + at, bytes as usize, queue);
                    check("cuMemcpyDtoHAsync", code)?;
                }
            }
        }
        Ok(())
    }

    /// A collective of one rank, or of many.
    fn collective(&self, work: impl FnOnce(CUstream) -> Result<()>) -> Result<()> {
        self.marks.bind()?;
        work(self.marks.stream(Stream::Collective))
    }

    /// This rank's part of a full view.
    fn own_part(&self, full: View) -> View {
        let bytes = full.span.bytes / u64::from(self.shards());
        View { span: full.span.part(bytes * u64::from(self.shard()), bytes), dtype: full.dtype }
    }

    fn check_shard(&self, full: View, shard: View) {
        assert!(
            full.dtype == shard.dtype && full.span.bytes == shard.span.bytes * u64::from(self.shards()),
            "{shard:?} is not one of {} equal parts of {full:?}",
            self.shards()
        );
    }

    /// A collective among the ranks that together hold all shards; if that is this rank alone, a copy.
    fn among_shards(
        &self,
        source: Span,
        target: Span,
        work: impl FnOnce(&nccl::Nccl, CUstream) -> Result<bool>,
    ) -> Result<()> {
        self.collective(|stream| {
            let done = self.nccl.as_ref().map_or(Ok(false), |nccl| work(nccl, stream))?;
            if done || source == target { Ok(()) } else { self.copy_on(Stream::Collective, source, target) }
        })
    }
}

impl Collectives for Cuda {
    fn world(&self) -> u32 {
        self.link.as_ref().map_or(1, |link| link.world())
    }

    fn rank(&self) -> u32 {
        self.link.as_ref().map_or(0, |link| link.rank())
    }

    fn shards(&self) -> u32 {
        self.link.as_ref().map_or(1, |link| link.shards())
    }

    fn all_gather(&self, shard: View, full: View) -> Result<()> {
        self.check_shard(full, shard);
        self.among_shards(shard.span, full.span, |nccl, s| nccl.all_gather(s, self.ptr(shard), self.ptr(full)))
    }

    fn reduce_scatter(&self, full: View, shard: View) -> Result<()> {
        self.check_shard(full, shard);
        assert!(
            !shard.span.overlaps(full.span) || shard.span == self.own_part(full).span,
            "{shard:?} overlaps {full:?} but is not this rank's part"
        );
        self.among_shards(full.span, shard.span, |nccl, s| nccl.reduce_scatter(s, self.ptr(full), self.ptr(shard)))
    }

    fn all_reduce(&self, among: Among, view: View) -> Result<()> {
        match &self.nccl {
            Some(nccl) => self.collective(|s| nccl.all_reduce(among, s, self.ptr(view)).map(|_| ())),
            None => Ok(()),
        }
    }

    fn accumulate(&self, source: View, target: View) -> Result<()> {
        crate::route::check_accumulate("cuda", source, target)?;
        self.collective(|s| self.launcher.accumulate(s, self.ptr(source), self.ptr(target)))
    }

    fn exchange(&self, message: &[u8]) -> Result<Vec<Vec<u8>>> {
        match &self.link {
            Some(link) => {
                let answers = link.exchange(message);
                if let Err(error) = &answers {
                    // What is on its way among the ranks will not end either.
                    self.failures.keep::<()>(Err(error.clone()));
                }
                answers
            }
            None => Ok(vec![message.to_vec()]),
        }
    }
}

impl Backend for Cuda {
    fn device(&self) -> Device {
        let bound =
            self.marks.bind().and_then(|()| self.context.mem_get_info().map_err(|e| refusal("cuMemGetInfo", e)));
        let (free, total) = self.failures.keep(bound).map_or((0, 0), |(free, total)| (free as u64, total as u64));
        let arena = self.device.get().map_or(0, |arena| arena.bytes);
        Device {
            backend: "cuda",
            name: self.name.clone(),
            available_bytes: free.saturating_sub(LATER_BYTES),
            // What other processes hold is not ours to give either.
            overhead_bytes: (total - free).saturating_sub(arena),
            fused_attention: true,
        }
    }

    fn workspace_bytes(&self) -> u64 {
        gemm::WORKSPACE_BYTES
    }

    fn set_workspace(&self, workspace: Span) {
        let address = self.ptr(workspace.view(DType::Q8)).address;
        *self.workspace.lock() = Workspace { address, bytes: workspace.bytes };
    }

    fn computes_in(&self, dtype: DType) -> bool {
        matches!(dtype, DType::F32 | DType::F16 | DType::Bf16)
    }
}
