/* memory.h: adds every buffer of ZeRO to the plan (zero_plan); after allocation finds each unit's memory and creates
 * streams and events (zero_start); frees them (zero_free, zero_optimizer_free). */
#pragma once
#include "update.h"

static size_t max_count(size_t a, size_t b) { return a > b ? a : b; }

static void plan_gradients(Zero* z, Plan* plan)
{
    const Shard* s = z->shard;
    const Buckets* buckets = &z->grad_buckets;
    const Place D = Place::DEVICE;
    size_t persistent = 0, accumulated = 0, largest_accumulated = 0, largest = 0;
    bool converts = false;
    for (int u = 0; u < s->num_units; u++) {
        size_t count = s->units[u].range.count;
        if (z->persistent[u]) persistent += count;
        if (unit_accumulates(z, u)) accumulated += count;
        if (unit_accumulates(z, u) && count > largest_accumulated) largest_accumulated = count;
        Dtype whole = unit_accumulates(z, u) ? z->storage.grads : Dtype::FP32;
        converts = converts || (count > 0 && s->units[u].num_ranks > 1 && whole != unit_storage(z, u).sent);
    }
    for (int b = 0; b < buckets->num_buckets; b++) largest = max_count(largest, bucket_range(buckets, s, b).count);
    if (zero_slices_grads(z)) {
        for (int k = 0; k < buckets->num_buffers; k++)
            plan_add(plan, "gradients, double buffer", D, &z->grad_buffers[k], buckets->buffer_elems);
        plan_add(plan, "gradients, embeddings and head", D, &z->persistent_grads, persistent);
        plan_add(plan, "gradients, slice", zero_place(z, OFFLOAD_GRADIENTS), &z->grad_slices,
                 values_bytes(s->slice_elems, z->storage.grads, num_fp32_states(z)));
    } else if (accumulated > 0) {
        plan_add(plan, "gradients", D, &z->grads, accumulated * dtype_bytes(z->storage.grads));
        plan_add(plan, "gradients, embeddings and head", D, &z->persistent_grads, persistent);
        plan_add(plan, "gradients, one unit in fp32", D, &z->grad_buffers[0], largest_accumulated);
    } else {
        plan_add(plan, "gradients", D, &z->grads, s->num_elems * sizeof(float));
    }
    if (converts)
        plan_add(plan, "gradients, as they are sent", D, &z->sent, largest * dtype_bytes(z->storage.sent));
}

static void plan_params(Zero* z, Plan* plan)
{
    const Shard* s = z->shard;
    size_t kept = 0, slices = 0, fp32 = 0;
    for (int u = 0; u < s->num_units; u++) {
        const size_t count = s->units[u].range.count;
        if (unit_is_fp32(s, u)) fp32 += count;
        else if (unit_is_buffered(&z->param_buckets, u)) slices += count / s->units[u].num_ranks;
        else kept += count;
    }
    plan_add(plan, z->stage == 3 ? "persistent parameters" : "parameters", Place::DEVICE, &z->params, kept);
    if (fp32 > 0) plan_add(plan, "parameters in fp32", Place::DEVICE, &z->fp32_params, fp32);
    if (fp32 > 0 && z->rounds_fp32)
        plan_add(plan, "parameters in fp32, rounded", Place::DEVICE, &z->fp32_rounded, fp32);
    if (slices > 0) plan_add(plan, "parameters, slice", zero_place(z, OFFLOAD_PARAMETERS), &z->param_slices, slices);
    for (int k = 0; k < z->param_buckets.num_buffers; k++)
        plan_add(plan, "parameters, double buffer", Place::DEVICE, &z->param_buffers[k],
                 z->param_buckets.buffer_elems);
}

/* The first units keep their states on the device: as many as are within their share, or with --offload none all. */
static void states_divide(Zero* z, double offload_share)
{
    const Shard* s = z->shard;
    double elems = 0, room = (1 - offload_share) * (double)(zero_slices_states(z) ? s->slice_elems : s->num_elems);
    if (zero_place(z, OFFLOAD_OPTIMIZER) == Place::DEVICE) room = INFINITY;
    for (int u = 0; u < s->num_units && (elems += (double)zero_owned(z, u).count) <= room; u++) z->num_device_units++;
}

/* Adds an array of `bytes`, of which device_bytes are those of the first units. */
static void plan_tiers(Plan* plan, const char* label, Tiers* tiers, size_t device_bytes, size_t bytes)
{
    tiers->device_bytes = device_bytes;
    if (device_bytes > 0) plan_add(plan, label, Place::DEVICE, &tiers->device, device_bytes);
    if (bytes > device_bytes) plan_add(plan, label, Place::HOST, &tiers->host, bytes - device_bytes);
}

/* Master weights of the `count` elements that this rank updates, but for the fp32 units, their own masters. */
static void plan_master(Zero* z, Plan* plan, size_t count)
{
    Dtype master = z->storage.master;
    size_t device_count = 0;
    count -= num_fp32_states(z);
    for (int u = z->shard->num_fp32_units; u < z->num_device_units; u++) device_count += zero_owned(z, u).count;
    if (master != FLOATX_DTYPE)
        plan_tiers(plan, master == Dtype::SPLIT ? "master weights, lower halves" : "master weights", &z->master,
                   device_count * dtype_bytes(master), count * dtype_bytes(master));
    if (master != Dtype::FP32 || z->storage.moments != Dtype::FP32)
        plan_add(plan, "staging buffers for files", Place::HOST, &z->halves, 2 * STAGING_ELEMS);
}

static void plan_optimizer(Zero* z, Plan* plan)
{
    const Shard* s = z->shard;
    z->gapped_first = (size_t*)malloc_checked(s->num_units * sizeof(size_t));
    for (int k = 0; k < MAX_STATES; k++) {
        size_t elems = 0, num_fp32 = 0, device_bytes = 0;
        for (int u = 0; u < s->num_units; u++) {
            if (k == GAPPED_STATE) z->gapped_first[u] = elems;
            elems += zero_state_elems(z, k, u);
            if (unit_is_fp32(s, u)) num_fp32 = elems;
            if (unit_states_place(z, u) == Place::DEVICE)
                device_bytes = values_bytes(elems, z->storage.moments, num_fp32);
        }
        if (k == GAPPED_STATE) z->num_fp32_gapped = num_fp32;
        if (z->optimizer->states[k] != nullptr)
            plan_tiers(plan, "optimizer states", &z->states[k], device_bytes,
                       values_bytes(elems, z->storage.moments, num_fp32));
    }
    plan_phase(z, plan);
}

/* --deterministic: for each group the pieces of its largest unit. */
static void plan_pieces(Zero* z, Plan* plan)
{
    for (int g = 0; g < z->num_groups; g++) {
        size_t largest_bytes = 0;
        for (int u = 0; u < z->shard->num_units; u++)
            if (unit_group(z, u) == &z->groups[g])
                largest_bytes = max_count(largest_bytes,
                                          z->shard->units[u].range.count * dtype_bytes(unit_storage(z, u).sent));
        if (z->groups[g].num_ranks > 1)
            plan_add(plan, "gradients, pieces of all ranks", Place::DEVICE, &z->groups[g].pieces, largest_bytes);
    }
}

/* Adds every buffer of this stage to the plan; pointers are valid after plan_allocate and zero_start. groups
 * (num_groups): those of the shard's units, the first of all ranks. */
static void zero_plan(Zero* z, Plan* plan, const Shard* shard, Group* groups, int num_groups, const ZeroConfig* config)
{
    *z = Zero{};
    z->comm = groups[0].job;
    z->groups = z->all = groups;
    z->num_groups = num_groups;
    z->shard = shard;
    z->stage = config->stage;
    z->training = config->training;
    z->storage = config->storage;
    z->offloaded = config->offloaded;
    states_divide(z, config->offload_share);
    z->optimizer = config->optimizer;
    z->rounds_fp32 = config->rounds_fp32;
    z->overlap = config->overlap;
    z->reduces_once = config->reduces_once;
    z->num_micro_steps = config->num_micro_steps;
    z->visits = config->visits;
    z->num_visits = config->num_visits;
    z->allows_nonfinite = config->allows_nonfinite;
    z->persistent = (bool*)malloc_checked(shard->num_units * sizeof(bool));
    memcpy(z->persistent, config->persistent, shard->num_units * sizeof(bool));
    bool *kept = (bool*)malloc_checked(2 * shard->num_units * sizeof(bool)), *kept_grads = kept + shard->num_units;
    for (int u = 0; u < shard->num_units; u++) {
        kept_grads[u] = !zero_slices_grads(z) || config->persistent[u];
        kept[u] = z->stage < 3 || config->persistent[u] || shard->units[u].range.count < config->persist_below;
    }
    buckets_build(&z->grad_buckets, shard, kept_grads, config->reduce_bucket);
    buckets_build(&z->param_buckets, shard, kept, config->gather_bucket);
    free(kept);
    plan_params(z, plan);
    plan_master(z, plan, zero_slices_states(z) ? shard->slice_elems : shard->num_elems);
    if (z->training && config->deterministic) plan_pieces(z, plan);
    if (z->training) {
        plan_gradients(z, plan);
        plan_optimizer(z, plan);
    }
    plan_add(plan, "step sums and scratch", Place::DEVICE, &z->step_sums, NUM_STEP_SUMS);
    plan_add(plan, "step sums and scratch", Place::DEVICE, &z->norm_scratch, global_norm_scratch_elems());
    plan_add(plan, "step sums and scratch", Place::DEVICE, &z->state, 1);
    plan_add(plan, "step sums and scratch", Place::DEVICE, &z->hash, 1);
    plan_add(plan, "step sums and scratch", Place::DEVICE, &z->grad_parts, shard->num_tensors);
    plan_add(plan, "step sums and scratch", Place::DEVICE, &z->found, 2 * shard->num_tensors);
    plan_add(plan, "step results", Place::HOST, &z->h_found, shard->num_tensors);
    plan_add(plan, "step results", Place::HOST, &z->h_state, 2);
    plan_add(plan, "step results", Place::HOST, &z->h_asks, NUM_ASKS);
    plan_add(plan, "step results", Place::HOST, &z->comm->progress, WATCH_STREAMS);
    plan_add(plan, "staging buffers for files", Place::HOST, &z->staging, STAGING_ELEMS);
}

/* Fills the tables of each unit's addresses. */
static void zero_locate_units(Zero* z)
{
    const Shard* s = z->shard;
    z->unit_grads = (float**)malloc_checked(s->num_units * sizeof(float*));
    z->whole_grads = (Values*)malloc_checked(s->num_units * sizeof(Values));
    Values accumulated = {z->grads, z->storage.grads, nullptr};
    z->unit_params = (floatX**)malloc_checked(s->num_units * sizeof(floatX*));
    z->own_params = (floatX**)malloc_checked(s->num_units * sizeof(floatX*));
    float* persistent = z->persistent_grads;
    floatX *kept = z->params, *slices = z->param_slices;
    for (int u = 0; u < s->num_units; u++) {
        Range range = s->units[u].range;
        const Buckets *grads = &z->grad_buckets, *params = &z->param_buckets;
        int grad_buffer = grads->buffer[grads->of_unit[u]], param_buffer = params->buffer[params->of_unit[u]];
        bool accumulates = unit_accumulates(z, u);
        if (!z->training) z->unit_grads[u] = nullptr;
        else if (accumulates) z->unit_grads[u] = z->grad_buffers[0];
        else if (grad_buffer != NOT_BUFFERED)
            z->unit_grads[u] = z->grad_buffers[grad_buffer] + unit_buffer_offset(grads, s, u);
        else if (z->persistent_grads != nullptr) { z->unit_grads[u] = persistent; persistent += range.count; }
        else z->unit_grads[u] = (float*)z->grads + range.first;
        z->whole_grads[u] = accumulates ? accumulated : values_of(z->unit_grads[u]);
        if (accumulates) accumulated = values_from(accumulated, range.count);
        if (unit_is_fp32(s, u)) {
            z->unit_params[u] = z->fp32_rounded != nullptr ? z->fp32_rounded + range.first : nullptr;
            z->own_params[u] = nullptr;
        } else if (param_buffer != NOT_BUFFERED) {
            z->unit_params[u] = z->param_buffers[param_buffer] + unit_buffer_offset(params, s, u);
            z->own_params[u] = slices;
            slices += range.count / s->units[u].num_ranks;
        } else {
            z->unit_params[u] = kept;
            z->own_params[u] = kept + (zero_owned(z, u).first - range.first);
            kept += range.count;
        }
    }
}

/* Fills the table of nonfinite_find. */
static void zero_locate_grad_parts(Zero* z)
{
    const Shard* s = z->shard;
    GradPart* parts = (GradPart*)malloc_checked(s->num_tensors * sizeof *parts);
    for (int t = 0; t < s->num_tensors; t++) {
        int u = s->tensors[t].unit;
        Range part = tensor_part(&s->tensors[t], unit_slice(z, u));
        parts[t] = GradPart{part.count > 0 ? zero_reduced_grad(z, u, part.first) : Values{}, part.count};
    }
    CUDA_CHECK(cudaMemcpy(z->grad_parts, parts, s->num_tensors * sizeof *parts, cudaMemcpyHostToDevice));
    free(parts);
}

/* After plan_allocate: streams, events, tables. Events are recorded once, so that the first wait for each returns. */
static void zero_start(Zero* z)
{
    int lowest, highest;    // collectives and updates go first: else their blocks wait for those of whole GEMMs
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    CUDA_CHECK(cudaStreamCreateWithFlags(&z->compute, cudaStreamNonBlocking));
    z->reduce = z->update = z->gather = z->d2h = z->compute;
    if (z->overlap) {
        for (cudaStream_t* stream : {&z->reduce, &z->update, &z->gather})
            CUDA_CHECK(cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, highest));
        CUDA_CHECK(cudaStreamCreateWithFlags(&z->d2h, cudaStreamNonBlocking));
    }
    profile_stream(z->compute, "compute");
    profile_stream(z->reduce, "reduce");
    profile_stream(z->update, "update");
    profile_stream(z->gather, "gather");
    for (cudaEvent_t* event : {&z->edge, &z->states_copied, &z->grad_buffer_free[0], &z->grad_buffer_free[1]})
        CUDA_CHECK(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventRecord(z->states_copied, z->d2h));
    for (int k = 0; k < UNIT_BUFFERS; k++) {
        CUDA_CHECK(cudaEventRecord(z->grad_buffer_free[k], z->reduce));
        z->cached_bucket[k] = -1;
    }
    for (cudaEvent_t** events : {&z->params_updated, &z->params_ready}) {
        *events = (cudaEvent_t*)malloc_checked(z->param_buckets.num_buckets * sizeof(cudaEvent_t));
        for (int b = 0; b < z->param_buckets.num_buckets; b++) {
            CUDA_CHECK(cudaEventCreateWithFlags(&(*events)[b], cudaEventDisableTiming));
            CUDA_CHECK(cudaEventRecord((*events)[b], z->gather));
        }
    }
    zero_locate_units(z);
    if (z->training) zero_locate_grad_parts(z);
    comm_shows_progress(z->comm, true);
}

static void zero_free(Zero* z)
{
    comm_shows_progress(z->comm, false);
    for (cudaEvent_t event : {z->edge, z->states_copied, z->grad_buffer_free[0], z->grad_buffer_free[1]})
        CUDA_CHECK(cudaEventDestroy(event));
    for (cudaEvent_t* events : {z->params_updated, z->params_ready}) {
        for (int b = 0; b < z->param_buckets.num_buckets; b++) CUDA_CHECK(cudaEventDestroy(events[b]));
        free(events);
    }
    CUDA_CHECK(cudaStreamDestroy(z->compute));
    if (z->overlap)
        for (cudaStream_t stream : {z->reduce, z->update, z->gather, z->d2h}) CUDA_CHECK(cudaStreamDestroy(stream));
    free(z->unit_grads);
    free(z->whole_grads);
    free(z->unit_params);
    free(z->own_params);
}

/* Frees host tables that zero_plan has allocated outside of the plan. */
static void zero_optimizer_free(Zero* z)
{
    if (z->muon != nullptr) free(z->muon->tensors);
    free(z->muon);
    free(z->gapped_first);
    z->muon = nullptr;
    z->gapped_first = nullptr;
}
