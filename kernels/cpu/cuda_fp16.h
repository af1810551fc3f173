/* cuda_fp16.h: IEEE half precision under NVIDIA's names: storage and conversions, round to nearest even.
 * Conversions are without branches, so that loops over them are vectorised. Where whole vectors are at hand, simd.h and
 * reduce.h use F16C; the bits are the same, but for the payload of a NaN. */
#pragma once
#include <cstdint>
#include <cstring>
#include "cuda_runtime.h"
#ifdef __F16C__
#include <immintrin.h>
#endif

struct __half_raw { unsigned short x; };

static inline unsigned short fp16_bits_from_float(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    const uint32_t sign = (u >> 16) & 0x8000u, a = u & 0x7FFFFFFFu;
    float mag;                                                     // below 2^-14: adding 0.5 aligns and rounds
    memcpy(&mag, &a, 4);
    mag += 0.5f;
    uint32_t tiny;
    memcpy(&tiny, &mag, 4);
    const uint32_t normal = (a + 0xC8000FFFu + ((a >> 13) & 1u)) >> 13;   // exponent bias 127 -> 15, to nearest even
    uint32_t rounded = a < 0x38800000u ? tiny - 0x3F000000u : normal;
    rounded = a >= 0x477FF000u ? 0x7C00u : rounded;                // 65520 and up round to infinity
    return (unsigned short)(a > 0x7F800000u ? 0x7FFFu : sign | rounded);  // NaN as NVIDIA's conversion gives it
}

static inline float fp16_bits_to_float(unsigned short bits)
{
    const uint32_t sign = (uint32_t)(bits & 0x8000u) << 16, a = (uint32_t)(bits & 0x7FFFu) << 13;
    float f;
    memcpy(&f, &a, 4);
    f *= 5.192296858534828e33f;                                    // 2^112: exponent bias 15 -> 127, exact
    uint32_t u;
    memcpy(&u, &f, 4);
    u = sign | (a >= 0x0F800000u ? a | 0x7F800000u : u);           // infinity and NaN
    memcpy(&f, &u, 4);
    return f;
}

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
static inline __half __float2half_rn(float a) { return __half(a); }
static inline __half __ushort_as_half(unsigned short i) { return __half(__half_raw{i}); }
static inline unsigned short __half_as_ushort(__half a) { return a.bits; }
static inline __half2 __floats2half2_rn(float a, float b) { return {__half(a), __half(b)}; }
