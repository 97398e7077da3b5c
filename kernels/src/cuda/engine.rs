//! Host engines: threads that do file requests and updates on the host in order, beside the CUDA streams.
//!
//! An engine that fails keeps the failure and goes on counting: a CUDA stream that waits for its counter
//! must not hang.

use super::driver::Failures;
use super::marks::{Engine, Marks};
use super::nvme::NvmeArena;
use crate::cpu::state::{self, StateUpdate};
use crate::ops::control;
use crate::{Error, Mark, Result};
use crossbeam::channel::{Receiver, Sender, bounded};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

/// Jobs that an engine can have waiting before the caller has to.
const QUEUE: usize = 4096;

/// Host memory of a job. Valid while the arena is, and that outlives the engines.
#[derive(Clone, Copy)]
pub(crate) struct HostBytes {
    pub(crate) address: *mut u8,
    pub(crate) bytes: u64,
}

// SAFETY: an address; who may use it when is decided by marks.
unsafe impl Send for HostBytes {}

/// What an engine is asked to do.
pub(crate) enum Job {
    /// Wait for a mark of another stream.
    Wait(Mark),
    /// File to host.
    Read { file: Arc<NvmeArena>, offset: u64, target: HostBytes },
    /// Host to file.
    Write { file: Arc<NvmeArena>, offset: u64, source: HostBytes },
    /// An update of a state on the host, by the control scalars that lie here.
    Update(StateUpdate, HostBytes),
    /// Report that everything before is done.
    Report(u64),
}

/// The sending end of an engine, and its thread. Dropping it lets the thread finish its jobs and end.
pub(crate) struct Worker {
    sender: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    pub(crate) fn start(engine: Engine, marks: Arc<Marks>, failures: Arc<Failures>) -> Result<Self> {
        let (sender, receiver) = bounded(QUEUE);
        let thread = std::thread::Builder::new()
            .name(format!("castor-{engine:?}"))
            .spawn(move || work(engine, &receiver, &marks, &failures))
            .map_err(|error| Error::Device {
                call: format!("starting the thread of {engine:?}"),
                reason: format!("{error}; raise `ulimit -u`"),
            })?;
        Ok(Worker { sender: Some(sender), thread: Some(thread) })
    }

    /// Queues a job.
    pub(crate) fn send(&self, job: Job) {
        let sender = self.sender.as_ref().unwrap_or_else(|| unreachable!("taken only in drop"));
        assert!(sender.send(job).is_ok(), "the engine's thread ends only when its sender is dropped");
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.sender.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn work(engine: Engine, jobs: &Receiver<Job>, marks: &Marks, failures: &Failures) {
    for job in jobs {
        if let Job::Report(number) = job {
            marks.report(engine, number);
            continue;
        }
        // After a failure nothing computed can be trusted; what is left is to let everyone finish.
        if failures.check().is_err() {
            continue;
        }
        let done = catch_unwind(AssertUnwindSafe(|| carry_out(job, marks, failures))).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
            Err(Error::Device {
                call: format!("work of {engine:?}"),
                reason: format!("it panicked, which is a bug of Castor: {}", text.unwrap_or("no message")),
            })
        });
        failures.keep(done);
    }
}

fn carry_out(job: Job, marks: &Marks, failures: &Failures) -> Result<()> {
    match job {
        Job::Wait(mark) => marks.watch(mark, failures),
        // SAFETY: the span was checked against the arena when the job was made, and the caller orders its
        // uses by marks.
        Job::Read { file, offset, target } => unsafe { file.read(offset, target.address, target.bytes) },
        // SAFETY: as above.
        Job::Write { file, offset, source } => unsafe { file.write(offset, source.address, source.bytes) },
        Job::Update(update, scalars) => {
            // SAFETY: an aligned slot of as many scalars, which nobody writes before this job is reported.
            let scalars = unsafe { std::slice::from_raw_parts(scalars.address.cast(), control::COUNT as usize) };
            // SAFETY: the state's spans were checked when the job was made, and the caller orders their uses by marks.
            state::multiplier(scalars).map_or(Ok(()), |multiplier| unsafe { update.carry_out(multiplier) })
        }
        Job::Report(_) => unreachable!("handled by the loop"),
    }
}
