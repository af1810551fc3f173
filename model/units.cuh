/* units.cuh: the tensors of a model, by the tables of tensors.cuh and the axes of Config, as the units of shard.h: the
 * embeddings, the blocks, the head. The legend of the letters is in model.cuh.
 *
 * Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053): each of `tp` ranks has some heads and columns of the MLP,
 * and so the rows or columns of the weights that make or read them, and some rows of wte and head. Its model has fewer
 * heads, a narrower MLP and a smaller vocabulary: config_of_rank. What it has is shared with the ranks of the same part
 * in other replicas (GROUP_DATA). Norms, positions and biases behind sums over ranks are whole on all ranks (GROUP_ALL)
 * and apart: one unit for the whole model. */
#pragma once
#include <fnmatch.h>
#include "shapes.cuh"
#include "zero/stages.h"

static size_t config_dim(const Config* c, Dim d)
{
    switch (d) {
    case Dim::V: return c->V;
    case Dim::CONTEXT: return c->context;
    case Dim::C: return c->C;
    case Dim::Q: return (size_t)c->NH * c->HS;
    case Dim::KV: return (size_t)c->NKV * c->HS / c->kv_ranks;
    case Dim::QKV: return config_dim(c, Dim::Q) + 2 * config_dim(c, Dim::KV);
    case Dim::HS: return c->HS;
    case Dim::F: return c->F;
    case Dim::GATE: return c->mlp == Mlp::GATED ? c->F : 0;
    case Dim::ONE: break;
    }
    return 1;
}

/* Is it shared out among the ranks of tensor parallelism? */
static bool dim_is_cut(Dim d)
{
    switch (d) {
    case Dim::V: case Dim::Q: case Dim::KV: case Dim::QKV: case Dim::F: case Dim::GATE: return true;
    case Dim::CONTEXT: case Dim::C: case Dim::HS: case Dim::ONE: break;
    }
    return false;
}

/* Query, key and value heads side by side, as attention reads them. Where kv_ranks share key/value heads it is more
 * than Dim::QKV, what this rank's GEMM makes of them. */
static size_t heads_width(const Config* c) { return (size_t)(c->NH + 2 * c->NKV) * c->HS; }

/* The part of a model that rank `rank` of tp has. */
static Config config_of_rank(const Config* whole, int tp, int rank)
{
    Config c = *whole;
    c.tp = tp;
    c.tp_rank = rank;
    c.kv_ranks = tp > whole->NKV ? tp / whole->NKV : 1;
    c.NH = whole->NH / tp;
    c.NKV = whole->NKV * c.kv_ranks / tp;
    c.F = whole->F / tp;
    c.VP = (int)round_up(whole->VP, (size_t)64 * tp) / tp;
    c.vocab_first = rank * c.VP;
    return c;
}

/* Null, or why not. */
static const char* config_tp_mismatch(const Config* c, int tp, char (&why)[256])
{
    const int kv_ranks = tp > c->NKV ? tp / c->NKV : 1;
    why[0] = 0;
    if (c->NH % tp != 0) snprintf(why, sizeof why, "%d query heads do not divide by it", c->NH);
    else if (c->F % tp != 0) snprintf(why, sizeof why, "the MLP's width of %d does not divide by it", c->F);
    else if (c->NKV % tp != 0 && tp % c->NKV != 0)
        snprintf(why, sizeof why, "%d key/value heads are neither a multiple nor a divisor of it", c->NKV);
    else if (c->HS % kv_ranks != 0)
        snprintf(why, sizeof why, "%d ranks share a key/value head, whose %d columns do not divide by that", kv_ranks,
                 c->HS);
    return why[0] ? why : nullptr;
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
 * head. Before all of them those of tensors stored in fp32 or apart, if there are any. */
static int unit_embed(const Config* c, int piece = 0) { return c->num_front_units + piece; }
static int unit_block(const Config* c, int layer) { return c->num_front_units + c->num_pieces + layer; }
static int unit_head(const Config* c) { return unit_block(c, c->L); }
static int unit_lm_head(const Config* c, int piece) { return unit_head(c) + (c->num_pieces > 1 ? 1 + piece : 0); }
static int num_units(const Config* c) { return unit_lm_head(c, c->num_pieces - 1) + 1; }

/* Columns of the logits of all ranks. */
static size_t vocab_width(const Config* c) { return (size_t)c->tp * c->VP; }

/* Rows of wte and head, columns of the logits: how many of `columns` from `first` on are not padding. */
static int real_columns(const Config* c, int first, int columns)
{
    int left = c->V - first;
    return left < 0 ? 0 : left < columns ? left : columns;
}

/* Of piece `piece` the first and, with padding, how many. */
static int piece_first(const Config* c, int piece) { return c->vocab_first + piece * c->piece_rows; }
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

/* The groups of ranks that share tensors: all, and with tensor parallelism those that have the same part. */
enum { GROUP_ALL, GROUP_DATA };

/* Makes of a whole tensor what this rank has of it, and in `unit`. */
static void tensor_part_of_rank(Tensor* t, const Config* c, const TensorRow* row)
{
    if (row->rows == Dim::V) {
        const int piece = row->row == LM_HEAD ? t->unit - unit_lm_head(c, 0) : t->unit - unit_embed(c);
        t->file_first_row = piece_first(c, piece);
        t->padded_rows = piece_columns(c, piece);
        t->shape[0] = real_columns(c, piece_first(c, piece), piece_columns(c, piece));
    } else if (dim_is_cut(row->rows)) {
        tensor_cut(t, 0, c->tp_rank, c->tp);
    }
    if (dim_is_cut(row->cols)) tensor_cut(t, 1, c->tp_rank, c->tp);
    const bool is_cut = dim_is_cut(row->rows) || dim_is_cut(row->cols);
    t->group = c->tp > 1 && is_cut ? GROUP_DATA : GROUP_ALL;
    t->apart = c->tp > 1 && !is_cut;
}

static void tensor_add(Tensor* out, const Config* c, const Config* whole, const TensorRow* row, int unit)
{
    *out = Tensor{};
    snprintf(out->name, sizeof out->name, row->name, unit - unit_block(c, 0));
    out->file_rows = out->shape[0] = out->padded_rows = config_dim(whole, row->rows);
    out->file_cols = out->shape[1] = config_dim(whole, row->cols);
    out->num_dims = row->cols == Dim::ONE ? 1 : 2;
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
    tensor_part_of_rank(out, c, row);
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

/* All tensors of the model in unit order, as c, which is this rank's of `whole`, has them, placed for groups of
 * group_ranks ranks: GROUP_ALL, and with tensor parallelism GROUP_DATA; those of fp32_list in fp32. */
static void model_tensors(Shard* shard, Config* c, const Config* whole, const int* group_ranks, int num_groups,
                          const char* fp32_list)
{
    config_cut(c, group_ranks[num_groups - 1]);
    c->num_front_units = 0;
    const TensorRow* rows = c->family->tensors;
    int num_rows = c->family->num_tensors;
    tensors_check(c);
    Tensor* tensors = (Tensor*)malloc_checked((num_rows * (size_t)(c->L + 1) + 2 * c->num_pieces) * sizeof(Tensor));
    int n = 0;
    for (int unit = 0; unit < num_units(c); unit++) {
        for (int i = 0; i < num_rows; i++) {
            if (!unit_has(c, unit, &rows[i])) continue;
            tensor_add(&tensors[n], c, whole, &rows[i], unit);
            tensors[n].joined = n > 0 && tensors[n - 1].unit == unit && tensors[n - 1].row == rows[i].row;
            n++;
        }
    }
    if (fp32_list[0] != 0) tensors_keep_fp32(tensors, n, fp32_list);
    shard_build(shard, tensors, n, group_ranks, num_groups);
    c->num_front_units = shard->num_front_units;
}

/* Tensors of the units in front, and those of them that are stored in fp32. */
static int num_front_tensors(const Shard* s, int num_units)
{
    return num_units > 0 ? s->units[num_units - 1].first_tensor + s->units[num_units - 1].num_tensors : 0;
}

/* The (first) tensor `row` of `unit`; null if the model has none. */
static const Tensor* unit_tensor(const Shard* s, int unit, int row)
{
    const Tensor* t = &s->tensors[s->units[unit].first_tensor];
    for (int i = 0; i < s->units[unit].num_tensors; i++)
        if (t[i].row == row) return &t[i];
    for (int i = 0; i < num_front_tensors(s, s->num_front_units); i++)
        if (s->tensors[i].home == unit && s->tensors[i].row == row) return &s->tensors[i];
    return nullptr;
}

/* Does a GEMM read something that is stored in fp32? */
static bool model_rounds_fp32(const Shard* s, const Config* c)
{
    for (int i = 0; i < num_front_tensors(s, s->num_fp32_units); i++)
        if (row_is_in_gemm(c, (Row)s->tensors[i].row)) return true;
    return false;
}
