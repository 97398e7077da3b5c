//! What a GPU does for Castor, in numbers: TFLOP/s of matrix products and attention, GB/s of the kernels that
//! only move memory, and of copies. Prints tables; takes about a minute.
//!
//! Run as `cuda_rates [TOKENS] [--only attention|host]` (16384 by default; Llama-7B shapes). With `--only attention`
//! cuDNN and both ways to cut Castor's own attention kernel have a line each: TFLOP/s, and the worst relative error
//! against the plain path. With `--only host`: AdamW on the host, alone and beside copies, and what it leaves them.

use castor_kernels::cuda::programs::Tiles;
use castor_kernels::cuda::{Cuda, CudaOptions};
use castor_kernels::ops::{AdamW, Attention, Into, Linear, State, Update};
use castor_kernels::{Backend, DType, Memory, Operators, Order, Result, Span, Stream, Tier, View, rng};
use std::process::ExitCode;

const C: u64 = 4096;
const F: u64 = 11008;
const V: u64 = 32000;

struct Bench {
    cuda: Cuda,
    top: u64,
    device_bytes: u64,
}

fn main() -> ExitCode {
    match rates() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(3)
        }
    }
}

fn rates() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let tokens = arguments.iter().find_map(|argument| argument.parse().ok()).unwrap_or(16384);
    if arguments.windows(2).any(|pair| pair == ["--only", "attention"]) {
        return cuts(tokens);
    }
    if arguments.windows(2).any(|pair| pair == ["--only", "host"]) {
        return host_updates();
    }
    for found in castor_kernels::cuda::survey() {
        match found.state {
            Ok(usable) => println!("{:24} {:10} {}", found.library, usable.version, usable.path.display()),
            Err(reason) => println!("{:24} {reason}", found.library),
        }
    }
    for own_attention in [false, true] {
        let cuda = Cuda::new(CudaOptions { timed: true, own_attention, ..CudaOptions::default() })?;
        let device = cuda.device();
        println!("\n{device:?}\nattention: {}", cuda.attention_backend());
        let device_bytes = device.available_bytes.min(24 << 30);
        cuda.reserve(Tier::Device, device_bytes, None)?;
        let mut bench = Bench { cuda, top: 0, device_bytes };
        let workspace = bench.span(bench.cuda.workspace_bytes());
        bench.cuda.set_workspace(workspace);
        bench.attention(tokens)?;
        if own_attention {
            continue;
        }
        bench.products(tokens)?;
        bench.streaming(tokens)?;
        bench.copies()?;
    }
    Ok(())
}

/// An update like a step's.
const ADAMW: Update = Update::AdamW(AdamW {
    lr: 1e-5,
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    weight_decay: 0.1,
    inv_bias1: 10.0,
    inv_bias2: 20.0,
});

/// Control scalars that let updates be made.
fn permit(cuda: &Cuda, control: View) -> Result<()> {
    let scalars: Vec<u8> = [1.0f32, 1.0, 1.0, 0.0].iter().flat_map(|v| v.to_le_bytes()).collect();
    cuda.upload(control.span, &scalars)
}

/// AdamW with fp32 moments and a split master on the host, beside copies of none, one or both directions.
fn host_updates() -> Result<()> {
    const COUNT: u64 = 256 << 20;
    const COPY: u64 = 256 << 20;
    const UPDATES: u64 = 3;
    let cuda = Cuda::new(CudaOptions { timed: true, ..CudaOptions::default() })?;
    cuda.reserve(Tier::Device, 2 * COPY + 256, None)?;
    let mut top = 2 * COPY;
    let mut host = |dtype: DType| {
        let span = Span::new(Tier::Host, top, dtype.bytes(COUNT));
        top = span.end();
        span.view(dtype)
    };
    let [parameter, gradient, first, second] = [DType::Bf16, DType::Bf16, DType::F32, DType::F32].map(&mut host);
    let master = Some(host(DType::Rem16));
    cuda.reserve(Tier::Host, top, None)?;
    let normal = |i| 0.1 * rng::normal(1, i);
    let wide: Vec<u8> = (0..1 << 18).flat_map(|i| normal(i).to_le_bytes()).collect();
    let narrow: Vec<u8> = (0..1 << 18).flat_map(|i| half::bf16::from_f32(normal(i)).to_le_bytes()).collect();
    for (view, pattern) in [(parameter, &narrow), (gradient, &narrow), (first, &wide)] {
        for done in (0..view.span.bytes).step_by(pattern.len()) {
            cuda.upload(view.span.part(done, pattern.len() as u64), pattern)?;
        }
    }
    let control = Span::new(Tier::Device, 2 * COPY, 16).view(DType::F32);
    permit(&cuda, control)?;
    let state = State { parameter, gradient, master, first, second, decayed: COUNT, seed: 1, first_element: 0 };
    let up = (Stream::HostToDevice, Span::new(Tier::Host, 0, COPY), Span::new(Tier::Device, 0, COPY));
    let down = (Stream::DeviceToHost, Span::new(Tier::Device, COPY, COPY), Span::new(Tier::Host, COPY, COPY));
    println!("AdamW of {COUNT} parameters on the host: M parameters/s, GB/s of host memory, GB/s of copies beside it");
    for (name, beside) in
        [("alone", &[][..]), ("host to device", &[up]), ("device to host", &[down]), ("both", &[up, down])]
    {
        let begun = std::time::Instant::now();
        let mut copies = Vec::new();
        for _ in 0..UPDATES {
            cuda.update(ADAMW, state, control);
        }
        let updated = cuda.mark(Stream::Host);
        for _ in 0..100 {
            for &(stream, source, target) in beside {
                cuda.copy(stream, source, target)?;
                copies.push(cuda.mark(stream));
            }
        }
        cuda.join(updated)?;
        let seconds = begun.elapsed().as_secs_f64();
        let copied = |(stream, _, _): &(Stream, Span, Span)| {
            let done = copies.iter().filter(|mark| mark.stream == *stream && cuda.reached(**mark)).count();
            format!("{} {:.1}", stream.name(), done as f64 * COPY as f64 / seconds / 1e9)
        };
        let copied: Vec<String> = beside.iter().map(copied).collect();
        let a_second = |each: u64| (UPDATES * each) as f64 / seconds;
        let (rate, moved) = (a_second(COUNT) / 1e6, a_second(state.adamw_bytes()) / 1e9);
        println!("{name:>22} {rate:8.0} {moved:8.1}   {}", copied.join(" "));
        for mark in copies {
            cuda.join(mark)?;
        }
    }
    Ok(())
}

/// (S, H, K, D) of the comparison of cuts.
const CUT_SHAPES: [[u64; 4]; 3] = [[2048, 32, 32, 128], [4096, 32, 8, 128], [2048, 16, 16, 64]];

/// One line for cuDNN, and one for each way to cut the own kernel.
fn cuts(tokens: u64) -> Result<()> {
    println!("causal attention, bf16, {tokens} tokens, TFLOP/s forward and backward (which counts 2.5 times forward)");
    let heads = CUT_SHAPES.map(|[s, h, k, d]| format!("{:>15}", format!("{s} {h} {k} {d}")));
    println!("{:42} {} {:>9} {:>9} {:>7}", "", heads.join(" "), "error", "masked", "repeats");
    for tiles in [None].into_iter().chain(Tiles::ALL.map(Some)) {
        let own_attention = tiles.is_some();
        let options = CudaOptions { timed: true, own_attention, attention_tiles: tiles, ..CudaOptions::default() };
        let cuda = Cuda::new(options)?;
        let device_bytes = cuda.device().available_bytes.min(8 << 30);
        cuda.reserve(Tier::Device, device_bytes, None)?;
        let mut bench = Bench { cuda, top: 0, device_bytes };
        let workspace = bench.span(bench.cuda.workspace_bytes());
        bench.cuda.set_workspace(workspace);
        let name = match tiles {
            None => bench.cuda.attention_backend(),
            Some(Tiles::Small) => "Castor's own, small tiles".to_owned(),
            Some(Tiles::Large) => "Castor's own, large tiles (default)".to_owned(),
        };
        let mut row = format!("{name:42}");
        for [sequence, heads, kv_heads, head_dim] in CUT_SHAPES {
            let batch = (tokens / sequence).max(1);
            let shape =
                Attention { batch, sequence, heads, kv_heads, head_dim, fused: true, deterministic: own_attention };
            let [forward, backward] = bench.attention_rates(shape)?;
            row.push_str(&format!(" {:>15}", format!("{forward:.0} {backward:.0}")));
        }
        let (mut errors, mut repeats) = ([0f64; 2], true);
        for (sequence, head_dim) in [(1000, 128), (777, 64)] {
            for (masked, error) in errors.iter_mut().enumerate() {
                let found = bench.against_plain(sequence, head_dim, masked == 1)?;
                *error = error.max(found.0);
                repeats &= found.1;
            }
        }
        println!("{row} {:9.1e} {:9.1e} {repeats:>7}", errors[0], errors[1]);
    }
    Ok(())
}

/// ‖a − b‖ / ‖b‖ of bf16 numbers.
fn relative(a: &[u8], b: &[u8]) -> f64 {
    let number = |bytes: &[u8; 2]| half::bf16::from_le_bytes(*bytes).to_f64();
    let pairs = a.as_chunks::<2>().0.iter().zip(b.as_chunks::<2>().0);
    let (apart, whole) = pairs.fold((0.0, 0.0), |(apart, whole), (a, b)| {
        (apart + (number(a) - number(b)).powi(2), whole + number(b).powi(2))
    });
    let error = (apart / whole).sqrt();
    if error.is_nan() { f64::INFINITY } else { error }
}

/// The views of one attention.
struct Views {
    qkv: View,
    out: View,
    d_out: View,
    d_qkv: View,
    stats: View,
    scratch: View,
}

impl Bench {
    fn attention_views(&mut self, shape: Attention, scratch_bytes: u64) -> Result<Views> {
        let (dense, packed) = (shape.tokens() * shape.heads * shape.head_dim, shape.tokens() * shape.packed());
        Ok(Views {
            qkv: self.normal(DType::Bf16, packed, 1.0)?,
            out: self.normal(DType::Bf16, dense, 1.0)?,
            d_out: self.normal(DType::Bf16, dense, 1.0)?,
            d_qkv: self.normal(DType::Bf16, packed, 1.0)?,
            stats: self.normal(DType::F32, shape.tokens() * shape.heads, 1.0)?,
            scratch: View { dtype: DType::F32, ..self.span(scratch_bytes.next_multiple_of(4)).view(DType::Q8) },
        })
    }

    /// TFLOP/s of forward and backward.
    fn attention_rates(&mut self, shape: Attention) -> Result<[f64; 2]> {
        let top = self.top;
        let bytes = self.cuda.attention_scratch_bytes(shape, DType::Bf16, false);
        let v = self.attention_views(shape, bytes)?;
        let operations = 2.0 * (shape.tokens() * shape.heads * shape.sequence * shape.head_dim) as f64 / 1e12;
        let forward = self.seconds(Stream::Compute, |c| {
            c.attention(v.qkv, None, v.out, v.stats, v.scratch, shape);
            Ok(())
        })?;
        let backward = self.seconds(Stream::Compute, |c| {
            c.attention_backward(v.qkv, None, v.out, v.stats, v.d_out, v.d_qkv, v.scratch, shape);
            Ok(())
        })?;
        self.top = top;
        Ok([operations / forward, 2.5 * operations / backward])
    }

    /// The worst relative error of output and gradient against the plain path, and whether the backward repeats.
    fn against_plain(&mut self, sequence: u64, head_dim: u64, masked: bool) -> Result<(f64, bool)> {
        let top = self.top;
        let fused = Attention { batch: 2, sequence, heads: 8, kv_heads: 2, head_dim, fused: true, deterministic: true };
        let plain = Attention { fused: false, ..fused };
        let bytes = [fused, plain].map(|shape| self.cuda.attention_scratch_bytes(shape, DType::Bf16, masked));
        let v = self.attention_views(fused, bytes[0].max(bytes[1]))?;
        let starts = if masked {
            // Documents of 41 and 55 tokens, whose borders fall on and between those of tiles.
            let start = |t: u64| t / 96 * 96 + if t % 96 < 41 { 0 } else { 41 };
            let starts = (0..fused.tokens()).map(|t| start(t % sequence) as i32);
            let starts: Vec<u8> = starts.flat_map(i32::to_le_bytes).collect();
            let span = self.span(starts.len() as u64);
            self.cuda.upload(span, &starts)?;
            Some(span.view(DType::I32))
        } else {
            None
        };
        let mut results = Vec::new();
        for shape in [plain, fused, fused] {
            self.cuda.attention(v.qkv, starts, v.out, v.stats, v.scratch, shape);
            self.cuda.attention_backward(v.qkv, starts, v.out, v.stats, v.d_out, v.d_qkv, v.scratch, shape);
            let mut bytes = [v.out, v.d_qkv].map(|view| vec![0; view.span.bytes as usize]);
            for (view, bytes) in [v.out, v.d_qkv].into_iter().zip(&mut bytes) {
                self.cuda.download(view.span, bytes)?;
            }
            results.push(bytes);
        }
        self.top = top;
        let error = |which: usize| relative(&results[1][which], &results[0][which]);
        Ok((error(0).max(error(1)), results[1] == results[2]))
    }

    fn span(&mut self, bytes: u64) -> Span {
        let offset = self.top.next_multiple_of(256);
        self.top = offset + bytes;
        assert!(self.top <= self.device_bytes, "{} bytes of device memory are too few", self.device_bytes);
        Span::new(Tier::Device, offset, bytes)
    }

    /// Random numbers: a product of zeros is faster than any real one.
    fn normal(&mut self, dtype: DType, count: u64, scale: f32) -> Result<View> {
        let span = self.span(dtype.bytes(count));
        let values: Vec<f32> = (0..1 << 20).map(|i| rng::normal(self.top, i) * scale).collect();
        let pattern: Vec<u8> = match dtype {
            DType::Bf16 => values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        };
        let first = span.bytes.min(pattern.len() as u64);
        self.cuda.upload(span.part(0, first), &pattern[..first as usize])?;
        // Doubled on the device, which is faster than sending it all.
        let mut done = first;
        while done < span.bytes {
            let more = done.min(span.bytes - done);
            self.cuda.copy(Stream::Compute, span.part(0, more), span.part(done, more))?;
            done += more;
        }
        Ok(span.view(dtype))
    }

    /// Seconds of one run, from ten after two warm ones.
    fn seconds(&self, stream: Stream, mut work: impl FnMut(&Cuda) -> Result<()>) -> Result<f64> {
        const RUNS: u32 = 10;
        work(&self.cuda)?;
        work(&self.cuda)?;
        let from = self.cuda.mark(stream);
        for _ in 0..RUNS {
            work(&self.cuda)?;
        }
        let to = self.cuda.mark(stream);
        self.cuda.join(to)?;
        Ok(self.cuda.elapsed_ns(from, to).unwrap_or(u64::MAX) as f64 / 1e9 / f64::from(RUNS))
    }

    fn products(&mut self, tokens: u64) -> Result<()> {
        println!("\nmatrix products, bf16, {tokens} tokens, TFLOP/s");
        println!(
            "{:>22} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}",
            "outputs x inputs", "d_x", "d_w", "d_w add", "d_w f32+", "forward", "+resid"
        );
        for (name, outputs, inputs) in
            [("qkv", 3 * C, C), ("out", C, C), ("gate+up", 2 * F, C), ("down", C, F), ("head", V, C)]
        {
            let top = self.top;
            let shape = Linear { tokens, inputs, outputs };
            let (x, w) =
                (self.normal(DType::Bf16, tokens * inputs, 1.0)?, self.normal(DType::Bf16, outputs * inputs, 0.02)?);
            let (y, d_w) =
                (self.normal(DType::Bf16, tokens * outputs, 1.0)?, self.normal(DType::Bf16, outputs * inputs, 1.0)?);
            let (d_x, d_w32) =
                (self.normal(DType::Bf16, tokens * inputs, 1.0)?, self.normal(DType::F32, outputs * inputs, 1.0)?);
            let operations = 2.0 * (tokens * inputs * outputs) as f64 / 1e12;
            let d_y = y;
            let mut row = format!("{:>9} {:>6}x{:<5}", name, outputs, inputs);
            let mut add = |seconds: f64| row.push_str(&format!(" {:8.0}", operations / seconds));
            add(self.seconds(Stream::Compute, |c| {
                c.linear_backward_input(d_y, w, d_x, shape, Into::Replace);
                Ok(())
            })?);
            add(self.seconds(Stream::Compute, |c| {
                c.linear_backward_weight(d_y, x, d_w, shape, Into::Replace);
                Ok(())
            })?);
            add(self.seconds(Stream::Compute, |c| {
                c.linear_backward_weight(d_y, x, d_w, shape, Into::Add);
                Ok(())
            })?);
            add(self.seconds(Stream::Compute, |c| {
                c.linear_backward_weight(d_y, x, d_w32, shape, Into::Add);
                Ok(())
            })?);
            add(self.seconds(Stream::Compute, |c| {
                c.linear(x, w, None, None, y, shape);
                Ok(())
            })?);
            add(self.seconds(Stream::Compute, |c| {
                c.linear(x, w, None, Some(y), y, shape);
                Ok(())
            })?);
            println!("{row}");
            self.top = top;
        }
        Ok(())
    }

    fn attention(&mut self, tokens: u64) -> Result<()> {
        println!("\ncausal attention, bf16, TFLOP/s (backward counts 2.5 times forward)");
        println!("{:>32} {:>8} {:>8} {:>8} {:>12}", "B S H K D", "forward", "backward", "determ.", "scratch MiB");
        for (sequence, heads, kv_heads, head_dim) in
            [(2048, 32, 32, 128), (4096, 32, 8, 128), (8192, 32, 8, 128), (2048, 32, 32, 64), (2048, 16, 16, 64)]
        {
            let top = self.top;
            let batch = (tokens / sequence).max(1);
            let mut row = format!("{:>32}", format!("{batch} {sequence} {heads} {kv_heads} {head_dim}"));
            let operations = 2.0 * (batch * heads * sequence * sequence * head_dim) as f64 / 1e12;
            let shape = Attention { batch, sequence, heads, kv_heads, head_dim, fused: true, deterministic: false };
            let exact = Attention { deterministic: true, ..shape };
            let (dense, packed) = (shape.tokens() * heads * head_dim, shape.tokens() * shape.packed());
            let (qkv, out) = (self.normal(DType::Bf16, packed, 1.0)?, self.normal(DType::Bf16, dense, 1.0)?);
            let (d_out, d_qkv) = (self.normal(DType::Bf16, dense, 1.0)?, self.normal(DType::Bf16, packed, 1.0)?);
            let stats = self.normal(DType::F32, shape.tokens() * heads, 1.0)?;
            let bytes = [shape, exact].map(|shape| self.cuda.attention_scratch_bytes(shape, DType::Bf16, false));
            let scratch = self.span(bytes[0].max(bytes[1])).view(DType::Q8);
            let scratch = View { dtype: DType::F32, ..scratch };
            let forward = self.seconds(Stream::Compute, |c| {
                c.attention(qkv, None, out, stats, scratch, shape);
                Ok(())
            })?;
            row.push_str(&format!(" {:8.0}", operations / forward));
            for shape in [shape, exact] {
                let seconds = self.seconds(Stream::Compute, |c| {
                    c.attention_backward(qkv, None, out, stats, d_out, d_qkv, scratch, shape);
                    Ok(())
                })?;
                row.push_str(&format!(" {:8.0}", 2.5 * operations / seconds));
            }
            println!("{row} {:>6}/{}", bytes[0] >> 20, bytes[1] >> 20);
            self.top = top;
        }
        Ok(())
    }

    fn streaming(&mut self, tokens: u64) -> Result<()> {
        println!("\nkernels that move memory, GB/s read + written");
        let top = self.top;
        let say = |name: &str, bytes: u64, seconds: f64| println!("{name:>22} {:8.0}", bytes as f64 / seconds / 1e9);
        let (x, out) = (self.normal(DType::Bf16, tokens * C, 1.0)?, self.normal(DType::Bf16, tokens * C, 1.0)?);
        let (weight, d_weight) = (self.normal(DType::Bf16, C, 1.0)?, self.normal(DType::F32, C, 1.0)?);
        let (rstd, d_x) = (self.normal(DType::F32, tokens, 1.0)?, self.normal(DType::Bf16, tokens * C, 1.0)?);
        let scratch = self.span(self.cuda.rmsnorm_scratch_bytes(tokens, C).next_multiple_of(4)).view(DType::F32);
        let seconds = self.seconds(Stream::Compute, |c| {
            c.rmsnorm(x, weight, out, rstd, tokens, C, 1e-5);
            Ok(())
        })?;
        say("rmsnorm", 4 * tokens * C, seconds);
        let seconds = self.seconds(Stream::Compute, |c| {
            c.rmsnorm_backward(out, x, weight, rstd, d_x, d_weight, scratch, tokens, C, Into::Replace);
            Ok(())
        })?;
        say("rmsnorm_backward", 8 * tokens * C, seconds);
        self.top = top;
        let (gate_up, h) = (self.normal(DType::Bf16, tokens * 2 * F, 1.0)?, self.normal(DType::Bf16, tokens * F, 1.0)?);
        let seconds = self.seconds(Stream::Compute, |c| {
            c.swiglu(gate_up, h, tokens, F);
            Ok(())
        })?;
        say("swiglu", 6 * tokens * F, seconds);
        let seconds = self.seconds(Stream::Compute, |c| {
            c.swiglu_backward(h, gate_up, None, tokens, F);
            Ok(())
        })?;
        say("swiglu_backward", 10 * tokens * F, seconds);
        self.top = top;
        let count = 256 << 20;
        let control = self.normal(DType::F32, 4, 1.0)?;
        permit(&self.cuda, control)?;
        for (name, moment, bytes_each) in [("adamw f32 moments", DType::F32, 8), ("adamw bf16 moments", DType::Bf16, 4)]
        {
            let top = self.top;
            let state = State {
                parameter: self.normal(DType::Bf16, count, 0.02)?,
                gradient: self.normal(DType::Bf16, count, 1.0)?,
                master: Some(self.span(2 * count).view(DType::Rem16)),
                first: self.normal(moment, count, 0.1)?,
                second: self.normal(moment, count, 0.1)?,
                decayed: count,
                seed: 1,
                first_element: 0,
            };
            let seconds = self.seconds(Stream::Compute, |c| {
                c.update(ADAMW, state, control);
                Ok(())
            })?;
            // Gradient read; weight, remainder and moments read and written.
            say(name, count * (2 + 8 + 2 * bytes_each), seconds);
            self.top = top;
        }
        let x = self.normal(DType::Bf16, count, 1.0)?;
        let slot = self.span(8).view(DType::F64);
        let seconds = self.seconds(Stream::Compute, |c| {
            c.square_sum(x, slot);
            Ok(())
        })?;
        say("square_sum", 2 * count, seconds);
        self.top = top;
        Ok(())
    }

    fn copies(&mut self) -> Result<()> {
        const BYTES: u64 = 1 << 30;
        println!("\ncopies of 1 GiB, GB/s");
        let started = std::time::Instant::now();
        self.cuda.reserve(Tier::Host, 4 * BYTES, None)?;
        println!("{:>22} {:8.2} s for 4 GiB", "pinning", started.elapsed().as_secs_f64());
        let device = [self.span(BYTES), self.span(BYTES)];
        let host = [Span::new(Tier::Host, 0, BYTES), Span::new(Tier::Host, 2 * BYTES, BYTES)];
        let rate = |seconds: f64| BYTES as f64 / seconds / 1e9;
        let up = self.seconds(Stream::HostToDevice, |c| c.copy(Stream::HostToDevice, host[0], device[0]))?;
        let down = self.seconds(Stream::DeviceToHost, |c| c.copy(Stream::DeviceToHost, device[1], host[1]))?;
        let within = self.seconds(Stream::Compute, |c| c.copy(Stream::Compute, device[0], device[1]))?;
        println!("{:>22} {:8.1}", "host to device", rate(up));
        println!("{:>22} {:8.1}", "device to host", rate(down));
        println!("{:>22} {:8.1} read + written", "within the device", 2.0 * rate(within));
        let cuda = &self.cuda;
        let from = [cuda.mark(Stream::HostToDevice), cuda.mark(Stream::DeviceToHost)];
        for _ in 0..8 {
            cuda.copy(Stream::HostToDevice, host[0], device[0])?;
            cuda.copy(Stream::DeviceToHost, device[1], host[1])?;
        }
        let to = [cuda.mark(Stream::HostToDevice), cuda.mark(Stream::DeviceToHost)];
        for (name, from, to) in [("both: host to device", from[0], to[0]), ("both: device to host", from[1], to[1])] {
            cuda.join(to)?;
            let seconds = cuda.elapsed_ns(from, to).unwrap_or(u64::MAX) as f64 / 1e9 / 8.0;
            println!("{name:>22} {:8.1}", rate(seconds));
        }
        Ok(())
    }
}
