//! Flags that were given and change nothing, because what would read them is not chosen: one line each.

use super::raw::{Origin, Raw};
use super::{BackendKind, Every, OptimizerKind, Precision, ScheduleKind, Settings};
use crate::data::Order;

/// What to tell the user of flags without effect on a run of `settings`. A file of another trainer that says more than
/// it uses is as its author wants it: only what the user typed, or wrote into a training TOML, is spoken of.
pub(super) fn notices(raw: &Raw, settings: &Settings) -> Vec<String> {
    let fp16 = settings.precision.compute == Precision::Fp16;
    let adamw = settings.optimizer.kind == OptimizerKind::AdamW;
    let rules: [(&[&str], bool, &str); 7] = [
        (
            &["loss_scale", "initial_scale", "min_scale", "max_scale", "growth_interval", "hysteresis"],
            fp16,
            "the loss is scaled with --mixed_precision fp16 only",
        ),
        (&["sophia_rho", "hessian_interval"], !adamw, "only --optimizer sophia reads it"),
        (&["eps"], adamw, "only --optimizer adamw reads it"),
        (
            &["min_lr_ratio"],
            settings.schedule.kind == ScheduleKind::Cosine,
            "only --lr_scheduler_type cosine ends above 0",
        ),
        (
            &["save_total_limit", "async_save"],
            settings.output.save != Every::Never,
            "the run saves no checkpoint without --save_steps",
        ),
        (&["data_seed"], settings.order != Order::Sequential, "the rows are not shuffled"),
        (
            &["emulated_h2d_gbps", "emulated_d2h_gbps", "emulated_nvme_read_gbps", "emulated_nvme_write_gbps"],
            settings.backend.kind != BackendKind::Cuda,
            "only --backend cpu emulates links",
        ),
    ];
    let typed = |key: &str| matches!(raw.origin(key), Origin::Flag | Origin::File(_)) && !raw.is_default(key);
    let idle = rules.into_iter().filter(|(_, read, _)| !read);
    idle.flat_map(|(keys, _, why)| {
        let keys = keys.iter().filter(|key| typed(key));
        keys.map(move |key| format!("--{key} {} is accepted and changes nothing: {why}", raw.values(key).join(" ")))
    })
    .collect()
}
