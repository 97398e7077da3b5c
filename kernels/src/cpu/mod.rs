//! The CPU backend (the merge replaces this file; it must declare `mod operators; mod ops; pub mod truth;`).

mod operators;
mod ops;
pub mod truth;

use crate::{Error, Tier, View};
use std::cell::UnsafeCell;

/// Stand-in for the CPU backend: two arenas and the operators.
pub struct Cpu {
    arenas: [UnsafeCell<Vec<u64>>; 2],
    failure: std::sync::Mutex<Option<Error>>,
}

// SAFETY: used from one thread at a time.
unsafe impl Sync for Cpu {}

impl Cpu {
    /// Arenas of `bytes` each.
    pub fn stand_in(bytes: usize) -> Self {
        Cpu {
            arenas: [(); 2].map(|()| UnsafeCell::new(vec![0; bytes.div_ceil(8)])),
            failure: std::sync::Mutex::new(None),
        }
    }

    fn slice<T: bytemuck::Pod>(&self, view: View) -> &[T] {
        self.slice_mut(view)
    }

    #[allow(clippy::mut_from_ref)]
    fn slice_mut<T: bytemuck::Pod>(&self, view: View) -> &mut [T] {
        assert!(view.span.tier != Tier::Nvme);
        // SAFETY: stand-in.
        let arena: &mut Vec<u64> = unsafe { &mut *self.arenas[view.span.tier.index()].get() };
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(arena);
        bytemuck::cast_slice_mut(&mut bytes[view.span.offset as usize..view.span.end() as usize])
    }

    fn fail(&self, error: Error) {
        self.failure.lock().expect("one thread").get_or_insert(error);
    }

    /// First failure.
    pub fn failure(&self) -> Option<Error> {
        self.failure.lock().expect("one thread").clone()
    }
}
