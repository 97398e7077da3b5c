//! Identities: what is counted and named, each with a short `Debug` form for messages.

use serde::{Deserialize, Serialize};
use std::fmt;

/// What a chunk's data is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The weights the model computes with.
    Parameter,
    /// The gradient, summed over a step.
    Gradient,
    /// What the f32 weight has beyond the parameter: an f32 copy or a 16-bit remainder.
    Master,
    /// First moment.
    First,
    /// Second moment, or Sophia's Hessian estimate.
    Second,
}

impl Role {
    /// All roles.
    pub const ALL: [Role; 5] = [Role::Parameter, Role::Gradient, Role::Master, Role::First, Role::Second];

    /// Position in [`Role::ALL`].
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Role::Parameter => "parameter",
            Role::Gradient => "gradient",
            Role::Master => "master",
            Role::First => "first moment",
            Role::Second => "second moment",
        }
    }
}

/// A group of tensors that live and move together: the embedding, a block, the head.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GroupId(pub u32);

impl GroupId {
    /// As an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// This group's chunk of `role`.
    pub const fn chunk(self, role: Role) -> ChunkId {
        ChunkId(self.0 * Role::ALL.len() as u32 + role as u32)
    }
}

impl fmt::Debug for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "g{}", self.0)
    }
}

/// One role's data of one group: the unit of residency and of collectives.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ChunkId(pub u32);

impl ChunkId {
    /// As an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// Its group.
    pub const fn group(self) -> GroupId {
        GroupId(self.0 / Role::ALL.len() as u32)
    }

    /// Its role.
    pub const fn role(self) -> Role {
        Role::ALL[self.0 as usize % Role::ALL.len()]
    }
}

impl fmt::Debug for ChunkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "c{}", self.0)
    }
}

/// Position in a pass's list of uses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Tick(pub u32);

impl Tick {
    /// As an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Debug for Tick {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tick{}", self.0)
    }
}

/// Bytes, shown in MiB for people; below 10 KiB, of which two decimals would leave nothing, as they are.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = self.0 as f64 / (1 << 20) as f64;
        if self.0 < 10 << 10 {
            return write!(f, "{} bytes", self.0);
        }
        if mib >= 100.0 { write!(f, "{mib:.0} MiB") } else { write!(f, "{mib:.2} MiB") }
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}B", self.0)
    }
}
