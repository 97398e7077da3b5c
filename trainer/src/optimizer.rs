//! The optimizers' constants, and the update of each step made from them.
//!
//! The arithmetic of an element is the kernels' ([`castor_kernels::numeric`]); here is what changes from step
//! to step: rate, bias corrections, and when Sophia's Hessian is estimated.

use castor_kernels::ops::{self, Update};
use serde::{Deserialize, Serialize};

/// Which optimizer, with its constants.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "lowercase")]
pub enum Optimizer {
    /// AdamW with decoupled weight decay on matrices.
    AdamW {
        /// β1
        beta1: f64,
        /// β2
        beta2: f64,
        /// ε
        eps: f64,
        /// Weight decay of matrices.
        weight_decay: f64,
    },
    /// Sophia-G: sign-like steps bounded by a diagonal Gauss-Newton-Bartlett estimate.
    Sophia {
        /// β1
        beta1: f64,
        /// β2 of the Hessian estimate.
        beta2: f64,
        /// ρ
        rho: f64,
        /// Weight decay of matrices.
        weight_decay: f64,
        /// Steps between two estimates.
        every: u64,
    },
}

/// Which norm gradients are clipped by.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Clip {
    /// Their own: an update waits until all gradients of its step are known.
    Exact,
    /// The last step's, in place of their own: inexact, but a gradient is used and gone as soon as it is final. The first
    /// step is not clipped. Where a gradient is not finite its own group is not updated, and the others may be.
    Lagged,
}

impl Clip {
    /// What every report says of it, if results are not those of clipping by a step's own norm. `clips`: whether there is
    /// a norm to clip to.
    pub const fn inexact(self, clips: bool) -> Option<&'static str> {
        match (self, clips) {
            (Clip::Exact, _) => None,
            (Clip::Lagged, true) => Some("gradients are clipped by the norm of the step before (--clip lagged)"),
            (Clip::Lagged, false) => {
                Some("where a gradient is not finite, only its own group is not updated (--clip lagged)")
            }
        }
    }
}

impl Optimizer {
    /// The update with learning rate `lr` after `applied` updates were made.
    pub fn update(&self, lr: f64, applied: u64) -> Update {
        match *self {
            Optimizer::AdamW { beta1, beta2, eps, weight_decay } => Update::AdamW(ops::AdamW {
                lr: lr as f32,
                beta1: beta1 as f32,
                beta2: beta2 as f32,
                eps: eps as f32,
                weight_decay: weight_decay as f32,
                inv_bias1: inverse_bias(beta1, applied + 1),
                inv_bias2: inverse_bias(beta2, applied + 1),
            }),
            Optimizer::Sophia { beta1, rho, weight_decay, .. } => Update::Sophia(ops::Sophia {
                lr: lr as f32,
                beta1: beta1 as f32,
                rho: rho as f32,
                weight_decay: weight_decay as f32,
            }),
        }
    }

    /// β2 of the Hessian estimate if one is due before the update of step `step` (from 0).
    pub fn estimates_at(&self, step: u64) -> Option<f32> {
        match *self {
            Optimizer::Sophia { beta2, every, .. } if step.is_multiple_of(every.max(1)) => Some(beta2 as f32),
            _ => None,
        }
    }

    /// Whether it ever estimates a Hessian.
    pub const fn estimates(&self) -> bool {
        matches!(self, Optimizer::Sophia { .. })
    }
}

/// 1/(1−β^count) for the f32 β that the update computes with: 0.999 is not an f32, and a correction for another
/// β than the moment's own would be off by 5·10⁻⁵ in the first steps.
fn inverse_bias(beta: f64, count: u64) -> f32 {
    let power = f64::from(beta as f32).powi(i32::try_from(count).unwrap_or(i32::MAX));
    (1.0 / (1.0 - power)) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bias_corrections_follow_the_updates_made() {
        let adamw = Optimizer::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
        let Update::AdamW(first) = adamw.update(1e-3, 0) else { panic!("not AdamW") };
        assert!((first.inv_bias1 - 10.0).abs() < 1e-4 && (first.inv_bias2 - 20.0).abs() < 1e-4);
        let Update::AdamW(late) = adamw.update(1e-3, u64::MAX / 2) else { panic!("not AdamW") };
        assert_eq!((late.inv_bias1, late.inv_bias2), (1.0, 1.0));
        assert_eq!(adamw.estimates_at(0), None);
        let second_moment = (1.0 - first.beta2) * first.inv_bias2;
        assert!((second_moment - 1.0).abs() < 2e-7, "the first moment is the gradient itself");
    }

    #[test]
    fn sophia_estimates_every_k_steps_from_the_first() {
        let sophia = Optimizer::Sophia { beta1: 0.965, beta2: 0.99, rho: 0.04, weight_decay: 0.1, every: 2 };
        let due: Vec<bool> = (0..4).map(|s| sophia.estimates_at(s).is_some()).collect();
        assert_eq!(due, [true, false, true, false]);
    }
}
