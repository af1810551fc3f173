/* tokens.h: token shards, the files a training text is cut into. llm.c's format is read and written.
 *
 *   TokenFile f = token_file_open(path, raw);      checks the header against the file, refuses in one sentence
 *   token_file_read(&f, fd, first, n, V, out, err) n tokens from token `first` on, each checked to be below V
 *   TokenSet s = token_set_open(spec, split, raw); file, pattern or folder -> its shards, sorted by name; a mixture of
 *                                                  them is SET:SHARE,SET:SHARE...
 *   token_docs_read(&f, fd, first, n, flags, err)  their flags, where f has a file of them
 *   TokenWriter w = token_writer_open(path, V);    token_writer_put(&w, ids, n); token_writer_close(&w, bytes, words)
 *
 * A shard is a header of 256 little-endian int32 (1024 bytes), then the tokens without gap:
 *   byte  int32  holds
 *      0    [0]  magic: 20240520 the tokens are uint16, 20240801 the tokens are uint32
 *      4    [1]  version: 1 with uint16; 7 (llm.c's Llama-3 shards) or 1 with uint32
 *      8    [2]  number of tokens, low 32 bits, unsigned
 *     12    [3]  number of tokens, high 32 bits (llm.c leaves 0 here, and in all that follows)
 *     16    [4]  vocabulary size of the tokenizer, 0 if not known
 *     20 [5][6]  bytes of text the shard was made from, low and high 32 bits, 0 if not known
 *     28 [7][8]  words of that text (runs without ASCII white space), low and high 32 bits, 0 if not known
 *     36         zeros to byte 1024
 *   1024         tokens, 2 or 4 bytes each, little-endian; the file ends with the last one
 * nanoGPT's .bin is the same without a header, uint16 only: read when `raw` is true.
 *
 * A shard NAME.bin of conversations has NAME.docs beside it, which says where each begins and what counts in the loss:
 *   byte         holds
 *      0  int32  magic: 0x73636f64, "docs"
 *      4  int32  version: 1
 *      8  int64  number of tokens: that of the shard
 *     16  int64  how many of them begin a document
 *     24  int64  how many of them count
 *     32         zeros to byte 64
 *     64         a byte for each token: bit 0 it counts in the loss where it is the target, bit 1 a document begins
 *                with it; the other bits are 0. A document begins with the first token. Without this file all count. */
#pragma once
#include <glob.h>
#include "files.h"

static_assert(sizeof(size_t) == 8, "positions in files are size_t and must have 64 bits");
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tokens are read as they are stored in the file");

#define TOKENS_MAGIC_U16 20240520u
#define TOKENS_MAGIC_U32 20240801u
#define TOKENS_HEADER_BYTES 1024
#define TOKENS_ERROR_BYTES 1024          // room for one sentence about one file
#define DOCS_MAGIC 0x73636f64u
#define DOCS_HEADER_BYTES 64

enum TokenFlag { TOKEN_COUNTS = 1, TOKEN_BEGINS = 2 };   // bits of a byte of NAME.docs

typedef struct {
    char* path;
    size_t num_toks;
    size_t first_byte;                   // offset of token 0
    int tok_bytes;                       // 2 or 4
    size_t vocab_size;                   // 0: not known
    size_t text_bytes, num_words;        // 0: not known
    char* docs_path;                     // of the file of flags; null: there is none
    size_t num_docs;                     // where there is one
    size_t num_counted;                  // tokens that count as targets; without such a file all
} TokenFile;

/* One of the sets of a mixture. */
typedef struct {
    char* name;                          // as it was given
    double share;                        // of the windows that are trained on; all together 1
    size_t first_file, num_files;
} TokenSource;

typedef struct {
    TokenFile* files;
    size_t num_files;
    TokenSource* sources;                // of files one after another; a set that is no mixture has one
    size_t num_sources;
    size_t num_toks, num_counted;        // over all files
    bool has_docs;                       // every file has flags
    size_t text_bytes, num_words;        // over all files; 0 unless every file knows its own
} TokenSet;

typedef struct {
    char* path;
    int fd;
    size_t num_toks, vocab_size;
    int tok_bytes;
    size_t fill_bytes;
    unsigned char* buffer;
} TokenWriter;

/* ---------------------------------------------------------------- reading one file */

static inline TokenFile token_file_open_raw(const char* path, size_t file_bytes)
{
    ENSURE(file_bytes % 2 == 0, "%s: %zu bytes is not a whole number of uint16 tokens, as a raw token file must be; "
           "the file was cut short, or it is not one", path, file_bytes);
    TokenFile file = {strdup(path), file_bytes / 2, 0, 2, 0, 0, 0, nullptr, 0, file_bytes / 2};
    return file;
}

static inline size_t token_header_u64(const uint32_t* header, int at)
{
    return (size_t)header[at] | (size_t)header[at + 1] << 32;
}

/* Does data/prepare.py make shards of files of this name? The suffixes are those of data/sources.py that come first to
 * mind; Megatron's .bin has its .idx beside it. */
static inline bool token_path_is_source(const char* path)
{
    static const char* suffixes[] = {".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt",
                                     ".text", ".md", ".gz", ".zst", ".idx"};
    size_t length = strlen(path);
    for (size_t i = 0; i < sizeof suffixes / sizeof *suffixes; i++) {
        size_t suffix_length = strlen(suffixes[i]);
        if (length > suffix_length && strcmp(path + length - suffix_length, suffixes[i]) == 0) return true;
    }
    char index[4096];
    if (length < 4 || length >= sizeof index || strcmp(path + length - 4, ".bin") != 0) return false;
    snprintf(index, sizeof index, "%.*s.idx", (int)length - 4, path);
    return file_exists(index);
}

/* The name of a path without folders and suffixes, for data/sets/NAME: its first character and the length. */
static inline const char* token_path_stem(const char* path, int* length)
{
    const char* end = path + strlen(path);
    while (end > path + 1 && end[-1] == '/') end--;
    const char* begin = end;
    while (begin > path && begin[-1] != '/') begin--;
    const char* dot = begin;
    while (dot < end && *dot != '.') dot++;
    *length = (int)((dot > begin ? dot : end) - begin);
    return begin;
}

/* The flags beside a shard, if there are any. */
static inline void token_docs_open(TokenFile* file)
{
    char path[4096];
    const size_t length = strlen(file->path);
    const bool is_bin = length > 4 && strcmp(file->path + length - 4, ".bin") == 0;
    file->num_counted = file->num_toks;
    if (snprintf(path, sizeof path, "%.*s.docs", (int)(is_bin ? length - 4 : length), file->path) >= (int)sizeof path ||
        !file_exists(path))
        return;
    int fd = file_open(path);
    struct stat st;
    ENSURE(fstat(fd, &st) == 0, "%s: cannot be examined: %s", path, strerror(errno));
    uint64_t header[DOCS_HEADER_BYTES / 8] = {0};
    size_t got = pread_full(fd, header, sizeof header, 0), have = (size_t)st.st_size;
    int read_errno = errno;
    close(fd);
    ENSURE(got == sizeof header || read_errno == 0, "%s: reading its header failed at byte %zu: %s", path, got,
           strerror(read_errno));
    ENSURE(header[0] == (DOCS_MAGIC | (uint64_t)1 << 32), "%s: begins with %llx (byte 0), the flags of a shard begin "
           "with %llx; make the shard again with data/prepare.py", path, (unsigned long long)header[0],
           (unsigned long long)(DOCS_MAGIC | (uint64_t)1 << 32));
    ENSURE(header[1] == file->num_toks && have == DOCS_HEADER_BYTES + file->num_toks,
           "%s: is for %llu tokens (byte 8) and has %zu bytes, %s has %zu tokens, whose flags are %zu bytes; make the "
           "shard again with data/prepare.py", path, (unsigned long long)header[1], have, file->path, file->num_toks,
           DOCS_HEADER_BYTES + file->num_toks);
    file->docs_path = strdup(path);
    ENSURE(file->docs_path != nullptr, "out of host memory for a file name");
    file->num_docs = header[2];
    file->num_counted = header[3];
}

static inline TokenFile token_file_open(const char* path, bool raw)
{
    int length;
    const char* stem = token_path_stem(path, &length);
    ENSURE(!token_path_is_source(path), "%s: is not a token shard; make shards of it with: python3 data/prepare.py %s "
           "--out data/sets/%.*s, and train with -d data/sets/%.*s", path, path, length, stem, length, stem);
    int fd = file_open(path);
    struct stat st;
    ENSURE(fstat(fd, &st) == 0, "%s: cannot be examined: %s", path, strerror(errno));
    ENSURE(S_ISREG(st.st_mode), "%s: is not a plain file; name a token shard, a pattern or a folder of shards", path);
    size_t file_bytes = (size_t)st.st_size;
    if (raw) {
        close(fd);
        TokenFile file = token_file_open_raw(path, file_bytes);
        token_docs_open(&file);
        return file;
    }

    uint32_t header[TOKENS_HEADER_BYTES / 4];
    size_t got = pread_full(fd, header, sizeof header, 0);
    int read_errno = errno;
    close(fd);
    ENSURE(got == sizeof header || read_errno == 0, "%s: reading its header failed at byte %zu: %s", path, got,
           strerror(read_errno));
    ENSURE(got == sizeof header, "%s: has %zu bytes, a token shard's header alone has %d; the file was cut short, or "
           "it is not a token shard", path, got, TOKENS_HEADER_BYTES);
    bool u16 = header[0] == TOKENS_MAGIC_U16, u32 = header[0] == TOKENS_MAGIC_U32;
    ENSURE(u16 || u32, "%s: begins with %u (byte 0), a token shard begins with %u or %u; make shards with "
           "data/prepare.py, or say --raw-tokens if it holds bare uint16 tokens", path, header[0], TOKENS_MAGIC_U16,
           TOKENS_MAGIC_U32);
    ENSURE(header[1] == 1 || (u32 && header[1] == 7), "%s: format version %u (byte 4) is not known, %s; make the shard "
           "again with data/prepare.py", path, header[1], u16 ? "only 1 is" : "only 1 and 7 are");

    TokenFile file;
    memset(&file, 0, sizeof file);
    file.tok_bytes = u16 ? 2 : 4;
    file.first_byte = TOKENS_HEADER_BYTES;
    file.num_toks = token_header_u64(header, 2);
    file.vocab_size = header[4];
    file.text_bytes = token_header_u64(header, 5);
    file.num_words = token_header_u64(header, 7);
    size_t have_bytes = file_bytes - TOKENS_HEADER_BYTES;
    ENSURE(file.num_toks <= SIZE_MAX / 4 && file.num_toks * file.tok_bytes == have_bytes,
           "%s: the header (byte 8) says %zu tokens of %d bytes, the file has %zu bytes after its header, which is "
           "%.1f tokens; it was cut short or written to twice: make it again", path, file.num_toks, file.tok_bytes,
           have_bytes, (double)have_bytes / file.tok_bytes);
    file.path = strdup(path);
    ENSURE(file.path != nullptr, "out of host memory for a file name");
    token_docs_open(&file);
    return file;
}

static inline void token_file_close(TokenFile* file)
{
    free(file->path);
    free(file->docs_path);
    memset(file, 0, sizeof *file);
}

/* Tokens [first, first + count) of the file open as fd, into out. False, with one sentence in `error`, if the file
 * cannot be read or holds an id that the model has no row for. Never dies: it is called from the loader's thread. */
static inline bool token_file_read(const TokenFile* file, int fd, size_t first, size_t count, size_t V, int* out,
                                   char error[TOKENS_ERROR_BYTES])
{
    size_t offset = file->first_byte + first * file->tok_bytes;
    size_t need = count * file->tok_bytes;
    size_t got = pread_full(fd, out, need, offset);
    if (got != need) {
        snprintf(error, TOKENS_ERROR_BYTES, "%s: need %zu bytes at byte %zu, have %zu%s%s; the file changed while it "
                 "was read, or its disk failed", file->path, need, offset, got, errno ? ": " : "",
                 errno ? strerror(errno) : "");
        return false;
    }
    if (file->tok_bytes == 2) {          // widen in place, from the end
        unsigned char* bytes = (unsigned char*)out;
        for (size_t i = count; i-- > 0;) {
            uint16_t tok;
            memcpy(&tok, bytes + 2 * i, 2);
            out[i] = tok;
        }
    }
    for (size_t i = 0; i < count; i++) {
        uint32_t tok = (uint32_t)out[i];
        if (tok < V && tok <= INT32_MAX) continue;
        snprintf(error, TOKENS_ERROR_BYTES, "%s: token %zu (byte %zu) is %u, the model's vocabulary has %zu rows; the "
                 "shard was made with another tokenizer: make it again with the model's, or train a model with "
                 "more rows", file->path, first + i, offset + i * file->tok_bytes, tok, V);
        return false;
    }
    return true;
}

/* The flags of tokens [first, first + count) of the file of flags that is open as fd; otherwise as token_file_read. */
static inline bool token_docs_read(const TokenFile* file, int fd, size_t first, size_t count, unsigned char* flags,
                                   char error[TOKENS_ERROR_BYTES])
{
    size_t got = pread_full(fd, flags, count, DOCS_HEADER_BYTES + first);
    if (got != count) {
        snprintf(error, TOKENS_ERROR_BYTES, "%s: need %zu bytes at byte %zu, have %zu%s%s; the file changed while it "
                 "was read, or its disk failed", file->docs_path, count, DOCS_HEADER_BYTES + first, got,
                 errno ? ": " : "", errno ? strerror(errno) : "");
        return false;
    }
    for (size_t i = 0; i < count; i++) {
        if ((flags[i] & ~(TOKEN_COUNTS | TOKEN_BEGINS)) == 0) continue;
        snprintf(error, TOKENS_ERROR_BYTES, "%s: byte %zu is %u, which has other bits than 1 and 2; the file is "
                 "damaged: make the shard again with data/prepare.py", file->docs_path, DOCS_HEADER_BYTES + first + i,
                 flags[i]);
        return false;
    }
    return true;
}

/* ---------------------------------------------------------------- the files of a data set */

/* Is `name` a shard of the split ("train" or "val")? train_000000.bin; llm.c's fineweb_train_000001.bin and
 * tiny_shakespeare_val.bin; nanoGPT's train.bin: the split is at the start or after '_', before '_' or ".bin". */
static inline bool token_name_matches(const char* name, const char* split)
{
    size_t length = strlen(name), split_length = strlen(split);
    if (length < 4 || strcmp(name + length - 4, ".bin") != 0) return false;
    for (const char* at = strstr(name, split); at != nullptr; at = strstr(at + 1, split)) {
        char after = at[split_length];
        if ((at == name || at[-1] == '_') && (after == '_' || after == '.')) return true;
    }
    return false;
}

static inline int token_path_compare(const void* a, const void* b)
{
    return strcmp(*(const char* const*)a, *(const char* const*)b);
}

static inline char** token_paths_push(char** paths, size_t* count, const char* path)
{
    paths = (char**)realloc(paths, (*count + 1) * sizeof *paths);
    ENSURE(paths != nullptr, "out of host memory for the names of %zu token shards", *count + 1);
    paths[*count] = strdup(path);
    ENSURE(paths[*count] != nullptr, "out of host memory for the name of a token shard");
    (*count)++;
    return paths;
}

static inline char** token_paths_of_folder(const char* folder, const char* split, size_t* count)
{
    DIR* dir = folder_open(folder);
    ENSURE(dir != nullptr, "%s: cannot be listed: %s", folder, strerror(errno));
    char** paths = nullptr;
    bool has_source = false;
    for (const char* name; (name = folder_next(dir, folder)) != nullptr; ) {
        has_source = has_source || token_path_is_source(name);
        if (!token_name_matches(name, split)) continue;
        size_t length = strlen(folder);
        const char* slash = length > 0 && folder[length - 1] == '/' ? "" : "/";
        char path[4096];
        int used = snprintf(path, sizeof path, "%s%s%s", folder, slash, name);
        ENSURE(used < (int)sizeof path, "%s: the path of the shard %s is too long", folder, name);
        paths = token_paths_push(paths, count, path);
    }
    folder_close(dir);
    int length;
    const char* stem = token_path_stem(folder, &length);
    ENSURE(*count > 0 || !has_source, "%s: the folder has no %s_*.bin; make token shards of what it has with: python3 "
           "data/prepare.py %s --out data/sets/%.*s, and train with -d data/sets/%.*s", folder, split, folder, length,
           stem, length, stem);
    ENSURE(*count > 0, "%s: the folder has no %s_*.bin; make token shards with: python3 data/prepare.py kjv --out %s",
           folder, split, folder);
    return paths;
}

static inline char** token_paths_of_pattern(const char* pattern, size_t* count)
{
    glob_t found;
    int result = glob(pattern, GLOB_TILDE | GLOB_BRACE, nullptr, &found);
    ENSURE(result == 0 || result == GLOB_NOMATCH, "%s: looking for files of this name failed: %s", pattern,
           strerror(errno));
    ENSURE(result == 0, "%s: no file of this name, and none that matches it as a pattern; make token shards with "
           "data/prepare.py or name those that exist", pattern);
    char** paths = nullptr;
    for (size_t i = 0; i < found.gl_pathc; i++) paths = token_paths_push(paths, count, found.gl_pathv[i]);
    globfree(&found);
    return paths;
}

/* spec is a file, a pattern such as "sets/web/train_*.bin", or a folder, of which the shards of `split` are taken.
 * Files come sorted by name, so that every rank and every run sees the same order. */
static inline void token_set_add(TokenSet* set, const char* spec, const char* split, double share, bool raw)
{
    char** paths = nullptr;
    size_t count = 0;
    const mode_t kind = file_kind(spec);
    if (kind == S_IFDIR) paths = token_paths_of_folder(spec, split, &count);
    else if (kind != 0) paths = token_paths_push(paths, &count, spec);
    else paths = token_paths_of_pattern(spec, &count);
    qsort(paths, count, sizeof *paths, token_path_compare);
    set->files = (TokenFile*)realloc(set->files, (set->num_files + count) * sizeof *set->files);
    set->sources = (TokenSource*)realloc(set->sources, (set->num_sources + 1) * sizeof *set->sources);
    char* name = strdup(spec);
    ENSURE(set->files != nullptr && set->sources != nullptr && name != nullptr,
           "out of host memory for %zu token shards", set->num_files + count);
    set->sources[set->num_sources++] = TokenSource{name, share, set->num_files, count};
    for (size_t i = 0; i < count; i++) {
        set->files[set->num_files++] = token_file_open(paths[i], raw);
        free(paths[i]);
    }
    free(paths);
}

/* The share behind the last colon of the `length` characters at `part`; 0: there is none. */
static inline double token_share(const char* part, size_t length, size_t* name_length)
{
    char text[4096], *end;
    if (length >= sizeof text) return 0;
    snprintf(text, sizeof text, "%.*s", (int)length, part);
    char* colon = strrchr(text, ':');
    if (colon == nullptr || colon == text || colon[1] < '.' || colon[1] > '9') return 0;
    *name_length = (size_t)(colon - text);
    const double share = strtod(colon + 1, &end);
    return *end == 0 && share > 0 && share < 1e9 ? share : 0;
}

/* Adds the sets of SET:SHARE,SET:SHARE...; the sum of their shares, or 0: it is no mixture. With sum 0
 * none is added. */
static inline double token_mixture(TokenSet* set, const char* spec, const char* split, bool raw, double sum)
{
    double total = 0;
    for (const char* part = spec; ; ) {
        const size_t length = strcspn(part, ",");
        size_t name_length = 0;
        const double share = token_share(part, length, &name_length);
        if (share == 0) return 0;
        total += share;
        if (sum > 0) {
            char name[4096];
            snprintf(name, sizeof name, "%.*s", (int)name_length, part);
            token_set_add(set, name, split, share / sum, raw);
        }
        if (part[length] == 0) return total;
        part += length + 1;
    }
}

static inline bool token_is_mixture(const char* spec)
{
    return file_kind(spec) == 0 && token_mixture(nullptr, spec, "", false, 0) > 0;
}

static inline TokenSet token_set_open(const char* spec, const char* split, bool raw)
{
    TokenSet set;
    memset(&set, 0, sizeof set);
    if (token_is_mixture(spec)) token_mixture(&set, spec, split, raw, token_mixture(nullptr, spec, split, raw, 0));
    else token_set_add(&set, spec, split, 1, raw);
    bool bytes_known = true, words_known = true;
    set.has_docs = true;
    for (const TokenFile* file = set.files; file < set.files + set.num_files; file++) {
        set.num_toks += file->num_toks;
        set.num_counted += file->num_counted;
        set.has_docs = set.has_docs && file->docs_path != nullptr;
        set.text_bytes += file->text_bytes;
        set.num_words += file->num_words;
        bytes_known = bytes_known && file->text_bytes > 0;
        words_known = words_known && file->num_words > 0;
    }
    if (!bytes_known) set.text_bytes = 0;
    if (!words_known) set.num_words = 0;
    return set;
}

static inline void token_set_close(TokenSet* set)
{
    for (size_t i = 0; i < set->num_files; i++) token_file_close(&set->files[i]);
    for (size_t i = 0; i < set->num_sources; i++) free(set->sources[i].name);
    free(set->sources);
    free(set->files);
    memset(set, 0, sizeof *set);
}

/* ---------------------------------------------------------------- writing */

static inline void token_writer_write(TokenWriter* writer, const void* data, size_t size_bytes, size_t offset)
{
    for (size_t done = 0; done < size_bytes;) {
        ssize_t n = TEMP_FAILURE_RETRY(pwrite(writer->fd, (const char*)data + done, size_bytes - done,
                                              (off_t)(offset + done)));
        ENSURE(n > 0, "%s: writing %zu bytes at byte %zu failed: %s", writer->path, size_bytes - done, offset + done,
               n < 0 ? strerror(errno) : "nothing was written");
        done += (size_t)n;
    }
}

#define TOKENS_WRITE_BYTES ((size_t)1 << 20)

/* Vocabularies of up to 65536 ids are written as uint16, larger ones as uint32. The header is written last: a shard
 * whose writer was killed begins with zeros and is refused. */
static inline TokenWriter token_writer_open(const char* path, size_t vocab_size)
{
    ENSURE(vocab_size >= 1 && vocab_size <= INT32_MAX, "%s: a vocabulary of %zu ids cannot be written, 1 to %d can",
           path, vocab_size, INT32_MAX);
    TokenWriter writer;
    memset(&writer, 0, sizeof writer);
    writer.path = strdup(path);
    writer.fd = (int)TEMP_FAILURE_RETRY(open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    ENSURE(writer.fd >= 0, "%s: cannot be created: %s", path, strerror(errno));
    writer.vocab_size = vocab_size;
    writer.tok_bytes = vocab_size <= 65536 ? 2 : 4;
    writer.buffer = (unsigned char*)malloc_checked(TOKENS_WRITE_BYTES);
    return writer;
}

static inline void token_writer_flush(TokenWriter* writer)
{
    size_t written = writer->num_toks * writer->tok_bytes - writer->fill_bytes;
    token_writer_write(writer, writer->buffer, writer->fill_bytes, TOKENS_HEADER_BYTES + written);
    writer->fill_bytes = 0;
}

static inline void token_writer_put(TokenWriter* writer, const int* ids, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        ENSURE(ids[i] >= 0 && (size_t)ids[i] < writer->vocab_size, "%s: token %zu is %d, the vocabulary has %zu ids",
               writer->path, writer->num_toks, ids[i], writer->vocab_size);
        uint32_t tok = (uint32_t)ids[i];
        memcpy(writer->buffer + writer->fill_bytes, &tok, writer->tok_bytes);   // little-endian: the low bytes
        writer->fill_bytes += writer->tok_bytes;
        writer->num_toks++;
        if (writer->fill_bytes == TOKENS_WRITE_BYTES) token_writer_flush(writer);
    }
}

static inline void token_writer_close(TokenWriter* writer, size_t text_bytes, size_t num_words)
{
    token_writer_flush(writer);
    uint32_t header[TOKENS_HEADER_BYTES / 4] = {0};
    header[0] = writer->tok_bytes == 2 ? TOKENS_MAGIC_U16 : TOKENS_MAGIC_U32;
    header[1] = writer->tok_bytes == 2 ? 1 : 7;
    header[2] = (uint32_t)writer->num_toks;
    header[3] = (uint32_t)(writer->num_toks >> 32);
    header[4] = (uint32_t)writer->vocab_size;
    header[5] = (uint32_t)text_bytes;
    header[6] = (uint32_t)(text_bytes >> 32);
    header[7] = (uint32_t)num_words;
    header[8] = (uint32_t)(num_words >> 32);
    token_writer_write(writer, header, sizeof header, 0);
    ENSURE(TEMP_FAILURE_RETRY(fsync(writer->fd)) == 0, "%s: bringing it to the disk failed: %s", writer->path,
           strerror(errno));
    ENSURE(close(writer->fd) == 0, "%s: closing it failed: %s", writer->path, strerror(errno));
    free(writer->buffer);
    free(writer->path);
    memset(writer, 0, sizeof *writer);
}
