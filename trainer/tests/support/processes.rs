//! Other processes, as `/proc` shows them.

use rustix::process::Pid;
use std::fs;

/// Fields of a process's `stat` from its state on; none if it is gone.
fn stat(pid: Pid) -> Option<Vec<String>> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    Some(stat.rsplit(')').next()?.split_whitespace().map(str::to_owned).collect())
}

/// Whether a process is there and not only waiting to be reaped.
pub fn is_alive(pid: Pid) -> bool {
    stat(pid).is_some_and(|stat| stat[0] != "Z")
}

/// A variable that a process was started with.
pub fn variable(pid: Pid, name: &str) -> Option<String> {
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let text = String::from_utf8_lossy(&environment).into_owned();
    text.split('\0').find_map(|pair| Some(pair.strip_prefix(name)?.strip_prefix('=')?.to_owned()))
}

/// The ranks that a launcher has started and that are alive, in rank order.
pub fn ranks_of(launcher: u32) -> Vec<Pid> {
    let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let pids = processes.filter_map(|name| Pid::from_raw(name.parse().ok()?));
    let children = pids.filter(|pid| stat(*pid).is_some_and(|stat| stat[0] != "Z" && stat[1] == launcher.to_string()));
    let rank = |pid: Pid| variable(pid, "RANK")?.parse::<u32>().ok();
    let mut ranks: Vec<(u32, Pid)> = children.filter_map(|pid| Some((rank(pid)?, pid))).collect();
    ranks.sort_unstable_by_key(|(rank, _)| *rank);
    ranks.into_iter().map(|(_, pid)| pid).collect()
}
