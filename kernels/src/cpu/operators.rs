//! Stub: the operators' helper replaces this file at the merge.

use super::Cpu;
use crate::ops::{Attention, Classify, Into, Linear, Operators, State, Update};
use crate::{DType, Error, View};

impl Operators for Cpu {
    fn zero(&self, _target: View) {}
    fn cast(&self, _source: View, _target: View) {}
    fn embed(&self, _ids: View, _table: View, _out: View, _tokens: u64, _hidden: u64, _vocabulary: u64) {}
    fn embed_backward(
        &self,
        _ids: View,
        _order: View,
        _starts: View,
        _distinct: u64,
        _d_out: View,
        _d_table: View,
        _tokens: u64,
        _hidden: u64,
        _vocabulary: u64,
        _into: Into,
    ) {}
    fn rmsnorm(&self, _x: View, _weight: View, _out: View, _rstd: View, _tokens: u64, _hidden: u64, _eps: f32) {}
    fn rmsnorm_backward(
        &self,
        _d_out: View,
        _x: View,
        _weight: View,
        _rstd: View,
        _d_x: View,
        _d_weight: View,
        _scratch: View,
        _tokens: u64,
        _hidden: u64,
        _into: Into,
    ) {}
    fn rmsnorm_scratch_bytes(&self, _tokens: u64, _columns: u64) -> u64 {0}
    fn linear(&self, _x: View, _w: View, _bias: Option<View>, _residual: Option<View>, _y: View, _shape: Linear) {}
    fn linear_backward_input(&self, _d_y: View, _w: View, _d_x: View, _shape: Linear, _into: Into) {}
    fn linear_backward_weight(&self, _d_y: View, _x: View, _d_w: View, _shape: Linear, _into: Into) {}
    fn bias_backward(&self, _d_y: View, _d_bias: View, _scratch: View, _tokens: u64, _outputs: u64, _into: Into) {}
    fn rope(&self, _qkv: View, _table: View, _shape: Attention, _inverse: bool) {}
    fn attention(&self, _qkv: View, _out: View, _stats: View, _scratch: View, _shape: Attention) {}
    fn attention_backward(
        &self,
        _qkv: View,
        _out: View,
        _stats: View,
        _d_out: View,
        _d_qkv: View,
        _scratch: View,
        _shape: Attention,
    ) {}
    fn attention_scratch_bytes(&self, _shape: Attention, _dtype: DType) -> u64 {0}
    fn swiglu(&self, _gate_up: View, _out: View, _tokens: u64, _ffn: u64) {}
    fn swiglu_backward(&self, _d_out: View, _gate_up: View, _out: Option<View>, _tokens: u64, _ffn: u64) {}
    fn classify(&self, _logits: View, _targets: View, _losses: View, _tokens: u64, _vocabulary: u64, _what: Classify) {}
    fn sum(&self, _values: View, _total: View, _into: Into) {}
    fn square_sum(&self, _x: View, _slot: View) {}
    fn norm_finish(&self, _slots: View, _max_norm: f32, _loss_scale: f32, _control: View) {}
    fn update(&self, _update: Update, _state: State, _control: View) {}
    fn hessian(&self, _gradient: View, _hessian: View, _beta2: f32, _tokens: f32, _inverse_loss_scale: f32, _control: View) {}
}

const _: fn(&Cpu, View) = |cpu, view| {
    let (_, _, _) = (cpu.slice::<f32>(view), cpu.slice_mut::<f32>(view), cpu.pool());
    cpu.fail(Error::Unsupported { what: String::new(), backend: "cpu", instead: String::new() });
};
