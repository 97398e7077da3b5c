// Prepended to every kernel source: types, conversions, 16-byte access, reductions in a fixed order.
//
// No header is included, so that a machine with NVRTC alone can compile it. Options give the types:
// REAL (compute type: float, f16 or bf16). Shapes use the alphabet of kernels/src/ops.rs.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct bf16 { u16 bits; };
struct f16 { u16 bits; };

#ifdef REAL
typedef REAL Real;
#endif

#define INFINITE __int_as_float(0x7f800000)
#define LOG2E 1.4426950408889634f

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float widen(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

// Round to nearest even.
template <class X> __device__ __forceinline__ X narrow(float x);
template <> __device__ __forceinline__ float narrow<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 narrow<bf16>(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <> __device__ __forceinline__ f16 narrow<f16>(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

// Two numbers in one register, the first in the low half.
template <class X> __device__ __forceinline__ u32 pack2(float low, float high);
template <> __device__ __forceinline__ u32 pack2<bf16>(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
template <> __device__ __forceinline__ u32 pack2<f16>(float low, float high) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

__device__ __forceinline__ float low_half(u32 x, bf16) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high_half(u32 x, bf16) { return __uint_as_float(x & 0xffff0000u); }
__device__ __forceinline__ float low_half(u32 x, f16) { return widen(f16{(u16)x}); }
__device__ __forceinline__ float high_half(u32 x, f16) { return widen(f16{(u16)(x >> 16)}); }

// The unit of vectorised work is eight elements: one 16-byte access in 16 bits, two in f32.
struct Eight { float v[8]; };

template <class X> struct Raw8 { uint4 q; };
template <> struct Raw8<float> { uint4 q, r; };

__device__ __forceinline__ Raw8<float> load_raw(const float* p) {
    Raw8<float> x;
    x.q = *(const uint4*)p;
    x.r = *((const uint4*)p + 1);
    return x;
}
template <class X> __device__ __forceinline__ Raw8<X> load_raw(const X* p) {
    Raw8<X> x;
    x.q = *(const uint4*)p;
    return x;
}

__device__ __forceinline__ Eight unpack(Raw8<float> x) {
    return Eight{{__uint_as_float(x.q.x), __uint_as_float(x.q.y), __uint_as_float(x.q.z), __uint_as_float(x.q.w),
                  __uint_as_float(x.r.x), __uint_as_float(x.r.y), __uint_as_float(x.r.z), __uint_as_float(x.r.w)}};
}
template <class X> __device__ __forceinline__ Eight unpack(Raw8<X> x) {
    return Eight{{low_half(x.q.x, X()), high_half(x.q.x, X()), low_half(x.q.y, X()), high_half(x.q.y, X()),
                  low_half(x.q.z, X()), high_half(x.q.z, X()), low_half(x.q.w, X()), high_half(x.q.w, X())}};
}

__device__ __forceinline__ void store8(float* p, const Eight& x) {
    *(float4*)p = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
    *((float4*)p + 1) = make_float4(x.v[4], x.v[5], x.v[6], x.v[7]);
}
template <class X> __device__ __forceinline__ void store8(X* p, const Eight& x) {
    *(uint4*)p = make_uint4(pack2<X>(x.v[0], x.v[1]), pack2<X>(x.v[2], x.v[3]), pack2<X>(x.v[4], x.v[5]),
                            pack2<X>(x.v[6], x.v[7]));
}
template <class X> __device__ __forceinline__ Eight load8(const X* p) { return unpack(load_raw(p)); }

// Butterfly reductions: every lane gets the same bits.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}
__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

// Sum over the block, the same bits in every thread. `slots` has 32 elements of shared memory; consecutive
// calls must use different slots (two in turn are enough), so that one barrier a call suffices. The block is
// a whole number of warps.
template <class X> __device__ __forceinline__ X block_sum(X x, X* slots) {
    x = warp_sum(x);
    if ((threadIdx.x & 31) == 0) slots[threadIdx.x >> 5] = x;
    __syncthreads();
    X total = slots[0];
    for (u32 warp = 1; warp < (blockDim.x >> 5); warp++) total += slots[warp];
    return total;
}
__device__ __forceinline__ float block_max(float x, float* slots) {
    x = warp_max(x);
    if ((threadIdx.x & 31) == 0) slots[threadIdx.x >> 5] = x;
    __syncthreads();
    float most = slots[0];
    for (u32 warp = 1; warp < (blockDim.x >> 5); warp++) most = fmaxf(most, slots[warp]);
    return most;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// e^x: exact to the last bits where the compute type is f32, fast where a 16-bit result hides the error.
template <class X> __device__ __forceinline__ float exp_for(float x) { return exp2_fast(x * LOG2E); }
template <> __device__ __forceinline__ float exp_for<float>(float x) { return expf(x); }
template <class X> __device__ __forceinline__ float divide_for(float x, float y) { return __fdividef(x, y); }
template <> __device__ __forceinline__ float divide_for<float>(float x, float y) { return x / y; }

// kernels/src/rng.rs, bit for bit.
__device__ __forceinline__ u64 rng_mix(u64 z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}
__device__ __forceinline__ u64 rng_start(u64 seed, u64 counter) {
    return rng_mix(seed ^ (counter * 0x9E3779B97F4A7C15ull));
}
__device__ __forceinline__ u64 rng_lane(u64 start, u64 lane) { return rng_mix(start + lane * 0xD1B54A32D192ED03ull); }
__device__ __forceinline__ float rng_uniform(u64 bits) { return (float)(u32)(bits >> 40) * (1.0f / 16777216.0f); }
