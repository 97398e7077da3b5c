//! The schedule: what is used at each tick of a pass, recorded by rehearsal.

use crate::units::{ChunkId, GroupId, Tick};

/// Which of the recorded lists of uses a step follows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Pass {
    /// The last step's updates and this one's forward, then backward.
    Train,
    /// Forward and backward on sampled labels, Hessian update (Sophia).
    Hessian,
    /// Forward only.
    Evaluate,
    /// Updates alone: those that no next step will make.
    Update,
}

impl Pass {
    /// All passes.
    pub const ALL: [Pass; 4] = [Pass::Train, Pass::Hessian, Pass::Evaluate, Pass::Update];

    /// Position in [`Pass::ALL`].
    pub const fn index(self) -> usize {
        self as usize
    }
}

/// Which part of a step's gradient one lease produces: a step that goes through the model several times, with a
/// part of its micro-batches each, adds to what is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Part {
    /// All of it.
    Only,
    /// The first of several.
    First,
    /// Neither the first nor the last.
    Middle,
    /// The last of several.
    Last,
}

impl Part {
    /// Part `index` of `count`.
    pub const fn of(index: u64, count: u64) -> Part {
        match (index == 0, index + 1 == count) {
            (true, true) => Part::Only,
            (true, false) => Part::First,
            (false, false) => Part::Middle,
            (false, true) => Part::Last,
        }
    }

    /// Whether nothing was there before.
    pub const fn begins(self) -> bool {
        matches!(self, Part::Only | Part::First)
    }

    /// Whether the gradient is final afterwards.
    pub const fn ends(self) -> bool {
        matches!(self, Part::Only | Part::Last)
    }
}

/// How a chunk is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Access {
    /// The whole chunk, read only, on the device (gathered if it is sharded).
    Read,
    /// The whole gradient: undefined where the part begins it, else what is there so far. On release it goes home,
    /// reduced over the ranks where the part ends it. A gradient that is split over ranks is produced in one part, or
    /// summed.
    Produce(Part),
    /// This rank's shard of a gradient that is split over ranks: undefined where the part begins it, else what is there
    /// so far. Contributions are reduced over the ranks and added to it one by one; on release it goes home.
    SumShard(Part),
    /// The whole gradient, which has no home: undefined at first, then reduced over the ranks where it is
    /// ([`crate::StatefulTensorMgr::reduce_here`]), and gone on release.
    Transient,
    /// What this rank updates of a chunk, read only.
    ReadShard,
    /// What this rank updates of a chunk, read and written; on release it goes home.
    UpdateShard,
    /// What this rank updates of a chunk, at its home in host memory, where the host's cores read it.
    ReadOnHost,
    /// The same, read and written.
    UpdateOnHost,
}

impl Access {
    /// Whether the chunk's bytes are wanted (not only room for them).
    pub const fn reads(self) -> bool {
        match self {
            Access::Produce(part) | Access::SumShard(part) => !part.begins(),
            Access::Transient => false,
            Access::Read | Access::ReadShard | Access::UpdateShard | Access::ReadOnHost | Access::UpdateOnHost => true,
        }
    }

    /// Whether the bytes at the chunk's home change.
    pub const fn writes(self) -> bool {
        matches!(self, Access::Produce(_) | Access::SumShard(_) | Access::UpdateShard | Access::UpdateOnHost)
    }

    /// Whether the host's cores use it, at its home in host memory.
    pub const fn on_host(self) -> bool {
        matches!(self, Access::ReadOnHost | Access::UpdateOnHost)
    }

    /// Whether whole contributions are formed beside what is leased.
    pub const fn sums(self) -> bool {
        matches!(self, Access::SumShard(_))
    }

    /// Whether the whole chunk is wanted.
    pub const fn whole(self) -> bool {
        matches!(self, Access::Read | Access::Produce(_) | Access::Transient)
    }
}

/// One use of a chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Use {
    /// The chunk.
    pub chunk: ChunkId,
    /// How.
    pub access: Access,
    /// The tick at which the lease was given back (usually the same).
    pub until: Tick,
}

/// One tick.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScheduledTick {
    /// What the step does here, e.g. "forward".
    pub name: &'static str,
    /// For which group.
    pub group: GroupId,
    /// Bytes at the beginning of the activations' span that nothing is kept in.
    pub spare: u64,
    /// What it uses, in order.
    pub uses: Vec<Use>,
}

/// The ticks of one pass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    /// In order.
    pub ticks: Vec<ScheduledTick>,
    /// For each chunk index: the ticks that use it, ascending, and how.
    by_chunk: Vec<Vec<(Tick, Access)>>,
    /// Level k holds for each tick the least spare bytes of the 2^k ticks from it on.
    spare: Vec<Vec<u64>>,
    /// For each tick the spare bytes that are left when they next stop falling.
    lasting: Vec<u64>,
}

impl Schedule {
    /// A schedule of recorded ticks.
    pub fn new(ticks: Vec<ScheduledTick>) -> Schedule {
        let mut by_chunk: Vec<Vec<(Tick, Access)>> = Vec::new();
        for (index, tick) in ticks.iter().enumerate() {
            for used in &tick.uses {
                if by_chunk.len() <= used.chunk.index() {
                    by_chunk.resize(used.chunk.index() + 1, Vec::new());
                }
                by_chunk[used.chunk.index()].push((Tick(index as u32), used.access));
            }
        }
        let mut spare = vec![ticks.iter().map(|tick| tick.spare).collect::<Vec<u64>>()];
        for level in 0.. {
            let (shorter, half) = (&spare[level], 1 << level);
            if 2 * half > shorter.len() {
                break;
            }
            let both = |index: usize| shorter[index].min(shorter[(index + half) % shorter.len()]);
            spare.push((0..shorter.len()).map(both).collect());
        }
        let mut lasting = spare[0].clone();
        for index in (0..2 * ticks.len()).rev().map(|index| index % ticks.len()) {
            let next = (index + 1) % ticks.len();
            if ticks[next].spare <= ticks[index].spare {
                lasting[index] = lasting[next];
            }
        }
        Schedule { ticks, by_chunk, spare, lasting }
    }

    /// Of the bytes spare at a tick, those that stay so until spare bytes next grow.
    pub fn lasting_spare(&self, tick: Tick) -> u64 {
        self.lasting[tick.index()]
    }

    /// The least spare bytes of the ticks from `from` to the one `ahead` of it, less than a pass away (cyclic).
    pub fn least_spare(&self, from: Tick, ahead: u32) -> u64 {
        let (length, count) = (self.ticks.len(), ahead as usize + 1);
        let Some(level) = count.min(length).checked_ilog2() else { return 0 };
        let spare = &self.spare[level as usize];
        spare[from.index()].min(spare[(from.index() + count.min(length) - (1 << level)) % length])
    }

    /// The most bytes that are spare at any tick.
    pub fn most_spare(&self) -> u64 {
        self.ticks.iter().map(|tick| tick.spare).max().unwrap_or(0)
    }

    /// The use of `chunk` at a tick.
    pub fn used_at(&self, chunk: ChunkId, tick: Tick) -> Option<&Use> {
        self.ticks.get(tick.index())?.uses.iter().find(|used| used.chunk == chunk)
    }

    /// Number of ticks.
    pub fn len(&self) -> usize {
        self.ticks.len()
    }

    /// Whether nothing was recorded.
    pub fn is_empty(&self) -> bool {
        self.ticks.is_empty()
    }

    /// The uses of a chunk.
    pub fn uses(&self, chunk: ChunkId) -> &[(Tick, Access)] {
        self.by_chunk.get(chunk.index()).map_or(&[], Vec::as_slice)
    }

    /// Ticks from `now` until `chunk` is next used, `now` itself excluded; the end of the pass is followed by
    /// its beginning. `None` if it is never used, or next by the host's cores: a copy of it serves nobody.
    pub fn next_use(&self, chunk: ChunkId, now: Tick) -> Option<u32> {
        let uses = self.uses(chunk);
        let later = uses.partition_point(|(tick, _)| *tick <= now);
        let (tick, access) = uses.get(later).or(uses.first())?;
        let ahead = if later < uses.len() { 0 } else { self.ticks.len() as u32 };
        (!access.on_host()).then(|| tick.0 + ahead - now.0)
    }

    /// Whether `chunk` is written at a tick in `from .. from + ahead` (cyclic).
    pub fn written_within(&self, chunk: ChunkId, from: Tick, ahead: u32) -> bool {
        let length = self.ticks.len() as u32;
        let uses = self.uses(chunk);
        let first = uses.partition_point(|(tick, _)| *tick < from);
        let from_there = uses[first..].iter().chain(&uses[..first]);
        from_there
            .map(|(tick, access)| ((tick.0 + length - from.0) % length, access))
            .take_while(|(distance, _)| *distance < ahead)
            .any(|(_, access)| access.writes())
    }

    /// Bytes that the working copies of each tick need at once, given which uses are in place; the largest.
    pub fn largest_need(&self, bytes: impl Fn(&Use) -> u64) -> u64 {
        let mut ends: Vec<u64> = vec![0; self.ticks.len() + 1];
        let (mut held, mut largest) = (0, 0);
        for (index, tick) in self.ticks.iter().enumerate() {
            for used in &tick.uses {
                let bytes = bytes(used);
                held += bytes;
                ends[used.until.index().max(index)] += bytes;
            }
            largest = largest.max(held);
            held -= ends[index];
        }
        largest
    }

    /// Whether the host's cores use `chunk`: its home is in host memory then.
    pub fn on_host(&self, chunk: ChunkId) -> bool {
        self.uses(chunk).iter().any(|(_, access)| access.on_host())
    }

    /// Times per pass that a chunk would have to come to the device and leave it if its home were elsewhere:
    /// `(in, out)`, counted in whole chunks of what the rank stores.
    pub fn crossings(&self, chunk: ChunkId) -> (u64, u64) {
        let device = self.uses(chunk).iter().filter(|(_, access)| !access.on_host());
        device.fold((0, 0), |(into, out), (_, access)| {
            (into + u64::from(access.reads()), out + u64::from(access.writes()))
        })
    }
}

/// Whether a use finds its bytes at home, needing no working copy.
pub const fn in_place(access: Access, sharded: bool, home_on_device: bool) -> bool {
    access.on_host() || (home_on_device && (!sharded || !access.whole()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Role;

    /// Against the definition, for every tick and distance of a pass whose chunks are used now and then.
    #[test]
    fn what_lies_ahead_is_found_around_the_end_of_the_pass() {
        let length = 23u32;
        let chunks = [Role::Parameter, Role::Gradient].map(|role| GroupId(0).chunk(role));
        let uses_at = |tick: u32| -> Vec<Use> {
            let used = |index: usize| (tick * 7 + index as u32 * 5).is_multiple_of(3 + index as u32);
            let access = if tick.is_multiple_of(4) { Access::UpdateShard } else { Access::Read };
            let uses = (0..chunks.len()).filter(|index| used(*index));
            uses.map(|index| Use { chunk: chunks[index], access, until: Tick(tick) }).collect()
        };
        let spare_at = |tick: u32| u64::from(tick * 13 % 17);
        let ticks = (0..length).map(|tick| ScheduledTick {
            name: "tick",
            group: GroupId(0),
            spare: spare_at(tick),
            uses: uses_at(tick),
        });
        let schedule = Schedule::new(ticks.collect());
        for (chunk, from, ahead) in
            chunks.into_iter().flat_map(|c| (0..length).flat_map(move |f| (0..=length).map(move |a| (c, f, a))))
        {
            let written = (0..ahead).any(|distance| {
                let uses = uses_at((from + distance) % length);
                uses.iter().any(|used| used.chunk == chunk && used.access.writes())
            });
            assert_eq!(schedule.written_within(chunk, Tick(from), ahead), written, "{chunk:?} {from} {ahead}");
            let least = (0..=ahead.min(length - 1)).map(|distance| spare_at((from + distance) % length)).min();
            assert_eq!(Some(schedule.least_spare(Tick(from), ahead)), least, "{from} {ahead}");
        }
    }
}
