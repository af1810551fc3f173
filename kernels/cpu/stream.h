/* stream.h: operations on streams, and what the stand-ins share with one another. Not for the program.
 * An operation is a function and its argument (malloc'ed; freed when the operation has completed).
 *   CPU build       stream_enqueue runs it before it returns
 *   emulated build  it waits in its stream's queue until the scheduler picks it (kernels/emu/emu_host.h) */
#pragma once
#include <cstddef>
#include <cstdint>
#include <cuda_runtime.h>
#include <sched.h>
#include <unistd.h>
#include "data/error.h"

struct StreamOpKind {
    bool (*run)(void* arg);           // true: completed. false: waits for other ranks; called again
    bool (*may_start)(void* arg);     // null: as soon as it is at the head and its dependencies are done
    void (*progress)(void* arg);      // null, or: moves an operation in flight on without completing it
};
void stream_enqueue(cudaStream_t stream, const char* name, const StreamOpKind* kind, void* arg);
void stream_drain_all(void);          // not counted as a host synchronisation

static inline size_t size_min(size_t a, size_t b) { return a < b ? a : b; }

/* Between two checks of what other ranks do. Ranks may outnumber cores: who waits must soon let go of the core that its
 * peer needs. */
static inline void wait_politely(unsigned* num_tries)
{
    unsigned n = (*num_tries)++;
    if (n < 20) return;
    if (n < 200) sched_yield();
    else usleep(n < 2000 ? 20 : 200);
}
