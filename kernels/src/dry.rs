//! The rehearsal: a backend that allocates nothing, does nothing and counts everything.
//!
//! A step run on it shows what a plan will copy, gather and compute, and where a plan is wrong: every span
//! is checked against what was reserved, and every view against the shape it is used with. It keeps no
//! contents (downloads are zeros) and no time (marks are reached at once).

mod operators;

use crate::ops::Attention;
use crate::{Among, Backend, Collectives, DType, Device, Mark, Memory, Order, Result, Span, Stream, Tier, View, route};
use parking_lot::Mutex;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// What the rehearsed backend would answer.
#[derive(Clone, Debug)]
pub struct DryProfile {
    /// Name for people.
    pub name: String,
    /// As [`Device::available_bytes`].
    pub available_bytes: u64,
    /// As [`Device::overhead_bytes`].
    pub overhead_bytes: u64,
    /// As [`Device::fused_attention`].
    pub fused_attention: bool,
    /// As [`Backend::workspace_bytes`].
    pub workspace_bytes: u64,
    /// As [`crate::Operators::attention_scratch_bytes`].
    pub attention_scratch_bytes: fn(Attention, DType) -> u64,
    /// As [`crate::Operators::rmsnorm_scratch_bytes`].
    pub rmsnorm_scratch_bytes: fn(u64, u64) -> u64,
    /// As [`Collectives::shards`]. None: as many as ranks.
    pub shards: Option<u32>,
}

impl Default for DryProfile {
    /// A device without end whose operators need no scratch.
    fn default() -> Self {
        DryProfile {
            name: "rehearsal".into(),
            available_bytes: u64::MAX,
            overhead_bytes: 0,
            fused_attention: true,
            workspace_bytes: 0,
            attention_scratch_bytes: |_, _| 0,
            rmsnorm_scratch_bytes: |_, _| 0,
            shards: None,
        }
    }
}

/// Floating-point operations by kind; a multiplication and an addition are two.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Flops {
    /// `y = x·wᵀ`: 2·T·I·O.
    pub linear: u64,
    /// `d_x = d_y·w`: 2·T·I·O.
    pub linear_backward_input: u64,
    /// `d_w = d_yᵀ·x`: 2·T·I·O.
    pub linear_backward_weight: u64,
    /// Causal attention: 2·B·H·S²·D (two products over half of the S×S scores).
    pub attention: u64,
    /// Its backward: 5·B·H·S²·D (five such products).
    pub attention_backward: u64,
}

impl Flops {
    /// All kinds.
    pub const fn total(&self) -> u64 {
        self.linear
            + self.linear_backward_input
            + self.linear_backward_weight
            + self.attention
            + self.attention_backward
    }
}

/// What was asked of a [`Dry`] backend so far.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Counts {
    /// Bytes of [`Order::copy`] by source and target tier ([`Tier::index`]).
    pub copied_bytes: [[u64; 3]; 3],
    /// Bytes written by [`Memory::upload`] and [`Memory::write_host`].
    pub uploaded_bytes: u64,
    /// Bytes read by [`Memory::download`] and [`Memory::read_host`].
    pub downloaded_bytes: u64,
    /// Bytes of gathered views (whole, this rank's part included).
    pub gathered_bytes: u64,
    /// Bytes of reduce-scattered and all-reduced views (whole, this rank's part included).
    pub reduced_bytes: u64,
    /// Bytes of this rank's messages in [`Collectives::exchange`].
    pub exchanged_bytes: u64,
    /// Arithmetic of matrix products and attention.
    pub flops: Flops,
    /// Bytes read and written by all other operators.
    pub memory_bound_bytes: u64,
    /// Calls of operators.
    pub operators_count: u64,
    /// Calls of [`Order::copy`].
    pub copies_count: u64,
    /// Calls of collectives.
    pub collectives_count: u64,
    /// Marks made.
    pub marks_count: u64,
    /// Waits and joins.
    pub waits_count: u64,
}

impl Counts {
    /// Bytes copied from `source` to `target`.
    pub const fn copied(&self, source: Tier, target: Tier) -> u64 {
        self.copied_bytes[source.index()][target.index()]
    }
}

/// A backend that only counts.
pub struct Dry {
    world: u32,
    rank: u32,
    profile: DryProfile,
    reserved: [OnceLock<u64>; 3],
    issued: [AtomicU64; Stream::ALL.len()],
    counts: Mutex<Counts>,
}

impl Dry {
    /// Rank `rank` of `world`, answering as `profile` says.
    ///
    /// # Panics
    /// If `rank` is not below `world`.
    pub fn new(world: u32, rank: u32, profile: DryProfile) -> Dry {
        assert!(rank < world, "rank {rank} of {world}");
        Dry {
            world,
            rank,
            profile,
            reserved: [const { OnceLock::new() }; 3],
            issued: [const { AtomicU64::new(0) }; Stream::ALL.len()],
            counts: Mutex::new(Counts::default()),
        }
    }

    /// What was asked of it so far.
    pub fn counts(&self) -> Counts {
        *self.counts.lock()
    }

    /// Starts counting from zero.
    pub fn reset_counts(&self) {
        *self.counts.lock() = Counts::default();
    }

    /// # Panics
    /// If the span lies outside of what was reserved.
    #[track_caller]
    fn check(&self, span: Span) {
        let Some(&reserved) = self.reserved[span.tier.index()].get() else {
            panic!("{span:?} of a tier that was not reserved");
        };
        let inside = span.offset.checked_add(span.bytes).is_some_and(|end| end <= reserved);
        assert!(inside, "{span:?} lies outside of the {} arena of {reserved} bytes", span.tier);
    }

    /// Checks that a view is reserved, in memory, and holds `elements`.
    #[track_caller]
    fn check_view(&self, view: View, elements: u64) {
        self.check(view.span);
        assert!(view.span.tier != Tier::Nvme, "{view:?} is not in memory");
        let needed = view.dtype.bytes(elements);
        assert!(needed <= view.span.bytes, "{view:?} holds less than {elements} elements");
    }

    fn count(&self, add: impl FnOnce(&mut Counts)) {
        add(&mut self.counts.lock());
    }

    /// Checks a shard against the whole, and both against their arenas.
    #[track_caller]
    fn check_shard(&self, shard: View, full: View) {
        self.check(shard.span);
        self.check(full.span);
        route::own_part(shard, full, self.shard(), self.shards());
    }

    #[track_caller]
    fn check_issued(&self, mark: Mark) {
        let issued = self.issued[mark.stream.index()].load(Ordering::Relaxed);
        assert!(mark.number <= issued, "{mark:?} was never made: the last one is {issued}");
    }
}

impl Memory for Dry {
    fn reserve(&self, tier: Tier, bytes: u64, _folder: Option<&Path>) -> Result<()> {
        assert!(self.reserved[tier.index()].set(bytes).is_ok(), "the {tier} tier was reserved twice");
        Ok(())
    }

    fn upload(&self, target: Span, bytes: &[u8]) -> Result<()> {
        self.write_host(target, bytes);
        Ok(())
    }

    fn download(&self, source: Span, out: &mut [u8]) -> Result<()> {
        self.read_host(source, out);
        Ok(())
    }

    fn write_host(&self, target: Span, bytes: &[u8]) {
        let bytes = bytes.len() as u64;
        self.check(target.part(0, bytes));
        self.count(|c| c.uploaded_bytes += bytes);
    }

    fn read_host(&self, source: Span, out: &mut [u8]) {
        let bytes = out.len() as u64;
        self.check(source.part(0, bytes));
        out.fill(0);
        self.count(|c| c.downloaded_bytes += bytes);
    }
}

impl Order for Dry {
    fn mark(&self, stream: Stream) -> Mark {
        self.count(|c| c.marks_count += 1);
        Mark { stream, number: self.issued[stream.index()].fetch_add(1, Ordering::Relaxed) + 1 }
    }

    fn wait(&self, _stream: Stream, mark: Mark) {
        self.check_issued(mark);
        self.count(|c| c.waits_count += 1);
    }

    fn join(&self, mark: Mark) -> Result<()> {
        self.check_issued(mark);
        self.count(|c| c.waits_count += 1);
        Ok(())
    }

    fn reached(&self, mark: Mark) -> bool {
        self.check_issued(mark);
        true
    }

    fn elapsed_ns(&self, _from: Mark, _to: Mark) -> Option<u64> {
        None
    }

    fn copy(&self, stream: Stream, source: Span, target: Span) -> Result<()> {
        route::check_copy("dry", stream, source, target)?;
        self.check(source);
        self.check(target);
        self.count(|c| {
            c.copies_count += 1;
            c.copied_bytes[source.tier.index()][target.tier.index()] += source.bytes;
        });
        Ok(())
    }
}

impl Collectives for Dry {
    fn world(&self) -> u32 {
        self.world
    }

    fn rank(&self) -> u32 {
        self.rank
    }

    fn shards(&self) -> u32 {
        self.profile.shards.unwrap_or(self.world)
    }

    fn all_gather(&self, shard: View, full: View) -> Result<()> {
        self.check_shard(shard, full);
        self.count(|c| {
            c.collectives_count += 1;
            c.gathered_bytes += full.span.bytes;
        });
        Ok(())
    }

    fn reduce_scatter(&self, full: View, shard: View) -> Result<()> {
        self.check_shard(shard, full);
        self.count(|c| {
            c.collectives_count += 1;
            c.reduced_bytes += full.span.bytes;
        });
        Ok(())
    }

    fn all_reduce(&self, _: Among, view: View) -> Result<()> {
        self.check(view.span);
        self.count(|c| {
            c.collectives_count += 1;
            c.reduced_bytes += view.span.bytes;
        });
        Ok(())
    }

    fn accumulate(&self, source: View, target: View) -> Result<()> {
        route::check_accumulate("dry", source, target)?;
        self.check(source.span);
        self.check(target.span);
        self.count(|c| {
            c.operators_count += 1;
            c.memory_bound_bytes += source.span.bytes + 2 * target.span.bytes;
        });
        Ok(())
    }

    fn exchange(&self, message: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.count(|c| {
            c.collectives_count += 1;
            c.exchanged_bytes += message.len() as u64;
        });
        Ok(vec![message.to_vec(); self.world as usize])
    }
}

impl Backend for Dry {
    fn device(&self) -> Device {
        Device {
            backend: "dry",
            name: self.profile.name.clone(),
            available_bytes: self.profile.available_bytes,
            overhead_bytes: self.profile.overhead_bytes,
            fused_attention: self.profile.fused_attention,
        }
    }

    fn workspace_bytes(&self) -> u64 {
        self.profile.workspace_bytes
    }

    fn set_workspace(&self, workspace: Span) {
        self.check(workspace);
        let needed = self.profile.workspace_bytes;
        assert!(workspace.bytes >= needed, "{workspace:?} is less than the {needed} bytes asked for");
    }

    fn computes_in(&self, dtype: DType) -> bool {
        matches!(dtype, DType::F32 | DType::F16 | DType::Bf16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Operators;
    use crate::ops::Linear;

    fn dry(world: u32, rank: u32) -> Dry {
        let dry = Dry::new(world, rank, DryProfile::default());
        for tier in Tier::ALL {
            dry.reserve(tier, 1 << 16, None).expect("a dry tier has no end");
        }
        dry
    }

    #[test]
    fn copies_are_counted_by_route() {
        let dry = dry(1, 0);
        let at = |tier| Span::new(tier, 0, 4096);
        dry.copy(Stream::HostToDevice, at(Tier::Host), at(Tier::Device)).expect("dry");
        dry.copy(Stream::HostToDevice, at(Tier::Host), at(Tier::Device)).expect("dry");
        dry.copy(Stream::NvmeRead, at(Tier::Nvme), at(Tier::Host)).expect("dry");
        let counts = dry.counts();
        assert_eq!(counts.copied(Tier::Host, Tier::Device), 8192);
        assert_eq!(counts.copied(Tier::Nvme, Tier::Host), 4096);
        assert_eq!(counts.copied_bytes.as_flattened().iter().sum::<u64>(), 12288);
        assert_eq!(counts.copies_count, 3);
        dry.reset_counts();
        assert_eq!(dry.counts(), Counts::default());
    }

    #[test]
    fn flops_of_a_linear_layer_are_twice_its_products() {
        let dry = dry(1, 0);
        let view = |elements: u64| Span::new(Tier::Device, 0, elements * 4).view(DType::F32);
        let shape = Linear { tokens: 3, inputs: 5, outputs: 7 };
        dry.linear(view(15), view(35), None, None, view(21), shape);
        assert_eq!(dry.counts().flops, Flops { linear: 2 * 3 * 5 * 7, ..Flops::default() });
        assert_eq!(dry.counts().memory_bound_bytes, 0);
    }

    #[test]
    #[should_panic(expected = "outside of the device arena")]
    fn spans_outside_of_their_arena_are_caught() {
        dry(1, 0).zero(Span::new(Tier::Device, (1 << 16) - 4, 8).view(DType::F32));
    }

    #[test]
    #[should_panic(expected = "holds less than")]
    fn views_smaller_than_their_shape_are_caught() {
        let view = Span::new(Tier::Device, 0, 64).view(DType::F32);
        dry(1, 0).linear(view, view, None, None, view, Linear { tokens: 4, inputs: 4, outputs: 5 });
    }

    #[test]
    #[should_panic(expected = "is not 2 shards as")]
    fn shards_that_do_not_make_up_the_whole_are_caught() {
        let view = |bytes| Span::new(Tier::Device, 0, bytes).view(DType::Bf16);
        let _ = dry(2, 1).all_gather(view(64), view(100));
    }
}
