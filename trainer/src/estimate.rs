//! How long a step will take, and what bounds it: arithmetic over the model's shape, the placement and rates.
//!
//! Used to choose between plans that fit (what each block keeps, how many micro-batches go together) and shown by
//! `castor plan`. It models the step as two engines a direction of the link, and takes for each round the
//! longer of computing and moving; what prefetch can bring in during a backward is not waited for in the next
//! forward. It is no measurement: the run's own figures are in its report.

use crate::activations::Keep;
use crate::blueprint::Options;
use crate::rates::Rates;
use castor_kernels::Tier;
use castor_runtime::layout::Layout;
use castor_runtime::policy::Placement;
use castor_runtime::{ChunkId, Role};

/// A step's predicted time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Seconds of the whole step.
    pub step_s: f64,
    /// Seconds of its arithmetic alone.
    pub compute_s: f64,
    /// Seconds for which each link is busy: host to device, device to host, disk to host, host to disk.
    pub links_s: [f64; 4],
}

impl Estimate {
    /// What takes longest: "compute" or a link.
    pub fn bound(&self) -> &'static str {
        const LINKS: [&str; 4] = ["host to device", "device to host", "nvme read", "nvme write"];
        let longest = LINKS.into_iter().zip(self.links_s).max_by(|a, b| a.1.total_cmp(&b.1));
        match longest {
            Some((name, seconds)) if seconds > self.compute_s => name,
            _ if self.step_s > 1.02 * self.compute_s => "host to device, in the forward",
            _ => "compute",
        }
    }
}

/// Seconds of arithmetic of one step: forward and backward of one token's worth times the tokens of a rank.
#[derive(Clone, Copy, Debug)]
struct Arithmetic {
    forward_s: f64,
    backward_s: f64,
    update_s: f64,
}

fn arithmetic(options: &Options, layout: &Layout, rates: &Rates) -> Arithmetic {
    let config = &options.config;
    let of = |value: u64| value as f64;
    let (hidden, ffn) = (of(config.hidden_size), of(config.intermediate_size));
    let query = of(config.num_attention_heads * config.head_dim);
    let packed = query + 2.0 * of(config.num_key_value_heads * config.head_dim);
    let (qkv, out, gate_up, down) =
        (2.0 * hidden * packed, 2.0 * query * hidden, 4.0 * hidden * ffn, 2.0 * hidden * ffn);
    // Attention runs at about two thirds of the products' rate.
    let attention = 2.0 * of(options.sequence) * query * 1.5;
    let forward = qkv + out + gate_up + down + attention;
    let backward = |keep: &Keep| {
        let again = match keep {
            Keep::All => 0.0,
            Keep::Selective => 0.06 * forward,
            Keep::Ffn => 0.06 * forward + gate_up,
            Keep::Block => 0.06 * forward + qkv + attention + out + gate_up,
        };
        2.0 * (qkv + out + gate_up + down) + 2.5 * attention + again
    };
    let head = 2.0 * hidden * of(config.vocab_size);
    let tokens = of(options.batch * options.sequence * options.micro_batches);
    let seconds = |flops: f64| flops * tokens / rates.products;
    let stored: f64 = layout
        .chunk_ids()
        .filter(|chunk| chunk.role() != Role::Gradient)
        .map(|chunk| of(layout.stored_bytes(chunk)))
        .sum();
    Arithmetic {
        forward_s: seconds(forward * of(config.num_hidden_layers)),
        backward_s: seconds(options.keep.iter().map(backward).sum::<f64>() + 3.0 * head),
        // Each state is read and written, each gradient read twice.
        update_s: 2.2 * stored / rates.device_memory,
    }
}

/// The least time that a step with these recompute levels can take.
pub fn floor_s(options: &Options, layout: &Layout, rates: &Rates) -> f64 {
    let a = arithmetic(options, layout, rates);
    a.forward_s + a.backward_s + a.update_s
}

/// The time of a step under a placement.
pub fn estimate(options: &Options, layout: &Layout, placement: &Placement, rates: &Rates) -> Estimate {
    let a = arithmetic(options, layout, rates);
    let rounds = options.micro_batches.div_ceil(options.round.max(1)).max(1) as f64;
    let mut off = [0.0; 5];
    let mut disk = [0.0; 5];
    for chunk in layout.chunk_ids() {
        let bytes = layout.stored_bytes(chunk) as f64;
        let home = placement.homes[ChunkId::index(chunk)];
        let role = chunk.role().index();
        off[role] += if home == Some(Tier::Device) { 0.0 } else { bytes };
        disk[role] += if home == Some(Tier::Nvme) { bytes } else { 0.0 };
    }
    let states = |bytes: &[f64; 5]| bytes[2] + bytes[3] + bytes[4];
    // Into the first forward: everything an update wants. Into every other pass: the weights; and the gradients
    // where a round adds to them.
    let update_in = |bytes: &[f64; 5]| states(bytes) + bytes[0] + bytes[1];
    let round_in = |bytes: &[f64; 5]| (2.0 * rounds - 1.0) * bytes[0] + (rounds - 1.0) * bytes[1];
    let total_in = |bytes: &[f64; 5]| update_in(bytes) + round_in(bytes);
    let total_out = |bytes: &[f64; 5]| states(bytes) + bytes[0] + rounds * bytes[1];
    let forward_s = a.forward_s / rounds;
    let passes_s = rates.host_to_device.recip() * round_in(&off) / (2.0 * rounds - 1.0).max(1.0);
    let idle = (a.backward_s / rounds * rates.host_to_device - round_in(&off) / rounds).max(0.0);
    // The window serves the uses at hand first: a quarter of it is ahead of them at the end of a step.
    let ahead = (0.25 * placement.window_bytes as f64).min(idle).min(update_in(&off));
    let first_s = (forward_s + a.update_s).max((update_in(&off) - ahead) / rates.host_to_device);
    let other_s = (rounds - 1.0) * forward_s.max(passes_s) + rounds * (a.backward_s / rounds).max(passes_s);
    let links_s = [
        total_in(&off) / rates.host_to_device,
        total_out(&off) / rates.device_to_host,
        total_in(&disk) / rates.nvme_read,
        total_out(&disk) / rates.nvme_write,
    ];
    // Products run slower while copies share the device's memory with them (measured: 8 % of the copies' time).
    let shared_s = 0.08 * links_s[0].max(links_s[1]);
    let step_s = links_s.iter().fold(first_s + other_s + shared_s, |longest, link| longest.max(*link));
    Estimate { step_s, compute_s: a.forward_s + a.backward_s + a.update_s, links_s }
}
