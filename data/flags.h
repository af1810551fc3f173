/* flags.h: every option of train_gpt, one row each. The struct, the parser, --help, the range checks, the start-up
 * print and the header of the run log all come from the table: to add a flag, add a row. F(kind, field, letter,
 * default, low, high, help) kind    INT (int64), REAL (double), TEXT (string), SWITCH (bool, takes no value), ONEOF
 * (string; `low` lists the choices) field   the long name with _ for -;  letter 0: no short form low, high  the allowed
 * range of INT and REAL, both ends included A value follows as `--name=value`, `--name value`, `-x value` or `-xvalue`.
 * Unknown, repeated, out of range or contradictory is exit code 2, before anything is allocated. */
#pragma once
#include <cctype>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <strings.h>
#include "error.h"

#define FLAGS(F) \
    F(TEXT,   model,         'm', "",        0, 0, "preset (gpt2 gpt2-medium gpt2-large gpt2-xl d2..d48 llama-60m llama-1b llama2-7b llama3-8b qwen2.5-0.5b qwen2.5-1.5b), HF folder or checkpoint") \
    F(TEXT,   data,          'd', "data/sets/kjv", 0, 0, "token shards: folder with train_*.bin and val_*.bin, or one file") \
    F(TEXT,   val,           'v', "",        0, 0, "validation shards, if not the val_*.bin beside the training shards") \
    F(TEXT,   out,           'o', "",        0, 0, "run folder for log and checkpoints; none: nothing is written") \
    F(INT,    zero,          'z', 0,         0, 3, "ZeRO stage: 0 nothing sharded, 1 optimizer states, 2 and gradients, 3 and parameters") \
    F(INT,    persist_below,  0,  0,         0, INT64_MAX, "stage 3: units of fewer elements keep their parameters whole") \
    F(INT,    reduce_bucket,  0,  0,         0, INT64_MAX, "gradients are sent in groups of whole units of at most so many elements; 0 = unit by unit") \
    F(ONEOF,  reduce,         0,  "micro",   "micro|step", 0, "stages 2 and 3: gradients are sent in every micro-step, or kept whole and sent once a step") \
    F(INT,    gather_bucket,  0,  0,         0, INT64_MAX, "the same for parameters") \
    F(INT,    overlap,        0,  1,         0, 1, "0: gradients and parameters move on the compute stream, one thing after another") \
    F(INT,    micro_batch,   'b', 4,         1, 1 << 20, "sequences per rank and micro-step") \
    F(INT,    grad_accum,    'g', 1,         1, 1 << 20, "micro-steps per optimizer step") \
    F(INT,    batch,          0,  0,         1, 1 << 30, "global batch in sequences; gives -b or -g when one is left out") \
    F(TEXT,   batch_ramp,     0,  "",        0, 0, "FROM:STEPS: the global batch grows from FROM sequences over the first steps, by whole micro-steps") \
    F(TEXT,   seq_ramp,       0,  "",        0, 0, "FROM:STEPS: of each sequence the first FROM tokens are used, growing over the first steps by 8") \
    F(INT,    seq_len,       't', 0,         1, 1 << 24, "tokens per sequence (default: the model's context, at most 1024)") \
    F(INT,    steps,         'n', 0,         0, INT64_MAX, "optimizer steps, counted from the run's beginning (default: --epochs)") \
    F(INT,    epochs,         0,  1,         1, 1 << 20, "passes over the training shards, when -n is not given") \
    F(REAL,   lr,            'l', 6e-4,      0, 1e3, "peak learning rate") \
    F(ONEOF,  precision,     'p', "fp32",    "fp32|bf16|fp16", 0, "storage of parameters and activations") \
    F(ONEOF,  master,         0,  "fp32",    "fp32|split|none", 0, "bf16: the weights that the optimizer keeps: fp32; split = the bf16 weight and the 16 bits below it, exactly the fp32 value; none = the bf16 weight, rounded at random") \
    F(ONEOF,  state_dtype,    0,  "fp32",    "fp32|bf16", 0, "the optimizer's moments; bf16 is rounded at random") \
    F(ONEOF,  grad_dtype,     0,  "fp32",    "fp32|bf16|fp16", 0, "gradients are summed over micro-steps in fp32, or in the 16 bits of -p (those of embeddings and head in fp32 until they are sent)") \
    F(ONEOF,  comm_dtype,     0,  "grad",    "grad|fp32|bf16|fp16", 0, "gradients go to other ranks in this type; grad = that of --grad-dtype") \
    F(TEXT,   fp32_tensors,   0,  "",        0, 0, "bf16, fp16: tensors kept in fp32, weight, gradient and moments: parts of their names (wte,ln_f) or shell patterns with commas between; products read them rounded") \
    F(REAL,   loss_scale,     0,  0,         0, 1e30, "fp16: factor of the loss in the backward; 0 = found while training") \
    F(INT,    initial_scale_power, 0, 16,    0, 31, "fp16: the loss scale starts at 2 to this power") \
    F(INT,    loss_scale_window, 0, 1000,    1, 1 << 30, "fp16: the loss scale doubles after so many good steps in a row") \
    F(INT,    hysteresis,     0,  2,         1, 1 << 30, "fp16: overflows before the loss scale is halved") \
    F(REAL,   min_loss_scale, 0,  1,         1e-30, 1e30, "fp16: an overflow at this loss scale ends the run") \
    F(SWITCH, consecutive_hysteresis, 0, false, 0, 0, "fp16: every good step restores the hysteresis") \
    F(TEXT,   recompute,     'r', "none",    0, 0, "made again in the backward: none, cheap (norms), mlp, attention (and mlp), block, or K: K blocks at a time") \
    F(TEXT,   offload,        0,  "none",    0, 0, "kept in host memory, with commas between: activations (the blocks' inputs of -r block or K, but two), optimizer (master weights, moments), gradients (slices of stages 2 and 3), parameters (slices of stage 3); none") \
    F(SWITCH, deterministic,  0,  false,     0, 0, "gradients are summed in rank order: the same bits whatever NCCL does") \
    F(INT,    check_replicas, 0,  0,         0, INT64_MAX, "every so many steps: do all ranks hold the same parameters? 0 = never") \
    F(REAL,   spike_deviations, 0, 6,        0, 1e6, "say so when loss or norm is so many standard deviations above its running mean; 0 = never") \
    F(INT,    spike_window,   0,  100,       2, 1 << 30, "steps that the running mean and deviation look back") \
    F(SWITCH, spike_skip,     0,  false,     0, 0, "such a step changes nothing, as one with an Inf or NaN") \
    F(REAL,   timeout,        0,  600,       0, 1e9, "seconds without progress after which a rank says where it waits and ends the run; 0 = never") \
    F(REAL,   dropout,        0,  0,         0, 0.99, "share of the embeddings, attention probabilities and residual branches set to 0 in training") \
    F(REAL,   attn_dropout,   0,  -1,       -1, 0.99, "the same for attention probabilities alone; -1 = as --dropout") \
    F(INT,    seed,          's', 42,        0, INT64_MAX, "seed of the initial weights, the data order and the samples") \
    F(ONEOF,  optimizer,      0,  "adamw",   "adamw|adam|sgd|lamb|lion|adagrad|muon", 0, "optimizer; muon is for hidden matrices, the rest goes by adamw") \
    F(REAL,   beta1,          0,  0.9,       0, 0.999999, "first moment decay") \
    F(REAL,   beta2,          0,  0.95,      0, 0.999999, "second moment decay (lion: 0.99 if not given)") \
    F(REAL,   eps,            0,  1e-8,      0, 1, "added to the root of the second moment") \
    F(REAL,   weight_decay,   0,  0.1,       0, 100, "decay of tensors with two axes (if not given adam, sgd, adagrad: 0, lamb: 0.01)") \
    F(REAL,   momentum,       0,  -1,       -1, 0.999999, "sgd, muon: decay of the momentum; -1 = 0.9, 0.95") \
    F(REAL,   dampening,      0,  0,         0, 1, "sgd: the gradient's share that does not enter the momentum") \
    F(SWITCH, nesterov,       0,  false,     0, 0, "sgd: steps along the gradient and the momentum that follows it") \
    F(REAL,   muon_lr,        0,  0.02,      0, 1e3, "muon: peak learning rate of hidden matrices") \
    F(TEXT,   param_group,    0,  "",        0, 0, "rates of tensors by name: PATTERN:lr=FACTOR,wd=DECAY;PATTERN:... (shell patterns, a later one wins)") \
    F(REAL,   clip,           0,  1.0,       0, 1e30, "largest global gradient norm; 0 = off") \
    F(ONEOF,  schedule,       0,  "cosine",  "constant|linear|cosine|wsd|wsd-sqrt|warmup-log|onecycle|lr-range-test", 0, "learning rate over the steps") \
    F(INT,    warmup,         0,  -1,       -1, INT64_MAX, "warm-up steps; -1 = 2 % of the steps, at most 700, and half of them for onecycle") \
    F(REAL,   decay,          0,  0.2,       0, 1, "wsd: last share of the steps that falls") \
    F(REAL,   min_lr,         0,  -1,       -1, 1e3, "learning rate at the end; -1 = a tenth of the peak") \
    F(INT,    eval_every,     0,  0,         0, INT64_MAX, "validate every so many steps; 0 = at the end only") \
    F(INT,    eval_batches,   0,  0,         0, INT64_MAX, "at most so many global micro-batches per validation; 0 = the whole set") \
    F(INT,    eval_stride,    0,  0,         0, 1 << 24, "validation windows begin so many tokens apart and count what no window before has; 0 = -t") \
    F(INT,    save_every,     0,  0,         0, INT64_MAX, "checkpoint every so many steps; 0 = at the end only (with -o)") \
    F(INT,    keep,           0,  0,         0, 1 << 20, "checkpoints to keep, the newest; 0 = all") \
    F(INT,    keep_every,     0,  0,         0, INT64_MAX, "with --keep: those of every so many steps stay as well") \
    F(ONEOF,  on_save_error,  0,  "continue", "continue|stop", 0, "a checkpoint that cannot be written (full disk): go on training, or stop") \
    F(TEXT,   resume,         0,  "",        0, 0, "checkpoint, or run folder and its newest complete checkpoint; auto = the one of -o if there is one") \
    F(TEXT,   repeat,         0,  "",        0, 0, "run folder: do that run again, as its run.json says; only -o goes with it") \
    F(SWITCH, elastic,        0,  false,     0, 0, "with --resume: the checkpoint's global batch on any number of ranks; -g follows, -b is the most") \
    F(SWITCH, from_scratch,   0,  false,     0, 0, "take only config.json from the folder given with -m") \
    F(INT,    log_every,      0,  1,         1, INT64_MAX, "print every so many steps (the log file has all)") \
    F(INT,    hash_every,     0,  0,         0, INT64_MAX, "state hash into the log every so many steps; always at checkpoints and the end") \
    F(SWITCH, no_shuffle,     0,  false,     0, 0, "windows in file order") \
    F(SWITCH, raw_tokens,     0,  false,     0, 0, "shards are nanoGPT's headerless uint16 .bin") \
    F(INT,    device_mb,      0,  0,         0, INT64_MAX, "CPU and emulated builds: device memory budget in MiB; 0 = the machine's") \
    F(SWITCH, plan,           0,  false,     0, 0, "print the memory and wire plan and stop") \
    F(SWITCH, auto_,          0,  false,     0, 0, "choose -z, -r, -b where not given: the fastest on paper that fits") \
    F(TEXT,   gpu,            0,  "",        0, 0, "with --plan: for this GPU (h100, a100, l4, rtx 4090 ...)") \
    F(INT,    ranks,          0,  0,         0, 1 << 20, "with --plan: for so many ranks") \
    F(SWITCH, bench,          0,  false,     0, 0, "time -n steps on made-up tokens (20), and each operation against the device's ceilings, and stop") \
    F(TEXT,   bench_json,     0,  "",        0, 0, "with --bench: every figure into this file") \
    F(INT,    profile,        0,  0,         0, 1000, "trace of so many steps, after the first three, for ui.perfetto.dev: trace.json in -o, or here") \
    F(SWITCH, eval,           0,  false,     0, 0, "validate and stop") \
    F(TEXT,   choices,        0,  "",        0, 0, "answer this file of multiple choice (JSONL of ctx, endings, label: HellaSwag) and stop") \
    F(TEXT,   generate,       0,  "",        0, 0, "continue this text and stop") \
    F(TEXT,   prompts,        0,  "",        0, 0, "continue the prompts of this JSONL file (- = stdin), -b at a time, JSONL to stdout, and stop") \
    F(INT,    sample_tokens,  0,  128,       0, 1 << 20, "tokens to generate; also of the sample at the end of a run (0 = none)") \
    F(REAL,   temperature,    0,  0.8,       0, 100, "sampling temperature; 0 = greedy") \
    F(INT,    top_k,          0,  40,        0, 1 << 30, "sample among the k most likely tokens; 0 = all") \
    F(REAL,   top_p,          0,  1.0,       0, 1, "sample among the likeliest tokens that reach this probability together") \
    F(REAL,   repetition_penalty, 0, 1.0,    1e-3, 1e3, "logits of tokens that the text has are divided by it; 1 = off") \
    F(TEXT,   stop,           0,  "",        0, 0, "tokens that end a text, ids or spellings with commas between (default: config.json's eos_token_id)") \
    F(SWITCH, no_kv_cache,    0,  false,     0, 0, "generate without the key/value cache: the whole context for each token") \
    F(TEXT,   tokenizer,      0,  "",        0, 0, "tokenizer.json (default: the one of the model folder, else of the data folder)") \
    F(TEXT,   export_,        0,  "",        0, 0, "write the weights as an HF folder and stop") \
    F(ONEOF,  export_dtype,   0,  "fp32",    "fp32|bf16|fp16", 0, "what --export stores, whatever -p computes in") \
    F(INT,    shard_bytes,    0,  5000000000, 1, INT64_MAX, "--export splits weights into files of at most so many bytes, with an index") \
    F(TEXT,   config,         0,  "",        0, 0, "DeepSpeed's JSON: its keys become flags; flags given here stand against it") \
    F(SWITCH, print_config,   0,  false,     0, 0, "print every flag, its value and where that comes from, and stop") \
    F(SWITCH, tune,           0,  false,     0, 0, "GPU: time several algorithms for each matrix product and keep the fastest; which, is cached and in run.json") \
    F(SWITCH, report,         0,  false,     0, 0, "what this binary is made of and finds here, what is missing and how to mend it") \
    F(SWITCH, version,        0,  false,     0, 0, "what this binary is built from and with") \
    F(SWITCH, help,          'h', false,     0, 0, "this list")

/* Options of the design that are not built yet: refused by name, never ignored. */
#define FLAGS_LATER \
    "tp pp sp offload-dir"

#define VALUES_LATER "1bit-adam 01-adam 1bit-lamb onebitadam zerooneadam onebitlamb"

enum FlagKind { INT, REAL, TEXT, ONEOF, SWITCH };
typedef int64_t FlagType_INT;
typedef double FlagType_REAL;
typedef const char* FlagType_TEXT;
typedef const char* FlagType_ONEOF;
typedef bool FlagType_SWITCH;

#define FLAG_ENUM(kind, field, letter, def, low, high, help) FLAG_##field,
enum FlagIdx { FLAGS(FLAG_ENUM) NUM_FLAGS };
#undef FLAG_ENUM

typedef struct Flags {
#define FLAG_FIELD(kind, field, letter, def, low, high, help) FlagType_##kind field;
    FLAGS(FLAG_FIELD)
#undef FLAG_FIELD
    bool given[NUM_FLAGS];          // on the command line or in the file of --config, by FLAG_field
    const char* from[NUM_FLAGS];    // where: FROM_COMMAND_LINE, or the key of that file
} Flags;
#define FROM_COMMAND_LINE flags_command_line
static const char flags_command_line[] = "command line";

/* One row with its types erased; `low` of ONEOF is the list of choices. */
typedef struct {
    FlagKind kind;
    const char* name;
    char letter;
    size_t offset;
    const char* def;
    double low, high;
    const char* choices;
    const char* help;
} FlagRow;
template <class T> static double flag_bound(T x) { return (double)x; }
static inline double flag_bound(const char*) { return 0; }
template <class T> static const char* flag_choices(T) { return ""; }
static inline const char* flag_choices(const char* choices) { return choices; }
#define FLAG_ROW(kind, field, letter, def, low, high, help) \
    {kind, #field, (char)(letter), offsetof(Flags, field), #def, flag_bound(low), flag_bound(high), flag_choices(low), \
     help},
static const FlagRow flag_rows[] = { FLAGS(FLAG_ROW) };
#undef FLAG_ROW

/* "--micro-batch" for field micro_batch, "--export" for export_ (a C++ keyword), in a buffer of the caller. */
static const char* flag_long_name(const FlagRow* row, char (&buf)[64])
{
    int i = snprintf(buf, sizeof buf, "--%s", row->name);
    for (int k = 2; k < i; k++) if (buf[k] == '_') buf[k] = k + 1 < i ? '-' : 0;
    return buf;
}

/* The row of a field's name; null if there is none. */
static const FlagRow* flag_find(const char* name)
{
    for (const FlagRow& row : flag_rows) if (strcmp(row.name, name) == 0) return &row;
    return nullptr;
}

/* Edit distance (Levenshtein 1966) of two short names, for "did you mean". */
static int edit_distance(const char* a, const char* b)
{
    int na = (int)strlen(a), nb = (int)strlen(b), row[64];
    if (nb >= 63) return 99;
    for (int j = 0; j <= nb; j++) row[j] = j;
    for (int i = 1; i <= na; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= nb; j++) {
            int substitute = diagonal + (tolower(a[i - 1]) != tolower(b[j - 1]));
            diagonal = row[j];
            row[j] = row[j] + 1 < row[j - 1] + 1 ? row[j] + 1 : row[j - 1] + 1;
            if (substitute < row[j]) row[j] = substitute;
        }
    }
    return row[nb];
}

/* The word of a list (separated by `sep`) nearest to `word`, in buf. */
static const char* nearest_word(const char* word, const char* list, char sep, char (&buf)[64])
{
    const char separators[] = {sep, 0};
    int best = 99;
    buf[0] = 0;
    while (*list) {
        size_t n = strcspn(list, separators);
        char candidate[64];
        snprintf(candidate, sizeof candidate, "%.*s", (int)n, list);
        int d = edit_distance(word, candidate);
        if (d < best) { best = d; memcpy(buf, candidate, sizeof candidate); }
        list += n;
        if (*list) list++;
    }
    return buf;
}

static bool word_in_list(const char* word, const char* list, char sep)
{
    char nearest[64];
    return strcmp(nearest_word(word, list, sep, nearest), word) == 0;
}

static void flag_unknown(const char* arg)
{
    char name[64], best[64] = "--help", buf[64];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(arg, "="), arg);
    if (name[0] == '-' && name[1] == '-' && word_in_list(name + 2, FLAGS_LATER, ' '))
        die_usage("%s is not there yet in this version (CHANGELOG.md says what is): leave it out", name);
    int best_distance = 99;
    for (const FlagRow& row : flag_rows) {
        int d = edit_distance(name, flag_long_name(&row, buf));
        if (d < best_distance) { best_distance = d; memcpy(best, buf, sizeof best); }
    }
    if (name[0] != '-')
        die_usage("'%s' is not an option; options start with '-': did you forget the one before it? --help lists them",
                  arg);
    if (name[1] != '-') die_usage("unknown option '%s': --help lists the letters", arg);
    if (name[2] == 0) die_usage("unknown option '%s': it has no name; --help lists all", name);
    die_usage("unknown option '%s': did you mean %s? --help lists all", name, best);
}

/* Whole string is a number in [low, high], or refused by name. Counts may be written 1e6. */
static double flag_number(const FlagRow* row, const char* shown, const char* text)
{
    char* end;
    double x = strtod(text, &end);
    if (end == text || *end != 0 || std::isnan(x))
        die_usage("%s needs a number, not '%s'", shown, text);
    if (row->kind == INT && x != floor(x))
        die_usage("%s needs a whole number, not '%s'", shown, text);
    if (x < row->low || x > row->high)
        die_usage("%s %s is out of range: %.10g to %.10g", shown, text, row->low, row->high);
    if (row->kind == REAL && row->low == -1 && x > -1 && x < 0)   // -1 is a word of its own
        die_usage("%s %s is out of range: 0 to %.10g, or -1", shown, text, row->high);
    return x;
}

static void flag_store(Flags* flags, const FlagRow* row, const char* shown, const char* text)
{
    char* at = (char*)flags + row->offset;
    switch (row->kind) {
    case REAL: *(double*)at = flag_number(row, shown, text); break;
    case INT: {
        double x = flag_number(row, shown, text);
        char* end;
        long long exact = strtoll(text, &end, 10);   // beyond 2^53 a double would round
        *(int64_t*)at = *end == 0 ? exact : (int64_t)x;
        break;
    }
    case TEXT: *(const char**)at = text; break;
    case ONEOF: {
        char nearest[64];
        if (word_in_list(text, VALUES_LATER, ' '))
            die_usage("%s %s is not there yet in this version: have %s", shown, text, row->choices);
        if (!word_in_list(text, row->choices, '|'))
            die_usage("%s %s: not one of %s; did you mean %s?", shown, text, row->choices,
                      nearest_word(text, row->choices, '|', nearest));
        *(const char**)at = text;
        break;
    }
    case SWITCH: *(bool*)at = true; break;
    }
}

/* Fills *flags from defaults and the command line; every refusal is one line and exit code 2. */
static void flags_parse(Flags* flags, int argc, char** argv)
{
    *flags = Flags{
#define FLAG_DEFAULT(kind, field, letter, def, low, high, help) def,
        FLAGS(FLAG_DEFAULT)
#undef FLAG_DEFAULT
        {}, {}};
    for (int i = 1; i < argc; i++) {
        const char* arg = argv[i];
        const char* value = nullptr;
        int idx = -1;
        char buf[64];
        size_t name_len = strcspn(arg, "=");
        for (int k = 0; k < NUM_FLAGS && idx < 0; k++) {
            flag_long_name(&flag_rows[k], buf);
            if (strlen(buf) == name_len && strncmp(arg, buf, name_len) == 0) {
                idx = k;
                if (arg[name_len] == '=') value = arg + name_len + 1;
            } else if (arg[0] == '-' && arg[1] != '-' && arg[1] != 0 && arg[1] == flag_rows[k].letter) {
                idx = k;
                if (arg[2] != 0) value = arg + 2 + (arg[2] == '=');
            }
        }
        if (idx < 0) flag_unknown(arg);
        const FlagRow* row = &flag_rows[idx];
        flag_long_name(row, buf);
        if (flags->given[idx]) die_usage("%s is given twice", buf);
        if (row->kind == SWITCH) {
            if (value != nullptr) die_usage("%s takes no value, not '%s'", buf, value);
        } else if (value == nullptr) {
            if (i + 1 >= argc) die_usage("%s needs a value", buf);
            value = argv[++i];
        }
        flags->given[idx] = true;
        flags->from[idx] = FROM_COMMAND_LINE;
        flag_store(flags, row, buf, value);
    }
}

static void flags_help(FILE* f)
{
    fprintf(f, "train_gpt trains GPT-2 and LLaMA models: mpirun -np 8 ./train_gpt -z 2 -b 4 -g 16\n\n");
    for (const FlagRow& row : flag_rows) {
        char buf[64], left[80];
        flag_long_name(&row, buf);
        if (row.letter) snprintf(left, sizeof left, "-%c, %s", row.letter, buf);
        else snprintf(left, sizeof left, "    %s", buf);
        fprintf(f, "  %-22s %s", left, row.help);
        if (row.kind == ONEOF) fprintf(f, "; one of %s", row.choices);
        if (row.kind != SWITCH && strcmp(row.def, "\"\"") != 0) fprintf(f, " [%s]", row.def);
        fprintf(f, "\n");
    }
    fprintf(f, "\nExit codes: 0 done, 1 refused or failed, 2 usage.\n");
}

/* The value of a row as text, for the start-up print and the run log. */
static const char* flag_value(const Flags* flags, const FlagRow* row, char (&buf)[64])
{
    const char* at = (const char*)flags + row->offset;
    switch (row->kind) {
    case INT: snprintf(buf, sizeof buf, "%lld", (long long)*(const int64_t*)at); return buf;
    case REAL: snprintf(buf, sizeof buf, "%.10g", *(const double*)at); return buf;
    case SWITCH: return *(const bool*)at ? "true" : "false";
    case TEXT: case ONEOF: break;
    }
    return *(const char* const*)at;
}
