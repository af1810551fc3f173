/* loader.h: which tokens each rank sees at each micro-step, read ahead by a thread.
 *
 *   LoaderConfig config = {...};                   sizes, this rank, seed; see the struct
 *   Loader* l = loader_open(&config, &set);        set: token_set_open of tokens.h, kept open by the caller
 *   loader_seek(l, position);                      windows used since the run began; 0 without a seek
 *   loader_next(l, inputs, targets, positions);    the next micro-batch of this rank, (B,T) each; rows that are not
 *                                                  empty are returned. Blocks until it is read, dies if it cannot be.
 *                                                  positions: of each token in its document; not without documents
 *   loader_position(l)                             windows used by the whole steps so far: what a checkpoint keeps
 *   loader_batch_windows(l, position)              windows in the global batch that begins there: less than B*G*R only
 *                                                  where the data end, 0 beyond
 *   loader_close(l)
 *   l->num_windows                                 W, in one epoch; l->num_tail_toks tokens of it are in no window
 *
 * Windows. Window k of a shard has the inputs k*T .. k*T+T-1 and the targets one further: T+1 tokens, of which
 * neighbours share one. A window is in one shard; shards follow one another in the order of the set.
 * With whole_tail (for validation) a last, shorter window takes the rest of each shard, so that every token but each
 * shard's first is a target once; without it the rest is left out. With a stride S below T as well, window k begins at
 * k*S, and of all but a shard's first only the last S targets count, those that no window before has: each is predicted
 * from at least T - S tokens.
 *
 * What counts. The target of a place is -1 where the shard's flags say that it does not count.
 *
 * Documents. With `documents` a window holds whole documents, one after another, and shards do not matter. A document
 * of n tokens has n - 1 inputs and as many targets: none is in another document. They are put into windows by first-fit
 * decreasing (packing.h), equal lengths in an order drawn from the seed, so that windows depend on seed, lengths and T
 * alone. A document with more than T inputs is left out, or with `cuts` becomes several, of T inputs each but the last.
 * One of a single token has nothing to predict and is left out. Where documents begin the flags say, or without
 * them the token end_tok, which ends each. What a window has left over is padding, input 0 and target -1, each
 * a document of its own.
 *
 * Order. p counts windows since the run began; p / W is the epoch, and window order(p % W) of the data comes at p. With
 * shuffle, order is a permutation of 0..W-1 drawn from (seed, epoch) alone: nothing of it is stored (loader_permute).
 * Of a mixture of sets each has its own windows, permutation and epochs, and of each LOADER_MIX positions in a row its
 * share, in an order drawn from the seed. With whole_tail a mixture is its sets one after another.
 * Optimizer step s holds the global batch of positions [s*B*G*R, (s+1)*B*G*R): it may begin in one epoch and end in the
 * next. Position i within it belongs to micro-step g, rank r, row b with i = (g*R + r)*B + b. So B, G and R may change
 * between two runs as long as B*G*R does not, and a changed B*G*R continues at the same position of the same stream.
 *
 * End. At limit_windows, if it is not 0, the data end: later rows are empty, inputs 0 and targets -1, which no loss
 * counts. Training for E epochs sets E*W; validation sets W, shuffle off, and its last batch is as short as it comes.
 *
 * Not handled: windows across shards, unless of documents. */
#pragma once
#include <initializer_list>
#include <pthread.h>
#include "packing.h"
#include "tokens.h"

typedef struct {
    const char* flag;            // the option that named the data, for messages: "--data"
    size_t B, T, G, R, rank;     // rows per micro-batch, tokens per row, micro-steps, ranks, this rank
    size_t V;                    // ids at or above it are refused
    size_t limit_windows;        // 0: no end
    unsigned long long seed;
    bool shuffle;
    bool whole_tail;
    size_t stride;               // with whole_tail: from window to window, 1..T; 0 is T
    bool documents;              // windows of whole documents
    bool cuts;                   // those with more than T inputs are cut and not left out
    int end_tok;                 // ends a document in shards without flags; -1: not known
} LoaderConfig;

#define LOADER_MIX 1000          // positions of which each set of a mixture has its share, to a thousandth
#define LOADER_SLOTS 4           // micro-batches read ahead
#define LOADER_OPEN_FILES 256    // shards kept open; file i uses place i % LOADER_OPEN_FILES

typedef struct {
    int* inputs;                 // (B,T)
    int* targets;                // (B,T)
    int* positions;              // (B,T) of documents; else null
    size_t num_rows;             // rows that are not empty
    bool failed;                 // then loader.error says why
} LoaderSlot;

/* A document, or a part of one: inputs first .. first + num_inputs - 1 of a file, targets one further. */
typedef struct { size_t first; uint32_t file_idx, num_inputs; } Document;

typedef struct {
    LoaderConfig config;
    const TokenSet* set;
    size_t* first_window;        // (num_files + 1) windows before each file; the last is W
    size_t num_windows;          // W
    size_t* source_window;       // (num_sources + 1) windows before each set of a mixture
    size_t* source_mix;          // (num_sources + 1) of LOADER_MIX positions those before each set
    size_t num_tail_toks;        // tokens that are neither input nor target in any window
    Document* docs;              // (num_docs) window by window
    size_t* first_doc;           // (W + 1) documents before each window
    size_t num_docs, num_doc_inputs;
    size_t num_long;             // documents with more than T inputs, left out or cut
    size_t start;                // position at the last seek
    size_t num_taken;            // micro-batches handed out since
    int* row;                    // (T+1) one window as it is read
    unsigned char* flags;        // (T+1)
    int open_fd[2][LOADER_OPEN_FILES];               // of tokens, of flags
    size_t open_file[2][LOADER_OPEN_FILES];
    char error[TOKENS_ERROR_BYTES];
    pthread_t thread;            // the fields below are shared with it, under the lock
    bool thread_runs, stop;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    size_t num_read;             // micro-batches read since the last seek; num_read - num_taken slots are full
    size_t num_seeks;            // a micro-batch that was being read during a seek is thrown away
    LoaderSlot slots[LOADER_SLOTS];
} Loader;

/* ---------------------------------------------------------------- order */

/* splitmix64 (Steele, Lea, Flood 2014): 64 well mixed bits from any 64 */
static inline uint64_t loader_mix(uint64_t x)
{
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* Where the permutation of 0..n-1 for (seed, epoch) sends x, in constant memory: a Feistel network of 8 rounds permutes
 * the numbers of 2h bits, h the least with 4^h >= n, and is applied again until the result is below n (Black & Rogaway
 * 2002, "cycle walking"). At most 4 times n numbers are walked, so 4 applications are expected at worst. In NumPy:
 *   mix as above on uint64;  key = mix(mix(seed) + epoch);  a, b = x >> h, x & (2**h - 1)
 *   for i in range(8): a, b = b, a ^ (mix(key + (i << 56) + b) >> (64 - h))
 *   x = a << h | b, repeated while x >= n */
static inline uint64_t loader_permute(uint64_t x, uint64_t n, uint64_t seed, uint64_t epoch)
{
    int h = 1;
    while (h < 32 && (uint64_t)1 << 2 * h < n) h++;
    uint64_t mask = ((uint64_t)1 << h) - 1;
    uint64_t key = loader_mix(loader_mix(seed) + epoch);
    do {
        uint64_t a = x >> h, b = x & mask;
        for (uint64_t i = 0; i < 8; i++) {
            uint64_t next = a ^ (loader_mix(key + (i << 56) + b) >> (64 - h));
            a = b;
            b = next;
        }
        x = a << h | b;
    } while (x >= n);
    return x;
}

/* Window p of the windows first .. end - 1, in epoch after epoch. */
static inline size_t loader_window_of(const Loader* l, size_t first, size_t end, size_t p)
{
    const size_t W = end - first, x = p % W;
    return first + (l->config.shuffle ? loader_permute(x, W, l->config.seed, p / W) : x);
}

/* Index in the data of the window at position p of the run. */
static inline size_t loader_window_at(const Loader* l, size_t p)
{
    if (l->set->num_sources == 1 || l->config.whole_tail) return loader_window_of(l, 0, l->num_windows, p);
    const size_t block = p / LOADER_MIX, seed = loader_mix(l->config.seed);      // not the order within a set
    const size_t x = loader_permute(p % LOADER_MIX, LOADER_MIX, seed, block);
    size_t source = 0;
    while (l->source_mix[source + 1] <= x) source++;
    const size_t share = l->source_mix[source + 1] - l->source_mix[source];
    return loader_window_of(l, l->source_window[source], l->source_window[source + 1],
                            block * share + x - l->source_mix[source]);
}

/* ---------------------------------------------------------------- reading */

/* The file of tokens, or of their flags. Fills the slot's error instead of dying: the thread must not take the ranks
 * down while the program talks to MPI. */
static inline int loader_file(Loader* l, size_t file_idx, bool of_flags)
{
    size_t place = file_idx % LOADER_OPEN_FILES;
    int* fd = &l->open_fd[of_flags][place];
    size_t* open_file = &l->open_file[of_flags][place];
    if (*fd >= 0 && *open_file == file_idx) return *fd;
    if (*fd >= 0) close(*fd);
    const TokenFile* file = &l->set->files[file_idx];
    const char* path = of_flags ? file->docs_path : file->path;
    *open_file = file_idx;
    *fd = (int)TEMP_FAILURE_RETRY(open(path, O_RDONLY | O_CLOEXEC));
    if (*fd < 0) {
        snprintf(l->error, sizeof l->error, "%s: cannot be opened any more: %s; it was there when the run began",
                 path, strerror(errno));
    }
    return *fd;
}

static inline void loader_empty_row(int* inputs, int* targets, size_t from, size_t T)
{
    for (size_t t = from; t < T; t++) {
        inputs[t] = 0;
        targets[t] = -1;
    }
}

static inline size_t loader_stride(const LoaderConfig* c) { return c->stride > 0 ? c->stride : c->T; }

/* num_inputs inputs from token `first` of a file on, and their targets. */
static inline bool loader_read_toks(Loader* l, size_t file_idx, size_t first, size_t num_inputs, int* inputs,
                                    int* targets)
{
    const TokenFile* file = &l->set->files[file_idx];
    int fd = loader_file(l, file_idx, false);
    if (fd < 0 || !token_file_read(file, fd, first, num_inputs + 1, l->config.V, l->row, l->error)) return false;
    for (size_t t = 0; t < num_inputs; t++) {
        inputs[t] = l->row[t];
        targets[t] = l->row[t + 1];
    }
    if (file->docs_path == nullptr) return true;
    fd = loader_file(l, file_idx, true);
    if (fd < 0 || !token_docs_read(file, fd, first, num_inputs + 1, l->flags, l->error)) return false;
    for (size_t t = 0; t < num_inputs; t++)
        if ((l->flags[t + 1] & TOKEN_COUNTS) == 0) targets[t] = -1;
    return true;
}

static inline bool loader_read_docs(Loader* l, size_t window_idx, int* inputs, int* targets, int* positions)
{
    size_t at = 0, T = l->config.T;
    for (size_t d = l->first_doc[window_idx]; d < l->first_doc[window_idx + 1]; d++) {
        const Document* doc = &l->docs[d];
        if (!loader_read_toks(l, doc->file_idx, doc->first, doc->num_inputs, inputs + at, targets + at)) return false;
        for (size_t t = 0; t < doc->num_inputs; t++) positions[at + t] = (int)t;
        at += doc->num_inputs;
    }
    loader_empty_row(inputs, targets, at, T);
    memset(positions + at, 0, (T - at) * sizeof *positions);
    return true;
}

static inline bool loader_read_window(Loader* l, size_t window_idx, int* inputs, int* targets)
{
    size_t low = 0, high = l->set->num_files;         // the file with first_window[low] <= window_idx < [low + 1]
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (l->first_window[middle] <= window_idx) low = middle;
        else high = middle;
    }
    const TokenFile* file = &l->set->files[low];
    size_t T = l->config.T, stride = loader_stride(&l->config), first = (window_idx - l->first_window[low]) * stride;
    size_t num_targets = file->num_toks - 1 - first < T ? file->num_toks - 1 - first : T;
    if (!loader_read_toks(l, low, first, num_targets, inputs, targets)) return false;
    for (size_t t = 0; first > 0 && t < T - stride; t++) targets[t] = -1;       // a window before has counted them
    loader_empty_row(inputs, targets, num_targets, T);
    return true;
}

/* Micro-batch m since the position `start`, as this rank sees it. */
static inline void loader_read_slot(Loader* l, LoaderSlot* slot, size_t start, size_t G, size_t m)
{
    const LoaderConfig* c = &l->config;
    size_t batch_start = start + m / G * (c->B * G * c->R);
    size_t first = batch_start + (m % G * c->R + c->rank) * c->B;
    slot->num_rows = 0;
    slot->failed = false;
    for (size_t b = 0; b < c->B; b++) {
        int* inputs = slot->inputs + b * c->T;
        int* targets = slot->targets + b * c->T;
        int* positions = c->documents ? slot->positions + b * c->T : nullptr;
        if (c->limit_windows != 0 && first + b >= c->limit_windows) {
            loader_empty_row(inputs, targets, 0, c->T);
            if (c->documents) memset(positions, 0, c->T * sizeof *positions);
            continue;
        }
        const size_t window_idx = loader_window_at(l, first + b);
        if (!(c->documents ? loader_read_docs(l, window_idx, inputs, targets, positions)
                           : loader_read_window(l, window_idx, inputs, targets))) {
            slot->failed = true;
            return;
        }
        slot->num_rows++;
    }
}

static inline void* loader_thread(void* argument)
{
    Loader* l = (Loader*)argument;
    pthread_mutex_lock(&l->lock);
    for (;;) {
        while (!l->stop && l->num_read - l->num_taken == LOADER_SLOTS) pthread_cond_wait(&l->changed, &l->lock);
        if (l->stop) break;
        size_t seek = l->num_seeks, start = l->start, G = l->config.G, m = l->num_read;
        LoaderSlot* slot = &l->slots[m % LOADER_SLOTS];
        pthread_mutex_unlock(&l->lock);
        loader_read_slot(l, slot, start, G, m);
        pthread_mutex_lock(&l->lock);
        if (seek != l->num_seeks) continue;           // read for a position that nobody wants any more
        l->num_read++;
        pthread_cond_broadcast(&l->changed);
        while (slot->failed && !l->stop && seek == l->num_seeks) pthread_cond_wait(&l->changed, &l->lock);
    }
    pthread_mutex_unlock(&l->lock);
    return nullptr;
}

/* ---------------------------------------------------------------- the caller's side */

static inline size_t loader_file_windows(const TokenFile* file, const LoaderConfig* c)
{
    if (file->num_toks < 2) return 0;
    size_t num_targets = file->num_toks - 1, stride = loader_stride(c);
    if (!c->whole_tail) return num_targets / c->T;
    return num_targets <= c->T ? 1 : 1 + (num_targets - c->T + stride - 1) / stride;
}

static inline void loader_count_windows(Loader* l)
{
    const LoaderConfig* c = &l->config;
    l->first_window = (size_t*)malloc_checked((l->set->num_files + 1) * sizeof(size_t));
    size_t longest_toks = 0;
    for (size_t i = 0; i < l->set->num_files; i++) {
        const TokenFile* file = &l->set->files[i];
        for (size_t s = 0; s < l->set->num_sources; s++)
            if (l->set->sources[s].first_file == i) l->source_window[s] = l->num_windows;
        size_t windows = loader_file_windows(file, c);
        size_t used = windows == 0 ? 0 : windows * c->T + 1;
        l->first_window[i] = l->num_windows;
        l->num_windows += windows;
        l->num_tail_toks += file->num_toks > used ? file->num_toks - used : 0;
        if (file->num_toks > longest_toks) longest_toks = file->num_toks;
    }
    l->first_window[l->set->num_files] = l->num_windows;
    ENSURE(l->num_windows > 0, "%s: %s%s has %zu tokens, one window of --seq-len %zu needs %zu in one file; give more "
           "data, or a --seq-len of at most %zu", c->flag, l->set->files[0].path,
           l->set->num_files > 1 ? " and the other shards: the longest" : "", longest_toks, c->T,
           c->whole_tail ? 2 : c->T + 1, longest_toks > 1 ? longest_toks - 1 : 0);
}

/* ---------------------------------------------------------------- documents */

/* Documents as they are found; the arrays grow. */
typedef struct { Document* docs; size_t num_docs, num_long, room; } DocumentList;

static inline void documents_put(DocumentList* list, Document doc)
{
    if (list->num_docs == list->room) {
        list->room = list->room > 0 ? 2 * list->room : 1024;
        list->docs = (Document*)realloc(list->docs, list->room * sizeof *list->docs);
        ENSURE(list->docs != nullptr, "out of host memory for a list of %zu documents", list->room);
    }
    list->docs[list->num_docs++] = doc;
}

/* The document of tokens [begin, end) of a file. */
static inline void documents_add(DocumentList* list, const LoaderConfig* c, size_t file_idx, size_t begin, size_t end)
{
    size_t num_inputs = end - begin - 1;
    if (num_inputs == 0) return;
    list->num_long += num_inputs > c->T;
    if (num_inputs > c->T && !c->cuts) return;
    for (; num_inputs > 0; begin += c->T) {
        const size_t part = num_inputs < c->T ? num_inputs : c->T;
        documents_put(list, Document{begin, (uint32_t)file_idx, (uint32_t)part});
        num_inputs -= part;
    }
}

#define DOCUMENTS_READ_TOKS ((size_t)1 << 18)        // a piece of a file in which documents are looked for

/* Reads a shard from end to end: its flags, or its tokens. */
static inline void documents_find(DocumentList* list, Loader* l, size_t file_idx)
{
    const TokenFile* file = &l->set->files[file_idx];
    const bool has_flags = file->docs_path != nullptr;
    int* toks = (int*)malloc_checked(DOCUMENTS_READ_TOKS * sizeof *toks);
    unsigned char* flags = (unsigned char*)toks;
    int fd = loader_file(l, file_idx, has_flags);
    ENSURE(fd >= 0, "%s", l->error);
    size_t begin = 0, num_begun = 0, num_counted = 0;
    for (size_t done = 0, count; done < file->num_toks; done += count) {
        count = file->num_toks - done < DOCUMENTS_READ_TOKS ? file->num_toks - done : DOCUMENTS_READ_TOKS;
        bool read = has_flags ? token_docs_read(file, fd, done, count, flags, l->error)
                              : token_file_read(file, fd, done, count, l->config.V, toks, l->error);
        ENSURE(read, "%s", l->error);
        for (size_t i = 0; i < count; i++) {
            const bool begins = has_flags && (flags[i] & TOKEN_BEGINS) != 0;
            const bool ends = !has_flags && toks[i] == l->config.end_tok;
            const size_t border = done + i + ends;
            num_begun += begins;
            num_counted += has_flags && (flags[i] & TOKEN_COUNTS) != 0;
            if ((!begins && !ends) || border == begin) continue;
            documents_add(list, &l->config, file_idx, begin, border);
            begin = border;
        }
    }
    if (begin < file->num_toks) documents_add(list, &l->config, file_idx, begin, file->num_toks);
    ENSURE(!has_flags || num_begun == file->num_docs, "%s: %zu tokens begin a document, its header (byte 16) says %zu; "
           "make the shard again with data/prepare.py", file->docs_path, num_begun, file->num_docs);
    ENSURE(!has_flags || num_counted == file->num_counted, "%s: %zu tokens count, its header (byte 24) says %zu; make "
           "the shard again with data/prepare.py", file->docs_path, num_counted, file->num_counted);
    free(toks);
}

/* Sorts by falling length, equal ones in an order drawn from the seed. */
static inline Document* documents_sort(const DocumentList* list, const LoaderConfig* c)
{
    size_t* place = (size_t*)malloc_checked((c->T + 2) * sizeof *place);       // of the next document of each length
    memset(place, 0, (c->T + 2) * sizeof *place);
    for (size_t d = 0; d < list->num_docs; d++) place[list->docs[d].num_inputs - 1]++;
    for (size_t length = c->T; length-- > 0;) place[length] += place[length + 1];   // those that are at least as long
    Document* sorted = (Document*)malloc_checked(list->num_docs * sizeof *sorted);
    for (size_t i = 0; i < list->num_docs; i++) {
        const Document* doc = &list->docs[loader_permute(i, list->num_docs, c->seed, UINT64_MAX)];
        sorted[place[doc->num_inputs]++] = *doc;
    }
    free(place);
    return sorted;
}

/* Puts the documents of a set into windows, behind those of the sets before. */
static inline void loader_pack_source(Loader* l, const TokenSource* source)
{
    DocumentList list = {};
    for (size_t i = 0; i < source->num_files; i++) documents_find(&list, l, source->first_file + i);
    const size_t n = list.num_docs, T = l->config.T, W = l->num_windows;
    ENSURE(n > 0, "%s: %s has no document of 2 to %zu tokens, %zu are longer; give a larger --seq-len, or --too-long "
           "cut", l->config.flag, source->name, T + 1, list.num_long);
    ENSURE(n < UINT32_MAX, "%s: has %zu documents, at most %u are packed", source->name, n, UINT32_MAX - 1);
    Document* sorted = documents_sort(&list, &l->config);
    free(list.docs);
    uint32_t* sizes = (uint32_t*)malloc_checked(2 * n * sizeof *sizes), *window_of = sizes + n;
    for (size_t d = 0; d < n; d++) {
        sizes[d] = sorted[d].num_inputs;
        l->num_doc_inputs += sizes[d];
    }
    l->num_windows += first_fit(window_of, sizes, n, (uint32_t)T);
    l->first_doc = (size_t*)realloc(l->first_doc, (l->num_windows + 2) * sizeof *l->first_doc);
    l->docs = (Document*)realloc(l->docs, (l->num_docs + n) * sizeof *l->docs);
    ENSURE(l->first_doc != nullptr && l->docs != nullptr, "out of host memory for %zu documents", l->num_docs + n);
    size_t* first_doc = l->first_doc + W;
    memset(first_doc, 0, (l->num_windows - W + 2) * sizeof *first_doc);
    for (size_t d = 0; d < n; d++) first_doc[window_of[d] + 2]++;
    first_doc[0] = first_doc[1] = l->num_docs;
    for (size_t w = 2; w < l->num_windows - W + 2; w++) first_doc[w] += first_doc[w - 1];
    for (size_t d = 0; d < n; d++) l->docs[first_doc[window_of[d] + 1]++] = sorted[d];         // moves each end up
    l->num_docs += n;
    l->num_long += list.num_long;
    free(sizes);
    free(sorted);
}

static inline void loader_pack(Loader* l)
{
    const TokenSet* set = l->set;
    ENSURE(set->num_files <= UINT32_MAX, "%s: %zu shards", l->config.flag, set->num_files);
    for (size_t s = 0; s < set->num_sources; s++) {
        l->source_window[s] = l->num_windows;
        loader_pack_source(l, &set->sources[s]);
    }
}

/* Shares in thousandths: where each set begins and ends among them is rounded, so that each is off by one at most. */
static inline void loader_mix_shares(Loader* l)
{
    const TokenSet* set = l->set;
    double sum = 0;
    for (size_t s = 0; s < set->num_sources; s++) {
        sum += set->sources[s].share;
        l->source_mix[s + 1] = (size_t)(sum * LOADER_MIX + 0.5);
        ENSURE(l->source_mix[s + 1] > l->source_mix[s], "%s: the share of %s is below a thousandth: raise it, or leave "
               "the set out", l->config.flag, set->sources[s].name);
        ENSURE(l->source_window[s + 1] > l->source_window[s], "%s: %s has no window of --seq-len %zu; give more data, "
               "or leave the set out", l->config.flag, set->sources[s].name, l->config.T);
    }
}

/* Host memory that documents take, in bytes. */
static inline size_t loader_docs_bytes(const Loader* l)
{
    return !l->config.documents ? 0 : l->num_docs * sizeof *l->docs + (l->num_windows + 2) * sizeof *l->first_doc;
}

static inline void loader_ensure_vocabulary(const Loader* l)
{
    for (size_t i = 0; i < l->set->num_files; i++) {
        const TokenFile* file = &l->set->files[i];
        ENSURE(file->vocab_size <= l->config.V, "%s: was made with a vocabulary of %zu ids (byte 16), the model has "
               "%zu rows; make it again with the model's tokenizer, or choose the model to fit", file->path,
               file->vocab_size, l->config.V);
    }
}

static inline Loader* loader_open(const LoaderConfig* config, const TokenSet* set)
{
    ENSURE(config->B > 0 && config->T > 0 && config->G > 0 && config->R > 0 && config->rank < config->R,
           "%s: %zu rows of %zu tokens, %zu micro-steps, rank %zu of %zu: all must be at least 1", config->flag,
           config->B, config->T, config->G, config->rank, config->R);
    Loader* l = (Loader*)malloc_checked(sizeof *l);
    memset(l, 0, sizeof *l);
    l->config = *config;
    l->set = set;
    for (int* fds : l->open_fd)
        for (int i = 0; i < LOADER_OPEN_FILES; i++) fds[i] = -1;
    for (size_t** table : {&l->source_window, &l->source_mix}) {
        *table = (size_t*)malloc_checked((set->num_sources + 1) * sizeof **table);
        memset(*table, 0, (set->num_sources + 1) * sizeof **table);
    }
    loader_ensure_vocabulary(l);
    if (config->documents) loader_pack(l);
    else loader_count_windows(l);
    l->source_window[set->num_sources] = l->num_windows;
    loader_mix_shares(l);
    size_t slot_bytes = config->B * config->T * sizeof(int);
    for (LoaderSlot& slot : l->slots) {
        slot.inputs = (int*)malloc_checked(slot_bytes);
        slot.targets = (int*)malloc_checked(slot_bytes);
        if (config->documents) slot.positions = (int*)malloc_checked(slot_bytes);
    }
    l->row = (int*)malloc_checked((config->T + 1) * sizeof(int));
    l->flags = (unsigned char*)malloc_checked(config->T + 1);
    pthread_mutex_init(&l->lock, nullptr);
    pthread_cond_init(&l->changed, nullptr);
    return l;
}

/* With G micro-steps a step from there on, and the data's end at limit_windows; 0: as before. */
static inline void loader_seek(Loader* l, size_t position, size_t G = 0, size_t limit_windows = 0)
{
    pthread_mutex_lock(&l->lock);
    l->start = position;
    if (G > 0) l->config.G = G;
    if (limit_windows > 0) l->config.limit_windows = limit_windows;
    l->num_read = 0;
    l->num_taken = 0;
    l->num_seeks++;
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->lock);
}

static inline size_t loader_next(Loader* l, int* inputs, int* targets, int* positions = nullptr)
{
    if (!l->thread_runs) {
        int result = pthread_create(&l->thread, nullptr, loader_thread, l);
        ENSURE(result == 0, "%s: the thread that reads ahead cannot be started: %s", l->config.flag, strerror(result));
        l->thread_runs = true;
    }
    pthread_mutex_lock(&l->lock);
    while (l->num_read == l->num_taken) pthread_cond_wait(&l->changed, &l->lock);
    const LoaderSlot* slot = &l->slots[l->num_taken % LOADER_SLOTS];
    pthread_mutex_unlock(&l->lock);
    ENSURE(!slot->failed, "%s", l->error);
    size_t slot_bytes = l->config.B * l->config.T * sizeof(int), num_rows = slot->num_rows;
    memcpy(inputs, slot->inputs, slot_bytes);         // the thread leaves a full slot alone
    memcpy(targets, slot->targets, slot_bytes);
    if (positions != nullptr) memcpy(positions, slot->positions, slot_bytes);
    pthread_mutex_lock(&l->lock);
    l->num_taken++;
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->lock);
    return num_rows;
}

static inline size_t loader_batch_windows(const Loader* l, size_t position)
{
    size_t batch = l->config.B * l->config.G * l->config.R, limit = l->config.limit_windows;
    if (limit == 0 || limit >= position + batch) return batch;
    return limit > position ? limit - position : 0;
}

static inline size_t loader_position(const Loader* l)
{
    size_t position = l->start + l->num_taken / l->config.G * (l->config.B * l->config.G * l->config.R);
    size_t limit = l->config.limit_windows;
    return limit != 0 && position > limit ? (l->start > limit ? l->start : limit) : position;
}

static inline void loader_close(Loader* l)
{
    if (l->thread_runs) {
        pthread_mutex_lock(&l->lock);
        l->stop = true;
        pthread_cond_broadcast(&l->changed);
        pthread_mutex_unlock(&l->lock);
        pthread_join(l->thread, nullptr);
    }
    for (const int* fds : l->open_fd) {
        for (int i = 0; i < LOADER_OPEN_FILES; i++)
            if (fds[i] >= 0) close(fds[i]);
    }
    for (const LoaderSlot& slot : l->slots)
        for (int* array : {slot.inputs, slot.targets, slot.positions}) free(array);
    pthread_mutex_destroy(&l->lock);
    pthread_cond_destroy(&l->changed);
    free(l->row);
    free(l->flags);
    free(l->first_window);
    free(l->docs);
    free(l->first_doc);
    free(l->source_window);
    free(l->source_mix);
    free(l);
}
