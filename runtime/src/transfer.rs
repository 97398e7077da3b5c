//! Transfers: every byte that moves goes through here, behind the fences it must wait for, and is counted
//! where its copy is issued (L4).

use crate::clock::{Clock, Times};
use crate::error::Result;
use crate::fence::Fence;
use crate::timeline::{Pace, StepTime, Timeline};
use castor_kernels::{Among, Backend, Mark, Span, Stream, View};
use std::sync::Arc;
use std::time::Instant;

/// Bytes by link.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Traffic {
    /// Host to device.
    pub host_to_device: u64,
    /// Device to host.
    pub device_to_host: u64,
    /// Disk to host.
    pub nvme_read: u64,
    /// Host to disk.
    pub nvme_write: u64,
    /// Received in all-gathers.
    pub gathered: u64,
    /// Sent in reductions.
    pub reduced: u64,
    /// Of host memory, read and written by its cores' updates.
    pub updated: u64,
}

impl Traffic {
    /// Name and bytes of each link.
    pub const fn links(&self) -> [(&'static str, u64); 7] {
        [
            ("host to device", self.host_to_device),
            ("device to host", self.device_to_host),
            ("nvme read", self.nvme_read),
            ("nvme write", self.nvme_write),
            ("gathered", self.gathered),
            ("reduced", self.reduced),
            ("updates on the host", self.updated),
        ]
    }

    /// What was counted since `earlier`.
    #[must_use]
    pub const fn since(&self, earlier: &Traffic) -> Traffic {
        Traffic {
            host_to_device: self.host_to_device - earlier.host_to_device,
            device_to_host: self.device_to_host - earlier.device_to_host,
            nvme_read: self.nvme_read - earlier.nvme_read,
            nvme_write: self.nvme_write - earlier.nvme_write,
            gathered: self.gathered - earlier.gathered,
            reduced: self.reduced - earlier.reduced,
            updated: self.updated - earlier.updated,
        }
    }
}

/// Issues copies and collectives.
pub struct Transfer {
    backend: Arc<dyn Backend>,
    traffic: Traffic,
    /// For each stream, the latest mark of every other stream that it already waits for.
    waited: [[u64; Stream::ALL.len()]; Stream::ALL.len()],
    clock: Clock,
    /// Since when the host's cores have what they are given.
    host_begins: Option<Mark>,
    /// In a rehearsal: when all this would happen.
    timeline: Option<Timeline>,
}

impl Transfer {
    /// Transfers on `backend`. `pace`: how fast it would be, where it only counts.
    pub fn new(backend: Arc<dyn Backend>, pace: Option<Pace>) -> Transfer {
        let timeline = pace.map(Timeline::new);
        let (traffic, waited, clock) = (Traffic::default(), Default::default(), Clock::new());
        Transfer { backend, traffic, waited, clock, host_begins: None, timeline }
    }

    /// Makes `stream` wait for `fence`.
    pub fn wait(&mut self, stream: Stream, fence: Fence) {
        for mark in fence.marks() {
            let waited = &mut self.waited[stream.index()][mark.stream.index()];
            if mark.stream == stream || *waited >= mark.number {
                continue;
            }
            *waited = mark.number;
            if let Some(timeline) = &mut self.timeline {
                timeline.wait(stream, mark);
            }
            if stream == Stream::Compute && !self.backend.reached(mark) {
                self.stall(mark);
            } else {
                self.backend.wait(stream, mark);
            }
        }
    }

    /// Makes the compute stream wait, and takes the time: of the device, or of this thread where that is the stream.
    fn stall(&mut self, mark: Mark) {
        let (from, begun) = (self.backend.mark(Stream::Compute), Instant::now());
        self.backend.wait(Stream::Compute, mark);
        if self.backend.reached(mark) {
            self.clock.stalled_ns(begun.elapsed().as_nanos() as u64);
        } else {
            self.clock.stalled(from, self.backend.mark(Stream::Compute));
        }
    }

    /// Marks the end of what the compute stream was given.
    pub fn computed(&mut self) -> Fence {
        let mark = self.backend.mark(Stream::Compute);
        if let Some(timeline) = &mut self.timeline {
            timeline.mark(mark);
        }
        Fence::at(mark)
    }

    /// The host's cores will read and write `bytes` of memory after `fence` and what was computed so far: that says
    /// whether and by what factor they update.
    pub fn works_on_host(&mut self, fence: Fence, bytes: u64) {
        let computed = self.computed();
        self.wait(Stream::Host, fence.and(computed));
        self.traffic.updated += bytes;
        self.host_begins = Some(self.backend.mark(Stream::Host));
        if let Some(timeline) = &mut self.timeline {
            timeline.moves(Stream::Host, bytes);
        }
    }

    /// Marks the end of what the host's cores were given.
    pub fn worked_on_host(&mut self) -> Fence {
        let mark = self.backend.mark(Stream::Host);
        if let Some(from) = self.host_begins.take() {
            self.clock.busy(from, mark);
        }
        if let Some(timeline) = &mut self.timeline {
            timeline.mark(mark);
        }
        Fence::at(mark)
    }

    /// The operators of the tick that begins will take this long.
    pub fn work(&mut self, seconds: f64) {
        if let Some(timeline) = &mut self.timeline {
            timeline.work(seconds);
        }
    }

    /// Ends a step. In a rehearsal: its times.
    pub fn end_step(&mut self) -> Option<StepTime> {
        self.timeline.as_mut().map(Timeline::end_step)
    }

    /// Copies on `stream` after `fence`; returns when the copy is done.
    ///
    /// # Errors
    /// If the copy is refused.
    pub fn copy(&mut self, stream: Stream, source: Span, target: Span, fence: Fence) -> Result<Fence> {
        self.wait(stream, fence);
        let from = self.backend.mark(stream);
        self.backend.copy(stream, source, target)?;
        let counted = match stream {
            Stream::HostToDevice => &mut self.traffic.host_to_device,
            Stream::DeviceToHost => &mut self.traffic.device_to_host,
            Stream::NvmeRead => &mut self.traffic.nvme_read,
            Stream::NvmeWrite => &mut self.traffic.nvme_write,
            Stream::Compute | Stream::Collective | Stream::Host => unreachable!("chunks move on the copy streams"),
        };
        *counted += source.bytes;
        Ok(Fence::at(self.moved(from, source.bytes)))
    }

    /// Forms the whole chunk from its shards after `fence`.
    ///
    /// # Errors
    /// If a peer is gone.
    pub fn gather(&mut self, shard: View, full: View, fence: Fence) -> Result<Fence> {
        let bytes = full.span.bytes - shard.span.bytes;
        self.traffic.gathered += bytes;
        self.collective(fence, bytes, |backend| backend.all_gather(shard, full))
    }

    /// Leaves in `shard` this rank's part of the sum of `full` over the ranks that together hold all shards.
    ///
    /// # Errors
    /// If a peer is gone.
    pub fn reduce_scatter(&mut self, full: View, shard: View, fence: Fence) -> Result<Fence> {
        let bytes = full.span.bytes - shard.span.bytes;
        self.traffic.reduced += bytes;
        self.collective(fence, bytes, |backend| backend.reduce_scatter(full, shard))
    }

    /// Sums `view` over these ranks.
    ///
    /// # Errors
    /// If a peer is gone.
    pub fn all_reduce(&mut self, among: Among, view: View, fence: Fence) -> Result<Fence> {
        self.traffic.reduced += view.span.bytes;
        self.collective(fence, view.span.bytes, |backend| backend.all_reduce(among, view))
    }

    /// Adds `source` to `target` behind the collectives, after `fence`. Nothing crosses a link.
    ///
    /// # Errors
    /// If it cannot be issued.
    pub fn accumulate(&mut self, source: View, target: View, fence: Fence) -> Result<Fence> {
        self.collective(fence, 0, |backend| backend.accumulate(source, target))
    }

    fn collective(
        &mut self,
        fence: Fence,
        bytes: u64,
        run: impl FnOnce(&dyn Backend) -> castor_kernels::Result<()>,
    ) -> Result<Fence> {
        self.wait(Stream::Collective, fence);
        let from = self.backend.mark(Stream::Collective);
        run(&*self.backend)?;
        Ok(Fence::at(self.moved(from, bytes)))
    }

    /// Marks the end of a move of `bytes` that began at `from`.
    fn moved(&mut self, from: Mark, bytes: u64) -> Mark {
        let to = self.backend.mark(from.stream);
        if let Some(timeline) = &mut self.timeline {
            timeline.moves(from.stream, bytes);
            timeline.mark(to);
        }
        self.clock.busy(from, to);
        to
    }

    /// All bytes so far.
    pub const fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// How long the engines were busy so far and the step waited for them; what is not over yet comes later.
    pub fn times(&mut self) -> Times {
        self.clock.settle(&*self.backend)
    }
}
