/* flags.h: every option of train_gpt, one row each. The struct, the parser, --help, the range checks, the flags printed
 * at the start, in the header of the run log, in run.json and in checkpoints come from the table: to add a flag, add a
 * row. Rules about combinations are in flag_rules.h, other programs' names for flags in flag_aliases.h.
 *
 *   F(kind, field, letter, default, low, high, attributes, help)
 *     kind        INT (int64), REAL (double), TEXT (string), SWITCH (bool), ONEOF (string; `low` lists the choices)
 *     field       the long name with _ for -
 *     letter      0: no short form
 *     low, high   the allowed range of INT and REAL, both ends included
 *     attributes  of FlagIs, or 0
 *   HEADING(name, title)   begins a group of --help
 *
 * A value follows as `--name=value`, `--name value`, `-x value` or `-xvalue`; a SWITCH takes none, or true or false. In
 * a long name _ and - are alike. Unknown, repeated, out of range or contradictory is exit code 2, before anything is
 * allocated. */
#pragma once
#include <cctype>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <strings.h>
#include "error.h"
#include "flag_aliases.h"

/* Choices, "a|b|c", from tables of kernels/, which this folder does not include: the parser's caller passes them. */
typedef struct FlagWords { const char *optimizers, *schedules, *schedules_of_deepspeed; } FlagWords;

/* Attributes of a flag. */
enum FlagIs {
    PATH = 1,        // a path: run.json has it as an absolute path
    ALWAYS = 2,      // run.json has it even if not given: its default depends on the build or folder
    SHAPES = 4,      // changes the run's numbers: checkpoints record it, a resumed run prints differences
    RESUMES = 8,     // how a run is resumed: run.json has it, except for --resume auto
    START = 16,      // of this start of the program, not of the run: not in run.json
    MODE = 32,       // replaces training; at most one is given
};

#define FLAGS(F, HEADING) \
    HEADING(model, "Model and data") \
    F(TEXT,   model,         'm', "",        0, 0, PATH | ALWAYS, "preset (gpt2, d12, llama-1b, ...: an unknown name lists all), HF folder or checkpoint") \
    F(SWITCH, from_scratch,  0,   false,     0, 0, 0, "use only config.json of the folder given with -m") \
    F(SWITCH, allow_nonfinite, 0,  false,     0, 0, 0, "load weights with Inf and NaN too, or such as -p makes Inf, to look at them") \
    F(TEXT,   tokenizer,     0,   "",        0, 0, PATH, "tokenizer.json, or vocab.json with merges.txt, or their folder (default: that of the model folder, else of -d if its ids fit)") \
    F(TEXT,   data,          'd', "data/sets/kjv", 0, 0, PATH | ALWAYS, "token shards: folder with train_*.bin and val_*.bin, or one file; a mixture is SET:SHARE,SET:SHARE...") \
    F(TEXT,   val,           'v', "",        0, 0, PATH, "validation shards, if not the val_*.bin beside the training shards") \
    F(SWITCH, raw_tokens,    0,   false,     0, 0, 0, "shards are nanoGPT's headerless uint16 .bin") \
    F(SWITCH, no_shuffle,    0,   false,     0, 0, SHAPES, "windows in file order") \
    F(ONEOF,  documents,     0,   "auto",    "auto|joined|separate", 0, SHAPES, "packing of windows: joined = cut from the stream of tokens; separate = whole documents, attention and positions within each; auto = separate where shards say where documents begin (conversations)") \
    F(ONEOF,  too_long,      0,   "drop",    "drop|cut", 0, SHAPES, "separate documents longer than -t: left out, or cut into several") \
    F(INT,    seed,          's', 42,        0, INT64_MAX, 0, "seed of the initial weights, the data order and the samples") \
    HEADING(run, "The run") \
    F(TEXT,   out,           'o', "",        0, 0, PATH | START, "run folder for log and checkpoints; without it nothing is written") \
    F(INT,    steps,         'n', 0,         0, INT64_MAX, 0, "optimizer steps, counted from the start of the run (default: --epochs)") \
    F(INT,    epochs,        0,   1,         1, 1 << 20, 0, "passes over the training shards, when -n is not given") \
    F(TEXT,   resume,        0,   "",        0, 0, PATH | RESUMES, "resume from a checkpoint, or from the newest complete one of a run folder; auto = the newest of -o if there is one") \
    F(SWITCH, elastic,       0,   false,     0, 0, RESUMES, "with --resume: keep the checkpoint's global batch on any number of ranks; -g is computed, -b is the maximum") \
    F(TEXT,   repeat,        0,   "",        0, 0, PATH | START, "reproduce the run of this folder from its run.json; may be combined with -o only") \
    F(TEXT,   config,        0,   "",        0, 0, PATH | START, "DeepSpeed's JSON: its keys become flags; command-line flags override the file") \
    HEADING(batch, "Batch and sequence length") \
    F(INT,    micro_batch,   'b', 4,         1, 1 << 20, 0, "sequences per rank and micro-step") \
    F(INT,    grad_accum,    'g', 1,         1, 1 << 20, 0, "micro-steps per optimizer step") \
    F(INT,    batch,         0,   0,         1, 1 << 30, 0, "global batch in sequences; -b or -g may then be left out") \
    F(INT,    seq_len,       't', 0,         1, 1 << 24, 0, "tokens per sequence (default: the model's context, at most 1024)") \
    F(TEXT,   batch_ramp,    0,   "",        0, 0, SHAPES, "batch size warm-up, FROM:STEPS: the global batch grows from FROM sequences over the first steps, by whole micro-steps") \
    F(TEXT,   seq_ramp,      0,   "",        0, 0, SHAPES, "sequence length warm-up, FROM:STEPS: of each sequence the first FROM tokens are used, growing over the first steps by 8") \
    HEADING(zero, "ZeRO and communication") \
    F(INT,    zero,          'z', 0,         0, 3, 0, "ZeRO stage: 0 nothing sharded, 1 optimizer states, 2 and gradients, 3 and parameters") \
    F(INT,    tp,            0,   1,         1, 1024, 0, "tensor parallelism: each matrix is split over this many neighbouring ranks, which are a replica of the model; ZeRO shards over the replicas") \
    F(INT,    persist_below, 0,   0,         0, INT64_MAX, 0, "stage 3: units (blocks) of fewer elements keep their parameters whole (parameter persistence)") \
    F(INT,    reduce_bucket, 0,   0,         0, INT64_MAX, 0, "gradients are reduced in buckets of whole units of at most so many elements; 0 = unit by unit") \
    F(INT,    gather_bucket, 0,   0,         0, INT64_MAX, 0, "parameters are all-gathered in buckets of whole units of at most so many elements; 0 = unit by unit") \
    F(ONEOF,  reduce,        0,   "micro",   "micro|step", 0, 0, "stages 2 and 3: gradients are reduce-scattered in every micro-step, or accumulated whole and sent once a step") \
    F(INT,    overlap,       0,   1,         0, 1, 0, "1: communication and the update overlap computation; 0: all on one stream") \
    F(SWITCH, deterministic, 0,   false,     0, 0, 0, "sum gradients in rank order: the bits do not depend on NCCL") \
    HEADING(memory, "Activation recomputation and offload") \
    F(TEXT,   recompute,     'r', "none",    0, 0, 0, "activation recomputation (activation checkpointing): none, cheap (norms), mlp, attention (and mlp), block, or K: K blocks at a time") \
    F(TEXT,   offload,       0,   "none",    0, 0, 0, "stored in host memory, comma-separated: activations (the blocks' inputs of -r block or K, but two), optimizer (master weights, moments), gradients (slices of stages 2 and 3), parameters (slices of stage 3); none") \
    F(REAL,   offload_share, 0,   1,         0, 1, 0, "of --offload optimizer: this share is in host memory; the first units in the order of the forward stay on the device") \
    F(INT,    head_rows,     0,   0,         0, 1 << 30, SHAPES, "rows of logits that exist at a time, which the head works on in chunks; 0 = as many as fit 1 GiB on a GPU, 64 MiB on a CPU") \
    F(SWITCH, auto_,         0,   false,     0, 0, 0, "choose -z, -r, -b and --offload where not given (not --tp): the fastest estimated that fits") \
    HEADING(precision, "Precision") \
    F(ONEOF,  precision,     'p', "fp32",    "fp32|bf16|fp16", 0, SHAPES, "data type of parameters and activations (mixed precision: the optimizer keeps master weights)") \
    F(ONEOF,  master,        0,   "fp32",    "fp32|split|none", 0, SHAPES, "bf16: the master weights: fp32; split = the bf16 weight and the 16 bits below it, exactly the fp32 value; none = the bf16 weight alone, with stochastic rounding") \
    F(ONEOF,  state_dtype,   0,   "fp32",    "fp32|bf16", 0, SHAPES, "the optimizer's moments; bf16 with stochastic rounding") \
    F(ONEOF,  grad_dtype,    0,   "fp32",    "fp32|bf16|fp16", 0, SHAPES, "gradients are accumulated over micro-steps in fp32, or in the 16 bits of -p (those of embeddings and head in fp32 until they are sent)") \
    F(ONEOF,  comm_dtype,    0,   "grad",    "grad|fp32|bf16|fp16", 0, SHAPES, "communication dtype of gradients; grad = that of --grad-dtype") \
    F(TEXT,   fp32_tensors,  0,   "",        0, 0, SHAPES, "bf16, fp16: tensors kept in fp32, weight, gradient and moments: comma-separated parts of their names (wte,ln_f) or shell patterns; matrix multiplications read them rounded") \
    HEADING(loss_scale, "Loss scaling (fp16)") \
    F(REAL,   loss_scale,    0,   0,         0, 1e30, 0, "fp16: factor of the loss in the backward; 0 = dynamic") \
    F(INT,    initial_scale_power, 0,   16,    0, 127, 0, "fp16: the loss scale starts at 2 to this power") \
    F(INT,    loss_scale_window, 0,   1000,    1, 1 << 30, 0, "fp16: the loss scale doubles after so many good steps in a row") \
    F(INT,    hysteresis,    0,   2,         1, 1 << 30, 0, "fp16: overflows before the loss scale is halved") \
    F(REAL,   min_loss_scale, 0,   1,         1e-30, 1e30, 0, "fp16: an overflow at this loss scale ends the run") \
    F(SWITCH, consecutive_hysteresis, 0,   false, 0, 0, 0, "fp16: every step without overflow restores the hysteresis") \
    HEADING(optimizer, "Optimizer") \
    F(ONEOF,  optimizer,     0,   "adamw",   &FlagWords::optimizers, 0, SHAPES, "optimizer; muon is for hidden matrices, the rest takes adamw") \
    F(REAL,   beta1,         0,   0.9,       0, 0.999999, SHAPES, "first moment decay") \
    F(REAL,   beta2,         0,   0.95,      0, 0.999999, SHAPES, "second moment decay (lion: 0.99 if not given)") \
    F(REAL,   eps,           0,   1e-8,      0, 1, SHAPES, "added to the root of the second moment") \
    F(REAL,   weight_decay,  0,   0.1,       0, 100, SHAPES, "decay of 2-D tensors (if not given adam, sgd, adagrad: 0, lamb: 0.01)") \
    F(REAL,   momentum,      0,   -1,       -1, 0.999999, SHAPES, "sgd, muon: decay of the momentum; -1 = 0.9, 0.95") \
    F(REAL,   dampening,     0,   0,         0, 1, SHAPES, "sgd: the gradient's share that does not enter the momentum") \
    F(SWITCH, nesterov,      0,   false,     0, 0, SHAPES, "sgd: Nesterov momentum") \
    F(REAL,   muon_lr,       0,   0.02,      0, 1e3, SHAPES, "muon: peak learning rate of hidden matrices") \
    F(TEXT,   param_group,   0,   "",        0, 0, SHAPES, "parameter groups, by tensor name: PATTERN:lr=FACTOR,wd=DECAY;PATTERN:... (shell patterns, a later one wins)") \
    F(REAL,   clip,          0,   1.0,       0, 1e30, SHAPES, "gradient clipping: largest global gradient norm; 0 = off") \
    F(REAL,   dropout,       0,   0,         0, 0.99, SHAPES, "share of the embeddings, attention probabilities and residual branches set to 0 in training") \
    F(REAL,   attn_dropout,  0,   -1,       -1, 0.99, SHAPES, "dropout of attention probabilities alone; -1 = as --dropout") \
    HEADING(schedule, "Learning rate") \
    F(REAL,   lr,            'l', 6e-4,      0, 1e3, SHAPES, "peak learning rate (2e-5 if not given where -m names weights to start from)") \
    F(ONEOF,  schedule,      0,   "cosine",  &FlagWords::schedules, 0, SHAPES, "learning rate over the steps") \
    F(INT,    warmup,        0,   -1,       -1, INT64_MAX, SHAPES, "warm-up steps; -1 = 2 % of the steps, at most 700, and half of them for onecycle") \
    F(ONEOF,  warmup_type,   0,   "linear",  "linear|log", 0, SHAPES, "the warm-up's rise: in a straight line, or as the logarithm of the step") \
    F(REAL,   warmup_min_lr, 0,   0,         0, 1e3, SHAPES, "learning rate from which the warm-up rises") \
    F(REAL,   decay,         0,   0.2,       0, 1, SHAPES, "wsd: share of the steps, at the end, in which the learning rate falls") \
    F(REAL,   min_lr,        0,   -1,       -1, 1e3, SHAPES, "learning rate at the end; -1 = a tenth of the peak") \
    F(ONEOF,  schedule_as,   0,   "own",     "own|deepspeed", 0, SHAPES, "the sequence of rates: this program's, or step by step DeepSpeed's, whose first two steps have the lowest; set by --config") \
    F(TEXT,   schedule_params, 0, "",        0, 0, SHAPES, "with --schedule-as deepspeed: NAME=VALUE,... of its OneCycle, LRRangeTest and total_num_steps, by its names") \
    HEADING(validation, "Validation") \
    F(INT,    eval_every,    0,   0,         0, INT64_MAX, 0, "validate every so many steps; 0 = at the end only") \
    F(SWITCH, eval_at_start, 0,   false,     0, 0, 0, "validate before the first step too") \
    F(INT,    patience,      0,   0,         0, 1 << 30, 0, "stop after so many validations in a row without a lower loss; 0 = never") \
    F(INT,    eval_batches,  0,   0,         0, INT64_MAX, 0, "at most so many global micro-batches per validation; 0 = the whole set") \
    F(INT,    eval_stride,   0,   0,         0, 1 << 24, 0, "validation windows begin so many tokens apart; each token counts once; 0 = -t") \
    HEADING(save, "Checkpoints") \
    F(INT,    save_every,    0,   0,         0, INT64_MAX, 0, "checkpoint every so many steps; 0 = at the end only (with -o)") \
    F(INT,    keep,          0,   0,         0, 1 << 20, 0, "the newest checkpoints to keep: older ones are deleted; 0 = all") \
    F(INT,    keep_every,    0,   0,         0, INT64_MAX, 0, "with --keep: also keep those of every so many steps") \
    F(SWITCH, keep_best,     0,   false,     0, 0, 0, "save after each validation with the lowest loss so far, and keep that checkpoint whatever --keep says") \
    F(ONEOF,  on_save_error, 0,   "continue", "continue|stop", 0, 0, "after a failed save (full disk), which is reported: continue training, or stop") \
    HEADING(checks, "Log and checks") \
    F(INT,    log_every,     0,   1,         1, INT64_MAX, 0, "print every so many steps (the log file has all)") \
    F(SWITCH, verbose,       0,   false, 0, 0, START, "print details too: communication volume, host synchronizations, ZeRO on one rank") \
    F(INT,    hash_every,    0,   0,         0, INT64_MAX, 0, "state hash into the log every so many steps; always at checkpoints and the end") \
    F(INT,    check_replicas, 0,   0,         0, INT64_MAX, 0, "check every so many steps that all ranks have the same parameters; 0 = never") \
    F(REAL,   spike_deviations, 0,   6,        0, 1e6, SHAPES, "a loss or norm so many standard deviations above its running mean is reported; 0 = never") \
    F(INT,    spike_window,  0,   100,       2, 1 << 30, SHAPES, "window of the running mean and deviation, in steps") \
    F(SWITCH, spike_skip,    0,   false,     0, 0, SHAPES, "a step whose loss or norm is such a spike changes nothing, like one with non-finite gradients") \
    F(REAL,   timeout,       0,   600,       0, 1e9, 0, "seconds without progress after which a rank says where it waits and ends the run; 0 = never") \
    F(INT,    profile,       0,   0,         0, 1000, 0, "trace so many steps, after the first three, for ui.perfetto.dev: trace.json in -o, else in the working directory") \
    HEADING(modes, "Modes: instead of training") \
    F(SWITCH, plan,          0,   false,     0, 0, MODE, "print the memory and communication plan and stop") \
    F(TEXT,   gpu,           0,   "",        0, 0, 0, "with --plan: for this GPU (h100, a100, l4, rtx 4090 ...)") \
    F(INT,    ranks,         0,   0,         0, 1 << 20, 0, "with --plan: for so many ranks") \
    F(SWITCH, bench,         0,   false,     0, 0, MODE, "time -n steps (20) on synthetic tokens, and each operation as % of roofline, and stop") \
    F(TEXT,   bench_json,    0,   "",        0, 0, PATH, "with --bench: write every figure to this file") \
    F(SWITCH, eval,          0,   false,     0, 0, MODE, "validate and stop") \
    F(TEXT,   choices,       0,   "",        0, 0, PATH | MODE, "answer the multiple-choice questions of this file (JSONL of ctx, endings, label: HellaSwag) and stop") \
    F(TEXT,   generate,      0,   "",        0, 0, MODE, "continue this text and stop") \
    F(TEXT,   prompts,       0,   "",        0, 0, PATH | MODE, "continue the prompts of this JSONL file (- = stdin), -b at a time, JSONL to stdout, and stop") \
    F(TEXT,   export_,       0,   "",        0, 0, PATH | MODE, "write the weights as an HF folder and stop") \
    F(ONEOF,  export_dtype,  0,   "fp32",    "fp32|bf16|fp16", 0, 0, "data type of --export, independent of -p") \
    F(INT,    shard_bytes,   0,   5000000000, 1, INT64_MAX, 0, "--export splits weights into files of at most so many bytes, with an index") \
    HEADING(generation, "Generation") \
    F(INT,    sample_tokens, 0,   128,       0, 1 << 20, 0, "tokens to generate; also of the sample at the end of a run (0 = none)") \
    F(REAL,   temperature,   0,   0.8,       0, 100, 0, "sampling temperature; 0 = greedy") \
    F(INT,    top_k,         0,   40,        0, 1 << 30, 0, "sample among the k most likely tokens; 0 = all") \
    F(REAL,   top_p,         0,   1.0,       0, 1, 0, "sample among the most likely tokens with this total probability (nucleus sampling)") \
    F(REAL,   repetition_penalty, 0,   1.0,    1e-3, 1e3, 0, "divides logits of tokens already in the text; 1 = off") \
    F(TEXT,   stop,          0,   "",        0, 0, 0, "tokens that end a text, ids or spellings, comma-separated (default: eos_token_id of config.json and generation_config.json)") \
    F(SWITCH, no_kv_cache,   0,   false,     0, 0, 0, "generate without the key/value cache: the whole context for each token") \
    HEADING(program, "The program") \
    F(INT,    device_mb,     0,   0,         0, INT64_MAX >> 20, 0, "CPU and emulated builds: device memory budget in MiB; 0 = the machine's") \
    F(SWITCH, tune,          0,   false,     0, 0, 0, "GPU: time several algorithms for each matrix multiplication, and its epilogue fused or not, and use the fastest; choices are cached, and in run.json") \
    F(SWITCH, print_config,  0,   false,     0, 0, 0, "print every flag, its value and its source, and stop") \
    F(SWITCH, report,        0,   false,     0, 0, 0, "print what this binary is built with, what it finds on this machine, and how to fix what is missing") \
    F(SWITCH, version,       0,   false,     0, 0, 0, "print version, compiler and device") \
    F(SWITCH, help,          'h', false,     0, 0, 0, "print this list")

/* Values that are planned but not implemented: the refusal says so. */
#define VALUES_LATER "1bit-adam 01-adam 1bit-lamb onebitadam zerooneadam onebitlamb"

enum FlagKind { INT, REAL, TEXT, ONEOF, SWITCH };
typedef int64_t FlagType_INT;
typedef double FlagType_REAL;
typedef const char* FlagType_TEXT;
typedef const char* FlagType_ONEOF;
typedef bool FlagType_SWITCH;
#define FLAG_NOTHING(...)

/* HEADING_name is the index of the first flag below it. */
#define FLAG_ENUM(kind, field, ...) FLAG_##field,
#define HEADING_ENUM(name, title) HEADING_##name, HEADING_##name##_BACK = HEADING_##name - 1,
enum FlagIdx { FLAGS(FLAG_ENUM, HEADING_ENUM) NUM_FLAGS };
#define HEADING_ROW(name, title) {HEADING_##name, title},
static const struct { int idx; const char* title; } flag_headings[] = { FLAGS(FLAG_NOTHING, HEADING_ROW) };

/* why: it is refused; yields: any other value of the flag overrides it. */
typedef struct { const char* spelling; int idx; const char *value, *why; bool yields; } FlagAlias;
#define ALIAS_ROW(spelling, field, value) {spelling, FLAG_##field, value, nullptr, false},
#define DEFAULT_ROW(spelling, field, value) {spelling, FLAG_##field, value, nullptr, true},
#define REFUSED_ROW(spelling, why) {spelling, -1, nullptr, why, false},
static const FlagAlias flag_aliases[] = { FLAG_ALIASES(ALIAS_ROW, DEFAULT_ROW, REFUSED_ROW) };
enum { NUM_ALIASES = sizeof flag_aliases / sizeof flag_aliases[0] };

typedef struct Flags {
#define FLAG_FIELD(kind, field, ...) FlagType_##kind field;
    FLAGS(FLAG_FIELD, FLAG_NOTHING)
    bool given[NUM_FLAGS];          // on the command line or in the file of --config; index FLAG_field
    const char* from[NUM_FLAGS];    // FROM_COMMAND_LINE, or the key of that file
    const FlagAlias* as[NUM_FLAGS]; // the alias on the command line; null: its own name
    bool denied[NUM_ALIASES];       // "--bf16 False": the value that flag_rules.h then refuses
    const FlagWords* words;
} Flags;
#define FROM_COMMAND_LINE flags_command_line
inline const char flags_command_line[] = "command line";    // of one address in the objects of all precisions

/* One row with its types erased; `low` of ONEOF is the list of choices. A long double holds every int64. */
static_assert(LDBL_MANT_DIG >= 64, "the bounds of INT flags are exact");
typedef struct {
    FlagKind kind;
    const char* name;
    char letter;
    size_t offset;
    long double low, high;
    const char* choices;
    const char* FlagWords::*words;  // the caller's choices; null: none
    int is;
    const char* help;
} FlagRow;
template <class T> static long double flag_bound(T x) { return x; }
static inline long double flag_bound(const char*) { return 0; }
static inline long double flag_bound(const char* FlagWords::*) { return 0; }
template <class T> static const char* flag_choices(T) { return ""; }
static inline const char* flag_choices(const char* choices) { return choices; }
template <class T> static const char* FlagWords::*flag_words(T) { return nullptr; }
static inline const char* FlagWords::*flag_words(const char* FlagWords::*words) { return words; }
#define FLAG_ROW(kind, field, letter, def, low, high, is, help) \
    {kind, #field, (char)(letter), offsetof(Flags, field), flag_bound(low), flag_bound(high), flag_choices(low), \
     flag_words(low), is, help},
static const FlagRow flag_rows[] = { FLAGS(FLAG_ROW, FLAG_NOTHING) };

static Flags flags_default(const FlagWords* words)
{
#define FLAG_DEFAULT(kind, field, letter, def, ...) def,
    return Flags{FLAGS(FLAG_DEFAULT, FLAG_NOTHING) {}, {}, {}, {}, words};
}
#undef FLAG_ENUM
#undef HEADING_ENUM
#undef HEADING_ROW
#undef ALIAS_ROW
#undef DEFAULT_ROW
#undef REFUSED_ROW
#undef FLAG_FIELD
#undef FLAG_ROW
#undef FLAG_DEFAULT
#undef FLAG_NOTHING

// ------------------------------------------------------------------------------------------------- names and values
/* "--micro-batch" for field micro_batch, "--export" for export_ (a C++ keyword), in a buffer of the caller. */
static const char* flag_long_name(const FlagRow* row, char (&buf)[64])
{
    int i = snprintf(buf, sizeof buf, "--%s", row->name);
    for (int k = 2; k < i; k++) if (buf[k] == '_') buf[k] = k + 1 < i ? '-' : 0;
    return buf;
}

/* The name used on the command line: its own or an alias. */
static const char* flag_given_name(const Flags* flags, int idx, char (&buf)[64])
{
    const FlagAlias* as = flags->as[idx];
    if (as == nullptr) return flag_long_name(&flag_rows[idx], buf);
    snprintf(buf, sizeof buf, "%.*s", (int)strcspn(as->spelling, "="), as->spelling);
    return buf;
}

/* The choices of a row of ONEOF. */
static const char* flag_choices_of(const Flags* f, const FlagRow* row)
{
    return row->words != nullptr ? f->words->*row->words : row->choices;
}

/* The row of a field; null if there is none. */
static const FlagRow* flag_find(const char* name)
{
    for (const FlagRow& row : flag_rows) if (strcmp(row.name, name) == 0) return &row;
    return nullptr;
}

/* The number with the fewest digits that read back as the same number. */
static const char* real_text(double x, char (&buf)[64])
{
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(buf, sizeof buf, "%.*g", digits, x);
        if (strtod(buf, nullptr) == x) break;
    }
    return buf;
}

/* The value of a row as text, which the parser reads back. */
static const char* flag_value(const Flags* flags, const FlagRow* row, char (&buf)[64])
{
    const char* at = (const char*)flags + row->offset;
    switch (row->kind) {
    case INT: snprintf(buf, sizeof buf, "%lld", (long long)*(const int64_t*)at); return buf;
    case REAL: return real_text(*(const double*)at, buf);
    case SWITCH: return *(const bool*)at ? "true" : "false";
    case TEXT:
    case ONEOF: return *(const char* const*)at;
    }
    return "";
}

/* A switch that is on, or another flag that is given. */
static bool flag_is_on(const Flags* flags, int idx)
{
    const FlagRow* row = &flag_rows[idx];
    return row->kind == SWITCH ? *(const bool*)((const char*)flags + row->offset) : flags->given[idx];
}

// ---------------------------------------------------------------------------------------------------- did you mean
/* Edit distance (Levenshtein 1966) of two short names. */
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

/* The candidate nearest to `word`, if at most a third of its letters differ. */
typedef struct { const char* word; int distance; char nearest[64]; } Nearest;
static Nearest nearest_begin(const char* word) { return Nearest{word, ((int)strlen(word) + 2) / 3 + 1, ""}; }
static void nearest_offer(Nearest* n, const char* candidate)
{
    int d = edit_distance(n->word, candidate);
    if (d >= n->distance) return;
    n->distance = d;
    snprintf(n->nearest, sizeof n->nearest, "%s", candidate);
}

/* The next word of a list (separated by `sep`), in buf; false at its end. */
static bool word_next(const char** list, char sep, char (&buf)[64])
{
    const char separators[] = {sep, 0};
    if (**list == 0) return false;
    size_t n = strcspn(*list, separators);
    snprintf(buf, sizeof buf, "%.*s", (int)n, *list);
    *list += n + ((*list)[n] == sep);
    return true;
}

static bool word_in_list(const char* word, const char* list, char sep)
{
    char buf[64];
    while (word_next(&list, sep, buf)) if (strcmp(word, buf) == 0) return true;
    return false;
}

/* En dash and its kin, U+2010 to U+2015, and the minus sign, U+2212. */
static bool starts_with_other_dash(const char* arg)
{
    const bool dash = strncmp(arg, "\xe2\x80", 2) == 0 && (unsigned char)arg[2] - 0x90u <= 5;
    return dash || strncmp(arg, "\xe2\x88\x92", 3) == 0;
}

[[noreturn]] static void flag_unknown(const char* arg)
{
    char name[64], buf[64];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(arg, "="), arg);
    if (starts_with_other_dash(arg))
        die_usage("'%s' begins with another dash than '-', as word processors write it: type '-'", arg);
    if (name[0] != '-')
        die_usage("'%s' is not an option; options start with '-': did you forget the one before it? --help lists them",
                  arg);
    if (name[1] != '-') die_usage("unknown option '%s': --help lists the letters", arg);
    if (name[2] == 0) die_usage("unknown option '%s': it has no name; --help lists all", name);
    for (char* p = name; *p; p++) if (*p == '_') *p = '-';
    Nearest n = nearest_begin(name);
    for (const FlagRow& row : flag_rows) nearest_offer(&n, flag_long_name(&row, buf));
    for (const FlagAlias& a : flag_aliases) {
        snprintf(buf, sizeof buf, "%.*s", (int)strcspn(a.spelling, "="), a.spelling);
        nearest_offer(&n, buf);
    }
    snprintf(name, sizeof name, "%.*s", (int)strcspn(arg, "="), arg);
    if (n.nearest[0]) die_usage("unknown option '%s': did you mean %s? --help lists all", name, n.nearest);
    die_usage("unknown option '%s': --help lists all", name);
}

[[noreturn]] static void value_unknown(const char* shown, const char* text, const char* choices)
{
    char buf[64];
    Nearest n = nearest_begin(text);
    for (const char* list = choices; word_next(&list, '|', buf);) nearest_offer(&n, buf);
    if (text[0] == 0) die_usage("%s needs one of %s, not ''", shown, choices);
    if (n.nearest[0]) die_usage("%s %s: not one of %s; did you mean %s?", shown, text, choices, n.nearest);
    die_usage("%s %s: not one of %s", shown, text, choices);
}

// ------------------------------------------------------------------------------------------------- the command line
/* Is the whole string a number in [low, high]? Else `why` says what is wrong. Counts may be written 1e6; all up to the
 * largest int64 are exact. A REAL is rounded once, to a double. */
static bool flag_number(const FlagRow* row, const char* text, long double* number, char (&why)[160])
{
    char* end;
    long double x = row->kind == INT ? strtold(text, &end) : (long double)strtod(text, &end);
    int digits = row->kind == INT ? 19 : 10;
    *number = x;
    why[0] = 0;
    if (end == text || *end != 0 || std::isnan(x))
        snprintf(why, sizeof why, "needs a number, not '%s'", text);
    else if (row->kind == INT && x != floorl(x))
        snprintf(why, sizeof why, "needs a whole number, not '%s'", text);
    else if (x < row->low || x > row->high)
        snprintf(why, sizeof why, "%s is out of range: %.*Lg to %.*Lg", text, digits, row->low, digits, row->high);
    else if (row->kind == REAL && row->low == -1 && x > -1 && x < 0)   // -1 is allowed besides the range
        snprintf(why, sizeof why, "%s is out of range: 0 to %.*Lg, or -1", text, digits, row->high);
    return why[0] == 0;
}

static void flag_store(Flags* flags, const FlagRow* row, const char* shown, const char* text)
{
    char *at = (char*)flags + row->offset, why[160];
    long double x = 0;
    if ((row->kind == REAL || row->kind == INT) && !flag_number(row, text, &x, why)) die_usage("%s %s", shown, why);
    switch (row->kind) {
    case REAL: *(double*)at = (double)x; break;
    case INT: *(int64_t*)at = (int64_t)x; break;
    case TEXT: *(const char**)at = text; break;
    case ONEOF: {
        const char* choices = flag_choices_of(flags, row);
        if (word_in_list(text, VALUES_LATER, ' '))
            die_usage("%s %s is not there yet in this version: have %s", shown, text, choices);
        if (!word_in_list(text, choices, '|')) value_unknown(shown, text, choices);
        *(const char**)at = text;
        break;
    }
    case SWITCH: *(bool*)at = strcasecmp(text, "true") == 0; break;
    }
}

/* A word of the command line that names an option: "--micro_batch=2" is --micro-batch and 2, "-b2" is -b and 2. */
typedef struct { char name[64]; const char* value; } FlagWord;

static FlagWord flag_word(const char* arg)
{
    FlagWord w = {};
    if (arg[0] != '-' || arg[1] == 0) return w;
    if (arg[1] != '-') {
        snprintf(w.name, sizeof w.name, "%.2s", arg);
        if (arg[2] != 0) w.value = arg + 2 + (arg[2] == '=');
        return w;
    }
    size_t n = strcspn(arg, "=");
    snprintf(w.name, sizeof w.name, "%.*s", (int)n, arg);
    for (char* p = w.name; *p; p++) if (*p == '_') *p = '-';
    if (arg[n] == '=') w.value = arg + n + 1;
    return w;
}

/* The flag whose own name or letter this is; null if there is none. */
static const FlagRow* flag_named(const char* name)
{
    char buf[64];
    for (const FlagRow& row : flag_rows) {
        bool is_letter = row.letter != 0 && name[0] == '-' && name[1] == row.letter && name[2] == 0;
        if (is_letter || strcmp(flag_long_name(&row, buf), name) == 0) return &row;
    }
    return nullptr;
}

static bool is_true_or_false(const char* text)
{
    return strcasecmp(text, "true") == 0 || strcasecmp(text, "false") == 0;
}

static bool alias_has_name(const FlagAlias& a, const char* name)
{
    size_t n = strlen(name);
    return n > 0 && strncmp(a.spelling, name, n) == 0 && (a.spelling[n] == 0 || a.spelling[n] == '=');
}

static bool alias_has_word(const FlagAlias& a, const char* value)
{
    const char* word = strchr(a.spelling, '=');
    if (word == nullptr || value == nullptr) return false;
    return (is_true_or_false(value) ? strcasecmp : strcmp)(word + 1, value) == 0;
}

static bool alias_is_switch(const FlagAlias& a)
{
    return strchr(a.spelling, '=') == nullptr && (a.value != nullptr || flag_rows[a.idx].kind == SWITCH);
}

/* "--lr 0.001", "--bf16 (--precision bf16)": a flag as given on the command line. */
static void flag_given_text(const Flags* flags, int idx, char (&text)[256])
{
    const FlagAlias* as = flags->as[idx];
    char name[64], own[64], buf[64];
    const char* value = flag_value(flags, &flag_rows[idx], buf);
    flag_given_name(flags, idx, name);
    if (as == nullptr || as->value == nullptr) {
        snprintf(text, sizeof text, "%s %s", name, value);
    } else {
        const char* word = strchr(as->spelling, '=');
        snprintf(text, sizeof text, "%s%s%s (%s %s)", name, word != nullptr ? " " : "", word != nullptr ? word + 1 : "",
                 flag_long_name(&flag_rows[idx], own), value);
    }
}

/* Is the value only what the alias's program takes by default? */
static bool flag_yields(const Flags* flags, int idx) { return flags->as[idx] != nullptr && flags->as[idx]->yields; }

/* A flag may be given by two names if the values are equal. */
static void flag_set(Flags* flags, int idx, const FlagAlias* as, const char* shown, const char* text)
{
    const FlagRow* row = &flag_rows[idx];
    const FlagAlias* as_before = flags->as[idx];
    char before[256] = "", now[256], buf_before[64], buf_now[64];
    const char* value_before = "";
    if (flags->given[idx] && as != nullptr && as->yields) return;
    const bool given = flags->given[idx] && !flag_yields(flags, idx);
    if (given) {
        bool same = as == nullptr || as_before == nullptr ? as == as_before
                                                          : strcmp(as->spelling, as_before->spelling) == 0;
        if (same) die_usage("%s is given twice", shown);
        flag_given_text(flags, idx, before);
        value_before = flag_value(flags, row, buf_before);
    }
    flag_store(flags, row, shown, text);
    flags->as[idx] = as;
    if (given && strcmp(value_before, flag_value(flags, row, buf_now)) != 0) {
        flag_given_text(flags, idx, now);
        die_usage("%s and %s contradict each other: give one", before, now);
    }
    flags->given[idx] = true;
    flags->from[idx] = FROM_COMMAND_LINE;
}

/* Sets the flags of an alias: from its rows for this value, else from those for all values. */
static void alias_set(Flags* flags, const char* name, const char* value)
{
    bool of_word = false, found = false;
    char words[256] = "", shown[128];
    for (const FlagAlias& a : flag_aliases) of_word = of_word || (alias_has_name(a, name) && alias_has_word(a, value));
    for (const FlagAlias& a : flag_aliases) {
        const char* word = strchr(a.spelling, '=');
        if (!alias_has_name(a, name)) continue;
        if (of_word ? !alias_has_word(a, value) : word != nullptr) {
            if (word != nullptr && a.why == nullptr && !word_in_list(word + 1, words, '|'))
                snprintf(words + strlen(words), sizeof words - strlen(words), "%s%s", words[0] ? "|" : "", word + 1);
            continue;
        }
        found = true;
        bool has_word = word != nullptr && word[1] != 0;
        snprintf(shown, sizeof shown, "%s%s%s", name, has_word ? " " : "", has_word ? word + 1 : "");
        if (a.why != nullptr) die_usage("%s %s", shown, a.why);
        bool off = alias_is_switch(a) && value != nullptr && strcasecmp(value, "false") == 0;
        if (off && a.value != nullptr) flags->denied[&a - flag_aliases] = true;
        else flag_set(flags, a.idx, &a, name, a.value != nullptr ? a.value : value != nullptr ? value : "true");
    }
    if (!found) value_unknown(name, value, words);
}

/* No value follows an alias: a row "--name=" says what to do. */
static void alias_refuse_alone(const char* name)
{
    for (const FlagAlias& a : flag_aliases)
        if (alias_has_name(a, name) && alias_has_word(a, "")) die_usage("%s %s", name, a.why);
}

/* Finds a name of the command line: a flag's own name, or aliases. */
typedef struct { const FlagRow* row; bool known, takes_value, refused; } FlagName;

static FlagName flag_look_up(const char* name)
{
    FlagName found = {flag_named(name), false, false, false};
    if (found.row != nullptr) return FlagName{found.row, true, found.row->kind != SWITCH, false};
    for (const FlagAlias& a : flag_aliases) {
        if (!alias_has_name(a, name)) continue;
        found.known = true;
        if (a.why == nullptr) found.takes_value = found.takes_value || !alias_is_switch(a);
        else found.refused = found.refused || strchr(a.spelling, '=') == nullptr;
    }
    return found;
}

/* Fills *flags from defaults and the command line. A refusal is one line and exit code 2. */
static void flags_parse(Flags* flags, const FlagWords* words, int argc, char** argv)
{
    *flags = flags_default(words);
    for (int i = 1; i < argc; i++) {
        FlagWord w = flag_word(argv[i]);
        FlagName found = flag_look_up(w.name);
        if (!found.known) flag_unknown(argv[i]);
        const char* next = i + 1 < argc ? argv[i + 1] : nullptr;
        char shown[64];
        if (found.row != nullptr) flag_long_name(found.row, shown);
        else snprintf(shown, sizeof shown, "%s", w.name);
        if (w.value == nullptr && found.takes_value) {
            const bool ends = next == nullptr || flag_look_up(flag_word(next).name).known;
            if (ends && found.row == nullptr) alias_refuse_alone(w.name);
            if (next == nullptr) die_usage("%s needs a value", shown);
            if (ends && flag_word(next).value == nullptr)
                die_usage("%s needs a value, and %s is an option: write %s=%s if it is meant", shown, next, shown,
                          next);
            w.value = argv[++i];
        } else if (w.value == nullptr && next != nullptr && is_true_or_false(next)) {
            w.value = argv[++i];
        } else if (w.value != nullptr && !found.takes_value && !found.refused && !is_true_or_false(w.value)) {
            die_usage("%s takes no value, not '%s'", shown, w.value);
        }
        if (found.row == nullptr) alias_set(flags, w.name, w.value);
        else flag_set(flags, (int)(found.row - flag_rows), nullptr, shown, w.value != nullptr ? w.value : "true");
    }
}

// ----------------------------------------------------------------------------------------------------------- --help
/* "; also --bf16 = bf16, --dtype": a spelling once, whatever words it takes. */
static void help_aliases(FILE* f, const FlagRow& row)
{
    const char* between = "; also";
    char name[64], last[64] = "";
    for (const FlagAlias& a : flag_aliases) {
        if (a.idx != (int)(&row - flag_rows) || alias_has_name(a, last)) continue;
        if (&a > flag_aliases && strcmp((&a - 1)->spelling, a.spelling) == 0) continue;   // sets another flag as well
        snprintf(name, sizeof name, "%.*s", (int)strcspn(a.spelling, "="), a.spelling);
        fprintf(f, "%s %s", between, name);
        if (a.value != nullptr && strchr(a.spelling, '=') == nullptr) fprintf(f, " = %s", a.value);
        between = ",";
        memcpy(last, name, sizeof last);
    }
}

static void flags_help(const Flags* flags, FILE* f)
{
    const Flags defaults = flags_default(flags->words);
    char buf[64], left[80];
    fprintf(f, "train_gpt trains GPT-2, LLaMA and Qwen models: mpirun -np 8 ./train_gpt -z 2 -b 4 -g 16\n");
    for (const FlagRow& row : flag_rows) {
        for (const auto& heading : flag_headings)
            if (heading.idx == (int)(&row - flag_rows)) fprintf(f, "\n%s\n", heading.title);
        flag_long_name(&row, buf);
        if (row.letter) snprintf(left, sizeof left, "-%c, %s", row.letter, buf);
        else snprintf(left, sizeof left, "    %s", buf);
        fprintf(f, "  %-28s %s", left, row.help);
        if (row.kind == ONEOF) fprintf(f, "; one of %s", flag_choices_of(flags, &row));
        const char* value = flag_value(&defaults, &row, buf);
        if (row.kind != SWITCH && value[0]) fprintf(f, " [%s]", value);
        help_aliases(f, row);
        fprintf(f, "\n");
    }
    fprintf(f, "\nRefused, saying what to give instead:");
    for (const FlagAlias& a : flag_aliases)
        if (a.why != nullptr && strchr(a.spelling, '=') == nullptr) fprintf(f, " %s", a.spelling);
    fprintf(f, "\nIn a long name _ and - are alike. Exit codes: 0 done, 1 refused or failed, 2 usage.\n");
}
