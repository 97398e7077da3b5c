//! What `auto` decides: of the ways of running that the settings leave open, the one with the least estimated time
//! among those that fit.
//!
//! Open are how much each block keeps, how many micro-batches go through the model together, and, where not everything
//! fits the device, the size of the window, how far prefetch runs ahead, and how many of the updates the host's cores
//! make. None of it changes a bit of the results.

use crate::activations::Keep;
use crate::blueprint::{Blueprint, Options};
use crate::error::{Error, Result};
use crate::estimate::Estimate;
use crate::plugin::Placement;
use crate::session::Hardware;
use crate::settings::{AsyncSave, Every, Recompute, Settings};
use castor_kernels::Tier;
use castor_runtime::Bytes;
use castor_runtime::plan::{Plan, Rehearse};
use castor_runtime::policy::{AutoPolicy, DevicePolicy, HostPolicy, PlacementPolicy, StaticPolicy};
use rayon::iter::{IntoParallelIterator, ParallelIterator};

/// Sizes of the window to try, the usual one first; see [`AutoPolicy::window`].
const WINDOWS: [f64; 3] = [AutoPolicy::WINDOW, 1.5, 1.1];

/// Parts of the window to try as the limit of prefetch. The farther it runs ahead, the more it brings in that must give
/// way to what is wanted sooner, and come again.
const PARTS: [f64; 2] = [0.5, 0.25];

/// Shares of the updates to try on the host's cores: while the link brings states for the device, these cores update
/// others where they lie.
const ON_HOST: [f64; 5] = [1.0 / 16.0, 1.0 / 8.0, 1.0 / 4.0, 3.0 / 8.0, 1.0 / 2.0];

/// How far beside the best of these to look for a better one, farthest first.
const BESIDE: [f64; 3] = [1.0 / 16.0, 1.0 / 32.0, 1.0 / 64.0];

/// The most of them, beside the largest each time.
const MOST_ON_HOST: f64 = ON_HOST[4] + BESIDE[0] + BESIDE[1] + BESIDE[2];

/// Part of a step by which it is not known how long updates on the host hold it up: other work shares the cores and their
/// memory. Predictions with them were off by up to so much, but for one of 5 % (`benches/LOG.md`, run 8).
const DOUBT: f64 = 0.01;

/// Ways that are compared at once, in as many threads as there are; as many on every machine, for where the search ends
/// depends on it (L7).
const AT_ONCE: usize = 8;

/// A way of running.
#[derive(Clone)]
struct Way {
    blueprint: Blueprint,
    /// See [`AutoPolicy::window`].
    window: f64,
    /// Bytes that prefetch may run ahead; None: as far as there is room.
    prefetch: Option<u64>,
}

impl Way {
    fn plan(&self, settings: &Settings, hardware: &Hardware, length: Rehearse) -> Result<Plan> {
        let (backend, rates, budgets) = (&*hardware.backend, &hardware.rates, hardware.budgets.clone());
        let policy = policy(settings, self.window);
        Ok(self.blueprint.plan(backend, rates, &*policy, budgets, self.prefetch, length)?)
    }

    /// Seconds of a step's arithmetic: no plan is faster.
    fn floor_s(&self, hardware: &Hardware) -> f64 {
        self.blueprint.costs(&hardware.rates).step_s(self.blueprint.options())
    }
}

/// A way that fits.
struct Fitting {
    step_s: f64,
    window_bytes: u64,
    way: Way,
}

impl Fitting {
    /// The time by which ways are compared: updates on the host must save more than what is not known of them.
    fn doubted_s(&self) -> f64 {
        let doubt = if self.way.blueprint.options().updates_on_host > 0 { DOUBT } else { 0.0 };
        self.step_s * (1.0 + doubt)
    }
}

/// The policy of the plugin, with [`AutoPolicy::window`].
fn policy(settings: &Settings, window: f64) -> Box<dyn PlacementPolicy> {
    match settings.memory.plugin.placement {
        Placement::Device => Box::new(DevicePolicy),
        Placement::OptimizerOnHost => Box::new(HostPolicy { parameters: false, optimizer: true }),
        Placement::Host | Placement::HostFirst => Box::new(HostPolicy { parameters: true, optimizer: true }),
        Placement::DeviceFirst | Placement::Auto => Box::new(AutoPolicy { window }),
        Placement::Static => Box::new(StaticPolicy {
            offload_param_frac: settings.memory.offload_param_frac,
            offload_optim_frac: settings.memory.offload_optim_frac,
        }),
    }
}

/// Plans the run for one of `world` ranks.
///
/// # Errors
/// [`Error::DoesNotFit`] with numbers.
pub fn plan(
    settings: &Settings,
    options: Options,
    hardware: &Hardware,
    world: u32,
) -> Result<(Blueprint, Plan, Estimate)> {
    let (way, plan) = best(settings, options, hardware, world)?;
    let estimate = Estimate::of(&plan);
    Ok((way.blueprint, plan, estimate))
}

/// As [`plan`], for a run that saves as `settings` say: with snapshots if `--async_save` asks for them, or leaves it
/// open and the host has room for them beside the plan. Also what to tell the user.
///
/// # Errors
/// As [`plan`].
pub fn plan_saving(
    settings: &Settings,
    options: Options,
    hardware: &Hardware,
    world: u32,
) -> Result<(Blueprint, Plan, Estimate, Option<String>)> {
    let wanted = if settings.output.save == Every::Never { AsyncSave::Off } else { settings.output.async_save };
    let options = Options { snapshots: wanted == AsyncSave::On, ..options };
    let (way, plan) = best(settings, options, hardware, world).map_err(|error| match error {
        Error::DoesNotFit(reason) if wanted == AsyncSave::On => {
            Error::DoesNotFit(format!("{reason}; --async_save off takes no snapshot"))
        }
        other => other,
    })?;
    let estimate = Estimate::of(&plan);
    if wanted != AsyncSave::Auto {
        return Ok((way.blueprint, plan, estimate, None));
    }
    let options = Options { snapshots: true, ..way.blueprint.options().clone() };
    let with = Way { blueprint: Blueprint::for_world(options, &*hardware.backend, world), ..way.clone() };
    // Nothing of the run's own may give way to it.
    let beside = with.plan(settings, hardware, Rehearse::ToRun).ok();
    match beside.filter(|beside| beside.placement == plan.placement) {
        Some(beside) => Ok((with.blueprint, beside, estimate, None)),
        None => {
            let left = hardware.budgets.host.saturating_sub(plan.peak(Tier::Host));
            let said = format!(
                "a save will hold the run until it is on disk: a snapshot takes {} of host memory and {} are left beside \
                 the plan; --async_save on makes room for it",
                Bytes(with.blueprint.fixed().snapshot),
                Bytes(left)
            );
            Ok((way.blueprint, plan, estimate, Some(said)))
        }
    }
}

/// Seconds of a step that no way of running undercuts.
pub fn floor_s(settings: &Settings, options: &Options, hardware: &Hardware, world: u32) -> f64 {
    let fixed = settings.memory.cpu_update.unwrap_or(0.0);
    let most = if shares_updates(settings, options, hardware, world) { MOST_ON_HOST } else { fixed };
    ways(settings, options, most, hardware, world).first().map_or(0.0, |(floor_s, _)| *floor_s)
}

/// How many of the groups a share is: at least one of any.
fn groups_of(share: f64, groups: u64) -> u64 {
    ((share * groups as f64).round() as u64).max(u64::from(share > 0.0))
}

/// Whether it is open which updates the host's cores make.
fn shares_updates(settings: &Settings, options: &Options, hardware: &Hardware, world: u32) -> bool {
    let open = settings.memory.cpu_update.is_none() && settings.memory.plugin.spills();
    open && hardware.rates.host_updates.is_some() && options.may_update_on_host(world.into())
}

/// The ways that the settings leave open with this share of the updates on the host, each with [`Way::floor_s`]: the
/// fewest operations first.
fn ways(settings: &Settings, options: &Options, on_host: f64, hardware: &Hardware, world: u32) -> Vec<(f64, Way)> {
    let (recompute, blocks) = (settings.memory.recompute, options.config.num_hidden_layers);
    let updates_on_host = groups_of(on_host, blocks + 2);
    let mut ways: Vec<(f64, Way)> = Vec::new();
    for round in rounds(options, world) {
        for keep in levels(recompute, blocks as usize) {
            for first_keep in first_levels(recompute, &keep, round < options.micro_batches) {
                let options = Options { round, keep: keep.clone(), first_keep, updates_on_host, ..options.clone() };
                let blueprint = Blueprint::for_world(options, &*hardware.backend, world);
                let way = Way { blueprint, window: WINDOWS[0], prefetch: settings.memory.prefetch };
                ways.push((way.floor_s(hardware), way));
            }
        }
    }
    ways.sort_by(|a, b| a.0.total_cmp(&b.0));
    ways
}

fn best(settings: &Settings, options: Options, hardware: &Hardware, world: u32) -> Result<(Way, Plan)> {
    let mut search = Search { settings, hardware, world, fitting: Vec::new(), least_s: 0.0, refusal: None };
    search.ways(&options, settings.memory.cpu_update.unwrap_or(0.0))?;
    if shares_updates(settings, &options, hardware, world) {
        search.shares(&options)?;
    }
    // A longer rehearsal can find a window too full of holes that a short one found good.
    let Search { fitting, mut refusal, .. } = search;
    for Fitting { way, .. } in fitting {
        match way.plan(settings, hardware, Rehearse::ToRun) {
            Ok(plan) => return Ok((way, plan)),
            Err(error @ Error::DoesNotFit(_)) => refusal = Some(error),
            Err(other) => return Err(other),
        }
    }
    Err(match refusal {
        Some(Error::DoesNotFit(reason)) => {
            let share = settings.memory.cpu_update.filter(|share| *share > 0.0);
            let lower =
                share.map(|_| "; what the host's cores update lies in host memory: a lower --cpu_update needs less");
            Error::DoesNotFit(format!("{reason}{}{}", way_out(&options, world), lower.unwrap_or_default()))
        }
        other => other.unwrap_or_else(|| Error::DoesNotFit("there is nothing to plan".into())),
    })
}

/// The ways that were compared.
struct Search<'a> {
    settings: &'a Settings,
    hardware: &'a Hardware,
    world: u32,
    /// Those that fit, the fastest first.
    fitting: Vec<Fitting>,
    /// Seconds of arithmetic of the way that computes nothing again.
    least_s: f64,
    /// Why one did not fit: the last of those that compute most again, and so take the least memory.
    refusal: Option<Error>,
}

impl Search<'_> {
    /// What each way would take, in order.
    fn compare(&self, ways: Vec<Way>) -> Vec<(Way, Result<Fitting>)> {
        let compare = |way: Way| {
            let plan = way.plan(self.settings, self.hardware, Rehearse::ToCompare);
            let fitting = plan.map(|plan| Fitting {
                step_s: Estimate::of(&plan).time.step_s,
                window_bytes: plan.placement.window_bytes,
                way: way.clone(),
            });
            (way, fitting)
        };
        ways.into_par_iter().map(compare).collect()
    }

    /// Those of these that fit.
    fn those_that_fit(&self, ways: Vec<Way>) -> impl Iterator<Item = Fitting> + use<> {
        self.compare(ways).into_iter().filter_map(|(_, fits)| fits.ok())
    }

    /// Whether arithmetic waits for moves.
    fn waits(&self, fitting: &Fitting) -> bool {
        fitting.step_s > 1.005 * fitting.way.floor_s(self.hardware)
    }

    /// Rounds, recompute levels, windows and prefetch, with this share of the updates on the host.
    fn ways(&mut self, options: &Options, on_host: f64) -> Result<()> {
        let ways = ways(self.settings, options, on_host, self.hardware, self.world);
        self.least_s = ways.first().map_or(0.0, |(floor_s, _)| *floor_s);
        let (mut found, mut refused): (Vec<Fitting>, Vec<Way>) = (Vec::new(), Vec::new());
        // No plan to come can be faster than the best. Where everything fits that is the first.
        let (first, others) = ways.split_at(1.min(ways.len()));
        for ways in std::iter::once(first).chain(others.chunks(AT_ONCE)).filter(|ways| !ways.is_empty()) {
            let hopeless = |fitting: &Fitting| fitting.step_s <= ways[0].0 * 1.001;
            if self.fitting.iter().chain(&found).any(hopeless) {
                break;
            }
            for (way, fits) in self.compare(ways.iter().map(|(_, way)| way.clone()).collect()) {
                match fits {
                    Ok(fits) => found.push(fits),
                    Err(error @ Error::DoesNotFit(_)) => {
                        self.refusal = Some(error);
                        refused.push(way);
                    }
                    Err(other) => return Err(other),
                }
            }
        }
        found.sort_by(|a, b| a.step_s.total_cmp(&b.step_s));
        // A smaller window leaves more room for homes; the best are tried with that too, and where nothing has room
        // beside the usual one, everything.
        if matches!(self.settings.memory.plugin.placement, Placement::DeviceFirst | Placement::Auto) {
            let best = found.iter().take(3).filter(|best| self.waits(best)).map(|best| best.way.clone()).collect();
            let again = if found.is_empty() { refused } else { best };
            let smaller = |way: Way| WINDOWS[1..].iter().map(move |&window| Way { window, ..way.clone() });
            found.extend(self.those_that_fit(again.into_iter().flat_map(smaller).collect()));
        }
        // And prefetch that runs less far ahead.
        found.sort_by(|a, b| a.step_s.total_cmp(&b.step_s));
        if let (None, Some(best)) = (self.settings.memory.prefetch, found.first().filter(|best| self.waits(best))) {
            let part = |part: &f64| Some((part * best.window_bytes as f64) as u64);
            let nearer: Vec<Way> =
                PARTS.iter().map(|bytes| Way { prefetch: part(bytes), ..best.way.clone() }).collect();
            found.extend(self.those_that_fit(nearer));
        }
        self.fitting.extend(found);
        self.fitting.sort_by(|a, b| a.doubted_s().total_cmp(&b.doubted_s()));
        Ok(())
    }

    /// Shares of the updates for the host's cores, as long as anything moves and the step takes longer for it.
    fn shares(&mut self, options: &Options) -> Result<()> {
        let groups = options.config.num_hidden_layers + 2;
        let mut tried = vec![0];
        let mut next = ON_HOST.to_vec();
        for beside in BESIDE.map(Some).into_iter().chain([None]) {
            for share in next {
                let count = groups_of(share, groups);
                let moves = |best: &Fitting| best.window_bytes > 0 && best.step_s > 1.005 * self.least_s;
                if !self.fitting.first().is_some_and(moves) {
                    return Ok(());
                }
                if count <= groups && !tried.contains(&count) {
                    tried.push(count);
                    self.ways(options, share)?;
                }
            }
            let mut shares = self.fitting.iter().map(|fitting| fitting.way.blueprint.options().updates_on_host);
            let (Some(beside), Some(best)) = (beside, shares.find(|share| *share > 0)) else { break };
            let best = best as f64 / groups as f64;
            next = vec![best - beside, best + beside];
        }
        Ok(())
    }
}

/// What else to try where all micro-batches had to go together for the sake of gradients that are split over ranks.
fn way_out(options: &Options, world: u32) -> &'static str {
    if !options.sums_at_once(world.into()) || options.micro_batches == 1 || options.config.tie_word_embeddings {
        return "";
    }
    "; gradients are split over ranks, so that all micro-batches go through the model together: --sync_each_batch \
     sums each one's over the ranks by itself and lets fewer go together, and so do --plugin zero1 and \
     --shard_size 1, which keep gradients whole"
}

/// Numbers of micro-batches that may go through the model together: all of a step's, or fewer, which take less
/// activation memory. A gradient that is split over ranks is summed over them once, unless each micro-batch's is by
/// itself; and a tied table's gradient is summed over the head's part and then the embedding's, which rounds would
/// interleave (L6): there all go together.
fn rounds(options: &Options, world: u32) -> Vec<u64> {
    let all = options.micro_batches;
    if options.config.tie_word_embeddings || options.sums_at_once(world.into()) {
        return vec![all];
    }
    let mut rounds: Vec<u64> = [all, all.div_ceil(2), all.div_ceil(4), 1].into();
    rounds.dedup();
    rounds
}

/// Recompute levels of all blocks to choose from, most memory first. Between two levels a part of the blocks is
/// already at the lower one.
fn levels(recompute: Recompute, blocks: usize) -> Vec<Vec<Keep>> {
    match recompute {
        Recompute::None => vec![vec![Keep::All; blocks]],
        Recompute::Selective => vec![vec![Keep::Selective; blocks]],
        Recompute::Full => vec![vec![Keep::Block; blocks]],
        Recompute::Auto => {
            let most = (Keep::ALL.len() - 1) * blocks;
            let step = (blocks / 8).max(1);
            (0..=most.div_ceil(step))
                .map(|index| {
                    let position = (index * step).min(most);
                    let (level, lower) = (position / blocks, position % blocks);
                    (0..blocks).map(|block| Keep::ALL[level + usize::from(block < lower)]).collect()
                })
                .collect()
        }
    }
}

/// What blocks may keep at most in the first of several rounds: as much as in all, or their input alone.
fn first_levels(recompute: Recompute, keep: &[Keep], several: bool) -> Vec<Keep> {
    let less = several && recompute == Recompute::Auto && keep.iter().any(|level| *level != Keep::Block);
    if less { vec![Keep::All, Keep::Block] } else { vec![Keep::All] }
}
