//! Which rank am I, among how many, and where do we meet?
//!
//! Reads the variables that launchers set and turns them into a [`World`]. It opens no socket: the meeting
//! itself is `castor_kernels::link`.
//!
//! Three families are understood, in this order:
//! 1. `RANK`, `WORLD_SIZE`, … — `castor run`, torchrun and everything that imitates it. They win over the
//!    others because such a launcher may itself have been started by `srun` or `mpirun`.
//! 2. `OMPI_COMM_WORLD_*` — Open MPI's `mpirun`.
//! 3. `SLURM_*` — `srun` with one process per task. An interactive shell or a batch script carries most of
//!    these variables too, so a world is made only for a *task of a step of several tasks*: the step has an
//!    ordinary number (Slurm gives batch, extern and interactive steps reserved ones) and
//!    `SLURM_STEP_NUM_TASKS`, which counts the step and not the allocation, is above 1.

use std::fmt;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::time::Duration;

use crate::error::{Error, Result};

/// How long ranks wait for each other at a time unless `CASTOR_TIMEOUT` or `castor train --timeout` says otherwise.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);

/// Slurm's step numbers from here on are reserved for steps that no `srun` of the user started.
const SLURM_FIRST_RESERVED_STEP: u64 = 0xffff_fff0;

/// Where the ranks meet: rank 0 listens there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Master {
    /// Host name or address, IPv6 without brackets.
    pub host: String,
    /// Port.
    pub port: u16,
}

impl fmt::Display for Master {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// This process's place among the ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct World {
    /// This rank, `0..world`.
    pub rank: u32,
    /// Number of ranks.
    pub world: u32,
    /// This rank among those of its host; the device it takes.
    pub local_rank: u32,
    /// Number of ranks on this host.
    pub local_world: u32,
    /// Where the ranks meet. Not used when `world` is 1.
    pub master: Master,
    /// How often the launcher has restarted the group.
    pub restart_count: u32,
    /// How long ranks wait for each other.
    pub timeout: Duration,
}

impl World {
    /// One rank on its own.
    pub fn alone() -> World {
        World {
            rank: 0,
            world: 1,
            local_rank: 0,
            local_world: 1,
            master: Master { host: "127.0.0.1".into(), port: 0 },
            restart_count: 0,
            timeout: DEFAULT_TIMEOUT,
        }
    }

    /// The address of [`World::master`]: where rank 0 listens and the others go. IPv4 first, as that is what most
    /// clusters route.
    ///
    /// # Errors
    /// [`Error::Failed`] if the name does not resolve, or only to a loopback address while there are ranks on other
    /// hosts (many systems give their own name such an address: rank 0 would listen where nobody can come).
    pub fn meeting_address(&self) -> Result<SocketAddr> {
        let Master { host, port } = &self.master;
        let refused = |reason: &str| {
            Error::Failed(format!(
                "MASTER_ADDR {host:?} {reason}; name rank 0's host as every host can reach it, or its address"
            ))
        };
        let mut found: Vec<SocketAddr> = (host.as_str(), *port)
            .to_socket_addrs()
            .map_err(|error| refused(&format!("does not resolve: {error}")))?
            .collect();
        // Who writes an address means it.
        let is_name = host.parse::<IpAddr>().is_err();
        if is_name && self.local_world < self.world {
            found.retain(|address| !address.ip().is_loopback());
            if found.is_empty() {
                return Err(refused("means only this machine itself, but there are ranks on other hosts"));
            }
        }
        found
            .iter()
            .find(|address| address.is_ipv4())
            .or(found.first())
            .copied()
            .ok_or_else(|| refused("has no address"))
    }

    /// The world that this process's environment names, or [`World::alone`].
    ///
    /// # Errors
    /// [`Error::Usage`] naming the variable that is missing, unreadable or contradicts another.
    pub fn from_env() -> Result<World> {
        World::from_variables(&|name| std::env::var(name).ok())
    }

    /// [`World::from_env`] over any set of variables.
    ///
    /// # Errors
    /// As [`World::from_env`].
    pub fn from_variables(get: &dyn Fn(&str) -> Option<String>) -> Result<World> {
        let vars = Variables(get);
        if vars.has("RANK") || vars.has("WORLD_SIZE") {
            from_torchrun(&vars)
        } else if vars.has("OMPI_COMM_WORLD_RANK") || vars.has("OMPI_COMM_WORLD_SIZE") {
            from_open_mpi(&vars)
        } else if is_slurm_task(&vars) {
            from_slurm(&vars)
        } else {
            Ok(World { timeout: vars.timeout()?, ..World::alone() })
        }
    }
}

fn from_torchrun(vars: &Variables) -> Result<World> {
    let world = vars.count("WORLD_SIZE", "RANK")?;
    let rank = vars.number("RANK", "WORLD_SIZE")?;
    // One rank needs no more to be known; with several, a guessed local rank would put two on one device.
    let (local_rank, local_world) = if world == 1 {
        (vars.optional("LOCAL_RANK")?.unwrap_or(0), 1)
    } else {
        let local_rank = vars.number("LOCAL_RANK", "RANK")?;
        let local_world = vars.optional("LOCAL_WORLD_SIZE")?;
        (local_rank, local_world.unwrap_or(local_rank + 1))
    };
    let master = if world == 1 {
        World::alone().master
    } else {
        Master { host: vars.text("MASTER_ADDR", "RANK")?, port: vars.port("RANK")? }
    };
    let restart_count = match vars.optional("RESTART_COUNT")? {
        Some(count) => count,
        None => vars.optional("TORCHELASTIC_RESTART_COUNT")?.unwrap_or(0),
    };
    let names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"];
    checked(
        World {
            rank,
            world,
            local_rank,
            local_world: local_world.max(1),
            master,
            restart_count,
            timeout: vars.timeout()?,
        },
        names,
    )
}

fn from_open_mpi(vars: &Variables) -> Result<World> {
    let names =
        ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"];
    let rank = vars.number(names[0], names[1])?;
    let world = vars.count(names[1], names[0])?;
    let local_rank = vars.number(names[2], names[0])?;
    let local_world = vars.count(names[3], names[0])?;
    let host = match vars.get("MASTER_ADDR") {
        Some(host) => host,
        None if local_world == world => "127.0.0.1".into(),
        None => vars.text("MASTER_ADDR", "OMPI_COMM_WORLD_RANK")?,
    };
    let port = match vars.get("MASTER_PORT") {
        Some(_) => vars.port(names[0])?,
        None => derived_port(&vars.get("PMIX_NAMESPACE").unwrap_or_default()),
    };
    checked(
        World {
            rank,
            world,
            local_rank,
            local_world,
            master: Master { host, port },
            restart_count: 0,
            timeout: vars.timeout()?,
        },
        names,
    )
}

fn is_slurm_task(vars: &Variables) -> bool {
    let number = |name| vars.get(name).and_then(|text: String| text.parse::<u64>().ok());
    vars.has("SLURM_PROCID")
        && number("SLURM_STEP_ID").is_some_and(|step| step < SLURM_FIRST_RESERVED_STEP)
        && number("SLURM_STEP_NUM_TASKS").is_some_and(|tasks| tasks > 1)
}

fn from_slurm(vars: &Variables) -> Result<World> {
    let names = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"];
    let rank = vars.number(names[0], names[1])?;
    let world = vars.count(names[1], names[0])?;
    let local_rank = vars.number(names[2], names[0])?;
    let node = vars.number("SLURM_NODEID", names[0])?;
    let per_node = vars.text(names[3], names[0])?;
    let local_world = slurm_tasks_of(&per_node, node).ok_or_else(|| {
        Error::Usage(format!(
            "{} {per_node:?} does not say how many tasks node {node} has; expected the form \"4(x2),3\"",
            names[3]
        ))
    })?;
    let host = match vars.get("MASTER_ADDR") {
        Some(host) => host,
        None => {
            let list = vars.text("SLURM_STEP_NODELIST", names[0])?;
            slurm_first_host(&list).ok_or_else(|| {
                Error::Usage(format!("SLURM_STEP_NODELIST {list:?} names no host; set MASTER_ADDR to rank 0's host"))
            })?
        }
    };
    let port = match vars.get("MASTER_PORT") {
        Some(_) => vars.port(names[0])?,
        None => {
            let job = vars.get("SLURM_JOB_ID").unwrap_or_default();
            let step = vars.get("SLURM_STEP_ID").unwrap_or_default();
            derived_port(&format!("{job}.{step}"))
        }
    };
    checked(
        World {
            rank,
            world,
            local_rank,
            local_world,
            master: Master { host, port },
            restart_count: vars.optional("SLURM_RESTART_COUNT")?.unwrap_or(0),
            timeout: vars.timeout()?,
        },
        names,
    )
}

/// Refuses numbers that contradict each other. `names`: variables of rank, world, local rank, local world.
fn checked(world: World, names: [&str; 4]) -> Result<World> {
    let contradiction = |low: &str, value: u32, high: &str, limit: u32, relation: &str| {
        Err(Error::Usage(format!("{low}={value} contradicts {high}={limit}: the first must be {relation} the second")))
    };
    let [rank, size, local_rank, local_size] = names;
    if world.rank >= world.world {
        contradiction(rank, world.rank, size, world.world, "below")
    } else if world.local_rank >= world.local_world {
        contradiction(local_rank, world.local_rank, local_size, world.local_world, "below")
    } else if world.local_world > world.world {
        contradiction(local_size, world.local_world, size, world.world, "at most equal to")
    } else if world.local_rank > world.rank {
        contradiction(local_rank, world.local_rank, rank, world.rank, "at most equal to")
    } else {
        Ok(world)
    }
}

/// A port that every rank of one job derives alike and that two jobs seldom share: 20000–29999, below the
/// range from which systems take ports for outgoing connections.
fn derived_port(job: &str) -> u16 {
    20_000 + (xxhash_rust::xxh3::xxh3_64(job.as_bytes()) % 10_000) as u16
}

/// Tasks of node `node` in Slurm's run-length form `4(x2),3`.
fn slurm_tasks_of(list: &str, node: u32) -> Option<u32> {
    let mut first = 0;
    for part in list.split(',') {
        let (tasks, repeat) = match part.split_once("(x") {
            Some((tasks, rest)) => (tasks, rest.strip_suffix(')')?.parse().ok()?),
            None => (part, 1),
        };
        first += repeat;
        if node < first {
            return tasks.parse().ok();
        }
    }
    None
}

/// First host of Slurm's list form `gpu[03-05,9]-ib,login1`.
fn slurm_first_host(list: &str) -> Option<String> {
    let mut name = String::new();
    let mut rest = list;
    while let Some(at) = rest.find([',', '[']) {
        name.push_str(&rest[..at]);
        if rest[at..].starts_with(',') {
            rest = "";
            break;
        }
        let (range, after) = rest[at + 1..].split_once(']')?;
        name.push_str(range.split([',', '-']).next()?);
        rest = after;
    }
    name.push_str(rest);
    (!name.is_empty()).then_some(name)
}

/// The environment, with errors that name the variable.
struct Variables<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Variables<'_> {
    /// A variable that is set to nothing counts as not set.
    fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
    }

    fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// A variable that `because` makes necessary.
    fn text(&self, name: &str, because: &str) -> Result<String> {
        self.get(name).ok_or_else(|| {
            Error::Usage(format!(
                "{name} is not set although {because} is; set it, or start the ranks with `castor run`"
            ))
        })
    }

    fn optional(&self, name: &str) -> Result<Option<u32>> {
        self.get(name)
            .map(|text| {
                text.parse().map_err(|_| Error::Usage(format!("{name}={text} is not a whole number from 0 up")))
            })
            .transpose()
    }

    fn number(&self, name: &str, because: &str) -> Result<u32> {
        self.text(name, because)?;
        Ok(self.optional(name)?.unwrap_or(0))
    }

    fn count(&self, name: &str, because: &str) -> Result<u32> {
        match self.number(name, because)? {
            0 => Err(Error::Usage(format!("{name}=0: at least one is needed"))),
            count => Ok(count),
        }
    }

    fn port(&self, because: &str) -> Result<u16> {
        let text = self.text("MASTER_PORT", because)?;
        match text.parse() {
            Ok(port) if port != 0 => Ok(port),
            _ => Err(Error::Usage(format!("MASTER_PORT={text} is not a port: 1 to 65535, the same on every rank"))),
        }
    }

    fn timeout(&self) -> Result<Duration> {
        match self.optional("CASTOR_TIMEOUT")? {
            Some(0) => Err(Error::Usage("CASTOR_TIMEOUT=0: at least one second is needed".into())),
            Some(seconds) => Ok(Duration::from_secs(seconds.into())),
            None => Ok(DEFAULT_TIMEOUT),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn world(text: &str) -> Result<World> {
        let vars: Vec<(&str, &str)> = text.split_whitespace().filter_map(|pair| pair.split_once('=')).collect();
        World::from_variables(&|name| vars.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
    }

    fn refusal(text: &str) -> String {
        let error = world(text).expect_err("must be refused");
        assert_eq!(error.exit_code(), 2);
        error.to_string()
    }

    const TORCHRUN: &str = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=n1 MASTER_PORT=29555";

    #[test]
    fn nothing_set_is_one_rank() {
        assert_eq!(world("MASTER_ADDR=n1").unwrap(), World::alone());
    }

    #[test]
    fn torchrun_variables_win_over_slurm() {
        let found = world(&format!(
            "{TORCHRUN} RESTART_COUNT=2 CASTOR_TIMEOUT=7 SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2"
        ))
        .unwrap();
        assert_eq!((found.rank, found.world), (5, 8));
        assert_eq!((found.local_rank, found.local_world), (1, 4));
        assert_eq!(found.master.to_string(), "n1:29555");
        assert_eq!(found.restart_count, 2);
        assert_eq!(found.timeout, Duration::from_secs(7));
    }

    #[test]
    fn each_missing_variable_is_named() {
        for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"] {
            let without: Vec<&str> =
                TORCHRUN.split(' ').filter(|pair| !pair.starts_with(&format!("{name}="))).collect();
            let message = refusal(&without.join(" "));
            assert!(message.starts_with(name), "{message}");
        }
    }

    #[test]
    fn contradictions_and_nonsense_name_value_and_variable() {
        for (from, to, both) in [
            ("RANK=5", "RANK=8", ["RANK=8", "WORLD_SIZE=8"]),
            ("LOCAL_RANK=1", "LOCAL_RANK=4", ["LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4"]),
            ("LOCAL_WORLD_SIZE=4", "LOCAL_WORLD_SIZE=9", ["LOCAL_WORLD_SIZE=9", "WORLD_SIZE=8"]),
            ("WORLD_SIZE=8", "WORLD_SIZE=0", ["WORLD_SIZE=0", ""]),
            ("RANK=5", "RANK=five", ["RANK=five", ""]),
            ("RANK=5", "RANK=-1", ["RANK=-1", ""]),
            ("29555", "66660", ["MASTER_PORT=66660", "65535"]),
        ] {
            let message = refusal(&TORCHRUN.replacen(from, to, 1));
            assert!(both.iter().all(|part| message.contains(part)), "{message}");
        }
    }

    #[test]
    fn open_mpi_on_one_host_needs_no_address() {
        let vars = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=job7";
        let found = world(vars).unwrap();
        assert_eq!((found.rank, found.world, found.local_rank), (1, 2, 1));
        assert_eq!(found.master.host, "127.0.0.1");
        let other = world(&vars.replace("RANK=1", "RANK=0")).unwrap();
        assert_eq!(found.master, other.master, "ranks of a job agree on the port");
        let message = refusal(&vars.replace("LOCAL_SIZE=2", "LOCAL_SIZE=1").replace("LOCAL_RANK=1", "LOCAL_RANK=0"));
        assert!(message.starts_with("MASTER_ADDR"), "{message}");
    }

    const SRUN: &str = "SLURM_PROCID=9 SLURM_NTASKS=11 SLURM_STEP_NUM_TASKS=11 SLURM_STEP_ID=3 SLURM_LOCALID=1 SLURM_NODEID=2 SLURM_STEP_TASKS_PER_NODE=4(x2),3 SLURM_STEP_NODELIST=gpu[03-05] SLURM_JOB_ID=77";

    #[test]
    fn a_task_of_srun_is_a_rank() {
        let found = world(SRUN).unwrap();
        assert_eq!((found.rank, found.world), (9, 11));
        assert_eq!((found.local_rank, found.local_world), (1, 3));
        assert_eq!(found.master.host, "gpu03");
        assert!((20_000..30_000).contains(&found.master.port));
    }

    #[test]
    fn slurm_variables_of_a_shell_make_no_world() {
        for shell in [
            // salloc: the allocation's variables only
            "SLURM_JOB_ID=77 SLURM_NTASKS=8 SLURM_NPROCS=8".to_owned(),
            // sbatch: the script is task 0 of no step
            "SLURM_JOB_ID=77 SLURM_NTASKS=8 SLURM_PROCID=0 SLURM_LOCALID=0".to_owned(),
            // the interactive step, with its reserved number
            SRUN.replace("STEP_ID=3", "STEP_ID=4294967290"),
            // srun --pty bash
            SRUN.replace("STEP_NUM_TASKS=11", "STEP_NUM_TASKS=1"),
        ] {
            assert_eq!(world(&shell).unwrap(), World::alone(), "{shell}");
        }
    }

    #[test]
    fn host_lists_of_slurm() {
        for (list, first) in
            [("n1", "n1"), ("n1,n2", "n1"), ("gpu[03-05,9]-ib,login1", "gpu03-ib"), ("r[1-2]c[7,9]", "r1c7")]
        {
            assert_eq!(slurm_first_host(list).as_deref(), Some(first));
        }
        assert_eq!(slurm_first_host("n[1"), None);
    }

    #[test]
    fn the_meeting_place_is_one_that_all_ranks_can_reach() {
        let meeting = |host: &str, local_world: u32| {
            let master = Master { host: host.into(), port: 9 };
            World { world: 2, local_world, master, ..World::alone() }.meeting_address()
        };
        assert_eq!(meeting("::1", 2).unwrap().to_string(), "[::1]:9");
        assert_eq!(meeting("127.0.0.1", 1).unwrap().to_string(), "127.0.0.1:9");
        assert!(meeting("localhost", 2).unwrap().ip().is_loopback());
        let message = meeting("localhost", 1).unwrap_err().to_string();
        assert!(message.contains("only this machine itself"), "{message}");
        let master = Master { host: "::1".into(), port: 9 };
        assert_eq!(master.to_string(), "[::1]:9");
    }
}
