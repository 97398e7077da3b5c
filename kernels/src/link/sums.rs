//! Sums over ranks: in rank order, in f32 (f64 in f64), rounded once to the type of the values.

use crate::{DType, Error, Result};
use half::{bf16, f16};

/// Elements whose sums are held at once, on the stack.
const BLOCK: usize = 512;

/// A type of values and the type of its sums.
trait Value {
    type Sum: Copy + Default + std::ops::AddAssign;
    const BYTES: usize;
    fn read(bytes: &[u8]) -> Self::Sum;
    fn write(sum: Self::Sum, bytes: &mut [u8]);
}

macro_rules! value {
    ($type:ty, $sum:ty, $widen:expr, $round:expr) => {
        impl Value for $type {
            type Sum = $sum;
            const BYTES: usize = size_of::<$type>();
            fn read(bytes: &[u8]) -> $sum {
                let mut own = [0; Self::BYTES];
                own.copy_from_slice(bytes);
                $widen(<$type>::from_le_bytes(own))
            }
            fn write(sum: $sum, bytes: &mut [u8]) {
                let value: $type = $round(sum);
                bytes.copy_from_slice(&value.to_le_bytes());
            }
        }
    };
}

value!(f64, f64, |x| x, |x| x);
value!(f32, f32, |x| x, |x| x);
value!(f16, f32, f16::to_f32, f16::from_f32);
value!(bf16, f32, bf16::to_f32, bf16::from_f32);

/// `out` becomes the sum of `part(0)`, `part(1)`, … `part(world − 1)`, all as long as `out`.
///
/// # Errors
/// [`Error::Unsupported`] if `dtype` has no sums.
///
/// # Panics
/// If `out` is not whole elements.
pub(super) fn in_rank_order<'a>(
    dtype: DType,
    world: usize,
    part: impl Fn(usize) -> &'a [u8],
    out: &mut [u8],
) -> Result<()> {
    match dtype {
        DType::F64 => sum::<f64>(world, part, out),
        DType::F32 => sum::<f32>(world, part, out),
        DType::F16 => sum::<f16>(world, part, out),
        DType::Bf16 => sum::<bf16>(world, part, out),
        DType::I32 | DType::Rem16 | DType::Q8 => {
            return Err(Error::Unsupported {
                what: format!("a sum of {dtype:?}"),
                backend: "cpu",
                instead: "sums are taken of f64, f32, f16 and bf16".into(),
            });
        }
    }
    Ok(())
}

fn sum<'a, V: Value>(world: usize, part: impl Fn(usize) -> &'a [u8], out: &mut [u8]) {
    assert!(out.len().is_multiple_of(V::BYTES), "{} bytes are not whole elements", out.len());
    let mut sums = [V::Sum::default(); BLOCK];
    for (index, out) in out.chunks_mut(BLOCK * V::BYTES).enumerate() {
        let block = |rank: usize| part(rank)[index * BLOCK * V::BYTES..][..out.len()].chunks_exact(V::BYTES);
        // The first is taken as it is, not added to zero: -0 stays -0.
        sums.iter_mut().zip(block(0)).for_each(|(sum, bytes)| *sum = V::read(bytes));
        for rank in 1..world {
            sums.iter_mut().zip(block(rank)).for_each(|(sum, bytes)| *sum += V::read(bytes));
        }
        out.chunks_exact_mut(V::BYTES).zip(sums).for_each(|(bytes, sum)| V::write(sum, bytes));
    }
}
