/* vec.cuh: neighbouring elements of a row, read and written together as floats. In the CPU build simd.h does this.
 *   load_vec store_vec   W elements of T: one 16-byte access where they fill it, an 8-byte one for four 16-bit
 *                        elements, element by element for W = 1
 *   VEC                  floatX elements in 16 bytes; kernels are compiled for W = VEC and W = 1, the launcher picks
 *   round_x              the float that floatX keeps of one
 *   is_vec               every row starts on 16 bytes and is whole vectors, so W = VEC may be launched
 *   block_sum block_max  over a block of up to 1024 threads (whole warps), same bits in each thread */
#pragma once
#include "profile.h"

#ifdef DEVICE_CPU
#include "kernels/cpu/simd.h"
#else

static constexpr int VEC = 16 / (int)sizeof(floatX);

template <class T> struct alignas(8) HalfVec { T v[8 / sizeof(T)]; };

template <int W, class T> DEV void load_vec(float (&x)[W], const T* p)
{
    if constexpr (W * sizeof(T) % 16 == 0) {
        constexpr int SIZE = 16 / (int)sizeof(T);
#pragma unroll
        for (int k = 0; k < W; k += SIZE) {
            Vec128<T> v = ld128(p + k);
#pragma unroll
            for (int i = 0; i < SIZE; i++) x[k + i] = load_f(v[i]);
        }
    } else if constexpr (W * sizeof(T) == 8) {
        HalfVec<T> v = load_whole(reinterpret_cast<const HalfVec<T>*>(p));
#pragma unroll
        for (int i = 0; i < W; i++) x[i] = load_f(v.v[i]);
    } else {
#pragma unroll
        for (int i = 0; i < W; i++) x[i] = load_f(p[i]);
    }
}

template <int W, class T> DEV void store_vec(T* p, const float (&x)[W])
{
    if constexpr (W * sizeof(T) % 16 == 0) {
        constexpr int SIZE = 16 / (int)sizeof(T);
#pragma unroll
        for (int k = 0; k < W; k += SIZE) {
            Vec128<T> v;
#pragma unroll
            for (int i = 0; i < SIZE; i++) store_f(&v[i], x[k + i]);
            st128(p + k, v);
        }
    } else if constexpr (W * sizeof(T) == 8) {
        HalfVec<T> v;
#pragma unroll
        for (int i = 0; i < W; i++) store_f(&v.v[i], x[i]);
        store_whole(reinterpret_cast<HalfVec<T>*>(p), v);
    } else {
#pragma unroll
        for (int i = 0; i < W; i++) store_f(p + i, x[i]);
    }
}

/* x as floatX can hold it. */
DEV float round_x(float x)
{
    floatX y;
    store_f(&y, x);
    return load_f(y);
}

/* Rows of `row_elems` elements that start at p: are they whole 16-byte vectors? */
template <class T> static bool is_vec(const T* p, size_t row_elems)
{
    return (uintptr_t)p % 16 == 0 && row_elems * sizeof(T) % 16 == 0;
}

/* `partial` is a shared array of 32 that no thread still reads; the caller may use it again after its next barrier. */
template <class T> DEV T block_sum(T x, T* partial)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    x = warp_sum(x);
    if (lane == 0) partial[warp] = x;
    __syncthreads();
    return warp_sum(lane < num_warps ? partial[lane] : T(0));
}

template <class T> DEV T block_max(T x, T* partial)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    x = warp_max(x);
    if (lane == 0) partial[warp] = x;
    __syncthreads();
    return warp_max(partial[lane < num_warps ? lane : 0]);
}

#endif
