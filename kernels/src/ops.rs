//! What can be computed: the operators of a Llama training step, written out.
//!
//! Alphabet of shapes: B batch, S sequence, T = B·S tokens, C hidden, H heads, K kv heads, D head dim,
//! F ffn, V vocabulary. Matrices are row-major, `[rows, columns]`. All operators run on
//! [`crate::Stream::Compute`] in the order of the calls. Unless said otherwise a view is in the model's
//! compute type (f32, f16 or bf16), sums are taken in f32, and an operator writes every element of its
//! outputs without reading them. No operator allocates.
//!
//! Failures (a launch refused) are kept by the backend and returned by the next `join`.

use crate::View;

/// Whether a result replaces what is in the target or is added to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Into {
    /// target = result
    Replace,
    /// target = target + result
    Add,
}

/// Shape of a linear layer's product: x `[tokens, inputs]`, w `[outputs, inputs]`, y `[tokens, outputs]`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Linear {
    /// T
    pub tokens: u64,
    /// Columns of x and w.
    pub inputs: u64,
    /// Rows of w, columns of y.
    pub outputs: u64,
}

/// Shape of causal attention over packed q,k,v: one row of `qkv` is H·D of q, then K·D of k, then K·D of v.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Attention {
    /// B
    pub batch: u64,
    /// S
    pub sequence: u64,
    /// H
    pub heads: u64,
    /// K, a divisor of H. Query head h reads kv head h / (H/K).
    pub kv_heads: u64,
    /// D, even
    pub head_dim: u64,
    /// Whether to use the fused kernel; `false` is the plain path that materialises the scores.
    pub fused: bool,
    /// Whether the backward must give the same bits every time.
    pub deterministic: bool,
}

impl Attention {
    /// Columns of `qkv`: (H + 2K)·D.
    pub const fn packed(&self) -> u64 {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// B·S
    pub const fn tokens(&self) -> u64 {
        self.batch * self.sequence
    }
}

/// What the classifier does with the logits.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Classify {
    /// Losses only; the logits may be destroyed.
    Loss,
    /// Losses, and logits turned into gradients in place, each multiplied by the scale.
    Gradient {
        /// Factor on every gradient: loss scale / tokens that count.
        scale: f32,
    },
    /// As `Gradient`, but the target of each token that counts is first drawn from softmax(logits) by
    /// [`crate::rng::uniform`]`(seed, first_token + row, 0)` (inverse CDF over the vocabulary in order) and
    /// written into `targets`. For Sophia's Gauss-Newton-Bartlett estimate.
    Sampled {
        /// Factor on every gradient.
        scale: f32,
        /// Seed of the draw.
        seed: u64,
        /// Number of this call's first token within the step.
        first_token: u64,
    },
}

/// Target of a token that does not count.
pub const IGNORED: i32 = -100;

/// One AdamW update. All arithmetic in f32 without contraction, so that every backend gives the same bits:
/// `g = gradient·multiplier; m = β1·m + (1−β1)·g; v = β2·v + (1−β2)·g·g;`
/// `p = p·(1 − lr·decay); p = p − lr·(m·inv_bias1)/(sqrt(v·inv_bias2) + eps)`, see
/// [`crate::numeric::adamw`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AdamW {
    /// Learning rate.
    pub lr: f32,
    /// β1
    pub beta1: f32,
    /// β2
    pub beta2: f32,
    /// ε
    pub eps: f32,
    /// Decoupled weight decay of the first `decayed` elements.
    pub weight_decay: f32,
    /// 1/(1−β1^t)
    pub inv_bias1: f32,
    /// 1/(1−β2^t)
    pub inv_bias2: f32,
}

/// One Sophia-G update: `m = β1·m + (1−β1)·g; p = p·(1 − lr·decay);`
/// `p = p − lr·sign(m)·min(|m| / (max(ρ·h, 0) + 1e-15), 1)`, see [`crate::numeric::sophia`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sophia {
    /// Learning rate.
    pub lr: f32,
    /// β1
    pub beta1: f32,
    /// ρ
    pub rho: f32,
    /// Decoupled weight decay of the first `decayed` elements.
    pub weight_decay: f32,
}

/// Which update.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Update {
    /// AdamW; `second` is v.
    AdamW(AdamW),
    /// Sophia-G; `second` is the Hessian estimate h, read only.
    Sophia(Sophia),
}

/// The memory of an update: equal element counts, each possibly on the device or on the host (all on one).
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct State {
    /// The weights that the model computes with (written; read where there is no other master).
    pub parameter: View,
    /// Gradient, f32 or the compute type.
    pub gradient: View,
    /// f32 master, or 16-bit remainder (`Rem16`, with bf16 parameters), or none (f32 parameters).
    pub master: Option<View>,
    /// First moment: f32, bf16 (stochastic rounding) or Q8.
    pub first: View,
    /// Second moment or Hessian: f32, bf16 or Q8.
    pub second: View,
    /// Weight decay applies to elements `0..decayed`.
    pub decayed: u64,
    /// Seed of stochastic rounding for this step, and the number of this state's first element.
    pub seed: u64,
    /// Number of the first element within the model: makes the draw the same whatever the sharding.
    pub first_element: u64,
}

impl State {
    /// Bytes of memory that AdamW reads and writes: the gradient once, all else both ways.
    pub fn adamw_bytes(&self) -> u64 {
        let written = [Some(self.parameter), self.master, Some(self.first), Some(self.second)];
        self.gradient.span.bytes + 2 * written.into_iter().flatten().map(|view| view.span.bytes).sum::<u64>()
    }
}

/// Layout of the f32 scalars that [`Operators::norm_finish`] writes and [`Operators::update`] reads.
pub mod control {
    /// What each gradient is multiplied by: clip factor / loss scale; 0 if the step is skipped.
    pub const MULTIPLIER: u64 = 0;
    /// Global gradient norm after unscaling, before clipping.
    pub const NORM: u64 = 1;
    /// 1.0 if the norm is finite and the update happens, else 0.0.
    pub const FINITE: u64 = 2;
    /// Number of f32 scalars (16 bytes).
    pub const COUNT: u64 = 4;
}

/// Operators of one rank's device.
pub trait Operators {
    /// `target` (any type, on the device) becomes zero bytes.
    fn zero(&self, target: View);

    /// `target[i] = source[i]`, converting between f32, f16 and bf16 (round to nearest even).
    fn cast(&self, source: View, target: View);

    /// `out[t,:] = table[ids[t],:]`. ids i32 `[T]`, table `[V,C]`, out `[T,C]`.
    fn embed(&self, ids: View, table: View, out: View, tokens: u64, hidden: u64, vocabulary: u64);

    /// `d_table[v,:] (+)= Σ_{t: ids[t]=v} d_out[t,:]`, in token order. d_table may be f32. With `Replace` all
    /// V rows are written. `order` i32 `[T]`: token positions sorted stably by id; `starts` i32
    /// `[distinct+1]`: bucket bounds in `order`.
    fn embed_backward(
        &self,
        ids: View,
        order: View,
        starts: View,
        distinct: u64,
        d_out: View,
        d_table: View,
        tokens: u64,
        hidden: u64,
        vocabulary: u64,
        into: Into,
    );

    /// `out[t,:] = x[t,:]·rstd[t]·weight`, `rstd = 1/sqrt(mean(x²)+eps)`. x, out `[T,C]`, weight `[C]`,
    /// rstd f32 `[T]` is written.
    fn rmsnorm(&self, x: View, weight: View, out: View, rstd: View, tokens: u64, hidden: u64, eps: f32);

    /// `d_x[t,:] += rstd·(w·dy − x̂·mean(w·dy·x̂))` with x̂ = x·rstd; `d_weight (+)= Σ_t dy·x̂` in a fixed
    /// order. d_x holds the residual's gradient on entry. `scratch`: at least
    /// [`Operators::rmsnorm_scratch_bytes`].
    fn rmsnorm_backward(
        &self,
        d_out: View,
        x: View,
        weight: View,
        rstd: View,
        d_x: View,
        d_weight: View,
        scratch: View,
        tokens: u64,
        hidden: u64,
        into: Into,
    );

    /// Bytes of scratch for [`Operators::rmsnorm_backward`] and [`Operators::bias_backward`] with
    /// `columns` columns.
    fn rmsnorm_scratch_bytes(&self, tokens: u64, columns: u64) -> u64;

    /// `y = x·wᵀ (+ bias) (+ residual)`. `residual` `[tokens, outputs]` may be y itself.
    fn linear(&self, x: View, w: View, bias: Option<View>, residual: Option<View>, y: View, shape: Linear);

    /// `d_x (+)= d_y·w`.
    fn linear_backward_input(&self, d_y: View, w: View, d_x: View, shape: Linear, into: Into);

    /// `d_w (+)= d_yᵀ·x`. d_w is f32 or the compute type.
    fn linear_backward_weight(&self, d_y: View, x: View, d_w: View, shape: Linear, into: Into);

    /// `d_bias (+)= Σ_t d_y[t,:]` in a fixed order.
    fn bias_backward(&self, d_y: View, d_bias: View, scratch: View, tokens: u64, outputs: u64, into: Into);

    /// Rotates q and k of `qkv` in place. `table` f32 `[S, D]`: per position D/2 cosines then D/2 sines
    /// (half-split convention of Hugging Face: pairs are (i, i + D/2)). `inverse` rotates back (backward). With
    /// `starts` (see [`Operators::attention`]) positions count from each document's first token.
    fn rope(&self, qkv: View, table: View, starts: Option<View>, shape: Attention, inverse: bool);

    /// Causal softmax(q·kᵀ/√D)·v. out `[T, H·D]`; stats f32 `[B,H,S]`: the row's log-sum-exp.
    /// `scratch` of at least [`Operators::attention_scratch_bytes`].
    ///
    /// `starts` i32 `[B,S]` is a document mask: for each token the position, within its row, of its document's
    /// first token. Query i sees the keys from `starts[i]` to i, without it those from 0 to i. Documents are
    /// contiguous: `starts[i]` ≤ i, and within a row starts never decrease.
    fn attention(&self, qkv: View, starts: Option<View>, out: View, stats: View, scratch: View, shape: Attention);

    /// Gradient of [`Operators::attention`] with respect to q, k, v (after rotation), packed as `qkv`.
    fn attention_backward(
        &self,
        qkv: View,
        starts: Option<View>,
        out: View,
        stats: View,
        d_out: View,
        d_qkv: View,
        scratch: View,
        shape: Attention,
    );

    /// Bytes of scratch for attention, forward and backward, with starts if `masked`; enough for any smaller
    /// batch too.
    fn attention_scratch_bytes(&self, shape: Attention, dtype: crate::DType, masked: bool) -> u64;

    /// `out = silu(gate)·up`. One row of gate_up `[T, 2F]` is F of gate, then F of up.
    fn swiglu(&self, gate_up: View, out: View, tokens: u64, ffn: u64);

    /// Gradient of [`Operators::swiglu`]: `gate_up` is replaced by its gradient, and `out` (if given)
    /// receives the forward's result again, for the weight gradient of the down projection. `d_out` and
    /// `out` may be the same view.
    fn swiglu_backward(&self, d_out: View, gate_up: View, out: Option<View>, tokens: u64, ffn: u64);

    /// Cross entropy of logits `[T,V]` against targets i32 `[T]` ([`IGNORED`] rows: loss 0, gradient 0).
    /// losses f32 `[T]` are written (not scaled).
    fn classify(&self, logits: View, targets: View, losses: View, tokens: u64, vocabulary: u64, what: Classify);

    /// `total[0] (+)= Σ values`, f32 values, f32 total, in a fixed order.
    fn sum(&self, values: View, total: View, into: Into);

    /// `slot[0] = Σ x²`, x f32/f16/bf16, slot f64, in a fixed order. Not finite if any element is not.
    fn square_sum(&self, x: View, slot: View);

    /// Closes the norm: `norm = sqrt(Σ slots)/loss_scale`; writes [`control`] to `control` (f32):
    /// `multiplier = min(1, max_norm/(norm + 1e-6))/loss_scale`, or 1/loss_scale if `max_norm` is 0.
    fn norm_finish(&self, slots: View, max_norm: f32, loss_scale: f32, control: View);

    /// One update where `control` allows it (L9). If the state's views are on the host, it is made on
    /// [`crate::Stream::Host`]; `control` (on the device) is read in the order of [`crate::Stream::Compute`] all the
    /// same.
    fn update(&self, update: Update, state: State, control: View);

    /// `hessian = β2·hessian + (1−β2)·tokens·g²` with `g = gradient·multiplier` from `control`'s FINITE and
    /// `1/loss_scale`: the Gauss-Newton-Bartlett estimate.
    fn hessian(&self, gradient: View, hessian: View, beta2: f32, tokens: f32, inverse_loss_scale: f32, control: View);
}
