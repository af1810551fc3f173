/* rope.cuh: rotary position embedding of query and key heads, in place. Element i pairs with i + HS/2, as in HF files.
 *   y[i]        = x[i] * cos(a) - x[i + HS/2] * sin(a)        a = position * frequency[i],  i < HS/2
 *   y[i + HS/2] = x[i + HS/2] * cos(a) + x[i] * sin(a)        backward: the same with -a
 *   frequency[i] = theta^(-2i/HS), then scaled:
 *     LINEAR  divided by factor
 *     LLAMA3  wavelengths above context/low_freq_factor divided by factor, those below context/high_freq_factor kept,
 *             those between blended
 * shapes  qkv dqkv (N,num_heads*HS) floatX, of which the first num_rotated heads are rotated; table (T,HS) fp32, a row
 *         holding HS/2 cosines | HS/2 sines; positions (N) int, or null: row n is at position n % T
 * writes  qkv, dqkv: changed in place
 * needs   HS even; positions within the table; HS % 8 == 0 is faster on a GPU
 * exact   each pair by itself: same bits on every run. Angles are double, cosines and sines are rounded once to fp32,
 *         so that far positions are as exact as near ones.
 * cost    2*N*num_rotated*HS*s bytes, judged against memory bandwidth
 * source  Su et al. 2021, arXiv:2104.09864; llama3 scaling as in Hugging Face's modeling_rope_utils */
#pragma once
#include "vec.cuh"

enum class RopeScaling { NONE, LINEAR, LLAMA3 };

typedef struct {
    double theta;
    RopeScaling scaling;
    double factor, low_freq_factor, high_freq_factor, context;   // the last three LLAMA3 only
} RopeConfig;

static double rope_frequency(const RopeConfig* r, int i, int HS)
{
    const double frequency = pow(r->theta, -2.0 * i / HS), slow = frequency / r->factor;
    if (r->scaling == RopeScaling::NONE) return frequency;
    if (r->scaling == RopeScaling::LINEAR) return slow;
    const double turns = r->context * frequency / (2 * M_PI);        // within the context it was trained on
    if (turns < r->low_freq_factor) return slow;
    if (turns > r->high_freq_factor) return frequency;
    const double share = (turns - r->low_freq_factor) / (r->high_freq_factor - r->low_freq_factor);
    return (1 - share) * slow + share * frequency;
}

/* h_table (count,HS): positions first, first + 1, ... */
static void rope_table(float* h_table, const RopeConfig* r, int first, int count, int HS)
{
    for (int i = 0; i < HS / 2; i++) {
        const double frequency = rope_frequency(r, i, HS);
        for (int t = 0; t < count; t++) {
            h_table[(size_t)t * HS + i] = (float)cos((first + t) * frequency);
            h_table[(size_t)t * HS + HS / 2 + i] = (float)sin((first + t) * frequency);
        }
    }
}

/* A pair of elements, rotated; with -sine back. */
HOSTDEV void rope_pair(float& x, float& y, float cosine, float sine)
{
    const float a = x, b = y;
    x = a * cosine - b * sine;
    y = b * cosine + a * sine;
}

/* The row of the table for row n of a tensor. */
HOSTDEV const float* rope_row(const float* table, const int* positions, size_t n, int T, int HS)
{
    return table + (size_t)(positions != nullptr ? positions[n] : (int)(n % T)) * HS;
}

#ifdef DEVICE_CPU

static void rope_cpu(floatX* qkv, const float* table, const int* positions, int N, int T, int num_rotated,
                     int num_heads, int HS, float direction)
{
    const int half = HS / 2;
    #pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const float *cosine = rope_row(table, positions, n, T, HS), *sine = cosine + half;
        for (int h = 0; h < num_rotated; h++) {
            floatX *x = qkv + ((size_t)n * num_heads + h) * HS, *y = x + half;
            #pragma omp simd
            for (int i = 0; i < half; i++) {
                float a = load_f(x[i]), b = load_f(y[i]);
                rope_pair(a, b, cosine[i], direction * sine[i]);
                store_f(x + i, a);
                store_f(y + i, b);
            }
        }
    }
}

#else

static constexpr int ROPE_BLOCK = 256;

/* A thread W pairs of a row. */
template <int W> static __global__ void __launch_bounds__(ROPE_BLOCK)
rope_kernel(floatX* qkv, const float* table, const int* positions, int N, int T, int num_rotated, int num_heads, int HS,
            float direction)
{
    const int half = HS / 2, per_row = num_rotated * (half / W);
    const size_t idx = (size_t)blockIdx.x * ROPE_BLOCK + threadIdx.x;
    if (idx >= (size_t)N * per_row) return;
    const size_t n = idx / per_row;
    const int h = (int)(idx % per_row) / (half / W), i = (int)(idx % per_row) % (half / W) * W;
    floatX* at = qkv + (n * num_heads + h) * HS + i;
    const float* cosine = rope_row(table, positions, n, T, HS) + i;
    float x[W], y[W], c[W], s[W];
    load_vec(x, at);
    load_vec(y, at + half);
    load_vec(c, cosine);
    load_vec(s, cosine + half);
#pragma unroll
    for (int k = 0; k < W; k++) rope_pair(x[k], y[k], c[k], direction * s[k]);
    store_vec(at, x);
    store_vec(at + half, y);
}

static void rope_launch(floatX* qkv, const float* table, const int* positions, int N, int T, int num_rotated,
                        int num_heads, int HS, float direction, cudaStream_t stream)
{
    const bool vec = HS % 8 == 0 && (uintptr_t)qkv % 16 == 0 && (uintptr_t)table % 16 == 0;
    const unsigned grid = (unsigned)ceil_div((size_t)N * num_rotated * (HS / 2 / (vec ? 4 : 1)), ROPE_BLOCK);
    if (vec)
        LAUNCH((rope_kernel<4>), grid, ROPE_BLOCK, 0, stream, qkv, table, positions, N, T, num_rotated, num_heads, HS,
               direction);
    else
        LAUNCH((rope_kernel<1>), grid, ROPE_BLOCK, 0, stream, qkv, table, positions, N, T, num_rotated, num_heads, HS,
               direction);
    CUDA_CHECK(cudaGetLastError());
}

#endif

static void rope(floatX* qkv, const float* table, const int* positions, int N, int T, int num_rotated, int num_heads,
                 int HS, float direction, cudaStream_t stream)
{
    assert(HS % 2 == 0 && num_rotated <= num_heads);
    ON_CPU(rope_cpu(qkv, table, positions, N, T, num_rotated, num_heads, HS, direction));
#ifndef DEVICE_CPU
    rope_launch(qkv, table, positions, N, T, num_rotated, num_heads, HS, direction, stream);
#endif
}

static void rope_forward(floatX* qkv, const float* table, const int* positions, int N, int T, int num_rotated,
                         int num_heads, int HS, cudaStream_t stream)
{
    OP(stream, 0, 2.0 * N * num_rotated * HS * sizeof(floatX), N, num_rotated, HS);
    rope(qkv, table, positions, N, T, num_rotated, num_heads, HS, 1.0f, stream);
}

static void rope_backward(floatX* dqkv, const float* table, const int* positions, int N, int T, int num_rotated,
                          int num_heads, int HS, cudaStream_t stream)
{
    OP(stream, 0, 2.0 * N * num_rotated * HS * sizeof(floatX), N, num_rotated, HS);
    rope(dqkv, table, positions, N, T, num_rotated, num_heads, HS, -1.0f, stream);
}

#ifdef OP_TESTS
#include "optest.h"

static const RopeConfig ROPE_TEST_CONFIG = {10000.0, RopeScaling::NONE, 1, 1, 4, 8192};

/* In place; the angles from scratch. positions null: n % T. */
template <class R> static void rope_ref(R* qkv, const int* positions, int N, int T, int num_rotated, int num_heads,
                                        int HS, int direction)
{
    for (int n = 0; n < N; n++) {
        for (int i = 0; i < HS / 2; i++) {
            const double angle = (positions ? positions[n] : n % T) * pow(ROPE_TEST_CONFIG.theta, -2.0 * i / HS);
            const R c = (R)cos(angle), s = (R)(direction * sin(angle));
            for (int h = 0; h < num_rotated; h++) {
                R* x = qkv + ((size_t)n * num_heads + h) * HS + i;
                const R a = x[0], b = x[HS / 2];
                x[0] = a * c - b * s;
                x[HS / 2] = b * c + a * s;
            }
        }
    }
}

/* Positions are first, first + 3, ... with a first; else they are not given. */
typedef struct { const float* table; const int *positions, *h_positions; } RopeInputs;

static RopeInputs rope_inputs(OpRun* run, int N, int T, int HS, int first)
{
    const size_t table_bytes = (size_t)T * HS * sizeof(float);
    OpInts positions = op_ints(run, "positions", N, 0, T);
    for (int i = 0; i < N; i++) positions.h[i] = (first + 3 * i) % T;
    op_upload(run, "positions");
    float* h_table = (float*)op_alloc(table_bytes);
    rope_table(h_table, &ROPE_TEST_CONFIG, 0, T, HS);
    const float* table = (const float*)op_bytes(run, "table", OpKind::INPUT, h_table, table_bytes);
    free(h_table);
    return RopeInputs{table, first > 0 ? positions.dev : nullptr, first > 0 ? positions.h : nullptr};
}

/* dims: N, T, rotated heads, heads, HS, first position */
template <int DIRECTION> static void rope_test(OpRun* run)
{
    const int *d = run->dims, N = d[0], T = d[1], num_rotated = d[2], num_heads = d[3], HS = d[4];
    const size_t n = (size_t)N * num_heads * HS;
    OpTensor<floatX> qkv = op_inout<floatX>(run, "qkv", n, 0.0, 1.0);
    const RopeInputs inputs = rope_inputs(run, N, T, HS, d[5]);
    OP_RUN(run, 2.0 * N * num_rotated * HS * sizeof(floatX), 0,
           rope(qkv.dev, inputs.table, inputs.positions, N, T, num_rotated, num_heads, HS, (float)DIRECTION, 0));
    const int* h_given = inputs.h_positions;
    double *start = op_host(run, n), *rotated = op_host(run, n);
    memcpy(start, qkv.f64, n * sizeof(double));
    rope_ref(qkv.f64, h_given, N, T, num_rotated, num_heads, HS, DIRECTION);
    rope_ref(qkv.f32, h_given, N, T, num_rotated, num_heads, HS, DIRECTION);
    op_check(run, qkv);
    // The backward is the transpose: <turn(x), y> = <x, turn back(y)> for y = x reversed.
    double *y = op_host(run, n), *back = op_host(run, n);
    for (size_t i = 0; i < n; i++) rotated[i] = start[i], y[i] = back[i] = start[n - 1 - i];
    rope_ref(rotated, h_given, N, T, num_rotated, num_heads, HS, DIRECTION);
    rope_ref(back, h_given, N, T, num_rotated, num_heads, HS, -DIRECTION);
    op_check_value(run, "transpose", op_dot(rotated, y, n), op_dot(start, back, n), 1e-9 * (double)n);
}

/* Scaled frequencies against numbers worked out by hand; dims: scaling. */
static void rope_scaling_test(OpRun* run)
{
    const RopeConfig linear = {10000.0, RopeScaling::LINEAR, 4, 1, 4, 0};
    const RopeConfig llama3 = {500000.0, RopeScaling::LLAMA3, 8, 1, 4, 8192};
    op_check_value(run, "linear", rope_frequency(&linear, 16, 64), 0.01 / 4, 1e-15);
    op_check_value(run, "llama3 fast", rope_frequency(&llama3, 0, 128), 1, 0);
    op_check_value(run, "llama3 slow", rope_frequency(&llama3, 63, 128), pow(500000.0, -126.0 / 128) / 8, 1e-18);
    // pair 32: 500000^-0.5 makes 1.8438 turns in 8192 positions: a share of 0.28126 is kept
    const double frequency = pow(500000.0, -0.5), share = (8192 * frequency / (2 * M_PI) - 1) / 3;
    op_check_value(run, "llama3 between", rope_frequency(&llama3, 32, 128), frequency * ((1 - share) / 8 + share),
                   1e-15);
}

static const OpTest rope_tests[] = {
    {"rope_forward", rope_test<1>, {1, 1, 1, 1, 2, 0}, OpWhen::ALWAYS},
    {"rope_forward", rope_test<1>, {6, 3, 5, 7, 16, 0}, OpWhen::ALWAYS},
    {"rope_forward", rope_test<1>, {5, 64, 3, 4, 80, 0}, OpWhen::ALWAYS},
    {"rope_forward", rope_test<1>, {5, 64, 3, 4, 10, 7}, OpWhen::ALWAYS},
    {"rope_forward", rope_test<1>, {1, 258, 2, 3, 64, 257}, OpWhen::ALWAYS},
    {"rope_forward", rope_test<1>, {1, 2048, 2, 3, 128, 2047}, OpWhen::ALWAYS},
    {"rope_forward", rope_test<1>, {2048, 1024, 8, 12, 96, 0}, OpWhen::LARGE},
    {"rope_backward", rope_test<-1>, {6, 3, 5, 7, 16, 0}, OpWhen::ALWAYS},
    {"rope_backward", rope_test<-1>, {3, 300, 2, 3, 256, 257}, OpWhen::ALWAYS},
    {"rope_scaling", rope_scaling_test, {1}, OpWhen::ALWAYS},
    {"rope_forward", rope_test<1>, {8192, 2048, 36, 40, 64, 0}, OpWhen::BENCH},
};

#endif
