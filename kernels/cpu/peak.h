/* peak.h: what the cores that this process runs on can do at best, measured; for device.cuh and dev/bench_floor.cpp.
 *   cpu_fma_gflops   multiply-add peak, 30 ms: every thread runs chains of independent ones in registers, and the best
 *                    speeds of all threads are added up. PAIR terms in a lane: fp32 (1), or pairs of bf16 (2)
 *   cpu_triad_gbps   b = a*s + b over arrays far larger than the caches, two reads and a write, the access pattern of
 *                    the optimizer
 * On a shared or throttled machine both change by the minute: compare only what was measured in turn. */
#pragma once
#include <cstdlib>
#include <sys/mman.h>
#include "data/clock.h"
#include "data/error.h"
#include "simd.h"

enum { FMA_CHAINS = 12 };       // a multiply-add takes 4 cycles, two can start in each: 8 are needed, 12 fit registers

/* noipa, and factor and term not known to it: else the compiler evaluates a chain that starts at a fixed point of
 * x * factor + term, and less is executed than is counted. Optimized as in a release build in any other too. */
template <int PAIR>
__attribute__((noipa, optimize("O2", "fp-contract=fast"))) static float fma_chains(long num_rounds, vf factor, vf term)
{
    vf x[FMA_CHAINS];
#pragma GCC unroll 12
    for (int i = 0; i < FMA_CHAINS; i++) x[i] = vf_set((float)i);
    for (long round = 0; round < num_rounds; round++) {
#pragma GCC unroll 12
        for (int i = 0; i < FMA_CHAINS; i++)
            x[i] = PAIR == 1 ? vf_fma(x[i], factor, term) : vf_dot_pair(factor, term, x[i]);
    }
    vf sum = x[0];
#pragma GCC unroll 12
    for (int i = 1; i < FMA_CHAINS; i++) sum += x[i];
    return vf_sum(sum);
}

/* Each thread times bursts of half a millisecond, which other processes rarely interrupt, and counts its fastest. All
 * run for the same 30 ms, so that threads which share a core also share it in what they measure. */
template <int PAIR> static inline double cpu_fma_gflops(int num_threads)
{
    const long num_rounds = 300000;
    const double burst_flop = 2.0 * VF * PAIR * FMA_CHAINS * (double)num_rounds;
    double gflops = 0;
    [[maybe_unused]] volatile float sink = 0;
#pragma omp parallel num_threads(num_threads) reduction(+:gflops)
    {
        double best_s = 1e30;
#pragma omp barrier
        for (double begin_s = now_s(), end_s = begin_s + 0.03, start_s = begin_s; start_s < end_s;) {
            sink = fma_chains<PAIR>(num_rounds, vf_set(0.999f), vf_set(0.001f));
            const double now = now_s(), took_s = now - start_s;
            if (took_s < best_s) best_s = took_s;
            start_s = now;
        }
        gflops = burst_flop / best_s * 1e-9;
    }
    return gflops;
}

static inline float* triad_alloc(size_t num_bytes)
{
    float* p = (float*)aligned_alloc(2 << 20, num_bytes);
    ENSURE(p != nullptr, "out of host memory: %zu bytes asked for to measure the memory's bandwidth", num_bytes);
    madvise(p, num_bytes, MADV_HUGEPAGE);
    return p;
}

/* size_bytes: of each of the two arrays. The best of five passes, after one that brings in the pages. */
static inline double cpu_triad_gbps(int num_threads, size_t size_bytes)
{
    const long n = (long)(size_bytes / sizeof(float));
    float *a = triad_alloc(size_bytes), *b = triad_alloc(size_bytes);
    double best_s = 1e30;
    for (int pass = 0; pass < 6; pass++) {
        const double start_s = now_s();
#pragma omp parallel for num_threads(num_threads) schedule(static)
        for (long i = 0; i < n; i += VF)
            if (pass == 0) vf_store(a + i, vf_set(1.0f)), vf_store(b + i, vf_set(2.0f));
            else vf_store(b + i, vf_fma(vf_load(a + i), vf_set(0.5f), vf_load(b + i)));
        const double took_s = now_s() - start_s;
        if (pass > 0 && took_s < best_s) best_s = took_s;
    }
    free(a);
    free(b);
    return 3.0 * (double)size_bytes / best_s * 1e-9;
}
