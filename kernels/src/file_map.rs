//! A read-only file mapped into memory, behind a safe type: weights and token files.
//!
//! Only for inputs that nobody writes while they are read. A file that is shortened by someone else while
//! it is mapped ends the process with SIGBUS at the first touch beyond its new end; that is the price of
//! not copying, and the reason why the NVMe tier does not use maps.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// A whole file as bytes. Pages are read on first touch and shared between processes.
#[derive(Debug)]
pub struct FileMap {
    path: PathBuf,
    /// None for an empty file, which cannot be mapped.
    map: Option<memmap2::Mmap>,
}

impl FileMap {
    /// Maps `path` read-only.
    ///
    /// # Errors
    /// If the file cannot be opened, is not a regular file, or cannot be mapped.
    pub fn open(path: &Path) -> Result<FileMap> {
        let refused =
            |call, bytes, reason: String| Error::File { path: path.to_path_buf(), call, offset: 0, bytes, reason };
        let file = File::open(path).map_err(|e| refused("open", 0, e.to_string()))?;
        let metadata = file.metadata().map_err(|e| refused("stat", 0, e.to_string()))?;
        if !metadata.is_file() {
            return Err(refused("map", 0, "this is not a regular file".into()));
        }
        if metadata.len() == 0 {
            return Ok(FileMap { path: path.to_path_buf(), map: None });
        }
        // SAFETY: the map is private to this type and only handed out as shared bytes that borrow it.
        // Bytes of any value are valid; a concurrent writer could change them, which the module's header
        // rules out for the files this type is for.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(|e| refused("map", metadata.len(), e.to_string()))?;
        Ok(FileMap { path: path.to_path_buf(), map: Some(map) })
    }

    /// The file's bytes.
    pub fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_what_the_file_holds_and_names_what_it_cannot() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, b"castor").unwrap();
        assert_eq!(FileMap::open(&path).unwrap().bytes(), b"castor");
        std::fs::write(&path, b"").unwrap();
        assert!(FileMap::open(&path).unwrap().bytes().is_empty());
        let missing = FileMap::open(&folder.path().join("b")).unwrap_err();
        assert!(missing.to_string().contains("/b: open"), "{missing}");
        assert!(FileMap::open(folder.path()).is_err());
    }
}
