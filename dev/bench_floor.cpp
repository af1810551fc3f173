/* bench_floor.cpp: the least time in which this machine could train one step, for comparison with a CPU run.
 *   bench_floor                          prints the two speeds of the machine
 *   bench_floor FAMILY L C F V B T       and the floor of a step of a GPT-2 (tied head) or LLaMA (untied, as many heads
 *                                        of keys as of queries): layers, channels, MLP width, vocabulary, sequences,
 *                                        tokens of each
 *
 *   floor = (matrix + attention flops) / FMA peak  +  optimizer bytes / triad speed
 *     matrix     6 * B*T * (L * (4*C^2 + M*C*F) + V*C)   M: 2 matrices of an MLP, 3 of a gated one. A matrix weight is
 *                                used three times (forward, gradient of the input, of the weight), 2 flops a token each
 *     attention  7 * B*T * L * C * (T+1)      2 GEMMs forward and 5 backward, 2 flops, over the causal half of T x T
 *     optimizer  28 * parameters              AdamW reads weight, gradient, m, v and writes weight, m, v in fp32
 * It leaves out norms, activations, softmax, cross-entropy and all activations in memory, and lets nothing overlap.
 *
 * FMA peak: every thread runs chains of independent fused multiply-adds in registers; their best speeds are added up.
 * Triad: b = a*s + b over arrays far larger than the caches, two reads and a write, the access pattern of the
 * optimizer. On a shared or throttled machine both rates change by the minute: measure step and floor in turn. The last
 * line is for scripts: fma_gflops X triad_gbps X [floor_ms X].
 *
 * g++ -std=c++17 -O3 -march=native -ffp-contract=fast -fopenmp dev/bench_floor.cpp -o bench_floor */
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <omp.h>
#include <sys/mman.h>
#include "kernels/cpu/simd.h"

static double now_s()
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

enum { NUM_CHAINS = 12 };       // a multiply-add takes 4 cycles, two can start in each: 8 are needed, 12 fit registers

/* noipa: else the compiler evaluates the chain, which starts at a fixed point of x * factor + term. */
__attribute__((noipa)) static float fma_chains(long num_rounds, vf factor, vf term)
{
    vf x[NUM_CHAINS];
#pragma GCC unroll 12
    for (int i = 0; i < NUM_CHAINS; i++) x[i] = vf_set((float)i);
    for (long round = 0; round < num_rounds; round++) {
#pragma GCC unroll 12
        for (int i = 0; i < NUM_CHAINS; i++) x[i] = vf_fma(x[i], factor, term);
    }
    vf sum = x[0];
#pragma GCC unroll 12
    for (int i = 1; i < NUM_CHAINS; i++) sum += x[i];
    return vf_sum(sum);
}

/* Each thread times short bursts, which other processes rarely interrupt, and counts its fastest one. */
static double fma_peak_gflops(int num_threads)
{
    const long num_rounds = 300000;
    double gflops = 0;
    float sink = 0;
#pragma omp parallel num_threads(num_threads) reduction(+:gflops, sink)
    {
        double best_s = 1e30;
        for (int rep = 0; rep < 60; rep++) {
            double start_s = now_s();
            sink += fma_chains(num_rounds, vf_set(0.999f), vf_set(0.001f));
            double took_s = now_s() - start_s;
            if (took_s < best_s) best_s = took_s;
        }
        gflops = 2.0 * VF * NUM_CHAINS * num_rounds / best_s * 1e-9;
    }
    if (sink == 1.0f) printf("\n");             // uses the result, so that the compiler does not remove the loop
    return gflops;
}

static float* big_alloc(size_t num_bytes)
{
    float* p = (float*)aligned_alloc(2 << 20, num_bytes);
    if (p == nullptr) {
        fprintf(stderr, "bench_floor: cannot allocate %zu bytes\n", num_bytes);
        exit(1);
    }
    madvise(p, num_bytes, MADV_HUGEPAGE);
    return p;
}

static double triad_gbps(int num_threads)
{
    const long n = 64 << 20;                    // 256 MiB each
    float *a = big_alloc(n * sizeof(float)), *b = big_alloc(n * sizeof(float));
    double best_s = 1e30;
    for (int rep = 0; rep < 6; rep++) {         // the first one faults the pages in and is not counted
        double start_s = now_s();
#pragma omp parallel for num_threads(num_threads) schedule(static)
        for (long i = 0; i < n; i += VF)
            if (rep == 0) vf_store(a + i, vf_set(1.0f)), vf_store(b + i, vf_set(2.0f));
            else vf_store(b + i, vf_fma(vf_load(a + i), vf_set(0.5f), vf_load(b + i)));
        double took_s = now_s() - start_s;
        if (rep > 0 && took_s < best_s) best_s = took_s;
    }
    free(a);
    free(b);
    return 3.0 * sizeof(float) * n / best_s * 1e-9;
}

int main(int argc, char** argv)
{
    const bool gated = argc > 1 && strcmp(argv[1], "llama") == 0;
    if (argc != 1 && (argc != 8 || (!gated && strcmp(argv[1], "gpt2") != 0))) {
        fprintf(stderr, "usage: bench_floor [gpt2|llama L C F V B T]\n");
        return 2;
    }
    const int num_threads = omp_get_max_threads();
    const double gflops = fma_peak_gflops(num_threads), gbps = triad_gbps(num_threads);
    printf("%d threads, %d floats a vector: %.1f GFLOP/s fused multiply-add, %.1f GB/s triad\n",
           num_threads, VF, gflops, gbps);
    if (argc == 1) {
        printf("fma_gflops %.2f triad_gbps %.2f\n", gflops, gbps);
        return 0;
    }
    const double L = atof(argv[2]), C = atof(argv[3]), F = atof(argv[4]), V = atof(argv[5]);
    const double B = atof(argv[6]), T = atof(argv[7]), block = 4 * C * C + (gated ? 3 : 2) * C * F;
    const double matrix_flops = 6 * B * T * (L * block + V * C), attention_flops = 7 * B * T * L * C * (T + 1);
    const double vectors = gated ? (2 * L + 1) * C : L * (9 * C + F) + 2 * C;      // norms and biases
    const double num_params = L * block + vectors + (gated ? 2 * V : V + T) * C, optimizer_bytes = 28 * num_params;
    const double matrix_ms = matrix_flops / gflops * 1e-6, attention_ms = attention_flops / gflops * 1e-6;
    const double optimizer_ms = optimizer_bytes / gbps * 1e-6, floor_ms = matrix_ms + attention_ms + optimizer_ms;
    printf("GEMMs           %8.1f GFLOP %9.1f ms\n", matrix_flops * 1e-9, matrix_ms);
    printf("attention       %8.1f GFLOP %9.1f ms\n", attention_flops * 1e-9, attention_ms);
    printf("optimizer       %8.1f GB    %9.1f ms   (%.1fM parameters)\n", optimizer_bytes * 1e-9, optimizer_ms,
           num_params * 1e-6);
    printf("fma_gflops %.2f triad_gbps %.2f floor_ms %.2f\n", gflops, gbps, floor_ms);
    return 0;
}
