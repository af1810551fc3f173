/* stream.h: operations on streams, and what the stand-ins share with one another. Not for the program.
 * An operation is a function and its argument (malloc'ed; freed when the operation has completed).
 *   CPU build       stream_enqueue runs it before it returns
 *   emulated build  it waits in its stream's queue until the scheduler picks it */
#pragma once
#include <cstddef>
#include <cstdint>
#include <cuda_runtime.h>
#include "data/error.h"

struct StreamOpKind {
    bool (*run)(void* arg);           // true: completed. false: waits for other ranks; called again
    bool (*may_start)(void* arg);     // null: as soon as it is at the head and its dependencies are done
    void (*progress)(void* arg);      // null, or: moves an operation in flight on without completing it
};
void stream_enqueue(cudaStream_t stream, const char* name, const StreamOpKind* kind, void* arg);
void stream_drain_all(void);          // not counted as a host synchronisation
#ifdef DEVICE_EMU
bool stream_step(void);               // one operation, anywhere; false: none could be completed now
void stream_heads_text(char* text, int size);   // what each stream is at
void rank_moved(void);                // this rank has got on
void rank_waits(const char* call);    // it has looked in vain for what other ranks do; ends the program when all do
#endif
void wait_politely(unsigned* num_tries);   // between two looks at what other ranks do: spin, yield, then sleep
double wall_seconds(void);

static inline size_t size_min(size_t a, size_t b) { return a < b ? a : b; }

#ifdef DEVICE_EMU
struct EmuOptions {
    uint64_t seed;                    // EMU_SEED: 0 runs every operation at once; n: one of many legal orders
    int cp_async;                     // EMU_CP_ASYNC: 0 by the seed, 1 copies at issue, 2 at the wait
    size_t shared_limit_bytes;        // of one block
};
extern EmuOptions emu_options;
uint64_t emu_random(void);            // seeded, the same on every run
uint64_t emu_random_below(uint64_t n);
[[noreturn]] FORMAT(1, 2) void emu_die(const char* fmt, ...);

/* Unwritten memory reads as NaN in every type, and as -1; the gaps around it as another NaN, which is looked for. */
static const unsigned char EMU_FILL_BYTE = 0xFF;
void emu_gap_fill(char* p, size_t size_bytes);
const char* emu_gap_damage(const char* p, size_t size_bytes);   // null: intact; else the first changed byte

bool emu_is_device(const void* p);
void emu_check_device_range(const void* p, size_t size_bytes, const char* what);   // ends the program if out of bounds
void emu_check_device_gaps(const char* after);
bool emu_is_stack(const void* p);     // of a fiber
bool emu_is_stack_guard(const void* p);
int emu_func_shared_limit(const void* func);
void emu_set_error(cudaError_t error);
#endif
