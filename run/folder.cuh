/* folder.cuh: what a run writes and is resumed from: OUT/run.json, log.jsonl, step_*, and the model's small files
 * (model_files.cuh).
 *   save           at a step boundary: begins a checkpoint         save_poll   at every later one: continues it
 *   choose_resume  where --resume points                           resume      resumes there
 *   record_start   OUT/run.json                                    log_start   the log's first line
 *   repeat_check   do ranks and data match the run to reproduce?   repeat_say  are the bits equal? */
#pragma once
#include "model_files.cuh"
#include "data/folder_lock.h"
#include "data/run_record.h"
#include "version.h"
#include "zero/save.h"

// ------------------------------------------------------------------------------------------------------------ save
/* The small files of a checkpoint; first syncs the log, so that it is on the disk up to the checkpoint's step. */
static void write_checkpoint_files(const char* folder, void* context)
{
    const RunLog* log = &((Run*)context)->log;
    if (log->f != nullptr)
        ENSURE(TEMP_FAILURE_RETRY(fsync(log->fd)) == 0, "%s: cannot be synced: %s", log->path, strerror(errno));
    write_small_files(folder, context);
}

/* The log says which checkpoints were complete: where it does, a run is never begun anew (choose_resume). */
#define SAVE_FIELDS(F) \
    F(step,  int,  "", true, (long long)s->state.step, "after which it was made") \
    F(saved, text, "", true, strrchr(s->path, '/') + 1, "the checkpoint, which is complete from here on")

static void save_say(Run* run)
{
    const Saver* s = &run->saver;
    if (run->comm.rank == 0 && s->beside[0]) fprintf(stderr, "train_gpt: %s\n", s->beside);
    if (!s->failed) {
        SAY("saved %s in %.2f s: training waited %.2f s, its threads took %.2f s\n", s->path,
            now_s() - s->begun_s, s->waited_s, s->thread_s);
        RunLog* log = &run->log;
        log_begin(log);
        SAVE_FIELDS(LOG_FIELD)
        log_end(log);
        return;
    }
    const char* newest = s->newest[0] ? s->newest : "none";
    bool goes_on = strcmp(run->flags->on_save_error, "continue") == 0 && s->state.step < run->num_steps &&
                   run->ask != Ask::END;
    if (!goes_on) die("%s is not saved: %s; the newest checkpoint is %s", s->path, s->why, newest);
    if (run->comm.rank == 0)
        fprintf(stderr, "train_gpt: %s is not saved: %s; the newest checkpoint is %s; training continues "
                "(--on-save-error stop ends it)\n", s->path, s->why, newest);
}

/* On every rank at every step boundary: continues the save in progress, or finishes it. */
static void save_poll(Run* run, bool wait)
{
    if (run->saver.phase == SavePhase::NONE) return;
    if (wait) saver_wait(&run->saver);
    else saver_poll(&run->saver);
    if (run->saver.phase == SavePhase::NONE) save_say(run);
}

/* The flags that a resumed run should share (SHAPES), and the last step: RunState's `flags`. */
static void shape_text(const Run* run, char (&text)[sizeof RunState::flags])
{
    char buf[64];
    size_t n = (size_t)snprintf(text, sizeof text, "steps=%zu\n", run->num_steps);
    for (const FlagRow& row : flag_rows)
        if ((row.is & SHAPES) != 0 && n < sizeof text)
            n += (size_t)snprintf(text + n, sizeof text - n, "%s=%s\n", row.name, flag_value(run->flags, &row, buf));
}

/* Prints each flag of a resumed run that differs from the checkpoint's. */
static void say_changes(const Run* run, const char* before)
{
    char now[sizeof RunState::flags], name[64], *rest;
    shape_text(run, now);
    for (char* line = strtok_r(now, "\n", &rest); line != nullptr; line = strtok_r(nullptr, "\n", &rest)) {
        size_t n = strcspn(line, "=") + 1;
        const char* was = before;
        while (*was && strncmp(was, line, n) != 0) {
            was += strcspn(was, "\n");
            was += *was != 0;
        }
        size_t was_bytes = strcspn(was, "\n");
        if (was_bytes == 0 || (was_bytes == strlen(line) && strncmp(was, line, was_bytes) == 0)) continue;
        snprintf(name, sizeof name, "%.*s", (int)n - 1, line);
        for (char* p = name; *p; p++) if (*p == '_') *p = '-';
        SAY("        --%s is %s, was %.*s\n", name, line + n, (int)(was_bytes - n), was + n);
    }
}

/* Begins to save the finished step; finish_step must have read its result. */
static void save(Run* run)
{
    save_poll(run, true);
    const StepState* last = &run->zero.h_state[(run->step - 1) % STEPS_IN_FLIGHT];
    RunState state = {};
    state.step = run->step;
    state.position_windows = loader_position(run->train);
    state.seed = (unsigned long long)run->flags->seed;
    state.seq_len = run->T;
    state.global_batch = run->global_batch;
    state.val_due = run->val_due;
    state.best = run->best;
    state.num_applied = last->num_applied;
    state.num_skipped = last->num_skipped;
    state.num_skipped_in_a_row = last->num_skipped_in_a_row;
    state.spikes = last->spikes;
    shape_text(run, state.flags);
    state.has_loss_scale = is_fp16();
    state.loss_scale = last->loss_scale;
    state.num_good_steps = last->num_good_steps;
    state.hysteresis_left = last->hysteresis_left;
    saver_begin(&run->saver, &state);
}

static void save_start(Run* run)
{
    const Flags* f = run->flags;
    if (!f->out[0]) return;
    SaverConfig config = {f->out, (size_t)f->keep, (size_t)f->keep_every, f->keep_best, write_checkpoint_files, run};
    saver_start(&run->saver, &config, run->step);
}

// ---------------------------------------------------------------------------------------------------------- resume
static bool resumes_automatically(const Run* run) { return strcmp(run->flags->resume, "auto") == 0; }

static void check_checkpoint(void* folder) { cJSON_Delete(checkpoint_open((const char*)folder)); }

/* A checkpoint that is passed over is renamed: to step_N.damaged or step_N.skipped, with a number if there is one. So
 * it can be inspected, and is not in the way of the run that comes to step N again. */
static bool checkpoint_rename(const char* folder, const char* suffix, char (&renamed)[4200])
{
    snprintf(renamed, sizeof renamed, "%s.%s", folder, suffix);
    for (int k = 2; file_exists(renamed); k++) snprintf(renamed, sizeof renamed, "%s.%s.%d", folder, suffix, k);
    return TEMP_FAILURE_RETRY(rename(folder, renamed)) == 0;
}

/* Rank 0, of a damaged checkpoint. Only the run that has the folder's lock renames. */
static void set_aside(const Run* run, const char* folder, const char* why)
{
    char damaged[4200];
    if (!run->owns_out) die("%s; --resume from the one before", why);
    ENSURE(checkpoint_rename(folder, "damaged", damaged), "%s; it cannot be renamed to %s: %s", why, damaged,
           strerror(errno));
    SAY("damaged %s\n        renamed to %s: resuming from the one before\n", why, damaged);
}

/* A checkpoint that cannot be loaded ends the run: it is damaged, or cannot be read now and may be whole. */
[[noreturn]] static void die_not_loaded(Outcome outcome, const char* folder, const char* why)
{
    if (outcome == Outcome::DAMAGED) die("%s; --resume from the one before", why);
    die("%s; %s is left as it is: start again when it can be read", why, folder);
}

/* Rank 0: the newest checkpoint of a run folder that is not damaged; damaged ones are set aside. False without one. */
static bool newest_intact(const Run* run, const char* out, char (&path)[4096])
{
    char why[1024];
    while (checkpoint_find(out, false, path)) {
        switch (attempt(check_checkpoint, path, why)) {
            case Outcome::WELL:    return true;
            case Outcome::DAMAGED: set_aside(run, path, why); break;
            case Outcome::FAILED:  die_not_loaded(Outcome::FAILED, path, why);
        }
    }
    return false;
}

/* Rank 0: a run begins anew only where there is neither a damaged checkpoint, which may be worth mending, nor a log
 * that says of one. */
static void ensure_anew(const char* out)
{
    char name[256] = "";
    const char* what_now = "bring a checkpoint back, or --resume another FOLDER; to begin anew, take another -o or "
                           "move this one away";
    DIR* dir = folder_open(out);
    if (dir == nullptr) return;
    for (const char* each; (each = folder_next(dir, out)) != nullptr; )
        if (strncmp(each, "step_", 5) == 0 && strstr(each, ".damaged") != nullptr && strcmp(each, name) > 0)
            snprintf(name, sizeof name, "%s", each);
    folder_close(dir);
    ENSURE(name[0] == 0, "--resume %s: every checkpoint there is damaged, the newest is %s: %s", out, name, what_now);
    long long step = log_checkpoint_step(out);
    ENSURE(step == 0, "--resume %s: there is no checkpoint, but its log says that there was one of step %lld: %s", out,
           step, what_now);
}

/* Was the checkpoint saved in a streak of skipped steps, so that its weights may be those that give non-finite
 * gradients? A dynamic loss scale is found by skipped steps, up to --hysteresis of them for each time it is halved. */
static bool saved_in_streak(const Run* run, const char* folder)
{
    char path[4200];
    const bool dynamic = is_fp16() && run->flags->loss_scale == 0;
    snprintf(path, sizeof path, "%s/state.json", folder);
    cJSON* j = json_parse_file(path);
    long long num_skipped = json_int_or(j, "num_skipped_in_a_row", 0, 0, JSON_MAX_INT, path);
    cJSON_Delete(j);
    return num_skipped > (dynamic ? run->flags->hysteresis : 0);
}

/* Rank 0: if `path`, the newest checkpoint, was saved in a streak, it becomes the newest one before that, and those of
 * the streak are renamed. If there is none before, the run resumes in the streak. */
static void streak_leave(const Run* run, char (&path)[4096])
{
    if (!saved_in_streak(run, path)) return;
    char why[1024], before[4096], renamed[4200];
    long long* steps;
    int count = checkpoint_list(run->flags->out, true, &steps), num_newer = 1;
    for (; num_newer < count; num_newer++) {
        checkpoint_path(before, run->flags->out, (size_t)steps[num_newer], "");
        Outcome outcome = attempt(check_checkpoint, before, why);
        if (outcome == Outcome::FAILED) die_not_loaded(outcome, before, why);
        if (outcome == Outcome::WELL && !saved_in_streak(run, before)) break;
    }
    if (num_newer < count) {
        SAY("skipped checkpoints of steps %lld to %lld were saved in a streak of skipped steps: %sresuming from before "
            "it\n", steps[num_newer - 1], steps[0], run->owns_out ? "renamed to step_*.skipped, " : "");
        for (int i = 0; i < num_newer && run->owns_out; i++) {
            checkpoint_path(path, run->flags->out, (size_t)steps[i], "");
            ENSURE(checkpoint_rename(path, "skipped", renamed), "%s: cannot be renamed to %s: %s", path, renamed,
                   strerror(errno));
        }
        snprintf(path, sizeof path, "%s", before);
    }
    free(steps);
}

/* When non-finite gradients end a run that has skipped every step since --resume auto: the checkpoint that it resumed
 * from leads there. Rank 0 renames it too, if there is one before it. */
static bool streak_disown(const Run* run, size_t num_applied)
{
    char renamed[4200];
    long long* steps;
    if (run->comm.rank != 0 || !run->resumed_from[0] || num_applied != run->resumed_applied) return false;
    int count = checkpoint_list(run->flags->out, true, &steps);
    bool has_before = count > 0 && steps[count - 1] < (long long)run->resumed_step;
    free(steps);
    return has_before && checkpoint_rename(run->resumed_from, "skipped", renamed);
}

/* The checkpoint that --resume names: itself, or the newest complete one of a run folder; `auto` skips those that are
 * damaged or without state.json. Empty if there is none. Rank 0 searches. */
static void choose_resume(Run* run, char (&path)[4096])
{
    const Flags* f = run->flags;
    path[0] = 0;
    if (!f->resume[0]) return;
    if (run->comm.rank == 0) {
        char why[1024];
        bool automatic = resumes_automatically(run);
        bool found = automatic ? newest_intact(run, f->out, path) : checkpoint_find(f->resume, true, path);
        if (!found) path[0] = 0;
        if (!found && automatic) ensure_anew(f->out);
        ENSURE(found || automatic, "--resume %s: no complete checkpoint there (a folder with state.json, or step_* "
               "folders of that kind)", f->resume);
        Outcome outcome = automatic ? Outcome::WELL : attempt(check_checkpoint, path, why);
        if (outcome != Outcome::WELL) die_not_loaded(outcome, path, why);
        if (found && automatic) streak_leave(run, path);
    }
    comm_broadcast_host(&run->comm, path, sizeof path);
}

/* With another global batch and without -n the windows that are left determine the number of steps. */
static void resume_steps(Run* run, size_t step, size_t position, size_t global_batch)
{
    run->first_step = step;
    run->first_window = position;
    if (global_batch == run->global_batch || run->flags->given[FLAG_steps]) return;
    const size_t end = run->train->config.limit_windows;
    run->num_steps = last_step(run, step, end > position ? end - position : 0);
    run->config = step_config(run);
}

/* Without -l a resumed run keeps its learning rate: the default goes by what -m named when it began. */
static void resume_lr(Run* run, double lr)
{
    if (run->flags->given[FLAG_lr] || lr <= 0) return;
    run->flags->lr = lr;
    rates_apply(&run->model.shard, run->flags);
    run->config = step_config(run);
}

/* That of a state.json; 0 if it has none. */
static double state_lr(const cJSON* state)
{
    const cJSON* line;
    cJSON_ArrayForEach(line, cJSON_GetObjectItemCaseSensitive(state, "flags"))
        if (cJSON_IsString(line) && strncmp(line->valuestring, "lr=", 3) == 0)
            return strtod(line->valuestring + 3, nullptr);
    return 0;
}

/* What the checkpoint decides, before it is loaded, so that what is printed at the start is so. */
static void resume_foresee(Run* run, const char* folder)
{
    size_t from[3] = {};
    double lr = 0;
    char path[4200];
    snprintf(path, sizeof path, "%s/state.json", folder);
    if (run->comm.rank == 0) {
        cJSON* j = json_parse_file(path);
        from[0] = (size_t)json_int(j, "step", 0, JSON_MAX_INT, path);
        from[1] = (size_t)json_int(j, "position_windows", 0, JSON_MAX_INT, path);
        from[2] = (size_t)json_int(j, "global_batch", 1, JSON_MAX_INT, path);
        lr = state_lr(j);
        cJSON_Delete(j);
    }
    comm_broadcast_host(&run->comm, from, sizeof from);
    comm_broadcast_host(&run->comm, &lr, sizeof lr);
    resume_lr(run, lr);
    resume_steps(run, from[0], from[1], from[2]);
}

/* A run folder given as the model has a config.json, but weights in its checkpoints alone: its newest one is meant.
 * A preset's name is not a path, even if a folder has that name. Rank 0 searches. */
static const char* model_of_run(Run* run, const char* name)
{
    Config preset;
    char file[4096];
    if (run->flags->from_scratch || config_preset(&preset, name, 0, 0)) return name;
    if (run->comm.rank == 0 && path_exists(name, "run.json", file) && !checkpoint_find(name, true, run->model_path))
        die("-m %s: is a run folder without a checkpoint yet: --from-scratch takes its config.json alone", name);
    comm_broadcast_host(&run->comm, run->model_path, sizeof run->model_path);
    return run->model_path[0] ? run->model_path : name;
}

/* Loads weights, optimizer states and counters from a checkpoint; with --resume auto from the newest undamaged one. */
static void resume(Run* run, char (&folder)[4096])
{
    RunState state;
    size_t read_bytes;
    char why[1024];
    Outcome outcome;
    while ((outcome = checkpoint_load(&run->zero, folder, run->model.config.tied, &state, &read_bytes, why)) !=
           Outcome::WELL) {
        if (outcome == Outcome::FAILED || !resumes_automatically(run)) die_not_loaded(outcome, folder, why);
        if (run->comm.rank == 0) set_aside(run, folder, why);
        choose_resume(run, folder);
        choose_tokenizer(run, run->flags->model[0] ? run->flags->model : folder);
    }
    snprintf(run->saver.newest, sizeof run->saver.newest, "%s", folder);
    StepState device_state = step_state_init(run->config, first_loss_scale(run->flags));
    device_state.num_applied = state.num_applied;
    device_state.num_skipped = state.num_skipped;
    device_state.num_skipped_in_a_row = state.num_skipped_in_a_row;
    device_state.spikes = state.spikes;
    if (run->config.dynamic_loss_scale && state.has_loss_scale) {
        device_state.loss_scale = state.loss_scale;
        device_state.num_good_steps = state.num_good_steps;
        device_state.hysteresis_left = state.hysteresis_left;
    }
    CUDA_CHECK(cudaMemcpy(run->zero.state, &device_state, sizeof device_state, cudaMemcpyHostToDevice));
    run->step = run->resumed_step = state.step;
    run->resumed_applied = state.num_applied;
    if (resumes_automatically(run)) memcpy(run->resumed_from, folder, sizeof folder);
    run->val_due = state.val_due;
    run->best = state.best;
    ENSURE(state.seq_len == (size_t)run->T,
           "%s: was trained with -t %zu, now -t %d: the data position counts windows of that length; give -t %zu",
           folder, state.seq_len, run->T, state.seq_len);
    loader_seek(run->train, state.position_windows);
    double most = comm_max_host(&run->comm, (double)read_bytes);
    double least = -comm_max_host(&run->comm, -(double)read_bytes);
    SAY("resume  %s: step %zu, window %zu | %.0f to %.0f bytes of tensors read by each rank\n", folder, state.step,
        state.position_windows, least, most);
    if (state.fp32_weights && run->zero.storage.master == Dtype::BF16)
        SAY("        --master none: the weights, fp32 until now, are rounded to bf16\n");
    if (state.fp32_moments && run->zero.storage.moments == Dtype::BF16)
        SAY("        --state-dtype bf16: the moments, fp32 until now, are rounded\n");
    if (state.seed != (unsigned long long)run->flags->seed)
        SAY("        --seed is %lld, was %llu: the order of the data changes here\n", (long long)run->flags->seed,
            state.seed);
    if (state.global_batch != run->global_batch)
        SAY("        the global batch is %zu, was %zu\n", run->global_batch, state.global_batch);
    resume_steps(run, state.step, state.position_windows, state.global_batch);
    say_changes(run, state.flags);
    if (run->step >= run->num_steps)
        SAY("        nothing is left to do: the run ends at step %zu; raise -n or --epochs to go on\n",
            run->num_steps);
}

// ------------------------------------------------------------------------------------------------- run.json, repeat
/* At the start of a new run: writes run.json. Called on all ranks, which send their hosts' names. */
static void record_start(Run* run, const char* model_name)
{
    const Flags* f = run->flags;
    typedef struct { char text[160]; } Where;
    Where own = {}, *all = (Where*)malloc_checked(run->comm.num_ranks * sizeof *all);
    char host[64] = "", path[4096], started[32];
    gethostname(host, sizeof host - 1);
    snprintf(own.text, sizeof own.text, "%s, %.80s", host, run->device.name);
    comm_gather_host(&run->comm, all, &own, sizeof own);
    if (f->out[0] && run->comm.rank == 0 && !path_exists(f->out, "run.json", path)) {
        time_t now = time(nullptr);
        strftime(started, sizeof started, "%Y-%m-%dT%H:%M:%SZ", gmtime(&now));
        bool is_preset = run->model.config.hf_text == nullptr, model_is_here = !is_preset && f->from_scratch;
        cJSON* j = json_new_object();
        json_add_string(j, "version", VERSION);
        json_add_string(j, "build", VERSION_LINE);
        json_add_string(j, "started", started);
        json_add_int(j, "num_ranks", run->comm.num_ranks);
        json_add_int(j, "global_batch", (long long)run->global_batch);
        cJSON* ranks = json_add_array(j, "ranks");
        for (int r = 0; r < run->comm.num_ranks; r++)
            cJSON_AddItemToArray(ranks, json_added(cJSON_CreateString(all[r].text), "ranks"));
        json_add_int(j, "num_threads", run->device.num_threads);
        json_add_int(j, "train_tokens", (long long)run->train_set.num_toks);
        json_add_int(j, "val_tokens", (long long)run->val_set.num_toks);
        json_add_bool(j, "model_is_here", model_is_here);
        record_arguments(j, f, model_name, is_preset, model_is_here);
        if (run->products != nullptr) cJSON_AddItemToObject(j, "products", cJSON_Duplicate(run->products, true));
        write_small_files(f->out, run);
        json_write_file(path, j);                        // last: where it is, the others are
        cJSON_Delete(j);
    }
    free(all);
}

/* --repeat, before anything is allocated: refuses other ranks and other data. */
static void repeat_check(Run* run)
{
    const char* folder = run->flags->repeat;
    if (!folder[0]) return;
    cJSON* record = record_read(folder);
    int num_ranks = (int)json_int(record, "num_ranks", 1, INT_MAX, folder);
    if (num_ranks != run->comm.num_ranks)
        die_usage("--repeat %s: the run had %d ranks, this has %d: start it with mpirun -np %d", folder, num_ranks,
                  run->comm.num_ranks, num_ranks);
    long long train = json_int(record, "train_tokens", 0, JSON_MAX_INT, folder);
    long long val = json_int(record, "val_tokens", 0, JSON_MAX_INT, folder);
    ENSURE((size_t)train == run->train_set.num_toks && (size_t)val == run->val_set.num_toks,
           "--repeat %s: %s has %zu tokens to train on and %zu to validate on, the run had %lld and %lld: bring the "
           "data back", folder, run->flags->data, run->train_set.num_toks, run->val_set.num_toks, train, val);
    const char* then = json_string(record, "version", folder);
    SAY("repeat  %s, run by version %s%s\n", folder, then,
        strcmp(then, VERSION) == 0 ? "" : ": this is another, which may give other bits");
    cJSON_Delete(record);
}

/* At the end: prints whether the state hash equals that in the log of the run. */
static void repeat_say(const Run* run, const char* hash)
{
    char path[4200], want[64], key[64];
    if (!run->flags->repeat[0] || run->comm.rank != 0) return;
    snprintf(path, sizeof path, "%s/log.jsonl", run->flags->repeat);
    snprintf(key, sizeof key, "{\"step\": %zu,", run->step);
    snprintf(want, sizeof want, "\"state_hash\": \"%s\"", hash);
    bool same = false, found = false;
    size_t length;
    char* text = file_exists(path) ? file_read(path, &length) : nullptr;
    for (const char* line = text; line != nullptr; line = strchr(line, '\n'), line += line != nullptr) {
        const char* hash_at = strncmp(line, key, strlen(key)) == 0 ? strstr(line, "\"state_hash\": ") : nullptr;
        if (hash_at == nullptr || hash_at > line + strcspn(line, "\n")) continue;
        found = true;
        same = strncmp(hash_at, want, strlen(want)) == 0;
    }
    free(text);
    SAY("repeat  %s\n", !found ? "the run's log has no state hash of this step" :
        same ? "the same bits as the run" : "other bits than the run's");
}

// ------------------------------------------------------------------------------------------------------------- log
#define RUN_FIELDS(F) \
    F(version,      text, "",       true, VERSION, "of the program") \
    F(device,       text, "",       true, run->device.name, "CPU or GPU of rank 0") \
    F(num_ranks,    int,  "ranks",  true, run->comm.num_ranks, "") \
    F(model_name,   text, "",       true, model_name, "preset or folder") \
    F(num_params,   int,  "",       true, (long long)run->model.shard.num_params, "parameters of the model") \
    F(global_batch, int,  "sequences", true, (long long)run->global_batch, "of a step, on all ranks") \
    F(num_steps,    int,  "steps",  true, (long long)run->num_steps, "where the run ends") \
    F(memory,       plan, "MiB",    true, &run->plan, "the memory plan of each rank, by label: device, host")

/* {"device": {label: MiB, ...}, "host": {...}} */
static void log_plan(RunLog* log, LogKey key, const Plan* p)
{
    log_key(log, key);
    log_begin(log);
    for (Place place : {Place::DEVICE, Place::HOST}) {
        log_key(log, LogKey(place == Place::DEVICE ? "device" : "host"));
        log_begin(log);
        for (int i = 0; i < p->num_rows; i++) {
            size_t bytes = plan_label_bytes(p, i);
            if (p->rows[i].place == place && bytes > 0) log_real(log, LogKey(p->rows[i].label), bytes / 1048576.0);
        }
        fputc('}', log->f);
        log->first_member = false;
    }
    fputc('}', log->f);
}

/* Every flag: numbers as numbers, switches as true and false. */
static void log_flags(RunLog* log, const Flags* f)
{
    char buf[64];
    for (const FlagRow& row : flag_rows) {
        const char* value = flag_value(f, &row, buf);
        if (row.kind == TEXT || row.kind == ONEOF) {
            log_text(log, LogKey(row.name), value);
        } else if (&row - flag_rows != FLAG_version) {
            log_key(log, LogKey(row.name));
            fputs(value, log->f);
        }
    }
}

static void log_start(Run* run, const char* model_name)
{
    RunLog* log = &run->log;
    if (!run->flags->out[0] || run->comm.rank != 0) return;
    log_open(log, run->flags->out, run->flags->resume[0] ? (long long)run->step : -1);
    fprintf(log->f, "{\"run\": ");
    log_begin(log);
    RUN_FIELDS(LOG_FIELD)
    log_flags(log, run->flags);
    fputc('}', log->f);
    log_end(log);
}
