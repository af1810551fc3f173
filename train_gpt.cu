/* train_gpt.cu: the program. The step loop, what is printed, the modes.
 *
 * data/error.h     ENSURE, die               data/tokens.h loader.h      shards and the batches made of them
 * data/flags.h          every option              data/tokenizer.h            text <-> tokens
 * run/run.cuh run/fit.cuh  a run and its set-up      data/run_log.h              log.jsonl
 * run/rates.h          rates of each tensor      zero/update.h               the end of a step
 * model/model.cuh        the models, one block     zero/stages.h               who keeps what, when it moves, the step
 * model/passes.cuh       forward and backward      zero/weights.h init.h       weights: read, written, made
 * model/generate.cuh     text from a model         zero/checkpoint.h           a run saved, and gone on with
 * model/choices.cuh      multiple choice           zero/save.h                 written while training goes on
 * run/folder.cuh   log, save, resume         kernels/device.cuh          the device
 * run/bench.cuh        how fast is a step        kernels/profile.h run/trace.cuh where its time goes
 * run/environment.cuh  what --report prints      model/shapes.cuh                  presets and configs
 *                                            data/ds_config.h data/ds_keys.h       DeepSpeed's JSON as flags
 *
 * The file is compiled once per precision (PREC_FP32, PREC_BF16, PREC_FP16); the object with PREC_MAIN holds main(). */
#include "run/fit.cuh"
#include "run/bench.cuh"
#include "data/ds_config.h"
#include "run/environment.cuh"
#include "model/choices.cuh"
#include "model/generate.cuh"
#include "run/folder.cuh"
#include "run/same.cuh"
#include "run/tune.cuh"
#include "zero/init.h"

#define VERSION "0.1.0"
#if defined(DEVICE_CUDA)
#define DEVICE_KIND "cuda"
#elif defined(DEVICE_EMU)
#define DEVICE_KIND "emu"
#else
#define DEVICE_KIND "cpu"
#endif
#define VERSION_LINE VERSION ", compiled " __DATE__ " with " __VERSION__ ", device " DEVICE_KIND

/* One in each object, named by its precision and instruction set (kernels/cpu/isa.h). */
#if defined(PREC_BF16)
#define RUN_ALL ISA_NAME(run_all_bf16)
#elif defined(PREC_FP16)
#define RUN_ALL ISA_NAME(run_all_fp16)
#else
#define RUN_ALL ISA_NAME(run_all_fp32)
#endif
void RUN_ALL(const Flags* f, Comm* comm);

#ifdef PREC_BF16
size_t ISA_NAME(device_bytes_bf16)(const Run* run, Setting s) { return setting_estimate(run, s).device_bytes; }
#endif

// ------------------------------------------------------------------------------------------------ what is printed
/* Time of a step; with --plan also what other settings take, and whether this one fits. */
static void print_estimate(const Run* run)
{
    if (run->comm.rank != 0) return;
    const Setting* s = &run->setting;
    Estimate e = setting_estimate(run, *s);
    printf("time    %.4g Gflop per step and rank", costs_sum(&e.costs, nullptr).flops * 1e-9);
    if (e.step_s > 0)
        printf(": on paper %.3g s (forward %.3g, backward %.3g, update %.3g, waiting for the wire %.3g), %.4g tok/s",
               e.step_s, e.time.forward_s, e.time.backward_s, e.time.update_s, e.time.exposed_s,
               run->global_batch * run->T / e.step_s);
    printf("\n");
    if (!run->flags->plan) return;
    costs_print(&run->device, &run->model, &e.costs, stdout);
    size_t have_bytes = device_free_bytes(run);
    recompute_print(run, stdout, have_bytes);
    if (e.device_bytes <= have_bytes) {
        printf("fits    %.1f of %.1f MiB\n", e.device_bytes / 1048576.0, have_bytes / 1048576.0);
        return;
    }
    printf("does not fit: need %.1f MiB, have %.1f MiB. Change\n", e.device_bytes / 1048576.0, have_bytes / 1048576.0);
    ladder_print(run, stdout, have_bytes);
}

static void print_start(Run* run, const char* model_name)
{
    const Config* c = &run->model.config;
    const Flags* f = run->flags;
    char buf[64], level[16];
    SAY("train_gpt " VERSION " | %s, %s | %d rank%s, %d thread%s each", run->device.name, FLOATX_NAME,
        run->comm.num_ranks, run->comm.num_ranks > 1 ? "s" : "", run->device.num_threads,
        run->device.num_threads > 1 ? "s" : "");
    if (run->device.peak_flops > 0) SAY(" | peak %.4g Gflop/s per rank", run->device.peak_flops * 1e-9);
    if (f->config[0]) SAY("\nconfig  %s (--print-config says what became of each key)", f->config);
    SAY("\nflags  ");
    for (const FlagRow& row : flag_rows)
        if (f->given[&row - flag_rows]) SAY(" --%s=%s", row.name, flag_value(f, &row, buf));
    SAY("\nmodel   %s%s: %s, L %d, C %d, NH %d, NKV %d, HS %d, F %d, V %d (padded to %d), context %d | "
        "%.2fM parameters\n", model_name, f->model[0] ? "" : " (the default of this build; -m takes another)",
        c->model_type, c->L, c->C, c->NH, c->NKV, c->HS, c->F, c->V, c->VP, c->context,
        run->model.shard.num_params * 1e-6);
    if (f->bench) SAY("data    made up\n");
    else if (run->train == nullptr) SAY("data    none in %s\n", f->data);   // a plan needs none
    else
        SAY("data    %s: %zu tokens in %zu shard%s, %zu windows of %d, %zu tokens of tails left out\n", f->data,
            run->train_set.num_toks, run->train_set.num_files, run->train_set.num_files > 1 ? "s" : "",
            run->train->num_windows, run->T, run->train->num_tail_toks);
    if (run->has_val) SAY("val     %zu tokens in %zu windows\n", run->val_set.num_toks, run->val->num_windows);
    SAY("batch   %zu sequences = %d per micro-step x %d micro-steps x %d ranks | %zu tokens per step\n",
        run->global_batch, run->B, run->G, run->comm.num_ranks, run->global_batch * run->T);
    SAY("steps   %zu = %.2f epochs | lr %.3g %s to %.3g, warm-up %zu steps | seed %lld\n", run->num_steps,
        run->train == nullptr ? 0 : (double)windows_before(run, run->num_steps) / run->train->num_windows,
        run->config.peak_lr, f->schedule,
        run->config.min_lr, (size_t)run->config.warmup_steps, (long long)f->seed);
    if (run->comm.rank == 0) rates_print(f, stdout);
    if (f->fp32_tensors[0])
        SAY("fp32    %d tensors, %zu elements with their padding\n", run->model.shard.units[0].num_tensors,
            run->model.shard.units[0].range.count);
    if (run->batch_ramp.steps > 0)
        SAY("ramp    global batch from %zu, over %zu steps\n", run->batch_ramp.from, run->batch_ramp.steps);
    if (run->seq_ramp.steps > 0)
        SAY("ramp    tokens of a sequence from %zu, over %zu steps\n", run->seq_ramp.from, run->seq_ramp.steps);
    if (run->model.dropout > 0 || run->model.attention_dropout > 0)
        SAY("dropout %g of embeddings and branches, %g of attention probabilities\n", run->model.dropout,
            run->model.attention_dropout);
    else if (c->pdrop > 0 && !f->given[FLAG_dropout])
        SAY("dropout none: config.json names %g, which is taken with --dropout %g\n", c->pdrop, c->pdrop);
    WireBytes wire = zero_wire_bytes(&run->zero);
    char optimizer_wire[64] = "";
    if (wire.optimizer > 0)
        snprintf(optimizer_wire, sizeof optimizer_wire, ", %s %zu bytes", f->optimizer, wire.optimizer);
    const char* collective = run->setting.stage == 0 ? "all-reduce" : "reduce-scatter";
    SAY("ZeRO    stage %d, -r %s | %.2f MiB sent per step and rank: %s of gradients %.2f, all-gather of parameters "
        "%.2f, all-reduce of sums %zu bytes%s | %s\n", run->setting.stage, recompute_name(run->setting, level),
        wire_bytes_per_step(run) / 1048576.0, collective, wire.gradients / 1048576.0, wire.parameters / 1048576.0,
        wire.sums, optimizer_wire, f->overlap ? "overlapped" : "not overlapped");
    if (run->comm.rank == 0) plan_print(&run->plan, stdout);
    print_estimate(run);
    if (!f->out[0]) SAY("output  none (-o FOLDER keeps log and checkpoints)\n");
    fflush(stdout);
}

/* Where the Inf or NaN is for which a step was skipped: a tensor's gradient, or the loss alone. Synchronises. */
static const char* nonfinite_name(Run* run, int slot)
{
    int t = zero_first_nonfinite(&run->zero, slot);
    return t >= 0 ? run->model.shard.tensors[t].name : "the loss";
}

/* What is unusual about a step, for its line and into the log. Every rank comes here. */
static void remark_step(Run* run, const StepState* s, int slot, char (&text)[256])
{
    text[0] = 0;
    if (s->skip == Skip::NO_TOKS) snprintf(text, sizeof text, " | no token counted: nothing changed");
    if (s->skip == Skip::NONFINITE) {
        const char* name = nonfinite_name(run, slot);
        snprintf(text, sizeof text, " | SKIPPED: Inf or NaN in %s", name);
        log_text(&run->log, "nonfinite", name);
    } else if (s->is_spike) {
        bool loss = s->loss_deviations > s->norm_deviations;
        snprintf(text, sizeof text, " | %s: %s %.1f deviations above its mean",
                 s->skip == Skip::SPIKE ? "SKIPPED" : "WARNING", loss ? "loss" : "norm",
                 loss ? s->loss_deviations : s->norm_deviations);
        log_real(&run->log, "loss_deviations", s->loss_deviations);
        log_real(&run->log, "norm_deviations", s->norm_deviations);
    }
}

static void print_step(Run* run, const StepState* s, size_t step, int slot, double took_s)
{
    char remark[256];
    const Flags* f = run->flags;
    run->mean_step_s = run->mean_step_s == 0 ? took_s : 0.9 * run->mean_step_s + 0.1 * took_s;
    double toks_per_s = s->num_toks / took_s;
    double flops = toks_per_s * model_flops_per_token(&run->model.config, step_seq_len(run, step - 1));
    double peak_share = run->device.peak_flops > 0 ? flops / (run->device.peak_flops * run->comm.num_ranks) : 0;
    log_begin(&run->log);
    log_int(&run->log, "step", (long long)step);
    log_real(&run->log, "loss", s->num_toks > 0 ? s->loss : NAN);
    log_real(&run->log, "norm", s->grad_norm);
    log_real(&run->log, "lr", s->lr);
    log_real(&run->log, "step_ms", took_s * 1e3);
    log_real(&run->log, "tok_per_s", toks_per_s);
    log_int(&run->log, "tokens", (long long)s->num_toks);
    log_int(&run->log, "skipped", s->skip == Skip::NONFINITE || s->skip == Skip::SPIKE);
    log_real(&run->log, "host_mib", resident_bytes() / 1048576.0);
    log_int(&run->log, "page_faults", run->step_page_faults[slot]);
    if (is_fp16()) log_real(&run->log, "loss_scale", s->used_loss_scale);
    remark_step(run, s, slot, remark);
    if (run->comm.rank != 0) return;
    if (step % f->log_every != 0 && step != run->num_steps && !remark[0]) return;
    char loss[32] = "n/a", eta[32];
    if (s->num_toks > 0) snprintf(loss, sizeof loss, "%.6f", s->loss);
    long left_s = (long)(run->mean_step_s * (double)(run->num_steps - step) + 0.5);
    if (left_s >= 3600) snprintf(eta, sizeof eta, "%ldh%02ldm", left_s / 3600, left_s / 60 % 60);
    else snprintf(eta, sizeof eta, "%ldm%02lds", left_s / 60, left_s % 60);
    if (run->bar_drawn) printf("\r\033[K");
    run->bar_drawn = false;
    printf("step %zu/%zu | loss %s | norm %.6f | lr %.2e | %.0f ms | ", step, run->num_steps, loss, s->grad_norm, s->lr,
           took_s * 1e3);
    if (toks_per_s >= 1e6) printf("%.2fM tok/s", toks_per_s * 1e-6);
    else if (toks_per_s >= 1e4) printf("%.1fk tok/s", toks_per_s * 1e-3);
    else printf("%.0f tok/s", toks_per_s);
    if (peak_share > 0) printf(" | %.1f%% peak", 100 * peak_share);
    if (is_fp16()) printf(" | scale %g", s->used_loss_scale);
    printf(" | %.2f GiB | eta %s%s\n", plan_bytes(&run->plan, Place::DEVICE) / 1073741824.0, eta,
           remark);
    fflush(stdout);
}

/* Is somebody watching? mpirun gives its ranks a terminal whatever its own output is, so it is asked, not we. */
static bool on_terminal(void)
{
    if (!isatty(1)) return false;
    if (die_num_ranks == 1 && getenv("OMPI_COMM_WORLD_RANK") == nullptr) return true;
    char link[64], target[256] = {};
    snprintf(link, sizeof link, "/proc/%d/fd/1", (int)getppid());
    return readlink(link, target, sizeof target - 1) > 0 &&
           (strncmp(target, "/dev/pts/", 9) == 0 || strncmp(target, "/dev/tty", 8) == 0);
}

/* A bar for steps that take long, on a terminal only. */
static void print_bar(Run* run, int micro)
{
    if (run->comm.rank != 0 || run->mean_step_s < 2 || !run->on_terminal) return;
    run->bar_drawn = true;
    char bar[33] = {};
    for (int i = 0; i < 32; i++) bar[i] = i * run->G < 32 * (micro + 1) ? '#' : '.';
    printf("\rstep %zu/%zu [%s] micro-step %d/%d", run->step + 1, run->num_steps, bar, micro + 1, run->G);
    fflush(stdout);
}

// ---------------------------------------------------------------------------------------------------------- a step
/* The next micro-batch of `loader` to the device by way of the idx-th pinned place, T tokens of each row. Nobody waits:
 * what was copied from there before must have arrived. A bench has no loader: what lies there is taken again. */
static void load_batch(Run* run, Loader* loader, size_t idx, int T)
{
    watch_move(run->comm.watch, "a micro-batch", (size_t)run->B * run->T);
    size_t bytes = (size_t)run->B * T * sizeof(int), first = idx * run->B * run->T;
    int *h_tokens = run->h_tokens + first, *h_targets = run->h_targets + first;
    if (loader != nullptr) loader_next(loader, h_tokens, h_targets);
    OP(run->zero.compute, 0, 2.0 * bytes, run->B, T);
    for (int b = 1; b < run->B && T < run->T; b++)   // the first T of each row, one row behind the other
        for (int* h : {h_tokens, h_targets}) memmove(h + (size_t)b * T, h + (size_t)b * run->T, T * sizeof(int));
    CUDA_CHECK(cudaMemcpyAsync(run->model.tokens, h_tokens, bytes, cudaMemcpyHostToDevice, run->zero.compute));
    CUDA_CHECK(cudaMemcpyAsync(run->model.targets, h_targets, bytes, cudaMemcpyHostToDevice, run->zero.compute));
}

/* Enqueues a step and waits for nothing: its places of batches are those of the step before the last, which has ended
 * (finish_step). So at most STEPS_IN_FLIGHT steps are enqueued. */
static void train_step(Run* run)
{
    int slot = (int)(run->step % STEPS_IN_FLIGHT);
    profile_step_begin(slot);
    if (run->comm.watch != nullptr) run->comm.watch->step = run->step + 1;
    size_t asked_before = run->comm.asked_bytes, waits_before = comm_host_waits(&run->comm);
    long faults_before = page_faults();
    zero_step_begin(&run->zero);
    int G = (int)step_micro_steps(run, run->step), T = step_seq_len(run, run->step);
    size_t position = 0;
    if (run->train != nullptr) {
        position = loader_position(run->train);
        if ((size_t)G != run->train->config.G) loader_seek(run->train, position, (size_t)G);
    }
    StepConfig config = run->config;
    config.nominal_toks = (double)run->B * G * run->comm.num_ranks * T;
    float dloss = (float)(1.0 / config.nominal_toks);
    run->model.drops = true;
    for (int micro = 0; micro < G; micro++) {
        phase_micro_begin();
        load_batch(run, run->train, (size_t)(slot * run->G + micro), T);
        run->model.first_sequence = position + ((size_t)micro * run->comm.num_ranks + run->comm.rank) * run->B;
        model_train_micro(&run->model, run->B, T, dloss, micro, G);
        print_bar(run, micro);
    }
    phase_micro_end();
    run->model.drops = false;
    zero_step_ask(&run->zero, signals_take());
    zero_step_end(&run->zero, config, optimizer_config(run->flags), slot);
    run->step_asked_bytes += run->comm.asked_bytes - asked_before;
    run->step_waits += comm_host_waits(&run->comm) - waits_before;
    run->step_page_faults[slot] = page_faults() - faults_before;
    profile_step_end();
}

/* Every rank comes here at the same step. */
[[noreturn]] static void stop_at_nonfinite(Run* run, const StepState* s, size_t step, int slot)
{
    die("step %zu: the gradient is not finite, %s; there is an Inf or NaN in %s (loss %g): lower -l, or look at the "
        "data; the last checkpoint is as it was", step,
        s->loss_scale_exhausted ? "at the smallest loss scale" : "10 times in a row", nonfinite_name(run, slot),
        s->loss);
}

/* Waits for the result of step `step` (counted from 1), prints and logs it, stops when numbers have gone wrong for
 * good. */
static void finish_step(Run* run, size_t step, const char* hash)
{
    int slot = (int)((step - 1) % STEPS_IN_FLIGHT);
    double phases_ms[NUM_PHASES];
    profile_step_wait(slot);           // the one wait of training: the next step is enqueued
    run->result_waits++;
    double took_ms = profile_phases_ms(slot, phases_ms);
    const StepState* s = &run->zero.h_state[slot];
    print_step(run, s, step, slot, took_ms * 1e-3);
    log_phases(&run->log, phases_ms);
    if (hash != nullptr) log_text(&run->log, "state_hash", hash);
    log_end(&run->log);
    run->seen_skip = s->skip == Skip::NONFINITE;
    Ask ask = s->asked_to_end ? Ask::END : s->asked_to_save ? Ask::SAVE : Ask::NONE;
    if (ask > run->ask) run->ask = ask;
    if (s->loss_scale_exhausted || (s->num_skipped_in_a_row >= 10 && !run->config.dynamic_loss_scale))
        stop_at_nonfinite(run, s, step, slot);
}

typedef struct { double loss; double num_tokens; } EvalResult;   // of no token: cut short

/* Between steps, where the hosts may wait for one another. */
static Ask ask_outside_step(Run* run)
{
    Ask ask = signals_agree(&run->comm);
    if (ask > run->ask) run->ask = ask;
    return run->ask;
}

/* The whole validation set (or --eval-batches of it): sum of losses / tokens. Ranks without data run empty batches. A
 * run that is asked to end cuts it short. */
static EvalResult evaluate(Run* run)
{
    Loader* val = run->val;
    Zero* z = &run->zero;
    size_t per_batch = (size_t)run->B * run->comm.num_ranks, num_batches = ceil_div(val->num_windows, per_batch);
    if (run->flags->eval_batches > 0 && (size_t)run->flags->eval_batches < num_batches)
        num_batches = run->flags->eval_batches;
    loader_seek(val, 0);
    double* sums = z->step_sums;   // free between steps
    CUDA_CHECK(cudaMemsetAsync(sums, 0, 2 * sizeof(double), z->compute));
    for (size_t i = 0; i < num_batches; i++) {
        if (ask_outside_step(run) == Ask::END) return EvalResult{};      // there is no step after it
        cudaEvent_t copied = run->batch_copied[i % 2];
        CUDA_CHECK(cudaEventSynchronize(copied));                // the copy before the last
        load_batch(run, val, i % 2, run->T);
        CUDA_CHECK(cudaEventRecord(copied, z->compute));
        model_eval_micro(&run->model, sums, run->B, run->T);
    }
    comm_all_reduce(&run->comm, sums, 2, ncclFloat64, z->compute);
    double h_sums[2];
    CUDA_CHECK(cudaMemcpyAsync(h_sums, sums, sizeof h_sums, cudaMemcpyDeviceToHost, z->compute));
    CUDA_CHECK(cudaStreamSynchronize(z->compute));
    zero_ring_forget(z);
    return EvalResult{h_sums[1] / h_sums[0], h_sums[0]};
}

static void evaluate_and_say(Run* run)
{
    if (!run->has_val) return;
    EvalResult r = evaluate(run);
    run->val_due = r.num_tokens == 0;
    if (run->val_due) return;
    double bits = 0;
    if (run->val_set.text_bytes > 0)
        bits = r.loss / M_LN2 * (double)run->val_set.num_toks / (double)run->val_set.text_bytes;
    if (run->flags->eval) SAY("val | ");
    else SAY("val  %zu/%zu | ", run->step, run->num_steps);
    SAY("loss %.6f | perplexity %.3f per token, %.0f tokens", r.loss,
        exp(r.loss), r.num_tokens);
    if (bits > 0) SAY(" | %.4f bits per byte", bits);
    if (run->val_set.num_words > 0)
        SAY(" | perplexity %.3f per word",
            exp(r.loss * (double)run->val_set.num_toks / (double)run->val_set.num_words));
    if (run->flags->eval_stride > 0) SAY(" | windows of %d every %lld", run->T, (long long)run->flags->eval_stride);
    SAY("\n");
    log_begin(&run->log);
    log_int(&run->log, "step", (long long)run->step);
    log_real(&run->log, "val_loss", r.loss);
    log_int(&run->log, "val_tokens", (long long)r.num_tokens);
    if (bits > 0) log_real(&run->log, "bits_per_byte", bits);
    log_end(&run->log);
}

// -------------------------------------------------------------------------------------------------------- the loop
static void train(Run* run)
{
    const Flags* f = run->flags;
    run->on_terminal = on_terminal();
    size_t first = run->step, unread = first + 1;   // first step whose result has not been seen
    size_t waits_before = comm_host_waits(&run->comm);
    trace_open(run);
    if (run->val_due) evaluate_and_say(run);
    while (run->step < run->num_steps && run->ask != Ask::END) {
        train_step(run);
        size_t step = ++run->step;
        for (; unread < step; unread++) finish_step(run, unread, nullptr);
        bool last = step == run->num_steps;
        bool saves = f->out[0] && (last || run->ask != Ask::NONE || (f->save_every > 0 && step % f->save_every == 0));
        bool evals = last || (f->eval_every > 0 && step % f->eval_every == 0);
        bool hashes = last || saves || (f->hash_every > 0 && step % f->hash_every == 0);
        trace_poll(run, step - first, false);
        bool waits = evals || hashes || run->seen_skip || run->ask != Ask::NONE;
        size_t settled = waits ? step : step - 1;       // else the newest is left for next time
        char hash[32] = "";
        if (hashes) snprintf(hash, sizeof hash, "%016llx", zero_state_hash(&run->zero));
        if (f->check_replicas > 0 && step % f->check_replicas == 0)
            comm_ensure_replica(&run->comm, zero_replica_hash(&run->zero), step);
        for (; unread <= settled; unread++) finish_step(run, unread, hashes && unread == step ? hash : nullptr);
        if (last && hash[0]) {
            SAY("state hash %s after step %zu\n", hash, step);
            repeat_say(run, hash);
        }
        if (evals) evaluate_and_say(run);
        saves = saves || (f->out[0] && run->ask != Ask::NONE);          // asked since
        if (saves) save(run);
        else save_poll(run, false);
        if (run->ask == Ask::SAVE) {
            if (!saves) SAY("asked to save: there is no -o to save to\n");
            run->ask = Ask::NONE;
        }
        if (saves) ask_outside_step(run);
    }
    save_poll(run, true);
    trace_poll(run, run->step - first, true);
    if (run->ask == Ask::END)
        SAY("asked to end: stops after step %zu%s\n", run->step,
            f->out[0] ? ", which is saved" : "; nothing is saved without -o");
    if (run->comm.num_ranks > 1 && run->step > 0)
        SAY("sent    %zu bytes by rank 0, asked for %zu; %zu in steps, %zu a step as planned%s\n",
            comm_sent_so_far(&run->comm), run->comm.asked_bytes, run->step_asked_bytes, wire_bytes_per_step(run),
            run->batch_ramp.steps > 0 ? " at the end of the ramp" : "");
#ifndef DEVICE_CUDA
    SAY("waits   of the host: %zu inside steps, %zu for a step's result, %zu others\n", run->step_waits,
        run->result_waits, comm_host_waits(&run->comm) - waits_before - run->step_waits - run->result_waits);
#endif
}

// --------------------------------------------------------------------------------------------------- weights, modes
static void weights_init(Run* run)
{
    const Shard* s = &run->model.shard;
    float* bounce = run->zero.bounce;
    for (int i = 0; i < s->num_tensors; i++) {
        const Tensor* t = &s->tensors[i];
        Range part = tensor_part(t, zero_owned(&run->zero, t->unit));
        for (size_t done = 0; done < part.count; ) {
            size_t n = part.count - done < BOUNCE_ELEMS ? part.count - done : BOUNCE_ELEMS;
            tensor_init(bounce, t, tensor_file_place(t, part.first) + done, n, (uint64_t)run->flags->seed);
            zero_state_from_host(&run->zero, STATE_WEIGHTS, t->unit, part.first + done, n, bounce);
            done += n;
        }
    }
    zero_params_loaded(&run->zero);
}

/* The weights of a checkpoint, which has checksums, of another folder, or new ones. */
static void weights_start(Run* run, const char* folder, bool from_scratch)
{
    const Config* c = &run->model.config;
    char file[4200], why[1024];
    size_t read_bytes;
    snprintf(file, sizeof file, "%s/state.json", folder);
    if (c->hf_text == nullptr || from_scratch) weights_init(run);
    else if (!all_ranks_see(&run->comm, file)) weights_load(&run->zero, folder, c->tied);
    else if (!checkpoint_load(&run->zero, folder, c->tied, nullptr, &read_bytes, why)) die("%s", why);
}

/* At the end of a run, where there is a tokenizer: what the model makes of the validation text's beginning. On rank 0;
 * the others wait, or at stage 3 take part. */
static void say_sample(Run* run)
{
    if ((run->comm.rank == 0 || run->setting.stage == 3) && run->tokenizer_path[0]) {
        int num_ids = run->T < 16 ? run->T : 16;   // of the first validation window, which is rank 0's
        loader_seek(run->val, 0);
        loader_next(run->val, run->h_tokens, run->h_targets);
        if (run->setting.stage == 3) comm_broadcast_host(&run->comm, run->h_tokens, num_ids * sizeof(int));
        SAY("sample  after the first %d tokens of the validation text:\n", num_ids);
        JsonText heard = {};
        generate_sample(&run->model, run->flags, run->tokenizer_path, run->h_tokens, num_ids, &heard);
        if (heard.text != nullptr) {
            char* valid = text_as_utf8(heard.text, heard.length);
            log_begin(&run->log);
            log_int(&run->log, "step", (long long)run->step);
            log_text(&run->log, "sample", valid);
            log_end(&run->log);
            free(valid);
        }
        json_text_free(&heard);
    }
    comm_barrier_idle(&run->comm);
}

/* Flags, files and plan: all that can be refused before anything is allocated. Returns the model's name; resume_path is
 * the checkpoint to go on from, or empty. */
static const char* run_prepare(Run* run, bool trains, char (&resume_path)[4096])
{
    const Flags* f = run->flags;
    device_init(&run->device, run->comm.host_rank, run->comm.host_num_ranks, (size_t)f->device_mb);
    choose_resume(run, resume_path);
    const char* model_name = f->model[0] ? f->model : resume_path[0] ? resume_path : DEFAULT_MODEL;
    if ((trains && !f->bench) || f->eval || (f->plan && access(f->data, R_OK) == 0)) open_data(run);
    choose_model(run, model_name, run->train_set.num_files > 0 ? (int)run->train_set.files[0].vocab_size : 0);
    choose_tokenizer(run, model_name);
    int context = run->model.config.context;
    run->T = f->seq_len > 0 ? (int)f->seq_len : context < 1024 ? context : 1024;
    ENSURE(run->T <= context, "-t %d is longer than the model's context of %d positions: lower it", run->T, context);
    dropout_refuse(run);
    if (f->plan && f->ranks > 0) run->comm.num_ranks = (int)f->ranks;
    if (f->gpu[0]) device_imagine(&run->device, f->gpu);
    else if (f->plan || f->auto_) device_measure_memory(&run->device);
    if (!f->elastic || !batch_of_run(run, resume_path)) batch_arithmetic(run, run->comm.num_ranks);
    model_tensors(&run->model.shard, &run->model.config, run->comm.num_ranks, f->fp32_tensors);
    rates_apply(&run->model.shard, f);
    run->setting = Setting{(int)f->zero, Recompute::NONE, 1, run->B, run->G, offloaded_from_flag(f->offload),
                           storage_from_flags(f)};
    recompute_from_flag(&run->setting, f->recompute, run->model.config.L);
    if (f->auto_) setting_choose(run, device_free_bytes(run));
    const char* mismatch = offload_mismatch(&run->setting, f);
    if (mismatch != nullptr) die_usage("--offload %s", mismatch);
    run->batch_ramp = ramp_parse("--batch-ramp", f->batch_ramp, (size_t)run->B * run->comm.num_ranks,
                                 run->global_batch);
    run->seq_ramp = ramp_parse("--seq-ramp", f->seq_ramp, 8, run->T);
    if (run->train_set.num_files > 0) open_loaders(run);
    if (f->bench) run->num_steps = bench_total_steps(f);
    run->config = step_config(run);
    if (!f->plan) {
        comm_init_nccl(&run->comm);
        matmul_init();
    }
    plan_run(run, trains || f->plan);
    return model_name;
}

static void run_allocate(Run* run)
{
    size_t need_bytes = plan_bytes(&run->plan, Place::DEVICE), have_bytes = device_free_bytes(run);
    if (need_bytes > have_bytes) {
        if (run->comm.rank == 0) {
            fprintf(stderr, "need %.1f MiB, have %.1f MiB. Change\n", need_bytes / 1048576.0, have_bytes / 1048576.0);
            ladder_print(run, stderr, have_bytes);
        }
    }
    plan_allocate(&run->plan);
    zero_start(&run->zero);
    model_start(&run->model);
    for (int k = 0; k < 2; k++) CUDA_CHECK(cudaEventCreateWithFlags(&run->batch_copied[k], cudaEventDisableTiming));
    StepState state = step_state_init(run->config, first_loss_scale(run->flags));
    CUDA_CHECK(cudaMemcpy(run->zero.state, &state, sizeof state, cudaMemcpyHostToDevice));
}

static void run_free(Run* run)
{
    log_close(&run->log);
    if (run->train != nullptr) loader_close(run->train);
    if (run->val != nullptr) loader_close(run->val);
    for (cudaEvent_t event : run->batch_copied) CUDA_CHECK(cudaEventDestroy(event));
    profile_free();
    saver_free(&run->saver);
    if (run->model.offloads) offload_free(&run->model.inputs);
    zero_free(&run->zero);
    plan_ensure_held(&run->plan, "at the end");
    plan_run_free(run);
    plan_free(&run->plan);
    shard_free(&run->model.shard);
    token_set_close(&run->train_set);
    token_set_close(&run->val_set);
    free((void*)run->model.config.hf_text);
    cJSON_Delete(run->products);
    matmul_free();
}

/* A run from its flags to its end, in this file's precision. */
void RUN_ALL(const Flags* f, Comm* comm)
{
    Run run_ = {}, *run = &run_;
    run->flags = f;
    run->comm = *comm;
    bool generates = f->given[FLAG_generate] || f->given[FLAG_prompts], exports = f->given[FLAG_export_];
    bool trains = !generates && !exports && !f->eval && !f->plan && !f->given[FLAG_choices];
    char resume_path[4096];
    const char* model_name = run_prepare(run, trains, resume_path);
    repeat_check(run, VERSION);
    if (trains || f->plan) print_start(run, model_name);
    if (f->plan) return;
    ensure_same_start(run);
    Ceilings ceilings = f->bench ? ceilings_measure(run) : Ceilings{};
    run_allocate(run);
    if (resume_path[0] && trains) resume(run, resume_path);
    else weights_start(run, resume_path[0] ? resume_path : model_name, f->from_scratch && !resume_path[0]);
    if (exports) {
        weights_export(&run->zero, f->export_, weights_dtype(f->export_dtype), (size_t)f->shard_bytes,
                       write_small_files, run);
        SAY("exported %s\n", f->export_);
    } else if (generates) {
        ENSURE(run->tokenizer_path[0] || f->given[FLAG_prompts],
               "--generate needs a tokenizer.json: none in %s or %s; give --tokenizer FILE", model_name, f->data);
        if (run->comm.rank == 0 || run->setting.stage == 3)
            generate(&run->model, f->no_kv_cache ? nullptr : &run->decoder, f, run->tokenizer_path);
        comm_barrier_idle(&run->comm);
    } else if (f->given[FLAG_choices]) {
        ENSURE(run->tokenizer_path[0], "--choices needs a tokenizer.json: none in %s or %s; give --tokenizer FILE",
               model_name, f->data);
        ChoiceCounts counts = choices_count(&run->model, run->tokenizer_path, f->choices);
        SAY("choices %s: %.0f lines | accuracy %.4f by likelihood, %.4f by likelihood per byte\n", f->choices,
            counts.num_items, counts.num_right / counts.num_items, counts.num_right_per_byte / counts.num_items);
    } else if (f->eval) {
        ENSURE(run->has_val, "--eval needs validation shards: no val_*.bin in %s; give --val", f->data);
        evaluate_and_say(run);
    } else if (f->bench) {
        tune(run, resume_path);
        bench(run, ceilings, VERSION, model_name);
    } else {
        signals_begin();
        save_start(run);
        tune(run, resume_path);
        log_start(run, VERSION, model_name);
        record_start(run, VERSION, VERSION_LINE, model_name);
        tokenizer_keep(run);
        train(run);
        if (run->has_val && f->sample_tokens > 0 && run->ask != Ask::END && run->num_steps > 0) say_sample(run);
    }
    run_free(run);
    *comm = run->comm;
}

#ifdef PREC_MAIN
static void refuse_what_is_not_there(const Flags* f)
{
    char name[64];
    if (strcmp(f->precision, "fp16") != 0)
        for (FlagIdx idx : {FLAG_loss_scale, FLAG_initial_scale_power, FLAG_loss_scale_window, FLAG_hysteresis,
                            FLAG_min_loss_scale, FLAG_consecutive_hysteresis})
            if (f->given[idx]) die_usage("%s is for -p fp16: leave it out", flag_long_name(&flag_rows[idx], name));
    double first_scale = exp2((double)f->initial_scale_power);
    if (strcmp(f->precision, "fp16") == 0 && f->loss_scale == 0 && first_scale < f->min_loss_scale)
        die_usage("--initial-scale-power %lld starts the loss scale at %g, below --min-loss-scale %g: raise it, or "
                  "lower that", (long long)f->initial_scale_power, first_scale, f->min_loss_scale);
    if (f->loss_scale > 0)
        for (FlagIdx idx : {FLAG_initial_scale_power, FLAG_loss_scale_window, FLAG_hysteresis, FLAG_min_loss_scale,
                            FLAG_consecutive_hysteresis})
            if (f->given[idx] && f->from[idx] == FROM_COMMAND_LINE)
                die_usage("--loss-scale %g stays as it is, so that %s means nothing: leave one of them out",
                          f->loss_scale, flag_long_name(&flag_rows[idx], name));
    if (f->spike_skip && f->spike_deviations == 0)
        die_usage("--spike-skip with --spike-deviations 0: no step is a spike; leave one of them out");
    if (f->fp32_tensors[0] && strcmp(f->precision, "fp32") == 0)
        die_usage("--fp32-tensors is for -p bf16 and fp16: in fp32 all tensors are; leave it out");
    rates_refuse(f);
#ifdef DEVICE_CPU
    if (f->tune)
        die_usage("--tune chooses among cuBLASLt's algorithms; this build multiplies with its own: leave it out");
#endif
    bench_refuse(f);
    if (f->given[FLAG_gpu] && !f->plan) die_usage("--gpu goes with --plan; a run takes the GPU that is here");
    if (f->given[FLAG_ranks] && !f->plan) die_usage("--ranks goes with --plan; a run takes its ranks from mpirun -np");
    if ((f->given[FLAG_export_dtype] || f->given[FLAG_shard_bytes]) && !f->given[FLAG_export_])
        die_usage("--export-dtype and --shard-bytes go with --export; checkpoints hold fp32");
    if (f->given[FLAG_epochs] && f->given[FLAG_steps])
        die_usage("-n and --epochs both say where the run ends: give one");
    if (f->elastic && !f->given[FLAG_resume]) die_usage("--elastic goes with --resume: it keeps a checkpoint's batch");
    for (FlagIdx idx : {FLAG_save_every, FLAG_keep, FLAG_keep_every, FLAG_on_save_error})
        if (f->given[idx] && !f->out[0])
            die_usage("%s needs -o FOLDER to save to", flag_long_name(&flag_rows[idx], name));
    if (f->given[FLAG_min_lr] && f->min_lr > f->lr)
        die_usage("--min-lr %g is above the peak --lr %g: lower it", f->min_lr, f->lr);
    int modes = f->plan + f->eval + f->given[FLAG_generate] + f->given[FLAG_prompts] + f->given[FLAG_export_] +
                f->given[FLAG_choices] + f->bench;
    if (f->tune && modes > f->bench) die_usage("--tune goes with training: leave it out");
    if (modes > 1)
        die_usage("--plan, --bench, --eval, --choices, --generate, --prompts and --export are different modes: give "
                  "one");
}

/* The precisions that this binary holds, Makefile's PREC or this one alone, each for every one of its ISAs. */
typedef void RunAll(const Flags* f, Comm* comm);
#define ISA(isa) RunAll run_all_fp32_##isa, run_all_bf16_##isa, run_all_fp16_##isa;
ISAS
#undef ISA
static const struct { const char *name, *isa; RunAll* run_all; } precisions[] = {
#if !defined(HAVE_FP32) && !defined(HAVE_BF16) && !defined(HAVE_FP16)
    {FLOATX_NAME, "native", RUN_ALL},
#endif
#ifdef HAVE_FP32
#define ISA(isa) {"fp32", #isa, run_all_fp32_##isa},
    ISAS
#undef ISA
#endif
#ifdef HAVE_BF16
#define ISA(isa) {"bf16", #isa, run_all_bf16_##isa},
    ISAS
#undef ISA
#endif
#ifdef HAVE_FP16
#define ISA(isa) {"fp16", #isa, run_all_fp16_##isa},
    ISAS
#undef ISA
#endif
};

/* The names of precisions, or of the instruction sets of one. */
static const char* precisions_have(char (&have)[64], const char* isas_of = nullptr)
{
    have[0] = 0;
    const char* last = "";
    for (const auto& p : precisions) {
        const char* word = isas_of != nullptr ? p.isa : p.name;
        if (isas_of != nullptr ? strcmp(p.name, isas_of) != 0 : strcmp(word, last) == 0) continue;
        snprintf(have + strlen(have), sizeof have - strlen(have), "%s%s", have[0] ? " " : "", word);
        last = word;
    }
    return have;
}

/* Its first row that this machine can run, or the one that TRAIN_GPT_ISA names. */
static RunAll* precision_find(const char* name)
{
    char have[64];
    bool found = false;
    const char* asked = getenv("TRAIN_GPT_ISA");
    for (const auto& p : precisions) {
        if (strcmp(p.name, name) != 0) continue;
        found = true;
        if ((asked == nullptr || strcmp(p.isa, asked) == 0) && isa_runs(p.isa)) return p.run_all;
    }
    if (!found)
        die_usage("-p %s is not in this binary, have %s: build it in with make PREC='%s'", name, precisions_have(have),
                  name);
    if (asked != nullptr)
        die_usage("TRAIN_GPT_ISA is %s: this binary has %s in %s, of which this machine must be able to run it", asked,
                  precisions_have(have, name), name);
    die_usage("this machine runs none of the instruction sets of this binary, %s: build it here with make",
              precisions_have(have, name));
}

int main(int argc, char** argv)
{
    Flags flags;
    Comm comm;
    char have[64];
    die_rank = comm_launcher_rank();
    flags_parse(&flags, argc, argv);
    cJSON* repeated = repeat_flags(&flags);
    DsConfig config;
    ds_config_read(&config, &flags);
    if (flags.print_config && die_rank == 0) ds_config_print(&config, stdout);
    ds_config_refuse(&config);
    if (flags.print_config) {
        ds_config_free(&config);
        return 0;
    }
    auto run_all = precision_find(flags.precision);
    refuse_what_is_not_there(&flags);
    if (flags.help || flags.version || flags.report) {
        if (die_rank == 0 && flags.help) flags_help(stdout);
        if (die_rank == 0 && flags.version) printf("train_gpt " VERSION_LINE "\n");
        if (die_rank == 0 && flags.report) environment_print(VERSION_LINE, precisions_have(have));
        return 0;
    }
    comm_init(&comm, flags.timeout);
    comm_watch(&comm, flags.timeout);
    run_all(&flags, &comm);
    comm_free(&comm);
    ds_config_free(&config);
    cJSON_Delete(repeated);
    return 0;
}
#endif
