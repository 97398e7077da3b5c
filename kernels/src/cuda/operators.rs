//! Sends each operator to cuBLASLt, cuDNN, Castor's own kernels, or (updates of host states) the host engine.

use super::cudnn_graph::Pass;
use super::driver::{SharedPage, check};
use super::engine::{HostBytes, Job};
use super::host_update::{HostUpdate, HostView};
use super::marks::Engine;
use super::{Cuda, Ptr};
use crate::ops::{Attention, Classify, Into, Linear, Operators, State, Update, control};
use crate::{DType, Result, Span, Stream, Tier, View};
use cudarc::driver::sys;
use parking_lot::Mutex;
use std::collections::VecDeque;

/// Bytes of the control scalars.
const CONTROL_BYTES: usize = control::COUNT as usize * 4;

/// Copies of the control scalars that can be on their way to the host at once.
const CONTROLS: u64 = (SharedPage::BYTES / CONTROL_BYTES) as u64;

/// Views that one update touches, at most.
const TOUCHED: usize = 6;

/// Updates on the host that are not known to be done, and where they find their control scalars.
pub(super) struct HostUpdates {
    controls: SharedPage,
    pending: Mutex<VecDeque<(u64, [Option<Span>; TOUCHED])>>,
}

impl HostUpdates {
    pub(super) fn new(controls: SharedPage) -> Self {
        HostUpdates { controls, pending: Mutex::new(VecDeque::with_capacity(1024)) }
    }

    /// The last update after `done` that touches a byte of `span`.
    pub(super) fn last_touching(&self, span: Span, done: u64) -> Option<u64> {
        if span.tier != Tier::Host {
            return None;
        }
        let pending = self.pending.lock();
        let touches = |spans: &[Option<Span>]| spans.iter().flatten().any(|other| other.overlaps(span));
        pending.iter().rev().find(|(number, spans)| *number > done && touches(spans)).map(|(number, _)| *number)
    }

    fn remember(&self, number: u64, done: u64, spans: [Option<Span>; TOUCHED]) {
        let mut pending = self.pending.lock();
        while pending.front().is_some_and(|(number, _)| *number <= done) {
            pending.pop_front();
        }
        pending.push_back((number, spans));
    }
}

impl Cuda {
    fn on_host(&self, view: View) -> HostView {
        HostView { at: self.host_bytes(view.span), dtype: view.dtype }
    }

    /// Hands an update to the host engine, to be done after everything issued to the compute stream so far.
    fn host_update(
        &self,
        control: View,
        touched: [Option<View>; TOUCHED],
        make: impl FnOnce(HostView) -> HostUpdate,
    ) -> Result<()> {
        self.marks.bind()?;
        let number = self.marks.issue(Engine::Host);
        let queued = self.queue_host_update(number, control, make);
        // Reported whatever happened: marks wait for this number.
        self.worker(Engine::Host).send(Job::Report(number));
        self.updates.remember(number, self.marks.done(Engine::Host), touched.map(|view| view.map(|v| v.span)));
        queued
    }

    fn queue_host_update(&self, number: u64, control: View, make: impl FnOnce(HostView) -> HostUpdate) -> Result<()> {
        let control = if control.span.tier == Tier::Host {
            self.on_host(control)
        } else {
            // The slot's last user must be done.
            self.marks.join_engine(Engine::Host, number.saturating_sub(CONTROLS));
            let offset = (number % CONTROLS) as usize * CONTROL_BYTES;
            let address = self.updates.controls.host(offset);
            let source = self.ptr(control.part(0, control::COUNT)).address;
            // SAFETY: the view was checked; the slot is inside the registered page and has no other user.
            check("cuMemcpyDtoHAsync", unsafe {
                sys::cuMemcpyDtoHAsync_v2(address.cast(), source, CONTROL_BYTES, self.marks.stream(Stream::Compute))
            })?;
            HostView { at: HostBytes { address, bytes: CONTROL_BYTES as u64 }, dtype: DType::F32 }
        };
        // Covers the host's work before this one only: the engine must not wait for itself.
        let mark = self.marks.record_compute(number - 1)?;
        let worker = self.worker(Engine::Host);
        worker.send(Job::Wait(mark));
        worker.send(Job::Update(make(control)));
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
        if target.span.tier == Tier::Host {
            let at = self.host_bytes(target.span);
            let number = self.marks.issue(Engine::Host);
            let worker = self.worker(Engine::Host);
            let mark = self.marks.bind().and_then(|()| self.marks.record_compute(number - 1));
            if let Some(mark) = self.failures.keep(mark) {
                worker.send(Job::Wait(mark));
                worker.send(Job::Zero(at));
            }
            worker.send(Job::Report(number));
            let touched = [Some(target.span), None, None, None, None, None];
            self.updates.remember(number, self.marks.done(Engine::Host), touched);
            return;
        }
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
        let views = [Some(parameter), Some(gradient), master, Some(first), Some(second)];
        if views.iter().flatten().any(|view| view.span.tier == Tier::Host) {
            let touched = [Some(parameter), Some(gradient), master, Some(first), Some(second), None];
            let [parameter, gradient, first, second] = [parameter, gradient, first, second].map(|v| self.on_host(v));
            let master = master.map(|view| self.on_host(view));
            self.failures.keep(self.host_update(control, touched, |control| HostUpdate::Update {
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
            }));
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
        if hessian.span.tier == Tier::Host {
            let touched = [Some(gradient), Some(hessian), None, None, None, None];
            let [gradient, hessian] = [gradient, hessian].map(|view| self.on_host(view));
            self.failures.keep(self.host_update(control, touched, |control| HostUpdate::Hessian {
                gradient,
                hessian,
                beta2,
                tokens,
                inverse_loss_scale,
                control,
            }));
            return;
        }
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
