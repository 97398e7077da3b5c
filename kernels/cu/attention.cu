// Fused causal attention on tensor cores (mma.sync): the forward, and what the backwards share. Options: those of
// attention_tiles.cuh, and STAGES (1 or 2: tiles of keys and of values in shared memory).
//
// The method is FlashAttention-2 (Dao, 2023): tiles of scores live in registers, the softmax is rescaled as
// its maximum grows, and the backward recomputes the scores from the saved log-sum-exp. Everything is
// deterministic: one block owns its rows of the output, and all sums have one order.
//
// spills allowed: attention_forward with -DHEAD=64: a few words outside of the products, for a third block
// spills allowed: attention_forward with -DHEAD=128: a few words outside of the products

// A warp owns MT·16 query rows. With one stage, the keys of the next tile travel while the softmax is taken and
// the values of this one while the scores are; with two, the whole next tile travels meanwhile, and a tile needs
// one barrier.
constexpr u32 MT = HEAD == 256 ? 1 : 2;
constexpr u32 ROWS = MT * TILE;
constexpr u32 FORWARD_BLOCKS = HEAD == 256 ? 1 : HEAD == 64 && STAGES == 2 ? 3 : 2;

// Sums stay relative to an older maximum until a score exceeds it by this many powers of two: rescaling them is
// a seventh of a tile's instructions, and f32 has room.
constexpr float ROOM = 8.0f;

extern "C" __global__ __launch_bounds__(128, FORWARD_BLOCKS) void attention_forward(
    const Real* __restrict__ qkv, Real* __restrict__ out, float* __restrict__ stats, const u32* __restrict__ starts,
    Shape shape) {
    extern __shared__ __align__(1024) u8 memory[];
    constexpr u32 BYTES = TILE * HEAD * 2;
    const u32 q_tile = shared_address(memory), stages = q_tile + ROWS * HEAD * 2;
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    // The longest rows first: the tail of the launch is short.
    const u32 q_start = (gridDim.x - 1 - blockIdx.x) * ROWS;
    const u32 head = blockIdx.y, kv_head = head / (shape.heads / shape.kv_heads);
    const u64 stride = shape.packed;
    const Real* batch = qkv + (u64)blockIdx.z * shape.sequence * stride;
    const Real* keys = batch + (u64)(shape.heads + kv_head) * shape.head_dim;
    const Real* values = keys + (u64)shape.kv_heads * shape.head_dim;
    const u32 own = warp * (16 * MT), first_row = q_start + own, last_row = first_row + 16 * MT - 1;
    const u32 tiles_all = (shape.sequence + TILE - 1) / TILE, tiles_seen = (q_start + ROWS) / TILE;
    const u32 tiles = tiles_seen < tiles_all ? tiles_seen : tiles_all;
    const float scale2 = shape.scale * LOG2E;
    const u32 own_tile = q_tile + own * (HEAD * 2);

    // Starts never decrease: a tile's first row sees furthest back.
    u32 tile_first = 0, warp_first = 0, warp_border = 0;
#ifdef MASKED
    u32 row_start[MT][2];
    const u32* row_starts = starts + (u64)blockIdx.z * shape.sequence;
    const u32 end = shape.sequence - 1;
    tile_first = row_starts[q_start] / TILE;
    warp_first = row_starts[first_row < end ? first_row : end];
    warp_border = row_starts[last_row < end ? last_row : end];
#pragma unroll
    for (u32 m = 0; m < MT; m++)
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            const u32 row = first_row + m * 16 + (lane >> 2) + 8 * r;
            row_start[m][r] = row_starts[row < end ? row : end];
        }
#endif
    auto load = [&](u32 tile, const Real* source, u32 j) {
        load_tile<TILE>(tile, source + (u64)j * TILE * stride, stride, rows_left(shape.sequence, j * TILE), shape);
    };
    load_tile<ROWS>(q_tile, batch + (u64)head * shape.head_dim + q_start * stride, stride,
                    rows_left(shape.sequence, q_start), shape);
    load(stages, keys, tile_first);
    if (STAGES == 2) load(stages + 2 * BYTES, values, tile_first);
    copies_commit();

    float sums[MT][PIECES][4], most[MT][2], total[MT][2];
#pragma unroll
    for (u32 m = 0; m < MT; m++) {
        clear(sums[m]);
        most[m][0] = most[m][1] = -INFINITE;
        total[m][0] = total[m][1] = 0.0f;
    }
    for (u32 j = tile_first; j < tiles; j++) {
        const u32 kv_start = j * TILE, stage = STAGES == 2 ? (j - tile_first) & 1 : 0;
        const u32 k_tile = stages + stage * BYTES, v_tile = stages + (STAGES + stage) * BYTES;
        // Tiles right of the diagonal of this warp's rows, or before their documents, hold nothing for it.
        const bool active = kv_start <= last_row && kv_start + TILE > warp_first;
        copies_wait<0>();
        __syncthreads();
        if (STAGES == 1) {
            load(v_tile, values, j);
            copies_commit();
        } else if (j + 1 < tiles) {
            load(stages + (stage ^ 1) * BYTES, keys, j + 1);
            load(stages + (2 + (stage ^ 1)) * BYTES, values, j + 1);
            copies_commit();
        }
        float s[MT][8][4];
        if (active) {
#pragma unroll
            for (u32 m = 0; m < MT; m++) clear(s[m]);
#pragma unroll
            for (u32 k = 0; k < HEAD / 16; k++) {
                u32 a[MT][4];
#pragma unroll
                for (u32 m = 0; m < MT; m++) left_operand(a[m], own_tile, m * 16, 2 * k);
#pragma unroll
                for (u32 n = 0; n < 4; n++) {
                    u32 b[4];
                    right_operand_transposed(b, k_tile, n * 16, 2 * k);
#pragma unroll
                    for (u32 m = 0; m < MT; m++) {
                        multiply(s[m][2 * n], a[m], b[0], b[1], Real());
                        multiply(s[m][2 * n + 1], a[m], b[2], b[3], Real());
                    }
                }
            }
        }
        if (STAGES == 1) {
            copies_wait<0>();
            __syncthreads();
            if (j + 1 < tiles) {
                load(k_tile, keys, j + 1);
                copies_commit();
            }
        }
        if (active) {
            if (kv_start + TILE - 1 > first_row || kv_start < warp_border) {
#pragma unroll
                for (u32 m = 0; m < MT; m++)
#pragma unroll
                    for (u32 r = 0; r < 2; r++) {
                        const u32 row = first_row + m * 16 + (lane >> 2) + 8 * r;
#pragma unroll
                        for (u32 n = 0; n < 8; n++)
#pragma unroll
                            for (u32 c = 0; c < 2; c++) {
                                const u32 key = kv_start + n * 8 + (lane & 3) * 2 + c;
                                bool hidden = key > row;
#ifdef MASKED
                                hidden |= key < row_start[m][r];
#endif
                                if (hidden) s[m][n][2 * r + c] = -INFINITE;
                            }
                    }
            }
#pragma unroll
            for (u32 m = 0; m < MT; m++) {
                float tile_most[2];
#pragma unroll
                for (u32 r = 0; r < 2; r++) {
                    tile_most[r] = -INFINITE;
#pragma unroll
                    for (u32 n = 0; n < 8; n++)
                        tile_most[r] = fmaxf(tile_most[r], fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
                    tile_most[r] = fmaxf(tile_most[r], __shfl_xor_sync(0xffffffffu, tile_most[r], 1));
                    tile_most[r] = fmaxf(tile_most[r], __shfl_xor_sync(0xffffffffu, tile_most[r], 2));
                }
                const bool grows = fmaxf(tile_most[0] - most[m][0], tile_most[1] - most[m][1]) * scale2 > ROOM;
                if (__any_sync(0xffffffffu, grows)) {
#pragma unroll
                    for (u32 r = 0; r < 2; r++) {
                        const float now = fmaxf(most[m][r], tile_most[r]);
                        // With documents a row may have seen nothing yet.
                        const float shrink = now == most[m][r] ? 1.0f : exp2_fast((most[m][r] - now) * scale2);
                        most[m][r] = now;
                        total[m][r] *= shrink;
#pragma unroll
                        for (u32 n = 0; n < PIECES; n++) {
                            sums[m][n][2 * r] *= shrink;
                            sums[m][n][2 * r + 1] *= shrink;
                        }
                    }
                }
#pragma unroll
                for (u32 r = 0; r < 2; r++) {
                    float offset = most[m][r] * scale2;
#ifdef MASKED
                    if (most[m][r] == -INFINITE) offset = 0.0f;
#endif
                    float part = 0.0f;
#pragma unroll
                    for (u32 n = 0; n < 8; n++)
#pragma unroll
                        for (u32 c = 0; c < 2; c++) {
                            const float p = exp2_fast(s[m][n][2 * r + c] * scale2 - offset);
                            s[m][n][2 * r + c] = p;
                            part += p;
                        }
                    total[m][r] += part;
                }
            }
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                u32 a[MT][4];
#pragma unroll
                for (u32 m = 0; m < MT; m++) as_left(a[m], s[m][2 * k], s[m][2 * k + 1]);
#pragma unroll
                for (u32 n = 0; n < PIECES / 2; n++) {
                    u32 b[4];
                    right_operand(b, v_tile, k * 16, 2 * n);
#pragma unroll
                    for (u32 m = 0; m < MT; m++) {
                        multiply(sums[m][2 * n], a[m], b[0], b[1], Real());
                        multiply(sums[m][2 * n + 1], a[m], b[2], b[3], Real());
                    }
                }
            }
        }
    }
    float* row_stats = stats + ((u64)blockIdx.z * shape.heads + head) * shape.sequence;
    // This warp alone reads its rows of the query tile; now it puts its results there.
    __syncwarp();
#pragma unroll
    for (u32 m = 0; m < MT; m++) {
        float inverse[2];
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            float all = total[m][r];
            all += __shfl_xor_sync(0xffffffffu, all, 1);
            all += __shfl_xor_sync(0xffffffffu, all, 2);
            inverse[r] = 1.0f / all;
            const u32 row = first_row + m * 16 + (lane >> 2) + 8 * r;
            if ((lane & 3) == 0 && row < shape.sequence) row_stats[row] = most[m][r] * shape.scale + logf(all);
        }
        stage_rows(q_tile, own + m * 16, sums[m], inverse[0], inverse[1]);
    }
    const u64 out_stride = (u64)shape.heads * shape.head_dim;
    store_rows<PIECES>(q_tile, own, 16 * MT,
                       out + ((u64)blockIdx.z * shape.sequence + first_row) * out_stride + (u64)head * shape.head_dim,
                       out_stride, rows_left(shape.sequence, first_row), 0, shape);
}

// delta[b,h,s] = Σ_d out·d_out, one warp a row.
extern "C" __global__ __launch_bounds__(128) void attention_delta(const u32* __restrict__ out,
                                                                  const u32* __restrict__ d_out,
                                                                  float* __restrict__ delta, Shape shape, u64 rows) {
    const u64 index = (u64)blockIdx.x * 4 + (threadIdx.x >> 5);
    if (index >= rows) return;
    const u32 pairs = shape.head_dim / 2;
    float sum = 0.0f;
    for (u32 i = threadIdx.x & 31; i < pairs; i += 32) {
        const u32 a = out[index * pairs + i], b = d_out[index * pairs + i];
        sum += low_half(a, Real()) * low_half(b, Real()) + high_half(a, Real()) * high_half(b, Real());
    }
    sum = warp_sum(sum);
    if ((threadIdx.x & 31) == 0) {
        const u64 token = index / shape.heads, head = index % shape.heads;
        delta[((token / shape.sequence) * shape.heads + head) * shape.sequence + token % shape.sequence] = sum;
    }
}

