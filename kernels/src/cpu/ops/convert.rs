//! Zeroing, conversion between compute types, and sums of two.

use super::Element;
use crate::numeric::vectorised;
use rayon::prelude::*;

/// Elements that one task handles.
const BLOCK: usize = 1 << 16;

/// Every byte becomes zero.
pub fn zero(target: &mut [u8]) {
    target.par_chunks_mut(BLOCK).for_each(|part| part.fill(0));
}

/// `target[i] = source[i]` through f32, rounded to nearest even.
pub fn cast<S: Element, T: Element>(source: &[S], target: &mut [T]) {
    assert_eq!(source.len(), target.len(), "a cast keeps the number of elements");
    target.par_chunks_mut(BLOCK).zip(source.par_chunks(BLOCK)).for_each(|(target, source)| {
        for (t, s) in target.iter_mut().zip(source) {
            *t = T::narrow(s.widen());
        }
    });
}

/// `target[i] = target[i] + source[i]` in f32, rounded to nearest even. On the calling thread: it is an engine's.
pub fn accumulate<T: Element>(source: &[T], target: &mut [T]) {
    assert_eq!(source.len(), target.len(), "a sum of two of one length");
    vectorised!({
        for (t, s) in target.iter_mut().zip(source) {
            *t = T::narrow(t.widen() + s.widen());
        }
    });
}
