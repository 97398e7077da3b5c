//! Matrix products through cuBLASLt: one prepared product per (shape, types, layout, …), made on first use and
//! kept, so that a call after the first is a table look-up and a launch.
//!
//! Everything is row-major outside and column-major inside; a row-major matrix is its transpose read
//! column-major, so no byte is moved:
//!
//! | product | A, op | B, op | m × n × k |
//! |---|---|---|---|
//! | y = x·wᵀ | w, T | x, N | O × T × I |
//! | d_x = d_y·w | w, N | d_y, N | I × T × O |
//! | d_w = d_yᵀ·x | x, N | d_y, T | I × O × T |
//!
//! Sums over k are never split into parts that meet in arrival order (reduction scheme "none"), so a product
//! gives the same bits every time. Which algorithm is fastest is measured once by `tune` and remembered.

use super::Ptr;
use super::algorithms::Algorithms;
use super::driver::check;
use crate::ops::{Into, Linear};
use crate::{DType, Error, Result};
use cudarc::cublaslt::sys::{self as lt, cublasLtMatmulDescAttributes_t as Attribute};
use cudarc::cublaslt::sys::{cublasComputeType_t, cublasStatus_t, cudaDataType_t};
use cudarc::driver::sys::{self, CUevent, CUstream};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;

/// Bytes of workspace that cuBLASLt may use. 32 MiB is its own recommendation for Hopper.
pub(crate) const WORKSPACE_BYTES: u64 = 32 << 20;

/// Candidates asked of the heuristic, and timed.
const CANDIDATES: usize = 16;

/// Which of the three products of a linear layer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Product {
    Forward,
    BackwardInput,
    BackwardWeight,
}

/// What makes two products the same to cuBLASLt.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Key {
    pub(crate) product: Product,
    pub(crate) shape: Linear,
    /// Type of both operands.
    pub(crate) operands: DType,
    /// Type of the result and of what it is added to.
    pub(crate) result: DType,
    /// Whether the result is added to something (beta = 1).
    pub(crate) adds: bool,
    pub(crate) bias: bool,
    /// Power of two, at most 16, that all addresses are multiples of. More is not claimed, so that the
    /// choice of an algorithm, and with it the bits, does not depend on where a tensor happens to lie.
    pub(crate) alignment: u32,
}

/// A product ready to launch. The handles live as long as the process.
struct Prepared {
    description: lt::cublasLtMatmulDesc_t,
    a: lt::cublasLtMatrixLayout_t,
    b: lt::cublasLtMatrixLayout_t,
    c: lt::cublasLtMatrixLayout_t,
    algorithm: lt::cublasLtMatmulAlgo_t,
}

// SAFETY: handles of a thread-safe library, used under a lock.
unsafe impl Send for Prepared {}

/// The operands of one product, by address.
#[derive(Clone, Copy)]
struct Operands {
    a: u64,
    b: u64,
    c: u64,
    d: u64,
    bias: Option<u64>,
}

/// Scratch on the device that a product may use.
#[derive(Clone, Copy)]
pub(crate) struct Workspace {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
}

/// cuBLASLt for one device.
pub(crate) struct Gemm {
    handle: lt::cublasLtHandle_t,
    tf32: bool,
    /// Whether first uses are timed. Off: what the cache says, else the heuristic's first.
    tunes: bool,
    /// None: the library has no algorithm.
    prepared: Mutex<HashMap<Key, Option<Prepared>>>,
    algorithms: Mutex<Algorithms>,
    clock: [CUevent; 2],
}

// SAFETY: handles of thread-safe libraries; tables are behind locks.
unsafe impl Send for Gemm {}
// SAFETY: as above.
unsafe impl Sync for Gemm {}

/// Turns cuBLASLt's answer into a result that names the call.
fn checked(call: &'static str, status: cublasStatus_t) -> Result<()> {
    if status == cublasStatus_t::CUBLAS_STATUS_SUCCESS {
        return Ok(());
    }
    Err(Error::Device { call: call.to_owned(), reason: format!("{status:?}") })
}

impl Gemm {
    /// Opens the library for the current context. `device_name` keys the cache of algorithms.
    pub(crate) fn new(device_name: &str, tf32: bool, tunes: bool) -> Result<Self> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one handle. The library was opened by the loader.
        checked("cublasLtCreate", unsafe { lt::cublasLtCreate(&mut handle) })?;
        // SAFETY: no preconditions.
        let version = unsafe { lt::cublasLtGetVersion() };
        let mut gemm = Gemm {
            handle,
            tf32,
            tunes,
            prepared: Mutex::default(),
            algorithms: Mutex::new(Algorithms::load(device_name, version as u64)),
            clock: [std::ptr::null_mut(); 2],
        };
        for event in &mut gemm.clock {
            // SAFETY: writes one handle; flag 0 keeps times.
            check("cuEventCreate", unsafe { sys::cuEventCreate(event, 0) })?;
        }
        Ok(gemm)
    }

    /// `y = x·wᵀ (+ bias) (+ residual)`; see [`crate::Operators::linear`]. False if the library has no
    /// algorithm with a bias for these types: nothing was done then.
    pub(crate) fn linear(
        &self,
        stream: CUstream,
        workspace: Workspace,
        x: Ptr,
        w: Ptr,
        bias: Option<Ptr>,
        residual: Option<Ptr>,
        y: Ptr,
        shape: Linear,
    ) -> Result<bool> {
        let Linear { tokens, inputs, outputs } = shape;
        expect("x", x, tokens * inputs, x.dtype);
        expect("w", w, outputs * inputs, x.dtype);
        expect("y", y, tokens * outputs, x.dtype);
        if let Some(residual) = residual {
            expect("residual", residual, tokens * outputs, y.dtype);
        }
        if let Some(bias) = bias {
            expect("bias", bias, outputs, y.dtype);
        }
        let operands = Operands {
            a: w.address,
            b: x.address,
            c: residual.map_or(y.address, |r| r.address),
            d: y.address,
            bias: bias.map(|b| b.address),
        };
        let key = key(Product::Forward, shape, x.dtype, y.dtype, residual.is_some(), operands);
        self.multiply(stream, workspace, key, operands)
    }

    /// `d_x (+)= d_y·w`.
    pub(crate) fn linear_backward_input(
        &self,
        stream: CUstream,
        workspace: Workspace,
        d_y: Ptr,
        w: Ptr,
        d_x: Ptr,
        shape: Linear,
        into: Into,
    ) -> Result<()> {
        let Linear { tokens, inputs, outputs } = shape;
        expect("d_y", d_y, tokens * outputs, d_y.dtype);
        expect("w", w, outputs * inputs, d_y.dtype);
        expect("d_x", d_x, tokens * inputs, d_y.dtype);
        let operands = Operands { a: w.address, b: d_y.address, c: d_x.address, d: d_x.address, bias: None };
        let key = key(Product::BackwardInput, shape, d_y.dtype, d_x.dtype, into == Into::Add, operands);
        self.multiply(stream, workspace, key, operands).map(|_| ())
    }

    /// `d_w (+)= d_yᵀ·x`; d_w may be f32 while the operands are 16 bit.
    pub(crate) fn linear_backward_weight(
        &self,
        stream: CUstream,
        workspace: Workspace,
        d_y: Ptr,
        x: Ptr,
        d_w: Ptr,
        shape: Linear,
        into: Into,
    ) -> Result<()> {
        let Linear { tokens, inputs, outputs } = shape;
        expect("d_y", d_y, tokens * outputs, d_y.dtype);
        expect("x", x, tokens * inputs, d_y.dtype);
        assert!(d_w.dtype == d_y.dtype || d_w.dtype == DType::F32, "d_w is {:?}", d_w.dtype);
        expect("d_w", d_w, outputs * inputs, d_w.dtype);
        let operands = Operands { a: x.address, b: d_y.address, c: d_w.address, d: d_w.address, bias: None };
        let key = key(Product::BackwardWeight, shape, d_y.dtype, d_w.dtype, into == Into::Add, operands);
        self.multiply(stream, workspace, key, operands).map(|_| ())
    }

    fn multiply(&self, stream: CUstream, workspace: Workspace, key: Key, operands: Operands) -> Result<bool> {
        let Linear { tokens, inputs, outputs } = key.shape;
        if tokens == 0 || inputs == 0 || outputs == 0 {
            return Ok(true);
        }
        let mut table = self.prepared.lock();
        let known = match table.entry(key) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => place.insert(self.prepare(stream, workspace, key, operands)?),
        };
        let Some(prepared) = known else {
            return match key.bias {
                true => Ok(false),
                false => Err(Error::Unsupported {
                    what: format!("the product {key:?}"),
                    backend: "cuda",
                    instead: "cuBLASLt has no algorithm for it: use a shape whose sizes are multiples of 8".into(),
                }),
            };
        };
        self.launch(stream, workspace, key, prepared, &prepared.algorithm, operands, 1.0)?;
        Ok(true)
    }

    fn launch(
        &self,
        stream: CUstream,
        workspace: Workspace,
        key: Key,
        prepared: &Prepared,
        algorithm: &lt::cublasLtMatmulAlgo_t,
        operands: Operands,
        alpha: f32,
    ) -> Result<()> {
        if let Some(bias) = operands.bias {
            set(prepared.description, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
        }
        let beta = if key.adds { 1.0f32 } else { 0.0 };
        // SAFETY: live handles; the operands were checked against their arenas; scalars are read before the
        // call returns (host pointer mode). The stream types of the two bindings are the same C type.
        checked("cublasLtMatmul", unsafe {
            lt::cublasLtMatmul(
                self.handle,
                prepared.description,
                (&raw const alpha).cast(),
                operands.a as *const c_void,
                prepared.a,
                operands.b as *const c_void,
                prepared.b,
                (&raw const beta).cast(),
                operands.c as *const c_void,
                prepared.c,
                operands.d as *mut c_void,
                prepared.c,
                algorithm,
                workspace.address as *mut c_void,
                workspace.bytes.min(WORKSPACE_BYTES) as usize,
                stream.cast(),
            )
        })
    }

    /// Makes the handles and chooses an algorithm. None if the library has none.
    fn prepare(
        &self,
        stream: CUstream,
        workspace: Workspace,
        key: Key,
        operands: Operands,
    ) -> Result<Option<Prepared>> {
        let mut prepared = describe(key, self.tf32)?;
        if let Some(bias) = operands.bias {
            set(prepared.description, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
        }
        let candidates = self.candidates(&prepared, key, workspace.bytes.min(WORKSPACE_BYTES))?;
        let Some(first) = candidates.first() else {
            return Ok(None);
        };
        prepared.algorithm = *first;
        // A remembered algorithm counts only while the library still offers it for this very product.
        let remembered =
            self.algorithms.lock().get(key, self.tf32).filter(|data| candidates.iter().any(|c| c.data == *data));
        if let Some(data) = remembered {
            prepared.algorithm = lt::cublasLtMatmulAlgo_t { data };
        } else if self.tunes
            && candidates.len() > 1
            && let Some(fastest) = self.fastest(stream, workspace, key, &prepared, &candidates, operands)?
        {
            prepared.algorithm = fastest;
            self.algorithms.lock().put(key, self.tf32, fastest.data);
        }
        Ok(Some(prepared))
    }

    fn candidates(&self, prepared: &Prepared, key: Key, workspace_bytes: u64) -> Result<Vec<lt::cublasLtMatmulAlgo_t>> {
        use lt::cublasLtMatmulPreferenceAttributes_t as Preference;
        let mut preference = std::ptr::null_mut();
        // SAFETY: writes one handle.
        checked("cublasLtMatmulPreferenceCreate", unsafe { lt::cublasLtMatmulPreferenceCreate(&mut preference) })?;
        let prefer = |attribute, value: *const c_void, bytes: usize| {
            // SAFETY: a live handle, and a value of the attribute's size.
            checked("cublasLtMatmulPreferenceSetAttribute", unsafe {
                lt::cublasLtMatmulPreferenceSetAttribute(preference, attribute, value, bytes)
            })
        };
        let no_reduction = 0u32;
        let ask = || {
            prefer(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (&raw const workspace_bytes).cast(), 8)?;
            prefer(Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (&raw const no_reduction).cast(), 4)?;
            for attribute in [
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
            ] {
                prefer(attribute, (&raw const key.alignment).cast(), 4)?;
            }
            let mut results =
                [const { std::mem::MaybeUninit::<lt::cublasLtMatmulHeuristicResult_t>::zeroed() }; CANDIDATES];
            let mut count = 0;
            // SAFETY: live handles; writes at most CANDIDATES results and their count.
            let status = unsafe {
                lt::cublasLtMatmulAlgoGetHeuristic(
                    self.handle,
                    prepared.description,
                    prepared.a,
                    prepared.b,
                    prepared.c,
                    prepared.c,
                    preference,
                    CANDIDATES as i32,
                    results.as_mut_ptr().cast(),
                    &mut count,
                )
            };
            if status == cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED {
                return Ok(Vec::new());
            }
            checked("cublasLtMatmulAlgoGetHeuristic", status)?;
            Ok(results[..count.max(0) as usize]
                .iter()
                // SAFETY: zero is a valid value of every field, and the library has filled these.
                .map(|result| unsafe { result.assume_init_ref() })
                .filter(|r| {
                    r.state == cublasStatus_t::CUBLAS_STATUS_SUCCESS && r.workspaceSize as u64 <= workspace_bytes
                })
                .map(|r| r.algo)
                .collect())
        };
        let found = ask();
        // SAFETY: made above, destroyed once.
        unsafe { lt::cublasLtMatmulPreferenceDestroy(preference) };
        found
    }

    /// Times the candidates on the real operands and returns the fastest, or none if that is not possible
    /// without harm. What is in the result afterwards
    /// is what was there before, or something the following launch overwrites.
    fn fastest(
        &self,
        stream: CUstream,
        workspace: Workspace,
        key: Key,
        prepared: &Prepared,
        candidates: &[lt::cublasLtMatmulAlgo_t],
        operands: Operands,
    ) -> Result<Option<lt::cublasLtMatmulAlgo_t>> {
        const ROUNDS: u32 = 4;
        let in_place = key.adds && operands.c == operands.d;
        if in_place {
            // The same product without the addition differs by the write-back only: its choice will do.
            let twin = Key { adds: false, ..key };
            let known = self.algorithms.lock().get(twin, self.tf32);
            if let Some(algorithm) = known.and_then(|data| candidates.iter().find(|c| c.data == data)) {
                return Ok(Some(*algorithm));
            }
            if key.result == DType::F32 || key.bias {
                return Ok(None);
            }
        }
        // In place the target must keep its value: the smallest factor there is makes every product vanish
        // when it is rounded to 16 bits, while the arithmetic stays the same.
        let alpha = if in_place { f32::from_bits(1) } else { 1.0 };
        let mut best = (f32::INFINITY, None);
        for algorithm in candidates {
            // The first run loads the kernel; a candidate that is refused is no candidate.
            if self.launch(stream, workspace, key, prepared, algorithm, operands, alpha).is_err() {
                continue;
            }
            // SAFETY: live handles of the current context.
            unsafe {
                check("cuStreamSynchronize", sys::cuStreamSynchronize(stream))?;
                check("cuEventRecord", sys::cuEventRecord(self.clock[0], stream))?;
            }
            for _ in 0..ROUNDS {
                self.launch(stream, workspace, key, prepared, algorithm, operands, alpha)?;
            }
            let mut milliseconds = 0.0;
            // SAFETY: as above; writes one float.
            unsafe {
                check("cuEventRecord", sys::cuEventRecord(self.clock[1], stream))?;
                check("cuEventSynchronize", sys::cuEventSynchronize(self.clock[1]))?;
                check(
                    "cuEventElapsedTime",
                    sys::cuEventElapsedTime_v2(&mut milliseconds, self.clock[0], self.clock[1]),
                )?;
            }
            if milliseconds < best.0 {
                best = (milliseconds, Some(*algorithm));
            }
        }
        Ok(best.1)
    }
}

impl Drop for Gemm {
    fn drop(&mut self) {
        self.prepared.get_mut().clear();
        // SAFETY: handles made by `new`, destroyed once. Failures have no one to go to.
        unsafe {
            for event in self.clock {
                if !event.is_null() {
                    let _ = sys::cuEventDestroy_v2(event);
                }
            }
            let _ = lt::cublasLtDestroy(self.handle);
        }
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        // SAFETY: handles made by `describe`, destroyed once. Null ones were not made.
        unsafe {
            for layout in [self.a, self.b, self.c] {
                if !layout.is_null() {
                    let _ = lt::cublasLtMatrixLayoutDestroy(layout);
                }
            }
            if !self.description.is_null() {
                let _ = lt::cublasLtMatmulDescDestroy(self.description);
            }
        }
    }
}

#[track_caller]
fn expect(name: &str, operand: Ptr, elements: u64, dtype: DType) {
    assert!(operand.dtype == dtype, "{name} is {:?} where {dtype:?} is needed", operand.dtype);
    assert!(operand.elements >= elements, "{name} has {} elements where {elements} are needed", operand.elements);
}

fn key(product: Product, shape: Linear, operands: DType, result: DType, adds: bool, at: Operands) -> Key {
    let addresses = at.a | at.b | at.c | at.d | at.bias.unwrap_or(0) | 16;
    let alignment = 1 << addresses.trailing_zeros();
    Key { product, shape, operands, result, adds, bias: at.bias.is_some(), alignment }
}

fn data_type(dtype: DType) -> Result<cudaDataType_t> {
    match dtype {
        DType::F32 => Ok(cudaDataType_t::CUDA_R_32F),
        DType::F16 => Ok(cudaDataType_t::CUDA_R_16F),
        DType::Bf16 => Ok(cudaDataType_t::CUDA_R_16BF),
        other => Err(Error::Unsupported {
            what: format!("a matrix product in {other:?}"),
            backend: "cuda",
            instead: "use f32, f16 or bf16".into(),
        }),
    }
}

fn set<T>(description: lt::cublasLtMatmulDesc_t, attribute: Attribute, value: &T) -> Result<()> {
    // SAFETY: a live handle, and a value of the attribute's size (all callers pass the documented type).
    checked("cublasLtMatmulDescSetAttribute", unsafe {
        lt::cublasLtMatmulDescSetAttribute(description, attribute, (&raw const *value).cast(), size_of::<T>())
    })
}

/// (m, n, k) and for A and B whether they are read transposed, in cuBLAS's column-major terms.
fn layout(product: Product, shape: Linear) -> ([u64; 3], [bool; 2]) {
    let Linear { tokens, inputs, outputs } = shape;
    match product {
        Product::Forward => ([outputs, tokens, inputs], [true, false]),
        Product::BackwardInput => ([inputs, tokens, outputs], [false, false]),
        Product::BackwardWeight => ([inputs, outputs, tokens], [false, true]),
    }
}

/// Makes the handles of a product; the algorithm is still empty.
fn describe(key: Key, tf32: bool) -> Result<Prepared> {
    let ([m, n, k], transposed) = layout(key.product, key.shape);
    let (operand, result) = (data_type(key.operands)?, data_type(key.result)?);
    let compute = match tf32 && key.operands == DType::F32 {
        true => cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
        false => cublasComputeType_t::CUBLAS_COMPUTE_32F,
    };
    let mut made = Prepared {
        description: std::ptr::null_mut(),
        a: std::ptr::null_mut(),
        b: std::ptr::null_mut(),
        c: std::ptr::null_mut(),
        algorithm: lt::cublasLtMatmulAlgo_t { data: [0; 8] },
    };
    let (a_rows, a_columns) = if transposed[0] { (k, m) } else { (m, k) };
    let (b_rows, b_columns) = if transposed[1] { (n, k) } else { (k, n) };
    let create = |layout: &mut lt::cublasLtMatrixLayout_t, dtype, rows: u64, columns| {
        // SAFETY: writes one handle.
        checked("cublasLtMatrixLayoutCreate", unsafe {
            lt::cublasLtMatrixLayoutCreate(layout, dtype, rows, columns, rows as i64)
        })
    };
    // SAFETY: writes one handle.
    checked("cublasLtMatmulDescCreate", unsafe {
        lt::cublasLtMatmulDescCreate(&mut made.description, compute, cudaDataType_t::CUDA_R_32F)
    })?;
    create(&mut made.a, operand, a_rows, a_columns)?;
    create(&mut made.b, operand, b_rows, b_columns)?;
    create(&mut made.c, result, m, n)?;
    // CUBLAS_OP_N = 0, CUBLAS_OP_T = 1
    set(made.description, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &i32::from(transposed[0]))?;
    set(made.description, Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &i32::from(transposed[1]))?;
    if key.bias {
        let epilogue = lt::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
        set(made.description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
    }
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table at the top of this file, on numbers: column-major products of row-major memory.
    #[test]
    fn layouts_are_the_products_of_a_linear_layer() {
        let shape = Linear { tokens: 3, inputs: 4, outputs: 5 };
        let (t, i, o) = (3, 4, 5);
        let number = |row: usize, column: usize, seed: usize| ((row * 7 + column * 3 + seed) % 11) as f64;
        let matrix = |rows: usize, columns: usize, seed| -> Vec<f64> {
            (0..rows * columns).map(|at| number(at / columns, at % columns, seed)).collect()
        };
        let (x, w, dy) = (matrix(t, i, 1), matrix(o, i, 2), matrix(t, o, 3));
        let gemm = |product, a: &[f64], b: &[f64]| {
            let ([m, n, k], [ta, tb]) = layout(product, shape);
            let (m, n, k) = (m as usize, n as usize, k as usize);
            let (lda, ldb) = (if ta { k } else { m }, if tb { n } else { k });
            let mut d = vec![0.0; m * n];
            for column in 0..n {
                for row in 0..m {
                    for at in 0..k {
                        let left = if ta { a[row * lda + at] } else { a[at * lda + row] };
                        let right = if tb { b[at * ldb + column] } else { b[column * ldb + at] };
                        d[column * m + row] += left * right;
                    }
                }
            }
            d
        };
        let rows = |rows: usize, columns: usize, at: &dyn Fn(usize, usize) -> f64| -> Vec<f64> {
            (0..rows * columns).map(|e| at(e / columns, e % columns)).collect()
        };
        assert_eq!(
            gemm(Product::Forward, &w, &x),
            rows(t, o, &|r, c| (0..i).map(|k| x[r * i + k] * w[c * i + k]).sum())
        );
        assert_eq!(
            gemm(Product::BackwardInput, &w, &dy),
            rows(t, i, &|r, c| (0..o).map(|k| dy[r * o + k] * w[k * i + c]).sum())
        );
        assert_eq!(
            gemm(Product::BackwardWeight, &x, &dy),
            rows(o, i, &|r, c| (0..t).map(|k| dy[k * o + r] * x[k * i + c]).sum())
        );
    }
}
