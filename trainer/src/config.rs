//! The model's shape, as a Hugging Face `config.json` states it.
//!
//! Owns the reading of `config.json` (`fields`: what each field may be; `family`: what the families of models say
//! differently; `rope`: rotary positions and their tables; [`json`]: strict JSON) and what follows from the shape alone, such as the parameter count. It knows no tensor's name
//! ([`crate::weights`]) and no training setting ([`crate::settings`]).

mod family;
mod fields;
pub mod json;
mod rope;

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

pub use family::{Family, SlidingWindow};
pub use rope::RopeScaling;

use crate::error::{Error, Result};

/// A Llama-family model's shape. Field names are those of `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// `model_type`
    pub family: Family,
    /// V
    pub vocab_size: u64,
    /// C
    pub hidden_size: u64,
    /// F
    pub intermediate_size: u64,
    /// L
    pub num_hidden_layers: u64,
    /// H
    pub num_attention_heads: u64,
    /// K, a divisor of H
    pub num_key_value_heads: u64,
    /// D, even
    pub head_dim: u64,
    /// ε of every RMSNorm
    pub rms_norm_eps: f32,
    /// θ of the rotary embedding
    pub rope_theta: f64,
    /// How positions are stretched.
    pub rope_scaling: RopeScaling,
    /// Longest sequence the model was made for.
    pub max_position_embeddings: u64,
    /// Biases on q, k and v, and, but for Qwen2, on o; see [`ModelConfig::output_bias`].
    pub attention_bias: bool,
    /// Biases on gate, up and down.
    pub mlp_bias: bool,
    /// What attention sees of longer rows, which are refused: within the window it is that of a model without one.
    pub sliding_window: Option<SlidingWindow>,
    /// Whether the head is the embedding table.
    pub tie_word_embeddings: bool,
    /// Standard deviation of random initial weights.
    pub initializer_range: f64,
    /// Ids of BOS, EOS and padding by their fields' names, for the programs that read what a run leaves; nothing here
    /// depends on them.
    pub token_ids: BTreeMap<&'static str, Value>,
}

/// Fields that may be in [`ModelConfig::token_ids`].
pub const TOKEN_IDS: [&str; 3] = ["bos_token_id", "eos_token_id", "pad_token_id"];

impl ModelConfig {
    /// Number of parameters; tied tables count once.
    pub fn parameters(&self) -> u64 {
        let (c, d) = (self.hidden_size, self.head_dim);
        let (q, kv) = (self.num_attention_heads * d, self.num_key_value_heads * d);
        let mut block = c * (q + 2 * kv) + q * c + 3 * c * self.intermediate_size + 2 * c;
        if self.attention_bias {
            block += q + 2 * kv;
        }
        if self.output_bias() {
            block += c;
        }
        if self.mlp_bias {
            block += 2 * self.intermediate_size + c;
        }
        let tables = if self.tie_word_embeddings { 1 } else { 2 };
        self.num_hidden_layers * block + tables * self.vocab_size * c + c
    }

    /// Reads a `config.json` in the form of transformers 4 or 5. The second value holds notices: what was
    /// found and is ignored or read in a way that one might not expect.
    ///
    /// # Errors
    /// [`Error::Usage`], naming file, field and value, for anything that this trainer would compute
    /// differently from what the file asks.
    pub fn from_json_file(path: &Path) -> Result<(ModelConfig, Vec<String>)> {
        ModelConfig::from_value(&json::read(path)?, path)
    }

    /// As [`ModelConfig::from_json_file`], from the value; errors and notices name `path`.
    pub(crate) fn from_value(value: &Value, path: &Path) -> Result<(ModelConfig, Vec<String>)> {
        let mut notices = Vec::new();
        let config = fields::Fields::of(value)
            .and_then(|fields| fields.model(&mut notices))
            .map_err(|reason| Error::Usage(format!("{}: {reason}", path.display())))?;
        for notice in &mut notices {
            notice.insert_str(0, &format!("{}: ", path.display()));
        }
        Ok((config, notices))
    }

    /// The shape as a `config.json` that transformers 4 and 5 both read. `dtype` is that of the weights
    /// beside it (`float32`, `bfloat16`, `float16`).
    pub fn to_json(&self, dtype: &str) -> Value {
        let mut json = serde_json::json!({
            "architectures": [self.family.causal_lm()],
            "model_type": self.family.model_type(),
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            // f32's shortest decimal, so that 1e-5 is not written as 9.999999747378752e-6.
            "rms_norm_eps": self.rms_norm_eps.to_string().parse::<f64>().unwrap_or(f64::from(self.rms_norm_eps)),
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling.to_json(),
            "attention_dropout": 0.0,
            "tie_word_embeddings": self.tie_word_embeddings,
            "initializer_range": self.initializer_range,
            "torch_dtype": dtype,
        });
        self.write_family(&mut json);
        for (field, ids) in &self.token_ids {
            json[*field] = ids.clone();
        }
        json
    }
}

#[cfg(test)]
#[path = "config/tests.rs"]
mod tests;
