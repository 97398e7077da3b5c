//! The layout wastes next to nothing: padding of well-known models on few and many ranks.

use castor_kernels::DType;
use castor_kernels::cpu::{Cpu, CpuOptions};
use castor_tests::engines::{ADAMW, options};
use castor_trainer::activations::Keep;
use castor_trainer::blueprint::{Blueprint, Options};
use castor_trainer::config::ModelConfig;
use std::path::Path;

#[test]
fn padding_stays_below_half_a_percent() {
    let configs = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../configs"));
    let cpu = Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).expect("threads");
    for name in ["llama2-7b", "llama2-13b", "llama2-70b", "llama3-8b", "llama3.2-1b", "smollm2-135m"] {
        let (config, _) = ModelConfig::from_json_file(&configs.join(format!("{name}.json"))).expect("a model");
        for ranks in [1, 2, 3, 8, 64] {
            let options = Options {
                keep: vec![Keep::Block; config.num_hidden_layers as usize],
                config: config.clone(),
                ..options(1, DType::Bf16, ADAMW, false)
            };
            let blueprint = Blueprint::for_world(options, &cpu, ranks);
            let waste = blueprint.layout().waste();
            assert!((0.0..0.005).contains(&waste), "{name} on {ranks} ranks: {:.3} % padding", waste * 100.0);
            assert_eq!(blueprint.layout().used(), config.parameters(), "{name}: each parameter is laid out once");
        }
    }
}
