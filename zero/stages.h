/* stages.h: ZeRO. Which rank keeps what between and within steps, and when it moves.
 *   stage 0  parameters, gradients and optimizer states whole on every rank; gradients all-reduced at the boundary
 *   stage 1  optimizer states sliced; gradients whole, reduce-scattered at the boundary; parameters gathered after
 *   stage 2  gradients sliced too: each unit is reduce-scattered in every micro-step into an fp32 slice. A unit's whole
 *            gradient lives in one of two ring buffers while its backward runs. Resident units (the embeddings and the
 *            head, which the classifier and the lookup both add to) keep theirs whole and are reduced at the boundary.
 *   stage 3  parameters sliced too: a unit's whole parameters live in one of two ring buffers while its forward or
 *            backward runs, and the next one's are gathered meanwhile. What is still in the ring is not gathered again.
 *            Resident units, and those below `persist_below`, keep theirs whole and are gathered after the step. The
 *            model says which units are resident: not those of a large untied vocabulary (model/passes.cuh).
 * Tensors that are kept in fp32 in a 16-bit model are one unit (shard.h), whole on every rank, and its gradient too;
 * what products read of it is a copy that each rank rounds.
 * Rank r updates slice r of every unit (shard.h). The printed norm is summed by slices at every stage, so that it has
 * the same bits at all stages. Rajbhandari et al. 2020, arXiv:1910.02054.
 *
 * Streams: compute does forward, backward and the optimizer; reduce carries gradients; gather carries parameters; d2h
 * what is saved. Edges go through stream_wait. Without overlap all are one. Units are sent in buckets (buckets.h).
 * Nothing here knows a transformer: the model says zero_params_begin(u) before it uses unit u's parameters, and
 * zero_gradient_begin(u), adds its gradients, zero_gradient_end(u). */
#pragma once
#include "kernels/accumulate.cuh"
#include "kernels/global_norm.cuh"
#include "kernels/optimizer.cuh"
#include "buckets.h"
#include "comm.h"
#include "plan.h"
#include "signals.h"

static const size_t BOUNCE_ELEMS = 1 << 20;

/* How what the optimizer works with is kept. */
typedef struct Storage {
    Dtype master;           // FP32; SPLIT: its upper half is the weight; floatX's type: the weight is all there is
    Dtype moments;          // FP32 or BF16
    Dtype grads;            // summed over micro-steps in FP32, or floatX's type
    Dtype sent;             // in which they go to other ranks
} Storage;

/* What lies in pinned host memory: what a kernel uses once reads and writes it over the bus, from where it is;
 * parameters are copied into the ring before they are gathered. The same arithmetic, so the same bits. */
enum Offloaded {
    OFFLOAD_ACTIVATIONS = 1,    // the inputs of segments: the model's (offload.h)
    OFFLOAD_OPTIMIZER = 2,      // master and moments
    OFFLOAD_GRADIENTS = 4,      // stages 2-3: the slices
    OFFLOAD_PARAMETERS = 8,     // stage 3: the slices
    NUM_OFFLOADED = 4
};
static const char* const offloaded_names[NUM_OFFLOADED] = {"activations", "optimizer", "gradients", "parameters"};

typedef struct ZeroConfig {
    int stage;
    const bool* resident;       // (num_units) the gradient is kept whole, and at stage 3 the parameters
    int num_micro_steps;
    bool training;              // else no gradients and moments
    Storage storage;
    unsigned offloaded;         // OFFLOAD_OPTIMIZER, ... of what this stage has
    const OptimizerRow* optimizer;
    bool rounds_fp32;           // products read tensors that are kept in fp32
    bool overlap;
    bool reduces_once;          // stages 2-3: gradients whole, sent at the boundary instead of in each micro-step
    bool deterministic;         // reductions in rank order, whatever NCCL does
    size_t persist_below;       // stage 3: smaller units keep their parameters whole
    const int* visits;          // (num_visits) the units of a micro-step in the order in which the model uses them
    int num_visits;
    size_t reduce_bucket, gather_bucket;   // elements sent together, in whole units
} ZeroConfig;

typedef struct Zero {
    Comm* comm;
    const Shard* shard;
    int stage;
    Storage storage;
    unsigned offloaded;
    bool training, overlap;
    bool reduces_once;          // gradients are kept whole at every stage, as at stage 1
    int num_micro_steps;
    Buckets grad_buckets, param_buckets;
    // parameters
    floatX* params;             // stages 0-2: (P). Stage 3: units that are kept whole, packed
    floatX* param_slices;       // stage 3: this rank's slices of the units in the ring, packed
    floatX* param_ring[RING_SIZE];
    floatX** unit_params;       // (num_units) where unit u's whole parameters are, or will be when it is gathered
    floatX** own_params;        // (num_units) where what this rank updates of unit u is
    bool rounds_fp32;           // products read some of the fp32 unit
    float* fp32_params;         // it, whole
    floatX* fp32_rounded;       // its unit_params; null if no product reads it
    int held[RING_SIZE];        // stage 3: the bucket whose parameters the ring buffer holds; -1: out of date
    const int* visits;          // (num_visits) the units of a micro-step in the order in which the model uses them
    int num_visits, visit;      // the next one
    // gradients
    bool* resident;             // (num_units) the whole gradient stays in fp32 until it is sent
    char* grads;                // (P) stages 0-1; in 16 bits without the resident units
    float** unit_grads;         // (num_units) where unit u's whole gradient is while its backward runs
    Values* whole_grads;        // (num_units) where it is summed over micro-steps, where that is done whole
    float* grad_ring[RING_SIZE];    // stages 2-3; stages 0-1 in 16 bits: one unit's, until it is added to the whole
    float* resident_grads;      // stages 2-3, and in 16 bits: resident units, packed
    char* grad_slices;          // (P/R) stages 2-3
    char* sent;                 // one bucket as it is sent, where that is in another type than it is kept in
    // optimizer
    const OptimizerRow* optimizer;
    char* states[MAX_STATES];   // by slot, null where there is none: (P) stage 0, (P/R) else; see zero_unit_state
    size_t* gapped_first;       // (num_units) where unit u starts in slot GAPPED_STATE, of what this rank updates
    size_t num_fp32_gapped;     // of the fp32 unit
    int* first_of_name;         // (num_tensors) the first tensor of that name: the place in LAMB's sums
    double *lamb_sums, *lamb_scratch;   // (num_tensors,2)
    struct MuonSpace* muon;
    char* master;               // of what this rank updates: fp32, or the lower halves; null without a master
    double* step_sums;          // (NUM_STEP_SUMS) summed over micro-steps, then over ranks
    double* norm_scratch;
    StepState* state;
    StepState* h_state;         // (2) pinned: the host reads the step before, so that no step waits for it
    GradPart* grad_parts;       // (num_tensors) where this rank's part of each reduced gradient is
    int *found, *h_found;       // (2, num_tensors), pinned (num_tensors): which parts had an Inf or NaN, by slot
    unsigned long long* hash;   // (1)
    float* bounce;              // (BOUNCE_ELEMS) pinned: between files and the device
    unsigned short* halves;     // (2, BOUNCE_ELEMS) pinned: the same for what is not kept as floats
    cudaStream_t compute, reduce, gather;
    cudaStream_t d2h;           // states to the host, for a checkpoint (save.h)
    cudaEvent_t states_copied;  // d2h -> compute: they may change again
    cudaEvent_t edge;           // of stream_wait where nothing else remembers the place
    cudaEvent_t grad_ring_free[RING_SIZE];   // reduce -> compute: the ring buffer may be overwritten
    cudaEvent_t* params_ready;  // (param buckets) gather -> compute: the bucket's parameters are whole
} Zero;

/* `to` waits for what `from` has been given so far. The reason is for the reader. */
static void stream_wait(cudaStream_t to, cudaStream_t from, cudaEvent_t event, const char* reason)
{
    (void)reason;
    if (to == from) return;
    CUDA_CHECK(cudaEventRecord(event, from));
    CUDA_CHECK(cudaStreamWaitEvent(to, event, 0));
}

static Place zero_place(const Zero* z, Offloaded part)
{
    return (z->offloaded & part) != 0 ? Place::HOST : Place::DEVICE;
}

static bool zero_slices_states(const Zero* z) { return z->stage >= 1; }
static bool zero_slices_grads(const Zero* z) { return z->stage >= 2 && !z->reduces_once; }

/* What this rank updates of unit u, in the flat space, and where its states are. */
static Range zero_owned(const Zero* z, int u)
{
    return zero_slices_states(z) ? shard_slice(z->shard, u, z->comm->rank) : z->shard->units[u].range;
}
static size_t zero_state_first(const Zero* z, int u)
{
    return zero_slices_states(z) ? shard_packed_first(z->shard, u) : z->shard->units[u].range.first;
}

/* How unit u is kept and sent. */
static Storage unit_storage(const Zero* z, int u)
{
    return unit_is_fp32(z->shard, u) ? Storage{Dtype::FP32, Dtype::FP32, Dtype::FP32, Dtype::FP32} : z->storage;
}

/* Elements of the fp32 unit that this rank updates. */
static size_t num_fp32_states(const Zero* z) { return z->shard->num_fp32_units > 0 ? zero_owned(z, 0).count : 0; }

/* Element `at` of an array over what this rank keeps of all units. The num_fp32 of the fp32 unit come first, as floats;
 * the others are of `dtype`. */
static Values unit_values(const Zero* z, void* base, Dtype dtype, int u, size_t at, size_t num_fp32)
{
    if (unit_is_fp32(z->shard, u)) return values_from(values_of((float*)base), at);
    return values_from(Values{(char*)base + num_fp32 * sizeof(float), dtype, nullptr}, at - num_fp32);
}
static size_t values_bytes(size_t count, Dtype dtype, size_t num_fp32)
{
    return num_fp32 * sizeof(float) + (count - num_fp32) * dtype_bytes(dtype);
}

/* Where this rank keeps element `flat` of what it updates of unit u, which is not kept in fp32. */
static floatX* zero_own_param(const Zero* z, int u, size_t flat)
{
    return z->own_params[u] + (flat - zero_owned(z, u).first);
}

/* In 16 bits the gradients of a unit, which kernels make in fp32, are added to a whole copy when they are complete. */
static bool unit_folds(const Zero* z, int u)
{
    return !zero_slices_grads(z) && z->storage.grads != Dtype::FP32 && !z->resident[u];
}

/* The reduced gradient of a flat range of unit u that this rank holds. */
static Values zero_reduced_grad(const Zero* z, int u, size_t flat)
{
    if (!zero_slices_grads(z)) return values_from(z->whole_grads[u], flat - z->shard->units[u].range.first);
    size_t slice = shard_slice(z->shard, u, z->comm->rank).first;
    return unit_values(z, z->grad_slices, z->storage.grads, u, shard_packed_first(z->shard, u) + (flat - slice),
                       num_fp32_states(z));
}

/* How many of the elements that this rank updates of unit u before `flat` have no state in slot GAPPED_STATE: those of
 * hidden matrices, of which Muon keeps less. What lies between two tensors goes with the second. */
static size_t zero_gap(const Zero* z, int u, size_t flat)
{
    if (z->optimizer->hidden_states > GAPPED_STATE) return 0;
    Range owned = zero_owned(z, u);
    size_t gap = 0, end_before = owned.first;
    const Unit* unit = &z->shard->units[u];
    for (int t = unit->first_tensor; t < unit->first_tensor + unit->num_tensors; t++) {
        Range part = tensor_part(&z->shard->tensors[t], owned);
        if (part.count == 0) continue;
        if (part.first + part.count > flat) break;
        if (z->shard->tensors[t].hidden) gap += part.first + part.count - end_before;
        end_before = part.first + part.count;
    }
    return gap;
}

/* What is kept of each element: the weights, and slot k of the optimizer's states as STATE_FIRST + k. */
enum { STATE_WEIGHTS, STATE_FIRST, NUM_STATES = STATE_FIRST + MAX_STATES };

/* Of tensor t? */
static bool state_is_kept(const Zero* z, int state, const Tensor* t)
{
    const int k = state - STATE_FIRST;
    if (state == STATE_WEIGHTS) return true;
    return z->optimizer->states[k] != nullptr && !(t->hidden && k >= z->optimizer->hidden_states);
}

/* How many elements slot k has of what this rank updates of unit u. */
static size_t zero_state_elems(const Zero* z, int k, int u)
{
    if (z->optimizer->states[k] == nullptr) return 0;
    return zero_owned(z, u).count - (k == GAPPED_STATE ? zero_gap(z, u, SIZE_MAX) : 0);
}

/* Slot k of what this rank updates of unit u. */
static Values zero_unit_state(const Zero* z, int k, int u)
{
    const bool gapped = k == GAPPED_STATE;
    return unit_values(z, z->states[k], z->storage.moments, u, gapped ? z->gapped_first[u] : zero_state_first(z, u),
                       gapped ? z->num_fp32_gapped : num_fp32_states(z));
}

/* Where this rank keeps element `flat` of what it updates of unit u, and how: to the optimizer each is a float. */
static Values zero_state(const Zero* z, int state, int u, size_t flat)
{
    const int k = state - STATE_FIRST;
    size_t at = flat - zero_owned(z, u).first;
    if (state != STATE_WEIGHTS)
        return values_from(zero_unit_state(z, k, u), at - (k == GAPPED_STATE ? zero_gap(z, u, flat) : 0));
    if (unit_is_fp32(z->shard, u)) return values_of(z->fp32_params + (flat - z->shard->units[u].range.first));
    floatX* param = zero_own_param(z, u, flat);
    at += zero_state_first(z, u) - num_fp32_states(z);
    if (z->storage.master == FLOATX_DTYPE) return Values{param, FLOATX_DTYPE, nullptr};
    if (z->storage.master == Dtype::SPLIT) return Values{param, Dtype::SPLIT, (unsigned short*)z->master + at};
    return values_of((float*)z->master + at);
}

/* The compute stream waits for what moves between ranks. */
static void wait_for_ranks(Zero* z, cudaEvent_t event)
{
    Phase before = z->comm->num_ranks > 1 ? phase_begin(Phase::COMMUNICATION) : profile.phase;
    CUDA_CHECK(cudaStreamWaitEvent(z->compute, event, 0));
    phase_begin(before);
}

// ------------------------------------------------------------------------------------------------------ parameters
/* Every rank's slice of unit u to all ranks, on the gather stream. */
static void unit_gather(Zero* z, int u)
{
    size_t n = z->shard->units[u].range.count / z->shard->num_ranks;
    if (unit_is_fp32(z->shard, u)) {
        comm_all_gather(z->comm, z->fp32_params, z->fp32_params + z->comm->rank * n, n, ncclFloat32, z->gather);
        return;
    }
    const floatX* own = z->own_params[u];
    if (unit_in_ring(&z->param_buckets, u) && zero_place(z, OFFLOAD_PARAMETERS) == Place::HOST) {
        floatX* place = z->unit_params[u] + z->comm->rank * n;
        OP_CALL("cudaMemcpyAsync", z->gather, n * sizeof(floatX), n);
        CUDA_CHECK(cudaMemcpyAsync(place, own, n * sizeof(floatX), cudaMemcpyHostToDevice, z->gather));
        own = place;
    }
    comm_all_gather(z->comm, z->unit_params[u], own, n, FLOATX_NCCL, z->gather);
}

/* If bucket b has the fp32 unit: what products read of it. */
static void bucket_round(Zero* z, int b, cudaStream_t stream)
{
    if (z->fp32_rounded != nullptr && z->param_buckets.first_unit[b] == 0)
        weights_round(z->fp32_rounded, z->fp32_params, z->shard->units[0].range.count, stream);
}

static void bucket_gather(Zero* z, int b)
{
    CommunicationScope communication(z->gather, z->comm->num_ranks > 1);
    const Buckets* buckets = &z->param_buckets;
    stream_wait(z->gather, z->compute, z->edge, "the slices are updated, and what was in the ring buffer is used up");
    OP_GROUP("gather_parameters", comm_kind(z->comm), z->gather);
    comm_group_begin(z->comm);
    for (int u = buckets->first_unit[b]; u < buckets->first_unit[b + 1]; u++) unit_gather(z, u);
    comm_group_end(z->comm);
    bucket_round(z, b, z->gather);
    CUDA_CHECK(cudaEventRecord(z->params_ready[b], z->gather));
}

/* Bucket b of the ring, unless the buffer holds it. */
static void ring_gather(Zero* z, int b)
{
    int slot = z->param_buckets.slot[b];
    if (z->held[slot] == b) return;
    z->held[slot] = b;
    bucket_gather(z, b);
}

/* The ring bucket that is used after that of `visit`, if it goes through the other buffer; else -1. */
static int next_ring_bucket(const Zero* z, int visit)
{
    const Buckets* buckets = &z->param_buckets;
    int b = buckets->of_unit[z->visits[visit]];
    for (int i = visit + 1; i < z->num_visits; i++) {
        int next = buckets->of_unit[z->visits[i]];
        if (next != b && bucket_in_ring(buckets, next)) return buckets->slot[next] != buckets->slot[b] ? next : -1;
    }
    return -1;
}

/* Before the compute stream uses the parameters of unit u, the next of the visits: they are whole. What comes after
 * them starts to be gathered. A forward alone leaves out the rest; each micro-step starts with the first visit. */
static void zero_params_begin(Zero* z, int u)
{
    const Buckets* buckets = &z->param_buckets;
    int b = buckets->of_unit[u];
    if (u == z->visits[0]) z->visit = 0;
    assert(z->visits[z->visit] == u);
    if (bucket_in_ring(buckets, b)) ring_gather(z, b);
    wait_for_ranks(z, z->params_ready[b]);   // the bucket has arrived
    int next = next_ring_bucket(z, z->visit++);
    if (bucket_in_ring(buckets, next)) ring_gather(z, next);
}

/* After passes outside of steps: what they leave in the ring is gathered again, so that every step sends the same. */
static void zero_ring_forget(Zero* z)
{
    for (int k = 0; k < RING_SIZE; k++) z->held[k] = -1;
}

/* The slices have changed: whoever keeps whole units gets them anew, the ring is out of date. */
static void zero_params_changed(Zero* z, int b)
{
    if (bucket_in_ring(&z->param_buckets, b)) z->held[z->param_buckets.slot[b]] = -1;
    else if (zero_slices_states(z)) bucket_gather(z, b);
    else bucket_round(z, b, z->compute);
}

/* The same for all of them, after loading. */
static void zero_params_loaded(Zero* z)
{
    for (int b = 0; b < z->param_buckets.num_buckets; b++) zero_params_changed(z, b);
}

/* Before anything but the model reads parameters on the compute stream. */
static void zero_params_settle(Zero* z)
{
    stream_wait(z->compute, z->gather, z->edge, "no gather is still writing");
}

// ------------------------------------------------------------------------------------------------------- gradients
static void gradient_clear(Zero* z, int u)
{
    const size_t n = z->shard->units[u].range.count;
    OP_CALL("cudaMemsetAsync", z->compute, n * sizeof(float), n);
    CUDA_CHECK(cudaMemsetAsync(z->unit_grads[u], 0, n * sizeof(float), z->compute));
}

/* Before the first micro-step of a step: gradients that are summed over micro-steps start at 0. */
static void zero_step_begin(Zero* z)
{
    CUDA_CHECK(cudaMemsetAsync(z->step_sums, 0, NUM_STEP_SUMS * sizeof(double), z->compute));
    for (int u = 0; u < z->shard->num_units; u++)
        if (!unit_in_ring(&z->grad_buckets, u) && !unit_folds(z, u)) gradient_clear(z, u);
}

/* Before the backward of unit u: its buffer is clear, to be added to on the compute stream. */
static float* zero_gradient_begin(Zero* z, int u)
{
    const Buckets* buckets = &z->grad_buckets;
    int b = buckets->of_unit[u];
    if (bucket_in_ring(buckets, b) || unit_folds(z, u)) {
        if (bucket_in_ring(buckets, b) && u == buckets->first_unit[b + 1] - 1)   // the bucket two above has been sent
            wait_for_ranks(z, z->grad_ring_free[buckets->slot[b]]);
        gradient_clear(z, u);
    }
    return z->unit_grads[u];
}

/* Unit u's whole gradient as it is sent: where it is kept, or, of another type, in the bucket's buffer. */
static Values unit_sent(const Zero* z, int u)
{
    Values kept = z->whole_grads[u];
    Dtype sent = unit_storage(z, u).sent;
    if (kept.dtype == sent || z->comm->num_ranks == 1) return kept;
    return values_from(Values{z->sent, sent, nullptr}, unit_ring_offset(&z->grad_buckets, z->shard, u));
}

/* Does NCCL's sum over ranks go where it is kept? Not if it is to be added, is of another type or in host memory. */
static bool sum_goes_home(const Zero* z, Values own, Values sent, bool adds)
{
    return own.dtype == sent.dtype && !adds && zero_place(z, OFFLOAD_GRADIENTS) == Place::DEVICE;
}

/* Starts the sum over ranks of unit u's gradient: this rank's slice of it goes where it is kept, or stays where it was
 * sent from; at stage 0 all of it does. */
static void unit_reduce(Zero* z, int u, bool adds)
{
    size_t count = z->shard->units[u].range.count, n = count / z->shard->num_ranks;
    Values inp = unit_sent(z, u), slice = values_from(inp, z->comm->rank * n);
    Values own = zero_reduced_grad(z, u, shard_slice(z->shard, u, z->comm->rank).first);
    bool sums = z->comm->pieces != nullptr || z->comm->num_ranks == 1;   // and converts and adds on the way
    if (z->stage > 0) {
        if (sums) comm_reduce_scatter(z->comm, own, inp, n, adds, z->reduce);
        else comm_reduce_scatter(z->comm, sum_goes_home(z, own, inp, adds) ? own : slice, inp, n, false, z->reduce);
    } else if (z->comm->pieces != nullptr) {
        comm_reduce_scatter(z->comm, slice, inp, n, false, z->reduce);
        comm_all_gather(z->comm, inp.at, slice.at, n, dtype_nccl(inp.dtype), z->reduce);
    } else {
        comm_all_reduce(z->comm, inp.at, count, dtype_nccl(inp.dtype), z->reduce);
    }
}

/* What unit_reduce has left where it was sent from. */
static void unit_keep_reduced(Zero* z, int u, bool adds)
{
    size_t count = z->shard->units[u].range.count, n = count / z->shard->num_ranks;
    Values inp = unit_sent(z, u);
    if (z->stage == 0) {
        if (inp.at != z->whole_grads[u].at) values_convert(z->whole_grads[u], inp, count, z->reduce);
    } else if (z->comm->pieces == nullptr && z->comm->num_ranks > 1) {
        Values own = zero_reduced_grad(z, u, shard_slice(z->shard, u, z->comm->rank).first);
        if (sum_goes_home(z, own, inp, adds)) return;
        values_sum(own, values_from(inp, z->comm->rank * n), 1, n, adds, z->reduce);
    }
}

/* After the backward of unit u in micro-step `micro` of `num_micro`: sends what this stage sends now. A backward goes
 * down, so a bucket is complete with its lowest unit. */
static void zero_gradient_end(Zero* z, int u, int micro, int num_micro)
{
    const Buckets* buckets = &z->grad_buckets;
    int b = buckets->of_unit[u], end = buckets->first_unit[b + 1];
    bool boundary = micro == num_micro - 1, in_ring = bucket_in_ring(buckets, b), adds = in_ring && micro > 0;
    if (unit_folds(z, u))
        values_sum(z->whole_grads[u], values_of(z->unit_grads[u]), 1, z->shard->units[u].range.count, micro > 0,
                   z->compute);
    if (u != buckets->first_unit[b] || (!boundary && !in_ring)) return;
    stream_wait(z->reduce, z->compute, z->edge, "the bucket's gradient is complete");
    CommunicationScope communication(z->reduce, z->comm->num_ranks > 1);
    OP_GROUP("reduce_gradients", comm_kind(z->comm), z->reduce);
    bool one_by_one = z->comm->pieces != nullptr;   // each is summed before the pieces of the next arrive
    for (int i = u; i < end; i++)
        if (unit_sent(z, i).at != z->whole_grads[i].at)
            values_convert(unit_sent(z, i), z->whole_grads[i], z->shard->units[i].range.count, z->reduce);
    if (!one_by_one) comm_group_begin(z->comm);
    for (int i = u; i < end; i++) unit_reduce(z, i, adds);
    if (!one_by_one) comm_group_end(z->comm);
    for (int i = u; i < end; i++) unit_keep_reduced(z, i, adds);
    if (in_ring) CUDA_CHECK(cudaEventRecord(z->grad_ring_free[buckets->slot[b]], z->reduce));
}

// ------------------------------------------------------------------------------------------------- host and device
/* out (count <= BOUNCE_ELEMS, pinned) = the floats of a state from element `flat` of unit u on. Synchronises. */
static void zero_state_to_host(Zero* z, int state, int u, size_t flat, size_t count, float* out)
{
    Values from = zero_state(z, state, u, flat);
    void* to = from.dtype == Dtype::FP32 ? (void*)out : z->halves;
    size_t size_bytes = count * dtype_bytes(from.dtype);
    CUDA_CHECK(cudaMemcpyAsync(to, from.at, size_bytes, cudaMemcpyDefault, z->compute));
    if (from.low != nullptr)
        CUDA_CHECK(cudaMemcpyAsync(z->halves + BOUNCE_ELEMS, from.low, size_bytes, cudaMemcpyDefault, z->compute));
    CUDA_CHECK(cudaStreamSynchronize(z->compute));
    if (from.dtype == Dtype::FP32) return;
    const Values halves = {z->halves, from.dtype, from.low != nullptr ? z->halves + BOUNCE_ELEMS : nullptr};
    for (size_t i = 0; i < count; i++) out[i] = value_load(halves, i);
}

/* The way back: what is kept in 16 bits is rounded to nearest. `values` (pinned) is overwritten. Synchronises. */
static void zero_state_from_host(Zero* z, int state, int u, size_t flat, size_t count, float* values)
{
    Values to = zero_state(z, state, u, flat);
    void* from = to.dtype == Dtype::FP32 ? (void*)values : z->halves;
    size_t size_bytes = count * dtype_bytes(to.dtype);
    const Values halves = {z->halves, to.dtype, to.low != nullptr ? z->halves + BOUNCE_ELEMS : nullptr};
    for (size_t i = 0; i < (to.dtype == Dtype::FP32 ? 0 : count); i++) value_store(halves, i, values[i]);
    CUDA_CHECK(cudaMemcpyAsync(to.at, from, size_bytes, cudaMemcpyDefault, z->compute));
    if (to.low != nullptr)
        CUDA_CHECK(cudaMemcpyAsync(to.low, halves.low, size_bytes, cudaMemcpyDefault, z->compute));
    floatX* param = unit_is_fp32(z->shard, u) ? (floatX*)to.at : zero_own_param(z, u, flat);
    if (state == STATE_WEIGHTS && (void*)param != to.at) {   // a master, of which the parameter is a rounded copy
        CUDA_CHECK(cudaStreamSynchronize(z->compute));
        floatX* rounded = (floatX*)values;                  // in place: what is written is never ahead of what is read
        for (size_t i = 0; i < count; i++) {
            floatX x;
            store_weight(&x, values[i]);
            memcpy((void*)(rounded + i), &x, sizeof x);
        }
        CUDA_CHECK(cudaMemcpyAsync(param, rounded, count * sizeof(floatX), cudaMemcpyDefault, z->compute));
    }
    CUDA_CHECK(cudaStreamSynchronize(z->compute));
}

// ------------------------------------------------------------------------------------------- what is known about it
/* Before the boundary: has this rank been asked to save, or to end? All ranks learn it from the step's sums. */
static void zero_step_ask(Zero* z, Ask ask)
{
    if (ask == Ask::NONE) return;
    double* sum = z->step_sums + (ask == Ask::END ? ASKED_TO_END : ASKED_TO_SAVE);
    CUDA_CHECK(cudaMemsetAsync(sum, 0x3f, sizeof *sum, z->compute));     // 0x3f3f3f3f3f3f3f3f is a positive number
}

/* The first tensor with an Inf or NaN in its reduced gradient, of the step with this slot, which was skipped for it;
 * -1: none, the loss was not finite. The same on every rank. Synchronises. */
static int zero_first_nonfinite(Zero* z, int slot)
{
    const int n = z->shard->num_tensors;
    CUDA_CHECK(cudaMemcpyAsync(z->h_found, z->found + slot * n, n * sizeof(int), cudaMemcpyDeviceToHost, z->compute));
    CUDA_CHECK(cudaStreamSynchronize(z->compute));
    int first = 0;
    while (first < n && !z->h_found[first]) first++;
    first = -(int)comm_max_host(z->comm, -first);
    return first < n ? first : -1;
}
