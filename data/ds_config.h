/* ds_config.h: --config FILE: DeepSpeed's JSON, read as it is, becomes flags.
 *
 * Comments (#, //, slash and star) and commas after the last item are allowed, as in the Hjson that DeepSpeed reads; so
 * are keys that begin with _ at top level, which it ignores. "auto" (Hugging Face's word for "what the trainer says")
 * leaves the flag to the command line or to its default. Command-line flags override the file. A block that is in the
 * file takes DeepSpeed's defaults for what it leaves out, where they differ from train_gpt's; a block that is not there
 * takes train_gpt's. What becomes of a key is one row of ds_keys.h; a key without a row is refused, with a hint. All
 * refusals of a file are in one message. --print-config shows the result. */
#pragma once
#include "json.h"
#include "ds_keys.h"
#include "flags.h"

#define DS_DEFAULT "DeepSpeed's default"

typedef struct DsConfig {
    Flags* flags;
    const char* file;
    cJSON* json;               // kept: flags point into its strings
    const char* key;           // being read
    int num_keys, num_refused;
    char seq_ramp[64], offload[64], schedule[64], schedule_params[512];   // what the flags of that name point to
    JsonText said;             // a line per key: what became of it
    JsonText notes;            // what differs from DeepSpeed
    JsonText refused;
} DsConfig;

typedef void DsRule(DsConfig* c, const cJSON* value);
enum class DsKind { FLAG, RULE, SAME, ONLY, UNLESS_OFF, NEVER, ALIAS, PARAM };
typedef struct { const char* key; DsKind kind; const char* what; DsRule* rule; const char* note; } DsKey;

// ------------------------------------------------------------------------------------------------- what becomes of it
FORMAT(3, 4) static void ds_note(DsConfig* c, bool refused, const char* fmt, ...)
{
    char text[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    json_text_add(&c->said, "  %-56s  %s%s\n", c->key, refused ? "refused: " : "", text);
    if (refused) json_text_add(&c->refused, "%s%s: %s", c->num_refused++ > 0 ? "; " : "", c->key, text);
}
#define ds_say(c, ...) ds_note(c, false, __VA_ARGS__)
#define ds_refuse(c, ...) ds_note(c, true, __VA_ARGS__)

/* A value as the text that a flag takes. */
static const char* ds_text(const cJSON* value, char (&buf)[64])
{
    if (cJSON_IsBool(value)) return cJSON_IsTrue(value) ? "true" : "false";
    if (cJSON_IsNull(value)) return "null";
    if (cJSON_IsString(value)) return value->valuestring;
    if (!cJSON_IsNumber(value)) return cJSON_IsArray(value) ? "[...]" : "{...}";
    bool whole = fabs(value->valuedouble) < 1e15 && value->valuedouble == floor(value->valuedouble);
    snprintf(buf, sizeof buf, whole ? "%.0f" : "%.15g", value->valuedouble);
    return buf;
}

/* Does it ask for nothing? */
static bool ds_is_off(const cJSON* value)
{
    if (cJSON_IsObject(value) || cJSON_IsArray(value)) return value->child == nullptr;
    if (cJSON_IsString(value)) return strcmp(value->valuestring, "none") == 0;
    return cJSON_IsNull(value) || cJSON_IsFalse(value) || (cJSON_IsNumber(value) && value->valuedouble == 0);
}

static bool ds_is_auto(const cJSON* value)
{
    return cJSON_IsString(value) && strcmp(value->valuestring, "auto") == 0;
}

static void ds_store(DsConfig* c, const FlagRow* row, const char* text, const char* from)
{
    int idx = (int)(row - flag_rows);
    char shown[256], buf[64], value[64];
    flag_long_name(row, buf);
    snprintf(shown, sizeof shown, "%s: %s: %s", c->file, c->key, buf);
    flag_store(c->flags, row, shown, text);
    c->flags->given[idx] = true;
    c->flags->from[idx] = from;
    c->flags->as[idx] = nullptr;
    if (from == c->key) ds_say(c, "%s %s", buf, flag_value(c->flags, row, value));
}

/* The flag `name` to `text`, which lives as long as the flags; null of a switch or an unknown flag asks for nothing. */
static void ds_set(DsConfig* c, const char* name, const char* text, const char* from)
{
    const FlagRow* row = flag_find(name);
    char shown[256], buf[64], value[64];
    if (row == nullptr) {
        snprintf(shown, sizeof shown, "--%s", name);
        for (char* p = shown + 2; *p; p++) if (*p == '_') *p = '-';
        ds_refuse(c, "%s asks for %s, which is not there yet", text, shown);
        return;
    }
    int idx = (int)(row - flag_rows);
    flag_long_name(row, buf);
    if (c->flags->given[idx] && c->flags->from[idx] == FROM_COMMAND_LINE && !flag_yields(c->flags, idx)) {
        if (from == c->key) ds_say(c, "%s: overridden by %s %s on the command line", text, buf,
                                   flag_value(c->flags, row, value));
        return;
    }
    bool yes = strcmp(text, "true") == 0, no = strcmp(text, "false") == 0;
    if (row->kind == INT && (yes || no)) text = yes ? "1" : "0";
    long double number;
    char why[160];
    if (row->kind == ONEOF && !word_in_list(text, flag_choices_of(c->flags, row), '|'))
        ds_refuse(c, "%s is not one of %s (%s)", text, flag_choices_of(c->flags, row), buf);
    else if (row->kind == SWITCH && !yes && !no) ds_refuse(c, "%s must be true or false (%s)", text, buf);
    else if ((row->kind == INT || row->kind == REAL) && !flag_number(row, text, &number, why))
        ds_refuse(c, "%s %s", buf, why);
    else ds_store(c, row, text, from);
}

static void ds_set_from_key(DsConfig* c, const char* name, const char* text) { ds_set(c, name, text, c->key); }
static void ds_set_default(DsConfig* c, const char* name, const char* text)
{
    if (flag_find(name) != nullptr) ds_set(c, name, text, DS_DEFAULT);
}

/* The value at a path of keys with dots between; null where there is none. */
static const cJSON* ds_value(const DsConfig* c, const char* path)
{
    const cJSON* at = c->json;
    char key[96];
    while (at != nullptr && *path) {
        size_t n = strcspn(path, ".");
        snprintf(key, sizeof key, "%.*s", (int)n, path);
        at = json_get(at, key);
        path += n + (path[n] == '.');
    }
    return at;
}

/* DeepSpeed's default of a key that the file leaves out; where it says "auto", train_gpt's own stays. */
static void ds_default_of(DsConfig* c, const char* key, const char* flag, const char* text)
{
    if (ds_value(c, key) == nullptr) ds_set_default(c, flag, text);
}

static double ds_number_or(const DsConfig* c, const char* path, double fallback)
{
    const cJSON* value = ds_value(c, path);
    return cJSON_IsNumber(value) ? value->valuedouble : fallback;
}

static bool ds_type_is(const DsConfig* c, const char* path, const char* name)
{
    const cJSON* type = ds_value(c, path);
    return cJSON_IsString(type) && strcasecmp(type->valuestring, name) == 0;
}

// ----------------------------------------------------------------------------------------------------------- the rules
/* With both of its other factors the batch says for how many ranks, or replicas of the model, the file is. */
static void ds_batch(DsConfig* c, const cJSON* value)
{
    const double micro = ds_number_or(c, "train_micro_batch_size_per_gpu", 0);
    const double steps = ds_number_or(c, "gradient_accumulation_steps", 0), of_rank = micro * steps;
    const Flags* f = c->flags;
    const bool of_file = !f->given[FLAG_batch] && !f->given[FLAG_micro_batch] && !f->given[FLAG_grad_accum];
    char buf[64];
    ds_set_from_key(c, "batch", ds_text(value, buf));
    if (!of_file || of_rank < 1 || !cJSON_IsNumber(value)) return;
    if (fmod(value->valuedouble, of_rank) != 0)
        ds_refuse(c, "%s is no multiple of train_micro_batch_size_per_gpu x gradient_accumulation_steps = %g x %g: "
                  "DeepSpeed refuses it as well", ds_text(value, buf), micro, steps);
    else ds_say(c, "of %g ranks, with --tp of as many replicas", value->valuedouble / of_rank);
}

static void ds_precision(DsConfig* c, const cJSON* value, const char* name)
{
    const char* other = strcmp(name, "fp16") == 0 ? "bf16.enabled" : "fp16.enabled";
    if (cJSON_IsTrue(value) && cJSON_IsTrue(ds_value(c, other))) ds_refuse(c, "%s is true as well: choose one", other);
    else if (cJSON_IsTrue(value)) ds_set_from_key(c, "precision", name);
    else if (ds_is_off(value)) ds_say(c, "off");
    else ds_refuse(c, "must be true or false");
}
static void ds_fp16(DsConfig* c, const cJSON* value) { ds_precision(c, value, "fp16"); }
static void ds_bf16(DsConfig* c, const cJSON* value) { ds_precision(c, value, "bf16"); }

/* Two things in one key. Of gradients data_types.grad_accum_dtype, which comes later, has the last word. */
static void ds_bf16_master(DsConfig* c, const cJSON* value)
{
    if (ds_is_off(value)) {
        ds_say(c, "off");
    } else if (!cJSON_IsTrue(value)) {
        ds_refuse(c, "must be true or false");
    } else {
        ds_set_from_key(c, "master", "none");
        ds_set_from_key(c, "grad_dtype", "bf16");
        json_text_add(&c->notes, "  %s: weights take stochastic rounding\n", c->key);
    }
}

/* What DeepSpeed's schedulers and optimizers take: it refuses what their constructors do not know. max_grad_norm has a
 * row that says more. */
typedef struct { const char *type, *params; } DsMade;

static void ds_check_params(DsConfig* c, const DsMade* made, const cJSON* params)
{
    char others[256] = "";
    for (const cJSON* item = params ? params->child : nullptr; item != nullptr; item = item->next)
        if (!word_in_list(item->string, made->params, ' ') && strcmp(item->string, "max_grad_norm") != 0)
            snprintf(others + strlen(others), sizeof others - strlen(others), "%s%s", others[0] ? ", " : "",
                     item->string);
    if (others[0])
        ds_refuse(c, "%s has no %s: DeepSpeed refuses that as well; it has %s", made->type, others, made->params);
}

/* The kind, and DeepSpeed's defaults for what its parameters leave out. */
static void ds_optimizer(DsConfig* c, const cJSON* value)
{
#define OF_TORCH " foreach maximize differentiable"
#define OF_ADAM "lr betas eps weight_decay amsgrad bias_correction set_grad_none torch_adam adam_w_mode " \
                "fp32_optimizer_states capturable fused" OF_TORCH
    static const struct { DsMade made; const char *ours, *lr, *beta1, *beta2, *eps; } kinds[] = {
        {{"Adam", OF_ADAM}, "adamw", "1e-3", "0.9", "0.999", "1e-8"},
        {{"AdamW", OF_ADAM}, "adamw", "1e-3", "0.9", "0.999", "1e-8"},
        {{"SGD", "lr momentum dampening weight_decay nesterov fused" OF_TORCH}, "sgd", "1e-3", nullptr, nullptr,
         nullptr},
        {{"Lamb", "lr bias_correction betas eps eps_inside_sqrt weight_decay max_coeff min_coeff "
                  "amsgrad"}, "lamb", "1e-3", "0.9", "0.999", "1e-8"},
        {{"Lion", "lr betas weight_decay set_grad_none"}, "lion", "1e-3", "0.9", "0.99", nullptr},
        {{"Adagrad", "lr lr_decay weight_decay initial_accumulator_value eps fused" OF_TORCH}, "adagrad", "1e-2",
         nullptr, nullptr, "1e-10"},
        {{"Muon", OF_ADAM " momentum muon_lr adam_lr ns_method"}, "muon", "3e-4", "0.9", "0.95", "1e-10"},
    };
#undef OF_TORCH
#undef OF_ADAM
    for (const auto& kind : kinds) {
        if (!ds_type_is(c, "optimizer.type", kind.made.type)) continue;
        ds_check_params(c, &kind.made, ds_value(c, "optimizer.params"));
        bool coupled = strcmp(kind.made.type, "Adam") == 0 &&
                       cJSON_IsFalse(ds_value(c, "optimizer.params.adam_w_mode"));
        ds_set_from_key(c, "optimizer", coupled ? "adam" : kind.ours);
        bool of_torch = strcmp(kind.ours, "adamw") == 0 && !coupled &&
                        cJSON_IsTrue(ds_value(c, "optimizer.params.torch_adam"));
        ds_default_of(c, "optimizer.params.lr", "lr", kind.lr);
        ds_default_of(c, "optimizer.params.weight_decay", "weight_decay", of_torch ? "0.01" : "0");
        if (kind.beta1 != nullptr) ds_default_of(c, "optimizer.params.betas", "beta1", kind.beta1);
        if (kind.beta2 != nullptr) ds_default_of(c, "optimizer.params.betas", "beta2", kind.beta2);
        if (kind.eps != nullptr) ds_default_of(c, "optimizer.params.eps", "eps", kind.eps);
        bool is_ours = strcmp(c->flags->optimizer, kind.ours) == 0;    // else the command line has another
        if (is_ours && strcmp(kind.ours, "sgd") == 0) ds_default_of(c, "optimizer.params.momentum", "momentum", "0");
        if (is_ours && strcmp(kind.ours, "muon") == 0) {
            char text[64];
            snprintf(text, sizeof text, "%.15g", ds_number_or(c, "optimizer.params.lr", 0.02));
            ds_set_default(c, "muon_lr", text);
        }
        if (ds_value(c, "scheduler") == nullptr) {       // DeepSpeed then keeps the learning rate as it is
            ds_set_default(c, "schedule", "constant");
            ds_set_default(c, "warmup", "0");
        }
        return;
    }
    char buf[64];
    ds_refuse(c, "%s is not there; have Adam AdamW SGD Lamb Lion Adagrad Muon", ds_text(value, buf));
}

static void ds_betas(DsConfig* c, const cJSON* value)
{
    char buf[64];
    if (cJSON_GetArraySize(value) != 2) {
        ds_refuse(c, "must be a list of two numbers");
        return;
    }
    ds_set_from_key(c, "beta1", ds_text(cJSON_GetArrayItem(value, 0), buf));
    ds_set_from_key(c, "beta2", ds_text(cJSON_GetArrayItem(value, 1), buf));
}

/* Words of PyTorch's types, as DeepSpeed takes them; null for any other. */
static const char* ds_dtype(const cJSON* value)
{
    static const struct { const char *ours, *words; } dtypes[] = {
        {"fp32", "fp32|float32|float"}, {"bf16", "bf16|bfloat16"}, {"fp16", "fp16|float16|half"}};
    if (!cJSON_IsString(value)) return nullptr;
    const char* word = value->valuestring;
    if (strncmp(word, "torch.", 6) == 0) word += 6;
    for (const auto& d : dtypes) if (word_in_list(word, d.words, '|')) return d.ours;
    return nullptr;
}

static void ds_set_dtype(DsConfig* c, const char* flag, const cJSON* value)
{
    char buf[64];
    if (ds_is_off(value)) ds_say(c, "off");
    else ds_set_from_key(c, flag, ds_dtype(value) != nullptr ? ds_dtype(value) : ds_text(value, buf));
}
static void ds_comm_dtype(DsConfig* c, const cJSON* value) { ds_set_dtype(c, "comm_dtype", value); }
static void ds_grad_accum_dtype(DsConfig* c, const cJSON* value) { ds_set_dtype(c, "grad_dtype", value); }

static void ds_param_dtype(DsConfig* c, const cJSON* value)
{
    const char* dtype = ds_dtype(value);
    char buf[64];
    if (ds_is_off(value)) ds_say(c, "off");
    else if (dtype != nullptr && strcmp(dtype, c->flags->precision) == 0) ds_say(c, "%s, as -p says", dtype);
    else ds_refuse(c, "%s is not -p %s: DeepSpeed refuses that as well", ds_text(value, buf), c->flags->precision);
}

static const DsMade ds_schedulers[] = {
    {"WarmupLR", "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration"},
    {"WarmupDecayLR", "total_num_steps warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration"},
    {"WarmupCosineLR", "total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type "
                       "last_batch_iteration"},
    {"OneCycle", "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size "
                 "cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom "
                 "cycle_max_mom decay_mom_rate last_batch_iteration"},
    {"LRRangeTest", "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase "
                    "last_batch_iteration"},
};

/* The word of --schedule for DeepSpeed's scheduler `type`, into c->schedule; "" if there is none. */
static bool ds_find_schedule(DsConfig* c, const char* type)
{
    char row[64];
    c->schedule[0] = 0;
    for (const char* list = c->flags->words->schedules_of_deepspeed; word_next(&list, '|', row);) {
        char* word = strchr(row, '=');
        *word++ = 0;
        if (strcmp(row, type) == 0 && strcmp(type, "none") != 0) snprintf(c->schedule, sizeof c->schedule, "%s", word);
    }
    return c->schedule[0] != 0;
}

/* Is the schedule that of the file? Else the command line has another. */
static bool ds_schedule_counts(const DsConfig* c) { return strcmp(c->flags->schedule, c->schedule) == 0; }

/* The rate rises by `rate` of the lowest in every `size` steps: --lr is what it is after the first of them. */
static void ds_range_test(DsConfig* c)
{
    const double min_lr = ds_number_or(c, "scheduler.params.lr_range_test_min_lr", 1e-3);
    const double rate = ds_number_or(c, "scheduler.params.lr_range_test_step_rate", 1);
    char text[64];
    ds_set_from_key(c, "min_lr", real_text(min_lr, text));
    ds_set_from_key(c, "lr", real_text(min_lr * (1 + rate), text));
    ds_set_from_key(c, "warmup", real_text(ds_number_or(c, "scheduler.params.lr_range_test_step_size", 2000), text));
}

static void ds_scheduler(DsConfig* c, const cJSON* value)
{
    char buf[64], text[64];
    const char* type = ds_text(value, buf);
    if (!ds_find_schedule(c, type)) {
        ds_refuse(c, "%s is not there; have WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest",
                  type);
        return;
    }
    ds_set_from_key(c, "schedule", c->schedule);
    for (const DsMade& made : ds_schedulers)
        if (strcmp(made.type, type) == 0) ds_check_params(c, &made, ds_value(c, "scheduler.params"));
    if (!ds_schedule_counts(c)) return;
    ds_set_default(c, "schedule_as", "deepspeed");
    if (strcmp(type, "LRRangeTest") == 0) ds_range_test(c);
    if (strcmp(type, "OneCycle") == 0) {
        ds_default_of(c, "scheduler.params.cycle_first_step_size", "warmup", "2000");
        if (ds_value(c, "scheduler.params.cycle_min_lr") == nullptr ||
            ds_value(c, "scheduler.params.cycle_max_lr") == nullptr)
            ds_refuse(c, "OneCycle needs cycle_min_lr and cycle_max_lr: DeepSpeed has no default for them");
    }
    if (strncmp(type, "Warmup", 6) != 0) return;
    ds_default_of(c, "scheduler.params.warmup_num_steps", "warmup", "1000");
    ds_default_of(c, "scheduler.params.warmup_type", "warmup_type", "log");
    if (strcmp(type, "WarmupDecayLR") == 0) {
        ds_default_of(c, "scheduler.params.warmup_max_lr", "lr", "0.001");
        ds_default_of(c, "scheduler.params.warmup_min_lr", "min_lr", "0");
    }
    if (strcmp(type, "WarmupCosineLR") == 0)
        ds_default_of(c, "scheduler.params.cos_min_ratio", "min_lr", real_text(1e-4 * c->flags->lr, text));
}

static void ds_set_of_schedule(DsConfig* c, const char* flag, const char* text)
{
    if (ds_schedule_counts(c)) ds_set_from_key(c, flag, text);
    else ds_say(c, "counts with --schedule %s alone", c->schedule);
}

/* Where the warm-up starts; of WarmupDecayLR also where the decay ends. */
static void ds_warmup_min_lr(DsConfig* c, const cJSON* value)
{
    char buf[64];
    ds_set_of_schedule(c, "warmup_min_lr", ds_text(value, buf));
    if (ds_type_is(c, "scheduler.type", "WarmupDecayLR")) ds_set_of_schedule(c, "min_lr", ds_text(value, buf));
}

static void ds_warmup_num_steps(DsConfig* c, const cJSON* value)
{
    char buf[64];
    if (cJSON_IsNumber(value) && value->valuedouble >= 1) ds_set_from_key(c, "warmup", ds_text(value, buf));
    else ds_refuse(c, "%s must be a whole number of at least 1: DeepSpeed refuses it as well", ds_text(value, buf));
}

static void ds_warmup_type(DsConfig* c, const cJSON* value)
{
    char buf[64];
    const char* type = ds_text(value, buf);
    if (strcmp(type, "log") != 0 && strcmp(type, "linear") != 0)
        json_text_add(&c->notes, "  %s: %s is neither log nor linear: log, as in DeepSpeed\n", c->key, type);
    ds_set_of_schedule(c, "warmup_type", strcmp(type, "linear") == 0 ? "linear" : "log");
}

/* A share of the peak, which the optimizer's keys have set by now. */
static void ds_set_ratio(DsConfig* c, const char* flag, const cJSON* value)
{
    char text[64];
    if (cJSON_IsNumber(value)) ds_set_of_schedule(c, flag, real_text(value->valuedouble * c->flags->lr, text));
    else ds_refuse(c, "must be a number");
}
static void ds_warmup_min_ratio(DsConfig* c, const cJSON* value) { ds_set_ratio(c, "warmup_min_lr", value); }
static void ds_cos_min_ratio(DsConfig* c, const cJSON* value) { ds_set_ratio(c, "min_lr", value); }

/* --schedule-params gets NAME=VALUE. */
static void ds_schedule_param(DsConfig* c, const cJSON* value)
{
    const char* name = strrchr(c->key, '.') + 1;
    char buf[64];
    if (cJSON_IsNull(value)) return ds_say(c, "as if left out");
    if (!cJSON_IsNumber(value) && !cJSON_IsBool(value)) return ds_refuse(c, "must be a number, true or false");
    size_t n = strlen(c->schedule_params);
    snprintf(c->schedule_params + n, sizeof c->schedule_params - n, "%s%s=%s", n > 0 ? "," : "", name,
             ds_text(value, buf));
    ds_set_of_schedule(c, "schedule_params", c->schedule_params);
}

static void ds_total_num_steps(DsConfig* c, const cJSON* value)
{
    char buf[64];
    ds_schedule_param(c, value);
    if (cJSON_IsNumber(value) && !c->flags->given[FLAG_steps] && !c->flags->given[FLAG_epochs])
        ds_set_from_key(c, "steps", ds_text(value, buf));
}

/* Three keys, and two old ones, make one flag. */
static void ds_offload(DsConfig* c, const cJSON* value)
{
    static const struct { const char *key, *word, *flag; } keys[] = {
        {"activation_checkpointing.cpu_checkpointing", "true", "activations"},
        {"zero_optimization.offload_optimizer.device", "cpu", "optimizer"},
        {"zero_optimization.cpu_offload", "true", "optimizer"},
        {"zero_optimization.offload_param.device", "cpu", "parameters"},
        {"zero_optimization.cpu_offload_param", "true", "parameters"}};
    char buf[64], list[64] = "";
    for (const auto& k : keys) {
        const cJSON* given = ds_value(c, k.key);
        bool asks = given != nullptr && !ds_is_off(given) && !ds_is_auto(given);
        const char* replaced_by = strstr(k.key, "cpu_offload") == nullptr ? nullptr
                                  : k.flag[0] == 'o' ? "offload_optimizer" : "offload_param";
        const cJSON* beside = replaced_by ? json_get(ds_value(c, "zero_optimization"), replaced_by) : nullptr;
        if (given == value && beside != nullptr)
            return ds_refuse(c, "is the old name of %s: DeepSpeed refuses the two together", replaced_by);
        if (given == value && !asks) return ds_say(c, "off");
        if (given == value && strcmp(ds_text(value, buf), k.word) != 0)
            return ds_refuse(c, "%s: have %s, or %s", ds_text(value, buf), k.word, k.word[0] == 'c' ? "none" : "false");
        const bool counts = k.flag[0] != 'p' || c->flags->zero == 3;
        if (given == value && !counts) return ds_say(c, "counts with stage 3 alone, as in DeepSpeed");
        if (asks && counts && strstr(list, k.flag) == nullptr)
            snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", list[0] ? "," : "", k.flag);
    }
    snprintf(c->offload, sizeof c->offload, "%s", list);
    ds_set_from_key(c, "offload", c->offload);
}

/* true and false were its values before there were stages. */
static void ds_zero_switch(DsConfig* c, const cJSON* value)
{
    if (cJSON_IsBool(value)) ds_set_from_key(c, "zero", cJSON_IsTrue(value) ? "1" : "0");
    else if (!cJSON_IsObject(value)) ds_refuse(c, "must be an object, is %s", json_type_name(value));
}

static void ds_tensor_parallel(DsConfig* c, const cJSON* value)
{
    char buf[64];
    if (ds_is_off(value) || (cJSON_IsNumber(value) && value->valuedouble == 1)) ds_say(c, "off");
    else ds_set_from_key(c, "tp", ds_text(value, buf));
}

static bool ds_block_enabled(const cJSON* block) { return cJSON_IsTrue(json_get(block, "enabled")); }

static void ds_curriculum(DsConfig* c, const cJSON* value)
{
    const cJSON *kind = json_get(value, "curriculum_type"), *form = json_get(value, "schedule_type");
    const cJSON* steps = ds_value(c, "curriculum_learning.schedule_config.total_curriculum_step");
    const cJSON* unit = ds_value(c, "curriculum_learning.schedule_config.difficulty_step");
    const double from = ds_number_or(c, "curriculum_learning.min_difficulty", 0);
    const double to = ds_number_or(c, "curriculum_learning.max_difficulty", 0);
    char text[64];
    if (!ds_block_enabled(value)) {
        ds_say(c, "off");
    } else if (!cJSON_IsString(kind) || strcmp(kind->valuestring, "seqlen") != 0 || !cJSON_IsString(form) ||
               strcmp(form->valuestring, "fixed_linear") != 0 || !cJSON_IsNumber(steps) || !cJSON_IsNumber(unit) ||
               unit->valuedouble != 8 || from < 1 || to < from) {
        ds_refuse(c, "have curriculum_type seqlen with min_difficulty, max_difficulty, schedule_type fixed_linear, "
                  "total_curriculum_step and a difficulty_step of 8");
    } else {
        snprintf(text, sizeof text, "%.0f", to);
        ds_set_from_key(c, "seq_len", text);
        snprintf(c->seq_ramp, sizeof c->seq_ramp, "%.0f:%.0f", from, steps->valuedouble);
        ds_set_from_key(c, "seq_ramp", c->seq_ramp);
    }
}

static void ds_data_efficiency(DsConfig* c, const cJSON* value)
{
    if (!ds_block_enabled(value)) ds_say(c, "off");
    else ds_refuse(c, "neither sampling by difficulty nor random-LTD is there (curriculum_learning with seqlen is): "
                   "set enabled to false");
}

#define FLAG(key, flag, note)      {key, DsKind::FLAG, flag, nullptr, note},
#define RULE(key, rule, note)      {key, DsKind::RULE, "", rule, note},
#define SAME(key, note)            {key, DsKind::SAME, "", nullptr, note},
#define ONLY(key, values, note)    {key, DsKind::ONLY, values, nullptr, note},
#define UNLESS_OFF(key, note)      {key, DsKind::UNLESS_OFF, "", nullptr, note},
#define NEVER(key, note)           {key, DsKind::NEVER, "", nullptr, note},
#define ALIAS(key, other, note)    {key, DsKind::ALIAS, other, nullptr, note},
#define PARAM(key)                 {key, DsKind::PARAM, "", ds_schedule_param, ""},
static const DsKey ds_keys[] = { DS_KEYS };
#undef FLAG
#undef RULE
#undef SAME
#undef ONLY
#undef UNLESS_OFF
#undef NEVER
#undef ALIAS
#undef PARAM

// ---------------------------------------------------------------------------------------------------------- the file
/* Comments and commas after a last item become blanks, so that places in messages stay those of the file. */
static void ds_blank_hjson(char* text)
{
    bool quoted = false;
    char* comma = nullptr;                              // nothing but blanks since
    for (char* p = text; *p;) {
        const bool of_line = !quoted && (*p == '#' || (p[0] == '/' && p[1] == '/'));
        if (of_line || (!quoted && p[0] == '/' && p[1] == '*')) {
            const char* end = of_line ? strchr(p, '\n') : strstr(p + 2, "*/");
            const char* stop = end == nullptr ? p + strlen(p) : end + (of_line ? 0 : 2);
            for (; p < stop; p++) if (*p != '\n') *p = ' ';
            continue;
        }
        if (!quoted && (*p == '}' || *p == ']') && comma != nullptr) *comma = ' ';
        if (!isspace((unsigned char)*p)) comma = !quoted && *p == ',' ? p : nullptr;
        if (*p == '"') quoted = !quoted;
        p += quoted && *p == '\\' && p[1] ? 2 : 1;
    }
}

/* Keys of other programs, by what they mean. */
static const struct { const char *theirs, *here; } ds_meanings[] = {
    {"max_grad_norm", "gradient_clipping"},
    {"grad_clip", "gradient_clipping"},
    {"learning_rate", "optimizer.params.lr"},
    {"warmup_steps", "scheduler.params.warmup_num_steps"},
    {"max_steps", "scheduler.params.total_num_steps"},
    {"per_device_train_batch_size", "train_micro_batch_size_per_gpu"},
    {"gradient_checkpointing", "-r block on the command line"},
    {"num_train_epochs", "--epochs on the command line"},
    {"opt_level", "fp16.enabled: levels are apex's"},
};

/* The length of the path up to its part `name`; 0 if it has none. */
static int ds_part_end(const char* path, const char* name)
{
    char part[64];
    for (const char* rest = path; word_next(&rest, '.', part);)
        if (strcmp(part, name) == 0) return (int)(rest - path) - (*rest != 0);
    return 0;
}

/* What was meant by an unknown key: by its meaning, the same name in another block, or a name in this block of which at
 * most a third of the letters differ. */
static void ds_refuse_unknown(DsConfig* c, const char* path, const char* name)
{
    Nearest nearest = nearest_begin(name);
    nearest.distance = (int)strlen(name) / 3 + 1;
    const size_t n_block = strlen(path) - strlen(name);
    const bool is_everywhere = word_in_list(name, "enabled type params", ' ');
    char part[64], meant[192] = "";
    for (const DsKey& row : ds_keys) {
        if (meant[0] == 0 && !is_everywhere)
            snprintf(meant, sizeof meant, "%.*s", ds_part_end(row.key, name), row.key);
        if (strncmp(row.key, path, n_block) != 0) continue;
        const char* rest = row.key + n_block;
        if (word_next(&rest, '.', part)) nearest_offer(&nearest, part);
    }
    for (const auto& m : ds_meanings)
        if (strcmp(m.theirs, name) == 0) snprintf(meant, sizeof meant, "%s", m.here);
    if (meant[0]) ds_refuse(c, "is no key of DeepSpeed's: did you mean %s?", meant);
    else if (nearest.nearest[0])
        ds_refuse(c, "is no key of DeepSpeed's: did you mean %.*s%s?", (int)n_block, path, nearest.nearest);
    else ds_refuse(c, "is no key of DeepSpeed's that is known here: leave it out");
}

/* Every key has a row of its own, or one of its block; or begins the keys of some row. Of those at top level DeepSpeed
 * ignores what begins with _. */
static void ds_check_keys(DsConfig* c, const cJSON* object, const char* prefix)
{
    for (const cJSON* item = object->child; item != nullptr; item = item->next) {
        char path[192];
        snprintf(path, sizeof path, "%s%s%s", prefix, prefix[0] ? "." : "", item->string);
        bool known = false, begins = false;
        size_t n = strlen(path);
        for (const DsKey& row : ds_keys) {
            known = known || strcmp(row.key, path) == 0;
            begins = begins || (strncmp(row.key, path, n) == 0 && row.key[n] == '.');
        }
        c->key = path;
        if (prefix[0] == 0 && item->string[0] == '_') ds_say(c, "ignored, as by DeepSpeed");
        else if (begins && cJSON_IsObject(item)) ds_check_keys(c, item, path);
        else if (begins && !known && cJSON_IsNull(item)) ds_say(c, "off");
        else if (begins && !known) ds_refuse(c, "must be an object, is %s", json_type_name(item));
        else if (!known) ds_refuse_unknown(c, path, item->string);
    }
}

static void ds_apply_flag(DsConfig* c, const DsKey* row, const cJSON* value)
{
    char name[64], buf[64];
    size_t n = strcspn(row->what, "=");
    snprintf(name, sizeof name, "%.*s", (int)n, row->what);
    bool off = ds_is_off(value), missing = flag_find(name) == nullptr;
    if (cJSON_IsNull(value) || (off && (missing || row->what[n] == '='))) ds_say(c, "off");
    else if (cJSON_IsObject(value) || cJSON_IsArray(value)) ds_refuse(c, "must be a plain value");
    else ds_set_from_key(c, name, row->what[n] == '=' ? row->what + n + 1 : ds_text(value, buf));
}

static void ds_apply(DsConfig* c, const DsKey* row, const cJSON* value);

static const DsKey* ds_row(const char* key)
{
    for (const DsKey& row : ds_keys) if (strcmp(row.key, key) == 0) return &row;
    return nullptr;
}

/* Another name of a key; it may be there without the key itself alone. */
static void ds_apply_alias(DsConfig* c, const DsKey* row, const cJSON* value)
{
    if (ds_value(c, row->what) == nullptr) ds_apply(c, ds_row(row->what), value);
    else if (row->note[0]) ds_say(c, "%s", row->note);
    else ds_refuse(c, "is another name of %s: DeepSpeed refuses the two together", row->what);
}

static void ds_apply(DsConfig* c, const DsKey* row, const cJSON* value)
{
    char buf[64];
    bool of_precision = (strncmp(row->key, "fp16.", 5) == 0 || strncmp(row->key, "bf16.", 5) == 0) &&
                        strcmp(row->key + 5, "enabled") != 0;
    bool object = cJSON_IsObject(value);
    if (of_precision && strncmp(row->key, c->flags->precision, 4) != 0) {
        ds_say(c, "counts with -p %.4s alone", row->key);
    } else if (ds_is_auto(value)) {
        ds_say(c, "auto: left to the command line");
    } else switch (row->kind) {
    case DsKind::FLAG: ds_apply_flag(c, row, value); break;
    case DsKind::PARAM:
    case DsKind::RULE: row->rule(c, value); break;
    case DsKind::ALIAS: ds_apply_alias(c, row, value); return;
    case DsKind::SAME: ds_say(c, "%s: %s", object ? "accepted" : ds_text(value, buf), row->note); return;
    case DsKind::ONLY:
        if (word_in_list(ds_text(value, buf), row->what, '|')) ds_say(c, "%s: %s", ds_text(value, buf), row->note);
        else ds_refuse(c, "%s is not there: %s; only %s is", ds_text(value, buf), row->note, row->what);
        return;
    case DsKind::UNLESS_OFF:
        if (!ds_block_enabled(value)) ds_say(c, "off");
        else ds_refuse(c, "%s", row->note);
        return;
    case DsKind::NEVER:
        if (ds_is_off(value)) ds_say(c, "off");
        else ds_refuse(c, "%s", row->note);
        return;
    }
    if (row->note[0]) json_text_add(&c->notes, "  %s: %s\n", c->key, row->note);
}

/* Reads flags->config, where it is given, into the flags that the command line leaves open. */
static void ds_config_read(DsConfig* c, Flags* flags)
{
    *c = DsConfig{};
    c->flags = flags;
    c->file = flags->config;
    if (!flags->config[0]) return;
    size_t length;
    char* text = file_read(c->file, &length);
    ds_blank_hjson(text);
    c->json = json_parse(text, length, c->file);
    free(text);
    json_refuse_duplicates(c->json, c->file);
    ENSURE(cJSON_IsObject(c->json), "%s: must be a JSON object, is %s", c->file, json_type_name(c->json));
    ds_check_keys(c, c->json, "");
    for (const DsKey& row : ds_keys) {
        const cJSON* value = ds_value(c, row.key);
        if (value == nullptr) continue;
        c->num_keys++;
        c->key = row.key;
        ds_apply(c, &row, value);
    }
}

static void ds_config_refuse(const DsConfig* c)
{
    if (c->num_refused > 0)
        die_usage("%s: %d of its keys cannot be done: %s", c->file, c->num_refused, c->refused.text);
}

static void ds_config_free(DsConfig* c)
{
    cJSON_Delete(c->json);
    json_text_free(&c->said);
    json_text_free(&c->notes);
    json_text_free(&c->refused);
}

/* --print-config: what became of each key of the file, then every flag with its value and where that comes from. */
static void ds_config_print(const DsConfig* c, FILE* f)
{
    char name[64], value[64];
    if (c->json != nullptr) say_to(f, "keys of %s\n%s", c->file, c->said.text != nullptr ? c->said.text : "");
    if (c->notes.text != nullptr) say_to(f, "what differs from DeepSpeed\n%s", c->notes.text);
    say_to(f, "flags\n");
    for (const FlagRow& row : flag_rows) {
        int idx = (int)(&row - flag_rows);
        const char* from = !c->flags->given[idx] ? "default" : c->flags->from[idx];
        say_to(f, "  %-28s %-24s %s", flag_long_name(&row, name), flag_value(c->flags, &row, value), from);
        if (c->flags->as[idx] != nullptr) say_to(f, ", as %s", flag_given_name(c->flags, idx, name));
        say_to(f, "\n");
    }
}
