/* account.h: measures of a run that do not change it: the bytes that a step sends, by the same arithmetic as the
 * collectives, and hashes of the ranks' state. */
#pragma once
#include "update.h"

/* Bytes this rank sends in one step, by the same arithmetic as the collectives, in one group or in all (null). */
typedef struct SentBytes { size_t gradients, parameters, sums, optimizer; } SentBytes;

/* Bytes that this rank sends when its slice of unit u is gathered. */
static size_t unit_gather_bytes(const Zero* z, int u)
{
    const size_t elem_bytes = unit_is_fp32(z->shard, u) ? sizeof(float) : sizeof(floatX);
    return comm_scatter_bytes(unit_group(z, u), unit_slice(z, u).count, elem_bytes);
}

/* The same of what is gathered into the double buffer in one micro-step: a dry run of zero_params_begin. */
static size_t micro_step_gather_bytes(const Zero* z, const Group* only, int (&cached)[UNIT_BUFFERS])
{
    const Buckets* buckets = &z->param_buckets;
    size_t bytes = 0;
    for (int visit = 0; visit < z->num_visits; visit++) {
        for (int b : {buckets->of_unit[z->visits[visit]], next_buffered_bucket(z, visit)}) {
            if (!bucket_is_buffered(buckets, b) || cached[buckets->buffer[b]] == b) continue;
            cached[buckets->buffer[b]] = b;
            for (int u = buckets->first_unit[b]; u < buckets->first_unit[b + 1]; u++)
                if (only == nullptr || unit_group(z, u) == only) bytes += unit_gather_bytes(z, u);
        }
    }
    return bytes;
}

/* The same in one step. Every micro-step but the first begins with what the one before has left. */
static size_t buffered_gather_bytes(const Zero* z, const Group* only)
{
    int cached[UNIT_BUFFERS] = {-1, -1};
    const size_t first = micro_step_gather_bytes(z, only, cached), later = micro_step_gather_bytes(z, only, cached);
    return first + (size_t)(z->num_micro_steps - 1) * later;
}

static SentBytes zero_sent_bytes(const Zero* z, const Group* only)
{
    const Shard* s = z->shard;
    SentBytes bytes = {};
    const bool all = only == nullptr || only == z->all;
    if (all) bytes.sums = comm_all_reduce_bytes(z->all, NUM_STEP_SUMS, sizeof(double));
    if (all) bytes.optimizer = phase_sent_bytes(z);
    bytes.parameters = buffered_gather_bytes(z, only);
    for (int u = 0; u < s->num_units; u++) {
        const Group* group = unit_group(z, u);
        if (only != nullptr && group != only) continue;
        size_t num_reductions = unit_is_buffered(&z->grad_buckets, u) ? z->num_micro_steps : 1;
        size_t elem_bytes = dtype_bytes(unit_storage(z, u).sent);
        if (z->stage == 0) bytes.gradients += comm_all_reduce_bytes(group, s->units[u].range.count, elem_bytes);
        else bytes.gradients += num_reductions * comm_scatter_bytes(group, unit_slice(z, u).count, elem_bytes);
        if (z->stage > 0 && !unit_is_buffered(&z->param_buckets, u)) bytes.parameters += unit_gather_bytes(z, u);
    }
    return bytes;
}

/* Before hashing: all parameters are gathered, the sum is 0. */
static void hash_begin(Zero* z)
{
    zero_params_settle(z);
    CUDA_CHECK(cudaMemsetAsync(z->hash, 0, sizeof *z->hash, z->compute));
}

/* The sum, on the host. Synchronises. */
static unsigned long long hash_end(Zero* z)
{
    unsigned long long h_hash;
    CUDA_CHECK(cudaMemcpyAsync(&h_hash, z->hash, sizeof h_hash, cudaMemcpyDeviceToHost, z->compute));
    CUDA_CHECK(cudaStreamSynchronize(z->compute));
    return h_hash;
}

/* Sum over all elements of parameters (master where there is one) and moments, by tensor, the same for every R, stage,
 * layout and storage if the values are. Synchronises. */
static unsigned long long zero_state_hash(Zero* z)
{
    const Shard* shard = z->shard;
    hash_begin(z);
    for (int u = 0; u < shard->num_units; u++) {
        Range slice = unit_slice(z, u);
        for (int t = shard->units[u].first_tensor; t < shard->units[u].first_tensor + shard->units[u].num_tensors;
             t++) {
            Range part = tensor_part(&shard->tensors[t], slice);
            if (part.count == 0) continue;
            Rectangle place = tensor_logical(&shard->tensors[t], part.first);
            for (int state = 0; state < NUM_STATES; state++, place.first += shard->num_params)
                if (state_is_kept(z, state, &shard->tensors[t]))
                    state_hash_accumulate(z->hash, zero_state(z, state, u, part.first), part.count, place, z->compute);
        }
    }
    comm_all_reduce(z->all, z->hash, 1, ncclUint64, z->compute);
    return hash_end(z);
}

/* Hash of what must be equal on every rank of a group: whole parameters, and at stage 0 the moments. Synchronises. */
static unsigned long long zero_replica_hash(Zero* z, const Group* group)
{
    const Shard* shard = z->shard;
    hash_begin(z);
    for (int u = 0; u < shard->num_units; u++) {
        Range range = shard->units[u].range;
        if (unit_group(z, u) != group) continue;
        if (!unit_is_buffered(&z->param_buckets, u))
            state_hash_accumulate(z->hash, unit_is_fp32(shard, u) ? values_of(z->fp32_params + range.first)
                                                                  : Values{z->unit_params[u], FLOATX_DTYPE, nullptr},
                                  range.count, rectangle_in_line(range.first), z->compute);
        if (zero_slices_states(z)) continue;
        for (int k = 0; k < MAX_STATES; k++)
            if (zero_has_state(z, k))
                state_hash_accumulate(z->hash, zero_unit_state(z, k, u), zero_state_elems(z, k, u),
                                      rectangle_in_line((STATE_FIRST + k) * shard->num_elems + range.first),
                                      z->compute);
    }
    return hash_end(z);
}

/* --check-replicas: group by group. */
static void zero_ensure_replicas(Zero* z, size_t step)
{
    for (const Group* g = z->groups; g < z->groups + z->num_groups; g++)
        group_ensure_replica(g, zero_replica_hash(z, g), step);
}
