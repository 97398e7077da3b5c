//! placeholder: the launchers come from branch `cu`.
use super::Ptr;
use crate::ops::{Attention, Classify, Into, Update};
use crate::{DType, Result};
use cudarc::driver::CudaContext;
use cudarc::driver::sys::CUstream;
use std::sync::Arc;

pub(crate) struct Launcher {}
macro_rules! stub { ($($name:ident($($a:ident: $t:ty),*);)*) => { $(pub(crate) fn $name(&self, _s: CUstream, $($a: $t),*) -> Result<()> { $(let _ = $a;)* Err(crate::Error::Unsupported { what: stringify!($name).into(), backend: "cuda", instead: "merge branch cu".into() }) })* } }
impl Launcher {
    pub(crate) fn new(_ctx: &Arc<CudaContext>) -> Result<Launcher> {
        Ok(Launcher {})
    }
    pub(crate) fn rmsnorm_scratch_bytes(&self, _tokens: u64, _columns: u64) -> u64 {
        0
    }
    pub(crate) fn attention_scratch_bytes(&self, _shape: Attention, _dtype: DType) -> u64 {
        0
    }
    stub! {
        zero(target: Ptr);
        cast(source: Ptr, target: Ptr);
        embed(ids: Ptr, table: Ptr, out: Ptr, tokens: u64, hidden: u64, vocabulary: u64);
        embed_backward(ids: Ptr, order: Ptr, starts: Ptr, distinct: u64, d_out: Ptr, d_table: Ptr, tokens: u64, hidden: u64, vocabulary: u64, into: Into);
        rmsnorm(x: Ptr, w: Ptr, out: Ptr, rstd: Ptr, tokens: u64, hidden: u64, eps: f32);
        rmsnorm_backward(d_out: Ptr, x: Ptr, w: Ptr, rstd: Ptr, d_x: Ptr, d_w: Ptr, scratch: Ptr, tokens: u64, hidden: u64, into: Into);
        bias_add(y: Ptr, bias: Ptr, tokens: u64, outputs: u64);
        bias_backward(d_y: Ptr, d_bias: Ptr, scratch: Ptr, tokens: u64, outputs: u64, into: Into);
        rope(qkv: Ptr, table: Ptr, shape: Attention, inverse: bool);
        attention(qkv: Ptr, out: Ptr, stats: Ptr, scratch: Ptr, shape: Attention);
        attention_backward(qkv: Ptr, out: Ptr, stats: Ptr, d_out: Ptr, d_qkv: Ptr, scratch: Ptr, shape: Attention);
        swiglu(gate_up: Ptr, out: Ptr, tokens: u64, ffn: u64);
        swiglu_backward(d_out: Ptr, gate_up: Ptr, out: Option<Ptr>, tokens: u64, ffn: u64);
        classify(logits: Ptr, targets: Ptr, losses: Ptr, tokens: u64, vocabulary: u64, what: Classify);
        sum(values: Ptr, total: Ptr, into: Into);
        square_sum(x: Ptr, slot: Ptr);
        norm_finish(slots: Ptr, max_norm: f32, loss_scale: f32, control: Ptr);
        update(update: Update, parameter: Ptr, gradient: Ptr, master: Option<Ptr>, first: Ptr, second: Ptr, decayed: u64, seed: u64, first_element: u64, control: Ptr);
        hessian(gradient: Ptr, hessian: Ptr, beta2: f32, tokens: f32, inverse_loss_scale: f32, control: Ptr);
    }
}
