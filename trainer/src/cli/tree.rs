//! The command tree as clap knows it. The training flags are rows of the settings' table.

use clap::{Arg, ArgAction};

use crate::settings::elsewhere::{IGNORED, ONLY_OFF, ONLY_ON};
use crate::settings::table::{FLAGS, Flag, Kind, SHORTHANDS};

/// All commands with their flags.
pub(super) fn tree() -> clap::Command {
    let command = |name: &'static str, about: &'static str| clap::Command::new(name).about(about);
    let path = |id: &'static str, help: &'static str| Arg::new(id).required(true).help(help);
    let option = |id: &'static str, help: &'static str| Arg::new(id).long(id).help(help).allow_negative_numbers(true);
    let switch = |id: &'static str, help: &'static str| Arg::new(id).long(id).action(ArgAction::SetTrue).help(help);
    let pack = command("pack", "Tokenise text once, into a file that every run maps")
        .arg(path("input", "Text, jsonl (.gz, .zst) and parquet files, folders, globs").num_args(1..))
        .arg(option("tokenizer", "`bytes`, a tokenizer.json or its folder").required(true))
        .arg(option("out", "Folder to write").required(true))
        .arg(
            option("text_field", "Name of the text in a JSON record or of a parquet column")
                .alias("text_column")
                .default_value("text"),
        )
        .arg(option("on_bad_record", "stop, or skip and count").value_parser(["stop", "skip"]).default_value("stop"))
        .arg(boolean_flag("add_bos").default_value("true").help("BOS before each document"))
        .arg(boolean_flag("add_eos").default_value("true").help("EOS after each document"));
    clap::Command::new("castor")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Trains Llama-family models beyond one GPU's memory: device, host and NVMe as one")
        .subcommand_required(true)
        .disable_help_subcommand(true)
        .after_help(
            "Exit codes: 0 done, 1 failed, 2 wrong command line or input, 3 does not fit, \
             130/143 interrupted",
        )
        .subcommand(command("run", "Start one process per device: run --nproc_per_node 2 train …"))
        .subcommand(training_flags(command("train", "Train: one rank, or that which the environment names")))
        .subcommand(
            training_flags(command("plan", "Say where bytes would be and how long a step takes"))
                .arg(
                    option("ranks", "Ranks to plan for [as the environment says]")
                        .aliases(["world_size", "nproc_per_node"]),
                )
                .arg(option("rates", "Plan for another machine, by the file that its `castor doctor --bench` wrote"))
                .arg(switch("max", "Plan for as many blocks of this shape as fit"))
                .arg(switch("json", "Print the plan as JSON")),
        )
        .subcommand(
            training_flags(command("parity", "One forward and backward, held against expected tensors"))
                .arg(option("batch", "safetensors with input_ids and labels").required(true))
                .arg(option("expect", "safetensors with loss and gradients"))
                .arg(option("out", "Where to write loss and gradients"))
                .arg(option("tolerance", "Largest relative error that passes").default_value("1e-4")),
        )
        .subcommand(command("data", "Prepare data").subcommand_required(true).subcommand(pack))
        .subcommand(
            command("export", "Checkpoint to a Hugging Face folder")
                .arg(path("checkpoint", "Folder of a checkpoint, or of a run: its latest"))
                .arg(path("out", "Folder to write"))
                .arg(
                    option("dtype", "How weights are stored")
                        .value_parser(["bf16", "fp16", "fp32"])
                        .default_value("bf16"),
                ),
        )
        .subcommand(
            command("sample", "Let a model go on with a text")
                .arg(path("from", "Hugging Face folder, GGUF file, checkpoint, or a run's folder: its latest"))
                .arg(option("prompt", "What the text begins with").required(true))
                .arg(option("max_new_tokens", "Tokens after it, at most").default_value("64"))
                .arg(
                    option("temperature", "Divides the logits; 0: always the likeliest token [0; 1 with --top_k]")
                        .default_value("0")
                        .hide_default_value(true),
                )
                .arg(option("top_k", "Draw from so many of the likeliest tokens; 0: all").default_value("0"))
                .args(sample_flags().map(sample_argument)),
        )
        .subcommand(
            command("report", "Render the report of a recorded run").arg(path("run_dir", "The run's --output_dir")),
        )
        .subcommand(
            command("replan", "Give a run that goes on other budgets: it plans anew and changes over, or says why not")
                .arg(path("run_dir", "The run's --output_dir"))
                .args(replan_flags().map(replan_argument)),
        )
        .subcommand(
            command("doctor", "What this machine has, what is missing and what to do")
                .arg(switch("bench", "Measure links, memory, GEMM and the disk of --nvme; plans use what it finds"))
                .args(doctor_flags().map(argument)),
        )
}

/// The rows of the table that `doctor` takes.
pub(super) fn doctor_flags() -> impl Iterator<Item = &'static Flag> {
    FLAGS.iter().filter(|flag| matches!(flag.key, "backend" | "nvme"))
}

/// The rows of the table that `replan` takes.
pub(super) fn replan_flags() -> impl Iterator<Item = &'static Flag> {
    FLAGS.iter().filter(|flag| matches!(flag.key, "device_memory" | "host_memory" | "nvme_capacity"))
}

/// The rows of the table that `sample` takes.
pub(super) fn sample_flags() -> impl Iterator<Item = &'static Flag> {
    const TAKEN: [&str; 9] = [
        "tokenizer",
        "seed",
        "add_bos",
        "mixed_precision",
        "plugin",
        "device_memory",
        "host_memory",
        "nvme",
        "backend",
    ];
    FLAGS.iter().filter(|flag| TAKEN.contains(&flag.key))
}

/// A row of the table as `replan` takes it: what is not given stays as it is.
fn replan_argument(flag: &'static Flag) -> Arg {
    argument(flag)
        .help(format!("{}; auto: all that the rank could have [as it is]", flag.help))
        .help_heading(None::<&str>)
}

/// A row of the table as `sample` takes it: there is nothing to train.
fn sample_argument(flag: &'static Flag) -> Arg {
    match flag.key {
        "seed" => argument(flag).help(format!("Seed of what is drawn [{}]", flag.default)).help_heading(None::<&str>),
        _ => argument(flag),
    }
}

/// A row of the table as clap knows it.
fn argument(flag: &'static Flag) -> Arg {
    let mut arg = Arg::new(flag.key)
        .long(flag.key)
        .aliases(flag.aliases)
        .allow_negative_numbers(true)
        .value_name("V")
        .help_heading(flag.group);
    arg = match flag.kind {
        Kind::Value => arg.num_args(1),
        Kind::List => arg.num_args(1..).action(ArgAction::Append),
        Kind::Switch => arg.num_args(0..=1).default_missing_value("true"),
        Kind::OrJust(value) => arg.num_args(0..=1).default_missing_value(value),
    };
    if let Some(short) = flag.short {
        arg = arg.short(short);
    }
    match flag.default {
        "" => arg.help(flag.help),
        default => arg.help(format!("{} [{default}]", flag.help)),
    }
}

/// Adds the table's flags, their other names, and `--print_config`.
fn training_flags(mut command: clap::Command) -> clap::Command {
    for flag in FLAGS {
        command = command.arg(argument(flag));
    }
    for short in SHORTHANDS {
        let mut arg = boolean_flag(short.names[0])
            .aliases(&short.names[1..])
            .help(format!("--{} {}", short.key, short.value))
            .help_heading("Short for");
        if let Some(letter) = short.short {
            arg = arg.short(letter);
        }
        command = command.arg(arg);
    }
    for ignored in IGNORED {
        for (index, name) in ignored.names.iter().enumerate() {
            let mut arg = boolean_flag(name).num_args(0..).hide(true);
            if let (0, Some(letter)) = (index, ignored.short) {
                arg = arg.short(letter);
            }
            command = command.arg(arg);
        }
    }
    command
        .args(ONLY_OFF.iter().map(|(name, _)| boolean_flag(name).hide(true)))
        .args(ONLY_ON.iter().map(|(name, ..)| boolean_flag(name).hide(true)))
        .arg(
            Arg::new("print_config")
                .long("print_config")
                .action(ArgAction::SetTrue)
                .help("Print every setting with its origin, as a training TOML, and end"),
        )
        .args_override_self(true)
}

/// `--name`, or `--name value`.
fn boolean_flag(name: &'static str) -> Arg {
    Arg::new(name).long(name).num_args(0..=1).default_missing_value("true").value_name("V")
}
