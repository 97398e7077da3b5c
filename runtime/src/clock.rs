//! How long the engines were busy and how long the step waited for them, by the device's own clock.
//!
//! A backend that keeps times of marks is asked once the marks are reached, never waited for. On a backend whose
//! compute stream is the calling thread the wait itself is timed.

use castor_kernels::{Backend, Mark, Stream};
use std::collections::VecDeque;

/// Intervals whose end is not reached yet; what comes beyond is not timed (L3).
const PENDING: usize = 4096;

/// Times of a rank so far.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Times {
    /// Nanoseconds for which each stream moved bytes, by [`Stream::index`]; none where the backend keeps no times.
    pub busy_ns: [Option<u64>; Stream::ALL.len()],
    /// Nanoseconds for which the compute stream waited for moves.
    pub stall_ns: u64,
    /// Intervals that are in none of these times: they came while too many others were not over yet, or the backend had
    /// no times of them any more when they were asked for.
    pub lost: u64,
}

#[derive(Clone, Copy)]
enum What {
    Busy,
    Stall,
}

/// Takes intervals between marks and adds up their times.
pub(crate) struct Clock {
    pending: VecDeque<(What, Mark, Mark)>,
    times: Times,
}

impl Clock {
    pub(crate) fn new() -> Clock {
        Clock { pending: VecDeque::with_capacity(PENDING), times: Times::default() }
    }

    /// A move went on between two marks of its stream.
    pub(crate) fn busy(&mut self, from: Mark, to: Mark) {
        self.take(What::Busy, from, to);
    }

    /// The compute stream waited between two marks of it.
    pub(crate) fn stalled(&mut self, from: Mark, to: Mark) {
        self.take(What::Stall, from, to);
    }

    /// The calling thread, which is the compute stream, waited.
    pub(crate) fn stalled_ns(&mut self, nanoseconds: u64) {
        self.times.stall_ns += nanoseconds;
    }

    /// Looks at the intervals that are over by now.
    pub(crate) fn settle(&mut self, backend: &dyn Backend) -> Times {
        while let Some((what, from, to)) = self.pending.front().copied() {
            if !backend.reached(to) {
                break;
            }
            self.pending.pop_front();
            let Some(ns) = backend.elapsed_ns(from, to) else {
                self.times.lost += 1;
                continue;
            };
            match what {
                What::Busy => *self.times.busy_ns[from.stream.index()].get_or_insert(0) += ns,
                What::Stall => self.times.stall_ns += ns,
            }
        }
        self.times
    }

    fn take(&mut self, what: What, from: Mark, to: Mark) {
        if self.pending.len() < PENDING {
            self.pending.push_back((what, from, to));
        } else {
            self.times.lost += 1;
        }
    }
}
