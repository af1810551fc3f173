/* test_data_formats.h: tests of json.h, safetensors.h and tokenizer.h, run by test_data.cpp. */
#pragma once
#include "test_data.h"

/* ---------------------------------------------------------------- JSON */

static void parse(const char* text)
{
    cJSON_Delete(json_parse(text, strlen(text), "x.json"));
}

static void test_json()
{
    const char* text = "{\"n\": 12, \"x\": 1e-05, \"s\": \"a\\\"b\", \"t\": true, \"z\": null, \"N\": 3, "
                       "\"big\": 1e300, \"half\": 0.5, \"l\": [1, 2], \"o\": {}}";
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
    CHECK(dies([] { parse("{\"a\": 1,\n \"b\": tru}"); }, "line 2, column 7: not valid JSON at \"tru}\""), "tru");
    CHECK(dies([] { parse("{\"a\": [1, 2"); }, "ends too early"), "cut");
    CHECK(dies([] { parse("{\"a\": [1, 2, ]}"); }, "column 12: a comma after the last item"), "comma in a list");
    CHECK(dies([] { parse("{\"a\": 1,\n}\n"); }, "line 1, column 8: a comma after"), "comma in an object");
    CHECK(dies([] { parse("{\"a\": 1,"); }, "ends too early"), "cut behind a comma");
    CHECK(dies([] { parse(""); }, "ends too early"), "empty");
    CHECK(dies([] { parse("{} x"); }, "column 4"), "garbage after the end");
    const char* twice = "{\"o\": {\"a\": 1, \"b\": 2, \"a\": 3}}";
    file_write(in_folder("twice.json"), twice, strlen(twice));
    CHECK(dies([] { json_parse_file(in_folder("twice.json")); }, "has the key \"a\" twice in an object"), "twice");
    cJSON* user = json_parse_file_of_user(in_folder("twice.json"));
    CHECK(json_int(json_get(user, "o"), "a", 0, 9, "x") == 3, "of a user's file the last one counts");
    cJSON_Delete(user);
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

#define ENTRY(name, dtype, shape, offsets) \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"
#define ENTRY_A ENTRY("a", "F32", "[2]", "[0,8]")

static void test_safetensors_refusals()
{
    CHECK(refuses_header("{" ENTRY_A "}", 7, "the file has 7"), "data cut");
    CHECK(refuses_header("{" ENTRY_A "}", 9, "end at byte 8 of the data, the file has 9"), "data added");
    CHECK(refuses_header("{" ENTRY("a", "F32", "[3]", "[0,8]") "}", 8,
                         "needs 12 bytes as F32, its offsets give it 8"), "size");
    CHECK(refuses_header("{" ENTRY("a", "F99", "[2]", "[0,8]") "}", 8, "dtype \"F99\" is not known"), "dtype");
    CHECK(refuses_header("{" ENTRY_A "," ENTRY("b", "F32", "[2]", "[4,12]") "}", 12, "overlap at byte 4"), "overlap");
    CHECK(refuses_header("{" ENTRY_A "," ENTRY("b", "F32", "[1]", "[12,16]") "}", 16, "belong to none"), "hole");
    CHECK(refuses_header("{" ENTRY_A "," ENTRY("a", "F32", "[1]", "[8,12]") "}", 12, "two tensors \"a\""), "twice");
    CHECK(refuses_header("{" ENTRY("a", "F32", "[2]", "[8,0]") "}", 8, "bytes 8 to 0"), "backwards");
    CHECK(refuses_header("{" ENTRY("a", "F32", "[-2]", "[0,8]") "}", 8, "\"shape\" is -2"), "negative");
    CHECK(refuses_header("{" ENTRY("a", "F32", "[4294967296,4294967296]", "[0,0]") "}", 0, "its shape needs"), "2^64");
    CHECK(refuses_header("{" ENTRY("a", "F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]") "}", 4, "9 dimensions"), "dimensions");
    CHECK(refuses_header("{" ENTRY("a", "F4", "[3]", "[0,1]") "}", 1, "its shape needs"), "half a byte");
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
    const char* header = "{\"__metadata__\":{\"format\":\"pt\"}," ENTRY("a", "F32", "[2,1]", "[0,8]") ","
                         ENTRY("b.c", "BF16", "[3]", "[8,14]") "," ENTRY("d", "F16", "[]", "[14,16]") "}";
    const char* path = in_folder("fuzz.safetensors");
    size_t length = strlen(header);
    uint64_t random = 1;
    for (int round = 0; round < 600; round++) {
        char changed[512];
        strcpy(changed, header);
        for (int i = 0; i < 1 + round % 3; i++) {
            random = loader_mix(random);
            const char* telling = "0123456789-e.,:[]{}\"\\uFa ";
            char any = (char)(1 + (random >> 40) % 255);
            changed[random % length] = round % 2 ? telling[(random >> 32) % strlen(telling)] : any;
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
        size_t num_files = limit == 5000000000 ? 1 : limit == 400 ? 2 : limit == 120 ? 3 : 5;
        CHECK(ranks[0]->num_files == num_files, "%zu files at %zu", ranks[0]->num_files, limit);
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
static const char* write_tokenizer(const char* name, const char* model_extra, const char* pre_tokenizer,
                                   const char* extra)
{
    ByteSpelling bytes;
    byte_spelling_init(&bytes);
    JsonText t = {nullptr, 0, 0};
    json_text_add(&t, "{%s\"added_tokens\":[{\"id\":258,\"content\":\"<|x|>\",\"special\":true,\"normalized\":false},"
                  "{\"id\":260,\"content\":\"a b\",\"normalized\":true}],", extra);
    json_text_add(&t, "\"pre_tokenizer\":%s,\"model\":{%s\"vocab\":{", pre_tokenizer, model_extra);
    for (int b = 0; b < 256; b++) {
        char spelling[3] = {0};
        byte_spell(&bytes, (unsigned char)b, spelling);
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
    CHECK(refuses("\"type\":\"Unigram\",", BYTE_LEVEL, "", "\"Unigram\" of SentencePiece; only BPE"), "Unigram");
    CHECK(refuses("\"type\":\"WordPiece\",", BYTE_LEVEL, "", "\"WordPiece\" of BERT; only BPE"), "WordPiece");
    CHECK(refuses("\"dropout\":0.1,", BYTE_LEVEL, "", "dropout"), "dropout");
    CHECK(refuses("", "{\"type\":\"Whitespace\"}", "", "pre_tokenizer \"Whitespace\""), "Whitespace");
    CHECK(refuses("", "{\"type\":\"Metaspace\",\"replacement\":\"_\"}", "", "has \"_\" for spaces"), "Metaspace");
    CHECK(refuses("", "{\"type\":\"Sequence\",\"pretokenizers\":[" BYTE_LEVEL "," BYTE_LEVEL "]}", "", "twice"), "2");
    CHECK(refuses("", BYTE_LEVEL, "\"normalizer\":{\"type\":\"Lowercase\"},", "normalizer \"Lowercase\""), "NFC");
    CHECK(refuses("", BYTE_LEVEL, "\"post_processor\":{\"type\":\"Other\"},", "post_processor \"Other\""), "post");
    const char* split = "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(\"},"
                        "\"behavior\":\"Isolated\"}," BYTE_LEVEL "]}";
    CHECK(refuses("", split, "", "cannot be used"), "pattern");
    const char* path = in_folder("refused.json");
    const char* no_merge = "{\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"a b\"]},\"pre_tokenizer\":" BYTE_LEVEL "}";
    write_file(path, no_merge, strlen(no_merge));
    CHECK(dies([&] { tokenizer_open(path); }, "merge 0 joins \"a\" and \"b\""), "merge");
    const char* few = "{\"model\":{\"vocab\":{\"a\":0},\"merges\":[]},\"pre_tokenizer\":" BYTE_LEVEL "}";
    write_file(path, few, strlen(few));
    size_t n;
    CHECK(dies([&] { tokenizer_encode(tokenizer_open(path), "aba", 3, &n); }, "no token for \"b\" of \"aba\""), "b");
}
