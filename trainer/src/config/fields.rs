//! The fields of a `config.json`, one by one: type, range, default, and what is refused or only noted.
//!
//! The rule: what this trainer would compute differently from what the file asks is refused by name; what
//! cannot change the result of pretraining is noted once. Errors are clauses; the caller adds the path.

use serde_json::{Map, Value};

use std::collections::BTreeMap;

use super::{ModelConfig, TOKEN_IDS};

/// Errors are clauses; the caller adds the path.
pub(super) type Outcome<T> = std::result::Result<T, String>;

/// No count in a model's shape comes near this; larger values are typing errors that would overflow sizes.
const COUNT_MAX: u64 = 1 << 31;

/// What a shape may have at most, several times what any published model has: beyond lie typing errors, which would
/// take the planner's time and memory before any budget refused them.
const SIZES: [(&str, u64); 6] = [
    ("num_hidden_layers", 1 << 10),
    ("hidden_size", 1 << 18),
    ("intermediate_size", 1 << 20),
    ("num_attention_heads", 1 << 12),
    ("head_dim", 1 << 14),
    ("vocab_size", 1 << 24),
];

/// Fields that are read, checked, or known to be without effect here.
const KNOWN: &[&str] = &[
    "_name_or_path",
    "architectures",
    "attention_bias",
    "attention_dropout",
    "attn_implementation",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "pad_token_id",
    "partial_rotary_factor",
    "pretraining_tp",
    "quantization_config",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "use_sliding_window",
    "vocab_size",
];

/// A JSON object with the checks that its fields need.
pub(super) struct Fields<'a> {
    pub(super) map: &'a Map<String, Value>,
    /// Prefix of field names in messages, e.g. "rope_scaling.".
    pub(super) inside: &'static str,
}

impl<'a> Fields<'a> {
    pub(super) fn of(value: &'a Value) -> Outcome<Fields<'a>> {
        match value {
            Value::Object(map) => Ok(Fields { map, inside: "" }),
            other => Err(format!("a JSON object was expected, not {}", kind(other))),
        }
    }

    /// The whole shape.
    pub(super) fn model(&self, notices: &mut Vec<String>) -> Outcome<ModelConfig> {
        let family = self.family()?;
        self.check_arithmetic()?;
        let hidden_size = self.count("hidden_size", None)?;
        let num_attention_heads = self.count("num_attention_heads", None)?;
        let num_key_value_heads = self.kv_heads(family, num_attention_heads)?;
        if num_key_value_heads > num_attention_heads || !num_attention_heads.is_multiple_of(num_key_value_heads) {
            return Err(format!(
                "num_key_value_heads is {num_key_value_heads}, which does not divide \
                 num_attention_heads {num_attention_heads}"
            ));
        }
        self.notes(notices)?;
        let max_position_embeddings = self.count("max_position_embeddings", Some(family.positions()))?;
        let num_hidden_layers = self.count("num_hidden_layers", None)?;
        let (attention_bias, mlp_bias) = self.biases(family, notices)?;
        let sliding_window = self.sliding_window(family, num_hidden_layers, notices)?;
        let (rope_theta, rope_scaling) = self.rope(max_position_embeddings, notices)?;
        let vocab_size = self.count("vocab_size", None)?;
        let config = ModelConfig {
            family,
            vocab_size,
            hidden_size,
            intermediate_size: self.count("intermediate_size", None)?,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            head_dim: self.head_dim(hidden_size, num_attention_heads)?,
            rms_norm_eps: self.positive("rms_norm_eps", Some(1e-6))? as f32,
            rope_theta,
            rope_scaling,
            max_position_embeddings,
            attention_bias,
            mlp_bias,
            sliding_window,
            tie_word_embeddings: self.boolean("tie_word_embeddings", false)?,
            initializer_range: self.positive("initializer_range", Some(0.02))?,
            token_ids: self.token_ids(vocab_size),
        };
        self.note_padding(config.vocab_size, notices)?;
        // Shapes up to here fit u64 only one by one; the sum must too (2^50 parameters are 1000 trillion).
        let rough = u128::from(config.num_hidden_layers)
            * u128::from(config.hidden_size)
            * (u128::from(config.intermediate_size) * 3 + u128::from(config.num_attention_heads * config.head_dim) * 4)
            + u128::from(config.vocab_size) * u128::from(config.hidden_size) * 2;
        if rough > 1 << 50 {
            return Err(format!(
                "the sizes give about {rough} parameters, which is beyond any machine; one of \
                 hidden_size, intermediate_size, num_hidden_layers, vocab_size is mistyped"
            ));
        }
        Ok(config)
    }

    fn check_arithmetic(&self) -> Outcome<()> {
        match self.map.get("hidden_act") {
            None => {}
            Some(Value::String(name)) if name == "silu" || name == "swish" => {}
            Some(other) => {
                return Err(format!("hidden_act is {other}; only \"silu\" is implemented"));
            }
        }
        if self.number("attention_dropout")?.unwrap_or(0.0) != 0.0 {
            return Err(format!(
                "attention_dropout is {}; dropout is not implemented, set it to 0",
                self.map["attention_dropout"]
            ));
        }
        if self.number("partial_rotary_factor")?.unwrap_or(1.0) != 1.0 {
            return Err(format!(
                "partial_rotary_factor is {}; only 1 is implemented",
                self.map["partial_rotary_factor"]
            ));
        }
        match self.map.get("quantization_config") {
            None | Some(Value::Null) => Ok(()),
            Some(_) => Err("quantization_config is set; quantised weights cannot be trained, use the \
                 original model"
                .into()),
        }
    }

    fn head_dim(&self, hidden_size: u64, heads: u64) -> Outcome<u64> {
        let head_dim = match self.map.get("head_dim") {
            None | Some(Value::Null) if hidden_size.is_multiple_of(heads) => hidden_size / heads,
            None | Some(Value::Null) => {
                return Err(format!(
                    "hidden_size {hidden_size} is not a multiple of num_attention_heads {heads}, \
                     and head_dim is not given"
                ));
            }
            Some(_) => self.count("head_dim", None)?,
        };
        if !head_dim.is_multiple_of(2) {
            return Err(format!("head_dim is {head_dim}, and rotary embedding turns pairs: it must be even"));
        }
        Ok(head_dim)
    }

    fn notes(&self, notices: &mut Vec<String>) -> Outcome<()> {
        for key in ["torch_dtype", "dtype"] {
            match self.map.get(key) {
                None | Some(Value::Null) => {}
                Some(Value::String(name)) => match name.strip_prefix("torch.").unwrap_or(name) {
                    "float32" | "float16" | "bfloat16" | "float64" => {}
                    "bf16" | "fp16" | "fp32" | "half" | "float" => {
                        notices.push(format!("{key} \"{name}\" is read as its long name"));
                    }
                    _ => {
                        return Err(format!("{key} is \"{name}\"; float32, float16 and bfloat16 are known"));
                    }
                },
                Some(other) => {
                    return Err(format!("{key} is {}, a name was expected", kind(other)));
                }
            }
        }
        if self.number("pretraining_tp")?.unwrap_or(1.0) != 1.0 {
            notices.push("pretraining_tp does not change the result and is ignored".into());
        }
        if self.map.get("tie_word_embeddings") == Some(&Value::Null) {
            notices.push("tie_word_embeddings is null and read as false".into());
        }
        let unknown: Vec<_> = self.map.keys().map(String::as_str).filter(|key| !KNOWN.contains(key)).collect();
        if !unknown.is_empty() {
            notices.push(format!("these fields are not known and ignored: {}", unknown.join(", ")));
        }
        Ok(())
    }

    /// Rows are packed, so padding never happens; an id outside the table is only worth a word.
    fn note_padding(&self, vocab_size: u64, notices: &mut Vec<String>) -> Outcome<()> {
        let pad = self.number("pad_token_id")?;
        if pad.is_some_and(|pad| pad >= vocab_size as f64) {
            notices.push(format!(
                "pad_token_id is {}, not below vocab_size {vocab_size}; packed rows need no \
                 padding, so it is ignored",
                self.map["pad_token_id"]
            ));
        }
        Ok(())
    }

    /// What other programs can use: ids in the table, or several of them.
    fn token_ids(&self, vocab_size: u64) -> BTreeMap<&'static str, Value> {
        let is_id = |value: &Value| value.as_u64().is_some_and(|id| id < vocab_size);
        let fits = |value: &Value| is_id(value) || value.as_array().is_some_and(|ids| ids.iter().all(is_id));
        let given = TOKEN_IDS.into_iter().filter_map(|field| Some((field, self.map.get(field)?)));
        given.filter(|(_, value)| value.is_null() || fits(value)).map(|(field, value)| (field, value.clone())).collect()
    }

    /// Whether a field is there and not null.
    pub(super) fn is_set(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(|value| !value.is_null())
    }

    /// A whole number ≥ 1; absent or null gives the default.
    pub(super) fn count(&self, key: &str, default: Option<u64>) -> Outcome<u64> {
        let value = match self.map.get(key) {
            None | Some(Value::Null) => {
                return default.ok_or_else(|| format!("{}{key} is missing", self.inside));
            }
            Some(value) => value,
        };
        let size = SIZES.iter().find(|(name, _)| *name == key).map(|(_, most)| *most);
        let most = size.unwrap_or(COUNT_MAX);
        match value.as_u64() {
            Some(count) if (1..=most).contains(&count) => Ok(count),
            Some(count) if count > most && size.is_some() => Err(format!(
                "{}{key} is {value}; a whole number from 1 to {most} was expected, several times what published models \
                 have: correct the file",
                self.inside
            )),
            _ => Err(format!(
                "{}{key} is {value}; a whole number from 1 to {most} was expected: correct the file",
                self.inside
            )),
        }
    }

    /// A number > 0; only absence gives the default, null is refused.
    pub(super) fn positive(&self, key: &str, default: Option<f64>) -> Outcome<f64> {
        let Some(value) = self.map.get(key) else {
            return default.ok_or_else(|| format!("{}{key} is missing", self.inside));
        };
        match value.as_f64() {
            Some(number) if number > 0.0 => Ok(number),
            _ => Err(format!("{}{key} is {value}; a number above 0 was expected", self.inside)),
        }
    }

    fn number(&self, key: &str) -> Outcome<Option<f64>> {
        match self.map.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => value
                .as_f64()
                .map(Some)
                .ok_or_else(|| format!("{}{key} is {value}; a number was expected", self.inside)),
        }
    }

    pub(super) fn boolean(&self, key: &str, default: bool) -> Outcome<bool> {
        match self.map.get(key) {
            None | Some(Value::Null) => Ok(default),
            Some(Value::Bool(value)) => Ok(*value),
            Some(other) => Err(format!("{key} is {other}; true or false was expected")),
        }
    }

    pub(super) fn object(&self, key: &'static str) -> Outcome<Option<Fields<'a>>> {
        match self.map.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Fields {
                map,
                inside: if key == "rope_scaling" { "rope_scaling." } else { "rope_parameters." },
            })),
            Some(other) => Err(format!("{key} is {other}; an object was expected")),
        }
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
