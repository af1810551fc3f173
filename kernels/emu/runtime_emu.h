/* runtime_emu.h: memory, streams and events of the emulated build; part of runtime.cpp.
 * Memory: two arenas, device and pinned. Every allocation has pages of its own, filled with NaN, between gaps whose
 * pattern is checked after each kernel. Addresses are never used again: what is freed becomes inaccessible.
 * Streams: queues of operations. A dependency is (stream, sequence number), so events, cudaStreamWaitEvent and the
 * legacy default stream are one thing. EMU_SEED=0 runs an operation as soon as it may run; another seed is lazy and
 * picks at random among the streams whose head may run. */
#pragma once
#include <cmath>
#include <csignal>
#include <pthread.h>
#include "emu_check.h"
#include "kernels/cpu/runtime_shared.h"

bool device_launches_wait(void) { return emu_options.seed == 0; }
static size_t default_budget_bytes(void) { return 2048 * MIB; }
static size_t host_available_bytes(void) { return SIZE_MAX; }

/* ---- arenas */

struct Allocation { char* p; size_t size_bytes; bool live; };

struct Arena {
    const char* name;
    Memory memory;
    size_t reserve_bytes;                            // address space, not memory
    char* base;
    size_t next_offset;
    Allocation* allocations;                         // ascending addresses, freed ones too
    size_t num_allocations, capacity;
};
static Arena device_arena = {"device", Memory::DEVICE, (size_t)1 << 38, nullptr, 0, nullptr, 0, 0};
static Arena pinned_arena = {"pinned", Memory::PINNED, (size_t)1 << 36, nullptr, 0, nullptr, 0, 0};

static const size_t PAGE = 4096, GAP = 256;

/* An allocation ends GAP to 2*GAP - 1 bytes before an inaccessible page; the rest of its own pages is before it. */
static size_t aligned_bytes(size_t size_bytes) { return (size_bytes + GAP - 1) / GAP * GAP; }
static size_t pages_bytes(size_t size_bytes)
{
    return (aligned_bytes(size_bytes) + 2 * GAP + PAGE - 1) / PAGE * PAGE;
}
static char* pages_of(const Allocation* a)
{
    return a->p + aligned_bytes(a->size_bytes) + GAP - pages_bytes(a->size_bytes);
}
static size_t back_gap_bytes(const Allocation* a) { return aligned_bytes(a->size_bytes) + GAP - a->size_bytes; }

static bool arena_holds(const Arena* arena, const void* p)
{
    const char *first = arena->base, *end = first + arena->reserve_bytes;
    return first != nullptr && (const char*)p >= first && (const char*)p < end;
}

/* The last allocation that starts at or below p, or null. */
static Allocation* arena_find(const Arena* arena, const void* p)
{
    size_t lo = 0, hi = arena->num_allocations;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (arena->allocations[mid].p <= (const char*)p) lo = mid + 1;
        else hi = mid;
    }
    return lo == 0 ? nullptr : &arena->allocations[lo - 1];
}

static void* arena_alloc(Arena* arena, size_t size_bytes)
{
    if (arena->base == nullptr) {
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        void* p = mmap(nullptr, arena->reserve_bytes, PROT_NONE, flags, -1, 0);
        ENSURE(p != MAP_FAILED, "emulator: cannot reserve %zu bytes of address space for %s memory",
               arena->reserve_bytes, arena->name);
        arena->base = (char*)p;
        check_arena(arena->memory, arena->base, arena->reserve_bytes);
    }
    size_t len = pages_bytes(size_bytes);
    ENSURE(arena->next_offset + len + PAGE <= arena->reserve_bytes,
           "emulator: %s address space is used up (addresses are never used again)", arena->name);
    char* pages = arena->base + arena->next_offset;
    if (mprotect(pages, len, PROT_READ | PROT_WRITE) != 0) return nullptr;
    arena->next_offset += len + PAGE;                // an inaccessible page between neighbours
    Allocation a = {pages + len - GAP - aligned_bytes(size_bytes), size_bytes, true};
    memset(a.p, EMU_FILL_BYTE, size_bytes);
    emu_gap_fill(pages, (size_t)(a.p - pages));
    emu_gap_fill(a.p + size_bytes, back_gap_bytes(&a));
    if (arena->num_allocations == arena->capacity) {
        arena->capacity = arena->capacity ? 2 * arena->capacity : 64;
        arena->allocations = (Allocation*)realloc(arena->allocations, arena->capacity * sizeof(Allocation));
        ENSURE(arena->allocations != nullptr, "out of host memory");
    }
    arena->allocations[arena->num_allocations++] = a;
    check_alloc(arena->memory, a.p, size_bytes);
    return a.p;
}

static size_t arena_free(Arena* arena, void* p, const char* call)
{
    Allocation* a = arena_find(arena, p);
    if (a == nullptr || a->p != p) emu_die("%s(%p): not an allocation", call, p);
    if (!a->live) emu_die("%s(%p): freed twice", call, p);
    a->live = false;
    check_free(arena->memory, a->p, a->size_bytes);
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    void* pages = mmap(pages_of(a), pages_bytes(a->size_bytes), PROT_NONE, flags, -1, 0);
    ENSURE(pages != MAP_FAILED, "emulator: cannot give %zu bytes back", a->size_bytes);
    return a->size_bytes;
}

bool emu_is_device(const void* p) { return arena_holds(&device_arena, p); }
static bool is_pinned(const void* p) { return arena_holds(&pinned_arena, p); }

static void check_range(const Arena* arena, const void* p, size_t size_bytes, const char* what)
{
    const Allocation* a = arena_find(arena, p);
    if (a == nullptr || (const char*)p >= a->p + a->size_bytes)
        emu_die("%s: %p is not inside any %s allocation", what, p, arena->name);
    if (!a->live) emu_die("%s: %p was freed", what, p);
    size_t offset = (size_t)((const char*)p - a->p);
    if (size_bytes > a->size_bytes - offset)
        emu_die("%s: %zu bytes at offset %zu run past the end of a %s allocation of %zu bytes", what, size_bytes,
                offset, arena->name, a->size_bytes);
}

void emu_check_device_range(const void* p, size_t size_bytes, const char* what)
{
    if (!emu_is_device(p)) emu_die("%s: %p is not device memory", what, p);
    if (size_bytes > 0) check_range(&device_arena, p, size_bytes, what);
}

void emu_check_device_gaps(const char* after)
{
    for (size_t i = 0; i < device_arena.num_allocations; i++) {
        const Allocation* a = &device_arena.allocations[i];
        if (!a->live) continue;
        char* end = a->p + a->size_bytes;
        const char* front_hit = emu_gap_damage(a->p - GAP, GAP);
        const char* back_hit = emu_gap_damage(end, back_gap_bytes(a));
        if (back_hit != nullptr)
            emu_die("%s wrote %zu bytes past the end of a device allocation of %zu bytes", after,
                    (size_t)(back_hit - end), a->size_bytes);
        if (front_hit != nullptr)
            emu_die("%s wrote %zu bytes before the start of a device allocation of %zu bytes", after,
                    (size_t)(a->p - front_hit), a->size_bytes);
    }
}

/* ---- a wild access says where it went, and (through emu_die) which kernel and thread made it */

static void describe_address(const Arena* arena, const char* p, char* text, size_t size)
{
    const Allocation* a = arena_find(arena, p);
    if (a == nullptr) snprintf(text, size, "%s memory before the first allocation", arena->name);
    else if (a->live) snprintf(text, size, "%zu bytes past the end of a %s allocation of %zu bytes",
                               (size_t)(p - a->p) - a->size_bytes, arena->name, a->size_bytes);
    else snprintf(text, size, "%s memory that was freed (offset %zu of %zu bytes)", arena->name, (size_t)(p - a->p),
                  a->size_bytes);
}

static void on_bad_access(int, siginfo_t* info, void*)
{
    const char* p = (const char*)info->si_addr;
    char text[200] = "no memory of the device or the host";
    if (p < (const char*)PAGE) snprintf(text, sizeof text, "a null pointer");
    else if (emu_is_stack_guard(p)) snprintf(text, sizeof text, "a thread used more bytes of stack than it has");
    else if (arena_holds(&device_arena, p)) describe_address(&device_arena, p, text, sizeof text);
    else if (arena_holds(&pinned_arena, p)) describe_address(&pinned_arena, p, text, sizeof text);
    emu_die("illegal memory access at %p: %s", (const void*)p, text);
}

static void catch_bad_accesses(void)
{
    static bool done;
    if (done) return;
    done = true;
    stack_t stack = {};
    stack.ss_size = 64 << 10;
    stack.ss_sp = malloc_checked(stack.ss_size);
    sigaltstack(&stack, nullptr);
    struct sigaction action = {};
    action.sa_sigaction = on_bad_access;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
}

/* ---- streams */

struct Dependency { CUstream_st* stream; uint64_t seq; };

struct Op {
    Op* next;
    const char* name;
    const StreamOpKind* kind;
    void* arg;
    uint64_t call_idx;                               // the order of the host's calls
    uint64_t seq;                                    // the place in its stream, from 1
    Dependency* dependencies;
    int num_dependencies;
    bool started;
};

struct CUstream_st {
    CUstream_st* next;
    int stream_idx;
    bool nonblocking, destroyed;
    Op *head, *tail;
    uint64_t num_issued, num_done;
    Dependency* pending;                             // for the next operation: what cudaStreamWaitEvent asked for
    int num_pending;
    double clock_s, *end_s;                          // EMU_TIMELINE: end of the newest operation, of each by seq
    uint64_t end_room;
};
struct CUevent_st { CUstream_st* stream; uint64_t seq; double time_s; };

static CUstream_st null_stream;
static CUstream_st* last_stream = &null_stream;      // all of them, in the order of creation
static int num_streams = 1;
static uint64_t num_calls;
static bool in_operation;
static thread_local bool in_host_function;

static CUstream_st* stream_of(cudaStream_t stream)
{
    if (stream == nullptr || stream == cudaStreamLegacy) return &null_stream;
    if (stream->destroyed) emu_die("stream %d is used after cudaStreamDestroy", stream->stream_idx);
    return stream;
}

static void depend(CUstream_st* stream, CUstream_st* on, uint64_t seq)
{
    if (on->num_done >= seq && !((EMU_CHECKED || emu_options.timeline) && seq > 0)) return;
    size_t size_bytes = (size_t)(stream->num_pending + 1) * sizeof(Dependency);
    stream->pending = (Dependency*)realloc(stream->pending, size_bytes);
    ENSURE(stream->pending != nullptr, "out of host memory");
    stream->pending[stream->num_pending++] = {on, seq};
}

static bool head_may_run(const CUstream_st* stream)
{
    const Op* op = stream->head;
    if (op == nullptr) return false;
    if (op->started) return true;
    for (int i = 0; i < op->num_dependencies; i++) {
        if (op->dependencies[i].stream->num_done < op->dependencies[i].seq) return false;
    }
    return op->kind->may_start == nullptr || op->kind->may_start(op->arg);
}

/* EMU_TIMELINE: an operation begins when its stream is free and all that it depends on is over. */
static void timeline_begin(CUstream_st* stream, const Op* op)
{
    for (int i = 0; i < op->num_dependencies; i++) {
        const Dependency* d = &op->dependencies[i];
        if (d->seq > 0) stream->clock_s = fmax(stream->clock_s, d->stream->end_s[d->seq]);
    }
}

static void timeline_end(CUstream_st* stream, uint64_t seq, double work_s)
{
    if (seq >= stream->end_room) {
        stream->end_room = 2 * seq + 64;
        stream->end_s = (double*)realloc(stream->end_s, stream->end_room * sizeof(double));
        ENSURE(stream->end_s != nullptr, "out of host memory");
    }
    stream->clock_s += work_s;
    stream->end_s[seq] = stream->clock_s;
}

static bool head_run(CUstream_st* stream)            // true: it completed
{
    Op* op = stream->head;
    const double work_before_s = emu_work_s;
    if (emu_options.timeline && !op->started) timeline_begin(stream, op);
    for (int i = 0; i < op->num_dependencies && !op->started; i++) {
        const Dependency* d = &op->dependencies[i];
        check_op_waits(stream->stream_idx, op->seq, d->stream->stream_idx, d->seq);
    }
    op->started = true;
    in_operation = true;
    check_op_runs(stream->stream_idx, op->seq, op->name);
    bool completed = op->kind->run(op->arg);
    check_op_stops();
    in_operation = false;
    if (!completed) return false;
    if (emu_options.timeline) timeline_end(stream, op->seq, emu_work_s - work_before_s);
    rank_moved();
    stream->num_done = op->seq;
    stream->head = op->next;
    if (stream->head == nullptr) stream->tail = nullptr;
    free(op->dependencies);
    free(op->arg);
    free(op);
    return true;
}

enum class Step { NOTHING_MAY_RUN, WAITS_FOR_RANKS, DID_SOMETHING };

static void progress_all(void)
{
    for (CUstream_st* s = &null_stream; s != nullptr; s = s->next) {
        if (s->head != nullptr && s->head->started && s->head->kind->progress != nullptr)
            s->head->kind->progress(s->head->arg);
    }
}

/* One operation. All that has not started goes first, in random order (seed 0: in the order of the host's calls).
 * Only then is a collective in flight completed, the one that the host called first: whatever it needs from another
 * rank was called earlier still, so with the same program on all ranks no two ranks wait for each other. */
static Step step(bool may_wait)
{
    CUstream_st *fresh = nullptr, *in_flight = nullptr;
    uint64_t num_fresh = 0;
    for (CUstream_st* s = &null_stream; s != nullptr; s = s->next) {
        if (!head_may_run(s)) continue;
        if (s->head->started) {
            if (in_flight == nullptr || s->head->call_idx < in_flight->head->call_idx) in_flight = s;
            continue;
        }
        num_fresh++;
        bool take = emu_options.seed != 0 ? emu_random_below(num_fresh) == 0
                                          : fresh == nullptr || s->head->call_idx < fresh->head->call_idx;
        if (take) fresh = s;
    }
    if (fresh != nullptr) {
        head_run(fresh);
        return Step::DID_SOMETHING;
    }
    if (in_flight == nullptr) return Step::NOTHING_MAY_RUN;
    if (!may_wait) return Step::WAITS_FOR_RANKS;
    if (head_run(in_flight)) return Step::DID_SOMETHING;
    progress_all();
    return Step::WAITS_FOR_RANKS;
}

void stream_heads_text(char* text, int size)
{
    int used = 0;
    text[0] = '\0';
    for (CUstream_st* s = &null_stream; s != nullptr && used < size - 200; s = s->next) {
        const Op* op = s->head;
        if (op == nullptr) continue;
        used += snprintf(text + used, (size_t)(size - used), "\n  stream %d: %s %s", s->stream_idx, op->name,
                         op->started ? "is in flight, other ranks have not joined" : "waits");
        for (int i = 0; i < op->num_dependencies && used < size - 200; i++) {
            const Dependency* d = &op->dependencies[i];
            if (d->stream->num_done < d->seq)
                used += snprintf(text + used, (size_t)(size - used), ", needs operation %llu of stream %d",
                                 (unsigned long long)d->seq, d->stream->stream_idx);
        }
    }
}

[[noreturn]] static void die_hanging(const char* call)
{
    char text[2048];
    stream_heads_text(text, sizeof text);
    emu_die("%s would never return; heads of the streams:%s", call, text);
}

static void drain(CUstream_st* stream, uint64_t seq, const char* call)
{
    if (in_operation) emu_die("%s inside of an operation", call);
    unsigned num_tries = 0;
    while (stream->num_done < seq) {
        Step did = step(true);
        if (did == Step::NOTHING_MAY_RUN) die_hanging(call);
        if (did == Step::DID_SOMETHING) {
            num_tries = 0;
            continue;
        }
        rank_waits(call);
        wait_politely(&num_tries);
    }
    if (seq > 0) check_host_saw(stream->stream_idx, seq);
}

void stream_drain_all(void)
{
    for (CUstream_st* s = &null_stream; s != nullptr; s = s->next) drain(s, s->num_issued, "cudaDeviceSynchronize");
}

bool stream_step(void) { return step(true) == Step::DID_SOMETHING; }

void stream_enqueue(cudaStream_t handle, const char* name, const StreamOpKind* kind, void* arg)
{
    if (in_host_function) emu_die("%s inside of a host function, which may not call CUDA", name);
    catch_bad_accesses();
    CUstream_st* stream = stream_of(handle);
    if (stream == &null_stream) {
        for (CUstream_st* s = null_stream.next; s != nullptr; s = s->next) {
            if (!s->nonblocking) depend(stream, s, s->num_issued);
        }
    } else if (!stream->nonblocking) depend(stream, &null_stream, null_stream.num_issued);
    Op* op = (Op*)malloc_checked(sizeof(Op));
    *op = {nullptr, name, kind, arg, num_calls++, ++stream->num_issued, stream->pending, stream->num_pending, false};
    check_op_asked(stream->stream_idx, op->seq);
    stream->pending = nullptr;
    stream->num_pending = 0;
    if (stream->tail != nullptr) stream->tail->next = op;
    else stream->head = op;
    stream->tail = op;
    if (emu_options.seed == 0) {
        while (step(false) == Step::DID_SOMETHING) {}
    } else {
        while (emu_random_below(4) == 0 && step(false) == Step::DID_SOMETHING) {}
    }
}

/* ---- host functions: one thread runs those of all streams in the order in which they may start, as the driver's does.
 * So one that blocks holds up the others, and not the kernels of other streams. */

struct HostCall { cudaHostFn_t fn; void* arg; bool started, done; HostCall* next; };
static HostCall *host_calls, **last_host_call = &host_calls;
static pthread_mutex_t host_calls_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t host_call_came = PTHREAD_COND_INITIALIZER;

static void* host_calls_run(void*)
{
    in_host_function = true;
    for (;;) {
        pthread_mutex_lock(&host_calls_lock);
        while (host_calls == nullptr) pthread_cond_wait(&host_call_came, &host_calls_lock);
        HostCall* call = host_calls;
        host_calls = call->next;
        if (host_calls == nullptr) last_host_call = &host_calls;
        pthread_mutex_unlock(&host_calls_lock);
        call->fn(call->arg);
        __atomic_store_n(&call->done, true, __ATOMIC_RELEASE);
    }
}

static bool run_host_call(void* arg)
{
    HostCall* call = (HostCall*)arg;
    if (!call->started) {
        call->started = true;
        pthread_mutex_lock(&host_calls_lock);
        *last_host_call = call;
        last_host_call = &call->next;
        pthread_cond_signal(&host_call_came);
        pthread_mutex_unlock(&host_calls_lock);
    }
    return __atomic_load_n(&call->done, __ATOMIC_ACQUIRE);
}

/* ---- the operations of this file */

struct CopyArg { char* dst; const char* src; size_t size_bytes; };   // a pageable source follows: its snapshot
struct FillArg { char* p; size_t size_bytes; int value; const char* name; };

static bool run_copy(void* arg)
{
    CopyArg* copy = (CopyArg*)arg;
    check_range(copy->src, copy->size_bytes, Access::READ, "cudaMemcpy");
    check_range(copy->dst, copy->size_bytes, Access::WRITE, "cudaMemcpy");
    memmove(copy->dst, copy->src, copy->size_bytes);
    emu_work_s += 1e-9 / 16 * (double)copy->size_bytes;
    return true;
}

static bool run_fill(void* arg)
{
    FillArg* fill = (FillArg*)arg;
    check_range(fill->p, fill->size_bytes, Access::WRITE, fill->name);
    memset(fill->p, fill->value, fill->size_bytes);
    return true;
}

static bool run_record(void* arg)
{
    CUevent_st* event = *(CUevent_st**)arg;
    event->time_s = emu_options.timeline ? event->stream->clock_s : now_s() + emu_pretended_s;
    return true;
}

static const StreamOpKind copy_kind = {run_copy, nullptr, nullptr};
static const StreamOpKind fill_kind = {run_fill, nullptr, nullptr};
static const StreamOpKind record_kind = {run_record, nullptr, nullptr};
static const StreamOpKind host_call_kind = {run_host_call, nullptr, nullptr};

static void check_copy_side(const void* p, size_t size_bytes, bool want_device, bool any, const char* what)
{
    bool on_device = emu_is_device(p);
    if (!any && on_device != want_device)
        emu_die("%s: %p is %s memory, the kind of copy says %s", what, p, on_device ? "device" : "host",
                want_device ? "device" : "host");
    if (on_device) check_range(&device_arena, p, size_bytes, what);
    if (is_pinned(p)) check_range(&pinned_arena, p, size_bytes, what);
}

extern "C" {

cudaError_t cudaMalloc(void** p, size_t size)
{
    *p = nullptr;
    if (size == 0) return cudaSuccess;
    if (!budget_take(size)) return result(cudaErrorMemoryAllocation);
    *p = arena_alloc(&device_arena, size);
    if (*p != nullptr) return cudaSuccess;
    used_bytes -= size;
    return result(cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void* p)
{
    if (p == nullptr) return cudaSuccess;
    num_host_syncs++;
    stream_drain_all();
    emu_check_device_gaps("something before cudaFree");
    used_bytes -= arena_free(&device_arena, p, "cudaFree");
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void** p, size_t size)
{
    *p = size > 0 ? arena_alloc(&pinned_arena, size) : nullptr;
    if (*p != nullptr) pinned_bytes += size;
    return result(*p != nullptr || size == 0 ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaFreeHost(void* p)
{
    if (p == nullptr) return cudaSuccess;
    num_host_syncs++;
    stream_drain_all();
    pinned_bytes -= arena_free(&pinned_arena, p, "cudaFreeHost");
    return cudaSuccess;
}

/* As on a GPU: a pageable source is read before the call returns, a pinned one when the copy runs; a copy to pageable
 * memory waits for its stream. */
cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    if (size == 0) return cudaSuccess;
    bool any = kind == cudaMemcpyDefault;
    check_copy_side(dst, size, kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice, any,
                    "cudaMemcpy, destination");
    check_copy_side(src, size, kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice, any,
                    "cudaMemcpy, source");
    bool pageable_src = !emu_is_device(src) && !is_pinned(src);
    bool pageable_dst = !emu_is_device(dst) && !is_pinned(dst);
    CopyArg* copy = (CopyArg*)malloc_checked(sizeof(CopyArg) + (pageable_src ? size : 0));
    *copy = {(char*)dst, (const char*)src, size};
    if (pageable_src) copy->src = (const char*)memcpy(copy + 1, src, size);
    stream_enqueue(stream, "cudaMemcpyAsync", &copy_kind, copy);
    if (pageable_dst) return cudaStreamSynchronize(stream);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void* dst, const void* src, size_t size, enum cudaMemcpyKind kind)
{
    cudaError_t error = cudaMemcpyAsync(dst, src, size, kind, nullptr);
    if (error != cudaSuccess || kind == cudaMemcpyDeviceToDevice) return error;
    return cudaStreamSynchronize(nullptr);
}

cudaError_t cudaMemsetAsync(void* p, int value, size_t size, cudaStream_t stream)
{
    if (size == 0) return cudaSuccess;
    emu_check_device_range(p, size, "cudaMemset");
    FillArg* fill = (FillArg*)malloc_checked(sizeof(FillArg));
    *fill = {(char*)p, size, value, stream == nullptr ? "cudaMemset" : "cudaMemsetAsync"};
    stream_enqueue(stream, "cudaMemsetAsync", &fill_kind, fill);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags)
{
    CUstream_st* s = (CUstream_st*)malloc_checked(sizeof(CUstream_st));
    *s = {};
    s->stream_idx = num_streams++;
    s->nonblocking = (flags & cudaStreamNonBlocking) != 0;
    last_stream->next = s;
    last_stream = s;
    *stream = s;
    return cudaSuccess;
}

/* The record stays: operations elsewhere may name it as a dependency, and its misuse is reported. */
cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    CUstream_st* s = stream_of(stream);
    drain(s, s->num_issued, "cudaStreamDestroy");
    s->destroyed = true;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    num_host_syncs++;
    CUstream_st* s = stream_of(stream);
    drain(s, s->num_issued, "cudaStreamSynchronize");
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    CUstream_st* s = stream_of(stream);
    if (s->head != nullptr) step(true);
    if (s->head != nullptr) return cudaErrorNotReady;
    if (s->num_issued > 0) check_host_saw(s->stream_idx, s->num_issued);
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int)
{
    if (event->stream == nullptr) {
        if (EMU_CHECKED) emu_die("cudaStreamWaitEvent on an event that was never recorded waits for nothing");
        fprintf(stderr, "emulator: warning: cudaStreamWaitEvent on an event that was never recorded does nothing\n");
        return cudaSuccess;
    }
    depend(stream_of(stream), event->stream, event->seq);
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void)
{
    num_host_syncs++;
    stream_drain_all();
    return cudaSuccess;
}

/* Not under the memory checker, which knows of one host thread. */
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void* arg)
{
    static pthread_t thread;
    static bool has_thread;
    if (EMU_CHECKED) emu_die("cudaLaunchHostFunc: the memory checker does not follow host functions");
    if (!has_thread && pthread_create(&thread, nullptr, host_calls_run, nullptr) != 0) return cudaErrorUnknown;
    has_thread = true;
    HostCall* call = (HostCall*)malloc_checked(sizeof(HostCall));
    *call = {fn, arg, false, false, nullptr};
    stream_enqueue(stream, "cudaLaunchHostFunc", &host_call_kind, call);
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int)
{
    *event = (cudaEvent_t)malloc_checked(sizeof(CUevent_st));
    **event = {};
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    if (event->stream != nullptr) drain(event->stream, event->seq, "cudaEventDestroy");
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    CUstream_st* s = stream_of(stream);
    event->stream = s;
    event->seq = s->num_issued + 1;
    CUevent_st** arg = (CUevent_st**)malloc_checked(sizeof *arg);
    *arg = event;
    stream_enqueue(stream, "cudaEventRecord", &record_kind, arg);
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    if (event->stream == nullptr) return cudaSuccess;
    if (event->stream->num_done < event->seq) step(true);
    if (event->stream->num_done < event->seq) return cudaErrorNotReady;
    check_host_saw(event->stream->stream_idx, event->seq);
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    num_host_syncs++;
    if (event->stream != nullptr) drain(event->stream, event->seq, "cudaEventSynchronize");
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end)
{
    if (start->stream == nullptr || end->stream == nullptr) return result(cudaErrorInvalidResourceHandle);
    if (start->stream->num_done < start->seq || end->stream->num_done < end->seq) return result(cudaErrorNotReady);
    *ms = (float)((end->time_s - start->time_s) * 1e3);
    return cudaSuccess;
}

/* How much dynamic shared memory a kernel may be launched with: 48 KiB until the program asks for more. */
struct SharedLimit { const void* func; int limit_bytes; SharedLimit* next; };
static SharedLimit* shared_limits;

cudaError_t cudaFuncSetAttribute(const void* func, enum cudaFuncAttribute attr, int value)
{
    if (attr != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    if (value < 0 || (size_t)value > emu_options.shared_limit_bytes) return result(cudaErrorInvalidValue);
    SharedLimit* limit = shared_limits;
    while (limit != nullptr && limit->func != func) limit = limit->next;
    if (limit == nullptr) {
        limit = (SharedLimit*)malloc_checked(sizeof(SharedLimit));
        *limit = {func, value, shared_limits};
        shared_limits = limit;
    }
    limit->limit_bytes = value;
    return cudaSuccess;
}

}

int emu_func_shared_limit(const void* func)
{
    for (const SharedLimit* limit = shared_limits; limit != nullptr; limit = limit->next) {
        if (limit->func == func) return limit->limit_bytes;
    }
    return 48 << 10;
}

void emu_set_error(cudaError_t error) { result(error); }
