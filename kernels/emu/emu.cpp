/* emu.cpp: runs kernels. Fibers, the block scheduler, barriers, warp-wide calls, shared memory, cp.async, tensor cores.
 * What it reports, each with kernel, block, thread and seed: a deadlock in a block (who waits where), threads of one
 * block at different barriers, a diverged warp, a lane missing from its mask, a write past a shared array, misaligned
 * 128-bit accesses, bad launches (as the CUDA errors they are). */
#include <cstdio>
#include <sys/mman.h>
#include "emu.h"
#include "emu_check.h"
#if !defined(__x86_64__) || defined(EMU_UCONTEXT)      // EMU_UCONTEXT: to test the portable way here
#include <ucontext.h>
#define PORTABLE_FIBERS
#endif

static const int MAX_THREADS = 1024, MAX_WARPS = 32;

/* ---- options and the seeded generator */

static uint64_t env_number(const char* name, uint64_t otherwise)
{
    const char* s = getenv(name);
    return s != nullptr ? strtoull(s, nullptr, 10) : otherwise;
}

static EmuOptions options_from_env(void)
{
    EmuOptions o = {env_number("EMU_SEED", 0), (int)env_number("EMU_CP_ASYNC", 0), 227 << 10,
                    (int)env_number("EMU_CAPABILITY", 90), env_number("EMU_TIMELINE", 0) != 0};
    if (o.seed != 0) o.seed = o.seed * 1000 + env_number("OMPI_COMM_WORLD_RANK", 0);   // each rank has its own order
    return o;
}

EmuOptions emu_options = options_from_env();
double emu_pretended_s, emu_work_s;
static uint64_t random_state = emu_options.seed * 0xD1342543DE82EF95ull;

uint64_t emu_random(void)                            // splitmix64
{
    uint64_t z = (random_state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

uint64_t emu_random_below(uint64_t n) { return (uint64_t)(((unsigned __int128)emu_random() * n) >> 64); }
static bool coin(void) { return emu_options.seed != 0 && (emu_random() & 1) != 0; }

static struct { uint64_t launches, threads, switches, barriers, warp_calls; } counts;

__attribute__((destructor)) static void print_counts(void)
{
    if (getenv("EMU_STATS") == nullptr) return;
    fprintf(stderr, "emulator: %llu launches, %llu threads, %llu switches, %llu barriers, %llu warp calls\n",
            (unsigned long long)counts.launches, (unsigned long long)counts.threads,
            (unsigned long long)counts.switches, (unsigned long long)counts.barriers,
            (unsigned long long)counts.warp_calls);
}

/* ---- the running block */

uint3 emu_thread_idx, emu_block_idx;
dim3 emu_block_dim, emu_grid_dim;

enum class State : uint8_t { RUNNING, READY, AT_BARRIER, IN_WARP_CALL, EXITED };

struct AsyncCopy {
    char* dst;
    const char *src, *file;
    int line, group;
    bool valid, done;
};

struct Thread {
    uint3 idx;
    int fiber;
    State state;
    const char *what, *file;                         // where it waits
    int line;
    AsyncCopy* copies;
    int num_copies, copies_capacity, open_group;
};

struct WarpCall {                                    // lanes of one mask that have come, waiting for the others
    const char *what, *file;
    int line;
    unsigned mask, arrived;
    void* lane_args[32];
};
struct Warp { WarpCall calls[32]; int num_calls; unsigned exists, exited; };

static EmuLaunch* launch;                            // null outside of kernels
static Thread threads[MAX_THREADS];
static Warp warps[MAX_WARPS];
static int start_order[MAX_THREADS];
static int num_threads, num_live, num_unstarted;
int emu_current = -1;                                // the running thread

void emu_die(const char* fmt, ...)
{
    char text[3072];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    check_off();
    unsigned long long seed = emu_options.seed;
    if (launch == nullptr) die("emulator: %s [seed %llu]", text, seed);
    if (emu_current < 0) die("emulator: %s [kernel %s, block (%u,%u,%u), seed %llu]", text, launch->name,
                             emu_block_idx.x, emu_block_idx.y, emu_block_idx.z, seed);
    uint3 t = threads[emu_current].idx;
    die("emulator: %s [kernel %s, block (%u,%u,%u), thread (%u,%u,%u), seed %llu]", text, launch->name,
        emu_block_idx.x, emu_block_idx.y, emu_block_idx.z, t.x, t.y, t.z, seed);
}

int emu_lane(void) { return emu_current & 31; }

void emu_check_aligned(const void* p, size_t align, const char* what, const char* file, int line)
{
    if ((uintptr_t)p % align != 0) emu_die("%s at %s:%d: %p is not aligned to %zu bytes", what, file, line, p, align);
}

/* ---- fibers: a stack and a saved stack pointer each */

struct Fiber {
    void* stack_pointer;
    char* stack;
#ifdef PORTABLE_FIBERS
    ucontext_t context;
#endif
};

static const size_t STACK_BYTES = 64 << 10, STACK_GUARD_BYTES = 1 << 20;
static char* stacks;
static const uint64_t STACK_CANARY = 0x5AFE57AC5AFE57ACull;
static Fiber fibers[MAX_THREADS], host_fiber;
static int num_fibers, free_fibers[MAX_THREADS], num_free_fibers, current_fiber;

static void fiber_main(void);

#ifndef PORTABLE_FIBERS
/* Saves the registers that a called function must keep, changes stacks, restores. Ends in `ret`, so that the
 * processor's return prediction stays in step when fibers switch to each other: 21 instead of 32 ns a barrier. */
extern "C" void emu_switch_stacks(void** save_stack_pointer, void* load_stack_pointer);
asm(".text\n"
    ".p2align 4\n"
    ".globl emu_switch_stacks\n"
    ".type emu_switch_stacks,@function\n"
    "emu_switch_stacks:\n"
    "    push %rbp\n    push %rbx\n    push %r12\n    push %r13\n    push %r14\n    push %r15\n"
    "    mov %rsp, (%rdi)\n"
    "    mov %rsi, %rsp\n"
    "    pop %r15\n    pop %r14\n    pop %r13\n    pop %r12\n    pop %rbx\n    pop %rbp\n"
    "    ret\n"
    ".size emu_switch_stacks,.-emu_switch_stacks\n");

static void fiber_prepare(Fiber* f, int fiber_idx)
{
    /* Stack tops are shifted against each other: at equal offsets they would share a few sets of the cache. */
    void** top = (void**)(f->stack + STACK_BYTES - (size_t)(fiber_idx % 16) * 1088);
    *--top = nullptr;                                // the entry expects rsp = 8 mod 16, as after a call
    *--top = (void*)fiber_main;
    for (int i = 0; i < 6; i++) *--top = nullptr;
    f->stack_pointer = top;
}

static void fiber_switch(Fiber* from, Fiber* to)
{
    counts.switches++;
    emu_switch_stacks(&from->stack_pointer, to->stack_pointer);
}
#else
static void fiber_prepare(Fiber* f, int)
{
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = f->stack;
    f->context.uc_stack.ss_size = STACK_BYTES;
    f->context.uc_link = nullptr;
    makecontext(&f->context, fiber_main, 0);
}

static void fiber_switch(Fiber* from, Fiber* to)
{
    counts.switches++;
    swapcontext(&from->context, &to->context);
}
#endif

bool emu_is_stack(const void* p)
{
    return (const char*)p >= stacks && (const char*)p < stacks + STACK_BYTES * MAX_THREADS;
}

bool emu_is_stack_guard(const void* p)
{
    return stacks != nullptr && (const char*)p < stacks && (const char*)p >= stacks - STACK_GUARD_BYTES;
}

/* One mapping for all stacks, with a canary at each one's end: guard pages would split the huge pages (38 instead of
 * 55 ns a switch at 256 threads). */
static int fiber_take(void)
{
    if (num_free_fibers > 0) return free_fibers[--num_free_fibers];
    if (stacks == nullptr) {
        size_t size_bytes = STACK_BYTES * MAX_THREADS;
        void* p = mmap(nullptr, STACK_GUARD_BYTES + size_bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        ENSURE(p != MAP_FAILED, "emulator: no memory for %zu bytes of fiber stacks", size_bytes);
        mprotect(p, STACK_GUARD_BYTES, PROT_NONE);
        stacks = (char*)p + STACK_GUARD_BYTES;
        madvise(stacks, size_bytes, MADV_HUGEPAGE);
    }
    int i = num_fibers++;
    fibers[i].stack = stacks + STACK_BYTES * (size_t)i;
    memcpy(fibers[i].stack, &STACK_CANARY, sizeof STACK_CANARY);
    fiber_prepare(&fibers[i], i);
    return i;
}

/* ---- which thread runs next */

static int ready_ring[MAX_THREADS];
static unsigned ready_head, ready_tail;

static bool any_ready(void) { return ready_head != ready_tail; }

static void make_ready(int thread)
{
    threads[thread].state = State::READY;
    ready_ring[ready_tail++ % MAX_THREADS] = thread;
}

static int take_ready(void)                          // seed 0: first come, first served
{
    int* first = &ready_ring[ready_head % MAX_THREADS];
    if (emu_options.seed != 0) {
        int* picked = &ready_ring[(ready_head + emu_random_below(ready_tail - ready_head)) % MAX_THREADS];
        int swap = *first;
        *first = *picked;
        *picked = swap;
    }
    ready_head++;
    return *first;
}

static void set_current(int thread)
{
    emu_current = thread;
    emu_thread_idx = threads[thread].idx;
    threads[thread].state = State::RUNNING;
}

[[noreturn]] static void die_deadlocked(void)
{
    char text[2048];
    int used = 0, num_shown = 0;
    text[0] = '\0';
    for (int i = 0; i < num_threads && num_shown < 12; i++) {
        const Thread *t = &threads[i], *last = i > 0 ? &threads[i - 1] : nullptr;
        if (t->state != State::AT_BARRIER && t->state != State::IN_WARP_CALL) continue;
        if (last != nullptr && last->state == t->state && last->line == t->line) continue;
        used += snprintf(text + used, sizeof text - (size_t)used, "\n  from thread %d on: waits in %s at %s:%d", i,
                         t->what, t->file, t->line);
        if (used > (int)sizeof text - 300) break;
        num_shown++;
    }
    int num_waiting = num_live;
    emu_current = -1;
    emu_die("deadlock in a block: %d of %d threads wait for the others%s", num_waiting, num_threads, text);
}

/* The fiber to continue with, -1 when the block is finished. A thread that has not started gets a fiber to start on. */
static int pick_fiber(void)
{
    bool start = num_unstarted > 0 && (!any_ready() || emu_options.seed == 0 || coin());
    if (start) {
        emu_current = -1;
        return fiber_take();
    }
    if (!any_ready()) {
        if (num_live > 0) die_deadlocked();
        return -1;
    }
    set_current(take_ready());
    return threads[emu_current].fiber;
}

static void go_to_fiber(int from, int to)
{
    current_fiber = to;
    fiber_switch(&fibers[from], to < 0 ? &host_fiber : &fibers[to]);
}

/* The running thread gives way; its state says what it waits for. Returns when it has been picked again. */
static void give_way(void)
{
    int me = emu_current, fiber = current_fiber, next = pick_fiber();
    if (next != fiber || emu_current != me) go_to_fiber(fiber, next);
}

static void wait_at(State state, const char* what, const char* file, int line)
{
    Thread* t = &threads[emu_current];
    t->state = state;
    t->what = what;
    t->file = file;
    t->line = line;
    give_way();
}

void emu_yield(void)
{
    make_ready(emu_current);
    give_way();
}

/* ---- barriers */

static struct {
    EmuBarrier kind;
    const char* file;
    int line, num_arrived, num_true, result;
    int waiting[MAX_THREADS];
} barrier;

static void barrier_release(void)
{
    if (barrier.kind == EmuBarrier::COUNT) barrier.result = barrier.num_true;
    else if (barrier.kind == EmuBarrier::OR) barrier.result = barrier.num_true > 0;
    else barrier.result = barrier.num_true == barrier.num_arrived;
    int num_arrived = barrier.num_arrived;
    check_barrier();
    barrier.num_arrived = barrier.num_true = 0;
    for (int i = 0; i < num_arrived; i++) make_ready(barrier.waiting[i]);
}

static bool same_place(const char* file_a, int line_a, const char* file_b, int line_b)
{
    return line_a == line_b && (file_a == file_b || strcmp(file_a, file_b) == 0);
}

int emu_barrier(EmuBarrier kind, int predicate, const char* file, int line)
{
    counts.barriers++;
    if (launch == nullptr) emu_die("__syncthreads at %s:%d outside of a kernel", file, line);
    if (barrier.num_arrived == 0) {
        barrier.kind = kind;
        barrier.file = file;
        barrier.line = line;
    } else if (kind != barrier.kind || !same_place(file, line, barrier.file, barrier.line)) {
        emu_die("threads of one block meet at different barriers: %s:%d and %s:%d", file, line, barrier.file,
                barrier.line);
    }
    barrier.waiting[barrier.num_arrived++] = emu_current;
    barrier.num_true += predicate != 0;
    if (barrier.num_arrived < num_live) wait_at(State::AT_BARRIER, "__syncthreads", file, line);
    else {
        barrier_release();                           // the last to come is not the first to go: it waits its turn too
        give_way();
    }
    return barrier.result;
}

/* ---- warp-wide calls */

static void warp_call_check(const WarpCall* call, const char* what, unsigned mask, const char* file, int line)
{
    if (call->mask == mask && same_place(call->file, call->line, file, line) &&
        (call->what == what || strcmp(call->what, what) == 0)) return;
    emu_die("the warp has diverged: lane %d is in %s at %s:%d with mask %08x, others wait in %s at %s:%d with mask "
            "%08x", emu_lane(), what, file, line, mask, call->what, call->file, call->line, call->mask);
}

static WarpCall* warp_call_join(Warp* warp, const char* what, unsigned mask, const char* file, int line)
{
    unsigned bit = 1u << emu_lane();
    for (int i = 0; i < warp->num_calls; i++) {
        if ((warp->calls[i].mask & bit) == 0) continue;
        warp_call_check(&warp->calls[i], what, mask, file, line);
        return &warp->calls[i];
    }
    if ((mask & bit) == 0) emu_die("%s at %s:%d: lane %d is not in its mask %08x", what, file, line, emu_lane(), mask);
    if ((mask & (warp->exited | ~warp->exists)) != 0)
        emu_die("%s at %s:%d: mask %08x names lanes that have exited or do not exist", what, file, line, mask);
    WarpCall* call = &warp->calls[warp->num_calls++];
    call->what = what;
    call->file = file;
    call->line = line;
    call->mask = mask;
    call->arrived = 0;
    return call;
}

void emu_warp_call(const char* what, unsigned mask, void* lane_arg, EmuWarpFn fn, const char* file, int line)
{
    counts.warp_calls++;
    if (launch == nullptr) emu_die("%s at %s:%d outside of a kernel", what, file, line);
    Warp* warp = &warps[emu_current >> 5];
    WarpCall* call = warp_call_join(warp, what, mask, file, line);
    unsigned bit = 1u << emu_lane();
    call->lane_args[emu_lane()] = lane_arg;
    call->arrived |= bit;
    if (call->arrived != mask) {
        wait_at(State::IN_WARP_CALL, what, file, line);
        return;
    }
    if (fn != nullptr) fn(call->lane_args, mask);
    else check_syncwarp(emu_current & ~31, mask);
    *call = warp->calls[--warp->num_calls];
    int first_lane = emu_current & ~31;
    for (unsigned rest = mask & ~bit; rest != 0; rest &= rest - 1) make_ready(first_lane + __builtin_ctz(rest));
    if (coin()) emu_yield();
}

void emu_shuffle_lanes(void** lane_args, unsigned mask)
{
    for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
        EmuShuffle* lane = (EmuShuffle*)lane_args[__builtin_ctz(rest)];
        bool defined = (mask >> lane->src_lane & 1) != 0;   // a lane outside of the mask: undefined, so made loud
        lane->out = defined ? ((EmuShuffle*)lane_args[lane->src_lane])->in : ~0ull;
    }
}

struct Vote { int predicate; unsigned result; };

static void vote_lanes(void** lane_args, unsigned mask)
{
    unsigned result = 0;
    for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
        int lane = __builtin_ctz(rest);
        if (((Vote*)lane_args[lane])->predicate != 0) result |= 1u << lane;
    }
    for (unsigned rest = mask; rest != 0; rest &= rest - 1) ((Vote*)lane_args[__builtin_ctz(rest)])->result = result;
}

unsigned emu_ballot(const char* what, unsigned mask, int predicate, const char* file, int line)
{
    Vote vote = {predicate, 0};
    emu_warp_call(what, mask, &vote, vote_lanes, file, line);
    return vote.result;
}

/* ---- shared memory: an arena per block, filled with NaN, exact sizes, gaps that are checked when the block ends */

static const size_t SHARED_ARENA_BYTES = 1 << 20, SHARED_GAP = 128;
static const int MAX_SHARED_OBJECTS = 256;
alignas(4096) static char shared_arena[SHARED_ARENA_BYTES];

struct SharedObject { const void* key; const char* name; char* p; size_t size_bytes; };
static SharedObject shared_objects[MAX_SHARED_OBJECTS];
static int num_shared_objects;
static size_t shared_used_bytes;

static const uint16_t GAP_PATTERN = 0xFFFA;          // a NaN in fp16, bf16, fp32 and fp64

void emu_gap_fill(char* p, size_t size_bytes)
{
    for (size_t i = 0; i < size_bytes; i++) p[i] = (char)(GAP_PATTERN >> (((uintptr_t)(p + i) & 1) * 8));
}

const char* emu_gap_damage(const char* p, size_t size_bytes)
{
    for (size_t i = 0; i < size_bytes; i++) {
        if (p[i] != (char)(GAP_PATTERN >> (((uintptr_t)(p + i) & 1) * 8))) return p + i;
    }
    return nullptr;
}

static char* shared_new(const void* key, size_t size_bytes, const char* name)
{
    if (num_shared_objects == MAX_SHARED_OBJECTS) emu_die("more than %d shared arrays", MAX_SHARED_OBJECTS);
    char* p = shared_arena + shared_used_bytes;
    check_alloc(Memory::SHARED, p, size_bytes);
    size_t end = shared_used_bytes + size_bytes;
    shared_used_bytes = (end + 2 * SHARED_GAP - 1) / SHARED_GAP * SHARED_GAP;    // a gap of SHARED_GAP bytes or more
    memset(p, EMU_FILL_BYTE, size_bytes);
    emu_gap_fill(p + size_bytes, SHARED_GAP);
    shared_objects[num_shared_objects++] = {key, name, p, size_bytes};
    return p;
}

static void shared_reset(void)
{
    static bool known;
    if (!known) check_arena(Memory::SHARED, shared_arena, SHARED_ARENA_BYTES);
    known = true;
    check_free(Memory::SHARED, shared_arena, shared_used_bytes);
    num_shared_objects = 0;
    shared_used_bytes = SHARED_GAP;
    emu_gap_fill(shared_arena, SHARED_GAP);
    if (launch->shared_bytes > 0) shared_new(nullptr, launch->shared_bytes, "the dynamic shared memory");
}

static void shared_check_gaps(void)
{
    if (emu_gap_damage(shared_arena, SHARED_GAP) != nullptr) emu_die("a write before the start of shared memory");
    for (int i = 0; i < num_shared_objects; i++) {
        const SharedObject* o = &shared_objects[i];
        const char* damage = emu_gap_damage(o->p + o->size_bytes, SHARED_GAP);
        if (damage != nullptr)
            emu_die("a write %zu bytes past the end of %s (%zu bytes of shared memory)",
                    (size_t)(damage - o->p) - o->size_bytes, o->name, o->size_bytes);
    }
}

void* emu_static_shared(const void* key, size_t size_bytes, size_t, const char* name)
{
    size_t static_bytes = size_bytes;
    for (int i = 0; i < num_shared_objects; i++) {
        if (shared_objects[i].key == key) return shared_objects[i].p;
        if (shared_objects[i].key != nullptr) static_bytes += shared_objects[i].size_bytes;
    }
    if (launch == nullptr) emu_die("shared array %s outside of a kernel", name);
    if (static_bytes > 48 << 10) emu_die("%s: more than 48 KiB of static shared memory", name);
    if (static_bytes + launch->shared_bytes > emu_options.shared_limit_bytes)
        emu_die("%s: more than %zu bytes of shared memory in a block", name, emu_options.shared_limit_bytes);
    return shared_new(key, size_bytes, name);
}

void* emu_dyn_shared(const char* file, int line)
{
    if (launch == nullptr || launch->shared_bytes == 0)
        emu_die("%s:%d: dynamic shared memory is used, but the launch gave 0 bytes", file, line);
    return shared_objects[0].p;
}

static void check_shared_range(const void* p, size_t size_bytes, const char* what, const char* file, int line)
{
    for (int i = 0; i < num_shared_objects; i++) {
        const SharedObject* o = &shared_objects[i];
        if ((const char*)p >= o->p && (const char*)p + size_bytes <= o->p + o->size_bytes) return;
    }
    bool near = (const char*)p >= shared_arena && (const char*)p < shared_arena + SHARED_ARENA_BYTES;
    emu_die("%s at %s:%d: %p is %s", what, file, line, p, near ? "outside of every shared array" : "not shared memory");
}

/* ---- cp.async: copied when issued or when waited for, by choice, so that a missing wait shows */

static void copy_do(AsyncCopy* copy)
{
    if (copy->done) return;
    if (copy->valid) memcpy(copy->dst, copy->src, 16);
    else memset(copy->dst, 0, 16);
    copy->done = true;
}

void emu_cp_async16(void* dst, const void* src, bool valid, const char* file, int line)
{
    emu_check_aligned(dst, 16, "cp_async16, destination", file, line);
    if (valid) emu_check_aligned(src, 16, "cp_async16, source", file, line);
    check_shared_range(dst, 16, "cp_async16, destination", file, line);
    Thread* t = &threads[emu_current];
    if (t->num_copies == t->copies_capacity) {
        t->copies_capacity = t->copies_capacity > 0 ? 2 * t->copies_capacity : 32;
        t->copies = (AsyncCopy*)realloc(t->copies, (size_t)t->copies_capacity * sizeof(AsyncCopy));
        ENSURE(t->copies != nullptr, "out of host memory");
    }
    AsyncCopy* copy = &t->copies[t->num_copies++];
    *copy = {(char*)dst, (const char*)src, file, line, t->open_group, valid, false};
    check_async_issue(dst, src, valid, file, line);
    if (emu_options.cp_async == 1 || (emu_options.cp_async == 0 && coin())) copy_do(copy);
}

void emu_cp_async_commit(void) { threads[emu_current].open_group++; }

void emu_cp_async_wait(int num_groups_left)
{
    Thread* t = &threads[emu_current];
    int num_kept = 0;
    for (int i = 0; i < t->num_copies; i++) {
        if (t->copies[i].group < t->open_group - num_groups_left) {
            copy_do(&t->copies[i]);
            check_async_done(t->copies[i].dst, t->copies[i].file, t->copies[i].line);
        } else t->copies[num_kept++] = t->copies[i];
    }
    t->num_copies = num_kept;
}

/* ---- tensor cores */

struct MatrixRow { uint32_t* r; const void* row; };

/* Lanes 8i..8i+7 give the rows of matrix i. Lane 4g+t receives elements 2t and 2t+1 of row g (transposed: column g). */
static void ldmatrix_lanes(void** lane_args, bool transposed)
{
    for (int i = 0; i < 4; i++) {
        uint16_t m[8][8];
        for (int row = 0; row < 8; row++) memcpy(m[row], ((MatrixRow*)lane_args[8 * i + row])->row, 16);
        for (int lane = 0; lane < 32; lane++) {
            int g = lane / 4, t = lane % 4;
            uint16_t lo = transposed ? m[2 * t][g] : m[g][2 * t];
            uint16_t hi = transposed ? m[2 * t + 1][g] : m[g][2 * t + 1];
            ((MatrixRow*)lane_args[lane])->r[i] = lo | (uint32_t)hi << 16;
        }
    }
}
static void ldmatrix_plain(void** lane_args, unsigned) { ldmatrix_lanes(lane_args, false); }
static void ldmatrix_transposed(void** lane_args, unsigned) { ldmatrix_lanes(lane_args, true); }

void emu_ldmatrix_x4(uint32_t (&r)[4], const void* row, bool transposed, const char* file, int line)
{
    emu_check_aligned(row, 16, "ldmatrix_x4", file, line);
    check_shared_range(row, 16, "ldmatrix_x4", file, line);
    check_warp_read(row, 16, file, line);
    MatrixRow arg = {r, row};
    if (transposed) emu_warp_call("ldmatrix_x4_trans", 0xFFFFFFFFu, &arg, ldmatrix_transposed, file, line);
    else emu_warp_call("ldmatrix_x4", 0xFFFFFFFFu, &arg, ldmatrix_plain, file, line);
}

struct MmaArg { float* d; const uint32_t *a, *b; };
uint64_t emu_num_mma;

static void unpack_pair(float* pair, uint32_t bits, bool is_bf16)
{
    pair[0] = is_bf16 ? bf16_bits_to_float((uint16_t)bits) : fp16_bits_to_float((uint16_t)bits);
    pair[1] = is_bf16 ? bf16_bits_to_float((uint16_t)(bits >> 16)) : fp16_bits_to_float((uint16_t)(bits >> 16));
}

/* Fragments as in the PTX manual: lane 4g+t holds rows g and g+8 of a and d, column g of b, and of each the elements
 * 2t and 2t+1 (and for k 2t+8, 2t+9). */
static void mma_lanes(void** lane_args, bool is_bf16)
{
    float a[16][16], bt[8][16], d[16][8];
    emu_num_mma++;
    for (int lane = 0; lane < 32; lane++) {
        const MmaArg* x = (const MmaArg*)lane_args[lane];
        int g = lane / 4, t = lane % 4;
        for (int half_k = 0; half_k < 2; half_k++) {
            unpack_pair(&a[g][8 * half_k + 2 * t], x->a[2 * half_k], is_bf16);
            unpack_pair(&a[g + 8][8 * half_k + 2 * t], x->a[2 * half_k + 1], is_bf16);
            unpack_pair(&bt[g][8 * half_k + 2 * t], x->b[half_k], is_bf16);
        }
        memcpy(&d[g][2 * t], &x->d[0], 8);
        memcpy(&d[g + 8][2 * t], &x->d[2], 8);
    }
    float b[16][8];
    for (int k = 0; k < 16; k++) {
        for (int n = 0; n < 8; n++) b[k][n] = bt[n][k];
    }
    for (int m = 0; m < 16; m++) {
        for (int k = 0; k < 16; k++) {
            for (int n = 0; n < 8; n++) d[m][n] += a[m][k] * b[k][n];
        }
    }
    for (int lane = 0; lane < 32; lane++) {
        const MmaArg* x = (const MmaArg*)lane_args[lane];
        int g = lane / 4, t = lane % 4;
        memcpy(&x->d[0], &d[g][2 * t], 8);
        memcpy(&x->d[2], &d[g + 8][2 * t], 8);
    }
}
static void mma_bf16(void** lane_args, unsigned) { mma_lanes(lane_args, true); }
static void mma_fp16(void** lane_args, unsigned) { mma_lanes(lane_args, false); }

void emu_mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool is_bf16, const char* file,
                      int line)
{
    MmaArg arg = {d, a, b};
    emu_warp_call("mma_m16n8k16", 0xFFFFFFFFu, &arg, is_bf16 ? mma_bf16 : mma_fp16, file, line);
}

/* ---- threads, blocks, grids */

static void thread_exit(void)
{
    Thread* t = &threads[emu_current];
    if (t->num_copies > 0) {                         // what was never waited for still lands
        t->open_group++;
        emu_cp_async_wait(0);
    }
    if (memcmp(fibers[current_fiber].stack, &STACK_CANARY, sizeof STACK_CANARY) != 0)
        emu_die("a thread used more than %zu bytes of stack", STACK_BYTES);
    t->state = State::EXITED;
    num_live--;
    Warp* warp = &warps[emu_current >> 5];
    warp->exited |= 1u << emu_lane();
    for (int i = 0; i < warp->num_calls; i++) {
        const WarpCall* call = &warp->calls[i];
        if ((call->mask >> emu_lane() & 1) != 0)
            emu_die("a lane exits while its warp waits for it in %s at %s:%d", call->what, call->file, call->line);
    }
    if (barrier.num_arrived > 0 && barrier.num_arrived == num_live) barrier_release();
}

/* A fiber starts threads one after another, and calls the kernel as a plain function. A thread that waits keeps the
 * fiber, and another fiber continues with the next. */
static void fiber_main(void)
{
    for (;;) {
        int fiber = current_fiber;
        while (num_unstarted > 0) {
            int thread = start_order[num_threads - num_unstarted];
            num_unstarted--;
            threads[thread].fiber = fiber;
            set_current(thread);
            launch->call(launch);
            thread_exit();
            if (any_ready() && coin()) break;        // let others go first, sometimes
        }
        free_fibers[num_free_fibers++] = fiber;
        int next = pick_fiber();
        if (next != fiber) go_to_fiber(fiber, next);
    }
}

static void run_block(void)
{
    num_live = num_unstarted = num_threads;
    ready_head = ready_tail = 0;
    barrier.num_arrived = barrier.num_true = 0;
    for (int w = 0; w * 32 < num_threads; w++) {
        int num_lanes = num_threads - 32 * w;
        warps[w].num_calls = 0;
        warps[w].exited = 0;
        warps[w].exists = num_lanes >= 32 ? 0xFFFFFFFFu : (1u << num_lanes) - 1;
    }
    shared_reset();
    if (emu_options.seed != 0) {
        for (int i = num_threads - 1; i > 0; i--) {
            int j = (int)emu_random_below((uint64_t)i + 1), swap = start_order[i];
            start_order[i] = start_order[j];
            start_order[j] = swap;
        }
    }
    current_fiber = fiber_take();
    fiber_switch(&host_fiber, &fibers[current_fiber]);
    emu_current = -1;
    check_block_end();
    shared_check_gaps();
}

static void run_grid(EmuLaunch* l)
{
    launch = l;
    emu_block_dim = l->block;
    emu_grid_dim = l->grid;
    check_kernel(l->name, l, l->size_bytes);
    num_threads = 0;
    for (unsigned z = 0; z < l->block.z; z++) {
        for (unsigned y = 0; y < l->block.y; y++) {
            for (unsigned x = 0; x < l->block.x; x++) {
                Thread* t = &threads[num_threads];
                t->idx = {x, y, z};
                t->num_copies = t->open_group = 0;
                start_order[num_threads] = num_threads;
                num_threads++;
            }
        }
    }
    /* Blocks in a random order: an odd stride from a random start visits each of a power of two once. */
    uint64_t num_blocks = (uint64_t)l->grid.x * l->grid.y * l->grid.z, num_slots = 1;
    while (num_slots < num_blocks) num_slots *= 2;
    uint64_t stride = emu_options.seed != 0 ? emu_random() | 1 : 1, slot = emu_options.seed != 0 ? emu_random() : 0;
    for (uint64_t i = 0; i < num_slots; i++, slot += stride) {
        uint64_t b = slot & (num_slots - 1);
        if (b >= num_blocks) continue;
        emu_block_idx.x = (unsigned)(b % l->grid.x);
        emu_block_idx.y = (unsigned)(b / l->grid.x % l->grid.y);
        emu_block_idx.z = (unsigned)(b / l->grid.x / l->grid.y);
        check_block_begin(b);
        run_block();
    }
    counts.launches++;
    counts.threads += num_blocks * (uint64_t)num_threads;
    emu_work_s += 1e-9 * (double)(num_blocks * (uint64_t)num_threads);
    launch = nullptr;
    check_kernel(nullptr, nullptr, 0);
}

static bool kernel_run(void* arg)
{
    EmuLaunch* l = (EmuLaunch*)arg;
    run_grid(l);
    emu_check_device_gaps(l->name);
    return true;
}

static const StreamOpKind kernel_kind = {kernel_run, nullptr, nullptr};

void emu_launch(EmuLaunch* l, cudaStream_t stream)
{
    if (launch != nullptr) emu_die("a launch of %s inside of a kernel", l->name);
    uint64_t block_threads = (uint64_t)l->block.x * l->block.y * l->block.z;
    bool grid_fits = l->grid.x >= 1 && l->grid.y >= 1 && l->grid.z >= 1 && l->grid.x <= 0x7FFFFFFFu &&
                     l->grid.y <= 65535 && l->grid.z <= 65535;
    cudaError_t error = cudaSuccess;
    if (block_threads == 0 || block_threads > MAX_THREADS || l->block.z > 64 || !grid_fits)
        error = cudaErrorInvalidConfiguration;
    else if (l->shared_bytes > (size_t)emu_func_shared_limit(l->func)) error = cudaErrorInvalidValue;
    if (error != cudaSuccess) {
        emu_set_error(error);
        free(l);
        return;
    }
    stream_enqueue(stream, l->name, &kernel_kind, l);
}
