/* attention_dims.cuh: what attention.cuh and attention_mma.cuh share: sizes, where a head's rows are, the keys that a
 * query sees, its dropout. */
#pragma once
#include "attention_spans.cuh"
#include "dropout.cuh"

typedef struct { int B, T, NH, NKV, HS; float scale; AttentionSpans spans; } AttentionDims;

/* Where a head's first row starts in qkv, out and lse, and how far its rows are apart. */
HOSTDEV size_t attention_ld_qkv(AttentionDims a) { return (size_t)(a.NH + 2 * a.NKV) * a.HS; }
HOSTDEV size_t attention_ld_out(AttentionDims a) { return (size_t)a.NH * a.HS; }
HOSTDEV size_t attention_q(AttentionDims a, int b, int h) { return (size_t)b * a.T * attention_ld_qkv(a) + h * a.HS; }
HOSTDEV size_t attention_k(AttentionDims a, int b, int kv_head) { return attention_q(a, b, a.NH + kv_head); }
HOSTDEV size_t attention_v(AttentionDims a, int b, int kv_head) { return attention_q(a, b, a.NH + a.NKV + kv_head); }
HOSTDEV size_t attention_o(AttentionDims a, int b, int h) { return (size_t)b * a.T * attention_ld_out(a) + h * a.HS; }
HOSTDEV size_t attention_l(AttentionDims a, int b, int h) { return ((size_t)b * a.NH + h) * a.T; }

/* The first key that a query of sequence b sees, and the last query that sees a key. Rows past T: as row T - 1. */
HOSTDEV int attention_first_key(AttentionDims a, int b, int query)
{
    return a.spans.first_key == nullptr ? 0 : a.spans.first_key[(size_t)b * a.T + (query < a.T ? query : a.T - 1)];
}
HOSTDEV int attention_last_query(AttentionDims a, int b, int key)
{
    return a.spans.last_query == nullptr ? a.T - 1 : a.spans.last_query[(size_t)b * a.T + (key < a.T ? key : a.T - 1)];
}

/* Where the running maximum of the online softmax starts: below all scores, but finite, since a row may see no key of
 * a tile that other rows need, and exp(-inf - -inf) is no number. */
static constexpr float ATTENTION_MIN_SCORE = -1.7e38f;

/* What dropout makes of the probability of one score: 0 or 1/(1 - drop). */
HOSTDEV float attention_keep(DropoutKey key, const Dropout& d, int query, int key_idx, int T)
{
    return dropout_keeps(key, (unsigned)query * (unsigned)T + (unsigned)key_idx, d.threshold) ? d.scale : 0.0f;
}

#ifndef DEVICE_CPU
/* A block may use 48 KiB without asking. */
template<class Kernel> static void attention_allow_shared(Kernel kernel, size_t bytes)
{
    if (bytes > 48 * 1024)
        CUDA_CHECK(cudaFuncSetAttribute((const void*)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
}
#endif
