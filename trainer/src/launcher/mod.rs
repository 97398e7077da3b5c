//! `castor run`: starts one process per device on one or many hosts and watches over them.
//!
//! Ranks on this machine are child processes of the same program, with `RANK`, `WORLD_SIZE`, `LOCAL_RANK`,
//! `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` and `RESTART_COUNT` set. Every other host gets a launcher
//! of its own through ssh, which is told where its ranks begin. What holds, whatever happens:
//!
//! - the first failure is named (rank, host, cause, last lines) and its exit code becomes the launcher's;
//! - nothing is left running: not after a failure, not after a signal, not after the launcher is killed
//!   with -9 (the ranks here have asked the kernel for a signal in that case, see [`follow_launcher`]; the
//!   launchers there see their standard input end);
//! - signals reach the ranks, so that they can write a checkpoint.
//!
//! It knows nothing of training: the sub-command and its flags are passed on byte for byte.

mod group;
mod hosts;
mod nodes;
mod options;
mod output;
mod remote;
mod signals;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

use group::{Member, Outcome, Show};
use nodes::{Node, Part, free_port, visible_devices};
use options::{Options, Request};
use output::{log_file, say};
use remote::{Preflight, Ssh};
use signals::Events;
pub(crate) use signals::ending as ending_signals;

use crate::error::{Error, Result};

/// Names the launcher's process to its ranks.
const LAUNCHER_PID: &str = "CASTOR_LAUNCHER_PID";

/// What the launcher takes from outside.
pub struct Setup<'a> {
    /// The program that ranks run; `castor` itself.
    pub program: PathBuf,
    /// The program `ssh`, looked for on PATH if it is a bare name.
    pub ssh: OsString,
    /// Number of CUDA devices of this machine.
    pub device_count: &'a dyn Fn() -> Result<u32>,
    /// A variable of this process's environment.
    pub environment: &'a dyn Fn(&str) -> Option<String>,
}

impl<'a> Setup<'a> {
    /// This process's own program and environment, and the system's ssh.
    ///
    /// # Errors
    /// [`Error::Failed`] if the system does not tell where the program lies.
    pub fn of_this_process(device_count: &'a dyn Fn() -> Result<u32>) -> Result<Setup<'a>> {
        Ok(Setup {
            program: std::env::current_exe()
                .map_err(|error| Error::Failed(format!("where this program lies is not known: {error}")))?,
            ssh: "ssh".into(),
            device_count,
            environment: &|name| std::env::var(name).ok(),
        })
    }
}

/// Runs `castor run` with the arguments that follow `run`. Returns the exit code: 0, the failed rank's, or
/// 128 + signal.
///
/// Call it from the process's main thread: ranks end when the thread that started them does.
///
/// # Errors
/// [`Error::Usage`] for the command line and host files; [`Error::Failed`] if a host, the port or a process
/// cannot be had. Nothing is running then.
pub fn main(arguments: &[OsString], setup: &Setup<'_>) -> Result<u8> {
    let options = match options::parse(arguments, setup.environment)? {
        Request::Help(text) => {
            use std::io::Write;
            let _ = std::io::stdout().lock().write_all(text.as_bytes());
            return Ok(0);
        }
        Request::Run(options) => options,
    };
    if options.preflight {
        return preflight(&options, setup);
    }
    let own_name = hosts::own_name();
    let mut nodes = nodes::nodes(&options, &own_name)?;
    let events = Events::listen(options.supervised)?;
    let current =
        std::env::current_dir().map_err(|error| Error::Failed(format!("the current folder is gone: {error}")))?;
    let ssh = Ssh {
        program: &setup.ssh,
        port: options.ssh_port,
        castor: options.remote_castor.as_deref().unwrap_or(&setup.program),
        folder: &current,
        timeout: options.timeout,
    };
    let mut restart = options.restart_count;
    loop {
        let port = nodes::prepare(&mut nodes, &options, setup, &ssh)?;
        let part = Part::of(&nodes, &options, &own_name, port)?;
        let members = members(&nodes, &options, setup, &ssh, &part, restart)?;
        match group::run(members, &events, options.grace, options.timeout)? {
            Outcome::Done => return Ok(0),
            Outcome::Stopped => return Ok(1),
            Outcome::Interrupted(signal) => {
                say(&format!("interrupted by signal {}", signals::signal_name(signal)));
                return Ok(128 + signal as u8);
            }
            // A wrong command line or a plan that does not fit is as wrong the second time.
            Outcome::Failed(code @ (2 | 3)) => return Ok(code),
            Outcome::Failed(code) if restart - options.restart_count >= options.max_restarts => {
                return Ok(code);
            }
            Outcome::Failed(_) => {
                restart += 1;
                say(&format!("restart {restart} of {}", options.max_restarts));
            }
        }
    }
}

/// Ties this process to the launcher that started it, if one did: it is killed when the launcher ends,
/// however that happens. Ranks call it first of all.
///
/// # Errors
/// [`Error::Failed`] if the launcher is gone already.
pub fn follow_launcher() -> Result<()> {
    let Some(launcher) = std::env::var_os(LAUNCHER_PID) else {
        return Ok(());
    };
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(|error| Error::Failed(format!("cannot follow the launcher: {error}")))?;
    // The launcher may have ended before the request above; then another process is the parent now.
    let parent = rustix::process::Pid::as_raw(rustix::process::getppid());
    if launcher.to_str() == Some(parent.to_string().as_str()) {
        Ok(())
    } else {
        Err(Error::Failed(format!("the launcher (process {}) that started this rank is gone", launcher.display())))
    }
}

/// Everything to start: this machine's ranks, and one launcher per other host.
fn members(
    nodes: &[Node],
    options: &Options,
    setup: &Setup<'_>,
    ssh: &Ssh<'_>,
    part: &Part,
    restart: u32,
) -> Result<Vec<Member>> {
    let mut members = Vec::new();
    let mut rank = part.first_rank;
    for (index, node) in nodes.iter().enumerate() {
        if node.local {
            for local_rank in 0..node.ranks {
                members.push(local_member(node, options, setup, part, restart, rank + local_rank, local_rank)?);
            }
        } else {
            members.push(Member {
                label: format!("host {}", node.name),
                command: ssh.command(&node.name, &remote_arguments(node, index, options, ssh, part, restart, rank)),
                remote: true,
                show: Show::Lines(String::new()),
                files: None,
            });
        }
        rank += node.ranks;
    }
    Ok(members)
}

fn local_member(
    node: &Node,
    options: &Options,
    setup: &Setup<'_>,
    part: &Part,
    restart: u32,
    rank: u32,
    local_rank: u32,
) -> Result<Member> {
    let mut command = Command::new(&setup.program);
    command.args(&options.command);
    command.envs(options.env.iter().map(|(name, value)| (name, value)));
    command.env("RANK", rank.to_string());
    command.env("WORLD_SIZE", part.size.to_string());
    command.env("LOCAL_RANK", local_rank.to_string());
    command.env("LOCAL_WORLD_SIZE", node.ranks.to_string());
    command.env("GROUP_RANK", part.node_rank.to_string());
    command.env("MASTER_ADDR", &part.master_addr);
    command.env("MASTER_PORT", part.master_port.to_string());
    command.env("RESTART_COUNT", restart.to_string());
    command.env("CASTOR_TIMEOUT", options.timeout.as_secs().to_string());
    command.env(LAUNCHER_PID, std::process::id().to_string());
    if !node.devices.is_empty() {
        let visible = visible_devices(&node.devices, (setup.environment)("CUDA_VISIBLE_DEVICES"))?;
        command.env("CUDA_VISIBLE_DEVICES", visible);
    }
    let files = match &options.log_dir {
        None => None,
        Some(folder) => {
            let folder = match options.max_restarts.max(restart) {
                0 => folder.clone(),
                _ => folder.join(format!("attempt_{restart}")),
            };
            let stem = folder.join(format!("rank_{rank}"));
            Some((
                log_file(&stem.with_extension("out"))?,
                log_file(&stem.with_extension("err"))?,
                format!("{}.{{out,err}}", stem.display()),
            ))
        }
    };
    let show = match (rank, &options.log_dir) {
        (0, _) => Show::Inherit,
        (_, Some(_)) if !options.tee => Show::Nothing,
        _ => Show::Lines(format!("[rank {rank}] ")),
    };
    let host = if options.supervised || options.node_rank.is_some() {
        format!(" on host {}", hosts::own_name())
    } else {
        format!(" on {}", node.name)
    };
    Ok(Member { label: format!("rank {rank}{host}"), command, remote: false, show, files })
}

/// The supervised launcher's flags. `rank` is the first on that host.
fn remote_arguments(
    node: &Node,
    index: usize,
    options: &Options,
    ssh: &Ssh<'_>,
    part: &Part,
    restart: u32,
    rank: u32,
) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = vec!["--supervised".into()];
    let mut give = |flag: &str, value: &OsStr| {
        let mut joined = OsString::from(format!("--{flag}="));
        joined.push(value);
        arguments.push(joined);
    };
    for (flag, value) in [
        ("nproc_per_node", node.ranks),
        ("node_rank", index as u32),
        ("first_rank", rank),
        ("world_size", part.size),
        ("restart_count", restart),
        ("master_port", part.master_port.into()),
    ] {
        give(flag, value.to_string().as_ref());
    }
    give("timeout", options.timeout.as_secs().to_string().as_ref());
    give("grace", options.grace.as_secs().to_string().as_ref());
    give("master_addr", part.master_addr.as_ref());
    if !node.devices.is_empty() {
        let devices: Vec<String> = node.devices.iter().map(u32::to_string).collect();
        give("devices", devices.join(",").as_ref());
    }
    for (name, value) in &options.env {
        give("env", format!("{name}={value}").as_ref());
    }
    if let Some(folder) = &options.log_dir {
        let folder: &Path = &ssh.folder.join(folder);
        give("log_dir", folder.as_os_str());
        if options.tee {
            arguments.push("--tee".into());
        }
    }
    arguments.extend(options.command.iter().cloned());
    arguments
}

/// Answers another launcher: what this host has.
fn preflight(options: &Options, setup: &Setup<'_>) -> Result<u8> {
    use std::io::Write;
    let found = Preflight {
        devices: (setup.device_count)().unwrap_or(0),
        port: match options.master_port {
            Some(port) => free_port(port)?,
            None => 0,
        },
    };
    writeln!(std::io::stdout().lock(), "{}", found.line())
        .map_err(|error| Error::Failed(format!("cannot answer: {error}")))?;
    Ok(0)
}
