/* same.cuh: compares by hash, before anything is allocated, what must be equal on all ranks: the executable, the flags,
 * the data and the model. A rank that differs ends the run and names what differs. Otherwise it would hang in a
 * collective that the others do not call, or train on other text. */
#pragma once
#include "run.cuh"
#include "zero/init.h"

/* Hash of a file's length and its first `limit` bytes. */
static uint64_t file_hash(const char* path, size_t limit, uint64_t hash)
{
    const size_t PIECE_BYTES = 1 << 20;
    int fd = file_open(path);
    struct stat info;
    ENSURE(fstat(fd, &info) == 0, "%s: cannot be examined: %s", path, strerror(errno));
    char* piece = (char*)malloc_checked(PIECE_BYTES);
    for (size_t done = 0, got; done < limit; done += got) {
        size_t want = limit - done < PIECE_BYTES ? limit - done : PIECE_BYTES;
        got = pread_full(fd, piece, want, done);
        ENSURE(got == want || errno == 0, "%s: cannot be read: %s", path, strerror(errno));
        if (got == 0) break;
        hash = fnv1a64(piece, got, hash);
    }
    free(piece);
    close(fd);
    return fnv1a64(&info.st_size, sizeof info.st_size, hash);
}

/* Hash of headers and first tokens: shards of another tokenizer or in another order differ there. */
static uint64_t token_set_hash(const TokenSet* set, uint64_t hash)
{
    for (size_t i = 0; i < set->num_files; i++) {
        hash = file_hash(set->files[i].path, 4096, hash);
        if (set->files[i].docs_path != nullptr) hash = file_hash(set->files[i].docs_path, 4096, hash);
    }
    return hash;
}

static uint64_t flags_hash(const Flags* f, uint64_t hash)
{
    char buf[64];
    for (const FlagRow& row : flag_rows) {
        const char* value = flag_value(f, &row, buf);
        hash = fnv1a64(value, strlen(value) + 1, hash);
    }
    return hash;
}

static void ensure_same_start(const Run* run)
{
    const Comm* c = &run->comm;
    if (c->num_ranks == 1) return;
    const uint64_t none = fnv1a64("", 0);
    comm_ensure_same(c, file_hash("/proc/self/exe", SIZE_MAX, none), "the executable file");
    comm_ensure_same(c, flags_hash(run->flags, none), "the flags");
    comm_ensure_same(c, token_set_hash(&run->val_set, token_set_hash(&run->train_set, none)), "the token shards");
    const Shard* s = &run->model.shard;
    comm_ensure_same(c, fnv1a64(s->units, s->num_units * sizeof(Unit), none), "the model");
}
