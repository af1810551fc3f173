/* signals.h: a signal to any rank makes the run end or save.
 *   SIGTERM SIGINT SIGUSR2   end: the current step is finished and saved, exit code 0
 *   SIGUSR1                  save, and continue
 *   a second SIGINT          leave now, exit code 1
 * The handler only sets a flag. During steps the ranks agree by sums that are all-reduced anyway (zero_step_ask) and
 * that the host reads one step late, so that no step waits; between micro-batches of an evaluation, and after an
 * evaluation or a save, by signals_agree.
 *
 * Open MPI's mpirun forwards SIGUSR1 and SIGUSR2 to all ranks. On SIGTERM and SIGINT it sends the ranks SIGTERM and, a
 * second later, SIGKILL (odls_base_sigkill_timeout): too soon for a long step, so send mpirun SIGUSR2. It also sends
 * SIGTERM when a rank has died. Then the ranks cannot agree: if a rank of this host is gone, watch_on_signal prints
 * where this rank was and exits; ranks of other hosts are ended by mpirun's SIGKILL. */
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

/* Installs the handler, until the end of the process. */
static void signals_begin(void)
{
    struct sigaction action = {};
    action.sa_handler = on_ask;
    action.sa_flags = SA_RESTART;
    for (int signal : {SIGTERM, SIGINT, SIGUSR1, SIGUSR2})
        ENSURE(sigaction(signal, &action, nullptr) == 0, "the handler of signal %d cannot be set", signal);
}

/* The request that this rank has received since the last call. A request to end stays set. */
static Ask signals_take(void)
{
    bool saves = asked_to_save;
    asked_to_save = 0;
    return asked_to_end ? Ask::END : saves ? Ask::SAVE : Ask::NONE;
}

/* The strongest request that any rank has received. A host synchronization of all ranks. */
static Ask signals_agree(const Comm* c)
{
    return (Ask)(int)comm_max_host(c, (double)(int)signals_take());
}
