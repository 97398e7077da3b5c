//! The loss scale: what the loss is multiplied by so that fp16 gradients neither vanish nor overflow.
//!
//! Dynamic for fp16, fixed at 1 otherwise. It is fed one verdict per step (was the gradient norm finite?) and
//! also decides when a run that only skips must stop.

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

/// Steps in a row without a finite norm after which a run stops, where the scale cannot fall any further.
pub const PATIENCE: u32 = 10;

/// The scale and what it remembers.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct LossScale {
    dynamic: Option<Dynamic>,
    scale: f32,
    clean: u32,
    forgiven: u32,
    skipped_in_a_row: u32,
}

impl LossScale {
    /// Dynamic with these constants, or fixed at 1.
    pub fn new(dynamic: Option<Dynamic>) -> Self {
        LossScale { dynamic, scale: dynamic.map_or(1.0, |d| d.initial), clean: 0, forgiven: 0, skipped_in_a_row: 0 }
    }

    /// The scale of the next step.
    pub const fn scale(&self) -> f32 {
        self.scale
    }

    /// Learns whether a step's gradient norm was finite.
    ///
    /// # Errors
    /// If the run only skips: the scale is at its floor (or fixed) and the last [`PATIENCE`] steps were not finite.
    pub fn learn(&mut self, finite: bool) -> Result<()> {
        if finite {
            self.skipped_in_a_row = 0;
            self.clean += 1;
            if let Some(d) = self.dynamic
                && self.clean >= d.window
            {
                self.scale = (self.scale * 2.0).min(d.ceiling);
                self.clean = 0;
                self.forgiven = 0;
            }
            return Ok(());
        }
        self.clean = 0;
        let floor = self.dynamic.map_or(self.scale, |d| d.floor);
        if self.scale <= floor {
            self.skipped_in_a_row += 1;
            if self.skipped_in_a_row >= PATIENCE {
                return Err(self.gives_up());
            }
        }
        if let Some(d) = self.dynamic {
            self.forgiven += 1;
            if self.forgiven >= d.hysteresis {
                self.scale = (self.scale * 0.5).max(d.floor);
            }
        }
        Ok(())
    }

    fn gives_up(&self) -> Error {
        let cause = if self.dynamic.is_some() {
            format!("with the loss scale at its floor of {}", self.scale)
        } else {
            "without a loss scale that could fall".to_string()
        };
        Error::Failed(format!(
            "the gradient norm of the last {PATIENCE} steps was not finite, {cause}: every update is being \
             skipped; lower --lr, check the data and the weights for NaN, or use --mixed_precision bf16"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small() -> LossScale {
        LossScale::new(Some(Dynamic { initial: 8.0, window: 3, floor: 2.0, ..Dynamic::default() }))
    }

    #[test]
    fn first_overflow_is_forgiven_then_each_halves_until_clean_steps_double() {
        let mut scale = small();
        scale.learn(false).unwrap();
        assert_eq!(scale.scale(), 8.0);
        scale.learn(false).unwrap();
        assert_eq!(scale.scale(), 4.0);
        scale.learn(false).unwrap();
        assert_eq!(scale.scale(), 2.0);
        for _ in 0..3 {
            assert_eq!(scale.scale(), 2.0);
            scale.learn(true).unwrap();
        }
        assert_eq!(scale.scale(), 4.0);
        scale.learn(false).unwrap();
        assert_eq!(scale.scale(), 4.0, "hysteresis is renewed with the growth");
    }

    #[test]
    fn a_run_that_only_skips_stops_with_a_reason() {
        let mut scale = small();
        let steps = (0..100).take_while(|_| scale.learn(false).is_ok()).count();
        assert_eq!(steps as u32, 3 + PATIENCE - 1);
        assert!(scale.learn(false).unwrap_err().to_string().contains("floor"));
        let mut fixed = LossScale::new(None);
        let steps = (0..100).take_while(|_| fixed.learn(false).is_ok()).count();
        assert_eq!((steps as u32, fixed.scale()), (PATIENCE - 1, 1.0));
    }
}
