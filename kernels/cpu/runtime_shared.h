/* runtime_shared.h: what runtime.cpp shares with its two devices, runtime_cpu.h and kernels/emu/runtime_emu.h: the
 * budget of device memory, what is counted, and the last error. */
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include "data/clock.h"
#include "device.h"
#include "stream.h"

static const size_t MIB = 1 << 20;
static size_t default_budget_bytes(void);
static size_t host_available_bytes(void);

static size_t budget_bytes, used_bytes, peak_bytes, pinned_bytes;
static uint64_t num_host_syncs;
static cudaError_t last_error = cudaSuccess;

static cudaError_t result(cudaError_t error)
{
    if (error != cudaSuccess) last_error = error;
    return error;
}

static size_t device_budget(void)
{
    if (budget_bytes != 0) return budget_bytes;
    const char* s = getenv("TRAIN_GPT_DEVICE_MB");
    if (s != nullptr) {
        char* end;
        unsigned long long mib = strtoull(s, &end, 10);
        ENSURE(*s != '\0' && *end == '\0' && mib > 0 && mib <= SIZE_MAX / MIB,
               "TRAIN_GPT_DEVICE_MB is \"%s\"; it must be a number of MiB", s);
        budget_bytes = (size_t)mib * MIB;
        return budget_bytes;
    }
    budget_bytes = default_budget_bytes();
    return budget_bytes;
}

/* A fault for tests: TRAIN_GPT_PLANTED_BYTES more are taken with the first allocation, as by a library that nobody
 * counted. */
static size_t planted_bytes(void)
{
    const char* s = getenv("TRAIN_GPT_PLANTED_BYTES");
    return s != nullptr && used_bytes == 0 ? (size_t)strtoull(s, nullptr, 10) : 0;
}

static bool budget_take(size_t size_bytes)
{
    size_t budget = device_budget();
    used_bytes += planted_bytes();
    if (used_bytes > budget || size_bytes > budget - used_bytes) return false;
    used_bytes += size_bytes;
    if (used_bytes > peak_bytes) peak_bytes = used_bytes;
    return true;
}
