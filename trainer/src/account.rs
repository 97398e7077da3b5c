//! The account of memory: what the runtime knows, in the forms of the reports.

use crate::rendezvous::World;
use crate::report::memory::{self, ChunkReport, LinkReport, MemoryReport, TierReport};
use crate::report::peak_host_bytes;
use castor_kernels::{Stream, Tier};
use castor_runtime::ledger::{Category, Ledger};
use castor_runtime::mem_stats::TickStats;
use castor_runtime::plan::{Budgets, Plan};
use castor_runtime::transfer::Traffic;
use castor_runtime::{Bytes, Pass, Role, StatefulTensorMgr};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Bytes by link, those that moved any.
pub fn moved(traffic: &Traffic) -> BTreeMap<String, u64> {
    traffic.links().into_iter().filter(|(_, bytes)| *bytes > 0).map(|(name, bytes)| (name.into(), bytes)).collect()
}

/// Where the plan puts things, in a few lines.
pub fn placement(manager: &StatefulTensorMgr) -> String {
    plan_lines(manager.plan(), manager.layout(), manager.ledger())
}

/// The same before anything is allocated.
pub fn plan_lines(plan: &Plan, layout: &castor_runtime::layout::Layout, ledger: &Ledger) -> String {
    let mut text = String::new();
    let _ = writeln!(
        text,
        "plan ({}): {} of model data per rank, {:.3} % padding",
        plan.policy,
        Bytes(layout.model_bytes()),
        layout.waste() * 100.0
    );
    for tier in Tier::ALL {
        let (budget, peak) = (plan.budgets.of(tier), ledger.total(tier));
        if peak == 0 {
            continue;
        }
        let users: Vec<String> =
            ledger.largest_users(tier).into_iter().map(|(name, bytes)| format!("{name} {}", Bytes(bytes))).collect();
        let _ = writeln!(text, "  {tier:<6} {} of {}: {}", Bytes(peak), Bytes(budget), users.join(", "));
    }
    let links: Vec<String> = plan
        .predicted
        .steady()
        .links()
        .into_iter()
        .filter(|(_, bytes)| *bytes > 0)
        .map(|(name, bytes)| format!("{name} {}", Bytes(bytes)))
        .collect();
    let links = if links.is_empty() { "nothing".into() } else { links.join(", ") };
    let _ = writeln!(text, "  moved per step: {links}");
    text
}

/// One rank's memory, predicted and measured over `steps` steps of its plan, the last `warm` of which nothing
/// interrupted, under these `budgets`.
pub fn memory(
    manager: &mut StatefulTensorMgr,
    world: &World,
    budgets: &Budgets,
    (steps, warm): (u64, u64),
    step_seconds: f64,
) -> MemoryReport {
    let times = manager.times();
    let a_step = |nanoseconds: u64| nanoseconds as f64 * 1e-9 / steps.max(1) as f64;
    let manager = &*manager;
    let plan = manager.plan();
    let predicted = &plan.predicted.ticks[Pass::Train.index()];
    let measured = manager.collector().ticks(Pass::Train);
    let ticks = measured.iter().map(|tick| format!("{} {}", manager.layout().group(tick.group).name, tick.name));
    let tiers = Tier::ALL
        .into_iter()
        .filter(|tier| manager.ledger().total(*tier) > 0)
        .map(|tier| TierReport {
            tier: tier.name().into(),
            budget_bytes: budgets.of(tier),
            categories: Category::ALL.iter().map(|category| category.name().into()).collect(),
            predicted: table(predicted, measured.len(), tier),
            measured: table(measured, measured.len(), tier),
            predicted_peak_bytes: plan.peak(tier),
            measured_peak_bytes: manager.ledger().total(tier),
            reserved_bytes: Some(manager.ledger().total(tier)),
            system_bytes: if tier == Tier::Host { peak_host_bytes() } else { None },
        })
        .collect();
    let counted = manager.last_traffic(Pass::Train);
    let planned = plan.predicted.step(warm.saturating_sub(1));
    // Gathers and reductions share a stream; its time is given once.
    let streams = [
        Some(Stream::HostToDevice),
        Some(Stream::DeviceToHost),
        Some(Stream::NvmeRead),
        Some(Stream::NvmeWrite),
        Some(Stream::Collective),
        None,
        Some(Stream::Host),
    ];
    let counted = planned.links().into_iter().zip(counted.links()).zip(streams);
    let links = counted.map(|(((link, planned), (_, counted)), stream)| LinkReport {
        link: link.into(),
        planned_bytes_per_step: planned,
        counted_bytes_per_step: counted,
        busy_seconds_per_step: stream.and_then(|stream| times.busy_ns[stream.index()]).map(a_step),
    });
    let layout = manager.layout();
    let chunks = layout.chunk_ids().map(|chunk| ChunkReport {
        group: layout.group(chunk.group()).name.clone(),
        role: Role::name(chunk.role()).into(),
        bytes: layout.stored_bytes(chunk),
        home: plan.placement.homes[chunk.index()].map_or(String::new(), |tier| tier.name().into()),
    });
    MemoryReport {
        version: memory::VERSION,
        rank: world.rank,
        world: world.world,
        ticks: ticks.collect(),
        tiers,
        links: links.collect(),
        chunks: chunks.collect(),
        step_seconds,
        stall_seconds_per_step: a_step(times.stall_ns),
    }
}

/// Category × tick. Empty unless the ticks are as many as expected.
fn table(ticks: &[TickStats], expected: usize, tier: Tier) -> Vec<Vec<u64>> {
    if ticks.len() != expected {
        return Vec::new();
    }
    Category::ALL
        .into_iter()
        .map(|category| ticks.iter().map(|tick| tick.live[tier.index()][category.index()]).collect())
        .collect()
}
