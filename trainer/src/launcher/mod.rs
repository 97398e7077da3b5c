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
mod options;
mod output;
mod remote;
mod signals;

use std::ffi::{OsStr, OsString};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use group::{Member, Outcome, Show};
use options::{Options, Processes, Request};
use output::{log_file, say};
use remote::{Preflight, Ssh};
use signals::Events;

use crate::error::{Error, Result};

/// Port of rank 0 when each host has its own launcher and none is named: they must agree without talking.
const AGREED_PORT: u16 = 29_500;
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
    let mut nodes = nodes(&options, &own_name)?;
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
        let port = prepare(&mut nodes, &options, setup, &ssh)?;
        let world = World::of(&nodes, &options, &own_name, port)?;
        let members = members(&nodes, &options, setup, &ssh, &world, restart)?;
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

/// One host's part of the world.
#[derive(Clone, Debug)]
struct Node {
    /// As the user wrote it; this machine's own name if nobody did.
    name: String,
    /// Whether it is this machine.
    local: bool,
    /// Number of ranks; 0 until the devices have been counted.
    ranks: u32,
    /// Whether that number is the number of CUDA devices.
    per_gpu: bool,
    /// Devices by their logical numbers; empty: all.
    devices: Vec<u32>,
}

/// What all ranks are told alike.
struct World {
    size: u32,
    first_rank: u32,
    node_rank: u32,
    master_addr: String,
    master_port: u16,
}

/// Which hosts take part, before any of them has been asked.
fn nodes(options: &Options, own_name: &str) -> Result<Vec<Node>> {
    let listed = match (&options.host, &options.hostfile) {
        (Some(list), _) => hosts::from_list(list)?,
        (None, Some(path)) => hosts::from_file(path)?,
        (None, None) => vec![hosts::Host { name: "localhost".into(), slots: None, devices: options.devices.clone() }],
    };
    let mut listed = match (&options.include, &options.exclude) {
        (Some(filter), _) => hosts::include(listed, filter)?,
        (None, Some(filter)) => hosts::exclude(listed, filter)?,
        (None, None) => listed,
    };
    let several = options.host.is_some() || options.hostfile.is_some();
    if let Some(count) = options.nnodes.filter(|_| several) {
        if count as usize > listed.len() {
            return Err(Error::Usage(format!("--nnodes {count}: only {} hosts are named", listed.len())));
        }
        listed.truncate(count as usize);
    }
    let nodes: Vec<Node> = listed
        .into_iter()
        .map(|host| {
            let room = match host.devices.len() {
                0 => host.slots,
                chosen => Some(chosen as u32),
            };
            let ranks = match options.nproc_per_node {
                Some(Processes::Count(count)) => count,
                Some(Processes::PerGpu) => 0,
                None => room.unwrap_or(1),
            };
            if let Some(room) = room.filter(|room| ranks > *room) {
                return Err(Error::Usage(format!("--nproc_per_node {ranks}: host {} has {room} slots", host.name)));
            }
            Ok(Node {
                local: hosts::is_this_machine(&host.name, own_name),
                ranks,
                per_gpu: options.nproc_per_node == Some(Processes::PerGpu),
                name: host.name,
                devices: host.devices,
            })
        })
        .collect::<Result<_>>()?;
    if nodes.iter().filter(|node| node.local).count() > 1 {
        return Err(Error::Usage("two of the hosts are this machine: name it once and give --nproc_per_node".into()));
    }
    Ok(nodes)
}

/// Asks all hosts at once what they have, settles the numbers of ranks, and finds the port where they meet.
/// Run again before a restart: a host may be gone, and a port that was picked may be taken by now.
fn prepare(nodes: &mut [Node], options: &Options, setup: &Setup<'_>, ssh: &Ssh<'_>) -> Result<u16> {
    let wanted_port = |index: usize| (index == 0).then(|| options.master_port.unwrap_or(0));
    let others: Vec<(&str, Option<u16>)> = nodes
        .iter()
        .enumerate()
        .filter(|(_, node)| !node.local)
        .map(|(index, node)| (node.name.as_str(), wanted_port(index)))
        .collect();
    let mut answers = ssh.preflight(&others)?.into_iter();
    let mut port = None;
    for (index, node) in nodes.iter_mut().enumerate() {
        let found = if node.local { None } else { answers.next() };
        if node.per_gpu {
            let devices = match (&found, node.devices.len()) {
                (_, chosen @ 1..) => chosen as u32,
                (Some(found), 0) => found.devices,
                (None, 0) => (setup.device_count)()?,
            };
            if devices == 0 {
                return Err(Error::Usage(format!(
                    "--nproc_per_node gpu: {} has no CUDA device; give a number of ranks, or see `castor doctor`",
                    node.name
                )));
            }
            node.ranks = devices;
        }
        if index == 0 {
            port = found.map(|found| found.port);
        }
    }
    // With a launcher on each host only the first host's may look for the port, and none may pick one.
    let own_launchers = options.node_rank.is_some() && options.nnodes.is_some_and(|count| count > 1);
    match port {
        Some(port) => Ok(port),
        None if options.supervised => Ok(options.master_port.unwrap_or(AGREED_PORT)),
        None if own_launchers => {
            let port = match options.master_port {
                None => AGREED_PORT,
                Some(0) => {
                    return Err(Error::Usage(
                        "--master_port 0 with --node_rank: the hosts cannot agree on a picked port; name one".into(),
                    ));
                }
                Some(port) => port,
            };
            if options.node_rank == Some(0) {
                free_port(port)?;
            }
            Ok(port)
        }
        None => free_port(options.master_port.unwrap_or(0)),
    }
}

impl World {
    fn of(nodes: &[Node], options: &Options, own_name: &str, port: u16) -> Result<World> {
        let here: u32 = nodes.iter().map(|node| node.ranks).sum();
        let node_rank = options.node_rank.unwrap_or(0);
        let size = match options.world_size {
            Some(size) => size,
            None if options.node_rank.is_some() => here.saturating_mul(options.nnodes.unwrap_or(1)),
            None => here,
        };
        let remote = nodes.iter().any(|node| !node.local);
        let master_addr = match &options.master_addr {
            Some(address) => address.clone(),
            None if !remote => "127.0.0.1".into(),
            None => {
                let first = &nodes[0].name;
                if nodes[0].local && !hosts::is_this_machine(first, "") {
                    first.clone()
                } else if !nodes[0].local {
                    // ssh's form may carry a user.
                    first.rsplit('@').next().unwrap_or(first).trim_matches(['[', ']']).to_owned()
                } else {
                    return Err(Error::Usage(format!(
                        "--master_addr is missing: other hosts cannot reach this one as {first}; name it as they know it{}",
                        if own_name.is_empty() { String::new() } else { format!(" (here it is called {own_name})") }
                    )));
                }
            }
        };
        Ok(World {
            size,
            first_rank: options.first_rank.unwrap_or(node_rank.saturating_mul(here)),
            node_rank,
            master_addr,
            master_port: port,
        })
    }
}

/// Everything to start: this machine's ranks, and one launcher per other host.
fn members(
    nodes: &[Node],
    options: &Options,
    setup: &Setup<'_>,
    ssh: &Ssh<'_>,
    world: &World,
    restart: u32,
) -> Result<Vec<Member>> {
    let mut members = Vec::new();
    let mut rank = world.first_rank;
    for (index, node) in nodes.iter().enumerate() {
        if node.local {
            for local_rank in 0..node.ranks {
                members.push(local_member(node, options, setup, world, restart, rank + local_rank, local_rank)?);
            }
        } else {
            members.push(Member {
                label: format!("host {}", node.name),
                command: ssh.command(&node.name, &remote_arguments(node, index, options, ssh, world, restart, rank)),
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
    world: &World,
    restart: u32,
    rank: u32,
    local_rank: u32,
) -> Result<Member> {
    let mut command = Command::new(&setup.program);
    command.args(&options.command);
    command.envs(options.env.iter().map(|(name, value)| (name, value)));
    command.env("RANK", rank.to_string());
    command.env("WORLD_SIZE", world.size.to_string());
    command.env("LOCAL_RANK", local_rank.to_string());
    command.env("LOCAL_WORLD_SIZE", node.ranks.to_string());
    command.env("GROUP_RANK", world.node_rank.to_string());
    command.env("MASTER_ADDR", &world.master_addr);
    command.env("MASTER_PORT", world.master_port.to_string());
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
    world: &World,
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
        ("world_size", world.size),
        ("restart_count", restart),
        ("master_port", world.master_port.into()),
    ] {
        give(flag, value.to_string().as_ref());
    }
    give("timeout", options.timeout.as_secs().to_string().as_ref());
    give("grace", options.grace.as_secs().to_string().as_ref());
    give("master_addr", world.master_addr.as_ref());
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

/// `CUDA_VISIBLE_DEVICES` for chosen logical devices: numbers count within what is visible already.
fn visible_devices(chosen: &[u32], visible: Option<String>) -> Result<String> {
    let visible = visible.unwrap_or_default();
    let visible: Vec<&str> = visible.split(',').map(str::trim).filter(|id| !id.is_empty()).collect();
    let names: Vec<String> = chosen
        .iter()
        .map(|&device| match (visible.is_empty(), visible.get(device as usize)) {
            (true, _) => Ok(device.to_string()),
            (false, Some(id)) => Ok((*id).to_owned()),
            (false, None) => Err(Error::Usage(format!(
                "device {device} was asked for, but CUDA_VISIBLE_DEVICES={} shows only {}",
                visible.join(","),
                visible.len()
            ))),
        })
        .collect::<Result<_>>()?;
    Ok(names.join(","))
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

/// Checks that rank 0 can listen on a port of this machine, or picks a free one for 0.
fn free_port(port: u16) -> Result<u16> {
    let listener = TcpListener::bind(("0.0.0.0", port)).map_err(|error| {
        let reason = match error.kind() {
            std::io::ErrorKind::AddrInUse => "is in use on this machine".to_owned(),
            std::io::ErrorKind::PermissionDenied => "may not be used by this user".to_owned(),
            _ => format!("cannot be used: {error}"),
        };
        Error::Failed(format!("--master_port {port} {reason}; name another, or 0 for any free one"))
    })?;
    let address = listener.local_addr().map_err(|error| Error::Failed(format!("--master_port {port}: {error}")))?;
    Ok(address.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chosen_devices_count_within_the_visible_ones() {
        assert_eq!(visible_devices(&[0, 2], None).unwrap(), "0,2");
        assert_eq!(visible_devices(&[0], Some("1".into())).unwrap(), "1");
        assert_eq!(visible_devices(&[1, 0], Some("3, GPU-ab".into())).unwrap(), "GPU-ab,3");
        let message = visible_devices(&[1], Some("3".into())).unwrap_err().to_string();
        assert!(message.contains("CUDA_VISIBLE_DEVICES=3"), "{message}");
    }

    #[test]
    fn a_port_in_use_is_refused_and_zero_picks_one() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let message = free_port(port).unwrap_err().to_string();
        assert!(message.contains(&port.to_string()) && message.contains("in use"), "{message}");
        assert_ne!(free_port(0).unwrap(), 0);
    }
}
