//! [`Operators`] of the CPU backend: finds the slices behind the views and the function for their types.
//!
//! Arithmetic is in [`super::ops`]. A view of the wrong type or too few elements is a bug of the caller and
//! panics; a type that no operator has, or a token outside of the vocabulary, is kept for the next join.
//! Everything that takes time runs in the backend's own pool of threads.

use super::Cpu;
use super::engine::Command;
use super::ops::linear::{self, Residual};
use super::ops::{Typed, attention, attention_plain, classify, convert, embed, norm, reduce, rope, swiglu, update};
use super::state::{self, Memory, StateUpdate};
use crate::ops::{Attention, Classify, Into, Linear, Operators, State, Update, control};
use crate::{DType, Error, Result, Stream, Tier, View};
use half::{bf16, f16};

/// Runs `$body` in the backend's threads, with `$T` as the type of the view's elements.
macro_rules! typed {
    ($cpu:expr, $what:literal, $view:expr, $T:ident => $body:expr) => {
        match $view.dtype {
            DType::F32 => {
                type $T = f32;
                $cpu.pool().install(|| $body)
            }
            DType::F16 => {
                type $T = f16;
                $cpu.pool().install(|| $body)
            }
            DType::Bf16 => {
                type $T = bf16;
                $cpu.pool().install(|| $body)
            }
            _ => $cpu.unsupported($what, $view.dtype),
        }
    };
}

/// Runs `$body` with `$G` as the type of a gradient that is f32 or of the compute type `$T`.
macro_rules! gradient_typed {
    ($view:expr, $T:ty, $G:ident => $body:expr) => {
        if $view.dtype == DType::F32 {
            type $G = f32;
            $body
        } else {
            type $G = $T;
            $body
        }
    };
}

impl Cpu {
    /// The first `count` elements of a view that must be of type `T`.
    fn read<T: Typed>(&self, view: View, count: usize) -> &[T] {
        assert_eq!(view.dtype, T::DTYPE, "type of the view {:?}", view.span);
        &self.slice::<T>(view)[..count]
    }

    /// As [`Cpu::read`], to be written. The views of one call do not overlap unless the operator says so.
    #[allow(clippy::mut_from_ref)]
    fn write<T: Typed>(&self, view: View, count: usize) -> &mut [T] {
        assert_eq!(view.dtype, T::DTYPE, "type of the view {:?}", view.span);
        &mut self.slice_mut::<T>(view)[..count]
    }

    /// `count` floats of a scratch view of any type.
    #[allow(clippy::mut_from_ref)]
    fn floats(&self, scratch: View, count: usize) -> &mut [f32] {
        self.write(scratch.span.part(0, 4 * count as u64).view(DType::F32), count)
    }

    fn unsupported(&self, what: &str, dtype: DType) {
        self.fail(Error::Unsupported {
            what: format!("{what} of type {dtype:?}"),
            backend: "cpu",
            instead: "use f32, f16 or bf16".into(),
        });
    }

    fn check_ids(&self, call: &str, ids: &[i32], vocabulary: usize) {
        let outside = |&id: &i32| usize::try_from(id).map_or(true, |id| id >= vocabulary);
        if let Some(row) = ids.iter().position(outside) {
            self.fail(out_of_vocabulary(call, ids[row], row, vocabulary));
        }
    }

    /// A view by address.
    fn memory(&self, view: View) -> Memory {
        Memory::of(view, |span| self.shared.address(span))
    }

    /// Runs `work` in the backend's threads and keeps its failure.
    fn try_in_pool(&self, work: impl FnOnce() -> Result<()> + Send) {
        if let Err(error) = self.pool().install(work) {
            self.fail(error);
        }
    }
}

fn out_of_vocabulary(call: &str, id: i32, row: usize, vocabulary: usize) -> Error {
    Error::Device {
        call: call.into(),
        reason: format!("token {id} at position {row} is not within 0..{vocabulary}; check the tokenizer"),
    }
}

fn sizes(shape: Attention) -> attention::Shape {
    attention::Shape {
        sequence: shape.sequence as usize,
        heads: shape.heads as usize,
        kv_heads: shape.kv_heads as usize,
        head_dim: shape.head_dim as usize,
    }
}

fn layer(shape: Linear) -> linear::Shape {
    linear::Shape { tokens: shape.tokens as usize, inputs: shape.inputs as usize, outputs: shape.outputs as usize }
}

impl Operators for Cpu {
    fn zero(&self, target: View) {
        self.pool().install(|| convert::zero(self.slice_mut(target)));
    }

    fn cast(&self, source: View, target: View) {
        let (from, to) = (source.elements() as usize, target.elements() as usize);
        typed!(self, "cast", source, S => typed!(self, "cast", target, T => {
            convert::cast(self.read::<S>(source, from), self.write::<T>(target, to));
        }));
    }

    fn embed(&self, ids: View, table: View, out: View, tokens: u64, hidden: u64, vocabulary: u64) {
        let [tokens, hidden, vocabulary] = [tokens, hidden, vocabulary].map(|n| n as usize);
        let ids = self.read(ids, tokens);
        self.check_ids("embed", ids, vocabulary);
        typed!(self, "embed", table, T => {
            let table = self.read::<T>(table, vocabulary * hidden);
            embed::forward(ids, table, self.write(out, tokens * hidden), hidden);
        });
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
        let [tokens, hidden, vocabulary] = [tokens, hidden, vocabulary].map(|n| n as usize);
        let (ids, order) = (self.read(ids, tokens), self.read(order, tokens));
        let starts = self.read(starts, distinct as usize + 1);
        typed!(self, "embed_backward", d_out, T => gradient_typed!(d_table, T, G => {
            let d_out = self.read::<T>(d_out, tokens * hidden);
            let d_table = self.write::<G>(d_table, vocabulary * hidden);
            embed::backward(ids, order, starts, d_out, d_table, hidden, into);
        }));
    }

    fn rmsnorm(&self, x: View, weight: View, out: View, rstd: View, tokens: u64, hidden: u64, eps: f32) {
        let (tokens, hidden) = (tokens as usize, hidden as usize);
        let rstd = self.write(rstd, tokens);
        typed!(self, "rmsnorm", x, T => {
            let (x, weight) = (self.read::<T>(x, tokens * hidden), self.read(weight, hidden));
            norm::rmsnorm(x, weight, self.write(out, tokens * hidden), rstd, eps);
        });
    }

    fn rmsnorm_backward(
        &self,
        d_out: View,
        x: View,
        weight: View,
        rstd: View,
        d_x: View,
        d_weight: View,
        _scratch: View,
        tokens: u64,
        hidden: u64,
        into: Into,
    ) {
        let (tokens, hidden) = (tokens as usize, hidden as usize);
        let rstd = self.read(rstd, tokens);
        typed!(self, "rmsnorm_backward", x, T => {
            let (d_out, x) = (self.read::<T>(d_out, tokens * hidden), self.read(x, tokens * hidden));
            gradient_typed!(d_weight, T, G => {
                norm::rmsnorm_backward_weight(d_out, x, rstd, self.write::<G>(d_weight, hidden), into);
            });
            let (weight, d_x) = (self.read(weight, hidden), self.write(d_x, tokens * hidden));
            norm::rmsnorm_backward_input(d_out, x, weight, rstd, d_x);
        });
    }

    /// None: a task owns whole columns.
    fn rmsnorm_scratch_bytes(&self, _tokens: u64, _columns: u64) -> u64 {
        0
    }

    fn linear(&self, x: View, w: View, bias: Option<View>, residual: Option<View>, y: View, shape: Linear) {
        let shape = layer(shape);
        let count = shape.tokens * shape.outputs;
        typed!(self, "linear", y, T => {
            let residual = match residual {
                None => Residual::None,
                Some(view) if view == y => Residual::Target,
                Some(view) => {
                    assert!(!view.span.overlaps(y.span), "a residual is y or apart from it");
                    Residual::Other(self.read(view, count))
                }
            };
            let bias = bias.map(|bias| self.read(bias, shape.outputs));
            let x = self.read::<T>(x, shape.tokens * shape.inputs);
            let w = self.read(w, shape.outputs * shape.inputs);
            linear::forward(x, w, bias, residual, self.write(y, count), shape);
        });
    }

    fn linear_backward_input(&self, d_y: View, w: View, d_x: View, shape: Linear, into: Into) {
        let shape = layer(shape);
        typed!(self, "linear_backward_input", d_y, T => {
            let d_y = self.read::<T>(d_y, shape.tokens * shape.outputs);
            let w = self.read(w, shape.outputs * shape.inputs);
            linear::backward_input(d_y, w, self.write(d_x, shape.tokens * shape.inputs), shape, into);
        });
    }

    fn linear_backward_weight(&self, d_y: View, x: View, d_w: View, shape: Linear, into: Into) {
        let shape = layer(shape);
        typed!(self, "linear_backward_weight", d_y, T => gradient_typed!(d_w, T, G => {
            let d_y = self.read::<T>(d_y, shape.tokens * shape.outputs);
            let x = self.read(x, shape.tokens * shape.inputs);
            let d_w = self.write::<G>(d_w, shape.outputs * shape.inputs);
            linear::backward_weight(d_y, x, d_w, shape, into);
        }));
    }

    fn bias_backward(&self, d_y: View, d_bias: View, _scratch: View, tokens: u64, outputs: u64, into: Into) {
        let (tokens, outputs) = (tokens as usize, outputs as usize);
        typed!(self, "bias_backward", d_y, T => gradient_typed!(d_bias, T, G => {
            let d_y = self.read::<T>(d_y, tokens * outputs);
            reduce::bias_backward(d_y, tokens, self.write::<G>(d_bias, outputs), into);
        }));
    }

    fn rope(&self, qkv: View, table: View, starts: Option<View>, shape: Attention, inverse: bool) {
        let count = (shape.tokens() * shape.packed()) as usize;
        let starts = starts.map(|starts| self.read(starts, shape.tokens() as usize));
        let table = self.read(table, (shape.sequence * shape.head_dim) as usize);
        typed!(self, "rope", qkv, T => {
            rope::rope(self.write::<T>(qkv, count), table, starts, sizes(shape), inverse);
        });
    }

    fn attention(&self, qkv: View, starts: Option<View>, out: View, stats: View, scratch: View, shape: Attention) {
        let (tokens, size) = (shape.tokens() as usize, sizes(shape));
        let starts = attention::Starts(starts.map(|starts| self.read(starts, tokens)));
        let stats = self.write(stats, tokens * size.heads);
        typed!(self, "attention", qkv, T => {
            let qkv = self.read::<T>(qkv, tokens * size.packed());
            let out = self.write(out, tokens * size.width());
            if shape.fused {
                attention::forward(qkv, starts, out, stats, self.floats(scratch, tokens * size.heads), size);
            } else {
                let scratch = self.floats(scratch, attention_plain::forward_scratch(&size));
                attention_plain::forward(qkv, starts, out, stats, scratch, size);
            }
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
        let (tokens, size) = (shape.tokens() as usize, sizes(shape));
        let starts = attention::Starts(starts.map(|starts| self.read(starts, tokens)));
        typed!(self, "attention_backward", qkv, T => {
            let qkv = self.read::<T>(qkv, tokens * size.packed());
            let d_out = self.read(d_out, tokens * size.width());
            let d_qkv = self.write(d_qkv, tokens * size.packed());
            if shape.fused {
                let (out, stats) = (self.read(out, tokens * size.width()), self.read(stats, tokens * size.heads));
                attention::backward(qkv, starts, out, stats, d_out, d_qkv, size);
            } else {
                let scratch = self.floats(scratch, attention_plain::backward_scratch(&size));
                attention_plain::backward(qkv, starts, d_out, d_qkv, scratch, size);
            }
        });
    }

    /// Fused: `[T, H]` of f32. Plain: two S×S and two S×D of f32.
    fn attention_scratch_bytes(&self, shape: Attention, _dtype: DType, _masked: bool) -> u64 {
        if shape.fused {
            4 * shape.tokens() * shape.heads
        } else {
            4 * attention_plain::backward_scratch(&sizes(shape)) as u64
        }
    }

    fn swiglu(&self, gate_up: View, out: View, tokens: u64, ffn: u64) {
        let (tokens, ffn) = (tokens as usize, ffn as usize);
        typed!(self, "swiglu", gate_up, T => {
            let gate_up = self.read::<T>(gate_up, tokens * 2 * ffn);
            swiglu::forward(gate_up, self.write(out, tokens * ffn), ffn);
        });
    }

    fn swiglu_backward(&self, d_out: View, gate_up: View, out: Option<View>, tokens: u64, ffn: u64) {
        let (tokens, ffn) = (tokens as usize, ffn as usize);
        typed!(self, "swiglu_backward", gate_up, T => {
            let target = match out {
                None => swiglu::Target::Nowhere(self.read::<T>(d_out, tokens * ffn)),
                Some(out) if out == d_out => swiglu::Target::InPlace(self.write(out, tokens * ffn)),
                Some(out) => {
                    assert!(!out.span.overlaps(d_out.span), "the result replaces d_out or is apart from it");
                    swiglu::Target::Apart(self.read(d_out, tokens * ffn), self.write(out, tokens * ffn))
                }
            };
            swiglu::backward(target, self.write(gate_up, tokens * 2 * ffn), ffn);
        });
    }

    fn classify(&self, logits: View, targets: View, losses: View, tokens: u64, vocabulary: u64, what: Classify) {
        let (tokens, vocabulary) = (tokens as usize, vocabulary as usize);
        let targets = self.write::<i32>(targets, tokens);
        if let Some(row) = classify::first_invalid(targets, vocabulary) {
            self.fail(out_of_vocabulary("classify", targets[row], row, vocabulary));
        }
        typed!(self, "classify", logits, T => {
            let logits = self.write::<T>(logits, tokens * vocabulary);
            classify::classify(logits, targets, self.write(losses, tokens), vocabulary, what);
        });
    }

    fn sum(&self, values: View, total: View, into: Into) {
        let sum = self.pool().install(|| reduce::sum(self.read(values, values.elements() as usize)));
        super::ops::store(&[sum], self.write::<f32>(total, 1), into);
    }

    fn square_sum(&self, x: View, slot: View) {
        typed!(self, "square_sum", x, T => {
            self.write::<f64>(slot, 1)[0] = reduce::square_sum(self.read::<T>(x, x.elements() as usize));
        });
    }

    fn norm_finish(&self, slots: View, max_norm: f32, loss_scale: f32, control: View) {
        let slots = self.read(slots, slots.elements() as usize);
        let scalars = reduce::norm_finish(slots, max_norm, loss_scale);
        self.write::<f32>(control, scalars.len()).copy_from_slice(&scalars);
    }

    fn update(&self, update: Update, state: State, control: View) {
        let Some(multiplier) = state::multiplier(self.read(control, control::COUNT as usize)) else { return };
        let work = StateUpdate::new(update, state, |span| self.shared.address(span));
        match state.parameter.span.tier {
            Tier::Host => self.issue(Stream::Host, Command::Update(work, multiplier)),
            // SAFETY: the arenas live as long as `self`, and marks keep engines from the state meanwhile.
            _ => self.try_in_pool(|| unsafe { work.carry_out(multiplier) }),
        }
    }

    fn hessian(&self, gradient: View, hessian: View, beta2: f32, tokens: f32, inverse_loss_scale: f32, control: View) {
        if state::multiplier(self.read(control, control::COUNT as usize)).is_none() {
            return;
        }
        let count = gradient.elements() as usize;
        let (gradient, hessian) = (self.memory(gradient), self.memory(hessian));
        self.try_in_pool(|| {
            // SAFETY: as in `update`; the two views are different data.
            let (gradient, hessian) = unsafe { (gradient.gradient(count)?, hessian.moment(count)?) };
            update::hessian(gradient, hessian, beta2, tokens, inverse_loss_scale);
            Ok(())
        });
    }
}
