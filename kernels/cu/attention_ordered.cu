// The backward of fused causal attention where the large cut fits the device's shared memory (the launch says when): S
// and dP are computed once, and dK, dV and dQ from them. Options: those of attention_tiles.cuh; HEAD 64 or 128.
//
// One block owns KEYS keys and walks the group's query heads and the query tiles from the diagonal down. A warp
// computes 32 rows of every product, so that an operand read from shared memory is used twice: attention_backward.cu
// is bound by those reads. For that the probabilities P and the score gradients dS pass through shared memory.
//
// dQ is summed in f32 in scratch, one block after the other: a query tile's sum begins with its diagonal tile of keys
// and ends with its first one, whose block writes the result. A block walks down its query tiles one step behind the
// block of the next keys, so it hardly ever waits; blocks take their keys from a counter, last keys first, so
// whom a block waits for has begun before it.
//
// spills allowed: attention_backward_ordered with -DHEAD=128: a few words outside of the products
// spills allowed: attention_backward_ordered with -DHEAD=64: as above

constexpr u32 KEYS = HEAD;                     // of a block: a tile of P or dS has HEAD columns, as all tiles have
constexpr u32 QUERIES = 64;                    // of a step
constexpr u32 BLOCK = KEYS * 2;                // threads
constexpr u32 RESIDENT = HEAD == 128 ? 1 : 3;  // blocks on a multiprocessor
constexpr u32 ACROSS = HEAD / 32;              // warps side by side; each computes 32 × 32 of S, dP and dQ
constexpr u32 HALF = PIECES / 2;               // of the head: a warp sums dK and dV of 32 keys in half of the columns

// c[32, 32] += 32 rows of `left` times the transpose of 32 rows of `right`, over HEAD columns.
__device__ __forceinline__ void multiply_transposed(float (&c)[2][4][4], u32 left, u32 left_row, u32 right,
                                                    u32 right_row) {
#pragma unroll
    for (u32 k = 0; k < HEAD / 16; k++) {
        u32 a[2][4];
#pragma unroll
        for (u32 m = 0; m < 2; m++) left_operand(a[m], left, left_row + m * 16, 2 * k);
#pragma unroll
        for (u32 n = 0; n < 2; n++) {
            u32 b[4];
            right_operand_transposed(b, right, right_row + n * 16, 2 * k);
#pragma unroll
            for (u32 m = 0; m < 2; m++) {
                multiply(c[m][2 * n], a[m], b[0], b[1], Real());
                multiply(c[m][2 * n + 1], a[m], b[2], b[3], Real());
            }
        }
    }
}
// c[32, 32] += 32 rows of `left` times the KEYS rows of `right`, columns from piece `first` on.
__device__ __forceinline__ void multiply_rows(float (&c)[2][4][4], u32 left, u32 left_row, u32 right, u32 first) {
#pragma unroll
    for (u32 k = 0; k < KEYS / 16; k++) {
        u32 a[2][4];
#pragma unroll
        for (u32 m = 0; m < 2; m++) left_operand(a[m], left, left_row + m * 16, 2 * k);
#pragma unroll
        for (u32 n = 0; n < 2; n++) {
            u32 b[4];
            right_operand(b, right, k * 16, first + 2 * n);
#pragma unroll
            for (u32 m = 0; m < 2; m++) {
                multiply(c[m][2 * n], a[m], b[0], b[1], Real());
                multiply(c[m][2 * n + 1], a[m], b[2], b[3], Real());
            }
        }
    }
}
// c[32, 8·HALF] += 32 columns of `left`, transposed, from piece `left_piece` on, times the QUERIES rows of `right`,
// columns from piece `first` on.
__device__ __forceinline__ void multiply_columns(float (&c)[2][HALF][4], u32 left, u32 left_piece, u32 right,
                                                 u32 first) {
#pragma unroll
    for (u32 k = 0; k < QUERIES / 16; k++) {
        u32 a[2][4];
#pragma unroll
        for (u32 m = 0; m < 2; m++) left_operand_transposed(a[m], left, k * 16, left_piece + 2 * m);
#pragma unroll
        for (u32 n = 0; n < HALF / 2; n++) {
            u32 b[4];
            right_operand(b, right, k * 16, first + 2 * n);
#pragma unroll
            for (u32 m = 0; m < 2; m++) {
                multiply(c[m][2 * n], a[m], b[0], b[1], Real());
                multiply(c[m][2 * n + 1], a[m], b[2], b[3], Real());
            }
        }
    }
}

__device__ __forceinline__ u32 load_acquire(const u32* at) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
__device__ __forceinline__ void store_release(u32* at, u32 value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
// Past the first level cache, which is not coherent.
__device__ __forceinline__ void load_sums(float (&c)[4], const float* at) {
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
                 : "l"(at)
                 : "memory");
}
__device__ __forceinline__ void store_sums(float* at, const float (&c)[4]) {
    asm volatile("st.global.cg.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3])
                 : "memory");
}

// `sums` f32 [B·H·tiles of queries, QUERIES·HEAD] and `turns` u32 [1 + B·H·tiles of queries], zeroed: the counter of
// blocks, and how many blocks have added to each tile.
extern "C" __global__ __launch_bounds__(BLOCK, RESIDENT) void attention_backward_ordered(
    const Real* __restrict__ qkv, const Real* __restrict__ d_out, const float* __restrict__ stats,
    const float* __restrict__ delta, Real* __restrict__ d_qkv, const u32* __restrict__ starts, Shape shape,
    float* __restrict__ sums, u32* __restrict__ turns) {
    extern __shared__ __align__(1024) u8 memory[];
    constexpr u32 KEY_BYTES = KEYS * HEAD * 2, QUERY_BYTES = QUERIES * HEAD * 2;
    const u32 k_tile = shared_address(memory), v_tile = k_tile + KEY_BYTES, p_tile = v_tile + KEY_BYTES;
    // Two stages of (Q, dO), then two of (log-sum-exp, delta).
    const u32 d_tile = p_tile + QUERY_BYTES, stages = d_tile + QUERY_BYTES;
    float* row_values = (float*)(memory + 2 * KEY_BYTES + 6 * QUERY_BYTES);
    const u32 row_address = shared_address(row_values);
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 down = warp / ACROSS * 32, across = warp % ACROSS * 32;  // of S, dP and dQ: row, column
    const u32 key_row = warp / 2 * 32, half = warp % 2 * HALF;         // of dK and dV: row, piece
    const u32 key_tiles = (shape.sequence + KEYS - 1) / KEYS, query_tiles = (shape.sequence + QUERIES - 1) / QUERIES;

    if (threadIdx.x == 0) *(u32*)row_values = atomicAdd(turns, 1);
    __syncthreads();
    const u32 index = *(u32*)row_values;
    __syncthreads();
    const u32 of_head = index / key_tiles, batch_index = of_head / shape.kv_heads, kv_head = of_head % shape.kv_heads;
    const u32 key_tile = key_tiles - 1 - index % key_tiles, kv_start = key_tile * KEYS;
    const u32 group = shape.heads / shape.kv_heads;
    const u64 stride = shape.packed, out_stride = (u64)shape.heads * shape.head_dim;
    const Real* batch = qkv + (u64)batch_index * shape.sequence * stride;
    const Real* upstream = d_out + (u64)batch_index * shape.sequence * out_stride;
    const u64 key_column = (u64)(shape.heads + kv_head) * shape.head_dim;
    const u64 value_column = key_column + (u64)shape.kv_heads * shape.head_dim;
    const u32 kv_left = rows_left(shape.sequence, kv_start);
    const u32 first_tile = kv_start / QUERIES;
    u32 last_tile = query_tiles;  // one past the last
#ifdef MASKED
    const u32* row_starts = starts + (u64)batch_index * shape.sequence;
    last_tile = past_last_query(row_starts, first_tile, last_tile, QUERIES, kv_start + KEYS);
#endif
    const u32 per_head = last_tile - first_tile, steps = group * per_head;
    const float scale2 = shape.scale * LOG2E;

    auto start = [&](u32 step) {
        const u32 head = kv_head * group + step / per_head, q_start = (first_tile + step % per_head) * QUERIES;
        const u32 left = rows_left(shape.sequence, q_start), stage = step & 1;
        load_tile<QUERIES, BLOCK>(stages + stage * 2 * QUERY_BYTES,
                                  batch + (u64)head * shape.head_dim + q_start * stride, stride, left, shape);
        load_tile<QUERIES, BLOCK>(stages + (stage * 2 + 1) * QUERY_BYTES,
                                  upstream + (u64)head * shape.head_dim + q_start * out_stride, out_stride, left,
                                  shape);
        // Rows beyond the end get 0: their probability is then 1 and multiplies rows of zeros.
        const u64 rows = ((u64)batch_index * shape.heads + head) * shape.sequence + q_start;
        const u32 row = threadIdx.x % QUERIES, kind = threadIdx.x / QUERIES;
        const u32 target = row_address + ((stage * 2 + kind) * QUERIES + row) * 4, from = row < left ? row : 0;
        if (kind < 2) copy4(target, (kind == 0 ? stats : delta) + rows + from, row < left);
    };
    load_tile<KEYS, BLOCK>(k_tile, batch + key_column + kv_start * stride, stride, kv_left, shape);
    load_tile<KEYS, BLOCK>(v_tile, batch + value_column + kv_start * stride, stride, kv_left, shape);
    start(0);
    copies_commit();

    float d_key[2][HALF][4], d_value[2][HALF][4];
#pragma unroll
    for (u32 m = 0; m < 2; m++) {
        clear(d_key[m]);
        clear(d_value[m]);
    }
    u32 *added = nullptr, added_count = 0;  // the last step's tile, to be released
    for (u32 step = 0; step < steps; step++) {
        copies_wait<0>();
        __syncthreads();
        if (step + 1 < steps) {
            start(step + 1);
            copies_commit();
        }
        const u32 q_index = first_tile + step % per_head, q_start = q_index * QUERIES;
        const u32 q_tile = stages + (step & 1) * 2 * QUERY_BYTES, o_tile = q_tile + QUERY_BYTES;
        const float* log_sums = row_values + (step & 1) * 2 * QUERIES;
        bool border = q_start < kv_start + KEYS - 1;
#ifdef MASKED
        const u32 end = shape.sequence - 1, q_last = q_start + QUERIES - 1;
        border |= row_starts[q_last < end ? q_last : end] > kv_start;
#endif
        float p[2][4][4], d[2][4][4];
#pragma unroll
        for (u32 m = 0; m < 2; m++) clear(p[m]);
        multiply_transposed(p, q_tile, down, k_tile, across);
#pragma unroll
        for (u32 m = 0; m < 2; m++)
#pragma unroll
            for (u32 r = 0; r < 2; r++) {
                const u32 row = down + m * 16 + (lane >> 2) + 8 * r;
                const float offset = log_sums[row] * LOG2E;
                u32 row_start = 0;
#ifdef MASKED
                if (border) row_start = row_starts[q_start + row < end ? q_start + row : end];
#endif
#pragma unroll
                for (u32 n = 0; n < 4; n++) {
#pragma unroll
                    for (u32 c = 0; c < 2; c++) {
                        const u32 key = kv_start + across + n * 8 + (lane & 3) * 2 + c;
                        const float value = exp2_fast(p[m][n][2 * r + c] * scale2 - offset);
                        p[m][n][2 * r + c] = border && (key > q_start + row || key < row_start) ? 0.0f : value;
                    }
                    store_shared4(piece_at(p_tile, row, across / 8 + n) + (lane & 3) * 4,
                                  pack2<Real>(p[m][n][2 * r], p[m][n][2 * r + 1]));
                }
            }
#pragma unroll
        for (u32 m = 0; m < 2; m++) clear(d[m]);
        multiply_transposed(d, o_tile, down, v_tile, across);
#pragma unroll
        for (u32 m = 0; m < 2; m++)
#pragma unroll
            for (u32 r = 0; r < 2; r++) {
                const u32 row = down + m * 16 + (lane >> 2) + 8 * r;
                const float minus = log_sums[QUERIES + row];
#pragma unroll
                for (u32 n = 0; n < 4; n++)
                    store_shared4(piece_at(d_tile, row, across / 8 + n) + (lane & 3) * 4,
                                  pack2<Real>(p[m][n][2 * r] * (d[m][n][2 * r] - minus),
                                              p[m][n][2 * r + 1] * (d[m][n][2 * r + 1] - minus)));
            }
        const u32 head = kv_head * group + step / per_head;
        const u32 tile = (batch_index * shape.heads + head) * query_tiles + q_index;
        const u32 before = q_start / KEYS - key_tile;  // blocks that add to this tile before this one
        bool closes = key_tile == 0;
#ifdef MASKED
        closes = row_starts[q_start] >= kv_start;
#endif
        if (threadIdx.x == 0) {
            // The last step's sums were written long ago.
            if (added != nullptr) store_release(added, added_count);
            while (load_acquire(turns + 1 + tile) != before) {}
        }
        added = closes ? nullptr : turns + 1 + tile;
        added_count = before + 1;
        __syncthreads();
        float d_query[2][4][4];
        float* own_sums = sums + (u64)tile * (QUERIES * HEAD) + (warp * 256 + lane) * 4;
#pragma unroll
        for (u32 m = 0; m < 2; m++) {
            if (before == 0) {
                clear(d_query[m]);
            } else {
#pragma unroll
                for (u32 n = 0; n < 4; n++) load_sums(d_query[m][n], own_sums + (m * 4 + n) * 128);
            }
        }
        multiply_columns(d_value, p_tile, key_row / 8, o_tile, half);
        multiply_columns(d_key, d_tile, key_row / 8, q_tile, half);
        multiply_rows(d_query, d_tile, down, k_tile, across / 8);
        if (!closes) {
#pragma unroll
            for (u32 m = 0; m < 2; m++)
#pragma unroll
                for (u32 n = 0; n < 4; n++) store_sums(own_sums + (m * 4 + n) * 128, d_query[m][n]);
        } else {
#pragma unroll
            for (u32 m = 0; m < 2; m++)
#pragma unroll
                for (u32 r = 0; r < 2; r++) {
                    const u32 row = q_start + down + m * 16 + (lane >> 2) + 8 * r;
                    Real* target = d_qkv + ((u64)batch_index * shape.sequence + row) * stride +
                                   (u64)head * shape.head_dim;
#pragma unroll
                    for (u32 n = 0; n < 4; n++) {
                        const u32 column = across + n * 8 + (lane & 3) * 2;
                        if (row >= shape.sequence || column >= shape.head_dim) continue;
                        const u32 word = pack2<Real>(d_query[m][n][2 * r] * shape.scale,
                                                     d_query[m][n][2 * r + 1] * shape.scale);
                        if (shape.aligned) {
                            *(u32*)(target + column) = word;
                        } else {
                            target[column].bits = (u16)word;
                            target[column + 1].bits = (u16)(word >> 16);
                        }
                    }
                }
        }
    }
    __syncthreads();
    if (threadIdx.x == 0 && added != nullptr) store_release(added, added_count);
    // Each warp stages its own part of the key and value tiles, which nobody reads any more.
    Real* target = d_qkv + ((u64)batch_index * shape.sequence + kv_start + key_row) * stride;
    const u32 left = rows_left(shape.sequence, kv_start + key_row);
#pragma unroll
    for (u32 m = 0; m < 2; m++) {
        stage_rows(k_tile, key_row + m * 16, d_key[m], shape.scale, shape.scale, half);
        stage_rows(v_tile, key_row + m * 16, d_value[m], 1.0f, 1.0f, half);
    }
    store_rows<HALF>(k_tile, key_row, 32, target + key_column, stride, left, half * 8, shape, half);
    store_rows<HALF>(v_tile, key_row, 32, target + value_column, stride, left, half * 8, shape, half);
}
