/* block.cuh: forward and backward of a block, with what is dropped, recomputed and added up on the way. The legend of
 * the letters is in model.cuh.
 *
 * With tensor parallelism each rank has its own rows of the residual stream, of the norms and of what is added to it
 * (sequence parallelism: Korthikanti et al. 2022, arXiv:2205.05198). Before a GEMM that makes heads or columns of the
 * MLP the rows of all ranks are gathered; the one behind them makes a part of the sum of every row, and the sums are
 * scattered:
 *   forward    norm -> stream_gather -> qkv, fc        proj, fcproj -> stream_scatter -> residual
 *   backward   gradient of the branch -> stream_gather -> proj, fcproj      qkv, fc -> stream_scatter -> norm
 * What is gathered in the forward is not kept, but gathered again for the gradient of the weight. A bias of a sum is
 * added, and its gradient computed, by the first rank; gradients of norms are of the own rows alone. Both are summed
 * over all ranks like the gradients of replicas. */
#pragma once
#include "model.cuh"

// ---------------------------------------------------------------------------------------------- tensor parallelism
/* The rows (N,C) of all ranks, from the own ones. Without tensor parallelism they are the own ones. */
static const floatX* stream_gather(const Model* m, const floatX* own, int N)
{
    const Config* c = &m->config;
    if (c->tp == 1) return own;
    CommunicationScope communication(m->zero->compute, true);
    comm_all_gather(m->tp, m->stream, own, own_rows(c, N) * c->C, FLOATX_NCCL, m->zero->compute);
    return m->stream;
}

/* The own rows of the sum over ranks of their `parts` (N,C) -> own, another buffer. Without tensor parallelism the
 * parts are the sum. */
static const floatX* stream_scatter(const Model* m, floatX* own, floatX* parts, int N)
{
    const Config* c = &m->config;
    if (c->tp == 1) return parts;
    CommunicationScope communication(m->zero->compute, true);
    comm_reduce_scatter(m->tp, Values{own, FLOATX_DTYPE, nullptr}, Values{parts, FLOATX_DTYPE, nullptr},
                        own_rows(c, N) * c->C, false, m->zero->compute);
    return own;
}

/* Where a GEMM writes its part of what is added to the stream. */
static floatX* branch_parts(const Model* m) { return m->config.tp > 1 ? m->stream : m->branch; }

/* Of m->kv_all (kv_ranks,N,2KV), to the heads (N,heads_width) or from them: each rank's columns of the key/value heads
 * that kv_ranks share. */
static void kv_columns(const Model* m, floatX* heads, bool from_heads, int N)
{
    const Config* c = &m->config;
    const size_t width = heads_width(c), Q = config_dim(c, Dim::Q), KV = config_dim(c, Dim::KV);
    const size_t head = (size_t)c->NKV * c->HS;
    for (int rank = 0; rank < c->kv_ranks; rank++) {
        for (int is_value = 0; is_value < 2; is_value++) {
            floatX *columns = heads + Q + is_value * head + rank * KV;
            floatX *part = m->kv_all + (size_t)rank * N * 2 * KV + is_value * KV;
            if (from_heads) columns_copy(part, 2 * KV, columns, width, N, (int)KV, m->zero->compute);
            else columns_copy(columns, width, part, 2 * KV, N, (int)KV, m->zero->compute);
        }
    }
}

/* kv_ranks > 1: m->qkv_part -> heads (N,heads_width), with keys and values gathered from the ranks that share them. */
static void kv_gather(const Model* m, floatX* heads, int N)
{
    const Config* c = &m->config;
    cudaStream_t stream = m->zero->compute;
    const size_t width = heads_width(c), QKV = config_dim(c, Dim::QKV), Q = config_dim(c, Dim::Q), KV2 = QKV - Q;
    columns_copy(heads, width, m->qkv_part, QKV, N, (int)Q, stream);
    columns_copy(m->kv_own, KV2, m->qkv_part + Q, QKV, N, (int)KV2, stream);
    {
        CommunicationScope communication(stream, true);
        comm_all_gather(m->kv, m->kv_all, m->kv_own, N * KV2, FLOATX_NCCL, stream);
    }
    kv_columns(m, heads, false, N);
}

/* The reverse for gradients: m->dqkv (N,heads_width) -> the gradient of what this rank's GEMM made, (N,QKV). */
static const floatX* kv_scatter(const Model* m, int N)
{
    const Config* c = &m->config;
    if (c->kv_ranks == 1) return m->dqkv;
    cudaStream_t stream = m->zero->compute;
    const size_t width = heads_width(c), QKV = config_dim(c, Dim::QKV), Q = config_dim(c, Dim::Q), KV2 = QKV - Q;
    kv_columns(m, m->dqkv, true, N);
    {
        CommunicationScope communication(stream, true);
        comm_reduce_scatter(m->kv, Values{m->kv_own, FLOATX_DTYPE, nullptr}, Values{m->kv_all, FLOATX_DTYPE, nullptr},
                            N * KV2, false, stream);
    }
    columns_copy(m->qkv_part, QKV, m->dqkv, width, N, (int)Q, stream);
    columns_copy(m->qkv_part + Q, QKV, m->kv_own, KV2, N, (int)KV2, stream);
    return m->qkv_part;
}

// --------------------------------------------------------------------------------------------------------- forward
/* Where dropout is: the sum of the embeddings, the probabilities, and what the two branches of a block add. */
enum DropoutSite { DROPOUT_EMBEDDING, DROPOUT_ATTENTION, DROPOUT_PROJ, DROPOUT_FCPROJ };

static Dropout model_dropout(const Model* m, DropoutSite site, int layer)
{
    double p = site == DROPOUT_ATTENTION ? m->attention_dropout : m->dropout;
    if (!m->drops || p == 0) return Dropout{};
    Dropout d = dropout_site(m->seed, layer, site, m->first_sequence, p);
    if (site == DROPOUT_ATTENTION) d.first_head = (unsigned)(m->config.tp_rank * m->config.NH);
    return d;
}

/* Of what the ranks have of (B*T,C) the own rows. */
static void drop_rows(const Model* m, floatX* out, const floatX* inp, Dropout d, int B, int T)
{
    const Config* c = &m->config;
    const size_t N = (size_t)B * T;
    dropout(out, inp, first_own_row(c, N) * c->C, own_rows(c, N) * c->C, (size_t)T * c->C, d, m->zero->compute);
}

/* out (own rows,C) = inp with elements dropped: in place, or what the backward reads instead of inp. */
static void drop(const Model* m, floatX* out, const floatX* inp, DropoutSite site, int layer, int B, int T)
{
    Dropout d = model_dropout(m, site, layer);
    if (d.threshold > 0) drop_rows(m, out, inp, d, B, T);
}

/* The gradient of what a branch added to the stream. */
static const floatX* branch_gradient(const Model* m, DropoutSite site, int layer, int B, int T)
{
    Dropout d = model_dropout(m, site, layer);
    if (d.threshold == 0) return m->dresidual;
    drop_rows(m, m->dbranch, m->dresidual, d, B, T);
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

/* Does this rank add the bias of weight `row`? Of one behind a sum over ranks the first does. */
static bool has_bias(const Model* m, int row)
{
    return m->config.tp_rank == 0 || (row != PROJ_WEIGHT && row != FCPROJ_WEIGHT);
}

/* out (N,OC) = the linear layer whose weight is `row`, of inp (N,IC). */
static void linear_forward(const Model* m, int unit, int row, floatX* out, const floatX* inp, int N, int IC, int OC)
{
    matmul_forward(out, inp, model_param(m, unit, row), has_bias(m, row) ? model_param(m, unit, row + 1) : nullptr, N,
                   IC, OC, m->config.layout, m->zero->compute);
}

/* What the rows of a block attend to, up to themselves. Rows of a pass are B whole sequences of T tokens. Rows of the
 * decoder belong to any sequences: keys and values of what came before are in a cache. */
typedef struct Attend {
    int B, T;                        // the cache has B slots of T positions
    floatX *keys, *values;           // (L,B,NKV,T,HS), or null
    const int *slots, *positions;    // (N) of each row; null: row n is at position n % T
    const int* first_key;            // (N) with a cache, of layers that have a window; null: all
} Attend;

static Attend attend_sequences(const Model* m, int B, int T)
{
    return Attend{B, T, nullptr, nullptr, nullptr, spans_positions(&m->spans), nullptr};
}

/* GEMMs take padded rows: each number of rows is a plan of cuBLASLt's. Rows from N on are idle. */
typedef struct Rows { int N, padded; } Rows;

/* Those of the residual stream that this rank has. */
static int stream_rows(const Model* m, Rows rows)
{
    return m->config.tp == 1 ? rows.N : (int)own_rows(&m->config, rows.padded);
}

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
    linear_forward(m, unit, QKV_WEIGHT, c->kv_ranks > 1 ? m->qkv_part : qkv_linear(m, a),
                   stream_gather(m, a->norm_1, rows.padded), rows.padded, c->C, (int)config_dim(c, Dim::QKV));
    if (c->kv_ranks > 1) kv_gather(m, qkv_linear(m, a), rows.padded);
    heads_forward(m, unit, a, at->positions, N, at->T);
    if (at->keys == nullptr) {
        attention_forward(a->att, a->att_lse, m->scratch, a->qkv, at->B, at->T, NH, NKV, HS, scale, stream,
                          model_dropout(m, DROPOUT_ATTENTION, layer), spans_of_layer(&m->spans, c, layer, at->T));
    } else {
        const size_t first = (size_t)layer * at->B * at->T * NKV * HS;
        attention_cached(a->att, at->keys + first, at->values + first, a->qkv, at->slots, at->positions,
                         c->slides[layer] ? at->first_key : nullptr, N, at->T, NH, NKV, HS, scale, stream);
    }
}

/* norm_2 -> fc, fc_act. The activation is part of the GEMM, where cuBLASLt has it. */
static void mlp_part(const Model* m, int unit, const Block* a, Rows rows)
{
    const Config* c = &m->config;
    const floatX* inp = stream_gather(m, a->norm_2, rows.padded);
    if (is_gated(c)) {
        linear_forward(m, unit, FC_WEIGHT, a->fc, inp, rows.padded, c->C, fc_width(c));
        swiglu_forward(a->fc_act, a->fc, rows.N, c->F, m->zero->compute);
    } else {
        matmul_forward_act(a->fc_act, a->fc, inp, model_param(m, unit, FC_WEIGHT), model_param(m, unit, FC_BIAS),
                           rows.padded, c->C, c->F, c->layout, c->activation, m->zero->compute);
    }
}

/* Block `layer`, of training and of generation: a->below and a->branch -> a->residual_2 and a new branch. */
static void block_forward(Model* m, int layer, const Block* a, const Attend* at, Rows rows)
{
    const Config* c = &m->config;
    const int own = stream_rows(m, rows), unit = unit_block(c, layer);
    norm_forward(m, unit, NORM_1_WEIGHT, a->residual, a->norm_1, a->norm_1_mean, a->norm_1_rstd, a->below, a->branch,
                 own);
    attention_part(m, layer, a, at, rows);
    linear_forward(m, unit, PROJ_WEIGHT, branch_parts(m), a->att, rows.padded, (int)config_dim(c, Dim::Q), c->C);
    stream_scatter(m, m->branch, branch_parts(m), rows.padded);
    drop(m, m->branch, m->branch, DROPOUT_PROJ, layer, at->B, at->T);
    norm_forward(m, unit, NORM_2_WEIGHT, a->residual_2, a->norm_2, a->norm_2_mean, a->norm_2_rstd, a->residual,
                 m->branch, own);
    mlp_part(m, unit, a, rows);
    linear_forward(m, unit, FCPROJ_WEIGHT, branch_parts(m), a->fc_act, rows.padded, c->F, c->C);
    stream_scatter(m, m->branch, branch_parts(m), rows.padded);
    drop(m, m->branch, m->branch, DROPOUT_FCPROJ, layer, at->B, at->T);
}

/* Recomputes what the backward of block `layer` needs and was not kept, segments aside. */
static void block_restore(Model* m, int layer, int B, int T)
{
    const Config* c = &m->config;
    const int N = B * T, own = (int)own_rows(c, N), unit = unit_block(c, layer);
    const Attend at = attend_sequences(m, B, T);
    if (m->recompute == Recompute::NONE || m->recompute == Recompute::BLOCKS || layer == c->L - 1) return;
    Block a = model_block(m, layer);
    Phase before = phase_begin(Phase::RECOMPUTE);
    norm_forward(m, unit, NORM_1_WEIGHT, nullptr, a.norm_1, a.norm_1_mean, a.norm_1_rstd, a.residual, nullptr, own);
    if (m->recompute >= Recompute::ATTENTION) attention_part(m, layer, &a, &at, Rows{N, N});
    else if (c->qk_norm) heads_forward(m, unit, &a, at.positions, N, T);
    norm_forward(m, unit, NORM_2_WEIGHT, nullptr, a.norm_2, a.norm_2_mean, a.norm_2_rstd, a.residual_2, nullptr,
                 own);
    if (m->recompute >= Recompute::MLP) mlp_part(m, unit, &a, Rows{N, N});
    else if (is_gated(c)) swiglu_forward(a.fc_act, a.fc, N, c->F, m->zero->compute);
    phase_begin(before);
}

// -------------------------------------------------------------------------------------------------------- backward
/* norm_backward with the weight as it is kept. */
template <class P> static void norm_backward_of(const Model* m, float* dweight, float* dbias, const floatX* dnorm,
                                                const floatX* inp, const float* mean, const float* rstd,
                                                const P* weight, int N)
{
    int C = m->config.C;
    cudaStream_t stream = m->zero->compute;
    switch (m->config.norm) {
    case Norm::LAYER:
        layernorm_backward(m->dresidual, dweight, dbias, m->scratch, dnorm, inp, weight, mean, rstd, N, C, stream);
        break;
    case Norm::RMS:
        rmsnorm_backward(m->dresidual, dweight, m->scratch, dnorm, inp, weight, rstd, N, C, stream);
        break;
    }
}

/* m->dresidual += gradient of the norm's input, from m->dnorm, that of its output, or the ranks' parts of it (N,C). */
static void norm_backward(const Model* m, int unit, int row, const floatX* inp, const float* mean, const float* rstd,
                          int N)
{
    const floatX* dnorm = stream_scatter(m, m->stream, m->dnorm, N);
    const int own = (int)own_rows(&m->config, N);
    float *dweight = model_grad(m, unit, row), *dbias = model_grad(m, unit, row + 1);
    const float* weight = model_param_fp32(m, unit, row);
    if (weight != nullptr) norm_backward_of(m, dweight, dbias, dnorm, inp, mean, rstd, weight, own);
    else norm_backward_of<floatX>(m, dweight, dbias, dnorm, inp, mean, rstd, model_param(m, unit, row), own);
}

/* The gradients of weight `row`, of which this is the only GEMM of a micro-step, and of its bias. */
static void linear_backward_weight(const Model* m, int unit, int row, const floatX* dout, const floatX* inp, int N,
                                   int IC, int OC)
{
    matmul_backward_weight(model_grad(m, unit, row), has_bias(m, row) ? model_grad(m, unit, row + 1) : nullptr,
                           m->scratch, dout, inp, N, IC, OC, m->config.layout, model_grad_adds(m, unit, row),
                           m->zero->compute);
}

/* dinp (N,IC) =, and the gradients of weight and bias, from dout (N,OC). */
static void linear_backward(const Model* m, int unit, int row, floatX* dinp, const floatX* dout, const floatX* inp,
                            int N, int IC, int OC)
{
    linear_backward_weight(m, unit, row, dout, inp, N, IC, OC);
    matmul_backward_input(dinp, dout, model_param(m, unit, row), N, IC, OC, m->config.layout, false, m->zero->compute);
}

/* m->dqkv: from the gradient of what heads_forward leaves to that of what the GEMM left. */
static void heads_backward(const Model* m, int unit, const Block* a, const int* positions, int N, int T)
{
    const Config* c = &m->config;
    const int NH = c->NH, NKV = c->NKV, HS = c->HS;
    cudaStream_t stream = m->zero->compute;
    float *dq_norm = model_grad(m, unit, Q_NORM_WEIGHT), *dk_norm = model_grad(m, unit, K_NORM_WEIGHT);
    const float *q_norm = model_param_fp32(m, unit, Q_NORM_WEIGHT), *k_norm = model_param_fp32(m, unit, K_NORM_WEIGHT);
    if (q_norm != nullptr)
        qk_norm_rope_backward(m->dqkv, dq_norm, dk_norm, m->scratch, a->qkv_linear, q_norm, k_norm, m->rope, positions,
                              N, T, NH, NKV, HS, c->eps, stream);
    else if (c->qk_norm)
        qk_norm_rope_backward<floatX>(m->dqkv, dq_norm, dk_norm, m->scratch, a->qkv_linear,
                                      model_param(m, unit, Q_NORM_WEIGHT), model_param(m, unit, K_NORM_WEIGHT),
                                      m->rope, positions, N, T, NH, NKV, HS, c->eps, stream);
    else if (is_rotary(c))
        rope_backward(m->dqkv, m->rope, positions, N, T, NH + NKV, NH + 2 * NKV, HS, stream);
}

/* Gradient through block `layer`: m->dresidual (own rows,C) goes in as the gradient of its output, and out as that of
 * its input. */
static void block_backward(Model* m, int layer, int B, int T)
{
    const Config* c = &m->config;
    cudaStream_t stream = m->zero->compute;
    int N = B * T, C = c->C, F = c->F, FC = fc_width(c), unit = unit_block(c, layer);
    int Q = (int)config_dim(c, Dim::Q), QKV = (int)config_dim(c, Dim::QKV);
    Block a = model_block(m, layer);
    // MLP
    const floatX* dbranch = stream_gather(m, branch_gradient(m, DROPOUT_FCPROJ, layer, B, T), N);
    if (is_gated(c)) {
        linear_backward(m, unit, FCPROJ_WEIGHT, m->dfc_act, dbranch, a.fc_act, N, F, C);
        swiglu_backward(m->dfc, m->dfc_act, a.fc, N, F, stream);
    } else {
        linear_backward_weight(m, unit, FCPROJ_WEIGHT, dbranch, a.fc_act, N, F, C);
        matmul_backward_input_act(m->dfc, dbranch, model_param(m, unit, FCPROJ_WEIGHT), a.fc, N, F, C,
                                  m->config.layout, c->activation, stream);
    }
    linear_backward(m, unit, FC_WEIGHT, m->dnorm, m->dfc, stream_gather(m, a.norm_2, N), N, C, FC);
    norm_backward(m, unit, NORM_2_WEIGHT, a.residual_2, a.norm_2_mean, a.norm_2_rstd, N);
    // attention
    dbranch = stream_gather(m, branch_gradient(m, DROPOUT_PROJ, layer, B, T), N);
    linear_backward(m, unit, PROJ_WEIGHT, m->dnorm, dbranch, a.att, N, Q, C);
    attention_backward(m->dqkv, m->scratch, m->dnorm, a.att, a.att_lse, a.qkv, B, T, c->NH, c->NKV, c->HS,
                       1.0f / sqrtf((float)c->HS), stream, model_dropout(m, DROPOUT_ATTENTION, layer),
                       spans_of_layer(&m->spans, c, layer, T));
    heads_backward(m, unit, &a, spans_positions(&m->spans), N, T);
    const floatX* dqkv = kv_scatter(m, N);
    linear_backward(m, unit, QKV_WEIGHT, m->dnorm, dqkv, stream_gather(m, a.norm_1, N), N, C, QKV);
    norm_backward(m, unit, NORM_1_WEIGHT, a.residual, a.norm_1_mean, a.norm_1_rstd, N);
}
