// The backward of fused causal attention in tiles of 64 × 64: where attention_ordered.cu does not fit (heads of 256,
// chips with less shared memory). Options: those of attention_tiles.cuh. dQ has a kernel of its own that computes
// the scores once more instead of adding atomically.
//
// spills allowed: attention_backward_kv with -DHEAD=256: rare heads; a few words outside of the inner products
// spills allowed: attention_backward_q with -DHEAD=256: as above
// spills allowed: attention_backward_kv with -DHEAD=128: as above; where it matters attention_ordered.cu is used

// c[16, 64] += 16 rows of `left` times the transpose of 64 rows of `right`, over HEAD columns.
__device__ __forceinline__ void multiply_transposed(float (&c)[8][4], u32 left, u32 left_row, u32 right) {
#pragma unroll
    for (u32 k = 0; k < HEAD / 16; k++) {
        u32 a[4];
        left_operand(a, left, left_row, 2 * k);
#pragma unroll
        for (u32 n = 0; n < 4; n++) {
            u32 b[4];
            right_operand_transposed(b, right, n * 16, 2 * k);
            multiply(c[2 * n], a, b[0], b[1], Real());
            multiply(c[2 * n + 1], a, b[2], b[3], Real());
        }
    }
}
// c[16, 8·N] += p[16, 64] times 64 rows of `right`, columns from piece `first` on.
template <u32 N>
__device__ __forceinline__ void multiply_rows(float (&c)[N][4], const float (&p)[8][4], u32 right, u32 first) {
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
        u32 a[4];
        as_left(a, p[2 * k], p[2 * k + 1]);
#pragma unroll
        for (u32 n = 0; n < N / 2; n++) {
            u32 b[4];
            right_operand(b, right, k * 16, first + 2 * n);
            multiply(c[2 * n], a, b[0], b[1], Real());
            multiply(c[2 * n + 1], a, b[2], b[3], Real());
        }
    }
}

// dK and dV of one tile of keys, over the group's query heads and the query tiles from the diagonal down.
// A warp owns 16 keys; scores are computed transposed, so that they are left operands as they stand. With
// HEAD 256 a block writes half of the columns.
constexpr u32 WRITTEN = HEAD == 256 ? 128 : HEAD;
constexpr u32 SLICES = HEAD / WRITTEN;

extern "C" __global__ __launch_bounds__(128, HEAD == 256 ? 1 : 2) void attention_backward_kv(
    const Real* __restrict__ qkv, const Real* __restrict__ d_out, const float* __restrict__ stats,
    const float* __restrict__ delta, Real* __restrict__ d_qkv, const u32* __restrict__ starts, Shape shape) {
    extern __shared__ __align__(1024) u8 memory[];
    constexpr u32 BYTES = TILE * HEAD * 2;
    const u32 k_tile = shared_address(memory), v_tile = k_tile + BYTES, stages = v_tile + BYTES;
    // Two stages of (Q, dO), then two of (log-sum-exp, delta).
    float* row_values = (float*)(memory + 6 * BYTES);
    const u32 row_address = shared_address(row_values);
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 kv_start = blockIdx.x * TILE, kv_head = blockIdx.y / SLICES, slice = blockIdx.y % SLICES;
    const u32 group = shape.heads / shape.kv_heads;
    const u64 stride = shape.packed, out_stride = (u64)shape.heads * shape.head_dim;
    const Real* batch = qkv + (u64)blockIdx.z * shape.sequence * stride;
    const Real* upstream = d_out + (u64)blockIdx.z * shape.sequence * out_stride;
    const u64 key_column = (u64)(shape.heads + kv_head) * shape.head_dim;
    const u64 value_column = key_column + (u64)shape.kv_heads * shape.head_dim;
    const u32 first_tile = blockIdx.x;
    u32 last_tile = (shape.sequence + TILE - 1) / TILE;  // one past the last
#ifdef MASKED
    const u32* row_starts = starts + (u64)blockIdx.z * shape.sequence;
    last_tile = past_last_query(row_starts, first_tile, last_tile, TILE, kv_start + TILE);
#endif
    const u32 per_head = last_tile - first_tile, turns = group * per_head;
    const float scale2 = shape.scale * LOG2E;
    const u32 kv_left = rows_left(shape.sequence, kv_start);

    auto start = [&](u32 turn) {
        const u32 head = kv_head * group + turn / per_head, q_start = (first_tile + turn % per_head) * TILE;
        const u32 left = rows_left(shape.sequence, q_start), stage = turn & 1;
        load_tile<TILE>(stages + stage * 2 * BYTES, batch + (u64)head * shape.head_dim + q_start * stride, stride, left,
                        shape);
        load_tile<TILE>(stages + stage * 2 * BYTES + BYTES, upstream + (u64)head * shape.head_dim + q_start * out_stride,
                        out_stride, left, shape);
        // Rows beyond the end get 0: their probability is then 1 and multiplies rows of zeros.
        const u32 row = threadIdx.x & 63;
        const float* source = (threadIdx.x < 64 ? stats : delta) +
                              ((u64)blockIdx.z * shape.heads + head) * shape.sequence + q_start + (row < left ? row : 0);
        copy4(row_address + (stage * 128 + threadIdx.x) * 4, source, row < left);
    };
    load_tile<TILE>(k_tile, batch + key_column + kv_start * stride, stride, kv_left, shape);
    load_tile<TILE>(v_tile, batch + value_column + kv_start * stride, stride, kv_left, shape);
    start(0);
    copies_commit();

    float d_key[WRITTEN / 8][4], d_value[WRITTEN / 8][4];
    clear(d_key);
    clear(d_value);
    for (u32 turn = 0; turn < turns; turn++) {
        if (turn + 1 < turns) {
            start(turn + 1);
            copies_commit();
            copies_wait<1>();
        } else {
            copies_wait<0>();
        }
        __syncthreads();
        const u32 q_tile = stages + (turn & 1) * 2 * BYTES, o_tile = q_tile + BYTES;
        const float* log_sums = row_values + (turn & 1) * 128;
        const float* deltas = log_sums + 64;
        float p[8][4];
        clear(p);
        multiply_transposed(p, k_tile, warp * 16, q_tile);
        bool border = turn % per_head == 0;
        const u32 q_start = (first_tile + turn % per_head) * TILE;
#ifdef MASKED
        const u32 end = shape.sequence - 1, q_last = q_start + TILE - 1;
        border |= row_starts[q_last < end ? q_last : end] > kv_start;
#endif
#pragma unroll
        for (u32 n = 0; n < 8; n++)
#pragma unroll
            for (u32 c = 0; c < 2; c++) {
                const u32 query = n * 8 + (lane & 3) * 2 + c;
                const float offset = log_sums[query] * LOG2E;
                u32 row_start = 0;
#ifdef MASKED
                if (border) row_start = row_starts[q_start + query < end ? q_start + query : end];
#endif
#pragma unroll
                for (u32 r = 0; r < 2; r++) {
                    const u32 key = kv_start + warp * 16 + (lane >> 2) + 8 * r;
                    const float value = exp2_fast(p[n][2 * r + c] * scale2 - offset);
                    p[n][2 * r + c] = border && (key > q_start + query || key < row_start) ? 0.0f : value;
                }
            }
        multiply_rows(d_value, p, o_tile, slice * (WRITTEN / 8));
        float d[8][4];
        clear(d);
        multiply_transposed(d, v_tile, warp * 16, o_tile);
#pragma unroll
        for (u32 n = 0; n < 8; n++)
#pragma unroll
            for (u32 c = 0; c < 2; c++) {
                const float minus = deltas[n * 8 + (lane & 3) * 2 + c];
                d[n][c] = p[n][c] * (d[n][c] - minus);
                d[n][2 + c] = p[n][2 + c] * (d[n][2 + c] - minus);
            }
        multiply_rows(d_key, d, q_tile, slice * (WRITTEN / 8));
        __syncthreads();
    }
    // Each warp alone reads its rows of the key and value tiles, and is done with them.
    const u32 own = warp * 16, left = rows_left(shape.sequence, kv_start + own);
    stage_rows(k_tile, own, d_key, shape.scale, shape.scale);
    stage_rows(v_tile, own, d_value, 1.0f, 1.0f);
    Real* target = d_qkv + ((u64)blockIdx.z * shape.sequence + kv_start + own) * stride;
    store_rows<WRITTEN / 8>(k_tile, own, 16, target + key_column, stride, left, slice * WRITTEN, shape);
    store_rows<WRITTEN / 8>(v_tile, own, 16, target + value_column, stride, left, slice * WRITTEN, shape);
}

// dQ of one tile of queries, over the tiles of keys up to the diagonal. A warp owns 16 queries.
extern "C" __global__ __launch_bounds__(128, HEAD == 256 ? 1 : 2) void attention_backward_q(
    const Real* __restrict__ qkv, const Real* __restrict__ d_out, const float* __restrict__ stats,
    const float* __restrict__ delta, Real* __restrict__ d_qkv, const u32* __restrict__ starts, Shape shape) {
    extern __shared__ __align__(1024) u8 memory[];
    constexpr u32 BYTES = TILE * HEAD * 2;
    const u32 q_tile = shared_address(memory), o_tile = q_tile + BYTES, stages = o_tile + BYTES;
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 block = gridDim.x - 1 - blockIdx.x, q_start = block * TILE;
    const u32 head = blockIdx.y, kv_head = head / (shape.heads / shape.kv_heads);
    const u64 stride = shape.packed, out_stride = (u64)shape.heads * shape.head_dim;
    const Real* batch = qkv + (u64)blockIdx.z * shape.sequence * stride;
    const Real* keys = batch + (u64)(shape.heads + kv_head) * shape.head_dim;
    const Real* values = keys + (u64)shape.kv_heads * shape.head_dim;
    const u32 left = rows_left(shape.sequence, q_start), own = warp * 16;
    const float scale2 = shape.scale * LOG2E;

    auto start = [&](u32 j) {
        const u32 stage = stages + (j & 1) * 2 * BYTES, rows = rows_left(shape.sequence, j * TILE);
        load_tile<TILE>(stage, keys + (u64)j * TILE * stride, stride, rows, shape);
        load_tile<TILE>(stage + BYTES, values + (u64)j * TILE * stride, stride, rows, shape);
    };
    u32 tile_first = 0, border_end = 0;
    u32 row_start[2] = {0, 0};
#ifdef MASKED
    const u32* row_starts = starts + (u64)blockIdx.z * shape.sequence;
    tile_first = row_starts[q_start] / TILE;
    border_end = row_starts[q_start + (left < TILE ? left : TILE) - 1];
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        const u32 row = own + (lane >> 2) + 8 * r;
        row_start[r] = row < left ? row_starts[q_start + row] : 0;
    }
#endif
    load_tile<TILE>(q_tile, batch + (u64)head * shape.head_dim + q_start * stride, stride, left, shape);
    load_tile<TILE>(o_tile,
                    d_out + ((u64)blockIdx.z * shape.sequence + q_start) * out_stride + (u64)head * shape.head_dim,
                    out_stride, left, shape);
    start(tile_first);
    copies_commit();

    float offset[2], minus[2];
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        const u32 row = q_start + own + (lane >> 2) + 8 * r;
        const u64 at = ((u64)blockIdx.z * shape.heads + head) * shape.sequence + row;
        offset[r] = row < shape.sequence ? stats[at] * LOG2E : 0.0f;
        minus[r] = row < shape.sequence ? delta[at] : 0.0f;
    }
    float d_query[PIECES][4];
    clear(d_query);
    for (u32 j = tile_first; j <= block; j++) {
        if (j < block) {
            start(j + 1);
            copies_commit();
            copies_wait<1>();
        } else {
            copies_wait<0>();
        }
        __syncthreads();
        const u32 k_tile = stages + (j & 1) * 2 * BYTES, v_tile = k_tile + BYTES;
        float p[8][4], d[8][4];
        clear(p);
        multiply_transposed(p, q_tile, own, k_tile);
        clear(d);
        multiply_transposed(d, o_tile, own, v_tile);
        const bool border = j == block || j * TILE < border_end;
#pragma unroll
        for (u32 n = 0; n < 8; n++)
#pragma unroll
            for (u32 r = 0; r < 2; r++)
#pragma unroll
                for (u32 c = 0; c < 2; c++) {
                    const u32 key = j * TILE + n * 8 + (lane & 3) * 2 + c, query = q_start + own + (lane >> 2) + 8 * r;
                    const float probability = exp2_fast(p[n][2 * r + c] * scale2 - offset[r]);
                    const float gradient = probability * (d[n][2 * r + c] - minus[r]);
                    d[n][2 * r + c] = border && (key > query || key < row_start[r]) ? 0.0f : gradient;
                }
        multiply_rows(d_query, d, k_tile, 0);
        __syncthreads();
    }
    stage_rows(q_tile, own, d_query, shape.scale, shape.scale);
    store_rows<PIECES>(q_tile, own, 16,
                       d_qkv + ((u64)blockIdx.z * shape.sequence + q_start + own) * stride + (u64)head * shape.head_dim,
                       stride, rows_left(shape.sequence, q_start + own), 0, shape);
}
