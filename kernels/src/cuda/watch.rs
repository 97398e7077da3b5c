//! Watches the work that ranks do together, from a thread of its own: notices that a rank is gone or hangs, finds out
//! which, and frees the thread of the steps.
//!
//! NCCL does not tell: between GPUs of one host a peer's death leaves a collective spinning. Nor can the thread of the
//! steps look: behind such a collective the driver's launch queue fills, and then every call of the driver hangs, from
//! other threads too. So the collective stream writes a number before and after each collective into host memory
//! ([`Progress`]), and the watcher reads it there. Time counts while the stream is inside of a collective: how long the
//! rank's own work before it takes is nobody's concern.
//!
//! What was found is kept as a failure, then the communicators are aborted: their kernels end, the queue drains and the
//! thread comes back to the failure. Where it does not come back, the last resort is called, which ends the process.

use super::driver::{Failures, SharedPage, check};
use super::nccl::Nccl;
use crate::link::Link;
use crate::{Among, Error, Result};
use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, bounded};
use cudarc::driver::CudaContext;
use cudarc::driver::sys::{self, CUstream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// Time between two looks.
const LOOK: Duration = Duration::from_millis(20);

/// What a look counts at most. It comes later where this process was stopped itself, which is not the peers' doing.
const LATE_LOOK: Duration = Duration::from_secs(1);

/// How long a collective may go on after a peer has ended. One that ended in order has done its part of it.
const AFTER_THE_END: Duration = Duration::from_secs(2);

/// How long a failure that NCCL noticed waits for the link to show whose it is.
const WHOSE: Duration = Duration::from_secs(1);

/// Most of the deadline that is kept for the roll call.
const ROLL_CALL: Duration = Duration::from_secs(10);

/// The least that each step of [`Nccl::join`] may take: it is slow where the driver is cold.
const START: Duration = Duration::from_secs(60);

/// How long the communicators and the driver have to let the thread of the steps go.
const GRACE: Duration = Duration::from_secs(10);

/// Ends the process, with the failure that this rank would have ended with. Called at most once, on another thread, some
/// seconds after that failure was noticed.
pub type LastResort = Box<dyn FnOnce(&Error) + Send>;

/// Numbers of each collective. That of its end is a multiple; the one before it is odd and says among which ranks.
const NUMBERS: u64 = 8;

/// How far the collectives are: ascending numbers in a page that the device writes.
pub(crate) struct Progress {
    page: SharedPage,
    /// Collectives that were issued.
    issued: AtomicU64,
}

impl Progress {
    pub(crate) fn new(context: &Arc<CudaContext>) -> Result<Self> {
        Ok(Progress { page: SharedPage::new(context)?, issued: AtomicU64::new(0) })
    }

    /// Makes `call`, which gives `stream` a collective of these ranks.
    pub(crate) fn around<T>(&self, among: Among, stream: CUstream, call: impl FnOnce() -> T) -> Result<T> {
        let write = |number| {
            // SAFETY: a registered, device-visible, aligned number that outlives the streams.
            let code = unsafe { sys::cuStreamWriteValue64_v2(stream, self.page.device(0), number, 0) };
            check("cuStreamWriteValue64", code)
        };
        let (start, end) = self.next(among);
        write(start)?;
        let value = call();
        write(end)?;
        Ok(value)
    }

    /// Makes `call`, which is like a collective of these ranks, on this thread. The stream has nothing to do.
    pub(crate) fn here<T>(&self, among: Among, call: impl FnOnce() -> T) -> T {
        let (start, end) = self.next(among);
        self.number().store(start, Ordering::Release);
        let value = call();
        self.number().store(end, Ordering::Release);
        value
    }

    /// The numbers of the next collective.
    fn next(&self, among: Among) -> (u64, u64) {
        numbers(self.issued.fetch_add(1, Ordering::Relaxed), among)
    }

    fn number(&self) -> &AtomicU64 {
        // SAFETY: aligned, inside the page, lives as long as `self`; only ever used as an atomic here.
        unsafe { AtomicU64::from_ptr(self.page.host(0).cast()) }
    }

    /// The number that was written last.
    fn reached(&self) -> u64 {
        self.number().load(Ordering::Acquire)
    }
}

/// The numbers of the start and the end of a collective that comes after `before` others.
fn numbers(before: u64, among: Among) -> (u64, u64) {
    (before * NUMBERS + 2 * among as u64 + 1, (before + 1) * NUMBERS)
}

/// Among which ranks the collective is that goes on at this number.
fn inside(number: u64) -> Option<Among> {
    let among = [Among::All, Among::Shards, Among::Replicas];
    among.into_iter().find(|&among| number % NUMBERS == numbers(0, among).0)
}

/// For how long a collective has gone on.
#[derive(Default)]
struct Stillness {
    reached: u64,
    still: Duration,
}

/// What a look calls for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Asks {
    Nothing,
    /// Whether a peer among these ranks has ended.
    WhoLeft(Among),
    /// Who does not answer.
    WhoHangs,
}

impl Stillness {
    /// A look at the number of [`Progress`], `passed` after the last one.
    fn look(&mut self, reached: u64, passed: Duration, deadline: Duration) -> Asks {
        let Some(among) = inside(reached).filter(|_| reached == self.reached) else {
            *self = Stillness { reached, still: Duration::ZERO };
            return Asks::Nothing;
        };
        self.still += passed.min(LATE_LOOK);
        if self.still + roll_call(deadline) >= deadline {
            Asks::WhoHangs
        } else if self.still >= AFTER_THE_END {
            Asks::WhoLeft(among)
        } else {
            Asks::Nothing
        }
    }
}

/// The part of a deadline that is kept for the roll call.
fn roll_call(deadline: Duration) -> Duration {
    ROLL_CALL.min(deadline / 4)
}

/// Asks the other ranks.
///
/// # Errors
/// [`Error::Peer`] naming the rank that is gone or silent; [`Error::Device`] if all answer although they should not
/// have had to.
fn ask(asks: Asks, link: &Link, still: Duration) -> Result<()> {
    match asks {
        Asks::Nothing => Ok(()),
        Asks::WhoLeft(among) => link.departed(among, Duration::ZERO).map_or(Ok(()), |peer| Err(link.blame(peer))),
        Asks::WhoHangs => {
            link.roll_call(roll_call(link.deadline()))?;
            Err(Error::Device {
                call: "a collective".into(),
                reason: format!(
                    "rank {}: it did not end within {} s although all ranks answer; NCCL_DEBUG=INFO says more, and \
                     --timeout gives it more seconds",
                    link.rank(),
                    still.as_secs()
                ),
            })
        }
    }
}

/// A failure of NCCL, or the departure of a peer that it comes from.
pub(crate) fn traced(error: Error, link: &Link) -> Error {
    link.departed(Among::All, WHOSE).map_or(error, |peer| link.blame(peer))
}

/// The thread. Dropping it ends it.
pub(crate) struct Watcher {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    /// Watches until it is dropped or has found something.
    pub(crate) fn start(
        link: Arc<Link>,
        nccl: Arc<Nccl>,
        failures: Arc<Failures>,
        last_resort: Option<LastResort>,
    ) -> Result<Self> {
        let (stop, stopped) = bounded(0);
        let work = move || {
            let Err(error) = watch(&link, &nccl, &stopped) else { return };
            failures.keep::<()>(Err(error));
            // What this rank found first is what it fails with.
            let Err(first) = failures.check() else { unreachable!("a failure was kept") };
            let why = first.clone();
            // Hangs itself where the driver does, or where the thread of the steps hangs in NCCL.
            let _detached = Builder::new().name("castor-abort".into()).spawn(move || nccl.abort(&why));
            wait(&stopped, GRACE, &first, last_resort);
        };
        let thread = Builder::new().name("castor-watch".into()).spawn(work).map_err(|error| Error::Device {
            call: "starting the thread that watches the ranks".into(),
            reason: format!("{error}; raise `ulimit -u`"),
        })?;
        Ok(Watcher { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Looks until the watcher is stopped.
///
/// # Errors
/// What was found.
fn watch(link: &Link, nccl: &Nccl, stopped: &Receiver<()>) -> Result<()> {
    let (mut stillness, mut looked) = (Stillness::default(), Instant::now());
    while stopped.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
        nccl.failure().map_err(|error| traced(error, link))?;
        let deadline = if nccl.joined() { link.deadline() } else { link.deadline().max(START) };
        let passed = looked.elapsed();
        looked += passed;
        ask(stillness.look(nccl.progress().reached(), passed, deadline), link, stillness.still)?;
    }
    Ok(())
}

/// Gives the thread of the steps `grace` to stop the watcher; then the last resort.
fn wait(stopped: &Receiver<()>, grace: Duration, error: &Error, last_resort: Option<LastResort>) {
    if stopped.recv_timeout(grace) == Err(RecvTimeoutError::Timeout)
        && let Some(end) = last_resort
    {
        end(error);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::LinkOptions;

    const DEADLINE: Duration = Duration::from_secs(20);

    /// What the last of `looks` asks for, one each half a second.
    fn after(looks: u32, stillness: &mut Stillness, number: u64) -> Asks {
        (0..looks).map(|_| stillness.look(number, LATE_LOOK / 2, DEADLINE)).last().unwrap()
    }

    #[test]
    fn only_time_inside_of_a_collective_counts() {
        let mut stillness = Stillness::default();
        let (start, end) = numbers(0, Among::Shards);
        assert_eq!(after(1000, &mut stillness, 0), Asks::Nothing);
        // A look to see it, 2 s of patience, and 15 s, for 5 are the roll call's.
        assert_eq!(after(4, &mut stillness, start), Asks::Nothing);
        assert_eq!(after(26, &mut stillness, start), Asks::WhoLeft(Among::Shards));
        assert_eq!(after(1, &mut stillness, start), Asks::WhoHangs);
        // It ends after all, and a long computation of this rank follows.
        assert_eq!(after(1000, &mut stillness, end), Asks::Nothing);
        // Many short ones are no hang.
        for before in 1..1000 {
            assert_eq!(after(3, &mut stillness, numbers(before, Among::All).0), Asks::Nothing);
        }
    }

    #[test]
    fn numbers_ascend_and_say_among_whom() {
        let mut last = 0;
        for (before, among) in (0..).zip([Among::All, Among::Shards, Among::Replicas, Among::All]) {
            let (start, end) = numbers(before, among);
            assert!(last < start && start < end);
            assert_eq!((inside(last), inside(start)), (None, Some(among)));
            last = end;
        }
    }

    #[test]
    fn a_pause_of_this_process_counts_as_one_late_look() {
        let mut stillness = Stillness { reached: 1, still: Duration::ZERO };
        assert_eq!(stillness.look(1, Duration::from_secs(3600), DEADLINE), Asks::Nothing);
        assert_eq!(stillness.still, LATE_LOOK);
    }

    fn links(deadline: Duration) -> Vec<Link> {
        Link::in_process(3, LinkOptions { deadline, ..LinkOptions::default() }).unwrap()
    }

    #[test]
    fn a_rank_that_left_is_named() {
        let mut links = links(DEADLINE);
        let asks = |link: &Link| ask(Asks::WhoLeft(Among::All), link, Duration::ZERO);
        asks(&links[0]).unwrap();
        links.remove(1);
        let found = [asks(&links[0]), asks(&links[1])];
        assert!(found.iter().all(|found| matches!(found, Err(Error::Peer { rank: 1, .. }))), "{found:?}");
    }

    #[test]
    fn a_rank_that_has_no_part_in_the_collective_may_leave() {
        let mut links = Link::in_process(4, LinkOptions { deadline: DEADLINE, shards: Some(2) }).unwrap();
        links.truncate(2);
        let asks = |among| ask(Asks::WhoLeft(among), &links[0], Duration::ZERO);
        asks(Among::Shards).unwrap();
        assert!(matches!(asks(Among::Replicas), Err(Error::Peer { rank: 2, .. })));
    }

    #[test]
    fn a_silent_rank_is_named_by_all_others() {
        let links = links(4 * Duration::from_secs(1));
        let found = std::thread::scope(|scope| {
            let asking = [0, 2].map(|rank| {
                scope.spawn({
                    let link = &links[rank];
                    move || ask(Asks::WhoHangs, link, Duration::ZERO)
                })
            });
            asking.map(|thread| thread.join().unwrap())
        });
        assert!(found.iter().all(|found| matches!(found, Err(Error::Peer { rank: 1, .. }))), "{found:?}");
    }

    #[test]
    fn a_collective_that_hangs_although_all_answer_is_an_error_of_all() {
        let links = links(DEADLINE);
        let found: Vec<_> = std::thread::scope(|scope| {
            let ask = |link| scope.spawn(move || ask(Asks::WhoHangs, link, Duration::from_secs(15)));
            let asking: Vec<_> = links.iter().map(ask).collect();
            asking.into_iter().map(|thread| thread.join().unwrap().unwrap_err().to_string()).collect()
        });
        for (rank, error) in found.iter().enumerate() {
            assert!(
                error.starts_with(&format!("a collective failed: rank {rank}: it did not end within 15 s")),
                "{error}"
            );
        }
    }

    #[test]
    fn the_last_resort_is_for_a_thread_that_does_not_come_back() {
        let error = Error::Peer { rank: 1, reason: "it hangs".into() };
        let (called, calls) = bounded(1);
        let last_resort = || -> Option<LastResort> {
            let called = called.clone();
            Some(Box::new(move |error| called.send(error.to_string()).unwrap()))
        };
        let (stop, stopped) = bounded(0);
        wait(&stopped, Duration::from_millis(1), &error, last_resort());
        assert_eq!(calls.try_recv().unwrap(), "rank 1: it hangs");
        drop(stop);
        wait(&stopped, Duration::from_secs(600), &error, last_resort());
        assert!(calls.try_recv().is_err());
    }
}
