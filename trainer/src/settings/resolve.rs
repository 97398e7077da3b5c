//! From text to [`Settings`]: one value at a time, each refusal one sentence with flag, value and range.

use std::path::PathBuf;
use std::time::Duration;

use super::raw::Raw;
use super::values::{boolean, size};
use super::{
    AsyncSave, BackendKind, BackendSettings, Budget, EmulatedLinks, Every, LossScale, LrConvention, MemorySettings,
    OptimizerKind, OptimizerSettings, OutputSettings, Precision, PrecisionSettings, Recompute, Resume, ScheduleKind,
    ScheduleSettings, Settings, ShardSize, StateFormat, Warmup, unused,
};
use crate::data::{DataSpec, OnBadRecord, Order, TokenFormat};
use crate::error::{Error, Result};
use crate::optimizer::Clip;
use crate::plugin::{self, PRESETS, Placement, Preset};

/// A row is at most this long; beyond it lies a typing error, not a context length.
const LENGTH_MAX: usize = 1 << 24;

/// A micro-batch has at most so many rows, a step at most so many micro-batches.
const ROWS_MAX: u64 = 1 << 16;
/// Tokens of a step on one rank; the largest steps of published runs are a hundredth of it.
const TOKENS_MAX: u64 = 1 << 30;

impl Settings {
    /// Resolves what the command line and the file it names say.
    ///
    /// # Errors
    /// [`Error::Usage`] for the first value that is wrong.
    pub(crate) fn resolve(raw: &Raw, mut notices: Vec<String>) -> Result<Settings> {
        let (optimizer, precision) = (optimizer(raw)?, precision(raw)?);
        if optimizer.clip == Clip::Lagged && precision.compute == Precision::Fp16 {
            return Err(Error::Usage(
                "--clip lagged updates before it is known whether fp16 overflowed; use --mixed_precision bf16, or --clip exact".into(),
            ));
        }
        notices.extend(optimizer.inexact().map(|why| format!("inexact by choice: {why}")));
        let mut settings = Settings {
            model_config: path(raw, "model_config"),
            model: path(raw, "model"),
            tokenizer: raw.values("tokenizer").concat(),
            data: data(raw)?,
            max_length: max_length(raw)?,
            seed: count(raw, "seed", 0)?,
            order: match switch(raw, "shuffle")? {
                true => Order::Shuffled { seed: count(raw, "data_seed", 0)? },
                false => Order::Sequential,
            },
            batch_size: rows(raw, "batch_size")?,
            gradient_accumulation_steps: rows(raw, "gradient_accumulation_steps")?,
            max_steps: max_steps(raw)?,
            num_epochs: number(raw, "num_epochs", "a number above 0 and below 1000000000", |x| x > 0.0 && x < 1e9)?,
            optimizer,
            schedule: schedule(raw)?,
            precision,
            memory: memory(raw)?,
            output: output(raw)?,
            backend: backend(raw)?,
            notices,
        };
        if settings.model.is_some() && settings.model_config.is_some() {
            return Err(Error::Usage(
                "--model brings its own config.json; leave out --model_config (or the config.json of --config)".into(),
            ));
        }
        let tokens = settings.batch_size * settings.gradient_accumulation_steps * settings.max_length as u64;
        if tokens > TOKENS_MAX {
            return Err(Error::Usage(format!(
                "--batch_size × --gradient_accumulation_steps × --max_length is {tokens} tokens a step and rank; at most \
                 {TOKENS_MAX} are laid out"
            )));
        }
        let unused = unused::notices(raw, &settings);
        settings.notices.extend(unused);
        Ok(settings)
    }
}

fn data(raw: &Raw) -> Result<DataSpec> {
    Ok(DataSpec {
        inputs: raw.values("data"),
        flag: "--data",
        text_field: raw.values("text_field").concat(),
        on_bad_record: raw.choice("on_bad_record", &[("stop", OnBadRecord::Stop), ("skip", OnBadRecord::Skip)])?,
        token_format: match raw.values("token_format").is_empty() {
            true => None,
            false => Some(raw.choice(
                "token_format",
                &[("llmc", TokenFormat::LlmC), ("nanogpt", TokenFormat::NanoGpt), ("megatron", TokenFormat::Megatron)],
            )?),
        },
        document_mask: switch(raw, "document_mask")?,
        bos: switch(raw, "add_bos")?,
        eos: switch(raw, "add_eos")?,
    })
}

fn optimizer(raw: &Raw) -> Result<OptimizerSettings> {
    let kind = raw.choice(
        "optimizer",
        &[
            ("adamw", OptimizerKind::AdamW),
            ("sophia", OptimizerKind::Sophia),
            ("adamw_torch", OptimizerKind::AdamW),
            ("adamw_torch_fused", OptimizerKind::AdamW),
            ("adamw_hf", OptimizerKind::AdamW),
            ("sophiag", OptimizerKind::Sophia),
        ],
    )?;
    let beta = |text: &str| text.trim().parse().ok().filter(|beta| (0.0..1.0).contains(beta));
    let mut betas = raw.parse("betas", "two numbers in [0, 1), as in 0.9,0.999,", |text| {
        let (first, second) = text.trim_matches(['(', ')', '[', ']']).split_once(',')?;
        Some((beta(first)?, beta(second)?))
    })?;
    if let Some(beta1) = raw.optional("adam_beta1", "a number in [0, 1)", beta)? {
        betas.0 = beta1;
    }
    if let Some(beta2) = raw.optional("adam_beta2", "a number in [0, 1)", beta)? {
        betas.1 = beta2;
    }
    // By one that is much smaller, losses that are scaled to it would vanish.
    let clip = single(raw, "grad_clip", "0 (off) or a number from 1e-12", |x| x == 0.0 || x >= 1e-12)?;
    Ok(OptimizerSettings {
        kind,
        weight_decay: single(raw, "weight_decay", "a number of at least 0", |x| x >= 0.0)?,
        betas,
        eps: single(raw, "eps", "a number above 0", |x| x > 0.0)?,
        grad_clip: (clip > 0.0).then_some(clip),
        clip: raw.choice("clip", &[("exact", Clip::Exact), ("lagged", Clip::Lagged)])?,
        sophia_rho: single(raw, "sophia_rho", "a number above 0", |x| x > 0.0)?,
        hessian_interval: count(raw, "hessian_interval", 1)?,
    })
}

fn schedule(raw: &Raw) -> Result<ScheduleSettings> {
    let convention = raw.choice(
        "lr_convention",
        &[
            ("hf", LrConvention::HuggingFace),
            ("colossalai", LrConvention::ColossalAi),
            ("deepspeed_log", LrConvention::DeepSpeedLog),
            ("deepspeed_linear", LrConvention::DeepSpeedLinear),
        ],
    )?;
    let steps = number(raw, "warmup_steps", "a number of updates (below 1: a share of them)", |x| {
        (0.0..1.0).contains(&x) || (x >= 1.0 && x.fract() == 0.0 && x < 9e15)
    })?;
    let ratio = number(raw, "warmup_ratio", "a number from 0 to 1", |x| (0.0..=1.0).contains(&x))?;
    Ok(ScheduleSettings {
        kind: raw.choice(
            "lr_scheduler_type",
            &[
                ("linear", ScheduleKind::Linear),
                ("cosine", ScheduleKind::Cosine),
                ("constant", ScheduleKind::Constant),
                ("constant_with_warmup", ScheduleKind::Constant),
            ],
        )?,
        lr: number(raw, "lr", "a number above 0 that fits 32 bits", |x| x > 0.0 && (x as f32).is_finite())?,
        warmup: match steps {
            steps if steps >= 1.0 => Warmup::Steps(steps as u64),
            steps if steps > 0.0 => Warmup::Ratio(steps),
            _ => Warmup::Ratio(ratio),
        },
        convention,
        min_lr_ratio: raw.parse("min_lr_ratio", "a number from 0 to 1", ratio_of)?,
    })
}

fn precision(raw: &Raw) -> Result<PrecisionSettings> {
    let positive = |key| single(raw, key, "a number above 0", |x| x > 0.0);
    let fixed = single(raw, "loss_scale", "0 (dynamic) or a number above it", |x| x >= 0.0)?;
    let updates = |key| {
        raw.parse(key, &format!("a whole number from 1 to {}", u32::MAX), |text| {
            text.parse::<u32>().ok().filter(|count| *count > 0)
        })
    };
    let loss_scale = LossScale {
        fixed: (fixed > 0.0).then_some(fixed),
        initial: positive("initial_scale")?,
        min: positive("min_scale")?,
        max: positive("max_scale")?,
        growth_interval: updates("growth_interval")?,
        hysteresis: updates("hysteresis")?,
    };
    if !(loss_scale.min..=loss_scale.max).contains(&loss_scale.initial) {
        return Err(raw.refuse(
            "initial_scale",
            &format!("it must lie between --min_scale {} and --max_scale {}", loss_scale.min, loss_scale.max),
        ));
    }
    let compute = raw.choice(
        "mixed_precision",
        &[("no", Precision::Fp32), ("fp16", Precision::Fp16), ("bf16", Precision::Bf16), ("fp32", Precision::Fp32)],
    )?;
    let gradient = raw
        .choice("gradient_dtype", &[("fp32", Precision::Fp32), ("bf16", Precision::Bf16), ("fp16", Precision::Fp16)])?;
    if ![Precision::Fp32, compute].contains(&gradient) {
        let (name, computed) = (raw.values("gradient_dtype").concat(), raw.values("mixed_precision").concat());
        return Err(raw.refuse(
            "gradient_dtype",
            &format!(
                "gradients accumulate in {name} only with --mixed_precision {name}, and that is {computed}; use fp32"
            ),
        ));
    }
    Ok(PrecisionSettings {
        compute,
        states: raw.choice(
            "optimizer_states",
            &[("fp32", StateFormat::Fp32), ("bf16", StateFormat::Bf16), ("8bit", StateFormat::Int8)],
        )?,
        narrow_gradients: gradient != Precision::Fp32,
        loss_scale,
    })
}

fn memory(raw: &Raw) -> Result<MemorySettings> {
    let plugin = plugin::find(&raw.values("plugin").concat())?;
    let fraction = |key| number(raw, key, "a number from 0 to 1", |x| (0.0..=1.0).contains(&x));
    if plugin.placement != Placement::Static {
        for key in ["shard_param_frac", "offload_param_frac", "offload_optim_frac"] {
            if !raw.is_default(key) {
                return Err(
                    raw.refuse(key, &format!("only --plugin gemini reads it, and the plugin is {}", plugin.name))
                );
            }
        }
    }
    if fraction("shard_param_frac")? != 1.0 {
        return Err(
            raw.refuse("shard_param_frac", "parameters are split whole or not at all: give 1, or --plugin zero2 for 0")
        );
    }
    let nvme = path(raw, "nvme");
    if nvme.is_none() {
        for key in ["nvme_capacity", "nvme_endurance", "emulated_nvme_read_gbps", "emulated_nvme_write_gbps"] {
            if !raw.is_default(key) {
                return Err(raw.refuse(key, "it needs --nvme with the folder to use"));
            }
        }
    }
    let shard_size = raw.parse("shard_size", "a number of ranks from 1, host or all", |text| match text {
        "all" => Some(ShardSize::All),
        "host" => Some(ShardSize::Host),
        number => number.parse().ok().filter(|ranks| *ranks > 0).map(ShardSize::Ranks),
    })?;
    if shard_size != ShardSize::All && !plugin.sharding.optimizer {
        return Err(raw.refuse("shard_size", &format!("plugin {} splits nothing", plugin.name)));
    }
    let cpu_update = cpu_update(raw, &plugin)?;
    Ok(MemorySettings {
        plugin,
        shard_size,
        sync_each_batch: switch(raw, "sync_each_batch")?,
        device: budget(raw, "device_memory")?,
        host: budget(raw, "host_memory")?,
        nvme,
        nvme_capacity: budget(raw, "nvme_capacity")?,
        nvme_endurance: raw.optional("nvme_endurance", "a number of TB above 0", |text| {
            text.parse().ok().filter(|tb: &f64| tb.is_finite() && *tb > 0.0)
        })?,
        offload_param_frac: fraction("offload_param_frac")?,
        offload_optim_frac: fraction("offload_optim_frac")?,
        recompute: raw.choice(
            "recompute",
            &[
                ("auto", Recompute::Auto),
                ("none", Recompute::None),
                ("full", Recompute::Full),
                ("selective", Recompute::Selective),
            ],
        )?,
        flash_attention: flash_attention(raw)?,
        prefetch: raw.parse("prefetch", "auto or a size", |text| match text {
            "auto" => Some(None),
            text => size(text).map(Some),
        })?,
        cpu_update,
        replan: raw.parse("replan", "auto or off", |text| match (text, boolean(text)) {
            ("auto", _) => Some(true),
            (_, on) => on,
        })?,
        warmup_steps: count(raw, "warmup_steps_memory", 1)?,
    })
}

/// A tier's budget.
///
/// # Errors
/// [`Error::Usage`] if it is none.
pub(crate) fn budget(raw: &Raw, key: &str) -> Result<Budget> {
    raw.parse(key, "auto, a size such as 80GiB or 512MB, or a share such as 50%,", Budget::parse)
}

/// The share of updates for the host's cores, where the plugin leaves open who makes them.
fn cpu_update(raw: &Raw, plugin: &Preset) -> Result<Option<f64>> {
    let share = raw.parse("cpu_update", "auto or a share from 0 to 1", |text| match text {
        "auto" => Some(None),
        text => text.parse().ok().filter(|share| (0.0..=1.0).contains(share)).map(Some),
    })?;
    if share.is_some_and(|share: f64| share > 0.0) {
        if !plugin.spills() {
            let names: Vec<_> = PRESETS.iter().filter(|preset| preset.spills()).map(|preset| preset.name).collect();
            let reason = format!(
                "plugin {} says where everything lies, and the device updates it; give 0, or a plugin among {}",
                plugin.name,
                names.join(", ")
            );
            return Err(raw.refuse("cpu_update", &reason));
        }
        if raw.values("clip") == ["lagged"] {
            return Err(raw.refuse("cpu_update", "with --clip lagged each update follows its backward; give 0"));
        }
    }
    Ok(share)
}

/// Hugging Face's and LLaMA-Factory's names of implementations say whether S×S is written.
fn flash_attention(raw: &Raw) -> Result<bool> {
    raw.parse("flash_attention", "true or false, or eager, sdpa or flash_attention_2,", |text| {
        match text.to_ascii_lowercase().as_str() {
            "sdpa" | "flash_attention_2" | "flash_attention_3" | "fa2" | "fa3" | "auto" => Some(true),
            "eager" | "disabled" => Some(false),
            other => boolean(other),
        }
    })
}

fn output(raw: &Raw) -> Result<OutputSettings> {
    let every = |key| raw.parse(key, "a whole number of updates, a share below 1, epoch or 0", Every::parse);
    let eval_data = raw.values("eval_data");
    match (eval_data.is_empty(), raw.is_default("eval_fraction")) {
        (false, false) => return Err(raw.refuse("eval_fraction", "--eval_data names what to evaluate on; give one")),
        (true, true) if !raw.is_default("eval_steps") => {
            return Err(raw.refuse("eval_steps", "it needs --eval_data, or --eval_fraction of the rows"));
        }
        _ => {}
    }
    Ok(OutputSettings {
        dir: raw.values("output_dir").concat().into(),
        save: every("save_steps")?,
        async_save: raw.parse("async_save", "auto, on or off", |text| match (text, boolean(text)) {
            ("auto", _) => Some(AsyncSave::Auto),
            (_, on) => on.map(|on| if on { AsyncSave::On } else { AsyncSave::Off }),
        })?,
        save_total_limit: raw.optional("save_total_limit", "a whole number of at least 1", |text| {
            text.parse().ok().filter(|limit| *limit > 0)
        })?,
        save_model: switch(raw, "save_model")?,
        resume: raw.parse("resume", "a checkpoint's folder, latest or no", |text| {
            Some(match boolean(text) {
                _ if text == "latest" => Resume::Latest,
                Some(false) => Resume::No,
                Some(true) => Resume::Latest,
                None => Resume::From(text.into()),
            })
        })?,
        logging: every("logging_steps")?,
        eval: every("eval_steps")?,
        eval_data,
        eval_fraction: number(raw, "eval_fraction", "a number from 0 to below 1", |x| (0.0..1.0).contains(&x))?,
    })
}

fn backend(raw: &Raw) -> Result<BackendSettings> {
    let rate = |key| number(raw, key, "0 or a number of GB/s above it", |x| x >= 0.0).map(|x| (x > 0.0).then_some(x));
    Ok(BackendSettings {
        kind: raw.choice(
            "backend",
            &[("auto", BackendKind::Auto), ("cuda", BackendKind::Cuda), ("cpu", BackendKind::Cpu)],
        )?,
        deterministic: switch(raw, "deterministic")?,
        timeout: raw.optional("timeout", "a whole number of seconds, at least 1,", |text| {
            text.parse::<u32>().ok().filter(|seconds| *seconds > 0).map(|seconds| Duration::from_secs(seconds.into()))
        })?,
        emulated: EmulatedLinks {
            h2d: rate("emulated_h2d_gbps")?,
            d2h: rate("emulated_d2h_gbps")?,
            nvme_read: rate("emulated_nvme_read_gbps")?,
            nvme_write: rate("emulated_nvme_write_gbps")?,
        },
    })
}

/// One token would leave nothing to predict.
fn max_length(raw: &Raw) -> Result<usize> {
    raw.parse("max_length", &format!("a whole number from 2 to {LENGTH_MAX}"), |text| {
        text.parse().ok().filter(|length| (2..=LENGTH_MAX).contains(length))
    })
}

/// Hugging Face writes "not given" as -1.
fn max_steps(raw: &Raw) -> Result<Option<u64>> {
    raw.optional("max_steps", "a whole number of at least 1 (or -1 for none)", |text| match text {
        "-1" => Some(None),
        text => text.parse().ok().filter(|steps| *steps > 0).map(Some),
    })
    .map(Option::flatten)
}

/// A number of rows or micro-batches that are laid out one by one.
fn rows(raw: &Raw, key: &str) -> Result<u64> {
    raw.parse(key, &format!("a whole number from 1 to {ROWS_MAX}"), |text| {
        text.parse().ok().filter(|count| (1..=ROWS_MAX).contains(count))
    })
}

fn count(raw: &Raw, key: &str, min: u64) -> Result<u64> {
    raw.parse(key, &format!("a whole number of at least {min}"), |text| text.parse().ok().filter(|count| *count >= min))
}

fn number(raw: &Raw, key: &str, expected: &str, allowed: impl Fn(f64) -> bool) -> Result<f64> {
    raw.parse(key, expected, |text| text.parse().ok().filter(|x: &f64| x.is_finite() && allowed(*x)))
}

/// A number that stays one in 32 bits, and above 0 if it was.
fn single(raw: &Raw, key: &str, expected: &str, allowed: impl Fn(f32) -> bool) -> Result<f32> {
    let fits = |x: f64| (x as f32).is_finite() && (x == 0.0 || x as f32 != 0.0) && allowed(x as f32);
    number(raw, key, &format!("{expected} that fits 32 bits"), fits).map(|x| x as f32)
}

fn ratio_of(text: &str) -> Option<f64> {
    text.parse().ok().filter(|ratio| (0.0..=1.0).contains(ratio))
}

fn switch(raw: &Raw, key: &str) -> Result<bool> {
    raw.parse(key, "true or false", boolean)
}

fn path(raw: &Raw, key: &str) -> Option<PathBuf> {
    raw.values(key).first().map(PathBuf::from)
}
