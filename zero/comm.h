/* comm.h: ranks and what they send each other. Every MPI and NCCL call of the program is here.
 * Comm is the job: all ranks, their hosts and the watchdog. Group is some of them: group_all, or one color of
 * group_split. Collectives are of a group and enqueued on a stream. asked_bytes counts what this rank sends for them by
 * the bandwidth-optimal algorithms: (R-1)/R of the data once for a reduce-scatter or an all-gather, twice for an
 * all-reduce. The CPU and emulated builds also count what is really sent. In a group of one rank nothing is sent, and a
 * process that no launcher has started does not start MPI. NO_MPI and NO_NCCL build without the libraries, for one rank
 * only. */
#pragma once
#include <climits>
#include <cstdint>
#include <cstring>
#include <sys/syscall.h>
#include <sys/time.h>
#ifndef NO_MPI
#include <mpi.h>
#endif
#include "kernels/progress.cuh"
#include "kernels/values.cuh"
#include "watchdog.h"
#ifndef DEVICE_CUDA
#include "kernels/cpu/device.h"
#endif
#ifndef NO_NCCL
#include <nccl.h>
#else
typedef struct ncclComm* ncclComm_t;
typedef enum { ncclUint64 = 5, ncclFloat16 = 6, ncclFloat32 = 7, ncclFloat64 = 8, ncclBfloat16 = 9 } ncclDataType_t;
#endif

typedef struct Comm {
    int rank, num_ranks;            // of all
    int host_rank, host_num_ranks;  // on this host
    bool has_mpi;                   // MPI_Init was called
    struct Group* groups;           // that have a communicator, the newest first
    Watch* watch;                   // null with one rank
    bool in_group;                  // between comm_group_begin and _end: NCCL's group of calls
    cudaStream_t streams[WATCH_STREAMS];    // that collectives were enqueued on
    int num_streams, stream_idx;    // stream_idx: of the newest collective
    unsigned long long* progress;   // (WATCH_STREAMS) pinned: see watchdog.h
#ifndef NO_MPI
    MPI_Comm host;
    MPI_Win beats;
#endif
} Comm;

/* Ranks that share units or sums. */
typedef struct Group {
    Comm* job;
    int rank, num_ranks;            // of the group
    int* rank_of;                   // (ranks of the job) the rank of each in its group of this split; null: its own
    char words[128];                // " in tp group 1 (ranks 2, 3)", for messages; empty: all ranks
    size_t asked_bytes;             // of all collectives enqueued since the start
    size_t step_bytes;              // of those inside steps; the rest is loading, evaluation and hashes
    char* pieces;                   // --deterministic: what the ranks send for one reduction; else null
    ncclComm_t nccl;                // null with one rank
#ifndef NO_MPI
    MPI_Comm mpi;
#endif
    struct Group* next;             // of the job
} Group;

#define MPI_CHECK(call) do { \
    int mpi_error_ = (call); \
    if (mpi_error_ != MPI_SUCCESS) die_at(WHERE, "%s: MPI error %d", #call, mpi_error_); \
} while (0)
#define NCCL_CHECK(call) do { \
    ncclResult_t nccl_error_ = (call); \
    if (nccl_error_ != ncclSuccess) die_at(WHERE, "%s: %s", #call, ncclGetErrorString(nccl_error_)); \
} while (0)

#ifndef NO_MPI
inline MPI_Comm refusals = MPI_COMM_NULL;   // of all ranks, for comm_refuses_together alone: a hook has no argument
inline bool refuses_together;

/* A rank that refuses tells the others. True if all ranks do, within two seconds; rank 0, which speaks first, waits for
 * half a second. */
static bool comm_refuses_together(void)
{
    MPI_Request request;
    int done = 0;
    if (getpid() != (pid_t)syscall(SYS_gettid) || MPI_Ibarrier(refusals, &request) != MPI_SUCCESS) return false;
    for (double begun_s = now_s(); !done && now_s() - begun_s < (die_rank == 0 ? 0.5 : 2.0); usleep(200))
        if (MPI_Test(&request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) return false;
    return refuses_together = done != 0;
}

/* Ends all ranks. If all refuse, each leaves by itself; MPI_Abort, for which Open MPI prints a banner, is for ranks
 * that are elsewhere. */
static void comm_abort(int exit_code)
{
    if (!refuses_together || die_rank == 0) watch_has_spoken();
    signal(SIGTERM, SIG_IGN);               // from the launcher, when the first rank has left
    if (!refuses_together) MPI_Abort(MPI_COMM_WORLD, exit_code);
    if (watch_of_signals != nullptr) watch_end(watch_of_signals);
    signal(SIGALRM, SIG_DFL);
    alarm(10);                              // ends a rank that waits in MPI_Finalize for one that has died
    MPI_CHECK(MPI_Finalize());
}
#endif

/* How launchers tell a process its rank and the number of ranks. */
typedef struct Launcher { const char *rank, *num_ranks; } Launcher;
static const Launcher launchers[] = {
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}, {"PMIX_RANK", nullptr}, {"PMI_RANK", "PMI_SIZE"},
    {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"}, {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"},
    {"PALS_RANKID", nullptr}, {"FLUX_TASK_RANK", nullptr}, {"PMI_ID", nullptr},
};

/* The launcher's rank, before MPI is up, so that a refusal of the command line is printed once. */
static int comm_launcher_rank(void)
{
    for (const Launcher& launcher : launchers)
        if (const char* text = getenv(launcher.rank)) return atoi(text);
    return 0;
}

/* Has no launcher started this process? */
static bool comm_is_alone(void)
{
    for (const Launcher& launcher : launchers)
        for (const char* name : {launcher.rank, launcher.num_ranks})
            if (name != nullptr && getenv(name) != nullptr) return false;
    return true;
}

/* Compares MPI's number of ranks with the launcher's, if an environment variable has it. A launcher of another MPI
 * starts processes that do not find each other, and each would train as the only rank. */
static void comm_check_launcher(const Comm* c)
{
    for (const Launcher& launcher : launchers) {
        const char* text = launcher.num_ranks != nullptr ? getenv(launcher.num_ranks) : nullptr;
        if (text == nullptr) continue;
        ENSURE(atoi(text) == c->num_ranks, "the launcher started %s ranks (%s), MPI finds %d: start it with the mpirun "
               "of the MPI that it is built with%s", text, launcher.num_ranks, c->num_ranks,
#ifdef NO_MPI
               "; this binary is built with NO_MPI=1");
#else
               "");
#endif
        return;
    }
}

inline volatile sig_atomic_t start_seconds_left;   // a signal handler has no argument

/* Timeout of MPI_Init, before the watchdog runs: counts seconds, of which a process that is stopped has none. The
 * launcher ends the other ranks when one exits; the others sleep first, so that rank 0's message is the one printed. */
static void start_on_alarm(int)
{
    start_seconds_left = start_seconds_left - 1;
    if (start_seconds_left > 0) return;
    if (die_rank != 0) usleep((2000 + 100 * (die_rank % 20)) * 1000);
    char line[256];
    int n = snprintf(line, sizeof line, "train_gpt: rank %d: waits longer than --timeout: in MPI_Init: another rank is "
                     "stopped, or has died, or its host is out of reach\n", die_rank);
    if (write(2, line, n) < 0) _exit(1);
    _exit(1);
}

/* Sets the alarm, 0: cancels it. At least 10 s, since ranks need time to start. */
static void start_alarm(double timeout_s)
{
    const time_t every_s = timeout_s > 0 ? 1 : 0;
    struct itimerval timer = {{every_s, 0}, {every_s, 0}};
    start_seconds_left = timeout_s > 0 ? (int)fmin(fmax(timeout_s, 10), 1e6) : 0;
    signal(SIGALRM, timeout_s > 0 ? start_on_alarm : SIG_DFL);
    ENSURE(setitimer(ITIMER_REAL, &timer, nullptr) == 0, "the timer of --timeout cannot be set");
}

static void comm_init(Comm* c, double timeout_s)
{
    *c = Comm{};
    c->num_ranks = c->host_num_ranks = 1;
#ifndef NO_MPI
    if (comm_is_alone()) return;
    start_alarm(timeout_s);
    // With more ranks than cores, a rank that spins while it waits takes the core of the rank it waits for.
    setenv("OMPI_MCA_mpi_yield_when_idle", "1", 0);
    setenv("OMPI_MCA_ess_singleton_isolated", "1", 0);   // without mpirun: no daemon
    MPI_CHECK(MPI_Init(nullptr, nullptr));
    c->has_mpi = true;
    MPI_CHECK(MPI_Comm_rank(MPI_COMM_WORLD, &c->rank));
    MPI_CHECK(MPI_Comm_size(MPI_COMM_WORLD, &c->num_ranks));
    MPI_CHECK(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, c->rank, MPI_INFO_NULL, &c->host));
    MPI_CHECK(MPI_Comm_rank(c->host, &c->host_rank));
    MPI_CHECK(MPI_Comm_size(c->host, &c->host_num_ranks));
    if (c->num_ranks > 1) {
        MPI_CHECK(MPI_Comm_dup(MPI_COMM_WORLD, &refusals));
        die_together = comm_refuses_together;
        die_abort = comm_abort;
    }
    if (c->host_num_ranks < c->num_ranks) gethostname(die_host, sizeof die_host - 1);
#endif
    die_rank = c->rank;
    die_num_ranks = c->num_ranks;
    comm_check_launcher(c);
}

/* Starts the watchdog: from here on a hang ends the run with a message that says where. */
static void comm_watch(Comm* c, double timeout_s)
{
#ifndef NO_MPI
    if (c->num_ranks == 1) return start_alarm(0);
    char* base;                                    // of one Beat more than ranks: MPI may not align it for Beat
    MPI_Aint size_bytes = (MPI_Aint)sizeof(Beat) * (c->host_rank == 0 ? 2 : 1);
    int unit_bytes;
    MPI_CHECK(MPI_Win_allocate_shared(size_bytes, 1, MPI_INFO_NULL, c->host, &base, &c->beats));
    MPI_CHECK(MPI_Win_shared_query(c->beats, 0, &size_bytes, &unit_bytes, &base));
    Beat* beats = (Beat*)(((uintptr_t)base + alignof(Beat) - 1) / alignof(Beat) * alignof(Beat));
    c->watch = watch_start(beats, c->host_num_ranks, c->host_rank, c->rank, timeout_s);
    die_is_said = watch_is_said;
    start_alarm(0);
#else
    (void)c, (void)timeout_s;
#endif
}

/* All ranks of the job, which may be imagined: group_connect makes the communicator. */
static void group_all(Group* g, Comm* c)
{
    *g = Group{};
    g->job = c;
    g->rank = c->rank;
    g->num_ranks = c->num_ranks;
#ifndef NO_MPI
    g->mpi = MPI_COMM_WORLD;
#endif
}

/* The rank of the job's rank `rank` in its group of the split that g is of: which slice of a unit it owns. */
static int group_rank_of(const Group* g, int rank) { return g->rank_of != nullptr ? g->rank_of[rank] : rank; }

#ifndef NO_NCCL
/* The first error that NCCL has found in a group of the job. The watchdog's thread asks. */
static bool comm_error(void* job, char* text, size_t size)
{
    for (const Group* g = ((const Comm*)job)->groups; g != nullptr; g = g->next) {
        ncclResult_t error = ncclSuccess;
        const ncclResult_t answer = ncclCommGetAsyncError(g->nccl, &error);
        if (answer == ncclSuccess && (error == ncclSuccess || error == ncclInProgress)) continue;
        snprintf(text, size, "%s%s", ncclGetErrorString(answer != ncclSuccess ? answer : error), g->words);
        return true;
    }
    return false;
}

/* Adds the group to the job's, or takes it out; meanwhile the watchdog does not look at them. */
static void group_list(Group* g, bool adds)
{
    Comm* c = g->job;
    watch_communicators(c->watch, nullptr, nullptr);
    Group** at = &c->groups;
    while (!adds && *at != g) at = &(*at)->next;
    if (adds) g->next = c->groups;
    *at = adds ? g : g->next;
    watch_communicators(c->watch, c->groups != nullptr ? c : nullptr, comm_error);
}
#endif

/* After the device is chosen. */
static void group_connect(Group* g)
{
    if (g->num_ranks == 1) return;
#if defined(NO_NCCL) || defined(NO_MPI)
    die("this binary is built with NO_MPI or NO_NCCL: it runs one rank, not %d; build it without them", g->num_ranks);
#else
    ncclUniqueId id;
    if (g->rank == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    MPI_CHECK(MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, g->mpi));
    NCCL_CHECK(ncclCommInitRank(&g->nccl, g->num_ranks, id, g->rank));
    group_list(g, true);
#endif
}

/* Writes " in NAME group COLOR (ranks 0, 2)"; of more than 8 ranks the first 7 and the last. */
static void group_name(Group* g, const char* name, int color, const int* ranks)
{
    const int last = g->num_ranks - 1;
    size_t n = (size_t)snprintf(g->words, sizeof g->words, " in %s group %d (ranks", name, color);
    for (int i = 0; i <= last && n < sizeof g->words; i = i == 6 && last > 7 ? last : i + 1)
        n += (size_t)snprintf(g->words + n, sizeof g->words - n, "%s %d%s", i == last && last > 7 ? " ..." : "",
                              ranks[i], i < last ? "," : ")");
}

/* Splits all ranks: those that give the same color >= 0 form a group, in which they are ordered by key. Called by all
 * ranks in the same order. `all` is connected. */
static void group_split(Group* g, const Group* all, int color, int key, const char* name)
{
    group_all(g, all->job);
    if (all->num_ranks == 1) return;
#if !defined(NO_NCCL) && !defined(NO_MPI)
    MPI_CHECK(MPI_Comm_split(all->mpi, color, key, &g->mpi));
    MPI_CHECK(MPI_Comm_rank(g->mpi, &g->rank));
    MPI_CHECK(MPI_Comm_size(g->mpi, &g->num_ranks));
    g->rank_of = (int*)malloc_checked(all->num_ranks * sizeof(int));
    int* ranks = (int*)malloc_checked(g->num_ranks * sizeof(int));
    MPI_CHECK(MPI_Allgather(&g->rank, 1, MPI_INT, g->rank_of, 1, MPI_INT, all->mpi));
    MPI_CHECK(MPI_Allgather(&all->rank, 1, MPI_INT, ranks, 1, MPI_INT, g->mpi));
    group_name(g, name, color, ranks);
    free(ranks);
    const bool alone = g->num_ranks == 1;
    NCCL_CHECK(ncclCommSplit(all->nccl, alone ? NCCL_SPLIT_NOCOLOR : color, key, &g->nccl, nullptr));
    if (!alone) group_list(g, true);
#else
    (void)color; (void)key; (void)name;
#endif
}

/* One tiny collective of each kind: NCCL connects, and takes its memory, at the first. data: n elements a rank. */
static void group_warm_up(const Group* g, float* data, size_t n)
{
#if !defined(NO_NCCL) && !defined(NO_MPI)
    if (g->num_ranks == 1) return;
    float* own = data + g->rank * n;
    CUDA_CHECK(cudaMemset(data, 0, n * g->num_ranks * sizeof *data));
    NCCL_CHECK(ncclAllReduce(data, data, n, ncclFloat32, ncclSum, g->nccl, nullptr));
    NCCL_CHECK(ncclReduceScatter(data, own, n, ncclFloat32, ncclSum, g->nccl, nullptr));
    NCCL_CHECK(ncclAllGather(own, data, n, ncclFloat32, g->nccl, nullptr));
#else
    (void)g; (void)data; (void)n;
#endif
}

static void group_free(Group* g)
{
#if !defined(NO_NCCL) && !defined(NO_MPI)
    if (g->nccl != nullptr) {
        group_list(g, false);
        NCCL_CHECK(ncclCommDestroy(g->nccl));
    }
    if (g->rank_of != nullptr) MPI_CHECK(MPI_Comm_free(&g->mpi));
#endif
    free(g->rank_of);
    *g = Group{};
}

static void comm_free(Comm* c)
{
#ifndef NO_MPI
    if (!c->has_mpi) return;
    die_together = nullptr;
    die_abort = nullptr;
    die_is_said = nullptr;
    if (c->watch != nullptr) {
        watch_end(c->watch);
        MPI_CHECK(MPI_Win_free(&c->beats));
    }
    MPI_CHECK(MPI_Comm_free(&c->host));
    if (c->num_ranks > 1) MPI_CHECK(MPI_Comm_free(&refusals));
    MPI_CHECK(MPI_Finalize());
#endif
    (void)c;
}

/* Host-side, outside the step. */
static void comm_barrier(const Comm* c)
{
    if (c->num_ranks == 1) return;
    watch_host_call(c->watch);
    watch_collective(c->watch, "a barrier", 0);
#ifndef NO_MPI
    MPI_Request request;
    MPI_CHECK(MPI_Ibarrier(MPI_COMM_WORLD, &request));
    for (int done = 0; !done; ) {   // rank 0 may be writing a checkpoint: sleep, do not spin
        MPI_CHECK(MPI_Test(&request, &done, MPI_STATUS_IGNORE));
        if (!done) usleep(200);
    }
#endif
    watch_move(c->watch, "what follows a barrier", 0);
}

/* While a rank waits for work, or for the one rank that has all of it, --timeout does not apply. */
static void comm_idle(const Comm* c, bool idle)
{
    if (c->watch == nullptr) return;
    watch_move(c->watch, "what follows a wait for work", 0);
    c->watch->idle = idle;
}

static void comm_barrier_idle(const Comm* c)
{
    comm_idle(c, true);
    comm_barrier(c);
    comm_idle(c, false);
}

/* data of rank `from` of the group to all of it. */
static void group_broadcast_host(const Group* g, void* data, size_t size_bytes, int from = 0)
{
    if (g->num_ranks == 1) return;
#ifndef NO_MPI
    ENSURE(size_bytes <= INT_MAX, "broadcast of %zu bytes in one piece", size_bytes);
    MPI_CHECK(MPI_Bcast(data, (int)size_bytes, MPI_BYTE, from, g->mpi));
#else
    (void)data; (void)size_bytes; (void)from;
#endif
}

/* data of rank `from` to all. */
static void comm_broadcast_host(const Comm* c, void* data, size_t size_bytes, int from = 0)
{
    Group all;
    group_all(&all, (Comm*)c);
    group_broadcast_host(&all, data, size_bytes, from);
}

/* Host memory of one rank to another rank, which calls comm_receive_host. */
static void comm_send_host(const Comm* c, const void* data, size_t size_bytes, int to)
{
    (void)c; (void)data; (void)size_bytes; (void)to;
#ifndef NO_MPI
    MPI_CHECK(MPI_Send(data, (int)size_bytes, MPI_BYTE, to, 0, MPI_COMM_WORLD));
#endif
}
static void comm_receive_host(const Comm* c, void* data, size_t size_bytes, int from)
{
    (void)c; (void)data; (void)size_bytes; (void)from;
#ifndef NO_MPI
    MPI_CHECK(MPI_Recv(data, (int)size_bytes, MPI_BYTE, from, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
#endif
}

static double comm_max_host(const Comm* c, double x)
{
    watch_host_call(c->watch);
#ifndef NO_MPI
    if (c->num_ranks > 1) MPI_CHECK(MPI_Allreduce(MPI_IN_PLACE, &x, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD));
#else
    (void)c;
#endif
    return x;
}

/* x (n) = sum over ranks, in place. */
static void comm_sum_host(const Comm* c, uint64_t* x, size_t n)
{
    if (c->num_ranks == 1) return;
    watch_host_call(c->watch);
#ifndef NO_MPI
    MPI_CHECK(MPI_Allreduce(MPI_IN_PLACE, x, (int)n, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD));
#else
    (void)x; (void)n;
#endif
}

/* all (R, size_bytes) = every rank's `own`, on rank 0. */
static void comm_gather_host(const Comm* c, void* all, const void* own, size_t size_bytes)
{
    watch_host_call(c->watch);
    if (c->num_ranks == 1) memcpy(all, own, size_bytes);
#ifndef NO_MPI
    else
        MPI_CHECK(MPI_Gather(own, (int)size_bytes, MPI_BYTE, all, (int)size_bytes, MPI_BYTE, 0, MPI_COMM_WORLD));
#endif
}

/* Host synchronizations since the start: with the device (not counted on a GPU), and with other ranks. */
static size_t comm_host_waits(const Comm* c)
{
    size_t num_waits = c->watch != nullptr ? c->watch->num_host_calls : 0;
#ifndef DEVICE_CUDA
    num_waits += host_sync_count();
#endif
    return num_waits;
}

/* Writes the texts of all ranks, in rank order, into rank 0's file f. The caller checks ferror(f). */
static void comm_texts_in_turn(const Comm* c, FILE* f, const char* text, size_t length, const char* between)
{
    if (c->rank == 0) fprintf(f, "%.*s", (int)length, text);
#ifndef NO_MPI
    const size_t PIECE_BYTES = 1 << 20;
    if (c->rank > 0) {
        for (size_t done = 0; done <= length; done += PIECE_BYTES) {     // a piece that is not full is the last
            size_t n = length - done < PIECE_BYTES ? length - done : PIECE_BYTES;
            MPI_CHECK(MPI_Send(text + done, (int)n, MPI_BYTE, 0, 0, MPI_COMM_WORLD));
        }
        return;
    }
    char* piece = (char*)malloc_checked(PIECE_BYTES);
    for (int r = 1; r < c->num_ranks; r++) {
        fputs(between, f);
        for (int n = (int)PIECE_BYTES; n == (int)PIECE_BYTES; ) {
            MPI_Status status;
            MPI_CHECK(MPI_Recv(piece, (int)PIECE_BYTES, MPI_BYTE, r, 0, MPI_COMM_WORLD, &status));
            MPI_CHECK(MPI_Get_count(&status, MPI_BYTE, &n));
            fprintf(f, "%.*s", n, piece);
        }
    }
    free(piece);
#else
    (void)between;
#endif
}

/* The worst outcome of any rank. Every rank gets the `why` of the first rank that has it, which it then names. */
static Outcome comm_outcome(const Comm* c, Outcome own, char (&why)[1024])
{
    const int worst = (int)comm_max_host(c, (int)own * c->num_ranks + c->num_ranks - 1 - c->rank);
    const Outcome outcome = (Outcome)(worst / c->num_ranks);
    if (c->num_ranks > 1 && outcome != Outcome::WELL) {
        char text[sizeof why], rank[96];
        int n = snprintf(text, sizeof text, "%s: ", rank_text(rank));
        snprintf(text + n, sizeof text - n, "%s", own == outcome ? why : "");
        comm_broadcast_host(c, text, sizeof text, c->num_ranks - 1 - worst % c->num_ranks);
        memcpy(why, text, sizeof why);
    }
    return outcome;
}

/* All ranks must have the same value: a hash of command line, data, ... */
static void comm_ensure_same(const Comm* c, uint64_t value, const char* what)
{
    char rank[96];
    uint64_t rank_0 = value;
    comm_broadcast_host(c, &rank_0, sizeof rank_0);
    ENSURE(rank_0 == value,
           "%s differs from rank 0 in %s: start all ranks from the same build, command line and files",
           rank_text(rank), what);
}

/* The same during training, for a hash of what every rank of the group stores whole. */
static void group_ensure_replica(const Group* g, uint64_t hash, size_t step)
{
    struct { uint64_t hash; int rank; } first = {hash, g->job->rank};
    group_broadcast_host(g, &first, sizeof first);
    ENSURE(first.hash == hash,
           "--check-replicas: after step %zu rank %d holds other parameters than rank %d%s (hash %016llx, not "
           "%016llx): a faulty GPU or link; resume from the last checkpoint without it", step, g->job->rank,
           first.rank, g->words, (unsigned long long)hash, (unsigned long long)first.hash);
}

/* Bytes that a rank sends for a reduce-scatter or all-gather of R*n elements, and rank 0 for an all-reduce of n. */
static inline size_t comm_scatter_bytes(const Group* g, size_t n, size_t elem_bytes)
{
    return (g->num_ranks - 1) * n * elem_bytes;
}
static inline size_t comm_all_reduce_bytes(const Group* g, size_t n, size_t elem_bytes)
{
    size_t own = ceil_div(n, g->num_ranks);   // rank 0 sums these, sends the rest to their owners, and its sum to all
    return (n - own + (g->num_ranks - 1) * own) * elem_bytes;
}

static inline size_t nccl_type_bytes(ncclDataType_t type)
{
    return type == ncclFloat32 ? 4 : type == ncclFloat64 || type == ncclUint64 ? 8 : 2;
}

/* Whether the watchdog may read c->progress: while it is allocated. */
static void comm_shows_progress(const Comm* c, bool shows)
{
    if (c->watch != nullptr) c->watch->progress = shows ? c->progress : nullptr;
}

/* Before a collective of n elements is enqueued, for which this rank sends so many bytes. */
static void comm_enqueue_begin(Group* g, const char* name, size_t n, size_t sent_bytes, cudaStream_t stream)
{
    Comm* c = g->job;
    g->asked_bytes += sent_bytes;
    watch_collective(c->watch, name, n, g->words);
    if (c->watch == nullptr) return;
    int idx = 0;
    while (idx < c->num_streams && c->streams[idx] != stream) idx++;
    ENSURE(idx < WATCH_STREAMS, "collectives on more than %d streams", (int)WATCH_STREAMS);
    if (idx == c->num_streams) c->streams[c->num_streams++] = stream;
    c->stream_idx = idx;
    watch_enqueued(c->watch, name, n, idx, g->words);
}

/* After it; those between comm_group_begin and _end count as enqueued at the end. */
static void comm_enqueue_end(const Comm* c, const char* activity, size_t n)
{
    if (c->in_group || c->watch == nullptr) return;
    watch_move(c->watch, activity, n);
    if (c->num_streams == 0) return;
    progress_mark(c->progress + c->stream_idx, c->watch->num_enqueued, c->streams[c->stream_idx]);
}

/* With one rank collectives are copies on the device. */
static SpanKind comm_kind(const Comm* c) { return c->num_ranks > 1 ? SpanKind::COMMUNICATION : SpanKind::COMPUTE; }

/* data (n) = sum over ranks, in place. */
static void comm_all_reduce(Group* g, void* data, size_t n, ncclDataType_t type, cudaStream_t stream)
{
    if (g->num_ranks == 1 || n == 0) return;
    const size_t sent_bytes = comm_all_reduce_bytes(g, n, nccl_type_bytes(type));
    CommunicationScope communication(stream, true);
    COMM_OP(stream, sent_bytes, n);
    comm_enqueue_begin(g, "ncclAllReduce", n, sent_bytes, stream);
#ifndef NO_NCCL
    NCCL_CHECK(ncclAllReduce(data, data, n, type, ncclSum, g->nccl, stream));
#else
    (void)data;
#endif
    comm_enqueue_end(g->job, "what follows ncclAllReduce", n);
}

static ncclDataType_t dtype_nccl(Dtype dtype)
{
    return dtype == Dtype::FP32 ? ncclFloat32 : dtype == Dtype::BF16 ? ncclBfloat16 : ncclFloat16;
}

/* --deterministic: receives this rank's slice of every rank as pieces (R,n) and sums them in fp32 in rank order, so
 * that the bits do not depend on NCCL's algorithm. */
static void comm_reduce_in_order(Group* g, Values out, Values inp, size_t n, bool adds, cudaStream_t stream)
{
    const Values pieces = {g->pieces, inp.dtype, nullptr};
    size_t piece_bytes = n * dtype_bytes(inp.dtype);
    CUDA_CHECK(cudaMemcpyAsync(values_from(pieces, g->rank * n).at, values_from(inp, g->rank * n).at, piece_bytes,
                               cudaMemcpyDeviceToDevice, stream));
#ifndef NO_NCCL
    NCCL_CHECK(ncclGroupStart());
    for (int i = 1; i < g->num_ranks; i++) {
        int to = (g->rank + i) % g->num_ranks, from = (g->rank + g->num_ranks - i) % g->num_ranks;
        ncclDataType_t type = dtype_nccl(inp.dtype);
        NCCL_CHECK(ncclSend(values_from(inp, to * n).at, n, type, to, g->nccl, stream));
        NCCL_CHECK(ncclRecv(values_from(pieces, from * n).at, n, type, from, g->nccl, stream));
    }
    NCCL_CHECK(ncclGroupEnd());
#endif
    values_sum(out, pieces, g->num_ranks, n, adds, stream);
}

/* out (n) = sum over ranks of their inp[rank*n ...]; inp is (R*n). `out` may be inp + rank*n. With --deterministic
 * `out` may have another type and may be added to; otherwise it has inp's type and is overwritten. */
static void comm_reduce_scatter(Group* g, Values out, Values inp, size_t n, bool adds, cudaStream_t stream)
{
    if (n == 0) return;
    if (g->num_ranks == 1) {
        if (out.at != inp.at) values_sum(out, inp, 1, n, adds, stream);
        return;
    }
    const size_t sent_bytes = comm_scatter_bytes(g, n, dtype_bytes(inp.dtype));
    COMM_OP(stream, sent_bytes, n);
    comm_enqueue_begin(g, "ncclReduceScatter", n, sent_bytes, stream);
    assert(g->pieces != nullptr || (out.dtype == inp.dtype && !adds));
    if (g->pieces != nullptr) comm_reduce_in_order(g, out, inp, n, adds, stream);
#ifndef NO_NCCL
    else NCCL_CHECK(ncclReduceScatter(inp.at, out.at, n, dtype_nccl(inp.dtype), ncclSum, g->nccl, stream));
#endif
    comm_enqueue_end(g->job, "what follows ncclReduceScatter", n);
}

/* data (R*n) = every rank's `own` (n), in rank order. `own` may be data + rank*n. */
static void comm_all_gather(Group* g, void* data, const void* own, size_t n, ncclDataType_t type, cudaStream_t stream)
{
    size_t bytes = n * nccl_type_bytes(type);
    if (n == 0) return;
    if (g->num_ranks == 1) {
        OP(stream, 0, data != own ? 2.0 * bytes : 0.0, n);
        if (data != own) CUDA_CHECK(cudaMemcpyAsync(data, own, bytes, cudaMemcpyDeviceToDevice, stream));
        return;
    }
    const size_t sent_bytes = comm_scatter_bytes(g, n, nccl_type_bytes(type));
    COMM_OP(stream, sent_bytes, n);
    comm_enqueue_begin(g, "ncclAllGather", n, sent_bytes, stream);
#ifndef NO_NCCL
    NCCL_CHECK(ncclAllGather(own, data, n, type, g->nccl, stream));
#endif
    comm_enqueue_end(g->job, "what follows ncclAllGather", n);
}

/* n floats from one rank of the group to another; call both between comm_group_begin and _end. */
static void comm_send(Group* g, const float* data, size_t n, int to, cudaStream_t stream)
{
    COMM_OP(stream, n * sizeof(float), n);
    comm_enqueue_begin(g, "ncclSend", n, n * sizeof(float), stream);
#ifndef NO_NCCL
    NCCL_CHECK(ncclSend(data, n, ncclFloat32, to, g->nccl, stream));
#else
    (void)data; (void)to;
#endif
}
static void comm_receive(Group* g, float* data, size_t n, int from, cudaStream_t stream)
{
    comm_enqueue_begin(g, "ncclRecv", n, 0, stream);
#ifndef NO_NCCL
    NCCL_CHECK(ncclRecv(data, n, ncclFloat32, from, g->nccl, stream));
#else
    (void)data; (void)from;
#endif
}

/* Collectives between begin and end, also of several groups, are sent together. */
static void comm_group_begin(Comm* c)
{
    c->in_group = true;
#ifndef NO_NCCL
    if (c->num_ranks > 1) NCCL_CHECK(ncclGroupStart());
#endif
}
static void comm_group_end(Comm* c)
{
    c->in_group = false;
#ifndef NO_NCCL
    if (c->num_ranks > 1) NCCL_CHECK(ncclGroupEnd());
#endif
    comm_enqueue_end(c, "what follows a group of collectives", 0);
}

/* Bytes this rank has sent in collectives of the group since the start. */
static size_t group_sent_so_far(const Group* g)
{
#if defined(DEVICE_CUDA)
    return g->asked_bytes;
#else
    size_t bytes = 0;
    for (int kind = 0; kind < NUM_COLLECTIVES && g->nccl != nullptr; kind++)
        bytes += nccl_wire_bytes(g->nccl, (Collective)kind);
    return bytes;
#endif
}

/* The same of all groups, and what it should be. */
static size_t comm_sent_so_far(const Comm* c)
{
    size_t bytes = 0;
    for (const Group* g = c->groups; g != nullptr; g = g->next) bytes += group_sent_so_far(g);
    return bytes;
}
static size_t comm_asked_so_far(const Comm* c)
{
    size_t bytes = 0;
    for (const Group* g = c->groups; g != nullptr; g = g->next) bytes += g->asked_bytes;
    return bytes;
}

/* What is enqueued between the two counts as of steps. */
static void comm_step_begin(const Comm* c)
{
    for (Group* g = c->groups; g != nullptr; g = g->next) g->step_bytes -= g->asked_bytes;
}
static void comm_step_end(const Comm* c)
{
    for (Group* g = c->groups; g != nullptr; g = g->next) g->step_bytes += g->asked_bytes;
}

/* Host memory of the communicator itself; NCCL's own device buffers are not known beforehand. */
static size_t comm_workspace_bytes(const Group* g)
{
#if defined(DEVICE_CUDA)
    (void)g;
    return 0;
#else
    return g->num_ranks > 1 ? nccl_workspace_bytes(g->num_ranks) : 0;
#endif
}
