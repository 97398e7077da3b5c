//! Layout: which tensors form which chunk, at which offset, and what padding that costs.
//!
//! Chunks follow the model: one group of tensors (embedding, block, head) is one chunk per role. A group
//! is padded only at its end, to [`ALIGNMENT`] elements per shard, so that every shard starts aligned for
//! 16-byte loads and holds whole blocks of 8-bit moments.

use crate::units::{ChunkId, GroupId, Role};
use castor_kernels::{DType, View, memory::Q8_BLOCK};
use serde::{Deserialize, Serialize};

/// Elements to which each shard of a group is padded.
pub const ALIGNMENT: u64 = Q8_BLOCK;

/// A tensor to lay out.
#[derive(Clone, Debug)]
pub struct TensorSpec {
    /// Name within its group.
    pub name: String,
    /// Rows and columns, or one dimension.
    pub shape: Vec<u64>,
    /// Whether weight decay applies to it.
    pub decays: bool,
}

/// A group of tensors to lay out. Tensors that decay come first.
#[derive(Clone, Debug)]
pub struct GroupSpec {
    /// Name, e.g. "block 3".
    pub name: String,
    /// Its tensors, in order.
    pub tensors: Vec<TensorSpec>,
}

/// A tensor's place in its group.
#[derive(Clone, Debug)]
pub struct TensorPlace {
    /// Name within its group.
    pub name: String,
    /// Shape.
    pub shape: Vec<u64>,
    /// First element within the group.
    pub offset: u64,
    /// Number of elements.
    pub elements: u64,
}

impl TensorPlace {
    /// The tensor in its group's elements.
    pub const fn within(&self, group: View) -> View {
        group.part(self.offset, self.elements)
    }
}

/// A laid-out group.
#[derive(Clone, Debug)]
pub struct Group {
    /// Name, e.g. "block 3".
    pub name: String,
    /// Its tensors.
    pub tensors: Vec<TensorPlace>,
    /// Elements of its tensors.
    pub used: u64,
    /// Elements with padding: a multiple of `ALIGNMENT × shards`.
    pub elements: u64,
    /// Weight decay applies to elements `0..decayed`.
    pub decayed: u64,
    /// Number of this group's first element within the model (padding not counted).
    pub first_element: u64,
}

/// Element types by role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Formats {
    /// f32, f16 or bf16.
    pub parameter: DType,
    /// f32 or the parameter's type.
    pub gradient: DType,
    /// f32, Rem16, or none where the parameter is f32.
    pub master: Option<DType>,
    /// f32, bf16 or Q8.
    pub first: DType,
    /// f32, bf16 or Q8.
    pub second: DType,
}

impl Formats {
    /// Type of a role's elements.
    pub const fn of(&self, role: Role) -> Option<DType> {
        match role {
            Role::Parameter => Some(self.parameter),
            Role::Gradient => Some(self.gradient),
            Role::Master => self.master,
            Role::First => Some(self.first),
            Role::Second => Some(self.second),
        }
    }
}

/// Which roles are split over the ranks that together hold all shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharding {
    /// ZeRO-3
    pub parameters: bool,
    /// ZeRO-2
    pub gradients: bool,
    /// ZeRO-1: master and moments
    pub optimizer: bool,
}

impl Sharding {
    /// Whether a role is split.
    pub const fn splits(&self, role: Role) -> bool {
        match role {
            Role::Parameter => self.parameters,
            Role::Gradient => self.gradients,
            Role::Master | Role::First | Role::Second => self.optimizer,
        }
    }
}

/// The whole model, laid out for a number of ranks.
#[derive(Clone, Debug)]
pub struct Layout {
    /// Groups in the order of their first use.
    pub groups: Vec<Group>,
    /// Element types.
    pub formats: Formats,
    /// What is split.
    pub sharding: Sharding,
    /// Number of ranks.
    pub world: u64,
    /// Number of ranks that data is split over; divides `world`. The others hold the same again.
    pub shards: u64,
    /// Whether gradients have homes. Else each lives in the window from its backward to its update.
    pub keeps_gradients: bool,
}

impl Layout {
    /// Lays `groups` out for `world` ranks, split over all of them.
    pub fn new(groups: Vec<GroupSpec>, formats: Formats, sharding: Sharding, world: u64) -> Layout {
        Layout::replicated(groups, formats, sharding, world, world)
    }

    /// Lays `groups` out for `world` ranks, split over `shards` of them at a time.
    ///
    /// # Panics
    /// If `shards` does not divide `world`.
    pub fn replicated(groups: Vec<GroupSpec>, formats: Formats, sharding: Sharding, world: u64, shards: u64) -> Layout {
        assert!(shards > 0 && world.is_multiple_of(shards), "{world} ranks are not whole groups of {shards}");
        let unit = ALIGNMENT * shards;
        let mut first_element = 0;
        let groups = groups
            .into_iter()
            .map(|group| {
                let (mut offset, mut decayed) = (0, 0);
                let tensors = group
                    .tensors
                    .into_iter()
                    .map(|tensor| {
                        let elements = tensor.shape.iter().product();
                        if tensor.decays {
                            assert_eq!(decayed, offset, "tensors that decay come first in {}", group.name);
                            decayed = offset + elements;
                        }
                        let place = TensorPlace { name: tensor.name, shape: tensor.shape, offset, elements };
                        offset += elements;
                        place
                    })
                    .collect();
                let group = Group {
                    name: group.name,
                    tensors,
                    used: offset,
                    elements: offset.div_ceil(unit) * unit,
                    decayed,
                    first_element,
                };
                first_element += offset;
                group
            })
            .collect();
        Layout { groups, formats, sharding, world, shards, keeps_gradients: true }
    }

    /// A group.
    pub fn group(&self, group: GroupId) -> &Group {
        &self.groups[group.index()]
    }

    /// Ids of all groups in order.
    pub fn group_ids(&self) -> impl DoubleEndedIterator<Item = GroupId> + use<> {
        (0..self.groups.len() as u32).map(GroupId)
    }

    /// Ids of all chunks that have a home.
    pub fn chunk_ids(&self) -> impl Iterator<Item = ChunkId> + '_ {
        self.group_ids().flat_map(move |group| {
            let stored = |role: &Role| self.formats.of(*role).is_some() && self.stores(*role);
            Role::ALL.into_iter().filter(stored).map(move |role| group.chunk(role))
        })
    }

    /// Whether chunks of a role have a home.
    pub fn stores(&self, role: Role) -> bool {
        role != Role::Gradient || self.keeps_gradients
    }

    /// Type of a chunk's elements.
    ///
    /// # Panics
    /// If the role does not exist with these formats.
    #[track_caller]
    pub fn dtype(&self, chunk: ChunkId) -> DType {
        self.formats
            .of(chunk.role())
            .unwrap_or_else(|| panic!("{chunk:?}: no {} in these formats", chunk.role().name()))
    }

    /// Elements of this rank's shard of a group.
    pub fn shard_elements(&self, group: GroupId) -> u64 {
        self.group(group).elements / self.shards
    }

    /// Elements of a chunk that one rank stores.
    pub fn stored_elements(&self, chunk: ChunkId) -> u64 {
        let group = self.group(chunk.group());
        if self.sharding.splits(chunk.role()) { group.elements / self.shards } else { group.elements }
    }

    /// Bytes of a chunk that one rank stores.
    pub fn stored_bytes(&self, chunk: ChunkId) -> u64 {
        self.dtype(chunk).bytes(self.stored_elements(chunk))
    }

    /// Bytes of a whole chunk.
    pub fn full_bytes(&self, chunk: ChunkId) -> u64 {
        self.dtype(chunk).bytes(self.group(chunk.group()).elements)
    }

    /// Elements of the model without padding.
    pub fn used(&self) -> u64 {
        self.groups.iter().map(|g| g.used).sum()
    }

    /// Elements with padding.
    pub fn elements(&self) -> u64 {
        self.groups.iter().map(|g| g.elements).sum()
    }

    /// Fraction of the laid-out elements that is padding.
    pub fn waste(&self) -> f64 {
        1.0 - self.used() as f64 / self.elements() as f64
    }

    /// Bytes of model data that one rank stores, all roles.
    pub fn model_bytes(&self) -> u64 {
        self.chunk_ids().map(|c| self.stored_bytes(c)).sum()
    }
}
