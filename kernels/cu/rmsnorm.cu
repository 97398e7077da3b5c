// RMSNorm forward and backward. Option: REAL.
//
// One block holds one row in registers: `HELD` groups of eight elements a thread. The backward's blocks are
// persistent: each walks rows blockIdx.x, +gridDim.x, …, keeps its part of d_weight in registers and writes
// it as one row of `partials`, which column_sum (columns.cu) adds up in a fixed order.
// The `any` kernels read the row twice and take every size and alignment.

template <int HELD>
__device__ __forceinline__ void forward_row(const Real* __restrict__ x, const Real* __restrict__ weight,
                                            Real* __restrict__ out, float* __restrict__ rstd, u64 hidden, float eps) {
    __shared__ float slots[32];
    const u64 row = blockIdx.x;
    const u32 eights = (u32)(hidden / 8);
    const Real* source = x + row * hidden;
    Raw8<Real> held[HELD], scale[HELD];
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        const u32 i = threadIdx.x + k * blockDim.x;
        if (i < eights) held[k] = load_raw(source + (u64)i * 8);
    }
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        const u32 i = threadIdx.x + k * blockDim.x;
        if (i < eights) scale[k] = load_raw(weight + (u64)i * 8);
    }
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        if (threadIdx.x + k * blockDim.x < eights) {
            Eight a = unpack(held[k]);
#pragma unroll
            for (int e = 0; e < 8; e++) sum += a.v[e] * a.v[e];
        }
    }
    sum = block_sum(sum, slots);
    const float r = 1.0f / sqrtf(sum / (float)hidden + eps);
    if (threadIdx.x == 0) rstd[row] = r;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        const u32 i = threadIdx.x + k * blockDim.x;
        if (i < eights) {
            Eight a = unpack(held[k]), w = unpack(scale[k]);
#pragma unroll
            for (int e = 0; e < 8; e++) a.v[e] = a.v[e] * r * w.v[e];
            store8(out + row * hidden + (u64)i * 8, a);
        }
    }
}

template <int HELD>
__device__ __forceinline__ void backward_rows(const Real* __restrict__ d_out, const Real* __restrict__ x,
                                              const Real* __restrict__ weight, const float* __restrict__ rstd,
                                              Real* d_x, float* partials, u64 tokens, u64 hidden) {
    __shared__ float slots[2][32];
    const u32 eights = (u32)(hidden / 8);
    const float inverse = 1.0f / (float)hidden;
    Raw8<Real> scale[HELD];
    Eight d_weight[HELD];
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        const u32 i = threadIdx.x + k * blockDim.x;
        if (i < eights) scale[k] = load_raw(weight + (u64)i * 8);
#pragma unroll
        for (int e = 0; e < 8; e++) d_weight[k].v[e] = 0.0f;
    }
    u32 turn = 0;
    for (u64 row = blockIdx.x; row < tokens; row += gridDim.x, turn ^= 1) {
        Raw8<Real> a[HELD], g[HELD], before[HELD];
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            const u32 i = threadIdx.x + k * blockDim.x;
            if (i < eights) {
                g[k] = load_raw(d_out + row * hidden + (u64)i * 8);
                a[k] = load_raw(x + row * hidden + (u64)i * 8);
                before[k] = load_raw((const Real*)d_x + row * hidden + (u64)i * 8);
            }
        }
        const float r = rstd[row];
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            if (threadIdx.x + k * blockDim.x < eights) {
                Eight xs = unpack(a[k]), gs = unpack(g[k]), ws = unpack(scale[k]);
#pragma unroll
                for (int e = 0; e < 8; e++) {
                    const float normal = xs.v[e] * r;
                    d_weight[k].v[e] += gs.v[e] * normal;
                    sum += ws.v[e] * gs.v[e] * normal;
                }
            }
        }
        const float mean = block_sum(sum, slots[turn]) * inverse;
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            const u32 i = threadIdx.x + k * blockDim.x;
            if (i < eights) {
                Eight xs = unpack(a[k]), gs = unpack(g[k]), ws = unpack(scale[k]), old = unpack(before[k]);
#pragma unroll
                for (int e = 0; e < 8; e++) old.v[e] += r * (ws.v[e] * gs.v[e] - xs.v[e] * r * mean);
                store8(d_x + row * hidden + (u64)i * 8, old);
            }
        }
    }
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        const u32 i = threadIdx.x + k * blockDim.x;
        if (i < eights) store8(partials + (u64)blockIdx.x * hidden + (u64)i * 8, d_weight[k]);
    }
}

#define RMSNORM(HELD, BLOCKS)                                                                                        \
    extern "C" __global__ __launch_bounds__(256) void rmsnorm_##HELD(                                                \
        const Real* x, const Real* weight, Real* out, float* rstd, u64 hidden, float eps) {                          \
        forward_row<HELD>(x, weight, out, rstd, hidden, eps);                                                        \
    }                                                                                                                \
    extern "C" __global__ __launch_bounds__(256, BLOCKS) void rmsnorm_backward_##HELD(                               \
        const Real* d_out, const Real* x, const Real* weight, const float* rstd, Real* d_x, float* partials,         \
        u64 tokens, u64 hidden) {                                                                                    \
        backward_rows<HELD>(d_out, x, weight, rstd, d_x, partials, tokens, hidden);                                  \
    }
// The second number is the blocks of the backward that share a multiprocessor: launch.rs starts as many.
// A few spilled words cost less than half of the blocks would:
// spills allowed: rmsnorm_backward_4 with -DREAL=bf16: two blocks of 256 threads leave 128 registers
// spills allowed: rmsnorm_backward_4 with -DREAL=f16: as bf16
RMSNORM(1, 4)
RMSNORM(2, sizeof(Real) == 2 ? 3 : 2)
RMSNORM(4, sizeof(Real) == 2 ? 2 : 1)

extern "C" __global__ __launch_bounds__(256) void rmsnorm_any(const Real* x, const Real* weight, Real* out, float* rstd,
                                                              u64 hidden, float eps) {
    __shared__ float slots[32];
    const u64 row = blockIdx.x;
    float sum = 0.0f;
    for (u64 c = threadIdx.x; c < hidden; c += blockDim.x) {
        const float a = widen(x[row * hidden + c]);
        sum += a * a;
    }
    sum = block_sum(sum, slots);
    const float r = 1.0f / sqrtf(sum / (float)hidden + eps);
    if (threadIdx.x == 0) rstd[row] = r;
    for (u64 c = threadIdx.x; c < hidden; c += blockDim.x)
        out[row * hidden + c] = narrow<Real>(widen(x[row * hidden + c]) * r * widen(weight[c]));
}

// A thread's columns are its own, also in `partials`: no two threads meet.
extern "C" __global__ __launch_bounds__(256) void rmsnorm_backward_any(const Real* d_out, const Real* x,
                                                                       const Real* weight, const float* rstd, Real* d_x,
                                                                       float* partials, u64 tokens, u64 hidden) {
    __shared__ float slots[2][32];
    float* own = partials + (u64)blockIdx.x * hidden;
    for (u64 c = threadIdx.x; c < hidden; c += blockDim.x) own[c] = 0.0f;
    u32 turn = 0;
    for (u64 row = blockIdx.x; row < tokens; row += gridDim.x, turn ^= 1) {
        const u64 base = row * hidden;
        const float r = rstd[row];
        float sum = 0.0f;
        for (u64 c = threadIdx.x; c < hidden; c += blockDim.x) {
            const float g = widen(d_out[base + c]), normal = widen(x[base + c]) * r;
            own[c] += g * normal;
            sum += widen(weight[c]) * g * normal;
        }
        const float mean = block_sum(sum, slots[turn]) / (float)hidden;
        for (u64 c = threadIdx.x; c < hidden; c += blockDim.x) {
            const float g = widen(d_out[base + c]), normal = widen(x[base + c]) * r;
            d_x[base + c] = narrow<Real>(widen(d_x[base + c]) + r * (widen(weight[c]) * g - normal * mean));
        }
    }
}
