/* test_ops.cu: tests and times every op. The same source is built for the CPU, for the emulator and for a GPU.
 *   test_ops [FILTER]          checks the rows whose name contains FILTER; all without one
 *   test_ops --traffic         counts what ops move, against their cost lines (checked emulated build)
 *   test_ops --bench [FILTER]  times the bench rows, in percent of what memory gives
 * Built with -DOP_TESTS; optest.h explains the rule that decides. Exit code 1 when a row fails. */
#ifndef OP_TESTS
#define OP_TESTS
#endif
#include "kernels/optest.h"
#include "kernels/embedding.cuh"
#include "kernels/layernorm.cuh"
#include "kernels/rmsnorm.cuh"
#include "kernels/rope.cuh"
#include "kernels/swiglu.cuh"
#include "kernels/activation.cuh"
#include "kernels/dropout.cuh"
#include "kernels/matmul.cuh"
#include "kernels/attention.cuh"
#include "kernels/attention_cached.cuh"
#include "kernels/classifier.cuh"
#include "kernels/accumulate.cuh"
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
        double start_s = op_now_s();
#ifdef DEVICE_CPU
        bytes = 3.0 * n * sizeof(float);
        #pragma omp parallel for
        for (size_t i = 0; i < n; i++) b[i] = a[i] * 1.0001f + b[i];
#else
        bytes = 2.0 * n * sizeof(float);
        CUDA_CHECK(cudaMemcpyAsync(b, a, n * sizeof(float), cudaMemcpyDeviceToDevice, 0));
#endif
        CUDA_CHECK(cudaDeviceSynchronize());
        double took_s = op_now_s() - start_s;
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
    const bool bench = argc > 1 && strcmp(argv[1], "--bench") == 0;
    const char* filter = argc > 1 + bench ? argv[1 + bench] : "";
    OpTotals totals = {};
    double memory_gbps = 0;
    if (bench) {
        memory_gbps = memory_gbps_measure();
        printf("floatX %s, memory %.1f GB/s, %d threads\n", FLOATX_NAME, memory_gbps, op_threads());
    }
    matmul_init();
    op_table(embedding_tests, filter, bench, memory_gbps, &totals);
    op_table(layernorm_tests, filter, bench, memory_gbps, &totals);
    op_table(rmsnorm_tests, filter, bench, memory_gbps, &totals);
    op_table(rope_tests, filter, bench, memory_gbps, &totals);
    op_table(swiglu_tests, filter, bench, memory_gbps, &totals);
    op_table(activation_tests, filter, bench, memory_gbps, &totals);
    op_table(dropout_tests, filter, bench, memory_gbps, &totals);
    op_table(matmul_tests, filter, bench, memory_gbps, &totals);
    op_table(attention_tests, filter, bench, memory_gbps, &totals);
    op_table(attention_cached_tests, filter, bench, memory_gbps, &totals);
    op_table(classifier_tests, filter, bench, memory_gbps, &totals);
    op_table(accumulate_tests, filter, bench, memory_gbps, &totals);
    op_table(progress_tests, filter, bench, memory_gbps, &totals);
    op_table(global_norm_tests, filter, bench, memory_gbps, &totals);
    op_table(step_tests, filter, bench, memory_gbps, &totals);
    op_table(values_tests, filter, bench, memory_gbps, &totals);
    op_table(optimizer_tests, filter, bench, memory_gbps, &totals);
    op_table(lamb_tests, filter, bench, memory_gbps, &totals);
    op_table(storage_tests, filter, bench, memory_gbps, &totals);
    op_table(muon_tests, filter, bench, memory_gbps, &totals);
    matmul_free();
    if (bench) return 0;
    printf("%d passed, %d failed", totals.num_passed, totals.num_failed);
    if (totals.num_skipped > 0) printf(", %d large ones skipped", totals.num_skipped);
    printf("\n");
    return totals.num_failed != 0 || totals.num_passed == 0;
}
