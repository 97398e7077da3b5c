//! Steady steps allocate nothing: not on the heap of the thread that steps, not from the arenas (L3).

use castor_kernels::{DType, Tier};
use castor_runtime::plan::Budgets;
use castor_runtime::policy::{AutoPolicy, DevicePolicy};
use castor_tests::engines::{ADAMW, Rows, SOPHIA, Setup, options, plenty};
use castor_trainer::engine::StepInputs;
use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::cell::Cell;

/// The system's allocator. It counts what the threads that ask for it allocate.
struct Counting;

thread_local! {
    static COUNTED: Cell<Option<u64>> = const { Cell::new(None) };
}

/// The CPU's operators are jobs of a thread pool whose queue takes a block for every 63 jobs and gives the last one
/// back: memory of the library that stands in for a GPU's stream, in bounds, and not the step's own.
const BLOCK_OF_JOBS: usize = 63 * 24 + 8;

fn count(bytes: usize) {
    if let Some(before) = COUNTED.get()
        && bytes != BLOCK_OF_JOBS
    {
        // What follows allocates too, and must not be counted.
        COUNTED.set(None);
        if before == 0 {
            eprintln!("the first allocation of a steady step:\n{}", Backtrace::force_capture());
        }
        COUNTED.set(Some(before + 1));
    }
}

// SAFETY: everything is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Steps before the count begins: the collector learns, queues and lists grow to their size.
const WARM_UP: u64 = 3;
const STEPS: u64 = 10;

/// Allocations of the stepping threads of all ranks after the warm-up.
fn allocations(setup: &Setup<'_>, sophia: bool) -> Vec<u64> {
    let world = u64::from(setup.world);
    setup.on_ranks(|rank, mut engine| {
        let rows: Vec<Rows> =
            (0..STEPS).map(|step| Rows::new(step, rank, world, setup.options.config.vocab_size)).collect();
        let micros: Vec<Vec<_>> = rows.iter().map(|rows| rows.micros().collect()).collect();
        let mut reserved = None;
        let mut counted = 0;
        for (step, (rows, micros)) in rows.iter().zip(&micros).enumerate() {
            if step as u64 == WARM_UP {
                engine.manager().end_warm_up();
                reserved = Some(Tier::ALL.map(|tier| engine.manager().ledger().total(tier)));
            }
            let inputs = StepInputs { micros, tokens: rows.tokens };
            COUNTED.set((step as u64 >= WARM_UP).then_some(0));
            let result = if sophia { engine.step(&inputs) } else { engine.train(&inputs) };
            counted += COUNTED.take().unwrap_or(0);
            result.expect("a step");
        }
        assert_eq!(reserved, Some(Tier::ALL.map(|tier| engine.manager().ledger().total(tier))), "L3");
        counted
    })
}

#[test]
fn steady_steps_allocate_nothing() {
    let disk = tempfile::tempdir().expect("a folder");
    let mut setup = Setup {
        options: options(1, DType::Bf16, ADAMW, false),
        world: 1,
        policy: &DevicePolicy,
        budgets: plenty(),
        prefetch: None,
    };
    assert_eq!(allocations(&setup, false), [0], "all on the device");
    setup.policy = &AutoPolicy::USUAL;
    setup.budgets.device = setup.least_device();
    assert_eq!(allocations(&setup, false), [0], "two tiers");
    setup.budgets = Budgets { nvme: 16 << 20, nvme_folder: Some(disk.path().to_owned()), ..setup.budgets };
    setup.budgets.host = setup.least_host();
    assert_eq!(allocations(&setup, false), [0], "three tiers");
    setup.options = options(1, DType::Bf16, SOPHIA, false);
    assert_eq!(allocations(&setup, true), [0], "estimates between the steps");
    setup.options = options(2, DType::Bf16, ADAMW, false);
    setup.world = 2;
    setup.budgets = Budgets { device: setup.least_device() + (64 << 10), ..plenty() };
    assert_eq!(allocations(&setup, false), [0, 0], "two ranks");
    (setup.options.sync_each_batch, setup.options.round) = (true, 1);
    assert_eq!(allocations(&setup, false), [0, 0], "two ranks, micro-batches summed one by one");
}
