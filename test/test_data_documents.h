/* test_data_documents.h: tests of flags beside shards, and of windows of whole documents. */
#pragma once
#include <vector>
#include "test_data.h"

/* A shard of documents of these lengths; token i is i + base, it counts unless one less is a multiple of 3. With
 * end_tok >= 0 no flags are written, and each document ends with that token. */
static void write_documents(const char* name, const std::vector<size_t>& lengths, int base, int end_tok = -1)
{
    std::vector<int> toks;
    std::vector<unsigned char> flags;
    uint64_t header[8] = {DOCS_MAGIC | (uint64_t)1 << 32, 0, lengths.size(), 0, 0, 0, 0, 0};
    for (size_t length : lengths)
        for (size_t i = 0; i < length; i++) {
            const bool counts = (base - 1 + toks.size()) % 3 != 0;
            flags.push_back((unsigned char)((counts ? TOKEN_COUNTS : 0) | (i == 0 ? TOKEN_BEGINS : 0)));
            header[3] += counts;
            toks.push_back(end_tok >= 0 && i + 1 == length ? end_tok : base + (int)toks.size());
        }
    header[1] = toks.size();
    char path[300];
    snprintf(path, sizeof path, "%s", in_folder(name));
    TokenWriter w = token_writer_open(path, 100000);
    token_writer_put(&w, toks.data(), toks.size());
    token_writer_close(&w, 0, 0);
    if (end_tok >= 0) return;
    std::vector<unsigned char> file((unsigned char*)header, (unsigned char*)header + sizeof header);
    file.insert(file.end(), flags.begin(), flags.end());
    memcpy(path + strlen(path) - 4, ".docs", 6);
    write_file(path, file.data(), file.size());
}

static std::vector<size_t> random_lengths(size_t count, size_t most, uint64_t seed)
{
    std::vector<size_t> lengths;
    for (size_t i = 0; i < count; i++) lengths.push_back(1 + loader_mix(seed + i) % most);
    return lengths;
}

static void test_first_fit()
{
    for (uint32_t T : {1u, 7u, 64u}) {
        for (size_t n : {(size_t)1, (size_t)2, (size_t)100, (size_t)1000}) {
            std::vector<uint32_t> sizes, got(n), room;
            for (size_t i = 0; i < n; i++) sizes.push_back(1 + (uint32_t)(loader_mix(n + i) % T));
            const size_t num_windows = first_fit(got.data(), sizes.data(), n, T);
            size_t wrong = 0;
            for (size_t i = 0; i < n; i++) {
                size_t window = 0;
                while (window < room.size() && room[window] < sizes[i]) window++;
                if (window == room.size()) room.push_back(T);
                room[window] -= sizes[i];
                wrong += got[i] != window;
            }
            CHECK(wrong == 0 && num_windows == room.size(), "T %u, n %zu: %zu wrong", T, n, wrong);
        }
    }
}

/* One epoch, or what follows position `from`, as rank after rank reads it. */
typedef struct { std::vector<int> inputs, targets, positions; } Rows;

static Rows read_rows(const TokenSet* set, LoaderConfig base, size_t B, size_t G, size_t R, size_t from, size_t count)
{
    const size_t T = base.T, num = count * T;
    Rows rows = {std::vector<int>(num), std::vector<int>(num), std::vector<int>(num)};
    for (size_t r = 0; r < R; r++) {
        LoaderConfig c = base;
        c.B = B, c.G = G, c.R = R, c.rank = r;
        Loader* l = loader_open(&c, set);
        loader_seek(l, from);
        std::vector<int> in(B * T), target(B * T), position(B * T);
        for (size_t m = 0; m < count / (B * R); m++) {
            loader_next(l, in.data(), target.data(), position.data());
            const size_t at = (m / G * G * R + m % G * R + r) * B * T;
            std::copy(in.begin(), in.end(), rows.inputs.begin() + (long)at);
            std::copy(target.begin(), target.end(), rows.targets.begin() + (long)at);
            std::copy(position.begin(), position.end(), rows.positions.begin() + (long)at);
        }
        loader_close(l);
    }
    return rows;
}

/* Each pair of neighbours within a document of at most T inputs once; positions; the target counts as its flag says. */
static void check_epoch(const Rows& rows, size_t T, const std::vector<size_t>& lengths, bool cuts, int end_tok)
{
    std::vector<int> seen(100000);
    const size_t num = rows.inputs.size();
    size_t pairs = 0, wrong = 0;
    for (size_t i = 0; i < num; i++) {
        const int in = rows.inputs[i], target = rows.targets[i], position = rows.positions[i];
        if (i % T == 0) wrong += position != 0;
        else wrong += position != 0 && (position != rows.positions[i - 1] + 1 || in != rows.inputs[i - 1] + 1);
        if (in == 0) { wrong += target != -1 || position != 0; continue; }
        seen[in]++;
        pairs++;
        wrong += end_tok >= 0 ? target != in + 1 && target != end_tok
                              : target != (in % 3 == 0 ? -1 : in + 1);
    }
    size_t want = 0, begin = 1;
    for (size_t length : lengths) {
        const bool in_windows = length - 1 <= T || cuts;
        for (size_t i = 0; i + 1 < length; i++) wrong += seen[begin + i] != (in_windows ? 1 : 0);
        want += in_windows ? length - 1 : 0;
        begin += length;
    }
    CHECK(wrong == 0 && pairs == want, "T %zu cuts %d: %zu wrong, %zu of %zu inputs", T, cuts, wrong, pairs, want);
}

static LoaderConfig documents_config(size_t T, bool cuts, int end_tok)
{
    LoaderConfig c = {};
    c.flag = "--data", c.B = c.G = c.R = 1, c.T = T, c.V = 100000, c.seed = 7, c.shuffle = true;
    c.documents = true, c.cuts = cuts, c.end_tok = end_tok;
    return c;
}

static void test_documents_windows()
{
    mkdir(in_folder("docs"), 0777);
    mkdir(in_folder("ends"), 0777);
    std::vector<size_t> lengths = random_lengths(200, 40, 1), first(lengths.begin(), lengths.begin() + 120);
    size_t half = 0;
    for (size_t length : first) half += length;
    write_documents("docs/train_0.bin", first, 1);
    write_documents("docs/train_1.bin", {lengths.begin() + 120, lengths.end()}, 1 + (int)half);
    write_documents("ends/train_0.bin", lengths, 1, 99999);
    TokenSet sets[] = {token_set_open(in_folder("docs"), "train", false),
                       token_set_open(in_folder("ends"), "train", false)};
    CHECK(sets[0].has_docs && !sets[1].has_docs && sets[0].num_counted < sets[0].num_toks, "flags");
    for (const TokenSet& set : sets) {
        const int end_tok = set.has_docs ? -1 : 99999;
        for (size_t T : {(size_t)5, (size_t)25, (size_t)64})
            for (bool cuts : {false, true}) {
                LoaderConfig c = documents_config(T, cuts, end_tok);
                Loader* l = loader_open(&c, &set);
                const size_t W = l->num_windows;
                CHECK(l->num_doc_inputs <= W * T && (W - 1) * T * 9 / 11 <= l->num_doc_inputs + T, "%zu windows", W);
                CHECK((l->num_long > 0) == (T < 39), "%zu long", l->num_long);
                loader_close(l);
                check_epoch(read_rows(&set, c, 1, 1, 1, 0, W), T, lengths, cuts, end_tok);
            }
    }
    for (TokenSet& set : sets) token_set_close(&set);
}

static void test_documents_layouts()         // the stream depends on neither B, G, R nor the place of a restart
{
    mkdir(in_folder("lay"), 0777);
    write_documents("lay/train_0.bin", random_lengths(150, 20, 5), 1);
    TokenSet set = token_set_open(in_folder("lay"), "train", false);
    LoaderConfig c = documents_config(24, false, -1);
    const Rows want = read_rows(&set, c, 1, 1, 1, 0, 144);
    const size_t layouts[][3] = {{12, 1, 1}, {2, 3, 2}, {1, 3, 4}, {3, 4, 1}};
    for (auto& s : layouts)
        for (size_t from : {(size_t)0, (size_t)36, (size_t)84}) {
            const Rows got = read_rows(&set, c, s[0], s[1], s[2], from, 144 - from);
            const size_t at = from * c.T;
            bool same = std::equal(got.inputs.begin(), got.inputs.end(), want.inputs.begin() + (long)at) &&
                        std::equal(got.targets.begin(), got.targets.end(), want.targets.begin() + (long)at) &&
                        std::equal(got.positions.begin(), got.positions.end(), want.positions.begin() + (long)at);
            CHECK(same, "B %zu G %zu R %zu from %zu", s[0], s[1], s[2], from);
        }
    c.seed = 8;
    c.shuffle = false;
    const Rows other = read_rows(&set, c, 1, 1, 1, 0, 40);
    c.seed = 9;
    CHECK(read_rows(&set, c, 1, 1, 1, 0, 40).inputs != other.inputs, "equal lengths have the same order for all seeds");
    token_set_close(&set);
}

static void test_documents_refusals()
{
    mkdir(in_folder("bad"), 0777);
    write_documents("bad/train_0.bin", {10, 12}, 1);
    const char *shard = in_folder("bad/train_0.bin"), *docs = in_folder("bad/train_0.docs");
    size_t size;
    char* good = file_read(docs, &size);
    auto open_it = [&] { token_file_open(shard, false); };
    auto with = [&](size_t at, char value) {
        std::vector<char> bad(good, good + size);
        bad[at] = value;
        write_file(docs, bad.data(), size);
    };
    with(0, 'x');
    CHECK(dies(open_it, "train_0.docs: begins with 173636f78 (byte 0)"), "magic");
    with(4, 2);
    CHECK(dies(open_it, "(byte 0), the flags of a shard begin with 173636f64"), "version");
    with(8, 21);
    CHECK(dies(open_it, "is for 21 tokens (byte 8) and has 86 bytes"), "tokens");
    write_file(docs, good, size - 1);
    CHECK(dies(open_it, "has 85 bytes"), "cut short");
    write_file(docs, good, 20);
    CHECK(dies(open_it, "has 20 bytes"), "short header");
    LoaderConfig c = documents_config(16, false, -1);
    auto load = [&] {
        TokenSet set = token_set_open(shard, "train", false);
        loader_open(&c, &set);
    };
    with(64 + 5, 7);
    CHECK(dies(load, "byte 69 is 7, which has other bits than 1 and 2"), "bits");
    with(64 + 5, 2);
    CHECK(dies(load, "3 tokens begin a document, its header (byte 16) says 2"), "documents");
    write_file(docs, good, size);
    c.T = 8;
    CHECK(dies(load, "has no document of 2 to 9 tokens, 2 are longer"), "all too long");
    free(good);
}
