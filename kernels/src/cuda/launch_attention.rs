//! Castor's own attention: which of the three programs runs, and how.
//!
//! `attention.cu` (tensor cores) for f16 and bf16 up to D = 256 where a block's shared memory suffices,
//! `attention_any.cu` otherwise, `attention_plain.cu` where the scores shall be materialised. With a document mask
//! these are used even where cuDNN could be: its graphs have no such mask.

use super::Ptr;
use super::launch::{Launcher, aligned, real};
use super::modules::{Argument, Extent, arguments};
use super::programs::{Program, Tiles};
use crate::ops::Attention;
use crate::{DType, Error, Result};
use cudarc::driver::sys::CUstream;

/// `Shape` of attention.cu and attention_any.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct Shape {
    sequence: u32,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    packed: u32,
    aligned: u32,
    scale: f32,
}
// SAFETY: the fields and order of the sources' Shape.
unsafe impl Argument for Shape {}

impl Shape {
    /// Of a call on these views.
    fn of(shape: Attention, views: &[Ptr]) -> Shape {
        Shape {
            sequence: shape.sequence as u32,
            heads: shape.heads as u32,
            kv_heads: shape.kv_heads as u32,
            head_dim: shape.head_dim as u32,
            packed: shape.packed() as u32,
            aligned: u32::from(shape.head_dim.is_multiple_of(8) && aligned(views)),
            scale: 1.0 / (shape.head_dim as f32).sqrt(),
        }
    }
}

/// `Matrix` of attention_plain.cu: strides in elements.
#[repr(C)]
#[derive(Clone, Copy)]
struct Matrix {
    head: u64,
    row: u64,
    column: u64,
}

/// `Product` of attention_plain.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct Product {
    left: Matrix,
    right: Matrix,
    target: Matrix,
    m: u32,
    n: u32,
    k: u32,
    left_share: u32,
    right_share: u32,
    group: u32,
    causal: u32,
    factor: f32,
}
// SAFETY: the fields and order of the source's Product; no padding: nine u64, then eight 4-byte values.
unsafe impl Argument for Product {}

/// The target is lower triangular.
const TARGET_LOWER: u32 = 1;
/// The left operand is lower triangular.
const LEFT_LOWER: u32 = 2;
/// The left operand is upper triangular (a transposed lower one).
const LEFT_UPPER: u32 = 3;

/// Largest head dimension of the fused kernels.
const LARGEST_HEAD: u64 = 256;

/// What a kernel without masks is given in the place of starts.
fn address(starts: Option<Ptr>) -> u64 {
    starts.map_or(0, |starts| starts.address)
}

/// As [`address`], of one sequence of the batch.
fn address_of(starts: Option<Ptr>, batch: u64, shape: Attention) -> u64 {
    starts.map_or(0, |starts| starts.address + batch * shape.sequence * 4)
}

/// Queries of a step of the ordered backward.
const STEP_QUERIES: u64 = 64;

/// Offsets in the ordered backward's scratch, behind delta f32 [B,H,S]: sums f32 [B·H·tiles, 64, head], turns u32
/// [1 + B·H·tiles], the end.
fn ordered_scratch(shape: Attention, head: u32) -> [u64; 3] {
    let tiles = shape.batch * shape.heads * shape.sequence.div_ceil(STEP_QUERIES);
    let sums = (shape.tokens() * shape.heads * 4).next_multiple_of(256);
    let turns = sums + tiles * STEP_QUERIES * u64::from(head) * 4;
    [sums, turns, turns + (1 + tiles) * 4]
}

impl Launcher {
    /// `starts`: i32 `[B,S]` as for [`crate::Operators::attention`].
    pub(crate) fn attention(
        &self,
        stream: CUstream,
        qkv: Ptr,
        starts: Option<Ptr>,
        out: Ptr,
        stats: Ptr,
        scratch: Ptr,
        shape: Attention,
    ) -> Result<()> {
        let dtype = real(qkv.dtype)?;
        if !shape.fused {
            return self.plain(stream, qkv, starts, out, stats, scratch, shape);
        }
        let program = self.fused_program(dtype, shape, starts.is_some())?;
        let kernel = "attention_forward";
        let rows = match program {
            Program::Attention(_, 256, ..) => 64,
            Program::Attention(..) => 128,
            _ => 16,
        };
        let extent = Extent {
            grid: (shape.sequence.div_ceil(rows), shape.heads, shape.batch),
            threads: 128,
            shared: program.shared_bytes(kernel, shape.head_dim as u32),
        };
        let values = Shape::of(shape, &[qkv, out]);
        // SAFETY: attention_forward(qkv, out, stats, starts, shape).
        unsafe {
            self.modules.launch(
                stream,
                program,
                kernel,
                extent,
                arguments![qkv.address, out.address, stats.address, address(starts), values],
            )
        }
    }

    pub(crate) fn attention_backward(
        &self,
        stream: CUstream,
        qkv: Ptr,
        starts: Option<Ptr>,
        out: Ptr,
        stats: Ptr,
        d_out: Ptr,
        d_qkv: Ptr,
        scratch: Ptr,
        shape: Attention,
    ) -> Result<()> {
        let dtype = real(qkv.dtype)?;
        if !shape.fused {
            return self.plain_backward(stream, qkv, starts, out, stats, d_out, d_qkv, scratch, shape);
        }
        let program = self.fused_program(dtype, shape, starts.is_some())?;
        let values = Shape::of(shape, &[qkv, d_out, d_qkv]);
        let all_rows = shape.tokens() * shape.heads;
        // SAFETY: attention_delta(out, d_out, delta, shape, rows); `scratch` begins with f32 [B,H,S].
        unsafe {
            self.modules.launch(
                stream,
                program,
                "attention_delta",
                Extent::row(all_rows.div_ceil(4), 128),
                arguments![out.address, d_out.address, scratch.address, values, all_rows],
            )?;
        }
        let launch = |kernel, grid, threads, further: [u64; 2]| {
            let extent = Extent { grid, threads, shared: program.shared_bytes(kernel, shape.head_dim as u32) };
            let [sums, turns] = further;
            // SAFETY: attention_backward_*(qkv, d_out, stats, delta, d_qkv, starts, shape), and for the ordered one
            // (…, sums, turns). Parameters that a kernel does not have are not read.
            unsafe {
                self.modules.launch(
                    stream,
                    program,
                    kernel,
                    extent,
                    arguments![
                        qkv.address,
                        d_out.address,
                        stats.address,
                        scratch.address,
                        d_qkv.address,
                        address(starts),
                        values,
                        sums,
                        turns
                    ],
                )
            }
        };
        let apart = |rows: u64, slices: u64| -> Result<()> {
            let tiles = shape.sequence.div_ceil(rows);
            launch("attention_backward_kv", (tiles, shape.kv_heads * slices, shape.batch), 128, [0; 2])?;
            launch("attention_backward_q", (tiles, shape.heads, shape.batch), 128, [0; 2])
        };
        match program {
            Program::Attention(_, head, Tiles::Large, _) => {
                let [sums, turns, end] = ordered_scratch(shape, head).map(|offset| scratch.address + offset);
                self.zero(stream, turns, end - turns)?;
                // A block owns as many keys as the head has columns.
                let blocks = shape.sequence.div_ceil(head.into()) * shape.kv_heads * shape.batch;
                launch("attention_backward_ordered", (blocks, 1, 1), 2 * head, [sums, turns])
            }
            Program::Attention(_, head, ..) => apart(64, if head == 256 { 2 } else { 1 }),
            _ => apart(16, 1),
        }
    }

    /// f32 [B,H,S] for the fused backward, and what the ordered one takes behind it; two of f32 [H,S,S] for the
    /// plain path.
    pub(crate) fn attention_scratch_bytes(&self, shape: Attention, dtype: DType, masked: bool) -> u64 {
        match self.fused_program(dtype, shape, masked) {
            _ if !shape.fused => 2 * shape.heads * shape.sequence * shape.sequence * 4,
            Ok(Program::Attention(_, head, Tiles::Large, _)) => ordered_scratch(shape, head)[2],
            _ => shape.tokens() * shape.heads * 4,
        }
    }

    fn fused_program(&self, dtype: DType, shape: Attention, masked: bool) -> Result<Program> {
        if shape.head_dim > LARGEST_HEAD {
            return Err(Error::Unsupported {
                what: format!("fused attention with a head of {}", shape.head_dim),
                backend: "cuda",
                instead: format!("heads of at most {LARGEST_HEAD}, or plain attention"),
            });
        }
        let head = if shape.head_dim <= 64 { 64 } else { shape.head_dim.next_power_of_two() as u32 };
        let limit = self.modules.shared_limit;
        let with = |tiles| Program::Attention(dtype, head, tiles, masked);
        let (small, large) = (with(Tiles::Small), with(Tiles::Large));
        // Two blocks of the forward shall share a multiprocessor.
        let large_fits = head < 256
            && 2 * large.shared_bytes("attention_forward", 0) <= limit
            && large.shared_bytes("attention_backward_ordered", 0) <= limit;
        Ok(if dtype == DType::F32 {
            Program::AttentionAny(dtype)
        } else if self.tiles == Tiles::Large && large_fits {
            large
        } else if small.shared_bytes("attention_backward_kv", 0) <= limit {
            small
        } else {
            Program::AttentionAny(dtype)
        })
    }

    /// One product of the plain path, over all of a sequence's heads.
    fn product(&self, stream: CUstream, dtype: DType, addresses: [u64; 3], heads: u64, p: Product) -> Result<()> {
        let [left, right, target] = addresses;
        let kernel = if p.causal == TARGET_LOWER { "product_scores" } else { "product_values" };
        let extent =
            Extent { grid: (u64::from(p.n).div_ceil(64), u64::from(p.m).div_ceil(64), heads), threads: 256, shared: 0 };
        // SAFETY: product_*(left, right, target, product).
        unsafe {
            self.modules.launch(
                stream,
                Program::AttentionPlain(dtype),
                kernel,
                extent,
                arguments![left, right, target, p],
            )
        }
    }

    fn plain(
        &self,
        stream: CUstream,
        qkv: Ptr,
        starts: Option<Ptr>,
        out: Ptr,
        stats: Ptr,
        scratch: Ptr,
        shape: Attention,
    ) -> Result<()> {
        let p = Plain::new(qkv.dtype, shape);
        for sequence in 0..shape.batch {
            let [q, k, v] = p.heads_of(qkv.address, sequence);
            let stats = stats.address + sequence * shape.heads * shape.sequence * 4;
            self.product(stream, qkv.dtype, [q, k, scratch.address], shape.heads, p.scores())?;
            let starts = address_of(starts, sequence, shape);
            // SAFETY: softmax(scores, stats, starts, sequence).
            unsafe {
                self.modules.launch(
                    stream,
                    Program::AttentionPlain(qkv.dtype),
                    "softmax",
                    Extent::area(shape.sequence, shape.heads, 256),
                    arguments![scratch.address, stats, starts, shape.sequence as u32],
                )?;
            }
            let target = out.address + sequence * shape.sequence * p.out_row * p.size;
            self.product(stream, qkv.dtype, [scratch.address, v, target], shape.heads, p.values(p.out_row))?;
        }
        Ok(())
    }

    fn plain_backward(
        &self,
        stream: CUstream,
        qkv: Ptr,
        starts: Option<Ptr>,
        out: Ptr,
        stats: Ptr,
        d_out: Ptr,
        d_qkv: Ptr,
        scratch: Ptr,
        shape: Attention,
    ) -> Result<()> {
        let p = Plain::new(qkv.dtype, shape);
        let probabilities = scratch.address;
        let gradients = probabilities + shape.heads * p.square * 4;
        for sequence in 0..shape.batch {
            let [q, k, v] = p.heads_of(qkv.address, sequence);
            let [d_q, d_k, d_v] = p.heads_of(d_qkv.address, sequence);
            let stats = stats.address + sequence * shape.heads * shape.sequence * 4;
            let rows = sequence * shape.sequence * p.out_row * p.size;
            let (out, d_out) = (out.address + rows, d_out.address + rows);
            self.product(stream, qkv.dtype, [q, k, probabilities], shape.heads, p.scores())?;
            self.product(stream, qkv.dtype, [d_out, v, gradients], shape.heads, p.score_gradients())?;
            let starts = address_of(starts, sequence, shape);
            // SAFETY: softmax_backward(scores, gradients, stats, out, d_out, starts, sequence, heads, head_dim).
            unsafe {
                self.modules.launch(
                    stream,
                    Program::AttentionPlain(qkv.dtype),
                    "softmax_backward",
                    Extent::area(shape.sequence, shape.heads, 256),
                    arguments![
                        probabilities,
                        gradients,
                        stats,
                        out,
                        d_out,
                        starts,
                        shape.sequence as u32,
                        shape.heads as u32,
                        shape.head_dim as u32
                    ],
                )?;
            }
            let value = p.transposed(Matrix { head: shape.head_dim, row: p.out_row, column: 1 }, 1.0);
            self.product(stream, qkv.dtype, [probabilities, d_out, d_v], shape.kv_heads, value)?;
            let key = p.transposed(p.packed, p.scale);
            self.product(stream, qkv.dtype, [gradients, q, d_k], shape.kv_heads, key)?;
            let query = Product { factor: p.scale, target: p.packed, ..p.values(0) };
            self.product(stream, qkv.dtype, [gradients, k, d_q], shape.heads, query)?;
        }
        Ok(())
    }
}

/// The products of the plain path, for one sequence.
struct Plain {
    shape: Attention,
    /// Bytes of an element.
    size: u64,
    /// S²
    square: u64,
    /// H·D
    out_row: u64,
    scale: f32,
    /// Heads within packed qkv.
    packed: Matrix,
}

impl Plain {
    fn new(dtype: DType, shape: Attention) -> Plain {
        Plain {
            shape,
            size: dtype.bytes(1),
            square: shape.sequence * shape.sequence,
            out_row: shape.heads * shape.head_dim,
            scale: 1.0 / (shape.head_dim as f32).sqrt(),
            packed: Matrix { head: shape.head_dim, row: shape.packed(), column: 1 },
        }
    }

    /// Addresses of the first q, k and v head of a sequence.
    fn heads_of(&self, packed: u64, sequence: u64) -> [u64; 3] {
        let base = packed + sequence * self.shape.sequence * self.shape.packed() * self.size;
        let head = self.shape.head_dim * self.size;
        [base, base + self.shape.heads * head, base + (self.shape.heads + self.shape.kv_heads) * head]
    }

    fn transposed_heads(&self) -> Matrix {
        Matrix { row: 1, column: self.packed.row, ..self.packed }
    }

    fn squares(&self) -> Matrix {
        Matrix { head: self.square, row: self.shape.sequence, column: 1 }
    }

    fn share(&self) -> u32 {
        (self.shape.heads / self.shape.kv_heads) as u32
    }

    /// `[H,S,S] = scale · q · kᵀ`
    fn scores(&self) -> Product {
        Product {
            left: self.packed,
            right: self.transposed_heads(),
            target: self.squares(),
            m: self.shape.sequence as u32,
            n: self.shape.sequence as u32,
            k: self.shape.head_dim as u32,
            left_share: 1,
            right_share: self.share(),
            group: 1,
            causal: TARGET_LOWER,
            factor: self.scale,
        }
    }

    /// `[H,S,S] = d_out · vᵀ`
    fn score_gradients(&self) -> Product {
        let left = Matrix { head: self.shape.head_dim, row: self.out_row, column: 1 };
        Product { left, factor: 1.0, ..self.scores() }
    }

    /// `[H,S,D] = [H,S,S] · packed heads`, rows of the target `row` apart.
    fn values(&self, row: u64) -> Product {
        Product {
            left: self.squares(),
            right: self.packed,
            target: Matrix { head: self.shape.head_dim, row, column: 1 },
            m: self.shape.sequence as u32,
            n: self.shape.head_dim as u32,
            k: self.shape.sequence as u32,
            left_share: 1,
            right_share: self.share(),
            group: 1,
            causal: LEFT_LOWER,
            factor: 1.0,
        }
    }

    /// `[K,S,D] = factor · Σ_group [H,S,S]ᵀ · heads of right`
    fn transposed(&self, right: Matrix, factor: f32) -> Product {
        Product {
            left: Matrix { head: self.square, row: 1, column: self.shape.sequence },
            right,
            target: self.packed,
            right_share: 1,
            group: self.share(),
            causal: LEFT_UPPER,
            factor,
            ..self.values(0)
        }
    }
}
