/* units.cuh: the tensors of a model, by the tables of tensors.cuh and the axes of Config, as the units of shard.h: the
 * embeddings, the blocks, the head. The legend of the letters is in model.cuh. */
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
