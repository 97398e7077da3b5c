// One optimizer update, and Sophia's Hessian estimate: kernels/src/numeric.rs line by line, the same bits.
// Compiled with --fmad=false --prec-div=true --prec-sqrt=true.
//
// Options choose the storage, so that a kernel holds one case only:
//   MASTER   0 f32 parameter · 1 bf16 + f32 master · 2 bf16 + 16-bit remainder · 3 f16 + f32 master
//   GRADIENT float, bf16 or f16
//   FIRST, SECOND   0 f32 · 1 bf16 · 2 8-bit blockwise
//   RULE     0 AdamW · 1 Sophia · 2 Hessian (SECOND alone is read and written)
// A thread has eight elements, a warp 256: exactly one block of the 8-bit format.

struct Rule { float lr, beta1, beta2, eps, weight_decay, inv_bias1, inv_bias2, rho; };

// Eight elements of memory in any of the formats; `count` < 8 at the end or where memory is not aligned.
template <class X> __device__ __forceinline__ Eight read8(const X* p, u32 count, bool wide) {
    if (wide) return load8(p);
    Eight x = {};
#pragma unroll
    for (int e = 0; e < 8; e++)
        if (e < count) x.v[e] = widen(p[e]);
    return x;
}
template <class X> __device__ __forceinline__ void write8(X* p, const Eight& x, u32 count, bool wide) {
    if (wide) {
        store8(p, x);
        return;
    }
#pragma unroll
    for (int e = 0; e < 8; e++)
        if (e < count) p[e] = narrow<X>(x.v[e]);
}
struct Halves { u16 v[8]; };
__device__ __forceinline__ Halves read_halves(const u16* p, u32 count, bool wide) {
    Halves x;
    if (wide) {
        const uint4 q = *(const uint4*)p;
        const u32 words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int e = 0; e < 8; e++) x.v[e] = (u16)(words[e / 2] >> (16 * (e & 1)));
    } else {
#pragma unroll
        for (int e = 0; e < 8; e++) x.v[e] = e < count ? p[e] : (u16)0;
    }
    return x;
}
__device__ __forceinline__ void write_halves(u16* p, const Halves& x, u32 count, bool wide) {
    if (wide) {
        u32 words[4];
#pragma unroll
        for (int k = 0; k < 4; k++) words[k] = (u32)x.v[2 * k] | ((u32)x.v[2 * k + 1] << 16);
        *(uint4*)p = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
#pragma unroll
        for (int e = 0; e < 8; e++)
            if (e < count) p[e] = x.v[e];
    }
}

// Ties away from zero: numeric::round_bf16.
__device__ __forceinline__ u16 round_bf16(float x) {
    const u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)((bits >> 16) | 0x40u);
    if ((bits & 0x7f800000u) == 0x7f800000u) return (u16)(bits >> 16);
    return (u16)((bits + 0x8000u) >> 16);
}
__device__ __forceinline__ u16 round_stochastic(float x, u16 random) {
    const u32 bits = __float_as_uint(x);
    if ((bits & 0x7f800000u) == 0x7f800000u) return round_bf16(x);
    return (u16)((bits + random) >> 16);
}

// Moments. KIND 0: f32, 1: bf16, 2: 8 bits with one scale a warp (numeric::q8_*). SQUARE: a second moment, whose
// code c stands for the root (c+1)·scale. SQUARE also chooses the lane of the random numbers.
template <int KIND, int SQUARE>
__device__ __forceinline__ Eight read_moment(const void* memory, u64 total, u64 first, u32 count, bool wide) {
    if (KIND == 0) return read8((const float*)memory + first, count, wide);
    if (KIND == 1) return read8((const bf16*)memory + first, count, wide);
    Eight x = {};
    if (count == 0) return x;
    const u8* codes = (const u8*)memory + first;
    // The scales follow the codes and need not be aligned.
    const u8* at = (const u8*)memory + total + first / 256 * 4;
    const float scale = __uint_as_float((u32)at[0] | ((u32)at[1] << 8) | ((u32)at[2] << 16) | ((u32)at[3] << 24));
    u8 c[8];
    if (wide) {
        const uint2 q = *(const uint2*)codes;
#pragma unroll
        for (int e = 0; e < 8; e++) c[e] = (u8)((e < 4 ? q.x : q.y) >> (8 * (e & 3)));
    } else {
#pragma unroll
        for (int e = 0; e < 8; e++) c[e] = e < count ? codes[e] : (u8)0;
    }
#pragma unroll
    for (int e = 0; e < 8; e++) {
        if (SQUARE) {
            const float root = ((float)c[e] + 1.0f) * scale;
            x.v[e] = root * root;
        } else {
            x.v[e] = (float)(signed char)c[e] * scale;
        }
    }
    return x;
}

template <int KIND, int SQUARE>
__device__ __forceinline__ void write_moment(void* memory, u64 total, u64 first, u32 count, bool wide, const Eight& x,
                                             const u64* random) {
    if (KIND == 0) {
        write8((float*)memory + first, x, count, wide);
        return;
    }
    if (KIND == 1) {
        Halves h;
#pragma unroll
        for (int e = 0; e < 8; e++) h.v[e] = round_stochastic(x.v[e], (u16)rng_lane(random[e], SQUARE));
        write_halves((u16*)memory + first, h, count, wide);
        return;
    }
    float most = 0.0f;
#pragma unroll
    for (int e = 0; e < 8; e++)
        if (e < count) most = fmaxf(most, fabsf(x.v[e]));
    // All 32 lanes come here: threads beyond the end have count 0.
    most = warp_max(most);
    const float scale = SQUARE ? sqrtf(most) / 256.0f : most / 127.0f;
    u32 words[2] = {0, 0};
    u8 c[8];
#pragma unroll
    for (int e = 0; e < 8; e++) {
        const float ratio = scale > 0.0f ? (SQUARE ? sqrtf(x.v[e]) / scale - 1.0f : x.v[e] / scale) : 0.0f;
        float code = floorf(ratio + rng_uniform(rng_lane(random[e], SQUARE ? 3 : 2)));
        code = SQUARE ? fminf(fmaxf(code, 0.0f), 255.0f) : fminf(fmaxf(code, -127.0f), 127.0f);
        c[e] = (u8)(int)code;
        words[e / 4] |= (u32)c[e] << (8 * (e & 3));
    }
    u8* codes = (u8*)memory + first;
    if (wide) {
        *(uint2*)codes = make_uint2(words[0], words[1]);
    } else {
#pragma unroll
        for (int e = 0; e < 8; e++)
            if (e < count) codes[e] = c[e];
    }
    if ((threadIdx.x & 31) == 0 && count > 0) {
        u8* at = (u8*)memory + total + first / 256 * 4;
        const u32 bits = __float_as_uint(scale);
        at[0] = (u8)bits;
        at[1] = (u8)(bits >> 8);
        at[2] = (u8)(bits >> 16);
        at[3] = (u8)(bits >> 24);
    }
}

#if RULE == 2
// hessian = β2·hessian + (1−β2)·tokens·g².
extern "C" __global__ __launch_bounds__(256) void hessian(const GRADIENT* gradient, void* estimate, u64 total,
                                                          u64 aligned, float beta2, float tokens,
                                                          float inverse_loss_scale, const float* control) {
    if (control[2] == 0.0f) return;
    const u64 first = ((u64)blockIdx.x * 256 + threadIdx.x) * 8;
    const u32 count = first >= total ? 0 : total - first < 8 ? (u32)(total - first) : 8;
    const bool wide = aligned && count == 8;
    const Eight g = read8(gradient + first, count, wide);
    Eight h = read_moment<SECOND, 1>(estimate, total, first, count, wide);
#pragma unroll
    for (int e = 0; e < 8; e++) {
        const float x = g.v[e] * inverse_loss_scale;
        h.v[e] = beta2 * h.v[e] + ((1.0f - beta2) * tokens) * (x * x);
    }
    u64 random[8];
#pragma unroll
    for (int e = 0; e < 8; e++) random[e] = rng_start(__float_as_uint(h.v[e]), 0);  // numeric::hessian_seed
    write_moment<SECOND, 1>(estimate, total, first, count, wide, h, random);
}
#else
extern "C" __global__ __launch_bounds__(256) void update(void* parameter, const GRADIENT* gradient, void* master,
                                                         void* first_moment, void* second_moment, u64 total,
                                                         u64 aligned, u64 decayed, u64 seed, u64 first_element,
                                                         Rule rule, const float* control) {
    if (control[2] == 0.0f) return;
    const float multiplier = control[0];
    const u64 first = ((u64)blockIdx.x * 256 + threadIdx.x) * 8;
    const u32 count = first >= total ? 0 : total - first < 8 ? (u32)(total - first) : 8;
    const bool wide = aligned && count == 8;
    const Eight g = read8(gradient + first, count, wide);
    Eight m = read_moment<FIRST, 0>(first_moment, total, first, count, wide);
    Eight v = read_moment<SECOND, 1>(second_moment, total, first, count, wide);
    Eight p;
#if MASTER == 0
    p = read8((const float*)parameter + first, count, wide);
#elif MASTER == 2
    {
        const Halves high = read_halves((const u16*)parameter + first, count, wide);
        const Halves low = read_halves((const u16*)master + first, count, wide);
#pragma unroll
        for (int e = 0; e < 8; e++)
            p.v[e] = __uint_as_float(((u32)high.v[e] << 16) + (u32)(int)(short)low.v[e]);
    }
#else
    p = read8((const float*)master + first, count, wide);
#endif
    const float keep = 1.0f - rule.lr * rule.weight_decay;
#pragma unroll
    for (int e = 0; e < 8; e++) {
        const float x = g.v[e] * multiplier;
        const float kept = first + e < decayed ? p.v[e] * keep : p.v[e];
        m.v[e] = rule.beta1 * m.v[e] + (1.0f - rule.beta1) * x;
#if RULE == 0
        v.v[e] = rule.beta2 * v.v[e] + ((1.0f - rule.beta2) * x) * x;
        const float step = (m.v[e] * rule.inv_bias1) / (sqrtf(v.v[e] * rule.inv_bias2) + rule.eps);
#else
        float curvature = rule.rho * v.v[e];
        curvature = curvature > 0.0f ? curvature : 0.0f;
        float ratio = fabsf(m.v[e]) / (curvature + 1e-15f);
        ratio = ratio < 1.0f ? ratio : 1.0f;
        const float step = m.v[e] == 0.0f ? 0.0f : copysignf(ratio, m.v[e]);
#endif
        p.v[e] = kept - rule.lr * step;
    }
    u64 random[8];
#pragma unroll
    for (int e = 0; e < 8; e++) random[e] = rng_start(seed, first_element + first + e);
    write_moment<FIRST, 0>(first_moment, total, first, count, wide, m, random);
#if RULE == 0
    write_moment<SECOND, 1>(second_moment, total, first, count, wide, v, random);
#endif
#if MASTER == 0
    write8((float*)parameter + first, p, count, wide);
#elif MASTER == 3
    write8((float*)master + first, p, count, wide);
    write8((f16*)parameter + first, p, count, wide);
#else
    Halves high;
#pragma unroll
    for (int e = 0; e < 8; e++) high.v[e] = round_bf16(p.v[e]);
    write_halves((u16*)parameter + first, high, count, wide);
#if MASTER == 1
    write8((float*)master + first, p, count, wide);
#else
    Halves low;
#pragma unroll
    for (int e = 0; e < 8; e++) low.v[e] = (u16)(__float_as_uint(p.v[e]) - ((u32)high.v[e] << 16));
    write_halves((u16*)master + first, low, count, wide);
#endif
#endif
}
#endif
