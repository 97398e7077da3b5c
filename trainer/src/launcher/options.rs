//! The launcher's flags: everything between `castor run` and the sub-command.
//!
//! A small parser of its own, because what follows the sub-command belongs to the workers and must reach
//! them byte for byte. Flags may be spelt with `_` or `-`, as `--flag value` or `--flag=value`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::rendezvous::DEFAULT_TIMEOUT;

/// One flag: its name, its value's name (none for a switch) and what it does. An empty help text marks flags
/// that launchers pass to each other.
struct Flag {
    name: &'static str,
    value: Option<&'static str>,
    help: &'static str,
}

const fn flag(name: &'static str, value: Option<&'static str>, help: &'static str) -> Flag {
    Flag { name, value, help }
}

const FLAGS: &[Flag] = &[
    flag("nproc_per_node", Some("N|gpu"), "ranks per host [a host's slots, else 1]"),
    flag("nnodes", Some("N"), "number of hosts [as many as are named, else 1]"),
    flag("node_rank", Some("I"), "which host this is, when each host has its own `castor run`"),
    flag("master_addr", Some("HOST"), "where ranks meet [the first host]"),
    flag("master_port", Some("PORT"), "port there, 0 picks a free one [$MASTER_PORT, else 0]"),
    flag("host", Some("A,B"), "hosts to start ranks on, through ssh"),
    flag("hostfile", Some("FILE"), "hosts, one a line: NAME [slots=N]; # begins a comment"),
    flag("include", Some("HOSTS"), "only these: A@B:0,2 (DeepSpeed's form) or A,B"),
    flag("exclude", Some("HOSTS"), "all but these hosts or devices, same forms"),
    flag("ssh_port", Some("PORT"), "port of the hosts' ssh [ssh's own configuration]"),
    flag("remote_castor", Some("PATH"), "this program on the other hosts [the same path as here]"),
    flag("env", Some("NAME[=VALUE]"), "variable for the ranks; only these travel to other hosts"),
    flag("log_dir", Some("DIR"), "output of every rank in files; rank 0's also here"),
    flag("tee", None, "with --log_dir: every rank's output also here"),
    flag("max_restarts", Some("N"), "restart all ranks after a failure, at most N times [0]"),
    flag("timeout", Some("SECONDS"), "how long hosts and ranks wait for each other at a time [300]"),
    flag("grace", Some("SECONDS"), "after a failure, time between TERM and KILL [4]"),
    flag("help", None, "this text"),
    flag("supervised", None, ""),
    flag("preflight", None, ""),
    flag("first_rank", Some("N"), ""),
    flag("world_size", Some("N"), ""),
    flag("restart_count", Some("N"), ""),
    flag("devices", Some("I,J"), ""),
];

/// Other launchers' words for the same thing.
const ALIASES: &[(&str, &str)] = &[("num_nodes", "nnodes"), ("num_gpus", "nproc_per_node")];

/// Sub-commands that can be ranks.
pub(super) const COMMANDS: &[&str] = &["train", "parity"];

/// How many ranks a host gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Processes {
    /// This many.
    Count(u32),
    /// One per CUDA device.
    PerGpu,
}

/// The launcher's flags, read but not yet held against the world.
#[derive(Clone, Debug)]
pub struct Options {
    /// `--nproc_per_node`
    pub nproc_per_node: Option<Processes>,
    /// `--nnodes`
    pub nnodes: Option<u32>,
    /// `--node_rank`
    pub node_rank: Option<u32>,
    /// `--master_addr`, else `MASTER_ADDR`
    pub master_addr: Option<String>,
    /// `--master_port`, else `MASTER_PORT`; 0 picks a free one
    pub master_port: Option<u16>,
    /// `--host`
    pub host: Option<String>,
    /// `--hostfile`
    pub hostfile: Option<PathBuf>,
    /// `--include`
    pub include: Option<String>,
    /// `--exclude`
    pub exclude: Option<String>,
    /// `--ssh_port`
    pub ssh_port: Option<u16>,
    /// `--remote_castor`
    pub remote_castor: Option<PathBuf>,
    /// `--env`, each with its value
    pub env: Vec<(String, String)>,
    /// `--log_dir`
    pub log_dir: Option<PathBuf>,
    /// `--tee`
    pub tee: bool,
    /// `--max_restarts`
    pub max_restarts: u32,
    /// `--timeout`
    pub timeout: Duration,
    /// `--grace`
    pub grace: Duration,
    /// Whether another launcher supervises this one over its standard input.
    pub supervised: bool,
    /// Whether only to report what this host has.
    pub preflight: bool,
    /// Rank of this host's first process, set by the supervising launcher.
    pub first_rank: Option<u32>,
    /// Number of ranks over all hosts, set by the supervising launcher.
    pub world_size: Option<u32>,
    /// How often the supervising launcher has restarted the group.
    pub restart_count: u32,
    /// Devices of this host to use, by their logical numbers.
    pub devices: Vec<u32>,
    /// The sub-command and everything after it.
    pub command: Vec<OsString>,
}

/// What the command line asks for.
#[derive(Debug)]
pub enum Request {
    /// Print this and end.
    Help(String),
    /// Launch.
    Run(Box<Options>),
}

/// Reads what follows `castor run`. `environment` answers for `MASTER_ADDR`, `MASTER_PORT` and the names that
/// `--env` gives without a value.
///
/// # Errors
/// [`Error::Usage`] naming the flag, the value and what is allowed; for an unknown flag also the nearest one.
pub fn parse(arguments: &[OsString], environment: &dyn Fn(&str) -> Option<String>) -> Result<Request> {
    let (given, command) = split(arguments)?;
    if given.iter().any(|(name, _)| *name == "help") {
        return Ok(Request::Help(help()));
    }
    let last = |wanted: &str| {
        let found = given.iter().rev().find(|(name, _)| *name == wanted);
        found.map(|(_, value)| value.as_str())
    };
    let count = |name: &'static str| number::<u32>(name, last(name), "a whole number from 0 up");
    let positive = |name: &'static str| match count(name)? {
        Some(0) => Err(wrong(name, "0", "at least 1")),
        other => Ok(other),
    };
    let seconds = |name: &'static str, default: Duration| {
        let read = number::<u32>(name, last(name), "whole seconds")?;
        Ok::<_, Error>(read.map_or(default, |value| Duration::from_secs(value.into())))
    };
    let variable = |name: &str| environment(name).filter(|value| !value.is_empty());
    let port = "a port: 0 (any free one) to 65535";
    let master_port = match last("master_port") {
        Some(text) => number("master_port", Some(text), port)?,
        None => match variable("MASTER_PORT") {
            Some(text) => Some(text.parse().map_err(|_| Error::Usage(format!("MASTER_PORT={text} is not {port}")))?),
            None => None,
        },
    };
    let options = Options {
        nproc_per_node: match last("nproc_per_node") {
            Some("gpu") => Some(Processes::PerGpu),
            text => number("nproc_per_node", text, "a whole number or `gpu`")?.map(Processes::Count),
        },
        nnodes: positive("nnodes")?,
        node_rank: count("node_rank")?,
        master_addr: last("master_addr").map(str::to_owned).or_else(|| variable("MASTER_ADDR")),
        master_port,
        host: last("host").map(str::to_owned),
        hostfile: last("hostfile").map(PathBuf::from),
        include: last("include").map(str::to_owned),
        exclude: last("exclude").map(str::to_owned),
        ssh_port: number("ssh_port", last("ssh_port"), "a port: 1 to 65535")?,
        remote_castor: last("remote_castor").map(PathBuf::from),
        env: given
            .iter()
            .filter(|(name, _)| *name == "env")
            .map(|(_, text)| env_pair(text, environment))
            .collect::<Result<_>>()?,
        log_dir: last("log_dir").map(PathBuf::from),
        tee: last("tee").is_some(),
        max_restarts: count("max_restarts")?.unwrap_or(0),
        timeout: seconds("timeout", DEFAULT_TIMEOUT)?,
        grace: seconds("grace", Duration::from_secs(4))?,
        supervised: last("supervised").is_some(),
        preflight: last("preflight").is_some(),
        first_rank: count("first_rank")?,
        world_size: positive("world_size")?,
        restart_count: count("restart_count")?.unwrap_or(0),
        devices: match last("devices") {
            Some(text) => text
                .split(',')
                .map(|part| part.parse().map_err(|_| wrong("devices", text, "numbers like 0,2")))
                .collect::<Result<_>>()?,
            None => Vec::new(),
        },
        command,
    };
    check(&options)?;
    Ok(Request::Run(Box::new(options)))
}

/// Refuses what no world could make right.
fn check(options: &Options) -> Result<()> {
    let refuse = |sentence: &str| Err(Error::Usage(sentence.to_owned()));
    if options.nproc_per_node == Some(Processes::Count(0)) {
        return Err(wrong("nproc_per_node", "0", "at least 1, or `gpu`"));
    }
    if options.timeout.is_zero() {
        return Err(wrong("timeout", "0", "at least 1 second"));
    }
    if options.host.is_some() && options.hostfile.is_some() {
        return refuse("--host and --hostfile both name the hosts: give one of them");
    }
    if options.include.is_some() && options.exclude.is_some() {
        return refuse("--include and --exclude contradict each other: give one of them");
    }
    let hosts = options.host.is_some() || options.hostfile.is_some();
    if hosts && options.node_rank.is_some() {
        return refuse(
            "--node_rank is for hosts that each run their own launcher; with --host or --hostfile this one starts them all",
        );
    }
    if !hosts && !options.supervised {
        let nodes = options.nnodes.unwrap_or(1);
        match options.node_rank {
            None if nodes > 1 => {
                return Err(Error::Usage(format!(
                    "--nnodes {nodes} without hosts: name them with --host or --hostfile, or give --node_rank and --master_addr on each host"
                )));
            }
            Some(node) if node >= nodes => {
                return Err(Error::Usage(format!(
                    "--node_rank {node}: allowed are 0 to {} with --nnodes {nodes}",
                    nodes - 1
                )));
            }
            _ => {}
        }
        if nodes > 1 && options.master_addr.is_none() {
            return refuse("--master_addr is missing: name the host of node 0");
        }
        if nodes > 1 && options.max_restarts > 0 {
            return refuse(
                "--max_restarts needs one launcher that sees every host: use --host or --hostfile instead of --node_rank",
            );
        }
    }
    if options.tee && options.log_dir.is_none() {
        return refuse("--tee needs --log_dir: without it every rank's output is already shown here");
    }
    if options.command.is_empty() && !options.preflight {
        return refuse("what should the ranks run? castor run [launcher flags] train [training flags]");
    }
    Ok(())
}

/// Flags as (name, value) in the order given, and the sub-command with all that follows.
type Given = (Vec<(&'static str, String)>, Vec<OsString>);

fn split(arguments: &[OsString]) -> Result<Given> {
    let mut given = Vec::new();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let text =
            argument.to_str().ok_or_else(|| Error::Usage(format!("launcher flag {argument:?} is not valid UTF-8")))?;
        let text = match text {
            "-h" => "--help",
            "-H" => "--host",
            "-i" => "--include",
            "-e" => "--exclude",
            other => other,
        };
        let Some(body) = text.strip_prefix("--") else {
            if text.starts_with('-') {
                return Err(unknown(text.trim_start_matches('-'), text));
            }
            if !COMMANDS.contains(&text) {
                return Err(Error::Usage(format!("{text:?} cannot be run on ranks; allowed: {}", COMMANDS.join(", "))));
            }
            let command = std::iter::once(argument).chain(rest).cloned().collect();
            return Ok((given, command));
        };
        let (spelt, inline) = match body.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (body, None),
        };
        let flag = find(spelt).ok_or_else(|| unknown(spelt, &format!("--{spelt}")))?;
        let value = match (flag.value, inline) {
            (None, None) => String::new(),
            (None, Some(value)) => {
                return Err(wrong(flag.name, &value, "no value: it is a switch"));
            }
            (Some(what), Some(value)) if value.is_empty() => {
                return Err(Error::Usage(format!(
                    "--{}= has no value after the equals sign; expected {what}",
                    flag.name
                )));
            }
            (Some(_), Some(value)) => value,
            (Some(what), None) => match rest.next().map(|next| next.to_str()) {
                Some(Some(next)) if !next.is_empty() && !next.starts_with("--") => next.to_owned(),
                Some(None) => return Err(wrong(flag.name, "(not UTF-8)", what)),
                _ => {
                    return Err(Error::Usage(format!("--{} needs a value: {what}", flag.name)));
                }
            },
        };
        given.push((flag.name, value));
    }
    Ok((given, Vec::new()))
}

fn find(spelt: &str) -> Option<&'static Flag> {
    let name = spelt.replace('-', "_");
    let name = ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name.as_str(), |(_, meant)| meant);
    FLAGS.iter().find(|flag| flag.name == name)
}

fn unknown(spelt: &str, as_given: &str) -> Error {
    let name = spelt.replace('-', "_");
    let nearest = FLAGS
        .iter()
        .filter(|flag| !flag.help.is_empty())
        .map(|flag| (strsim::damerau_levenshtein(&name, flag.name), flag.name))
        .min()
        .filter(|(distance, meant)| *distance <= meant.len() / 3 + 1);
    Error::Usage(match nearest {
        Some((_, meant)) => {
            format!("unknown launcher flag {as_given}; did you mean --{meant}? (training flags go after `train`)")
        }
        None => format!(
            "unknown launcher flag {as_given}; `castor run --help` lists them (training flags go after `train`)"
        ),
    })
}

fn wrong(name: &str, value: &str, allowed: &str) -> Error {
    Error::Usage(format!("--{name} {value}: allowed is {allowed}"))
}

fn number<T: std::str::FromStr>(name: &str, text: Option<&str>, allowed: &str) -> Result<Option<T>> {
    text.map(|text| text.parse().map_err(|_| wrong(name, text, allowed))).transpose()
}

fn env_pair(text: &str, environment: &dyn Fn(&str) -> Option<String>) -> Result<(String, String)> {
    let (name, value) = match text.split_once('=') {
        Some((name, value)) => (name, value.to_owned()),
        None => match environment(text) {
            Some(value) => (text, value),
            None => {
                return Err(Error::Usage(format!(
                    "--env {text}: {text} is not set here; set it or write {text}=VALUE"
                )));
            }
        },
    };
    let mut letters = name.chars();
    let begins = letters.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_');
    if !begins || !letters.all(|c| c.is_ascii_alphanumeric() || c == '_') {
        return Err(wrong("env", text, "NAME or NAME=VALUE, a name of letters, digits and _"));
    }
    Ok((name.to_owned(), value))
}

fn help() -> String {
    let mut text = String::from(
        "castor run [launcher flags] train [training flags]\n\
         Starts one process per device on one or many hosts and watches over them.\n\n",
    );
    for flag in FLAGS.iter().filter(|flag| !flag.help.is_empty()) {
        let left = format!("--{} {}", flag.name, flag.value.unwrap_or_default());
        text.push_str(&format!("  {left:<26} {}\n", flag.help));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn os(arguments: &[&str]) -> Vec<OsString> {
        arguments.iter().map(OsString::from).collect()
    }

    fn run(arguments: &[&str]) -> Result<Box<Options>> {
        match parse(&os(arguments), &|name| (name == "SET").then(|| "its value".to_owned()))? {
            Request::Run(options) => Ok(options),
            Request::Help(text) => panic!("help: {text}"),
        }
    }

    fn refusal(arguments: &[&str]) -> String {
        let error = run(arguments).expect_err("must be refused");
        assert_eq!(error.exit_code(), 2);
        error.to_string()
    }

    #[test]
    fn everything_from_the_command_on_is_kept() {
        let tail = ["train", "--fsdp", "full_shard auto_wrap", "--x=a=b", "it's \"$HOME\"", "", "--tee", "gr\u{fc}n"];
        let mut all = vec!["--nproc-per-node=2", "--master_port", "0"];
        all.extend(tail);
        let options = run(&all).unwrap();
        assert_eq!(options.command, os(&tail));
        assert_eq!(options.nproc_per_node, Some(Processes::Count(2)));
        assert_eq!(options.master_port, Some(0));
        assert!(!options.tee);
    }

    #[test]
    fn both_spellings_and_other_launchers_words() {
        for name in ["--nproc_per_node", "--nproc-per-node", "--num_gpus", "--num-gpus"] {
            let options = run(&[name, "gpu", "train"]).unwrap();
            assert_eq!(options.nproc_per_node, Some(Processes::PerGpu));
        }
    }

    #[test]
    fn env_takes_values_from_here_or_from_the_flag() {
        let options = run(&["--env", "SET", "--env=B=x=y z", "--env", "C=", "train"]).unwrap();
        let expected = [("SET", "its value"), ("B", "x=y z"), ("C", "")];
        let expected: Vec<_> = expected.map(|(a, b)| (a.to_owned(), b.to_owned())).into();
        assert_eq!(options.env, expected);
        assert!(refusal(&["--env", "UNSET", "train"]).contains("UNSET is not set here"));
        assert!(refusal(&["--env", "a-b=1", "train"]).contains("a-b"));
    }

    #[test]
    fn refusals_name_flag_value_and_what_is_allowed() {
        for (arguments, parts) in [
            (vec!["--nproc_per_nod", "2", "train"], ["--nproc_per_nod", "did you mean --nproc_per_node"]),
            (vec!["--nporc-per-node", "2", "train"], ["--nporc-per-node", "did you mean --nproc_per_node"]),
            (vec!["--learning_rate", "2", "train"], ["--learning_rate", "after `train`"]),
            (vec!["-x", "train"], ["-x", "castor run --help"]),
            (vec!["--nproc_per_node", "0", "train"], ["--nproc_per_node 0", "at least 1"]),
            (vec!["--nproc_per_node", "two", "train"], ["--nproc_per_node two", "`gpu`"]),
            (vec!["--master_port", "66660", "train"], ["--master_port 66660", "65535"]),
            (vec!["--master_port", "-1", "train"], ["--master_port -1", "65535"]),
            (vec!["--master_port", "abc", "train"], ["--master_port abc", "65535"]),
            (vec!["--hostfile=", "/x", "train"], ["--hostfile=", "no value"]),
            (vec!["--hostfile", "--tee", "train"], ["--hostfile", "needs a value"]),
            (vec!["--tee=1", "train"], ["--tee 1", "switch"]),
            (vec!["--tee", "train"], ["--tee", "--log_dir"]),
            (vec!["--nproc_per_node", "2"], ["ranks run", "train"]),
            (vec!["trian"], ["trian", "train"]),
            (vec!["--host", "a", "--hostfile", "f", "train"], ["--host", "--hostfile"]),
            (vec!["--include", "a", "--exclude", "b", "train"], ["--include", "--exclude"]),
            (vec!["--nnodes", "2", "train"], ["--nnodes 2", "--host"]),
            (vec!["--nnodes", "2", "--node_rank", "2", "train"], ["--node_rank 2", "0 to 1"]),
            (vec!["--nnodes", "2", "--node_rank", "0", "train"], ["--master_addr", "node 0"]),
            (vec!["--host", "a", "--node_rank", "0", "train"], ["--node_rank", "--host"]),
        ] {
            let message = refusal(&arguments);
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        }
    }

    #[test]
    fn flag_wins_over_the_environment() {
        let environment = |name: &str| (name == "MASTER_PORT").then(|| "29555".to_owned());
        for (arguments, port) in [(vec!["train"], 29555), (vec!["--master_port=1", "train"], 1)] {
            let Ok(Request::Run(options)) = parse(&os(&arguments), &environment) else {
                panic!("must parse");
            };
            assert_eq!(options.master_port, Some(port));
        }
    }

    #[test]
    fn help_fits_a_screen() {
        let Ok(Request::Help(text)) = parse(&os(&["-h"]), &|_| None) else {
            panic!("help");
        };
        assert!(text.lines().count() <= 24 && text.lines().all(|line| line.len() <= 100));
        assert!(!text.contains("supervised"));
    }
}
