// out = silu(gate)·up and its gradient. One block a token. Option: REAL.

__device__ __forceinline__ float sigmoid(float x) { return divide_for<Real>(1.0f, 1.0f + exp_for<Real>(-x)); }

// Gradient of one element; gate and up become their gradients, `h` the forward's result.
__device__ __forceinline__ void differentiate(float d, float& gate, float& up, float& h) {
    const float s = sigmoid(gate), silu = gate * s, u = up;
    h = silu * u;
    up = d * silu;
    gate = d * u * (s * (1.0f + gate * (1.0f - s)));
}

extern "C" __global__ __launch_bounds__(256) void swiglu_wide(const Real* __restrict__ gate_up, Real* __restrict__ out,
                                                              u64 ffn) {
    const u32 eights = (u32)(ffn / 8);
    const Real* gate = gate_up + (u64)blockIdx.x * 2 * ffn;
    const Real* up = gate + ffn;
    Real* target = out + (u64)blockIdx.x * ffn;
    for (u32 i = threadIdx.x; i < eights; i += 2 * blockDim.x) {
        const u32 j = i + blockDim.x;
        const bool second = j < eights;
        Raw8<Real> g0 = load_raw(gate + (u64)i * 8), u0 = load_raw(up + (u64)i * 8), g1, u1;
        if (second) {
            g1 = load_raw(gate + (u64)j * 8);
            u1 = load_raw(up + (u64)j * 8);
        }
        Eight g = unpack(g0), u = unpack(u0);
#pragma unroll
        for (int e = 0; e < 8; e++) g.v[e] = g.v[e] * sigmoid(g.v[e]) * u.v[e];
        store8(target + (u64)i * 8, g);
        if (second) {
            g = unpack(g1);
            u = unpack(u1);
#pragma unroll
            for (int e = 0; e < 8; e++) g.v[e] = g.v[e] * sigmoid(g.v[e]) * u.v[e];
            store8(target + (u64)j * 8, g);
        }
    }
}

extern "C" __global__ __launch_bounds__(256) void swiglu_any(const Real* gate_up, Real* out, u64 ffn) {
    const Real* gate = gate_up + (u64)blockIdx.x * 2 * ffn;
    for (u64 i = threadIdx.x; i < ffn; i += blockDim.x) {
        const float g = widen(gate[i]);
        out[(u64)blockIdx.x * ffn + i] = narrow<Real>(g * sigmoid(g) * widen(gate[ffn + i]));
    }
}

// d_out and out may be the same memory: each element is read before it is written, by one thread.
extern "C" __global__ __launch_bounds__(256) void swiglu_backward_wide(const Real* d_out, Real* gate_up, Real* out,
                                                                       u64 ffn) {
    const u32 eights = (u32)(ffn / 8);
    Real* gate = gate_up + (u64)blockIdx.x * 2 * ffn;
    Real* up = gate + ffn;
    const Real* upstream = d_out + (u64)blockIdx.x * ffn;
    for (u32 i = threadIdx.x; i < eights; i += 2 * blockDim.x) {
        const u32 j = i + blockDim.x;
        const bool second = j < eights;
        Raw8<Real> g[2], u[2], d[2];
        g[0] = load_raw((const Real*)gate + (u64)i * 8);
        u[0] = load_raw((const Real*)up + (u64)i * 8);
        d[0] = load_raw(upstream + (u64)i * 8);
        if (second) {
            g[1] = load_raw((const Real*)gate + (u64)j * 8);
            u[1] = load_raw((const Real*)up + (u64)j * 8);
            d[1] = load_raw(upstream + (u64)j * 8);
        }
#pragma unroll
        for (int k = 0; k < 2; k++) {
            if (k == 1 && !second) break;
            const u64 at = (u64)(k ? j : i) * 8;
            Eight a = unpack(g[k]), b = unpack(u[k]), h;
            const Eight up_stream = unpack(d[k]);
#pragma unroll
            for (int e = 0; e < 8; e++) differentiate(up_stream.v[e], a.v[e], b.v[e], h.v[e]);
            store8(gate + at, a);
            store8(up + at, b);
            if (out) store8(out + (u64)blockIdx.x * ffn + at, h);
        }
    }
}

extern "C" __global__ __launch_bounds__(256) void swiglu_backward_any(const Real* d_out, Real* gate_up, Real* out,
                                                                      u64 ffn) {
    Real* gate = gate_up + (u64)blockIdx.x * 2 * ffn;
    for (u64 i = threadIdx.x; i < ffn; i += blockDim.x) {
        float g = widen(gate[i]), u = widen(gate[ffn + i]), h;
        differentiate(widen(d_out[(u64)blockIdx.x * ffn + i]), g, u, h);
        gate[i] = narrow<Real>(g);
        gate[ffn + i] = narrow<Real>(u);
        if (out) out[(u64)blockIdx.x * ffn + i] = narrow<Real>(h);
    }
}
