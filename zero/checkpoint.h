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
#include <dirent.h>
#include <sys/stat.h>
#include "../data/safetensors.h"
#include "stages.h"

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
} RunState;

static const size_t MAX_FILE_BYTES = 5000000000;   // larger files are split

// ------------------------------------------------------------------------------------------------- device <-> file
/* The floats of `count` elements of a state from `flat` on, into tensor `st` of the file from element `first` on. */
static void file_from_device(const SafeTensors* files, const SafeTensor* st, size_t first, Zero* z, StateKind kind, int u,
                             size_t flat, size_t count)
{
    for (size_t done = 0; done < count; ) {
        size_t n = count - done < BOUNCE_ELEMS ? count - done : BOUNCE_ELEMS;
        zero_state_to_host(z, kind, u, flat + done, n, z->bounce);
        safetensors_write_f32(files, st, first + done, n, z->bounce);
        done += n;
    }
}

/* The way back. zero_params_loaded follows when all weights are there. */
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
static void folder_make(const char* path)
{
    char part[4096];
    size_t n = strlen(path);
    ENSURE(n > 0 && n < sizeof part, "folder name of %zu bytes, have room for %zu", n, sizeof part - 1);
    for (size_t i = 1; i <= n; i++) {
        if (i < n && path[i] != '/') continue;
        snprintf(part, i + 1, "%s", path);
        ENSURE(mkdir(part, 0777) == 0 || errno == EEXIST, "%s: cannot be made: %s", part, strerror(errno));
    }
    struct stat info;
    ENSURE(stat(path, &info) == 0 && S_ISDIR(info.st_mode), "%s: is not a folder: take another name", path);
}

static void folder_sync(const char* path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    ENSURE(fd >= 0 && fsync(fd) == 0, "%s: cannot be synced: %s", path, strerror(errno));
    close(fd);
}

/* Removes a folder of plain files: only ever one of our own step_*.tmp. */
static void folder_remove(const char* path)
{
    DIR* dir = opendir(path);
    if (dir == nullptr) return;
    for (struct dirent* entry; (entry = readdir(dir)) != nullptr; ) {
        char file[4096 + 300];
        snprintf(file, sizeof file, "%s/%s", path, entry->d_name);
        if (entry->d_name[0] != '.') unlink(file);
    }
    closedir(dir);
    ENSURE(rmdir(path) == 0, "%s: what an interrupted save left cannot be removed: %s", path, strerror(errno));
}

static void file_copy(const char* to, const char* from)
{
    size_t length;
    char* text = json_read_file(from, &length);
    json_write_text(to, text, length);
    free(text);
}

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
/* Tables of the files to be: weights (suffixes {""}) or optimizer states ({".m", ".v"}). Names are owned by the plan.
 */
static SafeTensors* plan_files(const Shard* s, const char* path, const char* const* suffixes, int num_suffixes)
{
    size_t count = (size_t)s->num_tensors * num_suffixes;
    SafeTensor* list = (SafeTensor*)malloc_checked(count * sizeof *list);
    char (*names)[80] = (char (*)[80])malloc_checked(count * 80);
    for (int t = 0; t < s->num_tensors; t++) {
        for (int k = 0; k < num_suffixes; k++) {
            size_t i = (size_t)t * num_suffixes + k;
            snprintf(names[i], 80, "%s%s", s->tensors[t].name, suffixes[k]);
            list[i] = SafeTensor{};
            list[i].name = names[i];
            list[i].dtype = SafeDtype::F32;
            list[i].num_dims = s->tensors[t].num_dims;
            for (int d = 0; d < list[i].num_dims; d++) list[i].dims[d] = s->tensors[t].shape[d];
        }
    }
    SafeTensors* files = safetensors_plan(path, list, count, MAX_FILE_BYTES);
    free(list);
    free(names);
    return files;
}

static const char* const weight_suffixes[] = {""};
static const char* const optimizer_suffixes[] = {".m", ".v"};

/* This rank's slice of every tensor into the files. */
static void write_slices(Zero* z, const SafeTensors* files, StateKind kind, const char* suffix)
{
    const Shard* s = z->shard;
    zero_params_settle(z);
    for (int t = 0; t < s->num_tensors; t++) {
        const Tensor* tensor = &s->tensors[t];
        Range part = tensor_part(tensor, shard_slice(s, tensor->unit, z->comm->rank));
        if (part.count == 0) continue;
        char name[80];
        snprintf(name, sizeof name, "%s%s", tensor->name, suffix);
        file_from_device(files, safetensors_get(files, name), part.first - tensor->first, z, kind, tensor->unit,
                         part.first, part.count);
    }
}

/* One rank creates, all write, all sync. */
static void write_files(Zero* z, const char* path, bool optimizer)
{
    SafeTensors* files =
        plan_files(z->shard, path, optimizer ? optimizer_suffixes : weight_suffixes, optimizer ? 2 : 1);
    if (z->comm->rank == 0) safetensors_create_files(files);
    comm_barrier(z->comm);
    if (z->comm->rank != 0) safetensors_open_files(files);
    if (optimizer) {
        write_slices(z, files, STATE_M, ".m");
        write_slices(z, files, STATE_V, ".v");
    } else {
        write_slices(z, files, STATE_WEIGHTS, "");
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
    json_add_int(j, "num_ranks", z->comm->num_ranks);
    json_add_int(j, "zero_stage", z->stage);
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
    write_files(z, file, false);
    snprintf(file, sizeof file, "%s/optimizer.safetensors", temporary);
    write_files(z, file, true);
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

/* The weights alone as an HF folder: model.safetensors and the small files. */
static void weights_export(Zero* z, const char* folder, void (*small_files)(const char* folder, void* context),
                           void* context)
{
    char file[4200];
    snprintf(file, sizeof file, "%s/model.safetensors", folder);
    if (z->comm->rank == 0) {
        ENSURE(access(file, F_OK) != 0, "%s exists and is not overwritten: --export to another folder", file);
        folder_make(folder);
    }
    comm_barrier(z->comm);
    write_files(z, file, false);
    if (z->comm->rank == 0) {
        small_files(folder, context);
        folder_sync(folder);
    }
    comm_barrier(z->comm);
}

// ----------------------------------------------------------------------------------------------------------- load
/* A tensor by HF name, with or without the leading `transformer.` or `model.`: files of the base model leave it out. */
static const SafeTensor* find_weight(const SafeTensors* files, const char* name)
{
    const SafeTensor* found = safetensors_find(files, name);
    for (const char* prefix : {"transformer.", "model."})
        if (found == nullptr && strncmp(name, prefix, strlen(prefix)) == 0)
            found = safetensors_find(files, name + strlen(prefix));
    return found;
}

static void ensure_shape(const SafeTensors* files, const SafeTensor* st, const Tensor* t)
{
    bool same = st->num_dims == t->num_dims;
    for (int d = 0; same && d < st->num_dims; d++) same = st->dims[d] == t->shape[d];
    char have[96] = "", need[96] = "";
    for (int d = 0; d < st->num_dims; d++)
        snprintf(have + strlen(have), sizeof have - strlen(have), "%s%zu", d ? "x" : "", st->dims[d]);
    for (int d = 0; d < t->num_dims; d++)
        snprintf(need + strlen(need), sizeof need - strlen(need), "%s%zu", d ? "x" : "", t->shape[d]);
    ENSURE(same, "%s: tensor %s has shape %s, config.json asks for %s", files->path, st->name, have, need);
}

/* Buffers that old files carry and no model needs, and the head's copy of a tied embedding. */
static bool weight_is_ignored(const char* name, bool tied)
{
    size_t n = strlen(name);
    for (const char* suffix : {".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"}) {
        size_t k = strlen(suffix);
        if (n > k && strcmp(name + n - k, suffix) == 0) return true;
    }
    return tied && strcmp(name, "lm_head.weight") == 0;
}

/* The weights from the folder's model.safetensors: each rank reads what it updates, whole units are gathered. */
static void weights_load(Zero* z, const char* folder, bool tied)
{
    const Shard* s = z->shard;
    SafeTensors* files = safetensors_open(folder);
    for (int i = 0; i < s->num_tensors; i++) {
        const Tensor* t = &s->tensors[i];
        const SafeTensor* st = find_weight(files, t->name);
        ENSURE(st != nullptr, "%s: has no tensor %s, which config.json asks for", files->path, t->name);
        ensure_shape(files, st, t);
        Range part = tensor_part(t, zero_owned(z, t->unit));
        device_from_file(z, STATE_WEIGHTS, t->unit, part.first, part.count, files, st, part.first - t->first);
    }
    for (size_t i = 0; i < files->num_tensors; i++) {
        const char* name = files->tensors[i].name;
        bool known = weight_is_ignored(name, tied);
        for (int k = 0; !known && k < s->num_tensors; k++)
            known = find_weight(files, s->tensors[k].name) == &files->tensors[i];
        ENSURE(known, "%s: holds tensor %s, which the model of config.json does not have", files->path, name);
    }
    safetensors_close(files);
    zero_params_loaded(z);
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
    state.seq_len = (size_t)json_int(j, "seq_len", 1, JSON_MAX_INT, path);
    state.global_batch = (size_t)json_int(j, "global_batch", 1, JSON_MAX_INT, path);
    state.fp32_weights = strcmp(json_string_or(j, "master", "fp32", path), "bf16") != 0;
    state.fp32_moments = strcmp(json_string_or(j, "moments", "fp32", path), "fp32") == 0;
    cJSON_Delete(j);

    const Shard* s = z->shard;
    snprintf(path, sizeof path, "%s/optimizer.safetensors", folder);
    SafeTensors* files = safetensors_open(path);
    for (int i = 0; i < s->num_tensors; i++) {
        const Tensor* t = &s->tensors[i];
        Range part = tensor_part(t, zero_owned(z, t->unit));
        if (part.count == 0) continue;
        for (int k = 0; k < 2; k++) {
            char name[80];
            snprintf(name, sizeof name, "%s%s", t->name, optimizer_suffixes[k]);
            const SafeTensor* st = safetensors_get(files, name);
            ensure_shape(files, st, t);
            device_from_file(z, k == 0 ? STATE_M : STATE_V, t->unit, part.first, part.count, files, st,
                             part.first - t->first);
        }
    }
    safetensors_close(files);
    return state;
}
