//! A block: forward, recompute and backward as straight lists of operator calls.
//!
//! `n1 = rms(h)·w1; qkv = rope(n1·Wqkvᵀ); a = attention(qkv); h2 = a·Woᵀ + h; n2 = rms(h2)·w2;`
//! `gu = n2·Wguᵀ; act = silu(gate)·up; out = act·Wdᵀ + h2`. Where an intermediate lives, and whether it is kept
//! until the backward or computed again, is said by [`Memory`]; the arithmetic is the same, bit for bit.

use super::{AttentionKind, Shape, groups::block_tensor as index};
use crate::activations::Keep;
use castor_kernels::{Backend, View, ops::Into};
use castor_runtime::layout::Group;

/// A block's weights, or their gradients.
#[derive(Clone, Copy, Debug)]
pub struct Tensors {
    qkv: View,
    o: View,
    gate_up: View,
    down: View,
    norm1: View,
    norm2: View,
    qkv_bias: Option<View>,
    o_bias: Option<View>,
    gate_up_bias: Option<View>,
    down_bias: Option<View>,
}

impl Tensors {
    /// The tensors in the whole parameters or gradient of a block's `group`.
    pub fn of(whole: View, group: &Group, shape: &Shape) -> Self {
        let tensor = |at: usize| group.tensors[at].within(whole);
        let mut next = index::BIASES;
        let mut bias = |has: bool| {
            has.then(|| {
                next += 1;
                tensor(next - 1)
            })
        };
        Tensors {
            qkv: tensor(index::QKV),
            o: tensor(index::O),
            gate_up: tensor(index::GATE_UP),
            down: tensor(index::DOWN),
            norm1: tensor(index::NORM1),
            norm2: tensor(index::NORM2),
            qkv_bias: bias(shape.qkv_bias),
            o_bias: bias(shape.o_bias),
            gate_up_bias: bias(shape.mlp_bias),
            down_bias: bias(shape.mlp_bias),
        }
    }
}

/// Where one micro-batch's intermediates of one block are: kept ones in their own place, others in scratch
/// that the next block uses again. T = B·S rows.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// What is kept of this block.
    pub keep: Keep,
    /// B
    pub batch: u64,
    /// h `[T,C]`
    pub input: View,
    /// n1 `[T,C]`
    pub n1: View,
    /// f32 `[T]` of the first norm.
    pub rstd1: View,
    /// `[T,(H+2K)D]` after rotation.
    pub qkv: View,
    /// a `[T,HD]`
    pub attention: View,
    /// f32 `[B,H,S]`
    pub stats: View,
    /// h2 `[T,C]`
    pub h2: View,
    /// n2 `[T,C]`
    pub n2: View,
    /// f32 `[T]` of the second norm.
    pub rstd2: View,
    /// gu `[T,2F]`
    pub gate_up: View,
    /// act `[T,F]`
    pub act: View,
    /// Scratch of the backward for the widest gradient, `[T, max(F, (H+2K)D)]` elements.
    pub wide: View,
    /// Scratch of the backward, `[T, max(C, HD)]` elements.
    pub narrow: View,
    /// Scratch of attention, norms and biases.
    pub scratch: View,
}

/// What is the same for all blocks of a pass.
#[derive(Clone, Copy)]
pub struct Block<'a> {
    /// The operators.
    pub ops: &'a dyn Backend,
    /// The model.
    pub shape: &'a Shape,
    /// Sequence and kind of attention.
    pub attention: AttentionKind,
    /// f32 `[S,D]` of cosines and sines.
    pub rope: View,
    /// The micro-batch's document mask, i32 `[B,S]`; see [`castor_kernels::Operators::attention`].
    pub starts: Option<View>,
}

impl Block<'_> {
    /// Computes the block's output `[T,C]` into `out`, which may be `m.input` where nothing is kept.
    pub fn forward(&self, w: &Tensors, m: &Memory, out: View) {
        let tokens = m.batch * self.attention.sequence;
        self.attention_forward(w, m);
        self.gate_up_forward(w, m);
        self.ops.swiglu(m.gate_up, m.act, tokens, self.shape.ffn);
        let shape = self.shape.down(tokens);
        self.ops.linear(m.act, w.down, w.down_bias, Some(m.h2), out, shape);
    }

    /// Computes the block's gradients. `d_h` `[T,C]` holds the output's gradient and becomes the input's;
    /// `d` receives the weights'. Everything that [`Memory::keep`] names is read, the rest computed again.
    pub fn backward(&self, w: &Tensors, m: &Memory, d_h: View, d: &Tensors, into: Into) {
        match m.keep {
            Keep::All => {}
            Keep::Selective => self.norm2_forward(w, m),
            Keep::Ffn => self.gate_up_forward(w, m),
            Keep::Block => {
                self.attention_forward(w, m);
                self.gate_up_forward(w, m);
            }
        }
        self.ffn_backward(w, m, d_h, d, into);
        self.attention_backward(w, m, d_h, d, into);
    }

    /// h → h2, with n1, qkv, attention and stats on the way.
    fn attention_forward(&self, w: &Tensors, m: &Memory) {
        let (ops, shape) = (self.ops, self.shape);
        let tokens = m.batch * self.attention.sequence;
        let attention = shape.attention(m.batch, self.attention);
        self.norm1_forward(w, m);
        ops.linear(m.n1, w.qkv, w.qkv_bias, None, m.qkv, shape.qkv(tokens));
        ops.rope(m.qkv, self.rope, self.starts, attention, false);
        ops.attention(m.qkv, self.starts, m.attention, m.stats, m.scratch, attention);
        ops.linear(m.attention, w.o, w.o_bias, Some(m.input), m.h2, shape.o(tokens));
    }

    /// h2 → gu, with n2 on the way.
    fn gate_up_forward(&self, w: &Tensors, m: &Memory) {
        let shape = self.shape.gate_up(m.batch * self.attention.sequence);
        self.norm2_forward(w, m);
        self.ops.linear(m.n2, w.gate_up, w.gate_up_bias, None, m.gate_up, shape);
    }

    fn norm1_forward(&self, w: &Tensors, m: &Memory) {
        let tokens = m.batch * self.attention.sequence;
        let (hidden, eps) = (self.shape.hidden, self.shape.eps);
        self.ops.rmsnorm(m.input, w.norm1, m.n1, m.rstd1, tokens, hidden, eps);
    }

    fn norm2_forward(&self, w: &Tensors, m: &Memory) {
        let tokens = m.batch * self.attention.sequence;
        let (hidden, eps) = (self.shape.hidden, self.shape.eps);
        self.ops.rmsnorm(m.h2, w.norm2, m.n2, m.rstd2, tokens, hidden, eps);
    }

    /// d(out) → d(h2), both in `d_h`. gu becomes its gradient.
    fn ffn_backward(&self, w: &Tensors, m: &Memory, d_h: View, d: &Tensors, into: Into) {
        let (ops, shape) = (self.ops, self.shape);
        let tokens = m.batch * self.attention.sequence;
        let d_act = m.wide.part(0, tokens * shape.ffn);
        ops.linear_backward_input(d_h, w.down, d_act, shape.down(tokens), Into::Replace);
        let act = if m.keep == Keep::All {
            ops.swiglu_backward(d_act, m.gate_up, None, tokens, shape.ffn);
            m.act
        } else {
            ops.swiglu_backward(d_act, m.gate_up, Some(d_act), tokens, shape.ffn);
            d_act
        };
        ops.linear_backward_weight(d_h, act, d.down, shape.down(tokens), into);
        self.bias_backward(d_h, d.down_bias, m.scratch, tokens, shape.hidden, into);
        ops.linear_backward_weight(m.gate_up, m.n2, d.gate_up, shape.gate_up(tokens), into);
        let columns = 2 * shape.ffn;
        self.bias_backward(m.gate_up, d.gate_up_bias, m.scratch, tokens, columns, into);
        let d_n2 = m.narrow.part(0, tokens * shape.hidden);
        ops.linear_backward_input(m.gate_up, w.gate_up, d_n2, shape.gate_up(tokens), Into::Replace);
        ops.rmsnorm_backward(d_n2, m.h2, w.norm2, m.rstd2, d_h, d.norm2, m.scratch, tokens, shape.hidden, into);
    }

    /// d(h2) → d(h), both in `d_h`.
    fn attention_backward(&self, w: &Tensors, m: &Memory, d_h: View, d: &Tensors, into: Into) {
        let (ops, shape) = (self.ops, self.shape);
        let tokens = m.batch * self.attention.sequence;
        let attention = shape.attention(m.batch, self.attention);
        ops.linear_backward_weight(d_h, m.attention, d.o, shape.o(tokens), into);
        self.bias_backward(d_h, d.o_bias, m.scratch, tokens, shape.hidden, into);
        let d_attention = m.narrow.part(0, tokens * shape.query());
        ops.linear_backward_input(d_h, w.o, d_attention, shape.o(tokens), Into::Replace);
        let d_qkv = m.wide.part(0, tokens * shape.packed());
        ops.attention_backward(m.qkv, self.starts, m.attention, m.stats, d_attention, d_qkv, m.scratch, attention);
        ops.rope(d_qkv, self.rope, self.starts, attention, true);
        if m.keep != Keep::All {
            self.norm1_forward(w, m);
        }
        ops.linear_backward_weight(d_qkv, m.n1, d.qkv, shape.qkv(tokens), into);
        self.bias_backward(d_qkv, d.qkv_bias, m.scratch, tokens, shape.packed(), into);
        let d_n1 = m.narrow.part(0, tokens * shape.hidden);
        ops.linear_backward_input(d_qkv, w.qkv, d_n1, shape.qkv(tokens), Into::Replace);
        ops.rmsnorm_backward(d_n1, m.input, w.norm1, m.rstd1, d_h, d.norm1, m.scratch, tokens, shape.hidden, into);
    }

    fn bias_backward(&self, d_y: View, d_bias: Option<View>, scratch: View, tokens: u64, columns: u64, into: Into) {
        if let Some(d_bias) = d_bias {
            self.ops.bias_backward(d_y, d_bias, scratch, tokens, columns, into);
        }
    }
}
