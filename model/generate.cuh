/* generate.cuh: text from a model. Prompts are continued many at a time: a sequence that ends makes room for the next
 * (continuous batching), and a step of the decoder takes one token of each running sequence together with pieces of
 * prompts, up to DECODER_ROWS rows. Keys and values of past tokens stay in a cache that the plan holds.
 *
 *   Decoder      the model's blocks on rows of any sequences, with the cache; activations of one layer only
 *   sampling     sample.h, with random numbers from a counter, mix64 of seed and position, so that a text depends on
 *                its prompt and seed, not on what runs beside it
 *   Prompt       one request and its text so far; read from a line of JSON, written as one
 *   generate_*   the loops
 *
 * A text that fills the context continues from its second half. Without the cache (--no-kv-cache, and the sample at the
 * end of a run) each token runs the whole context through model_forward, and the context slides.
 * At stage 3 all ranks run the same steps, since parameters are gathered by all; else those of the first replica, which
 * without tensor parallelism is rank 0 alone. */
#pragma once
#include "data/clock.h"
#include "data/lines.h"
#include "data/tokenizer.h"
#include "data/flags.h"
#include "passes.cuh"
#include "sample.h"
#include "zero/init.h"

enum { DECODER_ROWS = 256 };

// --------------------------------------------------------------------------------------------------------- Decoder
typedef struct Decoder {
    Model* model;
    int num_slots, T;               // sequences at once, places of each in the cache
    int rows;                       // at once
    floatX *keys, *values;          // (L,num_slots,NKV,T,HS)
    Block block;                    // of rows, the same for each layer
    int *slots, *positions;         // (rows)
    int* first_key;                 // (rows) null unless a layer has a window that is shorter than T
    int *h_tokens, *h_slots, *h_positions, *h_first_key;   // (rows) pinned
    floatX* h_logits;               // (num_slots,VP) pinned
} Decoder;

/* GEMMs take a power of two of rows, with tensor parallelism of each rank. */
static int decoder_padded(const Config* c, int N)
{
    int rows = c->tp;
    while (rows < N) rows *= 2;
    return rows;
}

/* Instead of model_plan: what the decoder needs, and what it shares with the model. */
static void decoder_plan(Decoder* d, Model* m, Plan* plan, int num_slots, int T)
{
    const Config* c = &m->config;
    *d = Decoder{};
    d->model = m;
    d->num_slots = num_slots;
    d->T = m->T = T;
    m->B = 1;
    d->rows = decoder_padded(c, num_slots > DECODER_ROWS ? num_slots : DECODER_ROWS);
    const size_t N = d->rows, own = own_rows(c, N), C = c->C;
    const size_t cache = (size_t)c->L * num_slots * T * c->NKV * c->HS;
    const Place D = Place::DEVICE, H = Place::HOST;
    const char* label = "activations";
    for (floatX** p : {&d->keys, &d->values}) plan_add(plan, "key/value cache", D, p, cache);
#define DECODER_PLAN(type, name, rows, columns, kept) \
    plan_add(plan, label, D, &d->block.name, layer_elems(rows, columns));
    BLOCK_ACTIVATIONS(DECODER_PLAN)
#undef DECODER_PLAN
    for (floatX** p : {&m->branch, &m->residual_f}) plan_add(plan, label, D, p, own * C);
    plan_add(plan, label, D, &m->norm_f, 2 * own * C);                 // the head's padding may stick out
    for (float** p : {&m->norm_f_mean, &m->norm_f_rstd}) plan_add(plan, label, D, p, own);
    if (is_rotary(c)) plan_add(plan, "rotary table", D, &m->rope, (size_t)T * c->HS);
    plan_add(plan, "logits", D, &m->logits, (size_t)decoder_padded(c, num_slots) * c->VP);
    if (c->tp > 1) model_plan_tp(m, plan, N, 2 * N, decoder_padded(c, num_slots));
    for (int** p : {&m->tokens, &d->slots, &d->positions}) plan_add(plan, "tokens", D, p, N);
    for (int** p : {&d->h_tokens, &d->h_slots, &d->h_positions}) plan_add(plan, "tokens", H, p, N);
    if (spans_needed(c, true, false, T)) {
        plan_add(plan, "tokens", D, &d->first_key, N);
        plan_add(plan, "tokens", H, &d->h_first_key, N);
    }
    plan_add(plan, "logits", H, &d->h_logits, num_slots * vocab_width(c));
}

/* The N rows of h_tokens, h_slots, h_positions through the model; logits of the rows wanted (num_wanted, ascending) to
 * h_logits. Synchronises. */
static void decoder_step(Decoder* d, int N, const int* wanted, int num_wanted)
{
    Model* m = d->model;
    const Config* c = &m->config;
    cudaStream_t stream = m->zero->compute;
    watch_move(m->zero->comm->watch, "a step of the decoder", N);
    for (int n = 0; d->first_key != nullptr && n < N; n++)
        d->h_first_key[n] = spans_first_key(nullptr, c->window, d->h_positions[n]);
    const struct { int* device; const int* host; } copies[] = {
        {m->tokens, d->h_tokens}, {d->slots, d->h_slots}, {d->positions, d->h_positions},
        {d->first_key, d->h_first_key}};
    for (const auto& copy : copies)
        if (copy.device != nullptr)
            CUDA_CHECK(cudaMemcpyAsync(copy.device, copy.host, N * sizeof(int), cudaMemcpyHostToDevice, stream));
    const Attend at = {d->num_slots, d->T, d->keys, d->values, d->slots, d->positions, d->first_key};
    Block a = d->block;
    a.below = a.residual;
    a.branch = nullptr;
    const Rows rows = {N, decoder_padded(c, N)};
    const size_t width = vocab_width(c);
    embed_forward(m, a.residual, d->positions, rows, 1);
    for (int layer = 0; layer < c->L; layer++) {
        zero_params_begin(m->zero, unit_block(c, layer));
        block_forward(m, layer, &a, &at, rows);
        a.below = a.residual_2;
        a.branch = m->branch;
    }
    final_norm(m, a.below, rows);
    const floatX* norm_f = stream_gather(m, m->norm_f, rows.padded);
    if (m->chunks_vocab) {
        head_rows_forward(m, norm_f, wanted, num_wanted);
        CUDA_CHECK(cudaMemcpyAsync(d->h_logits, logits_gather(m, num_wanted), num_wanted * width * sizeof(floatX),
                                   cudaMemcpyDeviceToHost, stream));
    }
    for (int i = m->chunks_vocab ? num_wanted : 0, run; i < num_wanted; i += run) {   // neighbouring rows go together
        for (run = 1; i + run < num_wanted && wanted[i + run] == wanted[i] + run; ) run++;
        head_forward(m, norm_f + (size_t)wanted[i] * c->C, decoder_padded(c, run));
        CUDA_CHECK(cudaMemcpyAsync(d->h_logits + i * width, logits_gather(m, run), run * width * sizeof(floatX),
                                   cudaMemcpyDeviceToHost, stream));
    }
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

// -------------------------------------------------------------------------------------------------------- sampling
/* The id after ids (num_ids), from raw logits (V of floatX); changes h_logits (V). */
static int next_from_logits(const floatX* raw, float* h_logits, int V, const int* ids, int num_ids,
                            const GenerateConfig* config)
{
    for (int i = 0; i < V; i++) h_logits[i] = load_f(raw[i]);
    penalise_repetition(h_logits, V, ids, num_ids, config->repetition_penalty);
    double u = (double)(mix64(config->seed * GOLDEN_GAMMA + num_ids) >> 11) / 9007199254740992.0;
    return sample_token(h_logits, V, config, u);
}

/* Without the cache: the last m->T of ids (num_ids) through the model; logits of the last row to raw (V),
 * pageable memory: the copy is complete when the call returns. */
static void logits_of_context(Model* m, const int* ids, int num_ids, floatX* raw)
{
    cudaStream_t stream = m->zero->compute;
    const int T = num_ids < m->T ? num_ids : m->T, rows = (int)round_up(T, m->config.tp);   // the last have no effect
    watch_move(m->zero->comm->watch, "a token without the cache", T);
    CUDA_CHECK(cudaMemcpyAsync(m->tokens, ids + (num_ids - T), T * sizeof(int), cudaMemcpyHostToDevice, stream));
    spans_documents(&m->spans, &m->config, nullptr, 1, rows, stream);
    model_forward(m, 1, rows);
    const floatX* norm_f = stream_gather(m, m->norm_f, rows);
    const int last = T - 1;
    if (m->chunks_vocab) head_rows_forward(m, norm_f, &last, 1);
    else head_forward(m, norm_f + (size_t)last * m->config.C, 1);
    CUDA_CHECK(cudaMemcpyAsync(raw, logits_gather(m, 1), m->config.V * sizeof(floatX), cudaMemcpyDeviceToHost, stream));
}

// ---------------------------------------------------------------------------------------------------------- Prompt
enum class Finish { NOT_YET, STOP, LENGTH };

typedef struct Prompt {
    int idx;                        // its place in the input
    GenerateConfig config;
    bool wants_logits;              // of the first new token, in the output
    int *ids, num_ids, num_prompt;
    int context_first;              // ids[context_first] is at position 0
    int num_cached;                 // of the context
    double begun_s, first_s;        // when it was taken up, and when it had its first token
    float* first_logits;            // (V) if wanted
    Finish finish;
} Prompt;

/* Everything a loop needs but the model. */
typedef struct Generator {
    const Tokenizer* tokenizer;     // may be null if prompts are ids
    GenerateConfig defaults;
    bool* stops;                    // (V)
    bool streams;                   // one prompt, printed as it grows
    bool speaks;                    // this rank prints
    JsonText* heard;                // what streams goes here as well; may be null
    Lines* input;                   // of JSON; null: the one prompt
    int num_read;
    // what is printed at the end
    double start_s, sum_first_s;
    size_t num_generated, num_done;
} Generator;

/* Takes ids (malloc'ed) over. */
static void prompt_begin(Prompt* p, const Model* m, int* ids, size_t num_ids, const char* from)
{
    ENSURE(num_ids > 0, "%s: needs at least one token to continue", from);
    ENSURE(num_ids < 1u << 28, "%s: %zu tokens are too many", from, num_ids);
    for (size_t i = 0; i < num_ids; i++)
        ENSURE(ids[i] >= 0 && ids[i] < m->config.V,
               "%s: token id %d, the model has %d: if the tokenizer is another model's, give --tokenizer", from, ids[i],
               m->config.V);
    p->ids = (int*)realloc(ids, (num_ids + p->config.num_tokens) * sizeof(int));
    ENSURE(p->ids != nullptr, "out of host memory for %zu tokens", num_ids + p->config.num_tokens);
    p->num_ids = p->num_prompt = (int)num_ids;
    p->begun_s = now_s();
    if (p->config.num_tokens == 0 && !p->wants_logits) p->finish = Finish::LENGTH;
}

enum class Prefix { ONCE, ALWAYS, NEVER };

/* With what the tokenizer puts before a text, such as <s>: once, unless the text has it already. */
static int* ids_from_text(const Generator* g, const char* text, Prefix prefix, const char* from, size_t* num_ids)
{
    ENSURE(g->tokenizer != nullptr, "%s: text needs a tokenizer.json beside the model or the data, or --tokenizer",
           from);
    size_t num_text, num_prefix = (size_t)g->tokenizer->num_prefix;
    int* text_ids = tokenizer_encode(g->tokenizer, text, strlen(text), &num_text);
    const bool has_it = num_text >= num_prefix &&
                        memcmp(text_ids, g->tokenizer->prefix, num_prefix * sizeof(int)) == 0;
    if (prefix == Prefix::NEVER || (prefix == Prefix::ONCE && has_it)) num_prefix = 0;
    int* ids = (int*)malloc_checked((num_prefix + num_text + 1) * sizeof(int));
    memcpy(ids, g->tokenizer->prefix, num_prefix * sizeof(int));
    memcpy(ids + num_prefix, text_ids, num_text * sizeof(int));
    free(text_ids);
    *num_ids = num_prefix + num_text;
    return ids;
}

/* The next line: {"prompt": TEXT} or {"ids": [...]}, and what differs from the command line. False at the end. */
static bool prompt_read(Prompt* p, const Model* m, Generator* g)
{
    char* line;
    size_t length;
    comm_idle(m->zero->comm, true);                  // stdin may be somebody who types
    while ((line = lines_next(g->input, &length)) != nullptr && strspn(line, " \t\r") == length) free(line);
    comm_idle(m->zero->comm, false);
    if (line == nullptr) return false;
    char from[4200];
    snprintf(from, sizeof from, "%s, prompt %d", g->input->name, g->num_read);
    cJSON* j = json_parse(line, length, from);
    *p = Prompt{};
    p->idx = g->num_read++;
    p->config = g->defaults;
    p->config.num_tokens = (int)json_int_or(j, "max_tokens", p->config.num_tokens, 0, 1 << 20, from);
    p->config.temperature = json_float_or(j, "temperature", p->config.temperature, 0, 100, from);
    p->config.top_k = (int)json_int_or(j, "top_k", p->config.top_k, 0, 1 << 30, from);
    p->config.top_p = json_float_or(j, "top_p", p->config.top_p, 0, 1, from);
    p->config.repetition_penalty = json_float_or(j, "repetition_penalty", p->config.repetition_penalty, 1e-3, 1e3,
                                                 from);
    if (json_has(j, "seed")) p->config.seed = (uint64_t)json_int64(j, "seed", from);
    p->wants_logits = json_bool_or(j, "logits", false, from);
    size_t num_ids = 0;
    int* ids;
    if (json_has(j, "ids")) {
        const cJSON *list = json_array(j, "ids", from), *item;
        ids = (int*)malloc_checked((cJSON_GetArraySize(list) + 1) * sizeof(int));
        cJSON_ArrayForEach(item, list) ids[num_ids++] = (int)json_item_int(item, "ids", 0, m->config.V - 1, from);
    } else {
        const bool asked = json_has(j, "add_special_tokens");
        const Prefix prefix = !asked ? Prefix::ONCE : json_bool(j, "add_special_tokens", from) ? Prefix::ALWAYS
                              : Prefix::NEVER;
        ids = ids_from_text(g, json_string(j, "prompt", from), prefix, from, &num_ids);
    }
    prompt_begin(p, m, ids, num_ids, from);
    cJSON_Delete(j);
    free(line);
    return true;
}

/* Bytes that are no UTF-8, as where a token has cut a character, become U+FFFD: JSON holds text. */
static char* text_as_utf8(const char* text, size_t length)
{
    char *out = (char*)malloc_checked(3 * length + 1), *at = out;
    for (size_t i = 0; i < length; ) {
        unsigned char first = (unsigned char)text[i];
        size_t n = first < 0x80 ? 1 : first >= 0xC2 && first < 0xE0 ? 2 : (first & 0xF0) == 0xE0 ? 3
                   : first >= 0xF0 && first < 0xF5 ? 4 : 0;
        bool good = n > 0 && i + n <= length;
        for (size_t k = 1; good && k < n; k++) good = ((unsigned char)text[i + k] & 0xC0) == 0x80;
        memcpy(at, good ? text + i : "\xEF\xBF\xBD", good ? n : 3);
        at += good ? n : 3;
        i += good ? n : 1;
    }
    *at = 0;
    return out;
}

/* A model may have more ids than its tokenizer, as padding: they mean nothing. */
static char* text_of_ids(const Generator* g, const int* ids, int num_ids, size_t* length)
{
    int* known = (int*)malloc_checked((num_ids + 1) * sizeof(int));
    size_t n = 0;
    for (int i = 0; i < num_ids; i++) if (ids[i] < g->tokenizer->vocab_size) known[n++] = ids[i];
    char* text = tokenizer_decode(g->tokenizer, known, n, length);
    free(known);
    return text;
}

static void prompt_write(const Prompt* p, const Model* m, const Generator* g, double end_s)
{
    cJSON* j = json_new_object();
    json_add_int(j, "index", p->idx);
    if (g->tokenizer != nullptr) {
        size_t length, begins;                       // the whole, so that it does not lose a space in the middle
        char* text = text_of_ids(g, p->ids, p->num_ids - (p->finish == Finish::STOP), &length);
        free(text_of_ids(g, p->ids, p->num_prompt, &begins));
        char* valid = text_as_utf8(text + begins, length - begins);
        json_add_string(j, "text", valid);
        free(valid);
        free(text);
    }
    cJSON* ids = json_add_array(j, "ids");
    for (int i = p->num_prompt; i < p->num_ids; i++) cJSON_AddItemToArray(ids, cJSON_CreateNumber(p->ids[i]));
    if (p->first_logits != nullptr) {
        cJSON* logits = json_add_array(j, "logits");
        for (int i = 0; i < m->config.V; i++) cJSON_AddItemToArray(logits, cJSON_CreateNumber(p->first_logits[i]));
    }
    json_add_string(j, "finish", p->finish == Finish::STOP ? "stop" : "length");
    json_add_int(j, "prompt_tokens", p->num_prompt);
    json_add_float(j, "first_token_ms", p->first_s > 0 ? (p->first_s - p->begun_s) * 1e3 : 0);
    json_add_float(j, "tok_per_s", (p->num_ids - p->num_prompt) / (end_s - p->begun_s));
    char* line = cJSON_PrintUnformatted(j);
    ENSURE(line != nullptr, "out of host memory for a line of JSON");
    printf("%s\n", line);
    fflush(stdout);
    cJSON_free(line);
    cJSON_Delete(j);
}

static void print_text(const Generator* g, const char* text, size_t length)
{
    const bool to_terminal = isatty(1) && getenv("OMPI_COMM_WORLD_RANK") == nullptr;
    if (to_terminal) say("%.*s", (int)length, text);     // a model may say control characters; a file gets all bytes
    else fwrite(text, 1, length, stdout);
    fflush(stdout);
    if (g->heard != nullptr) json_text_add(g->heard, "%.*s", (int)length, text);
}

static void print_token(const Generator* g, int id)
{
    if (id >= g->tokenizer->vocab_size) return;
    size_t length;
    const char* text = tokenizer_token(g->tokenizer, id, &length);
    print_text(g, text, length);
}

// ----------------------------------------------------------------------------------------------------------- loops
/* What comes of the logits after the prompt's last id. */
static void prompt_advance(Prompt* p, const Model* m, Generator* g, const floatX* raw, float* h_logits)
{
    int V = m->config.V;
    if (p->wants_logits && p->first_logits == nullptr) {
        p->first_logits = (float*)malloc_checked(V * sizeof(float));
        for (int i = 0; i < V; i++) p->first_logits[i] = load_f(raw[i]);
    }
    if (p->num_ids - p->num_prompt < p->config.num_tokens) {
        int id = next_from_logits(raw, h_logits, V, p->ids, p->num_ids, &p->config);
        p->ids[p->num_ids++] = id;
        g->num_generated++;
        if (p->first_s == 0) p->first_s = now_s();
        if (g->stops[id]) p->finish = Finish::STOP;
        if (g->streams && g->speaks && !g->stops[id]) print_token(g, id);
    }
    if (p->finish == Finish::NOT_YET && p->num_ids - p->num_prompt >= p->config.num_tokens) p->finish = Finish::LENGTH;
}

static void prompt_end(Prompt* p, const Model* m, Generator* g)
{
    if (g->speaks && !g->streams) prompt_write(p, m, g, now_s());
    if (g->speaks && g->streams) printf("\n");
    if (p->first_s > 0) g->sum_first_s += p->first_s - p->begun_s;
    g->num_done++;
    free(p->ids);
    free(p->first_logits);
    p->ids = nullptr;
    p->first_logits = nullptr;
}

/* Rows of prompt p into the step from row N on, at most up to `limit` rows. Returns how many. */
static int decoder_add_rows(Decoder* d, Prompt* p, int slot, int N, int limit)
{
    if (p->num_ids - p->context_first > d->T) {
        p->context_first = p->num_ids - (d->T + 1) / 2;              // the context is full: its second half stays
        p->num_cached = 0;
    }
    int num_rows = 0;
    for (int at; N + num_rows < limit && (at = p->context_first + p->num_cached) < p->num_ids; num_rows++) {
        d->h_tokens[N + num_rows] = p->ids[at];
        d->h_slots[N + num_rows] = slot;
        d->h_positions[N + num_rows] = p->num_cached++;
    }
    return num_rows;
}

/* The next prompt: `first` if there is one, else of the input, if it has a line or nothing runs meanwhile. */
static bool prompt_next(Prompt* p, const Model* m, Generator* g, Prompt** first, int num_running)
{
    if (*first != nullptr) {
        *p = **first;
        *first = nullptr;
        return true;
    }
    return g->input != nullptr && (num_running == 0 || lines_ready(g->input)) && prompt_read(p, m, g);
}

/* All prompts, up to num_slots at once. `first`: already read, or null. While a prompt runs, the next one is not waited
 * for: who types sees the answer to the first. */
static void generate_cached(Decoder* d, Generator* g, Prompt* first)
{
    Model* m = d->model;
    Prompt* prompts = (Prompt*)malloc_checked(d->num_slots * sizeof *prompts);      // by slot; free if ids is null
    int* wanted = (int*)malloc_checked(d->num_slots * sizeof(int));
    int* wanted_slots = (int*)malloc_checked(d->num_slots * sizeof(int));
    float* h_logits = (float*)malloc_checked(m->config.V * sizeof(float));
    memset(prompts, 0, d->num_slots * sizeof *prompts);
    for (;;) {
        int N = 0, num_wanted = 0, num_running = 0;
        for (int slot = 0; slot < d->num_slots; slot++) num_running += prompts[slot].ids != nullptr;
        for (int slot = 0; slot < d->num_slots; slot++) {
            Prompt* p = &prompts[slot];
            if (p->ids != nullptr) continue;
            while (p->ids == nullptr && prompt_next(p, m, g, &first, num_running))
                if (p->finish != Finish::NOT_YET) prompt_end(p, m, g);
            num_running += p->ids != nullptr;
        }
        if (num_running == 0) break;
        for (int slot = 0; slot < d->num_slots; slot++) {
            Prompt* p = &prompts[slot];
            if (p->ids == nullptr) continue;
            int later = --num_running;                               // each that follows has at least one row
            N += decoder_add_rows(d, p, slot, N, d->rows - later);
            if (p->context_first + p->num_cached < p->num_ids) continue;
            wanted[num_wanted] = N - 1;
            wanted_slots[num_wanted++] = slot;
        }
        decoder_step(d, N, wanted, num_wanted);
        for (int i = 0; i < num_wanted; i++) {
            Prompt* p = &prompts[wanted_slots[i]];
            prompt_advance(p, m, g, d->h_logits + i * vocab_width(&m->config), h_logits);
            if (p->finish != Finish::NOT_YET) prompt_end(p, m, g);
        }
    }
    free(h_logits);
    free(wanted);
    free(wanted_slots);
    free(prompts);
}

/* All prompts, one after another, without the cache. */
static void generate_uncached(Model* m, Generator* g, Prompt* first)
{
    floatX* raw = (floatX*)malloc_checked(m->config.V * sizeof(floatX));
    float* h_logits = (float*)malloc_checked(m->config.V * sizeof(float));
    Prompt p = {};
    while (prompt_next(&p, m, g, &first, 0)) {
        while (p.finish == Finish::NOT_YET) {
            logits_of_context(m, p.ids, p.num_ids, raw);
            prompt_advance(&p, m, g, raw, h_logits);
        }
        prompt_end(&p, m, g);
    }
    free(h_logits);
    free(raw);
}

/* Without `decoder` no cache. The prompt's own text is printed first when it streams. */
static void generate_all(Model* m, Decoder* decoder, Generator* g, Prompt* first)
{
    g->start_s = now_s();
    if (g->streams && g->speaks) {
        int begins = 0;                              // the prompt without what the tokenizer has put before it
        while (begins < g->tokenizer->num_prefix && first->ids[begins] == g->tokenizer->prefix[begins]) begins++;
        size_t length;
        char* text = text_of_ids(g, first->ids + begins, first->num_prompt - begins, &length);
        print_text(g, text, length);
        free(text);
    }
    if (decoder != nullptr) generate_cached(decoder, g, first);
    else generate_uncached(m, g, first);
}

/* To stderr: stdout is the text. */
static void generate_say(const Generator* g)
{
    double took_s = now_s() - g->start_s;
    if (!g->speaks || g->num_done == 0) return;
    fprintf(stderr, "%zu token%s for %zu prompt%s in %.3f s: first token after %.1f ms on average, %.1f tok/s\n",
            g->num_generated, g->num_generated == 1 ? "" : "s", g->num_done, g->num_done == 1 ? "" : "s", took_s,
            g->sum_first_s / g->num_done * 1e3, g->num_generated / took_s);
}

/* stops (V): the ids and spellings of --stop, else the model's own. */
static bool* generate_stops(const Config* c, const Tokenizer* tokenizer, const char* flag, bool given)
{
    bool* stops = (bool*)malloc_checked(c->V * sizeof(bool));
    memset(stops, 0, c->V * sizeof(bool));
    for (int i = 0; !given && i < c->num_eos; i++) stops[c->eos[i]] = true;
    while (given && *flag) {
        size_t length = strcspn(flag, ",");
        char word[256];
        snprintf(word, sizeof word, "%.*s", (int)length, flag);
        char* end;
        long id = strtol(word, &end, 10);
        if (*end != 0) id = tokenizer != nullptr ? tokenizer_find(tokenizer, word) : -1;
        ENSURE(id >= 0 && id < c->V, "--stop: '%s' is neither a token's id below %d nor its spelling", word, c->V);
        stops[id] = true;
        flag += length + (flag[length] == ',');
    }
    return stops;
}

// ----------------------------------------------------------------------------------------------------------- modes
/* What the flags say of generation, for one prompt or many. */
static Generator generator_open(const Model* m, const Flags* f, const Tokenizer* tokenizer)
{
    Generator g = {};
    g.tokenizer = tokenizer;
    g.defaults = GenerateConfig{(int)f->sample_tokens, (int)f->top_k, f->temperature, f->top_p, f->repetition_penalty,
                                (uint64_t)f->seed};
    g.stops = generate_stops(&m->config, g.tokenizer, f->stop, f->given[FLAG_stop]);
    g.speaks = m->zero->comm->rank == 0;
    return g;
}

static void generator_close(Generator* g)
{
    if (g->input != nullptr) lines_close(g->input);
    free(g->stops);
}

/* --generate and --prompts. decoder null: without the cache. tokenizer null: prompts are ids. */
static void generate(Model* m, Decoder* decoder, const Flags* f, const Tokenizer* tokenizer)
{
    Generator g = generator_open(m, f, tokenizer);
    Prompt first = {};
    Lines lines;
    if (f->given[FLAG_prompts]) {
        lines = lines_open(f->prompts);
        g.input = &lines;
        ENSURE((lines.fd > 0 && file_kind(f->prompts) == S_IFREG) || m->zero->comm->num_ranks == 1 ||
               (m->zero->stage < 3 && m->config.tp == 1), "--prompts %s: %s every rank reads the prompts: give a file",
               f->prompts, m->config.tp > 1 ? "with --tp" : "at stage 3");
    } else {
        size_t num_ids;
        int* ids = ids_from_text(&g, f->generate, Prefix::ONCE, "--generate", &num_ids);
        g.streams = true;
        first.config = g.defaults;
        prompt_begin(&first, m, ids, num_ids, "--generate");
    }
    generate_all(m, decoder, &g, g.streams ? &first : nullptr);
    generate_say(&g);
    generator_close(&g);
}

/* Prints h_ids (num_ids) as text and what follows; adds it to *heard. */
static void generate_sample(Model* m, const Flags* f, const Tokenizer* tokenizer, const int* h_ids, int num_ids,
                            JsonText* heard)
{
    Generator g = generator_open(m, f, tokenizer);
    g.heard = heard;
    Prompt first = {};
    int* ids = (int*)malloc_checked(num_ids * sizeof(int));
    memcpy(ids, h_ids, num_ids * sizeof(int));
    g.streams = true;
    first.config = g.defaults;
    prompt_begin(&first, m, ids, num_ids, "the sample");
    generate_all(m, nullptr, &g, &first);
    generator_close(&g);
}
