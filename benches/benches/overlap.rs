//! Is overlap real? A small Llama on the emulated device, everything at home on the host, over links so slow that
//! transfers take 60 % of the step's arithmetic: with prefetch the step should take hardly longer than without
//! offload, and with demand fetching visibly longer.
//!
//! `cargo bench -p castor-benches --bench overlap`. One compute thread, so that the copy engines have a core.

use castor_kernels::Backend;
use castor_kernels::cpu::{Cpu, CpuOptions};
use castor_runtime::Pass;
use castor_runtime::plan::Budgets;
use castor_runtime::plan::Rehearse;
use castor_runtime::policy::{DevicePolicy, HostPolicy, PlacementPolicy};
use castor_trainer::blueprint::{Blueprint, Options};
use castor_trainer::config::{Family, ModelConfig, RopeScaling};
use castor_trainer::engine::{Engine, StepInputs};
use castor_trainer::error::Result;
use castor_trainer::inputs::MicroBatch;
use castor_trainer::rates::Rates;
use castor_trainer::weights::RandomWeights;
use std::sync::Arc;
use std::time::Instant;

const SEQUENCE: u64 = 128;
const ROWS: u64 = 4;
const STEPS: u32 = 6;

fn model() -> ModelConfig {
    ModelConfig {
        family: Family::Llama,
        vocab_size: 512,
        hidden_size: 256,
        intermediate_size: 704,
        num_hidden_layers: 12,
        num_attention_heads: 4,
        num_key_value_heads: 4,
        head_dim: 64,
        rms_norm_eps: 1e-5,
        rope_theta: 10000.0,
        rope_scaling: RopeScaling::Default,
        max_position_embeddings: SEQUENCE,
        attention_bias: false,
        mlp_bias: false,
        sliding_window: None,
        tie_word_embeddings: false,
        initializer_range: 0.02,
        token_ids: Default::default(),
    }
}

fn options() -> Options {
    Options { batch: ROWS, ..castor_benches::options(model(), SEQUENCE) }
}

/// Seconds of a steady step, bytes that a step moves in the busier direction, and the last loss.
fn run(
    policy: &dyn PlacementPolicy,
    rate: Option<f64>,
    lookahead: Option<u64>,
    device: u64,
) -> Result<(f64, u64, f64)> {
    let backend: Arc<dyn Backend> = Arc::new(Cpu::new(CpuOptions {
        device_bytes: Some(device),
        host_to_device_bytes_per_s: rate,
        device_to_host_bytes_per_s: rate,
        threads: Some(1),
        ..CpuOptions::default()
    })?);
    let blueprint = Blueprint::new(options(), &*backend);
    let budgets = Budgets { device, host: 2 << 30, ..Budgets::default() };
    let plan = blueprint.plan(&*backend, &Rates::assumed("cpu"), policy, budgets, lookahead, Rehearse::ToRun)?;
    let mut engine = Engine::new(backend, &blueprint, plan)?;
    engine.load(&RandomWeights::new(&model(), 1))?;
    let tokens = ROWS * SEQUENCE;
    let ids: Vec<i32> = (0..tokens).map(|at| (castor_kernels::rng::bits(3, at, 0) % 512) as i32).collect();
    let micro = MicroBatch { ids: &ids, labels: &ids, starts: None };
    let counted = micro.counted(SEQUENCE);
    let mut seconds = Vec::new();
    let mut loss = 0.0;
    for _ in 0..STEPS {
        let began = Instant::now();
        let result = engine.step(&StepInputs { micros: &[micro], tokens: counted })?;
        loss = result.map_or(loss, |result| result.loss);
        seconds.push(began.elapsed().as_secs_f64());
    }
    let traffic = engine.manager().last_traffic(Pass::Train);
    let steady = &mut seconds[2..];
    steady.sort_by(f64::total_cmp);
    Ok((steady[steady.len() / 2], traffic.host_to_device.max(traffic.device_to_host), loss))
}

fn main() -> Result<()> {
    let plenty = 1 << 30;
    let host = HostPolicy { parameters: true, optimizer: true };
    let (alone, _, loss) = run(&DevicePolicy, None, None, plenty)?;
    // What crosses the link, with a device too small to keep any of it for the next step.
    let small = 136 << 20;
    let (_, bytes, _) = run(&host, None, None, small)?;
    let rate = bytes as f64 / (0.6 * alone);
    let (ahead, _, ahead_loss) = run(&host, Some(rate), None, small)?;
    let (demand, _, demand_loss) = run(&host, Some(rate), Some(0), small)?;
    println!("no offload            {:.1} ms a step", alone * 1e3);
    println!(
        "links                 {:.1} MiB a step at {:.1} MB/s: 60 % of that",
        bytes as f64 / (1 << 20) as f64,
        rate / 1e6
    );
    println!("offload, prefetch     {:.1} ms, {:.2} × (at most 1.15 is asked)", ahead * 1e3, ahead / alone);
    println!("offload, on demand    {:.1} ms, {:.2} ×", demand * 1e3, demand / alone);
    println!("losses                {loss:.9} {ahead_loss:.9} {demand_loss:.9}");
    assert!(loss == ahead_loss && loss == demand_loss, "L6: offload changed the losses");
    Ok(())
}
