// What the tensor-core attention kernels share: 16-bit tiles in shared memory and products of them. Put before
// attention.cu and one of its backwards, attention_backward.cu or attention_ordered.cu, which are one program.
// Options: REAL (f16 or bf16), HEAD (64, 128 or 256: the head dimension padded with zeros in shared memory), MASKED
// (queries see the keys from their document's first on, not from 0 on).
//
// A tile has HEAD columns of 16 bits; its 16-byte pieces are permuted (piece ^ row & 7) so that ldmatrix meets no
// bank twice.

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

__device__ __forceinline__ void store_shared4(u32 target, u32 word) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(target), "r"(word) : "memory");
}
__device__ __forceinline__ void store_shared16(u32 target, const u32 (&words)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(target), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
}
__device__ __forceinline__ void load_shared16(u32 (&words)[4], u32 source) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(source)
                 : "memory");
}

// Starts copying ROWS rows of D elements, `stride` apart, by N threads; rows from `valid` on and columns from D on
// are 0.
template <u32 ROWS, u32 N = THREADS>
__device__ __forceinline__ void load_tile(u32 tile, const Real* source, u64 stride, u32 valid, const Shape& shape) {
    constexpr u32 STEP = N / PIECES, TURNS = ROWS / STEP;  // rows that the threads copy at once, and how often
    const u32 first = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
    const bool column = piece * 8 < shape.head_dim;
    const Real* at = source + first * stride + piece * 8;
    if (shape.aligned) {
#pragma unroll
        for (u32 turn = 0; turn < TURNS; turn++) {
            // Nothing is read where nothing is valid.
            copy16(piece_at(tile, first + turn * STEP, piece), at, column && first + turn * STEP < valid);
            at += STEP * stride;
        }
    } else {
        for (u32 turn = 0; turn < TURNS; turn++) {
            u32 words[4] = {0, 0, 0, 0};
#pragma unroll
            for (u32 e = 0; e < 8; e++)
                if (first + turn * STEP < valid && piece * 8 + e < shape.head_dim)
                    words[e / 2] |= (u32)at[e].bits << (16 * (e & 1));
            store_shared16(piece_at(tile, first + turn * STEP, piece), words);
            at += STEP * stride;
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

// Operands of 16 × 16 from a tile. Rows are multiples of 16 and tiles are aligned to a row's bytes, so the permuted
// piece is reached by one exclusive or from the lane's own place.

// As the left operand [m = 16 rows, k = columns], and as the right one [k = 16 rows, n = columns].
__device__ __forceinline__ u32 straight_place() {
    const u32 lane = threadIdx.x & 31;
    return piece_at(0, lane & 15, lane >> 4);
}
// As the right operand [k = columns, n = 16 rows]: the product with the tile's transpose. And as the left operand
// of the transpose [m = 16 columns, k = 16 rows].
__device__ __forceinline__ u32 crossed_place() {
    const u32 lane = threadIdx.x & 31;
    return piece_at(0, (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
}
__device__ __forceinline__ void left_operand(u32 (&a)[4], u32 tile, u32 row, u32 piece) {
    load_matrices(a, ((tile + straight_place()) ^ (piece << 4)) + row * (HEAD * 2));
}
__device__ __forceinline__ void left_operand_transposed(u32 (&a)[4], u32 tile, u32 row, u32 piece) {
    load_matrices_transposed(a, ((tile + crossed_place()) ^ (piece << 4)) + row * (HEAD * 2));
}
__device__ __forceinline__ void right_operand_transposed(u32 (&b)[4], u32 tile, u32 row, u32 piece) {
    load_matrices(b, ((tile + crossed_place()) ^ (piece << 4)) + row * (HEAD * 2));
}
__device__ __forceinline__ void right_operand(u32 (&b)[4], u32 tile, u32 row, u32 piece) {
    load_matrices_transposed(b, ((tile + straight_place()) ^ (piece << 4)) + row * (HEAD * 2));
}

__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, bf16) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, f16) {
    asm(
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

template <u32 N> __device__ __forceinline__ void clear(float (&c)[N][4]) {
#pragma unroll
    for (u32 n = 0; n < N; n++)
#pragma unroll
        for (u32 e = 0; e < 4; e++) c[n][e] = 0.0f;
}

// 16 rows of accumulators into this warp's own part of a tile, from piece `first` on; rows r and r + 8 scaled apart.
template <u32 N>
__device__ __forceinline__ void stage_rows(u32 tile, u32 row, const float (&c)[N][4], float low, float high,
                                           u32 first = 0) {
    const u32 top = row + ((threadIdx.x & 31) >> 2), inside = (threadIdx.x & 3) * 4;
#pragma unroll
    for (u32 n = 0; n < N; n++) {
        store_shared4(piece_at(tile, top, first + n) + inside, pack2<Real>(c[n][0] * low, c[n][1] * low));
        store_shared4(piece_at(tile, top + 8, first + n) + inside, pack2<Real>(c[n][2] * high, c[n][3] * high));
    }
}
// Staged rows of this warp to memory: `rows` rows of N pieces, from piece `first` on, to columns first_column.. of
// `target`, whose row 0 is the tile's row `row`.
template <u32 N>
__device__ __forceinline__ void store_rows(u32 tile, u32 row, u32 rows, Real* target, u64 stride, u32 valid,
                                           u32 first_column, const Shape& shape, u32 first = 0) {
    __syncwarp();
    for (u32 i = threadIdx.x & 31; i < rows * N; i += 32) {
        const u32 r = i / N, piece = i % N, column = first_column + piece * 8;
        if (r >= valid || column >= shape.head_dim) continue;
        u32 words[4];
        load_shared16(words, piece_at(tile, row + r, first + piece));
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

// The first of the query tiles first..last (of `rows` rows) that sees no key before `key`, or `last`: starts never
// decrease, so neither do those after it see one.
__device__ __forceinline__ u32 past_last_query(const u32* starts, u32 first, u32 last, u32 rows, u32 key) {
    while (first < last) {
        const u32 middle = (first + last) / 2;
        if (starts[middle * rows] >= key) last = middle;
        else first = middle + 1;
    }
    return last;
}
