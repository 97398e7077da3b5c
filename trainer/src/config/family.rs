//! The families of models, which are one model in all but what is said here: names, which biases there are, what
//! absent fields mean, and how far attention sees.

use serde_json::{Value, json};

use super::ModelConfig;
use super::fields::{Fields, Outcome};
use crate::error::{Error, Result};

/// A family of models, `model_type` of a `config.json`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Family {
    /// Llama, with biases where the file asks for them.
    #[default]
    Llama,
    /// Mistral: no biases; attention may be bounded by a window.
    Mistral,
    /// Qwen2 and Qwen2.5: biases on q, k and v; attention of the last blocks may be bounded by a window.
    Qwen2,
}

/// Blocks whose attention sees the last tokens only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlidingWindow {
    /// Tokens that one sees, itself among them.
    pub tokens: u64,
    /// The first block that has it; all after it do too.
    pub first_block: u64,
}

impl Family {
    const ALL: [Family; 3] = [Family::Llama, Family::Mistral, Family::Qwen2];

    /// As in a `config.json`.
    pub const fn model_type(self) -> &'static str {
        match self {
            Family::Llama => "llama",
            Family::Mistral => "mistral",
            Family::Qwen2 => "qwen2",
        }
    }

    /// The class of transformers that computes it.
    pub(super) const fn causal_lm(self) -> &'static str {
        match self {
            Family::Llama => "LlamaForCausalLM",
            Family::Mistral => "MistralForCausalLM",
            Family::Qwen2 => "Qwen2ForCausalLM",
        }
    }

    const fn base_model(self) -> &'static str {
        match self {
            Family::Llama => "LlamaModel",
            Family::Mistral => "MistralModel",
            Family::Qwen2 => "Qwen2Model",
        }
    }

    /// `max_position_embeddings` where a file gives none.
    pub(super) const fn positions(self) -> u64 {
        match self {
            Family::Llama => 2048,
            Family::Mistral => 131_072,
            Family::Qwen2 => 32_768,
        }
    }
}

impl Fields<'_> {
    /// Which family the file is of: `model_type`, with which `architectures` must agree.
    pub(super) fn family(&self) -> Outcome<Family> {
        let family = match self.map.get("model_type") {
            None | Some(Value::Null) => Family::Llama,
            Some(name) => Family::ALL.into_iter().find(|family| *name == family.model_type()).ok_or_else(|| {
                format!(
                    "model_type is {name}, and \"llama\", \"mistral\" and \"qwen2\" are trained here: other families \
                         differ in ways that the weights do not show"
                )
            })?,
        };
        if let Some(Value::Array(names)) = self.map.get("architectures")
            && let Some(other) = names.iter().find(|name| *name != family.causal_lm() && *name != family.base_model())
        {
            return Err(format!(
                "architectures names {other}; for model_type \"{}\" it is \"{}\" that is trained here",
                family.model_type(),
                family.causal_lm()
            ));
        }
        Ok(family)
    }

    /// K, of H heads. Only Llama's is H where the file says nothing.
    pub(super) fn kv_heads(&self, family: Family, heads: u64) -> Outcome<u64> {
        if family != Family::Llama && !self.map.contains_key("num_key_value_heads") {
            return Err("num_key_value_heads is missing".into());
        }
        self.count("num_key_value_heads", Some(heads))
    }

    /// Whether there are biases in attention and in the FFN.
    pub(super) fn biases(&self, family: Family, notices: &mut Vec<String>) -> Outcome<(bool, bool)> {
        let attention = self.boolean("attention_bias", family == Family::Qwen2)?;
        let mlp = self.boolean("mlp_bias", false)?;
        let fixed = match family {
            Family::Llama => return Ok((attention, mlp)),
            Family::Mistral => (false, false),
            Family::Qwen2 => (true, false),
        };
        if attention != fixed.0 {
            self.note_meaningless(&["attention_bias"], family, notices);
        }
        if mlp != fixed.1 {
            self.note_meaningless(&["mlp_bias"], family, notices);
        }
        Ok(fixed)
    }

    /// How far attention of a model of `blocks` sees.
    pub(super) fn sliding_window(
        &self,
        family: Family,
        blocks: u64,
        notices: &mut Vec<String>,
    ) -> Outcome<Option<SlidingWindow>> {
        // What transformers assumes where the key is absent, which null is not.
        let tokens = || match self.map.get("sliding_window") {
            Some(Value::Null) => Ok(None),
            _ => self.count("sliding_window", Some(4096)).map(Some),
        };
        match family {
            Family::Llama => {
                self.note_meaningless(&["sliding_window", "layer_types"], family, notices);
                Ok(None)
            }
            Family::Mistral => {
                self.note_meaningless(&["layer_types"], family, notices);
                Ok(tokens()?.map(|tokens| SlidingWindow { tokens, first_block: 0 }))
            }
            Family::Qwen2 => {
                let tokens = if self.boolean("use_sliding_window", false)? { tokens()? } else { None };
                // Here 0 has a meaning.
                let first_block = match self.map.get("max_window_layers") {
                    Some(value) if *value == 0 => 0,
                    _ => self.count("max_window_layers", Some(28))?,
                };
                let window = tokens.map(|tokens| SlidingWindow { tokens, first_block });
                let window = window.filter(|_| first_block < blocks);
                self.check_layer_types(blocks, window)?;
                Ok(window)
            }
        }
    }

    fn note_meaningless(&self, keys: &[&str], family: Family, notices: &mut Vec<String>) {
        for key in keys.iter().filter(|key| self.is_set(key)) {
            notices.push(format!("{key} has no meaning for a {} model and is ignored", family.model_type()));
        }
    }

    fn check_layer_types(&self, blocks: u64, window: Option<SlidingWindow>) -> Outcome<()> {
        let Some(given) = self.map.get("layer_types").filter(|value| !value.is_null()) else { return Ok(()) };
        let kind = |block| match window {
            Some(window) if block >= window.first_block => "sliding_attention",
            _ => "full_attention",
        };
        let expected: Vec<&str> = (0..blocks).map(kind).collect();
        if *given == json!(expected) {
            return Ok(());
        }
        Err("layer_types differs from what use_sliding_window, sliding_window and max_window_layers say; remove it or \
             change them"
            .into())
    }
}

impl ModelConfig {
    /// Whether o has a bias.
    pub fn output_bias(&self) -> bool {
        self.attention_bias && self.family != Family::Qwen2
    }

    /// Refuses rows of `sequence` tokens, which `flag` asks for, where attention would not see all of them.
    ///
    /// # Errors
    /// [`Error::Usage`] with the length that is possible.
    pub fn check_window(&self, sequence: u64, flag: &str) -> Result<()> {
        match self.sliding_window {
            Some(SlidingWindow { tokens, .. }) if tokens < sequence => Err(Error::Usage(format!(
                "the model's sliding_window is {tokens} and {flag} {sequence}: attention within a window is not \
                 implemented; give at most {tokens}, for which the model is the same without one"
            ))),
            _ => Ok(()),
        }
    }

    /// Adds to a `config.json` what only this family says.
    pub(super) fn write_family(&self, json: &mut Value) {
        let tokens = self.sliding_window.map(|window| window.tokens);
        match self.family {
            Family::Llama => {
                json["attention_bias"] = self.attention_bias.into();
                json["mlp_bias"] = self.mlp_bias.into();
            }
            Family::Mistral => json["sliding_window"] = tokens.into(),
            Family::Qwen2 => {
                json["use_sliding_window"] = tokens.is_some().into();
                json["sliding_window"] = tokens.into();
                let first = self.sliding_window.map_or(self.num_hidden_layers, |window| window.first_block);
                json["max_window_layers"] = first.into();
            }
        }
    }
}
