//! Plugins: one engine, named presets. A preset is a row of a table, never a code path.

use crate::error::{Error, Result};
use crate::settings::nearest;

/// Which model data is divided among the ranks; what is not is held whole by each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharding {
    /// Weights.
    pub parameters: bool,
    /// Gradients.
    pub gradients: bool,
    /// Masters and moments.
    pub optimizer: bool,
}

/// Where model data lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// All on the device, or a refusal.
    Device,
    /// Masters and moments on the host, the rest on the device.
    OptimizerOnHost,
    /// Everything on the host, streamed to the device for use.
    Host,
    /// Device first; what does not fit spills to the host, then to NVMe.
    DeviceFirst,
    /// Host first; what does not fit goes to NVMe.
    HostFirst,
    /// The solver: least step time within the budgets.
    Auto,
    /// The fractions of `--offload_param_frac` and `--offload_optim_frac`, in bytes.
    Static,
}

/// A named preset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preset {
    /// Value of `--plugin`.
    pub name: &'static str,
    /// Other names for the same.
    pub aliases: &'static [&'static str],
    /// What is divided among ranks.
    pub sharding: Sharding,
    /// Where it lives.
    pub placement: Placement,
    /// One line for help.
    pub what: &'static str,
}

impl Preset {
    /// Whether optimizer states may lie on the host for the plan's sake: then the host's cores may update them.
    pub const fn spills(&self) -> bool {
        matches!(self.placement, Placement::Host | Placement::HostFirst | Placement::DeviceFirst | Placement::Auto)
    }
}

const NONE: Sharding = Sharding { parameters: false, gradients: false, optimizer: false };
const ZERO1: Sharding = Sharding { optimizer: true, ..NONE };
const ZERO2: Sharding = Sharding { gradients: true, ..ZERO1 };
const ZERO3: Sharding = Sharding { parameters: true, ..ZERO2 };

/// Every preset.
pub const PRESETS: &[Preset] = &[
    preset("ddp", &["no_shard"], NONE, Placement::Device, "nothing sharded, all on the device"),
    preset("zero1", &[], ZERO1, Placement::Device, "optimizer states sharded"),
    preset("zero1_offload", &["zero1_cpu"], ZERO1, Placement::OptimizerOnHost, "zero1, optimizer states on the host"),
    preset("zero2", &["shard_grad_op"], ZERO2, Placement::Device, "and gradients sharded"),
    preset("zero3", &["fsdp", "full_shard"], ZERO3, Placement::Device, "and parameters sharded"),
    preset(
        "zero2_offload",
        &["zero2_cpu", "shard_grad_op_offload"],
        ZERO2,
        Placement::OptimizerOnHost,
        "zero2, optimizer states on the host",
    ),
    preset(
        "zero3_offload",
        &["zero3_cpu", "fsdp_cpu", "fsdp_offload", "full_shard_offload"],
        ZERO3,
        Placement::Host,
        "zero3, everything on the host",
    ),
    preset("gemini_cuda", &[], ZERO3, Placement::DeviceFirst, "zero3, device first, spills only what does not fit"),
    preset("gemini_cpu", &[], ZERO3, Placement::HostFirst, "zero3, host first"),
    preset("gemini_auto", &[], ZERO3, Placement::Auto, "zero3, placed for the least step time"),
    preset("gemini", &["gemini_static"], ZERO3, Placement::Static, "zero3, fractions as given"),
];

const fn preset(
    name: &'static str,
    aliases: &'static [&'static str],
    sharding: Sharding,
    placement: Placement,
    what: &'static str,
) -> Preset {
    Preset { name, aliases, sharding, placement, what }
}

/// The preset of this name or alias; `-` and `_` are the same.
///
/// # Errors
/// [`Error::Usage`] with the nearest name and all names.
pub fn find(name: &str) -> Result<Preset> {
    let wanted = name.replace('-', "_").to_ascii_lowercase();
    let all = || PRESETS.iter().flat_map(|p| std::iter::once(p.name).chain(p.aliases.iter().copied()));
    PRESETS
        .iter()
        .find(|preset| preset.name == wanted || preset.aliases.contains(&wanted.as_str()))
        .copied()
        .ok_or_else(|| {
            let meant = match nearest(&wanted, all()) {
                Some(near) => format!("; did you mean {near}?"),
                None => String::new(),
            };
            let names: Vec<_> = PRESETS.iter().map(|p| p.name).collect();
            Error::Usage(format!("--plugin {name} is not known{meant} (plugins: {})", names.join(", ")))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_aliases_and_near_misses() {
        assert_eq!(find("fsdp").unwrap().name, "zero3");
        assert_eq!(find("zero2-cpu").unwrap().placement, Placement::OptimizerOnHost);
        assert!(find("gemni_cuda").unwrap_err().to_string().contains("did you mean gemini_cuda?"));
        assert!(find("3d").unwrap_err().to_string().contains("gemini_auto"));
        let mut names: Vec<_> = PRESETS.iter().flat_map(|p| p.aliases.iter().copied().chain([p.name])).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count, "a name is given twice");
    }
}
