/* cost.cuh: what one training step of a planned run does, estimated: each operation by the name of its launcher, how
 * often, its floating-point operations, and the bytes that it must at least move. It follows passes.cuh and
 * zero/update.h without running anything; test/test_cost.py compares it with what a run does.
 *   step_cost   the table of a rank's step     costs_sum   of some rows of it
 *
 * flops  of GEMMs and attention alone: 2 for each multiply-add that the launcher is asked for. The padding of the
 *        vocabulary counts, and so does recomputation.
 * bytes  what each operand and result takes, once: the cost line of the operation's header. Left out are what all rows
 *        share (weights of norms, biases, the table of rotary embedding) and what is small beside a row (statistics).
 * How long documents are is not known: attention is that of whole sequences, less where a layer has a window.
 * Collectives are not here: zero_sent_bytes has their bytes. Those of tensor parallelism are counted (TpSent), and
 * model_sent_bytes has their bytes: they are enqueued by what is walked here. */
#pragma once
#include "passes.cuh"
#include "zero/account.h"

enum class Part { FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER };
static const char* const part_names[] = {"forward", "backward", "recompute", "optimizer"};

typedef struct Cost {
    Part part;
    const char* op;           // the launcher
    const char* product;      // of a GEMM which one: qkv, attproj, fc, fcproj, head, muon; of others ""
    int rows, inner, cols;    // of a GEMM: (rows,inner) by (inner,cols), the largest
    double calls, flops, bytes;
} Cost;

/* Collectives of tensor parallelism in a step: of the residual stream's rows, of key/value heads that ranks share, and
 * rows of logits. */
typedef struct TpSent { double streams, heads, logit_rows; } TpSent;

typedef struct Costs { Cost costs[96]; int num_costs; TpSent tp; } Costs;

/* Where in the step we are: what is added counts `times`. */
typedef struct CostWalk {
    Costs* out;
    const Model* m;
    int capability;           // of the GPU: matmul_fuses_act
    Part part;
    double times;
    size_t N, own;            // rows of a micro-step, and of the residual stream
    double pairs;             // of a query and a key that it sees, in a micro-step: the mean over the layers meant
} CostWalk;

static constexpr double ELEM = sizeof(floatX);

static Cost* cost_add(CostWalk* w, const char* op, double flops, double bytes, const char* product = "")
{
    Cost* c = w->out->costs;
    Cost* end = c + w->out->num_costs;
    while (c < end && (c->part != w->part || strcmp(c->op, op) != 0 || strcmp(c->product, product) != 0)) c++;
    if (c == end) {
        ENSURE(w->out->num_costs < (int)(sizeof w->out->costs / sizeof w->out->costs[0]), "cost: more than %d rows",
               w->out->num_costs);
        w->out->num_costs++;
        *c = Cost{w->part, op, product, 0, 0, 0, 0, 0, 0};
    }
    c->calls += w->times;
    c->flops += w->times * flops;
    c->bytes += w->times * bytes;
    return c;
}

static void cost_product(CostWalk* w, const char* op, const char* product, double rows, double inner, double cols,
                         double bytes)
{
    if (w->times == 0) return;
    Cost* c = cost_add(w, op, 2 * rows * inner * cols, bytes, product);
    if (c->rows >= rows) return;
    c->rows = (int)rows;
    c->inner = (int)inner;
    c->cols = (int)cols;
}

/* stream_gather or stream_scatter. */
static void cost_stream(CostWalk* w) { w->out->tp.streams += w->m->config.tp > 1 ? w->times : 0; }

/* kv_gather, kv_scatter. */
static void cost_kv(CostWalk* w)
{
    const Config* c = &w->m->config;
    if (c->kv_ranks == 1) return;
    const double N = (double)w->N, kv = 2 * (double)config_dim(c, Dim::KV), times = w->times;
    w->out->tp.heads += times;
    cost_add(w, "columns_copy", 0, ELEM * 2 * N * (double)config_dim(c, Dim::Q));
    cost_add(w, "columns_copy", 0, ELEM * 2 * N * kv);
    w->times = times * 2 * c->kv_ranks;
    cost_add(w, "columns_copy", 0, ELEM * N * kv);
    w->times = times;
}

// ------------------------------------------------------------------------------------------------- parts of a block
static void cost_linear_forward(CostWalk* w, const char* product, double N, double IC, double OC)
{
    cost_product(w, "matmul_forward", product, N, IC, OC, ELEM * (N * IC + IC * OC + N * OC));
}

/* Of the micro-steps that share in which the gradient of a weight is added to; in the others it is overwritten. */
static double cost_adds(const CostWalk* w, int unit, int row)
{
    const Zero* z = w->m->zero;
    const int kept_in = unit_tensor(z->shard, unit, row)->unit;
    const double G = z->num_micro_steps;
    return (zero_gradient_adds(z, kept_in, 0) + (G - 1) * zero_gradient_adds(z, kept_in, 1)) / G;
}

/* adds: the share of these that add to dweight. */
static void cost_backward_weight(CostWalk* w, const char* product, double N, double IC, double OC, double adds)
{
    cost_product(w, "matmul_backward_weight", product, IC, N, OC,
                 ELEM * (N * IC + N * OC) + 4 * (1 + adds) * IC * OC);
}

/* Of a block, and of its bias if there is one. */
static void cost_linear_backward_weight(CostWalk* w, const char* product, Row row, double N, double IC, double OC)
{
    const int unit = unit_block(&w->m->config, 0);
    cost_backward_weight(w, product, N, IC, OC, cost_adds(w, unit, row));
    if (has_bias(w->m, row) && unit_tensor(&w->m->shard, unit, row + 1) != nullptr)
        cost_add(w, "matmul_backward_bias", 0, ELEM * N * OC);
}

static void cost_backward_input(CostWalk* w, const char* product, double N, double IC, double OC, bool accumulate)
{
    cost_product(w, "matmul_backward_input", product, N, OC, IC,
                 ELEM * (N * OC + IC * OC + (accumulate ? 2 : 1) * N * IC));
}

static void cost_linear_backward(CostWalk* w, const char* product, Row row, double N, double IC, double OC)
{
    cost_linear_backward_weight(w, product, row, N, IC, OC);
    cost_backward_input(w, product, N, IC, OC, false);
}

/* The norm's forward, that with the sum before it, its backward. */
static const char* const* norm_ops(const CostWalk* w)
{
    static const char* const layer[] = {"layernorm_forward", "residual_layernorm_forward", "layernorm_backward"};
    static const char* const rms[] = {"rmsnorm_forward", "residual_rmsnorm_forward", "rmsnorm_backward"};
    switch (w->m->config.norm) {
    case Norm::LAYER: return layer;
    case Norm::RMS: break;
    }
    return rms;
}

static void cost_norm_forward(CostWalk* w, bool adds)
{
    cost_add(w, norm_ops(w)[adds], 0, ELEM * (adds ? 4 : 2) * (double)w->own * w->m->config.C);
}

static void cost_norm_backward(CostWalk* w)
{
    cost_stream(w);
    cost_add(w, norm_ops(w)[2], 0, ELEM * 4 * (double)w->own * w->m->config.C);
}

static void cost_drop(CostWalk* w)
{
    if (w->m->dropout > 0) cost_add(w, "dropout", 0, ELEM * 2 * (double)w->own * w->m->config.C);
}

static void cost_heads_forward(CostWalk* w)
{
    const Config* c = &w->m->config;
    double heads = (double)w->N * c->HS, rotated = c->NH + c->NKV;
    if (c->qk_norm) cost_add(w, "qk_norm_rope_forward", 0, ELEM * 2 * heads * (rotated + c->NKV));
    else if (is_rotary(c)) cost_add(w, "rope_forward", 0, ELEM * 2 * heads * rotated);
}

static void cost_heads_backward(CostWalk* w)
{
    const Config* c = &w->m->config;
    double rotated = (double)w->N * c->HS * (c->NH + c->NKV);
    if (c->qk_norm) cost_add(w, "qk_norm_rope_backward", 0, ELEM * 3 * rotated);
    else if (is_rotary(c)) cost_add(w, "rope_backward", 0, ELEM * 2 * rotated);
}

/* From now on layers first.. up to `end` are meant. */
static void cost_layers(CostWalk* w, int first, int end)
{
    w->pairs = 0;
    for (int layer = first; layer < end; layer++)
        w->pairs += w->m->B * spans_pairs(w->m->T, config_window(&w->m->config, layer)) / (end - first);
}

static void cost_attention_part(CostWalk* w)
{
    const Config* c = &w->m->config;
    double N = (double)w->N, Q = (double)config_dim(c, Dim::Q), QKV = (double)config_dim(c, Dim::QKV);
    cost_stream(w);
    cost_linear_forward(w, "qkv", N, c->C, QKV);
    cost_kv(w);
    cost_heads_forward(w);
    cost_add(w, "attention_forward", 4 * Q * w->pairs, ELEM * N * ((double)heads_width(c) + Q) + 4 * N * c->NH);
}

static void cost_swiglu_forward(CostWalk* w)
{
    cost_add(w, "swiglu_forward", 0, ELEM * 3 * (double)w->N * w->m->config.F);
}

/* An activation that cuBLASLt fuses into the GEMM reads or writes its argument there; another is a pass of its own. */
static double cost_fused_elems(const CostWalk* w)
{
    const Config* c = &w->m->config;
    return matmul_fuses_act(c->activation, w->capability) ? (double)w->N * c->F : 0;
}

static void cost_mlp_part(CostWalk* w)
{
    const Config* c = &w->m->config;
    double N = (double)w->N, C = c->C, F = c->F, fused = cost_fused_elems(w);
    cost_stream(w);
    if (is_gated(c)) {
        cost_linear_forward(w, "fc", N, C, fc_width(c));
        cost_swiglu_forward(w);
        return;
    }
    cost_product(w, "matmul_forward_act", "fc", N, C, F, ELEM * (N * C + C * F + N * F + fused));
    if (fused == 0) cost_add(w, "activation_forward", 0, ELEM * 2 * N * F);
}

static void cost_block_forward(CostWalk* w, bool input_is_there)
{
    const Config* c = &w->m->config;
    cost_norm_forward(w, !input_is_there);
    cost_attention_part(w);
    cost_linear_forward(w, "attproj", (double)w->N, (double)config_dim(c, Dim::Q), c->C);
    cost_stream(w);
    cost_drop(w);
    cost_norm_forward(w, true);
    cost_mlp_part(w);
    cost_linear_forward(w, "fcproj", (double)w->N, c->F, c->C);
    cost_stream(w);
    cost_drop(w);
}

static void cost_block_restore(CostWalk* w)
{
    Recompute level = w->m->recompute;
    if (level == Recompute::NONE || level == Recompute::BLOCKS) return;
    for (int norm = 0; norm < 2; norm++) cost_norm_forward(w, false);
    if (level >= Recompute::ATTENTION) cost_attention_part(w);
    else if (w->m->config.qk_norm) cost_heads_forward(w);
    if (level >= Recompute::MLP) cost_mlp_part(w);
    else if (is_gated(&w->m->config)) cost_swiglu_forward(w);
}

static void cost_block_backward(CostWalk* w)
{
    const Config* c = &w->m->config;
    double N = (double)w->N, C = c->C, F = c->F, Q = (double)config_dim(c, Dim::Q);
    double QKV = (double)config_dim(c, Dim::QKV), fused = cost_fused_elems(w);
    cost_drop(w);
    cost_stream(w);
    cost_linear_backward_weight(w, "fcproj", FCPROJ_WEIGHT, N, F, C);
    if (is_gated(c)) {
        cost_backward_input(w, "fcproj", N, F, C, false);
        cost_add(w, "swiglu_backward", 0, ELEM * 5 * N * F);
    } else {
        cost_product(w, "matmul_backward_input_act", "fcproj", N, C, F, ELEM * (N * C + C * F + N * F + fused));
        if (fused == 0) cost_add(w, "activation_backward", 0, ELEM * 3 * N * F);
    }
    cost_stream(w);
    cost_linear_backward(w, "fc", FC_WEIGHT, N, C, fc_width(c));
    cost_norm_backward(w);
    cost_drop(w);
    cost_stream(w);
    cost_linear_backward(w, "attproj", PROJ_WEIGHT, N, Q, C);
    cost_add(w, "attention_backward", 10 * Q * w->pairs,
             ELEM * 2 * N * ((double)heads_width(c) + Q) + 4 * N * c->NH);
    cost_heads_backward(w);
    cost_kv(w);
    cost_stream(w);
    cost_linear_backward(w, "qkv", QKV_WEIGHT, N, C, QKV);
    cost_norm_backward(w);
}

// ------------------------------------------------------------------------------------------------------- the passes
/* Alike chunks of rows. Of num_rows in chunks of max_rows there are two kinds: the full ones, and the rest. */
typedef struct Chunks { double rows, count; } Chunks;
typedef struct ChunkKinds { Chunks kinds[2]; } ChunkKinds;

static ChunkKinds chunk_kinds(size_t num_rows, size_t max_rows)
{
    const size_t rest = num_rows % max_rows;
    return {{{(double)max_rows, (double)(num_rows / max_rows)}, {(double)rest, rest > 0 ? 1.0 : 0.0}}};
}

static const Chunks* first_kind(const ChunkKinds* both) { return &both->kinds[both->kinds[0].count > 0 ? 0 : 1]; }

/* Of the chunks of a micro-step the first adds to the head's gradient in a share of the micro-steps, the others do
 * always. */
static void cost_head_weight(CostWalk* w, Chunks chunks, bool has_first, int unit, int row, double VP)
{
    const double adds = has_first ? (chunks.count - 1 + cost_adds(w, unit, row)) / chunks.count : 1;
    cost_backward_weight(w, "head", chunks.rows, w->m->config.C, VP, adds);
}

/* parts_merge. */
static void cost_parts_merge(CostWalk* w, double rows)
{
    w->out->tp.logit_rows += w->times * rows;
    cost_add(w, "classifier_merge", 0, classifier_merge_bytes(rows, w->m->config.tp));
}

/* The head as head_loss goes about it. */
static void cost_head(CostWalk* w)
{
    const Config* c = &w->m->config;
    const double times = w->times;
    const ChunkKinds both = chunk_kinds(w->N, (size_t)w->m->head_rows);
    const int unit = c->tied ? unit_embed(c) : unit_lm_head(c, 0), row = c->tied ? WTE : LM_HEAD;
    for (const Chunks& chunks : both.kinds) {
        if (chunks.count == 0) continue;
        double rows = chunks.rows, C = c->C, VP = c->VP;
        w->times = times * chunks.count;
        w->part = Part::FORWARD;
        cost_linear_forward(w, "head", rows, C, VP);
        if (c->tp == 1) {
            cost_add(w, "classifier", 0, ELEM * 2 * rows * VP);
        } else {
            cost_add(w, "classifier_piece_forward", 0, ELEM * rows * VP);
            cost_parts_merge(w, rows);
            cost_add(w, "classifier_piece_backward", 0, ELEM * 2 * rows * VP);
        }
        w->part = Part::BACKWARD;
        cost_backward_input(w, "head", rows, C, VP, false);
        cost_head_weight(w, chunks, &chunks == first_kind(&both), unit, row, VP);
    }
    w->times = times;
}

/* The same for head_loss_chunked: up through the pieces, and down with the logits recomputed. */
static void cost_head_chunked(CostWalk* w)
{
    const Config* c = &w->m->config;
    const double times = w->times;
    for (int index = 0; index < c->num_pieces; index++) {
        int chunk_rows;
        LogitsPiece piece = head_piece(w->m, index, (int)w->N, &chunk_rows);
        const ChunkKinds both = chunk_kinds(w->N, (size_t)chunk_rows);
        for (const Chunks& chunks : both.kinds) {
            if (chunks.count == 0) continue;
            double rows = chunks.rows, C = c->C, VP = piece.stride;
            w->times = times * chunks.count;
            w->part = Part::FORWARD;
            cost_linear_forward(w, "head", rows, C, VP);
            cost_add(w, "classifier_piece_forward", 0, ELEM * rows * VP);
            w->part = Part::RECOMPUTE;
            cost_linear_forward(w, "head", rows, C, VP);
            w->part = Part::BACKWARD;
            cost_add(w, "classifier_piece_backward", 0, ELEM * 2 * rows * VP);
            cost_backward_input(w, "head", rows, C, VP, index < c->num_pieces - 1);
            cost_head_weight(w, chunks, &chunks == first_kind(&both), unit_lm_head(c, index), LM_HEAD, VP);
        }
    }
    w->times = times;
    w->part = Part::FORWARD;
    if (c->tp > 1) cost_parts_merge(w, (double)w->N);
}

/* `add` for as many as there are. */
static void cost_times(CostWalk* w, Part part, double times, void (*add)(CostWalk*))
{
    double before = w->times;
    w->part = part;
    w->times *= times;
    if (times > 0) add(w);
    w->times = before;
}

static void cost_first_block(CostWalk* w) { cost_block_forward(w, true); }
static void cost_next_block(CostWalk* w) { cost_block_forward(w, false); }

/* model_train_micro. */
static void cost_micro(CostWalk* w)
{
    const Model* m = w->m;
    const Config* c = &m->config;
    double N = (double)w->N, C = c->C;
    double segments = 0, restored = m->recompute == Recompute::BLOCKS ? 0 : c->L - 1;
    for (int layer = 0; layer < c->L; layer++) segments += recomputes_segment(m, layer);
    w->part = Part::FORWARD;
    if (c->tp > 1) cost_add(w, "cudaMemsetAsync", 0, ELEM * N * C);
    for (int piece = 0; piece < (m->chunks_vocab ? c->num_pieces : 1); piece++)
        cost_add(w, "embedding_rows", 0,
                 ELEM * 2 * N * C * (m->chunks_vocab ? piece_tokens(c, piece) : own_tokens(c)).share);
    cost_stream(w);
    cost_drop(w);
    for (bool slides : {false, true})
        if (spans_needed(c, slides, m->spans.documents, m->T))
            cost_add(w, "attention_spans", 0, (m->spans.documents ? 12 : 8) * N);
    cost_layers(w, 0, c->L);
    cost_times(w, Part::FORWARD, 1, cost_first_block);
    cost_times(w, Part::FORWARD, c->L - 1, cost_next_block);
    cost_norm_forward(w, true);
    cost_stream(w);
    if (m->chunks_vocab) cost_head_chunked(w);
    else cost_head(w);
    w->part = Part::FORWARD;
    cost_add(w, "loss_accumulate", 0, 8 * (double)w->own);
    w->part = Part::BACKWARD;
    cost_add(w, "cudaMemsetAsync", 0, ELEM * (double)w->own * C);
    cost_norm_backward(w);
    cost_layers(w, 0, (int)segments * m->segment_layers);
    cost_times(w, Part::RECOMPUTE, segments, cost_first_block);
    cost_times(w, Part::RECOMPUTE, segments * (m->segment_layers - 1), cost_next_block);
    cost_layers(w, 0, c->L - 1);
    cost_times(w, Part::RECOMPUTE, restored, cost_block_restore);
    cost_layers(w, 0, c->L);
    cost_times(w, Part::BACKWARD, c->L, cost_block_backward);
    cost_drop(w);
    cost_stream(w);
    for (int piece = 0; piece < c->num_pieces; piece++)
        cost_add(w, "embedding_backward", 0, embedding_backward_bytes(config_has(c, WPE), m->B, m->T, C,
                                                                      piece_tokens(c, piece)));
}

/* Gradients: cleared, summed over micro-steps in another type, and made what is sent. */
static void cost_gradients(CostWalk* w)
{
    const Zero* z = w->m->zero;
    double G = z->num_micro_steps;
    w->part = Part::BACKWARD;
    for (int u = 0; u < z->shard->num_units; u++) {
        Storage storage = unit_storage(z, u);
        double count = (double)z->shard->units[u].range.count, kept = (double)dtype_bytes(storage.grads);
        bool buffered = unit_is_buffered(&z->grad_buckets, u), accumulates = unit_accumulates(z, u);
        w->times = buffered || accumulates ? G : 1;
        const ClearRanges cleared = gradient_cleared(z->shard, u);
        if (cleared.num_ranges > 0) cost_add(w, "ranges_clear", 0, 4.0 * ranges_elems(&cleared));
        w->times = G;
        if (accumulates) cost_add(w, "values_sum", 0, count * (4 + kept + kept * (G - 1) / G));
        w->times = buffered ? G : 1;
        Dtype whole = accumulates ? storage.grads : Dtype::FP32;
        if (unit_group(z, u)->num_ranks > 1 && whole != storage.sent)
            cost_add(w, "values_convert", 0, count * (double)(dtype_bytes(whole) + dtype_bytes(storage.sent)));
    }
}

// ------------------------------------------------------------------------------------------------- end of the step
/* What a step of an element moves: weights read, or written too with their copy for the model; a state both ways. */
typedef struct UpdateBytes { double reads, weights, state; } UpdateBytes;

static UpdateBytes update_bytes(const Zero* z, int u)
{
    Storage storage = unit_storage(z, u);
    bool none = storage.master == FLOATX_DTYPE;
    double copy = none || storage.master == Dtype::SPLIT || unit_is_fp32(z->shard, u) ? 0 : ELEM;
    return UpdateBytes{none ? ELEM : 4, (none ? 2 * ELEM : 8) + copy, 2 * (double)dtype_bytes(storage.moments)};
}

/* What this rank keeps in host memory, in bytes. */
typedef struct HostBytes { double states, gradients, parameters; } HostBytes;

static HostBytes host_bytes(const Zero* z)
{
    HostBytes all = {};
    for (int u = 0; u < z->shard->num_units; u++) {
        Storage storage = unit_storage(z, u);
        bool has_master = storage.master != FLOATX_DTYPE && !unit_is_fp32(z->shard, u);
        double count = (double)zero_owned(z, u).count, moment = (double)dtype_bytes(storage.moments);
        const bool states = unit_states_place(z, u) == Place::HOST;
        if (states && has_master) all.states += count * (double)dtype_bytes(storage.master);
        for (int k = 0; k < (states ? MAX_STATES : 0); k++) all.states += moment * (double)zero_state_elems(z, k, u);
        all.gradients += count * (double)dtype_bytes(storage.grads);
        if (unit_is_buffered(&z->param_buckets, u)) all.parameters += count * ELEM;
    }
    if (zero_place(z, OFFLOAD_GRADIENTS) != Place::HOST) all.gradients = 0;
    if (zero_place(z, OFFLOAD_PARAMETERS) != Place::HOST) all.parameters = 0;
    return all;
}

/* The hidden matrices of Muon that are this rank's turn: all of them where it owns the gradients whole. */
static void cost_muon(CostWalk* w)
{
    const Zero* z = w->m->zero;
    const Shard* s = z->shard;
    const Group* group = z->muon->group;
    bool shares = z->stage > 0 && group->num_ranks > 1;
    for (int idx = 0; idx < z->muon->num_tensors; idx++) {
        if (shares && muon_rank(z, idx) != group->rank) continue;
        const Tensor* t = &s->tensors[z->muon->tensors[idx]];
        double a = (double)t->shape[0], b = (double)t->shape[1] / t->num_fused, m = fmin(a, b), n = fmax(a, b);
        w->times = t->num_fused;
        cost_add(w, "muon_sum_squares", 0, 4 * m * n);
        cost_add(w, "muon_copy", 0, (4 + ELEM) * m * n);
        cost_add(w, "muon_copy", 0, (4 + ELEM) * m * n);
        w->times *= MUON_ITERATIONS;
        cost_product(w, "matmul_forward", "muon", m, n, m, ELEM * (2 * m * n + m * m));
        cost_product(w, "matmul_forward", "muon", m, m, m, ELEM * 3 * m * m);
        cost_add(w, "muon_combine", 0, ELEM * 3 * m * m);
        cost_product(w, "matmul_forward", "muon", m, m, n, ELEM * (m * m + 2 * m * n));
    }
    w->times = 1;
}

/* What pass R moves of an element. */
template <class R> static double pass_bytes(UpdateBytes b, double grad)
{
    double bytes = (R::READS_GRAD + R::WRITES_GRAD) * grad + (R::READS_PARAM ? b.weights : 0);
    for (int k = 0; k < MAX_STATES; k++)
        if (STATES_READ<R> >> k & 1) bytes += R::WRITES_STATES ? b.state : b.state / 2;
    return bytes;
}

/* The passes of optimizer R over unit u: params_update. */
template <class R> static void cost_passes(CostWalk* w, int u)
{
    const Zero* z = w->m->zero;
    constexpr bool matrices = R::PHASE == TensorPhase::MATRICES;
    const UpdateBytes b = update_bytes(z, u);
    const bool narrow = zero_slices_grads(z) || unit_accumulates(z, u);
    const double grad = (double)dtype_bytes(narrow ? unit_storage(z, u).grads : Dtype::FP32);
    const double slice = (double)unit_slice(z, u).count;
    const double all = (double)zero_owned(z, u).count, hidden = (double)zero_gap(z, u, SIZE_MAX);
    const double count = matrices ? hidden : all, rest = all - hidden;
    if (slice > 0) cost_add(w, "global_norm_accumulate", 0, grad * slice);
    if constexpr (R::PHASE != TensorPhase::NONE)
        if (count > 0) cost_add(w, "optimizer_update", 0, count * pass_bytes<typename R::First>(b, grad));
    if (R::PHASE == TensorPhase::NORMS && slice > 0) cost_add(w, "lamb_norms", 0, slice * (b.reads + b.state));
    if constexpr (matrices)
        if (rest > 0) cost_add(w, "optimizer_update", 0, rest * pass_bytes<typename R::Rest>(b, grad));
    if (count > 0) cost_add(w, "optimizer_update", 0, count * pass_bytes<R>(b, grad));
}

/* zero_step_end, on what this rank owns. */
static void cost_update(CostWalk* w)
{
    const Zero* z = w->m->zero;
    w->part = Part::OPTIMIZER;
    w->times = 1;
    if (z->optimizer->phase == TensorPhase::NORMS) cost_add(w, "cudaMemsetAsync", 0, 16.0 * z->shard->num_tensors);
    for (int u = 0; u < z->shard->num_units; u++) {
        switch (z->optimizer->optimizer) {
#define OPTIMIZER_COST(name, word, R) case Optimizer::name: cost_passes<R>(w, u); break;
        OPTIMIZERS(OPTIMIZER_COST)
#undef OPTIMIZER_COST
        }
        if (unit_is_fp32(z->shard, u) && z->rounds_fp32)
            cost_add(w, "weights_round", 0, (4 + ELEM) * (double)z->shard->units[u].range.count);
    }
    if (z->optimizer->phase == TensorPhase::MATRICES) cost_muon(w);
}

/* One step of this rank with full micro-batches and sequences on a GPU of this compute capability. The model and its
 * Zero are planned. */
static void step_cost(Costs* out, const Model* m, int capability)
{
    *out = Costs{};
    const size_t N = (size_t)m->B * m->T;
    CostWalk walk = {out, m, capability, Part::FORWARD, (double)m->zero->num_micro_steps, N,
                     own_rows(&m->config, N), 0};
    cost_micro(&walk);
    cost_gradients(&walk);
    cost_update(&walk);
}

/* Bytes that this rank sends in a step to the ranks of tensor parallelism, or to those of them that share its key/value
 * heads. */
static size_t model_sent_bytes(const Model* m, bool of_heads)
{
    const Config* c = &m->config;
    if (c->tp == 1 || (of_heads && c->kv_ranks == 1)) return 0;
    Costs costs;
    step_cost(&costs, m, 0);
    const size_t N = (size_t)m->B * m->T, row_bytes = 2 * sizeof(float) + sizeof(double);
    if (of_heads)
        return (size_t)costs.tp.heads * comm_scatter_bytes(m->kv, N * 2 * config_dim(c, Dim::KV), sizeof(floatX));
    return (size_t)costs.tp.streams * comm_scatter_bytes(m->tp, own_rows(c, N) * c->C, sizeof(floatX)) +
           comm_scatter_bytes(m->tp, (size_t)costs.tp.logit_rows, row_bytes);
}

/* All of a part; null: of all. */
static Cost costs_sum(const Costs* costs, const Part* part)
{
    Cost sum = {};
    for (int i = 0; i < costs->num_costs; i++) {
        const Cost* c = &costs->costs[i];
        if (part != nullptr && c->part != *part) continue;
        sum.calls += c->calls;
        sum.flops += c->flops;
        sum.bytes += c->bytes;
    }
    return sum;
}
