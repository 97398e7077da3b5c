//! Commands as people have published them, and as people mistype them.

use super::{Command, Wanted, parse, tree};
use crate::settings::{BackendKind, OptimizerKind, Precision, Recompute, ScheduleKind, Settings, Warmup};

/// Parses a line split at spaces; `"a b"` keeps its space.
fn line(text: &str) -> Result<Command, String> {
    let mut words = vec!["castor".to_string()];
    for (index, part) in text.split('"').enumerate() {
        match index % 2 {
            0 => words.extend(part.split_whitespace().map(str::to_owned)),
            _ => words.push(part.to_owned()),
        }
    }
    parse(words.into_iter().map(Into::into)).map_err(|e| {
        assert_eq!(e.exit_code(), 2);
        assert!(!e.to_string().contains('\n'), "{e}");
        e.to_string()
    })
}

fn train(flags: &str) -> Box<Settings> {
    match line(&format!("train {flags}")) {
        Ok(Command::Train(settings)) => settings,
        other => panic!("{flags}: {other:?}"),
    }
}

fn refused(text: &str, says: &str) {
    let error = line(text).map(|_| ()).expect_err(text);
    assert!(error.contains(says), "{text}: {error}");
}

#[test]
fn the_tree_is_sound() {
    tree().debug_assert();
}

#[test]
fn published_hugging_face_commands() {
    let base = "--model_config_path c.json --tokenizer_name_or_path t --per_device_train_batch_size 8 --do_train \
        --seed 1234 --fp16 --num_train_epochs 1 --lr_scheduler_type cosine --learning_rate 2e-5 --warmup_ratio 0.05 \
        --weight_decay 0.01 --logging_strategy steps --logging_steps 1 --save_strategy steps --save_total_limit 1 \
        --save_steps 100 --gradient_accumulation_steps 8 --model_max_length 2048 --output_dir ./hf_logs \
        --overwrite_output_dir --gradient_checkpointing --ddp_find_unused_parameters False";
    let settings = train(base);
    assert_eq!((settings.batch_size, settings.gradient_accumulation_steps, settings.seed), (8, 8, 1234));
    assert_eq!(settings.precision.compute, Precision::Fp16);
    assert_eq!((settings.schedule.kind, settings.schedule.lr), (ScheduleKind::Cosine, 2e-5));
    assert_eq!((settings.memory.recompute, settings.output.save_total_limit), (Recompute::Full, Some(1)));
    assert_eq!((settings.max_length, settings.tokenizer.as_str()), (2048, "t"));
    assert_eq!(settings.notices.len(), 3, "{:?}", settings.notices);

    assert_eq!(train(&format!("{base} --fsdp \"full_shard auto_wrap\"")).memory.plugin.name, "zero3");
    assert_eq!(train(&format!("{base} --fsdp shard_grad_op offload")).memory.plugin.name, "zero2_offload");
    assert!(train(&format!("{base} --flash_attn")).memory.flash_attention);
    let sophia = train("--bf16 --enable_sophia --warmup_steps 2 --warmup_ratio 0.05 --model_config_path c.json");
    assert_eq!(sophia.optimizer.kind, OptimizerKind::Sophia);
    assert_eq!(sophia.schedule.warmup, Warmup::Steps(2));
    // Dashes, values of booleans, negations.
    let dashed = train("--per-device-train-batch-size=3 --fp16 False --no-flash-attention --shuffle no --max-steps -1");
    assert_eq!((dashed.batch_size, dashed.precision.compute), (3, Precision::Fp32));
    assert!(!dashed.memory.flash_attention && dashed.max_steps.is_none());
    let negated = train("--no_logging_nan_inf_filter --no-dataloader-pin-memory --no_load_best_model_at_end");
    assert_eq!(negated.notices.len(), 3, "{:?}", negated.notices);
    refused("train --deepspeed ds.json", "--deepspeed ds.json: cannot be read");
    refused("train --tp 2", "tensor parallelism is not offered");
}

#[test]
fn what_fine_tuning_scripts_say() {
    for (word, fused) in [
        ("sdpa", true),
        ("flash_attention_2", true),
        ("fa2", true),
        ("auto", true),
        ("eager", false),
        ("disabled", false),
    ] {
        let settings = train(&format!("--attn_implementation {word}"));
        assert_eq!((settings.memory.flash_attention, settings.notices.len()), (fused, 0), "{word}");
    }
    refused("train --attn-implementation paged", "sdpa or flash_attention_2, was expected");
    let always = ["packing", "eval_packing", "completion_only_loss", "assistant_only_loss"];
    for name in always {
        for flag in [format!("--{name}"), format!("--{name} True"), format!("--{}=yes", name.replace('_', "-"))] {
            let notices = train(&flag).notices;
            assert!(matches!(&notices[..], [line] if line.contains(&format!("--{name}"))), "{flag}: {notices:?}");
        }
        refused(&format!("train --no_{name}"), &format!("--{name} false is not offered"));
        refused(&format!("train --{name} False"), "is not offered");
    }
    let more = "--dataset_num_proc 4 --dtype bfloat16 --packing_strategy wrapped --pad_token <pad> --use_peft False";
    assert_eq!(train(more).notices.len(), 5);
    refused("train --use_peft", "every weight is trained");
    refused("train --load_in_4bit", "weights are trained in full");
}

/// Who names how many tokens to draw from wants a draw.
#[test]
fn a_sample_draws_when_it_is_asked_to() {
    for (flags, temperature, notices) in [
        ("", 0.0, 0),
        ("--top_k 5", 1.0, 1),
        ("--top_k 0", 0.0, 0),
        ("--top_k 5 --temperature 0", 0.0, 0),
        ("--top_k 5 --temperature 0.7", 0.7, 0),
    ] {
        let Ok(Command::Sample { settings, request }) = line(&format!("sample m --prompt a --seed 3 {flags}")) else {
            panic!("{flags}")
        };
        assert_eq!((request.choice.temperature, settings.notices.len()), (temperature, notices), "{flags}");
        assert_eq!(request.choice.seed, 3);
    }
    let Ok(Command::Text(help)) = line("sample --help") else { panic!("no help") };
    assert!(help.contains("Seed of what is drawn [42]") && !help.contains("row order"), "{help}");
    assert!(help.contains("1 with --top_k") && !help.contains("[default: 0]\n      --top_k"), "{help}");
}

#[test]
fn published_colossalai_commands() {
    let long = train(
        "--config c.json --plugin gemini_cuda --batch_size 28 --lr 2e-5 --weigth_decay 0.01 --warmup_steps 2 \
         --grad_checkpoint --max_length 2048 --mixed_precision fp16 --flash_attention",
    );
    let short = train("-c c.json -p gemini_cuda -b 28 --lr 2e-5 -w 0.01 -s 2 -g -l 2048 -x fp16 -a");
    assert_eq!(format!("{long:?}"), format!("{short:?}"));
    assert_eq!(long.model_config.as_deref(), Some(std::path::Path::new("c.json")));
    assert_eq!((long.optimizer.weight_decay, long.memory.plugin.name), (0.01, "gemini_cuda"));
    let rest = train("-c c.json -d data -e 2 -i 1000 -o checkpoint -f checkpoint/epoch0-step5 -t tb_logs -p zero2_cpu");
    assert_eq!((rest.num_epochs, rest.memory.plugin.name, rest.notices.len()), (2.0, "zero2_offload", 2));
}

#[test]
fn other_commands() {
    assert!(matches!(line("run --nproc_per_node 2 train -x fp16"), Ok(Command::Run(rest)) if rest.len() == 5));
    assert!(matches!(
        line("plan -c c.json --ranks 64 --json --rates r.json"),
        Ok(Command::Plan { wanted: Wanted { json: true, ranks: Some(64), largest: false, rates: Some(_) }, .. })
    ));
    let parity = line("parity --model m --batch b.safetensors --expect e.safetensors --tolerance 1e-5");
    assert!(matches!(parity, Ok(Command::Parity { tolerance, .. }) if tolerance == 1e-5));
    let pack = line("data pack a.txt b.jsonl --tokenizer bytes --out d --no-add-bos");
    assert!(matches!(pack, Ok(Command::DataPack { spec, .. }) if spec.inputs.len() == 2 && !spec.bos && spec.eos));
    assert!(matches!(line("export a b"), Ok(Command::Export { .. })));
    assert!(matches!(line("report r"), Ok(Command::Report(_))));
    let doctor = line("doctor --bench --backend cpu --nvme-path scratch");
    let Ok(Command::Doctor { bench: true, settings }) = doctor else { panic!("{doctor:?}") };
    assert_eq!((settings.backend.kind, settings.memory.nvme), (BackendKind::Cpu, Some("scratch".into())));
    assert!(matches!(line("--version"), Ok(Command::Text(text)) if text.contains("castor")));
    assert!(matches!(line("--help"), Ok(Command::Text(text)) if text.lines().count() < 24));
    assert!(
        matches!(line("train --print_config -b 7"), Ok(Command::Text(text)) if text.contains("batch_size = 7 # command line"))
    );
}

#[test]
fn mistakes_are_one_sentence_with_what_was_meant() {
    refused("train --logging_stepz 3", "did you mean --logging_steps?");
    refused("train --wieght-decay 3", "did you mean --weight_decay?");
    refused("train --zzzz", "unknown flag --zzzz");
    refused("train -q", "unknown flag -q");
    refused("train stray", "stray is not expected");
    refused("trian", "did you mean train?");
    refused("", "a command is missing");
    refused("data", "a command is missing");
    refused("train --fp16 --bf16", "fp16 and bf16 at once");
    refused("train --fp16 maybe", "--fp16 is maybe");
    refused("train --lr", "--lr");
    refused("train --device_memory -5GiB", "--device_memory is -5GiB; auto, a size such as 80GiB");
    refused("train --lr -1e-4", "--lr is -1e-4; a number above 0");
    refused("train --config nowhere.toml", "nowhere.toml: cannot be read");
    refused("train --config a.json --model_config b.json", "both name");
    refused("doctor --backend tpu", "--backend");
    refused("plan --ranks 0", "--ranks is 0");
    refused("parity --model m", "--batch");
    refused("parity --model m --batch b --tolerance -1", "--tolerance is -1");
    refused("data pack a --tokenizer bytes --out b --on_bad_record go", "stop, skip");
}
