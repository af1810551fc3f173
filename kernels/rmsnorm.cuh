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

/* P is the type of the weights. */
template <class P> static void rmsnorm_row_cpu(floatX* out, float* rstd, const floatX* x, const P* weight, int C,
                                               float eps)
{
    float sum_squares = 0.0f;
    #pragma omp simd reduction(+:sum_squares)
    for (int c = 0; c < C; c++) sum_squares += load_f(x[c]) * load_f(x[c]);
    const float r = 1.0f / sqrtf(sum_squares / (float)C + eps);
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
#include "optest.h"

template <class R> static void rmsnorm_forward_ref(R* out, R* rstd, const R* inp, const R* weight, int N, int C, R eps)
{
    for (int n = 0; n < N; n++) {
        const R* x = inp + (size_t)n * C;
        R sum_squares = 0;
        for (int c = 0; c < C; c++) sum_squares += x[c] * x[c];
        rstd[n] = 1 / std::sqrt(sum_squares / C + eps);
        for (int c = 0; c < C; c++) out[(size_t)n * C + c] = x[c] * rstd[n] * weight[c];
    }
}

template <class R> static void rmsnorm_backward_ref(R* dinp, R* dweight, const R* dout, const R* inp, const R* weight,
                                                    const R* rstd, int N, int C)
{
    for (int n = 0; n < N; n++) {
        const R *x = inp + (size_t)n * C, *dy = dout + (size_t)n * C;
        R sum = 0;
        for (int c = 0; c < C; c++) sum += dy[c] * weight[c] * (x[c] * rstd[n]);
        for (int c = 0; c < C; c++) {
            const R xhat = x[c] * rstd[n];
            dinp[(size_t)n * C + c] += rstd[n] * (dy[c] * weight[c] - xhat * (sum / C));
            dweight[c] += dy[c] * xhat;
        }
    }
}

static const float RMSNORM_TEST_EPS = 1e-5f;

template <class P> static void rmsnorm_forward_test(OpRun* run)
{
    const int N = run->dims[0], C = run->dims[1];
    const float eps = RMSNORM_TEST_EPS;
    OpTensor<floatX> inp = op_input<floatX>(run, "inp", (size_t)N * C, 0.5, 2.0);
    OpTensor<P> weight = op_input<P>(run, "weight", C, 1.0, 0.3);
    OpTensor<floatX> out = op_output<floatX>(run, "out", (size_t)N * C);
    OpTensor<float> rstd = op_output<float>(run, "rstd", N);
    OP_RUN(run, 2.0 * N * C * sizeof(floatX), 0,
           rmsnorm_forward(out.dev, rstd.dev, inp.dev, weight.dev, N, C, eps, 0));
    rmsnorm_forward_ref(out.f64, rstd.f64, inp.f64, weight.f64, N, C, (double)eps);
    rmsnorm_forward_ref(out.f32, rstd.f32, inp.f32, weight.f32, N, C, eps);
    op_check(run, out);
    op_check_relative(run, rstd);
}

/* residual is checked to be the rounded sum, and lies on a as in the model. */
template <class P> static void residual_rmsnorm_forward_test(OpRun* run)
{
    const int N = run->dims[0], C = run->dims[1];
    const size_t n = (size_t)N * C;
    const float eps = RMSNORM_TEST_EPS;
    OpTensor<floatX> residual = op_inout<floatX>(run, "residual", n, 0.5, 2.0);
    OpTensor<floatX> b = op_input<floatX>(run, "b", n, 0.0, 1.0);
    OpTensor<P> weight = op_input<P>(run, "weight", C, 1.0, 0.3);
    OpTensor<floatX> out = op_output<floatX>(run, "out", n);
    OpTensor<float> rstd = op_output<float>(run, "rstd", N);
    OP_RUN(run, 4.0 * n * sizeof(floatX), 0,
           residual_rmsnorm_forward(residual.dev, out.dev, rstd.dev, residual.dev, b.dev, weight.dev, N, C, eps, 0));
    for (size_t i = 0; i < n; i++)
        residual.f64[i] = residual.f32[i] = op_round(residual.f32[i] + b.f32[i], (const floatX*)nullptr);
    rmsnorm_forward_ref(out.f64, rstd.f64, residual.f64, weight.f64, N, C, (double)eps);
    rmsnorm_forward_ref(out.f32, rstd.f32, residual.f32, weight.f32, N, C, eps);
    op_check_exact(run, residual);
    op_check(run, out);
    op_check_relative(run, rstd);
}

template <class P> static void rmsnorm_backward_test(OpRun* run)
{
    const int N = run->dims[0], C = run->dims[1];
    const size_t n = (size_t)N * C;
    OpTensor<floatX> dout = op_input<floatX>(run, "dout", n, 0.0, 1.0);
    OpTensor<floatX> inp = op_input<floatX>(run, "inp", n, 0.5, 2.0);
    OpTensor<P> weight = op_input<P>(run, "weight", C, 1.0, 0.3);
    OpTensor<float> rstd = op_input<float>(run, "rstd", N, 0.5, 0.02);
    OpTensor<floatX> dinp = op_inout<floatX>(run, "dinp", n, 0.0, 1.0);
    OpTensor<float> dweight = op_inout<float>(run, "dweight", C, 0.0, 1.0);
    float* scratch = op_scratch<float>(run, rmsnorm_scratch_elems(C));
    OP_RUN(run, 4.0 * n * sizeof(floatX), 0,
           rmsnorm_backward(dinp.dev, dweight.dev, scratch, dout.dev, inp.dev, weight.dev, rstd.dev, N, C, 0));
    rmsnorm_backward_ref(dinp.f64, dweight.f64, dout.f64, inp.f64, weight.f64, rstd.f64, N, C);
    rmsnorm_backward_ref(dinp.f32, dweight.f32, dout.f32, inp.f32, weight.f32, rstd.f32, N, C);
    op_check(run, dinp);
    op_check_terms(run, dweight, op_largest(dout.f64, n));
}

/* The reference itself: with the forward's own rstd its gradients are the slopes of the forward. */
static void rmsnorm_slope_test(OpRun* run)
{
    const int N = run->dims[0], C = run->dims[1];
    const size_t n = (size_t)N * C;
    OpTensor<floatX> dout = op_input<floatX>(run, "dout", n, 0.0, 1.0);
    OpTensor<floatX> inp = op_input<floatX>(run, "inp", n, 0.5, 2.0);
    OpTensor<floatX> weight = op_input<floatX>(run, "weight", C, 1.0, 0.3);
    OpTensor<floatX> dinp = op_inout<floatX>(run, "dinp", n, 0.0, 1.0);
    OpTensor<float> dweight = op_inout<float>(run, "dweight", C, 0.0, 1.0);
    double *out = op_host(run, n), *rstd = op_host(run, N);
    const double eps = RMSNORM_TEST_EPS;
    rmsnorm_forward_ref(out, rstd, inp.f64, weight.f64, N, C, eps);
    rmsnorm_backward_ref(dinp.f64, dweight.f64, dout.f64, inp.f64, weight.f64, rstd, N, C);
#define RMSNORM_OBJECTIVE (rmsnorm_forward_ref(out, rstd, inp.f64, weight.f64, N, C, eps), op_dot(out, dout.f64, n))
    OP_CHECK_GRAD(run, dinp, inp, RMSNORM_OBJECTIVE);
    OP_CHECK_GRAD(run, dweight, weight, RMSNORM_OBJECTIVE);
#undef RMSNORM_OBJECTIVE
}

static const OpTest rmsnorm_tests[] = {
    {"rmsnorm_forward", rmsnorm_forward_test<floatX>, {1, 1}, OpWhen::ALWAYS},
    {"rmsnorm_forward", rmsnorm_forward_test<floatX>, {1, 768}, OpWhen::ALWAYS},
    {"rmsnorm_forward", rmsnorm_forward_test<floatX>, {37, 129}, OpWhen::ALWAYS},
    {"rmsnorm_forward", rmsnorm_forward_test<floatX>, {9, 4}, OpWhen::ALWAYS},
    {"rmsnorm_forward", rmsnorm_forward_test<floatX>, {1000, 2048}, OpWhen::LARGE},
    {"rmsnorm_forward", rmsnorm_forward_test<floatX>, {3, 20000}, OpWhen::LARGE},
    {"residual_rmsnorm_forward", residual_rmsnorm_forward_test<floatX>, {1, 3}, OpWhen::ALWAYS},
    {"residual_rmsnorm_forward", residual_rmsnorm_forward_test<floatX>, {13, 256}, OpWhen::ALWAYS},
    {"residual_rmsnorm_forward", residual_rmsnorm_forward_test<floatX>, {11, 77}, OpWhen::ALWAYS},
    {"residual_rmsnorm_forward", residual_rmsnorm_forward_test<floatX>, {1000, 2048}, OpWhen::LARGE},
    {"rmsnorm_backward", rmsnorm_backward_test<floatX>, {1, 1}, OpWhen::ALWAYS},
    {"rmsnorm_backward", rmsnorm_backward_test<floatX>, {1, 768}, OpWhen::ALWAYS},
    {"rmsnorm_backward", rmsnorm_backward_test<floatX>, {67, 129}, OpWhen::ALWAYS},
    {"rmsnorm_backward", rmsnorm_backward_test<floatX>, {70, 2056}, OpWhen::ALWAYS},
    {"rmsnorm_backward", rmsnorm_backward_test<floatX>, {5, 1031}, OpWhen::ALWAYS},
    {"rmsnorm_backward", rmsnorm_backward_test<floatX>, {2048, 768}, OpWhen::LARGE},
    {"rmsnorm_backward", rmsnorm_backward_test<floatX>, {600, 20000}, OpWhen::LARGE},
#ifndef PREC_FP32
    {"rmsnorm_forward, fp32 weight", rmsnorm_forward_test<float>, {37, 129}, OpWhen::ALWAYS},
    {"rmsnorm_forward, fp32 weight", rmsnorm_forward_test<float>, {9, 768}, OpWhen::ALWAYS},
    {"residual_rmsnorm_forward, fp32 weight", residual_rmsnorm_forward_test<float>, {13, 256}, OpWhen::ALWAYS},
    {"rmsnorm_backward, fp32 weight", rmsnorm_backward_test<float>, {67, 129}, OpWhen::ALWAYS},
    {"rmsnorm_backward, fp32 weight", rmsnorm_backward_test<float>, {70, 2056}, OpWhen::ALWAYS},
#endif
    {"rmsnorm_slope", rmsnorm_slope_test, {3, 5}, OpWhen::ALWAYS},
    {"rmsnorm_slope", rmsnorm_slope_test, {4, 64}, OpWhen::ALWAYS},
    {"rmsnorm_forward", rmsnorm_forward_test<floatX>, {16384, 2048}, OpWhen::BENCH},
    {"residual_rmsnorm_forward", residual_rmsnorm_forward_test<floatX>, {16384, 2048}, OpWhen::BENCH},
    {"rmsnorm_backward", rmsnorm_backward_test<floatX>, {16384, 2048}, OpWhen::BENCH},
};

#endif
