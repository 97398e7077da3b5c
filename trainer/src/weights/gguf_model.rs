//! A GGUF file as a model: its shape as a `config.json` would state it, its tensors by their Hugging Face names.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use rayon::prelude::*;
use serde_json::{Value, json};

use super::gguf::{Gguf, Place};
use super::hf_tensors;
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::source::TensorSource;

/// Elements that one thread widens at a time: a multiple of every block.
const PIECE: usize = 1 << 16;

/// The shape of the model in `file`, and notices.
///
/// # Errors
/// [`Error::Usage`] if it is no Llama model, or one that would be computed differently here.
pub(super) fn shape(file: &Gguf) -> Result<(ModelConfig, Vec<String>)> {
    let refuse = |reason: String| Error::Usage(format!("{}: {reason}", file.path().display()));
    match file.value("general.architecture") {
        Value::String(name) if name == "llama" => {}
        other => {
            return Err(refuse(format!(
                "general.architecture is {other}; only \"llama\" is read from GGUF, use the model's Hugging Face folder"
            )));
        }
    }
    if file.tensors.contains_key("rope_freqs.weight") {
        return Err(refuse(
            "its rotary frequencies are stretched by a tensor (Llama 3.1's scaling), which is not read from GGUF; use \
             the model's Hugging Face folder"
                .into(),
        ));
    }
    let value = |key: &str| file.value(&format!("llama.{key}")).clone();
    let or = |value: Value, other: &dyn Fn() -> Value| if value.is_null() { other() } else { value };
    let table = || json!(file.tensors.get("token_embd.weight").map(|place| place.shape[0]));
    let has = |name: &str| file.tensors.contains_key(name);
    let scaling = match value("rope.scaling.type") {
        Value::Null => Value::Null,
        Value::String(none) if none == "none" => Value::Null,
        kind => json!({"rope_type": kind, "factor": value("rope.scaling.factor")}),
    };
    let config = json!({
        "model_type": "llama",
        "vocab_size": or(value("vocab_size"), &table),
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": value("attention.head_count"),
        "num_key_value_heads": or(value("attention.head_count_kv"), &|| value("attention.head_count")),
        "head_dim": or(value("attention.key_length"), &|| value("rope.dimension_count")),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_theta": or(value("rope.freq_base"), &|| json!(10_000.0)),
        "rope_scaling": scaling,
        "max_position_embeddings": value("context_length"),
        "attention_bias": has("blk.0.attn_q.bias"),
        "mlp_bias": has("blk.0.ffn_gate.bias"),
        "tie_word_embeddings": !has("output.weight"),
    });
    ModelConfig::from_value(&config, file.path())
}

/// The weights of a GGUF file.
#[derive(Debug)]
pub(super) struct GgufWeights {
    file: Gguf,
    tensors: HashMap<String, (Place, Order)>,
}

/// In which order a tensor's rows lie.
#[derive(Clone, Copy, Debug)]
enum Order {
    /// As in Hugging Face.
    Same,
    /// Pairs that the rotary embedding turns lie side by side; in Hugging Face they are half a head apart.
    Pairs { head_dim: u64 },
}

impl GgufWeights {
    /// The tensors of `config` in `path`, and notices.
    ///
    /// # Errors
    /// [`Error::Usage`] if a tensor is missing, has another shape, or is none of the model's.
    pub fn open(path: &Path, config: &ModelConfig) -> Result<(GgufWeights, Vec<String>)> {
        let file = Gguf::open(path)?;
        let refuse = |reason: String| Error::Usage(format!("{}: {reason}", path.display()));
        let mut tensors = HashMap::new();
        let mut formats: BTreeMap<String, usize> = BTreeMap::new();
        for (name, shape) in hf_tensors(config) {
            let stored = stored_name(&name);
            let place = file
                .tensors
                .get(&stored)
                .ok_or_else(|| refuse(format!("{stored} is missing: the file does not hold the model it describes")))?;
            if place.shape != shape {
                return Err(refuse(format!("{stored} has shape {:?}, and {shape:?} by the metadata", place.shape)));
            }
            *formats.entry(format!("{:?}", place.format)).or_default() += 1;
            let turned = name.contains("q_proj") || name.contains("k_proj");
            let order = if turned { Order::Pairs { head_dim: config.head_dim } } else { Order::Same };
            tensors.insert(name, (place.clone(), order));
        }
        if file.tensors.len() != tensors.len() {
            let known: Vec<String> = tensors.keys().map(|name| stored_name(name)).collect();
            let other = file.tensors.keys().filter(|name| !known.contains(name)).min();
            return Err(refuse(format!("holds {}, which the model does not have", other.cloned().unwrap_or_default())));
        }
        let formats: Vec<_> = formats.iter().map(|(format, n)| format!("{n} as {format}")).collect();
        let notice = format!("{}: tensors stored {}; all are widened to fp32", path.display(), formats.join(", "));
        Ok((GgufWeights { file, tensors }, vec![notice]))
    }
}

impl TensorSource for GgufWeights {
    fn read(&self, name: &str, first: u64, out: &mut [f32]) -> Result<()> {
        let path = self.file.path().display();
        let (place, order) =
            self.tensors.get(name).ok_or_else(|| Error::Failed(format!("{path}: there is no tensor {name}")))?;
        let bytes = self.file.raw(place);
        let row = place.shape.get(1).map_or(1, |columns| *columns as usize);
        match order {
            Order::Same => out.par_chunks_mut(PIECE).enumerate().for_each(|(index, piece)| {
                place.format.widen(bytes, first as usize + index * PIECE, piece);
            }),
            Order::Pairs { head_dim } => {
                let mut done = 0;
                while done < out.len() {
                    let at = first as usize + done;
                    let (stored, column) = (paired(at / row, *head_dim as usize), at % row);
                    let count = (row - column).min(out.len() - done);
                    place.format.widen(bytes, stored * row + column, &mut out[done..done + count]);
                    done += count;
                }
            }
        }
        Ok(())
    }
}

/// The stored row of a row: element `half · D/2 + pair` of a head is stored as `2 · pair + half`.
const fn paired(row: usize, head_dim: usize) -> usize {
    let (head, within) = (row / head_dim, row % head_dim);
    let (half, pair) = (within / (head_dim / 2), within % (head_dim / 2));
    head * head_dim + 2 * pair + half
}

/// GGUF's name of a tensor.
fn stored_name(name: &str) -> String {
    match name {
        "model.embed_tokens.weight" => return "token_embd.weight".into(),
        "model.norm.weight" => return "output_norm.weight".into(),
        "lm_head.weight" => return "output.weight".into(),
        _ => {}
    }
    let mut stored = name.replace("model.layers.", "blk.");
    for (ours, theirs) in [
        ("post_attention_layernorm", "ffn_norm"),
        ("input_layernorm", "attn_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ] {
        stored = stored.replace(ours, theirs);
    }
    stored
}
