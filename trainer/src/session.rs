//! From settings to a run: the hardware of this rank, its budgets, what it computes with, its first weights.
//!
//! Used by every command that computes ([`crate::train`], [`crate::plan`], [`crate::parity`]). It decides nothing that
//! the settings or the machine have not decided; what they leave open is for [`crate::auto`].

use crate::activations::{Keep, LOGITS_BYTES};
use crate::agreement;
use crate::blueprint::{self, Blueprint, Options};
use crate::config::ModelConfig;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::loss_scale::Dynamic;
use crate::lr::{Convention, Decay, Schedule};
use crate::optimizer::Optimizer;
use crate::rates::{RateCache, Rates};
use crate::rendezvous::World;
use crate::settings::{
    BackendKind, Budget, LrConvention, OptimizerKind, Precision, ScheduleKind, Settings, ShardSize, StateFormat,
};
use crate::source::TensorSource;
use crate::weights::{self, RandomWeights};
use castor_kernels::cpu::{Cpu, CpuOptions};
use castor_kernels::link::{Link, LinkOptions};
use castor_kernels::{Backend, DType};
use castor_runtime::layout::Sharding;
use castor_runtime::limits;
use castor_runtime::plan::{Budgets, Plan};
use std::path::Path;
use std::sync::Arc;

/// This rank's hardware and what it may use of it.
pub struct Hardware {
    /// The backend.
    pub backend: Arc<dyn Backend>,
    /// Bytes per tier, of which every rank has as many.
    pub budgets: Budgets,
    /// Bytes per tier that this rank could have had when the run began.
    pub room: Budgets,
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
        let room = room(settings, world, &*backend)?;
        let budgets = budgets(settings, &room, &*backend);
        let cache = RateCache::path().as_deref().map(RateCache::read).unwrap_or_default();
        let known = Rates::known(&backend.device(), settings.memory.nvme.as_deref(), &cache);
        let known = if backend.device().backend == "cpu" { known.within(&settings.backend.emulated) } else { known };
        let (rates, budgets) = agreement::common(&*backend, known.shared_by(world.local_world), budgets)?;
        Ok(Hardware { backend, budgets, room, rates, notices })
    }

    /// Opens the backend again, for a plan by budgets and rates that all ranks hold already. What was opened before
    /// must be dropped.
    ///
    /// # Errors
    /// As [`Hardware::open`].
    pub fn again(
        settings: &Settings,
        world: &World,
        budgets: Budgets,
        room: Budgets,
        rates: Rates,
    ) -> Result<Hardware> {
        let mut settings = settings.clone();
        settings.memory.device = Budget::Bytes(budgets.device);
        let (backend, notices) = backend(&settings, world)?;
        Ok(Hardware { backend, budgets, room, rates, notices })
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
        last_resort: Some(Box::new(end)),
        ..Default::default()
    };
    Ok(Arc::new(castor_kernels::cuda::Cuda::new(options)?))
}

/// Ends a process whose main thread the driver does not give back, as that thread would have. Nothing is asked of the
/// driver on the way out: that could hang too.
fn end(error: &castor_kernels::Error) {
    let error = Error::from(error.clone());
    signal_hook::low_level::exit(error.say().into());
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

/// What this rank could have of what the machine has, shared by the ranks of this host.
fn room(settings: &Settings, world: &World, backend: &dyn Backend) -> Result<Budgets> {
    let local = u64::from(world.local_world);
    let device = backend.device();
    let host = limits::host_available_bytes().unwrap_or(u64::MAX) / local;
    let (device, host) = match device.backend {
        // The emulated device is host memory too.
        "cpu" => (host / 2, host / 2),
        _ => (device.available_bytes + device.overhead_bytes, host),
    };
    let folder = &settings.memory.nvme;
    let nvme = folder.as_deref().map(disk_room).transpose()?.map_or(0, |bytes| bytes / local);
    Ok(Budgets { device, host, nvme, nvme_folder: folder.clone() })
}

/// What this rank may use: what the settings say of the `room`.
fn budgets(settings: &Settings, room: &Budgets, backend: &dyn Backend) -> Budgets {
    let memory = &settings.memory;
    let device = backend.device();
    Budgets {
        device: match device.backend {
            // The emulated device was made as large as the settings say.
            "cpu" => device.available_bytes,
            _ => memory.device.bytes(room.device),
        },
        host: memory.host.bytes(room.host),
        nvme: memory.nvme_capacity.bytes(room.nvme),
        nvme_folder: room.nvme_folder.clone(),
    }
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

/// What the run computes with, all but the recompute levels, which [`crate::auto`] decides, and the number of
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
        clip: o.clip,
        updates_on_host: 0,
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
