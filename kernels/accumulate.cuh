/* accumulate.cuh: the two plain sums of a step.
 *   accumulate       out += inp
 *   loss_accumulate  sums[0] += number of targets >= 0,  sums[1] += sum of their losses
 * shapes  out inp (n) fp32; losses (n) fp32; targets (n) int; sums (2) double
 * writes  out +=; sums +=
 * needs   any n
 * exact   fixed order: same bits on every run
 * cost    accumulate 12*n bytes; loss_accumulate 8*n bytes in one block: n is a micro-batch's rows */
#pragma once
#include "common.cuh"

#ifdef DEVICE_CPU
static void accumulate_cpu(float* out, const float* inp, size_t n)
{
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) out[i] += inp[i];
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
__global__ void accumulate_kernel(float* out, const float* inp, size_t n)
{
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i < n) out[i] += inp[i];
}

/* One block: thread k sums k, k + 256, ...; then a tree over the threads. */
__global__ void loss_accumulate_kernel(double* sums, const float* losses, const int* targets, size_t n)
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

static void loss_accumulate(double* sums, const float* losses, const int* targets, size_t n, cudaStream_t stream)
{
    ON_CPU(loss_accumulate_cpu(sums, losses, targets, n));
#ifndef DEVICE_CPU
    LAUNCH(loss_accumulate_kernel, 1, 256, 0, stream, sums, losses, targets, n);
    CUDA_CHECK(cudaGetLastError());
#endif
}
