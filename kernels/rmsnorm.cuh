/* rmsnorm.cuh: each row to unit root mean square, then scaled; optionally of the sum of two tensors.
 *   out  = inp * rstd * weight                rstd = 1/sqrt(mean_c(inp^2) + eps)
 *   residual = a + b, and out as above with inp = residual
 *   dinp += rstd * (g - xhat * mean_c(g * xhat))      g = dout * weight, xhat = inp * rstd
 *   dweight += sum_n(dout * xhat)
 * shapes  inp out dout dinp a b residual (N,C) floatX; weight (C) floatX or fp32; rstd (N) fp32; dweight (C) fp32;
 *         scratch (rmsnorm_scratch_elems(C)) fp32
 * writes  forward out =, rstd =, residual = (may be a or b); backward dinp +=, dweight +=
 * needs   any N, C >= 1; on a GPU rows of whole 16-byte vectors are faster
 * exact   fixed reduction order: same bits on every run and for any number of CPU threads. As in layernorm.cuh the rows
 *         are cut into at most RMSNORM_PARTS runs, each sums its dweight into scratch, and the runs are added in order;
 *         residual is rounded to floatX before its norm is taken.
 * cost    forward 2*N*C*s bytes (with residual 4*N*C*s), backward 4*N*C*s, judged against memory bandwidth
 * source  Zhang & Sennrich 2019, arXiv:1910.07467 */
#pragma once
#include "vec.cuh"

#ifdef DEVICE_CPU

static constexpr int RMSNORM_PARTS = 64;

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
        const floatX *a_row = a + (size_t)n * C, *b_row = b + (size_t)n * C;
        #pragma omp simd
        for (int c = 0; c < C; c++) store_f(row + c, load_f(a_row[c]) + load_f(b_row[c]));
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
    const int num_parts = N < RMSNORM_PARTS ? N : RMSNORM_PARTS;
    #pragma omp parallel for
    for (int part = 0; part < num_parts; part++) {
        float* part_dweight = scratch + (size_t)part * C;
        memset(part_dweight, 0, (size_t)C * sizeof(float));
        const size_t end = (size_t)N * (part + 1) / num_parts;
        for (size_t n = (size_t)N * part / num_parts; n < end; n++)
            rmsnorm_backward_row_cpu(dinp + n * C, part_dweight, dout + n * C, inp + n * C, weight, rstd[n], C);
    }
    #pragma omp parallel for
    for (int start = 0; start < C; start += 128) {
        const int end = start + 128 < C ? start + 128 : C;
        for (int part = 0; part < num_parts; part++) {
            const float* part_dweight = scratch + (size_t)part * C;
            #pragma omp simd
            for (int c = start; c < end; c++) dweight[c] += part_dweight[c];
        }
    }
}

#else

static constexpr int RMSNORM_PARTS = 512;            // enough blocks to fill a GPU, few enough to add up cheaply
static constexpr int RMSNORM_BLOCK = 256;
static constexpr int RMSNORM_MAX_BLOCK = 1024;

/* A warp a row. The row is read twice, the second time from the L1 cache. Without RESIDUAL a is the input, and b and
 * residual are not touched. */
template <bool RESIDUAL, int W, class P> static __global__ void __launch_bounds__(RMSNORM_BLOCK)
rmsnorm_forward_kernel(floatX* residual, floatX* out, float* rstd, const floatX* a, const floatX* b, const P* weight,
                       int N, int C, float eps)
{
    const size_t n = (size_t)blockIdx.x * (RMSNORM_BLOCK / 32) + threadIdx.x / 32;
    if (n >= (size_t)N) return;
    const int first = threadIdx.x % 32 * W;
    const floatX* row = (RESIDUAL ? residual : a) + n * C;
    float x[W], y[W], sum_squares = 0.0f;
    for (int c = first; c < C; c += 32 * W) {
        load_vec(x, a + n * C + c);
        if (RESIDUAL) {
            load_vec(y, b + n * C + c);
#pragma unroll
            for (int k = 0; k < W; k++) x[k] = round_x(x[k] + y[k]);
            store_vec(residual + n * C + c, x);
        }
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

/* What row n does to W columns of dinp, and to their share of dweight. */
template <int W, class P> DEV void rmsnorm_backward_columns(floatX* dinp, float (&dweight)[W], const floatX* dout,
                                                            const floatX* inp, const P* weight, float rstd, float mean)
{
    float dy[W], x[W], w[W], dx[W];
    load_vec(dy, dout);
    load_vec(x, inp);
    load_vec(w, weight);
    load_vec(dx, dinp);
#pragma unroll
    for (int k = 0; k < W; k++) {
        const float xhat = x[k] * rstd;
        dx[k] += rstd * (dy[k] * w[k] - xhat * mean);
        dweight[k] += dy[k] * xhat;
    }
    store_vec(dinp, dx);
}

/* A block a part, its rows one after another, one barrier each. A thread owns W columns and keeps their sums in
 * registers; in rows too long for the block it owns more, and keeps the sums of those in scratch. */
template <int W, class P> static __global__ void __launch_bounds__(RMSNORM_MAX_BLOCK)
rmsnorm_backward_kernel(floatX* dinp, float* scratch, const floatX* dout, const floatX* inp, const P* weight,
                        const float* rstd, int N, int C)
{
    SHARED(float, partial, [2][32]);                 // alternates, so that one barrier a row is enough
    const int first = threadIdx.x * W, stride = blockDim.x * W, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int num_warps = blockDim.x / 32;
    float* part_dweight = scratch + (size_t)blockIdx.x * C;
    float dweight[W] = {}, more_dweight[W] = {};
    for (int c = first + stride; c < C; c += stride) store_vec(part_dweight + c, more_dweight);
    const size_t end = (size_t)N * (blockIdx.x + 1) / gridDim.x;
    for (size_t n = (size_t)N * blockIdx.x / gridDim.x; n < end; n++) {
        const float r = rstd[n];
        float sum = 0.0f;
        for (int c = first; c < C; c += stride) {
            float dy[W], x[W], w[W];
            load_vec(dy, dout + n * C + c);
            load_vec(x, inp + n * C + c);
            load_vec(w, weight + c);
#pragma unroll
            for (int k = 0; k < W; k++) sum += dy[k] * w[k] * (x[k] * r);
        }
        sum = warp_sum(sum);
        if (lane == 0) partial[n % 2][warp] = sum;
        __syncthreads();
        const float mean = warp_sum(lane < num_warps ? partial[n % 2][lane] : 0.0f) / (float)C;
        if (first < C)
            rmsnorm_backward_columns(dinp + n * C + first, dweight, dout + n * C + first, inp + n * C + first,
                                     weight + first, r, mean);
        for (int c = first + stride; c < C; c += stride) {
            load_vec(more_dweight, part_dweight + c);
            rmsnorm_backward_columns(dinp + n * C + c, more_dweight, dout + n * C + c, inp + n * C + c, weight + c, r,
                                     mean);
            store_vec(part_dweight + c, more_dweight);
        }
    }
    if (first < C) store_vec(part_dweight + first, dweight);
}

/* A block adds 32 columns of all parts: warp w takes parts w, w + 8, ..., then warp 0 adds the warps in order. */
static __global__ void __launch_bounds__(RMSNORM_BLOCK)
rmsnorm_reduce_kernel(float* dweight, const float* scratch, int num_parts, int C)
{
    static constexpr int NUM_WARPS = RMSNORM_BLOCK / 32;
    SHARED(float, partial, [NUM_WARPS][32]);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (c < C)
        for (int part = warp; part < num_parts; part += NUM_WARPS) sum += scratch[(size_t)part * C + c];
    partial[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || c >= C) return;
    for (int w = 1; w < NUM_WARPS; w++) sum += partial[w][lane];
    dweight[c] += sum;
}

template <bool RESIDUAL, class P> static void rmsnorm_forward_launch(floatX* residual, floatX* out, float* rstd,
                                                                     const floatX* a, const floatX* b, const P* weight,
                                                                     int N, int C, float eps, cudaStream_t stream)
{
    const unsigned grid = (unsigned)ceil_div(N, RMSNORM_BLOCK / 32);
    if (is_vec(a, C) && is_vec(b, C) && is_vec(residual, C) && is_vec(out, C) && is_vec(weight, C))
        LAUNCH((rmsnorm_forward_kernel<RESIDUAL, VEC, P>), grid, RMSNORM_BLOCK, 0, stream, residual, out, rstd, a, b,
               weight, N, C, eps);
    else
        LAUNCH((rmsnorm_forward_kernel<RESIDUAL, 1, P>), grid, RMSNORM_BLOCK, 0, stream, residual, out, rstd, a, b,
               weight, N, C, eps);
    CUDA_CHECK(cudaGetLastError());
}

static unsigned rmsnorm_block(int C, int width)
{
    const size_t threads = round_up(ceil_div(C, width), 32);
    return threads < RMSNORM_MAX_BLOCK ? (unsigned)threads : RMSNORM_MAX_BLOCK;
}

template <class P> static void rmsnorm_backward_launch(floatX* dinp, float* dweight, float* scratch, const floatX* dout,
                                                       const floatX* inp, const P* weight, const float* rstd, int N,
                                                       int C, cudaStream_t stream)
{
    const int num_parts = N < RMSNORM_PARTS ? N : RMSNORM_PARTS;
    if (is_vec(dinp, C) && is_vec(dout, C) && is_vec(inp, C) && is_vec(weight, C) && is_vec(scratch, C))
        LAUNCH((rmsnorm_backward_kernel<VEC, P>), num_parts, rmsnorm_block(C, VEC), 0, stream, dinp, scratch, dout, inp,
               weight, rstd, N, C);
    else
        LAUNCH((rmsnorm_backward_kernel<1, P>), num_parts, rmsnorm_block(C, 1), 0, stream, dinp, scratch, dout, inp,
               weight, rstd, N, C);
    CUDA_CHECK(cudaGetLastError());
    LAUNCH(rmsnorm_reduce_kernel, (unsigned)ceil_div(C, 32), RMSNORM_BLOCK, 0, stream, dweight, scratch, num_parts, C);
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

static size_t rmsnorm_scratch_elems(int C) { return (size_t)RMSNORM_PARTS * C; }

template <class P> static void rmsnorm_backward(floatX* dinp, float* dweight, float* scratch, const floatX* dout,
                                                const floatX* inp, const P* weight, const float* rstd, int N, int C,
                                                cudaStream_t stream)
{
    OP(stream, 0, 4.0 * N * C * sizeof(floatX), N, C);
    ON_CPU(rmsnorm_backward_cpu(dinp, dweight, scratch, dout, inp, weight, rstd, N, C));
#ifndef DEVICE_CPU
    rmsnorm_backward_launch(dinp, dweight, scratch, dout, inp, weight, rstd, N, C, stream);
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
