//! The learning rate of each step, in the conventions that people compare with.
//!
//! The conventions are named after where they come from; they differ in the first steps and in the last.
//! The schedule counts steps, skipped ones included, so that its end is the run's end.

use serde::{Deserialize, Serialize};

/// How the rate falls after the warm-up.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// It does not.
    Constant,
    /// Along a line.
    Linear,
    /// Along half a cosine.
    Cosine,
}

/// Whose arithmetic of warm-up and end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Convention {
    /// Warm-up `step/warmup`: the first rate is 0.
    HuggingFace,
    /// Warm-up `(step+1)/warmup`.
    ColossalAi,
    /// Warm-up `log(step)/log(warmup)`; the first two rates are 0.
    DeepSpeedLog,
    /// Warm-up `(step-1)/warmup`; the first two rates are 0.
    DeepSpeedLinear,
}

/// A learning-rate schedule.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Schedule {
    /// Rate after the warm-up.
    pub base: f64,
    /// Shape of the decay.
    pub decay: Decay,
    /// Whose arithmetic.
    pub convention: Convention,
    /// Rate at the end, as a part of the base rate (Hugging Face: 0; the published ColossalAI scripts: 0.1).
    pub min_ratio: f64,
    /// Steps of warm-up.
    pub warmup: u64,
    /// Steps of the whole run.
    pub total: u64,
}

impl Schedule {
    /// Rate of step `step`, counted from 0.
    pub fn at(&self, step: u64) -> f64 {
        let deep_speed = matches!(self.convention, Convention::DeepSpeedLog | Convention::DeepSpeedLinear);
        // DeepSpeed counts a step when it is over, and does not warm up in fewer than two.
        let warmup = if deep_speed { self.warmup.max(2) } else { self.warmup };
        let counted = if deep_speed { step.saturating_sub(1) } else { step };
        if counted < warmup {
            let part = match self.convention {
                Convention::HuggingFace | Convention::DeepSpeedLinear => counted as f64 / warmup as f64,
                Convention::ColossalAi => (counted + 1) as f64 / warmup as f64,
                Convention::DeepSpeedLog => ((counted + 1) as f64).ln() / (warmup as f64).ln(),
            };
            return self.base * part;
        }
        let span = self.total.saturating_sub(warmup).max(1) as f64;
        // Its cosine, unlike its line, has gone a step further.
        let counted = if self.decay == Decay::Cosine { step } else { counted };
        let progress = ((counted - warmup) as f64 / span).min(1.0);
        let left = match self.decay {
            Decay::Constant => return self.base,
            Decay::Linear => 1.0 - progress,
            Decay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
        };
        self.base * (self.min_ratio + (1.0 - self.min_ratio) * left)
    }
}

/// Steps of warm-up: `steps` where it is above 0, else `ratio` of the total, rounded up.
pub fn warmup_steps(steps: u64, ratio: f64, total: u64) -> u64 {
    if steps > 0 { steps } else { (total as f64 * ratio).ceil() as u64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cosine(base: f64, warmup: u64, total: u64) -> Schedule {
        Schedule { base, decay: Decay::Cosine, convention: Convention::HuggingFace, min_ratio: 0.0, warmup, total }
    }

    /// To as many digits as the reference printed.
    fn close(value: f64, expected: f64) {
        assert!((value - expected).abs() <= expected.abs() * 1e-3 + 1e-12, "{value} is not {expected}");
    }

    #[test]
    fn hugging_face_rates_of_a_short_run() {
        let warmup = warmup_steps(0, 0.05, 6);
        assert_eq!(warmup, 1);
        let schedule = cosine(2e-5, warmup, 6);
        let logged = [0.0, 2e-5, 1.809e-5, 1.309e-5, 6.910e-6, 1.910e-6];
        for (step, expected) in logged.into_iter().enumerate() {
            close(schedule.at(step as u64), expected);
        }
    }

    #[test]
    fn hugging_face_rates_of_a_longer_run() {
        let schedule = cosine(2e-5, 5, 100);
        for (step, expected) in [(0, 0.0), (1, 4e-6), (4, 1.6e-5), (5, 2e-5), (50, 1.08258e-5), (99, 5.467e-9)] {
            close(schedule.at(step), expected);
        }
    }

    #[test]
    fn colossal_ai_starts_above_zero_and_ends_at_a_tenth() {
        let schedule = Schedule { convention: Convention::ColossalAi, min_ratio: 0.1, ..cosine(3e-4, 2, 10) };
        close(schedule.at(0), 1.5e-4);
        close(schedule.at(1), 3e-4);
        close(schedule.at(2), 3e-4);
        close(schedule.at(6), 3e-4 * 0.55);
        close(schedule.at(10), 3e-5);
        close(schedule.at(1000), 3e-5);
    }

    /// By the rules of DeepSpeed's WarmupLR, WarmupDecayLR and WarmupCosineLR, whose iteration is the step before.
    #[test]
    fn deep_speed_counts_a_step_when_it_is_over() {
        let log = Schedule { convention: Convention::DeepSpeedLog, decay: Decay::Constant, ..cosine(1.0, 8, 100) };
        for (step, expected) in [(0, 0.0), (1, 0.0), (2, 1.0 / 3.0), (4, 2.0 / 3.0), (8, 1.0), (9, 1.0), (99, 1.0)] {
            close(log.at(step), expected);
        }
        let line = Schedule { convention: Convention::DeepSpeedLinear, decay: Decay::Linear, ..cosine(1.0, 4, 12) };
        for (step, expected) in [(0, 0.0), (1, 0.0), (2, 0.25), (4, 0.75), (5, 1.0), (9, 0.5), (13, 0.0)] {
            close(line.at(step), expected);
        }
        let cos = Schedule { decay: Decay::Cosine, min_ratio: 1e-4, ..line };
        for (step, expected) in [(4, 0.75), (5, 1e-4 + 0.9999 * 0.961_939_766), (8, 0.500_05), (12, 1e-4)] {
            close(cos.at(step), expected);
        }
    }

    #[test]
    fn constant_and_linear() {
        let linear = Schedule { decay: Decay::Linear, ..cosine(1.0, 2, 6) };
        close(linear.at(1), 0.5);
        close(linear.at(4), 0.5);
        close(linear.at(6), 0.0);
        let constant = Schedule { decay: Decay::Constant, ..linear };
        close(constant.at(5), 1.0);
    }

    #[test]
    fn steps_win_over_the_ratio_and_the_ratio_rounds_up() {
        assert_eq!(warmup_steps(2, 0.05, 100), 2);
        assert_eq!(warmup_steps(0, 0.05, 101), 6);
        assert_eq!(warmup_steps(0, 0.0, 101), 0);
    }
}
