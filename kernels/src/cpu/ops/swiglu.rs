//! The gated activation and its gradient.

use super::{Element, sigmoid, with_scratch};
use crate::numeric::vectorised;
use rayon::prelude::*;

/// Where [`backward`] finds the gradient and leaves the forward's result.
pub enum Target<'a, T> {
    /// The gradient is read; the result is not wanted.
    Nowhere(&'a [T]),
    /// The gradient is read; the result goes elsewhere.
    Apart(&'a [T], &'a mut [T]),
    /// The result replaces the gradient.
    InPlace(&'a mut [T]),
}

/// `out = silu(gate)·up`. gate_up `[T, 2F]`, out `[T, F]`.
pub fn forward<T: Element>(gate_up: &[T], out: &mut [T], ffn: usize) {
    gate_up.par_chunks_exact(2 * ffn).zip(out.par_chunks_exact_mut(ffn)).for_each(|(gate_up, out)| {
        with_scratch(2 * ffn, |row| {
            T::widen_slice(gate_up, row);
            let (gate, up) = row.split_at_mut(ffn);
            vectorised!({
                for (g, u) in gate.iter_mut().zip(up) {
                    *g = (*g * sigmoid(*g)) * *u;
                }
            });
            T::narrow_slice(gate, out);
        });
    });
}

/// `gate_up` becomes its gradient; `target` receives the forward's result, with the same bits as
/// [`forward`]'s.
pub fn backward<T: Element>(target: Target<'_, T>, gate_up: &mut [T], ffn: usize) {
    let rows = gate_up.par_chunks_exact_mut(2 * ffn);
    match target {
        Target::Nowhere(d_out) => {
            rows.zip(d_out.par_chunks_exact(ffn)).for_each(|(gate_up, d_out)| {
                with_scratch(3 * ffn, |row| {
                    T::widen_slice(d_out, &mut row[..ffn]);
                    backward_row(gate_up, row);
                });
            });
        }
        Target::Apart(d_out, out) => {
            let rows = rows.zip(d_out.par_chunks_exact(ffn)).zip(out.par_chunks_exact_mut(ffn));
            rows.for_each(|((gate_up, d_out), out)| {
                with_scratch(3 * ffn, |row| {
                    T::widen_slice(d_out, &mut row[..ffn]);
                    backward_row(gate_up, row);
                    T::narrow_slice(&row[..ffn], out);
                });
            });
        }
        Target::InPlace(both) => {
            rows.zip(both.par_chunks_exact_mut(ffn)).for_each(|(gate_up, both)| {
                with_scratch(3 * ffn, |row| {
                    T::widen_slice(both, &mut row[..ffn]);
                    backward_row(gate_up, row);
                    T::narrow_slice(&row[..ffn], both);
                });
            });
        }
    }
}

/// One token. `row` `[3F]` begins with F of the gradient, which the forward's result replaces.
fn backward_row<T: Element>(gate_up: &mut [T], row: &mut [f32]) {
    let ffn = gate_up.len() / 2;
    let (d_out, d_gate_up) = row.split_at_mut(ffn);
    T::widen_slice(gate_up, d_gate_up);
    let (gate, up) = d_gate_up.split_at_mut(ffn);
    vectorised!({
        for ((d, g), u) in d_out.iter_mut().zip(gate).zip(up) {
            let (d_out, x, y) = (*d, *g, *u);
            let s = sigmoid(x);
            let silu = x * s;
            *d = silu * y;
            *g = (d_out * y) * (s * (1.0 + x * (1.0 - s)));
            *u = d_out * silu;
        }
    });
    T::narrow_slice(d_gate_up, gate_up);
}
