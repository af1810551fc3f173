/* spans.cuh: which keys the queries of a micro-batch see (kernels/attention_spans.cuh), in layers without and with a
 * sliding window, and the positions of tokens where a sequence holds several documents. Layers in which a query sees
 * all keys up to itself have no arrays: their attention is plain causal. */
#pragma once
#include "kernels/attention_spans.cuh"
#include "shapes.cuh"
#include "zero/memory.h"

typedef struct Spans {
    bool documents;           // a sequence may hold several documents: set before spans_plan
    bool restarts;            // the micro-batch has them: spans_documents
    int* positions;           // (B,T)   documents: of each token in its document
    AttentionSpans kinds[2];  // (B,T)   of layers without and with the window
} Spans;

static int num_sliding_layers(const Config* c)
{
    int num_sliding = 0;
    for (int layer = 0; layer < c->L; layer++) num_sliding += c->slides[layer];
    return num_sliding;
}

/* Is there a layer, without or with the window, in which a query of T tokens does not see all keys before it? */
static bool spans_needed(const Config* c, bool slides, bool documents, int T)
{
    const int num_sliding = num_sliding_layers(c);
    return (slides ? num_sliding : c->L - num_sliding) > 0 && (documents || (slides && T > c->window));
}

static void spans_plan(Spans* s, const Config* c, Plan* plan, int B, int T)
{
    const size_t N = (size_t)B * T;
    if (s->documents) plan_add(plan, "tokens", Place::DEVICE, &s->positions, N);
    for (bool slides : {false, true})
        if (spans_needed(c, slides, s->documents, T))
            for (int** p : {&s->kinds[slides].first_key, &s->kinds[slides].last_query})
                plan_add(plan, "keys that a query sees", Place::DEVICE, p, N);
}

/* Sets the documents of the micro-batch (B,T): h_positions (B,T), pinned, are the positions of its tokens in
 * their documents, from 0 on without a gap. Null: each sequence is one document. Holds until the next call; the copy
 * is enqueued like that of the tokens. */
static void spans_documents(Spans* s, const Config* c, const int* h_positions, int B, int T, cudaStream_t stream)
{
    const size_t N = (size_t)B * T;
    s->restarts = h_positions != nullptr;
    if (!s->restarts) return;
    assert(s->documents);
    for (bool slides : {false, true}) {
        double pairs = 0;
        for (size_t n = 0; n < N; n++) pairs += spans_keys(h_positions[n], slides ? c->window : 0);
        s->kinds[slides].pairs = pairs;
    }
    CUDA_CHECK(cudaMemcpyAsync(s->positions, h_positions, N * sizeof(int), cudaMemcpyHostToDevice, stream));
}

/* Of the micro-batch's tokens; null: row n is at position n % T. */
static const int* spans_positions(const Spans* s) { return s->restarts ? s->positions : nullptr; }

/* At the beginning of the forward. */
static void spans_begin(Spans* s, const Config* c, int B, int T, cudaStream_t stream)
{
    for (bool slides : {false, true}) {
        if (!spans_needed(c, slides, s->restarts, T)) continue;
        const int window = slides ? c->window : 0;
        AttentionSpans* kind = &s->kinds[slides];
        if (!s->restarts) kind->pairs = B * spans_pairs(T, window);
        attention_spans(kind->first_key, kind->last_query, spans_positions(s), window, B, T, stream);
    }
}

static AttentionSpans spans_of_layer(const Spans* s, const Config* c, int layer, int T)
{
    const bool slides = c->slides[layer];
    return spans_needed(c, slides, s->restarts, T) ? s->kinds[slides] : AttentionSpans{};
}
