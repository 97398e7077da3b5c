//! Finds and opens the CUDA libraries, before anything else of CUDA is touched.
//!
//! cudarc opens libraries by short name and *panics* where one is missing. So every library is opened here
//! first, by path, with its symbols global, and is kept for the life of the process: a later `dlopen` of the
//! same name gets this copy. What is missing is a typed error with one sentence.
//!
//! Order of the search: `CASTOR_CUDA_LIBS` (folders, joined by ':'), what the dynamic loader knows,
//! `CUDA_HOME`/`CUDA_PATH` and `/usr/local/cuda*`, then the Python packages of `VIRTUAL_ENV`,
//! `CONDA_PREFIX` and of the `python3` that `PATH` names.
//!
//! It owns no CUDA state beyond `cuInit`, and knows nothing of what the libraries are used for.

use crate::{Error, Result};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use std::collections::BTreeMap;
use std::ffi::{OsStr, c_int};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The environment variable that names folders to look in first.
pub const LIBRARIES_VARIABLE: &str = "CASTOR_CUDA_LIBS";

const DRIVER: &str = "libcuda.so.1";
const NVRTC: &str = "libnvrtc.so.13";
const NVRTC_BUILTINS: &str = "libnvrtc-builtins.so.13";
const CUBLASLT: &str = "libcublasLt.so.13";
const CUDNN: &str = "libcudnn.so.9";
const NCCL: &str = "libnccl.so.2";

/// The oldest driver that speaks the CUDA version of the bindings.
const OLDEST_DRIVER: i32 = 13_000;

/// What [`survey`] says about one library.
#[derive(Clone, Debug)]
pub struct Found {
    /// File name, e.g. "libcudnn.so.9".
    pub library: &'static str,
    /// What Castor uses it for, and what happens without it.
    pub purpose: &'static str,
    /// Where it is and its version, or one sentence that says why it cannot be used.
    pub state: std::result::Result<Usable, String>,
}

/// A library that can be used.
#[derive(Clone, Debug)]
pub struct Usable {
    /// Path, or the bare name where the dynamic loader found it.
    pub path: PathBuf,
    /// Version as its maker writes it.
    pub version: String,
}

/// An opened library. Never closed: others in the process rely on it.
struct Opened {
    library: Library,
    path: PathBuf,
}

/// Every library tried so far. An error is remembered too, so that its sentence stays the same.
fn opened(name: &'static str) -> Result<&'static Opened> {
    type Tried = Mutex<BTreeMap<&'static str, std::result::Result<&'static Opened, Error>>>;
    static TRIED: OnceLock<Tried> = OnceLock::new();
    let mut tried = TRIED.get_or_init(Tried::default).lock().unwrap_or_else(PoisonError::into_inner);
    tried.entry(name).or_insert_with(|| open(name).map(|opened| &*Box::leak(Box::new(opened)))).clone()
}

fn open(name: &'static str) -> Result<Opened> {
    let mut refusals = Vec::new();
    let mut attempt = |path: &Path| {
        if name == NVRTC {
            open_builtins_beside(path);
        }
        // SAFETY: the initialisers of NVIDIA's libraries have no preconditions; the library is never closed.
        match unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) } {
            Ok(library) => Some(Opened { library, path: path.to_owned() }),
            Err(error) => {
                refusals.push(cause(&error));
                None
            }
        }
    };
    let folders = folders();
    for folder in &folders.explicit {
        let path = folder.join(name);
        if path.exists()
            && let Some(opened) = attempt(&path)
        {
            return Ok(opened);
        }
    }
    if let Some(opened) = attempt(Path::new(name)) {
        return Ok(opened);
    }
    for folder in &folders.known {
        let path = folder.join(name);
        if path.exists()
            && let Some(opened) = attempt(&path)
        {
            return Ok(opened);
        }
    }
    let looked: Vec<_> = folders.explicit.iter().chain(&folders.known).map(|f| f.display().to_string()).collect();
    Err(Error::Library {
        library: name.to_owned(),
        reason: format!(
            "{}; looked through the dynamic loader's path{}{}; set {LIBRARIES_VARIABLE}=DIR[:DIR] if it is elsewhere",
            refusals.last().map_or("not found", String::as_str),
            if looked.is_empty() { "" } else { " and " },
            looked.join(", "),
        ),
    })
}

/// NVRTC opens its builtins by short name when it compiles: they must be there before.
fn open_builtins_beside(nvrtc: &Path) {
    let Some(folder) = nvrtc.parent().filter(|folder| folder.is_dir() && !folder.as_os_str().is_empty()) else {
        return;
    };
    let Ok(entries) = std::fs::read_dir(folder) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        // ".alt" is a twin for another compiler; only the plain one is asked for.
        if name.starts_with(NVRTC_BUILTINS) && !name.contains(".alt") {
            // SAFETY: as in `open`. A failure shows when NVRTC compiles, with NVRTC's own message.
            if let Ok(library) = unsafe { Library::open(Some(entry.path()), RTLD_NOW | RTLD_GLOBAL) } {
                std::mem::forget(library);
            }
        }
    }
}

fn cause(error: &libloading::Error) -> String {
    // The library's own Display is only "dlopen failed"; the reason is its source.
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

struct Folders {
    explicit: Vec<PathBuf>,
    known: Vec<PathBuf>,
}

fn folders() -> Folders {
    let explicit =
        std::env::var_os(LIBRARIES_VARIABLE).map(|v| std::env::split_paths(&v).collect()).unwrap_or_default();
    let mut known = Vec::new();
    for variable in ["CUDA_HOME", "CUDA_PATH"] {
        if let Some(root) = std::env::var_os(variable).filter(|root| !root.is_empty()) {
            known.push(Path::new(&root).join("lib64"));
        }
    }
    known.push(PathBuf::from("/usr/local/cuda/lib64"));
    known.push(PathBuf::from("/usr/local/cuda-13.0/lib64"));
    for variable in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        if let Some(root) = std::env::var_os(variable).filter(|root| !root.is_empty()) {
            python_packages(Path::new(&root), &mut known);
        }
    }
    if let Some(path) = std::env::var_os("PATH") {
        let python = std::env::split_paths(&path).map(|folder| folder.join("python3")).find(|python| python.exists());
        if let Some(python) = python {
            for root in roots_of(&python) {
                python_packages(&root, &mut known);
            }
        }
    }
    known.retain(|folder| folder.is_dir());
    let mut seen = std::collections::HashSet::new();
    // One folder can have several names (`lib64` is often a link to `lib`).
    known.retain(|folder| seen.insert(std::fs::canonicalize(folder).unwrap_or_else(|_| folder.clone())));
    Folders { explicit, known }
}

/// The roots (`…/bin/python3` → `…`) of an interpreter and of every link on the way to the real one: the
/// link in a virtual environment's `bin` is what makes it one.
fn roots_of(python: &Path) -> Vec<PathBuf> {
    let mut roots = Vec::new();
    let mut at = python.to_owned();
    // More links than any sane chain has; a loop ends here.
    for _ in 0..16 {
        let Some(folder) = at.parent().map(Path::to_owned) else {
            break;
        };
        if let Some(root) = folder.parent() {
            roots.push(root.to_owned());
        }
        match std::fs::read_link(&at) {
            Ok(target) => at = folder.join(target),
            Err(_) => break,
        }
    }
    if let Some(root) = std::fs::canonicalize(python).ok().and_then(|p| p.parent()?.parent().map(Path::to_owned)) {
        roots.push(root);
    }
    roots
}

/// Adds the `lib` folders of NVIDIA's Python packages under an interpreter's root.
fn python_packages(root: &Path, folders: &mut Vec<PathBuf>) {
    let list = |folder: &Path| -> Vec<PathBuf> {
        let mut entries: Vec<_> =
            std::fs::read_dir(folder).map(|d| d.flatten().map(|e| e.path()).collect()).unwrap_or_default();
        entries.sort();
        entries
    };
    for lib in ["lib", "lib64"] {
        for python in list(&root.join(lib)) {
            if !python.file_name().is_some_and(|n| n.to_string_lossy().starts_with("python3")) {
                continue;
            }
            for packages in ["site-packages", "dist-packages"] {
                for package in list(&python.join(packages).join(OsStr::new("nvidia"))) {
                    let lib = package.join("lib");
                    if lib.is_dir() {
                        folders.push(lib);
                    }
                }
            }
        }
    }
}

impl Opened {
    /// Address of a function of the library.
    ///
    /// # Safety
    /// `F` must be the function's C type.
    unsafe fn function<F: Copy>(&self, library: &'static str, name: &str) -> Result<F> {
        let symbol = format!("{name}\0");
        // SAFETY: the caller vouches for the type. The library is never closed.
        unsafe { self.library.get::<F>(symbol.as_bytes()) }.map(|symbol| *symbol).map_err(|error| Error::Library {
            library: library.to_owned(),
            reason: format!(
                "{} has no function {name} ({}); install the version the README names",
                self.path.display(),
                cause(&error)
            ),
        })
    }
}

/// A function of one of the libraries that Castor binds itself.
///
/// # Errors
/// If the library or the function is not there.
///
/// # Safety
/// `F` must be the function's C type.
unsafe fn function<F: Copy>(library: &'static str, name: &str) -> Result<F> {
    // SAFETY: passed on to the caller.
    unsafe { opened(library)?.function(library, name) }
}

/// A function of cuDNN.
///
/// # Safety
/// `F` must be the function's C type.
pub(crate) unsafe fn cudnn_function<F: Copy>(name: &str) -> Result<F> {
    // SAFETY: passed on to the caller.
    unsafe { function(CUDNN, name) }
}

/// A function of NCCL.
///
/// # Safety
/// `F` must be the function's C type.
pub(crate) unsafe fn nccl_function<F: Copy>(name: &str) -> Result<F> {
    // SAFETY: passed on to the caller.
    unsafe { function(NCCL, name) }
}

/// Opens and starts the driver. Returns its CUDA version, e.g. 13000.
fn driver() -> Result<i32> {
    let unusable = |reason: String| Error::Library { library: DRIVER.to_owned(), reason };
    // SAFETY: the C types of these functions of the driver API.
    let (start, version) = unsafe {
        (
            function::<unsafe extern "C" fn(u32) -> c_int>(DRIVER, "cuInit")?,
            function::<unsafe extern "C" fn(*mut c_int) -> c_int>(DRIVER, "cuDriverGetVersion")?,
        )
    };
    // SAFETY: cuInit may be called at any time, any number of times.
    let code = unsafe { start(0) };
    if code != 0 {
        return Err(unusable(match code {
            100 => "the driver is installed but sees no CUDA device (check nvidia-smi and CUDA_VISIBLE_DEVICES)".into(),
            34 => "a stub of the driver was loaded: take the toolkit's lib64/stubs out of LD_LIBRARY_PATH".into(),
            803 => "the driver's kernel module and its library are of different versions: restart the machine".into(),
            code => format!("cuInit answered {code}: check that nvidia-smi works"),
        }));
    }
    let mut number = 0;
    // SAFETY: writes one int.
    let code = unsafe { version(&mut number) };
    if code != 0 || number < OLDEST_DRIVER {
        return Err(unusable(format!(
            "the driver speaks CUDA {}.{}, 13.0 is needed: install driver 580 or newer",
            number / 1000,
            number % 1000 / 10
        )));
    }
    Ok(number)
}

/// Opens what every use of the device needs (driver, NVRTC, cuBLASLt) and starts the driver. After it
/// passed, cudarc can be used without fear of a panic.
///
/// # Errors
/// [`Error::Library`], with what is missing and what to do.
pub(crate) fn preflight() -> Result<()> {
    driver()?;
    opened(NVRTC)?;
    opened(CUBLASLT)?;
    Ok(())
}

/// Number of CUDA devices that this process may use.
///
/// # Errors
/// If there is no usable driver.
pub fn device_count() -> Result<usize> {
    driver()?;
    let mut count = 0;
    // SAFETY: the C type of cuDeviceGetCount, which writes one int.
    let code = unsafe {
        let get = function::<unsafe extern "C" fn(*mut c_int) -> c_int>(DRIVER, "cuDeviceGetCount")?;
        get(&mut count)
    };
    if code != 0 {
        return Err(Error::Device { call: "cuDeviceGetCount".into(), reason: format!("code {code}") });
    }
    Ok(usize::try_from(count).unwrap_or(0))
}

/// Looks at every library that Castor can use; for `castor doctor`. Opens them, starts nothing but the
/// driver, and never fails: what is wrong is in the answer.
pub fn survey() -> Vec<Found> {
    let entry = |library, purpose, version: Result<String>| Found {
        library,
        purpose,
        state: version.map_err(|error| error.to_string()).and_then(|version| match opened(library) {
            Ok(opened) => Ok(Usable { path: opened.path.clone(), version }),
            Err(error) => Err(error.to_string()),
        }),
    };
    vec![
        entry(
            DRIVER,
            "the GPU; without it only the CPU backend works",
            driver().map(|v| format!("CUDA {}.{}", v / 1000, v % 1000 / 10)),
        ),
        entry(NVRTC, "compiles Castor's kernels; required with a GPU", nvrtc_version()),
        entry(
            CUBLASLT,
            "matrix products; required with a GPU",
            size_version(CUBLASLT, "cublasLtGetVersion", 10_000, 100),
        ),
        entry(
            CUDNN,
            "the fastest attention; without it Castor's own kernel is used",
            size_version(CUDNN, "cudnnGetVersion", 10_000, 100),
        ),
        entry(NCCL, "several GPUs; not needed for one", nccl_version()),
    ]
}

fn nvrtc_version() -> Result<String> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the C type of nvrtcVersion, which writes two ints.
    unsafe {
        let get = function::<unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int>(NVRTC, "nvrtcVersion")?;
        get(&mut major, &mut minor);
    }
    Ok(format!("{major}.{minor}"))
}

fn size_version(library: &'static str, name: &str, major: usize, minor: usize) -> Result<String> {
    // SAFETY: the C type of cublasLtGetVersion and cudnnGetVersion.
    let number = unsafe { function::<unsafe extern "C" fn() -> usize>(library, name)?() };
    Ok(format!("{}.{}.{}", number / major, number % major / minor, number % minor))
}

fn nccl_version() -> Result<String> {
    let mut number = 0;
    // SAFETY: the C type of ncclGetVersion, which writes one int.
    unsafe {
        let get = function::<unsafe extern "C" fn(*mut c_int) -> c_int>(NCCL, "ncclGetVersion")?;
        get(&mut number);
    }
    Ok(format!("{}.{}.{}", number / 10_000, number % 10_000 / 100, number % 100))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn survey_says_one_sentence_for_what_is_missing() {
        for found in survey() {
            match found.state {
                Ok(usable) => println!("{}: {} {}", found.library, usable.version, usable.path.display()),
                Err(sentence) => {
                    println!("{sentence}");
                    assert!(sentence.starts_with(found.library), "{sentence}");
                    assert!(!sentence.contains('\n'), "{sentence}");
                }
            }
        }
    }

    #[test]
    fn a_linked_interpreter_leads_to_its_environment() {
        let root = tempfile::tempdir().unwrap();
        let environment = root.path().join("environment");
        let packages = environment.join("lib/python3.12/site-packages/nvidia/cudnn/lib");
        std::fs::create_dir_all(&packages).unwrap();
        std::fs::create_dir_all(environment.join("bin")).unwrap();
        std::fs::create_dir_all(root.path().join("local/bin")).unwrap();
        std::fs::create_dir_all(root.path().join("system/bin")).unwrap();
        std::fs::write(root.path().join("system/bin/python3.12"), "").unwrap();
        let link = std::os::unix::fs::symlink::<&Path, PathBuf>;
        link(Path::new("../../system/bin/python3.12"), environment.join("bin/python3")).unwrap();
        link(&environment.join("bin/python3"), root.path().join("local/bin/python3")).unwrap();
        let mut folders = Vec::new();
        for found in roots_of(&root.path().join("local/bin/python3")) {
            python_packages(&found, &mut folders);
        }
        assert_eq!(folders, [packages]);
    }
}
