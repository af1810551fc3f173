/* train_step.cuh: one training step: copies of micro-batches to the device, forward and backward, the update; and its
 * result. On a GPU it is read when the next step is already enqueued, so that the GPU never waits for the host; where
 * launches return when their work is done, it is read at once. */
#pragma once
#include "folder.cuh"
#include "nonfinite.cuh"
#include "report.cuh"

/* Copies the next micro-batch of `loader` to the device through the idx-th pinned buffer, T tokens of each row. Does
 * not wait: the last copy from that buffer must be complete. --bench has no loader and copies the same tokens again. */
static void load_batch(Run* run, Loader* loader, size_t idx, int T)
{
    watch_move(run->comm.watch, "a micro-batch", (size_t)run->B * run->T);
    size_t bytes = (size_t)run->B * T * sizeof(int), first = idx * run->B * run->T;
    int *h_tokens = run->h_tokens + first, *h_targets = run->h_targets + first;
    int* h_positions = loader != nullptr && run->documents ? run->h_positions + first : nullptr;
    if (loader != nullptr) loader_next(loader, h_tokens, h_targets, h_positions);
    OP(run->zero.compute, 0, 2.0 * bytes, run->B, T);
    for (int b = 1; b < run->B && T < run->T; b++)   // the first T of each row, rows packed
        for (int* h : {h_tokens, h_targets}) memmove(h + (size_t)b * T, h + (size_t)b * run->T, T * sizeof(int));
    CUDA_CHECK(cudaMemcpyAsync(run->model.tokens, h_tokens, bytes, cudaMemcpyHostToDevice, run->zero.compute));
    CUDA_CHECK(cudaMemcpyAsync(run->model.targets, h_targets, bytes, cudaMemcpyHostToDevice, run->zero.compute));
    spans_documents(&run->model.spans, &run->model.config, h_positions, run->B, T, run->zero.compute);
}

/* Enqueues a step without host synchronization. Its pinned buffers are those of the step before the last, whose end
 * step_wait has waited for, so at most STEPS_IN_FLIGHT steps are enqueued. */
static void train_step(Run* run)
{
    int slot = (int)(run->step % STEPS_IN_FLIGHT);
    profile_step_begin(slot);
    if (run->comm.watch != nullptr) run->comm.watch->step = run->step + 1;
    const size_t waits_before = comm_host_waits(&run->comm);
    comm_step_begin(&run->comm);
    long faults_before = page_faults();
    zero_step_begin(&run->zero);
    int G = (int)step_micro_steps(run, run->step), T = step_seq_len(run, run->step);
    size_t position = 0;
    if (run->train != nullptr) {
        position = loader_position(run->train);
        if ((size_t)G != run->train->config.G) loader_seek(run->train, position, (size_t)G);
    }
    StepConfig config = run->config;
    config.nominal_toks = (double)run->B * G * run->dp * T;
    float dloss = (float)(1.0 / config.nominal_toks);
    run->model.drops = true;
    for (int micro = 0; micro < G; micro++) {
        phase_micro_begin();
        load_batch(run, run->train, (size_t)(slot * run->G + micro), T);
        run->model.first_sequence = position + ((size_t)micro * run->dp + run->replica) * run->B;
        model_train_micro(&run->model, run->B, T, dloss, micro, G);
        print_bar(run, micro);
    }
    phase_micro_end();
    run->model.drops = false;
    zero_step_ask(&run->zero);
    zero_step_end(&run->zero, config, optimizer_config(run->flags), slot);
    comm_step_end(&run->comm);
    run->step_waits += comm_host_waits(&run->comm) - waits_before;
    run->step_page_faults[slot] = page_faults() - faults_before;
    profile_step_end();
}

/* Ends the run; every rank calls this at the same step. */
[[noreturn]] static void stop_at_nonfinite(Run* run, const StepState* s, size_t step, const FirstNonFinite* first)
{
    const bool disowned = streak_disown(run, s->num_applied);
    die("step %zu: the gradient is not finite, %s; the first that is not finite is %s (loss %g): %s; %s", step,
        s->loss_scale_exhausted ? "at the smallest loss scale" : "10 times in a row", first->what, s->loss,
        first->advice, disowned ? "no step could be taken from the checkpoint that the run resumed from: it is renamed "
        "to step_N.skipped, and --resume auto takes the one before" : "the last checkpoint is as it was");
}

/* A host synchronization of all ranks, outside of steps. */
static Ask ask_outside_step(Run* run)
{
    Ask ask = signals_agree(&run->comm);
    if (ask > run->ask) run->ask = ask;
    return run->ask;
}

/* Waits for the result of step `step` (counted from 1), with the requests that came during it. */
static void step_wait(Run* run, size_t step)
{
    const int slot = (int)((step - 1) % STEPS_IN_FLIGHT);
    const size_t waits_before = comm_host_waits(&run->comm);
    profile_step_wait(slot);
    const StepState* s = &run->zero.h_state[slot];
    Ask ask = s->asked_to_end ? Ask::END : s->asked_to_save ? Ask::SAVE : Ask::NONE;
    if (ask > run->ask) run->ask = ask;
    if (s->asked_to_save) signals_saved();
    if (run->reads_at_once) ask_outside_step(run);      // also what came during the update
    run->seen_skip = s->skip == Skip::NONFINITE;
    run->result_waits += comm_host_waits(&run->comm) - waits_before;
}

/* After step_wait: prints and logs the step; ends the run if the loss scale is at its minimum or 10 steps in a row were
 * skipped. */
static void finish_step(Run* run, size_t step, const char* hash)
{
    int slot = (int)((step - 1) % STEPS_IN_FLIGHT);
    StepReport r = {step, slot, 0, 0, {}, nullptr, hash};
    r.took_s = profile_phases_ms(slot, r.phases_ms) * 1e-3;
    const StepState* s = &run->zero.h_state[slot];
    r.toks_per_s = s->num_toks / r.took_s;
    run->mean_step_s = run->mean_step_s == 0 ? r.took_s : 0.9 * run->mean_step_s + 0.1 * r.took_s;
    FirstNonFinite first = {};
    if (s->skip == Skip::NONFINITE) first = first_nonfinite(run, step, slot);
    if (first.what[0]) r.nonfinite = first.what;
    log_step(run, s, &r);
    print_step(run, s, &r);
    if (s->loss_scale_exhausted || (s->num_skipped_in_a_row >= 10 && !run->config.dynamic_loss_scale))
        stop_at_nonfinite(run, s, step, &first);
}
