/* host_memory.h: how much more memory the processes of this host can pin: what the kernel gives without swapping, or
 * what the control group leaves, where files in its page cache count as free. */
#pragma once
#include <cmath>
#include <cstdio>
#include <cstring>

typedef struct HostMemory {
    double free_bytes;          // INFINITY: nothing here says how much
    const char* limit;          // what sets it
} HostMemory;

/* The number behind `key` on a line of a file of the kernel; -1: no such file or line, or a word such as "max". */
static double kernel_number(const char* path, const char* key)
{
    FILE* f = fopen(path, "r");
    char line[256];
    unsigned long long number;
    double found = -1;
    if (f == nullptr) return -1;
    while (found < 0 && fgets(line, sizeof line, f) != nullptr)
        if (strncmp(line, key, strlen(key)) == 0 && sscanf(line + strlen(key), "%llu", &number) == 1)
            found = (double)number;
    fclose(f);
    return found;
}

static HostMemory host_memory()
{
    static const struct { const char *limit, *used, *stat, *cache; } groups[] = {
        {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat", "file "},
        {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes",
         "/sys/fs/cgroup/memory/memory.stat", "total_cache "},
    };
    const double available_kib = kernel_number("/proc/meminfo", "MemAvailable:");
    HostMemory memory = {available_kib < 0 ? INFINITY : 1024 * available_kib, "MemAvailable of /proc/meminfo"};
    for (const auto& group : groups) {
        const double limit = kernel_number(group.limit, ""), used = kernel_number(group.used, "");
        if (limit < 0 || used < 0) continue;
        const double left = limit - used + fmax(0, kernel_number(group.stat, group.cache));
        if (left < memory.free_bytes) memory = HostMemory{left, group.limit};
    }
    return memory;
}
