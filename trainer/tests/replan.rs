//! Another plan while a run goes on: the losses are those of a run that keeps its plan, bit for bit.

#[path = "support/binary.rs"]
mod binary;
#[path = "support/processes.rs"]
#[allow(dead_code, reason = "a part of it is used here")]
mod processes;

use binary::{folder_with_text, refuses};
use castor_trainer::rates::{Measured, MeasuredRate, Rate, RateCache};
use castor_trainer::replan::request;
use castor_trainer::report::log::{Run, RunLog};
use castor_trainer::report::memory::MemoryReport;
use processes::ranks_of;
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long to wait for what must come; only a failing test waits that long.
const LIMIT: Duration = Duration::from_secs(60);

/// One rank on its own, and two behind a launcher.
const WORLDS: [&str; 2] = ["", "run --nproc_per_node 2"];

/// `castor train` in `folder`, behind a launcher's words, whose output is `run`.
fn train(folder: &Path, launcher: &str, run: &str, more: &str) -> Child {
    let words = format!(
        "{launcher} train --config model.json --data text.txt --max_length 16 --batch_size 2 --backend cpu --bf16 \
         --optimizer_states 8bit --lr 1e-3 --host_memory 16MiB --no_save_model --output_dir {run} {more}"
    );
    let mut command = Command::new(env!("CARGO_BIN_EXE_castor"));
    command.args(words.split_whitespace()).current_dir(folder).env("XDG_CACHE_HOME", folder);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// Its log, once it has ended well, and what it said.
fn ended(child: Child, folder: &Path, run: &str) -> (Run, String) {
    let output = child.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap()).concat();
    assert!(output.status.success(), "{said}");
    (RunLog::read(&folder.join(run)).unwrap().unwrap(), said)
}

/// Number, loss and norm of each step, in bits.
fn steps(run: &Run) -> Vec<[u64; 3]> {
    run.steps.iter().map(|step| [step.step, step.loss.to_bits(), step.grad_norm.to_bits()]).collect()
}

/// What the last plan moves, peaks included, was planned.
fn was_planned(run: &Path) -> MemoryReport {
    let memory = MemoryReport::read(run).unwrap().unwrap();
    for link in &memory.links {
        assert_eq!(link.planned_bytes_per_step, link.counted_bytes_per_step, "{}", link.link);
    }
    for tier in &memory.tiers {
        assert_eq!(tier.predicted_peak_bytes, tier.measured_peak_bytes, "{}", tier.tier);
        assert!(tier.measured_peak_bytes <= tier.budget_bytes, "{}", tier.tier);
    }
    memory
}

fn checkpoints(run: &Path) -> usize {
    let names = std::fs::read_dir(run).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with("checkpoint-")).count()
}

/// The planner believes that arithmetic takes for ever, and so computes nothing again and streams the model through a
/// link that is really the slow part: the first steps show it.
#[test]
fn the_first_steps_show_a_better_plan() {
    let folder = folder_with_text();
    let folder = folder.path();
    let slow = [Rate::Products, Rate::Attention, Rate::DeviceMemory];
    let rates = slow.map(|rate| (rate, MeasuredRate { value: 1e7, how: "a mistake".into() }));
    let mut cache = RateCache::default();
    for threads in 1..=256 {
        cache.keep(format!("CPU, {threads} threads"), Measured::now(BTreeMap::from(rates.clone())));
    }
    cache.write(&folder.join("castor/rates.json")).unwrap();
    for (launcher, device) in WORLDS.into_iter().zip(["400KiB", "360KiB"]) {
        let more = format!("--device_memory {device} --max_steps 8");
        let links = "--emulated_h2d_gbps 0.0005 --emulated_d2h_gbps 0.0005";
        let runs = ["kept", "changed"].map(|run| format!("{run}-{}", launcher.len()));
        let kept = train(folder, launcher, &runs[0], &format!("{more} --replan off"));
        let (kept, _) = ended(kept, folder, &runs[0]);
        assert_eq!((kept.plans.len(), kept.steps.len()), (0, 8));
        let run = folder.join(&runs[1]);
        // On a machine that is busy with other things a step may take so long by chance that no plan is worth a change.
        let (changed, said) = (0..3)
            .map(|_| {
                let _ = std::fs::remove_dir_all(&run);
                let (changed, said) =
                    ended(train(folder, launcher, &runs[1], &format!("{more} {links}")), folder, &runs[1]);
                assert_eq!(steps(&changed), steps(&kept));
                assert_eq!(checkpoints(&run), 0, "it is no run that saves");
                was_planned(&run);
                (changed, said)
            })
            .find(|(changed, _)| !changed.plans.is_empty())
            .expect("three times no other plan");
        let [plan] = &changed.plans[..] else { panic!("{:?}\n{said}", changed.plans) };
        assert_eq!((plan.step, &*plan.reason), (4, "measured"), "{said}");
        assert!(plan.after_s < plan.before_s && plan.measured_s.is_some());
        assert_eq!(plan.planned_bytes, plan.counted_bytes);
        assert!(said.contains("the first steps took") && said.contains("another plan from step 5 on"), "{said}");
    }
}

/// Waits until `there` is.
fn until(what: &str, there: impl Fn() -> bool) {
    let begun = Instant::now();
    while !there() {
        assert!(begun.elapsed() < LIMIT, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_budget_is_lowered_while_the_run_goes_on() {
    let folder = folder_with_text();
    let folder = folder.path();
    for (launcher, saves) in WORLDS.into_iter().zip([false, true]) {
        let more = "--device_memory 16MiB --max_steps 200 --logging_steps 1000 --eval_fraction 0.1 --eval_steps 90";
        let more = format!("{more} --save_steps {}", if saves { "150" } else { "0" });
        let runs = ["kept", "changed"].map(|run| format!("{run}-{}", launcher.len()));
        let (kept, _) = ended(train(folder, launcher, &runs[0], &more), folder, &runs[0]);
        let child = train(folder, launcher, &runs[1], &more);
        let run = folder.join(&runs[1]);
        let rank =
            || if launcher.is_empty() { Some(Pid::from_child(&child)) } else { ranks_of(child.id()).first().copied() };
        let wrote = || std::fs::read_to_string(run.join("train_log.jsonl")).is_ok_and(|log| log.contains("\"loss\""));
        until("a step", wrote);
        // Stopped, so that it cannot end before it is asked.
        let rank = rank().unwrap();
        for budget in ["--device_memory 8KiB", "--device_memory 100TiB", "--device_memory 360KiB --host_memory 2MiB"] {
            kill_process(rank, Signal::STOP).unwrap();
            binary::accepts(folder, &format!("replan {} {budget}", runs[1]), None);
            kill_process(rank, Signal::CONT).unwrap();
            until("an answer", || !request::Request::waits(&run));
        }
        let (changed, said) = ended(child, folder, &runs[1]);
        let stays = "the run goes on by the plan that it has";
        assert_eq!(said.matches(stays).count(), 2, "{said}");
        for part in ["--device_memory 8KiB: ", "short by", "--device_memory 100TiB: ", "has at most"] {
            assert!(said.contains(part), "{part}: {said}");
        }
        let [plan] = &changed.plans[..] else { panic!("{:?}\n{said}", changed.plans) };
        assert_eq!(plan.reason, "--device_memory 360KiB --host_memory 2MiB");
        assert_eq!((plan.budgets["device"], plan.budgets["host"]), (360 << 10, 2 << 20));
        assert_eq!(plan.planned_bytes, plan.counted_bytes);
        assert_eq!((steps(&changed), steps(&changed).len()), (steps(&kept), 200));
        assert_eq!(changed.evaluations, kept.evaluations);
        let memory = was_planned(&run);
        assert_eq!(memory.tiers[0].budget_bytes, 360 << 10);
        assert!(memory.links[0].counted_bytes_per_step > 0, "what does not fit any more streams");
        // That of the change, and those of steps 150 and 200.
        assert_eq!(checkpoints(&run), if saves { 3 } else { 0 });
        let page = std::fs::read_to_string(run.join("report.html")).unwrap();
        assert!(page.contains("Changes of the plan") && page.contains("--host_memory 2MiB"));
        let said = refuses(folder, &format!("replan {} --device_memory 1MiB", runs[1]));
        assert!(said.contains("no run goes on there"), "{said}");
    }
}

/// The command refuses what no run could answer; what was left for a run that is over is not for the next one.
#[test]
fn requests_that_are_none() {
    let folder = folder_with_text();
    let folder = folder.path();
    for (words, parts) in [
        ("replan nowhere --device_memory 1MiB", ["nowhere: it is not the folder of a run", "--output_dir"]),
        ("replan . --device_memory much", ["--device_memory is much", "a size such as 80GiB"]),
        ("replan . --host_memory -5GiB", ["--host_memory is -5GiB", "a size such as 80GiB"]),
        ("replan .", ["nothing is asked for", "--nvme_capacity"]),
        ("replan --device_memory 1MiB", ["run_dir", "required"]),
        ("train --replan sometimes", ["--replan is sometimes", "auto or off"]),
    ] {
        let said = refuses(folder, words);
        assert!(parts.iter().all(|part| said.contains(part)), "castor {words}: {said}");
    }
    std::fs::create_dir(folder.join("run")).unwrap();
    let old = request::Request { device_memory: Some("1KiB".into()), ..request::Request::default() };
    old.leave(&folder.join("run")).unwrap();
    let (run, said) = ended(train(folder, "", "run", "--max_steps 2 --device_memory 16MiB"), folder, "run");
    assert!(run.plans.is_empty() && !request::Request::waits(&folder.join("run")), "{said}");
}
