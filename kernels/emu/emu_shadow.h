/* emu_shadow.h: what the checker, emu_check.cpp, knows of memory and time: a cell for every two bytes, the places in
 * the program that accesses come from, and the clock with the segments that it has passed through. */
#pragma once
#include <cstdio>
#include <sys/mman.h>
#include <unistd.h>
#include "emu.h"
#include "emu_check.h"

extern "C" const char __executable_start, _end;

/* ---- cells */

static const size_t GRANULE = 2;                     // bytes: two bf16 neighbours belong to two threads
static const uint32_t UNALLOCATED = 0, UNWRITTEN = 1, SEVERAL_STREAMS = ~0u;   // of Record.clock; else a time
enum { ATOMIC = 1, PENDING = 2, OTHER_BLOCKS = 4 };  // flags of a write: PENDING: cp.async that was not waited for
enum { OTHER_LANES = 1, OTHER_WARPS = 2 };           // flags of a read, besides OTHER_BLOCKS: they have read too

struct Record { uint32_t clock, thread : 10, place : 18, flags : 4; };
struct Cell { Record write, read; };
static_assert(sizeof(Cell) == 8 * GRANULE, "the shadow is eight times the memory");

struct Space { const char *name, *base; size_t size_bytes; Cell* cells; };
static Space spaces[NUM_MEMORIES] = {{"device", nullptr, 0, nullptr}, {"pinned", nullptr, 0, nullptr},
                                     {"shared", nullptr, 0, nullptr}};

static Space* space_of(const void* p)
{
    for (Space* s = spaces; s < spaces + NUM_MEMORIES; s++) {
        if ((size_t)((const char*)p - s->base) < s->size_bytes) return s;
    }
    return nullptr;
}

static Cell* cell_of(const Space* s, const void* p) { return s->cells + (size_t)((const char*)p - s->base) / GRANULE; }

/* ---- places: an instruction, or a named call with or without a line */

struct Place { uint32_t pc; int line; const char *file, *kernel; };
static const uint32_t MAX_PLACES = 1 << 18;
static Place places[MAX_PLACES];
static uint32_t num_places = 1, *place_of_pc;        // place 0: none

static uint32_t place_new(Place place)
{
    if (num_places == MAX_PLACES) emu_die("the checker knows at most %u places", MAX_PLACES);
    places[num_places] = place;
    return num_places++;
}

uint32_t emu_place(const void* pc)
{
    size_t offset = (size_t)((const char*)pc - &__executable_start), size = (size_t)(&_end - &__executable_start);
    if (offset >= size) offset = 0;
    if (place_of_pc == nullptr) {
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        void* p = mmap(nullptr, size * sizeof(uint32_t), PROT_READ | PROT_WRITE, flags, -1, 0);
        ENSURE(p != MAP_FAILED, "emulator: no memory for the checker");
        place_of_pc = (uint32_t*)p;
    }
    uint32_t* place = &place_of_pc[offset];
    if (*place == 0) *place = place_new({(uint32_t)offset, 0, nullptr, nullptr});
    return *place;
}

static uint32_t place_named(const char* file, int line)
{
    static uint32_t recent;
    if (places[recent].file == file && places[recent].line == line) return recent;
    for (uint32_t i = 1; i < num_places; i++) {
        if (places[i].file == file && places[i].line == line) return recent = i;
    }
    return recent = place_new({0, line, file, nullptr});
}

/* file:line of the innermost function, then of those it is inlined into. */
void emu_place_text(uint32_t place_idx, char* text, size_t size)
{
    const Place* place = &places[place_idx];
    snprintf(text, size, "an operation");
    if (place->file != nullptr && place->line == 0) snprintf(text, size, "%s", place->file);
    else if (place->file != nullptr) {
        const char* slash = strrchr(place->file, '/');
        snprintf(text, size, "%s:%d", slash != nullptr ? slash + 1 : place->file, place->line);
    }
    if (place->pc == 0) return;
    char exe[512], command[640], line[512], last[512] = "";
    ssize_t len = readlink("/proc/self/exe", exe, sizeof exe - 1);
    exe[len > 0 ? len : 0] = '\0';
    snprintf(command, sizeof command, "addr2line -s -i -e '%s' 0x%x 2>/dev/null", exe, place->pc - 1);
    FILE* pipe = popen(command, "r");
    size_t used = 0;
    while (pipe != nullptr && fgets(line, sizeof line, pipe) != nullptr) {
        line[strcspn(line, " \n")] = '\0';
        if (strcmp(line, last) == 0 || strncmp(line, "emu.h", 5) == 0 || strncmp(line, "tuple", 5) == 0) continue;
        if (strncmp(line, "invoke.h", 8) == 0) break;
        snprintf(last, sizeof last, "%s", line);
        if (used + strlen(line) + 8 < size) used += (size_t)sprintf(text + used, used > 0 ? ", in %s" : "%s", line);
    }
    if (pipe != nullptr) pclose(pipe);
}

/* ---- time: segments are operations, blocks of kernels, and what host code did between two of its calls */

static const int MAX_STREAMS = 63, HOST = MAX_STREAMS;

struct Segment { uint32_t clock, stream, seq, block; const char* name; };
struct VectorClock { uint32_t seen[MAX_STREAMS + 1]; };

static Segment* segments;
static size_t num_segments, segments_capacity;
static VectorClock* stream_clocks[MAX_STREAMS];      // [stream][seq]: what the operation is ordered after
static size_t stream_capacity[MAX_STREAMS];
static VectorClock host_clock, *running = &host_clock;
static uint32_t host_time = 1;
static bool in_kernel, in_op;
static uint32_t now = UNWRITTEN + 1, op_begin, block_begin, interval_begin;
static uint32_t warp_synced[1024];                   // by thread: its last __syncwarp

static uint32_t tick(void)
{
    if (++now == SEVERAL_STREAMS) emu_die("the checker's clock has run out");
    return now;
}

static void segment_push(uint32_t stream, uint32_t seq, uint32_t block, const char* name)
{
    if (num_segments == segments_capacity) {
        segments_capacity = segments_capacity > 0 ? 2 * segments_capacity : 4096;
        segments = (Segment*)realloc(segments, segments_capacity * sizeof(Segment));
        ENSURE(segments != nullptr, "out of host memory");
    }
    segments[num_segments++] = {tick(), stream, seq, block, name};
}

static const Segment* segment_of(uint32_t clock)
{
    static size_t recent;
    if (recent < num_segments && segments[recent].clock <= clock &&
        (recent + 1 == num_segments || segments[recent + 1].clock > clock)) return &segments[recent];
    size_t lo = 0, hi = num_segments;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (segments[mid].clock <= clock) lo = mid + 1;
        else hi = mid;
    }
    recent = lo > 0 ? lo - 1 : 0;
    return &segments[recent];
}

static VectorClock* clock_of(int stream, uint64_t seq)
{
    if (stream >= MAX_STREAMS) emu_die("the checker knows at most %d streams", MAX_STREAMS);
    if (seq >= stream_capacity[stream]) {
        size_t old = stream_capacity[stream], capacity = old > 0 ? 2 * old : 256;
        while (capacity <= seq) capacity *= 2;
        VectorClock* clocks = (VectorClock*)realloc(stream_clocks[stream], capacity * sizeof(VectorClock));
        ENSURE(clocks != nullptr, "out of host memory");
        memset(clocks + old, 0, (capacity - old) * sizeof(VectorClock));
        stream_clocks[stream] = clocks;
        stream_capacity[stream] = capacity;
    }
    return &stream_clocks[stream][seq];
}

static void clock_join(VectorClock* to, const VectorClock* from)
{
    for (int i = 0; i <= MAX_STREAMS; i++) to->seen[i] = to->seen[i] > from->seen[i] ? to->seen[i] : from->seen[i];
}

/* The kernel that runs. */
static const char *kernel_name, *kernel_args;
static size_t kernel_args_bytes;
