// Causal attention that materialises the scores [H, S, S] of one sequence in f32: the plain path, kept as
// the measure of what fusing saves. One sequence of the batch at a time. Option: REAL.
//
// One product kernel does all the work: target[z] (m × n) = factor · Σ_k left[z](m,k) · right[z](k,n), with
// free strides, so that transposes and packed heads need no copies. A tile is 64 × 64 × 16; a thread has
// 4 × 4 results. `group` > 1 sums over that many consecutive left and right heads (queries that share keys).

struct Matrix { u64 head, row, column; };  // strides in elements

struct Product {
    Matrix left, right, target;
    u32 m, n, k;
    u32 left_share, right_share;  // consecutive heads of the target that share one head of the operand
    u32 group;                    // heads of the operands that are summed into one of the target
    u32 causal;                   // 1: target is lower triangular · 2: k ≤ m counts · 3: k ≥ m counts
    float factor;
};

template <class Left, class Right, class Target>
__device__ __forceinline__ void product(const Left* left, const Right* right, Target* target, const Product& p) {
    __shared__ float a[16][68], b[16][68];
    const u32 m_start = blockIdx.y * 64, n_start = blockIdx.x * 64;
    const u32 column = threadIdx.x % 16, row = threadIdx.x / 16;
    if (p.causal == 1 && n_start > m_start + 63) return;
    const u32 k_first = p.causal == 3 ? m_start : 0;
    const u32 k_last = p.causal == 2 && m_start + 64 < p.k ? m_start + 64 : p.k;
    float sums[4][4] = {};
    for (u32 g = 0; g < p.group; g++) {
        const Left* from_left = left + (u64)((blockIdx.z * p.group + g) / p.left_share) * p.left.head;
        const Right* from_right = right + (u64)((blockIdx.z * p.group + g) / p.right_share) * p.right.head;
        for (u32 k_start = k_first; k_start < k_last; k_start += 16) {
            for (u32 i = threadIdx.x; i < 1024; i += 256) {
                // Neighbouring threads read neighbouring memory, whichever way the operand lies.
                const u32 lm = p.left.column == 1 ? i / 16 : i % 64, lk = p.left.column == 1 ? i % 16 : i / 64;
                const u32 rn = p.right.column == 1 ? i % 64 : i / 16, rk = p.right.column == 1 ? i / 64 : i % 16;
                const u32 m = m_start + lm, n = n_start + rn, kl = k_start + lk, kr = k_start + rk;
                const bool counts = p.causal == 2 ? kl <= m : p.causal == 3 ? kl >= m : true;
                a[lk][lm] = m < p.m && kl < p.k && counts
                                ? widen(from_left[m * p.left.row + kl * p.left.column])
                                : 0.0f;
                b[rk][rn] = n < p.n && kr < p.k ? widen(from_right[kr * p.right.row + n * p.right.column]) : 0.0f;
            }
            __syncthreads();
#pragma unroll
            for (u32 k = 0; k < 16; k++) {
                const float4 x = *(const float4*)&a[k][row * 4], y = *(const float4*)&b[k][column * 4];
                const float xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
                for (u32 i = 0; i < 4; i++)
#pragma unroll
                    for (u32 j = 0; j < 4; j++) sums[i][j] += xs[i] * ys[j];
            }
            __syncthreads();
        }
    }
    Target* to = target + blockIdx.z * p.target.head;
#pragma unroll
    for (u32 i = 0; i < 4; i++)
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            const u32 m = m_start + row * 4 + i, n = n_start + column * 4 + j;
            if (m < p.m && n < p.n) to[m * p.target.row + n * p.target.column] = narrow<Target>(sums[i][j] * p.factor);
        }
}

extern "C" __global__ __launch_bounds__(256) void product_scores(const Real* left, const Real* right, float* target,
                                                                 Product p) {
    product(left, right, target, p);
}
extern "C" __global__ __launch_bounds__(256) void product_values(const float* left, const Real* right, Real* target,
                                                                 Product p) {
    product(left, right, target, p);
}

// One block a row: scores become probabilities, with the row's log-sum-exp in stats. starts u32 [S] of this
// sequence is null, or the first column that each row sees.
extern "C" __global__ __launch_bounds__(256) void softmax(float* scores, float* stats, const u32* starts,
                                                          u32 sequence) {
    __shared__ float maxes[32], sums[32];
    const u32 row = blockIdx.x, start = starts == nullptr ? 0 : starts[row];
    float* base = scores + ((u64)blockIdx.y * sequence + row) * sequence;
    float most = -INFINITE, sum = 0.0f;
    for (u32 i = start + threadIdx.x; i <= row; i += 256) most = fmaxf(most, base[i]);
    most = block_max(most, maxes);
    for (u32 i = start + threadIdx.x; i <= row; i += 256) sum += expf(base[i] - most);
    sum = block_sum(sum, sums);
    const float inverse = 1.0f / sum;
    for (u32 i = threadIdx.x; i <= row; i += 256)
        base[i] = i < start ? 0.0f : expf(base[i] - most) * inverse;
    if (threadIdx.x == 0) stats[(u64)blockIdx.y * sequence + row] = most + logf(sum);
}

// One block a row: scores become probabilities again, and their gradients those of the scores, from
// delta = Σ_d out·d_out of the row. Columns right of the diagonal are never read.
extern "C" __global__ __launch_bounds__(256) void softmax_backward(float* scores, float* gradients, const float* stats,
                                                                   const Real* out, const Real* d_out,
                                                                   const u32* starts, u32 sequence, u32 heads,
                                                                   u32 head_dim) {
    __shared__ float sums[32];
    const u32 row = blockIdx.x, head = blockIdx.y, start = starts == nullptr ? 0 : starts[row];
    const u64 base = ((u64)head * sequence + row) * sequence;
    const u64 at = ((u64)row * heads + head) * head_dim;
    float delta = 0.0f;
    for (u32 d = threadIdx.x; d < head_dim; d += 256) delta += widen(out[at + d]) * widen(d_out[at + d]);
    delta = block_sum(delta, sums);
    const float log_sum = stats[(u64)head * sequence + row];
    for (u32 i = threadIdx.x; i <= row; i += 256) {
        const float p = i < start ? 0.0f : expf(scores[base + i] - log_sum);
        scores[base + i] = p;
        gradients[base + i] = p * (gradients[base + i] - delta);
    }
}
