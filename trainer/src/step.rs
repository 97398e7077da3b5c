//! One pass over the model, tick by tick: each group's update and forward, head, backward, norm.
//!
//! A step's updates are made by the next step, each shortly before the forward that needs its weights: behind it
//! the states of the groups to come are on their way, and by then the exact global norm is known. What no next
//! step will make, [`Step::update`] makes.
//!
//! A step goes through the model in *rounds*, each with a part of its micro-batches. Within a round the order is
//! layer-major: at each tick a block's weights are acquired once and used for all micro-batches of the round. One
//! round: weights cross the link once per direction and a gradient is final when its tick ends, and a step's
//! block inputs exist at once. A round per micro-batch: activations of one micro-batch only. The sums are taken in
//! the same order either way, but for a tied table's gradient, whose two parts the rounds interleave. The square
//! sum of a gradient is taken one tick after it was produced, while its reduction has had that tick to finish.
//! This module decides order and nothing else: which bytes to move for it is the manager's business, what is
//! computed is the model's.

use crate::{
    activations::{Activations, Phase},
    inputs::Inputs,
    model::{
        Shape,
        block::{self, Block},
        embedding,
        groups::Groups,
        head,
    },
};
use castor_kernels::{
    Backend, Span, Tier, View,
    ops::{Classify, Into, State, Update},
};
use castor_runtime::{Access, Category, GroupId, Lease, Part, Pass, Result, Role, StatefulTensorMgr};
use std::ops::Range;
use std::sync::Arc;

/// What a pass computes with; fixed for a run.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub shape: Shape,
    pub groups: Groups,
    pub activations: Activations,
}

/// The update of a step that a later pass makes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Due {
    /// Which update, with this step's rates.
    pub update: Update,
    /// Seed of its stochastic rounding.
    pub seed: u64,
}

/// A pass in progress. The calls come in the order of the methods below.
pub(crate) struct Step<'a> {
    mgr: &'a mut StatefulTensorMgr,
    model: &'a Model,
    inputs: &'a Inputs,
    ops: Arc<dyn Backend>,
    memory: Span,
    /// Micro-batches of the present round.
    round: Range<u64>,
    /// Whether operators are called for the first and last micro-batch of a round alone.
    rehearsed: bool,
    /// Which part of the gradients the present round produces.
    part: Part,
    /// Tokens that the step's rounds before had.
    first_token: u64,
    /// The tied table's gradient, held from the head to the embedding.
    table_gradient: Option<Lease>,
    /// The group whose gradient was produced last and is not in the norm yet.
    unsquared: Option<GroupId>,
}

impl<'a> Step<'a> {
    /// Begins a pass over the micro-batches that were sent.
    pub fn begin(mgr: &'a mut StatefulTensorMgr, model: &'a Model, inputs: &'a Inputs, pass: Pass) -> Self {
        let ops = Arc::clone(mgr.backend());
        let memory = mgr.fixed(Tier::Device, Category::Activations);
        mgr.begin_pass(pass);
        Step {
            mgr,
            model,
            inputs,
            ops,
            memory,
            round: 0..inputs.sent().len() as u64,
            rehearsed: false,
            part: Part::Only,
            first_token: 0,
            table_gradient: None,
            unsquared: None,
        }
    }

    /// As [`Step::begin`], on a backend that computes nothing: the manager decides from leases and ticks, so that
    /// operators need only be called for a round's first micro-batch and for its last, which reaches farthest.
    pub fn rehearse(mgr: &'a mut StatefulTensorMgr, model: &'a Model, inputs: &'a Inputs, pass: Pass) -> Self {
        Step { rehearsed: true, ..Step::begin(mgr, model, inputs, pass) }
    }

    /// Forward and backward in rounds of `micros` micro-batches; every gradient is in the norm afterwards, the last
    /// one excepted. `verdict` is called once, between the first round's forward and backward.
    ///
    /// # Errors
    /// If the world below or `verdict` refuses.
    pub fn rounds<E: From<castor_runtime::Error>>(
        &mut self,
        micros: u64,
        due: Option<&Due>,
        verdict: impl FnOnce() -> std::result::Result<Classify, E>,
    ) -> std::result::Result<(), E> {
        let all = self.round.end;
        let count = all.div_ceil(micros.max(1)).max(1);
        let mut what = None;
        let mut verdict = Some(verdict);
        for index in 0..count {
            self.round = index * micros..all.min((index + 1) * micros);
            self.part = Part::of(index, count);
            self.forward(due.filter(|_| index == 0))?;
            if let Some(verdict) = verdict.take() {
                what = Some(verdict()?);
            }
            self.backward(what.expect("the first round asked for the verdict"))?;
        }
        Ok(())
    }

    /// Embedding and all blocks, keeping what the backward wants. With several ranks a group is updated one block
    /// ahead, so that its new weights are gathered while that block computes. `due` is the update that the step before left to
    /// this one; the flag in the control scalars says whether there is one (L9), so the ticks are always the same.
    ///
    /// # Errors
    /// If the world below refuses.
    pub fn forward(&mut self, due: Option<&Due>) -> Result<()> {
        let model = self.model;
        let blocks = model.shape.blocks;
        let nth = |index| if index < blocks { model.groups.block(index) } else { model.groups.head() };
        let ahead = u64::from(self.ops.world() > 1);
        self.update_due(due, Groups::EMBEDDING, Phase::Embed)?;
        for index in 0..ahead {
            self.update_due(due, nth(index), Phase::Embed)?;
        }
        self.tick("embed", Groups::EMBEDDING, Phase::Embed)?;
        let lease = self.weights(Groups::EMBEDDING)?;
        for micro in self.micros() {
            let out = model.activations.block_input(self.memory, 0, self.place(micro), self.batch(micro));
            self.embed(&lease, micro, out);
        }
        self.mgr.release(lease)?;
        for block in 0..blocks {
            let group = model.groups.block(block);
            self.update_due(due, nth(block + ahead), Phase::Forward(block))?;
            self.tick("forward", group, Phase::Forward(block))?;
            let lease = self.weights(group)?;
            let weights = self.block_tensors(&lease, group);
            for micro in self.micros() {
                let batch = self.batch(micro);
                let places = model.activations.block(self.memory, block, self.place(micro), batch);
                let out = model.activations.block_output(self.memory, block, self.place(micro), batch);
                self.block(micro).forward(&weights, &places, out);
            }
            self.mgr.release(lease)?;
        }
        if ahead == 0 { self.update_due(due, nth(blocks), Phase::Head) } else { Ok(()) }
    }

    /// Embedding, blocks and losses, keeping nothing; the sum of the losses is left in the readings. `observe` sees
    /// each micro-batch's logits chunk by chunk: `(micro, first row, logits)`.
    ///
    /// # Errors
    /// If the world below or `observe` refuses.
    pub fn evaluate(&mut self, observe: &mut dyn FnMut(u64, u64, View) -> castor_kernels::Result<()>) -> Result<()> {
        let model = self.model;
        self.tick("embed", Groups::EMBEDDING, Phase::Embed)?;
        let lease = self.weights(Groups::EMBEDDING)?;
        for micro in self.micros() {
            self.embed(&lease, micro, self.hidden(micro));
        }
        self.mgr.release(lease)?;
        for block in 0..model.shape.blocks {
            let group = model.groups.block(block);
            // One block's places serve all: nothing is kept.
            self.tick("forward", group, Phase::Forward(0))?;
            let lease = self.weights(group)?;
            let weights = self.block_tensors(&lease, group);
            for micro in self.micros() {
                let mut places = model.activations.block(self.memory, 0, 0, self.batch(micro));
                places.input = self.hidden(micro);
                self.block(micro).forward(&weights, &places, places.input);
            }
            self.mgr.release(lease)?;
        }
        let head = model.groups.head();
        self.tick("head", head, Phase::Head)?;
        let (lease, table) = self.head_weights()?;
        let weights = self.head_tensors(&lease, table.as_ref());
        self.ops.zero(self.inputs.loss());
        for micro in self.micros() {
            let places = self.head_memory(micro);
            let targets = self.inputs.targets(micro);
            head::losses(self.ops.as_ref(), &model.shape, &weights, targets, &places, &mut |logits, first| {
                observe(micro, first, logits)
            })?;
            self.ops.sum(places.losses, self.inputs.loss(), Into::Add);
        }
        self.mgr.release(lease)?;
        if let Some(table) = table {
            self.mgr.release(table)?;
        }
        let loss = self.inputs.loss();
        Ok(self.inputs.sum_over_ranks(self.ops.as_ref(), loss)?)
    }

    /// Head, blocks and embedding, backwards: every gradient is produced, and all but the embedding's are in the
    /// norm. Each micro-batch's [`Classify::Sampled`] goes on counting tokens where the one before ended.
    ///
    /// # Errors
    /// If the world below refuses.
    pub fn backward(&mut self, what: Classify) -> Result<()> {
        self.head(what)?;
        for block in (0..self.model.shape.blocks).rev() {
            self.block_backward(block)?;
        }
        self.embed_backward()
    }

    /// Closes the norm into `control` and sums the losses over the ranks.
    ///
    /// # Errors
    /// If the world below refuses.
    pub fn norm(&mut self, max_norm: f32, loss_scale: f32, control: View) -> Result<()> {
        self.tick("norm", Groups::EMBEDDING, Phase::Update)?;
        self.square_last()?;
        let ops = self.ops.as_ref();
        self.inputs.sum_over_ranks(ops, self.inputs.slots())?;
        self.inputs.sum_over_ranks(ops, self.inputs.loss())?;
        ops.norm_finish(self.inputs.slots(), max_norm, loss_scale, control);
        Ok(())
    }

    /// Makes the update of every group at once, for want of a next step.
    ///
    /// # Errors
    /// If the world below refuses.
    pub fn update(&mut self, due: &Due) -> Result<()> {
        for group in (0..self.model.groups.count() as u32).map(GroupId) {
            self.update_due(Some(due), group, Phase::Update)?;
        }
        Ok(())
    }

    fn update_due(&mut self, due: Option<&Due>, group: GroupId, phase: Phase) -> Result<()> {
        let Some(due) = due else { return Ok(()) };
        self.tick("update", group, phase)?;
        self.update_group(group, due.update, due.seed)
    }

    /// Takes the gradients into every group's Hessian estimate. `tokens` counted in the estimate.
    ///
    /// # Errors
    /// If the world below refuses.
    pub fn hessian(&mut self, beta2: f32, tokens: f32, inverse_loss_scale: f32) -> Result<()> {
        for group in (0..self.model.groups.count() as u32).map(GroupId) {
            self.tick("hessian", group, Phase::Update)?;
            let gradient = self.mgr.acquire(group.chunk(Role::Gradient), Access::ReadShard)?;
            let hessian = self.mgr.acquire(group.chunk(Role::Second), Access::UpdateShard)?;
            self.ops.hessian(
                gradient.view(),
                hessian.view(),
                beta2,
                tokens,
                inverse_loss_scale,
                self.inputs.hessian_control(),
            );
            self.mgr.release(gradient)?;
            self.mgr.release(hessian)?;
        }
        Ok(())
    }

    /// Ends the pass.
    ///
    /// # Errors
    /// If the world below refuses.
    pub fn end(self) -> Result<()> {
        debug_assert!(self.table_gradient.is_none() && self.unsquared.is_none());
        self.mgr.end_pass()
    }

    fn head(&mut self, what: Classify) -> Result<()> {
        let model = self.model;
        let group = model.groups.head();
        self.tick("head", group, Phase::Head)?;
        let (lease, table) = self.head_weights()?;
        let weights = self.head_tensors(&lease, table.as_ref());
        let gradient = self.produce(group)?;
        if model.shape.tied {
            self.table_gradient = Some(self.produce(Groups::EMBEDDING)?);
        }
        let gradients = self.head_tensors(&gradient, self.table_gradient.as_ref());
        if self.part.begins() {
            self.ops.zero(self.inputs.loss());
        }
        for micro in self.micros() {
            let places = self.head_memory(micro);
            let d_hidden = model.activations.d_hidden(self.memory, self.place(micro), self.batch(micro));
            head::forward_backward(
                self.ops.as_ref(),
                &model.shape,
                &weights,
                self.inputs.targets(micro),
                &places,
                head::advanced(what, self.first_token),
                d_hidden,
                &gradients,
                into(micro),
            );
            self.ops.sum(places.losses, self.inputs.loss(), Into::Add);
            self.first_token += places.tokens;
        }
        self.mgr.release(lease)?;
        if let Some(table) = table {
            self.mgr.release(table)?;
        }
        self.produced(gradient, group)
    }

    fn block_backward(&mut self, block: u64) -> Result<()> {
        let model = self.model;
        let group = model.groups.block(block);
        self.tick("backward", group, Phase::Backward(block))?;
        let lease = self.weights(group)?;
        let gradient = self.produce(group)?;
        let weights = self.block_tensors(&lease, group);
        let gradients = self.block_tensors(&gradient, group);
        for micro in self.micros() {
            let batch = self.batch(micro);
            let places = model.activations.block(self.memory, block, self.place(micro), batch);
            let d_h = model.activations.d_hidden(self.memory, self.place(micro), batch);
            self.block(micro).backward(&weights, &places, d_h, &gradients, into(micro));
        }
        self.mgr.release(lease)?;
        self.square_last()?;
        self.produced(gradient, group)
    }

    fn embed_backward(&mut self) -> Result<()> {
        let model = self.model;
        self.tick("embed backward", Groups::EMBEDDING, Phase::EmbedBackward)?;
        let (gradient, tied) = match self.table_gradient.take() {
            Some(gradient) => (gradient, true),
            None => (self.produce(Groups::EMBEDDING)?, false),
        };
        for micro in self.micros() {
            let d_out = model.activations.d_hidden(self.memory, self.place(micro), self.batch(micro));
            embedding::backward(
                self.ops.as_ref(),
                &model.shape,
                &self.inputs.ids(micro),
                d_out,
                self.tensor(&gradient, Groups::EMBEDDING, 0),
                if tied { Into::Add } else { into(micro) },
            );
        }
        self.square_last()?;
        self.produced(gradient, Groups::EMBEDDING)
    }

    fn update_group(&mut self, group: GroupId, update: Update, seed: u64) -> Result<()> {
        let mut acquire = |role, access| self.mgr.acquire(group.chunk(role), access);
        let gradient = acquire(Role::Gradient, Access::ReadShard)?;
        let parameter = acquire(Role::Parameter, Access::UpdateShard)?;
        let first = acquire(Role::First, Access::UpdateShard)?;
        let second = acquire(Role::Second, Access::UpdateShard)?;
        let has_master = self.mgr.layout().formats.master.is_some();
        let master = if has_master {
            let chunk = group.chunk(Role::Master);
            Some(self.mgr.acquire(chunk, Access::UpdateShard)?)
        } else {
            None
        };
        let laid_out = self.mgr.layout().group(group);
        let state = State {
            parameter: parameter.view(),
            gradient: gradient.view(),
            master: master.as_ref().map(Lease::view),
            first: first.view(),
            second: second.view(),
            decayed: laid_out.decayed.saturating_sub(parameter.first()).min(parameter.elements()),
            seed,
            first_element: laid_out.first_element + parameter.first(),
        };
        self.ops.update(update, state, self.inputs.control());
        self.mgr.release(gradient)?;
        self.mgr.release(first)?;
        self.mgr.release(second)?;
        if let Some(master) = master {
            self.mgr.release(master)?;
        }
        self.mgr.release(parameter)
    }

    fn tick(&mut self, name: &'static str, group: GroupId, phase: Phase) -> Result<()> {
        self.mgr.tick(name, group)?;
        let bytes = self.model.activations.live_bytes(phase, self.round.end - self.round.start);
        self.mgr.note_live(Category::Activations, bytes);
        Ok(())
    }

    fn weights(&mut self, group: GroupId) -> Result<Lease> {
        self.mgr.acquire(group.chunk(Role::Parameter), Access::Read)
    }

    /// The head's own weights, and the embedding's if that is its matrix.
    fn head_weights(&mut self) -> Result<(Lease, Option<Lease>)> {
        let lease = self.weights(self.model.groups.head())?;
        let table = if self.model.shape.tied { Some(self.weights(Groups::EMBEDDING)?) } else { None };
        Ok((lease, table))
    }

    fn tensor(&self, lease: &Lease, group: GroupId, index: usize) -> View {
        lease.tensor(&self.mgr.layout().group(group).tensors[index])
    }

    fn block_tensors(&self, lease: &Lease, group: GroupId) -> block::Tensors {
        block::Tensors::of(lease, self.mgr.layout().group(group), &self.model.shape)
    }

    fn head_tensors(&self, own: &Lease, table: Option<&Lease>) -> head::Tensors {
        let head = self.model.groups.head();
        match table {
            Some(table) => {
                head::Tensors { output: self.tensor(table, Groups::EMBEDDING, 0), norm: self.tensor(own, head, 0) }
            }
            None => head::Tensors { output: self.tensor(own, head, 0), norm: self.tensor(own, head, 1) },
        }
    }

    /// Acquires a gradient to be produced. Without a micro-batch no operator will write it: it is zero.
    fn produce(&mut self, group: GroupId) -> Result<Lease> {
        let lease = self.mgr.acquire(group.chunk(Role::Gradient), Access::Produce(self.part))?;
        if self.round.is_empty() {
            self.ops.zero(lease.view());
        }
        Ok(lease)
    }

    fn produced(&mut self, gradient: Lease, group: GroupId) -> Result<()> {
        self.mgr.release(gradient)?;
        self.unsquared = self.part.ends().then_some(group);
        Ok(())
    }

    /// Takes this rank's part of the gradient that was produced a tick ago into the norm.
    fn square_last(&mut self) -> Result<()> {
        if let Some(group) = self.unsquared.take() {
            let lease = self.mgr.acquire(group.chunk(Role::Gradient), Access::ReadShard)?;
            let slot = self.inputs.slots().part(u64::from(group.0), 1);
            match lease.norm_part() {
                Some(part) => self.ops.square_sum(part, slot),
                // The last sum over the ranks is still in it.
                None => self.ops.zero(slot),
            }
            self.mgr.release(lease)?;
        }
        Ok(())
    }

    fn embed(&self, lease: &Lease, micro: u64, out: View) {
        let ids = self.inputs.ids(micro);
        let ops = self.ops.as_ref();
        embedding::forward(ops, &self.model.shape, &ids, self.tensor(lease, Groups::EMBEDDING, 0), out);
    }

    fn block(&self, micro: u64) -> Block<'_> {
        Block {
            ops: self.ops.as_ref(),
            shape: &self.model.shape,
            attention: self.model.activations.request().attention,
            rope: self.inputs.rope(),
            starts: self.inputs.starts(micro),
        }
    }

    /// The micro-batches of this round that operators are called for.
    fn micros(&self) -> impl Iterator<Item = u64> + use<> {
        let Range { start, end } = self.round;
        let step = if self.rehearsed { (end - start).saturating_sub(1).max(1) } else { 1 };
        self.round.clone().step_by(step as usize)
    }

    fn head_memory(&self, micro: u64) -> head::Memory {
        self.model.activations.head(self.memory, self.place(micro), self.batch(micro))
    }

    fn hidden(&self, micro: u64) -> View {
        self.model.activations.hidden(self.memory, self.place(micro), self.batch(micro))
    }

    /// A micro-batch's number within its round.
    const fn place(&self, micro: u64) -> u64 {
        micro - self.round.start
    }

    fn batch(&self, micro: u64) -> u64 {
        self.inputs.sent()[micro as usize].batch
    }
}

/// The first micro-batch writes a gradient, the others add.
const fn into(micro: u64) -> Into {
    if micro == 0 { Into::Replace } else { Into::Add }
}
