//! Copies, marks, files, collectives of one rank, and failures.

use super::Case;
use super::rig::{HOST_BYTES, Rig};
use castor_kernels::cuda::{Cuda, CudaOptions};
use castor_kernels::{Among, Backend, Collectives, DType, Memory, Operators, Order, Span, Stream, Tier, rng};

pub const CASES: &[Case] = &[
    ("copies_keep_order", copies_keep_order),
    ("marks_are_reused_without_confusion", marks_are_reused_without_confusion),
    ("files", files),
    ("one_rank_collectives", one_rank_collectives),
    ("times", times),
    ("shortage_is_an_error", shortage_is_an_error),
    ("arenas_larger_than_a_piece", arenas_larger_than_a_piece),
];

fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| rng::bits(seed, i as u64, 0) as u8).collect()
}

/// Many rounds of host → device → device → host through two slots, each step on its own stream: without
/// the marks the slots would be overwritten too early.
fn copies_keep_order() {
    let rig = Rig::new();
    let cuda = &rig.cuda;
    const SLOT: u64 = 4 << 20;
    let rounds = (HOST_BYTES / 2 / SLOT) as usize;
    let slots = [rig.span(SLOT), rig.span(SLOT)];
    let moved = [rig.span(SLOT), rig.span(SLOT)];
    let host = |half: u64, round: usize| Span::new(Tier::Host, half * HOST_BYTES / 2 + round as u64 * SLOT, SLOT);
    let data: Vec<_> = (0..rounds).map(|round| noise(round as u64, SLOT as usize)).collect();
    for (round, bytes) in data.iter().enumerate() {
        cuda.write_host(host(0, round), bytes);
    }
    let mut computed = [cuda.mark(Stream::Compute); 2];
    let mut returned = [cuda.mark(Stream::DeviceToHost); 2];
    for round in 0..rounds {
        let slot = round % 2;
        cuda.wait(Stream::HostToDevice, computed[slot]);
        cuda.copy(Stream::HostToDevice, host(0, round), slots[slot]).unwrap();
        cuda.wait(Stream::Compute, cuda.mark(Stream::HostToDevice));
        cuda.wait(Stream::Compute, returned[slot]);
        cuda.copy(Stream::Compute, slots[slot], moved[slot]).unwrap();
        cuda.zero(slots[slot].view(DType::Q8));
        computed[slot] = cuda.mark(Stream::Compute);
        cuda.wait(Stream::DeviceToHost, computed[slot]);
        cuda.copy(Stream::DeviceToHost, moved[slot], host(1, round)).unwrap();
        returned[slot] = cuda.mark(Stream::DeviceToHost);
    }
    let end = returned[(rounds - 1) % 2];
    cuda.join(end).unwrap();
    assert!(cuda.reached(end));
    for (round, bytes) in data.iter().enumerate() {
        let mut back = vec![0; SLOT as usize];
        cuda.read_host(host(1, round), &mut back);
        assert!(back == *bytes, "round {round}");
    }
}

/// Far more marks than events.
fn marks_are_reused_without_confusion() {
    let rig = Rig::new();
    let cuda = &rig.cuda;
    let target = rig.span(1 << 20);
    let first = cuda.mark(Stream::Compute);
    let mut last = first;
    for round in 0..30_000 {
        if round % 1000 == 0 {
            cuda.zero(target.view(DType::Q8));
        }
        last = cuda.mark(Stream::Compute);
        cuda.wait(Stream::DeviceToHost, last);
        cuda.wait(Stream::DeviceToHost, first);
    }
    cuda.join(cuda.mark(Stream::DeviceToHost)).unwrap();
    assert!(cuda.reached(first) && cuda.reached(last) && last.number > first.number);
    assert_eq!(cuda.elapsed_ns(first, last), None, "times were not asked for");
}

/// device → host → file → host → device, ordered by marks alone.
fn files() {
    let rig = Rig::new();
    let cuda = &rig.cuda;
    let folder = tempfile::tempdir().unwrap();
    const BYTES: u64 = 8 << 20;
    cuda.reserve(Tier::Nvme, 2 * BYTES, Some(folder.path())).unwrap();
    let file = Span::new(Tier::Nvme, BYTES, BYTES);
    let [there, back] = [Span::new(Tier::Host, 0, BYTES), Span::new(Tier::Host, BYTES, BYTES)];
    let (source, target) = (rig.span(BYTES), rig.span(BYTES));
    let data = noise(1, BYTES as usize);
    cuda.upload(source, &data).unwrap();
    cuda.upload(back, &vec![0; BYTES as usize]).unwrap();
    cuda.copy(Stream::DeviceToHost, source, there).unwrap();
    cuda.wait(Stream::NvmeWrite, cuda.mark(Stream::DeviceToHost));
    cuda.copy(Stream::NvmeWrite, there, file).unwrap();
    cuda.wait(Stream::NvmeRead, cuda.mark(Stream::NvmeWrite));
    cuda.copy(Stream::NvmeRead, file, back).unwrap();
    cuda.wait(Stream::HostToDevice, cuda.mark(Stream::NvmeRead));
    cuda.copy(Stream::HostToDevice, back, target).unwrap();
    cuda.join(cuda.mark(Stream::HostToDevice)).unwrap();
    let mut result = vec![0; BYTES as usize];
    cuda.download(target, &mut result).unwrap();
    assert!(result == data);
}

fn one_rank_collectives() {
    let rig = Rig::new();
    let cuda = &rig.cuda;
    let (source, target) = (rig.normal(DType::Bf16, 1000, 1.0), rig.poisoned(DType::Bf16, 1000));
    cuda.all_gather(source, target).unwrap();
    cuda.all_gather(source, source).unwrap();
    cuda.join(cuda.mark(Stream::Collective)).unwrap();
    let same = |a: Span, b: Span| {
        let (mut x, mut y) = (vec![0; a.bytes as usize], vec![1; b.bytes as usize]);
        cuda.download(a, &mut x).unwrap();
        cuda.download(b, &mut y).unwrap();
        assert!(x == y);
    };
    same(source.span, target.span);
    let target = rig.poisoned(DType::Bf16, 1000);
    cuda.reduce_scatter(source, target).unwrap();
    cuda.all_reduce(Among::All, target).unwrap();
    same(source.span, target.span);
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        // Whole groups of eight, fewer, and a rest.
        for count in [8, 5, 100_003] {
            let (source, target) = (rig.normal(dtype, count, 1.0), rig.normal(dtype, count, 30.0));
            for backend in [&rig.cpu as &dyn Backend, cuda] {
                backend.accumulate(source, target).unwrap();
                backend.join(backend.mark(Stream::Collective)).unwrap();
            }
            rig.same_bits("accumulate", target);
        }
    }
    assert_eq!(cuda.exchange(b"alone").unwrap(), [b"alone".to_vec()]);
}

fn times() {
    let rig = Rig::with(CudaOptions { timed: true, ..CudaOptions::default() });
    let cuda = &rig.cuda;
    let target = rig.span(256 << 20);
    let from = cuda.mark(Stream::Compute);
    cuda.zero(target.view(DType::Q8));
    let to = cuda.mark(Stream::Compute);
    cuda.join(to).unwrap();
    // 256 MiB at any rate between 1 GB/s and 20 TB/s: that there is a time, in nanoseconds.
    let elapsed = cuda.elapsed_ns(from, to).unwrap();
    assert!((12_000..300_000_000).contains(&elapsed), "{elapsed} ns");
    assert_eq!(cuda.elapsed_ns(to, from), None);
}

fn shortage_is_an_error() {
    let cuda = Cuda::new(CudaOptions::default()).unwrap();
    let device = cuda.device();
    println!("  {device:?}");
    assert!(device.available_bytes > 0 && device.overhead_bytes > 0);
    let error = cuda.reserve(Tier::Device, 1 << 45, None).unwrap_err();
    assert!(error.to_string().starts_with("device memory: "), "{error}");
    assert!(Cuda::new(CudaOptions { ordinal: 99, ..CudaOptions::default() }).is_err());
    // The shortage left nothing behind.
    cuda.reserve(Tier::Device, 1 << 20, None).unwrap();
    let overhead = cuda.device().overhead_bytes;
    assert!(overhead.abs_diff(device.overhead_bytes) < 64 << 20, "{overhead} after {}", device.overhead_bytes);
}

/// A copy that crosses from one registered piece of the host arena into the next.
fn arenas_larger_than_a_piece() {
    let cuda = Cuda::new(CudaOptions::default()).unwrap();
    const GIB: u64 = 1 << 30;
    cuda.reserve(Tier::Host, 2 * GIB + 4096, None).unwrap();
    cuda.reserve(Tier::Device, 64 << 20, None).unwrap();
    let data = noise(3, 32 << 20);
    for middle in [GIB, 2 * GIB - (16 << 20)] {
        let host = Span::new(Tier::Host, middle - (16 << 20) + 52, data.len() as u64);
        let device = Span::new(Tier::Device, 4096 + 12, data.len() as u64);
        cuda.upload(host, &data).unwrap();
        cuda.copy(Stream::HostToDevice, host, device).unwrap();
        cuda.join(cuda.mark(Stream::HostToDevice)).unwrap();
        cuda.write_host(host, &vec![0; data.len()]);
        cuda.copy(Stream::DeviceToHost, device, host).unwrap();
        cuda.join(cuda.mark(Stream::DeviceToHost)).unwrap();
        let mut back = vec![0; data.len()];
        cuda.read_host(host, &mut back);
        assert!(back == data, "at {middle}");
    }
}
