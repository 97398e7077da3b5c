//! The model's shape, as a Hugging Face `config.json` states it.

/// A Llama-family model's shape. Field names are those of `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
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
    /// Biases on q, k, v and o.
    pub attention_bias: bool,
    /// Biases on gate, up and down.
    pub mlp_bias: bool,
    /// Whether the head is the embedding table.
    pub tie_word_embeddings: bool,
    /// Standard deviation of random initial weights.
    pub initializer_range: f64,
}

/// Rotary scaling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// None.
    Default,
    /// Positions divided by the factor.
    Linear {
        /// ≥ 1
        factor: f64,
    },
    /// Llama 3.1's per-frequency scaling.
    Llama3 {
        /// ≥ 1
        factor: f64,
        /// Below this many turns over the original length a frequency is divided by the factor.
        low_freq_factor: f64,
        /// Above this many turns it is kept.
        high_freq_factor: f64,
        /// Length the model was pretrained at.
        original_max_position_embeddings: u64,
    },
}

impl ModelConfig {
    /// Number of parameters; tied tables count once.
    pub fn parameters(&self) -> u64 {
        let (c, d) = (self.hidden_size, self.head_dim);
        let (q, kv) = (self.num_attention_heads * d, self.num_key_value_heads * d);
        let mut block = c * (q + 2 * kv) + q * c + 3 * c * self.intermediate_size + 2 * c;
        if self.attention_bias {
            block += q + 2 * kv + c;
        }
        if self.mlp_bias {
            block += 2 * self.intermediate_size + c;
        }
        let tables = if self.tie_word_embeddings { 1 } else { 2 };
        self.num_hidden_layers * block + tables * self.vocab_size * c + c
    }
}
