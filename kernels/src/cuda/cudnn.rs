//! Attention through cuDNN: one plan per shape and pass, made on first question, kept, and remembered on disk.
//!
//! It decides what cuDNN can be trusted with, lays out the scratch memory, and runs plans. Where cuDNN is
//! absent or refuses a shape, the caller uses Castor's own kernel.

use super::Ptr;
use super::algorithms::{cache_folder, file_part, write_cache};
use super::cudnn_backend::{Descriptor, Handle, Library, kind, value};
use super::cudnn_graph::{self, Pass, Plan, Target, tensor};
use crate::ops::Attention;
use crate::{DType, Error, Result};
use cudarc::driver::sys::CUstream;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::Arc;

/// Older versions need another mask value, and 9.10.0 and 9.10.1 have a wrong backward.
const OLDEST: usize = 91_002;

/// The deterministic backward keeps one 16-bit S×S matrix per head. The batch is cut so that this stays
/// below so many bytes, as long as one sequence does.
const DETERMINISTIC_BYTES: u64 = 512 << 20;

/// Parts of the scratch memory start at multiples of this.
const ALIGNMENT: u64 = 256;

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    pass: Pass,
    /// With the batch of one piece.
    shape: Attention,
    dtype: DType,
}

/// A plan, or why there is none.
type Known = std::result::Result<Arc<Plan>, Error>;

/// cuDNN on one device and stream.
pub(crate) struct Cudnn {
    // Plans first: they are dropped before the handle they were made with.
    plans: Mutex<HashMap<Key, Known>>,
    handle: Handle,
    library: Arc<Library>,
    folder: Option<PathBuf>,
}

// SAFETY: handles of a library that allows changing threads; used by the step's thread only.
unsafe impl Send for Cudnn {}
// SAFETY: as above.
unsafe impl Sync for Cudnn {}

/// Scratch of a backward, in bytes from its start.
struct Layout {
    row_sum: u64,
    d_q_sum: u64,
    workspace: u64,
    total: u64,
}

impl Cudnn {
    /// Opens cuDNN on the current context, to work on `stream`.
    ///
    /// # Errors
    /// If the library is absent, too old or does not start; the sentence says what is used instead.
    pub(crate) fn new(device_name: &str, stream: CUstream) -> Result<Self> {
        let library = Library::open()?;
        if library.version < OLDEST {
            let (major, minor) = (library.version / 10_000, library.version % 10_000 / 100);
            return Err(Error::Library {
                library: "libcudnn.so.9".into(),
                reason: format!("version {major}.{minor} is older than 9.10.2; Castor's own attention kernel is used"),
            });
        }
        let handle = Handle::new(&library, stream)?;
        let folder = cache_folder().map(|f| f.join(format!("cudnn-{}-{}", file_part(device_name), library.version)));
        Ok(Cudnn { plans: Mutex::default(), handle, library, folder })
    }

    /// The library's version, for people.
    pub(crate) fn version(&self) -> String {
        let version = self.library.version;
        format!("{}.{}.{}", version / 10_000, version % 10_000 / 100, version % 100)
    }

    /// Whether the fused path of a shape could be cuDNN's at all: types, and the 16-byte strides that cuDNN
    /// needs but does not check.
    fn eligible(shape: Attention, dtype: DType) -> bool {
        shape.fused
            && matches!(dtype, DType::Bf16 | DType::F16)
            && shape.head_dim.is_multiple_of(8)
            && shape.batch > 0
            && shape.sequence > 1
    }

    fn key(pass: Pass, shape: Attention, dtype: DType) -> Key {
        let forward = Attention { deterministic: false, ..shape };
        match pass {
            Pass::Forward => Key { pass, shape: forward, dtype },
            Pass::Backward => Key { pass, shape: Attention { batch: piece(shape), ..shape }, dtype },
        }
    }

    fn plan(&self, key: Key) -> Known {
        let mut plans = self.plans.lock();
        if let Some(known) = plans.get(&key) {
            return known.clone();
        }
        let made = self.remembered(key).map_or_else(|| self.build(key), Ok).map(Arc::new);
        plans.insert(key, made.clone());
        made
    }

    fn file(&self, key: Key) -> Option<PathBuf> {
        let Attention { batch, sequence, heads, kv_heads, head_dim, deterministic, .. } = key.shape;
        let name = format!(
            "{:?}-{:?}-b{batch}-s{sequence}-h{heads}-k{kv_heads}-d{head_dim}{}.json",
            key.pass,
            key.dtype,
            if deterministic { "-deterministic" } else { "" }
        );
        self.folder.as_ref().map(|folder| folder.join(name.to_lowercase()))
    }

    fn remembered(&self, key: Key) -> Option<Plan> {
        let text = std::fs::read(self.file(key)?).ok()?;
        Plan::from_text(&self.library, Target::Handle(&self.handle), &text).ok()
    }

    fn build(&self, key: Key) -> Result<Plan> {
        let plan = cudnn_graph::build(&self.library, Target::Handle(&self.handle), key.pass, key.shape, key.dtype)?;
        if let (Some(file), Ok(text)) = (self.file(key), plan.text()) {
            write_cache(&file, &text);
        }
        Ok(plan)
    }

    /// Bytes of scratch for a pass, or none if cuDNN does not do it.
    pub(crate) fn scratch_bytes(&self, pass: Pass, shape: Attention, dtype: DType) -> Option<u64> {
        if !Self::eligible(shape, dtype) {
            return None;
        }
        let key = Self::key(pass, shape, dtype);
        let plan = self.plan(key).ok()?;
        Some(match pass {
            Pass::Forward => plan.workspace_bytes,
            Pass::Backward => layout(key.shape, plan.workspace_bytes).total,
        })
    }

    /// Forward; false if cuDNN does not do this shape in this scratch, and nothing was done then.
    pub(crate) fn forward(&self, qkv: Ptr, out: Ptr, stats: Ptr, scratch: Ptr, shape: Attention) -> Result<bool> {
        if !Self::eligible(shape, qkv.dtype) {
            return Ok(false);
        }
        let Ok(plan) = self.plan(Self::key(Pass::Forward, shape, qkv.dtype)) else {
            return Ok(false);
        };
        if !suffices(scratch, plan.workspace_bytes) {
            return Ok(false);
        }
        let scalars = Scalars::new(shape);
        let [q, k, v] = parts(qkv.address, shape);
        let pointers = [
            (tensor::Q, q),
            (tensor::K, k),
            (tensor::V, v),
            (tensor::OUT, out.address),
            (tensor::STATS, stats.address),
            (tensor::SCALE, scalars.address(0)),
            (tensor::MASKED, scalars.address(1)),
        ];
        // SAFETY: the views were checked against their arenas and have the shapes that the plan describes.
        unsafe { self.run(&plan, &pointers, scratch.address) }?;
        Ok(true)
    }

    /// Backward; false if cuDNN does not do this shape in this scratch, and nothing was done then.
    pub(crate) fn backward(
        &self,
        qkv: Ptr,
        out: Ptr,
        stats: Ptr,
        d_out: Ptr,
        d_qkv: Ptr,
        scratch: Ptr,
        shape: Attention,
    ) -> Result<bool> {
        if !Self::eligible(shape, qkv.dtype) {
            return Ok(false);
        }
        let key = Self::key(Pass::Backward, shape, qkv.dtype);
        let Ok(plan) = self.plan(key) else {
            return Ok(false);
        };
        let at = layout(key.shape, plan.workspace_bytes);
        if !suffices(scratch, at.total) {
            return Ok(false);
        }
        let scalars = Scalars::new(shape);
        let piece = key.shape;
        let rows = piece.tokens();
        for index in 0..shape.batch / piece.batch {
            let packed = index * rows * shape.packed() * 2;
            let dense = index * rows * shape.heads * shape.head_dim * 2;
            let [q, k, v] = parts(qkv.address + packed, shape);
            let [d_q, d_k, d_v] = parts(d_qkv.address + packed, shape);
            let mut pointers = vec![
                (tensor::Q, q),
                (tensor::K, k),
                (tensor::V, v),
                (tensor::OUT, out.address + dense),
                (tensor::D_OUT, d_out.address + dense),
                (tensor::STATS, stats.address + index * rows * shape.heads * 4),
                (tensor::D_Q, d_q),
                (tensor::D_K, d_k),
                (tensor::D_V, d_v),
                (tensor::ROW_SUM, scratch.address + at.row_sum),
                (tensor::SCALE, scalars.address(0)),
                (tensor::MASKED, scalars.address(1)),
                (tensor::ONE, scalars.address(2)),
            ];
            if !shape.deterministic {
                // Its sums start from zero by themselves (since 9.6).
                pointers.push((tensor::D_Q_SUM, scratch.address + at.d_q_sum));
            }
            // SAFETY: as in `forward`; pieces of the batch follow each other in every view.
            unsafe { self.run(&plan, &pointers, scratch.address + at.workspace) }?;
        }
        Ok(true)
    }

    /// # Safety
    /// The pointers must be of memory that the plan's tensors describe.
    unsafe fn run(&self, plan: &Plan, pointers: &[(i64, u64)], workspace: u64) -> Result<()> {
        let mut numbers = [0i64; 16];
        let mut addresses = [std::ptr::null_mut::<c_void>(); 16];
        for (at, &(number, address)) in pointers.iter().enumerate() {
            numbers[at] = number;
            addresses[at] = address as *mut c_void;
        }
        let pack = Descriptor::new(&self.library, kind::VARIANT_PACK)?
            .set(1000, value::INT64, &numbers[..pointers.len()])?
            .set(1001, value::POINTER, &addresses[..pointers.len()])?
            .set(1003, value::POINTER, &[workspace as *mut c_void])?
            .finalize()?;
        // SAFETY: passed on to the caller.
        unsafe { self.handle.execute(&plan.plan, &pack) }
    }
}

/// Host scalars of the graphs; cuDNN reads them while it launches.
struct Scalars([f32; 3]);

impl Scalars {
    fn new(shape: Attention) -> Self {
        Scalars([1.0 / (shape.head_dim as f32).sqrt(), f32::NEG_INFINITY, 1.0])
    }

    fn address(&self, index: usize) -> u64 {
        (&raw const self.0[index]) as u64
    }
}

/// Addresses of q, k and v in the first row of packed memory of a 16-bit type.
fn parts(address: u64, shape: Attention) -> [u64; 3] {
    let k = address + shape.heads * shape.head_dim * 2;
    [address, k, k + shape.kv_heads * shape.head_dim * 2]
}

/// Sequences of one backward call.
fn piece(shape: Attention) -> u64 {
    if !shape.deterministic {
        return shape.batch;
    }
    let one = shape.heads * shape.sequence * shape.sequence * 2;
    (1..=shape.batch).rev().find(|n| shape.batch.is_multiple_of(*n) && n * one <= DETERMINISTIC_BYTES).unwrap_or(1)
}

/// Scratch of a backward over one piece.
fn layout(piece: Attention, workspace_bytes: u64) -> Layout {
    let rows = piece.tokens() * piece.heads * 4;
    let d_q_sum = rows.next_multiple_of(ALIGNMENT);
    let accumulates = if piece.deterministic { 0 } else { rows * piece.head_dim };
    let workspace = d_q_sum + accumulates.next_multiple_of(ALIGNMENT);
    Layout { row_sum: 0, d_q_sum, workspace, total: workspace + workspace_bytes }
}

/// Whether there is room for a plan. A batch of fewer rows than the scratch was asked for may want more of it in
/// cuDNN; Castor's own kernel never does.
#[track_caller]
fn suffices(scratch: Ptr, bytes: u64) -> bool {
    assert!(bytes == 0 || scratch.address.is_multiple_of(16), "attention scratch must be aligned to 16 bytes");
    scratch.dtype.bytes(scratch.elements) >= bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    const CHILD: &str = "CASTOR_TEST_CUDNN_CHILD";

    fn attention(
        batch: u64,
        sequence: u64,
        heads: u64,
        kv_heads: u64,
        head_dim: u64,
        deterministic: bool,
    ) -> Attention {
        Attention { batch, sequence, heads, kv_heads, head_dim, fused: true, deterministic }
    }

    #[test]
    fn deterministic_backward_is_cut_into_equal_pieces_of_the_batch() {
        assert_eq!(piece(attention(8, 2048, 32, 8, 128, false)), 8);
        // One sequence takes 256 MiB here, so two fit.
        assert_eq!(piece(attention(8, 2048, 32, 8, 128, true)), 2);
        assert_eq!(piece(attention(3, 2048, 32, 8, 128, true)), 1);
        assert_eq!(piece(attention(2, 65536, 32, 8, 128, true)), 1);
    }

    #[test]
    fn scratch_parts_do_not_overlap() {
        for shape in [attention(3, 77, 5, 5, 40, false), attention(3, 77, 5, 5, 40, true)] {
            let at = layout(shape, 1000);
            let rows = 3 * 77 * 5 * 4;
            assert!(at.d_q_sum >= at.row_sum + rows && at.d_q_sum.is_multiple_of(ALIGNMENT));
            let sum = if shape.deterministic { 0 } else { rows * 40 };
            assert!(at.workspace >= at.d_q_sum + sum && at.workspace.is_multiple_of(ALIGNMENT));
            assert_eq!(at.total, at.workspace + 1000);
        }
    }

    /// cuDNN makes plans without a GPU if a driver is pretended. That needs the driver's stand-in in the
    /// loader's path from the start, so the test runs itself again in a child process.
    #[test]
    fn cudnn_accepts_the_graphs_for_an_h200() {
        let reference = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/reference"));
        if std::env::var_os(CHILD).is_some() {
            return accept(&std::fs::read(reference.join("h200.json")).unwrap());
        }
        let stub = reference.join("libcuda_stub.c");
        if !stub.exists() {
            return println!("skipped: {} is not there", stub.display());
        }
        if let Err(error) = Library::open() {
            return println!("skipped: {error}");
        }
        let folder = tempfile::tempdir().unwrap();
        let built = Command::new("cc")
            .args(["-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o"])
            .arg(folder.path().join("libcuda.so.1"))
            .arg(&stub)
            .status();
        if !built.is_ok_and(|status| status.success()) {
            return println!("skipped: no C compiler to build the stand-in of the driver");
        }
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["cuda::cudnn::tests::cudnn_accepts_the_graphs_for_an_h200", "--exact", "--nocapture"])
            .env(CHILD, "1")
            .env("LD_LIBRARY_PATH", folder.path())
            .output()
            .unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        let words: Vec<_> = err.lines().filter(|line| !line.starts_with("[stub]")).collect();
        assert!(output.status.success(), "{out}\n{}", words.join("\n"));
        print!("{out}");
    }

    fn accept(h200: &[u8]) {
        let library = Library::open().unwrap();
        // cuDNN compiles with NVRTC, whose builtins only our loader finds.
        for found in super::super::loader::survey() {
            println!("{}: {:?}", found.library, found.state);
        }
        // Properties are text with the closing NUL; the file ends with one or with white space.
        let mut text = h200.strip_suffix(&[0]).unwrap_or(h200).trim_ascii_end().to_vec();
        text.push(0);
        let properties = Descriptor::new(&library, kind::DEVICE_PROPERTIES)
            .and_then(|d| d.set(2702, value::CHAR, &text)?.finalize())
            .unwrap();
        let target = Target::Properties(&properties);
        // Few shapes, because a plan takes seconds: Llama 7B's, and grouped heads with odd sequences.
        for ((batch, sequence, heads, kv_heads, head_dim), dtype) in [
            ((8, 2048, 32, 32, 128), DType::Bf16),
            ((2, 1000, 16, 4, 64), DType::F16),
            ((1, 97, 6, 2, 128), DType::Bf16),
        ] {
            for (pass, deterministic) in [(Pass::Forward, false), (Pass::Backward, false), (Pass::Backward, true)] {
                let shape = attention(batch, sequence, heads, kv_heads, head_dim, deterministic);
                let shape = Cudnn::key(pass, shape, dtype).shape;
                let plan = cudnn_graph::build(&library, target, pass, shape, dtype)
                    .unwrap_or_else(|error| panic!("{pass:?} {shape:?} {dtype:?}: {error}"));
                println!("{pass:?} {shape:?} {dtype:?}: workspace {}", plan.workspace_bytes);
                if shape.deterministic {
                    let square = shape.batch * shape.heads * shape.sequence.pow(2) * 2;
                    assert!(plan.workspace_bytes >= square, "deterministic, but no room for its scores");
                }
                let text = plan.text().unwrap();
                let again = Plan::from_text(&library, target, &text).unwrap();
                assert_eq!(again.workspace_bytes, plan.workspace_bytes);
            }
        }
        let odd = attention(1, 64, 2, 2, 20, false);
        assert!(!Cudnn::eligible(odd, DType::Bf16), "rows of 40 bytes are not multiples of 16");
    }
}
