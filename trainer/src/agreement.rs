//! What all ranks must hold alike before they plan and train: rates, budgets, flags, plans (L7).
//!
//! Ranks agree here at the start, and again where the plan changes; between these each decides for itself and comes to
//! the same.

use crate::error::{Error, Result};
use crate::rates::Rates;
use castor_kernels::Backend;
use castor_runtime::plan::Budgets;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

/// What a rank tells the others of its machine.
#[derive(Serialize, Deserialize)]
struct Offer {
    rates: Rates,
    /// Device bytes beyond those that the driver holds.
    device: u64,
    host: u64,
    nvme: u64,
}

/// Rates and budgets with which every rank can plan: the rates of rank 0, whatever the other ranks' caches hold, and
/// of each tier what the poorest rank has.
///
/// # Errors
/// If a peer is gone.
pub fn common(backend: &dyn Backend, rates: Rates, budgets: Budgets) -> Result<(Rates, Budgets)> {
    if backend.world() == 1 {
        return Ok((rates, budgets));
    }
    let unreadable = |rank: usize, error: serde_json::Error| {
        Error::Kernels(castor_kernels::Error::Peer {
            rank: rank as u32,
            reason: format!("sent no rates ({error}): are all ranks running the same version of castor?"),
        })
    };
    let driver = backend.device().overhead_bytes;
    let own = Offer { rates, device: budgets.device.saturating_sub(driver), host: budgets.host, nvme: budgets.nvme };
    let own_rank = backend.rank() as usize;
    let offers = backend.exchange(&serde_json::to_vec(&own).map_err(|error| unreadable(own_rank, error))?)?;
    let offers: Vec<Offer> = (0..)
        .zip(&offers)
        .map(|(rank, offer)| serde_json::from_slice(offer).map_err(|error| unreadable(rank, error)))
        .collect::<Result<_>>()?;
    let least = |of: fn(&Offer) -> u64| offers.iter().map(of).min().unwrap_or(0);
    let device = match budgets.device < driver {
        true => budgets.device,
        false => least(|offer| offer.device) + driver,
    };
    let budgets = Budgets { device, host: least(|offer| offer.host), nvme: least(|offer| offer.nvme), ..budgets };
    Ok((offers[0].rates, budgets))
}

/// Checks that all ranks hold the same: `what`, for people, each with its text. All ranks must call it.
///
/// # Errors
/// [`Error::Usage`] naming the first rank that differs from rank 0, and in what.
pub fn same(backend: &dyn Backend, held: &[(&str, String)]) -> Result<()> {
    let sums: Vec<u8> = held.iter().flat_map(|(_, text)| xxh3_64(text.as_bytes()).to_le_bytes()).collect();
    let all = backend.exchange(&sums)?;
    for (rank, other) in all.iter().enumerate() {
        let differs =
            (0..held.len()).find(|index| other.get(index * 8..index * 8 + 8) != all[0].get(index * 8..index * 8 + 8));
        if let Some(index) = differs {
            return Err(Error::Usage(format!(
                "rank {rank} has other {} than rank 0; start all ranks with the same flags, files and version of castor",
                held[index].0
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use castor_kernels::Collectives;
    use castor_kernels::cpu::{Cpu, CpuOptions};
    use castor_kernels::link::{Link, LinkOptions};

    fn ranks<T: Send>(body: impl Fn(&Cpu) -> T + Sync) -> Vec<T> {
        let links = Link::in_process(3, LinkOptions::default()).unwrap();
        let body = &body;
        std::thread::scope(|scope| {
            let rank = |link| {
                let cpu = Cpu::new(CpuOptions { link: Some(link), ..CpuOptions::default() }).unwrap();
                body(&cpu)
            };
            let ranks: Vec<_> = links.into_iter().map(|link| scope.spawn(move || rank(link))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn all_ranks_reckon_with_the_same_rates_and_budgets() {
        let rates = |rank: u32| Rates { products: 1e9 / 3.0 + f64::from(rank), ..Rates::assumed("cpu") };
        let all = ranks(|cpu| {
            let rank = u64::from(cpu.rank());
            let budgets = Budgets { device: 100 + rank, host: 50 - rank, nvme: 9, nvme_folder: None };
            common(cpu, rates(cpu.rank()), budgets).unwrap()
        });
        assert!(all.iter().all(|held| *held == all[0]), "{all:?}");
        assert_eq!((all[0].1.device, all[0].1.host, all[0].1.nvme), (100, 48, 9));
        // Text does not keep the last bit.
        assert!((all[0].0.products - rates(0).products).abs() < 0.5, "{all:?}");
    }

    #[test]
    fn a_rank_that_differs_is_named_to_all() {
        let held = |rank: u32| [("flags", "a".to_owned()), ("data", format!("rows {}", rank / 2))];
        for outcome in ranks(|cpu| same(cpu, &held(cpu.rank()))) {
            let said = outcome.unwrap_err().to_string();
            assert!(said.contains("rank 2 has other data than rank 0"), "{said}");
        }
        assert!(ranks(|cpu| same(cpu, &held(0))).into_iter().all(|outcome| outcome.is_ok()));
    }
}
