//! Random initial weights that do not depend on who asks for which piece.

use castor_kernels::rng;
use rayon::prelude::*;
use xxhash_rust::xxh3::xxh3_64;

use crate::config::ModelConfig;
use crate::error::Result;
use crate::source::TensorSource;

/// Elements that one thread makes at a time.
const PIECE: usize = 1 << 14;

/// Initial weights from a seed: matrices and tables normal with the configuration's `initializer_range`,
/// norms 1, biases 0. An element is a function of (seed, tensor's name, index), so any sharding over any
/// number of ranks gives the same model.
#[derive(Clone, Copy, Debug)]
pub struct RandomWeights {
    seed: u64,
    deviation: f32,
}

impl RandomWeights {
    /// The weights of `config` for `seed`.
    pub fn new(config: &ModelConfig, seed: u64) -> RandomWeights {
        RandomWeights { seed, deviation: config.initializer_range as f32 }
    }
}

impl TensorSource for RandomWeights {
    fn read(&self, name: &str, first: u64, out: &mut [f32]) -> Result<()> {
        if name.ends_with("norm.weight") {
            out.fill(1.0);
        } else if name.ends_with(".bias") {
            out.fill(0.0);
        } else {
            let stream = self.seed ^ xxh3_64(name.as_bytes());
            out.par_chunks_mut(PIECE).enumerate().for_each(|(index, piece)| {
                let first = first + (index * PIECE) as u64;
                rng::fill_normal(stream, first, piece);
                piece.iter_mut().for_each(|value| *value *= self.deviation);
            });
        }
        Ok(())
    }
}
