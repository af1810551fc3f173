/* model_files.h: what a Hugging Face folder has beside config.json and weights, and a folder written from it has too:
 * how texts are tokenized, formatted and generated, and under what licence. Not kept: weights in other formats and
 * their indexes, code (*.py), and README.md, which describes the source.
 *   model_files_add(files, folder, of)   reads a folder's; a name that is there already is replaced
 *   model_files_put(files, name, path)   reads one file
 *   model_files_write(files, folder)     writes all; what is the same already is not written
 *   folder_foreign(folder)               what other weights it has and how to convert them, or null
 * They are held in memory, since the source may be gone by the time that a checkpoint is written. */
#pragma once
#include <fnmatch.h>
#include "files.h"

enum FilesOf { OF_MODEL = 1, OF_TOKENIZER = 2 };     // the second belong to one vocabulary

/* Patterns of names, in any case. */
static const struct { FilesOf of; const char* pattern; } kept_files[] = {
    {OF_MODEL, "generation_config.json"},
    {OF_MODEL, "LICEN[CS]E*"},
    {OF_MODEL, "*_LICENSE*"},
    {OF_MODEL, "COPYING*"},
    {OF_MODEL, "NOTICE*"},
    {OF_MODEL, "*USE_POLICY*"},
    {OF_TOKENIZER, "tokenizer.json"},
    {OF_TOKENIZER, "tokenizer_config.json"},
    {OF_TOKENIZER, "special_tokens_map.json"},
    {OF_TOKENIZER, "added_tokens.json"},
    {OF_TOKENIZER, "vocab.json"},
    {OF_TOKENIZER, "merges.txt"},
    {OF_TOKENIZER, "*.jinja"},
    {OF_TOKENIZER, "tokenizer.model*"},
    {OF_TOKENIZER, "tekken.json"},
};
static const char* const never_kept[] = {"*.py", "*.bin", "*.safetensors", "*.index.json", "*.tmp", ".*"};

/* Weights that are not read. */
static const struct { const char *pattern, *advice; } foreign_files[] = {
    {"adapter_config.json", "an adapter of PEFT, not a model: merge it into its base with "
     "AutoPeftModelForCausalLM.from_pretrained(FOLDER).merge_and_unload().save_pretrained(OUT)"},
    {"global_step*", "a checkpoint of DeepSpeed: its zero_to_fp32.py FOLDER OUT --safe_serialization makes "
     "model.safetensors, to be put beside config.json"},
    {"mp_rank_*", "a part of a checkpoint of DeepSpeed: zero_to_fp32.py of the folder above, with "
     "--safe_serialization, makes model.safetensors, to be put beside config.json"},
    {"latest_checkpointed_iteration.txt", "a checkpoint of Megatron: convert it with Megatron Bridge, "
     "AutoBridge.export_ckpt"},
    {"*.distcp", "a checkpoint of torch.distributed, as Megatron's torch_dist: convert it with Megatron Bridge, "
     "AutoBridge.export_ckpt"},
    {"pytorch_model*.bin", "weights of PyTorch (.bin): convert them with "
     "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OUT)"},
    {"*.gguf", "weights for llama.cpp (.gguf): take the folder they were made from, or convert them with "
     "AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=FILE).save_pretrained(OUT)"},
    {"*-of-*.safetensors", "shards without model.safetensors.index.json, which says what is where: fetch it too"},
};

typedef struct { char *name, *data; size_t num_bytes; } ModelFile;

typedef struct {
    ModelFile* files;
    size_t num_files;
} ModelFiles;

static inline void model_files_put(ModelFiles* m, const char* name, const char* path)
{
    ModelFile* file = nullptr;
    for (size_t i = 0; i < m->num_files; i++) if (strcmp(m->files[i].name, name) == 0) file = &m->files[i];
    if (file == nullptr) {
        m->files = (ModelFile*)realloc(m->files, (m->num_files + 1) * sizeof *m->files);
        ENSURE(m->files != nullptr, "out of host memory for %zu files", m->num_files + 1);
        file = &m->files[m->num_files++];
        *file = ModelFile{strdup(name), nullptr, 0};
        ENSURE(file->name != nullptr, "out of host memory for the name %s", name);
    }
    free(file->data);
    file->data = file_read(path, &file->num_bytes);
}

static inline bool name_matches(const char* name, const char* pattern)
{
    return fnmatch(pattern, name, FNM_CASEFOLD) == 0;
}

/* Is this a name that a model of the Hugging Face hub may have: org/name? */
static inline bool hub_id(const char* name)
{
    const char* slash = strchr(name, '/');
    return slash != nullptr && slash != name && slash[1] != 0 && strchr(slash + 1, '/') == nullptr &&
           name[0] != '.' && name[0] != '~';
}

/* Where `hf download` puts models, and the snapshot of main that it has of this one; false: none. */
static inline bool hub_snapshot(const char* id, char (&cache)[4096], char (&path)[4096])
{
    const char *hub = getenv("HF_HUB_CACHE"), *hf = getenv("HF_HOME"), *home = getenv("HOME");
    if (hub != nullptr) snprintf(cache, sizeof cache, "%s", hub);
    else if (hf != nullptr) snprintf(cache, sizeof cache, "%s/hub", hf);
    else snprintf(cache, sizeof cache, "%s/.cache/huggingface/hub", home != nullptr ? home : "");
    const int length = (int)(strchr(id, '/') - id);
    int used = snprintf(path, sizeof path, "%s/models--%.*s--%s/refs/main", cache, length, id, id + length + 1);
    if (used >= (int)sizeof path || !file_exists(path)) return false;
    size_t num_bytes;
    char* commit = file_read(path, &num_bytes);
    used = snprintf(path, sizeof path, "%s/models--%.*s--%s/snapshots/%.*s", cache, length, id, id + length + 1,
                    (int)strcspn(commit, " \r\n"), commit);
    free(commit);
    return used < (int)sizeof path && file_exists(path);
}

static inline const char* folder_foreign(const char* folder)
{
    const size_t num_rows = sizeof foreign_files / sizeof *foreign_files;
    size_t found = num_rows;
    DIR* dir = folder_open(folder);
    if (dir == nullptr) return nullptr;
    for (const char* name; (name = folder_next(dir, folder)) != nullptr; )
        for (size_t i = 0; i < found; i++) if (name_matches(name, foreign_files[i].pattern)) found = i;
    folder_close(dir);
    return found < num_rows ? foreign_files[found].advice : nullptr;
}

/* of: a FilesOf, or both. */
static inline void model_files_add(ModelFiles* m, const char* folder, int of)
{
    DIR* dir = folder_open(folder);
    if (dir == nullptr) return;
    for (const char* name; (name = folder_next(dir, folder)) != nullptr; ) {
        char path[4096 + 300];
        bool kept = false;
        for (const auto& row : kept_files) kept = kept || ((row.of & of) != 0 && name_matches(name, row.pattern));
        for (const char* pattern : never_kept) kept = kept && !name_matches(name, pattern);
        snprintf(path, sizeof path, "%s/%s", folder, name);
        if (kept && file_kind(path) == S_IFREG) model_files_put(m, name, path);
    }
    folder_close(dir);
}

static inline void model_files_write(const ModelFiles* m, const char* folder)
{
    for (const ModelFile* file = m->files; file < m->files + m->num_files; file++) {
        char path[4096 + 300];
        snprintf(path, sizeof path, "%s/%s", folder, file->name);
        file_update(path, file->data, file->num_bytes);
    }
}

static inline void model_files_free(ModelFiles* m)
{
    for (size_t i = 0; i < m->num_files; i++) {
        free(m->files[i].name);
        free(m->files[i].data);
    }
    free(m->files);
    *m = ModelFiles{};
}
