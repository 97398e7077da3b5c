//! Two backends with the same bytes at the same offsets: an operator runs on both, and the results are
//! compared.

use castor_kernels::cpu::{Cpu, CpuOptions};
use castor_kernels::cuda::{Cuda, CudaOptions};
use castor_kernels::{Backend, DType, Memory, Operators, Order, Span, Stream, Tier, View, rng};
use half::{bf16, f16};
use std::cell::Cell;

/// Bytes of each device arena.
const DEVICE_BYTES: u64 = 768 << 20;
/// Bytes of each host arena.
pub const HOST_BYTES: u64 = 64 << 20;

pub struct Rig {
    pub cpu: Cpu,
    pub cuda: Cuda,
    top: Cell<u64>,
    seed: Cell<u64>,
}

impl Rig {
    pub fn new() -> Rig {
        Rig::with(CudaOptions::default())
    }

    pub fn with(options: CudaOptions) -> Rig {
        let cpu = Cpu::new(CpuOptions::default()).unwrap();
        let cuda = Cuda::new(options).unwrap();
        for backend in [&cpu as &dyn Backend, &cuda] {
            backend.reserve(Tier::Device, DEVICE_BYTES, None).unwrap();
            backend.reserve(Tier::Host, HOST_BYTES, None).unwrap();
        }
        let rig = Rig { cpu, cuda, top: Cell::new(0), seed: Cell::new(1) };
        rig.cuda.set_workspace(rig.span(rig.cuda.workspace_bytes()));
        rig
    }

    /// Forgets all views, and fills the device with a pattern that is not a number in any float type.
    pub fn clear(&self) {
        self.top.set(self.cuda.workspace_bytes());
    }

    pub fn span(&self, bytes: u64) -> Span {
        let offset = self.top.get().next_multiple_of(256);
        self.top.set(offset + bytes);
        assert!(self.top.get() <= DEVICE_BYTES, "the test's arena is too small");
        Span::new(Tier::Device, offset, bytes)
    }

    fn seed(&self) -> u64 {
        self.seed.set(self.seed.get() + 1);
        self.seed.get()
    }

    /// Normal numbers times `scale`.
    pub fn normal(&self, dtype: DType, count: u64, scale: f32) -> View {
        let seed = self.seed();
        let mut values = vec![0.0; count as usize];
        rng::fill_normal(seed, 0, &mut values);
        values.iter_mut().for_each(|value| *value *= scale);
        self.values(dtype, &values)
    }

    pub fn values(&self, dtype: DType, values: &[f32]) -> View {
        self.bytes(dtype, &encode(dtype, values))
    }

    pub fn integers(&self, values: &[i32]) -> View {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.bytes(DType::I32, &bytes)
    }

    pub fn bytes(&self, dtype: DType, bytes: &[u8]) -> View {
        let span = self.span(bytes.len() as u64);
        self.cpu.upload(span, bytes).unwrap();
        self.cuda.upload(span, bytes).unwrap();
        span.view(dtype)
    }

    /// Memory that is no number until it is written.
    pub fn poisoned(&self, dtype: DType, count: u64) -> View {
        self.bytes(dtype, &vec![0xFF; dtype.bytes(count) as usize])
    }

    /// Scratch that is no number, in both backends as large as the larger asks.
    pub fn scratch(&self, ask: impl Fn(&dyn Operators) -> u64) -> View {
        let bytes = ask(&self.cpu).max(ask(&self.cuda)).next_multiple_of(4);
        self.poisoned(DType::F32, bytes / 4)
    }

    /// Runs on both.
    pub fn run(&self, work: impl Fn(&dyn Operators)) {
        work(&self.cpu);
        work(&self.cuda);
        self.cpu.join(self.cpu.mark(Stream::Compute)).unwrap();
        self.cuda.join(self.cuda.mark(Stream::Compute)).unwrap();
    }

    pub fn download(&self, view: View) -> (Vec<u8>, Vec<u8>) {
        let mut bytes = (vec![0; view.span.bytes as usize], vec![0; view.span.bytes as usize]);
        self.cpu.download(view.span, &mut bytes.0).unwrap();
        self.cuda.download(view.span, &mut bytes.1).unwrap();
        bytes
    }

    /// ‖cuda − cpu‖ / ‖cpu‖
    pub fn error(&self, view: View) -> f64 {
        let (cpu, cuda) = self.download(view);
        relative(&decode(view.dtype, &cuda), &decode(view.dtype, &cpu))
    }

    /// Asserts that the relative error is at most `units` roundings of the view's type.
    #[track_caller]
    pub fn close(&self, what: &str, view: View, units: f64) {
        let error = self.error(view);
        let allowed = units * rounding(view.dtype);
        assert!(error <= allowed, "{what} in {:?}: relative error {error:.2e}, allowed {allowed:.2e}", view.dtype);
    }

    #[track_caller]
    pub fn same_bits(&self, what: &str, view: View) {
        let (cpu, cuda) = self.download(view);
        let first = cpu.iter().zip(&cuda).position(|(a, b)| a != b);
        assert!(first.is_none(), "{what} in {:?}: the bits differ first at byte {first:?}", view.dtype);
    }
}

/// The largest relative error of one rounding to a type; for f32 that of a sum of a few hundred terms in
/// another order.
pub fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::Bf16 => 1.0 / 256.0,
        DType::F16 => 1.0 / 2048.0,
        DType::F32 => 4e-6,
        _ => 0.0,
    }
}

pub fn relative(got: &[f64], truth: &[f64]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut got.iter().zip(truth).map(|(a, b)| a - b));
    // A NaN anywhere must fail, and NaN compares with nothing.
    if difference.is_nan() { f64::INFINITY } else { difference / norm(&mut truth.iter().copied()).max(1e-30) }
}

pub fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype {
        DType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::F64 => values.iter().flat_map(|v| f64::from(*v).to_le_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        DType::Bf16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        other => panic!("no numbers in {other:?}"),
    }
}

pub fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        DType::F64 => bytes.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
        DType::F32 => bytes.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect(),
        DType::F16 => bytes.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b).to_f64()).collect(),
        DType::Bf16 => bytes.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f64()).collect(),
        DType::I32 => bytes.as_chunks::<4>().0.iter().map(|b| f64::from(i32::from_le_bytes(*b))).collect(),
        other => panic!("no numbers in {other:?}"),
    }
}
