/* hostdev.h: HOSTDEV, before a function that kernels and host code call, also host code that no CUDA compiler sees. */
#pragma once

#ifdef __CUDACC__
#define HOSTDEV static __host__ __device__ __forceinline__
#else
#define HOSTDEV static inline
#endif
