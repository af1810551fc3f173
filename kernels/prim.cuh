/* prim.cuh: the names kernels are written in. Everything that differs between a GPU and its emulation is here:
 * launches, shared memory, and each inline PTX instruction with its twin on the CPU.
 *   LAUNCH(kernel, grid, block, smem_bytes, stream, args...)     template kernels: LAUNCH((k<a, b>), ...)
 *   SHARED(T, name, [n][m])      a shared array           DYN_SHARED(T, name)    T* to the launch's smem_bytes
 *   DEV, HOSTDEV                 device function, host and device function
 *   warp_sum warp_max            over all 32 lanes, same bits in each (butterfly order)
 *   Vec128<T>, ld128 st128       16 bytes of T, aligned; _stream: read or written once, keep it out of the caches
 *   load_whole store_whole       a struct of up to 16 bytes as one access
 *   cp_async16 _commit _wait<N>  global to shared, 16 bytes, asynchronous; valid = false writes zeros
 *   ldmatrix_x4(_trans)          four 8x8 matrices of 16-bit elements, one row address a lane
 *   mma_m16n8k16<T>              d(16,8) += a(16,16) b(16,8), T = __nv_bfloat16 or __half, fp32 accumulators
 *   exp2_fast                    2^x in one instruction, 2 ulp off at most; results below 2^-126 are 0
 *   mul_rn add_rn                a * b and a + b, which the compiler does not contract into an fma
 * Three builds: nvcc (DEVICE_CUDA); DEVICE_EMU, kernels on the CPU through kernels/emu/emu.h; DEVICE_CPU, which has no
 * kernels and takes HOSTDEV and the runtime's names from here. */
#pragma once
#include <cstdint>
#include <cstring>
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "hostdev.h"

#if defined(DEVICE_CPU)

#define DEV static inline

#elif defined(DEVICE_EMU)

#define DEV static inline
#include "kernels/emu/emu.h"

#define LAUNCH(kernel, grid, block, smem_bytes, stream, ...) \
    EmuKernel<(kernel)>::launch(#kernel, dim3(grid), dim3(block), smem_bytes, stream, ##__VA_ARGS__)
#define SHARED(T, name, ...) \
    static const char name##_key = 0; \
    typedef T name##_type __VA_ARGS__; \
    name##_type& name = *static_cast<name##_type*>( \
        emu_static_shared(&name##_key, sizeof(name##_type), alignof(name##_type), #name))
#define DYN_SHARED(T, name) T* name = static_cast<T*>(emu_dyn_shared(EMU_HERE))

template <class T> DEV T warp_sum(T v, EMU_CALLER) { return emu_warp_sum(v, file, line); }
template <class T> DEV T warp_max(T v, EMU_CALLER) { return emu_warp_max(v, file, line); }

DEV void cp_async16(void* dst, const void* src, bool valid = true, EMU_CALLER)
{
    emu_cp_async16(dst, src, valid, file, line);
}
DEV void cp_async_commit() { emu_cp_async_commit(); }
template <int N> DEV void cp_async_wait() { emu_cp_async_wait(N); }

DEV void ldmatrix_x4(uint32_t (&r)[4], const void* row, EMU_CALLER) { emu_ldmatrix_x4(r, row, false, file, line); }
DEV void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, EMU_CALLER)
{
    emu_ldmatrix_x4(r, row, true, file, line);
}
template <class T> DEV void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], EMU_CALLER)
{
    emu_mma_m16n8k16(d, a, b, emu_is_bf16((const T*)nullptr), file, line);
}
DEV float exp2_fast(float x) { return x < -126.0f ? 0.0f : exp2f(x); }
DEV float mul_rn(float a, float b) { return a * b; }         // compiled with -ffp-contract=off
DEV float add_rn(float a, float b) { return a + b; }

#else

#define DEV static __device__ __forceinline__
#define LAUNCH(kernel, grid, block, smem_bytes, stream, ...) \
    (kernel)<<<dim3(grid), dim3(block), smem_bytes, stream>>>(__VA_ARGS__)
#define SHARED(T, name, ...) __shared__ __align__(16) T name __VA_ARGS__
#define DYN_SHARED(T, name) \
    extern __shared__ __align__(128) unsigned char dyn_shared_bytes[]; \
    T* name = reinterpret_cast<T*>(dyn_shared_bytes)

template <class T> DEV T warp_sum(T v)
{
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, offset);
    return v;
}
template <class T> DEV T warp_max(T v)
{
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        T other = __shfl_xor_sync(0xFFFFFFFFu, v, offset);
        v = v < other ? other : v;
    }
    return v;
}

DEV unsigned shared_addr(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

DEV void cp_async16(void* dst, const void* src, bool valid = true)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(shared_addr(dst)), "l"(src), "r"(valid ? 16 : 0) : "memory");
}
DEV void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEV void cp_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }

DEV void ldmatrix_x4(uint32_t (&r)[4], const void* row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_addr(row)) : "memory");
}
DEV void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_addr(row)) : "memory");
}

template <class T> DEV void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
template <> __device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4],
                                                                        const uint32_t (&b)[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <> __device__ __forceinline__ void mma_m16n8k16<__half>(float (&d)[4], const uint32_t (&a)[4],
                                                                 const uint32_t (&b)[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

DEV float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEV float mul_rn(float a, float b) { return __fmul_rn(a, b); }
DEV float add_rn(float a, float b) { return __fadd_rn(a, b); }

#endif

/* One 128-bit access: on the device one instruction, and the emulator sees one access and checks its alignment. */
#ifndef DEVICE_CPU
template <class T> struct __align__(16) Vec128 {
    static constexpr int SIZE = 16 / (int)sizeof(T);
    T v[SIZE];
    __host__ __device__ __forceinline__ T& operator[](int i) { return v[i]; }
    __host__ __device__ __forceinline__ const T& operator[](int i) const { return v[i]; }
};

#ifdef DEVICE_EMU
template <class V> DEV V load_whole(const V* p)
{
    V x;
    emu_load(&x, p, sizeof x);
    return x;
}
template <class V> DEV void store_whole(V* p, const V& x) { emu_store(p, &x, sizeof x); }
template <class T> DEV Vec128<T> ld128(const T* p, EMU_CALLER)
{
    emu_check_aligned(p, 16, "ld128", file, line);
    return load_whole((const Vec128<T>*)p);
}
template <class T> DEV void st128(T* p, const Vec128<T>& x, EMU_CALLER)
{
    emu_check_aligned(p, 16, "st128", file, line);
    store_whole((Vec128<T>*)p, x);
}
template <class T> DEV Vec128<T> ld128_stream(const T* p, EMU_CALLER) { return ld128(p, file, line); }
template <class T> DEV void st128_stream(T* p, const Vec128<T>& x, EMU_CALLER) { st128(p, x, file, line); }
#else
template <class V> DEV V load_whole(const V* p) { return *p; }
template <class V> DEV void store_whole(V* p, const V& x) { *p = x; }
template <class T> DEV Vec128<T> vec128_from_bits(uint4 bits)
{
    Vec128<T> x;
    memcpy(&x, &bits, sizeof bits);
    return x;
}
template <class T> DEV uint4 vec128_bits(const Vec128<T>& x)
{
    uint4 bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
template <class T> DEV Vec128<T> ld128(const T* p) { return vec128_from_bits<T>(*reinterpret_cast<const uint4*>(p)); }
template <class T> DEV Vec128<T> ld128_stream(const T* p)
{
    return vec128_from_bits<T>(__ldcs(reinterpret_cast<const uint4*>(p)));
}
template <class T> DEV void st128(T* p, const Vec128<T>& x) { *reinterpret_cast<uint4*>(p) = vec128_bits(x); }
template <class T> DEV void st128_stream(T* p, const Vec128<T>& x)
{
    __stcs(reinterpret_cast<uint4*>(p), vec128_bits(x));
}
#endif
#endif
