//! Benches of Castor, and the run that they share. `LOG.md` keeps what they printed; `gpu/` holds the scripts for
//! machines with GPUs.

use castor_kernels::DType;
use castor_runtime::layout::Sharding;
use castor_trainer::activations::{Keep, LOGITS_BYTES};
use castor_trainer::blueprint::{Options, formats};
use castor_trainer::config::ModelConfig;
use castor_trainer::lr::{Convention, Decay, Schedule};
use castor_trainer::optimizer::{Clip, Optimizer};

/// AdamW at a constant rate on one micro-batch of a single row, in f32, with everything sharded and nothing computed
/// again. `sequence`: tokens of the row.
pub fn options(config: ModelConfig, sequence: u64) -> Options {
    Options {
        batch: 1,
        sequence,
        micro_batches: 1,
        round: 1,
        sync_each_batch: false,
        formats: formats(DType::F32, DType::F32, DType::F32),
        sharding: Sharding { parameters: true, gradients: true, optimizer: true },
        shards: None,
        keep: vec![Keep::All; config.num_hidden_layers as usize],
        first_keep: Keep::All,
        fused_attention: true,
        document_mask: false,
        deterministic: true,
        logits_bytes: LOGITS_BYTES,
        optimizer: Some(Optimizer::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 }),
        max_norm: 1.0,
        clip: Clip::Exact,
        updates_on_host: 0,
        schedule: Schedule {
            base: 1e-3,
            decay: Decay::Constant,
            convention: Convention::HuggingFace,
            min_ratio: 0.0,
            warmup: 0,
            total: 1,
        },
        loss_scale: None,
        seed: 1,
        evaluates: false,
        snapshots: false,
        config,
    }
}
