/* norm_tests.h: the op tests of layernorm.cuh and rmsnorm.cuh. `Ops` names the launchers of one of them, and says
 * whether it is CENTERED; if not, mean and bias, which only LayerNorm has, are null in the references and unchecked. */
#pragma once
#include "norm.cuh"
#include "optest.h"

static const float NORM_TEST_EPS = 1e-5f;

template <class Ops, class T> static T* if_centered(T* p) { return Ops::CENTERED ? p : nullptr; }

template <class R> static void norm_forward_ref(R* out, R* mean, R* rstd, const R* inp, const R* weight, const R* bias,
                                                int N, int C, R eps)
{
    for (int n = 0; n < N; n++) {
        const R* x = inp + (size_t)n * C;
        R m = 0, sum_squares = 0;
        if (mean != nullptr) {
            for (int c = 0; c < C; c++) m += x[c];
            mean[n] = m /= C;
        }
        for (int c = 0; c < C; c++) sum_squares += (x[c] - m) * (x[c] - m);
        rstd[n] = 1 / std::sqrt(sum_squares / C + eps);
        for (int c = 0; c < C; c++)
            out[(size_t)n * C + c] = (x[c] - m) * rstd[n] * weight[c] + (bias != nullptr ? bias[c] : 0);
    }
}

template <class R> static void norm_backward_ref(R* dinp, R* dweight, R* dbias, const R* dout, const R* inp,
                                                 const R* weight, const R* mean, const R* rstd, int N, int C)
{
    for (int n = 0; n < N; n++) {
        const R *x = inp + (size_t)n * C, *dy = dout + (size_t)n * C, m = mean != nullptr ? mean[n] : 0;
        R sum_g = 0, sum_g_xhat = 0;
        for (int c = 0; c < C; c++) {
            if (mean != nullptr) sum_g += dy[c] * weight[c];
            sum_g_xhat += dy[c] * weight[c] * ((x[c] - m) * rstd[n]);
        }
        for (int c = 0; c < C; c++) {
            const R xhat = (x[c] - m) * rstd[n];
            dinp[(size_t)n * C + c] += rstd[n] * (dy[c] * weight[c] - sum_g / C - xhat * (sum_g_xhat / C));
            dweight[c] += dy[c] * xhat;
            if (dbias != nullptr) dbias[c] += dy[c];
        }
    }
}

/* With residual: inp is a + b, rounded; it is checked to be that, and is stored over a, as in the model. */
template <class Ops, class P, bool RESIDUAL> static void norm_forward_test(OpRun* run)
{
    const int N = run->dims[0], C = run->dims[1];
    const size_t n = (size_t)N * C;
    const float eps = NORM_TEST_EPS;
    OpTensor<floatX> inp = RESIDUAL ? op_inout<floatX>(run, "residual", n, 0.5, 2.0)
                                    : op_input<floatX>(run, "inp", n, 0.5, 2.0);
    OpTensor<floatX> b = op_input<floatX>(run, "b", n, 0.0, 1.0), out = op_output<floatX>(run, "out", n);
    OpTensor<P> weight = op_input<P>(run, "weight", C, 1.0, 0.3), bias = op_input<P>(run, "bias", C, 0.0, 0.3);
    OpTensor<float> mean = op_output<float>(run, "mean", N), rstd = op_output<float>(run, "rstd", N);
    OP_RUN(run, (RESIDUAL ? 4.0 : 2.0) * n * sizeof(floatX), 0,
           Ops::forward(RESIDUAL ? inp.dev : nullptr, out.dev, mean.dev, rstd.dev, inp.dev, b.dev, weight.dev, bias.dev,
                        N, C, eps));
    if (RESIDUAL)
        for (size_t i = 0; i < n; i++)
            inp.f64[i] = inp.f32[i] = op_round(inp.f32[i] + b.f32[i], (const floatX*)nullptr);
    norm_forward_ref(out.f64, if_centered<Ops>(mean.f64), rstd.f64, inp.f64, weight.f64,
                     if_centered<Ops>(bias.f64), N, C, (double)eps);
    norm_forward_ref(out.f32, if_centered<Ops>(mean.f32), rstd.f32, inp.f32, weight.f32,
                     if_centered<Ops>(bias.f32), N, C, eps);
    if (RESIDUAL) op_check_exact(run, inp);
    op_check(run, out);
    if (Ops::CENTERED) op_check_terms(run, mean, op_largest(inp.f64, n));
    op_check_relative(run, rstd);
}

template <class Ops, class P> static void norm_backward_test(OpRun* run)
{
    const int N = run->dims[0], C = run->dims[1];
    const size_t n = (size_t)N * C;
    OpTensor<floatX> dout = op_input<floatX>(run, "dout", n, 0.0, 1.0), inp = op_input<floatX>(run, "inp", n, 0.5, 2.0);
    OpTensor<P> weight = op_input<P>(run, "weight", C, 1.0, 0.3);
    OpTensor<float> mean = op_input<float>(run, "mean", N, 0.5, 0.1), rstd = op_input<float>(run, "rstd", N, 0.5, 0.02);
    OpTensor<floatX> dinp = op_inout<floatX>(run, "dinp", n, 0.0, 1.0);
    OpTensor<float> dweight = op_inout<float>(run, "dweight", C, 0.0, 1.0);
    OpTensor<float> dbias = op_inout<float>(run, "dbias", C, 0.0, 1.0);
    float* scratch = op_scratch<float>(run, Ops::scratch_elems(C));
    OP_RUN(run, 4.0 * n * sizeof(floatX), 0,
           Ops::backward(dinp.dev, dweight.dev, dbias.dev, scratch, dout.dev, inp.dev, weight.dev, mean.dev, rstd.dev,
                         N, C));
    norm_backward_ref(dinp.f64, dweight.f64, if_centered<Ops>(dbias.f64), dout.f64, inp.f64, weight.f64,
                      if_centered<Ops>(mean.f64), rstd.f64, N, C);
    norm_backward_ref(dinp.f32, dweight.f32, if_centered<Ops>(dbias.f32), dout.f32, inp.f32, weight.f32,
                      if_centered<Ops>(mean.f32), rstd.f32, N, C);
    op_check(run, dinp);
    op_check(run, dweight);
    if (Ops::CENTERED) op_check(run, dbias);
}

/* The references themselves: with the forward's own mean and rstd the gradients are the derivatives of the forward. */
template <class Ops> static void norm_gradient_test(OpRun* run)
{
    const int N = run->dims[0], C = run->dims[1];
    const size_t n = (size_t)N * C;
    OpTensor<floatX> dout = op_input<floatX>(run, "dout", n, 0.0, 1.0), inp = op_input<floatX>(run, "inp", n, 0.5, 2.0);
    OpTensor<floatX> weight = op_input<floatX>(run, "weight", C, 1.0, 0.3);
    OpTensor<floatX> bias = op_input<floatX>(run, "bias", C, 0.0, 0.3);
    OpTensor<floatX> dinp = op_inout<floatX>(run, "dinp", n, 0.0, 1.0);
    OpTensor<float> dweight = op_inout<float>(run, "dweight", C, 0.0, 1.0);
    OpTensor<float> dbias = op_inout<float>(run, "dbias", C, 0.0, 1.0);
    double *out = op_host(run, n), *rstd = op_host(run, N), *mean = if_centered<Ops>(op_host(run, N));
    const double *b = if_centered<Ops>(bias.f64), eps = NORM_TEST_EPS;
    norm_forward_ref(out, mean, rstd, inp.f64, weight.f64, b, N, C, eps);
    norm_backward_ref(dinp.f64, dweight.f64, if_centered<Ops>(dbias.f64), dout.f64, inp.f64, weight.f64, mean,
                      rstd, N, C);
#define NORM_OBJECTIVE (norm_forward_ref(out, mean, rstd, inp.f64, weight.f64, b, N, C, eps), op_dot(out, dout.f64, n))
    OP_CHECK_GRAD(run, dinp, inp, NORM_OBJECTIVE);
    OP_CHECK_GRAD(run, dweight, weight, NORM_OBJECTIVE);
    if (Ops::CENTERED) OP_CHECK_GRAD(run, dbias, bias, NORM_OBJECTIVE);
#undef NORM_OBJECTIVE
}

/* The rows of NAME_tests: NAME_forward, residual_NAME_forward, NAME_backward, NAME_gradient. */
#define NORM_ROW(name, run, when, ...) {name, run, {__VA_ARGS__}, OpWhen::when}
#define NORM_TESTS(name, Ops) \
    NORM_ROW(name "_forward", (norm_forward_test<Ops, floatX, false>), ALWAYS, 1, 1), \
    NORM_ROW(name "_forward", (norm_forward_test<Ops, floatX, false>), ALWAYS, 1, 768), \
    NORM_ROW(name "_forward", (norm_forward_test<Ops, floatX, false>), ALWAYS, 37, 129), \
    NORM_ROW(name "_forward", (norm_forward_test<Ops, floatX, false>), ALWAYS, 9, 4), \
    NORM_ROW(name "_forward", (norm_forward_test<Ops, floatX, false>), LARGE, 1000, 1600), \
    NORM_ROW(name "_forward", (norm_forward_test<Ops, floatX, false>), LARGE, 3, 20000), \
    NORM_ROW("residual_" name "_forward", (norm_forward_test<Ops, floatX, true>), ALWAYS, 1, 3), \
    NORM_ROW("residual_" name "_forward", (norm_forward_test<Ops, floatX, true>), ALWAYS, 13, 256), \
    NORM_ROW("residual_" name "_forward", (norm_forward_test<Ops, floatX, true>), ALWAYS, 11, 77), \
    NORM_ROW("residual_" name "_forward", (norm_forward_test<Ops, floatX, true>), LARGE, 1000, 2048), \
    NORM_ROW(name "_backward", (norm_backward_test<Ops, floatX>), ALWAYS, 1, 1), \
    NORM_ROW(name "_backward", (norm_backward_test<Ops, floatX>), ALWAYS, 1, 768), \
    NORM_ROW(name "_backward", (norm_backward_test<Ops, floatX>), ALWAYS, 67, 129), \
    NORM_ROW(name "_backward", (norm_backward_test<Ops, floatX>), ALWAYS, 70, 2056), \
    NORM_ROW(name "_backward", (norm_backward_test<Ops, floatX>), ALWAYS, 5, 1031), \
    NORM_ROW(name "_backward", (norm_backward_test<Ops, floatX>), LARGE, 2048, 768), \
    NORM_ROW(name "_backward", (norm_backward_test<Ops, floatX>), LARGE, 600, 20000), \
    NORM_ROW(name "_gradient", norm_gradient_test<Ops>, ALWAYS, 3, 5), \
    NORM_ROW(name "_gradient", norm_gradient_test<Ops>, ALWAYS, 4, 64), \
    NORM_ROW(name "_forward", (norm_forward_test<Ops, floatX, false>), BENCH, 16384, 768), \
    NORM_ROW("residual_" name "_forward", (norm_forward_test<Ops, floatX, true>), BENCH, 16384, 768), \
    NORM_ROW(name "_backward", (norm_backward_test<Ops, floatX>), BENCH, 16384, 768), \
    NORM_ROW(name "_backward", (norm_backward_test<Ops, floatX>), BENCH, 16384, 2048), \
    NORM_16_BIT_TESTS(name, Ops)
#ifdef PREC_FP32
#define NORM_16_BIT_TESTS(name, Ops)
#else
#define NORM_16_BIT_TESTS(name, Ops) \
    NORM_ROW(name "_forward, fp32 weight", (norm_forward_test<Ops, float, false>), ALWAYS, 37, 129), \
    NORM_ROW(name "_forward, fp32 weight", (norm_forward_test<Ops, float, false>), ALWAYS, 9, 768), \
    NORM_ROW("residual_" name "_forward, fp32 weight", (norm_forward_test<Ops, float, true>), ALWAYS, 13, 256), \
    NORM_ROW(name "_backward, fp32 weight", (norm_backward_test<Ops, float>), ALWAYS, 67, 129), \
    NORM_ROW(name "_backward, fp32 weight", (norm_backward_test<Ops, float>), ALWAYS, 70, 2056)
#endif
