//! `castor run` and its ranks when one of them is stopped, killed, missing or doing something else: the run ends, the
//! culprit is named, and neither a process nor the port is left.

#[path = "support/processes.rs"]
mod processes;

use processes::{is_alive, ranks_of, variable};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// How long to wait for what must come; only a failing test waits that long.
const LIMIT: Duration = Duration::from_secs(60);

/// Steps without end: the run ends because something happens to it.
const ENDLESS: &str = "--max_steps 1000000 --logging_steps 1000000";

/// A folder with a tiny model and a text.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let config = r#"{"model_type": "llama", "vocab_size": 259, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": false}"#;
    fs::write(folder.path().join("model.json"), config).unwrap();
    fs::write(folder.path().join("text.txt"), "The quick brown fox jumps over the lazy dog. ".repeat(40)).unwrap();
    folder
}

fn castor(folder: &Path, words: &str) -> Command {
    let train = "train --model_config model.json --data text.txt --max_length 16 --batch_size 2 --backend cpu \
                 --device_memory 8MiB --host_memory 8MiB --plugin zero3 --output_dir out";
    let words = words.replace("TRAIN", train);
    let mut command = Command::new(env!("CARGO_BIN_EXE_castor"));
    command.args(words.split_whitespace()).current_dir(folder).env("XDG_CACHE_HOME", folder);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    for name in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CASTOR_TIMEOUT"] {
        command.env_remove(name);
    }
    command
}

/// A process of a world that nobody launched.
fn rank(folder: &Path, words: &str, rank: u32, world: u32, port: u16) -> Command {
    let mut command = castor(folder, words);
    let values = [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", world)];
    command.envs(values.map(|(name, value)| (name, value.to_string())));
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    command
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

#[track_caller]
fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !holds() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A launched run that has made a step.
struct Launched {
    launcher: Child,
    /// Its ranks' processes, in rank order.
    ranks: Vec<Pid>,
    port: u16,
}

impl Launched {
    fn start(folder: &Path, words: &str, world: usize) -> Launched {
        Launched::of(folder, castor(folder, words), world)
    }

    fn of(folder: &Path, mut command: Command, world: usize) -> Launched {
        let mut launcher = command.spawn().unwrap();
        let log = folder.join("out/train_log.jsonl");
        wait_until("a step is made", || {
            assert!(launcher.try_wait().unwrap().is_none(), "the run ended at once");
            steps(&log) > 0
        });
        let ranks = ranks_of(launcher.id());
        assert_eq!(ranks.len(), world);
        let port = variable(ranks[0], "MASTER_PORT").and_then(|port| port.parse().ok()).unwrap();
        Launched { launcher, ranks, port }
    }

    /// The launcher's exit code and what it said, once it has ended; nothing is left.
    #[track_caller]
    fn ended(mut self) -> (i32, String) {
        let launcher = &mut self.launcher;
        wait_until("the launcher has ended", || launcher.try_wait().unwrap().is_some());
        assert!(!self.ranks.iter().any(|pid| is_alive(*pid)), "a rank is left");
        TcpListener::bind(("127.0.0.1", self.port)).expect("the port is free");
        let output = self.launcher.wait_with_output().unwrap();
        (output.status.code().expect("an exit code"), said(&output))
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn steps(log: &Path) -> usize {
    fs::read_to_string(log).unwrap_or_default().matches("\"loss\"").count()
}

/// Stops a rank for good, and returns when the others are waiting for it in a collective.
fn stop(folder: &Path, pid: Pid) {
    kill_process(pid, Signal::STOP).unwrap();
    let log = folder.join("out/train_log.jsonl");
    let mut last = (steps(&log), Instant::now());
    wait_until("the others wait", || {
        let now = steps(&log);
        if now != last.0 {
            last = (now, Instant::now());
        }
        last.1.elapsed() > Duration::from_millis(500)
    });
}

#[test]
fn a_stopped_rank_ends_the_run_after_the_timeout_and_is_named() {
    for (world, stopped, words) in [
        (3, 1, "run --nproc_per_node 3 --timeout 2 TRAIN"),
        // Training's own flag wins.
        (2, 0, "run --nproc_per_node 2 --timeout 300 TRAIN --timeout 2"),
    ] {
        let folder = folder();
        let run = Launched::start(folder.path(), &format!("{words} {ENDLESS}"), world);
        kill_process(run.ranks[stopped], Signal::STOP).unwrap();
        let (code, said) = run.ended();
        assert_eq!(code, 1, "{said}");
        assert!(said.contains(&format!("rank {stopped}: it did not answer within 2 s")), "{said}");
        assert!(!said.contains("panicked"), "{said}");
    }
}

#[test]
fn a_rank_killed_in_a_collective_ends_the_run_within_ten_seconds() {
    for (killed, signal, name) in
        [(0, Signal::KILL, "9 (KILL)"), (1, Signal::KILL, "9 (KILL)"), (1, Signal::ABORT, "6 (ABRT)")]
    {
        let folder = folder();
        let run = Launched::start(folder.path(), &format!("run --nproc_per_node 2 --log_dir logs TRAIN {ENDLESS}"), 2);
        stop(folder.path(), run.ranks[killed]);
        let began = Instant::now();
        kill_process(run.ranks[killed], signal).unwrap();
        // Those that die of it at once may be gone already.
        let _ = kill_process(run.ranks[killed], Signal::CONT);
        let (code, said) = run.ended();
        assert!(began.elapsed() < Duration::from_secs(10), "it took {:?}", began.elapsed());
        assert_eq!(code, 128 + signal.as_raw(), "{said}");
        assert!(said.contains(&format!("rank {killed} on localhost was ")) && said.contains(name), "{said}");
        assert!(said.contains(&format!("logs/rank_{killed}.")), "{said}");
    }
}

/// Without a launcher the survivors alone say who it was.
#[test]
fn survivors_without_a_launcher_name_the_killed_rank() {
    let (folder, port) = (folder(), free_port());
    let words = format!("TRAIN {ENDLESS}");
    let mut ranks: Vec<Child> =
        (0..3).map(|number| rank(folder.path(), &words, number, 3, port).spawn().unwrap()).collect();
    let log = folder.path().join("out/train_log.jsonl");
    wait_until("a step is made", || steps(&log) > 0);
    stop(folder.path(), Pid::from_child(&ranks[1]));
    let mut killed = ranks.remove(1);
    killed.kill().unwrap();
    killed.wait().unwrap();
    for survivor in ranks {
        let output = survivor.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert!(
            said(&output).contains("rank 1: it closed its connection")
                || said(&output).contains("rank 1: it failed first"),
            "{}",
            said(&output)
        );
    }
}

#[test]
fn a_rank_that_never_comes_is_named_after_the_timeout() {
    let folder = folder();
    let port = free_port();
    let mut alone = rank(folder.path(), "TRAIN --max_steps 2 --timeout 1", 0, 3, port);
    // As if the others were on other hosts: nobody shall wonder what is waited for.
    let output = alone.env("LOCAL_WORLD_SIZE", "1").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("rank 1: missing: of 3 ranks, 1, 2 did not come"), "{}", said(&output));
    let waits = format!("rank 0 of 3 waits for the others at 127.0.0.1:{port}, at most 1 s");
    assert!(said(&output).contains(&waits), "{}", said(&output));
}

/// Ranks that would go different ways find out before the first step, all of them.
#[test]
fn a_rank_with_other_flags_is_named() {
    let (folder, port) = (folder(), free_port());
    for flags in ["--max_steps 6", "--max_steps 2 --lr 1e-3", "--max_steps 2 --recompute full"] {
        let other = rank(folder.path(), &format!("TRAIN {flags}"), 1, 2, port).spawn().unwrap();
        let output = rank(folder.path(), "TRAIN --max_steps 2 --recompute none", 0, 2, port).output().unwrap();
        for output in [output, other.wait_with_output().unwrap()] {
            assert_eq!(output.status.code(), Some(2), "{}", said(&output));
            assert!(said(&output).contains("rank 1 has other flags or data than rank 0"), "{}", said(&output));
        }
    }
}

#[test]
fn what_a_rank_refuses_is_seen_and_is_the_launchers_code() {
    let folder = folder();
    fs::write(folder.path().join("broken.toml"), "max_steps = = 3\n").unwrap();
    let output = castor(folder.path(), "run --nproc_per_node 2 train --config broken.toml").output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("broken.toml: line 1"), "{}", said(&output));
    let output = castor(folder.path(), "TRAIN --timeout 0").output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("--timeout is 0") && said(&output).contains("at least 1"), "{}", said(&output));
}

/// Schedulers warn with USR1, terminals that close with HUP: all ranks save at the same step and end, whichever of them
/// or the launcher was told.
#[test]
fn a_warning_saves_and_ends_all_ranks() {
    for (signal, told, code) in [
        (Signal::USR1, None, 138),
        (Signal::HUP, None, 129),
        (Signal::USR1, Some(0), 138),
        (Signal::USR1, Some(1), 138),
        (Signal::INT, Some(1), 130),
    ] {
        let folder = folder();
        let words = format!("run --nproc_per_node 2 TRAIN {ENDLESS} --save_steps 1000000");
        let run = Launched::start(folder.path(), &words, 2);
        kill_process(told.map_or(Pid::from_child(&run.launcher), |rank| run.ranks[rank]), signal).unwrap();
        let (ended, said) = run.ended();
        assert_eq!(ended, code, "{signal:?} to {told:?}: {said}");
        let saved = fs::read_dir(folder.path().join("out"))
            .unwrap()
            .filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().starts_with("checkpoint-"));
        assert_eq!(saved.count(), 1, "{said}");
    }
}

/// Who starts with HUP ignored, as `nohup` does, goes on when the terminal closes, the ranks too.
#[test]
fn a_run_behind_nohup_goes_on() {
    let folder = folder();
    let words = format!("run --nproc_per_node 2 TRAIN {ENDLESS}");
    let run = Launched::of(folder.path(), nohup(castor(folder.path(), &words)), 2);
    let hang_up = |pid| kill_process(pid, Signal::HUP).unwrap();
    run.ranks.iter().copied().chain([Pid::from_child(&run.launcher)]).for_each(hang_up);
    let log = folder.path().join("out/train_log.jsonl");
    let before = steps(&log);
    wait_until("more steps are made", || steps(&log) > before + 20);
    kill_process(Pid::from_child(&run.launcher), Signal::TERM).unwrap();
    let (code, said) = run.ended();
    assert_eq!(code, 143, "{said}");
}

/// The same command with HUP ignored.
fn nohup(command: Command) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", "trap '' HUP; exec \"$@\"", "sh"]).arg(command.get_program()).args(command.get_args());
    if let Some(folder) = command.get_current_dir() {
        shell.current_dir(folder).env("XDG_CACHE_HOME", folder);
    }
    shell.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    shell
}

#[test]
fn ranks_meet_over_ipv6() {
    if TcpListener::bind("[::1]:0").is_err() {
        eprintln!("skipped: this machine has no IPv6");
        return;
    }
    let folder = folder();
    let words = "run --nproc_per_node 2 --master_addr ::1 TRAIN --max_steps 2";
    let output = castor(folder.path(), words).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
}
