/* model.cuh: the model, one block of pre-norm attention and MLP by the axes of Config. Each family sets them in
 * shapes.cuh; docs/models.md has a table. GPT-2: Radford et al. 2019; LLaMA: Touvron et al. 2023.
 *
 * Legend, used with these meanings everywhere and no others:
 *   B  sequences per rank and micro-step     T   tokens per sequence        N   rows, B*T
 *   C  channels                              L   layers                     F   MLP width
 *   NH query heads   NKV key/value heads     HS  head size                  Q   query width, NH*HS
 *   V  vocabulary    VP  V padded to 64      R   ranks                      G   micro-steps
 * Gradients are d + name. Weights are stored as in the HF file; the head is (out, in) in all families.
 *
 * What is here, in order: the model's tensors, by the tables of tensors.cuh; Model, its activations; forward;
 * backward. */
#pragma once
#include <fnmatch.h>
#include "kernels/attention.cuh"
#include "kernels/attention_cached.cuh"
#include "kernels/classifier.cuh"
#include "kernels/dropout.cuh"
#include "kernels/embedding.cuh"
#include "kernels/layernorm.cuh"
#include "kernels/matmul.cuh"
#include "kernels/qk_norm.cuh"
#include "kernels/rmsnorm.cuh"
#include "kernels/swiglu.cuh"
#include "shapes.cuh"
#include "zero/offload.h"

// --------------------------------------------------------------------------------------------------------- tensors
static size_t config_dim(const Config* c, Dim d)
{
    switch (d) {
    case Dim::V: return c->V;
    case Dim::CONTEXT: return c->context;
    case Dim::C: return c->C;
    case Dim::Q: return (size_t)c->NH * c->HS;
    case Dim::KV: return (size_t)c->NKV * c->HS;
    case Dim::QKV: return (size_t)(c->NH + 2 * c->NKV) * c->HS;
    case Dim::HS: return c->HS;
    case Dim::F: return c->F;
    case Dim::GATE: return c->mlp == Mlp::GATED ? c->F : 0;
    case Dim::ONE: break;
    }
    return 1;
}

/* Does a model of these axes have it? */
static bool config_has(const Config* c, Row row)
{
    switch (row) {
    case WPE: return c->positions == Positions::LEARNED;
    case NORM_1_BIAS: case NORM_2_BIAS: case NORM_F_BIAS: return c->norm == Norm::LAYER;
    case QKV_BIAS: return c->qkv_bias;
    case Q_NORM_WEIGHT: case K_NORM_WEIGHT: return c->qk_norm;
    case PROJ_BIAS: return c->proj_bias;
    case FC_BIAS: case FCPROJ_BIAS: return c->mlp_bias;
    case LM_HEAD: return !c->tied;
    case WTE: case NORM_1_WEIGHT: case QKV_WEIGHT: case PROJ_WEIGHT: case NORM_2_WEIGHT: case FC_WEIGHT:
    case FCPROJ_WEIGHT: case NORM_F_WEIGHT: return true;
    case NUM_ROWS: break;
    }
    return false;
}

/* Units: the embeddings, the blocks, the head. With pieces: those of wte, the blocks, the final norm, those of the
 * head. Before all of them the unit of tensors stored in fp32, if there are any. */
static int unit_embed(const Config* c, int piece = 0) { return c->num_fp32_units + piece; }
static int unit_block(const Config* c, int layer) { return c->num_fp32_units + c->num_pieces + layer; }
static int unit_head(const Config* c) { return unit_block(c, c->L); }
static int unit_lm_head(const Config* c, int piece) { return unit_head(c) + (c->num_pieces > 1 ? 1 + piece : 0); }
static int num_units(const Config* c) { return unit_lm_head(c, c->num_pieces - 1) + 1; }

/* Columns of the vocabulary that piece `piece` has, of which those from real_columns on are padding. */
static int piece_columns(const Config* c, int piece)
{
    int left = c->VP - piece * c->piece_rows;
    return left < c->piece_rows ? left : c->piece_rows;
}

/* An untied wte and head larger than a block are cut into pieces of its size, so that at stage 3 no rank ever holds
 * them whole. A piece has a multiple of 64 rows, and so many that its unit has no padding. Tied they are one unit:
 * lookup, head and its backward would gather it three times, and its gradient stays whole anyway. So it is with
 * learned positions. */
static void config_cut(Config* c, int num_ranks)
{
    size_t C = c->C, Q = config_dim(c, Dim::Q), QKV = config_dim(c, Dim::QKV), vocab = (size_t)c->VP * C;
    size_t block = C * (QKV + Q) + 3 * C * (size_t)c->F, step = 1;
    while (step * C % num_ranks != 0) step++;
    c->num_pieces = 1;
    c->piece_rows = c->VP;
    if (c->tied || c->positions == Positions::LEARNED || vocab <= block) return;
    size_t rows = round_up(ceil_div(c->VP, ceil_div(vocab, block)), 64 * step);
    if (rows >= (size_t)c->VP) return;
    c->piece_rows = (int)rows;
    c->num_pieces = (int)ceil_div(c->VP, rows);
}

static bool unit_has(const Config* c, int unit, const TensorRow* row)
{
    if (!config_has(c, row->row) || config_dim(c, row->rows) == 0) return false;
    if (row->row == LM_HEAD) return unit >= unit_lm_head(c, 0);
    Where where = unit < unit_block(c, 0) ? Where::EMBED : unit < unit_head(c) ? Where::BLOCK : Where::HEAD;
    return row->where == where && unit <= unit_head(c);
}

/* Does a GEMM read it, as its weight or bias? A tied wte is the head too. */
static bool row_is_in_gemm(const Config* c, Row row)
{
    switch (row) {
    case WTE: return c->tied;
    case WPE: case NORM_1_WEIGHT: case NORM_1_BIAS: case Q_NORM_WEIGHT: case K_NORM_WEIGHT: case NORM_2_WEIGHT:
    case NORM_2_BIAS: case NORM_F_WEIGHT: case NORM_F_BIAS: return false;
    case QKV_WEIGHT: case QKV_BIAS: case PROJ_WEIGHT: case PROJ_BIAS: case FC_WEIGHT: case FC_BIAS: case FCPROJ_WEIGHT:
    case FCPROJ_BIAS: case LM_HEAD: case NUM_ROWS: break;
    }
    return true;
}

static void tensor_add(Tensor* out, const Config* c, const TensorRow* row, int unit)
{
    *out = Tensor{};
    snprintf(out->name, sizeof out->name, row->name, unit - unit_block(c, 0));
    out->file_rows = out->shape[0] = out->padded_rows = config_dim(c, row->rows);
    out->file_cols = out->shape[1] = config_dim(c, row->cols);
    out->num_dims = row->cols == Dim::ONE ? 1 : 2;
    if (row->rows == Dim::V) {
        int piece = row->row == LM_HEAD ? unit - unit_lm_head(c, 0) : unit - unit_embed(c);
        out->file_first_row = (size_t)piece * c->piece_rows;
        out->padded_rows = piece_columns(c, piece);
        size_t left = out->file_rows - out->file_first_row;
        out->shape[0] = left < out->padded_rows ? left : out->padded_rows;
    }
    out->unit = unit;
    double residual_std = 0.02 / sqrt(2.0 * c->L);
    out->init_std = row->init == Init::NORMAL ? 0.02 : row->init == Init::RESIDUAL ? residual_std : 0;
    out->init_value = row->init == Init::ONE ? 1 : 0;
    out->decay = out->num_dims == 2;
    out->hidden = row->where == Where::BLOCK && out->num_dims == 2;
    out->in_out = c->layout == Layout::IN_OUT;
    out->num_fused = row->cols == Dim::QKV || row->rows == Dim::QKV ? 3 : 1;
    out->grad_overwritten = row_is_in_gemm(c, row->row) && out->num_dims == 2;
    out->row = row->row;
}

/* Is `item` some of the parts of a tensor's name, between dots, or a shell pattern that fits it? */
static bool name_fits(const char* item, const char* name)
{
    char dotted_item[66], dotted_name[66];
    snprintf(dotted_item, sizeof dotted_item, ".%.63s.", item);
    snprintf(dotted_name, sizeof dotted_name, ".%.63s.", name);
    return strstr(dotted_name, dotted_item) != nullptr || fnmatch(item, name, 0) == 0;
}

/* --fp32-tensors: marks what fits one of the names of `list`, comma-separated. What is stored as one matrix, and
 * weight and bias of a norm, norms of q and k, are kept in the same way. */
static void tensors_keep_fp32(Tensor* tensors, int num_tensors, const char* list)
{
    char *items = strdup(list), *rest;
    ENSURE(items != nullptr, "out of memory");
    if (strspn(list, ",") == strlen(list)) die_usage("--fp32-tensors '%s': names no tensor", list);
    for (char* item = strtok_r(items, ",", &rest); item != nullptr; item = strtok_r(nullptr, ",", &rest)) {
        int num_fit = 0;
        for (Tensor* t = tensors; t < tensors + num_tensors; t++) {
            if (!name_fits(item, t->name)) continue;
            t->fp32 = true;
            num_fit++;
        }
        if (num_fit == 0)
            die_usage("--fp32-tensors '%s': no tensor has that in its name, between dots, nor fits it as a pattern; "
                      "the first is %s", item, tensors[0].name);
    }
    free(items);
    for (Tensor* t = tensors + 1; t < tensors + num_tensors; t++) {
        bool is_norm_bias = t->row == NORM_1_BIAS || t->row == NORM_2_BIAS || t->row == NORM_F_BIAS;
        if ((t->joined || is_norm_bias || t->row == K_NORM_WEIGHT) && t->fp32 != t[-1].fp32)
            die_usage("--fp32-tensors: %s and %s go together: give both or neither", t[-1].name, t->name);
    }
}

/* Has the family's file a name for all that the axes ask for? */
static void tensors_check(const Config* c)
{
    for (int row = 0; row < NUM_ROWS; row++) {
        int num_names = 0;
        for (int i = 0; i < c->family->num_tensors; i++) num_names += c->family->tensors[i].row == row;
        ENSURE(num_names > 0 || !config_has(c, (Row)row), "model_type \"%s\" has no tensor for row %d of tensors.cuh",
               c->family->model_type, row);
    }
}

/* All tensors of the model in unit order, placed for R ranks; those of fp32_list in fp32. */
static void model_tensors(Shard* shard, Config* c, int num_ranks, const char* fp32_list)
{
    config_cut(c, num_ranks);
    c->num_fp32_units = 0;
    const TensorRow* rows = c->family->tensors;
    int num_rows = c->family->num_tensors;
    tensors_check(c);
    Tensor* tensors = (Tensor*)malloc_checked((num_rows * (size_t)(c->L + 1) + 2 * c->num_pieces) * sizeof(Tensor));
    int n = 0;
    for (int unit = 0; unit < num_units(c); unit++) {
        for (int i = 0; i < num_rows; i++) {
            if (!unit_has(c, unit, &rows[i])) continue;
            tensor_add(&tensors[n], c, &rows[i], unit);
            tensors[n].joined = n > 0 && tensors[n - 1].unit == unit && tensors[n - 1].row == rows[i].row;
            n++;
        }
    }
    if (fp32_list[0] != 0) tensors_keep_fp32(tensors, n, fp32_list);
    shard_build(shard, tensors, n, &num_ranks, 1);
    c->num_fp32_units = shard->num_fp32_units;
}

/* The (first) tensor `row` of `unit`; null if the model has none. */
static const Tensor* unit_tensor(const Shard* s, int unit, int row)
{
    const Tensor* t = &s->tensors[s->units[unit].first_tensor];
    for (int i = 0; i < s->units[unit].num_tensors; i++)
        if (t[i].row == row) return &t[i];
    for (int i = 0; i < (s->num_fp32_units > 0 ? s->units[0].num_tensors : 0); i++)
        if (s->tensors[i].home == unit && s->tensors[i].row == row) return &s->tensors[i];
    return nullptr;
}

/* Does a GEMM read something that is stored in fp32? */
static bool model_rounds_fp32(const Shard* s, const Config* c)
{
    for (int i = 0; i < (s->num_fp32_units > 0 ? s->units[0].num_tensors : 0); i++)
        if (row_is_in_gemm(c, (Row)s->tensors[i].row)) return true;
    return false;
}

// ----------------------------------------------------------------------------------------------------------- Model
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

/* The activations of a block, (N,columns) each: type, name, columns, and which layers have one of their own. Struct,
 * memory plan and model_block are made of these rows, and so is the decoder's block. */
#define BLOCK_ACTIVATIONS(A) \
    A(floatX, residual, c->C, kept_inputs(m, layer))                   /* input of the block, after the sum */ \
    A(float, norm_1_mean, c->norm == Norm::LAYER, kept_always(m, layer)) \
    A(float, norm_1_rstd, 1, kept_always(m, layer)) \
    A(floatX, norm_1, c->C, kept(m, layer, Recompute::CHEAP)) \
    A(floatX, qkv_linear, c->qk_norm ? config_dim(c, Dim::QKV) : 0, kept(m, layer, Recompute::ATTENTION)) /* of the GEMM */ \
    A(floatX, qkv, config_dim(c, Dim::QKV), kept(m, layer, c->qk_norm ? Recompute::CHEAP : Recompute::ATTENTION)) /* of attention */ \
    A(floatX, att, config_dim(c, Dim::Q), kept(m, layer, Recompute::ATTENTION))     /* heads side by side */ \
    A(float, att_lse, c->NH, kept(m, layer, Recompute::ATTENTION))     /* (B,NH,T) */ \
    A(floatX, residual_2, c->C, kept(m, layer, Recompute::BLOCKS))     /* after attention */ \
    A(float, norm_2_mean, c->norm == Norm::LAYER, kept_always(m, layer)) \
    A(float, norm_2_rstd, 1, kept_always(m, layer)) \
    A(floatX, norm_2, c->C, kept(m, layer, Recompute::CHEAP)) \
    A(floatX, fc, fc_width(c), kept(m, layer, Recompute::MLP))         /* F wide, or gate and up side by side */ \
    A(floatX, fc_act, c->F, kept(m, layer, is_gated(c) ? Recompute::CHEAP : Recompute::MLP))

typedef struct Block {
#define BLOCK_MEMBER(type, name, columns, kept) type* name;
    BLOCK_ACTIVATIONS(BLOCK_MEMBER)
#undef BLOCK_MEMBER
    const floatX *below, *branch;   // residual is below + branch, or, if that is null, already there
} Block;

typedef struct Model {
    Config config;
    Shard shard;
    Zero* zero;
    bool chunks_vocab;         // stages 2-3: wte and head, or at stage 2 their gradients, are there piece by piece
    Recompute recompute;
    int segment_layers;       // BLOCKS
    bool offloads;            // BLOCKS: the inputs of the segments are in host memory, two of them on the device
    Offload inputs;
    int* visits;              // (num_visits) units in the order of their use in a micro-step
    int num_visits;
    int B, T;                 // largest micro-batch; a call may use less
    double dropout, attention_dropout;   // probabilities; 0: the pass does not exist
    unsigned long long seed;  // of the masks
    size_t first_sequence;    // of this rank's micro-batch, in the stream of data
    bool drops;               // this is training
    int micro;                // the micro-step, of this step
    int given_head_rows;      // --head-rows; 0: head_chunk_rows decides
    bool on_gpu;              // the plan's device is a GPU
    int head_rows;            // rows of logits that exist at a time
    float* rope;              // (T,HS)    rotary: cosines and sines of every position
    Block blocks;             // of the first layer that has its own, the others behind it: model_block
    // one of each
    floatX *branch;           // (N,C)     what a branch adds to the residual stream, until the next norm sums it
    floatX *residual_f;       // (N,C)
    floatX *norm_f;           // (N,C)
    float  *norm_f_mean, *norm_f_rstd;   // (N)
    floatX *logits;           // (head_rows,VP), overwritten by dlogits
    float  *losses;           // (N)
    float  *maxima;           // (N)       chunks_vocab: of the logits so far
    double *exp_sums;         // (N)       and the sum of their exponentials
    int *tokens, *targets;    // (B,T)
    // backward
    floatX *dresidual;        // (N,C)     gradient of the residual stream, carried from block to block
    floatX *dbranch;          // (N,C)     of a branch before its dropout; without dropout it is dresidual
    floatX *dnorm;            // (N,C or Q) of a norm's output, or of the attention's
    floatX *dfc;              // (N,FC)
    floatX *dfc_act;          // (N,F)     gated; else it is dfc
    floatX *dqkv;             // (N,QKV)
    float  *scratch;          // largest any op asks for
} Model;

static size_t max_size(size_t a, size_t b) { return a > b ? a : b; }

static bool is_gated(const Config* c) { return c->mlp == Mlp::GATED; }
static bool is_rotary(const Config* c) { return c->positions == Positions::ROTARY; }
static int fc_width(const Config* c) { return (int)config_dim(c, Dim::GATE) + c->F; }

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
    const size_t N = (size_t)m->B * m->T;
    Block a = m->blocks;
#define BLOCK_PLACE(type, name, columns, kept) a.name += (kept).index * layer_elems(N, columns);
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

/* Adds activations' rows to the plan. Without `training` only what a forward needs. */
static void model_plan(Model* m, Plan* plan, int B, int T, bool training)
{
    const Config* c = &m->config;
    m->B = B;
    m->T = T;
    size_t N = (size_t)B * T, C = c->C, F = c->F, FC = fc_width(c);
    size_t Q = config_dim(c, Dim::Q), QKV = config_dim(c, Dim::QKV);
    m->head_rows = model_head_rows(m, N);
    const char* label = "activations";
    const Place D = Place::DEVICE;
    if (m->offloads)
        offload_plan(&m->inputs, plan, "inputs of blocks", (int)num_segments(m), layer_elems(N, C) * sizeof(floatX));
    const int layer = 0;
#define BLOCK_PLAN(type, name, columns, kept) \
    plan_add(plan, label, D, &m->blocks.name, (kept).count * layer_elems(N, columns));
    BLOCK_ACTIVATIONS(BLOCK_PLAN)
#undef BLOCK_PLAN
    for (floatX** p : {&m->branch, &m->residual_f, &m->norm_f}) plan_add(plan, label, D, p, N * C);
    for (float** p : {&m->norm_f_rstd, &m->losses}) plan_add(plan, label, D, p, N);
    plan_add(plan, label, D, &m->maxima, m->chunks_vocab ? N : 0);
    plan_add(plan, label, D, &m->exp_sums, m->chunks_vocab ? N : 0);
    if (is_rotary(c)) plan_add(plan, "rotary table", D, &m->rope, (size_t)T * c->HS);
    if (c->norm == Norm::LAYER) plan_add(plan, label, D, &m->norm_f_mean, N);
    plan_add(plan, "logits", D, &m->logits, logits_elems(m, N));
    for (int** p : {&m->tokens, &m->targets}) plan_add(plan, "tokens", D, p, N);
    size_t scratch = max_size(norm_scratch_elems(c), attention_scratch_elems(B, T, c->NH, c->HS));
    if (c->qk_norm) scratch = max_size(scratch, qk_norm_scratch_elems(c->HS));
    scratch = max_size(scratch, matmul_scratch_elems((int)max_size(QKV, FC)));
    plan_add(plan, "scratch of the kernels", D, &m->scratch, scratch);
    if (!training) return;
    const char* gradients = "gradients of activations";
    plan_add(plan, gradients, D, &m->dresidual, N * C);
    if (m->dropout > 0) plan_add(plan, gradients, D, &m->dbranch, N * C);
    plan_add(plan, gradients, D, &m->dnorm, N * max_size(C, Q));
    plan_add(plan, gradients, D, &m->dfc, N * FC);
    if (is_gated(c)) plan_add(plan, gradients, D, &m->dfc_act, N * F);
    plan_add(plan, gradients, D, &m->dqkv, N * QKV);
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

/* Floating-point operations of one token, forward and backward: 6 per matrix weight, and causal attention's
 * 6*L*Q*T (two GEMMs forward, four backward, half of T x T). */
static double model_flops_per_token(const Config* c, int T)
{
    double Q = (double)config_dim(c, Dim::Q), QKV = (double)config_dim(c, Dim::QKV);
    double block = c->C * (QKV + Q + fc_width(c) + c->F);
    return 6.0 * (c->L * block + (double)c->V * c->C) + 6.0 * c->L * Q * T;
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

/* The fp32 tensor itself if it is stored in fp32, else null. */
static const float* model_param_fp32(const Model* m, int unit, int row)
{
    const Tensor* t = unit_tensor(&m->shard, unit, row);
    return t == nullptr || !t->fp32 ? nullptr : m->zero->fp32_params + tensor_offset(m, t);
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

// --------------------------------------------------------------------------------------------------------- forward
/* Where dropout is: the sum of the embeddings, the probabilities, and what the two branches of a block add. */
enum DropoutSite { DROPOUT_EMBEDDING, DROPOUT_ATTENTION, DROPOUT_PROJ, DROPOUT_FCPROJ };

static Dropout model_dropout(const Model* m, DropoutSite site, int layer)
{
    double p = site == DROPOUT_ATTENTION ? m->attention_dropout : m->dropout;
    return m->drops && p > 0 ? dropout_site(m->seed, layer, site, m->first_sequence, p) : Dropout{};
}

/* out (B*T,C) = inp with elements dropped: in place, or what the backward reads instead of inp. */
static void drop(const Model* m, floatX* out, const floatX* inp, DropoutSite site, int layer, int B, int T)
{
    Dropout d = model_dropout(m, site, layer);
    if (d.threshold > 0) dropout(out, inp, 0, (size_t)B * T * m->config.C, (size_t)T * m->config.C, d, m->zero->compute);
}

/* The gradient of what a branch added to the stream. */
static const floatX* branch_gradient(const Model* m, DropoutSite site, int layer, int B, int T)
{
    Dropout d = model_dropout(m, site, layer);
    if (d.threshold == 0) return m->dresidual;
    dropout(m->dbranch, m->dresidual, 0, (size_t)B * T * m->config.C, (size_t)T * m->config.C, d, m->zero->compute);
    return m->dbranch;
}

/* norm_forward with weight and bias as they are kept. */
template <class P> static void norm_forward_of(const Model* m, floatX* residual, floatX* out, float* mean, float* rstd,
                                               const floatX* a, const floatX* b, const P* weight, const P* bias, int N)
{
    const Config* c = &m->config;
    cudaStream_t stream = m->zero->compute;
    switch (c->norm) {
    case Norm::LAYER:
        if (b == nullptr) layernorm_forward(out, mean, rstd, a, weight, bias, N, c->C, c->eps, stream);
        else residual_layernorm_forward(residual, out, mean, rstd, a, b, weight, bias, N, c->C, c->eps, stream);
        break;
    case Norm::RMS:
        if (b == nullptr) rmsnorm_forward(out, rstd, a, weight, N, c->C, c->eps, stream);
        else residual_rmsnorm_forward(residual, out, rstd, a, b, weight, N, c->C, c->eps, stream);
        break;
    }
}

/* The norm whose weight is `row`: residual (N,C) = a + b, out = norm(residual). b null: residual is a, and is not
 * written. RMSNorm has no mean. */
static void norm_forward(const Model* m, int unit, int row, floatX* residual, floatX* out, float* mean, float* rstd,
                         const floatX* a, const floatX* b, int N)
{
    const float* weight = model_param_fp32(m, unit, row);
    if (weight != nullptr)
        norm_forward_of(m, residual, out, mean, rstd, a, b, weight, model_param_fp32(m, unit, row + 1), N);
    else
        norm_forward_of<floatX>(m, residual, out, mean, rstd, a, b, model_param(m, unit, row),
                                model_param(m, unit, row + 1), N);
}

/* out (N,OC) = the linear layer whose weight is `row`, of inp (N,IC). */
static void linear_forward(const Model* m, int unit, int row, floatX* out, const floatX* inp, int N, int IC, int OC)
{
    matmul_forward(out, inp, model_param(m, unit, row), model_param(m, unit, row + 1), N, IC, OC, m->config.layout,
                   m->zero->compute);
}

/* What the rows of a block attend to, up to themselves. Rows of a pass are B whole sequences of T tokens. Rows of the
 * decoder belong to any sequences: keys and values of what came before are in a cache. */
typedef struct Attend {
    int B, T;                        // the cache has B slots of T positions
    floatX *keys, *values;           // (L,B,NKV,T,HS), or null
    const int *slots, *positions;    // (N) of each row; null: row n is at position n % T
} Attend;

static Attend attend_sequences(int B, int T) { return Attend{B, T, nullptr, nullptr, nullptr, nullptr}; }

/* GEMMs take padded rows: each number of rows is a plan of cuBLASLt's. Rows from N on are idle. */
typedef struct Rows { int N, padded; } Rows;

/* What the QKV GEMM writes: qkv itself, in which q and k are rotated in place, or with qk_norm what the backward of
 * that norm reads. */
static floatX* qkv_linear(const Model* m, const Block* a) { return m->config.qk_norm ? a->qkv_linear : a->qkv; }

/* Query and key heads as attention reads them: a->qkv with norm and rotary embedding, where the model has them. */
static void heads_forward(const Model* m, int unit, const Block* a, const int* positions, int N, int T)
{
    const Config* c = &m->config;
    const int NH = c->NH, NKV = c->NKV, HS = c->HS;
    cudaStream_t stream = m->zero->compute;
    const float *q_norm = model_param_fp32(m, unit, Q_NORM_WEIGHT), *k_norm = model_param_fp32(m, unit, K_NORM_WEIGHT);
    if (q_norm != nullptr)
        qk_norm_rope_forward(a->qkv, a->qkv_linear, q_norm, k_norm, m->rope, positions, N, T, NH, NKV, HS, c->eps,
                             stream);
    else if (c->qk_norm)
        qk_norm_rope_forward<floatX>(a->qkv, a->qkv_linear, model_param(m, unit, Q_NORM_WEIGHT),
                                     model_param(m, unit, K_NORM_WEIGHT), m->rope, positions, N, T, NH, NKV, HS,
                                     c->eps, stream);
    else if (is_rotary(c))
        rope_forward(a->qkv, m->rope, positions, N, T, NH + NKV, NH + 2 * NKV, HS, stream);
}

/* norm_1 -> qkv, att. */
static void attention_part(const Model* m, int layer, const Block* a, const Attend* at, Rows rows)
{
    const Config* c = &m->config;
    cudaStream_t stream = m->zero->compute;
    const int N = rows.N, NH = c->NH, NKV = c->NKV, HS = c->HS, unit = unit_block(c, layer);
    const float scale = 1.0f / sqrtf((float)HS);
    linear_forward(m, unit, QKV_WEIGHT, qkv_linear(m, a), a->norm_1, rows.padded, c->C, (int)config_dim(c, Dim::QKV));
    heads_forward(m, unit, a, at->positions, N, at->T);
    if (at->keys == nullptr) {
        attention_forward(a->att, a->att_lse, m->scratch, a->qkv, at->B, at->T, NH, NKV, HS, scale, stream,
                          model_dropout(m, DROPOUT_ATTENTION, layer));
    } else {
        const size_t first = (size_t)layer * at->B * at->T * config_dim(c, Dim::KV);
        attention_cached(a->att, at->keys + first, at->values + first, a->qkv, at->slots, at->positions, N, at->T, NH,
                         NKV, HS, scale, stream);
    }
}

/* norm_2 -> fc, fc_act. The activation is part of the GEMM, where cuBLASLt has it. */
static void mlp_part(const Model* m, int unit, const Block* a, Rows rows)
{
    const Config* c = &m->config;
    if (is_gated(c)) {
        linear_forward(m, unit, FC_WEIGHT, a->fc, a->norm_2, rows.padded, c->C, fc_width(c));
        swiglu_forward(a->fc_act, a->fc, rows.N, c->F, m->zero->compute);
    } else {
        matmul_forward_act(a->fc_act, a->fc, a->norm_2, model_param(m, unit, FC_WEIGHT), model_param(m, unit, FC_BIAS),
                           rows.padded, c->C, c->F, c->layout, c->activation, m->zero->compute);
    }
}

/* Block `layer`, of training and of generation: a->below and a->branch -> a->residual_2 and a new branch. */
static void block_forward(Model* m, int layer, const Block* a, const Attend* at, Rows rows)
{
    const Config* c = &m->config;
    const int N = rows.N, unit = unit_block(c, layer);
    norm_forward(m, unit, NORM_1_WEIGHT, a->residual, a->norm_1, a->norm_1_mean, a->norm_1_rstd, a->below, a->branch,
                 N);
    attention_part(m, layer, a, at, rows);
    linear_forward(m, unit, PROJ_WEIGHT, m->branch, a->att, rows.padded, (int)config_dim(c, Dim::Q), c->C);
    drop(m, m->branch, m->branch, DROPOUT_PROJ, layer, at->B, at->T);
    norm_forward(m, unit, NORM_2_WEIGHT, a->residual_2, a->norm_2, a->norm_2_mean, a->norm_2_rstd, a->residual,
                 m->branch, N);
    mlp_part(m, unit, a, rows);
    linear_forward(m, unit, FCPROJ_WEIGHT, m->branch, a->fc_act, rows.padded, c->F, c->C);
    drop(m, m->branch, m->branch, DROPOUT_FCPROJ, layer, at->B, at->T);
}

/* Recomputes what the backward of block `layer` needs and was not kept, segments aside. */
static void block_restore(Model* m, int layer, int B, int T)
{
    const Config* c = &m->config;
    const int N = B * T, unit = unit_block(c, layer);
    const Attend at = attend_sequences(B, T);
    if (m->recompute == Recompute::NONE || m->recompute == Recompute::BLOCKS || layer == c->L - 1) return;
    Block a = model_block(m, layer);
    Phase before = phase_begin(Phase::RECOMPUTE);
    norm_forward(m, unit, NORM_1_WEIGHT, nullptr, a.norm_1, a.norm_1_mean, a.norm_1_rstd, a.residual, nullptr, N);
    if (m->recompute >= Recompute::ATTENTION) attention_part(m, layer, &a, &at, Rows{N, N});
    else if (c->qk_norm) heads_forward(m, unit, &a, nullptr, N, T);
    norm_forward(m, unit, NORM_2_WEIGHT, nullptr, a.norm_2, a.norm_2_mean, a.norm_2_rstd, a.residual_2, nullptr, N);
    if (m->recompute >= Recompute::MLP) mlp_part(m, unit, &a, Rows{N, N});
    else if (is_gated(c)) swiglu_forward(a.fc_act, a.fc, N, c->F, m->zero->compute);
    phase_begin(before);
}

// -------------------------------------------------------------------------------------------------------- backward
/* norm_backward with the weight as it is kept. */
template <class P> static void norm_backward_of(const Model* m, float* dweight, float* dbias, const floatX* inp,
                                                const float* mean, const float* rstd, const P* weight, int N)
{
    int C = m->config.C;
    cudaStream_t stream = m->zero->compute;
    switch (m->config.norm) {
    case Norm::LAYER:
        layernorm_backward(m->dresidual, dweight, dbias, m->scratch, m->dnorm, inp, weight, mean, rstd, N, C, stream);
        break;
    case Norm::RMS:
        rmsnorm_backward(m->dresidual, dweight, m->scratch, m->dnorm, inp, weight, rstd, N, C, stream);
        break;
    }
}

/* m->dresidual += gradient of the norm's input, from m->dnorm, that of its output. */
static void norm_backward(const Model* m, int unit, int row, const floatX* inp, const float* mean, const float* rstd,
                          int N)
{
    float *dweight = model_grad(m, unit, row), *dbias = model_grad(m, unit, row + 1);
    const float* weight = model_param_fp32(m, unit, row);
    if (weight != nullptr) norm_backward_of(m, dweight, dbias, inp, mean, rstd, weight, N);
    else norm_backward_of<floatX>(m, dweight, dbias, inp, mean, rstd, model_param(m, unit, row), N);
}

/* The gradients of weight `row`, of which this is the only GEMM of a micro-step, and of its bias. */
static void linear_backward_weight(const Model* m, int unit, int row, const floatX* dout, const floatX* inp, int N,
                                   int IC, int OC)
{
    matmul_backward_weight(model_grad(m, unit, row), model_grad(m, unit, row + 1), m->scratch, dout, inp, N, IC, OC,
                           m->config.layout, model_grad_adds(m, unit, row), m->zero->compute);
}

/* dinp (N,IC) =, and the gradients of weight and bias, from dout (N,OC). */
static void linear_backward(const Model* m, int unit, int row, floatX* dinp, const floatX* dout, const floatX* inp,
                            int N, int IC, int OC)
{
    linear_backward_weight(m, unit, row, dout, inp, N, IC, OC);
    matmul_backward_input(dinp, dout, model_param(m, unit, row), N, IC, OC, m->config.layout, false, m->zero->compute);
}

/* m->dqkv: from the gradient of what heads_forward leaves to that of what the GEMM left. */
static void heads_backward(const Model* m, int unit, const Block* a, int N, int T)
{
    const Config* c = &m->config;
    const int NH = c->NH, NKV = c->NKV, HS = c->HS;
    cudaStream_t stream = m->zero->compute;
    float *dq_norm = model_grad(m, unit, Q_NORM_WEIGHT), *dk_norm = model_grad(m, unit, K_NORM_WEIGHT);
    const float *q_norm = model_param_fp32(m, unit, Q_NORM_WEIGHT), *k_norm = model_param_fp32(m, unit, K_NORM_WEIGHT);
    if (q_norm != nullptr)
        qk_norm_rope_backward(m->dqkv, dq_norm, dk_norm, m->scratch, a->qkv_linear, q_norm, k_norm, m->rope, nullptr,
                              N, T, NH, NKV, HS, c->eps, stream);
    else if (c->qk_norm)
        qk_norm_rope_backward<floatX>(m->dqkv, dq_norm, dk_norm, m->scratch, a->qkv_linear,
                                      model_param(m, unit, Q_NORM_WEIGHT), model_param(m, unit, K_NORM_WEIGHT),
                                      m->rope, nullptr, N, T, NH, NKV, HS, c->eps, stream);
    else if (is_rotary(c))
        rope_backward(m->dqkv, m->rope, nullptr, N, T, NH + NKV, NH + 2 * NKV, HS, stream);
}

/* Gradient through block `layer`: m->dresidual (N,C) goes in as the gradient of its output, and out as that of its
 * input. */
static void block_backward(Model* m, int layer, int B, int T)
{
    const Config* c = &m->config;
    cudaStream_t stream = m->zero->compute;
    int N = B * T, C = c->C, F = c->F, FC = fc_width(c), unit = unit_block(c, layer);
    int Q = (int)config_dim(c, Dim::Q), QKV = (int)config_dim(c, Dim::QKV);
    Block a = model_block(m, layer);
    // MLP
    const floatX* dbranch = branch_gradient(m, DROPOUT_FCPROJ, layer, B, T);
    if (is_gated(c)) {
        linear_backward(m, unit, FCPROJ_WEIGHT, m->dfc_act, dbranch, a.fc_act, N, F, C);
        swiglu_backward(m->dfc, m->dfc_act, a.fc, N, F, stream);
    } else {
        linear_backward_weight(m, unit, FCPROJ_WEIGHT, dbranch, a.fc_act, N, F, C);
        matmul_backward_input_act(m->dfc, dbranch, model_param(m, unit, FCPROJ_WEIGHT), a.fc, N, F, C,
                                  m->config.layout, c->activation, stream);
    }
    linear_backward(m, unit, FC_WEIGHT, m->dnorm, m->dfc, a.norm_2, N, C, FC);
    norm_backward(m, unit, NORM_2_WEIGHT, a.residual_2, a.norm_2_mean, a.norm_2_rstd, N);
    // attention
    dbranch = branch_gradient(m, DROPOUT_PROJ, layer, B, T);
    linear_backward(m, unit, PROJ_WEIGHT, m->dnorm, dbranch, a.att, N, Q, C);
    attention_backward(m->dqkv, m->scratch, m->dnorm, a.att, a.att_lse, a.qkv, B, T, c->NH, c->NKV, c->HS,
                       1.0f / sqrtf((float)c->HS), stream, model_dropout(m, DROPOUT_ATTENTION, layer));
    heads_backward(m, unit, &a, N, T);
    linear_backward(m, unit, QKV_WEIGHT, m->dnorm, m->dqkv, a.norm_1, N, C, QKV);
    norm_backward(m, unit, NORM_1_WEIGHT, a.residual, a.norm_1_mean, a.norm_1_rstd, N);
}
