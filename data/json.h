/* json.h: JSON files, read through cJSON with messages that name the file, the place and the key; written by hand.
 *
 *   cJSON* j = json_parse_file(path);              syntax errors are refused with line and column; cJSON_Delete(j)
 *   cJSON* j = json_parse(text, length, file);     the same for text in memory that a zero byte ends
 *   json_get(j, key)                               the value of an object's key, null without it; keys keep their case
 *   json_refuse_duplicates(j, file)                an object has a key twice; json_parse_file refuses that too
 *   json_int(j, key, min, max, file)               required; json_float json_string json_bool json_object json_array
 *   json_int_or(j, key, fallback, min, max, file)  optional: missing or null gives the fallback; same for the others
 *   json_add_int(j, key, x) ..._float _string _bool _object _array
 *   json_add_int64, json_int64                     any int64: written as a string, read from one or from a number
 *   json_write_file(path, j)                       2 spaces a level, as Python's json.dumps(indent=2); see file_write
 *   json_text_edit(&t, text, edits, n)             an object's text with some members changed, the rest byte for byte
 *   JsonText t                                     a growing string: json_text_add(&t, fmt, ...) json_text_quote(&t, s)
 *
 * `file` in messages is whatever the reader of the message should check: a path, or "path: section".
 * Numbers are doubles in cJSON, so integers are exact up to 2^53 and larger ones are refused, never rounded.
 * Not handled: comments, NaN, strings with a NUL byte (cut there). */
#pragma once
#include <cctype>
#include <cerrno>
#include <cjson/cJSON.h>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include "files.h"

#define JSON_MAX_INT ((long long)1 << 53)

/* ---------------------------------------------------------------- a string that grows */

typedef struct {
    char* text;                  // NUL-terminated once something was added
    size_t length, room;
} JsonText;

static inline void json_text_reserve(JsonText* t, size_t more)
{
    if (t->length + more + 1 <= t->room) return;
    t->room = 2 * (t->length + more + 1);
    t->text = (char*)realloc(t->text, t->room);
    ENSURE(t->text != nullptr, "out of host memory: %zu bytes asked for a JSON text", t->room);
}

FORMAT(2, 3) static inline void json_text_add(JsonText* t, const char* fmt, ...)
{
    va_list args, again;
    va_start(args, fmt);
    va_copy(again, args);
    int need = vsnprintf(nullptr, 0, fmt, args);
    ENSURE(need >= 0, "a JSON text cannot be formatted: %s", strerror(errno));
    json_text_reserve(t, (size_t)need);
    vsnprintf(t->text + t->length, (size_t)need + 1, fmt, again);
    t->length += (size_t)need;
    va_end(args);
    va_end(again);
}

/* Any bytes. */
static inline void json_text_append(JsonText* t, const char* bytes, size_t n)
{
    json_text_reserve(t, n);
    if (n > 0) memcpy(t->text + t->length, bytes, n);
    t->length += n;
    t->text[t->length] = 0;
}

/* "text" with its escapes, the least that JSON asks for */
static inline void json_text_quote(JsonText* t, const char* text)
{
    json_text_add(t, "\"");
    for (const unsigned char* c = (const unsigned char*)text; *c != 0; c++) {
        const char* short_form = *c == '"' ? "\\\"" : *c == '\\' ? "\\\\" : *c == '\b' ? "\\b" : *c == '\f' ? "\\f" :
                                 *c == '\n' ? "\\n" : *c == '\r' ? "\\r" : *c == '\t' ? "\\t" : nullptr;
        if (short_form != nullptr) json_text_add(t, "%s", short_form);
        else if (*c < 0x20) json_text_add(t, "\\u%04x", *c);
        else json_text_add(t, "%c", *c);
    }
    json_text_add(t, "\"");
}

static inline void json_text_free(JsonText* t)
{
    free(t->text);
    memset(t, 0, sizeof *t);
}

/* ---------------------------------------------------------------- reading */

/* The comma before the bracket at `end`, where parsing stopped, or before the one it has just read; else
 * null. */
static inline const char* json_last_comma(const char* text, const char* end)
{
    const char* c = end > text && end[-1] == '}' ? end - 1 : end;
    if (c == text || (*c != '}' && *c != ']')) return nullptr;
    for (c--; c > text && isspace((unsigned char)*c); ) c--;
    return *c == ',' ? c : nullptr;
}

static inline cJSON* json_parse(const char* text, size_t length, const char* file)
{
    ENSURE_INTACT(memchr(text, 0, length) == nullptr, "%s: holds a zero byte at byte %zu, JSON has none; the file is "
                  "damaged", file, strlen(text));
    const char* end = nullptr;
    cJSON* root = cJSON_ParseWithOpts(text, &end, 1);
    if (root != nullptr) return root;
    if (end == nullptr) end = text;
    const char* comma = json_last_comma(text, end);
    if (comma != nullptr) end = comma;
    size_t line = 1, column = 1;
    for (const char* c = text; c < end; c++) {
        line += *c == '\n';
        column = *c == '\n' ? 1 : column + 1;
    }
    if (comma != nullptr)
        die_damaged("%s: line %zu, column %zu: a comma after the last item, JSON has none there; take it out", file,
                    line, column);
    ENSURE_INTACT(*end != 0, "%s: line %zu, column %zu: the JSON ends too early; the file was cut short", file, line,
                  column);
    die_damaged("%s: line %zu, column %zu: not valid JSON at \"%.*s\"; mend it there", file, line, column,
                (int)strcspn(end, "\n") < 24 ? (int)strcspn(end, "\n") : 24, end);
}

/* For hold(): a tree that an attempt gives back. */
static inline void json_delete_held(void* tree) { cJSON_Delete((cJSON*)tree); }

static inline int json_compare_keys(const void* a, const void* b) { return strcmp(*(char**)a, *(char**)b); }

/* Refuses an object that has a key twice, at any depth: which of the two was meant nobody can tell. */
static inline void json_refuse_duplicates(const cJSON* item, const char* file)
{
    size_t n = 0;
    for (const cJSON* child = item->child; child != nullptr; child = child->next) n++;
    const char** keys = (const char**)hold(malloc_checked(n * sizeof *keys));
    n = 0;
    for (const cJSON* child = item->child; child != nullptr; child = child->next)
        if (child->string != nullptr) keys[n++] = child->string;
    qsort(keys, n, sizeof *keys, json_compare_keys);
    for (size_t i = 1; i < n; i++)
        ENSURE_INTACT(strcmp(keys[i - 1], keys[i]) != 0, "%s: has the key \"%s\" twice in an object: take one out",
                      file, keys[i]);
    give_back(keys);
    for (const cJSON* child = item->child; child != nullptr; child = child->next) json_refuse_duplicates(child, file);
}

/* Data and tokenizers: where an object has a key twice, the last one counts, as in Python. */
static inline cJSON* json_parse_file_of_user(const char* path)
{
    size_t length;
    char* text = (char*)hold(file_read(path, &length));
    cJSON* root = json_parse(text, length, path);
    give_back(text);
    return root;
}

static inline cJSON* json_parse_file(const char* path)
{
    cJSON* root = (cJSON*)hold(json_parse_file_of_user(path), json_delete_held);
    json_refuse_duplicates(root, path);
    return (cJSON*)hand_over(root);
}

static inline const char* json_type_name(const cJSON* item)
{
    switch (item->type & 0xff) {
        case cJSON_NULL:   return "null";
        case cJSON_Number: return "a number";
        case cJSON_String: return "a string";
        case cJSON_Array:  return "a list";
        case cJSON_Object: return "an object";
        default:           return "true or false";
    }
}

/* The keys of one object that were asked for, in order; those past the last place are not kept. */
typedef struct { const cJSON* object; const char* keys[96]; int count; } JsonAsked;
inline thread_local JsonAsked* json_asked = nullptr;         // where json_get notes them; null: nowhere

static inline const cJSON* json_get(const cJSON* object, const char* key)
{
    const cJSON* last = nullptr;
    JsonAsked* a = json_asked;
    if (a != nullptr && a->object == object && a->count < (int)(sizeof a->keys / sizeof a->keys[0]))
        a->keys[a->count++] = key;
    for (const cJSON* item = object != nullptr ? object->child : nullptr; item != nullptr; item = item->next)
        if (item->string != nullptr && strcmp(item->string, key) == 0) last = item;
    return last;
}

static inline bool json_has(const cJSON* object, const char* key)
{
    const cJSON* item = json_get(object, key);
    return item != nullptr && !cJSON_IsNull(item);
}

static inline const cJSON* json_require(const cJSON* object, const char* key, const char* file)
{
    ENSURE(cJSON_IsObject(object), "%s: must be a JSON object with the key \"%s\", is %s", file, key,
           object != nullptr ? json_type_name(object) : "nothing");
    const cJSON* item = json_get(object, key);
    ENSURE(item != nullptr, "%s: has no key \"%s\"", file, key);
    return item;
}

static inline const cJSON* json_object(const cJSON* object, const char* key, const char* file)
{
    const cJSON* item = json_require(object, key, file);
    ENSURE(cJSON_IsObject(item), "%s: \"%s\" must be an object, is %s", file, key, json_type_name(item));
    return item;
}

static inline const cJSON* json_array(const cJSON* object, const char* key, const char* file)
{
    const cJSON* item = json_require(object, key, file);
    ENSURE(cJSON_IsArray(item), "%s: \"%s\" must be a list, is %s", file, key, json_type_name(item));
    return item;
}

static inline const char* json_string(const cJSON* object, const char* key, const char* file)
{
    const cJSON* item = json_require(object, key, file);
    ENSURE(cJSON_IsString(item), "%s: \"%s\" must be a string, is %s", file, key, json_type_name(item));
    return item->valuestring;
}

static inline bool json_bool(const cJSON* object, const char* key, const char* file)
{
    const cJSON* item = json_require(object, key, file);
    ENSURE(cJSON_IsBool(item), "%s: \"%s\" must be true or false, is %s", file, key, json_type_name(item));
    return cJSON_IsTrue(item);
}

static inline double json_float(const cJSON* object, const char* key, double min, double max, const char* file)
{
    const cJSON* item = json_require(object, key, file);
    ENSURE(cJSON_IsNumber(item), "%s: \"%s\" must be a number, is %s", file, key, json_type_name(item));
    double x = item->valuedouble;
    ENSURE(x >= min && x <= max && std::isfinite(x), "%s: \"%s\" is %g, must be %g to %g", file, key, x, min, max);
    return x;
}

static inline long long json_item_int(const cJSON* item, const char* key, long long min, long long max,
                                      const char* file)
{
    ENSURE(cJSON_IsNumber(item), "%s: \"%s\" must be a whole number, is %s", file, key, json_type_name(item));
    double x = item->valuedouble;
    ENSURE(std::fabs(x) <= (double)JSON_MAX_INT && x == std::floor(x), "%s: \"%s\" is %.17g, must be a whole number of "
           "at most 2^53", file, key, x);
    ENSURE((long long)x >= min && (long long)x <= max, "%s: \"%s\" is %lld, must be %lld to %lld", file, key,
           (long long)x, min, max);
    return (long long)x;
}

static inline long long json_int(const cJSON* object, const char* key, long long min, long long max, const char* file)
{
    return json_item_int(json_require(object, key, file), key, min, max, file);
}

static inline long long json_int_or(const cJSON* object, const char* key, long long fallback, long long min,
                                    long long max, const char* file)
{
    return json_has(object, key) ? json_int(object, key, min, max, file) : fallback;
}

static inline double json_float_or(const cJSON* object, const char* key, double fallback, double min, double max,
                                   const char* file)
{
    return json_has(object, key) ? json_float(object, key, min, max, file) : fallback;
}

static inline const char* json_string_or(const cJSON* object, const char* key, const char* fallback, const char* file)
{
    return json_has(object, key) ? json_string(object, key, file) : fallback;
}

static inline bool json_bool_or(const cJSON* object, const char* key, bool fallback, const char* file)
{
    return json_has(object, key) ? json_bool(object, key, file) : fallback;
}

/* As json_add_int64 wrote it, or a number. Not negative. */
static inline long long json_int64(const cJSON* object, const char* key, const char* file)
{
    const cJSON* item = json_require(object, key, file);
    if (!cJSON_IsString(item)) return json_item_int(item, key, 0, JSON_MAX_INT, file);
    char* end;
    errno = 0;
    long long x = strtoll(item->valuestring, &end, 10);
    ENSURE(isdigit((unsigned char)item->valuestring[0]) && *end == 0 && errno == 0,
           "%s: \"%s\" is \"%s\", must be a whole number up to %lld", file, key, item->valuestring, LLONG_MAX);
    return x;
}

/* ---------------------------------------------------------------- writing */

static inline cJSON* json_new_object()
{
    cJSON* object = cJSON_CreateObject();
    ENSURE(object != nullptr, "out of host memory for a JSON object");
    return object;
}

static inline cJSON* json_added(cJSON* item, const char* key)
{
    ENSURE(item != nullptr, "out of host memory for the JSON key \"%s\"", key);
    return item;
}

static inline void json_add_int(cJSON* object, const char* key, long long x)
{
    ENSURE(x >= -JSON_MAX_INT && x <= JSON_MAX_INT, "\"%s\" is %lld, JSON holds whole numbers up to 2^53 only", key, x);
    json_added(cJSON_AddNumberToObject(object, key, (double)x), key);
}

static inline void json_add_int64(cJSON* object, const char* key, long long x)
{
    char text[32];
    snprintf(text, sizeof text, "%lld", x);
    json_added(cJSON_AddStringToObject(object, key, text), key);
}

static inline void json_add_float(cJSON* object, const char* key, double x)     // NaN and Inf become null
{
    json_added(cJSON_AddNumberToObject(object, key, x), key);
}

static inline void json_add_string(cJSON* object, const char* key, const char* x)
{
    json_added(cJSON_AddStringToObject(object, key, x), key);
}

static inline void json_add_bool(cJSON* object, const char* key, bool x)
{
    json_added(cJSON_AddBoolToObject(object, key, x), key);
}

static inline cJSON* json_add_object(cJSON* object, const char* key)
{
    return json_added(cJSON_AddObjectToObject(object, key), key);
}

static inline cJSON* json_add_array(cJSON* object, const char* key)
{
    return json_added(cJSON_AddArrayToObject(object, key), key);
}

static inline void json_text_number(JsonText* t, double x)
{
    if (!std::isfinite(x)) { json_text_add(t, "null"); return; }
    if (x == std::floor(x) && std::fabs(x) <= (double)JSON_MAX_INT) { json_text_add(t, "%.0f", x); return; }
    char shortest[32];                               // the fewest digits that read back as the same double
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(shortest, sizeof shortest, "%.*g", digits, x);
        if (strtod(shortest, nullptr) == x) break;
    }
    json_text_add(t, "%s", shortest);
}

static inline void json_text_item(JsonText* t, const cJSON* item, int depth)
{
    bool is_object = cJSON_IsObject(item);
    if (cJSON_IsNumber(item)) { json_text_number(t, item->valuedouble); return; }
    if (cJSON_IsString(item)) { json_text_quote(t, item->valuestring); return; }
    if (!is_object && !cJSON_IsArray(item)) {
        json_text_add(t, "%s", cJSON_IsNull(item) ? "null" : cJSON_IsTrue(item) ? "true" : "false");
        return;
    }
    json_text_add(t, is_object ? "{" : "[");
    for (const cJSON* child = item->child; child != nullptr; child = child->next) {
        json_text_add(t, "%s\n%*s", child == item->child ? "" : ",", 2 * depth + 2, "");
        if (is_object) {
            json_text_quote(t, child->string);
            json_text_add(t, ": ");
        }
        json_text_item(t, child, depth + 1);
    }
    if (item->child != nullptr) json_text_add(t, "\n%*s", 2 * depth, "");
    json_text_add(t, is_object ? "}" : "]");
}

/* What a member of an object becomes: `value` is JSON, null takes it out. `adds`: one that is missing is added. */
typedef struct { const char *key, *value; bool adds; } JsonEdit;

/* The first of the characters `ends` outside of strings and of brackets opened on the way. */
static inline const char* json_skip_to(const char* c, const char* ends)
{
    for (int depth = 0; *c != 0 && (depth > 0 || strchr(ends, *c) == nullptr); c++) {
        depth += (*c == '{' || *c == '[') - (*c == '}' || *c == ']');
        if (*c == '"') for (c++; *c != '"'; c++) c += *c == '\\';
    }
    return c;
}

/* Adds an object's text, which json_parse has taken, with the members of its top level changed. cJSON would write it
 * anew: without the spelling of numbers, where 1.0 is no integer and 2^60 exact. */
static inline void json_text_edit(JsonText* t, const char* text, const JsonEdit* edits, int num_edits)
{
    const char *first = strchr(text, '{') + 1, *end = first, *separator = "";
    const int blanks = (int)strspn(first, " \t\r\n");                // before a member
    uint64_t seen = 0;
    json_text_add(t, "%.*s", (int)(first - text), text);
    for (const char* from = first; first[blanks] != '}' && *end != '}'; from = end + 1) {
        const char *key = strchr(from, '"') + 1, *value = json_skip_to(from, ":") + 1;
        value += strspn(value, " \t\r\n");
        end = json_skip_to(value, ",}");
        int i = 0;
        for (size_t n; i < num_edits; i++)
            if (strncmp(key, edits[i].key, n = strlen(edits[i].key)) == 0 && key[n] == '"') break;
        seen |= (uint64_t)1 << i;
        if (i < num_edits && edits[i].value == nullptr) continue;
        int length = (int)(end - value);
        while (isspace((unsigned char)value[length - 1])) length--;
        if (separator[0]) json_text_add(t, ",%.*s", (int)(value - from), from);
        else json_text_add(t, "%.*s%.*s", blanks, first, (int)(value - key + 1), key - 1);
        if (i < num_edits) json_text_add(t, "%s", edits[i].value);
        else json_text_add(t, "%.*s", length, value);
        separator = ",";
    }
    for (int i = 0; i < num_edits; i++) {
        if (!edits[i].adds || (seen >> i & 1) != 0) continue;
        json_text_add(t, "%s%.*s\"%s\": %s", separator, blanks, first, edits[i].key, edits[i].value);
        separator = ",";
    }
    while (isspace((unsigned char)end[-1])) end--;
    json_text_add(t, "%s", end);
}

static inline void json_write_file(const char* path, const cJSON* root)
{
    JsonText t = {nullptr, 0, 0};
    json_text_item(&t, root, 0);
    json_text_add(&t, "\n");
    hold(t.text);
    file_write(path, t.text, t.length);
    give_back(t.text);
}
