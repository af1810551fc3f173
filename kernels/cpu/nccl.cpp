/* nccl.cpp: NCCL on MPI, for the CPU and emulated builds. One process a rank.
 * A collective is a row of stages over chunks of the data; two stages are in flight at a time. In each chunk every rank
 * owns a piece (of a broadcast or a reduction to one rank, only the root does):
 *   EXCHANGE   every rank sends each owner its piece; the owner adds what came, in rank order
 *   SHARE      every owner sends its piece to all
 * A reduce-scatter is EXCHANGE, an all-gather SHARE, an all-reduce both, chunk by chunk. So a rank sends the bytes that
 * a ring would: (R-1)/R of the data for each, and all-reduce = reduce-scatter + all-gather to the last bit.
 * Before its data each collective exchanges a header: ranks that call different collectives end with a message that
 * says so, not with a hang. Work of one communicator runs in the order of the host's calls, as NCCL has it.
 * In the emulated build the input is read when the collective starts and the output written when it completes; between
 * the two the output is NaN, so that who does not wait for it sees that. NO_MPI: one rank, all of this is copies.
 * Ranks that share a GPU (share_gpu.h) stage each collective through pinned memory: nccl_staged.h. */
#include <cstdlib>
#include <cstring>
#include <nccl.h>
#include "data/clock.h"
#include "device.h"
#include "mpi_check.h"
#include "reduce.h"
#include "share_gpu.h"
#include "stream.h"
#ifdef DEVICE_EMU
#include "kernels/emu/emu_check.h"
#include "kernels/emu/host_mpi.h"
#endif

static const char* const collective_names[NUM_COLLECTIVES] = {
    "ncclAllReduce", "ncclReduceScatter", "ncclAllGather", "ncclBroadcast", "ncclReduce", "ncclSend/ncclRecv"};

static const size_t SLOT_BYTES = 256 << 10;          // of one peer's contribution to one chunk; stays in the cache
static const size_t MESSAGE_BYTES = 256 << 20;       // the most in one message where no slot is needed

size_t nccl_workspace_bytes(int num_ranks) { return num_ranks > 1 ? 2 * (size_t)num_ranks * SLOT_BYTES : 0; }

struct Header { int kind, type, op, root; uint64_t count, call_idx; };   // call_idx counts collectives only

struct Transfer { bool is_send; char* p; size_t size_bytes; int peer; Transfer* next; };

struct Work {
    Header header;
    ncclComm* comm;
    const char* send;
    char* recv;
    Transfer* transfers;                             // of a group of ncclSend and ncclRecv
    uint64_t place;                                  // in the order of the host's calls on the communicator
    bool posted, headers_match;
    size_t num_stages, num_finished;
    unsigned num_tries;
#ifdef DEVICE_EMU
    char *device_recv, *snapshot;
    size_t recv_bytes;
#endif
};

struct ncclComm {
    int rank, num_ranks;
    uint64_t num_issued, num_completed, num_collectives;
    uint64_t wire_bytes[NUM_COLLECTIVES];
#ifndef NO_MPI
    MPI_Comm mpi;
    char* workspace;
    const void** inputs;                             // (num_ranks) what a reduction adds
    Header* headers;                                 // (num_ranks)
    MPI_Request* header_requests;                    // (2*num_ranks)
    MPI_Request* stage_requests[2];                  // (2*num_ranks) each, more for transfers
    int num_header_requests, num_stage_requests[2], requests_capacity;
#endif
};

uint64_t nccl_wire_bytes(const ncclComm* comm, Collective kind) { return comm->wire_bytes[(int)kind]; }

static size_t bytes_of(const Work* w, size_t elems) { return elems * nccl_type_bytes((ncclDataType_t)w->header.type); }
static Collective kind_of(const Work* w) { return (Collective)w->header.kind; }

/* Elements of the arguments, as NCCL defines them: count is the part of one rank where there are parts. */
static size_t send_elems(const Work* w)
{
    return kind_of(w) == Collective::REDUCE_SCATTER ? w->header.count * (size_t)w->comm->num_ranks : w->header.count;
}
static size_t recv_elems(const Work* w)
{
    return kind_of(w) == Collective::ALL_GATHER ? w->header.count * (size_t)w->comm->num_ranks : w->header.count;
}

static void transfers_free(Work* w)
{
    while (w->transfers != nullptr) {
        Transfer* next = w->transfers->next;
        free(w->transfers);
        w->transfers = next;
    }
}

#ifndef NO_MPI

static const int TAG_HEADER = 1, TAG_DATA = 2, TAG_TRANSFER = 3;

/* ---- pieces and stages */

struct Piece { size_t begin, count; };               // elements

static size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

static bool needs_slots(const Work* w)
{
    return kind_of(w) != Collective::ALL_GATHER && kind_of(w) != Collective::BROADCAST;
}
static size_t piece_elems(const Work* w) { return (needs_slots(w) ? SLOT_BYTES : MESSAGE_BYTES) / bytes_of(w, 1); }

static size_t num_chunks(const Work* w)
{
    size_t per_chunk = piece_elems(w);
    if (kind_of(w) == Collective::ALL_REDUCE) per_chunk *= (size_t)w->comm->num_ranks;
    return ceil_div(w->header.count, per_chunk);
}

/* What rank owns of a chunk. `begin` counts from the start of the whole data. */
static Piece piece_of(const Work* w, size_t chunk, int rank)
{
    size_t count = w->header.count, len = piece_elems(w);
    Collective kind = kind_of(w);
    if (kind == Collective::ALL_REDUCE) {
        size_t num_ranks = (size_t)w->comm->num_ranks, chunk_begin = chunk * num_ranks * len;
        size_t chunk_len = size_min(num_ranks * len, count - chunk_begin), share = ceil_div(chunk_len, num_ranks);
        size_t begin = size_min((size_t)rank * share, chunk_len);
        return {chunk_begin + begin, size_min(share, chunk_len - begin)};
    }
    Piece piece = {chunk * len, size_min(len, count - chunk * len)};
    if (kind == Collective::REDUCE_SCATTER || kind == Collective::ALL_GATHER) piece.begin += (size_t)rank * count;
    else if (rank != w->header.root) piece.count = 0;
    return piece;
}

enum class Stage { EXCHANGE, SHARE, NOTHING };

/* An all-reduce goes E0 E1 S0 E2 S1 ...: a chunk is shared while the next one is exchanged, after its own sum. */
static Stage stage_of(const Work* w, size_t stage, size_t* chunk)
{
    *chunk = stage;
    if (kind_of(w) != Collective::ALL_REDUCE) return needs_slots(w) ? Stage::EXCHANGE : Stage::SHARE;
    if (stage == 0) return Stage::EXCHANGE;
    if (stage % 2 == 0) {
        *chunk = stage / 2 - 1;
        return Stage::SHARE;
    }
    *chunk = (stage + 1) / 2;
    return *chunk < num_chunks(w) ? Stage::EXCHANGE : Stage::NOTHING;
}

static char* slot_of(const ncclComm* comm, size_t chunk, int peer)
{
    return comm->workspace + ((chunk & 1) * (size_t)comm->num_ranks + (size_t)peer) * SLOT_BYTES;
}

static void post_send(Work* w, int slot, const char* p, size_t size_bytes, int peer, int tag)
{
    ncclComm* comm = w->comm;
    MPI_Request* request = &comm->stage_requests[slot][comm->num_stage_requests[slot]++];
    MPI_CHECK(MPI_Isend, p, (int)size_bytes, MPI_BYTE, peer, tag, comm->mpi, request);
    if (peer != comm->rank) comm->wire_bytes[w->header.kind] += size_bytes;
}

static void post_recv(Work* w, int slot, char* p, size_t size_bytes, int peer, int tag)
{
    ncclComm* comm = w->comm;
    MPI_Request* request = &comm->stage_requests[slot][comm->num_stage_requests[slot]++];
    MPI_CHECK(MPI_Irecv, p, (int)size_bytes, MPI_BYTE, peer, tag, comm->mpi, request);
}

static void stage_post(Work* w, size_t stage)
{
    ncclComm* comm = w->comm;
    int slot = (int)(stage & 1);
    size_t chunk;
    Stage what = stage_of(w, stage, &chunk);
    comm->num_stage_requests[slot] = 0;
    if (what == Stage::NOTHING) return;
    Piece mine = piece_of(w, chunk, comm->rank);
    /* Where my piece is among the arguments: an all-gather sends from the start of a buffer of its own. */
    size_t own_begin = kind_of(w) == Collective::ALL_GATHER ? chunk * piece_elems(w) : mine.begin;
    const char* own = kind_of(w) == Collective::ALL_REDUCE ? w->recv : w->send;
    own += bytes_of(w, own_begin);
    for (int i = 1; i < comm->num_ranks; i++) {      // each rank starts with another peer
        int to = (comm->rank + i) % comm->num_ranks, from = (comm->rank + comm->num_ranks - i) % comm->num_ranks;
        Piece to_piece = piece_of(w, chunk, to), from_piece = piece_of(w, chunk, from);
        if (what == Stage::EXCHANGE) {
            if (mine.count > 0) post_recv(w, slot, slot_of(comm, chunk, from), bytes_of(w, mine.count), from, TAG_DATA);
            if (to_piece.count > 0)
                post_send(w, slot, w->send + bytes_of(w, to_piece.begin), bytes_of(w, to_piece.count), to, TAG_DATA);
        } else {
            char* from_recv = w->recv + bytes_of(w, from_piece.begin);
            if (from_piece.count > 0) post_recv(w, slot, from_recv, bytes_of(w, from_piece.count), from, TAG_DATA);
            if (mine.count > 0) post_send(w, slot, own, bytes_of(w, mine.count), to, TAG_DATA);
        }
    }
    char* own_recv = w->recv + bytes_of(w, mine.begin);
    if (what == Stage::SHARE && mine.count > 0 && own != own_recv) memcpy(own_recv, own, bytes_of(w, mine.count));
}

static void stage_finish(Work* w, size_t stage)
{
    ncclComm* comm = w->comm;
    size_t chunk;
    if (stage_of(w, stage, &chunk) != Stage::EXCHANGE) return;
    Piece mine = piece_of(w, chunk, comm->rank);
    if (mine.count == 0) return;
    for (int r = 0; r < comm->num_ranks; r++) comm->inputs[r] = slot_of(comm, chunk, r);
    comm->inputs[comm->rank] = w->send + bytes_of(w, mine.begin);
    bool scattered = kind_of(w) == Collective::REDUCE_SCATTER;
    size_t out_begin = scattered ? chunk * piece_elems(w) : mine.begin;
    reduce_ranks(w->recv + bytes_of(w, out_begin), comm->inputs, comm->num_ranks, mine.count,
                 (ncclDataType_t)w->header.type, (ncclRedOp_t)w->header.op);
}

/* ---- ncclSend and ncclRecv: matched in order between each pair of ranks, as NCCL does */

static void transfers_post(Work* w)
{
    ncclComm* comm = w->comm;
    int num_messages = 0;
    for (const Transfer* t = w->transfers; t != nullptr; t = t->next)
        num_messages += (int)ceil_div(t->size_bytes, MESSAGE_BYTES);
    if (num_messages > comm->requests_capacity) {
        comm->requests_capacity = num_messages;
        size_t size_bytes = (size_t)num_messages * sizeof(MPI_Request);
        for (int i = 0; i < 2; i++) {
            free(comm->stage_requests[i]);
            comm->stage_requests[i] = (MPI_Request*)malloc_checked(size_bytes);
        }
    }
    comm->num_stage_requests[0] = comm->num_stage_requests[1] = 0;
    for (const Transfer* t = w->transfers; t != nullptr; t = t->next) {
        for (size_t done = 0; done < t->size_bytes; done += MESSAGE_BYTES) {
            size_t len = size_min(MESSAGE_BYTES, t->size_bytes - done);
            if (t->is_send) post_send(w, 0, t->p + done, len, t->peer, TAG_TRANSFER);
            else post_recv(w, 0, t->p + done, len, t->peer, TAG_TRANSFER);
        }
    }
}

/* ---- headers */

static void headers_post(Work* w)
{
    ncclComm* comm = w->comm;
    comm->num_header_requests = 0;
    comm->headers[comm->rank] = w->header;
    for (int peer = 0; peer < comm->num_ranks; peer++) {
        if (peer == comm->rank) continue;
        MPI_Request* requests = comm->header_requests + comm->num_header_requests;
        Header *ours = &comm->headers[comm->rank], *theirs = &comm->headers[peer];
        MPI_CHECK(MPI_Irecv, theirs, (int)sizeof(Header), MPI_BYTE, peer, TAG_HEADER, comm->mpi, &requests[0]);
        MPI_CHECK(MPI_Isend, ours, (int)sizeof(Header), MPI_BYTE, peer, TAG_HEADER, comm->mpi, &requests[1]);
        comm->num_header_requests += 2;
    }
}

static void header_text(const Header* h, char* text, size_t size)
{
    snprintf(text, size, "%s (count %llu, type %d, op %d, root %d)", collective_names[h->kind],
             (unsigned long long)h->count, h->type, h->op, h->root);
}

/* True when all headers are there; they must agree. */
static bool headers_check(Work* w)
{
    ncclComm* comm = w->comm;
    int arrived = 0;
    MPI_CHECK(MPI_Testall, comm->num_header_requests, comm->header_requests, &arrived, MPI_STATUSES_IGNORE);
    if (!arrived) return false;
    for (int peer = 0; peer < comm->num_ranks; peer++) {
        const Header *ours = &w->header, *theirs = &comm->headers[peer];
        if (memcmp(ours, theirs, sizeof(Header)) == 0) continue;
        char our_text[160], their_text[160];
        header_text(ours, our_text, sizeof our_text);
        header_text(theirs, their_text, sizeof their_text);
        die("collective mismatch: call %llu on this communicator is %s on rank %d and %s on rank %d",
            (unsigned long long)ours->call_idx, our_text, comm->rank, their_text, peer);
    }
    return true;
}

/* A message of the wrong size is most likely a mismatched collective: the headers know better than MPI. */
[[noreturn]] static void die_transfer_failed(Work* w, int error)
{
    double give_up_s = now_s() + 5;
    while (kind_of(w) != Collective::SEND_RECV && !headers_check(w) && now_s() < give_up_s) {}
    if (kind_of(w) == Collective::SEND_RECV)
        die("%s: the sender's and the receiver's counts differ", collective_names[w->header.kind]);
    die_mpi(collective_names[w->header.kind], error);
}

/* ---- moving on; true when all has arrived */

static bool work_progress(Work* w)
{
    ncclComm* comm = w->comm;
    bool is_transfer = kind_of(w) == Collective::SEND_RECV;
    if (!w->posted) {
        w->posted = true;
        if (is_transfer) transfers_post(w);
        else {
            headers_post(w);
            for (size_t stage = 0; stage < 2 && stage < w->num_stages; stage++) stage_post(w, stage);
        }
    }
    if (!is_transfer && !w->headers_match) w->headers_match = headers_check(w);
    while (w->num_finished < w->num_stages) {
        int slot = (int)(w->num_finished & 1), arrived = 0;
        int error = MPI_Testall(comm->num_stage_requests[slot], comm->stage_requests[slot], &arrived,
                                MPI_STATUSES_IGNORE);
        if (error != MPI_SUCCESS) die_transfer_failed(w, error);
        if (!arrived) return false;
        w->num_tries = 0;
        if (!is_transfer) {
            stage_finish(w, w->num_finished);
            if (w->num_finished + 2 < w->num_stages) stage_post(w, w->num_finished + 2);
        }
        w->num_finished++;
#ifdef DEVICE_EMU
        rank_moved();
#endif
    }
    return is_transfer || w->headers_match;
}

static size_t count_stages(const Work* w)
{
    if (kind_of(w) == Collective::SEND_RECV) return 1;
    if (kind_of(w) != Collective::ALL_REDUCE || num_chunks(w) == 0) return num_chunks(w);
    return 2 * num_chunks(w) + 1;
}

#endif

/* ---- one rank: copies */

static void work_alone(Work* w)
{
    if (kind_of(w) != Collective::SEND_RECV) {
        if (w->send != w->recv) memmove(w->recv, w->send, bytes_of(w, w->header.count));
        return;
    }
    Transfer *send = w->transfers, *recv = w->transfers;
    for (;; send = send->next, recv = recv->next) {
        while (send != nullptr && !send->is_send) send = send->next;
        while (recv != nullptr && recv->is_send) recv = recv->next;
        if (send == nullptr && recv == nullptr) return;
        ENSURE(send != nullptr && recv != nullptr && send->size_bytes == recv->size_bytes,
               "ncclSend and ncclRecv of a rank to itself do not match");
        memmove(recv->p, send->p, send->size_bytes);
    }
}

/* ---- as an operation on a stream */

#ifdef DEVICE_EMU
static void work_start(Work* w)
{
    size_t send_bytes = bytes_of(w, send_elems(w));
    bool reads = kind_of(w) != Collective::SEND_RECV && w->send != nullptr;
    bool writes = kind_of(w) != Collective::SEND_RECV && w->recv != nullptr;
    w->recv_bytes = writes ? bytes_of(w, recv_elems(w)) : 0;
    w->device_recv = w->recv;
    w->snapshot = (char*)malloc_checked((reads ? send_bytes : 0) + w->recv_bytes);
    const char* name = collective_names[w->header.kind];
    for (const Transfer* t = w->transfers; t != nullptr; t = t->next)
        check_range(t->p, t->size_bytes, t->is_send ? Access::READ : Access::WRITE, name);
    if (reads) {
        check_range(w->send, send_bytes, Access::READ, name);
        memcpy(w->snapshot + w->recv_bytes, w->send, send_bytes);
    }
    if (writes) {
        check_range(w->recv, w->recv_bytes, Access::WRITE, name);
        memset(w->recv, EMU_FILL_BYTE, w->recv_bytes);
    }
    w->send = w->snapshot + w->recv_bytes;
    w->recv = w->snapshot;
}

static void work_end(Work* w)
{
    const char* name = collective_names[w->header.kind];
    for (const Transfer* t = w->transfers; t != nullptr; t = t->next)
        check_range(t->p, t->size_bytes, t->is_send ? Access::READ : Access::WRITE, name);
    if (w->recv_bytes > 0) {
        check_range(w->device_recv, w->recv_bytes, Access::WRITE, name);
        memcpy(w->device_recv, w->recv, w->recv_bytes);
    }
    free(w->snapshot);
}
#endif

/* A fault for tests: TRAIN_GPT_CORRUPT_GATHER=RANK:N flips a bit of what the N-th all-gather brings to that rank. */
static void corrupt_if_asked(const Work* w)
{
    static unsigned long num_gathers;
    const char* s = getenv("TRAIN_GPT_CORRUPT_GATHER");
    if (s == nullptr || kind_of(w) != Collective::ALL_GATHER || w->header.count == 0) return;
    int rank = -1;
    unsigned long n = 0;
    ENSURE(sscanf(s, "%d:%lu", &rank, &n) == 2, "TRAIN_GPT_CORRUPT_GATHER is \"%s\", not RANK:N", s);
    if (++num_gathers == n && rank == w->comm->rank) w->recv[0] ^= 1;
}

/* True when the data has arrived. */
static bool work_moves(Work* w)
{
#ifndef NO_MPI
    if (w->comm->num_ranks > 1) return work_progress(w);
#endif
    work_alone(w);
    return true;
}

static void work_wait(Work* w)
{
    while (!work_moves(w)) wait_politely(&w->num_tries);
}

static void work_completed(Work* w)
{
    corrupt_if_asked(w);
#ifdef DEVICE_EMU
    if (w->snapshot != nullptr) work_end(w);
#endif
    w->comm->num_completed++;
    transfers_free(w);
}

#include "nccl_staged.h"

#ifndef DEVICE_CUDA
static bool work_run(void* arg)
{
    Work* w = (Work*)arg;
#ifdef DEVICE_EMU
    if (w->snapshot == nullptr) work_start(w);
    if (!work_moves(w)) return false;
#else
    work_wait(w);
#endif
    work_completed(w);
    return true;
}

static bool work_may_start(void* arg)
{
    const Work* w = (const Work*)arg;
    return w->place == w->comm->num_completed;
}

static void work_push(void* arg)
{
#ifndef NO_MPI
    Work* w = (Work*)arg;
    if (w->comm->num_ranks > 1) work_progress(w);
#else
    (void)arg;
#endif
}

static const StreamOpKind work_kind = {work_run, work_may_start, work_push};
#endif

/* ---- groups: calls between ncclGroupStart and ncclGroupEnd are submitted together; the sends and receives of one
 * communicator and stream become one piece of work, so that none waits for another */

struct Grouped { Work* work; cudaStream_t stream; Grouped* next; };
static Grouped *group_first, *group_last;
static int group_depth;

static ncclResult_t work_submit(Work* w, cudaStream_t stream)
{
    w->place = w->comm->num_issued++;
    if (kind_of(w) != Collective::SEND_RECV) w->header.call_idx = w->comm->num_collectives++;
#ifndef NO_MPI
    w->num_stages = count_stages(w);
#endif
#ifndef DEVICE_CUDA
    if (!gpu_may_be_shared()) {
        stream_enqueue(stream, collective_names[w->header.kind], &work_kind, w);
        return ncclSuccess;
    }
#endif
    return staged_enqueue(w, stream);
}

static ncclResult_t work_add(Work* w, cudaStream_t stream)
{
    if (group_depth == 0) return work_submit(w, stream);
    for (Grouped* g = group_first; g != nullptr; g = g->next) {
        if (kind_of(w) != Collective::SEND_RECV || kind_of(g->work) != Collective::SEND_RECV) continue;
        if (g->work->comm != w->comm || g->stream != stream) continue;
        Transfer* last = g->work->transfers;
        while (last->next != nullptr) last = last->next;
        last->next = w->transfers;
        free(w);
        return ncclSuccess;
    }
    Grouped* grouped = (Grouped*)malloc_checked(sizeof(Grouped));
    *grouped = {w, stream, nullptr};
    if (group_last != nullptr) group_last->next = grouped;
    else group_first = grouped;
    group_last = grouped;
    return ncclSuccess;
}

static Work* work_new(Collective kind, const void* send, void* recv, size_t count, ncclDataType_t type, int op,
                      int root, ncclComm_t comm)
{
    Work* w = (Work*)calloc(1, sizeof(Work));
    ENSURE(w != nullptr, "out of host memory");
    w->header.kind = (int)kind;
    w->header.type = (int)type;
    w->header.op = op;
    w->header.root = root;
    w->header.count = count;
    w->comm = comm;
    w->send = (const char*)send;
    w->recv = (char*)recv;
    return w;
}

static ncclResult_t collective(Collective kind, const void* send, void* recv, size_t count, ncclDataType_t type,
                               int op, int root, ncclComm_t comm, cudaStream_t stream)
{
    if (comm == nullptr || op < 0 || op >= ncclNumOps) return ncclInvalidArgument;
    if (root < 0 || root >= comm->num_ranks) return ncclInvalidArgument;
    bool reads = kind != Collective::BROADCAST || root == comm->rank;
    bool writes = kind != Collective::REDUCE || root == comm->rank;
    Work* w = work_new(kind, reads ? send : nullptr, writes ? recv : nullptr, count, type, op, root, comm);
#ifdef DEVICE_EMU
    if (reads) emu_check_device_range(send, bytes_of(w, send_elems(w)), collective_names[w->header.kind]);
    if (writes) emu_check_device_range(recv, bytes_of(w, recv_elems(w)), collective_names[w->header.kind]);
#endif
    return work_add(w, stream);
}

static ncclResult_t transfer(bool is_send, void* p, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream)
{
    if (comm == nullptr || peer < 0 || peer >= comm->num_ranks) return ncclInvalidArgument;
    Work* w = work_new(Collective::SEND_RECV, nullptr, nullptr, 0, type, 0, 0, comm);
    w->transfers = (Transfer*)malloc_checked(sizeof(Transfer));
    *w->transfers = {is_send, (char*)p, bytes_of(w, count), peer, nullptr};
#ifdef DEVICE_EMU
    emu_check_device_range(p, bytes_of(w, count), is_send ? "ncclSend" : "ncclRecv");
#endif
    return work_add(w, stream);
}

#ifndef NO_MPI
static void abort_all_ranks(int exit_code) { MPI_Abort(MPI_COMM_WORLD, exit_code); }

/* A communicator with every buffer that its work will ever need. Takes mpi over. */
static ncclComm* comm_new(MPI_Comm mpi)
{
    ncclComm* comm = (ncclComm*)malloc_checked(sizeof(ncclComm));
    *comm = {};
    comm->mpi = mpi;
    MPI_CHECK(MPI_Comm_rank, mpi, &comm->rank);
    MPI_CHECK(MPI_Comm_size, mpi, &comm->num_ranks);
    MPI_CHECK(MPI_Comm_set_errhandler, mpi, MPI_ERRORS_RETURN);
    size_t num_ranks = (size_t)comm->num_ranks;
    comm->workspace = (char*)malloc_checked(nccl_workspace_bytes(comm->num_ranks));
    comm->inputs = (const void**)malloc_checked(num_ranks * sizeof(void*));
    comm->headers = (Header*)malloc_checked(num_ranks * sizeof(Header));
    comm->requests_capacity = 2 * comm->num_ranks;
    comm->header_requests = (MPI_Request*)malloc_checked(2 * num_ranks * sizeof(MPI_Request));
    for (int i = 0; i < 2; i++)
        comm->stage_requests[i] = (MPI_Request*)malloc_checked(2 * num_ranks * sizeof(MPI_Request));
    if (die_abort == nullptr) die_abort = abort_all_ranks;
    return comm;
}
#endif

extern "C" {

ncclResult_t ncclGetVersion(int* version)
{
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id)
{
    static uint64_t num_ids;                         // MPI_COMM_WORLD is the meeting point, no address is needed
    const uint64_t number[2] = {(uint64_t)getpid(), ++num_ids};
    memset(id, 0, sizeof *id);
    memcpy(id, number, sizeof number);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int num_ranks, ncclUniqueId id, int rank)
{
    if (num_ranks < 1 || rank < 0 || rank >= num_ranks) return ncclInvalidArgument;
    if (num_ranks == 1) {
        *comm = (ncclComm*)malloc_checked(sizeof(ncclComm));
        **comm = {};
        (*comm)->num_ranks = 1;
        return ncclSuccess;
    }
#ifndef NO_MPI
    int initialized = 0, world_size = 0;
    MPI_CHECK(MPI_Initialized, &initialized);
    ENSURE(initialized, "ncclCommInitRank: MPI_Init comes first");
    MPI_CHECK(MPI_Comm_size, MPI_COMM_WORLD, &world_size);
    ENSURE(num_ranks == world_size, "ncclCommInitRank: %d ranks asked for, MPI has %d; ncclCommSplit makes smaller "
           "communicators", num_ranks, world_size);
    ncclUniqueId first = id;
    MPI_CHECK(MPI_Bcast, &first, sizeof first, MPI_BYTE, 0, MPI_COMM_WORLD);
    ENSURE(memcmp(&first, &id, sizeof id) == 0, "ncclCommInitRank: rank %d comes with another id than rank 0", rank);
    MPI_Comm mpi;
    MPI_CHECK(MPI_Comm_split, MPI_COMM_WORLD, 0, rank, &mpi);
    *comm = comm_new(mpi);
    return ncclSuccess;
#else
    die("ncclCommInitRank: %d ranks asked for, this program was built with NO_MPI=1 for one", num_ranks);
#endif
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* new_comm, ncclConfig_t*)
{
    *new_comm = nullptr;
    if (comm->num_ranks == 1) {
        if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
        return ncclCommInitRank(new_comm, 1, ncclUniqueId{}, 0);
    }
#ifndef NO_MPI
    MPI_Comm mpi;
    MPI_CHECK(MPI_Comm_split, comm->mpi, color == NCCL_SPLIT_NOCOLOR ? MPI_UNDEFINED : color, key, &mpi);
    if (mpi != MPI_COMM_NULL) *new_comm = comm_new(mpi);
#else
    (void)key;
#endif
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    if (comm == nullptr) return ncclInvalidArgument;
    stream_drain_all();
#ifndef NO_MPI
    if (comm->workspace != nullptr) {
        MPI_CHECK(MPI_Comm_free, &comm->mpi);
        free(comm->workspace);
        free(comm->inputs);
        free(comm->headers);
        free(comm->header_requests);
        for (int i = 0; i < 2; i++) free(comm->stage_requests[i]);
    }
#endif
    free(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    free(comm);                                      // the process is about to end
    return ncclSuccess;
}

/* Errors end the program where they happen. For tests: a dead link while the file TRAIN_GPT_DEAD_LINK is there. */
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error)
{
    const char* file = getenv("TRAIN_GPT_DEAD_LINK");
    *error = file != nullptr && access(file, F_OK) == 0 ? ncclRemoteError : ncclSuccess;
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count)
{
    *count = comm->num_ranks;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank)
{
    *rank = comm->rank;
    return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t error)
{
    static const char* const words[ncclNumResults] = {
        "no error", "unhandled cuda error", "unhandled system error", "internal error", "invalid argument",
        "invalid usage", "remote process exited or there was a network error", "NCCL operation in progress"};
    return error >= 0 && error < ncclNumResults ? words[error] : "unknown result code";
}

const char* ncclGetLastError(ncclComm_t) { return ""; }

ncclResult_t ncclAllReduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream)
{
    return collective(Collective::ALL_REDUCE, send, recv, count, type, op, 0, comm, stream);
}

ncclResult_t ncclReduceScatter(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream)
{
    return collective(Collective::REDUCE_SCATTER, send, recv, count, type, op, 0, comm, stream);
}

ncclResult_t ncclAllGather(const void* send, void* recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream)
{
    return collective(Collective::ALL_GATHER, send, recv, count, type, ncclSum, 0, comm, stream);
}

ncclResult_t ncclBroadcast(const void* send, void* recv, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream)
{
    return collective(Collective::BROADCAST, send, recv, count, type, ncclSum, root, comm, stream);
}

ncclResult_t ncclReduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream)
{
    return collective(Collective::REDUCE, send, recv, count, type, op, root, comm, stream);
}

ncclResult_t ncclSend(const void* p, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    return transfer(true, (void*)p, count, type, peer, comm, stream);
}

ncclResult_t ncclRecv(void* p, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream)
{
    return transfer(false, p, count, type, peer, comm, stream);
}

ncclResult_t ncclGroupStart(void)
{
    group_depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    if (group_depth == 0) return ncclInvalidUsage;
    if (--group_depth > 0) return ncclSuccess;
    Grouped* next = group_first;
    ncclResult_t result = ncclSuccess;
    group_first = group_last = nullptr;
    while (next != nullptr) {
        Grouped* g = next;
        next = g->next;
        if (ncclResult_t error = work_submit(g->work, g->stream); error != ncclSuccess) result = error;
        free(g);
    }
    return result;
}

}
