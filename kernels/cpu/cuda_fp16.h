/* cuda_fp16.h: IEEE half precision under NVIDIA's names: storage and conversions, round to nearest even.
 * F16C where the compiler may use it, integer arithmetic elsewhere; both give the same bits. */
#pragma once
#include <cstdint>
#include <cstring>
#include "cuda_runtime.h"
#ifdef __F16C__
#include <immintrin.h>
#endif

struct __half_raw { unsigned short x; };

static inline unsigned short fp16_bits_from_float_soft(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    uint32_t sign = (u >> 16) & 0x8000u, a = u & 0x7FFFFFFFu;
    if (a > 0x7F800000u) return 0x7FFF;                            // NaN, as NVIDIA's conversion gives it
    if (a >= 0x477FF000u) return (unsigned short)(sign | 0x7C00u); // 65520 and up round to infinity
    if (a < 0x38800000u) {                                         // below 2^-14: adding 0.5 aligns and rounds
        float mag;
        memcpy(&mag, &a, 4);
        mag += 0.5f;
        memcpy(&a, &mag, 4);
        return (unsigned short)(sign | (a - 0x3F000000u));
    }
    a += 0xC8000FFFu + ((a >> 13) & 1u);                           // exponent bias 127 -> 15, round to nearest even
    return (unsigned short)(sign | (a >> 13));
}

static inline float fp16_bits_to_float_soft(unsigned short bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16, exponent = (bits >> 10) & 31u, mantissa = bits & 0x3FFu;
    uint32_t u;
    if (exponent == 31) u = 0x7F800000u | (mantissa << 13);
    else if (exponent != 0) u = ((exponent + 112) << 23) | (mantissa << 13);
    else {
        float tiny = (float)mantissa * 5.9604644775390625e-8f;     // 2^-24: exact
        memcpy(&u, &tiny, 4);
    }
    u |= sign;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

#ifdef __F16C__
static inline unsigned short fp16_bits_from_float(float f)
{
    return f != f ? 0x7FFF : (unsigned short)_cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT);
}
static inline float fp16_bits_to_float(unsigned short bits) { return _cvtsh_ss(bits); }
#else
static inline unsigned short fp16_bits_from_float(float f) { return fp16_bits_from_float_soft(f); }
static inline float fp16_bits_to_float(unsigned short bits) { return fp16_bits_to_float_soft(bits); }
#endif

struct __half {
    unsigned short bits;
    __half() = default;
    __half(float f) : bits(fp16_bits_from_float(f)) {}
    __half(__half_raw raw) : bits(raw.x) {}
    operator float() const { return fp16_bits_to_float(bits); }
};
struct __half2 { __half x, y; } __align__(4);
typedef __half half;
typedef __half2 half2;

static inline float __half2float(__half a) { return fp16_bits_to_float(a.bits); }
static inline __half __float2half(float a) { return __half(a); }
static inline __half __float2half_rn(float a) { return __half(a); }
static inline __half __ushort_as_half(unsigned short i) { return __half(__half_raw{i}); }
static inline unsigned short __half_as_ushort(__half a) { return a.bits; }
static inline __half2 __floats2half2_rn(float a, float b) { return {__half(a), __half(b)}; }
static inline float2 __half22float2(__half2 a) { return {(float)a.x, (float)a.y}; }
