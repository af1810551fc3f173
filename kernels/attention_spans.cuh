/* attention_spans.cuh: which keys a query sees: those of its document and within its window, up to itself. A mask that
 * is causal, block-diagonal (packed documents) and banded (sliding window), as two integers for each token:
 *   first_key[b,t]  = max(t - positions[b,t], t - window + 1, 0)
 *   last_query[b,j] = the largest t with first_key[b,t] <= j
 * shapes  positions first_key last_query (B,T) int. positions count from 0 in each document; null: each sequence is one
 *         document. window 0: none
 * writes  first_key =, last_query =
 * needs   positions of a document in order, so that neither output ever decreases within a sequence
 * exact   integers
 * cost    12*B*T bytes and log2(T) reads of positions for each key
 * source  Beltagy et al. 2020, arXiv:2004.05150 (windows); Krell et al. 2021, arXiv:2107.02027 (packed documents) */
#pragma once
#include "vec.cuh"

/* Both null: a query sees all keys up to itself. pairs: how many pairs of a query and a key that it sees, for FLOPs. */
typedef struct { int *first_key, *last_query; double pairs; } AttentionSpans;

HOSTDEV int spans_first_key(const int* positions, int window, int t)
{
    const int document = positions != nullptr ? t - positions[t] : 0;
    const int slides = window > 0 ? t - window + 1 : 0;
    return document > slides ? document : slides > 0 ? slides : 0;
}

/* positions: of the tokens of its sequence. Bisection, since first_key never decreases. */
HOSTDEV int spans_last_query(const int* positions, int window, int key, int T)
{
    int sees = key, not_known = T;                   // sees: a query that sees it; not_known: none from it on does
    while (not_known - sees > 1) {
        const int middle = sees + (not_known - sees) / 2;
        if (spans_first_key(positions, window, middle) <= key) sees = middle;
        else not_known = middle;
    }
    return sees;
}

/* The number of keys that a token at this position of its document sees; the sum over a document of T tokens. */
static double spans_keys(int position, int window)
{
    return window > 0 && position >= window ? window : position + 1.0;
}
static double spans_pairs(double T, int window)
{
    const double ramp = window > 0 && T > window ? window : T;
    return ramp * (ramp + 1) / 2 + (T - ramp) * ramp;
}

#ifdef DEVICE_CPU

static void attention_spans_cpu(int* first_key, int* last_query, const int* positions, int window, int B, int T)
{
    #pragma omp parallel for
    for (int n = 0; n < B * T; n++) {
        const int t = n % T;
        const int* own = positions != nullptr ? positions + (n - t) : nullptr;
        first_key[n] = spans_first_key(own, window, t);
        last_query[n] = spans_last_query(own, window, t, T);
    }
}

#else

static __global__ void attention_spans_kernel(int* first_key, int* last_query, const int* positions, int window, int B,
                                              int T)
{
    const int n = blockIdx.x * blockDim.x + threadIdx.x, t = n % T;
    if (n >= B * T) return;
    const int* own = positions != nullptr ? positions + (n - t) : nullptr;
    first_key[n] = spans_first_key(own, window, t);
    last_query[n] = spans_last_query(own, window, t, T);
}

#endif

static void attention_spans(int* first_key, int* last_query, const int* positions, int window, int B, int T,
                            cudaStream_t stream)
{
    OP(stream, 0, (positions != nullptr ? 3.0 : 2.0) * B * T * sizeof(int), B, T);
    ON_CPU(attention_spans_cpu(first_key, last_query, positions, window, B, T));
#ifndef DEVICE_CPU
    LAUNCH(attention_spans_kernel, ceil_div((size_t)B * T, 256), 256, 0, stream, first_key, last_query, positions,
           window, B, T);
    CUDA_CHECK(cudaGetLastError());
#endif
}

#ifdef OP_TESTS
#include "optest.h"

/* Documents that begin at random places, a mean length of `mean` tokens; without `mean` no positions. */
static OpInts spans_test_positions(OpRun* run, int B, int T, int mean)
{
    OpInts positions = op_ints(run, "positions", (size_t)B * T, 0, mean > 0 ? mean : 1);
    for (int n = 0; n < B * T; n++) positions.h[n] = n % T == 0 || positions.h[n] == 0 ? 0 : positions.h[n - 1] + 1;
    op_upload(run, "positions");
    return positions;
}

/* dims: B, T, window, mean length of a document. Compares with the mask, pair by pair. */
static void attention_spans_test(OpRun* run)
{
    const int B = run->dims[0], T = run->dims[1], window = run->dims[2], mean = run->dims[3];
    const OpInts positions = spans_test_positions(run, B, T, mean);
    const size_t size_bytes = (size_t)B * T * sizeof(int);
    int* first_key = (int*)op_bytes(run, "first_key", OpKind::OUTPUT, nullptr, size_bytes);
    int* last_query = (int*)op_bytes(run, "last_query", OpKind::OUTPUT, nullptr, size_bytes);
    OP_RUN(run, 0, 0, attention_spans(first_key, last_query, mean > 0 ? positions.dev : nullptr, window, B, T, 0));
    const int *first = (const int*)op_result(run, "first_key"), *last = (const int*)op_result(run, "last_query");
    double num_wrong = 0, num_pairs = 0, pairs = 0;
    int document = 0;
    for (int b = 0; b < B; b++) {
        for (int t = 0; t < T; t++) {
            const int n = b * T + t;
            if (t == 0 || (mean > 0 && positions.h[n] == 0)) document = t;
            pairs += mean > 0 ? spans_keys(positions.h[n], window) : 0;
            for (int key = 0; key < T; key++) {
                const bool sees = key <= t && key >= document && (window == 0 || key > t - window);
                num_wrong += sees != (key <= t && key >= first[n]);
                num_wrong += sees != (t >= key && t <= last[b * T + key]);
                num_pairs += sees;
            }
        }
        if (mean == 0) pairs += spans_pairs(T, window);
    }
    op_check_value(run, "pairs where they are wrong", num_wrong, 0, 0);
    op_check_value(run, "how many pairs", pairs, num_pairs, 0);
}

static const OpTest attention_spans_tests[] = {
    {"attention_spans", attention_spans_test, {1, 1, 0, 0}, OpWhen::ALWAYS},
    {"attention_spans", attention_spans_test, {2, 33, 0, 4}, OpWhen::ALWAYS},
    {"attention_spans", attention_spans_test, {2, 70, 7, 0}, OpWhen::ALWAYS},
    {"attention_spans", attention_spans_test, {3, 129, 5, 9}, OpWhen::ALWAYS},
    {"attention_spans", attention_spans_test, {1, 40, 100, 1}, OpWhen::ALWAYS},
};

#endif
