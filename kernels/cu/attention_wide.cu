// The backward of fused causal attention where a block may have 160 KiB of shared memory: tiles of 128 keys and
// eight warps. Options: those of attention_tiles.cuh, KEYS (64 or 128) and ORDERED.
//
// A warp computes 32 rows of every product, so that an operand read from shared memory is used twice:
// attention_backward.cu is bound by those reads. For that the probabilities P and the score gradients dS of a
// tile pass through shared memory.
//
// dK and dV: one block owns 128 keys and walks the group's query heads and the query tiles from the diagonal down.
// dQ without ORDERED: a kernel of its own computes S and dP once more. With ORDERED the same kernel adds to f32
// sums in scratch, one block after the other: a query tile's sum begins with its diagonal tile of keys and ends
// with its first one, whose block writes the result. A block walks down its query tiles one step behind the
// block of the next keys, so it hardly ever waits; blocks take their keys from a counter, last keys first, so
// whom a block waits for has begun before it.
//
// spills allowed: attention_backward_wide with -DHEAD=128: a few words outside of the products
// spills allowed: attention_backward_wide with -DHEAD=64: as above, with KEYS 64
// spills allowed: attention_backward_wide_q with -DHEAD=128: as above
// spills allowed: attention_backward_wide_q with -DHEAD=64: as above, on sm_80 and sm_100 only

constexpr u32 QUERIES = 64;                                  // of a step
constexpr u32 WIDE = KEYS * 2;                               // threads
constexpr u32 DOWN = QUERIES / 32, ACROSS = KEYS / 16 / DOWN;  // warps over S, dP and dQ
constexpr u32 SCORES = KEYS / ACROSS / 8;                    // accumulators of 8 columns of a warp's scores
constexpr u32 HALF = HEAD / 16;                              // of a warp's dK and dV (KEYS/32 × 2 warps)
constexpr u32 SHARE = HEAD / ACROSS / 8;                     // of a warp's dQ
constexpr u32 WIDE_BLOCKS = KEYS == 128 ? 1 : HEAD == 64 ? 3 : 2;

// A tile of P or dS: QUERIES rows of KEYS columns.
__device__ __forceinline__ u32 cell_at(u32 tile, u32 row, u32 piece) {
    return tile + row * (KEYS * 2) + ((piece ^ (row & 7)) << 4);
}
// 16 rows by 16 columns as the left operand, and 16 columns by 16 rows as the left operand of the transpose.
__device__ __forceinline__ void left_cells(u32 (&a)[4], u32 tile, u32 row, u32 piece) {
    const u32 lane = threadIdx.x & 31;
    load_matrices(a, ((tile + cell_at(0, lane & 15, lane >> 4)) ^ (piece << 4)) + row * (KEYS * 2));
}
__device__ __forceinline__ void left_cells_transposed(u32 (&a)[4], u32 tile, u32 row, u32 piece) {
    const u32 lane = threadIdx.x & 31;
    const u32 place = cell_at(0, (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
    load_matrices_transposed(a, ((tile + place) ^ (piece << 4)) + row * (KEYS * 2));
}

// c[32, 8·N] += 32 rows of `left` times the transpose of 8·N rows of `right`, over HEAD columns.
template <u32 N>
__device__ __forceinline__ void multiply_wide(float (&c)[2][N][4], u32 left, u32 right) {
#pragma unroll
    for (u32 k = 0; k < HEAD / 16; k++) {
        u32 a[2][4];
#pragma unroll
        for (u32 m = 0; m < 2; m++) left_operand(a[m], left, m * 16, 2 * k);
#pragma unroll
        for (u32 n = 0; n < N / 2; n++) {
            u32 b[4];
            right_operand_transposed(b, right, n * 16, 2 * k);
#pragma unroll
            for (u32 m = 0; m < 2; m++) {
                multiply(c[m][2 * n], a[m], b[0], b[1], Real());
                multiply(c[m][2 * n + 1], a[m], b[2], b[3], Real());
            }
        }
    }
}
// c[32, 8·N] += 32 columns of `cells`, transposed, times the QUERIES rows of `right`, columns from `first` on.
template <u32 N>
__device__ __forceinline__ void multiply_down(float (&c)[2][N][4], u32 cells, u32 cell_piece, u32 right, u32 first) {
#pragma unroll
    for (u32 k = 0; k < QUERIES / 16; k++) {
        u32 a[2][4];
#pragma unroll
        for (u32 m = 0; m < 2; m++) left_cells_transposed(a[m], cells, k * 16, cell_piece + 2 * m);
#pragma unroll
        for (u32 n = 0; n < N / 2; n++) {
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

#ifdef ORDERED
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
#endif

#if HEAD < 256
// `sums` f32 [B·H·tiles of queries, QUERIES·HEAD] and `turns` u32 [1 + B·H·tiles of queries], zeroed (the counter
// and how many blocks have added to each tile), are used with ORDERED only.
extern "C" __global__ __launch_bounds__(WIDE, WIDE_BLOCKS) void attention_backward_wide(
    const Real* __restrict__ qkv, const Real* __restrict__ d_out, const float* __restrict__ stats,
    const float* __restrict__ delta, Real* __restrict__ d_qkv, const u32* __restrict__ starts, Shape shape,
    float* __restrict__ sums, u32* __restrict__ turns) {
    extern __shared__ __align__(1024) u8 memory[];
    constexpr u32 KEY_BYTES = KEYS * HEAD * 2, QUERY_BYTES = QUERIES * HEAD * 2, CELL_BYTES = QUERIES * KEYS * 2;
    const u32 k_tile = shared_address(memory), v_tile = k_tile + KEY_BYTES, p_cells = v_tile + KEY_BYTES;
    // Two stages of (Q, dO), then two of (log-sum-exp, delta).
    const u32 d_cells = p_cells + CELL_BYTES, stages = d_cells + CELL_BYTES;
    float* row_values = (float*)(memory + 2 * KEY_BYTES + 2 * CELL_BYTES + 4 * QUERY_BYTES);
    const u32 row_address = shared_address(row_values);
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 down = warp / ACROSS * 32, across = warp % ACROSS * (SCORES * 8);  // of the scores
    const u32 key_row = warp / 2 * 32, half = warp % 2 * HALF;                   // of dK and dV: row, piece
    const u32 key_tiles = (shape.sequence + KEYS - 1) / KEYS, query_tiles = (shape.sequence + QUERIES - 1) / QUERIES;

    u32 index = blockIdx.x;
#ifdef ORDERED
    if (threadIdx.x == 0) *(u32*)row_values = atomicAdd(turns, 1);
    __syncthreads();
    index = *(u32*)row_values;
    __syncthreads();
#endif
    const u32 of_head = index / key_tiles, batch_index = of_head / shape.kv_heads, kv_head = of_head % shape.kv_heads;
#ifdef ORDERED
    const u32 key_tile = key_tiles - 1 - index % key_tiles;
#else
    const u32 key_tile = index % key_tiles;
#endif
    const u32 kv_start = key_tile * KEYS, group = shape.heads / shape.kv_heads;
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
        load_tile<QUERIES, WIDE>(stages + stage * 2 * QUERY_BYTES,
                                 batch + (u64)head * shape.head_dim + q_start * stride, stride, left, shape);
        load_tile<QUERIES, WIDE>(stages + (stage * 2 + 1) * QUERY_BYTES,
                                 upstream + (u64)head * shape.head_dim + q_start * out_stride, out_stride, left, shape);
        // Rows beyond the end get 0: their probability is then 1 and multiplies rows of zeros.
        const u64 rows = ((u64)batch_index * shape.heads + head) * shape.sequence + q_start;
        const u32 row = threadIdx.x % QUERIES, kind = threadIdx.x / QUERIES;
        const u32 target = row_address + ((stage * 2 + kind) * QUERIES + row) * 4, from = row < left ? row : 0;
        if (kind < 2) copy4(target, (kind == 0 ? stats : delta) + rows + from, row < left);
    };
    load_tile<KEYS, WIDE>(k_tile, batch + key_column + kv_start * stride, stride, kv_left, shape);
    load_tile<KEYS, WIDE>(v_tile, batch + value_column + kv_start * stride, stride, kv_left, shape);
    start(0);
    copies_commit();

    float d_key[2][HALF][4], d_value[2][HALF][4];
#pragma unroll
    for (u32 m = 0; m < 2; m++) {
        clear(d_key[m]);
        clear(d_value[m]);
    }
#ifdef ORDERED
    u32 *added = nullptr, added_count = 0;  // the last step's tile, to be released
#endif
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
        float p[2][SCORES][4], d[2][SCORES][4];
#pragma unroll
        for (u32 m = 0; m < 2; m++) clear(p[m]);
        multiply_wide(p, q_tile + down * (HEAD * 2), k_tile + across * (HEAD * 2));
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
                for (u32 n = 0; n < SCORES; n++) {
#pragma unroll
                    for (u32 c = 0; c < 2; c++) {
                        const u32 key = kv_start + across + n * 8 + (lane & 3) * 2 + c;
                        const float value = exp2_fast(p[m][n][2 * r + c] * scale2 - offset);
                        p[m][n][2 * r + c] = border && (key > q_start + row || key < row_start) ? 0.0f : value;
                    }
                    store_shared4(cell_at(p_cells, row, across / 8 + n) + (lane & 3) * 4,
                                  pack2<Real>(p[m][n][2 * r], p[m][n][2 * r + 1]));
                }
            }
#pragma unroll
        for (u32 m = 0; m < 2; m++) clear(d[m]);
        multiply_wide(d, o_tile + down * (HEAD * 2), v_tile + across * (HEAD * 2));
#pragma unroll
        for (u32 m = 0; m < 2; m++)
#pragma unroll
            for (u32 r = 0; r < 2; r++) {
                const u32 row = down + m * 16 + (lane >> 2) + 8 * r;
                const float minus = log_sums[QUERIES + row];
#pragma unroll
                for (u32 n = 0; n < SCORES; n++)
                    store_shared4(cell_at(d_cells, row, across / 8 + n) + (lane & 3) * 4,
                                  pack2<Real>(p[m][n][2 * r] * (d[m][n][2 * r] - minus),
                                              p[m][n][2 * r + 1] * (d[m][n][2 * r + 1] - minus)));
            }
#ifdef ORDERED
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
#endif
        __syncthreads();
#ifdef ORDERED
        float d_query[2][SHARE][4];
        float* own_sums = sums + (u64)tile * (QUERIES * HEAD) + (warp * 2 * SHARE * 32 + lane) * 4;
#pragma unroll
        for (u32 m = 0; m < 2; m++) {
            if (before == 0) {
                clear(d_query[m]);
            } else {
#pragma unroll
                for (u32 n = 0; n < SHARE; n++) load_sums(d_query[m][n], own_sums + (m * SHARE + n) * 128);
            }
        }
#endif
        multiply_down(d_value, p_cells, key_row / 8, o_tile, half);
        multiply_down(d_key, d_cells, key_row / 8, q_tile, half);
#ifdef ORDERED
        const u32 share = warp % ACROSS * SHARE;
#pragma unroll
        for (u32 k = 0; k < KEYS / 16; k++) {
            u32 a[2][4];
#pragma unroll
            for (u32 m = 0; m < 2; m++) left_cells(a[m], d_cells + down * (KEYS * 2), m * 16, 2 * k);
#pragma unroll
            for (u32 n = 0; n < SHARE / 2; n++) {
                u32 b[4];
                right_operand(b, k_tile, k * 16, share + 2 * n);
#pragma unroll
                for (u32 m = 0; m < 2; m++) {
                    multiply(d_query[m][2 * n], a[m], b[0], b[1], Real());
                    multiply(d_query[m][2 * n + 1], a[m], b[2], b[3], Real());
                }
            }
        }
        if (!closes) {
#pragma unroll
            for (u32 m = 0; m < 2; m++)
#pragma unroll
                for (u32 n = 0; n < SHARE; n++) store_sums(own_sums + (m * SHARE + n) * 128, d_query[m][n]);
        } else {
#pragma unroll
            for (u32 m = 0; m < 2; m++)
#pragma unroll
                for (u32 r = 0; r < 2; r++) {
                    const u32 row = q_start + down + m * 16 + (lane >> 2) + 8 * r;
                    Real* target = d_qkv + ((u64)batch_index * shape.sequence + row) * stride +
                                   (u64)head * shape.head_dim;
#pragma unroll
                    for (u32 n = 0; n < SHARE; n++) {
                        const u32 column = (share + n) * 8 + (lane & 3) * 2;
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
#endif
    }
    __syncthreads();
#ifdef ORDERED
    if (threadIdx.x == 0 && added != nullptr) store_release(added, added_count);
#endif
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

#ifndef ORDERED
// dQ of 128 queries, over tiles of 32 keys up to the diagonal. A warp owns 32 queries.
constexpr u32 SHORT = 32;

extern "C" __global__ __launch_bounds__(128, HEAD == 64 ? 3 : 2) void attention_backward_wide_q(
    const Real* __restrict__ qkv, const Real* __restrict__ d_out, const float* __restrict__ stats,
    const float* __restrict__ delta, Real* __restrict__ d_qkv, const u32* __restrict__ starts, Shape shape) {
    extern __shared__ __align__(1024) u8 memory[];
    constexpr u32 BYTES = 128 * HEAD * 2, SHORT_BYTES = SHORT * HEAD * 2;
    const u32 q_tile = shared_address(memory), o_tile = q_tile + BYTES, stages = o_tile + BYTES;
    const u32 lane = threadIdx.x & 31, own = (threadIdx.x >> 5) * 32;
    // The longest rows first: the tail of the launch is short.
    const u32 q_start = (gridDim.x - 1 - blockIdx.x) * 128;
    const u32 head = blockIdx.y, kv_head = head / (shape.heads / shape.kv_heads);
    const u64 stride = shape.packed, out_stride = (u64)shape.heads * shape.head_dim;
    const Real* batch = qkv + (u64)blockIdx.z * shape.sequence * stride;
    const Real* keys = batch + (u64)(shape.heads + kv_head) * shape.head_dim;
    const Real* values = keys + (u64)shape.kv_heads * shape.head_dim;
    const u32 left = rows_left(shape.sequence, q_start), first_row = q_start + own, last_row = first_row + 31;
    const u32 q_end = left < 128 ? shape.sequence : q_start + 128, tiles = (q_end + SHORT - 1) / SHORT;
    const float scale2 = shape.scale * LOG2E;
    u32 tile_first = 0, warp_first = 0, warp_border = 0;
#ifdef MASKED
    const u32* row_starts = starts + (u64)blockIdx.z * shape.sequence;
    const u32 end = shape.sequence - 1;
    tile_first = row_starts[q_start] / SHORT;
    warp_first = row_starts[first_row < end ? first_row : end];
    warp_border = row_starts[last_row < end ? last_row : end];
#endif
    auto start = [&](u32 j) {
        const u32 stage = stages + (j & 1) * 2 * SHORT_BYTES, rows = rows_left(shape.sequence, j * SHORT);
        load_tile<SHORT>(stage, keys + (u64)j * SHORT * stride, stride, rows, shape);
        load_tile<SHORT>(stage + SHORT_BYTES, values + (u64)j * SHORT * stride, stride, rows, shape);
    };
    load_tile<128>(q_tile, batch + (u64)head * shape.head_dim + q_start * stride, stride, left, shape);
    load_tile<128>(o_tile,
                   d_out + ((u64)blockIdx.z * shape.sequence + q_start) * out_stride + (u64)head * shape.head_dim,
                   out_stride, left, shape);
    start(tile_first);
    copies_commit();

    float offset[2][2], minus[2][2];
#pragma unroll
    for (u32 m = 0; m < 2; m++)
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            const u32 row = first_row + m * 16 + (lane >> 2) + 8 * r;
            const u64 at = ((u64)blockIdx.z * shape.heads + head) * shape.sequence + row;
            offset[m][r] = row < shape.sequence ? stats[at] * LOG2E : 0.0f;
            minus[m][r] = row < shape.sequence ? delta[at] : 0.0f;
        }
    float d_query[2][PIECES][4];
#pragma unroll
    for (u32 m = 0; m < 2; m++) clear(d_query[m]);
    for (u32 j = tile_first; j < tiles; j++) {
        copies_wait<0>();
        __syncthreads();
        if (j + 1 < tiles) {
            start(j + 1);
            copies_commit();
        }
        const u32 kv_start = j * SHORT;
        if (kv_start > last_row || kv_start + SHORT <= warp_first) continue;
        const u32 k_tile = stages + (j & 1) * 2 * SHORT_BYTES, v_tile = k_tile + SHORT_BYTES;
        float p[2][SHORT / 8][4], d[2][SHORT / 8][4];
#pragma unroll
        for (u32 m = 0; m < 2; m++) {
            clear(p[m]);
            clear(d[m]);
        }
        multiply_wide(p, q_tile + own * (HEAD * 2), k_tile);
        multiply_wide(d, o_tile + own * (HEAD * 2), v_tile);
        const bool border = kv_start + SHORT - 1 > first_row || kv_start < warp_border;
#pragma unroll
        for (u32 m = 0; m < 2; m++)
#pragma unroll
            for (u32 r = 0; r < 2; r++) {
                const u32 row = first_row + m * 16 + (lane >> 2) + 8 * r;
                u32 row_start = 0;
#ifdef MASKED
                if (border) row_start = row_starts[row < end ? row : end];
#endif
#pragma unroll
                for (u32 n = 0; n < SHORT / 8; n++)
#pragma unroll
                    for (u32 c = 0; c < 2; c++) {
                        const u32 key = kv_start + n * 8 + (lane & 3) * 2 + c;
                        const float probability = exp2_fast(p[m][n][2 * r + c] * scale2 - offset[m][r]);
                        const float gradient = probability * (d[m][n][2 * r + c] - minus[m][r]);
                        d[m][n][2 * r + c] = border && (key > row || key < row_start) ? 0.0f : gradient;
                    }
            }
#pragma unroll
        for (u32 k = 0; k < SHORT / 16; k++) {
            u32 a[2][4];
#pragma unroll
            for (u32 m = 0; m < 2; m++) as_left(a[m], d[m][2 * k], d[m][2 * k + 1]);
#pragma unroll
            for (u32 n = 0; n < PIECES / 2; n++) {
                u32 b[4];
                right_operand(b, k_tile, k * 16, 2 * n);
#pragma unroll
                for (u32 m = 0; m < 2; m++) {
                    multiply(d_query[m][2 * n], a[m], b[0], b[1], Real());
                    multiply(d_query[m][2 * n + 1], a[m], b[2], b[3], Real());
                }
            }
        }
    }
    // This warp alone reads its rows of the query tile, and it is done with them.
#pragma unroll
    for (u32 m = 0; m < 2; m++) stage_rows(q_tile, own + m * 16, d_query[m], shape.scale, shape.scale);
    store_rows<PIECES>(q_tile, own, 32,
                       d_qkv + ((u64)blockIdx.z * shape.sequence + first_row) * stride + (u64)head * shape.head_dim,
                       stride, rows_left(shape.sequence, first_row), 0, shape);
}
#endif
#endif
