//! The real binary: what it refuses (one sentence, exit 2 or 3, never a panic), and what a run leaves behind.

#[path = "support/folder.rs"]
mod folder;

use folder::{Folder, text};
use rustix::process::{Pid, Signal};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long to wait for what must come; only a failing test waits that long.
const LIMIT: Duration = Duration::from_secs(60);

/// A folder of the reference cases beside the repository; `None`, said aloud, where they are absent.
fn shared(path: &str) -> Option<PathBuf> {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared")).join(path);
    if folder.exists() {
        Some(folder)
    } else {
        eprintln!("skipped: {} is not here", folder.display());
        None
    }
}

/// A short run of the tiny model; later flags win.
const TRAIN: &str = "train --model_config model.json --data text.txt --max_length 16 --batch_size 2 --backend cpu \
                     --device_memory 8MiB --host_memory 8MiB --output_dir out --max_steps 3";
const PARITY: &str = "parity --model_config model.json --backend cpu --device_memory 8MiB --host_memory 8MiB";

/// A safetensors file of two rows of 16 ids below 90.
fn batch(labels: impl Fn(i64) -> i64) -> Vec<u8> {
    let ids = (0..32).map(|at| at * 7 % 90);
    let header = r#"{"input_ids":{"dtype":"I64","shape":[2,16],"data_offsets":[0,256]},
        "labels":{"dtype":"I64","shape":[2,16],"data_offsets":[256,512]}}"#;
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend(ids.clone().flat_map(i64::to_le_bytes));
    file.extend(ids.flat_map(|id| labels(id).to_le_bytes()));
    file
}

/// A safetensors file of two numbers without a dimension, one under a name that no result has.
fn scalars() -> Vec<u8> {
    let header = r#"{"loss":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"los":{"dtype":"F32","shape":[],"data_offsets":[4,8]}}"#;
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend([1f32, 2.0].into_iter().flat_map(f32::to_le_bytes));
    file
}

#[test]
fn budgets_that_do_not_fit() {
    let folder = Folder::new();
    let train = |flags: &str| format!("{TRAIN} {flags}");
    let says = ["short by", "largest users", "MiB"];
    let device = folder.refuses(&train("--device_memory 200KiB"), 3, &says);
    assert!(device.contains("device") && device.contains("window") && device.contains("activations"), "{device}");
    folder.refuses(&train("--device_memory 1KiB"), 3, &says);
    folder.refuses(&train("--device_memory 700KiB --plugin zero3"), 3, &says);
    let host = folder.refuses(&train("--device_memory 700KiB --host_memory 100KiB"), 3, &says);
    assert!(host.contains("host") && host.contains("--nvme"), "{host}");
    let disk = "--device_memory 700KiB --host_memory 400KiB --nvme . --nvme_capacity 10KiB";
    folder.refuses(&train(disk), 3, &["nvme", "short by", "--nvme_capacity"]);
    let plan = "plan --config model.json --max_length 16 --backend cpu --device_memory 100KiB --host_memory 8MiB";
    folder.refuses(plan, 3, &says);
    assert!(!folder.path("out").exists(), "nothing is written before it fits");
}

#[test]
fn folders_of_the_disk_tier() {
    let folder = Folder::new();
    let train =
        |nvme: &str| format!("{TRAIN} --device_memory 700KiB --host_memory 400KiB --nvme {nvme} --nvme_capacity 10MiB");
    folder.refuses(&train("nowhere"), 2, &["--nvme nowhere", "existing folder"]);
    folder.refuses(&train("text.txt"), 2, &["--nvme text.txt", "folder"]);
    std::fs::create_dir(folder.path("sealed")).unwrap();
    let mut sealed = std::fs::metadata(folder.path("sealed")).unwrap().permissions();
    sealed.set_readonly(true);
    std::fs::set_permissions(folder.path("sealed"), sealed).unwrap();
    if rustix::process::geteuid().is_root() {
        eprintln!("skipped: root may write to a read-only folder");
    } else {
        folder.refuses(&train("sealed"), 2, &["--nvme sealed", "written"]);
    }
    let (_, err) = folder.accepts(&train("."));
    assert!(err.contains("nvme read"), "something is on the disk: {err}");
    let left: Vec<_> = std::fs::read_dir(folder.path(".")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().contains("nvme")), "left behind: {left:?}");
}

#[test]
fn data_and_counts() {
    let folder = Folder::new();
    folder.write("empty.txt", "");
    folder.write("short.txt", "ab");
    folder.write("masked.safetensors", batch(|_| -100));
    let train = |flags: &str| format!("{} {flags}", TRAIN.replace("--data text.txt ", ""));
    folder.refuses(&train("--data empty.txt"), 2, &["empty"]);
    folder.refuses(&train("--data short.txt"), 2, &["4 tokens", "16"]);
    folder.refuses(&train("--data nowhere.txt"), 2, &["nowhere.txt"]);
    folder.refuses(&train(""), 2, &["--data"]);
    folder.refuses(&format!("{PARITY} --batch masked.safetensors"), 2, &["-100"]);
    for (flag, allowed) in [
        ("gradient_accumulation_steps", "from 1"),
        ("batch_size", "from 1"),
        ("max_steps", "at least"),
        ("max_length", "from 2"),
    ] {
        folder.refuses(&format!("{TRAIN} --{flag} 0"), 2, &[flag, "0", allowed]);
    }
    folder.refuses(&format!("{TRAIN} --tokenizer nowhere"), 2, &["--tokenizer nowhere"]);
}

#[test]
fn names_that_are_not_known() {
    let folder = Folder::new();
    folder.refuses(&format!("{TRAIN} --plugin gemni_cuda"), 2, &["gemni_cuda", "did you mean gemini_cuda?"]);
    folder.refuses(&format!("{TRAIN} --batchsize 3"), 2, &["--batchsize", "did you mean --batch_size?"]);
    folder.refuses("trian --config x", 2, &["trian", "train"]);
    folder.refuses("", 2, &["--help"]);
    folder.refuses(&format!("run --nproc_per_node 0 {TRAIN}"), 2, &["--nproc_per_node 0", "at least 1"]);
    folder.write("misspelt.toml", "batch_sze = 3\n");
    folder.refuses("train --config misspelt.toml", 2, &["misspelt.toml", "batch_sze", "did you mean batch_size?"]);
    folder.write("broken.toml", "batch_size = \n");
    folder.refuses("train --config broken.toml", 2, &["broken.toml", "line 1"]);
    folder.refuses("plan --config nowhere.json", 2, &["nowhere.json"]);
    folder.refuses("train --data text.txt", 2, &["no model", "--config"]);
    folder.refuses(&format!("{TRAIN} --output_dir text.txt"), 2, &["--output_dir text.txt"]);
}

#[test]
fn cuda_without_a_gpu() {
    if castor_kernels::cuda::device_count().is_ok() {
        eprintln!("skipped: there is a GPU");
        return;
    }
    let folder = Folder::new();
    folder.refuses(&format!("{TRAIN} --backend cuda"), 2, &["--backend cuda", "--backend cpu"]);
}

#[test]
fn parity_with_wrong_files() {
    let folder = Folder::new();
    folder.write("batch.safetensors", batch(|id| id));
    folder.write("too_large.safetensors", batch(|_| 259));
    let parity = |flags: &str| format!("{PARITY} {flags}");
    let (_, err) = folder.accepts(&parity("--batch batch.safetensors --out result.safetensors"));
    assert_eq!(err, "", "there is nothing to notice");
    let (_, err) = folder.accepts(&parity("--batch batch.safetensors --sophia_rho 0.1"));
    assert!(err.contains("--sophia_rho 0.1 is accepted and changes nothing"), "{err}");
    let (out, _) =
        folder.accepts(&parity("--batch batch.safetensors --expect result.safetensors --tolerance 0 --clip lagged"));
    assert!(out.contains("loss") && out.contains("compared  24 of 24 tensors\n"), "{out}");
    folder.write("scalars.safetensors", scalars());
    let scalars = "--batch batch.safetensors --expect scalars.safetensors --tolerance 1e9";
    let (out, _) = folder.accepts(&parity(scalars));
    assert!(out.contains("compared  1 of 2 tensors; no results here are called los\n"), "{out}");
    folder.refuses(&parity("--batch text.txt"), 2, &["text.txt", "safetensors"]);
    folder.refuses(&parity("--batch nowhere.safetensors"), 2, &["nowhere.safetensors"]);
    folder.refuses(&parity("--batch too_large.safetensors"), 2, &["label 259", "vocabulary of 259"]);
    folder.refuses(&parity("--batch batch.safetensors --expect text.txt"), 2, &["text.txt"]);
    folder.refuses(&parity("--batch batch.safetensors --expect batch.safetensors"), 2, &["batch.safetensors"]);
    folder.refuses(&parity(""), 2, &["--batch"]);
}

/// Each configuration is taken or refused as makes sense; what is ignored or refused is named.
#[test]
fn odd_configurations() {
    let Some(cases) = shared("cases/bad_or_odd_config") else {
        return;
    };
    let refused: [(&str, &[&str]); 11] = [
        ("act_gelu", &["hidden_act", "gelu"]),
        ("act_nope", &["hidden_act", "nope"]),
        ("hidden_50_heads_4", &["hidden_size", "50"]),
        ("kv_3_of_4", &["num_key_value_heads", "3"]),
        ("odd_head_dim", &["head_dim", "13"]),
        ("rs_factor_.5", &["factor", "0.5"]),
        ("rs_llama3_missing", &["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]),
        ("rs_unknown", &["rope_type", "banana"]),
        ("theta_null", &["rope_theta", "null"]),
        ("vocab_0", &["vocab_size", "0"]),
        ("nowhere", &["nowhere"]),
    ];
    // With what is said about what changes nothing.
    let taken = [
        ("attn_bias", ""),
        ("dtype_bad", "torch_dtype"),
        ("eos_list", ""),
        ("extra", "foo"),
        ("head_dim_null", ""),
        ("kv_null", ""),
        ("mlp_bias", ""),
        ("pad_97", "pad_token_id"),
        ("rope_parameters", ""),
        ("rs_dynamic", ""),
        ("rs_linear_old", ""),
        ("sw", "sliding_window"),
        ("tie", ""),
    ];
    let folder = Folder::new();
    let plan = |case: &str| {
        let file = cases.join(case).join("config.json");
        format!(
            "plan --config {} --max_length 16 --backend cpu --device_memory 64MiB --host_memory 64MiB",
            file.display()
        )
    };
    for (case, parts) in refused {
        let sentence = folder.refuses(&plan(case), 2, parts);
        assert!(sentence.contains("config.json"), "{sentence}");
    }
    for (case, notice) in taken {
        let (out, err) = folder.accepts(&plan(case));
        assert!(out.contains("padding"), "{case}: {out}");
        assert!(err.contains(notice) && (!notice.is_empty() || err.is_empty()), "{case}: {err}");
    }
    for case in std::fs::read_dir(&cases).unwrap() {
        let name = case.unwrap().file_name().into_string().unwrap();
        let known = refused.iter().any(|(case, _)| *case == name) || taken.iter().any(|(case, _)| *case == name);
        assert!(known || name == "observed.json", "nobody decided about {name}");
    }
}

/// Rows that a model's attention would not see whole are refused, with the length that is possible.
#[test]
fn rows_longer_than_a_sliding_window() {
    let folder = Folder::new();
    let llama = std::fs::read_to_string(folder.path("model.json")).unwrap();
    folder.write("mistral.json", llama.replace("\"llama\"", "\"mistral\", \"sliding_window\": 24"));
    let train = |length: u64| {
        format!(
            "train --config mistral.json --data text.txt --max_length {length} --max_steps 1 --backend cpu --output_dir out"
        )
    };
    folder.refuses(&train(25), 2, &["sliding_window is 24", "--max_length 25", "at most 24"]);
    folder.accepts(&train(24));
    let sample = "sample out/model --tokenizer bytes --prompt a --max_new_tokens 64 --backend cpu";
    folder.refuses(sample, 2, &["sliding_window is 24", "--max_new_tokens"]);
}

/// Each folder of weights is read or refused as makes sense.
#[test]
fn odd_checkpoints() {
    let Some(cases) = shared("cases/odd_checkpoints") else {
        return;
    };
    let refused = [
        ("bad_json", "config.json"),
        ("config_fewer_layers", "model.layers.1."),
        ("double_prefix", "model.model."),
        ("extra_unknown", "model.layers.7.foo"),
        ("index_lacks_a_tensor", "model.norm.weight"),
        ("missing_shard", "model-00004-of-00004.safetensors"),
        ("no_weights", "model.safetensors"),
        ("shape_mismatch", "[50]"),
        ("shards_w_o_index", "model.safetensors.index.json"),
        ("truncated", "cut off"),
        ("zero_byte", "zero bytes"),
    ];
    let taken = [
        ("index_wrong_file", "model.norm.weight"),
        ("mixed_dtype", "F16"),
        ("no_format_metadata", "F16"),
        ("tied_w_different_lm_head", "lm_head.weight"),
    ];
    let folder = Folder::new();
    folder.write("batch.safetensors", batch(|id| id));
    let parity = |case: &str| {
        let weights = format!("--model {}", cases.join(case).display());
        format!("{} --batch batch.safetensors", PARITY.replace("--model_config model.json", &weights))
    };
    for (case, part) in refused {
        folder.refuses(&parity(case), 2, &[case, part]);
    }
    for (case, notice) in taken {
        let (out, err) = folder.accepts(&parity(case));
        assert!(out.contains("loss"), "{case}: {out}");
        assert!(err.contains(notice), "{case}: {err}");
    }
}

/// A step of very many micro-batches is planned all the same, here as many rounds.
#[test]
fn a_step_of_a_thousand_micro_batches() {
    let folder = Folder::new();
    let plan = "plan --model_config model.json --max_length 16 --backend cpu --device_memory 8MiB --host_memory 8MiB";
    let (out, err) = folder.accepts(&format!("{plan} --gradient_accumulation_steps 1000"));
    assert!(out.contains("of 1000 micro-batches") && out.contains("on 1 rank,"), "{out}");
    assert_eq!(err, "", "a plan does not speak of training");
}

/// Split gradients go through the model at once, unless each micro-batch's is summed by itself: what does not fit says
/// so, and fits then.
#[test]
fn a_step_of_many_micro_batches_on_two_ranks() {
    let folder = Folder::new();
    let plan = "plan --model_config model.json --max_length 16 --backend cpu --device_memory 1500KiB --host_memory 8MiB \
                --gradient_accumulation_steps 200 --ranks 2";
    for plugin in ["zero2_offload", "zero3_offload", "gemini_cuda"] {
        let plan = format!("{plan} --plugin {plugin}");
        folder.refuses(&plan, 3, &["--sync_each_batch", "--plugin zero1", "--shard_size 1"]);
        let (out, _) = folder.accepts(&format!("{plan} --sync_each_batch"));
        assert!(out.contains("of 200 micro-batches") && !out.contains("200 of 200"), "{out}");
    }
}

/// What a run says and leaves behind.
#[track_caller]
fn left_behind(folder: &Folder, out: &str, world: u64) {
    for line in ["Booster init max CUDA memory: ", "Booster init max CPU memory: ", "Max CUDA memory usage: "] {
        assert_eq!(out.lines().filter(|l| l.starts_with(line)).count(), 1, "{line} in\n{out}");
    }
    assert!(out.contains("***** train metrics *****") && out.contains("Total optimization steps = 3"), "{out}");
    let json = |name: &str| -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(folder.path("out").join(name)).unwrap()).unwrap()
    };
    let memory = json("memory.json");
    assert_eq!(memory["world"], world);
    for tier in memory["tiers"].as_array().unwrap() {
        assert_eq!(tier["predicted_peak_bytes"], tier["measured_peak_bytes"], "{tier}");
        let ticks = |key: &str| -> Vec<Vec<u64>> { serde_json::from_value(tier[key].clone()).unwrap() };
        // The prediction is the most of all steps to come, the measurement that of the warm-up.
        for (predicted, measured) in ticks("predicted").concat().iter().zip(ticks("measured").concat()) {
            assert!(measured <= *predicted, "{tier}");
        }
        assert_eq!(ticks("predicted").concat().len(), ticks("measured").concat().len());
    }
    for link in memory["links"].as_array().unwrap() {
        assert_eq!(link["planned_bytes_per_step"], link["counted_bytes_per_step"], "{link}");
    }
    let results = json("train_results.json");
    assert_eq!(results["train_samples"], 6 * world);
    assert!(results["train_loss"].as_f64().unwrap() > 0.0);
    let log = std::fs::read_to_string(folder.path("out/train_log.jsonl")).unwrap();
    let lines: Vec<serde_json::Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let losses: Vec<f64> = lines.iter().filter_map(|line| line["loss"].as_f64()).collect();
    assert_eq!(losses.len(), 3, "{log}");
    assert!(losses[2] < losses[0], "{losses:?}");
    let page = std::fs::read_to_string(folder.path("out/report.html")).unwrap();
    assert!(page.contains("<svg") && !page.contains("http://") && !page.contains("src="), "the page opens offline");
}

#[test]
fn a_run_and_its_report() {
    let folder = Folder::new();
    let (out, err) = folder.accepts(&format!("{TRAIN} --lr 1e-2 --lr_scheduler_type constant"));
    assert!(err.lines().all(|line| !line.contains("error")), "{err}");
    left_behind(&folder, &out, 1);
    let (again, _) = folder.accepts("report out");
    assert!(again.contains("Moved per step"), "{again}");
}

#[test]
fn two_ranks_in_tiny_memory() {
    let folder = Folder::new();
    let flags = "--lr 1e-2 --lr_scheduler_type constant --plugin gemini_cuda --device_memory 520KiB \
                 --host_memory 300KiB --nvme . --nvme_capacity 4MiB";
    let (out, err) = folder.accepts(&format!("run --nproc_per_node 2 {TRAIN} {flags}"));
    left_behind(&folder, &out, 2);
    assert!(err.contains("nvme read"), "something is on the disk: {err}");
}

/// Two groups of two ranks are four ranks in all that is said and lost; numbers that do not divide are refused.
#[test]
fn groups_of_ranks_that_hold_the_same() {
    let folder = Folder::new();
    let loss = |flags: &str| {
        folder.accepts(&format!("run --nproc_per_node 4 {TRAIN} --plugin zero3 --save_steps 3 {flags}"));
        let results = std::fs::read(folder.path("out/train_results.json")).unwrap();
        let results: serde_json::Value = serde_json::from_slice(&results).unwrap();
        results["train_loss"].as_f64().unwrap()
    };
    let (split, pairs) = (loss(""), loss("--shard_size 2"));
    assert!((split - pairs).abs() < 1e-6 * split, "{split} {pairs}");
    let files = |name: &str| folder.path(&format!("out/checkpoint-3/{name}")).exists();
    assert!(files("rank-1.bin") && !files("rank-2.bin"), "one replica writes");
    folder.refuses(&format!("plan {} --ranks 4 --shard_size 3", &TRAIN[6..]), 2, &["--shard_size 3", "4 ranks"]);
    folder.refuses(&format!("{TRAIN} --plugin ddp --shard_size 2"), 2, &["--shard_size is 2", "ddp splits nothing"]);
    let (out, _) = folder.accepts(&format!("plan {} --ranks 4 --shard_size 2", &TRAIN[6..]));
    assert!(out.contains("4 ranks (2 groups of 2)"), "{out}");
}

#[test]
fn two_ranks_that_do_not_fit() {
    let folder = Folder::new();
    let output = folder.output(&format!("run --nproc_per_node 2 {TRAIN} --plugin zero3 --device_memory 300KiB"));
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{err}");
    assert!(err.contains("castor: error: ") && err.contains("short by") && !err.contains("panicked"), "{err}");
}

/// Rows that the ranks cannot share evenly: every row counts once an epoch, the loss is the mean over all tokens, and
/// a rank without a row waits for nobody.
#[test]
fn fewer_rows_than_ranks_take() {
    let folder = Folder::new();
    folder.write("rows.txt", "x".repeat(3 * 16 - 2));
    let words = TRAIN.replace("text.txt", "rows.txt --shuffle false").replace("--max_steps 3", "--num_epochs 2");
    let losses = [1, 2, 4].map(|ranks| {
        folder.accepts(&format!("run --nproc_per_node {ranks} {words} --gradient_accumulation_steps 2 --plugin zero3"));
        let results = std::fs::read(folder.path("out/train_results.json")).unwrap();
        let results: serde_json::Value = serde_json::from_slice(&results).unwrap();
        assert_eq!(results["train_samples"], 6, "{ranks} ranks");
        results["train_loss"].as_f64().unwrap()
    });
    for loss in losses {
        assert!((loss - losses[0]).abs() < 1e-5 * losses[0], "{losses:?}");
    }
}

/// A signal ends the run after the step in which it comes, with a report of what was done.
#[test]
fn sigterm_in_the_middle() {
    let folder = Folder::new();
    let words = TRAIN.replace("--max_steps 3", "--max_steps 1000000 --logging_steps 1000000");
    let mut child = folder.castor(&words).spawn().unwrap();
    let begun = Instant::now();
    let log = folder.path("out/train_log.jsonl");
    while !std::fs::read_to_string(&log).is_ok_and(|log| log.contains("\"loss\"")) {
        assert!(begun.elapsed() < LIMIT && child.try_wait().unwrap().is_none(), "no step came");
        std::thread::sleep(Duration::from_millis(20));
    }
    rustix::process::kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let output = child.wait_with_output().unwrap();
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(143), "{err}");
    assert!(err.lines().last().unwrap().starts_with("castor: error: interrupted by signal 15"), "{err}");
    assert!(folder.path("out/report.html").exists());
}
