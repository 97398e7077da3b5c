//! Writes a Hugging Face folder, streaming: never more than a piece of one tensor in memory.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use castor_kernels::numeric;
use serde_json::{Map, Value, json};

use super::{INDEX_FILE, SINGLE_FILE, hf_tensors};
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::source::TensorSource;

/// Elements read and written at a time.
const PIECE: usize = 1 << 18;

/// How exported weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportDType {
    /// 4 bytes.
    F32,
    /// 2 bytes; rounded as the trainer rounds its masters, so a bf16 run exports the weights it used.
    Bf16,
    /// 2 bytes.
    F16,
}

impl ExportDType {
    const fn bytes(self) -> u64 {
        match self {
            ExportDType::F32 => 4,
            ExportDType::Bf16 | ExportDType::F16 => 2,
        }
    }

    /// Name in a safetensors header and in `config.json`.
    const fn names(self) -> (&'static str, &'static str) {
        match self {
            ExportDType::F32 => ("F32", "float32"),
            ExportDType::Bf16 => ("BF16", "bfloat16"),
            ExportDType::F16 => ("F16", "float16"),
        }
    }

    fn append(self, values: &[f32], bytes: &mut Vec<u8>) {
        bytes.clear();
        match self {
            ExportDType::F32 => values.iter().for_each(|x| bytes.extend(x.to_le_bytes())),
            ExportDType::Bf16 => {
                values.iter().for_each(|x| bytes.extend(numeric::round_bf16(*x).to_le_bytes()));
            }
            ExportDType::F16 => {
                values.iter().for_each(|x| bytes.extend(half::f16::from_f32(*x).to_le_bytes()));
            }
        }
    }
}

/// Writes `source`'s weights as a folder that transformers reads: `config.json` and one `model.safetensors`, or
/// shards of at most `shard_bytes_max` bytes of tensors (a larger tensor has its own) and their index.
///
/// Everything is written beside `folder` under a temporary name, synced, and renamed at the end: a reader sees
/// the whole or nothing.
///
/// # Errors
/// [`Error::Usage`] if `folder` exists and is not empty, [`Error::Failed`] if writing fails (the temporary folder
/// is removed).
pub fn export(
    folder: &Path,
    config: &ModelConfig,
    dtype: ExportDType,
    shard_bytes_max: u64,
    source: &dyn TensorSource,
) -> Result<()> {
    if folder.exists() && fs::read_dir(folder).map_or(true, |mut entries| entries.next().is_some()) {
        return Err(Error::Usage(format!("{}: exists and is not an empty folder; choose another", folder.display())));
    }
    let mut temporary = folder.as_os_str().to_owned();
    temporary.push(format!(".tmp-{}", std::process::id()));
    let temporary = PathBuf::from(temporary);
    let written = write_folder(&temporary, config, dtype, shard_bytes_max, source).and_then(|()| {
        io(folder, "rename", fs::rename(&temporary, folder))?;
        sync_folder(folder.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new(".")))
    });
    if written.is_err() {
        // The first error is the one to report; what cannot be removed stays under its telling name.
        let _ = fs::remove_dir_all(&temporary);
    }
    written
}

struct Tensor {
    name: String,
    shape: Vec<u64>,
    bytes: u64,
}

fn write_folder(
    folder: &Path,
    config: &ModelConfig,
    dtype: ExportDType,
    shard_bytes_max: u64,
    source: &dyn TensorSource,
) -> Result<()> {
    io(folder, "create", fs::create_dir_all(folder))?;
    let mut shards: Vec<Vec<Tensor>> = Vec::new();
    let (mut in_shard, mut total) = (0, 0);
    for (name, shape) in hf_tensors(config) {
        let bytes = shape.iter().product::<u64>() * dtype.bytes();
        match shards.last_mut() {
            Some(shard) if in_shard + bytes <= shard_bytes_max => shard.push(Tensor { name, shape, bytes }),
            _ => {
                shards.push(vec![Tensor { name, shape, bytes }]);
                in_shard = 0;
            }
        }
        in_shard += bytes;
        total += bytes;
    }
    let mut weight_map = Map::new();
    let count = shards.len();
    for (index, shard) in shards.iter().enumerate() {
        let name = match count {
            1 => SINGLE_FILE.to_string(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
        };
        write_shard(&folder.join(&name), shard, dtype, source)?;
        for tensor in shard {
            weight_map.insert(tensor.name.clone(), Value::String(name.clone()));
        }
    }
    if count > 1 {
        let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
        write_json(&folder.join(INDEX_FILE), &index)?;
    }
    write_json(&folder.join("config.json"), &config.to_json(dtype.names().1))?;
    sync_folder(folder)
}

fn write_shard(path: &Path, tensors: &[Tensor], dtype: ExportDType, source: &dyn TensorSource) -> Result<()> {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut offset = 0;
    for tensor in tensors {
        header.insert(
            tensor.name.clone(),
            json!({
                "dtype": dtype.names().0,
                "shape": tensor.shape,
                "data_offsets": [offset, offset + tensor.bytes],
            }),
        );
        offset += tensor.bytes;
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    // Tensors begin at a multiple of 8 bytes, as every reader's alignment needs.
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = BufWriter::new(io(path, "create", File::create(path))?);
    io(path, "write", file.write_all(&(header.len() as u64).to_le_bytes()))?;
    io(path, "write", file.write_all(&header))?;
    let (mut values, mut bytes) = (vec![0f32; PIECE], Vec::with_capacity(PIECE * 4));
    for tensor in tensors {
        let elements = tensor.bytes / dtype.bytes();
        let mut first = 0;
        while first < elements {
            let piece = &mut values[..(elements - first).min(PIECE as u64) as usize];
            source.read(&tensor.name, first, piece)?;
            dtype.append(piece, &mut bytes);
            io(path, "write", file.write_all(&bytes))?;
            first += piece.len() as u64;
        }
    }
    let file = file.into_inner().map_err(|e| failed(path, "write", e.error()))?;
    io(path, "sync", file.sync_all())
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    let mut file = io(path, "create", File::create(path))?;
    io(path, "write", file.write_all(format!("{value:#}\n").as_bytes()))?;
    io(path, "sync", file.sync_all())
}

fn sync_folder(folder: &Path) -> Result<()> {
    io(folder, "sync", File::open(folder).and_then(|f| f.sync_all()))
}

fn io<T>(path: &Path, call: &str, result: std::io::Result<T>) -> Result<T> {
    result.map_err(|e| failed(path, call, &e))
}

fn failed(path: &Path, call: &str, error: &std::io::Error) -> Error {
    Error::Failed(format!("{}: {call} failed: {error}", path.display()))
}
