//! What a run is asked to do, resolved and typed: flag over TOML over default, every value checked.
//!
//! Owns the table of flags (`table`), their text with origins (`raw`), what other trainers' files and words mean here
//! (`deepspeed`, `fsdp`, `strategies`, `elsewhere`), which flags change nothing (`unused`), the forms of values
//! ([`Budget`], [`Every`]) and [`Settings`]. It measures nothing: budgets stay symbolic until someone who knows the
//! machine resolves them ([`Budget::bytes`]), steps until someone knows the number of rows.

mod deepspeed;
pub(crate) mod elsewhere;
mod fsdp;
pub(crate) mod raw;
mod resolve;
mod strategies;
pub(crate) mod table;
mod unused;
mod values;

use std::path::PathBuf;
use std::time::Duration;

pub(crate) use resolve::budget;
pub(crate) use values::boolean;
pub use values::{Budget, Every, nearest};

use crate::checkpoint;
use crate::config::ModelConfig;
use crate::data::{DataSpec, Order, Sampler};
use crate::error::{Error, Result};
use crate::optimizer::Clip;
use crate::plugin::Preset;
use crate::weights;

/// A whole run's settings.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `config.json` of a model from random weights.
    pub model_config: Option<PathBuf>,
    /// Hugging Face folder or GGUF file to start from.
    pub model: Option<PathBuf>,
    /// `bytes`, or a tokenizer's path.
    pub tokenizer: String,
    /// What is read.
    pub data: DataSpec,
    /// S: tokens of a row.
    pub max_length: usize,
    /// Seed of weights and order.
    pub seed: u64,
    /// Order of rows.
    pub order: Order,
    /// B: rows per rank and micro-step.
    pub batch_size: u64,
    /// Micro-steps per update.
    pub gradient_accumulation_steps: u64,
    /// Updates, if given.
    pub max_steps: Option<u64>,
    /// Passes over the data, if no number of updates is given.
    pub num_epochs: f64,
    /// The update rule.
    pub optimizer: OptimizerSettings,
    /// The learning rate over time.
    pub schedule: ScheduleSettings,
    /// Number formats.
    pub precision: PrecisionSettings,
    /// Where bytes may live.
    pub memory: MemorySettings,
    /// What is written and when.
    pub output: OutputSettings,
    /// Which hardware.
    pub backend: BackendSettings,
    /// What was accepted and changes nothing, for the log.
    pub notices: Vec<String>,
}

/// The update rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptimizerSettings {
    /// Which rule.
    pub kind: OptimizerKind,
    /// Decay of matrices; norms and biases never decay.
    pub weight_decay: f32,
    /// β1, β2 in [0, 1).
    pub betas: (f32, f32),
    /// ε of AdamW.
    pub eps: f32,
    /// Largest global gradient norm; None: no clipping.
    pub grad_clip: Option<f32>,
    /// Whose norm it is compared with.
    pub clip: Clip,
    /// ρ of Sophia.
    pub sophia_rho: f32,
    /// Updates between Sophia's Hessian estimates.
    pub hessian_interval: u64,
}

impl OptimizerSettings {
    /// See [`Clip::inexact`].
    pub fn inexact(&self) -> Option<&'static str> {
        self.clip.inexact(self.grad_clip.is_some())
    }
}

/// Update rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptimizerKind {
    /// Adam with decoupled weight decay.
    AdamW,
    /// Sophia-G.
    Sophia,
}

/// The learning rate over time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScheduleSettings {
    /// Shape after the warm-up.
    pub kind: ScheduleKind,
    /// Peak.
    pub lr: f64,
    /// Length of the warm-up.
    pub warmup: Warmup,
    /// How warm-up counts.
    pub convention: LrConvention,
    /// Where cosine ends, as a share of the peak.
    pub min_lr_ratio: f64,
}

/// Shapes of the learning rate after its warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScheduleKind {
    /// Straight to 0.
    Linear,
    /// Half a cosine to `min_lr_ratio`.
    Cosine,
    /// Stays.
    Constant,
}

/// Length of the warm-up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Warmup {
    /// Updates.
    Steps(u64),
    /// Share of all updates.
    Ratio(f64),
}

impl Warmup {
    /// Updates of warm-up in a run of `total`; a share is rounded up, as Hugging Face does.
    pub fn steps(self, total: u64) -> u64 {
        match self {
            Warmup::Steps(steps) => steps,
            Warmup::Ratio(ratio) => (total as f64 * ratio).ceil() as u64,
        }
    }
}

/// How the learning rate counts during warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LrConvention {
    /// step / warm-up: the first update has lr 0.
    HuggingFace,
    /// (step + 1) / warm-up.
    ColossalAi,
    /// DeepSpeed's: 0 for two updates, then log(step) / log(warm-up).
    DeepSpeedLog,
    /// DeepSpeed's: 0 for two updates, then (step - 1) / warm-up.
    DeepSpeedLinear,
}

/// Number formats.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrecisionSettings {
    /// Of weights and activations in use.
    pub compute: Precision,
    /// Of the moments.
    pub states: StateFormat,
    /// Whether gradients accumulate in the 16-bit compute type (else fp32).
    pub narrow_gradients: bool,
    /// Of the loss, used with fp16.
    pub loss_scale: LossScale,
}

/// Formats of weights and activations in use. Masters are fp32 in every one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// 32 bits throughout.
    Fp32,
    /// IEEE half, with a loss scale.
    Fp16,
    /// bfloat16.
    Bf16,
}

/// Formats of the optimizer's moments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateFormat {
    /// 4 bytes.
    Fp32,
    /// 2 bytes, stochastically rounded.
    Bf16,
    /// 1 byte and a scale per block.
    Int8,
}

/// The dynamic loss scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    /// A scale that never changes, in place of the dynamic one.
    pub fixed: Option<f32>,
    /// First scale.
    pub initial: f32,
    /// Smallest.
    pub min: f32,
    /// Largest.
    pub max: f32,
    /// Clean updates before it doubles.
    pub growth_interval: u32,
    /// Overflows before it halves.
    pub hysteresis: u32,
}

/// Where bytes may live.
#[derive(Clone, Debug, PartialEq)]
pub struct MemorySettings {
    /// Sharding and placement.
    pub plugin: Preset,
    /// How many ranks data is split over.
    pub shard_size: ShardSize,
    /// Whether each micro-batch's gradient is summed over the ranks by itself.
    pub sync_each_batch: bool,
    /// Device budget.
    pub device: Budget,
    /// Host budget of this rank.
    pub host: Budget,
    /// Folder of the NVMe tier; None: two tiers.
    pub nvme: Option<PathBuf>,
    /// NVMe budget of this rank.
    pub nvme_capacity: Budget,
    /// TB that the drive may be written in its life, if known.
    pub nvme_endurance: Option<f64>,
    /// Placement `Static`: share of parameters on the host.
    pub offload_param_frac: f64,
    /// Placement `Static`: share of optimizer states on the host.
    pub offload_optim_frac: f64,
    /// What is dropped and computed again.
    pub recompute: Recompute,
    /// Attention without the S×S matrix.
    pub flash_attention: bool,
    /// Bytes fetched ahead; None: the plan decides.
    pub prefetch: Option<u64>,
    /// Share of the updates that the host's cores make; None: the plan decides.
    pub cpu_update: Option<f64>,
    /// Whether the run is planned once more by what its first steps measured.
    pub replan: bool,
    /// Updates that the memory collector records.
    pub warmup_steps: u64,
}

/// How many neighbouring ranks data is split over; the other groups of as many hold the same again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShardSize {
    /// All.
    All,
    /// Those of a host.
    Host,
    /// This many.
    Ranks(u32),
}

/// What of the activations is dropped in forward and computed again in backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recompute {
    /// As much as the budget asks for.
    Auto,
    /// Nothing.
    None,
    /// All of every block.
    Full,
    /// What is cheap: norms and SwiGLU.
    Selective,
}

/// What is written and when.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputSettings {
    /// Folder of checkpoints, log and report.
    pub dir: PathBuf,
    /// Checkpoints.
    pub save: Every,
    /// Whether they are written while the run goes on.
    pub async_save: AsyncSave,
    /// Checkpoints kept; None: all.
    pub save_total_limit: Option<u64>,
    /// Whether the final weights are written as a Hugging Face folder.
    pub save_model: bool,
    /// What to continue from.
    pub resume: Resume,
    /// Log lines.
    pub logging: Every,
    /// Evaluations.
    pub eval: Every,
    /// Files, folders and globs to evaluate on; empty: the rows held out.
    pub eval_data: Vec<String>,
    /// Share of rows held out.
    pub eval_fraction: f64,
}

/// Whether checkpoints are written while the run goes on, from a snapshot in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsyncSave {
    /// If the host has room for it beside the plan.
    Auto,
    /// The plan makes room for it.
    On,
    /// A save holds the run until it is on disk.
    Off,
}

/// What a run continues from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resume {
    /// Nothing.
    No,
    /// The latest whole checkpoint of the output folder.
    Latest,
    /// This one.
    From(PathBuf),
}

/// Which hardware.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BackendSettings {
    /// Which backend.
    pub kind: BackendKind,
    /// Whether all sums have a fixed order.
    pub deterministic: bool,
    /// How long ranks wait for each other at a time; None: as the environment says.
    pub timeout: Option<Duration>,
    /// CPU backend: emulated link rates in GB/s (10⁹ bytes); None: as fast as it goes.
    pub emulated: EmulatedLinks,
}

/// Backends to choose from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackendKind {
    /// CUDA if there is a device, else the CPU with a line saying so.
    Auto,
    /// CUDA or a refusal.
    Cuda,
    /// The CPU with an emulated device.
    Cpu,
}

/// Rates of the emulated links, GB/s.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EmulatedLinks {
    /// Host to device.
    pub h2d: Option<f64>,
    /// Device to host.
    pub d2h: Option<f64>,
    /// NVMe to host.
    pub nvme_read: Option<f64>,
    /// Host to NVMe.
    pub nvme_write: Option<f64>,
}

impl Settings {
    /// Updates of the run over the rows that `sampler` deals.
    pub fn total_steps(&self, sampler: &Sampler) -> u64 {
        self.max_steps.unwrap_or_else(|| sampler.steps(self.num_epochs))
    }

    /// The same settings where an epoch has `steps` updates: what happens at the end of each epoch happens every so
    /// many.
    pub fn with_epochs_of(&self, steps: u64) -> Settings {
        let mut settings = self.clone();
        let output = &mut settings.output;
        for every in [&mut output.save, &mut output.logging, &mut output.eval] {
            *every = every.with_epochs_of(steps);
        }
        settings
    }

    /// The model's shape, from `--model` or the given `config.json`, with notices.
    ///
    /// # Errors
    /// If none is given, or the file is refused.
    pub fn model_shape(&self) -> Result<(ModelConfig, Vec<String>)> {
        let (shape, mut notices) = match (&self.model, &self.model_config) {
            (Some(model), _) => match checkpoint::not_a_model(model) {
                Some(reason) => return Err(Error::Usage(format!("--model: {reason}"))),
                None => weights::shape(model)?,
            },
            (None, Some(path)) => ModelConfig::from_json_file(path)?,
            (None, None) => {
                return Err(Error::Usage(
                    "no model: give --config with a config.json or a training TOML, or --model with a folder of \
                     weights or a GGUF file"
                        .into(),
                ));
            }
        };
        shape.check_window(self.max_length as u64, "--max_length")?;
        if self.max_length as u64 > shape.max_position_embeddings {
            notices.push(format!(
                "--max_length {} is beyond the model's max_position_embeddings {}; rotary positions are extrapolated",
                self.max_length, shape.max_position_embeddings
            ));
        }
        Ok((shape, notices))
    }
}

#[cfg(test)]
mod tests;
