//! The model's tensors as groups, and their Hugging Face names.
//!
//! Projections that read the same input are one fused tensor whose rows are those of the named tensors one
//! after the other: q, k, v; gate, up. A group is therefore a plain sequence of named tensors, and a
//! [`Part`] says where in its group each lies. This file owns the order of tensors; everyone else asks it.

use super::Shape;
use crate::{error::Result, source::TensorSource};
use castor_runtime::{
    layout::{GroupSpec, TensorSpec},
    units::GroupId,
};

/// Tensors of a block's group, by index.
pub(super) mod block_tensor {
    pub const QKV: usize = 0;
    pub const O: usize = 1;
    pub const GATE_UP: usize = 2;
    pub const DOWN: usize = 3;
    pub const NORM1: usize = 4;
    pub const NORM2: usize = 5;
    /// First of the biases that the model has, in the order qkv, o, gate_up, down.
    pub const BIASES: usize = 6;
}

/// A Hugging Face tensor's place in the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its Hugging Face name.
    pub name: String,
    /// The group that holds it.
    pub group: GroupId,
    /// First element within the group.
    pub offset: u64,
    /// Rows and columns, or one dimension.
    pub shape: Vec<u64>,
}

impl Part {
    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }
}

/// The model's groups and the places of its named tensors.
#[derive(Clone, Debug)]
pub struct Groups {
    blocks: u64,
    parts: Vec<Part>,
    /// For each group, its first part; one more at the end.
    starts: Vec<usize>,
}

impl Groups {
    /// The embedding table's group.
    pub const EMBEDDING: GroupId = GroupId(0);

    /// Names and places of `shape`'s tensors.
    pub fn new(shape: &Shape) -> Self {
        let mut parts = Vec::new();
        let mut starts = Vec::new();
        let last = shape.blocks as u32 + 1;
        for group in (0..=last).map(GroupId) {
            starts.push(parts.len());
            let mut offset = 0;
            for (name, dimensions) in named(shape, group) {
                let part = Part { name, group, offset, shape: dimensions };
                offset += part.elements();
                parts.push(part);
            }
        }
        starts.push(parts.len());
        Groups { blocks: shape.blocks, parts, starts }
    }

    /// Block `index`'s group.
    pub const fn block(&self, index: u64) -> GroupId {
        GroupId(index as u32 + 1)
    }

    /// The final norm's and, unless tied, the output matrix's group.
    pub const fn head(&self) -> GroupId {
        GroupId(self.blocks as u32 + 1)
    }

    /// Number of groups.
    pub const fn count(&self) -> u64 {
        self.blocks + 2
    }

    /// All named tensors, in the order of the groups.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// The tensor of this name.
    ///
    /// # Panics
    /// If the model has none.
    #[track_caller]
    pub fn part(&self, name: &str) -> &Part {
        let part = self.parts.iter().find(|part| part.name == name);
        part.unwrap_or_else(|| panic!("the model has no tensor {name}"))
    }

    /// The named tensors of a group; together they cover it without a gap.
    pub fn parts_of(&self, group: GroupId) -> &[Part] {
        &self.parts[self.starts[group.index()]..self.starts[group.index() + 1]]
    }

    /// Fills `out` with elements `first .. first + out.len()` of a group.
    ///
    /// # Errors
    /// If the source lacks a tensor or cannot read it.
    ///
    /// # Panics
    /// If the group ends before.
    pub fn fill(&self, group: GroupId, first: u64, out: &mut [f32], source: &dyn TensorSource) -> Result<()> {
        let end = first + out.len() as u64;
        let mut filled = first;
        for part in self.parts_of(group) {
            let (from, to) = (part.offset.max(first), (part.offset + part.elements()).min(end));
            if from < to {
                let target = &mut out[(from - first) as usize..(to - first) as usize];
                source.read(&part.name, from - part.offset, target)?;
                filled = to;
            }
        }
        assert_eq!(filled, end, "{group:?} ends before element {end}");
        Ok(())
    }
}

/// The groups to lay out: embedding, blocks, head.
pub fn specs(shape: &Shape) -> Vec<GroupSpec> {
    let (c, f) = (shape.hidden, shape.ffn);
    let mut groups =
        vec![GroupSpec { name: "embedding".into(), tensors: vec![tensor("table", &[shape.vocabulary, c])] }];
    for index in 0..shape.blocks {
        let mut tensors = vec![
            tensor("qkv", &[shape.packed(), c]),
            tensor("o", &[c, shape.query()]),
            tensor("gate_up", &[2 * f, c]),
            tensor("down", &[c, f]),
            tensor("norm1", &[c]),
            tensor("norm2", &[c]),
        ];
        if shape.qkv_bias {
            tensors.push(tensor("qkv_bias", &[shape.packed()]));
        }
        if shape.o_bias {
            tensors.push(tensor("o_bias", &[c]));
        }
        if shape.mlp_bias {
            tensors.push(tensor("gate_up_bias", &[2 * f]));
            tensors.push(tensor("down_bias", &[c]));
        }
        groups.push(GroupSpec { name: format!("block {index}"), tensors });
    }
    let mut tensors = Vec::new();
    if !shape.tied {
        tensors.push(tensor("output", &[shape.vocabulary, c]));
    }
    tensors.push(tensor("norm", &[c]));
    groups.push(GroupSpec { name: "head".into(), tensors });
    groups
}

/// Matrices decay; norms and biases do not.
fn tensor(name: &str, shape: &[u64]) -> TensorSpec {
    TensorSpec { name: name.into(), shape: shape.to_vec(), decays: shape.len() > 1 }
}

/// Hugging Face names and shapes of a group's tensors, in the order of [`specs`].
fn named(shape: &Shape, group: GroupId) -> Vec<(String, Vec<u64>)> {
    let (c, f, q, kv) = (shape.hidden, shape.ffn, shape.query(), shape.key_value());
    if group == Groups::EMBEDDING {
        return vec![("model.embed_tokens.weight".into(), vec![shape.vocabulary, c])];
    }
    let index = u64::from(group.0) - 1;
    if index == shape.blocks {
        let mut list = Vec::new();
        if !shape.tied {
            list.push(("lm_head.weight".into(), vec![shape.vocabulary, c]));
        }
        list.push(("model.norm.weight".into(), vec![c]));
        return list;
    }
    let mut list = Vec::new();
    let mut add = |name: &str, shape: &[u64]| {
        list.push((format!("model.layers.{index}.{name}"), shape.to_vec()));
    };
    add("self_attn.q_proj.weight", &[q, c]);
    add("self_attn.k_proj.weight", &[kv, c]);
    add("self_attn.v_proj.weight", &[kv, c]);
    add("self_attn.o_proj.weight", &[c, q]);
    add("mlp.gate_proj.weight", &[f, c]);
    add("mlp.up_proj.weight", &[f, c]);
    add("mlp.down_proj.weight", &[c, f]);
    add("input_layernorm.weight", &[c]);
    add("post_attention_layernorm.weight", &[c]);
    if shape.qkv_bias {
        add("self_attn.q_proj.bias", &[q]);
        add("self_attn.k_proj.bias", &[kv]);
        add("self_attn.v_proj.bias", &[kv]);
    }
    if shape.o_bias {
        add("self_attn.o_proj.bias", &[c]);
    }
    if shape.mlp_bias {
        add("mlp.gate_proj.bias", &[f]);
        add("mlp.up_proj.bias", &[f]);
        add("mlp.down_proj.bias", &[c]);
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape([qkv_bias, o_bias, mlp_bias]: [bool; 3], tied: bool) -> Shape {
        Shape {
            vocabulary: 7,
            hidden: 4,
            ffn: 6,
            blocks: 2,
            heads: 2,
            kv_heads: 1,
            head_dim: 4,
            eps: 1e-5,
            qkv_bias,
            o_bias,
            mlp_bias,
            tied,
        }
    }

    #[test]
    fn named_tensors_cover_each_group_exactly() {
        let (none, all, qwen2) = ([false; 3], [true; 3], [true, false, false]);
        for (biases, tied) in [(none, false), (all, false), (none, true), (all, true), (qwen2, true)] {
            let shape = shape(biases, tied);
            let groups = Groups::new(&shape);
            let specs = specs(&shape);
            assert_eq!(specs.len() as u64, groups.count());
            for (index, spec) in specs.iter().enumerate() {
                let laid_out: u64 = spec.tensors.iter().map(|t| t.shape.iter().product::<u64>()).sum();
                let mut next = 0;
                for part in groups.parts_of(GroupId(index as u32)) {
                    assert_eq!(part.offset, next, "{}", part.name);
                    next += part.elements();
                }
                assert_eq!(next, laid_out, "{}", spec.name);
            }
        }
    }

    struct Numbered;

    impl TensorSource for Numbered {
        fn read(&self, name: &str, first: u64, out: &mut [f32]) -> Result<()> {
            for (index, value) in out.iter_mut().enumerate() {
                *value = name.len() as f32 * 1000.0 + (first + index as u64) as f32;
            }
            Ok(())
        }
    }

    #[test]
    fn a_group_filled_in_pieces_is_the_group_filled_at_once() {
        let shape = shape([true; 3], false);
        let groups = Groups::new(&shape);
        for group in (0..groups.count() as u32).map(GroupId) {
            let all: u64 = groups.parts_of(group).iter().map(Part::elements).sum();
            let mut once = vec![0.0; all as usize];
            groups.fill(group, 0, &mut once, &Numbered).unwrap();
            let mut pieces = vec![0.0; all as usize];
            for (index, piece) in pieces.chunks_mut(5).enumerate() {
                groups.fill(group, index as u64 * 5, piece, &Numbered).unwrap();
            }
            assert_eq!(once, pieces);
        }
    }
}
