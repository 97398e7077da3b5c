//! Leases: the right to use a chunk's bytes, given and taken back.

use super::StatefulTensorMgr;
use crate::chunk::WorkingCopy;
use crate::error::Result;
use crate::schedule::{Access, Part, Use, in_place};
use crate::units::ChunkId;
use castor_kernels::{Span, Stream, Tier, View};

/// The right to use a chunk until it is given to [`StatefulTensorMgr::release`].
#[must_use = "a lease keeps its chunk in place until it is released"]
#[derive(Debug)]
pub struct Lease {
    pub(super) chunk: ChunkId,
    pub(super) access: Access,
    pub(super) view: View,
    pub(super) first: u64,
    pub(super) elements: u64,
    pub(super) own: (u64, u64),
    /// Whether this rank's shard counts in the global norm.
    pub(super) squares: bool,
    /// Whether anything is in a sum yet.
    pub(super) begun: bool,
}

impl Lease {
    /// All elements of the lease.
    pub const fn view(&self) -> View {
        self.view
    }

    /// Number of the first element within the group.
    pub const fn first(&self) -> u64 {
        self.first
    }

    /// Number of elements (the view's own count is not exact for 8-bit moments).
    pub const fn elements(&self) -> u64 {
        self.elements
    }

    /// The part whose squares this rank adds to the global norm: each element belongs to one rank. None where a rank
    /// with the same shard adds it.
    pub fn norm_part(&self) -> Option<View> {
        self.squares.then(|| self.view.part(self.own.0 - self.first, self.own.1))
    }
}

impl StatefulTensorMgr {
    /// Gives a lease on `chunk`; operators issued from now on may use it.
    ///
    /// # Errors
    /// [`crate::Error::OutOfRoom`] if the window cannot hold it; the backend's if a move fails.
    pub fn acquire(&mut self, chunk: ChunkId, access: Access) -> Result<Lease> {
        let tick = self.tick.expect("acquire happens within a pass");
        let gathered = access.writes() && self.layout.sharding.optimizer && !self.sharded(chunk);
        assert!(
            !(access.on_host() && gathered && self.layout.shards > 1),
            "{chunk:?}: what all ranks have whole is gathered on the device"
        );
        let partial = matches!(access, Access::Produce(part) if part != Part::Only);
        assert!(!(partial && self.sharded(chunk)), "{chunk:?}: a gradient that is split is produced in one part");
        assert!(!access.sums() || self.sharded(chunk), "{chunk:?}: only what is split is summed in shards");
        if let Some(ticks) = &mut self.recording {
            let uses = &mut ticks.last_mut().expect("a tick was started").uses;
            uses.push(Use { chunk, access, until: tick });
        }
        let home = self.chunk(chunk).home.tier;
        // What is recorded has no plan yet: everything is on the device.
        let in_memory = home == Tier::Host || self.recording.is_some();
        assert!(in_memory || !access.on_host(), "{chunk:?}: the host's cores find nothing on the {home} tier");
        let home_on_device = home == Tier::Device;
        let view = if in_place(access, self.sharded(chunk), home_on_device) {
            self.drop_stale_copy(chunk, access);
            let state = self.chunk_mut(chunk);
            state.lease_home(access);
            let (home, mut fence) = (state.home, state.home_ready);
            if access.writes() {
                fence = fence.and(state.home_used);
            }
            let view = self.part_of(chunk, access, home);
            if access.on_host() {
                self.transfer.works_on_host(fence, view.span.bytes * (1 + u64::from(access.writes())));
            } else if !access.sums() {
                // Contributions are added on the collective stream, which waits then.
                self.transfer.wait(Stream::Compute, fence);
            }
            view
        } else {
            if self.drop_stale_copy(chunk, access) {
                self.demand_fetches += u64::from(access.reads() && self.recording.is_none());
                self.fetch(chunk, access, self.clock, 0, true)?;
            }
            let copy = self.chunk_mut(chunk).lease_copy(access);
            let fence = if access.writes() { copy.ready.and(copy.used) } else { copy.ready };
            if !access.sums() {
                self.transfer.wait(Stream::Compute, fence);
            }
            self.part_of(chunk, access, copy.span)
        };
        let (first, elements) = self.range(chunk, access);
        if access.whole() && !access.reads() {
            let used = self.layout.group(chunk.group()).used;
            self.backend.zero(view.part(used, elements - used));
        }
        if access.sums() {
            self.take_places(chunk)?;
        }
        self.note_regions();
        let squares = u64::from(self.backend.rank()) < self.layout.shards;
        let (own, begun) = (self.own_range(chunk), access.reads());
        Ok(Lease { chunk, access, view, first, elements, own, squares, begun })
    }

    /// Reduces a gradient that has no home over the ranks, once it is formed. Operators that are issued from here on
    /// may not use it before [`StatefulTensorMgr::await_reduced`].
    ///
    /// # Errors
    /// If a move cannot be issued.
    pub fn reduce_here(&mut self, lease: &mut Lease) -> Result<()> {
        let (chunk, computed) = (lease.chunk, self.transfer.computed());
        let place = self.chunk(chunk).copy().expect("what has no home is in the window").span;
        let (_, done) = self.reduce(chunk, lease.view, place, computed)?;
        self.chunk_mut(chunk).written(done);
        lease.view = self.part_of(chunk, Access::ReadShard, place);
        (lease.first, lease.elements) = self.range(chunk, Access::ReadShard);
        Ok(())
    }

    /// From here on operators find in a reduced gradient what this rank updates of it.
    pub fn await_reduced(&mut self, lease: &Lease) {
        let ready = self.chunk(lease.chunk).leased_free();
        self.transfer.wait(Stream::Compute, ready);
    }

    /// Takes a lease back: written bytes go home, a gradient is reduced over the ranks.
    ///
    /// # Errors
    /// If a move cannot be issued.
    pub fn release(&mut self, lease: Lease) -> Result<()> {
        let Lease { chunk, access, view, begun, .. } = lease;
        let tick = self.tick.expect("release happens within a pass");
        if let Some(ticks) = &mut self.recording {
            let used = ticks.iter_mut().rev().flat_map(|t| t.uses.iter_mut().rev()).find(|used| used.chunk == chunk);
            used.expect("the lease was recorded").until = tick;
        }
        let computed = if access.on_host() { self.transfer.worked_on_host() } else { self.transfer.computed() };
        let copy = self.chunk(chunk).copy().copied();
        let (mut written, mut used) = (computed, computed);
        if access.writes() {
            let mut source = copy.map_or(self.chunk(chunk).home, |copy| copy.span);
            match access {
                Access::Produce(part) if part.ends() => {
                    (source, written) = self.reduce(chunk, view, source, written)?
                }
                Access::SumShard(_) => {
                    assert!(begun, "{chunk:?}: a sum of nothing");
                    written = copy.map_or(self.chunk(chunk).home_ready, |copy| copy.ready);
                    self.keep_places(chunk);
                }
                Access::UpdateShard
                    if self.layout.shards > 1 && !self.sharded(chunk) && self.layout.sharding.optimizer =>
                {
                    let full = source.view(view.dtype);
                    written = self.transfer.gather(view, full, written)?;
                }
                _ => {}
            }
            used = if copy.is_some() && source != self.chunk(chunk).home {
                self.store(chunk, source, written)?
            } else {
                self.chunk_mut(chunk).home_ready = written;
                written
            };
        } else if copy.is_none() {
            let state = self.chunk_mut(chunk);
            state.home_used = state.home_used.and(computed);
        }
        let due = match self.plan.schedules[self.pass.index()].next_use(chunk, tick) {
            Some(ticks) => self.clock + u64::from(ticks),
            None => u64::MAX,
        };
        // A copy that lies where activations will be by then is of no more use.
        let stays = |copy: WorkingCopy| due == u64::MAX || copy.span.end() <= self.usable_end(chunk, due);
        let due = if copy.is_none_or(stays) { due } else { u64::MAX };
        let state = self.chunk_mut(chunk);
        state.release(access, access.writes().then_some(written), used, due);
        // After a reduction over ranks the copy holds sums only in part; what has no home is gone with its lease.
        let in_part = matches!(access, Access::Produce(part) if part.ends()) && self.layout.world > 1;
        if copy.is_some() && (in_part || access == Access::Transient) {
            self.drop_copy(chunk);
        }
        self.note_regions();
        Ok(())
    }

    /// The elements that an access covers: first within the group, and count.
    fn range(&self, chunk: ChunkId, access: Access) -> (u64, u64) {
        if access.whole() || !self.layout.sharding.optimizer {
            (0, self.layout.group(chunk.group()).elements)
        } else {
            self.own_range(chunk)
        }
    }

    /// The view of an access within `span`, which holds either the whole chunk or exactly the access's part.
    fn part_of(&self, chunk: ChunkId, access: Access, span: Span) -> View {
        let dtype = self.layout.dtype(chunk);
        let (first, elements) = self.range(chunk, access);
        let bytes = dtype.bytes(elements);
        if span.bytes == bytes { span.view(dtype) } else { span.part(dtype.bytes(first), bytes).view(dtype) }
    }
}
