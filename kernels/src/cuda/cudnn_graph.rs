//! Causal attention written as cuDNN graphs, and plans made of them.
//!
//! The graphs are the composite form (products, pointwise operations and reductions over virtual S×S tensors)
//! that cuDNN 9 recognises as flash attention and runs as one fused kernel; the single attention operation
//! of newer versions has no causal mask on the version that PyTorch ships today. Virtual tensors never
//! exist in memory.
//!
//! q, k and v are read where they lie in the packed rows of `qkv`, by stride; their gradients likewise.

use super::cudnn_backend::{Descriptor, Handle, Library, kind, value};
use crate::ops::Attention;
use crate::{DType, Error, Result};
use std::sync::Arc;

/// Numbers of the tensors that are given at execution.
pub(crate) mod tensor {
    pub(crate) const Q: i64 = 1;
    pub(crate) const K: i64 = 2;
    pub(crate) const V: i64 = 3;
    pub(crate) const OUT: i64 = 4;
    pub(crate) const STATS: i64 = 5;
    pub(crate) const D_OUT: i64 = 6;
    pub(crate) const D_Q: i64 = 7;
    pub(crate) const D_K: i64 = 8;
    pub(crate) const D_V: i64 = 9;
    /// Σ d_out·out of each row, f32 `[B,H,S]`: scratch.
    pub(crate) const ROW_SUM: i64 = 10;
    /// f32 `[B,H,S,D]`: scratch, where d_q is accumulated (not in the deterministic graph).
    pub(crate) const D_Q_SUM: i64 = 11;
    /// Host scalar: 1/√D.
    pub(crate) const SCALE: i64 = 12;
    /// Host scalar: −∞.
    pub(crate) const MASKED: i64 = 13;
    /// Host scalar: 1.
    pub(crate) const ONE: i64 = 14;
    /// First number of the virtual tensors.
    pub(super) const VIRTUAL: i64 = 100;
}

/// Forward or backward.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Pass {
    Forward,
    Backward,
}

/// A finished plan. What it was made from is kept: cuDNN's descriptors point to each other.
pub(crate) struct Plan {
    pub(crate) plan: Descriptor,
    /// Bytes of workspace on the device.
    pub(crate) workspace_bytes: u64,
    _parts: Vec<Descriptor>,
}

/// What a plan is for: the device behind a handle, or (in tests without one) described properties.
#[derive(Clone, Copy)]
pub(crate) enum Target<'a> {
    Handle(&'a Handle),
    #[cfg(test)]
    Properties(&'a Descriptor),
}

// cudnnDataType_t
const F32: i32 = 0;
const F16: i32 = 2;
const I32: i32 = 4;
const BF16: i32 = 9;
const BOOL: i32 = 11;

// cudnnPointwiseMode_t
const ADD: i32 = 0;
const MUL: i32 = 1;
const DIV: i32 = 6;
const SUB: i32 = 9;
const EXP: i32 = 13;
const LOG: i32 = 15;
const IDENTITY: i32 = 21;
const GREATER_EQUAL: i32 = 303;
const INDEX: i32 = 501;
const SELECT: i32 = 601;

// cudnnReduceTensorOp_t
const SUM: i32 = 0;
const MAX: i32 = 3;

/// Dimensions and strides in elements.
type Layout = ([i64; 4], [i64; 4]);

/// The last two dimensions exchanged: the same memory read as a transposed matrix.
fn transposed((dims, strides): Layout) -> Layout {
    ([dims[0], dims[1], dims[3], dims[2]], [strides[0], strides[1], strides[3], strides[2]])
}

/// Contiguous `[a,b,c,d]`.
fn dense(dims: [i64; 4]) -> Layout {
    (dims, [dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1])
}

/// Index of a tensor's descriptor in the graph.
#[derive(Clone, Copy)]
struct Tensor(usize);

struct Graph<'a> {
    library: &'a Arc<Library>,
    parts: Vec<Descriptor>,
    operations: Vec<usize>,
    next: i64,
    half: i32,
    shape: Attention,
}

impl Graph<'_> {
    fn keep(&mut self, descriptor: Descriptor) -> usize {
        self.parts.push(descriptor);
        self.parts.len() - 1
    }

    fn tensor(
        &mut self,
        number: i64,
        (dims, strides): Layout,
        dtype: i32,
        is_virtual: bool,
        by_value: bool,
    ) -> Result<Tensor> {
        let descriptor = Descriptor::new(self.library, kind::TENSOR)?
            .set(901, value::DATA_TYPE, &[dtype])?
            .set(902, value::INT64, &dims)?
            .set(903, value::INT64, &strides)?
            .set(906, value::INT64, &[number])?
            .set(900, value::INT64, &[16i64])?
            .set(907, value::BOOLEAN, &[is_virtual])?
            .set(908, value::BOOLEAN, &[by_value])?
            .finalize()?;
        Ok(Tensor(self.keep(descriptor)))
    }

    fn given(&mut self, number: i64, layout: Layout, dtype: i32) -> Result<Tensor> {
        self.tensor(number, layout, dtype, false, false)
    }

    fn virtual_at(&mut self, layout: Layout, dtype: i32) -> Result<Tensor> {
        self.next += 1;
        self.tensor(self.next, layout, dtype, true, false)
    }

    fn virtual_dense(&mut self, dims: [i64; 4], dtype: i32) -> Result<Tensor> {
        self.virtual_at(dense(dims), dtype)
    }

    fn scalar(&mut self, number: i64) -> Result<Tensor> {
        self.tensor(number, ([1; 4], [1; 4]), F32, false, true)
    }

    fn operation(&mut self, descriptor: Descriptor) -> Result<()> {
        let at = self.keep(descriptor.finalize()?);
        self.operations.push(at);
        Ok(())
    }

    fn product(&mut self, a: Tensor, b: Tensor, c: Tensor) -> Result<()> {
        let how = Descriptor::new(self.library, kind::MATMUL)?.set(1500, value::DATA_TYPE, &[F32])?.finalize()?;
        let operation = Descriptor::new(self.library, kind::OPERATION_MATMUL)?
            .link(1520, &self.parts[a.0])?
            .link(1521, &self.parts[b.0])?
            .link(1522, &self.parts[c.0])?
            .link(1523, &how)?;
        self.keep(how);
        self.operation(operation)
    }

    fn pointwise(
        &mut self,
        mode: i32,
        x: Tensor,
        b: Option<Tensor>,
        select: Option<Tensor>,
        axis: Option<i64>,
        y: Tensor,
    ) -> Result<()> {
        let mut how = Descriptor::new(self.library, kind::POINTWISE)?.set(0, value::POINTWISE_MODE, &[mode])?.set(
            1,
            value::DATA_TYPE,
            &[F32],
        )?;
        if let Some(axis) = axis {
            how = how.set(9, value::INT64, &[axis])?;
        }
        let how = how.finalize()?;
        let mut operation =
            Descriptor::new(self.library, kind::OPERATION_POINTWISE)?.link(750, &how)?.link(751, &self.parts[x.0])?;
        if let Some(b) = b {
            operation = operation.link(752, &self.parts[b.0])?;
        }
        if let Some(select) = select {
            operation = operation.link(758, &self.parts[select.0])?;
        }
        let operation = operation.link(753, &self.parts[y.0])?;
        self.keep(how);
        self.operation(operation)
    }

    /// `y = mode(x, b)` into a new dense virtual tensor.
    fn then(&mut self, mode: i32, x: Tensor, b: Option<Tensor>, dims: [i64; 4], dtype: i32) -> Result<Tensor> {
        let y = self.virtual_dense(dims, dtype)?;
        self.pointwise(mode, x, b, None, None, y)?;
        Ok(y)
    }

    fn reduce(&mut self, operator: i32, x: Tensor, y: Tensor) -> Result<()> {
        let how = Descriptor::new(self.library, kind::REDUCTION)?
            .set(1600, value::REDUCTION_OPERATOR, &[operator])?
            .set(1601, value::DATA_TYPE, &[F32])?
            .finalize()?;
        let operation = Descriptor::new(self.library, kind::OPERATION_REDUCTION)?
            .link(1610, &self.parts[x.0])?
            .link(1611, &self.parts[y.0])?
            .link(1612, &how)?;
        self.keep(how);
        self.operation(operation)
    }

    fn reshape(&mut self, x: Tensor, y: Tensor) -> Result<()> {
        let operation = Descriptor::new(self.library, kind::OPERATION_RESHAPE)?
            .link(2200, &self.parts[x.0])?
            .link(2201, &self.parts[y.0])?;
        self.operation(operation)
    }

    /// Scores above the diagonal become −∞.
    fn causal(&mut self, scores: Tensor) -> Result<Tensor> {
        let dims = self.square();
        let masked = self.scalar(tensor::MASKED)?;
        let row = self.virtual_dense(dims, I32)?;
        let column = self.virtual_dense(dims, I32)?;
        let keeps = self.virtual_dense(dims, BOOL)?;
        let y = self.virtual_dense(dims, F32)?;
        self.pointwise(INDEX, scores, None, None, Some(2), row)?;
        self.pointwise(INDEX, scores, None, None, Some(3), column)?;
        self.pointwise(GREATER_EQUAL, row, Some(column), None, None, keeps)?;
        self.pointwise(SELECT, scores, Some(masked), Some(keeps), None, y)?;
        Ok(y)
    }

    fn square(&self) -> [i64; 4] {
        let Attention { batch, heads, sequence, .. } = self.shape;
        [batch as i64, heads as i64, sequence as i64, sequence as i64]
    }

    fn rows(&self) -> [i64; 4] {
        let Attention { batch, heads, sequence, .. } = self.shape;
        [batch as i64, heads as i64, sequence as i64, 1]
    }

    /// `heads` heads within rows of `row` elements.
    fn strided(&self, heads: u64, row: u64) -> Layout {
        let (b, s, d, row) =
            (self.shape.batch as i64, self.shape.sequence as i64, self.shape.head_dim as i64, row as i64);
        ([b, heads as i64, s, d], [s * row, d, row, 1])
    }

    fn queries_in_qkv(&self) -> Layout {
        self.strided(self.shape.heads, self.shape.packed())
    }

    fn keys_in_qkv(&self) -> Layout {
        self.strided(self.shape.kv_heads, self.shape.packed())
    }

    fn dense_out(&self) -> Layout {
        self.strided(self.shape.heads, self.shape.heads * self.shape.head_dim)
    }

    fn forward(&mut self) -> Result<()> {
        let (square, rows, half) = (self.square(), self.rows(), self.half);
        let q = self.given(tensor::Q, self.queries_in_qkv(), half)?;
        let k = self.given(tensor::K, transposed(self.keys_in_qkv()), half)?;
        let v = self.given(tensor::V, self.keys_in_qkv(), half)?;
        let out = self.given(tensor::OUT, self.dense_out(), half)?;
        let stats = self.given(tensor::STATS, dense(rows), F32)?;
        let scale = self.scalar(tensor::SCALE)?;

        let scores = self.virtual_dense(square, F32)?;
        self.product(q, k, scores)?;
        let scores = self.then(MUL, scores, Some(scale), square, F32)?;
        let scores = self.causal(scores)?;
        let max = self.virtual_dense(rows, F32)?;
        self.reduce(MAX, scores, max)?;
        let shifted = self.then(SUB, scores, Some(max), square, F32)?;
        let exponent = self.then(EXP, shifted, None, square, F32)?;
        let sum = self.virtual_dense(rows, F32)?;
        self.reduce(SUM, exponent, sum)?;
        let log = self.then(LOG, sum, None, rows, F32)?;
        self.pointwise(ADD, max, Some(log), None, None, stats)?;
        let p = self.then(DIV, exponent, Some(sum), square, half)?;
        self.product(p, v, out)
    }

    fn backward(&mut self) -> Result<()> {
        let (square, rows, half) = (self.square(), self.rows(), self.half);
        let q = self.given(tensor::Q, self.queries_in_qkv(), half)?;
        let k = self.given(tensor::K, transposed(self.keys_in_qkv()), half)?;
        let v = self.given(tensor::V, transposed(self.keys_in_qkv()), half)?;
        let out = self.given(tensor::OUT, self.dense_out(), half)?;
        let d_out = self.given(tensor::D_OUT, self.dense_out(), half)?;
        let stats = self.given(tensor::STATS, dense(rows), F32)?;
        let d_q = self.given(tensor::D_Q, self.queries_in_qkv(), half)?;
        let d_k = self.given(tensor::D_K, self.keys_in_qkv(), half)?;
        let d_v = self.given(tensor::D_V, self.keys_in_qkv(), half)?;
        let row_sum = self.given(tensor::ROW_SUM, dense(rows), F32)?;
        let scale = self.scalar(tensor::SCALE)?;
        let one = self.scalar(tensor::ONE)?;

        // row_sum = Σ d_out·out
        let full = dense(self.dense_out().0);
        let product = self.virtual_at(full, F32)?;
        self.pointwise(MUL, d_out, Some(out), None, None, product)?;
        let sum = self.virtual_dense(rows, F32)?;
        self.reduce(SUM, product, sum)?;
        self.pointwise(MUL, sum, Some(one), None, None, row_sum)?;

        // p = exp(scale·q·kᵀ − stats) below the diagonal
        let scores = self.virtual_dense(square, F32)?;
        self.product(q, k, scores)?;
        let scores = self.then(MUL, scores, Some(scale), square, F32)?;
        let scores = self.then(SUB, scores, Some(stats), square, F32)?;
        let scores = self.causal(scores)?;
        let p = self.then(EXP, scores, None, square, F32)?;

        let turned = transposed(dense(square));
        let p_turned = self.virtual_at(turned, half)?;
        self.reshape(p, p_turned)?;
        self.product_over_group(p_turned, d_out, d_v)?;

        // d_scores = p·(d_out·vᵀ − row_sum)·scale
        let d_p = self.virtual_dense(square, F32)?;
        self.product(d_out, v, d_p)?;
        let d_p = self.then(SUB, d_p, Some(row_sum), square, F32)?;
        let d_p = self.then(MUL, d_p, Some(p), square, F32)?;
        let d_scores = self.then(MUL, d_p, Some(scale), square, half)?;
        let d_scores_turned = self.virtual_at(turned, half)?;
        self.reshape(d_scores, d_scores_turned)?;
        self.product_over_group(d_scores_turned, q, d_k)?;

        let k_rows = self.virtual_at(self.keys_in_qkv(), half)?;
        self.reshape(k, k_rows)?;
        if self.shape.deterministic {
            // Straight into d_q: cuDNN then keeps d_scores in its workspace and adds in a fixed order.
            return self.product(d_scores, k_rows, d_q);
        }
        let sum = self.given(tensor::D_Q_SUM, full, F32)?;
        self.product(d_scores, k_rows, sum)?;
        self.pointwise(IDENTITY, sum, None, None, None, d_q)
    }

    /// A product of all query heads, summed over the heads that share a kv head.
    fn product_over_group(&mut self, a: Tensor, b: Tensor, y: Tensor) -> Result<()> {
        if self.shape.heads == self.shape.kv_heads {
            return self.product(a, b, y);
        }
        let all = self.virtual_dense(self.dense_out().0, self.half)?;
        self.product(a, b, all)?;
        self.reduce(SUM, all, y)
    }
}

/// Builds a plan for attention.
///
/// # Errors
/// With cuDNN's own words if it has no engine for the shape.
pub(crate) fn build(
    library: &Arc<Library>,
    target: Target,
    pass: Pass,
    shape: Attention,
    dtype: DType,
) -> Result<Plan> {
    let half = match dtype {
        DType::Bf16 => BF16,
        DType::F16 => F16,
        other => {
            return Err(Error::Unsupported {
                what: format!("cuDNN attention in {other:?}"),
                backend: "cuda",
                instead: "Castor's own kernel".into(),
            });
        }
    };
    let mut graph = Graph { library, parts: Vec::new(), operations: Vec::new(), next: tensor::VIRTUAL, half, shape };
    match pass {
        Pass::Forward => graph.forward()?,
        Pass::Backward => graph.backward()?,
    }
    let operations: Vec<_> = graph.operations.iter().map(|&at| graph.parts[at].raw).collect();
    let whole = Descriptor::new(library, kind::OPERATION_GRAPH)?.set(801, value::DESCRIPTOR, &operations)?;
    let whole = match target {
        Target::Handle(handle) => whole.handle(800, handle)?,
        #[cfg(test)]
        Target::Properties(_) => whole,
    }
    .finalize()?;
    let mut parts = graph.parts;
    let mut last = None;
    // Mode A, then the fallback mode.
    for mode in [3i32, 2] {
        let heuristic = Descriptor::new(library, kind::ENGINE_HEURISTIC)?.link(201, &whole)?.set(
            200,
            value::HEURISTIC_MODE,
            &[mode],
        )?;
        let heuristic = match target {
            Target::Handle(_) => heuristic,
            #[cfg(test)]
            Target::Properties(properties) => heuristic.link(204, properties)?,
        }
        .finalize();
        let heuristic = match heuristic {
            Ok(heuristic) => heuristic,
            Err(error) => {
                last = Some(error);
                continue;
            }
        };
        let mut configurations = Vec::new();
        for _ in 0..16 {
            configurations.push(Descriptor::new(library, kind::ENGINE_CONFIG)?);
        }
        let count = match heuristic.fill(202, &configurations) {
            Ok(count) => count,
            Err(error) => {
                last = Some(error);
                continue;
            }
        };
        for configuration in &configurations[..count] {
            match plan_of(library, target, configuration) {
                Ok(plan) => {
                    let workspace_bytes = u64::try_from(plan.number(402)?).unwrap_or(0);
                    // In order of dependency, so that the last to be dropped is what others point to.
                    let mut kept = vec![heuristic];
                    kept.extend(configurations);
                    kept.push(whole);
                    kept.extend(parts.drain(..).rev());
                    return Ok(Plan { plan, workspace_bytes, _parts: kept });
                }
                Err(error) => last = Some(error),
            }
        }
    }
    Err(last.unwrap_or_else(|| Error::Device {
        call: "cuDNN attention".into(),
        reason: format!("no engine for {pass:?} of {shape:?}"),
    }))
}

fn plan_of(library: &Arc<Library>, target: Target, configuration: &Descriptor) -> Result<Descriptor> {
    let plan = Descriptor::new(library, kind::EXECUTION_PLAN)?.link(401, configuration)?;
    match target {
        Target::Handle(handle) => plan.handle(400, handle)?,
        #[cfg(test)]
        Target::Properties(properties) => plan.link(407, properties)?,
    }
    .finalize()
}

impl Plan {
    /// The plan as text, to be kept on disk.
    pub(crate) fn text(&self) -> Result<Vec<u8>> {
        self.plan.text(405)
    }

    /// A plan from the text of another process with the same library and device.
    pub(crate) fn from_text(library: &Arc<Library>, target: Target, text: &[u8]) -> Result<Plan> {
        let plan = Descriptor::new(library, kind::EXECUTION_PLAN)?;
        let plan = match target {
            Target::Handle(handle) => plan.handle(400, handle)?,
            #[cfg(test)]
            Target::Properties(properties) => plan.link(407, properties)?,
        }
        .set(405, value::CHAR, text)?
        .finalize()?;
        let workspace_bytes = u64::try_from(plan.number(402)?).unwrap_or(0);
        Ok(Plan { plan, workspace_bytes, _parts: Vec::new() })
    }
}
