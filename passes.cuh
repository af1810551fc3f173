/* passes.cuh: forward and backward of the whole model: the units one after another, their parameters when they are
 * needed, their gradients when they are complete. The blocks themselves are in model.cuh.
 *   model_visits       the order in which a micro-step uses the units' parameters
 *   model_forward      tokens -> the input of the head     head_forward, head_loss   the head, in chunks of rows
 *   model_train_micro  tokens, targets -> gradients, sums  model_eval_micro          tokens, targets -> sums */
#pragma once
#include "model.cuh"

/* The top block of each segment is where the backward makes the segment again. At the very top it is still there. */
static bool makes_segment_again(const Model* m, int layer)
{
    if (m->recompute != Recompute::BLOCKS || layer == m->config.L - 1) return false;
    return layer % m->segment_layers == m->segment_layers - 1;
}

/* The order in which a micro-step uses the units' parameters: model_forward, then model_train_micro. */
static void model_visits(Model* m)
{
    const Config* c = &m->config;
    m->visits = (int*)malloc_checked((3 * (size_t)c->L + 2) * sizeof(int));
    int n = 0;
    m->visits[n++] = unit_embed(c);
    for (int layer = 0; layer < c->L; layer++) m->visits[n++] = unit_block(c, layer);
    m->visits[n++] = unit_head(c);
    for (int layer = c->L - 1; layer >= 0; layer--) {
        if (makes_segment_again(m, layer))
            for (int i = layer + 1 - m->segment_layers; i <= layer; i++) m->visits[n++] = unit_block(c, i);
        m->visits[n++] = unit_block(c, layer);
    }
    m->num_visits = n;
}

/* Makes the segment that ends with block `layer` again from its input. */
static void segment_forward(Model* m, int layer, int B, int T)
{
    int first = layer + 1 - m->segment_layers;
    for (int i = first; i <= layer; i++) {
        zero_params_begin(m->zero, unit_block(&m->config, i));
        block_forward(m, i, B, T, i == first);
    }
}

/* m->tokens (B,T) -> m->norm_f (B*T,C): all but the head. */
static void model_forward(Model* m, int B, int T)
{
    const Config* c = &m->config;
    int embed = unit_embed(c);
    zero_params_begin(m->zero, embed);
    embedding_forward(m->residual, m->tokens, model_param(m, embed, WTE), model_param(m, embed, WPE), B, T, c->C,
                      m->zero->compute);
    for (int layer = 0; layer < c->L; layer++) {
        zero_params_begin(m->zero, unit_block(c, layer));
        block_forward(m, layer, B, T, layer == 0);
    }
    zero_params_begin(m->zero, unit_head(c));
    const floatX* last = model_block(m, c->L - 1).residual_2;
    norm_forward(m, unit_head(c), NORM_F_WEIGHT, m->residual_f, m->norm_f, m->norm_f_mean, m->norm_f_rstd, 0, last,
                 m->branch, B * T);
}

static const floatX* head_weight(const Model* m)
{
    return m->config.tied ? model_param(m, unit_embed(&m->config), WTE)
                          : model_param(m, unit_head(&m->config), LM_HEAD);
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
        float* dweight = c->tied ? model_grad(m, unit_embed(c), WTE) : model_grad(m, unit_head(c), LM_HEAD);
        matmul_backward_input(m->dnorm + (size_t)first * c->C, m->logits, head_weight(m), rows, c->C, c->VP,
                              Layout::OUT_IN, false, stream);
        matmul_backward_weight(dweight, nullptr, m->scratch, m->logits, m->norm_f + (size_t)first * c->C, rows, c->C,
                               c->VP, Layout::OUT_IN, stream);
    }
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
    norm_backward(m, head, NORM_F_WEIGHT, m->residual_f, m->norm_f_mean, m->norm_f_rstd, 0, N);
    zero_gradient_end(z, head, micro, num_micro);
    for (int layer = c->L - 1; layer >= 0; layer--) {
        int unit = unit_block(c, layer);
        if (makes_segment_again(m, layer)) segment_forward(m, layer, B, T);
        zero_params_begin(z, unit);
        block_restore(m, layer, B, T);
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
