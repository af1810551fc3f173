/* matmul_tests.h: part of matmul.cuh: references and op tests. */
#pragma once
#include "optest.h"

/* Element (oc, ic) of a weight. */
template<class R> static R* matmul_at(R* weight, int oc, int ic, int IC, int OC, Layout layout)
{
    return layout == Layout::OUT_IN ? weight + (size_t)oc * IC + ic : weight + (size_t)ic * OC + oc;
}

template<class R> static void matmul_forward_ref(R* out, const R* inp, const R* weight, const R* bias, int N, int IC,
                                                 int OC, Layout layout)
{
    #pragma omp parallel for
    for (int n = 0; n < N; n++)
        for (int oc = 0; oc < OC; oc++) {
            const R* row = inp + (size_t)n * IC;
            R sum = bias != nullptr ? bias[oc] : 0;
            for (int ic = 0; ic < IC; ic++) sum += row[ic] * *matmul_at(weight, oc, ic, IC, OC, layout);
            out[(size_t)n * OC + oc] = sum;
        }
}

template<class R> static void matmul_backward_input_ref(R* dinp, const R* dout, const R* weight, int N, int IC, int OC,
                                                        Layout layout, bool accumulate)
{
    #pragma omp parallel for
    for (int n = 0; n < N; n++)
        for (int ic = 0; ic < IC; ic++) {
            const R* row = dout + (size_t)n * OC;
            R sum = accumulate ? dinp[(size_t)n * IC + ic] : 0;
            for (int oc = 0; oc < OC; oc++) sum += row[oc] * *matmul_at(weight, oc, ic, IC, OC, layout);
            dinp[(size_t)n * IC + ic] = sum;
        }
}

template<class R> static void matmul_backward_weight_ref(R* dweight, R* dbias, const R* dout, const R* inp, int N,
                                                         int IC, int OC, Layout layout, bool accumulate)
{
    #pragma omp parallel for
    for (int oc = 0; oc < OC; oc++) {
        for (int ic = 0; ic < IC; ic++) {
            R* sum = matmul_at(dweight, oc, ic, IC, OC, layout);
            if (!accumulate) *sum = 0;
            for (int n = 0; n < N; n++) *sum += dout[(size_t)n * OC + oc] * inp[(size_t)n * IC + ic];
        }
        if (dbias != nullptr)
            for (int n = 0; n < N; n++) dbias[oc] += dout[(size_t)n * OC + oc];
    }
}

/* dims: N, IC, OC, 1 with a bias. A few rows, as generation has them, are judged by the bytes of the weight, and on the
 * CPU have the bits of the large GEMM. */
template<Layout layout> static void matmul_forward_test_of(OpRun* run, bool few_rows)
{
    const int N = run->dims[0], IC = run->dims[1], OC = run->dims[2];
    const bool has_bias = run->dims[3] != 0;
    OpTensor<floatX> inp = op_input<floatX>(run, "inp", (size_t)N * IC, 0.0, 1.0);
    OpTensor<floatX> weight = op_input<floatX>(run, "weight", (size_t)OC * IC, 0.0, 1.0 / sqrt(IC));
    OpTensor<floatX> bias = op_input<floatX>(run, "bias", OC, 0.0, 1.0);
    OpTensor<floatX> out = op_output<floatX>(run, "out", (size_t)N * OC);
    OP_RUN(run, few_rows ? (double)IC * OC * sizeof(floatX) : 0, 2.0 * N * IC * OC,
           matmul_forward(out.dev, inp.dev, weight.dev, has_bias ? bias.dev : nullptr, N, IC, OC, layout, 0));
    matmul_forward_ref(out.f64, inp.f64, weight.f64, has_bias ? bias.f64 : nullptr, N, IC, OC, layout);
    matmul_forward_ref(out.f32, inp.f32, weight.f32, has_bias ? bias.f32 : nullptr, N, IC, OC, layout);
    op_check(run, out);
#ifdef DEVICE_CPU
    if (!few_rows) return;
    floatX* large = op_scratch<floatX>(run, (size_t)N * OC);
    gemm(large, OC, {inp.dev, (size_t)IC, false}, matmul_weight_cpu(weight.dev, IC, OC, layout), N, OC, IC,
         has_bias ? bias.dev : nullptr, false);
    size_t num_other = 0;
    for (size_t i = 0; i < out.n; i++) num_other += memcmp(&out.dev[i], &large[i], sizeof large[i]) != 0;
    op_verdict(run, "elements with other bits than gemm's", (double)num_other, 0);
#endif
}

template<Layout layout> static void matmul_forward_test(OpRun* run) { matmul_forward_test_of<layout>(run, false); }
template<Layout layout> static void matmul_few_rows_test(OpRun* run) { matmul_forward_test_of<layout>(run, true); }

/* dims: N, IC, OC, 1 to accumulate */
template<Layout layout> static void matmul_backward_input_test(OpRun* run)
{
    const int N = run->dims[0], IC = run->dims[1], OC = run->dims[2];
    const bool accumulate = run->dims[3] != 0;
    OpTensor<floatX> dout = op_input<floatX>(run, "dout", (size_t)N * OC, 0.0, 1.0);
    OpTensor<floatX> weight = op_input<floatX>(run, "weight", (size_t)OC * IC, 0.0, 1.0 / sqrt(OC));
    OpTensor<floatX> dinp = accumulate ? op_inout<floatX>(run, "dinp", (size_t)N * IC, 0.0, 1.0)
                                       : op_output<floatX>(run, "dinp", (size_t)N * IC);
    OP_RUN(run, 0, 2.0 * N * IC * OC,
           matmul_backward_input(dinp.dev, dout.dev, weight.dev, N, IC, OC, layout, accumulate, 0));
    matmul_backward_input_ref(dinp.f64, dout.f64, weight.f64, N, IC, OC, layout, accumulate);
    matmul_backward_input_ref(dinp.f32, dout.f32, weight.f32, N, IC, OC, layout, accumulate);
    op_check(run, dinp);
    if ((size_t)N * IC * OC > 1000000) return;
    OpTensor<floatX> inp = op_input<floatX>(run, "inp", (size_t)N * IC, 0.0, 1.0);
    double* out = op_host(run, (size_t)N * OC);
    OP_CHECK_GRAD(run, dinp, inp, (matmul_forward_ref<double>(out, inp.f64, weight.f64, nullptr, N, IC, OC, layout),
                                   op_dot(out, dout.f64, (size_t)N * OC)));
}

/* dims: N, IC, OC, 1 with a bias, and then dweight is added to, or 2: with a bias, and dweight is overwritten */
template<Layout layout> static void matmul_backward_weight_test(OpRun* run)
{
    const int N = run->dims[0], IC = run->dims[1], OC = run->dims[2];
    const bool has_bias = run->dims[3] != 0, accumulate = run->dims[3] == 1;
    OpTensor<floatX> dout = op_input<floatX>(run, "dout", (size_t)N * OC, 0.0, 1.0);
    OpTensor<floatX> inp = op_input<floatX>(run, "inp", (size_t)N * IC, 0.0, 1.0);
    OpTensor<float> dweight = accumulate ? op_inout<float>(run, "dweight", (size_t)OC * IC, 0.0, 1.0)
                                         : op_output<float>(run, "dweight", (size_t)OC * IC);
    OpTensor<float> dbias = op_inout<float>(run, "dbias", OC, 0.0, 1.0);
    float* scratch = op_scratch<float>(run, matmul_scratch_elems(OC));
    OP_RUN(run, 0, 2.0 * N * IC * OC,
           matmul_backward_weight(dweight.dev, has_bias ? dbias.dev : nullptr, scratch, dout.dev, inp.dev, N, IC, OC,
                                  layout, accumulate, 0));
    matmul_backward_weight_ref(dweight.f64, has_bias ? dbias.f64 : nullptr, dout.f64, inp.f64, N, IC, OC, layout,
                               accumulate);
    matmul_backward_weight_ref(dweight.f32, has_bias ? dbias.f32 : nullptr, dout.f32, inp.f32, N, IC, OC, layout,
                               accumulate);
    op_check(run, dweight);
    op_check(run, dbias);
    if ((size_t)N * IC * OC > 1000000) return;
    OpTensor<floatX> weight = op_input<floatX>(run, "weight", (size_t)OC * IC, 0.0, 1.0);
    OpTensor<floatX> bias = op_input<floatX>(run, "bias", OC, 0.0, 1.0);
    double* out = op_host(run, (size_t)N * OC);
    OP_CHECK_GRAD(run, dweight, weight, (matmul_forward_ref(out, inp.f64, weight.f64, bias.f64, N, IC, OC, layout),
                                         op_dot(out, dout.f64, (size_t)N * OC)));
    if (has_bias)
        OP_CHECK_GRAD(run, dbias, bias, (matmul_forward_ref(out, inp.f64, weight.f64, bias.f64, N, IC, OC, layout),
                                         op_dot(out, dout.f64, (size_t)N * OC)));
}

/* dims: N, IC, OC, 1 with a bias. The activation takes pre before it is rounded or after: both are within the rule. */
template<Layout layout, Activation kind> static void matmul_forward_act_test(OpRun* run)
{
    const int N = run->dims[0], IC = run->dims[1], OC = run->dims[2];
    const bool has_bias = run->dims[3] != 0;
    OpTensor<floatX> inp = op_input<floatX>(run, "inp", (size_t)N * IC, 0.0, 1.0);
    OpTensor<floatX> weight = op_input<floatX>(run, "weight", (size_t)OC * IC, 0.0, 1.0 / sqrt(IC));
    OpTensor<floatX> bias = op_input<floatX>(run, "bias", OC, 0.0, 1.0);
    OpTensor<floatX> pre = op_output<floatX>(run, "pre", (size_t)N * OC);
    OpTensor<floatX> out = op_output<floatX>(run, "out", (size_t)N * OC);
    OP_RUN(run, 0, 2.0 * N * IC * OC,
           matmul_forward_act(out.dev, pre.dev, inp.dev, weight.dev, has_bias ? bias.dev : nullptr, N, IC, OC, layout,
                              kind, 0));
    matmul_forward_ref(pre.f64, inp.f64, weight.f64, has_bias ? bias.f64 : nullptr, N, IC, OC, layout);
    matmul_forward_ref(pre.f32, inp.f32, weight.f32, has_bias ? bias.f32 : nullptr, N, IC, OC, layout);
    activation_forward_ref(out.f64, pre.f64, out.n, kind);
    activation_forward_ref(out.f32, pre.f32, out.n, kind);
    op_check(run, pre);
    op_check(run, out);
}

/* dims: N, IC, OC */
template<Layout layout, Activation kind> static void matmul_backward_input_act_test(OpRun* run)
{
    const int N = run->dims[0], IC = run->dims[1], OC = run->dims[2];
    OpTensor<floatX> dout = op_input<floatX>(run, "dout", (size_t)N * OC, 0.0, 1.0);
    OpTensor<floatX> weight = op_input<floatX>(run, "weight", (size_t)OC * IC, 0.0, 1.0 / sqrt(OC));
    OpTensor<floatX> pre = op_input<floatX>(run, "pre", (size_t)N * IC, 0.0, 2.0);
    OpTensor<floatX> dpre = op_output<floatX>(run, "dpre", (size_t)N * IC);
    OP_RUN(run, 0, 2.0 * N * IC * OC,
           matmul_backward_input_act(dpre.dev, dout.dev, weight.dev, pre.dev, N, IC, OC, layout, kind, 0));
    matmul_backward_input_ref(dpre.f64, dout.f64, weight.f64, N, IC, OC, layout, false);
    matmul_backward_input_ref(dpre.f32, dout.f32, weight.f32, N, IC, OC, layout, false);
    activation_backward_ref(dpre.f64, dpre.f64, pre.f64, dpre.n, kind);
    activation_backward_ref(dpre.f32, dpre.f32, pre.f32, dpre.n, kind);
    op_check(run, dpre);
}

#define MATMUL_ACT_TEST(name, layout, kind, when, ...) \
    {#name, name##_test<Layout::layout, Activation::kind>, {__VA_ARGS__}, OpWhen::when}
#define MATMUL_ACT_TESTS(name) \
    MATMUL_ACT_TEST(name, OUT_IN, GELU_TANH, ALWAYS, 7, 33, 65, 1), \
    MATMUL_ACT_TEST(name, IN_OUT, GELU_TANH, ALWAYS, 33, 96, 64, 1), \
    MATMUL_ACT_TEST(name, OUT_IN, GELU_TANH, ALWAYS, 65, 64, 200, 1), \
    MATMUL_ACT_TEST(name, OUT_IN, GELU_TANH, ALWAYS, 33, 64, 96), \
    MATMUL_ACT_TEST(name, IN_OUT, GELU_ERF, ALWAYS, 5, 72, 40, 1), \
    MATMUL_ACT_TEST(name, IN_OUT, GELU_TANH, BENCH, 1024, 768, 3072, 1)

/* Whatever the rule is for this GPU: with every optional epilogue, and without any. */
#ifdef DEVICE_CPU
#define MATMUL_FUSION_TESTS(fusion, FUSION)
#else
template<void (*test)(OpRun*), Fusion fusion> static void matmul_fusion_test(OpRun* run)
{
    const Fusion before = matmul_state.fusion;
    matmul_state.fusion = fusion;
    test(run);
    matmul_state.fusion = before;
}
#define MATMUL_FUSION_TEST(name, fusion, FUSION, when, test, ...) \
    {#name "_" #fusion, matmul_fusion_test<name##_test<test>, Fusion::FUSION>, {__VA_ARGS__}, OpWhen::when}
#define MATMUL_FUSION_TESTS(fusion, FUSION) \
    MATMUL_FUSION_TEST(matmul_backward_weight, fusion, FUSION, ALWAYS, Layout::OUT_IN, 33, 96, 64, 2), \
    MATMUL_FUSION_TEST(matmul_backward_weight, fusion, FUSION, ALWAYS, Layout::IN_OUT, 130, 64, 257, 1), \
    MATMUL_FUSION_TEST(matmul_backward_weight, fusion, FUSION, BENCH, Layout::IN_OUT, 1024, 768, 3072, 1), \
    MATMUL_FUSION_ACT_TESTS(matmul_forward_act, fusion, FUSION), \
    MATMUL_FUSION_ACT_TESTS(matmul_backward_input_act, fusion, FUSION),
#define GELU_OF(layout) Layout::layout, Activation::GELU_TANH
#define MATMUL_FUSION_ACT_TESTS(name, fusion, FUSION) \
    MATMUL_FUSION_TEST(name, fusion, FUSION, ALWAYS, GELU_OF(OUT_IN), 65, 64, 200, 1), \
    MATMUL_FUSION_TEST(name, fusion, FUSION, ALWAYS, GELU_OF(IN_OUT), 33, 64, 96), \
    MATMUL_FUSION_TEST(name, fusion, FUSION, BENCH, GELU_OF(IN_OUT), 1024, 768, 3072, 1)
#endif

#define MATMUL_TEST(name, layout, when, ...) {#name, name##_test<Layout::layout>, {__VA_ARGS__}, OpWhen::when}
#define MATMUL_TESTS(name) \
    MATMUL_TEST(name, OUT_IN, ALWAYS, 1, 1, 1, 1), MATMUL_TEST(name, IN_OUT, ALWAYS, 1, 1, 1, 1), \
    MATMUL_TEST(name, OUT_IN, ALWAYS, 7, 33, 65, 1), MATMUL_TEST(name, IN_OUT, ALWAYS, 7, 33, 65, 1), \
    MATMUL_TEST(name, OUT_IN, ALWAYS, 33, 96, 64), MATMUL_TEST(name, IN_OUT, ALWAYS, 33, 96, 64), \
    MATMUL_TEST(name, OUT_IN, ALWAYS, 130, 1, 257, 1), MATMUL_TEST(name, IN_OUT, ALWAYS, 130, 257, 1, 1), \
    MATMUL_TEST(name, OUT_IN, LARGE, 257, 768, 192, 1), MATMUL_TEST(name, IN_OUT, LARGE, 1030, 384, 1153, 1), \
    MATMUL_TEST(name, OUT_IN, LARGE, 64, 2300, 96, 1), MATMUL_TEST(name, IN_OUT, LARGE, 2000, 100, 130), \
    MATMUL_TEST(name, OUT_IN, LARGE, 1100, 3331, 20, 1), MATMUL_TEST(name, IN_OUT, LARGE, 1100, 20, 3331, 1), \
    MATMUL_TEST(name, IN_OUT, BENCH, 256, 768, 3072, 1), MATMUL_TEST(name, IN_OUT, BENCH, 1024, 768, 3072, 1), \
    MATMUL_TEST(name, OUT_IN, BENCH, 256, 768, 50304), MATMUL_TEST(name, IN_OUT, BENCH, 4096, 384, 1536, 1)

#define MATMUL_ROWS_TESTS(layout) \
    MATMUL_TEST(matmul_few_rows, layout, ALWAYS, 1, 70, 300, 1), \
    MATMUL_TEST(matmul_few_rows, layout, ALWAYS, 2, 257, 33), MATMUL_TEST(matmul_few_rows, layout, ALWAYS, 4, 16, 5), \
    MATMUL_TEST(matmul_few_rows, layout, ALWAYS, 8, 131, 64, 1), \
    MATMUL_TEST(matmul_few_rows, layout, LARGE, 1, 768, 2304, 1), \
    MATMUL_TEST(matmul_few_rows, layout, LARGE, 4, 3072, 770, 1), \
    MATMUL_TEST(matmul_few_rows, layout, BENCH, 1, 2048, 5632), \
    MATMUL_TEST(matmul_few_rows, layout, BENCH, 4, 2048, 5632), \
    MATMUL_TEST(matmul_few_rows, layout, BENCH, 8, 2048, 5632)

/* `n` values as the input `name`. */
static const floatX* matmul_given(OpRun* run, const char* name, const double* values, size_t n)
{
    OpTensor<floatX> tensor = op_input<floatX>(run, name, n, 0.0, 1.0);
    floatX* h = (floatX*)op_start_bytes(run, name);
    for (size_t i = 0; i < n; i++) store_f(&h[i], (float)values[i]);
    op_upload(run, name);
    return tensor.dev;
}

/* Two layers with relu between them on two ranks, the first cut by output, the second by input, by hand: the ranks'
 * parts of y add up to (5,5), those of dx to (4,3). */
static void matmul_ranks_trial(OpRun* run)
{
    const int ranks = run->dims[0], C = 2, F = 2;                    // F: of a rank
    const double x[] = {1, 2}, w1[] = {1, -1, 0, 1, /* rank 1 */ 2, 0, 1, -1}, h[] = {1, 1, 4, 0}, dy[] = {1, 1};
    const double w2[] = {1, 0, 0, 1, /* rank 1 */ 1, 1, 2, 0}, dpre[] = {1, 1, 2, 0};
    const double pre_ref[] = {1, 1, 4, -2}, y_ref[] = {1, 1, 4, 4}, dh_ref[] = {1, 1, 2, 2}, dx_ref[] = {0, 1, 4, 2};
    const floatX *x_dev = matmul_given(run, "x", x, C), *w1_dev = matmul_given(run, "w1", w1, ranks * C * F);
    const floatX *h_dev = matmul_given(run, "h", h, ranks * F), *w2_dev = matmul_given(run, "w2", w2, ranks * F * C);
    const floatX *dy_dev = matmul_given(run, "dy", dy, C), *dpre_dev = matmul_given(run, "dpre", dpre, ranks * F);
    OpTensor<floatX> pre = op_output<floatX>(run, "pre", ranks * F), y = op_output<floatX>(run, "y", ranks * C);
    OpTensor<floatX> dh = op_output<floatX>(run, "dh", ranks * F), dx = op_output<floatX>(run, "dx", ranks * C);
    auto all_ranks = [&] {
        for (int p = 0; p < ranks; p++) {
            const floatX *w1_p = w1_dev + p * C * F, *w2_p = w2_dev + p * F * C;
            matmul_forward(pre.dev + p * F, x_dev, w1_p, nullptr, 1, C, F, Layout::IN_OUT, 0);
            matmul_forward(y.dev + p * C, h_dev + p * F, w2_p, nullptr, 1, F, C, Layout::IN_OUT, 0);
            matmul_backward_input(dh.dev + p * F, dy_dev, w2_p, 1, F, C, Layout::IN_OUT, false, 0);
            matmul_backward_input(dx.dev + p * C, dpre_dev + p * F, w1_p, 1, C, F, Layout::IN_OUT, false, 0);
        }
    };
    OP_RUN(run, 0, 0, all_ranks());
    const struct { const char* name; const double* ref; } results[] = {
        {"pre", pre_ref}, {"y", y_ref}, {"dh", dh_ref}, {"dx", dx_ref}};
    for (const auto& result : results)
        for (int i = 0; i < 2 * ranks; i++)
            op_check_value(run, result.name, load_f(((const floatX*)op_result(run, result.name))[i]), result.ref[i], 0);
}

static const OpTest matmul_tests[] = {
    {"matmul, two layers on two ranks", matmul_ranks_trial, {2}, OpWhen::ALWAYS},
    MATMUL_ROWS_TESTS(OUT_IN), MATMUL_ROWS_TESTS(IN_OUT),
    MATMUL_TESTS(matmul_forward), MATMUL_TESTS(matmul_backward_input), MATMUL_TESTS(matmul_backward_weight),
    MATMUL_TEST(matmul_backward_weight, OUT_IN, ALWAYS, 7, 33, 65, 2),
    MATMUL_TEST(matmul_backward_weight, IN_OUT, ALWAYS, 600, 33, 65, 2),
    MATMUL_ACT_TESTS(matmul_forward_act), MATMUL_ACT_TESTS(matmul_backward_input_act),
    MATMUL_FUSION_TESTS(fused, ALL) MATMUL_FUSION_TESTS(unfused, NONE)
};
