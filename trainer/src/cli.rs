//! The command line: what may be typed, turned into one [`Command`].
//!
//! Owns the command tree (`tree`) and its errors. The training flags are rows of the settings' table, so they are
//! defined once; what `castor run` does with its own flags is the launcher's business.

mod tree;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::ArgMatches;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;

use crate::data::{DataSpec, OnBadRecord};
use crate::error::{Error, Result};
use crate::plan::Wanted;
use crate::rendezvous::World;
use crate::replan::request::Request as NewBudgets;
use crate::sample::{Choice, Request};
use crate::settings::elsewhere::{IGNORED, ONLY_OFF, ONLY_ON, REFUSED};
use crate::settings::raw::{Origin, Raw};
use crate::settings::table::{self, FLAGS, Flag, Kind, SHORTHANDS};
use crate::settings::{Settings, boolean, budget, nearest};
use crate::weights::ExportDType;
use tree::{doctor_flags, replan_flags, sample_flags, tree};

/// What the user asks for.
#[derive(Debug)]
pub enum Command {
    /// `castor run …`: everything after `run`, for the launcher.
    Run(Vec<OsString>),
    /// `castor train …`
    Train(Box<Settings>),
    /// `castor plan …`
    Plan {
        /// The run to plan.
        settings: Box<Settings>,
        /// For how many ranks, of which size, and in what form.
        wanted: Wanted,
    },
    /// `castor parity …`
    Parity {
        /// Model and how it is computed.
        settings: Box<Settings>,
        /// safetensors with input_ids and labels.
        batch: PathBuf,
        /// safetensors with what is expected.
        expect: Option<PathBuf>,
        /// Where to write what came out.
        out: Option<PathBuf>,
        /// Largest relative error that passes.
        tolerance: f64,
    },
    /// `castor data pack …`
    DataPack {
        /// What is packed.
        spec: DataSpec,
        /// `bytes` or a path.
        tokenizer: String,
        /// Folder to write.
        out: PathBuf,
    },
    /// `castor export CHECKPOINT OUT`
    Export {
        /// Checkpoint folder.
        checkpoint: PathBuf,
        /// Folder to write.
        out: PathBuf,
        /// How weights are stored.
        dtype: ExportDType,
    },
    /// `castor sample MODEL`
    Sample {
        /// Which hardware and precision.
        settings: Box<Settings>,
        /// What text.
        request: Request,
    },
    /// `castor report RUN_DIR`
    Report(PathBuf),
    /// `castor replan RUN_DIR`
    Replan {
        /// The folder of the run that goes on.
        run_dir: PathBuf,
        /// Its new budgets.
        request: NewBudgets,
    },
    /// `castor doctor`
    Doctor {
        /// Whether links, memory, disk and GEMM are measured.
        bench: bool,
        /// Which hardware: backend and NVMe folder.
        settings: Box<Settings>,
    },
    /// Help, the version or `--print_config`: text to print.
    Text(String),
}

/// Parses the process's arguments, program name first.
///
/// # Errors
/// [`Error::Usage`] in one sentence, with the flag that was probably meant.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Command> {
    let args: Vec<OsString> = args.into_iter().collect();
    // The launcher reads its own flags; clap would take them for ours.
    if args.get(1).is_some_and(|word| word == "run") {
        return Ok(Command::Run(args[2..].to_vec()));
    }
    let words = args.iter().skip(1).map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>();
    let matches = match tree().try_get_matches_from(one_spelling(args)) {
        Ok(matches) => matches,
        Err(error) => {
            return match error.kind() {
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Ok(Command::Text(error.to_string())),
                _ => Err(usage(&error, &words)),
            };
        }
    };
    match matches.subcommand() {
        Some(("train", matches)) => match training(matches, &world)? {
            Asked::Run(settings) => Ok(Command::Train(settings)),
            Asked::Print(text) => Ok(Command::Text(text)),
        },
        Some(("plan", matches)) => {
            let ranks = value(matches, "ranks").map(|text| ranks(&text)).transpose()?;
            match training(matches, &|| ranks.map_or_else(world, Ok))? {
                Asked::Run(settings) => {
                    let (largest, json) = (matches.get_flag("max"), matches.get_flag("json"));
                    let rates = value(matches, "rates").map(PathBuf::from);
                    Ok(Command::Plan { settings, wanted: Wanted { ranks, largest, json, rates } })
                }
                Asked::Print(text) => Ok(Command::Text(text)),
            }
        }
        Some(("parity", matches)) => match training(matches, &world)? {
            Asked::Run(settings) => Ok(Command::Parity {
                settings,
                batch: required(matches, "batch").into(),
                expect: value(matches, "expect").map(PathBuf::from),
                out: value(matches, "out").map(PathBuf::from),
                tolerance: required(matches, "tolerance").parse().ok().filter(|t| *t >= 0.0).ok_or_else(|| {
                    Error::Usage(format!(
                        "--tolerance is {}; a number of at least 0 was expected",
                        required(matches, "tolerance")
                    ))
                })?,
            }),
            Asked::Print(text) => Ok(Command::Text(text)),
        },
        Some(("data", matches)) => pack(matches),
        Some(("export", matches)) => Ok(Command::Export {
            checkpoint: required(matches, "checkpoint").into(),
            out: required(matches, "out").into(),
            dtype: match required(matches, "dtype").as_str() {
                "fp32" => ExportDType::F32,
                "fp16" => ExportDType::F16,
                _ => ExportDType::Bf16,
            },
        }),
        Some(("report", matches)) => Ok(Command::Report(required(matches, "run_dir").into())),
        Some(("replan", matches)) => replan(matches),
        Some(("sample", matches)) => sample(matches),
        Some(("doctor", matches)) => {
            let settings = Box::new(Settings::resolve(&given(matches, doctor_flags())?, Vec::new())?);
            Ok(Command::Doctor { bench: matches.get_flag("bench"), settings })
        }
        _ => unreachable!("clap asks for a sub-command"),
    }
}

enum Asked {
    Run(Box<Settings>),
    Print(String),
}

/// Every later table has one spelling: long names with `_` only, `--no_flag` as `--flag=false`, and what begins like a
/// negative number as the value of the flag before it, which says better than clap that `-5GiB` is no size.
fn one_spelling(args: Vec<OsString>) -> Vec<OsString> {
    let mut words: Vec<OsString> = Vec::with_capacity(args.len());
    for arg in args {
        let negative = arg.as_encoded_bytes().strip_prefix(b"-").and_then(<[u8]>::first);
        let negative = negative.is_some_and(|byte| byte.is_ascii_digit() || *byte == b'.');
        match words.last_mut() {
            Some(flag) if negative && is_bare_flag(flag) => {
                flag.push("=");
                flag.push(arg);
            }
            _ => words.push(spelled(arg)),
        }
    }
    words
}

/// Whether a word is a long flag without a value in it.
fn is_bare_flag(word: &OsString) -> bool {
    let bytes = word.as_encoded_bytes();
    bytes.len() > 2 && bytes.starts_with(b"--") && !bytes.contains(&b'=')
}

fn spelled(arg: OsString) -> OsString {
    let Some(name) = arg.to_str().and_then(|text| text.strip_prefix("--")) else {
        return arg;
    };
    let (name, value) = match name.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (name, None),
    };
    let name = name.replace('-', "_");
    let negated = name.strip_prefix("no_").filter(|name| {
        table::find(name).is_some_and(|flag| flag.kind == Kind::Switch)
            || SHORTHANDS.iter().any(|short| short.names.contains(name))
            || IGNORED.iter().any(|ignored| ignored.names.contains(name))
            || ONLY_OFF.iter().any(|(only_off, _)| only_off == name)
            || ONLY_ON.iter().any(|(only_on, ..)| only_on == name)
    });
    match (negated, value) {
        (Some(name), None) => format!("--{name}=false"),
        (_, Some(value)) => format!("--{name}={value}"),
        (_, None) => format!("--{name}"),
    }
    .into()
}

/// Ranks that the environment names.
fn world() -> Result<u32> {
    Ok(World::from_env()?.world)
}

/// The settings that `train`, `plan` and `parity` share, for as many ranks as `world` says.
fn training(matches: &ArgMatches, world: &dyn Fn() -> Result<u32>) -> Result<Asked> {
    let mut raw = given(matches, FLAGS.iter())?;
    let mut notices = Vec::new();
    for short in SHORTHANDS {
        if matches.contains_id(short.names[0]) && truth(matches, short.names[0])? {
            raw.set(short.key, vec![short.value.into()], Origin::Flag)?;
        }
    }
    for ignored in IGNORED {
        for name in ignored.names {
            if matches.contains_id(name) {
                notices.push(format!("--{name} is accepted and changes nothing: {}", ignored.why));
            }
        }
    }
    for (name, instead) in ONLY_OFF {
        if let Some(value) = value(matches, name) {
            let off = boolean(&value) == Some(false) || value.parse() == Ok(0.0);
            if !off && !["", "none"].contains(&value.to_ascii_lowercase().as_str()) {
                return Err(Error::Usage(format!("--{name} {value} is not offered; {instead}")));
            }
            notices.push(format!("--{name} {value} is accepted and changes nothing: it is never on"));
        }
    }
    for (name, always, instead) in ONLY_ON {
        if let Some(value) = value(matches, name) {
            if boolean(&value) != Some(true) {
                return Err(Error::Usage(format!("--{name} {value} is not offered: {always}; {instead}")));
            }
            notices.push(format!("--{name} {value} is accepted and changes nothing: {always}"));
        }
    }
    raw.read_files(world, &mut notices)?;
    let settings = Settings::resolve(&raw, notices)?;
    Ok(match matches.get_flag("print_config") {
        // One copy of what all ranks would say.
        true if World::from_env()?.rank != 0 => Asked::Print(String::new()),
        true => Asked::Print(raw.print()),
        false => Asked::Run(Box::new(settings)),
    })
}

fn pack(matches: &ArgMatches) -> Result<Command> {
    let Some(("pack", matches)) = matches.subcommand() else { unreachable!("clap asks for a sub-command") };
    let inputs = matches.get_many::<String>("input").into_iter().flatten().cloned().collect();
    Ok(Command::DataPack {
        spec: DataSpec {
            flag: "INPUT",
            text_field: required(matches, "text_field"),
            on_bad_record: match required(matches, "on_bad_record").as_str() {
                "skip" => OnBadRecord::Skip,
                _ => OnBadRecord::Stop,
            },
            bos: truth(matches, "add_bos")?,
            eos: truth(matches, "add_eos")?,
            ..DataSpec::new(inputs)
        },
        tokenizer: required(matches, "tokenizer"),
        out: required(matches, "out").into(),
    })
}

fn replan(matches: &ArgMatches) -> Result<Command> {
    let raw = given(matches, replan_flags())?;
    let asked = |key: &str| -> Result<Option<String>> {
        match value(matches, key) {
            Some(_) => budget(&raw, key).map(|_| Some(raw.values(key).concat())),
            None => Ok(None),
        }
    };
    let request = NewBudgets {
        device_memory: asked("device_memory")?,
        host_memory: asked("host_memory")?,
        nvme_capacity: asked("nvme_capacity")?,
    };
    Ok(Command::Replan { run_dir: required(matches, "run_dir").into(), request })
}

fn sample(matches: &ArgMatches) -> Result<Command> {
    let number = |id: &str, expected: &str| {
        let text = required(matches, id);
        let number = text.parse::<f64>().ok().filter(|x| x.is_finite() && *x >= 0.0);
        number.ok_or_else(|| Error::Usage(format!("--{id} is {text}; {expected} was expected")))
    };
    let whole = |id: &str| match number(id, "a whole number")? {
        x if x.fract() == 0.0 && x < 1e9 => Ok(x as usize),
        x => Err(Error::Usage(format!("--{id} is {x}; a whole number below 10⁹ was expected"))),
    };
    let top_k = Some(whole("top_k")?).filter(|k| *k > 0);
    let mut notices = Vec::new();
    let temperature = match (matches.value_source("temperature"), top_k) {
        // Who names how many to draw from wants a draw.
        (Some(ValueSource::DefaultValue), Some(_)) => {
            notices.push("--top_k draws at temperature 1, as no --temperature is given".into());
            1.0
        }
        _ => number("temperature", "a number of at least 0")?,
    };
    let raw = given(matches, sample_flags())?;
    let settings = Box::new(Settings::resolve(&raw, notices)?);
    let request = Request {
        model: required(matches, "from").into(),
        tokenizer: value(matches, "tokenizer"),
        prompt: required(matches, "prompt"),
        max_new_tokens: whole("max_new_tokens")?,
        choice: Choice { temperature, top_k, seed: settings.seed },
    };
    Ok(Command::Sample { settings, request })
}

/// What was given of some rows of the table.
fn given(matches: &ArgMatches, flags: impl Iterator<Item = &'static Flag>) -> Result<Raw> {
    let mut raw = Raw::default();
    for flag in flags {
        if let Some(values) = matches.get_many::<String>(flag.key) {
            raw.set(flag.key, values.cloned().collect(), Origin::Flag)?;
        }
    }
    Ok(raw)
}

fn value(matches: &ArgMatches, id: &str) -> Option<String> {
    matches.get_one::<String>(id).cloned()
}

fn ranks(text: &str) -> Result<u32> {
    let count = text.parse().ok().filter(|count| *count > 0);
    count.ok_or_else(|| Error::Usage(format!("--ranks is {text}; a whole number of at least 1 was expected")))
}

/// The boolean that a flag was given or has by default.
fn truth(matches: &ArgMatches, id: &str) -> Result<bool> {
    let text = required(matches, id);
    boolean(&text).ok_or_else(|| Error::Usage(format!("--{id} is {text}; true or false was expected")))
}

fn required(matches: &ArgMatches, id: &str) -> String {
    value(matches, id).expect("clap checks required arguments and fills in defaults")
}

/// The command that `words` begin with, and how it is called: `castor data pack`.
fn command_of(words: &[String]) -> (clap::Command, String) {
    let (mut command, mut name) = (tree(), String::from("castor "));
    for word in words {
        let Some(inner) = command.find_subcommand(word) else { break };
        command = inner.clone();
        name.push_str(&format!("{word} "));
    }
    (command, name)
}

/// The names of a command's flags that are worth suggesting.
fn flags_of(command: &clap::Command) -> Vec<String> {
    let shown = command.get_arguments().filter(|arg| !arg.is_hide_set());
    let names = shown.flat_map(|arg| arg.get_long().into_iter().chain(arg.get_all_aliases().unwrap_or_default()));
    names.map(str::to_owned).collect()
}

/// clap's error on `words` as one sentence, with the flag that was probably meant.
fn usage(error: &clap::Error, words: &[String]) -> Error {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    };
    let meant = |near: Option<&str>, dashes: &str| {
        near.map(|near| format!("; did you mean {dashes}{near}?")).unwrap_or_default()
    };
    Error::Usage(match error.kind() {
        ErrorKind::UnknownArgument => {
            let typed = context(ContextKind::InvalidArg).unwrap_or_default();
            let name = typed.trim_start_matches('-').split('=').next().unwrap_or_default().replace('-', "_");
            match REFUSED.iter().find(|(refused, _)| *refused == name) {
                Some((_, why)) => format!("--{name}: {why}"),
                None if typed.starts_with("--") => {
                    let (command, called) = command_of(words);
                    let flags = flags_of(&command);
                    match nearest(&name, flags.iter().map(String::as_str)) {
                        near @ Some(_) => format!("unknown flag {typed}{}", meant(near, "--")),
                        None => format!("unknown flag {typed}; `{} --help` lists what there is", called.trim_end()),
                    }
                }
                None if typed.starts_with('-') => format!("unknown flag {typed}"),
                None => format!("{typed} is not expected here: values follow a flag"),
            }
        }
        ErrorKind::MissingSubcommand => "a command is missing; `castor --help` lists them".into(),
        ErrorKind::InvalidSubcommand => {
            let typed = context(ContextKind::InvalidSubcommand).unwrap_or_default();
            let tree = tree();
            let names: Vec<&str> = tree.get_subcommands().map(clap::Command::get_name).collect();
            format!(
                "unknown command {typed}{} (commands: {})",
                meant(nearest(&typed, names.iter().copied()), ""),
                names.join(", ")
            )
        }
        _ => {
            let text = error.to_string();
            let text = text.strip_prefix("error: ").unwrap_or(&text);
            let sentence = text.split("\n\nUsage").next().unwrap_or(text);
            let sentence = sentence.split("\n\nFor more").next().unwrap_or(sentence);
            sentence.split_whitespace().collect::<Vec<_>>().join(" ")
        }
    })
}

#[cfg(test)]
mod tests;
