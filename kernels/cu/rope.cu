// Rotary position embedding on the q and k heads of packed qkv, in place. Option: REAL.
// table f32 [S, D]: D/2 cosines, then D/2 sines; pairs are (i, i + D/2). starts u32 [T], or null: the position within
// its row of each token's document, from which positions count.

__device__ __forceinline__ u32 position_of(u32 token, u32 sequence, const u32* starts) {
    return token % sequence - (starts == nullptr ? 0 : starts[token]);
}

// `lanes` = D/16 threads share a head; each keeps its eight cosines and sines and walks over heads.
extern "C" __global__ __launch_bounds__(256) void rope_wide(Real* qkv, const float* __restrict__ table,
                                                            const u32* __restrict__ starts, u32 sequence, u32 heads,
                                                            u32 head_dim, u64 packed, float direction) {
    const u32 lanes = head_dim / 16, half = head_dim / 2;
    const u32 token = blockIdx.x;
    const u32 i = (threadIdx.x % lanes) * 8;
    const u32 together = blockDim.x / lanes;
    const float* row = table + (u64)position_of(token, sequence, starts) * head_dim;
    const Eight cosine = load8(row + i);
    const Eight sine = load8(row + half + i);
    Real* base = qkv + (u64)token * packed;
    for (u32 head = threadIdx.x / lanes; head < heads; head += together) {
        Real* first = base + (u64)head * head_dim + i;
        Eight a = load8((const Real*)first), b = load8((const Real*)(first + half)), c, d;
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const float s = sine.v[e] * direction;
            c.v[e] = a.v[e] * cosine.v[e] - b.v[e] * s;
            d.v[e] = b.v[e] * cosine.v[e] + a.v[e] * s;
        }
        store8(first, c);
        store8(first + half, d);
    }
}

extern "C" __global__ __launch_bounds__(256) void rope_any(Real* qkv, const float* __restrict__ table,
                                                           const u32* __restrict__ starts, u32 sequence, u32 heads,
                                                           u32 head_dim, u64 packed, float direction) {
    const u32 half = head_dim / 2;
    const u32 token = blockIdx.x;
    const float* row = table + (u64)position_of(token, sequence, starts) * head_dim;
    for (u32 pair = threadIdx.x; pair < heads * half; pair += blockDim.x) {
        const u32 i = pair % half;
        Real* first = qkv + (u64)token * packed + (u64)(pair / half) * head_dim + i;
        const float a = widen(first[0]), b = widen(first[half]);
        const float c = row[i], s = row[half + i] * direction;
        first[0] = narrow<Real>(a * c - b * s);
        first[half] = narrow<Real>(b * c + a * s);
    }
}
