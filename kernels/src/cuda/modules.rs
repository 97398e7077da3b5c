//! Loaded programs: compiles and loads each at its first use, finds kernels, launches them.
//!
//! It owns the driver's modules. It does not know what a kernel computes.

use super::nvrtc::Cache;
use super::programs::Program;
use crate::{Error, Result};
use cudarc::driver::sys::{self, CUdevice_attribute, CUfunction, CUfunction_attribute, CUmodule, CUresult, CUstream};
use cudarc::driver::{CudaContext, DriverError};
use parking_lot::Mutex;
use std::ffi::{CString, c_void};
use std::sync::Arc;

/// A value that is passed to a kernel as it lies in memory.
///
/// # Safety
/// The type must have the layout of the kernel's parameter.
pub(crate) unsafe trait Argument: Copy {}
// SAFETY: u64, u32 and float of the sources.
unsafe impl Argument for u64 {}
// SAFETY: as above.
unsafe impl Argument for u32 {}
// SAFETY: as above.
unsafe impl Argument for f32 {}

/// The address of an argument, for the driver.
pub(crate) fn pointer<A: Argument>(argument: &A) -> *mut c_void {
    std::ptr::from_ref(argument).cast_mut().cast()
}

/// The pointers to the given arguments, alive until the end of the statement.
macro_rules! arguments {
    ($($argument:expr),* $(,)?) => { &mut [$($crate::cuda::modules::pointer(&$argument)),*] };
}
pub(crate) use arguments;

/// Blocks in x, y, z; threads of a block; bytes of dynamic shared memory.
#[derive(Clone, Copy)]
pub(crate) struct Extent {
    pub grid: (u64, u64, u64),
    pub threads: u32,
    pub shared: u32,
}

impl Extent {
    /// `blocks` blocks in a row.
    pub(crate) const fn row(blocks: u64, threads: u32) -> Extent {
        Extent { grid: (blocks, 1, 1), threads, shared: 0 }
    }

    /// Blocks in a rectangle.
    pub(crate) const fn area(x: u64, y: u64, threads: u32) -> Extent {
        Extent { grid: (x, y, 1), threads, shared: 0 }
    }
}

struct Loaded {
    program: Program,
    module: CUmodule,
    kernels: Vec<(&'static str, CUfunction)>,
}
// SAFETY: modules and functions are handles of the context, which any thread may use.
unsafe impl Send for Loaded {}

/// The programs of one context.
pub(crate) struct Modules {
    context: Arc<CudaContext>,
    cache: Cache,
    architecture: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Multiprocessors.
    pub processors: u64,
    /// Most shared memory that a block can have, in bytes.
    pub shared_limit: u32,
    loaded: Mutex<Vec<Loaded>>,
}

impl Modules {
    pub(crate) fn new(context: &Arc<CudaContext>) -> Result<Modules> {
        let attribute = |name| context.attribute(name).map_err(|error| refusal("cuDeviceGetAttribute", error.0));
        let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let processors = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let shared = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        if major < 8 {
            return Err(Error::Unsupported {
                what: format!("compute capability {major}.{minor}"),
                backend: "cuda",
                instead: "a GPU of capability 8.0 (A100) or later, or the CPU backend".into(),
            });
        }
        Ok(Modules {
            context: context.clone(),
            cache: Cache::of_user(),
            architecture: format!("sm_{major}{minor}{}", if (major, minor) == (9, 0) { "a" } else { "" }),
            capability: (major, minor),
            processors: u64::try_from(processors).unwrap_or(1),
            shared_limit: u32::try_from(shared).unwrap_or(0),
            loaded: Mutex::new(Vec::new()),
        })
    }

    /// Launches `kernel` of `program`. Nothing happens where the extent is empty.
    ///
    /// # Safety
    /// `arguments` must point to the kernel's parameters in order, and what they describe must be device
    /// memory that the kernel may use in `stream`'s order.
    pub(crate) unsafe fn launch(
        &self,
        stream: CUstream,
        program: Program,
        kernel: &'static str,
        extent: Extent,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let (x, y, z) = extent.grid;
        if x == 0 || y == 0 || z == 0 {
            return Ok(());
        }
        if x > i32::MAX as u64 || y > 65_535 || z > 65_535 {
            return Err(Error::Unsupported {
                what: format!("{kernel} over a grid of {x} × {y} × {z} blocks"),
                backend: "cuda",
                instead: "smaller micro-batches".into(),
            });
        }
        let function = self.kernel(program, kernel)?;
        // SAFETY: the function belongs to a loaded module; the caller vouches for the arguments.
        let code = unsafe {
            sys::cuLaunchKernel(
                function,
                x as u32,
                y as u32,
                z as u32,
                extent.threads,
                1,
                1,
                extent.shared,
                stream,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        if code != CUresult::CUDA_SUCCESS {
            return Err(refusal(&format!("cuLaunchKernel({kernel})"), code));
        }
        Ok(())
    }

    /// A kernel's handle; compiles and loads its program at the first use.
    fn kernel(&self, program: Program, kernel: &'static str) -> Result<CUfunction> {
        let mut loaded = self.loaded.lock();
        let index = match loaded.iter().position(|one| one.program == program) {
            Some(index) => index,
            None => {
                loaded.push(self.load(program)?);
                loaded.len() - 1
            }
        };
        let one = &mut loaded[index];
        if let Some(&(_, function)) = one.kernels.iter().find(|(name, _)| *name == kernel) {
            return Ok(function);
        }
        let name = CString::new(kernel).expect("kernel names have no NUL");
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded; one handle is written.
        check("cuModuleGetFunction", unsafe { sys::cuModuleGetFunction(&mut function, one.module, name.as_ptr()) })?;
        if program.large_kernels().contains(&kernel) {
            let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function belongs to the module; the device gives a block this much.
            check("cuFuncSetAttribute", unsafe {
                sys::cuFuncSetAttribute(function, attribute, self.shared_limit as i32)
            })?;
        }
        one.kernels.push((kernel, function));
        Ok(function)
    }

    fn load(&self, program: Program) -> Result<Loaded> {
        self.context.bind_to_thread().map_err(|error| refusal("cuCtxSetCurrent", error.0))?;
        let cubin = self.cache.cubin(program, &self.architecture)?;
        let mut module = std::ptr::null_mut();
        // SAFETY: the image is a whole cubin (NVRTC made it; the cache checked its hash).
        check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&mut module, cubin.as_ptr().cast()) })?;
        Ok(Loaded { program, module, kernels: Vec::new() })
    }
}

impl Drop for Modules {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_err() {
            return;
        }
        for one in self.loaded.get_mut() {
            // SAFETY: nobody launches any more: `self` is going. A failure cannot be acted on.
            let _ = unsafe { sys::cuModuleUnload(one.module) };
        }
    }
}

/// A driver's refusal in words.
pub(crate) fn refusal(call: &str, code: CUresult) -> Error {
    let error = DriverError(code);
    let name = error.error_name().map_or_else(|_| format!("{code:?}"), |name| name.to_string_lossy().into_owned());
    let text = error.error_string().map_or_else(|_| String::new(), |text| format!(", {}", text.to_string_lossy()));
    Error::Device { call: call.to_owned(), reason: format!("{name}{text}") }
}

/// A driver's answer as a result that names the call.
pub(crate) fn check(call: &str, code: CUresult) -> Result<()> {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(refusal(call, code)) }
}
