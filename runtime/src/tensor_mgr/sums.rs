//! Sums of contributions: a gradient of which this rank keeps a shard, reduced over the ranks once for each of them.
//!
//! A lease for [`crate::Access::SumShard`] has *places* in the window, in which operators form contributions one after
//! the other. With two places one is reduced and added, on the collective stream, while the next is computed; with one
//! place the next waits. Places are taken and given back with leases and never with contributions, so that what is
//! decided does not depend on how many of them there are. They are kept from one such lease to the next of the same
//! size.

use super::{Lease, StatefulTensorMgr};
use crate::error::Result;
use crate::fence::Fence;
use crate::schedule::Use;
use crate::units::{ChunkId, Role};
use castor_kernels::{Span, Stream, View};

/// What is to be added to a sum, being formed: give it to [`StatefulTensorMgr::contribute`].
#[must_use = "it counts once it is contributed"]
#[derive(Debug)]
pub struct Contribution {
    view: View,
}

impl Contribution {
    /// All elements of the group's gradient, undefined but for its padding.
    pub const fn view(&self) -> View {
        self.view
    }
}

/// Where the contributions to one chunk are formed.
pub(super) struct Places {
    /// Which chunk; none: kept for the next lease.
    chunk: Option<ChunkId>,
    /// Bytes of each.
    bytes: u64,
    /// Each with when it is free in fact.
    places: [(Span, Fence); 2],
    /// How many of them there are.
    count: usize,
    /// The one for the next contribution.
    next: usize,
}

impl StatefulTensorMgr {
    /// Room for a contribution to what `sum` is a lease on, [`crate::Access::SumShard`].
    ///
    /// # Panics
    /// If the lease is for another access.
    pub fn contribution(&mut self, sum: &Lease) -> Contribution {
        let (chunk, group) = (sum.chunk, self.layout.group(sum.chunk.group()));
        let (used, elements) = (group.used, group.elements);
        let places = self.places_of(chunk);
        let (span, free) = places.places[places.next];
        self.transfer.wait(Stream::Compute, free);
        let view = span.view(self.layout.dtype(chunk));
        self.backend.zero(view.part(used, elements - used));
        Contribution { view }
    }

    /// Adds `contribution` to what `sum` is a lease on: reduces it over the ranks, then adds this rank's shard of it, or,
    /// if nothing is in the sum yet, leaves it there.
    ///
    /// # Errors
    /// If a move cannot be issued.
    pub fn contribute(&mut self, sum: &mut Lease, contribution: Contribution) -> Result<()> {
        let (chunk, view, whole) = (sum.chunk, sum.view, contribution.view);
        let (first, count) = self.own_range(chunk);
        let computed = self.transfer.computed();
        let free = self.chunk(chunk).leased_free();
        let done = if sum.begun {
            let own = whole.part(first, count);
            let reduced = self.transfer.reduce_scatter(whole, own, computed)?;
            let reduced = self.sum_replicas(own, reduced)?;
            self.transfer.accumulate(own, view, reduced.and(free))?
        } else {
            let reduced = self.transfer.reduce_scatter(whole, view, computed.and(free))?;
            self.sum_replicas(view, reduced)?
        };
        sum.begun = true;
        self.chunk_mut(chunk).written(done);
        let places = self.places_of(chunk);
        places.places[places.next].1 = done;
        places.next = (places.next + 1) % places.count;
        Ok(())
    }

    fn places_of(&mut self, chunk: ChunkId) -> &mut Places {
        let found = self.sums.iter_mut().find(|places| places.chunk == Some(chunk));
        found.unwrap_or_else(|| panic!("{chunk:?}: contributions need a lease for SumShard"))
    }

    /// Takes the places of a lease that begins.
    pub(super) fn take_places(&mut self, chunk: ChunkId) -> Result<()> {
        let bytes = self.layout.full_bytes(chunk);
        if let Some(kept) = self.sums.iter_mut().find(|places| places.chunk.is_none() && places.bytes == bytes) {
            kept.chunk = Some(chunk);
            return Ok(());
        }
        self.give_kept_places();
        let end = self.window.own_end();
        let Some(first) = self.make_room(bytes, 0, None, end) else {
            return Err(self.window_too_small(chunk, bytes));
        };
        let second = if self.forms_two(chunk) { self.window.take(bytes, end) } else { None };
        let count = 1 + usize::from(second.is_some());
        let places = [first, second.unwrap_or(first)];
        self.sums.push(Places { chunk: Some(chunk), bytes, places, count, next: 0 });
        Ok(())
    }

    /// The lease on a sum ends: its places are kept.
    pub(super) fn keep_places(&mut self, chunk: ChunkId) {
        self.places_of(chunk).chunk = None;
    }

    /// Gives back the places that no lease has.
    pub(super) fn give_kept_places(&mut self) {
        while let Some(index) = self.sums.iter().position(|places| places.chunk.is_none()) {
            let kept = self.sums.swap_remove(index);
            for (span, free) in &kept.places[..kept.count] {
                self.window.give(*span, *free);
            }
        }
    }

    /// Gives back a place that can be done without. Returns whether there was one.
    pub(super) fn spare_place(&mut self) -> bool {
        if self.sums.iter().any(|places| places.chunk.is_none()) {
            self.give_kept_places();
            return true;
        }
        let Some(places) = self.sums.iter_mut().find(|places| places.count == 2) else { return false };
        (places.count, places.next) = (1, 0);
        let (span, free) = places.places[1];
        self.window.give(span, free);
        true
    }

    /// Bytes of the window that all places take.
    pub(super) fn place_bytes(&self) -> u64 {
        self.sums.iter().map(|places| places.count as u64 * self.window.rounded(places.bytes)).sum()
    }

    /// Bytes that prefetch must leave for the places of a use.
    pub(super) fn places_to_come(&self, used: &Use) -> u64 {
        let bytes = self.layout.full_bytes(used.chunk);
        if !used.access.sums() || self.sums.iter().any(|places| places.bytes == bytes) {
            return 0;
        }
        (1 + u64::from(self.forms_two(used.chunk))) * self.window.rounded(bytes)
    }

    /// Whether the window is worth two places: beside them it holds the weights in use and the next ones.
    fn forms_two(&self, chunk: ChunkId) -> bool {
        let weights = self.layout.full_bytes(chunk.group().chunk(Role::Parameter));
        2 * (self.layout.full_bytes(chunk) + weights) <= self.window.bytes()
    }
}
