//! The Llama, written out: which tensors it has and the straight lists of operator calls of a step. Mistral and Qwen2
//! are the same but for biases.
//!
//! Read in this order: [`groups`] (tensors and their Hugging Face names), [`embedding`], [`block`], [`head`].
//! Nothing here knows where bytes are or when they move: every function takes views and issues operators.

pub mod block;
pub mod embedding;
pub mod groups;
pub mod head;

use crate::config::ModelConfig;
use castor_kernels::ops::{Attention, Linear};

/// The model's numbers in the alphabet of the operators.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Shape {
    /// V
    pub vocabulary: u64,
    /// C
    pub hidden: u64,
    /// F
    pub ffn: u64,
    /// L
    pub blocks: u64,
    /// H
    pub heads: u64,
    /// K
    pub kv_heads: u64,
    /// D
    pub head_dim: u64,
    /// ε of every RMSNorm.
    pub eps: f32,
    /// Biases on q, k and v.
    pub qkv_bias: bool,
    /// Bias on o.
    pub o_bias: bool,
    /// Biases on gate, up and down.
    pub mlp_bias: bool,
    /// Whether the head is the embedding table.
    pub tied: bool,
}

impl From<&ModelConfig> for Shape {
    fn from(config: &ModelConfig) -> Self {
        Shape {
            vocabulary: config.vocab_size,
            hidden: config.hidden_size,
            ffn: config.intermediate_size,
            blocks: config.num_hidden_layers,
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            eps: config.rms_norm_eps,
            qkv_bias: config.attention_bias,
            o_bias: config.output_bias(),
            mlp_bias: config.mlp_bias,
            tied: config.tie_word_embeddings,
        }
    }
}

impl Shape {
    /// H·D: columns of q and of the attention's output.
    pub const fn query(&self) -> u64 {
        self.heads * self.head_dim
    }

    /// K·D: columns of k and of v.
    pub const fn key_value(&self) -> u64 {
        self.kv_heads * self.head_dim
    }

    /// (H + 2K)·D: columns of packed q, k, v.
    pub const fn packed(&self) -> u64 {
        self.query() + 2 * self.key_value()
    }

    /// Attention over `batch` rows.
    pub const fn attention(&self, batch: u64, how: AttentionKind) -> Attention {
        Attention {
            batch,
            sequence: how.sequence,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            fused: how.fused,
            deterministic: how.deterministic,
        }
    }

    /// q, k, v from the normed input.
    const fn qkv(&self, tokens: u64) -> Linear {
        linear(tokens, self.hidden, self.packed())
    }

    /// The attention's output projection.
    const fn o(&self, tokens: u64) -> Linear {
        linear(tokens, self.query(), self.hidden)
    }

    /// Gate and up from the normed attention result.
    const fn gate_up(&self, tokens: u64) -> Linear {
        linear(tokens, self.hidden, 2 * self.ffn)
    }

    /// The FFN's down projection.
    const fn down(&self, tokens: u64) -> Linear {
        linear(tokens, self.ffn, self.hidden)
    }

    /// Logits.
    const fn logits(&self, tokens: u64) -> Linear {
        linear(tokens, self.hidden, self.vocabulary)
    }
}

const fn linear(tokens: u64, inputs: u64, outputs: u64) -> Linear {
    Linear { tokens, inputs, outputs }
}

/// What attention is asked for beside the model's shape.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AttentionKind {
    /// S
    pub sequence: u64,
    /// Whether to use the fused kernel.
    pub fused: bool,
    /// Whether the backward must give the same bits every time.
    pub deterministic: bool,
    /// Whether a token attends within its own document only.
    pub documents: bool,
}
