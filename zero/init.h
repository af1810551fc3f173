/* init.h: the weights at step 0, from a counter: element i of a tensor depends on the seed, the tensor's name and i
 * alone, so it is the same for any number of ranks, stage, precision and thread. dev/init.py is the same in NumPy.
 *   mix(z)     z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31
 *              (the finaliser of SplitMix64: Steele, Lea, Flood 2014), all in uint64
 *   key        fnv1a64(name) ^ mix(seed + 0x9E3779B97F4A7C15)
 *   z          mix(key + (i + 1) * 0x9E3779B97F4A7C15)
 *   u1, u2     ((z >> 32) + 1) / 2^32,  (z & 0xffffffff) / 2^32
 *   element    std * sqrt(-2 ln u1) * cos(2 pi u2), in double, rounded to fp32   (Box & Muller 1958)
 * i counts row-major in the shape of the HF file, however the tensor is cut; the name is the HF name, `transformer.`
 * included. */
#pragma once
#include "shard.h"
#include "kernels/common.cuh"

static inline uint64_t fnv1a64(const void* data, size_t size_bytes, uint64_t hash = 0xcbf29ce484222325ull)
{
    for (size_t i = 0; i < size_bytes; i++) hash = (hash ^ ((const unsigned char*)data)[i]) * 0x100000001b3ull;
    return hash;
}

enum { INIT_BLOCK = 512 };

/* ln u of a positive u: with its exponent apart, u is in [sqrt(1/2), sqrt(2)), where 2 artanh((u - 1) / (u + 1)) is a
 * short series. */
static inline double init_log(double u)
{
    const int64_t sqrt_half = 0x3fe6a09e667f3bcd;
    int64_t bits;
    memcpy(&bits, &u, sizeof bits);
    const int exponent = (int)((bits - sqrt_half) >> 52);
    bits -= (int64_t)((uint64_t)(int64_t)exponent << 52);
    memcpy(&u, &bits, sizeof u);
    const double s = (u - 1) / (u + 1), t = s * s;
    double sum = 1.0 / 21;
    for (int n = 19; n >= 3; n -= 2) sum = sum * t + 1.0 / n;
    return exponent * M_LN2 + (2 * s + 2 * s * t * sum);
}

/* cos(2 pi n / 2^32): the series of cosine or sine at the distance from the nearest quarter turn. */
static inline double init_cos(uint32_t n)
{
    const uint32_t quarters = (n + 0x20000000u) >> 30;
    const double x = (int32_t)(n - (quarters << 30)) * (2 * M_PI / 4294967296.0), t = x * x;
    double cosine = 1, sine = 1;
    for (int k = 16; k >= 2; k -= 2) {
        cosine = 1 - cosine * t * (1 / (k * (k - 1.0)));
        sine = 1 - sine * t * (1 / (k * (k + 1.0)));
    }
    const double size = quarters & 1 ? sine * x : cosine;
    return (quarters + 1) & 2 ? -size : size;
}

/* The formula above, by the C library. */
static float init_element(uint64_t z, double std)
{
    const double u1 = ((double)(z >> 32) + 1) / 4294967296.0, u2 = (double)(z & 0xffffffffu) / 4294967296.0;
    return (float)(std * sqrt(-2 * log(u1)) * cos(2 * M_PI * u2));
}

/* Elements of count <= INIT_BLOCK values of z, by series that the compiler turns into vectors: three times as fast.
 * They and the library are off by less than 1e-15 of the radius, so where ten times that to either side rounds to the
 * same fp32 number it is the library's, on every instruction set. Elsewhere, one in a million, the library is asked. */
static void init_elements(float* out, const uint64_t* z, int count, double std)
{
    float below[INIT_BLOCK], above[INIT_BLOCK];
    #pragma omp simd
    for (int i = 0; i < count; i++) {
        const double radius = std * sqrt(-2 * init_log(((double)(uint32_t)(z[i] >> 32) + 1) / 4294967296.0));
        const double value = radius * init_cos((uint32_t)z[i]), margin = radius * 1e-14;
        below[i] = (float)(value - margin);
        above[i] = (float)(value + margin);
    }
    for (int i = 0; i < count; i++)
        out[i] = below[i] == above[i] && below[i] != 0 ? below[i] : init_element(z[i], std);
}

/* out (count) = elements of tensor t, from `flat` of the flat space on. */
static void tensor_init(float* out, const Tensor* t, size_t flat, size_t count, uint64_t seed)
{
    const uint64_t key = fnv1a64(t->name, strlen(t->name)) ^ mix64(seed + GOLDEN_GAMMA);
    const Rectangle place = tensor_rectangle(t, flat);
    #pragma omp parallel for schedule(static)
    for (size_t first = 0; first < count; first += INIT_BLOCK) {
        const size_t left = count - first;
        const int n = left < INIT_BLOCK ? (int)left : (int)INIT_BLOCK;
        uint64_t z[INIT_BLOCK];
        for (int i = 0; i < n; i++) {
            out[first + i] = (float)t->init_value;
            z[i] = mix64(key + (element_index(place, first + i) + 1) * GOLDEN_GAMMA);
        }
        if (t->init_std != 0) init_elements(out + first, z, n, t->init_std);
    }
}
