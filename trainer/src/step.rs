//! One pass over the model, tick by tick: each group's update and forward, head, backward, norm.
//!
//! A step's updates are made by the next step, each shortly before the forward that needs its weights: behind it
//! the states of the groups to come are on their way, and by then the exact global norm is known. Those that the host's
//! cores make are given to them when the step begins. What no next step will make, [`Step::update`] makes. Where the
//! last step's norm serves in place of this one's ([`crate::optimizer::Clip::Lagged`]), an update is made right behind
//! the backward that it follows from.
//!
//! A step goes through the model in *rounds*, each with a part of its micro-batches. Within a round the order is
//! layer-major: at each tick a block's weights are acquired once and used for all micro-batches of the round. One
//! round: weights cross the link once per direction and a gradient is final when its tick ends, and a step's
//! block inputs exist at once. A round per micro-batch: activations of one micro-batch only. The sums are taken in
//! the same order either way, but for a tied table's gradient, whose two parts the rounds interleave. What a
//! micro-batch adds to a gradient is summed over the ranks with the others or by itself ([`Gradient`]). The square
//! sum of a gradient is taken one tick after it was produced, while its reduction has had that tick to finish.
//! This module decides order and nothing else: which bytes to move for it is the manager's business, what is
//! computed is the model's.

mod update;

use crate::{
    activations::{Activations, Phase},
    estimate::{Costs, Tick},
    gradient::Gradient,
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
    ops::{Classify, Into, Update},
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
    /// Those of the first of several rounds.
    pub first_round: Activations,
    /// Whether each micro-batch's gradient is summed over the ranks by itself.
    pub sync_each_batch: bool,
    /// The groups whose updates the host's cores make: the last ones, whose weights the forward wants last.
    pub updated_on_host: Range<u64>,
}

/// The update of a step that a later pass makes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Due {
    /// Which update, with this step's rates.
    pub update: Update,
    /// Seed of its stochastic rounding.
    pub seed: u64,
}

/// What a backward computes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backward {
    /// Losses and their gradients.
    pub what: Classify,
    /// The update to make of each group as soon as its gradient is final.
    pub behind: Option<Due>,
}

/// A gradient that is final.
struct Produced {
    group: GroupId,
    /// If it has no home.
    lease: Option<Lease>,
}

/// A pass in progress. The calls come in the order of the methods below.
pub(crate) struct Step<'a> {
    mgr: &'a mut StatefulTensorMgr,
    model: &'a Model,
    inputs: &'a Inputs,
    ops: Arc<dyn Backend>,
    memory: Span,
    /// Layout of the present round's activations.
    activations: &'a Activations,
    /// Micro-batches of the present round.
    round: Range<u64>,
    /// In a rehearsal: what ticks cost. Operators are called for the first and last micro-batch of a round alone.
    rehearsed: Option<&'a Costs>,
    /// Which part of the gradients the present round produces.
    part: Part,
    /// Tokens that the step's rounds before had.
    first_token: u64,
    /// The tied table's gradient, held from the head to the embedding.
    table_gradient: Option<Gradient>,
    /// The gradient that was produced last and is not in the norm yet.
    unsquared: Option<Produced>,
    /// The update to make of each group as soon as its gradient is in the norm.
    behind: Option<Due>,
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
            activations: &model.activations,
            round: 0..inputs.sent().len() as u64,
            rehearsed: None,
            part: Part::Only,
            first_token: 0,
            table_gradient: None,
            unsquared: None,
            behind: None,
        }
    }

    /// As [`Step::begin`], on a backend that computes nothing: the manager decides from leases and ticks, so that
    /// operators need only be called for a round's first micro-batch and for its last, which reaches farthest.
    pub fn rehearse(
        mgr: &'a mut StatefulTensorMgr,
        model: &'a Model,
        inputs: &'a Inputs,
        pass: Pass,
        costs: &'a Costs,
    ) -> Self {
        Step { rehearsed: Some(costs), ..Step::begin(mgr, model, inputs, pass) }
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
        verdict: impl FnOnce() -> std::result::Result<Backward, E>,
    ) -> std::result::Result<(), E> {
        let all = self.round.end;
        let count = all.div_ceil(micros.max(1)).max(1);
        let mut what = None;
        let mut verdict = Some(verdict);
        for index in 0..count {
            self.round = index * micros..all.min((index + 1) * micros);
            self.part = Part::of(index, count);
            let first = index == 0 && count > 1;
            self.activations = if first { &self.model.first_round } else { &self.model.activations };
            self.forward(due.filter(|_| index == 0))?;
            if let Some(verdict) = verdict.take() {
                what = Some(verdict()?);
            }
            self.backward(what.expect("the first round asked for the verdict"))?;
        }
        Ok(())
    }

    /// Embedding and all blocks, keeping what the backward wants. With several ranks a group is updated one block
    /// ahead, so that its new weights are gathered while that block computes. `due` is the update that the step before
    /// left to this one; the flag in the control scalars says whether there is one (L9), so the ticks are always the
    /// same.
    ///
    /// # Errors
    /// If the world below refuses.
    pub fn forward(&mut self, due: Option<&Due>) -> Result<()> {
        let model = self.model;
        let blocks = model.shape.blocks;
        let nth = |index| if index < blocks { model.groups.block(index) } else { model.groups.head() };
        let ahead = u64::from(self.ops.world() > 1);
        self.updates_on_host(due, Phase::Embed)?;
        self.update_due(due, Groups::EMBEDDING, Phase::Embed)?;
        for index in 0..ahead {
            self.update_due(due, nth(index), Phase::Embed)?;
        }
        self.tick(Tick::Embed, Groups::EMBEDDING, Phase::Embed)?;
        let lease = self.weights(Groups::EMBEDDING)?;
        for micro in self.micros() {
            let out = self.activations.block_input(self.memory, 0, self.place(micro), self.batch(micro));
            self.embed(&lease, micro, out);
        }
        self.mgr.release(lease)?;
        for block in 0..blocks {
            let group = model.groups.block(block);
            self.update_due(due, nth(block + ahead), Phase::Forward(block))?;
            self.tick(Tick::Forward(block), group, Phase::Forward(block))?;
            let lease = self.weights(group)?;
            let weights = self.block_tensors(lease.view(), group);
            for micro in self.micros() {
                let batch = self.batch(micro);
                let places = self.activations.block(self.memory, block, self.place(micro), batch);
                let out = self.activations.block_output(self.memory, block, self.place(micro), batch);
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
        self.tick(Tick::Embed, Groups::EMBEDDING, Phase::Embed)?;
        let lease = self.weights(Groups::EMBEDDING)?;
        for micro in self.micros() {
            self.embed(&lease, micro, self.hidden(micro));
        }
        self.mgr.release(lease)?;
        for block in 0..model.shape.blocks {
            let group = model.groups.block(block);
            // One block's places serve all: nothing is kept.
            self.tick(Tick::Forward(block), group, Phase::Forward(0))?;
            let lease = self.weights(group)?;
            let weights = self.block_tensors(lease.view(), group);
            for micro in self.micros() {
                let mut places = self.activations.block(self.memory, 0, 0, self.batch(micro));
                places.input = self.hidden(micro);
                self.block(micro).forward(&weights, &places, places.input);
            }
            self.mgr.release(lease)?;
        }
        let head = model.groups.head();
        self.tick(Tick::Head, head, Phase::Head)?;
        let (lease, table) = self.head_weights()?;
        let weights = self.head_tensors(lease.view(), table.as_ref().map(Lease::view));
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
    pub fn backward(&mut self, Backward { what, behind }: Backward) -> Result<()> {
        self.behind = behind;
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
        self.tick(Tick::Norm, Groups::EMBEDDING, Phase::Update)?;
        let last = self.square_last()?;
        self.update_behind(last, Phase::Update)?;
        let ops = self.ops.as_ref();
        if self.behind.is_none() {
            self.inputs.sum_over_ranks(ops, self.inputs.slots())?;
        }
        self.inputs.sum_over_ranks(ops, self.inputs.loss())?;
        ops.norm_finish(self.inputs.slots(), max_norm, loss_scale, control);
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
        self.tick(Tick::Head, group, Phase::Head)?;
        let (lease, table) = self.head_weights()?;
        let weights = self.head_tensors(lease.view(), table.as_ref().map(Lease::view));
        let mut gradient = self.produce(group)?;
        let mut table_gradient = if model.shape.tied { Some(self.produce(Groups::EMBEDDING)?) } else { None };
        if self.part.begins() {
            self.ops.zero(self.inputs.loss());
        }
        for micro in self.round.clone() {
            self.expect_one(Tick::Head, group);
            let own = gradient.form(self.mgr, into(micro));
            let tables = table_gradient.as_ref().map(|table| table.form(self.mgr, into(micro)));
            if self.computes(micro) {
                let places = self.head_memory(micro);
                let d_hidden = self.activations.d_hidden(self.memory, self.place(micro), self.batch(micro));
                head::forward_backward(
                    self.ops.as_ref(),
                    &model.shape,
                    &weights,
                    self.inputs.targets(micro),
                    &places,
                    head::advanced(what, self.first_token),
                    d_hidden,
                    &self.head_tensors(own.view, tables.as_ref().map(|tables| tables.view)),
                    own.into,
                );
                self.ops.sum(places.losses, self.inputs.loss(), Into::Add);
                self.first_token += places.tokens;
            }
            gradient.add(self.mgr, own)?;
            if let (Some(table), Some(formed)) = (&mut table_gradient, tables) {
                table.add(self.mgr, formed)?;
            }
        }
        self.table_gradient = table_gradient;
        self.mgr.release(lease)?;
        if let Some(table) = table {
            self.mgr.release(table)?;
        }
        self.produced(gradient, group)
    }

    fn block_backward(&mut self, block: u64) -> Result<()> {
        let model = self.model;
        let group = model.groups.block(block);
        self.tick(Tick::Backward(block), group, Phase::Backward(block))?;
        let lease = self.weights(group)?;
        let mut gradient = self.produce(group)?;
        let weights = self.block_tensors(lease.view(), group);
        for micro in self.round.clone() {
            self.expect_one(Tick::Backward(block), group);
            let own = gradient.form(self.mgr, into(micro));
            if self.computes(micro) {
                let batch = self.batch(micro);
                let places = self.activations.block(self.memory, block, self.place(micro), batch);
                let d_h = self.activations.d_hidden(self.memory, self.place(micro), batch);
                self.block(micro).backward(&weights, &places, d_h, &self.block_tensors(own.view, group), own.into);
            }
            gradient.add(self.mgr, own)?;
        }
        self.mgr.release(lease)?;
        let last = self.square_last()?;
        self.produced(gradient, group)?;
        self.update_behind(last, Phase::Backward(block))
    }

    fn embed_backward(&mut self) -> Result<()> {
        let model = self.model;
        self.tick(Tick::EmbedBackward, Groups::EMBEDDING, Phase::EmbedBackward)?;
        let (mut gradient, tied) = match self.table_gradient.take() {
            Some(gradient) => (gradient, true),
            None => (self.produce(Groups::EMBEDDING)?, false),
        };
        for micro in self.round.clone() {
            let own = gradient.form(self.mgr, if tied { Into::Add } else { into(micro) });
            if self.computes(micro) {
                embedding::backward(
                    self.ops.as_ref(),
                    &model.shape,
                    &self.inputs.ids(micro),
                    self.activations.d_hidden(self.memory, self.place(micro), self.batch(micro)),
                    self.tensor(own.view, Groups::EMBEDDING, 0),
                    own.into,
                );
            }
            gradient.add(self.mgr, own)?;
        }
        let last = self.square_last()?;
        self.produced(gradient, Groups::EMBEDDING)?;
        self.update_behind(last, Phase::EmbedBackward)
    }

    fn tick(&mut self, tick: Tick, group: GroupId, phase: Phase) -> Result<()> {
        let micros = self.round.end - self.round.start;
        let (live, spare) = (self.activations.live_bytes(phase, micros), self.activations.spare_bytes(phase));
        self.mgr.tick(tick.name(), group, castor_runtime::tensor_mgr::Activations { live, spare })?;
        // A gradient that is summed one by one is formed one by one; else all of a tick's arithmetic comes at once.
        if !(self.model.sync_each_batch && matches!(tick, Tick::Head | Tick::Backward(_))) {
            self.expect(tick, group, micros);
        }
        Ok(())
    }

    /// In a rehearsal: the arithmetic of `micros` micro-batches comes next.
    fn expect(&mut self, tick: Tick, group: GroupId, micros: u64) {
        if let Some(costs) = self.rehearsed {
            let added = micros - u64::from(self.part.begins()).min(micros);
            self.mgr.expect_work(costs.seconds(tick, group, &self.activations.request().keep, micros, added));
        }
    }

    /// As [`Step::expect`], of one micro-batch where they come one by one.
    fn expect_one(&mut self, tick: Tick, group: GroupId) {
        if self.model.sync_each_batch {
            self.expect(tick, group, 1);
        }
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

    fn tensor(&self, whole: View, group: GroupId, index: usize) -> View {
        self.mgr.layout().group(group).tensors[index].within(whole)
    }

    fn block_tensors(&self, whole: View, group: GroupId) -> block::Tensors {
        block::Tensors::of(whole, self.mgr.layout().group(group), &self.model.shape)
    }

    fn head_tensors(&self, own: View, table: Option<View>) -> head::Tensors {
        let head = self.model.groups.head();
        match table {
            Some(table) => {
                head::Tensors { output: self.tensor(table, Groups::EMBEDDING, 0), norm: self.tensor(own, head, 0) }
            }
            None => head::Tensors { output: self.tensor(own, head, 0), norm: self.tensor(own, head, 1) },
        }
    }

    /// Begins a gradient. Without a micro-batch no operator will write it: it is zero.
    fn produce(&mut self, group: GroupId) -> Result<Gradient> {
        let chunk = group.chunk(Role::Gradient);
        let mut gradient = Gradient::begin(self.mgr, chunk, self.part, self.model.sync_each_batch)?;
        if self.round.is_empty() {
            let nothing = gradient.form(self.mgr, Into::Replace);
            self.ops.zero(nothing.view);
            gradient.add(self.mgr, nothing)?;
        }
        Ok(gradient)
    }

    fn produced(&mut self, gradient: Gradient, group: GroupId) -> Result<()> {
        let lease = gradient.end(self.mgr)?;
        self.unsquared = self.part.ends().then_some(Produced { group, lease });
        Ok(())
    }

    /// Takes this rank's part of the gradient that was produced a tick ago into the norm, and gives that gradient.
    fn square_last(&mut self) -> Result<Option<Produced>> {
        let Some(last) = self.unsquared.take() else { return Ok(None) };
        match &last.lease {
            Some(lease) => {
                self.mgr.await_reduced(lease);
                self.square(lease, last.group);
            }
            None => {
                let lease = self.mgr.acquire(last.group.chunk(Role::Gradient), Access::ReadShard)?;
                self.square(&lease, last.group);
                self.mgr.release(lease)?;
            }
        }
        if self.behind.is_some() {
            self.inputs.sum_over_ranks(self.ops.as_ref(), self.slot(last.group))?;
        }
        Ok(Some(last))
    }

    fn square(&self, gradient: &Lease, group: GroupId) {
        match gradient.norm_part() {
            Some(part) => self.ops.square_sum(part, self.slot(group)),
            // The last sum over the ranks is still in it.
            None => self.ops.zero(self.slot(group)),
        }
    }

    /// A group's place in the norm.
    fn slot(&self, group: GroupId) -> View {
        self.inputs.slots().part(u64::from(group.0), 1)
    }

    fn embed(&self, lease: &Lease, micro: u64, out: View) {
        let ids = self.inputs.ids(micro);
        let ops = self.ops.as_ref();
        embedding::forward(ops, &self.model.shape, &ids, self.tensor(lease.view(), Groups::EMBEDDING, 0), out);
    }

    fn block(&self, micro: u64) -> Block<'_> {
        Block {
            ops: self.ops.as_ref(),
            shape: &self.model.shape,
            attention: self.activations.request().attention,
            rope: self.inputs.rope(),
            starts: self.inputs.starts(micro),
        }
    }

    /// The micro-batches of this round that operators are called for.
    fn micros(&self) -> impl Iterator<Item = u64> + use<> {
        let Range { start, end } = self.round;
        let step = if self.rehearsed.is_some() { (end - start).saturating_sub(1).max(1) } else { 1 };
        self.round.clone().step_by(step as usize)
    }

    /// Whether `micro` is one of them.
    const fn computes(&self, micro: u64) -> bool {
        self.rehearsed.is_none() || micro == self.round.start || micro + 1 == self.round.end
    }

    fn head_memory(&self, micro: u64) -> head::Memory {
        self.activations.head(self.memory, self.place(micro), self.batch(micro))
    }

    fn hidden(&self, micro: u64) -> View {
        self.activations.hidden(self.memory, self.place(micro), self.batch(micro))
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
