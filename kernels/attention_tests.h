/* attention_tests.h: part of attention.cuh: its op tests. */
#pragma once
#include "optest.h"

/* Plain attention, row by row, with the row's probabilities of keys from `first` on. p has room for T. */
template<class R> static void attention_row_ref(R* p, R* lse, const R* q, const R* k, size_t ld, int first, int i,
                                                int HS, R scale)
{
    R max = -INFINITY, sum = 0;
    for (int j = first; j <= i; j++) {
        p[j] = 0;
        for (int d = 0; d < HS; d++) p[j] += q[d] * k[j * ld + d];
        p[j] *= scale;
        if (p[j] > max) max = p[j];
    }
    for (int j = first; j <= i; j++) sum += p[j] = std::exp(p[j] - max);
    for (int j = first; j <= i; j++) p[j] /= sum;
    *lse = max + std::log(sum);
}

/* k of one score, as dropout.cuh's own reference has it. */
static double attention_keep_ref(const Dropout& d, AttentionDims a, int b, int h, int i, int j)
{
    return dropout_keeps_ref(d, b, h, (uint32_t)i * a.T + j) ? (double)d.scale : 0;
}

/* As attention_first_key; of the references a.spans are host memory. */
static int attention_first_ref(AttentionDims a, int b, int i)
{
    return a.spans.first_key != nullptr ? a.spans.first_key[(size_t)b * a.T + i] : 0;
}

template<class R> static void attention_forward_ref(R* out, R* lse, const R* qkv, AttentionDims a, Dropout drop)
{
    const size_t ld = attention_ld_qkv(a);
    #pragma omp parallel for
    for (int item = 0; item < a.B * a.NH; item++) {
        const int b = item / a.NH, h = item % a.NH, kv_head = h / (a.NH / a.NKV);
        const R *q = qkv + attention_q(a, b, h), *k = qkv + attention_k(a, b, kv_head);
        const R* v = qkv + attention_v(a, b, kv_head);
        R* p = (R*)op_alloc(a.T * sizeof(R));
        for (int i = 0; i < a.T; i++) {
            const int first = attention_first_ref(a, b, i);
            attention_row_ref(p, &lse[attention_l(a, b, h) + i], q + i * ld, k, ld, first, i, a.HS, (R)a.scale);
            R* o = out + attention_o(a, b, h) + i * attention_ld_out(a);
            for (int d = 0; d < a.HS; d++) {
                o[d] = 0;
                for (int j = first; j <= i; j++)
                    o[d] += p[j] * v[j * ld + d] * (R)attention_keep_ref(drop, a, b, h, i, j);
            }
        }
        free(p);
    }
}

/* As the op: from what the forward left in out and lse. */
template<class R> static void attention_backward_ref(R* dqkv, const R* dout, const R* out, const R* lse, const R* qkv,
                                                     AttentionDims a, Dropout drop)
{
    const size_t ld = attention_ld_qkv(a);
    const R scale = a.scale;
    memset(dqkv, 0, a.B * a.T * ld * sizeof(R));
    #pragma omp parallel for
    for (int b = 0; b < a.B; b++)
        for (int h = 0; h < a.NH; h++)
            for (int i = 0; i < a.T; i++) {
                const int kv_head = h / (a.NH / a.NKV);
                const size_t q = attention_q(a, b, h) + i * ld, k = attention_k(a, b, kv_head);
                const size_t v = attention_v(a, b, kv_head);
                const size_t o = attention_o(a, b, h) + i * attention_ld_out(a);
                R delta = 0;
                for (int d = 0; d < a.HS; d++) delta += dout[o + d] * out[o + d];
                for (int j = attention_first_ref(a, b, i); j <= i; j++) {
                    R score = 0, dp = 0;
                    for (int d = 0; d < a.HS; d++) score += qkv[q + d] * qkv[k + j * ld + d];
                    for (int d = 0; d < a.HS; d++) dp += dout[o + d] * qkv[v + j * ld + d];
                    const R p = std::exp(score * scale - lse[attention_l(a, b, h) + i]);
                    const R keep = (R)attention_keep_ref(drop, a, b, h, i, j), ds = p * (keep * dp - delta) * scale;
                    for (int d = 0; d < a.HS; d++) {
                        dqkv[q + d] += ds * qkv[k + j * ld + d];
                        dqkv[k + j * ld + d] += ds * qkv[q + d];
                        dqkv[v + j * ld + d] += keep * p * dout[o + d];
                    }
                }
            }
}

/* dims: B, T, NH, NKV, HS, percent that dropout drops, window, mean length of a document */
static Dropout attention_test_dropout(const OpRun* run)
{
    return run->dims[5] > 0 ? dropout_site(42, 1, 2, 77, run->dims[5] / 100.0) : dropout_site(42, 1, 2, 77, 0);
}
static AttentionDims attention_test_dims(const OpRun* run)
{
    const int* d = run->dims;
    return attention_dims(d[0], d[1], d[2], d[3], d[4], 1.0f / sqrtf((float)d[4]), {});
}

/* The dims' window and documents, on the device; those of the host to a->spans, for the references. */
static AttentionSpans attention_test_spans(OpRun* run, AttentionDims* a)
{
    const int window = run->dims[6], mean = run->dims[7], n = a->B * a->T;
    if (window == 0 && mean == 0) return {};
    const OpInts positions = spans_test_positions(run, a->B, a->T, mean);
    OpInts first_key = op_ints(run, "first_key", n, 0, 1), last_query = op_ints(run, "last_query", n, 0, 1);
    for (int i = 0; i < n; i++) {
        const int* own = mean > 0 ? positions.h + (i - i % a->T) : nullptr;
        first_key.h[i] = spans_first_key(own, window, i % a->T);
        last_query.h[i] = spans_last_query(own, window, i % a->T, a->T);
        a->spans.pairs += i % a->T - first_key.h[i] + 1;
    }
    op_upload(run, "first_key");
    op_upload(run, "last_query");
    a->spans.first_key = first_key.h;
    a->spans.last_query = last_query.h;
    return {first_key.dev, last_query.dev, a->spans.pairs};
}

static void attention_forward_test(OpRun* run)
{
    AttentionDims a = attention_test_dims(run);
    const AttentionSpans spans = attention_test_spans(run, &a);
    const Dropout drop = attention_test_dropout(run);
    OpTensor<floatX> qkv = op_input<floatX>(run, "qkv", a.B * a.T * attention_ld_qkv(a), 0.0, 1.5);
    OpTensor<floatX> out = op_output<floatX>(run, "out", a.B * a.T * attention_ld_out(a));
    OpTensor<float> lse = op_output<float>(run, "lse", (size_t)a.B * a.NH * a.T);
    float* scratch = op_scratch<float>(run, attention_scratch_elems(a.B, a.T, a.NH, a.HS));
    OP_RUN(run, 0, attention_flops(2, a),
           attention_forward(out.dev, lse.dev, scratch, qkv.dev, a.B, a.T, a.NH, a.NKV, a.HS, a.scale, 0,
                             drop, spans));
    attention_forward_ref(out.f64, lse.f64, qkv.f64, a, drop);
    attention_forward_ref(out.f32, lse.f32, qkv.f32, a, drop);
    op_check(run, out);
    op_check(run, lse);
}

/* The double reference continues from out and lse in double; ours and the plain one from those rounded. */
static void attention_backward_test(OpRun* run)
{
    AttentionDims a = attention_test_dims(run);
    const AttentionSpans spans = attention_test_spans(run, &a);
    const Dropout drop = attention_test_dropout(run);
    OpTensor<floatX> qkv = op_input<floatX>(run, "qkv", a.B * a.T * attention_ld_qkv(a), 0.0, 1.5);
    OpTensor<floatX> dout = op_input<floatX>(run, "dout", a.B * a.T * attention_ld_out(a), 0.0, 1.0);
    OpTensor<floatX> dqkv = op_output<floatX>(run, "dqkv", qkv.n);
    const size_t num_lse = (size_t)a.B * a.NH * a.T;
    double *out64 = op_host(run, dout.n), *lse64 = op_host(run, num_lse);
    memset(out64, 0, dout.n * sizeof(double)), memset(lse64, 0, num_lse * sizeof(double));
    if (!run->bench) attention_forward_ref(out64, lse64, qkv.f64, a, drop);
    floatX* h_out = (floatX*)op_alloc(dout.n * sizeof(floatX));
    float *out32 = (float*)op_alloc(dout.n * sizeof(float)), *lse32 = (float*)op_alloc(num_lse * sizeof(float));
    for (size_t i = 0; i < num_lse; i++) lse32[i] = (float)lse64[i];
    for (size_t i = 0; i < dout.n; i++) {
        store_f(&h_out[i], (float)out64[i]);
        out32[i] = load_f(h_out[i]);
    }
    const floatX* out = (const floatX*)op_bytes(run, "out", OpKind::INPUT, h_out, dout.n * sizeof(floatX));
    const float* lse = (const float*)op_bytes(run, "lse", OpKind::INPUT, lse32, num_lse * sizeof(float));
    float* scratch = op_scratch<float>(run, attention_scratch_elems(a.B, a.T, a.NH, a.HS));
    OP_RUN(run, 0, attention_flops(5, a),
           attention_backward(dqkv.dev, scratch, dout.dev, out, lse, qkv.dev, a.B, a.T, a.NH, a.NKV, a.HS, a.scale, 0,
                              drop, spans));
    attention_backward_ref(dqkv.f64, dout.f64, out64, lse64, qkv.f64, a, drop);
    attention_backward_ref(dqkv.f32, dout.f32, out32, lse32, qkv.f32, a, drop);
    op_check(run, dqkv);
    free(h_out);
    free(out32);
    free(lse32);
    if (a.T > 100) return;
    OP_CHECK_GRAD(run, dqkv, qkv, (attention_forward_ref(out64, lse64, qkv.f64, a, drop),
                                  op_dot(out64, dout.f64, dout.n)));
}

#if !defined(DEVICE_CPU) && !defined(PREC_FP32)
/* dq with none, one and both of its left operands in registers, whatever this architecture's choice. */
enum { HELD_CHOICES = 3 };
template <int HSP, bool DROPS>
static void attention_backward_q_choices(const OpTensor<floatX> (&dqkv)[HELD_CHOICES], const floatX* dout,
                                         const float* stats, const floatX* qkv, AttentionDims a, Dropout drop)
{
    attention_backward_q_mma<HSP, DROPS, 0>(dqkv[0].dev, dout, stats, qkv, a, drop, 0);
    attention_backward_q_mma<HSP, DROPS, 1>(dqkv[1].dev, dout, stats, qkv, a, drop, 0);
    attention_backward_q_mma<HSP, DROPS, 2>(dqkv[2].dev, dout, stats, qkv, a, drop, 0);
}

/* All give the bits of the op. out and lse need not be a forward's. */
static void attention_held_test(OpRun* run)
{
    AttentionDims a = attention_test_dims(run);
    const AttentionSpans spans = attention_test_spans(run, &a);
    const Dropout drop = attention_test_dropout(run);
    const size_t ld = attention_ld_qkv(a), n = a.B * a.T * ld;
    OpTensor<floatX> qkv = op_input<floatX>(run, "qkv", n, 0.0, 1.5);
    OpTensor<floatX> dout = op_input<floatX>(run, "dout", a.B * a.T * attention_ld_out(a), 0.0, 1.0);
    OpTensor<floatX> out = op_input<floatX>(run, "out", dout.n, 0.0, 1.0);
    OpTensor<float> lse = op_input<float>(run, "lse", (size_t)a.B * a.NH * a.T, 3.0, 0.5);
    float* scratch = op_scratch<float>(run, attention_scratch_elems(a.B, a.T, a.NH, a.HS));
    OpTensor<floatX> dqkv = op_output<floatX>(run, "dqkv", n);
    static const char* const names[HELD_CHOICES] = {"dq, none held", "dq, q held", "dq, q and dout held"};
    OpTensor<floatX> choices[HELD_CHOICES];
    for (int i = 0; i < HELD_CHOICES; i++) choices[i] = op_output<floatX>(run, names[i], n);
    OP_RUN(run, 0, 0,
           attention_backward(dqkv.dev, scratch, dout.dev, out.dev, lse.dev, qkv.dev, a.B, a.T, a.NH, a.NKV, a.HS,
                              a.scale, 0, drop, spans);
           a.spans = spans;
           ATTENTION_FOR_HEAD_SIZE(a.HS, drop, attention_backward_q_choices, choices, dout.dev, scratch, qkv.dev, a,
                                   drop));
    const floatX* dq = (const floatX*)op_result(run, "dqkv");
    for (const char* name : names) {
        const floatX* choice = (const floatX*)op_result(run, name);
        size_t num_other = 0;
        for (size_t i = 0; i < n; i++)               // dk and dv, behind the queries of a row, are another kernel's
            num_other += i % ld < (size_t)a.NH * a.HS && memcmp(&dq[i], &choice[i], sizeof *dq) != 0;
        op_check_value(run, name, (double)num_other, 0, 0);
    }
}
#define ATTENTION_HELD_TEST(...) , ATTENTION_TEST(attention_held, ALWAYS, __VA_ARGS__)

#ifdef DEVICE_EMU
/* Tensor-core instructions of all warps for num_tiles tiles each, of num_gemms GEMMs. */
static double attention_mma_of(AttentionDims a, int row_tiles, int slice, int num_gemms, double num_tiles)
{
    const double num_warps = (double)a.B * a.NH * ceil_div(a.T, 16 * row_tiles);
    return num_warps * num_tiles * row_tiles * (slice / 8) * (a.HS / 16) * num_gemms;
}

/* Of eight documents in a sequence the kernels multiply an eighth of what causal attention does, and tiles at the
 * edges: two of each warp, and in the forward those that other warps of its block need. dims as above; HS 64 or 128. */
template <int HSP> static void attention_tiles_test(OpRun* run)
{
    typedef MmaShape<HSP> S;
    AttentionDims a = attention_test_dims(run);
    const size_t n = (size_t)a.B * a.T;
    OpTensor<floatX> qkv = op_input<floatX>(run, "qkv", n * attention_ld_qkv(a), 0.0, 1.5);
    OpTensor<floatX> dout = op_input<floatX>(run, "dout", n * attention_ld_out(a), 0.0, 1.0);
    OpTensor<floatX> out = op_output<floatX>(run, "out", dout.n), dqkv = op_output<floatX>(run, "dqkv", qkv.n);
    OpTensor<float> lse = op_output<float>(run, "lse", n * a.NH);
    OpInts positions = op_ints(run, "positions", n, 0, 1);
    for (size_t i = 0; i < n; i++) positions.h[i] = (int)(i % a.T) % (int)ceil_div(a.T, 8);
    op_upload(run, "positions");
    int* first_key = (int*)op_bytes(run, "first_key", OpKind::OUTPUT, nullptr, n * sizeof(int));
    int* last_query = (int*)op_bytes(run, "last_query", OpKind::OUTPUT, nullptr, n * sizeof(int));
    float* scratch = op_scratch<float>(run, attention_scratch_elems(a.B, a.T, a.NH, a.HS));
    double num_mma[2][2];                            // [backward][documents]
    auto count = [&](bool documents) {
        const AttentionSpans spans = documents ? AttentionSpans{first_key, last_query, 0} : AttentionSpans{};
        const uint64_t start = emu_num_mma;
        attention_forward(out.dev, lse.dev, scratch, qkv.dev, a.B, a.T, a.NH, a.NKV, a.HS, a.scale, 0, {}, spans);
        CUDA_CHECK(cudaDeviceSynchronize());
        const uint64_t middle = emu_num_mma;
        attention_backward(dqkv.dev, scratch, dout.dev, out.dev, lse.dev, qkv.dev, a.B, a.T, a.NH, a.NKV, a.HS,
                           a.scale, 0, {}, spans);
        CUDA_CHECK(cudaDeviceSynchronize());
        num_mma[0][documents] = (double)(middle - start);
        num_mma[1][documents] = (double)(emu_num_mma - middle);
    };
    OP_RUN(run, 0, 0, attention_spans(first_key, last_query, positions.dev, 0, a.B, a.T, 0); count(false); count(true));
    const double edges[] = {attention_mma_of(a, S::M_FORWARD, S::TILE_FORWARD, 2,
                                             2 + S::ROWS_FORWARD / S::TILE_FORWARD),
                            attention_mma_of(a, S::M_BACKWARD, S::SLICE_Q, 3, 2) +
                            attention_mma_of(a, S::M_BACKWARD, S::SLICE_KV, 4, 2)};
    for (int backward = 0; backward < 2; backward++)
        op_verdict(run, backward ? "backward, mma of documents" : "forward, mma of documents", num_mma[backward][1],
                   num_mma[backward][0] / 8 + edges[backward]);
}
#define ATTENTION_TILES_TESTS \
    , {"attention_tiles", attention_tiles_test<64>, {1, 1024, 1, 1, 64}, OpWhen::ALWAYS}, \
    {"attention_tiles", attention_tiles_test<64>, {1, 1000, 1, 1, 64}, OpWhen::ALWAYS}, \
    {"attention_tiles", attention_tiles_test<128>, {1, 1000, 1, 1, 128}, OpWhen::ALWAYS}
#else
#define ATTENTION_TILES_TESTS
#endif
#define ATTENTION_HELD_TESTS \
    ATTENTION_HELD_TEST(2, 70, 2, 1, 64) ATTENTION_HELD_TEST(1, 131, 2, 2, 40) ATTENTION_HELD_TEST(1, 66, 2, 1, 64, 20) \
    ATTENTION_HELD_TEST(1, 97, 2, 1, 128) ATTENTION_HELD_TEST(1, 40, 2, 2, 104, 30) \
    ATTENTION_HELD_TEST(1, 37, 1, 1, 256) ATTENTION_HELD_TEST(1, 35, 1, 1, 136, 10) \
    ATTENTION_HELD_TEST(1, 131, 2, 1, 64, 0, 20, 50)
#else
#define ATTENTION_HELD_TESTS
#define ATTENTION_TILES_TESTS
#endif

#define ATTENTION_TEST(name, when, ...) {#name, name##_test, {__VA_ARGS__}, OpWhen::when}
#define ATTENTION_TESTS(name) \
    ATTENTION_TEST(name, ALWAYS, 1, 1, 1, 1, 1), ATTENTION_TEST(name, ALWAYS, 2, 7, 2, 2, 5), \
    ATTENTION_TEST(name, ALWAYS, 1, 33, 3, 1, 16), ATTENTION_TEST(name, ALWAYS, 2, 64, 4, 2, 32), \
    ATTENTION_TEST(name, ALWAYS, 1, 65, 1, 1, 64), ATTENTION_TEST(name, ALWAYS, 1, 100, 2, 1, 67), \
    ATTENTION_TEST(name, ALWAYS, 1, 40, 1, 1, 128), ATTENTION_TEST(name, ALWAYS, 1, 37, 2, 1, 200), \
    ATTENTION_TEST(name, ALWAYS, 1, 35, 1, 1, 256), ATTENTION_TEST(name, ALWAYS, 1, 2, 3, 1, 8), \
    ATTENTION_TEST(name, ALWAYS, 1, 130, 2, 1, 56), ATTENTION_TEST(name, ALWAYS, 1, 129, 1, 1, 80), \
    ATTENTION_TEST(name, ALWAYS, 1, 66, 2, 1, 136), ATTENTION_TEST(name, ALWAYS, 2, 70, 4, 2, 64, 20), \
    ATTENTION_TEST(name, ALWAYS, 1, 45, 2, 1, 128, 50), ATTENTION_TEST(name, ALWAYS, 1, 37, 1, 1, 256, 10), \
    ATTENTION_TEST(name, ALWAYS, 2, 33, 2, 1, 21, 10), ATTENTION_TEST(name, LARGE, 2, 257, 6, 3, 64), \
    ATTENTION_TEST(name, LARGE, 1, 515, 4, 2, 128), ATTENTION_TEST(name, LARGE, 1, 300, 2, 1, 256), \
    ATTENTION_TEST(name, ALWAYS, 2, 150, 2, 1, 64, 0, 0, 12), ATTENTION_TEST(name, ALWAYS, 1, 200, 2, 2, 64, 0, 33), \
    ATTENTION_TEST(name, ALWAYS, 2, 131, 2, 1, 128, 0, 40, 30), ATTENTION_TEST(name, ALWAYS, 1, 70, 1, 1, 256, 0, 9, 20), \
    ATTENTION_TEST(name, ALWAYS, 1, 90, 2, 1, 21, 0, 17, 25), ATTENTION_TEST(name, ALWAYS, 1, 140, 1, 1, 64, 0, 1), \
    ATTENTION_TEST(name, ALWAYS, 1, 99, 2, 1, 128, 20, 30, 15), ATTENTION_TEST(name, ALWAYS, 1, 75, 1, 1, 32, 0, 200, 1), \
    ATTENTION_TEST(name, LARGE, 2, 1100, 2, 1, 64, 0, 300, 400), \
    ATTENTION_TEST(name, LARGE, 1, 4096, 1, 1, 128, 0, 0, 700), \
    ATTENTION_TEST(name, LARGE, 1, 1024, 4, 4, 64), ATTENTION_TEST(name, LARGE, 1, 1600, 1, 1, 24), \
    ATTENTION_TEST(name, BENCH, 4, 64, 12, 12, 64), ATTENTION_TEST(name, BENCH, 4, 256, 6, 6, 64), \
    ATTENTION_TEST(name, BENCH, 1, 1024, 12, 12, 64), ATTENTION_TEST(name, BENCH, 1, 1024, 12, 12, 64, 0, 0, 128), \
    ATTENTION_TEST(name, BENCH, 1, 4096, 4, 2, 128)

static const OpTest attention_tests[] = {ATTENTION_TESTS(attention_forward), ATTENTION_TESTS(attention_backward)
                                         ATTENTION_HELD_TESTS ATTENTION_TILES_TESTS};
