//! The table of training flags: one row each, read by the command line, the training TOML, help and
//! `--print_config` alike. A name that is not here does not exist.

/// How a flag takes its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One value.
    Value,
    /// One or more values.
    List,
    /// `--flag`, `--flag True|no`, `--no_flag`.
    Switch,
    /// One value, or none for the one named here.
    OrJust(&'static str),
}

/// A flag.
pub(crate) struct Flag {
    /// Long name, with `_`; `-` is accepted too.
    pub key: &'static str,
    /// One-letter form.
    pub short: Option<char>,
    /// Names that other trainers use.
    pub aliases: &'static [&'static str],
    pub kind: Kind,
    /// Empty: unset.
    pub default: &'static str,
    pub help: &'static str,
    pub group: &'static str,
}

/// A flag that sets another: `--fp16` is `--mixed_precision fp16`.
pub(crate) struct Shorthand {
    pub names: &'static [&'static str],
    pub short: Option<char>,
    pub key: &'static str,
    pub value: &'static str,
}

const fn flag(
    group: &'static str,
    key: &'static str,
    short: Option<char>,
    aliases: &'static [&'static str],
    kind: Kind,
    default: &'static str,
    help: &'static str,
) -> Flag {
    Flag { key, short, aliases, kind, default, help, group }
}

const WHAT: &str = "What is trained";
const MUCH: &str = "How much";
const OPTIMIZER: &str = "Optimizer";
const PRECISION: &str = "Precision";
const MEMORY: &str = "Memory";
const OUTPUT: &str = "Output";
const BACKEND: &str = "Backend";

use Kind::{List, OrJust, Switch, Value};

/// Every training flag.
#[rustfmt::skip]
pub(crate) const FLAGS: &[Flag] = &[
    flag(WHAT, "config", Some('c'), &[], Value, "", "A training TOML (keys are flag names), or a config.json: a model from random weights"),
    flag(WHAT, "model_config", None, &["model_config_path", "config_name"], Value, "", "The model's config.json: random weights"),
    flag(WHAT, "model", None, &["model_name_or_path"], Value, "", "Hugging Face folder or GGUF file with the weights to start from"),
    flag(WHAT, "tokenizer", None, &["tokenizer_name_or_path", "tokenizer_name"], Value, "", "`bytes`, a tokenizer.json, its folder or a GGUF file [that of --model, else bytes]"),
    flag(WHAT, "data", None, &["train_file"], List, "", "Text, jsonl (.gz, .zst), parquet or token files, folders, globs"),
    flag(WHAT, "max_length", Some('l'), &["model_max_length", "block_size", "sequence_length", "max_seq_length"], Value, "2048", "Tokens of a row"),
    flag(WHAT, "seed", None, &[], Value, "42", "Seed of weights and row order"),
    flag(WHAT, "data_seed", None, &[], Value, "", "Seed of row order alone [that of --seed]"),
    flag(WHAT, "shuffle", None, &[], Switch, "true", "Shuffle rows, anew each epoch"),
    flag(WHAT, "text_field", None, &["text_column", "dataset_text_field"], Value, "text", "Name of the text in a JSON record or of a parquet column"),
    flag(WHAT, "on_bad_record", None, &[], Value, "stop", "stop, or skip and count"),
    flag(WHAT, "token_format", None, &[], Value, "", "llmc, nanogpt or megatron, where a token file does not say it"),
    flag(WHAT, "add_bos", None, &["add_bos_token"], Switch, "true", "BOS before each document"),
    flag(WHAT, "add_eos", None, &["add_eos_token"], Switch, "true", "EOS after each document"),
    flag(WHAT, "document_mask", None, &[], Switch, "false", "Tokens attend within their own document only; positions restart with it"),

    flag(MUCH, "batch_size", Some('b'), &["per_device_train_batch_size", "per_gpu_train_batch_size", "micro_batch_size"], Value, "1", "Rows per rank and micro-step"),
    flag(MUCH, "gradient_accumulation_steps", None, &["accumulation"], Value, "1", "Micro-steps per update"),
    flag(MUCH, "max_steps", None, &[], Value, "", "Updates; wins over --num_epochs"),
    flag(MUCH, "num_epochs", Some('e'), &["num_train_epochs"], Value, "1", "Passes over the data, fractions allowed"),

    flag(OPTIMIZER, "optimizer", None, &["optim"], Value, "adamw", "adamw or sophia"),
    flag(OPTIMIZER, "lr", None, &["learning_rate"], Value, "5e-5", "Peak learning rate"),
    flag(OPTIMIZER, "weight_decay", Some('w'), &["weigth_decay"], Value, "0", "Decay of matrices (never of norms and biases)"),
    flag(OPTIMIZER, "betas", None, &[], Value, "", "β1,β2 (adamw 0.9,0.999; sophia 0.965,0.99)"),
    flag(OPTIMIZER, "adam_beta1", None, &[], Value, "", "β1 alone"),
    flag(OPTIMIZER, "adam_beta2", None, &[], Value, "", "β2 alone"),
    flag(OPTIMIZER, "eps", None, &["adam_epsilon"], Value, "1e-8", "ε of AdamW"),
    flag(OPTIMIZER, "grad_clip", None, &["max_grad_norm", "gradient_clipping"], Value, "1.0", "Largest global gradient norm; 0: no clipping"),
    flag(OPTIMIZER, "clip", None, &[], Value, "exact", "Clip by this step's own norm (exact), or by the last step's (lagged): inexact, but gradients that are final at once need no memory"),
    flag(OPTIMIZER, "sophia_rho", None, &["rho"], Value, "0.04", "ρ of Sophia"),
    flag(OPTIMIZER, "hessian_interval", None, &[], Value, "10", "Updates between Sophia's Hessian estimates"),
    flag(OPTIMIZER, "lr_scheduler_type", None, &["lr_scheduler"], Value, "linear", "linear, cosine or constant"),
    flag(OPTIMIZER, "warmup_steps", Some('s'), &[], Value, "0", "Updates of warm-up; wins over the ratio; below 1 a ratio"),
    flag(OPTIMIZER, "warmup_ratio", None, &[], Value, "0", "Warm-up as a share of all updates"),
    flag(OPTIMIZER, "lr_convention", None, &[], Value, "hf", "Warm-up: hf, colossalai, deepspeed_log or deepspeed_linear"),
    flag(OPTIMIZER, "min_lr_ratio", None, &[], Value, "", "Where cosine ends, as a share of --lr (hf 0, colossalai 0.1)"),
    flag(OPTIMIZER, "optimizer_states", None, &[], Value, "fp32", "Moments: fp32, bf16 or 8bit"),
    flag(OPTIMIZER, "gradient_dtype", None, &["grad_dtype"], Value, "fp32", "Accumulated gradients: fp32, or the compute type bf16 or fp16"),

    flag(PRECISION, "mixed_precision", Some('x'), &[], Value, "no", "no, fp16 or bf16"),
    flag(PRECISION, "loss_scale", None, &[], Value, "0", "Fixed loss scale; 0: dynamic (fp16 only)"),
    flag(PRECISION, "initial_scale", None, &["initial_loss_scale"], Value, "65536", "First dynamic loss scale"),
    flag(PRECISION, "min_scale", None, &["min_loss_scale"], Value, "1", "Smallest"),
    flag(PRECISION, "max_scale", None, &[], Value, "4294967296", "Largest"),
    flag(PRECISION, "growth_interval", None, &["loss_scale_window"], Value, "1000", "Clean updates before it doubles"),
    flag(PRECISION, "hysteresis", None, &[], Value, "2", "Overflows before it halves"),

    flag(MEMORY, "plugin", Some('p'), &[], Value, "gemini_cuda", "What is sharded and where it lives (see `castor plan`)"),
    flag(MEMORY, "shard_size", None, &[], Value, "all", "Neighbouring ranks that data is split over, other groups hold the same: a number, host or all"),
    flag(MEMORY, "sync_each_batch", None, &[], Switch, "false", "Sum each micro-step's gradients over the ranks by itself, where they are split: less memory, more traffic"),
    flag(MEMORY, "device_memory", None, &[], Value, "auto", "Device budget: 80GiB, 512MiB, 50%"),
    flag(MEMORY, "host_memory", None, &[], Value, "auto", "Host budget of this rank"),
    flag(MEMORY, "nvme", None, &["nvme_path"], Value, "", "Folder of the NVMe tier"),
    flag(MEMORY, "nvme_capacity", None, &[], Value, "auto", "NVMe budget of this rank"),
    flag(MEMORY, "nvme_endurance", None, &["tbw"], Value, "", "TB that may be written to the drive in its life, to say how long it lasts"),
    flag(MEMORY, "shard_param_frac", None, &[], Value, "1", "Plugin gemini: share of parameters sharded; only 1 is offered"),
    flag(MEMORY, "offload_param_frac", None, &[], Value, "0", "Plugin gemini: share of parameters on the host"),
    flag(MEMORY, "offload_optim_frac", None, &[], Value, "0", "Plugin gemini: share of optimizer states on the host"),
    flag(MEMORY, "recompute", None, &[], Value, "auto", "Activations: auto, none, full or selective"),
    flag(MEMORY, "flash_attention", Some('a'), &["flash_attn", "attn_implementation"], Switch, "true", "Attention without the S×S matrix; sdpa and flash_attention_2 mean true, eager false"),
    flag(MEMORY, "prefetch", None, &[], Value, "auto", "Bytes fetched ahead, or auto"),
    flag(MEMORY, "cpu_update", None, &[], Value, "auto", "Share of the updates that the host's cores make, 0 to 1, or auto; the same bits either way"),
    flag(MEMORY, "replan", None, &[], Value, "auto", "Plan once more by what the first steps measured, and change over where that saves more than it takes: auto or off"),
    flag(MEMORY, "warmup_steps_memory", None, &[], Value, "1", "Updates that the memory collector records"),
    flag(MEMORY, "fsdp", None, &[], List, "", "Hugging Face's words, e.g. \"full_shard auto_wrap\", in place of --plugin"),
    flag(MEMORY, "fsdp_config", None, &[], Value, "", "FSDP's JSON, beside --fsdp"),
    flag(MEMORY, "deepspeed", None, &["deepspeed_config"], Value, "", "DeepSpeed's JSON: stage, offload, batch, precision, optimizer, scheduler"),

    flag(OUTPUT, "output_dir", Some('o'), &["save_dir"], Value, "runs/castor", "Folder of checkpoints, log and report"),
    flag(OUTPUT, "save_steps", Some('i'), &["save_interval"], Value, "0", "Updates between checkpoints, or epoch; below 1 a share of the run; 0: none"),
    flag(OUTPUT, "save_strategy", None, &[], Value, "", "no, steps (500 unless --save_steps says) or epoch"),
    flag(OUTPUT, "async_save", None, &["async_save_checkpoint", "use_async_save"], OrJust("on"), "auto", "Write checkpoints while the run goes on: on makes room for a snapshot in host memory, auto takes what is left, off holds the run"),
    flag(OUTPUT, "save_total_limit", None, &[], Value, "", "Checkpoints kept"),
    flag(OUTPUT, "save_model", None, &[], Switch, "true", "Write the final weights as a Hugging Face folder, model in --output_dir"),
    flag(OUTPUT, "resume", Some('f'), &["resume_from_checkpoint", "load"], OrJust("latest"), "no", "Continue from a checkpoint's folder, or latest"),
    flag(OUTPUT, "logging_steps", None, &[], Value, "1", "Updates between log lines, or epoch"),
    flag(OUTPUT, "logging_strategy", None, &[], Value, "", "no, steps or epoch"),
    flag(OUTPUT, "eval_steps", None, &[], Value, "0", "Updates between evaluations, or epoch; 0: at the end only"),
    flag(OUTPUT, "eval_strategy", None, &["evaluation_strategy"], Value, "", "no, steps (as --logging_steps, else 500, unless --eval_steps says) or epoch"),
    flag(OUTPUT, "eval_data", None, &["validation_file"], List, "", "What to evaluate on: files, folders, globs"),
    flag(OUTPUT, "eval_fraction", None, &["validation_split"], Value, "0", "Share of rows held out, from the end, to evaluate on"),

    flag(BACKEND, "backend", None, &[], Value, "auto", "auto, cuda or cpu"),
    flag(BACKEND, "deterministic", None, &["full_determinism"], Switch, "true", "Fixed order of all sums"),
    flag(BACKEND, "timeout", None, &["ddp_timeout"], Value, "", "Seconds that ranks wait for each other at a time [that of `castor run`, else 300]"),
    flag(BACKEND, "emulated_h2d_gbps", None, &[], Value, "0", "CPU backend: host to device, GB/s; 0: as fast as it goes"),
    flag(BACKEND, "emulated_d2h_gbps", None, &[], Value, "0", "CPU backend: device to host, GB/s"),
    flag(BACKEND, "emulated_nvme_read_gbps", None, &[], Value, "0", "CPU backend: NVMe to host, GB/s"),
    flag(BACKEND, "emulated_nvme_write_gbps", None, &[], Value, "0", "CPU backend: host to NVMe, GB/s"),
];

/// Flags that set others.
#[rustfmt::skip]
pub(crate) const SHORTHANDS: &[Shorthand] = &[
    Shorthand { names: &["fp16"], short: None, key: "mixed_precision", value: "fp16" },
    Shorthand { names: &["bf16"], short: None, key: "mixed_precision", value: "bf16" },
    Shorthand { names: &["grad_checkpoint", "gradient_checkpoint", "gradient_checkpointing", "activation_checkpointing"], short: Some('g'), key: "recompute", value: "full" },
    Shorthand { names: &["use_cpu", "no_cuda"], short: None, key: "backend", value: "cpu" },
    Shorthand { names: &["enable_sophia"], short: None, key: "optimizer", value: "sophia" },
];

/// The row of a key or alias, `-` read as `_`.
pub(crate) fn find(name: &str) -> Option<&'static Flag> {
    let name = name.replace('-', "_");
    FLAGS.iter().find(|flag| flag.key == name || flag.aliases.contains(&name.as_str()))
}

/// The default of a row.
pub(crate) fn default(key: &str) -> &'static str {
    FLAGS.iter().find(|flag| flag.key == key).map(|flag| flag.default).expect("the key is a row of the table")
}

/// A value as it is compared with another of the same key: numbers by what they are worth, names by what they name.
pub(crate) fn canonical(key: &str, value: &str) -> String {
    let value = value.trim().trim_matches(['(', ')', '[', ']']).to_ascii_lowercase();
    let parts: Vec<String> = value
        .split(',')
        .map(|part| match part.trim().parse::<f64>() {
            Ok(number) => number.to_string(),
            Err(_) => part.trim().to_string(),
        })
        .collect();
    let same = match (key, value.as_str()) {
        ("plugin", name) => crate::plugin::find(name).ok().map(|preset| preset.name),
        ("optimizer", name) if name.starts_with("adamw_") => Some("adamw"),
        ("lr_scheduler_type", "constant_with_warmup") => Some("constant"),
        ("mixed_precision", "fp32") => Some("no"),
        _ => None,
    };
    same.map_or_else(|| parts.join(","), str::to_string)
}

/// Every name that may be meant by a misspelt one.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    let flags = FLAGS.iter().flat_map(|flag| flag.aliases.iter().copied().chain([flag.key]));
    flags.chain(SHORTHANDS.iter().flat_map(|s| s.names.iter().copied()))
}
