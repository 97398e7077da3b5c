//! Rotary positions on packed q, k, v.

use super::Element;
use super::attention::Shape;
use rayon::prelude::*;

/// Rotates q and k of `qkv` `[T, (H+2K)·D]` in place. `table` `[S, D]`: D/2 cosines, then D/2 sines. `starts`:
/// `[T]`, as for [`crate::Operators::attention`].
pub fn rope<T: Element>(qkv: &mut [T], table: &[f32], starts: Option<&[i32]>, shape: Shape, inverse: bool) {
    let half = shape.head_dim / 2;
    let rotated = (shape.heads + shape.kv_heads) * shape.head_dim;
    qkv.par_chunks_exact_mut(shape.packed()).enumerate().for_each(|(t, row)| {
        let start = starts.map_or(0, |starts| starts[t] as usize);
        let position = (t % shape.sequence - start) * shape.head_dim;
        let (cosines, sines) = table[position..position + shape.head_dim].split_at(half);
        for head in row[..rotated].chunks_exact_mut(shape.head_dim) {
            let (first, second) = head.split_at_mut(half);
            for (((a, b), cosine), sine) in first.iter_mut().zip(second).zip(cosines).zip(sines) {
                let sine = if inverse { -sine } else { *sine };
                let (x, y) = (a.widen(), b.widen());
                *a = T::narrow(x * cosine - y * sine);
                *b = T::narrow(y * cosine + x * sine);
            }
        }
    });
}
