//! What the machine really has: memory limits of the control group, free memory, free disk space.

use std::path::Path;

/// Bytes of host memory that this process may still take: the least of the control group's limit (version 2
/// or 1) less what it uses, and the kernel's estimate of available memory. `None` if nothing can be read.
pub fn host_available_bytes() -> Option<u64> {
    let group = group_limit("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current").or_else(|| {
        group_limit("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes")
    });
    match (group, meminfo("MemAvailable")) {
        (Some(group), Some(free)) => Some(group.min(free)),
        (group, free) => group.or(free),
    }
}

/// Bytes of host memory that the machine or its control group has in all. A virtual machine may show less at
/// first and grow as memory is touched.
pub fn host_total_bytes() -> Option<u64> {
    let limit =
        read_number("/sys/fs/cgroup/memory.max").or_else(|| read_number("/sys/fs/cgroup/memory/memory.limit_in_bytes"));
    match (limit, meminfo("MemTotal")) {
        (Some(limit), Some(total)) => Some(limit.min(total)),
        (limit, total) => limit.or(total),
    }
}

/// Bytes that can still be written in `folder`'s file system by this user.
///
/// # Errors
/// If the folder cannot be examined.
pub fn disk_available_bytes(folder: &Path) -> std::io::Result<u64> {
    let stat = rustix::fs::statvfs(folder)?;
    Ok(stat.f_bavail * stat.f_frsize)
}

fn group_limit(limit: &str, used: &str) -> Option<u64> {
    // Version 1 writes a huge number for "no limit".
    let limit = read_number(limit).filter(|limit| *limit < 1 << 60)?;
    Some(limit.saturating_sub(read_number(used).unwrap_or(0)))
}

fn read_number(path: &str) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn meminfo(key: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.split(':').next() == Some(key))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}
