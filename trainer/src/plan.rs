//! `castor plan`: what would be where, what would move, whether it fits. Nothing is allocated.

use crate::account;
use crate::activations::Keep;
use crate::auto;
use crate::blueprint::Blueprint;
use crate::config::ModelConfig;
use crate::error::{Error, Result, counted};
use crate::estimate::Estimate;
use crate::rates::Rates;
use crate::rendezvous::World;
use crate::session::{self, Hardware};
use crate::settings::{Recompute, Settings};
use castor_kernels::Tier;
use castor_runtime::plan::Plan;
use castor_runtime::{Bytes, Role};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// What is to be planned.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Ranks; None: as many as the environment names.
    pub ranks: Option<u32>,
    /// The model with as many blocks as fit, in place of the configuration's number.
    pub largest: bool,
    /// As JSON.
    pub json: bool,
    /// The file with the rates of another machine, in place of this one's.
    pub rates: Option<PathBuf>,
}

/// Plans the run of `settings` and prints the plan.
///
/// # Errors
/// [`crate::error::Error::DoesNotFit`] with numbers, or bad input.
pub fn main(settings: &Settings, wanted: Wanted) -> Result<()> {
    let (config, notices) = settings.model_shape()?;
    // The plan is for one rank of many like it; only this one's hardware is looked at.
    let mut hardware = Hardware::open(settings, &World::alone())?;
    if let Some(path) = &wanted.rates {
        let (name, rates) = Rates::elsewhere(path)?;
        hardware.rates = rates;
        let what = "what the driver holds there is not in this plan";
        hardware.notices = vec![format!("by the rates of {name}, with the memory that this command is told; {what}")];
    }
    let environment = World::from_env()?;
    let world = wanted.ranks.unwrap_or(environment.world);
    // Ranks that are not here yet: as if of one host, unless the environment says more.
    let local = if environment.world == world { environment.local_world } else { world };
    hardware.rates = hardware.rates.shared_by(local);
    let shards = session::shards(settings, world, local)?;
    let of = |settings: &Settings, config: ModelConfig| {
        let (micros, steps) = (settings.gradient_accumulation_steps, settings.max_steps.unwrap_or(1));
        let sequence = settings.max_length as u64;
        let mut options = session::options(settings, config, sequence, settings.batch_size, micros, steps);
        options.evaluates = !settings.output.eval_data.is_empty() || settings.output.eval_fraction > 0.0;
        options.shards = shards;
        auto::plan_saving(settings, options, &hardware, world)
    };
    let mut config = config;
    let mut found = None;
    if wanted.largest {
        // Whether it fits at all shows where most is computed again; how it goes best is planned afterwards.
        let mut least = settings.clone();
        if least.memory.recompute == Recompute::Auto {
            least.memory.recompute = Recompute::Full;
        }
        let with = |blocks| ModelConfig { num_hidden_layers: blocks, ..config.clone() };
        let (blocks, refusal) = largest(|blocks| of(&least, with(blocks)).map(drop))?;
        config.num_hidden_layers = blocks;
        found = Some(refusal);
    }
    let parameters = config.parameters();
    let (blueprint, plan, estimate, said) = of(settings, config.clone())?;
    if wanted.json {
        println!(
            "{}",
            as_value(&blueprint, &plan, &estimate, &hardware.rates, parameters, settings.optimizer.inexact())
        );
        return Ok(());
    }
    for notice in settings.notices.iter().chain(&notices).chain(&hardware.notices).chain(&said) {
        eprintln!("castor: {notice}");
    }
    let layout = blueprint.layout();
    let groups = match layout.world == layout.shards {
        true => String::new(),
        false => format!(" ({} groups of {})", layout.world / layout.shards, layout.shards),
    };
    let chunks = counted(layout.chunk_ids().count() as u64, "chunks");
    println!("{parameters} parameters on {}{groups}, {chunks}", counted(world.into(), "ranks"));
    if let Some(refusal) = found {
        let memory = plan.budgets.device + plan.budgets.host;
        let density = parameters as f64 * f64::from(world) / 1e9 / (memory as f64 * f64::from(world) / 1e11);
        println!(
            "largest of this shape: {}, {:.1} million parameters, {density:.1} billion per 100 GB of device and host \
             memory; one more: {refusal}",
            counted(config.num_hidden_layers, "blocks"),
            parameters as f64 / 1e6
        );
    }
    print!("{}", account::plan_lines(&plan, blueprint.layout(), &plan.predicted.ledger));
    for (role, tiers) in by_role(&blueprint, &plan) {
        let tiers: Vec<String> = tiers.iter().map(|(tier, bytes)| format!("{tier} {}", Bytes(*bytes))).collect();
        println!("  {:<13} {}", Role::name(role), tiers.join(", "));
    }
    if !blueprint.layout().keeps_gradients {
        println!("  {:<13} in the window, each from its backward to its update", Role::name(Role::Gradient));
    }
    let keep = &blueprint.options().keep;
    let mut levels: BTreeMap<String, usize> = BTreeMap::new();
    for level in keep {
        *levels.entry(format!("{level:?}").to_lowercase()).or_default() += 1;
    }
    let levels: Vec<String> = levels.iter().map(|(level, blocks)| format!("{level} × {blocks}")).collect();
    let first =
        if blueprint.options().first_keep == Keep::Block { "; in the first round their input alone" } else { "" };
    println!("  blocks keep   {}{first}", levels.join(", "));
    if let updates @ 1.. = blueprint.options().updates_on_host {
        let groups = blueprint.groups().count();
        let others = if updates < groups { ", the others on the device" } else { "" };
        println!("  updates       the last {updates} of {groups} groups by the host's cores{others}");
    }
    println!("  together      {} of {} micro-batches", blueprint.options().round, blueprint.options().micro_batches);
    println!("  estimated     {estimate}");
    if let Some(wear) = estimate.wear(&plan, local, settings.memory.nvme_endurance) {
        println!("  disk          {wear}");
    }
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

/// Where the search for the largest model ends: a shape of which so many blocks fit is too small for the machine.
const MOST_BLOCKS: u64 = 512;

/// The most that `fits` takes, up to [`MOST_BLOCKS`], and why it does not take one more.
fn largest(fits: impl Fn(u64) -> Result<()>) -> Result<(u64, Error)> {
    let (mut most, mut step) = (0, 1);
    let mut refusal = None;
    // Doubles until it is too much, then halves.
    while step > 0 {
        let tried = if most + step > MOST_BLOCKS {
            Err(Error::DoesNotFit(format!("the search ends at {MOST_BLOCKS} blocks; give a larger shape")))
        } else {
            fits(most + step)
        };
        match tried {
            Ok(()) => most += step,
            Err(error @ Error::DoesNotFit(_)) => refusal = Some(error),
            Err(other) => return Err(other),
        }
        step = if refusal.is_none() { 2 * step } else { step / 2 };
    }
    match refusal {
        Some(refusal) if most > 0 => Ok((most, refusal)),
        Some(refusal) => Err(refusal),
        None => unreachable!("the search ends at a refusal"),
    }
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
    inexact: Option<&str>,
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
        "updates_on_host": blueprint.options().updates_on_host,
        "estimated_step_s": estimate.time.step_s,
        "estimated_compute_s": estimate.time.compute_s,
        "bound": estimate.bound(),
        "rates": rates,
        "inexact": inexact,
        "chunks": homes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_that_fits_is_found() {
        let up_to = |limit: u64| {
            move |blocks: u64| {
                if blocks <= limit { Ok(()) } else { Err(Error::DoesNotFit(format!("{blocks} of {limit}"))) }
            }
        };
        for limit in 1..100 {
            let (most, refusal) = largest(up_to(limit)).unwrap();
            assert_eq!(most, limit);
            assert!(refusal.to_string().contains(&format!("{} of {limit}", limit + 1)), "{refusal}");
        }
        assert!(largest(up_to(0)).is_err(), "not one block fits");
        assert_eq!(largest(up_to(u64::MAX)).unwrap().0, MOST_BLOCKS);
    }
}
