// One optimizer update, and Sophia's Hessian estimate: kernels/src/numeric.rs line by line, the same bits.
// Compiled with --fmad=false --prec-div=true --prec-sqrt=true.
//
// Options choose the storage, so that a kernel holds one case only:
//   MASTER   0 f32 parameter · 1 bf16 + f32 master · 2 bf16 + 16-bit remainder · 3 f16 + f32 master
//   GRADIENT float, bf16 or f16
//   FIRST, SECOND   0 f32 · 1 bf16 · 2 8-bit blockwise
//   RULE     0 AdamW · 1 Sophia · 2 Hessian (SECOND alone is read and written)
// A warp has 256 elements, exactly one block of the 8-bit format; a thread has four of the first half and
// four of the second, so that a warp's accesses have no gaps whatever the width of a number.
// All of a thread's memory is asked for before anything is computed: that keeps the memory busy.
// WIDE: the warp's 256 elements are all there and aligned. Else every element is looked at on its own.

struct Rule { float lr, beta1, beta2, eps, weight_decay, inv_bias1, inv_bias2, rho; };

// The number of a thread's first element, and how many elements there are.
struct Place { u64 first, total; };
// From a thread's first element to its element e.
__device__ __forceinline__ u32 to(int e) { return e < 4 ? e : 124 + e; }
template <bool WIDE> __device__ __forceinline__ bool there(Place at, int e) {
    return WIDE || at.first + to(e) < at.total;
}

// Eight numbers of B bytes as they lie in memory: four in the first B words, four in the others.
template <int B> struct Raw {
    u32 w[2 * B];
    // Number e, in the low bits; what is above a number of 1 byte is zero, above one of 2 undefined.
    __device__ __forceinline__ u32 get(int e) const {
        const u32 word = w[e * B / 4];
        return B == 4 ? word : B == 2 ? word >> (16 * (e & 1)) : (word >> (8 * (e & 3))) & 0xffu;
    }
};

// Volatile, so that loads stay before the arithmetic. Nothing is read twice: L1 need not keep it.
template <int B> __device__ __forceinline__ void fetch(const void* p, u32* w) {
    if (B == 4)
        asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(p) : "memory");
    else if (B == 2)
        asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(p) : "memory");
    else
        asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(w[0]) : "l"(p) : "memory");
}

template <int B, bool WIDE> __device__ __forceinline__ Raw<B> read_raw(const void* memory, Place at) {
    Raw<B> x = {};
    if constexpr (WIDE) {
        fetch<B>((const u8*)memory + at.first * B, x.w);
        fetch<B>((const u8*)memory + (at.first + 128) * B, x.w + B);
    } else {
#pragma unroll
        for (int e = 0; e < 8; e++)
            if (there<WIDE>(at, e)) {
                const u64 i = at.first + to(e);
                const void* p = (const u8*)memory + i * B;
                const u32 bits = B == 4 ? *(const u32*)p : B == 2 ? *(const u16*)p : *(const u8*)p;
                x.w[e * B / 4] |= bits << (e * B % 4 * 8);
            }
    }
    return x;
}

template <int B, bool WIDE> __device__ __forceinline__ void write_raw(void* memory, Place at, const Raw<B>& x) {
    if constexpr (WIDE) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            void* p = (u8*)memory + (at.first + half * 128) * B;
            const u32* w = x.w + half * B;
            if (B == 4)
                *(uint4*)p = make_uint4(w[0], w[1], w[2], w[3]);
            else if (B == 2)
                *(uint2*)p = make_uint2(w[0], w[1]);
            else
                *(u32*)p = w[0];
        }
    } else {
#pragma unroll
        for (int e = 0; e < 8; e++)
            if (there<WIDE>(at, e)) {
                const u64 i = at.first + to(e);
                if (B == 4)
                    ((u32*)memory)[i] = x.get(e);
                else if (B == 2)
                    ((u16*)memory)[i] = (u16)x.get(e);
                else
                    ((u8*)memory)[i] = (u8)x.get(e);
            }
    }
}

// As numbers, and back. Halves come as the upper (UPPER) or the lower half of eight words.
__device__ __forceinline__ float number(u32 bits, float) { return __uint_as_float(bits); }
template <class X> __device__ __forceinline__ float number(u32 bits, X) { return widen(X{(u16)bits}); }
template <class X> __device__ __forceinline__ Eight numbers(const Raw<sizeof(X)>& raw) {
    Eight x;
#pragma unroll
    for (int e = 0; e < 8; e++) x.v[e] = number(raw.get(e), X());
    return x;
}
__device__ __forceinline__ Raw<4> raw_floats(const Eight& x) {
    Raw<4> raw;
#pragma unroll
    for (int e = 0; e < 8; e++) raw.w[e] = __float_as_uint(x.v[e]);
    return raw;
}
template <bool UPPER> __device__ __forceinline__ Raw<2> raw_halves(const u32 (&word)[8]) {
    Raw<2> raw;
#pragma unroll
    for (int k = 0; k < 4; k++) raw.w[k] = __byte_perm(word[2 * k], word[2 * k + 1], UPPER ? 0x7632 : 0x5410);
    return raw;
}

// numeric::round_bf16 (`add` is 0x8000: ties away from zero) and round_stochastic (16 random bits), in the
// upper halves of the words.
__device__ __forceinline__ void round_halves(const Eight& x, const u32 (&add)[8], u32 (&word)[8]) {
    bool finite = true;
#pragma unroll
    for (int e = 0; e < 8; e++) {
        finite &= fabsf(x.v[e]) < INFINITE;
        word[e] = __float_as_uint(x.v[e]) + add[e];
    }
    if (finite) return;
#pragma unroll
    for (int e = 0; e < 8; e++) {
        const u32 bits = __float_as_uint(x.v[e]);
        if ((bits & 0x7fffffffu) > 0x7f800000u)
            word[e] = bits | 0x400000u;
        else if ((bits & 0x7fffffffu) == 0x7f800000u)
            word[e] = bits;
    }
}

// Moments. KIND 0: f32, 1: bf16, 2: 8 bits with one scale a warp (numeric::q8_*). SQUARE: a second moment, whose
// code c stands for the root (c+1)·scale. SQUARE also chooses the lane of the random numbers.
template <int KIND> struct Moment {
    enum { BYTES = KIND == 0 ? 4 : KIND == 1 ? 2 : 1 };
    Raw<BYTES> raw;
    float scale;
};
// The scale of the warp's block; scales follow the codes and need not be aligned.
__device__ __forceinline__ u8* scale_of(const void* memory, Place at) {
    return (u8*)memory + at.total + at.first / 256 * 4;
}

template <int KIND, bool WIDE> __device__ __forceinline__ Moment<KIND> read_moment(const void* memory, Place at) {
    Moment<KIND> x;
    x.raw = read_raw<Moment<KIND>::BYTES, WIDE>(memory, at);
    x.scale = 0.0f;
    if (KIND == 2 && (WIDE || at.first < at.total)) {
        const u8* p = scale_of(memory, at);
        x.scale = __uint_as_float((u32)p[0] | ((u32)p[1] << 8) | ((u32)p[2] << 16) | ((u32)p[3] << 24));
    }
    return x;
}

template <int KIND, int SQUARE> __device__ __forceinline__ Eight moments(const Moment<KIND>& stored) {
    Eight x;
#pragma unroll
    for (int e = 0; e < 8; e++) {
        const u32 bits = stored.raw.get(e);
        if (KIND == 0) {
            x.v[e] = __uint_as_float(bits);
        } else if (KIND == 1) {
            x.v[e] = widen(bf16{(u16)bits});
        } else if (SQUARE) {
            const float root = ((float)bits + 1.0f) * stored.scale;
            x.v[e] = root * root;
        } else {
            x.v[e] = (float)(signed char)bits * stored.scale;
        }
    }
    return x;
}

template <int KIND, int SQUARE, bool WIDE>
__device__ __forceinline__ void write_moment(void* memory, Place at, const Eight& x, const u64 (&random)[8]) {
    if constexpr (KIND == 0) {
        write_raw<4, WIDE>(memory, at, raw_floats(x));
    } else if constexpr (KIND == 1) {
        u32 add[8], word[8];
#pragma unroll
        for (int e = 0; e < 8; e++) add[e] = (u32)rng_lane(random[e], SQUARE) & 0xffffu;
        round_halves(x, add, word);
        write_raw<2, WIDE>(memory, at, raw_halves<true>(word));
    } else {
        float most = 0.0f;
#pragma unroll
        for (int e = 0; e < 8; e++)
            if (there<WIDE>(at, e)) most = fmaxf(most, fabsf(x.v[e]));
        // All 32 lanes come here, with elements or without.
        most = warp_max(most);
        const float scale = SQUARE ? sqrtf(most) / 256.0f : most / 127.0f;
        Raw<1> codes = {};
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const float ratio = scale > 0.0f ? (SQUARE ? sqrtf(x.v[e]) / scale - 1.0f : x.v[e] / scale) : 0.0f;
            float code = floorf(ratio + rng_uniform(rng_lane(random[e], SQUARE ? 3 : 2)));
            code = SQUARE ? fminf(fmaxf(code, 0.0f), 255.0f) : fminf(fmaxf(code, -127.0f), 127.0f);
            codes.w[e / 4] |= ((u32)(int)code & 0xffu) << (8 * (e & 3));
        }
        write_raw<1, WIDE>(memory, at, codes);
        if ((threadIdx.x & 31) == 0 && at.first < at.total) {
            u8* p = scale_of(memory, at);
            const u32 bits = __float_as_uint(scale);
            p[0] = (u8)bits;
            p[1] = (u8)(bits >> 8);
            p[2] = (u8)(bits >> 16);
            p[3] = (u8)(bits >> 24);
        }
    }
}

// A block of 256 threads has 2048 elements.
__device__ __forceinline__ Place place(u64 total) {
    return Place{(u64)blockIdx.x * 2048 + threadIdx.x / 32 * 256 + threadIdx.x % 32 * 4, total};
}
// Whether the warp's elements are all there.
__device__ __forceinline__ bool whole(Place at) { return (at.first | 255) < at.total; }

#if RULE == 2
// hessian = β2·hessian + (1−β2)·tokens·g².
template <bool WIDE>
__device__ __forceinline__ void estimated(const void* gradient, void* estimate, Place at, float beta2, float tokens,
                                          float inverse_loss_scale) {
    const Raw<sizeof(GRADIENT)> gradients = read_raw<sizeof(GRADIENT), WIDE>(gradient, at);
    Eight h = moments<SECOND, 1>(read_moment<SECOND, WIDE>(estimate, at));
    const Eight g = numbers<GRADIENT>(gradients);
    u64 random[8];
#pragma unroll
    for (int e = 0; e < 8; e++) {
        const float x = g.v[e] * inverse_loss_scale;
        h.v[e] = beta2 * h.v[e] + ((1.0f - beta2) * tokens) * (x * x);
        random[e] = rng_start(__float_as_uint(h.v[e]), 0);  // numeric::hessian_seed
    }
    write_moment<SECOND, 1, WIDE>(estimate, at, h, random);
}

extern "C" __global__ __launch_bounds__(256) void hessian(const GRADIENT* gradient, void* estimate, u64 total,
                                                          u64 aligned, float beta2, float tokens,
                                                          float inverse_loss_scale, const float* control) {
    if (control[2] == 0.0f) return;
    const Place at = place(total);
    if (aligned && whole(at))
        estimated<true>(gradient, estimate, at, beta2, tokens, inverse_loss_scale);
    else
        estimated<false>(gradient, estimate, at, beta2, tokens, inverse_loss_scale);
}
#else
// The compiler's way for one pair. A call, because it is rare and long.
__device__ __noinline__ float divide_by_root(float x, float y, float eps) { return x / (sqrtf(y) + eps); }

// x / (√y + eps) for eight pairs, correctly rounded. The compiler's own division and root branch on every
// operand, one after another. Where no operand is near the ends of the exponents, one step of Newton for the
// root, and one for the reciprocal with a last correction by the exact remainder, give the same: all eight
// then run side by side. Zeros and extremes of any of the eight take the compiler's way.
__device__ __forceinline__ void divide_by_roots(const Eight& x, const Eight& y, float eps, float (&out)[8]) {
    // √y + eps is from 2⁻⁵¹ to 2⁵¹ then, and the quotient far from under- and overflow.
    bool plain = eps >= 0.0f && eps <= 1.0f;
#pragma unroll
    for (int e = 0; e < 8; e++) {
        plain &= __float_as_uint(y.v[e]) - 0x0d000000u < 0x64800000u;           // 2⁻¹⁰¹ ≤ y < 2¹⁰⁰
        plain &= fabsf(x.v[e]) >= 0x1p-64f && fabsf(x.v[e]) <= 0x1p64f;
        float inverse;
        asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(y.v[e]));
        float root = y.v[e] * inverse;
        root = __fmaf_rn(__fmaf_rn(-root, root, y.v[e]), inverse * 0.5f, root);
        const float divisor = root + eps;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(divisor));
        inverse = __fmaf_rn(inverse, __fmaf_rn(-divisor, inverse, 1.0f), inverse);
        const float quotient = x.v[e] * inverse;
        out[e] = __fmaf_rn(inverse, __fmaf_rn(-divisor, quotient, x.v[e]), quotient);
    }
    if (plain) return;
#pragma unroll
    for (int e = 0; e < 8; e++) out[e] = divide_by_root(x.v[e], y.v[e], eps);
}

template <bool WIDE>
__device__ __forceinline__ void updated(void* parameter, const void* gradient, void* master, void* first_moment,
                                        void* second_moment, Place at, u64 decayed, u64 seed, u64 first_element,
                                        const Rule& rule, float multiplier) {
    const Raw<sizeof(GRADIENT)> gradients = read_raw<sizeof(GRADIENT), WIDE>(gradient, at);
    const Moment<FIRST> firsts = read_moment<FIRST, WIDE>(first_moment, at);
    const Moment<SECOND> seconds = read_moment<SECOND, WIDE>(second_moment, at);
#if MASTER == 0
    const Raw<4> values = read_raw<4, WIDE>(parameter, at);
#elif MASTER == 2
    const Raw<2> upper = read_raw<2, WIDE>(parameter, at);
    const Raw<2> lower = read_raw<2, WIDE>(master, at);
#else
    const Raw<4> values = read_raw<4, WIDE>(master, at);
#endif
    const Eight g = numbers<GRADIENT>(gradients);
    Eight m = moments<FIRST, 0>(firsts);
    Eight v = moments<SECOND, 1>(seconds);
    Eight p;
#if MASTER == 2
#pragma unroll
    for (int e = 0; e < 8; e++) {
        // The remainder has a sign: what its highest bit stands for is taken off twice.
        const u32 bits = __byte_perm(lower.w[e / 2], upper.w[e / 2], e & 1 ? 0x7632 : 0x5410);
        p.v[e] = __uint_as_float(bits - ((bits & 0x8000u) << 1));
    }
#else
    p = numbers<float>(values);
#endif
    const u64 left = decayed > at.first ? decayed - at.first : 0;
    const u32 near = left < 256 ? (u32)left : 256;
    const float keep = 1.0f - rule.lr * rule.weight_decay;
    float step[8];
#pragma unroll
    for (int e = 0; e < 8; e++) {
        const float x = g.v[e] * multiplier;
        p.v[e] = to(e) < near ? p.v[e] * keep : p.v[e];
        m.v[e] = rule.beta1 * m.v[e] + (1.0f - rule.beta1) * x;
#if RULE == 0
        v.v[e] = rule.beta2 * v.v[e] + ((1.0f - rule.beta2) * x) * x;
#else
        float curvature = rule.rho * v.v[e];
        curvature = curvature > 0.0f ? curvature : 0.0f;
        float ratio = fabsf(m.v[e]) / (curvature + 1e-15f);
        ratio = ratio < 1.0f ? ratio : 1.0f;
        step[e] = m.v[e] == 0.0f ? 0.0f : copysignf(ratio, m.v[e]);
#endif
    }
#if RULE == 0
    Eight numerator, square;
#pragma unroll
    for (int e = 0; e < 8; e++) {
        numerator.v[e] = m.v[e] * rule.inv_bias1;
        square.v[e] = v.v[e] * rule.inv_bias2;
    }
    divide_by_roots(numerator, square, rule.eps, step);
#endif
    u64 random[8];
#pragma unroll
    for (int e = 0; e < 8; e++) {
        p.v[e] = p.v[e] - rule.lr * step[e];
        random[e] = rng_start(seed, first_element + at.first + to(e));
    }
    write_moment<FIRST, 0, WIDE>(first_moment, at, m, random);
#if RULE == 0
    write_moment<SECOND, 1, WIDE>(second_moment, at, v, random);
#endif
#if MASTER == 0
    write_raw<4, WIDE>(parameter, at, raw_floats(p));
#elif MASTER == 3
    u32 word[8];
#pragma unroll
    for (int e = 0; e < 8; e++) word[e] = narrow<f16>(p.v[e]).bits;
    write_raw<4, WIDE>(master, at, raw_floats(p));
    write_raw<2, WIDE>(parameter, at, raw_halves<false>(word));
#else
    u32 half[8], word[8];
#pragma unroll
    for (int e = 0; e < 8; e++) half[e] = 0x8000u;
    round_halves(p, half, word);
    write_raw<2, WIDE>(parameter, at, raw_halves<true>(word));
#if MASTER == 1
    write_raw<4, WIDE>(master, at, raw_floats(p));
#else
    // Bits less the rounded upper half: the lower half, read with a sign.
#pragma unroll
    for (int e = 0; e < 8; e++) word[e] = __float_as_uint(p.v[e]);
    write_raw<2, WIDE>(master, at, raw_halves<false>(word));
#endif
#endif
}

// Blocks a multiprocessor at least: three leave a thread 85 registers, which is enough for f32 moments only.
#define TOGETHER (FIRST == 0 && SECOND == 0 ? 3 : 2)
extern "C" __global__ __launch_bounds__(256, TOGETHER) void update(void* parameter, const GRADIENT* gradient, void* master,
                                                         void* first_moment, void* second_moment, u64 total,
                                                         u64 aligned, u64 decayed, u64 seed, u64 first_element,
                                                         Rule rule, const float* control) {
    if (control[2] == 0.0f) return;
    const Place at = place(total);
    if (aligned && whole(at))
        updated<true>(parameter, gradient, master, first_moment, second_moment, at, decayed, seed, first_element, rule,
                      control[0]);
    else
        updated<false>(parameter, gradient, master, first_moment, second_moment, at, decayed, seed, first_element, rule,
                       control[0]);
}
#endif
