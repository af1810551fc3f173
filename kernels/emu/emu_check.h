/* emu_check.h: what the emulator tells the checker, emu_check.cpp; without EMU_CHECK all of it is nothing.
 * The checked build (make DEVICE=emu CHECK=1) compiles kernels and host code with -fsanitize=thread, whose calls before
 * each load and store come to the checker, and tells it here what no instruction shows: allocations, barriers, which
 * operation runs and what it is ordered after, and the memory that copies, cuBLASLt and NCCL touch. */
#pragma once
#include "emu_host.h"

enum class Memory { DEVICE, PINNED, SHARED };
static const int NUM_MEMORIES = 3;
enum class Access { READ, WRITE };

typedef struct EmuTraffic {
    uint64_t requests;                               // by warps
    uint64_t read_bytes, write_bytes;                // of requests: of the lanes of one, each different byte once
    uint64_t block_bytes, op_bytes;                  // each byte once per block (the L1 cache), per operation (the L2)
    uint64_t sectors, ideal_sectors;                 // of 32 bytes, touched by requests; the fewest that would do
    uint64_t wavefronts, ideal_wavefronts;           // of shared memory: one per 128 bytes if no lanes share a bank
} EmuTraffic;

#ifdef EMU_CHECK
static const bool EMU_CHECKED = true;
void check_arena(Memory memory, const char* base, size_t size_bytes);
void check_alloc(Memory memory, const void* p, size_t size_bytes);
void check_free(Memory memory, const void* p, size_t size_bytes);
/* Library calls; place is its name, such as "cudaMemcpyAsync". */
void check_range(const void* p, size_t size_bytes, Access access, const char* place);
/* cp.async writes at the wait: until then nobody may touch the destination. */
void check_async_issue(void* dst, const void* src, bool valid, const char* file, int line);
void check_async_done(void* dst, const char* file, int line);
void check_warp_read(const void* p, size_t size_bytes, const char* file, int line);
/* The running thread of a block (-1: none), its block, its barriers and warp synchronisations. */
extern int emu_current;
void check_block_begin(uint64_t block_idx);
void check_block_end(void);
void check_barrier(void);
void check_syncwarp(int first_lane, unsigned mask);
/* Operations: `seq` of stream `stream_idx`. The host's order is known when it asks, the streams' when it starts. */
void check_op_asked(int stream_idx, uint64_t seq);
void check_op_waits(int stream_idx, uint64_t seq, int on_stream_idx, uint64_t on_seq);
void check_op_runs(int stream_idx, uint64_t seq, const char* name);
void check_op_stops(void);
void check_kernel(const char* name, const void* args, size_t args_bytes);   // null: it has ended
void check_host_saw(int stream_idx, uint64_t seq);
void check_off(void);                                // the program is ending itself, from wherever it is

/* For tests: counting of requests, on and off (EMU_COUNT=1: on from the start, and a table per source line at exit). */
void emu_count(bool on);
EmuTraffic emu_traffic(void);                        // since emu_count(true)
EmuTraffic emu_traffic_of(const void* device);       // of the allocation that holds this address
#else
static const bool EMU_CHECKED = false;
static inline void check_arena(Memory, const char*, size_t) {}
static inline void check_alloc(Memory, const void*, size_t) {}
static inline void check_free(Memory, const void*, size_t) {}
static inline void check_range(const void*, size_t, Access, const char*) {}
static inline void check_async_issue(void*, const void*, bool, const char*, int) {}
static inline void check_async_done(void*, const char*, int) {}
static inline void check_warp_read(const void*, size_t, const char*, int) {}
static inline void check_block_begin(uint64_t) {}
static inline void check_block_end(void) {}
static inline void check_barrier(void) {}
static inline void check_syncwarp(int, unsigned) {}
static inline void check_op_asked(int, uint64_t) {}
static inline void check_op_waits(int, uint64_t, int, uint64_t) {}
static inline void check_op_runs(int, uint64_t, const char*) {}
static inline void check_op_stops(void) {}
static inline void check_kernel(const char*, const void*, size_t) {}
static inline void check_host_saw(int, uint64_t) {}
static inline void check_off(void) {}
#endif
