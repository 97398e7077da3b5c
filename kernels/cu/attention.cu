// Fused causal attention on tensor cores (mma.sync), forward and backward. Options: REAL (f16 or bf16) and
// HEAD (64, 128 or 256: the head dimension padded with zeros in shared memory).
//
// The method is FlashAttention-2 (Dao, 2023): tiles of scores live in registers, the softmax is rescaled as
// its maximum grows, and the backward recomputes the scores from the saved log-sum-exp. Everything is
// deterministic: one block owns its rows of the output, dK and dV are summed over the query heads of a
// group and the query tiles in order, and dQ has a kernel of its own that recomputes the scores once more
// instead of adding atomically.
//
// spills allowed: attention_backward_kv with -DHEAD=256: rare heads; a few words outside of the inner products
// spills allowed: attention_backward_q with -DHEAD=256: as above
// spills allowed: attention_backward_kv with -DHEAD=128: on sm_80 and sm_100 only; none on sm_90a
//
// A tile in shared memory has HEAD columns of 16 bits; its 16-byte pieces are permuted (piece ^ row & 7) so
// that ldmatrix meets no bank twice.

struct Shape {
    u32 sequence, heads, kv_heads, head_dim;
    u32 packed;   // (H + 2K)·D
    u32 aligned;  // rows of q, k, v, out start at multiples of 16 bytes and D is a multiple of 8
    float scale;  // 1/√D
};

constexpr u32 TILE = 64;
constexpr u32 PIECES = HEAD / 8;
constexpr u32 THREADS = 128;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ u32 piece_at(u32 tile, u32 row, u32 piece) {
    return tile + row * (HEAD * 2) + ((piece ^ (row & 7)) << 4);
}

__device__ __forceinline__ void copy16(u32 target, const void* source, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(valid ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void copy4(u32 target, const void* source, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source), "r"(valid ? 4 : 0)
                 : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Starts copying `rows` rows of D elements, `stride` apart; rows from `valid` on and columns from D on are 0.
template <u32 ROWS>
__device__ __forceinline__ void load_tile(u32 tile, const Real* source, u64 stride, u32 valid, const Shape& shape) {
#pragma unroll 4
    for (u32 i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
        const u32 row = i / PIECES, piece = i % PIECES;
        const bool inside = row < valid && piece * 8 < shape.head_dim;
        const Real* at = source + (inside ? row * stride + piece * 8 : 0);
        const u32 target = piece_at(tile, row, piece);
        if (shape.aligned) {
            copy16(target, at, inside);
        } else {
            u32 words[4] = {0, 0, 0, 0};
#pragma unroll
            for (u32 e = 0; e < 8; e++)
                if (inside && piece * 8 + e < shape.head_dim) words[e / 2] |= (u32)at[e].bits << (16 * (e & 1));
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(target), "r"(words[0]), "r"(words[1]),
                         "r"(words[2]), "r"(words[3])
                         : "memory");
        }
    }
}

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// 16 rows by 16 columns as the left operand.
__device__ __forceinline__ void left_operand(u32 (&a)[4], u32 tile, u32 row, u32 piece) {
    const u32 lane = threadIdx.x & 31;
    load_matrices(a, piece_at(tile, row + (lane & 15), piece + (lane >> 4)));
}
// Right operand [k = columns, n = 16 rows]: the product with the tile's transpose.
__device__ __forceinline__ void right_operand_transposed(u32 (&b)[4], u32 tile, u32 row, u32 piece) {
    const u32 lane = threadIdx.x & 31;
    load_matrices(b, piece_at(tile, row + (lane & 7) + ((lane >> 4) << 3), piece + ((lane >> 3) & 1)));
}
// Right operand [k = 16 rows, n = columns]: the product with the tile as it lies.
__device__ __forceinline__ void right_operand(u32 (&b)[4], u32 tile, u32 row, u32 piece) {
    const u32 lane = threadIdx.x & 31;
    load_matrices_transposed(b, piece_at(tile, row + (lane & 15), piece + (lane >> 4)));
}

__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, bf16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, f16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two neighbouring 16×8 accumulators as one 16×16 left operand: the layouts agree register by register.
__device__ __forceinline__ void as_left(u32 (&a)[4], const float (&c)[4], const float (&d)[4]) {
    a[0] = pack2<Real>(c[0], c[1]);
    a[1] = pack2<Real>(c[2], c[3]);
    a[2] = pack2<Real>(d[0], d[1]);
    a[3] = pack2<Real>(d[2], d[3]);
}

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

template <u32 N> __device__ __forceinline__ void clear(float (&c)[N][4]) {
#pragma unroll
    for (u32 n = 0; n < N; n++)
#pragma unroll
        for (u32 e = 0; e < 4; e++) c[n][e] = 0.0f;
}

// 16 rows of accumulators into this warp's own rows of a tile, the rows r and r + 8 scaled apart.
template <u32 N>
__device__ __forceinline__ void stage_rows(u32 tile, u32 row, const float (&c)[N][4], float low, float high) {
    const u32 lane = threadIdx.x & 31;
#pragma unroll
    for (u32 n = 0; n < N; n++) {
        const u32 top = row + (lane >> 2);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(piece_at(tile, top, n) + (lane & 3) * 4),
                     "r"(pack2<Real>(c[n][0] * low, c[n][1] * low))
                     : "memory");
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(piece_at(tile, top + 8, n) + (lane & 3) * 4),
                     "r"(pack2<Real>(c[n][2] * high, c[n][3] * high))
                     : "memory");
    }
}
// Staged rows of this warp to memory: `rows` rows of N pieces to columns first_column.. of `target`, whose
// row 0 is the tile's row `row`.
template <u32 N>
__device__ __forceinline__ void store_rows(u32 tile, u32 row, u32 rows, Real* target, u64 stride, u32 valid,
                                           u32 first_column, const Shape& shape) {
    __syncwarp();
    for (u32 i = threadIdx.x & 31; i < rows * N; i += 32) {
        const u32 r = i / N, piece = i % N, column = first_column + piece * 8;
        if (r >= valid || column >= shape.head_dim) continue;
        u32 words[4];
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                     : "r"(piece_at(tile, row + r, piece))
                     : "memory");
        Real* at = target + r * stride + column;
        if (shape.aligned) {
            *(uint4*)at = make_uint4(words[0], words[1], words[2], words[3]);
        } else {
#pragma unroll
            for (u32 e = 0; e < 8; e++)
                if (column + e < shape.head_dim) at[e].bits = (u16)(words[e / 2] >> (16 * (e & 1)));
        }
    }
}
__device__ __forceinline__ u32 rows_left(u32 sequence, u32 row) { return row < sequence ? sequence - row : 0; }

// Forward. A warp owns MT·16 query rows; the keys of the next tile travel while the softmax is taken, the
// values of this one while the scores are.
constexpr u32 MT = HEAD == 256 ? 1 : 2;
constexpr u32 ROWS = MT * TILE;

extern "C" __global__ __launch_bounds__(128, HEAD == 256 ? 1 : 2) void attention_forward(
    const Real* __restrict__ qkv, Real* __restrict__ out, float* __restrict__ stats, Shape shape) {
    extern __shared__ __align__(128) u8 memory[];
    const u32 q_tile = shared_address(memory);
    const u32 k_tile = q_tile + ROWS * HEAD * 2, v_tile = k_tile + TILE * HEAD * 2;
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

    load_tile<ROWS>(q_tile, batch + (u64)head * shape.head_dim + q_start * stride, stride,
                    rows_left(shape.sequence, q_start), shape);
    load_tile<TILE>(k_tile, keys, stride, rows_left(shape.sequence, 0), shape);
    copies_commit();

    float sums[MT][PIECES][4], most[MT][2], total[MT][2];
#pragma unroll
    for (u32 m = 0; m < MT; m++) {
        clear(sums[m]);
        most[m][0] = most[m][1] = -INFINITE;
        total[m][0] = total[m][1] = 0.0f;
    }
    for (u32 j = 0; j < tiles; j++) {
        const u32 kv_start = j * TILE;
        // Tiles right of the diagonal of this warp's rows hold nothing for it.
        const bool active = kv_start <= last_row;
        copies_wait<0>();
        __syncthreads();
        load_tile<TILE>(v_tile, values + kv_start * stride, stride, rows_left(shape.sequence, kv_start), shape);
        copies_commit();
        float s[MT][8][4];
        if (active) {
#pragma unroll
            for (u32 m = 0; m < MT; m++) clear(s[m]);
#pragma unroll
            for (u32 k = 0; k < HEAD / 16; k++) {
                u32 a[MT][4];
#pragma unroll
                for (u32 m = 0; m < MT; m++) left_operand(a[m], q_tile, own + m * 16, 2 * k);
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
        copies_wait<0>();
        __syncthreads();
        if (j + 1 < tiles) {
            const u32 next = kv_start + TILE;
            load_tile<TILE>(k_tile, keys + next * stride, stride, rows_left(shape.sequence, next), shape);
            copies_commit();
        }
        if (active) {
            const bool diagonal = kv_start + TILE - 1 > first_row;
#pragma unroll
            for (u32 m = 0; m < MT; m++) {
#pragma unroll
                for (u32 r = 0; r < 2; r++) {
                    if (diagonal) {
                        const u32 row = first_row + m * 16 + (lane >> 2) + 8 * r;
#pragma unroll
                        for (u32 n = 0; n < 8; n++)
#pragma unroll
                            for (u32 c = 0; c < 2; c++)
                                if (kv_start + n * 8 + (lane & 3) * 2 + c > row) s[m][n][2 * r + c] = -INFINITE;
                    }
                    float tile_most = -INFINITE;
#pragma unroll
                    for (u32 n = 0; n < 8; n++)
                        tile_most = fmaxf(tile_most, fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
                    tile_most = fmaxf(tile_most, __shfl_xor_sync(0xffffffffu, tile_most, 1));
                    tile_most = fmaxf(tile_most, __shfl_xor_sync(0xffffffffu, tile_most, 2));
                    // Finite: every row sees column 0, which is in the first tile.
                    const float now = fmaxf(most[m][r], tile_most);
                    const float shrink = exp2_fast((most[m][r] - now) * scale2), offset = now * scale2;
                    most[m][r] = now;
                    float part = 0.0f;
#pragma unroll
                    for (u32 n = 0; n < 8; n++)
#pragma unroll
                        for (u32 c = 0; c < 2; c++) {
                            const float p = exp2_fast(s[m][n][2 * r + c] * scale2 - offset);
                            s[m][n][2 * r + c] = p;
                            part += p;
                        }
                    total[m][r] = total[m][r] * shrink + part;
#pragma unroll
                    for (u32 n = 0; n < PIECES; n++) {
                        sums[m][n][2 * r] *= shrink;
                        sums[m][n][2 * r + 1] *= shrink;
                    }
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
        // This warp alone reads its rows of the query tile, and it is done with them.
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

// dK and dV of one tile of keys, over the group's query heads and the query tiles from the diagonal down.
// A warp owns 16 keys; scores are computed transposed, so that they are left operands as they stand. With
// HEAD 256 a block writes half of the columns.
constexpr u32 WRITTEN = HEAD == 256 ? 128 : HEAD;
constexpr u32 SLICES = HEAD / WRITTEN;

extern "C" __global__ __launch_bounds__(128, HEAD == 256 ? 1 : 2) void attention_backward_kv(
    const Real* __restrict__ qkv, const Real* __restrict__ d_out, const float* __restrict__ stats,
    const float* __restrict__ delta, Real* __restrict__ d_qkv, Shape shape) {
    extern __shared__ __align__(128) u8 memory[];
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
    const u32 first_tile = blockIdx.x, per_head = (shape.sequence + TILE - 1) / TILE - first_tile;
    const u32 turns = group * per_head;
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
        const bool diagonal = turn % per_head == 0;
#pragma unroll
        for (u32 n = 0; n < 8; n++)
#pragma unroll
            for (u32 c = 0; c < 2; c++) {
                const u32 query = n * 8 + (lane & 3) * 2 + c;
                const float offset = log_sums[query] * LOG2E;
#pragma unroll
                for (u32 r = 0; r < 2; r++) {
                    const u32 key = warp * 16 + (lane >> 2) + 8 * r;
                    const float value = exp2_fast(p[n][2 * r + c] * scale2 - offset);
                    p[n][2 * r + c] = diagonal && query < key ? 0.0f : value;
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
    const float* __restrict__ delta, Real* __restrict__ d_qkv, Shape shape) {
    extern __shared__ __align__(128) u8 memory[];
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
    load_tile<TILE>(q_tile, batch + (u64)head * shape.head_dim + q_start * stride, stride, left, shape);
    load_tile<TILE>(o_tile,
                    d_out + ((u64)blockIdx.z * shape.sequence + q_start) * out_stride + (u64)head * shape.head_dim,
                    out_stride, left, shape);
    start(0);
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
    for (u32 j = 0; j <= block; j++) {
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
#pragma unroll
        for (u32 n = 0; n < 8; n++)
#pragma unroll
            for (u32 r = 0; r < 2; r++)
#pragma unroll
                for (u32 c = 0; c < 2; c++) {
                    const u32 key = n * 8 + (lane & 3) * 2 + c, query = own + (lane >> 2) + 8 * r;
                    const float probability = exp2_fast(p[n][2 * r + c] * scale2 - offset[r]);
                    const float gradient = probability * (d[n][2 * r + c] - minus[r]);
                    d[n][2 * r + c] = j == block && key > query ? 0.0f : gradient;
                }
        multiply_rows(d_query, d, k_tile, 0);
        __syncthreads();
    }
    stage_rows(q_tile, own, d_query, shape.scale, shape.scale);
    store_rows<PIECES>(q_tile, own, 16,
                       d_qkv + ((u64)blockIdx.z * shape.sequence + q_start + own) * stride + (u64)head * shape.head_dim,
                       stride, rows_left(shape.sequence, q_start + own), 0, shape);
}
