/* test_optimizer.cu: steps of an optimizer on given gradients, at any stage and number of ranks; test_optimizer.py runs
 * it and compares the results.
 *   test_optimizer TP FOLDER FLAGS...   reads FOLDER/params.bin (P) and FOLDER/grads.bin (steps,P), writes
 *                                       FOLDER/out.0.bin ... one for each of TP parts
 * All fp32, tensors one after another. Each rank adds a share of its own of every gradient. With TP > 1 unit 1 is as
 * under tensor parallelism: rank t + TP * d has part t of it, which it shares with the ranks that have the same t. Then
 * two tensors form units of their own as tensors stored in fp32 do, one of each group. */
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
enum { NUM_TENSORS = sizeof tensor_rows / sizeof tensor_rows[0], NUM_UNITS = 3 };

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

static void step(Zero* z, const Run* run, const float* grads, float share, float* scratch)
{
    for (int u = 0; u < z->shard->num_units; u++) spoil_gradient(z, u);
    zero_step_begin(z);
    for (int u = 0; u < z->shard->num_units; u++) zero_params_begin(z, u);   // as a forward asks for them
    for (int u = z->shard->num_units - 1; u >= 0; u--) {
        if (unit_is_buffered(&z->grad_buckets, u)) spoil_gradient(z, u);
        float* grad = zero_gradient_begin(z, u);
        for (int t = 0; t < NUM_TENSORS; t++) {
            const Tensor* tensor = &z->shard->tensors[t];
            if (tensor->unit != u) continue;
            for (size_t i = 0; i < tensor_elems(tensor); i++) scratch[i] = share * grads[tensor->logical_first + i];
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

int main(int argc, char** argv)
{
    static Run run_;
    Run* run = &run_;
    Flags flags;
    ENSURE(argc > 2, "usage: test_optimizer TP FOLDER FLAGS...");
    const int tp = atoi(argv[1]), num_groups = tp > 1 ? 2 : 1;
    const char* folder = argv[2];
    flags_parse(&flags, &flag_words_of_rows, argc - 2, argv + 2);
    rates_refuse(&flags);
    run->flags = &flags;
    comm_init(&run->comm, 600);
    device_init(&run->device, run->comm.host_rank, run->comm.host_num_ranks, 0);
    Group groups[2] = {};           // all ranks, and those that have the same part
    group_all(&groups[0], &run->comm);
    group_connect(&groups[0]);
    if (tp > 1) group_split(&groups[1], &groups[0], run->comm.rank % tp, run->comm.rank / tp, "dp");
    Shard* shard = &run->model.shard;
    place_tensors(shard, &flags, groups, num_groups);
    size_t num_params, num_grads;
    float* params = read_floats(folder, "params.bin", &num_params);
    float* grads = read_floats(folder, "grads.bin", &num_grads);
    ENSURE(num_params == shard->num_params, "params.bin holds %zu, need %zu", num_params, shard->num_params);
    run->num_steps = num_grads / num_params;
    run->global_batch = run->T = 1;
    run->config = step_config(run);
    matmul_init();
    bool persistent[NUM_UNITS + 2] = {};
    for (int u = 0; u < shard->num_fp32_units; u++) persistent[u] = true;
    const int visits[NUM_UNITS + 2] = {0, 1, 2, 3, 4};
    ZeroConfig config = {};
    config.stage = (int)flags.zero;
    config.persistent = persistent;
    config.num_micro_steps = 1;
    config.training = true;
    config.optimizer = optimizer_find(flags.optimizer);
    config.overlap = flags.overlap != 0;
    config.deterministic = flags.deterministic;
    config.visits = visits;
    config.num_visits = shard->num_units;
    Zero* z = &run->zero;
    zero_plan(z, &run->plan, shard, groups, num_groups, &config);
    plan_add_bytes(&run->plan, "GEMM workspace", Place::DEVICE, matmul_workspace_bytes(), nullptr);
    plan_allocate(&run->plan);
    zero_start(z);
    load_params(z, params);
    StepState state = step_state_init(run->config, 1);
    CUDA_CHECK(cudaMemcpy(z->state, &state, sizeof state, cudaMemcpyHostToDevice));
    const int R = run->comm.num_ranks;
    float* scratch = (float*)malloc_checked(num_params * sizeof(float));
    size_t asked_bytes = comm_asked_so_far(&run->comm);
    for (size_t i = 0; i < run->num_steps; i++)
        step(z, run, grads + i * num_params, 2.0f * (float)(run->comm.rank + 1) / (float)(R * (R + 1)), scratch);
    asked_bytes = comm_asked_so_far(&run->comm) - asked_bytes;
    ENSURE(asked_bytes == run->num_steps * sent_bytes_per_step(run), "rank %d sent %zu bytes, planned %zu a step",
           run->comm.rank, asked_bytes, sent_bytes_per_step(run));
    zero_ensure_replicas(z, run->num_steps);
    save_params(z, folder, scratch, tp);
    size_t state_bytes = 0;
    for (int i = 0; i < run->plan.num_rows; i++)
        if (strcmp(run->plan.rows[i].label, "optimizer states") == 0) state_bytes += run->plan.rows[i].bytes;
    SAY("%zu steps, %zu bytes a step, states %zu elements of %zu\n", run->num_steps, sent_bytes_per_step(run),
        state_bytes / sizeof(float), z->stage > 0 ? shard->slice_elems : shard->num_elems);
    zero_free(z);
    zero_optimizer_free(z);
    buckets_free(&z->grad_buckets);
    buckets_free(&z->param_buckets);
    plan_free(&run->plan);
    shard_free(shard);
    for (float* p : {params, grads, scratch}) free(p);
    matmul_free();
    for (int g = 0; g < num_groups; g++) group_free(&groups[g]);
    comm_free(&run->comm);
    return 0;
}
