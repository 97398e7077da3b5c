//! The learning rate over time, as DeepSpeed's schedulers have it.

use super::keys::{self, Section};
use super::{Outcome, Translation};

const NAMES: &str = "\"WarmupLR\", \"WarmupDecayLR\" or \"WarmupCosineLR\"";

impl Translation<'_> {
    /// A scheduler in the file decides in DeepSpeed whatever the command line says; here both must agree.
    pub(super) fn scheduler(&mut self, top: &Section) -> Outcome<()> {
        let Some(section) = top.section("scheduler", keys::TYPED, &mut self.unneeded)? else { return Ok(()) };
        let (kind, cosine) = match section.word("type")? {
            Some("WarmupLR") => ("constant", false),
            Some("WarmupDecayLR") => ("linear", false),
            Some("WarmupCosineLR") => ("cosine", true),
            Some(other) => return Err(format!("scheduler.type is \"{other}\"; {NAMES} was expected")),
            None => return Ok(()),
        };
        self.set("lr_scheduler_type", kind, "scheduler.type")?;
        let keys = if cosine { keys::COSINE } else { keys::WARMUP };
        let params = section.section("params", keys, &mut self.unneeded)?;
        let Some(params) = &params else {
            self.set("lr_convention", "deepspeed_log", "scheduler.type")?;
            return self.set_default("warmup_steps", "1000", "scheduler.params.warmup_num_steps");
        };
        self.warmup(params)?;
        for key in ["warmup_min_lr", "warmup_min_ratio"] {
            if params.number(key, "0", |x| x == 0.0).map_err(|error| error + ": warm-up begins at 0 here")?.is_some() {
                self.unneeded.push(params.name(key));
            }
        }
        if let Some(lr) = params.number("warmup_max_lr", "a number above 0", |x| x > 0.0)? {
            self.set("lr", lr, "scheduler.params.warmup_max_lr")?;
        }
        if cosine {
            let least = params.number("cos_min_ratio", "a number from 0 to 1", |x| (0.0..=1.0).contains(&x))?;
            self.set("min_lr_ratio", least.unwrap_or(1e-4), "scheduler.params.cos_min_ratio")?;
        }
        match (params.whole("total_num_steps", 1)?, self.given("max_steps")) {
            (Some(total), Some(_)) => self.set("max_steps", total, "scheduler.params.total_num_steps"),
            (Some(total), None) => Err(format!(
                "scheduler.params.total_num_steps is {total}, and a schedule ends with the run; add --max_steps {total}, \
                 or set it to \"auto\""
            )),
            (None, _) => Ok(()),
        }
    }

    fn warmup(&mut self, params: &Section) -> Outcome<()> {
        let convention = match params.word("warmup_type")? {
            None | Some("log") => "deepspeed_log",
            Some("linear") => "deepspeed_linear",
            Some(other) => {
                return Err(format!("scheduler.params.warmup_type is \"{other}\"; \"log\" or \"linear\" was expected"));
            }
        };
        self.set("lr_convention", convention, "scheduler.params.warmup_type")?;
        let from = "scheduler.params.warmup_num_steps";
        match params.whole("warmup_num_steps", 0)? {
            // Steps win over a ratio, so that a ratio on the command line would go unheard.
            Some(steps) if self.raw.is_given("warmup_ratio") && !self.raw.is_given("warmup_steps") => Err(format!(
                "{from} is {steps}, and --warmup_ratio is {}; give one, or set {from} to \"auto\"",
                self.raw.values("warmup_ratio").concat()
            )),
            Some(steps) => self.set("warmup_steps", steps, from),
            None if params.has("warmup_num_steps") || self.raw.is_given("warmup_ratio") => Ok(()),
            None => self.set_default("warmup_steps", "1000", from),
        }
    }
}
