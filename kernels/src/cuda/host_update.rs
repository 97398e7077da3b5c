//! Optimizer arithmetic on states that lie in host memory: the CPU backend's, on raw spans.
//!
//! Done by the host engine's thread beside the CUDA streams, so that it hides under the device's work.

use super::engine::HostBytes;
use crate::cpu::ops::moments::{Gradient, Moment, Weights};
use crate::cpu::ops::update::{self, Part};
use crate::memory::DType;
use crate::ops::{Update, control};
use crate::{Error, Result};
use bytemuck::Pod;

/// A typed span of host memory.
#[derive(Clone, Copy)]
pub(crate) struct HostView {
    pub(crate) at: HostBytes,
    pub(crate) dtype: DType,
}

/// What is to be done, with everything it touches. `control` is read when it is done.
#[derive(Clone, Copy)]
pub(crate) enum HostUpdate {
    /// [`crate::Operators::update`]
    Update {
        update: Update,
        parameter: HostView,
        gradient: HostView,
        master: Option<HostView>,
        first: HostView,
        second: HostView,
        decayed: u64,
        seed: u64,
        first_element: u64,
        control: HostView,
    },
    /// [`crate::Operators::hessian`]
    Hessian {
        gradient: HostView,
        hessian: HostView,
        beta2: f32,
        tokens: f32,
        inverse_loss_scale: f32,
        control: HostView,
    },
}

impl HostUpdate {
    /// # Safety
    /// All views are of live host memory that nothing else uses meanwhile.
    pub(crate) unsafe fn carry_out(self) -> Result<()> {
        // SAFETY: passed on to the caller; views of one update do not overlap, since they are different data.
        unsafe {
            match self {
                HostUpdate::Update {
                    update,
                    parameter,
                    gradient,
                    master,
                    first,
                    second,
                    decayed,
                    seed,
                    first_element,
                    control,
                } => {
                    let Some(multiplier) = multiplier(control) else {
                        return Ok(());
                    };
                    let weights = weights(parameter, master)?;
                    let count = weights.len();
                    let part = Part {
                        gradient: self::gradient(gradient)?,
                        first: moment(first, count)?,
                        second: moment(second, count)?,
                        weights,
                        decayed,
                        seed,
                        first_element,
                    };
                    update::update(update, part, multiplier);
                }
                HostUpdate::Hessian { gradient, hessian, beta2, tokens, inverse_loss_scale, control } => {
                    if multiplier(control).is_none() {
                        return Ok(());
                    }
                    let gradient = self::gradient(gradient)?;
                    let hessian = moment(hessian, gradient.len())?;
                    update::hessian(gradient, hessian, beta2, tokens, inverse_loss_scale);
                }
            }
        }
        Ok(())
    }
}

/// The multiplier, or none if the step is skipped.
///
/// # Safety
/// As for [`HostUpdate::carry_out`].
unsafe fn multiplier(view: HostView) -> Option<f32> {
    // SAFETY: passed on to the caller.
    let scalars = unsafe { slice::<f32>(view) };
    (scalars[control::FINITE as usize] != 0.0).then_some(scalars[control::MULTIPLIER as usize])
}

/// # Safety
/// As for [`HostUpdate::carry_out`].
unsafe fn slice<'a, T: Pod>(view: HostView) -> &'a mut [T] {
    assert!(view.at.address.cast::<T>().is_aligned(), "host state is not aligned to {} bytes", align_of::<T>());
    // SAFETY: aligned; the rest is passed on to the caller.
    unsafe { std::slice::from_raw_parts_mut(view.at.address.cast(), view.at.bytes as usize / size_of::<T>()) }
}

/// # Safety
/// As for [`HostUpdate::carry_out`].
unsafe fn weights<'a>(parameter: HostView, master: Option<HostView>) -> Result<Weights<'a>> {
    // SAFETY: passed on to the caller.
    unsafe {
        match (parameter.dtype, master.map(|m| (m, m.dtype))) {
            (DType::F32, None) => Ok(Weights::F32(slice(parameter))),
            (DType::Bf16, Some((m, DType::F32))) => Ok(Weights::Bf16Master(slice(parameter), slice(m))),
            (DType::Bf16, Some((m, DType::Rem16))) => Ok(Weights::Bf16Split(slice(parameter), slice(m))),
            (DType::F16, Some((m, DType::F32))) => Ok(Weights::F16Master(slice(parameter), slice(m))),
            (weight, master) => {
                Err(unsupported(&format!("weights in {weight:?} with master {:?}", master.map(|m| m.1))))
            }
        }
    }
}

/// # Safety
/// As for [`HostUpdate::carry_out`].
unsafe fn gradient<'a>(view: HostView) -> Result<Gradient<'a>> {
    // SAFETY: passed on to the caller.
    unsafe {
        match view.dtype {
            DType::F32 => Ok(Gradient::F32(slice(view))),
            DType::F16 => Ok(Gradient::F16(slice(view))),
            DType::Bf16 => Ok(Gradient::Bf16(slice(view))),
            other => Err(unsupported(&format!("a gradient in {other:?}"))),
        }
    }
}

/// # Safety
/// As for [`HostUpdate::carry_out`].
unsafe fn moment<'a>(view: HostView, count: usize) -> Result<Moment<'a>> {
    // SAFETY: passed on to the caller.
    unsafe {
        match view.dtype {
            DType::F32 => Ok(Moment::F32(slice(view))),
            DType::Bf16 => Ok(Moment::Bf16(slice(view))),
            DType::Q8 => {
                let bytes = DType::Q8.bytes(count as u64) as usize;
                let (codes, scales) = slice::<u8>(view)[..bytes].split_at_mut(count);
                Ok(Moment::Q8(codes, bytemuck::cast_slice_mut(scales)))
            }
            other => Err(unsupported(&format!("a moment in {other:?}"))),
        }
    }
}

fn unsupported(what: &str) -> Error {
    Error::Unsupported {
        what: format!("an update on the host of {what}"),
        backend: "cuda",
        instead: "use f32, bf16 with an f32 or 16-bit master, or f16 with an f32 master; moments in f32, bf16 or q8"
            .into(),
    }
}
