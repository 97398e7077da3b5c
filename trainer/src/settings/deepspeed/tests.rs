//! DeepSpeed files as people have them, decided by name.

use super::super::raw::{Origin, Raw};
use super::super::{LrConvention, OptimizerKind, Precision, ScheduleKind, Settings, Warmup};
use crate::plugin::Placement;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/inputs/deepspeed");

/// The settings of the file at `path` under flags, for so many ranks; or the refusal.
fn read(path: &str, flags: &[(&'static str, &str)], ranks: u32) -> Result<Settings, String> {
    let mut raw = Raw::default();
    raw.set("deepspeed", vec![path.into()], Origin::Flag).unwrap();
    for (key, value) in flags {
        raw.set(key, vec![(*value).into()], Origin::Flag).unwrap();
    }
    let mut notices = Vec::new();
    let settings = raw.read_files(&|| Ok(ranks), &mut notices).and_then(|()| Settings::resolve(&raw, notices));
    settings.map_err(|error| {
        assert_eq!(error.exit_code(), 2);
        let error = error.to_string();
        assert!(error.contains(path) && !error.contains('\n'), "{error}");
        error
    })
}

fn text(json: &str, flags: &[(&'static str, &str)], ranks: u32) -> Result<Settings, String> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), json).unwrap();
    read(&file.path().display().to_string(), flags, ranks)
}

/// Settings of a file that holds a batch size and `rest`.
fn with(rest: &str) -> Settings {
    text(&format!("{{\"train_micro_batch_size_per_gpu\": 2, {rest}}}"), &[], 1)
        .unwrap_or_else(|error| panic!("{error}"))
}

#[track_caller]
fn refused(json: &str, flags: &[(&'static str, &str)], says: &[&str]) {
    let error = text(json, flags, 1).map(|_| ()).expect_err(json);
    for part in says {
        assert!(error.contains(part), "{json}: no {part:?} in {error}");
    }
}

#[track_caller]
fn refused_beside_batch(rest: &str, says: &[&str]) {
    refused(&format!("{{\"train_micro_batch_size_per_gpu\": 2, {rest}}}"), &[], says);
}

/// Each file: batch, accumulation, clip and plugin; or parts of the refusal.
#[test]
fn every_case_is_decided() {
    type Decision = Result<(u64, u64, Option<f32>, &'static str), &'static [&'static str]>;
    let clip = Some(1.0);
    let decided: &[(&str, Decision)] = &[
        ("aio_inside_zero", Err(&["unknown key zero_optimization.aio", "belongs to the top"])),
        ("article_ds_zero2_no_offload", Ok((2, 1, clip, "zero2"))),
        ("article_ds_zero3_no_offload", Ok((2, 1, clip, "zero3"))),
        ("article_ds_zero3_offload", Ok((2, 1, clip, "zero3_offload"))),
        ("bf16_with_loss_scale", Err(&["unknown key bf16.loss_scale", "belongs to fp16"])),
        ("bom", Ok((2, 1, clip, "ddp"))),
        ("bucket_1.5", Err(&["zero_optimization.reduce_bucket_size is 1.5", "whole number"])),
        ("bucket_5e8_str", Err(&["reduce_bucket_size is \"5e8\"", "whole number", "without quotes"])),
        ("clip_0", Ok((2, 1, None, "ddp"))),
        ("clip_str", Ok((2, 1, clip, "ddp"))),
        ("cpu_offload_true_old_", Ok((2, 1, clip, "zero2_offload"))),
        ("elastic_mb_3_tb_8", Err(&["train_batch_size is 8", "3 rows", "2 accumulation steps", "1 rank;"])),
        ("empty_file", Err(&["the file is empty"])),
        ("fp16_bf16", Err(&["fp16.enabled and bf16.enabled are both true"])),
        ("fp16_min_1e_10", Ok((2, 1, clip, "ddp"))),
        ("ga_only", Err(&["neither train_micro_batch_size_per_gpu nor train_batch_size", "--batch_size"])),
        ("gather_fp16_dep", Ok((2, 1, clip, "zero3"))),
        ("mb_string", Err(&["train_micro_batch_size_per_gpu is \"2\"", "without quotes"])),
        ("minimal_mb", Ok((2, 1, clip, "ddp"))),
        ("offload_device_null", Err(&["offload_param.device is null", "\"none\", \"cpu\" or \"nvme\""])),
        (
            "offload_opt_buffer_size",
            Err(&["unknown key zero_optimization.offload_optimizer.buffer_size", "offload_param"]),
        ),
        ("tb_mb", Err(&["train_batch_size is 1", "2 rows"])),
        ("tb_mb_ga_ok", Ok((2, 4, clip, "ddp"))),
        ("top_unknown_key", Err(&["unknown key foo"])),
        ("zero3_default_overlap", Ok((2, 1, clip, "zero3"))),
        ("zero_stage_4", Err(&["zero_optimization.stage is 4", "from 0 to 3"])),
        ("zero_unknown_key", Err(&["unknown key zero_optimization.foo"])),
    ];
    assert_eq!(std::fs::read_dir(FOLDER).unwrap().count(), decided.len(), "a case is not decided");
    for (name, decision) in decided {
        match (read(&format!("{FOLDER}/{name}.json"), &[], 1), decision) {
            (Ok(settings), Ok(expected)) => {
                let plugin = settings.memory.plugin.name;
                let found =
                    (settings.batch_size, settings.gradient_accumulation_steps, settings.optimizer.grad_clip, plugin);
                assert_eq!(found, *expected, "{name}");
            }
            (Err(error), Err(parts)) => {
                parts.iter().for_each(|part| assert!(error.contains(part), "{name}: no {part:?} in {error}"));
            }
            (found, _) => panic!("{name}: {found:?}"),
        }
    }
}

#[test]
fn the_published_files_in_full() {
    let zero2 = read(&format!("{FOLDER}/article_ds_zero2_no_offload.json"), &[("mixed_precision", "fp16")], 8).unwrap();
    let scale = zero2.precision.loss_scale;
    assert_eq!(zero2.precision.compute, Precision::Fp16);
    assert_eq!((scale.fixed, scale.initial, scale.growth_interval, scale.hysteresis), (None, 65536.0, 100, 2));
    assert_eq!(scale.min, 1e-10);
    let [notice] = &zero2.notices[..] else { panic!("one line: {:?}", zero2.notices) };
    for key in ["steps_per_print", "wall_clock_breakdown", "zero_optimization.overlap_comm"] {
        assert!(notice.contains(key), "{notice}");
    }
    let offload = format!("{FOLDER}/article_ds_zero3_offload.json");
    let given = read(&offload, &[("lr", "2e-5"), ("warmup_ratio", "0.05"), ("weight_decay", "0.01")], 8).unwrap();
    assert_eq!((given.optimizer.kind, given.schedule.lr), (OptimizerKind::AdamW, 2e-5));
    assert_eq!((given.optimizer.weight_decay, given.optimizer.betas), (0.01, (0.9, 0.999)));
    assert_eq!((given.schedule.kind, given.schedule.warmup), (ScheduleKind::Constant, Warmup::Ratio(0.05)));
    assert_eq!(given.schedule.convention, LrConvention::DeepSpeedLog);
    // What DeepSpeed does silently: the scheduler of the file in place of the one that was asked for.
    let error = read(&offload, &[("lr_scheduler_type", "cosine")], 8).unwrap_err();
    assert!(error.contains("scheduler.type") && error.contains("constant") && error.contains("cosine"), "{error}");
    let error = read(&offload, &[("batch_size", "12")], 8).unwrap_err();
    assert!(error.contains("train_micro_batch_size_per_gpu") && error.contains("--batch_size is 12"), "{error}");
}

/// An optimizer without a rate has DeepSpeed's, whether it has an empty section of constants or none.
#[test]
fn an_optimizer_without_a_rate() {
    for optimizer in [r#"{"type": "AdamW"}"#, r#"{"type": "AdamW", "params": {}}"#] {
        assert_eq!(with(&format!("\"optimizer\": {optimizer}")).schedule.lr, 0.001, "{optimizer}");
    }
}

/// DeepSpeed clips where the number is above 0 and says nothing of one below.
#[test]
fn a_norm_below_zero_clips_nothing_and_is_spoken_of() {
    let settings = with("\"gradient_clipping\": -1");
    assert_eq!(settings.optimizer.grad_clip, None);
    let [notice] = &settings.notices[..] else { panic!("one line: {:?}", settings.notices) };
    assert!(notice.contains("gradient_clipping -1 clips nothing"), "{notice}");
    assert!(with("\"gradient_clipping\": 0").notices.is_empty());
}

#[test]
fn batch_sizes_are_resolved_together() {
    let batch = |json: &str, flags: &[(&'static str, &str)], ranks| {
        text(json, flags, ranks).map(|s| (s.batch_size, s.gradient_accumulation_steps))
    };
    assert_eq!(batch("{\"train_batch_size\": 8}", &[], 1), Ok((8, 1)));
    assert_eq!(batch("{\"train_batch_size\": 64, \"train_micro_batch_size_per_gpu\": 4}", &[], 8), Ok((4, 2)));
    assert_eq!(batch("{\"train_batch_size\": 64, \"gradient_accumulation_steps\": 2}", &[], 8), Ok((4, 2)));
    assert_eq!(batch("{\"train_batch_size\": 64}", &[("batch_size", "2")], 8), Ok((2, 4)));
    let auto = "{\"train_batch_size\": \"auto\", \"train_micro_batch_size_per_gpu\": \"auto\",
        \"gradient_accumulation_steps\": \"auto\"}";
    let flags: &[(&'static str, &str)] = &[("batch_size", "12"), ("gradient_accumulation_steps", "32")];
    assert_eq!(batch(auto, flags, 8), Ok((12, 32)));
    assert_eq!(batch("{}", &[("batch_size", "3")], 1), Ok((3, 1)));
    let seven = "{\"train_batch_size\": 7, \"train_micro_batch_size_per_gpu\": 2, \"gradient_accumulation_steps\": 4}";
    refused(seven, &[], &["train_batch_size is 7", "2 rows a micro-batch", "4 accumulation steps"]);
    assert!(batch("{\"train_batch_size\": 8}", &[], 3).unwrap_err().contains("3 ranks"));
    refused("{}", &[], &["neither"]);
    refused("{\"gradient_accumulation_steps\": \"8\"}", &[], &["gradient_accumulation_steps is \"8\""]);
    refused("{\"train_batch_size\": 8}", &[("batch_size", "3")], &["3 rows"]);
    // "8" on the command line and 8 or 8.0 in the file are the same number.
    assert_eq!(batch("{\"train_micro_batch_size_per_gpu\": 8.0}", &[("batch_size", "8")], 1), Ok((8, 1)));
}

#[test]
fn the_text_is_what_deep_speed_reads() {
    let lenient = "\u{FEFF}{ // a comment\n \"train_micro_batch_size_per_gpu\": 2, /* another */ \"fp16\": {\"enabled\": true,},\n}";
    assert_eq!(text(lenient, &[], 1).unwrap().precision.compute, Precision::Fp16);
    refused("{\"a\": 1,\n\"a\": 2}", &[], &["line 2", "the key a is given twice"]);
    refused("{\"train_batch_size\": 8", &[], &["line 1"]);
    refused("{\"train_batch_size\": 1e999}", &[], &["1e999 is no number"]);
    refused("[]", &[], &["a JSON object was expected"]);
    let missing = read("nowhere/ds.json", &[], 1).unwrap_err();
    assert!(missing.contains("cannot be read"), "{missing}");
}

#[test]
fn stage_and_offload_choose_the_plugin() {
    let plugin = |zero: &str| {
        let settings = with(&format!("\"zero_optimization\": {zero}"));
        (settings.memory.plugin.name, settings)
    };
    assert_eq!(plugin("true").0, "zero1");
    assert_eq!(plugin("{}").0, "ddp");
    assert_eq!(plugin("{\"stage\": \"2\"}").0, "zero2");
    assert_eq!(plugin("{\"stage\": 1, \"offload_optimizer\": {\"device\": \"cpu\"}}").0, "zero1_offload");
    assert_eq!(plugin("{\"stage\": 3, \"offload_param\": {\"device\": \"none\"}}").0, "zero3");
    let (name, optimizer) = plugin("{\"stage\": 3, \"offload_optimizer\": {\"device\": \"cpu\", \"ratio\": 0.3}}");
    assert_eq!((name, optimizer.memory.plugin.placement), ("gemini", Placement::Static));
    assert_eq!((optimizer.memory.offload_param_frac, optimizer.memory.offload_optim_frac), (0.0, 0.3));
    let (name, param) = plugin("{\"stage\": 3, \"offload_param\": {\"device\": \"cpu\"}}");
    assert_eq!((name, param.memory.offload_param_frac, param.memory.offload_optim_frac), ("gemini", 1.0, 0.0));
    let (name, ineffective) = plugin("{\"stage\": 2, \"offload_param\": {\"device\": \"cpu\"}}");
    assert!(name == "zero2" && ineffective.notices.concat().contains("no effect at stage 2"), "{ineffective:?}");
    let nvme = "{\"stage\": 3, \"offload_param\": {\"device\": \"nvme\", \"nvme_path\": \"/disk\"},
        \"offload_optimizer\": {\"device\": \"nvme\", \"nvme_path\": \"/disk\"}}";
    let (name, both) = plugin(nvme);
    assert_eq!((name, both.memory.nvme), ("zero3_offload", Some("/disk".into())));
    let refused = |zero: &str, says: &[&str]| refused_beside_batch(&format!("\"zero_optimization\": {zero}"), says);
    refused(&nvme.replacen("/disk", "/other", 1), &["/disk", "/other", "one folder"]);
    refused("{\"stage\": 3, \"offload_param\": {\"device\": \"nvme\"}}", &["nvme_path", "--nvme"]);
    refused("{\"stage\": 3, \"offload_param\": {\"device\": \"disk\"}}", &["device is \"disk\"", "\"none\", \"cpu\""]);
    refused("{\"stage\": 0, \"offload_optimizer\": {\"device\": \"cpu\"}}", &["a stage of at least 1"]);
    refused(
        "{\"stage\": 2, \"offload_optimizer\": {\"device\": \"cpu\", \"ratio\": 0.5}}",
        &["ratio is 0.5", "stage 3"],
    );
    refused("{\"stage\": \"auto\"}", &["stage cannot be \"auto\""]);
    refused("{\"stage\": 2, \"reduce_bucket_size\": 0}", &["reduce_bucket_size is 0"]);
    refused("{\"stage\": 3, \"stage3_prefetch_buket_size\": 1}", &["did you mean stage3_prefetch_bucket_size?"]);
    refused("{\"stage\": 3, \"zero_quantized_weights\": true}", &["not offered"]);
    assert_eq!(plugin("{\"stage\": 2, \"reduce_bucket_size\": 5e8, \"allgather_bucket_size\": \"auto\"}").0, "zero2");
}

#[test]
fn precision_and_scale() {
    assert_eq!(with("\"bfloat16\": {\"enabled\": true}").precision.compute, Precision::Bf16);
    assert_eq!(with("\"fp16\": {\"enabled\": true, \"loss_scale\": 128}").precision.loss_scale.fixed, Some(128.0));
    assert!(
        with("\"data_types\": {\"grad_accum_dtype\": \"bf16\"}, \"bf16\": {\"enabled\": true}")
            .precision
            .narrow_gradients
    );
    refused_beside_batch("\"fp16\": true", &["fp16 is true", "object"]);
    refused_beside_batch("\"fp16\": {\"enabled\": true, \"loss_scale_window\": 0}", &["loss_scale_window is 0"]);
    refused_beside_batch("\"fp16\": {\"enabled\": true, \"hysteresys\": 2}", &["did you mean hysteresis?"]);
    refused_beside_batch("\"fp16\": {\"enabled\": true, \"consecutive_hysteresis\": true}", &["not offered"]);
    refused_beside_batch("\"amp\": {\"enabled\": true}", &["amp", "use fp16 or bf16"]);
    // "auto" and absence leave it to the command line; a plain no does not.
    let json = |fp16: &str| format!("{{\"train_batch_size\": 2, \"fp16\": {{\"enabled\": {fp16}}}}}");
    let flag: &[(&'static str, &str)] = &[("mixed_precision", "fp16")];
    assert_eq!(text(&json("\"auto\""), flag, 1).unwrap().precision.compute, Precision::Fp16);
    assert_eq!(text(&json("false"), &[("mixed_precision", "bf16")], 1).unwrap().precision.compute, Precision::Bf16);
    refused(&json("false"), flag, &["fp16.enabled", "--mixed_precision is fp16"]);
    refused(&json("true"), &[("mixed_precision", "bf16")], &["fp16.enabled", "--mixed_precision is bf16"]);
}

#[test]
fn optimizer_and_scheduler() {
    let adam = with(
        "\"optimizer\": {\"type\": \"Adam\", \"params\": {\"lr\": 1e-4, \"betas\": [0.8, 0.95], \"eps\": 1e-7,
         \"weight_decay\": 3e-7}}",
    );
    assert_eq!((adam.schedule.lr, adam.optimizer.betas, adam.optimizer.eps), (1e-4, (0.8, 0.95), 1e-7));
    assert_eq!(adam.schedule.convention, LrConvention::HuggingFace);
    assert_eq!(with("\"optimizer\": {\"type\": \"AdamW\", \"params\": {}}").schedule.lr, 1e-3, "DeepSpeed's default");
    refused_beside_batch("\"optimizer\": {\"type\": \"Lamb\"}", &["optimizer.type is \"Lamb\"", "\"AdamW\""]);
    refused_beside_batch("\"optimizer\": {\"type\": \"Adam\", \"params\": {\"adam_w_mode\": false}}", &["adam_w_mode"]);
    refused_beside_batch("\"optimizer\": {\"type\": \"Adam\", \"params\": {\"betas\": [0.9]}}", &["betas is [0.9]"]);
    let json = "{\"train_batch_size\": 2, \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 1e-4, \"betas\": [0.9, 0.95]}}}";
    assert!(text(json, &[("lr", "0.0001"), ("betas", "(0.9, 0.95)"), ("adam_beta2", "0.95")], 1).is_ok());
    refused(json, &[("lr", "2e-5")], &["optimizer.params.lr", "0.0001", "--lr is 2e-5", "make them agree"]);
    refused(json, &[("adam_beta2", "0.99")], &["optimizer.params.betas", "--adam_beta2 is 0.99"]);
    refused(json, &[("optimizer", "sophia")], &["optimizer.type", "--optimizer is sophia"]);
    assert!(text(json, &[("optimizer", "adamw_torch")], 1).is_ok());

    let decay = with(
        "\"scheduler\": {\"type\": \"WarmupDecayLR\", \"params\": {\"warmup_num_steps\": 10, \"warmup_type\": \"linear\",
         \"warmup_min_lr\": 0, \"warmup_max_lr\": 3e-4, \"total_num_steps\": \"auto\"}}",
    );
    assert_eq!((decay.schedule.kind, decay.schedule.lr), (ScheduleKind::Linear, 3e-4));
    assert_eq!((decay.schedule.warmup, decay.schedule.convention), (Warmup::Steps(10), LrConvention::DeepSpeedLinear));
    let cosine = with("\"scheduler\": {\"type\": \"WarmupCosineLR\", \"params\": {\"warmup_num_steps\": 5}}").schedule;
    assert_eq!((cosine.kind, cosine.min_lr_ratio, cosine.warmup), (ScheduleKind::Cosine, 1e-4, Warmup::Steps(5)));
    let bare = with("\"scheduler\": {\"type\": \"WarmupLR\"}").schedule;
    assert_eq!((bare.warmup, bare.convention), (Warmup::Steps(1000), LrConvention::DeepSpeedLog));
    let total = "{\"train_batch_size\": 2, \"scheduler\": {\"type\": \"WarmupDecayLR\", \"params\": {\"total_num_steps\": 50}}}";
    refused(total, &[], &["total_num_steps is 50", "--max_steps 50"]);
    refused(total, &[("max_steps", "60")], &["total_num_steps", "--max_steps is 60"]);
    assert!(text(total, &[("max_steps", "50")], 1).is_ok());
    refused_beside_batch("\"scheduler\": {\"type\": \"OneCycle\"}", &["scheduler.type is \"OneCycle\"", "WarmupLR"]);
    refused_beside_batch(
        "\"scheduler\": {\"type\": \"WarmupLR\", \"params\": {\"warmup_min_lr\": 1e-6}}",
        &["warmup_min_lr", "begins at 0"],
    );
    let steps =
        "{\"train_batch_size\": 2, \"scheduler\": {\"type\": \"WarmupLR\", \"params\": {\"warmup_num_steps\": 9}}}";
    refused(steps, &[("warmup_ratio", "0.05")], &["warmup_num_steps is 9", "--warmup_ratio is 0.05"]);
    refused(steps, &[("warmup_steps", "8")], &["warmup_num_steps", "--warmup_steps is 8"]);
}

#[test]
fn what_is_printed_repeats_the_run_and_says_where_each_value_is_from() {
    let path = format!("{FOLDER}/article_ds_zero3_offload.json");
    let mut raw = Raw::default();
    raw.set("deepspeed", vec![path.clone()], Origin::Flag).unwrap();
    raw.read_files(&|| Ok(1), &mut Vec::new()).unwrap();
    let printed = raw.print();
    let line = format!("plugin = \"zero3_offload\" # {path}: zero_optimization.stage");
    assert!(printed.contains(&line) && printed.contains("fp16.enabled"), "{printed}");
    let file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
    std::fs::write(file.path(), printed).unwrap();
    let mut again = Raw::default();
    again.set("config", vec![file.path().display().to_string()], Origin::Flag).unwrap();
    again.read_files(&|| Ok(1), &mut Vec::new()).unwrap();
    let settings = |raw: &Raw| format!("{:?}", Settings::resolve(raw, Vec::new()).unwrap());
    assert_eq!(settings(&raw), settings(&again));
    let mut both = raw.clone();
    both.set("fsdp", vec!["full_shard".into()], Origin::Flag).unwrap();
    assert!(both.read_files(&|| Ok(1), &mut Vec::new()).is_err_and(|e| e.to_string().contains("both choose")));
}
