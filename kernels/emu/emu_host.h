/* emu_host.h: what the host side of the emulator shares: the scheduler of streams and ranks, options, the pattern
 * around allocations, and what is known of an address. Not for the program. */
#pragma once
#include "kernels/cpu/stream.h"

bool stream_step(void);               // one operation, anywhere; false: none could be completed now
void stream_heads_text(char* text, int size);   // what each stream is at
void rank_moved(void);                // this rank has got on
void rank_waits(const char* call);    // it has looked in vain for what other ranks do; ends the program when all do

struct EmuOptions {
    uint64_t seed;                    // EMU_SEED: 0 runs every operation at once; n: one of many legal orders
    int cp_async;                     // EMU_CP_ASYNC: 0 by the seed, 1 copies at issue, 2 at the wait
    size_t shared_limit_bytes;        // of one block
    int capability;                   // EMU_CAPABILITY: that of the GPU, 90 is 9.0
    bool timeline;                    // EMU_TIMELINE=1: times between events are those of a device (emu_work_s)
};
extern EmuOptions emu_options;
extern double emu_pretended_s;        // by which events are later than now: what slow GEMMs took (blaslt.cpp)
/* Of all operations so far, on a device whose streams run side by side. Each takes the same on every run: a nanosecond
 * for a thread of a kernel, for 16 bytes copied, for 64 multiplications of a GEMM. */
extern double emu_work_s;
uint64_t emu_random(void);            // seeded, the same on every run
uint64_t emu_random_below(uint64_t n);
[[noreturn]] FORMAT(1, 2) void emu_die(const char* fmt, ...);

/* Unwritten memory reads as NaN in every type, and as -1; the gaps around it as another NaN, which is checked for. */
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
