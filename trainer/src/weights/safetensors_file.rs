//! One safetensors file: its header checked against the file before any tensor is touched.
//!
//! Tensors are read, not mapped: mapped pages would count as this process's memory as long as the system has room, and
//! each would be waited for when it is touched. What comes next in the file is asked for while a part is converted.

use std::collections::HashMap;
use std::fs::File;
use std::num::NonZero;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use castor_kernels::{FileMap, numeric};
use rayon::prelude::*;
use safetensors::{Dtype, SafeTensors};

use crate::error::{Error, Result};

/// Elements that one thread reads and converts at a time: their bytes stay in its core's cache.
const SLICE: usize = 1 << 15;
/// Bytes that the system is asked to have ready from where it is read.
const AHEAD: usize = 32 << 20;
/// Bytes to ask for at a time: Linux cuts longer wishes to what a disk takes in one request.
const ASKED: usize = 128 << 10;
/// Bytes of two tensors that are compared at a time.
const COMPARED: usize = 1 << 20;

/// Where a tensor lies in its file.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    /// Byte offset in the file.
    pub start: usize,
    pub bytes: usize,
}

/// An opened file and what it holds.
#[derive(Debug)]
pub(super) struct SafetensorsFile {
    file: File,
    path: PathBuf,
    /// Where what was asked for last ends.
    asked: AtomicUsize,
    pub tensors: HashMap<String, Entry>,
}

impl SafetensorsFile {
    /// Opens and checks `path`: header length against file size first, then every tensor's place.
    pub fn open(path: &Path) -> Result<SafetensorsFile> {
        let refuse = |reason: String| Error::Usage(format!("{}: {reason}", path.display()));
        if !path.exists() {
            return Err(refuse("this weight file is missing".into()));
        }
        let map = FileMap::open(path)?;
        let bytes = map.bytes();
        if bytes.is_empty() {
            return Err(refuse("the file has zero bytes; copy it again".into()));
        }
        if bytes.starts_with(b"version https://git-lfs") {
            return Err(refuse("this is a Git LFS pointer, not the weights; run `git lfs pull` in its folder".into()));
        }
        let header = bytes
            .first_chunk::<8>()
            .map(|length| u64::from_le_bytes(*length))
            .filter(|length| *length <= bytes.len() as u64 - 8)
            .ok_or_else(|| {
                refuse(format!("not a safetensors file, or cut off in its header (the file has {} bytes)", bytes.len()))
            })?;
        let data = 8 + header as usize;
        let (_, metadata) = SafeTensors::read_metadata(bytes)
            .map_err(|e| refuse(wrong_header(&bytes[8..data], bytes.len() - data, &e)))?;
        let file = File::open(path).map_err(|error| refuse(format!("cannot be opened: {error}")))?;
        let tensors = metadata
            .tensors()
            .into_iter()
            .map(|(name, info)| {
                let (start, end) = info.data_offsets;
                let entry = Entry {
                    dtype: info.dtype,
                    shape: info.shape.iter().map(|&n| n as u64).collect(),
                    start: data + start,
                    bytes: end - start,
                };
                (name, entry)
            })
            .collect();
        Ok(SafetensorsFile { file, path: path.to_path_buf(), asked: AtomicUsize::new(0), tensors })
    }

    /// Whether a tensor of this file and one of `other` are the same bytes.
    pub fn is_same(&self, entry: &Entry, other: &SafetensorsFile, others: &Entry) -> Result<bool> {
        if entry.bytes != others.bytes {
            return Ok(false);
        }
        let (mut own, mut its) = (vec![0; COMPARED], vec![0; COMPARED]);
        for at in (0..entry.bytes).step_by(COMPARED) {
            let length = COMPARED.min(entry.bytes - at);
            self.read(entry.start + at, &mut own[..length])?;
            other.read(others.start + at, &mut its[..length])?;
            if own[..length] != its[..length] {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Elements `first .. first + out.len()` of a float tensor, widened or rounded to f32. The range must lie
    /// in the tensor.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn widen(&self, entry: &Entry, first: usize, out: &mut [f32]) -> Result<()> {
        let size = element_bytes(entry.dtype).expect("only float tensors are looked up");
        let begin = entry.start + first * size;
        let widened = || {
            out.par_chunks_mut(SLICE).enumerate().try_for_each_init(
                || vec![0; SLICE * size],
                |bytes, (index, out)| {
                    let bytes = &mut bytes[..out.len() * size];
                    self.read(begin + index * SLICE * size, bytes)?;
                    match entry.dtype {
                        Dtype::F64 => each(bytes, out, |b: [u8; 8]| f64::from_le_bytes(b) as f32),
                        Dtype::F32 => each(bytes, out, f32::from_le_bytes),
                        Dtype::F16 => each(bytes, out, |b: [u8; 2]| half::f16::from_le_bytes(b).to_f32()),
                        _ => each(bytes, out, |b: [u8; 2]| numeric::widen_bf16(u16::from_le_bytes(b))),
                    }
                    Ok(())
                },
            )
        };
        rayon::join(widened, || self.expect(begin)).0
    }

    /// Asks for the bytes from `offset` on that were not asked for yet.
    fn expect(&self, offset: usize) {
        let (asked, end) = (self.asked.swap(offset + AHEAD, Ordering::Relaxed), offset + AHEAD);
        let begin = if (offset..end).contains(&asked) { asked } else { offset };
        for at in (begin..end).step_by(ASKED) {
            let wish = (at as u64, NonZero::new(ASKED as u64), rustix::fs::Advice::WillNeed);
            // Only advice: without it the file is read all the same.
            if rustix::fs::fadvise(&self.file, wish.0, wish.1, wish.2).is_err() {
                break;
            }
        }
    }

    fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(out, offset as u64).map_err(|error| {
            let path = self.path.display();
            Error::Failed(format!("{path}: read of {} bytes at offset {offset} failed: {error}", out.len()))
        })
    }
}

/// Bytes of an element of the float types that are read; None for every other type.
pub(super) fn element_bytes(dtype: Dtype) -> Option<usize> {
    match dtype {
        Dtype::F64 => Some(8),
        Dtype::F32 => Some(4),
        Dtype::F16 | Dtype::BF16 => Some(2),
        _ => None,
    }
}

fn each<const N: usize>(bytes: &[u8], out: &mut [f32], value: impl Fn([u8; N]) -> f32) {
    let (elements, _) = bytes.as_chunks::<N>();
    for (element, out) in elements.iter().zip(out) {
        *out = value(*element);
    }
}

/// What is wrong with a header that the safetensors crate refuses: above all, by how much the file is
/// too short or too long.
fn wrong_header(header: &[u8], data: usize, error: &safetensors::SafeTensorError) -> String {
    let end = serde_json::from_slice::<serde_json::Value>(header).ok().and_then(|value| {
        let ends = value.as_object()?.values().filter_map(|v| v["data_offsets"][1].as_u64());
        ends.max()
    });
    match end {
        Some(end) if end > data as u64 => format!(
            "the file is cut off: its header describes {end} bytes of tensors and {data} are there; \
             copy it again"
        ),
        Some(end) if end < data as u64 => format!(
            "{} bytes follow the last tensor that the header describes; the file is damaged, copy it \
             again",
            data as u64 - end
        ),
        _ => format!("the header is damaged ({error}); copy the file again"),
    }
}
