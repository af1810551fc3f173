/* update.h: the end of a step, from reduced gradients to new parameters: norm, decision, optimizer, gather.
 * Most optimizers are one launch per unit over what this rank owns of it. Two need whole tensors before:
 *   LAMB  the norms of every tensor: sums over slices, all-reduced, so that they have the same bits at all stages
 *   Muon  whole hidden matrices. At stages 1 to 3 one rank orthogonalizes each: it receives the other ranks' slices of
 *         the gradient and sends back the result. R matrices at a time, one per rank, the largest first. A rank sends
 *         and receives each of its elements once; an all-gather would send R - 1 times as much and do all the
 *         arithmetic on every rank. At stage 0 every rank has the whole gradients and computes all matrices: it sends
 *         nothing, but shares no work. */
#pragma once
#include "kernels/lamb.cuh"
#include "kernels/muon.cuh"
#include "stages.h"

enum { HOST_UPDATE_BLOCKS = 16 };

// ------------------------------------------------------------------------------------------------------------ units
/* What one launch updates: `range` of unit u from element `first`, at most OPTIMIZER_MAX_RUNS tensors. */
static Range unit_chunk(const Zero* z, int u, Range range, size_t first)
{
    size_t end = range.first + range.count;
    const Unit* unit = &z->shard->units[u];
    for (int t = unit->first_tensor, count = 0; t < unit->first_tensor + unit->num_tensors; t++) {
        Range part = tensor_part(&z->shard->tensors[t], Range{first, end - first});
        if (part.count > 0 && count++ == OPTIMIZER_MAX_RUNS) return Range{first, part.first - first};
    }
    return Range{first, end - first};
}

/* The tensors in `range` of unit u, each with its rates (OptimizerRuns). Padding between tensors is updated too: its
 * gradient is 0, so it stays 0. With Muon either the hidden matrices (`hidden_ones`) or the rest. Tensors stored in
 * fp32 need no stochastic rounding. */
static OptimizerRuns unit_runs(const Zero* z, int u, Range range, bool hidden_ones)
{
    OptimizerRuns runs = {};
    const Unit* unit = &z->shard->units[u];
    const bool norms = z->optimizer->phase == TensorPhase::NORMS;
    const bool matrices = z->optimizer->phase == TensorPhase::MATRICES;
    for (int t = unit->first_tensor; t < unit->first_tensor + unit->num_tensors; t++) {
        const Tensor* tensor = &z->shard->tensors[t];
        Range part = tensor_part(tensor, range);
        if (part.count > 0)
            runs_extend(&runs, part.first + part.count - range.first, tensor->weight_decay, tensor->lr_factor,
                        norms ? tensor->whole : -1, matrices && tensor->hidden != hidden_ones,
                        zero_gap(z, u, part.first),
                        tensor->fp32 ? rectangle_in_line(0) : tensor_logical(tensor, range.first));
    }
    return runs;
}

/* Blocks of unit u's update. Over PCIe a few are enough, with 256 KiB under way at a time and less than 2 us until they
 * come; the multiprocessors are left to the forward beside it. */
static size_t update_blocks(const Zero* z, int u)
{
    return unit_states_place(z, u) == Place::HOST ? HOST_UPDATE_BLOCKS : INT_MAX;
}

/* Applies pass R to what this rank owns of unit u, mostly in one launch. */
template <class R> static void unit_update(Zero* z, int u, OptimizerConfig config, bool hidden_ones = false)
{
    Range owned = zero_owned(z, u), chunk;
    for (size_t first = owned.first; first < owned.first + owned.count; first += chunk.count) {
        chunk = unit_chunk(z, u, owned, first);
        OptimizerRuns runs = unit_runs(z, u, chunk, hidden_ones);
        floatX* param = unit_is_fp32(z->shard, u) ? nullptr : zero_own_param(z, u, first);
        OptimizerArrays arrays = {param, zero_state(z, STATE_WEIGHTS, u, first), zero_reduced_grad(z, u, first), {}};
        for (int k = 0; k < MAX_STATES; k++)
            if (zero_has_state(z, k))
                arrays.states[k] = values_from(zero_unit_state(z, k, u), first - owned.first);
        optimizer_update<R>(arrays, &runs, config, z->lamb_sums, z->state, z->update,
                            update_blocks(z, u));
    }
}

// ------------------------------------------------------------------------------------------------------------- LAMB
static void lamb_sums_clear(Zero* z)
{
    const size_t n = 2 * (size_t)z->shard->num_tensors;
    OP_CALL("cudaMemsetAsync", z->update, n * sizeof(double), n);
    CUDA_CHECK(cudaMemsetAsync(z->lamb_sums, 0, n * sizeof(double), z->update));
}

template <class R> static void lamb_begin(Zero* z, OptimizerConfig config)
{
    const Shard* s = z->shard;
    lamb_sums_clear(z);
    for (int u = 0; u < s->num_units; u++) {
        unit_update<typename R::First>(z, u, config);
        Range slice = unit_slice(z, u), chunk;
        for (size_t first = slice.first; first < slice.first + slice.count; first += chunk.count) {
            chunk = unit_chunk(z, u, slice, first);
            OptimizerRuns runs = unit_runs(z, u, chunk, false);
            lamb_norms(z->lamb_sums, z->lamb_scratch, zero_state(z, STATE_WEIGHTS, u, first),
                       zero_state(z, STATE_FIRST, u, first), zero_state(z, STATE_FIRST + 1, u, first), &runs,
                       config.eps, z->update);
        }
    }
    comm_all_reduce(z->all, z->lamb_sums, 2 * (size_t)s->num_tensors, ncclFloat64, z->update);
}

// ------------------------------------------------------------------------------------------------------------- Muon
typedef struct MuonSpace {
    Group* group;            // of their units: hidden matrices all have one
    int* tensors;            // the hidden matrices, the largest first
    int num_tensors;
    float* whole;            // stages 1-3: the matrix that this rank works on
    floatX* x[2];            // iterates of one matrix; q, k and v one at a time
    floatX* gram[2];
    double* parts;
} MuonSpace;

static void plan_muon(Zero* z, Plan* plan)
{
    const Shard* s = z->shard;
    MuonSpace* m = z->muon = (MuonSpace*)malloc_checked(sizeof(MuonSpace));
    *m = MuonSpace{};
    m->group = z->all;
    m->tensors = (int*)malloc_checked(s->num_tensors * sizeof(int));
    size_t whole = 0, matrix = 0, gram = 0;
    for (int t = 0; t < s->num_tensors; t++) {
        const Tensor* tensor = &s->tensors[t];
        if (!tensor->hidden) continue;
        if (m->num_tensors == 0) m->group = unit_group(z, tensor->unit);
        assert(m->group == unit_group(z, tensor->unit));
        int idx = m->num_tensors++;
        for (; idx > 0 && tensor_elems(&s->tensors[m->tensors[idx - 1]]) < tensor_elems(tensor); idx--)
            m->tensors[idx] = m->tensors[idx - 1];
        m->tensors[idx] = t;
        size_t elems = tensor_elems(tensor), cols = tensor->shape[1] / tensor->num_fused;
        size_t side = tensor->shape[0] < cols ? tensor->shape[0] : cols;
        if (elems > whole) whole = elems;
        if (elems / tensor->num_fused > matrix) matrix = elems / tensor->num_fused;
        if (side * side > gram) gram = side * side;
    }
    if (z->stage > 0 && m->group->num_ranks > 1) plan_add(plan, "Muon's matrices", Place::DEVICE, &m->whole, whole);
    for (floatX** x : {&m->x[0], &m->x[1]}) plan_add(plan, "Muon's matrices", Place::DEVICE, x, matrix);
    for (floatX** x : {&m->gram[0], &m->gram[1]}) plan_add(plan, "Muon's matrices", Place::DEVICE, x, gram);
    plan_add(plan, "Muon's matrices", Place::DEVICE, &m->parts, (size_t)MUON_PARTS);
}

/* What `rank` of the group owns of tensor t, and the rank that works on the idx-th matrix. */
static Range muon_part(const Zero* z, const Tensor* t, int rank)
{
    return tensor_part(t, shard_slice(z->shard, t->unit, rank));
}
static int muon_rank(const Zero* z, int idx) { return idx % z->muon->group->num_ranks; }

/* With Muon gradients are stored in fp32: see storage_from_flags. */
static float* muon_grad(const Zero* z, const Tensor* t, size_t flat)
{
    return (float*)zero_reduced_grad(z, t->unit, flat).at;
}

/* Orthogonalizes a tensor's matrix, or its q, k and v one after another. */
static void muon_tensor(Zero* z, const Tensor* t, float* values)
{
    MuonSpace* m = z->muon;
    int rows = (int)t->shape[0], cols = (int)(t->shape[1] / t->num_fused);
    double fan_out = t->in_out ? cols : rows, fan_in = t->in_out ? rows : cols;
    for (int k = 0; k < t->num_fused; k++)
        muon_orthogonalise(values + (size_t)k * cols, m->x, m->gram, m->parts, rows, cols, t->shape[1],
                           (float)sqrt(fmax(1.0, fan_out / fan_in)), z->update);
}

/* Sends the slices of matrix idx to the rank that works on it, or back. */
static void muon_move(Zero* z, int idx, bool back)
{
    MuonSpace* m = z->muon;
    const Tensor* t = &z->shard->tensors[m->tensors[idx]];
    int owner = muon_rank(z, idx), rank = m->group->rank;
    for (int i = 0; i < m->group->num_ranks; i++) {
        Range part = muon_part(z, t, i);
        if (part.count == 0 || i == owner || (rank != owner && rank != i)) continue;
        bool receives = (rank == owner) != back;
        float* data = rank == owner ? m->whole + (part.first - t->first) : muon_grad(z, t, part.first);
        if (receives) comm_receive(m->group, data, part.count, rank == owner ? i : owner, z->update);
        else comm_send(m->group, data, part.count, rank == owner ? i : owner, z->update);
    }
    Range own = muon_part(z, t, rank);
    if (rank != owner || own.count == 0) return;
    float *whole = m->whole + (own.first - t->first), *grad = muon_grad(z, t, own.first);
    CUDA_CHECK(cudaMemcpyAsync(back ? grad : whole, back ? whole : grad, own.count * sizeof(float),
                               cudaMemcpyDeviceToDevice, z->update));
}

/* The same for the matrices of a round, [first, end). */
static void muon_move_round(Zero* z, int first, int end, bool back)
{
    CommunicationScope communication(z->update, true);
    OP_GROUP("move_matrices", SpanKind::COMMUNICATION, z->update);
    comm_group_begin(z->comm);
    for (int idx = first; idx < end; idx++) muon_move(z, idx, back);
    comm_group_end(z->comm);
}

/* Replaces the gradients of hidden matrices by the directions of their steps. */
template <class R> static void muon_begin(Zero* z, OptimizerConfig config)
{
    MuonSpace* m = z->muon;
    for (int u = 0; u < z->shard->num_units; u++) unit_update<typename R::First>(z, u, config, true);
    const int num_ranks = m->group->num_ranks;
    if (z->stage == 0 || num_ranks == 1) {
        for (int i = 0; i < m->num_tensors; i++) {
            const Tensor* t = &z->shard->tensors[m->tensors[i]];
            muon_tensor(z, t, muon_grad(z, t, t->first));
        }
        return;
    }
    for (int first = 0; first < m->num_tensors; first += num_ranks) {
        int end = first + num_ranks < m->num_tensors ? first + num_ranks : m->num_tensors;
        int mine = first + m->group->rank;
        for (bool back : {false, true}) {
            muon_move_round(z, first, end, back);
            if (!back && mine < end) muon_tensor(z, &z->shard->tensors[m->tensors[mine]], m->whole);
        }
    }
}

// -------------------------------------------------------------------------------------------------------- the phase
static void plan_phase(Zero* z, Plan* plan)
{
    switch (z->optimizer->phase) {
    case TensorPhase::NONE: break;
    case TensorPhase::NORMS:
        plan_add(plan, "LAMB's norms", Place::DEVICE, &z->lamb_sums, 2 * (size_t)z->shard->num_tensors);
        plan_add(plan, "LAMB's norms", Place::DEVICE, &z->lamb_scratch, lamb_scratch_elems());
        break;
    case TensorPhase::MATRICES: plan_muon(z, plan); break;
    }
}

/* Bytes that this rank sends for the optimizer's phase in a step. */
static size_t phase_sent_bytes(const Zero* z)
{
    const Shard* s = z->shard;
    const TensorPhase phase = z->optimizer->phase;
    if (!z->training) return 0;
    if (phase == TensorPhase::NORMS)
        return comm_all_reduce_bytes(z->all, 2 * (size_t)s->num_tensors, sizeof(double));
    if (phase != TensorPhase::MATRICES || z->stage == 0) return 0;
    size_t elems = 0;
    for (int i = 0; i < z->muon->num_tensors; i++) {
        const Tensor* t = &s->tensors[z->muon->tensors[i]];
        const int rank = z->muon->group->rank;
        size_t own = muon_part(z, t, rank).count;
        elems += muon_rank(z, i) == rank ? tensor_elems(t) - own : own;
    }
    return elems * sizeof(float);
}

// --------------------------------------------------------------------------------------------------------- the step
/* Applies optimizer R to what this rank owns, in the order of the forward. A bucket is gathered while the next is
 * updated. */
template <class R> static void params_update(Zero* z, OptimizerConfig config)
{
    constexpr bool matrices = R::PHASE == TensorPhase::MATRICES;
    if constexpr (R::PHASE == TensorPhase::NORMS) lamb_begin<R>(z, config);
    if constexpr (matrices) muon_begin<R>(z, config);
    const Buckets* buckets = &z->param_buckets;
    for (int b = 0; b < buckets->num_buckets; b++) {
        for (int u = buckets->first_unit[b]; u < buckets->first_unit[b + 1]; u++) {
            if constexpr (matrices) unit_update<typename R::Rest>(z, u, config, false);
            unit_update<R>(z, u, config, matrices);
        }
        zero_params_changed(z, b);
    }
}

/* The boundary, in this order: wait for the last reduction, overflow check, norm, clip; then, beside what the compute
 * stream does next, update of what this rank owns, gather. The host reads the step's result from h_state[slot], slot 0
 * or 1. */
static void zero_step_end(Zero* z, StepConfig config, OptimizerConfig optimizer, int slot)
{
    const Shard* shard = z->shard;
    if (z->comm->num_ranks > 1) phase_begin(Phase::COMMUNICATION);
    stream_wait(z->compute, z->reduce, z->edge, "every gradient has arrived");
    phase_begin(Phase::OPTIMIZER);
    for (int u = 0; u < shard->num_units; u++) {
        Range slice = unit_slice(z, u);
        global_norm_accumulate(z->step_sums, z->norm_scratch, zero_reduced_grad(z, u, slice.first), slice.count,
                               z->compute);
    }
    comm_all_reduce(z->all, z->step_sums, NUM_STEP_SUMS, ncclFloat64, z->compute);
    step_state_update(z->state, z->step_sums, config, z->compute);
    nonfinite_find(z->found + slot * shard->num_tensors, z->grad_parts, shard->num_tensors, z->state, z->compute);
    CUDA_CHECK(cudaMemcpyAsync(&z->h_state[slot], z->state, sizeof(StepState), cudaMemcpyDeviceToHost, z->compute));
    stream_wait(z->update, z->compute, z->edge, "the step is decided");
    CUDA_CHECK(cudaStreamWaitEvent(z->update, z->states_copied, 0));   // the save has copied its states to the host
    switch (z->optimizer->optimizer) {
#define OPTIMIZER_STEP(name, word, R) case Optimizer::name: params_update<R>(z, optimizer); break;
    OPTIMIZERS(OPTIMIZER_STEP)
#undef OPTIMIZER_STEP
    }
}
