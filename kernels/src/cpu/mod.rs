//! The CPU backend: the truth, and an *emulated device*.
//!
//! Its device tier is a capped arena in host memory, its copy engines are threads with a settable
//! bandwidth, and its compute stream is the calling thread, so every move is real, overlap can be
//! measured and ordering mistakes show without a GPU.

mod arena;
mod engine;
mod operators;
pub(crate) mod ops;
pub(crate) mod state;
pub mod truth;

use crate::block_io::{BlockFile, BlockOptions, Rung};
use crate::link::Link;
use crate::{
    Among, Backend, Collectives, DType, Device, Error, Mark, Memory, Order, Result, Span, Stream, Tier, View, route,
};
use arena::Arena;
use crossbeam::channel::Sender;
use engine::{Command, Pace, Shared};
use parking_lot::Mutex;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

/// Commands that wait in a queue before the caller has to.
const QUEUE: usize = 1024;

/// What the emulated machine is like. The default is the machine as it is, one rank.
#[derive(Default)]
pub struct CpuOptions {
    /// Bytes of the emulated device. None: what the machine has available.
    pub device_bytes: Option<u64>,
    /// Bytes per second of host to device copies. None: as fast as memory.
    pub host_to_device_bytes_per_s: Option<f64>,
    /// Bytes per second of device to host copies. None: as fast as memory.
    pub device_to_host_bytes_per_s: Option<f64>,
    /// Bytes per second of file reads, at most. None: as fast as the disk.
    pub nvme_read_bytes_per_s: Option<f64>,
    /// Bytes per second of file writes, at most. None: as fast as the disk.
    pub nvme_write_bytes_per_s: Option<f64>,
    /// How the file of the NVMe tier is read and written.
    pub block: BlockOptions,
    /// Threads of the operators. None: one per core that the process may use.
    pub threads: Option<usize>,
    /// The other ranks. None: one rank.
    pub link: Option<Link>,
}

/// One rank on the CPU.
///
/// All calls come from one thread, which is also the compute stream. Dropping it ends its threads when
/// they have done what was issued.
pub struct Cpu {
    shared: Arc<Shared>,
    /// Queue of each stream's engine; none for `Compute`.
    queues: [Option<Sender<Command>>; Stream::ALL.len()],
    engines: Vec<JoinHandle<()>>,
    issued: [AtomicU64; Stream::ALL.len()],
    /// For the few copies on the compute stream.
    free: Mutex<Pace>,
    device_bytes: Option<u64>,
    block: BlockOptions,
}

impl Cpu {
    /// Starts the engines and the operators' threads.
    ///
    /// # Errors
    /// If the system gives no threads.
    ///
    /// # Panics
    /// If a bandwidth is not positive.
    pub fn new(options: CpuOptions) -> Result<Cpu> {
        let threads = |reason: String| Error::Device { call: "starting threads".into(), reason };
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(options.threads.unwrap_or(0))
            .thread_name(|index| format!("castor-cpu-{index}"))
            .build()
            .map_err(|e| threads(format!("{e}; give fewer threads or raise the limit of processes")))?;
        let mut cpu = Cpu {
            shared: Arc::new(Shared::new(options.link, pool)),
            queues: [const { None }; Stream::ALL.len()],
            engines: Vec::new(),
            issued: [const { AtomicU64::new(0) }; Stream::ALL.len()],
            free: Mutex::new(Pace::new(None)),
            device_bytes: options.device_bytes,
            block: options.block,
        };
        for (stream, rate) in [
            (Stream::HostToDevice, options.host_to_device_bytes_per_s),
            (Stream::DeviceToHost, options.device_to_host_bytes_per_s),
            (Stream::Collective, None),
            (Stream::NvmeRead, options.nvme_read_bytes_per_s),
            (Stream::NvmeWrite, options.nvme_write_bytes_per_s),
            (Stream::Host, None),
        ] {
            assert!(rate.is_none_or(|r| r > 0.0), "the bandwidth of {stream:?} must be positive");
            let (sender, receiver) = crossbeam::channel::bounded(QUEUE);
            let shared = Arc::clone(&cpu.shared);
            let engine = std::thread::Builder::new()
                .name(format!("castor-{}", stream.name()))
                .spawn(move || shared.serve(stream, &receiver, Pace::new(rate)))
                .map_err(|e| threads(format!("{e}; raise the limit of processes")))?;
            cpu.queues[stream.index()] = Some(sender);
            cpu.engines.push(engine);
        }
        Ok(cpu)
    }

    /// How the NVMe tier's file is read and written; none before it is reserved.
    pub fn rung(&self) -> Option<Rung> {
        self.shared.file.get().map(BlockFile::rung)
    }

    /// The threads of the operators.
    pub(crate) fn pool(&self) -> &rayon::ThreadPool {
        &self.shared.pool
    }

    /// The elements of a device or host view, to read.
    ///
    /// The caller (an operator) runs in the order of the compute stream and is told by its own caller,
    /// through marks, that nobody writes the view meanwhile.
    ///
    /// # Panics
    /// If the view lies outside of its arena or is not aligned for `T`.
    #[track_caller]
    pub(crate) fn slice<T: bytemuck::Pod>(&self, view: View) -> &[T] {
        let (base, count) = self.elements::<T>(view);
        // SAFETY: `elements` checked bounds and alignment; every bit pattern is a `T`; the arena lives as
        // long as `self`; marks keep engines from writing the view while an operator runs on it.
        unsafe { std::slice::from_raw_parts(base, count) }
    }

    /// The elements of a device or host view, to write.
    ///
    /// As [`Cpu::slice`]; and an operator that is given overlapping views must not hold slices of both.
    ///
    /// # Panics
    /// If the view lies outside of its arena or is not aligned for `T`.
    #[track_caller]
    #[expect(clippy::mut_from_ref, reason = "an arena is shared memory; exclusivity comes from marks")]
    pub(crate) fn slice_mut<T: bytemuck::Pod>(&self, view: View) -> &mut [T] {
        let (base, count) = self.elements::<T>(view);
        // SAFETY: `elements` checked bounds and alignment; every bit pattern is a `T`; the arena lives as
        // long as `self`; marks keep engines from the view, and operators take no slices that overlap.
        unsafe { std::slice::from_raw_parts_mut(base, count) }
    }

    #[track_caller]
    fn elements<T>(&self, view: View) -> (*mut T, usize) {
        let base = self.shared.address(view.span);
        let (size, align) = (size_of::<T>(), align_of::<T>());
        assert!(base.addr().is_multiple_of(align), "{view:?} is not aligned to {align} bytes");
        assert!((view.span.bytes as usize).is_multiple_of(size), "{view:?} is not whole elements of {size} bytes");
        (base.cast(), view.span.bytes as usize / size)
    }

    /// Keeps the failure of an operator for the next `join`. The first one wins.
    pub(crate) fn fail(&self, error: Error) {
        self.shared.fail(error);
    }

    /// Queues `command` on a stream with an engine; waits for room if the queue is full.
    fn issue(&self, stream: Stream, command: Command) {
        let Some(queue) = &self.queues[stream.index()] else { panic!("{stream:?} has no engine") };
        let sent = queue.send(command);
        assert!(sent.is_ok(), "the engine of {stream:?} is gone: it panicked");
    }

    /// Waits for all streams.
    fn join_all(&self) -> Result<()> {
        for stream in Stream::ALL {
            let mark = self.mark(stream);
            self.shared.progress[stream.index()].wait(mark.number);
        }
        self.shared.check()
    }

    /// Registers the host arena with the file, whichever was reserved last.
    fn introduce(&self) {
        let host = self.shared.arenas[Tier::Host.index()].get();
        if let (Some(file), Some(host)) = (self.shared.file.get(), host) {
            // SAFETY: the arena is mapped until `Shared` drops, which drops the file first.
            unsafe { file.register(host.base(), host.bytes()) };
        }
    }
}

impl Drop for Cpu {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // A bug on this rank: its peers must not wait for it, nor it for them.
            if let Some(link) = &self.shared.link {
                link.abandon();
            }
        }
        self.queues = [const { None }; Stream::ALL.len()];
        for engine in self.engines.drain(..) {
            // An engine that panicked has said so on its own.
            let _ = engine.join();
        }
    }
}

impl Memory for Cpu {
    fn reserve(&self, tier: Tier, bytes: u64, folder: Option<&Path>) -> Result<()> {
        if tier == Tier::Nvme {
            if bytes == 0 {
                return Ok(());
            }
            let Some(folder) = folder else { panic!("the nvme tier needs a folder") };
            let file = BlockFile::create(folder, bytes, &self.block)?;
            assert!(self.shared.file.set(file).is_ok(), "the nvme tier was reserved twice");
        } else {
            if let (Tier::Device, Some(cap)) = (tier, self.device_bytes)
                && bytes > cap
            {
                return Err(Error::Exhausted {
                    tier: tier.name(),
                    asked: bytes,
                    available: cap,
                    hint: "the emulated device is no larger; give it more bytes, or keep more on the host".into(),
                });
            }
            let arena = Arena::new(tier, bytes)?;
            assert!(self.shared.arenas[tier.index()].set(arena).is_ok(), "the {tier} tier was reserved twice");
        }
        self.introduce();
        Ok(())
    }

    fn upload(&self, target: Span, bytes: &[u8]) -> Result<()> {
        self.join_all()?;
        self.write_host(target, bytes);
        Ok(())
    }

    fn download(&self, source: Span, out: &mut [u8]) -> Result<()> {
        self.join_all()?;
        self.read_host(source, out);
        Ok(())
    }

    fn write_host(&self, target: Span, bytes: &[u8]) {
        let base = self.shared.address(target.part(0, bytes.len() as u64));
        // SAFETY: bounds were checked by `address`; the caller says that nobody uses the target, and a
        // borrowed slice of the arena cannot reach here.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), base, bytes.len()) };
    }

    fn read_host(&self, source: Span, out: &mut [u8]) {
        let base = self.shared.address(source.part(0, out.len() as u64));
        // SAFETY: bounds were checked by `address`; the caller has joined the mark after which the source
        // is written.
        unsafe { std::ptr::copy_nonoverlapping(base, out.as_mut_ptr(), out.len()) };
    }
}

impl Order for Cpu {
    fn mark(&self, stream: Stream) -> Mark {
        let number = self.issued[stream.index()].fetch_add(1, Ordering::Relaxed) + 1;
        if stream == Stream::Compute {
            self.shared.progress[stream.index()].reach(number, self.shared.now_ns());
        } else {
            self.issue(stream, Command::Mark(number));
        }
        Mark { stream, number }
    }

    fn wait(&self, stream: Stream, mark: Mark) {
        self.check_issued(mark);
        if mark.stream == stream || self.reached(mark) {
            return;
        }
        if stream == Stream::Compute {
            self.shared.progress[mark.stream.index()].wait(mark.number);
        } else {
            self.issue(stream, Command::Wait(mark));
        }
    }

    fn join(&self, mark: Mark) -> Result<()> {
        self.check_issued(mark);
        self.shared.progress[mark.stream.index()].wait(mark.number);
        self.shared.check()
    }

    fn reached(&self, mark: Mark) -> bool {
        self.shared.progress[mark.stream.index()].has(mark.number)
    }

    fn elapsed_ns(&self, from: Mark, to: Mark) -> Option<u64> {
        assert!(from.stream == to.stream, "{from:?} and {to:?} are of different streams");
        let progress = &self.shared.progress[from.stream.index()];
        Some(progress.time_ns(to.number)?.saturating_sub(progress.time_ns(from.number)?))
    }

    fn copy(&self, stream: Stream, source: Span, target: Span) -> Result<()> {
        route::check_copy("cpu", stream, source, target)?;
        for span in [source, target] {
            if span.tier == Tier::Nvme {
                let bytes = self.shared.file.get().map_or(0, BlockFile::bytes);
                assert!(span.end() <= bytes, "{span:?} lies outside of the nvme file of {bytes} bytes");
            } else {
                self.shared.address(span);
            }
        }
        if source.bytes == 0 {
            return Ok(());
        }
        if stream == Stream::Compute {
            self.shared.copy_memory(source, target, &mut self.free.lock());
        } else {
            self.issue(stream, Command::Copy(source, target));
        }
        Ok(())
    }
}

impl Cpu {
    #[track_caller]
    fn check_issued(&self, mark: Mark) {
        let issued = self.issued[mark.stream.index()].load(Ordering::Relaxed);
        assert!(mark.number <= issued, "{mark:?} was never made: the last one is {issued}");
    }

    /// Checks a shard against the whole, and both against their arenas.
    #[track_caller]
    fn check_shard(&self, shard: View, full: View) {
        route::own_part(shard, full, self.shard(), self.shards());
        self.shared.address(shard.span);
        self.shared.address(full.span);
    }
}

impl Collectives for Cpu {
    fn world(&self) -> u32 {
        self.shared.link.as_ref().map_or(1, Link::world)
    }

    fn rank(&self) -> u32 {
        self.shared.link.as_ref().map_or(0, Link::rank)
    }

    fn shards(&self) -> u32 {
        self.shared.link.as_ref().map_or(1, Link::shards)
    }

    fn all_gather(&self, shard: View, full: View) -> Result<()> {
        self.check_shard(shard, full);
        self.issue(Stream::Collective, Command::AllGather(shard, full));
        Ok(())
    }

    fn reduce_scatter(&self, full: View, shard: View) -> Result<()> {
        self.check_shard(shard, full);
        assert!(engine::sums_in(full.dtype), "no sums in {:?}", full.dtype);
        self.issue(Stream::Collective, Command::ReduceScatter(full, shard));
        Ok(())
    }

    fn all_reduce(&self, among: Among, view: View) -> Result<()> {
        self.shared.address(view.span);
        assert!(engine::sums_in(view.dtype), "no sums in {:?}", view.dtype);
        self.issue(Stream::Collective, Command::AllReduce(among, view));
        Ok(())
    }

    fn accumulate(&self, source: View, target: View) -> Result<()> {
        route::check_accumulate("cpu", source, target)?;
        self.shared.address(source.span);
        self.shared.address(target.span);
        self.issue(Stream::Collective, Command::Accumulate(source, target));
        Ok(())
    }

    fn exchange(&self, message: &[u8]) -> Result<Vec<Vec<u8>>> {
        match &self.shared.link {
            Some(link) => link.exchange(message),
            None => Ok(vec![message.to_vec()]),
        }
    }
}

impl Backend for Cpu {
    fn device(&self) -> Device {
        Device {
            backend: "cpu",
            name: format!("CPU, {} threads", self.pool().current_num_threads()),
            available_bytes: self.device_bytes.unwrap_or_else(arena::available_memory),
            overhead_bytes: 0,
            fused_attention: true,
        }
    }

    fn workspace_bytes(&self) -> u64 {
        0
    }

    fn set_workspace(&self, workspace: Span) {
        // The operators bring their own small buffers; the span only has to be one.
        self.shared.address(workspace);
    }

    fn computes_in(&self, dtype: DType) -> bool {
        matches!(dtype, DType::F32 | DType::F16 | DType::Bf16)
    }
}

#[cfg(test)]
mod tests;
