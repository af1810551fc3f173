/* nccl_staged.h: part of nccl.cpp: a collective as copies and a host function on its stream, for device memory that the
 * host cannot read and streams that run by themselves:
 *     wait for the collective before, on whichever stream
 *     device -> pinned: what is sent        fill with NaN: what is received
 *     host function: the ranks exchange it by MPI, from pinned memory to pinned memory
 *     pinned -> device: what is received
 * The driver runs the host functions of all streams one after another in a thread of its own. One that blocks in MPI
 * would hold up another that a peer needs first: so each collective begins when the one before it has ended, in the
 * order of the host's calls, which all ranks share (NCCL orders those of a communicator so). Then one pinned buffer is
 * enough as well. The NaN shows who reads a result without waiting for its event. */
#pragma once

#ifdef DEVICE_CUDA
extern "C" int MPI_Init(int* argc, char*** argv) { return mpi_init(argc, argv, true); }

void stream_drain_all(void) { ENSURE(cudaDeviceSynchronize() == cudaSuccess, "the device reports an error"); }
#endif

static struct { char* p; size_t size_bytes; cudaEvent_t end; } staging;   // end: of the newest collective

size_t nccl_staging_bytes(void) { return staging.size_bytes; }

/* What is copied: p is where the work finds it. */
struct StagedPart { bool is_send; const char** p; char *device, *pinned; size_t size_bytes; };

#define CUDA_TRY(call) do { if ((call) != cudaSuccess) return ncclUnhandledCudaError; } while (0)

static const size_t STAGED_ALIGN = 256;
static size_t staged_bytes(const StagedPart* part)
{
    return (part->size_bytes + STAGED_ALIGN - 1) / STAGED_ALIGN * STAGED_ALIGN;
}

/* parts: of the arguments of a collective, or of the sends and receives of a group. Returns how many. */
static int staged_parts(Work* w, StagedPart* parts)
{
    int n = 0;
    if (w->send != nullptr) parts[n++] = {true, &w->send, nullptr, nullptr, bytes_of(w, send_elems(w))};
    if (w->recv != nullptr) parts[n++] = {false, (const char**)&w->recv, nullptr, nullptr, bytes_of(w, recv_elems(w))};
    for (Transfer* t = w->transfers; t != nullptr; t = t->next)
        parts[n++] = {t->is_send, (const char**)&t->p, nullptr, nullptr, t->size_bytes};
    return n;
}

/* Grows the buffer when the collectives that use it have ended. */
static ncclResult_t staging_reserve(size_t size_bytes)
{
    if (staging.end == nullptr) CUDA_TRY(cudaEventCreateWithFlags(&staging.end, cudaEventDisableTiming));
    if (size_bytes <= staging.size_bytes) return ncclSuccess;
    if (staging.p != nullptr) {
        CUDA_TRY(cudaEventSynchronize(staging.end));
        CUDA_TRY(cudaFreeHost(staging.p));
    }
    staging.size_bytes = size_bytes > 2 * staging.size_bytes ? size_bytes : 2 * staging.size_bytes;
    CUDA_TRY(cudaMallocHost(&staging.p, staging.size_bytes));
    return ncclSuccess;
}

/* The host function: no CUDA call. */
static void staged_run(void* arg)
{
    Work* w = (Work*)arg;
    work_wait(w);
    work_completed(w);
    free(w);
}

static ncclResult_t staged_enqueue_parts(Work* w, StagedPart* parts, int num_parts, cudaStream_t stream)
{
    const bool is_first = staging.end == nullptr;
    size_t total_bytes = STAGED_ALIGN;
    for (int i = 0; i < num_parts; i++) total_bytes += staged_bytes(&parts[i]);
    if (ncclResult_t error = staging_reserve(total_bytes); error != ncclSuccess) return error;
    char* pinned = staging.p;
    for (StagedPart* part = parts; part < parts + num_parts; pinned += staged_bytes(part++)) {
        part->device = (char*)*part->p;
        *part->p = part->pinned = pinned;
    }
    if (!is_first) CUDA_TRY(cudaStreamWaitEvent(stream, staging.end, 0));
    for (const StagedPart* part = parts; part < parts + num_parts; part++)
        if (part->is_send)
            CUDA_TRY(cudaMemcpyAsync(part->pinned, part->device, part->size_bytes, cudaMemcpyDeviceToHost, stream));
    for (const StagedPart* part = parts; part < parts + num_parts; part++)
        if (!part->is_send) CUDA_TRY(cudaMemsetAsync(part->device, 0xFF, part->size_bytes, stream));
    CUDA_TRY(cudaLaunchHostFunc(stream, staged_run, w));
    for (const StagedPart* part = parts; part < parts + num_parts; part++)
        if (!part->is_send)
            CUDA_TRY(cudaMemcpyAsync(part->device, part->pinned, part->size_bytes, cudaMemcpyHostToDevice, stream));
    CUDA_TRY(cudaEventRecord(staging.end, stream));
    return ncclSuccess;
}

static ncclResult_t staged_enqueue(Work* w, cudaStream_t stream)
{
    size_t num_parts = 2;
    for (const Transfer* t = w->transfers; t != nullptr; t = t->next) num_parts++;
    StagedPart* parts = (StagedPart*)malloc_checked(num_parts * sizeof(StagedPart));
    ncclResult_t result = staged_enqueue_parts(w, parts, staged_parts(w, parts), stream);
    free(parts);
    return result;
}
