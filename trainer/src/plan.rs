//! `castor plan`: what would be where, what would move, whether it fits. Nothing is allocated.

use crate::account;
use crate::blueprint::Blueprint;
use crate::error::Result;
use crate::estimate::Estimate;
use crate::rates::Rates;
use crate::rendezvous::World;
use crate::session::{self, Hardware};
use crate::settings::Settings;
use castor_kernels::Tier;
use castor_runtime::plan::Plan;
use castor_runtime::{Bytes, Role};
use serde_json::json;
use std::collections::BTreeMap;

/// Plans the run of `settings` on `ranks` ranks (the environment's number if none is given) and prints the plan.
///
/// # Errors
/// [`crate::error::Error::DoesNotFit`] with numbers, or bad input.
pub fn main(settings: &Settings, ranks: Option<u32>, as_json: bool) -> Result<()> {
    let (config, notices) = settings.model_shape()?;
    let parameters = config.parameters();
    // The plan is for one rank of many like it; only this one's hardware is looked at.
    let hardware = Hardware::open(settings, &World::alone())?;
    let environment = World::from_env()?;
    let world = ranks.unwrap_or(environment.world);
    let steps = settings.max_steps.unwrap_or(1);
    let mut options = session::options(
        settings,
        config,
        settings.max_length as u64,
        settings.batch_size,
        settings.gradient_accumulation_steps,
        steps,
    );
    // Ranks that are not here yet: as if of one host, unless the environment says more.
    let local = if environment.world == world { environment.local_world } else { world };
    options.shards = session::shards(settings, world, local)?;
    let (blueprint, plan, estimate) = session::plan(settings, options, &hardware, world)?;
    if as_json {
        println!("{}", as_value(&blueprint, &plan, &estimate, &hardware.rates, parameters));
        return Ok(());
    }
    for notice in notices.iter().chain(&hardware.notices) {
        eprintln!("castor: {notice}");
    }
    let layout = blueprint.layout();
    let groups = match layout.world == layout.shards {
        true => String::new(),
        false => format!(" ({} groups of {})", layout.world / layout.shards, layout.shards),
    };
    println!("{parameters} parameters on {world} ranks{groups}, {} chunks", layout.chunk_ids().count());
    print!("{}", account::plan_lines(&plan, blueprint.layout(), &plan.predicted.ledger));
    for (role, tiers) in by_role(&blueprint, &plan) {
        let tiers: Vec<String> = tiers.iter().map(|(tier, bytes)| format!("{tier} {}", Bytes(*bytes))).collect();
        println!("  {:<13} {}", Role::name(role), tiers.join(", "));
    }
    let keep = &blueprint.options().keep;
    let mut levels: BTreeMap<String, usize> = BTreeMap::new();
    for level in keep {
        *levels.entry(format!("{level:?}").to_lowercase()).or_default() += 1;
    }
    let levels: Vec<String> = levels.iter().map(|(level, blocks)| format!("{level} × {blocks}")).collect();
    println!("  blocks keep   {}", levels.join(", "));
    println!("  together      {} of {} micro-batches", blueprint.options().round, blueprint.options().micro_batches);
    println!("  estimated     {estimate}");
    println!("  rates         {}", hardware.rates.origin(settings.memory.nvme.is_some()));
    if let Some((index, worst)) = plan.predicted.ticks[0]
        .iter()
        .enumerate()
        .max_by_key(|(_, tick)| tick.live[Tier::Device.index()].iter().sum::<u64>())
    {
        println!(
            "  worst tick    {index} ({} of {}): {} live on the device",
            worst.name,
            blueprint.layout().group(worst.group).name,
            Bytes(worst.live[Tier::Device.index()].iter().sum())
        );
    }
    Ok(())
}

fn by_role(blueprint: &Blueprint, plan: &Plan) -> BTreeMap<Role, BTreeMap<Tier, u64>> {
    let layout = blueprint.layout();
    let mut roles: BTreeMap<Role, BTreeMap<Tier, u64>> = BTreeMap::new();
    for chunk in layout.chunk_ids() {
        if let Some(tier) = plan.placement.homes[chunk.index()] {
            *roles.entry(chunk.role()).or_default().entry(tier).or_default() += layout.stored_bytes(chunk);
        }
    }
    roles
}

fn as_value(
    blueprint: &Blueprint,
    plan: &Plan,
    estimate: &Estimate,
    rates: &Rates,
    parameters: u64,
) -> serde_json::Value {
    let layout = blueprint.layout();
    let tiers = Tier::ALL.map(|tier| {
        json!({
            "tier": tier,
            "budget_bytes": plan.budgets.of(tier),
            "peak_bytes": plan.peak(tier),
            "users": plan.predicted.ledger.largest_users(tier),
        })
    });
    let homes: Vec<_> = layout
        .chunk_ids()
        .map(|chunk| {
            json!({
                "group": layout.group(chunk.group()).name,
                "role": chunk.role(),
                "bytes": layout.stored_bytes(chunk),
                "home": plan.placement.homes[chunk.index()],
            })
        })
        .collect();
    json!({
        "parameters": parameters,
        "world": layout.world,
        "shards": layout.shards,
        "policy": plan.policy,
        "padding": layout.waste(),
        "model_bytes_per_rank": layout.model_bytes(),
        "tiers": tiers,
        "moved_bytes_per_step": account::moved(&plan.predicted.steady()),
        "window_peak_bytes": plan.predicted.window_peak,
        "keep": blueprint.options().keep,
        "round": blueprint.options().round,
        "estimated_step_s": estimate.step_s,
        "estimated_compute_s": estimate.compute_s,
        "bound": estimate.bound(),
        "rates": rates,
        "chunks": homes,
    })
}
