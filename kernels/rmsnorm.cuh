/* rmsnorm.cuh: each row to unit root mean square, then scaled; optionally of the sum of two tensors.
 *   out  = inp * rstd * weight                rstd = 1/sqrt(mean_c(inp^2) + eps)
 *   residual = a + b, and out as above with inp = residual
 *   dinp += rstd * (g - xhat * mean_c(g * xhat))      g = dout * weight, xhat = inp * rstd
 *   dweight += sum_n(dout * xhat)
 * shapes  inp out dout dinp a b residual (N,C) floatX; weight (C) floatX or fp32; rstd (N) fp32; dweight (C) fp32;
 *         scratch (rmsnorm_scratch_elems(C)) fp32
 * writes  forward out =, rstd =, residual = (may be a or b); backward dinp +=, dweight +=
 * needs   any N, C >= 1; on a GPU rows of whole 16-byte vectors are faster
 * exact   fixed reduction order: same bits on every run and for any number of CPU threads. residual is rounded to
 *         floatX before its norm is taken.
 * cost    forward 2*N*C*s bytes (with residual 4*N*C*s), backward 4*N*C*s, judged against memory bandwidth
 * source  Zhang & Sennrich 2019, arXiv:1910.07467. The backward on a GPU is in norm.cuh, shared with LayerNorm. */
#pragma once
#include "norm.cuh"

#ifdef DEVICE_CPU

static float rmsnorm_rstd_cpu(const floatX* x, int C, float eps)
{
    float sum_squares = 0.0f;
    #pragma omp simd reduction(+:sum_squares)
    for (int c = 0; c < C; c++) sum_squares += load_f(x[c]) * load_f(x[c]);
    return 1.0f / sqrtf(sum_squares / (float)C + eps);
}

/* P is the type of the weights. */
template <class P> static void rmsnorm_row_cpu(floatX* out, float* rstd, const floatX* x, const P* weight, int C,
                                               float eps)
{
    const float r = rmsnorm_rstd_cpu(x, C, eps);
    #pragma omp simd
    for (int c = 0; c < C; c++) store_f(out + c, load_f(x[c]) * r * load_f(weight[c]));
    *rstd = r;
}

template <class P> static void rmsnorm_forward_cpu(floatX* out, float* rstd, const floatX* inp, const P* weight, int N,
                                                   int C, float eps)
{
    #pragma omp parallel for
    for (int n = 0; n < N; n++) rmsnorm_row_cpu(out + (size_t)n * C, rstd + n, inp + (size_t)n * C, weight, C, eps);
}

template <class P> static void residual_rmsnorm_forward_cpu(floatX* residual, floatX* out, float* rstd,
                                                            const floatX* a, const floatX* b, const P* weight, int N,
                                                            int C, float eps)
{
    #pragma omp parallel for
    for (int n = 0; n < N; n++) {
        floatX* row = residual + (size_t)n * C;
        norm_residual_row_cpu(row, a + (size_t)n * C, b + (size_t)n * C, C);
        rmsnorm_row_cpu(out + (size_t)n * C, rstd + n, row, weight, C, eps);
    }
}

/* dweight here is the part's own. */
template <class P> static void rmsnorm_backward_row_cpu(floatX* dinp, float* dweight, const floatX* dout,
                                                        const floatX* x, const P* weight, float rstd, int C)
{
    float sum = 0.0f;
    #pragma omp simd reduction(+:sum)
    for (int c = 0; c < C; c++) sum += load_f(dout[c]) * load_f(weight[c]) * (load_f(x[c]) * rstd);
    const float mean = sum / (float)C;
    #pragma omp simd
    for (int c = 0; c < C; c++) {
        const float dy = load_f(dout[c]), xhat = load_f(x[c]) * rstd;
        store_f(dinp + c, load_f(dinp[c]) + rstd * (dy * load_f(weight[c]) - xhat * mean));
        dweight[c] += dy * xhat;
    }
}

template <class P> static void rmsnorm_backward_cpu(floatX* dinp, float* dweight, float* scratch, const floatX* dout,
                                                    const floatX* inp, const P* weight, const float* rstd, int N,
                                                    int C)
{
    norm_backward_cpu(dweight, nullptr, scratch, N, C, [=](size_t n, float* part_dweight, float*) {
        rmsnorm_backward_row_cpu(dinp + n * C, part_dweight, dout + n * C, inp + n * C, weight, rstd[n], C);
    });
}

#else

/* A warp a row. The row is read twice, the second time from the L1 cache. Without RESIDUAL a is the input, and b and
 * residual are not touched. */
template <bool RESIDUAL, int W, class P> static __global__ void __launch_bounds__(NORM_BLOCK)
rmsnorm_forward_kernel(floatX* residual, floatX* out, float* rstd, const floatX* a, const floatX* b, const P* weight,
                       int N, int C, float eps)
{
    const size_t n = (size_t)blockIdx.x * (NORM_BLOCK / 32) + threadIdx.x / 32;
    if (n >= (size_t)N) return;
    const int first = threadIdx.x % 32 * W;
    const floatX* row = (RESIDUAL ? residual : a) + n * C;
    float x[W], y[W], sum_squares = 0.0f;
    for (int c = first; c < C; c += 32 * W) {
        norm_input<RESIDUAL>(x, residual + n * C + c, a + n * C + c, b + n * C + c);
#pragma unroll
        for (int k = 0; k < W; k++) sum_squares += x[k] * x[k];
    }
    const float r = 1.0f / sqrtf(warp_sum(sum_squares) / (float)C + eps);
    for (int c = first; c < C; c += 32 * W) {
        load_vec(x, row + c);
        load_vec(y, weight + c);
#pragma unroll
        for (int k = 0; k < W; k++) x[k] = x[k] * r * y[k];
        store_vec(out + n * C + c, x);
    }
    if (first == 0) rstd[n] = r;
}

template <bool RESIDUAL, class P> static void rmsnorm_forward_launch(floatX* residual, floatX* out, float* rstd,
                                                                     const floatX* a, const floatX* b, const P* weight,
                                                                     int N, int C, float eps, cudaStream_t stream)
{
    const unsigned grid = (unsigned)ceil_div(N, NORM_BLOCK / 32);
    if (is_vec(a, C) && is_vec(b, C) && is_vec(residual, C) && is_vec(out, C) && is_vec(weight, C))
        LAUNCH((rmsnorm_forward_kernel<RESIDUAL, VEC, P>), grid, NORM_BLOCK, 0, stream, residual, out, rstd, a, b,
               weight, N, C, eps);
    else
        LAUNCH((rmsnorm_forward_kernel<RESIDUAL, 1, P>), grid, NORM_BLOCK, 0, stream, residual, out, rstd, a, b,
               weight, N, C, eps);
    CUDA_CHECK(cudaGetLastError());
}

#endif

template <class P> static void rmsnorm_forward(floatX* out, float* rstd, const floatX* inp, const P* weight, int N,
                                               int C, float eps, cudaStream_t stream)
{
    OP(stream, 0, 2.0 * N * C * sizeof(floatX), N, C);
    ON_CPU(rmsnorm_forward_cpu(out, rstd, inp, weight, N, C, eps));
#ifndef DEVICE_CPU
    rmsnorm_forward_launch<false>(out, out, rstd, inp, inp, weight, N, C, eps, stream);
#endif
}

template <class P> static void residual_rmsnorm_forward(floatX* residual, floatX* out, float* rstd, const floatX* a,
                                                        const floatX* b, const P* weight, int N, int C, float eps,
                                                        cudaStream_t stream)
{
    OP(stream, 0, 4.0 * N * C * sizeof(floatX), N, C);
    ON_CPU(residual_rmsnorm_forward_cpu(residual, out, rstd, a, b, weight, N, C, eps));
#ifndef DEVICE_CPU
    rmsnorm_forward_launch<true>(residual, out, rstd, a, b, weight, N, C, eps, stream);
#endif
}

static size_t rmsnorm_scratch_elems(int C) { return (size_t)NORM_PARTS * C; }

template <class P> static void rmsnorm_backward(floatX* dinp, float* dweight, float* scratch, const floatX* dout,
                                                const floatX* inp, const P* weight, const float* rstd, int N, int C,
                                                cudaStream_t stream)
{
    OP(stream, 0, 4.0 * N * C * sizeof(floatX), N, C);
    ON_CPU(rmsnorm_backward_cpu(dinp, dweight, scratch, dout, inp, weight, rstd, N, C));
#ifndef DEVICE_CPU
    norm_backward_launch<false, VEC>(dweight, nullptr, dinp, scratch, dout, inp, weight, nullptr, rstd, N, C, stream);
#endif
}

#ifdef OP_TESTS
#include "norm_tests.h"

/* As norm_tests.h calls them; residual null: out is the norm of a. */
struct RmsNormOps {
    static constexpr bool CENTERED = false;
    static size_t scratch_elems(int C) { return rmsnorm_scratch_elems(C); }
    template <class P> static void forward(floatX* residual, floatX* out, float*, float* rstd, const floatX* a,
                                           const floatX* b, const P* weight, const P*, int N, int C, float eps)
    {
        if (residual == nullptr) rmsnorm_forward(out, rstd, a, weight, N, C, eps, 0);
        else residual_rmsnorm_forward(residual, out, rstd, a, b, weight, N, C, eps, 0);
    }
    template <class P> static void backward(floatX* dinp, float* dweight, float*, float* scratch, const floatX* dout,
                                            const floatX* inp, const P* weight, const float*, const float* rstd, int N,
                                            int C)
    {
        rmsnorm_backward(dinp, dweight, scratch, dout, inp, weight, rstd, N, C, 0);
    }
};

static const OpTest rmsnorm_tests[] = {NORM_TESTS("rmsnorm", RmsNormOps)};

#endif
