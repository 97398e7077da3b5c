//! Policies: where each chunk's home is. A policy sees a view and returns a placement; it moves nothing
//! and holds nothing, and every rank that sees the same view returns the same placement (L7).

use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::plan::{FILE_GRANULE, GRANULE, placed_bytes};
use crate::schedule::{Schedule, in_place};
use crate::units::{ChunkId, Role};
use castor_kernels::Tier;

/// What a policy sees.
pub struct PolicyView<'a> {
    /// The chunks.
    pub layout: &'a Layout,
    /// The uses of a training step.
    pub schedule: &'a Schedule,
    /// Bytes per tier (device, host, nvme) that model data, window and staging may take.
    pub room: [u64; 3],
    /// Bytes per tier that are taken by other things already, for messages.
    pub taken: [Vec<(String, u64)>; 3],
    /// How far prefetch may run ahead, if the user said so.
    pub lookahead_bytes: Option<u64>,
    /// Bytes by which a rehearsal found an earlier answer's window too small.
    pub window_shortage: u64,
}

/// A policy's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// For each chunk index its home; `None` where the chunk does not exist.
    pub homes: Vec<Option<Tier>>,
    /// Bytes of the device's window for working copies.
    pub window_bytes: u64,
    /// Bytes of host memory between disk and device.
    pub staging_bytes: u64,
    /// Bytes that prefetch may hold ahead of use.
    pub lookahead_bytes: u64,
}

/// Pieces of chunks that may be between disk and device at once.
const STAGED_PIECES: u64 = 16;

/// Most bytes of a piece: enough for the disk's speed.
const STAGED_BYTES: u64 = 64 << 20;

impl Placement {
    /// Bytes that pass through staging at a time: many such pieces are on their way at once, in either direction.
    pub fn staged_bytes(&self) -> u64 {
        (self.staging_bytes / STAGED_PIECES / FILE_GRANULE * FILE_GRANULE).max(FILE_GRANULE)
    }
}

/// Decides homes.
pub trait PlacementPolicy {
    /// Name for people.
    fn name(&self) -> &'static str;

    /// The placement.
    ///
    /// # Errors
    /// [`Error::OutOfRoom`] with numbers if it does not fit.
    fn place(&self, view: &PolicyView<'_>) -> Result<Placement>;
}

/// Everything on the device, or a refusal.
pub struct DevicePolicy;

/// The named roles on the host (then disk), the rest on the device, or a refusal.
pub struct HostPolicy {
    /// Parameters go to the host.
    pub parameters: bool,
    /// Gradients, masters and moments go to the host.
    pub optimizer: bool,
}

/// Fractions of the bytes on the host, honoured to the chunk: the last groups' chunks go first, until the
/// next one would exceed the fraction.
pub struct StaticPolicy {
    /// Fraction of the parameter bytes, 0 to 1.
    pub offload_param_frac: f64,
    /// Fraction of the bytes of gradients, masters and moments, 0 to 1.
    pub offload_optim_frac: f64,
}

/// Device first: what crosses the link most per byte stays on the device, the coldest goes to the disk.
pub struct AutoPolicy {
    /// The window's size where not everything fits, in what its worst tick needs: at 2 one copy is in use and one on
    /// its way at every tick, at 1 nothing comes ahead but into what activations leave free.
    pub window: f64,
}

impl AutoPolicy {
    /// The usual window.
    pub const WINDOW: f64 = 2.0;
    /// With it.
    pub const USUAL: AutoPolicy = AutoPolicy { window: AutoPolicy::WINDOW };
}

impl PlacementPolicy for DevicePolicy {
    fn name(&self) -> &'static str {
        "device"
    }

    fn place(&self, view: &PolicyView<'_>) -> Result<Placement> {
        finish(view, homes(view, |_| Tier::Device))
    }
}

impl PlacementPolicy for HostPolicy {
    fn name(&self) -> &'static str {
        "host"
    }

    fn place(&self, view: &PolicyView<'_>) -> Result<Placement> {
        let on_host = |chunk: ChunkId| match chunk.role() {
            Role::Parameter => self.parameters && may_leave(view.layout, chunk),
            _ => self.optimizer,
        };
        finish(view, homes(view, |chunk| if on_host(chunk) { Tier::Host } else { Tier::Device }))
    }
}

impl PlacementPolicy for StaticPolicy {
    fn name(&self) -> &'static str {
        "static"
    }

    fn place(&self, view: &PolicyView<'_>) -> Result<Placement> {
        let mut answer = homes(view, |_| Tier::Device);
        for (fraction, parameters) in [(self.offload_param_frac, true), (self.offload_optim_frac, false)] {
            let mut chunks: Vec<ChunkId> = view
                .layout
                .chunk_ids()
                .filter(|c| (c.role() == Role::Parameter) == parameters && may_leave(view.layout, *c))
                .collect();
            chunks.reverse();
            let bytes: u64 = chunks.iter().map(|&c| view.layout.stored_bytes(c)).sum();
            let mut left = (bytes as f64 * fraction).round() as u64;
            for chunk in chunks {
                let bytes = view.layout.stored_bytes(chunk);
                if bytes <= left {
                    left -= bytes;
                    answer[chunk.index()] = Some(Tier::Host);
                }
            }
        }
        finish(view, answer)
    }
}

impl PlacementPolicy for AutoPolicy {
    fn name(&self) -> &'static str {
        "auto"
    }

    fn place(&self, view: &PolicyView<'_>) -> Result<Placement> {
        let all = homes(view, |_| Tier::Device);
        if let Ok(placement) = finish(view, all) {
            return Ok(placement);
        }
        // Not everything fits: the window is sized for streaming everything, then the device is filled with what saves
        // the most crossings per byte.
        let mut answer = homes(view, |chunk| if may_leave(view.layout, chunk) { Tier::Host } else { Tier::Device });
        let streaming = window_need(view, &answer);
        let wanted = (self.window * streaming as f64) as u64;
        let window = wanted.min(view.room[0]).max(streaming) + view.window_shortage;
        let pinned: u64 = on_tier(view.layout, &answer, Tier::Device);
        let mut room = view.room[0].saturating_sub(window + pinned);
        for chunk in by_value(view) {
            let bytes = placed_bytes(Tier::Device, view.layout.stored_bytes(chunk));
            if answer[chunk.index()] == Some(Tier::Host) && !view.schedule.on_host(chunk) && bytes <= room {
                room -= bytes;
                answer[chunk.index()] = Some(Tier::Device);
            }
        }
        finish(view, answer)
    }
}

/// Homes by a rule over all chunks but those that the host's cores use: these are on the host.
fn homes(view: &PolicyView<'_>, rule: impl Fn(ChunkId) -> Tier) -> Vec<Option<Tier>> {
    let mut homes = vec![None; view.layout.groups.len() * Role::ALL.len()];
    for chunk in view.layout.chunk_ids() {
        homes[chunk.index()] = Some(if view.schedule.on_host(chunk) { Tier::Host } else { rule(chunk) });
    }
    homes
}

/// Whether a chunk may have its home off the device: a whole parameter of which each rank updates only a part
/// is gathered in place and stays.
fn may_leave(layout: &Layout, chunk: ChunkId) -> bool {
    layout.shards == 1 || chunk.role() != Role::Parameter || layout.sharding.parameters == layout.sharding.optimizer
}

/// Chunks, those whose absence from the device would cost most link bytes per stored byte first. Among equals the
/// groups come in an order whose every beginning is spread over the model, the first group first: its weights are
/// wanted at once, and what is left out then crosses the link at even distances, behind the blocks between.
fn by_value(view: &PolicyView<'_>) -> Vec<ChunkId> {
    let mut chunks: Vec<ChunkId> = view.layout.chunk_ids().collect();
    chunks.sort_by_key(|&chunk| {
        let (into, out) = view.schedule.crossings(chunk);
        (std::cmp::Reverse(into + out), chunk.group().0.reverse_bits(), chunk)
    });
    chunks
}

fn on_tier(layout: &Layout, homes: &[Option<Tier>], tier: Tier) -> u64 {
    let here = layout.chunk_ids().filter(|c| homes[c.index()] == Some(tier));
    here.map(|c| placed_bytes(tier, layout.stored_bytes(c))).sum()
}

/// Bytes of working copies that the worst tick needs at once.
fn window_need(view: &PolicyView<'_>, homes: &[Option<Tier>]) -> u64 {
    let layout = view.layout;
    view.schedule.largest_need(|used| {
        let (chunk, role) = (used.chunk, used.chunk.role());
        let sharded = layout.shards > 1 && layout.sharding.splits(role);
        let bytes = if in_place(used.access, sharded, homes[chunk.index()] == Some(Tier::Device)) {
            0
        } else if used.access.whole() {
            layout.full_bytes(chunk)
        } else {
            layout.stored_bytes(chunk)
        };
        let contribution = if used.access.sums() { layout.full_bytes(chunk) } else { 0 };
        placed_bytes(Tier::Device, bytes) + placed_bytes(Tier::Device, contribution)
    })
}

/// Gives homes a window, moves what the host cannot hold to the disk (coldest first), checks the room.
fn finish(view: &PolicyView<'_>, mut homes: Vec<Option<Tier>>) -> Result<Placement> {
    let layout = view.layout;
    let need = window_need(view, &homes) + view.window_shortage;
    let device = on_tier(layout, &homes, Tier::Device);
    if device + need > view.room[0] {
        return Err(short(
            view,
            Tier::Device,
            device + need - view.room[0],
            &[("model data", device), ("window", need)],
        ));
    }
    // Room left over serves prefetch: what comes in while the link is idle need not come when it is wanted. More than
    // a copy of everything that streams would be of no use.
    let streamed = layout
        .chunk_ids()
        .filter(|chunk| {
            homes[chunk.index()] != Some(Tier::Device) || (layout.shards > 1 && layout.sharding.splits(chunk.role()))
        })
        .map(|chunk| placed_bytes(Tier::Device, layout.full_bytes(chunk)))
        .sum::<u64>();
    let most = need.max(streamed);
    let window_bytes = if need == 0 { 0 } else { (view.room[0] - device).min(most) / GRANULE * GRANULE };
    let mut staging_bytes = 0;
    let host = on_tier(layout, &homes, Tier::Host);
    if host > view.room[1] {
        let largest = layout.chunk_ids().map(|c| placed_bytes(Tier::Nvme, layout.stored_bytes(c))).max().unwrap_or(0);
        staging_bytes = (3 * largest).min(STAGED_PIECES * STAGED_BYTES);
        let mut excess = (host + staging_bytes).saturating_sub(view.room[1]);
        let mut nvme = 0;
        // The coldest, and of those what the beginning of a step wants: the window can take that in while the step
        // before computes, so that the disk has all the backward for it.
        let mut coldest: Vec<ChunkId> = layout.chunk_ids().collect();
        coldest.sort_by_key(|&chunk| {
            let (into, out) = view.schedule.crossings(chunk);
            (into + out, chunk.group(), chunk)
        });
        for chunk in coldest {
            if excess == 0 {
                break;
            }
            if homes[chunk.index()] == Some(Tier::Host) && !view.schedule.on_host(chunk) {
                let bytes = placed_bytes(Tier::Nvme, layout.stored_bytes(chunk));
                homes[chunk.index()] = Some(Tier::Nvme);
                nvme += bytes;
                excess = excess.saturating_sub(bytes);
            }
        }
        if view.room[2] == 0 {
            return Err(short(view, Tier::Host, host - view.room[1].min(host), &[("model data", host)]));
        }
        if excess > 0 {
            return Err(short(view, Tier::Host, excess, &[("staging", staging_bytes)]));
        }
        if nvme > view.room[2] {
            return Err(short(view, Tier::Nvme, nvme - view.room[2], &[("model data", nvme)]));
        }
    }
    let lookahead_bytes = view.lookahead_bytes.unwrap_or(window_bytes + view.schedule.most_spare());
    Ok(Placement { homes, window_bytes, staging_bytes, lookahead_bytes })
}

fn short(view: &PolicyView<'_>, tier: Tier, short_by: u64, users: &[(&str, u64)]) -> Error {
    let taken = &view.taken[tier.index()];
    let mut largest_users: Vec<(String, u64)> =
        users.iter().map(|(name, bytes)| ((*name).to_string(), *bytes)).chain(taken.iter().cloned()).collect();
    largest_users.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let budget = view.room[tier.index()] + taken.iter().map(|(_, bytes)| bytes).sum::<u64>();
    Error::OutOfRoom { tier, what: "the model does not fit".into(), budget, short_by, largest_users }
}
