// Sums in a fixed order. Option: REAL.

// total[0] (+)= Σ values, by one block.
extern "C" __global__ __launch_bounds__(1024) void sum(const float* __restrict__ values, float* total, u64 count,
                                                       u32 add) {
    __shared__ float slots[32];
    float own = 0.0f;
#pragma unroll 4
    for (u64 i = threadIdx.x; i < count; i += 1024) own += values[i];
    own = block_sum(own, slots);
    if (threadIdx.x == 0) total[0] = add ? total[0] + own : own;
}

// partials[block] = the block's part of Σ x², in f64: neither range nor precision of f32 limits the norm.
extern "C" __global__ __launch_bounds__(512) void square_partials(const Real* __restrict__ x, double* partials,
                                                                  u64 eights, u64 count) {
    __shared__ double slots[32];
    const u64 step = (u64)gridDim.x * blockDim.x;
    const u64 start = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    double own = 0.0;
    u64 i = start;
    for (; i + 3 * step < eights; i += 4 * step) {
        Raw8<Real> raw[4];
#pragma unroll
        for (int k = 0; k < 4; k++) raw[k] = load_raw(x + (i + k * step) * 8);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const Eight a = unpack(raw[k]);
#pragma unroll
            for (int e = 0; e < 8; e++) own = fma((double)a.v[e], (double)a.v[e], own);
        }
    }
    for (; i < eights; i += step) {
        const Eight a = load8(x + i * 8);
#pragma unroll
        for (int e = 0; e < 8; e++) own = fma((double)a.v[e], (double)a.v[e], own);
    }
    for (u64 j = eights * 8 + start; j < count; j += step) {
        const double a = (double)widen(x[j]);
        own = fma(a, a, own);
    }
    own = block_sum(own, slots);
    if (threadIdx.x == 0) partials[blockIdx.x] = own;
}

extern "C" __global__ __launch_bounds__(1024) void square_total(const double* __restrict__ partials, double* slot,
                                                                u32 count) {
    __shared__ double slots[32];
    double own = 0.0;
    for (u32 i = threadIdx.x; i < count; i += 1024) own += partials[i];
    own = block_sum(own, slots);
    if (threadIdx.x == 0) slot[0] = own;
}

// target[i] = target[i] + source[i] in f32, rounded once.
extern "C" __global__ __launch_bounds__(256) void accumulate(const Real* __restrict__ source,
                                                             Real* __restrict__ target, u64 eights, u64 count) {
    const u64 step = (u64)gridDim.x * blockDim.x;
    const u64 start = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    for (u64 i = start; i < eights; i += step) {
        const Eight a = load8(source + i * 8);
        Eight sum = load8(target + i * 8);
#pragma unroll
        for (int e = 0; e < 8; e++) sum.v[e] += a.v[e];
        store8(target + i * 8, sum);
    }
    for (u64 j = eights * 8 + start; j < count; j += step) target[j] = narrow<Real>(widen(target[j]) + widen(source[j]));
}
