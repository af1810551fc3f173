/* checkpoint.h: a checkpoint is a Hugging Face folder, readable by transformers as it is:
 *   OUT/step_00000010/config.json            the model
 *                     model.safetensors      weights (the fp32 master where there is one), HF names and shapes
 *                     optimizer.safetensors  NAME.m, NAME.v ... for each tensor, fp32: the optimizer's states
 *                     state.json             step, data position, counters, settings (RunState), and checksums
 *                     tokenizer.json ...     the other small files of the model's folder (data/model_files.h)
 * Any rank count, stage and layout of ranks resumes any other: each rank reads its slice of its part of each tensor,
 * and at stage 0 receives the other slices from the ranks that read them. save.h writes checkpoints while training
 * continues. A folder named exactly step_N is complete; if its state.json is missing it is damaged. Damaged is what has
 * a wrong checksum, size or syntax, or lacks a file. What cannot be read now is not (error.h): it ends the run, and
 * nothing is renamed.
 *
 * Checksums, in state.json, each 16 hex digits:
 *   "tensors"  of every tensor of both files: tensor_sum (weights.h), the same for any number of ranks
 *   "files"    size and fnv1a64 of every other file; of a .safetensors file, of its header
 *   "check"    fnv1a64 of state.json without this line
 * so that a changed bit anywhere in the folder is found. A checkpoint of format 1 has no checksums. */
#pragma once
#include "init.h"
#include "weights.h"

/* Of the validations so far the one with the least loss: INFINITY before the first. */
typedef struct Best {
    double loss;
    size_t step, num_since;             // its step, and the validations since
} Best;

typedef struct RunState {
    size_t step;                        // steps done, skipped ones included
    size_t position_windows;            // of the data stream
    size_t num_applied, num_skipped, num_skipped_in_a_row;    // StepState
    bool has_loss_scale;                // fp16; the rest of StepState is then valid too
    double loss_scale;
    int num_good_steps, hysteresis_left;
    unsigned long long seed;
    size_t seq_len, global_batch;
    bool fp32_weights, fp32_moments;    // were stored exactly; other storage rounds them on resume
    Spikes spikes;
    bool val_due;                       // a signal ended the validation after this step early
    Best best;
    char flags[2048];                   // flags that are SHAPES, "NAME=VALUE\n" each; empty in older checkpoints
} RunState;

static const int STATE_NAME_BYTES = 80;

/* A state's name in the files: TENSOR.STATE, for example NAME.m. */
static void state_name(char (&name)[STATE_NAME_BYTES], const Zero* z, const Tensor* t, int state)
{
    if (state == STATE_WEIGHTS) snprintf(name, sizeof name, "%s", t->name);
    else snprintf(name, sizeof name, "%s.%s", t->name, z->optimizer->states[state - STATE_FIRST]);
}

// ------------------------------------------------------------------------------------------------------- checksums
static const int HEX_BYTES = 17;

static const char* hex_text(uint64_t x, char (&text)[HEX_BYTES])
{
    snprintf(text, sizeof text, "%016llx", (unsigned long long)x);
    return text;
}

/* The text of a file; of a .safetensors file that of its header. */
static char* print_text(const char* path, size_t* length, size_t* num_bytes)
{
    size_t n = strlen(path), suffix = strlen(".safetensors");
    if (n <= suffix || strcmp(path + n - suffix, ".safetensors") != 0) {
        char* text = file_read(path, length);
        *num_bytes = *length;
        return text;
    }
    SafeFile file = {};
    struct stat info;
    file.path = (char*)path;
    file.fd = file_hold(file_open(path));
    ENSURE(fstat(file.fd, &info) == 0, "%s: cannot be examined: %s", path, strerror(errno));
    *num_bytes = file.num_bytes = (size_t)info.st_size;
    char* text = safe_read_header(&file, length);
    file_give_back(file.fd);
    return text;
}

/* {"bytes": 12, "hash": "..."} of a file. */
static cJSON* file_print(const char* path)
{
    size_t length, num_bytes;
    char hex[HEX_BYTES];
    char* text = print_text(path, &length, &num_bytes);
    cJSON* print = json_new_object();
    json_add_int(print, "bytes", (long long)num_bytes);
    json_add_string(print, "hash", hex_text(fnv1a64(text, length), hex));
    free(text);
    return print;
}

/* Of all files in the folder but state.json. */
static void add_file_prints(cJSON* j, const char* folder)
{
    cJSON* files = json_add_object(j, "files");
    DIR* dir = folder_open(folder);
    ENSURE(dir != nullptr, "%s: is not there any more", folder);
    for (const char* name; (name = folder_next(dir, folder)) != nullptr; ) {
        if (name[0] == '.' || strcmp(name, "state.json") == 0) continue;
        char path[4096 + 300];
        snprintf(path, sizeof path, "%s/%s", folder, name);
        cJSON_AddItemToObject(files, name, file_print(path));
    }
    folder_close(dir);
}

static uint64_t json_hash(const cJSON* j)
{
    JsonText t = {};
    json_text_item(&t, j, 0);
    uint64_t hash = fnv1a64(t.text, t.length);
    json_text_free(&t);
    return hash;
}

/* Is this file as state.json says, in `want`? */
static void file_print_check(const char* path, const cJSON* want)
{
    cJSON* have = (cJSON*)hold(file_print(path), json_delete_held);
    long long have_bytes = json_int(have, "bytes", 0, JSON_MAX_INT, path);
    long long want_bytes = json_int(want, "bytes", 0, JSON_MAX_INT, path);
    ENSURE_INTACT(have_bytes == want_bytes, "%s: has %lld bytes, was written with %lld", path, have_bytes, want_bytes);
    ENSURE_INTACT(cJSON_Compare(have, want, true), "%s: is not as it was written: its checksum is %s, state.json says "
                  "%s", path, json_string(have, "hash", path), json_string(want, "hash", path));
    give_back(have);
}

/* state.json, after checking its checksum and those of all other files; checksums of tensors are checked on load. */
static cJSON* checkpoint_open(const char* folder)
{
    char path[4200], file[4200], hex[HEX_BYTES];
    ENSURE(file_exists(folder), "%s: is not there: a link to a folder that is not mounted?", folder);
    snprintf(path, sizeof path, "%s/state.json", folder);
    cJSON* j = (cJSON*)hold(json_parse_file(path), json_delete_held);
    cJSON* check = cJSON_DetachItemFromObjectCaseSensitive(j, "check");
    const char* says = cJSON_IsString(check) ? check->valuestring : "nothing";
    long long format = json_int_or(j, "format", 2, 1, JSON_MAX_INT, path);   // load_counters refuses later ones
    ENSURE_INTACT(strcmp(says, hex_text(json_hash(j), hex)) == 0 || (check == nullptr && format != 2),
                  "%s: is not as it was written: its checksum is %s, it says %s", path, hex, says);
    cJSON_Delete(check);
    const cJSON* files = format == 2 ? json_object(j, "files", path) : nullptr;
    for (const cJSON* want = files != nullptr ? files->child : nullptr; want != nullptr; want = want->next) {
        ENSURE(strchr(want->string, '/') == nullptr, "%s: \"files\" names %s, which is in another folder", path,
               want->string);
        snprintf(file, sizeof file, "%s/%s", folder, want->string);
        file_print_check(file, want);
    }
    return (cJSON*)hand_over(j);
}

// ------------------------------------------------------------------------------------------------------------ find
/* N of "step_N", with at least 8 digits as checkpoint_path writes it; -1 for any other name. */
static long long checkpoint_step(const char* name)
{
    char again[64];
    long long step;
    if (sscanf(name, "step_%lld", &step) != 1) return -1;
    snprintf(again, sizeof again, "step_%08lld", step);
    return strcmp(again, name) == 0 ? step : -1;
}

/* Steps of the checkpoints in a run folder, newest first; with `complete` only those that have a state.json. Returns
 * how many. The caller frees *steps. */
static int checkpoint_list(const char* out, bool complete, long long** steps)
{
    int count = 0, room = 0;
    *steps = nullptr;
    DIR* dir = folder_open(out);
    if (dir == nullptr) return 0;
    for (const char* name; (name = folder_next(dir, out)) != nullptr; ) {
        long long step = checkpoint_step(name);
        char file[4096 + 300];
        snprintf(file, sizeof file, "%s/%s/state.json", out, name);
        if (step < 0 || (complete && !file_exists(file))) continue;
        if (count == room) {
            room = 2 * room + 8;
            *steps = (long long*)realloc(*steps, room * sizeof **steps);
            ENSURE(*steps != nullptr, "out of host memory for %d checkpoints", room);
        }
        int i = count++;
        for (; i > 0 && (*steps)[i - 1] < step; i--) (*steps)[i] = (*steps)[i - 1];
        (*steps)[i] = step;
    }
    folder_close(dir);
    return count;
}

static void checkpoint_path(char (&path)[4096], const char* out, size_t step, const char* suffix)
{
    int n = snprintf(path, sizeof path, "%s/step_%08zu%s", out, step, suffix);
    ENSURE(n < (int)sizeof path, "%s: the name is too long", out);
}

/* `folder` itself if it is a checkpoint, else its step_* folder with the highest step; see checkpoint_list. */
static bool checkpoint_find(const char* folder, bool complete, char (&path)[4096])
{
    char file[4200];
    snprintf(file, sizeof file, "%s/state.json", folder);
    if (file_exists(file)) {
        snprintf(path, sizeof path, "%s", folder);
        return true;
    }
    long long* steps;
    int count = checkpoint_list(folder, complete, &steps);
    if (count > 0) checkpoint_path(path, folder, (size_t)steps[0], "");
    free(steps);
    return count > 0;
}

// ----------------------------------------------------------------------------------------------------------- write
/* Table of the file of optimizer states. */
static SafeTensors* optimizer_plan(const Zero* z, const char* path)
{
    const Shard* s = z->shard;
    size_t count = (size_t)s->num_tensors * MAX_STATES, num_kept = 0;
    SafeTensor* list = (SafeTensor*)malloc_checked(count * sizeof *list);
    char (*names)[STATE_NAME_BYTES] = (char (*)[STATE_NAME_BYTES])malloc_checked(count * STATE_NAME_BYTES);
    int* order = (int*)malloc_checked(s->num_tensors * sizeof(int));
    const int num_whole = tensors_in_order(s, order);
    for (int i = 0; i < num_whole; i++) {
        const Tensor* t = &s->tensors[order[i]];
        for (int state = STATE_FIRST; state < NUM_STATES; state++) {
            if (!state_is_kept(z, state, t)) continue;
            state_name(names[num_kept], z, t, state);
            list[num_kept] = tensor_in_file(t, names[num_kept], SafeDtype::F32);
            num_kept++;
        }
    }
    SafeTensors* files = safetensors_plan(path, list, num_kept, MAX_FILE_BYTES);
    free(order);
    free(list);
    free(names);
    return files;
}

/* Each line of `text` to a list, and back. */
static void lines_add(cJSON* list, const char* text)
{
    char line[sizeof RunState::flags];
    for (size_t n; (n = strcspn(text, "\n")) > 0; text += n + (text[n] == '\n')) {
        snprintf(line, sizeof line, "%.*s", (int)n, text);
        cJSON_AddItemToArray(list, json_added(cJSON_CreateString(line), "flags"));
    }
}

static void lines_join(char (&text)[sizeof RunState::flags], const cJSON* list)
{
    size_t n = 0;
    for (const cJSON* item = list->child; item != nullptr && n < sizeof text; item = item->next)
        if (cJSON_IsString(item)) n += (size_t)snprintf(text + n, sizeof text - n, "%s\n", item->valuestring);
}

/* Writes folder/state.json, after all other files. sums (NUM_STATES, num_tensors): tensor_sum of each. */
static void state_json_write(const RunState* s, const Zero* z, const uint64_t* sums, const char* folder)
{
    char path[4200], name[STATE_NAME_BYTES], hex[HEX_BYTES];
    cJSON* j = (cJSON*)hold(json_new_object(), json_delete_held);
    json_add_int(j, "format", 2);
    json_add_int(j, "step", (long long)s->step);
    json_add_int(j, "position_windows", (long long)s->position_windows);
    json_add_int(j, "num_applied", (long long)s->num_applied);
    json_add_int(j, "num_skipped", (long long)s->num_skipped);
    json_add_int(j, "num_skipped_in_a_row", (long long)s->num_skipped_in_a_row);
    if (s->has_loss_scale) {
        json_add_float(j, "loss_scale", s->loss_scale);
        json_add_int(j, "num_good_steps", s->num_good_steps);
        json_add_int(j, "hysteresis_left", s->hysteresis_left);
    }
    json_add_int64(j, "seed", (long long)s->seed);
    json_add_int(j, "seq_len", (long long)s->seq_len);
    json_add_int(j, "global_batch", (long long)s->global_batch);
    cJSON* spikes = json_add_object(j, "spikes");
    json_add_int(spikes, "num_seen", (long long)s->spikes.num_seen);
    json_add_float(spikes, "loss_mean", s->spikes.loss.mean);
    json_add_float(spikes, "loss_variance", s->spikes.loss.variance);
    json_add_float(spikes, "norm_mean", s->spikes.norm.mean);
    json_add_float(spikes, "norm_variance", s->spikes.norm.variance);
    json_add_int(j, "num_ranks", z->comm->num_ranks);
    json_add_int(j, "zero_stage", z->stage);
    if (s->val_due) json_add_bool(j, "val_due", true);
    if (std::isfinite(s->best.loss)) {
        cJSON* best = json_add_object(j, "best");
        json_add_float(best, "loss", s->best.loss);
        json_add_int(best, "step", (long long)s->best.step);
        json_add_int(best, "num_since", (long long)s->best.num_since);
    }
    lines_add(json_add_array(j, "flags"), s->flags);
    json_add_string(j, "optimizer", z->optimizer->name);
    json_add_string(j, "precision", FLOATX_NAME);
    json_add_string(j, "master", dtype_names[(int)z->storage.master]);
    json_add_string(j, "moments", dtype_names[(int)z->storage.moments]);
    add_file_prints(j, folder);
    cJSON* tensors = json_add_object(j, "tensors");
    for (int state = 0; state < NUM_STATES; state++) {
        for (int i = 0; i < z->shard->num_tensors; i++) {
            const Tensor* t = &z->shard->tensors[i];
            if (!tensor_is_first_piece(z->shard, i) || !state_is_kept(z, state, t)) continue;
            state_name(name, z, t, state);
            json_add_string(tensors, name, hex_text(sums[state * z->shard->num_tensors + i], hex));
        }
    }
    json_add_string(j, "check", hex_text(json_hash(j), hex));
    snprintf(path, sizeof path, "%s/state.json", folder);
    json_write_file(path, j);
    give_back(j);
}

// ------------------------------------------------------------------------------------------------------------ load
typedef struct CheckpointLoad {
    Zero* zero;
    const char* folder;
    bool tied, weights_only;
    bool shared, reads;     // all ranks see the folder; this rank reads from it
    uint64_t* sums;         // (NUM_STATES, num_tensors) of what this rank has read, then summed over ranks
    RunState* state;
    cJSON* json;            // state.json
    size_t read_bytes;
} CheckpointLoad;

static void load_counters(const CheckpointLoad* l)
{
    RunState* s = l->state;
    const cJSON* j = l->json;
    char path[4200];
    snprintf(path, sizeof path, "%s/state.json", l->folder);
    long long format = json_int(j, "format", 1, JSON_MAX_INT, path);
    ENSURE(format <= 2, "%s: format %lld, have 1 and 2: written by a later version of train_gpt", path, format);
    const char *was = json_string_or(j, "optimizer", "adamw", path), *is = l->zero->optimizer->name;
    ENSURE(strcmp(was, is) == 0, "%s: was trained with --optimizer %s, now %s, whose states are others: give "
           "--optimizer %s, or start anew from its weights with -m %s", path, was, is, was, l->folder);
    *s = RunState{};
    s->step = (size_t)json_int(j, "step", 0, JSON_MAX_INT, path);
    s->position_windows = (size_t)json_int(j, "position_windows", 0, JSON_MAX_INT, path);
    s->num_applied = (size_t)json_int(j, "num_applied", 0, JSON_MAX_INT, path);
    s->num_skipped = (size_t)json_int(j, "num_skipped", 0, JSON_MAX_INT, path);
    s->num_skipped_in_a_row = (size_t)json_int_or(j, "num_skipped_in_a_row", 0, 0, JSON_MAX_INT, path);
    s->loss_scale = json_float_or(j, "loss_scale", 0, 0, 1e300, path);
    s->has_loss_scale = s->loss_scale > 0;
    s->num_good_steps = (int)json_int_or(j, "num_good_steps", 0, 0, INT_MAX, path);
    s->hysteresis_left = (int)json_int_or(j, "hysteresis_left", 0, 0, INT_MAX, path);
    s->seed = (unsigned long long)json_int64(j, "seed", path);
    s->seq_len = (size_t)json_int(j, "seq_len", 1, JSON_MAX_INT, path);
    s->global_batch = (size_t)json_int(j, "global_batch", 1, JSON_MAX_INT, path);
    s->fp32_weights = strcmp(json_string_or(j, "master", "fp32", path), "bf16") != 0;
    s->fp32_moments = strcmp(json_string_or(j, "moments", "fp32", path), "fp32") == 0;
    s->val_due = json_bool_or(j, "val_due", false, path);
    s->best = Best{INFINITY, 0, 0};
    if (json_has(j, "best")) {
        const cJSON* best = json_object(j, "best", path);
        s->best = Best{json_float(best, "loss", -1e300, 1e300, path),
                       (size_t)json_int(best, "step", 0, JSON_MAX_INT, path),
                       (size_t)json_int(best, "num_since", 0, JSON_MAX_INT, path)};
    }
    if (json_has(j, "flags")) lines_join(s->flags, json_array(j, "flags", path));
    if (!json_has(j, "spikes")) return;
    const cJSON* spikes = json_object(j, "spikes", path);
    s->spikes.num_seen = (unsigned long long)json_int(spikes, "num_seen", 0, JSON_MAX_INT, path);
    s->spikes.loss = Series{json_float(spikes, "loss_mean", -1e300, 1e300, path),
                            json_float(spikes, "loss_variance", 0, 1e300, path)};
    s->spikes.norm = Series{json_float(spikes, "norm_mean", -1e300, 1e300, path),
                            json_float(spikes, "norm_variance", 0, 1e300, path)};
}

/* The optimizer states of what this rank updates. */
static void load_optimizer(CheckpointLoad* l)
{
    Zero* z = l->zero;
    const Shard* s = z->shard;
    char path[4200], name[STATE_NAME_BYTES];
    snprintf(path, sizeof path, "%s/optimizer.safetensors", l->folder);
    SafeTensors* files = l->reads ? safetensors_open(path) : nullptr;
    for (int i = 0; i < s->num_tensors; i++) {
        const Tensor* t = &s->tensors[i];
        for (int state = STATE_FIRST; state < NUM_STATES; state++) {
            if (!state_is_kept(z, state, t)) continue;
            state_name(name, z, t, state);
            const SafeTensor* st = l->reads ? safetensors_get(files, name) : nullptr;
            if (l->reads) ensure_shape(files, st, t);
            watch_move(z->comm->watch, "reading a tensor", tensor_elems(t));
            const StateRead read = {z, state, t, files, st, &l->sums[state * s->num_tensors + t->whole]};
            state_read(&read, l->shared);
        }
    }
    if (!l->reads) return;
    l->read_bytes += files->num_read_bytes;
    safetensors_close(files);
}

static void load_open(void* arg)
{
    CheckpointLoad* l = (CheckpointLoad*)arg;
    if (l->reads) l->json = checkpoint_open(l->folder);
}

static void load_verify(void* arg)
{
    const CheckpointLoad* l = (const CheckpointLoad*)arg;
    if (!l->reads || json_int(l->json, "format", 1, 2, l->folder) == 1) return;
    const cJSON* tensors = json_object(l->json, "tensors", l->folder);
    const Shard* s = l->zero->shard;
    char name[STATE_NAME_BYTES], hex[HEX_BYTES];
    for (int state = 0; state < (l->weights_only ? 1 : (int)NUM_STATES); state++) {
        for (int i = 0; i < s->num_tensors; i++) {
            const Tensor* t = &s->tensors[i];
            if (!tensor_is_first_piece(s, i) || !state_is_kept(l->zero, state, t)) continue;
            state_name(name, l->zero, t, state);
            const char* want = json_string(tensors, name, l->folder);
            ENSURE_INTACT(strcmp(want, hex_text(l->sums[state * s->num_tensors + i], hex)) == 0,
                          "%s/%s.safetensors: tensor %s is not as it was written: its checksum is %s, state.json says "
                          "%s", l->folder, state == STATE_WEIGHTS ? "model" : "optimizer", name, hex, want);
        }
    }
}

/* Loads weights from a checkpoint and, unless state is null, optimizer states and counters; each rank reads its slices,
 * or rank 0 reads for all. The outcome is the same on every rank, with its sentence in `why`; unless it is WELL, what
 * was read must not be used. A checkpoint of another model or optimizer ends the run. read_bytes: of tensors, by this
 * rank. */
static Outcome checkpoint_load(Zero* z, const char* folder, bool tied, RunState* state, size_t* read_bytes,
                               char (&why)[1024])
{
    const bool shared = folder_is_shared(z->comm, folder);
    CheckpointLoad l = {z, folder, tied, state == nullptr, shared, shared || z->comm->rank == 0, nullptr, state,
                        nullptr, 0};
    size_t num_sums = (size_t)NUM_STATES * z->shard->num_tensors;
    l.sums = (uint64_t*)malloc_checked(num_sums * sizeof *l.sums);
    memset(l.sums, 0, num_sums * sizeof *l.sums);
    Outcome outcome = comm_outcome(z->comm, attempt(load_open, &l, why), why);
    if (outcome == Outcome::WELL) {
        l.read_bytes = weights_read(z, folder, tied, shared, l.sums);
        if (state != nullptr) {
            if (l.reads) load_counters(&l);
            comm_broadcast_host(z->comm, state, sizeof *state);
            load_optimizer(&l);
        }
        comm_sum_host(z->comm, l.sums, num_sums);
        outcome = comm_outcome(z->comm, attempt(load_verify, &l, why), why);
    }
    if (outcome == Outcome::WELL) weights_loaded(z, folder);
    *read_bytes = l.read_bytes;
    cJSON_Delete(l.json);
    free(l.sums);
    return outcome;
}
