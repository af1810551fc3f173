/* accumulate.cuh: the losses of a step.
 *   loss_accumulate  sums[0] += number of targets >= 0,  sums[1] += sum of their losses
 * shapes  losses (n) fp32; targets (n) int; sums (2) double
 * writes  sums +=
 * needs   any n
 * exact   fixed order: same bits on every run
 * cost    8*n bytes in one block: n is a micro-batch's rows */
#pragma once
#include "profile.h"

#ifdef DEVICE_CPU
static void loss_accumulate_cpu(double* sums, const float* losses, const int* targets, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (targets[i] < 0) continue;
        sums[0] += 1;
        sums[1] += losses[i];
    }
}
#else
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

static void loss_accumulate(double* sums, const float* losses, const int* targets, size_t n, cudaStream_t stream)
{
    OP(stream, 0, 8.0 * n, n);
    ON_CPU(loss_accumulate_cpu(sums, losses, targets, n));
#ifndef DEVICE_CPU
    LAUNCH(loss_accumulate_kernel, 1, 256, 0, stream, sums, losses, targets, n);
    CUDA_CHECK(cudaGetLastError());
#endif
}

#ifdef OP_TESTS
#include "optest.h"

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
    {"loss_accumulate", loss_accumulate_test, {1}, OpWhen::ALWAYS},
    {"loss_accumulate", loss_accumulate_test, {5000}, OpWhen::ALWAYS},
};

#endif
