/* common.cuh: what every op file needs: the floating-point type of this build, CUDA call checks, small helpers.
 *   floatX            storage type of parameters and activations: PREC_FP32, PREC_BF16 or PREC_FP16. Arithmetic is fp32
 *   load_f, store_f   floatX <-> float
 *   ON_CPU(call)      in the CPU build runs `call` and returns from the launcher; elsewhere nothing
 *   CUDA_CHECK(call)  a failed call names itself, file:line and the library's words
 *   gpu_capability    90 is compute capability 9.0; 0: this is the CPU build */
#pragma once
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include "data/error.h"
#include "prim.cuh"

#if !defined(PREC_FP32) && !defined(PREC_BF16) && !defined(PREC_FP16)
#define PREC_FP32
#endif
#if defined(PREC_FP32)
typedef float floatX;
#define FLOATX_NAME "fp32"
#define FLOATX_CUDA CUDA_R_32F
#define FLOATX_NCCL ncclFloat32
#elif defined(PREC_BF16)
typedef __nv_bfloat16 floatX;
#define FLOATX_NAME "bf16"
#define FLOATX_CUDA CUDA_R_16BF
#define FLOATX_NCCL ncclBfloat16
#else
typedef __half floatX;
#define FLOATX_NAME "fp16"
#define FLOATX_CUDA CUDA_R_16F
#define FLOATX_NCCL ncclFloat16
#endif

HOSTDEV float load_f(float x) { return x; }
HOSTDEV float load_f(__nv_bfloat16 x) { return __bfloat162float(x); }
HOSTDEV float load_f(__half x) { return __half2float(x); }
HOSTDEV void store_f(float* p, float x) { *p = x; }
HOSTDEV void store_f(__nv_bfloat16* p, float x) { *p = __float2bfloat16_rn(x); }
HOSTDEV void store_f(__half* p, float x) { *p = __float2half_rn(x); }

#if defined(DEVICE_CPU)
#define ON_CPU(...) do { (void)stream; __VA_ARGS__; return; } while (0)
#else
#define ON_CPU(...) ((void)0)
#endif

/* On a GPU an error of a kernel shows at a later call. */
#ifdef DEVICE_CUDA
#define CUDA_LATE "; if an earlier launch failed, CUDA_LAUNCH_BLOCKING=1 shows which"
#else
#define CUDA_LATE ""
#endif
#define CUDA_CHECK(call) do { \
    cudaError_t cuda_error_ = (call); \
    if (cuda_error_ != cudaSuccess) die_at(WHERE, "%s: %s%s", #call, cudaGetErrorString(cuda_error_), CUDA_LATE); \
} while (0)

static inline int gpu_capability()
{
    int device, major, minor;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    return 10 * major + minor;
}

/* The finaliser of SplitMix64 (Steele, Lea, Flood 2014): 64 well mixed bits from any 64. */
static constexpr uint64_t GOLDEN_GAMMA = 0x9E3779B97F4A7C15ull;
HOSTDEV uint64_t mix64(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

static inline size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }
static inline size_t round_up(size_t a, size_t multiple) { return ceil_div(a, multiple) * multiple; }
