//! The one error of this crate: the world (device, disk, driver, peer) refused something.
//!
//! Bugs panic; shortage of planned memory is the runtime's business. What is left is said in one
//! sentence that names the call or the path, what happened and what to try.

use std::path::PathBuf;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What the world refused.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// A tier cannot give the bytes that were asked of it.
    #[error("{tier} memory: {asked} bytes were asked for and {available} are available; {hint}")]
    Exhausted {
        /// "device", "host" or "nvme".
        tier: &'static str,
        /// Bytes asked for.
        asked: u64,
        /// Bytes that can be had.
        available: u64,
        /// What to try.
        hint: String,
    },
    /// A file operation failed.
    #[error("{path}: {call} of {bytes} bytes at offset {offset} failed: {reason}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The call, e.g. "write".
        call: &'static str,
        /// Byte offset in the file.
        offset: u64,
        /// Bytes of the request.
        bytes: u64,
        /// What the system said, and what to try where that is known.
        reason: String,
    },
    /// A library is not there or not usable.
    #[error("{library} is not available: {reason}")]
    Library {
        /// Name of the library, e.g. "libcudnn.so.9".
        library: String,
        /// What was looked for, where, and what still works without it.
        reason: String,
    },
    /// A device call failed.
    #[error("{call} failed: {reason}")]
    Device {
        /// The call.
        call: String,
        /// What the driver or library said.
        reason: String,
    },
    /// A peer rank is gone or does not answer.
    #[error("rank {rank}: {reason}")]
    Peer {
        /// The rank that is the culprit, as seen from here.
        rank: u32,
        /// What happened.
        reason: String,
    },
    /// Something this backend does not do.
    #[error("{what} is not supported by the {backend} backend: {instead}")]
    Unsupported {
        /// What was asked for.
        what: String,
        /// The backend's name.
        backend: &'static str,
        /// What to use instead.
        instead: String,
    },
}
