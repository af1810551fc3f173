/* test_data.cpp: tests of data/: token shards, loader, JSON, safetensors, tokenizer. No GPU, no MPI.
 *   test_data [filter]                     runs the tests whose name holds the filter; ends with "N passed, N failed"
 *   test_data --encode TOKENIZER           for test_prepare.py: texts on stdin, ids and decoded texts on stdout, each
 *                                          led by its 8-byte length
 *   test_data --resave IN OUT MAX_BYTES    reads all tensors of IN and writes them to OUT
 *   test_data --permute N SEED EPOCH       the window order, one number a line
 *   test_data --stream PATH RAW T V        every window of a set in order, one a line
 * test_data.h has the means, test_data_formats.h the tests of JSON, safetensors and tokenizer, test_data_documents.h
 * those of documents. */
#include "test_data_documents.h"
#include "test_data_formats.h"

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
        CHECK(!token_file_read(&f, fd, 0, count, V - 1, ids, error), "id V-1 accepted");
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
            CHECK(n < 16 || num_same < n / 2, "n %zu: two epochs agree at %zu places", n, num_same);
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
    LoaderConfig c = {"--data", B, 4, G, R, rank, 1000, 0, 7, true, false, 0, false, false, -1};
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
        for (int k = 0; k < 16; k++) CHECK(seen[4 * k] == 1, "epoch %d: window %d", epoch, k);
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
            CHECK(inputs[0] == want[at + 2 * m] && inputs[4] == want[at + 2 * m + 1], "seek %zu, row %zu", at, 2 * m);
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
        LoaderConfig c = {"--val", 3, T, 1, 2, 0, 1000, 0, 0, false, true, 0, false, false, -1};
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
    CHECK(dies([&] { loader_next(loader_open(&c, &set), inputs, targets); },
               "token 3 (byte 1030) is 77, the model's vocabulary has 77 rows"), "id = V");
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
    LoaderConfig c = {"--data", 1, T, 1, 1, 0, V, 0, 0, false, true, 0, false, false, -1};
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

static bool run_mode(int argc, char** argv)
{
    auto is = [&](const char* name, int num_arguments) {
        return argc == 2 + num_arguments && strcmp(argv[1], name) == 0;
    };
    auto number = [&](int i) { return (size_t)strtoull(argv[i], nullptr, 10); };
    if (is("--encode", 1)) encode_mode(argv[2]);
    else if (is("--resave", 3)) resave_mode(argv[2], argv[3], number(4));
    else if (is("--stream", 4)) stream_mode(argv[2], number(3) != 0, number(4), number(5));
    else if (is("--permute", 3)) {
        size_t n = number(2);
        for (size_t x = 0; x < n; x++) printf("%zu\n", (size_t)loader_permute(x, n, number(3), number(4)));
    }
    else return false;
    return true;
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
    {"loader_refusals", test_loader_refusals}, {"first_fit", test_first_fit},
    {"documents_windows", test_documents_windows}, {"documents_layouts", test_documents_layouts},
    {"documents_refusals", test_documents_refusals}, {"json", test_json},
    {"safetensors_refusals", test_safetensors_refusals}, {"safetensors_fuzz", test_safetensors_fuzz},
    {"safetensors_ranges", test_safetensors_ranges}, {"safetensors_full_disk", test_safetensors_full_disk},
    {"float16", test_float16}, {"tokenizer", test_tokenizer}, {"tokenizer_refusals", test_tokenizer_refusals},
};

int main(int argc, char** argv)
{
    const char* mode = argc > 1 ? argv[1] : "";
    if (run_mode(argc, argv)) return 0;
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
