//! Places: tiers, spans of a tier's arena, element types and typed views.
//!
//! Each tier is *one* arena that the backend reserves once ([`crate::Memory::reserve`]); a [`Span`] is a
//! byte range of it. A span is a plain value: it owns nothing, and every use of it is bounds-checked by
//! the backend against the arena.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Where bytes can live, fastest first.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// The accelerator's own memory.
    Device,
    /// CPU DRAM (pinned where the backend has a device).
    Host,
    /// Files on a disk.
    Nvme,
}

impl Tier {
    /// All tiers, fastest first.
    pub const ALL: [Tier; 3] = [Tier::Device, Tier::Host, Tier::Nvme];

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Tier::Device => "device",
            Tier::Host => "host",
            Tier::Nvme => "nvme",
        }
    }

    /// Position in [`Tier::ALL`].
    pub const fn index(self) -> usize {
        self as usize
    }
}

impl fmt::Debug for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A byte range of a tier's arena.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Span {
    /// The tier whose arena this is a part of.
    pub tier: Tier,
    /// Bytes from the start of the arena.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

impl Span {
    /// A span of `bytes` at `offset` of `tier`'s arena.
    pub const fn new(tier: Tier, offset: u64, bytes: u64) -> Self {
        Span { tier, offset, bytes }
    }

    /// The part of this span that starts `offset` bytes in and is `bytes` long.
    ///
    /// # Panics
    /// If the part does not lie inside the span.
    #[track_caller]
    pub const fn part(self, offset: u64, bytes: u64) -> Span {
        assert!(offset + bytes <= self.bytes, "part outside of its span");
        Span { tier: self.tier, offset: self.offset + offset, bytes }
    }

    /// First byte behind the span.
    pub const fn end(self) -> u64 {
        self.offset + self.bytes
    }

    /// Whether the two spans share a byte.
    pub fn overlaps(self, other: Span) -> bool {
        self.tier == other.tier && self.offset < other.end() && other.offset < self.end()
    }

    /// This span read as elements of `dtype`.
    pub const fn view(self, dtype: DType) -> View {
        View { span: self, dtype }
    }
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}..{}]", self.tier, self.offset, self.end())
    }
}

/// Type of an element.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE 754 binary64 (norm partial sums only).
    F64,
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// Signed 32-bit integer (token ids, targets, orders).
    I32,
    /// 16-bit remainder of a split master: `master_bits - (bf16_bits << 16)` as a signed integer.
    Rem16,
    /// 8-bit blockwise quantised moment: `n` code bytes followed by one `f32` scale per 256 elements.
    Q8,
}

/// Elements that share one scale in [`DType::Q8`].
pub const Q8_BLOCK: u64 = 256;

impl DType {
    /// Bytes that `elements` of this type take. [`DType::Q8`] includes its scales.
    pub const fn bytes(self, elements: u64) -> u64 {
        match self {
            DType::F64 => elements * 8,
            DType::F32 | DType::I32 => elements * 4,
            DType::F16 | DType::Bf16 | DType::Rem16 => elements * 2,
            DType::Q8 => elements + elements.div_ceil(Q8_BLOCK) * 4,
        }
    }

    /// Elements that fit into `bytes`: the inverse of [`DType::bytes`] for whole blocks.
    pub const fn elements(self, bytes: u64) -> u64 {
        match self {
            DType::F64 => bytes / 8,
            DType::F32 | DType::I32 => bytes / 4,
            DType::F16 | DType::Bf16 | DType::Rem16 => bytes / 2,
            DType::Q8 => bytes / (Q8_BLOCK + 4) * Q8_BLOCK,
        }
    }
}

/// A span read as elements of one type.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct View {
    /// Where the elements are.
    pub span: Span,
    /// What they are.
    pub dtype: DType,
}

impl View {
    /// Number of elements.
    pub const fn elements(self) -> u64 {
        self.dtype.elements(self.span.bytes)
    }

    /// `count` elements from element `first` on. Not for [`DType::Q8`], whose scales are apart.
    ///
    /// # Panics
    /// If the part does not lie inside the view.
    #[track_caller]
    pub const fn part(self, first: u64, count: u64) -> View {
        View { span: self.span.part(self.dtype.bytes(first), self.dtype.bytes(count)), dtype: self.dtype }
    }
}
