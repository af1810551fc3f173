/* qk_norm.cuh: each query and each key head to unit root mean square, scaled, then rotated (rope.cuh), in one pass.
 *   xhat = head * rstd            rstd = 1/sqrt(mean(head^2) + eps), each head of a row by itself
 *   out  = rotate(xhat * weight)  weight is q_norm's for query heads, k_norm's for key heads; value heads as they are
 *   g    = rotate back(dout)      dweight += sum over rows and heads of g * xhat
 *   dinp = rstd * (g * weight - xhat * mean(g * weight * xhat))
 * shapes  qkv out dqkv (N,(NH+2*NKV)*HS) floatX, a row holding q heads, k heads, v heads; q_norm k_norm (HS) floatX or
 *         fp32; dq_norm dk_norm (HS) fp32; table, positions as in rope.cuh; scratch (qk_norm_scratch_elems(HS)) fp32
 * writes  forward out =; backward dqkv: query and key heads in place, dq_norm +=, dk_norm +=
 * needs   HS even, on a GPU <= 256; positions within the table; HS % 8 == 0 is faster on a GPU
 * exact   fixed reduction order: same bits on every run and for any number of CPU threads. Rounded to floatX once, at
 *         the end. The backward reads what the forward read, and computes rstd again: a head is in registers anyway.
 * cost    forward 2*N*(NH+2*NKV)*HS*s bytes, backward 3*N*(NH+NKV)*HS*s, judged against memory bandwidth
 * source  Henry et al. 2020, arXiv:2010.04245 (query-key normalization); RMSNorm of heads before rotary embedding as in
 *         Qwen3, arXiv:2505.09388. The weights' partial sums are those of norm.cuh. */
#pragma once
#include "rmsnorm.cuh"
#include "rope.cuh"

typedef struct { int N, T, NH, NKV, HS; float eps; } QkDims;

HOSTDEV int qk_heads(QkDims d) { return d.NH + d.NKV; }
HOSTDEV size_t qk_at(QkDims d, size_t n, int head) { return (n * (size_t)(d.NH + 2 * d.NKV) + head) * d.HS; }

#ifdef DEVICE_CPU

template <class P> static void qk_norm_head_forward_cpu(floatX* out, const floatX* head, const P* weight,
                                                        const float* cosine, QkDims d)
{
    const int half = d.HS / 2;
    const float rstd = rmsnorm_rstd_cpu(head, d.HS, d.eps), *sine = cosine + half;
    #pragma omp simd
    for (int i = 0; i < half; i++) {
        float x = load_f(head[i]) * rstd * load_f(weight[i]);
        float y = load_f(head[i + half]) * rstd * load_f(weight[i + half]);
        rope_pair(x, y, cosine[i], sine[i]);
        store_f(out + i, x);
        store_f(out + i + half, y);
    }
}

template <class P> static void qk_norm_rope_forward_cpu(floatX* out, const floatX* qkv, const P* q_norm,
                                                        const P* k_norm, const float* table, const int* positions,
                                                        QkDims d)
{
    #pragma omp parallel for
    for (int n = 0; n < d.N; n++) {
        const float* cosine = rope_row(table, positions, n, d.T, d.HS);
        for (int h = 0; h < qk_heads(d); h++)
            qk_norm_head_forward_cpu(out + qk_at(d, n, h), qkv + qk_at(d, n, h), h < d.NH ? q_norm : k_norm, cosine, d);
        const size_t v = qk_at(d, n, qk_heads(d));
        memcpy(out + v, qkv + v, (size_t)d.NKV * d.HS * sizeof(floatX));
    }
}

template <class P> static void qk_norm_head_backward_cpu(floatX* dhead, float* dweight, const floatX* head,
                                                         const P* weight, const float* cosine, QkDims d)
{
    const int half = d.HS / 2;
    const float rstd = rmsnorm_rstd_cpu(head, d.HS, d.eps), *sine = cosine + half;
    float sum = 0.0f;
    #pragma omp simd reduction(+:sum)
    for (int i = 0; i < half; i++) {
        float x = load_f(dhead[i]), y = load_f(dhead[i + half]);
        rope_pair(x, y, cosine[i], -sine[i]);
        sum += x * load_f(weight[i]) * (load_f(head[i]) * rstd);
        sum += y * load_f(weight[i + half]) * (load_f(head[i + half]) * rstd);
    }
    const float mean = sum / (float)d.HS;
    #pragma omp simd
    for (int i = 0; i < half; i++) {
        float x = load_f(dhead[i]), y = load_f(dhead[i + half]);
        const float xhat = load_f(head[i]) * rstd, yhat = load_f(head[i + half]) * rstd;
        rope_pair(x, y, cosine[i], -sine[i]);
        dweight[i] += x * xhat;
        dweight[i + half] += y * yhat;
        store_f(dhead + i, rstd * (x * load_f(weight[i]) - xhat * mean));
        store_f(dhead + i + half, rstd * (y * load_f(weight[i + half]) - yhat * mean));
    }
}

template <class P> static void qk_norm_rope_backward_cpu(floatX* dqkv, float* dq_norm, float* dk_norm, float* scratch,
                                                         const floatX* qkv, const P* q_norm, const P* k_norm,
                                                         const float* table, const int* positions, QkDims d)
{
    norm_backward_cpu(dq_norm, dk_norm, scratch, d.N, d.HS, [=](size_t n, float* part_dq_norm, float* part_dk_norm) {
        const float* cosine = rope_row(table, positions, n, d.T, d.HS);
        for (int h = 0; h < qk_heads(d); h++)
            qk_norm_head_backward_cpu(dqkv + qk_at(d, n, h), h < d.NH ? part_dq_norm : part_dk_norm,
                                      qkv + qk_at(d, n, h), h < d.NH ? q_norm : k_norm, cosine, d);
    });
}

#else

static constexpr int QK_PAIRS = 4;                   // of a lane: a warp has a head of up to 256 in registers
static constexpr int QK_MAX_HS = 2 * QK_PAIRS * 32;

/* The lane's pairs (x[k], y[k]) of a row of 2 * half elements: neighbours if ALIGNED, else every 32nd; 0 past the
 * end. */
template <bool ALIGNED, class T> DEV void pairs_load(float (&x)[QK_PAIRS], float (&y)[QK_PAIRS], const T* row, int half)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < QK_PAIRS; k++) x[k] = y[k] = 0.0f;
    if constexpr (ALIGNED) {
        if (lane * QK_PAIRS >= half) return;
        load_vec(x, row + lane * QK_PAIRS);
        load_vec(y, row + half + lane * QK_PAIRS);
    } else {
#pragma unroll
        for (int k = 0; k < QK_PAIRS; k++) {
            if (lane + 32 * k >= half) continue;
            x[k] = load_f(row[lane + 32 * k]);
            y[k] = load_f(row[half + lane + 32 * k]);
        }
    }
}

template <bool ALIGNED, class T> DEV void pairs_store(T* row, const float (&x)[QK_PAIRS], const float (&y)[QK_PAIRS],
                                                      int half)
{
    const int lane = threadIdx.x % 32;
    if constexpr (ALIGNED) {
        if (lane * QK_PAIRS >= half) return;
        store_vec(row + lane * QK_PAIRS, x);
        store_vec(row + half + lane * QK_PAIRS, y);
    } else {
#pragma unroll
        for (int k = 0; k < QK_PAIRS; k++) {
            if (lane + 32 * k >= half) continue;
            store_f(row + lane + 32 * k, x[k]);
            store_f(row + half + lane + 32 * k, y[k]);
        }
    }
}

/* Over the warp's head. */
DEV float pairs_rstd(const float (&x)[QK_PAIRS], const float (&y)[QK_PAIRS], QkDims d)
{
    float sum_squares = 0.0f;
#pragma unroll
    for (int k = 0; k < QK_PAIRS; k++) sum_squares += x[k] * x[k] + y[k] * y[k];
    return 1.0f / sqrtf(warp_sum(sum_squares) / (float)d.HS + d.eps);
}

/* A warp a head; those of values are copied. */
template <bool ALIGNED, class P> static __global__ void __launch_bounds__(NORM_BLOCK)
qk_norm_rope_forward_kernel(floatX* out, const floatX* qkv, const P* q_norm, const P* k_norm, const float* table,
                            const int* positions, QkDims d)
{
    const int half = d.HS / 2, per_row = qk_heads(d) + d.NKV;
    const size_t idx = (size_t)blockIdx.x * (NORM_BLOCK / 32) + threadIdx.x / 32, n = idx / per_row;
    if (n >= (size_t)d.N) return;
    const int h = (int)(idx % per_row);
    float x[QK_PAIRS], y[QK_PAIRS];
    pairs_load<ALIGNED>(x, y, qkv + qk_at(d, n, h), half);
    if (h < qk_heads(d)) {
        float wx[QK_PAIRS], wy[QK_PAIRS], cosine[QK_PAIRS], sine[QK_PAIRS];
        const float rstd = pairs_rstd(x, y, d);
        pairs_load<ALIGNED>(wx, wy, h < d.NH ? q_norm : k_norm, half);
        pairs_load<ALIGNED>(cosine, sine, rope_row(table, positions, n, d.T, d.HS), half);
#pragma unroll
        for (int k = 0; k < QK_PAIRS; k++) {
            x[k] = x[k] * rstd * wx[k];
            y[k] = y[k] * rstd * wy[k];
            rope_pair(x[k], y[k], cosine[k], sine[k]);
        }
    }
    pairs_store<ALIGNED>(out + qk_at(d, n, h), x, y, half);
}

/* The block's part of the rows, those of their heads that have this weight: a warp a head, the warps' sums of dweight
 * added in order. `partial` is shared, and free again for the next call. */
template <bool ALIGNED, class P> DEV void qk_norm_backward_heads(float* part_dweight, float (*partial)[QK_MAX_HS],
                                                                 floatX* dqkv, const floatX* qkv, const P* weight,
                                                                 const float* table, const int* positions,
                                                                 int first_head, int num_heads, QkDims d)
{
    const int half = d.HS / 2, warp = threadIdx.x / 32, num_warps = NORM_BLOCK / 32, c = threadIdx.x;
    const size_t first = (size_t)d.N * blockIdx.x / gridDim.x, end = (size_t)d.N * (blockIdx.x + 1) / gridDim.x;
    float wx[QK_PAIRS], wy[QK_PAIRS], dwx[QK_PAIRS] = {}, dwy[QK_PAIRS] = {};
    pairs_load<ALIGNED>(wx, wy, weight, half);
    for (size_t i = warp; i < (end - first) * num_heads; i += num_warps) {
        const size_t n = first + i / num_heads, at = qk_at(d, n, first_head + (int)(i % num_heads));
        float x[QK_PAIRS], y[QK_PAIRS], gx[QK_PAIRS], gy[QK_PAIRS], cosine[QK_PAIRS], sine[QK_PAIRS], sum = 0.0f;
        pairs_load<ALIGNED>(x, y, qkv + at, half);
        pairs_load<ALIGNED>(gx, gy, dqkv + at, half);
        pairs_load<ALIGNED>(cosine, sine, rope_row(table, positions, n, d.T, d.HS), half);
        const float rstd = pairs_rstd(x, y, d);
#pragma unroll
        for (int k = 0; k < QK_PAIRS; k++) {
            x[k] *= rstd;
            y[k] *= rstd;
            rope_pair(gx[k], gy[k], cosine[k], -sine[k]);
            dwx[k] += gx[k] * x[k];
            dwy[k] += gy[k] * y[k];
            gx[k] *= wx[k];
            gy[k] *= wy[k];
            sum += gx[k] * x[k] + gy[k] * y[k];
        }
        const float mean = warp_sum(sum) / (float)d.HS;
#pragma unroll
        for (int k = 0; k < QK_PAIRS; k++) {
            gx[k] = rstd * (gx[k] - x[k] * mean);
            gy[k] = rstd * (gy[k] - y[k] * mean);
        }
        pairs_store<ALIGNED>(dqkv + at, gx, gy, half);
    }
    pairs_store<ALIGNED>(partial[warp], dwx, dwy, half);
    __syncthreads();
    float sum = 0.0f;
    for (int w = 0; w < num_warps && c < d.HS; w++) sum += partial[w][c];
    if (c < d.HS) part_dweight[c] = sum;
    __syncthreads();
}

template <bool ALIGNED, class P> static __global__ void __launch_bounds__(NORM_BLOCK)
qk_norm_rope_backward_kernel(floatX* dqkv, float* scratch, const floatX* qkv, const P* q_norm, const P* k_norm,
                             const float* table, const int* positions, QkDims d)
{
    SHARED(float, partial, [NORM_BLOCK / 32][QK_MAX_HS]);
    float* part = scratch + (size_t)blockIdx.x * 2 * d.HS;
    qk_norm_backward_heads<ALIGNED>(part, partial, dqkv, qkv, q_norm, table, positions, 0, d.NH, d);
    qk_norm_backward_heads<ALIGNED>(part + d.HS, partial, dqkv, qkv, k_norm, table, positions, d.NH, d.NKV, d);
}

/* Half rows are whole vectors. */
template <class P> static bool qk_is_aligned(const floatX* a, const floatX* b, const P* q_norm, const P* k_norm,
                                             const float* table, int HS)
{
    const void* all[] = {a, b, q_norm, k_norm, table};
    bool aligned = HS % (2 * QK_PAIRS) == 0;
    for (const void* p : all) aligned = aligned && (uintptr_t)p % 16 == 0;
    return aligned;
}

template <class P> static void qk_norm_rope_forward_launch(floatX* out, const floatX* qkv, const P* q_norm,
                                                           const P* k_norm, const float* table, const int* positions,
                                                           QkDims d, cudaStream_t stream)
{
    const unsigned grid = (unsigned)ceil_div((size_t)d.N * (d.NH + 2 * d.NKV), NORM_BLOCK / 32);
    if (qk_is_aligned(out, qkv, q_norm, k_norm, table, d.HS))
        LAUNCH((qk_norm_rope_forward_kernel<true, P>), grid, NORM_BLOCK, 0, stream, out, qkv, q_norm, k_norm, table,
               positions, d);
    else
        LAUNCH((qk_norm_rope_forward_kernel<false, P>), grid, NORM_BLOCK, 0, stream, out, qkv, q_norm, k_norm, table,
               positions, d);
    CUDA_CHECK(cudaGetLastError());
}

template <class P> static void qk_norm_rope_backward_launch(floatX* dqkv, float* dq_norm, float* dk_norm,
                                                            float* scratch, const floatX* qkv, const P* q_norm,
                                                            const P* k_norm, const float* table, const int* positions,
                                                            QkDims d, cudaStream_t stream)
{
    const int num_parts = d.N < NORM_PARTS ? d.N : NORM_PARTS;
    if (qk_is_aligned(dqkv, qkv, q_norm, k_norm, table, d.HS))
        LAUNCH((qk_norm_rope_backward_kernel<true, P>), num_parts, NORM_BLOCK, 0, stream, dqkv, scratch, qkv, q_norm,
               k_norm, table, positions, d);
    else
        LAUNCH((qk_norm_rope_backward_kernel<false, P>), num_parts, NORM_BLOCK, 0, stream, dqkv, scratch, qkv, q_norm,
               k_norm, table, positions, d);
    CUDA_CHECK(cudaGetLastError());
    norm_reduce_launch(dq_norm, dk_norm, scratch, num_parts, 2, d.HS, stream);
}

#endif

static void qk_norm_limits(int HS)
{
    assert(HS % 2 == 0);
#ifndef DEVICE_CPU
    ENSURE(HS <= QK_MAX_HS, "head size %d: at most %d on a GPU", HS, QK_MAX_HS);
#endif
}

template <class P> static void qk_norm_rope_forward(floatX* out, const floatX* qkv, const P* q_norm, const P* k_norm,
                                                    const float* table, const int* positions, int N, int T, int NH,
                                                    int NKV, int HS, float eps, cudaStream_t stream)
{
    const QkDims d = {N, T, NH, NKV, HS, eps};
    OP(stream, 0, 2.0 * N * (NH + 2 * NKV) * HS * sizeof(floatX), N, NH, NKV, HS);
    qk_norm_limits(HS);
    ON_CPU(qk_norm_rope_forward_cpu(out, qkv, q_norm, k_norm, table, positions, d));
#ifndef DEVICE_CPU
    qk_norm_rope_forward_launch(out, qkv, q_norm, k_norm, table, positions, d, stream);
#endif
}

static size_t qk_norm_scratch_elems(int HS) { return (size_t)NORM_PARTS * 2 * HS; }

template <class P> static void qk_norm_rope_backward(floatX* dqkv, float* dq_norm, float* dk_norm, float* scratch,
                                                     const floatX* qkv, const P* q_norm, const P* k_norm,
                                                     const float* table, const int* positions, int N, int T, int NH,
                                                     int NKV, int HS, float eps, cudaStream_t stream)
{
    const QkDims d = {N, T, NH, NKV, HS, eps};
    OP(stream, 0, 3.0 * N * (NH + NKV) * HS * sizeof(floatX), N, NH, NKV, HS);
    qk_norm_limits(HS);
    ON_CPU(qk_norm_rope_backward_cpu(dqkv, dq_norm, dk_norm, scratch, qkv, q_norm, k_norm, table, positions, d));
#ifndef DEVICE_CPU
    qk_norm_rope_backward_launch(dqkv, dq_norm, dk_norm, scratch, qkv, q_norm, k_norm, table, positions, d, stream);
#endif
}

#ifdef OP_TESTS
#include "norm_tests.h"

static const float QK_NORM_TEST_EPS = 1e-6f;

/* dims: N, T, NH, NKV, HS, first position (see rope_inputs) */
template <class R> static void qk_norm_forward_ref(R* out, const R* qkv, const R* q_norm, const R* k_norm,
                                                   const int* positions, const int* d)
{
    const int N = d[0], T = d[1], NH = d[2], NKV = d[3], HS = d[4], num_heads = NH + 2 * NKV;
    memcpy(out, qkv, (size_t)N * num_heads * HS * sizeof(R));
    for (int i = 0; i < N * num_heads; i++) {
        const int h = i % num_heads;
        R *head = out + (size_t)i * HS, *mean = nullptr, rstd;
        const R* bias = nullptr;
        if (h < NH + NKV) norm_forward_ref(head, mean, &rstd, head, h < NH ? q_norm : k_norm, bias, 1, HS,
                                           (R)QK_NORM_TEST_EPS);
    }
    rope_ref(out, positions, N, T, NH + NKV, num_heads, HS, 1);
}

template <class R> static void qk_norm_backward_ref(R* dqkv, R* dq_norm, R* dk_norm, const R* qkv, const R* q_norm,
                                                    const R* k_norm, const int* positions, const int* d)
{
    const int N = d[0], T = d[1], NH = d[2], NKV = d[3], HS = d[4], num_heads = NH + 2 * NKV;
    R *scratch = (R*)op_alloc(2 * HS * sizeof(R)), *dbias = nullptr, rstd;
    const R *bias = nullptr, *mean = nullptr;
    rope_ref(dqkv, positions, N, T, NH + NKV, num_heads, HS, -1);
    for (int i = 0; i < N * num_heads; i++) {
        const int h = i % num_heads;
        if (h >= NH + NKV) continue;
        const R *head = qkv + (size_t)i * HS, *weight = h < NH ? q_norm : k_norm;
        R *dhead = dqkv + (size_t)i * HS, *dinp = scratch, *out = scratch + HS;
        for (int c = 0; c < HS; c++) dinp[c] = 0;
        norm_forward_ref(out, (R*)nullptr, &rstd, head, weight, bias, 1, HS, (R)QK_NORM_TEST_EPS);
        norm_backward_ref(dinp, h < NH ? dq_norm : dk_norm, dbias, dhead, head, weight, mean, &rstd, 1, HS);
        memcpy(dhead, dinp, HS * sizeof(R));
    }
    free(scratch);
}

/* What forward and backward read beside qkv. */
template <class P> struct QkNormTest {
    OpTensor<P> q_norm, k_norm;
    const float* table;
    const int *positions, *h_positions;
};

template <class P> static QkNormTest<P> qk_norm_inputs(OpRun* run)
{
    const int *d = run->dims, N = d[0], T = d[1], HS = d[4];
    const RopeInputs rope = rope_inputs(run, N, T, HS, d[5]);
    return {op_input<P>(run, "q_norm", HS, 1.0, 0.3), op_input<P>(run, "k_norm", HS, 1.0, 0.3), rope.table,
            rope.positions, rope.h_positions};
}

static size_t qk_norm_elems(const int* d) { return (size_t)d[0] * (d[2] + 2 * d[3]) * d[4]; }

template <class P> static void qk_norm_forward_test(OpRun* run)
{
    const int *d = run->dims, NH = d[2], NKV = d[3], HS = d[4];
    const size_t n = qk_norm_elems(d);
    QkNormTest<P> t = qk_norm_inputs<P>(run);
    OpTensor<floatX> qkv = op_input<floatX>(run, "qkv", n, 0.5, 2.0), out = op_output<floatX>(run, "out", n);
    OP_RUN(run, 2.0 * n * sizeof(floatX), 0,
           qk_norm_rope_forward(out.dev, qkv.dev, t.q_norm.dev, t.k_norm.dev, t.table, t.positions, d[0], d[1], NH, NKV,
                                HS, QK_NORM_TEST_EPS, 0));
    qk_norm_forward_ref(out.f64, qkv.f64, t.q_norm.f64, t.k_norm.f64, t.h_positions, d);
    qk_norm_forward_ref(out.f32, qkv.f32, t.q_norm.f32, t.k_norm.f32, t.h_positions, d);
    op_check(run, out);
}

template <class P> static void qk_norm_backward_test(OpRun* run)
{
    const int *d = run->dims, HS = d[4];
    const size_t n = qk_norm_elems(d);
    QkNormTest<P> t = qk_norm_inputs<P>(run);
    OpTensor<floatX> qkv = op_input<floatX>(run, "qkv", n, 0.5, 2.0), dqkv = op_inout<floatX>(run, "dqkv", n, 0.0, 1.0);
    OpTensor<float> dq_norm = op_inout<float>(run, "dq_norm", HS, 0.0, 1.0);
    OpTensor<float> dk_norm = op_inout<float>(run, "dk_norm", HS, 0.0, 1.0);
    float* scratch = op_scratch<float>(run, qk_norm_scratch_elems(HS));
    OP_RUN(run, 3.0 * d[0] * (d[2] + d[3]) * HS * sizeof(floatX), 0,
           qk_norm_rope_backward(dqkv.dev, dq_norm.dev, dk_norm.dev, scratch, qkv.dev, t.q_norm.dev, t.k_norm.dev,
                                 t.table, t.positions, d[0], d[1], d[2], d[3], HS, QK_NORM_TEST_EPS, 0));
    qk_norm_backward_ref(dqkv.f64, dq_norm.f64, dk_norm.f64, qkv.f64, t.q_norm.f64, t.k_norm.f64, t.h_positions, d);
    qk_norm_backward_ref(dqkv.f32, dq_norm.f32, dk_norm.f32, qkv.f32, t.q_norm.f32, t.k_norm.f32, t.h_positions, d);
    op_check(run, dqkv);
    op_check(run, dq_norm);
    op_check(run, dk_norm);
}

/* The references themselves. */
static void qk_norm_gradient_test(OpRun* run)
{
    const int *d = run->dims, HS = d[4];
    const size_t n = qk_norm_elems(d);
    QkNormTest<floatX> t = qk_norm_inputs<floatX>(run);
    OpTensor<floatX> qkv = op_input<floatX>(run, "qkv", n, 0.5, 2.0), dout = op_input<floatX>(run, "dout", n, 0.0, 1.0);
    OpTensor<floatX> dqkv = op_output<floatX>(run, "dqkv", n);
    OpTensor<float> dq_norm = op_inout<float>(run, "dq_norm", HS, 0.0, 1.0);
    OpTensor<float> dk_norm = op_inout<float>(run, "dk_norm", HS, 0.0, 1.0);
    double* out = op_host(run, n);
    memcpy(dqkv.f64, dout.f64, n * sizeof(double));
    qk_norm_backward_ref(dqkv.f64, dq_norm.f64, dk_norm.f64, qkv.f64, t.q_norm.f64, t.k_norm.f64, t.h_positions, d);
#define QK_NORM_OBJECTIVE \
    (qk_norm_forward_ref(out, qkv.f64, t.q_norm.f64, t.k_norm.f64, t.h_positions, d), op_dot(out, dout.f64, n))
    OP_CHECK_GRAD(run, dqkv, qkv, QK_NORM_OBJECTIVE);
    OP_CHECK_GRAD(run, dq_norm, t.q_norm, QK_NORM_OBJECTIVE);
    OP_CHECK_GRAD(run, dk_norm, t.k_norm, QK_NORM_OBJECTIVE);
#undef QK_NORM_OBJECTIVE
}

static const OpTest qk_norm_tests[] = {
    {"qk_norm_rope_forward", qk_norm_forward_test<floatX>, {1, 1, 1, 1, 2, 0}, OpWhen::ALWAYS},
    {"qk_norm_rope_forward", qk_norm_forward_test<floatX>, {6, 3, 5, 1, 16, 0}, OpWhen::ALWAYS},
    {"qk_norm_rope_forward", qk_norm_forward_test<floatX>, {5, 64, 6, 2, 10, 7}, OpWhen::ALWAYS},
    {"qk_norm_rope_forward", qk_norm_forward_test<floatX>, {5, 64, 3, 3, 24, 7}, OpWhen::ALWAYS},
    {"qk_norm_rope_forward", qk_norm_forward_test<floatX>, {1, 2048, 4, 2, 128, 2047}, OpWhen::ALWAYS},
    {"qk_norm_rope_forward", qk_norm_forward_test<floatX>, {2, 300, 2, 1, 256, 257}, OpWhen::ALWAYS},
    {"qk_norm_rope_forward", qk_norm_forward_test<floatX>, {3, 5, 3, 1, 250, 0}, OpWhen::ALWAYS},
    {"qk_norm_rope_forward", qk_norm_forward_test<floatX>, {1200, 600, 8, 2, 96, 0}, OpWhen::LARGE},
    {"qk_norm_rope_backward", qk_norm_backward_test<floatX>, {1, 1, 1, 1, 2, 0}, OpWhen::ALWAYS},
    {"qk_norm_rope_backward", qk_norm_backward_test<floatX>, {70, 35, 5, 1, 16, 0}, OpWhen::ALWAYS},
    {"qk_norm_rope_backward", qk_norm_backward_test<floatX>, {5, 64, 6, 2, 10, 7}, OpWhen::ALWAYS},
    {"qk_norm_rope_backward", qk_norm_backward_test<floatX>, {9, 64, 3, 3, 128, 7}, OpWhen::ALWAYS},
    {"qk_norm_rope_backward", qk_norm_backward_test<floatX>, {4, 300, 2, 1, 256, 257}, OpWhen::ALWAYS},
    {"qk_norm_rope_backward", qk_norm_backward_test<floatX>, {6, 3, 3, 1, 250, 0}, OpWhen::ALWAYS},
    {"qk_norm_rope_backward", qk_norm_backward_test<floatX>, {1200, 600, 8, 2, 96, 0}, OpWhen::LARGE},
    {"qk_norm_rope_gradient", qk_norm_gradient_test, {4, 3, 3, 1, 6, 0}, OpWhen::ALWAYS},
    {"qk_norm_rope_gradient", qk_norm_gradient_test, {3, 64, 4, 2, 16, 5}, OpWhen::ALWAYS},
#ifndef PREC_FP32
    {"qk_norm_rope_forward, fp32 weight", qk_norm_forward_test<float>, {5, 64, 3, 1, 24, 7}, OpWhen::ALWAYS},
    {"qk_norm_rope_backward, fp32 weight", qk_norm_backward_test<float>, {70, 35, 5, 1, 16, 0}, OpWhen::ALWAYS},
    {"qk_norm_rope_backward, fp32 weight", qk_norm_backward_test<float>, {9, 64, 6, 2, 10, 7}, OpWhen::ALWAYS},
#endif
    {"qk_norm_rope_forward", qk_norm_forward_test<floatX>, {8192, 2048, 16, 8, 128, 0}, OpWhen::BENCH},
    {"qk_norm_rope_backward", qk_norm_backward_test<floatX>, {8192, 2048, 16, 8, 128, 0}, OpWhen::BENCH},
};

#endif
