/* stages.h: ZeRO. Which rank keeps what between and within steps, and when it moves.
 *   stage 0  parameters, gradients and optimizer states whole on every rank; gradients all-reduced at the boundary
 *   stage 1  optimizer states sliced; gradients whole, reduce-scattered at the boundary; parameters gathered after the
 * step stage 2  gradients sliced too: each unit is reduce-scattered in every micro-step into an fp32 slice. A unit's
 * whole gradient lives in one of two ring buffers while its backward runs. Resident units (the embeddings and the head,
 * which the classifier and the lookup both add to) keep theirs whole and are reduced at the boundary. Rank r updates
 * slice r of every unit (shard.h). The printed norm is summed by slices at every stage, so that it has the same bits at
 * stages 0, 1 and 2. Rajbhandari et al. 2020, arXiv:1910.02054.
 *
 * Streams: compute does forward, backward and the optimizer; reduce carries gradients. Edges go through stream_wait.
 * Nothing here knows a transformer: the model says zero_gradient_begin(u), adds its gradients, zero_gradient_end(u). */
#pragma once
#include "../kernels/accumulate.cuh"
#include "../kernels/global_norm.cuh"
#include "../kernels/optimizer.cuh"
#include "comm.h"
#include "plan.h"
#include "shard.h"

typedef struct { float beta1, beta2, eps, weight_decay; } AdamwConfig;

static const size_t BOUNCE_ELEMS = 1 << 20;

typedef struct Zero {
    Comm* comm;
    const Shard* shard;
    int stage;
    const bool* resident;       // (num_units) stage 2 keeps the whole gradient of these
    floatX* params;             // (P) whole at stages 0-2
    float* grads;               // (P) stages 0-1
    float** unit_grads;         // (num_units) where unit u's whole gradient is while its backward runs
    float* ring[2];             // stage 2: largest unit that is not resident
    float* resident_grads;      // stage 2: resident units, packed
    float* grad_slices;         // (P/R) stage 2
    float* reduced;             // stage 2 with several micro-steps: one slice as it arrives
    float *moment1, *moment2;   // (P) stage 0, (P/R) else
    float* master;              // fp32 copy of what this rank updates; null when floatX is float
    double* step_sums;          // (NUM_STEP_SUMS) summed over micro-steps, then over ranks
    double* norm_scratch;
    StepState* state;
    StepState* h_state;         // (2) pinned: the host reads the step before, so that no step waits for it
    unsigned long long* hash;   // (1)
    float* bounce;              // (BOUNCE_ELEMS) pinned: between files and the device
    cudaStream_t compute, reduce;
    cudaEvent_t unit_ready;     // compute -> reduce: the unit's gradient is complete
    cudaEvent_t ring_free[2];   // reduce -> compute: the ring buffer may be overwritten
    cudaEvent_t reduced_all;    // reduce -> compute: every gradient has arrived
} Zero;

/* `to` waits for what `from` has been given so far. The reason is for the reader. */
static void stream_wait(cudaStream_t to, cudaStream_t from, cudaEvent_t event, const char* reason)
{
    (void)reason;
    CUDA_CHECK(cudaEventRecord(event, from));
    CUDA_CHECK(cudaStreamWaitEvent(to, event, 0));
}

static bool zero_slices_states(const Zero* z) { return z->stage >= 1; }

/* What this rank updates of unit u, in the flat space, and where its states are. */
static Range zero_owned(const Zero* z, int u)
{
    return zero_slices_states(z) ? shard_slice(z->shard, u, z->comm->rank) : z->shard->units[u].range;
}
static size_t zero_state_first(const Zero* z, int u)
{
    return zero_slices_states(z) ? shard_packed_first(z->shard, u) : z->shard->units[u].range.first;
}

/* The reduced gradient of a flat range of unit u that this rank holds. */
static float* zero_reduced_grad(const Zero* z, int u, size_t flat)
{
    if (z->stage < 2) return z->grads + flat;
    return z->grad_slices + shard_packed_first(z->shard, u) + (flat - shard_slice(z->shard, u, z->comm->rank).first);
}

/* Adds every buffer of this stage to the plan; pointers are valid after plan_allocate and zero_start. */
static void zero_plan(Zero* z, Plan* plan, const Shard* shard, Comm* comm, int stage, const bool* resident,
                      int num_micro_steps)
{
    *z = Zero{};
    z->comm = comm;
    z->shard = shard;
    z->stage = stage;
    z->resident = resident;
    size_t whole = shard->num_elems, slice = whole / shard->num_ranks, state = stage >= 1 ? slice : whole;
    plan_add(plan, "parameters", Place::DEVICE, &z->params, whole);
    if (stage < 2) {
        plan_add(plan, "gradients", Place::DEVICE, &z->grads, whole);
    } else {
        size_t largest = shard_largest_unit(shard, resident), packed = 0, largest_slice = 0;
        for (int u = 0; u < shard->num_units; u++) {
            if (resident[u]) packed += shard->units[u].range.count;
            size_t count = shard->units[u].range.count / shard->num_ranks;
            if (count > largest_slice) largest_slice = count;
        }
        plan_add(plan, "gradients, ring of two units", Place::DEVICE, &z->ring[0], largest);
        plan_add(plan, "gradients, ring of two units", Place::DEVICE, &z->ring[1], largest);
        plan_add(plan, "gradients, embeddings and head", Place::DEVICE, &z->resident_grads, packed);
        plan_add(plan, "gradients, slice", Place::DEVICE, &z->grad_slices, slice);
        if (num_micro_steps > 1) plan_add(plan, "gradients, arriving", Place::DEVICE, &z->reduced, largest_slice);
    }
    plan_add(plan, "optimizer states", Place::DEVICE, &z->moment1, state);
    plan_add(plan, "optimizer states", Place::DEVICE, &z->moment2, state);
    if (sizeof(floatX) < 4) plan_add(plan, "master weights", Place::DEVICE, &z->master, state);
    plan_add(plan, "step sums and scratch", Place::DEVICE, &z->step_sums, NUM_STEP_SUMS);
    plan_add(plan, "step sums and scratch", Place::DEVICE, &z->norm_scratch, global_norm_scratch_elems());
    plan_add(plan, "step sums and scratch", Place::DEVICE, &z->state, 1);
    plan_add(plan, "step sums and scratch", Place::DEVICE, &z->hash, 1);
    plan_add(plan, "step results", Place::HOST, &z->h_state, 2);
    plan_add(plan, "between files and device", Place::HOST, &z->bounce, BOUNCE_ELEMS);
}

/* After plan_allocate: streams, events, the table of unit gradients. */
static void zero_start(Zero* z)
{
    CUDA_CHECK(cudaStreamCreateWithFlags(&z->compute, cudaStreamNonBlocking));
    CUDA_CHECK(cudaStreamCreateWithFlags(&z->reduce, cudaStreamNonBlocking));
    for (cudaEvent_t* event : {&z->unit_ready, &z->ring_free[0], &z->ring_free[1], &z->reduced_all})
        CUDA_CHECK(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    for (int k = 0; k < 2; k++) CUDA_CHECK(cudaEventRecord(z->ring_free[k], z->reduce));
    int num_units = z->shard->num_units;
    z->unit_grads = (float**)malloc_checked(num_units * sizeof(float*));
    float* resident = z->resident_grads;
    for (int u = 0; u < num_units; u++) {
        Range range = z->shard->units[u].range;
        if (z->stage < 2) z->unit_grads[u] = z->grads + range.first;
        else if (!z->resident[u]) z->unit_grads[u] = z->ring[u % 2];
        else { z->unit_grads[u] = resident; resident += range.count; }
    }
}

static void zero_free(Zero* z)
{
    for (cudaEvent_t event : {z->unit_ready, z->ring_free[0], z->ring_free[1], z->reduced_all})
        CUDA_CHECK(cudaEventDestroy(event));
    CUDA_CHECK(cudaStreamDestroy(z->compute));
    CUDA_CHECK(cudaStreamDestroy(z->reduce));
    free(z->unit_grads);
}

static bool zero_in_ring(const Zero* z, int u) { return z->stage == 2 && !z->resident[u]; }

/* Before the first micro-step of a step: gradients that are summed over micro-steps start at 0. */
static void zero_step_begin(Zero* z)
{
    CUDA_CHECK(cudaMemsetAsync(z->step_sums, 0, NUM_STEP_SUMS * sizeof(double), z->compute));
    for (int u = 0; u < z->shard->num_units; u++)
        if (!zero_in_ring(z, u))
            CUDA_CHECK(
                cudaMemsetAsync(z->unit_grads[u], 0, z->shard->units[u].range.count * sizeof(float), z->compute));
}

/* Before the backward of unit u: its buffer is clear, to be added to on the compute stream. */
static float* zero_gradient_begin(Zero* z, int u)
{
    if (zero_in_ring(z, u)) {
        CUDA_CHECK(cudaStreamWaitEvent(z->compute, z->ring_free[u % 2], 0));   // the unit two above has been sent
        CUDA_CHECK(cudaMemsetAsync(z->unit_grads[u], 0, z->shard->units[u].range.count * sizeof(float), z->compute));
    }
    return z->unit_grads[u];
}

/* After the backward of unit u in micro-step `micro` of `num_micro`: sends what this stage sends now. */
static void zero_gradient_end(Zero* z, int u, int micro, int num_micro)
{
    bool boundary = micro == num_micro - 1;
    if (!boundary && !zero_in_ring(z, u)) return;
    stream_wait(z->reduce, z->compute, z->unit_ready, "the unit's gradient is complete");
    Range range = z->shard->units[u].range, slice = shard_slice(z->shard, u, z->comm->rank);
    float* whole = z->unit_grads[u];
    if (z->stage == 0) {
        comm_all_reduce(z->comm, whole, range.count, ncclFloat32, z->reduce);
    } else if (z->stage == 1) {
        comm_reduce_scatter(z->comm, whole + (slice.first - range.first), whole, slice.count, ncclFloat32, z->reduce);
    } else {
        float* own = zero_reduced_grad(z, u, slice.first);
        bool adds = zero_in_ring(z, u) && micro > 0;
        comm_reduce_scatter(z->comm, adds ? z->reduced : own, whole, slice.count, ncclFloat32, z->reduce);
        if (adds) accumulate(own, z->reduced, slice.count, z->reduce);
        if (zero_in_ring(z, u)) CUDA_CHECK(cudaEventRecord(z->ring_free[u % 2], z->reduce));
    }
}

/* The boundary: norm, clip, optimizer on what this rank owns, parameters gathered. Order of SEMANTICS: reduce, overflow
 * check, norm, clip, update, gather. `slot` (0 or 1) takes the step's result for the host. */
static void zero_step_end(Zero* z, StepConfig config, AdamwConfig adamw, int slot)
{
    const Shard* shard = z->shard;
    stream_wait(z->compute, z->reduce, z->reduced_all, "every gradient has arrived");
    for (int u = 0; u < shard->num_units; u++) {
        Range slice = shard_slice(shard, u, z->comm->rank);
        global_norm_accumulate(z->step_sums, z->norm_scratch, zero_reduced_grad(z, u, slice.first), slice.count,
                               z->compute);
    }
    comm_all_reduce(z->comm, z->step_sums, NUM_STEP_SUMS, ncclFloat64, z->compute);
    step_state_update(z->state, z->step_sums, config, z->compute);
    CUDA_CHECK(cudaMemcpyAsync(&z->h_state[slot], z->state, sizeof(StepState), cudaMemcpyDeviceToHost, z->compute));
    for (int u = 0; u < shard->num_units; u++) {
        Range owned = zero_owned(z, u);
        const Unit* unit = &shard->units[u];
        for (int t = unit->first_tensor; t < unit->first_tensor + unit->num_tensors; t++) {
            Range part = tensor_part(&shard->tensors[t], owned);
            if (part.count == 0) continue;
            size_t at = zero_state_first(z, u) + (part.first - owned.first);
            adamw_update(z->params + part.first, z->master ? z->master + at : nullptr, z->moment1 + at, z->moment2 + at,
                         zero_reduced_grad(z, u, part.first), part.count,
                         shard->tensors[t].decay ? adamw.weight_decay : 0.0f, adamw.beta1, adamw.beta2, adamw.eps,
                         z->state, z->compute);
        }
        if (zero_slices_states(z))
            comm_all_gather(z->comm, z->params + unit->range.first, owned.count, FLOATX_NCCL, z->compute);
    }
}

/* Sum over all elements of parameters (master where there is one) and moments, by tensor, the same for every R, stage
 * and layout if the values are. Synchronises. */
static unsigned long long zero_state_hash(Zero* z)
{
    const Shard* shard = z->shard;
    CUDA_CHECK(cudaMemsetAsync(z->hash, 0, sizeof *z->hash, z->compute));
    for (int u = 0; u < shard->num_units; u++) {
        Range slice = shard_slice(shard, u, z->comm->rank), owned = zero_owned(z, u);
        for (int t = shard->units[u].first_tensor; t < shard->units[u].first_tensor + shard->units[u].num_tensors;
             t++) {
            Range part = tensor_part(&shard->tensors[t], slice);
            if (part.count == 0) continue;
            size_t at = zero_state_first(z, u) + (part.first - owned.first);
            size_t logical = shard->tensors[t].logical_first + (part.first - shard->tensors[t].first);
            const float* values[] = {z->master ? z->master + at : (const float*)(z->params + part.first),
                                     z->moment1 + at, z->moment2 + at};
            for (int k = 0; k < 3; k++)
                state_hash_accumulate(z->hash, values[k], part.count, k * shard->num_params + logical, z->compute);
        }
    }
    comm_all_reduce(z->comm, z->hash, 1, ncclUint64, z->compute);
    unsigned long long h_hash;
    CUDA_CHECK(cudaMemcpyAsync(&h_hash, z->hash, sizeof h_hash, cudaMemcpyDeviceToHost, z->compute));
    CUDA_CHECK(cudaStreamSynchronize(z->compute));
    return h_hash;
}
