/* profile.h: where the time of a step goes, by events on the streams themselves: nothing waits for them, and they are
 * read when the step is over.
 *   phases   always, for every step: phase_begin(Phase::BACKWARD) where one begins on the compute stream, until the
 *            next begins. They cover the step without gaps. Of very many micro-steps the first few are measured, and
 *            the rest is taken to be like them
 *   spans    when asked for (profile_record): each launcher begins with OP(stream, flops, bytes, sizes...), which times
 *            what the rest of its block gives to the stream. Otherwise: one test of a flag. An OP within an OP
 *            belongs to the outer one; if that is a group it is the sum of what is in it
 * flops and bytes are those of the contract at the head of the op's file: what the op must do and move at least.
 * Communication is the time of waiting for other ranks. Where it does not overlap with anything (one stream for all,
 * or the CPU build, where each call does its work before it returns) it is a phase as well; where it does, the waits
 * are. */
#pragma once
#include "common.cuh"

enum class Phase { DATA, FORWARD, HEAD, BACKWARD, RECOMPUTE, COMMUNICATION, OPTIMIZER, REST };
enum { NUM_PHASES = (int)Phase::REST };              // REST: micro-steps that are not measured
static const char* const phase_names[] = {"data", "forward", "head", "backward", "recompute", "communication",
                                          "optimizer"};

enum class SpanKind { COMPUTE, COMMUNICATION, COPY, PHASE, STEP };
static const char* const span_kind_names[] = {"compute", "communication", "copy", "phase", "step"};

enum { MAX_SIZES = 4, MAX_STREAMS = 8, MAX_MARKS = 4096, PROFILE_SLOTS = 2 };

typedef struct Span {
    const char* name;
    SpanKind kind;
    Phase phase;                     // during which it was begun
    int stream_idx;
    double flops, bytes;
    const char* size_names;          // "N, IC, OC"
    double sizes[MAX_SIZES];
    int begin, end;                  // events
    double begin_ms, end_ms;         // since the first event: profile_read
} Span;

/* Of one step: where phases began, and the end. */
typedef struct Marks { cudaEvent_t events[MAX_MARKS]; Phase phases[MAX_MARKS]; int num, num_events; } Marks;

static struct {
    cudaStream_t streams[MAX_STREAMS];               // [0]: compute
    const char* stream_names[MAX_STREAMS];
    int num_streams;
    Marks slots[PROFILE_SLOTS];
    Marks* marks;                                    // of the step under way; null outside of steps
    Phase phase;
    bool rests;
    bool records;                                    // spans
    Span* spans;
    int num_spans, spans_room;
    cudaEvent_t* events;
    int num_events, events_made, events_room;
    int depth, outer, phase_span, step_span;         // open spans: of the outermost OP, the phase, the step
    bool outer_collects;
} profile;

/* The first is the compute stream; one that is known keeps its name. */
static void profile_stream(cudaStream_t stream, const char* name)
{
    for (int i = 0; i < profile.num_streams; i++) if (profile.streams[i] == stream) return;
    ENSURE(profile.num_streams < MAX_STREAMS, "more than %d streams", (int)MAX_STREAMS);
    profile.streams[profile.num_streams] = stream;
    profile.stream_names[profile.num_streams++] = name;
}

static int profile_stream_idx(cudaStream_t stream)
{
    for (int i = 0; i < profile.num_streams; i++) if (profile.streams[i] == stream) return i;
    return 0;
}

template <class T> static T* grown(T* array, int* room, int need)
{
    if (need <= *room) return array;
    *room = 2 * need > 256 ? 2 * need : 256;
    array = (T*)realloc((void*)array, *room * sizeof(T));
    ENSURE(array != nullptr, "out of host memory for %d spans of a profile", *room);
    return array;
}

// ----------------------------------------------------------------------------------------------------------- spans
static int profile_event(cudaStream_t stream)
{
    profile.events = grown(profile.events, &profile.events_room, profile.num_events + 1);
    if (profile.num_events == profile.events_made)
        CUDA_CHECK(cudaEventCreate(&profile.events[profile.events_made++]));
    CUDA_CHECK(cudaEventRecord(profile.events[profile.num_events], stream));
    return profile.num_events++;
}

/* From event `begin` on. */
static int span_open(const char* name, SpanKind kind, cudaStream_t stream, int begin)
{
    profile.spans = grown(profile.spans, &profile.spans_room, profile.num_spans + 1);
    Span* span = &profile.spans[profile.num_spans];
    *span = Span{};
    span->name = name;
    span->kind = kind;
    span->phase = profile.phase;
    span->stream_idx = profile_stream_idx(stream);
    span->begin = begin;
    return profile.num_spans++;
}

static int span_close(int idx)
{
    return profile.spans[idx].end = profile_event(profile.streams[profile.spans[idx].stream_idx]);
}

enum { NOT_RECORDED = -1, WITHIN_ANOTHER = -2 };

template <class... T> static int op_open(const char* name, SpanKind kind, cudaStream_t stream, double flops,
                                         double bytes, bool collects, const char* size_names, T... sizes)
{
    static_assert(sizeof...(sizes) <= MAX_SIZES, "too many sizes");
    if (profile.depth++ > 0) {
        Span* outer = &profile.spans[profile.outer];
        if (profile.outer_collects && (outer->kind != SpanKind::COMMUNICATION || kind == outer->kind)) {
            outer->flops += flops;
            outer->bytes += bytes;
        }
        return WITHIN_ANOTHER;
    }
    if (kind == SpanKind::COMPUTE && stream != profile.streams[0]) kind = SpanKind::COPY;
    profile.outer = span_open(name, kind, stream, profile_event(stream));
    profile.outer_collects = collects;
    Span* span = &profile.spans[profile.outer];
    span->flops = flops;
    span->bytes = bytes;
    span->size_names = size_names;
    const double values[] = {0.0, (double)sizes...};
    for (int i = 0; i < (int)sizeof...(sizes); i++) span->sizes[i] = values[i + 1];
    return profile.outer;
}

namespace {                          // one for each precision's object: else the linker keeps the first for all
struct OpScope {
    int idx;
    explicit OpScope(int idx_) : idx(idx_) {}
    ~OpScope()
    {
        if (idx == NOT_RECORDED) return;
        profile.depth--;
        if (idx != WITHIN_ANOTHER) span_close(idx);
    }
};
}

#define OP_OPEN(...) const OpScope op_scope_(profile.records ? op_open(__VA_ARGS__) : (int)NOT_RECORDED)

/* What a launcher begins with: OP(stream, 2.0 * N * IC * OC, bytes, N, IC, OC). */
#define OP(stream, flops, bytes, ...) \
    OP_OPEN(__func__, SpanKind::COMPUTE, stream, flops, bytes, false, #__VA_ARGS__, ##__VA_ARGS__)

/* The same for what is no launcher of ours. */
#define OP_CALL(name, stream, bytes, ...) \
    OP_OPEN(name, SpanKind::COMPUTE, stream, 0, bytes, false, #__VA_ARGS__, ##__VA_ARGS__)

/* A collective: bytes are those that this rank sends. */
#define COMM_OP(stream, bytes, ...) \
    OP_OPEN(__func__, SpanKind::COMMUNICATION, stream, 0, bytes, false, #__VA_ARGS__, ##__VA_ARGS__)

/* The same for a group, whose flops and bytes are those of the launchers in it; of communication the bytes sent. */
#define OP_GROUP(name, kind, stream) OP_OPEN(name, kind, stream, 0, 0, true, "")

// ---------------------------------------------------------------------------------------------------------- phases
static void mark(Phase phase)
{
    Marks* m = profile.marks;
    if (m->num == m->num_events) CUDA_CHECK(cudaEventCreate(&m->events[m->num_events++]));
    CUDA_CHECK(cudaEventRecord(m->events[m->num], profile.streams[0]));
    m->phases[m->num++] = phase;
}

/* Returns the phase before, to go back to. Outside of steps there are none. */
static Phase phase_begin(Phase phase)
{
    const Phase before = profile.phase;
    if (profile.marks == nullptr || phase == before) return before;
    profile.phase = phase;
    if (profile.records) {
        int begin = span_close(profile.phase_span);
        profile.phase_span = span_open(phase_names[(int)phase], SpanKind::PHASE, profile.streams[0], begin);
    }
    if (!profile.rests && profile.marks->num < MAX_MARKS - 1) mark(phase);   // the last is kept for the step's end
    return before;
}

/* Before each micro-step, and after the last. */
static void phase_micro_begin(void)
{
    if (!profile.rests && profile.marks->num > MAX_MARKS / 2) mark(Phase::REST);
    profile.rests = profile.marks->num > MAX_MARKS / 2;
    phase_begin(Phase::DATA);
}
static void phase_micro_end(void) { profile.rests = false; }

/* Does nothing else run while this stream does something? */
static bool is_alone(cudaStream_t stream)
{
#ifdef DEVICE_CPU
    (void)stream;
    return true;
#else
    return stream == profile.streams[0];
#endif
}

/* Waits for other ranks, or does what they wait for, on `stream`: a phase where nothing else runs meanwhile. */
namespace {
struct CommunicationScope {
    Phase before;
    CommunicationScope(cudaStream_t stream, bool has_others)
    {
        before = has_others && is_alone(stream) ? phase_begin(Phase::COMMUNICATION) : profile.phase;
    }
    ~CommunicationScope() { phase_begin(before); }
};
}

/* The first phase is what clears the gradients. */
static void profile_step_begin(int slot)
{
    profile.marks = &profile.slots[slot];
    profile.marks->num = 0;
    profile.phase = Phase::BACKWARD;
    if (profile.records) {
        int begin = profile_event(profile.streams[0]);
        profile.step_span = span_open("step", SpanKind::STEP, profile.streams[0], begin);
        profile.phase_span = span_open(phase_names[(int)profile.phase], SpanKind::PHASE, profile.streams[0], begin);
    }
    mark(profile.phase);
}

static void profile_step_end(void)
{
    mark(Phase::REST);
    profile.marks = nullptr;
    if (profile.records) profile.spans[profile.step_span].end = span_close(profile.phase_span);
}

/* Waits for the end of the step of this slot. */
static void profile_step_wait(int slot)
{
    const Marks* m = &profile.slots[slot];
    CUDA_CHECK(cudaEventSynchronize(m->events[m->num - 1]));
}

/* Milliseconds of each phase in the step of this slot, which is over; returns their sum, the step's. */
static double profile_phases_ms(int slot, double (&ms)[NUM_PHASES])
{
    const Marks* m = &profile.slots[slot];
    double seen[NUM_PHASES + 1] = {}, micro_ms = 0, rest_ms = 0;    // up to a REST: micro-steps, but for the first
    float took_ms;
    for (double& x : ms) x = 0;
    for (int i = 0; i + 1 < m->num; i++) {
        CUDA_CHECK(cudaEventElapsedTime(&took_ms, m->events[i], m->events[i + 1]));
        if (m->phases[i] == Phase::REST) { rest_ms = took_ms; continue; }
        ms[(int)m->phases[i]] += took_ms;
        if (rest_ms > 0 || i == 0) continue;
        seen[(int)m->phases[i]] += took_ms;
        micro_ms += took_ms;
    }
    double step_ms = 0;
    for (int i = 0; i < NUM_PHASES; i++) {
        if (rest_ms > 0 && micro_ms > 0) ms[i] += rest_ms * seen[i] / micro_ms;
        step_ms += ms[i];
    }
    return step_ms;
}

// --------------------------------------------------------------------------------------------------------- reading
/* From now on spans are recorded; those before are forgotten. Between steps. */
static void profile_record(void)
{
    profile.records = true;
    profile.num_spans = profile.num_events = 0;
    profile_event(profile.streams[0]);               // what the times count from
}

/* Records no more. Waits for the device, and gives each span its times. */
static void profile_read(void)
{
    profile.records = false;
    CUDA_CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < profile.num_spans; i++) {
        Span* span = &profile.spans[i];
        float ms;
        CUDA_CHECK(cudaEventElapsedTime(&ms, profile.events[0], profile.events[span->begin]));
        span->begin_ms = ms;
        CUDA_CHECK(cudaEventElapsedTime(&ms, profile.events[0], profile.events[span->end]));
        span->end_ms = ms;
    }
}

static void profile_free(void)
{
    for (int i = 0; i < profile.events_made; i++) CUDA_CHECK(cudaEventDestroy(profile.events[i]));
    for (Marks& m : profile.slots)
        for (int i = 0; i < m.num_events; i++) CUDA_CHECK(cudaEventDestroy(m.events[i]));
    free(profile.spans);
    free(profile.events);
    memset((void*)&profile, 0, sizeof profile);
}
