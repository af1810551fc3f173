/* layernorm.cuh: each row to mean 0 and variance 1, then scaled and shifted; optionally of the sum of two tensors.
 *   out  = xhat * weight + bias               xhat = (inp - mean) * rstd, rstd = 1/sqrt(mean_c((inp - mean)^2) + eps)
 *   residual = a + b, and out as above with inp = residual
 *   dinp += rstd * (g - mean_c(g) - xhat * mean_c(g * xhat))                 g = dout * weight
 *   dweight += sum_n(dout * xhat)   dbias += sum_n(dout)
 * shapes  inp out dout dinp a b residual (N,C) floatX; weight bias (C) floatX or fp32; mean rstd (N) fp32;
 *         dweight dbias (C) fp32; scratch (layernorm_scratch_elems(C)) fp32
 * writes  forward out =, mean =, rstd =, residual = (may be a or b); backward dinp +=, dweight +=, dbias +=
 * needs   any N, C >= 1; on a GPU rows of whole 16-byte vectors are faster
 * exact   fixed reduction order: same bits on every run and for any number of CPU threads. residual is rounded to
 *         floatX before its mean is taken, so the backward sees the very numbers of the forward.
 * cost    forward 2*N*C*s bytes (with residual 4*N*C*s), backward 4*N*C*s, judged against memory bandwidth
 * source  Ba, Kiros & Hinton 2016, arXiv:1607.06450. The backward on a GPU is in norm.cuh, shared with RMSNorm. */
#pragma once
#include "norm.cuh"

#ifdef DEVICE_CPU

/* P is the type of weight and bias. */
template <class P> static void layernorm_row_cpu(floatX* out, float* mean, float* rstd, const floatX* x,
                                                 const P* weight, const P* bias, int C, float eps)
{
    float sum = 0.0f, sum_squares = 0.0f;
    #pragma omp simd reduction(+:sum)
    for (int c = 0; c < C; c++) sum += load_f(x[c]);
    const float m = sum / (float)C;
    #pragma omp simd reduction(+:sum_squares)
    for (int c = 0; c < C; c++) sum_squares += (load_f(x[c]) - m) * (load_f(x[c]) - m);
    const float r = 1.0f / sqrtf(sum_squares / (float)C + eps);
    #pragma omp simd
    for (int c = 0; c < C; c++) store_f(out + c, (load_f(x[c]) - m) * r * load_f(weight[c]) + load_f(bias[c]));
    *mean = m;
    *rstd = r;
}

template <class P> static void layernorm_forward_cpu(floatX* out, float* mean, float* rstd, const floatX* inp,
                                                     const P* weight, const P* bias, int N, int C, float eps)
{
    #pragma omp parallel for
    for (int n = 0; n < N; n++)
        layernorm_row_cpu(out + (size_t)n * C, mean + n, rstd + n, inp + (size_t)n * C, weight, bias, C, eps);
}

template <class P> static void residual_layernorm_forward_cpu(floatX* residual, floatX* out, float* mean, float* rstd,
                                                              const floatX* a, const floatX* b, const P* weight,
                                                              const P* bias, int N, int C, float eps)
{
    #pragma omp parallel for
    for (int n = 0; n < N; n++) {
        floatX* row = residual + (size_t)n * C;
        norm_residual_row_cpu(row, a + (size_t)n * C, b + (size_t)n * C, C);
        layernorm_row_cpu(out + (size_t)n * C, mean + n, rstd + n, row, weight, bias, C, eps);
    }
}

/* dweight and dbias here are the part's own. */
template <class P> static void layernorm_backward_row_cpu(floatX* dinp, float* dweight, float* dbias,
                                                          const floatX* dout, const floatX* x, const P* weight,
                                                          float mean, float rstd, int C)
{
    float sum_g = 0.0f, sum_g_xhat = 0.0f;
    #pragma omp simd reduction(+:sum_g, sum_g_xhat)
    for (int c = 0; c < C; c++) {
        const float g = load_f(dout[c]) * load_f(weight[c]);
        sum_g += g;
        sum_g_xhat += g * ((load_f(x[c]) - mean) * rstd);
    }
    const float mean_g = sum_g / (float)C, mean_g_xhat = sum_g_xhat / (float)C;
    #pragma omp simd
    for (int c = 0; c < C; c++) {
        const float xhat = (load_f(x[c]) - mean) * rstd, dy = load_f(dout[c]);
        store_f(dinp + c, load_f(dinp[c]) + rstd * (dy * load_f(weight[c]) - mean_g - xhat * mean_g_xhat));
        dweight[c] += dy * xhat;
        dbias[c] += dy;
    }
}

template <class P> static void layernorm_backward_cpu(floatX* dinp, float* dweight, float* dbias, float* scratch,
                                                      const floatX* dout, const floatX* inp, const P* weight,
                                                      const float* mean, const float* rstd, int N, int C)
{
    norm_backward_cpu(dweight, dbias, scratch, N, C, [=](size_t n, float* part_dweight, float* part_dbias) {
        layernorm_backward_row_cpu(dinp + n * C, part_dweight, part_dbias, dout + n * C, inp + n * C, weight, mean[n],
                                   rstd[n], C);
    });
}

#else

/* A warp a row. The row is read three times, the second and third time from the L1 cache. Without RESIDUAL a is the
 * input, and b and residual are not touched. */
template <bool RESIDUAL, int W, class P> static __global__ void __launch_bounds__(NORM_BLOCK)
layernorm_forward_kernel(floatX* residual, floatX* out, float* mean, float* rstd, const floatX* a, const floatX* b,
                         const P* weight, const P* bias, int N, int C, float eps)
{
    const size_t n = (size_t)blockIdx.x * (NORM_BLOCK / 32) + threadIdx.x / 32;
    if (n >= (size_t)N) return;
    const int first = threadIdx.x % 32 * W;
    const floatX* row = (RESIDUAL ? residual : a) + n * C;
    float x[W], y[W], z[W], sum = 0.0f, sum_squares = 0.0f;
    for (int c = first; c < C; c += 32 * W) {
        norm_input<RESIDUAL>(x, residual + n * C + c, a + n * C + c, b + n * C + c);
#pragma unroll
        for (int k = 0; k < W; k++) sum += x[k];
    }
    const float m = warp_sum(sum) / (float)C;
    for (int c = first; c < C; c += 32 * W) {
        load_vec(x, row + c);
#pragma unroll
        for (int k = 0; k < W; k++) sum_squares += (x[k] - m) * (x[k] - m);
    }
    const float r = 1.0f / sqrtf(warp_sum(sum_squares) / (float)C + eps);
    for (int c = first; c < C; c += 32 * W) {
        load_vec(x, row + c);
        load_vec(y, weight + c);
        load_vec(z, bias + c);
#pragma unroll
        for (int k = 0; k < W; k++) x[k] = (x[k] - m) * r * y[k] + z[k];
        store_vec(out + n * C + c, x);
    }
    if (first == 0) {
        mean[n] = m;
        rstd[n] = r;
    }
}

template <bool RESIDUAL, class P> static void layernorm_forward_launch(floatX* residual, floatX* out, float* mean,
                                                                       float* rstd, const floatX* a, const floatX* b,
                                                                       const P* weight, const P* bias, int N, int C,
                                                                       float eps, cudaStream_t stream)
{
    const unsigned grid = (unsigned)ceil_div(N, NORM_BLOCK / 32);
    if (is_vec(a, C) && is_vec(b, C) && is_vec(residual, C) && is_vec(out, C) && is_vec(weight, C) && is_vec(bias, C))
        LAUNCH((layernorm_forward_kernel<RESIDUAL, VEC, P>), grid, NORM_BLOCK, 0, stream, residual, out, mean,
               rstd, a, b, weight, bias, N, C, eps);
    else
        LAUNCH((layernorm_forward_kernel<RESIDUAL, 1, P>), grid, NORM_BLOCK, 0, stream, residual, out, mean, rstd,
               a, b, weight, bias, N, C, eps);
    CUDA_CHECK(cudaGetLastError());
}

#endif

template <class P> static void layernorm_forward(floatX* out, float* mean, float* rstd, const floatX* inp,
                                                 const P* weight, const P* bias, int N, int C, float eps,
                                                 cudaStream_t stream)
{
    OP(stream, 0, 2.0 * N * C * sizeof(floatX), N, C);
    ON_CPU(layernorm_forward_cpu(out, mean, rstd, inp, weight, bias, N, C, eps));
#ifndef DEVICE_CPU
    layernorm_forward_launch<false>(out, out, mean, rstd, inp, inp, weight, bias, N, C, eps, stream);
#endif
}

template <class P> static void residual_layernorm_forward(floatX* residual, floatX* out, float* mean, float* rstd,
                                                          const floatX* a, const floatX* b, const P* weight,
                                                          const P* bias, int N, int C, float eps,
                                                          cudaStream_t stream)
{
    OP(stream, 0, 4.0 * N * C * sizeof(floatX), N, C);
    ON_CPU(residual_layernorm_forward_cpu(residual, out, mean, rstd, a, b, weight, bias, N, C, eps));
#ifndef DEVICE_CPU
    layernorm_forward_launch<true>(residual, out, mean, rstd, a, b, weight, bias, N, C, eps, stream);
#endif
}

static size_t layernorm_scratch_elems(int C) { return (size_t)NORM_PARTS * 2 * C; }

template <class P> static void layernorm_backward(floatX* dinp, float* dweight, float* dbias, float* scratch,
                                                  const floatX* dout, const floatX* inp, const P* weight,
                                                  const float* mean, const float* rstd, int N, int C,
                                                  cudaStream_t stream)
{
    OP(stream, 0, 4.0 * N * C * sizeof(floatX), N, C);
    ON_CPU(layernorm_backward_cpu(dinp, dweight, dbias, scratch, dout, inp, weight, mean, rstd, N, C));
#ifndef DEVICE_CPU
    constexpr int W = sizeof(P) > sizeof(floatX) ? 4 : VEC;   // fp32 weights beside 16 bits: 8 of each would spill
    norm_backward_launch<true, W>(dweight, dbias, dinp, scratch, dout, inp, weight, mean, rstd, N, C, stream);
#endif
}

#ifdef OP_TESTS
#include "norm_tests.h"

/* As norm_tests.h calls them; residual null: out is the norm of a. */
struct LayerNormOps {
    static constexpr bool CENTERED = true;
    static size_t scratch_elems(int C) { return layernorm_scratch_elems(C); }
    template <class P> static void forward(floatX* residual, floatX* out, float* mean, float* rstd, const floatX* a,
                                           const floatX* b, const P* weight, const P* bias, int N, int C, float eps)
    {
        if (residual == nullptr) layernorm_forward(out, mean, rstd, a, weight, bias, N, C, eps, 0);
        else residual_layernorm_forward(residual, out, mean, rstd, a, b, weight, bias, N, C, eps, 0);
    }
    template <class P> static void backward(floatX* dinp, float* dweight, float* dbias, float* scratch,
                                            const floatX* dout, const floatX* inp, const P* weight, const float* mean,
                                            const float* rstd, int N, int C)
    {
        layernorm_backward(dinp, dweight, dbias, scratch, dout, inp, weight, mean, rstd, N, C, 0);
    }
};

static const OpTest layernorm_tests[] = {NORM_TESTS("layernorm", LayerNormOps)};

#endif
