//! Remembers on disk which algorithm was fastest for which product.
//!
//! One small JSON file per (device, cuBLASLt version) under the user's cache folder. It is only ever an
//! optimisation: a file that cannot be read or written changes nothing but time. An algorithm is opaque data
//! of the library, so a file of another version is never read.

use super::gemm::Key;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The remembered algorithms of one device and library version.
pub(crate) struct Algorithms {
    file: Option<PathBuf>,
    known: BTreeMap<String, [u64; 8]>,
}

/// The folder for what Castor can make again: `$XDG_CACHE_HOME/castor`, or `~/.cache/castor`.
pub(crate) fn cache_folder() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache"))).map(|folder| folder.join("castor"))
}

/// Writes a cache file in one piece: others see the old one or the new one. Failures are not reported.
pub(crate) fn write_cache(path: &std::path::Path, bytes: &[u8]) {
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    let written = path
        .parent()
        .map_or(Ok(()), std::fs::create_dir_all)
        .and_then(|()| std::fs::write(&temporary, bytes))
        .and_then(|()| std::fs::rename(&temporary, path));
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
}

/// A device's name as part of a file's name.
pub(crate) fn file_part(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect()
}

impl Algorithms {
    /// What is remembered, or nothing.
    pub(crate) fn load(device_name: &str, version: u64) -> Self {
        let file = cache_folder().map(|f| f.join(format!("gemm-{}-{version}.json", file_part(device_name))));
        Self::open(file)
    }

    fn open(file: Option<PathBuf>) -> Self {
        let known = file
            .as_ref()
            .and_then(|file| std::fs::read(file).ok())
            .and_then(|text| serde_json::from_slice(&text).ok())
            .unwrap_or_default();
        Algorithms { file, known }
    }

    /// The remembered algorithm of a product.
    pub(crate) fn get(&self, key: Key, tf32: bool) -> Option<[u64; 8]> {
        self.known.get(&name(key, tf32)).copied()
    }

    /// Remembers one, here and on disk. Another process may have added others meanwhile: they stay.
    pub(crate) fn put(&mut self, key: Key, tf32: bool, algorithm: [u64; 8]) {
        self.known.insert(name(key, tf32), algorithm);
        if let Some(file) = &self.file {
            let mut all = Self::open(Some(file.clone())).known;
            all.extend(self.known.iter().map(|(k, v)| (k.clone(), *v)));
            if let Ok(text) = serde_json::to_vec_pretty(&all) {
                write_cache(file, &text);
            }
        }
    }
}

fn name(key: Key, tf32: bool) -> String {
    let Key { product, shape, operands, result, adds, bias, alignment } = key;
    format!(
        "{product:?} tokens={} inputs={} outputs={} {operands:?}->{result:?}{}{}{} align={alignment}",
        shape.tokens,
        shape.inputs,
        shape.outputs,
        if adds { " add" } else { "" },
        if bias { " bias" } else { "" },
        if tf32 { " tf32" } else { "" },
    )
}

#[cfg(test)]
mod tests {
    use super::super::gemm::Product;
    use super::*;
    use crate::DType;
    use crate::ops::Linear;

    #[test]
    fn what_two_processes_found_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let file = Some(folder.path().join("new/gemm.json"));
        let key = |tokens| Key {
            product: Product::Forward,
            shape: Linear { tokens, inputs: 8, outputs: 16 },
            operands: DType::Bf16,
            result: DType::F32,
            adds: true,
            bias: false,
            alignment: 16,
        };
        let mut one = Algorithms::open(file.clone());
        let mut two = Algorithms::open(file.clone());
        one.put(key(1), false, [u64::MAX; 8]);
        two.put(key(2), false, [2; 8]);
        let all = Algorithms::open(file.clone());
        assert_eq!((all.get(key(1), false), all.get(key(2), false)), (Some([u64::MAX; 8]), Some([2; 8])));
        assert_eq!(all.get(key(1), true), None);
        std::fs::write(file.as_ref().unwrap(), b"{ not json").unwrap();
        assert_eq!(Algorithms::open(file).get(key(1), false), None);
    }
}
