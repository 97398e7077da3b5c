//! How fast is a Hugging Face folder loaded, against the disk, and in how much memory?
//!
//! `cargo bench -p castor-benches --bench loading -- FOLDER [RANKS [ROUNDS]]`. The folder's files are dropped from the system's cache
//! before each reading. Read are: the files as they lie; all weights through the engine's way to a backend that keeps
//! nothing; and rank 0's part of RANKS (default 16) into memory, with bf16 weights, exact masters and fp32 moments.

use castor_kernels::cpu::{Cpu, CpuOptions};
use castor_kernels::dry::{Dry, DryProfile};
use castor_kernels::link::{Link, LinkOptions};
use castor_kernels::{Backend, DType, Tier};
use castor_runtime::plan::{Budgets, Rehearse};
use castor_runtime::policy::HostPolicy;
use castor_trainer::activations::Keep;
use castor_trainer::blueprint::{Blueprint, Options, formats};
use castor_trainer::config::ModelConfig;
use castor_trainer::engine::Engine;
use castor_trainer::error::{Error, Result};
use castor_trainer::rates::Rates;
use castor_trainer::report::{peak_host_bytes, resident_host_bytes};
use castor_trainer::weights::HfFolder;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

fn options(config: ModelConfig) -> Options {
    Options {
        formats: formats(DType::Bf16, DType::Bf16, DType::F32),
        keep: vec![Keep::Block; config.num_hidden_layers as usize],
        ..castor_benches::options(config, 128)
    }
}

fn failed(path: &Path, error: impl std::fmt::Display) -> Error {
    Error::Failed(format!("{}: {error}", path.display()))
}

/// The folder's weight files, dropped from the system's cache.
fn dropped(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder).map_err(|error| failed(folder, error))?;
    let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.retain(|path| path.extension().is_some_and(|ending| ending == "safetensors"));
    paths.sort();
    for path in &paths {
        let file = File::open(path).map_err(|error| failed(path, error))?;
        let drop = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
        drop.map_err(|error| failed(path, error))?;
    }
    Ok(paths)
}

/// Bytes per second of reading the files from the first to the last byte.
fn as_they_lie(folder: &Path) -> Result<f64> {
    let paths = dropped(folder)?;
    let (began, mut bytes) = (Instant::now(), 0);
    let mut piece = vec![0; 4 << 20];
    for path in &paths {
        let mut file = File::open(path).map_err(|error| failed(path, error))?;
        loop {
            match file.read(&mut piece).map_err(|error| failed(path, error))? {
                0 => break,
                count => bytes += count,
            }
        }
    }
    Ok(bytes as f64 / began.elapsed().as_secs_f64())
}

/// Seconds of loading on `backend` with everything at home on the host, and the plan's bytes of it.
fn load(folder: &Path, config: &ModelConfig, backend: Arc<dyn Backend>) -> Result<(f64, u64)> {
    dropped(folder)?;
    let blueprint = Blueprint::new(options(config.clone()), &*backend);
    let budgets = Budgets { device: 4 << 30, host: 1 << 40, ..Budgets::default() };
    let plan = blueprint.plan(
        &*backend,
        &Rates::assumed("cpu"),
        &HostPolicy { parameters: true, optimizer: true },
        budgets,
        None,
        Rehearse::ToRun,
    )?;
    let taken = plan.peak(Tier::Host);
    let mut engine = Engine::new(backend, &blueprint, plan)?;
    let began = Instant::now();
    let (source, _) = HfFolder::open(folder, config)?;
    engine.load(&source)?;
    Ok((began.elapsed().as_secs_f64(), taken))
}

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let Some(folder) = words.first().map(PathBuf::from) else {
        println!("skipped: give the folder of a model after --");
        return Ok(());
    };
    let rounds = words.get(2).and_then(|text| text.parse().ok()).unwrap_or(2);
    let ranks = words.get(1).and_then(|text| text.parse().ok()).unwrap_or(16);
    let (config, _) = ModelConfig::from_json_file(&folder.join("config.json"))?;
    let bytes = 2.0 * config.parameters() as f64;
    for _ in 0..rounds {
        let disk = as_they_lie(&folder)?;
        let (seconds, _) = load(&folder, &config, Arc::new(Dry::new(1, 0, DryProfile::default())))?;
        let rate = bytes / seconds;
        println!(
            "files {:.0} MB/s; weights {:.0} MB/s, {:.0} % of it; peak {:.0} MiB",
            disk / 1e6,
            rate / 1e6,
            100.0 * rate / disk,
            peak_host_bytes().unwrap_or(0) as f64 / f64::from(1 << 20)
        );
    }
    let mut links = Link::in_process(ranks, LinkOptions::default())?;
    let own = links.remove(0);
    let cpu = Cpu::new(CpuOptions { link: Some(own), ..CpuOptions::default() })?;
    let before = resident_host_bytes().unwrap_or(0);
    let (seconds, taken) = load(&folder, &config, Arc::new(cpu))?;
    let peak = peak_host_bytes().unwrap_or(0).saturating_sub(before);
    println!(
        "rank 0 of {ranks}: {seconds:.1} s; the plan's memory {:.0} MiB, peak {:.0} MiB",
        taken as f64 / f64::from(1 << 20),
        peak as f64 / f64::from(1 << 20)
    );
    Ok(())
}
