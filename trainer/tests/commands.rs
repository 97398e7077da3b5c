//! The command lines of published training scripts: launcher, flags and files as they stand there. Only the script's
//! name becomes `train`, and the model is a small one. Each is resolved by ranks under the launcher and planned for
//! eight ranks; nothing is trained and no GPU is needed.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What all runs with Hugging Face's trainer have in common.
const HUGGING_FACE: &str = "--model_config_path model.json --tokenizer_name_or_path models/Llama-2-13b-hf \
    --do_train --seed 1234 --num_train_epochs 1 --lr_scheduler_type cosine --learning_rate 2e-5 --warmup_ratio 0.05 \
    --weight_decay 0.01 --logging_strategy steps --logging_steps 1 --save_strategy steps --save_total_limit 1 \
    --save_steps 100 --model_max_length 2048 --output_dir ./hf_logs --overwrite_output_dir --gradient_checkpointing";
const DDP: &str = "--fp16 --ddp_find_unused_parameters False";
const FSDP: &str = "--fsdp \"full_shard auto_wrap\" --fsdp_config ./02_fsdp/fsdp.json";
const DEEPSPEED: &str = "--deepspeed ds_zero2_no_offload.json";
const COLOSSALAI: &str = "--config model.json --plugin gemini_cuda --batch_size 28 --lr 2e-5 --weigth_decay 0.01 \
    --warmup_steps 2 --grad_checkpoint --max_length 2048 --mixed_precision fp16 --flash_attention";
const LAUNCHER: &str = "run --nnodes 1 --nproc_per_node 8 train";

/// A folder with what the commands name.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Folder {
        let folder = Folder(tempfile::tempdir().unwrap());
        std::fs::create_dir(folder.path("02_fsdp")).unwrap();
        folder.write(
            "model.json",
            r#"{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 64,
                "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 4,
                "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": true}"#,
        );
        folder.write("02_fsdp/fsdp.json", r#"{"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}"#);
        // As published for Hugging Face's trainer, which fills in the batch.
        let inputs = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/inputs/deepspeed"));
        let zero2 = std::fs::read_to_string(inputs.join("article_ds_zero2_no_offload.json")).unwrap();
        folder.write("fixed.json", &zero2);
        let auto =
            zero2.replace("\"train_micro_batch_size_per_gpu\": 2", "\"train_micro_batch_size_per_gpu\": \"auto\"");
        assert_ne!(auto, zero2);
        folder.write("ds_zero2_no_offload.json", &auto);
        folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, content: &str) {
        std::fs::write(self.path(name), content).unwrap();
    }

    /// Exit code, standard output and error of `castor` with these words; `"a b"` is one.
    fn castor(&self, words: &str) -> (Option<i32>, String, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_castor"));
        for (index, part) in words.split('"').enumerate() {
            match index % 2 {
                0 => command.args(part.split_whitespace()),
                _ => command.arg(part),
            };
        }
        command.current_dir(self.0.path()).env("XDG_CACHE_HOME", self.path("cache"));
        command.stdin(Stdio::null()).env_remove("RANK").env_remove("WORLD_SIZE");
        let output = command.output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    }

    /// The command is resolved by eight ranks, of which one prints `settings`, and planned for as many.
    #[track_caller]
    fn runs(&self, flags: &str, settings: &[&str]) {
        let (code, out, err) = self.castor(&format!("{LAUNCHER} {flags} --print_config"));
        assert_eq!(code, Some(0), "{flags}: {err}");
        assert_eq!(out.lines().filter(|line| line.contains("batch_size =")).count(), 1, "{out}");
        for setting in settings {
            assert!(out.lines().any(|line| line == *setting), "{flags}: no {setting:?} in\n{out}");
        }
        let (code, out, err) = self.castor(&format!("plan --ranks 8 --backend cpu {flags}"));
        assert_eq!(code, Some(0), "{flags}: {err}");
        assert!(out.contains("on 8 ranks"), "{out}");
    }
}

#[test]
fn data_parallel() {
    Folder::new().runs(
        &format!("{HUGGING_FACE} {DDP} --per_device_train_batch_size 8 --gradient_accumulation_steps 8"),
        &[
            "batch_size = 8 # command line",
            "gradient_accumulation_steps = 8 # command line",
            "mixed_precision = \"fp16\" # command line",
            "lr = 2e-5 # command line",
            "warmup_ratio = 0.05 # command line",
            "recompute = \"full\" # command line",
            "save_steps = 100 # command line",
            "betas = \"0.9,0.999\" # default",
            "eps = 1e-8 # default",
        ],
    );
}

#[test]
fn fully_sharded() {
    let folder = Folder::new();
    let flags = format!("{HUGGING_FACE} {DDP} {FSDP} --gradient_accumulation_steps 8");
    let settings = ["plugin = \"zero3\" # --fsdp", "fsdp = [\"full_shard auto_wrap\"] # command line"];
    folder.runs(&format!("{flags} --per_device_train_batch_size 2"), &settings);
    folder.runs(&format!("{flags} --per_device_train_batch_size 16 --flash_attn"), &settings);
}

#[test]
fn deepspeed() {
    let folder = Folder::new();
    let flags = format!("{HUGGING_FACE} {DDP} --per_device_train_batch_size 12 --gradient_accumulation_steps 32");
    let settings = [
        "batch_size = 12 # command line",
        "plugin = \"zero2\" # ds_zero2_no_offload.json: zero_optimization.stage",
        "min_scale = 0.0000000001 # ds_zero2_no_offload.json: fp16.min_loss_scale",
        "growth_interval = 100 # ds_zero2_no_offload.json: fp16.loss_scale_window",
        "initial_scale = 65536 # ds_zero2_no_offload.json: fp16.initial_scale_power",
        "grad_clip = 1 # ds_zero2_no_offload.json: gradient_clipping",
    ];
    folder.runs(&format!("{flags} {DEEPSPEED}"), &settings);
    folder.runs(&format!("{flags} {DEEPSPEED} --flash_attn"), &settings);
    let (code, _, err) = folder.castor(&format!("plan --ranks 8 --backend cpu {flags} --deepspeed fixed.json"));
    assert_eq!(code, Some(2));
    for part in ["fixed.json: train_micro_batch_size_per_gpu asks for", "batch_size 2", "--batch_size is 12"] {
        assert!(err.contains(part), "no {part:?} in {err}");
    }
}

#[test]
fn flash_attention() {
    Folder::new().runs(
        &format!("{HUGGING_FACE} {DDP} --per_device_train_batch_size 16 --gradient_accumulation_steps 8 --flash_attn"),
        &["flash_attention = true # command line", "batch_size = 16 # command line"],
    );
}

#[test]
fn sophia() {
    Folder::new().runs(
        &format!(
            "{HUGGING_FACE} --bf16 --enable_sophia --warmup_steps 2 --per_device_train_batch_size 2 \
             --gradient_accumulation_steps 8"
        ),
        &[
            "optimizer = \"sophia\" # command line",
            "mixed_precision = \"bf16\" # command line",
            "warmup_steps = 2 # command line",
            "warmup_ratio = 0.05 # command line",
            "betas = \"0.965,0.99\" # default",
        ],
    );
}

#[test]
fn colossalai() {
    let folder = Folder::new();
    let settings = [
        "plugin = \"gemini_cuda\" # command line",
        "batch_size = 28 # command line",
        "weight_decay = 0.01 # command line",
        "warmup_steps = 2 # command line",
        "mixed_precision = \"fp16\" # command line",
        "recompute = \"full\" # command line",
    ];
    folder.runs(COLOSSALAI, &settings);
    // The names of its own documentation.
    let documented = COLOSSALAI.replace("weigth", "weight").replace("--grad_checkpoint", "--gradient_checkpoint");
    folder.runs(&format!("{documented} --gradient_clipping 1.0"), &settings);
    for plugin in ["gemini", "gemini_cpu", "gemini_auto", "zero2", "zero2_cpu"] {
        folder.runs(&COLOSSALAI.replace("gemini_cuda", plugin), &[]);
    }
}

/// Other ways to write the same: hyphens, `=`, values of booleans, fractions of the run.
#[test]
fn the_same_in_other_spellings() {
    let folder = Folder::new();
    let flags = "--model-config-path=model.json --per-device-train-batch-size 8 --fp16 yes --gradient-checkpointing=1 \
        --logging-steps 0.1 --save-steps 0.25 --eval-steps 0.5 --eval_fraction 0.1 --logging_nan_inf_filter False --report_to none \
        --dataloader_num_workers 4 --local_rank=3 --no-flash-attn --no_shuffle --evaluation_strategy steps \
        --label_smoothing_factor 0 --load_best_model_at_end False --data_seed 7 --save_strategy epoch";
    let launch = LAUNCHER.replace("nproc_per_node", "nproc-per-node");
    let (code, out, err) = folder.castor(&format!("{launch} {flags} --print-config"));
    assert_eq!(code, Some(0), "{err}");
    for setting in [
        "mixed_precision = \"fp16\" # command line",
        "recompute = \"full\" # command line",
        "logging_steps = 0.1 # command line",
        "save_steps = \"epoch\" # --save_strategy",
        "eval_steps = 0.5 # command line",
        "flash_attention = false # command line",
        "shuffle = false # command line",
        "data_seed = 7 # command line",
        "max_length = 2048 # default",
    ] {
        assert!(out.lines().any(|line| line == setting), "no {setting:?} in\n{out}");
    }
    let (code, _, err) = folder.castor(&format!("plan --ranks 8 --backend cpu {flags}"));
    assert_eq!(code, Some(0), "{err}");
    for said in ["--logging_nan_inf_filter is accepted", "--local_rank is accepted", "--save_strategy epoch wins over"]
    {
        assert_eq!(err.lines().filter(|line| line.contains(said)).count(), 1, "{said}: {err}");
    }
    for (flag, says) in [
        ("--label_smoothing_factor 0.1", "--label_smoothing_factor 0.1 is not offered"),
        ("--dataset_name wikitext", "give files with --data"),
        ("--lr_scheduler_type polynomial", "linear, cosine, constant"),
        ("--logging_stepz 3", "did you mean --logging_steps?"),
    ] {
        let (code, _, err) = folder.castor(&format!("plan --model_config model.json {flag}"));
        assert!(code == Some(2) && err.contains(says), "{flag}: {err}");
    }
}
