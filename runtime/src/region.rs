//! A region: a fixed part of a tier's arena in which working copies come and go.
//!
//! Placement is decided in the order of issue, never by what has completed, so that a rehearsal and the
//! real run place every byte alike. A hole remembers the [`Fence`] after which its bytes are free in fact;
//! whoever takes it waits for that fence on the stream that writes first.

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
        Region { span, granule, holes, given: 0, used: 0, peak: 0 }
    }

    /// Bytes that a request of `bytes` takes.
    pub const fn rounded(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.granule) * self.granule
    }

    /// Takes the smallest hole that holds `bytes`, the longest free one among equals.
    pub fn take(&mut self, bytes: u64) -> Option<(Span, Fence)> {
        let taken = self.rounded(bytes);
        let best = self
            .holes
            .iter()
            .enumerate()
            .filter(|(_, hole)| hole.bytes >= taken)
            .min_by_key(|(_, hole)| (hole.bytes, hole.given, hole.offset))
            .map(|(index, _)| index)?;
        let hole = &mut self.holes[best];
        let (span, fence) = (Span::new(self.span.tier, hole.offset, bytes), hole.fence);
        hole.offset += taken;
        hole.bytes -= taken;
        if hole.bytes == 0 {
            self.holes.remove(best);
        }
        self.used += taken;
        self.peak = self.peak.max(self.used);
        Some((span, fence))
    }

    /// Gives back what [`Region::take`] gave, free in fact once `fence` is passed.
    pub fn give(&mut self, span: Span, fence: Fence) {
        let bytes = self.rounded(span.bytes);
        self.used -= bytes;
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

    /// All its bytes.
    pub const fn bytes(&self) -> u64 {
        self.span.bytes
    }

    /// Bytes not taken.
    pub const fn free(&self) -> u64 {
        self.span.bytes - self.used
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
                if let Some((span, _)) = region.take(1 + rng::bits(7, round, 1) % 3000) {
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
        assert_eq!(region.take(64 * 256).map(|(span, _)| span.offset), Some(4096));
    }

    #[test]
    fn a_taken_hole_carries_the_fences_of_all_that_were_there() {
        let mut region = Region::new(Span::new(Tier::Device, 0, 512), 256);
        let (a, _) = region.take(256).unwrap();
        let (b, _) = region.take(256).unwrap();
        let (first, second) =
            (Mark { stream: Stream::Compute, number: 5 }, Mark { stream: Stream::DeviceToHost, number: 9 });
        region.give(a, Fence::at(first));
        region.give(b, Fence::at(second));
        let (_, fence) = region.take(512).unwrap();
        assert_eq!(fence.marks().collect::<Vec<_>>(), vec![first, second]);
    }
}
