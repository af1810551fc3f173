/* start.cuh: a run from its flags to allocated memory with weights in it, and its end.
 *   run_prepare    flags, files and plan: all that can be refused before anything is allocated
 *   run_allocate   memory, streams, the state of the step          weights_start   weights: a folder's, or new ones */
#pragma once
#include "bench.cuh"
#include "fit.cuh"
#include "folder.cuh"
#include "layout.cuh"
#include "zero/host_memory.h"
#include "zero/init.h"

static void weights_init(Run* run)
{
    const Shard* s = &run->model.shard;
    float* staging = run->zero.staging;
    for (int i = 0; i < s->num_tensors; i++) {
        const Tensor* t = &s->tensors[i];
        Range part = tensor_part(t, zero_owned(&run->zero, t->unit));
        for (size_t done = 0; done < part.count; ) {
            size_t n = part.count - done < STAGING_ELEMS ? part.count - done : STAGING_ELEMS;
            tensor_init(staging, t, part.first + done, n, (uint64_t)run->flags->seed);
            zero_state_from_host(&run->zero, STATE_WEIGHTS, t->unit, part.first + done, n, staging);
            done += n;
        }
    }
    zero_params_loaded(&run->zero);
}

/* Weights of a checkpoint (with checksums), of another folder, or new ones from the seed. */
static void weights_start(Run* run, const char* folder, bool from_scratch)
{
    const Config* c = &run->model.config;
    char file[4096], why[1024];
    size_t read_bytes;
    bool is_checkpoint = path_exists(folder, "state.json", file);
    comm_broadcast_host(&run->comm, &is_checkpoint, sizeof is_checkpoint);
    if (c->hf_text == nullptr || from_scratch) weights_init(run);
    else if (!is_checkpoint) weights_load(&run->zero, folder, c->tied);
    else if (checkpoint_load(&run->zero, folder, c->tied, nullptr, &read_bytes, why) != Outcome::WELL) die("%s", why);
}

/* Two ranks on one GPU would wait for one another in NCCL, which refuses it at best. */
static void ensure_own_gpu(const Run* run)
{
    if (gpu_may_be_shared()) return;
    typedef struct { char host[64], uuid[48]; } Gpu;
    const Comm* c = &run->comm;
    Gpu own = {}, *all = (Gpu*)malloc_checked(c->num_ranks * sizeof *all);
    gethostname(own.host, sizeof own.host - 1);
    memcpy(own.uuid, run->device.uuid, sizeof own.uuid);
    comm_gather_host(c, all, &own, sizeof own);
    for (int r = 0; c->rank == 0 && r < c->num_ranks; r++)
        for (int other = 0; other < r && own.uuid[0]; other++)
            ENSURE(strcmp(all[r].uuid, all[other].uuid) != 0, "ranks %d and %d have the same GPU, %s %s on %s: start "
                   "at most one rank per GPU, and show each rank all GPUs of its host or one of its own", other, r,
                   run->device.name, all[r].uuid, all[r].host);
    free(all);
}

/* NCCL, cuBLASLt and the CUDA runtime take device memory at their first use: they are used once, before the free memory
 * is asked for. The collectives are NCCL's own, so that they are not counted as the run's. */
static void libraries_start(Run* run)
{
    layout_connect(run);
    matmul_init();
#ifdef DEVICE_CUDA
    const int n = 16 * run->comm.num_ranks;
    float* sums;
    floatX* matrix;
    CUDA_CHECK(cudaMalloc(&sums, n * sizeof *sums));
    CUDA_CHECK(cudaMalloc(&matrix, 3 * 16 * 16 * sizeof *matrix));
    CUDA_CHECK(cudaMemset(matrix, 0, 3 * 16 * 16 * sizeof *matrix));
    matmul_forward(matrix, matrix + 256, matrix + 512, nullptr, 16, 16, 16, Layout::OUT_IN, 0);
    const Group* groups[4];
    const int num_groups = layout_groups(run, groups);
    for (int i = 0; i < num_groups; i++) group_warm_up(groups[i], sums, 16);
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaFree(sums));
    CUDA_CHECK(cudaFree(matrix));
#endif
}

/* Flags, files and plan: all that can be refused before anything is allocated. Returns the model's name; resume_path is
 * the checkpoint to resume from, or empty. */
static const char* run_prepare(Run* run, bool trains, char (&resume_path)[4096])
{
    const Flags* f = run->flags;
    device_init(&run->device, run->comm.host_rank, run->comm.host_num_ranks, (size_t)f->device_mb);
    ensure_own_gpu(run);
    run->owns_out = trains && f->out[0];       // --bench has no -o
    if (run->owns_out && run->comm.rank == 0) folder_lock(f->out);
    choose_resume(run, resume_path);
    const char* model_name = f->model[0] ? model_of_run(run, f->model)
                             : resume_path[0] ? resume_path : DEFAULT_MODEL;
    model_name = model_of_hub(run, model_name);
    const bool data_is_there = access(f->data, R_OK) == 0 || token_is_mixture(f->data);
    if ((trains && !f->bench) || f->eval || (f->plan && data_is_there)) open_data(run);
    choose_model(run, model_name, run->train_set.num_files > 0 ? (int)run->train_set.files[0].vocab_size : 0);
    choose_tokenizer(run, model_name);
    open_tokenizer(run, trains);
    int context = run->model.config.context;
    run->T = f->seq_len > 0 ? (int)f->seq_len : context < 1024 ? context : 1024;
    ENSURE(run->T <= context, "-t %d is longer than the model's context of %d positions: lower it", run->T, context);
    dropout_refuse(run);
    if (f->plan && f->ranks > 0) run->comm.num_ranks = (int)f->ranks;
    layout_choose(run);
    if (f->gpu[0]) device_imagine(&run->device, f->gpu);
    else if (trains || f->plan || f->auto_)
        device_measure(&run->device, run->comm.host_num_ranks, f->plan || f->auto_);
    if (!f->elastic || !batch_of_run(run, resume_path)) batch_arithmetic(run);
    batch_refuse(run);
    layout_refuse_rows(run);
    const int group_ranks[] = {run->comm.num_ranks, run->dp};
    model_tensors(&run->model.shard, &run->model.config, &run->model.whole, group_ranks, run->num_groups,
                  f->fp32_tensors);
    rates_apply(&run->model.shard, f);
    run->setting = Setting{(int)f->zero, Recompute::NONE, 1, run->B, run->G, offloaded_from_flag(f->offload),
                           storage_from_flags(f)};
    recompute_from_flag(&run->setting, f->recompute, run->model.config.L);
    if (!f->plan) libraries_start(run);
    if (f->auto_) setting_choose(run, device_free_bytes(run));
    const char* mismatch = offload_mismatch(&run->setting, f);
    if (mismatch != nullptr) die_usage("--offload %s", mismatch);
    run->batch_ramp = ramp_parse("--batch-ramp", f->batch_ramp, (size_t)run->B * run->dp,
                                 run->global_batch);
    run->seq_ramp = ramp_parse("--seq-ramp", f->seq_ramp, 8, run->T);
    if (run->train_set.num_files > 0) open_loaders(run);
    if (f->bench) run->num_steps = bench_total_steps(f);
    run->config = step_config(run);
    if (resume_path[0] && trains && !f->bench) resume_foresee(run, resume_path);
    plan_run(run, trains || f->plan);
    return model_name;
}

/* Before any rank pins memory: is there enough for all ranks of this host? Pinned memory cannot be swapped out, so that
 * a kernel which is short of it ends processes. */
static void host_memory_ensure(Run* run)
{
    const HostMemory memory = host_memory();
    const double mib = 1048576.0, need_bytes = (double)plan_pinned_bytes(&run->plan) * run->comm.host_num_ranks;
    const bool is_short = need_bytes > memory.free_bytes;
    comm_barrier(&run->comm);                        // all have looked before one allocates
    ENSURE(!is_short, "host memory: %.1f MiB are pinned on this host, %.1f MiB (list above) by each of its %d ranks, "
           "have %.1f MiB free (%s): lower --offload-share or offload less, leave out -o where 'states being saved' is "
           "the most, or raise -z or the number of hosts", need_bytes / mib, plan_pinned_bytes(&run->plan) / mib,
           run->comm.host_num_ranks, memory.free_bytes / mib, memory.limit);
}

static void run_allocate(Run* run)
{
    size_t need_bytes = plan_bytes(&run->plan, Place::DEVICE), have_bytes = device_free_bytes(run);
    if (need_bytes > have_bytes) {
        if (run->comm.rank == 0) {
            fprintf(stderr, "need %.1f MiB, have %.1f MiB. Change\n", need_bytes / 1048576.0, have_bytes / 1048576.0);
            ladder_print(run, stderr, have_bytes);
        }
    }
    host_memory_ensure(run);
    plan_allocate(&run->plan);
    zero_start(&run->zero);
    model_start(&run->model);
    for (int k = 0; k < 2; k++) CUDA_CHECK(cudaEventCreateWithFlags(&run->batch_copied[k], cudaEventDisableTiming));
    StepState state = step_state_init(run->config, first_loss_scale(run->flags));
    CUDA_CHECK(cudaMemcpy(run->zero.state, &state, sizeof state, cudaMemcpyHostToDevice));
}

static void run_free(Run* run)
{
    signals_end();
    log_close(&run->log);
    if (run->train != nullptr) loader_close(run->train);
    if (run->val != nullptr) loader_close(run->val);
    for (cudaEvent_t event : run->batch_copied) CUDA_CHECK(cudaEventDestroy(event));
    profile_free();
    saver_free(&run->saver);
    if (run->model.offloads) offload_free(&run->model.inputs);
    zero_free(&run->zero);
    plan_ensure_held(&run->plan, "at the end");
    plan_run_free(run);
    plan_free(&run->plan);
    shard_free(&run->model.shard);
    token_set_close(&run->train_set);
    token_set_close(&run->val_set);
    free((void*)run->model.config.hf_text);
    model_files_free(&run->small_files);
    if (run->tokenizer != nullptr) tokenizer_close(run->tokenizer);
    cJSON_Delete(run->products);
    matmul_free();
    layout_free(run);
}
