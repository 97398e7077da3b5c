// Cross entropy over the vocabulary and its gradient in place. Option: REAL.
//
// A row is read once and written once: it stays in the registers of a cluster of blocks (256 threads, HELD
// groups of eight each), which exchange (max, sum) through distributed shared memory. Needs sm_90; other
// rows (f32, odd sizes, older chips) take `classify_any`, which reads twice. targets that are no token count
// as ignored. scale = 0 with `gradients` = 0 gives losses only.

// Running log-sum-exp of a part of a row.
struct Softmax { float max, sum; };

__device__ __forceinline__ Softmax merge(Softmax a, Softmax b) {
    Softmax c;
    c.max = fmaxf(a.max, b.max);
    // −inf − (−inf) is no number: an empty side adds nothing.
    c.sum = (a.max == -INFINITE ? 0.0f : a.sum * exp_for<float>(a.max - c.max)) +
            (b.max == -INFINITE ? 0.0f : b.sum * exp_for<float>(b.max - c.max));
    return c;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ float peer_float(const float* own, u32 rank) {
    u32 address = (u32)__cvta_generic_to_shared(own), peer;
    float value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(peer) : "memory");
    return value;
}

template <int CLUSTER, int HELD>
__device__ __forceinline__ void classify_row(Real* logits, const int* __restrict__ targets, float* __restrict__ losses,
                                             u64 vocabulary, u32 gradients, float scale) {
    __shared__ float maxes[32], sums[32], published[2];
    const u64 row = blockIdx.x / CLUSTER;
    const u32 rank = CLUSTER == 1 ? 0 : cluster_rank();
    const u32 eights = (u32)(vocabulary / 8);
    const u32 first = rank * (HELD * 256) + threadIdx.x;
    Real* base = logits + row * vocabulary;
    const int target = targets[row];
    // The whole cluster decides alike, so nobody waits for a block that has left.
    if (target < 0 || (u64)target >= vocabulary) {
        if (rank == 0 && threadIdx.x == 0) losses[row] = 0.0f;
        if (gradients) {
#pragma unroll
            for (int k = 0; k < HELD; k++)
                if (first + k * 256 < eights) *(uint4*)(base + (u64)(first + k * 256) * 8) = make_uint4(0, 0, 0, 0);
        }
        return;
    }
    Raw8<Real> held[HELD];
#pragma unroll
    for (int k = 0; k < HELD; k++)
        if (first + k * 256 < eights) held[k] = load_raw((const Real*)base + (u64)(first + k * 256) * 8);
    // Read before any block may write: writes come after the exchange.
    const float at_target = rank == 0 && threadIdx.x == 0 ? widen(base[target]) : 0.0f;
    float most = -INFINITE;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        if (first + k * 256 < eights) {
            const Eight a = unpack(held[k]);
#pragma unroll
            for (int e = 0; e < 8; e++) most = fmaxf(most, a.v[e]);
        }
    }
    most = block_max(most, maxes);
    const float offset = most == -INFINITE ? 0.0f : most * LOG2E;
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        if (first + k * 256 < eights) {
            const Eight a = unpack(held[k]);
#pragma unroll
            for (int e = 0; e < 8; e++) sum += exp2_fast(a.v[e] * LOG2E - offset);
        }
    }
    sum = block_sum(sum, sums);
    Softmax all = {most, sum};
    if (CLUSTER > 1) {
        if (threadIdx.x == 0) {
            published[0] = most;
            published[1] = sum;
        }
        cluster_sync();
        all = Softmax{peer_float(published, 0), peer_float(published + 1, 0)};
#pragma unroll
        for (u32 peer = 1; peer < CLUSTER; peer++)
            all = merge(all, Softmax{peer_float(published, peer), peer_float(published + 1, peer)});
    }
    if (rank == 0 && threadIdx.x == 0) losses[row] = logf(all.sum) - (at_target - all.max);
    if (gradients) {
        const float shift = all.max * LOG2E, factor = scale / all.sum;
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            const u32 i = first + k * 256;
            if (i < eights) {
                Eight a = unpack(held[k]);
#pragma unroll
                for (int e = 0; e < 8; e++) {
                    a.v[e] = exp2_fast(a.v[e] * LOG2E - shift) * factor;
                    if (i * 8 + e == (u32)target) a.v[e] -= scale;
                }
                store8(base + (u64)i * 8, a);
            }
        }
    }
    // A block's shared memory must live until its peers have read it. Without a cluster, rank 0's read of
    // the target precedes block_max's barrier.
    if (CLUSTER > 1) cluster_sync();
}

#define CLASSIFY(CLUSTER, HELD)                                                                                       \
    extern "C" __global__ __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(256) void classify_##CLUSTER##_##HELD(    \
        Real* logits, const int* targets, float* losses, u64 vocabulary, u32 gradients, float scale) {                \
        classify_row<CLUSTER, HELD>(logits, targets, losses, vocabulary, gradients, scale);                           \
    }
#ifdef CLUSTERS
CLASSIFY(1, 8)
CLASSIFY(2, 8)
CLASSIFY(4, 8)
CLASSIFY(8, 8)
CLASSIFY(8, 16)
#endif
#endif

// One block of 512 threads a row, two reads.
extern "C" __global__ __launch_bounds__(512) void classify_any(Real* logits, const int* __restrict__ targets,
                                                               float* __restrict__ losses, u64 vocabulary,
                                                               u32 gradients, float scale) {
    __shared__ float maxes[32], sums[32];
    Real* base = logits + (u64)blockIdx.x * vocabulary;
    const int target = targets[blockIdx.x];
    if (target < 0 || (u64)target >= vocabulary) {
        if (threadIdx.x == 0) losses[blockIdx.x] = 0.0f;
        if (gradients)
            for (u64 i = threadIdx.x; i < vocabulary; i += 512) base[i] = narrow<Real>(0.0f);
        return;
    }
    const float at_target = threadIdx.x == 0 ? widen(base[target]) : 0.0f;
    Softmax own = {-INFINITE, 0.0f};
#pragma unroll 4
    for (u64 i = threadIdx.x; i < vocabulary; i += 512) {
        const float x = widen(base[i]);
        if (x > own.max) {
            own.sum = own.sum * exp_for<Real>(own.max - x);
            own.max = x;
        }
        own.sum += x == -INFINITE ? 0.0f : exp_for<Real>(x - own.max);
    }
    const float most = block_max(own.max, maxes);
    const float total = block_sum(own.max == -INFINITE ? own.sum : own.sum * exp_for<Real>(own.max - most), sums);
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(total) - (at_target - most);
    if (!gradients) return;
    const float factor = scale / total;
#pragma unroll 4
    for (u64 i = threadIdx.x; i < vocabulary; i += 512) {
        float g = exp_for<Real>(widen(base[i]) - most) * factor;
        if (i == (u64)target) g -= scale;
        base[i] = narrow<Real>(g);
    }
}

// Draws the target of each token that counts: the first token whose cumulative power exceeds uniform·total,
// in the order of the vocabulary. Each of 16 warps owns a run of the row; the run that holds the goal is
// found from the runs' sums and walked 32 tokens at a time.
extern "C" __global__ __launch_bounds__(512) void classify_draw(const Real* __restrict__ logits, int* targets,
                                                                u64 vocabulary, u64 seed, u64 first_token) {
    __shared__ float maxes[32], runs[16];
    const Real* base = logits + (u64)blockIdx.x * vocabulary;
    const int before = targets[blockIdx.x];
    if (before < 0 || (u64)before >= vocabulary) return;
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float most = -INFINITE;
#pragma unroll 4
    for (u64 i = threadIdx.x; i < vocabulary; i += 512) most = fmaxf(most, widen(base[i]));
    most = block_max(most, maxes);
    const u64 length = (vocabulary + 511) / 512 * 32;
    const u64 begin = warp * length, end = begin + length < vocabulary ? begin + length : vocabulary;
    float sum = 0.0f;
    for (u64 i = begin + lane; i < end; i += 32) sum += expf(widen(base[i]) - most);
    sum = warp_sum(sum);
    if (lane == 0) runs[warp] = sum;
    __syncthreads();
    float total = 0.0f;
    for (int k = 0; k < 16; k++) total += runs[k];
    const float goal = rng_uniform(rng_lane(rng_start(seed, first_token + blockIdx.x), 0)) * total;
    // The first run whose end exceeds the goal, else the last run with any power.
    float running = 0.0f, start = 0.0f;
    u32 chosen = 0;
    for (u32 k = 0; k < 16; k++) {
        if (runs[k] > 0.0f) {
            chosen = k;
            start = running;
        }
        running += runs[k];
        if (running > goal) break;
    }
    if (warp != chosen) return;
    u64 drawn = vocabulary, last = begin;
    running = start;
    for (u64 i = begin; i < end && drawn == vocabulary; i += 32) {
        const float power = i + lane < end ? expf(widen(base[i + lane]) - most) : 0.0f;
        float up_to = power;
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            const float left = __shfl_up_sync(0xffffffffu, up_to, step);
            if (lane >= step) up_to += left;
        }
        const u32 beyond = __ballot_sync(0xffffffffu, power > 0.0f && running + up_to > goal);
        const u32 some = __ballot_sync(0xffffffffu, power > 0.0f);
        if (beyond) drawn = i + __ffs(beyond) - 1;
        if (some) last = i + 31 - __clz(some);
        running += __shfl_sync(0xffffffffu, up_to, 31);
    }
    if (lane == 0) targets[blockIdx.x] = (int)(drawn == vocabulary ? last : drawn);
}
