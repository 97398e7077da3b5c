//! Precedence, refusals, and that what is printed can be read.

use super::elsewhere::{IGNORED, ONLY_OFF, ONLY_ON, REFUSED};
use super::raw::{Origin, Raw};
use super::table::{FLAGS, SHORTHANDS};
use super::{BackendKind, LrConvention, OptimizerKind, Precision, Recompute, Resume, ScheduleKind, Settings, Warmup};
use crate::error::Result;

/// Settings of a TOML text under some flags.
fn read(toml: &str, flags: &[(&'static str, &str)]) -> Result<(Settings, Raw)> {
    let file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
    std::fs::write(file.path(), toml).unwrap();
    let mut raw = Raw::default();
    raw.set("config", vec![file.path().display().to_string()], Origin::Flag)?;
    for (key, value) in flags {
        raw.set(key, vec![(*value).into()], Origin::Flag)?;
    }
    let mut notices = Vec::new();
    raw.read_files(&|| Ok(1), &mut notices)?;
    Ok((Settings::resolve(&raw, notices)?, raw))
}

fn refused(toml: &str, says: &[&str]) {
    let error = read(toml, &[]).map(|_| ()).expect_err(toml);
    assert_eq!(error.exit_code(), 2);
    let error = error.to_string();
    assert!(!error.contains('\n'), "{error}");
    says.iter().for_each(|part| assert!(error.contains(part), "{toml}: {error}"));
}

#[test]
fn flag_over_file_over_default() {
    let toml = "lr = 1e-3\nbatch-size = 4\nfp16 = true\nbetas = [0.9, 0.95]\ndata = [\"a\", \"b\"]";
    let (settings, raw) = read(toml, &[("lr", "2e-3")]).unwrap();
    assert_eq!((settings.schedule.lr, settings.batch_size, settings.max_length), (2e-3, 4, 2048));
    assert_eq!(settings.precision.compute, Precision::Fp16);
    assert_eq!(settings.optimizer.betas, (0.9, 0.95));
    assert_eq!(settings.data.inputs, ["a", "b"]);
    assert_eq!(raw.origin("lr"), Origin::Flag);
    assert!(matches!(raw.origin("batch_size"), Origin::File(_)));
    assert_eq!(raw.origin("seed"), Origin::Default);
    let text = raw.print();
    assert!(text.contains("lr = 2e-3 # command line") && text.contains("seed = 42 # default"), "{text}");
}

#[test]
fn what_is_printed_repeats_the_run() {
    for toml in ["", "fsdp = \"full_shard offload\"", "plugin = \"gemini\"\noffload_optim_frac = 0.5\nnvme = \"/x\""] {
        let (settings, raw) = read(toml, &[("betas", "0.8,0.9"), ("resume", "some/folder")]).unwrap();
        let (again, _) = read(&raw.print(), &[]).unwrap();
        assert_eq!(format!("{settings:?}"), format!("{again:?}"));
    }
}

#[test]
fn refusals_name_key_value_and_place() {
    refused("lernrate = 1", &["unknown key lernrate", ".toml"]);
    refused("logging_stepz = 1", &["did you mean logging_steps?"]);
    refused("lr = 1\nlr = 2", &["line 2", "duplicate"]);
    refused("\n\nlr = ", &["line 3"]);
    refused("lr = \"fast\"", &["--lr is fast (in ", "a number above 0"]);
    refused("[optimizer]\nlr = 1", &["optimizer is a table"]);
    refused("config = \"x.json\"", &["model_config"]);
    refused("fp16 = true\nbf16 = true", &["mixed_precision", "bf16 and fp16 at once"]);
    refused("batch_size = 0", &["--batch_size is 0"]);
    refused("batch_size = 99999999999", &["--batch_size is 99999999999", "65536"]);
    refused("batch_size = 65536\ngradient_accumulation_steps = 65536", &["8796093022208 tokens"]);
    refused("batch_size = 2.5", &["--batch_size is 2.5"]);
    refused("gradient_accumulation_steps = 0", &["--gradient_accumulation_steps is 0"]);
    refused("max_length = 1", &["from 2 to"]);
    refused("max_length = 99999999999", &["from 2 to 16777216"]);
    refused("warmup_ratio = 1.5", &["--warmup_ratio is 1.5", "from 0 to 1"]);
    refused("warmup_steps = 2.5", &["--warmup_steps is 2.5"]);
    refused("eval_fraction = 1", &["--eval_fraction is 1"]);
    refused("max_steps = 0", &["--max_steps is 0"]);
    refused("num_epochs = 0", &["--num_epochs is 0"]);
    refused("lr = nan", &["--lr is NaN"]);
    refused("lr = -1", &["--lr is -1"]);
    refused("betas = [0.9, 1.0]", &["--betas is 0.9,1"]);
    refused("plugin = \"gemini_gpu\"", &["did you mean gemini_cpu?"]);
    refused("shard_param_frac = 0.5", &["only --plugin gemini reads it"]);
    refused("nvme_capacity = \"1GiB\"", &["needs --nvme"]);
    refused("device_memory = \"0%\"", &["--device_memory is 0%"]);
    refused("fsdp = \"full_shard\"\nplugin = \"zero2\"", &["--fsdp", "zero3", "--plugin is zero2"]);
    refused("model = \"a\"\nmodel_config = \"b\"", &["brings its own config.json"]);
    refused("initial_scale = 0.5", &["--initial_scale is 0.5", "between"]);
    refused("gradient_dtype = \"bf16\"", &["--gradient_dtype is bf16", "--mixed_precision bf16", "that is no"]);
    refused("gradient_dtype = \"bf16\"\nfp16 = true", &["--gradient_dtype is bf16", "that is fp16"]);
    refused("clip = \"lagged\"\nfp16 = true", &["--clip lagged", "--mixed_precision bf16"]);
    refused("recompute = \"ful\"", &["did you mean full?"]);
    let missing = read("", &[]).unwrap().0.model_shape().unwrap_err();
    assert!(missing.to_string().contains("no model"), "{missing}");
}

/// A default that is written otherwise is a default.
#[test]
fn defaults_that_are_given_ask_for_nothing() {
    let (settings, _) = read("emulated_nvme_read_gbps = 0.0\nloss_scale = \"0.0\"\nmin_lr_ratio = 0.0", &[]).unwrap();
    assert!(settings.notices.is_empty(), "{:?}", settings.notices);
    let (settings, _) = read("loss_scale = 128.0\nsophia_rho = 0.1", &[]).unwrap();
    assert_eq!(settings.notices.len(), 2, "{:?}", settings.notices);
}

/// What makes results inexact is said, and said only where it does.
#[test]
fn clipping_by_another_norm_is_spoken_of() {
    let lagged = "clip = \"lagged\"";
    for (toml, why) in [
        (lagged, Some("the norm of the step before")),
        (&format!("{lagged}\ngrad_clip = 0"), Some("only its own group")),
        ("clip = \"exact\"", None),
    ] {
        let notices = read(toml, &[]).unwrap().0.notices;
        let said: Vec<_> = notices.iter().filter(|line| line.starts_with("inexact by choice: ")).collect();
        assert_eq!(said.len(), usize::from(why.is_some()), "{toml}: {said:?}");
        assert!(why.is_none_or(|why| said[0].contains(why)), "{toml}: {said:?}");
    }
}

#[test]
fn values_that_have_rules() {
    let settings = |toml: &str| read(toml, &[]).unwrap().0;
    // A number of steps wins over a ratio; ratios are rounded up.
    let both = settings("warmup_steps = 2\nwarmup_ratio = 0.05");
    assert_eq!(both.schedule.warmup, Warmup::Steps(2));
    assert_eq!(settings("warmup_ratio = 0.05").schedule.warmup.steps(6), 1);
    assert_eq!(settings("warmup_steps = 0.1").schedule.warmup.steps(30), 3);
    assert_eq!(settings("lr_convention = \"colossalai\"").schedule.min_lr_ratio, 0.1);
    assert_eq!(settings("").schedule.convention, LrConvention::HuggingFace);
    assert_eq!(settings("lr_scheduler_type = \"cosine\"").schedule.kind, ScheduleKind::Cosine);
    assert_eq!(settings("optimizer = \"sophia\"").optimizer.betas, (0.965, 0.99));
    assert_eq!(settings("adam_beta2 = 0.95").optimizer.betas, (0.9, 0.95));
    assert_eq!(settings("grad_clip = 0").optimizer.grad_clip, None);
    assert_eq!(settings("max_steps = -1").max_steps, None);
    assert_eq!(settings("resume = true").output.resume, Resume::Latest);
    assert_eq!(settings("gradient_checkpointing = true").memory.recompute, Recompute::Full);
    assert_eq!(settings("model = \"some/folder\"").tokenizer, "some/folder");
    assert_eq!(settings("model = \"some/folder\"\ntokenizer = \"bytes\"").tokenizer, "bytes");
    assert_eq!(settings("").tokenizer, "bytes");
    assert_eq!(settings("fsdp = \"shard_grad_op\"").memory.plugin.name, "zero2");
    assert_eq!(settings("prefetch = \"64MiB\"").memory.prefetch, Some(64 << 20));
    assert_eq!(settings("use_cpu = true").backend.kind, BackendKind::Cpu);
    assert_eq!(settings("enable_sophia = true").optimizer.kind, OptimizerKind::Sophia);
}

#[test]
fn the_tables_agree_with_themselves() {
    let mut names: Vec<&str> = FLAGS
        .iter()
        .flat_map(|f| f.aliases.iter().copied().chain([f.key]))
        .chain(SHORTHANDS.iter().flat_map(|s| s.names.iter().copied()))
        .chain(IGNORED.iter().flat_map(|i| i.names.iter().copied()))
        .chain(ONLY_OFF.iter().chain(REFUSED).map(|(name, _)| *name))
        .chain(ONLY_ON.iter().map(|(name, ..)| *name))
        .collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count, "a name is given twice");
    assert!(SHORTHANDS.iter().all(|s| FLAGS.iter().any(|f| f.key == s.key)));
}

#[test]
fn the_quickstart_is_read_and_its_model_fits_its_tokenizer() {
    let root = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let toml = std::fs::read_to_string(root.join("configs/quickstart.toml")).unwrap();
    let (settings, _) = read(&toml, &[]).unwrap();
    let shape = crate::config::ModelConfig::from_json_file(&root.join(settings.model_config.unwrap())).unwrap().0;
    crate::data::Tokenizer::bytes().check_fits(shape.vocab_size).unwrap();
}
