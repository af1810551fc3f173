/* bench_floor.cpp: the least time in which this machine could train one step, for comparison with a CPU run.
 *   bench_floor                          prints the two speeds of the machine
 *   bench_floor FAMILY L C F V B T       and the floor of a step of a GPT-2 (tied head) or LLaMA (untied, as many heads
 *                                        of keys as of queries): layers, channels, MLP width, vocabulary, sequences,
 *                                        tokens of each
 *
 *   floor = (matrix + attention flops) / FMA peak  +  optimizer bytes / triad speed
 *     matrix     6 * B*T * (L * (4*C^2 + M*C*F) + V*C)   M: 2 matrices of an MLP, 3 of a gated one. A matrix weight is
 *                                used three times (forward, gradient of the input, of the weight), 2 flops a token each
 *     attention  7 * B*T * L * C * (T+1)      2 GEMMs forward and 5 backward, 2 flops, over the causal half of T x T
 *     optimizer  28 * parameters              AdamW reads weight, gradient, m, v and writes weight, m, v in fp32
 * In bf16 with AVX512_BF16 the flops are at its peak, and the optimizer's bytes are the same. The
 * floor leaves out norms, activations, softmax, cross-entropy and all activations in memory, and lets nothing overlap.
 *
 * The speeds are measured as in the program, by kernels/cpu/peak.h. On a shared or throttled machine they change by the
 * minute: measure step and floor in turn. The last line is for scripts: fma_gflops X triad_gbps X [floor_ms X
 * bf16_floor_ms X].
 *
 * g++ -std=c++17 -O3 -march=native -ffp-contract=fast -fopenmp -I. dev/bench_floor.cpp -o bench_floor */
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <omp.h>
#include "kernels/cpu/peak.h"

int main(int argc, char** argv)
{
    const bool gated = argc > 1 && strcmp(argv[1], "llama") == 0;
    if (argc != 1 && (argc != 8 || (!gated && strcmp(argv[1], "gpt2") != 0))) {
        fprintf(stderr, "usage: bench_floor [gpt2|llama L C F V B T]\n");
        return 2;
    }
    const int num_threads = omp_get_max_threads();
    const double gflops = cpu_fma_gflops<1>(num_threads), gflops_bf16 = cpu_fma_gflops<VF_BF16_PAIRS + 1>(num_threads);
    const double gbps = cpu_triad_gbps(num_threads, 256 << 20);
    printf("%d threads, %d floats a vector: %.1f GFLOP/s fused multiply-add, %.1f of bf16, %.1f GB/s triad\n",
           num_threads, VF, gflops, gflops_bf16, gbps);
    if (argc == 1) {
        printf("fma_gflops %.2f triad_gbps %.2f\n", gflops, gbps);
        return 0;
    }
    const double L = atof(argv[2]), C = atof(argv[3]), F = atof(argv[4]), V = atof(argv[5]);
    const double B = atof(argv[6]), T = atof(argv[7]), block = 4 * C * C + (gated ? 3 : 2) * C * F;
    const double matrix_flops = 6 * B * T * (L * block + V * C), attention_flops = 7 * B * T * L * C * (T + 1);
    const double vectors = gated ? (2 * L + 1) * C : L * (9 * C + F) + 2 * C;      // norms and biases
    const double num_params = L * block + vectors + (gated ? 2 * V : V + T) * C, optimizer_bytes = 28 * num_params;
    const double matrix_ms = matrix_flops / gflops * 1e-6, attention_ms = attention_flops / gflops * 1e-6;
    const double optimizer_ms = optimizer_bytes / gbps * 1e-6, floor_ms = matrix_ms + attention_ms + optimizer_ms;
    printf("GEMMs           %8.1f GFLOP %9.1f ms\n", matrix_flops * 1e-9, matrix_ms);
    printf("attention       %8.1f GFLOP %9.1f ms\n", attention_flops * 1e-9, attention_ms);
    printf("optimizer       %8.1f GB    %9.1f ms   (%.1fM parameters)\n", optimizer_bytes * 1e-9, optimizer_ms,
           num_params * 1e-6);
    const double bf16_ms = (matrix_flops + attention_flops) / gflops_bf16 * 1e-6 + optimizer_ms;
    printf("fma_gflops %.2f triad_gbps %.2f floor_ms %.2f bf16_floor_ms %.2f\n", gflops, gbps, floor_ms, bf16_ms);
    return 0;
}
