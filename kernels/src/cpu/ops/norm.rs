//! RMS norm and its gradient.

use super::reduce::column_sums;
use super::{Element, dot, store, with_scratch};
use crate::numeric::vectorised;
use crate::ops::Into;
use rayon::prelude::*;

/// `out[t,:] = x[t,:]·rstd[t]·weight`, `rstd = 1/sqrt(mean(x²)+eps)`. x, out `[T,C]`, weight `[C]`, rstd `[T]`.
pub fn rmsnorm<T: Element>(x: &[T], weight: &[T], out: &mut [T], rstd: &mut [f32], eps: f32) {
    let hidden = weight.len();
    x.par_chunks_exact(hidden).zip(out.par_chunks_exact_mut(hidden)).zip(rstd).for_each(|((x, out), rstd)| {
        with_scratch(2 * hidden, |scratch| {
            let (row, w) = scratch.split_at_mut(hidden);
            T::widen_slice(x, row);
            T::widen_slice(weight, w);
            let mean = vectorised!(dot(row, row)) / hidden as f32;
            *rstd = 1.0 / (mean + eps).sqrt();
            for (x, w) in row.iter_mut().zip(w) {
                *x = *x * *rstd * *w;
            }
            T::narrow_slice(row, out);
        });
    });
}

/// `d_x[t,:] += rstd·(w·dy − x̂·mean(w·dy·x̂))` with x̂ = x·rstd.
pub fn rmsnorm_backward_input<T: Element>(d_out: &[T], x: &[T], weight: &[T], rstd: &[f32], d_x: &mut [T]) {
    let hidden = weight.len();
    let rows = d_out.par_chunks_exact(hidden).zip(x.par_chunks_exact(hidden)).zip(rstd);
    rows.zip(d_x.par_chunks_exact_mut(hidden)).for_each(|(((d_out, x), rstd), d_x)| {
        with_scratch(2 * hidden, |scratch| {
            let (wdy, normal) = scratch.split_at_mut(hidden);
            for i in 0..hidden {
                wdy[i] = weight[i].widen() * d_out[i].widen();
                normal[i] = x[i].widen() * rstd;
            }
            let mean = vectorised!(dot(wdy, normal)) / hidden as f32;
            for (g, n) in wdy.iter_mut().zip(normal) {
                *g = rstd * (*g - *n * mean);
            }
            store(wdy, d_x, Into::Add);
        });
    });
}

/// `d_weight (+)= Σ_t dy·x̂`, summed over tokens in a fixed order.
pub fn rmsnorm_backward_weight<T: Element, G: Element>(
    d_out: &[T],
    x: &[T],
    rstd: &[f32],
    d_weight: &mut [G],
    into: Into,
) {
    let hidden = d_weight.len();
    column_sums(rstd.len(), d_weight, into, |t, columns, sums| {
        let row = t * hidden;
        let (d_out, x) = (&d_out[row..][columns.clone()], &x[row..][columns]);
        for ((sum, d), x) in sums.iter_mut().zip(d_out).zip(x) {
            *sum += d.widen() * (x.widen() * rstd[t]);
        }
    });
}
