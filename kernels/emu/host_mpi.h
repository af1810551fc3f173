/* host_mpi.h: part of nccl.cpp: the host's MPI calls in the emulated build, and ranks that wait for one another.
 * A GPU works on while its host waits in MPI, and so does the collective that another rank's host is waiting for. Here
 * the host would stop its own device: so each blocking call is started without blocking, through MPI's profiling
 * interface, and streams run until it is done.
 * A deadlock of ranks is told from a slow machine without a time limit: in shared memory each rank counts how often it
 * has got on, and how often it has looked in vain since any rank last has. When all ranks have looked a thousand times
 * and none has got on, nothing can come any more, and rank 0 says who waits where. */
#pragma once
#include "data/clock.h"
#include "emu_host.h"
#include "kernels/cpu/mpi_check.h"
#include "kernels/cpu/share_gpu.h"

#ifdef NO_MPI

void rank_moved(void) {}
void rank_waits(const char*) {}

#else

/* ---- the board */

struct Board {                                       // of one rank; each writes its own
    uint64_t num_moves;                              // how often it has got on
    uint64_t seen_moves;                             // those of all ranks when it last looked
    uint64_t num_looks;                              // since then
    char where[1000];                                // what it waits for; valid from LEAST_LOOKS looks on
};
static const uint64_t LEAST_LOOKS = 1000;
static const double LEAST_S = 1;                     // of which a large message may take many
static Board* board;                                 // (board_num_ranks); null: one rank, or ranks of several hosts
static int board_rank, board_num_ranks;
static MPI_Win board_window;
static MPI_Comm board_comm;                          // of its ranks

static void board_open(void)
{
    int num_ranks, unit_bytes;
    MPI_Aint size_bytes;
    void* own;
    MPI_CHECK(PMPI_Comm_rank, MPI_COMM_WORLD, &board_rank);
    MPI_CHECK(PMPI_Comm_size, MPI_COMM_WORLD, &board_num_ranks);
    MPI_CHECK(PMPI_Comm_split_type, MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, board_rank, MPI_INFO_NULL, &board_comm);
    MPI_CHECK(PMPI_Comm_size, board_comm, &num_ranks);
    if (num_ranks == 1 || num_ranks < board_num_ranks) return;
    size_bytes = board_rank == 0 ? (MPI_Aint)((size_t)num_ranks * sizeof(Board)) : 0;
    MPI_CHECK(PMPI_Win_allocate_shared, size_bytes, 1, MPI_INFO_NULL, board_comm, &own, &board_window);
    MPI_CHECK(PMPI_Win_shared_query, board_window, 0, &size_bytes, &unit_bytes, &board);
    if (board_rank == 0) memset((void*)board, 0, (size_t)size_bytes);
    MPI_CHECK(PMPI_Barrier, board_comm);
}

static uint64_t board_moves(void)
{
    uint64_t sum = 0;
    for (int r = 0; r < board_num_ranks; r++) sum += __atomic_load_n(&board[r].num_moves, __ATOMIC_ACQUIRE);
    return sum;
}

static bool all_wait(uint64_t moves)
{
    for (int r = 0; r < board_num_ranks; r++) {
        if (__atomic_load_n(&board[r].num_looks, __ATOMIC_ACQUIRE) < LEAST_LOOKS) return false;
        if (__atomic_load_n(&board[r].seen_moves, __ATOMIC_ACQUIRE) != moves) return false;
    }
    return board_moves() == moves;
}

[[noreturn]] static void die_all_wait(void)
{
    char text[3000];
    int used = 0, size = (int)sizeof text;
    for (int r = 0; r < board_num_ranks && used < size - 1; r++)
        used += snprintf(text + used, (size_t)(size - used), "%s rank %d in %s", r > 0 ? ";" : "", r, board[r].where);
    emu_die("deadlock, all ranks wait:%s", text);
}

void rank_moved(void)
{
    if (board != nullptr) __atomic_fetch_add(&board[board_rank].num_moves, 1, __ATOMIC_RELEASE);
}

void rank_waits(const char* call)
{
    static double since_s;
    if (board == nullptr) return;
    Board* own = &board[board_rank];
    const uint64_t moves = board_moves(), num_looks = own->seen_moves == moves ? own->num_looks + 1 : 0;
    if (num_looks == 0) since_s = now_s();
    if (num_looks == LEAST_LOOKS) {
        int used = snprintf(own->where, sizeof own->where, "%s", call);
        stream_heads_text(own->where + used, (int)sizeof own->where - used);
    }
    __atomic_store_n(&own->num_looks, num_looks, __ATOMIC_RELEASE);
    __atomic_store_n(&own->seen_moves, moves, __ATOMIC_RELEASE);
    if (board_rank == 0 && num_looks >= LEAST_LOOKS && now_s() - since_s >= LEAST_S && all_wait(moves))
        die_all_wait();
}

/* ---- calls that wait */

static int wait_with_streams(const char* call, MPI_Request* request, MPI_Status* status)
{
    unsigned num_tries = 0;
    for (;;) {
        int done = 0, error = PMPI_Test(request, &done, status);
        if (error != MPI_SUCCESS || done) {
            rank_moved();
            return error;
        }
        if (stream_step()) continue;
        rank_waits(call);
        wait_politely(&num_tries);
    }
}

/* For calls of all ranks that wait and cannot be started without: all have come when it begins. */
static int meet(const char* call)
{
    if (board == nullptr) return MPI_SUCCESS;
    MPI_Request request;
    int error = PMPI_Ibarrier(board_comm, &request);
    return error != MPI_SUCCESS ? error : wait_with_streams(call, &request, MPI_STATUS_IGNORE);
}

#define HOST_MPI(start) \
    { \
        MPI_Request request; \
        int error = start; \
        return error != MPI_SUCCESS ? error : wait_with_streams(__func__, &request, MPI_STATUS_IGNORE); \
    }

extern "C" {

int MPI_Init(int* argc, char*** argv)
{
    int error = mpi_init(argc, argv, gpu_may_be_shared());
    if (error == MPI_SUCCESS) board_open();
    return error;
}

int MPI_Finalize(void)
{
    int error = meet("MPI_Finalize");
    if (error != MPI_SUCCESS) return error;
    if (board != nullptr) MPI_CHECK(PMPI_Win_free, &board_window);
    board = nullptr;
    MPI_CHECK(PMPI_Comm_free, &board_comm);
    return PMPI_Finalize();
}

int MPI_Win_free(MPI_Win* window)
{
    int error = meet("MPI_Win_free");
    return error != MPI_SUCCESS ? error : PMPI_Win_free(window);
}

int MPI_Test(MPI_Request* request, int* done, MPI_Status* status)
{
    int error = PMPI_Test(request, done, status);
    if (error != MPI_SUCCESS || *done) {
        rank_moved();
        return error;
    }
    while (stream_step()) {}
    rank_waits("MPI_Test");
    return error;
}

int MPI_Barrier(MPI_Comm comm) HOST_MPI(PMPI_Ibarrier(comm, &request))

int MPI_Bcast(void* p, int count, MPI_Datatype type, int root, MPI_Comm comm)
    HOST_MPI(PMPI_Ibcast(p, count, type, root, comm, &request))

int MPI_Allreduce(const void* in, void* out, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm)
    HOST_MPI(PMPI_Iallreduce(in, out, count, type, op, comm, &request))

int MPI_Reduce(const void* in, void* out, int count, MPI_Datatype type, MPI_Op op, int root, MPI_Comm comm)
    HOST_MPI(PMPI_Ireduce(in, out, count, type, op, root, comm, &request))

int MPI_Allgather(const void* in, int in_count, MPI_Datatype in_type, void* out, int out_count, MPI_Datatype out_type,
                  MPI_Comm comm)
    HOST_MPI(PMPI_Iallgather(in, in_count, in_type, out, out_count, out_type, comm, &request))

int MPI_Gather(const void* in, int in_count, MPI_Datatype in_type, void* out, int out_count, MPI_Datatype out_type,
               int root, MPI_Comm comm)
    HOST_MPI(PMPI_Igather(in, in_count, in_type, out, out_count, out_type, root, comm, &request))

int MPI_Send(const void* p, int count, MPI_Datatype type, int peer, int tag, MPI_Comm comm)
    HOST_MPI(PMPI_Isend(p, count, type, peer, tag, comm, &request))

int MPI_Recv(void* p, int count, MPI_Datatype type, int peer, int tag, MPI_Comm comm, MPI_Status* status)
{
    MPI_Request request;
    int error = PMPI_Irecv(p, count, type, peer, tag, comm, &request);
    return error != MPI_SUCCESS ? error : wait_with_streams(__func__, &request, status);
}

}

#endif
