//! `castor doctor`: what this machine has, what is missing and what to do about it.
//!
//! Reads `/proc`, `/sys` and the folder for offloaded chunks. What lies in the hardware layer (CUDA, io_uring) is
//! asked through [`Probes`]: this file owns the words. How fast it all is, [`crate::measure`] finds out.

use castor_kernels::block_io::{BlockFile, BlockOptions};
use std::path::{Path, PathBuf};

/// How a finding stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// There, and usable.
    Found,
    /// There, with a limit that costs speed or room.
    Limited,
    /// Not there.
    Missing,
}

/// One line of the survey.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What was looked for.
    pub what: String,
    /// How it stands.
    pub state: State,
    /// What was found, with numbers.
    pub detail: String,
    /// What still works without it and what to do; none if nothing needs doing.
    pub advice: Option<String>,
}

impl Finding {
    /// Something that is there.
    pub fn found(what: &str, detail: impl Into<String>) -> Finding {
        Finding { what: what.into(), state: State::Found, detail: detail.into(), advice: None }
    }

    /// Something that is there in part.
    pub fn limited(what: &str, detail: impl Into<String>, advice: impl Into<String>) -> Finding {
        let advice = Some(advice.into());
        Finding { what: what.into(), state: State::Limited, detail: detail.into(), advice }
    }

    /// Something that is not there.
    pub fn missing(what: &str, detail: impl Into<String>, advice: impl Into<String>) -> Finding {
        let advice = Some(advice.into());
        Finding { what: what.into(), state: State::Missing, detail: detail.into(), advice }
    }
}

/// Questions to the hardware layer.
pub struct Probes<'a> {
    /// Driver, libraries and devices.
    pub cuda: &'a dyn Fn() -> Vec<Finding>,
    /// io_uring and what else file transfers in this folder depend on.
    pub block_io: &'a dyn Fn(&Path) -> Vec<Finding>,
}

/// Looks at everything. `folder` is where chunks would be offloaded to.
pub fn survey(folder: &Path, probes: &Probes<'_>) -> Vec<Finding> {
    let machine = Machine::this();
    let mut findings = vec![machine.cpu(), machine.memory(), memlock()];
    findings.extend((probes.cuda)());
    findings.extend(disk(folder));
    findings.extend((probes.block_io)(folder));
    findings.push(ssh(std::env::var_os("PATH").as_deref()));
    findings
}

/// How files in `folder` would be read and written: the rung that the disk tier would stand on, and why not a better one.
pub fn block_io(folder: &Path) -> Vec<Finding> {
    const WHAT: &str = "disk tier";
    match BlockFile::create(folder, 1 << 20, &BlockOptions::default()) {
        Ok(file) => match file.refused().first() {
            None => vec![Finding::found(WHAT, format!("{:?}", file.rung()))],
            Some((rung, reason)) => {
                let detail = format!("{:?}; {rung:?} was refused: {reason}", file.rung());
                vec![Finding::limited(WHAT, detail, "--nvme works, slower")]
            }
        },
        Err(error) => vec![Finding::missing(WHAT, error.to_string(), "give --nvme a folder that can be written")],
    }
}

/// The survey as text, a line per finding and one below it where something is to be done.
pub fn render(findings: &[Finding]) -> String {
    let width = findings.iter().map(|finding| finding.what.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for finding in findings {
        let state = match finding.state {
            State::Found => "found  ",
            State::Limited => "limited",
            State::Missing => "missing",
        };
        let padding = " ".repeat(width - finding.what.chars().count());
        text.push_str(&format!("{}{padding}  {state}  {}\n", finding.what, finding.detail));
        if let Some(advice) = &finding.advice {
            text.push_str(&format!("{:width$}           → {advice}\n", ""));
        }
    }
    text
}

/// A machine as its `/proc` and `/sys` describe it.
pub struct Machine {
    root: PathBuf,
}

/// How much host memory this process may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostMemory {
    /// Installed, bytes.
    pub total: u64,
    /// Can be had now without pushing anything out, bytes; within the limit.
    pub available: u64,
    /// The control group's limit in bytes and the file that says so.
    pub limit: Option<(u64, PathBuf)>,
}

impl Machine {
    /// The machine this runs on.
    pub fn this() -> Machine {
        Machine { root: PathBuf::from("/") }
    }

    fn read(&self, path: impl AsRef<Path>) -> Option<String> {
        std::fs::read_to_string(self.root.join(path)).ok()
    }

    /// Host memory within the limits of every control group above this process, v2 or v1.
    pub fn host_memory(&self) -> Option<HostMemory> {
        let meminfo = self.read("proc/meminfo")?;
        let field = |name: &str| {
            let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
            Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
        };
        let total = field("MemTotal:")?;
        let mut memory = HostMemory { total, available: field("MemAvailable:")?, limit: None };
        for (folder, limit_name, used_name) in self.memory_groups() {
            let number = |name: &str| -> Option<u64> { self.read(folder.join(name))?.trim().parse().ok() };
            // Absent, "max", or v1's number above any memory: no limit.
            let Some(limit) = number(limit_name).filter(|limit| *limit < total) else {
                continue;
            };
            let left = limit.saturating_sub(number(used_name).unwrap_or(0));
            memory.available = memory.available.min(left);
            if memory.limit.as_ref().is_none_or(|(least, _)| limit < *least) {
                memory.limit = Some((limit, Path::new("/").join(folder.join(limit_name))));
            }
        }
        Some(memory)
    }

    /// Folders of the control groups that limit this process's memory, innermost first, with their files' names.
    fn memory_groups(&self) -> Vec<(PathBuf, &'static str, &'static str)> {
        let mut groups = Vec::new();
        for line in self.read("proc/self/cgroup").unwrap_or_default().lines() {
            let mut fields = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
                continue;
            };
            let (mount, limit, used) = match controllers {
                "" => ("sys/fs/cgroup", "memory.max", "memory.current"),
                v1 if v1.split(',').any(|name| name == "memory") => {
                    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
                }
                _ => continue,
            };
            // In a container the path may be that of the host; the mount's root then is the group.
            for ancestor in Path::new(path.trim_start_matches('/')).ancestors() {
                groups.push((Path::new(mount).join(ancestor), limit, used));
            }
        }
        groups
    }

    fn memory(&self) -> Finding {
        let Some(memory) = self.host_memory() else {
            return Finding::missing(
                "host memory",
                "/proc/meminfo is not readable",
                "give --host_memory; nothing can be checked against it",
            );
        };
        let figures = format!("{} MiB available of {} MiB", memory.available >> 20, memory.total >> 20);
        match memory.limit {
            None => Finding::found("host memory", figures),
            Some((limit, file)) => Finding::limited(
                "host memory",
                format!("{figures}; limited to {} MiB by {}", limit >> 20, file.display()),
                "budgets keep within that limit; raise it where the container or job is started",
            ),
        }
    }

    fn cpu(&self) -> Finding {
        let info = self.read("proc/cpuinfo").unwrap_or_default();
        let field = |name: &str| {
            let line = info.lines().find(|line| line.starts_with(name))?;
            Some(line.split_once(':')?.1.trim())
        };
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        let flags: Vec<&str> = field("flags").unwrap_or_default().split(' ').collect();
        let known = ["avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16"];
        let has: Vec<&str> = known.into_iter().filter(|name| flags.contains(name)).collect();
        let model = field("model name").unwrap_or("unknown model");
        let detail = format!("{cores} usable cores, {model}, {}", has.join(" "));
        if flags.contains(&"avx2") && flags.contains(&"fma") {
            Finding::found("CPU", detail)
        } else {
            Finding::limited(
                "CPU",
                detail.trim_end_matches([' ', ',']).to_owned(),
                "without AVX2 and FMA the host's share of the optimizer runs on plain loops, several times slower",
            )
        }
    }
}

fn memlock() -> Finding {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    match limit {
        None => Finding::found("locked memory", "unlimited"),
        // Drivers pin pages of their own accord; what the limit restricts is mlock and io_uring's buffers.
        Some(bytes) => Finding::limited(
            "locked memory",
            format!("{} MiB (ulimit -l)", bytes >> 20),
            "file transfers use unregistered buffers beyond it, at some cost; set `ulimit -l unlimited` to avoid that",
        ),
    }
}

/// Room in the folder, and whether files there can be read and written past the page cache.
fn disk(folder: &Path) -> Vec<Finding> {
    let place = format!("disk at {}", folder.display());
    let stat = match rustix::fs::statvfs(folder) {
        Ok(stat) => stat,
        Err(error) => {
            return vec![Finding::missing(
                &place,
                error.to_string(),
                "name an existing folder with --nvme; without one nothing is offloaded to disk",
            )];
        }
    };
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    let room = Finding::found(&place, format!("{} MiB free", free >> 20));
    let direct = match opens_direct(folder) {
        Ok(()) => Finding::found("direct I/O there", "O_DIRECT is accepted"),
        Err(error) => Finding::limited(
            "direct I/O there",
            format!("O_DIRECT is refused: {error}"),
            "chunks go through the page cache, which takes host memory; use a folder on a local ext4 or xfs disk",
        ),
    };
    vec![room, direct]
}

fn opens_direct(folder: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    let file = tempfile::NamedTempFile::new_in(folder)?;
    let flags = rustix::fs::OFlags::DIRECT.bits() as i32;
    std::fs::OpenOptions::new().read(true).write(true).custom_flags(flags).open(file.path())?;
    Ok(())
}

fn ssh(path: Option<&std::ffi::OsStr>) -> Finding {
    let program = path
        .map(std::env::split_paths)
        .and_then(|mut folders| folders.find_map(|folder| Some(folder.join("ssh")).filter(|file| file.is_file())));
    match program {
        Some(program) => Finding::found("ssh", program.display().to_string()),
        None => Finding::missing(
            "ssh",
            "not on PATH",
            "one host works; for `castor run --host` install an ssh client, or start `castor run --node_rank` on each host",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(files: &[(&str, &str)]) -> (tempfile::TempDir, Machine) {
        let folder = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        }
        let root = folder.path().to_owned();
        (folder, Machine { root })
    }

    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 800 kB\n");

    #[test]
    fn memory_without_a_limit() {
        let (_folder, machine) = machine(&[MEMINFO, ("proc/self/cgroup", "0::/\n")]);
        let expected = HostMemory { total: 1_024_000, available: 819_200, limit: None };
        assert_eq!(machine.host_memory(), Some(expected));
    }

    #[test]
    fn the_tightest_group_above_limits_v2() {
        let (_folder, machine) = machine(&[
            MEMINFO,
            ("proc/self/cgroup", "0::/job/step\n"),
            ("sys/fs/cgroup/job/step/memory.max", "max\n"),
            ("sys/fs/cgroup/job/memory.max", "500000\n"),
            ("sys/fs/cgroup/job/memory.current", "200000\n"),
        ]);
        let memory = machine.host_memory().unwrap();
        assert_eq!(memory.available, 300_000);
        assert_eq!(memory.limit, Some((500_000, PathBuf::from("/sys/fs/cgroup/job/memory.max"))));
        assert_eq!(machine.memory().state, State::Limited);
    }

    #[test]
    fn a_containers_v1_limit_is_found_at_the_mount() {
        let (_folder, machine) = machine(&[
            MEMINFO,
            ("proc/self/cgroup", "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "600000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "100000\n"),
        ]);
        let memory = machine.host_memory().unwrap();
        assert_eq!(memory.limit.unwrap().0, 600_000);
        assert_eq!(memory.available, 500_000);
    }

    #[test]
    fn every_line_says_what_and_missing_ones_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let probes = Probes {
            cuda: &|| vec![Finding::missing("CUDA", "no driver", "the cpu backend works")],
            block_io: &|_| vec![],
        };
        let findings = survey(folder.path(), &probes);
        let missing = |finding: &&Finding| finding.state != State::Found;
        assert!(findings.iter().filter(missing).all(|finding| finding.advice.is_some()));
        let text = render(&findings);
        assert!(text.contains("CUDA") && text.contains("→ the cpu backend works"), "{text}");
        let nowhere = disk(Path::new("/no/such/folder"));
        assert_eq!(nowhere[0].state, State::Missing);
        assert_eq!(ssh(None).state, State::Missing);
    }
}
