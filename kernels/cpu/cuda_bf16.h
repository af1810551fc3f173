/* cuda_bf16.h: bfloat16 under NVIDIA's names: storage and conversions, round to nearest even. Arithmetic is in float.
 * A NaN becomes 0x7FFF, as NVIDIA's conversion gives it. */
#pragma once
#include <cstdint>
#include <cstring>
#include "cuda_runtime.h"

struct __nv_bfloat16_raw { unsigned short x; };

/* Adding half of the last kept bit, and that bit itself, carries exactly when rounding to nearest even does. */
static inline unsigned short bf16_bits_from_float(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    return (unsigned short)(f != f ? 0x7FFFu : rounded);
}

static inline float bf16_bits_to_float(unsigned short bits)
{
    uint32_t u = (uint32_t)bits << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

struct __nv_bfloat16 {
    unsigned short bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float f) : bits(bf16_bits_from_float(f)) {}
    __nv_bfloat16(__nv_bfloat16_raw raw) : bits(raw.x) {}
    operator float() const { return bf16_bits_to_float(bits); }
};
struct __nv_bfloat162 { __nv_bfloat16 x, y; } __align__(4);
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

static inline float __bfloat162float(__nv_bfloat16 a) { return bf16_bits_to_float(a.bits); }
static inline __nv_bfloat16 __float2bfloat16_rn(float a) { return __nv_bfloat16(a); }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short i) { return __nv_bfloat16(__nv_bfloat16_raw{i}); }
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 a) { return a.bits; }
static inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {__nv_bfloat16(a), __nv_bfloat16(b)}; }
