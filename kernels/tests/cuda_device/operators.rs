//! Every operator but attention and updates.

use super::Case;
use super::rig::Rig;
use castor_kernels::DType;
use castor_kernels::ops::{Attention, Classify, IGNORED, Into, Linear};

pub const CASES: &[Case] = &[
    ("casts", casts),
    ("embedding", embedding),
    ("rmsnorm", rmsnorm),
    ("linear", linear),
    ("rope", rope),
    ("swiglu", swiglu),
    ("classify", classify),
    ("sums_and_norm", sums_and_norm),
];

const REAL: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

fn casts() {
    let rig = Rig::new();
    for count in [1, 7, 4096, 100_003] {
        for from in REAL {
            for to in REAL {
                let (source, target) = (rig.normal(from, count, 3.0), rig.poisoned(to, count));
                rig.run(|ops| ops.cast(source, target));
                rig.same_bits(&format!("cast of {count} {from:?}"), target);
            }
        }
        let target = rig.poisoned(DType::Q8, count);
        rig.run(|ops| ops.zero(target));
        rig.same_bits("zero", target);
        rig.clear();
    }
}

fn embedding() {
    let rig = Rig::new();
    for (tokens, hidden, vocabulary) in [(1, 8, 3), (37, 72, 11), (300, 136, 1000)] {
        let ids: Vec<i32> =
            (0..tokens as u64).map(|t| (castor_kernels::rng::bits(9, t, 0) % vocabulary) as i32).collect();
        let mut order: Vec<i32> = (0..tokens).collect();
        order.sort_by_key(|t| ids[*t as usize]);
        let mut starts = vec![0];
        for at in 1..=order.len() {
            if at == order.len() || ids[order[at] as usize] != ids[order[at - 1] as usize] {
                starts.push(at as i32);
            }
        }
        let (distinct, count) = (starts.len() as u64 - 1, tokens as u64);
        let (ids, order, starts) = (rig.integers(&ids), rig.integers(&order), rig.integers(&starts));
        for dtype in REAL {
            let (table, out) = (rig.normal(dtype, vocabulary * hidden, 1.0), rig.poisoned(dtype, count * hidden));
            rig.run(|ops| ops.embed(ids, table, out, count, hidden, vocabulary));
            rig.same_bits("embed", out);
            for target in [dtype, DType::F32] {
                let d_out = rig.normal(dtype, count * hidden, 1.0);
                let d_table = rig.poisoned(target, vocabulary * hidden);
                for into in [Into::Replace, Into::Add] {
                    rig.run(|ops| {
                        ops.embed_backward(
                            ids, order, starts, distinct, d_out, d_table, count, hidden, vocabulary, into,
                        );
                    });
                    rig.close(&format!("embed_backward {into:?}"), d_table, 1.0);
                }
            }
        }
        rig.clear();
    }
}

fn rmsnorm() {
    let rig = Rig::new();
    for (tokens, hidden) in [(1, 8), (3, 40), (129, 200), (64, 4096), (17, 5120)] {
        for dtype in REAL {
            let (x, weight) = (rig.normal(dtype, tokens * hidden, 2.0), rig.normal(dtype, hidden, 1.0));
            let (out, rstd) = (rig.poisoned(dtype, tokens * hidden), rig.poisoned(DType::F32, tokens));
            rig.run(|ops| ops.rmsnorm(x, weight, out, rstd, tokens, hidden, 1e-5));
            rig.close("rmsnorm", out, 1.0);
            rig.close("rstd", rstd, 1.0);
            let scratch = rig.scratch(|ops| ops.rmsnorm_scratch_bytes(tokens, hidden));
            let (d_out, d_x) = (rig.normal(dtype, tokens * hidden, 1.0), rig.normal(dtype, tokens * hidden, 1.0));
            for target in [dtype, DType::F32] {
                let d_weight = rig.poisoned(target, hidden);
                for into in [Into::Replace, Into::Add] {
                    rig.run(|ops| {
                        ops.rmsnorm_backward(d_out, x, weight, rstd, d_x, d_weight, scratch, tokens, hidden, into);
                    });
                    // d_x is added to twice and more, each time rounded.
                    rig.close("rmsnorm_backward d_x", d_x, 3.0);
                    rig.close("rmsnorm_backward d_weight", d_weight, 4.0);
                }
            }
        }
        rig.clear();
    }
}

fn linear() {
    let rig = Rig::new();
    for (tokens, inputs, outputs) in [(1, 8, 8), (24, 40, 72), (129, 200, 136), (256, 512, 1376), (7, 24, 5)] {
        let shape = Linear { tokens, inputs, outputs };
        for dtype in REAL {
            let (x, w) = (rig.normal(dtype, tokens * inputs, 1.0), rig.normal(dtype, outputs * inputs, 0.3));
            let (bias, d_y) = (rig.normal(dtype, outputs, 1.0), rig.normal(dtype, tokens * outputs, 1.0));
            let name = |what: &str| format!("{what} {shape:?}");
            for with_bias in [false, true] {
                let y = rig.poisoned(dtype, tokens * outputs);
                let residual = rig.normal(dtype, tokens * outputs, 1.0);
                let bias = with_bias.then_some(bias);
                rig.run(|ops| ops.linear(x, w, bias, None, y, shape));
                rig.close(&name("linear"), y, 2.0);
                rig.run(|ops| ops.linear(x, w, bias, Some(residual), y, shape));
                rig.close(&name("linear + residual"), y, 2.0);
                rig.run(|ops| ops.linear(x, w, bias, Some(residual), residual, shape));
                rig.close(&name("linear + residual in place"), residual, 2.0);
            }
            let d_x = rig.poisoned(dtype, tokens * inputs);
            for into in [Into::Replace, Into::Add] {
                rig.run(|ops| ops.linear_backward_input(d_y, w, d_x, shape, into));
                rig.close(&name("linear_backward_input"), d_x, 2.0);
                for target in [dtype, DType::F32] {
                    let d_w = match into {
                        Into::Replace => rig.poisoned(target, outputs * inputs),
                        Into::Add => rig.normal(target, outputs * inputs, 1.0),
                    };
                    rig.run(|ops| ops.linear_backward_weight(d_y, x, d_w, shape, into));
                    rig.close(&name("linear_backward_weight"), d_w, 2.0);
                }
            }
            let scratch = rig.scratch(|ops| ops.rmsnorm_scratch_bytes(tokens, outputs));
            let d_bias = rig.poisoned(dtype, outputs);
            for into in [Into::Replace, Into::Add] {
                rig.run(|ops| ops.bias_backward(d_y, d_bias, scratch, tokens, outputs, into));
                rig.close(&name("bias_backward"), d_bias, 3.0);
            }
        }
        rig.clear();
    }
}

fn rope() {
    let rig = Rig::new();
    for (batch, sequence, heads, kv_heads, head_dim) in [(1, 1, 1, 1, 2), (2, 33, 4, 2, 64), (1, 70, 6, 3, 128)] {
        let shape = Attention { batch, sequence, heads, kv_heads, head_dim, fused: true, deterministic: false };
        let half = head_dim / 2;
        let angle = |s: u64, i: u64| s as f64 / 10_000f64.powf(i as f64 / half as f64);
        let mut table = Vec::new();
        for s in 0..sequence {
            table.extend((0..half).map(|i| angle(s, i).cos() as f32));
            table.extend((0..half).map(|i| angle(s, i).sin() as f32));
        }
        let table = rig.values(DType::F32, &table);
        let starts = rig.integers(&(0..shape.tokens()).map(|t| (t % sequence / 7 * 7) as i32).collect::<Vec<_>>());
        for dtype in REAL {
            let qkv = rig.normal(dtype, shape.tokens() * shape.packed(), 1.0);
            for inverse in [false, true] {
                rig.run(|ops| ops.rope(qkv, table, None, shape, inverse));
                rig.close("rope", qkv, 1.5);
                rig.run(|ops| ops.rope(qkv, table, Some(starts), shape, inverse));
                rig.close("rope of documents", qkv, 1.5);
            }
        }
        rig.clear();
    }
}

fn swiglu() {
    let rig = Rig::new();
    for (tokens, ffn) in [(1, 8), (3, 20), (129, 344), (64, 11008)] {
        for dtype in REAL {
            let (gate_up, out) = (rig.normal(dtype, tokens * 2 * ffn, 2.0), rig.poisoned(dtype, tokens * ffn));
            rig.run(|ops| ops.swiglu(gate_up, out, tokens, ffn));
            rig.close("swiglu", out, 1.0);
            let (d_out, again) = (rig.normal(dtype, tokens * ffn, 1.0), rig.poisoned(dtype, tokens * ffn));
            rig.run(|ops| ops.swiglu_backward(d_out, gate_up, Some(again), tokens, ffn));
            rig.close("swiglu_backward", gate_up, 1.0);
            rig.close("swiglu again", again, 1.0);
            let gate_up = rig.normal(dtype, tokens * 2 * ffn, 2.0);
            rig.run(|ops| ops.swiglu_backward(d_out, gate_up, Some(d_out), tokens, ffn));
            rig.close("swiglu_backward in place", gate_up, 1.0);
            rig.close("swiglu again in place", d_out, 1.0);
            let gate_up = rig.normal(dtype, tokens * 2 * ffn, 2.0);
            rig.run(|ops| ops.swiglu_backward(d_out, gate_up, None, tokens, ffn));
            rig.close("swiglu_backward alone", gate_up, 1.0);
        }
        rig.clear();
    }
}

fn classify() {
    let rig = Rig::new();
    for (tokens, vocabulary) in [(1, 8), (5, 1000), (33, 32_000), (3, 128_256), (4, 50_257)] {
        let targets: Vec<i32> =
            (0..tokens).map(|t| if t % 4 == 3 { IGNORED } else { (t * 7 % vocabulary) as i32 }).collect();
        for dtype in REAL {
            for what in [
                Classify::Loss,
                Classify::Gradient { scale: 0.25 },
                Classify::Sampled { scale: 2.0, seed: 5, first_token: 11 },
            ] {
                // A draw depends on sums whose last bits differ: over a large vocabulary only few tokens may
                // be likely, or the two would draw different ones now and then.
                let peaked = matches!(what, Classify::Sampled { .. }) && vocabulary > 1000;
                let logits = rig.normal(dtype, tokens * vocabulary, if peaked { 12.0 } else { 3.0 });
                let targets = rig.integers(&targets);
                let losses = rig.poisoned(DType::F32, tokens);
                rig.run(|ops| ops.classify(logits, targets, losses, tokens, vocabulary, what));
                // exp of the device and of the host differ in the last bits.
                rig.close(&format!("losses {what:?}"), losses, 4.0);
                if what != Classify::Loss {
                    rig.close(&format!("gradient {what:?}"), logits, 4.0);
                }
                rig.same_bits(&format!("targets {what:?}"), targets);
                rig.clear();
            }
        }
    }
}

fn sums_and_norm() {
    let rig = Rig::new();
    let slots = rig.poisoned(DType::F64, 3);
    for dtype in REAL {
        for count in [1, 1000, 1_000_003] {
            let (x, total) = (rig.normal(dtype, count, 1.0), rig.poisoned(DType::F32, 1));
            rig.run(|ops| ops.square_sum(x, slots.part(0, 1)));
            let (cpu, cuda) = rig.download(slots.part(0, 1));
            let [cpu, cuda] = [cpu, cuda].map(|b| f64::from_le_bytes(b.try_into().unwrap()));
            assert!((cpu - cuda).abs() <= 1e-6 * cpu, "square_sum of {count} {dtype:?}: {cuda} for {cpu}");
            if dtype == DType::F32 {
                let positive: Vec<f32> = (0..count).map(|i| castor_kernels::rng::uniform(3, i, 0)).collect();
                let x = rig.values(dtype, &positive);
                for into in [Into::Replace, Into::Add] {
                    rig.run(|ops| ops.sum(x, total, into));
                    rig.close("sum", total, 4.0);
                }
            }
        }
    }
    for (max_norm, loss_scale, largest) in [(0.0, 1.0, 1.0), (1.0, 1024.0, 3.0), (1.0, 1.0, f32::INFINITY)] {
        let (slots, control) = (rig.values(DType::F64, &[4.0, 5.0, largest]), rig.poisoned(DType::F32, 4));
        rig.run(|ops| ops.norm_finish(slots, max_norm, loss_scale, control));
        let (cpu, cuda) = rig.download(control.part(0, 3));
        let read =
            |bytes: &[u8]| -> Vec<f32> { bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect() };
        let (cpu, cuda) = (read(&cpu), read(&cuda));
        assert_eq!(cpu[2], cuda[2], "finite");
        for (a, b) in cpu.iter().zip(&cuda) {
            assert!(a == b || (a - b).abs() <= 1e-6 * a.abs() || !a.is_finite(), "norm_finish: {cuda:?} for {cpu:?}");
        }
    }
}
