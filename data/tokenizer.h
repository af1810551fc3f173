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
 * Five steps, each what the file says of it:
 *   added     the text is cut at added tokens that are not "normalized", the longest first; with "lstrip" and "rstrip"
 *             they take the white space beside them, with "single_word" they are found between words alone
 *   normalize the pieces are normalized (normalize.h); then they are cut at the added tokens that are "normalized", in
 *             that form themselves
 *   split     the pieces are cut into words, whose bytes may be spelled (pretokenize.h)
 *   merges    words become tokens (bpe.h)
 *   decode    spelled bytes are bytes; else U+2581 is a space, <0xE2> a byte, and one leading space is dropped where
 *             "decoder" says so
 * Ids equal those of the `tokenizers` library, but for characters that Unicode has got since version 14, which PCRE2
 * 10.42 does not know (9392 letters and digits: they are split like punctuation). docs/models.md names published
 * tokenizers. */
#pragma once
#include "bpe.h"
#include "json.h"
#include "normalize.h"
#include "pretokenize.h"
#include "tokenizer_files.h"

typedef struct {
    int id;
    bool normalized, single_word, lstrip, rstrip;
    char* pattern;               // what is looked for: the spelling, normalized where that is asked for
    size_t length;
} AddedToken;

typedef struct {
    char* path;
    int vocab_size;
    Token* tokens;
    Bpe bpe;
    AddedToken* added;
    size_t num_added;
    bool added_starts[256];      // bytes that some added token begins with
    pcre2_code *word_before, *word_after;        // of added tokens that are single words
    Normalizer normalizer;
    PreTokenizer pre;
    bool drops_space;            // the first, in decoding
    int prefix[8], num_prefix;   // ids that the post_processor puts before a text, such as the beginning of a text
} Tokenizer;

// ------------------------------------------------------------------------------------------------ reading the file
/* What a token means; `pattern` is its spelling, of an added token in the form that is looked for. */
static inline void tokenizer_unspell(const Tokenizer* k, Token* token, const char* pattern)
{
    const size_t length = strlen(pattern);
    free(token->bytes);
    token->bytes = (char*)malloc_checked(length + 1);
    token->length = k->pre.spells ? bytes_of_spelling(&k->pre.spelling, pattern, token->bytes)
                                  : bytes_of_characters(pattern, token->bytes);
    token->bytes[token->length] = 0;
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

static inline void tokenizer_read_tokens(Tokenizer* k, const cJSON* vocab, const cJSON* added)
{
    int largest = -1;
    for (const cJSON* item = vocab->child; item != nullptr; item = item->next) {
        int id = (int)json_item_int(item, item->string, 0, TOKENIZER_MAX_VOCAB, k->path);
        if (id > largest) largest = id;
    }
    ENSURE(largest >= 0, "%s: its vocabulary is empty", k->path);
    for (const cJSON* item = added; item != nullptr; item = item->next) {
        int id = (int)json_int(item, "id", 0, TOKENIZER_MAX_VOCAB, k->path);
        if (id > largest) largest = id;
    }
    k->vocab_size = largest + 1;
    k->tokens = (Token*)malloc_checked((size_t)k->vocab_size * sizeof(Token));
    memset(k->tokens, 0, (size_t)k->vocab_size * sizeof(Token));
    for (const cJSON* item = vocab->child; item != nullptr; item = item->next)
        tokenizer_set_token(k, (int)item->valuedouble, item->string);
}

static inline int tokenizer_added_compare(const void* a, const void* b)
{
    const AddedToken* x = (const AddedToken*)a;
    const AddedToken* y = (const AddedToken*)b;
    return x->length != y->length ? (x->length > y->length ? -1 : 1) : x->id - y->id;
}

/* A letter, mark, digit or joiner of the tokenizers library's \w, where a token may not begin or end. */
#define WORD_CHARACTER "[\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\x{200c}\\x{200d}]"

static inline void tokenizer_read_added(Tokenizer* k, const cJSON* added)
{
    size_t num = 0;
    for (const cJSON* item = added; item != nullptr; item = item->next) num++;
    k->added = (AddedToken*)malloc_checked(num * sizeof(AddedToken));
    for (const cJSON* item = added; item != nullptr; item = item->next) {
        const char* content = json_string(item, "content", k->path);
        if (content[0] == 0) continue;
        AddedToken* token = &k->added[k->num_added++];
        token->id = (int)json_int(item, "id", 0, TOKENIZER_MAX_VOCAB, k->path);
        token->normalized = json_bool_or(item, "normalized", !json_bool_or(item, "special", false, k->path), k->path);
        token->lstrip = json_bool_or(item, "lstrip", false, k->path);
        token->rstrip = json_bool_or(item, "rstrip", false, k->path);
        token->single_word = json_bool_or(item, "single_word", false, k->path);
        if (token->single_word && k->word_before == nullptr) {
            k->word_before = regex_compile(WORD_CHARACTER "\\z", k->path);
            k->word_after = regex_compile("\\A" WORD_CHARACTER, k->path);
        }
        token->length = strlen(content);
        token->pattern = !token->normalized ? nullptr
                         : normalizer_apply(&k->normalizer, content, token->length, &token->length, k->path);
        if (token->pattern == nullptr) token->pattern = strdup(content);
        ENSURE(token->pattern != nullptr, "out of host memory for an added token");
        tokenizer_set_token(k, token->id, content);
        tokenizer_unspell(k, &k->tokens[token->id], token->pattern);   // as the library has it
        k->added_starts[(unsigned char)token->pattern[0]] = true;
    }
    qsort(k->added, k->num_added, sizeof *k->added, tokenizer_added_compare);
}

static inline int tokenizer_find(const Tokenizer* k, const char* spelling);

static inline void tokenizer_add_prefix(Tokenizer* k, const char* spelling)
{
    ENSURE(k->num_prefix < (int)(sizeof k->prefix / sizeof k->prefix[0]), "%s: its post_processor puts more than %d "
           "tokens before a text", k->path, k->num_prefix);
    k->prefix[k->num_prefix] = tokenizer_find(k, spelling);
    ENSURE(k->prefix[k->num_prefix++] >= 0, "%s: its post_processor puts \"%s\", which is no token", k->path, spelling);
}

/* The post_processor, alone or in a Sequence: of TemplateProcessing the special tokens before "Sequence", of RoBERTa's
 * and BERT's "cls". ByteLevel is about offsets. */
static inline void tokenizer_read_prefix(Tokenizer* k, const cJSON* processor)
{
    const char* type = json_string(processor, "type", k->path);
    const cJSON* member;
    if (strcmp(type, "ByteLevel") == 0) return;
    if (strcmp(type, "RobertaProcessing") == 0 || strcmp(type, "BertProcessing") == 0) {
        member = json_array(processor, "cls", k->path)->child;
        ENSURE(cJSON_IsString(member), "%s: \"cls\" of its post_processor is no token", k->path);
        tokenizer_add_prefix(k, member->valuestring);
        return;
    }
    if (strcmp(type, "Sequence") == 0) {
        cJSON_ArrayForEach(member, json_array(processor, "processors", k->path)) tokenizer_read_prefix(k, member);
        return;
    }
    ENSURE(strcmp(type, "TemplateProcessing") == 0, "%s: the post_processor \"%s\" is not supported", k->path, type);
    cJSON_ArrayForEach(member, json_array(processor, "single", k->path)) {
        const cJSON* special = json_get(member, "SpecialToken");
        if (special == nullptr) return;
        tokenizer_add_prefix(k, json_string(special, "id", k->path));
    }
}

static inline bool json_is(const cJSON* object, const char* key, const char* value)
{
    const cJSON* item = json_get(object, key);
    return cJSON_IsString(item) && strcmp(item->valuestring, value) == 0;
}

/* A Strip of one space at the start, alone or in a Sequence; Metaspace's own decoder drops it unless nothing is put. */
static inline bool decoder_drops_space(const cJSON* decoder)
{
    if (!cJSON_IsObject(decoder)) return false;
    if (json_is(decoder, "type", "Metaspace")) return !json_is(decoder, "prepend_scheme", "never");
    if (json_is(decoder, "type", "Strip")) {
        const cJSON* start = json_get(decoder, "start");
        return json_is(decoder, "content", " ") && cJSON_IsNumber(start) && start->valueint == 1;
    }
    const cJSON *members = json_get(decoder, "decoders"), *member;
    bool drops = false;
    cJSON_ArrayForEach(member, members) drops = drops || decoder_drops_space(member);
    return drops;
}

static inline void tokenizer_close(Tokenizer* k)
{
    for (int i = 0; i < k->vocab_size && k->tokens != nullptr; i++) {
        free(k->tokens[i].spelling);
        free(k->tokens[i].bytes);
    }
    for (size_t i = 0; i < k->num_added; i++) free(k->added[i].pattern);
    pcre2_code_free(k->word_before);
    pcre2_code_free(k->word_after);
    normalizer_free(&k->normalizer);
    pre_tokenizer_free(&k->pre);
    bpe_free(&k->bpe);
    free(k->tokens);
    free(k->added);
    free(k->path);
    free(k);
}

static inline void tokenizer_close_held(void* k) { tokenizer_close((Tokenizer*)k); }

static inline Tokenizer* tokenizer_open(const char* path)
{
    char file[4096];
    if (file_kind(path) == S_IFDIR) tokenizer_locate(path, file);
    else ENSURE(snprintf(file, sizeof file, "%s", path) < (int)sizeof file, "%s: the path is too long", path);
    cJSON* root = (cJSON*)hold(tokenizer_json(file), json_delete_held);
    const cJSON* model = json_object(root, "model", file);
    bpe_refuse_others(model, file);

    Tokenizer* k = (Tokenizer*)malloc_checked(sizeof *k);
    memset(k, 0, sizeof *k);
    hold(k, tokenizer_close_held);
    k->path = strdup(file);
    byte_spelling_init(&k->pre.spelling);
    if (json_has(root, "normalizer")) normalizer_read(&k->normalizer, json_object(root, "normalizer", file), file);
    if (json_has(root, "pre_tokenizer")) pre_tokenizer_read(&k->pre, json_object(root, "pre_tokenizer", file), file);
    const cJSON* added = json_has(root, "added_tokens") ? json_array(root, "added_tokens", file)->child : nullptr;
    tokenizer_read_tokens(k, json_object(model, "vocab", file), added);
    k->bpe.path = k->path;
    k->bpe.tokens = k->tokens;
    k->bpe.knows_all = k->pre.spells;
    bpe_read(&k->bpe, model);
    tokenizer_read_added(k, added);
    k->drops_space = !k->pre.spells && decoder_drops_space(json_get(root, "decoder"));
    if (json_has(root, "post_processor")) tokenizer_read_prefix(k, json_object(root, "post_processor", file));
    k->pre.match = pcre2_match_data_create(8, nullptr);
    ENSURE(k->pre.match != nullptr, "out of host memory for a pattern's matches");
    hand_over(k);
    give_back(root);
    return k;
}

// -------------------------------------------------------------------------------------------------------- encoding
/* Bytes of the white space that text begins with. */
static inline size_t spaces_at_start(const char* text, size_t length)
{
    size_t done = 0, n;
    while (done < length && (n = utf8_space(text + done, length - done)) > 0) done += n;
    return done;
}

/* Where the white space begins that text ends with. */
static inline size_t spaces_at_end(const char* text, size_t length)
{
    size_t at = length;
    for (size_t n; length > 0; length -= n) {
        for (n = 1; n < 3 && n < length && ((unsigned char)text[length - n] & 0xC0) == 0x80; n++) {}
        if (utf8_space(text + length - n, n) != n) break;
        at = length - n;
    }
    return at;
}

/* Does no word touch the token at text[begin..end)? */
static inline bool stands_alone(const Tokenizer* k, const char* text, size_t length, size_t begin, size_t end)
{
    size_t from, to;
    return (begin == 0 || !pattern_next(k->pre.match, k->word_before, text, begin, 0, &from, &to)) &&
           (end == length || !pattern_next(k->pre.match, k->word_after, text + end, length - end, 0, &from, &to));
}

/* The longest added token of this pass at text[i]; null if there is none. */
static inline const AddedToken* added_token_at(const Tokenizer* k, int pass, const char* text, size_t length, size_t i)
{
    for (size_t a = 0; k->added_starts[(unsigned char)text[i]] && a < k->num_added; a++) {
        const AddedToken* token = &k->added[a];          // the longest come first
        if (token->normalized == (pass == 1) && token->length <= length - i &&
            memcmp(text + i, token->pattern, token->length) == 0) return token;
    }
    return nullptr;
}

typedef struct { const Tokenizer* k; TokenIds* out; } Encoding;

static inline void encoding_take(void* context, const char* text, size_t length)
{
    Encoding* e = (Encoding*)context;
    bpe_word(&e->k->bpe, text, length, e->out);
}

/* Pass 0 cuts at the added tokens that are not "normalized", pass 1 normalizes and cuts at the others, pass 2 is what
 * is between. */
static inline void tokenizer_cut_at_added(const Tokenizer* k, int pass, Piece piece, TokenIds* out)
{
    if (piece.length == 0) return;
    if (pass == 2) {
        Encoding encoding = {k, out};
        pre_tokenize(&k->pre, 0, piece, encoding_take, &encoding);
        return;
    }
    size_t length = piece.length, done = 0;
    char* normalized = pass == 1 ? normalizer_apply(&k->normalizer, piece.text, length, &length, k->path) : nullptr;
    const char* text = normalized != nullptr ? normalized : piece.text;
    for (size_t i = 0; i < length;) {
        const AddedToken* token = added_token_at(k, pass, text, length, i);
        size_t begin = i, end = i + (token != nullptr ? token->length : 1);
        i = end;
        if (token == nullptr || (token->single_word && !stands_alone(k, text, length, begin, end))) continue;
        if (token->lstrip) begin = spaces_at_end(text, begin);
        if (token->rstrip) end += spaces_at_start(text + end, length - end);
        if (token->lstrip && begin < done) begin = done;
        if (begin >= end) continue;                      // it is white space that the one before has taken
        if (begin > done)
            tokenizer_cut_at_added(k, pass + 1, Piece{text + done, begin - done, piece.first && done == 0}, out);
        tokens_push(out, token->id);
        done = end;
    }
    if (done < length)
        tokenizer_cut_at_added(k, pass + 1, Piece{text + done, length - done, piece.first && done == 0}, out);
    free(normalized);
}

static inline int* tokenizer_encode(const Tokenizer* k, const char* text, size_t length, size_t* count)
{
    TokenIds out = {(int*)malloc_checked((length / 3 + 16) * sizeof(int)), 0, length / 3 + 16};
    tokenizer_cut_at_added(k, 0, Piece{text, length, true}, &out);
    *count = out.count;
    return out.ids;
}

// -------------------------------------------------------------------------------------------------------- decoding
static inline int tokenizer_find(const Tokenizer* k, const char* spelling)
{
    for (size_t a = 0; a < k->num_added; a++) {
        if (strcmp(k->tokens[k->added[a].id].spelling, spelling) == 0) return k->added[a].id;
    }
    return token_map_find(&k->bpe, spelling, strlen(spelling));
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
    if (k->drops_space && text[0] == ' ') memmove(text, text + 1, (*length)--);
    return text;
}
