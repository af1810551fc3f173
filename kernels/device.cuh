/* device.cuh: the device this rank runs on: chosen, named, and what it can do at best. A GPU's figures are those of its
 * row in gpus.h, or of its compute capability; the CPU's peak is measured, by those that print or use it. Nothing else
 * asks for a device by name.
 *   device_init      takes the device of this rank          device_imagine   another GPU, for a plan
 *   device_measure   the CPU's peak and bandwidth */
#pragma once
#include <ctime>
#include <sched.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#include "common.cuh"
#include "gpus.h"
#ifdef DEVICE_CPU
#include "kernels/cpu/simd.h"
#endif
#ifndef DEVICE_CUDA
#include "kernels/cpu/device.h"
#endif

typedef struct Device {
    char name[256];
    const GpuRow* row;        // null: not a GPU
    GpuRow generic;           // the row of a GPU that is not in the table
    double peak_flops;        // of floatX per rank; 0 if not known
    char peak_source[96];     // where that is from, if neither measured nor from the table
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

/* The peak of this rank while all ranks of the host measure theirs, or TRAIN_GPT_PEAK_GFLOPS of the environment: 65 ms
 * to 0.5 s. The memory's bandwidth too for estimates, which alone need it: 0.1 s. */
static void device_measure(Device* d, int host_num_ranks, bool for_estimates)
{
#ifdef DEVICE_CPU
    const char* given = getenv("TRAIN_GPT_PEAK_GFLOPS");
    if (given != nullptr && given[0]) {
        char* end;
        d->peak_flops = strtod(given, &end) * 1e9;
        if (*end || !(d->peak_flops > 0 && d->peak_flops < 1e21))
            die("TRAIN_GPT_PEAK_GFLOPS is \"%s\": a number above 0, or leave it out to have it measured", given);
        snprintf(d->peak_source, sizeof d->peak_source, "TRAIN_GPT_PEAK_GFLOPS");
    } else {
        double cores = (double)sysconf(_SC_NPROCESSORS_ONLN), threads = (double)host_num_ranks * d->num_threads;
        d->peak_flops = cpu_peak_flops(d->num_threads) * fmin(1.0, cores / threads);   // threads may share cores
    }
    if (for_estimates) d->memory_gbps = cpu_triad_gbps(d->num_threads);
#else
    (void)d, (void)host_num_ranks, (void)for_estimates;
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

/* A GPU that is not here, by its name in the table, for a plan. */
static void device_imagine(Device* d, const char* name)
{
    const GpuRow* row = gpu_find(name);
    if (row == nullptr) {
        char known[512] = "";
        for (const GpuRow& r : gpu_rows)
            snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s", known[0] ? ", " : "", r.name);
        die("--gpu %s is not in the table: have %s", name, known);
    }
    device_rate(d, row);
    d->memory_bytes = (size_t)(row->memory_gb * 1e9);
    snprintf(d->name, sizeof d->name, "%s (not here: estimated)", row->name);
}

#ifdef DEVICE_CUDA
/* Figures of a GPU that is not in the table, from its compute capability and what the runtime says of it. */
static void device_rate_generic(Device* d, int device, const cudaDeviceProp* prop)
{
    int clock_khz = 0, memory_khz = 0, bus_bits = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&memory_khz, cudaDevAttrMemoryClockRate, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&bus_bits, cudaDevAttrGlobalMemoryBusWidth, device));
    double memory_gbps = 2e-6 * memory_khz * bus_bits / 8;  // two transfers in a clock
    d->generic = gpu_generic(d->name, prop->major, prop->minor, prop->multiProcessorCount, 1e-6 * clock_khz,
                             memory_gbps, prop->totalGlobalMem * 1e-9);
    device_rate(d, &d->generic);
    snprintf(d->peak_source, sizeof d->peak_source, "not in the table: estimated from sm_%d%d, %d SMs, %.0f MHz",
             prop->major, prop->minor, prop->multiProcessorCount, 1e-3 * clock_khz);
}
#endif

/* Takes the device of this host rank; refuses more ranks than GPUs and GPUs older than sm_80. budget_mb (0: none)
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
    const GpuRow* row = gpu_find(prop.name);
    if (row != nullptr) device_rate(d, row);
    else device_rate_generic(d, host_rank, &prop);
#elif defined(DEVICE_EMU)
    (void)host_rank;
    if (budget_mb > 0) device_set_budget(budget_mb << 20);
    snprintf(d->name, sizeof d->name, "emulated GPU");
#else
    (void)host_rank;
    if (budget_mb > 0) device_set_budget(budget_mb << 20);
    snprintf(d->name, sizeof d->name, "CPU");
#endif
    size_t free_bytes;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &d->memory_bytes));
}
