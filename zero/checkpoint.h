/* checkpoint.h: a checkpoint is a Hugging Face folder, readable by transformers as it is:
 *   OUT/step_00000010/config.json            the model
 *                     model.safetensors      weights (the fp32 master where there is one), HF names and shapes
 *                     optimizer.safetensors  NAME.m and NAME.v for each tensor, fp32
 *                     state.json             step, data position, counters, what the run was: RunState
 *                     tokenizer.json         if there is one
 * Every rank writes its slice of each tensor, and reads what its stage keeps: any rank count and stage resumes any
 * other. Written to step_00000010.tmp, synced, renamed: a folder without .tmp is complete. Device memory goes through
 * one bounce buffer. Not handled: ranks that do not share the folder (refused), writing while training goes on. */
#pragma once
#include "weights.h"

typedef struct RunState {
    size_t step;                        // steps done, skipped ones included
    size_t position_windows;            // of the data stream
    size_t num_applied, num_skipped;    // StepState
    bool has_loss_scale;                // fp16; the rest of StepState is then valid too
    double loss_scale;
    int num_good_steps, hysteresis_left;
    unsigned long long seed;
    size_t seq_len, global_batch;
    bool fp32_weights, fp32_moments;    // were kept to the last bit: in other storage they are rounded
    Spikes spikes;
    bool val_due;                       // the validation after this step was cut short
} RunState;

// ------------------------------------------------------------------------------------------------- device <-> file
/* The floats of `count` elements of a state from `flat` on, into tensor `st` of the file from element `first` on. */
static void file_from_device(const SafeTensors* files, const SafeTensor* st, size_t first, Zero* z, StateKind kind,
                             int u, size_t flat, size_t count)
{
    for (size_t done = 0; done < count; ) {
        size_t n = count - done < BOUNCE_ELEMS ? count - done : BOUNCE_ELEMS;
        zero_state_to_host(z, kind, u, flat + done, n, z->bounce);
        safetensors_write_f32(files, st, first + done, n, z->bounce);
        done += n;
    }
}

/* The way back. */
static void device_from_file(Zero* z, StateKind kind, int u, size_t flat, size_t count, const SafeTensors* files,
                             const SafeTensor* st, size_t first)
{
    for (size_t done = 0; done < count; ) {
        size_t n = count - done < BOUNCE_ELEMS ? count - done : BOUNCE_ELEMS;
        safetensors_read_f32(files, st, first + done, n, z->bounce);
        zero_state_from_host(z, kind, u, flat + done, n, z->bounce);
        done += n;
    }
}

// -------------------------------------------------------------------------------------------------------- folders
/* `folder` is a checkpoint, or holds step_* folders: the one with the highest step. A .tmp is never chosen. */
static bool checkpoint_find(const char* folder, char (&path)[4096])
{
    char file[4200];
    snprintf(file, sizeof file, "%s/state.json", folder);
    if (access(file, R_OK) == 0) {
        snprintf(path, sizeof path, "%s", folder);
        return true;
    }
    DIR* dir = opendir(folder);
    if (dir == nullptr) return false;
    long long best = -1;
    for (struct dirent* entry; (entry = readdir(dir)) != nullptr; ) {
        long long step;
        int end = 0;
        if (sscanf(entry->d_name, "step_%lld%n", &step, &end) != 1 || entry->d_name[end] != 0 || step <= best) continue;
        snprintf(file, sizeof file, "%s/%s/state.json", folder, entry->d_name);
        if (access(file, R_OK) != 0) continue;
        best = step;
        int n = snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        ENSURE(n < (int)sizeof path, "%s: the name is too long", folder);
    }
    closedir(dir);
    return best >= 0;
}

// ----------------------------------------------------------------------------------------------------------- save
static const StateKind moment_kinds[] = {STATE_M, STATE_V};
static const char* const optimizer_suffixes[] = {".m", ".v"};

/* Table of the file of optimizer states. Names are owned by the plan. */
static SafeTensors* plan_moments(const Zero* z, const char* path)
{
    const Shard* s = z->shard;
    size_t count = (size_t)s->num_tensors * 2, num_kept = 0;
    SafeTensor* list = (SafeTensor*)malloc_checked(count * sizeof *list);
    char (*names)[80] = (char (*)[80])malloc_checked(count * 80);
    for (const Tensor* t = s->tensors; t < s->tensors + s->num_tensors; t++) {
        for (int k = 0; k < 2 && tensor_is_first_piece(t); k++) {
            if (!zero_has_moment(z, k, t)) continue;
            snprintf(names[num_kept], 80, "%s%s", t->name, optimizer_suffixes[k]);
            list[num_kept] = tensor_in_file(t, names[num_kept], SafeDtype::F32);
            num_kept++;
        }
    }
    SafeTensors* files = safetensors_plan(path, list, num_kept, MAX_FILE_BYTES);
    free(list);
    free(names);
    return files;
}

/* One rank creates, all write their slices, all sync. */
static void write_moments(Zero* z, const char* path)
{
    const Shard* s = z->shard;
    SafeTensors* files = plan_moments(z, path);
    if (z->comm->rank == 0) safetensors_create_files(files);
    comm_barrier(z->comm);
    if (z->comm->rank != 0) safetensors_open_files(files);
    for (int i = 0; i < 2 * s->num_tensors; i++) {
        const Tensor* t = &s->tensors[i / 2];
        Range part = tensor_part(t, shard_slice(s, t->unit, z->comm->rank));
        if (part.count == 0 || !zero_has_moment(z, i % 2, t)) continue;
        char name[80];
        snprintf(name, sizeof name, "%s%s", t->name, optimizer_suffixes[i % 2]);
        file_from_device(files, safetensors_get(files, name), tensor_file_place(t, part.first), z, moment_kinds[i % 2],
                         t->unit, part.first, part.count);
    }
    safetensors_sync(files);
    safetensors_close(files);
    comm_barrier(z->comm);
}

static void run_state_write(const RunState* s, const Zero* z, const char* path)
{
    cJSON* j = json_new_object();
    json_add_int(j, "format", 1);
    json_add_int(j, "step", (long long)s->step);
    json_add_int(j, "position_windows", (long long)s->position_windows);
    json_add_int(j, "num_applied", (long long)s->num_applied);
    json_add_int(j, "num_skipped", (long long)s->num_skipped);
    if (s->has_loss_scale) {
        json_add_float(j, "loss_scale", s->loss_scale);
        json_add_int(j, "num_good_steps", s->num_good_steps);
        json_add_int(j, "hysteresis_left", s->hysteresis_left);
    }
    json_add_int(j, "seed", (long long)s->seed);
    json_add_int(j, "seq_len", (long long)s->seq_len);
    json_add_int(j, "global_batch", (long long)s->global_batch);
    cJSON* spikes = json_add_object(j, "spikes");
    json_add_int(spikes, "num_seen", (long long)s->spikes.num_seen);
    json_add_float(spikes, "loss_mean", s->spikes.loss.mean);
    json_add_float(spikes, "loss_variance", s->spikes.loss.variance);
    json_add_float(spikes, "norm_mean", s->spikes.norm.mean);
    json_add_float(spikes, "norm_variance", s->spikes.norm.variance);
    if (s->val_due) json_add_bool(j, "val_due", true);
    json_add_int(j, "num_ranks", z->comm->num_ranks);
    json_add_int(j, "zero_stage", z->stage);
    json_add_string(j, "optimizer", z->optimizer->name);
    json_add_string(j, "precision", FLOATX_NAME);
    json_add_string(j, "master", dtype_names[(int)z->storage.master]);
    json_add_string(j, "moments", dtype_names[(int)z->storage.moments]);
    json_write_file(path, j);
    cJSON_Delete(j);
}

/* Writes OUT/step_N. `small_files(folder, context)` adds config.json and the tokenizer, on rank 0. path: what was made.
 * An existing folder of that name is refused. */
static void checkpoint_save(Zero* z, const char* out, const RunState* state,
                            void (*small_files)(const char* folder, void* context), void* context, char (&path)[4096])
{
    char temporary[4096], file[4200];
    snprintf(path, sizeof path, "%s/step_%08zu", out, state->step);
    int n = snprintf(temporary, sizeof temporary, "%s.tmp", path);
    ENSURE(n < (int)sizeof temporary, "%s: the name is too long", out);
    if (z->comm->rank == 0) {
        ENSURE(access(path, F_OK) != 0, "%s exists and is not overwritten: move it away, or take another -o", path);
        folder_make(out);
        folder_remove(temporary);
        folder_make(temporary);
    }
    comm_barrier(z->comm);
    ENSURE(access(temporary, F_OK) == 0, "%s is not seen by rank %d: -o must be a folder that all hosts share",
           temporary, z->comm->rank);
    snprintf(file, sizeof file, "%s/model.safetensors", temporary);
    weights_write(z, file, SafeDtype::F32, MAX_FILE_BYTES);
    snprintf(file, sizeof file, "%s/optimizer.safetensors", temporary);
    write_moments(z, file);
    if (z->comm->rank == 0) {
        small_files(temporary, context);
        snprintf(file, sizeof file, "%s/state.json", temporary);
        run_state_write(state, z, file);
        folder_sync(temporary);
        ENSURE(rename(temporary, path) == 0, "%s: cannot be renamed to %s: %s", temporary, path, strerror(errno));
        folder_sync(out);
    }
    comm_barrier(z->comm);
}

// ----------------------------------------------------------------------------------------------------------- load
/* The global batch of the run that the checkpoint is of. */
static size_t checkpoint_global_batch(const char* folder)
{
    char path[4200];
    snprintf(path, sizeof path, "%s/state.json", folder);
    cJSON* j = json_parse_file(path);
    size_t batch = (size_t)json_int(j, "global_batch", 1, 1 << 30, path);
    cJSON_Delete(j);
    return batch;
}

/* The moments of what this rank updates, and the counters, from a checkpoint. */
static RunState checkpoint_load_state(Zero* z, const char* folder)
{
    char path[4200];
    snprintf(path, sizeof path, "%s/state.json", folder);
    cJSON* j = json_parse_file(path);
    long long format = json_int(j, "format", 1, JSON_MAX_INT, path);
    ENSURE(format == 1, "%s: format %lld, have 1: written by a later version of train_gpt", path, format);
    RunState state = {};
    state.step = (size_t)json_int(j, "step", 0, JSON_MAX_INT, path);
    state.position_windows = (size_t)json_int(j, "position_windows", 0, JSON_MAX_INT, path);
    state.num_applied = (size_t)json_int(j, "num_applied", 0, JSON_MAX_INT, path);
    state.num_skipped = (size_t)json_int(j, "num_skipped", 0, JSON_MAX_INT, path);
    state.loss_scale = json_float_or(j, "loss_scale", 0, 0, 1e300, path);
    state.has_loss_scale = state.loss_scale > 0;
    state.num_good_steps = (int)json_int_or(j, "num_good_steps", 0, 0, INT_MAX, path);
    state.hysteresis_left = (int)json_int_or(j, "hysteresis_left", 0, 0, INT_MAX, path);
    state.seed = (unsigned long long)json_int(j, "seed", 0, JSON_MAX_INT, path);
    const char* optimizer = json_string_or(j, "optimizer", "adamw", path);
    ENSURE(strcmp(optimizer, z->optimizer->name) == 0,
           "%s: was trained with --optimizer %s, now %s, whose states are others: give --optimizer %s, or start anew "
           "from its weights with -m %s", path, optimizer, z->optimizer->name, optimizer, folder);
    state.seq_len = (size_t)json_int(j, "seq_len", 1, JSON_MAX_INT, path);
    state.global_batch = (size_t)json_int(j, "global_batch", 1, JSON_MAX_INT, path);
    state.fp32_weights = strcmp(json_string_or(j, "master", "fp32", path), "bf16") != 0;
    state.fp32_moments = strcmp(json_string_or(j, "moments", "fp32", path), "fp32") == 0;
    if (json_has(j, "spikes")) {
        const cJSON* spikes = json_object(j, "spikes", path);
        state.spikes.num_seen = (unsigned long long)json_int(spikes, "num_seen", 0, JSON_MAX_INT, path);
        state.spikes.loss = Series{json_float(spikes, "loss_mean", -1e300, 1e300, path),
                                   json_float(spikes, "loss_variance", 0, 1e300, path)};
        state.spikes.norm = Series{json_float(spikes, "norm_mean", -1e300, 1e300, path),
                                   json_float(spikes, "norm_variance", 0, 1e300, path)};
    }
    state.val_due = json_bool_or(j, "val_due", false, path);
    cJSON_Delete(j);

    const Shard* s = z->shard;
    snprintf(path, sizeof path, "%s/optimizer.safetensors", folder);
    SafeTensors* files = safetensors_open(path);
    for (int i = 0; i < s->num_tensors; i++) {
        const Tensor* t = &s->tensors[i];
        Range part = tensor_part(t, zero_owned(z, t->unit));
        if (part.count == 0) continue;
        for (int k = 0; k < 2; k++) {
            if (!zero_has_moment(z, k, t)) continue;
            char name[80];
            snprintf(name, sizeof name, "%s%s", t->name, optimizer_suffixes[k]);
            const SafeTensor* st = safetensors_get(files, name);
            ensure_shape(files, st, t);
            device_from_file(z, moment_kinds[k], t->unit, part.first, part.count, files, st,
                             tensor_file_place(t, part.first));
        }
    }
    safetensors_close(files);
    return state;
}
