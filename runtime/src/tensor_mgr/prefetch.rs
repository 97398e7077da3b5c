//! Prefetch and eviction: what runs ahead, and what gives way.

use super::StatefulTensorMgr;
use crate::error::Result;
use crate::fence::Fence;
use crate::schedule::{Access, Pass, ScheduledTick, in_place};
use crate::units::{ChunkId, Tick};
use castor_kernels::{Span, Tier};

impl StatefulTensorMgr {
    /// Issues the fetches of this tick and of those ahead, in the order of use, as far as the look-ahead and the
    /// window reach. The end of the pass looks into the next one. A chunk that will still be written before
    /// its use is left alone: its bytes are not final.
    pub(super) fn prefetch(&mut self, now: Tick) -> Result<()> {
        let limit = self.plan.placement.lookahead_bytes;
        if limit == 0 {
            return Ok(());
        }
        let pass = self.pass.index();
        let length = self.plan.schedules[pass].len();
        let (mut ahead_bytes, mut to_produce) = (0, 0);
        let first = self.streamed[pass].partition_point(|tick| (*tick as usize) < now.index());
        for index in 0..self.streamed[pass].len() {
            let ticks = &self.streamed[pass];
            let tick = ticks[(first + index) % ticks.len()] as usize;
            let ahead = (tick + length - now.index()) % length;
            for index in 0..self.plan.schedules[pass].ticks[tick].uses.len() {
                let used = self.plan.schedules[pass].ticks[tick].uses[index];
                to_produce = to_produce.max(self.places_to_come(&used));
                let Some(bytes) = self.copy_bytes(used.chunk, used.access) else { continue };
                if !used.access.reads() {
                    to_produce = bytes.max(to_produce);
                    continue;
                }
                if self.chunk(used.chunk).leased() {
                    continue;
                }
                if self.plan.schedules[pass].written_within(used.chunk, now, ahead as u32) {
                    continue;
                }
                if ahead > 0 {
                    ahead_bytes += bytes;
                    if ahead_bytes > limit {
                        return Ok(());
                    }
                }
                let due = self.clock + ahead as u64;
                let whole = used.access.whole() || !self.sharded(used.chunk);
                if let Some(copy) = self.chunk(used.chunk).idle_copy() {
                    if copy.whole == whole {
                        if copy.due > due {
                            self.chunk_mut(used.chunk).expect_at(due);
                        }
                        continue;
                    }
                    if copy.due < due {
                        continue;
                    }
                    if !whole {
                        self.drop_copy(used.chunk);
                    }
                }
                let reserve = if ahead == 0 { 0 } else { to_produce };
                if !self.fetch(used.chunk, used.access, due, reserve, false)? {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// The ticks of a pass that use a working copy.
    pub(super) fn streamed_ticks(&self, pass: Pass) -> Vec<u32> {
        let ticks = &self.plan.schedules[pass.index()].ticks;
        let streams = |tick: &ScheduledTick| {
            tick.uses.iter().any(|used| used.access.sums() || self.copy_bytes(used.chunk, used.access).is_some())
        };
        (0u32..).zip(ticks).filter(|(_, tick)| streams(tick)).map(|(index, _)| index).collect()
    }

    /// Bytes of the working copy that a use needs; `None` if it is in place.
    fn copy_bytes(&self, chunk: ChunkId, access: Access) -> Option<u64> {
        let home_on_device = self.chunk(chunk).home.tier == Tier::Device;
        if in_place(access, self.sharded(chunk), home_on_device) {
            None
        } else if access.whole() {
            Some(self.layout.full_bytes(chunk))
        } else {
            Some(self.layout.stored_bytes(chunk))
        }
    }

    /// Takes `bytes` of the window and leaves `reserve` bytes takeable, dropping idle copies that are wanted
    /// later than `before` (`None`: any), the latest first.
    pub(super) fn make_room(&mut self, bytes: u64, reserve: u64, before: Option<u64>) -> Option<(Span, Fence)> {
        loop {
            if self.window.free() >= self.window.rounded(bytes) + reserve
                && let Some(room) = self.window.take(bytes)
            {
                return Some(room);
            }
            let latest = self
                .chunks
                .iter()
                .flatten()
                .filter_map(|chunk| chunk.idle_copy().map(|copy| (copy.due, chunk.id())))
                // A copy that was due in the past was fetched for ticks that never came.
                .map(|(due, chunk)| (if due < self.clock { u64::MAX } else { due }, chunk))
                .filter(|(due, _)| before.is_none_or(|before| *due > before))
                .max()
                .map(|(_, chunk)| chunk);
            match latest {
                Some(victim) => self.drop_copy(victim),
                // What is wanted now takes a second place from sums.
                None if before.is_none() && self.spare_place() => {}
                None => return None,
            }
        }
    }
}
