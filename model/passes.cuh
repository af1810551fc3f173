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
    const Attend at = attend_sequences(B, T);
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
    return TokenRange{piece * c->piece_rows, columns, (double)columns / c->VP};
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

/* m->tokens (N) -> out (N,C). positions null: row n is at position n % T. Whole, the pieces are one matrix. */
static void embed_forward(const Model* m, floatX* out, const int* positions, int N, int T)
{
    const Config* c = &m->config;
    if (c->num_fp32_units > 0) zero_params_begin(m->zero, 0);
    for (int piece = 0; piece < c->num_pieces; piece++) {
        int unit = unit_embed(c, piece);
        zero_params_begin(m->zero, unit);
        if (!m->chunks_vocab && piece < c->num_pieces - 1) continue;
        TokenRange range = m->chunks_vocab ? piece_tokens(c, piece) : ALL_TOKENS;
        if (!m->chunks_vocab) unit = unit_embed(c);
        const float* wte = model_param_fp32(m, unit, WTE);
        if (wte != nullptr) embed_rows(m, out, positions, unit, wte, range, N, T);
        else embed_rows<floatX>(m, out, positions, unit, model_param(m, unit, WTE), range, N, T);
    }
}

/* Before the final norm, and before the head where that is whole. */
static void head_begin(Model* m)
{
    const Config* c = &m->config;
    for (int unit = unit_head(c); unit < (m->chunks_vocab ? unit_head(c) + 1 : num_units(c)); unit++)
        zero_params_begin(m->zero, unit);
}

/* The stream above the last block, and its branch -> m->norm_f (N,C). */
static void final_norm(Model* m, const floatX* below, int N)
{
    head_begin(m);
    norm_forward(m, unit_head(&m->config), NORM_F_WEIGHT, m->residual_f, m->norm_f, m->norm_f_mean, m->norm_f_rstd,
                 below, m->branch, N);
}

/* m->tokens (B,T) -> m->norm_f (B*T,C): all but the head. */
static void model_forward(Model* m, int B, int T)
{
    const Config* c = &m->config;
    const Attend at = attend_sequences(B, T);
    for (int layer = 0; layer < c->L; layer++) {
        bool offloads = m->offloads && starts_segment(m, layer);
        if (offloads) offload_write_begin(&m->inputs, layer / m->segment_layers);
        if (layer == 0) {
            floatX* residual = model_block(m, 0).residual;
            embed_forward(m, residual, nullptr, B * T, T);
            drop(m, residual, residual, DROPOUT_EMBEDDING, 0, B, T);
        }
        zero_params_begin(m->zero, unit_block(c, layer));
        const Block a = layer == 0 ? model_block(m, 0) : model_block_above(m, layer);
        block_forward(m, layer, &a, &at, Rows{B * T, B * T});
        if (offloads) offload_write_end(&m->inputs, layer / m->segment_layers);
    }
    final_norm(m, model_block(m, c->L - 1).residual_2, B * T);
}

/* Where the head is whole. */
static const floatX* head_weight(const Model* m)
{
    return m->config.tied ? model_param(m, unit_embed(&m->config), WTE)
                          : model_param(m, unit_lm_head(&m->config, 0), LM_HEAD);
}

/* Logits of `rows` rows of norm_f from row `first` on -> m->logits (rows,VP). */
static void head_forward(Model* m, int first, int rows)
{
    const Config* c = &m->config;
    matmul_forward(m->logits, m->norm_f + (size_t)first * c->C, head_weight(m), nullptr, rows, c->C, c->VP,
                   Layout::OUT_IN, m->zero->compute);
}

/* The head on chunks of rows, so that the logits of a batch never exist at once. losses (N); with `backward` also dnorm
 * = gradient of norm_f, and the head's weight gradient. dloss is the weight of one token in the step's loss,
 * which the loss scale on the device multiplies. */
static void head_loss(Model* m, int N, float dloss, bool backward)
{
    const Config* c = &m->config;
    cudaStream_t stream = m->zero->compute;
    for (int first = 0; first < N; first += m->head_rows) {
        int rows = N - first < m->head_rows ? N - first : m->head_rows;
        head_forward(m, first, rows);
        const double* loss_scale = &m->zero->state->loss_scale;
        classifier(m->logits, m->losses + first, m->targets + first, rows, c->V, c->VP, dloss, loss_scale, backward,
                   stream);
        if (!backward) continue;
        const int unit = c->tied ? unit_embed(c) : unit_lm_head(c, 0), row = c->tied ? WTE : LM_HEAD;
        matmul_backward_input(m->dnorm + (size_t)first * c->C, m->logits, head_weight(m), rows, c->C, c->VP,
                              Layout::OUT_IN, false, stream);
        matmul_backward_weight(model_grad(m, unit, row), nullptr, m->scratch, m->logits,
                               m->norm_f + (size_t)first * c->C, rows, c->C, c->VP, Layout::OUT_IN,
                               first > 0 || model_grad_adds(m, unit, row), stream);
    }
}

/* The logits' columns of a piece of the head, in m->logits (rows,stride), for chunks of chunk_rows of N rows. */
static LogitsPiece head_piece(const Model* m, int piece, int N, int* chunk_rows)
{
    const Config* c = &m->config;
    int first = piece * c->piece_rows, stride = piece_columns(c, piece), left = c->V - first;
    *chunk_rows = head_chunk_rows(m, N, (size_t)m->head_rows * c->VP / stride);
    return LogitsPiece{first, left < stride ? left : stride, stride, piece == 0, piece == c->num_pieces - 1};
}

/* head_loss where the vocabulary is chunked; `backward` also reduces the gradients of its pieces. */
static void head_loss_chunked(Model* m, int N, float dloss, bool backward, int micro, int num_micro)
{
    const Config* c = &m->config;
    Zero* z = m->zero;
    cudaStream_t stream = z->compute;
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
            const floatX* inp = m->norm_f + (size_t)first * C;
            matmul_forward(m->logits, inp, weight, nullptr, rows, C, piece.stride, Layout::OUT_IN, stream);
            if (up) {
                classifier_piece_forward(m->logits, m->losses + first, m->maxima + first, m->exp_sums + first,
                                         m->targets + first, rows, piece, stream);
                continue;
            }
            classifier_piece_backward(m->logits, m->maxima + first, m->exp_sums + first, m->targets + first, rows,
                                      piece, dloss, &z->state->loss_scale, stream);
            matmul_backward_input(m->dnorm + (size_t)first * C, m->logits, weight, rows, C, piece.stride,
                                  Layout::OUT_IN, !piece.last, stream);
            matmul_backward_weight(model_grad(m, unit, LM_HEAD), nullptr, m->scratch, m->logits, inp, rows, C,
                                   piece.stride, Layout::OUT_IN, first > 0 || model_grad_adds(m, unit, LM_HEAD),
                                   stream);
        }
        if (!up) zero_gradient_end(z, unit, micro, num_micro);
    }
}

/* m->losses (N), no gradients. */
static void head_losses(Model* m, int N)
{
    if (m->chunks_vocab) head_loss_chunked(m, N, 0, false, 0, 1);
    else head_loss(m, N, 0, false);
}

/* Logits of some rows of norm_f where the vocabulary is chunked -> m->logits (num_rows,VP). */
static void head_rows_forward(Model* m, const int* rows, int num_rows)
{
    const Config* c = &m->config;
    for (int piece = 0; piece < c->num_pieces; piece++) {
        int unit = unit_lm_head(c, piece);
        zero_params_begin(m->zero, unit);
        for (int i = 0; i < num_rows; i++)
            matmul_forward(m->logits + (size_t)i * c->VP + (size_t)piece * c->piece_rows,
                           m->norm_f + (size_t)rows[i] * c->C, model_param(m, unit, LM_HEAD), nullptr, 1, c->C,
                           piece_columns(c, piece), Layout::OUT_IN, m->zero->compute);
    }
}

static void residual_gradient_clear(Model* m, int N)
{
    const size_t bytes = (size_t)N * m->config.C * sizeof(floatX);
    OP_CALL("cudaMemsetAsync", m->zero->compute, bytes, N, m->config.C);
    CUDA_CHECK(cudaMemsetAsync(m->dresidual, 0, bytes, m->zero->compute));
}

/* One micro-step: m->tokens, m->targets (B,T) -> gradients added, step sums added. Sends what the stage sends. */
static void model_train_micro(Model* m, int B, int T, float dloss, int micro, int num_micro)
{
    const Config* c = &m->config;
    Zero* z = m->zero;
    cudaStream_t stream = z->compute;
    int N = B * T, head = unit_head(c);
    m->micro = micro;
    phase_begin(Phase::FORWARD);
    model_forward(m, B, T);
    phase_begin(Phase::HEAD);
    if (m->chunks_vocab) head_loss_chunked(m, N, dloss, true, micro, num_micro);
    else head_loss(m, N, dloss, true);
    loss_accumulate(z->step_sums + NUM_TOKS, m->losses, m->targets, N, stream);
    phase_begin(Phase::BACKWARD);
    residual_gradient_clear(m, N);
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
    for (int piece = c->num_pieces - 1; piece >= 0; piece--) {
        int embed = unit_embed(c, piece);
        zero_gradient_begin(z, embed);
        embedding_backward(model_grad(m, embed, WTE), model_grad(m, embed, WPE), m->dresidual, m->tokens, B, T, c->C,
                           stream, piece_tokens(c, piece));
        zero_gradient_end(z, embed, micro, num_micro);
    }
    if (c->num_fp32_units > 0) zero_gradient_end(z, 0, micro, num_micro);
}

/* Adds the losses of m->tokens, m->targets (B,T) to sums[0] (count) and sums[1] (loss), on the device. */
static void model_eval_micro(Model* m, double* sums, int B, int T)
{
    model_forward(m, B, T);
    head_losses(m, B * T);
    loss_accumulate(sums, m->losses, m->targets, (size_t)B * T, m->zero->compute);
}
