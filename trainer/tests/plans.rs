//! `castor plan`: what fits, what it says of snapshots and of drives, and the rates that it reckons with.

#[path = "support/folder.rs"]
mod folder;

use folder::{Folder, text};

/// The losses of a run.
fn losses(folder: &Folder, train: &str) -> Vec<serde_json::Value> {
    folder.accepts(&format!("{train} --output_dir out"));
    let log = std::fs::read_to_string(folder.path("out/train_log.jsonl")).unwrap();
    std::fs::remove_dir_all(folder.path("out")).unwrap();
    let steps = log.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    steps.filter(|line| line["kind"] == "step").map(|line| line["loss"].clone()).collect()
}

/// A larger budget never refuses what a smaller one takes, and the planner takes what full recompute fits.
#[test]
fn what_fits_goes_on_fitting() {
    let folder = Folder::new();
    let plan = "plan --model_config model.json --max_length 64 --batch_size 2 --gradient_accumulation_steps 2 \
                --backend cpu --host_memory 256MiB";
    let fits = |kib: u64, more: &str| {
        let output = folder.output(&format!("{plan} --device_memory {kib}KiB {more}"));
        assert!([Some(0), Some(3)].contains(&output.status.code()), "{}", text(&output.stderr));
        output.status.success()
    };
    let mut budgets: Vec<u64> = vec![100];
    while *budgets.last().unwrap() < 4096 {
        budgets.push(budgets.last().unwrap() * 103 / 100 + 1);
    }
    let first = budgets.iter().position(|kib| fits(*kib, "--recompute full")).expect("four MiB are plenty");
    for kib in &budgets[first..] {
        assert!(fits(*kib, ""), "{kib} KiB are refused, though {} are enough", budgets[first]);
    }
}

/// What the usual window leaves no room for is not refused while a smaller one would do, and runs.
#[test]
fn a_model_that_fits_beside_a_small_window() {
    let folder = Folder::new();
    let train =
        "train --model_config model.json --data text.txt --max_length 16 --max_steps 2 --backend cpu --no_save_model";
    for (clip, host) in [("exact", "600KiB"), ("lagged", "500KiB")] {
        let budgets = format!("--device_memory 1000KiB --host_memory {host}");
        let train = format!("{train} --clip {clip}");
        let here = losses(&folder, &train);
        assert!(here.len() == 2 && here == losses(&folder, &format!("{train} {budgets}")), "{clip}: the same losses");
    }
}

/// The host's cores update what a slow link could not bring in time, if they are fast; as many as the user says; and
/// who updates changes no loss.
#[test]
fn the_hosts_cores_take_their_share() {
    let folder = Folder::new();
    let rates = |host_updates: f64| {
        let rates = [("host_to_device", 1e6), ("device_to_host", 1e6), ("host_updates", host_updates)];
        let rates = rates.map(|(name, value)| format!(r#""{name}": {{"value": {value}, "how": "by hand"}}"#));
        folder.write(
            "rates.json",
            format!(
                r#"{{"version": 2, "places": {{"A GPU": {{"measured_at": 1, "rates": {{{}}}}}}}}}"#,
                rates.join(",")
            ),
        );
    };
    let budgets = "--max_length 16 --backend cpu --device_memory 700KiB --host_memory 64MiB";
    let share = |more: &str| {
        let plan = format!("plan --model_config model.json --rates rates.json {budgets} {more}");
        let (out, _) = folder.accepts(&plan);
        out.lines().find(|line| line.starts_with("  updates ")).map(str::to_owned)
    };
    rates(1e12);
    assert!(share("").is_some_and(|line| line.contains("of 4 groups by the host's cores")));
    assert_eq!(share("--cpu_update 0"), None);
    assert!(share("--cpu_update 1").is_some_and(|line| line.contains("the last 4 of 4 groups")));
    rates(1e3);
    assert_eq!(share(""), None, "slower than the link");
    assert!(share("--cpu_update 0.2").is_some_and(|line| line.contains("the last 1 of 4 groups")));
    let (json, _) =
        folder.accepts(&format!("plan --model_config model.json --rates rates.json {budgets} --ranks 2 --json"));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["rates"]["host_updates"]["f32"], 5e2, "two ranks of a host share its cores");

    let train = format!("train --model_config model.json --data text.txt --max_steps 3 --no_save_model {budgets}");
    let losses = |more: &str| losses(&folder, &format!("{train} {more}"));
    let on_device = losses("--cpu_update 0");
    assert!(on_device.len() == 3 && on_device == losses("--cpu_update 0.5"));
    assert_eq!(on_device, losses("--cpu_update 1 --plugin gemini_cpu"));

    folder.refuses(&format!("{train} --cpu_update 2"), 2, &["--cpu_update is 2", "from 0 to 1"]);
    folder.refuses(&format!("{train} --cpu_update 0.5 --plugin zero3"), 2, &["plugin zero3", "gemini_cuda"]);
    folder.refuses(&format!("{train} --cpu_update 0.5 --clip lagged"), 2, &["--clip lagged", "give 0"]);
}

/// What a plan writes to the disk is what the drive wears by; how long that lasts follows from the step's time.
#[test]
fn a_plan_says_how_long_a_drive_lasts() {
    let folder = Folder::new();
    let plan = "plan --model_config model.json --max_length 16 --backend cpu --plugin gemini_cpu --device_memory 8MiB";
    let disk = |more: &str| {
        let (out, _) = folder.accepts(&format!("{plan} {more}"));
        out.lines().find(|line| line.starts_with("  disk ")).map(str::to_owned)
    };
    assert_eq!(disk("--host_memory 8MiB --nvme . --nvme_endurance 600"), None, "nothing is on the disk");
    let days = |tb: &str| -> f64 {
        let line = disk(&format!("--host_memory 300KiB --nvme . --nvme_endurance {tb}")).expect("the disk is written");
        line.split(" lasts ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap().parse().unwrap()
    };
    let (one, ten) = (days("600"), days("6000"));
    assert!(one > 0.0 && (ten / one - 10.0).abs() < 0.05 * 10.0, "{one} and {ten} days");
    let line = disk("--host_memory 300KiB --nvme .").unwrap();
    assert!(line.contains("TB a day; --nvme_endurance"), "{line}");
    folder.refuses(&format!("{plan} --nvme . --nvme_endurance -1"), 2, &["--nvme_endurance is -1", "TB above 0"]);
}

/// The snapshot of saves beside the run is in the plan, or the plan says why there is none; it never displaces what
/// trains unless it is told to.
#[test]
fn a_plan_counts_the_snapshot() {
    let folder = Folder::new();
    let plan = "plan --model_config model.json --max_length 16 --backend cpu --save_steps 5 --plugin gemini_cpu";
    let host = |out: &str| {
        let value: serde_json::Value = serde_json::from_str(out).unwrap();
        let host = value["tiers"].as_array().unwrap().iter().find(|tier| tier["tier"] == "host").unwrap().clone();
        let users: Vec<(String, u64)> = serde_json::from_value(host["users"].clone()).unwrap();
        let snapshot = users.iter().find(|(name, _)| name == "snapshot").map_or(0, |(_, bytes)| *bytes);
        (host["peak_bytes"].as_u64().unwrap(), snapshot)
    };
    let with = |more: &str| host(&folder.accepts(&format!("{plan} --json --device_memory 8MiB {more}")).0);
    let (without, none) = with("--host_memory 8MiB --async_save off");
    assert_eq!(none, 0);
    let (beside, snapshot) = with("--host_memory 8MiB");
    assert_eq!(beside, without + snapshot, "everything else is where it was");
    assert_eq!(with("--host_memory 8MiB --async-save"), (beside, snapshot), "the flag alone means on");
    assert_eq!(with("--host_memory 8MiB --save_steps 0 --async_save on").1, 0, "a run that never saves");
    // Exactly enough, and a byte less.
    assert_eq!(with(&format!("--host_memory {beside}")), (beside, snapshot));
    let short = format!("{plan} --device_memory 8MiB --host_memory {}", beside - 1);
    let (out, err) = folder.accepts(&short);
    assert!(!out.contains("snapshot"), "{out}");
    assert!(err.contains("a save will hold the run") && err.contains("--async_save on"), "{err}");
    // Weights and states move to the device rather than being refused.
    assert_eq!(with(&format!("--host_memory {} --async_save on --plugin gemini_cuda", beside - 1)).1, snapshot);
    let tiny = format!("{plan} --device_memory 8MiB --host_memory {} --async_save on", snapshot - 1);
    folder.refuses(&tiny, 3, &["snapshot"]);
    folder.refuses(&format!("{plan} --async_save perhaps"), 2, &["--async_save is perhaps", "auto, on or off"]);
}

/// What the doctor measures is what plans say they reckon with.
#[test]
fn a_bench_and_the_plan_after_it() {
    let folder = Folder::new();
    let plan = "plan --config model.json --max_length 16 --backend cpu --nvme .";
    let (before, _) = folder.accepts(plan);
    assert!(before.contains("rates         assumed; `castor doctor --bench` measures them"), "{before}");
    folder.accepts("doctor");
    assert!(!folder.path("cache").exists(), "nobody asked to measure");
    let (said, _) = folder.accepts("doctor --bench --backend cpu --nvme .");
    for rate in ["matrix products", "device memory", "host to device, both ways", "disk to host", "host to disk"] {
        assert!(said.contains(rate), "{rate} in {said}");
    }
    let (after, _) = folder.accepts(plan);
    let line = after.lines().find(|line| line.starts_with("  rates")).unwrap();
    assert!(line.contains("measured on 20") && !line.contains("assumed"), "{line}");
    assert!(after.lines().any(|line| line.starts_with("  estimated") && line.contains("bounded by")), "{after}");
    folder.refuses("doctor --bench --nvme nowhere", 2, &["--nvme nowhere", "folder"]);
    folder.refuses("doctor --bench --backend cpuu", 2, &["--backend is cpuu", "auto, cuda, cpu"]);
}
