//! cuDNN's backend C API: the few functions that are needed, and descriptors that clean up after themselves.
//!
//! Bound here and not through generated bindings, because those return C enums as Rust enums: a newer
//! library's new value would be undefined behaviour. Here every answer is an `i32`.
//!
//! It knows descriptors and attributes, not attention.

use super::loader::cudnn_function;
use crate::{Error, Result};
use cudarc::driver::sys::CUstream;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;

type Raw = *mut c_void;

/// The functions. cuDNN's library is never closed.
pub(crate) struct Library {
    create: unsafe extern "C" fn(c_int, *mut Raw) -> c_int,
    destroy: unsafe extern "C" fn(Raw) -> c_int,
    set: unsafe extern "C" fn(Raw, c_int, c_int, i64, *const c_void) -> c_int,
    get: unsafe extern "C" fn(Raw, c_int, c_int, i64, *mut i64, *mut c_void) -> c_int,
    finalize: unsafe extern "C" fn(Raw) -> c_int,
    execute: unsafe extern "C" fn(Raw, Raw, Raw) -> c_int,
    open: unsafe extern "C" fn(*mut Raw) -> c_int,
    close: unsafe extern "C" fn(Raw) -> c_int,
    set_stream: unsafe extern "C" fn(Raw, CUstream) -> c_int,
    last_error: unsafe extern "C" fn(*mut c_char, usize),
    /// As cuDNN counts: 91900 is 9.19.0.
    pub(crate) version: usize,
}

/// Kinds of descriptors (`cudnnBackendDescriptorType_t`).
pub(crate) mod kind {
    pub(crate) const POINTWISE: i32 = 0;
    pub(crate) const ENGINE_CONFIG: i32 = 3;
    pub(crate) const ENGINE_HEURISTIC: i32 = 4;
    pub(crate) const EXECUTION_PLAN: i32 = 5;
    pub(crate) const OPERATION_POINTWISE: i32 = 13;
    pub(crate) const OPERATION_GRAPH: i32 = 15;
    pub(crate) const VARIANT_PACK: i32 = 16;
    pub(crate) const TENSOR: i32 = 17;
    pub(crate) const MATMUL: i32 = 18;
    pub(crate) const OPERATION_MATMUL: i32 = 19;
    pub(crate) const REDUCTION: i32 = 21;
    pub(crate) const OPERATION_REDUCTION: i32 = 22;
    pub(crate) const OPERATION_RESHAPE: i32 = 31;
    #[cfg(test)]
    pub(crate) const DEVICE_PROPERTIES: i32 = 38;
}

/// Types of attribute values (`cudnnBackendAttributeType_t`).
pub(crate) mod value {
    pub(crate) const HANDLE: i32 = 0;
    pub(crate) const DATA_TYPE: i32 = 1;
    pub(crate) const BOOLEAN: i32 = 2;
    pub(crate) const INT64: i32 = 3;
    pub(crate) const POINTER: i32 = 6;
    pub(crate) const HEURISTIC_MODE: i32 = 8;
    pub(crate) const POINTWISE_MODE: i32 = 14;
    pub(crate) const DESCRIPTOR: i32 = 15;
    pub(crate) const REDUCTION_OPERATOR: i32 = 18;
    pub(crate) const CHAR: i32 = 24;
}

/// A type that can be the value of an attribute: plain data without padding.
pub(crate) trait Plain: Copy {}
impl Plain for i32 {}
impl Plain for i64 {}
impl Plain for u8 {}
impl Plain for bool {}
impl Plain for Raw {}

impl Library {
    /// Finds the functions.
    pub(crate) fn open() -> Result<Arc<Self>> {
        // SAFETY: the C types of cudnn.h and cudnn_backend.h, version 9.
        unsafe {
            let version: unsafe extern "C" fn() -> usize = cudnn_function("cudnnGetVersion")?;
            Ok(Arc::new(Library {
                create: cudnn_function("cudnnBackendCreateDescriptor")?,
                destroy: cudnn_function("cudnnBackendDestroyDescriptor")?,
                set: cudnn_function("cudnnBackendSetAttribute")?,
                get: cudnn_function("cudnnBackendGetAttribute")?,
                finalize: cudnn_function("cudnnBackendFinalize")?,
                execute: cudnn_function("cudnnBackendExecute")?,
                open: cudnn_function("cudnnCreate")?,
                close: cudnn_function("cudnnDestroy")?,
                set_stream: cudnn_function("cudnnSetStream")?,
                last_error: cudnn_function("cudnnGetLastErrorString")?,
                version: version(),
            }))
        }
    }

    /// Turns an answer into a result with cuDNN's own words.
    fn check(&self, call: &str, status: c_int) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        let mut text = [0 as c_char; 2048];
        // SAFETY: writes at most the given length, ends with NUL (the last byte stays 0 whatever happens).
        let words = unsafe {
            (self.last_error)(text.as_mut_ptr(), text.len() - 1);
            CStr::from_ptr(text.as_ptr()).to_string_lossy().replace('\n', " ")
        };
        Err(Error::Device { call: call.to_owned(), reason: format!("cuDNN status {status}: {}", words.trim()) })
    }
}

/// A handle: cuDNN on the current context, with its stream.
pub(crate) struct Handle {
    library: Arc<Library>,
    raw: Raw,
}

// SAFETY: used by one thread at a time (the step's); cuDNN allows changing threads.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    /// Opens cuDNN on the current context, to work on `stream`.
    pub(crate) fn new(library: &Arc<Library>, stream: CUstream) -> Result<Self> {
        let mut handle = Handle { library: library.clone(), raw: std::ptr::null_mut() };
        // SAFETY: writes one handle.
        library.check("cudnnCreate", unsafe { (library.open)(&mut handle.raw) })?;
        // SAFETY: a live handle and stream of the current context.
        library.check("cudnnSetStream", unsafe { (library.set_stream)(handle.raw, stream) })?;
        Ok(handle)
    }

    /// Runs a plan on the handle's stream.
    ///
    /// # Safety
    /// Every pointer of the pack must be of memory that the plan's tensors describe.
    pub(crate) unsafe fn execute(&self, plan: &Descriptor, pack: &Descriptor) -> Result<()> {
        // SAFETY: live descriptors; memory is the caller's promise.
        self.library.check("cudnnBackendExecute", unsafe { (self.library.execute)(self.raw, plan.raw, pack.raw) })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: made in `new`, destroyed once.
            unsafe { (self.library.close)(self.raw) };
        }
    }
}

/// A backend descriptor.
pub(crate) struct Descriptor {
    library: Arc<Library>,
    pub(crate) raw: Raw,
}

// SAFETY: as for `Handle`.
unsafe impl Send for Descriptor {}
// SAFETY: as for `Handle`.
unsafe impl Sync for Descriptor {}

impl Descriptor {
    pub(crate) fn new(library: &Arc<Library>, kind: i32) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one descriptor.
        library.check("cudnnBackendCreateDescriptor", unsafe { (library.create)(kind, &mut raw) })?;
        Ok(Descriptor { library: library.clone(), raw })
    }

    /// Sets an attribute. Returns itself, to be chained.
    pub(crate) fn set<T: Plain>(self, attribute: i32, of: i32, values: &[T]) -> Result<Self> {
        // SAFETY: a live descriptor; as many values as said, which are copied.
        let status =
            unsafe { (self.library.set)(self.raw, attribute, of, values.len() as i64, values.as_ptr().cast()) };
        self.library.check("cudnnBackendSetAttribute", status)?;
        Ok(self)
    }

    /// Sets an attribute whose value is another descriptor, which must stay alive.
    pub(crate) fn link(self, attribute: i32, other: &Descriptor) -> Result<Self> {
        self.set(attribute, value::DESCRIPTOR, &[other.raw])
    }

    /// Sets an attribute whose value is a handle.
    pub(crate) fn handle(self, attribute: i32, handle: &Handle) -> Result<Self> {
        self.set(attribute, value::HANDLE, &[handle.raw])
    }

    pub(crate) fn finalize(self) -> Result<Self> {
        // SAFETY: a live descriptor.
        let status = unsafe { (self.library.finalize)(self.raw) };
        self.library.check("cudnnBackendFinalize", status)?;
        Ok(self)
    }

    /// Reads an attribute of one 64-bit number.
    pub(crate) fn number(&self, attribute: i32) -> Result<i64> {
        let (mut number, mut count) = (0i64, 0i64);
        // SAFETY: writes at most one number and the count.
        let status =
            unsafe { (self.library.get)(self.raw, attribute, value::INT64, 1, &mut count, (&raw mut number).cast()) };
        self.library.check("cudnnBackendGetAttribute", status)?;
        Ok(number)
    }

    /// Reads an attribute of text.
    pub(crate) fn text(&self, attribute: i32) -> Result<Vec<u8>> {
        let mut count = 0i64;
        // SAFETY: with no room asked for, only the count is written.
        let status =
            unsafe { (self.library.get)(self.raw, attribute, value::CHAR, 0, &mut count, std::ptr::null_mut()) };
        self.library.check("cudnnBackendGetAttribute", status)?;
        let mut text = vec![0u8; usize::try_from(count).unwrap_or(0)];
        // SAFETY: writes at most the room given.
        let status = unsafe {
            (self.library.get)(self.raw, attribute, value::CHAR, count, &mut count, text.as_mut_ptr().cast())
        };
        self.library.check("cudnnBackendGetAttribute", status)?;
        Ok(text)
    }

    /// Fills prepared descriptors from an attribute and returns how many were filled.
    pub(crate) fn fill(&self, attribute: i32, room: &[Descriptor]) -> Result<usize> {
        let mut raw: Vec<Raw> = room.iter().map(|d| d.raw).collect();
        let mut count = 0i64;
        // SAFETY: the library fills the descriptors whose pointers it is given, at most as many as said.
        let status = unsafe {
            let room = raw.len() as i64;
            (self.library.get)(self.raw, attribute, value::DESCRIPTOR, room, &mut count, raw.as_mut_ptr().cast())
        };
        self.library.check("cudnnBackendGetAttribute", status)?;
        Ok((count.max(0) as usize).min(room.len()))
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once.
        unsafe { (self.library.destroy)(self.raw) };
    }
}
