//! The embedding table: gather, and scatter of its gradient without races.

use super::{Element, store, with_scratch};
use crate::ops::Into;
use rayon::prelude::*;

/// Rows of the table that one task of [`backward`] owns.
const ROWS: usize = 64;

/// `out[t,:] = table[ids[t],:]`. table `[V,C]`, out `[T,C]`; ids that are not rows of the table give zeros.
pub fn forward<T: Element>(ids: &[i32], table: &[T], out: &mut [T], hidden: usize) {
    out.par_chunks_exact_mut(hidden).zip(ids).for_each(|(out, &id)| {
        let row = usize::try_from(id).ok().and_then(|id| table.chunks_exact(hidden).nth(id));
        match row {
            Some(row) => out.copy_from_slice(row),
            None => out.fill(T::zeroed()),
        }
    });
}

/// `d_table[v,:] (+)= Σ_{t: ids[t]=v} d_out[t,:]`, in token order. `order`: positions sorted stably by id;
/// bucket u is `order[starts[u]..starts[u+1]]`.
pub fn backward<T: Element, G: Element>(
    ids: &[i32],
    order: &[i32],
    starts: &[i32],
    d_out: &[T],
    d_table: &mut [G],
    hidden: usize,
    into: Into,
) {
    let bucket = |u: usize| &order[starts[u] as usize..starts[u + 1] as usize];
    let id_of = |u: usize| ids[bucket(u)[0] as usize] as usize;
    let distinct = starts.len() - 1;
    d_table.par_chunks_mut(ROWS * hidden).enumerate().for_each(|(block, rows)| {
        let first = block * ROWS;
        let last = first + rows.len() / hidden;
        if into == Into::Replace {
            rows.fill(G::zeroed());
        }
        // Buckets are sorted by id: this task's are a run that begins here.
        let (mut low, mut high) = (0, distinct);
        while low < high {
            let middle = low + (high - low) / 2;
            if id_of(middle) < first {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        with_scratch(hidden, |sum| {
            for u in (low..distinct).take_while(|&u| id_of(u) < last) {
                sum.fill(0.0);
                for &t in bucket(u) {
                    let row = &d_out[t as usize * hidden..][..hidden];
                    for (sum, d) in sum.iter_mut().zip(row) {
                        *sum += d.widen();
                    }
                }
                let row = id_of(u) - first;
                store(sum, &mut rows[row * hidden..][..hidden], into);
            }
        });
    });
}
