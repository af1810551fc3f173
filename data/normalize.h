/* normalize.h: the normalizer of a tokenizer.json: what is done to a text before it is cut into words.
 *   Normalizer z; normalizer_read(&z, item, path)    of its "normalizer", an object; normalizer_free
 *   char* out = normalizer_apply(&z, text, n, &m, path)    UTF-8, to be freed; null: the text is so already
 * Steps, alone or in a Sequence:
 *   NFC NFD NFKC NFKD   Unicode's normal forms (Unicode Standard Annex 15), which Qwen's tokenizers ask for
 *   Prepend             a string, before a text that is not empty
 *   Replace             of a string by a string, from left to right; Llama-2 and Gemma have U+2581 for spaces
 * The normal forms are libunistring's, a part of every Debian and Ubuntu (apt needs it). It is looked for when a text
 * first asks for it: text without characters that the form may change does not. Its version decides which Unicode is
 * meant (1.0: 14).
 * Not handled, and refused by name: Replace of a Regex, and what lowers, strips or removes (of BERT and T5). */
#pragma once
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <dlfcn.h>
#include <initializer_list>
#include "json.h"
#include "utf8.h"

#define NORMALIZER_MAX_STEPS 8

/* Normal forms: name, libunistring's constant, the least first byte in UTF-8 of a character that is not in it or may
 * combine with the one before. */
static const struct { const char *name, *symbol; unsigned char least; } normal_forms[] = {
    {"NFC",  "uninorm_nfc",  0xCC},              // U+0300
    {"NFD",  "uninorm_nfd",  0xC3},              // U+00C0
    {"NFKC", "uninorm_nfkc", 0xC2},              // U+00A0
    {"NFKD", "uninorm_nfkd", 0xC2},
};

/* What has come to Unicode after version 9 and is not left as it is by some form. The tokenizers library does not know
 * it, so that texts are normalized between these. */
static const struct { unsigned first, last; } normal_since_9[] = {
    {0x7fd, 0x7fd}, {0x897, 0x89f}, {0x8ca, 0x8d3}, {0x9fe, 0x9fe}, {0xc3c, 0xc3c}, {0xd3b, 0xd3c}, {0xeba, 0xeba},
    {0x1715, 0x1715}, {0x1abf, 0x1ace}, {0x1acf, 0x1aeb}, {0x1df6, 0x1dfa}, {0x32ff, 0x32ff}, {0xa7f1, 0xa7f4},
    {0xa82c, 0xa82c}, {0xab69, 0xab69}, {0x105c9, 0x105c9}, {0x105e4, 0x105e4}, {0x10781, 0x107ba},
    {0x10d24, 0x10d27}, {0x10d69, 0x10d6d}, {0x10eab, 0x10eac}, {0x10efa, 0x10eff}, {0x10f46, 0x10f50},
    {0x10f82, 0x10f85}, {0x11070, 0x11070}, {0x1133b, 0x1133b}, {0x11382, 0x113d0}, {0x1145e, 0x1145e},
    {0x11839, 0x1183a}, {0x11938, 0x11943}, {0x119e0, 0x119e0}, {0x11a34, 0x11a34}, {0x11a47, 0x11a47},
    {0x11a99, 0x11a99}, {0x11d42, 0x11d45}, {0x11d97, 0x11d97}, {0x11f41, 0x11f42}, {0x16121, 0x1612f},
    {0x16d63, 0x16d6a}, {0x16ff0, 0x16ff1}, {0x1ccd6, 0x1ccf9}, {0x1e030, 0x1e08f}, {0x1e130, 0x1e136},
    {0x1e2ae, 0x1e2ae}, {0x1e2ec, 0x1e2ef}, {0x1e4ec, 0x1e4ef}, {0x1e5ee, 0x1e5ef}, {0x1e6e3, 0x1e6f5},
    {0x1f16c, 0x1f16c}, {0x1fbf0, 0x1fbf9},
};

typedef struct {
    int form;                    // of normal_forms; -1: none
    char *from, *to;             // Replace; from null: Prepend of `to`
} NormalStep;

typedef struct {
    NormalStep steps[NORMALIZER_MAX_STEPS];
    int num_steps;
} Normalizer;

typedef uint8_t* NormalizeU8(const void* form, const uint8_t* text, size_t length, uint8_t* buffer, size_t* out_length);

static inline void normalizer_read(Normalizer* z, const cJSON* item, const char* path)
{
    const char* type = json_string(item, "type", path);
    if (strcmp(type, "Sequence") == 0) {
        const cJSON* member;
        cJSON_ArrayForEach(member, json_array(item, "normalizers", path)) normalizer_read(z, member, path);
        return;
    }
    ENSURE(z->num_steps < NORMALIZER_MAX_STEPS, "%s: its normalizer has more than %d steps", path,
           NORMALIZER_MAX_STEPS);
    NormalStep* step = &z->steps[z->num_steps++];
    *step = NormalStep{-1, nullptr, nullptr};
    for (int i = 0; i < (int)(sizeof normal_forms / sizeof normal_forms[0]); i++)
        if (strcmp(type, normal_forms[i].name) == 0) step->form = i;
    if (step->form >= 0) return;
    const bool replaces = strcmp(type, "Replace") == 0;
    ENSURE(replaces || strcmp(type, "Prepend") == 0, "%s: has the normalizer \"%s\", which is not supported; have NFC, "
           "NFD, NFKC, NFKD, Prepend and Replace: use another tokenizer, or train one with data/prepare.py", path,
           type);
    const char* to = json_string(item, replaces ? "content" : "prepend", path);
    if (replaces) {
        const char* from = json_string_or(json_object(item, "pattern", path), "String", "", path);
        ENSURE(from[0] != 0 && to[0] != 0, "%s: has a normalizer \"Replace\" of a Regex or of an empty String, or by "
               "nothing; only that of a String by another is supported", path);
        step->from = strdup(from);
    }
    step->to = strdup(to);
    ENSURE(step->to != nullptr && (step->from != nullptr || !replaces), "out of host memory for a normalizer");
}

static inline void normalizer_free(Normalizer* z)
{
    for (int i = 0; i < z->num_steps; i++) {
        free(z->steps[i].from);
        free(z->steps[i].to);
    }
}

/* The form's constant, and the function that brings a text to it. */
static inline NormalizeU8* normalizer_library(int form, const void** unicode, const char* path)
{
    static void* library = nullptr;
    for (const char* name : {"libunistring.so.5", "libunistring.so.2", "libunistring.so"})
        if (library == nullptr) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    NormalizeU8* normalize = library != nullptr ? (NormalizeU8*)dlsym(library, "u8_normalize") : nullptr;
    *unicode = library != nullptr ? dlsym(library, normal_forms[form].symbol) : nullptr;
    ENSURE(normalize != nullptr && *unicode != nullptr, "%s: asks for texts in Unicode's form %s, for which "
           "libunistring must be there: apt-get install libunistring2 (or libunistring5)", path,
           normal_forms[form].name);
    return normalize;
}

static inline bool is_since_9(unsigned c)
{
    bool is = false;
    for (const auto& range : normal_since_9) is = is || (c >= range.first && c <= range.last);
    return is;
}

/* null too where the text is no UTF-8: who reads it next says so. */
static inline char* normal_form_apply(int form, const char* text, size_t length, size_t* out_length, const char* path)
{
    bool may_change = false;
    for (size_t i = 0; i < length && !may_change; i++) may_change = (unsigned char)text[i] >= normal_forms[form].least;
    if (!may_change) return nullptr;
    const void* unicode;
    NormalizeU8* normalize = normalizer_library(form, &unicode, path);
    JsonText out = {nullptr, 0, 0};
    size_t done = 0, n;
    for (size_t at = 0; done < length; at += n) {
        unsigned c = 0;
        n = at < length ? utf8_char(text + at, length - at, &c) : 0;
        if (n > 0 && !is_since_9(c)) continue;
        size_t part_length = 0;
        char* part = (char*)normalize(unicode, (const uint8_t*)text + done, at - done, nullptr, &part_length);
        ENSURE(part != nullptr || at == done, "a text of %zu bytes cannot be normalized: %s", length, strerror(errno));
        json_text_append(&out, part, part_length);
        json_text_append(&out, text + at, n);
        free(part);
        done = at + n;
        if (n == 0) break;
    }
    *out_length = out.length;
    if (done == length) return out.text;
    json_text_free(&out);
    return nullptr;
}

/* A copy with `to` before it, or for each `from`. */
static inline char* text_replace(const char* text, size_t length, const char* from, const char* to, size_t* out_length)
{
    const size_t from_length = from != nullptr ? strlen(from) : 0, to_length = strlen(to);
    size_t num = from == nullptr, n = 0, done = 0;
    for (const char *at = text, *end = text + length; from_length > 0; num++, at += from_length)
        if ((at = (const char*)memmem(at, (size_t)(end - at), from, from_length)) == nullptr) break;
    if (num == 0) return nullptr;
    char* out = (char*)malloc_checked(length + num * to_length + 1);
    for (; num > 0; num--) {
        const char* at = from != nullptr ? (const char*)memmem(text + done, length - done, from, from_length) : text;
        const size_t before = (size_t)(at - (text + done));
        memcpy(out + n, text + done, before);
        memcpy(out + n + before, to, to_length);
        n += before + to_length;
        done += before + from_length;
    }
    memcpy(out + n, text + done, length - done);
    *out_length = n + length - done;
    out[*out_length] = 0;
    return out;
}

static inline char* normalizer_apply(const Normalizer* z, const char* text, size_t length, size_t* out_length,
                                     const char* path)
{
    char* made = nullptr;
    for (int i = 0; i < z->num_steps && length > 0; i++) {
        const NormalStep* step = &z->steps[i];
        size_t n = length;
        char* next = step->form >= 0 ? normal_form_apply(step->form, text, length, &n, path)
                                     : text_replace(text, length, step->from, step->to, &n);
        if (next == nullptr) continue;
        free(made);
        text = made = next;
        length = n;
    }
    *out_length = length;
    return made;
}
