//! One pass over the model, tick by tick: forward, head, backward, norm, update.
//!
//! Layer-major: at each tick a block's weights are acquired once and used for all micro-batches of the step, so
//! that weights cross the link once per direction and a block's gradient is final when its tick ends. The square
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
use castor_runtime::{Access, Category, GroupId, Lease, Pass, Result, Role, StatefulTensorMgr};
use std::sync::Arc;

/// What a pass computes with; fixed for a run.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub shape: Shape,
    pub groups: Groups,
    pub activations: Activations,
}

/// A pass in progress. The calls come in the order of the methods below.
pub(crate) struct Step<'a> {
    mgr: &'a mut StatefulTensorMgr,
    model: &'a Model,
    inputs: &'a Inputs,
    ops: Arc<dyn Backend>,
    memory: Span,
    micros: u64,
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
            micros: inputs.sent().len() as u64,
            table_gradient: None,
            unsquared: None,
        }
    }

    /// Embedding and all blocks, keeping what the backward wants.
    ///
    /// # Errors
    /// If the world below refuses.
    pub fn forward(&mut self) -> Result<()> {
        let model = self.model;
        self.tick("embed", Groups::EMBEDDING, Phase::Embed)?;
        let lease = self.weights(Groups::EMBEDDING)?;
        for micro in 0..self.micros {
            let out = model.activations.block_input(self.memory, 0, micro, self.batch(micro));
            self.embed(&lease, micro, out);
        }
        self.mgr.release(lease)?;
        for block in 0..model.shape.blocks {
            let group = model.groups.block(block);
            self.tick("forward", group, Phase::Forward(block))?;
            let lease = self.weights(group)?;
            let weights = self.block_tensors(&lease, group);
            for micro in 0..self.micros {
                let batch = self.batch(micro);
                let places = model.activations.block(self.memory, block, micro, batch);
                let out = model.activations.block_output(self.memory, block, micro, batch);
                self.block().forward(&weights, &places, out);
            }
            self.mgr.release(lease)?;
        }
        Ok(())
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
        for micro in 0..self.micros {
            self.embed(&lease, micro, self.hidden(micro));
        }
        self.mgr.release(lease)?;
        for block in 0..model.shape.blocks {
            let group = model.groups.block(block);
            // One block's places serve all: nothing is kept.
            self.tick("forward", group, Phase::Forward(0))?;
            let lease = self.weights(group)?;
            let weights = self.block_tensors(&lease, group);
            for micro in 0..self.micros {
                let mut places = model.activations.block(self.memory, 0, 0, self.batch(micro));
                places.input = self.hidden(micro);
                self.block().forward(&weights, &places, places.input);
            }
            self.mgr.release(lease)?;
        }
        let head = model.groups.head();
        self.tick("head", head, Phase::Head)?;
        let (lease, table) = self.head_weights()?;
        let weights = self.head_tensors(&lease, table.as_ref());
        self.ops.zero(self.inputs.loss());
        for micro in 0..self.micros {
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

    /// Updates every group, in the order in which the next forward wants them.
    ///
    /// # Errors
    /// If the world below refuses.
    pub fn update(&mut self, update: Update, seed: u64) -> Result<()> {
        for group in (0..self.model.groups.count() as u32).map(GroupId) {
            self.tick("update", group, Phase::Update)?;
            self.update_group(group, update, seed)?;
        }
        Ok(())
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
        self.ops.zero(self.inputs.loss());
        let mut first_token = 0;
        for micro in 0..self.micros {
            let places = self.head_memory(micro);
            let d_hidden = model.activations.d_hidden(self.memory, micro, self.batch(micro));
            head::forward_backward(
                self.ops.as_ref(),
                &model.shape,
                &weights,
                self.inputs.targets(micro),
                &places,
                head::advanced(what, first_token),
                d_hidden,
                &gradients,
                into(micro),
            );
            self.ops.sum(places.losses, self.inputs.loss(), Into::Add);
            first_token += places.tokens;
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
        for micro in 0..self.micros {
            let batch = self.batch(micro);
            let places = model.activations.block(self.memory, block, micro, batch);
            let d_h = model.activations.d_hidden(self.memory, micro, batch);
            self.block().backward(&weights, &places, d_h, &gradients, into(micro));
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
        for micro in 0..self.micros {
            let d_out = model.activations.d_hidden(self.memory, micro, self.batch(micro));
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
        let bytes = self.model.activations.live_bytes(phase, self.micros);
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
        let lease = self.mgr.acquire(group.chunk(Role::Gradient), Access::Produce)?;
        if self.micros == 0 {
            self.ops.zero(lease.view());
        }
        Ok(lease)
    }

    fn produced(&mut self, gradient: Lease, group: GroupId) -> Result<()> {
        self.mgr.release(gradient)?;
        self.unsquared = Some(group);
        Ok(())
    }

    /// Takes this rank's part of the gradient that was produced a tick ago into the norm.
    fn square_last(&mut self) -> Result<()> {
        if let Some(group) = self.unsquared.take() {
            let lease = self.mgr.acquire(group.chunk(Role::Gradient), Access::ReadShard)?;
            let slot = self.inputs.slots().part(u64::from(group.0), 1);
            self.ops.square_sum(lease.norm_part(), slot);
            self.mgr.release(lease)?;
        }
        Ok(())
    }

    fn embed(&self, lease: &Lease, micro: u64, out: View) {
        let ids = self.inputs.ids(micro);
        let ops = self.ops.as_ref();
        embedding::forward(ops, &self.model.shape, &ids, self.tensor(lease, Groups::EMBEDDING, 0), out);
    }

    fn block(&self) -> Block<'_> {
        Block {
            ops: self.ops.as_ref(),
            shape: &self.model.shape,
            attention: self.model.activations.request().attention,
            rope: self.inputs.rope(),
        }
    }

    fn head_memory(&self, micro: u64) -> head::Memory {
        self.model.activations.head(self.memory, micro, self.batch(micro))
    }

    fn hidden(&self, micro: u64) -> View {
        self.model.activations.hidden(self.memory, micro, self.batch(micro))
    }

    fn batch(&self, micro: u64) -> u64 {
        self.inputs.sent()[micro as usize].batch
    }
}

/// The first micro-batch writes a gradient, the others add.
const fn into(micro: u64) -> Into {
    if micro == 0 { Into::Replace } else { Into::Add }
}
