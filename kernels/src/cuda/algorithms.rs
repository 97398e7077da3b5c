//! Remembers on disk which cut and algorithm were fastest for which product.
//!
//! One small JSON file per (device, cuBLASLt version) under the user's cache folder. It is only ever an
//! optimisation: a file that cannot be read or written changes nothing but time. An algorithm is opaque data
//! of the library, so a file of another version is never read.

use super::gemm_layout::{Cut, Key};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// How a product is launched: in which parts, and by which algorithm (opaque data of the library).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Choice {
    pub(crate) cut: Cut,
    pub(crate) algorithm: [u64; 8],
}

/// The version of the files' format, in their names.
const FORMAT: u32 = 2;

/// The remembered choices of one device and library version.
pub(crate) struct Algorithms {
    file: Option<PathBuf>,
    known: BTreeMap<String, Choice>,
}

/// The folder for what Castor can make again: `$XDG_CACHE_HOME/castor`, or `~/.cache/castor`.
pub(crate) fn cache_folder() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache"))).map(|folder| folder.join("castor"))
}

/// Whether what is written to the cache folder can be found again.
pub(crate) fn remembers() -> bool {
    cache_folder().is_some_and(|folder| {
        let probe = folder.join(format!("{}.probe", std::process::id()));
        let written = std::fs::create_dir_all(&folder).and_then(|()| std::fs::write(&probe, b""));
        written.and_then(|()| std::fs::remove_file(&probe)).is_ok()
    })
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
        let file = cache_folder().map(|f| f.join(format!("gemm{FORMAT}-{}-{version}.json", file_part(device_name))));
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

    /// The remembered choice for a product.
    pub(crate) fn get(&self, key: Key, tf32: bool) -> Option<Choice> {
        self.known.get(&name(key, tf32)).copied()
    }

    /// Remembers one, here and on disk. Another process may have added others meanwhile: they stay.
    pub(crate) fn put(&mut self, key: Key, tf32: bool, choice: Choice) {
        self.known.insert(name(key, tf32), choice);
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
    use super::super::gemm_layout::{Product, Side};
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
        let first = Choice { cut: Cut::WHOLE, algorithm: [u64::MAX; 8] };
        let second = Choice { cut: Cut { side: Side::M, parts: 4 }, algorithm: [2; 8] };
        one.put(key(1), false, first);
        two.put(key(2), false, second);
        let all = Algorithms::open(file.clone());
        assert_eq!((all.get(key(1), false), all.get(key(2), false)), (Some(first), Some(second)));
        assert_eq!(all.get(key(1), true), None);
        std::fs::write(file.as_ref().unwrap(), b"{ not json").unwrap();
        assert_eq!(Algorithms::open(file).get(key(1), false), None);
    }
}
