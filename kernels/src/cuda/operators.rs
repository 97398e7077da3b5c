//! Sends each operator to cuBLASLt, cuDNN, Castor's own kernels, or (updates of host states) the host engine.

use super::cudnn_graph::Pass;
use super::driver::{SharedPage, check};
use super::engine::{HostBytes, Job};
use super::marks::Engine;
use super::{Cuda, Ptr};
use crate::cpu::state::StateUpdate;
use crate::ops::{Attention, Classify, Into, Linear, Operators, State, Update, control};
use crate::{DType, Result, Stream, Tier, View};
use cudarc::driver::sys;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Bytes of the control scalars.
const CONTROL_BYTES: usize = control::COUNT as usize * 4;

/// Copies of the control scalars that can be on their way to the host at once.
const CONTROLS: usize = SharedPage::BYTES / CONTROL_BYTES;

/// Where updates on the host find their control scalars: slots in turn.
pub(super) struct HostControls {
    page: SharedPage,
    /// Updates so far.
    count: AtomicUsize,
    /// For each slot, the host engine's number behind its last user.
    users: [AtomicU64; CONTROLS],
}

impl HostControls {
    pub(super) fn new(page: SharedPage) -> Self {
        HostControls { page, count: AtomicUsize::new(0), users: [const { AtomicU64::new(0) }; CONTROLS] }
    }
}

impl Cuda {
    /// Hands an update to the host engine, and brings the control scalars to where it finds them.
    fn update_on_host(&self, update: Update, state: State, control: View) -> Result<()> {
        self.marks.bind()?;
        let slot = self.controls.count.fetch_add(1, Ordering::Relaxed) % CONTROLS;
        self.marks.join_engine(Engine::Host, self.controls.users[slot].load(Ordering::Relaxed));
        let address = self.controls.page.host(slot * CONTROL_BYTES);
        let source = self.ptr(control.part(0, control::COUNT)).address;
        // SAFETY: the view was checked; the slot is inside the registered page and has no other user.
        check("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(address.cast(), source, CONTROL_BYTES, self.marks.stream(Stream::Compute))
        })?;
        let there = self.marks.record(Stream::Compute)?;
        let worker = self.worker(Engine::Host);
        worker.send(Job::Wait(there));
        let work = StateUpdate::new(update, state, |span| self.host_bytes(span).address);
        worker.send(Job::Update(work, HostBytes { address, bytes: CONTROL_BYTES as u64 }));
        let number = self.marks.issue(Engine::Host);
        worker.send(Job::Report(number));
        self.controls.users[slot].store(number, Ordering::Relaxed);
        Ok(())
    }

    fn multiply(&self, x: View, w: View, bias: Option<View>, residual: Option<View>, y: View, shape: Linear) {
        self.compute(|s| {
            let workspace = *self.workspace.lock();
            let [x, w, y] = [x, w, y].map(|view| self.ptr(view));
            let [bias, residual] = [bias, residual].map(|view| view.map(|view| self.ptr(view)));
            if self.gemm.linear(s, workspace, x, w, bias, residual, y, shape)? {
                return Ok(());
            }
            self.gemm.linear(s, workspace, x, w, None, residual, y, shape)?;
            bias.map_or(Ok(()), |bias| self.launcher.bias_add(s, y, bias, shape.tokens, shape.outputs))
        });
    }
}

impl Operators for Cuda {
    fn zero(&self, target: View) {
        self.compute(|s| self.launcher.zero(s, self.ptr(target).address, target.span.bytes));
    }

    fn cast(&self, source: View, target: View) {
        self.compute(|s| self.launcher.cast(s, self.ptr(source), self.ptr(target)));
    }

    fn embed(&self, ids: View, table: View, out: View, tokens: u64, hidden: u64, vocabulary: u64) {
        self.compute(|s| {
            let [ids, table, out] = [ids, table, out].map(|view| self.ptr(view));
            self.launcher.embed(s, ids, table, out, tokens, hidden, vocabulary)
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
        self.compute(|s| {
            let [ids, order, starts, d_out, d_table] = [ids, order, starts, d_out, d_table].map(|view| self.ptr(view));
            self.launcher
                .embed_backward(s, ids, order, starts, distinct, d_out, d_table, tokens, hidden, vocabulary, into)
        });
    }

    fn rmsnorm(&self, x: View, weight: View, out: View, rstd: View, tokens: u64, hidden: u64, eps: f32) {
        self.compute(|s| {
            let [x, weight, out, rstd] = [x, weight, out, rstd].map(|view| self.ptr(view));
            self.launcher.rmsnorm(s, x, weight, out, rstd, tokens, hidden, eps)
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
        scratch: View,
        tokens: u64,
        hidden: u64,
        into: Into,
    ) {
        self.compute(|s| {
            let [d_out, x, weight, rstd, d_x, d_weight, scratch] =
                [d_out, x, weight, rstd, d_x, d_weight, scratch].map(|view| self.ptr(view));
            self.launcher.rmsnorm_backward(s, d_out, x, weight, rstd, d_x, d_weight, scratch, tokens, hidden, into)
        });
    }

    fn rmsnorm_scratch_bytes(&self, tokens: u64, columns: u64) -> u64 {
        self.launcher.rmsnorm_scratch_bytes(tokens, columns)
    }

    fn linear(&self, x: View, w: View, bias: Option<View>, residual: Option<View>, y: View, shape: Linear) {
        self.multiply(x, w, bias, residual, y, shape);
    }

    fn linear_backward_input(&self, d_y: View, w: View, d_x: View, shape: Linear, into: Into) {
        self.compute(|s| {
            let workspace = *self.workspace.lock();
            let [d_y, w, d_x] = [d_y, w, d_x].map(|view| self.ptr(view));
            self.gemm.linear_backward_input(s, workspace, d_y, w, d_x, shape, into)
        });
    }

    fn linear_backward_weight(&self, d_y: View, x: View, d_w: View, shape: Linear, into: Into) {
        self.compute(|s| {
            let workspace = *self.workspace.lock();
            let [d_y, x, d_w] = [d_y, x, d_w].map(|view| self.ptr(view));
            self.gemm.linear_backward_weight(s, workspace, d_y, x, d_w, shape, into)
        });
    }

    fn bias_backward(&self, d_y: View, d_bias: View, scratch: View, tokens: u64, outputs: u64, into: Into) {
        self.compute(|s| {
            let [d_y, d_bias, scratch] = [d_y, d_bias, scratch].map(|view| self.ptr(view));
            self.launcher.bias_backward(s, d_y, d_bias, scratch, tokens, outputs, into)
        });
    }

    fn rope(&self, qkv: View, table: View, starts: Option<View>, shape: Attention, inverse: bool) {
        self.compute(|s| {
            let starts = self.starts(starts, shape);
            self.launcher.rope(s, self.ptr(qkv), self.ptr(table), starts, shape, inverse)
        });
    }

    fn attention(&self, qkv: View, starts: Option<View>, out: View, stats: View, scratch: View, shape: Attention) {
        self.compute(|s| {
            let starts = self.starts(starts, shape);
            let [qkv, out, stats, scratch] = [qkv, out, stats, scratch].map(|view| self.ptr(view));
            expect_attention(shape, &[(qkv, shape.packed()), (out, shape.heads * shape.head_dim)], stats);
            match &self.cudnn {
                Ok(cudnn) if starts.is_none() && cudnn.forward(qkv, out, stats, scratch, shape)? => Ok(()),
                _ => self.launcher.attention(s, qkv, starts, out, stats, scratch, shape),
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
        self.compute(|s| {
            let starts = self.starts(starts, shape);
            let [qkv, out, stats, d_out, d_qkv, scratch] =
                [qkv, out, stats, d_out, d_qkv, scratch].map(|view| self.ptr(view));
            let dense = shape.heads * shape.head_dim;
            let packed = shape.packed();
            expect_attention(shape, &[(qkv, packed), (d_qkv, packed), (out, dense), (d_out, dense)], stats);
            match &self.cudnn {
                Ok(cudnn) if starts.is_none() && cudnn.backward(qkv, out, stats, d_out, d_qkv, scratch, shape)? => {
                    Ok(())
                }
                _ => self.launcher.attention_backward(s, qkv, starts, out, stats, d_out, d_qkv, scratch, shape),
            }
        });
    }

    fn attention_scratch_bytes(&self, shape: Attention, dtype: DType, masked: bool) -> u64 {
        let plan = |pass| self.cudnn.as_ref().ok().and_then(|cudnn| cudnn.scratch_bytes(pass, shape, dtype));
        // Making a plan needs the context, as every call does.
        if self.failures.keep(self.marks.bind()).is_none() {
            return 0;
        }
        if masked {
            return self.launcher.attention_scratch_bytes(shape, dtype, true);
        }
        match (plan(Pass::Forward), plan(Pass::Backward)) {
            (Some(forward), Some(backward)) => forward.max(backward),
            (forward, backward) => self
                .launcher
                .attention_scratch_bytes(shape, dtype, false)
                .max(forward.unwrap_or(0))
                .max(backward.unwrap_or(0)),
        }
    }

    fn swiglu(&self, gate_up: View, out: View, tokens: u64, ffn: u64) {
        self.compute(|s| self.launcher.swiglu(s, self.ptr(gate_up), self.ptr(out), tokens, ffn));
    }

    fn swiglu_backward(&self, d_out: View, gate_up: View, out: Option<View>, tokens: u64, ffn: u64) {
        self.compute(|s| {
            let out = out.map(|view| self.ptr(view));
            self.launcher.swiglu_backward(s, self.ptr(d_out), self.ptr(gate_up), out, tokens, ffn)
        });
    }

    fn classify(&self, logits: View, targets: View, losses: View, tokens: u64, vocabulary: u64, what: Classify) {
        self.compute(|s| {
            let [logits, targets, losses] = [logits, targets, losses].map(|view| self.ptr(view));
            self.launcher.classify(s, logits, targets, losses, tokens, vocabulary, what)
        });
    }

    fn sum(&self, values: View, total: View, into: Into) {
        self.compute(|s| self.launcher.sum(s, self.ptr(values), self.ptr(total), into));
    }

    fn square_sum(&self, x: View, slot: View) {
        self.compute(|s| self.launcher.square_sum(s, self.ptr(x), self.ptr(slot)));
    }

    fn norm_finish(&self, slots: View, max_norm: f32, loss_scale: f32, control: View) {
        self.compute(|s| self.launcher.norm_finish(s, self.ptr(slots), max_norm, loss_scale, self.ptr(control)));
    }

    fn update(&self, update: Update, state: State, control: View) {
        let State { parameter, gradient, master, first, second, decayed, seed, first_element } = state;
        if parameter.span.tier == Tier::Host {
            self.failures.keep(self.update_on_host(update, state, control));
            return;
        }
        self.compute(|s| {
            let [parameter, gradient, first, second, control] =
                [parameter, gradient, first, second, control].map(|view| self.ptr(view));
            let master = master.map(|view| self.ptr(view));
            self.launcher.update(
                s,
                update,
                parameter,
                gradient,
                master,
                first,
                second,
                decayed,
                seed,
                first_element,
                control,
            )
        });
    }

    fn hessian(&self, gradient: View, hessian: View, beta2: f32, tokens: f32, inverse_loss_scale: f32, control: View) {
        self.compute(|s| {
            let [gradient, hessian, control] = [gradient, hessian, control].map(|view| self.ptr(view));
            self.launcher.hessian(s, gradient, hessian, beta2, tokens, inverse_loss_scale, control)
        });
    }
}

impl Cuda {
    /// A document mask as the kernels take it. cuDNN's graphs here have no such mask: Castor's own kernels are
    /// used with one.
    #[track_caller]
    fn starts(&self, starts: Option<View>, shape: Attention) -> Option<Ptr> {
        let starts = self.ptr(starts?);
        let needed = shape.tokens();
        assert!(starts.dtype == DType::I32 && starts.elements >= needed, "starts must be {needed} i32");
        Some(starts)
    }
}

/// Attention reads by stride and trusts its shape: so the sizes are checked here.
#[track_caller]
fn expect_attention(shape: Attention, rows: &[(Ptr, u64)], stats: Ptr) {
    let dtype = rows.first().map(|(view, _)| view.dtype);
    for (view, columns) in rows {
        assert!(Some(view.dtype) == dtype, "attention's views are in different types");
        let needed = shape.tokens() * columns;
        assert!(
            view.elements >= needed,
            "a view of attention has {} elements where {needed} are needed",
            view.elements
        );
    }
    let needed = shape.tokens() * shape.heads;
    assert!(stats.dtype == DType::F32 && stats.elements >= needed, "stats must be {needed} f32");
    assert!(
        shape.kv_heads > 0 && shape.heads.is_multiple_of(shape.kv_heads),
        "{} heads cannot share {} kv heads",
        shape.heads,
        shape.kv_heads
    );
}
