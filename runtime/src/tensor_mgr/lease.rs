//! Leases: the right to use a chunk's bytes.

use crate::schedule::Access;
use crate::units::ChunkId;
use castor_kernels::View;

/// The right to use a chunk until it is given to [`super::StatefulTensorMgr::release`].
#[must_use = "a lease keeps its chunk in place until it is released"]
#[derive(Debug)]
pub struct Lease {
    pub(super) chunk: ChunkId,
    pub(super) access: Access,
    pub(super) view: View,
    pub(super) first: u64,
    pub(super) elements: u64,
    pub(super) own: (u64, u64),
    /// Whether this rank's shard counts in the global norm.
    pub(super) squares: bool,
    /// Whether anything is in a sum yet.
    pub(super) begun: bool,
}

impl Lease {
    /// All elements of the lease.
    pub const fn view(&self) -> View {
        self.view
    }

    /// Number of the first element within the group.
    pub const fn first(&self) -> u64 {
        self.first
    }

    /// Number of elements (the view's own count is not exact for 8-bit moments).
    pub const fn elements(&self) -> u64 {
        self.elements
    }

    /// The part whose squares this rank adds to the global norm: each element belongs to one rank. None where a rank
    /// with the same shard adds it.
    pub fn norm_part(&self) -> Option<View> {
        self.squares.then(|| self.view.part(self.own.0 - self.first, self.own.1))
    }
}
