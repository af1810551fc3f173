/* choices.cuh: multiple choice, as HellaSwag (Zellers et al. 2019, arXiv:1905.07830) asks it. Each line of the file is
 *   {"ctx": TEXT, "endings": [TEXT, ...], "label": the right one, from 0}
 * and an ending is as likely as its tokens after the context. Two answers are counted: the ending with the highest sum
 * of log-probabilities, and the one with the highest sum per byte of text (short endings have no advantage there).
 * The tokens of an ending are those of "context ending" past the context's own. What does not fit into -t tokens loses
 * its beginning. Ranks share out the lines; at stage 3, where parameters are gathered by all, each does all of them. */
#pragma once
#include "data/tokenizer.h"
#include "passes.cuh"

enum { CHOICES_MAX_ENDINGS = 32 };

typedef struct Choices {
    Model* model;
    const Tokenizer* tokenizer;
    int *h_tokens, *h_targets;      // (B,T)
    float* h_losses;                // (B*T)
} Choices;

typedef struct { double num_items, num_right, num_right_per_byte; } ChoiceCounts;

/* One row of B: tokens and targets of context and ending; only the ending's targets count. Returns its length. */
static int choice_row(int* tokens, int* targets, const Choices* x, const char* context, const char* ending,
                      const char* from)
{
    char* text = (char*)malloc_checked(strlen(context) + strlen(ending) + 2);
    sprintf(text, "%s %s", context, ending);
    size_t num_ids, num_context;
    int* ids = tokenizer_encode(x->tokenizer, text, strlen(text), &num_ids);
    free(tokenizer_encode(x->tokenizer, context, strlen(context), &num_context));
    ENSURE(num_context > 0 && num_ids > num_context, "%s: context and ending need a token each", from);
    for (size_t i = 0; i < num_ids; i++)
        ENSURE(ids[i] < x->model->config.V, "%s: token id %d, the model has %d: give its --tokenizer", from, ids[i],
               x->model->config.V);
    size_t T = x->model->T, first = num_ids - 1 > T ? num_ids - 1 - T : 0;
    int length = (int)(num_ids - 1 - first);
    for (int t = 0; t < length; t++) {
        tokens[t] = ids[first + t];
        targets[t] = first + t + 1 >= num_context ? ids[first + t + 1] : -1;
    }
    free(ids);
    free(text);
    return length;
}

/* losses[e] = sum over the tokens of ending e, for num_endings <= B of them. */
static void choice_losses(double* losses, const Choices* x, const char* context, const cJSON* ending, int num_endings,
                          const char* from)
{
    Model* m = x->model;
    cudaStream_t stream = m->zero->compute;
    size_t N = (size_t)num_endings * m->T;
    memset(x->h_tokens, 0, N * sizeof(int));
    for (size_t i = 0; i < N; i++) x->h_targets[i] = -1;
    for (int e = 0; e < num_endings; e++, ending = ending->next)
        choice_row(x->h_tokens + (size_t)e * m->T, x->h_targets + (size_t)e * m->T, x, context, ending->valuestring,
                   from);
    CUDA_CHECK(cudaMemcpyAsync(m->tokens, x->h_tokens, N * sizeof(int), cudaMemcpyHostToDevice, stream));
    CUDA_CHECK(cudaMemcpyAsync(m->targets, x->h_targets, N * sizeof(int), cudaMemcpyHostToDevice, stream));
    model_forward(m, num_endings, m->T);
    head_losses(m, (int)N);
    CUDA_CHECK(cudaMemcpyAsync(x->h_losses, m->losses, N * sizeof(float), cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    for (int e = 0; e < num_endings; e++) {
        losses[e] = 0;
        for (int t = 0; t < m->T; t++) losses[e] += x->h_losses[(size_t)e * m->T + t];
    }
}

/* One line of the file; its texts are in json, which is to be deleted. */
typedef struct ChoiceItem { cJSON* json; const char* context; const cJSON* first; int num_endings, label; } ChoiceItem;

static ChoiceItem choice_parse(const char* line, size_t length, const char* from)
{
    cJSON* j = json_parse(line, length, from);
    const cJSON *endings = json_array(j, "endings", from), *ending;
    ChoiceItem item = {j, json_string(j, "ctx", from), endings->child, cJSON_GetArraySize(endings), 0};
    ENSURE(item.num_endings > 1 && item.num_endings <= CHOICES_MAX_ENDINGS, "%s: %d endings, need 2 to %d", from,
           item.num_endings, (int)CHOICES_MAX_ENDINGS);
    item.label = (int)json_int(j, "label", 0, item.num_endings - 1, from);
    cJSON_ArrayForEach(ending, endings)
        ENSURE(cJSON_IsString(ending) && ending->valuestring[0], "%s: an ending is not a text", from);
    return item;
}

static void choice_answer(ChoiceCounts* counts, const Choices* x, const char* line, size_t length, const char* from)
{
    ChoiceItem item = choice_parse(line, length, from);
    const cJSON* ending = item.first;
    int best = 0, best_per_byte = 0;
    double losses[CHOICES_MAX_ENDINGS], per_byte[CHOICES_MAX_ENDINGS];
    for (int e = 0; e < item.num_endings; ) {
        int count = item.num_endings - e < x->model->B ? item.num_endings - e : x->model->B;
        choice_losses(losses + e, x, item.context, ending, count, from);
        for (int k = 0; k < count; k++, e++, ending = ending->next)
            per_byte[e] = losses[e] / (double)strlen(ending->valuestring);
    }
    for (int e = 1; e < item.num_endings; e++) {
        if (losses[e] < losses[best]) best = e;
        if (per_byte[e] < per_byte[best_per_byte]) best_per_byte = e;
    }
    counts->num_items += 1;
    counts->num_right += best == item.label;
    counts->num_right_per_byte += best_per_byte == item.label;
    cJSON_Delete(item.json);
}

/* All lines; the counts are those of all ranks. */
static ChoiceCounts choices_count(Model* m, const Tokenizer* tokenizer, const char* path)
{
    Comm* comm = m->zero->comm;
    size_t N = (size_t)m->B * m->T;
    bool all = m->zero->stage == 3;
    const int tp = m->config.tp, num_replicas = comm->num_ranks / tp, replica = comm->rank / tp;
    ChoiceCounts counts = {};
    Choices x = {m, tokenizer, (int*)malloc_checked(N * sizeof(int)), (int*)malloc_checked(N * sizeof(int)),
                 (float*)malloc_checked(N * sizeof(float))};
    size_t text_bytes, length;
    char* text = file_read(path, &text_bytes);
    int idx = 0;
    for (char* line = text; line < text + text_bytes; line += length + 1, idx++) {
        char from[4200];
        const char* end = (const char*)memchr(line, '\n', (size_t)(text + text_bytes - line));
        length = end != nullptr ? (size_t)(end - line) : (size_t)(text + text_bytes - line);
        line[length] = 0;
        snprintf(from, sizeof from, "%s, line %d", path, idx + 1);
        watch_move(comm->watch, "a line of --choices", length);
        if (all || idx % num_replicas == replica) choice_answer(&counts, &x, line, length, from);
    }
    double* sums = m->zero->step_sums;                              // free between steps
    if (!all) {
        comm_barrier_idle(comm);
        if (m->config.tp_rank > 0) counts = ChoiceCounts{};          // of each replica once
        CUDA_CHECK(cudaMemcpyAsync(sums, &counts, sizeof counts, cudaMemcpyHostToDevice, m->zero->compute));
        comm_all_reduce(m->zero->all, sums, 3, ncclFloat64, m->zero->compute);
        CUDA_CHECK(cudaMemcpyAsync(&counts, sums, sizeof counts, cudaMemcpyDeviceToHost, m->zero->compute));
        CUDA_CHECK(cudaStreamSynchronize(m->zero->compute));
    }
    ENSURE(counts.num_items > 0, "--choices %s: is empty", path);
    free(text);
    free(x.h_tokens);
    free(x.h_targets);
    free(x.h_losses);
    return counts;
}
