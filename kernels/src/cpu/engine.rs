//! The CPU backend's streams: one thread with an in-order queue of plain commands per stream that is not
//! `Compute`, and the progress that marks look at.
//!
//! Owns the arenas, the file of the NVMe tier and the link, since the engines outlive every call. An engine
//! really copies while the compute thread works. After the first failure engines do no more work, but
//! still reach their marks, so that nobody waits for ever.

use super::arena::Arena;
use super::ops::{Element, convert};
use super::state::StateUpdate;
use crate::block_io::BlockFile;
use crate::link::Link;
use crate::stream::Stamps;
use crate::{Among, DType, Error, Mark, Result, Span, Stream, Tier, View, route};
use crossbeam::channel::Receiver;
use half::{bf16, f16};
use parking_lot::{Condvar, Mutex};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes between two looks at the clock of a throttled copy.
const PIECE_BYTES: usize = 1 << 20;

/// Most that a throttled engine makes up for at its next command.
const LATENESS: Duration = Duration::from_millis(1);

/// Work of an engine.
#[derive(Clone, Copy)]
pub(crate) enum Command {
    /// Copy the first span to the second.
    Copy(Span, Span),
    /// Go on when the mark is reached.
    Wait(Mark),
    /// The stream's mark of this number is reached.
    Mark(u64),
    /// Shard, full.
    AllGather(View, View),
    /// Full, shard.
    ReduceScatter(View, View),
    /// In place.
    AllReduce(Among, View),
    /// Add the first view to the second.
    Accumulate(View, View),
    /// Update a state with its gradient times this.
    Update(StateUpdate, f32),
}

/// How far a stream is.
pub(crate) struct Progress {
    reached: AtomicU64,
    /// In nanoseconds since the start of the backend.
    stamps: Stamps,
    lock: Mutex<()>,
    changed: Condvar,
}

impl Progress {
    fn new() -> Progress {
        Progress { reached: AtomicU64::new(0), stamps: Stamps::new(), lock: Mutex::new(()), changed: Condvar::new() }
    }

    /// Whether mark `number` is reached.
    pub(crate) fn has(&self, number: u64) -> bool {
        self.reached.load(Ordering::Acquire) >= number
    }

    /// Blocks until mark `number` is reached.
    pub(crate) fn wait(&self, number: u64) {
        if self.has(number) {
            return;
        }
        let mut guard = self.lock.lock();
        while !self.has(number) {
            self.changed.wait(&mut guard);
        }
    }

    /// Reaches mark `number` at time `now_ns`.
    pub(crate) fn reach(&self, number: u64, now_ns: u64) {
        self.stamps.keep(number, now_ns);
        self.reached.store(number, Ordering::Release);
        // Taking the lock orders this after a waiter's last look and before its sleep.
        drop(self.lock.lock());
        self.changed.notify_all();
    }

    /// When mark `number` was reached, if it was and not too many others since.
    pub(crate) fn time_ns(&self, number: u64) -> Option<u64> {
        self.stamps.of(number, self.reached.load(Ordering::Acquire))
    }
}

/// What the calling thread and the engines share. Fields drop in order: the file before the memory that it
/// may have registered with the kernel.
pub(crate) struct Shared {
    pub(crate) file: OnceLock<BlockFile>,
    pub(crate) arenas: [OnceLock<Arena>; 2],
    pub(crate) link: Option<Link>,
    pub(crate) progress: [Progress; Stream::ALL.len()],
    pub(crate) start: Instant,
    /// The threads of the operators, and of updates on the host.
    pub(crate) pool: rayon::ThreadPool,
    failure: OnceLock<Error>,
}

impl Shared {
    pub(crate) fn new(link: Option<Link>, pool: rayon::ThreadPool) -> Shared {
        Shared {
            file: OnceLock::new(),
            arenas: [OnceLock::new(), OnceLock::new()],
            link,
            progress: std::array::from_fn(|_| Progress::new()),
            start: Instant::now(),
            pool,
            failure: OnceLock::new(),
        }
    }

    /// Keeps `error` if it is the first.
    pub(crate) fn fail(&self, error: Error) {
        let _ = self.failure.set(error);
    }

    /// The first failure, if there was one.
    pub(crate) fn check(&self) -> Result<()> {
        self.failure.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Nanoseconds since the start.
    pub(crate) fn now_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// Address of a device or host span, checked against its arena.
    ///
    /// # Panics
    /// If the span is not inside a reserved arena, or is on the NVMe tier.
    #[track_caller]
    pub(crate) fn address(&self, span: Span) -> *mut u8 {
        assert!(span.tier != Tier::Nvme, "{span:?} has no address");
        let Some(arena) = self.arenas[span.tier.index()].get() else {
            panic!("{span:?} of a tier that was not reserved");
        };
        let inside = span.offset.checked_add(span.bytes).is_some_and(|end| end <= arena.bytes());
        assert!(inside, "{span:?} lies outside of the {} arena of {} bytes", span.tier, arena.bytes());
        arena.base().wrapping_add(span.offset as usize)
    }

    /// The bytes of a span, to read.
    #[track_caller]
    fn bytes(&self, span: Span) -> &[u8] {
        let base = self.address(span);
        // SAFETY: `address` checked the range, which lives as long as `self`. Whoever issued the command
        // ordered it by marks so that nobody writes the span meanwhile (the contract of `Order`).
        unsafe { std::slice::from_raw_parts(base, span.bytes as usize) }
    }

    /// The bytes of a span, to write.
    #[track_caller]
    #[expect(clippy::mut_from_ref, reason = "an arena is shared memory; exclusivity comes from marks")]
    fn bytes_mut(&self, span: Span) -> &mut [u8] {
        let base = self.address(span);
        // SAFETY: `address` checked the range, which lives as long as `self`. Whoever issued the command
        // ordered it by marks so that nobody else uses the span meanwhile (the contract of `Order`).
        unsafe { std::slice::from_raw_parts_mut(base, span.bytes as usize) }
    }

    /// Copies within memory, pacing itself by `pace`.
    pub(crate) fn copy_memory(&self, source: Span, target: Span, pace: &mut Pace) {
        let (from, to) = (self.address(source), self.address(target));
        if from == to {
            return;
        }
        let bytes = source.bytes as usize;
        let mut done = 0;
        while done < bytes {
            // One piece if nothing is paced: the memory's own speed.
            let piece = if pace.is_free() { bytes } else { PIECE_BYTES.min(bytes - done) };
            // SAFETY: both ranges were checked by `address`, have equal lengths and do not overlap (checked
            // when the copy was issued); the issuer ordered other uses of them by marks.
            unsafe { std::ptr::copy_nonoverlapping(from.add(done), to.add(done), piece) };
            done += piece;
            pace.passed(piece as u64);
        }
    }

    fn file(&self) -> &BlockFile {
        let Some(file) = self.file.get() else { panic!("the nvme tier was not reserved") };
        file
    }

    /// Carries out one piece of work on the thread of an engine.
    fn run(&self, command: Command, pace: &mut Pace) -> Result<()> {
        match command {
            Command::Copy(source, target) if source.tier == Tier::Nvme => {
                self.file().read(source.offset, self.bytes_mut(target))?;
                pace.passed(source.bytes);
            }
            Command::Copy(source, target) if target.tier == Tier::Nvme => {
                self.file().write(target.offset, self.bytes(source))?;
                pace.passed(source.bytes);
            }
            Command::Copy(source, target) => self.copy_memory(source, target, pace),
            Command::AllGather(shard, full) => {
                let own = self.own_part(shard, full);
                self.copy_memory(shard.span, own, pace);
                if let Some(link) = &self.link {
                    link.all_gather(self.bytes_mut(full.span))?;
                }
            }
            Command::ReduceScatter(full, shard) => {
                let own = self.own_part(shard, full);
                match &self.link {
                    Some(link) if shard.span == own => {
                        link.reduce_scatter(full.dtype, self.bytes_mut(full.span), None)?;
                    }
                    Some(link) => {
                        let out = self.bytes_mut(shard.span);
                        link.reduce_scatter(full.dtype, self.bytes_mut(full.span), Some(out))?;
                    }
                    None => self.copy_memory(own, shard.span, pace),
                }
            }
            Command::AllReduce(among, view) => {
                if let Some(link) = &self.link {
                    link.all_reduce(among, view.dtype, self.bytes_mut(view.span))?;
                }
            }
            Command::Accumulate(source, target) => match source.dtype {
                DType::F32 => self.accumulate::<f32>(source, target),
                DType::F16 => self.accumulate::<f16>(source, target),
                DType::Bf16 => self.accumulate::<bf16>(source, target),
                _ => unreachable!("checked when it was issued"),
            },
            Command::Update(update, multiplier) => {
                // SAFETY: the arenas live as long as `self`; whoever issued the command ordered it by marks so that
                // nobody else uses the state meanwhile.
                self.pool.install(|| unsafe { update.carry_out(multiplier) })?;
            }
            Command::Wait(_) | Command::Mark(_) => {}
        }
        Ok(())
    }

    fn accumulate<T: Element>(&self, source: View, target: View) {
        let source = bytemuck::cast_slice::<u8, T>(self.bytes(source.span));
        convert::accumulate(source, bytemuck::cast_slice_mut(self.bytes_mut(target.span)));
    }

    fn own_part(&self, shard: View, full: View) -> Span {
        let (own, shards) = self.link.as_ref().map_or((0, 1), |link| (link.rank() % link.shards(), link.shards()));
        route::own_part(shard, full, own, shards)
    }

    /// The life of an engine: until the queue's other end is dropped and everything in it is done.
    pub(crate) fn serve(&self, stream: Stream, queue: &Receiver<Command>, mut pace: Pace) {
        let progress = &self.progress[stream.index()];
        let _last_word = LastWord { shared: self, stream };
        for command in queue {
            match command {
                Command::Wait(mark) => {
                    self.progress[mark.stream.index()].wait(mark.number);
                }
                Command::Mark(number) => progress.reach(number, self.now_ns()),
                work if self.failure.get().is_none() => {
                    pace.begin();
                    if let Err(error) = self.run(work, &mut pace) {
                        self.fail(error);
                    }
                }
                _ => {}
            }
        }
    }
}

/// Keeps others from waiting for an engine that a bug has ended.
struct LastWord<'a> {
    shared: &'a Shared,
    stream: Stream,
}

impl Drop for LastWord<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let call = format!("the engine of {:?}", self.stream);
            self.shared.fail(Error::Device { call, reason: "it panicked: a bug of this program".into() });
            self.shared.progress[self.stream.index()].reach(u64::MAX, 0);
        }
    }
}

/// Whether sums are defined in `dtype`.
pub(crate) const fn sums_in(dtype: DType) -> bool {
    matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::Bf16)
}

/// The bandwidth of an emulated link: makes its thread sleep so that bytes pass no faster.
pub(crate) struct Pace {
    ns_per_byte: Option<f64>,
    /// When the bytes so far are through.
    due: Instant,
}

impl Pace {
    /// `bytes_per_s`: none for as fast as memory or disk go.
    pub(crate) fn new(bytes_per_s: Option<f64>) -> Pace {
        Pace { ns_per_byte: bytes_per_s.map(|rate| 1e9 / rate), due: Instant::now() }
    }

    fn is_free(&self) -> bool {
        self.ns_per_byte.is_none()
    }

    /// A command begins. Time in which the engine had nothing to do is not saved up, but lateness (a sleep
    /// that took too long) is made up for.
    fn begin(&mut self) {
        let now = Instant::now();
        if now.saturating_duration_since(self.due) > LATENESS {
            self.due = now;
        }
    }

    /// `bytes` were copied: returns when the emulated link would be through with them.
    fn passed(&mut self, bytes: u64) {
        let Some(ns_per_byte) = self.ns_per_byte else {
            return;
        };
        self.due += Duration::from_nanos((bytes as f64 * ns_per_byte) as u64);
        std::thread::sleep(self.due.saturating_duration_since(Instant::now()));
    }
}
