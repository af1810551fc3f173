/* run_record.h: OUT/run.json, from which a run can be reproduced: ./train_gpt --repeat OUT.
 *   {"version": "0.1.0", "build": ..., "started": "2026-11-29T12:00:00Z",
 *    "num_ranks": 2, "ranks": ["HOST, DEVICE", ...], "num_threads": 1,
 *    "train_tokens": ..., "val_tokens": ...,
 *    "model_is_here": false,      true: the model is OUT/config.json with new weights, not what --model names
 *    "arguments": ["--lr=0.001", ...],     every flag that was given, also in --config, with absolute paths
 *    "products": [...]}                    algorithms and epilogues of GEMMs, with --tune: see run/tune.cuh
 * Written when a run starts, not when it is resumed; the log has each resume. Data are not copied: if their number of
 * tokens has changed, --repeat is refused. */
#pragma once
#include "json.h"
#include "flags.h"
#include "tokens.h"

/* Flags that are given, and those whose default depends on the build or folder (ALWAYS), without those that --repeat
 * sets itself. */
static bool flag_is_recorded(const Flags* f, int idx, bool model_is_here)
{
    const int is = flag_rows[idx].is;
    if ((is & START) != 0 || (idx == FLAG_model && model_is_here)) return false;
    if ((is & RESUMES) != 0 && strcmp(f->resume, "auto") == 0) return false;
    return flag_is_on(f, idx) || (is & ALWAYS) != 0;
}

/* The absolute path, since --repeat may run in another directory; also of a pattern (--data 'shards/train_*.bin'). */
static const char* path_in_full(const char* path, char (&full)[2 * PATH_MAX])
{
    char folder[PATH_MAX];
    if (realpath(path, full) != nullptr) return full;
    if (path[0] == '/' || getcwd(folder, sizeof folder) == nullptr) return path;
    snprintf(full, sizeof full, "%s/%s", folder, path);
    return full;
}

/* The flag as one argument. The name of a preset is not a path, even if a folder has that name. */
static void record_argument(JsonText* t, const Flags* f, int idx, const char* model_name, bool is_preset)
{
    const FlagRow* row = &flag_rows[idx];
    char name[64], buf[64], full[2 * PATH_MAX];
    json_text_add(t, "%s", flag_long_name(row, name));
    if (row->kind == SWITCH) return;
    const char* value = idx == FLAG_model ? model_name : flag_value(f, row, buf);
    bool is_path = (row->is & PATH) != 0 && (idx != FLAG_model || !is_preset);
    json_text_add(t, "=");
    const bool is_mixture = is_path && (idx == FLAG_data || idx == FLAG_val) && token_is_mixture(value);
    while (is_mixture && strchr(value, ',') != nullptr) {
        char set[PATH_MAX];              // each set of a mixture is a path
        snprintf(set, sizeof set, "%.*s", (int)strcspn(value, ","), value);
        json_text_add(t, "%s,", path_in_full(set, full));
        value += strcspn(value, ",") + 1;
    }
    json_text_add(t, "%s", is_path && value[0] != 0 ? path_in_full(value, full) : value);
}

static void record_arguments(cJSON* j, const Flags* f, const char* model_name, bool is_preset, bool model_is_here)
{
    cJSON* list = json_add_array(j, "arguments");
    for (int idx = 0; idx < NUM_FLAGS; idx++) {
        if (!flag_is_recorded(f, idx, model_is_here)) continue;
        JsonText t = {};
        record_argument(&t, f, idx, model_name, is_preset);
        cJSON_AddItemToArray(list, json_added(cJSON_CreateString(t.text), "arguments"));
        json_text_free(&t);
    }
}

static cJSON* record_read(const char* folder)
{
    char path[4200];
    snprintf(path, sizeof path, "%s/run.json", folder);
    ENSURE(file_exists(path), "--repeat %s: there is no run.json: give the -o folder of a run", folder);
    return json_parse_file(path);
}

/* With --repeat: sets the flags of the run in that folder, and -o from the command line. Returns the JSON that the
 * flags point into, null without --repeat. */
static cJSON* repeat_flags(Flags* f)
{
    if (!f->given[FLAG_repeat]) return nullptr;
    char name[64], model[4200];
    for (int idx = 0; idx < NUM_FLAGS; idx++)
        if (f->given[idx] && idx != FLAG_repeat && idx != FLAG_out)
            die_usage("--repeat takes all flags from the run folder but -o: leave %s out",
                      flag_given_name(f, idx, name));
    cJSON* j = record_read(f->repeat);
    const cJSON* list = json_array(j, "arguments", f->repeat);
    const char** argv = (const char**)malloc_checked(((size_t)cJSON_GetArraySize(list) + 3) * sizeof *argv);
    int argc = 0;
    argv[argc++] = "train_gpt";
    if (json_bool(j, "model_is_here", f->repeat)) {
        snprintf(model, sizeof model, "--model=%s", f->repeat);
        cJSON_AddItemToObject(j, "model", json_added(cJSON_CreateString(model), "model"));
        argv[argc++] = json_string(j, "model", f->repeat);
    }
    for (const cJSON* item = list->child; item != nullptr; item = item->next) {
        ENSURE(cJSON_IsString(item), "%s/run.json: \"arguments\" must hold strings", f->repeat);
        argv[argc++] = item->valuestring;
    }
    Flags given = *f;
    flags_parse(f, f->words, argc, (char**)argv);
    f->repeat = given.repeat;
    f->out = given.out;
    f->given[FLAG_out] = given.given[FLAG_out];
    f->given[FLAG_repeat] = true;
    free(argv);
    return j;
}
