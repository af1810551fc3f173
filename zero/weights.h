/* weights.h: reads and writes the weights of a model as a Hugging Face folder. Each rank reads and writes its slice of
 * its part of each tensor, row by row where that has some of the columns, through one staging buffer: no tensor is ever
 * whole in host memory. The files are those of
 * safetensors.h, single or sharded, F32, F16 or BF16; written weights are rounded from the fp32 master if there is one.
 * Whether q, k and v are one tensor or three is in the model's table: joined tensors are stored as one matrix. A folder
 * that not all ranks see is read by rank 0, which sends it to the others. Not handled: an export to such a folder. */
#pragma once
#include "data/files.h"
#include "data/model_files.h"
#include "data/safetensors.h"
#include "stages.h"

static const size_t MAX_FILE_BYTES = 5000000000;   // larger files are split

// ------------------------------------------------------------------------------------------------------------ read
/* Names without the prefix of what held the model when it was saved, if all have it. */
static void strip_prefix(SafeTensors* files)
{
    for (const char* prefix : {"_orig_mod.", "module.", "base_model.model."}) {
        const size_t n = strlen(prefix);
        bool all = files->num_tensors > 0;
        for (size_t i = 0; i < files->num_tensors; i++) all = all && strncmp(files->tensors[i].name, prefix, n) == 0;
        if (!all) continue;
        for (size_t i = 0; i < files->num_tensors; i++) {
            char* name = (char*)files->tensors[i].name;
            memmove(name, name + n, strlen(name + n) + 1);
        }
        return;
    }
}

static bool has_weights(const char* folder)
{
    char file[4200], index[4220];
    snprintf(file, sizeof file, "%s/model.safetensors", folder);
    snprintf(index, sizeof index, "%s.index.json", file);
    return file_exists(file) || file_exists(index);
}

/* A folder's, as safetensors_open: what else is there is named. */
static SafeTensors* weights_open(const char* folder)
{
    const char* foreign = has_weights(folder) ? nullptr : folder_foreign(folder);
    ENSURE(foreign == nullptr, "%s: has no model.safetensors but %s", folder, foreign);
    SafeTensors* files = safetensors_open(folder);
    strip_prefix(files);
    return files;
}

/* A tensor by HF name, with or without the prefix `transformer.` or `model.`: files of the base model have none. An
 * embedding that is tied to the head may be there under the head's name alone. */
static const SafeTensor* find_weight(const SafeTensors* files, const char* name, bool tied = false)
{
    const SafeTensor* found = safetensors_find(files, name);
    for (const char* prefix : {"transformer.", "model."})
        if (found == nullptr && strncmp(name, prefix, strlen(prefix)) == 0)
            found = safetensors_find(files, name + strlen(prefix));
    const bool is_embedding = strstr(name, "wte.weight") != nullptr || strstr(name, "embed_tokens.weight") != nullptr;
    return found == nullptr && tied && is_embedding ? safetensors_find(files, "lm_head.weight") : found;
}

/* The row of tensor t, or of the whole that it is a piece of, in a file's table. */
static SafeTensor tensor_in_file(const Tensor* t, const char* name, SafeDtype dtype)
{
    SafeTensor row = {};
    row.name = name;
    row.dtype = dtype;
    row.num_dims = t->num_dims;
    row.dims[0] = t->file_rows;
    if (t->num_dims == 2) row.dims[1] = t->file_cols;
    return row;
}

static void ensure_shape(const SafeTensors* files, const SafeTensor* st, const Tensor* t)
{
    SafeTensor wanted = tensor_in_file(t, st->name, st->dtype);
    bool same = st->num_dims == t->num_dims;
    for (int d = 0; same && d < st->num_dims; d++) same = st->dims[d] == wanted.dims[d];
    char have[96] = "", need[96] = "";
    for (int d = 0; d < st->num_dims; d++)
        snprintf(have + strlen(have), sizeof have - strlen(have), "%s%zu", d ? "x" : "", st->dims[d]);
    for (int d = 0; d < t->num_dims; d++)
        snprintf(need + strlen(need), sizeof need - strlen(need), "%s%zu", d ? "x" : "", wanted.dims[d]);
    ENSURE(same, "%s: tensor %s has shape %s, config.json needs %s", files->files[st->file_idx].path,
           st->name, have, need);
}

/* Constant buffers in older files, and the head's copy of a tied embedding. */
static bool weight_is_ignored(const char* name, bool tied)
{
    size_t n = strlen(name);
    for (const char* suffix : {".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"}) {
        size_t k = strlen(suffix);
        if (n > k && strcmp(name + n - k, suffix) == 0) return true;
    }
    return tied && strcmp(name, "lm_head.weight") == 0;
}

/* Do two tensors of a folder have the same values? */
static bool tensors_are_equal(const SafeTensors* files, const SafeTensor* a, const SafeTensor* b)
{
    float x[4096], y[4096];
    bool equal = a->num_elems == b->num_elems;
    for (size_t done = 0, n; equal && done < a->num_elems; done += n) {
        n = a->num_elems - done < 4096 ? a->num_elems - done : 4096;
        safetensors_read_f32(files, a, done, n, x);
        safetensors_read_f32(files, b, done, n, y);
        equal = memcmp(x, y, n * sizeof *x) == 0;
    }
    return equal;
}

/* Has a folder whose config.json ties the head to the embedding a head that is another matrix? Rank 0 looks. A copy of
 * the embedding, as PyTorch's files have it, is none. */
static bool weights_have_own_head(const Comm* c, const char* folder, const char* embedding)
{
    bool own = false;
    if (c->rank == 0 && has_weights(folder)) {
        SafeTensors* files = weights_open(folder);
        const SafeTensor *head = find_weight(files, "lm_head.weight"), *wte = find_weight(files, embedding);
        own = head != nullptr && wte != nullptr && !tensors_are_equal(files, head, wte);
        safetensors_close(files);
    }
    comm_broadcast_host(c, &own, sizeof own);
    return own;
}

/* Checksum of elements first, first + 1, ... of a tensor: the sum of a hash of index and bits of each, so that the sum
 * over parts does not depend on how the tensor is cut. */
static uint64_t tensor_sum(const float* values, size_t first, size_t count)
{
    uint64_t sum = 0;
    #pragma omp simd reduction(+:sum)
    for (size_t i = 0; i < count; i++) {
        unsigned word;
        memcpy(&word, &values[i], sizeof word);
        sum += state_hash_mix(first + i, word);
    }
    return sum;
}

/* By name: a model's folder may be copied to each host. */
static bool all_ranks_see(const Comm* c, const char* path)
{
    return comm_max_host(c, access(path, R_OK) != 0) == 0;
}

/* Do all ranks see this folder of rank 0's, and not another of the same name, such as an old copy of the run on a
 * host's own disk? Rank 0 writes a file whose name no other start uses, and the others look for it. Where rank 0 cannot
 * write: false. */
static bool folder_is_shared(const Comm* c, const char* folder)
{
    if (c->num_ranks == 1) return true;
    char probe[4200];
    struct timespec now = {};
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t name = ((uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec) ^ (uint64_t)getpid() << 40;
    comm_broadcast_host(c, &name, sizeof name);
    if (c->rank == 0) probes_remove(folder, 3600);
    snprintf(probe, sizeof probe, "%s/" PROBE "%016llx", folder, (unsigned long long)name);
    int fd = c->rank == 0 ? (int)TEMP_FAILURE_RETRY(open(probe, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666)) : -1;
    comm_barrier(c);
    bool shared = comm_max_host(c, c->rank == 0 ? fd < 0 : access(probe, F_OK) != 0) == 0;
    if (fd >= 0) {
        close(fd);
        unlink(probe);
    }
    return shared;
}

/* Bits of the smallest magnitude that rounds to Inf in the data type of the parameters; those of Inf and NaN are
 * larger. */
static unsigned nonfinite_bits(const Tensor* t)
{
    if (t->fp32 || FLOATX_DTYPE == Dtype::FP32) return 0x7f800000;
    return FLOATX_DTYPE == Dtype::BF16 ? 0x7f7f8000 : 0x477ff000;      // half a step beyond the largest number
}

/* Adds what `other` has found to n: the first tensor stays. */
static void nonfinite_add(NonFinite* n, NonFinite other)
{
    if (other.count == 0 || (n->count > 0 && n->tensor < other.tensor)) return;
    if (n->count == 0 || n->tensor > other.tensor) *n = NonFinite{other.tensor, 0, other.first, other.value};
    n->count += other.count;
    if (other.first > n->first) return;
    n->first = other.first;
    n->value = other.value;
}

/* Of elements first, first + 1, ... of the whole tensor that t is a part of. */
static NonFinite nonfinite_in(const Tensor* t, const float* values, size_t first, size_t count)
{
    const unsigned least = nonfinite_bits(t);
    unsigned num = 0;
    size_t i = 0;
    #pragma omp simd reduction(+:num)
    for (size_t k = 0; k < count; k++) num += (float_bits(values[k]) & 0x7fffffffu) >= least;
    while (num > 0 && (float_bits(values[i]) & 0x7fffffffu) < least) i++;
    return NonFinite{t->whole, num, first + i, num > 0 ? values[i] : 0};
}

/* After weights are read: ends the run with the first tensor that is not finite; with --allow-nonfinite it is only
 * said. Every rank says the same. */
static void nonfinite_refuse(const Zero* z, const char* folder)
{
    const Comm* c = z->comm;
    NonFinite n = {}, *all = (NonFinite*)malloc_checked(c->num_ranks * sizeof *all);
    comm_gather_host(c, all, &z->nonfinite, sizeof *all);
    for (int r = 0; r < c->num_ranks && c->rank == 0; r++) nonfinite_add(&n, all[r]);
    free(all);
    comm_broadcast_host(c, &n, sizeof n);
    if (n.count == 0) return;
    const Tensor* t = &z->shard->tensors[n.tensor];
    const bool narrows = fabsf(n.value) <= FLT_MAX;
    char what[512];
    snprintf(what, sizeof what, "tensor %s: element %zu of %zu is %g, the first of %zu that are %s%s", t->name, n.first,
             t->file_rows * t->file_cols, n.value, n.count, narrows ? "too large for " : "not finite",
             narrows ? FLOATX_NAME : "");
    if (z->allows_nonfinite) {
        if (c->rank == 0) say("weights %s: %s (--allow-nonfinite)\n", folder, what);
        return;
    }
    die("%s: %s: %s, or look at them with --allow-nonfinite", folder, what,
        narrows ? "take -p bf16 or fp32" : "take an earlier checkpoint, or fetch the file again");
}

/* A state of a tensor while it is read. files and st are null on a rank that does not see them; sum may be null. */
typedef struct StateRead {
    Zero* zero;
    int state;
    const Tensor* tensor;
    const SafeTensors* files;
    const SafeTensor* st;
    uint64_t* sum;
} StateRead;

/* Some of its elements, by their place in the whole; none: nothing more is asked for. */
typedef struct ReadRequest { Rectangle place; size_t count; } ReadRequest;

/* Elements of the whole tensor from the files to the staging buffer. */
static void elements_read(const StateRead* r, ReadRequest want)
{
    float* to = r->zero->staging;
    for (size_t done = 0, n; done < want.count; done += n, to += n) {
        const size_t first = element_index(want.place, done);
        n = elements_in_row(want.place, done, want.count - done);
        safetensors_read_f32(r->files, r->st, first, n, to);
        if (r->sum != nullptr) *r->sum += tensor_sum(to, first, n);
        if (r->state == STATE_WEIGHTS)
            nonfinite_add(&r->zero->nonfinite, nonfinite_in(r->tensor, to, first, n));
    }
}

/* The same, from rank 0 if this rank does not see the files. */
static void elements_get(const StateRead* r, ReadRequest want)
{
    const Comm* c = r->zero->comm;
    if (r->files != nullptr) return elements_read(r, want);
    comm_send_host(c, &want, sizeof want, 0);
    if (want.count > 0) comm_receive_host(c, r->zero->staging, want.count * sizeof(float), 0);
}

/* If only rank 0 sees the files: it answers the first ranks of the other groups, which have other parts of the
 * tensor. */
static void elements_serve(const StateRead* r)
{
    const Comm* c = r->zero->comm;
    const Group* group = unit_group(r->zero, r->tensor->unit);
    if (c->rank != 0 && group->rank == 0) elements_get(r, ReadRequest{});
    for (int from = 1; c->rank == 0 && from < c->num_ranks; from++) {
        if (group_rank_of(group, from) != 0) continue;
        for (ReadRequest want = {}; ; comm_send_host(c, r->zero->staging, want.count * sizeof(float), from)) {
            comm_receive_host(c, &want, sizeof want, from);
            if (want.count == 0) break;
            elements_read(r, want);
        }
    }
}

/* Reads this rank's part of a state. Each rank reads its slice; if the files are not shared, rank 0 reads for all. If
 * states are not sliced, each slice is read by one rank and broadcast to its group, so that each byte is read once.
 * Adds tensor_sum of what this rank has read to *sum. */
static void state_read(const StateRead* r, bool shared)
{
    Zero* z = r->zero;
    const Tensor* t = r->tensor;
    const Group* group = unit_group(z, t->unit);
    const bool sliced = zero_slices_states(z), sends = !sliced || !shared;
    for (int owner = 0; owner < group->num_ranks; owner++) {
        const int reader = shared ? owner : 0;
        if (!sends && owner != group->rank) continue;
        Range part = tensor_part(t, shard_slice(z->shard, t->unit, owner));
        for (size_t done = 0, n; done < part.count; done += n) {
            n = part.count - done < STAGING_ELEMS ? part.count - done : STAGING_ELEMS;
            if (reader == group->rank) elements_get(r, ReadRequest{tensor_rectangle(t, part.first + done), n});
            if (sends) group_broadcast_host(group, z->staging, n * sizeof(float), reader);
            if (!sliced || owner == group->rank)
                zero_state_from_host(z, r->state, t->unit, part.first + done, n, z->staging);
        }
    }
    if (!shared) elements_serve(r);
}

/* Reads the weights that this rank updates from the folder's model.safetensors, without gathering units; if the folder
 * is not shared, rank 0 reads. Adds tensor_sum of what this rank has read to sums (num_tensors; pieces to their first),
 * unless it is null. weights_loaded follows. Returns the bytes of tensors that it has read. */
static size_t weights_read(Zero* z, const char* folder, bool tied, bool shared, uint64_t* sums)
{
    const Shard* s = z->shard;
    const bool reads = shared || z->comm->rank == 0;
    SafeTensors* files = reads ? weights_open(folder) : nullptr;
    z->nonfinite = NonFinite{};
    for (int i = 0; i < s->num_tensors; i++) {
        const Tensor* t = &s->tensors[i];
        const SafeTensor* st = reads ? find_weight(files, t->name, tied) : nullptr;
        ENSURE(st != nullptr || !reads, "%s: has no tensor %s, which config.json needs", folder, t->name);
        if (reads) ensure_shape(files, st, t);
        watch_move(z->comm->watch, "reading a tensor", tensor_elems(t));
        const StateRead read = {z, STATE_WEIGHTS, t, files, st, sums != nullptr ? &sums[t->whole] : nullptr};
        state_read(&read, shared);
    }
    if (!reads) return 0;
    for (size_t i = 0; i < files->num_tensors; i++) {
        const char* name = files->tensors[i].name;
        bool known = weight_is_ignored(name, tied);
        for (int k = 0; !known && k < s->num_tensors; k++)
            known = find_weight(files, s->tensors[k].name) == &files->tensors[i];
        ENSURE(known, "%s: holds tensor %s, which the model of config.json does not have", files->path, name);
    }
    size_t read_bytes = files->num_read_bytes;
    safetensors_close(files);
    return read_bytes;
}

/* After weights_read, on every rank, once the files are known to be sound. */
static void weights_loaded(Zero* z, const char* folder)
{
    nonfinite_refuse(z, folder);
    zero_params_loaded(z);
}

static void weights_load(Zero* z, const char* folder, bool tied)
{
    weights_read(z, folder, tied, all_ranks_see(z->comm, folder), nullptr);
    weights_loaded(z, folder);
}

// ----------------------------------------------------------------------------------------------------------- write
static SafeDtype weights_dtype(const char* name)
{
    return strcmp(name, "bf16") == 0 ? SafeDtype::BF16 : strcmp(name, "fp16") == 0 ? SafeDtype::F16 : SafeDtype::F32;
}

/* The table of the files to write. */
static SafeTensors* weights_plan(const Shard* s, const char* path, SafeDtype dtype, size_t max_file_bytes)
{
    SafeTensor* list = (SafeTensor*)malloc_checked(s->num_tensors * sizeof *list);
    int* order = (int*)malloc_checked(s->num_tensors * sizeof(int));
    const int count = tensors_in_order(s, order);
    for (int i = 0; i < count; i++)
        list[i] = tensor_in_file(&s->tensors[order[i]], s->tensors[order[i]].name, dtype);
    SafeTensors* files = safetensors_plan(path, list, count, max_file_bytes);
    free(order);
    free(list);
    return files;
}

/* This rank's slice of every tensor, piece by piece, to `use`: to be checked or written. */
static void weights_visit_slices(Zero* z, const SafeTensors* files, const char* what,
                                 void (*use)(const SafeTensors*, const SafeTensor*, size_t first, size_t count,
                                             const float* values))
{
    const Shard* s = z->shard;
    for (int i = 0; i < s->num_tensors; i++) {
        const Tensor* t = &s->tensors[i];
        const SafeTensor* st = safetensors_get(files, t->name);
        watch_move(z->comm->watch, what, tensor_elems(t));
        Range part = tensor_part(t, unit_slice(z, t->unit));
        for (size_t done = 0; done < part.count; ) {
            size_t n = part.count - done < STAGING_ELEMS ? part.count - done : STAGING_ELEMS;
            zero_state_to_host(z, STATE_WEIGHTS, t->unit, part.first + done, n, z->staging);
            const Rectangle place = tensor_rectangle(t, part.first + done);
            for (size_t i = 0, in_row; i < n; i += in_row) {
                in_row = elements_in_row(place, i, n - i);
                use(files, st, element_index(place, i), in_row, z->staging + i);
            }
            done += n;
        }
    }
}

/* One rank creates, all write, all sync. */
static void weights_write(Zero* z, SafeTensors* files)
{
    if (z->comm->rank == 0) safetensors_create_files(files);
    comm_barrier(z->comm);
    if (z->comm->rank != 0) safetensors_open_files(files);
    weights_visit_slices(z, files, "writing a tensor", safetensors_write_f32);
    safetensors_sync(files);
    comm_barrier(z->comm);
}

/* Writes the weights alone as an HF folder: model.safetensors, then the small files, so that an unfinished folder has
 * no config.json. Nothing is made before every weight is known to fit the type. */
static void weights_export(Zero* z, const char* folder, SafeDtype dtype, size_t max_file_bytes,
                           void (*small_files)(const char* folder, void* context), void* context)
{
    char file[4200], index[4220];
    snprintf(file, sizeof file, "%s/model.safetensors", folder);
    snprintf(index, sizeof index, "%s.index.json", file);
    for (const char* old : {file, index})
        ENSURE(z->comm->rank != 0 || !file_exists(old), "%s exists and is not overwritten: --export to another folder",
               old);
    SafeTensors* files = weights_plan(z->shard, file, dtype, max_file_bytes);
    zero_params_settle(z);
    if (dtype != SafeDtype::F32) weights_visit_slices(z, files, "checking a tensor", safetensors_ensure_fits);
    comm_barrier(z->comm);
    if (z->comm->rank == 0) folder_make(folder);
    weights_write(z, files);
    safetensors_close(files);
    if (z->comm->rank == 0) {
        small_files(folder, context);
        folder_sync(folder);
    }
}
