/* accumulate.cuh: the plain sums of a step.
 *   accumulate       out += inp
 *   pieces_sum       out = pieces[0] + pieces[1] + ..., from left to right
 *   loss_accumulate  sums[0] += number of targets >= 0,  sums[1] += sum of their losses
 * shapes  out inp (n) fp32; pieces (R,n) fp32; losses (n) fp32; targets (n) int; sums (2) double
 * writes  out += (pieces_sum: =); sums +=
 * needs   any n
 * exact   fixed order: same bits on every run
 * cost    accumulate 12*n bytes; pieces_sum 4*(R+1)*n; loss_accumulate 8*n in one block: n is a micro-batch's rows */
#pragma once
#include "common.cuh"

#ifdef DEVICE_CPU
static void accumulate_cpu(float* out, const float* inp, size_t n)
{
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) out[i] += inp[i];
}

static void pieces_sum_cpu(float* out, const float* pieces, int num_pieces, size_t n)
{
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) {
        float sum = pieces[i];
        for (int k = 1; k < num_pieces; k++) sum += pieces[k * n + i];
        out[i] = sum;
    }
}

static void loss_accumulate_cpu(double* sums, const float* losses, const int* targets, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (targets[i] < 0) continue;
        sums[0] += 1;
        sums[1] += losses[i];
    }
}
#else
static __global__ void accumulate_kernel(float* out, const float* inp, size_t n)
{
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i < n) out[i] += inp[i];
}

static __global__ void pieces_sum_kernel(float* out, const float* pieces, int num_pieces, size_t n)
{
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i >= n) return;
    float sum = pieces[i];
    for (int k = 1; k < num_pieces; k++) sum += pieces[k * n + i];
    out[i] = sum;
}

/* One block: thread k sums k, k + 256, ...; then a tree over the threads. */
static __global__ void loss_accumulate_kernel(double* sums, const float* losses, const int* targets, size_t n)
{
    SHARED(double, count, [256]);
    SHARED(double, total, [256]);
    int k = threadIdx.x;
    double c = 0, t = 0;
    for (size_t i = k; i < n; i += 256) {
        if (targets[i] < 0) continue;
        c += 1;
        t += losses[i];
    }
    count[k] = c;
    total[k] = t;
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (k < half) {
            count[k] += count[k + half];
            total[k] += total[k + half];
        }
    }
    if (k == 0) {
        sums[0] += count[0];
        sums[1] += total[0];
    }
}
#endif

static void accumulate(float* out, const float* inp, size_t n, cudaStream_t stream)
{
    ON_CPU(accumulate_cpu(out, inp, n));
#ifndef DEVICE_CPU
    LAUNCH(accumulate_kernel, (unsigned)ceil_div(n, 256), 256, 0, stream, out, inp, n);
    CUDA_CHECK(cudaGetLastError());
#endif
}

static void pieces_sum(float* out, const float* pieces, int num_pieces, size_t n, cudaStream_t stream)
{
    ON_CPU(pieces_sum_cpu(out, pieces, num_pieces, n));
#ifndef DEVICE_CPU
    LAUNCH(pieces_sum_kernel, (unsigned)ceil_div(n, 256), 256, 0, stream, out, pieces, num_pieces, n);
    CUDA_CHECK(cudaGetLastError());
#endif
}

static void loss_accumulate(double* sums, const float* losses, const int* targets, size_t n, cudaStream_t stream)
{
    ON_CPU(loss_accumulate_cpu(sums, losses, targets, n));
#ifndef DEVICE_CPU
    LAUNCH(loss_accumulate_kernel, 1, 256, 0, stream, sums, losses, targets, n);
    CUDA_CHECK(cudaGetLastError());
#endif
}

#ifdef OP_TESTS

static void accumulate_test(OpRun* run)
{
    const size_t n = (size_t)run->dims[0];
    OpTensor<float> out = op_inout<float>(run, "out", n, 0.0, 1.0), inp = op_input<float>(run, "inp", n, 0.0, 1.0);
    OP_RUN(run, 12.0 * n, 0, accumulate(out.dev, inp.dev, n, 0));
    for (size_t i = 0; i < n; i++) out.f64[i] += inp.f64[i];
    op_check_exact(run, out);
}

static void pieces_sum_test(OpRun* run)
{
    const size_t n = (size_t)run->dims[0], num_pieces = (size_t)run->dims[1];
    OpTensor<float> out = op_output<float>(run, "out", n);
    OpTensor<float> pieces = op_input<float>(run, "pieces", n * num_pieces, 0.0, 1.0);
    OP_RUN(run, 4.0 * n * (num_pieces + 1), 0, pieces_sum(out.dev, pieces.dev, (int)num_pieces, n, 0));
    for (size_t i = 0; i < n; i++) {
        float sum = pieces.f32[i];
        for (size_t k = 1; k < num_pieces; k++) sum += pieces.f32[k * n + i];
        out.f64[i] = sum;
    }
    op_check_exact(run, out);
}

static void loss_accumulate_test(OpRun* run)
{
    const int rows = run->dims[0];
    OpTensor<float> losses = op_input<float>(run, "losses", rows, 3.0, 1.0);
    OpInts targets = op_ints(run, "targets", rows, -8, 64);
    double truth[2] = {7.0, 2.5};
    double* sums = (double*)op_bytes(run, "sums", OpKind::INOUT, truth, sizeof truth);
    OP_RUN(run, 8.0 * rows, 0, loss_accumulate(sums, losses.dev, targets.dev, rows, 0));
    for (int row = 0; row < rows; row++) {
        truth[0] += targets.h[row] >= 0;
        truth[1] += targets.h[row] >= 0 ? losses.f64[row] : 0.0;
    }
    const double* ours = (const double*)op_result(run, "sums");
    op_check_value(run, "num_tokens", ours[0], truth[0], 0.0);
    op_check_value(run, "sum_losses", ours[1], truth[1], 1e-12 * truth[1]);
}

static const OpTest accumulate_tests[] = {
    {"accumulate", accumulate_test, {1}, OpWhen::ALWAYS},
    {"accumulate", accumulate_test, {4099}, OpWhen::ALWAYS},
    {"pieces_sum", pieces_sum_test, {1, 1}, OpWhen::ALWAYS},
    {"pieces_sum", pieces_sum_test, {1037, 5}, OpWhen::ALWAYS},
    {"loss_accumulate", loss_accumulate_test, {1}, OpWhen::ALWAYS},
    {"loss_accumulate", loss_accumulate_test, {5000}, OpWhen::ALWAYS},
    {"accumulate", accumulate_test, {124 * 1000 * 1000}, OpWhen::BENCH},
};

#endif
