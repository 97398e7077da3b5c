//! Rotation angles of every position.

use crate::config::{ModelConfig, RopeScaling};
use std::f64::consts::TAU;

/// f32 `[S,D]`: per position D/2 cosines, then D/2 sines. Frequencies and angles are f32, as in the reference
/// implementation.
pub fn table(config: &ModelConfig, sequence: u64) -> Vec<f32> {
    let frequencies: Vec<f32> = (0..config.head_dim / 2)
        .map(|pair| frequency(config, pair))
        .collect();
    let mut table = Vec::with_capacity((sequence * config.head_dim) as usize);
    for position in 0..sequence {
        let angle = |f: &f32| position as f32 * f;
        table.extend(frequencies.iter().map(|f| angle(f).cos()));
        table.extend(frequencies.iter().map(|f| angle(f).sin()));
    }
    table
}

fn frequency(config: &ModelConfig, pair: u64) -> f32 {
    let exponent = (2 * pair) as f32 / config.head_dim as f32;
    let plain = 1.0 / config.rope_theta.powf(f64::from(exponent)) as f32;
    match config.rope_scaling {
        RopeScaling::Default => plain,
        RopeScaling::Linear { factor } => plain / factor as f32,
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => {
            let original = original_max_position_embeddings as f64;
            let wavelength = TAU / f64::from(plain);
            if wavelength < original / high_freq_factor {
                plain
            } else if wavelength > original / low_freq_factor {
                plain / factor as f32
            } else {
                let kept = (original / wavelength - low_freq_factor)
                    / (high_freq_factor - low_freq_factor);
                ((1.0 - kept) * f64::from(plain) / factor + kept * f64::from(plain)) as f32
            }
        }
    }
}
