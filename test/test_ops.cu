/* test_ops.cu: tests and times every op. The same source is built for the CPU, for the emulator and for a GPU.
 *   test_ops [FILTER]          checks the rows whose name contains FILTER; all without one
 *   test_ops --traffic         counts what ops move, against their cost lines (checked emulated build)
 *   test_ops --bench [FILTER]  times the bench rows, in percent of what memory gives
 *   test_ops --op OP           checks the rows of one op, so that an error of the device ends no other (gpu_check.sh)
 *   test_ops --list            prints the ops
 * Built with -DOP_TESTS; optest.h explains the rule that decides. Exit code 1 when a row fails. */
#ifndef OP_TESTS
#define OP_TESTS
#endif
#include "kernels/optest.h"
#include "kernels/embedding.cuh"
#include "kernels/layernorm.cuh"
#include "kernels/rmsnorm.cuh"
#include "kernels/rope.cuh"
#include "kernels/qk_norm.cuh"
#include "kernels/swiglu.cuh"
#include "kernels/activation.cuh"
#include "kernels/dropout.cuh"
#include "kernels/matmul.cuh"
#include "kernels/attention_spans.cuh"
#include "kernels/attention.cuh"
#include "kernels/attention_cached.cuh"
#include "kernels/classifier.cuh"
#include "kernels/columns.cuh"
#include "kernels/accumulate.cuh"
#include "kernels/clear.cuh"
#include "kernels/global_norm.cuh"
#include "kernels/step.cuh"
#include "kernels/lamb.cuh"
#include "kernels/optimizer.cuh"
#include "kernels/muon.cuh"
#include "kernels/progress.cuh"
#include "test_storage.h"
#ifdef EMU_CHECK
#include "test_emu_traffic.h"
#endif

/* The tables of rows, in the order in which they run. */
#define OPS(O) \
    O(embedding) O(layernorm) O(rmsnorm) O(rope) O(qk_norm) O(swiglu) O(activation) O(dropout) O(columns) O(matmul) \
    O(attention_spans) O(attention) O(attention_cached) O(classifier) O(accumulate) O(clear) O(progress) \
    O(global_norm) O(step) O(values) \
    O(optimizer) O(lamb) O(storage) O(muon)

/* What memory gives when nothing is computed: the mark that ops bound by bandwidth are judged against. On the CPU two
 * reads and a write per element (AdamW and layernorm look like that), on a GPU a copy. */
static double memory_gbps_measure()
{
    const size_t n = (size_t)64 << 20;
    float *a, *b;
    CUDA_CHECK(cudaMalloc((void**)&a, n * sizeof(float)));
    CUDA_CHECK(cudaMalloc((void**)&b, n * sizeof(float)));
    CUDA_CHECK(cudaMemsetAsync(a, 0, n * sizeof(float), 0));
    CUDA_CHECK(cudaMemsetAsync(b, 0, n * sizeof(float), 0));
    CUDA_CHECK(cudaDeviceSynchronize());
    double best_s = 1e30, bytes = 0;
    for (int rep = 0; rep < 10; rep++) {
        double start_s = now_s();
#ifdef DEVICE_CPU
        bytes = 3.0 * n * sizeof(float);
        #pragma omp parallel for
        for (size_t i = 0; i < n; i++) b[i] = a[i] * 1.0001f + b[i];
#else
        bytes = 2.0 * n * sizeof(float);
        CUDA_CHECK(cudaMemcpyAsync(b, a, n * sizeof(float), cudaMemcpyDeviceToDevice, 0));
#endif
        CUDA_CHECK(cudaDeviceSynchronize());
        double took_s = now_s() - start_s;
        if (took_s < best_s) best_s = took_s;
    }
    CUDA_CHECK(cudaFree(a));
    CUDA_CHECK(cudaFree(b));
    return bytes / best_s * 1e-9;
}

int main(int argc, char** argv)
{
#ifdef EMU_CHECK
    if (argc == 2 && strcmp(argv[1], "--traffic") == 0) return traffic_main();
#endif
    if (argc == 2 && strcmp(argv[1], "--list") == 0) {
#define PRINT(op) puts(#op);
        OPS(PRINT)
        return 0;
    }
    const bool bench = argc > 1 && strcmp(argv[1], "--bench") == 0, one = argc == 3 && strcmp(argv[1], "--op") == 0;
    const char *only = one ? argv[2] : nullptr, *filter = one || argc < 2 + bench ? "" : argv[1 + bench];
    OpTotals totals = {};
    double memory_gbps = 0;
    if (bench) {
        memory_gbps = memory_gbps_measure();
        printf("floatX %s, memory %.1f GB/s, %d threads\n", FLOATX_NAME, memory_gbps, op_threads());
    }
    matmul_init();
#define RUN(op) \
    if (only == nullptr || strcmp(only, #op) == 0) op_table(op##_tests, filter, bench, memory_gbps, &totals);
    OPS(RUN)
    matmul_free();
    if (bench) return 0;
    printf("%d passed, %d failed", totals.num_passed, totals.num_failed);
    if (totals.num_skipped > 0) printf(", %d large ones skipped", totals.num_skipped);
    printf("\n");
    return totals.num_failed != 0 || totals.num_passed == 0;
}
