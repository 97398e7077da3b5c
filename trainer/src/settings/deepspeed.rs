//! `--deepspeed FILE`: what a DeepSpeed JSON asks for, as settings of this trainer.
//!
//! What the file leaves out or sets to "auto" is decided by the command line; what both say must agree. Keys that
//! steer DeepSpeed's own machinery are accepted with one line that names them, unknown ones are refused. The text is
//! [`file`]'s, the keys are [`keys`]'s, ZeRO and offload [`zero`]'s, learning rates [`scheduler`]'s.

mod file;
mod keys;
mod scheduler;
mod zero;

use serde_json::{Map, Value};

use super::raw::{Origin, Raw};
use crate::error::{Error, Result, counted};
use keys::Section;

/// The learning rate of an optimizer whose section does not say it.
const DEFAULT_LR: &str = "0.001";

/// Errors are clauses until the file's name is put before them.
type Outcome<T> = std::result::Result<T, String>;

/// Adds what the file at `path` says to `raw`, in which everything else that was given already is, and to `notices`
/// what to tell the user. `ranks` is asked only where the file states a batch over all ranks.
///
/// # Errors
/// [`Error::Usage`] with file, key and value: for what is not JSON, not known, not offered, or contradicts what was
/// given elsewhere.
pub(super) fn read(
    path: &str,
    raw: &mut Raw,
    ranks: &dyn Fn() -> Result<u32>,
    notices: &mut Vec<String>,
) -> Result<()> {
    let refuse = |reason: String| Error::Usage(format!("--deepspeed {path}: {reason}"));
    let text = std::fs::read(path).map_err(|error| refuse(format!("cannot be read: {error}; give a JSON file")))?;
    let text = std::str::from_utf8(&text)
        .map_err(|error| refuse(format!("byte {} is not UTF-8; save the file as UTF-8", error.valid_up_to())))?;
    let map = file::parse(text).map_err(refuse)?;
    let mut translation = Translation { path, raw, ranks, unneeded: Vec::new(), notices: Vec::new() };
    translation.all(&map).map_err(refuse)?;
    let Translation { unneeded, notices: said, .. } = translation;
    notices.extend(said.into_iter().map(|notice| format!("--deepspeed {path}: {notice}")));
    if !unneeded.is_empty() {
        notices.push(format!("--deepspeed {path}: accepted and not needed here: {}", unneeded.join(", ")));
    }
    Ok(())
}

/// A file on its way to settings.
struct Translation<'a> {
    path: &'a str,
    raw: &'a mut Raw,
    ranks: &'a dyn Fn() -> Result<u32>,
    unneeded: Vec<String>,
    notices: Vec<String>,
}

impl Translation<'_> {
    fn all(&mut self, map: &Map<String, Value>) -> Outcome<()> {
        let top = Section::top(map, &mut self.unneeded)?;
        self.batch(&top)?;
        if let Some(clip) = top.value("gradient_clipping")? {
            // DeepSpeed takes a number in quotes here, and clips where it is above 0.
            let number = clip.as_f64().or_else(|| clip.as_str()?.parse().ok()).filter(|x: &f64| x.is_finite());
            let number = number.ok_or_else(|| top.wrong("gradient_clipping", clip, "a number"))?;
            if number < 0.0 {
                self.notices.push(format!("gradient_clipping {number} clips nothing, as with DeepSpeed; 0 says so"));
            }
            self.set("grad_clip", number.max(0.0), "gradient_clipping")?;
        }
        self.precision(&top)?;
        self.optimizer(&top)?;
        self.scheduler(&top)?;
        self.zero(&top)
    }

    /// Sets `key` to what the file says at `from`.
    fn set(&mut self, key: &'static str, value: impl ToString, from: &str) -> Outcome<()> {
        let origin = Origin::DeepSpeed { path: self.path.to_string(), key: from.to_string() };
        self.raw.agree(key, value.to_string(), origin)
    }

    /// What DeepSpeed takes where the file is silent, if the command line is silent, too.
    fn set_default(&mut self, key: &'static str, value: &str, from: &str) -> Outcome<()> {
        match self.raw.is_given(key) {
            true => Ok(()),
            false => self.set(key, value, &format!("DeepSpeed's default of {from}")),
        }
    }

    /// A whole number that was given elsewhere, valid or not: it is judged when settings are resolved.
    fn given(&self, key: &str) -> Option<u64> {
        if self.raw.is_given(key) { self.raw.values(key).concat().trim().parse().ok().filter(|x| *x > 0) } else { None }
    }

    /// train_batch_size = train_micro_batch_size_per_gpu × gradient_accumulation_steps × ranks; two decide the third.
    fn batch(&mut self, top: &Section) -> Outcome<()> {
        const MICRO: &str = "train_micro_batch_size_per_gpu";
        const STEPS: &str = "gradient_accumulation_steps";
        let (micro, steps) = (top.whole(MICRO, 1)?, top.whole(STEPS, 1)?);
        if let Some(micro) = micro {
            self.set("batch_size", micro, MICRO)?;
        }
        if let Some(steps) = steps {
            self.set(STEPS, steps, STEPS)?;
        }
        let Some(total) = top.whole("train_batch_size", 1)? else {
            return match micro.is_some()
                || self.raw.is_given("batch_size")
                || top.has(MICRO)
                || top.has("train_batch_size")
            {
                true => Ok(()),
                false => Err(format!("there is neither {MICRO} nor train_batch_size; add one, or --batch_size")),
            };
        };
        let ranks = u64::from((self.ranks)().map_err(|error| error.to_string())?);
        let (micro, steps) = match (micro.or(self.given("batch_size")), steps.or(self.given(STEPS))) {
            (Some(micro), Some(steps)) => (micro, steps),
            (Some(micro), None) => (micro, total / micro / ranks),
            (None, Some(steps)) => (total / steps / ranks, steps),
            (None, None) => (total / ranks, 1),
        };
        if u128::from(micro) * u128::from(steps) * u128::from(ranks) != u128::from(total) {
            return Err(format!(
                "train_batch_size is {total}, which is not {} a micro-batch × {} × {}; change one of them",
                counted(micro, "rows"),
                counted(steps, "accumulation steps"),
                counted(ranks, "ranks")
            ));
        }
        self.set("batch_size", micro, "train_batch_size")?;
        self.set(STEPS, steps, "train_batch_size")
    }

    fn precision(&mut self, top: &Section) -> Outcome<()> {
        let fp16 = top.section("fp16", keys::FP16, &mut self.unneeded)?;
        let name = if top.has("bf16") { "bf16" } else { "bfloat16" };
        let bf16 = top.section(name, keys::BF16, &mut self.unneeded)?;
        let enabled = |section: &Option<Section>| match section {
            None => Ok(None),
            // Absent is off, "auto" is whatever the command line says.
            Some(section) if !section.has("enabled") => Ok(Some(false)),
            Some(section) => section.switch("enabled"),
        };
        let from = format!("{name}.enabled");
        match (enabled(&fp16)?, enabled(&bf16)?) {
            (Some(true), Some(true)) => {
                return Err(format!("fp16.enabled and {from} are both true; enable one"));
            }
            (Some(true), _) => self.set("mixed_precision", "fp16", "fp16.enabled")?,
            (_, Some(true)) => self.set("mixed_precision", "bf16", &from)?,
            (Some(false), Some(false)) => self.set("mixed_precision", "no", &from)?,
            // What is off here may not be asked for there; the other format is not spoken of.
            (off, other) => {
                let asked = self.raw.values("mixed_precision").concat();
                if (off == Some(false) && asked == "fp16") || (other == Some(false) && asked == "bf16") {
                    let from = if off.is_some() { "fp16.enabled" } else { &from };
                    self.set("mixed_precision", "no", from)?;
                }
            }
        }
        if let Some(fp16) = &fp16 {
            if let Some(scale) = fp16.number("loss_scale", "0 (dynamic) or a number above it", |x| x >= 0.0)? {
                self.set("loss_scale", scale, "fp16.loss_scale")?;
            }
            if let Some(power) = fp16.whole("initial_scale_power", 0)? {
                if power > 32 {
                    return Err(format!("fp16.initial_scale_power is {power}; a power from 0 to 32 was expected"));
                }
                self.set("initial_scale", 1u64 << power, "fp16.initial_scale_power")?;
            }
            if let Some(window) = fp16.whole("loss_scale_window", 1)? {
                self.set("growth_interval", window, "fp16.loss_scale_window")?;
            }
            if let Some(hysteresis) = fp16.whole("hysteresis", 1)? {
                self.set("hysteresis", hysteresis, "fp16.hysteresis")?;
            }
            // Old releases take fractions, such as the 1e-10 of published files.
            if let Some(least) = fp16.number("min_loss_scale", "a number above 0", |x| x > 0.0)? {
                self.set("min_scale", least, "fp16.min_loss_scale")?;
            }
        }
        let types = top.section("data_types", keys::DATA_TYPES, &mut self.unneeded)?;
        match types.as_ref().map(|types| types.word("grad_accum_dtype")).transpose()?.flatten() {
            None => Ok(()),
            Some(dtype @ ("fp32" | "bf16" | "fp16")) => {
                self.set("gradient_dtype", dtype, "data_types.grad_accum_dtype")
            }
            Some(other) => {
                Err(format!("data_types.grad_accum_dtype is \"{other}\"; \"fp32\", \"bf16\" or \"fp16\" was expected"))
            }
        }
    }

    fn optimizer(&mut self, top: &Section) -> Outcome<()> {
        let Some(section) = top.section("optimizer", keys::TYPED, &mut self.unneeded)? else { return Ok(()) };
        let name = section.word("type")?.ok_or("optimizer.type is missing; \"AdamW\" is what is offered")?;
        let adam = name.eq_ignore_ascii_case("adam");
        if !adam && !name.eq_ignore_ascii_case("adamw") {
            return Err(format!("optimizer.type is \"{name}\"; \"AdamW\" is what is offered"));
        }
        self.set("optimizer", "adamw", "optimizer.type")?;
        let Some(params) = section.section("params", keys::ADAM, &mut self.unneeded)? else {
            return self.set_default("lr", DEFAULT_LR, "optimizer.params.lr");
        };
        // AdamW decays its weights apart from the gradient whatever the switch says; Adam only with it.
        if adam && params.switch("adam_w_mode")? == Some(false) {
            return Err("optimizer.params.adam_w_mode is false, which adds the decay to the gradient; AdamW, its \
                        \"adam_w_mode\": true, is what is offered"
                .into());
        }
        if params.switch("bias_correction")? == Some(false) {
            return Err(
                "optimizer.params.bias_correction is false; moments are always corrected here, leave it out".into()
            );
        }
        if let Some(lr) = params.number("lr", "a number above 0", |x| x > 0.0)? {
            self.set("lr", lr, "optimizer.params.lr")?;
        } else if !params.has("lr") {
            self.set_default("lr", DEFAULT_LR, "optimizer.params.lr")?;
        }
        if let Some(eps) = params.number("eps", "a number above 0", |x| x > 0.0)? {
            self.set("eps", eps, "optimizer.params.eps")?;
        }
        if let Some(decay) = params.number("weight_decay", "a number of at least 0", |x| x >= 0.0)? {
            self.set("weight_decay", decay, "optimizer.params.weight_decay")?;
        }
        if let Some(betas) = params.value("betas")? {
            let pair = betas.as_array().map(|pair| pair.iter().filter_map(Value::as_f64).collect::<Vec<_>>());
            let Some(&[first, second]) = pair.as_deref() else {
                return Err(params.wrong("betas", betas, "two numbers, as in [0.9, 0.999],"));
            };
            for (key, beta) in [("adam_beta1", first), ("adam_beta2", second)] {
                if self.raw.is_given(key) {
                    self.set(key, beta, "optimizer.params.betas")?;
                }
            }
            self.set("betas", format!("{first},{second}"), "optimizer.params.betas")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
