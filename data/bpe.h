/* bpe.h: the model of a tokenizer.json: a word to token ids by byte-pair encoding.
 *   Bpe b; b.tokens = ... (vocab_size); bpe_read(&b, model, path); bpe_free(&b)    of its "model" whose type is BPE
 *   bpe_word(&b, text, length, &ids)    adds the ids of a word as the pre_tokenizer leaves it
 *   symbols  a character of the vocabulary; else with "byte_fallback" its bytes, spelled <0xE2>; else the unknown
 *            token, several in a row being one with "fuse_unk"; else nothing, or an error where `knows_all`
 *   merges   the pair of neighbours with the lowest rank is joined, the leftmost first, until none has a rank; with
 *            "ignore_merges" a word that is a token as a whole is taken as it is
 * Not handled, and refused by name: Unigram and WordPiece, dropout, subword prefixes and suffixes. */
#pragma once
#include <cctype>
#include "json.h"
#include "pretokenize.h"
#include "utf8.h"

#define TOKENIZER_MAX_VOCAB (1 << 24)

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
    const char* path;            // of the file, for messages
    Token* tokens;
    TokenMap by_spelling;        // of model.vocab alone: added tokens are no words
    TokenMap merges;             // key left << 32 | right
    int char_ids[BYTE_CHARS];    // of the first characters, -1: no token
    int byte_ids[256];           // of <0x00> to <0xFF>, -1: no token
    int unk_id;                  // -1: none
    bool byte_fallback, fuse_unk, ignore_merges;
    bool knows_all;              // a character without a token is an error
} Bpe;

typedef struct {
    int* ids;
    size_t count, room;
} TokenIds;

// ------------------------------------------------------------------------------------------------------------ maps

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
static inline TokenSlot* token_map_spelling(const Bpe* b, const char* text, size_t length)
{
    const TokenMap* map = &b->by_spelling;
    uint64_t key = token_hash(text, length);
    for (size_t i = token_map_home(map, key);; i = (i + 1) & (map->num_slots - 1)) {
        TokenSlot* slot = &map->slots[i];
        if (slot->value < 0) { slot->key = key; return slot; }
        const char* spelling = b->tokens[slot->value].spelling;
        if (slot->key == key && strncmp(spelling, text, length) == 0 && spelling[length] == 0) return slot;
    }
}

static inline int token_map_find(const Bpe* b, const char* text, size_t length)
{
    return token_map_spelling(b, text, length)->value;
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

// ------------------------------------------------------------------------------------------------ reading the file
static inline void bpe_refuse_others(const cJSON* model, const char* path)
{
    const char* advice = "use another tokenizer, or train one with data/prepare.py";
    const char* type = json_string_or(model, "type", "BPE", path);
    ENSURE(strcmp(type, "BPE") == 0, "%s: its model is \"%s\"%s; only BPE is supported: %s", path, type,
           strcmp(type, "Unigram") == 0 ? " of SentencePiece" : strcmp(type, "WordPiece") == 0 ? " of BERT" : "",
           advice);
    ENSURE(json_float_or(model, "dropout", 0, 0, 1, path) == 0, "%s: \"dropout\" is on; ids would be random", path);
    const char* affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    for (const char* affix : affixes) {
        ENSURE(json_string_or(model, affix, "", path)[0] == 0, "%s: has a \"%s\"; %s", path, affix, advice);
    }
}

/* A merge is "left right" or ["left", "right"]. */
static inline void bpe_read_merges(Bpe* b, const cJSON* merges)
{
    b->merges = token_map_new((size_t)cJSON_GetArraySize(merges));
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
               "%s: merge %d is not a pair of tokens", b->path, rank);
        JsonText joined = {nullptr, 0, 0};
        json_text_add(&joined, "%.*s%s", (int)left_length, left, right);
        int left_id = token_map_find(b, left, left_length), right_id = token_map_find(b, right, strlen(right));
        int joined_id = token_map_find(b, joined.text, joined.length);
        ENSURE(left_id >= 0 && right_id >= 0 && joined_id >= 0, "%s: merge %d joins \"%.*s\" and \"%s\", and not all "
               "of them and \"%s\" are in the vocabulary", b->path, rank, (int)left_length, left, right, joined.text);
        TokenSlot* slot = token_map_pair(&b->merges, left_id, right_id);
        slot->value = joined_id;
        slot->rank = rank;
        json_text_free(&joined);
    }
}

/* b->path and b->tokens are set; each token of the vocabulary has its spelling. */
static inline void bpe_read(Bpe* b, const cJSON* model)
{
    const cJSON* vocab = json_object(model, "vocab", b->path);
    b->by_spelling = token_map_new((size_t)cJSON_GetArraySize(vocab));
    for (const cJSON* item = vocab->child; item != nullptr; item = item->next)
        token_map_spelling(b, item->string, strlen(item->string))->value = (int)item->valuedouble;
    bpe_read_merges(b, json_array(model, "merges", b->path));
    for (int c = 0; c < BYTE_CHARS; c++) {
        const bool one = c < 0x80;
        const char text[2] = {(char)(one ? c : 0xC0 | c >> 6), (char)(0x80 | (c & 0x3F))};
        b->char_ids[c] = token_map_find(b, text, one ? 1 : 2);
    }
    for (int byte = 0; byte < 256; byte++) {
        char text[8];
        snprintf(text, sizeof text, "<0x%02X>", byte);
        b->byte_ids[byte] = token_map_find(b, text, strlen(text));
    }
    const char* unk = json_string_or(model, "unk_token", "", b->path);
    b->unk_id = unk[0] != 0 ? token_map_find(b, unk, strlen(unk)) : -1;
    b->byte_fallback = json_bool_or(model, "byte_fallback", false, b->path);
    b->fuse_unk = json_bool_or(model, "fuse_unk", false, b->path);
    b->ignore_merges = json_bool_or(model, "ignore_merges", false, b->path);
}

static inline void bpe_free(Bpe* b)
{
    free(b->by_spelling.slots);
    free(b->merges.slots);
}

// --------------------------------------------------------------------------------------------------- what is meant
/* The byte that a spelling like <0xE2> means, or -1. */
static inline int byte_of_spelling(const char* spelling)
{
    char* end;
    if (strlen(spelling) != 6 || strncmp(spelling, "<0x", 3) != 0 || spelling[5] != '>') return -1;
    if (!isxdigit((unsigned char)spelling[3]) || !isxdigit((unsigned char)spelling[4])) return -1;
    return (int)strtol(spelling + 3, &end, 16);
}

/* What a token of characters means, into bytes (room for strlen): U+2581 is a space, <0xE2> a byte. Returns the
 * length. */
static inline size_t bytes_of_characters(const char* spelling, char* bytes)
{
    int byte = byte_of_spelling(spelling);
    if (byte >= 0) {
        bytes[0] = (char)byte;
        return 1;
    }
    size_t length = 0;
    for (const char* c = spelling; *c != 0; ) {
        bool mark = strncmp(c, SPACE_MARK, 3) == 0;
        bytes[length++] = mark ? ' ' : *c;
        c += mark ? 3 : 1;
    }
    return length;
}

// ---------------------------------------------------------------------------------------------------- words to ids
static inline void tokens_push(TokenIds* out, int id)
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

static inline void bpe_consider(const Bpe* b, const Symbol* symbols, int at, Merge* heap, size_t* count)
{
    if (at < 0 || symbols[at].next < 0) return;
    const TokenSlot* slot = token_map_pair(&b->merges, symbols[at].id, symbols[symbols[at].next].id);
    if (slot->value < 0) return;
    Merge merge = {slot->rank, at, slot->value};
    merge_push(heap, count, merge);
}

/* Adds the bytes of a character without a token of its own, if each of them has one. */
static inline bool bpe_fall_back(const Bpe* b, const char* text, size_t n, Symbol* symbols, size_t* count)
{
    for (size_t i = 0; i < n; i++)
        if (!b->byte_fallback || b->byte_ids[(unsigned char)text[i]] < 0) return false;
    for (size_t i = 0; i < n; i++) symbols[(*count)++].id = b->byte_ids[(unsigned char)text[i]];
    return true;
}

/* The symbols of a word before any merge; returns their number, which is at most its bytes. */
static inline size_t bpe_symbols(const Bpe* b, const char* text, size_t length, Symbol* symbols)
{
    const int shown = (int)(length < 40 ? length : 40);
    size_t count = 0;
    bool after_unk = false;
    for (size_t i = 0, n; i < length; i += n) {
        unsigned c;
        n = utf8_char(text + i, length - i, &c);
        ENSURE(n > 0, "the text cannot be tokenized: at byte %zu of \"%.*s\" it is no UTF-8; give it as UTF-8", i,
               shown, text);
        const int id = c < BYTE_CHARS ? b->char_ids[c] : token_map_find(b, text + i, n);
        bool unknown = false;
        if (id >= 0) symbols[count++].id = id;
        else unknown = !bpe_fall_back(b, text + i, n, symbols, &count);
        ENSURE(!unknown || b->unk_id >= 0 || !b->knows_all, "%s: has no token for \"%.*s\" of \"%.*s\"; train a "
               "tokenizer whose alphabet has all 256 bytes", b->path, (int)n, text + i, shown, text);
        if (unknown && b->unk_id >= 0 && !(after_unk && b->fuse_unk)) symbols[count++].id = b->unk_id;
        after_unk = unknown;
    }
    return count;
}

/* Each merge removes one symbol and considers two pairs, so that 3n entries are enough for the heap. */
static inline void bpe_merge(const Bpe* b, const char* text, size_t length, TokenIds* out)
{
    Symbol small_symbols[64];
    Merge small_heap[3 * 64];
    bool small = length <= 64;
    Symbol* symbols = small ? small_symbols : (Symbol*)malloc_checked(length * sizeof(Symbol));
    Merge* heap = small ? small_heap : (Merge*)malloc_checked(3 * length * sizeof(Merge));
    size_t heap_count = 0;
    size_t num_symbols = bpe_symbols(b, text, length, symbols);
    for (size_t i = 0; i < num_symbols; i++) {
        symbols[i].prev = (int)i - 1;
        symbols[i].next = i + 1 < num_symbols ? (int)i + 1 : -1;
    }
    for (size_t i = 0; i + 1 < num_symbols; i++) bpe_consider(b, symbols, (int)i, heap, &heap_count);
    while (heap_count > 0) {
        Merge merge = merge_pop(heap, &heap_count);
        Symbol* left = &symbols[merge.at];
        if (left->id < 0 || left->next < 0) continue;
        Symbol* right = &symbols[left->next];
        if (token_map_pair(&b->merges, left->id, right->id)->value != merge.joined) continue;   // overtaken by another
        left->id = merge.joined;
        right->id = -1;
        left->next = right->next;
        if (left->next >= 0) symbols[left->next].prev = merge.at;
        bpe_consider(b, symbols, left->prev, heap, &heap_count);
        bpe_consider(b, symbols, merge.at, heap, &heap_count);
    }
    for (int i = num_symbols > 0 ? 0 : -1; i >= 0; i = symbols[i].next) tokens_push(out, symbols[i].id);
    if (!small) {
        free(symbols);
        free(heap);
    }
}

static inline void bpe_word(const Bpe* b, const char* text, size_t length, TokenIds* out)
{
    ENSURE(length < INT32_MAX / 4, "a word of %zu bytes cannot be tokenized", length);
    const int whole = b->ignore_merges ? token_map_find(b, text, length) : -1;
    if (whole >= 0) tokens_push(out, whole);
    else bpe_merge(b, text, length, out);
}
