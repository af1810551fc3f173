/* watchdog.h: reports hangs. Five times a second a thread of each rank writes a heartbeat into memory shared by the
 * ranks of a host, and checks how long the main thread has made no progress. After timeout_s it prints which rank waits
 * in which collective of which step, and which rank of this host has no heartbeat or is behind; then it ends the
 * process, and the launcher ends the others. If the launcher ends them first, one rank prints where it was. The thread
 * makes no CUDA, NCCL or MPI call that waits, so that it cannot hang with them: it only asks NCCL for errors of what is
 * enqueued, such as a dead link, and ends the process at once. It knows only the ranks of its own host. A job
 * that was stopped as a whole (Ctrl-Z, SIGSTOP) runs on when it is continued: each thread sees that its own heartbeat
 * was late, and that time does not count. The collective that the line names is the oldest that is not complete, or the
 * first of its group: after each collective its stream writes the collective's number into host memory (progress.cuh).
 */
#pragma once
#include <cmath>
#include <csignal>
#include <pthread.h>
#include "data/clock.h"
#include "data/error.h"

enum { WATCH_STREAMS = 4, WATCH_ENQUEUED = 4096 };
static const double WATCH_BEAT_S = 0.2, WATCH_STOPPED_S = 1;   // a heartbeat so late: the process was stopped

/* A rank's heartbeat, one cache line, in shared memory that is not initialized. */
typedef struct alignas(64) Beat {
    volatile unsigned long long is_set; // BEAT_IS_SET while its rank runs, so that no rank waits for
                                        // another to start or to end
    volatile double alive_s;            // when the thread last did something; monotonic clock
    volatile unsigned long long num_collectives;
    volatile int rank, pid;
    volatile bool has_spoken;           // it has printed why the run ends: the others print nothing
} Beat;

static const unsigned long long BEAT_IS_SET = 0x74726f676e696874ull;

/* A collective on a stream. Collectives are numbered from 1. */
typedef struct Enqueued { const char *name, *group; size_t elems; int stream_idx; } Enqueued;

typedef struct Watch {
    Beat* beats;                // (num_beats)
    int num_beats, own;
    double timeout_s;           // 0: never
    const char* volatile activity; // what the main thread does
    const char* volatile group;    // and among which ranks: Group.words; empty: all, or none
    volatile size_t elems, step;
    volatile double moved_s;    // when the main thread last did something, on a clock without stopped_s
    volatile double stopped_s;  // how long this process was stopped, in all
    volatile double continued_s;   // and until when; monotonic clock
    size_t num_host_calls;      // host synchronizations with other ranks
    Enqueued enqueued[WATCH_ENQUEUED]; // the newest; number k has index k % WATCH_ENQUEUED
    volatile unsigned long long num_enqueued;
    const unsigned long long* volatile progress;   // (WATCH_STREAMS) number of the newest complete one
    volatile bool idle;         // the main thread waits for work: only missing heartbeats count
    pthread_mutex_t asking;     // of the two below, while the thread uses them
    bool (*error_of)(void* job, char* text, size_t size);   // has anything failed in the job's groups, and what?
    void* job;                  // null: it has none
    volatile bool stops;
    pthread_t thread;
} Watch;

inline Watch* watch_of_signals = nullptr;   // a signal handler has no argument

/* The beat of a rank that has started and not left, else null. */
static const Beat* watch_beat(const Watch* w, int i)
{
    return w->beats[i].is_set == BEAT_IS_SET ? &w->beats[i] : nullptr;
}

/* A clock that stands still while this process is stopped. */
static double watch_running_s(const Watch* w) { return now_s() - w->stopped_s; }

/* How long a rank of this host has had no heartbeat, since this process runs. */
static double watch_silent_s(const Watch* w, const Beat* b)
{
    return now_s() - fmax(b->alive_s, w->continued_s);
}

/* The main thread begins another activity. */
static void watch_move(Watch* w, const char* activity, size_t elems, const char* group = "")
{
    if (w == nullptr) return;
    w->activity = activity;
    w->group = group;
    w->elems = elems;
    w->moved_s = watch_running_s(w);
}

static void watch_host_call(Watch* w) { if (w != nullptr) w->num_host_calls++; }

static void watch_collective(Watch* w, const char* name, size_t elems, const char* group = "")
{
    if (w == nullptr) return;
    w->beats[w->own].num_collectives++;
    watch_move(w, name, elems, group);
}

/* The main thread has enqueued a collective; returns its number. */
static unsigned long long watch_enqueued(Watch* w, const char* name, size_t elems, int stream_idx, const char* group)
{
    unsigned long long number = w->num_enqueued + 1;
    w->enqueued[number % WATCH_ENQUEUED] = Enqueued{name, group, elems, stream_idx};
    w->num_enqueued = number;
    return number;
}

/* The oldest collective that is not complete; null if there is none. Streams write while this thread reads. */
__attribute__((no_sanitize("thread"))) static const Enqueued* watch_oldest(const Watch* w)
{
    const volatile unsigned long long* progress = w->progress;
    unsigned long long end = w->num_enqueued, number = end < WATCH_ENQUEUED ? 1 : end - WATCH_ENQUEUED + 1;
    for (; progress != nullptr && number <= end; number++) {
        const Enqueued* enqueued = &w->enqueued[number % WATCH_ENQUEUED];
        if (progress[enqueued->stream_idx] < number) return enqueued;
    }
    return nullptr;
}

/* One line: where this rank is, and which ranks of the host are missing or behind. */
static int watch_text(const Watch* w, const char* why, char* line, size_t size)
{
    const Beat* own = &w->beats[w->own];
    size_t elems = w->elems;
    const char *activity = w->activity, *group = w->group;
    const Enqueued* oldest = watch_oldest(w);
    if (oldest != nullptr) { activity = oldest->name; elems = oldest->elems; group = oldest->group; }
    char of[40] = "", rank[96];
    if (elems > 0) snprintf(of, sizeof of, " of %zu elements", elems);
    int n = snprintf(line, size, "train_gpt: %s: %s: step %zu, in %s%s%s for %.1f s", rank_text(rank), why,
                     w->step, activity, of, group, watch_running_s(w) - w->moved_s);
    for (int i = 0; i < w->num_beats && n < (int)size; i++) {
        const Beat* b = watch_beat(w, i);
        if (b == nullptr) continue;
        unsigned long long behind = own->num_collectives - b->num_collectives;
        if (kill(b->pid, 0) != 0)
            n += snprintf(line + n, size - n, "; rank %d is gone: killed, or it crashed", b->rank);
        else if (watch_silent_s(w, b) > 2.5)
            n += snprintf(line + n, size - n, "; rank %d has no heartbeat for %.1f s: stopped or killed",
                          b->rank, watch_silent_s(w, b));
        else if (b->num_collectives < own->num_collectives)
            n += snprintf(line + n, size - n, "; rank %d is %llu collective%s behind", b->rank, behind,
                          behind == 1 ? "" : "s");
    }
    if (n > (int)size - 2) n = (int)size - 2;
    line[n++] = '\n';
    return n;
}

/* Has a rank of this host printed why the run ends? */
static bool watch_is_said(void)
{
    const Watch* w = watch_of_signals;
    for (int i = 0; w != nullptr && i < w->num_beats; i++)
        if (const Beat* b = watch_beat(w, i); b != nullptr && b->has_spoken) return true;
    return false;
}

static void watch_say(const Watch* w, const char* why)
{
    char line[1024];
    if (watch_is_said()) return;
    w->beats[w->own].has_spoken = true;
    int n = watch_text(w, why, line, sizeof line);
    if (write(2, line, n) < 0) return;   // stderr is closed
}

/* Is a process of this host gone? Callable from a signal handler. */
static bool watch_misses_a_rank(const Watch* w)
{
    for (int i = 0; w != nullptr && i < w->num_beats; i++)
        if (const Beat* b = watch_beat(w, i); b != nullptr && kill(b->pid, 0) != 0) return true;
    return false;
}

/* Another message ends the run: the watchdog prints nothing. */
static void watch_has_spoken(void)
{
    if (watch_of_signals != nullptr) watch_of_signals->beats[watch_of_signals->own].has_spoken = true;
}

/* For how long this rank has made no progress; if it is idle, for how long any rank of the host has no heartbeat. */
static double watch_waited_s(const Watch* w)
{
    if (!w->idle) return watch_running_s(w) - w->moved_s;
    double longest_s = 0;
    for (int i = 0; i < w->num_beats; i++)
        if (const Beat* b = watch_beat(w, i); b != nullptr) longest_s = fmax(longest_s, watch_silent_s(w, b));
    return longest_s;
}

/* The job that error_of is asked about from here on. */
static void watch_communicators(Watch* w, void* job, bool (*error_of)(void*, char*, size_t))
{
    if (w == nullptr) return;
    pthread_mutex_lock(&w->asking);
    w->job = job;
    w->error_of = error_of;
    pthread_mutex_unlock(&w->asking);
}

static bool watch_error(Watch* w, char* text, size_t size)
{
    pthread_mutex_lock(&w->asking);
    const bool failed = w->job != nullptr && w->error_of(w->job, text, size);
    pthread_mutex_unlock(&w->asking);
    return failed;
}

static void* watch_run(void* arg)
{
    Watch* w = (Watch*)arg;
    Beat* own = &w->beats[w->own];
    for (double before_s = own->alive_s; !w->stops; before_s = own->alive_s) {
        own->alive_s = now_s();
        if (own->alive_s - before_s > WATCH_STOPPED_S) {
            w->continued_s = own->alive_s;
            w->stopped_s = w->stopped_s + (own->alive_s - before_s);
        }
        if (w->timeout_s > 0 && watch_waited_s(w) > w->timeout_s) {
            watch_say(w, "waits longer than --timeout");
            _exit(1);
        }
        char error[240], why[256];
        if (watch_error(w, error, sizeof error)) {
            snprintf(why, sizeof why, "NCCL reports: %s", error);
            watch_say(w, why);
            _exit(1);
        }
        usleep((useconds_t)(WATCH_BEAT_S * 1e6));
    }
    return nullptr;
}

/* beats: shared by the ranks of this host. */
static Watch* watch_start(Beat* beats, int num_beats, int own, int rank, double timeout_s)
{
    Watch* w = (Watch*)malloc_checked(sizeof *w);
    *w = Watch{};
    pthread_mutex_init(&w->asking, nullptr);
    w->beats = beats;
    w->num_beats = num_beats;
    w->own = own;
    w->timeout_s = timeout_s;
    memset((void*)&beats[own], 0, sizeof(Beat));
    beats[own].rank = rank;
    beats[own].pid = (int)getpid();
    beats[own].alive_s = now_s();
    watch_move(w, "set-up", 0);
    beats[own].is_set = BEAT_IS_SET;
    ENSURE(pthread_create(&w->thread, nullptr, watch_run, w) == 0, "the watchdog's thread cannot be started");
    watch_of_signals = w;
    return w;
}

static void watch_end(Watch* w)
{
    w->stops = true;
    ENSURE(pthread_join(w->thread, nullptr) == 0, "the watchdog's thread does not end");
    w->beats[w->own].is_set = 0;
    watch_of_signals = nullptr;
    free(w);
}
