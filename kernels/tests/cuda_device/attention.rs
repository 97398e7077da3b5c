//! Attention three ways: cuDNN, Castor's own fused kernel, and the plain path; each against the CPU.

use super::Case;
use super::rig::Rig;
use castor_kernels::cuda::CudaOptions;
use castor_kernels::ops::Attention;
use castor_kernels::{DType, View};

pub const CASES: &[Case] = &[
    ("attention_fused", attention_fused),
    ("attention_own", attention_own),
    ("attention_plain", attention_plain),
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

fn shape([batch, sequence, heads, kv_heads, head_dim]: [u64; 5], fused: bool, deterministic: bool) -> Attention {
    Attention { batch, sequence, heads, kv_heads, head_dim, fused, deterministic }
}

struct Views {
    qkv: View,
    out: View,
    stats: View,
    d_out: View,
    d_qkv: View,
    scratch: View,
}

fn views(rig: &Rig, dtype: DType, shape: Attention) -> Views {
    let dense = shape.tokens() * shape.heads * shape.head_dim;
    Views {
        qkv: rig.normal(dtype, shape.tokens() * shape.packed(), 1.0),
        out: rig.poisoned(dtype, dense),
        stats: rig.poisoned(DType::F32, shape.tokens() * shape.heads),
        d_out: rig.normal(dtype, dense, 1.0),
        d_qkv: rig.poisoned(dtype, shape.tokens() * shape.packed()),
        scratch: rig.scratch(|ops| ops.attention_scratch_bytes(shape, dtype)),
    }
}

fn against_cpu(rig: &Rig, fused: bool, dtypes: &[DType]) {
    println!("  {}", rig.cuda.attention_backend());
    for sizes in SHAPES {
        for &dtype in dtypes {
            for deterministic in [false, true] {
                rig.clear();
                let shape = shape(sizes, fused, deterministic);
                let v = views(rig, dtype, shape);
                rig.run(|ops| ops.attention(v.qkv, v.out, v.stats, v.scratch, shape));
                // Probabilities are rounded to the type before they meet v, and the result once more.
                rig.close(&format!("attention {shape:?}"), v.out, 2.0);
                rig.close(&format!("stats {shape:?}"), v.stats, 4.0);
                rig.run(|ops| ops.attention_backward(v.qkv, v.out, v.stats, v.d_out, v.d_qkv, v.scratch, shape));
                // Besides, the gradient of the scores is rounded, and `out` enters as it was rounded.
                rig.close(&format!("attention_backward {shape:?}"), v.d_qkv, 4.0);
            }
        }
    }
}

fn attention_fused() {
    against_cpu(&Rig::new(), true, &[DType::Bf16, DType::F16]);
}

fn attention_own() {
    let rig = Rig::with(CudaOptions { own_attention: true, ..CudaOptions::default() });
    against_cpu(&rig, true, &[DType::Bf16, DType::F16, DType::F32]);
}

fn attention_plain() {
    against_cpu(&Rig::new(), false, &[DType::Bf16, DType::F16, DType::F32]);
}

fn attention_deterministic() {
    for own_attention in [false, true] {
        let rig = Rig::with(CudaOptions { own_attention, ..CudaOptions::default() });
        for sizes in [[4, 512, 8, 2, 128], [2, 1000, 4, 4, 64]] {
            rig.clear();
            let shape = shape(sizes, true, true);
            let v = views(&rig, DType::Bf16, shape);
            use castor_kernels::{Memory, Operators};
            let cuda = &rig.cuda;
            cuda.attention(v.qkv, v.out, v.stats, v.scratch, shape);
            let mut results = Vec::new();
            for _ in 0..4 {
                cuda.attention_backward(v.qkv, v.out, v.stats, v.d_out, v.d_qkv, v.scratch, shape);
                let mut bytes = vec![0; v.d_qkv.span.bytes as usize];
                cuda.download(v.d_qkv.span, &mut bytes).unwrap();
                results.push(bytes);
            }
            assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "backward of {shape:?} did not repeat");
        }
    }
}
