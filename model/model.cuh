/* model.cuh: the model, one block of pre-norm attention and MLP by the axes of Config. Each family sets them in
 * shapes.cuh; docs/models.md has a table. GPT-2: Radford et al. 2019; LLaMA: Touvron et al. 2023.
 *
 * Legend, used with these meanings everywhere and no others:
 *   B  sequences per rank and micro-step     T   tokens per sequence        N   rows, B*T
 *   C  channels                              L   layers                     F   MLP width
 *   NH query heads   NKV key/value heads     HS  head size                  Q   query width, NH*HS
 *   V  vocabulary    VP  V padded to 64      R   ranks                      G   micro-steps
 * With tensor parallelism (units.cuh) NH, NKV, F, Q and VP are those of one of its ranks, and of the N rows of the
 * residual stream it has own_rows.
 * Gradients are d + name. Weights are stored as in the HF file; the head is (out, in) in all families.
 *
 * What is here: Model, its activations, and where its parameters and gradients are. units.cuh has its tensors,
 * block.cuh forward and backward of a block. */
#pragma once
#include "kernels/attention.cuh"
#include "kernels/attention_cached.cuh"
#include "kernels/classifier.cuh"
#include "kernels/columns.cuh"
#include "kernels/dropout.cuh"
#include "kernels/embedding.cuh"
#include "kernels/layernorm.cuh"
#include "kernels/matmul.cuh"
#include "kernels/qk_norm.cuh"
#include "kernels/rmsnorm.cuh"
#include "kernels/swiglu.cuh"
#include "spans.cuh"
#include "units.cuh"
#include "zero/offload.h"

/* How much of what a forward leaves is kept for the backward; the rest is recomputed by the same kernels from the same
 * numbers, so that the gradients have the same bits. The topmost blocks, whose buffers still hold the forward, are not
 * recomputed. Activation checkpointing: Chen et al. 2016, arXiv:1604.06174. */
enum class Recompute {
    NONE,
    CHEAP,        // the outputs of the norms (those of q and k are rotated), and of SwiGLU, are recomputed: no GEMM
                  // (GELU is part of one)
    MLP,          // and the first GEMM of the MLP
    ATTENTION,    // and q, k, v and the attention: kept are the two places of the residual stream
    BLOCKS,       // all but the input of every segment_layers-th block; that many blocks are recomputed at a time
};

/* The activations of a block, (rows,columns) each, of N rows or of the own ones of the residual stream: type, name,
 * rows, columns, and which layers have one of their own. Struct, memory plan and model_block are made of these lines,
 * and so is the decoder's block. */
#define BLOCK_ACTIVATIONS(A) \
    A(floatX, residual, own, c->C, kept_inputs(m, layer))                   /* input of the block, after the sum */ \
    A(float, norm_1_mean, own, c->norm == Norm::LAYER, kept_always(m, layer)) \
    A(float, norm_1_rstd, own, 1, kept_always(m, layer)) \
    A(floatX, norm_1, own, c->C, kept(m, layer, Recompute::CHEAP)) \
    A(floatX, qkv_linear, N, c->qk_norm ? heads_width(c) : 0, kept(m, layer, Recompute::ATTENTION))   /* of the GEMM */ \
    A(floatX, qkv, N, heads_width(c), kept(m, layer, c->qk_norm ? Recompute::CHEAP : Recompute::ATTENTION)) /* of attention */ \
    A(floatX, att, N, config_dim(c, Dim::Q), kept(m, layer, Recompute::ATTENTION))     /* heads side by side */ \
    A(float, att_lse, N, c->NH, kept(m, layer, Recompute::ATTENTION))     /* (B,NH,T) */ \
    A(floatX, residual_2, own, c->C, kept(m, layer, Recompute::BLOCKS))     /* after attention */ \
    A(float, norm_2_mean, own, c->norm == Norm::LAYER, kept_always(m, layer)) \
    A(float, norm_2_rstd, own, 1, kept_always(m, layer)) \
    A(floatX, norm_2, own, c->C, kept(m, layer, Recompute::CHEAP)) \
    A(floatX, fc, N, fc_width(c), kept(m, layer, Recompute::MLP))         /* F wide, or gate and up side by side */ \
    A(floatX, fc_act, N, c->F, kept(m, layer, is_gated(c) ? Recompute::CHEAP : Recompute::MLP))

typedef struct Block {
#define BLOCK_MEMBER(type, name, rows, columns, kept) type* name;
    BLOCK_ACTIVATIONS(BLOCK_MEMBER)
#undef BLOCK_MEMBER
    const floatX *below, *branch;   // residual is below + branch, or, if that is null, already there
} Block;

typedef struct Model {
    Config config;            // of this rank
    Config whole;             // of the files
    Shard shard;
    Zero* zero;
    Group *tp, *kv;           // tensor parallelism: its ranks, and those of them with the same key/value heads
    bool deterministic;       // their sums too
    bool chunks_vocab;         // stages 2-3: wte and head, or at stage 2 their gradients, are there piece by piece
    Recompute recompute;
    int segment_layers;       // BLOCKS
    bool offloads;            // BLOCKS: the inputs of the segments are in host memory, two of them on the device
    Offload inputs;
    int* visits;              // (num_visits) units in the order of their use in a micro-step
    int num_visits;
    int B, T;                 // largest micro-batch of the replica; a call may use less
    double dropout, attention_dropout;   // probabilities; 0: the pass does not exist
    unsigned long long seed;  // of the masks
    size_t first_sequence;    // of this replica's micro-batch, in the stream of data
    bool drops;               // this is training
    int micro;                // the micro-step, of this step
    int given_head_rows;      // --head-rows; 0: head_chunk_rows decides
    bool on_gpu;              // the plan's device is a GPU
    int head_rows;            // rows of logits that exist at a time
    float* rope;              // (T,HS)    rotary: cosines and sines of every position
    Block blocks;             // of the first layer that has its own, the others behind it: model_block
    Spans spans;              // which keys a query sees; documents
    // one of each
    floatX *branch;           // (own,C)   what a branch adds to the residual stream, until the next norm sums it
    floatX *residual_f;       // (own,C)
    floatX *norm_f;           // (own,C)
    float  *norm_f_mean, *norm_f_rstd;   // (own)
    floatX *stream;           // (N,C)     tensor parallelism: gathered from all ranks, or to be summed over them
    floatX *qkv_part;         // (N,QKV)   kv_ranks > 1: what this rank's GEMM makes, or reads in the backward
    floatX *kv_own, *kv_all;  // (N,2KV), (kv_ranks,N,2KV)   and keys and values of it, of all of these ranks
    ClassifierRows parts;     // (tp,N)    tensor parallelism: what each rank's columns say about a row
    floatX *logits_parts, *logits_whole;   // (tp,rows,VP), (rows,tp*VP)   of a text's next token, from all ranks
    floatX *logits;           // (head_rows,VP), overwritten by dlogits
    float  *losses;           // (N)
    float  *maxima;           // (N)       chunks_vocab, tensor parallelism: of the logits so far
    double *exp_sums;         // (N)       and the sum of their exponentials
    int *tokens, *targets;    // (B,T)
    // backward
    floatX *dresidual;        // (own,C)   gradient of the residual stream, carried from block to block
    floatX *dbranch;          // (own,C)   of a branch before its dropout; without dropout it is dresidual
    floatX *dnorm;            // (N,C or Q) of a norm's output, or of the attention's
    floatX *dfc;              // (N,FC)
    floatX *dfc_act;          // (N,F)     gated; else it is dfc
    floatX *dqkv;             // (N,heads_width)
    float  *scratch;          // largest any op asks for
} Model;

static size_t max_size(size_t a, size_t b) { return a > b ? a : b; }

static bool is_gated(const Config* c) { return c->mlp == Mlp::GATED; }
static bool is_rotary(const Config* c) { return c->positions == Positions::ROTARY; }
static int fc_width(const Config* c) { return (int)config_dim(c, Dim::GATE) + c->F; }

/* Rows of the residual stream that this rank has, of N, and the first of them: every tp-th part. */
static size_t own_rows(const Config* c, size_t N) { return N / c->tp; }
static size_t first_own_row(const Config* c, size_t N) { return c->tp_rank * own_rows(c, N); }

static size_t num_segments(const Model* m) { return ceil_div(m->config.L, m->segment_layers); }
static bool starts_segment(const Model* m, int layer) { return layer % m->segment_layers == 0; }

/* Inputs of segments that are on the device. */
static size_t num_segment_inputs(const Model* m) { return m->offloads ? (size_t)OFFLOAD_BUFFERS : num_segments(m); }

/* Room for N rows of a layer, whole cache lines: each layer's start as the first's do, so that GEMMs and vector loads
 * take the same code path in each, wherever recomputation stores it. */
static size_t layer_elems(size_t N, size_t cols) { return round_up(N * cols, 64); }

/* How many layers have an activation of their own, and which of those a layer uses. */
typedef struct Kept { size_t count, index; } Kept;

static Kept kept_always(const Model* m, int layer) { return Kept{(size_t)m->config.L, (size_t)layer}; }

/* What is recomputed from `level` on. */
static Kept kept(const Model* m, int layer, Recompute level)
{
    if (m->recompute < level) return kept_always(m, layer);
    const size_t count = m->recompute == Recompute::BLOCKS ? m->segment_layers : 1;
    return Kept{count, layer % count};
}

/* The inputs of the segments, then those inside a segment. */
static Kept kept_inputs(const Model* m, int layer)
{
    if (m->recompute != Recompute::BLOCKS) return kept_always(m, layer);
    const size_t segment = m->segment_layers, inputs = num_segment_inputs(m), inside = inputs + layer % segment - 1;
    return Kept{inputs + segment - 1, starts_segment(m, layer) ? layer / segment % inputs : inside};
}

/* Block `layer`, whose input is there. */
static Block model_block(const Model* m, int layer)
{
    const Config* c = &m->config;
    const size_t N = (size_t)m->B * m->T, own = own_rows(c, N);
    Block a = m->blocks;
#define BLOCK_PLACE(type, name, rows, columns, kept) a.name += (kept).index * layer_elems(rows, columns);
    BLOCK_ACTIVATIONS(BLOCK_PLACE)
#undef BLOCK_PLACE
    a.below = a.residual;
    a.branch = nullptr;
    return a;
}

/* Block `layer`, whose input is still the stream of the block below and its branch. */
static Block model_block_above(const Model* m, int layer)
{
    Block a = model_block(m, layer);
    a.below = model_block(m, layer - 1).residual_2;
    a.branch = m->branch;
    return a;
}

/* Rows of a chunk of the head: N rows in chunks of about the same size with at most max_rows, on a GPU whole tiles of a
 * GEMM. */
static int head_chunk_rows(const Model* m, size_t N, size_t max_rows)
{
    const size_t tile = m->on_gpu && max_rows >= 64 ? 64 : 1;
    if (m->given_head_rows > 0 || N <= max_rows) return (int)(N < max_rows ? N : max_rows);
    return (int)round_up(ceil_div(N, ceil_div(N, max_rows / tile * tile)), tile);
}

/* How many rows of logits exist at a time. The gradient of the head's weight is a sum over the chunks, so that their
 * size is a rule of shapes and kind of device, never of free memory. On a GPU up to 1 GiB: each chunk reads and writes
 * that gradient, and GEMMs of few rows fill no GPU. On a CPU up to 64 MiB, for its caches. */
static int model_head_rows(const Model* m, size_t N)
{
    const size_t max_bytes = (size_t)(m->on_gpu ? 1024 : 64) << 20;
    if (m->given_head_rows > 0) return head_chunk_rows(m, N, m->given_head_rows);
    return head_chunk_rows(m, N, max_size(max_bytes / (m->config.VP * sizeof(floatX)), 256));
}

/* Where the vocabulary is chunked no more than all rows of the widest piece, but a whole row, for generation. */
static size_t logits_elems(const Model* m, size_t N)
{
    const size_t VP = m->config.VP, elems = m->head_rows * VP, widest = N * piece_columns(&m->config, 0);
    return m->chunks_vocab && widest < elems ? max_size(widest, VP) : elems;
}

static size_t norm_scratch_elems(const Config* c)
{
    switch (c->norm) {
    case Norm::LAYER: return layernorm_scratch_elems(c->C);
    case Norm::RMS: break;
    }
    return rmsnorm_scratch_elems(c->C);
}

/* What tensor parallelism needs besides, for N rows, of which `stream_rows` may be read, and for whole logits of
 * num_texts rows. */
static void model_plan_tp(Model* m, Plan* plan, size_t N, size_t stream_rows, size_t num_texts)
{
    const Config* c = &m->config;
    const char* label = "activations of tensor parallelism";
    const size_t QKV = config_dim(c, Dim::QKV), kv = c->kv_ranks > 1 ? 2 * config_dim(c, Dim::KV) : 0;
    const Place D = Place::DEVICE;
    const size_t num_parts = (size_t)c->tp * (m->chunks_vocab ? N : m->head_rows);
    plan_add(plan, label, D, &m->stream, stream_rows * c->C);
    for (float** p : {&m->parts.losses, &m->parts.maxima}) plan_add(plan, label, D, p, num_parts);
    plan_add(plan, label, D, &m->parts.sums, num_parts);
    plan_add(plan, label, D, &m->qkv_part, kv > 0 ? N * QKV : 0);
    plan_add(plan, label, D, &m->kv_own, N * kv);
    plan_add(plan, label, D, &m->kv_all, c->kv_ranks * N * kv);
    for (floatX** p : {&m->logits_parts, &m->logits_whole}) plan_add(plan, "logits", D, p, num_texts * vocab_width(c));
    if (!m->deterministic) return;
    const char* pieces = "activations, pieces of all ranks";
    plan_add_bytes(plan, pieces, D, N * c->C * sizeof(floatX), (void**)&m->tp->pieces);
    if (kv > 0) plan_add_bytes(plan, pieces, D, c->kv_ranks * N * kv * sizeof(floatX), (void**)&m->kv->pieces);
}

/* Adds activations' rows to the plan. Without `training` only what a forward needs. */
static void model_plan(Model* m, Plan* plan, int B, int T, bool training)
{
    const Config* c = &m->config;
    m->B = B;
    m->T = T;
    size_t N = (size_t)B * T, own = own_rows(c, N), C = c->C, F = c->F, FC = fc_width(c);
    size_t Q = config_dim(c, Dim::Q), QKV = config_dim(c, Dim::QKV);
    const bool merges = m->chunks_vocab || c->tp > 1;
    m->head_rows = model_head_rows(m, N);
    const char* label = "activations";
    const Place D = Place::DEVICE;
    if (m->offloads)
        offload_plan(&m->inputs, plan, "inputs of blocks", (int)num_segments(m),
                     layer_elems(own, C) * sizeof(floatX));
    const int layer = 0;
#define BLOCK_PLAN(type, name, rows, columns, kept) \
    plan_add(plan, label, D, &m->blocks.name, (kept).count * layer_elems(rows, columns));
    BLOCK_ACTIVATIONS(BLOCK_PLAN)
#undef BLOCK_PLAN
    for (floatX** p : {&m->branch, &m->residual_f, &m->norm_f}) plan_add(plan, label, D, p, own * C);
    plan_add(plan, label, D, &m->norm_f_rstd, own);
    plan_add(plan, label, D, &m->losses, N);
    plan_add(plan, label, D, &m->maxima, merges ? N : 0);
    plan_add(plan, label, D, &m->exp_sums, merges ? N : 0);
    if (c->tp > 1) model_plan_tp(m, plan, N, N, 1);
    if (is_rotary(c)) plan_add(plan, "rotary table", D, &m->rope, (size_t)T * c->HS);
    if (c->norm == Norm::LAYER) plan_add(plan, label, D, &m->norm_f_mean, own);
    plan_add(plan, "logits", D, &m->logits, logits_elems(m, N));
    for (int** p : {&m->tokens, &m->targets}) plan_add(plan, "tokens", D, p, N);
    spans_plan(&m->spans, c, plan, B, T);
    size_t scratch = max_size(norm_scratch_elems(c), attention_scratch_elems(B, T, c->NH, c->HS));
    if (c->qk_norm) scratch = max_size(scratch, qk_norm_scratch_elems(c->HS));
    scratch = max_size(scratch, matmul_scratch_elems((int)max_size(max_size(QKV, FC), c->tp > 1 ? C : 0)));
    plan_add(plan, "scratch of the kernels", D, &m->scratch, scratch);
    if (!training) return;
    const char* gradients = "gradients of activations";
    plan_add(plan, gradients, D, &m->dresidual, own * C);
    if (m->dropout > 0) plan_add(plan, gradients, D, &m->dbranch, own * C);
    plan_add(plan, gradients, D, &m->dnorm, N * max_size(C, Q));
    plan_add(plan, gradients, D, &m->dfc, N * FC);
    if (is_gated(c)) plan_add(plan, gradients, D, &m->dfc_act, N * F);
    plan_add(plan, gradients, D, &m->dqkv, N * heads_width(c));
}

/* After plan_allocate: tables. */
static void model_start(Model* m)
{
    if (m->offloads) offload_start(&m->inputs, m->blocks.residual, m->zero->compute, m->zero->overlap);
    if (m->rope == nullptr) return;     // learned positions, or an export, which computes nothing
    size_t elems = (size_t)m->T * m->config.HS;
    float* h_table = (float*)malloc_checked(elems * sizeof(float));
    rope_table(h_table, &m->config.rope, 0, m->T, m->config.HS);
    CUDA_CHECK(cudaMemcpy(m->rope, h_table, elems * sizeof(float), cudaMemcpyHostToDevice));
    free(h_table);
}

/* Of attention for one token, forward and backward: 6*L*Q*T (two GEMMs forward, four backward, half of T x T), less in
 * layers that have a window. */
static double attention_flops_per_token(const Config* c, int T)
{
    double keys = 0;
    for (int layer = 0; layer < c->L; layer++) keys += spans_pairs(T, config_window(c, layer)) / T - 0.5;
    return 12.0 * (double)config_dim(c, Dim::Q) * keys;
}

/* Floating-point operations of one token, forward and backward: 6 per matrix weight, and attention's. */
static double model_flops_per_token(const Config* c, int T)
{
    double Q = (double)config_dim(c, Dim::Q), QKV = (double)config_dim(c, Dim::QKV);
    double block = c->C * (QKV + Q + fc_width(c) + c->F);
    return 6.0 * (c->L * block + (double)c->V * c->C) + attention_flops_per_token(c, T);
}

/* Where tensor t is in its unit. */
static size_t tensor_offset(const Model* m, const Tensor* t) { return t->first - m->shard.units[t->unit].range.first; }

/* Tensor `row` of a unit for which zero_params_begin has been called; null if the model has none. If stored in fp32,
 * the rounded copy that GEMMs read. */
static floatX* model_param(const Model* m, int unit, int row)
{
    const Tensor* t = unit_tensor(&m->shard, unit, row);
    return t == nullptr ? nullptr : m->zero->unit_params[t->unit] + tensor_offset(m, t);
}

/* The fp32 tensor itself if it is stored in fp32, else null. The flat space begins with the units of those. */
static const float* model_param_fp32(const Model* m, int unit, int row)
{
    const Tensor* t = unit_tensor(&m->shard, unit, row);
    return t == nullptr || !t->fp32 ? nullptr : m->zero->fp32_params + t->first;
}

/* The gradient of tensor `row` in the buffer that zero_gradient_begin gave for its unit. */
static float* model_grad(const Model* m, int unit, int row)
{
    const Tensor* t = unit_tensor(&m->shard, unit, row);
    return t == nullptr ? nullptr : m->zero->unit_grads[t->unit] + tensor_offset(m, t);
}

/* Do GEMMs add to it, or overwrite it? */
static bool model_grad_adds(const Model* m, int unit, int row)
{
    return zero_gradient_adds(m->zero, unit_tensor(&m->shard, unit, row)->unit, m->micro);
}
