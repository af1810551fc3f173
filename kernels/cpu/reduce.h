/* reduce.h: out = op over ranks of inputs[0..num_ranks-1], element by element and always in rank order, so the result
 * does not depend on who computes it or on how the data was cut. 16-bit and 32-bit floats are accumulated in fp32 and
 * rounded once, fp64 in fp64, integers as they are. out may be one of the inputs. */
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <nccl.h>
#include "data/error.h"

static inline size_t nccl_type_bytes(ncclDataType_t type)
{
    switch (type) {
    case ncclInt8: case ncclUint8: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    }
    die("NCCL data type %d is not supported", (int)type);
}

/* T is the type in memory, A what is added. */
template <class T, class A> static inline void reduce_load(A* a, const T* x, size_t n)
{
    for (size_t i = 0; i < n; i++) a[i] = (A)x[i];
}
template <class T, class A> static inline void reduce_store(T* x, const A* a, size_t n)
{
    for (size_t i = 0; i < n; i++) x[i] = (T)a[i];
}

static inline void reduce_load(float* a, const __nv_bfloat16* x, size_t n)
{
    for (size_t i = 0; i < n; i++) a[i] = bf16_bits_to_float(x[i].bits);
}
static inline void reduce_store(__nv_bfloat16* x, const float* a, size_t n)
{
    for (size_t i = 0; i < n; i++) x[i].bits = bf16_bits_from_float(a[i]);
}

#ifdef __F16C__
static inline void reduce_load(float* a, const __half* x, size_t n)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(a + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(x + i))));
    for (; i < n; i++) a[i] = fp16_bits_to_float(x[i].bits);
}
static inline void reduce_store(__half* x, const float* a, size_t n)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i*)(x + i), _mm256_cvtps_ph(_mm256_loadu_ps(a + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < n; i++) x[i].bits = fp16_bits_from_float(a[i]);
}
#else
static inline void reduce_load(float* a, const __half* x, size_t n)
{
    for (size_t i = 0; i < n; i++) a[i] = fp16_bits_to_float(x[i].bits);
}
static inline void reduce_store(__half* x, const float* a, size_t n)
{
    for (size_t i = 0; i < n; i++) x[i].bits = fp16_bits_from_float(a[i]);
}
#endif

template <class A> static inline void reduce_combine(A* a, const A* b, size_t n, ncclRedOp_t op)
{
    switch (op) {
    case ncclProd:
        for (size_t i = 0; i < n; i++) a[i] = (A)(a[i] * b[i]);
        break;
    case ncclMax:
        for (size_t i = 0; i < n; i++) a[i] = b[i] > a[i] ? b[i] : a[i];
        break;
    case ncclMin:
        for (size_t i = 0; i < n; i++) a[i] = b[i] < a[i] ? b[i] : a[i];
        break;
    case ncclSum: case ncclAvg: case ncclNumOps:
        for (size_t i = 0; i < n; i++) a[i] = (A)(a[i] + b[i]);
    }
}

/* In blocks that stay in the first-level cache while the ranks are gone through. */
template <class T, class A>
static void reduce_typed(void* out, const void* const* inputs, int num_ranks, size_t n, ncclRedOp_t op)
{
    const size_t BLOCK = 1024;
    size_t num_blocks = (n + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static) if (num_blocks >= 32)
    for (size_t block = 0; block < num_blocks; block++) {
        size_t begin = block * BLOCK, len = n - begin < BLOCK ? n - begin : BLOCK;
        A sum[BLOCK], next[BLOCK];
        reduce_load(sum, (const T*)inputs[0] + begin, len);
        for (int r = 1; r < num_ranks; r++) {
            reduce_load(next, (const T*)inputs[r] + begin, len);
            reduce_combine(sum, next, len, op);
        }
        if (op == ncclAvg) {
            for (size_t i = 0; i < len; i++) sum[i] = (A)(sum[i] / (A)num_ranks);
        }
        reduce_store((T*)out + begin, sum, len);
    }
}

static inline void reduce_ranks(void* out, const void* const* inputs, int num_ranks, size_t n, ncclDataType_t type,
                                ncclRedOp_t op)
{
    switch (type) {
    case ncclFloat32: return reduce_typed<float, float>(out, inputs, num_ranks, n, op);
    case ncclBfloat16: return reduce_typed<__nv_bfloat16, float>(out, inputs, num_ranks, n, op);
    case ncclFloat16: return reduce_typed<__half, float>(out, inputs, num_ranks, n, op);
    case ncclFloat64: return reduce_typed<double, double>(out, inputs, num_ranks, n, op);
    case ncclInt8: return reduce_typed<int8_t, int8_t>(out, inputs, num_ranks, n, op);
    case ncclUint8: return reduce_typed<uint8_t, uint8_t>(out, inputs, num_ranks, n, op);
    case ncclInt32: return reduce_typed<int32_t, int32_t>(out, inputs, num_ranks, n, op);
    case ncclUint32: return reduce_typed<uint32_t, uint32_t>(out, inputs, num_ranks, n, op);
    case ncclInt64: return reduce_typed<int64_t, int64_t>(out, inputs, num_ranks, n, op);
    case ncclUint64: return reduce_typed<uint64_t, uint64_t>(out, inputs, num_ranks, n, op);
    }
    die("NCCL data type %d is not supported", (int)type);
}
