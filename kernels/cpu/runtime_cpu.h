/* runtime_cpu.h: memory, streams and events of the CPU build; part of runtime.cpp. */
#pragma once
#include "runtime_shared.h"

struct CUstream_st { int unused; };
struct CUevent_st { double recorded_at; };           // seconds; 0: never

void stream_enqueue(cudaStream_t, const char*, const StreamOpKind* kind, void* arg)
{
    unsigned num_tries = 0;
    while (!kind->run(arg)) wait_politely(&num_tries);
    free(arg);
}

void stream_drain_all(void) {}
bool device_launches_wait(void) { return true; }

/* ---- the machine */

/* Bytes in a file of /proc or of the cgroup: the number after `key`, times `unit`; SIZE_MAX if there is none. */
static size_t number_in_file(const char* path, const char* key, size_t unit)
{
    FILE* f = fopen(path, "r");
    if (f == nullptr) return SIZE_MAX;
    size_t value = SIZE_MAX;
    char line[256];
    while (fgets(line, sizeof line, f) != nullptr) {
        unsigned long long number;
        if (strncmp(line, key, strlen(key)) != 0 || sscanf(line + strlen(key), "%llu", &number) != 1) continue;
        value = (size_t)number * unit;
        break;
    }
    fclose(f);
    return value;
}

static int num_ranks_on_host(void)
{
    const char* s = getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
    int n = s != nullptr ? atoi(s) : 1;
    return n > 0 ? n : 1;
}

/* The machine's memory, or what the control group leaves of it, shared by the ranks on it. */
static size_t default_budget_bytes(void)
{
    size_t host_bytes = number_in_file("/proc/meminfo", "MemTotal:", 1024);
    host_bytes = size_min(host_bytes, number_in_file("/sys/fs/cgroup/memory.max", "", 1));
    ENSURE(host_bytes != SIZE_MAX, "cannot tell how much memory this machine has; set TRAIN_GPT_DEVICE_MB");
    return host_bytes / (size_t)num_ranks_on_host();
}

static size_t host_available_bytes(void) { return number_in_file("/proc/meminfo", "MemAvailable:", 1024); }

static int num_cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
    return (int)sysconf(_SC_NPROCESSORS_ONLN);
}

/* The model name of /proc/cpuinfo, or the machine's word for itself. */
static void cpu_name(char* name, size_t size)
{
    snprintf(name, size, "CPU");
    FILE* f = fopen("/proc/cpuinfo", "r");
    if (f == nullptr) return;
    char line[512];
    while (fgets(line, sizeof line, f) != nullptr) {
        char* value = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || value == nullptr) continue;
        value[strcspn(value, "\n")] = '\0';
        snprintf(name, size, "%s", value + 2);
        break;
    }
    fclose(f);
}

/* ---- memory: pages of our own, so that what is freed goes back to the system at once */

struct Block { void* p; size_t size_bytes; bool on_device; Block* next; };
static Block* blocks;

static const size_t HUGE_PAGE = 2 * MIB;

static size_t page_round_up(size_t size_bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (size_bytes + page - 1) / page * page;
}

/* Large blocks start on a huge page. Mapped a huge page too long, then both ends are given back: what stays is
 * exactly the size asked for, in pages. */
static void* pages_map(size_t size_bytes)
{
    size_t len = page_round_up(size_bytes), slack = len >= HUGE_PAGE ? HUGE_PAGE : 0;
    char* raw = (char*)mmap(nullptr, len + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == (char*)MAP_FAILED) return nullptr;
    if (slack == 0) return raw;
    char* p = (char*)(((uintptr_t)raw + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    if (p > raw) munmap(raw, (size_t)(p - raw));
    if (p < raw + slack) munmap(p + len, (size_t)(raw + slack - p));
    madvise(p, len, MADV_HUGEPAGE);
    return p;
}

static cudaError_t block_new(void** p, size_t size_bytes, bool on_device)
{
    *p = nullptr;
    if (size_bytes == 0) return cudaSuccess;
    if (on_device ? !budget_take(size_bytes) : size_bytes > host_available_bytes())
        return result(cudaErrorMemoryAllocation);
    void* pages = pages_map(size_bytes);
    if (pages == nullptr) {
        if (on_device) used_bytes -= size_bytes;
        return result(cudaErrorMemoryAllocation);
    }
    Block* block = (Block*)malloc_checked(sizeof(Block));
    *block = {pages, size_bytes, on_device, blocks};
    blocks = block;
    if (!on_device) pinned_bytes += size_bytes;
    *p = pages;
    return cudaSuccess;
}

static cudaError_t block_free(void* p, bool on_device)
{
    if (p == nullptr) return cudaSuccess;
    num_host_syncs++;
    for (Block** link = &blocks; *link != nullptr; link = &(*link)->next) {
        Block* block = *link;
        if (block->p != p || block->on_device != on_device) continue;
        munmap(p, page_round_up(block->size_bytes));
        (on_device ? used_bytes : pinned_bytes) -= block->size_bytes;
        *link = block->next;
        free(block);
        return cudaSuccess;
    }
    return result(cudaErrorInvalidValue);
}

extern "C" {

cudaError_t cudaMalloc(void** p, size_t size) { return block_new(p, size, true); }
cudaError_t cudaFree(void* p) { return block_free(p, true); }
cudaError_t cudaMallocHost(void** p, size_t size) { return block_new(p, size, false); }
cudaError_t cudaFreeHost(void* p) { return block_free(p, false); }

/* Large ones by all threads: one alone has half of the memory's bandwidth at best. */
cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t size, enum cudaMemcpyKind, cudaStream_t)
{
    if (dst == src) return cudaSuccess;
    #pragma omp parallel for if (size >= 4 * MIB)
    for (size_t first = 0; first < size; first += MIB)
        memcpy((char*)dst + first, (const char*)src + first, size_min(MIB, size - first));
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void* dst, const void* src, size_t size, enum cudaMemcpyKind kind)
{
    num_host_syncs++;
    return cudaMemcpyAsync(dst, src, size, kind, nullptr);
}

/* What is large, such as all gradients at the start of a step, by all threads. */
cudaError_t cudaMemsetAsync(void* p, int value, size_t size, cudaStream_t)
{
    #pragma omp parallel for schedule(static) if (size >= HUGE_PAGE)
    for (size_t first = 0; first < size; first += HUGE_PAGE)
        memset((char*)p + first, value, size_min(HUGE_PAGE, size - first));
    return cudaSuccess;
}

/* ---- streams and events: all work is done when its call returns */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int)
{
    *stream = (cudaStream_t)malloc_checked(sizeof(CUstream_st));
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    free(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned int) { return cudaSuccess; }

cudaError_t cudaStreamSynchronize(cudaStream_t)
{
    num_host_syncs++;
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void)
{
    num_host_syncs++;
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int)
{
    *event = (cudaEvent_t)malloc_checked(sizeof(CUevent_st));
    (*event)->recorded_at = 0;
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t)
{
    event->recorded_at = now_s();
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }

cudaError_t cudaEventSynchronize(cudaEvent_t)
{
    num_host_syncs++;
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end)
{
    if (start->recorded_at == 0 || end->recorded_at == 0) return result(cudaErrorInvalidResourceHandle);
    *ms = (float)((end->recorded_at - start->recorded_at) * 1e3);
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t fn, void* arg)
{
    fn(arg);
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, enum cudaFuncAttribute, int) { return cudaSuccess; }

}
