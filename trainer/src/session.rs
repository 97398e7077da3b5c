//! From settings to a run: the hardware of this rank, its budgets, the policy of the plugin, the plan.
//!
//! Used by every command that computes ([`crate::train`], [`crate::plan`], parity). It decides nothing that
//! the settings or the machine have not decided, except what `auto` asks it to.

use crate::activations::{Keep, LOGITS_BYTES};
use crate::agreement;
use crate::blueprint::{self, Blueprint, Options};
use crate::config::ModelConfig;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::estimate::Estimate;
use crate::loss_scale::Dynamic;
use crate::lr::{Convention, Decay, Schedule};
use crate::optimizer::Optimizer;
use crate::parity::{self, Batch};
use crate::plugin::Placement;
use crate::rates::{RateCache, Rates};
use crate::rendezvous::World;
use crate::settings::{
    AsyncSave, BackendKind, Every, LrConvention, OptimizerKind, Precision, Recompute, ScheduleKind, Settings,
    ShardSize, StateFormat,
};
use crate::source::TensorSource;
use crate::weights::{self, RandomWeights};
use castor_kernels::cpu::{Cpu, CpuOptions};
use castor_kernels::link::{Link, LinkOptions};
use castor_kernels::{Backend, DType, Tier};
use castor_runtime::layout::Sharding;
use castor_runtime::plan::{Budgets, Plan, Rehearse};
use castor_runtime::policy::{AutoPolicy, DevicePolicy, HostPolicy, PlacementPolicy, StaticPolicy};
use castor_runtime::{Bytes, limits};
use std::path::Path;
use std::sync::Arc;

/// This rank's hardware and what it may use of it.
pub struct Hardware {
    /// The backend.
    pub backend: Arc<dyn Backend>,
    /// Bytes per tier, of which every rank has as many.
    pub budgets: Budgets,
    /// What it does per second, the same numbers on all ranks.
    pub rates: Rates,
    /// What to tell the user.
    pub notices: Vec<String>,
}

impl Hardware {
    /// Opens the backend that `settings` ask for, as a rank of `world`.
    ///
    /// # Errors
    /// If CUDA is asked for and not there, a peer does not appear, or a limit cannot be read.
    pub fn open(settings: &Settings, world: &World) -> Result<Hardware> {
        let (backend, notices) = backend(settings, world)?;
        let budgets = budgets(settings, world, &*backend)?;
        let cache = RateCache::path().as_deref().map(RateCache::read).unwrap_or_default();
        let known = Rates::known(&backend.device(), settings.memory.nvme.as_deref(), &cache);
        let known = if backend.device().backend == "cpu" { known.within(&settings.backend.emulated) } else { known };
        let (rates, budgets) = agreement::common(&*backend, known, budgets)?;
        Ok(Hardware { backend, budgets, rates, notices })
    }
}

/// The backend that `settings` ask for, as a rank of `world`, and what to tell the user.
///
/// # Errors
/// If CUDA is asked for and not there, or a peer does not appear.
pub fn backend(settings: &Settings, world: &World) -> Result<(Arc<dyn Backend>, Vec<String>)> {
    let mut notices = Vec::new();
    let link = match world.world {
        1 => None,
        ranks => {
            let master = world.meeting_address()?;
            let deadline = settings.backend.timeout.unwrap_or(world.timeout);
            // Ranks of other hosts may be started much later, or not at all: nobody shall wonder what is waited for.
            if world.local_rank == 0 && world.local_world < world.world {
                eprintln!(
                    "castor: rank {} of {ranks} waits for the others at {}, at most {} s",
                    world.rank,
                    world.master,
                    deadline.as_secs()
                );
            }
            let options = LinkOptions { deadline, shards: shards(settings, ranks, world.local_world)? };
            Some(Link::rendezvous(world.rank, ranks, master, deadline, options)?)
        }
    };
    let backend: Arc<dyn Backend> = match (settings.backend.kind, castor_kernels::cuda::device_count()) {
        (BackendKind::Cpu, _) => Arc::new(cpu(settings, world, link)?),
        (BackendKind::Auto, Err(reason)) => {
            notices.push(format!("no CUDA device, so the CPU computes: {reason}"));
            Arc::new(cpu(settings, world, link)?)
        }
        (BackendKind::Cuda, Err(reason)) => {
            return Err(Error::Usage(format!("--backend cuda: {reason}; without a GPU, --backend cpu trains too")));
        }
        (BackendKind::Cuda | BackendKind::Auto, Ok(devices)) => cuda(settings, world, devices, link)?,
    };
    Ok((backend, notices))
}

fn cuda(settings: &Settings, world: &World, devices: usize, link: Option<Link>) -> Result<Arc<dyn Backend>> {
    let ordinal = world.local_rank as usize;
    if ordinal >= devices {
        return Err(Error::Usage(format!(
            "local rank {ordinal} has no GPU: this host has {devices}; start at most as many ranks here"
        )));
    }
    let options = castor_kernels::cuda::CudaOptions {
        ordinal,
        deterministic: settings.backend.deterministic,
        timed: true,
        link,
        ..Default::default()
    };
    Ok(Arc::new(castor_kernels::cuda::Cuda::new(options)?))
}

fn cpu(settings: &Settings, world: &World, link: Option<Link>) -> Result<Cpu> {
    let host = limits::host_available_bytes().unwrap_or(u64::MAX) / u64::from(world.local_world);
    let rate = |gb_per_s: Option<f64>| gb_per_s.map(|rate| rate * 1e9);
    let emulated = settings.backend.emulated;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(Cpu::new(CpuOptions {
        device_bytes: Some(settings.memory.device.bytes(host / 2)),
        host_to_device_bytes_per_s: rate(emulated.h2d),
        device_to_host_bytes_per_s: rate(emulated.d2h),
        nvme_read_bytes_per_s: rate(emulated.nvme_read),
        nvme_write_bytes_per_s: rate(emulated.nvme_write),
        threads: Some((cores / world.local_world as usize).max(1)),
        link,
        ..CpuOptions::default()
    })?)
}

/// What this rank may use: what the settings say of what the machine has, shared by the ranks of this host.
fn budgets(settings: &Settings, world: &World, backend: &dyn Backend) -> Result<Budgets> {
    let memory = &settings.memory;
    let local = u64::from(world.local_world);
    let device = backend.device();
    let host = limits::host_available_bytes().unwrap_or(u64::MAX) / local;
    // The emulated device is host memory too.
    let host = if device.backend == "cpu" { host / 2 } else { host };
    let nvme = match &memory.nvme {
        None => 0,
        Some(folder) => memory.nvme_capacity.bytes(disk_room(folder)? / local),
    };
    Ok(Budgets {
        device: memory.device.bytes(device.available_bytes + device.overhead_bytes),
        host: memory.host.bytes(host),
        nvme,
        nvme_folder: memory.nvme.clone(),
    })
}

/// Bytes that the disk of the NVMe tier's folder has room for.
///
/// # Errors
/// [`Error::Usage`] if it is not a folder that can be written.
pub fn disk_room(folder: &Path) -> Result<u64> {
    let refused = |reason: &dyn std::fmt::Display| {
        Error::Usage(format!("--nvme {}: {reason}; give an existing folder that can be written", folder.display()))
    };
    let room = limits::disk_available_bytes(folder).map_err(|error| refused(&error))?;
    if !folder.is_dir() {
        return Err(refused(&"it is not a folder"));
    }
    tempfile::tempfile_in(folder).map_err(|error| refused(&format!("no file can be made in it ({error})")))?;
    Ok(room)
}

/// The policy of the plugin, with [`AutoPolicy::window`].
fn policy(settings: &Settings, window: f64) -> Box<dyn PlacementPolicy> {
    match settings.memory.plugin.placement {
        Placement::Device => Box::new(DevicePolicy),
        Placement::OptimizerOnHost => Box::new(HostPolicy { parameters: false, optimizer: true }),
        Placement::Host | Placement::HostFirst => Box::new(HostPolicy { parameters: true, optimizer: true }),
        Placement::DeviceFirst | Placement::Auto => Box::new(AutoPolicy { window }),
        Placement::Static => Box::new(StaticPolicy {
            offload_param_frac: settings.memory.offload_param_frac,
            offload_optim_frac: settings.memory.offload_optim_frac,
        }),
    }
}

/// How many neighbouring ones of `world` ranks, of which a host has `local`, data is split over; None: all.
///
/// # Errors
/// [`Error::Usage`] if the ranks are not whole groups.
pub fn shards(settings: &Settings, world: u32, local: u32) -> Result<Option<u32>> {
    let wanted = match settings.memory.shard_size {
        ShardSize::All => return Ok(None),
        ShardSize::Host => local,
        ShardSize::Ranks(ranks) => ranks,
    };
    if !world.is_multiple_of(wanted) {
        return Err(Error::Usage(format!(
            "--shard_size {wanted}: {world} ranks are not whole groups of {wanted}; give a number that divides {world}"
        )));
    }
    Ok((wanted < world).then_some(wanted))
}

/// What the run computes with, all but the recompute levels, which [`plan`] decides, and the number of
/// [`shards`].
pub fn options(
    settings: &Settings,
    config: ModelConfig,
    sequence: u64,
    batch: u64,
    micros: u64,
    steps: u64,
) -> Options {
    let precision = &settings.precision;
    let parameter = match precision.compute {
        Precision::Fp32 => DType::F32,
        Precision::Fp16 => DType::F16,
        Precision::Bf16 => DType::Bf16,
    };
    let gradient = if precision.narrow_gradients { parameter } else { DType::F32 };
    let moments = match precision.states {
        StateFormat::Fp32 => DType::F32,
        StateFormat::Bf16 => DType::Bf16,
        StateFormat::Int8 => DType::Q8,
    };
    let o = &settings.optimizer;
    let (beta1, beta2) = (f64::from(o.betas.0), f64::from(o.betas.1));
    let weight_decay = f64::from(o.weight_decay);
    let optimizer = match o.kind {
        OptimizerKind::AdamW => Optimizer::AdamW { beta1, beta2, eps: f64::from(o.eps), weight_decay },
        OptimizerKind::Sophia => {
            Optimizer::Sophia { beta1, beta2, rho: f64::from(o.sophia_rho), weight_decay, every: o.hessian_interval }
        }
    };
    let schedule = &settings.schedule;
    let scale = &precision.loss_scale;
    let preset = settings.memory.plugin.sharding;
    Options {
        batch,
        sequence,
        micro_batches: micros,
        round: micros,
        sync_each_batch: settings.memory.sync_each_batch,
        formats: blueprint::formats(parameter, gradient, moments),
        shards: None,
        sharding: Sharding { parameters: preset.parameters, gradients: preset.gradients, optimizer: preset.optimizer },
        keep: vec![Keep::Block; config.num_hidden_layers as usize],
        first_keep: Keep::All,
        fused_attention: settings.memory.flash_attention,
        document_mask: settings.data.document_mask,
        deterministic: settings.backend.deterministic,
        logits_bytes: LOGITS_BYTES,
        optimizer: Some(optimizer),
        max_norm: o.grad_clip.unwrap_or(0.0),
        schedule: Schedule {
            base: schedule.lr,
            decay: match schedule.kind {
                ScheduleKind::Linear => Decay::Linear,
                ScheduleKind::Cosine => Decay::Cosine,
                ScheduleKind::Constant => Decay::Constant,
            },
            convention: match schedule.convention {
                LrConvention::HuggingFace => Convention::HuggingFace,
                LrConvention::ColossalAi => Convention::ColossalAi,
                LrConvention::DeepSpeedLog => Convention::DeepSpeedLog,
                LrConvention::DeepSpeedLinear => Convention::DeepSpeedLinear,
            },
            min_ratio: schedule.min_lr_ratio,
            warmup: schedule.warmup.steps(steps),
            total: steps,
        },
        loss_scale: (precision.compute == Precision::Fp16).then(|| Dynamic {
            initial: scale.fixed.unwrap_or(scale.initial),
            window: scale.growth_interval,
            hysteresis: scale.hysteresis,
            floor: scale.fixed.unwrap_or(scale.min),
            ceiling: scale.fixed.unwrap_or(scale.max),
        }),
        seed: settings.seed,
        evaluates: false,
        snapshots: false,
        config,
    }
}

/// Sizes of the window to try, the usual one first; see [`AutoPolicy::window`].
const WINDOWS: [f64; 3] = [AutoPolicy::WINDOW, 1.5, 1.1];

/// A way of running that fits.
struct Fitting {
    step_s: f64,
    blueprint: Blueprint,
    window: f64,
}

/// Plans the run for one of `world` ranks. What the settings leave open, how much each block keeps and how many
/// micro-batches go through the model together, is chosen for the least estimated time among the plans that fit.
///
/// # Errors
/// [`Error::DoesNotFit`] with numbers.
pub fn plan(
    settings: &Settings,
    options: Options,
    hardware: &Hardware,
    world: u32,
) -> Result<(Blueprint, Plan, Estimate)> {
    let (backend, budgets, rates) = (&*hardware.backend, &hardware.budgets, &hardware.rates);
    let mut candidates: Vec<(f64, Blueprint)> = Vec::new();
    for round in rounds(&options, world) {
        for keep in levels(settings.memory.recompute, options.config.num_hidden_layers as usize) {
            for first_keep in first_levels(settings.memory.recompute, &keep, round < options.micro_batches) {
                let options = Options { round, keep: keep.clone(), first_keep, ..options.clone() };
                let blueprint = Blueprint::for_world(options, backend, world);
                candidates.push((blueprint.costs(rates).step_s(blueprint.options()), blueprint));
            }
        }
    }
    // The fewest operations first, so that the search ends where no plan to come can be faster than the best.
    candidates.sort_by(|a, b| a.0.total_cmp(&b.0));
    let plan = |blueprint: &Blueprint, policy: &dyn PlacementPolicy, length| {
        let prefetch = settings.memory.prefetch;
        blueprint.plan(backend, rates, policy, budgets.clone(), prefetch, length).map_err(Error::from)
    };
    let (mut fitting, mut refusal): (Vec<Fitting>, _) = (Vec::new(), None);
    for (floor_s, blueprint) in candidates {
        if fitting.iter().any(|fitting| fitting.step_s <= floor_s * 1.001) {
            break;
        }
        match plan(&blueprint, &*policy(settings, WINDOWS[0]), Rehearse::ToCompare) {
            Ok(plan) => {
                fitting.push(Fitting { step_s: Estimate::of(&plan).time.step_s, blueprint, window: WINDOWS[0] })
            }
            // The last refusal is that of the plan that computes most again, and so takes the least memory.
            Err(error @ Error::DoesNotFit(_)) => refusal = Some(error),
            Err(other) => return Err(other),
        }
    }
    fitting.sort_by(|a, b| a.step_s.total_cmp(&b.step_s));
    // A smaller window leaves more room for homes; the best are tried with that too.
    let streams =
        |fitting: &Fitting| fitting.step_s > 1.005 * fitting.blueprint.costs(rates).step_s(fitting.blueprint.options());
    if matches!(settings.memory.plugin.placement, Placement::DeviceFirst | Placement::Auto) {
        let best: Vec<Blueprint> =
            fitting.iter().take(3).filter(|best| streams(best)).map(|best| best.blueprint.clone()).collect();
        let smaller = |best: Blueprint| WINDOWS[1..].iter().map(move |window| (best.clone(), *window));
        for (blueprint, window) in best.into_iter().flat_map(smaller) {
            if let Ok(plan) = plan(&blueprint, &*policy(settings, window), Rehearse::ToCompare) {
                fitting.push(Fitting { step_s: Estimate::of(&plan).time.step_s, blueprint, window });
            }
        }
        fitting.sort_by(|a, b| a.step_s.total_cmp(&b.step_s));
    }
    // A longer rehearsal can find a window too full of holes that a short one found good.
    for Fitting { blueprint, window, .. } in fitting {
        match plan(&blueprint, &*policy(settings, window), Rehearse::ToRun) {
            Ok(plan) => {
                let estimate = Estimate::of(&plan);
                return Ok((blueprint, plan, estimate));
            }
            Err(error @ Error::DoesNotFit(_)) => refusal = Some(error),
            Err(other) => return Err(other),
        }
    }
    Err(match refusal {
        Some(Error::DoesNotFit(reason)) => Error::DoesNotFit(format!("{reason}{}", way_out(&options, world))),
        other => other.unwrap_or_else(|| Error::DoesNotFit("there is nothing to plan".into())),
    })
}

/// What else to try where all micro-batches had to go together for the sake of gradients that are split over ranks.
fn way_out(options: &Options, world: u32) -> &'static str {
    let at_once = options.splits_gradients(world.into()) && !options.sync_each_batch;
    if !at_once || options.micro_batches == 1 || options.config.tie_word_embeddings {
        return "";
    }
    "; gradients are split over ranks, so that all micro-batches go through the model together: --sync_each_batch \
     sums each one's over the ranks by itself and lets fewer go together, and so do --plugin zero1 and \
     --shard_size 1, which keep gradients whole"
}

/// The way out where a snapshot was asked for.
const WITHOUT: &str = "--async_save off takes no snapshot";

/// As [`plan`], for a run that saves as `settings` say: with snapshots if `--async_save` asks for them, or leaves it open
/// and the host has room for them beside the plan. Also what to tell the user.
///
/// # Errors
/// As [`plan`].
pub fn plan_saving(
    settings: &Settings,
    options: Options,
    hardware: &Hardware,
    world: u32,
) -> Result<(Blueprint, Plan, Estimate, Option<String>)> {
    let wanted = if settings.output.save == Every::Never { AsyncSave::Off } else { settings.output.async_save };
    let options = Options { snapshots: wanted == AsyncSave::On, ..options };
    let (blueprint, plan, estimate) = plan(settings, options, hardware, world).map_err(|error| match error {
        Error::DoesNotFit(reason) if wanted == AsyncSave::On => Error::DoesNotFit(format!("{reason}; {WITHOUT}")),
        other => other,
    })?;
    if wanted != AsyncSave::Auto {
        return Ok((blueprint, plan, estimate, None));
    }
    let backend = &*hardware.backend;
    let with = Blueprint::for_world(Options { snapshots: true, ..blueprint.options().clone() }, backend, world);
    // Nothing of the run's own may give way to it.
    let beside = WINDOWS.iter().find_map(|window| {
        let (policy, prefetch) = (policy(settings, *window), settings.memory.prefetch);
        let beside = with.plan(backend, &hardware.rates, &*policy, hardware.budgets.clone(), prefetch, Rehearse::ToRun);
        beside.ok().filter(|beside| beside.placement == plan.placement)
    });
    match beside {
        Some(beside) => Ok((with, beside, estimate, None)),
        None => {
            let left = hardware.budgets.host.saturating_sub(plan.peak(Tier::Host));
            let said = format!(
                "a save will hold the run until it is on disk: a snapshot takes {} of host memory and {} are left beside \
                 the plan; --async_save on makes room for it",
                Bytes(with.fixed().snapshot),
                Bytes(left)
            );
            Ok((blueprint, plan, estimate, Some(said)))
        }
    }
}

/// Numbers of micro-batches that may go through the model together: all of a step's, or fewer, which take less
/// activation memory. A gradient that is split over ranks is summed over them once, unless each micro-batch's is by
/// itself; and a tied table's gradient is summed over the head's part and then the embedding's, which rounds would
/// interleave (L6): there all go together.
fn rounds(options: &Options, world: u32) -> Vec<u64> {
    let all = options.micro_batches;
    let at_once = options.splits_gradients(world.into()) && !options.sync_each_batch;
    if options.config.tie_word_embeddings || at_once {
        return vec![all];
    }
    let mut rounds: Vec<u64> = [all, all.div_ceil(2), all.div_ceil(4), 1].into();
    rounds.dedup();
    rounds
}

/// Recompute levels of all blocks to choose from, most memory first. Between two levels a part of the blocks is
/// already at the lower one.
fn levels(recompute: Recompute, blocks: usize) -> Vec<Vec<Keep>> {
    match recompute {
        Recompute::None => vec![vec![Keep::All; blocks]],
        Recompute::Selective => vec![vec![Keep::Selective; blocks]],
        Recompute::Full => vec![vec![Keep::Block; blocks]],
        Recompute::Auto => {
            let most = (Keep::ALL.len() - 1) * blocks;
            let step = (blocks / 8).max(1);
            (0..=most.div_ceil(step))
                .map(|index| {
                    let position = (index * step).min(most);
                    let (level, lower) = (position / blocks, position % blocks);
                    (0..blocks).map(|block| Keep::ALL[level + usize::from(block < lower)]).collect()
                })
                .collect()
        }
    }
}

/// What blocks may keep at most in the first of several rounds: as much as in all, or their input alone.
fn first_levels(recompute: Recompute, keep: &[Keep], several: bool) -> Vec<Keep> {
    let less = several && recompute == Recompute::Auto && keep.iter().any(|level| *level != Keep::Block);
    if less { vec![Keep::All, Keep::Block] } else { vec![Keep::All] }
}

/// An engine whose weights are still undefined.
///
/// # Errors
/// If memory is refused.
pub fn engine(backend: Arc<dyn Backend>, blueprint: &Blueprint, plan: Plan) -> Result<Engine> {
    let driver = backend.device().overhead_bytes;
    let mut engine = Engine::new(backend, blueprint, plan)?;
    engine.manager().reserve_driver(driver);
    Ok(engine)
}

/// Gives an engine its first weights: those of `--model`, or random ones. Returns what to tell the user.
///
/// # Errors
/// If a weight file is refused.
pub fn load(settings: &Settings, engine: &mut Engine) -> Result<Vec<String>> {
    let config = engine.options().config.clone();
    let (source, notices): (Box<dyn TensorSource>, Vec<String>) = match &settings.model {
        Some(path) => weights::open(path, &config)?,
        None => (Box::new(RandomWeights::new(&config, settings.seed)), Vec::new()),
    };
    engine.load(&*source)?;
    Ok(notices)
}

/// `castor parity`: one forward and backward on a batch, printed and held against what is expected.
///
/// # Errors
/// [`Error::Failed`] (exit 1) if a tensor is off by more than `tolerance`; bad input; what the world refuses.
pub fn parity(
    settings: &Settings,
    batch: &Path,
    expect: Option<&Path>,
    out: Option<&Path>,
    tolerance: f64,
) -> Result<()> {
    let batch = Batch::read(batch)?;
    let world = World::from_env()?;
    // The batch says how long rows are.
    let settings = &Settings { max_length: batch.sequence as usize, ..settings.clone() };
    let (config, notices) = settings.model_shape()?;
    let hardware = Hardware::open(settings, &world)?;
    let mut options = options(settings, config, batch.sequence, batch.rows(), 1, 1);
    options.evaluates = true;
    options.shards = shards(settings, world.world, world.local_world)?;
    let (blueprint, plan, _) = plan(settings, options, &hardware, world.world)?;
    let mut engine = engine(Arc::clone(&hardware.backend), &blueprint, plan)?;
    let said = load(settings, &mut engine)?;
    let report = parity::run(&mut engine, &batch, expect, out, tolerance)?;
    if world.rank == 0 {
        for notice in notices.iter().chain(&hardware.notices).chain(&said) {
            eprintln!("castor: {notice}");
        }
        print!("{report}");
    }
    match report.worst() {
        Some((name, error)) if !report.passed() => {
            Err(Error::Failed(format!("{name} is off by {error:.2e}, more than --tolerance {tolerance:.0e}")))
        }
        _ => Ok(()),
    }
}
