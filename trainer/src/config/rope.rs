//! Rotary positions: how a `config.json` states them, the frequencies that follow, and the table of a row.
//!
//! The arithmetic is that of transformers' `modeling_rope_utils`, f32 where it is f32 there, powers rounded once.

use serde_json::{Value, json};

use super::ModelConfig;
use super::fields::{Fields, Outcome};

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
    /// θ grows with rows that are longer than the model was made for.
    Dynamic {
        /// ≥ 1
        factor: f64,
    },
    /// YaRN: slow frequencies divided by the factor, fast ones kept, a ramp between; cosines and sines scaled.
    Yarn {
        /// ≥ 1
        factor: f64,
        /// Length the model was pretrained at.
        original_max_position_embeddings: u64,
        /// Above this many turns over the original length a frequency is kept.
        beta_fast: f64,
        /// Below this many it is divided by the factor.
        beta_slow: f64,
        /// Of cosines and sines.
        attention_factor: f64,
        /// Whether the ramp's ends are whole frequencies.
        truncate: bool,
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

impl Fields<'_> {
    /// θ and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4), of a model for
    /// `positions`.
    pub(super) fn rope(&self, positions: u64, notices: &mut Vec<String>) -> Outcome<(f64, RopeScaling)> {
        let outer = self.positive("rope_theta", Some(10_000.0))?;
        let new = self.object("rope_parameters")?;
        let old = self.object("rope_scaling")?;
        let Some(parameters) = &new else {
            return Ok((outer, old.map_or(Ok(RopeScaling::Default), |old| old.scaling(positions, notices))?));
        };
        if let Some((kind, _)) = parameters.map.iter().find(|(_, value)| value.is_object()) {
            return Err(format!(
                "rope_parameters.{kind} is an object: a rotary embedding per kind of layer is not implemented"
            ));
        }
        let theta = parameters.positive("rope_theta", Some(outer))?;
        if self.map.contains_key("rope_theta") && theta != outer {
            notices.push(format!("rope_theta is {outer} and rope_parameters.rope_theta is {theta}; {theta} is used"));
        }
        let scaling = parameters.scaling(positions, notices)?;
        if let Some(old) = old
            && old.scaling(positions, &mut Vec::new())? != scaling
        {
            return Err("rope_scaling and rope_parameters ask for different scalings; keep one".into());
        }
        Ok((theta, scaling))
    }

    fn scaling(&self, positions: u64, notices: &mut Vec<String>) -> Outcome<RopeScaling> {
        let name = match (self.map.get("rope_type"), self.map.get("type")) {
            (None, None) if self.map.keys().all(|key| key == "rope_theta") => {
                return Ok(RopeScaling::Default);
            }
            (None, None) => {
                return Err(format!("{}rope_type is missing", self.inside));
            }
            (Some(new), Some(old)) if new != old => {
                notices.push(format!("{0}rope_type is {new} and {0}type is {old}; {new} is used", self.inside));
                new
            }
            (Some(name), _) | (None, Some(name)) => name,
        };
        match name.as_str() {
            Some("default") => Ok(RopeScaling::Default),
            Some("linear") => Ok(RopeScaling::Linear { factor: self.factor()? }),
            Some("dynamic") => Ok(RopeScaling::Dynamic { factor: self.factor()? }),
            Some("yarn") => self.yarn(positions, notices),
            Some("llama3") => self.llama3(),
            _ => Err(format!(
                "{}rope_type is {name}; default, linear, dynamic, yarn and llama3 are implemented",
                self.inside
            )),
        }
    }

    fn factor(&self) -> Outcome<f64> {
        match self.positive("factor", None)? {
            factor if factor < 1.0 => {
                Err(format!("{}factor is {factor}; it stretches positions and must be at least 1", self.inside))
            }
            factor => Ok(factor),
        }
    }

    fn yarn(&self, positions: u64, notices: &mut Vec<String>) -> Outcome<RopeScaling> {
        let factor = self.factor()?;
        let original = self.count("original_max_position_embeddings", Some(positions))?;
        // Some releases of transformers take this ratio in place of the factor.
        let ratio = positions as f64 / original as f64;
        if original != positions && ratio != factor {
            notices.push(format!(
                "{}factor is {factor}, and max_position_embeddings / original_max_position_embeddings is {ratio}; \
                 {factor} is used",
                self.inside
            ));
        }
        let or = |key, default| Ok::<_, String>(if self.is_set(key) { self.positive(key, None)? } else { default });
        let (beta_fast, beta_slow) = (or("beta_fast", 32.0)?, or("beta_slow", 1.0)?);
        if beta_fast <= beta_slow {
            return Err(format!("{0}beta_fast is {beta_fast}; it must be above {0}beta_slow {beta_slow}", self.inside));
        }
        let scale = |weight: f64| if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 };
        let attention_factor = match (self.is_set("mscale"), self.is_set("mscale_all_dim")) {
            _ if self.is_set("attention_factor") => self.positive("attention_factor", None)?,
            (true, true) => scale(self.positive("mscale", None)?) / scale(self.positive("mscale_all_dim", None)?),
            _ => scale(1.0),
        };
        Ok(RopeScaling::Yarn {
            factor,
            original_max_position_embeddings: original,
            beta_fast,
            beta_slow,
            attention_factor,
            truncate: self.boolean("truncate", true)?,
        })
    }

    fn llama3(&self) -> Outcome<RopeScaling> {
        const NEEDED: [&str; 4] = ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"];
        let missing: Vec<_> = NEEDED.into_iter().filter(|key| !self.map.contains_key(*key)).collect();
        if !missing.is_empty() {
            return Err(format!(
                "{}rope_type \"llama3\" needs {}, which the file does not give",
                self.inside,
                missing.join(", ")
            ));
        }
        let low_freq_factor = self.positive("low_freq_factor", None)?;
        let high_freq_factor = self.positive("high_freq_factor", None)?;
        if high_freq_factor <= low_freq_factor {
            return Err(format!(
                "{}high_freq_factor is {high_freq_factor}; it must be above low_freq_factor {low_freq_factor}",
                self.inside
            ));
        }
        Ok(RopeScaling::Llama3 {
            factor: self.factor()?,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings: self.count("original_max_position_embeddings", None)?,
        })
    }
}

impl RopeScaling {
    /// As `rope_scaling` of a `config.json`.
    pub(super) fn to_json(self) -> Value {
        match self {
            RopeScaling::Default => Value::Null,
            RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
            RopeScaling::Dynamic { factor } => json!({"rope_type": "dynamic", "factor": factor}),
            RopeScaling::Yarn {
                factor,
                original_max_position_embeddings,
                beta_fast,
                beta_slow,
                attention_factor,
                truncate,
            } => json!({
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original_max_position_embeddings,
                "beta_fast": beta_fast,
                "beta_slow": beta_slow,
                "attention_factor": attention_factor,
                "truncate": truncate,
            }),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
                json!({
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": low_freq_factor,
                    "high_freq_factor": high_freq_factor,
                    "original_max_position_embeddings": original_max_position_embeddings,
                })
            }
        }
    }
}

impl ModelConfig {
    /// Rotary frequencies of rows of `sequence` tokens, D/2 of them, with scaling applied.
    pub fn inv_freq(&self, sequence: usize) -> Vec<f32> {
        let dim = self.head_dim as f32;
        let (sequence, made_for) = (sequence as f64, self.max_position_embeddings as f64);
        let theta = match self.rope_scaling {
            RopeScaling::Dynamic { factor } if sequence > made_for => {
                let growth = factor * sequence / made_for - (factor - 1.0);
                self.rope_theta * growth.powf(self.head_dim as f64 / (self.head_dim as f64 - 2.0))
            }
            _ => self.rope_theta,
        };
        let plain = (0..self.head_dim).step_by(2).map(|i| 1.0 / theta.powf(f64::from(i as f32 / dim)) as f32);
        match self.rope_scaling {
            RopeScaling::Default | RopeScaling::Dynamic { .. } => plain.collect(),
            RopeScaling::Linear { factor } => plain.map(|f| f / factor as f32).collect(),
            RopeScaling::Yarn { factor, original_max_position_embeddings, beta_fast, beta_slow, truncate, .. } => {
                // The index, in pairs, at which a frequency turns so often over the original length.
                let index_of = |turns: f64| {
                    let length = original_max_position_embeddings as f64 / (turns * std::f64::consts::TAU);
                    self.head_dim as f64 * length.ln() / (2.0 * self.rope_theta.ln())
                };
                let (first, last) = (index_of(beta_fast), index_of(beta_slow));
                let (first, last) = if truncate { (first.floor(), last.ceil()) } else { (first, last) };
                let (first, last) = (first.max(0.0), last.min(self.head_dim as f64 - 1.0));
                let last = if first == last { last + 0.001 } else { last };
                plain
                    .enumerate()
                    .map(|(index, f)| {
                        let ramp = ((index as f32 - first as f32) / (last - first) as f32).clamp(0.0, 1.0);
                        f / factor as f32 * ramp + f * (1.0 - ramp)
                    })
                    .collect()
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
                let (factor, low, high) = (factor as f32, low_freq_factor as f32, high_freq_factor as f32);
                let original = original_max_position_embeddings as f32;
                plain
                    .map(|f| {
                        let wavelength = std::f32::consts::TAU / f;
                        if wavelength < original / high {
                            f
                        } else if wavelength > original / low {
                            f / factor
                        } else {
                            let smooth = (original / wavelength - low) / (high - low);
                            (1.0 - smooth) * f / factor + smooth * f
                        }
                    })
                    .collect()
            }
        }
    }

    /// Cosines and sines of every position: `[S, D]`, row = D/2 cosines then D/2 sines. The angle is the
    /// f32 product that transformers forms; its cosine and sine are rounded once from f64, and scaled as YaRN does.
    pub fn rope_table(&self, sequence: usize) -> Vec<f32> {
        let frequencies = self.inv_freq(sequence);
        let scale = match self.rope_scaling {
            RopeScaling::Yarn { attention_factor, .. } => attention_factor as f32,
            _ => 1.0,
        };
        let mut table = Vec::with_capacity(sequence * 2 * frequencies.len());
        for position in 0..sequence {
            let angle = |f: &f32| f64::from(position as f32 * f);
            table.extend(frequencies.iter().map(|f| angle(f).cos() as f32 * scale));
            table.extend(frequencies.iter().map(|f| angle(f).sin() as f32 * scale));
        }
        table
    }
}
