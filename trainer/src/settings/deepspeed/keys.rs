//! The keys of a DeepSpeed file: which are read, which are not needed here, and which ask for what is not offered.
//!
//! A section is checked as a whole when it is opened, so that what follows only reads values.

use serde_json::{Map, Value};

use super::Outcome;
use crate::settings::nearest;

/// What becomes of a key.
#[derive(Clone, Copy)]
pub(super) enum Use {
    /// It says what is trained or how.
    Read,
    /// Not needed here: true or false.
    Switch,
    /// Not needed here: a whole number of at least this.
    Whole(u64),
    /// Not needed here, whatever it is.
    Any,
    /// Not offered; it may only be off. With what to do.
    Off(&'static str),
}

use Use::{Any, Off, Read, Switch, Whole};

/// A table of keys.
pub(super) type Keys = &'static [(&'static str, Use)];

#[rustfmt::skip]
pub(super) const TOP: Keys = &[
    ("train_batch_size", Read), ("train_micro_batch_size_per_gpu", Read), ("gradient_accumulation_steps", Read),
    ("gradient_clipping", Read), ("fp16", Read), ("bf16", Read), ("bfloat16", Read), ("optimizer", Read),
    ("scheduler", Read), ("zero_optimization", Read), ("data_types", Read),
    ("steps_per_print", Whole(1)), ("wall_clock_breakdown", Switch), ("memory_breakdown", Switch),
    ("dump_state", Switch), ("prescale_gradients", Switch), ("gradient_predivide_factor", Any),
    ("sparse_gradients", Switch), ("fp32_allreduce", Switch), ("communication_data_type", Any),
    ("seq_parallel_communication_data_type", Any), ("disable_allgather", Switch),
    ("zero_allow_untested_optimizer", Switch), ("zero_force_ds_cpu_optimizer", Switch),
    ("dataloader_drop_last", Switch), ("use_data_before_expert_parallel_", Switch), ("graph_harvesting", Switch),
    ("activation_checkpointing", Any), ("aio", Any), ("checkpoint", Any), ("comms_logger", Any), ("compile", Any),
    ("csv_monitor", Any), ("comet", Any), ("flops_profiler", Any), ("nebula", Any), ("tensorboard", Any),
    ("timers", Any), ("torch_autocast", Off("use fp16 or bf16")), ("wandb", Any),
    ("amp", Off("use fp16 or bf16")),
    ("autotuning", Off("`castor plan` finds what fits")),
    ("compression_training", Off("weights are trained as they are")),
    ("curriculum_learning", Off("rows are as long as --max_length")),
    ("data_efficiency", Off("rows are as long as --max_length")),
    ("eigenvalue", Off("weights are trained as they are")),
    ("elasticity", Off("write the batch sizes out")),
    ("hybrid_engine", Off("there is training only")),
    ("pipeline", Off("use stage 3 with offload for models that one GPU does not hold")),
    ("progressive_layer_drop", Off("every block is trained")),
    ("quantize_training", Off("weights are trained as they are")),
    ("sequence_parallel_size", Off("use stage 3 with offload for sequences that one GPU does not hold")),
    ("sparse_attention", Off("attention is over all tokens before")),
    ("tensor_parallel", Off("use stage 3 with offload for models that one GPU does not hold")),
];

#[rustfmt::skip]
pub(super) const FP16: Keys = &[
    ("enabled", Read), ("loss_scale", Read), ("initial_scale_power", Read), ("loss_scale_window", Read),
    ("hysteresis", Read), ("min_loss_scale", Read), ("auto_cast", Switch),
    ("consecutive_hysteresis", Off("the hysteresis is renewed when the scale grows")),
    ("fp16_master_weights_and_grads", Off("masters are fp32")),
];

#[rustfmt::skip]
pub(super) const BF16: Keys = &[
    ("enabled", Read), ("check_grad_overflow", Switch), ("immediate_grad_update", Switch),
    ("bf16_master_weights_and_grads", Off("masters are fp32; --gradient_dtype bf16 makes gradients smaller")),
    ("bf16_optimizer_states", Off("--optimizer_states bf16 makes the moments smaller")),
];

pub(super) const DATA_TYPES: Keys = &[("grad_accum_dtype", Read)];

pub(super) const TYPED: Keys = &[("type", Read), ("params", Read), ("legacy_fusion", Switch)];

#[rustfmt::skip]
pub(super) const ADAM: Keys = &[
    ("lr", Read), ("betas", Read), ("eps", Read), ("weight_decay", Read), ("adam_w_mode", Read),
    ("bias_correction", Read), ("torch_adam", Switch), ("fp32_optimizer_states", Switch),
    ("amsgrad", Off("AdamW keeps the latest second moment")),
];

#[rustfmt::skip]
pub(super) const WARMUP: Keys = &[
    ("warmup_min_lr", Read), ("warmup_max_lr", Read), ("warmup_num_steps", Read), ("warmup_type", Read),
    ("total_num_steps", Read), ("last_batch_iteration", Any),
];

#[rustfmt::skip]
pub(super) const COSINE: Keys = &[
    ("warmup_min_ratio", Read), ("warmup_num_steps", Read), ("warmup_type", Read), ("total_num_steps", Read),
    ("cos_min_ratio", Read), ("last_batch_iteration", Any),
];

#[rustfmt::skip]
pub(super) const ZERO: Keys = &[
    ("stage", Read), ("offload_param", Read), ("offload_optimizer", Read), ("cpu_offload", Read),
    ("cpu_offload_param", Read), ("cpu_offload_params", Read),
    ("allgather_bucket_size", Whole(0)), ("allgather_partitions", Switch), ("contiguous_gradients", Switch),
    ("cpu_offload_use_pin_memory", Switch), ("elastic_checkpoint", Switch), ("enable_sanity_checks", Switch),
    ("gather_16bit_weights_on_model_save", Switch), ("stage3_gather_16bit_weights_on_model_save", Switch),
    ("stage3_gather_fp16_weights_on_model_save", Switch), ("ignore_unused_parameters", Switch),
    ("leaf_module", Any), ("legacy_stage1", Switch), ("load_from_fp32_weights", Switch),
    ("log_trace_cache_warnings", Switch), ("max_live_parameters", Whole(0)), ("stage3_max_live_parameters", Whole(0)),
    ("max_reuse_distance", Whole(0)), ("stage3_max_reuse_distance", Whole(0)), ("memory_efficient_linear", Switch),
    ("mics_hierarchical_params_gather", Switch), ("mics_shard_size", Any),
    ("model_persistence_threshold", Whole(0)), ("stage3_model_persistence_threshold", Whole(0)),
    ("module_granularity_threshold", Whole(0)), ("stage3_module_granularity_threshold", Whole(0)),
    ("overlap_comm", Switch), ("override_module_apply", Switch), ("param_persistence_threshold", Whole(0)),
    ("stage3_param_persistence_threshold", Whole(0)), ("partition_stream_chunk_size", Whole(0)),
    ("stage3_partition_stream_chunk_size", Whole(0)), ("pipeline_loading_checkpoint", Switch),
    ("prefetch_bucket_size", Whole(0)), ("stage3_prefetch_bucket_size", Whole(0)), ("reduce_bucket_size", Whole(1)),
    ("reduce_scatter", Switch), ("round_robin_gradients", Switch), ("save_muon_momentum_buffer_in_memory", Switch),
    ("stage3_allgather_sequential", Switch), ("sub_group_size", Whole(0)), ("use_all_reduce_for_fetch_params", Switch),
    ("stage3_use_all_reduce_for_fetch_params", Switch), ("use_multi_rank_bucket_allreduce", Switch),
    ("zero_hpz_partition_size", Whole(0)),
    ("zenflow", Off("every update is made in its step")),
    ("zero_quantized_gradients", Off("gradients travel whole")),
    ("zero_quantized_nontrainable_weights", Off("weights travel whole")),
    ("zero_quantized_weights", Off("weights travel whole")),
    ("zeropp_loco_param", Off("gradients travel whole")),
];

#[rustfmt::skip]
pub(super) const OFFLOAD_PARAM: Keys = &[
    ("device", Read), ("nvme_path", Read), ("buffer_count", Whole(0)), ("buffer_size", Whole(0)),
    ("max_in_cpu", Whole(0)), ("pin_memory", Switch),
];

#[rustfmt::skip]
pub(super) const OFFLOAD_OPTIMIZER: Keys = &[
    ("device", Read), ("nvme_path", Read), ("ratio", Read), ("buffer_count", Whole(0)),
    ("convert_grad_on_cpu", Switch), ("cpuadam_cores_perc", Any), ("fast_init", Switch), ("pin_memory", Switch),
    ("pipeline", Switch), ("pipeline_read", Switch), ("pipeline_write", Switch), ("super_offload", Switch),
];

/// Every table with the section it is of, to say where a misplaced key belongs.
const SECTIONS: &[(&str, Keys)] = &[
    ("the top of the file", TOP),
    ("fp16", FP16),
    ("bf16", BF16),
    ("zero_optimization", ZERO),
    ("zero_optimization.offload_param", OFFLOAD_PARAM),
    ("zero_optimization.offload_optimizer", OFFLOAD_OPTIMIZER),
    ("optimizer.params", ADAM),
];

/// Keys that may be "auto": the command line, which Hugging Face fills in there, or Castor itself decides.
#[rustfmt::skip]
const AUTO: &[&str] = &[
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "fp16.enabled", "bf16.enabled", "bfloat16.enabled",
    "optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps", "optimizer.params.weight_decay",
    "scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr", "scheduler.params.warmup_num_steps",
    "scheduler.params.total_num_steps",
    "zero_optimization.reduce_bucket_size", "zero_optimization.allgather_bucket_size",
    "zero_optimization.sub_group_size",
    "zero_optimization.prefetch_bucket_size", "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.param_persistence_threshold", "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
];

/// An object of the file whose keys are all known.
pub(super) struct Section<'a> {
    map: &'a Map<String, Value>,
    /// Empty for the file itself, else the section's name with a dot.
    inside: String,
}

impl<'a> Section<'a> {
    /// Opens the file itself. Keys that are not needed are added to `unneeded`, here and in all sections.
    pub fn top(map: &'a Map<String, Value>, unneeded: &mut Vec<String>) -> Outcome<Self> {
        Section { map, inside: String::new() }.checked(TOP, unneeded)
    }

    /// Opens a section, if it is there.
    pub fn section(&self, key: &str, keys: Keys, unneeded: &mut Vec<String>) -> Outcome<Option<Section<'a>>> {
        match self.value(key)? {
            None => Ok(None),
            Some(Value::Object(map)) => {
                Section { map, inside: format!("{}.", self.name(key)) }.checked(keys, unneeded).map(Some)
            }
            Some(other) => {
                Err(format!("{} is {other}; an object such as {{\"{}\": …}} was expected", self.name(key), keys[0].0))
            }
        }
    }

    fn checked(self, keys: Keys, unneeded: &mut Vec<String>) -> Outcome<Self> {
        for key in self.map.keys() {
            let Some((_, is)) = keys.iter().find(|(name, _)| name == key) else {
                return Err(self.unknown(key, keys));
            };
            match is {
                Read => continue,
                Any => {}
                Switch => {
                    self.switch(key)?;
                }
                Whole(least) => {
                    self.whole(key, *least)?;
                }
                Off(instead) if !is_off(&self.map[key]) => {
                    return Err(format!("{} is {}, which is not offered: {instead}", self.name(key), self.map[key]));
                }
                Off(_) => {}
            }
            unneeded.push(self.name(key));
        }
        Ok(self)
    }

    fn unknown(&self, key: &str, keys: Keys) -> String {
        let name = self.name(key);
        if let Some((place, _)) = SECTIONS.iter().find(|(_, table)| table.iter().any(|(known, _)| *known == key)) {
            return format!("unknown key {name}: {key} belongs to {place}; move it or leave it out");
        }
        match nearest(key, keys.iter().map(|(known, _)| *known)) {
            Some(near) => format!("unknown key {name}; did you mean {near}?"),
            None => format!("unknown key {name}; leave it out"),
        }
    }

    /// The key's full name.
    pub fn name(&self, key: &str) -> String {
        format!("{}{key}", self.inside)
    }

    /// The one place where "auto" is resolved: like an absent key, it leaves the decision to the command line.
    pub fn value(&self, key: &str) -> Outcome<Option<&'a Value>> {
        match self.map.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) if text == "auto" => match AUTO.contains(&self.name(key).as_str()) {
                true => Ok(None),
                false => Err(format!("{} cannot be \"auto\"; write a value or leave it out", self.name(key))),
            },
            Some(value) => Ok(Some(value)),
        }
    }

    /// Whether the key is there, if only as "auto" or null.
    pub fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    pub fn is_null(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(Value::is_null)
    }

    pub fn wrong(&self, key: &str, value: &Value, expected: &str) -> String {
        let quotes = match value {
            Value::String(text) if text.parse::<f64>().is_ok() => ", without quotes",
            _ => "",
        };
        format!("{} is {value}; {expected} was expected{quotes}", self.name(key))
    }

    pub fn switch(&self, key: &str) -> Outcome<Option<bool>> {
        let Some(value) = self.value(key)? else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.wrong(key, value, "true or false"))
    }

    /// A whole number, which may be written as 5e8.
    pub fn whole(&self, key: &str, least: u64) -> Outcome<Option<u64>> {
        let Some(value) = self.value(key)? else { return Ok(None) };
        // Beyond 2⁵³ f64 does not tell whole numbers apart.
        let float = || value.as_f64().filter(|x| x.fract() == 0.0 && (0.0..9e15).contains(x)).map(|x| x as u64);
        match value.as_u64().or_else(float).filter(|whole| *whole >= least) {
            Some(whole) => Ok(Some(whole)),
            None => Err(self.wrong(key, value, &format!("a whole number of at least {least}"))),
        }
    }

    pub fn number(&self, key: &str, expected: &str, allowed: impl Fn(f64) -> bool) -> Outcome<Option<f64>> {
        let Some(value) = self.value(key)? else { return Ok(None) };
        match value.as_f64().filter(|x| allowed(*x)) {
            Some(number) => Ok(Some(number)),
            None => Err(self.wrong(key, value, expected)),
        }
    }

    pub fn word(&self, key: &str) -> Outcome<Option<&'a str>> {
        let Some(value) = self.value(key)? else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong(key, value, "a word in quotes"))
    }
}

/// Whether a value asks for nothing: a feature's size of up to one, an empty or a disabled section.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(on) => !on,
        Value::Number(number) => number.as_f64().is_some_and(|x| x <= 1.0),
        Value::String(text) => text.is_empty() || text == "auto",
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => match map.get("enabled") {
            Some(enabled) => *enabled == Value::Bool(false),
            None => map.is_empty(),
        },
    }
}
