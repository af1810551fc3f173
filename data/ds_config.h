/* ds_config.h: --config FILE: DeepSpeed's JSON, read as it is, becomes flags.
 *
 * Comments are skipped. "auto" (Hugging Face's word for "what the trainer says") leaves the flag to the command line or
 * to its default. Command-line flags override the file. A block that is in the file takes DeepSpeed's defaults for what
 * it leaves out, where they differ from train_gpt's; a block that is not there takes train_gpt's. What becomes of a key
 * is one row of ds_keys.h; a key without a row is refused, and the message names a key of similar spelling. All
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
    char seq_ramp[64], offload[64];   // what the flags of that name point to
    JsonText said;             // a line per key: what became of it
    JsonText notes;            // what differs from DeepSpeed
    JsonText refused;
} DsConfig;

typedef void DsRule(DsConfig* c, const cJSON* value);
enum class DsKind { FLAG, RULE, SAME, ONLY, UNLESS_OFF, NEVER };
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
    if (row->kind == ONEOF && !word_in_list(text, flag_choices_of(c->flags, row), '|')) {
        ds_refuse(c, "%s is not one of %s (%s)", text, flag_choices_of(c->flags, row), buf);
        return;
    }
    bool yes = strcmp(text, "true") == 0, no = strcmp(text, "false") == 0;
    if (row->kind == INT && (yes || no)) text = yes ? "1" : "0";
    snprintf(shown, sizeof shown, "%s: %s: %s", c->file, c->key, buf);
    flag_store(c->flags, row, shown, text);
    c->flags->given[idx] = true;
    c->flags->from[idx] = from;
    c->flags->as[idx] = nullptr;
    if (from == c->key) ds_say(c, "%s %s", buf, flag_value(c->flags, row, value));
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

/* The kind, and DeepSpeed's defaults for what its parameters leave out. */
static void ds_optimizer(DsConfig* c, const cJSON* value)
{
    static const struct { const char *theirs, *ours, *lr, *beta1, *beta2, *eps; } kinds[] = {
        {"Adam", "adamw", "1e-3", "0.9", "0.999", "1e-8"},    {"AdamW", "adamw", "1e-3", "0.9", "0.999", "1e-8"},
        {"SGD", "sgd", "1e-3", nullptr, nullptr, nullptr},    {"Lamb", "lamb", "1e-3", "0.9", "0.999", "1e-8"},
        {"Lion", "lion", "1e-3", "0.9", "0.99", nullptr},     {"Adagrad", "adagrad", "1e-2", nullptr, nullptr, "1e-10"},
        {"Muon", "muon", "3e-4", "0.9", "0.95", "1e-10"},
    };
    for (const auto& kind : kinds) {
        if (!ds_type_is(c, "optimizer.type", kind.theirs)) continue;
        bool coupled = strcmp(kind.theirs, "Adam") == 0 &&
                       cJSON_IsFalse(ds_value(c, "optimizer.params.adam_w_mode"));
        ds_set_from_key(c, "optimizer", coupled ? "adam" : kind.ours);
        ds_set_default(c, "lr", kind.lr);
        ds_set_default(c, "weight_decay", "0");
        if (kind.beta1 != nullptr) ds_set_default(c, "beta1", kind.beta1);
        if (kind.beta2 != nullptr) ds_set_default(c, "beta2", kind.beta2);
        if (kind.eps != nullptr) ds_set_default(c, "eps", kind.eps);
        bool is_ours = strcmp(c->flags->optimizer, kind.ours) == 0;    // else the command line has another
        if (is_ours && strcmp(kind.ours, "sgd") == 0) ds_set_default(c, "momentum", "0");
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

/* DeepSpeed rises by `rate` of the lowest in every `size` steps; here the rise ends at the peak, with the last step. */
static void ds_range_test(DsConfig* c)
{
    const double min_lr = ds_number_or(c, "scheduler.params.lr_range_test_min_lr", 1e-3);
    const double size = ds_number_or(c, "scheduler.params.lr_range_test_step_size", 2000);
    const double rate = ds_number_or(c, "scheduler.params.lr_range_test_step_rate", 1);
    char text[64];
    if (!c->flags->given[FLAG_steps]) {
        ds_refuse(c, "LRRangeTest rises until the run ends: give -n");
        return;
    }
    snprintf(text, sizeof text, "%.15g", min_lr);
    ds_set_from_key(c, "min_lr", text);
    snprintf(text, sizeof text, "%.15g", min_lr * (1 + rate * (double)c->flags->steps / size));
    ds_set_from_key(c, "lr", text);
}

static void ds_scheduler(DsConfig* c, const cJSON* value)
{
    const cJSON* type = ds_value(c, "scheduler.params.warmup_type");
    bool linear = cJSON_IsString(type) && strcmp(type->valuestring, "linear") == 0;
    const char* ours = ds_type_is(c, "scheduler.type", "WarmupLR") ? (linear ? "constant" : "warmup-log")
                       : ds_type_is(c, "scheduler.type", "WarmupDecayLR") ? "linear"
                       : ds_type_is(c, "scheduler.type", "WarmupCosineLR") ? "cosine"
                       : ds_type_is(c, "scheduler.type", "OneCycle") ? "onecycle"
                       : ds_type_is(c, "scheduler.type", "LRRangeTest") ? "lr-range-test" : nullptr;
    char buf[64];
    if (ours == nullptr) {
        ds_refuse(c, "%s is not there; have WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest",
                  ds_text(value, buf));
        return;
    }
    ds_set_from_key(c, "schedule", ours);
    if (strcmp(ours, "lr-range-test") == 0) ds_range_test(c);
    if (strcmp(ours, "onecycle") == 0) {
        ds_set_default(c, "warmup", "2000");
        json_text_add(&c->notes, "  %s: beta1 stays; DeepSpeed moves it unless cycle_momentum is false\n", c->key);
    }
    if (strncmp(value->valuestring, "Warmup", 6) == 0) {
        ds_set_default(c, "warmup", "1000");
        ds_set_default(c, "min_lr", "0");
    }
    if (strcmp(ours, "constant") == 0 || strcmp(ours, "linear") == 0 || strcmp(ours, "cosine") == 0)
        json_text_add(&c->notes, "  %s: step s of a linear warm-up has (s + 1) / W of the peak, in DeepSpeed s / W\n",
                      c->key);
}

static void ds_warmup_min_lr(DsConfig* c, const cJSON* value)
{
    const char* schedule = c->flags->schedule;
    char buf[64];
    if (strcmp(schedule, "warmup-log") == 0) ds_set_from_key(c, "min_lr", ds_text(value, buf));
    else if (ds_is_off(value)) ds_say(c, "a linear warm-up starts at one step's share of the peak");
    else ds_refuse(c, "%s: a linear warm-up starts at one step's share of the peak; only 0 is there",
                   ds_text(value, buf));
}

static void ds_warmup_type(DsConfig* c, const cJSON* value)
{
    bool log = cJSON_IsString(value) && strcmp(value->valuestring, "log") == 0;
    char buf[64];
    if (log && !ds_type_is(c, "scheduler.type", "WarmupLR"))
        ds_refuse(c, "log is there for WarmupLR alone: give linear");
    else if (!log && !(cJSON_IsString(value) && strcmp(value->valuestring, "linear") == 0))
        ds_refuse(c, "%s is neither log nor linear", ds_text(value, buf));
    else ds_say(c, "%s: read with scheduler.type", value->valuestring);
}

static void ds_cycle_second(DsConfig* c, const cJSON* value)
{
    const double first = ds_number_or(c, "scheduler.params.cycle_first_step_size", 2000);
    char buf[64];
    if (cJSON_IsNull(value) || (cJSON_IsNumber(value) && value->valuedouble == first)) ds_say(c, "as the first");
    else ds_refuse(c, "%s: the fall takes as many steps as the rise, %.0f", ds_text(value, buf), first);
}

static void ds_cos_min_ratio(DsConfig* c, const cJSON* value)
{
    char text[64];
    snprintf(text, sizeof text, "%.15g", value->valuedouble * c->flags->lr);
    if (cJSON_IsNumber(value)) ds_set_from_key(c, "min_lr", text);
    else ds_refuse(c, "must be a number");
}

/* Three keys, and two old ones, make one flag. */
static void ds_offload(DsConfig* c, const cJSON* value)
{
    static const struct { const char *key, *word, *flag; } keys[] = {
        {"activation_checkpointing.cpu_checkpointing", "true", "activations"},
        {"zero_optimization.offload_optimizer.device", "cpu", "optimizer"},
        {"zero_optimization.cpu_offload", "true", "optimizer"},
        {"zero_optimization.offload_param.device", "cpu", "parameters"},
        {"zero_optimization.cpu_offload_params", "true", "parameters"}};
    char buf[64], list[64] = "";
    for (const auto& k : keys) {
        const cJSON* given = ds_value(c, k.key);
        bool asks = given != nullptr && !ds_is_off(given);
        if (given == value && !asks) return ds_say(c, "off");
        if (given == value && strcmp(ds_text(value, buf), k.word) != 0)
            return ds_refuse(c, "%s: have %s, or %s", ds_text(value, buf), k.word, k.word[0] == 'c' ? "none" : "false");
        if (asks && strstr(list, k.flag) == nullptr)
            snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", list[0] ? "," : "", k.flag);
    }
    snprintf(c->offload, sizeof c->offload, "%s", list);
    ds_set_from_key(c, "offload", c->offload);
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
static const DsKey ds_keys[] = { DS_KEYS };
#undef FLAG
#undef RULE
#undef SAME
#undef ONLY
#undef UNLESS_OFF
#undef NEVER

// ---------------------------------------------------------------------------------------------------------- the file
/* Comments become blanks, so that places in messages stay those of the file. */
static void ds_blank_comments(char* text)
{
    bool quoted = false;
    for (char* p = text; *p; p++) {
        if (quoted && *p == '\\' && p[1]) p++;
        else if (*p == '"') quoted = !quoted;
        else if (!quoted && p[0] == '/' && p[1] == '/') while (*p && *p != '\n') *p++ = ' ';
        else if (!quoted && p[0] == '/' && p[1] == '*') {
            const char* end = strstr(p + 2, "*/");
            for (const char* stop = end ? end + 2 : p + strlen(p); p < stop; p++) if (*p != '\n') *p = ' ';
        }
        if (*p == 0) break;
    }
}

/* Every key has a row of its own, or one of its block; or begins the keys of some row. */
static void ds_check_keys(DsConfig* c, const cJSON* object, const char* prefix)
{
    for (const cJSON* item = object->child; item != nullptr; item = item->next) {
        char path[192];
        snprintf(path, sizeof path, "%s%s%s", prefix, prefix[0] ? "." : "", item->string);
        if (json_get(object, item->string) != item) die_usage("%s: %s is there twice", c->file, path);
        bool known = false, begins = false;
        size_t n = strlen(path);
        Nearest nearest = nearest_begin(path);
        nearest.distance = nearest_begin(item->string).distance;     // the block before it is no likeness
        for (const DsKey& row : ds_keys) {
            known = known || strcmp(row.key, path) == 0;
            begins = begins || (strncmp(row.key, path, n) == 0 && row.key[n] == '.');
            nearest_offer(&nearest, row.key);
        }
        if (known) continue;
        if (begins && cJSON_IsObject(item)) ds_check_keys(c, item, path);
        else if (begins) die_usage("%s: %s must be an object, is %s", c->file, path, json_type_name(item));
        else if (nearest.nearest[0])
            die_usage("%s: %s is no key of DeepSpeed's that is known here: did you mean %s? Else leave it out", c->file,
                      path, nearest.nearest);
        else die_usage("%s: %s is no key of DeepSpeed's that is known here: leave it out", c->file, path);
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

static void ds_apply(DsConfig* c, const DsKey* row, const cJSON* value)
{
    char buf[64];
    c->num_keys++;
    c->key = row->key;
    bool of_precision = (strncmp(row->key, "fp16.", 5) == 0 || strncmp(row->key, "bf16.", 5) == 0) &&
                        strcmp(row->key + 5, "enabled") != 0;
    bool object = cJSON_IsObject(value);
    if (of_precision && strncmp(row->key, c->flags->precision, 4) != 0) {
        ds_say(c, "counts with -p %.4s alone", row->key);
    } else if (ds_is_auto(value) && row->kind != DsKind::ONLY) {
        ds_say(c, "auto: left to the command line");
    } else switch (row->kind) {
    case DsKind::FLAG: ds_apply_flag(c, row, value); break;
    case DsKind::RULE: row->rule(c, value); break;
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
    if (row->note[0]) json_text_add(&c->notes, "  %s: %s\n", row->key, row->note);
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
    ds_blank_comments(text);
    c->json = json_parse(text, length, c->file);
    free(text);
    json_refuse_duplicates(c->json, c->file);
    ENSURE(cJSON_IsObject(c->json), "%s: must be a JSON object, is %s", c->file, json_type_name(c->json));
    ds_check_keys(c, c->json, "");
    for (const DsKey& row : ds_keys) {
        const cJSON* value = ds_value(c, row.key);
        if (value != nullptr) ds_apply(c, &row, value);
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
    if (c->json != nullptr) fprintf(f, "keys of %s\n%s", c->file, c->said.text != nullptr ? c->said.text : "");
    if (c->notes.text != nullptr) fprintf(f, "what differs from DeepSpeed\n%s", c->notes.text);
    fprintf(f, "flags\n");
    for (const FlagRow& row : flag_rows) {
        int idx = (int)(&row - flag_rows);
        const char* from = !c->flags->given[idx] ? "default" : c->flags->from[idx];
        fprintf(f, "  %-28s %-24s %s", flag_long_name(&row, name), flag_value(c->flags, &row, value), from);
        if (c->flags->as[idx] != nullptr) fprintf(f, ", as %s", flag_given_name(c->flags, idx, name));
        fprintf(f, "\n");
    }
}
