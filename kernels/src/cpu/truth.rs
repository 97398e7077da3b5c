//! The operators once more, as the obvious loops in f64: what every backend's tests are held to.
//!
//! Plain slices and plain dimensions in the alphabet of [`crate::ops`]; nothing here is fast, nothing is
//! shared with the operators that it judges. Updates are not here: [`crate::numeric`] defines them bit for
//! bit.

/// `out[t,:] = table[ids[t],:]`. table `[V,C]`, out `[T,C]`.
pub fn embed(ids: &[i32], table: &[f64], hidden: usize) -> Vec<f64> {
    ids.iter().flat_map(|&id| table[id as usize * hidden..][..hidden].to_vec()).collect()
}

/// Gradient of the table `[V,C]`.
pub fn embed_backward(ids: &[i32], d_out: &[f64], hidden: usize, vocabulary: usize) -> Vec<f64> {
    let mut d_table = vec![0.0; vocabulary * hidden];
    for (t, &id) in ids.iter().enumerate() {
        for c in 0..hidden {
            d_table[id as usize * hidden + c] += d_out[t * hidden + c];
        }
    }
    d_table
}

/// `(out [T,C], rstd [T])` of x `[T,C]` and weight `[C]`.
pub fn rmsnorm(x: &[f64], weight: &[f64], eps: f64) -> (Vec<f64>, Vec<f64>) {
    let hidden = weight.len();
    let rstd: Vec<f64> = x
        .chunks_exact(hidden)
        .map(|row| 1.0 / (row.iter().map(|x| x * x).sum::<f64>() / hidden as f64 + eps).sqrt())
        .collect();
    let out = x.iter().enumerate().map(|(i, x)| x * rstd[i / hidden] * weight[i % hidden]).collect();
    (out, rstd)
}

/// `(d_x [T,C], d_weight [C])` of [`rmsnorm`], without what the residual adds to d_x.
pub fn rmsnorm_backward(d_out: &[f64], x: &[f64], weight: &[f64], rstd: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let hidden = weight.len();
    let (mut d_x, mut d_weight) = (vec![0.0; x.len()], vec![0.0; hidden]);
    for (t, rstd) in rstd.iter().enumerate() {
        let at = |c: usize| t * hidden + c;
        let normal = |c: usize| x[at(c)] * rstd;
        let mean = (0..hidden).map(|c| weight[c] * d_out[at(c)] * normal(c)).sum::<f64>() / hidden as f64;
        for c in 0..hidden {
            d_x[at(c)] = rstd * (weight[c] * d_out[at(c)] - normal(c) * mean);
            d_weight[c] += d_out[at(c)] * normal(c);
        }
    }
    (d_x, d_weight)
}

/// `y = x·wᵀ + bias`: x `[tokens, inputs]`, w `[outputs, inputs]`, bias `[outputs]` (or empty: none).
pub fn linear(x: &[f64], w: &[f64], bias: &[f64], inputs: usize) -> Vec<f64> {
    let outputs = w.len() / inputs;
    let mut y = Vec::with_capacity(x.len() / inputs * outputs);
    for x in x.chunks_exact(inputs) {
        for (o, w) in w.chunks_exact(inputs).enumerate() {
            let product: f64 = x.iter().zip(w).map(|(x, w)| x * w).sum();
            y.push(product + bias.get(o).copied().unwrap_or(0.0));
        }
    }
    y
}

/// `d_x = d_y·w`.
pub fn linear_backward_input(d_y: &[f64], w: &[f64], inputs: usize) -> Vec<f64> {
    let outputs = w.len() / inputs;
    let mut d_x = vec![0.0; d_y.len() / outputs * inputs];
    for (d_x, d_y) in d_x.chunks_exact_mut(inputs).zip(d_y.chunks_exact(outputs)) {
        for (d_y, w) in d_y.iter().zip(w.chunks_exact(inputs)) {
            for (d_x, w) in d_x.iter_mut().zip(w) {
                *d_x += d_y * w;
            }
        }
    }
    d_x
}

/// `d_w = d_yᵀ·x`, `[outputs, inputs]`.
pub fn linear_backward_weight(d_y: &[f64], x: &[f64], inputs: usize, outputs: usize) -> Vec<f64> {
    let mut d_w = vec![0.0; outputs * inputs];
    for (d_y, x) in d_y.chunks_exact(outputs).zip(x.chunks_exact(inputs)) {
        for (d_w, d_y) in d_w.chunks_exact_mut(inputs).zip(d_y) {
            for (d_w, x) in d_w.iter_mut().zip(x) {
                *d_w += d_y * x;
            }
        }
    }
    d_w
}

/// `Σ_t d_y[t,:]`.
pub fn bias_backward(d_y: &[f64], outputs: usize) -> Vec<f64> {
    let mut d_bias = vec![0.0; outputs];
    for (i, d) in d_y.iter().enumerate() {
        d_bias[i % outputs] += d;
    }
    d_bias
}

/// Dimensions of attention: q, k, v packed in rows of `(heads + 2·kv_heads)·head_dim`.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// S
    pub sequence: usize,
    /// H
    pub heads: usize,
    /// K
    pub kv_heads: usize,
    /// D
    pub head_dim: usize,
}

impl Heads {
    /// Columns of q, k, v packed.
    pub const fn packed(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Column of element d of (q head, its kv head's key, its value).
    fn columns(&self, head: usize, d: usize) -> (usize, usize, usize) {
        let kv = head / (self.heads / self.kv_heads);
        let column = |head: usize| head * self.head_dim + d;
        (column(head), column(self.heads + kv), column(self.heads + self.kv_heads + kv))
    }

    /// Causal softmax of one query over keys `0..=position`, and the log-sum-exp. Keys before `start` have none.
    fn probabilities(&self, qkv: &[f64], start: usize, [first, position]: [usize; 2], head: usize) -> (Vec<f64>, f64) {
        let at = |s: usize, column: usize| qkv[(first + s) * self.packed() + column];
        let scores: Vec<f64> = (0..=position)
            .map(|key| {
                if key < start {
                    return f64::NEG_INFINITY;
                }
                let product = |d| {
                    let (q, k, _) = self.columns(head, d);
                    at(position, q) * at(key, k)
                };
                (0..self.head_dim).map(product).sum::<f64>() / (self.head_dim as f64).sqrt()
            })
            .collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
        (scores.iter().map(|s| (s - max).exp() / sum).collect(), max + sum.ln())
    }
}

/// First position that token `t` sees; see [`crate::Operators::attention`] for `starts`.
fn start_of(starts: Option<&[i32]>, t: usize) -> usize {
    starts.map_or(0, |starts| starts[t] as usize)
}

/// Rotates q and k in place; table `[S,D]`: cosines, then sines. `inverse` rotates back.
pub fn rope(qkv: &mut [f64], table: &[f64], starts: Option<&[i32]>, shape: Heads, inverse: bool) {
    let d = shape.head_dim;
    for (t, row) in qkv.chunks_exact_mut(shape.packed()).enumerate() {
        let table = &table[(t % shape.sequence - start_of(starts, t)) * d..][..d];
        for head in 0..shape.heads + shape.kv_heads {
            for i in 0..d / 2 {
                let (cosine, sine) = (table[i], if inverse { -table[i + d / 2] } else { table[i + d / 2] });
                let (x, y) = (row[head * d + i], row[head * d + i + d / 2]);
                row[head * d + i] = x * cosine - y * sine;
                row[head * d + i + d / 2] = x * sine + y * cosine;
            }
        }
    }
}

/// `(out [T, H·D], stats [B,H,S])` of qkv `[T, packed]`.
pub fn attention(qkv: &[f64], starts: Option<&[i32]>, shape: Heads) -> (Vec<f64>, Vec<f64>) {
    let Heads { sequence, heads, head_dim, .. } = shape;
    let tokens = qkv.len() / shape.packed();
    let (mut out, mut stats) = (vec![0.0; tokens * heads * head_dim], vec![0.0; tokens * heads]);
    for t in 0..tokens {
        let (first, position) = (t / sequence * sequence, t % sequence);
        for head in 0..heads {
            let (p, stat) = shape.probabilities(qkv, start_of(starts, t), [first, position], head);
            stats[(t / sequence * heads + head) * sequence + position] = stat;
            for d in 0..head_dim {
                let (_, _, v) = shape.columns(head, d);
                let value = |key: usize| qkv[(first + key) * shape.packed() + v];
                out[(t * heads + head) * head_dim + d] = p.iter().enumerate().map(|(key, p)| p * value(key)).sum();
            }
        }
    }
    (out, stats)
}

/// Gradient of qkv under [`attention`].
pub fn attention_backward(qkv: &[f64], starts: Option<&[i32]>, d_out: &[f64], shape: Heads) -> Vec<f64> {
    let Heads { sequence, heads, head_dim, .. } = shape;
    let packed = shape.packed();
    let mut d_qkv = vec![0.0; qkv.len()];
    for t in 0..qkv.len() / packed {
        let (first, position) = (t / sequence * sequence, t % sequence);
        for head in 0..heads {
            let (p, _) = shape.probabilities(qkv, start_of(starts, t), [first, position], head);
            let d_o = &d_out[(t * heads + head) * head_dim..][..head_dim];
            let d_p: Vec<f64> = (0..=position)
                .map(|key| {
                    let value = |d| qkv[(first + key) * packed + shape.columns(head, d).2];
                    (0..head_dim).map(|d| d_o[d] * value(d)).sum()
                })
                .collect();
            let mean: f64 = p.iter().zip(&d_p).map(|(p, d)| p * d).sum();
            for key in 0..=position {
                let row = (first + key) * packed;
                let d_s = p[key] * (d_p[key] - mean) / (head_dim as f64).sqrt();
                for (d, d_o) in d_o.iter().enumerate() {
                    let (q, k, v) = shape.columns(head, d);
                    d_qkv[t * packed + q] += d_s * qkv[row + k];
                    d_qkv[row + k] += d_s * qkv[t * packed + q];
                    d_qkv[row + v] += p[key] * d_o;
                }
            }
        }
    }
    d_qkv
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `silu(gate)·up` of gate_up `[T,2F]`.
pub fn swiglu(gate_up: &[f64], ffn: usize) -> Vec<f64> {
    let row = |row: &[f64]| (0..ffn).map(|f| row[f] * sigmoid(row[f]) * row[f + ffn]).collect::<Vec<_>>();
    gate_up.chunks_exact(2 * ffn).flat_map(row).collect()
}

/// Gradient of gate_up under [`swiglu`].
pub fn swiglu_backward(d_out: &[f64], gate_up: &[f64], ffn: usize) -> Vec<f64> {
    let mut gradient = vec![0.0; gate_up.len()];
    for (t, d_out) in d_out.chunks_exact(ffn).enumerate() {
        for (f, d) in d_out.iter().enumerate() {
            let (gate, up) = (gate_up[t * 2 * ffn + f], gate_up[t * 2 * ffn + ffn + f]);
            let s = sigmoid(gate);
            gradient[t * 2 * ffn + f] = d * up * (s + gate * s * (1.0 - s));
            gradient[t * 2 * ffn + ffn + f] = d * gate * s;
        }
    }
    gradient
}

/// `(losses [T], gradient of scale·Σ losses [T,V])`; rows with a negative target have neither.
pub fn classify(logits: &[f64], targets: &[i32], vocabulary: usize, scale: f64) -> (Vec<f64>, Vec<f64>) {
    let (mut losses, mut gradient) = (vec![0.0; targets.len()], vec![0.0; logits.len()]);
    for (t, &target) in targets.iter().enumerate() {
        let Ok(target) = usize::try_from(target) else {
            continue;
        };
        let row = &logits[t * vocabulary..][..vocabulary];
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|x| (x - max).exp()).sum();
        losses[t] = sum.ln() - (row[target] - max);
        for v in 0..vocabulary {
            let p = (row[v] - max).exp() / sum;
            gradient[t * vocabulary + v] = scale * (p - if v == target { 1.0 } else { 0.0 });
        }
    }
    (losses, gradient)
}

#[cfg(test)]
mod tests {
    //! The gradients above against central differences of the functions above.

    use super::*;
    use crate::rng::normal;

    fn normals(seed: u64, count: usize) -> Vec<f64> {
        (0..count).map(|i| normal(seed, i as u64) as f64).collect()
    }

    fn dot(a: &[f64], b: &[f64]) -> f64 {
        a.iter().zip(b).map(|(a, b)| a * b).sum()
    }

    /// The step 1e-5 leaves a truncation error of order 1e-10 and, at values around 10, a rounding error of
    /// order 1e-10: 1e-7 tells any wrong term from both.
    fn assert_gradient(what: &str, x: &[f64], gradient: &[f64], function: impl Fn(&[f64]) -> f64) {
        assert_eq!(x.len(), gradient.len());
        let mut x = x.to_vec();
        for i in (0..x.len()).step_by(x.len().div_ceil(60)) {
            let was = x[i];
            x[i] = was + 1e-5;
            let above = function(&x);
            x[i] = was - 1e-5;
            let below = function(&x);
            x[i] = was;
            let difference = (above - below) / 2e-5;
            let error = (difference - gradient[i]).abs();
            assert!(error < 1e-7 * (1.0 + gradient[i].abs()), "{what}[{i}]: {} vs {difference}", gradient[i]);
        }
    }

    #[test]
    fn gradient_of_linear() {
        let (x, w, d_y) = (normals(1, 5 * 7), normals(2, 3 * 7), normals(3, 5 * 3));
        let value = |x: &[f64], w: &[f64]| dot(&linear(x, w, &[], 7), &d_y);
        assert_gradient("d_x", &x, &linear_backward_input(&d_y, &w, 7), |x| value(x, &w));
        assert_gradient("d_w", &w, &linear_backward_weight(&d_y, &x, 7, 3), |w| value(&x, w));
        let bias = normals(4, 3);
        assert_gradient("d_bias", &bias, &bias_backward(&d_y, 3), |b| dot(&linear(&x, &w, b, 7), &d_y));
    }

    #[test]
    fn gradient_of_embed() {
        let (ids, table, d_out) = ([3, 0, 3, 1], normals(1, 5 * 4), normals(2, 4 * 4));
        let gradient = embed_backward(&ids, &d_out, 4, 5);
        assert_gradient("d_table", &table, &gradient, |t| dot(&embed(&ids, t, 4), &d_out));
    }

    #[test]
    fn gradient_of_rmsnorm() {
        let (x, weight, d_out) = (normals(1, 5 * 7), normals(2, 7), normals(3, 5 * 7));
        let (_, rstd) = rmsnorm(&x, &weight, 1e-5);
        let (d_x, d_weight) = rmsnorm_backward(&d_out, &x, &weight, &rstd);
        assert_gradient("d_x", &x, &d_x, |x| dot(&rmsnorm(x, &weight, 1e-5).0, &d_out));
        assert_gradient("d_weight", &weight, &d_weight, |w| dot(&rmsnorm(&x, w, 1e-5).0, &d_out));
    }

    #[test]
    fn gradient_of_swiglu() {
        let (x, d_out) = (normals(1, 4 * 10), normals(2, 4 * 5));
        assert_gradient("d_gate_up", &x, &swiglu_backward(&d_out, &x, 5), |x| dot(&swiglu(x, 5), &d_out));
    }

    #[test]
    fn gradient_of_attention_with_grouped_heads() {
        let shape = Heads { sequence: 9, heads: 6, kv_heads: 2, head_dim: 10 };
        let (qkv, d_out) = (normals(1, 18 * shape.packed()), normals(2, 18 * 60));
        let starts = [0, 0, 0, 3, 3, 5, 5, 5, 8, 0, 1, 1, 1, 1, 1, 1, 1, 1];
        let gradient = attention_backward(&qkv, Some(&starts), &d_out, shape);
        assert_gradient("d_qkv", &qkv, &gradient, |qkv| dot(&attention(qkv, Some(&starts), shape).0, &d_out));
    }

    #[test]
    fn gradient_of_rope_is_its_inverse() {
        let shape = Heads { sequence: 5, heads: 2, kv_heads: 1, head_dim: 4 };
        let angles = normals(1, 5 * 2);
        let row = |a: &[f64]| [a[0].cos(), a[1].cos(), a[0].sin(), a[1].sin()];
        let table: Vec<f64> = angles.chunks_exact(2).flat_map(row).collect();
        let (qkv, mut gradient) = (normals(2, 5 * shape.packed()), normals(3, 5 * shape.packed()));
        let d_out = gradient.clone();
        let starts = [0, 0, 2, 2, 2];
        rope(&mut gradient, &table, Some(&starts), shape, true);
        assert_gradient("d_qkv", &qkv, &gradient, |qkv| {
            let mut rotated = qkv.to_vec();
            rope(&mut rotated, &table, Some(&starts), shape, false);
            dot(&rotated, &d_out)
        });
    }

    #[test]
    fn gradient_of_classify() {
        let (logits, targets) = (normals(1, 4 * 11), [3, -100, 10, 0]);
        let (losses, gradient) = classify(&logits, &targets, 11, 0.5);
        assert_eq!(losses[1], 0.0);
        let total = |l: &[f64]| 0.5 * classify(l, &targets, 11, 1.0).0.iter().sum::<f64>();
        assert_gradient("d_logits", &logits, &gradient, total);
    }
}
