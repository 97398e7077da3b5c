//! The loss scale: what the loss is multiplied by so that fp16 gradients neither vanish nor overflow.
//!
//! Dynamic for fp16, fixed at 1 otherwise. It is fed one verdict per step (were the gradient norm and the loss finite?)
//! and also decides when a run that gets nowhere must stop.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Constants of the dynamic scale.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Dynamic {
    /// First scale.
    pub initial: f32,
    /// Clean steps after which it doubles.
    pub window: u32,
    /// Overflows that are forgiven before it halves.
    pub hysteresis: u32,
    /// It never falls below.
    pub floor: f32,
    /// It never rises above.
    pub ceiling: f32,
}

impl Default for Dynamic {
    fn default() -> Self {
        Dynamic { initial: 65_536.0, window: 1000, hysteresis: 2, floor: 1.0, ceiling: 4_294_967_296.0 }
    }
}

/// Steps in a row after which a run stops where a smaller scale cannot help: the loss, which the scale does not touch, is
/// not finite, or the norm is not and the scale cannot fall any further.
pub const PATIENCE: u32 = 10;

/// Steps in a row without a finite norm after which a run stops, wherever the scale is. From the usual largest scale to
/// the smallest it takes a third of it.
pub const LONGEST: u32 = 100;

/// The scale and what it remembers.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct LossScale {
    dynamic: Option<Dynamic>,
    scale: f32,
    clean: u32,
    forgiven: u32,
    /// Steps in a row whose norm was not finite with a scale that could not fall. The name is that of checkpoints.
    #[serde(rename = "skipped_in_a_row")]
    at_floor: u32,
    /// Steps in a row whose norm was not finite.
    #[serde(default)]
    skipped: u32,
    /// Steps in a row whose loss was not finite.
    #[serde(default)]
    lost: u32,
}

impl LossScale {
    /// Dynamic with these constants, or fixed at 1.
    pub fn new(dynamic: Option<Dynamic>) -> Self {
        let scale = dynamic.map_or(1.0, |d| d.initial);
        LossScale { dynamic, scale, clean: 0, forgiven: 0, at_floor: 0, skipped: 0, lost: 0 }
    }

    /// The scale of the next step.
    pub const fn scale(&self) -> f32 {
        self.scale
    }

    /// How many of the last steps, in a row, cast doubt on the weights: the loss was not finite, or the norm was not with
    /// no scale to blame.
    pub const fn doubtful(&self) -> u32 {
        if self.dynamic.is_none() && self.skipped > self.lost { self.skipped } else { self.lost }
    }

    /// Learns whether a step's gradient norm and its loss were finite.
    ///
    /// # Errors
    /// If the run gets nowhere: see [`PATIENCE`] and [`LONGEST`].
    pub fn learn(&mut self, norm_is_finite: bool, loss_is_finite: bool) -> Result<()> {
        self.lost = if loss_is_finite { 0 } else { self.lost + 1 };
        if norm_is_finite {
            (self.at_floor, self.skipped) = (0, 0);
            self.clean += 1;
            if let Some(d) = self.dynamic
                && self.clean >= d.window
            {
                self.scale = (self.scale * 2.0).min(d.ceiling);
                self.clean = 0;
                self.forgiven = 0;
            }
        } else {
            self.clean = 0;
            self.skipped += 1;
            let floor = self.dynamic.map_or(self.scale, |d| d.floor);
            self.at_floor = if self.scale <= floor { self.at_floor + 1 } else { 0 };
            if let Some(d) = self.dynamic {
                self.forgiven += 1;
                if self.forgiven >= d.hysteresis {
                    self.scale = (self.scale * 0.5).max(d.floor);
                }
            }
        }
        match self.lost >= PATIENCE || self.at_floor >= PATIENCE || self.skipped >= LONGEST {
            true => Err(self.gives_up()),
            false => Ok(()),
        }
    }

    fn gives_up(&self) -> Error {
        let (what, steps, cause) = match self.dynamic {
            _ if self.lost >= PATIENCE => ("loss", PATIENCE, String::new()),
            _ if self.at_floor < PATIENCE => {
                ("gradient norm", LONGEST, format!(", with a loss scale still at {:e}", self.scale))
            }
            Some(_) => ("gradient norm", PATIENCE, format!(", with the loss scale at its minimum of {:e}", self.scale)),
            None => ("gradient norm", PATIENCE, String::new()),
        };
        Error::Failed(format!(
            "the {what} of the last {steps} steps was not finite{cause}: where the norm is not finite an update is \
             skipped, and the run gets nowhere; lower --lr, check the data and the weights for NaN, or use \
             --mixed_precision bf16"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small() -> LossScale {
        LossScale::new(Some(Dynamic { initial: 8.0, window: 3, floor: 2.0, ..Dynamic::default() }))
    }

    /// Steps that `step` takes before it gives up, and why it does.
    fn until_it_stops(mut step: impl FnMut() -> Result<()>) -> (u32, String) {
        let mut steps = 0;
        loop {
            match step() {
                Ok(()) => steps += 1,
                Err(error) => return (steps, error.to_string()),
            }
        }
    }

    #[test]
    fn first_overflow_is_forgiven_then_each_halves_until_clean_steps_double() {
        let mut scale = small();
        scale.learn(false, true).unwrap();
        assert_eq!(scale.scale(), 8.0);
        scale.learn(false, true).unwrap();
        assert_eq!(scale.scale(), 4.0);
        scale.learn(false, true).unwrap();
        assert_eq!(scale.scale(), 2.0);
        for _ in 0..3 {
            assert_eq!(scale.scale(), 2.0);
            scale.learn(true, true).unwrap();
        }
        assert_eq!(scale.scale(), 4.0);
        scale.learn(false, true).unwrap();
        assert_eq!(scale.scale(), 4.0, "hysteresis is renewed with the growth");
    }

    #[test]
    fn a_run_that_only_skips_stops_with_a_reason() {
        let mut scale = small();
        let (steps, said) = until_it_stops(|| scale.learn(false, true));
        assert_eq!(steps, 3 + PATIENCE - 1);
        assert!(said.contains("last 10 steps") && said.contains("at its minimum of 2e0"), "{said}");
        let mut fixed = LossScale::new(None);
        let (steps, said) = until_it_stops(|| fixed.learn(false, true));
        assert_eq!((steps, fixed.scale()), (PATIENCE - 1, 1.0));
        assert!(!said.contains("loss scale"), "{said}");
        assert_eq!(fixed.doubtful(), PATIENCE);
        // A scale that has far to fall is not waited for.
        let dynamic = Dynamic { initial: 1e38, ceiling: 1e38, ..Dynamic::default() };
        let mut absurd = LossScale::new(Some(dynamic));
        let (steps, said) = until_it_stops(|| absurd.learn(false, true));
        assert_eq!(steps, LONGEST - 1);
        assert!(said.contains("last 100 steps"), "{said}");
        // The usual one is.
        let mut usual = LossScale::new(Some(Dynamic { initial: Dynamic::default().ceiling, ..Dynamic::default() }));
        while usual.scale() > 1.0 {
            usual.learn(false, true).unwrap();
        }
    }

    /// A smaller scale makes no loss finite: it is not waited for. One finite loss and the count begins anew.
    #[test]
    fn a_loss_that_is_lost_stops_the_run_at_any_scale() {
        let mut scale = LossScale::new(Some(Dynamic::default()));
        for _ in 0..PATIENCE - 1 {
            scale.learn(false, false).unwrap();
        }
        assert_eq!(scale.doubtful(), PATIENCE - 1);
        scale.learn(true, true).unwrap();
        assert_eq!(scale.doubtful(), 0);
        scale.learn(false, true).unwrap();
        assert_eq!(scale.doubtful(), 0, "the scale is to blame");
        let (steps, said) = until_it_stops(|| scale.learn(false, false));
        assert_eq!(steps, PATIENCE - 1);
        assert!(said.contains("the loss of the last 10 steps was not finite"), "{said}");
        let mut updated = LossScale::new(None);
        assert_eq!(until_it_stops(|| updated.learn(true, false)).0, PATIENCE - 1);
    }

    /// Checkpoints from before the later counts go on.
    #[test]
    fn a_checkpoint_without_the_counts() {
        let old = r#"{"dynamic":null,"scale":1.0,"clean":4,"forgiven":0,"skipped_in_a_row":3}"#;
        let scale: LossScale = serde_json::from_str(old).unwrap();
        assert_eq!((scale.at_floor, scale.doubtful(), scale.clean), (3, 0, 4));
    }
}
