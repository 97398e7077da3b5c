//! Attention three ways: cuDNN, Castor's own fused kernel (cut both ways), and the plain path; each against the CPU,
//! with and without document masks.

use super::Case;
use super::rig::Rig;
use castor_kernels::cuda::CudaOptions;
use castor_kernels::cuda::programs::Tiles;
use castor_kernels::ops::Attention;
use castor_kernels::{DType, View};

pub const CASES: &[Case] = &[
    ("attention_fused", attention_fused),
    ("attention_own", attention_own),
    ("attention_plain", attention_plain),
    ("attention_cuts", attention_cuts),
    ("attention_documents_own", documents_own),
    ("attention_documents_any", documents_any),
    ("attention_documents_plain", documents_plain),
    ("attention_deterministic", attention_deterministic),
];

/// (B, S, H, K, D)
const SHAPES: [[u64; 5]; 7] = [
    [1, 64, 2, 2, 64],
    [2, 100, 4, 2, 64],
    [2, 128, 4, 4, 128],
    [1, 257, 6, 2, 128],
    [3, 1, 2, 1, 64],
    [1, 37, 3, 1, 32],
    [1, 512, 8, 2, 80],
];

/// Those with a mask, which Castor's own kernels alone have: as odd, and across as many borders of tiles, with fewer
/// scores, since under a sanitizer each of them takes its time.
const MASKED: [[u64; 5]; 7] = [
    [1, 64, 2, 2, 64],
    [2, 100, 4, 2, 64],
    [2, 128, 2, 2, 128],
    [1, 257, 3, 1, 128],
    [3, 1, 2, 1, 64],
    [1, 37, 3, 1, 32],
    [1, 300, 4, 1, 80],
];

/// Longest documents: none sees another token; several within a tile; across tiles.
const LONGEST: [u64; 3] = [1, 20, 200];

fn shape([batch, sequence, heads, kv_heads, head_dim]: [u64; 5], fused: bool, deterministic: bool) -> Attention {
    Attention { batch, sequence, heads, kv_heads, head_dim, fused, deterministic }
}

struct Views {
    qkv: View,
    starts: Option<View>,
    out: View,
    stats: View,
    d_out: View,
    d_qkv: View,
    scratch: View,
}

/// Documents of changing lengths up to `longest`, other ones in each row: most borders fall within tiles.
fn starts(rig: &Rig, shape: Attention, longest: u64) -> View {
    let mut starts = Vec::new();
    for row in 0..shape.batch {
        let (mut start, mut left) = (0, 0);
        for t in 0..shape.sequence {
            if left == 0 {
                (start, left) = (t, 1 + (7 * row + 5 * t + 3) % longest);
            }
            starts.push(start as i32);
            left -= 1;
        }
    }
    rig.integers(&starts)
}

fn views(rig: &Rig, dtype: DType, shape: Attention, longest: Option<u64>) -> Views {
    let dense = shape.tokens() * shape.heads * shape.head_dim;
    Views {
        qkv: rig.normal(dtype, shape.tokens() * shape.packed(), 1.0),
        starts: longest.map(|longest| starts(rig, shape, longest)),
        out: rig.poisoned(dtype, dense),
        stats: rig.poisoned(DType::F32, shape.tokens() * shape.heads),
        d_out: rig.normal(dtype, dense, 1.0),
        d_qkv: rig.poisoned(dtype, shape.tokens() * shape.packed()),
        scratch: rig.scratch(|ops| ops.attention_scratch_bytes(shape, dtype, longest.is_some())),
    }
}

/// Own kernels are one whatever `deterministic` says; where cuDNN may run, both are looked at.
fn against_cpu(rig: &Rig, fused: bool, deterministic: &[bool], dtypes: &[DType], longest: Option<u64>) {
    println!("  {}", rig.cuda.attention_backend());
    for sizes in if longest.is_some() { MASKED } else { SHAPES } {
        for &dtype in dtypes {
            for &deterministic in deterministic {
                rig.clear();
                let shape = shape(sizes, fused, deterministic);
                let v = views(rig, dtype, shape, longest);
                rig.run(|ops| ops.attention(v.qkv, v.starts, v.out, v.stats, v.scratch, shape));
                // Probabilities are rounded to the type before they meet v, and the result once more.
                rig.close(&format!("attention {shape:?}"), v.out, 2.0);
                rig.close(&format!("stats {shape:?}"), v.stats, 4.0);
                rig.run(|ops| {
                    ops.attention_backward(v.qkv, v.starts, v.out, v.stats, v.d_out, v.d_qkv, v.scratch, shape)
                });
                // Besides, the gradient of the scores is rounded, and `out` enters as it was rounded.
                rig.close(&format!("attention_backward {shape:?}"), v.d_qkv, 4.0);
            }
        }
    }
}

fn attention_fused() {
    against_cpu(&Rig::new(), true, &[false, true], &[DType::Bf16, DType::F16], None);
}

fn attention_own() {
    let rig = Rig::with(CudaOptions { own_attention: true, ..CudaOptions::default() });
    against_cpu(&rig, true, &[true], &[DType::Bf16, DType::F16, DType::F32], None);
}

/// The cut that is not the default, which the other cases run.
fn attention_cuts() {
    let options = CudaOptions { own_attention: true, attention_tiles: Some(Tiles::Small), ..CudaOptions::default() };
    let rig = Rig::with(options);
    for longest in [None, Some(20), Some(200)] {
        against_cpu(&rig, true, &[true], &[DType::Bf16], longest);
    }
}

/// With a mask cuDNN is not used, if it is there or not.
fn documents(fused: bool, dtypes: &[DType]) {
    let rig = Rig::new();
    for longest in LONGEST {
        against_cpu(&rig, fused, &[true], dtypes, Some(longest));
    }
}

fn documents_own() {
    documents(true, &[DType::Bf16, DType::F16]);
}

/// f32 has a kernel of its own.
fn documents_any() {
    documents(true, &[DType::F32]);
}

fn documents_plain() {
    documents(false, &[DType::Bf16, DType::F16, DType::F32]);
}

fn attention_plain() {
    against_cpu(&Rig::new(), false, &[true], &[DType::Bf16, DType::F16, DType::F32], None);
}

fn attention_deterministic() {
    for own_attention in [false, true] {
        let rig = Rig::with(CudaOptions { own_attention, ..CudaOptions::default() });
        for (sizes, longest) in [
            ([4, 512, 8, 2, 128], None),
            ([2, 1000, 4, 4, 64], None),
            ([4, 512, 8, 2, 128], Some(300)),
            ([2, 1000, 4, 4, 64], Some(300)),
        ] {
            rig.clear();
            let shape = shape(sizes, true, true);
            let v = views(&rig, DType::Bf16, shape, longest);
            use castor_kernels::{Memory, Operators};
            let cuda = &rig.cuda;
            cuda.attention(v.qkv, v.starts, v.out, v.stats, v.scratch, shape);
            let mut results = Vec::new();
            for _ in 0..4 {
                cuda.attention_backward(v.qkv, v.starts, v.out, v.stats, v.d_out, v.d_qkv, v.scratch, shape);
                let mut bytes = vec![0; v.d_qkv.span.bytes as usize];
                cuda.download(v.d_qkv.span, &mut bytes).unwrap();
                results.push(bytes);
            }
            assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "backward of {shape:?} did not repeat");
        }
    }
}
