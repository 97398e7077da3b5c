//! A region: a fixed part of a tier's arena in which working copies come and go.
//!
//! Placement is decided in the order of issue, never by what has completed, so that a rehearsal and the
//! real run place every byte alike. What came free remembers the [`Fence`] after which it is free in fact;
//! whoever takes it waits for that fence on the stream that writes first.
//!
//! What lies behind its end may be *lent* to it for a while, and withdrawn again once nothing is there.

use crate::fence::Fence;
use castor_kernels::Span;

/// Free bytes that came free together. Neighbours make one hole.
#[derive(Clone, Copy)]
struct Free {
    offset: u64,
    bytes: u64,
    fence: Fence,
    /// Number of the giving back that made it: the lowest has been free the longest.
    given: u64,
}

/// Pieces to remember, beyond which the smallest are joined.
const MOST_PIECES: usize = 128;

impl Free {
    const fn end(&self) -> u64 {
        self.offset + self.bytes
    }
}

/// A fixed part of an arena.
pub struct Region {
    span: Span,
    /// Bytes behind the span that are lent.
    lent: u64,
    granule: u64,
    /// By offset.
    free: Vec<Free>,
    given: u64,
    used: u64,
    peak: u64,
}

impl Region {
    /// A region over all of `span`; sizes are rounded up to `granule` bytes.
    pub fn new(span: Span, granule: u64) -> Region {
        let mut free = Vec::with_capacity(256);
        if span.bytes > 0 {
            free.push(Free { offset: span.offset, bytes: span.bytes, fence: Fence::OPEN, given: 0 });
        }
        Region { span, lent: 0, granule, free, given: 0, used: 0, peak: 0 }
    }

    /// Bytes that a request of `bytes` takes.
    pub const fn rounded(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.granule) * self.granule
    }

    /// The holes: index range in `free`, first offset, end.
    fn holes(&self) -> impl Iterator<Item = (std::ops::Range<usize>, u64, u64)> + '_ {
        let mut next = 0;
        std::iter::from_fn(move || {
            let first = next;
            let offset = self.free.get(first)?.offset;
            while next + 1 < self.free.len() && self.free[next].end() == self.free[next + 1].offset {
                next += 1;
            }
            next += 1;
            Some((first..next, offset, self.free[next - 1].end()))
        })
    }

    /// Takes `bytes` that end at `end` or before. What is lent is used first, and where it has been free the longest; of
    /// the region's own, the smallest hole that serves.
    pub fn take(&mut self, bytes: u64, end: u64) -> Option<(Span, Fence)> {
        let taken = self.rounded(bytes);
        let offset = self.place_in_lent(taken, end).or_else(|| self.place_in_smallest(taken, end))?;
        let fence = self.cut(offset, taken);
        self.used += taken;
        self.peak = self.peak.max(self.used);
        Some((Span::new(self.span.tier, offset, bytes), fence))
    }

    /// A place whose latest neighbour came free earliest: it begins or ends with something free.
    fn place_in_lent(&self, taken: u64, end: u64) -> Option<u64> {
        let (own_end, mut best) = (self.span.end(), None);
        if end < own_end + taken {
            return None;
        }
        for (range, offset, hole_end) in self.holes() {
            let (from, to) = (offset.max(own_end), hole_end.min(end));
            if from + taken > to {
                continue;
            }
            let pieces = &self.free[range];
            let starts = pieces.iter().map(|free| free.offset.max(from));
            let ends = pieces.iter().filter_map(|free| free.end().min(to).checked_sub(taken));
            for place in starts.chain(ends).filter(|place| *place >= from && place + taken <= to) {
                let over = pieces.iter().filter(|free| free.offset < place + taken && free.end() > place);
                let key = (over.map(|free| free.given).max(), std::cmp::Reverse(place));
                if best.is_none_or(|best| key < best) {
                    best = Some(key);
                }
            }
        }
        best.map(|(_, place)| place.0)
    }

    fn place_in_smallest(&self, taken: u64, end: u64) -> Option<u64> {
        let key = |(range, offset, hole_end): (std::ops::Range<usize>, u64, u64)| {
            let given = self.free[range].iter().map(|free| free.given).max();
            (hole_end.min(end).saturating_sub(offset), given, offset)
        };
        let smallest = self.holes().map(key).filter(|(room, ..)| *room >= taken).min();
        smallest.map(|(_, _, offset)| offset)
    }

    /// Cuts `bytes` from `offset` on out of a hole; when they are free in fact.
    fn cut(&mut self, offset: u64, bytes: u64) -> Fence {
        let end = offset + bytes;
        let first = self.free.partition_point(|free| free.end() <= offset);
        let last = self.free.partition_point(|free| free.offset < end);
        let (head, tail) = (self.free[first], self.free[last - 1]);
        let fence = self.free[first..last].iter().fold(Fence::OPEN, |fence, free| fence.and(free.fence));
        let before = (head.offset < offset).then_some(Free { bytes: offset - head.offset, ..head });
        let behind = (tail.end() > end).then_some(Free { offset: end, bytes: tail.end() - end, ..tail });
        self.free.splice(first..last, before.into_iter().chain(behind));
        fence
    }

    /// Gives back what [`Region::take`] gave, free in fact once `fence` is passed.
    pub fn give(&mut self, span: Span, fence: Fence) {
        let bytes = self.rounded(span.bytes);
        self.used -= bytes;
        self.insert(Span { bytes, ..span }, fence);
    }

    fn insert(&mut self, span: Span, fence: Fence) {
        let at = self.free.partition_point(|free| free.offset < span.offset);
        let apart = at == 0 || self.free[at - 1].end() <= span.offset;
        assert!(apart && self.free.get(at).is_none_or(|next| span.end() <= next.offset), "given back twice");
        self.given += 1;
        self.free.insert(at, Free { offset: span.offset, bytes: span.bytes, fence, given: self.given });
        while self.free.len() > MOST_PIECES && self.join_smallest() {}
    }

    /// Joins the smallest piece with the smaller of its neighbours, at the price of one fence for both.
    fn join_smallest(&mut self) -> bool {
        let pairs = self.free.windows(2).enumerate().filter(|(_, pair)| pair[0].end() == pair[1].offset);
        let smallest = pairs.min_by_key(|(_, pair)| (pair[0].bytes.min(pair[1].bytes), pair[0].bytes + pair[1].bytes));
        let Some((index, _)) = smallest else { return false };
        let second = self.free.remove(index + 1);
        let first = &mut self.free[index];
        first.bytes += second.bytes;
        first.fence = first.fence.and(second.fence);
        first.given = first.given.max(second.given);
        true
    }

    /// Lends `bytes` in all behind the region's end, where fewer were lent; the new ones are free in fact once `fence` is
    /// passed.
    pub fn lend(&mut self, bytes: u64, fence: Fence) {
        let more = Span::new(self.span.tier, self.span.end() + self.lent, bytes - self.lent);
        self.lent = bytes;
        self.insert(more, fence);
    }

    /// Takes back all lent bytes but the first `bytes`, where nothing is any more; they are free in fact after the fence.
    ///
    /// # Panics
    /// If something is there.
    pub fn withdraw(&mut self, bytes: u64) -> Fence {
        let (from, end) = (self.span.end() + bytes, self.span.end() + self.lent);
        let left = self.holes().any(|(_, offset, hole_end)| offset <= from && hole_end == end);
        assert!(left, "something is left in what is withdrawn");
        self.lent = bytes;
        self.cut(from, end - from)
    }

    /// Bytes taken of what is lent.
    pub fn lent_used(&self) -> u64 {
        let end = self.span.end();
        let free = |free: &Free| free.end().saturating_sub(free.offset.max(end));
        self.lent - self.free.iter().map(free).sum::<u64>()
    }

    /// Bytes lent.
    pub const fn lent(&self) -> u64 {
        self.lent
    }

    /// Where what is lent begins.
    pub const fn own_end(&self) -> u64 {
        self.span.end()
    }

    /// What future placements depend on: what is free, the longest first.
    pub fn signature(&self) -> Vec<(u64, u64)> {
        let mut free: Vec<_> = self.free.iter().map(|free| (free.given, free.offset, free.bytes)).collect();
        free.sort_unstable();
        free.into_iter().map(|(_, offset, bytes)| (offset, bytes)).collect()
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
        self.free.iter().map(|free| free.end().min(end).saturating_sub(free.offset)).sum()
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
    #[should_panic(expected = "something is left")]
    fn what_is_in_use_is_not_withdrawn() {
        let mut region = Region::new(Span::new(Tier::Device, 0, 1024), 256);
        region.lend(1024, Fence::OPEN);
        region.take(256, 1536);
        region.withdraw(256);
    }
}
