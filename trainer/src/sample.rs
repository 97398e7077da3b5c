//! `castor sample`: how a model goes on with a text, to see what it has learnt.
//!
//! Every token is chosen from one evaluation of all tokens so far, on the path that `castor train` evaluates with.
//! Nothing is kept from token to token: simple and correct, not fast. One rank, on any backend and tier.

use crate::auto;
use crate::blueprint;
use crate::checkpoint;
use crate::config::ModelConfig;
use crate::data::Tokenizer;
use crate::engine::{self, Engine};
use crate::error::{Error, Result};
use crate::inputs::MicroBatch;
use crate::rendezvous::World;
use crate::report::log::recorded_tokenizer;
use crate::session::{self, Hardware};
use crate::settings::Settings;
use crate::source::TensorSource;
use crate::weights;
use castor_kernels::{DType, ops::IGNORED, rng};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What is asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// A Hugging Face folder, a GGUF file, a checkpoint, or a run's folder: its latest checkpoint.
    pub model: PathBuf,
    /// The tokenizer; `None`: the model's.
    pub tokenizer: Option<String>,
    /// What the text begins with.
    pub prompt: String,
    /// Tokens after the prompt, at most; EOS ends the text before.
    pub max_new_tokens: usize,
    /// How tokens are chosen.
    pub choice: Choice,
}

/// How a token is chosen from its logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Divides the logits; 0: the likeliest token.
    pub temperature: f64,
    /// Only so many of the likeliest tokens; `None`: all.
    pub top_k: Option<usize>,
    /// Seed of the draws.
    pub seed: u64,
}

impl Choice {
    /// The token for place `step` of the text. Equal logits: the lower id.
    ///
    /// # Errors
    /// If a logit is no number: the model computes nothing sensible.
    pub fn choose(&self, logits: &[f32], step: u64) -> Result<u32> {
        if let Some(id) = logits.iter().position(|logit| !logit.is_finite()) {
            return Err(Error::Failed(format!(
                "the logit of token {id} is {}: the weights are damaged or too large for this precision; try \
                 --mixed_precision no",
                logits[id]
            )));
        }
        let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
        let likelier = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
        if self.temperature == 0.0 {
            return Ok(ids.into_iter().min_by(likelier).unwrap_or(0));
        }
        ids.sort_unstable_by(likelier);
        ids.truncate(self.top_k.unwrap_or(ids.len()).max(1));
        let logit = |id: u32| f64::from(logits[id as usize]) / self.temperature;
        let largest = logit(ids[0]);
        let shares: Vec<f64> = ids.iter().map(|id| (logit(*id) - largest).exp()).collect();
        // 53 bits: uniform on [0, 1).
        let draw = (rng::bits(self.seed, step, lane::SAMPLE) >> 11) as f64 / (1u64 << 53) as f64;
        let mut left = draw * shares.iter().sum::<f64>();
        for (id, share) in ids.iter().zip(&shares) {
            left -= share;
            if left < 0.0 {
                return Ok(*id);
            }
        }
        // The sum's rounding may leave a crumb.
        Ok(ids[ids.len() - 1])
    }
}

/// Prints the prompt and how the model goes on.
///
/// # Errors
/// If the model or its tokenizer is refused, does not fit, or the world below refuses.
pub fn main(settings: &Settings, request: &Request) -> Result<()> {
    let Found { config, source, tokenizer, mut notices } = find(&request.model)?;
    let name = request.tokenizer.clone().or(tokenizer).ok_or_else(|| {
        Error::Usage(format!(
            "{} holds no tokenizer and no run's log says which; give the one it was trained with: --tokenizer FILE, or \
             --tokenizer bytes",
            request.model.display()
        ))
    })?;
    let tokenizer = Tokenizer::open(&name)?;
    tokenizer.check_fits(config.vocab_size)?;
    let mut ids: Vec<u32> = tokenizer.bos().filter(|_| settings.data.bos).into_iter().collect();
    tokenizer.encode(&request.prompt, &mut ids)?;
    if ids.is_empty() {
        return Err(Error::Usage(
            "--prompt is empty and the tokenizer has no BOS: there is nothing to go on from".into(),
        ));
    }
    let length = ids.len() + request.max_new_tokens;
    config.check_window(length as u64, "prompt and --max_new_tokens make")?;
    if length as u64 > config.max_position_embeddings {
        notices.push(format!(
            "prompt and --max_new_tokens make {length} tokens, beyond the model's max_position_embeddings {}",
            config.max_position_embeddings
        ));
    }
    let mut engine = engine(settings, config, length.max(2), &*source, &mut notices)?;
    for notice in settings.notices.iter().chain(&notices) {
        eprintln!("castor: {notice}");
    }
    let mut shown = Shown { text: String::new(), out: std::io::stdout().lock() };
    shown.extend(tokenizer.decode(&ids)?, false)?;
    for step in 0..request.max_new_tokens {
        let next = request.choice.choose(&logits(&mut engine, &ids)?, step as u64)?;
        if Some(next) == tokenizer.eos() {
            break;
        }
        ids.push(next);
        shown.extend(tokenizer.decode(&ids)?, false)?;
    }
    shown.extend(tokenizer.decode(&ids)? + "\n", true)
}

/// A model that was found.
struct Found {
    config: ModelConfig,
    source: Box<dyn TensorSource>,
    /// Where its tokenizer is, if it brings one.
    tokenizer: Option<String>,
    notices: Vec<String>,
}

fn find(path: &Path) -> Result<Found> {
    let holds = |folder: &Path| folder.join("tokenizer.json").is_file().then(|| folder.display().to_string());
    if path.is_file() || weights::is_folder_of_weights(path) {
        let (config, mut notices) = weights::shape(path)?;
        let (source, said) = weights::open(path, &config)?;
        notices.extend(said);
        let tokenizer = if path.is_file() {
            Some(path.display().to_string())
        } else {
            holds(path).or_else(|| recorded_tokenizer(path))
        };
        return Ok(Found { config, source, tokenizer, notices });
    }
    if !path.is_dir() {
        return Err(Error::Usage(format!(
            "{}: is not there; a Hugging Face folder, a GGUF file, a checkpoint or a run's folder was expected",
            path.display()
        )));
    }
    let located = checkpoint::Checkpoint::locate(path);
    let model = path.join("model");
    if located.is_err() && weights::is_folder_of_weights(&model) {
        // A run without checkpoints: what it ended with.
        return find(&model);
    }
    let (checkpoint, mut notices) = located?;
    notices.push(format!("weights of {}", checkpoint.folder().display()));
    let (config, source) = checkpoint::stored(&checkpoint)?;
    // The final model of the run, where there is one, has the tokenizer.
    let run = checkpoint.folder().parent().unwrap_or(path).join("model");
    let tokenizer = holds(&run).or_else(|| recorded_tokenizer(checkpoint.folder()));
    Ok(Found { config, source, tokenizer, notices })
}

/// An engine for rows of `length` tokens that holds the weights of `source`.
fn engine(
    settings: &Settings,
    config: ModelConfig,
    length: usize,
    source: &dyn TensorSource,
    notices: &mut Vec<String>,
) -> Result<Engine> {
    let hardware = Hardware::open(settings, &World::alone())?;
    notices.extend(hardware.notices.iter().cloned());
    let mut options = session::options(settings, config, length as u64, 1, 1, 1);
    // No step will be made: what a step would fill takes as little as there is.
    let parameter = options.formats.parameter;
    options.formats = blueprint::formats(parameter, parameter, DType::Q8);
    options.optimizer = None;
    options.evaluates = true;
    let (blueprint, plan, _) = auto::plan(settings, options, &hardware, 1)?;
    let mut engine = session::engine(Arc::clone(&hardware.backend), &blueprint, plan)?;
    engine.load(source)?;
    Ok(engine)
}

/// Logits of the token after `ids`.
fn logits(engine: &mut Engine, ids: &[u32]) -> Result<Vec<f32>> {
    let length = engine.options().sequence as usize;
    let vocabulary = engine.options().config.vocab_size;
    let place = ids.len() as u64 - 1;
    // What stands after a token does not reach it.
    let mut row: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
    row.resize(length, 0);
    let labels = vec![IGNORED; length];
    let ops = Arc::clone(engine.manager().backend());
    let mut logits = Vec::new();
    engine.observe(&[MicroBatch { ids: &row, labels: &labels, starts: None }], &mut |_, first, view| {
        if (first..first + view.elements() / vocabulary).contains(&place) {
            let view = view.part((place - first) * vocabulary, vocabulary);
            let mut bytes = vec![0; view.span.bytes as usize];
            ops.download(view.span, &mut bytes)?;
            logits = engine::widen(&bytes, view.dtype);
        }
        Ok(())
    })?;
    Ok(logits)
}

/// Text on its way to the terminal: written as it grows.
struct Shown<W> {
    text: String,
    out: W,
}

impl<W: Write> Shown<W> {
    /// Writes what `text` has beyond what was written. Until it `ends`, a character that is not whole yet waits.
    fn extend(&mut self, text: String, ends: bool) -> Result<()> {
        if !ends && text.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(());
        }
        if let Some(more) = text.strip_prefix(&self.text) {
            let written = self.out.write_all(more.as_bytes()).and_then(|()| self.out.flush());
            written.map_err(|error| Error::Failed(format!("the text cannot be written: {error}")))?;
            self.text = text;
        }
        Ok(())
    }
}

/// What the random numbers are for.
mod lane {
    pub const SAMPLE: u64 = 21;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice(temperature: f64, top_k: Option<usize>, seed: u64) -> Choice {
        Choice { temperature, top_k, seed }
    }

    #[test]
    fn the_likeliest_and_the_lower_id() {
        let logits = [0.5, 2.0, -1.0, 2.0];
        assert_eq!(choice(0.0, None, 1).choose(&logits, 0).unwrap(), 1);
        assert_eq!(choice(5.0, Some(1), 1).choose(&logits, 3).unwrap(), 1);
        assert!(choice(0.0, None, 1).choose(&[0.0, f32::NAN], 0).unwrap_err().to_string().contains("token 1 is NaN"));
    }

    /// Draws follow the softmax: each count within five standard deviations of its expectation.
    #[test]
    fn draws_follow_temperature_and_top_k() {
        let logits = [0.0, 1.0, 2.0, 3.0];
        for (temperature, top_k) in [(1.0, None), (0.5, None), (2.0, Some(3)), (1.0, Some(9))] {
            let kept = top_k.unwrap_or(4).min(4);
            let share = |id: usize| if id < 4 - kept { 0.0 } else { (f64::from(logits[id]) / temperature).exp() };
            let total: f64 = (0..4).map(share).sum();
            let draws = 20_000;
            let mut counts = [0.0; 4];
            for step in 0..draws {
                counts[choice(temperature, top_k, 7).choose(&logits, step).unwrap() as usize] += 1.0;
            }
            for (id, count) in counts.into_iter().enumerate() {
                let p = share(id) / total;
                let deviation = (draws as f64 * p * (1.0 - p)).sqrt();
                assert!((count - draws as f64 * p).abs() <= 5.0 * deviation, "{temperature} {top_k:?} {id}: {count}");
            }
        }
        let text =
            |seed| (0..32).map(|step| choice(1.0, None, seed).choose(&logits, step).unwrap()).collect::<Vec<_>>();
        assert_eq!(text(1), text(1));
        assert_ne!(text(1), text(2));
    }

    #[test]
    fn half_a_character_waits_for_its_rest() {
        let mut shown = Shown { text: String::new(), out: Vec::new() };
        for text in ["a", "a\u{FFFD}", "aé", "aéb"] {
            shown.extend(text.into(), false).unwrap();
        }
        shown.extend("aéb\u{FFFD}\n".into(), true).unwrap();
        assert_eq!(String::from_utf8(shown.out).unwrap(), "aéb\u{FFFD}\n");
    }
}
