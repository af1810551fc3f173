/* bench_ceilings.cu: what this device gives at best: cuBLASLt products of GPT-2's shapes through our matmul_forward,
 * and a copy on the device. The marks that a training step is judged against.
 *   bench_ceilings [N]      rows of the products (default 16384 = 16 sequences of 1024 tokens), a 512 MiB copy; a
 *                           smaller N also shrinks the shapes, for a try on the emulator */
#include "kernels/matmul.cuh"

static const int REPEATS = 10;

/* Milliseconds of the best of REPEATS calls after one to warm up, by events on the stream. */
template <class F> static double best_ms(cudaStream_t stream, F call)
{
    cudaEvent_t start, end;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&end));
    double best = 1e30;
    call();
    for (int i = 0; i < REPEATS; i++) {
        float ms;
        CUDA_CHECK(cudaEventRecord(start, stream));
        call();
        CUDA_CHECK(cudaEventRecord(end, stream));
        CUDA_CHECK(cudaEventSynchronize(end));
        CUDA_CHECK(cudaEventElapsedTime(&ms, start, end));
        if (ms < best) best = ms;
    }
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(end));
    return best;
}

static void* device_zeros(size_t size_bytes)
{
    void* p;
    CUDA_CHECK(cudaMalloc(&p, size_bytes));
    CUDA_CHECK(cudaMemset(p, 0, size_bytes));
    return p;
}

static void bench_product(int N, int IC, int OC, cudaStream_t stream)
{
    floatX *inp = (floatX*)device_zeros((size_t)N * IC * sizeof(floatX)), *out;
    floatX* weight = (floatX*)device_zeros((size_t)IC * OC * sizeof(floatX));
    out = (floatX*)device_zeros((size_t)N * OC * sizeof(floatX));
    CUDA_CHECK(cudaDeviceSynchronize());
    double ms = best_ms(stream, [&] {
        matmul_forward(out, inp, weight, (const floatX*)nullptr, N, IC, OC, Layout::IN_OUT, stream);
    });
    printf("gemm %s %dx%dx%d %.1f TFLOP/s\n", FLOATX_NAME, N, IC, OC, 2e-9 * N * IC * OC / ms);
    CUDA_CHECK(cudaFree(inp));
    CUDA_CHECK(cudaFree(weight));
    CUDA_CHECK(cudaFree(out));
}

int main(int argc, char** argv)
{
    const int N = argc > 1 ? atoi(argv[1]) : 16384, shrink = N >= 1024 ? 1 : 16;
    ENSURE(N >= 1, "bench_ceilings [N]: N is %d, must be at least 1", N);
    cudaStream_t stream;
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    matmul_init();
    for (int C : {768, 1600}) bench_product(N, C / shrink, 4 * C / shrink, stream);
    bench_product(N < 8192 ? N : 8192, 8192 / shrink / shrink, 8192 / shrink / shrink, stream);
    const size_t copy_bytes = ((size_t)512 << 20) / shrink / shrink;
    void *from = device_zeros(copy_bytes), *to = device_zeros(copy_bytes);
    CUDA_CHECK(cudaDeviceSynchronize());
    double ms = best_ms(stream, [&] {
        CUDA_CHECK(cudaMemcpyAsync(to, from, copy_bytes, cudaMemcpyDeviceToDevice, stream));
    });
    printf("copy %zu MiB %.1f GB/s\n", copy_bytes >> 20, 2e-6 * (double)copy_bytes / ms);
    CUDA_CHECK(cudaFree(from));
    CUDA_CHECK(cudaFree(to));
    matmul_free();
    CUDA_CHECK(cudaStreamDestroy(stream));
    return 0;
}
