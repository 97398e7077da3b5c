//! Measured rates move the planner: what a slow link makes dear is kept on the device, and computed again instead.

use castor_kernels::cpu::{Cpu, CpuOptions};
use castor_runtime::plan::{Budgets, Plan};
use castor_trainer::activations::Keep;
use castor_trainer::auto;
use castor_trainer::blueprint::Blueprint;
use castor_trainer::cli::{self, Command};
use castor_trainer::estimate::Estimate;
use castor_trainer::rates::Rates;
use castor_trainer::session::{self, Hardware};
use std::sync::Arc;

/// The plan of a model that fits the device only if blocks are computed again, by the rates of a link.
fn plan(link_bytes_per_s: f64) -> (Blueprint, Plan, Estimate) {
    let config = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/castor-tiny.json");
    let words = ["castor", "plan", "--backend", "cpu", "--max_length", "256", "--config", config];
    let Command::Plan { settings, .. } = cli::parse(words.map(Into::into)).unwrap() else { panic!("a plan was asked") };
    let backend = Arc::new(Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).unwrap());
    let budgets = Budgets { device: 90 << 20, host: 1 << 30, nvme: 0, nvme_folder: None };
    let rates = Rates { host_to_device: link_bytes_per_s, device_to_host: link_bytes_per_s, ..Rates::assumed("cpu") };
    let hardware = Hardware { backend, room: budgets.clone(), budgets, rates, notices: Vec::new() };
    let (config, _) = settings.model_shape().unwrap();
    let options = session::options(&settings, config, 256, settings.batch_size, 1, 1);
    auto::plan(&settings, options, &hardware, 1).unwrap()
}

#[test]
fn a_slow_link_moves_the_choice() {
    let (fast, fast_plan, fast_time) = plan(50e9);
    let (slow, slow_plan, slow_time) = plan(10e6);
    assert!(fast.options().keep.iter().all(|keep| *keep == Keep::All), "{:?}", fast.options().keep);
    assert!(slow.options().keep.contains(&Keep::Block), "{:?}", slow.options().keep);
    let moved = |plan: &Plan| plan.predicted.steady().host_to_device;
    assert!(moved(&slow_plan) < moved(&fast_plan));
    assert!(slow_time.time.compute_s > fast_time.time.compute_s);
}
