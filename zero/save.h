/* save.h: checkpoints written while training continues.
 *
 *   saver_start(s, ...)    once: makes the run folder, removes what an interrupted save left
 *   saver_begin(s, state)  at a step boundary: begins a save: copies the states to the host
 *   saver_poll(s)          at every later boundary: enters the next phase when all ranks have finished this one
 *   saver_wait(s)          waits until the save is on the disk, or has failed
 * all on every rank, at the same steps. The phases of a save:
 *   CREATE   rank 0: OUT/step_N.tmp and its files at full length, so that a full disk is found before data is
 *            written; meanwhile every rank copies its slices of the states to the host, on the d2h stream
 *   WRITE    every rank: its byte ranges and their checksums, fsync
 *   COMMIT   rank 0: the small files, state.json, fsync of the folder, rename to step_N, fsync of OUT; then deletes
 *            older checkpoints by --keep and --keep-every
 * A thread of low priority does the work of a phase; it makes no CUDA, NCCL or MPI call. An error in it, such as a full
 * disk or a limit on file sizes, ends the save and not the run (attempt in error.h). While a save is in progress the
 * main threads agree at step boundaries by an all-reduce of one number. A kill at any moment leaves step_N.tmp, which
 * is no checkpoint, or a complete step_N.
 *
 * The host copy has all states, 12 bytes for each parameter / R, and is in the plan. With smaller staging buffers the
 * optimizer would wait for the disk; so the next update waits for the copy to the host only. The next save waits for
 * this one. If not all ranks see the folder, rank 0 writes for all in WRITE: the others send it their slices from the
 * main thread, and training waits for that.
 *
 * Saved is what has been renamed to step_N. What fails after that, and what cannot be deleted, is reported beside it
 * (Saver.beside) and left; neither a save nor a start depends on it. */
#pragma once
#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include "checkpoint.h"

enum class SavePhase { NONE, CREATE, WRITE, COMMIT };
enum SaveStatus { SAVE_WELL, SAVE_FAILED, SAVE_BUSY };   // of one rank in a phase; that of all is the largest

typedef struct SaverConfig {
    const char* out;                                     // the run folder
    size_t keep, keep_every;                             // 0: all
    bool keeps_best;                                     // the one of the least validation loss too
    void (*small_files)(const char* folder, void* context);   // config.json and others; no CUDA or MPI call
    void* context;
} SaverConfig;

typedef struct Saver {
    SaverConfig config;
    Zero* zero;
    float* values[NUM_STATES];      // (P/R) pinned: this rank's slices of the states, packed
    bool gathers;                   // not all ranks see the folder
    SavePhase phase;
    RunState state;
    char path[4096], temporary[4096];
    char partial[32];               // how the name of an unfinished checkpoint of this run ends
    char newest[4096];              // the newest complete checkpoint that this run knows of, or empty
    SafeTensors *weights, *optimizer;
    uint64_t* sums;                 // (NUM_STATES, num_tensors) tensor_sum of this rank's part, then of the whole
    pthread_t thread;
    bool has_thread;
    SaveStatus status;              // written by the thread; atomic
    char why[1024];
    char beside[1024];              // what the newest save could not delete or sync; or empty
    bool failed;                    // the newest save did
    size_t num_saved;
    double begun_s, waited_s;       // when the newest save began; how long training has waited for it
    double thread_s;                // CPU time of the save's threads
} Saver;

static void saver_plan(Saver* s, Zero* z, Plan* plan)
{
    *s = Saver{};
    s->zero = z;
    for (int state = 0; state < NUM_STATES; state++) {
        bool kept = false;
        for (int t = 0; t < z->shard->num_tensors; t++) kept = kept || state_is_kept(z, state, &z->shard->tensors[t]);
        if (kept) plan_add(plan, "states being saved", Place::HOST, &s->values[state], z->shard->slice_elems);
    }
}

/* The host copy of this rank's `part` of tensor t: of the type it has on the device, in space for floats. */
static Values state_saved(const Saver* s, int state, const Tensor* t, Range part)
{
    const size_t offset = part.first - unit_slice(s->zero, t->unit).first;
    float* at = s->values[state] + s->zero->shard->units[t->unit].packed_first + offset;
    Dtype dtype = zero_state(s->zero, state, t->unit, part.first).dtype;
    return Values{at, dtype, dtype == Dtype::SPLIT ? (unsigned short*)at + part.count : nullptr};
}

// ---------------------------------------------------------------------------------------- the phases, in the thread
/* Deletes older checkpoints, but none while steps are skipped for non-finite gradients: then the newest may be bad. The
 * folder is renamed first, so that a half-deleted one is no checkpoint. */
static void save_prune(void* arg)
{
    Saver* s = (Saver*)arg;
    if (s->config.keep == 0 || s->state.num_skipped_in_a_row > 0) return;
    long long* steps;
    int count = checkpoint_list(s->config.out, true, &steps);
    for (int i = (int)s->config.keep; i < count; i++) {
        char path[4096], temporary[4096];
        if (s->config.keep_every > 0 && steps[i] % (long long)s->config.keep_every == 0) continue;
        if (s->config.keeps_best && steps[i] == (long long)s->state.best.step) continue;
        checkpoint_path(path, s->config.out, (size_t)steps[i], "");
        checkpoint_path(temporary, s->config.out, (size_t)steps[i], s->partial);
        if (TEMP_FAILURE_RETRY(rename(path, temporary)) == 0) folder_remove(temporary, s->beside);
        else snprintf(s->beside, sizeof s->beside, "%.900s: cannot be removed and stays: %s", path, strerror(errno));
    }
    free(steps);
}

/* Does the name say an unfinished checkpoint: step_N.tmp, or step_N.K.tmp? *k becomes K, 1 without it. */
static bool name_is_partial(const char* name, int* k)
{
    long long step;
    int end = 0;
    *k = 1;
    if (sscanf(name, "step_%lld%n", &step, &end) != 1) return false;
    const char* suffix = name + end;
    if (strcmp(suffix, ".tmp") == 0) return true;
    end = 0;
    return sscanf(suffix, ".%d.tmp%n", k, &end) == 1 && end > 0 && suffix[end] == 0;
}

static void save_create(Saver* s)
{
    attempt(save_prune, s, s->beside);   // a smaller --keep than before leaves more to delete
    ENSURE(folder_remove(s->temporary, s->why), "%s", s->why);
    folder_make(s->temporary);
    safetensors_create_files(s->weights);
    safetensors_create_files(s->optimizer);
}

/* Elements of one state of one tensor, as they go to its file, or before that to rank 0. */
typedef struct SaveChunk {
    int index;                      // state * num_tensors + tensor
    size_t count;                   // 0: there are no more
    Rectangle place;                // in the whole tensor
} SaveChunk;

/* A chunk and room for its elements, still in the cache when they are written. After the first that cannot be written
 * the others are still sent, so that no rank hangs, and left. */
typedef struct SaveRoom {
    Saver* saver;
    bool failed;
    char why[1024];
    SaveChunk chunk;
    const SafeTensors* files;
    const SafeTensor* tensor;
    char* room;                     // (SAVE_ROOM_BYTES)
    float* data;                    // in it, at the same place in a page as in the file, for direct I/O of whole pages
} SaveRoom;
static const size_t SAVE_ROOM_BYTES = 1 << 20;

static SaveRoom save_room(Saver* s)
{
    SaveRoom r = {};
    r.saver = s;
    r.room = (char*)aligned_alloc(SAFE_DIRECT_BYTES, SAVE_ROOM_BYTES);
    ENSURE(r.room != nullptr, "out of host memory: %zu bytes asked for", SAVE_ROOM_BYTES);
    return r;
}

/* Finds where the chunk goes. Returns how many elements there is room for. */
static size_t chunk_locate(SaveRoom* r)
{
    const Zero* z = r->saver->zero;
    const int state = r->chunk.index / z->shard->num_tensors;
    char name[STATE_NAME_BYTES];
    state_name(name, z, &z->shard->tensors[r->chunk.index % z->shard->num_tensors], state);
    r->files = state == STATE_WEIGHTS ? r->saver->weights : r->saver->optimizer;
    r->tensor = safetensors_get(r->files, name);
    const size_t offset = r->tensor->offset + element_index(r->chunk.place, 0) * sizeof(float);
    r->data = (float*)(r->room + offset % SAFE_DIRECT_BYTES);
    return (SAVE_ROOM_BYTES - offset % SAFE_DIRECT_BYTES) / sizeof(float);
}

static void chunk_write_now(void* arg)
{
    const SaveRoom* r = (const SaveRoom*)arg;
    for (size_t done = 0, n; done < r->chunk.count; done += n) {
        n = elements_in_row(r->chunk.place, done, r->chunk.count - done);
        safetensors_write_f32(r->files, r->tensor, element_index(r->chunk.place, done), n, r->data + done);
    }
}

static void chunk_write(SaveRoom* r)
{
    if (!r->failed) r->failed = attempt(chunk_write_now, r, r->why) != Outcome::WELL;
}

/* Adds the checksum of the chunk. */
static void chunk_sum(SaveRoom* r)
{
    const Shard* shard = r->saver->zero->shard;
    const int t = r->chunk.index % shard->num_tensors;
    uint64_t* sum = &r->saver->sums[r->chunk.index - t + shard->tensors[t].whole];
    for (size_t done = 0, n; done < r->chunk.count; done += n) {
        n = elements_in_row(r->chunk.place, done, r->chunk.count - done);
        *sum += tensor_sum(r->data + done, element_index(r->chunk.place, done), n);
    }
}

/* Writes this rank's `part` of the tensor and state of the chunk, or, if not all ranks see the folder, sends it to rank
 * 0. */
static void save_part(SaveRoom* r, Range part)
{
    const Saver* s = r->saver;
    const Comm* c = s->zero->comm;
    const int num_tensors = s->zero->shard->num_tensors;
    const Tensor* t = &s->zero->shard->tensors[r->chunk.index % num_tensors];
    const Values values = state_saved(s, r->chunk.index / num_tensors, t, part);
    for (size_t done = 0; done < part.count; done += r->chunk.count) {
        r->chunk.place = tensor_rectangle(t, part.first + done);
        const size_t fits = chunk_locate(r);
        r->chunk.count = part.count - done < fits ? part.count - done : fits;
        const size_t n = r->chunk.count;
        if (values.dtype == Dtype::FP32) memcpy(r->data, (float*)values.at + done, n * sizeof(float));
        else for (size_t e = 0; e < n; e++) r->data[e] = value_load(values, done + e);
        chunk_sum(r);
        if (s->gathers && c->rank != 0) {
            comm_send_host(c, &r->chunk, sizeof r->chunk, 0);
            comm_send_host(c, r->data, n * sizeof(float), 0);
        } else {
            chunk_write(r);
        }
    }
}

/* The same for all that this rank owns. */
static void save_slices(SaveRoom* r)
{
    const Zero* z = r->saver->zero;
    const Shard* shard = z->shard;
    for (int i = 0; i < NUM_STATES * shard->num_tensors; i++) {
        const Tensor* t = &shard->tensors[i % shard->num_tensors];
        const Range part = tensor_part(t, unit_slice(z, t->unit));
        if (!state_is_kept(z, i / shard->num_tensors, t)) continue;
        if (r->saver->gathers) watch_move(z->comm->watch, "a save, where rank 0 writes for all", part.count);
        r->chunk = SaveChunk{i, 0, {}};
        if (part.count > 0) save_part(r, part);
    }
}

/* Writes what rank `owner` sends. */
static void save_received(SaveRoom* r, int owner)
{
    const Comm* c = r->saver->zero->comm;
    for (;;) {
        comm_receive_host(c, &r->chunk, sizeof r->chunk, owner);
        if (r->chunk.count == 0) return;
        chunk_locate(r);
        watch_move(c->watch, "a save, where rank 0 writes for all", r->chunk.count);
        comm_receive_host(c, r->data, r->chunk.count * sizeof(float), owner);
        chunk_write(r);
    }
}

static void save_write(Saver* s)
{
    const Comm* c = s->zero->comm;
    const bool sees = c->rank == 0 || !s->gathers;
    if (sees && c->rank != 0) {
        safetensors_open_files(s->weights);
        safetensors_open_files(s->optimizer);
    }
    SaveRoom r = save_room(s);
    save_slices(&r);
    r.chunk.count = 0;
    if (!sees) comm_send_host(c, &r.chunk, sizeof r.chunk, 0);
    for (int owner = 1; s->gathers && c->rank == 0 && owner < c->num_ranks; owner++)
        save_received(&r, owner);
    free(r.room);
    ENSURE(!r.failed, "%s", r.why);
    if (!sees) return;
    safetensors_sync(s->weights);
    safetensors_sync(s->optimizer);
}

static void save_settle(void* arg)
{
    Saver* s = (Saver*)arg;
    folder_sync(s->config.out);
    save_prune(s);
}

static void save_commit(Saver* s)
{
    s->config.small_files(s->temporary, s->config.context);
    state_json_write(&s->state, s->zero, s->sums, s->temporary);
    folder_sync(s->temporary);
    ENSURE(TEMP_FAILURE_RETRY(rename(s->temporary, s->path)) == 0, "%s: cannot be renamed to %s: %s", s->temporary,
           s->path, strerror(errno));
    attempt(save_settle, s, s->beside);   // from here on it is saved
}

static void save_phase(void* arg)
{
    Saver* s = (Saver*)arg;
    if (s->phase == SavePhase::CREATE) save_create(s);
    else if (s->phase == SavePhase::WRITE) save_write(s);
    else save_commit(s);
}

static double thread_cpu_s(void)
{
    struct timespec used;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
    return used.tv_sec + used.tv_nsec * 1e-9;
}

static void* saver_run(void* arg)
{
    Saver* s = (Saver*)arg;
    double before_s = thread_cpu_s();
    bool well = attempt(save_phase, s, s->why) == Outcome::WELL;
    s->thread_s += thread_cpu_s() - before_s;
    __atomic_store_n(&s->status, well ? SAVE_WELL : SAVE_FAILED, __ATOMIC_RELEASE);
    return nullptr;
}

static void* saver_thread(void* arg)
{
    setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), 10);   // of this thread: training has priority
    return saver_run(arg);
}

// -------------------------------------------------------------------------------------------------- the main thread
/* Begins a phase; in CREATE and COMMIT only rank 0 has work. */
static void saver_enter(Saver* s, SavePhase phase)
{
    s->phase = phase;
    s->status = SAVE_WELL;
    if (phase == SavePhase::NONE || (phase != SavePhase::WRITE && s->zero->comm->rank != 0)) return;
    s->status = SAVE_BUSY;
    if (phase == SavePhase::WRITE && s->gathers) {
        saver_run(s);
        return;
    }
    ENSURE(pthread_create(&s->thread, nullptr, saver_thread, s) == 0, "the thread that saves cannot be started");
    s->has_thread = true;
}

static void saver_end(Saver* s, bool failed)
{
    safetensors_close(s->weights);
    safetensors_close(s->optimizer);
    s->failed = failed;
    s->num_saved += !failed;
    if (failed && s->zero->comm->rank == 0) folder_remove(s->temporary, s->beside);   // else the next start does
    if (!failed) memcpy(s->newest, s->path, sizeof s->newest);
    saver_enter(s, SavePhase::NONE);
}

static void saver_advance(Saver* s)
{
    const Comm* c = s->zero->comm;
    SaveStatus own = __atomic_load_n(&s->status, __ATOMIC_ACQUIRE);
    if (s->phase == SavePhase::CREATE && cudaEventQuery(s->zero->states_copied) == cudaErrorNotReady) own = SAVE_BUSY;
    if ((SaveStatus)comm_max_host(c, own) == SAVE_BUSY) return;
    if (s->has_thread) ENSURE(pthread_join(s->thread, nullptr) == 0, "the thread that saves does not end");
    s->has_thread = false;
    if (comm_outcome(c, own == SAVE_WELL ? Outcome::WELL : Outcome::FAILED, s->why) != Outcome::WELL) {
        saver_end(s, true);
    } else if (s->phase == SavePhase::CREATE) {
        saver_enter(s, SavePhase::WRITE);
    } else if (s->phase == SavePhase::WRITE) {
        comm_sum_host(c, s->sums, (size_t)NUM_STATES * s->zero->shard->num_tensors);
        saver_enter(s, SavePhase::COMMIT);
    } else {
        saver_end(s, false);
    }
}

static void saver_poll(Saver* s)
{
    if (s->phase == SavePhase::NONE) return;
    double before_s = now_s();
    saver_advance(s);
    s->waited_s += now_s() - before_s;
}

static void saver_wait(Saver* s)
{
    double before_s = now_s();
    while (s->phase != SavePhase::NONE) {
        watch_move(s->zero->comm->watch, "a save", 0);
        saver_advance(s);
        if (s->phase != SavePhase::NONE) usleep(200);
    }
    s->waited_s += now_s() - before_s;
}

/* Copies this rank's slices to the host, once they are updated. */
static void states_copy(Saver* s)
{
    Zero* z = s->zero;
    stream_wait(z->d2h, z->update, z->edge, "the step's updates are written");
    for (int i = 0; i < NUM_STATES * z->shard->num_tensors; i++) {
        int state = i / z->shard->num_tensors;
        const Tensor* t = &z->shard->tensors[i % z->shard->num_tensors];
        Range part = tensor_part(t, unit_slice(z, t->unit));
        if (part.count == 0 || !state_is_kept(z, state, t)) continue;
        Values to = state_saved(s, state, t, part), from = zero_state(z, state, t->unit, part.first);
        size_t size_bytes = part.count * dtype_bytes(from.dtype);
        CUDA_CHECK(cudaMemcpyAsync(to.at, from.at, size_bytes, cudaMemcpyDefault, z->d2h));
        if (from.low != nullptr)
            CUDA_CHECK(cudaMemcpyAsync(to.low, from.low, size_bytes, cudaMemcpyDefault, z->d2h));
    }
    CUDA_CHECK(cudaEventRecord(z->states_copied, z->d2h));
}

static void saver_begin(Saver* s, const RunState* state)
{
    saver_wait(s);
    const Shard* shard = s->zero->shard;
    s->state = *state;
    s->begun_s = now_s();
    s->thread_s = 0;
    s->beside[0] = 0;
    checkpoint_path(s->path, s->config.out, state->step, "");
    checkpoint_path(s->temporary, s->config.out, state->step, s->partial);
    char file[4200];
    snprintf(file, sizeof file, "%s/model.safetensors", s->temporary);
    s->weights = weights_plan(shard, file, SafeDtype::F32, MAX_FILE_BYTES);
    snprintf(file, sizeof file, "%s/optimizer.safetensors", s->temporary);
    s->optimizer = optimizer_plan(s->zero, file);
    memset(s->sums, 0, (size_t)NUM_STATES * shard->num_tensors * sizeof *s->sums);
    states_copy(s);
    saver_enter(s, SavePhase::CREATE);
    s->waited_s = now_s() - s->begun_s;
}

/* Rank 0: removes what interrupted saves have left. What cannot be removed is reported and stays. This run's unfinished
 * checkpoints get other names. Returns the number in them: 1 for step_N.tmp, K for step_N.K.tmp. A checkpoint after
 * first_step is an error. */
static int saver_clean(const char* out, size_t first_step)
{
    int number = 1, k;
    DIR* dir = folder_open(out);
    ENSURE(dir != nullptr, "-o %s: is not there any more", out);
    probes_remove(out, 0);
    for (const char* name; (name = folder_next(dir, out)) != nullptr; ) {
        char path[4096], why[1024];
        int n = snprintf(path, sizeof path, "%s/%s", out, name);
        ENSURE(n < (int)sizeof path, "-o %s: the name is too long", out);
        ENSURE(checkpoint_step(name) <= (long long)first_step,
               "%s exists and is not overwritten: the run resumes at step %zu; move it away, or take another -o", path,
               first_step);
        if (checkpoint_step(name) >= 0) probes_remove(path, 0);
        if (!name_is_partial(name, &k) || folder_remove(path, why)) continue;
        say_to(stderr, "train_gpt: %s\n", why);
        if (k >= number) number = k + 1;
    }
    folder_close(dir);
    return number;
}

/* Rank 0 makes the folder; do all ranks see it? first_step: where the run starts. */
static void saver_start(Saver* s, const SaverConfig* config, size_t first_step)
{
    const Comm* c = s->zero->comm;
    int number = 1;
    s->config = *config;
    s->sums = (uint64_t*)malloc_checked((size_t)NUM_STATES * s->zero->shard->num_tensors * sizeof *s->sums);
    if (c->rank == 0) {
        folder_make(config->out);
        number = saver_clean(config->out, first_step);
    }
    comm_broadcast_host(c, &number, sizeof number);
    snprintf(s->partial, sizeof s->partial, number == 1 ? ".tmp" : ".%d.tmp", number);
    s->gathers = !folder_is_shared(c, config->out);
    if (c->rank == 0 && s->gathers)
        say("output  -o %s is not on all hosts: rank 0 writes what the others send, and training waits for that\n",
               config->out);
}

static void saver_free(Saver* s) { free(s->sums); }
