//! Weights by their Hugging Face names: which there are, where initial values come from, how a folder of
//! them is written.
//!
//! Owns names and shapes ([`hf_tensors`]), random initial weights ([`RandomWeights`]), the readers of a
//! Hugging Face folder ([`HfFolder`]) and of a GGUF file ([`Gguf`]), and the writer of a folder ([`export`]). It does
//! not know chunks, shards or ranks: whoever holds a piece of a tensor asks for that piece.

mod blocks;
mod folder;
mod gguf;
mod gguf_model;
mod random;
mod safetensors_file;
mod write;

use std::path::Path;

pub use folder::HfFolder;
pub use gguf::Gguf;
pub use random::RandomWeights;
pub use write::{ExportDType, export};

use crate::config::ModelConfig;
use crate::error::Result;
use crate::source::TensorSource;

/// Name of a folder's only weight file.
pub(crate) const SINGLE_FILE: &str = "model.safetensors";
/// Name of the file that says which shard holds which tensor.
pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";

/// Whether `path` is a folder with weights as Hugging Face keeps them.
pub fn is_folder_of_weights(path: &Path) -> bool {
    [SINGLE_FILE, INDEX_FILE].iter().any(|name| path.join(name).is_file())
}

/// The shape of the model at `path`, a Hugging Face folder or a GGUF file, and notices.
///
/// # Errors
/// If there is none, or it would be computed differently here.
pub fn shape(path: &Path) -> Result<(ModelConfig, Vec<String>)> {
    if path.is_file() {
        return gguf_model::shape(&Gguf::open(path)?);
    }
    ModelConfig::from_json_file(&path.join("config.json"))
}

/// The weights of the model at `path`, a Hugging Face folder or a GGUF file, and notices.
///
/// # Errors
/// If they are not those of `config`, or cannot be read.
pub fn open(path: &Path, config: &ModelConfig) -> Result<(Box<dyn TensorSource>, Vec<String>)> {
    if path.is_file() {
        let (weights, notices) = gguf_model::GgufWeights::open(path, config)?;
        return Ok((Box::new(weights), notices));
    }
    let (weights, notices) = HfFolder::open(path, config)?;
    Ok((Box::new(weights), notices))
}

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
            let has_bias = if name == "o" { config.output_bias() } else { config.attention_bias };
            if has_bias {
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
