/* device.cuh: the device this rank runs on: chosen, named, and what it can do at best.
 * A GPU is one row of gpu_rows: dense peaks from NVIDIA's data sheets (no sparsity), fp32 without TF32. In the CPU
 * build the peak is measured at start: fused multiply-adds on all threads of the rank. Nothing else asks for a device
 * by name. */
#pragma once
#include <ctime>
#include <sched.h>
#include <strings.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#include "common.cuh"
#ifdef DEVICE_CPU
#include "kernels/cpu/simd.h"
#endif
#ifndef DEVICE_CUDA
#include "kernels/cpu/device.h"
#endif

/* A GPU: dense 16-bit tensor-core peak with fp32 accumulation, fp32 peak, memory bandwidth; link, bus to the host's
 * memory (if that is less, half of this memory's bandwidth) and network adapter, in one direction; memory; what of the
 * peak large products reach, and what attention by mma.sync does with long sequences and heads of 64. The last two are
 * others' measurements where docs/benchmarks.md names them */
typedef struct {
    const char* name;
    double tensor16_tflops, fp32_tflops, memory_gbps, link_gbps, host_gbps, network_gbps, memory_gb;
    double product_share, attention_tflops;
} GpuRow;

/* The first row whose name is in the card's. */
static const GpuRow gpu_rows[] = {
    {"GB200", 2500, 80, 8000, 900, 256, 50, 186, 0.72, 330},
    {"B200", 2250, 75, 8000, 900, 64, 50, 180, 0.72, 330},
    {"GH200", 989.4, 67, 4900, 450, 256, 50, 144, 0.75, 300},
    {"H200", 989.4, 67, 4800, 450, 64, 50, 141, 0.72, 300},
    {"H100 PCIe", 756, 51, 2000, 64, 64, 25, 80, 0.72, 230},
    {"H100", 989.4, 67, 3350, 450, 64, 50, 80, 0.72, 300},
    {"A100-SXM", 312, 19.5, 2039, 300, 32, 25, 80, 0.77, 180},
    {"A100", 312, 19.5, 1935, 32, 32, 25, 80, 0.74, 170},
    {"L40S", 362, 91.6, 864, 32, 32, 12.5, 48, 0.7, 190},
    {"L4", 121, 30.3, 300, 32, 32, 12.5, 24, 0.6, 60},
    {"A10G", 70, 31.5, 600, 32, 32, 12.5, 24, 0.8, 38},
    {"RTX 4090", 165.2, 82.6, 1008, 32, 32, 1.25, 24, 0.9, 90},
    {"RTX 3090", 71, 35.6, 936, 32, 32, 1.25, 24, 0.9, 38},
    {"RTX 5090", 209.5, 104.8, 1792, 64, 64, 1.25, 32, 0.9, 115},
};

typedef struct Device {
    char name[256];
    const GpuRow* row;        // null: a CPU, or a card that is not in the table
    double peak_flops;        // of floatX per rank; 0 if not known
    double memory_gbps, link_gbps;   // 0 if not known
    int num_threads;          // host threads per rank
    size_t memory_bytes;
} Device;

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

#ifdef DEVICE_CPU
/* Twelve independent accumulators hide the latency of any core's multiply-add. */
__attribute__((noinline)) static vf peak_loop(long repeats)
{
    vf acc[12];
    for (int k = 0; k < 12; k++) acc[k] = vf_set(0.1f * k);
    const vf factor = vf_set(0.999f), term = vf_set(0.001f);
    for (long i = 0; i < repeats; i++) {
        #pragma GCC unroll 12
        for (int k = 0; k < 12; k++) acc[k] = acc[k] * factor + term;
    }
    for (int k = 1; k < 12; k++) acc[0] += acc[k];
    return acc[0];
}

static double peak_seconds(int num_threads, long repeats)
{
    volatile float sink = 0;
    double start = now_s();
    #pragma omp parallel num_threads(num_threads)
    {
        vf sum = peak_loop(repeats);
        #pragma omp critical
        sink = sink + sum[0];
    }
    return now_s() - start;
}

/* fp32 multiply-add peak of num_threads threads, in flop/s: the best of ten runs of about 5 ms. More runs, for up to
 * half a second, while that is far from what one thread does by itself: the system may have put two on one core. */
static double cpu_peak_flops(int num_threads)
{
    const long repeats = 500000;
    double alone_s = 1e30, best_s = 1e30;
    for (int run = 0; run < 3; run++) alone_s = fmin(alone_s, peak_seconds(1, repeats));
    const double end_s = now_s() + 0.5;
    for (int run = 0; run < 10 || (best_s > 1.2 * alone_s && now_s() < end_s); run++)
        best_s = fmin(best_s, peak_seconds(num_threads, repeats));
    return 2.0 * 12 * (sizeof(vf) / 4) * repeats * num_threads / best_s;
}

/* b = a * s + b over arrays far larger than the caches, in bytes of a and b each way: the optimizer's pattern. */
static double cpu_triad_gbps(int num_threads)
{
    const long n = 16 << 20;
    double best_s = 1e30;
    float *a = (float*)malloc_checked(n * sizeof *a), *b = (float*)malloc_checked(n * sizeof *b);
    for (int run = 0; run < 6; run++) {                  // the first brings in the pages
        double start = now_s();
        #pragma omp parallel for num_threads(num_threads) schedule(static)
        for (long i = 0; i < n; i += VF) {
            if (run == 0) vf_store(a + i, vf_set(1.0f)), vf_store(b + i, vf_set(2.0f));
            else vf_store(b + i, vf_load(a + i) * vf_set(0.5f) + vf_load(b + i));
        }
        double took = now_s() - start;
        if (run > 0 && took < best_s) best_s = took;
    }
    free(a);
    free(b);
    return 3.0 * sizeof(float) * n / best_s * 1e-9;
}
#endif

/* For estimates, which alone need it: takes 0.1 s. */
static void device_measure_memory(Device* d)
{
#ifdef DEVICE_CPU
    d->memory_gbps = cpu_triad_gbps(d->num_threads);
#else
    (void)d;
#endif
}

/* Host threads of one of `host_num_ranks` ranks: cores / ranks, never more than the launcher bound this rank to.
 * OMP_NUM_THREADS wins. */
static int host_threads(int host_num_ranks)
{
    int num_threads = 1;
#ifdef _OPENMP
    if (getenv("OMP_NUM_THREADS") != nullptr) return omp_get_max_threads();
    cpu_set_t set;
    int bound = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    num_threads = (int)sysconf(_SC_NPROCESSORS_ONLN) / host_num_ranks;
    if (num_threads > bound) num_threads = bound;
    if (num_threads < 1) num_threads = 1;
    omp_set_num_threads(num_threads);
#else
    (void)host_num_ranks;
#endif
    return num_threads;
}

static void device_rate(Device* d, const GpuRow* row)
{
    d->row = row;
    d->peak_flops = (sizeof(floatX) == 2 ? row->tensor16_tflops : row->fp32_tflops) * 1e12;
    d->memory_gbps = row->memory_gbps;
    d->link_gbps = row->link_gbps;
}

/* A device that is not here, by its name in the table, for a plan. */
static void device_imagine(Device* d, const char* name)
{
    for (const GpuRow& row : gpu_rows) {
        if (strcasecmp(name, row.name) != 0) continue;
        device_rate(d, &row);
        d->memory_bytes = (size_t)(row.memory_gb * 1e9);
        snprintf(d->name, sizeof d->name, "%s (not here: on paper)", row.name);
        return;
    }
    char known[256] = "";
    for (const GpuRow& row : gpu_rows)
        snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s", known[0] ? ", " : "", row.name);
    die("--gpu %s is not in the table: have %s", name, known);
}

/* Takes the device of this host rank; refuses more ranks than GPUs and cards older than sm_80. budget_mb (0: none)
 * limits what a device that is not a GPU gives. */
static void device_init(Device* d, int host_rank, int host_num_ranks, size_t budget_mb)
{
    *d = Device{};
    d->num_threads = host_threads(host_num_ranks);
#if defined(DEVICE_CUDA)
    ENSURE(budget_mb == 0, "--device-mb is for the CPU and emulated builds; a GPU has what it has");
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    ENSURE(error == cudaSuccess && count > 0, "no CUDA device: %s; `make DEVICE=cpu` builds for this machine",
           cudaGetErrorString(error));
    ENSURE(host_num_ranks <= count, "%d ranks on this host, have %d GPUs: start at most one rank per GPU",
           host_num_ranks, count);
    CUDA_CHECK(cudaSetDevice(host_rank));
    cudaDeviceProp prop;
    CUDA_CHECK(cudaGetDeviceProperties(&prop, host_rank));
    ENSURE(prop.major >= 8, "%s is sm_%d%d, need sm_80 or newer", prop.name, prop.major, prop.minor);
    snprintf(d->name, sizeof d->name, "%s", prop.name);
    for (const GpuRow& row : gpu_rows) {
        if (strstr(prop.name, row.name) == nullptr) continue;
        device_rate(d, &row);
        break;
    }
#elif defined(DEVICE_EMU)
    (void)host_rank;
    if (budget_mb > 0) device_set_budget(budget_mb << 20);
    snprintf(d->name, sizeof d->name, "emulated GPU");
#else
    (void)host_rank;
    if (budget_mb > 0) device_set_budget(budget_mb << 20);
    snprintf(d->name, sizeof d->name, "CPU");
    double cores = (double)sysconf(_SC_NPROCESSORS_ONLN), threads = (double)host_num_ranks * d->num_threads;
    d->peak_flops = cpu_peak_flops(d->num_threads) * fmin(1.0, cores / threads);   // more threads than cores share them
#endif
    size_t free_bytes;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &d->memory_bytes));
}
