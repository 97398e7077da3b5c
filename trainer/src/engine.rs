//! The engine: a model, its plan and its optimizer, one step at a time.
//!
//! [`Engine`] is the run that a [`Blueprint`] laid out and planned: it owns the manager and turns inputs into steps.
//! Nothing of a step is looked at before the next one is under way: results come one step late.

use crate::{
    blueprint::{Blueprint, Options},
    error::{Error, Result},
    inputs::{Inputs, MicroBatch, Ticket},
    loss_scale::LossScale,
    model::groups::{Groups, Part},
    optimizer::{Clip, Optimizer},
    source::TensorSource,
    step::{Backward, Due, Model, Step},
};
use castor_kernels::{Backend, DType, View, ops::Classify, rng};
use castor_runtime::{GroupId, Pass, Role, StatefulTensorMgr, plan::Plan};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A step's inputs on this rank.
#[derive(Clone, Copy, Debug)]
pub struct StepInputs<'a> {
    /// The accumulation window, at most [`Options::micro_batches`] of at most [`Options::batch`] rows.
    pub micros: &'a [MicroBatch<'a>],
    /// Tokens that count in the whole window over all ranks ([`Engine::total`]).
    pub tokens: u64,
}

/// What became of a step's update.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It was made.
    Updated,
    /// The gradient norm was not finite (L9).
    NotFinite,
    /// No token counted on any rank: nothing was computed.
    NothingCounts,
}

/// What is known of a step once it is done.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StepResult {
    /// Its number, from 0.
    pub step: u64,
    /// Mean loss of the tokens that count, over all ranks; NaN if none does.
    pub loss: f64,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Learning rate.
    pub lr: f64,
    /// Loss scale.
    pub loss_scale: f32,
    /// Tokens that counted over all ranks.
    pub tokens: u64,
    /// What became of its update.
    pub outcome: Outcome,
}

/// How far a run is: what a checkpoint holds beside the chunks.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Progress {
    /// Steps begun.
    pub step: u64,
    /// Updates made.
    pub applied: u64,
    /// Steps skipped for a norm that was not finite.
    pub not_finite: u64,
    /// Steps in which nothing counted.
    pub nothing_counts: u64,
    /// The last gradient norm that was finite.
    #[serde(default)]
    pub norm: Option<f32>,
    /// Whether any step was one of [`Clip::Lagged`].
    #[serde(default)]
    pub lagged: bool,
    /// The loss scale.
    pub loss_scale: LossScale,
}

impl Progress {
    /// What the next step's losses are multiplied by beside the number of tokens: the loss scale, and where the last
    /// norm serves for clipping, what it says. Before any norm is known nothing is clipped.
    fn scale(&self, clip: Clip, max_norm: f32) -> f32 {
        let factor = match (clip, self.norm) {
            (Clip::Lagged, Some(norm)) if max_norm > 0.0 => (max_norm / (norm + 1e-6)).min(1.0),
            _ => 1.0,
        };
        self.loss_scale.scale() * factor
    }
}

/// Labels of a Hessian estimate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EstimateLabels {
    /// Drawn from the model's own prediction, for each token that counts.
    Sampled,
    /// The micro-batch's own, already drawn by someone else.
    Given,
}

/// A run.
pub struct Engine {
    mgr: StatefulTensorMgr,
    ops: Arc<dyn Backend>,
    model: Model,
    options: Options,
    inputs: Inputs,
    /// The last step's update, which the next pass makes.
    due: Option<Due>,
    track: Track,
}

/// The run's progress, and the step whose result is still on its way.
struct Track {
    progress: Progress,
    pending: Option<Pending>,
}

struct Pending {
    step: u64,
    lr: f64,
    loss_scale: f32,
    tokens: u64,
    /// None: nothing counted.
    ticket: Option<Ticket>,
}

impl Track {
    /// Looks at the step whose result is on its way, if there is one.
    fn resolve(&mut self, ops: &dyn Backend, inputs: &Inputs) -> Result<Option<StepResult>> {
        let Some(pending) = self.pending.take() else {
            return Ok(None);
        };
        let mut result = StepResult {
            step: pending.step,
            loss: f64::NAN,
            grad_norm: 0.0,
            lr: pending.lr,
            loss_scale: pending.loss_scale,
            tokens: pending.tokens,
            outcome: Outcome::NothingCounts,
        };
        let Some(ticket) = pending.ticket else {
            self.progress.nothing_counts += 1;
            return Ok(Some(result));
        };
        let readings = inputs.read(ops, ticket)?;
        result.loss = f64::from(readings.loss_sum) / pending.tokens as f64;
        result.grad_norm = f64::from(readings.norm);
        self.progress.loss_scale.learn(readings.finite, result.loss.is_finite())?;
        if readings.finite {
            result.outcome = Outcome::Updated;
            self.progress.applied += 1;
            self.progress.norm = Some(readings.norm);
        } else {
            result.outcome = Outcome::NotFinite;
            self.progress.not_finite += 1;
        }
        Ok(Some(result))
    }
}

impl Engine {
    /// Reserves the plan's memory. The weights are undefined until [`Engine::load`].
    ///
    /// # Errors
    /// If a tier cannot give the bytes.
    pub fn new(backend: Arc<dyn Backend>, blueprint: &Blueprint, plan: Plan) -> Result<Self> {
        let mgr = StatefulTensorMgr::new(Arc::clone(&backend), blueprint.layout().clone(), plan)?;
        let inputs = blueprint.inputs_in(&mgr);
        let options = blueprint.options().clone();
        let table = options.config.rope_table(options.sequence as usize);
        inputs.upload_rope(backend.as_ref(), &table)?;
        backend.zero(inputs.control());
        Ok(Engine {
            mgr,
            ops: backend,
            model: blueprint.model.clone(),
            inputs,
            due: None,
            track: Track {
                progress: Progress {
                    step: 0,
                    applied: 0,
                    not_finite: 0,
                    nothing_counts: 0,
                    norm: None,
                    lagged: false,
                    loss_scale: LossScale::new(options.loss_scale),
                },
                pending: None,
            },
            options,
        })
    }

    /// Fills all weights from `source` and makes the optimizer's states zero.
    ///
    /// # Errors
    /// If a tensor is missing or unreadable, or a tier refuses.
    pub fn load(&mut self, source: &dyn TensorSource) -> Result<()> {
        for group in (0..self.model.groups.count() as u32).map(GroupId) {
            let groups = &self.model.groups;
            let mut fill = |first, out: &mut [f32]| groups.fill(group, first, out, source);
            self.mgr.load_group(group, &mut fill)?;
        }
        Ok(())
    }

    /// One optimizer step, with its Hessian estimate if one is due. Returns the result of the step *before*;
    /// [`Engine::finish`] gives the last one's.
    ///
    /// # Errors
    /// If the inputs do not fit, the world below refuses, or the run only skips.
    pub fn step(&mut self, inputs: &StepInputs) -> Result<Option<StepResult>> {
        let mut previous = None;
        let estimates = self.optimizer()?.estimates_at(self.track.progress.step);
        if let (Some(_), [first, ..]) = (estimates, inputs.micros)
            && inputs.tokens > 0
        {
            previous = self.finish()?;
            self.estimate(first, EstimateLabels::Sampled)?;
        }
        let before = self.train(inputs)?;
        Ok(previous.or(before))
    }

    /// One optimizer step without a Hessian estimate; otherwise as [`Engine::step`].
    ///
    /// # Errors
    /// As [`Engine::step`].
    pub fn train(&mut self, inputs: &StepInputs) -> Result<Option<StepResult>> {
        let optimizer = self.optimizer()?;
        let step = self.track.progress.step;
        let lr = self.options.schedule.at(step);
        let ops = self.ops.as_ref();
        if inputs.tokens == 0 {
            let previous = self.track.resolve(ops, &self.inputs)?;
            self.begun(lr, 0, None);
            return Ok(previous);
        }
        self.inputs.send(ops, inputs.micros)?;
        let mut pass = Step::begin(&mut self.mgr, &self.model, &self.inputs, Pass::Train);
        let (lagged, max_norm) = (self.options.clip == Clip::Lagged, self.options.max_norm);
        // Where no update is due the control scalars forbid it.
        let due = self.due.take().unwrap_or(Due { update: optimizer.update(0.0, 0), seed: 0 });
        let seed = rng::bits(self.options.seed, step, lane::ROUNDING);
        let (track, sent) = (&mut self.track, &self.inputs);
        let mut previous = None;
        pass.rounds(self.options.round, (!lagged).then_some(&due), || {
            // The forward is queued: looking at the step before costs no time now, and its verdict is needed.
            previous = track.resolve(ops, sent)?;
            let scale = track.progress.scale(self.options.clip, max_norm) / inputs.tokens as f32;
            let update = optimizer.update(lr, track.progress.applied);
            let behind = lagged.then_some(Due { update, seed });
            Ok::<_, Error>(Backward { what: Classify::Gradient { scale }, behind })
        })?;
        let scale = self.track.progress.scale(self.options.clip, max_norm);
        pass.norm(if lagged { 0.0 } else { max_norm }, scale, self.inputs.control())?;
        pass.end()?;
        self.due = (!lagged).then(|| Due { update: optimizer.update(lr, self.track.progress.applied), seed });
        self.track.progress.lagged |= lagged;
        let ticket = self.inputs.read_back(ops)?;
        self.begun(lr, inputs.tokens, Some(ticket));
        Ok(previous)
    }

    /// Takes a Gauss-Newton-Bartlett estimate on `micro` into the Hessian.
    ///
    /// # Errors
    /// If the optimizer has none, the inputs do not fit, or the world below refuses.
    pub fn estimate(&mut self, micro: &MicroBatch, labels: EstimateLabels) -> Result<()> {
        let step = self.track.progress.step;
        let Optimizer::Sophia { beta2, .. } = self.optimizer()? else {
            return Err(Error::Usage("only --optimizer sophia estimates a Hessian".into()));
        };
        let tokens = self.total(micro.counted(self.options.sequence))?;
        if tokens == 0 {
            return Ok(());
        }
        self.flush()?;
        let ops = self.ops.as_ref();
        self.inputs.send(ops, std::slice::from_ref(micro))?;
        let loss_scale = self.track.progress.loss_scale.scale();
        let scale = loss_scale / tokens as f32;
        let what = match labels {
            EstimateLabels::Given => Classify::Gradient { scale },
            EstimateLabels::Sampled => Classify::Sampled {
                scale,
                seed: rng::bits(self.options.seed, step, lane::LABELS),
                first_token: u64::from(ops.rank()) * self.options.batch * self.options.sequence,
            },
        };
        let control = self.inputs.hessian_control();
        let mut pass = Step::begin(&mut self.mgr, &self.model, &self.inputs, Pass::Hessian);
        pass.forward(None)?;
        pass.backward(Backward { what, behind: None })?;
        pass.norm(0.0, loss_scale, control)?;
        pass.hessian(beta2 as f32, tokens as f32, 1.0 / loss_scale)?;
        Ok(pass.end()?)
    }

    /// Forward and backward alone: gradients that have homes stay there until the next step. Waits for the result.
    ///
    /// # Errors
    /// If the inputs do not fit or the world below refuses.
    pub fn gradients(&mut self, inputs: &StepInputs) -> Result<StepResult> {
        self.flush()?;
        let ops = self.ops.as_ref();
        self.inputs.send(ops, inputs.micros)?;
        let loss_scale = self.track.progress.loss_scale.scale();
        let mut pass = Step::begin(&mut self.mgr, &self.model, &self.inputs, Pass::Train);
        let scale = loss_scale / inputs.tokens.max(1) as f32;
        let backward = Backward { what: Classify::Gradient { scale }, behind: None };
        pass.rounds(self.options.round, None, || Ok::<_, Error>(backward))?;
        pass.norm(0.0, loss_scale, self.inputs.control())?;
        pass.end()?;
        let ticket = self.inputs.read_back(ops)?;
        let readings = self.inputs.read(ops, ticket)?;
        // These gradients are for looking at: no update may follow from them.
        ops.zero(self.inputs.control());
        Ok(StepResult {
            step: self.track.progress.step,
            loss: f64::from(readings.loss_sum) / inputs.tokens as f64,
            grad_norm: f64::from(readings.norm),
            lr: 0.0,
            loss_scale,
            tokens: inputs.tokens,
            outcome: if readings.finite { Outcome::Updated } else { Outcome::NotFinite },
        })
    }

    /// Sum of the losses of `micros` over all ranks' tokens that count; no gradients. Waits for the result.
    ///
    /// # Errors
    /// If the inputs do not fit or the world below refuses.
    pub fn evaluate(&mut self, micros: &[MicroBatch]) -> Result<f64> {
        self.observe(micros, &mut |_, _, _| Ok(()))
    }

    /// As [`Engine::evaluate`]; `observe` sees each micro-batch's logits chunk by chunk: `(micro, first row, logits
    /// [rows,V] on the device)`.
    ///
    /// # Errors
    /// As [`Engine::evaluate`], or what `observe` returns.
    pub fn observe(
        &mut self,
        micros: &[MicroBatch],
        observe: &mut dyn FnMut(u64, u64, View) -> castor_kernels::Result<()>,
    ) -> Result<f64> {
        self.flush()?;
        let ops = self.ops.as_ref();
        let mut loss = 0.0;
        for (round, micros) in micros.chunks(self.options.round as usize).enumerate() {
            self.inputs.send(ops, micros)?;
            let first = round as u64 * self.options.round;
            let mut pass = Step::begin(&mut self.mgr, &self.model, &self.inputs, Pass::Evaluate);
            pass.evaluate(&mut |micro, row, logits| observe(first + micro, row, logits))?;
            pass.end()?;
            let ticket = self.inputs.read_back(ops)?;
            loss += f64::from(self.inputs.read(ops, ticket)?.loss_sum);
        }
        Ok(loss)
    }

    /// Makes the update that the last step left to the next one.
    ///
    /// # Errors
    /// If the world below refuses.
    pub fn flush(&mut self) -> Result<()> {
        if let Some(due) = self.due.take() {
            let mut pass = Step::begin(&mut self.mgr, &self.model, &self.inputs, Pass::Update);
            pass.update(&due)?;
            pass.end()?;
            self.ops.zero(self.inputs.control());
        }
        Ok(())
    }

    /// Makes the last step's update and waits for it; its result, unless it was returned already.
    ///
    /// # Errors
    /// If work of the step failed, or the run only skips.
    pub fn finish(&mut self) -> Result<Option<StepResult>> {
        self.flush()?;
        self.track.resolve(self.ops.as_ref(), &self.inputs)
    }

    /// Sum of `count` over all ranks. Control plane: all ranks must call it.
    ///
    /// # Errors
    /// If a peer is gone.
    pub fn total(&self, count: u64) -> Result<u64> {
        if self.ops.world() == 1 {
            return Ok(count);
        }
        let counts = self.ops.exchange(&count.to_le_bytes())?;
        let mut total = 0;
        for (rank, message) in counts.iter().enumerate() {
            let bytes = message.as_slice().try_into().map_err(|_| {
                Error::Kernels(castor_kernels::Error::Peer {
                    rank: rank as u32,
                    reason: format!(
                        "sent {} bytes where a count of 8 was due: are all ranks running the same version of castor?",
                        message.len()
                    ),
                })
            })?;
            total += u64::from_le_bytes(bytes);
        }
        Ok(total)
    }

    /// How far the run is. Call [`Engine::finish`] first: an open step is not in it.
    pub const fn progress(&self) -> Progress {
        self.track.progress
    }

    /// Goes on from a checkpoint's progress.
    pub fn resume(&mut self, progress: Progress) {
        self.track = Track { progress, pending: None };
    }

    /// The named tensors and their places.
    pub const fn groups(&self) -> &Groups {
        &self.model.groups
    }

    /// The exact f32 weights of a group, tensors one after the other. All ranks must call it.
    ///
    /// # Errors
    /// If a tier or a peer refuses.
    pub fn read_group(&mut self, group: GroupId) -> Result<Vec<f32>> {
        self.flush()?;
        let mut values = vec![0.0; self.mgr.layout().group(group).used as usize];
        self.mgr.read_group(group, &mut values)?;
        Ok(values)
    }

    /// A group's gradient, tensors one after the other, divided by `loss_scale`. All ranks must call it.
    ///
    /// # Errors
    /// If a tier or a peer refuses, or gradients have no homes ([`Clip::Lagged`]).
    pub fn read_gradient(&mut self, group: GroupId, loss_scale: f32) -> Result<Vec<f32>> {
        if !self.mgr.layout().stores(Role::Gradient) {
            return Err(Error::Usage(
                "gradients have no homes with --clip lagged; give --clip exact to read them".into(),
            ));
        }
        let chunk = group.chunk(Role::Gradient);
        let mut bytes = self.mgr.read_chunk(chunk)?;
        if self.mgr.layout().shards > 1 && self.mgr.layout().sharding.gradients {
            bytes = self.mgr.all_shards(bytes)?;
        }
        let layout = self.mgr.layout();
        let mut values = widen(&bytes, layout.dtype(chunk));
        values.truncate(layout.group(group).used as usize);
        values.iter_mut().for_each(|value| *value /= loss_scale);
        Ok(values)
    }

    /// A named tensor's part of what [`Engine::read_group`] or [`Engine::read_gradient`] gave.
    pub fn slice<'v>(&self, part: &Part, group: &'v [f32]) -> &'v [f32] {
        &group[part.offset as usize..(part.offset + part.elements()) as usize]
    }

    /// The manager, for checkpoints and reports. [`Engine::finish`] first, if the chunks are to be those after the last
    /// update.
    pub const fn manager(&mut self) -> &mut StatefulTensorMgr {
        &mut self.mgr
    }

    /// What the run computes with.
    pub const fn options(&self) -> &Options {
        &self.options
    }

    fn optimizer(&self) -> Result<Optimizer> {
        self.options
            .optimizer
            .ok_or_else(|| Error::Usage("this run has no optimizer: it only computes gradients".into()))
    }

    fn begun(&mut self, lr: f64, tokens: u64, ticket: Option<Ticket>) {
        self.track.pending = Some(Pending {
            step: self.track.progress.step,
            lr,
            loss_scale: self.track.progress.loss_scale.scale(),
            tokens,
            ticket,
        });
        self.track.progress.step += 1;
    }
}

/// Float elements as f32.
///
/// # Panics
/// If `dtype` is not f32, f16 or bf16.
pub(crate) fn widen(bytes: &[u8], dtype: DType) -> Vec<f32> {
    let halves = bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
    match dtype {
        DType::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        DType::F16 => halves.map(|b| half::f16::from_le_bytes(b).to_f32()).collect(),
        DType::Bf16 => halves.map(|b| half::bf16::from_le_bytes(b).to_f32()).collect(),
        other => panic!("{other:?} is no type of weights, gradients or logits"),
    }
}

/// What a step's random numbers are for: each has its own sequence.
mod lane {
    pub const ROUNDING: u64 = 11;
    pub const LABELS: u64 = 12;
}
