//! `castor doctor --bench`: how much this machine does per second, measured through the [`Backend`] trait alone.
//!
//! Measures what [`crate::estimate`] reckons with: a matrix product, attention, device memory, the link in each
//! direction and in both at once, updates by the host's cores beside it, and the disk. It knows no backend; what it
//! finds is kept by [`crate::rates`].

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use castor_kernels::ops::{AdamW, Attention, Linear, State, Update, control};
use castor_kernels::{Backend, DType, Mark, Span, Stream, Tier, View, rng};
use castor_runtime::Bytes;

use crate::error::Result;
use crate::rates::{Measured, MeasuredRate, Rate, RateCache};
use crate::rendezvous::World;
use crate::session;
use crate::settings::Settings;

/// Most runs of which the median is taken.
const RUNS: usize = 9;

/// After this long no further run of a rate is begun.
const LIMIT: Duration = Duration::from_millis(500);

/// Updates of the host's cores that are timed together.
const UPDATES: u64 = 4;

/// Bytes of one of the copies that are counted beside them.
const BESIDE_BYTES: u64 = 32 << 20;

/// Copies each way that are on their way at once beside them.
const BESIDE_COPIES: usize = 8;

/// Pause between two looks at them.
const LOOK: Duration = Duration::from_micros(50);

/// Bytes of one copy to or from the disk.
const DISK_COPY_BYTES: u64 = 8 << 20;

/// Operands of a product begin at multiples of this.
const ALIGNMENT: u64 = 256;

/// How much is moved and multiplied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Size {
    /// Bytes of a copy: whole blocks of the disk tier.
    pub copy_bytes: u64,
    /// The matrix product.
    pub product: Linear,
    /// Attention.
    pub attention: Attention,
    /// Type of the elements.
    pub dtype: DType,
    /// Parameters whose states the host's cores update; 0: that is not measured, for they are the device.
    pub updated: u64,
    /// How long a load like a step's goes on before products are timed: a device slows down under it.
    pub heat: Duration,
}

impl Size {
    /// Large enough that the start of a copy or kernel does not show, and no larger. The product is one of
    /// middling speed among a 7B model's.
    pub fn of(backend: &dyn Backend) -> Size {
        let fused = backend.device().fused_attention;
        let heads = |batch, sequence, heads, head_dim| Attention {
            batch,
            sequence,
            heads,
            kv_heads: heads,
            head_dim,
            fused,
            deterministic: false,
        };
        match backend.device().backend {
            "cuda" => Size {
                copy_bytes: 256 << 20,
                product: Linear { tokens: 16384, inputs: 11008, outputs: 4096 },
                attention: heads(8, 2048, 32, 128),
                dtype: if backend.computes_in(DType::Bf16) { DType::Bf16 } else { DType::F16 },
                updated: 128 << 20,
                heat: Duration::from_secs(2),
            },
            _ => Size {
                copy_bytes: 32 << 20,
                product: Linear { tokens: 256, inputs: 1024, outputs: 2048 },
                attention: heads(1, 256, 4, 64),
                dtype: DType::F32,
                updated: 0,
                heat: Duration::ZERO,
            },
        }
    }

    /// The state that the host's cores update, behind `begin` in host memory: AdamW's usual one with these moments.
    fn state(&self, begin: u64, moments: DType) -> State {
        let mut top = begin;
        let mut place = |dtype: DType| {
            let span = Span::new(Tier::Host, top, dtype.bytes(self.updated));
            top = span.end();
            span.view(dtype)
        };
        State {
            parameter: place(DType::Bf16),
            gradient: place(DType::Bf16),
            master: Some(place(DType::Rem16)),
            first: place(moments),
            second: place(moments),
            decayed: self.updated,
            seed: 0,
            first_element: 0,
        }
    }
}

/// What was found.
pub struct Found {
    /// Rates of the device and its link.
    pub device: Measured,
    /// Rates of the disk, if one was named.
    pub disk: Option<Measured>,
}

/// Measures and prints the rates of the machine that `settings` name (backend, NVMe folder), and keeps them for plans.
///
/// # Errors
/// Bad input; what the hardware or the cache's folder refuses.
pub fn main(settings: &Settings) -> Result<()> {
    let nvme = settings.memory.nvme.as_deref();
    nvme.map(session::disk_room).transpose()?;
    let (backend, notices) = session::backend(settings, &World::alone())?;
    for notice in &notices {
        eprintln!("castor: {notice}");
    }
    let found = measure(&*backend, &Size::of(&*backend), nvme)?;
    let path = RateCache::path();
    let mut cache = path.as_deref().map(RateCache::read).unwrap_or_default();
    let disk = nvme.map(RateCache::disk_place).zip(found.disk);
    for (place, measured) in [(backend.device().name, found.device)].into_iter().chain(disk) {
        print!("{}", measured.render(&place));
        cache.keep(place, measured);
    }
    match path {
        Some(path) => {
            cache.write(&path)?;
            println!("Kept for plans and runs in {}", path.display());
        }
        None => eprintln!("castor: not kept for plans: neither XDG_CACHE_HOME nor HOME is an absolute path"),
    }
    Ok(())
}

/// Measures on a backend of which nothing is reserved yet. `nvme`: the folder of the disk to measure.
///
/// # Errors
/// If a tier cannot give the bytes, or work fails.
pub fn measure(backend: &dyn Backend, size: &Size, nvme: Option<&Path>) -> castor_kernels::Result<Found> {
    let bench = Bench::new(backend, size, nvme)?;
    let mut device = BTreeMap::new();
    let how = format!("{} at once", Bytes(size.copy_bytes));
    let mut keep = |rate, amount: f64, seconds: f64, how: &str| {
        device.insert(rate, MeasuredRate { value: amount / seconds, how: how.into() });
    };
    let (product, bytes) = (&size.product, size.copy_bytes as f64);
    let flop = 2.0 * (product.tokens * product.inputs * product.outputs) as f64;
    let shape = format!("{:?}, {}×{} by {}", size.dtype, product.tokens, product.inputs, product.outputs);
    let multiply = || {
        backend.linear(bench.x, bench.w, None, None, bench.y, size.product);
        Ok(())
    };
    let a = size.attention;
    let attend = || {
        backend.attention(bench.qkv, None, bench.out, bench.stats, bench.scratch, a);
        backend.attention_backward(bench.qkv, None, bench.out, bench.stats, bench.d_out, bench.d_qkv, bench.scratch, a);
        Ok(())
    };
    // As in a step: between its products it attends, and reads and writes memory, for about a fifth of its time.
    let products = || -> castor_kernels::Result<f64> {
        let [seconds] = bench.time([Stream::Compute], || (0..RUNS).try_for_each(|_| multiply()))?;
        bench.time([Stream::Compute], || {
            attend()?;
            (0..2 * RUNS).try_for_each(|_| backend.copy(Stream::Compute, bench.device[0], bench.device[1]))
        })?;
        Ok(seconds / RUNS as f64)
    };
    let begun = Instant::now();
    products()?;
    while begun.elapsed() < size.heat {
        products()?;
    }
    let mut runs = (0..RUNS).map(|_| products()).collect::<castor_kernels::Result<Vec<f64>>>()?;
    runs.sort_by(f64::total_cmp);
    keep(Rate::Products, flop, runs[RUNS / 2], &format!("{}, in a mix like a step's", shape.to_lowercase()));
    let [seconds] = bench.median([Stream::Compute], attend)?;
    let flop = 3.5 * 2.0 * (a.tokens() * a.sequence * a.heads * a.head_dim) as f64;
    let shape = format!("{:?}, {}×{} of {} heads of {}", size.dtype, a.batch, a.sequence, a.heads, a.head_dim);
    keep(Rate::Attention, flop, seconds, &shape.to_lowercase());
    let [seconds] =
        bench.median([Stream::Compute], || backend.copy(Stream::Compute, bench.device[0], bench.device[1]))?;
    keep(Rate::DeviceMemory, 2.0 * bytes, seconds, &how);
    let up = || backend.copy(Stream::HostToDevice, bench.host[0], bench.device[0]);
    let down = || backend.copy(Stream::DeviceToHost, bench.device[1], bench.host[1]);
    let [seconds] = bench.median([Stream::HostToDevice], up)?;
    keep(Rate::HostToDeviceAlone, bytes, seconds, &how);
    let [seconds] = bench.median([Stream::DeviceToHost], down)?;
    keep(Rate::DeviceToHostAlone, bytes, seconds, &how);
    let [up_s, down_s] = bench.median([Stream::HostToDevice, Stream::DeviceToHost], || up().and_then(|()| down()))?;
    keep(Rate::HostToDevice, bytes, up_s, &how);
    keep(Rate::DeviceToHost, bytes, down_s, &how);
    if size.updated > 0 {
        let how = format!("AdamW of {} parameters in bf16 and remainder, beside both ways", size.updated);
        let [updates, up, down] = bench.beside_updates(size, DType::F32)?;
        keep(Rate::HostUpdates, updates, 1.0, &how);
        for (rate, moments) in [(Rate::HostUpdatesBf16, DType::Bf16), (Rate::HostUpdates8bit, DType::Q8)] {
            let [updates, ..] = bench.beside_updates(size, moments)?;
            keep(rate, updates, 1.0, &how);
        }
        let how = format!("{} at once", Bytes(BESIDE_BYTES.min(size.copy_bytes)));
        for (rate, moved) in [(Rate::HostToDeviceBesideUpdates, up), (Rate::DeviceToHostBesideUpdates, down)] {
            // A link may be too slow to move one copy meanwhile.
            if moved > 0.0 {
                keep(rate, moved, 1.0, &how);
            }
        }
    }
    let disk = nvme.map(|_| bench.disk()).transpose()?.map(Measured::now);
    Ok(Found { device: Measured::now(device), disk })
}

/// A backend with memory to measure in.
struct Bench<'a> {
    backend: &'a dyn Backend,
    copy_bytes: u64,
    x: View,
    w: View,
    y: View,
    qkv: View,
    out: View,
    stats: View,
    d_out: View,
    d_qkv: View,
    scratch: View,
    control: View,
    /// What a copy reads or writes.
    device: [Span; 2],
    host: [Span; 2],
}

impl<'a> Bench<'a> {
    fn new(backend: &'a dyn Backend, size: &Size, nvme: Option<&Path>) -> castor_kernels::Result<Self> {
        let mut top = 0;
        let mut device = |bytes: u64| {
            let span = Span::new(Tier::Device, top, bytes);
            top = span.end().next_multiple_of(ALIGNMENT);
            span
        };
        let workspace = device(backend.workspace_bytes());
        let Linear { tokens, inputs, outputs } = size.product;
        let [x, w, y] = [tokens * inputs, outputs * inputs, tokens * outputs]
            .map(|elements| device(size.dtype.bytes(elements)).view(size.dtype));
        let a = size.attention;
        let rows = a.tokens() * a.heads * a.head_dim;
        let [qkv, d_qkv, out, d_out] = [a.tokens() * a.packed(), a.tokens() * a.packed(), rows, rows]
            .map(|elements| device(size.dtype.bytes(elements)).view(size.dtype));
        let stats = device(DType::F32.bytes(a.tokens() * a.heads)).view(DType::F32);
        let scratch_bytes = backend.attention_scratch_bytes(a, size.dtype, false).next_multiple_of(4);
        let scratch = device(scratch_bytes).view(DType::F32);
        let control = device(DType::F32.bytes(control::COUNT)).view(DType::F32);
        let copies = [device(size.copy_bytes), device(size.copy_bytes)];
        let state = size.state(2 * size.copy_bytes, DType::F32);
        backend.reserve(Tier::Device, top, None)?;
        backend.reserve(Tier::Host, state.second.span.end(), None)?;
        if nvme.is_some() {
            backend.reserve(Tier::Nvme, size.copy_bytes, nvme)?;
        }
        backend.set_workspace(workspace);
        let host = [0, size.copy_bytes].map(|offset| Span::new(Tier::Host, offset, size.copy_bytes));
        let copy_bytes = size.copy_bytes;
        let bench = Bench {
            backend,
            copy_bytes,
            x,
            w,
            y,
            qkv,
            out,
            stats,
            d_out,
            d_qkv,
            scratch,
            control,
            device: copies,
            host,
        };
        // Products of zeros and writes of zeros are faster than real ones.
        for view in [x, w, qkv, d_out] {
            bench.fill(view)?;
        }
        for span in bench.host.into_iter().chain(copies) {
            bench.fill(span.view(size.dtype))?;
        }
        for view in [state.parameter, state.gradient] {
            bench.fill(view)?;
        }
        Ok(bench)
    }

    /// Writes random numbers, the same ones over and over.
    fn fill(&self, view: View) -> castor_kernels::Result<()> {
        const ELEMENTS: u64 = 1 << 18;
        let values = (0..ELEMENTS.min(view.elements())).map(|element| rng::normal(0, element));
        let pattern: Vec<u8> = match view.dtype {
            DType::F32 => values.flat_map(f32::to_le_bytes).collect(),
            DType::F16 => values.flat_map(|value| half::f16::from_f32(value).to_le_bytes()).collect(),
            _ => values.flat_map(|value| half::bf16::from_f32(value).to_le_bytes()).collect(),
        };
        let mut done = 0;
        while done < view.span.bytes {
            let bytes = (view.span.bytes - done).min(pattern.len() as u64);
            self.backend.upload(view.span.part(done, bytes), &pattern[..bytes as usize])?;
            done += bytes;
        }
        Ok(())
    }

    /// Bytes per second of host memory that the host's cores read and write in updates, and that copies move each way
    /// meanwhile.
    fn beside_updates(&self, size: &Size, moments: DType) -> castor_kernels::Result<[f64; 3]> {
        let backend = self.backend;
        let mut scalars = [0f32; control::COUNT as usize];
        scalars[control::MULTIPLIER as usize] = 1.0;
        scalars[control::FINITE as usize] = 1.0;
        backend.upload(self.control.span, &scalars.map(f32::to_le_bytes).concat())?;
        let rule =
            AdamW { lr: 0.0, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.0, inv_bias1: 1.0, inv_bias2: 1.0 };
        let state = size.state(2 * size.copy_bytes, moments);
        let zeros = vec![0; BESIDE_BYTES as usize];
        for span in [state.first.span, state.second.span] {
            for done in (0..span.bytes).step_by(zeros.len()) {
                let bytes = (span.bytes - done).min(BESIDE_BYTES);
                backend.upload(span.part(done, bytes), &zeros[..bytes as usize])?;
            }
        }
        let begun = Instant::now();
        for _ in 0..UPDATES {
            backend.update(Update::AdamW(rule), state, self.control);
        }
        let updated = backend.mark(Stream::Host);
        let bytes = BESIDE_BYTES.min(self.copy_bytes);
        let ways = [
            (Stream::HostToDevice, self.host[0], self.device[0]),
            (Stream::DeviceToHost, self.device[1], self.host[1]),
        ];
        let mut copies = ways.map(|_| Vec::new());
        let done = |marks: &[Mark]| marks.iter().take_while(|mark| backend.reached(**mark)).count();
        while !backend.reached(updated) {
            for ((stream, source, target), marks) in ways.into_iter().zip(&mut copies) {
                while marks.len() < done(marks) + BESIDE_COPIES {
                    backend.copy(stream, source.part(0, bytes), target.part(0, bytes))?;
                    marks.push(backend.mark(stream));
                }
            }
            std::thread::sleep(LOOK);
        }
        let seconds = begun.elapsed().as_secs_f64();
        let moved = copies.each_ref().map(|marks| done(marks) as u64 * bytes);
        for mark in copies.iter().flat_map(|marks| marks.last()) {
            backend.join(*mark)?;
        }
        let read_and_written = (UPDATES * state.adamw_bytes()) as f64;
        Ok([read_and_written / seconds, moved[0] as f64 / seconds, moved[1] as f64 / seconds])
    }

    fn disk(&self) -> castor_kernels::Result<BTreeMap<Rate, MeasuredRate>> {
        let parts = || {
            let file = Span::new(Tier::Nvme, 0, self.copy_bytes);
            (0..self.copy_bytes).step_by(DISK_COPY_BYTES as usize).map(move |offset| {
                let bytes = DISK_COPY_BYTES.min(self.copy_bytes - offset);
                (self.host[0].part(offset, bytes), file.part(offset, bytes))
            })
        };
        let [write_s] = self.median([Stream::NvmeWrite], || {
            parts().try_for_each(|(host, file)| self.backend.copy(Stream::NvmeWrite, host, file))
        })?;
        let [read_s] = self.median([Stream::NvmeRead], || {
            parts().try_for_each(|(host, file)| self.backend.copy(Stream::NvmeRead, file, host))
        })?;
        let how = format!("{} in parts of {}", Bytes(self.copy_bytes), Bytes(DISK_COPY_BYTES.min(self.copy_bytes)));
        let measured = |seconds: f64| MeasuredRate { value: self.copy_bytes as f64 / seconds, how: how.clone() };
        Ok(BTreeMap::from([(Rate::NvmeRead, measured(read_s)), (Rate::NvmeWrite, measured(write_s))]))
    }

    /// Median seconds for which each of `streams` is busy with what `issue` puts on it.
    fn median<const N: usize>(
        &self,
        streams: [Stream; N],
        issue: impl Fn() -> castor_kernels::Result<()>,
    ) -> castor_kernels::Result<[f64; N]> {
        // The first run warms up: it may compile kernels, choose algorithms, touch pages.
        self.time(streams, &issue)?;
        let begun = Instant::now();
        let mut runs = Vec::new();
        while runs.is_empty() || (runs.len() < RUNS && begun.elapsed() < LIMIT) {
            runs.push(self.time(streams, &issue)?);
        }
        Ok(std::array::from_fn(|stream| {
            let mut seconds: Vec<f64> = runs.iter().map(|run| run[stream]).collect();
            seconds.sort_by(f64::total_cmp);
            seconds[seconds.len() / 2]
        }))
    }

    /// Seconds by the device's clock, where the backend keeps it for the stream, else by that of the caller, who waits.
    fn time<const N: usize>(
        &self,
        streams: [Stream; N],
        issue: impl Fn() -> castor_kernels::Result<()>,
    ) -> castor_kernels::Result<[f64; N]> {
        let backend = self.backend;
        let begun = Instant::now();
        let from = streams.map(|stream| backend.mark(stream));
        issue()?;
        let to = streams.map(|stream| backend.mark(stream));
        let mut seconds = [0.0; N];
        for (seconds, (from, to)) in seconds.iter_mut().zip(from.into_iter().zip(to)) {
            backend.join(to)?;
            let waited = begun.elapsed();
            let busy = backend.elapsed_ns(from, to).map_or(waited, Duration::from_nanos);
            // A clock may be too coarse for what takes no time; a rate is a number all the same.
            *seconds = busy.max(Duration::from_nanos(1)).as_secs_f64();
        }
        Ok(seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use castor_kernels::cpu::{Cpu, CpuOptions};

    #[test]
    fn emulated_links_are_found_as_they_are() {
        const UP: f64 = 50e6;
        const DOWN: f64 = 25e6;
        let cpu = Cpu::new(CpuOptions {
            host_to_device_bytes_per_s: Some(UP),
            device_to_host_bytes_per_s: Some(DOWN),
            nvme_read_bytes_per_s: Some(UP),
            nvme_write_bytes_per_s: Some(DOWN),
            ..CpuOptions::default()
        })
        .unwrap();
        let folder = tempfile::tempdir().unwrap();
        let product = Linear { tokens: 32, inputs: 64, outputs: 48 };
        let attention =
            Attention { batch: 1, sequence: 16, heads: 2, kv_heads: 1, head_dim: 8, fused: true, deterministic: false };
        let size =
            Size { copy_bytes: 2 << 20, product, attention, dtype: DType::F32, updated: 1 << 20, heat: Duration::ZERO };
        let found = measure(&cpu, &size, Some(folder.path())).unwrap();
        let disk = found.disk.unwrap().rates;
        let all: BTreeMap<Rate, MeasuredRate> = found.device.rates.into_iter().chain(disk).collect();
        assert!(all.contains_key(&Rate::HostUpdates8bit) && (12..=14).contains(&all.len()), "{all:?}");
        assert!(all.values().all(|rate| rate.value.is_finite() && rate.value > 0.0), "{all:?}");
        // A paced engine sleeps: never faster than its rate but for the lateness that it makes up for, and a busy
        // machine may wake it late. A mistake of direction, unit or size is further off than these bounds.
        for (rate, emulated) in [
            (Rate::HostToDeviceAlone, UP),
            (Rate::DeviceToHostAlone, DOWN),
            (Rate::HostToDevice, UP),
            (Rate::DeviceToHost, DOWN),
            (Rate::NvmeRead, UP),
            (Rate::NvmeWrite, DOWN),
        ] {
            let value = all[&rate].value;
            assert!(value < 1.5 * emulated && value > 0.1 * emulated, "{rate:?}: {value} for {emulated}");
        }
    }
}
