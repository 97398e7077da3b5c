//! Order: streams, and marks on them.
//!
//! A stream does its work in the order of issue; different streams know nothing of each other except
//! through [`Mark`]s: [`crate::Order::mark`] names a point in a stream, [`crate::Order::wait`] makes
//! another stream wait for it. Marks of a stream are numbered 1, 2, 3 …; a mark once reached stays
//! reached. Mark 0 is always reached.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// The queues of work of one rank.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stream {
    /// Operators.
    Compute,
    /// Host to device copies.
    HostToDevice,
    /// Device to host copies.
    DeviceToHost,
    /// Collectives across ranks.
    Collective,
    /// File to host reads.
    NvmeRead,
    /// Host to file writes.
    NvmeWrite,
    /// Updates of optimizer states that lie in host memory, by the host's cores.
    Host,
}

impl Stream {
    /// All streams.
    pub const ALL: [Stream; 7] = [
        Stream::Compute,
        Stream::HostToDevice,
        Stream::DeviceToHost,
        Stream::Collective,
        Stream::NvmeRead,
        Stream::NvmeWrite,
        Stream::Host,
    ];

    /// Position in [`Stream::ALL`].
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Short name.
    pub const fn name(self) -> &'static str {
        match self {
            Stream::Compute => "compute",
            Stream::HostToDevice => "h2d",
            Stream::DeviceToHost => "d2h",
            Stream::Collective => "collective",
            Stream::NvmeRead => "nvme_read",
            Stream::NvmeWrite => "nvme_write",
            Stream::Host => "host",
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A point in a stream: reached when everything issued to the stream before it is done.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mark {
    /// The stream.
    pub stream: Stream,
    /// Its number on that stream, from 1. 0: always reached.
    pub number: u64,
}

impl fmt::Debug for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}@{}", self.stream, self.number)
    }
}

/// When the latest marks of a stream were reached, where a thread of this process reaches them.
pub(crate) struct Stamps(Box<[AtomicU64]>);

impl Stamps {
    /// Marks whose time is kept.
    const KEPT: usize = 4096;

    pub(crate) fn new() -> Stamps {
        Stamps((0..Stamps::KEPT).map(|_| AtomicU64::new(0)).collect())
    }

    /// Keeps the time of mark `number`, just before it counts as reached.
    pub(crate) fn keep(&self, number: u64, now_ns: u64) {
        self.0[number as usize % Stamps::KEPT].store(now_ns, Ordering::Relaxed);
    }

    /// The time of mark `number`, where all up to `reached` are; none of one that is not, or is long past.
    pub(crate) fn of(&self, number: u64, reached: u64) -> Option<u64> {
        // The next mark's time may be there already.
        let kept = number > 0 && number <= reached && reached - number + 1 < Stamps::KEPT as u64;
        kept.then(|| self.0[number as usize % Stamps::KEPT].load(Ordering::Relaxed))
    }
}
