/* test_layouts.h: part of test_optimizer.cu: tensors in parts, which are saved by some ranks and loaded by others.
 *   test_optimizer layout TP FOLDER -n STEPS [-o OUT] [--resume STEP_FOLDER] FLAGS...
 * Rank t + TP * d has part t of every tensor that is cut, and shares it with the ranks that have the same t. New
 * weights, or those of a checkpoint; steps up to STEPS on the gradients of FOLDER/grads.bin (steps,P), of which one
 * rank of each group has its part and the others 0, so that no sum depends on the layout. Prints the hash of the state
 * before the first step and after each, then saves to OUT and, if all ranks see it, exports the weights in bf16 to
 * OUT/export. */

enum class PartOf { ALL, ROWS, COLUMNS, VOCABULARY };

/* A vocabulary whose last parts have fewer rows or none; q, k and v side by side, with their bias, and one above the
 * other; matrices cut by rows and by columns; what all have; in fp32 one of each group. */
static const struct LayoutRow {
    const char* name;
    size_t rows, cols;
    int unit, num_fused;
    PartOf part;
    bool fp32, joined;
} layout_rows[] = {
    {"wte.weight", 37, 8, 0, 1, PartOf::VOCABULARY, false, false},
    {"wpe.weight", 12, 8, 1, 1, PartOf::ALL, false, false},
    {"h.norm.weight", 17, 1, 1, 1, PartOf::ALL, true, false},
    {"h.qkv.weight", 16, 72, 2, 3, PartOf::COLUMNS, false, false},
    {"h.qkv.bias", 72, 1, 2, 3, PartOf::ROWS, false, false},
    {"h.proj.weight", 24, 16, 2, 1, PartOf::ROWS, false, false},
    {"h.q.weight", 24, 10, 3, 1, PartOf::ROWS, false, false},
    {"h.k.weight", 8, 10, 3, 1, PartOf::ROWS, false, true},
    {"h.v.weight", 8, 10, 3, 1, PartOf::ROWS, false, true},
    {"h.o.weight", 10, 24, 3, 1, PartOf::COLUMNS, false, false},
    {"h.fc.bias", 20, 1, 3, 1, PartOf::ROWS, true, false},
    {"norm.weight", 16, 1, 4, 1, PartOf::ALL, false, false},
};
enum { NUM_LAYOUT_ROWS = sizeof layout_rows / sizeof layout_rows[0], LAYOUT_VOCABULARY = 64 };

static void layout_tensor(Tensor* t, const LayoutRow* row, size_t part, size_t num_parts)
{
    *t = Tensor{};
    snprintf(t->name, sizeof t->name, "%s", row->name);
    t->shape[0] = t->file_rows = t->padded_rows = row->rows;
    t->shape[1] = t->file_cols = row->cols;
    t->num_dims = row->cols > 1 ? 2 : 1;
    t->unit = row->unit;
    t->fp32 = row->fp32;
    t->joined = row->joined;
    t->decay = t->num_dims == 2;
    t->num_fused = row->num_fused;
    t->init_std = 0.02;
    t->group = num_parts > 1 && row->part != PartOf::ALL;
    switch (row->part) {
    case PartOf::ALL: break;
    case PartOf::ROWS: tensor_cut(t, 0, part, num_parts); break;
    case PartOf::COLUMNS: tensor_cut(t, 1, part, num_parts); break;
    case PartOf::VOCABULARY:
        t->padded_rows = LAYOUT_VOCABULARY / num_parts;
        t->file_first_row = part * t->padded_rows;
        t->shape[0] = t->file_first_row < row->rows ? row->rows - t->file_first_row : 0;
        if (t->shape[0] > t->padded_rows) t->shape[0] = t->padded_rows;
        break;
    }
}

static void layout_place(Driver* d)
{
    const int group_ranks[2] = {d->groups[0].num_ranks, d->groups[1].num_ranks};
    Tensor* tensors = (Tensor*)malloc_checked(NUM_LAYOUT_ROWS * sizeof(Tensor));
    for (int i = 0; i < NUM_LAYOUT_ROWS; i++)
        layout_tensor(&tensors[i], &layout_rows[i], d->run.comm.rank % d->tp, d->tp);
    shard_build(&d->run.model.shard, tensors, NUM_LAYOUT_ROWS, group_ranks, d->num_groups);
    rates_apply(&d->run.model.shard, &d->flags);
}

static void layout_say(Run* run)
{
    const unsigned long long hash = zero_state_hash(&run->zero);
    SAY("step %zu hash %016llx\n", run->step, hash);
}

static void layout_init(Zero* z, uint64_t seed)
{
    for (int i = 0; i < z->shard->num_tensors; i++) {
        const Tensor* t = &z->shard->tensors[i];
        const Range part = tensor_part(t, zero_owned(z, t->unit));
        tensor_init(z->staging, t, part.first, part.count, seed);
        if (part.count > 0) zero_state_from_host(z, STATE_WEIGHTS, t->unit, part.first, part.count, z->staging);
    }
    zero_params_loaded(z);
}

/* Bytes in the files of what this rank owns of all states. */
static size_t layout_own_bytes(const Zero* z)
{
    size_t bytes = 0;
    for (int i = 0; i < NUM_STATES * z->shard->num_tensors; i++) {
        const Tensor* t = &z->shard->tensors[i % z->shard->num_tensors];
        if (state_is_kept(z, i / z->shard->num_tensors, t))
            bytes += tensor_part(t, unit_slice(z, t->unit)).count * sizeof(float);
    }
    return bytes;
}

static void layout_resume(Run* run)
{
    RunState state;
    size_t read_bytes;
    char why[1024];
    if (checkpoint_load(&run->zero, run->flags->resume, false, &state, &read_bytes, why) != Outcome::WELL)
        die("%s", why);
    const bool shared = folder_is_shared(&run->comm, run->flags->resume);
    const size_t own_bytes = layout_own_bytes(&run->zero);
    ENSURE(read_bytes == own_bytes || !shared, "%zu bytes of tensors were read, this rank's slices have %zu",
           read_bytes, own_bytes);
    StepState device_state = step_state_init(run->config, 1);
    device_state.num_applied = state.num_applied;
    CUDA_CHECK(cudaMemcpy(run->zero.state, &device_state, sizeof device_state, cudaMemcpyHostToDevice));
    run->step = state.step;
}

static void layout_files(const char* folder, void* context) { (void)folder; (void)context; }

static void layout_save(Run* run)
{
    SaverConfig config = {};
    config.out = run->flags->out;
    config.small_files = layout_files;
    RunState state = {};
    state.step = run->step;
    state.num_applied = run->step;
    state.seq_len = state.global_batch = 1;
    saver_start(&run->saver, &config, 0);
    saver_begin(&run->saver, &state);
    saver_wait(&run->saver);
    ENSURE(!run->saver.failed, "%s", run->saver.why);
    char folder[4096];
    snprintf(folder, sizeof folder, "%s/export", run->flags->out);
    if (!run->saver.gathers) weights_export(&run->zero, folder, SafeDtype::BF16, 4000, layout_files, nullptr);
}

static int layout_main(Driver* d, int num_words, char** words)
{
    driver_begin(d, num_words, words);
    layout_place(d);
    Run* run = &d->run;
    Zero* z = &run->zero;
    const size_t num_params = run->model.shard.num_params;
    run->num_steps = (size_t)d->flags.steps;
    driver_allocate(d);
    size_t num_grads;
    float* grads = read_floats(d->folder, "grads.bin", &num_grads);
    ENSURE(num_grads >= run->num_steps * num_params, "grads.bin holds %zu, need %zu", num_grads,
           run->num_steps * num_params);
    if (d->flags.resume[0]) layout_resume(run);
    else layout_init(z, (uint64_t)d->flags.seed);
    layout_say(run);
    float* scratch = (float*)malloc_checked(num_params * sizeof(float));
    const float shares[2] = {run->comm.rank == 0 ? 1.0f : 0.0f, run->comm.rank < d->tp ? 1.0f : 0.0f};
    while (run->step < run->num_steps) {
        step(z, run, grads + run->step++ * num_params, shares, scratch);
        layout_say(run);
    }
    zero_ensure_replicas(z, run->step);
    if (d->flags.out[0]) layout_save(run);
    for (float* p : {grads, scratch}) free(p);
    driver_end(d);
    return 0;
}
