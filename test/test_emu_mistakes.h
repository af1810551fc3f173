/* test_emu_mistakes.h: part of test_emu.cu: mistakes that the emulator must report, each in a process of its own, and
 * the speed of what is emulated. */
#include <time.h>

enum class Mistake {
    NONE, TWO_BARRIERS, BARRIER_AND_SHUFFLE, DIVERGED, NOT_IN_MASK, MISSING_LANES, LANE_EXITS,
    SHARED_OVERRUN, DYN_SHARED_OVERRUN, NO_DYN_SHARED, DEVICE_OVERRUN, DEVICE_UNDERRUN, FAR_OVERRUN, FREED,
    NULL_POINTER, MISALIGNED, STACK, CP_ASYNC_TO_GLOBAL, WRONG_KIND, COPY_OVERRUN, FREED_TWICE, NOT_ALLOCATED,
    DEAD_STREAM, EPILOGUE, UNWAITED,
};
static const struct { Mistake mistake; const char *name, *message; } mistakes[] = {
    {Mistake::TWO_BARRIERS, "two_barriers", "threads of one block meet at different barriers"},
    {Mistake::BARRIER_AND_SHUFFLE, "barrier_and_shuffle", "deadlock in a block"},
    {Mistake::DIVERGED, "diverged", "the warp has diverged"},
    {Mistake::NOT_IN_MASK, "not_in_mask", "is not in its mask"},
    {Mistake::MISSING_LANES, "missing_lanes", "names lanes that have exited or do not exist"},
    {Mistake::LANE_EXITS, "lane_exits", "lane"},     // exits before or while the others wait: two messages
    {Mistake::SHARED_OVERRUN, "shared_overrun", "0 bytes past the end of table (40 bytes of shared memory)"},
    {Mistake::DYN_SHARED_OVERRUN, "dyn_shared_overrun", "past the end of the dynamic shared memory (64 bytes"},
    {Mistake::NO_DYN_SHARED, "no_dyn_shared", "the launch gave 0 bytes"},
    {Mistake::DEVICE_OVERRUN, "device_overrun", "wrote 0 bytes past the end of a device allocation of 400 bytes"},
    {Mistake::DEVICE_UNDERRUN, "device_underrun", "before the start of a device allocation of 400 bytes"},
    {Mistake::FAR_OVERRUN, "far_overrun", "past the end of a device allocation of 400 bytes"},
    {Mistake::FREED, "freed", "device memory that was freed"},
    {Mistake::NULL_POINTER, "null_pointer", "a null pointer"},
    {Mistake::MISALIGNED, "misaligned", "is not aligned to 16 bytes"},
    {Mistake::STACK, "stack", "bytes of stack"},
    {Mistake::CP_ASYNC_TO_GLOBAL, "cp_async_to_global", "is not shared memory"},
    {Mistake::WRONG_KIND, "wrong_kind", "the kind of copy says device"},
    {Mistake::COPY_OVERRUN, "copy_overrun", "run past the end of a device allocation of 400 bytes"},
    {Mistake::FREED_TWICE, "freed_twice", "freed twice"},
    {Mistake::NOT_ALLOCATED, "not_allocated", "not an allocation"},
    {Mistake::DEAD_STREAM, "dead_stream", "is used after cudaStreamDestroy"},
    {Mistake::EPILOGUE, "epilogue", "epilogue 2 is not emulated"},
    {Mistake::UNWAITED, "unwaited", "the missing wait shows"},
};

static __global__ void mistake_kernel(Mistake mistake, float* x, int far)
{
    int t = threadIdx.x;
    switch (mistake) {
    case Mistake::TWO_BARRIERS:
        if (t < 32) __syncthreads();
        else __syncthreads();
        break;
    case Mistake::BARRIER_AND_SHUFFLE:
        if (t % 2 == 0) __syncthreads();
        else x[t] = __shfl_sync(0xFFFFFFFFu, x[t], 0);
        break;
    case Mistake::DIVERGED:
        if (t % 2 == 0) __syncwarp();
        else x[t] = __shfl_sync(0xFFFFFFFFu, x[t], 0);
        break;
    case Mistake::NOT_IN_MASK: x[t] = __shfl_sync(0x0000FFFFu, x[t], 0); break;
    case Mistake::MISSING_LANES: x[t] = warp_sum(x[t]); break;
    case Mistake::LANE_EXITS:
        if (t != 7) x[t] = warp_sum(x[t]);
        break;
    case Mistake::SHARED_OVERRUN: {
        SHARED(float, table, [10]);
        table[t % 11] = 1;
        break;
    }
    case Mistake::DYN_SHARED_OVERRUN:
    case Mistake::NO_DYN_SHARED: {
        DYN_SHARED(float, table);
        table[t % 17] = 1;
        break;
    }
    case Mistake::DEVICE_OVERRUN: x[100] = 1; break;
    case Mistake::DEVICE_UNDERRUN: x[-1] = 1; break;
    case Mistake::MISALIGNED: x[0] = ld128(x + 1)[0]; break;
    case Mistake::CP_ASYNC_TO_GLOBAL: cp_async16(x, x + 4); break;
    case Mistake::FAR_OVERRUN: case Mistake::FREED: case Mistake::NULL_POINTER: x[far] += 1; break;
    case Mistake::NONE: case Mistake::STACK: case Mistake::WRONG_KIND: case Mistake::COPY_OVERRUN:
    case Mistake::FREED_TWICE: case Mistake::NOT_ALLOCATED: case Mistake::DEAD_STREAM: case Mistake::EPILOGUE:
    case Mistake::UNWAITED: break;                   // not made by this kernel
    }
}

static __global__ void stack_kernel(float* x)
{
    volatile char big[70 << 10];
    for (int i = 0; i < (int)sizeof big; i += 8) big[i] = 1;
    x[threadIdx.x] = big[threadIdx.x];
    __syncthreads();
}

/* Returns only if nothing was reported. */
static int make_mistake(const char* name)
{
    Mistake mistake = Mistake::NONE;
    for (const auto& m : mistakes) {
        if (strcmp(m.name, name) == 0) mistake = m.mistake;
    }
    float *x = device_new<float>(100), *other = device_new<float>(100), host[200] = {};
    upload(x, host, 100);
    CUDA_CHECK(cudaStreamSynchronize(stream));
    size_t shared_bytes = mistake == Mistake::DYN_SHARED_OVERRUN ? 64 : 0;
    int far = mistake == Mistake::FAR_OVERRUN ? 1000 : 0, block = mistake == Mistake::MISSING_LANES ? 48 : 64;
    if (mistake == Mistake::UNWAITED && !relay_right(false)) fprintf(stderr, "the missing wait shows\n");
    if (mistake == Mistake::UNWAITED) return 1;
    if (mistake == Mistake::FREED_TWICE || mistake == Mistake::FREED) CUDA_CHECK(cudaFree(x));
    if (mistake == Mistake::FREED_TWICE) CUDA_CHECK(cudaFree(x));
    if (mistake == Mistake::NOT_ALLOCATED) CUDA_CHECK(cudaFree(other + 1));
    if (mistake == Mistake::NULL_POINTER) x = nullptr;
    if (mistake == Mistake::WRONG_KIND) CUDA_CHECK(cudaMemcpy(host, x, 400, cudaMemcpyDeviceToDevice));
    if (mistake == Mistake::COPY_OVERRUN) CUDA_CHECK(cudaMemcpy(host, x, 404, cudaMemcpyDeviceToHost));
    if (mistake == Mistake::DEAD_STREAM) CUDA_CHECK(cudaStreamDestroy(stream));
    if (mistake == Mistake::EPILOGUE) {
        cublasLtMatmulDesc_t desc;
        cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_RELU;
        LT_CHECK(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
        LT_CHECK(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
    }
    if (mistake == Mistake::STACK) LAUNCH(stack_kernel, 1, 2, 0, stream, x);
    LAUNCH(mistake_kernel, 1, block, shared_bytes, stream, mistake, x, far);
    CUDA_CHECK(cudaGetLastError());
    CUDA_CHECK(cudaDeviceSynchronize());
    return 0;
}

/* ---- children */

/* True if the command printed `message` and failed, or, without a message, printed "N passed, 0 failed". */
static bool child_right(const char* command, const char* message)
{
    FILE* pipe = popen(command, "r");
    ENSURE(pipe != nullptr, "cannot run %s", command);
    char line[4096], last[4096] = "";
    bool seen = false;
    int passed = 0, failed = -1;
    while (fgets(line, sizeof line, pipe) != nullptr) {
        if (message != nullptr && strstr(line, message) != nullptr) seen = true;
        if (message == nullptr && strncmp(line, "FAILED", 6) == 0) fputs(line, stdout);
        sscanf(line, "%d passed, %d failed", &passed, &failed);
        snprintf(last, sizeof last, "%s", line);
    }
    int status = pclose(pipe);
    bool ok = message != nullptr ? seen && status != 0 : status == 0 && failed == 0;
    if (!ok && message != nullptr) printf("    wanted \"%s\", the last line was: %s\n", message, last);
    if (message == nullptr) num_passed += passed - 1;
    return ok;
}

static int run_seeds_and_mistakes(const char* self)
{
    char command[1024];
    for (int seed = 0; seed < 6; seed++) {
        snprintf(command, sizeof command, "EMU_SEED=%d %s --run 2>&1", seed, self);
        report(child_right(command, nullptr), "all tests under seed %d", seed);
    }
    for (const auto& m : mistakes) {
        bool ok = true;
        for (int seed = 0; seed < 3; seed++) {
            if (m.mistake == Mistake::UNWAITED && seed == 0) continue;   // at once is always in order
            snprintf(command, sizeof command, "EMU_SEED=%d %s --mistake %s 2>&1", seed, self, m.name);
            ok = child_right(command, m.message) && ok;
        }
        report(ok, "mistake %s: \"%s\"", m.name, m.message);
    }
    printf("%d passed, %d failed\n", num_passed, num_failed);
    return num_failed != 0;
}

/* ---- speed */

static __global__ void nothing_kernel(float*) {}
static __global__ void axpy_kernel(float* x)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    x[i] = 2 * x[i] + 1;
}
static __global__ void barrier_kernel(float*)
{
    for (int i = 0; i < 100; i++) __syncthreads();
}
static __global__ void shuffle_speed_kernel(float* x)
{
    float v = x[threadIdx.x];
    for (int i = 0; i < 100; i++) v = __shfl_xor_sync(0xFFFFFFFFu, v, 1);
    x[threadIdx.x] = v;
}
static __global__ void warp_sum_kernel(float* x)
{
    float v = x[threadIdx.x];
    for (int i = 0; i < 100; i++) v = warp_sum(v) * 0.03125f;
    x[threadIdx.x] = v;
}
static __global__ void mma_speed_kernel(float* x)
{
    float d[4] = {0, 0, 0, 0};
    uint32_t a[4] = {0, 0, 0, 0}, b[2] = {0, 0};
    for (int i = 0; i < 100; i++) mma_m16n8k16<__nv_bfloat16>(d, a, b);
    x[threadIdx.x] = d[0];
}

#define SPEED(kernel, grid, block, ops_a_thread) do { \
    double best = 1e9; \
    for (int repeat = 0; repeat < 5; repeat++) { \
        struct timespec a, b; \
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &a); \
        LAUNCH(kernel, grid, block, 0, stream, x); \
        CUDA_CHECK(cudaStreamSynchronize(stream)); \
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &b); \
        double ns = (double)(b.tv_sec - a.tv_sec) * 1e9 + (double)(b.tv_nsec - a.tv_nsec); \
        best = fmin(best, ns / ((double)(grid) * (block) * (ops_a_thread))); \
    } \
    printf("%-22s %4d threads a block %8.1f ns per thread and operation\n", #kernel, block, best); \
} while (0)

static int print_speed(void)
{
    float* x = device_new<float>(1 << 18);
    CUDA_CHECK(cudaMemsetAsync(x, 0, sizeof(float) << 18, stream));
    SPEED(nothing_kernel, 1024, 256, 1);
    SPEED(axpy_kernel, 1024, 256, 1);
    SPEED(barrier_kernel, 16, 32, 100);
    SPEED(barrier_kernel, 4, 256, 100);
    SPEED(barrier_kernel, 1, 1024, 100);
    SPEED(shuffle_speed_kernel, 4, 256, 100);
    SPEED(warp_sum_kernel, 4, 256, 100);
    SPEED(mma_speed_kernel, 4, 128, 100);
    CUDA_CHECK(cudaFree(x));
    return 0;
}
