/* emu_check.cpp: the checker of the emulated build (make DEVICE=emu CHECK=1). Kernels and host code are compiled with
 * -fsanitize=thread and linked with the functions at the end of this file in place of libtsan: the compiler's calls
 * before every load and store come here. This file, the runtime and the libraries' stand-ins are compiled without it.
 * Found, each with file and line of both sides:
 *   reads and writes outside of every allocation, or after its end        reads of what nobody has written
 *   races: in a block between barriers, in a warp without __syncwarp, between blocks without fence and atomic, between
 *   streams without an event, with the host without a synchronisation, and of cp.async before its wait
 *   host code that touches device memory, kernels that touch host memory
 * How: one clock, `now`, that ticks at each operation, block, barrier and __syncwarp. Every two bytes of memory have a
 * cell of 16: the last write and the last read, each as (clock, thread, place). Since blocks run one after another, the
 * clock alone says whether an access was of this barrier interval, this block, this operation or an older one; for
 * older ones `segments` gives the stream and the place in it, and a vector clock whether that is ordered before now.
 * Not seen: accesses in library functions other than those in emu_libc.h; a race of two reads with a third party is
 * kept to one reader per warp, block and stream. EMU_COUNT=1: see emu_count.h. */
#include <cstdio>
#include <pthread.h>
#include "emu_count.h"

/* ---- memory */

void check_arena(Memory memory, const char* base, size_t size_bytes)
{
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    size_t shadow_bytes = size_bytes / GRANULE * sizeof(Cell);
    void* cells = mmap(nullptr, shadow_bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    ENSURE(cells != MAP_FAILED, "emulator: cannot reserve %zu bytes of address space for the checker", shadow_bytes);
    Space* s = &spaces[(int)memory];
    s->base = base;
    s->size_bytes = size_bytes;
    s->cells = (Cell*)cells;
}

void check_alloc(Memory memory, const void* p, size_t size_bytes)
{
    Space* s = &spaces[(int)memory];
    const Cell fresh = {{UNWRITTEN, 0, 0, 0}, {0, 0, 0, 0}};
    for (Cell *c = cell_of(s, p), *end = c + (size_bytes + GRANULE - 1) / GRANULE; c < end; c++) *c = fresh;
    if (memory == Memory::DEVICE) count_allocation(p, size_bytes);
}

/* Device and pinned allocations have pages of their own. */
void check_free(Memory memory, const void* p, size_t size_bytes)
{
    Space* s = &spaces[(int)memory];
    if (s->base == nullptr || size_bytes == 0) return;
    if (memory == Memory::SHARED) {
        memset((void*)cell_of(s, p), 0, size_bytes / GRANULE * sizeof(Cell));
        return;
    }
    const uintptr_t PAGE = 4096;
    uintptr_t first = (uintptr_t)p & ~(PAGE - 1), end = ((uintptr_t)p + size_bytes + PAGE - 1) & ~(PAGE - 1);
    size_t shadow_bytes = (end - first) / GRANULE * sizeof(Cell);
    ENSURE(madvise(cell_of(s, (const void*)first), shadow_bytes, MADV_DONTNEED) == 0, "emulator: madvise failed");
}

/* ---- the order of operations */

void check_op_asked(int stream, uint64_t seq)
{
    VectorClock* clock = clock_of(stream, seq);
    *clock = host_clock;
    clock->seen[HOST] = host_time++;
}

void check_op_waits(int stream, uint64_t seq, int on, uint64_t on_seq)
{
    const VectorClock from = *clock_of(on, on_seq);
    clock_join(clock_of(stream, seq), &from);
}

void check_op_runs(int stream, uint64_t seq, const char* name)
{
    if (seq > 1) check_op_waits(stream, seq, stream, seq - 1);
    running = clock_of(stream, seq);
    running->seen[stream] = (uint32_t)seq;
    segment_push((uint32_t)stream, (uint32_t)seq, 0, name);
    op_begin = block_begin = interval_begin = now;
    in_op = true;
}

void check_op_stops(void)
{
    in_op = false;
    running = &host_clock;
}

void check_host_saw(int stream, uint64_t seq) { clock_join(&host_clock, clock_of(stream, seq)); }

/* Host code since its last call is one segment. */
static void host_segment(void)
{
    const Segment* last = num_segments > 0 ? &segments[num_segments - 1] : nullptr;
    if (last == nullptr || last->stream != (uint32_t)HOST || last->seq != host_time)
        segment_push((uint32_t)HOST, host_time, 0, "host code");
    op_begin = block_begin = interval_begin = segments[num_segments - 1].clock;
    host_clock.seen[HOST] = ~0u;
}

/* ---- what a block has acquired from others: those that fenced before an atomic that this block saw */

struct Release { const void* p; uint32_t begin, end; };   // clocks of the releasing block
static const int MAX_RELEASES = 4096;
static Release releases[MAX_RELEASES];
static int num_releases;
static uint32_t acquired_begin[MAX_RELEASES], acquired_end[MAX_RELEASES];
static int num_acquired;
static bool fenced[1024];

static bool acquired(uint32_t clock)
{
    for (int i = 0; i < num_acquired; i++) {
        if (acquired_begin[i] <= clock && clock <= acquired_end[i]) return true;
    }
    return false;
}

void emu_fence(void) { fenced[emu_current] = true; }

static void release_and_acquire(const void* p)
{
    for (int i = 0; i < num_releases; i++) {
        if (releases[i].p != p || releases[i].begin == block_begin || acquired(releases[i].begin)) continue;
        acquired_begin[num_acquired] = releases[i].begin;
        acquired_end[num_acquired++] = releases[i].end;
    }
    if (fenced[emu_current] && num_releases < MAX_RELEASES) releases[num_releases++] = {p, block_begin, now};
}

void check_kernel(const char* name, const void* args, size_t args_bytes)
{
    kernel_name = name;
    kernel_args = (const char*)args;
    kernel_args_bytes = args_bytes;
    in_kernel = name != nullptr;
    num_releases = 0;
}

void check_block_begin(uint64_t block_idx)
{
    const Segment op = segments[num_segments - 1];
    segment_push(op.stream, op.seq, (uint32_t)block_idx, kernel_name);
    block_begin = interval_begin = now;
    num_acquired = 0;
    memset(fenced, 0, sizeof fenced);
}

void check_block_end(void) { count_block_end(); }
void check_barrier(void) { interval_begin = tick(); }

void check_syncwarp(int first_lane, unsigned mask)
{
    uint32_t time = tick();
    for (unsigned rest = mask; rest != 0; rest &= rest - 1) warp_synced[first_lane + __builtin_ctz(rest)] = time;
}

/* ---- reports */

static void describe(const Record& r, const char* what, char* text, size_t size)
{
    char place[400];
    emu_place_text(r.place, place, sizeof place);
    const Segment* s = segment_of(r.clock);
    if (s->stream == (uint32_t)HOST) snprintf(text, size, "%s by host code at %s", what, place);
    else if (places[r.place].pc == 0 && places[r.place].line == 0)
        snprintf(text, size, "%s by %s of stream %u", what, place, s->stream);
    else snprintf(text, size, "%s by %s of stream %u, block %u, thread %u, at %s", what, s->name, s->stream, s->block,
                  (unsigned)r.thread, place);
}

static Record record_now(uint32_t place, unsigned flags)
{
    return {now, (uint32_t)(in_kernel && emu_current >= 0 ? emu_current : 0), place, flags};
}

/* Device memory by its allocation; elsewhere the address must do. */
static void describe_address(const Space* s, const void* p, char* text, size_t size)
{
    const DeviceAllocation* a = s == &spaces[(int)Memory::DEVICE] ? allocation_of(p) : nullptr;
    if (a == nullptr) snprintf(text, size, "%s memory at %p", s->name, p);
    else snprintf(text, size, "device memory at %p, byte %zu of an allocation of %zu", p,
                  (size_t)((const char*)p - a->p), a->size_bytes);
}

[[noreturn]] static void report_race(const Space* s, const void* p, const Record& earlier, const char* earlier_what,
                                     uint32_t place, const char* what)
{
    char first[700], second[700], address[120];
    describe_address(s, p, address, sizeof address);
    describe(earlier, earlier_what, first, sizeof first);
    describe(record_now(place, 0), what, second, sizeof second);
    emu_die("race on %s:\n    %s\n    %s\n ", address, first, second);
}

[[noreturn]] static void report_access(const char* kind, const Space* s, const void* p, size_t size_bytes,
                                       uint32_t place, const char* what)
{
    char text[700], address[120];
    describe_address(s, p, address, sizeof address);
    describe(record_now(place, 0), what, text, sizeof text);
    emu_die("%s: %zu bytes of %s:\n    %s\n ", kind, size_bytes, address, text);
}

/* ---- the rules */

static inline bool same_warp(uint32_t a, uint32_t b) { return (a ^ b) < 32; }

static bool op_is_before(uint32_t clock)
{
    const Segment* s = segment_of(clock);
    return running->seen[s->stream] >= s->seq;
}

/* Is what `r` says ordered before what the running thread does now? */
static inline bool is_before(const Record& r)
{
    if (r.clock < op_begin) return op_is_before(r.clock);
    if (!in_kernel) return true;                     // the same operation, or the host itself
    if (r.clock < block_begin) return num_acquired > 0 && acquired(r.clock);
    uint32_t me = (uint32_t)emu_current;
    if (r.clock < interval_begin || r.thread == me) return true;
    return same_warp(r.thread, me) && r.clock < warp_synced[me] && r.clock < warp_synced[r.thread];
}

/* Reads by operations that nothing orders: they are kept beside the cell. Few different ones exist. */
struct ReadSet { int count; Record reads[6]; };
static ReadSet* read_sets;
static uint32_t num_read_sets, read_sets_capacity;

static uint32_t read_set_bits(const Record& r) { return r.thread | (uint32_t)r.place << 10 | (uint32_t)r.flags << 28; }

static Record read_set_record(uint32_t i)
{
    return {SEVERAL_STREAMS, i & 1023, i >> 10 & (MAX_PLACES - 1), i >> 28};
}

static Record read_set_find(const ReadSet* wanted)
{
    for (uint32_t i = 0; i < num_read_sets; i++) {
        if (memcmp(&read_sets[i], wanted, sizeof *wanted) == 0) return read_set_record(i);
    }
    if (num_read_sets == read_sets_capacity) {
        read_sets_capacity = read_sets_capacity > 0 ? 2 * read_sets_capacity : 64;
        read_sets = (ReadSet*)realloc(read_sets, read_sets_capacity * sizeof(ReadSet));
        ENSURE(read_sets != nullptr, "out of host memory");
    }
    read_sets[num_read_sets] = *wanted;
    return read_set_record(num_read_sets++);
}

/* The reads that were there and this one, without those that are ordered before it; of an operation its beginning. */
static Record read_set_add(const Record& old, uint32_t place)
{
    static ReadSet set;
    ReadSet before = {1, {old}};
    if (old.clock == SEVERAL_STREAMS) before = read_sets[read_set_bits(old)];
    memset(&set, 0, sizeof set);
    for (int i = 0; i < before.count && set.count < 5; i++) {
        const Record& r = before.reads[i];
        if (r.clock == op_begin) return old;
        if (r.clock > op_begin || op_is_before(r.clock)) continue;
        set.reads[set.count++] = {segment_of(r.clock)->clock, r.thread, r.place, 0};
    }
    if (set.count == 0) return record_now(place, 0);
    set.reads[set.count++] = {op_begin, 0, place, 0};
    return read_set_find(&set);
}

static Record read_after(const Record& old, uint32_t place)
{
    Record mine = record_now(place, 0);
    if (old.clock == 0) return mine;
    if (old.clock == SEVERAL_STREAMS) return read_set_add(old, place);
    if (old.clock < op_begin) return op_is_before(old.clock) ? mine : read_set_add(old, place);
    if (!in_kernel) return mine;
    mine.flags = old.flags & OTHER_BLOCKS;
    if (old.clock < block_begin) mine.flags = OTHER_BLOCKS;
    if (old.clock < interval_begin) return mine;
    mine.flags |= old.flags & OTHER_WARPS;
    if (!same_warp(old.thread, mine.thread)) mine.flags |= OTHER_WARPS;
    else if (old.clock >= warp_synced[mine.thread])
        mine.flags |= (old.flags & OTHER_LANES) | (old.thread != mine.thread ? OTHER_LANES : 0);
    return mine;
}

/* May the running thread write where `r` has been read? */
static bool may_overwrite(const Record& r)
{
    if (r.clock == 0) return true;
    if (r.clock == SEVERAL_STREAMS) {
        const ReadSet* set = &read_sets[read_set_bits(r)];
        for (int i = 0; i < set->count; i++) {
            if (set->reads[i].clock < op_begin && !op_is_before(set->reads[i].clock)) return false;
        }
        return true;
    }
    if (!is_before(r)) return false;
    if (!in_kernel || r.clock < op_begin) return true;
    if ((r.flags & OTHER_BLOCKS) != 0 && num_acquired == 0) return false;
    if (r.clock < interval_begin) return true;
    if ((r.flags & OTHER_WARPS) != 0) return false;
    return (r.flags & OTHER_LANES) == 0 || r.clock < warp_synced[emu_current];
}

static void cell_read(const Space* s, Cell* c, const void* p, size_t size_bytes, uint32_t place)
{
    const Record w = c->write;
    if (w.clock == UNALLOCATED) report_access("out of bounds", s, p, size_bytes, place, "read");
    if (w.clock == UNWRITTEN) report_access("uninitialised", s, p, size_bytes, place, "read");
    if ((w.flags & PENDING) != 0 && w.clock >= op_begin)
        report_race(s, p, w, "cp.async that nobody has waited for", place, "read");
    bool others = (w.flags & OTHER_BLOCKS) != 0 && w.clock >= op_begin && in_kernel && num_acquired == 0;
    if (!is_before(w) || others) report_race(s, p, w, "write", place, "read");
    c->read = read_after(c->read, place);
}

static void cell_write(const Space* s, Cell* c, const void* p, size_t size_bytes, uint32_t place, unsigned flags)
{
    const Record w = c->write;
    if (w.clock == UNALLOCATED) report_access("out of bounds", s, p, size_bytes, place, "write");
    unsigned others = 0;
    if (w.clock > UNWRITTEN) {
        bool both_atomic = (w.flags & flags & ATOMIC) != 0 && w.clock >= op_begin;
        if ((w.flags & PENDING) != 0 && w.clock >= op_begin)
            report_race(s, p, w, "cp.async that nobody has waited for", place, "write");
        if (!both_atomic && !is_before(w)) report_race(s, p, w, "write", place, "write");
        if (both_atomic) others = (w.flags & OTHER_BLOCKS) | (w.clock < block_begin ? OTHER_BLOCKS : 0);
    } else if ((flags & ATOMIC) != 0) report_access("uninitialised", s, p, size_bytes, place, "atomic");
    if (!may_overwrite(c->read)) {
        Record r = c->read;
        if (r.clock == SEVERAL_STREAMS) {
            const ReadSet* set = &read_sets[read_set_bits(r)];
            for (int i = 0; i < set->count; i++)
                if (set->reads[i].clock < op_begin && !op_is_before(set->reads[i].clock)) r = set->reads[i];
        }
        report_race(s, p, r, r.flags != 0 ? "read (one of several)" : "read", place, "write");
    }
    c->write = record_now(place, flags | others);
    c->read = {0, 0, 0, 0};
}

static void check_cells(Space* s, const void* p, size_t size_bytes, Access access, uint32_t place, unsigned flags)
{
    if (!in_op) host_segment();
    Cell *first = cell_of(s, p), *last = cell_of(s, (const char*)p + size_bytes - 1);
    if (counting && in_kernel && s == &spaces[(int)Memory::DEVICE]) count_first_touches(p, first, last, access);
    for (Cell* c = first; c <= last; c++) {
        const char* at = s->base + (size_t)(c - s->cells) * GRANULE;
        if (access == Access::READ) cell_read(s, c, at, size_bytes, place);
        else cell_write(s, c, at, size_bytes, place, flags);
    }
}

/* ---- accesses */

static pthread_t main_thread = pthread_self();
static bool is_off;

void check_off(void) { is_off = true; }

/* A load or store that is not in the three spaces: of the host's memory. */
static void check_elsewhere(const void* p, const void* pc)
{
    if (!in_kernel || emu_is_stack(p)) return;
    const char* at = (const char*)p;
    if (at >= kernel_args && at < kernel_args + kernel_args_bytes) return;
    if (at >= &__executable_start && at < &_end) return;
    char text[400];
    emu_place_text(emu_place(pc), text, sizeof text);
    emu_die("a kernel touches host memory at %p: %s", p, text);
}

static void check_access(const void* p, size_t size_bytes, Access access, unsigned flags, const void* pc)
{
    if (is_off || pthread_self() != main_thread) return;      // the loader reads host memory, and makes no CUDA calls
    Space* s = space_of(p);
    if (s == nullptr) {
        check_elsewhere(p, pc);
        return;
    }
    uint32_t place = emu_place(pc);
    if (!in_kernel && s != &spaces[(int)Memory::PINNED]) {
        char text[400];
        emu_place_text(place, text, sizeof text);
        emu_die("host code touches %s memory at %p: %s", s->name, p, text);
    }
    check_cells(s, p, size_bytes, access, place, flags);
    if (in_kernel) count_request(p, size_bytes, access, place, s == &spaces[(int)Memory::SHARED]);
}

void check_range(const void* p, size_t size_bytes, Access access, const char* name)
{
    Space* s = space_of(p);
    if (is_off || s == nullptr || size_bytes == 0) return;
    check_cells(s, p, size_bytes, access, place_named(name, 0), 0);
    if (s == &spaces[(int)Memory::DEVICE]) count_library(p, size_bytes, access, name);
}

void check_async_issue(void* dst, const void* src, bool valid, const char* file, int line)
{
    uint32_t place = place_named(file, line);
    check_cells(space_of(dst), dst, 16, Access::WRITE, place, PENDING);
    if (!valid) return;
    Space* s = space_of(src);
    if (s == nullptr) emu_die("cp_async16 at %s:%d: the source is host memory", file, line);
    check_cells(s, src, 16, Access::READ, place, 0);
    count_request(src, 16, Access::READ, place, false);
}

void check_async_done(void* dst, const char* file, int line)
{
    Space* s = space_of(dst);
    Record done = record_now(place_named(file, line), 0);
    for (Cell *c = cell_of(s, dst), *end = c + 16 / GRANULE; c < end; c++) c->write = done;
}

void check_warp_read(const void* p, size_t size_bytes, const char* file, int line)
{
    uint32_t place = place_named(file, line);
    check_cells(space_of(p), p, size_bytes, Access::READ, place, 0);
    count_request(p, size_bytes, Access::READ, place, true);
}

void emu_load(void* to, const void* from, size_t size_bytes)
{
    check_access(from, size_bytes, Access::READ, 0, __builtin_return_address(0));
    memcpy(to, from, size_bytes);
}

void emu_store(void* to, const void* from, size_t size_bytes)
{
    check_access(to, size_bytes, Access::WRITE, 0, __builtin_return_address(0));
    memcpy(to, from, size_bytes);
}

void emu_atomic(void* p, size_t size_bytes, const void* pc)
{
    check_access(p, size_bytes, Access::WRITE, ATOMIC, pc);
    release_and_acquire(p);
}

/* ---- the C library, see emu_libc.h. EMU_SLOW_RANK=r: rank r takes its time with files, so that others who do not wait
 * for it are caught. */

static void be_slow(void)
{
    static int slow = -1;
    if (slow < 0) {
        const char *asked = getenv("EMU_SLOW_RANK"), *rank = getenv("OMPI_COMM_WORLD_RANK");
        slow = asked != nullptr && rank != nullptr && strcmp(asked, rank) == 0;
    }
    if (slow == 1) usleep(20000);
}

static void check_libc(const void* p, size_t size_bytes, Access access, const void* pc)
{
    if (size_bytes > 0) check_access(p, size_bytes, access, 0, pc);
}

#define PC __builtin_return_address(0)

extern "C" {

void* emu_checked_memcpy(void* to, const void* from, size_t size)
{
    check_libc(from, size, Access::READ, PC);
    check_libc(to, size, Access::WRITE, PC);
    return memcpy(to, from, size);
}

void* emu_checked_memmove(void* to, const void* from, size_t size)
{
    check_libc(from, size, Access::READ, PC);
    check_libc(to, size, Access::WRITE, PC);
    return memmove(to, from, size);
}

void* emu_checked_memset(void* p, int value, size_t size)
{
    check_libc(p, size, Access::WRITE, PC);
    return memset(p, value, size);
}

size_t emu_checked_fread(void* to, size_t size, size_t n, FILE* file)
{
    check_libc(to, size * n, Access::WRITE, PC);
    return fread(to, size, n, file);
}

size_t emu_checked_fwrite(const void* from, size_t size, size_t n, FILE* file)
{
    check_libc(from, size * n, Access::READ, PC);
    return fwrite(from, size, n, file);
}

ssize_t emu_checked_pread(int fd, void* to, size_t size, off_t offset)
{
    check_libc(to, size, Access::WRITE, PC);
    be_slow();
    return pread(fd, to, size, offset);
}

ssize_t emu_checked_pwrite(int fd, const void* from, size_t size, off_t offset)
{
    check_libc(from, size, Access::READ, PC);
    be_slow();
    return pwrite(fd, from, size, offset);
}

ssize_t emu_checked_read(int fd, void* to, size_t size)
{
    check_libc(to, size, Access::WRITE, PC);
    return read(fd, to, size);
}

ssize_t emu_checked_write(int fd, const void* from, size_t size)
{
    check_libc(from, size, Access::READ, PC);
    return write(fd, from, size);
}

/* ---- what -fsanitize=thread calls. Aligned or not is one to us. */

void __tsan_init(void) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit(void) {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

#define TSAN_ACCESS(bytes) \
    void __tsan_read##bytes(void* p) { check_access(p, bytes, Access::READ, 0, PC); } \
    void __tsan_write##bytes(void* p) { check_access(p, bytes, Access::WRITE, 0, PC); } \
    void __tsan_unaligned_read##bytes(void* p) { check_access(p, bytes, Access::READ, 0, PC); } \
    void __tsan_unaligned_write##bytes(void* p) { check_access(p, bytes, Access::WRITE, 0, PC); } \
    void __tsan_volatile_read##bytes(void* p) { check_access(p, bytes, Access::READ, 0, PC); } \
    void __tsan_volatile_write##bytes(void* p) { check_access(p, bytes, Access::WRITE, 0, PC); }
TSAN_ACCESS(1)
TSAN_ACCESS(2)
TSAN_ACCESS(4)
TSAN_ACCESS(8)
TSAN_ACCESS(16)

void __tsan_read_range(void* p, size_t size) { check_libc(p, size, Access::READ, PC); }
void __tsan_write_range(void* p, size_t size) { check_libc(p, size, Access::WRITE, PC); }

/* Host code's own atomics and guards of static locals; kernels use emu.h's. */
#define TSAN_ATOMIC(bits, T) \
    T __tsan_atomic##bits##_load(const volatile T* p, int) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); } \
    void __tsan_atomic##bits##_store(volatile T* p, T v, int) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); } \
    T __tsan_atomic##bits##_exchange(volatile T* p, T v, int) \
    { \
        return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); \
    } \
    T __tsan_atomic##bits##_fetch_add(volatile T* p, T v, int) \
    { \
        return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); \
    } \
    int __tsan_atomic##bits##_compare_exchange_strong(volatile T* p, T* want, T v, int, int) \
    { \
        return __atomic_compare_exchange_n(p, want, v, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
    }
TSAN_ATOMIC(8, uint8_t)
TSAN_ATOMIC(32, uint32_t)
TSAN_ATOMIC(64, uint64_t)

}
