//! What is seen while the run trains: a bar on a terminal, plain lines elsewhere.

use std::collections::{BTreeMap, VecDeque};
use std::io::{IsTerminal, Write};

use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};

use super::style;

/// Steps left out of the rate: they build caches and measure.
const FIRST_STEPS: u64 = 2;
/// Steps over which the rate is taken.
const WINDOW: usize = 20;

/// One optimizer step, as shown and as logged.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Counted from 1 over the whole run.
    pub step: u64,
    /// Epochs passed after this step.
    pub epoch: f64,
    /// Mean loss over the tokens that count, over all ranks. `null` in the file if it is not finite.
    #[serde(deserialize_with = "finite_or_nan")]
    pub loss: f64,
    /// Global gradient norm before clipping. `null` in the file if it is not finite.
    #[serde(deserialize_with = "finite_or_nan")]
    pub grad_norm: f64,
    /// Learning rate of this step's update.
    pub learning_rate: f64,
    /// Tokens of all micro-steps over all ranks.
    pub tokens: u64,
    /// Those of them that count in the loss.
    pub counted_tokens: u64,
    /// Wall time of the step.
    pub seconds: f64,
    /// Whether the update was left out: the norm was not finite, or no token counted.
    pub skipped: bool,
    /// Most bytes used in device memory during the step.
    pub device_bytes: u64,
    /// The same for host memory.
    pub host_bytes: u64,
    /// The same for NVMe.
    pub nvme_bytes: u64,
    /// Bytes moved in this step, by link.
    pub moved_bytes: BTreeMap<String, u64>,
}

pub(super) fn finite_or_nan<'de, D: serde::Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(from)?.unwrap_or(f64::NAN))
}

/// What each tier may use, in bytes; 0 means that the tier is not used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Budgets {
    /// Device memory.
    pub device: u64,
    /// Host memory.
    pub host: u64,
    /// NVMe.
    pub nvme: u64,
}

/// Tokens per second over the last steps; the first steps of a session never count.
#[derive(Clone, Debug, Default)]
pub struct Rate {
    seen: u64,
    window: VecDeque<(u64, f64)>,
}

impl Rate {
    /// Adds a step: its tokens over all micro-steps and ranks, and its wall time.
    pub fn push(&mut self, tokens: u64, seconds: f64) {
        self.seen += 1;
        if self.seen > FIRST_STEPS {
            if self.window.len() == WINDOW {
                self.window.pop_front();
            }
            self.window.push_back((tokens, seconds));
        }
    }

    /// Tokens per second; none before the first steady step.
    pub fn tokens_per_second(&self) -> Option<f64> {
        let tokens: u64 = self.window.iter().map(|(tokens, _)| tokens).sum();
        let seconds = self.seconds();
        (seconds > 0.0).then(|| tokens as f64 / seconds)
    }

    /// Seconds per step; none before the first steady step.
    pub fn seconds_per_step(&self) -> Option<f64> {
        let seconds = self.seconds();
        (seconds > 0.0).then(|| seconds / self.window.len() as f64)
    }

    fn seconds(&self) -> f64 {
        self.window.iter().map(|(_, seconds)| seconds).sum()
    }
}

/// Where the progress goes.
enum Place {
    Bar(ProgressBar),
    Lines { every: u64 },
    Nowhere,
}

/// Shows a run's steps.
pub struct Progress {
    place: Place,
    rate: Rate,
    total_steps: u64,
    budgets: Budgets,
}

impl Progress {
    /// Rank 0's: a bar if standard error is a terminal, else a line each `logging_steps` steps and at the last.
    /// `done` steps of `total_steps` were trained by earlier sessions.
    pub fn start(total_steps: u64, done: u64, logging_steps: u64, budgets: Budgets) -> Progress {
        let place = if std::io::stderr().is_terminal() {
            let bar = ProgressBar::new(total_steps);
            let style = ProgressStyle::with_template("{wide_bar:.cyan/dim} {pos}/{len}\n{msg}")
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            bar.set_style(style.progress_chars("━╸─"));
            bar.set_position(done);
            Place::Bar(bar)
        } else {
            Place::Lines { every: logging_steps.max(1) }
        };
        Progress { place, rate: Rate::default(), total_steps, budgets }
    }

    /// The other ranks': shows nothing, keeps the rate.
    pub fn quiet(total_steps: u64) -> Progress {
        Progress { place: Place::Nowhere, rate: Rate::default(), total_steps, budgets: Budgets::default() }
    }

    /// The run goes on by another plan or other budgets: the rate is taken anew, without the first steps.
    pub fn go_on(&mut self, budgets: Budgets) {
        (self.rate, self.budgets) = (Rate::default(), budgets);
    }

    /// The rate so far.
    pub fn rate(&self) -> &Rate {
        &self.rate
    }

    /// Shows a step.
    pub fn step(&mut self, record: &StepRecord) {
        self.rate.push(record.tokens, record.seconds);
        match &self.place {
            Place::Bar(bar) => {
                bar.set_position(record.step);
                bar.set_message(self.line(record));
            }
            Place::Lines { every } => {
                if record.step.is_multiple_of(*every) || record.step == self.total_steps {
                    let line = format!("step {}/{} · {}\n", record.step, self.total_steps, self.line(record));
                    // Progress that nobody can read any more is no reason to stop training.
                    let _ = std::io::stderr().lock().write_all(line.as_bytes());
                }
            }
            Place::Nowhere => {}
        }
    }

    /// Prints a line above the bar.
    pub fn say(&self, line: &str) {
        match &self.place {
            Place::Bar(bar) => bar.suspend(|| {
                let _ = writeln!(std::io::stdout().lock(), "{line}");
            }),
            Place::Lines { .. } => {
                let _ = writeln!(std::io::stdout().lock(), "{line}");
            }
            Place::Nowhere => {}
        }
    }

    /// Leaves the last state on the screen.
    pub fn finish(&self) {
        if let Place::Bar(bar) = &self.place {
            bar.abandon();
        }
    }

    fn line(&self, record: &StepRecord) -> String {
        let mut parts = vec![
            format!("epoch {:.2}", record.epoch),
            format!("loss {:.4}", record.loss),
            format!("grad norm {:.4}", record.grad_norm),
            format!("lr {:.2e}", record.learning_rate),
        ];
        if record.skipped {
            let why = if record.counted_tokens == 0 { "no token counts" } else { "the norm is not finite" };
            parts.push(format!("update skipped: {why}"));
        }
        if let Some(rate) = self.rate.tokens_per_second() {
            parts.push(format!("{rate:.0} tokens/s"));
        }
        for (tier, used, budget) in [
            ("device", record.device_bytes, self.budgets.device),
            ("host", record.host_bytes, self.budgets.host),
            ("nvme", record.nvme_bytes, self.budgets.nvme),
        ] {
            if budget > 0 {
                parts.push(format!("{tier} {}/{} MiB", style::mib(used), style::mib(budget)));
            }
        }
        let left = self.total_steps.saturating_sub(record.step);
        if let Some(seconds) = self.rate.seconds_per_step().filter(|_| left > 0) {
            parts.push(format!("{} left", style::clock(seconds * left as f64)));
        }
        parts.join(" · ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_first_step_does_not_touch_the_rate_and_a_steady_one_stays() {
        let mut rate = Rate::default();
        rate.push(100, 50.0);
        assert_eq!(rate.tokens_per_second(), None);
        rate.push(100, 1.0);
        for _ in 0..100 {
            rate.push(100, 0.5);
            assert_eq!(rate.tokens_per_second(), Some(200.0));
        }
    }

    #[test]
    fn the_window_forgets() {
        let mut rate = Rate::default();
        for _ in 0..30 {
            rate.push(100, 1.0);
        }
        for _ in 0..WINDOW {
            rate.push(100, 0.5);
        }
        assert_eq!(rate.tokens_per_second(), Some(200.0));
    }

    #[test]
    fn a_line_names_everything() {
        let budgets = Budgets { device: 128 << 20, host: 1 << 30, nvme: 0 };
        let mut progress = Progress { place: Place::Nowhere, rate: Rate::default(), total_steps: 10, budgets };
        let record = StepRecord {
            step: 4,
            epoch: 0.4,
            loss: 4.2717,
            grad_norm: 1.07,
            learning_rate: 2e-5,
            tokens: 300,
            seconds: 2.0,
            device_bytes: 100 << 20,
            host_bytes: 5 << 20,
            ..StepRecord::default()
        };
        for _ in 0..3 {
            progress.step(&record);
        }
        assert_eq!(
            progress.line(&record),
            "epoch 0.40 · loss 4.2717 · grad norm 1.0700 · lr 2.00e-5 · 150 tokens/s · device 100.0/128.0 MiB · host 5.0/1,024.0 MiB · 0:00:12 left"
        );
    }
}
