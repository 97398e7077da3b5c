// Rows of the embedding table by token id, and the sums of gradients by id. Option: REAL.
//
// The backward gets the positions sorted by id (buckets), so each row of the table has one writer that adds
// in token order: no atomics, the same bits every time.

template <class Unit>
__device__ __forceinline__ void embed_rows(const int* ids, const Unit* __restrict__ table, Unit* __restrict__ out,
                                           u64 units, u64 vocabulary) {
    const u64 token = blockIdx.x;
    const int id = ids[token];
    const bool known = id >= 0 && (u64)id < vocabulary;
    const Unit* source = table + (known ? (u64)id : 0) * units;
    Unit* target = out + token * units;
    for (u64 i = threadIdx.x; i < units; i += 4 * blockDim.x) {
        Unit held[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (i + k * blockDim.x < units) held[k] = known ? source[i + k * blockDim.x] : Unit();
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (i + k * blockDim.x < units) target[i + k * blockDim.x] = held[k];
    }
}

extern "C" __global__ __launch_bounds__(128) void embed_wide(const int* ids, const uint4* table, uint4* out, u64 units,
                                                             u64 vocabulary) {
    embed_rows(ids, table, out, units, vocabulary);
}
extern "C" __global__ __launch_bounds__(128) void embed_narrow(const int* ids, const Real* table, Real* out, u64 units,
                                                               u64 vocabulary) {
    embed_rows(ids, table, out, units, vocabulary);
}

// One block sums one bucket (blockIdx.x) over one slice of columns (blockIdx.y).
template <class Target, int ADD>
__device__ __forceinline__ void embed_sum(const int* ids, const int* order, const int* starts, const Real* d_out,
                                          Target* d_table, u64 hidden, u64 vocabulary, u32 wide) {
    const int first = starts[blockIdx.x], last = starts[blockIdx.x + 1];
    if (first >= last) return;
    const int id = ids[order[first]];
    if (id < 0 || (u64)id >= vocabulary) return;
    const u64 column = ((u64)blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (column >= hidden) return;
    Target* target = d_table + (u64)id * hidden + column;
    if (wide) {
        Eight sum = {};
        int i = first;
        for (; i + 4 <= last; i += 4) {
            Raw8<Real> rows[4];
#pragma unroll
            for (int k = 0; k < 4; k++) rows[k] = load_raw(d_out + (u64)order[i + k] * hidden + column);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                Eight row = unpack(rows[k]);
#pragma unroll
                for (int e = 0; e < 8; e++) sum.v[e] += row.v[e];
            }
        }
        for (; i < last; i++) {
            Eight row = load8(d_out + (u64)order[i] * hidden + column);
#pragma unroll
            for (int e = 0; e < 8; e++) sum.v[e] += row.v[e];
        }
        if (ADD) {
            Eight before = load8((const Target*)target);
#pragma unroll
            for (int e = 0; e < 8; e++) sum.v[e] = before.v[e] + sum.v[e];
        }
        store8(target, sum);
    } else {
        for (u64 e = 0; e < 8 && column + e < hidden; e++) {
            float sum = 0.0f;
            for (int i = first; i < last; i++) sum += widen(d_out[(u64)order[i] * hidden + column + e]);
            target[e] = narrow<Target>(ADD ? widen(target[e]) + sum : sum);
        }
    }
}

#define EMBED_BACKWARD(name, Target, ADD)                                                                        \
    extern "C" __global__ __launch_bounds__(128, 8) void name(const int* ids, const int* order,                  \
                                                              const int* starts, const Real* d_out,              \
                                                              Target* d_table, u64 hidden, u64 vocabulary,       \
                                                              u32 wide) {                                        \
        embed_sum<Target, ADD>(ids, order, starts, d_out, d_table, hidden, vocabulary, wide);                    \
    }
EMBED_BACKWARD(embed_backward_real, Real, 0)
EMBED_BACKWARD(embed_backward_real_add, Real, 1)
EMBED_BACKWARD(embed_backward_f32, float, 0)
EMBED_BACKWARD(embed_backward_f32_add, float, 1)
