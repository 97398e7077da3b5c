//! Engines for tests, and the reference cases they are held against. On the CPU backend, or with
//! `CASTOR_TEST_BACKEND=cuda` on a GPU.
#![allow(dead_code, reason = "each test file uses its part")]

use castor_kernels::{
    Backend, DType,
    cpu::{Cpu, CpuOptions},
    cuda::{Cuda, CudaOptions},
    link::{Link, LinkOptions},
};
use castor_runtime::plan::Rehearse;
use castor_runtime::{
    layout::Sharding,
    plan::Budgets,
    policy::{DevicePolicy, PlacementPolicy},
};
use castor_trainer::rates::Rates;
use castor_trainer::{
    activations::Keep,
    blueprint::{Blueprint, Options, formats},
    config::ModelConfig,
    engine::Engine,
    lr::{Convention, Decay, Schedule},
    optimizer::{Clip, Optimizer},
    weights::HfFolder,
};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// A folder of the reference cases beside the repository; `None`, said aloud, where they are absent.
pub fn shared(path: &str) -> Option<PathBuf> {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared")).join(path);
    if folder.exists() {
        Some(folder)
    } else {
        eprintln!("skipped: {} is not here", folder.display());
        None
    }
}

/// A folder of the inputs beside the tests.
pub fn inputs(path: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/inputs")).join(path)
}

/// Whether engines run on a GPU.
pub fn on_cuda() -> bool {
    std::env::var("CASTOR_TEST_BACKEND").is_ok_and(|backend| backend == "cuda")
}

/// Reads a JSON file.
pub fn json(path: &Path) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Options of a plain f32 run of the model in `folder`.
pub fn options(folder: &Path, batch: u64, sequence: u64, micro_batches: u64) -> Options {
    let (config, _) = ModelConfig::from_json_file(&folder.join("config.json")).unwrap();
    Options {
        batch,
        sequence,
        micro_batches,
        round: micro_batches,
        sync_each_batch: false,
        formats: formats(DType::F32, DType::F32, DType::F32),
        sharding: Sharding { parameters: true, gradients: true, optimizer: true },
        shards: None,
        keep: vec![Keep::All; config.num_hidden_layers as usize],
        first_keep: Keep::All,
        fused_attention: true,
        document_mask: false,
        deterministic: true,
        logits_bytes: castor_trainer::activations::LOGITS_BYTES,
        optimizer: Some(adamw(0.9, 0.95, 0.1)),
        max_norm: 1.0,
        clip: Clip::Exact,
        updates_on_host: 0,
        schedule: constant(1e-3),
        loss_scale: None,
        seed: 5,
        evaluates: true,
        snapshots: false,
        config,
    }
}

pub fn adamw(beta1: f64, beta2: f64, weight_decay: f64) -> Optimizer {
    Optimizer::AdamW { beta1, beta2, eps: 1e-8, weight_decay }
}

pub fn constant(base: f64) -> Schedule {
    Schedule { base, decay: Decay::Constant, convention: Convention::HuggingFace, min_ratio: 0.0, warmup: 0, total: 1 }
}

/// More than any test model needs.
pub fn plenty() -> Budgets {
    Budgets { device: 1 << 30, host: 1 << 30, ..Budgets::default() }
}

/// Budgets that leave this many bytes for model data beside the fixed memory of a run, and a disk.
pub fn tight(options: &Options, device: u64, host: u64, nvme: &Path) -> Budgets {
    let cpu = Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).unwrap();
    let fixed = Blueprint::new(options.clone(), &cpu).fixed();
    let sum = |parts: &[(_, u64)]| parts.iter().map(|(_, bytes)| bytes.next_multiple_of(4096)).sum::<u64>();
    Budgets {
        device: sum(&fixed.device) + cpu.workspace_bytes() + device,
        host: sum(&fixed.host) + host,
        nvme: 64 << 20,
        nvme_folder: Some(nvme.to_owned()),
    }
}

/// An engine with everything on the device and the weights of `folder`.
pub fn engine(options: Options, folder: &Path) -> Engine {
    engine_with(options, folder, &DevicePolicy, plenty())
}

/// An engine by a policy under budgets, with the weights of `folder`.
pub fn engine_with(options: Options, folder: &Path, policy: &dyn PlacementPolicy, budgets: Budgets) -> Engine {
    engine_of_rank(options, folder, policy, budgets, None)
}

/// One rank's engine; `link` joins it to the others.
pub fn engine_of_rank(
    options: Options,
    folder: &Path,
    policy: &dyn PlacementPolicy,
    budgets: Budgets,
    link: Option<Link>,
) -> Engine {
    let backend: Arc<dyn Backend> = if on_cuda() {
        Arc::new(Cuda::new(CudaOptions { deterministic: true, link, ..CudaOptions::default() }).unwrap())
    } else {
        let device_bytes = Some(budgets.device);
        Arc::new(Cpu::new(CpuOptions { device_bytes, threads: Some(1), link, ..CpuOptions::default() }).unwrap())
    };
    let budgets = Budgets { device: budgets.device + backend.device().overhead_bytes, ..budgets };
    let blueprint = Blueprint::new(options, backend.as_ref());
    let plan =
        blueprint.plan(backend.as_ref(), &Rates::assumed("cpu"), policy, budgets, None, Rehearse::ToRun).unwrap();
    let mut engine = Engine::new(backend, &blueprint, plan).unwrap();
    let (weights, _) = HfFolder::open(folder, &engine.options().config).unwrap();
    engine.load(&weights).unwrap();
    engine
}

/// Runs `rank(number, link)` on as many threads as there are ranks; what each returned, in order.
pub fn ranks<T: Send>(world: u32, shards: Option<u32>, rank: impl Fn(u32, Option<Link>) -> T + Sync) -> Vec<T> {
    let links = Link::in_process(world, LinkOptions { shards, ..LinkOptions::default() }).unwrap();
    let rank = &rank;
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..).zip(links).map(|(number, link)| scope.spawn(move || rank(number, Some(link)))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// |a − b| ≤ tolerance · |b|, with both in the message.
#[track_caller]
pub fn close(what: &str, a: f64, b: f64, tolerance: f64) {
    let error = (a - b).abs() / b.abs().max(f64::MIN_POSITIVE);
    assert!(error <= tolerance, "{what}: {a} instead of {b}, off by {error:.2e} > {tolerance:.0e}");
}
