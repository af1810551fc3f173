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

/* out (count) = elements of tensor t, from `flat` of the flat space on. */
static void tensor_init(float* out, const Tensor* t, size_t flat, size_t count, uint64_t seed)
{
    const uint64_t key = fnv1a64(t->name, strlen(t->name)) ^ mix64(seed + GOLDEN_GAMMA);
    const Rectangle place = tensor_rectangle(t, flat);
    #pragma omp parallel for schedule(static)
    for (size_t k = 0; k < count; k++) {
        if (t->init_std == 0) { out[k] = (float)t->init_value; continue; }
        uint64_t z = mix64(key + (element_index(place, k) + 1) * GOLDEN_GAMMA);
        double u1 = ((double)(z >> 32) + 1) / 4294967296.0, u2 = (double)(z & 0xffffffffu) / 4294967296.0;
        out[k] = (float)(t->init_std * sqrt(-2 * log(u1)) * cos(2 * M_PI * u2));
    }
}
