/* test_optimizer.cu: steps of an optimizer on given gradients, at any stage and number of ranks; test_optimizer.py runs
 * it and compares the results.
 *   test_optimizer TP FOLDER FLAGS...   reads FOLDER/params.bin (P) and FOLDER/grads.bin (steps,P), writes
 *                                       FOLDER/out.0.bin ... one for each of TP parts
 * All fp32, tensors one after another. Each rank adds a share of its own of every gradient. With TP > 1 unit 1 is as
 * under tensor parallelism: rank t + TP * d has part t of it, which it shares with the ranks that have the same t. Then
 * two tensors form units of their own as tensors stored in fp32 do, one of each group.
 *   test_optimizer layout TP FOLDER FLAGS...   test_layouts.h: parts of tensors, checkpoints between layouts */
#include "run/run.cuh"

/* Tensors of all kinds: a padded matrix, a unit of hidden ones in both layouts, q k v side by side, vectors, and a last
 * unit that is smaller than the alignment. */
static const struct { const char* name; size_t rows, cols, padded_rows; int unit; } tensor_rows[] = {
    {"wte.weight", 37, 8, 40, 0},
    {"h.qkv.weight", 16, 72, 16, 1},
    {"h.qkv.bias", 72, 1, 72, 1},
    {"h.up.weight", 16, 40, 16, 1},
    {"h.down.weight", 40, 16, 40, 1},
    {"norm.weight", 16, 1, 16, 2},
};
enum { NUM_TENSORS = sizeof tensor_rows / sizeof tensor_rows[0] };

static float* read_floats(const char* folder, const char* name, size_t* count)
{
    char path[4200];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE* f = fopen(path, "rb");
    ENSURE(f != nullptr && fseek(f, 0, SEEK_END) == 0, "%s: cannot be read", path);
    *count = (size_t)ftell(f) / sizeof(float);
    rewind(f);
    float* values = (float*)malloc_checked(*count * sizeof(float));
    ENSURE(fread(values, sizeof(float), *count, f) == *count, "%s: is short", path);
    fclose(f);
    return values;
}

static void place_tensors(Shard* shard, const Flags* f, const Group* groups, int num_groups)
{
    const int group_ranks[2] = {groups[0].num_ranks, groups[1].num_ranks};
    Tensor* tensors = (Tensor*)malloc_checked(NUM_TENSORS * sizeof(Tensor));
    for (int i = 0; i < NUM_TENSORS; i++) {
        const auto& row = tensor_rows[i];
        Tensor* t = &tensors[i];
        *t = Tensor{};
        snprintf(t->name, sizeof t->name, "%s", row.name);
        t->shape[0] = t->file_rows = row.rows;
        t->shape[1] = t->file_cols = row.cols;
        t->num_dims = row.cols > 1 ? 2 : 1;
        t->padded_rows = row.padded_rows;
        t->unit = row.unit;
        t->group = num_groups > 1 && row.unit == 1;
        t->fp32 = num_groups > 1 && row.cols == 1;
        t->decay = t->num_dims == 2;
        t->hidden = t->decay && row.unit == 1;
        t->grad_overwritten = t->hidden;
        t->in_out = i != 4;
        t->num_fused = i == 1 ? 3 : 1;
    }
    shard_build(shard, tensors, NUM_TENSORS, group_ranks, num_groups);
    rates_apply(shard, f);
}

static void load_params(Zero* z, const float* params)
{
    for (int t = 0; t < NUM_TENSORS; t++) {
        const Tensor* tensor = &z->shard->tensors[t];
        Range part = tensor_part(tensor, zero_owned(z, tensor->unit));
        const float* from = params + tensor->logical_first + (part.first - tensor->first);
        if (part.count > 0)
            CUDA_CHECK(cudaMemcpy(zero_state(z, STATE_WEIGHTS, tensor->unit, part.first).at, from,
                                  part.count * sizeof(float), cudaMemcpyHostToDevice));
    }
    zero_params_loaded(z);
}

/* NaN where unit u's gradient will be: what is neither cleared nor overwritten then, padding too, fails the step. */
static void spoil_gradient(Zero* z, int u)
{
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemsetAsync(z->unit_grads[u], 0xff, z->shard->units[u].range.count * sizeof(float), z->compute));
}

/* shares: by group, what this rank adds of each gradient. */
static void step(Zero* z, const Run* run, const float* grads, const float (&shares)[2], float* scratch)
{
    for (int u = 0; u < z->shard->num_units; u++) spoil_gradient(z, u);
    zero_step_begin(z);
    for (int u = 0; u < z->shard->num_units; u++) zero_params_begin(z, u);   // as a forward asks for them
    zero_backward_begin(z);
    for (int u = z->shard->num_units - 1; u >= 0; u--) {
        if (unit_is_buffered(&z->grad_buckets, u)) spoil_gradient(z, u);
        float* grad = zero_gradient_begin(z, u);
        for (int t = 0; t < z->shard->num_tensors; t++) {
            const Tensor* tensor = &z->shard->tensors[t];
            if (tensor->unit != u) continue;
            const Rectangle place = tensor_logical(tensor, tensor->first);
            for (size_t i = 0; i < tensor_elems(tensor); i++)
                scratch[i] = shares[tensor->group] * grads[element_index(place, i)];
            CUDA_CHECK(cudaMemcpyAsync(grad + (tensor->first - z->shard->units[u].range.first), scratch,
                                       tensor_elems(tensor) * sizeof(float), cudaMemcpyHostToDevice, z->compute));
            CUDA_CHECK(cudaStreamSynchronize(z->compute));
        }
        zero_gradient_end(z, u, 0, 1);
    }
    const double num_toks = z->comm->rank == 0;
    CUDA_CHECK(cudaMemcpyAsync(z->step_sums + NUM_TOKS, &num_toks, sizeof num_toks, cudaMemcpyHostToDevice,
                               z->compute));
    CUDA_CHECK(cudaStreamSynchronize(z->compute));
    zero_step_end(z, run->config, optimizer_config(run->flags), 0);
    CUDA_CHECK(cudaStreamSynchronize(z->compute));
}

/* Each rank writes its slices: into the file of its part, or of a tensor that all have into all files. */
static void save_params(Zero* z, const char* folder, float* scratch, int tp)
{
    char path[4200];
    comm_barrier(z->comm);
    zero_params_settle(z);
    CUDA_CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < tp * NUM_TENSORS; i++) {
        const Tensor* tensor = &z->shard->tensors[i % NUM_TENSORS];
        const int file = i / NUM_TENSORS;
        Range part = tensor_part(tensor, unit_slice(z, tensor->unit));
        const size_t bytes = part.count * sizeof(float);
        if (bytes == 0 || (tensor->group > 0 && z->comm->rank % tp != file)) continue;
        snprintf(path, sizeof path, "%s/out.%d.bin", folder, file);
        int fd = open(path, O_WRONLY | O_CREAT, 0666);
        ENSURE(fd >= 0, "%s: cannot be written", path);
        CUDA_CHECK(cudaMemcpy(scratch, zero_state(z, STATE_WEIGHTS, tensor->unit, part.first).at, bytes,
                              cudaMemcpyDeviceToHost));
        const off_t at = (off_t)((tensor->logical_first + (part.first - tensor->first)) * sizeof(float));
        ENSURE(pwrite(fd, scratch, bytes, at) == (ssize_t)bytes, "%s: cannot be written", path);
        close(fd);
    }
    comm_barrier(z->comm);
}

// ---- a run without a model

typedef struct Driver {
    Run run;
    Flags flags;
    Group groups[2];                // all ranks, and those that have the same part
    int tp, num_groups;
    const char* folder;
} Driver;

/* words: TP FOLDER FLAGS... */
static void driver_begin(Driver* d, int num_words, char** words)
{
    ENSURE(num_words > 1, "usage: test_optimizer [layout] TP FOLDER FLAGS...");
    Run* run = &d->run;
    d->tp = atoi(words[0]);
    d->num_groups = d->tp > 1 ? 2 : 1;
    d->folder = words[1];
    flags_parse(&d->flags, &flag_words_of_rows, num_words - 1, words + 1);
    rates_refuse(&d->flags);
    run->flags = &d->flags;
    comm_init(&run->comm, 600);
    device_init(&run->device, run->comm.host_rank, run->comm.host_num_ranks, 0);
    group_all(&d->groups[0], &run->comm);
    group_connect(&d->groups[0]);
    if (d->tp > 1)
        group_split(&d->groups[1], &d->groups[0], run->comm.rank % d->tp, run->comm.rank / d->tp, "dp");
}

/* After the tensors are placed: memory and the state before the first step, with the parameters 0. */
static void driver_allocate(Driver* d)
{
    Run* run = &d->run;
    const Flags* f = &d->flags;
    const Shard* shard = &run->model.shard;
    bool* persistent = (bool*)malloc_checked(shard->num_units * sizeof(bool));
    int* visits = (int*)malloc_checked(shard->num_units * sizeof(int));
    for (int u = 0; u < shard->num_units; u++) {
        persistent[u] = unit_is_fp32(shard, u);
        visits[u] = u;
    }
    run->global_batch = run->T = 1;
    run->model.config.tp = run->model.config.kv_ranks = 1;       // no model sends anything
    run->config = step_config(run);
    matmul_init();
    ZeroConfig config = {};
    config.stage = (int)f->zero;
    config.persistent = persistent;
    config.num_micro_steps = 1;
    config.training = true;
    config.storage = storage_from_flags(f);
    config.optimizer = optimizer_find(f->optimizer);
    config.overlap = f->overlap != 0;
    config.deterministic = f->deterministic;
    config.visits = visits;
    config.num_visits = shard->num_units;
    zero_plan(&run->zero, &run->plan, shard, d->groups, d->num_groups, &config);
    if (f->out[0]) saver_plan(&run->saver, &run->zero, &run->plan);
    plan_add_bytes(&run->plan, "GEMM workspace", Place::DEVICE, matmul_workspace_bytes(), nullptr);
    plan_allocate(&run->plan);
    zero_start(&run->zero);
    StepState state = step_state_init(run->config, 1);
    CUDA_CHECK(cudaMemcpy(run->zero.state, &state, sizeof state, cudaMemcpyHostToDevice));
    free(persistent);
}

static void driver_end(Driver* d)
{
    Zero* z = &d->run.zero;
    free((void*)z->visits);
    saver_free(&d->run.saver);
    zero_free(z);
    zero_optimizer_free(z);
    buckets_free(&z->grad_buckets);
    buckets_free(&z->param_buckets);
    plan_free(&d->run.plan);
    shard_free(&d->run.model.shard);
    matmul_free();
    for (int g = 0; g < d->num_groups; g++) group_free(&d->groups[g]);
    comm_free(&d->run.comm);
}

#include "test_layouts.h"

int main(int argc, char** argv)
{
    static Driver driver;
    Driver* d = &driver;
    if (argc > 1 && strcmp(argv[1], "layout") == 0) return layout_main(d, argc - 2, argv + 2);
    driver_begin(d, argc - 1, argv + 1);
    Run* run = &d->run;
    Zero* z = &run->zero;
    Shard* shard = &run->model.shard;
    place_tensors(shard, &d->flags, d->groups, d->num_groups);
    size_t num_params, num_grads;
    float* params = read_floats(d->folder, "params.bin", &num_params);
    float* grads = read_floats(d->folder, "grads.bin", &num_grads);
    ENSURE(num_params == shard->num_params, "params.bin holds %zu, need %zu", num_params, shard->num_params);
    run->num_steps = num_grads / num_params;
    driver_allocate(d);
    load_params(z, params);
    const int R = run->comm.num_ranks;
    const float share = 2.0f * (float)(run->comm.rank + 1) / (float)(R * (R + 1)), shares[2] = {share, share};
    float* scratch = (float*)malloc_checked(num_params * sizeof(float));
    size_t asked_bytes = comm_asked_so_far(&run->comm);
    for (size_t i = 0; i < run->num_steps; i++)
        step(z, run, grads + i * num_params, shares, scratch);
    asked_bytes = comm_asked_so_far(&run->comm) - asked_bytes;
    ENSURE(asked_bytes == run->num_steps * sent_bytes_per_step(run), "rank %d sent %zu bytes, planned %zu a step",
           run->comm.rank, asked_bytes, sent_bytes_per_step(run));
    zero_ensure_replicas(z, run->num_steps);
    save_params(z, d->folder, scratch, d->tp);
    size_t state_bytes = 0;
    for (int i = 0; i < run->plan.num_rows; i++)
        if (strcmp(run->plan.rows[i].label, "optimizer states") == 0) state_bytes += run->plan.rows[i].bytes;
    SAY("%zu steps, %zu bytes a step, states %zu elements of %zu\n", run->num_steps, sent_bytes_per_step(run),
        state_bytes / sizeof(float), z->stage > 0 ? shard->slice_elems : shard->num_elems);
    for (float* p : {params, grads, scratch}) free(p);
    driver_end(d);
    return 0;
}
