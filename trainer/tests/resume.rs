//! The binary killed, stopped, out of disk and resumed: its losses are those of a run that nobody disturbed.

#[path = "support/processes.rs"]
mod processes;

use castor_kernels::rng;
use castor_trainer::report::log::RunLog;
use processes::{is_alive, ranks_of};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A model and a text in `folder`.
fn prepare(folder: &Path) {
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 260, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": false, "attention_bias": false, "mlp_bias": false,
    });
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let words = ["chunk ", "tier ", "lease ", "window ", "fence\n"];
    let text: String = (0..1500).map(|place| words[rng::bits(1, place, 0) as usize % words.len()]).collect();
    fs::write(folder.join("text.txt"), text).unwrap();
}

/// `castor train` in `folder`, whose output is `run`.
fn castor(folder: &Path, run: &str, more: &str) -> Command {
    launched(folder, "", run, more)
}

/// As [`castor`], behind a launcher's words.
fn launched(folder: &Path, launcher: &str, run: &str, more: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_castor"));
    let arguments = format!(
        "{launcher} train --config config.json --data text.txt --max_length 32 --batch_size 2 --backend cpu --bf16 --lr 1e-3 \
         --optimizer_states 8bit --device_memory 16MiB --host_memory 16MiB --max_steps 40 --output_dir {run} {more}"
    );
    // The rates that a user has measured are no part of a test.
    command.env("XDG_CACHE_HOME", folder);
    command.args(arguments.split_whitespace()).current_dir(folder).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn succeeds(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    said(&output)
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Every step's loss and norm in bits. However often the run was resumed, each step is in the file once.
fn losses(run: &Path) -> Vec<[u64; 2]> {
    let log = RunLog::read(run).unwrap().unwrap();
    let lines = fs::read_to_string(run.join("train_log.jsonl")).unwrap();
    assert_eq!(lines.matches("\"kind\":\"step\"").count(), log.steps.len(), "{lines}");
    let steps = log.steps.iter().enumerate();
    steps
        .map(|(index, record)| {
            assert_eq!(record.step, index as u64 + 1);
            [record.loss.to_bits(), record.grad_norm.to_bits()]
        })
        .collect()
}

/// Checkpoints, and what is unfinished.
fn checkpoints(run: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(run) else { return Vec::new() };
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> =
        names.filter(|name| name.starts_with("checkpoint-") || name.contains(".tmp")).collect();
    names.sort();
    names
}

#[test]
fn killed_at_any_point_and_resumed_it_is_the_same_run() {
    let folder = tempfile::tempdir().unwrap();
    prepare(folder.path());
    let (whole, killed) = (folder.path().join("whole"), folder.path().join("killed"));
    succeeds(&mut castor(folder.path(), "whole", "--max_steps 150"));
    let run = |saves: &str| {
        let words = "--max_steps 150 --save_steps 1 --save_total_limit 2 --resume latest --async_save";
        castor(folder.path(), "killed", &format!("{words} {saves}"))
    };
    let mut inside_of_a_save = [0, 0];
    for attempt in 0..50 {
        let before = checkpoints(&killed);
        let beside = attempt as usize % 2;
        let mut run = run(["off", "on"][beside]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        while checkpoints(&killed) == before && run.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        // Saves take most of the time, so most kills are inside of one.
        std::thread::sleep(Duration::from_millis(30).mul_f32(rng::uniform(9, attempt, 0)));
        run.kill().unwrap();
        run.wait().unwrap();
        inside_of_a_save[beside] += u32::from(checkpoints(&killed).iter().any(|name| name.ends_with(".tmp")));
    }
    assert!(inside_of_a_save.iter().all(|kills| *kills > 0), "{inside_of_a_save:?} kills were inside of a save");
    succeeds(&mut run("auto"));
    let expected = losses(&whole);
    assert_eq!(expected.len(), 150);
    assert!(losses(&killed) == expected);
    let weights = |run: &Path| fs::read(run.join("model/model.safetensors")).unwrap();
    assert!(weights(&killed) == weights(&whole));
    assert_eq!(checkpoints(&killed), ["checkpoint-149", "checkpoint-150"], "nothing unfinished is left");
}

fn wait_for_end(ranks: &[Pid]) {
    let begun = Instant::now();
    while ranks.iter().any(|rank| is_alive(*rank)) {
        assert!(begun.elapsed() < Duration::from_secs(60), "a killed rank's peers are still there");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A supervised run of two ranks, of which one or the launcher itself is killed again and again, is the run that
/// nobody killed; what is killed takes nothing else along and leaves nothing behind.
#[test]
fn two_ranks_killed_and_restarted_are_the_same_run() {
    let folder = tempfile::tempdir().unwrap();
    prepare(folder.path());
    let (whole, killed) = (folder.path().join("whole"), folder.path().join("killed"));
    let steps = "--max_steps 60 --plugin zero3";
    succeeds(&mut launched(folder.path(), "run --nproc_per_node 2", "whole", steps));
    let words = format!("{steps} --save_steps 1 --save_total_limit 2 --resume latest");
    let run = || launched(folder.path(), "run --nproc_per_node 2 --max_restarts 100", "killed", &words);
    let start = || run().stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let mut launcher = start();
    for attempt in 0..20 {
        let before = checkpoints(&killed);
        let mut ranks = Vec::new();
        while checkpoints(&killed) == before || ranks.len() < 2 {
            assert!(launcher.try_wait().unwrap().is_none(), "attempt {attempt}: the run is over");
            std::thread::sleep(Duration::from_millis(1));
            ranks = ranks_of(launcher.id());
        }
        std::thread::sleep(Duration::from_millis(40).mul_f32(rng::uniform(10, attempt, 0)));
        if attempt % 4 == 3 {
            launcher.kill().unwrap();
            launcher.wait().unwrap();
            // The ranks are killed by the kernel; a second run beside them would write the same files.
            wait_for_end(&ranks);
            launcher = start();
        } else {
            // It may have been killed because of the other just now.
            let _ = kill_process(ranks[attempt as usize % 2], Signal::KILL);
        }
        wait_for_end(&ranks);
    }
    assert!(launcher.wait().unwrap().success());
    let expected = losses(&whole);
    assert_eq!(expected.len(), 60);
    assert!(losses(&killed) == expected);
    assert_eq!(checkpoints(&killed), ["checkpoint-59", "checkpoint-60"], "nothing unfinished is left");
}

#[test]
fn a_signal_saves_and_ends() {
    let folder = tempfile::tempdir().unwrap();
    prepare(folder.path());
    succeeds(&mut castor(folder.path(), "whole", ""));
    // Slow links, so that the run is still there when the signal comes.
    let slow = "--plugin gemini_cpu --emulated_h2d_gbps 0.02";
    for (signal, code, saves, left) in [("TERM", 143, "--save_steps 1000", 1), ("INT", 130, "--save_steps 0", 0)] {
        let run = castor(folder.path(), signal, &format!("{slow} {saves}")).spawn().unwrap();
        let log = folder.path().join(signal).join("train_log.jsonl");
        while fs::read_to_string(&log).unwrap_or_default().lines().count() < 4 {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(Command::new("kill").args([format!("-{signal}"), run.id().to_string()]).status().unwrap().success());
        let output = run.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{}", said(&output));
        assert_eq!(checkpoints(&folder.path().join(signal)).len(), left, "{}", said(&output));
    }
    let text = succeeds(&mut castor(folder.path(), "TERM", "--resume"));
    assert!(text.contains("going on after step"), "{text}");
    assert!(losses(&folder.path().join("TERM")) == losses(&folder.path().join("whole")));
    let weights = |run: &str| fs::read(folder.path().join(run).join("model/model.safetensors")).unwrap();
    assert!(weights("TERM") == weights("whole"));
    // Resumed once more there is nothing to do, and no rate to tell.
    succeeds(&mut castor(folder.path(), "TERM", "--resume --save_steps 5"));
    let text = succeeds(&mut castor(folder.path(), "TERM", "--resume latest"));
    assert!(!text.contains("train_loss") && !text.contains("per_second"), "{text}");
}

/// A limit on the size of files is the full disk that needs no privilege.
#[test]
fn a_save_that_does_not_fit_leaves_the_one_before() {
    let folder = tempfile::tempdir().unwrap();
    prepare(folder.path());
    for (name, launcher, saves) in
        [("held", "", "off"), ("beside", "", "on"), ("ranks", "run --nproc_per_node 2", "on")]
    {
        let run = folder.path().join(name);
        let words = format!("--save_steps 3 --save_total_limit 1 --resume --async_save {saves}");
        let castor = |steps: u32| launched(folder.path(), launcher, name, &format!("--max_steps {steps} {words}"));
        succeeds(&mut castor(3));
        let train = castor(9);
        let mut limited = Command::new("sh");
        // 100 blocks of 512 or 1024 bytes: less than a rank's file, more than the log.
        limited.args(["-c", "trap '' XFSZ; ulimit -f 100; exec \"$@\"", "sh"]).arg(train.get_program());
        let output = limited.args(train.get_args()).current_dir(folder.path()).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{name} {}", said(&output));
        assert!(said(&output).contains(".bin: write of"), "{name} {}", said(&output));
        let way_back = format!("the last checkpoint is {name}/checkpoint-3, and --resume latest");
        assert!(said(&output).contains(&way_back), "{name} {}", said(&output));
        assert_eq!(checkpoints(&run), ["checkpoint-3"], "{name}");
        succeeds(&mut castor(9));
        assert_eq!(checkpoints(&run), ["checkpoint-9"], "{name}");
        assert_eq!(losses(&run).len(), 9, "{name}");
    }
}

/// What was clipped by the norm of the step before stays marked when later steps are exact.
#[test]
fn inexact_steps_are_not_forgotten() {
    let folder = tempfile::tempdir().unwrap();
    prepare(folder.path());
    let castor = |words: &str| succeeds(&mut castor(folder.path(), "run", &format!("--save_steps 2 --resume {words}")));
    let first = castor("--max_steps 2 --clip lagged");
    assert!(first.contains("inexact by choice: gradients are clipped by the norm of the step before"), "{first}");
    let then = castor("--max_steps 4");
    assert!(then.contains("clip was \"lagged\" in checkpoint-2 and is \"exact\" from here on"), "{then}");
    let mark = "gradients of earlier sessions were clipped by the norm of the step before";
    for file in ["train_results.json", "report.html", "train_log.jsonl"] {
        let text = std::fs::read_to_string(folder.path().join("run").join(file)).unwrap();
        assert!(text.contains(mark), "{file}: {text}");
    }
    let unclipped = castor("--max_steps 6 --clip lagged --grad_clip 0");
    assert!(!unclipped.contains("are clipped"), "nothing is: {unclipped}");
}

#[test]
fn what_cannot_work_is_refused_before_the_first_step() {
    let folder = tempfile::tempdir().unwrap();
    prepare(folder.path());
    fs::write(folder.path().join("file"), "").unwrap();
    for (run, more, words) in
        [("file/run", "", "--output_dir file/run"), ("run", "--resume nowhere", "nowhere/manifest.json")]
    {
        let output = castor(folder.path(), run, more).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        assert!(said(&output).contains(words) && !said(&output).contains("step 1/"), "{}", said(&output));
    }
}
