/* signals.h: a run is asked to end or to save, by a signal to any of its ranks.
 *   SIGTERM SIGINT SIGUSR2   end: the step under way is finished, saved, exit code 0
 *   SIGUSR1                  save, and go on
 *   a second SIGINT          leave now, exit code 1
 * The handler notes it, no more. In steps the ranks agree through sums that are all-reduced anyway (zero_step_ask) and
 * that the host reads one step late, so that no step waits; between micro-batches of an evaluation, and after an
 * evaluation or a save, through signals_agree.
 *
 * Open MPI's mpirun passes SIGUSR1 and SIGUSR2 on to all ranks. Of SIGTERM and SIGINT to itself it makes SIGTERM to the
 * ranks and, a second later, SIGKILL (odls_base_sigkill_timeout): too soon for a long step, so ask mpirun by SIGUSR2.
 * It sends SIGTERM also when a rank has died. Then there is nobody to agree with: watch_on_signal says where this rank
 * was and ends it, if a rank of this host is gone; ranks of other hosts are ended by mpirun's SIGKILL. */
#pragma once
#include <csignal>
#include "comm.h"

enum class Ask { NONE, SAVE, END };

inline volatile sig_atomic_t asked_to_save, asked_to_end, num_interrupts;   // a signal handler has no argument

static void on_ask(int signal)
{
    if (signal == SIGTERM && watch_misses_a_rank(watch_of_signals)) watch_on_signal(signal);
    if (signal == SIGINT && ++num_interrupts > 1) {
        static const char line[] = "train_gpt: a second SIGINT: left at once, nothing is saved\n";
        watch_has_spoken();
        if (write(2, line, sizeof line - 1) < 0) _exit(1);
        _exit(1);
    }
    if (signal == SIGUSR1) asked_to_save = 1;
    else asked_to_end = 1;
}

/* To the end of the process signals are questions. */
static void signals_begin(void)
{
    struct sigaction action = {};
    action.sa_handler = on_ask;
    action.sa_flags = SA_RESTART;
    for (int signal : {SIGTERM, SIGINT, SIGUSR1, SIGUSR2})
        ENSURE(sigaction(signal, &action, nullptr) == 0, "the handler of signal %d cannot be set", signal);
}

/* What this rank was asked for since the last call. The end stays asked for. */
static Ask signals_take(void)
{
    bool saves = asked_to_save;
    asked_to_save = 0;
    return asked_to_end ? Ask::END : saves ? Ask::SAVE : Ask::NONE;
}

/* The most that any rank was asked for. The hosts wait for one another. */
static Ask signals_agree(const Comm* c)
{
    return (Ask)(int)comm_max_host(c, (double)(int)signals_take());
}
