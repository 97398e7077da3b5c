//! Moves of one chunk: into the window, gathered, reduced over the ranks, and home again.
//!
//! What is moved when is decided by the verbs of [`StatefulTensorMgr`] and by prefetch; here it is issued, behind the
//! fences of the places it touches.

use super::StatefulTensorMgr;
use crate::chunk::WorkingCopy;
use crate::error::{Error, Result};
use crate::fence::Fence;
use crate::ledger::Category;
use crate::plan::placed_bytes;
use crate::schedule::Access;
use crate::units::ChunkId;
use castor_kernels::{Among, Span, Stream, Tier, View};

/// A part of a chunk.
pub(super) struct Piece {
    pub offset: u64,
    pub bytes: u64,
}

/// The pieces of at most `most` bytes in which a home on the disk passes through staging: places in the file, and in
/// the chunk.
pub(super) fn file_pieces(home: Span, most: u64) -> impl Iterator<Item = (Span, Piece)> {
    (0..home.bytes).step_by(most as usize).map(move |offset| {
        let bytes = most.min(home.bytes - offset);
        (Span::new(Tier::Nvme, home.offset + offset, placed_bytes(Tier::Nvme, bytes)), Piece { offset, bytes })
    })
}

impl StatefulTensorMgr {
    /// Drops an idle copy of the wrong form, but for a shard from which the whole will be gathered, and of what the host's
    /// cores use at home any. Returns whether a copy of the right form is missing.
    pub(super) fn drop_stale_copy(&mut self, chunk: ChunkId, access: Access) -> bool {
        match self.chunk(chunk).idle_copy() {
            None => true,
            Some(_) if access.on_host() => {
                self.drop_copy(chunk);
                true
            }
            Some(copy) => {
                let wanted_whole = access.whole() || !self.sharded(chunk);
                if copy.whole == wanted_whole {
                    return false;
                }
                if !(wanted_whole && access.reads()) {
                    self.drop_copy(chunk);
                }
                true
            }
        }
    }

    pub(super) fn drop_copy(&mut self, chunk: ChunkId) {
        let copy = self.chunk_mut(chunk).drop_copy();
        self.copies.retain(|copied| *copied != chunk);
        self.window.give(copy.span, copy.ready.and(copy.used));
    }

    /// Issues what brings a chunk into the window: room, fetch from its home, gather. An idle shard that is wanted
    /// whole is gathered from where it is, unless it had to make room.
    pub(super) fn fetch(
        &mut self,
        chunk: ChunkId,
        access: Access,
        due: u64,
        reserve: u64,
        demanded: bool,
    ) -> Result<bool> {
        let whole = access.whole() || !self.sharded(chunk);
        let bytes = if whole { self.layout.full_bytes(chunk) } else { self.layout.stored_bytes(chunk) };
        let end = self.usable_end(chunk, due);
        let Some((span, free)) = self.make_room(bytes, reserve, if demanded { None } else { Some(due) }, end) else {
            if demanded {
                return Err(self.window_too_small(chunk, bytes));
            }
            return Ok(false);
        };
        let ready = if access.reads() { self.bring(chunk, span, whole, free)? } else { free };
        if self.chunk(chunk).idle_copy().is_some() {
            let shard = self.chunk_mut(chunk).drop_copy();
            self.window.give(shard.span, shard.ready.and(shard.used).and(ready));
        }
        self.chunk_mut(chunk).fetch(WorkingCopy { span, whole, ready, used: Fence::OPEN, due });
        if let Err(at) = self.copies.binary_search(&chunk) {
            self.copies.insert(at, chunk);
        }
        self.note_regions();
        Ok(true)
    }

    /// Copies a chunk's home into `span` of the window and gathers it if it is sharded and wanted whole.
    fn bring(&mut self, chunk: ChunkId, span: Span, whole: bool, free: Fence) -> Result<Fence> {
        let dtype = self.layout.dtype(chunk);
        let gathers = whole && self.sharded(chunk);
        let (first, count) = self.own_range(chunk);
        let own = if gathers { span.part(dtype.bytes(first), dtype.bytes(count)) } else { span };
        let (home, home_ready) = (self.chunk(chunk).home, self.chunk(chunk).home_ready);
        if gathers && let Some(shard) = self.chunk(chunk).idle_copy().copied() {
            return self.transfer.gather(shard.span.view(dtype), span.view(dtype), shard.ready.and(free));
        }
        let (shard, mut ready) = match home.tier {
            Tier::Device => (home, home_ready.and(free)),
            Tier::Host => (own, self.transfer.copy(Stream::HostToDevice, home, own, home_ready.and(free))?),
            Tier::Nvme => {
                let mut ready = free;
                for (file, piece) in file_pieces(home, self.plan.placement.staged_bytes()) {
                    let (stage, stage_free) = self.take_staging(file.bytes)?;
                    let read = self.transfer.copy(Stream::NvmeRead, file, stage, home_ready.and(stage_free))?;
                    let (source, target) = (stage.part(0, piece.bytes), own.part(piece.offset, piece.bytes));
                    ready = self.transfer.copy(Stream::HostToDevice, source, target, read.and(free))?;
                    self.staging.give(stage, ready);
                    self.note_staging(file.bytes);
                }
                (own, ready)
            }
        };
        let state = self.chunk_mut(chunk);
        if home.tier != Tier::Device {
            state.home_used = state.home_used.and(ready);
        }
        if gathers {
            ready = self.transfer.gather(shard.view(dtype), span.view(dtype), ready.and(free))?;
            if home.tier == Tier::Device {
                let state = self.chunk_mut(chunk);
                state.home_used = state.home_used.and(ready);
            }
        }
        Ok(ready)
    }

    /// Reduces a produced gradient over the ranks. Returns where this rank's sum is and when.
    pub(super) fn reduce(&mut self, chunk: ChunkId, view: View, place: Span, computed: Fence) -> Result<(Span, Fence)> {
        if self.layout.world == 1 {
            return Ok((place, computed));
        }
        // First among shards, then among replicas, whatever is split: the same sums round the same (L6).
        if !self.sharded(chunk) {
            let mut done = computed;
            if self.layout.shards > 1 {
                done = self.transfer.all_reduce(Among::Shards, view, done)?;
            }
            return Ok((place, self.sum_replicas(view, done)?));
        }
        let (first, count) = self.own_range(chunk);
        let home = self.chunk(chunk).home;
        let target = if home.tier == Tier::Device { home.view(view.dtype) } else { view.part(first, count) };
        let fence = computed.and(self.chunk(chunk).home_used);
        let done = self.transfer.reduce_scatter(view, target, fence)?;
        Ok((target.span, self.sum_replicas(target, done)?))
    }

    /// Sums what the ranks with this rank's shard hold.
    pub(super) fn sum_replicas(&mut self, view: View, after: Fence) -> Result<Fence> {
        match self.layout.world == self.layout.shards {
            true => Ok(after),
            false => self.transfer.all_reduce(Among::Replicas, view, after),
        }
    }

    /// Writes `source` on the device back to the chunk's home on another tier.
    pub(super) fn store(&mut self, chunk: ChunkId, source: Span, written: Fence) -> Result<Fence> {
        let (home, used) = (self.chunk(chunk).home, self.chunk(chunk).home_used.and(self.chunk(chunk).home_ready));
        let (left_device, stored) = match home.tier {
            Tier::Device => unreachable!("a home on the device is written in place"),
            Tier::Host => {
                let done = self.transfer.copy(Stream::DeviceToHost, source, home, written.and(used))?;
                (done, done)
            }
            Tier::Nvme => {
                let (mut left_device, mut stored) = (written, written);
                for (file, piece) in file_pieces(home, self.plan.placement.staged_bytes()) {
                    let (stage, stage_free) = self.take_staging(file.bytes)?;
                    let (from, to) = (source.part(piece.offset, piece.bytes), stage.part(0, piece.bytes));
                    left_device = self.transfer.copy(Stream::DeviceToHost, from, to, written.and(stage_free))?;
                    stored = self.transfer.copy(Stream::NvmeWrite, stage, file, left_device.and(used))?;
                    self.staging.give(stage, stored);
                    self.note_staging(file.bytes);
                }
                (left_device, stored)
            }
        };
        self.chunk_mut(chunk).home_ready = stored;
        Ok(left_device)
    }

    pub(super) fn take_staging(&mut self, bytes: u64) -> Result<(Span, Fence)> {
        self.staging.take(bytes, u64::MAX).ok_or_else(|| Error::OutOfRoom {
            tier: Tier::Host,
            what: "staging between disk and device".into(),
            budget: self.plan.budgets.host,
            short_by: bytes.saturating_sub(self.staging.free(u64::MAX)),
            largest_users: self.ledger.largest_users(Tier::Host),
        })
    }

    /// Staging is in use only between two calls' issue; the ledger shows the largest such use of a tick.
    fn note_staging(&mut self, bytes: u64) {
        self.ledger.set_live(Tier::Host, Category::Staging, bytes);
        self.collector.record(self.pass, &self.ledger);
        self.ledger.set_live(Tier::Host, Category::Staging, 0);
    }
}
