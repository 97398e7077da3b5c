//! The formats in which GGUF stores tensors: plain floats, and blocks of small integers that share a scale.

use castor_kernels::numeric;
use half::f16;

/// How elements are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    F32,
    F16,
    Bf16,
    /// 32 × 4 bits, scale.
    Q4Zero,
    /// 32 × 4 bits, scale and minimum.
    Q4One,
    /// 32 × 8 bits, scale.
    Q8Zero,
    /// 256 × 6 bits, a scale for each 16 and one for all.
    Q6K,
}

/// Elements of the largest block.
const BLOCK_MAX: usize = 256;

impl Format {
    /// By GGUF's number.
    ///
    /// # Errors
    /// What the number stands for and what is read.
    pub fn of(code: u32) -> Result<Format, String> {
        Ok(match code {
            0 => Format::F32,
            1 => Format::F16,
            2 => Format::Q4Zero,
            3 => Format::Q4One,
            8 => Format::Q8Zero,
            14 => Format::Q6K,
            30 => Format::Bf16,
            other => {
                return Err(format!(
                    "GGUF type {other}; F32 (0), F16 (1), Q4_0 (2), Q4_1 (3), Q8_0 (8), Q6_K (14) and BF16 (30) are read"
                ));
            }
        })
    }

    /// Elements and bytes of a block.
    const fn block(self) -> (usize, usize) {
        match self {
            Format::F32 => (1, 4),
            Format::F16 | Format::Bf16 => (1, 2),
            Format::Q4Zero => (32, 18),
            Format::Q4One => (32, 20),
            Format::Q8Zero => (32, 34),
            Format::Q6K => (256, 210),
        }
    }

    /// Bytes of `elements`; `None` if they are no whole number of blocks.
    pub fn bytes(self, elements: u64) -> Option<u64> {
        let (each, bytes) = self.block();
        if !elements.is_multiple_of(each as u64) { None } else { (elements / each as u64).checked_mul(bytes as u64) }
    }

    /// Elements `first .. first + out.len()` of a tensor stored in `bytes`; they must lie in it.
    pub fn widen(self, bytes: &[u8], first: usize, out: &mut [f32]) {
        let (each, size) = self.block();
        let mut values = [0.0; BLOCK_MAX];
        let mut done = 0;
        while done < out.len() {
            let (block, skipped) = ((first + done) / each, (first + done) % each);
            let count = (each - skipped).min(out.len() - done);
            self.widen_block(&bytes[block * size..(block + 1) * size], &mut values[..each]);
            out[done..done + count].copy_from_slice(&values[skipped..skipped + count]);
            done += count;
        }
    }

    fn widen_block(self, block: &[u8], out: &mut [f32]) {
        let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
        match self {
            Format::F32 => out[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]),
            Format::F16 => out[0] = half(0),
            Format::Bf16 => out[0] = numeric::widen_bf16(u16::from_le_bytes([block[0], block[1]])),
            Format::Q4Zero => nibbles(&block[2..], out, |q| (f32::from(q) - 8.0) * half(0)),
            Format::Q4One => nibbles(&block[4..], out, |q| f32::from(q) * half(0) + half(2)),
            Format::Q8Zero => {
                for (out, q) in out.iter_mut().zip(&block[2..]) {
                    *out = f32::from(*q as i8) * half(0);
                }
            }
            Format::Q6K => {
                let (low, rest) = block.split_at(128);
                let (high, rest) = rest.split_at(64);
                let scales = &rest[..16];
                for (index, out) in out.iter_mut().enumerate() {
                    // Two halves of 128; in each, four quarters of 32 share bytes: the low bits of quarters 0 and 2
                    // the halves of one byte, the high bits of all four the pairs of another.
                    let (part, quarter, place) = (index / 128, index / 32 % 4, index % 32);
                    let low = low[part * 64 + quarter % 2 * 32 + place] >> (quarter / 2 * 4) & 15;
                    let high = high[part * 32 + place] >> (quarter * 2) & 3;
                    let q = i16::from(low | high << 4) - 32;
                    *out = half(208) * f32::from(scales[index / 16] as i8) * f32::from(q);
                }
            }
        }
    }
}

/// 32 elements in 16 bytes: the low halves first, then the high ones.
fn nibbles(packed: &[u8], out: &mut [f32], value: impl Fn(u8) -> f32) {
    let (low, high) = out.split_at_mut(16);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(packed) {
        *low = value(byte & 15);
        *high = value(byte >> 4);
    }
}
