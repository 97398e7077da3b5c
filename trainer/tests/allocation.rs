//! L3: after the first steps the hot path takes nothing from the heap.
//!
//! Measured on the counting backend, so that what is counted is the step's, the manager's and the transfer's own.

mod support;

use castor_kernels::{
    Backend, DType,
    dry::{Dry, DryProfile},
};
use castor_runtime::plan::Rehearse;
use castor_runtime::policy::{AutoPolicy, DevicePolicy, HostPolicy, PlacementPolicy};
use castor_trainer::rates::Rates;
use castor_trainer::{
    activations::Keep,
    blueprint::{Blueprint, formats},
    engine::{Engine, StepInputs},
    parity::Batch,
};
use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    sync::Arc,
};
use support::{options, plenty, shared, tight};

thread_local! {
    static TAKEN: Cell<u64> = const { Cell::new(0) };
}

/// Counts what each thread takes.
struct Counting;

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        TAKEN.with(|taken| taken.set(taken.get() + 1));
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the pointer came from `alloc` above, that is from the system's allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn steady_steps_take_nothing_from_the_heap() {
    let Some(golden) = shared("golden") else {
        return;
    };
    let folder = golden.join("gqa_tied");
    let nvme = tempfile::tempdir().unwrap();
    let mut options = options(&folder, 3, 40, 2);
    options.formats = formats(DType::Bf16, DType::Bf16, DType::Bf16);
    options.keep = vec![Keep::Selective, Keep::Block];
    let batch = Batch::read(&folder.join("batch.safetensors")).unwrap();
    let micros = [batch.micro(), batch.micro()];
    let tokens = 2 * micros[0].counted(batch.sequence);
    let everything = HostPolicy { parameters: true, optimizer: true };
    let squeezed = tight(&options, 1_000_000, 600_000, nvme.path());
    let policies: [(&dyn PlacementPolicy, _); 3] =
        [(&DevicePolicy, plenty()), (&everything, plenty()), (&AutoPolicy::USUAL, squeezed)];
    for (policy, budgets) in policies {
        let dry: Arc<dyn Backend> = Arc::new(Dry::new(1, 0, DryProfile::default()));
        let blueprint = Blueprint::new(options.clone(), dry.as_ref());
        let plan =
            blueprint.plan(dry.as_ref(), &Rates::assumed("cpu"), policy, budgets, None, Rehearse::ToRun).unwrap();
        let mut engine = Engine::new(dry, &blueprint, plan).unwrap();
        engine.manager().end_warm_up();
        let mut step = || {
            engine.step(&StepInputs { micros: &micros, tokens }).unwrap();
        };
        for _ in 0..4 {
            step();
        }
        let before = TAKEN.with(Cell::get);
        for _ in 0..4 {
            step();
        }
        assert_eq!(TAKEN.with(Cell::get) - before, 0, "{}", policy.name());
    }
}
