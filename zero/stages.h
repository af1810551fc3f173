/* stages.h: ZeRO. Which rank stores what between and within steps, and when it is sent.
 *   stage 0  parameters, gradients and optimizer states whole on every rank; gradients all-reduced at the boundary
 *   stage 1  optimizer states sliced; gradients whole, reduce-scattered at the boundary; parameters gathered after it
 *   stage 2  gradients sliced too: each unit is reduce-scattered in every micro-step into an fp32 slice. A unit's whole
 *            gradient is in one buffer of a double buffer while its backward runs. Persistent units (the embeddings and
 *            the head, to both of which lookup and classifier add) have whole gradients, reduced at the boundary.
 *   stage 3  parameters sliced too: a unit's whole parameters are in one buffer of a double buffer while its forward or
 *            backward runs, and those of the next unit are gathered meanwhile (prefetch). A unit that a buffer still
 *            has (cached) is not gathered again. Persistent units, and those smaller than `persist_below`, have whole
 *            parameters, gathered after the step. The model defines which units are persistent: not those of a large
 *            untied vocabulary (model/passes.cuh).
 * Tensors stored in fp32 in a 16-bit model are units of their own (shard.h). Every rank of the group has them and their
 * gradients whole, and rounds a copy for the GEMMs that read them.
 * Each unit has a group of ranks, which sum its gradient, store its slices and gather its parameters; rank r of the
 * group updates slice r (shard.h). The norm is summed by slices over all ranks: every element has one owner.
 * Rajbhandari et al. 2020, arXiv:1910.02054.
 *
 * Which stages have the same bits? Each sums a unit's gradient over ranks and over micro-steps. Stages 0 and 1 sum over
 * micro-steps first, stages 2 and 3 over ranks first: 0 and 1 are the same, and 2 and 3. With one micro-step all four
 * are, and with reduces_once. A head in pieces (model/passes.cuh), at stage 3 and where gradients are sliced, has an
 * order of its own. All this where a sum over ranks has one order: that of the ranks in the MPI stand-in and with
 * `deterministic`. NCCL's rings, trees and switches each have another, and the collective, its size and the machine
 * choose among them.
 *
 * Streams: compute runs forward, backward and the decision of a step; reduce sends gradients; update runs the
 * optimizer; gather sends parameters; d2h copies states to be saved. stream_wait orders them. Without overlap all are
 * one stream. Units are sent in buckets (buckets.h). A step updates nothing before its decision, and then one bucket
 * after another in the order of the forward. The next forward waits for each bucket's update and gather where it uses
 * it, and for no other; so it runs beside the updates of later buckets, with the same bits. The backward waits for all.
 * Nothing here knows a transformer: the model calls zero_params_begin(u) before it uses unit u's parameters,
 * zero_backward_begin() after a step's first forward, and zero_gradient_begin(u) and zero_gradient_end(u) around the
 * kernels that compute unit u's gradient. */
#pragma once
#include "kernels/accumulate.cuh"
#include "kernels/clear.cuh"
#include "kernels/global_norm.cuh"
#include "kernels/optimizer.cuh"
#include "buckets.h"
#include "comm.h"
#include "plan.h"
#include "signals.h"

static const size_t STAGING_ELEMS = 1 << 20;

/* Data types of what the optimizer reads and writes. */
typedef struct Storage {
    Dtype master;           // FP32; SPLIT: the weight is its upper half; floatX's type: no master besides the weight
    Dtype moments;          // FP32 or BF16
    Dtype grads;            // summed over micro-steps in FP32, or floatX's type
    Dtype sent;             // communication dtype of gradients
} Storage;

/* What is stored in pinned host memory. Kernels read and write states and gradients there directly, over PCIe, since
 * they use them once; parameters are copied to the device before they are gathered. The same arithmetic, so the same
 * bits. */
enum Offloaded {
    OFFLOAD_ACTIVATIONS = 1,    // the inputs of segments, by the model (offload.h)
    OFFLOAD_OPTIMIZER = 2,      // master and moments
    OFFLOAD_GRADIENTS = 4,      // stages 2-3: the slices
    OFFLOAD_PARAMETERS = 8,     // stage 3: the slices
    NUM_OFFLOADED = 4
};
static const char* const offloaded_names[NUM_OFFLOADED] = {"activations", "optimizer", "gradients", "parameters"};

/* What is not finite among weights that were read, in the file or in the data type of the parameters. */
typedef struct NonFinite {
    int tensor;             // the first that has any
    size_t count, first;    // of that tensor: how many, and which is the first
    float value;            // of the first, as in the file
} NonFinite;

typedef struct ZeroConfig {
    int stage;
    const bool* persistent;     // (num_units) whole gradient, and at stage 3 whole parameters
    int num_micro_steps;
    bool training;              // false: no gradients and no moments
    Storage storage;
    unsigned offloaded;         // OFFLOAD_OPTIMIZER, ..., as far as this stage has them
    double offload_share;       // of OFFLOAD_OPTIMIZER: of what this rank updates, the last units' share
    const OptimizerRow* optimizer;
    bool rounds_fp32;           // GEMMs read tensors stored in fp32
    bool overlap;
    bool reduces_once;          // stages 2-3: gradients whole, sent at the boundary instead of in each micro-step
    bool deterministic;         // reductions in rank order instead of NCCL's
    size_t persist_below;       // stage 3: smaller units have whole parameters
    const int* visits;          // (num_visits) units in the order in which a micro-step uses them
    int num_visits;
    size_t reduce_bucket, gather_bucket;   // elements sent together, in whole units
    bool allows_nonfinite;      // weights that are read
} ZeroConfig;

/* An array over what this rank updates of all units, in two parts: that of the first units is on the device, that of
 * the others in host memory. Either may be all of it. */
typedef struct Tiers {
    char *device, *host;
    size_t device_bytes;        // of the first part
} Tiers;

typedef struct Zero {
    Comm* comm;
    Group *groups, *all;        // (num_groups) of units; the first is of all ranks
    int num_groups;
    const Shard* shard;
    int stage;
    Storage storage;
    unsigned offloaded;
    bool training, overlap;
    bool reduces_once;          // whole gradients at every stage, as at stage 1
    int num_micro_steps;
    Buckets grad_buckets, param_buckets;
    // parameters
    floatX* params;             // stages 0-2: (P). Stage 3: the units that are not buffered, packed
    floatX* param_slices;       // stage 3: this rank's slices of the buffered units, packed
    floatX* param_buffers[UNIT_BUFFERS];
    floatX** unit_params;       // (num_units) unit u's whole parameters, valid once it is gathered
    floatX** own_params;        // (num_units) the parameters of unit u that this rank updates
    bool rounds_fp32;           // GEMMs read some of the fp32 units
    float* fp32_params;         // the fp32 units, whole: the flat space begins with them
    floatX* fp32_rounded;       // their unit_params; null if no GEMM reads them
    int cached_bucket[UNIT_BUFFERS]; // stage 3: the bucket whose parameters are in the buffer; -1: none
    const int* visits;          // (num_visits) units in the order in which a micro-step uses them
    int num_visits, visit;      // visit: index of the next
    // gradients
    bool* persistent;           // (num_units) whole gradient, in fp32 until it is sent
    char* grads;                // (P) stages 0-1; in 16 bits without the persistent units
    float** unit_grads;         // (num_units) unit u's whole gradient while its backward runs
    Values* whole_grads;        // (num_units) unit u's whole gradient, accumulated over micro-steps if reduced once
    float* grad_buffers[UNIT_BUFFERS]; // stages 2-3; at 0-1 in 16 bits: one unit's, until it is accumulated
    float* persistent_grads;    // stages 2-3, and in 16 bits: persistent units, packed
    char* grad_slices;          // (P/R) stages 2-3
    char* sent;                 // one bucket in the communication dtype, if it differs from the stored one
    // optimizer
    const OptimizerRow* optimizer;
    int num_device_units;       // the states of the units before this one are on the device
    Tiers states[MAX_STATES];   // (P) stage 0, (P/R) else; empty: not a state of this optimizer; see zero_unit_state
    size_t* gapped_first;       // (num_units) start in states[GAPPED_STATE] of what this rank updates of unit u
    size_t num_fp32_gapped;     // elements of states[GAPPED_STATE] in the fp32 units
    double *lamb_sums, *lamb_scratch;   // (num_tensors,2), in the row of Tensor.whole
    struct MuonSpace* muon;
    Tiers master;               // of what this rank updates: fp32, or the lower halves; empty without master weights
    double* step_sums;          // (NUM_STEP_SUMS) summed over micro-steps, then over ranks
    double* norm_scratch;
    StepState* state;
    StepState* h_state;         // (2) pinned: the host reads the step before, so that no step waits for it
    GradPart* grad_parts;       // (num_tensors) this rank's part of each reduced gradient
    double* h_asks;             // (NUM_ASKS) pinned: requests by signal (signals.h)
    int *found, *h_found;       // (2, num_tensors), pinned (num_tensors): which tensors have non-finite gradients
    unsigned long long* hash;   // (1)
    float* staging;             // (STAGING_ELEMS) pinned staging buffer between files and the device
    bool allows_nonfinite;
    NonFinite nonfinite;        // of what this rank has read
    unsigned short* halves;     // (2, STAGING_ELEMS) pinned: the same for data in 16 bits
    cudaStream_t compute, reduce, update, gather;
    cudaStream_t d2h;           // states to the host, for a checkpoint (save.h)
    cudaEvent_t states_copied;  // d2h -> update: states may be overwritten
    cudaEvent_t edge;           // for stream_wait
    cudaEvent_t grad_buffer_free[UNIT_BUFFERS]; // reduce -> compute: the buffer may be overwritten
    cudaEvent_t* params_updated;   // (param buckets) update -> gather: what this rank owns of the bucket is updated
    cudaEvent_t* params_ready;  // (param buckets) gather, or update -> compute: the bucket's parameters are whole
} Zero;

/* Stream `to` waits for all work enqueued on `from` so far. The reason is for the reader. */
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

/* Where master weights and moments of unit u are, and an address from which their offsets in the whole array count. */
static Place unit_states_place(const Zero* z, int u) { return u < z->num_device_units ? Place::DEVICE : Place::HOST; }
static char* unit_tier(const Zero* z, const Tiers* tiers, int u)
{
    return unit_states_place(z, u) == Place::DEVICE ? tiers->device : tiers->host - tiers->device_bytes;
}

static bool zero_slices_states(const Zero* z) { return z->stage >= 1; }
static bool zero_slices_grads(const Zero* z) { return z->stage >= 2 && !z->reduces_once; }

/* The ranks that share unit u, and what this rank owns of it. */
static Group* unit_group(const Zero* z, int u) { return &z->groups[z->shard->units[u].group]; }
static Range unit_slice(const Zero* z, int u) { return shard_slice(z->shard, u, unit_group(z, u)->rank); }

/* What this rank updates of unit u: its range in the flat space, and the start of its states. */
static Range zero_owned(const Zero* z, int u)
{
    return zero_slices_states(z) ? unit_slice(z, u) : z->shard->units[u].range;
}
static size_t zero_state_first(const Zero* z, int u)
{
    const Unit* unit = &z->shard->units[u];
    return zero_slices_states(z) ? unit->packed_first : unit->range.first;
}

/* The data types of unit u. */
static Storage unit_storage(const Zero* z, int u)
{
    return unit_is_fp32(z->shard, u) ? Storage{Dtype::FP32, Dtype::FP32, Dtype::FP32, Dtype::FP32} : z->storage;
}

/* Elements of the fp32 units that this rank updates. */
static size_t num_fp32_states(const Zero* z)
{
    size_t count = 0;
    for (int u = 0; u < z->shard->num_fp32_units; u++) count += zero_owned(z, u).count;
    return count;
}

/* Element `offset`, of unit u, of an array over what this rank stores of all units. It begins with the num_fp32
 * elements of the fp32 units, as floats; the others have `dtype`. */
static Values unit_values(const Zero* z, void* base, Dtype dtype, int u, size_t offset, size_t num_fp32)
{
    if (unit_is_fp32(z->shard, u)) return values_from(values_of((float*)base), offset);
    return values_from(Values{(char*)base + num_fp32 * sizeof(float), dtype, nullptr}, offset - num_fp32);
}
static size_t values_bytes(size_t count, Dtype dtype, size_t num_fp32)
{
    return num_fp32 * sizeof(float) + (count - num_fp32) * dtype_bytes(dtype);
}

/* Address of parameter `flat`, which this rank updates, of unit u, which is not an fp32 unit. */
static floatX* zero_own_param(const Zero* z, int u, size_t flat)
{
    return z->own_params[u] + (flat - zero_owned(z, u).first);
}

/* With --grad-dtype in 16 bits and whole gradients: kernels compute a unit's gradient in fp32 in grad_buffers[0]; when
 * it is complete it is accumulated into whole_grads. */
static bool unit_accumulates(const Zero* z, int u)
{
    return !zero_slices_grads(z) && z->storage.grads != Dtype::FP32 && !z->persistent[u];
}

/* This rank's reduced gradient of unit u, from element `flat`. */
static Values zero_reduced_grad(const Zero* z, int u, size_t flat)
{
    if (!zero_slices_grads(z)) return values_from(z->whole_grads[u], flat - z->shard->units[u].range.first);
    return unit_values(z, z->grad_slices, z->storage.grads, u,
                       z->shard->units[u].packed_first + (flat - unit_slice(z, u).first), num_fp32_states(z));
}

/* Of the elements that this rank updates of unit u before `flat`, how many have no state in slot GAPPED_STATE: those of
 * hidden matrices, for which Muon has fewer states. Padding between two tensors counts with the second. */
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

/* What is stored and saved for each element: the weight, and slot k of the optimizer's states as STATE_FIRST + k. */
enum { STATE_WEIGHTS, STATE_FIRST, NUM_STATES = STATE_FIRST + MAX_STATES };

/* Does tensor t have this state? */
static bool state_is_kept(const Zero* z, int state, const Tensor* t)
{
    const int k = state - STATE_FIRST;
    if (state == STATE_WEIGHTS) return true;
    return z->optimizer->states[k] != nullptr && !(t->hidden && k >= z->optimizer->hidden_states);
}

/* Are there states in slot k? */
static bool zero_has_state(const Zero* z, int k) { return z->training && z->optimizer->states[k] != nullptr; }

/* Number of elements in slot k that this rank updates of unit u. */
static size_t zero_state_elems(const Zero* z, int k, int u)
{
    if (z->optimizer->states[k] == nullptr) return 0;
    return zero_owned(z, u).count - (k == GAPPED_STATE ? zero_gap(z, u, SIZE_MAX) : 0);
}

/* Slot k of the states that this rank updates of unit u. */
static Values zero_unit_state(const Zero* z, int k, int u)
{
    const bool gapped = k == GAPPED_STATE;
    return unit_values(z, unit_tier(z, &z->states[k], u), z->storage.moments, u,
                       gapped ? z->gapped_first[u] : zero_state_first(z, u),
                       gapped ? z->num_fp32_gapped : num_fp32_states(z));
}

/* Address and type of a state of element `flat`, which this rank updates, of unit u. The optimizer reads and writes
 * floats whatever the type. */
static Values zero_state(const Zero* z, int state, int u, size_t flat)
{
    const int k = state - STATE_FIRST;
    size_t offset = flat - zero_owned(z, u).first;
    if (state != STATE_WEIGHTS)
        return values_from(zero_unit_state(z, k, u), offset - (k == GAPPED_STATE ? zero_gap(z, u, flat) : 0));
    if (unit_is_fp32(z->shard, u)) return values_of(z->fp32_params + flat);
    floatX* param = zero_own_param(z, u, flat);
    offset += zero_state_first(z, u) - num_fp32_states(z);
    if (z->storage.master == FLOATX_DTYPE) return Values{param, FLOATX_DTYPE, nullptr};
    char* master = unit_tier(z, &z->master, u);
    if (z->storage.master == Dtype::SPLIT) return Values{param, Dtype::SPLIT, (unsigned short*)master + offset};
    return values_of((float*)master + offset);
}

/* The compute stream waits for communication; the time counts as such. */
static void wait_for_ranks(Zero* z, cudaEvent_t event)
{
    Phase before = z->comm->num_ranks > 1 ? phase_begin(Phase::COMMUNICATION) : profile.phase;
    CUDA_CHECK(cudaStreamWaitEvent(z->compute, event, 0));
    phase_begin(before);
}

// ------------------------------------------------------------------------------------------------------ parameters
/* All-gathers unit u on the gather stream. */
static void unit_gather(Zero* z, int u)
{
    Group* group = unit_group(z, u);
    size_t n = unit_slice(z, u).count;
    if (unit_is_fp32(z->shard, u)) {
        float* unit = z->fp32_params + z->shard->units[u].range.first;
        comm_all_gather(group, unit, unit + group->rank * n, n, ncclFloat32, z->gather);
        return;
    }
    const floatX* own = z->own_params[u];
    if (unit_is_buffered(&z->param_buckets, u) && zero_place(z, OFFLOAD_PARAMETERS) == Place::HOST) {
        floatX* slice = z->unit_params[u] + group->rank * n;
        OP_CALL("cudaMemcpyAsync", z->gather, n * sizeof(floatX), n);
        CUDA_CHECK(cudaMemcpyAsync(slice, own, n * sizeof(floatX), cudaMemcpyHostToDevice, z->gather));
        own = slice;
    }
    comm_all_gather(group, z->unit_params[u], own, n, FLOATX_NCCL, z->gather);
}

/* Rounds the copies that GEMMs read of the fp32 units in bucket b. */
static void bucket_round(Zero* z, int b, cudaStream_t stream)
{
    const Buckets* buckets = &z->param_buckets;
    for (int u = buckets->first_unit[b]; u < buckets->first_unit[b + 1] && unit_is_fp32(z->shard, u); u++)
        if (z->fp32_rounded != nullptr)
            weights_round(z->unit_params[u], z->fp32_params + z->shard->units[u].range.first,
                          z->shard->units[u].range.count, stream);
}

static void bucket_gather(Zero* z, int b)
{
    CommunicationScope communication(z->gather, z->comm->num_ranks > 1);
    const Buckets* buckets = &z->param_buckets;
    if (bucket_is_buffered(buckets, b))
        stream_wait(z->gather, z->compute, z->edge, "the buffer may be overwritten");
    CUDA_CHECK(cudaStreamWaitEvent(z->gather, z->params_updated[b], 0));
    {
        OP_GROUP("gather_parameters", comm_kind(z->comm), z->gather);
        comm_group_begin(z->comm);
        for (int u = buckets->first_unit[b]; u < buckets->first_unit[b + 1]; u++) unit_gather(z, u);
        comm_group_end(z->comm);
    }
    bucket_round(z, b, z->gather);
    CUDA_CHECK(cudaEventRecord(z->params_ready[b], z->gather));
}

/* Gathers bucket b into its buffer, unless it is cached there. */
static void buffer_gather(Zero* z, int b)
{
    int buffer = z->param_buckets.buffer[b];
    if (z->cached_bucket[buffer] == b) return;
    z->cached_bucket[buffer] = b;
    bucket_gather(z, b);
}

/* The buffered bucket that is used after that of `visit`, if it uses the other buffer; else -1. */
static int next_buffered_bucket(const Zero* z, int visit)
{
    const Buckets* buckets = &z->param_buckets;
    int b = buckets->of_unit[z->visits[visit]];
    for (int i = visit + 1; i < z->num_visits; i++) {
        int next = buckets->of_unit[z->visits[i]];
        if (next != b && bucket_is_buffered(buckets, next))
            return buckets->buffer[next] != buckets->buffer[b] ? next : -1;
    }
    return -1;
}

/* Before the compute stream uses the parameters of unit u, the next of the visits: waits until they are whole, and
 * prefetches the next bucket. Every pass starts at the first visit; a forward without backward ends early. */
static void zero_params_begin(Zero* z, int u)
{
    const Buckets* buckets = &z->param_buckets;
    int b = buckets->of_unit[u];
    if (u == z->visits[0]) z->visit = 0;
    assert(z->visits[z->visit] == u);
    if (bucket_is_buffered(buckets, b)) buffer_gather(z, b);
    wait_for_ranks(z, z->params_ready[b]);   // the bucket is updated and gathered
    int next = next_buffered_bucket(z, z->visit++);
    if (bucket_is_buffered(buckets, next)) buffer_gather(z, next);
}

/* After passes outside of steps: clears what they have cached, so that every step gathers the same. */
static void zero_cache_clear(Zero* z)
{
    for (int k = 0; k < UNIT_BUFFERS; k++) z->cached_bucket[k] = -1;
}

/* The update stream has changed the slices of bucket b: gathers it if it is whole on every rank, else it is no longer
 * cached. */
static void zero_params_changed(Zero* z, int b)
{
    CUDA_CHECK(cudaEventRecord(z->params_updated[b], z->update));
    if (bucket_is_buffered(&z->param_buckets, b)) {
        z->cached_bucket[z->param_buckets.buffer[b]] = -1;
    } else if (zero_slices_states(z)) {
        bucket_gather(z, b);
    } else {
        bucket_round(z, b, z->update);
        CUDA_CHECK(cudaEventRecord(z->params_ready[b], z->update));
    }
}

/* The same for all buckets, after loading. */
static void zero_params_loaded(Zero* z)
{
    stream_wait(z->update, z->compute, z->edge, "the weights are loaded");
    for (int b = 0; b < z->param_buckets.num_buckets; b++) zero_params_changed(z, b);
}

/* Before code outside the model reads parameters or states on the compute stream. */
static void zero_params_settle(Zero* z)
{
    stream_wait(z->compute, z->update, z->edge, "no update is still writing");
    stream_wait(z->compute, z->gather, z->edge, "no gather is still writing");
}

// ------------------------------------------------------------------------------------------------------- gradients
/* What of unit u's gradient is zeroed before kernels add to it, as elements of the unit: all, except for tensors that a
 * GEMM overwrites. A unit stored in fp32 is zeroed whole: it is small, and in many parts. */
static ClearRanges gradient_cleared(const Shard* s, int u)
{
    const Unit* unit = &s->units[u];
    ClearRanges ranges = {};
    size_t first = 0;
    for (int t = unit->first_tensor; t < unit->first_tensor + unit->num_tensors; t++) {
        const Tensor* tensor = &s->tensors[t];
        if (!tensor->grad_overwritten || unit_is_fp32(s, u)) continue;
        const size_t end = tensor->first - unit->range.first;
        ranges_extend(&ranges, first, end);
        first = end + tensor->padded_rows * tensor->shape[1];
    }
    ranges_extend(&ranges, first, unit->range.count);
    return ranges;
}

/* Does the gradient of unit u's weights in micro-step `micro` add to what is there? If not, their first GEMM overwrites
 * it. */
static bool zero_gradient_adds(const Zero* z, int u, int micro)
{
    if (unit_is_fp32(z->shard, u)) return true;
    return micro > 0 && !unit_is_buffered(&z->grad_buckets, u) && !unit_accumulates(z, u);
}

static void gradient_clear(Zero* z, int u)
{
    const ClearRanges ranges = gradient_cleared(z->shard, u);
    ranges_clear(z->unit_grads[u], &ranges, z->compute);
}

/* Before the first micro-step of a step: clears its sums. */
static void zero_step_begin(Zero* z)
{
    CUDA_CHECK(cudaMemsetAsync(z->step_sums, 0, NUM_STEP_SUMS * sizeof(double), z->compute));
}

/* Between forward and backward of the first micro-step of a step: clears, of gradients that kernels sum over
 * micro-steps, what no GEMM overwrites. */
static void zero_backward_begin(Zero* z)
{
    stream_wait(z->compute, z->update, z->edge, "the updates have read the gradients, and the state of their step");
    for (int u = 0; u < z->shard->num_units; u++)
        if (!unit_is_buffered(&z->grad_buckets, u) && !unit_accumulates(z, u)) gradient_clear(z, u);
}

/* Before the backward of unit u: returns the buffer for its gradient, cleared where kernels on the compute stream add
 * to it. */
static float* zero_gradient_begin(Zero* z, int u)
{
    const Buckets* buckets = &z->grad_buckets;
    int b = buckets->of_unit[u];
    if (bucket_is_buffered(buckets, b) || unit_accumulates(z, u)) {
        if (bucket_is_buffered(buckets, b) && u == buckets->first_unit[b + 1] - 1)   // the buffer's last bucket is sent
            wait_for_ranks(z, z->grad_buffer_free[buckets->buffer[b]]);
        gradient_clear(z, u);
    }
    return z->unit_grads[u];
}

/* Unit u's whole gradient in the communication dtype: itself, or its copy in z->sent. */
static Values unit_sent(const Zero* z, int u)
{
    Values kept = z->whole_grads[u];
    Dtype sent = unit_storage(z, u).sent;
    if (kept.dtype == sent || unit_group(z, u)->num_ranks == 1) return kept;
    return values_from(Values{z->sent, sent, nullptr}, unit_buffer_offset(&z->grad_buckets, z->shard, u));
}

/* Can NCCL write its sum to the final buffer? Not if it is added there, has another type, or is in host memory. */
static bool sum_goes_home(const Zero* z, Values own, Values sent, bool adds)
{
    return own.dtype == sent.dtype && !adds && zero_place(z, OFFLOAD_GRADIENTS) == Place::DEVICE;
}

/* Enqueues the sum over ranks of unit u's gradient: of this rank's slice, at stage 0 of all of it. The result goes to
 * its final buffer (zero_reduced_grad) or overwrites what was sent. */
static void unit_reduce(Zero* z, int u, bool adds)
{
    Group* group = unit_group(z, u);
    size_t count = z->shard->units[u].range.count, n = count / group->num_ranks;
    Values inp = unit_sent(z, u), slice = values_from(inp, group->rank * n);
    Values own = zero_reduced_grad(z, u, unit_slice(z, u).first);
    bool sums = group->pieces != nullptr || group->num_ranks == 1;   // comm_reduce_scatter converts and adds too
    if (z->stage > 0) {
        if (sums) comm_reduce_scatter(group, own, inp, n, adds, z->reduce);
        else comm_reduce_scatter(group, sum_goes_home(z, own, inp, adds) ? own : slice, inp, n, false, z->reduce);
    } else if (group->pieces != nullptr) {
        comm_reduce_scatter(group, slice, inp, n, false, z->reduce);
        comm_all_gather(group, inp.at, slice.at, n, dtype_nccl(inp.dtype), z->reduce);
    } else {
        comm_all_reduce(group, inp.at, count, dtype_nccl(inp.dtype), z->reduce);
    }
}

/* Copies the result to its final buffer if unit_reduce has not written it there. */
static void unit_keep_reduced(Zero* z, int u, bool adds)
{
    const Group* group = unit_group(z, u);
    size_t count = z->shard->units[u].range.count, n = count / group->num_ranks;
    Values inp = unit_sent(z, u);
    if (z->stage == 0) {
        if (inp.at != z->whole_grads[u].at) values_convert(z->whole_grads[u], inp, count, z->reduce);
    } else if (group->pieces == nullptr && group->num_ranks > 1) {
        Values own = zero_reduced_grad(z, u, unit_slice(z, u).first);
        if (sum_goes_home(z, own, inp, adds)) return;
        values_sum(own, values_from(inp, group->rank * n), 1, n, adds, z->reduce);
    }
}

/* After the backward of unit u in micro-step `micro` of `num_micro`: reduces the bucket if this stage does so now. The
 * backward goes from the last unit to the first, so a bucket is complete after its first unit. */
static void zero_gradient_end(Zero* z, int u, int micro, int num_micro)
{
    const Buckets* buckets = &z->grad_buckets;
    int b = buckets->of_unit[u], end = buckets->first_unit[b + 1];
    bool boundary = micro == num_micro - 1, buffered = bucket_is_buffered(buckets, b), adds = buffered && micro > 0;
    if (unit_accumulates(z, u))
        values_sum(z->whole_grads[u], values_of(z->unit_grads[u]), 1, z->shard->units[u].range.count, micro > 0,
                   z->compute);
    if (u != buckets->first_unit[b] || (!boundary && !buffered)) return;
    stream_wait(z->reduce, z->compute, z->edge, "the bucket's gradient is complete");
    CommunicationScope communication(z->reduce, z->comm->num_ranks > 1);
    bool one_by_one = false;   // Group.pieces has room for one unit
    for (int i = u; i < end; i++) one_by_one = one_by_one || unit_group(z, i)->pieces != nullptr;
    for (int i = u; i < end; i++)
        if (unit_sent(z, i).at != z->whole_grads[i].at)
            values_convert(unit_sent(z, i), z->whole_grads[i], z->shard->units[i].range.count, z->reduce);
    OP_GROUP("reduce_gradients", comm_kind(z->comm), z->reduce);
    if (!one_by_one) comm_group_begin(z->comm);
    for (int i = u; i < end; i++) unit_reduce(z, i, adds);
    if (!one_by_one) comm_group_end(z->comm);
    for (int i = u; i < end; i++) unit_keep_reduced(z, i, adds);
    if (buffered) CUDA_CHECK(cudaEventRecord(z->grad_buffer_free[buckets->buffer[b]], z->reduce));
}

// ------------------------------------------------------------------------------------------------- host and device
/* out (count <= STAGING_ELEMS, pinned) = a state of unit u from element `flat`, as floats. Synchronises. */
static void zero_state_to_host(Zero* z, int state, int u, size_t flat, size_t count, float* out)
{
    Values from = zero_state(z, state, u, flat);
    void* to = from.dtype == Dtype::FP32 ? (void*)out : z->halves;
    size_t size_bytes = count * dtype_bytes(from.dtype);
    CUDA_CHECK(cudaMemcpyAsync(to, from.at, size_bytes, cudaMemcpyDefault, z->compute));
    if (from.low != nullptr)
        CUDA_CHECK(cudaMemcpyAsync(z->halves + STAGING_ELEMS, from.low, size_bytes, cudaMemcpyDefault, z->compute));
    CUDA_CHECK(cudaStreamSynchronize(z->compute));
    if (from.dtype == Dtype::FP32) return;
    const Values halves = {z->halves, from.dtype, from.low != nullptr ? z->halves + STAGING_ELEMS : nullptr};
    for (size_t i = 0; i < count; i++) out[i] = value_load(halves, i);
}

/* The reverse; a state in 16 bits is rounded to nearest. `values` (pinned) is overwritten. Synchronises. */
static void zero_state_from_host(Zero* z, int state, int u, size_t flat, size_t count, float* values)
{
    Values to = zero_state(z, state, u, flat);
    void* from = to.dtype == Dtype::FP32 ? (void*)values : z->halves;
    size_t size_bytes = count * dtype_bytes(to.dtype);
    const Values halves = {z->halves, to.dtype, to.low != nullptr ? z->halves + STAGING_ELEMS : nullptr};
    for (size_t i = 0; i < (to.dtype == Dtype::FP32 ? 0 : count); i++) value_store(halves, i, values[i]);
    CUDA_CHECK(cudaMemcpyAsync(to.at, from, size_bytes, cudaMemcpyDefault, z->compute));
    if (to.low != nullptr)
        CUDA_CHECK(cudaMemcpyAsync(to.low, halves.low, size_bytes, cudaMemcpyDefault, z->compute));
    floatX* param = unit_is_fp32(z->shard, u) ? (floatX*)to.at : zero_own_param(z, u, flat);
    if (state == STATE_WEIGHTS && (void*)param != to.at) {   // master weights: the parameter is a rounded copy
        CUDA_CHECK(cudaStreamSynchronize(z->compute));
        floatX* rounded = (floatX*)values;                  // in place: writes never overtake reads
        for (size_t i = 0; i < count; i++) {
            floatX x;
            store_weight(&x, values[i]);
            memcpy((void*)(rounded + i), &x, sizeof x);
        }
        CUDA_CHECK(cudaMemcpyAsync(param, rounded, count * sizeof(floatX), cudaMemcpyDefault, z->compute));
    }
    CUDA_CHECK(cudaStreamSynchronize(z->compute));
}

// ---------------------------------------------------------------------------------------------------------- signals
/* Before the boundary: adds this rank's requests to the step's sums, which reach all ranks. */
static void zero_step_ask(Zero* z)
{
    static_assert(ASKED_TO_END - ASKED_TO_SAVE == ASK_END - ASK_SAVE, "the requests are neighbours in both");
    CUDA_CHECK(cudaMemcpyAsync(z->step_sums + ASKED_TO_SAVE, z->h_asks, NUM_ASKS * sizeof(double),
                               cudaMemcpyHostToDevice, z->compute));
}

/* The last tensor with a non-finite reduced gradient in the skipped step that used this slot, which the backward comes
 * to first; -1: none, the loss was not finite. The same on every rank. Synchronises. */
static int zero_last_nonfinite(Zero* z, int slot)
{
    const int n = z->shard->num_tensors;
    CUDA_CHECK(cudaMemcpyAsync(z->h_found, z->found + slot * n, n * sizeof(int), cudaMemcpyDeviceToHost, z->compute));
    CUDA_CHECK(cudaStreamSynchronize(z->compute));
    int last = n - 1;
    while (last >= 0 && !z->h_found[last]) last--;
    return (int)comm_max_host(z->comm, last);
}
