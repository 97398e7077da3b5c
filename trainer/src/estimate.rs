//! How long a step will take, and what bounds it.
//!
//! [`Costs`] is the arithmetic of each tick, from the model's shape and the machine's rates. The rehearsal of the
//! plan ([`castor_runtime::timeline`]) sets it beside every move that the run will make; [`Estimate`] is the steady
//! step's outcome. It serves to choose between plans that fit (what each block keeps, how many micro-batches go
//! together) and is shown by `castor plan`. It is no measurement: the run's own figures are in its report.

use crate::activations::Keep;
use crate::blueprint::Options;
use crate::rates::Rates;
use castor_kernels::{DType, Stream};
use castor_runtime::layout::Layout;
use castor_runtime::plan::Plan;
use castor_runtime::timeline::{Pace, StepTime};
use castor_runtime::{Bytes, GroupId, Role};

/// A step's predicted time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Of a steady step.
    pub time: StepTime,
}

impl std::fmt::Display for Estimate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (step, compute) = (self.time.step_s, self.time.compute_s);
        write!(f, "{step:.3} s a step (compute {compute:.3} s), bounded by {}", self.bound())
    }
}

impl Estimate {
    /// A steady step of `plan`.
    pub fn of(plan: &Plan) -> Estimate {
        Estimate { time: plan.predicted.steady_time() }
    }

    /// What a rank's steady steps write to its disk, and how long a drive that may be written `endurance` TB lasts at
    /// this pace with `ranks` on it. None if nothing is written.
    pub fn wear(&self, plan: &Plan, ranks: u32, endurance: Option<f64>) -> Option<String> {
        let written = plan.predicted.steady().nvme_write;
        if written == 0 {
            return None;
        }
        let tb_a_day = written as f64 * f64::from(ranks) / self.time.step_s * 86_400.0 / 1e12;
        let lasts =
            endurance.map(|tb| format!("; a drive that may be written {tb} TB lasts {:.1} days", tb / tb_a_day));
        Some(format!(
            "{} written to the disk per step and rank, {tb_a_day:.2} TB a day{}",
            Bytes(written),
            lasts.unwrap_or_else(|| "; --nvme_endurance TB says how long a drive lasts".into())
        ))
    }

    /// What is busy longest while arithmetic waits, or "compute" where it hardly waits. What it waits for itself is the
    /// last of a chain: a fetch that waits for the disk is no slow link.
    pub fn bound(&self) -> &'static str {
        if self.time.waited_s.iter().sum::<f64>() < 0.02 * self.time.step_s {
            return "compute";
        }
        let busy = |stream: &Stream| self.time.busy_s[stream.index()];
        let moves = Stream::ALL.into_iter().filter(|stream| *stream != Stream::Compute);
        match moves.max_by(|a, b| busy(a).total_cmp(&busy(b))) {
            Some(Stream::HostToDevice) => "host to device",
            Some(Stream::DeviceToHost) => "device to host",
            Some(Stream::Collective) => "collectives",
            Some(Stream::NvmeRead) => "nvme read",
            Some(Stream::NvmeWrite) => "nvme write",
            Some(Stream::Host) => "updates on the host",
            Some(Stream::Compute) | None => "compute",
        }
    }
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

/// What a tick computes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tick {
    /// Embedding, forward.
    Embed,
    /// A block's forward.
    Forward(u64),
    /// Head, forward and backward.
    Head,
    /// A block's backward, with what it computes again.
    Backward(u64),
    /// Embedding, backward.
    EmbedBackward,
    /// The global norm's end.
    Norm,
    /// A group's update.
    Update,
    /// The same, by the host's cores.
    UpdateOnHost,
    /// A group's Hessian estimate.
    Hessian,
}

impl Tick {
    /// Name in schedules and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Tick::Embed => "embed",
            Tick::Forward(_) => "forward",
            Tick::Head => "head",
            Tick::Backward(_) => "backward",
            Tick::EmbedBackward => "embed backward",
            Tick::Norm => "norm",
            Tick::Update => "update",
            Tick::UpdateOnHost => "update on the host",
            Tick::Hessian => "hessian",
        }
    }
}

/// Seconds of arithmetic of every tick of a step.
#[derive(Clone, Debug)]
pub struct Costs {
    /// Of a block's forward on one micro-batch.
    forward_s: f64,
    /// Of a block's backward on one micro-batch, by what was kept.
    backward_s: [f64; Keep::ALL.len()],
    /// Of the head on one micro-batch.
    head_s: f64,
    /// Of each group: update, and adding to its gradient.
    groups_s: Vec<(f64, f64)>,
}

impl Costs {
    /// At these rates.
    pub fn new(options: &Options, layout: &Layout, rates: &Rates) -> Costs {
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
        let backward = |keep: Keep| {
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
        let tokens = of(options.batch * options.sequence);
        let group = |group: GroupId| {
            let stored = |role: Role| of(layout.stored_bytes(group.chunk(role)));
            let exists = |role: &Role| layout.formats.of(*role).is_some();
            let states: f64 = Role::ALL.into_iter().filter(exists).map(stored).sum();
            let gradient = of(layout.full_bytes(group.chunk(Role::Gradient)));
            // Each state is read and written, and the gradient read once more for the norm.
            (2.0 * states / rates.device_memory, 2.0 * gradient / rates.device_memory)
        };
        Costs {
            forward_s: tokens * forward.seconds(rates),
            backward_s: Keep::ALL.map(|keep| tokens * backward(keep)),
            head_s: tokens * head.seconds(rates),
            groups_s: layout.group_ids().map(group).collect(),
        }
    }

    /// Of a tick of `group` on `micros` micro-batches, `added` of which find a gradient to add to, where blocks keep
    /// this.
    pub fn seconds(&self, tick: Tick, group: GroupId, keep: &[Keep], micros: u64, added: u64) -> f64 {
        let (micros, added) = (micros as f64, added as f64);
        let (update_s, add_s) = self.groups_s[group.index()];
        match tick {
            Tick::Embed | Tick::EmbedBackward | Tick::Norm | Tick::Hessian | Tick::UpdateOnHost => 0.0,
            Tick::Forward(_) => micros * self.forward_s,
            Tick::Head => micros * self.head_s + added * add_s,
            Tick::Backward(block) => micros * self.backward_s[keep[block as usize] as usize] + added * add_s,
            Tick::Update => update_s,
        }
    }

    /// Of a whole step.
    pub fn step_s(&self, options: &Options) -> f64 {
        let (micros, round) = (options.micro_batches, options.round.min(options.micro_batches));
        let first = if round < micros { round } else { 0 };
        let backward = |level: Keep| self.backward_s[level as usize];
        let blocks = options.keep.iter().map(|&level| {
            first as f64 * backward(level.max(options.first_keep)) + (micros - first) as f64 * backward(level)
        });
        let forward_s = micros as f64 * (self.forward_s * options.keep.len() as f64 + self.head_s);
        let added = micros.saturating_sub(1) as f64;
        let on_device = self.groups_s.len() - options.updates_on_host as usize;
        let update_s = self.groups_s[..on_device].iter().map(|(update_s, _)| update_s).sum::<f64>();
        let groups_s = update_s + added * self.groups_s.iter().map(|(_, add_s)| add_s).sum::<f64>();
        forward_s + blocks.sum::<f64>() + groups_s
    }
}

/// How fast the runtime's streams are at these rates, in a run with moments of this type.
pub fn pace(rates: &Rates, moments: DType) -> Pace {
    let bytes_per_s = Stream::ALL.map(|stream| match stream {
        Stream::Compute => f64::INFINITY,
        Stream::HostToDevice => rates.host_to_device,
        Stream::DeviceToHost => rates.device_to_host,
        Stream::Collective => rates.collectives,
        Stream::NvmeRead => rates.nvme_read,
        Stream::NvmeWrite => rates.nvme_write,
        Stream::Host => rates.host_updates.map_or(rates.device_memory, |updates| updates.of(moments)),
    });
    let beside_host_per_s = Stream::ALL.map(|stream| match stream {
        Stream::HostToDevice => rates.host_to_device_beside_updates.min(rates.host_to_device),
        Stream::DeviceToHost => rates.device_to_host_beside_updates.min(rates.device_to_host),
        other => bytes_per_s[other.index()],
    });
    // Measured: products beside copies run slower by 4 to 8 % of the copies' time.
    Pace { bytes_per_s, beside_host_per_s, contention: 0.06 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_bounded_by_the_busiest_stream_if_arithmetic_waits() {
        let mut time = StepTime { step_s: 50.0, compute_s: 1.0, ..StepTime::default() };
        time.busy_s[Stream::HostToDevice.index()] = 2.0;
        time.busy_s[Stream::NvmeWrite.index()] = 48.0;
        // Fetches wait for room that writes to the disk make, and arithmetic for the fetches.
        time.waited_s[Stream::HostToDevice.index()] = 48.0;
        assert_eq!(Estimate { time }.bound(), "nvme write");

        time.waited_s = [0.0; Stream::ALL.len()];
        assert_eq!(Estimate { time }.bound(), "compute");
    }
}
