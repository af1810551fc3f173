/* device.cuh: the device this rank runs on: chosen, named, and what it can do at best. A GPU's figures are those of its
 * row in gpus.h, or of its compute capability; the CPU's peak is measured, by those that print or use it. Nothing else
 * asks for a device by name.
 *   device_init      takes the device of this rank          device_imagine   another GPU, for a plan
 *   device_measure   the CPU's peak and bandwidth */
#pragma once
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#include "data/clock.h"
#include "common.cuh"
#include "gpus.h"
#include "kernels/cpu/share_gpu.h"
#ifdef DEVICE_CPU
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/peak.h"
#endif
#ifndef DEVICE_CUDA
#include "kernels/cpu/device.h"
#endif

typedef struct Device {
    char name[256];
    char uuid[48];            // GPU-...; empty: not a GPU
    const GpuRow* row;        // null: not a GPU
    GpuRow generic;           // the row of a GPU that is not in the table
    int capability;           // 90 is compute capability 9.0; 0: not a GPU
    double peak_flops;        // of floatX per rank; 0 if not known
    char peak_source[96];     // where that is from, if neither measured nor from the table
    double memory_gbps, link_gbps;   // 0 if not known
    int num_threads;          // host threads per rank
    size_t memory_bytes;
} Device;

/* The peak of this rank while all ranks of the host measure theirs, or TRAIN_GPT_PEAK_GFLOPS of the environment: 30 ms.
 * The memory's bandwidth too for estimates, which alone need it: 0.1 s. */
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
        d->peak_flops = 1e9 * fmin(1.0, cores / threads) *          // threads may share cores
                        cpu_fma_gflops<GEMM_PAIR>(d->num_threads);
        if (GEMM_PAIR > 1) snprintf(d->peak_source, sizeof d->peak_source, "AVX512_BF16");
    }
    if (for_estimates) d->memory_gbps = cpu_triad_gbps(d->num_threads, 64 << 20);
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
    d->capability = row->capability;
    d->peak_flops = (sizeof(floatX) == 2 ? row->tensor16_tflops : row->fp32_tflops) * 1e12;
    d->memory_gbps = row->memory_gbps;
    d->link_gbps = row->link_gbps;
}

/* Is it a GPU: emulated, or of a plan, too? */
static bool device_is_gpu(const Device* d)
{
#ifdef DEVICE_CPU
    return d->row != nullptr;
#else
    (void)d;
    return true;
#endif
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

#ifdef DEVICE_CUDA
/* As nvidia-smi -L prints it. */
static void device_uuid(char (&text)[48], const cudaUUID_t* uuid)
{
    int n = snprintf(text, sizeof text, "GPU");
    for (int i = 0; i < 16; i++) {
        const bool begins_group = i == 0 || i == 4 || i == 6 || i == 8 || i == 10;
        n += snprintf(text + n, sizeof text - n, "%s%02x", begins_group ? "-" : "", (unsigned char)uuid->bytes[i]);
    }
}

/* Host memory of this process comes from the GPU's NUMA node while that has any: pinned memory is read over PCIe. */
static void device_prefer_numa_node(int device)
{
    char bus[32], path[96];
    int node = -1;
    CUDA_CHECK(cudaDeviceGetPCIBusId(bus, sizeof bus, device));
    for (char* c = bus; *c; c++) *c = (char)tolower((unsigned char)*c);
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/numa_node", bus);
    FILE* file = fopen(path, "re");
    if (file == nullptr) return;
    if (fscanf(file, "%d", &node) != 1) node = -1;
    fclose(file);
    unsigned long nodes[16] = {};
    const int bits = 8 * sizeof nodes[0], most = bits * 16;
    if (node < 0 || node >= most) return;
    nodes[node / bits] = 1ul << node % bits;
    const long preferred = 1;                        // MPOL_PREFERRED; a container may not allow it
    if (syscall(SYS_set_mempolicy, preferred, nodes, (unsigned long)most + 1) != 0) return;
}
#endif

/* Takes the device of this host rank; refuses more ranks than GPUs, unless they may share one (share_gpu.h), and GPUs
 * older than sm_80. budget_mb (0: none) limits what a device that is not a GPU gives. */
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
    const int own = gpu_may_be_shared() ? host_rank % count : gpu_of_rank(count, host_rank, host_num_ranks);
    ENSURE(own >= 0, "%d ranks on this host, have %d GPUs: start at most one rank per GPU", host_num_ranks, count);
    CUDA_CHECK(cudaSetDevice(own));
    device_prefer_numa_node(own);
    cudaDeviceProp prop;
    CUDA_CHECK(cudaGetDeviceProperties(&prop, own));
    device_uuid(d->uuid, &prop.uuid);
    ENSURE(prop.major >= 8, "%s is sm_%d%d, need sm_80 or newer", prop.name, prop.major, prop.minor);
    snprintf(d->name, sizeof d->name, "%s", prop.name);
    const GpuRow* row = gpu_find(prop.name);
    if (row != nullptr) device_rate(d, row);
    else device_rate_generic(d, own, &prop);
#elif defined(DEVICE_EMU)
    (void)host_rank;
    if (budget_mb > 0) device_set_budget(budget_mb << 20);
    snprintf(d->name, sizeof d->name, "emulated GPU");
    if (const char* uuid = getenv("EMU_GPU_UUID")) snprintf(d->uuid, sizeof d->uuid, "%s", uuid);
#else
    (void)host_rank;
    if (budget_mb > 0) device_set_budget(budget_mb << 20);
    snprintf(d->name, sizeof d->name, "CPU");
#endif
    d->capability = gpu_capability();
    size_t free_bytes;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &d->memory_bytes));
}
