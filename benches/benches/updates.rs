//! Do updates on the host run at the speed of its memory? M parameters/s and GB/s of AdamW over states in host memory,
//! by threads, beside the GB/s of plain copies by as many threads.
//!
//! `cargo bench -p castor-benches --bench updates -- [PARAMETERS [THREADS ...]]` (32 Mi parameters; 1 thread and all).
//! Bytes count what an update reads and what it writes; everything written was read before, so that no line is
//! fetched beside these. A copy's bytes are counted in both directions too.

use castor_kernels::cpu::{Cpu, CpuOptions};
use castor_kernels::ops::{AdamW, State, Update};
use castor_kernels::{DType, Memory, Operators, Order, Result, Span, Stream, Tier, rng};
use std::hint::black_box;
use std::time::Instant;

/// Runs of a case, of which the fastest counts: other programs only ever make one slower.
const ROUNDS: usize = 5;

/// Weights, master, gradient, and both moments.
const CASES: [(&str, DType, Option<DType>, DType, DType); 8] = [
    ("bf16 + 16 bits, fp32 moments", DType::Bf16, Some(DType::Rem16), DType::Bf16, DType::F32),
    ("bf16 + 16 bits, bf16 moments", DType::Bf16, Some(DType::Rem16), DType::Bf16, DType::Bf16),
    ("bf16 + 16 bits, q8 moments", DType::Bf16, Some(DType::Rem16), DType::Bf16, DType::Q8),
    ("the same, fp32 gradient", DType::Bf16, Some(DType::Rem16), DType::F32, DType::Q8),
    ("bf16 + fp32, fp32 moments", DType::Bf16, Some(DType::F32), DType::Bf16, DType::F32),
    ("bf16 + fp32, fp32 gradient", DType::Bf16, Some(DType::F32), DType::F32, DType::F32),
    ("fp32, fp32 gradient", DType::F32, None, DType::F32, DType::F32),
    ("fp16 + fp32, fp16 gradient", DType::F16, Some(DType::F32), DType::F16, DType::F32),
];

fn main() -> Result<()> {
    let numbers: Vec<usize> = std::env::args().skip(1).filter_map(|word| word.parse().ok()).collect();
    let count = numbers.first().copied().unwrap_or(32 << 20) as u64;
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = if numbers.len() > 1 { numbers[1..].to_vec() } else { vec![1, all] };
    println!("AdamW over {count} parameters, and copies of 512 MiB");
    for threads in threads {
        println!("{threads} threads: {:>22} {:6.1} GB/s", "copies", copies(threads) / 1e9);
        for case in CASES {
            let (seconds, bytes) = updates(case, count, threads)?;
            let (rate, moved) = (count as f64 / seconds, bytes as f64 / seconds);
            println!("{:>32} {:6.1} GB/s {:6.0} M/s", case.0, moved / 1e9, rate / 1e6);
        }
    }
    Ok(())
}

/// Bytes per second, read and written, of `threads` that copy.
fn copies(threads: usize) -> f64 {
    let (source, mut target) = (vec![1u8; 512 << 20], vec![2u8; 512 << 20]);
    let part = source.len() / threads;
    let once = |target: &mut [u8]| {
        let begun = Instant::now();
        std::thread::scope(|scope| {
            for (target, source) in target.chunks_mut(part).zip(source.chunks(part)) {
                scope.spawn(|| target.copy_from_slice(source));
            }
        });
        black_box(target);
        begun.elapsed().as_secs_f64()
    };
    2.0 * source.len() as f64 / (0..ROUNDS).map(|_| once(&mut target)).fold(f64::INFINITY, f64::min)
}

/// Seconds of an update, and its bytes.
fn updates(
    (_, weight, master, gradient, moment): (&str, DType, Option<DType>, DType, DType),
    count: u64,
    threads: usize,
) -> Result<(f64, u64)> {
    let cpu = Cpu::new(CpuOptions { threads: Some(threads), ..CpuOptions::default() })?;
    let mut top = 0;
    let mut place = |dtype: DType, count: u64| {
        let span = Span::new(Tier::Host, top, dtype.bytes(count));
        top = span.end().next_multiple_of(4096);
        span.view(dtype)
    };
    let (parameter, gradient) = (place(weight, count), place(gradient, count));
    let master = master.map(|dtype| place(dtype, count));
    let [first, second] = [(); 2].map(|()| place(moment, count));
    let control = place(DType::F32, 4);
    cpu.reserve(Tier::Host, top, None)?;
    for view in [parameter, gradient, first, second] {
        // Numbers like a run's in any type: in two bytes of any of them neither sign nor exponent is extreme.
        let pattern: Vec<u8> = match view.dtype {
            DType::F32 => (0..1 << 18).flat_map(|i| (1e-3 * rng::normal(1, i).abs()).to_ne_bytes()).collect(),
            DType::Q8 => (0..1 << 20).map(|i| rng::bits(1, i, 0) as u8 & 0x3F).collect(),
            _ => (0..1 << 19).flat_map(|i| (0x3A00u16 | rng::bits(1, i, 0) as u16 & 0xFF).to_ne_bytes()).collect(),
        };
        for done in (0..view.span.bytes).step_by(pattern.len()) {
            let length = (view.span.bytes - done).min(pattern.len() as u64);
            cpu.upload(view.span.part(done, length), &pattern[..length as usize])?;
        }
    }
    let scalars: Vec<u8> = [1.0f32, 1.0, 1.0, 0.0].iter().flat_map(|scalar| scalar.to_ne_bytes()).collect();
    cpu.upload(control.span, &scalars)?;
    let state = State { parameter, gradient, master, first, second, decayed: count, seed: 1, first_element: 0 };
    let rule =
        AdamW { lr: 1e-5, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, inv_bias1: 10.0, inv_bias2: 20.0 };
    let mut seconds = f64::INFINITY;
    for _ in 0..ROUNDS {
        let begun = Instant::now();
        cpu.update(Update::AdamW(rule), state, control);
        cpu.join(cpu.mark(Stream::Host))?;
        seconds = seconds.min(begun.elapsed().as_secs_f64());
    }
    Ok((seconds, state.adamw_bytes()))
}
