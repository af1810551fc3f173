/* sentencepiece.h: BPE over characters with bytes to fall back on, as Llama-2's and Mistral's tokenizer.json have it;
 * part of tokenizer.h.
 *   spaces   every space becomes U+2581, and one is put before the text: by the normalizer before each piece between
 *            two added tokens that are not "normalized" (the others are looked for after that, so "<s>" as " <s>"), or
 *            by the pre_tokenizer Metaspace ("first": before the text alone; "always": before a piece that does not
 *            begin with one); Metaspace may also cut before each U+2581
 *   symbols  a character of the vocabulary; else its bytes, spelled <0xE2>; without those the unknown token, several in
 *            a row being one with "fuse_unk"
 *   merges   as in byte-level BPE, but over the whole text
 *   decode   U+2581 is a space, <0xE2> a byte; one leading space is dropped where "decoder" says so
 * Not handled, and refused by name: other normalizers and pre_tokenizers. */
#pragma once
#include <cctype>
#include <cstring>
#include "json.h"

#define SPACE_MARK "\xE2\x96\x81"

enum class SpaceBefore { NEVER, FIRST, ALWAYS };

typedef struct {
    bool on;                     // this tokenizer is of that kind
    bool prepends, replaces;     // the normalizer: U+2581 before a piece, and for its spaces
    bool metaspace, splits;      // the pre_tokenizer, and it cuts before each U+2581
    SpaceBefore space_before;    // by it
    bool drops_space;            // the first, in decoding
    int unk_id;                  // -1: none
    bool fuse_unk;
} SentencePiece;

static inline bool sentencepiece_is_string(const cJSON* object, const char* key, const char* value)
{
    const cJSON* item = json_get(object, key);
    return cJSON_IsString(item) && strcmp(item->valuestring, value) == 0;
}

static inline void sentencepiece_read_normalizer(SentencePiece* s, const cJSON* item, const char* path)
{
    const char* type = json_string(item, "type", path);
    if (strcmp(type, "Sequence") == 0) {
        const cJSON* member;
        cJSON_ArrayForEach(member, json_array(item, "normalizers", path))
            sentencepiece_read_normalizer(s, member, path);
        return;
    }
    if (strcmp(type, "Prepend") == 0 && sentencepiece_is_string(item, "prepend", SPACE_MARK)) {
        s->prepends = true;
        return;
    }
    bool replaces = strcmp(type, "Replace") == 0 && sentencepiece_is_string(item, "content", SPACE_MARK) &&
                    sentencepiece_is_string(json_object(item, "pattern", path), "String", " ");
    ENSURE(replaces, "%s: has the normalizer \"%s\"; with byte_fallback only Prepend and Replace of spaces by U+2581 "
           "are supported", path, type);
    s->replaces = true;
}

static inline void sentencepiece_read_metaspace(SentencePiece* s, const cJSON* item, const char* path)
{
    const char* type = json_string(item, "type", path);
    ENSURE(strcmp(type, "Metaspace") == 0 && sentencepiece_is_string(item, "replacement", SPACE_MARK),
           "%s: with byte_fallback the pre_tokenizer \"%s\" is not supported, only Metaspace with U+2581", path, type);
    const char* scheme = json_string_or(item, "prepend_scheme", "always", path);
    bool first = strcmp(scheme, "first") == 0, never = strcmp(scheme, "never") == 0;
    ENSURE(first || never || strcmp(scheme, "always") == 0, "%s: the prepend_scheme \"%s\" is not known", path, scheme);
    s->space_before = first ? SpaceBefore::FIRST : never ? SpaceBefore::NEVER : SpaceBefore::ALWAYS;
    s->metaspace = true;
    s->splits = json_bool_or(item, "split", true, path);
}

/* A Strip of one space at the start, alone or in a Sequence; Metaspace's own decoder drops it unless nothing is put. */
static inline bool sentencepiece_drops_space(const cJSON* decoder)
{
    if (!cJSON_IsObject(decoder)) return false;
    if (sentencepiece_is_string(decoder, "type", "Metaspace"))
        return !sentencepiece_is_string(decoder, "prepend_scheme", "never");
    if (sentencepiece_is_string(decoder, "type", "Strip")) {
        const cJSON* start = json_get(decoder, "start");
        return sentencepiece_is_string(decoder, "content", " ") && cJSON_IsNumber(start) && start->valueint == 1;
    }
    const cJSON *members = json_get(decoder, "decoders"), *member;
    bool drops = false;
    cJSON_ArrayForEach(member, members) drops = drops || sentencepiece_drops_space(member);
    return drops;
}

/* All but the vocabulary. */
static inline void sentencepiece_read(SentencePiece* s, const cJSON* root, const cJSON* model, const char* path)
{
    s->on = json_bool_or(model, "byte_fallback", false, path);
    s->unk_id = -1;
    if (!s->on) return;
    if (json_has(root, "normalizer")) sentencepiece_read_normalizer(s, json_object(root, "normalizer", path), path);
    if (json_has(root, "pre_tokenizer"))
        sentencepiece_read_metaspace(s, json_object(root, "pre_tokenizer", path), path);
    s->drops_space = sentencepiece_drops_space(json_get(root, "decoder"));
    s->fuse_unk = json_bool_or(model, "fuse_unk", false, path);
}

/* A copy with U+2581 before it, for its spaces, or both; to be freed. */
static inline char* sentencepiece_mark(const char* text, size_t length, bool puts, bool replaces, size_t* out_length)
{
    char* out = (char*)malloc_checked(3 * (length + 1) + 1);
    size_t n = puts ? (size_t)sprintf(out, SPACE_MARK) : 0;
    for (size_t i = 0; i < length; i++) {
        bool space = replaces && text[i] == ' ';
        memcpy(out + n, space ? SPACE_MARK : text + i, space ? 3 : 1);
        n += space ? 3 : 1;
    }
    out[n] = 0;
    *out_length = n;
    return out;
}

/* What the normalizer makes of a piece; null: it leaves it. */
static inline char* sentencepiece_normalize(const SentencePiece* s, const char* text, size_t length, size_t* out_length)
{
    if (length == 0 || (!s->prepends && !s->replaces)) return nullptr;
    return sentencepiece_mark(text, length, s->prepends, s->replaces, out_length);
}

/* The byte that a spelling like <0xE2> means, or -1. */
static inline int sentencepiece_byte(const char* spelling)
{
    char* end;
    if (strlen(spelling) != 6 || strncmp(spelling, "<0x", 3) != 0 || spelling[5] != '>') return -1;
    if (!isxdigit((unsigned char)spelling[3]) || !isxdigit((unsigned char)spelling[4])) return -1;
    return (int)strtol(spelling + 3, &end, 16);
}

/* What a spelling means, into bytes (room for strlen); returns the length. */
static inline size_t sentencepiece_unspell(const char* spelling, char* bytes)
{
    int byte = sentencepiece_byte(spelling);
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

/* Bytes of the character at text (length > 0); 0 if it is no UTF-8. */
static inline size_t sentencepiece_char(const char* text, size_t length)
{
    const unsigned char* s = (const unsigned char*)text;
    size_t n = s[0] < 0x80 ? 1 : s[0] < 0xC2 ? 0 : s[0] < 0xE0 ? 2 : s[0] < 0xF0 ? 3 : s[0] < 0xF5 ? 4 : 0;
    if (n > length) return 0;
    for (size_t i = 1; i < n; i++) if ((s[i] & 0xC0) != 0x80) return 0;
    bool too_long = (s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xF0 && s[1] < 0x90);
    bool no_char = (s[0] == 0xED && s[1] >= 0xA0) || (s[0] == 0xF4 && s[1] >= 0x90);
    return too_long || no_char ? 0 : n;
}
