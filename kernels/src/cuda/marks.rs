//! CUDA streams, and marks on every stream of the rank: events for the four CUDA streams, counters for the
//! host engines (NVMe reads, NVMe writes, updates on the host).
//!
//! An event is reused after [`RING`] further marks, and only after the mark it stood for was reached. So a
//! mark that fell out of its ring is reached by construction, and nobody can wait for the wrong one.
//!
//! A counter lies in a page that the device sees: a CUDA stream waits for an engine with a stream memory
//! operation, an engine waits for a CUDA stream by asking its event now and then.

use super::driver::{Failures, SharedPage, check, refusal};
use crate::stream::Stamps;
use crate::{Error, Mark, Result, Stream};
use cudarc::driver::CudaContext;
use cudarc::driver::sys::{self, CUevent, CUresult, CUstream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Marks that a CUDA stream can have in flight.
const RING: u64 = 8192;

/// Pause between two looks of an engine, or of a join on an engine. File requests take milliseconds.
const LOOK: Duration = Duration::from_micros(30);

/// A host thread that does work in order and counts what it has done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Engine {
    /// File to host.
    NvmeRead,
    /// Host to file.
    NvmeWrite,
    /// Updates of states on the host.
    Host,
}

impl Engine {
    /// The engine behind a stream.
    pub(crate) const fn of(stream: Stream) -> Option<Engine> {
        match stream {
            Stream::NvmeRead => Some(Engine::NvmeRead),
            Stream::NvmeWrite => Some(Engine::NvmeWrite),
            Stream::Host => Some(Engine::Host),
            _ => None,
        }
    }
}

/// A CUDA stream with its ring of events.
struct Queue {
    stream: CUstream,
    events: Vec<CUevent>,
    /// Number of the last mark.
    last: AtomicU64,
    /// All marks up to this one are known to be reached.
    reached: AtomicU64,
}

/// All order of a rank.
pub(crate) struct Marks {
    context: Arc<CudaContext>,
    /// In the order of `Stream::ALL`; engines have none.
    queues: Vec<Queue>,
    counters: SharedPage,
    /// Marks given out by each engine's stream.
    issued: [AtomicU64; 3],
    /// Of each engine's marks, in nanoseconds since `start`.
    stamps: [Stamps; 3],
    start: Instant,
    timed: bool,
}

// SAFETY: streams and events are handles of a thread-safe driver; everything else is atomic.
unsafe impl Send for Marks {}
// SAFETY: as above.
unsafe impl Sync for Marks {}

impl Marks {
    pub(crate) fn new(context: &Arc<CudaContext>, timed: bool) -> Result<Self> {
        let mut marks = Marks {
            context: context.clone(),
            queues: Vec::new(),
            counters: SharedPage::new(context)?,
            issued: Default::default(),
            stamps: std::array::from_fn(|_| Stamps::new()),
            start: Instant::now(),
            timed,
        };
        let flags = if timed { 0 } else { sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32 };
        for _ in [Stream::Compute, Stream::HostToDevice, Stream::DeviceToHost, Stream::Collective] {
            // Pushed before it is filled, so that a failure half way still cleans up.
            marks.queues.push(Queue {
                stream: std::ptr::null_mut(),
                events: Vec::with_capacity(RING as usize),
                last: AtomicU64::new(0),
                reached: AtomicU64::new(0),
            });
            let Some(queue) = marks.queues.last_mut() else { unreachable!() };
            let non_blocking = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            // SAFETY: writes one handle.
            check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut queue.stream, non_blocking) })?;
            for _ in 0..RING {
                let mut event = std::ptr::null_mut();
                // SAFETY: writes one handle.
                check("cuEventCreate", unsafe { sys::cuEventCreate(&mut event, flags) })?;
                queue.events.push(event);
            }
        }
        Ok(marks)
    }

    /// The CUDA stream behind a stream.
    ///
    /// # Panics
    /// For the streams of an engine.
    pub(crate) fn stream(&self, stream: Stream) -> CUstream {
        self.queue(stream).stream
    }

    #[track_caller]
    fn queue(&self, stream: Stream) -> &Queue {
        assert!(Engine::of(stream).is_none(), "{stream:?} is not a CUDA stream");
        &self.queues[stream.index()]
    }

    fn counter(&self, engine: Engine) -> &AtomicU64 {
        // One cache line each.
        let address = self.counters.host(engine as usize * 64).cast::<u64>();
        // SAFETY: aligned, inside the page, lives as long as `self`; only ever used as an atomic here, and
        // read by the device.
        unsafe { AtomicU64::from_ptr(address) }
    }

    /// Takes the next number of an engine. The caller passes it to the engine, which reports it when done.
    pub(crate) fn issue(&self, engine: Engine) -> u64 {
        self.issued[engine as usize].fetch_add(1, Ordering::Relaxed) + 1
    }

    /// What an engine has done.
    pub(crate) fn done(&self, engine: Engine) -> u64 {
        self.counter(engine).load(Ordering::Acquire)
    }

    /// An engine reports what it has done.
    pub(crate) fn report(&self, engine: Engine, number: u64) {
        self.stamps[engine as usize].keep(number, self.start.elapsed().as_nanos() as u64);
        self.counter(engine).store(number, Ordering::Release);
    }

    /// Blocks until an engine has done `number`.
    pub(crate) fn join_engine(&self, engine: Engine, number: u64) {
        while self.done(engine) < number {
            std::thread::sleep(LOOK);
        }
    }

    /// Marks the end of a CUDA stream.
    pub(crate) fn record(&self, stream: Stream) -> Result<Mark> {
        let queue = self.queue(stream);
        let number = queue.last.load(Ordering::Relaxed) + 1;
        if number > RING {
            // The event's old mark must be over; it nearly always is.
            self.join(Mark { stream, number: number - RING })?;
        }
        let slot = (number % RING) as usize;
        // SAFETY: handles of this context.
        check("cuEventRecord", unsafe { sys::cuEventRecord(queue.events[slot], queue.stream) })?;
        queue.last.store(number, Ordering::Release);
        Ok(Mark { stream, number })
    }

    /// Makes a CUDA stream wait for a mark.
    pub(crate) fn stream_wait(&self, stream: Stream, mark: Mark) -> Result<()> {
        if mark.number == 0 || mark.stream == stream {
            return Ok(());
        }
        let waiting = self.queue(stream).stream;
        if let Some(engine) = Engine::of(mark.stream) {
            return self.stream_wait_engine(waiting, engine, mark.number);
        }
        let queue = self.queue(mark.stream);
        if self.known_reached(queue, mark.number) {
            return Ok(());
        }
        let slot = (mark.number % RING) as usize;
        // SAFETY: handles of this context; the event was recorded for this mark.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(waiting, queue.events[slot], 0) })
    }

    fn stream_wait_engine(&self, waiting: CUstream, engine: Engine, number: u64) -> Result<()> {
        if self.done(engine) >= number {
            return Ok(());
        }
        let address = self.counters.device(engine as usize * 64);
        let at_least = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: a registered, device-visible, aligned counter that outlives the streams.
        check("cuStreamWaitValue64", unsafe { sys::cuStreamWaitValue64_v2(waiting, address, number, at_least) })
    }

    fn known_reached(&self, queue: &Queue, number: u64) -> bool {
        let last = queue.last.load(Ordering::Acquire);
        assert!(number <= last, "mark {number} was never given out (the last is {last})");
        // A slot is taken again only after its mark was reached.
        number + RING <= last || number <= queue.reached.load(Ordering::Acquire)
    }

    /// Whether a mark is reached.
    pub(crate) fn reached(&self, mark: Mark) -> Result<bool> {
        if let Some(engine) = Engine::of(mark.stream) {
            return Ok(self.done(engine) >= mark.number);
        }
        let queue = self.queue(mark.stream);
        if mark.number == 0 || self.known_reached(queue, mark.number) {
            return Ok(true);
        }
        let slot = (mark.number % RING) as usize;
        // SAFETY: a handle of this context.
        match unsafe { sys::cuEventQuery(queue.events[slot]) } {
            CUresult::CUDA_SUCCESS => {}
            CUresult::CUDA_ERROR_NOT_READY => return Ok(false),
            code => return Err(failed(mark, check("cuEventQuery", code))),
        }
        queue.reached.fetch_max(mark.number, Ordering::AcqRel);
        Ok(true)
    }

    /// Blocks the calling thread until a mark is reached.
    pub(crate) fn join(&self, mark: Mark) -> Result<()> {
        if let Some(engine) = Engine::of(mark.stream) {
            self.join_engine(engine, mark.number);
            return Ok(());
        }
        if self.reached(mark)? {
            return Ok(());
        }
        let queue = self.queue(mark.stream);
        let slot = (mark.number % RING) as usize;
        // SAFETY: a handle of this context. Only the step's thread records, and that is the caller.
        let code = unsafe { sys::cuEventSynchronize(queue.events[slot]) };
        if code != CUresult::CUDA_SUCCESS {
            return Err(failed(mark, check("cuEventSynchronize", code)));
        }
        queue.reached.fetch_max(mark.number, Ordering::AcqRel);
        Ok(())
    }

    /// Blocks an engine's thread until a mark is reached. Looks instead of blocking in the driver, so that
    /// an event that is recorded anew meanwhile is not waited for.
    /// Gives up when something failed: what the mark waits for may then never come.
    pub(crate) fn watch(&self, mark: Mark, failures: &Failures) -> Result<()> {
        self.bind()?;
        while !self.reached(mark)? && failures.check().is_ok() {
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Nanoseconds between two reached marks of one stream, unless too many others came since.
    pub(crate) fn elapsed_ns(&self, from: Mark, to: Mark) -> Option<u64> {
        if !self.timed || from.stream != to.stream {
            return None;
        }
        if let Some(engine) = Engine::of(from.stream) {
            let at = |mark: Mark| self.stamps[engine as usize].of(mark.number, self.done(engine));
            return at(to)?.checked_sub(at(from)?);
        }
        let queue = self.queue(from.stream);
        let last = queue.last.load(Ordering::Acquire);
        let kept = |mark: Mark| mark.number > 0 && mark.number <= last && mark.number + RING > last;
        if !kept(from) || !kept(to) || from.number > to.number || !self.reached(to).ok()? {
            return None;
        }
        let event = |mark: Mark| queue.events[(mark.number % RING) as usize];
        let mut milliseconds = 0.0f32;
        // SAFETY: recorded events of this context; writes one float.
        let code = unsafe { sys::cuEventElapsedTime_v2(&mut milliseconds, event(from), event(to)) };
        (code == CUresult::CUDA_SUCCESS).then(|| (f64::from(milliseconds) * 1e6) as u64)
    }

    /// Makes the context current on the calling thread.
    pub(crate) fn bind(&self) -> Result<()> {
        self.context.bind_to_thread().map_err(|e| refusal("cuCtxSetCurrent", e))
    }
}

/// Says of an asynchronous failure where it was noticed: the failing kernel itself is not known.
fn failed(mark: Mark, result: Result<()>) -> Error {
    match result {
        Err(Error::Device { call, reason }) => {
            Error::Device { call, reason: format!("{reason} (work on the device failed before {mark:?})") }
        }
        Err(other) => other,
        Ok(()) => unreachable!("only called with a failure"),
    }
}

impl Drop for Marks {
    fn drop(&mut self) {
        if self.bind().is_err() {
            return;
        }
        for queue in &self.queues {
            // SAFETY: handles made in `new`, destroyed once, after the stream has drained. Failures at the
            // end of life have no one to go to.
            unsafe {
                if !queue.stream.is_null() {
                    let _ = sys::cuStreamSynchronize(queue.stream);
                }
                for &event in &queue.events {
                    let _ = sys::cuEventDestroy_v2(event);
                }
                if !queue.stream.is_null() {
                    let _ = sys::cuStreamDestroy_v2(queue.stream);
                }
            }
        }
    }
}
