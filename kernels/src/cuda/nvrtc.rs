//! Compiles kernels with NVRTC for the exact device, and keeps the results on disk.
//!
//! A cache entry is named by a hash of everything that decides its content (source, options, architecture,
//! NVRTC's version) and carries its own length and hash, so that a torn or foreign file is recompiled, not
//! loaded. One lock per cache makes the ranks of a machine compile each program once. Without a writable
//! cache folder everything is compiled in memory.
//!
//! NVRTC must have been opened before (cudarc panics on a missing library); that is not checked here.

use super::programs::Program;
use crate::{Error, Result};
use cudarc::nvrtc::{result, sys};
use std::ffi::CString;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

/// First bytes of a cache file; the digit is the format's version.
const MAGIC: &[u8; 8] = b"CASTORK1";

/// What NVRTC made of a program.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// Machine code for one architecture.
    pub cubin: Vec<u8>,
    /// What the compiler said; with `--ptxas-options=-v` registers and spills of every kernel.
    pub log: String,
}

/// Compiles `program` for `architecture` (e.g. "sm_90a") with further `options`. Does not use the cache.
///
/// # Errors
/// If NVRTC refuses; the message holds its log.
pub fn compile(program: Program, architecture: &str, options: &[&str]) -> Result<Compiled> {
    let text = CString::new(program.text()).expect("sources have no NUL");
    let name = CString::new(program.file()).expect("names have no NUL");
    let handle =
        Handle(result::create_program(&text, Some(&name)).map_err(|e| refusal("nvrtcCreateProgram", e.0, ""))?);
    let mut all = program.options();
    all.push(format!("--gpu-architecture={architecture}"));
    all.extend(options.iter().map(|&option| option.to_owned()));
    // SAFETY: the program is alive: `handle` owns it.
    let done = unsafe { result::compile_program(handle.0, &all) };
    let log = handle.log();
    let call = || format!("nvrtcCompileProgram({}, {})", program.file(), all.join(" "));
    done.map_err(|e| refusal(&call(), e.0, &log))?;
    let mut bytes = 0;
    // SAFETY: the program is alive and compiled; one size is written.
    let code = unsafe { sys::nvrtcGetCUBINSize(handle.0, &mut bytes) };
    code.result().map_err(|e| refusal("nvrtcGetCUBINSize", e.0, ""))?;
    let mut cubin = vec![0u8; bytes];
    // SAFETY: `cubin` has the size that NVRTC asked for.
    let code = unsafe { sys::nvrtcGetCUBIN(handle.0, cubin.as_mut_ptr().cast()) };
    code.result().map_err(|e| refusal("nvrtcGetCUBIN", e.0, ""))?;
    Ok(Compiled { cubin, log })
}

/// NVRTC's (major, minor) version.
///
/// # Errors
/// If NVRTC refuses.
pub fn version() -> Result<(i32, i32)> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: two ints are written.
    unsafe { sys::nvrtcVersion(&mut major, &mut minor) }.result().map_err(|e| refusal("nvrtcVersion", e.0, ""))?;
    Ok((major, minor))
}

/// An NVRTC program that is destroyed with its owner.
struct Handle(sys::nvrtcProgram);

impl Handle {
    fn log(&self) -> String {
        let mut bytes = 0;
        // SAFETY: the program is alive; one size is written.
        if unsafe { sys::nvrtcGetProgramLogSize(self.0, &mut bytes) }.result().is_err() || bytes == 0 {
            return String::new();
        }
        let mut log = vec![0u8; bytes];
        // SAFETY: `log` has the size that NVRTC asked for.
        if unsafe { sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()) }.result().is_err() {
            return String::new();
        }
        log.pop();
        String::from_utf8_lossy(&log).into_owned()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the program is alive and nobody else has it. A failure to free host memory is not reported.
        let _ = unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

fn refusal(call: &str, code: sys::nvrtcResult, log: &str) -> Error {
    let reason = if log.is_empty() { format!("{code:?}") } else { format!("{code:?}: {}", log.trim()) };
    Error::Device { call: call.to_owned(), reason }
}

/// Compiled kernels on disk.
pub(crate) struct Cache {
    folder: Option<PathBuf>,
}

impl Cache {
    /// The user's cache: `$XDG_CACHE_HOME/castor/kernels`, else `~/.cache/castor/kernels`.
    pub(crate) fn of_user() -> Cache {
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let root = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
        Cache::at(root.map(|root| root.join("castor").join("kernels")))
    }

    fn at(folder: Option<PathBuf>) -> Cache {
        Cache { folder: folder.filter(|folder| std::fs::create_dir_all(folder).is_ok()) }
    }

    /// Machine code of `program` for `architecture`, from disk or compiled now.
    ///
    /// # Errors
    /// If it has to be compiled and NVRTC refuses. The disk's refusals only cost time.
    pub(crate) fn cubin(&self, program: Program, architecture: &str) -> Result<Vec<u8>> {
        let make = || compile(program, architecture, &[]).map(|compiled| compiled.cubin);
        let (major, minor) = version()?;
        let key = format!("{}\n{}\n{architecture}\n{major}.{minor}", program.text(), program.options().join(" "));
        let name = format!("{}-{:016x}.cubin", program.file().trim_end_matches(".cu"), xxh3_64(key.as_bytes()));
        self.get(&name, make)
    }

    /// The entry `name`, made if it is not there.
    fn get(&self, name: &str, make: impl FnOnce() -> Result<Vec<u8>>) -> Result<Vec<u8>> {
        let Some(folder) = &self.folder else {
            return make();
        };
        let path = folder.join(name);
        if let Some(content) = read(&path) {
            return Ok(content);
        }
        // Whoever holds the lock compiles; the others find the file when they get it.
        let lock = File::create(folder.join("lock"));
        let locked =
            lock.as_ref().is_ok_and(|lock| rustix::fs::flock(lock, rustix::fs::FlockOperation::LockExclusive).is_ok());
        if locked && let Some(content) = read(&path) {
            return Ok(content);
        }
        let content = make()?;
        // Not being able to keep it is no failure: the next run compiles again.
        let _ = write(folder, &path, &content);
        Ok(content)
    }
}

/// The content of a cache file, if it is whole.
fn read(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = std::fs::read(path).ok()?;
    let header = bytes.get(..24)?;
    let number = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"));
    let (length, hash) = (number(8), number(16));
    if &header[..8] != MAGIC || length != bytes.len() as u64 - 24 || hash != xxh3_64(&bytes[24..]) {
        return None;
    }
    bytes.drain(..24);
    Some(bytes)
}

/// Writes a cache file whole or not at all.
fn write(folder: &Path, path: &Path, content: &[u8]) -> std::io::Result<()> {
    let partial = folder.join(format!("partial-{}", std::process::id()));
    let mut file = File::create(&partial)?;
    file.write_all(MAGIC)?;
    file.write_all(&(content.len() as u64).to_le_bytes())?;
    file.write_all(&xxh3_64(content).to_le_bytes())?;
    file.write_all(content)?;
    file.sync_all()?;
    std::fs::rename(&partial, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_made_once_and_a_damaged_one_again() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(Some(folder.path().join("kernels")));
        let content = vec![7u8; 1000];
        assert_eq!(cache.get("a.cubin", || Ok(content.clone())).unwrap(), content);
        assert_eq!(cache.get("a.cubin", || panic!("made twice")).unwrap(), content);
        let path = folder.path().join("kernels/a.cubin");
        let whole = std::fs::read(&path).unwrap();
        for damaged in [whole[..whole.len() - 1].to_vec(), whole[..10].to_vec(), {
            let mut flipped = whole.clone();
            flipped[500] ^= 1;
            flipped
        }] {
            std::fs::write(&path, damaged).unwrap();
            assert_eq!(cache.get("a.cubin", || Ok(vec![1, 2])).unwrap(), [1, 2]);
            assert_eq!(cache.get("a.cubin", || panic!("not repaired")).unwrap(), [1, 2]);
            std::fs::write(&path, &whole).unwrap();
        }
    }

    #[test]
    fn a_failure_is_not_kept() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(Some(folder.path().to_owned()));
        let error = Error::Device { call: "compile".into(), reason: "no".into() };
        assert!(cache.get("b.cubin", || Err(error)).is_err());
        assert_eq!(cache.get("b.cubin", || Ok(vec![3])).unwrap(), [3]);
    }

    #[test]
    fn without_a_folder_everything_is_made_in_memory() {
        assert_eq!(Cache::at(None).get("c.cubin", || Ok(vec![4])).unwrap(), [4]);
    }
}
