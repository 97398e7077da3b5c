//! After warm-up, copies, marks, file transfers and collectives of the CPU backend allocate nothing.

use castor_kernels::cpu::{Cpu, CpuOptions};
use castor_kernels::link::{Link, LinkOptions};
use castor_kernels::{Among, Collectives, DType, Memory, Order, Span, Stream, Tier};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};

/// The system's allocator, with a count of what was asked of it by all threads.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: everything is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const BYTES: u64 = 1 << 16;

/// One round: file → host → device → sums across ranks → host → file.
fn round(cpu: &Cpu) {
    let at = |tier, place| Span::new(tier, place * BYTES, BYTES);
    let follow = |stream, before| cpu.wait(stream, before);
    cpu.copy(Stream::NvmeRead, at(Tier::Nvme, 0), at(Tier::Host, 0)).expect("copy");
    follow(Stream::HostToDevice, cpu.mark(Stream::NvmeRead));
    cpu.copy(Stream::HostToDevice, at(Tier::Host, 0), at(Tier::Device, 0)).expect("copy");
    follow(Stream::Collective, cpu.mark(Stream::HostToDevice));
    let full = at(Tier::Device, 0).view(DType::Bf16);
    let own = full.part(full.elements() / 2 * u64::from(cpu.rank()), full.elements() / 2);
    cpu.reduce_scatter(full, own).expect("reduce-scatter");
    cpu.all_gather(own, full).expect("all-gather");
    cpu.accumulate(full.part(0, 64), full.part(64, 64)).expect("a sum");
    cpu.all_reduce(Among::All, full.part(0, 64)).expect("all-reduce");
    follow(Stream::DeviceToHost, cpu.mark(Stream::Collective));
    cpu.copy(Stream::DeviceToHost, at(Tier::Device, 0), at(Tier::Host, 1)).expect("copy");
    follow(Stream::NvmeWrite, cpu.mark(Stream::DeviceToHost));
    cpu.copy(Stream::NvmeWrite, at(Tier::Host, 1), at(Tier::Nvme, 1)).expect("copy");
    cpu.join(cpu.mark(Stream::NvmeWrite)).expect("join");
}

#[test]
fn nothing_is_allocated_after_warm_up() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let links = Link::in_process(2, LinkOptions::default()).expect("sockets");
    let (together, windows) = (Barrier::new(2), 5);
    let counts: Vec<Vec<u64>> = std::thread::scope(|scope| {
        let ranks: Vec<_> = links
            .into_iter()
            .map(|link| {
                scope.spawn(|| {
                    let options = CpuOptions { link: Some(link), threads: Some(1), ..CpuOptions::default() };
                    let cpu = Cpu::new(options).expect("threads");
                    cpu.reserve(Tier::Device, 2 * BYTES, None).expect("device");
                    cpu.reserve(Tier::Host, 2 * BYTES, None).expect("host");
                    cpu.reserve(Tier::Nvme, 2 * BYTES, Some(folder.path())).expect("nvme");
                    let mut counts = Vec::with_capacity(windows);
                    for _ in 0..windows {
                        together.wait();
                        let before = ALLOCATIONS.load(Ordering::Relaxed);
                        for _ in 0..40 {
                            round(&cpu);
                        }
                        together.wait();
                        counts.push(ALLOCATIONS.load(Ordering::Relaxed) - before);
                    }
                    counts
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    });
    // A thread's first blocking takes a little memory once, whenever that is; work takes none ever.
    for counts in counts {
        assert!(counts.contains(&0), "allocations by window: {counts:?}");
    }
}
