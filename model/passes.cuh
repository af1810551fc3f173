/* passes.cuh: forward and backward of the whole model: the units one after another, their parameters when they are
 * needed, their gradients when they are complete. The blocks themselves are in block.cuh.
 *   model_visits       the order in which a micro-step uses the units' parameters; model_persistent: persistent units
 *   model_forward      tokens -> the input of the head     head_forward, head_loss   the head, in chunks of rows
 *   model_train_micro  tokens, targets -> gradients, sums  model_eval_micro          tokens, targets -> sums
 *
 * Stages 2 and 3 with a large untied vocabulary (chunks_vocab): wte and head are pieces of about a block's size that
 * use the double buffer as blocks do. The lookup takes from each piece the rows that are in it. The head goes through
 * its pieces twice, each time over all rows: up, for the maximum and the sum of the softmax, then down, from the piece
 * that is still cached, for the gradients, with the logits recomputed. So no piece is gathered more often than a block,
 * no rank stores the weights or gradients of wte and head whole, and the cost is a fourth GEMM of the head. At
 * stage 2 the weights are whole, and only the gradients use the double buffer, at the same cost. Alternatives: gather
 * all pieces for each chunk of rows (N / head_rows times the bytes), or keep the logits of all rows (2 N V bytes: for
 * llama3-8b at 8192 tokens twice the head itself). */
#pragma once
#include "block.cuh"

/* The top block of each segment is where the backward recomputes the segment. The top segment is not: its activations
 * are still stored. */
static bool recomputes_segment(const Model* m, int layer)
{
    if (m->recompute != Recompute::BLOCKS || layer == m->config.L - 1) return false;
    return layer % m->segment_layers == m->segment_layers - 1;
}

/* The order in which a micro-step uses the units' parameters: model_forward, then model_train_micro. */
static void model_visits(Model* m)
{
    const Config* c = &m->config;
    m->visits = (int*)malloc_checked((3 * (size_t)c->L + 3 * c->num_pieces + 2) * sizeof(int));
    int n = 0;
    for (int unit = 0; unit < num_units(c); unit++) m->visits[n++] = unit;
    if (m->chunks_vocab)
        for (int piece = c->num_pieces - 1; piece >= 0; piece--) m->visits[n++] = unit_lm_head(c, piece);
    for (int layer = c->L - 1; layer >= 0; layer--) {
        if (recomputes_segment(m, layer))
            for (int i = layer + 1 - m->segment_layers; i <= layer; i++) m->visits[n++] = unit_block(c, i);
        m->visits[n++] = unit_block(c, layer);
    }
    m->num_visits = n;
}

/* Persistent units, with whole gradients and at stage 3 whole parameters: tensors stored in fp32, and embeddings and
 * head unless the vocabulary is chunked. */
static void model_persistent(const Model* m, bool* persistent)
{
    const Config* c = &m->config;
    for (int u = 0; u < num_units(c); u++)
        persistent[u] = u < unit_embed(c) || u == unit_head(c) ||
                      (!m->chunks_vocab && (u < unit_block(c, 0) || u > unit_head(c)));
}

/* Recomputes the segment that ends with block `layer` from its input. */
static void segment_forward(Model* m, int layer, int B, int T)
{
    const int first = layer + 1 - m->segment_layers;
    const Attend at = attend_sequences(m, B, T);
    Phase before = phase_begin(Phase::RECOMPUTE);
    for (int i = first; i <= layer; i++) {
        zero_params_begin(m->zero, unit_block(&m->config, i));
        const Block a = i == first ? model_block(m, i) : model_block_above(m, i);
        block_forward(m, i, &a, &at, Rows{B * T, B * T});
    }
    phase_begin(before);
}

static TokenRange piece_tokens(const Config* c, int piece)
{
    const int columns = piece_columns(c, piece);
    return TokenRange{piece_first(c, piece), columns, (double)columns / c->VP / c->tp};
}

/* Those of all pieces of this rank. */
static TokenRange own_tokens(const Config* c)
{
    return c->tp == 1 ? ALL_TOKENS : TokenRange{c->vocab_first, c->VP, 1.0 / c->tp};
}

/* embedding_rows with wte, of `unit`, and wpe as they are kept. */
template <class E> static void embed_rows(const Model* m, floatX* out, const int* positions, int unit, const E* wte,
                                          TokenRange range, int N, int T)
{
    int C = m->config.C;
    const float* wpe = model_param_fp32(m, unit, WPE);
    if (wpe != nullptr)
        embedding_rows(out, m->tokens, positions, wte, wpe, range, N, T, C, m->zero->compute);
    else
        embedding_rows<E, floatX>(out, m->tokens, positions, wte, model_param(m, unit, WPE), range, N, T, C,
                                  m->zero->compute);
}

static void rows_clear(const Model* m, floatX* rows, size_t N)
{
    const size_t bytes = N * m->config.C * sizeof(floatX);
    OP_CALL("cudaMemsetAsync", m->zero->compute, bytes, N, m->config.C);
    CUDA_CHECK(cudaMemsetAsync((void*)rows, 0, bytes, m->zero->compute));
}

/* m->tokens (N) -> own (own rows,C). positions null: row n is at position n % T. Whole, the pieces are one matrix. With
 * tensor parallelism each token's row, with its position, comes from the rank that has it: the others add zeros. */
static void embed_forward(const Model* m, floatX* own, const int* positions, Rows rows, int T)
{
    const Config* c = &m->config;
    const int N = rows.N;
    floatX* out = c->tp > 1 ? m->stream : own;
    if (c->tp > 1) rows_clear(m, out, rows.padded);
    for (int unit = 0; unit < c->num_front_units; unit++) zero_params_begin(m->zero, unit);
    for (int piece = 0; piece < c->num_pieces; piece++) {
        int unit = unit_embed(c, piece);
        zero_params_begin(m->zero, unit);
        if (!m->chunks_vocab && piece < c->num_pieces - 1) continue;
        TokenRange range = m->chunks_vocab ? piece_tokens(c, piece) : own_tokens(c);
        if (!m->chunks_vocab) unit = unit_embed(c);
        const float* wte = model_param_fp32(m, unit, WTE);
        if (wte != nullptr) embed_rows(m, out, positions, unit, wte, range, N, T);
        else embed_rows<floatX>(m, out, positions, unit, model_param(m, unit, WTE), range, N, T);
    }
    stream_scatter(m, own, out, rows.padded);
}

/* Before the final norm, and before the head where that is whole. */
static void head_begin(Model* m)
{
    const Config* c = &m->config;
    for (int unit = unit_head(c); unit < (m->chunks_vocab ? unit_head(c) + 1 : num_units(c)); unit++)
        zero_params_begin(m->zero, unit);
}

/* The stream above the last block, and its branch -> m->norm_f (own rows,C). */
static void final_norm(Model* m, const floatX* below, Rows rows)
{
    head_begin(m);
    norm_forward(m, unit_head(&m->config), NORM_F_WEIGHT, m->residual_f, m->norm_f, m->norm_f_mean, m->norm_f_rstd,
                 below, m->branch, stream_rows(m, rows));
}

typedef void BlockLook(void* context, int layer);

/* m->tokens (B,T) -> m->norm_f (own rows,C): all but the head. `look`, if any, is called after each block, whose
 * activations are there. */
static void model_forward(Model* m, int B, int T, BlockLook* look = nullptr, void* context = nullptr)
{
    const Config* c = &m->config;
    const Attend at = attend_sequences(m, B, T);
    const Rows rows = {B * T, B * T};
    spans_begin(&m->spans, c, B, T, m->zero->compute);
    for (int layer = 0; layer < c->L; layer++) {
        bool offloads = m->offloads && starts_segment(m, layer);
        if (offloads) offload_write_begin(&m->inputs, layer / m->segment_layers);
        if (layer == 0) {
            floatX* residual = model_block(m, 0).residual;
            embed_forward(m, residual, at.positions, rows, T);
            drop(m, residual, residual, DROPOUT_EMBEDDING, 0, B, T);
        }
        zero_params_begin(m->zero, unit_block(c, layer));
        const Block a = layer == 0 ? model_block(m, 0) : model_block_above(m, layer);
        block_forward(m, layer, &a, &at, rows);
        if (offloads) offload_write_end(&m->inputs, layer / m->segment_layers);
        if (look != nullptr) look(context, layer);
    }
    final_norm(m, model_block(m, c->L - 1).residual_2, rows);
}

/* Where the head is whole. */
static const floatX* head_weight(const Model* m)
{
    return m->config.tied ? model_param(m, unit_embed(&m->config), WTE)
                          : model_param(m, unit_lm_head(&m->config, 0), LM_HEAD);
}

/* Logits of `rows` rows of the head's input -> m->logits (rows,VP). */
static void head_forward(Model* m, const floatX* inp, int rows)
{
    const Config* c = &m->config;
    matmul_forward(m->logits, inp, head_weight(m), nullptr, rows, c->C, c->VP, Layout::OUT_IN, m->zero->compute);
}

/* Tensor parallelism: where this rank writes what its columns say about `rows` rows; the ranks' follow one another. */
static ClassifierRows own_part(const Model* m, int rows)
{
    const size_t first = (size_t)m->config.tp_rank * rows;
    return ClassifierRows{m->parts.losses + first, m->parts.maxima + first, m->parts.sums + first};
}

/* What the ranks' columns say about rows first, first + 1, ... -> m->losses, m->maxima, m->exp_sums. */
static void parts_merge(Model* m, int first, int rows)
{
    cudaStream_t stream = m->zero->compute;
    const ClassifierRows own = own_part(m, rows), whole = {m->losses + first, m->maxima + first, m->exp_sums + first};
    {
        CommunicationScope communication(stream, true);
        OP_GROUP("gather_parts", SpanKind::COMMUNICATION, stream);
        comm_group_begin(m->zero->comm);
        comm_all_gather(m->tp, m->parts.losses, own.losses, rows, ncclFloat32, stream);
        comm_all_gather(m->tp, m->parts.maxima, own.maxima, rows, ncclFloat32, stream);
        comm_all_gather(m->tp, m->parts.sums, own.sums, rows, ncclFloat64, stream);
        comm_group_end(m->zero->comm);
    }
    classifier_merge(whole, m->parts, m->config.tp, m->targets + first, rows, stream);
}

/* The logits' columns of a piece of the head, in m->logits (rows,stride), for chunks of chunk_rows of N rows. */
static LogitsPiece head_piece(const Model* m, int piece, int N, int* chunk_rows)
{
    const Config* c = &m->config;
    const int stride = piece_columns(c, piece);
    *chunk_rows = head_chunk_rows(m, N, (size_t)m->head_rows * c->VP / stride);
    const int first = piece_first(c, piece);
    return LogitsPiece{first, real_columns(c, first, stride), stride, piece == 0,
                       c->tp == 1 && piece == c->num_pieces - 1};
}

/* m->logits (rows,VP) of rows first, first + 1, ... -> m->losses, and with `backward` their gradient in their place. */
static void head_classify(Model* m, int first, int rows, float dloss, bool backward)
{
    const Config* c = &m->config;
    const double* loss_scale = &m->zero->state->loss_scale;
    const int* targets = m->targets + first;
    cudaStream_t stream = m->zero->compute;
    if (c->tp == 1)
        return classifier(m->logits, m->losses + first, targets, rows, c->V, c->VP, dloss, loss_scale, backward,
                          stream);
    const LogitsPiece columns = {c->vocab_first, real_columns(c, c->vocab_first, c->VP), c->VP, true, false};
    const ClassifierRows own = own_part(m, rows);
    classifier_piece_forward(m->logits, own.losses, own.maxima, own.sums, targets, rows, columns, stream);
    parts_merge(m, first, rows);
    if (backward)
        classifier_piece_backward(m->logits, m->maxima + first, m->exp_sums + first, targets, rows, columns, dloss,
                                  loss_scale, stream);
}

/* The head on chunks of rows, so that the logits of a batch never exist at once. losses (N); with `backward` also dnorm
 * = gradient of norm_f, of tensor parallelism this rank's part of it, and the head's weight gradient. dloss is the
 * weight of one token in the step's loss, which the loss scale on the device multiplies. */
static void head_loss(Model* m, int N, float dloss, bool backward)
{
    const Config* c = &m->config;
    cudaStream_t stream = m->zero->compute;
    const floatX* norm_f = stream_gather(m, m->norm_f, N);
    for (int first = 0; first < N; first += m->head_rows) {
        const int rows = N - first < m->head_rows ? N - first : m->head_rows;
        const floatX* inp = norm_f + (size_t)first * c->C;
        head_forward(m, inp, rows);
        head_classify(m, first, rows, dloss, backward);
        if (!backward) continue;
        const int unit = c->tied ? unit_embed(c) : unit_lm_head(c, 0), row = c->tied ? WTE : LM_HEAD;
        matmul_backward_input(m->dnorm + (size_t)first * c->C, m->logits, head_weight(m), rows, c->C, c->VP,
                              Layout::OUT_IN, false, stream);
        matmul_backward_weight(model_grad(m, unit, row), nullptr, m->scratch, m->logits, inp, rows, c->C, c->VP,
                               Layout::OUT_IN, first > 0 || model_grad_adds(m, unit, row), stream);
    }
}

/* head_loss where the vocabulary is chunked; `backward` also reduces the gradients of its pieces. */
static void head_loss_chunked(Model* m, int N, float dloss, bool backward, int micro, int num_micro)
{
    const Config* c = &m->config;
    Zero* z = m->zero;
    cudaStream_t stream = z->compute;
    const ClassifierRows parts = c->tp > 1 ? own_part(m, N) : ClassifierRows{m->losses, m->maxima, m->exp_sums};
    const floatX* norm_f = stream_gather(m, m->norm_f, N);
    int C = c->C, num_visits = backward ? 2 * c->num_pieces : c->num_pieces;
    for (int visit = 0; visit < num_visits; visit++) {
        bool up = visit < c->num_pieces;
        int index = up ? visit : num_visits - 1 - visit, unit = unit_lm_head(c, index), chunk_rows;
        LogitsPiece piece = head_piece(m, index, N, &chunk_rows);
        zero_params_begin(z, unit);
        if (!up) zero_gradient_begin(z, unit);
        const floatX* weight = model_param(m, unit, LM_HEAD);
        for (int first = 0; first < N; first += chunk_rows) {
            int rows = N - first < chunk_rows ? N - first : chunk_rows;
            const floatX* inp = norm_f + (size_t)first * C;
            matmul_forward(m->logits, inp, weight, nullptr, rows, C, piece.stride, Layout::OUT_IN, stream);
            if (up) {
                classifier_piece_forward(m->logits, parts.losses + first, parts.maxima + first, parts.sums + first,
                                         m->targets + first, rows, piece, stream);
                continue;
            }
            classifier_piece_backward(m->logits, m->maxima + first, m->exp_sums + first, m->targets + first, rows,
                                      piece, dloss, &z->state->loss_scale, stream);
            matmul_backward_input(m->dnorm + (size_t)first * C, m->logits, weight, rows, C, piece.stride,
                                  Layout::OUT_IN, index < c->num_pieces - 1, stream);
            matmul_backward_weight(model_grad(m, unit, LM_HEAD), nullptr, m->scratch, m->logits, inp, rows, C,
                                   piece.stride, Layout::OUT_IN, first > 0 || model_grad_adds(m, unit, LM_HEAD),
                                   stream);
        }
        if (c->tp > 1 && visit == c->num_pieces - 1) parts_merge(m, 0, N);
        if (!up) zero_gradient_end(z, unit, micro, num_micro);
    }
}

/* m->losses (N), no gradients. */
static void head_losses(Model* m, int N)
{
    if (m->chunks_vocab) head_loss_chunked(m, N, 0, false, 0, 1);
    else head_loss(m, N, 0, false);
}

/* Logits of some rows of the head's input where the vocabulary is chunked -> m->logits (num_rows,VP). */
static void head_rows_forward(Model* m, const floatX* inp, const int* rows, int num_rows)
{
    const Config* c = &m->config;
    for (int piece = 0; piece < c->num_pieces; piece++) {
        int unit = unit_lm_head(c, piece);
        zero_params_begin(m->zero, unit);
        for (int i = 0; i < num_rows; i++)
            matmul_forward(m->logits + (size_t)i * c->VP + (size_t)piece * c->piece_rows, inp + (size_t)rows[i] * c->C,
                           model_param(m, unit, LM_HEAD), nullptr, 1, c->C, piece_columns(c, piece), Layout::OUT_IN,
                           m->zero->compute);
    }
}

/* The logits of all ranks, (rows,vocab_width), from m->logits (rows,VP). */
static const floatX* logits_gather(const Model* m, int rows)
{
    const Config* c = &m->config;
    const size_t VP = c->VP, n = rows * VP;
    if (c->tp == 1) return m->logits;
    comm_all_gather(m->tp, m->logits_parts, m->logits, n, FLOATX_NCCL, m->zero->compute);
    for (int rank = 0; rank < c->tp; rank++)
        columns_copy(m->logits_whole + rank * VP, vocab_width(c), m->logits_parts + rank * n, VP, rows, c->VP,
                     m->zero->compute);
    return m->logits_whole;
}

/* One micro-step: m->tokens, m->targets (B,T) -> gradients added, step sums added. Sends what the stage sends. */
static void model_train_micro(Model* m, int B, int T, float dloss, int micro, int num_micro)
{
    const Config* c = &m->config;
    Zero* z = m->zero;
    cudaStream_t stream = z->compute;
    int N = B * T, head = unit_head(c);
    const size_t own = own_rows(c, N), first = first_own_row(c, N);
    m->micro = micro;
    phase_begin(Phase::FORWARD);
    model_forward(m, B, T);
    phase_begin(Phase::BACKWARD);
    if (micro == 0) zero_backward_begin(z);
    phase_begin(Phase::HEAD);
    if (m->chunks_vocab) head_loss_chunked(m, N, dloss, true, micro, num_micro);
    else head_loss(m, N, dloss, true);
    loss_accumulate(z->step_sums + NUM_TOKS, m->losses + first, m->targets + first, own, stream);
    phase_begin(Phase::BACKWARD);
    rows_clear(m, m->dresidual, own);
    norm_backward(m, head, NORM_F_WEIGHT, m->residual_f, m->norm_f_mean, m->norm_f_rstd, N);
    for (int unit = num_units(c) - 1; unit > head && !m->chunks_vocab; unit--)
        zero_gradient_end(z, unit, micro, num_micro);
    zero_gradient_end(z, head, micro, num_micro);
    for (int layer = c->L - 1; layer >= 0; layer--) {
        int unit = unit_block(c, layer);
        bool recomputes = recomputes_segment(m, layer);
        if (m->offloads && (recomputes || layer == c->L - 1))
            offload_read_begin(&m->inputs, layer / m->segment_layers);
        if (recomputes) segment_forward(m, layer, B, T);
        zero_params_begin(z, unit);
        block_restore(m, layer, B, T);
        zero_gradient_begin(z, unit);
        block_backward(m, layer, B, T);
        zero_gradient_end(z, unit, micro, num_micro);
    }
    drop(m, m->dresidual, m->dresidual, DROPOUT_EMBEDDING, 0, B, T);
    const floatX* dresidual = stream_gather(m, m->dresidual, N);
    for (int piece = c->num_pieces - 1; piece >= 0; piece--) {
        int embed = unit_embed(c, piece);
        zero_gradient_begin(z, embed);
        embedding_backward(model_grad(m, embed, WTE), model_grad(m, embed, WPE), dresidual, m->tokens,
                           spans_positions(&m->spans), B, T, c->C, stream, piece_tokens(c, piece));
        zero_gradient_end(z, embed, micro, num_micro);
    }
    for (int unit = c->num_front_units - 1; unit >= 0; unit--) zero_gradient_end(z, unit, micro, num_micro);
}

/* Adds the losses of m->tokens, m->targets (B,T) to sums[0] (count) and sums[1] (loss), on the device. */
static void model_eval_micro(Model* m, double* sums, int B, int T)
{
    const size_t N = (size_t)B * T, first = first_own_row(&m->config, N);
    model_forward(m, B, T);
    head_losses(m, (int)N);
    loss_accumulate(sums, m->losses + first, m->targets + first, own_rows(&m->config, N), m->zero->compute);
}
