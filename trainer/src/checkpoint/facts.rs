//! What a run is: what must be the same for another to go on from its checkpoint, and what may be different.

use crate::blueprint::Options;
use crate::config::TOKEN_IDS;
use crate::data::Order;
use crate::error::{Error, Result};
use crate::optimizer::Clip;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Where the rows of each step come from.
#[derive(Clone, Copy, Debug)]
pub struct Data {
    /// Rows to train on.
    pub rows: u64,
    /// Rows of a step over all ranks.
    pub rows_per_step: u64,
    /// Order of the rows.
    pub order: Order,
}

/// A run's facts, as JSON: compared leaf by leaf, each named by its path.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Facts {
    /// Other values make another run of it.
    fixed: Value,
    /// Other values are what somebody wants.
    free: Value,
}

impl Facts {
    /// The facts of a run.
    pub fn of(options: &Options, data: Data) -> Facts {
        let mut model = options.config.to_json("");
        if let Some(fields) = model.as_object_mut() {
            // The type of exported weights, the deviation of initial ones and what tokens mean to other programs are no
            // part of a trained model.
            for field in ["torch_dtype", "initializer_range"].into_iter().chain(TOKEN_IDS) {
                fields.remove(field);
            }
        }
        let (shuffle, order_seed) = match data.order {
            Order::Sequential => (false, None),
            Order::Shuffled { seed } => (true, Some(seed)),
        };
        let fixed = json!({
            "model": model,
            "formats": options.formats,
            "optimizer": options.optimizer,
            "loss_scale": options.loss_scale,
            "seed": options.seed,
            "data": {
                "rows": data.rows,
                "max_length": options.sequence,
                "rows_per_step": data.rows_per_step,
                "shuffle": shuffle,
                "order_seed": order_seed,
                // Nothing where there is none: checkpoints from before it go on.
                "document_mask": options.document_mask.then_some(true),
            },
        });
        let free = json!({
            "schedule": options.schedule,
            "grad_clip": options.max_norm,
            "clip": options.clip,
        });
        Facts { fixed: as_read(fixed), free: as_read(free) }
    }

    /// Whether a run of `new` facts may go on from a checkpoint with these. Returns what to tell the user.
    ///
    /// # Errors
    /// [`Error::Usage`] naming the first fact that must not differ, with both values.
    pub(super) fn allow(&self, new: &Facts, checkpoint: &str) -> Result<Vec<String>> {
        if let Some((path, before, now)) = differences(&self.fixed, &new.fixed).into_iter().next() {
            let advice = match path.as_str() {
                "data.rows_per_step" => {
                    "; choose --gradient_accumulation_steps and --batch_size so that ranks × both is the same"
                }
                path if path.starts_with("data.") => {
                    "; give the same data and the same --max_length, --document_mask, --eval_fraction, --shuffle and --seed"
                }
                path if path.starts_with("model.") => {
                    "; give the same model, or start anew from weights with `castor export` and --model"
                }
                _ => "; give the same value, or start anew from weights with `castor export` and --model",
            };
            return Err(Error::Usage(format!("{checkpoint} has {path} {before} and this run has {now}{advice}")));
        }
        let mut free = self.free.clone();
        if let Value::Object(facts) = &mut free {
            // Of checkpoints from before there was a choice.
            let clip = facts.entry("clip").or_insert(Value::Null);
            if clip.is_null() {
                *clip = json!(Clip::Exact);
            }
        }
        let differing = differences(&free, &new.free).into_iter();
        Ok(differing
            .map(|(path, before, now)| format!("{path} was {before} in {checkpoint} and is {now} from here on"))
            .collect())
    }
}

/// As it will be once written and read again, where a float's last bit may change.
fn as_read(value: Value) -> Value {
    serde_json::from_str(&value.to_string()).unwrap_or(value)
}

/// Paths of all leaves that differ, with both values.
fn differences(before: &Value, now: &Value) -> Vec<(String, Value, Value)> {
    let (Value::Object(a), Value::Object(b)) = (before, now) else {
        return if before == now { Vec::new() } else { vec![(String::new(), before.clone(), now.clone())] };
    };
    let names = a.keys().chain(b.keys().filter(|name| !a.contains_key(*name)));
    names
        .flat_map(|name| {
            let inner = differences(a.get(name).unwrap_or(&Value::Null), b.get(name).unwrap_or(&Value::Null));
            inner.into_iter().map(move |(path, before, now)| {
                let path = if path.is_empty() { name.clone() } else { format!("{name}.{path}") };
                (path, before, now)
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaves_that_differ_are_named_by_their_path() {
        let before = json!({"a": {"b": 1, "c": null}, "d": 0.1});
        let now = json!({"a": {"b": 2, "c": null}, "d": 0.1, "e": true});
        let paths: Vec<_> = differences(&before, &now).into_iter().map(|(path, ..)| path).collect();
        assert_eq!(paths, ["a.b", "e"]);
    }
}
