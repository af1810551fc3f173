/* tokenizer.h: text to token ids and back, as the tokenizer.json of a Hugging Face folder says.
 *
 *   Tokenizer* k = tokenizer_open(path)            a tokenizer.json, or a vocab.json with merges.txt, or their folder
 *   int* ids = tokenizer_encode(k, text, length, &n)     UTF-8 text; special tokens written out in it are recognised;
 *                                                  none are added: k->prefix are those that belong before. free() it
 *   char* text = tokenizer_decode(k, ids, n, &length)    bytes with a NUL after them; a character may be cut by the
 *                                                  last token, so length counts and UTF-8 is not promised. free() it
 *   tokenizer_token(k, id, &length)                the bytes of one token, not to be freed
 *   tokenizer_find(k, "<|endoftext|>")             id of a token by its spelling in the file, -1 without it
 *   k->vocab_size                                  largest id + 1
 *   tokenizer_close(k)
 *
 * Byte-level BPE (GPT-2, Llama-3, Qwen2, and what data/prepare.py trains) goes through five steps:
 *   added    the text is cut at added tokens that are not "normalized", the longest first
 *   form     the pieces are brought to Unicode's form NFC where "normalizer" asks for it; then they are cut at the
 *            added tokens that are "normalized", in that form themselves
 *   split    the pieces are cut by "pre_tokenizer": Split with a Regex, ByteLevel (GPT-2's pattern, or none), or a
 *            Sequence of them that ends with ByteLevel; "add_prefix_space" puts a space before a piece without one
 *   bytes    each byte of a piece is one symbol; the file spells it as a printable character: itself, or U+0100 + n for
 *            the n-th byte that has no glyph of its own (so "Ġ" is the space)
 *   merges   the pair of neighbours with the lowest rank is joined, the leftmost first, until none has a rank; with
 *            "ignore_merges" a piece that is a token as a whole is taken as it is
 * Ids equal those of the `tokenizers` library, but for the 9392 letters and digits that Unicode has got since version
 * 14, which PCRE2 10.42 does not know and splits like punctuation.
 * BPE with "byte_fallback" (Llama-2, Mistral) has characters for symbols: sentencepiece.h.
 * Not handled, and refused by name: Unigram and WordPiece models, other normalizers, dropout, subword prefixes and
 * suffixes, added tokens that swallow spaces or ask for word borders. */
#pragma once
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include "json.h"
#include "normalize.h"
#include "sentencepiece.h"
#include "tokenizer_files.h"

#define TOKENIZER_MAX_STEPS 8
#define TOKENIZER_MAX_VOCAB (1 << 24)
#define TOKENIZER_BYTE_CHARS (256 + 68)          // 68 bytes have no glyph of their own

typedef struct {
    uint64_t key;                // hash of a spelling, or two ids; an empty slot has value -1
    int value, rank;
} TokenSlot;

typedef struct {
    TokenSlot* slots;
    size_t num_slots;            // a power of two, at least twice the entries
} TokenMap;

typedef struct {
    char* spelling;              // as in the file; null: no token has this id
    char* bytes;                 // what it means
    size_t length;
} Token;

typedef struct {
    int id;
    bool normalized;
    char* pattern;               // what is looked for: the spelling, normalized where that is asked for
    size_t length;
} AddedToken;

typedef struct {
    pcre2_code* code;            // null: nothing is cut here
    bool keep_gaps;              // text between two matches is a piece too
    bool add_prefix_space;
} SplitStep;

typedef struct {
    char* path;
    int vocab_size;
    Token* tokens;
    TokenMap by_spelling;        // of model.vocab alone: added tokens are no words
    TokenMap merges;             // key left << 32 | right
    int byte_ids[256];           // -1: no token for this byte
    int byte_chars[256];         // code point that spells a byte, below TOKENIZER_BYTE_CHARS
    int char_bytes[TOKENIZER_BYTE_CHARS];        // and back, -1: spells none
    AddedToken* added;
    size_t num_added;
    bool added_starts[256];      // bytes that some added token begins with
    SplitStep steps[TOKENIZER_MAX_STEPS];
    int num_steps;
    bool nfc;                    // the normalizer
    bool ignore_merges;
    SentencePiece pieces;
    int prefix[8], num_prefix;   // ids that the post_processor puts before a text, such as the beginning of a text
    pcre2_match_data* match;
} Tokenizer;

typedef struct {
    int* ids;
    size_t count, room;
} TokenIds;

/* ---------------------------------------------------------------- maps */

static inline TokenMap token_map_new(size_t num_entries)
{
    TokenMap map = {nullptr, 64};
    while (map.num_slots < 2 * num_entries) map.num_slots *= 2;
    map.slots = (TokenSlot*)malloc_checked(map.num_slots * sizeof(TokenSlot));
    for (size_t i = 0; i < map.num_slots; i++) map.slots[i].value = -1;
    return map;
}

static inline size_t token_map_home(const TokenMap* map, uint64_t key)
{
    key = (key ^ (key >> 32)) * 0x9E3779B97F4A7C15u;
    return (key ^ (key >> 32)) & (map->num_slots - 1);
}

static inline uint64_t token_hash(const char* text, size_t length)      // FNV-1a
{
    uint64_t hash = 0xCBF29CE484222325u;
    for (size_t i = 0; i < length; i++) hash = (hash ^ (unsigned char)text[i]) * 0x100000001B3u;
    return hash;
}

/* The slot of a spelling, or the empty one where it belongs. */
static inline TokenSlot* token_map_spelling(const Tokenizer* k, const char* text, size_t length)
{
    const TokenMap* map = &k->by_spelling;
    uint64_t key = token_hash(text, length);
    for (size_t i = token_map_home(map, key);; i = (i + 1) & (map->num_slots - 1)) {
        TokenSlot* slot = &map->slots[i];
        if (slot->value < 0) { slot->key = key; return slot; }
        const char* spelling = k->tokens[slot->value].spelling;
        if (slot->key == key && strncmp(spelling, text, length) == 0 && spelling[length] == 0) return slot;
    }
}

static inline int token_map_find(const Tokenizer* k, const char* text, size_t length)
{
    return token_map_spelling(k, text, length)->value;
}

static inline TokenSlot* token_map_pair(const TokenMap* map, int left, int right)
{
    uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    for (size_t i = token_map_home(map, key);; i = (i + 1) & (map->num_slots - 1)) {
        TokenSlot* slot = &map->slots[i];
        if (slot->value < 0) slot->key = key;
        if (slot->key == key) return slot;
    }
}

/* ---------------------------------------------------------------- bytes and their spelling */

static inline void tokenizer_init_bytes(Tokenizer* k)
{
    memset(k->char_bytes, -1, sizeof k->char_bytes);
    for (int b = 0, num_hidden = 0; b < 256; b++) {
        bool has_glyph = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
        k->byte_chars[b] = has_glyph ? b : 256 + num_hidden++;
        k->char_bytes[k->byte_chars[b]] = b;
    }
}

static inline size_t tokenizer_spell_byte(const Tokenizer* k, unsigned char byte, char out[2])
{
    int c = k->byte_chars[byte];
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    out[0] = (char)(0xC0 | c >> 6);
    out[1] = (char)(0x80 | (c & 0x3F));
    return 2;
}

/* What a spelling means. One with a character that spells no byte, as in an added token, means itself. */
static inline void tokenizer_unspell(const Tokenizer* k, Token* token, const char* spelling)
{
    size_t length = strlen(spelling);
    free(token->bytes);
    token->bytes = (char*)malloc_checked(length + 1);
    token->length = 0;
    if (k->pieces.on) {
        token->length = sentencepiece_unspell(spelling, token->bytes);
        token->bytes[token->length] = 0;
        return;
    }
    const unsigned char* s = (const unsigned char*)spelling;
    for (size_t i = 0; i < length;) {
        bool one = s[i] < 0x80, two = (s[i] & 0xE0) == 0xC0;
        int c = one ? s[i] : two ? (s[i] & 0x1F) << 6 | (s[i + 1] & 0x3F) : TOKENIZER_BYTE_CHARS;
        int byte = c < TOKENIZER_BYTE_CHARS ? k->char_bytes[c] : -1;
        if (byte < 0) {
            memcpy(token->bytes, spelling, length + 1);
            token->length = length;
            return;
        }
        token->bytes[token->length++] = (char)byte;
        i += one ? 1 : 2;
    }
    token->bytes[token->length] = 0;
}

/* ---------------------------------------------------------------- reading the file */

static inline void tokenizer_refuse_other_kinds(const cJSON* root, const cJSON* model, const char* path)
{
    const char* advice = "use a byte-level BPE tokenizer, or train one with data/prepare.py";
    const char* type = json_string_or(model, "type", "BPE", path);
    bool is_bpe = strcmp(type, "BPE") == 0;
    ENSURE(is_bpe, "%s: its model is \"%s\"%s; only byte-level BPE is supported: %s", path, type,
           strcmp(type, "Unigram") == 0 ? ", a SentencePiece tokenizer" : "", advice);
    ENSURE(json_float_or(model, "dropout", 0, 0, 1, path) == 0, "%s: \"dropout\" is on; ids would be random", path);
    const char* affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    for (const char* affix : affixes) {
        ENSURE(json_string_or(model, affix, "", path)[0] == 0, "%s: has a \"%s\"; %s", path, affix, advice);
    }
}

/* NFC, or a Sequence of it, or of nothing. */
static inline void tokenizer_read_normalizer(Tokenizer* k, const cJSON* normalizer)
{
    const char* type = json_string(normalizer, "type", k->path);
    const cJSON* member;
    if (strcmp(type, "Sequence") == 0) {
        cJSON_ArrayForEach(member, json_array(normalizer, "normalizers", k->path)) tokenizer_read_normalizer(k, member);
        return;
    }
    ENSURE(strcmp(type, "NFC") == 0, "%s: has the normalizer \"%s\"; only NFC is supported: use a byte-level BPE "
           "tokenizer, or train one with data/prepare.py", k->path, type);
    k->nfc = true;
}

/* What the normalizer makes of a piece, to be freed; null: the piece itself. */
static inline char* tokenizer_normalize(const Tokenizer* k, const char* text, size_t length, size_t* out_length)
{
    if (k->pieces.on) return sentencepiece_normalize(&k->pieces, text, length, out_length);
    return k->nfc ? normalize_nfc(text, length, out_length, k->path) : nullptr;
}

static inline void tokenizer_set_token(Tokenizer* k, int id, const char* spelling)
{
    Token* token = &k->tokens[id];
    if (token->spelling != nullptr) {
        ENSURE(strcmp(token->spelling, spelling) == 0, "%s: id %d is both \"%s\" and \"%s\"", k->path, id,
               token->spelling, spelling);
        return;
    }
    token->spelling = strdup(spelling);
    ENSURE(token->spelling != nullptr, "out of host memory for a vocabulary");
    tokenizer_unspell(k, token, spelling);
}

static inline void tokenizer_read_vocab(Tokenizer* k, const cJSON* vocab, const cJSON* added)
{
    size_t num_words = 0;
    int largest = -1;
    for (const cJSON* item = vocab->child; item != nullptr; item = item->next, num_words++) {
        int id = (int)json_item_int(item, item->string, 0, TOKENIZER_MAX_VOCAB, k->path);
        if (id > largest) largest = id;
    }
    for (const cJSON* item = added->child; item != nullptr; item = item->next, k->num_added++) {
        int id = (int)json_int(item, "id", 0, TOKENIZER_MAX_VOCAB, k->path);
        if (id > largest) largest = id;
    }
    ENSURE(num_words > 0, "%s: its vocabulary is empty", k->path);
    k->vocab_size = largest + 1;
    k->tokens = (Token*)malloc_checked((size_t)k->vocab_size * sizeof(Token));
    memset(k->tokens, 0, (size_t)k->vocab_size * sizeof(Token));
    k->by_spelling = token_map_new(num_words);
    for (const cJSON* item = vocab->child; item != nullptr; item = item->next) {
        int id = (int)item->valuedouble;
        tokenizer_set_token(k, id, item->string);
        token_map_spelling(k, item->string, strlen(item->string))->value = id;
    }
    for (int b = 0; b < 256; b++) {
        char spelling[2];
        size_t length = tokenizer_spell_byte(k, (unsigned char)b, spelling);
        char piece[8];
        snprintf(piece, sizeof piece, "<0x%02X>", b);
        k->byte_ids[b] = k->pieces.on ? token_map_find(k, piece, 6) : token_map_find(k, spelling, length);
    }
}

static inline int tokenizer_added_compare(const void* a, const void* b)
{
    const AddedToken* x = (const AddedToken*)a;
    const AddedToken* y = (const AddedToken*)b;
    return x->length != y->length ? (x->length > y->length ? -1 : 1) : x->id - y->id;
}

static inline void tokenizer_read_added(Tokenizer* k, const cJSON* added)
{
    k->added = (AddedToken*)malloc_checked(k->num_added * sizeof(AddedToken));
    k->num_added = 0;
    for (const cJSON* item = added->child; item != nullptr; item = item->next) {
        const char* content = json_string(item, "content", k->path);
        const char* unsupported[] = {"single_word", "lstrip", "rstrip"};
        for (const char* what : unsupported) {
            ENSURE(!json_bool_or(item, what, false, k->path), "%s: the added token \"%s\" has \"%s\", which is not "
                   "supported; set it to false", k->path, content, what);
        }
        if (content[0] == 0) continue;
        AddedToken* token = &k->added[k->num_added++];
        token->id = (int)json_int(item, "id", 0, TOKENIZER_MAX_VOCAB, k->path);
        token->normalized = json_bool_or(item, "normalized", !json_bool_or(item, "special", false, k->path), k->path);
        token->length = strlen(content);
        token->pattern = token->normalized ? tokenizer_normalize(k, content, token->length, &token->length) : nullptr;
        if (token->pattern == nullptr) token->pattern = strdup(content);
        ENSURE(token->pattern != nullptr, "out of host memory for an added token");
        tokenizer_set_token(k, token->id, content);
        tokenizer_unspell(k, &k->tokens[token->id], token->pattern);   // as the library has it
        k->added_starts[(unsigned char)token->pattern[0]] = true;
    }
    qsort(k->added, k->num_added, sizeof *k->added, tokenizer_added_compare);
}

/* A merge is "left right" or ["left", "right"]. */
static inline void tokenizer_read_merges(Tokenizer* k, const cJSON* merges)
{
    k->merges = token_map_new((size_t)cJSON_GetArraySize(merges));
    int rank = 0;
    for (const cJSON* item = merges->child; item != nullptr; item = item->next, rank++) {
        const char* left = item->valuestring;
        const char* right = left != nullptr ? strchr(left, ' ') : nullptr;
        size_t left_length = right != nullptr ? (size_t)(right - left) : 0;
        if (right != nullptr) right++;
        if (cJSON_IsArray(item) && cJSON_GetArraySize(item) == 2) {
            left = item->child->valuestring;
            right = item->child->next->valuestring;
            left_length = left != nullptr ? strlen(left) : 0;
        }
        ENSURE(left != nullptr && right != nullptr && left_length > 0 && right[0] != 0,
               "%s: merge %d is not a pair of tokens", k->path, rank);
        JsonText joined = {nullptr, 0, 0};
        json_text_add(&joined, "%.*s%s", (int)left_length, left, right);
        int left_id = token_map_find(k, left, left_length), right_id = token_map_find(k, right, strlen(right));
        int joined_id = token_map_find(k, joined.text, joined.length);
        ENSURE(left_id >= 0 && right_id >= 0 && joined_id >= 0, "%s: merge %d joins \"%.*s\" and \"%s\", and not all "
               "of them and \"%s\" are in the vocabulary", k->path, rank, (int)left_length, left, right, joined.text);
        TokenSlot* slot = token_map_pair(&k->merges, left_id, right_id);
        slot->value = joined_id;
        slot->rank = rank;
        json_text_free(&joined);
    }
}

/* The white space of Unicode, written out: \s of PCRE2 counts U+180E too, the tokenizers library does not. */
#define TOKENIZER_SPACES "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}" \
                         "\\x{205f}\\x{3000}"
#define TOKENIZER_GPT2_PATTERN "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

static inline pcre2_code* tokenizer_compile(const char* pattern, const char* path)
{
    JsonText t = {nullptr, 0, 0};
    bool in_class = false;
    for (const char* c = pattern; *c != 0; c++) {
        if (*c == '\\' && c[1] == 's') json_text_add(&t, in_class ? "%s" : "[%s]", TOKENIZER_SPACES);
        else if (*c == '\\' && c[1] == 'S' && !in_class) json_text_add(&t, "[^%s]", TOKENIZER_SPACES);
        else if (*c == '\\' && c[1] != 0) json_text_add(&t, "\\%c", c[1]);
        else json_text_add(&t, "%c", *c);
        in_class = *c == '[' || (in_class && *c != ']');
        if (*c == '\\' && c[1] != 0) c++;
    }
    int error;
    PCRE2_SIZE at;
    uint32_t options = PCRE2_UTF | PCRE2_UCP;
    pcre2_code* code = pcre2_compile((PCRE2_SPTR)t.text, t.length, options, &error, &at, nullptr);
    if (code == nullptr) {
        char words[256];
        pcre2_get_error_message(error, (PCRE2_UCHAR*)words, sizeof words);
        die("%s: the pattern of its pre_tokenizer cannot be used: %s at \"%.40s\"", path, words,
            t.text != nullptr && at <= t.length ? t.text + at : "");
    }
    pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);     // without it the same matches are found, slower
    json_text_free(&t);
    return code;
}

static inline void tokenizer_read_step(Tokenizer* k, const cJSON* item)
{
    const char* type = json_string(item, "type", k->path);
    ENSURE(k->num_steps < TOKENIZER_MAX_STEPS, "%s: its pre_tokenizer has more than %d steps", k->path,
           TOKENIZER_MAX_STEPS);
    SplitStep* step = &k->steps[k->num_steps++];
    if (strcmp(type, "ByteLevel") == 0) {
        step->add_prefix_space = json_bool_or(item, "add_prefix_space", true, k->path);
        step->keep_gaps = true;
        bool use_regex = json_bool_or(item, "use_regex", true, k->path);
        step->code = use_regex ? tokenizer_compile(TOKENIZER_GPT2_PATTERN, k->path) : nullptr;
        return;
    }
    ENSURE(strcmp(type, "Split") == 0, "%s: the pre_tokenizer \"%s\" is not supported, only ByteLevel and Split are%s",
           k->path, type, strcmp(type, "Metaspace") == 0 ? "; it is a SentencePiece tokenizer" : "");
    const cJSON* pattern = json_object(item, "pattern", k->path);
    const char* behavior = json_string(item, "behavior", k->path);
    bool invert = json_bool_or(item, "invert", false, k->path);
    bool isolated = strcmp(behavior, "Isolated") == 0, kept = strcmp(behavior, "Removed") == 0 && invert;
    ENSURE(isolated || kept, "%s: a Split that is \"%s\"%s is not supported, only \"Isolated\" is", k->path, behavior,
           invert ? " and inverted" : "");
    step->keep_gaps = isolated;
    step->code = tokenizer_compile(json_string(pattern, "Regex", k->path), k->path);
}

static inline void tokenizer_read_steps(Tokenizer* k, const cJSON* root)
{
    ENSURE(json_has(root, "pre_tokenizer"), "%s: has no pre_tokenizer, so it is not byte-level BPE; use a tokenizer "
           "that is, or train one with data/prepare.py", k->path);
    const cJSON* top = json_object(root, "pre_tokenizer", k->path);
    const cJSON* last = top;
    if (strcmp(json_string(top, "type", k->path), "Sequence") == 0) {
        last = nullptr;
        for (const cJSON* item = json_array(top, "pretokenizers", k->path)->child; item != nullptr; item = item->next) {
            tokenizer_read_step(k, item);
            last = item;
        }
    } else {
        tokenizer_read_step(k, top);
    }
    ENSURE(last != nullptr && strcmp(json_string(last, "type", k->path), "ByteLevel") == 0,
           "%s: its pre_tokenizer does not end with ByteLevel, so it is not byte-level BPE; use a tokenizer that is, "
           "or train one with data/prepare.py", k->path);
}

static inline int tokenizer_find(const Tokenizer* k, const char* spelling);

/* A TemplateProcessing, alone or in a Sequence: its special tokens before "Sequence". */
static inline void tokenizer_read_prefix(Tokenizer* k, const cJSON* processor)
{
    const cJSON* member;
    cJSON_ArrayForEach(member, json_get(processor, "processors")) tokenizer_read_prefix(k, member);
    cJSON_ArrayForEach(member, json_get(processor, "single")) {
        const cJSON* special = json_get(member, "SpecialToken");
        if (special == nullptr || k->num_prefix == (int)(sizeof k->prefix / sizeof k->prefix[0])) return;
        const char* spelling = json_string(special, "id", k->path);
        k->prefix[k->num_prefix] = tokenizer_find(k, spelling);
        ENSURE(k->prefix[k->num_prefix++] >= 0, "%s: its post_processor puts \"%s\", which is no token", k->path,
               spelling);
    }
}

static inline Tokenizer* tokenizer_open(const char* path)
{
    char file[4096];
    if (file_kind(path) == S_IFDIR) tokenizer_locate(path, file);
    else ENSURE(snprintf(file, sizeof file, "%s", path) < (int)sizeof file, "%s: the path is too long", path);
    cJSON* root = tokenizer_json(file);
    const cJSON* model = json_object(root, "model", file);
    tokenizer_refuse_other_kinds(root, model, file);

    Tokenizer* k = (Tokenizer*)malloc_checked(sizeof *k);
    memset(k, 0, sizeof *k);
    k->path = strdup(file);
    tokenizer_init_bytes(k);
    sentencepiece_read(&k->pieces, root, model, file);
    if (json_has(root, "normalizer") && !k->pieces.on)
        tokenizer_read_normalizer(k, json_object(root, "normalizer", file));
    cJSON* none = cJSON_CreateArray();
    const cJSON* added = json_has(root, "added_tokens") ? json_array(root, "added_tokens", file) : none;
    tokenizer_read_vocab(k, json_object(model, "vocab", file), added);
    tokenizer_read_added(k, added);
    tokenizer_read_merges(k, json_array(model, "merges", file));
    if (!k->pieces.on) tokenizer_read_steps(k, root);
    const char* unk = json_string_or(model, "unk_token", "", file);
    if (k->pieces.on && unk[0] != 0) k->pieces.unk_id = token_map_find(k, unk, strlen(unk));
    k->ignore_merges = json_bool_or(model, "ignore_merges", false, file);
    if (json_has(root, "post_processor")) tokenizer_read_prefix(k, json_object(root, "post_processor", file));
    k->match = pcre2_match_data_create(8, nullptr);
    ENSURE(k->match != nullptr, "out of host memory for a pattern's matches");
    cJSON_Delete(none);
    cJSON_Delete(root);
    return k;
}

static inline void tokenizer_close(Tokenizer* k)
{
    for (int i = 0; i < k->vocab_size; i++) {
        free(k->tokens[i].spelling);
        free(k->tokens[i].bytes);
    }
    for (size_t i = 0; i < k->num_added; i++) free(k->added[i].pattern);
    for (int i = 0; i < k->num_steps; i++) pcre2_code_free(k->steps[i].code);
    pcre2_match_data_free(k->match);
    free(k->tokens);
    free(k->by_spelling.slots);
    free(k->merges.slots);
    free(k->added);
    free(k->path);
    free(k);
}

/* ---------------------------------------------------------------- encoding */

static inline void tokenizer_push(TokenIds* out, int id)
{
    if (out->count == out->room) {
        out->room = 2 * out->room + 64;
        out->ids = (int*)realloc(out->ids, out->room * sizeof(int));
        ENSURE(out->ids != nullptr, "out of host memory for %zu tokens", out->room);
    }
    out->ids[out->count++] = id;
}

/* The symbols of one word as a list linked both ways, and a heap of the merges that may be due. */
typedef struct { int id; int prev, next; } Symbol;              // id -1: merged into the one before
typedef struct { int rank, at, joined; } Merge;                 // symbol `at` and the next become `joined`

static inline bool merge_before(const Merge* a, const Merge* b)
{
    return a->rank != b->rank ? a->rank < b->rank : a->at < b->at;
}

static inline void merge_push(Merge* heap, size_t* count, Merge merge)
{
    size_t i = (*count)++;
    for (; i > 0 && merge_before(&merge, &heap[(i - 1) / 2]); i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
    heap[i] = merge;
}

static inline Merge merge_pop(Merge* heap, size_t* count)
{
    Merge top = heap[0], last = heap[--*count];
    size_t i = 0;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child + 1 < *count && merge_before(&heap[child + 1], &heap[child])) child++;
        if (child >= *count || !merge_before(&heap[child], &last)) break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = last;
    return top;
}

static inline void tokenizer_consider(const Tokenizer* k, const Symbol* symbols, int at, Merge* heap, size_t* count)
{
    if (at < 0 || symbols[at].next < 0) return;
    const TokenSlot* slot = token_map_pair(&k->merges, symbols[at].id, symbols[symbols[at].next].id);
    if (slot->value < 0) return;
    Merge merge = {slot->rank, at, slot->value};
    merge_push(heap, count, merge);
}

/* The symbols of a word before any merge; returns their number, which is at most its bytes. Bytes: one each. */
static inline size_t tokenizer_first_symbols(const Tokenizer* k, const char* text, size_t length, Symbol* symbols)
{
    if (!k->pieces.on) {
        for (size_t i = 0; i < length; i++) {
            unsigned char byte = (unsigned char)text[i];
            ENSURE(k->byte_ids[byte] >= 0, "%s: has no token for the byte 0x%02X of \"%.*s\"; train a tokenizer whose "
                   "alphabet has all 256 bytes", k->path, byte, (int)(length < 40 ? length : 40), text);
            symbols[i].id = k->byte_ids[byte];
        }
        return length;
    }
    size_t count = 0;
    bool after_unk = false;
    for (size_t i = 0, n; i < length; i += n) {
        n = sentencepiece_char(text + i, length - i);
        ENSURE(n > 0, "the text cannot be tokenized: at byte %zu of \"%.*s\" it is no UTF-8; give it as UTF-8", i,
               (int)(length < 40 ? length : 40), text);
        int id = token_map_find(k, text + i, n);
        bool has_bytes = true;
        for (size_t b = 0; b < n; b++) has_bytes = has_bytes && k->byte_ids[(unsigned char)text[i + b]] >= 0;
        bool unknown = id < 0 && !has_bytes;
        if (id >= 0) symbols[count++].id = id;
        for (size_t b = 0; id < 0 && has_bytes && b < n; b++)
            symbols[count++].id = k->byte_ids[(unsigned char)text[i + b]];
        if (unknown && k->pieces.unk_id >= 0 && !(after_unk && k->pieces.fuse_unk))
            symbols[count++].id = k->pieces.unk_id;
        after_unk = unknown;
    }
    return count;
}

/* Each merge removes one symbol and considers two pairs, so that 3n entries are enough for the heap. */
static inline void tokenizer_merge_word(const Tokenizer* k, const char* text, size_t length, TokenIds* out)
{
    Symbol small_symbols[64];
    Merge small_heap[3 * 64];
    bool small = length <= 64;
    Symbol* symbols = small ? small_symbols : (Symbol*)malloc_checked(length * sizeof(Symbol));
    Merge* heap = small ? small_heap : (Merge*)malloc_checked(3 * length * sizeof(Merge));
    size_t heap_count = 0;
    size_t num_symbols = tokenizer_first_symbols(k, text, length, symbols);
    for (size_t i = 0; i < num_symbols; i++) {
        symbols[i].prev = (int)i - 1;
        symbols[i].next = i + 1 < num_symbols ? (int)i + 1 : -1;
    }
    for (size_t i = 0; i + 1 < num_symbols; i++) tokenizer_consider(k, symbols, (int)i, heap, &heap_count);
    while (heap_count > 0) {
        Merge merge = merge_pop(heap, &heap_count);
        Symbol* left = &symbols[merge.at];
        if (left->id < 0 || left->next < 0) continue;
        Symbol* right = &symbols[left->next];
        if (token_map_pair(&k->merges, left->id, right->id)->value != merge.joined) continue;   // overtaken by another
        left->id = merge.joined;
        right->id = -1;
        left->next = right->next;
        if (left->next >= 0) symbols[left->next].prev = merge.at;
        tokenizer_consider(k, symbols, left->prev, heap, &heap_count);
        tokenizer_consider(k, symbols, merge.at, heap, &heap_count);
    }
    for (int i = num_symbols > 0 ? 0 : -1; i >= 0; i = symbols[i].next) tokenizer_push(out, symbols[i].id);
    if (!small) {
        free(symbols);
        free(heap);
    }
}

static inline void tokenizer_word(const Tokenizer* k, const char* text, size_t length, TokenIds* out)
{
    if (length == 0) return;
    ENSURE(length < INT32_MAX / 4, "a word of %zu bytes cannot be tokenized", length);
    char spelling[2 * 256];
    if (k->ignore_merges && length <= 256) {
        size_t used = 0;
        for (size_t i = 0; i < length; i++) used += tokenizer_spell_byte(k, (unsigned char)text[i], spelling + used);
        if (k->pieces.on) memcpy(spelling, text, used = length);
        int id = token_map_find(k, spelling, used);
        if (id >= 0) {
            tokenizer_push(out, id);
            return;
        }
    }
    tokenizer_merge_word(k, text, length, out);
}

/* Finds the next match at or after `from`; false if there is none. The text is checked to be UTF-8 when from is 0. */
static inline bool tokenizer_next_match(const Tokenizer* k, const pcre2_code* code, const char* text, size_t length,
                                        size_t from, size_t* begin, size_t* end)
{
    uint32_t options = PCRE2_NOTEMPTY | (from > 0 ? PCRE2_NO_UTF_CHECK : 0);
    int result = pcre2_match(code, (PCRE2_SPTR)text, length, from, options, k->match, nullptr);
    if (result == PCRE2_ERROR_JIT_STACKLIMIT) {
        result = pcre2_match(code, (PCRE2_SPTR)text, length, from, options | PCRE2_NO_JIT, k->match, nullptr);
    }
    if (result == PCRE2_ERROR_NOMATCH) return false;
    if (result < 0) {
        char words[256];
        pcre2_get_error_message(result, (PCRE2_UCHAR*)words, sizeof words);
        bool is_utf = result <= PCRE2_ERROR_UTF8_ERR1 && result >= PCRE2_ERROR_UTF8_ERR21;
        size_t at = is_utf ? pcre2_get_startchar(k->match) : from;
        die("the text cannot be tokenized: %s at byte %zu of \"%.*s\"%s", words, at, (int)(length < 40 ? length : 40),
            text, is_utf ? "; give it as UTF-8" : "");
    }
    *begin = pcre2_get_ovector_pointer(k->match)[0];
    *end = pcre2_get_ovector_pointer(k->match)[1];
    return true;
}

/* Steps from step_idx on, applied to one piece. */
static inline void tokenizer_split(const Tokenizer* k, int step_idx, const char* text, size_t length, TokenIds* out)
{
    if (length == 0) return;
    if (step_idx >= k->num_steps || step_idx >= TOKENIZER_MAX_STEPS) {
        tokenizer_word(k, text, length, out);
        return;
    }
    const SplitStep* step = &k->steps[step_idx];
    char* with_space = nullptr;
    if (step->add_prefix_space && text[0] != ' ') {
        with_space = (char*)malloc_checked(length + 1);
        with_space[0] = ' ';
        memcpy(with_space + 1, text, length);
        text = with_space;
        length++;
    }
    size_t done = 0, begin, end;
    while (step->code != nullptr && done < length &&
           tokenizer_next_match(k, step->code, text, length, done, &begin, &end)) {
        if (step->keep_gaps) tokenizer_split(k, step_idx + 1, text + done, begin - done, out);
        tokenizer_split(k, step_idx + 1, text + begin, end - begin, out);
        done = end;
    }
    if (step->keep_gaps) tokenizer_split(k, step_idx + 1, text + done, length - done, out);
    free(with_space);
}

/* A piece between added tokens, the first of the text or not, as Metaspace has it. */
static inline void tokenizer_pieces(const Tokenizer* k, const char* text, size_t length, bool first, TokenIds* out)
{
    const SentencePiece* s = &k->pieces;
    if (length == 0) return;
    if (!s->metaspace) {
        tokenizer_word(k, text, length, out);
        return;
    }
    bool begins_with_mark = text[0] == ' ' || (length >= 3 && memcmp(text, SPACE_MARK, 3) == 0);
    bool may_put = s->space_before == SpaceBefore::ALWAYS || (s->space_before == SpaceBefore::FIRST && first);
    size_t n, done = 0;
    char* marked = sentencepiece_mark(text, length, may_put && !begins_with_mark, true, &n);
    for (size_t i = 1; s->splits && i + 3 <= n; i++) {
        if (memcmp(marked + i, SPACE_MARK, 3) != 0) continue;
        tokenizer_word(k, marked + done, i - done, out);
        done = i;
    }
    tokenizer_word(k, marked + done, n - done, out);
    free(marked);
}

/* Pass 0 cuts at the added tokens that are not "normalized", pass 1 normalizes and cuts at the others, pass 2 is what
 * is between. */
static inline void tokenizer_cut_at_added(const Tokenizer* k, int pass, const char* text, size_t length, bool first,
                                          TokenIds* out)
{
    if (length == 0) return;
    if (pass == 2) {
        if (k->pieces.on) tokenizer_pieces(k, text, length, first, out);
        else tokenizer_split(k, 0, text, length, out);
        return;
    }
    size_t done = 0;
    char* normalized = pass == 1 ? tokenizer_normalize(k, text, length, &length) : nullptr;
    if (normalized != nullptr) text = normalized;
    for (size_t i = 0; i < length;) {
        const AddedToken* found = nullptr;
        for (size_t a = 0; k->added_starts[(unsigned char)text[i]] && a < k->num_added && found == nullptr; a++) {
            const AddedToken* token = &k->added[a];      // the longest come first
            if (token->normalized == (pass == 1) && token->length <= length - i &&
                memcmp(text + i, token->pattern, token->length) == 0) found = token;
        }
        if (found == nullptr) {
            i++;
            continue;
        }
        tokenizer_cut_at_added(k, pass + 1, text + done, i - done, first && done == 0, out);
        tokenizer_push(out, found->id);
        i += found->length;
        done = i;
    }
    tokenizer_cut_at_added(k, pass + 1, text + done, length - done, first && done == 0, out);
    free(normalized);
}

static inline int* tokenizer_encode(const Tokenizer* k, const char* text, size_t length, size_t* count)
{
    TokenIds out = {(int*)malloc_checked((length / 3 + 16) * sizeof(int)), 0, length / 3 + 16};
    tokenizer_cut_at_added(k, 0, text, length, true, &out);
    *count = out.count;
    return out.ids;
}

/* ---------------------------------------------------------------- decoding */

static inline int tokenizer_find(const Tokenizer* k, const char* spelling)
{
    for (size_t a = 0; a < k->num_added; a++) {
        if (strcmp(k->tokens[k->added[a].id].spelling, spelling) == 0) return k->added[a].id;
    }
    return token_map_find(k, spelling, strlen(spelling));
}

/* An id that no token has, as in the gap a vocabulary may leave, means nothing. */
static inline const char* tokenizer_token(const Tokenizer* k, int id, size_t* length)
{
    ENSURE(id >= 0 && id < k->vocab_size, "%s: has no token %d, its ids are 0 to %d; it belongs to another model",
           k->path, id, k->vocab_size - 1);
    *length = k->tokens[id].length;
    return *length > 0 ? k->tokens[id].bytes : "";
}

static inline char* tokenizer_decode(const Tokenizer* k, const int* ids, size_t count, size_t* length)
{
    *length = 0;
    size_t token_length;
    for (size_t i = 0; i < count; i++) {
        tokenizer_token(k, ids[i], &token_length);
        *length += token_length;
    }
    char* text = (char*)malloc_checked(*length + 1);
    char* at = text;
    for (size_t i = 0; i < count; i++) {
        const char* bytes = tokenizer_token(k, ids[i], &token_length);
        memcpy(at, bytes, token_length);
        at += token_length;
    }
    *at = 0;
    if (k->pieces.drops_space && text[0] == ' ') memmove(text, text + 1, (*length)--);
    return text;
}
