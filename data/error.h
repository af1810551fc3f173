/* error.h: how the program refuses. One sentence that says what is wrong, with numbers and what to change,
 * then a non-zero exit on every rank.
 *   ENSURE(cond, fmt, ...)   for the world: files, sizes, memory. Always on. Exit code 1.
 *   die(fmt, ...)            the same without a condition
 *   die_usage(fmt, ...)      the command line is wrong. Exit code 2.
 *   ENSURE_INTACT(...)       the same for the contents of a file: it is damaged. die_damaged(fmt, ...)
 *   attempt(work, arg, why)  runs work(arg); a failure in it ends the work, not the program
 *   hold(what, how)          what an attempt gives back if it fails: memory, open files
 * assert() is for our own logic. Nothing here knows MPI: zero/comm.h sets the hooks.  */
#pragma once
#include <cassert>
#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

inline int die_rank = 0; // printed in front of the message; the launcher's rank until comm_init
inline int die_num_ranks = 1;
inline char die_host[64] = "";                       // of this rank; empty if all are on one
inline bool (*die_together)(void) = nullptr;         // do all ranks refuse? Waits for them; null before comm_init
inline void (*die_abort)(int exit_code) = nullptr;   // takes all ranks down; null before comm_init, and with one rank
inline bool (*die_is_said)(void) = nullptr;          // has another rank said why? Null before comm_watch

/* The outcome of an attempt, from good to bad. DAMAGED: a file is not as it was written: its checksum, size or syntax
 * is wrong, or it is missing. FAILED: anything else, such as a disk that cannot be read now; it says nothing of the
 * file. */
enum class Outcome { WELL, DAMAGED, FAILED };

/* Of the attempt that this thread is in: where it began, and the sentence it ends with. */
typedef struct Attempt { jmp_buf begun; char why[1024]; Outcome outcome; } Attempt;
inline thread_local Attempt* attempt_of_thread = nullptr;

#define FORMAT(a, b) __attribute__((format(printf, a, b)))

/* "rank 3", of several hosts "rank 3 on HOST". */
static inline const char* rank_text(char (&text)[96])
{
    snprintf(text, sizeof text, "rank %d%s%s", die_rank, die_host[0] ? " on " : "", die_host);
    return text;
}

/* As a terminal may have it: control characters, which names and values in files may hold, as \x1b. Lines and tabs
 * stay. */
static inline void text_for_terminal(const char* text, char* out, size_t room)
{
    size_t n = 0;
    for (const unsigned char* c = (const unsigned char*)text; *c != 0 && n + 9 < room; c++) {
        const bool is_c1 = c[0] == 0xc2 && c[1] >= 0x80 && c[1] < 0xa0;          // U+0080 to U+009f in UTF-8
        if (is_c1) n += (size_t)snprintf(out + n, room - n, "\\x%02x", *++c);
        else if ((*c < 0x20 && *c != '\n' && *c != '\t') || *c == 0x7f)
            n += (size_t)snprintf(out + n, room - n, "\\x%02x", *c);
        else out[n++] = (char)*c;
    }
    out[n] = 0;
}

static inline void say_args(FILE* f, const char* fmt, va_list args)
{
    char *text = nullptr, *shown;
    const int length = vasprintf(&text, fmt, args);
    if (length < 0) return;
    const size_t room = 4 * (size_t)length + 16;
    if ((shown = (char*)malloc(room)) != nullptr) {
        text_for_terminal(text, shown, room);
        fputs(shown, f);
    }
    free(shown);
    free(text);
    fflush(f);
}

/* fprintf to a terminal for lines that may have text of files in them. */
FORMAT(2, 3) static inline void say_to(FILE* f, const char* fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    say_args(f, fmt, args);
    va_end(args);
}

FORMAT(1, 2) static inline void say(const char* fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    say_args(stdout, fmt, args);
    va_end(args);
}

/* A bad file is seen by all ranks at once: then rank 0 speaks for all. A rank that refuses alone speaks for itself,
 * two seconds later. A sentence that begins with a rank is about that one, whoever prints it (comm_outcome). */
[[noreturn]] static inline void die_exit(int exit_code, const char* where, const char* fmt, va_list args)
{
    if (Attempt* a = attempt_of_thread) {
        vsnprintf(a->why, sizeof a->why, fmt, args);
        longjmp(a->begun, 1);
    }
    bool together = die_together != nullptr && die_together();
    if (die_together == nullptr && die_rank != 0) usleep(2000 * 1000);
    fflush(stdout);
    char said[4096], why[4 * sizeof said + 16], rank[96];
    vsnprintf(said, sizeof said, fmt, args);
    text_for_terminal(said, why, sizeof why);
    bool says_rank = die_num_ranks > 1 && strncmp(why, "rank ", 5) != 0;
    bool speaks = together ? die_rank == 0 : die_is_said == nullptr || !die_is_said();
    if (speaks)                                      // one write: lines of several ranks do not mix
        fprintf(stderr, "train_gpt: %s%s%s%s%s%s\n", says_rank ? rank_text(rank) : "", says_rank ? ": " : "", why,
                where != nullptr ? " [" : "", where != nullptr ? where : "", where != nullptr ? "]" : "");
    fflush(stderr);
    if (die_abort != nullptr) die_abort(exit_code);
    _exit(exit_code);
}

[[noreturn]] FORMAT(1, 2) static inline void die(const char* fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    die_exit(1, nullptr, fmt, args);
}

[[noreturn]] FORMAT(1, 2) static inline void die_usage(const char* fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    die_exit(2, nullptr, fmt, args);
}

/* For what a file holds. Only this makes an attempt's outcome DAMAGED: what is not marked so renames no checkpoint. */
[[noreturn]] FORMAT(1, 2) static inline void die_damaged(const char* fmt, ...)
{
    if (attempt_of_thread != nullptr) attempt_of_thread->outcome = Outcome::DAMAGED;
    va_list args;
    va_start(args, fmt);
    die_exit(1, nullptr, fmt, args);
}

/* A library call failed: the message ends with file:line, since the reader may be us. */
[[noreturn]] FORMAT(2, 3) static inline void die_at(const char* where, const char* fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    die_exit(1, where, fmt, args);
}

#define ERROR_STRING_(x) #x
#define ERROR_STRING(x) ERROR_STRING_(x)
#define WHERE __FILE__ ":" ERROR_STRING(__LINE__)
#define ENSURE(cond, ...) do { if (!(cond)) die(__VA_ARGS__); } while (0)
#define ENSURE_INTACT(cond, ...) do { if (!(cond)) die_damaged(__VA_ARGS__); } while (0)

/* What this thread's work has taken and not given back yet, the newest last. Outside an attempt a failure ends the
 * program, which gives back everything. */
typedef struct Held { void* what; void (*give_back)(void* what); } Held;
inline thread_local Held held[16];
inline thread_local int num_held = 0;

static inline void* hold(void* what, void (*how)(void* what) = free)
{
    assert(num_held < (int)(sizeof held / sizeof *held));
    held[num_held++] = Held{what, how};
    return what;
}

/* The newest becomes the caller's, who frees it. */
static inline void* hand_over(void* what)
{
    assert(num_held > 0 && held[num_held - 1].what == what);
    num_held--;
    return what;
}

/* The newest is freed, or closed. */
static inline void give_back(void* what)
{
    hand_over(what);
    held[num_held].give_back(what);
}

/* Runs work(arg). WELL if it returned; else what it failed of, and its sentence in `why`. What it holds is given back
 * then. For work without a collective, and without a C++ object that needs its destructor. */
static inline Outcome attempt(void (*work)(void* arg), void* arg, char (&why)[1024])
{
    Attempt a, *outer = attempt_of_thread;
    const int num_before = num_held;
    Outcome volatile outcome = Outcome::WELL;
    a.outcome = Outcome::FAILED;
    attempt_of_thread = &a;
    if (setjmp(a.begun) == 0) {
        work(arg);
    } else {
        memcpy(why, a.why, sizeof why);
        outcome = a.outcome;
        while (num_held > num_before) give_back(held[num_held - 1].what);
    }
    attempt_of_thread = outer;
    return outcome;
}

static inline void* malloc_checked(size_t size_bytes)
{
    void* p = malloc(size_bytes ? size_bytes : 1);
    ENSURE(p != nullptr, "out of host memory: %zu bytes asked for", size_bytes);
    return p;
}
