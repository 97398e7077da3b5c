//! Flags of other trainers that are no settings here: accepted with a word, accepted if off or on, or refused by name.

/// A group of flags that change nothing here.
pub(crate) struct Ignored {
    pub names: &'static [&'static str],
    pub short: Option<char>,
    pub why: &'static str,
}

const fn ignored(names: &'static [&'static str], why: &'static str) -> Ignored {
    Ignored { names, short: None, why }
}

/// Flags that are accepted with a word.
#[rustfmt::skip]
pub(crate) const IGNORED: &[Ignored] = &[
    Ignored { names: &["dataset", "datasets"], short: Some('d'), why: "data is what --data names" },
    Ignored { names: &["tensorboard_dir", "logging_dir", "report_to", "run_name"], short: Some('t'), why: "the log is train_log.jsonl in --output_dir" },
    ignored(&["cache_dir", "overwrite_cache", "preprocessing_num_workers", "keep_linebreaks", "streaming", "use_fast_tokenizer", "model_revision", "trust_remote_code", "low_cpu_mem_usage", "torch_dtype", "dtype", "dataset_num_proc"], "local files are read as they are"),
    ignored(&["profile_memory", "profile", "skip_memory_metrics", "include_num_input_tokens_seen", "include_tokens_per_second"], "memory and tokens are always measured"),
    ignored(&["do_train", "overwrite_output_dir"], "training is what this command does, and --resume decides about old output"),
    ignored(&["do_eval", "per_device_eval_batch_size", "per_gpu_eval_batch_size", "eval_accumulation_steps", "eval_delay", "eval_on_start", "prediction_loss_only", "eval_do_concat_batches", "batch_eval_metrics", "include_inputs_for_metrics", "include_for_metrics", "use_legacy_prediction_loop", "past_index", "label_names", "metric_for_best_model", "greater_is_better", "fp16_full_eval", "bf16_full_eval"], "--eval_fraction and --eval_steps decide about evaluation, which computes as training does"),
    ignored(&["ddp_find_unused_parameters", "ddp_static_graph", "ddp_backend", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "local_rank", "accelerator_config", "split_batches", "average_tokens_across_devices", "tpu_num_cores", "tpu_metrics_debug", "mp_parameters", "parallelism_config"], "ranks are the launcher's, and every token counts the same on all of them"),
    ignored(&["logging_nan_inf_filter", "logging_first_step", "log_level", "log_level_replica", "log_on_each_node", "disable_tqdm", "debug"], "rank 0 shows every loss, NaN and infinity too"),
    ignored(&["dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor", "remove_unused_columns", "length_column_name"], "rows are read from a map of the file, and none is dropped"),
    ignored(&["packing_strategy", "padding_free", "pad_to_multiple_of", "pad_token", "truncation_mode", "dataset_kwargs", "dataset_train_split", "dataset_test_split"], "documents follow each other and are cut where a row ends, without padding"),
    ignored(&["fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap"], "blocks are always wrapped"),
    ignored(&["gradient_checkpointing_kwargs", "fp16_opt_level", "fp16_backend", "half_precision_backend", "tf32", "torch_compile", "torch_compile_backend", "torch_compile_mode", "torchdynamo", "torch_empty_cache_steps", "use_ipex", "jit_mode_eval", "use_liger_kernel", "use_mps_device", "xpu_backend"], "there is one implementation, and it is compiled"),
    ignored(&["save_safetensors", "save_on_each_node", "restore_callback_states_from_checkpoint", "enable_jit_checkpoint", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "hub_always_push", "hub_revision"], "checkpoints are written by all ranks into --output_dir"),
    ignored(&["ray_scope"], "there is no search over settings"),
];

/// Flags that are accepted as long as they ask for nothing, with what to do otherwise.
#[rustfmt::skip]
pub(crate) const ONLY_OFF: &[(&str, &str)] = &[
    ("activation_offloading", "--recompute and the memory budgets decide what is kept"),
    ("adafactor", "use --optimizer adamw or sophia"),
    ("auto_find_batch_size", "`castor plan` says what fits"),
    ("do_predict", "there is training only"),
    ("group_by_length", "rows are packed, all of --max_length"),
    ("ignore_data_skip", "a resumed run goes on where it was in the data"),
    ("label_smoothing_factor", "leave it out"),
    ("load_in_4bit", "weights are trained in full; --optimizer_states 8bit saves memory"),
    ("load_in_8bit", "weights are trained in full; --optimizer_states 8bit saves memory"),
    ("load_best_model_at_end", "keep checkpoints with --save_steps and choose one"),
    ("neftune_noise_alpha", "leave it out"),
    ("push_to_hub", "upload the model folder when the run has ended"),
    ("save_only_model", "checkpoints always hold what a run needs to go on"),
    ("use_peft", "every weight is trained"),
    ("sharded_ddp", "use --plugin zero2 or zero3"),
];

/// Flags that are accepted as long as they ask for what always is, with what that is and what to do otherwise.
#[rustfmt::skip]
pub(crate) const ONLY_ON: &[(&str, &str, &str)] = &[
    ("assistant_only_loss", "of a chat only the assistant's words count", "put the whole text into --text_field to train on all of it"),
    ("completion_only_loss", "of a prompt and its completion only the completion counts", "put the whole text into --text_field to train on all of it"),
    ("eval_packing", "rows are always packed", "leave it out"),
    ("packing", "rows are always packed", "leave it out"),
];

/// Flags that must not be ignored and are not offered, with what to use.
#[rustfmt::skip]
pub(crate) const REFUSED: &[(&str, &str)] = &[
    ("tp", "tensor parallelism is not offered; use a zero3 or gemini plugin"),
    ("pp", "pipeline parallelism is not offered; use a zero3 or gemini plugin"),
    ("sp", "sequence parallelism is not offered; use a zero3 or gemini plugin"),
    ("dataset_name", "data sets are not downloaded; give files with --data"),
    ("dataset_config_name", "data sets are not downloaded; give files with --data"),
    ("validation_split_percentage", "it is a share here; --eval_fraction 0.05 holds out 5 %"),
    ("max_train_samples", "--max_steps ends a run early"),
    ("config_overrides", "write the shape into a config.json and give it with --model_config"),
    ("optim_args", "constants of the optimizer are flags of their own: --betas, --eps, --sophia_rho"),
    ("optim_target_modules", "every weight is trained"),
    ("lr_scheduler_kwargs", "the schedule's constants are flags of their own: --min_lr_ratio, --warmup_steps"),
];
