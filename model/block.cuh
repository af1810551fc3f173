/* block.cuh: forward and backward of a block, with what is dropped, recomputed and added up on the way. The legend of
 * the letters is in model.cuh. */
#pragma once
#include "model.cuh"

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
    const size_t row_elems = (size_t)T * m->config.C;
    if (d.threshold > 0) dropout(out, inp, 0, B * row_elems, row_elems, d, m->zero->compute);
}

/* The gradient of what a branch added to the stream. */
static const floatX* branch_gradient(const Model* m, DropoutSite site, int layer, int B, int T)
{
    Dropout d = model_dropout(m, site, layer);
    if (d.threshold == 0) return m->dresidual;
    const size_t row_elems = (size_t)T * m->config.C;
    dropout(m->dbranch, m->dresidual, 0, B * row_elems, row_elems, d, m->zero->compute);
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
