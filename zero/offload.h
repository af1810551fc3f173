/* offload.h: items of equal size that the forward computes and the backward needs, stored in pinned host memory behind
 * a double buffer on the device. While the forward computes item i, item i - 1 is copied to the host on the d2h stream.
 * While the backward, from the last item to the first, uses item i, item i - 1 is prefetched on the h2d stream. The
 * last two items are still on the device when the backward begins and are never copied.
 *
 *      forward     item  0   1   2   3            backward   3   2   1   0
 *      buffer            0   1   0   1                       1   0   1   0
 *      d2h                   0   1                      h2d      1   0                                             */
#pragma once
#include "stages.h"

enum { OFFLOAD_BUFFERS = 2 };

typedef struct Offload {
    char *host, *device;            // (num_items - 2, item_bytes) pinned; (2, item_bytes), allocated by the caller
    size_t item_bytes;
    int num_items;
    int cached_item[OFFLOAD_BUFFERS]; // the item in this buffer, or enqueued for it
    cudaStream_t compute, d2h, h2d; // all the compute stream without overlap
    cudaEvent_t edge;
    cudaEvent_t stored[OFFLOAD_BUFFERS];   // d2h -> compute: the buffer may be overwritten
    cudaEvent_t loaded[OFFLOAD_BUFFERS];   // h2d -> compute: the item is on the device
} Offload;

static size_t offload_bytes(const Offload* o)
{
    return o->num_items > OFFLOAD_BUFFERS ? (o->num_items - OFFLOAD_BUFFERS) * o->item_bytes : 0;
}

static void offload_plan(Offload* o, Plan* plan, const char* label, int num_items, size_t item_bytes)
{
    *o = Offload{};
    o->num_items = num_items;
    o->item_bytes = item_bytes;
    plan_add(plan, label, Place::HOST, &o->host, offload_bytes(o));
}

/* After plan_allocate. device: 2 items. */
static void offload_start(Offload* o, void* device, cudaStream_t compute, bool overlap)
{
    o->device = (char*)device;
    o->compute = o->d2h = o->h2d = compute;
    if (overlap)
        for (cudaStream_t* stream : {&o->d2h, &o->h2d})
            CUDA_CHECK(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
    profile_stream(o->d2h, "d2h");
    profile_stream(o->h2d, "h2d");
    CUDA_CHECK(cudaEventCreateWithFlags(&o->edge, cudaEventDisableTiming));
    for (int k = 0; k < OFFLOAD_BUFFERS; k++) {
        for (cudaEvent_t* event : {&o->stored[k], &o->loaded[k]})
            CUDA_CHECK(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
        CUDA_CHECK(cudaEventRecord(o->stored[k], o->d2h));   // nothing to wait for yet
        CUDA_CHECK(cudaEventRecord(o->loaded[k], o->h2d));
        o->cached_item[k] = -1;
    }
}

static void offload_free(Offload* o)
{
    CUDA_CHECK(cudaEventDestroy(o->edge));
    for (int k = 0; k < OFFLOAD_BUFFERS; k++)
        for (cudaEvent_t event : {o->stored[k], o->loaded[k]}) CUDA_CHECK(cudaEventDestroy(event));
    if (o->d2h != o->compute)
        for (cudaStream_t stream : {o->d2h, o->h2d}) CUDA_CHECK(cudaStreamDestroy(stream));
}

static char* offload_buffer(const Offload* o, int item) { return o->device + item % OFFLOAD_BUFFERS * o->item_bytes; }

/* Before the compute stream writes item `item`. */
static void offload_write_begin(Offload* o, int item)
{
    int k = item % OFFLOAD_BUFFERS;
    CUDA_CHECK(cudaStreamWaitEvent(o->compute, o->stored[k], 0));
    o->cached_item[k] = item;
}

/* After it. */
static void offload_write_end(Offload* o, int item)
{
    if (item >= o->num_items - OFFLOAD_BUFFERS) return;
    stream_wait(o->d2h, o->compute, o->edge, "the item is computed");
    OP(o->d2h, 0, o->item_bytes, item);
    CUDA_CHECK(cudaMemcpyAsync(o->host + item * o->item_bytes, offload_buffer(o, item), o->item_bytes,
                               cudaMemcpyDeviceToHost, o->d2h));
    CUDA_CHECK(cudaEventRecord(o->stored[item % OFFLOAD_BUFFERS], o->d2h));
}

static void offload_fetch(Offload* o, int item)
{
    int k = item % OFFLOAD_BUFFERS;
    if (item < 0 || o->cached_item[k] == item) return;
    o->cached_item[k] = item;
    // No wait for d2h: the copy to the host was complete before the forward reused the buffer, two items later.
    stream_wait(o->h2d, o->compute, o->edge, "the item in the buffer is no longer needed");
    OP(o->h2d, 0, o->item_bytes, item);
    CUDA_CHECK(cudaMemcpyAsync(offload_buffer(o, item), o->host + item * o->item_bytes, o->item_bytes,
                               cudaMemcpyHostToDevice, o->h2d));
    CUDA_CHECK(cudaEventRecord(o->loaded[k], o->h2d));
}

/* Before the compute stream reads item `item` in the backward. Prefetches the item before it. */
static void offload_read_begin(Offload* o, int item)
{
    offload_fetch(o, item);
    CUDA_CHECK(cudaStreamWaitEvent(o->compute, o->loaded[item % OFFLOAD_BUFFERS], 0));
    offload_fetch(o, item - 1);
}
