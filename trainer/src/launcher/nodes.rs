//! Who takes part: hosts, their numbers of ranks and devices, and the place where the ranks meet.

use std::net::TcpListener;

use super::Setup;
use super::hosts::{self, Host};
use super::options::{Options, Processes};
use super::remote::Ssh;
use crate::error::{Error, Result};

/// Port of rank 0 when each host has its own launcher and none is named: they must agree without talking.
const AGREED_PORT: u16 = 29_500;

/// One host's part of the world.
#[derive(Clone, Debug)]
pub(super) struct Node {
    /// As the user wrote it; this machine's own name if nobody did.
    pub(super) name: String,
    /// Whether it is this machine.
    pub(super) local: bool,
    /// Number of ranks; 0 until the devices have been counted.
    pub(super) ranks: u32,
    /// Whether that number is the number of CUDA devices.
    pub(super) per_gpu: bool,
    /// Devices by their logical numbers; empty: all.
    pub(super) devices: Vec<u32>,
}

/// This launcher's part of the world, and where all ranks meet.
pub(super) struct Part {
    /// Number of ranks over all hosts.
    pub(super) size: u32,
    /// The first rank started from here.
    pub(super) first_rank: u32,
    /// Which host this is.
    pub(super) node_rank: u32,
    /// Host of rank 0, as every host can reach it.
    pub(super) master_addr: String,
    /// Port there.
    pub(super) master_port: u16,
}

/// Which hosts take part, before any of them has been asked.
pub(super) fn nodes(options: &Options, own_name: &str) -> Result<Vec<Node>> {
    let listed = match (&options.host, &options.hostfile) {
        (Some(list), _) => hosts::from_list(list)?,
        (None, Some(path)) => hosts::from_file(path)?,
        (None, None) => vec![Host { name: "localhost".into(), slots: None, devices: options.devices.clone() }],
    };
    let mut listed = match (&options.include, &options.exclude) {
        (Some(filter), _) => hosts::include(listed, filter)?,
        (None, Some(filter)) => hosts::exclude(listed, filter)?,
        (None, None) => listed,
    };
    let several = options.host.is_some() || options.hostfile.is_some();
    if let Some(count) = options.nnodes.filter(|_| several) {
        if count as usize > listed.len() {
            return Err(Error::Usage(format!(
                "--nnodes {count}: the number of hosts that are named is {}; name as many, or ask for fewer",
                listed.len()
            )));
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
pub(super) fn prepare(nodes: &mut [Node], options: &Options, setup: &Setup<'_>, ssh: &Ssh<'_>) -> Result<u16> {
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

impl Part {
    /// Counts the ranks. Where each host has a launcher of its own, all are taken to have as many as this one.
    pub(super) fn of(nodes: &[Node], options: &Options, own_name: &str, port: u16) -> Result<Part> {
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
        Ok(Part {
            size,
            first_rank: options.first_rank.unwrap_or(node_rank.saturating_mul(here)),
            node_rank,
            master_addr,
            master_port: port,
        })
    }
}

/// `CUDA_VISIBLE_DEVICES` for chosen logical devices: numbers count within what is visible already.
pub(super) fn visible_devices(chosen: &[u32], visible: Option<String>) -> Result<String> {
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

/// Checks that rank 0 can listen on a port of this machine, or picks a free one for 0.
pub(super) fn free_port(port: u16) -> Result<u16> {
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
