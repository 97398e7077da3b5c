//! The optimizer's kernels: one program for each combination of storage formats (see update.cu).

use super::Ptr;
use super::launch::{Launcher, aligned, real};
use super::modules::{Argument, Extent, arguments};
use super::programs::{Formula, Master, Program};
use crate::ops::Update;
use crate::{DType, Error, Result};
use cudarc::driver::sys::CUstream;

/// `Rule` of update.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct Rule {
    lr: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    weight_decay: f32,
    inv_bias1: f32,
    inv_bias2: f32,
    rho: f32,
}
// SAFETY: eight floats in the order of update.cu's Rule.
unsafe impl Argument for Rule {}

/// Elements of a block: 256 threads with eight each.
const BLOCK: u64 = 256 * 8;

fn unsupported(what: String, instead: &str) -> Error {
    Error::Unsupported { what, backend: "cuda", instead: instead.into() }
}

fn moment(dtype: DType) -> Result<DType> {
    match dtype {
        DType::F32 | DType::Bf16 | DType::Q8 => Ok(dtype),
        other => Err(unsupported(format!("a moment in {other:?}"), "f32, bf16 or 8-bit blockwise")),
    }
}

impl Launcher {
    /// The views of [`crate::ops::State`], all on the device.
    pub(crate) fn update(
        &self,
        stream: CUstream,
        update: Update,
        parameter: Ptr,
        gradient: Ptr,
        master: Option<Ptr>,
        first: Ptr,
        second: Ptr,
        decayed: u64,
        seed: u64,
        first_element: u64,
        control: Ptr,
    ) -> Result<()> {
        let storage = match (parameter.dtype, master.map(|master| master.dtype)) {
            (DType::F32, None) => Master::Own,
            (DType::Bf16, Some(DType::F32)) => Master::Bf16,
            (DType::Bf16, Some(DType::Rem16)) => Master::Split,
            (DType::F16, Some(DType::F32)) => Master::F16,
            (parameter, master) => {
                return Err(unsupported(
                    format!("{parameter:?} parameters with master {master:?}"),
                    "f32 without a master, bf16 with an f32 or Rem16 master, f16 with an f32 master",
                ));
            }
        };
        let (formula, rule) = match update {
            Update::AdamW(h) => (
                Formula::AdamW,
                Rule {
                    lr: h.lr,
                    beta1: h.beta1,
                    beta2: h.beta2,
                    eps: h.eps,
                    weight_decay: h.weight_decay,
                    inv_bias1: h.inv_bias1,
                    inv_bias2: h.inv_bias2,
                    rho: 0.0,
                },
            ),
            Update::Sophia(h) => (
                Formula::Sophia,
                Rule {
                    lr: h.lr,
                    beta1: h.beta1,
                    beta2: 0.0,
                    eps: 0.0,
                    weight_decay: h.weight_decay,
                    inv_bias1: 0.0,
                    inv_bias2: 0.0,
                    rho: h.rho,
                },
            ),
        };
        let program =
            Program::Update(storage, real(gradient.dtype)?, moment(first.dtype)?, moment(second.dtype)?, formula);
        let total = parameter.elements;
        // Without a master its address is never used; the parameter's stands for it.
        let master = master.unwrap_or(parameter);
        let wide = u64::from(aligned(&[parameter, gradient, master, first, second]));
        // SAFETY: update(parameter, gradient, master, first, second, total, aligned, decayed, seed,
        // first_element, rule, control).
        unsafe {
            self.modules.launch(
                stream,
                program,
                "update",
                Extent::row(total.div_ceil(BLOCK), 256),
                arguments![
                    parameter.address,
                    gradient.address,
                    master.address,
                    first.address,
                    second.address,
                    total,
                    wide,
                    decayed,
                    seed,
                    first_element,
                    rule,
                    control.address
                ],
            )
        }
    }

    pub(crate) fn hessian(
        &self,
        stream: CUstream,
        gradient: Ptr,
        hessian: Ptr,
        beta2: f32,
        tokens: f32,
        inverse_loss_scale: f32,
        control: Ptr,
    ) -> Result<()> {
        let program = Program::Hessian(real(gradient.dtype)?, moment(hessian.dtype)?);
        let total = gradient.elements;
        let wide = u64::from(aligned(&[gradient, hessian]));
        // SAFETY: hessian(gradient, estimate, total, aligned, beta2, tokens, inverse_loss_scale, control).
        unsafe {
            self.modules.launch(
                stream,
                program,
                "hessian",
                Extent::row(total.div_ceil(BLOCK), 256),
                arguments![
                    gradient.address,
                    hessian.address,
                    total,
                    wide,
                    beta2,
                    tokens,
                    inverse_loss_scale,
                    control.address
                ],
            )
        }
    }
}
