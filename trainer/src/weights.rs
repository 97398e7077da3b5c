//! Weights by their Hugging Face names: which there are, where initial values come from, how a folder of
//! them is written.
//!
//! Owns names and shapes ([`hf_tensors`]), random initial weights ([`RandomWeights`]), the reader of a
//! Hugging Face folder ([`HfFolder`]) and its writer ([`export`]). It does not know chunks, shards or
//! ranks: whoever holds a piece of a tensor asks for that piece.

mod folder;
mod random;
mod safetensors_file;
mod write;

pub use folder::HfFolder;
pub use random::RandomWeights;
pub use write::{ExportDType, export};

use crate::config::ModelConfig;

/// Name of a folder's only weight file.
pub(crate) const SINGLE_FILE: &str = "model.safetensors";
/// Name of the file that says which shard holds which tensor.
pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";

/// Every tensor of the model with its shape, in the order in which a forward pass uses them. A tied head
/// is not listed: it is the embedding.
///
/// Shapes, row-major: tables `[V, C]`, q `[H·D, C]`, k and v `[K·D, C]`, o `[C, H·D]`, gate and up
/// `[F, C]`, down `[C, F]`, norms `[C]`, a bias as long as its matrix has rows.
pub fn hf_tensors(config: &ModelConfig) -> Vec<(String, Vec<u64>)> {
    let (c, f) = (config.hidden_size, config.intermediate_size);
    let q = config.num_attention_heads * config.head_dim;
    let kv = config.num_key_value_heads * config.head_dim;
    let mut tensors = vec![("model.embed_tokens.weight".to_string(), vec![config.vocab_size, c])];
    for block in 0..config.num_hidden_layers {
        let mut push = |name: &str, shape: Vec<u64>| {
            tensors.push((format!("model.layers.{block}.{name}"), shape));
        };
        push("input_layernorm.weight", vec![c]);
        for (name, rows, columns) in [("q", q, c), ("k", kv, c), ("v", kv, c), ("o", c, q)] {
            push(&format!("self_attn.{name}_proj.weight"), vec![rows, columns]);
            if config.attention_bias {
                push(&format!("self_attn.{name}_proj.bias"), vec![rows]);
            }
        }
        push("post_attention_layernorm.weight", vec![c]);
        for (name, rows, columns) in [("gate", f, c), ("up", f, c), ("down", c, f)] {
            push(&format!("mlp.{name}_proj.weight"), vec![rows, columns]);
            if config.mlp_bias {
                push(&format!("mlp.{name}_proj.bias"), vec![rows]);
            }
        }
    }
    tensors.push(("model.norm.weight".into(), vec![c]));
    if !config.tie_word_embeddings {
        tensors.push(("lm_head.weight".into(), vec![config.vocab_size, c]));
    }
    tensors
}

#[cfg(test)]
mod tests;
