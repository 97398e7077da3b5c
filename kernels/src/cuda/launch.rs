//! Castor's own kernels as operators: chooses the kernel for types, sizes and alignment, and launches it.
//!
//! Every method is the operator of the same name of [`crate::Operators`] (shapes and semantics are said
//! there) on device addresses, on a given stream. Nothing is allocated per launch. Attention is in
//! `launch_attention`, updates in `launch_update`; products with weights are not here (cuBLASLt has them).

use super::Ptr;
use super::modules::{Extent, Modules, arguments, check};
use super::programs::{Program, Tiles};
use crate::ops::{Attention, Classify, Into};
use crate::{DType, Error, Result};
use cudarc::driver::CudaContext;
use cudarc::driver::sys::{self, CUstream};
use std::sync::Arc;

/// Most blocks of a sum of squares; each has a slot of f64 in the launcher's own scratch.
const SQUARE_BLOCKS: u64 = 2048;
/// Most blocks a multiprocessor of the persistent kernels that leave one row of partial sums each.
const PARTIALS_PER_PROCESSOR: u64 = 4;
/// Elements of a row that one block of a classifying cluster holds: 256 threads × 8 groups of 8.
const CLASSIFY_HELD: u64 = 256 * 8 * 8;

/// Launches Castor's kernels on one device.
pub(crate) struct Launcher {
    pub(super) modules: Modules,
    /// How attention on tensor cores is cut, where it fits.
    pub(super) tiles: Tiles,
    context: Arc<CudaContext>,
    /// f64 `[SQUARE_BLOCKS]`. One is enough: operators of a rank run on one stream, one after another.
    partials: u64,
}

/// A compute type, or a typed refusal.
pub(super) fn real(dtype: DType) -> Result<DType> {
    match dtype {
        DType::F32 | DType::F16 | DType::Bf16 => Ok(dtype),
        DType::F64 | DType::I32 | DType::Rem16 | DType::Q8 => Err(Error::Unsupported {
            what: format!("arithmetic in {dtype:?}"),
            backend: "cuda",
            instead: "f32, f16 or bf16".into(),
        }),
    }
}

/// Whether all of the memory starts at a multiple of 16 bytes.
pub(super) fn aligned(all: &[Ptr]) -> bool {
    all.iter().all(|one| one.address.is_multiple_of(16))
}

/// The kernel for a target that is f32 or the compute type.
fn by_target(target: Ptr, real: DType, same: &'static str, f32: &'static str) -> Result<&'static str> {
    if target.dtype == real {
        Ok(same)
    } else if target.dtype == DType::F32 {
        Ok(f32)
    } else {
        Err(Error::Unsupported {
            what: format!("a {:?} gradient of {real:?} computation", target.dtype),
            backend: "cuda",
            instead: format!("f32 or {real:?}"),
        })
    }
}

impl Launcher {
    /// Takes the fixed scratch; programs are compiled (or read from the cache) at their first use.
    ///
    /// # Errors
    /// If the device is too old or refuses.
    pub(crate) fn new(context: &Arc<CudaContext>, tiles: Tiles) -> Result<Launcher> {
        let modules = Modules::new(context)?;
        context.bind_to_thread().map_err(|error| super::modules::refusal("cuCtxSetCurrent", error.0))?;
        let mut partials = 0;
        // SAFETY: the context is current; one address is written.
        check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&mut partials, SQUARE_BLOCKS as usize * 8) })?;
        Ok(Launcher { modules, tiles, context: context.clone(), partials })
    }

    /// By bytes, because a part of a block of `Q8` is no element.
    pub(crate) fn zero(&self, stream: CUstream, address: u64, bytes: u64) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: this is device memory of that many bytes, used in the stream's order.
        let code = unsafe {
            if address.is_multiple_of(4) && bytes.is_multiple_of(4) {
                sys::cuMemsetD32Async(address, 0, (bytes / 4) as usize, stream)
            } else {
                sys::cuMemsetD8Async(address, 0, bytes as usize, stream)
            }
        };
        check("cuMemsetAsync", code)
    }

    pub(crate) fn cast(&self, stream: CUstream, source: Ptr, target: Ptr) -> Result<()> {
        let count = target.elements;
        if source.dtype == target.dtype {
            let bytes = target.dtype.bytes(count) as usize;
            if bytes == 0 {
                return Ok(());
            }
            // SAFETY: both are device memory of that many bytes, used in the stream's order.
            return check("cuMemcpyDtoDAsync", unsafe {
                sys::cuMemcpyDtoDAsync_v2(target.address, source.address, bytes, stream)
            });
        }
        let program = Program::Cast(real(source.dtype)?, real(target.dtype)?);
        let eights = if aligned(&[source, target]) { count / 8 } else { 0 };
        let blocks = count.div_ceil(256 * 16).min(self.modules.processors * 8);
        // SAFETY: cast(source, target, eights, count).
        unsafe {
            self.modules.launch(
                stream,
                program,
                "cast",
                Extent::row(blocks, 256),
                arguments![source.address, target.address, eights, count],
            )
        }
    }

    /// As [`crate::Collectives::accumulate`].
    pub(crate) fn accumulate(&self, stream: CUstream, source: Ptr, target: Ptr) -> Result<()> {
        let count = target.elements;
        let eights = if aligned(&[source, target]) { count / 8 } else { 0 };
        let blocks = count.div_ceil(256 * 16).min(self.modules.processors * 8);
        // SAFETY: accumulate(source, target, eights, count).
        unsafe {
            self.modules.launch(
                stream,
                Program::Reduce(real(target.dtype)?),
                "accumulate",
                Extent::row(blocks, 256),
                arguments![source.address, target.address, eights, count],
            )
        }
    }

    pub(crate) fn embed(
        &self,
        stream: CUstream,
        ids: Ptr,
        table: Ptr,
        out: Ptr,
        tokens: u64,
        hidden: u64,
        vocabulary: u64,
    ) -> Result<()> {
        let program = Program::Embed(real(table.dtype)?);
        let bytes = table.dtype.bytes(hidden);
        let (kernel, units) = if aligned(&[table, out]) && bytes.is_multiple_of(16) {
            ("embed_wide", bytes / 16)
        } else {
            ("embed_narrow", hidden)
        };
        // SAFETY: embed_*(ids, table, out, units, vocabulary).
        unsafe {
            self.modules.launch(
                stream,
                program,
                kernel,
                Extent::row(tokens, 128),
                arguments![ids.address, table.address, out.address, units, vocabulary],
            )
        }
    }

    pub(crate) fn embed_backward(
        &self,
        stream: CUstream,
        ids: Ptr,
        order: Ptr,
        starts: Ptr,
        distinct: u64,
        d_out: Ptr,
        d_table: Ptr,
        _tokens: u64,
        hidden: u64,
        vocabulary: u64,
        into: Into,
    ) -> Result<()> {
        let dtype = real(d_out.dtype)?;
        let kernel = match into {
            Into::Replace => {
                self.zero(stream, d_table.address, d_table.dtype.bytes(d_table.elements))?;
                by_target(d_table, dtype, "embed_backward_real", "embed_backward_f32")?
            }
            Into::Add => by_target(d_table, dtype, "embed_backward_real_add", "embed_backward_f32_add")?,
        };
        let wide = u32::from(aligned(&[d_out, d_table]) && hidden.is_multiple_of(8));
        // SAFETY: embed_backward_*(ids, order, starts, d_out, d_table, hidden, vocabulary, wide).
        unsafe {
            self.modules.launch(
                stream,
                Program::Embed(dtype),
                kernel,
                Extent::area(distinct, hidden.div_ceil(128 * 8), 128),
                arguments![
                    ids.address,
                    order.address,
                    starts.address,
                    d_out.address,
                    d_table.address,
                    hidden,
                    vocabulary,
                    wide
                ],
            )
        }
    }

    pub(crate) fn rmsnorm(
        &self,
        stream: CUstream,
        x: Ptr,
        weight: Ptr,
        out: Ptr,
        rstd: Ptr,
        tokens: u64,
        hidden: u64,
        eps: f32,
    ) -> Result<()> {
        let program = Program::Rmsnorm(real(x.dtype)?);
        let (kernel, threads) = match held(hidden, aligned(&[x, weight, out])) {
            Some((1, threads)) => ("rmsnorm_1", threads),
            Some((2, threads)) => ("rmsnorm_2", threads),
            Some((_, threads)) => ("rmsnorm_4", threads),
            None => ("rmsnorm_any", 256),
        };
        // SAFETY: rmsnorm_*(x, weight, out, rstd, hidden, eps).
        unsafe {
            self.modules.launch(
                stream,
                program,
                kernel,
                Extent::row(tokens, threads),
                arguments![x.address, weight.address, out.address, rstd.address, hidden, eps],
            )
        }
    }

    pub(crate) fn rmsnorm_backward(
        &self,
        stream: CUstream,
        d_out: Ptr,
        x: Ptr,
        weight: Ptr,
        rstd: Ptr,
        d_x: Ptr,
        d_weight: Ptr,
        scratch: Ptr,
        tokens: u64,
        hidden: u64,
        into: Into,
    ) -> Result<()> {
        let dtype = real(x.dtype)?;
        let half = dtype != DType::F32;
        // Blocks a multiprocessor: as many as the registers let in at once (see rmsnorm.cu).
        let (kernel, threads, together) = match held(hidden, aligned(&[d_out, x, weight, d_x, scratch])) {
            Some((1, threads)) => ("rmsnorm_backward_1", threads, 4),
            Some((2, threads)) => ("rmsnorm_backward_2", threads, if half { 3 } else { 2 }),
            Some((_, threads)) => ("rmsnorm_backward_4", threads, if half { 2 } else { 1 }),
            None => ("rmsnorm_backward_any", 256, PARTIALS_PER_PROCESSOR),
        };
        let blocks = tokens.min(self.modules.processors * together);
        // SAFETY: rmsnorm_backward_*(d_out, x, weight, rstd, d_x, partials, tokens, hidden).
        unsafe {
            self.modules.launch(
                stream,
                Program::Rmsnorm(dtype),
                kernel,
                Extent::row(blocks, threads),
                arguments![
                    d_out.address,
                    x.address,
                    weight.address,
                    rstd.address,
                    d_x.address,
                    scratch.address,
                    tokens,
                    hidden
                ],
            )?;
        }
        self.column_sum(stream, dtype, scratch, d_weight, blocks, hidden, into)
    }

    /// Bytes of partial sums of [`Launcher::rmsnorm_backward`] and [`Launcher::bias_backward`].
    pub(crate) fn rmsnorm_scratch_bytes(&self, tokens: u64, columns: u64) -> u64 {
        tokens.min(self.modules.processors * PARTIALS_PER_PROCESSOR) * columns * 4
    }

    /// `y[T,O] += bias[O]`
    pub(crate) fn bias_add(&self, stream: CUstream, y: Ptr, bias: Ptr, tokens: u64, outputs: u64) -> Result<()> {
        let program = Program::Columns(real(y.dtype)?);
        let wide = u32::from(aligned(&[y, bias]) && outputs.is_multiple_of(8));
        let slices = outputs.div_ceil(128 * 8);
        let rows = tokens.min((self.modules.processors * 16).div_ceil(slices.max(1)));
        // SAFETY: bias_add(y, bias, rows, columns, wide).
        unsafe {
            self.modules.launch(
                stream,
                program,
                "bias_add",
                Extent::area(slices, rows, 128),
                arguments![y.address, bias.address, tokens, outputs, wide],
            )
        }
    }

    pub(crate) fn bias_backward(
        &self,
        stream: CUstream,
        d_y: Ptr,
        d_bias: Ptr,
        scratch: Ptr,
        tokens: u64,
        outputs: u64,
        into: Into,
    ) -> Result<()> {
        let dtype = real(d_y.dtype)?;
        let wide = u32::from(aligned(&[d_y, scratch]) && outputs.is_multiple_of(8));
        let blocks = tokens.min(self.modules.processors * 2);
        // SAFETY: row_partials(y, partials, rows, columns, wide).
        unsafe {
            self.modules.launch(
                stream,
                Program::Columns(dtype),
                "row_partials",
                Extent::area(outputs.div_ceil(128 * 8), blocks, 128),
                arguments![d_y.address, scratch.address, tokens, outputs, wide],
            )?;
        }
        self.column_sum(stream, dtype, scratch, d_bias, blocks, outputs, into)
    }

    /// `target[c] (+)= Σ_r partials[r, c]`, f32 partials.
    fn column_sum(
        &self,
        stream: CUstream,
        dtype: DType,
        partials: Ptr,
        target: Ptr,
        rows: u64,
        columns: u64,
        into: Into,
    ) -> Result<()> {
        let kernel = by_target(target, dtype, "column_sum_real", "column_sum_f32")?;
        // SAFETY: column_sum_*(partials, target, rows, columns, add).
        unsafe {
            self.modules.launch(
                stream,
                Program::Columns(dtype),
                kernel,
                Extent::row(columns.div_ceil(32), 1024),
                arguments![partials.address, target.address, rows, columns, u32::from(into == Into::Add)],
            )
        }
    }

    pub(crate) fn rope(
        &self,
        stream: CUstream,
        qkv: Ptr,
        table: Ptr,
        starts: Option<Ptr>,
        shape: Attention,
        inverse: bool,
    ) -> Result<()> {
        let program = Program::Rope(real(qkv.dtype)?);
        let head_dim = shape.head_dim;
        let lanes = head_dim / 16;
        let wide = aligned(&[qkv, table]) && head_dim.is_multiple_of(16) && lanes <= 256;
        let (kernel, threads) = if wide { ("rope_wide", 256 / lanes * lanes) } else { ("rope_any", 256) };
        let direction: f32 = if inverse { -1.0 } else { 1.0 };
        let heads = (shape.heads + shape.kv_heads) as u32;
        // SAFETY: rope_*(qkv, table, starts, sequence, heads, head_dim, packed, direction).
        unsafe {
            self.modules.launch(
                stream,
                program,
                kernel,
                Extent::row(shape.tokens(), threads as u32),
                arguments![
                    qkv.address,
                    table.address,
                    starts.map_or(0, |starts| starts.address),
                    shape.sequence as u32,
                    heads,
                    head_dim as u32,
                    shape.packed(),
                    direction
                ],
            )
        }
    }

    pub(crate) fn swiglu(&self, stream: CUstream, gate_up: Ptr, out: Ptr, tokens: u64, ffn: u64) -> Result<()> {
        let program = Program::Swiglu(real(out.dtype)?);
        let wide = aligned(&[gate_up, out]) && ffn.is_multiple_of(8);
        let kernel = if wide { "swiglu_wide" } else { "swiglu_any" };
        // SAFETY: swiglu_*(gate_up, out, ffn).
        unsafe {
            self.modules.launch(
                stream,
                program,
                kernel,
                Extent::row(tokens, swiglu_threads(ffn)),
                arguments![gate_up.address, out.address, ffn],
            )
        }
    }

    pub(crate) fn swiglu_backward(
        &self,
        stream: CUstream,
        d_out: Ptr,
        gate_up: Ptr,
        out: Option<Ptr>,
        tokens: u64,
        ffn: u64,
    ) -> Result<()> {
        let program = Program::Swiglu(real(gate_up.dtype)?);
        let wide = aligned(&[d_out, gate_up]) && out.is_none_or(|out| aligned(&[out])) && ffn.is_multiple_of(8);
        let kernel = if wide { "swiglu_backward_wide" } else { "swiglu_backward_any" };
        let out = out.map_or(0, |out| out.address);
        // SAFETY: swiglu_backward_*(d_out, gate_up, out or null, ffn).
        unsafe {
            self.modules.launch(
                stream,
                program,
                kernel,
                Extent::row(tokens, swiglu_threads(ffn)),
                arguments![d_out.address, gate_up.address, out, ffn],
            )
        }
    }

    pub(crate) fn classify(
        &self,
        stream: CUstream,
        logits: Ptr,
        targets: Ptr,
        losses: Ptr,
        tokens: u64,
        vocabulary: u64,
        what: Classify,
    ) -> Result<()> {
        let dtype = real(logits.dtype)?;
        let clusters = dtype != DType::F32 && self.modules.capability.0 >= 9;
        let program = Program::Classify(dtype, clusters);
        let (gradients, scale) = match what {
            Classify::Loss => (0u32, 0.0f32),
            Classify::Gradient { scale } => (1, scale),
            Classify::Sampled { scale, seed, first_token } => {
                // SAFETY: classify_draw(logits, targets, vocabulary, seed, first_token).
                unsafe {
                    self.modules.launch(
                        stream,
                        program,
                        "classify_draw",
                        Extent::row(tokens, 512),
                        arguments![logits.address, targets.address, vocabulary, seed, first_token],
                    )?;
                }
                (1, scale)
            }
        };
        let wide = clusters && vocabulary.is_multiple_of(8) && aligned(&[logits]);
        let (kernel, blocks, threads) = match vocabulary.div_ceil(CLASSIFY_HELD) {
            1 if wide => ("classify_1_8", 1, 256),
            2 if wide => ("classify_2_8", 2, 256),
            3..=4 if wide => ("classify_4_8", 4, 256),
            5..=8 if wide => ("classify_8_8", 8, 256),
            9..=16 if wide => ("classify_8_16", 8, 256),
            _ => ("classify_any", 1, 512),
        };
        // SAFETY: classify_*(logits, targets, losses, vocabulary, gradients, scale).
        unsafe {
            self.modules.launch(
                stream,
                program,
                kernel,
                Extent::row(tokens * blocks, threads),
                arguments![logits.address, targets.address, losses.address, vocabulary, gradients, scale],
            )
        }
    }

    pub(crate) fn sum(&self, stream: CUstream, values: Ptr, total: Ptr, into: Into) -> Result<()> {
        // SAFETY: sum(values, total, count, add).
        unsafe {
            self.modules.launch(
                stream,
                Program::Reduce(DType::F32),
                "sum",
                Extent::row(1, 1024),
                arguments![values.address, total.address, values.elements, u32::from(into == Into::Add)],
            )
        }
    }

    pub(crate) fn square_sum(&self, stream: CUstream, x: Ptr, slot: Ptr) -> Result<()> {
        let program = Program::Reduce(real(x.dtype)?);
        let eights = if aligned(&[x]) { x.elements / 8 } else { 0 };
        let blocks = x.elements.div_ceil(512 * 32).clamp(1, (self.modules.processors * 4).min(SQUARE_BLOCKS));
        // SAFETY: square_partials(x, partials, eights, count); square_total(partials, slot, count). The
        // scratch has a slot for each block.
        unsafe {
            self.modules.launch(
                stream,
                program,
                "square_partials",
                Extent::row(blocks, 512),
                arguments![x.address, self.partials, eights, x.elements],
            )?;
            self.modules.launch(
                stream,
                program,
                "square_total",
                Extent::row(1, 1024),
                arguments![self.partials, slot.address, blocks as u32],
            )
        }
    }

    pub(crate) fn norm_finish(
        &self,
        stream: CUstream,
        slots: Ptr,
        max_norm: f32,
        loss_scale: f32,
        control: Ptr,
    ) -> Result<()> {
        // SAFETY: norm_finish(slots, count, max_norm, loss_scale, control).
        unsafe {
            self.modules.launch(
                stream,
                Program::Finish,
                "norm_finish",
                Extent::row(1, 32),
                arguments![slots.address, slots.elements, max_norm, loss_scale, control.address],
            )
        }
    }
}

/// How many groups of eight a thread of an RMSNorm block holds, and how many threads it has; none where a
/// row does not divide into aligned groups or is too long.
fn held(hidden: u64, aligned: bool) -> Option<(u64, u32)> {
    let eights = hidden / 8;
    if !aligned || !hidden.is_multiple_of(8) || eights > 1024 {
        return None;
    }
    let held = match eights {
        0..=256 => 1,
        257..=512 => 2,
        _ => 4,
    };
    Some((held, (eights.div_ceil(held).div_ceil(32) * 32) as u32))
}

/// Threads of a SwiGLU block: a row in an even number of nearly full passes of at most 256.
fn swiglu_threads(ffn: u64) -> u32 {
    let eights = ffn.div_ceil(8).max(1);
    let passes = 2 * eights.div_ceil(512);
    (eights.div_ceil(passes).div_ceil(32) * 32) as u32
}

impl Drop for Launcher {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: nobody launches any more: `self` is going. A failure cannot be acted on.
            let _ = unsafe { sys::cuMemFree_v2(self.partials) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_holds_its_whole_row() {
        for hidden in (8..=8192).step_by(8) {
            let (held, threads) = held(hidden, true).unwrap();
            assert!(
                held * u64::from(threads) * 8 >= hidden && threads <= 256 && threads.is_multiple_of(32),
                "{hidden}"
            );
        }
        assert_eq!(held(4096, true), Some((2, 256)));
        assert_eq!(held(4096, false), None);
        assert_eq!(held(12, true), None);
        assert_eq!(held(8200, true), None);
    }

    #[test]
    fn swiglu_blocks_are_whole_warps() {
        for ffn in [1, 8, 344, 2816, 11008, 14336, 28672] {
            let threads = swiglu_threads(ffn);
            assert!((32..=256).contains(&threads) && threads.is_multiple_of(32), "{ffn}: {threads}");
        }
    }
}
