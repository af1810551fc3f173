/* simd.h: one float vector type for all CPU code, on GCC's vector extensions, so that the same lines compile for SSE,
 * AVX2 and AVX-512.
 *   vf, vi            VF floats / ints: 16 with AVX-512, 8 with AVX, else 4. + - * / and comparisons work as on scalars
 *   vf_load vf_store  any address; vf_load_n vf_store_n: the first n of VF lanes, for tails (others read as 0, are not
 *   written); bf16 and fp16 are widened when read and rounded to nearest even when written; vf_copy: n elements
 *   vf_set vf_fma vf_max vf_min vf_select vf_sum vf_hmax
 *   vf_dot_pair       sum + a * b of both bf16 in each lane; one instruction if VF_BF16_PAIRS. vf_pair pair_rows
 *                     pair_store_row pair_store make pairs
 *   vf_exp            at most 1.3 ulp off; 0 below -87.33, stays finite above 88.37, NaN stays NaN
 *   vf_erf            at most 1.2 ulp off
 * vf_sum adds the lanes in a fixed tree: results do not depend on threads; in the last bits they depend on VF. */
#pragma once
#include <cstring>
#include "cuda_bf16.h"
#include "cuda_fp16.h"

#if defined(__AVX512F__)
#define VF 16
#elif defined(__AVX__)
#define VF 8
#else
#define VF 4
#endif
typedef float vf __attribute__((vector_size(VF * sizeof(float))));
typedef int vi __attribute__((vector_size(VF * sizeof(int))));
typedef unsigned vu __attribute__((vector_size(VF * sizeof(unsigned))));
typedef unsigned short vh __attribute__((vector_size(VF * sizeof(unsigned short))));
#define SIMD static inline __attribute__((always_inline))

typedef float vf4 __attribute__((vector_size(16)));
typedef float vf8 __attribute__((vector_size(32)));
typedef unsigned vu4 __attribute__((vector_size(16)));
typedef unsigned vu8 __attribute__((vector_size(32)));
typedef unsigned short vh4 __attribute__((vector_size(8)));
typedef unsigned short vh8 __attribute__((vector_size(16)));
#define VF8_LOW(v) __builtin_shufflevector(v, v, 0, 1, 2, 3)
#define VF8_HIGH(v) __builtin_shufflevector(v, v, 4, 5, 6, 7)
#define VF16_LOW(v) __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7)
#define VF16_HIGH(v) __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15)

SIMD vf vf_set(float x) { return x - (vf){}; }              // compiles to a broadcast; x - 0 keeps the sign of a zero
SIMD vf vf_load(const float* p) { vf v; memcpy(&v, p, sizeof v); return v; }
SIMD void vf_store(float* p, vf v) { memcpy(p, &v, sizeof v); }

/* bf16 is the upper half of a float; see cuda_bf16.h for the rounding. */
SIMD vf vf_load(const __nv_bfloat16* p)
{
    vh h;
    memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
}
SIMD void vf_store(__nv_bfloat16* p, vf v)
{
    vu bits = (vu)v, rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    vh h = __builtin_convertvector(v != v ? 0x7fffu + (vu){} : rounded, vh);
    memcpy(p, &h, sizeof h);
}

#if defined(__F16C__) && VF == 16                       // in halves: GCC 12's AVX-512 intrinsics warn about themselves
SIMD vf vf_load(const __half* p)
{
    const __m128i* half = (const __m128i*)p;
    return __builtin_shufflevector(_mm256_cvtph_ps(_mm_loadu_si128(half)), _mm256_cvtph_ps(_mm_loadu_si128(half + 1)),
                                   0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
SIMD void vf_store(__half* p, vf v)
{
    __m128i* half = (__m128i*)p;
    _mm_storeu_si128(half, _mm256_cvtps_ph(VF16_LOW(v), _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(half + 1, _mm256_cvtps_ph(VF16_HIGH(v), _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__F16C__) && VF == 8
SIMD vf vf_load(const __half* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
SIMD void vf_store(__half* p, vf v) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }
#else
SIMD vf vf_load(const __half* p) { vf v; for (int i = 0; i < VF; i++) v[i] = (float)p[i]; return v; }
SIMD void vf_store(__half* p, vf v) { for (int i = 0; i < VF; i++) p[i] = __half(v[i]); }
#endif

/* Pairs of bf16 in a lane, the first in its low half. The instructions take denormals, operands and results, as 0;
 * what is rounded is rounded to nearest even. */
#if defined(__AVX512BF16__)
#define VF_BF16_PAIRS 1
SIMD vf vf_dot_pair(vf a, vf b, vf sum) { return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
SIMD vf vf_pair(vf first, vf second)
{
    typedef short vs32 __attribute__((vector_size(64)));
    const vs32 both = (vs32)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return (vf)__builtin_shufflevector(both, both, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25,
                                       10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

/* VF / 2 pairs: neighbours in v. */
SIMD void pair_store_row(float* dst, vf v)
{
    const __m256bh pairs = _mm512_cvtneps_pbh((__m512)v);
    memcpy(dst, &pairs, sizeof pairs);
}
#else
#define VF_BF16_PAIRS 0
SIMD vf vf_dot_pair(vf a, vf b, vf sum)
{
    const vf first = (vf)((vu)a << 16) * (vf)((vu)b << 16), high_a = (vf)((vu)a & 0xffff0000u);
    return sum + first + high_a * (vf)((vu)b & 0xffff0000u);
}
SIMD vf vf_pair(vf first, vf second)
{
    __nv_bfloat16 low[VF], high[VF];
    vh a, b;
    vf_store(low, first);
    vf_store(high, second);
    memcpy(&a, low, sizeof a);
    memcpy(&b, high, sizeof b);
    return (vf)(__builtin_convertvector(a, vu) | __builtin_convertvector(b, vu) << 16);
}
SIMD void pair_store_row(float* dst, vf v) { vf_store((__nv_bfloat16*)dst, v); }
#endif

/* As many pairs as HALVES (vh, vh8) has lanes; WORDS (vu, vu8) has as many. */
template <class HALVES, class WORDS>
SIMD void pair_rows(float* dst, const __nv_bfloat16* first, const __nv_bfloat16* second)
{
    HALVES a, b;
    memcpy(&a, first, sizeof a);
    memcpy(&b, second, sizeof b);
    const WORDS pairs = __builtin_convertvector(a, WORDS) | __builtin_convertvector(b, WORDS) << 16;
    memcpy(dst, &pairs, sizeof pairs);
}
SIMD void pair_store(float* dst, __nv_bfloat16 first, __nv_bfloat16 second)
{
    const unsigned pair = first.bits | (unsigned)second.bits << 16;
    memcpy(dst, &pair, sizeof pair);
}

template <class T> SIMD vf vf_load_n(const T* p, int n)
{
    T lanes[VF];
    memset((void*)lanes, 0, sizeof lanes);
    memcpy((void*)lanes, p, (size_t)n * sizeof(T));
    return vf_load(lanes);
}
template <class T> SIMD void vf_store_n(T* p, vf v, int n)
{
    T lanes[VF];
    vf_store(lanes, v);
    memcpy((void*)p, lanes, (size_t)n * sizeof(T));
}
template <class D, class S> SIMD void vf_copy(D* dst, const S* src, size_t n)
{
    size_t i = 0;
    for (; i + VF <= n; i += VF) vf_store(dst + i, vf_load(src + i));
    if (i < n) vf_store_n(dst + i, vf_load_n(src + i, (int)(n - i)), (int)(n - i));
}

SIMD vf vf_fma(vf a, vf b, vf c) { return a * b + c; }      // one instruction under -ffp-contract=fast
SIMD vf vf_select(vi mask, vf a, vf b) { return mask ? a : b; }
SIMD vf vf_max(vf a, vf b) { return a < b ? b : a; }        // a NaN in a stays, one in b is dropped
SIMD vf vf_min(vf a, vf b) { return a > b ? b : a; }

/* The lanes are combined in halves. */
#if VF == 16
#define VF_FOLD(v, op) vf8 half = op(VF16_LOW(v), VF16_HIGH(v)); vf4 quad = op(VF8_LOW(half), VF8_HIGH(half))
#elif VF == 8
#define VF_FOLD(v, op) vf4 quad = op(VF8_LOW(v), VF8_HIGH(v))
#else
#define VF_FOLD(v, op) vf4 quad = v
#endif
#define OP_ADD(a, b) ((a) + (b))
#define OP_MAX(a, b) ((a) < (b) ? (b) : (a))

SIMD float vf_sum(vf v)
{
    VF_FOLD(v, OP_ADD);
    return (quad[0] + quad[2]) + (quad[1] + quad[3]);
}

SIMD float vf_hmax(vf v)
{
    VF_FOLD(v, OP_MAX);
    float a = OP_MAX(quad[0], quad[2]), b = OP_MAX(quad[1], quad[3]);
    return OP_MAX(a, b);
}

/* Four elements of any of the three types. */
SIMD vf4 vf4_load(const float* p) { vf4 v; memcpy(&v, p, sizeof v); return v; }
SIMD void vf4_store(float* p, vf4 v) { memcpy(p, &v, sizeof v); }
SIMD vf4 vf4_load(const __nv_bfloat16* p)
{
    vh4 h;
    memcpy(&h, p, sizeof h);
    return (vf4)(__builtin_convertvector(h, vu4) << 16);
}
#ifdef __F16C__
SIMD vf4 vf4_load(const __half* p) { return _mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)p)); }
#else
SIMD vf4 vf4_load(const __half* p) { return (vf4){(float)p[0], (float)p[1], (float)p[2], (float)p[3]}; }
#endif
template <class T> SIMD void vf4_store(T* p, vf4 v) { for (int i = 0; i < 4; i++) p[i] = T(v[i]); }

/* e^x = 2^n * e^r with n = round(x / ln 2) and |r| <= ln2 / 2, where a polynomial does (Cephes expf). Adding 1.5 * 2^23
 * rounds to an integer and leaves it in the low bits of the mantissa, from where a shift makes it the exponent of 2^n.
 * */
SIMD vf vf_exp(vf x)
{
    const vf too_small = vf_set(-87.33f), too_large = vf_set(88.37f), round_to_int = vf_set(12582912.0f);
    vf y = vf_max(vf_min(x, too_large), too_small);
    vf shifted = y * 1.44269504f + round_to_int, n = shifted - round_to_int;
    vf r = y - n * 0.693359375f + n * 2.12194440e-4f;       // ln 2 in two parts, the first exact in the multiplication
    vf p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.0f);
    vi two_to_n = ((vi)shifted << 23) + 0x3f800000;
    return vf_select(x < too_small, vf{}, p * (vf)two_to_n);
}

/* erf by Norbert Juffa's two minimax polynomials: odd in x near 0, 1 - exp(polynomial of |x|) outside. */
SIMD vf vf_erf(vf x)
{
    vf t = x < 0 ? -x : x, s = x * x;
    vf tail = (-1.72853470e-5f * t + 3.83197126e-4f) * s + (-3.88396438e-3f * t + 2.42546219e-2f);
    tail = tail * t - 1.06777877e-1f;
    tail = tail * t - 6.34846687e-1f;
    tail = tail * t - 1.28717512e-1f;
    tail = 1.0f - vf_exp(tail * t - t);
    tail = t > 4.0f ? vf_set(1.0f) : tail;                  // the polynomial is no longer monotonic far out
    vf near = -5.96761703e-4f * s + 4.99119423e-3f;
    near = near * s - 2.67681349e-2f;
    near = near * s + 1.12819925e-1f;
    near = near * s - 3.76125336e-1f;
    near = near * s + 1.28379166e-1f;
    near = near * x + x;
    return t > 0.927734375f ? (x < 0 ? -tail : tail) : near;
}
