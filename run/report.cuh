/* report.cuh: what a run prints and logs: settings, plan and estimate at the start, a line per step, a progress bar for
 * long steps. */
#pragma once
#include "fit.cuh"
#include "model_files.cuh"
#include "version.h"

// --------------------------------------------------------------------------------------------------------- the start
/* Prints the estimated time of a step; with --plan also that of other settings, and whether this one fits. */
static void print_estimate(const Run* run)
{
    if (run->comm.rank != 0) return;
    const Setting* s = &run->setting;
    Estimate e = setting_estimate(run, *s);
    printf("time    %.4g Gflop per step and rank", costs_sum(&e.costs, nullptr).flops * 1e-9);
    if (e.step_s > 0)
        printf(": estimated %.3g s (forward %.3g, backward %.3g, update %.3g, exposed communication %.3g), %.4g tok/s",
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
    printf("does not fit: needs %.1f MiB, the device has %.1f MiB. To make it fit, change:\n",
           e.device_bytes / 1048576.0, have_bytes / 1048576.0);
    ladder_print(run, stdout, have_bytes);
}

/* Prints the flags so that they can be pasted into a shell. */
static void print_flags(const Flags* f)
{
    printf("flags  ");
    for (const FlagRow& row : flag_rows) {
        const int idx = (int)(&row - flag_rows);
        char name[64], buf[64];
        if (!f->given[idx] || f->from[idx] != FROM_COMMAND_LINE || idx == FLAG_repeat) continue;
        const char* value = flag_value(f, &row, buf);
        printf(" %s", flag_long_name(&row, name));
        if (row.kind == SWITCH && *value == 't') continue;
        printf("=");
        bool plain = value[0] != 0 && value[strspn(value, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                                          "0123456789_-+=.,:/@%")] == 0;
        if (!plain) printf("'");
        for (const char* p = value; *p; p++) {
            const unsigned char c = (unsigned char)*p;
            const bool is_c1 = c >= 0x80 && c < 0xa0 && p > value && p[-1] == '\xc2';
            if (c == '\'') printf("'\\''");
            else if (c < 0x20 || c == 0x7f || is_c1) printf("'$'\\x%02x''", c);      // no terminal gets it raw
            else printf("%c", c);
        }
        if (!plain) printf("'");
    }
    printf("\n");
}

/* Prints stage and recomputation, which --auto may have chosen, and communication volume. Ranks of a CPU share its
 * memory, whose bandwidth bounds the update. */
static void print_zero(Run* run)
{
    char level[16];
    SentBytes sent = zero_sent_bytes(&run->zero, nullptr);
    char optimizer_sent[64] = "";
    if (sent.optimizer > 0)
        snprintf(optimizer_sent, sizeof optimizer_sent, ", %s %zu bytes", run->flags->optimizer, sent.optimizer);
    const size_t activations = model_sent_bytes(&run->model, false) + model_sent_bytes(&run->model, true);
    char activations_sent[64] = "";
    if (activations > 0)
        snprintf(activations_sent, sizeof activations_sent, ", activations of --tp %.2f", activations / 1048576.0);
    const char* collective = run->setting.stage == 0 ? "all-reduce" : "reduce-scatter";
    SAY("ZeRO    stage %d, -r %s | communication volume per step and rank %.2f MiB: %s of gradients %.2f, all-gather "
        "of parameters %.2f, all-reduce of sums %zu bytes%s%s | %s\n", run->setting.stage,
        recompute_name(run->setting, level),
        sent_bytes_per_step(run) / 1048576.0, collective, sent.gradients / 1048576.0, sent.parameters / 1048576.0,
        sent.sums, optimizer_sent, activations_sent, run->flags->overlap ? "overlapped" : "not overlapped");
    if (!device_is_gpu(&run->device) && run->comm.host_num_ranks > 1 && run->dp > 1 && run->setting.stage == 0 &&
        !run->flags->auto_)
        SAY("advice  -z 1 is faster on one host: at stage 0 each of its %d ranks updates all parameters, through the "
            "same memory\n", run->comm.host_num_ranks);
}

static void print_long_documents(const Run* run, const Loader* l)
{
    if (l->num_long == 0) return;
    SAY(", %zu documents longer than -t %s", l->num_long,
        l->config.cuts ? "cut" : "left out (--too-long cut keeps them)");
}

static void print_data(const Run* run, const TokenSet* set, const Loader* l)
{
    SAY("data    %s: %zu tokens in %zu shard%s", run->flags->data, set->num_toks, set->num_files,
        set->num_files > 1 ? "s" : "");
    if (set->num_counted < set->num_toks) SAY(", of which %zu count in the loss", set->num_counted);
    if (run->documents) {
        SAY(", %zu documents in %zu windows of %d, %.1f %% full", l->num_docs, l->num_windows, run->T,
            100.0 * (double)l->num_doc_inputs / ((double)l->num_windows * run->T));
        print_long_documents(run, l);
        SAY("\n");
    } else {
        SAY(", %zu windows of %d, %zu tokens at ends of shards unused\n", l->num_windows, run->T, l->num_tail_toks);
    }
    for (size_t s = 0; s < set->num_sources && set->num_sources > 1; s++)
        SAY("        %.1f %% of the windows from %s, which has %zu\n",
            100.0 * (double)(l->source_mix[s + 1] - l->source_mix[s]) / LOADER_MIX, set->sources[s].name,
            l->source_window[s + 1] - l->source_window[s]);
}

static void print_start(Run* run, const char* model_name)
{
    const Config* c = &run->model.whole;
    const Flags* f = run->flags;
    SAY("train_gpt " VERSION " | %s, %s | %d rank%s, %d thread%s each", run->device.name, FLOATX_NAME,
        run->comm.num_ranks, run->comm.num_ranks > 1 ? "s" : "", run->device.num_threads,
        run->device.num_threads > 1 ? "s" : "");
    if (run->device.peak_flops > 0) SAY(" | peak %.4g Gflop/s per rank", run->device.peak_flops * 1e-9);
    if (run->device.peak_source[0]) SAY(" (%s)", run->device.peak_source);
    if (f->config[0]) SAY("\nconfig  %s (--print-config shows how each key is used)", f->config);
    SAY("\n");
    if (run->comm.rank == 0) print_flags(f);
    SAY("model   %s%s: %s, L %d, C %d, NH %d, NKV %d, HS %d, F %d, V %d (padded to %d), context %d | "
        "%.2fM parameters\n", model_name, f->model[0] ? "" : " (the default of this build; -m takes another)",
        c->family->model_type, c->L, c->C, c->NH, c->NKV, c->HS, c->F, c->V, c->VP, c->context,
        run->model.shard.num_params * 1e-6);
    SAY("%s", c->notes);
    if (f->bench) SAY("data    synthetic tokens\n");
    else if (run->train == nullptr) SAY("data    none in %s\n", f->data);   // --plan needs no data
    else print_data(run, &run->train_set, run->train);
    if (run->has_val) {
        SAY("val     %zu tokens in %zu windows", run->val_set.num_toks, run->val->num_windows);
        print_long_documents(run, run->val);
        SAY("\n");
    }
    SAY("batch   %zu sequences = %d per micro-step x %d micro-steps x %d %s | %zu tokens per step\n",
        run->global_batch, run->B, run->G, run->dp, replicas_word(run), run->global_batch * run->T);
    if (f->tp > 1)
        SAY("layout  %d replica%s of %lld ranks | this is rank t + %lld d, part t of replica d\n", run->dp,
            run->dp > 1 ? "s" : "", (long long)f->tp, (long long)f->tp);
    char last_lr[64] = "";
    if ((schedule_find(f->schedule)->traits & ENDLESS) == 0 && run->num_steps > 0)
        snprintf(last_lr, sizeof last_lr, " to %.3g at step %zu", schedule_lr(run->config, run->num_steps - 1),
                 run->num_steps);
    char as[64] = "";
    if (run->config.as_deepspeed)
        snprintf(as, sizeof as, " as DeepSpeed's %s", schedule_find(f->schedule)->deepspeed);
    SAY("steps   %zu = %.2f epochs | lr %.3g %s%s%s, warm-up %zu steps | seed %lld\n", run->num_steps,
        run->train == nullptr ? 0 : epochs_before(run, run->num_steps), run->config.peak_lr, f->schedule, as,
        last_lr, (size_t)run->config.warmup_steps, (long long)f->seed);
    if (run->num_steps > 0 && run->config.warmup_steps > run->num_steps &&
        (schedule_find(f->schedule)->traits & WARMS_UP_ALL) == 0)
        SAY("warm-up %zu steps are more than the run has: the learning rate gets to %.3g of the peak %.3g\n",
            (size_t)run->config.warmup_steps, schedule_lr(run->config, run->num_steps - 1), run->config.peak_lr);
    if (tunes_weights(f) && !f->given[FLAG_lr] && run->first_step == 0)
        SAY("        lr %.3g since -m names weights, which that for new ones would undo: -l takes another\n", f->lr);
    if (run->comm.rank == 0) rates_print(f, stdout);
    if (f->fp32_tensors[0])
        SAY("fp32    %d tensors, %zu elements with padding\n",
            num_front_tensors(&run->model.shard, run->model.shard.num_fp32_units),
            run->model.shard.units[run->model.shard.num_fp32_units].range.first);
    if (run->batch_ramp.steps > 0)
        SAY("ramp    global batch from %zu, over %zu steps\n", run->batch_ramp.from, run->batch_ramp.steps);
    if (run->seq_ramp.steps > 0)
        SAY("ramp    tokens of a sequence from %zu, over %zu steps\n", run->seq_ramp.from, run->seq_ramp.steps);
    if (run->model.dropout > 0 || run->model.attention_dropout > 0)
        SAY("dropout %g of embeddings and branches, %g of attention probabilities\n", run->model.dropout,
            run->model.attention_dropout);
    else if (c->pdrop > 0 && !f->given[FLAG_dropout])
        SAY("dropout none: transformers takes %g for %s/config.json, --dropout %g turns it on\n", c->pdrop, model_name,
            c->pdrop);
    if (run->comm.num_ranks > 1 || f->plan || f->auto_ || f->verbose) print_zero(run);
    if (run->comm.rank == 0) plan_print(&run->plan, stdout);
    print_estimate(run);
    if (run->no_sample[0]) SAY("sample  none: %s\n", run->no_sample);
    if (f->out[0]) tokenizer_say(run, model_name);
    else SAY("output  none (-o FOLDER saves log and checkpoints)\n");
    fflush(stdout);
}

// ------------------------------------------------------------------------------------------------------------ a step
/* A finished step. */
typedef struct StepReport {
    size_t step;                    // counted from 1
    int slot;
    double took_s, toks_per_s;
    double phases_ms[NUM_PHASES];
    const char* nonfinite;          // FirstNonFinite.what; null: all are finite
    const char* state_hash;         // null: not computed for this step
} StepReport;

static_assert(NUM_PHASES == 7, "STEP_FIELDS has a row for each phase");
#define PHASE_MS(phase) r->phases_ms[(int)Phase::phase]

/* The log line of a step, see data/run_log.h. To log another number, add a row, computed from run, r and s. */
#define STEP_FIELDS(F) \
    F(step,             int,  "",               true, (long long)r->step, "counted from 1") \
    F(loss,             real, "nats per token", true, s->num_toks > 0 ? s->loss : NAN, "mean over the global batch") \
    F(norm,             real, "",               true, s->grad_norm, "global gradient norm before clipping") \
    F(lr,               real, "",               true, s->lr, "learning rate") \
    F(step_ms,          real, "ms",             true, r->took_s * 1e3, "the step, by events on the device") \
    F(tok_per_s,        real, "tokens per second", true, r->toks_per_s, "of all ranks") \
    F(tokens,           int,  "tokens",         true, (long long)s->num_toks, "of the step, on all ranks") \
    F(skipped,          int,  "",               true, s->skip == Skip::NONFINITE || s->skip == Skip::SPIKE, "1 where the step changed nothing: non-finite gradients, or a spike with `--spike-skip`") \
    F(host_mib,         real, "MiB",            true, resident_bytes() / 1048576.0, "resident memory of rank 0's process") \
    F(page_faults,      int,  "",               true, run->step_page_faults[r->slot], "page faults of rank 0 within the step") \
    F(loss_scale,       real, "",               is_fp16(), s->used_loss_scale, "fp16 alone") \
    F(nonfinite,        text, "",               r->nonfinite != nullptr, r->nonfinite, "what was not finite first: a weight, an activation, or a gradient") \
    F(loss_deviations,  real, "standard deviations", s->is_spike, s->loss_deviations, "of a loss spike (`--spike-deviations`): above the running mean") \
    F(norm_deviations,  real, "standard deviations", s->is_spike, s->norm_deviations, "of a spike of the gradient norm") \
    F(state_hash,       text, "",               r->state_hash != nullptr, r->state_hash, "of all weights and moments, at checkpoints and at the end (`--hash-every`)") \
    F(data_ms,          real, "ms", PHASE_MS(DATA) > 0, PHASE_MS(DATA), "a micro-batch to the device; with the six below the sum is `step_ms` ([benchmarks.md](benchmarks.md))") \
    F(forward_ms,       real, "ms", PHASE_MS(FORWARD) > 0, PHASE_MS(FORWARD), "forward") \
    F(head_ms,          real, "ms", PHASE_MS(HEAD) > 0, PHASE_MS(HEAD), "output head and loss") \
    F(backward_ms,      real, "ms", PHASE_MS(BACKWARD) > 0, PHASE_MS(BACKWARD), "backward") \
    F(recompute_ms,     real, "ms", PHASE_MS(RECOMPUTE) > 0, PHASE_MS(RECOMPUTE), "activation recomputation") \
    F(communication_ms, real, "ms", PHASE_MS(COMMUNICATION) > 0, PHASE_MS(COMMUNICATION), "communication that no computation hides") \
    F(optimizer_ms,     real, "ms", PHASE_MS(OPTIMIZER) > 0, PHASE_MS(OPTIMIZER), "the update")

static void log_step(Run* run, const StepState* s, const StepReport* r)
{
    RunLog* log = &run->log;
    if (log->f == nullptr) return;
    log_begin(log);
    STEP_FIELDS(LOG_FIELD)
    log_end(log);
}

/* The end of a step's line if something unusual happened. */
static void remark_step(const StepState* s, const StepReport* r, char (&text)[256])
{
    text[0] = 0;
    if (s->skip == Skip::NO_TOKS) snprintf(text, sizeof text, " | SKIPPED: no token counts");
    if (r->nonfinite != nullptr) {
        snprintf(text, sizeof text, " | SKIPPED: non-finite %s", r->nonfinite);
    } else if (s->is_spike) {
        bool loss = s->loss_deviations > s->norm_deviations;
        snprintf(text, sizeof text, " | %s: %s %.1f deviations above its mean",
                 s->skip == Skip::SPIKE ? "SKIPPED" : "WARNING", loss ? "loss" : "norm",
                 loss ? s->loss_deviations : s->norm_deviations);
    }
}

static void print_step(Run* run, const StepState* s, const StepReport* r)
{
    char remark[256];
    const Flags* f = run->flags;
    if (run->comm.rank != 0) return;
    remark_step(s, r, remark);
    if (r->step % f->log_every != 0 && r->step != run->num_steps && !remark[0]) return;
    double flops = r->toks_per_s * model_flops_per_token(&run->model.whole, step_seq_len(run, r->step - 1));
    double peak_share = run->device.peak_flops > 0 ? flops / (run->device.peak_flops * run->comm.num_ranks) : 0;
    char loss[32] = "n/a", eta[32];
    if (s->num_toks > 0) snprintf(loss, sizeof loss, "%.6f", s->loss);
    long left_s = (long)(fmin(run->mean_step_s * (double)(run->num_steps - r->step), 1e15) + 0.5);
    if (left_s >= 3600) snprintf(eta, sizeof eta, "%ldh%02ldm", left_s / 3600, left_s / 60 % 60);
    else snprintf(eta, sizeof eta, "%ldm%02lds", left_s / 60, left_s % 60);
    if (run->bar_drawn) printf("\r\033[K");
    run->bar_drawn = false;
    printf("step %zu/%zu | loss %s | norm %.6f | lr %.2e | %.0f ms | ", r->step, run->num_steps, loss, s->grad_norm,
           s->lr, r->took_s * 1e3);
    if (r->toks_per_s >= 1e6) printf("%.2fM tok/s", r->toks_per_s * 1e-6);
    else if (r->toks_per_s >= 1e4) printf("%.1fk tok/s", r->toks_per_s * 1e-3);
    else printf("%.0f tok/s", r->toks_per_s);
    if (peak_share > 0) printf(" | %.1f%% peak", 100 * peak_share);
    if (is_fp16()) printf(" | scale %g", s->used_loss_scale);
    printf(" | %.2f GiB | eta %s%s\n", plan_bytes(&run->plan, Place::DEVICE) / 1073741824.0, eta,
           remark);
    fflush(stdout);
}

/* Is the output a terminal? mpirun gives its ranks one in any case, so this looks at the output of mpirun. */
static bool on_terminal(void)
{
    if (!isatty(1)) return false;
    if (die_num_ranks == 1 && getenv("OMPI_COMM_WORLD_RANK") == nullptr) return true;
    char link[64], target[256] = {};
    snprintf(link, sizeof link, "/proc/%d/fd/1", (int)getppid());
    return readlink(link, target, sizeof target - 1) > 0 &&
           (strncmp(target, "/dev/pts/", 9) == 0 || strncmp(target, "/dev/tty", 8) == 0);
}

/* Progress bar within a long step, on a terminal only. */
static void print_bar(Run* run, int micro)
{
    if (run->comm.rank != 0 || run->mean_step_s < 2 || !run->on_terminal) return;
    run->bar_drawn = true;
    char bar[33] = {};
    for (int i = 0; i < 32; i++) bar[i] = i * run->G < 32 * (micro + 1) ? '#' : '.';
    printf("\rstep %zu/%zu [%s] micro-step %d/%d", run->step + 1, run->num_steps, bar, micro + 1, run->G);
    fflush(stdout);
}
