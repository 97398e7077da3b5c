//! An optimizer state by address: the typed slices behind its views, and its update.
//!
//! What updates it may be another thread than the one that issued the update: the host engine of either backend.

use super::ops::moments::{Gradient, Moment, Weights};
use super::ops::update::{self, Part};
use crate::memory::DType;
use crate::ops::{State, Update, control};
use crate::{Error, Result, Span, View};
use bytemuck::Pod;

/// A view by address.
#[derive(Clone, Copy)]
pub(crate) struct Memory {
    address: *mut u8,
    bytes: u64,
    dtype: DType,
}

// SAFETY: an address; who may use it when is decided by marks.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// `at` finds the address of a span, which it checks.
    pub(crate) fn of(view: View, at: impl Fn(Span) -> *mut u8) -> Memory {
        Memory { address: at(view.span), bytes: view.span.bytes, dtype: view.dtype }
    }

    /// Where the first `count` elements lie.
    fn elements<T: Pod>(self, count: usize) -> *mut T {
        assert!(self.address.cast::<T>().is_aligned(), "a state is not aligned to {} bytes", align_of::<T>());
        let held = self.bytes as usize / size_of::<T>();
        assert!(count <= held, "a state of {count} elements in memory for {held}");
        self.address.cast()
    }

    /// # Safety
    /// The memory is live, and nothing writes it while the slice lives.
    unsafe fn read<'a, T: Pod>(self, count: usize) -> &'a [T] {
        // SAFETY: aligned, and inside the view; the rest is passed on to the caller.
        unsafe { std::slice::from_raw_parts(self.elements(count), count) }
    }

    /// # Safety
    /// The memory is live, and nothing else reads or writes it while the slice lives.
    unsafe fn write<'a, T: Pod>(self, count: usize) -> &'a mut [T] {
        // SAFETY: aligned, and inside the view; the rest is passed on to the caller.
        unsafe { std::slice::from_raw_parts_mut(self.elements(count), count) }
    }

    /// The first `count` elements as a gradient.
    ///
    /// # Errors
    /// If gradients have no such type.
    ///
    /// # Safety
    /// As for [`Memory::read`].
    pub(crate) unsafe fn gradient<'a>(self, count: usize) -> Result<Gradient<'a>> {
        // SAFETY: passed on to the caller.
        unsafe {
            match self.dtype {
                DType::F32 => Ok(Gradient::F32(self.read(count))),
                DType::F16 => Ok(Gradient::F16(self.read(count))),
                DType::Bf16 => Ok(Gradient::Bf16(self.read(count))),
                other => Err(unsupported(format!("a gradient in {other:?}"))),
            }
        }
    }

    /// The first `count` elements as a moment.
    ///
    /// # Errors
    /// If moments have no such type.
    ///
    /// # Safety
    /// As for [`Memory::write`].
    pub(crate) unsafe fn moment<'a>(self, count: usize) -> Result<Moment<'a>> {
        // SAFETY: passed on to the caller.
        unsafe {
            match self.dtype {
                DType::F32 => Ok(Moment::F32(self.write(count))),
                DType::Bf16 => Ok(Moment::Bf16(self.write(count))),
                DType::Q8 => {
                    let bytes = DType::Q8.bytes(count as u64) as usize;
                    let (codes, scales) = self.write::<u8>(bytes).split_at_mut(count);
                    Ok(Moment::Q8(codes, bytemuck::cast_slice_mut(scales)))
                }
                other => Err(unsupported(format!("a moment in {other:?}"))),
            }
        }
    }
}

/// An update of a state in memory.
#[derive(Clone, Copy)]
pub(crate) struct StateUpdate {
    update: Update,
    parameter: Memory,
    gradient: Memory,
    master: Option<Memory>,
    first: Memory,
    second: Memory,
    count: usize,
    decayed: u64,
    seed: u64,
    first_element: u64,
}

impl StateUpdate {
    /// `at` finds the addresses of the state's spans.
    pub(crate) fn new(update: Update, state: State, at: impl Fn(Span) -> *mut u8) -> StateUpdate {
        let memory = |view| Memory::of(view, &at);
        let State { parameter, gradient, master, first, second, decayed, seed, first_element } = state;
        StateUpdate {
            update,
            parameter: memory(parameter),
            gradient: memory(gradient),
            master: master.map(memory),
            first: memory(first),
            second: memory(second),
            count: parameter.elements() as usize,
            decayed,
            seed,
            first_element,
        }
    }

    /// Carries it out with the gradient times `multiplier`, in the threads of the caller's pool.
    ///
    /// # Errors
    /// If no update is defined for these types.
    ///
    /// # Safety
    /// The state's memory is live, and meanwhile nothing else uses it but to read the gradient.
    pub(crate) unsafe fn carry_out(self, multiplier: f32) -> Result<()> {
        let count = self.count;
        // SAFETY: passed on to the caller; the views of a state do not overlap, since they are different data.
        let part = unsafe {
            Part {
                weights: self.weights()?,
                gradient: self.gradient.gradient(count)?,
                first: self.first.moment(count)?,
                second: self.second.moment(count)?,
                decayed: self.decayed,
                seed: self.seed,
                first_element: self.first_element,
            }
        };
        update::update(self.update, part, multiplier);
        Ok(())
    }

    /// # Safety
    /// As for [`StateUpdate::carry_out`].
    unsafe fn weights<'a>(self) -> Result<Weights<'a>> {
        let (weights, count) = (self.parameter, self.count);
        // SAFETY: passed on to the caller.
        unsafe {
            match (weights.dtype, self.master.map(|master| (master, master.dtype))) {
                (DType::F32, None) => Ok(Weights::F32(weights.write(count))),
                (DType::Bf16, Some((m, DType::F32))) => Ok(Weights::Bf16Master(weights.write(count), m.write(count))),
                (DType::Bf16, Some((m, DType::Rem16))) => Ok(Weights::Bf16Split(weights.write(count), m.write(count))),
                (DType::F16, Some((m, DType::F32))) => Ok(Weights::F16Master(weights.write(count), m.write(count))),
                (weight, master) => {
                    Err(unsupported(format!("{weight:?} weights with master {:?}", master.map(|master| master.1))))
                }
            }
        }
    }
}

/// What gradients are multiplied by, or none if no update is to be made (L9).
pub(crate) fn multiplier(scalars: &[f32]) -> Option<f32> {
    (scalars[control::FINITE as usize] != 0.0).then_some(scalars[control::MULTIPLIER as usize])
}

fn unsupported(what: String) -> Error {
    Error::Unsupported {
        what: format!("an update of {what}"),
        backend: "cpu",
        instead: "use f32 without a master, bf16 with an f32 master or a 16-bit remainder, or f16 with an f32 master; \
                  gradients in f32 or 16 bits; moments in f32, bf16 or q8"
            .into(),
    }
}
