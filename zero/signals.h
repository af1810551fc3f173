/* signals.h: a signal to any rank makes the run end or save.
 *   SIGTERM SIGINT SIGHUP SIGUSR2   end: the current step is finished and saved, exit code 0. Before the first step,
 *                                   and in other modes than training: at once, with a sentence, exit code 1. SIGHUP
 *                                   that is ignored (nohup) stays ignored
 *   SIGUSR1                         save, and continue; before the first step: after it
 *   a second SIGINT                 leave now, exit code 1
 * The handler only sets a number. Before its update a step all-reduces sums. The device then adds the requests, which
 * it reads from pinned memory (zero_step_ask), so that no step waits for the host. The step under way is the last one;
 * on a GPU, where the next one is already enqueued when the host reads the result, that one. There a signal during the
 * update counts for the next step. Where launches return when their work is done (reads_at_once), between micro-batches
 * of an evaluation, and after an evaluation or a save, the ranks agree by signals_agree.
 *
 * Open MPI's mpirun forwards SIGUSR1 and SIGUSR2 to all ranks. On SIGTERM, SIGINT and SIGHUP it sends the ranks SIGTERM
 * and, a second later, SIGKILL (odls_base_sigkill_timeout): too soon for a long step, so send mpirun SIGUSR2. It also
 * sends SIGTERM when a rank has died. Then the ranks cannot agree: if a rank of this host is gone, end_now prints where
 * this rank was and exits; ranks of other hosts are ended by mpirun's SIGKILL. */
#pragma once
#include <csignal>
#include "comm.h"

enum class Ask { NONE, SAVE, END };

/* A signal handler has no argument. asks[ASK_...] is 1 where asked: of the type of the sums. */
enum { ASK_SAVE, ASK_END, NUM_ASKS };
inline volatile double asks_before[NUM_ASKS];               // signals_begin
inline volatile double* volatile asks = asks_before;
inline volatile sig_atomic_t num_interrupts;

static const struct { int number; const char* name; } end_signals[] = {
    {SIGTERM, "SIGTERM"}, {SIGINT, "SIGINT"}, {SIGHUP, "SIGHUP"}, {SIGUSR2, "SIGUSR2"}
};

/* Ends this rank with a sentence. Before the watchdog runs, rank 0 speaks first: the launcher then ends the others. */
static void end_now(int signal)
{
    char why[64], line[256], rank[96];
    const char* name = "a signal";
    for (const auto& s : end_signals) if (s.number == signal) name = s.name;
    snprintf(why, sizeof why, "ended by %s", name);
    if (watch_of_signals != nullptr) {
        watch_say(watch_of_signals, why);
        _exit(1);
    }
    for (const double from_s = now_s(); die_rank != 0 && now_s() - from_s < 2;) usleep(50 * 1000);   // SIGCONT ends one
    const bool says_rank = die_num_ranks > 1 || die_rank != 0;
    int n = snprintf(line, sizeof line, "train_gpt: %s%s%s outside of training: nothing is saved\n",
                     says_rank ? rank_text(rank) : "", says_rank ? ": " : "", why);
    if (write(2, line, n) < 0) _exit(1);
    _exit(1);
}

/* asks is read by the device: the memory checker would see a race. */
__attribute__((no_sanitize("thread"))) static void ask_set(int ask, double value) { asks[ask] = value; }

static void on_ask(int signal)
{
    if (signal == SIGTERM && watch_misses_a_rank(watch_of_signals)) end_now(signal);
    if (signal == SIGINT) num_interrupts = num_interrupts + 1;
    if (num_interrupts > 1) {
        static const char line[] = "train_gpt: a second SIGINT: left at once, nothing is saved\n";
        watch_has_spoken();
        if (write(2, line, sizeof line - 1) < 0) _exit(1);
        _exit(1);
    }
    ask_set(signal == SIGUSR1 ? ASK_SAVE : ASK_END, 1);
}

static void signal_handle(int signal, void (*handler)(int))
{
    struct sigaction action = {}, before;
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART;
    ENSURE(sigaction(signal, nullptr, &before) == 0, "the handler of signal %d cannot be read", signal);
    if (signal == SIGHUP && before.sa_handler == SIG_IGN) return;      // nohup
    ENSURE(sigaction(signal, &action, nullptr) == 0, "the handler of signal %d cannot be set", signal);
}

/* At the start of the program. */
static void signals_start(void)
{
    for (const auto& s : end_signals) signal_handle(s.number, end_now);
    signal_handle(SIGUSR1, on_ask);
    signal_handle(SIGXFSZ, SIG_IGN);   // at the limit on file sizes write() fails, which is reported
}

/* From here on, until the end of the process, no signal ends the run. pinned (NUM_ASKS), read by the device. */
static void signals_begin(double* pinned)
{
    for (int k = 0; k < NUM_ASKS; k++) pinned[k] = asks_before[k];
    asks = pinned;
    for (const auto& s : end_signals) signal_handle(s.number, on_ask);
}

/* Before the pinned memory is freed. */
static void signals_end(void) { asks = asks_before; }

/* A save that was asked for is made now. */
static void signals_saved(void) { ask_set(ASK_SAVE, 0); }

/* The request that this rank has received since the last call. A request to end stays set. */
static Ask signals_take(void)
{
    if (asks[ASK_END] > 0) return Ask::END;
    if (asks[ASK_SAVE] == 0) return Ask::NONE;
    signals_saved();
    return Ask::SAVE;
}

/* The strongest request that any rank has received. A host synchronization of all ranks. */
static Ask signals_agree(const Comm* c)
{
    return (Ask)(int)comm_max_host(c, (double)(int)signals_take());
}
