/* trace.cuh: --profile N: N steps of every rank as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing. A rank
 * is a process, a stream a track. The track of the compute stream has steps, in them phases, in them operations with
 * sizes, bytes and FLOPs. Times count from a barrier, so clocks of ranks differ by at most its duration. */
#pragma once
#include "data/json.h"
#include "run.cuh"

enum { PROFILE_AFTER_STEPS = 3 };      // the first steps of a run are not like the others

static FILE* file_to_write(const char* path, const char* flag)
{
    FILE* f = fopen(path, "w");
    ENSURE(f != nullptr, "%s: %s cannot be written: %s", flag, path, strerror(errno));
    return f;
}

/* Checks at the start that the trace can be written. */
static void trace_open(Run* run)
{
    const size_t num_steps = (size_t)run->flags->profile, left = run->num_steps - run->step;
    if (num_steps == 0) return;
    ENSURE(left >= PROFILE_AFTER_STEPS + num_steps, "--profile %zu traces the steps after the first %d, and only %zu "
           "are left: raise -n", num_steps, (int)PROFILE_AFTER_STEPS, left);
    if (run->comm.rank != 0) return;
    path_exists(run->flags->out[0] ? run->flags->out : ".", "trace.json", run->trace_path);
    run->trace = file_to_write(run->trace_path, "--profile");
}

static void trace_metadata(JsonText* t, int rank, int tid, const char* key, const char* name)
{
    json_text_add(t, "%s{\"name\": \"%s\", \"ph\": \"M\", \"pid\": %d, \"tid\": %d, \"args\": {\"name\": \"%s\"}}",
                  t->length > 0 ? ",\n" : "", key, rank, tid, name);
}

/* "N, IC" and their values as members of an object. */
static void sizes_as_members(JsonText* t, const Span* span)
{
    const char* name = span->size_names != nullptr ? span->size_names : "";
    for (int i = 0; *name; i++) {
        const int length = (int)strcspn(name, ",");
        json_text_add(t, "\"%.*s\": %.0f, ", length, name, span->sizes[i]);
        name += length + strspn(name + length, ", ");
    }
}

/* Both ends are rounded, not the duration: spans that touch still do, and none ends behind the one it is in. */
static void trace_span(JsonText* t, const Span* span, int rank)
{
    const long long begin_ns = llround(span->begin_ms * 1e6), dur_ns = llround(span->end_ms * 1e6) - begin_ns;
    json_text_add(t, ",\n{\"name\": \"%s\", \"cat\": \"%s\", \"ph\": \"X\", \"pid\": %d, \"tid\": %d, "
                  "\"ts\": %lld.%03lld, \"dur\": %lld.%03lld, \"args\": {", span->name,
                  span_kind_names[(int)span->kind], rank, span->stream_idx, begin_ns / 1000, begin_ns % 1000,
                  dur_ns / 1000, dur_ns % 1000);
    if (span->kind < SpanKind::PHASE) {
        sizes_as_members(t, span);
        json_text_add(t, "\"bytes\": %.0f, \"flops\": %.0f, \"phase\": \"%s\"", span->bytes, span->flops,
                      phase_names[(int)span->phase]);
    }
    json_text_add(t, "}}");
}

/* Writes the spans that end after from_ms, the start of the first traced step; profile_read has set their times. If the
 * file cannot be written, training continues. */
static void trace_write(Run* run, double from_ms)
{
    const int rank = run->comm.rank;
    char name[32];
    JsonText t = {};
    snprintf(name, sizeof name, "rank %d", rank);
    trace_metadata(&t, rank, 0, "process_name", name);
    for (int i = 0; i < profile.num_streams; i++)
        trace_metadata(&t, rank, i, "thread_name", profile.stream_names[i]);
    for (int i = 0; i < profile.num_spans; i++) {
        const Span* span = &profile.spans[i];
        bool of_step = span->kind == SpanKind::STEP || span->kind == SpanKind::PHASE;
        if (of_step ? span->begin_ms >= from_ms : span->end_ms > from_ms) trace_span(&t, span, rank);
    }
    if (run->trace != nullptr) fprintf(run->trace, "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n");
    comm_texts_in_turn(&run->comm, run->trace, t.text, t.length, ",\n");
    json_text_free(&t);
    if (run->trace == nullptr) return;
    fprintf(run->trace, "\n]}\n");
    const bool failed = ferror(run->trace);
    if (fclose(run->trace) != 0 || failed)
        say_to(stderr, "train_gpt: %s cannot be written: %s\n", run->trace_path, strerror(errno));
    else SAY("profile %s: open it at ui.perfetto.dev\n", run->trace_path);
    run->trace = nullptr;
}

/* Starts recording on all ranks, at a barrier. */
static void trace_begin(Run* run)
{
    CUDA_CHECK(cudaDeviceSynchronize());
    comm_barrier(&run->comm);
    profile_record();
}

/* Called after each step; `done`: steps since the start. A run that ends early has a shorter trace, or none. */
static void trace_poll(Run* run, size_t done, bool ends)
{
    if (run->flags->profile == 0) return;
    if (done == PROFILE_AFTER_STEPS && !ends) {
        trace_begin(run);
    } else if (profile.records && (ends || done == PROFILE_AFTER_STEPS + (size_t)run->flags->profile)) {
        profile_read();
        trace_write(run, 0);
    }
    if (!ends || run->trace == nullptr) return;
    fclose(run->trace);
    run->trace = nullptr;
    unlink(run->trace_path);
}
