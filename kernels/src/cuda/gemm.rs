//! Matrix products through cuBLASLt: one prepared product per (shape, types, layout, …), made on first use and
//! kept, so that a call after the first is a table look-up and a launch.
//!
//! Sums over k are never split into parts that meet in arrival order (reduction scheme "none"), so a product
//! gives the same bits every time. Which algorithm is fastest is measured once (`gemm_choice`) and remembered.
//! What a product is to cuBLASLt is in `gemm_layout`.

use super::Ptr;
use super::algorithms::Algorithms;
use super::driver::check;
use super::gemm_layout::{Cut, Handles, Key, Operands, Product, checked, key, set};
use crate::ops::{Into, Linear};
use crate::{DType, Error, Result};
use cudarc::cublaslt::sys::{self as lt, cublasLtMatmulDescAttributes_t as Attribute};
use cudarc::driver::sys::{self, CUevent, CUstream};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;

/// Bytes of workspace that cuBLASLt may use. 32 MiB is its own recommendation for Hopper.
pub(crate) const WORKSPACE_BYTES: u64 = 32 << 20;

/// A product ready to launch.
pub(super) struct Prepared {
    pub(super) handles: Handles,
    pub(super) cut: Cut,
    pub(super) algorithm: lt::cublasLtMatmulAlgo_t,
}

/// Scratch on the device that a product may use.
#[derive(Clone, Copy)]
pub(crate) struct Workspace {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
}

/// cuBLASLt for one device.
pub(crate) struct Gemm {
    pub(super) handle: lt::cublasLtHandle_t,
    pub(super) tf32: bool,
    /// Whether first uses are timed. Off: what the cache says, else the heuristic's first.
    pub(super) tunes: bool,
    /// None: the library has no algorithm.
    prepared: Mutex<HashMap<Key, Option<Prepared>>>,
    pub(super) algorithms: Mutex<Algorithms>,
    pub(super) clock: [CUevent; 2],
}

// SAFETY: handles of thread-safe libraries; tables are behind locks.
unsafe impl Send for Gemm {}
// SAFETY: as above.
unsafe impl Sync for Gemm {}

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
        self.launch(stream, workspace, key, prepared, operands, 1.0)?;
        Ok(true)
    }

    pub(super) fn launch(
        &self,
        stream: CUstream,
        workspace: Workspace,
        key: Key,
        prepared: &Prepared,
        operands: Operands,
        alpha: f32,
    ) -> Result<()> {
        let Prepared { handles, cut, algorithm } = prepared;
        let beta = if key.adds { 1.0f32 } else { 0.0 };
        for index in 0..cut.parts {
            let part = operands.part(key, *cut, index);
            if let Some(bias) = part.bias {
                set(handles.description, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
            }
            // SAFETY: live handles; the operands were checked against their arenas, and the parts of a cut
            // lie inside them; scalars are read before the call returns (host pointer mode). The stream types
            // of the two bindings are the same C type.
            checked("cublasLtMatmul", unsafe {
                lt::cublasLtMatmul(
                    self.handle,
                    handles.description,
                    (&raw const alpha).cast(),
                    part.a as *const c_void,
                    handles.a,
                    part.b as *const c_void,
                    handles.b,
                    (&raw const beta).cast(),
                    part.c as *const c_void,
                    handles.c,
                    part.d as *mut c_void,
                    handles.c,
                    algorithm,
                    workspace.address as *mut c_void,
                    workspace.bytes.min(WORKSPACE_BYTES) as usize,
                    stream.cast(),
                )
            })?;
        }
        Ok(())
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

#[track_caller]
fn expect(name: &str, operand: Ptr, elements: u64, dtype: DType) {
    assert!(operand.dtype == dtype, "{name} is {:?} where {dtype:?} is needed", operand.dtype);
    assert!(operand.elements >= elements, "{name} has {} elements where {elements} are needed", operand.elements);
}
