/* test_data.cpp: tests of data/: token shards, loader, JSON, safetensors, tokenizer. No GPU, no MPI.
 *   test_data [filter]                     runs the tests whose name holds the filter; ends with "N passed, N failed"
 *   test_data --encode TOKENIZER           for test_prepare.py: texts on stdin, ids and decoded texts on stdout, each led
 *                                          by its 8-byte length
 *   test_data --resave IN OUT MAX_BYTES    reads all tensors of IN and writes them to OUT
 *   test_data --permute N SEED EPOCH       the window order, one number a line
 *   test_data --stream PATH RAW T V        every window of a set in order, one a line
 * A refusal is tested in a child process: it must exit with 1 and say what is wrong in one line. */
#include <sys/resource.h>
#include <sys/wait.h>
#include "../data/loader.h"
#include "../data/safetensors.h"
#include "../data/tokenizer.h"

static int num_passed, num_failed;
static const char* current_test;
static bool current_failed;
static char folder[64];                  // of this run's files

#define CHECK(cond, ...) do { \
    if (!(cond)) { \
        printf("FAIL %s (line %d): %s: ", current_test, __LINE__, #cond); \
        printf(__VA_ARGS__); \
        printf("\n"); \
        current_failed = true; \
    } \
} while (0)

/* The file `name` in this run's folder; valid until eight more were asked for. */
static const char* in_folder(const char* name)
{
    static char paths[8][256];
    static int next;
    char* path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static void write_file(const char* path, const void* data, size_t size_bytes)
{
    json_write_text(path, (const char*)data, size_bytes);
}

/* Runs f(argument) in a child. True if it ended with exit code 1 and one line on stderr that holds `words`. */
template<class F>
static bool dies(F f, const char* words)
{
    int pipe_fds[2];
    ENSURE(pipe(pipe_fds) == 0, "pipe: %s", strerror(errno));
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        dup2(pipe_fds[1], 2);
        f();
        _exit(0);
    }
    close(pipe_fds[1]);
    char said[8192];
    size_t length = 0;
    for (ssize_t n; (n = read(pipe_fds[0], said + length, sizeof said - 1 - length)) > 0;) length += (size_t)n;
    said[length] = 0;
    close(pipe_fds[0]);
    int status;
    waitpid(child, &status, 0);
    bool one_line = length > 0 && strchr(said, '\n') == said + length - 1;
    bool ok = WIFEXITED(status) && WEXITSTATUS(status) == 1 && one_line && strstr(said, words) != nullptr;
    if (!ok) printf("expected a refusal with \"%s\", got status %x: %s\n", words, status, said);
    return ok;
}

/* Ends within the refusals, not in a signal or a sanitizer's report: the exit code is 0 or 1. */
template<class F>
static bool survives(F f)
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        int null = open("/dev/null", O_WRONLY);
        dup2(null, 2);
        f();
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) <= 1;
}

/* ---------------------------------------------------------------- token shards */

/* A shard of the tokens first, first + 1, ... below V, again from 0 after that. */
static const char* write_tokens(const char* name, size_t count, size_t V, size_t first)
{
    const char* path = in_folder(name);
    TokenWriter w = token_writer_open(path, V);
    for (size_t i = 0; i < count; i++) {
        int id = (int)((first + i) % V);
        token_writer_put(&w, &id, 1);
    }
    token_writer_close(&w, 5 * count, count / 2);
    return path;
}

static void write_header(const char* path, uint32_t magic, uint32_t version, uint64_t count, size_t data_bytes)
{
    size_t size = TOKENS_HEADER_BYTES + data_bytes;
    char* data = (char*)malloc_checked(size);
    memset(data, 0, size);
    memcpy(data, &magic, 4);
    memcpy(data + 4, &version, 4);
    memcpy(data + 8, &count, 8);
    write_file(path, data, size);
    free(data);
}

static void test_tokens_roundtrip()
{
    size_t vocabs[] = {2, 50257, 65536, 65537, 128256};
    for (size_t V : vocabs) {
        size_t count = V + 3;
        const char* path = write_tokens("roundtrip.bin", count, V, 0);
        TokenFile f = token_file_open(path, false);
        CHECK(f.num_toks == count && f.vocab_size == V && f.tok_bytes == (V <= 65536 ? 2 : 4), "V %zu", V);
        CHECK(f.text_bytes == 5 * count && f.num_words == count / 2, "bytes %zu words %zu", f.text_bytes, f.num_words);
        int* ids = (int*)malloc_checked(count * sizeof(int));
        char error[TOKENS_ERROR_BYTES];
        int fd = open(path, O_RDONLY);
        CHECK(token_file_read(&f, fd, 0, count, V, ids, error), "%s", error);
        size_t wrong = 0;
        for (size_t i = 0; i < count; i++) wrong += ids[i] != (int)(i % V);
        CHECK(wrong == 0, "%zu wrong tokens with V %zu", wrong, V);
        CHECK(!token_file_read(&f, fd, 0, count, V - 1, ids, error) && strstr(error, "is") != nullptr, "id V-1 accepted");
        close(fd);
        free(ids);
        token_file_close(&f);
    }
}

static void test_tokens_refusals()
{
    const char* path = in_folder("bad.bin");
    auto open_it = [&] { token_file_open(path, false); };
    auto open_raw = [&] { token_file_open(path, true); };
    CHECK(dies([&] { token_file_open(in_folder("missing.bin"), false); }, "cannot be opened"), "missing");
    CHECK(dies([&] { token_file_open(folder, false); }, "not a plain file"), "folder");
    write_file(path, "short", 5);
    CHECK(dies(open_it, "has 5 bytes"), "short header");
    CHECK(dies(open_raw, "5 bytes is not a whole number"), "odd raw file");
    write_header(path, 123, 1, 10, 20);
    CHECK(dies(open_it, "begins with 123 (byte 0)"), "magic");
    write_header(path, TOKENS_MAGIC_U16, 9, 10, 20);
    CHECK(dies(open_it, "version 9 (byte 4)"), "version");
    write_header(path, TOKENS_MAGIC_U16, 1, 11, 20);
    CHECK(dies(open_it, "says 11 tokens of 2 bytes, the file has 20"), "truncated");
    write_header(path, TOKENS_MAGIC_U16, 1, 9, 20);
    CHECK(dies(open_it, "says 9 tokens"), "too long");
    write_header(path, TOKENS_MAGIC_U32, 7, UINT64_MAX / 4 + 6, 20);   // times 4 it would wrap round to 20
    CHECK(dies(open_it, "tokens of 4 bytes"), "count that overflows");
    write_header(path, TOKENS_MAGIC_U16, 1, ((uint64_t)1 << 32) + 10, 20);
    CHECK(dies(open_it, "says 4294967306 tokens"), "high word ignored");
    CHECK(dies([&] { write_tokens("v.bin", 1, 0, 0); }, "vocabulary of 0"), "V 0");
    CHECK(dies([&] {
        TokenWriter w = token_writer_open(in_folder("v.bin"), 4);
        int id = 4;
        token_writer_put(&w, &id, 1);
    }, "token 0 is 4, the vocabulary has 4"), "writing an id >= V");
    CHECK(dies([&] {
        struct rlimit limit = {2000, 2000};
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &limit);
        write_tokens("full.bin", 100000, 10, 0);
    }, "writing"), "full disk");
}

static void test_tokens_llmc_files()         // as llm.c writes them: nothing but the first three numbers is set
{
    const char* path = in_folder("llmc.bin");
    uint32_t magics[] = {TOKENS_MAGIC_U16, TOKENS_MAGIC_U32};
    for (uint32_t magic : magics) {
        bool u16 = magic == TOKENS_MAGIC_U16;
        write_header(path, magic, u16 ? 1 : 7, 10, u16 ? 20 : 40);
        TokenFile f = token_file_open(path, false);
        CHECK(f.num_toks == 10 && f.vocab_size == 0 && f.text_bytes == 0 && f.num_words == 0, "magic %u", magic);
        token_file_close(&f);
    }
}

static void test_tokens_sets()
{
    const char* names[] = {"train_000000.bin", "train.bin", "fineweb_train_000001.bin", "tiny_shakespeare_train.bin",
                           "training.bin", "constrain_1.bin", "train_000000.bin.part", "val_000000.bin", "train.txt"};
    for (int i = 0; i < 9; i++) {
        CHECK(token_name_matches(names[i], "train") == (i < 4), "%s", names[i]);
    }
    mkdir(in_folder("set"), 0777);
    CHECK(dies([&] { token_set_open(in_folder("set"), "train", false); }, "has no train_*.bin"), "empty folder");
    write_tokens("set/train_000001.bin", 20, 10, 0);
    write_tokens("set/train_000000.bin", 10, 10, 0);
    write_tokens("set/val_000000.bin", 7, 10, 0);
    TokenSet train = token_set_open(in_folder("set"), "train", false);
    CHECK(train.num_files == 2 && train.num_toks == 30 && train.text_bytes == 150, "%zu tokens", train.num_toks);
    CHECK(train.num_files == 2 && strstr(train.files[0].path, "train_000000") != nullptr, "not sorted");
    TokenSet val = token_set_open(in_folder("set/"), "val", false);
    CHECK(val.num_files == 1 && val.num_toks == 7, "%zu tokens", val.num_toks);
    TokenSet pattern = token_set_open(in_folder("set/*_00000[01].bin"), "train", false);
    CHECK(pattern.num_files == 3 && pattern.num_toks == 37, "%zu files", pattern.num_files);
    TokenSet raw = token_set_open(in_folder("set/val_000000.bin"), "val", true);
    CHECK(raw.num_toks == 512 + 7 && raw.files[0].first_byte == 0 && raw.num_words == 0, "%zu tokens", raw.num_toks);
    CHECK(dies([&] { token_set_open(in_folder("set/no*.bin"), "train", false); }, "no file of this name"), "pattern");
    token_set_close(&train);
    token_set_close(&val);
    token_set_close(&pattern);
    token_set_close(&raw);
}

/* ---------------------------------------------------------------- loader */

static void test_permutation()
{
    size_t sizes[] = {1, 2, 3, 4, 5, 7, 16, 17, 63, 64, 65, 1000, 4096, 4097, 100003};
    for (size_t n : sizes) {
        for (uint64_t epoch = 0; epoch < 3; epoch++) {
            char* seen = (char*)calloc(n, 1);
            size_t num_same = 0;
            for (size_t x = 0; x < n; x++) {
                uint64_t y = loader_permute(x, n, 42, epoch);
                CHECK(y < n && !seen[y], "n %zu epoch %zu: %zu hit twice or out of range", n, (size_t)epoch, (size_t)y);
                if (y < n) seen[y] = 1;
                num_same += y == loader_permute(x, n, 42, epoch + 1);
            }
            CHECK(n < 16 || num_same < n / 2, "n %zu: epochs %zu and the next agree at %zu", n, (size_t)epoch, num_same);
            free(seen);
        }
    }
    uint64_t huge = ((uint64_t)1 << 62) + 12345;
    for (uint64_t x = 0; x < 100; x++) CHECK(loader_permute(x, huge, 1, 2) < huge, "out of range");
    int counts[5][5] = {{0}};                // every window comes at every place about as often
    for (uint64_t seed = 0; seed < 5000; seed++) {
        for (int x = 0; x < 5; x++) counts[x][loader_permute((uint64_t)x, 5, seed, 0)]++;
    }
    for (int i = 0; i < 25; i++) {           // 1000 expected, standard deviation 28
        CHECK(abs(counts[i / 5][i % 5] - 1000) < 150, "%d -> %d: %d of 5000", i / 5, i % 5, counts[i / 5][i % 5]);
    }
}

static LoaderConfig small_config(size_t B, size_t G, size_t R, size_t rank)
{
    LoaderConfig c = {"--data", B, 4, G, R, rank, 1000, 0, 7, true, false};
    return c;
}

/* The first inputs of the windows at positions [from, from + count) of the run, -1 for empty rows, as all ranks of the
 * layout B, G, R read them together. count is a multiple of B*G*R. */
static void read_stream(const TokenSet* set, LoaderConfig base, size_t B, size_t G, size_t R, size_t from, size_t count,
                        int* out)
{
    size_t T = base.T;
    int* inputs = (int*)malloc_checked(2 * B * T * sizeof(int));
    int* targets = inputs + B * T;
    for (size_t r = 0; r < R; r++) {
        LoaderConfig c = base;
        c.B = B, c.G = G, c.R = R, c.rank = r;
        Loader* l = loader_open(&c, set);
        loader_seek(l, from);
        for (size_t step = 0; step < count / (B * G * R); step++) {
            for (size_t g = 0; g < G; g++) {
                loader_next(l, inputs, targets);
                for (size_t b = 0; b < B; b++) {
                    size_t i = (step * G * R + g * R + r) * B + b;
                    out[i] = targets[b * T] < 0 ? -1 : inputs[b * T];
                    for (size_t t = 0; t + 1 < T; t++) {
                        CHECK(targets[b * T + t] < 0 || targets[b * T + t] == inputs[b * T + t + 1], "not shifted");
                    }
                }
            }
        }
        loader_close(l);
    }
    free(inputs);
}

/* Two shards of 16 and 7 windows and a tail. Window k of a shard begins with token 4k (+ 500 in the second). */
static TokenSet two_shards()
{
    mkdir(in_folder("two"), 0777);
    write_tokens("two/train_0.bin", 65, 1000, 0);
    write_tokens("two/train_1.bin", 31, 1000, 500);
    return token_set_open(in_folder("two"), "train", false);
}

static void test_loader_covers()
{
    TokenSet set = two_shards();
    LoaderConfig c = small_config(1, 1, 1, 0);
    Loader* l = loader_open(&c, &set);
    CHECK(l->num_windows == 23 && l->num_tail_toks == 2, "%zu windows, tail %zu", l->num_windows, l->num_tail_toks);
    loader_close(l);
    int stream[69];
    read_stream(&set, c, 1, 1, 1, 0, 69, stream);
    for (int epoch = 0; epoch < 3; epoch++) {
        int seen[1000] = {0};
        for (int i = 0; i < 23; i++) seen[stream[23 * epoch + i]]++;
        for (int k = 0; k < 16; k++) CHECK(seen[4 * k] == 1, "epoch %d: window %d came %d times", epoch, k, seen[4 * k]);
        for (int k = 0; k < 7; k++) CHECK(seen[500 + 4 * k] == 1, "epoch %d: window %d of shard 2", epoch, k);
    }
    CHECK(memcmp(stream, stream + 23, sizeof(int) * 23) != 0, "epochs have the same order");
    LoaderConfig other = c;
    other.seed = 8;
    int again[23];
    read_stream(&set, other, 1, 1, 1, 0, 23, again);
    CHECK(memcmp(stream, again, sizeof again) != 0, "the seed does not matter");
    other.shuffle = false;
    read_stream(&set, other, 1, 1, 1, 0, 23, again);
    for (int i = 0; i < 23; i++) CHECK(again[i] == (i < 16 ? 4 * i : 500 + 4 * (i - 16)), "unshuffled at %d", i);
    token_set_close(&set);
}

static void test_loader_layouts()            // B, G, R and the place of a restart do not change the stream
{
    TokenSet set = two_shards();
    LoaderConfig c = small_config(1, 1, 1, 0);
    int want[120], got[120];
    read_stream(&set, c, 1, 1, 1, 0, 120, want);
    size_t layouts[][3] = {{12, 1, 1}, {1, 12, 1}, {1, 1, 12}, {2, 3, 2}, {3, 2, 2}, {6, 1, 2}, {1, 3, 4}};
    for (auto& s : layouts) {
        read_stream(&set, c, s[0], s[1], s[2], 0, 120, got);
        CHECK(memcmp(want, got, sizeof got) == 0, "B %zu G %zu R %zu", s[0], s[1], s[2]);
        read_stream(&set, c, s[0], s[1], s[2], 36, 84, got);
        CHECK(memcmp(want + 36, got, 84 * sizeof(int)) == 0, "resumed: B %zu G %zu R %zu", s[0], s[1], s[2]);
    }
    read_stream(&set, c, 5, 1, 1, 17, 100, got);     // in the middle of an epoch, at no multiple of anything
    CHECK(memcmp(want + 17, got, 100 * sizeof(int)) == 0, "resumed at 17");
    token_set_close(&set);
}

static void test_loader_seek()               // forth and back in one loader, the thread reading ahead all the while
{
    TokenSet set = two_shards();
    LoaderConfig c = small_config(2, 2, 1, 0);
    int want[120], inputs[8], targets[8];
    read_stream(&set, c, 1, 1, 1, 0, 120, want);
    Loader* l = loader_open(&c, &set);
    for (size_t i = 0; i < 200; i++) {
        size_t at = i * 37 % 100;
        loader_seek(l, at);
        for (size_t m = 0; m < i % 4; m++) {
            loader_next(l, inputs, targets);
            CHECK(inputs[0] == want[at + 2 * m] && inputs[4] == want[at + 2 * m + 1], "seek %zu, micro-batch %zu", at, m);
        }
        CHECK(loader_position(l) == at + i % 4 / 2 * 4, "position %zu after %zu", loader_position(l), at);
    }
    loader_close(l);
    token_set_close(&set);
}

static void test_loader_end()
{
    TokenSet set = two_shards();
    LoaderConfig c = small_config(2, 2, 2, 1);
    c.limit_windows = 2 * 23;                // two epochs, the last global batch has 46 - 40 = 6 of 8 windows
    int want[46], got[56];
    LoaderConfig endless = small_config(1, 1, 1, 0);
    read_stream(&set, endless, 1, 1, 1, 0, 46, want);
    read_stream(&set, c, 2, 2, 2, 0, 56, got);
    CHECK(memcmp(want, got, sizeof want) == 0, "before the end");
    for (int i = 46; i < 56; i++) CHECK(got[i] == -1, "row %d is not empty", i);
    Loader* l = loader_open(&c, &set);
    CHECK(loader_batch_windows(l, 32) == 8 && loader_batch_windows(l, 40) == 6 && loader_batch_windows(l, 48) == 0,
          "windows in the last batches");
    int inputs[8], targets[8];
    size_t rows[6];
    loader_seek(l, 40);
    for (int m = 0; m < 4; m++) rows[m] = loader_next(l, inputs, targets);
    CHECK(rows[0] == 2 && rows[1] == 0 && rows[2] == 0, "rank 1 of 2 has %zu %zu %zu", rows[0], rows[1], rows[2]);
    CHECK(inputs[0] == 0 && targets[0] == -1 && targets[7] == -1, "empty rows");
    CHECK(loader_position(l) == 46, "position %zu at the end", loader_position(l));
    loader_close(l);
    token_set_close(&set);
}

static void test_loader_whole_tail()         // validation: every token but each shard's first is a target once
{
    TokenSet set = two_shards();
    for (size_t T = 1; T < 80; T += 6) {
        LoaderConfig c = {"--val", 3, T, 1, 2, 0, 1000, 0, 0, false, true};
        int seen[1000] = {0};
        int* inputs = (int*)malloc_checked(6 * T * sizeof(int));
        int* targets = inputs + 3 * T;
        for (c.rank = 0; c.rank < 2; c.rank++) {
            c.limit_windows = 0;
            Loader* l = loader_open(&c, &set);
            c.limit_windows = l->num_windows;
            CHECK(l->num_tail_toks == 0 && l->num_windows == ceil(64.0 / T) + ceil(30.0 / T), "%zu", l->num_windows);
            loader_close(l);
            l = loader_open(&c, &set);
            for (size_t p = 0; loader_batch_windows(l, p) > 0; p += 6) {
                loader_next(l, inputs, targets);
                for (size_t i = 0; i < 3 * T; i++) {
                    if (targets[i] >= 0) seen[targets[i]]++;
                    CHECK(targets[i] < 0 || targets[i] == inputs[i] + 1, "not shifted");
                }
            }
            loader_close(l);
        }
        for (int k = 1; k < 65; k++) CHECK(seen[k] == 1, "T %zu: target %d came %d times", T, k, seen[k]);
        for (int k = 501; k < 531; k++) CHECK(seen[k] == 1, "T %zu: target %d came %d times", T, k, seen[k]);
        free(inputs);
    }
    token_set_close(&set);
}

static void test_loader_one_window()         // the shortest shard there is
{
    TokenSet set = token_set_open(write_tokens("one.bin", 5, 1000, 0), "train", false);
    LoaderConfig c = small_config(3, 1, 1, 0);
    Loader* l = loader_open(&c, &set);
    int inputs[12], targets[12];
    CHECK(l->num_windows == 1 && l->num_tail_toks == 0, "%zu windows", l->num_windows);
    for (int m = 0; m < 3; m++) CHECK(loader_next(l, inputs, targets) == 3, "rows");
    for (int i = 0; i < 12; i++) CHECK(inputs[i] == i % 4 && targets[i] == i % 4 + 1, "at %d", i);
    loader_close(l);
    token_set_close(&set);
}

static void test_loader_many_shards()        // more than are kept open, and some too short for a window
{
    mkdir(in_folder("many"), 0777);
    for (int i = 0; i < 600; i++) {
        char name[64];
        snprintf(name, sizeof name, "many/train_%03d.bin", i);
        write_tokens(name, i % 3 == 2 ? 3 : 9, 1000, (size_t)i);
    }
    TokenSet set = token_set_open(in_folder("many"), "train", false);
    LoaderConfig c = small_config(1, 1, 1, 0);
    Loader* l = loader_open(&c, &set);
    CHECK(l->num_windows == 800 && l->num_tail_toks == 600, "%zu windows %zu", l->num_windows, l->num_tail_toks);
    loader_close(l);
    int stream[800], seen[1000] = {0};
    read_stream(&set, c, 8, 1, 1, 0, 800, stream);
    for (int i = 0; i < 800; i++) seen[stream[i]]++;
    for (int i = 0; i < 600; i++) {
        int want = (i % 3 != 2) + (i >= 4 && (i - 4) % 3 != 2);
        CHECK(seen[i] == want, "token %d first in %d windows", i, seen[i]);
    }
    token_set_close(&set);
}

static void test_loader_refusals()
{
    TokenSet set = token_set_open(write_tokens("short.bin", 4, 1000, 0), "train", false);
    LoaderConfig c = small_config(1, 1, 1, 0);
    CHECK(dies([&] { loader_open(&c, &set); }, "has 4 tokens, one window of --seq-len 4 needs 5"), "T too large");
    c.T = 3;
    c.V = 999;
    CHECK(dies([&] { loader_open(&c, &set); }, "vocabulary of 1000 ids (byte 16), the model has 999"), "vocabulary");
    c.rank = 1;
    CHECK(dies([&] { loader_open(&c, &set); }, "rank 1 of 1"), "rank");
    token_set_close(&set);

    const char* path = in_folder("ids.bin");
    write_header(path, TOKENS_MAGIC_U16, 1, 5, 10);
    uint16_t bad = 77;
    int fd = open(path, O_WRONLY);
    CHECK(pwrite(fd, &bad, 2, TOKENS_HEADER_BYTES + 6) == 2, "pwrite");
    close(fd);
    set = token_set_open(path, "train", false);
    c = small_config(1, 1, 1, 0);
    c.V = 77;
    int inputs[4], targets[4];
    CHECK(dies([&] { loader_next(loader_open(&c, &set), inputs, targets); }, "token 3 (byte 1030) is 77, the model's "
               "vocabulary has 77 rows"), "id = V");
    CHECK(dies([&] {
        CHECK(truncate(path, 1028) == 0, "truncate");
        loader_next(loader_open(&c, &set), inputs, targets);
    }, "need 10 bytes at byte 1024, have 4"), "cut short while training");
    CHECK(dies([&] {
        unlink(path);
        loader_next(loader_open(&c, &set), inputs, targets);
    }, "cannot be opened any more"), "gone while training");
    token_set_close(&set);
}

/* ---------------------------------------------------------------- JSON */

static void parse(const char* text)
{
    cJSON_Delete(json_parse(text, strlen(text), "x.json"));
}

static void test_json()
{
    const char* text = "{\"n\": 12, \"x\": 1e-05, \"s\": \"a\\\"b\", \"t\": true, \"z\": null, \"N\": 3, \"big\": 1e300, "
                       "\"half\": 0.5, \"l\": [1, 2], \"o\": {}}";
    cJSON* j = json_parse(text, strlen(text), "x.json");
    CHECK(json_int(j, "n", 0, 12, "x") == 12 && json_int(j, "N", 0, 12, "x") == 3, "int");
    CHECK(json_float(j, "x", 0, 1, "x") == 1e-5 && json_bool(j, "t", "x"), "float, bool");
    CHECK(strcmp(json_string(j, "s", "x"), "a\"b") == 0, "string");
    CHECK(json_int_or(j, "z", 5, 0, 9, "x") == 5 && json_int_or(j, "none", 6, 0, 9, "x") == 6, "fallback");
    CHECK(json_int_or(j, "n", 5, 0, 99, "x") == 12 && json_float_or(j, "none", 2.5, 0, 9, "x") == 2.5, "fallback");
    CHECK(dies([&] { json_int(j, "n", 0, 11, "x.json"); }, "x.json: \"n\" is 12, must be 0 to 11"), "range");
    CHECK(dies([&] { json_int(j, "half", 0, 11, "x.json"); }, "must be a whole number"), "half");
    CHECK(dies([&] { json_int(j, "big", 0, 11, "x.json"); }, "at most 2^53"), "big");
    CHECK(dies([&] { json_int(j, "s", 0, 11, "x.json"); }, "\"s\" must be a whole number, is a string"), "type");
    CHECK(dies([&] { json_string(j, "n", "x.json"); }, "\"n\" must be a string, is a number"), "type");
    CHECK(dies([&] { json_float(j, "none", 0, 1, "x.json"); }, "has no key \"none\""), "missing");
    CHECK(dies([&] { json_array(j, "o", "x.json"); }, "must be a list, is an object"), "array");
    json_write_file(in_folder("out.json"), j);
    cJSON* again = json_parse_file(in_folder("out.json"));
    CHECK(cJSON_Compare(j, again, 1), "written and read again it differs");
    cJSON_Delete(j);
    cJSON_Delete(again);
    CHECK(dies([] { parse("{\"a\": 1,\n \"b\": tru}"); }, "x.json: line 2, column 7: not valid JSON at \"tru}\""), "syntax");
    CHECK(dies([] { parse("{\"a\": [1, 2"); }, "ends too early"), "cut");
    CHECK(dies([] { parse(""); }, "ends too early"), "empty");
    CHECK(dies([] { parse("{} x"); }, "column 4"), "garbage after the end");
    CHECK(dies([] { json_parse("{}\0x", 4, "x.json"); }, "zero byte at byte 2"), "zero byte");
    CHECK(survives([] {
        JsonText deep = {nullptr, 0, 0};
        for (int i = 0; i < 1000000; i++) json_text_add(&deep, "[");
        json_parse(deep.text, deep.length, "deep");
    }), "deep nesting");
}

/* ---------------------------------------------------------------- safetensors */

static void write_safetensors(const char* path, const char* header, size_t data_bytes)
{
    size_t length = strlen(header);
    char* data = (char*)malloc_checked(8 + length + data_bytes);
    memset(data, 0, 8 + length + data_bytes);
    memcpy(data, &length, 8);
    memcpy(data + 8, header, length);
    write_file(path, data, 8 + length + data_bytes);
    free(data);
}

static bool refuses_header(const char* header, size_t data_bytes, const char* words)
{
    const char* path = in_folder("header.safetensors");
    write_safetensors(path, header, data_bytes);
    return dies([&] { safetensors_open(path); }, words);
}

#define T_(name, dtype, shape, offsets) "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

static void test_safetensors_refusals()
{
    CHECK(refuses_header("{" T_("a", "F32", "[2]", "[0,8]") "}", 7, "the file has 7"), "data cut");
    CHECK(refuses_header("{" T_("a", "F32", "[2]", "[0,8]") "}", 9, "end at byte 8 of the data, the file has 9"), "long");
    CHECK(refuses_header("{" T_("a", "F32", "[3]", "[0,8]") "}", 8, "needs 12 bytes as F32, its offsets give it 8"), "size");
    CHECK(refuses_header("{" T_("a", "F99", "[2]", "[0,8]") "}", 8, "dtype \"F99\" is not known"), "dtype");
    CHECK(refuses_header("{" T_("a", "F32", "[2]", "[0,8]") "," T_("b", "F32", "[2]", "[4,12]") "}", 12, "overlap"), "overlap");
    CHECK(refuses_header("{" T_("a", "F32", "[2]", "[0,8]") "," T_("b", "F32", "[1]", "[12,16]") "}", 16, "belong to none"),
          "hole");
    CHECK(refuses_header("{" T_("a", "F32", "[1]", "[0,4]") "," T_("a", "F32", "[1]", "[4,8]") "}", 8, "two tensors \"a\""),
          "twice");
    CHECK(refuses_header("{" T_("a", "F32", "[2]", "[8,0]") "}", 8, "bytes 8 to 0"), "backwards");
    CHECK(refuses_header("{" T_("a", "F32", "[-2]", "[0,8]") "}", 8, "\"shape\" is -2"), "negative");
    CHECK(refuses_header("{" T_("a", "F32", "[4294967296,4294967296]", "[0,0]") "}", 0, "its shape needs"), "overflow");
    CHECK(refuses_header("{" T_("a", "F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]") "}", 4, "9 dimensions"), "dimensions");
    CHECK(refuses_header("{" T_("a", "F4", "[3]", "[0,1]") "}", 1, "its shape needs"), "half a byte");
    CHECK(refuses_header("{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "no key \"data_offsets\""), "no offsets");
    CHECK(refuses_header("{\"a\":3}", 4, "must be a JSON object"), "no object");
    CHECK(refuses_header("[1]", 0, "header must be a JSON object, is a list"), "list");
    CHECK(refuses_header("{", 0, "ends too early"), "syntax");
    const char* path = in_folder("header.safetensors");
    write_file(path, "1234567", 7);
    CHECK(dies([&] { safetensors_open(path); }, "has 7 bytes"), "7 bytes");
    write_file(path, "\xff\xff\xff\xff\xff\xff\xff\xff{}", 10);
    CHECK(dies([&] { safetensors_open(path); }, "has 18446744073709551615 bytes, at most"), "length");
    write_file(path, "\x03\0\0\0\0\0\0\0{}", 10);
    CHECK(dies([&] { safetensors_open(path); }, "has 3 bytes, 2 follow"), "length");
    CHECK(dies([&] { safetensors_open(in_folder("none.safetensors")); }, "cannot be found"), "missing");
}

/* Headers cut short, and with bytes changed: refused or read, never a crash. */
static void test_safetensors_fuzz()
{
    const char* header = "{\"__metadata__\":{\"format\":\"pt\"}," T_("a", "F32", "[2,1]", "[0,8]") ","
                         T_("b.c", "BF16", "[3]", "[8,14]") "," T_("d", "F16", "[]", "[14,16]") "}";
    const char* path = in_folder("fuzz.safetensors");
    size_t length = strlen(header);
    uint64_t random = 1;
    for (int round = 0; round < 600; round++) {
        char changed[512];
        strcpy(changed, header);
        for (int i = 0; i < 1 + round % 3; i++) {
            random = loader_mix(random);
            const char* interesting = "0123456789-e.,:[]{}\"\\uFa ";
            size_t at = random % length;
            changed[at] = round % 2 ? interesting[(random >> 32) % strlen(interesting)] : (char)(1 + (random >> 40) % 255);
        }
        if (round % 5 == 0) changed[random % length] = 0;
        write_safetensors(path, changed, 16);
        bool ok = survives([&] {
            SafeTensors* st = safetensors_open(path);
            float out[64];
            for (size_t i = 0; i < st->num_tensors; i++) {
                const SafeTensor* t = &st->tensors[i];
                if (t->num_elems <= 64) safetensors_read_f32(st, t, 0, t->num_elems, out);
            }
            safetensors_close(st);
        });
        CHECK(ok, "crashed on %s", changed);
    }
}

static SafeTensor describe(const char* name, SafeDtype dtype, int num_dims, size_t dim0, size_t dim1)
{
    SafeTensor t;
    memset(&t, 0, sizeof t);
    t.name = name;
    t.dtype = dtype;
    t.num_dims = num_dims;
    t.dims[0] = dim0;
    t.dims[1] = dim1;
    return t;
}

/* Four writers, each with its own quarter of every tensor and its own open files, as ranks do it. */
static void test_safetensors_ranges()
{
    SafeTensor list[] = {describe("wte", SafeDtype::F32, 2, 13, 7), describe("h.10.w", SafeDtype::BF16, 1, 33, 0),
                         describe("h.2.w", SafeDtype::F32, 2, 5, 5), describe("scalar", SafeDtype::F16, 0, 0, 0),
                         describe("empty", SafeDtype::F32, 2, 0, 4)};
    size_t limits[] = {5000000000, 400, 120, 1};
    for (size_t limit : limits) {
        const char* path = in_folder("ranges.safetensors");
        unlink(path);
        SafeTensors* ranks[4];
        for (int r = 0; r < 4; r++) {
            ranks[r] = safetensors_plan(path, list, 5, limit);
            if (r == 0) safetensors_create_files(ranks[r]);
            else safetensors_open_files(ranks[r]);
        }
        CHECK(ranks[0]->num_files == (limit == 5000000000 ? 1 : limit == 400 ? 2 : limit == 120 ? 3 : 5), "%zu files at %zu",
              ranks[0]->num_files, limit);
        float value[128];
        for (int i = 0; i < 128; i++) value[i] = (float)i - 50;
        for (int r = 3; r >= 0; r--) {
            for (size_t i = 0; i < 5; i++) {
                const SafeTensor* t = safetensors_get(ranks[r], list[i].name);
                size_t first = t->num_elems * r / 4, end = t->num_elems * (r + 1) / 4;
                safetensors_write_f32(ranks[r], t, first, end - first, value + first);
            }
            safetensors_sync(ranks[r]);
        }
        for (int r = 0; r < 4; r++) safetensors_close(ranks[r]);
        SafeTensors* st = safetensors_open(path);
        CHECK(st->num_tensors == 5, "%zu tensors", st->num_tensors);
        for (size_t i = 0; i < 5; i++) {
            const SafeTensor* t = safetensors_get(st, list[i].name);
            float got[128];
            size_t first = t->num_elems / 3;
            safetensors_read_f32(st, t, first, t->num_elems - first, got);
            CHECK(memcmp(got, value + first, (t->num_elems - first) * sizeof(float)) == 0, "%s at %zu", t->name, limit);
        }
        CHECK(safetensors_find(st, "none") == nullptr, "found what is not there");
        CHECK(dies([&] { safetensors_get(st, "none"); }, "has no tensor \"none\" among its 5"), "get");
        safetensors_close(st);
    }
}

static void test_safetensors_full_disk()
{
    SafeTensor t = describe("a", SafeDtype::F32, 1, 100000, 0);
    CHECK(dies([&] {
        struct rlimit limit = {50000, 50000};
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &limit);
        safetensors_create_files(safetensors_plan(in_folder("big.safetensors"), &t, 1, 5000000000));
    }, "needs 400104 bytes"), "no room");
    SafeTensors* st = safetensors_plan(in_folder("big.safetensors"), &t, 1, 5000000000);
    safetensors_create_files(st);
    CHECK(dies([&] {
        struct rlimit limit = {50000, 50000};
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &limit);
        float* data = (float*)calloc(100000, 4);
        safetensors_write_f32(st, safetensors_get(st, "a"), 0, 100000, data);
    }, "File too large"), "short write");
    safetensors_close(st);
    CHECK(dies([&] { safetensors_plan("/x/no_suffix", &t, 1, 1); }, "something.safetensors"), "name");
    CHECK(dies([&] {
        safetensors_create_files(safetensors_plan("/nowhere/a.safetensors", &t, 1, 5000000000));
    }, "cannot be created"), "no folder");
}

static void test_float16()                   // every half goes to float and back; ties go to even
{
    for (uint32_t bits = 0; bits < 65536; bits++) {
        float f16 = safe_float_of_f16((uint16_t)bits), bf16 = safe_float_of_bits(bits << 16);
        if (f16 == f16) CHECK(safe_f16_of_float(f16) == bits, "f16 %04x -> %g", bits, f16);
        else CHECK(safe_float_of_f16(safe_f16_of_float(f16)) != f16, "f16 NaN %04x", bits);
        if (bf16 == bf16) CHECK(safe_bf16_of_float(bf16) == bits, "bf16 %04x -> %g", bits, bf16);
        else CHECK(safe_float_of_bits((uint32_t)safe_bf16_of_float(bf16) << 16) != bf16, "bf16 NaN %04x", bits);
        if ((bits & 0x7fff) >= 0x7bff) continue;
        float next = safe_float_of_f16((uint16_t)(bits + 1)), middle = (f16 + next) / 2;
        CHECK(safe_f16_of_float(middle) == (bits & 1 ? bits + 1 : bits), "f16 tie above %04x", bits);
    }
    CHECK(safe_f16_of_float(65519.996f) == 0x7bff && safe_f16_of_float(65520.0f) == 0x7c00, "largest f16");
    CHECK(safe_f16_of_float(0x1p-25f) == 0 && safe_f16_of_float(0x1.000002p-25f) == 1, "smallest f16");
    CHECK(safe_bf16_of_float(3.4028235e38f) == 0x7f80 && safe_bf16_of_float(1.00390625f) == 0x3f80, "bf16");
}

/* ---------------------------------------------------------------- tokenizer */

/* 256 bytes, then "th", "Ġth" and the added tokens <|x|> and "a b" (whose space spells no byte). */
static const char* write_tokenizer(const char* name, const char* model_extra, const char* pre_tokenizer, const char* extra)
{
    Tokenizer k;
    tokenizer_init_bytes(&k);
    JsonText t = {nullptr, 0, 0};
    json_text_add(&t, "{%s\"added_tokens\":[{\"id\":258,\"content\":\"<|x|>\",\"special\":true,\"normalized\":false},"
                  "{\"id\":260,\"content\":\"a b\",\"normalized\":true}],", extra);
    json_text_add(&t, "\"pre_tokenizer\":%s,\"model\":{%s\"vocab\":{", pre_tokenizer, model_extra);
    for (int b = 0; b < 256; b++) {
        char spelling[3] = {0};
        tokenizer_spell_byte(&k, (unsigned char)b, spelling);
        json_text_quote(&t, spelling);
        json_text_add(&t, ":%d,", b);
    }
    json_text_add(&t, "\"th\":256,\"\\u0120th\":257},\"merges\":[\"t h\",[\"\\u0120\",\"th\"]]}}");
    const char* path = in_folder(name);
    write_file(path, t.text, t.length);
    json_text_free(&t);
    return path;
}

#define BYTE_LEVEL "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true}"

static bool encodes(const Tokenizer* k, const char* text, size_t length, const int* want, size_t num_want)
{
    size_t count, decoded_length;
    int* ids = tokenizer_encode(k, text, length, &count);
    bool same = count == num_want && memcmp(ids, want, count * sizeof(int)) == 0;
    char* decoded = tokenizer_decode(k, ids, count, &decoded_length);
    same = same && decoded_length == length && memcmp(decoded, text, length) == 0;
    if (!same) for (size_t i = 0; i < count; i++) printf("%d ", ids[i]);
    free(ids);
    free(decoded);
    return same;
}

static void test_tokenizer()
{
    Tokenizer* k = tokenizer_open(write_tokenizer("tokenizer.json", "", BYTE_LEVEL, ""));
    CHECK(k->vocab_size == 261, "%d", k->vocab_size);
    int the[] = {256, 'e', 257, 'e', ' ', ' ', 257};
    CHECK(encodes(k, "the the   th", 12, the, 7), "merges");
    int added[] = {258, 'x', 260, 'c', 258};
    CHECK(encodes(k, "<|x|>xa bc<|x|>", 15, added, 5), "added tokens");
    int bytes[] = {0xC3, 0xA9, '\n', 0, 0xF0, 0x9F, 0x98, 0x80};
    CHECK(encodes(k, "\xC3\xA9\n\0\xF0\x9F\x98\x80", 8, bytes, 8), "bytes");
    CHECK(encodes(k, "", 0, bytes, 0), "nothing");
    CHECK(tokenizer_find(k, "<|x|>") == 258 && tokenizer_find(k, "th") == 256 && tokenizer_find(k, "no") == -1, "find");
    size_t length;
    CHECK(strcmp(tokenizer_token(k, 257, &length), " th") == 0 && length == 3, "token");
    CHECK(tokenizer_token(k, 259, &length)[0] == 0 && length == 0, "gap in the vocabulary");
    CHECK(dies([&] { tokenizer_token(k, 261, &length); }, "no token 261, its ids are 0 to 260"), "id too large");
    CHECK(dies([&] { tokenizer_encode(k, "ab\xFF", 3, &length); }, "at byte 2"), "not UTF-8");
    char* long_word = (char*)malloc_checked(1 << 20);         // a megabyte without a space: no quadratic time
    for (size_t i = 0; i < 1 << 20; i++) long_word[i] = "th"[i % 2];
    int* ids = tokenizer_encode(k, long_word, 1 << 20, &length);
    CHECK(length == 1 << 19 && ids[0] == 256 && ids[length - 1] == 256, "%zu tokens", length);
    free(ids);
    free(long_word);
    tokenizer_close(k);
}

static void test_tokenizer_refusals()
{
    auto refuses = [](const char* model_extra, const char* pre_tokenizer, const char* extra, const char* words) {
        const char* path = write_tokenizer("refused.json", model_extra, pre_tokenizer, extra);
        return dies([&] { tokenizer_open(path); }, words);
    };
    CHECK(refuses("\"type\":\"Unigram\",", BYTE_LEVEL, "", "\"Unigram\", a SentencePiece tokenizer"), "Unigram");
    CHECK(refuses("\"type\":\"WordPiece\",", BYTE_LEVEL, "", "\"WordPiece\"; only byte-level"), "WordPiece");
    CHECK(refuses("\"byte_fallback\":true,", BYTE_LEVEL, "", "SentencePiece BPE"), "byte_fallback");
    CHECK(refuses("\"dropout\":0.1,", BYTE_LEVEL, "", "dropout"), "dropout");
    CHECK(refuses("", "null", "", "has no pre_tokenizer"), "none");
    CHECK(refuses("", "{\"type\":\"Metaspace\"}", "", "SentencePiece"), "Metaspace");
    CHECK(refuses("", "{\"type\":\"Sequence\",\"pretokenizers\":[]}", "", "does not end with ByteLevel"), "empty");
    CHECK(refuses("", BYTE_LEVEL, "\"normalizer\":{\"type\":\"NFC\"},", "normalizer \"NFC\""), "normalizer");
    const char* split = "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(\"},"
                        "\"behavior\":\"Isolated\"}," BYTE_LEVEL "]}";
    CHECK(refuses("", split, "", "cannot be used"), "pattern");
    const char* path = in_folder("refused.json");
    const char* no_merge = "{\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"a b\"]},\"pre_tokenizer\":" BYTE_LEVEL "}";
    write_file(path, no_merge, strlen(no_merge));
    CHECK(dies([&] { tokenizer_open(path); }, "merge 0 joins \"a\" and \"b\""), "merge");
    const char* few = "{\"model\":{\"vocab\":{\"a\":0},\"merges\":[]},\"pre_tokenizer\":" BYTE_LEVEL "}";
    write_file(path, few, strlen(few));
    CHECK(dies([&] { size_t n; tokenizer_encode(tokenizer_open(path), "aba", 3, &n); }, "no token for the byte 0x62"), "b");
}

/* ---------------------------------------------------------------- modes for test_prepare.py, and main */

static void encode_mode(const char* path)
{
    Tokenizer* k = tokenizer_open(path);
    size_t length, count, decoded_length;
    while (fread(&length, 8, 1, stdin) == 1) {
        char* text = (char*)malloc_checked(length);
        ENSURE(fread(text, 1, length, stdin) == length, "the text ends too early");
        int* ids = tokenizer_encode(k, text, length, &count);
        char* decoded = tokenizer_decode(k, ids, count, &decoded_length);
        fwrite(&count, 8, 1, stdout);
        fwrite(ids, 4, count, stdout);
        fwrite(&decoded_length, 8, 1, stdout);
        fwrite(decoded, 1, decoded_length, stdout);
        free(text);
        free(ids);
        free(decoded);
    }
    tokenizer_close(k);
}

static void resave_mode(const char* in, const char* out, size_t max_bytes)
{
    SafeTensors* from = safetensors_open(in);
    SafeTensors* to = safetensors_plan(out, from->tensors, from->num_tensors, max_bytes);
    safetensors_create_files(to);
    for (size_t i = 0; i < from->num_tensors; i++) {
        const SafeTensor* t = &from->tensors[i];
        void* data = malloc_checked(t->num_bytes);
        safetensors_read_bytes(from, t, 0, t->num_elems, data);
        safetensors_write_bytes(to, safetensors_get(to, t->name), 0, t->num_elems, data);
        free(data);
    }
    safetensors_sync(to);
    safetensors_close(from);
    safetensors_close(to);
}

static void stream_mode(const char* path, bool raw, size_t T, size_t V)
{
    TokenSet set = token_set_open(path, "train", raw);
    LoaderConfig c = {"--data", 1, T, 1, 1, 0, V, 0, 0, false, true};
    Loader* l = loader_open(&c, &set);
    int* inputs = (int*)malloc_checked(2 * T * sizeof(int));
    int* targets = inputs + T;
    for (size_t i = 0; i < l->num_windows; i++) {
        loader_next(l, inputs, targets);
        for (size_t t = 0; t < T && targets[t] >= 0; t++) printf("%d ", inputs[t]);
        printf("\n");
    }
    free(inputs);
    loader_close(l);
    token_set_close(&set);
}

typedef struct {
    const char* name;
    void (*run)();
} DataTest;

static const DataTest data_tests[] = {
    {"tokens_roundtrip", test_tokens_roundtrip}, {"tokens_refusals", test_tokens_refusals},
    {"tokens_llmc_files", test_tokens_llmc_files}, {"tokens_sets", test_tokens_sets},
    {"permutation", test_permutation}, {"loader_covers", test_loader_covers}, {"loader_layouts", test_loader_layouts},
    {"loader_seek", test_loader_seek}, {"loader_end", test_loader_end}, {"loader_whole_tail", test_loader_whole_tail},
    {"loader_one_window", test_loader_one_window}, {"loader_many_shards", test_loader_many_shards},
    {"loader_refusals", test_loader_refusals}, {"json", test_json},
    {"safetensors_refusals", test_safetensors_refusals}, {"safetensors_fuzz", test_safetensors_fuzz},
    {"safetensors_ranges", test_safetensors_ranges}, {"safetensors_full_disk", test_safetensors_full_disk},
    {"float16", test_float16}, {"tokenizer", test_tokenizer}, {"tokenizer_refusals", test_tokenizer_refusals},
};

int main(int argc, char** argv)
{
    const char* mode = argc > 1 ? argv[1] : "";
    if (strcmp(mode, "--encode") == 0 && argc == 3) { encode_mode(argv[2]); return 0; }
    if (strcmp(mode, "--resave") == 0 && argc == 5) { resave_mode(argv[2], argv[3], strtoull(argv[4], nullptr, 10)); return 0; }
    if (strcmp(mode, "--stream") == 0 && argc == 6) {
        stream_mode(argv[2], atoi(argv[3]) != 0, strtoull(argv[4], nullptr, 10), strtoull(argv[5], nullptr, 10));
        return 0;
    }
    if (strcmp(mode, "--permute") == 0 && argc == 5) {
        size_t n = strtoull(argv[2], nullptr, 10), seed = strtoull(argv[3], nullptr, 10), epoch = strtoull(argv[4], nullptr, 10);
        for (size_t x = 0; x < n; x++) printf("%zu\n", (size_t)loader_permute(x, n, seed, epoch));
        return 0;
    }
    bool in_memory = access("/dev/shm", W_OK) == 0;           // hundreds of small files, each brought to the disk
    snprintf(folder, sizeof folder, "%s/test_data.XXXXXX", in_memory ? "/dev/shm" : "/tmp");
    ENSURE(mkdtemp(folder) != nullptr, "%s: cannot be created: %s", folder, strerror(errno));
    for (const DataTest& test : data_tests) {
        if (strstr(test.name, mode) == nullptr) continue;
        current_test = test.name;
        current_failed = false;
        test.run();
        if (!current_failed) printf("ok %s\n", test.name);
        num_passed += !current_failed;
        num_failed += current_failed;
    }
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    if (system(command) != 0) printf("%s is left behind\n", folder);
    printf("%d passed, %d failed\n", num_passed, num_failed);
    return num_failed != 0 || num_passed == 0;
}
