/* generate.cuh: text from a model, one token after another. The whole context runs through the model for each token (no
 * key/value cache yet): meant for a look at a run, not for serving. Runs on rank 0; at stage 3, where its
 * parameters have to be gathered, on all ranks alike.
 * Random numbers come from a counter, mix64 of seed and position, so a sample can be repeated. */
#pragma once
#include "data/tokenizer.h"
#include "passes.cuh"
#include "zero/init.h"

typedef struct { int num_tokens, top_k; double temperature; uint64_t seed; } GenerateConfig;

typedef struct { float logit; int id; } Candidate;

static int candidate_compare(const void* a, const void* b)
{
    float x = ((const Candidate*)a)->logit, y = ((const Candidate*)b)->logit;
    return x < y ? 1 : x > y ? -1 : ((const Candidate*)a)->id - ((const Candidate*)b)->id;
}

/* One of the top_k (0: all) likeliest ids, with probability softmax(logits / temperature); temperature 0: the
 * likeliest. logits (V); u uniform in [0,1). */
static int sample_token(const float* logits, int V, const GenerateConfig* config, double u)
{
    Candidate* order = (Candidate*)malloc_checked(V * sizeof *order);
    for (int i = 0; i < V; i++) order[i] = Candidate{logits[i], i};
    qsort(order, V, sizeof *order, candidate_compare);
    int k = config->temperature == 0 ? 1 : config->top_k > 0 && config->top_k < V ? config->top_k : V;
    double total = 0, below = 0;
    for (int i = 0; k > 1 && i < k; i++) total += exp((order[i].logit - order[0].logit) / config->temperature);
    int chosen = order[0].id;
    for (int i = 0; k > 1 && i < k; i++) {
        chosen = order[i].id;
        below += exp((order[i].logit - order[0].logit) / config->temperature);
        if (below > u * total) break;
    }
    free(order);
    return chosen;
}

/* The id after ids (num_ids): the last m->T of them are the context. h_logits (V) is a buffer. */
static int next_token(Model* m, const int* ids, int num_ids, const GenerateConfig* config, float* h_logits)
{
    cudaStream_t stream = m->zero->compute;
    const Config* c = &m->config;
    int T = num_ids < m->T ? num_ids : m->T;
    CUDA_CHECK(cudaMemcpyAsync(m->tokens, ids + (num_ids - T), T * sizeof(int), cudaMemcpyHostToDevice, stream));
    model_forward(m, 1, T);
    head_forward(m, T - 1, 1);
    floatX* raw = (floatX*)malloc_checked(c->V * sizeof(floatX));
    CUDA_CHECK(cudaMemcpyAsync(raw, m->logits, c->V * sizeof(floatX), cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < c->V; i++) h_logits[i] = load_f(raw[i]);
    free(raw);
    double u = (double)(mix64(config->seed * GOLDEN_GAMMA + num_ids) >> 11) / 9007199254740992.0;
    return sample_token(h_logits, c->V, config, u);
}

/* Prints the prompt and config.num_tokens more tokens as they come. */
static void generate_from_ids(Model* m, const Tokenizer* tokenizer, const int* prompt, int num_prompt,
                              GenerateConfig config)
{
    int* ids = (int*)malloc_checked((num_prompt + config.num_tokens) * sizeof(int));
    float* h_logits = (float*)malloc_checked(m->config.V * sizeof(float));
    memcpy(ids, prompt, num_prompt * sizeof(int));
    for (int i = 0; i < num_prompt + config.num_tokens; i++) {
        if (i >= num_prompt) ids[i] = next_token(m, ids, i, &config, h_logits);
        if (m->zero->comm->rank != 0) continue;
        size_t length;
        const char* text = tokenizer_token(tokenizer, ids[i], &length);
        fwrite(text, 1, length, stdout);
        fflush(stdout);
    }
    if (m->zero->comm->rank == 0) printf("\n");
    free(h_logits);
    free(ids);
}

static void generate_from_text(Model* m, const Tokenizer* tokenizer, const char* prompt, GenerateConfig config)
{
    size_t num_ids;
    int* ids = tokenizer_encode(tokenizer, prompt, strlen(prompt), &num_ids);
    ENSURE(num_ids > 0, "--generate needs at least one character of text to continue");
    for (size_t i = 0; i < num_ids; i++)
        ENSURE(ids[i] < m->config.V,
               "the tokenizer gives id %d, the model has %d: it is not this model's tokenizer; give --tokenizer",
               ids[i], m->config.V);
    generate_from_ids(m, tokenizer, ids, (int)num_ids, config);
    free(ids);
}
