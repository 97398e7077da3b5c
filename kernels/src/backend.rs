//! The one trait behind which the hardware lives: memory, order, collectives, operators.
//!
//! A backend serves one rank. All calls come from one thread of that rank (the step); what runs beside it
//! (copy engines, CUDA streams, the NVMe ring) is the backend's own. A failure of queued work is kept and
//! returned by the next [`Order::join`] on that stream or any later call: nothing is lost, nothing panics.

use crate::{DType, Mark, Operators, Result, Span, Stream, Tier, View};
use std::path::Path;

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// "cpu", "cuda" or "dry".
    pub backend: &'static str,
    /// Name for people, e.g. "NVIDIA H200".
    pub name: String,
    /// Bytes of device memory that could be reserved now.
    pub available_bytes: u64,
    /// Bytes that the driver and its libraries hold on the device beside the arena.
    pub overhead_bytes: u64,
    /// Whether attention runs fused (never materialises S×S).
    pub fused_attention: bool,
}

/// Arenas and control-plane access to them.
pub trait Memory {
    /// Takes the tier's one arena of exactly `bytes`. Called once per tier, before any use of it; `bytes`
    /// may be 0. For [`Tier::Nvme`] the files lie in `folder`, which must exist; they are taken (not only
    /// reserved) at once, so that a full disk is an error here and not in the step.
    ///
    /// # Errors
    /// If the tier cannot give the bytes.
    fn reserve(&self, tier: Tier, bytes: u64, folder: Option<&Path>) -> Result<()>;

    /// Writes `bytes` to the start of `target` (device or host) and returns when they are there.
    /// Control plane: first waits for all streams.
    ///
    /// # Errors
    /// If the device refuses.
    fn upload(&self, target: Span, bytes: &[u8]) -> Result<()>;

    /// Reads `out.len()` bytes from the start of `source` (device or host). Waits for all streams first.
    ///
    /// # Errors
    /// If the device refuses, or queued work failed.
    fn download(&self, source: Span, out: &mut [u8]) -> Result<()>;

    /// Writes host memory now, without waiting for anything: the caller knows that nobody uses `target`.
    /// For per-step inputs (token ids) on their way to the device.
    fn write_host(&self, target: Span, bytes: &[u8]);

    /// Reads host memory now: the caller has joined the mark after which it is written. Any threads may call it.
    fn read_host(&self, source: Span, out: &mut [u8]);
}

/// Streams, marks and copies.
pub trait Order {
    /// Marks the present end of `stream`.
    fn mark(&self, stream: Stream) -> Mark;

    /// Makes what is issued to `stream` from now on wait for `mark`. Never blocks the caller, except that a
    /// backend whose compute stream is the calling thread (the CPU) blocks when `stream` is `Compute`.
    fn wait(&self, stream: Stream, mark: Mark);

    /// Blocks the caller until `mark` is reached.
    ///
    /// # Errors
    /// The first failure of work queued on any stream.
    fn join(&self, mark: Mark) -> Result<()>;

    /// Whether `mark` is reached, without blocking.
    fn reached(&self, mark: Mark) -> bool;

    /// Nanoseconds of device time between two reached marks of one stream, where the backend keeps them.
    fn elapsed_ns(&self, from: Mark, to: Mark) -> Option<u64>;

    /// Copies `source` to `target` (equal lengths) on `stream`. Device↔host copies go on `HostToDevice` or
    /// `DeviceToHost` (small ones may ride on `Compute`), device↔device on `Compute`, file→host on
    /// `NvmeRead`, host→file on `NvmeWrite`. File offsets and lengths are multiples of 4096.
    ///
    /// # Errors
    /// If the copy cannot be issued. A failure while it runs is reported by [`Order::join`].
    fn copy(&self, stream: Stream, source: Span, target: Span) -> Result<()>;
}

/// The ranks among which a sum is taken. Data is split over as many neighbouring ranks as there are shards; ranks
/// `r`, `r + shards`, `r + 2·shards` … hold the same shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Among {
    /// All ranks.
    All,
    /// The ranks that together hold all shards, this one among them.
    Shards,
    /// The ranks that hold this rank's shard.
    Replicas,
}

/// Sums and gathers across ranks. With one rank they do nothing (beyond copying where source ≠ target).
/// All run on [`Stream::Collective`]; sums are taken in rank order, in f32.
pub trait Collectives {
    /// Number of ranks.
    fn world(&self) -> u32;

    /// This rank.
    fn rank(&self) -> u32;

    /// Number of ranks that data is split over; divides [`Collectives::world`].
    fn shards(&self) -> u32 {
        self.world()
    }

    /// Which shard this rank holds.
    fn shard(&self) -> u32 {
        self.rank() % self.shards()
    }

    /// `full` becomes all shards in order. `shard` may be this rank's part of `full`. Runs among the ranks that
    /// together hold all shards.
    ///
    /// # Errors
    /// If a peer is gone.
    fn all_gather(&self, shard: View, full: View) -> Result<()>;

    /// `shard` becomes this rank's part of the sum of `full`. `shard` may be that part itself. Runs among the ranks
    /// that together hold all shards.
    ///
    /// # Errors
    /// If a peer is gone.
    fn reduce_scatter(&self, full: View, shard: View) -> Result<()>;

    /// `view` becomes the sum over these ranks. f64 is summed in f64.
    ///
    /// # Errors
    /// If a peer is gone.
    fn all_reduce(&self, among: Among, view: View) -> Result<()>;

    /// `target[i] = target[i] + source[i]` on this rank alone, in f32, rounded once to nearest even: for a sum of
    /// several reductions. Both on the device, of one type and length, and apart.
    ///
    /// # Errors
    /// If the type has no sums.
    fn accumulate(&self, source: View, target: View) -> Result<()>;

    /// Control plane: every rank's `message`, in rank order. Blocks; not on a stream.
    ///
    /// # Errors
    /// If a peer is gone.
    fn exchange(&self, message: &[u8]) -> Result<Vec<Vec<u8>>>;
}

/// One rank's hardware.
pub trait Backend: Memory + Order + Collectives + Operators + Send + Sync {
    /// What it is.
    fn device(&self) -> Device;

    /// Bytes of scratch on the device that operators want for themselves (GEMM and attention workspaces),
    /// to be reserved by the caller and given with [`Backend::set_workspace`].
    fn workspace_bytes(&self) -> u64;

    /// Gives the scratch of [`Backend::workspace_bytes`].
    fn set_workspace(&self, workspace: Span);

    /// Whether the backend can do arithmetic in `dtype`.
    fn computes_in(&self, dtype: DType) -> bool;
}
