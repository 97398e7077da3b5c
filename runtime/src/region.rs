//! A region: a fixed part of a tier's arena in which working copies come and go.
//!
//! Placement is decided in the order of issue, never by what has completed, so that a rehearsal and the
//! real run place every byte alike. A hole remembers the [`Fence`] after which its bytes are free in fact;
//! whoever takes it waits for that fence on the stream that writes first.
//!
//! What lies behind its end may be *lent* to it for a while, and withdrawn again once nothing is there.

use crate::fence::Fence;
use castor_kernels::Span;

struct Hole {
    offset: u64,
    bytes: u64,
    fence: Fence,
    /// Number of the giving back that made it: the lowest has been free the longest.
    given: u64,
}

/// A fixed part of an arena.
pub struct Region {
    span: Span,
    /// Bytes behind the span that are lent.
    lent: u64,
    granule: u64,
    holes: Vec<Hole>,
    given: u64,
    used: u64,
    peak: u64,
}

impl Region {
    /// A region over all of `span`; sizes are rounded up to `granule` bytes.
    pub fn new(span: Span, granule: u64) -> Region {
        let mut holes = Vec::with_capacity(256);
        if span.bytes > 0 {
            holes.push(Hole { offset: span.offset, bytes: span.bytes, fence: Fence::OPEN, given: 0 });
        }
        Region { span, lent: 0, granule, holes, given: 0, used: 0, peak: 0 }
    }

    /// Bytes that a request of `bytes` takes.
    pub const fn rounded(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.granule) * self.granule
    }

    /// Takes `bytes` that end at `end` or before: behind the region's own end, if that is allowed and there is room, as
    /// near to `end` as it goes; of the holes that serve, the smallest, the longest free one among equals.
    pub fn take(&mut self, bytes: u64, end: u64) -> Option<(Span, Fence)> {
        let taken = self.rounded(bytes);
        let own_end = self.span.end();
        let room = |hole: &Hole| (hole.offset + hole.bytes).min(end).saturating_sub(hole.offset);
        let lent = |hole: &Hole| (hole.offset + room(hole)).saturating_sub(taken) >= own_end;
        let best = self
            .holes
            .iter()
            .enumerate()
            .filter(|(_, hole)| room(hole) >= taken)
            .min_by_key(|(_, hole)| (!lent(hole), room(hole), hole.given, hole.offset))
            .map(|(index, _)| index)?;
        let hole = &mut self.holes[best];
        let fence = hole.fence;
        let offset = if lent(hole) { hole.offset + room(hole) - taken } else { hole.offset };
        self.cut(best, offset, taken);
        self.used += taken;
        self.peak = self.peak.max(self.used);
        Some((Span::new(self.span.tier, offset, bytes), fence))
    }

    /// Cuts `bytes` from `offset` on out of a hole.
    fn cut(&mut self, index: usize, offset: u64, bytes: u64) {
        let hole = &mut self.holes[index];
        let (fence, given) = (hole.fence, hole.given);
        let behind = hole.offset + hole.bytes - (offset + bytes);
        hole.bytes = offset - hole.offset;
        let at = if hole.bytes > 0 { index + 1 } else { index };
        if hole.bytes == 0 {
            self.holes.remove(index);
        }
        if behind > 0 {
            self.holes.insert(at, Hole { offset: offset + bytes, bytes: behind, fence, given });
        }
    }

    /// Lends `bytes` in all behind the region's end, where fewer were lent; the new ones are free in fact once `fence` is
    /// passed.
    pub fn lend(&mut self, bytes: u64, fence: Fence) {
        let more = Span::new(self.span.tier, self.span.end() + self.lent, bytes - self.lent);
        self.lent = bytes;
        self.merge(more, fence);
    }

    /// Takes back all lent bytes but the first `bytes`, where nothing is any more; they are free in fact after the fence.
    ///
    /// # Panics
    /// If something is there.
    pub fn withdraw(&mut self, bytes: u64) -> Fence {
        let (from, end) = (self.span.end() + bytes, self.span.end() + self.lent);
        let last = self.holes.len().checked_sub(1).filter(|last| self.holes[*last].offset <= from);
        let last = last.expect("nothing is left in what is withdrawn");
        assert_eq!(self.holes[last].offset + self.holes[last].bytes, end, "nothing is left in what is withdrawn");
        let fence = self.holes[last].fence;
        self.cut(last, from, end - from);
        self.lent = bytes;
        fence
    }

    /// Bytes taken of what is lent.
    pub fn lent_used(&self) -> u64 {
        let end = self.span.end();
        let free = |hole: &Hole| (hole.offset + hole.bytes).saturating_sub(hole.offset.max(end));
        self.lent - self.holes.iter().map(free).sum::<u64>()
    }

    /// Bytes lent.
    pub const fn lent(&self) -> u64 {
        self.lent
    }

    /// Where what is lent begins.
    pub const fn own_end(&self) -> u64 {
        self.span.end()
    }

    /// Gives back what [`Region::take`] gave, free in fact once `fence` is passed.
    pub fn give(&mut self, span: Span, fence: Fence) {
        let bytes = self.rounded(span.bytes);
        self.used -= bytes;
        self.merge(Span { bytes, ..span }, fence);
    }

    /// Makes a hole, one with its neighbours.
    fn merge(&mut self, span: Span, fence: Fence) {
        let bytes = span.bytes;
        let at = self.holes.partition_point(|hole| hole.offset < span.offset);
        let (mut offset, mut end, mut fence) = (span.offset, span.offset + bytes, fence);
        let mut replaced = at..at;
        if at > 0 && self.holes[at - 1].offset + self.holes[at - 1].bytes == offset {
            offset = self.holes[at - 1].offset;
            fence = fence.and(self.holes[at - 1].fence);
            replaced.start = at - 1;
        }
        if at < self.holes.len() && self.holes[at].offset == end {
            end += self.holes[at].bytes;
            fence = fence.and(self.holes[at].fence);
            replaced.end = at + 1;
        }
        assert!(replaced.end == at + 1 || at == self.holes.len() || end <= self.holes[at].offset, "given back twice");
        self.given += 1;
        self.holes.splice(replaced, [Hole { offset, bytes: end - offset, fence, given: self.given }]);
    }

    /// What future placements depend on: the holes, the longest free first.
    pub fn signature(&self) -> Vec<(u64, u64)> {
        let mut holes: Vec<_> = self.holes.iter().map(|hole| (hole.given, hole.offset, hole.bytes)).collect();
        holes.sort_unstable();
        holes.into_iter().map(|(_, offset, bytes)| (offset, bytes)).collect()
    }

    /// Bytes taken now.
    pub const fn used(&self) -> u64 {
        self.used
    }

    /// Most bytes taken at once so far.
    pub const fn peak(&self) -> u64 {
        self.peak
    }

    /// All its own bytes.
    pub const fn bytes(&self) -> u64 {
        self.span.bytes
    }

    /// Bytes not taken before `end`.
    pub fn free(&self, end: u64) -> u64 {
        self.holes.iter().map(|hole| (hole.offset + hole.bytes).min(end).saturating_sub(hole.offset)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use castor_kernels::{Mark, Stream, Tier, rng};

    #[test]
    fn taken_spans_never_overlap_and_holes_merge() {
        let mut region = Region::new(Span::new(Tier::Device, 4096, 64 * 256), 256);
        let mut taken: Vec<Span> = Vec::new();
        for round in 0..4000u64 {
            if rng::bits(7, round, 0).is_multiple_of(2) || taken.is_empty() {
                if let Some((span, _)) = region.take(1 + rng::bits(7, round, 1) % 3000, u64::MAX) {
                    assert!(taken.iter().all(|other| !other.overlaps(span)));
                    assert!(span.offset >= 4096 && span.end() <= 4096 + 64 * 256);
                    taken.push(span);
                }
            } else {
                let span = taken.swap_remove(rng::bits(7, round, 2) as usize % taken.len());
                region.give(span, Fence::at(Mark { stream: Stream::Compute, number: round }));
            }
            assert_eq!(region.used(), taken.iter().map(|s| s.bytes.div_ceil(256) * 256).sum::<u64>());
        }
        for span in taken {
            region.give(span, Fence::OPEN);
        }
        assert_eq!(region.take(64 * 256, u64::MAX).map(|(span, _)| span.offset), Some(4096));
    }

    #[test]
    fn a_taken_hole_carries_the_fences_of_all_that_were_there() {
        let mut region = Region::new(Span::new(Tier::Device, 0, 512), 256);
        let (a, _) = region.take(256, u64::MAX).unwrap();
        let (b, _) = region.take(256, u64::MAX).unwrap();
        let (first, second) =
            (Mark { stream: Stream::Compute, number: 5 }, Mark { stream: Stream::DeviceToHost, number: 9 });
        region.give(a, Fence::at(first));
        region.give(b, Fence::at(second));
        let (_, fence) = region.take(512, u64::MAX).unwrap();
        assert_eq!(fence.marks().collect::<Vec<_>>(), vec![first, second]);
    }

    #[test]
    fn what_is_lent_is_used_first_and_only_before_its_end() {
        let mut region = Region::new(Span::new(Tier::Device, 0, 1024), 256);
        let done = |number| Fence::at(Mark { stream: Stream::Compute, number });
        region.lend(1024, done(3));
        let (high, fence) = region.take(256, 1792).unwrap();
        assert_eq!((high.offset, fence), (1536, done(3)));
        // No lent byte may be used by what stays longer than they do.
        let (own, _) = region.take(512, 1024).unwrap();
        assert_eq!((own.offset, region.free(1024), region.free(u64::MAX)), (0, 512, 1280));
        region.give(high, done(5));
        let fence = region.withdraw(256);
        assert_eq!((fence, region.lent(), region.free(u64::MAX)), (done(5), 256, 768));
        // A hole goes over the end, and is cut there.
        let (over, _) = region.take(768, u64::MAX).unwrap();
        assert_eq!(over.offset, 512);
        region.give(over, Fence::OPEN);
        region.withdraw(0);
        assert_eq!(region.take(768, u64::MAX), None);
        region.give(own, Fence::OPEN);
        assert_eq!(region.take(1024, u64::MAX).map(|(span, _)| span.offset), Some(0));
    }

    #[test]
    #[should_panic(expected = "nothing is left")]
    fn what_is_in_use_is_not_withdrawn() {
        let mut region = Region::new(Span::new(Tier::Device, 0, 1024), 256);
        region.lend(1024, Fence::OPEN);
        region.take(256, 1536);
        region.withdraw(256);
    }
}
