/* dropout.cuh: elements set to 0 with probability p, the others divided by 1 - p. No mask is ever stored: whether an
 * element stays is a function of (seed, layer, site, position of its sequence in the data stream, element), so that a
 * recomputed forward and the backward see the same mask, and so do any number of ranks, micro-steps and stages.
 *   out = inp * keeps / (1 - p)            the backward is the same on gradients
 * shapes  out inp (count) floatX, out may be inp: elements first.. of (B,row_elems)
 * writes  out =
 * needs   row_elems < 2^32, the elements of one sequence
 * exact   integers: the same mask for any number of CPU threads and on every device
 * cost    two sizes of the tensor, judged against memory bandwidth
 * source  Srivastava et al. 2014. The generator is a counter: 64 bits of (seed, layer, site, sequence) by splitmix64's
 *         finaliser (Steele, Lea & Flood 2014), then for each element two rounds of Wellons' lowbias32
 *         (nullprogram.com/blog/2018/07/31), one for each half of the key: 4 multiplications of 32 bits an element */
#pragma once
#include "vec.cuh"

/* What a kernel is given; threshold 0: nothing is dropped. */
struct Dropout {
    unsigned long long key;                          // of seed, layer and site
    unsigned long long first_sequence;               // of row 0, in the stream of data
    unsigned first_head;                             // of the model, that is this rank's head 0
    unsigned threshold;                              // an element stays if its 32 bits reach it
    float scale;                                     // 1 / (1 - p)
};

/* The key of one sequence, or of one of its heads. */
struct DropoutKey { unsigned low, high; };

HOSTDEV unsigned long long dropout_mix64(unsigned long long x)
{
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

HOSTDEV unsigned dropout_mix32(unsigned x)
{
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

HOSTDEV DropoutKey dropout_key(const Dropout& d, size_t b, unsigned head)
{
    const unsigned long long x = dropout_mix64(dropout_mix64(d.key ^ (d.first_sequence + b)) + d.first_head + head);
    return {(unsigned)x, (unsigned)(x >> 32)};
}

HOSTDEV bool dropout_keeps(DropoutKey key, unsigned element, unsigned threshold)
{
    return dropout_mix32(dropout_mix32(element ^ key.low) + key.high) >= threshold;
}

static Dropout dropout_site(unsigned long long seed, int layer, int site, size_t first_sequence, double p)
{
    const unsigned long long key = dropout_mix64(dropout_mix64(seed) + (unsigned long long)layer * 8 + site);
    return {key, first_sequence, 0, (unsigned)(p * 4294967296.0), (float)(1.0 / (1.0 - p))};
}

#ifdef DEVICE_CPU

static void dropout_cpu(floatX* out, const floatX* inp, size_t first, size_t count, size_t row_elems, Dropout d)
{
    for (size_t done = 0, n; done < count; done += n) {          // what there is of each sequence
        const size_t b = (first + done) / row_elems, start = (first + done) % row_elems;
        const DropoutKey key = dropout_key(d, b, 0);
        n = row_elems - start < count - done ? row_elems - start : count - done;
        #pragma omp parallel for simd
        for (size_t i = 0; i < n; i++)
            store_f(out + done + i, dropout_keeps(key, (unsigned)(start + i), d.threshold)
                                    ? load_f(inp[done + i]) * d.scale : 0.0f);
    }
}

#else

static constexpr int DROPOUT_BLOCK = 256;

/* One vector of W a thread, inside a sequence. */
template <int W> static __global__ void __launch_bounds__(DROPOUT_BLOCK)
dropout_kernel(floatX* out, const floatX* inp, size_t first, size_t count, size_t row_elems, Dropout d)
{
    const size_t at = ((size_t)blockIdx.x * DROPOUT_BLOCK + threadIdx.x) * W;
    if (at >= count) return;
    const size_t b = (first + at) / row_elems, i = (first + at) % row_elems;
    const DropoutKey key = dropout_key(d, b, 0);
    float x[W];
    load_vec(x, inp + at);
#pragma unroll
    for (int k = 0; k < W; k++) x[k] = dropout_keeps(key, (unsigned)(i + k), d.threshold) ? x[k] * d.scale : 0.0f;
    store_vec(out + at, x);
}

#endif

static void dropout(floatX* out, const floatX* inp, size_t first, size_t count, size_t row_elems, Dropout d,
                    cudaStream_t stream)
{
    OP(stream, 0, 2.0 * count * sizeof(floatX), count, row_elems);
    ENSURE(row_elems <= UINT32_MAX, "dropout: %zu elements in a sequence, at most %u", row_elems, UINT32_MAX);
    ON_CPU(dropout_cpu(out, inp, first, count, row_elems, d));
#ifndef DEVICE_CPU
    const bool whole_vectors = first % VEC == 0 && count % VEC == 0;
    if (whole_vectors && is_vec(out, row_elems) && is_vec(inp, row_elems))
        LAUNCH((dropout_kernel<VEC>), (unsigned)ceil_div(count, DROPOUT_BLOCK * VEC), DROPOUT_BLOCK, 0, stream, out,
               inp, first, count, row_elems, d);
    else
        LAUNCH((dropout_kernel<1>), (unsigned)ceil_div(count, DROPOUT_BLOCK), DROPOUT_BLOCK, 0, stream, out, inp, first,
               count, row_elems, d);
    CUDA_CHECK(cudaGetLastError());
#endif
}

#ifdef OP_TESTS
#include "optest.h"

/* The mask by the definition, in a form of its own. */
static bool dropout_keeps_ref(const Dropout& d, uint64_t b, uint64_t head, uint32_t element)
{
    uint64_t x[2] = {d.key ^ (d.first_sequence + b), 0};
    for (int k = 0; k < 2; k++) {
        uint64_t z = x[k] + 0x9e3779b97f4a7c15ull;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        z ^= z >> 31;
        if (k == 0) x[1] = z + head;
        else x[0] = z;
    }
    uint32_t h = element ^ (uint32_t)x[0];
    for (int k = 0; k < 2; k++) {
        h = (h ^ (h >> 16)) * 0x7feb352du;
        h = (h ^ (h >> 15)) * 0x846ca68bu;
        h ^= h >> 16;
        if (k == 0) h += (uint32_t)(x[0] >> 32);
    }
    return h >= d.threshold;
}

/* dims: B, elements of a sequence, p in percent, the first element that there is */
static void dropout_test(OpRun* run)
{
    const int B = run->dims[0], n = run->dims[1];
    const size_t first = run->dims[3], count = (size_t)B * n - first;
    const Dropout d = dropout_site(42, 3, 1, 1000, run->dims[2] / 100.0);
    OpTensor<floatX> out = op_output<floatX>(run, "out", count);
    OpTensor<floatX> inp = op_input<floatX>(run, "inp", count, 0.0, 1.0);
    OP_RUN(run, 2.0 * count * sizeof(floatX), 0, dropout(out.dev, inp.dev, first, count, n, d, 0));
    for (size_t i = 0; i < count; i++) {
        const bool keeps = dropout_keeps_ref(d, (first + i) / n, 0, (uint32_t)((first + i) % n));
        out.f64[i] = keeps ? inp.f64[i] / (1 - run->dims[2] / 100.0) : 0;
        out.f32[i] = keeps ? inp.f32[i] * d.scale : 0;
    }
    op_check(run, out);
}

/* A million elements of each of: one sequence, one element of many sequences, layers, sites and heads. The share that
 * stays is within 5 standard deviations of 1 - p, and neighbours are as often both dropped as chance says. */
static void dropout_statistics_test(OpRun* run)
{
    const double p = run->dims[0] / 100.0;
    const int n = 1 << 20;
    for (int along = 0; along < 5; along++) {
        int num_kept = 0, num_pairs = 0;
        bool before = false;
        for (int i = 0; i < n; i++) {
            const Dropout d = dropout_site(7, along == 2 ? i : 0, along == 3 ? i : 0, along == 1 ? i : 0, p);
            const bool keeps = dropout_keeps(dropout_key(d, 0, along == 4 ? i : 0), along == 0 ? i : 0, d.threshold);
            num_kept += keeps;
            num_pairs += keeps && before;
            before = keeps;
        }
        const double share = 1 - p, deviation = sqrt(share * p / n), pair = share * share;
        op_check_value(run, "share", (double)num_kept / n, share, 5 * deviation);
        op_check_value(run, "pairs", (double)num_pairs / n, pair, 5 * sqrt(3 * pair * (1 - pair) / n));
    }
}

static const OpTest dropout_tests[] = {
    {"dropout", dropout_test, {1, 1, 10}, OpWhen::ALWAYS},
    {"dropout", dropout_test, {3, 1000, 10}, OpWhen::ALWAYS},
    {"dropout", dropout_test, {2, 4099, 50}, OpWhen::ALWAYS},
    {"dropout", dropout_test, {2, 640, 0}, OpWhen::ALWAYS},
    {"dropout", dropout_test, {5, 96, 30, 240}, OpWhen::ALWAYS},
    {"dropout", dropout_test, {3, 99, 30, 100}, OpWhen::ALWAYS},
    {"dropout_statistics", dropout_statistics_test, {10}, OpWhen::ALWAYS},
    {"dropout_statistics", dropout_statistics_test, {50}, OpWhen::ALWAYS},
    {"dropout", dropout_test, {16, 1024 * 768, 10}, OpWhen::BENCH},
};

#endif
