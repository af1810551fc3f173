/* attention_cached.cuh: attention of new tokens against the keys and values of those before them, for generation. Row n
 * is the token of sequence slots[n] at positions[n]; rows of many sequences, and several of one, go together.
 *   keys, values [slot, :, position, :] = row n's k and v heads, for all rows first; then
 *   out[n] = sum_j p[j] * values[slot, kv, j]      p = softmax_j(scale * q[n] . keys[slot, kv, j]),
 *            first_key[n] <= j <= positions[n]; first_key null: from 0 on
 * shapes  qkv (N,(NH+2*NKV)*HS) as in attention.cuh; out (N,NH*HS); keys values (num_slots,NKV,T,HS), all floatX;
 *         slots positions first_key (N) int
 * writes  out =; keys, values: the rows' places
 * needs   NH % NKV == 0; first_key <= positions < T; HS <= 1024, on a GPU <= 256
 * exact   each row and head by one thread or warp, keys in order: the result does not depend on which rows go together
 * cost    reads 2*HS*s bytes per key and query head; judged against memory bandwidth (one warp per row and head, so a
 *         lone sequence does not fill a GPU)
 * source  Pope et al. 2022, arXiv:2211.05102 (the cache); Dao et al. 2022 (online softmax) */
#pragma once
#include "vec.cuh"

typedef struct { int N, T, NH, NKV, HS; float scale; } CachedDims;

HOSTDEV size_t cached_first(CachedDims a, int slot, int head) { return ((size_t)slot * a.NKV + head) * a.T * a.HS; }

#ifdef DEVICE_CPU

enum { CACHED_MAX_HS = 1024 };

static void attention_cached_store_cpu(floatX* keys, floatX* values, const floatX* qkv, const int* slots,
                                       const int* positions, CachedDims a)
{
    #pragma omp parallel for
    for (int n = 0; n < a.N; n++) {
        const floatX* k = qkv + ((size_t)n * (a.NH + 2 * a.NKV) + a.NH) * a.HS;
        for (int h = 0; h < a.NKV; h++) {
            const size_t at = cached_first(a, slots[n], h) + (size_t)positions[n] * a.HS;
            memcpy(keys + at, k + h * a.HS, a.HS * sizeof(floatX));
            memcpy(values + at, k + (a.NKV + h) * a.HS, a.HS * sizeof(floatX));
        }
    }
}

/* Keys in runs whose scores stay on the stack; the sums move to each run's new maximum. */
static void attention_cached_head_cpu(floatX* out_x, const floatX* q, const floatX* keys, const floatX* values,
                                      int num_keys, int HS, float scale)
{
    enum { RUN = 128 };
    float out[CACHED_MAX_HS], score[RUN], max = -INFINITY, sum = 0.0f;
    memset(out, 0, HS * sizeof(float));
    for (int first = 0; first < num_keys; first += RUN) {
        const int count = num_keys - first < RUN ? num_keys - first : RUN;
        float new_max = max;
        for (int j = 0; j < count; j++) {
            const floatX* k = keys + (size_t)(first + j) * HS;
            float dot = 0.0f;
            #pragma omp simd reduction(+:dot)
            for (int d = 0; d < HS; d++) dot += load_f(q[d]) * load_f(k[d]);
            score[j] = scale * dot;
            if (score[j] > new_max) new_max = score[j];
        }
        const float shrink = expf(max - new_max);
        sum *= shrink;
        for (int d = 0; d < HS; d++) out[d] *= shrink;
        for (int j = 0; j < count; j++) {
            const float p = expf(score[j] - new_max);
            const floatX* v = values + (size_t)(first + j) * HS;
            sum += p;
            #pragma omp simd
            for (int d = 0; d < HS; d++) out[d] += p * load_f(v[d]);
        }
        max = new_max;
    }
    for (int d = 0; d < HS; d++) store_f(out_x + d, out[d] / sum);
}

static void attention_cached_cpu(floatX* out, floatX* keys, floatX* values, const floatX* qkv, const int* slots,
                                 const int* positions, const int* first_key, CachedDims a)
{
    attention_cached_store_cpu(keys, values, qkv, slots, positions, a);
    #pragma omp parallel for schedule(dynamic)
    for (int item = 0; item < a.N * a.NH; item++) {
        const int n = item / a.NH, h = item % a.NH, begin = first_key != nullptr ? first_key[n] : 0;
        const size_t first = cached_first(a, slots[n], h / (a.NH / a.NKV)) + (size_t)begin * a.HS;
        attention_cached_head_cpu(out + (size_t)item * a.HS, qkv + ((size_t)n * (a.NH + 2 * a.NKV) + h) * a.HS,
                                  keys + first, values + first, positions[n] + 1 - begin, a.HS, a.scale);
    }
}

#else

enum { CACHED_MAX_HS = 256 };
static constexpr int CACHED_WARPS = 4;

/* A block a row. */
static __global__ void attention_cached_store_kernel(floatX* keys, floatX* values, const floatX* qkv, const int* slots,
                                                     const int* positions, CachedDims a)
{
    const int n = blockIdx.x;
    const floatX* k = qkv + ((size_t)n * (a.NH + 2 * a.NKV) + a.NH) * a.HS;
    for (int i = threadIdx.x; i < a.NKV * a.HS; i += blockDim.x) {
        const size_t at = cached_first(a, slots[n], i / a.HS) + (size_t)positions[n] * a.HS + i % a.HS;
        keys[at] = k[i];
        values[at] = k[a.NKV * a.HS + i];
    }
}

/* A warp a row and query head; lane d holds head elements d, d + 32, ... */
template <int LANE> static __global__ void __launch_bounds__(32 * CACHED_WARPS)
attention_cached_kernel(floatX* out, const floatX* keys, const floatX* values, const floatX* qkv, const int* slots,
                        const int* positions, const int* first_key, CachedDims a)
{
    const int item = blockIdx.x * CACHED_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (item >= a.N * a.NH) return;
    const int n = item / a.NH, h = item % a.NH, num_keys = positions[n] + 1;
    const size_t first = cached_first(a, slots[n], h / (a.NH / a.NKV));
    const floatX* q = qkv + ((size_t)n * (a.NH + 2 * a.NKV) + h) * a.HS;
    float query[LANE], acc[LANE] = {}, max = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int c = 0; c < LANE; c++) query[c] = lane + 32 * c < a.HS ? a.scale * load_f(q[lane + 32 * c]) : 0.0f;
    for (int j = first_key != nullptr ? first_key[n] : 0; j < num_keys; j++) {
        const size_t at = first + (size_t)j * a.HS;
        float dot = 0.0f;
#pragma unroll
        for (int c = 0; c < LANE; c++)
            if (lane + 32 * c < a.HS) dot += query[c] * load_f(keys[at + lane + 32 * c]);
        const float score = warp_sum(dot), new_max = fmaxf(max, score);
        const float shrink = expf(max - new_max), p = expf(score - new_max);
        max = new_max;
        sum = sum * shrink + p;
#pragma unroll
        for (int c = 0; c < LANE; c++)
            if (lane + 32 * c < a.HS) acc[c] = acc[c] * shrink + p * load_f(values[at + lane + 32 * c]);
    }
#pragma unroll
    for (int c = 0; c < LANE; c++)
        if (lane + 32 * c < a.HS) store_f(out + (size_t)item * a.HS + lane + 32 * c, acc[c] / sum);
}

static void attention_cached_launch(floatX* out, floatX* keys, floatX* values, const floatX* qkv, const int* slots,
                                    const int* positions, const int* first_key, CachedDims a, cudaStream_t stream)
{
    LAUNCH(attention_cached_store_kernel, a.N, 256, 0, stream, keys, values, qkv, slots, positions, a);
    const unsigned grid = (unsigned)ceil_div((size_t)a.N * a.NH, CACHED_WARPS);
    if (a.HS <= 64)
        LAUNCH((attention_cached_kernel<2>), grid, 32 * CACHED_WARPS, 0, stream, out, keys, values, qkv, slots,
               positions, first_key, a);
    else if (a.HS <= 128)
        LAUNCH((attention_cached_kernel<4>), grid, 32 * CACHED_WARPS, 0, stream, out, keys, values, qkv, slots,
               positions, first_key, a);
    else
        LAUNCH((attention_cached_kernel<8>), grid, 32 * CACHED_WARPS, 0, stream, out, keys, values, qkv, slots,
               positions, first_key, a);
    CUDA_CHECK(cudaGetLastError());
}

#endif

static void attention_cached(floatX* out, floatX* keys, floatX* values, const floatX* qkv, const int* slots,
                             const int* positions, const int* first_key, int N, int T, int NH, int NKV, int HS,
                             float scale, cudaStream_t stream)
{
    ENSURE(HS <= CACHED_MAX_HS, "head size %d: at most %d here", HS, (int)CACHED_MAX_HS);
    const CachedDims a = {N, T, NH, NKV, HS, scale};
    ON_CPU(attention_cached_cpu(out, keys, values, qkv, slots, positions, first_key, a));
#ifndef DEVICE_CPU
    attention_cached_launch(out, keys, values, qkv, slots, positions, first_key, a, stream);
#endif
}

#ifdef OP_TESTS
#include "optest.h"

template <class R> static void attention_cached_ref(R* out, R* keys, R* values, const R* qkv, const int* slots,
                                                    const int* positions, const int* first_key, CachedDims a)
{
    const int heads = a.NH + 2 * a.NKV;
    for (int n = 0; n < a.N; n++)
        for (int i = 0; i < a.NKV * a.HS; i++) {
            const size_t at = cached_first(a, slots[n], i / a.HS) + (size_t)positions[n] * a.HS + i % a.HS;
            keys[at] = qkv[((size_t)n * heads + a.NH) * a.HS + i];
            values[at] = qkv[((size_t)n * heads + a.NH + a.NKV) * a.HS + i];
        }
    R* p = (R*)op_alloc(a.T * sizeof(R));
    for (int item = 0; item < a.N * a.NH; item++) {
        const int n = item / a.NH, h = item % a.NH, num_keys = positions[n] + 1;
        const int begin = first_key != nullptr ? first_key[n] : 0;
        const size_t first = cached_first(a, slots[n], h / (a.NH / a.NKV));
        R max = -INFINITY, sum = 0;
        for (int j = begin; j < num_keys; j++) {
            p[j] = 0;
            for (int d = 0; d < a.HS; d++)
                p[j] += qkv[((size_t)n * heads + h) * a.HS + d] * keys[first + (size_t)j * a.HS + d];
            p[j] *= (R)a.scale;
            if (p[j] > max) max = p[j];
        }
        for (int j = begin; j < num_keys; j++) sum += p[j] = std::exp(p[j] - max);
        for (int d = 0; d < a.HS; d++) {
            R total = 0;
            for (int j = begin; j < num_keys; j++) total += p[j] / sum * values[first + (size_t)j * a.HS + d];
            out[(size_t)item * a.HS + d] = total;
        }
    }
    free(p);
}

/* dims: sequences, T, NH, NKV, HS, window. Each sequence brings one to three tokens, each from a place of its own. */
static void attention_cached_test(OpRun* run)
{
    const int *d = run->dims, num_slots = d[0], T = d[1];
    int N = 0;
    OpInts slots = op_ints(run, "slots", (size_t)num_slots * 3, 0, 1);
    OpInts positions = op_ints(run, "positions", (size_t)num_slots * 3, 0, 1);
    for (int s = 0; s < num_slots; s++) {
        const int first = s == 0 ? T - 1 : (7 * s) % T;
        for (int i = 0; i <= s % 3 && first + i < T; i++, N++) slots.h[N] = s, positions.h[N] = first + i;
    }
    op_upload(run, "slots");
    op_upload(run, "positions");
    OpInts first_key = op_ints(run, "first_key", (size_t)num_slots * 3, 0, 1);
    for (int n = 0; n < N; n++) first_key.h[n] = positions.h[n] >= d[5] ? positions.h[n] - d[5] + 1 : 0;
    op_upload(run, "first_key");
    const int *first = d[5] > 0 ? first_key.dev : nullptr, *h_first = d[5] > 0 ? first_key.h : nullptr;
    const CachedDims a = {N, T, d[2], d[3], d[4], 1.0f / sqrtf((float)d[4])};
    const size_t cache_elems = (size_t)num_slots * a.NKV * T * a.HS;
    OpTensor<floatX> qkv = op_input<floatX>(run, "qkv", (size_t)N * (a.NH + 2 * a.NKV) * a.HS, 0.0, 1.5);
    OpTensor<floatX> keys = op_inout<floatX>(run, "keys", cache_elems, 0.0, 1.5);
    OpTensor<floatX> values = op_inout<floatX>(run, "values", cache_elems, 0.0, 1.5);
    OpTensor<floatX> out = op_output<floatX>(run, "out", (size_t)N * a.NH * a.HS);
    OP_RUN(run, 2.0 * cache_elems * sizeof(floatX), 0,
           attention_cached(out.dev, keys.dev, values.dev, qkv.dev, slots.dev, positions.dev, first, N, T, a.NH,
                            a.NKV, a.HS, a.scale, 0));
    attention_cached_ref(out.f64, keys.f64, values.f64, qkv.f64, slots.h, positions.h, h_first, a);
    attention_cached_ref(out.f32, keys.f32, values.f32, qkv.f32, slots.h, positions.h, h_first, a);
    op_check(run, out);
    op_check_exact(run, keys);
    op_check_exact(run, values);
}

static const OpTest attention_cached_tests[] = {
    {"attention_cached", attention_cached_test, {1, 1, 1, 1, 1}, OpWhen::ALWAYS},
    {"attention_cached", attention_cached_test, {5, 40, 4, 1, 24}, OpWhen::ALWAYS},
    {"attention_cached", attention_cached_test, {3, 300, 6, 2, 64}, OpWhen::ALWAYS},
    {"attention_cached", attention_cached_test, {2, 20, 2, 2, 128}, OpWhen::ALWAYS},
    {"attention_cached", attention_cached_test, {2, 20, 2, 1, 250}, OpWhen::ALWAYS},
    {"attention_cached", attention_cached_test, {5, 40, 4, 1, 24, 7}, OpWhen::ALWAYS},
    {"attention_cached", attention_cached_test, {3, 300, 6, 2, 64, 150}, OpWhen::ALWAYS},
    {"attention_cached", attention_cached_test, {8, 2048, 32, 4, 64}, OpWhen::BENCH},
};

#endif
