//! The control plane of a run: what it computes with, how much fixed memory that takes, and the rehearsal from which
//! the runtime plans.
//!
//! A [`Blueprint`] allocates nothing and computes nothing; [`crate::engine::Engine`] does, on its plan.

use crate::{
    activations::{Activations, Keep, Request},
    checkpoint,
    config::ModelConfig,
    estimate::{self, Costs},
    inputs::{self, Inputs},
    loss_scale::Dynamic,
    lr::Schedule,
    model::{
        AttentionKind, Shape,
        groups::{self, Groups},
    },
    optimizer::{Clip, Optimizer},
    rates::Rates,
    step::{Backward, Due, Model, Step},
};
use castor_kernels::{
    Backend, DType, Tier,
    dry::{Dry, DryProfile},
    ops::Classify,
};
use castor_runtime::{
    Category, Pass, StatefulTensorMgr,
    layout::{Formats, Layout, Sharding},
    plan::{Budgets, Fixed, Plan, Rehearse, placed_bytes},
    policy::PlacementPolicy,
};
use std::sync::Arc;

/// Pinned bytes of each of the two pieces in which device memory comes to a snapshot, at most.
const STAGE_BYTES: u64 = 32 << 20;

/// What a run computes with.
#[derive(Clone, Debug)]
pub struct Options {
    /// The model.
    pub config: ModelConfig,
    /// B: most rows of a micro-batch on one rank.
    pub batch: u64,
    /// S
    pub sequence: u64,
    /// Most micro-batches of a step.
    pub micro_batches: u64,
    /// Micro-batches that go through the model together, at most [`Options::micro_batches`].
    pub round: u64,
    /// Whether each micro-batch's gradient is summed over the ranks by itself, where gradients are split over them. All
    /// ranks then take equally many micro-batches a step.
    pub sync_each_batch: bool,
    /// Element types; the parameter's is the compute type.
    pub formats: Formats,
    /// What is split over the ranks.
    pub sharding: Sharding,
    /// Neighbouring ranks that it is split over, the others holding the same again; None: all.
    pub shards: Option<u32>,
    /// What each block keeps for its backward.
    pub keep: Vec<Keep>,
    /// What each block keeps at most in the first of several rounds.
    pub first_keep: Keep,
    /// Whether attention is fused.
    pub fused_attention: bool,
    /// Whether attention's backward gives the same bits every time.
    pub deterministic: bool,
    /// Whether a token attends within its own document only, and positions count from its first token.
    pub document_mask: bool,
    /// Bytes of logits that may exist at once; see [`crate::activations::LOGITS_BYTES`].
    pub logits_bytes: u64,
    /// The optimizer, or none for forward and backward alone.
    pub optimizer: Option<Optimizer>,
    /// Gradients are scaled down to this norm; 0: never.
    pub max_norm: f32,
    /// Whose norm that is.
    pub clip: Clip,
    /// Groups whose updates the host's cores make, the last ones; 0: the device makes all. None with
    /// [`Clip::Lagged`], and only where [`Options::may_update_on_host`].
    pub updates_on_host: u64,
    /// Learning rates.
    pub schedule: Schedule,
    /// Dynamic loss scale (fp16), or none.
    pub loss_scale: Option<Dynamic>,
    /// Seed of stochastic rounding and label sampling.
    pub seed: u64,
    /// Whether the run evaluates.
    pub evaluates: bool,
    /// Whether checkpoints are copied to host memory and written while the run goes on.
    pub snapshots: bool,
}

impl Options {
    /// Whether gradients have homes: all do, unless each is final when it is formed, its update does not wait for the
    /// norm, and nothing else reads it.
    fn keeps_gradients(&self, world: u64) -> bool {
        let read_besides = self.optimizer.is_none_or(|optimizer| optimizer.estimates());
        let final_at_once = self.round >= self.micro_batches && !self.sums_one_by_one(world);
        read_besides || !final_at_once || self.clip == Clip::Exact
    }

    /// Whether each micro-batch's gradient is summed over the `world` ranks by itself.
    fn sums_one_by_one(&self, world: u64) -> bool {
        self.sync_each_batch && self.splits_gradients(world)
    }

    /// Whether all micro-batches must go through the model together, for gradients are split over `world` ranks and
    /// summed over them once.
    pub fn sums_at_once(&self, world: u64) -> bool {
        !self.sync_each_batch && self.splits_gradients(world)
    }

    /// Whether the host's cores may make updates of one of `world` ranks: each group's by itself once the norm is
    /// known, of states and weights that this rank alone has.
    pub fn may_update_on_host(&self, world: u64) -> bool {
        let splits = self.sharding.optimizer && self.shards.map_or(world, u64::from) > 1;
        self.optimizer.is_some() && self.clip == Clip::Exact && (!splits || self.sharding.parameters)
    }

    /// Whether each of `world` ranks keeps a part of the gradients only.
    fn splits_gradients(&self, world: u64) -> bool {
        self.sharding.gradients && self.shards.map_or(world, u64::from) > 1
    }
}

/// Element types of the usual precisions.
///
/// `moments` is the type of both moments (f32, bf16 or Q8). bf16 weights keep a 16-bit remainder as master,
/// f16 weights an f32 master, f32 weights none.
pub const fn formats(parameter: DType, gradient: DType, moments: DType) -> Formats {
    let master = match parameter {
        DType::Bf16 => Some(DType::Rem16),
        DType::F16 => Some(DType::F32),
        _ => None,
    };
    Formats { parameter, gradient, master, first: moments, second: moments }
}

/// What a run computes with, laid out; nothing is allocated.
#[derive(Clone, Debug)]
pub struct Blueprint {
    options: Options,
    pub(crate) model: Model,
    layout: Layout,
    inputs: inputs::Layout,
}

impl Blueprint {
    /// Lays out a run of `backend.world()` ranks. `backend` is the one that will run it: its operators say how much
    /// scratch they want.
    pub fn new(options: Options, backend: &dyn Backend) -> Self {
        Blueprint::for_world(options, backend, backend.world())
    }

    /// As [`Blueprint::new`], for a run of `world` ranks like this one.
    pub fn for_world(options: Options, backend: &dyn Backend, world: u32) -> Self {
        let shape = Shape::from(&options.config);
        let world = u64::from(world);
        let groups = Groups::new(&shape);
        let activations = Activations::new(
            Request {
                shape,
                attention: AttentionKind {
                    sequence: options.sequence,
                    fused: options.fused_attention,
                    deterministic: options.deterministic,
                    documents: options.document_mask,
                },
                batch: options.batch,
                micro_batches: options.round,
                dtype: options.formats.parameter,
                keep: options.keep.clone(),
                first_keep: options.first_keep,
                logits_bytes: options.logits_bytes,
            },
            backend,
        );
        let shards = options.shards.map_or(world, u64::from);
        let mut layout = Layout::replicated(groups::specs(&shape), options.formats, options.sharding, world, shards);
        layout.keeps_gradients = options.keeps_gradients(world);
        let inputs = inputs::Layout {
            sequence: options.sequence,
            batch: options.batch,
            micro_batches: options.micro_batches,
            vocabulary: shape.vocabulary,
            groups: groups.count(),
            head_dim: shape.head_dim,
            world,
            documents: options.document_mask,
        };
        let sync_each_batch = options.sums_one_by_one(world);
        let first_round = activations.first_round();
        let updated_on_host = groups.count() - options.updates_on_host.min(groups.count())..groups.count();
        let model = Model { shape, groups, activations, first_round, sync_each_batch, updated_on_host };
        Blueprint { options, model, layout, inputs }
    }

    /// What the run computes with.
    pub const fn options(&self) -> &Options {
        &self.options
    }

    /// Layout of the model's data.
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Layout of the activations.
    pub const fn activations(&self) -> &Activations {
        &self.model.activations
    }

    /// Groups and names of the model's tensors.
    pub const fn groups(&self) -> &Groups {
        &self.model.groups
    }

    /// Fixed memory beside the model's data.
    pub fn fixed(&self) -> Fixed {
        let mut host = vec![(Category::Inputs, self.inputs.host_bytes())];
        if self.options.snapshots {
            let largest = self.layout.chunk_ids().map(|chunk| self.layout.stored_bytes(chunk)).max().unwrap_or(0);
            let stage = placed_bytes(Tier::Host, largest.min(STAGE_BYTES));
            host.push((Category::Snapshot, 2 * stage));
        }
        Fixed {
            device: vec![
                (Category::Activations, self.model.activations.bytes()),
                (Category::Inputs, self.inputs.device_bytes()),
            ],
            host,
            snapshot: if self.options.snapshots { checkpoint::rank_bytes(&self.layout) } else { 0 },
        }
    }

    /// What its ticks cost at these rates.
    pub fn costs(&self, rates: &Rates) -> Costs {
        Costs::new(&self.options, &self.layout, rates)
    }

    /// The passes that the run has.
    pub fn passes(&self) -> Vec<Pass> {
        let optimizer = self.options.optimizer;
        let has = |pass: &Pass| match pass {
            Pass::Train => true,
            Pass::Update => optimizer.is_some() && self.options.clip == Clip::Exact,
            Pass::Hessian => optimizer.is_some_and(|optimizer| optimizer.estimates()),
            Pass::Evaluate => self.options.evaluates,
        };
        Pass::ALL.into_iter().filter(has).collect()
    }

    /// Goes through one pass, with `mgr` on a backend that only counts. `costs`: what the ticks would take.
    ///
    /// # Errors
    /// If the manager finds no room.
    pub fn rehearse(&self, mgr: &mut StatefulTensorMgr, pass: Pass, costs: &Costs) -> castor_runtime::Result<()> {
        let mut inputs = self.inputs_in(mgr);
        let what = Classify::Gradient { scale: 1.0 };
        let update = self.options.optimizer.map(|optimizer| Due { update: optimizer.update(0.0, 0), seed: 0 });
        let (due, behind) = if self.options.clip == Clip::Lagged { (None, update) } else { (update, None) };
        inputs.pretend(match pass {
            Pass::Train => self.options.micro_batches,
            Pass::Evaluate => self.options.round,
            Pass::Hessian | Pass::Update => 1,
        });
        let mut step = Step::rehearse(mgr, &self.model, &inputs, pass, costs);
        match pass {
            Pass::Train => {
                let backward = Backward { what, behind };
                step.rounds(self.options.round, due.as_ref(), || Ok::<_, castor_runtime::Error>(backward))?;
                step.norm(self.options.max_norm, 1.0, inputs.control())?;
            }
            Pass::Hessian => {
                step.forward(None)?;
                step.backward(Backward { what, behind: None })?;
                step.norm(0.0, 1.0, inputs.hessian_control())?;
                step.hessian(0.0, 1.0, 1.0)?;
            }
            Pass::Evaluate => step.evaluate(&mut |_, _, _| Ok(()))?,
            Pass::Update => {
                if let Some(due) = &due {
                    step.update(due)?;
                }
            }
        }
        step.end()
    }

    /// Plans the run on `backend`, which has these `rates`, under `budgets`, by rehearsing it on a backend that only
    /// counts.
    ///
    /// # Errors
    /// [`castor_runtime::Error::OutOfRoom`] if it does not fit.
    pub fn plan(
        &self,
        backend: &dyn Backend,
        rates: &Rates,
        policy: &dyn PlacementPolicy,
        budgets: Budgets,
        lookahead_bytes: Option<u64>,
        length: Rehearse,
    ) -> castor_runtime::Result<Plan> {
        let device = backend.device();
        let profile = DryProfile {
            workspace_bytes: backend.workspace_bytes(),
            shards: self.options.shards,
            ..DryProfile::default()
        };
        let world = self.layout.world as u32;
        let rank = backend.rank().min(world - 1);
        let dry = || -> Arc<dyn Backend> { Arc::new(Dry::new(world, rank, profile.clone())) };
        let costs = self.costs(rates);
        Plan::make(
            &self.layout,
            self.fixed(),
            policy,
            budgets,
            lookahead_bytes,
            estimate::pace(rates, self.options.formats.first),
            device.overhead_bytes,
            &dry,
            &self.passes(),
            &|manager, pass| self.rehearse(manager, pass, &costs),
            length,
        )
    }

    /// The inputs' places in a manager's fixed memory.
    pub(crate) fn inputs_in(&self, mgr: &StatefulTensorMgr) -> Inputs {
        Inputs::new(self.inputs, mgr.fixed(Tier::Device, Category::Inputs), mgr.fixed(Tier::Host, Category::Inputs))
    }
}
