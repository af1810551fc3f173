/* test_optimizer.cu: steps of an optimizer on given gradients, at any stage and number of ranks; test_optimizer.py runs
 * it and knows what must come out.
 *   test_optimizer FOLDER FLAGS...   reads FOLDER/params.bin (P) and FOLDER/grads.bin (steps,P), writes FOLDER/out.bin
 * All fp32, tensors one after another. Each rank adds a share of its own of every gradient. */
#include "run/run.cuh"

/* Two embeddings' worth of nothing in particular: a padded matrix, a unit of hidden ones in both layouts, q k v side by
 * side, vectors, and a last unit that is smaller than the alignment. */
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

static void place_tensors(Shard* shard, const Flags* f, int num_ranks)
{
    Tensor* tensors = (Tensor*)malloc_checked(NUM_TENSORS * sizeof(Tensor));
    for (int i = 0; i < NUM_TENSORS; i++) {
        const auto& row = tensor_rows[i];
        Tensor* t = &tensors[i];
        *t = Tensor{};
        snprintf(t->name, sizeof t->name, "%s", row.name);
        t->shape[0] = t->file_rows = row.rows;
        t->shape[1] = row.cols;
        t->num_dims = row.cols > 1 ? 2 : 1;
        t->padded_rows = row.padded_rows;
        t->unit = row.unit;
        t->decay = t->num_dims == 2;
        t->hidden = t->decay && row.unit == 1;
        t->in_out = i != 4;
        t->num_fused = i == 1 ? 3 : 1;
    }
    shard_build(shard, tensors, NUM_TENSORS, num_ranks);
    rates_apply(shard, f);
}

static void load_params(Zero* z, const float* params)
{
    for (int t = 0; t < NUM_TENSORS; t++) {
        const Tensor* tensor = &z->shard->tensors[t];
        Range part = tensor_part(tensor, zero_owned(z, tensor->unit));
        const float* from = params + tensor->logical_first + (part.first - tensor->first);
        if (part.count > 0)
            CUDA_CHECK(cudaMemcpy(zero_own_param(z, tensor->unit, part.first), from, part.count * sizeof(float),
                                  cudaMemcpyHostToDevice));
    }
    zero_params_loaded(z);
}

static void step(Zero* z, const Run* run, const float* grads, float share, float* scratch)
{
    zero_step_begin(z);
    for (int u = 0; u < NUM_UNITS; u++) zero_params_begin(z, u);     // as a forward asks for them
    for (int u = NUM_UNITS - 1; u >= 0; u--) {
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

/* Each rank its slices. */
static void save_params(Zero* z, const char* folder, float* scratch)
{
    char path[4200];
    snprintf(path, sizeof path, "%s/out.bin", folder);
    comm_barrier(z->comm);
    zero_params_settle(z);
    CUDA_CHECK(cudaDeviceSynchronize());
    int fd = open(path, O_WRONLY | O_CREAT, 0666);
    ENSURE(fd >= 0, "%s: cannot be written", path);
    for (int t = 0; t < NUM_TENSORS; t++) {
        const Tensor* tensor = &z->shard->tensors[t];
        Range part = tensor_part(tensor, shard_slice(z->shard, tensor->unit, z->comm->rank));
        const size_t bytes = part.count * sizeof(float);
        if (bytes == 0) continue;
        CUDA_CHECK(cudaMemcpy(scratch, zero_own_param(z, tensor->unit, part.first), bytes, cudaMemcpyDeviceToHost));
        const off_t at = (off_t)((tensor->logical_first + (part.first - tensor->first)) * sizeof(float));
        ENSURE(pwrite(fd, scratch, bytes, at) == (ssize_t)bytes, "%s: cannot be written", path);
    }
    close(fd);
    comm_barrier(z->comm);
}

int main(int argc, char** argv)
{
    static Run run_;
    Run* run = &run_;
    Flags flags;
    ENSURE(argc > 1, "usage: test_optimizer FOLDER FLAGS...");
    flags_parse(&flags, &flag_words_of_rows, argc - 1, argv + 1);
    rates_refuse(&flags);
    run->flags = &flags;
    comm_init(&run->comm, 600);
    device_init(&run->device, run->comm.host_rank, run->comm.host_num_ranks, 0);
    Shard* shard = &run->model.shard;
    place_tensors(shard, &flags, run->comm.num_ranks);
    size_t num_params, num_grads;
    float* params = read_floats(argv[1], "params.bin", &num_params);
    float* grads = read_floats(argv[1], "grads.bin", &num_grads);
    ENSURE(num_params == shard->num_params, "params.bin holds %zu, need %zu", num_params, shard->num_params);
    run->num_steps = num_grads / num_params;
    run->global_batch = run->T = 1;
    run->config = step_config(run);
    comm_init_nccl(&run->comm);
    matmul_init();
    const bool resident[NUM_UNITS] = {};
    const int visits[NUM_UNITS] = {0, 1, 2};
    ZeroConfig config = {};
    config.stage = (int)flags.zero;
    config.resident = resident;
    config.num_micro_steps = 1;
    config.training = true;
    config.optimizer = optimizer_find(flags.optimizer);
    config.overlap = flags.overlap != 0;
    config.deterministic = flags.deterministic;
    config.visits = visits;
    config.num_visits = NUM_UNITS;
    Zero* z = &run->zero;
    zero_plan(z, &run->plan, shard, &run->comm, &config);
    plan_add_bytes(&run->plan, "workspace of the matrix products", Place::DEVICE, matmul_workspace_bytes(), nullptr);
    plan_allocate(&run->plan);
    zero_start(z);
    load_params(z, params);
    StepState state = step_state_init(run->config, 1);
    CUDA_CHECK(cudaMemcpy(z->state, &state, sizeof state, cudaMemcpyHostToDevice));
    const int R = run->comm.num_ranks;
    float* scratch = (float*)malloc_checked(num_params * sizeof(float));
    size_t asked_bytes = run->comm.asked_bytes;
    for (size_t i = 0; i < run->num_steps; i++)
        step(z, run, grads + i * num_params, 2.0f * (float)(run->comm.rank + 1) / (float)(R * (R + 1)), scratch);
    asked_bytes = run->comm.asked_bytes - asked_bytes;
    ENSURE(asked_bytes == run->num_steps * wire_bytes_per_step(run), "rank %d sent %zu bytes, planned %zu a step",
           run->comm.rank, asked_bytes, wire_bytes_per_step(run));
    save_params(z, argv[1], scratch);
    size_t state_bytes = 0;
    for (int i = 0; i < run->plan.num_rows; i++)
        if (strcmp(run->plan.rows[i].label, "optimizer states") == 0) state_bytes += run->plan.rows[i].bytes;
    SAY("%zu steps, %zu bytes a step, states %zu elements of %zu\n", run->num_steps, wire_bytes_per_step(run),
        state_bytes / sizeof(float), shard->num_elems / (z->stage > 0 ? R : 1));
    zero_free(z);
    zero_optimizer_free(z);
    buckets_free(&z->grad_buckets);
    buckets_free(&z->param_buckets);
    plan_free(&run->plan);
    shard_free(shard);
    for (float* p : {params, grads, scratch}) free(p);
    matmul_free();
    comm_free(&run->comm);
    return 0;
}
