/* run.cuh: struct Run, and its set-up from flags, files and number of ranks up to the memory plan. */
#pragma once
#include <sys/resource.h>
#include "data/flags.h"
#include "data/model_files.h"
#include "data/run_log.h"
#include "kernels/device.cuh"
#include "data/loader.h"
#include "data/tokenizer.h"
#include "model/generate.cuh"
#include "model/passes.cuh"
#include "model/cost.cuh"
#include "ramp.h"
#include "rates.h"
#include "zero/account.h"
#include "zero/memory.h"
#include "zero/save.h"

/* The model if -m is not given. */
#ifdef DEVICE_CUDA
#define DEFAULT_MODEL "gpt2"
#else
#define DEFAULT_MODEL "d3"   // what scripts/quickstart.sh trains
#endif

enum { STEPS_IN_FLIGHT = PROFILE_SLOTS };   // 2: the host may enqueue step s + 1 before it reads the result of step s

/* The settings that trade time for memory. */
typedef struct Setting {
    int stage;
    Recompute recompute;
    int segment_layers;
    int B, G;
    unsigned offloaded;            // OFFLOAD_ACTIVATIONS, ...
    Storage storage;
} Setting;

typedef struct Run {
    Flags* flags;
    Comm comm;
    int dp, replica;               // replicas of the model, --tp ranks each, and that of this rank: layout.cuh
    Group groups[2];               // that share parameters: GROUP_ALL and, with --tp, GROUP_DATA
    int num_groups;
    Group tp_group, kv_group;      // that exchange activations: Model.tp and Model.kv
    Device device;
    Model model;
    Decoder decoder;               // of --generate and --prompts
    Zero zero;
    Plan plan;
    Saver saver;                   // with -o
    StepConfig config;
    TokenSet train_set, val_set;
    bool has_val;
    bool documents;                // windows of whole documents
    Loader *train, *val;
    char tokenizer_path[4096];     // empty: none
    char no_tokenizer[4300];       // then why not that of the data; may be empty
    Tokenizer* tokenizer;          // of generation and of the sample; null: none, on ranks that need it
    char no_sample[1024];          // why a run that trains has none; may be empty
    ModelFiles small_files;        // of checkpoints and exports, on rank 0
    int B, G, T;
    Setting setting;
    size_t global_batch;           // B * G * dp sequences
    Ramp batch_ramp, seq_ramp;     // of global_batch and T
    size_t num_steps;              // total
    size_t step;                   // steps done, skipped ones included
    bool owns_out;                 // this run may change the folder of -o: rank 0 has its lock
    char resumed_from[4096];       // of --resume auto; empty: new weights
    size_t resumed_step, resumed_applied;   // RunState of that checkpoint
    size_t first_step, first_window;        // where this start began: epochs before it were of other batches, perhaps
    char model_path[4096];         // what -m stands for: of a run its checkpoint, of the hub its snapshot
    RunLog log;
    cJSON* products;               // tune.cuh's choices, for run.json; null: none
    int *h_tokens, *h_targets;     // (STEPS_IN_FLIGHT,G,B,T) pinned: a batch never waits for the copy of another
    int* h_positions;              // the same, with documents
    cudaEvent_t batch_copied[2];   // of evaluation, which has no step to wait for
    long step_page_faults[STEPS_IN_FLIGHT];
    size_t step_waits, result_waits;   // host synchronizations: inside steps, and for the result of the step before
    bool reads_at_once;            // launches return when their work is done: the result of a step is there
    Ask ask;                       // the request by signal that the ranks have agreed on
    bool val_due;                  // a signal ended the validation of this step early
    Best best;                     // of the validations
    bool seen_skip;                // the newest result is a skipped step: read each before the next begins
    double mean_step_s;
    bool on_terminal, bar_drawn;
    FILE* trace;                   // of --profile, on rank 0
    char trace_path[4096];
} Run;

static bool is_fp16(void) { return strcmp(FLOATX_NAME, "fp16") == 0; }

/* Does a launch return when its work is done? */
static bool launches_wait(void)
{
#ifdef DEVICE_CUDA
    return false;
#else
    return device_launches_wait();
#endif
}

/* Does this rank compute generated text? Rank 0 does, with its replica, and at stage 3 all. */
static bool generates_here(const Run* run) { return run->replica == 0 || run->setting.stage == 3; }

#define SAY(...) do { if (run->comm.rank == 0) say(__VA_ARGS__); } while (0)

// ---------------------------------------------------------------------------------------------------------- set-up
static bool path_exists(const char* folder, const char* name, char (&path)[4096])
{
    int n = snprintf(path, sizeof path, "%s%s%s", folder, name[0] ? "/" : "", name);
    ENSURE(n < (int)sizeof path, "%s: the name is too long", folder);
    return file_exists(path);
}

/* Can the ranks of a replica share out the rows of a micro-step of B sequences, of every length that --seq-ramp has? */
static bool rows_divide(const Run* run, int B)
{
    const long long unit = run->flags->seq_ramp[0] ? 8 : run->T;
    return (long long)B * run->T % run->flags->tp == 0 && B * unit % run->flags->tp == 0;
}

/* "ranks", or with --tp "replicas", of run->dp. */
static const char* replicas_word(const Run* run) { return run->flags->tp > 1 ? "replicas" : "ranks"; }

/* Any two of {global batch, B, G} give the third (docs/numbers.md: batch arithmetic). */
static void batch_arithmetic(Run* run)
{
    const Flags* f = run->flags;
    int64_t B = f->micro_batch, G = f->grad_accum, R = run->dp;
    if (f->given[FLAG_batch]) {
        bool has_B = f->given[FLAG_micro_batch], has_G = f->given[FLAG_grad_accum];
        int64_t unit = has_B ? B * R : G * R;
        if (f->batch % unit != 0 && !(has_B && has_G))
            die_usage("--batch %lld cannot be shared out: %lld %s x %lld %s = %lld sequences: make it a multiple",
                      (long long)f->batch, (long long)(has_B ? B : G), has_B ? "micro-batch" : "micro-steps",
                      (long long)R, replicas_word(run), (long long)unit);
        if (has_B && !has_G) G = f->batch / unit;
        if (!has_B) B = f->batch / unit;
        if (B * G * R != f->batch)
            die_usage("--batch %lld is not %lld micro-batch x %lld micro-steps x %lld %s = %lld sequences: "
                      "change one of them", (long long)f->batch, (long long)B, (long long)G, (long long)R,
                      replicas_word(run), (long long)(B * G * R));
    }
    run->B = (int)B;
    run->G = (int)G;
    run->global_batch = (size_t)(B * G * R);
}

/* --elastic: keeps the global batch, read from the checkpoint's state.json or from run.json, on another number of
 * ranks: B is the largest micro-batch up to -b that divides a rank's share, also at the start of --batch-ramp; G
 * follows. False if there is no such file yet. Rank 0 reads it. */
static bool batch_of_run(Run* run, const char* resume_path)
{
    const Flags* f = run->flags;
    char path[4096];
    size_t R = (size_t)run->dp, fits = R, from = 0, batch = 0;
    const char *folder = resume_path[0] ? resume_path : f->out, *name = resume_path[0] ? "state.json" : "run.json";
    if (path_exists(folder, name, path) && run->comm.rank == 0) {
        cJSON* j = json_parse_file(path);
        batch = (size_t)json_int(j, "global_batch", 1, 1 << 30, path);
        cJSON_Delete(j);
    }
    comm_broadcast_host(&run->comm, &batch, sizeof batch);
    if (batch == 0) return false;
    char ramp[80] = "";
    if (sscanf(f->batch_ramp, "%zu", &from) == 1)
        snprintf(ramp, sizeof ramp, ", or of %zu where --batch-ramp begins,", from);
    ENSURE(!f->given[FLAG_batch] || (size_t)f->batch == batch, "--elastic keeps the global batch of %zu sequences in "
           "%s, --batch is %lld: leave it out", batch, path, (long long)f->batch);
    while (batch % fits != 0 || from % fits != 0) fits--;
    ENSURE(fits == R, "--elastic: the global batch of %zu sequences in %s%s does not divide over %zu %s; the most "
           "that it divides over below that is %zu: start those", batch, path, ramp, R, replicas_word(run), fits);
    size_t share = batch / R, B = (size_t)f->micro_batch < share ? (size_t)f->micro_batch : share;
    while (share % B != 0 || from / R % B != 0) B--;
    run->B = (int)B;
    run->G = (int)(share / B);
    run->global_batch = batch;
    return true;
}

/* Refuses sizes that fit one by one but not multiplied: a batch beyond what -b, -g and --batch take, and more rows of
 * a micro-step than kernels count in an int. */
static void batch_refuse(const Run* run)
{
    const long long B = run->B, G = run->G, R = run->dp, T = run->T;
    const struct { FlagIdx idx; long long value; } parts[] = {
        {FLAG_micro_batch, B}, {FLAG_grad_accum, G}, {FLAG_batch, B * G * R}};
    char name[64];
    for (const auto& part : parts)
        if (part.value > flag_rows[part.idx].high)
            die_usage("a batch of %lld sequences = %lld per micro-step x %lld micro-steps x %lld %s: %s is at most "
                      "%.0Lf: give others of -b, -g and --batch", B * G * R, B, G, R,
                      replicas_word(run), flag_long_name(&flag_rows[part.idx], name), flag_rows[part.idx].high);
    if (B * T > INT_MAX)
        die_usage("-b %lld x -t %lld = %lld tokens in a micro-step, at most %d: lower -b and raise -g", B, T, B * T,
                  INT_MAX);
}

/* A name of the Hugging Face hub is its snapshot on this machine; anything else stays as it is. */
static const char* model_of_hub(Run* run, const char* name)
{
    char cache[4096];
    if (file_exists(name) || !hub_id(name)) return name;
    ENSURE(hub_snapshot(name, cache, run->model_path), "-m %s is no folder, and as a model of the Hugging Face hub not "
           "in %s: fetch it with: hf download %s", name, cache, name);
    return run->model_path;
}

/* Does the run begin with weights that -m names? */
static bool tunes_weights(const Flags* f)
{
    Config preset;
    return f->model[0] && !f->from_scratch && !config_preset(&preset, f->model, 0, 0);
}

/* The default of -l is for new weights; those of a model that has learned are changed less. */
static void lr_default(Flags* f)
{
    if (tunes_weights(f) && !f->given[FLAG_lr]) f->lr = 2e-5;
}

/* The shape of the model, from a preset or a folder with config.json. */
static void choose_model(Run* run, const char* name, int data_V)
{
    Config* c = &run->model.config;
    char path[4096], presets[512];
    if (config_preset(c, name, data_V, (int)run->flags->seq_len)) return;
    preset_names(presets);
    const char* foreign = path_exists(name, "config.json", path) ? nullptr : folder_foreign(name);
    ENSURE(foreign == nullptr, "-m %s has no config.json but %s", name, foreign);
    ENSURE(path_exists(name, "config.json", path), "-m %s is neither a preset (%s) nor a folder with config.json",
           name, presets);
    config_read(c, path);
    if (!c->tied || run->flags->from_scratch || path_exists(name, "state.json", path)) return;
    if (!weights_have_own_head(&run->comm, name, c->family->tensors[0].name)) return;
    c->tied = false;
    config_note(c, "config  %s: tie_word_embeddings is true, but lm_head.weight is not the embedding: they are kept "
                "apart, as in transformers\n", name);
}

static bool folder_has_split(const char* folder, const char* split)
{
    DIR* dir = folder_open(folder);
    if (dir == nullptr) return false;
    bool found = false;
    for (const char* name; (name = folder_next(dir, folder)) != nullptr; )
        found = found || token_name_matches(name, split);
    folder_close(dir);
    return found;
}

static void ensure_counted(const TokenSet* set)
{
    ENSURE(set->num_counted > 0, "%s%s: none of its %zu tokens counts in the loss; make the shards again with "
           "data/prepare.py", set->files[0].path, set->num_files > 1 ? " and the other shards" : "", set->num_toks);
}

/* Does each set that is trained on have a validation part too? */
static bool sources_have_val(const TokenSet* set)
{
    size_t num_have = 0;
    for (size_t s = 0; s < set->num_sources; s++) num_have += folder_has_split(set->sources[s].name, "val");
    ENSURE(num_have == 0 || num_have == set->num_sources, "%zu of the %zu sets of -d have a val_*.bin: all must, or -v "
           "says what validates", num_have, set->num_sources);
    return num_have > 0;
}

/* The token that ends each document of a shard without flags: the last of what data/prepare.py lays behind a document,
 * which meta.json beside the shard says. */
static int end_of_document(const char* shard)
{
    char path[4096];
    const char* slash = strrchr(shard, '/');
    snprintf(path, sizeof path, "%.*smeta.json", slash != nullptr ? (int)(slash + 1 - shard) : 0, shard);
    ENSURE(file_exists(path), "--documents separate: nothing says which token ends a document of %s: data/prepare.py "
           "writes it into meta.json, which is not beside it; make the shards with it", shard);
    cJSON* meta = json_parse_file(path);
    const cJSON* ids = cJSON_GetObjectItem(cJSON_GetObjectItem(meta, "documents"), "after_ids");
    const int num_ids = cJSON_GetArraySize(ids);
    ENSURE(num_ids > 0, "--documents separate: %s has no documents.after_ids: nothing is between documents of %s; make "
           "the shards again with data/prepare.py --end-of-text TOKEN", path, shard);
    const int end_tok = cJSON_GetArrayItem(ids, num_ids - 1)->valueint;
    cJSON_Delete(meta);
    return end_tok;
}

/* That of all shards of a set; -1: all have flags. */
static int end_of_documents(const TokenSet* set)
{
    int end_tok = -1;
    for (size_t i = 0; i < set->num_files; i++) {
        if (set->files[i].docs_path != nullptr) continue;
        const int own = end_of_document(set->files[i].path);
        ENSURE(end_tok < 0 || own == end_tok, "--documents separate: token %d ends a document of %s, and token %d one "
               "of another shard; make them with one tokenizer", own, set->files[i].path, end_tok);
        end_tok = own;
    }
    return end_tok;
}

/* Windows of whole documents have no stride and no shorter form. */
static void documents_refuse(const Flags* f)
{
    if (f->seq_ramp[0])
        die_usage("--seq-ramp with separate documents: it would use the first ones of each window alone: leave it out, "
                  "or give --documents joined");
    if (f->eval_stride > 0)
        die_usage("--eval-stride with separate documents, which are whole in their windows: leave it out, or give "
                  "--documents joined");
}

/* Are the windows of whole documents? auto: where the shards say where they begin, all of them or none. */
static bool documents_are_separate(const Flags* f, const TokenSet* set)
{
    if (strcmp(f->documents, "auto") != 0) return strcmp(f->documents, "separate") == 0;
    const TokenFile *with = nullptr, *without = nullptr;
    for (size_t i = 0; i < set->num_files; i++)
        (set->files[i].docs_path != nullptr ? with : without) = &set->files[i];
    ENSURE(with == nullptr || without == nullptr, "%s is of conversations, and %s has no .docs beside it: bring it "
           "back if it is lost, or say --documents separate or joined", with->path, without->path);
    return with != nullptr;
}

static void open_data(Run* run)
{
    const Flags* f = run->flags;
    run->train_set = token_set_open(f->data, "train", f->raw_tokens);
    if (f->val[0]) {
        run->val_set = token_set_open(f->val, "val", f->raw_tokens);
        run->has_val = true;
    } else if (sources_have_val(&run->train_set)) {
        run->val_set = token_set_open(f->data, "val", f->raw_tokens);
        run->has_val = true;
    }
    run->documents = documents_are_separate(f, &run->train_set);
    if (run->documents) documents_refuse(f);
    ensure_counted(&run->train_set);
    if (run->has_val) ensure_counted(&run->val_set);
}

/* Micro-steps and tokens of a sequence in step `step`, counted from 0. */
static size_t step_micro_steps(const Run* run, size_t step)
{
    const size_t unit = (size_t)run->B * run->dp;
    return ramp_size(run->batch_ramp, step, unit, run->global_batch) / unit;
}
static int step_seq_len(const Run* run, size_t step) { return (int)ramp_size(run->seq_ramp, step, 8, run->T); }

/* The first step after `step`, which is within --batch-ramp, that may have another number of micro-steps. */
static size_t step_of_next_size(const Run* run, size_t step)
{
    return ramp_next(run->batch_ramp, step, (size_t)run->B * run->dp, run->global_batch);
}

/* Number of windows used by the steps before `end`, which may be any number: hence a double. */
static double windows_before(const Run* run, size_t end)
{
    size_t used = 0, step = 0;
    while (step < end && step < run->batch_ramp.steps) {
        size_t next = step_of_next_size(run, step), alike = (next < end ? next : end) - step;
        used += alike * step_micro_steps(run, step) * run->B * run->dp;
        step += alike;
    }
    return (double)used + (double)(end - step) * (double)run->global_batch;
}

static double epochs_before(const Run* run, size_t end)
{
    const double since = windows_before(run, end) - windows_before(run, run->first_step);
    return ((double)run->first_window + since) / (double)run->train->num_windows;
}

/* The last step if the run uses `windows` windows from step `first`. */
static size_t last_step(const Run* run, size_t first, size_t windows)
{
    size_t step = first, used = 0;
    while (used < windows && step < run->batch_ramp.steps) {
        size_t batch = step_micro_steps(run, step) * run->B * run->dp;
        size_t alike = step_of_next_size(run, step) - step, needed = ceil_div(windows - used, batch);
        alike = needed < alike ? needed : alike;
        used += alike * batch;
        step += alike;
    }
    return used < windows ? step + ceil_div(windows - used, run->global_batch) : step;
}

static void open_loaders(Run* run)
{
    const Flags* f = run->flags;
    LoaderConfig config = {};
    config.flag = "--data";
    config.B = run->B;
    config.T = run->T;
    config.G = run->G;
    config.R = run->dp;
    config.rank = run->replica;
    config.V = run->model.config.V;
    config.seed = (unsigned long long)f->seed;
    config.shuffle = !f->no_shuffle;
    config.documents = run->documents;
    config.cuts = strcmp(f->too_long, "cut") == 0;
    config.end_tok = run->documents ? end_of_documents(&run->train_set) : -1;
    run->train = loader_open(&config, &run->train_set);
    if (f->given[FLAG_steps]) {
        run->num_steps = (size_t)f->steps;
    } else {
        size_t windows = run->train->num_windows * (size_t)f->epochs;
        run->train->config.limit_windows = windows;
        run->num_steps = last_step(run, 0, windows);
    }
    char name[64];
    for (FlagIdx idx : {FLAG_eval_at_start, FLAG_patience, FLAG_keep_best})
        if (!run->has_val && f->given[idx])
            die_usage("%s needs a validation set: no val_*.bin in %s; give --val",
                      flag_long_name(&flag_rows[idx], name), f->data);
    if (!run->has_val) return;
    config.flag = "--val";
    config.G = 1;
    config.shuffle = false;
    config.whole_tail = true;
    config.end_tok = run->documents ? end_of_documents(&run->val_set) : -1;
    config.stride = (size_t)f->eval_stride;
    if (f->eval_stride > run->T)
        die_usage("--eval-stride %lld is above -t %d: tokens between two windows would count nowhere",
                  (long long)f->eval_stride, run->T);
    run->val = loader_open(&config, &run->val_set);
    run->val->config.limit_windows = run->val->num_windows;
}

static StepConfig step_config(const Run* run)
{
    const Flags* f = run->flags;
    StepConfig c = {};
    c.schedule = schedule_find(f->schedule)->schedule;
    c.peak_lr = f->lr;
    c.min_lr = f->min_lr < 0 ? 0.1 * f->lr : f->min_lr;
    c.total_steps = run->num_steps;
    c.warmup_steps = run->num_steps / 50 < 700 ? run->num_steps / 50 : 700;
    if (schedule_find(f->schedule)->traits & WARMS_UP_HALF) c.warmup_steps = run->num_steps / 2;
    if (f->warmup >= 0) c.warmup_steps = (size_t)f->warmup;
    c.decay_share = f->decay;
    c.max_norm = f->clip;
    c.beta1 = optimizer_beta1(f);
    c.beta2 = optimizer_beta2(f);
    c.spike_deviations = f->spike_deviations;
    c.spike_window = (double)f->spike_window;
    c.spike_skips = f->spike_skip;
    c.nominal_toks = (double)run->global_batch * run->T;
    c.dynamic_loss_scale = is_fp16() && f->loss_scale == 0;
    c.min_loss_scale = f->min_loss_scale;
    c.loss_scale_window = (int)f->loss_scale_window;
    c.hysteresis = (int)f->hysteresis;
    c.consecutive_hysteresis = f->consecutive_hysteresis;
    c.warmup_min_lr = f->warmup_min_lr;
    c.warmup_is_log = strcmp(f->warmup_type, "log") == 0;
    c.as_deepspeed = strcmp(f->schedule_as, "deepspeed") == 0;
    c.has_momentum_cycle = has_momentum_cycle(f);
    c.params = schedule_params(f);
    return c;
}

static double first_loss_scale(const Flags* f)
{
    return !is_fp16() ? 1 : f->loss_scale > 0 ? f->loss_scale : exp2((double)f->initial_scale_power);
}

/* Resident memory (RSS) of this process, in bytes. */
static size_t resident_bytes(void)
{
    size_t total_pages = 0, resident_pages = 0;
    FILE* f = fopen("/proc/self/statm", "r");
    if (f == nullptr) return 0;
    int got = fscanf(f, "%zu %zu", &total_pages, &resident_pages);
    fclose(f);
    return got == 2 ? resident_pages * (size_t)sysconf(_SC_PAGESIZE) : 0;
}

/* Page faults of this process so far. */
static long page_faults(void)
{
    struct rusage usage;
    ENSURE(getrusage(RUSAGE_SELF, &usage) == 0, "getrusage: %s", strerror(errno));
    return usage.ru_minflt + usage.ru_majflt;
}

/* Bytes that this rank sends in a step in a group; null: in all. */
static size_t group_sent_bytes(const Run* run, const Group* group)
{
    SentBytes bytes = zero_sent_bytes(&run->zero, group);
    size_t sent = bytes.gradients + bytes.parameters + bytes.sums + bytes.optimizer;
    if (group == nullptr || group == &run->tp_group) sent += model_sent_bytes(&run->model, false);
    if (group == nullptr || group == &run->kv_group) sent += model_sent_bytes(&run->model, true);
    return sent;
}

static size_t sent_bytes_per_step(const Run* run)
{
    return group_sent_bytes(run, nullptr);
}

/* The words of --recompute, by level. */
static const char* const recompute_names[] = {"none", "cheap", "mlp", "attention", "block"};
static_assert(sizeof recompute_names / sizeof *recompute_names == (int)Recompute::BLOCKS + 1, "a name for each level");

static void recompute_from_flag(Setting* s, const char* value, int L)
{
    s->segment_layers = 1;
    for (int level = 0; level <= (int)Recompute::BLOCKS; level++) {
        if (strcmp(value, recompute_names[level]) != 0) continue;
        s->recompute = (Recompute)level;
        return;
    }
    char* end;
    long k = strtol(value, &end, 10);
    if (*value == 0 || *end != 0 || k < 1)
        die_usage("-r %s: have none, cheap, mlp, attention, block, or a number K: every K-th block's input is kept",
                  value);
    s->recompute = Recompute::BLOCKS;
    s->segment_layers = k < L ? (int)k : L;
}

/* --offload */
static unsigned offloaded_from_flag(const char* list)
{
    if (strcmp(list, "none") == 0) return 0;
    char *words = strdup(list), *rest;
    ENSURE(words != nullptr, "out of memory");
    unsigned offloaded = 0, none = 0;
    for (char* word = strtok_r(words, ",", &rest); word != nullptr; word = strtok_r(nullptr, ",", &rest)) {
        unsigned part = 0;
        for (int i = 0; i < NUM_OFFLOADED; i++) if (strcmp(word, offloaded_names[i]) == 0) part = 1u << i;
        none += part == 0;
        offloaded |= part;
    }
    free(words);
    if (none > 0 || offloaded == 0)
        die_usage("--offload '%s': have none, or activations, optimizer, gradients, parameters, comma-separated", list);
    return offloaded;
}

/* Null, or why an offload is refused: this stage or recomputation does not have what it would move. */
static const char* offload_mismatch(const Setting* s, const Flags* f)
{
    if ((s->offloaded & OFFLOAD_ACTIVATIONS) != 0 && s->recompute != Recompute::BLOCKS)
        return "activations moves the inputs that -r block or -r K keeps: give one of them";
    if ((s->offloaded & OFFLOAD_GRADIENTS) != 0 && (s->stage < 2 || strcmp(f->reduce, "step") == 0))
        return "gradients moves the slices of stages 2 and 3: give -z 2 or -z 3, without --reduce step";
    if ((s->offloaded & OFFLOAD_GRADIENTS) != 0 && optimizer_has_matrices(f))
        return "gradients with --optimizer muon: its matrices go from device to device: leave gradients there";
    if ((s->offloaded & OFFLOAD_PARAMETERS) != 0 && s->stage < 3)
        return "parameters moves the slices of stage 3: give -z 3";
    return nullptr;
}

static Dtype dtype_find(const char* name)
{
    for (int i = 0; i < (int)(sizeof dtype_names / sizeof dtype_names[0]); i++)
        if (strcmp(name, dtype_names[i]) == 0) return (Dtype)i;
    die("%s is a word of data/flags.h without a row in dtype_names", name);
}

/* --master, --state-dtype, --grad-dtype and --comm-dtype; combinations are refused in data/flag_rules.h. */
static Storage storage_from_flags(const Flags* f)
{
    Dtype master = strcmp(f->master, "none") == 0 ? FLOATX_DTYPE : dtype_find(f->master);
    Dtype grads = dtype_find(f->grad_dtype);
    Dtype sent = strcmp(f->comm_dtype, "grad") == 0 ? grads : dtype_find(f->comm_dtype);
    if (grads != Dtype::FP32 && optimizer_has_matrices(f))
        die_usage("--grad-dtype %s with --optimizer muon: its steps are made where the gradients are, in fp32",
                  f->grad_dtype);
    return Storage{master, dtype_find(f->state_dtype), grads, sent};
}

static double attention_dropout(const Flags* f) { return f->attn_dropout < 0 ? f->dropout : f->attn_dropout; }

/* The elements of a mask are numbered with 32 bits: T x T of a head, T x C of a sequence. */
static void dropout_refuse(const Run* run)
{
    const Flags* f = run->flags;
    size_t T = (size_t)run->T, C = (size_t)run->model.config.C;
    if (attention_dropout(f) > 0 && T > 65536)
        die_usage("-t %zu with dropout of attention probabilities: its masks reach to 65536 tokens: give "
                  "--attn-dropout 0", T);
    if (f->dropout > 0 && T * C > UINT32_MAX)
        die_usage("-t %zu x %zu channels with --dropout: a sequence has at most %u elements: lower -t", T, C,
                  UINT32_MAX);
}

/* Plans all memory of a run with its setting. */
static void plan_run(Run* run, bool training)
{
    Model* m = &run->model;
    const Flags* f = run->flags;
    const Setting* s = &run->setting;
    m->zero = &run->zero;
    m->tp = &run->tp_group;
    m->kv = &run->kv_group;
    m->deterministic = f->deterministic;
    m->recompute = s->recompute;
    m->segment_layers = s->segment_layers;
    m->dropout = f->dropout;
    m->attention_dropout = attention_dropout(f);
    m->seed = (unsigned long long)f->seed;
    m->given_head_rows = (int)f->head_rows;
    m->on_gpu = device_is_gpu(&run->device);
    m->spans.documents = run->documents;
    m->offloads = (s->offloaded & OFFLOAD_ACTIVATIONS) != 0 && training;
    bool slices_grads = s->stage == 2 && training && strcmp(f->reduce, "step") != 0;
    m->chunks_vocab = (s->stage == 3 || slices_grads) && m->config.num_pieces > 1;
    model_visits(m);
    bool* persistent = (bool*)malloc_checked(m->shard.num_units * sizeof(bool));
    model_persistent(m, persistent);
    ZeroConfig zero = {s->stage, persistent, s->G, training, s->storage, s->offloaded, f->offload_share,
                       optimizer_find(f->optimizer), model_rounds_fp32(&m->shard, &m->config), f->overlap != 0,
                       strcmp(f->reduce, "step") == 0, f->deterministic, (size_t)f->persist_below, m->visits,
                       m->num_visits, (size_t)f->reduce_bucket, (size_t)f->gather_bucket, f->allow_nonfinite};
    zero_plan(&run->zero, &run->plan, &m->shard, run->groups, run->num_groups, &zero);
    if (training && f->out[0]) saver_plan(&run->saver, &run->zero, &run->plan);
    free(persistent);
    bool decodes = (f->given[FLAG_generate] || f->given[FLAG_prompts]) && !f->no_kv_cache;
    if (decodes) decoder_plan(&run->decoder, m, &run->plan, f->given[FLAG_prompts] ? s->B : 1, run->T);
    else if (!f->given[FLAG_export_]) model_plan(m, &run->plan, s->B, run->T, training);
    for (int** p : {&run->h_tokens, &run->h_targets})
        plan_add(&run->plan, "batches", Place::HOST, p, (size_t)STEPS_IN_FLIGHT * s->G * s->B * run->T);
    if (run->documents)
        plan_add(&run->plan, "batches", Place::HOST, &run->h_positions, (size_t)STEPS_IN_FLIGHT * s->G * s->B * run->T);
    size_t loader_bytes = (run->documents ? 3 : 2) * LOADER_SLOTS * (size_t)s->B * run->T * sizeof(int);
    plan_add_bytes(&run->plan, "batches, prefetched", Place::HOST, loader_bytes * (run->has_val ? 2 : 1), nullptr);
    for (const Loader* l : {run->train, run->val})
        if (l != nullptr && run->documents)
            plan_add_bytes(&run->plan, "list of documents", Place::HOST, loader_docs_bytes(l), nullptr);
    plan_add_bytes(&run->plan, "GEMM workspace", Place::DEVICE, matmul_workspace_bytes(), nullptr);
    for (const Group* group : {&run->groups[GROUP_ALL], &run->groups[GROUP_DATA], &run->tp_group, &run->kv_group})
        if (group == run->groups || f->tp > 1)
            plan_add_bytes(&run->plan, "communicator", Place::HOST, comm_workspace_bytes(group), nullptr);
    plan_add_bytes(&run->plan, "program and libraries", Place::HOST, resident_bytes(), nullptr);
}

/* Frees what plan_run has allocated besides the plan. */
static void plan_run_free(Run* run)
{
    free(run->zero.persistent);
    buckets_free(&run->zero.grad_buckets);
    buckets_free(&run->zero.param_buckets);
    zero_optimizer_free(&run->zero);
    free(run->model.visits);
    run->model.visits = nullptr;
}

/* Free device memory, the smallest of all ranks. On a GPU less a reserve: NCCL and cuBLASLt take more for other sizes
 * than those that they have been used with, and code is loaded at its first launch. */
static size_t device_free_bytes(const Run* run)
{
    if (run->flags->gpu[0]) return (size_t)(0.94 * (double)run->device.memory_bytes);   // without that of the libraries
    size_t free_bytes, total_bytes;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
#ifdef DEVICE_CUDA
    const size_t reserve_bytes = max_size((size_t)512 << 20, total_bytes / 100);
    free_bytes = free_bytes > reserve_bytes ? free_bytes - reserve_bytes : 0;
#endif
    return run->flags->plan ? free_bytes : (size_t)-comm_max_host(&run->comm, -(double)free_bytes);
}
