/* pretokenize.h: the pre_tokenizer of a tokenizer.json: how a text is cut into the words that the model sees.
 *   PreTokenizer p; pre_tokenizer_read(&p, item, path)      of its "pre_tokenizer", an object; pre_tokenizer_free
 *   pre_tokenize(&p, 0, piece, word, context)               calls word(context, text, length) for each, in order
 *   byte_spell(&p.spelling, byte, out)                      the character that spells a byte; bytes_of_spelling
 * Steps, alone or in a Sequence, each of the pieces that the one before has left:
 *   Split         at a String or a Regex, in each behavior, inverted or not
 *   Digits        at digits, one by one or together      Punctuation   at punctuation, in each behavior
 *   ByteLevel     at GPT-2's pattern, or nowhere; then each byte is written as a printable character: itself, or
 *                 U+0100 + n for the n-th byte that has no glyph of its own (so "Ġ" is the space). "add_prefix_space"
 *                 puts a space before a piece without one. Steps after it see what it has written
 *   Metaspace     every space becomes U+2581, and one is put before the text ("first"), before each piece ("always") or
 *                 nowhere ("never"), unless it begins with one; "split" cuts before each
 * Patterns are PCRE2's for those of Oniguruma. What means another thing there is refused by name.
 * Not handled, and refused by name: Whitespace, BertPreTokenizer, UnicodeScripts and others. */
#pragma once
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include "json.h"

#define PRE_TOKENIZER_MAX_STEPS 12
#define BYTE_CHARS (256 + 68)                    // 68 bytes have no glyph of their own
#define SPACE_MARK "\xE2\x96\x81"                // U+2581

typedef struct {
    int chars[256];              // code point that spells a byte, below BYTE_CHARS
    int bytes[BYTE_CHARS];       // and back, -1: spells none
} ByteSpelling;

/* What becomes of a match, between its neighbours: "xx-yy-zz" at "-". */
enum class Behavior { REMOVED, ISOLATED, WITH_PREVIOUS, WITH_NEXT, CONTIGUOUS };
static const char* const behavior_names[] = {"Removed", "Isolated", "MergedWithPrevious", "MergedWithNext",
                                             "Contiguous"};

enum class SpaceBefore { NEVER, FIRST, ALWAYS };

typedef struct {
    bool marks;                  // first every space becomes U+2581
    SpaceBefore space_before;    // then `space` goes before a piece without it
    const char* space;
    pcre2_code* code;            // then it is cut; null: nowhere
    Behavior behavior;
    bool invert;                 // what is between matches is one
    bool spells;                 // then bytes are spelled
} SplitStep;

typedef struct {
    SplitStep steps[PRE_TOKENIZER_MAX_STEPS];
    int num_steps;
    bool spells;                 // some step does
    ByteSpelling spelling;
    pcre2_match_data* match;
} PreTokenizer;

typedef struct { const char* text; size_t length; bool first; } Piece;    // first: the text begins with it

typedef void WordTaker(void* context, const char* text, size_t length);

// ---------------------------------------------------------------------------------------- bytes and their spelling
static inline void byte_spelling_init(ByteSpelling* s)
{
    memset(s->bytes, -1, sizeof s->bytes);
    for (int b = 0, num_hidden = 0; b < 256; b++) {
        bool has_glyph = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
        s->chars[b] = has_glyph ? b : 256 + num_hidden++;
        s->bytes[s->chars[b]] = b;
    }
}

static inline size_t byte_spell(const ByteSpelling* s, unsigned char byte, char out[2])
{
    int c = s->chars[byte];
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    out[0] = (char)(0xC0 | c >> 6);
    out[1] = (char)(0x80 | (c & 0x3F));
    return 2;
}

/* What a spelling means, into bytes (room for its length); returns the length. One with a character that spells no
 * byte, as in an added token, means itself. */
static inline size_t bytes_of_spelling(const ByteSpelling* spelling, const char* text, char* bytes)
{
    const size_t length = strlen(text);
    const unsigned char* s = (const unsigned char*)text;
    size_t n = 0;
    for (size_t i = 0; i < length;) {
        bool one = s[i] < 0x80, two = (s[i] & 0xE0) == 0xC0;
        int c = one ? s[i] : two ? (s[i] & 0x1F) << 6 | (s[i + 1] & 0x3F) : BYTE_CHARS;
        int byte = c < BYTE_CHARS ? spelling->bytes[c] : -1;
        if (byte < 0) {
            memcpy(bytes, text, length);
            return length;
        }
        bytes[n++] = (char)byte;
        i += one ? 1 : 2;
    }
    return n;
}

// -------------------------------------------------------------------------------------------------------- patterns
/* The white space of Unicode, written out: \s of PCRE2 counts U+180E too, the tokenizers library does not. */
#define UNICODE_SPACES "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}" \
                       "\\x{205f}\\x{3000}"
#define GPT2_PATTERN "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
#define DIGITS_PATTERN "\\p{N}"
/* Punctuation of ASCII, its symbols among it, and of Unicode 8, which the tokenizers library knows: without what came
 * later, with two characters that are none any more. */
#define PUNCTUATION_SINCE \
    "\\x{61d}\\x{9fd}\\x{a76}\\x{c77}\\x{c84}\\x{1b4e}-\\x{1b4f}\\x{1b7d}-\\x{1b7f}\\x{2e43}-\\x{2e4f}" \
    "\\x{2e52}-\\x{2e5d}\\x{10ead}\\x{10f55}-\\x{10f59}\\x{10f86}-\\x{10f89}\\x{1144b}-\\x{1144f}" \
    "\\x{1145a}-\\x{1145d}\\x{11660}-\\x{1166c}\\x{116b9}\\x{1183b}\\x{11944}-\\x{11946}\\x{119e2}" \
    "\\x{11a3f}-\\x{11a46}\\x{11a9a}-\\x{11aa2}\\x{11b00}-\\x{11b09}\\x{11c41}-\\x{11c45}\\x{11c70}-\\x{11c71}" \
    "\\x{11ef7}-\\x{11ef8}\\x{11f43}-\\x{11f4f}\\x{11fff}\\x{12ff1}-\\x{12ff2}\\x{16e97}-\\x{16e9a}\\x{16fe2}" \
    "\\x{1e95e}-\\x{1e95f}"
#define PUNCTUATION_PATTERN \
    "[!-/:-@\\[-`{-~\\x{166d}\\x{111c9}]|(?![" PUNCTUATION_SINCE "])\\p{P}"

static inline pcre2_code* pattern_compile(const char* text, size_t length, uint32_t options, const char* path)
{
    int error;
    PCRE2_SIZE at;
    pcre2_code* code = pcre2_compile((PCRE2_SPTR)text, length, PCRE2_UTF | options, &error, &at, nullptr);
    if (code == nullptr) {
        char words[256];
        pcre2_get_error_message(error, (PCRE2_UCHAR*)words, sizeof words);
        die("%s: the pattern of its pre_tokenizer cannot be used: %s at \"%.40s\"", path, words,
            at <= length ? text + at : "");
    }
    pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);     // without it the same matches are found, slower
    return code;
}

/* What Oniguruma takes for another thing than PCRE2, at c: returns its length, 0 if there is none. */
static inline size_t pattern_differs(const char* c, bool in_class)
{
    if (*c == '\\') return c[1] != 0 && isalpha((unsigned char)c[1]) && strchr("pPsSdDrntfxAz", c[1]) == nullptr ? 2
                           : c[1] == 'S' && in_class ? 2 : 0;
    if (in_class) return (*c == '[' && c[1] != ':') || (*c == '&' && c[1] == '&');
    return *c == '^' || *c == '$';
}

static inline pcre2_code* regex_compile(const char* pattern, const char* path)
{
    JsonText t = {nullptr, 0, 0};
    bool in_class = false;
    for (const char* c = pattern; *c != 0; c++) {
        const bool negates = *c == '^' && c > pattern && c[-1] == '[';
        const size_t differs = negates ? 0 : pattern_differs(c, in_class);
        ENSURE(differs == 0, "%s: the pattern of its pre_tokenizer has \"%.*s\", which is not supported%s: \"%.80s\"",
               path, (int)differs, c, in_class ? " inside of [...]" : "", pattern);
        if (*c == '\\' && c[1] == 's') json_text_add(&t, in_class ? "%s" : "[%s]", UNICODE_SPACES);
        else if (*c == '\\' && c[1] == 'S') json_text_add(&t, "[^%s]", UNICODE_SPACES);
        else if (*c == '\\' && c[1] != 0) json_text_add(&t, "\\%c", c[1]);
        else json_text_add(&t, "%c", *c);
        in_class = *c == '[' || (in_class && *c != ']');
        if (*c == '\\' && c[1] != 0) c++;
    }
    pcre2_code* code = pattern_compile(t.text != nullptr ? t.text : "", t.length, PCRE2_UCP, path);
    json_text_free(&t);
    return code;
}

/* Finds the next match at or after `from`; false if there is none. The text is checked to be UTF-8 when from is 0. */
static inline bool pattern_next(pcre2_match_data* match, const pcre2_code* code, const char* text, size_t length,
                                size_t from, size_t* begin, size_t* end)
{
    uint32_t options = PCRE2_NOTEMPTY | (from > 0 ? PCRE2_NO_UTF_CHECK : 0);
    int result = pcre2_match(code, (PCRE2_SPTR)text, length, from, options, match, nullptr);
    if (result == PCRE2_ERROR_JIT_STACKLIMIT) {
        result = pcre2_match(code, (PCRE2_SPTR)text, length, from, options | PCRE2_NO_JIT, match, nullptr);
    }
    if (result == PCRE2_ERROR_NOMATCH) return false;
    if (result < 0) {
        char words[256];
        pcre2_get_error_message(result, (PCRE2_UCHAR*)words, sizeof words);
        bool is_utf = result <= PCRE2_ERROR_UTF8_ERR1 && result >= PCRE2_ERROR_UTF8_ERR21;
        size_t at = is_utf ? pcre2_get_startchar(match) : from;
        die("the text cannot be tokenized: %s at byte %zu of \"%.*s\"%s", words, at, (int)(length < 40 ? length : 40),
            text, is_utf ? "; give it as UTF-8" : "");
    }
    *begin = pcre2_get_ovector_pointer(match)[0];
    *end = pcre2_get_ovector_pointer(match)[1];
    return true;
}

// ------------------------------------------------------------------------------------------------ reading the file
static inline Behavior behavior_of(const char* name, const char* path)
{
    for (int i = 0; i < (int)(sizeof behavior_names / sizeof behavior_names[0]); i++)
        if (strcmp(name, behavior_names[i]) == 0) return (Behavior)i;
    die("%s: the behavior \"%s\" of a pre_tokenizer is not known", path, name);
}

static inline void split_read(SplitStep* step, const cJSON* item, const char* path)
{
    const cJSON* pattern = json_object(item, "pattern", path);
    const char* string = json_string_or(pattern, "String", "", path);
    step->behavior = behavior_of(json_string(item, "behavior", path), path);
    step->invert = json_bool_or(item, "invert", false, path);
    step->code = string[0] != 0 ? pattern_compile(string, strlen(string), PCRE2_LITERAL, path)
                                : regex_compile(json_string(pattern, "Regex", path), path);
}

static inline void metaspace_read(SplitStep* step, const cJSON* item, const char* path)
{
    const char* mark = json_string(item, "replacement", path);
    const char* scheme = json_string_or(item, "prepend_scheme", "always", path);
    const bool first = strcmp(scheme, "first") == 0, never = strcmp(scheme, "never") == 0;
    ENSURE(strcmp(mark, SPACE_MARK) == 0, "%s: the pre_tokenizer Metaspace has \"%s\" for spaces, only U+2581 is "
           "supported", path, mark);
    ENSURE(first || never || strcmp(scheme, "always") == 0, "%s: the prepend_scheme \"%s\" is not known", path, scheme);
    step->marks = true;
    step->space_before = first ? SpaceBefore::FIRST : never ? SpaceBefore::NEVER : SpaceBefore::ALWAYS;
    step->space = SPACE_MARK;
    step->behavior = Behavior::WITH_NEXT;
    if (json_bool_or(item, "split", true, path))
        step->code = pattern_compile(SPACE_MARK, strlen(SPACE_MARK), PCRE2_LITERAL, path);
}

static inline void byte_level_read(SplitStep* step, const cJSON* item, const char* path)
{
    step->space_before = json_bool_or(item, "add_prefix_space", true, path) ? SpaceBefore::ALWAYS : SpaceBefore::NEVER;
    step->space = " ";
    step->behavior = Behavior::ISOLATED;
    if (json_bool_or(item, "use_regex", true, path)) step->code = regex_compile(GPT2_PATTERN, path);
    step->spells = true;
}

static inline void pre_tokenizer_read(PreTokenizer* p, const cJSON* item, const char* path)
{
    const char* type = json_string(item, "type", path);
    if (strcmp(type, "Sequence") == 0) {
        const cJSON* member;
        cJSON_ArrayForEach(member, json_array(item, "pretokenizers", path)) pre_tokenizer_read(p, member, path);
        return;
    }
    ENSURE(p->num_steps < PRE_TOKENIZER_MAX_STEPS, "%s: its pre_tokenizer has more than %d steps", path,
           PRE_TOKENIZER_MAX_STEPS);
    SplitStep* step = &p->steps[p->num_steps++];
    *step = SplitStep{};
    if (strcmp(type, "ByteLevel") == 0) {
        ENSURE(!p->spells, "%s: has the pre_tokenizer ByteLevel twice", path);
        byte_level_read(step, item, path);
        p->spells = true;
    } else if (strcmp(type, "Metaspace") == 0) {
        metaspace_read(step, item, path);
        ENSURE(p->num_steps == 1 || step->space_before != SpaceBefore::FIRST, "%s: the pre_tokenizer Metaspace with "
               "\"first\" is supported only as the first of a Sequence", path);
    } else if (strcmp(type, "Split") == 0) {
        split_read(step, item, path);
    } else if (strcmp(type, "Digits") == 0) {
        const bool one_by_one = json_bool_or(item, "individual_digits", false, path);
        step->behavior = one_by_one ? Behavior::ISOLATED : Behavior::CONTIGUOUS;
        step->code = regex_compile(DIGITS_PATTERN, path);
    } else if (strcmp(type, "Punctuation") == 0) {
        step->behavior = behavior_of(json_string_or(item, "behavior", "Isolated", path), path);
        step->code = regex_compile(PUNCTUATION_PATTERN, path);
    } else {
        die("%s: the pre_tokenizer \"%s\" is not supported; have ByteLevel, Digits, Metaspace, Punctuation and Split: "
            "use another tokenizer, or train one with data/prepare.py", path, type);
    }
}

static inline void pre_tokenizer_free(PreTokenizer* p)
{
    for (int i = 0; i < p->num_steps; i++) pcre2_code_free(p->steps[i].code);
    pcre2_match_data_free(p->match);
}

// --------------------------------------------------------------------------------------------------------- cutting
/* A copy with what the step puts before it, with U+2581 for spaces, or both; null if it does neither. */
static inline char* piece_marked(const SplitStep* step, const Piece* piece, size_t* out_length)
{
    const char* text = piece->text;
    const size_t space = step->space != nullptr ? strlen(step->space) : 0;
    const bool begins_with_it = (step->marks && text[0] == ' ') || space == 0 ||
                                (piece->length >= space && memcmp(text, step->space, space) == 0);
    const bool may_put = step->space_before == SpaceBefore::ALWAYS ||
                         (step->space_before == SpaceBefore::FIRST && piece->first);
    const bool puts = may_put && !begins_with_it;
    if (!puts && !step->marks) return nullptr;
    char* out = (char*)malloc_checked(3 * (piece->length + 1) + 1);
    size_t n = puts ? space : 0;
    if (puts) memcpy(out, step->space, space);
    for (size_t i = 0; i < piece->length; i++) {
        const bool marked = step->marks && text[i] == ' ';
        memcpy(out + n, marked ? SPACE_MARK : text + i, marked ? 3 : 1);
        n += marked ? 3 : 1;
    }
    *out_length = n;
    return out;
}

static inline void pre_tokenize(const PreTokenizer* p, int step_idx, Piece piece, WordTaker* word, void* context);

/* text[begin..end) goes to the next step, its bytes spelled if the step does so. */
static inline void piece_pass(const PreTokenizer* p, int step_idx, const Piece* whole, size_t begin, size_t end,
                              WordTaker* word, void* context)
{
    Piece piece = {whole->text + begin, end - begin, whole->first && begin == 0};
    char small[256], *spelled = nullptr;
    if (p->steps[step_idx].spells) {
        spelled = 2 * piece.length <= sizeof small ? small : (char*)malloc_checked(2 * piece.length);
        size_t n = 0;
        for (size_t i = 0; i < piece.length; i++)
            n += byte_spell(&p->spelling, (unsigned char)piece.text[i], spelled + n);
        piece.text = spelled;
        piece.length = n;
    }
    pre_tokenize(p, step_idx + 1, piece, word, context);
    if (spelled != small) free(spelled);
}

/* Does a match, or what is between two, join what is before it? */
static inline bool behavior_joins(Behavior behavior, bool before_matches, bool matches)
{
    switch (behavior) {
    case Behavior::WITH_PREVIOUS: return matches && !before_matches;
    case Behavior::WITH_NEXT: return before_matches && !matches;
    case Behavior::CONTIGUOUS: return matches == before_matches;
    case Behavior::REMOVED: case Behavior::ISOLATED: break;
    }
    return false;
}

/* Cuts one piece by steps from step_idx on. */
static inline void pre_tokenize(const PreTokenizer* p, int step_idx, Piece piece, WordTaker* word, void* context)
{
    if (piece.length == 0) return;
    if (step_idx >= p->num_steps || step_idx >= PRE_TOKENIZER_MAX_STEPS) {
        word(context, piece.text, piece.length);
        return;
    }
    const SplitStep* step = &p->steps[step_idx];
    char* marked = piece_marked(step, &piece, &piece.length);
    if (marked != nullptr) piece.text = marked;
    size_t open = 0, done = 0, begin = 0, end = 0;   // [open, done) is not passed on yet
    bool before_matches = false;
    while (done < piece.length) {
        if (end <= done && (step->code == nullptr ||
                            !pattern_next(p->match, step->code, piece.text, piece.length, done, &begin, &end)))
            begin = end = piece.length;
        const bool matches = (begin == done) != step->invert;
        const size_t next = begin == done ? end : begin;
        if (!behavior_joins(step->behavior, before_matches, matches)) {
            if (open < done) piece_pass(p, step_idx, &piece, open, done, word, context);
            open = step->behavior == Behavior::REMOVED && matches ? next : done;
        }
        before_matches = matches;
        done = next;
    }
    if (open < done) piece_pass(p, step_idx, &piece, open, done, word, context);
    free(marked);
}
