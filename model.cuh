/* model.cuh: the models. GPT-2 (Radford et al. 2019) as Hugging Face's files have it: pre-norm blocks, learned
 * positions, tanh GELU, head tied to the embedding.
 *
 * Legend, used with these meanings everywhere and no others:
 *   B  sequences per rank and micro-step     T   tokens per sequence        N   rows, B*T
 *   C  channels                              L   layers                     F   MLP width
 *   NH query heads   NKV key/value heads     HS  head size, C / NH
 *   V  vocabulary    VP  V padded to 64      R   ranks                      G   micro-steps
 * Gradients are d + name. Weights lie as in the HF file: GPT-2 stores (in, out), the head (out, in).
 *
 * What is here, in order: Config and its presets and HF form; the tensor table, the only list of tensors; Model, its
 * activations; forward; backward. */
#pragma once
#include "data/json.h"
#include "kernels/attention.cuh"
#include "kernels/classifier.cuh"
#include "kernels/embedding.cuh"
#include "kernels/gelu.cuh"
#include "kernels/layernorm.cuh"
#include "kernels/matmul.cuh"
#include "zero/stages.h"

// ---------------------------------------------------------------------------------------------------------- Config
typedef struct Config {
    int V, VP, C, L, NH, NKV, HS, F;
    int context;            // largest T: rows of wpe
    float eps;              // of the norms
    Gelu gelu;
    bool tied;              // head = wte
    char* hf_text;          // config.json as it was read, written back as it is; null for presets
} Config;

/* Sets what follows from the rest and refuses what no kernel can do; `from` names the preset or file. */
static void config_finish(Config* c, const char* from)
{
    ENSURE(c->NH > 0 && c->C % c->NH == 0, "%s: n_embd %d is not divisible by n_head %d", from, c->C, c->NH);
    c->HS = c->C / c->NH;
    c->NKV = c->NH;
    c->VP = (int)round_up(c->V, 64);
    if (c->F == 0) c->F = 4 * c->C;
}

/* Presets. gpt2*: the published models. d2 to d48: depth d, width 64*d, d heads, for the vocabulary of the data.
 * context 0: the preset's. Returns false if the name is none. */
static bool config_preset(Config* c, const char* name, int data_V, int context)
{
    static const struct { const char* name; int L, C, NH; } published[] = {
        {"gpt2", 12, 768, 12}, {"gpt2-medium", 24, 1024, 16}, {"gpt2-large", 36, 1280, 20}, {"gpt2-xl", 48, 1600, 25}};
    *c = Config{};
    c->eps = 1e-5f;
    c->gelu = Gelu::TANH;
    c->tied = true;
    int depth = 0, end = 0;
    for (const auto& p : published) {
        if (strcmp(name, p.name) != 0) continue;
        c->L = p.L; c->C = p.C; c->NH = p.NH;
        c->V = 50257;
        c->context = context > 1024 ? context : 1024;
    }
    if (c->L == 0 && sscanf(name, "d%d%n", &depth, &end) == 1 && name[end] == 0 && depth >= 2 && depth <= 48) {
        c->L = c->NH = depth;
        c->C = 64 * depth;
        c->V = data_V > 0 ? data_V : 50257;
        c->context = context > 0 ? context : 256;
    }
    if (c->L == 0) return false;
    config_finish(c, name);
    return true;
}

/* From a Hugging Face config.json: model_type gpt2. What would change the numbers and is not built is refused by name.
 */
static void config_read(Config* c, const char* path)
{
    cJSON* j = json_parse_file(path);
    const char* type = json_string(j, "model_type", path);
    ENSURE(strcmp(type, "gpt2") == 0, "%s: model_type is \"%s\", have only \"gpt2\" in this version", path, type);
    *c = Config{};
    c->V = (int)json_int(j, "vocab_size", 1, 1 << 24, path);
    c->C = (int)json_int(j, "n_embd", 1, 1 << 20, path);
    c->L = (int)json_int(j, "n_layer", 1, 1 << 12, path);
    c->NH = (int)json_int(j, "n_head", 1, 1 << 12, path);
    c->context = (int)json_int(j, "n_positions", 1, 1 << 24, path);
    c->F = (int)json_int_or(j, "n_inner", 0, 0, 1 << 24, path);
    c->eps = (float)json_float_or(j, "layer_norm_epsilon", 1e-5, 0, 1, path);
    c->tied = json_bool_or(j, "tie_word_embeddings", true, path);
    const char* activation = json_string_or(j, "activation_function", "gelu_new", path);
    bool tanh_gelu = strcmp(activation, "gelu_new") == 0 || strcmp(activation, "gelu_pytorch_tanh") == 0;
    ENSURE(tanh_gelu || strcmp(activation, "gelu") == 0,
           "%s: activation_function is \"%s\", have gelu_new, gelu_pytorch_tanh and gelu", path, activation);
    c->gelu = tanh_gelu ? Gelu::TANH : Gelu::ERF;
    ENSURE(json_bool_or(j, "scale_attn_weights", true, path), "%s: scale_attn_weights false is not there yet", path);
    for (const char* key : {"scale_attn_by_inverse_layer_idx", "add_cross_attention"})
        ENSURE(!json_bool_or(j, key, false, path), "%s: %s true is not there yet", path, key);
    cJSON_Delete(j);
    size_t length;
    c->hf_text = json_read_file(path, &length);
    config_finish(c, path);
}

/* The config as config.json: what was read, byte for byte, else a new one. */
static void config_write(const Config* c, const char* path)
{
    if (c->hf_text != nullptr) {
        json_write_text(path, c->hf_text, strlen(c->hf_text));
        return;
    }
    cJSON* j = json_new_object();
    cJSON_AddItemToArray(json_add_array(j, "architectures"), cJSON_CreateString("GPT2LMHeadModel"));
    json_add_string(j, "model_type", "gpt2");
    json_add_int(j, "vocab_size", c->V);
    json_add_int(j, "n_positions", c->context);
    json_add_int(j, "n_embd", c->C);
    json_add_int(j, "n_layer", c->L);
    json_add_int(j, "n_head", c->NH);
    json_add_int(j, "n_inner", c->F);
    json_add_string(j, "activation_function", c->gelu == Gelu::TANH ? "gelu_new" : "gelu");
    json_add_float(j, "layer_norm_epsilon", c->eps);
    json_add_bool(j, "tie_word_embeddings", c->tied);
    for (const char* key : {"attn_pdrop", "embd_pdrop", "resid_pdrop"}) json_add_float(j, key, 0);
    json_add_float(j, "initializer_range", 0.02);
    json_add_string(j, "torch_dtype", "float32");
    json_write_file(path, j);
    cJSON_Delete(j);
}

// ---------------------------------------------------------------------------------------------------- tensor table
enum class Dim { ONE, V, CONTEXT, C, C3, F };
enum class Where { EMBED, BLOCK, HEAD };
enum class Init { NORMAL, RESIDUAL, ZERO, ONE };   // N(0, 0.02); N(0, 0.02 / sqrt(2L)); constants

/* One row each: the enum is how the code names a tensor of its unit, the rest is what the program does with it. */
#define GPT2_TENSORS(X) \
    X(WTE,           EMBED, "transformer.wte.weight",               V,       C,   NORMAL)   \
    X(WPE,           EMBED, "transformer.wpe.weight",               CONTEXT, C,   NORMAL)   \
    X(LN_1_WEIGHT,   BLOCK, "transformer.h.%d.ln_1.weight",         C,       ONE, ONE)      \
    X(LN_1_BIAS,     BLOCK, "transformer.h.%d.ln_1.bias",           C,       ONE, ZERO)     \
    X(QKV_WEIGHT,    BLOCK, "transformer.h.%d.attn.c_attn.weight",  C,       C3,  NORMAL)   \
    X(QKV_BIAS,      BLOCK, "transformer.h.%d.attn.c_attn.bias",    C3,      ONE, ZERO)     \
    X(PROJ_WEIGHT,   BLOCK, "transformer.h.%d.attn.c_proj.weight",  C,       C,   RESIDUAL) \
    X(PROJ_BIAS,     BLOCK, "transformer.h.%d.attn.c_proj.bias",    C,       ONE, ZERO)     \
    X(LN_2_WEIGHT,   BLOCK, "transformer.h.%d.ln_2.weight",         C,       ONE, ONE)      \
    X(LN_2_BIAS,     BLOCK, "transformer.h.%d.ln_2.bias",           C,       ONE, ZERO)     \
    X(FC_WEIGHT,     BLOCK, "transformer.h.%d.mlp.c_fc.weight",     C,       F,   NORMAL)   \
    X(FC_BIAS,       BLOCK, "transformer.h.%d.mlp.c_fc.bias",       F,       ONE, ZERO)     \
    X(FCPROJ_WEIGHT, BLOCK, "transformer.h.%d.mlp.c_proj.weight",   F,       C,   RESIDUAL) \
    X(FCPROJ_BIAS,   BLOCK, "transformer.h.%d.mlp.c_proj.bias",     C,       ONE, ZERO)     \
    X(LN_F_WEIGHT,   HEAD,  "transformer.ln_f.weight",              C,       ONE, ONE)      \
    X(LN_F_BIAS,     HEAD,  "transformer.ln_f.bias",                C,       ONE, ZERO)     \
    X(LM_HEAD,       HEAD,  "lm_head.weight",                       V,       C,   NORMAL)   /* untied only */

#define ROW_ENUM(row, where, name, rows, cols, init) row,
enum TensorRowIdx { GPT2_TENSORS(ROW_ENUM) NUM_TENSOR_ROWS };
#undef ROW_ENUM

typedef struct { Where where; const char* name; Dim rows, cols; Init init; } TensorRow;
#define ROW_STRUCT(row, where, name, rows, cols, init) {Where::where, name, Dim::rows, Dim::cols, Init::init},
static const TensorRow tensor_rows[] = { GPT2_TENSORS(ROW_STRUCT) };
#undef ROW_STRUCT

static size_t config_dim(const Config* c, Dim d)
{
    switch (d) {
    case Dim::V: return c->V;
    case Dim::CONTEXT: return c->context;
    case Dim::C: return c->C;
    case Dim::C3: return 3 * (size_t)c->C;
    case Dim::F: return c->F;
    default: return 1;
    }
}

/* Units: 0 the embeddings, 1..L the blocks, L+1 the head. */
static int unit_embed(const Config*) { return 0; }
static int unit_block(const Config*, int layer) { return 1 + layer; }
static int unit_head(const Config* c) { return 1 + c->L; }

static void tensor_add(Tensor* out, const Config* c, const TensorRow* row, int unit, int layer)
{
    *out = Tensor{};
    snprintf(out->name, sizeof out->name, row->name, layer);
    out->shape[0] = config_dim(c, row->rows);
    out->shape[1] = config_dim(c, row->cols);
    out->num_dims = row->cols == Dim::ONE ? 1 : 2;
    out->padded_rows = row->rows == Dim::V ? c->VP : out->shape[0];
    out->unit = unit;
    double residual_std = 0.02 / sqrt(2.0 * c->L);
    out->init_std = row->init == Init::NORMAL ? 0.02 : row->init == Init::RESIDUAL ? residual_std : 0;
    out->init_value = row->init == Init::ONE ? 1 : 0;
    out->decay = out->num_dims == 2;
}

/* All tensors of the model in unit order, placed for R ranks. */
static void model_tensors(Shard* shard, const Config* c, int num_ranks)
{
    Tensor* tensors = (Tensor*)malloc_checked((NUM_TENSOR_ROWS * (size_t)c->L + NUM_TENSOR_ROWS) * sizeof(Tensor));
    int n = 0;
    for (int unit = 0; unit <= unit_head(c); unit++) {
        Where where = unit == unit_embed(c) ? Where::EMBED : unit == unit_head(c) ? Where::HEAD : Where::BLOCK;
        for (int row = 0; row < NUM_TENSOR_ROWS; row++)
            if (tensor_rows[row].where == where && !(row == LM_HEAD && c->tied))
                tensor_add(&tensors[n++], c, &tensor_rows[row], unit, unit - 1);
    }
    shard_build(shard, tensors, n, num_ranks);
}

/* Tensor `row` of `unit`. */
static const Tensor* unit_tensor(const Shard* s, int unit, int row)
{
    int first_row = unit == 0 ? WTE : unit == s->num_units - 1 ? LN_F_WEIGHT : LN_1_WEIGHT;
    return &s->tensors[s->units[unit].first_tensor + row - first_row];
}

// ----------------------------------------------------------------------------------------------------------- Model
typedef struct Model {
    Config config;
    Shard shard;
    Zero* zero;
    bool* resident;           // (num_units): the embeddings and the head
    int B, T;                 // largest micro-batch; a call may use less
    int head_rows;            // rows of logits that exist at a time
    // activations, one of each per layer
    floatX *residual;         // (L,N,C)   block input, after the sum
    floatX *ln_1;             // (L,N,C)
    float  *ln_1_mean, *ln_1_rstd;   // (L,N)
    floatX *qkv;              // (L,N,3C)
    floatX *att;              // (L,N,C)   heads side by side
    float  *att_lse;          // (L,B,NH,T)
    floatX *residual_2;       // (L,N,C)   after attention
    floatX *ln_2;             // (L,N,C)
    float  *ln_2_mean, *ln_2_rstd;   // (L,N)
    floatX *fc;               // (L,N,F)   before the GELU
    floatX *fc_gelu;          // (L,N,F)
    // one of each
    floatX *branch;           // (N,C)     what a branch adds to the residual stream, until the next norm sums it
    floatX *residual_f;       // (N,C)
    floatX *ln_f;             // (N,C)
    float  *ln_f_mean, *ln_f_rstd;   // (N)
    floatX *logits;           // (head_rows,VP), turned into dlogits in place
    float  *losses;           // (N)
    int *tokens, *targets;    // (B,T)
    // backward
    floatX *dresidual;        // (N,C)     gradient of the residual stream, carried from block to block
    floatX *dnorm;            // (N,C)     of a norm's output, or of the attention's
    floatX *dfc;              // (N,F)
    floatX *dqkv;             // (N,3C)
    float  *scratch;          // largest any op asks for
} Model;

static size_t max_size(size_t a, size_t b) { return a > b ? a : b; }

/* Adds parameters' and activations' rows to the plan. Without `training` only what a forward needs. */
static void model_plan(Model* m, Plan* plan, int B, int T, bool training)
{
    const Config* c = &m->config;
    m->B = B;
    m->T = T;
    size_t N = (size_t)B * T, C = c->C, F = c->F, L = c->L, LN = L * N;
    size_t head_rows = max_size(((size_t)64 << 20) / (c->VP * sizeof(floatX)), 256);
    m->head_rows = (int)(head_rows < N ? head_rows : N);
    const char* label = "activations";
    const Place D = Place::DEVICE;
    for (floatX** p : {&m->residual, &m->ln_1, &m->att, &m->residual_2, &m->ln_2}) plan_add(plan, label, D, p, LN * C);
    for (float** p : {&m->ln_1_mean, &m->ln_1_rstd, &m->ln_2_mean, &m->ln_2_rstd}) plan_add(plan, label, D, p, LN);
    plan_add(plan, label, D, &m->qkv, LN * 3 * C);
    plan_add(plan, label, D, &m->att_lse, LN * c->NH);
    for (floatX** p : {&m->fc, &m->fc_gelu}) plan_add(plan, label, D, p, LN * F);
    for (floatX** p : {&m->branch, &m->residual_f, &m->ln_f}) plan_add(plan, label, D, p, N * C);
    for (float** p : {&m->ln_f_mean, &m->ln_f_rstd, &m->losses}) plan_add(plan, label, D, p, N);
    plan_add(plan, "logits", D, &m->logits, (size_t)m->head_rows * c->VP);
    for (int** p : {&m->tokens, &m->targets}) plan_add(plan, "tokens", D, p, N);
    size_t scratch = max_size(layernorm_scratch_elems(c->C), attention_scratch_elems(B, T, c->NH, c->HS));
    scratch = max_size(scratch, matmul_scratch_elems((int)max_size(3 * C, F)));
    plan_add(plan, "scratch of the kernels", D, &m->scratch, scratch);
    if (!training) return;
    for (floatX** p : {&m->dresidual, &m->dnorm}) plan_add(plan, "gradients of activations", D, p, N * C);
    plan_add(plan, "gradients of activations", D, &m->dfc, N * F);
    plan_add(plan, "gradients of activations", D, &m->dqkv, N * 3 * C);
}

/* Floating-point operations of one token, forward and backward: 6 per matrix weight, and causal attention's
 * 6*L*C*T (two products forward, four backward, half of T x T). */
static double model_flops_per_token(const Config* c, int T)
{
    double block = 4.0 * c->C * c->C + 2.0 * c->C * c->F;
    return 6.0 * (c->L * block + (double)c->V * c->C) + 6.0 * c->L * (double)c->C * T;
}

static floatX* model_param(const Model* m, int unit, int row)
{
    return m->zero->params + unit_tensor(&m->shard, unit, row)->first;
}

/* The gradient of tensor `row` in the buffer that zero_gradient_begin gave for its unit. */
static float* model_grad(const Model* m, int unit, int row)
{
    return m->zero->unit_grads[unit] + (unit_tensor(&m->shard, unit, row)->first - m->shard.units[unit].range.first);
}

static const floatX* head_weight(const Model* m)
{
    return m->config.tied ? model_param(m, unit_embed(&m->config), WTE)
                          : model_param(m, unit_head(&m->config), LM_HEAD);
}

// --------------------------------------------------------------------------------------------------------- forward
/* Block `layer` on B*T rows. The residual stream arrives as residual_in (N,C) plus, except for the first block, the
 * branch of the block below. Leaves residual_2 and a new branch. */
static void block_forward(Model* m, int layer, int B, int T)
{
    const Config* c = &m->config;
    cudaStream_t stream = m->zero->compute;
    int N = B * T, C = c->C, F = c->F, unit = unit_block(c, layer);
    size_t row = (size_t)layer * m->B * m->T;     // first row of this layer in the (L,N,...) buffers
    floatX* residual = m->residual + row * C;
    float *mean = m->ln_1_mean + row, *rstd = m->ln_1_rstd + row;
    const floatX *weight = model_param(m, unit, LN_1_WEIGHT), *bias = model_param(m, unit, LN_1_BIAS);
    if (layer == 0) {
        layernorm_forward(m->ln_1 + row * C, mean, rstd, residual, weight, bias, N, C, c->eps, stream);
    } else {
        const floatX* below = m->residual_2 + (row - (size_t)m->B * m->T) * C;
        residual_layernorm_forward(residual, m->ln_1 + row * C, mean, rstd, below, m->branch, weight, bias, N, C,
                                   c->eps, stream);
    }
    matmul_forward(m->qkv + row * 3 * C, m->ln_1 + row * C, model_param(m, unit, QKV_WEIGHT),
                   model_param(m, unit, QKV_BIAS), N, C, 3 * C, Layout::IN_OUT, stream);
    attention_forward(m->att + row * C, m->att_lse + row * c->NH, m->scratch, m->qkv + row * 3 * C, B, T, c->NH, c->NKV,
                      c->HS, 1.0f / sqrtf((float)c->HS), stream);
    matmul_forward(m->branch, m->att + row * C, model_param(m, unit, PROJ_WEIGHT), model_param(m, unit, PROJ_BIAS),
                   N, C, C, Layout::IN_OUT, stream);
    residual_layernorm_forward(m->residual_2 + row * C, m->ln_2 + row * C, m->ln_2_mean + row, m->ln_2_rstd + row,
                               residual, m->branch, model_param(m, unit, LN_2_WEIGHT), model_param(m, unit, LN_2_BIAS),
                               N, C, c->eps, stream);
    matmul_forward_gelu(m->fc_gelu + row * F, m->fc + row * F, m->ln_2 + row * C, model_param(m, unit, FC_WEIGHT),
                        model_param(m, unit, FC_BIAS), N, C, F, Layout::IN_OUT, c->gelu, stream);
    matmul_forward(m->branch, m->fc_gelu + row * F, model_param(m, unit, FCPROJ_WEIGHT),
                   model_param(m, unit, FCPROJ_BIAS), N, F, C, Layout::IN_OUT, stream);
}

/* m->tokens (B,T) -> m->ln_f (B*T,C): all but the head. */
static void model_forward(Model* m, int B, int T)
{
    const Config* c = &m->config;
    cudaStream_t stream = m->zero->compute;
    int N = B * T, embed = unit_embed(c), head = unit_head(c);
    embedding_forward(m->residual, m->tokens, model_param(m, embed, WTE), model_param(m, embed, WPE), B, T, c->C,
                      stream);
    for (int layer = 0; layer < c->L; layer++) block_forward(m, layer, B, T);
    const floatX* last = m->residual_2 + (size_t)(c->L - 1) * m->B * m->T * c->C;
    residual_layernorm_forward(m->residual_f, m->ln_f, m->ln_f_mean, m->ln_f_rstd, last, m->branch,
                               model_param(m, head, LN_F_WEIGHT), model_param(m, head, LN_F_BIAS), N, c->C, c->eps,
                               stream);
}

/* Logits of `rows` rows of ln_f from row `first` on -> m->logits (rows,VP). */
static void head_forward(Model* m, int first, int rows)
{
    const Config* c = &m->config;
    matmul_forward(m->logits, m->ln_f + (size_t)first * c->C, head_weight(m), nullptr, rows, c->C, c->VP,
                   Layout::OUT_IN, m->zero->compute);
}

/* The head on chunks of rows, so that the logits of a batch never exist at once. losses (N); with `backward` also dnorm
 * = gradient of ln_f, and the head's weight gradient. dloss is the weight of one token in the step's loss. */
static void head_loss(Model* m, int N, float dloss, bool backward)
{
    const Config* c = &m->config;
    cudaStream_t stream = m->zero->compute;
    for (int first = 0; first < N; first += m->head_rows) {
        int rows = N - first < m->head_rows ? N - first : m->head_rows;
        head_forward(m, first, rows);
        classifier(m->logits, m->losses + first, m->targets + first, rows, c->V, c->VP, dloss, backward, stream);
        if (!backward) continue;
        float* dweight = c->tied ? model_grad(m, unit_embed(c), WTE) : model_grad(m, unit_head(c), LM_HEAD);
        matmul_backward_input(m->dnorm + (size_t)first * c->C, m->logits, head_weight(m), rows, c->C, c->VP,
                              Layout::OUT_IN, false, stream);
        matmul_backward_weight(dweight, nullptr, m->scratch, m->logits, m->ln_f + (size_t)first * c->C, rows, c->C,
                               c->VP, Layout::OUT_IN, stream);
    }
}

// -------------------------------------------------------------------------------------------------------- backward
/* Gradient through block `layer`: m->dresidual (N,C) goes in as the gradient of its output, and out as that of its
 * input. */
static void block_backward(Model* m, int layer, int B, int T)
{
    const Config* c = &m->config;
    cudaStream_t stream = m->zero->compute;
    int N = B * T, C = c->C, F = c->F, unit = unit_block(c, layer);
    size_t row = (size_t)layer * m->B * m->T;
    float* scratch = m->scratch;
    // MLP
    matmul_backward_weight(model_grad(m, unit, FCPROJ_WEIGHT), model_grad(m, unit, FCPROJ_BIAS), scratch, m->dresidual,
                           m->fc_gelu + row * F, N, F, C, Layout::IN_OUT, stream);
    matmul_backward_input_gelu(m->dfc, m->dresidual, model_param(m, unit, FCPROJ_WEIGHT), m->fc + row * F, N, F, C,
                               Layout::IN_OUT, c->gelu, stream);
    matmul_backward_weight(model_grad(m, unit, FC_WEIGHT), model_grad(m, unit, FC_BIAS), scratch, m->dfc,
                           m->ln_2 + row * C, N, C, F, Layout::IN_OUT, stream);
    matmul_backward_input(m->dnorm, m->dfc, model_param(m, unit, FC_WEIGHT), N, C, F, Layout::IN_OUT, false, stream);
    layernorm_backward(m->dresidual, model_grad(m, unit, LN_2_WEIGHT), model_grad(m, unit, LN_2_BIAS), scratch,
                       m->dnorm, m->residual_2 + row * C, model_param(m, unit, LN_2_WEIGHT), m->ln_2_mean + row,
                       m->ln_2_rstd + row, N, C, stream);
    // attention
    matmul_backward_weight(model_grad(m, unit, PROJ_WEIGHT), model_grad(m, unit, PROJ_BIAS), scratch, m->dresidual,
                           m->att + row * C, N, C, C, Layout::IN_OUT, stream);
    matmul_backward_input(m->dnorm, m->dresidual, model_param(m, unit, PROJ_WEIGHT), N, C, C, Layout::IN_OUT, false,
                          stream);
    attention_backward(m->dqkv, scratch, m->dnorm, m->att + row * C, m->att_lse + row * c->NH, m->qkv + row * 3 * C,
                       B, T, c->NH, c->NKV, c->HS, 1.0f / sqrtf((float)c->HS), stream);
    matmul_backward_weight(model_grad(m, unit, QKV_WEIGHT), model_grad(m, unit, QKV_BIAS), scratch, m->dqkv,
                           m->ln_1 + row * C, N, C, 3 * C, Layout::IN_OUT, stream);
    matmul_backward_input(m->dnorm, m->dqkv, model_param(m, unit, QKV_WEIGHT), N, C, 3 * C, Layout::IN_OUT, false,
                          stream);
    layernorm_backward(m->dresidual, model_grad(m, unit, LN_1_WEIGHT), model_grad(m, unit, LN_1_BIAS), scratch,
                       m->dnorm, m->residual + row * C, model_param(m, unit, LN_1_WEIGHT), m->ln_1_mean + row,
                       m->ln_1_rstd + row, N, C, stream);
}

/* One micro-step: m->tokens, m->targets (B,T) -> gradients added, step sums added. Sends what the stage sends. */
static void model_train_micro(Model* m, int B, int T, float dloss, int micro, int num_micro)
{
    const Config* c = &m->config;
    Zero* z = m->zero;
    cudaStream_t stream = z->compute;
    int N = B * T, embed = unit_embed(c), head = unit_head(c);
    model_forward(m, B, T);
    head_loss(m, N, dloss, true);
    loss_accumulate(z->step_sums + NUM_TOKS, m->losses, m->targets, N, stream);
    CUDA_CHECK(cudaMemsetAsync(m->dresidual, 0, (size_t)N * c->C * sizeof(floatX), stream));
    layernorm_backward(m->dresidual, model_grad(m, head, LN_F_WEIGHT), model_grad(m, head, LN_F_BIAS), m->scratch,
                       m->dnorm, m->residual_f, model_param(m, head, LN_F_WEIGHT), m->ln_f_mean, m->ln_f_rstd, N, c->C,
                       stream);
    zero_gradient_end(z, head, micro, num_micro);
    for (int layer = c->L - 1; layer >= 0; layer--) {
        int unit = unit_block(c, layer);
        zero_gradient_begin(z, unit);
        block_backward(m, layer, B, T);
        zero_gradient_end(z, unit, micro, num_micro);
    }
    embedding_backward(model_grad(m, embed, WTE), model_grad(m, embed, WPE), m->dresidual, m->tokens, B, T, c->C,
                       stream);
    zero_gradient_end(z, embed, micro, num_micro);
}

/* Adds the losses of m->tokens, m->targets (B,T) to sums[0] (count) and sums[1] (loss), on the device. */
static void model_eval_micro(Model* m, double* sums, int B, int T)
{
    model_forward(m, B, T);
    head_loss(m, B * T, 0, false);
    loss_accumulate(sums, m->losses, m->targets, (size_t)B * T, m->zero->compute);
}
