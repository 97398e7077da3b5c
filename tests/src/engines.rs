//! Small models on the CPU backend, each rank a thread of this process: the same run in many settings, and what
//! came of it in bits.
//!
//! Owns the model, the data and the loop. It compares nothing: the laws are the tests' business.

use castor_kernels::cpu::{Cpu, CpuOptions};
use castor_kernels::link::{Link, LinkOptions};
use castor_kernels::{Backend, DType, rng};
use castor_runtime::layout::Sharding;
use castor_runtime::ledger::Ledger;
use castor_runtime::plan::{Budgets, Plan, Rehearse};
use castor_runtime::policy::PlacementPolicy;
use castor_runtime::transfer::Traffic;
use castor_runtime::{GroupId, Pass};
use castor_trainer::activations::{Keep, LOGITS_BYTES};
use castor_trainer::blueprint::{Blueprint, Options, formats};
use castor_trainer::config::{Family, ModelConfig, RopeScaling};
use castor_trainer::engine::{Engine, StepInputs, StepResult};
use castor_trainer::inputs::MicroBatch;
use castor_trainer::loss_scale::Dynamic;
use castor_trainer::lr::{Convention, Decay, Schedule};
use castor_trainer::optimizer::{Clip, Optimizer};
use castor_trainer::rates::Rates;
use castor_trainer::weights::RandomWeights;
use std::sync::Arc;

/// S: tokens of a row.
pub const SEQUENCE: u64 = 16;
/// Rows of a step, over all ranks and micro-batches: 1, 2, 3 and 4 ranks get equally many.
pub const ROWS: u64 = 12;
/// Micro-batches of a step.
pub const MICROS: u64 = 3;
/// Label that does not count.
const IGNORED: i32 = -100;

/// What is sharded, from nothing to everything.
pub const SHARDINGS: [Sharding; 4] = [
    Sharding { parameters: false, gradients: false, optimizer: false },
    Sharding { parameters: false, gradients: false, optimizer: true },
    Sharding { parameters: false, gradients: true, optimizer: true },
    Sharding { parameters: true, gradients: true, optimizer: true },
];

/// A Llama of three blocks with grouped queries and a vocabulary that no number of ranks divides.
pub fn model(tied: bool) -> ModelConfig {
    ModelConfig {
        family: Family::Llama,
        vocab_size: 131,
        hidden_size: 48,
        intermediate_size: 80,
        num_hidden_layers: 3,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 12,
        rms_norm_eps: 1e-5,
        rope_theta: 1e4,
        rope_scaling: RopeScaling::Default,
        max_position_embeddings: 64,
        attention_bias: false,
        mlp_bias: false,
        sliding_window: None,
        tie_word_embeddings: tied,
        initializer_range: 0.05,
        token_ids: Default::default(),
    }
}

/// AdamW as most runs use it.
pub const ADAMW: Optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
/// Sophia with an estimate at every second step.
pub const SOPHIA: Optimizer = Optimizer::Sophia { beta1: 0.965, beta2: 0.99, rho: 0.04, weight_decay: 0.1, every: 2 };

/// A run of `world` ranks in which everything is sharded and kept. `dtype` is that of weights and activations;
/// gradients and moments are f32.
pub fn options(world: u64, dtype: DType, optimizer: Optimizer, tied: bool) -> Options {
    let config = model(tied);
    Options {
        batch: (ROWS / world).div_ceil(MICROS),
        sequence: SEQUENCE,
        micro_batches: MICROS,
        round: MICROS,
        sync_each_batch: false,
        formats: formats(dtype, DType::F32, DType::F32),
        sharding: SHARDINGS[3],
        shards: None,
        keep: vec![Keep::All; config.num_hidden_layers as usize],
        first_keep: Keep::All,
        fused_attention: true,
        document_mask: false,
        deterministic: true,
        logits_bytes: LOGITS_BYTES,
        optimizer: Some(optimizer),
        max_norm: 1.0,
        clip: Clip::Exact,
        updates_on_host: 0,
        schedule: Schedule {
            base: 3e-3,
            decay: Decay::Constant,
            convention: Convention::HuggingFace,
            min_ratio: 0.0,
            warmup: 0,
            total: 1,
        },
        loss_scale: (dtype == DType::F16).then(Dynamic::default),
        seed: 5,
        evaluates: false,
        snapshots: false,
        config,
    }
}

/// A run to be made.
#[derive(Clone)]
pub struct Setup<'a> {
    /// What is computed.
    pub options: Options,
    /// Ranks.
    pub world: u32,
    /// Who places.
    pub policy: &'a (dyn PlacementPolicy + Sync),
    /// Under which budgets, each rank.
    pub budgets: Budgets,
    /// Bytes fetched ahead; None: the plan's.
    pub prefetch: Option<u64>,
}

/// What came of a run on one rank.
pub struct Run {
    /// Each step's loss.
    pub losses: Vec<f64>,
    /// Losses, gradient norms and final weights in bits.
    pub bits: Vec<u64>,
    /// Bytes per link of each step.
    pub traffic: Vec<Traffic>,
    /// What was planned.
    pub plan: Plan,
    /// What was reserved.
    pub ledger: Ledger,
    /// Uses that the record did not foresee.
    pub departures: u64,
}

/// More than the model needs.
pub fn plenty() -> Budgets {
    Budgets { device: 16 << 20, host: 16 << 20, ..Budgets::default() }
}

/// A step's rows, as one rank sees them.
pub struct Rows {
    ids: Vec<i32>,
    labels: Vec<i32>,
    micro_tokens: usize,
    /// Tokens that count over all ranks.
    pub tokens: u64,
}

impl Rows {
    /// The rows of step number `step` for `rank` of `world`. Every row has another number of labels that count.
    pub fn new(step: u64, rank: u64, world: u64, vocabulary: u64) -> Rows {
        let part = ROWS / world;
        let mut rows = Rows {
            ids: Vec::new(),
            labels: Vec::new(),
            micro_tokens: (part.div_ceil(MICROS) * SEQUENCE) as usize,
            tokens: 0,
        };
        for row in 0..ROWS {
            let masked = (row % 5) as usize;
            rows.tokens += SEQUENCE - (masked as u64).max(1);
            if row / part != rank {
                continue;
            }
            let ids = (0..SEQUENCE).map(|at| (rng::bits(step * ROWS + row, at, 3) % vocabulary) as i32);
            let start = rows.ids.len();
            rows.ids.extend(ids);
            rows.labels.extend_from_slice(&rows.ids[start..]);
            rows.labels[start..start + masked].fill(IGNORED);
        }
        rows
    }

    /// The micro-batches.
    pub fn micros(&self) -> impl Iterator<Item = MicroBatch<'_>> {
        let labels = self.labels.chunks(self.micro_tokens);
        self.ids.chunks(self.micro_tokens).zip(labels).map(|(ids, labels)| MicroBatch { ids, labels, starts: None })
    }
}

/// One rank's backend.
fn backend(device: u64, link: Option<Link>) -> Arc<dyn Backend> {
    let options = CpuOptions { device_bytes: Some(device), threads: Some(1), link, ..CpuOptions::default() };
    Arc::new(Cpu::new(options).expect("threads"))
}

impl Setup<'_> {
    /// The plan of the first rank.
    ///
    /// # Errors
    /// If it does not fit.
    pub fn plan(&self) -> castor_runtime::Result<Plan> {
        let backend = backend(self.budgets.device, None);
        let blueprint = Blueprint::for_world(self.options.clone(), &*backend, self.world);
        blueprint.plan(
            &*backend,
            &Rates::assumed("cpu"),
            self.policy,
            self.budgets.clone(),
            self.prefetch,
            Rehearse::ToRun,
        )
    }

    /// An engine with random weights on the backend of one rank.
    pub fn engine(&self, link: Option<Link>) -> Engine {
        let backend = backend(self.budgets.device, link);
        let blueprint = Blueprint::new(self.options.clone(), &*backend);
        let plan = blueprint
            .plan(&*backend, &Rates::assumed("cpu"), self.policy, self.budgets.clone(), self.prefetch, Rehearse::ToRun)
            .expect("it fits");
        let mut engine = Engine::new(backend, &blueprint, plan).expect("memory");
        engine.load(&RandomWeights::new(&self.options.config, 7)).expect("weights");
        engine
    }

    /// `work` on every rank, each in a thread of its own; its answers by rank.
    pub fn on_ranks<T: Send>(&self, work: impl Fn(u64, Engine) -> T + Sync) -> Vec<T> {
        if self.world == 1 {
            return vec![work(0, self.engine(None))];
        }
        let options = LinkOptions { shards: self.options.shards, ..LinkOptions::default() };
        let links = Link::in_process(self.world, options).expect("sockets");
        std::thread::scope(|scope| {
            let work = &work;
            let ranks = links.into_iter().enumerate();
            let ranks: Vec<_> =
                ranks.map(|(rank, link)| scope.spawn(move || work(rank as u64, self.engine(Some(link))))).collect();
            ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
        })
    }

    /// Trains `steps` steps.
    pub fn train(&self, steps: u64) -> Vec<Run> {
        self.on_ranks(|rank, mut engine| {
            let mut results: Vec<StepResult> = Vec::new();
            let mut traffic = Vec::new();
            for step in 0..steps {
                let rows = Rows::new(step, rank, u64::from(self.world), self.options.config.vocab_size);
                let micros: Vec<_> = rows.micros().collect();
                let inputs = StepInputs { micros: &micros, tokens: rows.tokens };
                results.extend(engine.step(&inputs).expect("a step"));
                traffic.push(engine.manager().last_traffic(Pass::Train));
            }
            results.extend(engine.finish().expect("the last step"));
            let mut bits: Vec<u64> = results.iter().flat_map(|r| [r.loss.to_bits(), r.grad_norm.to_bits()]).collect();
            for group in 0..engine.groups().count() as u32 {
                let weights = engine.read_group(GroupId(group)).expect("weights");
                bits.extend(weights.iter().map(|weight| u64::from(weight.to_bits())));
            }
            let manager = engine.manager();
            Run {
                losses: results.iter().map(|r| r.loss).collect(),
                bits,
                traffic,
                plan: manager.plan().clone(),
                ledger: *manager.ledger(),
                departures: manager.departures(),
            }
        })
    }

    /// The least device budget under which this setup plans, to 2 KiB.
    pub fn least_device(&self) -> u64 {
        self.least(|setup, bytes| setup.budgets.device = bytes)
    }

    /// The least host budget under which this setup plans, to 2 KiB.
    pub fn least_host(&self) -> u64 {
        self.least(|setup, bytes| setup.budgets.host = bytes)
    }

    fn least(&self, set: impl Fn(&mut Self, u64)) -> u64 {
        let (mut low, mut fits) = (0, 4 << 20);
        let mut setup = self.clone();
        while fits - low > 2048 {
            let middle = (low + fits) / 2;
            set(&mut setup, middle);
            match setup.plan() {
                Ok(_) => fits = middle,
                Err(_) => low = middle,
            }
        }
        fits
    }
}
