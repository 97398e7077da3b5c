//! ZeRO's stage and its offload, as the plugin that does the same.

use super::keys::{self, Section};
use super::{Outcome, Translation};
use serde_json::Value;

/// What one `offload_…` section asks for.
#[derive(Default)]
struct Offload {
    /// Whether anything leaves the device.
    on: bool,
    /// Whether it may go to a disk, and to which folder.
    nvme: Option<String>,
    /// Share that leaves the device.
    ratio: f64,
}

impl Translation<'_> {
    pub(super) fn zero(&mut self, top: &Section) -> Outcome<()> {
        // The oldest form: a switch for what is stage 1 today.
        if let Some(on) = top.value("zero_optimization")?.and_then(Value::as_bool) {
            let plugin = if on { "zero1" } else { "ddp" };
            return self.set("plugin", plugin, "zero_optimization");
        }
        let Some(zero) = top.section("zero_optimization", keys::ZERO, &mut self.unneeded)? else {
            return self.set_default("plugin", "ddp", "zero_optimization.stage");
        };
        let stage = stage(&zero)?;
        let (mut param, mut optimizer) = (
            self.offload(&zero, "offload_param", keys::OFFLOAD_PARAM)?,
            self.offload(&zero, "offload_optimizer", keys::OFFLOAD_OPTIMIZER)?,
        );
        for (old, new) in [
            ("cpu_offload_param", "offload_param"),
            ("cpu_offload_params", "offload_param"),
            ("cpu_offload", "offload_optimizer"),
        ] {
            if zero.switch(old)? == Some(true) {
                self.notices.push(format!("zero_optimization.{old} is the old name of {new} with device \"cpu\""));
                let offload = if new == "offload_param" { &mut param } else { &mut optimizer };
                *offload = Offload { on: true, nvme: None, ratio: 1.0 };
            }
        }
        if stage < 3 && param.on {
            self.notices.push(format!("offload_param has no effect at stage {stage}, as in DeepSpeed"));
            param = Offload::default();
        }
        if stage == 0 && optimizer.on {
            return Err("zero_optimization.offload_optimizer needs a stage of at least 1, and the stage is 0".into());
        }
        if stage < 3 && optimizer.on && optimizer.ratio != 1.0 {
            return Err(format!(
                "zero_optimization.offload_optimizer.ratio is {}, which needs stage 3, and the stage is {stage}",
                optimizer.ratio
            ));
        }
        self.plugin(stage, &param, &optimizer)?;
        self.disk(param.nvme, optimizer.nvme)
    }

    fn plugin(&mut self, stage: u64, param: &Offload, optimizer: &Offload) -> Outcome<()> {
        let from = "zero_optimization.stage";
        let with_optimizer = "zero_optimization.stage with offload_optimizer";
        match (stage, param.on, optimizer.on) {
            (0, _, _) => self.set("plugin", "ddp", from),
            (1, _, false) => self.set("plugin", "zero1", from),
            (1, _, true) => self.set("plugin", "zero1_offload", with_optimizer),
            (2, _, false) => self.set("plugin", "zero2", from),
            (2, _, true) => self.set("plugin", "zero2_offload", with_optimizer),
            (_, false, false) => self.set("plugin", "zero3", from),
            (_, true, true) if optimizer.ratio == 1.0 => {
                self.set("plugin", "zero3_offload", "zero_optimization.stage with offload_param and offload_optimizer")
            }
            // Only one of the two leaves the device, or a part of it.
            (_, param, optimizer_on) => {
                self.set("plugin", "gemini", "zero_optimization.stage with offload")?;
                let share = if optimizer_on { optimizer.ratio } else { 0.0 };
                self.set("offload_param_frac", u8::from(param), "zero_optimization.offload_param")?;
                self.set("offload_optim_frac", share, "zero_optimization.offload_optimizer")
            }
        }
    }

    /// One folder holds whatever goes to the disk.
    fn disk(&mut self, param: Option<String>, optimizer: Option<String>) -> Outcome<()> {
        if let (Some(param), Some(optimizer)) = (&param, &optimizer)
            && param != optimizer
        {
            return Err(format!(
                "offload_param.nvme_path is {param} and offload_optimizer.nvme_path is {optimizer}; one folder holds \
                 both here, give the same"
            ));
        }
        let from = format!(
            "zero_optimization.{}.nvme_path",
            if param.is_some() { "offload_param" } else { "offload_optimizer" }
        );
        let Some(folder) = param.or(optimizer) else { return Ok(()) };
        self.notices.push(format!("device \"nvme\": host memory comes first, {folder} holds what does not fit there"));
        self.set("nvme", folder, &from)
    }

    fn offload(&mut self, zero: &Section, key: &str, keys: keys::Keys) -> Outcome<Offload> {
        let Some(section) = zero.section(key, keys, &mut self.unneeded)? else { return Ok(Offload::default()) };
        const DEVICES: &str = "\"none\", \"cpu\" or \"nvme\" was expected";
        if section.is_null("device") {
            return Err(format!("{} is null; {DEVICES}", section.name("device")));
        }
        let device = section.word("device")?.unwrap_or("none");
        let path = section.word("nvme_path")?;
        let ratio = section.number("ratio", "a number from 0 to 1", |x| (0.0..=1.0).contains(&x))?.unwrap_or(1.0);
        let nvme = match device {
            "none" | "cpu" => {
                if path.is_some() {
                    self.unneeded.push(section.name("nvme_path"));
                }
                None
            }
            "nvme" => {
                let path = path.map(str::to_string).or_else(|| self.raw.values("nvme").pop());
                Some(path.ok_or_else(|| {
                    format!("{} is \"nvme\" without an nvme_path; add it, or --nvme", section.name("device"))
                })?)
            }
            other => return Err(format!("{} is \"{other}\"; {DEVICES}", section.name("device"))),
        };
        // A share of nothing leaves the device for nowhere.
        Ok(Offload { on: device != "none" && ratio > 0.0, nvme: nvme.filter(|_| ratio > 0.0), ratio })
    }
}

/// 0 to 3; DeepSpeed takes it in quotes, too.
fn stage(zero: &Section) -> Outcome<u64> {
    let Some(value) = zero.value("stage")? else { return Ok(0) };
    let stage = value.as_u64().or_else(|| value.as_str()?.parse().ok());
    stage.filter(|stage| *stage <= 3).ok_or_else(|| zero.wrong("stage", value, "a stage from 0 to 3"))
}
