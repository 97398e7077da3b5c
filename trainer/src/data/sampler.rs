//! Which rows a rank takes at which step: a function of seed, epoch, step and rank, and of nothing else.
//!
//! Laws: within an epoch every row is used exactly once; all ranks do the same number of micro-steps of the
//! same shape, a rank without rows getting fully masked filler; the rows of an optimizer step depend on
//! `world · batch · accumulation` only, so changing how that product is made changes no gradient but by the
//! order of its sums. Resuming at a step needs no replay.

use std::ops::Range;

use castor_kernels::rng;

/// The order of rows within an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// As in the files.
    Sequential,
    /// A permutation of its own for each epoch.
    Shuffled {
        /// Seed of all epochs' permutations.
        seed: u64,
    },
}

/// Deals the rows `0..rows` of a data set to the micro-steps of one rank.
#[derive(Clone, Debug)]
pub struct Sampler {
    rows: u64,
    order: Order,
    world: u64,
    rank: u64,
    batch: u64,
    accumulation: u64,
    /// The permutation of the epoch that was asked for last.
    shuffled: Option<(u64, Vec<u64>)>,
}

impl Sampler {
    /// Rows `0..rows` for rank `rank` of `world`, `batch` rows a micro-step, `accumulation` micro-steps a step.
    ///
    /// # Panics
    /// If any count is zero or the rank is outside the world: settings are checked before.
    pub fn new(rows: u64, order: Order, rank: u32, world: u32, batch: u64, accumulation: u64) -> Sampler {
        assert!(rows > 0 && batch > 0 && accumulation > 0 && rank < world);
        Sampler { rows, order, world: world.into(), rank: rank.into(), batch, accumulation, shuffled: None }
    }

    /// Rows of a full optimizer step over all ranks.
    pub const fn rows_per_step(&self) -> u64 {
        self.world * self.batch * self.accumulation
    }

    /// Optimizer steps of an epoch; the last may be partial.
    pub const fn steps_per_epoch(&self) -> u64 {
        self.rows.div_ceil(self.rows_per_step())
    }

    /// Optimizer steps of `epochs` epochs: whole ones in full, a part rounded up, at least one.
    pub fn steps(&self, epochs: f64) -> u64 {
        // The subtraction keeps 0.1 · 10 from becoming 2 steps by rounding alone.
        (epochs * self.steps_per_epoch() as f64 - 1e-9).ceil().max(1.0) as u64
    }

    /// Epoch, and step within it, of a global step.
    pub const fn position(&self, step: u64) -> (u64, u64) {
        (step / self.steps_per_epoch(), step % self.steps_per_epoch())
    }

    /// Rows that all ranks together use in global step `step`.
    pub fn rows_in(&self, step: u64) -> u64 {
        let (_, step) = self.position(step);
        self.rows_per_step().min(self.rows - step * self.rows_per_step())
    }

    /// This rank's rows for global step `step`: one list of `batch` entries per micro-step, None where the rank
    /// fills up with a masked row. The lists are as many on every rank.
    pub fn step(&mut self, step: u64) -> Vec<Vec<Option<u64>>> {
        let (epoch, step_in_epoch) = self.position(step);
        let first = step_in_epoch * self.rows_per_step();
        let micro_steps = self.rows_in(step).div_ceil(self.world * self.batch);
        (0..micro_steps)
            .map(|micro| {
                let first = first + (micro * self.world + self.rank) * self.batch;
                (first..first + self.batch).map(|place| self.row_at(epoch, place)).collect()
            })
            .collect()
    }

    fn row_at(&mut self, epoch: u64, place: u64) -> Option<u64> {
        if place >= self.rows {
            return None;
        }
        let Order::Shuffled { seed } = self.order else {
            return Some(place);
        };
        if self.shuffled.as_ref().is_none_or(|(of, _)| *of != epoch) {
            self.shuffled = Some((epoch, permutation(self.rows, seed, epoch)));
        }
        self.shuffled.as_ref().map(|(_, rows)| rows[place as usize])
    }
}

/// Fisher–Yates with the counter-based generator: counter = place, lane = epoch.
fn permutation(rows: u64, seed: u64, epoch: u64) -> Vec<u64> {
    let mut order: Vec<u64> = (0..rows).collect();
    for place in (1..rows).rev() {
        // The high half of the product is uniform on 0..=place up to 2^-64 · rows.
        let pick = (u128::from(rng::bits(seed, place, epoch)) * u128::from(place + 1)) >> 64;
        order.swap(place as usize, pick as usize);
    }
    order
}

/// Splits `rows` into training rows and the last `fraction` held out for evaluation: at least one of each where
/// the fraction is not 0 and there are two rows.
pub fn held_out(rows: u64, fraction: f64) -> (Range<u64>, Range<u64>) {
    let evaluation = match (rows as f64 * fraction).round() as u64 {
        _ if fraction <= 0.0 || rows < 2 => 0,
        count => count.clamp(1, rows - 1),
    };
    (0..rows - evaluation, rows - evaluation..rows)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn every_row_once_an_epoch_and_equal_shapes_on_every_rank() {
        for rows in 1..=9 {
            for world in 1..=4 {
                for (batch, accumulation) in [(1, 1), (2, 1), (2, 2), (2, 8), (3, 2)] {
                    let mut ranks: Vec<_> = (0..world)
                        .map(|rank| Sampler::new(rows, Order::Shuffled { seed: 5 }, rank, world, batch, accumulation))
                        .collect();
                    let steps = ranks[0].steps_per_epoch();
                    for epoch in 0..2 {
                        let mut seen: HashMap<u64, u32> = HashMap::new();
                        for step in epoch * steps..(epoch + 1) * steps {
                            let dealt: Vec<_> = ranks.iter_mut().map(|r| r.step(step)).collect();
                            let shape = |d: &Vec<Vec<Option<u64>>>| d.iter().map(Vec::len).collect::<Vec<_>>();
                            assert!(dealt.iter().all(|d| shape(d) == shape(&dealt[0])));
                            assert!(!dealt[0].is_empty() && dealt[0].len() as u64 <= accumulation);
                            let used = dealt.iter().flatten().flatten().flatten();
                            assert_eq!(used.clone().count() as u64, ranks[0].rows_in(step));
                            used.for_each(|row| *seen.entry(*row).or_default() += 1);
                        }
                        assert_eq!(seen.len() as u64, rows);
                        assert!(seen.values().all(|times| *times == 1));
                    }
                }
            }
        }
    }

    #[test]
    fn a_step_takes_the_same_rows_however_it_is_cut() {
        let rows_of = |world: u32, batch, accumulation, step| {
            let mut all: Vec<u64> = (0..world)
                .flat_map(|rank| {
                    Sampler::new(50, Order::Shuffled { seed: 1 }, rank, world, batch, accumulation).step(step)
                })
                .flatten()
                .flatten()
                .collect();
            all.sort_unstable();
            all
        };
        for step in 0..14 {
            let one = rows_of(1, 8, 1, step);
            assert_eq!(one, rows_of(1, 2, 4, step));
            assert_eq!(one, rows_of(2, 2, 2, step));
            assert_eq!(one, rows_of(4, 1, 2, step));
        }
    }

    #[test]
    fn epochs_differ_and_repeat_by_seed() {
        assert_ne!(permutation(100, 1, 0), permutation(100, 1, 1));
        assert_ne!(permutation(100, 1, 0), permutation(100, 2, 0));
        assert_eq!(permutation(100, 1, 3), permutation(100, 1, 3));
    }

    #[test]
    fn counts_of_known_runs() {
        // 10 rows, batch 2, accumulation 2: windows of 2, 2 and 1 micro-steps.
        let mut sampler = Sampler::new(10, Order::Sequential, 0, 1, 2, 2);
        assert_eq!((sampler.steps_per_epoch(), sampler.steps(2.0), sampler.steps(0.3)), (3, 6, 1));
        assert_eq!(sampler.step(5), vec![vec![Some(8), Some(9)]]);
        assert_eq!(Sampler::new(10, Order::Sequential, 0, 1, 2, 8).steps_per_epoch(), 1);
        assert_eq!(Sampler::new(10, Order::Sequential, 0, 1, 1, 1).steps(0.1), 1);
        assert_eq!(Sampler::new(10, Order::Sequential, 0, 1, 1, 1).steps(1e-300), 1);
        assert_eq!(held_out(100, 0.05), (0..95, 95..100));
        assert_eq!(held_out(3, 0.01), (0..2, 2..3));
        assert_eq!(held_out(1, 0.5), (0..1, 1..1));
        assert_eq!(held_out(10, 0.0), (0..10, 10..10));
    }
}
