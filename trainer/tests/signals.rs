//! Signals that a run was started with ignored: a single rank and a launcher treat them alike.

#[path = "support/binary.rs"]
mod binary;

use binary::folder_with_text;
use rustix::process::{Pid, Signal, kill_process};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long to wait for what must come; only a failing test waits that long.
const LIMIT: Duration = Duration::from_secs(60);

/// INT behind a script's `&` and HUP under `nohup` stay ignored, TERM is heard whatever was ignored.
#[test]
fn what_was_ignored_at_the_start_stays_so_but_for_term() {
    for launcher in ["", "run --nproc_per_node 2 "] {
        let folder = folder_with_text();
        let folder = folder.path();
        let words = format!(
            "{launcher}train --config model.json --data text.txt --max_length 16 --backend cpu --device_memory 8MiB \
             --host_memory 8MiB --output_dir out --max_steps 1000000 --logging_steps 1000000"
        );
        let mut command = Command::new("sh");
        command.args(["-c", "trap '' INT HUP TERM; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_castor")]);
        command.args(words.split_whitespace()).current_dir(folder).env("XDG_CACHE_HOME", folder).process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let begun = Instant::now();
        let log = folder.join("out/train_log.jsonl");
        while !std::fs::read_to_string(&log).is_ok_and(|log| log.contains("\"loss\"")) {
            assert!(begun.elapsed() < LIMIT && child.try_wait().unwrap().is_none(), "{launcher}: no step came");
            std::thread::sleep(Duration::from_millis(20));
        }
        for signal in [Signal::INT, Signal::HUP, Signal::TERM] {
            kill_process(Pid::from_child(&child), signal).unwrap();
        }
        let output = child.wait_with_output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(143), "{launcher}: {err}");
        assert!(err.contains("interrupted by signal 15"), "{launcher}: {err}");
    }
}
