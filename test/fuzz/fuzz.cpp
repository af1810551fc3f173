/* fuzz.cpp: every parser of the program under libFuzzer, AddressSanitizer and UndefinedBehaviorSanitizer. `make fuzz`
 * builds it; the name it is called by (a link in build/fuzz) says which parser; scripts/fuzz.sh runs them all.
 *
 * A parser that refuses ends in die(), which here jumps back instead of ending the process. What it had allocated and
 * opened by then is freed and closed; what a parser that accepts does not free itself is reported as a leak. */
#include <csetjmp>
#include <sanitizer/allocator_interface.h>
#include "data/ds_config.h"
#include "data/flag_rules.h"
#include "run/fit.cuh"

// The machine code that PCRE2 makes is no memory that can be given back from outside: the same matches, slower.
#undef pcre2_jit_compile
#define pcre2_jit_compile(code, options) 0
#include "model/choices.cuh"
#include "model/generate.cuh"
#include "zero/checkpoint.h"

static char folder[64];

/* The input as a file. */
static const char* put(const char* name, const void* data, size_t size_bytes)
{
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0 || write(fd, data, size_bytes) != (ssize_t)size_bytes || close(fd) != 0) abort();
    return path;
}

// -------------------------------------------------------------------------------------------------------- parsers
/* One word of the command line a line of the input. */
static void fuzz_flags(const char* text, size_t length)
{
    enum { MAX_WORDS = 64 };
    char *copy = strndup(text, length), *words[MAX_WORDS + 1] = {(char*)"train_gpt"}, *rest = copy;
    int num_words = 1;
    while (num_words < MAX_WORDS && (words[num_words] = strsep(&rest, "\n")) != nullptr) num_words++;
    Flags flags;
    flags_parse(&flags, &flag_words_of_rows, num_words, words);
    flags_refuse(&flags);
    char buf[64];
    size_t total = 0;
    for (const FlagRow& row : flag_rows) total += strlen(flag_value(&flags, &row, buf));
    static Run run_, *run = &run_;
    run->flags = &flags;
    run->num_steps = (size_t)flags.steps + (total == 0);
    recompute_from_flag(&run->setting, flags.recompute, 12);
    run->config = step_config(run);
    if (!std::isfinite(schedule_lr(run->config, 3))) abort();
    run->dp = 3;
    batch_arithmetic(run);
    free(copy);
}

/* What is read is written again, and says the same then. */
static void fuzz_config(const char* text, size_t length)
{
    Config config, again;
    const char* path = put("config.json", text, length);
    config_read(&config, path);
    config_write(&config, path, "bf16");
    config_read(&again, path);
    if (again.V != config.V || again.L != config.L || again.context != config.context || again.eps != config.eps ||
        again.num_eos != config.num_eos || again.tied != config.tied) abort();
    free((void*)again.hf_text);
    Shard shard;
    if (config.L <= 40) {
        const int ranks[1] = {3};
        again = config;
        model_tensors(&shard, &config, &again, ranks, 1, "");
        shard_free(&shard);
    }
    free((void*)config.hf_text);
}

static void read_tensors(SafeTensors* st)
{
    for (size_t i = 0; i < st->num_tensors; i++) {
        const SafeTensor* t = &st->tensors[i];
        void* out = malloc_checked(t->num_elems * sizeof(double));
        size_t bits = safe_dtypes[(int)t->dtype].elem_bits;
        if (t->dtype == SafeDtype::F32 || bits == 16) safetensors_read_f32(st, t, 0, t->num_elems, (float*)out);
        else safetensors_read_bytes(st, t, 0, t->num_elems, out);
        free(out);
    }
    safetensors_close(st);
}

static void fuzz_safetensors(const char* text, size_t length)
{
    read_tensors(safetensors_open(put("one.safetensors", text, length)));
}

/* Two good files, and the input for their index. */
static void fuzz_index(const char* text, size_t length)
{
#define HEADER "\x38\0\0\0\0\0\0\0"
    static const char a[] = HEADER "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}  12345678";
    static const char b[] = HEADER "{\"b\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[0,8]}} 12345678";
    put("a.safetensors", a, sizeof a - 1);
    put("b.safetensors", b, sizeof b - 1);
    put("model.safetensors.index.json", text, length);
    read_tensors(safetensors_open(folder));
}

static void fuzz_shard(const char* text, size_t length)
{
    bool raw = length > 0 && text[0] == 'r';
    TokenFile file = token_file_open(put("train.bin", text, length), raw);
    int* toks = (int*)malloc_checked(file.num_toks * sizeof(int));
    char error[TOKENS_ERROR_BYTES];
    int fd = open(file.path, O_RDONLY | O_CLOEXEC);
    for (size_t first = 0; first < file.num_toks; first += file.num_toks / 3 + 1)
        token_file_read(&file, fd, first, file.num_toks - first, 50000, toks, error);
    close(fd);
    free(toks);
    token_file_close(&file);
}

/* A tokenizer.json, a zero byte, and a text for it. The second name has a corpus of the other kind. */
static void fuzz_tokenizer(const char* text, size_t length)
{
    const char* end = (const char*)memchr(text, 0, length);
    size_t json_length = end != nullptr ? (size_t)(end - text) : length;
    Tokenizer* k = tokenizer_open(put("tokenizer.json", text, json_length));
    size_t num_ids, num_bytes;
    const char* rest = end != nullptr ? end + 1 : "In the beginning";
    size_t rest_length = end != nullptr ? length - json_length - 1 : strlen(rest);
    int* ids = tokenizer_encode(k, rest, rest_length, &num_ids);
    free(tokenizer_decode(k, ids, num_ids, &num_bytes));
    free(ids);
    tokenizer_close(k);
}

/* A vocab.json, a zero byte, merges.txt, a zero byte, tokenizer_config.json. */
static void fuzz_pair(const char* text, size_t length)
{
    const char *names[] = {"vocab.json", "merges.txt", "tokenizer_config.json"};
    unlink(put("tokenizer.json", "", 0));
    for (const char* name : names) {
        const char* end = (const char*)memchr(text, 0, length);
        size_t part = end != nullptr ? (size_t)(end - text) : length;
        put(name, text, part);
        text += part + (part < length);
        length -= part + (part < length);
    }
    char file[4096];
    if (!tokenizer_locate(folder, file)) return;
    TokenizerEnds ends = tokenizer_ends(file);
    Tokenizer* k = tokenizer_open(file);
    if (ends.vocab_size != k->vocab_size || ends.begin >= k->vocab_size || ends.end >= k->vocab_size) abort();
    size_t num_ids;
    free(tokenizer_encode(k, "In the beginning", 16, &num_ids));
    tokenizer_close(k);
}

static Tokenizer* prompt_tokenizer;      // one token a byte
static Zero tiny;                        // of the model d1 on one rank; it has no memory

static void fuzz_prompts(const char* text, size_t length)
{
    static Comm comm;
    static Zero zero;
    static Model model;
    zero.comm = &comm;
    model.zero = &zero;
    model.config.V = 256;
    Lines lines = lines_open(put("prompts.jsonl", text, length));
    Generator g = {};
    g.tokenizer = prompt_tokenizer;
    g.defaults = GenerateConfig{4, 40, 0.8, 1, 1, 42};
    g.input = &lines;
    Prompt prompt;
    while (prompt_read(&prompt, &model, &g)) free(prompt.ids);
    lines_close(&lines);
}

/* A line of multiple choice, up to the tokens of each of its texts. */
static void fuzz_choices(const char* text, size_t length)
{
    enum { T = 8 };
    static Model model;
    int tokens[T], targets[T];
    model.config.V = 256;
    model.T = T;
    Choices x = {&model, prompt_tokenizer, nullptr, nullptr, nullptr};
    char* line = (char*)malloc_checked(length + 1);      // as getline() gives it: a zero byte behind
    memcpy(line, text, length);
    line[length] = 0;
    ChoiceItem item = choice_parse(line, length, "line");
    free(line);
    for (const cJSON* ending = item.first; ending != nullptr; ending = ending->next)
        if (choice_row(tokens, targets, &x, item.context, ending->valuestring, "line") > T) abort();
    cJSON_Delete(item.json);
}

/* The state.json of a checkpoint, then the same with a checksum that is right: what it says is read, the files that it
 * names are looked at, and the sums of the tensors compared with those of nothing. */
static void fuzz_state(const char* text, size_t length)
{
    put("config.json", "{}", 2);
    const char* path = put("state.json", text, length);
    cJSON* json = json_parse_file(path);
    if (cJSON_IsObject(json) && json_int_or(json, "format", 0, 0, 9, path) == 2) {
        char hex[HEX_BYTES];
        cJSON_DeleteItemFromObjectCaseSensitive(json, "check");
        json_add_string(json, "check", hex_text(json_hash(json), hex));
        JsonText right = {};
        json_text_item(&right, json, 0);
        put("state.json", right.text, right.length);
        json_text_free(&right);
    }
    cJSON_Delete(json);
    RunState state;
    uint64_t* sums = (uint64_t*)calloc(NUM_STATES * (size_t)tiny.shard->num_tensors, sizeof *sums);
    CheckpointLoad load = {&tiny, folder, true, false, true, true, sums, &state, nullptr, 0};
    load_open(&load);
    load_counters(&load);
    load_verify(&load);
    cJSON_Delete(load.json);
    free(sums);
}

/* The log of a run that is resumed at step 5. */
static void fuzz_log(const char* text, size_t length)
{
    put("log.jsonl", text, length);
    RunLog log;
    log_open(&log, folder, 5);
    log_close(&log);
}

static void fuzz_dsconfig(const char* text, size_t length)
{
    static Flags flags;
    const char* words[] = {"train_gpt", "--config", put("ds_config.json", text, length)};
    flags_parse(&flags, &flag_words_of_rows, 3, (char**)words);
    DsConfig config;
    ds_config_read(&config, &flags);
    ds_config_refuse(&config);
    ds_config_free(&config);
}

typedef struct { const char* name; void (*parse)(const char* text, size_t length); } Target;

static const Target targets[] = {
    {"flags", fuzz_flags}, {"config", fuzz_config}, {"safetensors", fuzz_safetensors}, {"index", fuzz_index},
    {"shard", fuzz_shard}, {"tokenizer", fuzz_tokenizer}, {"sentencepiece", fuzz_tokenizer},
    {"pair", fuzz_pair},
    {"prompts", fuzz_prompts}, {"choices", fuzz_choices}, {"state", fuzz_state}, {"log", fuzz_log},
    {"dsconfig", fuzz_dsconfig},
};

// ------------------------------------------------------------------------------------------------- what a refusal left
enum { MAX_BLOCKS = 1 << 16 };
static const volatile void* blocks[MAX_BLOCKS];    // of the parser under way; null: free again
static int num_blocks, first_fd;
static thread_local bool counts;                   // libFuzzer has a thread of its own, which allocates, too
static jmp_buf refused;

static void on_malloc(const volatile void* p, size_t)
{
    if (!counts) return;
    if (num_blocks == MAX_BLOCKS) __builtin_trap();
    blocks[num_blocks++] = p;
}

static void on_free(const volatile void* p)
{
    for (int i = num_blocks; counts && i-- > 0;) {
        if (blocks[i] != p) continue;
        blocks[i] = blocks[--num_blocks];
        return;
    }
}

static void back(int)
{
    longjmp(refused, 1);
}

static Tokenizer* byte_tokenizer()
{
    ByteSpelling spelling;
    byte_spelling_init(&spelling);
    JsonText t = {nullptr, 0, 0};
    json_text_add(&t, "{\"pre_tokenizer\": {\"type\": \"ByteLevel\"}, \"model\": {\"merges\": [], \"vocab\": {");
    for (int b = 0; b < 256; b++) {
        char word[3] = {};
        byte_spell(&spelling, (unsigned char)b, word);
        json_text_add(&t, b ? ", " : "");
        json_text_quote(&t, word);
        json_text_add(&t, ": %d", b);
    }
    json_text_add(&t, "}}}");
    Tokenizer* k = tokenizer_open(put("tokenizer.json", t.text, t.length));
    json_text_free(&t);
    return k;
}

static void tiny_make()
{
    static Config config, whole;
    static Shard shard;
    static Comm comm;
    const int ranks[1] = {1};
    if (!config_preset(&config, "d2", 256, 8)) abort();
    whole = config;
    model_tensors(&shard, &config, &whole, ranks, 1, "");
    comm.num_ranks = 1;
    tiny.shard = &shard;
    tiny.comm = &comm;
    tiny.optimizer = optimizer_find("adamw");
}

static const Target* target;

static void remove_folder()
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    if (system(command) != 0) perror(folder);
}

extern "C" int LLVMFuzzerInitialize(int*, char*** argv)
{
    const char* slash = strrchr((*argv)[0], '/');
    const char* name = slash != nullptr ? slash + 1 : (*argv)[0];
    for (const Target& t : targets) if (strcmp(t.name, name) == 0) target = &t;
    ENSURE(target != nullptr, "%s: no parser of this name; call a link in build/fuzz", name);
    snprintf(folder, sizeof folder, "%s", "/tmp/fuzz.XXXXXX");
    ENSURE(mkdtemp(folder) != nullptr, "%s: cannot be made: %s", folder, strerror(errno));
    atexit(remove_folder);
    prompt_tokenizer = byte_tokenizer();
    tiny_make();
    die_abort = back;
    __sanitizer_install_malloc_and_free_hooks(on_malloc, on_free);
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t length)
{
    static char nothing[1];
    const char* text = length > 0 ? (const char*)data : nothing;
    if (first_fd == 0) close(first_fd = dup(0));     // what is open now stays open
    counts = true;
    bool accepted = setjmp(refused) == 0;
    if (accepted) target->parse(text, length);
    counts = false;
    if (!accepted) {
        for (int i = 0; i < num_blocks; i++) free((void*)blocks[i]);
        close_range(first_fd, ~0u, 0);
        num_held = 0;
    }
    num_blocks = 0;
    return 0;
}
