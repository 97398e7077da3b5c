use super::*;
use crate::link::LinkOptions;
use crate::memory::Tier::{Device as OnDevice, Host, Nvme};
use std::time::Duration;

const MIB: u64 = 1 << 20;

/// A rate at which 1 MiB takes 10 ms: long beside what these tests do meanwhile.
const SLOW: Option<f64> = Some(100.0 * MIB as f64);

fn cpu(options: CpuOptions) -> Cpu {
    let cpu = Cpu::new(CpuOptions { threads: Some(1), ..options }).expect("threads");
    cpu.reserve(OnDevice, 8 * MIB, None).expect("device");
    cpu.reserve(Host, 8 * MIB, None).expect("host");
    cpu
}

fn with_file(cpu: &Cpu) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    cpu.reserve(Nvme, 8 * MIB, Some(folder.path())).expect("nvme");
    folder
}

fn random(bytes: u64, seed: u64) -> Vec<u8> {
    (0..bytes / 8).flat_map(|index| crate::rng::bits(seed, index, 0).to_le_bytes()).collect()
}

fn downloaded(cpu: &Cpu, span: Span) -> Vec<u8> {
    let mut out = vec![0; span.bytes as usize];
    cpu.download(span, &mut out).expect("download");
    out
}

#[test]
fn copies_wait_for_the_marks_they_are_told_to() {
    let cpu = cpu(CpuOptions { host_to_device_bytes_per_s: SLOW, ..CpuOptions::default() });
    let (first, second) = (Span::new(Host, 0, 2 * MIB), Span::new(Host, 4 * MIB, 2 * MIB));
    let middle = Span::new(OnDevice, MIB, 2 * MIB);
    for seed in 0..3 {
        let data = random(2 * MIB, seed);
        cpu.upload(first, &data).expect("upload");
        // Slow in, fast out: without the wait the second copy would take what was there before.
        cpu.copy(Stream::HostToDevice, first, middle).expect("copy");
        let there = cpu.mark(Stream::HostToDevice);
        cpu.wait(Stream::DeviceToHost, there);
        cpu.copy(Stream::DeviceToHost, middle, second).expect("copy");
        let back = cpu.mark(Stream::DeviceToHost);
        // The next round's overwriting of the middle waits for the reading of it.
        cpu.wait(Stream::HostToDevice, back);
        cpu.join(back).expect("join");
        assert!(cpu.reached(there) && cpu.reached(back));
        let mut out = vec![0; data.len()];
        cpu.read_host(second, &mut out);
        assert!(out == data, "round {seed}");
    }
}

#[test]
fn the_compute_stream_waits_and_is_waited_for() {
    let cpu = cpu(CpuOptions { host_to_device_bytes_per_s: SLOW, ..CpuOptions::default() });
    let (host, device) = (Span::new(Host, 0, 2 * MIB), Span::new(OnDevice, 0, 2 * MIB));
    let data = random(2 * MIB, 1);
    cpu.write_host(host, &data);
    cpu.copy(Stream::HostToDevice, host, device).expect("copy");
    let there = cpu.mark(Stream::HostToDevice);
    cpu.wait(Stream::Compute, there);
    let view = device.view(DType::I32);
    assert!(bytemuck::cast_slice::<i32, u8>(cpu.slice(view)) == data);
    cpu.slice_mut::<i32>(view).fill(7);
    let computed = cpu.mark(Stream::Compute);
    assert!(cpu.reached(computed));
    cpu.wait(Stream::DeviceToHost, computed);
    cpu.copy(Stream::DeviceToHost, device, host).expect("copy");
    assert!(downloaded(&cpu, host).chunks(4).all(|word| word == [7, 0, 0, 0]));
}

#[test]
fn engines_run_beside_each_other_and_the_compute_thread() {
    let cpu = cpu(CpuOptions {
        host_to_device_bytes_per_s: SLOW,
        device_to_host_bytes_per_s: SLOW,
        nvme_read_bytes_per_s: SLOW,
        nvme_write_bytes_per_s: SLOW,
        ..CpuOptions::default()
    });
    let _folder = with_file(&cpu);
    let at = |tier, place| Span::new(tier, place * MIB, MIB);
    let data: Vec<_> = (0..4).map(|seed| random(MIB, seed)).collect();
    cpu.write_host(at(Host, 0), &data[0]);
    cpu.write_host(at(OnDevice, 1), &data[1]);
    cpu.write_host(at(Host, 2), &data[2]);
    cpu.copy(Stream::NvmeWrite, at(Host, 2), at(Nvme, 3)).expect("copy");
    let written = cpu.mark(Stream::NvmeWrite);
    cpu.wait(Stream::NvmeRead, written);
    cpu.copy(Stream::HostToDevice, at(Host, 0), at(OnDevice, 0)).expect("copy");
    cpu.copy(Stream::DeviceToHost, at(OnDevice, 1), at(Host, 1)).expect("copy");
    cpu.copy(Stream::NvmeWrite, at(Host, 2), at(Nvme, 5)).expect("copy");
    cpu.copy(Stream::NvmeRead, at(Nvme, 3), at(Host, 4)).expect("copy");
    // Meanwhile, elsewhere.
    cpu.slice_mut::<u8>(at(OnDevice, 6).view(DType::I32)).copy_from_slice(&data[3]);
    assert!(downloaded(&cpu, at(OnDevice, 0)) == data[0]);
    assert!(downloaded(&cpu, at(Host, 1)) == data[1]);
    assert!(downloaded(&cpu, at(Host, 4)) == data[2]);
    assert!(downloaded(&cpu, at(OnDevice, 6)) == data[3]);
    cpu.copy(Stream::NvmeRead, at(Nvme, 5), at(Host, 5)).expect("copy");
    assert!(downloaded(&cpu, at(Host, 5)) == data[2]);
}

#[test]
fn a_full_queue_only_makes_the_caller_wait() {
    let cpu = cpu(CpuOptions::default());
    let (host, device) = (Span::new(Host, 0, 8), Span::new(OnDevice, 0, 8));
    cpu.write_host(host, &[1; 8]);
    for _ in 0..3 * QUEUE {
        cpu.copy(Stream::HostToDevice, host, device).expect("copy");
        let mark = cpu.mark(Stream::HostToDevice);
        cpu.wait(Stream::DeviceToHost, mark);
        cpu.copy(Stream::DeviceToHost, device, Span::new(Host, 8, 8)).expect("copy");
        let mark = cpu.mark(Stream::DeviceToHost);
        cpu.wait(Stream::HostToDevice, mark);
    }
    assert_eq!(downloaded(&cpu, Span::new(Host, 8, 8)), [1; 8]);
}

#[test]
fn the_time_between_marks_is_kept_for_the_last_ones() {
    let cpu = cpu(CpuOptions { host_to_device_bytes_per_s: SLOW, ..CpuOptions::default() });
    let (host, device) = (Span::new(Host, 0, MIB), Span::new(OnDevice, 0, MIB));
    let from = cpu.mark(Stream::HostToDevice);
    cpu.copy(Stream::HostToDevice, host, device).expect("copy");
    let to = cpu.mark(Stream::HostToDevice);
    assert_eq!(cpu.elapsed_ns(from, Mark { stream: Stream::HostToDevice, number: 0 }), None);
    cpu.join(to).expect("join");
    assert!(cpu.elapsed_ns(from, to).is_some_and(|ns| ns >= 9_000_000), "the emulated link is not faster than told");
    for _ in 0..5000 {
        cpu.mark(Stream::HostToDevice);
    }
    cpu.join(cpu.mark(Stream::HostToDevice)).expect("join");
    assert_eq!(cpu.elapsed_ns(from, to), None);
}

#[test]
fn failures_of_queued_work_and_of_operators_surface_and_stay() {
    let broken = cpu(CpuOptions::default());
    let folder = with_file(&broken);
    let failure = |reason: &str| Error::Device { call: "an operator".into(), reason: reason.into() };
    broken.fail(failure("first"));
    broken.fail(failure("second"));
    let host = Span::new(Host, 0, 4096);
    // Later work is dropped, marks are still reached, every way of asking tells the first failure.
    broken.copy(Stream::NvmeWrite, host, Span::new(Nvme, 0, 4096)).expect("issued");
    let told = [
        broken.join(broken.mark(Stream::NvmeWrite)),
        broken.upload(host, &[1]),
        broken.download(host, &mut [0]),
        broken.join(broken.mark(Stream::Compute)),
    ];
    for result in told {
        assert!(result.expect_err("it failed").to_string().contains("first"));
    }
    assert_eq!(std::fs::read_dir(folder.path()).expect("list").count(), 0);
}

#[test]
fn shortage_is_an_error_with_numbers() {
    let cpu = Cpu::new(CpuOptions { device_bytes: Some(MIB), ..CpuOptions::default() }).expect("threads");
    assert_eq!(cpu.device().available_bytes, MIB);
    let error = cpu.reserve(OnDevice, MIB + 1, None).expect_err("over the cap");
    assert!(matches!(error, Error::Exhausted { tier: "device", available: MIB, .. }), "{error}");
    let error = cpu.reserve(Host, 1 << 60, None).expect_err("no machine has it");
    assert!(matches!(error, Error::Exhausted { tier: "host", .. }), "{error}");
    let missing = Path::new("/nonexistent-folder");
    let error = cpu.reserve(Nvme, MIB, Some(missing)).expect_err("no folder").to_string();
    assert!(error.contains("/nonexistent-folder"), "{error}");
    // A refusal takes nothing: the tier can still be reserved, empty or not.
    cpu.reserve(OnDevice, MIB, None).expect("as much as the cap");
    cpu.reserve(Host, 0, None).expect("nothing");
    assert!(cpu.slice::<f64>(Span::new(Host, 0, 0).view(DType::F64)).is_empty());
    cpu.reserve(Nvme, 0, None).expect("nothing");
}

#[test]
fn copies_that_skip_the_host_are_refused() {
    let cpu = cpu(CpuOptions::default());
    let _folder = with_file(&cpu);
    let at = |tier| Span::new(tier, 0, 4096);
    for (stream, source, target) in [
        (Stream::NvmeRead, Nvme, OnDevice),
        (Stream::NvmeWrite, OnDevice, Nvme),
        (Stream::NvmeWrite, Nvme, Host),
        (Stream::Compute, Host, Nvme),
    ] {
        let error = cpu.copy(stream, at(source), at(target)).expect_err("refused");
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    }
}

#[test]
#[should_panic(expected = "lies outside of the device arena")]
fn spans_outside_of_their_arena_are_bugs() {
    let cpu = cpu(CpuOptions::default());
    let _ = cpu.copy(Stream::HostToDevice, Span::new(Host, 0, 64), Span::new(OnDevice, 8 * MIB - 32, 64));
}

#[test]
#[should_panic(expected = "is not aligned to 4 bytes")]
fn misaligned_views_are_bugs() {
    let cpu = cpu(CpuOptions::default());
    let _ = cpu.slice::<f32>(Span::new(OnDevice, 2, 8).view(DType::F32));
}

#[test]
fn collectives_run_on_spans_of_the_arenas() {
    let links = Link::in_process(3, LinkOptions::default()).expect("sockets");
    std::thread::scope(|scope| {
        for link in links {
            scope.spawn(move || {
                let cpu = cpu(CpuOptions { link: Some(link), ..CpuOptions::default() });
                let rank = u64::from(cpu.rank());
                let full = Span::new(OnDevice, 0, 24).view(DType::F32);
                let apart = Span::new(OnDevice, 4096, 8).view(DType::F32);
                let floats = |span: Span| {
                    let mut out = vec![0f32; span.bytes as usize / 4];
                    cpu.download(span, bytemuck::cast_slice_mut(&mut out)).expect("download");
                    out
                };
                let r = rank as f32;
                let upload = |values: &[f32]| cpu.upload(full.span, bytemuck::cast_slice(values)).expect("upload");

                // Sum of r, 10 + r, … over r = 0, 1, 2, in a shard apart and in place.
                upload(&[r, 10.0 + r, 20.0 + r, 30.0 + r, 40.0 + r, 50.0 + r]);
                cpu.reduce_scatter(full, apart).expect("issued");
                assert_eq!(floats(apart.span), [60.0 * r + 3.0, 60.0 * r + 33.0]);
                cpu.reduce_scatter(full, full.part(2 * rank, 2)).expect("issued");
                cpu.all_gather(full.part(2 * rank, 2), full).expect("issued");
                assert_eq!(floats(full.span), [3.0, 33.0, 63.0, 93.0, 123.0, 153.0]);
                upload(&[0.0; 6]);
                cpu.all_gather(apart, full).expect("issued");
                assert_eq!(floats(full.span), [3.0, 33.0, 63.0, 93.0, 123.0, 153.0]);
                cpu.all_reduce(Among::All, apart).expect("issued");
                assert_eq!(floats(apart.span), [189.0, 279.0]);
                assert_eq!(cpu.exchange(&[rank as u8]).expect("exchange"), [[0], [1], [2]]);
            });
        }
    });
}

#[test]
fn a_dead_peer_surfaces_at_the_join() {
    let mut links = Link::in_process(2, LinkOptions { deadline: Duration::from_secs(60), ..LinkOptions::default() })
        .expect("sockets");
    drop(links.pop());
    let cpu = cpu(CpuOptions { link: links.pop(), ..CpuOptions::default() });
    cpu.all_reduce(Among::All, Span::new(OnDevice, 0, 64).view(DType::F32)).expect("issued");
    let error = cpu.join(cpu.mark(Stream::Collective)).expect_err("rank 1 is gone");
    assert!(matches!(error, Error::Peer { rank: 1, .. }), "{error}");
}

#[test]
fn one_rank_gathers_and_reduces_by_copying() {
    let cpu = cpu(CpuOptions::default());
    let view = |offset| Span::new(OnDevice, offset, 64).view(DType::Bf16);
    let data = random(64, 1);
    cpu.upload(view(0).span, &data).expect("upload");
    cpu.all_gather(view(0), view(64)).expect("issued");
    cpu.reduce_scatter(view(64), view(128)).expect("issued");
    cpu.all_reduce(Among::All, view(128)).expect("issued");
    assert!(downloaded(&cpu, view(128).span) == data);
    assert_eq!(cpu.exchange(b"alone").expect("exchange"), [b"alone"]);
}
