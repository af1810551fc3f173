/* emu.h: CUDA's device side on the CPU, for the emulated build. Kernels see NVIDIA's names; emu.cpp runs them.
 * One OS thread. A CUDA thread that reaches a barrier or a warp-wide call keeps a fiber of its own while others run;
 * a kernel without them is a plain loop over its threads. Blocks run one after another, in an order of the seed.
 * A warp-wide call (shuffle, vote, __syncwarp, ldmatrix, mma) is executed once, for all lanes, by the last to come.
 * Every call that can wait knows its file and line: the default arguments EMU_CALLER. */
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <tuple>
#include <type_traits>
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define EMU_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define EMU_HERE __FILE__, __LINE__

extern uint3 emu_thread_idx, emu_block_idx;
extern dim3 emu_block_dim, emu_grid_dim;
#define threadIdx emu_thread_idx
#define blockIdx emu_block_idx
#define blockDim emu_block_dim
#define gridDim emu_grid_dim
static const int warpSize = 32;

/* ---- launches */

struct EmuLaunch {
    const char* name;
    const void* func;
    void (*call)(EmuLaunch* launch);                 // one thread
    dim3 grid, block;
    size_t shared_bytes, size_bytes;                 // size_bytes: of the launch with its arguments
};
void emu_launch(EmuLaunch* launch, cudaStream_t stream);   // takes a malloc'ed launch

template <auto K> struct EmuKernel;
template <class... P, void (*K)(P...)> struct EmuKernel<K> {
    static_assert((std::is_trivially_copyable<P>::value && ...), "kernel parameters are plain values");
    struct Launch : EmuLaunch { std::tuple<P...> args; };

    static void call(EmuLaunch* launch) { std::apply(K, static_cast<Launch*>(launch)->args); }

    /* Arguments are converted to the kernel's parameter types now, as <<<>>> does. */
    template <class... A>
    static void launch(const char* name, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, A... args)
    {
        void* memory = malloc(sizeof(Launch));
        Launch* launch = new (memory) Launch{{name, (const void*)K, call, grid, block, shared_bytes, sizeof(Launch)},
                                             std::tuple<P...>(static_cast<P>(args)...)};
        emu_launch(launch, stream);
    }
};

/* ---- barriers, shared memory, warp-wide calls */

enum class EmuBarrier { SYNC, OR, AND, COUNT };
int emu_barrier(EmuBarrier kind, int predicate, const char* file, int line);
void* emu_static_shared(const void* key, size_t size_bytes, size_t align, const char* name);
void* emu_dyn_shared(const char* file, int line);
void emu_check_aligned(const void* p, size_t align, const char* what, const char* file, int line);
void emu_yield(void);

typedef void (*EmuWarpFn)(void** lane_args, unsigned mask);
void emu_warp_call(const char* what, unsigned mask, void* lane_arg, EmuWarpFn fn, const char* file, int line);
int emu_lane(void);

static inline void __syncthreads(EMU_CALLER) { emu_barrier(EmuBarrier::SYNC, 0, file, line); }
static inline int __syncthreads_or(int p, EMU_CALLER) { return emu_barrier(EmuBarrier::OR, p, file, line); }
static inline int __syncthreads_and(int p, EMU_CALLER) { return emu_barrier(EmuBarrier::AND, p, file, line); }
static inline int __syncthreads_count(int p, EMU_CALLER) { return emu_barrier(EmuBarrier::COUNT, p, file, line); }
static inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, EMU_CALLER)
{
    emu_warp_call("__syncwarp", mask, nullptr, nullptr, file, line);
}

struct EmuShuffle { uint64_t in, out; int src_lane; };
void emu_shuffle_lanes(void** lane_args, unsigned mask);

template <class T>
static inline T emu_shuffle(const char* what, unsigned mask, T v, int src_lane, const char* file, int line)
{
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "shuffles move at most 8 bytes");
    EmuShuffle lane = {0, 0, src_lane};
    memcpy(&lane.in, &v, sizeof(T));
    emu_warp_call(what, mask, &lane, emu_shuffle_lanes, file, line);
    memcpy((void*)&v, &lane.out, sizeof(T));
    return v;
}

/* A lane whose source would be outside of its group of `width` lanes keeps its own value. */
template <class T> static inline T __shfl_sync(unsigned mask, T v, int src, int width = 32, EMU_CALLER)
{
    int group = emu_lane() & ~(width - 1);
    return emu_shuffle("__shfl_sync", mask, v, group | (src & (width - 1)), file, line);
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T v, int lane_mask, int width = 32, EMU_CALLER)
{
    int lane = emu_lane(), src = lane ^ lane_mask, group = lane & ~(width - 1);
    return emu_shuffle("__shfl_xor_sync", mask, v, src < group + width ? src : lane, file, line);
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, EMU_CALLER)
{
    int lane = emu_lane(), src = lane + (int)delta, group = lane & ~(width - 1);
    return emu_shuffle("__shfl_down_sync", mask, v, src < group + width ? src : lane, file, line);
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, EMU_CALLER)
{
    int lane = emu_lane(), src = lane - (int)delta, group = lane & ~(width - 1);
    return emu_shuffle("__shfl_up_sync", mask, v, src >= group ? src : lane, file, line);
}

unsigned emu_ballot(const char* what, unsigned mask, int predicate, const char* file, int line);
static inline unsigned __ballot_sync(unsigned mask, int p, EMU_CALLER)
{
    return emu_ballot("__ballot_sync", mask, p, file, line);
}
static inline int __any_sync(unsigned mask, int p, EMU_CALLER)
{
    return emu_ballot("__any_sync", mask, p, file, line) != 0;
}
static inline int __all_sync(unsigned mask, int p, EMU_CALLER)
{
    return emu_ballot("__all_sync", mask, p, file, line) == mask;
}

/* The five exchange steps of a butterfly in one call, in the same order of operations, so with the same bits. */
template <class T> static void emu_sum_lanes(void** lane_args, unsigned)
{
    T v[32], w[32];
    for (int i = 0; i < 32; i++) v[i] = *(T*)lane_args[i];
    for (int offset = 16; offset > 0; offset /= 2) {
        for (int i = 0; i < 32; i++) w[i] = v[i] + v[i ^ offset];
        memcpy(v, w, sizeof v);
    }
    for (int i = 0; i < 32; i++) *(T*)lane_args[i] = v[i];
}
template <class T> static void emu_max_lanes(void** lane_args, unsigned)
{
    T v[32], w[32];
    for (int i = 0; i < 32; i++) v[i] = *(T*)lane_args[i];
    for (int offset = 16; offset > 0; offset /= 2) {
        for (int i = 0; i < 32; i++) w[i] = v[i] < v[i ^ offset] ? v[i ^ offset] : v[i];
        memcpy(v, w, sizeof v);
    }
    for (int i = 0; i < 32; i++) *(T*)lane_args[i] = v[i];
}
template <class T> static inline T emu_warp_sum(T v, const char* file, int line)
{
    emu_warp_call("warp_sum", 0xFFFFFFFFu, &v, emu_sum_lanes<T>, file, line);
    return v;
}
template <class T> static inline T emu_warp_max(T v, const char* file, int line)
{
    emu_warp_call("warp_max", 0xFFFFFFFFu, &v, emu_max_lanes<T>, file, line);
    return v;
}

/* ---- asynchronous copies and tensor cores, behind prim.cuh's wrappers */

void emu_cp_async16(void* dst, const void* src, bool valid, const char* file, int line);
void emu_cp_async_commit(void);
void emu_cp_async_wait(int num_groups_left);
void emu_ldmatrix_x4(uint32_t (&r)[4], const void* row, bool transposed, const char* file, int line);
void emu_mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool is_bf16, const char* file,
                      int line);
extern uint64_t emu_num_mma;                        // how many of all warps so far
static inline bool emu_is_bf16(const __nv_bfloat16*) { return true; }
static inline bool emu_is_bf16(const __half*) { return false; }

/* ---- memory and atomics: threads are switched only at calls that wait, so a plain read-modify-write is atomic */

template <class T> static inline T __ldcs(const T* p) { return *p; }
template <class T> static inline void __stcs(T* p, T v) { *p = v; }

#ifdef EMU_CHECK
void emu_load(void* to, const void* from, size_t size_bytes);    // one access, whatever the compiler would make of it
void emu_store(void* to, const void* from, size_t size_bytes);
void emu_fence(void);
void emu_atomic(void* p, size_t size_bytes, const void* pc);
#define EMU_UNCHECKED static __attribute__((noinline, unused, no_sanitize("thread")))
#define EMU_ATOMIC_SEEN(p) emu_atomic(p, sizeof *(p), __builtin_return_address(0))
#else
static inline void emu_load(void* to, const void* from, size_t size_bytes) { memcpy(to, from, size_bytes); }
static inline void emu_store(void* to, const void* from, size_t size_bytes) { memcpy(to, from, size_bytes); }
static inline void emu_fence(void) {}
#define EMU_UNCHECKED static inline
#define EMU_ATOMIC_SEEN(p) ((void)0)
#endif

template <class T> EMU_UNCHECKED T emu_exchange(T* p, T v)
{
    T old = *p;
    *p = v;
    return old;
}
#define EMU_ATOMIC(T) \
    EMU_UNCHECKED T atomicAdd(T* p, T v) { return EMU_ATOMIC_SEEN(p), emu_exchange(p, (T)(*p + v)); } \
    EMU_UNCHECKED T atomicExch(T* p, T v) { return EMU_ATOMIC_SEEN(p), emu_exchange(p, v); }
#define EMU_ATOMIC_INTEGER(T) \
    EMU_ATOMIC(T) \
    EMU_UNCHECKED T atomicCAS(T* p, T compare, T v) \
    { \
        return EMU_ATOMIC_SEEN(p), emu_exchange(p, *p == compare ? v : *p); \
    } \
    EMU_UNCHECKED T atomicMax(T* p, T v) { return EMU_ATOMIC_SEEN(p), emu_exchange(p, *p < v ? v : *p); } \
    EMU_UNCHECKED T atomicMin(T* p, T v) { return EMU_ATOMIC_SEEN(p), emu_exchange(p, v < *p ? v : *p); } \
    EMU_UNCHECKED T atomicOr(T* p, T v) { return EMU_ATOMIC_SEEN(p), emu_exchange(p, *p | v); } \
    EMU_UNCHECKED T atomicAnd(T* p, T v) { return EMU_ATOMIC_SEEN(p), emu_exchange(p, *p & v); }
EMU_ATOMIC(float)
EMU_ATOMIC(double)
EMU_ATOMIC_INTEGER(int)
EMU_ATOMIC_INTEGER(unsigned)
EMU_ATOMIC_INTEGER(unsigned long long)

static inline void __threadfence(void) { emu_fence(); }

/* ---- arithmetic */

#define __expf(x) expf(x)                            // macros: glibc has functions of these names
static inline unsigned __float_as_uint(float f)
{
    unsigned u;
    memcpy(&u, &f, 4);
    return u;
}
static inline float __uint_as_float(unsigned u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
template <class T> static inline T min(T a, T b) { return b < a ? b : a; }
template <class T> static inline T max(T a, T b) { return a < b ? b : a; }
