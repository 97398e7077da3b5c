//! Prefetch and eviction: what runs ahead, and what gives way.

use super::StatefulTensorMgr;
use crate::error::Result;
use crate::fence::Fence;
use crate::schedule::{Access, Pass, ScheduledTick, in_place};
use crate::units::{ChunkId, Tick};
use castor_kernels::{Span, Stream, Tier};
use std::cmp::Reverse;

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
                if let Some(copy) = self.chunk(used.chunk).idle_copy().copied() {
                    // What lies where activations will be by then has to come again, to another place.
                    let stays = copy.span.end() <= self.usable_end(used.chunk, due);
                    if copy.whole == whole && stays {
                        if copy.due > due {
                            self.chunk_mut(used.chunk).expect_at(due);
                        }
                        continue;
                    }
                    if copy.due < due {
                        continue;
                    }
                    if !whole || !stays {
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

    /// Lends the window what activations leave free at this tick, or takes it back: idle copies there are dropped, and
    /// operators wait until their places are free in fact.
    pub(super) fn lend(&mut self, bytes: u64) {
        if bytes > self.window.lent() {
            let computed = self.transfer.computed();
            self.window.lend(bytes, computed);
        } else if bytes < self.window.lent() {
            let end = self.window.own_end() + bytes;
            self.drop_idle(|window, copy| copy.span.offset + window.rounded(copy.span.bytes) > end);
            let free = self.window.withdraw(bytes);
            self.transfer.wait(Stream::Compute, free);
        }
    }

    /// Where a copy must end that is there from now until its use at the tick `due`, by the record; one that then goes
    /// home takes its time.
    pub(super) fn usable_end(&self, chunk: ChunkId, due: u64) -> u64 {
        let (own, schedule) = (self.window.own_end(), &self.plan.schedules[self.pass.index()]);
        let (Some(now), Ok(ahead)) = (self.tick, u32::try_from(due - self.clock)) else { return own };
        if self.window.lent() == 0 {
            return own;
        }
        let at = Tick((now.0 + ahead) % schedule.len() as u32);
        let Some(used) = schedule.used_at(chunk, at) else { return own };
        let spare = schedule.least_spare(now, ahead + used.until.0.saturating_sub(at.0));
        let leaves = used.access.writes() && self.chunk(chunk).home.tier != Tier::Device;
        own + if leaves { spare.min(schedule.lasting_spare(used.until)) } else { spare }
    }

    /// Takes `bytes` of the window before `end` and leaves `reserve` bytes takeable, dropping idle copies that are
    /// wanted later than `before` (`None`: any): first those that only the next pass wants, the longest home first, for
    /// its place is free soonest; then the latest.
    pub(super) fn make_room(
        &mut self,
        bytes: u64,
        reserve: u64,
        before: Option<u64>,
        end: u64,
    ) -> Option<(Span, Fence)> {
        let length = self.plan.schedules[self.pass.index()].len() as u64;
        let pass_end = self.clock + length.saturating_sub(u64::from(self.tick.map_or(0, |tick| tick.0)));
        loop {
            if self.window.free(end) >= self.window.rounded(bytes) + reserve
                && let Some(room) = self.window.take(bytes, end)
            {
                return Some(room);
            }
            let victim = self
                .copies()
                .filter(|(chunk, copy)| chunk.idle_copy().is_some() && copy.span.offset < end)
                .map(|(chunk, copy)| (chunk.id(), copy))
                // A copy that was due in the past was fetched for ticks that never came.
                .map(|(chunk, copy)| (chunk, copy, if copy.due < self.clock { u64::MAX } else { copy.due }))
                .filter(|(_, _, due)| before.is_none_or(|before| *due > before))
                .max_by_key(|(chunk, copy, due)| {
                    let on_its_way = copy.used.number(Stream::DeviceToHost);
                    let next_pass = (*due >= pass_end).then_some(Reverse(on_its_way));
                    (next_pass, *due, *chunk)
                })
                .map(|(chunk, _, _)| chunk);
            match victim {
                Some(victim) => self.drop_copy(victim),
                // What is wanted now takes a second place from sums.
                None if before.is_none() && self.spare_place() => {}
                None => return None,
            }
        }
    }
}
