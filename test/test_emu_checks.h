/* test_emu_checks.h: part of test_emu.cu in the checked build: one mistake of each kind that the checker reports, each
 * in a process of its own. A line that must be named carries its mistake's name in a comment at its end; the parent
 * reads them from this file. Then requests whose cost is known are counted. */
#include <cctype>
#include <nccl.h>
#include "kernels/emu/emu_check.h"

static const struct { const char *name, *message; } checked_mistakes[] = {
    {"read_past_end", "out of bounds"}, {"write_past_end", "out of bounds"}, {"shared_past_end", "out of bounds"},
    {"freed_read", "out of bounds"}, {"unwritten", "uninitialized"}, {"unwritten_shared", "uninitialized"},
    {"unwritten_copy", "uninitialized"}, {"host_reads_device", "host code touches device memory"},
    {"host_memset_device", "host code touches device memory"}, {"kernel_reads_host", "a kernel touches host memory"},
    {"no_barrier", "race on shared memory"}, {"no_second_barrier", "race on shared memory"},
    {"no_barrier_global", "race on device memory"}, {"no_syncwarp", "race on shared memory"},
    {"half_mask_syncwarp", "race on shared memory"}, {"many_readers", "race on shared memory"},
    {"blocks_write", "race on device memory"}, {"blocks_read", "race on device memory"},
    {"blocks_overwrite", "race on device memory"}, {"no_fence", "race on device memory"},
    {"plain_and_atomic", "race on device memory"}, {"no_async_wait", "race on shared memory"},
    {"async_overwrites", "race on shared memory"}, {"streams_read", "race on device memory"},
    {"streams_write", "race on device memory"}, {"streams_overwrite", "race on device memory"},
    {"second_reader", "race on device memory"}, {"copy_unwaited", "race on device memory"},
    {"event_too_early", "race on device memory"}, {"event_unrecorded", "never recorded"},
    {"matmul_unwaited", "race on device memory"},
    {"collective_unwaited", "race on device memory"}, {"pinned_refilled", "race on pinned memory"},
    {"pinned_memcpy", "race on pinned memory"}, {"pinned_read_early", "pinned memory"},
};

static __global__ void fill_kernel(float* x, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = 1;                                                           // streams_overwrite, second_reader
}
static __global__ void double_kernel(float* out, const float* x, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = 2 * x[i];                                                  // freed_read, kernel_reads_host
}
static __global__ void read_kernel(float* out, const float* x, int at)
{
    out[threadIdx.x] = x[at + threadIdx.x];                                        // read_past_end, unwritten
}
static __global__ void write_kernel(float* x, int at)
{
    x[at + threadIdx.x] = 3;                                                       // write_past_end, streams_write
}
static __global__ void shared_past_end_kernel(float* out)
{
    SHARED(float, table, [64]);
    table[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = table[threadIdx.x + 1];                                     // shared_past_end
}
static __global__ void unwritten_shared_kernel(float* out)
{
    SHARED(float, table, [64]);
    if (threadIdx.x != 40) table[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = table[63 - threadIdx.x];                                    // unwritten_shared
}
static __global__ void no_barrier_kernel(float* out)
{
    SHARED(float, table, [64]);
    table[threadIdx.x] = 1;
    __syncthreads();
    table[threadIdx.x] = 2;                                                        // no_barrier
    out[threadIdx.x] = table[threadIdx.x ^ 32];                                    // no_barrier
}
static __global__ void no_second_barrier_kernel(float* out)
{
    SHARED(float, table, [64]);
    table[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = table[63 - threadIdx.x];                                    // no_second_barrier
    table[threadIdx.x] = 2;                                                        // no_second_barrier
}
static __global__ void no_barrier_global_kernel(float* x)
{
    x[threadIdx.x] = 1;                                                            // no_barrier_global
    x[threadIdx.x] += x[threadIdx.x ^ 32];                                         // no_barrier_global
}
static __global__ void no_syncwarp_kernel(float* out, bool wait)
{
    SHARED(float, table, [32]);
    table[threadIdx.x] = 0;
    __syncwarp();
    table[threadIdx.x] = 1;                                                        // no_syncwarp, half_mask_syncwarp
    if (wait) __syncwarp(threadIdx.x < 16 ? 0x0000FFFFu : 0xFFFF0000u);
    out[threadIdx.x] = table[31 - threadIdx.x];                                    // no_syncwarp, half_mask_syncwarp
}
static __global__ void many_readers_kernel(float* out)
{
    SHARED(float, value, [1]);
    if (threadIdx.x == 0) value[0] = 1;
    __syncthreads();
    float v = value[0];                                                            // many_readers
    __syncwarp();
    if (threadIdx.x == 63) value[0] = 2;                                           // many_readers
    out[threadIdx.x] = v;
}
static __global__ void blocks_write_kernel(float* x) { x[threadIdx.x] = 1; }   // blocks_write
static __global__ void blocks_read_kernel(float* x)
{
    x[blockIdx.x] = 1;                                                             // blocks_read
    x[8 + blockIdx.x] = x[1 - blockIdx.x];                                         // blocks_read
}
static __global__ void blocks_overwrite_kernel(float* x)
{
    float v = x[0] + x[1];                                                         // blocks_overwrite
    x[blockIdx.x] = v;                                                             // blocks_overwrite
}
static __global__ void no_fence_kernel(float* out, float* parts, unsigned* ticket)
{
    if (threadIdx.x != 0) return;
    parts[blockIdx.x] = 1;                                                         // no_fence
    if (atomicAdd(ticket, 1u) != gridDim.x - 1) return;
    for (unsigned b = 0; b < gridDim.x; b++) *out = parts[b];                      // no_fence
}
static __global__ void plain_and_atomic_kernel(unsigned* counter, float* out)
{
    atomicAdd(counter, 1u);                                                        // plain_and_atomic
    out[blockIdx.x] = (float)*counter;                                             // plain_and_atomic
}
static __global__ void async_kernel(float* out, const float* x, bool wait)
{
    SHARED(float, stage, [64][4]);
    if (wait) stage[threadIdx.x][0] = 1;
    __syncthreads();
    if (wait) out[threadIdx.x] = stage[63 - threadIdx.x][0];                       // async_overwrites
    cp_async16(stage[threadIdx.x], x);                                             // no_async_wait, async_overwrites
    cp_async_commit();
    if (!wait) out[threadIdx.x] = stage[threadIdx.x][1];                           // no_async_wait
    cp_async_wait<0>();
}

/* Device memory of 64 numbers each, 1 where written; three streams that wait for nothing. */
struct Bench { float *a, *b, *unwritten, *pinned; unsigned* counter; cudaStream_t s, t, u; cudaEvent_t event; };

static void wait_for(cudaStream_t to, cudaStream_t from, cudaEvent_t event)
{
    CUDA_CHECK(cudaEventRecord(event, from));
    CUDA_CHECK(cudaStreamWaitEvent(to, event, 0));
}

static void kernel_mistake(const char* name, const Bench* e)
{
    auto is = [name](const char* other) { return strcmp(name, other) == 0; };
    float host[64] = {};
    if (is("read_past_end")) LAUNCH(read_kernel, 1, 64, 0, e->s, e->b, e->a, 1);
    if (is("write_past_end")) LAUNCH(write_kernel, 1, 64, 0, e->s, e->a, 1);
    if (is("shared_past_end")) LAUNCH(shared_past_end_kernel, 1, 64, 0, e->s, e->a);
    if (is("unwritten")) LAUNCH(read_kernel, 1, 64, 0, e->s, e->a, e->unwritten, 0);
    if (is("unwritten_shared")) LAUNCH(unwritten_shared_kernel, 1, 64, 0, e->s, e->a);
    if (is("unwritten_copy")) CUDA_CHECK(cudaMemcpyAsync(host, e->unwritten, 256, cudaMemcpyDeviceToHost, e->s));
    if (is("kernel_reads_host")) LAUNCH(double_kernel, 1, 64, 0, e->s, e->a, host, 64);
    if (is("no_barrier")) LAUNCH(no_barrier_kernel, 1, 64, 0, e->s, e->a);
    if (is("no_second_barrier")) LAUNCH(no_second_barrier_kernel, 1, 64, 0, e->s, e->a);
    if (is("no_barrier_global")) LAUNCH(no_barrier_global_kernel, 1, 64, 0, e->s, e->a);
    if (is("no_syncwarp")) LAUNCH(no_syncwarp_kernel, 1, 32, 0, e->s, e->a, false);
    if (is("half_mask_syncwarp")) LAUNCH(no_syncwarp_kernel, 1, 32, 0, e->s, e->a, true);
    if (is("many_readers")) LAUNCH(many_readers_kernel, 1, 64, 0, e->s, e->a);
    if (is("blocks_write")) LAUNCH(blocks_write_kernel, 2, 64, 0, e->s, e->a);
    if (is("blocks_read")) LAUNCH(blocks_read_kernel, 2, 1, 0, e->s, e->a);
    if (is("blocks_overwrite")) LAUNCH(blocks_overwrite_kernel, 2, 1, 0, e->s, e->a);
    if (is("no_fence")) LAUNCH(no_fence_kernel, 4, 32, 0, e->s, e->b, e->a, e->counter);
    if (is("plain_and_atomic")) LAUNCH(plain_and_atomic_kernel, 4, 1, 0, e->s, e->counter, e->a);
    if (is("no_async_wait")) LAUNCH(async_kernel, 1, 64, 0, e->s, e->b, e->a, false);
    if (is("async_overwrites")) LAUNCH(async_kernel, 1, 64, 0, e->s, e->b, e->a, true);
}

/* out (8,8) = in in */
static void multiply(float* out, const float* in, cudaStream_t on)
{
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t layout;
    float one = 1, zero = 0;
    LT_CHECK(cublasLtCreate(&handle));
    LT_CHECK(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    LT_CHECK(cublasLtMatrixLayoutCreate(&layout, CUDA_R_32F, 8, 8, 8));
    LT_CHECK(cublasLtMatmul(handle, desc, &one, in, layout, in, layout, &zero, out, layout, out, layout, nullptr,
                            nullptr, 0, on));
}

static void stream_mistake(const char* name, Bench* e)
{
    auto is = [name](const char* other) { return strcmp(name, other) == 0; };
    float host[64] = {};
    if (is("streams_read")) {
        LAUNCH(fill_kernel, 1, 64, 0, e->s, e->a, 64);
        CUDA_CHECK(cudaMemcpyAsync(e->b, e->a, 256, cudaMemcpyDeviceToDevice, e->t));
    } else if (is("streams_write")) {
        CUDA_CHECK(cudaMemsetAsync(e->a, 0, 256, e->s));
        LAUNCH(write_kernel, 1, 64, 0, e->t, e->a, 0);
    } else if (is("streams_overwrite")) {
        CUDA_CHECK(cudaMemcpyAsync(e->b, e->a, 256, cudaMemcpyDeviceToDevice, e->s));
        LAUNCH(fill_kernel, 1, 64, 0, e->t, e->a, 64);
    } else if (is("second_reader")) {                 // two streams read, and the writer waits for one of them
        CUDA_CHECK(cudaMemcpyAsync(e->b, e->a, 256, cudaMemcpyDeviceToDevice, e->s));
        CUDA_CHECK(cudaMemcpyAsync(e->unwritten, e->a, 256, cudaMemcpyDeviceToDevice, e->t));
        wait_for(e->u, e->t, e->event);
        LAUNCH(fill_kernel, 1, 64, 0, e->u, e->a, 64);
    } else if (is("copy_unwaited")) {
        CUDA_CHECK(cudaMemcpyAsync(e->a, e->pinned, 256, cudaMemcpyHostToDevice, e->s));
        LAUNCH(double_kernel, 1, 64, 0, e->t, e->b, e->a, 64);
    } else if (is("event_too_early")) {
        CUDA_CHECK(cudaEventRecord(e->event, e->s));
        CUDA_CHECK(cudaMemsetAsync(e->a, 0, 256, e->s));
        CUDA_CHECK(cudaStreamWaitEvent(e->t, e->event, 0));
        LAUNCH(read_kernel, 1, 64, 0, e->t, e->b, e->a, 0);
    } else if (is("event_unrecorded")) {
        CUDA_CHECK(cudaStreamWaitEvent(e->s, e->event, 0));
    } else if (is("freed_read")) {
        CUDA_CHECK(cudaFree(e->b));
        LAUNCH(double_kernel, 1, 64, 0, e->s, e->a, e->b, 64);
    } else if (is("matmul_unwaited")) {
        multiply(e->b, e->a, e->s);
        CUDA_CHECK(cudaMemsetAsync(e->b, 0, 256, e->t));
    } else if (is("collective_unwaited")) {
        ncclComm_t comm;
        if (ncclCommInitRank(&comm, 1, ncclUniqueId{}, 0) != ncclSuccess) return;
        CUDA_CHECK(cudaMemsetAsync(e->a, 0, 256, e->s));
        if (ncclAllReduce(e->a, e->a, 64, ncclFloat32, ncclSum, comm, e->t) != ncclSuccess) return;
    } else if (is("pinned_refilled")) {
        CUDA_CHECK(cudaMemcpyAsync(e->a, e->pinned, 256, cudaMemcpyHostToDevice, e->s));
        e->pinned[5] = 7;                                                          // pinned_refilled
    } else if (is("pinned_memcpy")) {
        CUDA_CHECK(cudaMemcpyAsync(e->a, e->pinned, 256, cudaMemcpyHostToDevice, e->s));
        volatile size_t size_bytes = 256;
        memcpy(e->pinned, host, size_bytes);                                       // pinned_memcpy
    } else if (is("pinned_read_early")) {
        CUDA_CHECK(cudaMemcpyAsync(e->pinned, e->a, 256, cudaMemcpyDeviceToHost, e->s));
        printf("%f\n", e->pinned[9]);                                              // pinned_read_early
    } else if (is("host_reads_device")) {
        printf("%f\n", e->a[3]);                                                   // host_reads_device
    } else if (is("host_memset_device")) {
        volatile size_t size_bytes = 256;
        memset(e->a, 0, size_bytes);                                               // host_memset_device
    }
}

static int make_checked_mistake(const char* name)
{
    Bench e = {};
    for (float** p : {&e.a, &e.b, &e.unwritten}) *p = device_new<float>(64);
    e.counter = device_new<unsigned>(1);
    CUDA_CHECK(cudaMallocHost(&e.pinned, 256));
    for (int i = 0; i < 64; i++) e.pinned[i] = 1;
    for (cudaStream_t* s : {&e.s, &e.t, &e.u}) CUDA_CHECK(cudaStreamCreateWithFlags(s, cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreateWithFlags(&e.event, cudaEventDisableTiming));
    CUDA_CHECK(cudaMemcpyAsync(e.a, e.pinned, 256, cudaMemcpyHostToDevice, e.s));
    CUDA_CHECK(cudaMemcpyAsync(e.b, e.pinned, 256, cudaMemcpyHostToDevice, e.s));
    CUDA_CHECK(cudaMemsetAsync(e.counter, 0, 4, e.s));
    CUDA_CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < 64; i++) e.pinned[i] = 2;     // all of this is in order, and silent
    kernel_mistake(name, &e);
    stream_mistake(name, &e);
    CUDA_CHECK(cudaGetLastError());
    CUDA_CHECK(cudaDeviceSynchronize());
    return 0;
}

/* Does `text` name every line of this file that carries `name`? */
static bool lines_named(const char* name, const char* text)
{
    FILE* file = fopen(__FILE__, "r");
    ENSURE(file != nullptr, "cannot read %s: run from the root of the repository", __FILE__);
    char line[512], want[64];
    bool all = true;
    for (int number = 1; fgets(line, sizeof line, file) != nullptr; number++) {
        const char* comment = strstr(line, "  // ");
        const char* at = comment != nullptr ? strstr(comment, name) : nullptr;
        if (at == nullptr || isalpha(at[-1]) || at[-1] == '_' || isalpha(at[strlen(name)]) || at[strlen(name)] == '_')
            continue;
        snprintf(want, sizeof want, "test_emu_checks.h:%d", number);
        if (strstr(text, want) != nullptr) continue;
        printf("    %s is not named for %s\n", want, name);
        all = false;
    }
    fclose(file);
    return all;
}

static bool checked_mistake_found(const char* self, const char* name, const char* message, int seed)
{
    char command[1024], text[8192];
    snprintf(command, sizeof command, "EMU_SEED=%d %s --mistake %s 2>&1", seed, self, name);
    FILE* pipe = popen(command, "r");
    ENSURE(pipe != nullptr, "cannot run %s", command);
    size_t len = fread(text, 1, sizeof text - 1, pipe);
    text[len] = '\0';
    bool ok = pclose(pipe) != 0 && strstr(text, message) != nullptr && lines_named(name, text);
    if (!ok) printf("    wanted \"%s\" under seed %d, got: %s\n", message, seed, text);
    return ok;
}

/* ---- what requests cost */

static __global__ void strided_kernel(float* out, const float* x, int stride)
{
    out[threadIdx.x] = x[threadIdx.x * stride];
}
static __global__ void transpose_kernel(float* out, int pitch)
{
    DYN_SHARED(float, tile);
    for (int row = 0; row < 32; row++) tile[row * pitch + threadIdx.x] = 1;
    __syncwarp();
    float sum = 0;
    for (int column = 0; column < 32; column++) sum += tile[threadIdx.x * pitch + column];
    out[threadIdx.x] = sum;
}

static void test_counts(void)
{
    float *x = device_new<float>(1024), *out = device_new<float>(32);
    CUDA_CHECK(cudaMemset(x, 0, 4096));
    CUDA_CHECK(cudaDeviceSynchronize());
    for (int stride : {1, 2, 8, 32}) {
        emu_count(true);
        LAUNCH(strided_kernel, 1, 32, 0, stream, out, x, stride);
        CUDA_CHECK(cudaDeviceSynchronize());
        EmuTraffic t = emu_traffic_of(x), w = emu_traffic_of(out);
        uint64_t sectors = stride < 8 ? 4u * (unsigned)stride : 32;
        report(t.read_bytes == 128 && t.requests == 1 && t.sectors == sectors && t.ideal_sectors == 4,
               "stride %d: 128 bytes in %llu sectors", stride, (unsigned long long)t.sectors);
        report(w.write_bytes == 128 && w.sectors == 4, "128 bytes written in 4 sectors");
    }
    for (int pitch : {32, 33}) {
        emu_count(true);
        LAUNCH(transpose_kernel, 1, 32, 32 * 33 * sizeof(float), stream, out, pitch);
        CUDA_CHECK(cudaDeviceSynchronize());
        EmuTraffic t = emu_traffic();
        report(t.ideal_wavefronts == 64 && t.wavefronts == (pitch == 32 ? 32u + 32 * 32 : 64u),
               "columns of a tile with rows of %d: %llu wavefronts", pitch, (unsigned long long)t.wavefronts);
    }
    emu_count(false);
    CUDA_CHECK(cudaFree(x));
    CUDA_CHECK(cudaFree(out));
}

static int run_checks(const char* self)
{
    char command[1024];
    for (int seed = 0; seed < 3; seed++) {
        snprintf(command, sizeof command, "EMU_SEED=%d %s --run 2>&1", seed, self);
        report(child_right(command, nullptr), "all tests under seed %d", seed);
    }
    for (const auto& m : checked_mistakes) {
        bool ok = true;
        for (int seed = 0; seed < 3; seed++) ok = checked_mistake_found(self, m.name, m.message, seed) && ok;
        report(ok, "mistake %s: \"%s\", its lines named", m.name, m.message);
    }
    printf("%d passed, %d failed\n", num_passed, num_failed);
    return num_failed != 0;
}
