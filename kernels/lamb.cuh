/* lamb.cuh: LAMB's norms: the sums of p^2 and u^2 of each run of elements, added to those of its tensor.
 *   u = m/(sqrt(v) + eps) + wd*p, as in the step that follows (optimizer.cuh)
 * shapes  master m v (n) stored as Values says; sums (tensors,2) double; scratch (lamb_scratch_elems()) double
 * writes  sums +=; scratch is overwritten
 * needs   any n; no two runs of a launch of one tensor
 * exact   sums in double and in a fixed order: same bits on every run and for any number of CPU threads
 * cost    12*n bytes in fp32, judged against memory bandwidth
 * source  You et al. 2019, arXiv:1904.00962 */
#pragma once
#include "optimizer.cuh"

static constexpr int LAMB_PARTS = 64;                // partial sums of a run
static size_t lamb_scratch_elems() { return (size_t)OPTIMIZER_MAX_RUNS * LAMB_PARTS * 2; }

#ifdef DEVICE_CPU

static void lamb_norms_cpu(double* sums, double* scratch, const Values& master, const Values& m, const Values& v,
                           const OptimizerRuns* runs, float eps)
{
    #pragma omp parallel for
    for (int idx = 0; idx < runs->num_runs * LAMB_PARTS; idx++) {
        const int run = idx / LAMB_PARTS, part = idx % LAMB_PARTS;
        const size_t first = run > 0 ? runs->end[run - 1] : 0, n = runs->end[run] - first;
        double p2 = 0.0, u2 = 0.0;
        for (size_t i = first + n * part / LAMB_PARTS; i < first + n * (part + 1) / LAMB_PARTS; i++) {
            const float p = value_load(master, i);
            const float u = lamb_direction(p, value_load(m, i), value_load(v, i), eps, runs->weight_decay[run]);
            p2 += (double)p * (double)p;
            u2 += (double)u * (double)u;
        }
        scratch[2 * idx] = p2;
        scratch[2 * idx + 1] = u2;
    }
    for (int idx = 0; idx < runs->num_runs * LAMB_PARTS; idx++)
        for (int k = 0; k < 2; k++) sums[2 * runs->tensor[idx / LAMB_PARTS] + k] += scratch[2 * idx + k];
}

#else

/* grid (LAMB_PARTS, runs) */
static __global__ void __launch_bounds__(OPTIMIZER_BLOCK)
lamb_norms_kernel(double* scratch, Values master, Values m, Values v, OptimizerRuns runs, float eps)
{
    SHARED(double, partial, [2][32]);
    const int run = blockIdx.y;
    const float weight_decay = runs.weight_decay[run];
    double p2 = 0.0, u2 = 0.0;
    size_t i = (run > 0 ? runs.end[run - 1] : 0) + (size_t)blockIdx.x * OPTIMIZER_BLOCK + threadIdx.x;
    for (; i < runs.end[run]; i += (size_t)LAMB_PARTS * OPTIMIZER_BLOCK) {
        const float p = value_load(master, i);
        const float u = lamb_direction(p, value_load(m, i), value_load(v, i), eps, weight_decay);
        p2 += (double)p * (double)p;
        u2 += (double)u * (double)u;
    }
    p2 = block_sum(p2, partial[0]);
    u2 = block_sum(u2, partial[1]);
    if (threadIdx.x == 0) {
        scratch[2 * (run * LAMB_PARTS + blockIdx.x)] = p2;
        scratch[2 * (run * LAMB_PARTS + blockIdx.x) + 1] = u2;
    }
}

/* A block of LAMB_PARTS threads a run: no two runs of a launch are of one tensor. */
static __global__ void __launch_bounds__(LAMB_PARTS)
lamb_norms_finish_kernel(double* sums, const double* scratch, OptimizerRuns runs)
{
    SHARED(double, partial, [2][32]);
    const double* mine = scratch + 2 * (blockIdx.x * LAMB_PARTS + threadIdx.x);
    const double p2 = block_sum(mine[0], partial[0]), u2 = block_sum(mine[1], partial[1]);
    if (threadIdx.x > 0) return;
    sums[2 * runs.tensor[blockIdx.x]] += p2;
    sums[2 * runs.tensor[blockIdx.x] + 1] += u2;
}

#endif

/* Adds the sums of p^2 and u^2 of each run to those of its tensor. */
static void lamb_norms(double* sums, double* scratch, Values master, Values m, Values v, const OptimizerRuns* runs,
                       float eps, cudaStream_t stream)
{
    if (runs->num_runs == 0) return;
    OP(stream, 0, (value_bytes(master) + value_bytes(m) + value_bytes(v)) * runs_elems(runs), runs_elems(runs));
    ON_CPU(lamb_norms_cpu(sums, scratch, master, m, v, runs, eps));
#ifndef DEVICE_CPU
    LAUNCH(lamb_norms_kernel, dim3(LAMB_PARTS, runs->num_runs), OPTIMIZER_BLOCK, 0, stream, scratch, master, m, v,
           *runs, eps);
    CUDA_CHECK(cudaGetLastError());
    LAUNCH(lamb_norms_finish_kernel, runs->num_runs, LAMB_PARTS, 0, stream, sums, scratch, *runs);
    CUDA_CHECK(cudaGetLastError());
#endif
}

#ifdef OP_TESTS

/* LAMB's sums. dims: n, shift, unused, 1 for several runs. */
static void lamb_norms_test(OpRun* run)
{
    const size_t n = (size_t)run->dims[0], shift = (size_t)run->dims[1], whole = n + shift;
    const OptimizerRuns runs = optimizer_test_runs(n, run->dims[3] != 0);
    OpTensor<float> p = op_input<float>(run, "p", whole, 0.0, 0.02), m = op_input<float>(run, "m", whole, 0.0, 1e-3);
    OpTensor<float> v = op_input<float>(run, "v", whole, 1e-3, 2e-4);
    double *scratch = op_scratch<double>(run, lamb_scratch_elems()), h_sums[10], truth[10] = {};
    for (int k = 0; k < 10; k++) h_sums[k] = truth[k] = k;   // added to
    double* sums = (double*)op_bytes(run, "sums", OpKind::INOUT, h_sums, sizeof h_sums);
    OP_RUN(run, 12.0 * n, 0, lamb_norms(sums, scratch, values_of(p.dev + shift), values_of(m.dev + shift),
                                        values_of(v.dev + shift), &runs, 1e-8f, 0));
    for (size_t i = 0, k = 0; i < n; i++) {
        while (runs.end[k] <= i) k++;
        const double x = p.f64[shift + i];
        const double u = m.f64[shift + i] / (sqrt(v.f64[shift + i]) + 1e-8) + (double)runs.weight_decay[k] * x;
        truth[2 * runs.tensor[k]] += x * x;
        truth[2 * runs.tensor[k] + 1] += u * u;
    }
    const double* ours = (const double*)op_result(run, "sums");
    for (int k = 0; k < 10; k++) op_check_value(run, "sum", ours[k], truth[k], 1e-6 * truth[k]);   // u is a float
}

static const OpTest lamb_tests[] = {
    {"lamb_norms", lamb_norms_test, {1}, OpWhen::ALWAYS},
    {"lamb_norms", lamb_norms_test, {40001, 1, 0, 1}, OpWhen::ALWAYS},
};

#endif
