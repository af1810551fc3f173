/* test_nccl.cu: every collective, type and operation, in place and not, odd counts, groups, several communicators and
 * streams, bytes sent, and messages if ranks disagree; the same for groups of ranks (zero/comm.h).
 *   ./test_nccl                  runs itself under $MPIRUN with 1 to 4 ranks, then with planted mistakes
 *   mpirun -np R ./test_nccl     the tests with R ranks */
#include <cmath>
#include "zero/comm.h"
#ifdef DEVICE_EMU
#include "kernels/emu/emu_host.h"
#endif

static int rank, num_ranks, num_passed, num_failed;
static ncclComm_t comm;
static cudaStream_t stream;

static void report(bool ok_here, const char* fmt, ...)
{
    int ok = ok_here;
    MPI_CHECK(MPI_Allreduce(MPI_IN_PLACE, &ok, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD));
    if (ok) num_passed++;
    else num_failed++;
    if (rank != 0) return;
    printf(ok ? "ok " : "FAILED ");
    va_list args;
    va_start(args, fmt);
    vprintf(fmt, args);
    va_end(args);
    printf("\n");
}

/* ---- host arrays of any NCCL type, seen as doubles */

static const struct { ncclDataType_t type; const char* name; size_t size_bytes; } types[] = {
    {ncclFloat32, "fp32", 4}, {ncclFloat64, "fp64", 8}, {ncclFloat16, "fp16", 2}, {ncclBfloat16, "bf16", 2},
    {ncclInt32, "int32", 4}, {ncclInt64, "int64", 8}, {ncclUint64, "uint64", 8}, {ncclInt8, "int8", 1},
    {ncclUint8, "uint8", 1},
};
static const int NUM_TYPES = (int)(sizeof types / sizeof *types);
static const char* const op_names[] = {"sum", "prod", "max", "min", "avg"};

static double get(const void* p, size_t i, int type)
{
    switch (types[type].type) {
    case ncclFloat32: return ((const float*)p)[i];
    case ncclFloat64: return ((const double*)p)[i];
    case ncclFloat16: return __half2float(((const __half*)p)[i]);
    case ncclBfloat16: return __bfloat162float(((const __nv_bfloat16*)p)[i]);
    case ncclInt32: return ((const int32_t*)p)[i];
    case ncclInt64: return (double)((const int64_t*)p)[i];
    case ncclUint64: return (double)((const uint64_t*)p)[i];
    case ncclInt8: return ((const int8_t*)p)[i];
    default: return ((const uint8_t*)p)[i];
    }
}

static void put(void* p, size_t i, int type, double x)
{
    switch (types[type].type) {
    case ncclFloat32: ((float*)p)[i] = (float)x; break;
    case ncclFloat64: ((double*)p)[i] = x; break;
    case ncclFloat16: ((__half*)p)[i] = __float2half_rn((float)x); break;
    case ncclBfloat16: ((__nv_bfloat16*)p)[i] = __float2bfloat16_rn((float)x); break;
    case ncclInt32: ((int32_t*)p)[i] = (int32_t)x; break;
    case ncclInt64: ((int64_t*)p)[i] = (int64_t)x; break;
    case ncclUint64: ((uint64_t*)p)[i] = (uint64_t)x; break;
    case ncclInt8: ((int8_t*)p)[i] = (int8_t)x; break;
    default: ((uint8_t*)p)[i] = (uint8_t)x;
    }
}

/* Small whole numbers: every type holds them, their sums and their products exactly. */
static double value(int r, size_t i) { return (double)(1 + (i * 7 + (size_t)r * 3) % 4); }

static double combined(size_t i, int op, int type)
{
    double x = value(0, i);
    for (int r = 1; r < num_ranks; r++) {
        double y = value(r, i);
        x = op == ncclProd ? x * y : op == ncclMax ? fmax(x, y) : op == ncclMin ? fmin(x, y) : x + y;
    }
    if (op != ncclAvg) return x;
    unsigned char bits[8];                           // as the type rounds it
    put(bits, 0, type, types[type].type == ncclFloat64 ? x / num_ranks : (double)((float)x / (float)num_ranks));
    return get(bits, 0, type);
}

/* ---- one collective, all its forms */

static char *send_buffer, *recv_buffer, *host_buffer;
static const size_t BUFFER_BYTES = 24 << 20;

static void fill_device(char* device, size_t count, int type, size_t first)
{
    for (size_t i = 0; i < count; i++) put(host_buffer, i, type, value(rank, first + i));
    CUDA_CHECK(cudaMemcpyAsync(device, host_buffer, count * types[type].size_bytes, cudaMemcpyHostToDevice, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

static void fetch(const char* device, size_t count, int type)
{
    CUDA_CHECK(cudaMemcpyAsync(host_buffer, device, count * types[type].size_bytes, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

static bool all_reduce_right(size_t count, int type, int op, bool in_place)
{
    fill_device(send_buffer, count, type, 0);
    char* out = in_place ? send_buffer : recv_buffer;
    NCCL_CHECK(ncclAllReduce(send_buffer, out, count, types[type].type, (ncclRedOp_t)op, comm, stream));
    fetch(out, count, type);
    for (size_t i = 0; i < count; i++) {
        if (get(host_buffer, i, type) != combined(i, op, type)) return false;
    }
    return true;
}

static bool reduce_scatter_right(size_t count, int type, int op, bool in_place)
{
    fill_device(send_buffer, count * (size_t)num_ranks, type, 0);
    char* out = in_place ? send_buffer + (size_t)rank * count * types[type].size_bytes : recv_buffer;
    NCCL_CHECK(ncclReduceScatter(send_buffer, out, count, types[type].type, (ncclRedOp_t)op, comm, stream));
    fetch(out, count, type);
    for (size_t i = 0; i < count; i++) {
        if (get(host_buffer, i, type) != combined((size_t)rank * count + i, op, type)) return false;
    }
    return true;
}

static bool all_gather_right(size_t count, int type, bool in_place)
{
    char* in = in_place ? recv_buffer + (size_t)rank * count * types[type].size_bytes : send_buffer;
    fill_device(in, count, type, (size_t)rank * count);
    NCCL_CHECK(ncclAllGather(in, recv_buffer, count, types[type].type, comm, stream));
    fetch(recv_buffer, count * (size_t)num_ranks, type);
    for (size_t i = 0; i < count * (size_t)num_ranks; i++) {
        if (get(host_buffer, i, type) != value((int)(i / count), i)) return false;
    }
    return true;
}

static bool broadcast_right(size_t count, int type, int root, bool in_place)
{
    fill_device(send_buffer, count, type, 0);
    char* out = in_place ? send_buffer : recv_buffer;
    NCCL_CHECK(ncclBroadcast(send_buffer, out, count, types[type].type, root, comm, stream));
    fetch(out, count, type);
    for (size_t i = 0; i < count; i++) {
        if (get(host_buffer, i, type) != value(root, i)) return false;
    }
    return true;
}

static bool reduce_right(size_t count, int type, int op, int root, bool in_place)
{
    fill_device(send_buffer, count, type, 0);
    char* out = in_place ? send_buffer : recv_buffer;
    NCCL_CHECK(ncclReduce(send_buffer, out, count, types[type].type, (ncclRedOp_t)op, root, comm, stream));
    if (rank != root) return true;
    fetch(out, count, type);
    for (size_t i = 0; i < count; i++) {
        if (get(host_buffer, i, type) != combined(i, op, type)) return false;
    }
    return true;
}

static void test_collectives(size_t count, int type)
{
    for (int in_place = 0; in_place < 2; in_place++) {
        const char* form = in_place ? "in place" : "out of place";
        for (int op = 0; op < ncclNumOps; op++) {
            report(all_reduce_right(count, type, op, in_place), "all_reduce %s %s %zu %s", types[type].name,
                   op_names[op], count, form);
            report(reduce_scatter_right(count, type, op, in_place), "reduce_scatter %s %s %zu %s", types[type].name,
                   op_names[op], count, form);
        }
        int root = num_ranks - 1;
        report(all_gather_right(count, type, in_place), "all_gather %s %zu %s", types[type].name, count, form);
        report(broadcast_right(count, type, root, in_place), "broadcast %s %zu %s", types[type].name, count, form);
        report(reduce_right(count, type, ncclSum, root, in_place), "reduce %s %zu %s", types[type].name, count, form);
    }
}

/* ---- sends and receives */

static void test_ring(size_t count)
{
    int next = (rank + 1) % num_ranks, last = (rank + num_ranks - 1) % num_ranks, fp32 = 0;
    fill_device(send_buffer, count, fp32, 0);
    NCCL_CHECK(ncclGroupStart());
    NCCL_CHECK(ncclSend(send_buffer, count, ncclFloat32, next, comm, stream));
    NCCL_CHECK(ncclRecv(recv_buffer, count, ncclFloat32, last, comm, stream));
    NCCL_CHECK(ncclGroupEnd());
    fetch(recv_buffer, count, fp32);
    bool ok = true;
    for (size_t i = 0; i < count; i++) ok = ok && get(host_buffer, i, fp32) == value(last, i);
    report(ok, "send and receive around a ring %zu", count);
}

static void test_all_to_all(size_t count)
{
    int fp32 = 0;
    fill_device(send_buffer, count * (size_t)num_ranks, fp32, 0);
    NCCL_CHECK(ncclGroupStart());
    for (int peer = 0; peer < num_ranks; peer++) {
        float *to = (float*)send_buffer + (size_t)peer * count, *from = (float*)recv_buffer + (size_t)peer * count;
        NCCL_CHECK(ncclSend(to, count, ncclFloat32, peer, comm, stream));
        NCCL_CHECK(ncclRecv(from, count, ncclFloat32, peer, comm, stream));
    }
    NCCL_CHECK(ncclGroupEnd());
    fetch(recv_buffer, count * (size_t)num_ranks, fp32);
    bool ok = true;
    for (size_t i = 0; i < count * (size_t)num_ranks; i++)
        ok = ok && get(host_buffer, i, fp32) == value((int)(i / count), (size_t)rank * count + i % count);
    report(ok, "all to all in one group %zu", count);
}

/* A pipeline without a group: each rank receives from the one before and sends to the one behind. */
static void test_pipeline(size_t count)
{
    int fp32 = 0;
    fill_device(recv_buffer, count, fp32, 0);
    if (rank > 0) NCCL_CHECK(ncclRecv(recv_buffer, count, ncclFloat32, rank - 1, comm, stream));
    if (rank + 1 < num_ranks) NCCL_CHECK(ncclSend(recv_buffer, count, ncclFloat32, rank + 1, comm, stream));
    fetch(recv_buffer, count, fp32);
    bool ok = true;
    for (size_t i = 0; i < count; i++) ok = ok && get(host_buffer, i, fp32) == value(0, i);
    report(ok, "pipeline of sends %zu", count);
}

/* ---- groups, streams, communicators */

static void test_group(void)
{
    size_t count = 1001;
    int fp32 = 0;
    fill_device(send_buffer, 2 * count, fp32, 0);
    float* in = (float*)send_buffer;
    NCCL_CHECK(ncclGroupStart());
    NCCL_CHECK(ncclAllReduce(in, recv_buffer, count, ncclFloat32, ncclSum, comm, stream));
    NCCL_CHECK(ncclAllReduce(in + count, in + count, count, ncclFloat32, ncclMax, comm, stream));
    NCCL_CHECK(ncclGroupEnd());
    fetch(recv_buffer, count, fp32);
    bool ok = true;
    for (size_t i = 0; i < count; i++) ok = ok && get(host_buffer, i, fp32) == combined(i, ncclSum, fp32);
    fetch((char*)(in + count), count, fp32);
    for (size_t i = 0; i < count; i++) ok = ok && get(host_buffer, i, fp32) == combined(count + i, ncclMax, fp32);
    report(ok, "two all_reduce in a group");
}

static void test_two_communicators(void)
{
    size_t count = 40001;
    int fp32 = 0;
    ncclUniqueId id = {};
    if (rank == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    MPI_CHECK(MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD));
    ncclComm_t other_comm;
    cudaStream_t other_stream;
    NCCL_CHECK(ncclCommInitRank(&other_comm, num_ranks, id, rank));
    CUDA_CHECK(cudaStreamCreateWithFlags(&other_stream, cudaStreamNonBlocking));
    float *a = (float*)send_buffer, *b = a + count, *out = (float*)recv_buffer;
    bool ok = true;
    for (int i = 0; i < 8; i++) {
        fill_device((char*)a, 2 * count, fp32, 0);
        NCCL_CHECK(ncclAllReduce(a, out, count, ncclFloat32, ncclSum, comm, stream));
        NCCL_CHECK(ncclAllReduce(b, out + count, count, ncclFloat32, ncclSum, other_comm, other_stream));
        NCCL_CHECK(ncclBroadcast(a, out + 2 * count, count, ncclFloat32, 0, comm, stream));
        CUDA_CHECK(cudaStreamSynchronize(i % 2 ? stream : other_stream));
        CUDA_CHECK(cudaDeviceSynchronize());
        fetch((char*)out, 3 * count, fp32);
        for (size_t k = 0; k < 2 * count; k++) ok = ok && get(host_buffer, k, fp32) == combined(k, ncclSum, fp32);
        for (size_t k = 0; k < count; k++) ok = ok && get(host_buffer, 2 * count + k, fp32) == value(0, k);
    }
    report(ok, "two communicators on two streams");
    CUDA_CHECK(cudaStreamDestroy(other_stream));
    NCCL_CHECK(ncclCommDestroy(other_comm));
}

static void test_split(void)
{
    ncclComm_t half_comm;
    NCCL_CHECK(ncclCommSplit(comm, rank % 2, rank, &half_comm, nullptr));
    float one = 1, sum = 0;
    CUDA_CHECK(cudaMemcpyAsync(send_buffer, &one, 4, cudaMemcpyHostToDevice, stream));
    NCCL_CHECK(ncclAllReduce(send_buffer, send_buffer, 1, ncclFloat32, ncclSum, half_comm, stream));
    CUDA_CHECK(cudaMemcpyAsync(&sum, send_buffer, 4, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    report(sum == (float)((num_ranks + 1 - rank % 2) / 2), "split into even and odd ranks");
    NCCL_CHECK(ncclCommDestroy(half_comm));
}

/* Sums over a row of a grid of ranks feed gathers over its columns, while sums over all ranks run: the host calls all
 * of it at once, and each rank runs it in an order of its own. */
static void test_grid(int seed)
{
    enum { ROUNDS = 6, COUNT = 1003 };
    const int row = rank / 2, column = rank % 2, num_rows = (num_ranks + 1) / 2;
    const int column_size = (num_ranks + 1 - column) / 2;
    ncclComm_t row_comm, column_comm;
    cudaStream_t columns, others;
    cudaEvent_t summed;
    NCCL_CHECK(ncclCommSplit(comm, row, column, &row_comm, nullptr));
    NCCL_CHECK(ncclCommSplit(comm, column, row, &column_comm, nullptr));
    CUDA_CHECK(cudaStreamCreateWithFlags(&columns, cudaStreamNonBlocking));
    CUDA_CHECK(cudaStreamCreateWithFlags(&others, cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreateWithFlags(&summed, cudaEventDisableTiming));
    float *in = (float*)send_buffer, *sums = (float*)recv_buffer, *all = sums + ROUNDS * COUNT;
    float* gathered = all + ROUNDS * COUNT;          // (ROUNDS, column_size, COUNT)
    fill_device(send_buffer, COUNT, 0, 0);
#ifdef DEVICE_EMU
    const uint64_t seed_before = emu_options.seed;
    emu_options.seed = (uint64_t)seed * 1000 + (seed > 0 ? (uint64_t)rank : 0);
#endif
    for (int i = 0; i < ROUNDS; i++) {
        NCCL_CHECK(ncclAllReduce(in, sums + i * COUNT, COUNT, ncclFloat32, ncclSum, row_comm, stream));
        CUDA_CHECK(cudaEventRecord(summed, stream));
        NCCL_CHECK(ncclAllReduce(in, all + i * COUNT, COUNT, ncclFloat32, ncclSum, comm, others));
        CUDA_CHECK(cudaStreamWaitEvent(columns, summed, 0));
        NCCL_CHECK(ncclAllGather(sums + i * COUNT, gathered + i * column_size * COUNT, COUNT, ncclFloat32, column_comm,
                                 columns));
    }
    CUDA_CHECK(cudaDeviceSynchronize());
#ifdef DEVICE_EMU
    emu_options.seed = seed_before;
#endif
    bool ok = true;
    fetch((char*)all, (size_t)ROUNDS * COUNT, 0);
    for (int i = 0; i < ROUNDS * COUNT; i++) ok = ok && get(host_buffer, i, 0) == combined(i % COUNT, ncclSum, 0);
    fetch((char*)gathered, (size_t)ROUNDS * column_size * COUNT, 0);
    for (int i = 0; i < ROUNDS * column_size * COUNT; i++) {
        const int r = 2 * (i / COUNT % column_size);
        double sum = value(r, i % COUNT) + (r + 1 < num_ranks ? value(r + 1, i % COUNT) : 0);
        ok = ok && get(host_buffer, i, 0) == sum;
    }
    report(ok, "rows and columns of a grid of %d x 2 ranks, seed %d", num_rows, seed);
    CUDA_CHECK(cudaEventDestroy(summed));
    CUDA_CHECK(cudaStreamDestroy(columns));
    CUDA_CHECK(cudaStreamDestroy(others));
    NCCL_CHECK(ncclCommDestroy(row_comm));
    NCCL_CHECK(ncclCommDestroy(column_comm));
}

/* ---- groups of ranks: rank = t + tp * d, as tensor and data parallelism have it */

enum { GRID_COUNT = 1008 };                          // elements: a multiple of every number of ranks tested

typedef struct Grid { Comm job; Group all, tp, dp; int t, d; } Grid;

static void grid_begin(Grid* g)
{
    *g = Grid{};
    const int tp = num_ranks % 2 == 0 ? 2 : num_ranks;
    g->job.rank = rank;
    g->job.num_ranks = num_ranks;
    g->t = rank % tp;
    g->d = rank / tp;
    group_all(&g->all, &g->job);
    group_connect(&g->all);
    group_split(&g->tp, &g->all, g->d, g->t, "tp");
    group_split(&g->dp, &g->all, g->t, g->d, "dp");
}

static void grid_end(Grid* g)
{
    for (Group* group : {&g->all, &g->tp, &g->dp}) group_free(group);
}

/* Who is in which group, also seen from ranks of other groups, and the words for messages. */
static void test_group_ranks(const Grid* g)
{
    bool ok = g->tp.rank == g->t && g->dp.rank == g->d && g->tp.num_ranks * g->dp.num_ranks == num_ranks;
    for (int r = 0; r < num_ranks; r++) {
        ok = ok && group_rank_of(&g->all, r) == r && group_rank_of(&g->tp, r) == r % g->tp.num_ranks;
        ok = ok && group_rank_of(&g->dp, r) == r / g->tp.num_ranks;
    }
    report(ok, "ranks of a grid of %d x %d", g->dp.num_ranks, g->tp.num_ranks);
    char tp_words[64] = "", dp_words[64] = "";
    if (num_ranks == 4) {
        snprintf(tp_words, sizeof tp_words, " in tp group %d (ranks %d, %d)", g->d, 2 * g->d, 2 * g->d + 1);
        snprintf(dp_words, sizeof dp_words, " in dp group %d (ranks %d, %d)", g->t, g->t, g->t + 2);
        report(strcmp(g->tp.words, tp_words) == 0 && strcmp(g->dp.words, dp_words) == 0 && g->all.words[0] == 0,
               "words for groups");
    }
    const int ranks[40] = {0, 10, 20, 30, 40, 50, 60, 70, 80};
    Group many = {};
    many.num_ranks = 40;
    group_name(&many, "tp", 3, ranks);
    report(strcmp(many.words, " in tp group 3 (ranks 0, 10, 20, 30, 40, 50, 60, ... 0)") == 0, "words for many ranks");
    int last = rank;
    group_broadcast_host(&g->tp, &last, sizeof last, g->tp.num_ranks - 1);
    report(last == (g->d + 1) * g->tp.num_ranks - 1, "a broadcast in each tp group");
}

static double dp_sum(const Grid* g, size_t i)
{
    double sum = 0;
    for (int d = 0; d < g->dp.num_ranks; d++) sum += value(d * g->tp.num_ranks + g->t, i);
    return sum;
}

/* Sums over tp groups feed reduce-scatters and gathers over dp groups on another stream, which so make the sums over
 * all ranks; meanwhile those are made directly, and sums over dp groups with them, in one group of calls. */
static void test_groups(Grid* g, bool in_order, int seed)
{
    enum { ROUNDS = 5 };
    cudaStream_t others;
    cudaEvent_t summed;
    char* pieces;
    const size_t slice = GRID_COUNT / (size_t)g->dp.num_ranks, size_bytes = GRID_COUNT * sizeof(float);
    CUDA_CHECK(cudaStreamCreateWithFlags(&others, cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreateWithFlags(&summed, cudaEventDisableTiming));
    CUDA_CHECK(cudaMalloc(&pieces, size_bytes));
    g->dp.pieces = in_order ? pieces : nullptr;
    float* rows[3 * ROUNDS];                         // (GRID_COUNT) each: by tp and dp, by all, by dp
    for (int i = 0; i < 3 * ROUNDS; i++) {
        rows[i] = (float*)recv_buffer + i * GRID_COUNT;
        fill_device((char*)rows[i], GRID_COUNT, 0, 0);
    }
#ifdef DEVICE_EMU
    const uint64_t seed_before = emu_options.seed;
    emu_options.seed = (uint64_t)seed * 1000 + (seed > 0 ? (uint64_t)rank : 0);
#endif
    for (int i = 0; i < ROUNDS; i++) {
        float *grid = rows[3 * i], *all = rows[3 * i + 1], *dp = rows[3 * i + 2];
        comm_all_reduce(&g->tp, grid, GRID_COUNT, ncclFloat32, stream);
        CUDA_CHECK(cudaEventRecord(summed, stream));
        comm_group_begin(&g->job);
        comm_all_reduce(&g->all, all, GRID_COUNT, ncclFloat32, stream);
        comm_all_reduce(&g->dp, dp, GRID_COUNT, ncclFloat32, stream);
        comm_group_end(&g->job);
        CUDA_CHECK(cudaStreamWaitEvent(others, summed, 0));
        const Values whole = values_of(grid), own = values_of(grid + g->dp.rank * slice);
        comm_reduce_scatter(&g->dp, own, whole, slice, false, others);
        comm_all_gather(&g->dp, grid, own.at, slice, ncclFloat32, others);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
#ifdef DEVICE_EMU
    emu_options.seed = seed_before;
#endif
    bool ok = true;
    for (int row = 0; row < 3 * ROUNDS; row++) {
        fetch((char*)rows[row], GRID_COUNT, 0);
        for (size_t i = 0; i < GRID_COUNT; i++)
            ok = ok && get(host_buffer, i, 0) == (row % 3 == 2 ? dp_sum(g, i) : combined(i, ncclSum, 0));
    }
    report(ok, "tp and dp groups of %d x %d ranks%s, seed %d", g->dp.num_ranks, g->tp.num_ranks,
           in_order ? ", in rank order" : "", seed);
    CUDA_CHECK(cudaFree(pieces));
    g->dp.pieces = nullptr;
    CUDA_CHECK(cudaEventDestroy(summed));
    CUDA_CHECK(cudaStreamDestroy(others));
}

/* Each group has its own counters. */
static void test_group_bytes(Grid* g)
{
    const Group* groups[3] = {&g->all, &g->tp, &g->dp};
    const size_t n = GRID_COUNT, slice = n / (size_t)g->dp.num_ranks;
    size_t asked[3], sent[3], total = comm_asked_so_far(&g->job);
    for (int i = 0; i < 3; i++) {
        asked[i] = groups[i]->asked_bytes;
        sent[i] = group_sent_so_far(groups[i]);
    }
    fill_device(send_buffer, n, 0, 0);
    comm_all_reduce(&g->tp, send_buffer, n, ncclFloat32, stream);
    comm_all_gather(&g->dp, recv_buffer, send_buffer, slice, ncclFloat32, stream);
    CUDA_CHECK(cudaStreamSynchronize(stream));
    const size_t want[3] = {0, comm_all_reduce_bytes(&g->tp, n, 4), (n - slice) * 4};
    for (int i = 0; i < 3; i++) {
        const char* name = i == 0 ? "all" : i == 1 ? "tp" : "dp";
        report(groups[i]->asked_bytes - asked[i] == want[i], "bytes asked of %s", name);
        report(group_sent_so_far(groups[i]) - sent[i] == want[i], "bytes sent in %s", name);
    }
    report(comm_asked_so_far(&g->job) - total == want[1] + want[2], "bytes asked of all groups");
    report(comm_asked_so_far(&g->job) == comm_sent_so_far(&g->job), "bytes sent in all groups");
}

/* ---- what only the MPI version promises: rank order, equal bits, bytes sent */

#ifndef DEVICE_CUDA
static float random_value(int r, size_t i)
{
    uint64_t z = ((uint64_t)r << 40) + i * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return (float)((double)(z >> 11) / 9007199254740992.0 - 0.5);
}

static void test_rank_order(int type)
{
    size_t count = 12345, total = count * (size_t)num_ranks, size_bytes = types[type].size_bytes;
    for (size_t i = 0; i < total; i++) put(host_buffer, i, type, random_value(rank, i));
    CUDA_CHECK(cudaMemcpyAsync(send_buffer, host_buffer, total * size_bytes, cudaMemcpyHostToDevice, stream));
    NCCL_CHECK(ncclAllReduce(send_buffer, recv_buffer, total, types[type].type, ncclSum, comm, stream));
    char* own = send_buffer + (size_t)rank * count * size_bytes;
    NCCL_CHECK(ncclReduceScatter(send_buffer, own, count, types[type].type, ncclSum, comm, stream));
    NCCL_CHECK(ncclAllGather(own, send_buffer, count, types[type].type, comm, stream));
    char* want = (char*)malloc_checked(total * size_bytes);
    for (size_t i = 0; i < total; i++) {
        float sum = 0;
        for (int r = 0; r < num_ranks; r++) {
            unsigned char bits[8];
            put(bits, 0, type, random_value(r, i));
            sum = r == 0 ? (float)get(bits, 0, type) : sum + (float)get(bits, 0, type);
        }
        put(want, i, type, sum);
    }
    fetch(recv_buffer, total, type);
    report(memcmp(host_buffer, want, total * size_bytes) == 0, "all_reduce %s: the sum in rank order, to the bit",
           types[type].name);
    fetch(send_buffer, total, type);
    report(memcmp(host_buffer, want, total * size_bytes) == 0, "reduce_scatter + all_gather %s: the same bits",
           types[type].name);
    free(want);
}

static void test_wire_bytes(void)
{
    size_t count = 60060 * (size_t)num_ranks;        // divisible by every number of ranks tested
    uint64_t others = (uint64_t)num_ranks - 1, ring_bytes = count * 4 / (uint64_t)num_ranks * others;
    uint64_t before[3];
    for (int k = 0; k < 3; k++) before[k] = nccl_wire_bytes(comm, (Collective)k);
    fill_device(send_buffer, count, 0, 0);
    NCCL_CHECK(ncclAllReduce(send_buffer, recv_buffer, count, ncclFloat32, ncclSum, comm, stream));
    size_t part = count / (size_t)num_ranks;
    NCCL_CHECK(ncclReduceScatter(send_buffer, recv_buffer, part, ncclFloat32, ncclSum, comm, stream));
    NCCL_CHECK(ncclAllGather(send_buffer, recv_buffer, part, ncclFloat32, comm, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    uint64_t sent[3];
    for (int k = 0; k < 3; k++) sent[k] = nccl_wire_bytes(comm, (Collective)k) - before[k];
    report(sent[(int)Collective::ALL_REDUCE] == 2 * ring_bytes, "wire bytes of all_reduce: 2n(R-1)/R");
    report(sent[(int)Collective::REDUCE_SCATTER] == ring_bytes, "wire bytes of reduce_scatter: n(R-1)/R");
    report(sent[(int)Collective::ALL_GATHER] == ring_bytes, "wire bytes of all_gather: n(R-1)/R");
}
#endif

/* ---- planted mistakes: each must end the program with a message */

#ifndef DEVICE_CUDA
static const struct { const char *name, *message; } mistakes[] = {
    {"kind", "collective mismatch"}, {"count", "collective mismatch"}, {"order", "collective mismatch"},
    {"transfer", "counts differ"},
    {"group", "in ncclAllReduce of 1008 elements in tp group 1 (ranks 2, 3) for"},
    {"replica", "rank 3 holds other parameters than rank 1 in dp group 1 (ranks 1, 3) (hash"},
#ifdef DEVICE_EMU
    {"absent", "deadlock, all ranks wait: rank 0 in cudaStreamSynchronize"},
    {"absent_host", "deadlock, all ranks wait: rank 0 in MPI_Barrier"},
#endif
};
#endif

/* Rank 3 does not come: the watchdog of rank 2 names the group. Ranks 0 and 1, whose group is whole, only wait. */
static void leave_group(Grid* g)
{
    Comm* c = &g->job;
    MPI_CHECK(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &c->host));
    c->host_rank = rank;
    c->host_num_ranks = num_ranks;
    CUDA_CHECK(cudaMallocHost(&c->progress, WATCH_STREAMS * sizeof *c->progress));
    memset(c->progress, 0, WATCH_STREAMS * sizeof *c->progress);
    comm_watch(c, 2);
    comm_shows_progress(c, true);
    comm_idle(c, rank != 2);
    if (rank != 3) comm_all_reduce(&g->tp, send_buffer, GRID_COUNT, ncclFloat32, stream);
    CUDA_CHECK(cudaStreamSynchronize(stream));
    usleep(30 * 1000 * 1000);
}

static void make_group_mistake(const char* name)
{
    Grid g;
    grid_begin(&g);
    if (strcmp(name, "group") == 0) leave_group(&g);
    else group_ensure_replica(&g.dp, rank == 3, 5);
    grid_end(&g);
}

static void make_mistake(const char* name)
{
    if (strcmp(name, "group") == 0 || strcmp(name, "replica") == 0) return make_group_mistake(name);
    size_t count = 1000 + (rank == 1 && strcmp(name, "count") == 0 ? 500 : 0);
    if (strcmp(name, "transfer") == 0) {
        if (rank == 0) NCCL_CHECK(ncclSend(send_buffer, 2000, ncclFloat32, 1, comm, stream));
        if (rank == 1) NCCL_CHECK(ncclRecv(recv_buffer, 1000, ncclFloat32, 0, comm, stream));
    } else if (strncmp(name, "absent", 6) == 0 && rank == 1) {
        return;                                      // to the end of the program
    } else if (strcmp(name, "absent_host") == 0) {
        MPI_CHECK(MPI_Barrier(MPI_COMM_WORLD));
    } else if (rank == 1 && strcmp(name, "kind") == 0) {
        NCCL_CHECK(ncclAllGather(send_buffer, recv_buffer, count, ncclFloat32, comm, stream));
    } else if (rank == 1 && strcmp(name, "order") == 0) {
        NCCL_CHECK(ncclBroadcast(send_buffer, recv_buffer, count, ncclFloat32, 0, comm, stream));
        NCCL_CHECK(ncclAllReduce(send_buffer, recv_buffer, count, ncclFloat32, ncclSum, comm, stream));
    } else {
        NCCL_CHECK(ncclAllReduce(send_buffer, recv_buffer, count, ncclFloat32, ncclSum, comm, stream));
        NCCL_CHECK(ncclBroadcast(send_buffer, recv_buffer, count, ncclFloat32, 0, comm, stream));
    }
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

/* ---- time of one collective, for dev: mpirun -np R ./test_nccl --bench */

static void bench(void)
{
    static const size_t sizes[] = {8, 4096, 65536, 1 << 20, 4 << 20, 16 << 20};
    for (size_t size_bytes : sizes) {
        for (int kind = 0; kind < 3; kind++) {
            size_t n = size_bytes / 4, part = n / (size_t)num_ranks;
            int num_repeats = size_bytes < 1 << 20 ? 100 : 10;
            double start_s = 0;
            for (int i = -2; i < num_repeats; i++) {
                if (i == 0) {
                    CUDA_CHECK(cudaDeviceSynchronize());
                    MPI_CHECK(MPI_Barrier(MPI_COMM_WORLD));
                    start_s = MPI_Wtime();
                }
                char *in = send_buffer, *out = recv_buffer;
                if (kind == 0) NCCL_CHECK(ncclAllReduce(in, out, n, ncclFloat32, ncclSum, comm, stream));
                if (kind == 1) NCCL_CHECK(ncclReduceScatter(in, out, part, ncclFloat32, ncclSum, comm, stream));
                if (kind == 2) NCCL_CHECK(ncclAllGather(in, out, part, ncclFloat32, comm, stream));
            }
            CUDA_CHECK(cudaDeviceSynchronize());
            double us = (MPI_Wtime() - start_s) / num_repeats * 1e6;
            static const char* const names[] = {"all_reduce", "reduce_scatter", "all_gather"};
            if (rank == 0)
                printf("%-14s %9zu bytes %10.1f us  %7.3f GB/s\n", names[kind], size_bytes, us,
                       (double)size_bytes / us * 1e-3);
        }
    }
}

/* ---- the launcher */

static int run_child(const char* self, int num_child_ranks, const char* mistake, const char* message)
{
    const char* mpirun = getenv("MPIRUN");
    char command[1024];
    snprintf(command, sizeof command, "%s -np %d %s %s %s 2>&1",
             mpirun != nullptr ? mpirun : "mpirun --allow-run-as-root --oversubscribe", num_child_ranks, self,
             mistake != nullptr ? "--mistake" : "", mistake != nullptr ? mistake : "");
    FILE* pipe = popen(command, "r");
    ENSURE(pipe != nullptr, "cannot run %s", command);
    char line[4096];
    bool seen = false;
    int passed = 0, failed = 0, child_passed, child_failed;
    while (fgets(line, sizeof line, pipe) != nullptr) {
        if (mistake != nullptr) seen = seen || strstr(line, message) != nullptr;
        else if (sscanf(line, "%d passed, %d failed", &child_passed, &child_failed) == 2) {
            passed = child_passed;
            failed = child_failed;
        } else if (strncmp(line, "ok ", 3) != 0) fputs(line, stdout);
    }
    int status = pclose(pipe);
    if (mistake != nullptr) {
        bool ok = seen && status != 0;
        printf("%s mistake %s with %d ranks: \"%s\"\n", ok ? "ok" : "FAILED", mistake, num_child_ranks, message);
        num_passed += ok;
        num_failed += !ok;
        return 0;
    }
    bool ok = status == 0 && failed == 0 && passed > 0;
    printf("%s %d ranks: %d passed, %d failed\n", ok ? "ok" : "FAILED", num_child_ranks, passed, failed);
    num_passed += passed;
    num_failed += ok ? 0 : failed + 1;
    return 0;
}

static int launch_all(const char* self)
{
    for (int r = 1; r <= 4; r++) run_child(self, r, nullptr, nullptr);
#ifndef DEVICE_CUDA
    for (const auto& mistake : mistakes)
        run_child(self, strstr(mistake.message, "group 1") != nullptr ? 4 : 2, mistake.name, mistake.message);
    run_child(self, 3, mistakes[0].name, mistakes[0].message);
#endif
    printf("%d passed, %d failed\n", num_passed, num_failed);
    return num_failed != 0;
}

int main(int argc, char** argv)
{
    if (getenv("OMPI_COMM_WORLD_SIZE") == nullptr && getenv("PMI_SIZE") == nullptr) return launch_all(argv[0]);
    MPI_CHECK(MPI_Init(&argc, &argv));
    MPI_CHECK(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
    MPI_CHECK(MPI_Comm_size(MPI_COMM_WORLD, &num_ranks));
    die_rank = rank;
    die_num_ranks = num_ranks;
    int num_devices = 1;
    CUDA_CHECK(cudaGetDeviceCount(&num_devices));
    CUDA_CHECK(cudaSetDevice(rank % num_devices));
    ncclUniqueId id = {};
    if (rank == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    MPI_CHECK(MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD));
    NCCL_CHECK(ncclCommInitRank(&comm, num_ranks, id, rank));
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaMalloc(&send_buffer, BUFFER_BYTES));
    CUDA_CHECK(cudaMalloc(&recv_buffer, BUFFER_BYTES));
    host_buffer = (char*)malloc_checked(BUFFER_BYTES);
    if (argc > 2) make_mistake(argv[2]);
    else if (argc > 1) bench();
    else {
        for (int type = 0; type < NUM_TYPES; type++) {
            test_collectives(1, type);
            test_collectives(1003, type);
        }
        test_collectives(300007, 0);
        test_collectives(300007, 3);
        test_collectives(0, 0);
        test_ring(5);
        test_ring(100003);
        test_all_to_all(1025);
        test_pipeline(777);
        test_group();
        test_two_communicators();
        test_split();
        for (int seed = 0; seed < 5; seed++) test_grid(seed);
        Grid grid;
        grid_begin(&grid);
        test_group_ranks(&grid);
        for (int seed = 0; seed < 6; seed++) test_groups(&grid, seed % 2 == 1, seed);
        test_group_bytes(&grid);
        grid_end(&grid);
#ifndef DEVICE_CUDA
        test_rank_order(0);
        test_rank_order(2);
        test_rank_order(3);
        test_wire_bytes();
#endif
        if (rank == 0) printf("%d passed, %d failed\n", num_passed, num_failed);
    }
    NCCL_CHECK(ncclCommDestroy(comm));
    MPI_CHECK(MPI_Finalize());
    return num_failed != 0;
}
