//! What each operator costs: floating-point operations of matrix products and attention, bytes of the rest.

use super::Dry;
use crate::ops::{Attention, Classify, Into, Linear, Operators, State, Update, control};
use crate::{DType, View};

/// A view and how many of its elements an operator reads or writes.
type Access = (View, u64);

impl Dry {
    /// Counts a memory-bound operator: each access once per pass over the elements.
    #[track_caller]
    fn memory_bound(&self, accesses: &[Access]) {
        let mut bytes = 0;
        for &(view, elements) in accesses {
            self.check_view(view, elements);
            bytes += view.dtype.bytes(elements);
        }
        self.count(|c| {
            c.operators_count += 1;
            c.memory_bound_bytes += bytes;
        });
    }

    /// Checks the three matrices of a linear product and gives its operations.
    #[track_caller]
    fn product(&self, x: View, w: View, y: View, shape: Linear) -> u64 {
        self.check_view(x, shape.tokens * shape.inputs);
        self.check_view(w, shape.outputs * shape.inputs);
        self.check_view(y, shape.tokens * shape.outputs);
        2 * shape.tokens * shape.inputs * shape.outputs
    }

    /// Checks the views of attention and gives 2·B·H·S²·D.
    #[track_caller]
    fn scores(&self, qkv: View, starts: Option<View>, out: View, stats: View, scratch: View, shape: Attention) -> u64 {
        if let Some(starts) = starts {
            self.check_view(starts, shape.tokens());
        }
        self.check_view(qkv, shape.tokens() * shape.packed());
        self.check_view(out, shape.tokens() * shape.heads * shape.head_dim);
        self.check_view(stats, shape.tokens() * shape.heads);
        self.check_scratch(scratch, self.attention_scratch_bytes(shape, qkv.dtype, starts.is_some()));
        2 * shape.tokens() * shape.sequence * shape.heads * shape.head_dim
    }

    #[track_caller]
    fn check_scratch(&self, scratch: View, needed: u64) {
        self.check(scratch.span);
        assert!(scratch.span.bytes >= needed, "{scratch:?} is less than the {needed} bytes of scratch asked for");
    }
}

/// How often a target that is `into` passes through memory, as accesses.
fn target(view: View, elements: u64, into: Into) -> [Access; 2] {
    let read = if into == Into::Add { elements } else { 0 };
    [(view, elements), (view, read)]
}

impl Operators for Dry {
    fn zero(&self, target: View) {
        self.check(target.span);
        self.count(|c| {
            c.operators_count += 1;
            c.memory_bound_bytes += target.span.bytes;
        });
    }

    fn cast(&self, source: View, target: View) {
        self.memory_bound(&[(source, source.elements()), (target, source.elements())]);
    }

    fn embed(&self, ids: View, table: View, out: View, tokens: u64, hidden: u64, vocabulary: u64) {
        self.check_view(table, vocabulary * hidden);
        // Of the table, only the rows that are looked up.
        self.memory_bound(&[(ids, tokens), (out, tokens * hidden), (out, tokens * hidden)]);
    }

    fn embed_backward(
        &self,
        ids: View,
        order: View,
        starts: View,
        distinct: u64,
        d_out: View,
        d_table: View,
        tokens: u64,
        hidden: u64,
        vocabulary: u64,
        into: Into,
    ) {
        self.check_view(d_table, vocabulary * hidden);
        let rows = if into == Into::Replace { vocabulary } else { distinct };
        let [written, read] = target(d_table, rows * hidden, into);
        let sorted = [(ids, tokens), (order, tokens), (starts, distinct + 1), (d_out, tokens * hidden)];
        self.memory_bound(&[sorted[0], sorted[1], sorted[2], sorted[3], written, read]);
    }

    fn rmsnorm(&self, x: View, weight: View, out: View, rstd: View, tokens: u64, hidden: u64, _eps: f32) {
        let all = tokens * hidden;
        self.memory_bound(&[(x, all), (weight, hidden), (out, all), (rstd, tokens)]);
    }

    fn rmsnorm_backward(
        &self,
        d_out: View,
        x: View,
        weight: View,
        rstd: View,
        d_x: View,
        d_weight: View,
        scratch: View,
        tokens: u64,
        hidden: u64,
        into: Into,
    ) {
        self.check_scratch(scratch, self.rmsnorm_scratch_bytes(tokens, hidden));
        let all = tokens * hidden;
        let [written, read] = target(d_weight, hidden, into);
        let norm = [(d_out, all), (x, all), (weight, hidden), (rstd, tokens)];
        self.memory_bound(&[norm[0], norm[1], norm[2], norm[3], (d_x, all), (d_x, all), written, read]);
    }

    fn rmsnorm_scratch_bytes(&self, tokens: u64, columns: u64) -> u64 {
        (self.profile.rmsnorm_scratch_bytes)(tokens, columns)
    }

    fn linear(&self, x: View, w: View, bias: Option<View>, residual: Option<View>, y: View, shape: Linear) {
        let flops = self.product(x, w, y, shape);
        if let Some(bias) = bias {
            self.check_view(bias, shape.outputs);
        }
        if let Some(residual) = residual {
            self.check_view(residual, shape.tokens * shape.outputs);
        }
        self.count(|c| {
            c.operators_count += 1;
            c.flops.linear += flops;
        });
    }

    fn linear_backward_input(&self, d_y: View, w: View, d_x: View, shape: Linear, _into: Into) {
        let flops = self.product(d_x, w, d_y, shape);
        self.count(|c| {
            c.operators_count += 1;
            c.flops.linear_backward_input += flops;
        });
    }

    fn linear_backward_weight(&self, d_y: View, x: View, d_w: View, shape: Linear, _into: Into) {
        let flops = self.product(x, d_w, d_y, shape);
        self.count(|c| {
            c.operators_count += 1;
            c.flops.linear_backward_weight += flops;
        });
    }

    fn bias_backward(&self, d_y: View, d_bias: View, scratch: View, tokens: u64, outputs: u64, into: Into) {
        self.check_scratch(scratch, self.rmsnorm_scratch_bytes(tokens, outputs));
        let [written, read] = target(d_bias, outputs, into);
        self.memory_bound(&[(d_y, tokens * outputs), written, read]);
    }

    fn rope(&self, qkv: View, table: View, starts: Option<View>, shape: Attention, _inverse: bool) {
        if let Some(starts) = starts {
            self.check_view(starts, shape.tokens());
        }
        self.check_view(qkv, shape.tokens() * shape.packed());
        let rotated = shape.tokens() * (shape.heads + shape.kv_heads) * shape.head_dim;
        self.memory_bound(&[(qkv, rotated), (qkv, rotated), (table, shape.sequence * shape.head_dim)]);
    }

    fn attention(&self, qkv: View, starts: Option<View>, out: View, stats: View, scratch: View, shape: Attention) {
        let flops = self.scores(qkv, starts, out, stats, scratch, shape);
        self.count(|c| {
            c.operators_count += 1;
            c.flops.attention += flops;
        });
    }

    fn attention_backward(
        &self,
        qkv: View,
        starts: Option<View>,
        out: View,
        stats: View,
        d_out: View,
        d_qkv: View,
        scratch: View,
        shape: Attention,
    ) {
        let flops = self.scores(qkv, starts, out, stats, scratch, shape);
        self.check_view(d_out, shape.tokens() * shape.heads * shape.head_dim);
        self.check_view(d_qkv, shape.tokens() * shape.packed());
        self.count(|c| {
            c.operators_count += 1;
            c.flops.attention_backward += flops / 2 * 5;
        });
    }

    fn attention_scratch_bytes(&self, shape: Attention, dtype: DType, _masked: bool) -> u64 {
        (self.profile.attention_scratch_bytes)(shape, dtype)
    }

    fn swiglu(&self, gate_up: View, out: View, tokens: u64, ffn: u64) {
        self.memory_bound(&[(gate_up, tokens * 2 * ffn), (out, tokens * ffn)]);
    }

    fn swiglu_backward(&self, d_out: View, gate_up: View, out: Option<View>, tokens: u64, ffn: u64) {
        let (one, both) = (tokens * ffn, tokens * 2 * ffn);
        let again = out.map_or((d_out, 0), |out| (out, one));
        self.memory_bound(&[(d_out, one), (gate_up, both), (gate_up, both), again]);
    }

    fn classify(&self, logits: View, targets: View, losses: View, tokens: u64, vocabulary: u64, what: Classify) {
        let all = tokens * vocabulary;
        let written = if what == Classify::Loss { 0 } else { all };
        self.memory_bound(&[(logits, all), (logits, written), (targets, tokens), (losses, tokens)]);
    }

    fn sum(&self, values: View, total: View, into: Into) {
        let [written, read] = target(total, 1, into);
        self.memory_bound(&[(values, values.elements()), written, read]);
    }

    fn square_sum(&self, x: View, slot: View) {
        self.memory_bound(&[(x, x.elements()), (slot, 1)]);
    }

    fn norm_finish(&self, slots: View, _max_norm: f32, _loss_scale: f32, control: View) {
        self.memory_bound(&[(slots, slots.elements()), (control, control::COUNT)]);
    }

    fn update(&self, update: Update, state: State, control: View) {
        let elements = state.parameter.elements();
        let both = |view| [(view, elements), (view, elements)];
        let [p_read, p_written] = both(state.parameter);
        let [m_read, m_written] = both(state.first);
        // Without a master there is nothing more; Sophia's Hessian is only read.
        let [w_read, w_written] = state.master.map_or([(control, 0); 2], both);
        let second = if matches!(update, Update::AdamW(_)) { elements } else { 0 };
        self.memory_bound(&[
            p_read,
            p_written,
            w_read,
            w_written,
            m_read,
            m_written,
            (state.second, elements),
            (state.second, second),
            (state.gradient, elements),
            (control, control::COUNT),
        ]);
        let tiers = [state.gradient, state.first, state.second].map(|view| view.span.tier);
        let one_place = tiers.iter().all(|&tier| tier == state.parameter.span.tier);
        assert!(one_place, "the state of an update lies on one tier, not on {tiers:?} and {:?}", state.parameter);
    }

    fn hessian(
        &self,
        gradient: View,
        hessian: View,
        _beta2: f32,
        _tokens: f32,
        _inverse_loss_scale: f32,
        control: View,
    ) {
        let elements = gradient.elements();
        let touched = [(gradient, elements), (hessian, elements), (hessian, elements), (control, control::COUNT)];
        self.memory_bound(&touched);
    }
}
