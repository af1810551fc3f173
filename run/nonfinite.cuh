/* nonfinite.cuh: what was not finite first in a skipped step, so that a bad file, an overflow and a learning rate that
 * is too high can be told apart.
 *   first_nonfinite(run, step, slot)   of step `step` (counted from 1), the same on every rank. Synchronises
 * A loss that is not finite comes from the forward, which is repeated, without dropout, on the step's micro-batches:
 * the first activation that is not finite is named, or a weight that it is computed with. On a GPU the weights may be
 * one step younger. Where the loss is finite, the backward has overflowed: the tensor nearest to the loss is named. */
#pragma once
#include "run.cuh"

typedef struct FirstNonFinite {
    char what[200];              // "weight model.norm.weight (1 element)"
    const char* advice;
} FirstNonFinite;

/* What a block computes, in order: rows and columns, the weight it is computed with, or without one what it is. */
#define BLOCK_POINTS(P) \
    P(a.norm_1,          own, c->C,                  NORM_1_WEIGHT, nullptr) \
    P(qkv_linear(m, &a), N,   heads_width(c),        QKV_WEIGHT, nullptr) \
    P(a.qkv,             N,   heads_width(c),        c->qk_norm ? Q_NORM_WEIGHT : QKV_WEIGHT, nullptr) \
    P(a.att,             N,   config_dim(c, Dim::Q), NUM_ROWS, "attention") \
    P(a.residual_2,      own, c->C,                  PROJ_WEIGHT, nullptr) \
    P(a.norm_2,          own, c->C,                  NORM_2_WEIGHT, nullptr) \
    P(a.fc,              N,   fc_width(c),           FC_WEIGHT, nullptr) \
    P(a.fc_act,          N,   c->F,                  NUM_ROWS, "the MLP's activation function") \
    P(m->branch,         own, c->C,                  FCPROJ_WEIGHT, nullptr)
#define POINT_COUNT(at, rows, columns, row, what) + 1
static constexpr int NUM_BLOCK_POINTS = 0 BLOCK_POINTS(POINT_COUNT);
#undef POINT_COUNT

/* Points of the forward in its order: the embedding, those of each block, the final norm, the logits. */
static int point_of_block(int layer) { return 1 + layer * NUM_BLOCK_POINTS; }
static int point_of_norm_f(const Config* c) { return point_of_block(c->L); }
static int point_of_logits(const Config* c) { return point_of_norm_f(c) + 1; }

/* Inf and NaN among n values. Synchronises. */
static size_t nonfinite_count(Run* run, const Values& values, size_t n)
{
    Zero* z = &run->zero;
    double h_sums[2];
    CUDA_CHECK(cudaMemsetAsync(z->step_sums, 0, sizeof h_sums, z->compute));         // not used between steps
    global_norm_accumulate(z->step_sums, z->norm_scratch, values, n, z->compute);
    CUDA_CHECK(cudaMemcpyAsync(h_sums, z->step_sums, sizeof h_sums, cudaMemcpyDeviceToHost, z->compute));
    CUDA_CHECK(cudaStreamSynchronize(z->compute));
    return (size_t)h_sums[1];
}

typedef struct ForwardLook { Run* run; int T, first; } ForwardLook;      // first: point that is not finite

static void look_at(ForwardLook* look, int point, const floatX* at, size_t n)
{
    if (look->first <= point) return;
    if (nonfinite_count(look->run, Values{(void*)at, FLOATX_DTYPE, nullptr}, n) > 0) look->first = point;
}

/* Right after the forward of block `layer`: what it has computed is there, whatever is recomputed later. */
static void look_at_block(void* context, int layer)
{
    ForwardLook* look = (ForwardLook*)context;
    const Model* m = &look->run->model;
    const Config* c = &m->config;
    const Block a = model_block(m, layer);
    const size_t N = (size_t)look->run->B * look->T, own = own_rows(c, N);
    int point = point_of_block(layer);
    if (layer == 0) look_at(look, 0, a.residual, own * c->C);
#define POINT_LOOK(at, rows, columns, row, what) look_at(look, point++, at, (rows) * (size_t)(columns));
    BLOCK_POINTS(POINT_LOOK)
#undef POINT_LOOK
}

/* The first point of the step's forward that is not finite, of all ranks and micro-batches; that of the logits if all
 * others are. Every rank computes as much, so that collectives inside a forward meet. */
static int first_point(Run* run, size_t step, int slot)
{
    Model* m = &run->model;
    const int G = (int)step_micro_steps(run, step - 1), T = step_seq_len(run, step - 1);
    int first = point_of_logits(&m->config);
    for (int micro = 0; micro < G && first == point_of_logits(&m->config); micro++) {
        watch_move(run->comm.watch, "a micro-batch of a skipped step", (size_t)run->B * T);
        const int* h_tokens = run->h_tokens + (size_t)(slot * run->G + micro) * run->B * run->T;
        CUDA_CHECK(cudaMemcpyAsync(m->tokens, h_tokens, (size_t)run->B * T * sizeof(int), cudaMemcpyHostToDevice,
                                   run->zero.compute));
        ForwardLook look = {run, T, first};
        model_forward(m, run->B, T, look_at_block, &look);
        look_at(&look, point_of_norm_f(&m->config), m->norm_f,
                own_rows(&m->config, (size_t)run->B * T) * m->config.C);
        first = -(int)comm_max_host(&run->comm, -look.first);
    }
    zero_cache_clear(&run->zero);
    return first;
}

/* Inf and NaN in what this rank owns of tensor t, as the forward reads it. */
static size_t nonfinite_in_weight(Run* run, const Tensor* t)
{
    const Zero* z = &run->zero;
    const Range part = tensor_part(t, unit_slice(z, t->unit));
    if (part.count == 0) return 0;
    const Values values = t->fp32 ? values_of(z->fp32_params + part.first)
                          : Values{zero_own_param(z, t->unit, part.first), FLOATX_DTYPE, nullptr};
    return nonfinite_count(run, values, part.count);
}

static size_t sum_of_ranks(const Comm* c, size_t own)
{
    size_t sum = 0, *all = (size_t*)malloc_checked(c->num_ranks * sizeof *all);
    comm_gather_host(c, all, &own, sizeof own);
    for (int r = 0; r < c->num_ranks && c->rank == 0; r++) sum += all[r];
    comm_broadcast_host(c, &sum, sizeof sum);
    free(all);
    return sum;
}

/* Names the first weight `row`, or its bias, of the layer (-1: outside of blocks) that is not finite. */
static bool weight_is_named(Run* run, FirstNonFinite* first, int layer, int row)
{
    const Shard* s = &run->model.shard;
    const int unit = unit_block(&run->model.config, layer);
    for (int i = 0; i < s->num_tensors; i++) {
        const Tensor* t = &s->tensors[i];
        const bool is_of_layer = layer < 0 || t->unit == unit || t->home == unit;
        if (!is_of_layer || (t->row != row && t->row != row + 1)) continue;
        size_t own = 0;                                  // of all pieces of a weight that is cut
        for (int k = i; k < s->num_tensors; k++)
            if (strcmp(s->tensors[k].name, t->name) == 0) own += nonfinite_in_weight(run, &s->tensors[k]);
        const size_t num = sum_of_ranks(&run->comm, own);
        if (num == 0) continue;
        snprintf(first->what, sizeof first->what, "weight %s (%zu element%s)", t->name, num, num == 1 ? "" : "s");
        first->advice = "take an earlier checkpoint, or fetch the file again";
        return true;
    }
    return false;
}

static FirstNonFinite point_name(Run* run, int point)
{
    const Config* c = &run->model.config;
    FirstNonFinite first = {"", is_fp16() ? "it overflows fp16: take -p bf16 or fp32, or lower -l"
                                          : "it overflows: lower -l, or check the data"};
    const int layer = point > 0 && point < point_of_norm_f(c) ? (point - 1) / NUM_BLOCK_POINTS : -1;
    int row = point == 0 ? WTE : point == point_of_norm_f(c) ? NORM_F_WEIGHT : c->tied ? WTE : LM_HEAD;
    const char* what = nullptr;
#define POINT_ROW(at, rows, columns, row, what) {row, what},
    const struct { int row; const char* what; } points[] = { BLOCK_POINTS(POINT_ROW) };
#undef POINT_ROW
    if (layer >= 0) {
        row = points[(point - 1) % NUM_BLOCK_POINTS].row;
        what = points[(point - 1) % NUM_BLOCK_POINTS].what;
    }
    if (what != nullptr) {
        snprintf(first.what, sizeof first.what, "%s of block %d", what, layer);
        return first;
    }
    if (weight_is_named(run, &first, layer, row)) return first;
    if (point == point_of_logits(c)) {
        snprintf(first.what, sizeof first.what, "the loss");
        return first;
    }
    const Tensor* t = unit_tensor(&run->model.shard, layer >= 0 ? unit_block(c, layer) : point == 0 ? unit_embed(c)
                                                                                      : unit_head(c), row);
    const char* end = strstr(t->name, ".weight");
    snprintf(first.what, sizeof first.what, "the output of %.*s", (int)(end - t->name), t->name);
    return first;
}

static FirstNonFinite first_nonfinite(Run* run, size_t step, int slot)
{
    if (!std::isfinite(run->zero.h_state[slot].loss)) return point_name(run, first_point(run, step, slot));
    const char* advice = !is_fp16() ? "lower -l, or check the data" : run->flags->loss_scale > 0
        ? "leave out --loss-scale, or take -p bf16" : "lower -l or --min-loss-scale, or take -p bf16";
    FirstNonFinite first = {"the loss", advice};
    const int t = zero_last_nonfinite(&run->zero, slot);
    if (t >= 0) snprintf(first.what, sizeof first.what, "the gradient of %s", run->model.shard.tensors[t].name);
    return first;
}
