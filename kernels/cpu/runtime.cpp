/* runtime.cpp: the CUDA runtime calls of cuda_runtime.h where there is no CUDA.
 *   CPU build       device memory is host memory, straight from mmap with huge pages; every operation runs at once
 *   emulated build  device memory is an arena of its own, filled with NaN, with gaps that are checked; streams are
 *                   queues that a seeded scheduler drains in any legal order (runtime_emu.h)
 * Both keep a budget (TRAIN_GPT_DEVICE_MB or device_set_budget), so that "out of memory" is real, and count how often
 * the host waits. One host thread makes CUDA calls; others may run as long as they make none. */
#ifdef DEVICE_EMU
#include "kernels/emu/runtime_emu.h"
#else
#include "runtime_cpu.h"
#endif

void device_set_budget(size_t bytes) { budget_bytes = bytes; }
size_t device_used_bytes(void) { return used_bytes; }
size_t device_peak_bytes(void) { return peak_bytes; }
void device_forget_peak(void) { peak_bytes = used_bytes; }
size_t pinned_used_bytes(void) { return pinned_bytes; }
uint64_t host_sync_count(void) { return num_host_syncs; }

/* ---- calls that are the same in both builds */

extern "C" {

cudaError_t cudaGetLastError(void)
{
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

static const struct { cudaError_t error; const char *name, *words; } error_table[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

const char* cudaGetErrorName(cudaError_t error)
{
    for (size_t i = 0; i < sizeof error_table / sizeof *error_table; i++) {
        if (error_table[i].error == error) return error_table[i].name;
    }
    return "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error)
{
    for (size_t i = 0; i < sizeof error_table / sizeof *error_table; i++) {
        if (error_table[i].error == error) return error_table[i].words;
    }
    return "unrecognized error code";
}

cudaError_t cudaGetDeviceCount(int* count)
{
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) { return result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }

cudaError_t cudaGetDevice(int* device)
{
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* prop, int device)
{
    if (device != 0) return result(cudaErrorInvalidDevice);
    memset(prop, 0, sizeof *prop);
    prop->totalGlobalMem = device_budget();
    prop->warpSize = 32;
    prop->maxThreadsPerBlock = 1024;
    prop->integrated = 1;
#ifdef DEVICE_EMU
    snprintf(prop->name, sizeof prop->name, "emulated device");
    prop->major = emu_options.capability / 10;
    prop->minor = emu_options.capability % 10;
    prop->multiProcessorCount = 4;                   // few: grids sized by it stay small
    prop->maxThreadsPerMultiProcessor = 2048;
    prop->sharedMemPerBlock = 48 << 10;
    prop->sharedMemPerBlockOptin = emu_options.shared_limit_bytes;
    prop->sharedMemPerMultiprocessor = 228 << 10;
#else
    cpu_name(prop->name, sizeof prop->name);
    prop->multiProcessorCount = num_cores();
#endif
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attr, int device)
{
    struct cudaDeviceProp prop;
    cudaError_t error = cudaGetDeviceProperties(&prop, device);
    if (error != cudaSuccess) return error;
    *value = 0;                                      // clocks and bus width: not known here
    if (attr == cudaDevAttrMultiProcessorCount) *value = prop.multiProcessorCount;
    if (attr == cudaDevAttrComputeCapabilityMajor) *value = prop.major;
    if (attr == cudaDevAttrComputeCapabilityMinor) *value = prop.minor;
    if (attr == cudaDevAttrMaxSharedMemoryPerBlockOptin) *value = (int)prop.sharedMemPerBlockOptin;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest)
{
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) { return cudaRuntimeGetVersion(version); }

cudaError_t cudaHostAlloc(void** p, size_t size, unsigned int) { return cudaMallocHost(p, size); }

/* Free is what this process may still take: of its budget, and of the machine. */
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes)
{
    *total_bytes = device_budget();
    *free_bytes = *total_bytes > used_bytes ? size_min(*total_bytes - used_bytes, host_available_bytes()) : 0;
    return cudaSuccess;
}

cudaError_t cudaMemset(void* p, int value, size_t size) { return cudaMemsetAsync(p, value, size, nullptr); }

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, cudaStreamDefault); }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int flags, int)
{
    return cudaStreamCreateWithFlags(stream, flags);
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

}
