/* environment.cuh: --report: what this binary is built with and what it finds on this machine, a row each: name, what
 * was found, and how to fix it if something is missing. Starts no ranks and allocates nothing on a device. */
#pragma once
#include <cjson/cJSON.h>
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include "kernels/device.cuh"
#include "zero/comm.h"
#ifdef DEVICE_CUDA
#include <cublasLt.h>
#endif

/* One row; `fix` is printed where it is not null. */
static void environment_row(const char* what, const char* fix, const char* fmt, ...) FORMAT(3, 4);
static void environment_row(const char* what, const char* fix, const char* fmt, ...)
{
    char found[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(found, sizeof found, fmt, args);
    va_end(args);
    found[strcspn(found, "\n")] = 0;
    printf("%-12s %s %s\n", what, fix == nullptr ? "ok  " : "MISS", found);
    if (fix != nullptr) printf("%-12s      -> %s\n", "", fix);
}

/* The value of "key ... : value" in a file of /proc; empty if there is none. */
static void environment_proc(const char* path, const char* key, char (&value)[256])
{
    value[0] = 0;
    char line[512];
    FILE* f = fopen(path, "r");
    if (f == nullptr) return;
    while (value[0] == 0 && fgets(line, sizeof line, f) != nullptr) {
        char* colon = strchr(line, ':');
        if (strncmp(line, key, strlen(key)) != 0 || colon == nullptr) continue;
        colon += 1 + strspn(colon + 1, " \t");
        snprintf(value, sizeof value, "%.*s", (int)strcspn(colon, "\n"), colon);
    }
    fclose(f);
}

static bool environment_has_program(const char* name, char (&path)[4096])
{
    const char* at = getenv("PATH");
    for (size_t n; at != nullptr && *at; at += n + (at[n] == ':')) {
        n = strcspn(at, ":");
        snprintf(path, sizeof path, "%.*s/%s", (int)n, at, name);
        if (access(path, X_OK) == 0) return true;
    }
    return false;
}

static void environment_host(void)
{
    char model[256], total[256], available[256];
    environment_proc("/proc/cpuinfo", "model name", model);
    environment_row("CPU", nullptr, "%s, %ld cores, %d threads for one rank", model[0] ? model : "unknown",
                    sysconf(_SC_NPROCESSORS_ONLN), host_threads(1));
#if defined(__x86_64__)
    bool built_bf16 = false, built_512 = false, built_2 = false;
#ifdef __AVX512BF16__
    built_bf16 = true;
#endif
#ifdef __AVX512F__
    built_512 = true;
#endif
#ifdef __AVX2__
    built_2 = true;
#endif
    __builtin_cpu_init();
    bool has_bf16 = __builtin_cpu_supports("avx512bf16"), has_512 = __builtin_cpu_supports("avx512f");
    bool has_2 = __builtin_cpu_supports("avx2");
    bool slower = (has_bf16 && !built_bf16) || (has_512 && !built_512) || (has_2 && !built_2);
#ifdef DEVICE_CUDA
    slower = false;                                  // on a GPU the host's instruction set matters little
#endif
    environment_row("SIMD", slower ? "built on another machine: make clean && make" : nullptr,
                    "built for %s; this CPU has %s",
                    built_bf16 ? "AVX512_BF16" : built_512 ? "AVX-512" : built_2 ? "AVX2" : "SSE2",
                    has_bf16 ? "AVX512_BF16" : has_512 ? "AVX-512" : has_2 ? "AVX2" : "SSE2");
#endif
    environment_proc("/proc/meminfo", "MemTotal", total);
    environment_proc("/proc/meminfo", "MemAvailable", available);
    environment_row("memory", nullptr, "%.1f GiB, %.1f available", atof(total) / 1048576, atof(available) / 1048576);
    struct statvfs shm;
    double shm_mib = statvfs("/dev/shm", &shm) == 0 ? (double)shm.f_blocks * shm.f_frsize / 1048576 : 0;
    environment_row("/dev/shm", shm_mib < 512 ? "ranks of one host talk through it: docker run --shm-size 8g, or "
                    "mount -o remount,size=8g /dev/shm" : nullptr, "%.0f MiB", shm_mib);
#ifdef DEVICE_CUDA
    struct rlimit lock;
    if (getrlimit(RLIMIT_MEMLOCK, &lock) == 0 && lock.rlim_cur != RLIM_INFINITY)
        environment_row("locked mem", "InfiniBand pins memory: ulimit -l unlimited (docker run --ulimit memlock=-1)",
                        "limited to %.0f MiB", lock.rlim_cur / 1048576.0);
#endif
}

static void environment_libraries(void)
{
#ifdef NO_MPI
    environment_row("MPI", "one process only: make without NO_MPI=1", "not built in");
#else
    char version[MPI_MAX_LIBRARY_VERSION_STRING], path[4096];
    int length;
    MPI_CHECK(MPI_Get_library_version(version, &length));
    version[strcspn(version, ",")] = 0;
    bool has_mpirun = environment_has_program("mpirun", path);
    environment_row("MPI", has_mpirun ? nullptr : "scripts/setup.sh installs it (openmpi-bin)", "%s, %s", version,
                    has_mpirun ? path : "no mpirun in PATH");
    if (geteuid() == 0 && getenv("OMPI_ALLOW_RUN_AS_ROOT") == nullptr && strcmp(path, "/usr/local/bin/mpirun") != 0)
        environment_row("root", "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, or scripts/setup.sh",
                        "Open MPI starts no ranks as root");
#endif
#ifdef NO_NCCL
    environment_row("NCCL", "one process only: make without NO_NCCL=1", "not built in");
#elif defined(DEVICE_CUDA) && !defined(SHARE_GPU)
    int nccl = 0;
    NCCL_CHECK(ncclGetVersion(&nccl));
    environment_row("NCCL", nullptr, "%d.%d.%d", nccl / 10000, nccl / 100 % 100, nccl % 100);
#else
    environment_row("NCCL", nullptr, "its calls on MPI and shared memory (kernels/cpu/nccl.cpp)");
#endif
#if defined(DEVICE_CUDA)
    environment_row("BLAS", nullptr, "cuBLASLt %zu", cublasLtGetVersion());
#elif defined(DEVICE_EMU)
    environment_row("BLAS", nullptr, "OpenBLAS under cuBLASLt's names");
#else
    environment_row("BLAS", nullptr, "its own GEMM (kernels/cpu/gemm.h)");
#endif
    char pcre[64] = "";
    pcre2_config(PCRE2_CONFIG_VERSION, pcre);
    environment_row("text", nullptr, "cJSON %s, PCRE2 %.*s", cJSON_Version(), (int)strcspn(pcre, " "), pcre);
}

static void environment_gpus(void)
{
    char path[4096];
    bool nvcc = environment_has_program("nvcc", path), smi = environment_has_program("nvidia-smi", path);
#ifdef DEVICE_CUDA
    int driver = 0, runtime = 0, count = 0;
    cudaError_t found = cudaGetDeviceCount(&count);
    CUDA_CHECK(cudaDriverGetVersion(&driver));
    CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
    environment_row("CUDA", driver < runtime ? "the driver is older than the toolkit: install a newer driver" : nullptr,
                    "runtime %d.%d, driver for %d.%d", runtime / 1000, runtime % 1000 / 10, driver / 1000,
                    driver % 1000 / 10);
    if (found != cudaSuccess || count == 0)
        environment_row("GPU", "nvidia-smi says what the driver sees; docker run --gpus all; or make DEVICE=cpu",
                        "none: %s", cudaGetErrorString(found));
    for (int i = 0; i < count; i++) {
        cudaDeviceProp prop;
        CUDA_CHECK(cudaGetDeviceProperties(&prop, i));
        char peers[64] = "";
        for (int k = 0; k < count && k < 16; k++) {
            int can = 0;
            if (k != i) CUDA_CHECK(cudaDeviceCanAccessPeer(&can, i, k));
            snprintf(peers + strlen(peers), sizeof peers - strlen(peers), "%s", k == i ? "-" : can ? "1" : "0");
        }
        environment_row("GPU", prop.major < 8 ? "sm_80 or newer is needed" : nullptr,
                        "%d: %s, sm_%d%d, %.1f GiB, direct access to the others %s", i, prop.name, prop.major,
                        prop.minor, prop.totalGlobalMem / 1073741824.0, peers);
    }
    if (count > 1) environment_row("links", nullptr, "NVLink and PCIe between them: nvidia-smi topo -m");
#else
    environment_row("CUDA", smi && !nvcc ? "a GPU driver is here but no nvcc: install the CUDA toolkit, then make" :
                    smi ? "make DEVICE=cuda" : nullptr, "not in this build; nvcc %s, GPU driver %s",
                    nvcc ? "is here" : "is not here", smi ? "is here" : "is not here");
#endif
}

/* version: the line of --version; precisions: those in this binary, space-separated. */
static void environment_print(const char* version, const char* precisions)
{
    char path[4096];
    environment_row("train_gpt", nullptr, "%s", version);
    bool all = strstr(precisions, "fp32") && strstr(precisions, "bf16") && strstr(precisions, "fp16");
    environment_row("precisions", all ? nullptr : "make PREC='fp32 bf16 fp16'", "%s", precisions);
    environment_host();
    environment_libraries();
    environment_gpus();
    bool python = access(".venv/bin/python", X_OK) == 0 || environment_has_program("python3", path);
    environment_row("Python", python ? nullptr : "scripts/setup.sh makes .venv; for data, plots and tests only", "%s",
                    access(".venv/bin/python", X_OK) == 0 ? ".venv/bin/python" : python ? path : "none");
}
