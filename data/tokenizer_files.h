/* tokenizer_files.h: the files that a tokenizer is read from.
 *   tokenizer_locate(folder, file)   FOLDER/tokenizer.json, else FOLDER/vocab.json with merges.txt beside it
 *   tokenizer_json(file)             a tokenizer.json; one made of vocab.json and merges.txt as transformers makes it
 *   tokenizer_ends(file)             vocabulary size, and the tokens that begin and end a text
 * vocab.json and merges.txt are GPT-2's class of tokenizer. Not handled: those of other classes, such as Qwen2's and
 * RoBERTa's, which cut a text in another way. */
#pragma once
#include <initializer_list>
#include <unistd.h>
#include "json.h"

/* What prepare.py's own vocabularies and GPT-2's have. */
#define END_OF_TEXT "<|endoftext|>"

typedef struct { int vocab_size, begin, end; } TokenizerEnds;    // begin, end: -1 if there is none

/* FOLDER/NAME of a file in the same folder. */
static inline void path_beside(char (&path)[4096], const char* file, const char* name)
{
    const char* slash = strrchr(file, '/');
    int n = snprintf(path, sizeof path, "%.*s%s", slash != nullptr ? (int)(slash + 1 - file) : 0, file, name);
    ENSURE(n < (int)sizeof path, "%s: the name is too long", file);
}

/* The JSON object of a file in the same folder; an empty one if there is no such file. */
static inline cJSON* json_beside(const char* file, const char* name)
{
    char path[4096];
    path_beside(path, file, name);
    return file_exists(path) ? json_parse_file_of_user(path) : json_new_object();
}

/* Is it vocab.json, with merges.txt beside it? */
static inline bool tokenizer_is_pair(const char* file)
{
    char merges[4096];
    const char* slash = strrchr(file, '/');
    path_beside(merges, file, "merges.txt");
    return strcmp(slash != nullptr ? slash + 1 : file, "vocab.json") == 0 && file_exists(merges);
}

/* Is the pair GPT-2's by tokenizer_config.json, or where that names no class, not Qwen's by config.json? */
static inline bool pair_is_gpt2(const char* file)
{
    cJSON *config = json_beside(file, "tokenizer_config.json"), *model = json_beside(file, "config.json");
    const char* name = json_string_or(config, "tokenizer_class", "", file);
    bool is_qwen = strncmp(json_string_or(model, "model_type", "", file), "qwen", strlen("qwen")) == 0;
    bool is_gpt2 = name[0] ? strncmp(name, "GPT2Tokenizer", strlen("GPT2Tokenizer")) == 0 : !is_qwen;
    cJSON_Delete(config);
    cJSON_Delete(model);
    return is_gpt2;
}

/* False, and the name of the tokenizer.json that is not there, if the folder has neither. */
static inline bool tokenizer_locate(const char* folder, char (&file)[4096])
{
    int n = snprintf(file, sizeof file, "%s/vocab.json", folder);
    ENSURE(n + 8 < (int)sizeof file, "%s: the path is too long", folder);
    bool has_pair = file_exists(file) && tokenizer_is_pair(file) && pair_is_gpt2(file);
    char whole[4096];
    path_beside(whole, file, "tokenizer.json");
    bool has_whole = file_exists(whole);
    if (has_whole || !has_pair) memcpy(file, whole, sizeof file);
    return has_whole || has_pair;
}

// ------------------------------------------------------------------------------------------ vocab.json, merges.txt
static inline cJSON* merges_read(const char* vocab_file)
{
    char path[4096], *rest;
    size_t length;
    path_beside(path, vocab_file, "merges.txt");
    char* text = file_read(path, &length);
    cJSON* merges = cJSON_CreateArray();
    for (char* line = strtok_r(text, "\r\n", &rest); line != nullptr; line = strtok_r(nullptr, "\r\n", &rest)) {
        if (strncmp(line, "#version", 8) == 0) continue;
        const char* blank = strchr(line, ' ');
        ENSURE(blank != nullptr && strchr(blank + 1, ' ') == nullptr, "%s: \"%.40s\" is not a pair of tokens", path,
               line);
        cJSON_AddItemToArray(merges, json_added(cJSON_CreateString(line), "merges"));
    }
    free(text);
    return merges;
}

/* Adds a token, which the vocabulary has or gets: special, or with the `flags` that tokenizer_config.json gives it. */
static inline void pair_add_token(cJSON* added, const cJSON* vocab, const char* content, int id, const cJSON* flags)
{
    const cJSON* item;
    int largest = cJSON_GetArraySize(vocab) - 1;
    cJSON_ArrayForEach(item, added) {
        if (strcmp(json_string(item, "content", "added_tokens"), content) == 0) return;
        if (json_get(item, "id")->valueint > largest) largest = json_get(item, "id")->valueint;
    }
    if (id < 0) id = json_has(vocab, content) ? json_get(vocab, content)->valueint : largest + 1;
    cJSON* token = flags != nullptr ? json_added(cJSON_Duplicate(flags, true), content) : json_new_object();
    json_add_int(token, "id", id);
    if (flags == nullptr) json_add_string(token, "content", content);
    if (flags == nullptr) json_add_bool(token, "special", true);
    cJSON_AddItemToArray(added, token);
}

/* "eos_token": "</s>", or an object with "content". */
static inline const char* config_token(const cJSON* config, const char* key)
{
    const cJSON *token = json_get(config, key), *content = cJSON_IsObject(token) ? json_get(token, "content") : token;
    return cJSON_IsString(content) ? content->valuestring : END_OF_TEXT;
}

/* The tokens that tokenizer_config.json and added_tokens.json have with their ids, then the special ones by name. */
static inline cJSON* pair_added(const cJSON* vocab, const cJSON* config, const char* file)
{
    cJSON *added = cJSON_CreateArray(), *others = json_beside(file, "added_tokens.json");
    const cJSON *decoder = json_get(config, "added_tokens_decoder"), *item;
    cJSON_ArrayForEach(item, decoder)
        pair_add_token(added, vocab, json_string(item, "content", "tokenizer_config.json"), atoi(item->string), item);
    cJSON_ArrayForEach(item, others)
        pair_add_token(added, vocab, item->string, (int)json_item_int(item, item->string, 0, 1 << 24, file), nullptr);
    for (const char* key : {"unk_token", "bos_token", "eos_token", "pad_token"})
        pair_add_token(added, vocab, config_token(config, key), -1, nullptr);
    cJSON_Delete(others);
    return added;
}

static inline cJSON* tokenizer_json(const char* file)
{
    cJSON* vocab = json_parse_file_of_user(file);
    if (!tokenizer_is_pair(file)) return vocab;
    cJSON *root = json_new_object(), *config = json_beside(file, "tokenizer_config.json");
    ENSURE(pair_is_gpt2(file) && !json_bool_or(config, "add_bos_token", false, file), "%s: with merges.txt only "
           "GPT2Tokenizer is read, without add_bos_token; tokenizer_config.json says otherwise: have transformers save "
           "it as tokenizer.json", file);
    cJSON* steps = json_add_object(root, "pre_tokenizer");
    json_add_string(steps, "type", "ByteLevel");
    json_add_bool(steps, "add_prefix_space", json_bool_or(config, "add_prefix_space", false, file));
    cJSON_AddItemToObject(root, "added_tokens", pair_added(vocab, config, file));
    cJSON* model = json_add_object(root, "model");
    cJSON_AddItemToObject(model, "merges", merges_read(file));
    cJSON_AddItemToObject(model, "vocab", vocab);
    cJSON_Delete(config);
    return root;
}

// ------------------------------------------------------------------------------------------------------------ ends
/* The special tokens that tokenizer_config.json names, else <|endoftext|>. */
static inline TokenizerEnds tokenizer_ends(const char* file)
{
    TokenizerEnds ends = {0, -1, -1};
    cJSON *root = tokenizer_json(file), *config = json_beside(file, "tokenizer_config.json");
    const char *begin = config_token(config, "bos_token"), *end = config_token(config, "eos_token");
    const cJSON *vocab = json_get(json_get(root, "model"), "vocab"), *added = json_get(root, "added_tokens"), *item;
    if (cJSON_IsArray(vocab)) ends.vocab_size = cJSON_GetArraySize(vocab);       // Unigram: pieces with scores
    for (const cJSON* list : {vocab, added})
        cJSON_ArrayForEach(item, list) {
            const cJSON *id = list == added ? json_get(item, "id") : item, *content = json_get(item, "content");
            const char* spelling = list == added && cJSON_IsString(content) ? content->valuestring : item->string;
            if (!cJSON_IsNumber(id) || spelling == nullptr) continue;
            if (id->valueint >= ends.vocab_size) ends.vocab_size = id->valueint + 1;
            if (strcmp(spelling, begin) == 0) ends.begin = id->valueint;
            if (strcmp(spelling, end) == 0) ends.end = id->valueint;
        }
    cJSON_Delete(config);
    cJSON_Delete(root);
    return ends;
}
