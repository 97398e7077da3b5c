//! How long a step will take, and what bounds it: arithmetic over the model's shape, the placement and rates.
//!
//! Used to choose between plans that fit (what each block keeps, how many micro-batches go together) and shown by
//! `castor plan`. It models the step as two engines a direction of the link, and takes for each round the
//! longer of computing and moving; what prefetch can bring in during a backward is not waited for in the next
//! forward, and what lies on the disk is not brought in ahead. It is no measurement: the run's own figures are in its report.

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

impl std::fmt::Display for Estimate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (step, compute) = (self.step_s, self.compute_s);
        write!(f, "{step:.3} s a step (compute {compute:.3} s), bounded by {}", self.bound())
    }
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

/// Seconds of arithmetic of one step.
#[derive(Clone, Copy, Debug)]
struct Arithmetic {
    forward_s: f64,
    backward_s: f64,
    update_s: f64,
}

/// Work of one token in one block or the head: operations of products, of attention, and bytes of device memory that
/// the small operators between them read and write.
#[derive(Clone, Copy, Debug, Default)]
struct Work {
    products: f64,
    attention: f64,
    bytes: f64,
}

impl Work {
    fn seconds(self, rates: &Rates) -> f64 {
        self.products / rates.products + self.attention / rates.attention + self.bytes / rates.device_memory
    }
}

fn arithmetic(options: &Options, layout: &Layout, rates: &Rates) -> Arithmetic {
    let config = &options.config;
    let of = |value: u64| value as f64;
    let element = options.formats.parameter.bytes(1) as f64;
    let (hidden, ffn, vocabulary) = (of(config.hidden_size), of(config.intermediate_size), of(config.vocab_size));
    let query = of(config.num_attention_heads * config.head_dim);
    let rotated = query + of(config.num_key_value_heads * config.head_dim);
    let packed = rotated + of(config.num_key_value_heads * config.head_dim);
    let (qkv, out, gate_up, down) =
        (2.0 * hidden * packed, 2.0 * query * hidden, 4.0 * hidden * ffn, 2.0 * hidden * ffn);
    // Causal: half of the square, two products of it.
    let attention = 2.0 * of(options.sequence) * query;
    // Reads and writes of two norms and the rotation; of the SwiGLU.
    let (norms, rotation, swiglu) = (4.0 * hidden * element, 2.0 * rotated * element, 3.0 * ffn * element);
    let forward = Work { products: qkv + out + gate_up + down, attention, bytes: norms + rotation + swiglu };
    let backward = |keep: &Keep| {
        // The gradients of norms and SwiGLU read twice what the forward reads.
        let bytes = 2.0 * norms + rotation + 2.0 * swiglu;
        let own = Work { products: 2.0 * forward.products, attention: 2.5 * attention, bytes };
        let again = match keep {
            Keep::All => Work::default(),
            Keep::Selective => Work { bytes: norms + swiglu / 3.0, ..Work::default() },
            Keep::Ffn => Work { products: gate_up, bytes: norms + swiglu, ..Work::default() },
            Keep::Block => Work { products: qkv + out + gate_up, attention, bytes: norms + rotation + swiglu },
        };
        own.seconds(rates) + again.seconds(rates)
    };
    // Logits are written, turned into gradients in place, and read by two products.
    let head = Work { products: 6.0 * hidden * vocabulary, bytes: 3.0 * vocabulary * element, ..Work::default() };
    let tokens = of(options.batch * options.sequence * options.micro_batches);
    let stored = |wanted: fn(Role) -> bool| -> f64 {
        let chunks = layout.chunk_ids().filter(|chunk| wanted(chunk.role()));
        chunks.map(|chunk| of(layout.stored_bytes(chunk))).sum()
    };
    let gradients = stored(|role| role == Role::Gradient);
    // All micro-batches but the first add to the gradients.
    let added = 2.0 * gradients * of(options.micro_batches.saturating_sub(1));
    Arithmetic {
        forward_s: tokens * forward.seconds(rates) * of(config.num_hidden_layers),
        backward_s: tokens * (options.keep.iter().map(backward).sum::<f64>() + head.seconds(rates))
            + added / rates.device_memory,
        // Each state is read and written, each gradient read twice.
        update_s: 2.0 * (stored(|role| role != Role::Gradient) + gradients) / rates.device_memory,
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
    // Seconds that a pass of a later round waits for, on the slower of the ways in.
    let passes = (2.0 * rounds - 1.0).max(1.0);
    let passes_s = (round_in(&off) / rates.host_to_device).max(round_in(&disk) / rates.nvme_read) / passes;
    let idle = (a.backward_s / rounds * rates.host_to_device - round_in(&off) / rounds).max(0.0);
    // The window serves the uses at hand first: about four fifths of it are ahead of them at the end of a step
    // (measured: 7B with windows of 8 and 28 GiB).
    let ahead = (0.8 * placement.window_bytes as f64).min(idle).min(update_in(&off));
    // What lies on the disk comes through a staging of few chunks, and leaves through it before more can come.
    let disk_s = (update_in(&disk) / rates.nvme_read).max((states(&disk) + disk[0]) / rates.nvme_write);
    let first_s = (forward_s + a.update_s).max((update_in(&off) - ahead) / rates.host_to_device).max(disk_s);
    let other_s = (rounds - 1.0) * forward_s.max(passes_s) + rounds * (a.backward_s / rounds).max(passes_s);
    let links_s = [
        total_in(&off) / rates.host_to_device,
        total_out(&off) / rates.device_to_host,
        total_in(&disk) / rates.nvme_read,
        total_out(&disk) / rates.nvme_write,
    ];
    // Products run slower while copies share the device's memory with them (measured: 4 to 8 % of the copies' time).
    let shared_s = 0.06 * links_s[0].max(links_s[1]);
    let step_s = links_s.iter().fold(first_s + other_s + shared_s, |longest, link| longest.max(*link));
    Estimate { step_s, compute_s: a.forward_s + a.backward_s + a.update_s, links_s }
}
