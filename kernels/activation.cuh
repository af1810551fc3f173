/* activation.cuh: the activation between the two GEMMs of an MLP, element by element: out = f(inp).
 *   gelu_tanh  f = x/2 * (1 + tanh(u)) = x * s      f' = s + x * s * (1 - s) * 2 * du/dx
 *              u = sqrt(2/pi) * (x + 0.044715 * x^3), s = 1/(1 + exp(-2u)): one exponential instead of a tanh
 *   gelu_erf   f = x/2 * (1 + erf(x/sqrt(2)))       f' = (1 + erf(x/sqrt(2)))/2 + x * exp(-x^2/2) / sqrt(2*pi)
 *   silu       f = x * s, s = 1/(1 + exp(-x))       f' = s + x * s * (1 - s)
 *   relu2      f = max(x, 0)^2                      f' = 2 * max(x, 0)          So et al. 2021, arXiv:2109.08668
 *   dinp = dout * f'(inp)
 * shapes  inp out dinp dout (n) floatX
 * writes  forward out =, may be inp; backward dinp =, may be dout
 * needs   any n >= 1, any address; 16-byte aligned pointers are faster on a GPU
 * exact   each element by itself: same bits on every run
 * cost    forward 2*n*s bytes, backward 3*n*s, judged against memory bandwidth
 * source  Hendrycks & Gimpel 2016, arXiv:1606.08415; SiLU: Elfwing, Uchibe & Doya 2017, arXiv:1702.03118 */
#pragma once
#include "vec.cuh"

/* To add an activation add a row: enumerator; function: f(x) and f_derivative(x) below, f_ref for the tests; its names
 * in config.json, the one that is written first; the epilogue of cuBLASLt's GEMMs that computes it, or NONE. */
enum class Epilogue { NONE, GELU };
#define ACTIVATIONS(A) \
    A(GELU_TANH, gelu_tanh, "gelu_new, gelu_pytorch_tanh", GELU) \
    A(GELU_ERF, gelu_erf, "gelu", NONE) \
    A(SILU, silu, "silu", NONE) \
    A(RELU2, relu2, "relu2", NONE)

#define ACTIVATION_ENUM(NAME, function, names, epilogue) NAME,
enum class Activation { ACTIVATIONS(ACTIVATION_ENUM) };
#define ACTIVATION_ROW(NAME, function, names, epilogue) {names, Epilogue::epilogue},
static const struct { const char* names; Epilogue epilogue; } activation_rows[] = {ACTIVATIONS(ACTIVATION_ROW)};
#define ACTIVATION_NAMES(NAME, function, names, epilogue) ", " names
static const char* const activation_names = &ACTIVATIONS(ACTIVATION_NAMES)[2];

/* False if no activation has this name. */
static bool activation_find(Activation* out, const char* name)
{
    int idx = 0;
    for (const auto& row : activation_rows) {
        for (const char* p = row.names; *p != 0; p += strspn(p, ", ")) {
            size_t length = strcspn(p, ",");
            *out = (Activation)idx;
            if (length == strlen(name) && memcmp(p, name, length) == 0) return true;
            p += length;
        }
        idx++;
    }
    return false;
}

static Epilogue activation_epilogue(Activation kind) { return activation_rows[(int)kind].epilogue; }

// ------------------------------------------------------------------------------------------------------- formulas
/* What a thread computes at once: a vector on the CPU, one element on a GPU. */
#ifdef DEVICE_CPU
#define LANES SIMD
typedef vf lanes;
LANES lanes lanes_exp(lanes x) { return vf_exp(x); }
LANES lanes lanes_erf(lanes x) { return vf_erf(x); }
LANES lanes lanes_max(lanes x, float least) { return vf_max(x, vf_set(least)); }
#else
#define LANES DEV
typedef float lanes;
LANES lanes lanes_exp(lanes x) { return __expf(x); }
LANES lanes lanes_erf(lanes x) { return erff(x); }
LANES lanes lanes_max(lanes x, float least) { return fmaxf(x, least); }
#endif

/* (1 + tanh u) / 2 is the logistic function of 2u. */
LANES lanes gelu_tanh(lanes x)
{
    const lanes two_u = 1.5957691216f * x * (1.0f + 0.044715f * x * x);
    return x / (1.0f + lanes_exp(-two_u));
}

/* Beyond 10 the derivative is 1 or 0 to the last bit, and e would overflow. e * s = 1 - s, which would cancel. */
LANES lanes gelu_tanh_derivative(lanes x)
{
#ifdef DEVICE_CPU
    x = vf_max(vf_min(x, vf_set(10.0f)), vf_set(-10.0f));
    const vf xx = x * x, e = vf_exp(-1.5957691216f * x * (1.0f + 0.044715f * xx)), s = 1.0f / (1.0f + e);
    return s + x * s * (e * s) * 1.5957691216f * (1.0f + 0.134145f * xx);
#else
    if (fabsf(x) > 10.0f) return x > 0.0f ? 1.0f : 0.0f;
    const float xx = x * x;
    const float e = __expf(-1.5957691216f * x * (1.0f + 0.044715f * xx)), s = 1.0f / (1.0f + e);
    return s + x * (e * s * s) * 1.5957691216f * (1.0f + 0.134145f * xx);
#endif
}

LANES lanes gelu_erf(lanes x) { return 0.5f * x * (1.0f + lanes_erf(0.70710678f * x)); }

LANES lanes gelu_erf_derivative(lanes x)
{
    return 0.5f * (1.0f + lanes_erf(0.70710678f * x)) + x * 0.39894228f * lanes_exp(-0.5f * x * x);
}

LANES lanes silu(lanes x) { return x / (1.0f + lanes_exp(-x)); }

/* s = 1/(1 + e). e stays finite, where s * e would be 0 * inf. */
LANES lanes silu_exp(lanes x) { return lanes_exp(-lanes_max(x, -80.0f)); }

LANES lanes silu_derivative(lanes x)
{
    const lanes e = silu_exp(x), s = 1.0f / (1.0f + e);
    return s + x * s * (e * s);                      // e * s = 1 - s, which would cancel
}

/* x < 0, not x > 0, so that a NaN stays one. */
LANES lanes relu2(lanes x) { return x < 0.0f ? lanes{} : x * x; }
LANES lanes relu2_derivative(lanes x) { return x < 0.0f ? lanes{} : 2.0f * x; }

// -------------------------------------------------------------------------------------------------------- kernels
template <bool BACKWARD, Activation KIND> LANES lanes activation_lanes(lanes x, lanes dout)
{
#define ACTIVATION_VALUE(NAME, function, names, epilogue) \
    if (KIND == Activation::NAME) return BACKWARD ? dout * function##_derivative(x) : function(x);
    ACTIVATIONS(ACTIVATION_VALUE)
#undef ACTIVATION_VALUE
    return x;
}

#ifdef DEVICE_CPU

static constexpr size_t ACTIVATION_CHUNK = 4096;     // elements a thread takes at a time; fewer are not worth a thread

/* The forward passes inp for dout too, and does not use it. */
template <bool BACKWARD, Activation KIND> static void activation_cpu(floatX* out, const floatX* dout, const floatX* inp,
                                                                     size_t n)
{
    #pragma omp parallel for if (n > ACTIVATION_CHUNK)
    for (size_t start = 0; start < n; start += ACTIVATION_CHUNK) {
        const size_t end = start + ACTIVATION_CHUNK < n ? start + ACTIVATION_CHUNK : n;
        size_t i = start;
        for (; i + VF <= end; i += VF)
            vf_store(out + i, activation_lanes<BACKWARD, KIND>(vf_load(inp + i), vf_load(dout + i)));
        const int tail = (int)(end - i);
        if (tail > 0)
            vf_store_n(out + i, activation_lanes<BACKWARD, KIND>(vf_load_n(inp + i, tail), vf_load_n(dout + i, tail)),
                       tail);
    }
}

#else

static constexpr int ACTIVATION_BLOCK = 256;

/* One vector a thread; the thread with the last, short one goes element by element. */
template <bool BACKWARD, Activation KIND, int W> static __global__ void __launch_bounds__(ACTIVATION_BLOCK)
activation_kernel(floatX* out, const floatX* dout, const floatX* inp, size_t n)
{
    size_t i = ((size_t)blockIdx.x * ACTIVATION_BLOCK + threadIdx.x) * W;
    if (i + W <= n) {
        float x[W], dy[W];
        load_vec(x, inp + i);
        if (BACKWARD) load_vec(dy, dout + i);
#pragma unroll
        for (int k = 0; k < W; k++) x[k] = activation_lanes<BACKWARD, KIND>(x[k], BACKWARD ? dy[k] : 0.0f);
        store_vec(out + i, x);
    } else {
        for (; i < n; i++) store_f(out + i, activation_lanes<BACKWARD, KIND>(load_f(inp[i]), load_f(dout[i])));
    }
}

template <bool BACKWARD, Activation KIND> static void activation_launch(floatX* out, const floatX* dout,
                                                                        const floatX* inp, size_t n,
                                                                        cudaStream_t stream)
{
    const bool aligned = is_vec(out, VEC) && is_vec(dout, VEC) && is_vec(inp, VEC);
    const unsigned grid = (unsigned)ceil_div(n, (size_t)ACTIVATION_BLOCK * (aligned ? VEC : 1));
    if (aligned) LAUNCH((activation_kernel<BACKWARD, KIND, VEC>), grid, ACTIVATION_BLOCK, 0, stream, out, dout, inp, n);
    else LAUNCH((activation_kernel<BACKWARD, KIND, 1>), grid, ACTIVATION_BLOCK, 0, stream, out, dout, inp, n);
    CUDA_CHECK(cudaGetLastError());
}

#endif

template <bool BACKWARD> static void activation(floatX* out, const floatX* dout, const floatX* inp, size_t n,
                                                Activation kind, cudaStream_t stream)
{
    switch (kind) {
#ifdef DEVICE_CPU
#define ACTIVATION_CASE(NAME, function, names, epilogue) \
    case Activation::NAME: return activation_cpu<BACKWARD, Activation::NAME>(out, dout, inp, n);
#else
#define ACTIVATION_CASE(NAME, function, names, epilogue) \
    case Activation::NAME: return activation_launch<BACKWARD, Activation::NAME>(out, dout, inp, n, stream);
#endif
    ACTIVATIONS(ACTIVATION_CASE)
#undef ACTIVATION_CASE
    }
}

static void activation_forward(floatX* out, const floatX* inp, size_t n, Activation kind, cudaStream_t stream)
{
    OP(stream, 0, 2.0 * n * sizeof(floatX), n);
    activation<false>(out, inp, inp, n, kind, stream);
}

static void activation_backward(floatX* dinp, const floatX* dout, const floatX* inp, size_t n, Activation kind,
                                cudaStream_t stream)
{
    OP(stream, 0, 3.0 * n * sizeof(floatX), n);
    activation<true>(dinp, dout, inp, n, kind, stream);
}

#ifdef OP_TESTS
#include "optest.h"

/* f, and in *derivative f', as plain code has them. */
template <class R> static R gelu_tanh_ref(R x, R* derivative)
{
    const R a = R(0.79788456080286536), b = R(0.044715), t = std::tanh(a * (x + b * x * x * x));
    *derivative = R(0.5) * (1 + t) + R(0.5) * x * (1 - t * t) * a * (1 + 3 * b * x * x);
    return R(0.5) * x * (1 + t);
}

template <class R> static R gelu_erf_ref(R x, R* derivative)
{
    const R normal_cdf = R(0.5) * (1 + std::erf(x / std::sqrt(R(2))));
    *derivative = normal_cdf + x * (std::exp(R(-0.5) * x * x) * R(0.39894228040143268));
    return x * normal_cdf;
}

template <class R> static R silu_ref(R x, R* derivative)
{
    const R s = 1 / (1 + std::exp(-x));
    *derivative = s + x * s * (1 - s);
    return x * s;
}

template <class R> static R relu2_ref(R x, R* derivative)
{
    const R positive = std::max(x, R(0));
    *derivative = 2 * positive;
    return positive * positive;
}

template <class R> static R activation_ref(Activation kind, R x, R* derivative)
{
#define ACTIVATION_REF(NAME, function, names, epilogue) \
    if (kind == Activation::NAME) return function##_ref(x, derivative);
    ACTIVATIONS(ACTIVATION_REF)
#undef ACTIVATION_REF
    die("activation %d has no row", (int)kind);
}

template <class R> static void activation_forward_ref(R* out, const R* inp, size_t n, Activation kind)
{
    R derivative;
    for (size_t i = 0; i < n; i++) out[i] = activation_ref(kind, inp[i], &derivative);
}

template <class R> static void activation_backward_ref(R* dinp, const R* dout, const R* inp, size_t n, Activation kind)
{
    for (size_t i = 0; i < n; i++) {
        R derivative;
        activation_ref(kind, inp[i], &derivative);
        dinp[i] = dout[i] * derivative;
    }
}

template <Activation KIND> static void activation_forward_test(OpRun* run)
{
    const size_t n = (size_t)run->dims[0];
    OpTensor<floatX> inp = op_input<floatX>(run, "inp", n, 0.0, 2.0);
    OpTensor<floatX> out = op_output<floatX>(run, "out", n);
    OP_RUN(run, 2.0 * n * sizeof(floatX), 0, activation_forward(out.dev, inp.dev, n, KIND, 0));
    activation_forward_ref(out.f64, inp.f64, n, KIND);
    activation_forward_ref(out.f32, inp.f32, n, KIND);
    op_check(run, out);
}

template <Activation KIND> static void activation_backward_test(OpRun* run)
{
    const size_t n = (size_t)run->dims[0];
    OpTensor<floatX> inp = op_input<floatX>(run, "inp", n, 0.0, 2.0);
    OpTensor<floatX> dout = op_input<floatX>(run, "dout", n, 0.0, 1.0);
    OpTensor<floatX> dinp = op_output<floatX>(run, "dinp", n);
    double* out = op_host(run, n);
    OP_RUN(run, 3.0 * n * sizeof(floatX), 0, activation_backward(dinp.dev, dout.dev, inp.dev, n, KIND, 0));
    activation_backward_ref(dinp.f64, dout.f64, inp.f64, n, KIND);
    activation_backward_ref(dinp.f32, dout.f32, inp.f32, n, KIND);
    op_check(run, dinp);
    OP_CHECK_GRAD(run, dinp, inp, (activation_forward_ref(out, inp.f64, n, KIND), op_dot(out, dout.f64, n)));
}

/* As the model runs it: dinp is dout. */
template <Activation KIND> static void activation_backward_in_place_test(OpRun* run)
{
    const size_t n = (size_t)run->dims[0];
    OpTensor<floatX> inp = op_input<floatX>(run, "inp", n, 0.0, 2.0);
    OpTensor<floatX> both = op_inout<floatX>(run, "dinp", n, 0.0, 1.0);
    OP_RUN(run, 3.0 * n * sizeof(floatX), 0, activation_backward(both.dev, both.dev, inp.dev, n, KIND, 0));
    activation_backward_ref(both.f64, both.f64, inp.f64, n, KIND);
    activation_backward_ref(both.f32, both.f32, inp.f32, n, KIND);
    op_check(run, both);
}

#define ACTIVATION_TESTS(NAME, function, names, epilogue) \
    {#function "_forward", activation_forward_test<Activation::NAME>, {1}, OpWhen::ALWAYS}, \
    {#function "_forward", activation_forward_test<Activation::NAME>, {4099}, OpWhen::ALWAYS}, \
    {#function "_forward", activation_forward_test<Activation::NAME>, {256 * 3072}, OpWhen::LARGE}, \
    {#function "_backward", activation_backward_test<Activation::NAME>, {1}, OpWhen::ALWAYS}, \
    {#function "_backward", activation_backward_test<Activation::NAME>, {1023}, OpWhen::ALWAYS}, \
    {#function "_backward", activation_backward_test<Activation::NAME>, {64 * 3072}, OpWhen::LARGE}, \
    {#function "_backward", activation_backward_in_place_test<Activation::NAME>, {8200}, OpWhen::ALWAYS}, \
    {#function "_forward", activation_forward_test<Activation::NAME>, {8192 * 3072}, OpWhen::BENCH}, \
    {#function "_backward", activation_backward_test<Activation::NAME>, {8192 * 3072}, OpWhen::BENCH},
static const OpTest activation_tests[] = {ACTIVATIONS(ACTIVATION_TESTS)};

#endif
