/* swiglu.cuh: the activation of a gated MLP, on gate and up projections that come out of one GEMM.
 *   out = silu(gate) * up          silu(x) = x * s, s = 1/(1 + exp(-x))
 *   dgate = dout * up * (s + x * s * (1 - s))     dup = dout * silu(gate)
 * shapes  inp dinp (N,2F) floatX, a row holding gate | up; out dout (N,F) floatX
 * writes  forward out =; backward dinp =, may be inp
 * needs   any N, F >= 1; rows of whole 16-byte vectors are faster on a GPU
 * exact   each element by itself: same bits on every run
 * cost    forward 3*N*F*s bytes, backward 5*N*F*s, judged against memory bandwidth
 * source  Shazeer 2020, arXiv:2002.05202 */
#pragma once
#include "activation.cuh"

LANES lanes swiglu_lanes(lanes gate, lanes up) { return silu(gate) * up; }

LANES void swiglu_lanes_backward(lanes* dgate, lanes* dup, lanes dout, lanes gate, lanes up)
{
    *dgate = dout * up * silu_derivative(gate);
    *dup = dout * (gate * (1.0f / (1.0f + silu_exp(gate))));
}

#ifdef DEVICE_CPU

static void swiglu_forward_cpu(floatX* out, const floatX* inp, int N, int F)
{
    #pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const floatX *gate = inp + (size_t)n * 2 * F, *up = gate + F;
        floatX* row = out + (size_t)n * F;
        int f = 0;
        for (; f + VF <= F; f += VF) vf_store(row + f, swiglu_lanes(vf_load(gate + f), vf_load(up + f)));
        if (f < F) vf_store_n(row + f, swiglu_lanes(vf_load_n(gate + f, F - f), vf_load_n(up + f, F - f)), F - f);
    }
}

static void swiglu_backward_cpu(floatX* dinp, const floatX* dout, const floatX* inp, int N, int F)
{
    #pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const floatX *gate = inp + (size_t)n * 2 * F, *up = gate + F, *dy = dout + (size_t)n * F;
        floatX *dgate = dinp + (size_t)n * 2 * F, *dup = dgate + F;
        vf dg, du;
        int f = 0;
        for (; f + VF <= F; f += VF) {
            swiglu_lanes_backward(&dg, &du, vf_load(dy + f), vf_load(gate + f), vf_load(up + f));
            vf_store(dgate + f, dg);
            vf_store(dup + f, du);
        }
        if (f == F) continue;
        swiglu_lanes_backward(&dg, &du, vf_load_n(dy + f, F - f), vf_load_n(gate + f, F - f), vf_load_n(up + f, F - f));
        vf_store_n(dgate + f, dg, F - f);
        vf_store_n(dup + f, du, F - f);
    }
}

#else

static constexpr int SWIGLU_BLOCK = 256;

/* A thread W columns of a row: grid (columns, rows). */
template <int W> static __global__ void __launch_bounds__(SWIGLU_BLOCK)
swiglu_forward_kernel(floatX* out, const floatX* inp, int F)
{
    const int f = (blockIdx.y * SWIGLU_BLOCK + threadIdx.x) * W;
    if (f >= F) return;
    const floatX* gate = inp + (size_t)blockIdx.x * 2 * F + f;
    float x[W], y[W];
    load_vec(x, gate);
    load_vec(y, gate + F);
#pragma unroll
    for (int k = 0; k < W; k++) x[k] = swiglu_lanes(x[k], y[k]);
    store_vec(out + (size_t)blockIdx.x * F + f, x);
}

template <int W> static __global__ void __launch_bounds__(SWIGLU_BLOCK)
swiglu_backward_kernel(floatX* dinp, const floatX* dout, const floatX* inp, int F)
{
    const int f = (blockIdx.y * SWIGLU_BLOCK + threadIdx.x) * W;
    if (f >= F) return;
    const size_t at = (size_t)blockIdx.x * 2 * F + f;
    float x[W], y[W], dy[W];
    load_vec(x, inp + at);
    load_vec(y, inp + at + F);
    load_vec(dy, dout + (size_t)blockIdx.x * F + f);
#pragma unroll
    for (int k = 0; k < W; k++) swiglu_lanes_backward(&x[k], &y[k], dy[k], x[k], y[k]);
    store_vec(dinp + at, x);
    store_vec(dinp + at + F, y);
}

#endif

static void swiglu_forward(floatX* out, const floatX* inp, int N, int F, cudaStream_t stream)
{
    OP(stream, 0, 3.0 * N * F * sizeof(floatX), N, F);
    ON_CPU(swiglu_forward_cpu(out, inp, N, F));
#ifndef DEVICE_CPU
    const bool vec = is_vec(out, F) && is_vec(inp, F);
    const dim3 grid(N, (unsigned)ceil_div(F, SWIGLU_BLOCK * (vec ? VEC : 1)));
    if (vec) LAUNCH((swiglu_forward_kernel<VEC>), grid, SWIGLU_BLOCK, 0, stream, out, inp, F);
    else LAUNCH((swiglu_forward_kernel<1>), grid, SWIGLU_BLOCK, 0, stream, out, inp, F);
    CUDA_CHECK(cudaGetLastError());
#endif
}

static void swiglu_backward(floatX* dinp, const floatX* dout, const floatX* inp, int N, int F, cudaStream_t stream)
{
    OP(stream, 0, 5.0 * N * F * sizeof(floatX), N, F);
    ON_CPU(swiglu_backward_cpu(dinp, dout, inp, N, F));
#ifndef DEVICE_CPU
    const bool vec = is_vec(dinp, F) && is_vec(dout, F) && is_vec(inp, F);
    const dim3 grid(N, (unsigned)ceil_div(F, SWIGLU_BLOCK * (vec ? VEC : 1)));
    if (vec) LAUNCH((swiglu_backward_kernel<VEC>), grid, SWIGLU_BLOCK, 0, stream, dinp, dout, inp, F);
    else LAUNCH((swiglu_backward_kernel<1>), grid, SWIGLU_BLOCK, 0, stream, dinp, dout, inp, F);
    CUDA_CHECK(cudaGetLastError());
#endif
}

#ifdef OP_TESTS
#include "optest.h"

template <class R> static void swiglu_forward_ref(R* out, const R* inp, int N, int F)
{
    for (int n = 0; n < N; n++) {
        for (int f = 0; f < F; f++) {
            const R gate = inp[(size_t)n * 2 * F + f], up = inp[(size_t)n * 2 * F + F + f];
            out[(size_t)n * F + f] = gate / (1 + std::exp(-gate)) * up;
        }
    }
}

template <class R> static void swiglu_backward_ref(R* dinp, const R* dout, const R* inp, int N, int F)
{
    for (int n = 0; n < N; n++) {
        for (int f = 0; f < F; f++) {
            const size_t at = (size_t)n * 2 * F + f;
            const R gate = inp[at], up = inp[at + F], dy = dout[(size_t)n * F + f], s = 1 / (1 + std::exp(-gate));
            dinp[at] = dy * up * (s + gate * s * (1 - s));
            dinp[at + F] = dy * gate * s;
        }
    }
}

static void swiglu_forward_test(OpRun* run)
{
    const int N = run->dims[0], F = run->dims[1];
    OpTensor<floatX> inp = op_input<floatX>(run, "inp", (size_t)N * 2 * F, 0.0, 3.0);
    OpTensor<floatX> out = op_output<floatX>(run, "out", (size_t)N * F);
    OP_RUN(run, 3.0 * N * F * sizeof(floatX), 0, swiglu_forward(out.dev, inp.dev, N, F, 0));
    swiglu_forward_ref(out.f64, inp.f64, N, F);
    swiglu_forward_ref(out.f32, inp.f32, N, F);
    op_check(run, out);
}

static void swiglu_backward_test(OpRun* run)
{
    const int N = run->dims[0], F = run->dims[1];
    OpTensor<floatX> inp = op_input<floatX>(run, "inp", (size_t)N * 2 * F, 0.0, 3.0);
    OpTensor<floatX> dout = op_input<floatX>(run, "dout", (size_t)N * F, 0.0, 1.0);
    OpTensor<floatX> dinp = op_output<floatX>(run, "dinp", (size_t)N * 2 * F);
    double* out = op_host(run, (size_t)N * F);
    OP_RUN(run, 5.0 * N * F * sizeof(floatX), 0, swiglu_backward(dinp.dev, dout.dev, inp.dev, N, F, 0));
    swiglu_backward_ref(dinp.f64, dout.f64, inp.f64, N, F);
    swiglu_backward_ref(dinp.f32, dout.f32, inp.f32, N, F);
    op_check(run, dinp);
    if (N * F > 10000) return;
    OP_CHECK_GRAD(run, dinp, inp, (swiglu_forward_ref(out, inp.f64, N, F), op_dot(out, dout.f64, (size_t)N * F)));
}

/* Gates far out, where exponentials overflow: the derivative is 0 or 1, never NaN. */
static void swiglu_far_test(OpRun* run)
{
    const int F = run->dims[0];
    OpTensor<floatX> inp = op_input<floatX>(run, "inp", (size_t)2 * F, 0.0, 100.0);
    OpTensor<floatX> dout = op_input<floatX>(run, "dout", F, 1.0, 0.0);
    OpTensor<floatX> dinp = op_output<floatX>(run, "dinp", (size_t)2 * F);
    OP_RUN(run, 5.0 * F * sizeof(floatX), 0, swiglu_backward(dinp.dev, dout.dev, inp.dev, 1, F, 0));
    swiglu_backward_ref(dinp.f64, dout.f64, inp.f64, 1, F);
    swiglu_backward_ref(dinp.f32, dout.f32, inp.f32, 1, F);
    op_check(run, dinp);
}

static const OpTest swiglu_tests[] = {
    {"swiglu_forward", swiglu_forward_test, {1, 1}, OpWhen::ALWAYS},
    {"swiglu_forward", swiglu_forward_test, {3, 1031}, OpWhen::ALWAYS},
    {"swiglu_forward", swiglu_forward_test, {17, 64}, OpWhen::ALWAYS},
    {"swiglu_forward", swiglu_forward_test, {64, 5632}, OpWhen::LARGE},
    {"swiglu_backward", swiglu_backward_test, {1, 1}, OpWhen::ALWAYS},
    {"swiglu_backward", swiglu_backward_test, {3, 1031}, OpWhen::ALWAYS},
    {"swiglu_backward", swiglu_backward_test, {17, 64}, OpWhen::ALWAYS},
    {"swiglu_backward", swiglu_backward_test, {64, 5632}, OpWhen::LARGE},
    {"swiglu_far", swiglu_far_test, {300}, OpWhen::ALWAYS},
    {"swiglu_forward", swiglu_forward_test, {4096, 5632}, OpWhen::BENCH},
    {"swiglu_backward", swiglu_backward_test, {4096, 5632}, OpWhen::BENCH},
};

#endif
