//! `castor run` against real processes: shell scripts as ranks, a script as `ssh` for other hosts.
//!
//! The launcher runs in a process of its own, so that it can be sent signals: this test program starts itself
//! with `CASTOR_TEST_ROLE` set, and `role_process` then is that role and not a test.

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use castor_trainer::launcher::{self, Setup};
use rustix::process::{Pid, Signal};

/// How long to wait for what must come; only a failing test waits that long.
const LIMIT: Duration = Duration::from_secs(30);

#[test]
fn role_process() {
    match std::env::var("CASTOR_TEST_ROLE").as_deref() {
        Ok("launcher") => launcher_role(),
        Ok("rank") => rank_role(),
        _ => {}
    }
}

fn launcher_role() -> ! {
    let after_run = std::env::args_os().skip_while(|argument| argument != "run");
    let arguments: Vec<OsString> = after_run.skip(1).collect();
    let variable = |name: &str| std::env::var(name).ok();
    let setup = Setup {
        program: variable("CASTOR_TEST_WORKER").expect("worker").into(),
        ssh: variable("CASTOR_TEST_SSH").expect("ssh").into(),
        device_count: &|| Ok(2),
        environment: &variable,
    };
    let code = launcher::main(&arguments, &setup).unwrap_or_else(|error| {
        eprintln!("error: {error}");
        error.exit_code()
    });
    std::process::exit(code.into());
}

/// A rank as `castor train` is one: it follows its launcher, and never ends of its own accord.
fn rank_role() -> ! {
    launcher::follow_launcher().expect("launcher is alive");
    let rank = std::env::var("RANK").expect("RANK");
    let scene = std::env::var("SCENE").expect("SCENE");
    std::fs::write(format!("{scene}/pid.{rank}"), std::process::id().to_string()).expect("pid");
    loop {
        std::thread::park();
    }
}

/// A folder with the scripts of one test.
struct Scene {
    folder: tempfile::TempDir,
    castor: PathBuf,
}

impl Scene {
    /// `rank` is the body of the shell script that each rank runs; it finds the folder in `$SCENE`.
    fn new(rank: &str) -> Scene {
        let folder = tempfile::tempdir().unwrap();
        let here = folder.path().display().to_string();
        let this = std::env::current_exe().unwrap().display().to_string();
        let scene = Scene { castor: folder.path().join("castor"), folder };
        let role = format!("'{this}' role_process --exact --nocapture --");
        scene.script(
            "rank",
            &format!(
                "SCENE='{here}'; export SCENE\n{}",
                rank.replace("@RANK_ROLE", &format!("CASTOR_TEST_ROLE=rank exec {role}"))
            ),
        );
        scene.script(
            "castor",
            &format!("CASTOR_TEST_ROLE=launcher CASTOR_TEST_WORKER='{here}/rank' CASTOR_TEST_SSH='{here}/ssh' exec {role} \"$@\""),
        );
        // Like a real one: the command is one string for a shell, and next to nothing of the environment travels.
        scene.script(
            "ssh",
            &format!(
                "while [ \"$1\" != -- ]; do shift; done\n\
                 echo \"$2\" >> '{here}/ssh.log'\n\
                 case \"$2\" in down*) echo \"ssh: Could not resolve hostname $2\" >&2; exit 255;; esac\n\
                 exec env -i PATH=\"$PATH\" FAKE_HOST=\"$2\" sh -c \"$3\""
            ),
        );
        scene
    }

    fn script(&self, name: &str, body: &str) {
        let path = self.path(name);
        std::fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        signals_as_usual();
        let mut command = Command::new(&self.castor);
        command.arg("run").args(arguments).current_dir(self.folder.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        for name in ["MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"] {
            command.env_remove(name);
        }
        command
    }

    fn start(&self, arguments: &[&str]) -> Child {
        loop {
            match self.command(arguments).spawn() {
                // Another test was starting a process while the script was open for writing here.
                Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy => {}
                started => return started.unwrap(),
            }
        }
    }

    fn run(&self, arguments: &[&str]) -> Ended {
        Ended::from(self.start(arguments).wait_with_output().unwrap())
    }

    /// Arguments for two other hosts.
    fn two_hosts<'a>(&'a self, more: &[&'a str]) -> Vec<&'a str> {
        let mut arguments = vec!["--host", "alpha,beta", "--master_addr", "127.0.0.1", "--nproc_per_node", "2"];
        arguments.extend(["--remote_castor", self.castor.to_str().unwrap()]);
        arguments.extend(more);
        arguments
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// Waits until each of `count` ranks has written its process's number, and returns those.
    fn pids(&self, count: usize) -> Vec<Pid> {
        let pid = |rank| self.read(&format!("pid.{rank}")).trim().parse().ok().and_then(Pid::from_raw);
        wait_until("all ranks have started", || (0..count).all(|rank| pid(rank).is_some()));
        (0..count).filter_map(pid).collect()
    }
}

struct Ended {
    code: Option<i32>,
    out: String,
    err: String,
}

impl From<Output> for Ended {
    fn from(output: Output) -> Ended {
        Ended {
            code: output.status.code(),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl Ended {
    #[track_caller]
    fn expect(&self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, Some(code), "{}\n{}", self.out, self.err);
        for part in parts {
            assert!(self.err.contains(part), "{part:?} is not in:\n{}", self.err);
        }
    }
}

#[track_caller]
/// A runner may have started these tests with signals ignored (in the background, say), and the launcher would
/// inherit that. A signal that is caught here is at its default there.
fn signals_as_usual() {
    static DONE: std::sync::Once = std::sync::Once::new();
    DONE.call_once(|| {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
        let ignored = u64::from_str_radix(mask.trim(), 16).unwrap();
        for signal in [Signal::INT, Signal::TERM, Signal::HUP, Signal::USR1] {
            if ignored >> (signal.as_raw() - 1) & 1 == 1 {
                signal_hook::flag::register(
                    signal.as_raw(),
                    std::sync::Arc::<std::sync::atomic::AtomicBool>::default(),
                )
                .unwrap();
            }
        }
    });
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !holds() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a process is there and not only waiting to be reaped.
fn is_alive(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(')').next().unwrap_or_default().trim().chars().next();
    state.is_some_and(|state| state != 'Z')
}

#[track_caller]
fn gone(pids: &[Pid]) {
    wait_until("every rank is gone", || !pids.iter().any(|pid| is_alive(*pid)));
}

fn send(child: &Child, signal: Signal) {
    rustix::process::kill_process(Pid::from_child(child), signal).unwrap();
}

const SLEEPER: &str = "echo $$ > \"$SCENE/pid.$RANK\"; exec sleep 600";

#[test]
fn the_first_failure_is_named_and_its_code_is_the_launchers() {
    for rank in [0, 1] {
        let scene = Scene::new(&format!(
            "if [ $RANK = {rank} ]; then while [ ! -s \"$SCENE/pid.{}\" ]; do sleep 0.01; done; echo 'the cause' >&2; exit 7; fi\n{SLEEPER}",
            1 - rank
        ));
        let ended = scene.run(&["--nproc_per_node", "2", "train"]);
        ended.expect(7, &[&format!("rank {rank} on localhost failed with exit code 7"), "the cause"]);
        let other = scene.read(&format!("pid.{}", 1 - rank));
        gone(&[Pid::from_raw(other.trim().parse().unwrap()).unwrap()]);
    }
}

#[test]
fn a_killed_rank_ends_the_run_with_137() {
    let scene = Scene::new(&format!("if [ $RANK = 1 ]; then kill -9 $$; fi\n{SLEEPER}"));
    scene
        .run(&["--nproc_per_node", "3", "train"])
        .expect(137, &["rank 1 on localhost was killed by signal 9 (KILL)", "host memory"]);
}

#[test]
fn ranks_that_ignore_term_are_killed_with_all_they_started() {
    let scene = Scene::new(
        "if [ $RANK = 0 ]; then while [ ! -s \"$SCENE/pid.1\" ]; do sleep 0.01; done; exit 3; fi\n\
         trap '' TERM; sleep 600 & echo $! > \"$SCENE/pid.0\"; echo $$ > \"$SCENE/pid.1\"; while :; do sleep 600; done",
    );
    let ended = scene.run(&["--nproc_per_node", "2", "--grace", "1", "train"]);
    ended.expect(3, &["rank 0", "were killed"]);
    gone(&scene.pids(2));
}

/// The time between TERM and KILL is the user's: a rank that needs a while to save gets it, or not.
#[test]
fn the_grace_is_as_long_as_asked() {
    for (grace, saves) in [("60", true), ("0", false)] {
        let scene = Scene::new(
            "if [ $RANK = 0 ]; then while [ ! -s \"$SCENE/pid.1\" ]; do sleep 0.01; done; exit 3; fi\n\
             trap 'sleep 1; touch \"$SCENE/saved\"; exit 143' TERM\necho $$ > \"$SCENE/pid.1\"; while :; do sleep 0.02; done",
        );
        scene.run(&["--nproc_per_node", "2", "--grace", grace, "train"]).expect(3, &["rank 0"]);
        assert_eq!(scene.path("saved").exists(), saves, "--grace {grace}");
    }
}

#[test]
fn arguments_reach_every_rank_as_given() {
    let given = [
        "train",
        "--fsdp",
        "full_shard auto_wrap",
        "it's \"$HOME\" `id` \\",
        "--a=b=c",
        "",
        "gr\u{fc}n\n*",
        "--nproc_per_node",
    ];
    let body = "for word in \"$@\"; do printf '%s\\0' \"$word\"; done > \"$SCENE/words.$RANK\"";
    let expected: String = given.iter().map(|word| format!("{word}\0")).collect();
    let scene = Scene::new(body);
    let mut arguments = vec!["--nproc-per-node=2"];
    arguments.extend(given);
    scene.run(&arguments).expect(0, &[]);
    assert_eq!([scene.read("words.0"), scene.read("words.1")], [expected.clone(), expected.clone()]);
    let scene = Scene::new(body);
    scene.run(&scene.two_hosts(&given)).expect(0, &[]);
    for rank in 0..4 {
        assert_eq!(scene.read(&format!("words.{rank}")), expected, "rank {rank}");
    }
}

#[test]
fn a_taken_port_is_said_before_anything_starts() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let scene = Scene::new("touch \"$SCENE/started\"");
    scene.run(&["--master_port", &port, "train"]).expect(1, &[&port, "in use", "0 for any free one"]);
    assert!(!scene.path("started").exists());
}

#[test]
fn a_wrong_flag_ends_with_2_and_the_nearest_one() {
    let scene = Scene::new("touch \"$SCENE/started\"");
    scene.run(&["--nproc_per_nod", "2", "train"]).expect(2, &["--nproc_per_nod", "did you mean --nproc_per_node"]);
    assert!(!scene.path("started").exists());
}

#[test]
fn a_missing_program_is_named() {
    let scene = Scene::new("");
    std::fs::remove_file(scene.path("rank")).unwrap();
    scene.run(&["--nproc_per_node", "2", "train"]).expect(1, &["rank 0 on localhost", "rank cannot be started"]);
}

#[test]
fn ranks_on_several_hosts_form_one_world() {
    let scene = Scene::new(
        "echo \"$FAKE_HOST $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR $RESTART_COUNT [$NAMED] [$UNNAMED]\" > \"$SCENE/env.$RANK\"\n\
         echo $MASTER_PORT >> \"$SCENE/ports\"; echo \"hello from $RANK\"",
    );
    let arguments = scene.two_hosts(&["--env", "NAMED=it's $x", "train"]);
    let output = scene.command(&arguments).env("UNNAMED", "stays").output().unwrap();
    let ended = Ended::from(output);
    ended.expect(0, &[]);
    for (rank, host) in [(0, "alpha 4 0 2 0"), (1, "alpha 4 1 2 0"), (2, "beta 4 0 2 1"), (3, "beta 4 1 2 1")] {
        assert_eq!(scene.read(&format!("env.{rank}")).trim(), format!("{host} 127.0.0.1 0 [it's $x] []"));
    }
    let ports = scene.read("ports");
    let first = ports.lines().next().unwrap();
    assert!(first.parse::<u16>().is_ok_and(|port| port > 0));
    assert!(ports.lines().count() == 4 && ports.lines().all(|port| port == first), "{ports}");
    for line in ["hello from 0", "[rank 1] hello from 1", "[rank 2] hello from 2", "[rank 3] hello from 3"] {
        assert!(ended.out.lines().any(|shown| shown == line), "{line}:\n{}", ended.out);
    }
}

#[test]
fn a_failure_on_another_host_ends_all_hosts() {
    let scene = Scene::new(&format!(
        "if [ $RANK = 2 ]; then while [ ! -s \"$SCENE/pid.0\" ] || [ ! -s \"$SCENE/pid.1\" ]; do sleep 0.01; done; echo 'the cause' >&2; exit 5; fi\n{SLEEPER}"
    ));
    let ended = scene.run(&scene.two_hosts(&["train"]));
    ended.expect(5, &["rank 2 on host", "failed with exit code 5", "the cause", "host beta"]);
    gone(&scene.pids(2));
}

#[test]
fn hosts_that_cannot_take_part_are_all_named_and_nothing_starts() {
    let scene = Scene::new("touch \"$SCENE/started\"");
    let castor = scene.castor.to_str().unwrap();
    let hosts = ["--host", "down1,alpha,down2", "--master_addr", "127.0.0.1", "--remote_castor"];
    let run = |castor: &str| {
        let mut arguments = hosts.to_vec();
        arguments.extend([castor, "train"]);
        scene.run(&arguments)
    };
    run(castor)
        .expect(1, &["host down1: ssh cannot reach it", "Could not resolve hostname down2", "nothing was started"]);
    run("/no/such/castor").expect(1, &["host alpha: /no/such/castor does not run there", "--remote_castor"]);
    assert!(!scene.path("started").exists());
}

#[test]
fn this_machine_by_any_of_its_names_needs_no_ssh() {
    let own = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim().to_owned();
    for name in ["127.0.0.1", "localhost", "::1", &own] {
        let scene = Scene::new("exit 0");
        scene.run(&["--host", name, "train"]).expect(0, &[]);
        assert!(!scene.path("ssh.log").exists());
    }
}

#[test]
fn host_file_slots_and_chosen_devices() {
    let scene = Scene::new("echo \"$WORLD_SIZE $CUDA_VISIBLE_DEVICES\" > \"$SCENE/env.$RANK\"");
    std::fs::write(scene.path("hosts"), "# mine\nlocalhost slots=4\nalpha slots=2 # other\n").unwrap();
    let castor = scene.castor.to_str().unwrap();
    let arguments = [
        "--hostfile",
        "hosts",
        "--include",
        "localhost:1,3@alpha:0",
        "--remote_castor",
        castor,
        "--master_addr",
        "127.0.0.1",
        "train",
    ];
    scene.run(&arguments).expect(0, &[]);
    for (rank, seen) in [(0, "3 1,3"), (1, "3 1,3"), (2, "3 0")] {
        assert_eq!(scene.read(&format!("env.{rank}")).trim(), seen);
    }
    let scene = Scene::new("echo $WORLD_SIZE > \"$SCENE/env.$RANK\"");
    scene.run(&["--nproc_per_node", "gpu", "train"]).expect(0, &[]);
    assert_eq!(scene.read("env.1").trim(), "2");
}

#[test]
fn signals_reach_the_ranks_so_that_they_can_save() {
    for (signal, number) in [(Signal::TERM, 15), (Signal::INT, 2), (Signal::HUP, 1)] {
        let scene = Scene::new(&format!(
            "trap 'touch \"$SCENE/saved.$RANK\"; exit {}' TERM INT HUP\ntrap 'touch \"$SCENE/warned.$RANK\"' USR1\n\
             echo $$ > \"$SCENE/pid.$RANK\"; while :; do sleep 0.02; done",
            128 + number
        ));
        let launcher = scene.start(&["--nproc_per_node", "2", "train"]);
        let pids = scene.pids(2);
        send(&launcher, Signal::USR1);
        wait_until("both ranks are warned", || (0..2).all(|rank| scene.path(&format!("warned.{rank}")).exists()));
        send(&launcher, signal);
        Ended::from(launcher.wait_with_output().unwrap()).expect(128 + number, &["interrupted by signal"]);
        assert!((0..2).all(|rank| scene.path(&format!("saved.{rank}")).exists()));
        gone(&pids);
    }
}

#[test]
fn signals_cross_ssh() {
    let scene = Scene::new(
        "trap 'touch \"$SCENE/saved.$RANK\"; exit 143' TERM\necho $$ > \"$SCENE/pid.$RANK\"; while :; do sleep 0.02; done",
    );
    let launcher = scene.start(&scene.two_hosts(&["train"]));
    let pids = scene.pids(4);
    send(&launcher, Signal::TERM);
    Ended::from(launcher.wait_with_output().unwrap()).expect(143, &[]);
    assert!((0..4).all(|rank| scene.path(&format!("saved.{rank}")).exists()));
    gone(&pids);
}

#[test]
fn a_second_interrupt_kills() {
    let scene = Scene::new(
        "trap 'touch \"$SCENE/asked.$RANK\"' INT\necho $$ > \"$SCENE/pid.$RANK\"; while :; do sleep 0.02; done",
    );
    let launcher = scene.start(&["--nproc_per_node", "2", "train"]);
    let pids = scene.pids(2);
    send(&launcher, Signal::INT);
    wait_until("both ranks were asked", || (0..2).all(|rank| scene.path(&format!("asked.{rank}")).exists()));
    send(&launcher, Signal::INT);
    Ended::from(launcher.wait_with_output().unwrap()).expect(130, &["killing the ranks"]);
    gone(&pids);
}

#[test]
fn one_interrupted_rank_asks_the_others_to_end() {
    let scene = Scene::new(
        "trap 'touch \"$SCENE/saved.$RANK\"; exit 143' TERM\necho $$ > \"$SCENE/pid.$RANK\"; while :; do sleep 0.02; done",
    );
    let launcher = scene.start(&["--nproc_per_node", "2", "train"]);
    let pids = scene.pids(2);
    rustix::process::kill_process(pids[1], Signal::TERM).unwrap();
    Ended::from(launcher.wait_with_output().unwrap()).expect(143, &["rank 1", "asking the others"]);
    assert!(scene.path("saved.0").exists());
    gone(&pids);
}

#[test]
fn killing_the_launcher_leaves_nothing_here_or_there() {
    let scene = Scene::new("@RANK_ROLE");
    let mut launcher = scene.start(&["--nproc_per_node", "2", "train"]);
    let pids = scene.pids(2);
    send(&launcher, Signal::KILL);
    launcher.wait().unwrap();
    gone(&pids);
    let scene = Scene::new("@RANK_ROLE");
    let mut launcher = scene.start(&scene.two_hosts(&["train"]));
    let pids = scene.pids(4);
    send(&launcher, Signal::KILL);
    launcher.wait().unwrap();
    gone(&pids);
}

#[test]
fn a_group_is_restarted_as_often_as_allowed() {
    let body = "echo $RESTART_COUNT >> \"$SCENE/starts.$RANK\"; if [ $RANK = 1 ] && [ $RESTART_COUNT -lt 2 ]; then exit 9; fi\nif [ $RESTART_COUNT -lt 2 ]; then exec sleep 600; fi";
    let scene = Scene::new(body);
    scene
        .run(&["--nproc_per_node", "2", "--max_restarts", "2", "train"])
        .expect(0, &["restart 1 of 2", "restart 2 of 2"]);
    assert_eq!(scene.read("starts.1"), "0\n1\n2\n");
    let scene = Scene::new(body);
    scene.run(&["--nproc_per_node", "2", "--max_restarts", "1", "train"]).expect(9, &["restart 1 of 1"]);
    let scene = Scene::new("echo $RESTART_COUNT >> \"$SCENE/starts.$RANK\"; exit 2");
    scene.run(&["--max_restarts", "3", "train"]).expect(2, &[]);
    assert_eq!(scene.read("starts.0"), "0\n");
}

#[test]
fn output_is_prefixed_logged_or_both() {
    let body = "echo \"out $RANK\"; echo \"err $RANK\" >&2; if [ $RANK = 1 ]; then printf 'no newline'; fi";
    let has = |text: &str, line: &str| text.lines().any(|shown| shown == line);
    let scene = Scene::new(body);
    let plain = scene.run(&["--nproc_per_node", "2", "train"]);
    assert!(has(&plain.out, "out 0") && has(&plain.out, "[rank 1] out 1") && has(&plain.out, "[rank 1] no newline"));
    assert!(has(&plain.err, "err 0") && has(&plain.err, "[rank 1] err 1"));
    let scene = Scene::new(body);
    let logged = scene.run(&["--nproc_per_node", "2", "--log_dir", "logs", "train"]);
    assert!(has(&logged.out, "out 0") && !logged.out.contains("out 1"));
    for (name, content) in [("rank_1.out", "out 1\nno newline"), ("rank_1.err", "err 1\n")] {
        assert_eq!(scene.read(&format!("logs/{name}")), content);
    }
    let teed = scene.run(&["--nproc_per_node", "2", "--log_dir", "logs", "--tee", "train"]);
    assert!(has(&teed.out, "[rank 1] out 1") && Path::new(&scene.path("logs/rank_1.out")).exists());
    let scene = Scene::new("exit 4");
    scene.run(&["--log_dir", "logs", "train"]).expect(4, &["logs/rank_0.{out,err}"]);
}

/// A real `sshd` on a free port of this machine, ended with the value.
struct Sshd {
    child: Child,
    port: String,
}

impl Drop for Sshd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Sshd {
    /// None where there is no sshd or it does not start under this user.
    fn start(scene: &Scene) -> Option<Sshd> {
        let here = scene.folder.path().display();
        for key in ["host_key", "user_key"] {
            let made =
                Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(scene.path(key)).status();
            made.ok().filter(|status| status.success())?;
        }
        std::fs::rename(scene.path("user_key.pub"), scene.path("authorized_keys")).ok()?;
        let free = std::net::TcpListener::bind("127.0.0.1:0").ok()?;
        let port = free.local_addr().ok()?.port();
        drop(free);
        let server = format!(
            "ListenAddress 127.0.0.1:{port}\nHostKey {here}/host_key\nAuthorizedKeysFile {here}/authorized_keys\n\
             StrictModes no\nUsePAM no\nPidFile none\nPasswordAuthentication no\n"
        );
        let client = format!(
            "Host node-*\n HostName 127.0.0.1\n IdentityFile {here}/user_key\n IdentitiesOnly yes\n\
             StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n LogLevel ERROR\n"
        );
        std::fs::write(scene.path("sshd_config"), server).ok()?;
        std::fs::write(scene.path("ssh_config"), client).ok()?;
        scene.script("ssh", &format!("exec ssh -F '{here}/ssh_config' \"$@\""));
        let mut child = Command::new("/usr/sbin/sshd")
            .args(["-D", "-f"])
            .arg(scene.path("sshd_config"))
            .stderr(Stdio::null())
            .spawn()
            .ok()?;
        let deadline = Instant::now() + LIMIT;
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            if child.try_wait().ok()?.is_some() || Instant::now() > deadline {
                return None;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Some(Sshd { child, port: port.to_string() })
    }
}

#[test]
fn a_real_sshd_carries_arguments_failures_signals_and_the_end() {
    let body = "printf '%s' \"$3\" > \"$SCENE/word.$RANK\"; case \"$2\" in fail) [ $RANK = 1 ] && exit 6;; follow) @RANK_ROLE; esac\n\
                trap 'touch \"$SCENE/saved.$RANK\"; exit 143' TERM\necho $$ > \"$SCENE/pid.$RANK\"\n\
                while :; do sleep 0.02; done";
    let scene = Scene::new(body);
    let Some(sshd) = Sshd::start(&scene) else {
        println!("skipped: no sshd can be started here");
        return;
    };
    let odd = "it's a \"$word\" `id` \\";
    let arguments = |word| {
        let mut all = vec!["--host", "node-a,node-b", "--ssh_port", &sshd.port, "--master_addr", "127.0.0.1"];
        all.extend(["--remote_castor", scene.castor.to_str().unwrap(), "train", word, odd]);
        all
    };
    scene.run(&arguments("fail")).expect(6, &["rank 1 on host", "host node-b failed with exit code 6"]);
    assert_eq!(scene.read("word.1"), odd);
    let forget = || (0..2).for_each(|rank| drop(std::fs::remove_file(scene.path(&format!("pid.{rank}")))));
    forget();
    let launcher = scene.start(&arguments("wait"));
    let pids = scene.pids(2);
    send(&launcher, Signal::TERM);
    Ended::from(launcher.wait_with_output().unwrap()).expect(143, &[]);
    gone(&pids);
    assert!((0..2).all(|rank| scene.path(&format!("saved.{rank}")).exists()));
    forget();
    let mut launcher = scene.start(&arguments("follow"));
    let pids = scene.pids(2);
    send(&launcher, Signal::KILL);
    launcher.wait().unwrap();
    gone(&pids);
}
