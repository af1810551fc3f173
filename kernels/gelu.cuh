/* gelu.cuh: the Gaussian error linear unit, exact or in GPT-2's tanh form.
 *   ERF   out = x/2 * (1 + erf(x/sqrt(2)))        slope = (1 + erf(x/sqrt(2)))/2 + x * exp(-x^2/2) / sqrt(2*pi)
 *   TANH  out = x/2 * (1 + tanh(u)) = x * s       slope = s + x * s * (1 - s) * 2 * du/dx
 *         u = sqrt(2/pi) * (x + 0.044715 * x^3), s = 1/(1 + exp(-2u)): one exponential instead of a tanh
 *   dinp = dout * slope(inp)
 * shapes  inp out dinp dout (n) floatX
 * writes  forward out =, may be inp; backward dinp =, may be dout
 * needs   any n >= 1, any address; 16-byte aligned pointers are faster on a GPU
 * exact   each element by itself: same bits on every run
 * cost    forward 2*n*s bytes, backward 3*n*s, judged against memory bandwidth
 * source  Hendrycks & Gimpel 2016, arXiv:1606.08415 */
#pragma once
#include "vec.cuh"

enum class Gelu { TANH, ERF };

#ifdef DEVICE_CPU

static constexpr size_t GELU_CHUNK = 4096;           // elements a thread takes at a time; fewer are not worth a thread

template <bool BACKWARD, Gelu KIND> SIMD vf gelu_vec(vf x, vf dout)
{
    if (BACKWARD) return dout * (KIND == Gelu::TANH ? vf_gelu_tanh_grad(x) : vf_gelu_erf_grad(x));
    return KIND == Gelu::TANH ? vf_gelu_tanh(x) : vf_gelu_erf(x);
}

/* The forward passes inp for dout too, and does not use it. */
template <bool BACKWARD, Gelu KIND> static void gelu_cpu(floatX* out, const floatX* dout, const floatX* inp, size_t n)
{
    #pragma omp parallel for if (n > GELU_CHUNK)
    for (size_t start = 0; start < n; start += GELU_CHUNK) {
        const size_t end = start + GELU_CHUNK < n ? start + GELU_CHUNK : n;
        size_t i = start;
        for (; i + VF <= end; i += VF)
            vf_store(out + i, gelu_vec<BACKWARD, KIND>(vf_load(inp + i), vf_load(dout + i)));
        const int tail = (int)(end - i);
        if (tail > 0)
            vf_store_n(out + i, gelu_vec<BACKWARD, KIND>(vf_load_n(inp + i, tail), vf_load_n(dout + i, tail)), tail);
    }
}

#else

static constexpr int GELU_BLOCK = 256;

DEV float gelu_tanh(float x)
{
    const float two_u = 1.5957691216f * x * (1.0f + 0.044715f * x * x);
    return x / (1.0f + __expf(-two_u));
}

DEV float gelu_tanh_slope(float x)
{
    if (fabsf(x) > 10.0f) return x > 0.0f ? 1.0f : 0.0f;     // to the last bit, and e below would overflow
    const float xx = x * x;
    const float e = __expf(-1.5957691216f * x * (1.0f + 0.044715f * xx)), s = 1.0f / (1.0f + e);
    return s + x * (e * s * s) * 1.5957691216f * (1.0f + 0.134145f * xx);      // e * s = 1 - s, which would cancel
}

DEV float gelu_erf(float x) { return 0.5f * x * (1.0f + erff(0.70710678f * x)); }

DEV float gelu_erf_slope(float x)
{
    return 0.5f * (1.0f + erff(0.70710678f * x)) + x * 0.39894228f * __expf(-0.5f * x * x);
}

template <bool BACKWARD, Gelu KIND> DEV float gelu_element(float x, float dout)
{
    if (BACKWARD) return dout * (KIND == Gelu::TANH ? gelu_tanh_slope(x) : gelu_erf_slope(x));
    return KIND == Gelu::TANH ? gelu_tanh(x) : gelu_erf(x);
}

/* One vector a thread; the thread with the last, short one goes element by element. */
template <bool BACKWARD, Gelu KIND, int W> static __global__ void __launch_bounds__(GELU_BLOCK)
gelu_kernel(floatX* out, const floatX* dout, const floatX* inp, size_t n)
{
    size_t i = ((size_t)blockIdx.x * GELU_BLOCK + threadIdx.x) * W;
    if (i + W <= n) {
        float x[W], dy[W];
        load_vec(x, inp + i);
        if (BACKWARD) load_vec(dy, dout + i);
#pragma unroll
        for (int k = 0; k < W; k++) x[k] = gelu_element<BACKWARD, KIND>(x[k], BACKWARD ? dy[k] : 0.0f);
        store_vec(out + i, x);
    } else {
        for (; i < n; i++) store_f(out + i, gelu_element<BACKWARD, KIND>(load_f(inp[i]), load_f(dout[i])));
    }
}

template <bool BACKWARD, Gelu KIND> static void gelu_launch(floatX* out, const floatX* dout, const floatX* inp,
                                                            size_t n, cudaStream_t stream)
{
    const bool aligned = is_vec(out, VEC) && is_vec(dout, VEC) && is_vec(inp, VEC);
    const unsigned grid = (unsigned)ceil_div(n, (size_t)GELU_BLOCK * (aligned ? VEC : 1));
    if (aligned) LAUNCH((gelu_kernel<BACKWARD, KIND, VEC>), grid, GELU_BLOCK, 0, stream, out, dout, inp, n);
    else LAUNCH((gelu_kernel<BACKWARD, KIND, 1>), grid, GELU_BLOCK, 0, stream, out, dout, inp, n);
    CUDA_CHECK(cudaGetLastError());
}

#endif

template <bool BACKWARD, Gelu KIND> static void gelu(floatX* out, const floatX* dout, const floatX* inp, size_t n,
                                                     cudaStream_t stream)
{
    ON_CPU(gelu_cpu<BACKWARD, KIND>(out, dout, inp, n));
#ifndef DEVICE_CPU
    gelu_launch<BACKWARD, KIND>(out, dout, inp, n, stream);
#endif
}

static void gelu_forward(floatX* out, const floatX* inp, size_t n, Gelu kind, cudaStream_t stream)
{
    OP(stream, 0, 2.0 * n * sizeof(floatX), n);
    if (kind == Gelu::TANH) gelu<false, Gelu::TANH>(out, inp, inp, n, stream);
    else gelu<false, Gelu::ERF>(out, inp, inp, n, stream);
}

static void gelu_backward(floatX* dinp, const floatX* dout, const floatX* inp, size_t n, Gelu kind, cudaStream_t stream)
{
    OP(stream, 0, 3.0 * n * sizeof(floatX), n);
    if (kind == Gelu::TANH) gelu<true, Gelu::TANH>(dinp, dout, inp, n, stream);
    else gelu<true, Gelu::ERF>(dinp, dout, inp, n, stream);
}

#ifdef OP_TESTS

template <class R> static void gelu_forward_ref(R* out, const R* inp, size_t n, Gelu kind)
{
    for (size_t i = 0; i < n; i++) {
        const R x = inp[i], u = R(0.79788456080286536) * (x + R(0.044715) * x * x * x);
        out[i] = R(0.5) * x * (1 + (kind == Gelu::TANH ? std::tanh(u) : std::erf(x / std::sqrt(R(2)))));
    }
}

template <class R> static void gelu_backward_ref(R* dinp, const R* dout, const R* inp, size_t n, Gelu kind)
{
    for (size_t i = 0; i < n; i++) {
        const R x = inp[i], a = R(0.79788456080286536), b = R(0.044715);
        const R t = std::tanh(a * (x + b * x * x * x));
        const R normal_pdf = std::exp(R(-0.5) * x * x) * R(0.39894228040143268);
        const R slope = kind == Gelu::TANH ? R(0.5) * (1 + t) + R(0.5) * x * (1 - t * t) * a * (1 + 3 * b * x * x)
                                           : R(0.5) * (1 + std::erf(x / std::sqrt(R(2)))) + x * normal_pdf;
        dinp[i] = dout[i] * slope;
    }
}

template <Gelu KIND> static void gelu_forward_test(OpRun* run)
{
    const size_t n = (size_t)run->dims[0];
    OpTensor<floatX> inp = op_input<floatX>(run, "inp", n, 0.0, 2.0);
    OpTensor<floatX> out = op_output<floatX>(run, "out", n);
    OP_RUN(run, 2.0 * n * sizeof(floatX), 0, gelu_forward(out.dev, inp.dev, n, KIND, 0));
    gelu_forward_ref(out.f64, inp.f64, n, KIND);
    gelu_forward_ref(out.f32, inp.f32, n, KIND);
    op_check(run, out);
}

template <Gelu KIND> static void gelu_backward_test(OpRun* run)
{
    const size_t n = (size_t)run->dims[0];
    OpTensor<floatX> inp = op_input<floatX>(run, "inp", n, 0.0, 2.0);
    OpTensor<floatX> dout = op_input<floatX>(run, "dout", n, 0.0, 1.0);
    OpTensor<floatX> dinp = op_output<floatX>(run, "dinp", n);
    double* out = op_host(run, n);
    OP_RUN(run, 3.0 * n * sizeof(floatX), 0, gelu_backward(dinp.dev, dout.dev, inp.dev, n, KIND, 0));
    gelu_backward_ref(dinp.f64, dout.f64, inp.f64, n, KIND);
    gelu_backward_ref(dinp.f32, dout.f32, inp.f32, n, KIND);
    op_check(run, dinp);
    OP_CHECK_GRAD(run, dinp, inp, (gelu_forward_ref(out, inp.f64, n, KIND), op_dot(out, dout.f64, n)));
}

/* As the model runs it: dinp lies on dout. */
static void gelu_backward_in_place_test(OpRun* run)
{
    const size_t n = (size_t)run->dims[0];
    OpTensor<floatX> inp = op_input<floatX>(run, "inp", n, 0.0, 2.0);
    OpTensor<floatX> both = op_inout<floatX>(run, "dinp", n, 0.0, 1.0);
    OP_RUN(run, 3.0 * n * sizeof(floatX), 0, gelu_backward(both.dev, both.dev, inp.dev, n, Gelu::TANH, 0));
    gelu_backward_ref(both.f64, both.f64, inp.f64, n, Gelu::TANH);
    gelu_backward_ref(both.f32, both.f32, inp.f32, n, Gelu::TANH);
    op_check(run, both);
}

static const OpTest gelu_tests[] = {
    {"gelu_forward_tanh", gelu_forward_test<Gelu::TANH>, {1}, OpWhen::ALWAYS},
    {"gelu_forward_tanh", gelu_forward_test<Gelu::TANH>, {4099}, OpWhen::ALWAYS},
    {"gelu_forward_tanh", gelu_forward_test<Gelu::TANH>, {256 * 3072}, OpWhen::LARGE},
    {"gelu_forward_erf", gelu_forward_test<Gelu::ERF>, {7}, OpWhen::ALWAYS},
    {"gelu_forward_erf", gelu_forward_test<Gelu::ERF>, {4096}, OpWhen::ALWAYS},
    {"gelu_backward_tanh", gelu_backward_test<Gelu::TANH>, {1}, OpWhen::ALWAYS},
    {"gelu_backward_tanh", gelu_backward_test<Gelu::TANH>, {1023}, OpWhen::ALWAYS},
    {"gelu_backward_tanh", gelu_backward_test<Gelu::TANH>, {64 * 3072}, OpWhen::LARGE},
    {"gelu_backward_tanh", gelu_backward_in_place_test, {8200}, OpWhen::ALWAYS},
    {"gelu_backward_erf", gelu_backward_test<Gelu::ERF>, {1023}, OpWhen::ALWAYS},
    {"gelu_backward_erf", gelu_backward_test<Gelu::ERF>, {8192}, OpWhen::ALWAYS},
    {"gelu_forward_tanh", gelu_forward_test<Gelu::TANH>, {8192 * 3072}, OpWhen::BENCH},
    {"gelu_backward_tanh", gelu_backward_test<Gelu::TANH>, {8192 * 3072}, OpWhen::BENCH},
    {"gelu_backward_erf", gelu_backward_test<Gelu::ERF>, {8192 * 3072}, OpWhen::BENCH},
};

#endif
