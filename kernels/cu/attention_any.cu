// Causal attention for every type and head dimension up to 256, in f32 without tensor cores: the path of f32
// models, and of chips whose shared memory is too small for attention.cu. Memory is linear in S and the
// order of all sums is fixed, as there. Option: REAL.
//
// `starts` u32 [B, S] is null, or the first position that each row sees (never decreasing within a sequence).
//
// A warp owns four rows; a lane is one of 32 columns of scores, and one of 32 columns of every 32 of the head.

struct Shape {
    u32 sequence, heads, kv_heads, head_dim;
    u32 packed, aligned;
    float scale;
};

constexpr u32 ROWS = 16;      // rows of a block
constexpr u32 OWN = 4;        // rows of a warp
constexpr u32 COLUMNS = 32;   // columns of scores of a tile
constexpr u32 CHUNKS = 8;     // chunks of 32 columns in the largest head

// `rows` rows of D columns as f32, `pitch` apart in shared memory; rows from `valid` on are 0.
__device__ __forceinline__ void load(float* tile, u32 pitch, u32 rows, const Real* source, u64 stride, u32 valid,
                                     u32 head_dim) {
    for (u32 i = threadIdx.x; i < rows * head_dim; i += 128) {
        const u32 row = i / head_dim, column = i % head_dim;
        tile[row * pitch + column] = row < valid ? widen(source[row * stride + column]) : 0.0f;
    }
}
__device__ __forceinline__ u32 rows_left(u32 sequence, u32 row) { return row < sequence ? sequence - row : 0; }

// scores[r] = own row r · tile row `lane`.
__device__ __forceinline__ void products(float (&scores)[OWN], const float* own, const float* tile, u32 head_dim) {
    const float* other = tile + (threadIdx.x & 31) * (head_dim + 1);
#pragma unroll
    for (u32 r = 0; r < OWN; r++) scores[r] = 0.0f;
    for (u32 d = 0; d < head_dim; d++) {
        const float x = other[d];
#pragma unroll
        for (u32 r = 0; r < OWN; r++) scores[r] += own[r * head_dim + d] * x;
    }
}
// sums[r][·] += Σ_j weight[r] of lane j · tile row j.
__device__ __forceinline__ void accumulate(float (&sums)[OWN][CHUNKS], const float (&weight)[OWN], const float* tile,
                                           u32 head_dim) {
    const u32 lane = threadIdx.x & 31;
    for (u32 j = 0; j < COLUMNS; j++) {
        float w[OWN];
#pragma unroll
        for (u32 r = 0; r < OWN; r++) w[r] = __shfl_sync(0xffffffffu, weight[r], j);
#pragma unroll
        for (u32 c = 0; c < CHUNKS; c++) {
            if (lane + 32 * c < head_dim) {
                const float x = tile[j * (head_dim + 1) + lane + 32 * c];
#pragma unroll
                for (u32 r = 0; r < OWN; r++) sums[r][c] += w[r] * x;
            }
        }
    }
}
// First position that a row sees; none beyond the sequence's end.
__device__ __forceinline__ u32 start_of(const u32* starts, u32 row, u32 sequence) {
    return starts == nullptr || row >= sequence ? 0 : starts[(u64)blockIdx.z * sequence + row];
}
__device__ __forceinline__ void clear(float (&sums)[OWN][CHUNKS]) {
#pragma unroll
    for (u32 r = 0; r < OWN; r++)
#pragma unroll
        for (u32 c = 0; c < CHUNKS; c++) sums[r][c] = 0.0f;
}
__device__ __forceinline__ void store(Real* target, u64 stride, u32 valid, const float (&sums)[OWN][CHUNKS],
                                      const float (&factor)[OWN], u32 head_dim) {
    const u32 lane = threadIdx.x & 31;
#pragma unroll
    for (u32 r = 0; r < OWN; r++)
#pragma unroll
        for (u32 c = 0; c < CHUNKS; c++)
            if (r < valid && lane + 32 * c < head_dim)
                target[r * stride + lane + 32 * c] = narrow<Real>(sums[r][c] * factor[r]);
}

extern "C" __global__ __launch_bounds__(128) void attention_forward(const Real* qkv, Real* out, float* stats,
                                                                    const u32* starts, Shape shape) {
    extern __shared__ float memory[];
    const u32 head_dim = shape.head_dim, pitch = head_dim + 1;
    float *queries = memory, *keys = queries + ROWS * head_dim, *values = keys + COLUMNS * pitch;
    const u32 lane = threadIdx.x & 31, own = (threadIdx.x >> 5) * OWN;
    const u32 q_start = (gridDim.x - 1 - blockIdx.x) * ROWS, head = blockIdx.y;
    const u32 kv_head = head / (shape.heads / shape.kv_heads);
    const u64 stride = shape.packed;
    const Real* batch = qkv + (u64)blockIdx.z * shape.sequence * stride;
    const Real* key = batch + (u64)(shape.heads + kv_head) * head_dim;
    const Real* value = key + (u64)shape.kv_heads * head_dim;
    load(queries, head_dim, ROWS, batch + (u64)head * head_dim + q_start * stride, stride,
         rows_left(shape.sequence, q_start), head_dim);
    float sums[OWN][CHUNKS], most[OWN], total[OWN];
    u32 row_start[OWN];
    clear(sums);
#pragma unroll
    for (u32 r = 0; r < OWN; r++) {
        row_start[r] = start_of(starts, q_start + own + r, shape.sequence);
        most[r] = -INFINITE;
        total[r] = 0.0f;
    }
    const u32 first = start_of(starts, q_start, shape.sequence) / COLUMNS * COLUMNS;
    for (u32 start = first; start < q_start + ROWS && start < shape.sequence; start += COLUMNS) {
        __syncthreads();
        load(keys, pitch, COLUMNS, key + start * stride, stride, rows_left(shape.sequence, start), head_dim);
        load(values, pitch, COLUMNS, value + start * stride, stride, rows_left(shape.sequence, start), head_dim);
        __syncthreads();
        float s[OWN];
        products(s, queries + own * head_dim, keys, head_dim);
#pragma unroll
        for (u32 r = 0; r < OWN; r++) {
            const bool hidden = start + lane > q_start + own + r || start + lane < row_start[r];
            s[r] = hidden ? -INFINITE : s[r] * shape.scale;
            const float now = fmaxf(most[r], warp_max(s[r]));
            // With documents a row may have seen nothing yet.
            const float shrink = now == most[r] ? 1.0f : expf(most[r] - now);
            most[r] = now;
            s[r] = hidden ? 0.0f : expf(s[r] - now);
            total[r] = total[r] * shrink + warp_sum(s[r]);
#pragma unroll
            for (u32 c = 0; c < CHUNKS; c++) sums[r][c] *= shrink;
        }
        accumulate(sums, s, values, head_dim);
    }
    const u32 valid = rows_left(shape.sequence, q_start + own);
    float* row_stats = stats + ((u64)blockIdx.z * shape.heads + head) * shape.sequence + q_start + own;
#pragma unroll
    for (u32 r = 0; r < OWN; r++) {
        if (lane == 0 && r < valid) row_stats[r] = most[r] + logf(total[r]);
        total[r] = 1.0f / total[r];
    }
    const u64 out_stride = (u64)shape.heads * head_dim;
    store(out + ((u64)blockIdx.z * shape.sequence + q_start + own) * out_stride + (u64)head * head_dim, out_stride,
          valid, sums, total, head_dim);
}

// delta[b,h,s] = Σ_d out·d_out, one warp a row.
extern "C" __global__ __launch_bounds__(128) void attention_delta(const Real* out, const Real* d_out, float* delta,
                                                                  Shape shape, u64 rows) {
    const u64 index = (u64)blockIdx.x * 4 + (threadIdx.x >> 5);
    if (index >= rows) return;
    float sum = 0.0f;
    for (u32 d = threadIdx.x & 31; d < shape.head_dim; d += 32)
        sum += widen(out[index * shape.head_dim + d]) * widen(d_out[index * shape.head_dim + d]);
    sum = warp_sum(sum);
    if ((threadIdx.x & 31) == 0) {
        const u64 token = index / shape.heads, head = index % shape.heads;
        delta[((token / shape.sequence) * shape.heads + head) * shape.sequence + token % shape.sequence] = sum;
    }
}

extern "C" __global__ __launch_bounds__(128) void attention_backward_q(const Real* qkv, const Real* d_out,
                                                                       const float* stats, const float* delta,
                                                                       Real* d_qkv, const u32* starts, Shape shape) {
    extern __shared__ float memory[];
    const u32 head_dim = shape.head_dim, pitch = head_dim + 1;
    float *queries = memory, *upstream = queries + ROWS * head_dim, *keys = upstream + ROWS * head_dim;
    float* values = keys + COLUMNS * pitch;
    const u32 lane = threadIdx.x & 31, own = (threadIdx.x >> 5) * OWN;
    const u32 q_start = (gridDim.x - 1 - blockIdx.x) * ROWS, head = blockIdx.y;
    const u32 kv_head = head / (shape.heads / shape.kv_heads);
    const u64 stride = shape.packed, out_stride = (u64)shape.heads * head_dim;
    const Real* batch = qkv + (u64)blockIdx.z * shape.sequence * stride;
    const Real* key = batch + (u64)(shape.heads + kv_head) * head_dim;
    const Real* value = key + (u64)shape.kv_heads * head_dim;
    const u32 left = rows_left(shape.sequence, q_start), valid = rows_left(shape.sequence, q_start + own);
    load(queries, head_dim, ROWS, batch + (u64)head * head_dim + q_start * stride, stride, left, head_dim);
    load(upstream, head_dim, ROWS,
         d_out + ((u64)blockIdx.z * shape.sequence + q_start) * out_stride + (u64)head * head_dim, out_stride, left,
         head_dim);
    const u64 row = ((u64)blockIdx.z * shape.heads + head) * shape.sequence + q_start + own;
    float sums[OWN][CHUNKS], log_sum[OWN], minus[OWN], factor[OWN];
    u32 row_start[OWN];
    clear(sums);
#pragma unroll
    for (u32 r = 0; r < OWN; r++) {
        row_start[r] = start_of(starts, q_start + own + r, shape.sequence);
        log_sum[r] = r < valid ? stats[row + r] : 0.0f;
        minus[r] = r < valid ? delta[row + r] : 0.0f;
        factor[r] = shape.scale;
    }
    const u32 first = start_of(starts, q_start, shape.sequence) / COLUMNS * COLUMNS;
    for (u32 start = first; start < q_start + ROWS && start < shape.sequence; start += COLUMNS) {
        __syncthreads();
        load(keys, pitch, COLUMNS, key + start * stride, stride, rows_left(shape.sequence, start), head_dim);
        load(values, pitch, COLUMNS, value + start * stride, stride, rows_left(shape.sequence, start), head_dim);
        __syncthreads();
        float p[OWN], d[OWN];
        products(p, queries + own * head_dim, keys, head_dim);
        products(d, upstream + own * head_dim, values, head_dim);
#pragma unroll
        for (u32 r = 0; r < OWN; r++)
            d[r] = start + lane > q_start + own + r || start + lane < row_start[r]
                       ? 0.0f
                       : expf(p[r] * shape.scale - log_sum[r]) * (d[r] - minus[r]);
        accumulate(sums, d, keys, head_dim);
    }
    store(d_qkv + ((u64)blockIdx.z * shape.sequence + q_start + own) * stride + (u64)head * head_dim, stride, valid,
          sums, factor, head_dim);
}

// Rows are keys here, columns are queries: over the group's heads and the query tiles from the diagonal down.
extern "C" __global__ __launch_bounds__(128, 2) void attention_backward_kv(const Real* qkv, const Real* d_out,
                                                                        const float* stats, const float* delta,
                                                                        Real* d_qkv, const u32* starts, Shape shape) {
    extern __shared__ float memory[];
    const u32 head_dim = shape.head_dim, pitch = head_dim + 1;
    float *keys = memory, *values = keys + ROWS * head_dim, *queries = values + ROWS * head_dim;
    float* upstream = queries + COLUMNS * pitch;
    const u32 lane = threadIdx.x & 31, own = (threadIdx.x >> 5) * OWN;
    const u32 kv_start = blockIdx.x * ROWS, kv_head = blockIdx.y, group = shape.heads / shape.kv_heads;
    const u64 stride = shape.packed, out_stride = (u64)shape.heads * head_dim;
    const Real* batch = qkv + (u64)blockIdx.z * shape.sequence * stride;
    const u64 key_column = (u64)(shape.heads + kv_head) * head_dim;
    const u64 value_column = key_column + (u64)shape.kv_heads * head_dim;
    const u32 left = rows_left(shape.sequence, kv_start), valid = rows_left(shape.sequence, kv_start + own);
    load(keys, head_dim, ROWS, batch + key_column + kv_start * stride, stride, left, head_dim);
    load(values, head_dim, ROWS, batch + value_column + kv_start * stride, stride, left, head_dim);
    float d_key[OWN][CHUNKS], d_value[OWN][CHUNKS], one[OWN], factor[OWN];
    clear(d_key);
    clear(d_value);
#pragma unroll
    for (u32 r = 0; r < OWN; r++) {
        one[r] = 1.0f;
        factor[r] = shape.scale;
    }
    for (u32 head = kv_head * group; head < (kv_head + 1) * group; head++) {
        const u64 row = ((u64)blockIdx.z * shape.heads + head) * shape.sequence;
        for (u32 start = kv_start / COLUMNS * COLUMNS; start < shape.sequence; start += COLUMNS) {
            // Starts never decrease: no query from here on sees one of these keys.
            if (start_of(starts, start, shape.sequence) >= kv_start + ROWS) break;
            const u32 row_start = start_of(starts, start + lane, shape.sequence);
            const u32 rows = rows_left(shape.sequence, start);
            __syncthreads();
            load(queries, pitch, COLUMNS, batch + (u64)head * head_dim + start * stride, stride, rows, head_dim);
            load(upstream, pitch, COLUMNS,
                 d_out + ((u64)blockIdx.z * shape.sequence + start) * out_stride + (u64)head * head_dim, out_stride,
                 rows, head_dim);
            __syncthreads();
            const float log_sum = lane < rows ? stats[row + start + lane] : 0.0f;
            const float minus = lane < rows ? delta[row + start + lane] : 0.0f;
            float p[OWN], d[OWN];
            products(p, keys + own * head_dim, queries, head_dim);
            products(d, values + own * head_dim, upstream, head_dim);
#pragma unroll
            for (u32 r = 0; r < OWN; r++) {
                const u32 key = kv_start + own + r;
                p[r] = start + lane < key || key < row_start || lane >= rows ? 0.0f
                                                                             : expf(p[r] * shape.scale - log_sum);
                d[r] = p[r] * (d[r] - minus);
            }
            accumulate(d_value, p, upstream, head_dim);
            accumulate(d_key, d, queries, head_dim);
        }
    }
    Real* target = d_qkv + ((u64)blockIdx.z * shape.sequence + kv_start + own) * stride;
    store(target + key_column, stride, valid, d_key, factor, head_dim);
    store(target + value_column, stride, valid, d_value, one, head_dim);
}
