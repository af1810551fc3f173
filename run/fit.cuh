/* fit.cuh: estimates for a setting: memory, time of a step (step_time.cuh), and what to change if it does not fit. */
#pragma once
#include "kernels/cpu/isa.h"
#include "run.cuh"
#include "model/step_time.cuh"

typedef struct Estimate {
    size_t device_bytes;
    Costs costs;
    StepTime time;
    double copy_s, step_s;     // copy_s: offload of activations; step_s: the step with it
} Estimate;

static const char* recompute_name(Setting s, char (&buf)[16])
{
    if (s.recompute == Recompute::BLOCKS && s.segment_layers > 1) snprintf(buf, sizeof buf, "%d", s.segment_layers);
    else snprintf(buf, sizeof buf, "%s", recompute_names[(int)s.recompute]);
    return buf;
}

/* Estimates this run with another setting. */
static Estimate setting_estimate(const Run* run, Setting s)
{
    Run* trial = (Run*)malloc_checked(sizeof(Run));
    memcpy((void*)trial, (const void*)run, sizeof(Run));
    trial->plan = Plan{};
    trial->setting = s;
    plan_run(trial, true);
    Estimate e = {};
    e.device_bytes = plan_bytes(&trial->plan, Place::DEVICE);
    step_cost(&e.costs, &trial->model, run->device.capability);
    e.time = step_time(&run->device, &trial->model, &e.costs);
    if (e.time.step_s > 0 && trial->model.offloads)   // to the host and back in each micro-step
        e.copy_s = 2.0 * s.G * (double)offload_bytes(&trial->model.inputs) / host_rate(&run->device);
    e.step_s = run->flags->overlap ? fmax(e.time.step_s, e.copy_s) : e.time.step_s + e.copy_s;
    plan_run_free(trial);
    free(trial);
    return e;
}

/* Device bytes of the plan in bf16, from the object of that precision, if it is in this binary. */
__attribute__((weak)) size_t ISA_NAME(device_bytes_bf16)(const Run* run, Setting s);
#ifdef PREC_BF16
size_t ISA_NAME(device_bytes_bf16)(const Run* run, Setting s) { return setting_estimate(run, s).device_bytes; }
#endif

/* The next smaller micro-batch with the same global batch, and rows that --tp divides. */
static bool lower_micro_batch(const Run* run, Setting* s)
{
    int per_rank = s->B * s->G;
    for (int B = s->B - 1; B >= 1; B--) {
        if (per_rank % B != 0 || !rows_divide(run, B)) continue;
        s->B = B;
        s->G = per_rank / B;
        return true;
    }
    return false;
}

/* Storage and offload as flags, where they are not the default. */
static const char* storage_name(Setting s, char (&buf)[128])
{
    const char* master = s.storage.master == Dtype::SPLIT ? " --master split"
                         : s.storage.master == Dtype::BF16 ? " --master none" : "";
    snprintf(buf, sizeof buf, "%s%s", master, s.storage.moments == Dtype::BF16 ? " --state-dtype bf16" : "");
    const char* before = " --offload ";
    for (int i = 0; i < NUM_OFFLOADED; i++) {
        if ((s.offloaded & 1u << i) == 0) continue;
        snprintf(buf + strlen(buf), sizeof buf - strlen(buf), "%s%s", before, offloaded_names[i]);
        before = ",";
    }
    return buf;
}

static void rung_print(const Run* run, FILE* f, Setting s, size_t have_bytes, Estimate e)
{
    char level[16], storage[128];
    fprintf(f, "  -z %d -r %-9s -b %-4d -g %-4d %12.1f MiB  %-5s%s", s.stage, recompute_name(s, level), s.B, s.G,
            e.device_bytes / 1048576.0, e.device_bytes <= have_bytes ? "fits" : "", storage_name(s, storage));
    if (e.step_s > 0) fprintf(f, "  %.3g s per step", e.step_s);
    fprintf(f, "\n");
}

/* The next change that saves memory: split master weights, stage, recomputation, micro-batch, offload. Changes add up,
 * and none changes the numbers. */
static bool rung_next(const Run* run, Setting* s)
{
    Storage* storage = &s->storage;
    if (FLOATX_DTYPE == Dtype::BF16 && storage->master == Dtype::FP32) {
        storage->master = Dtype::SPLIT;
        return true;
    }
    if (s->stage < 3 && run->comm.num_ranks > 1) { s->stage++; return true; }
    if (s->recompute != Recompute::BLOCKS) { s->recompute = (Recompute)((int)s->recompute + 1); return true; }
    if (lower_micro_batch(run, s)) return true;
    for (unsigned part : {OFFLOAD_OPTIMIZER, OFFLOAD_ACTIVATIONS, OFFLOAD_GRADIENTS, OFFLOAD_PARAMETERS}) {
        Setting lower = *s;
        lower.offloaded |= part;
        if (part >= OFFLOAD_GRADIENTS) lower.stage = 3;      // works on one rank too
        if (lower.offloaded == s->offloaded || offload_mismatch(&lower, run->flags) != nullptr) continue;
        *s = lower;
        return true;
    }
    return false;
}

/* Prints changes, each on top of those before, up to the first setting that fits into have_bytes. Apart from them
 * smaller chunks of the head, if its logits are large, since they change the order of sums. */
static void ladder_print(const Run* run, FILE* f, size_t have_bytes)
{
    Setting s = run->setting;
    const Model* m = &run->model;
    const double logits_bytes = (double)logits_elems(m, (size_t)m->B * m->T) * sizeof(floatX);
    if (logits_bytes > 0.1 * have_bytes && m->head_rows >= 4)
        fprintf(f, "  --head-rows %-6d           %7.1f MiB of logits less, in another order of sums\n",
                m->head_rows / 4, 0.75 * logits_bytes / 1048576.0);
    if (sizeof(floatX) == 4 && ISA_NAME(device_bytes_bf16) != nullptr) {
        size_t bytes = ISA_NAME(device_bytes_bf16)(run, s);
        fprintf(f, "  -p bf16                      %12.1f MiB  %s\n", bytes / 1048576.0,
                bytes <= have_bytes ? "fits" : "");
    } else if (sizeof(floatX) == 4) {
        fprintf(f, "  -p bf16 is not in this binary: make PREC='fp32 bf16'\n");
    }
    while (rung_next(run, &s)) {
        Estimate e = setting_estimate(run, s);
        rung_print(run, f, s, have_bytes, e);
        if (e.device_bytes <= have_bytes) return;
    }
    fprintf(f, "  none of these fits: lower -t, raise the number of ranks, or take a smaller model\n");
}

/* --auto: of all values of flags that were not given, the setting that fits with the shortest estimated step. */
static void setting_choose(Run* run, size_t have_bytes)
{
    const Flags* f = run->flags;
    Setting best = run->setting;
    double best_s = INFINITY;
    const bool slices = run->comm.num_ranks > 1;
    const char* mismatch = nullptr;
    bool tried = false;
    for (int stage = 0; stage <= 3; stage++) {
        if (f->given[FLAG_zero] && stage != run->setting.stage) continue;
        for (int level = 0; level <= (int)Recompute::BLOCKS; level++) {
            if (f->given[FLAG_recompute] && level != (int)run->setting.recompute) continue;
            for (unsigned offloaded = 0; offloaded < 1u << NUM_OFFLOADED; offloaded++) {
                if (f->given[FLAG_offload] && offloaded != run->setting.offloaded) continue;
                if (!f->given[FLAG_zero] && !slices && stage > 0 && offloaded < OFFLOAD_GRADIENTS) continue;
                Setting s = run->setting;
                s.stage = stage;
                s.recompute = (Recompute)level;
                s.offloaded = offloaded;
                const char* why = offload_mismatch(&s, f);
                if (why != nullptr) { mismatch = why; continue; }
                tried = true;
                do {
                    Estimate e = setting_estimate(run, s);   // ties: the simplest
                    double cost = e.step_s * (1 + 1e-4 * s.G) + 1e-9 * (stage + level + offloaded);
                    if (e.device_bytes <= have_bytes && cost < best_s) { best_s = cost; best = s; }
                } while (!f->given[FLAG_micro_batch] && lower_micro_batch(run, &s));
            }
        }
    }
    if (!tried) die_usage("--offload %s", mismatch);
    ENSURE(best_s < INFINITY, "--auto: no stage, recomputation and micro-batch fits into %.1f MiB: lower -t, raise the "
           "number of ranks, or take a smaller model", have_bytes / 1048576.0);
    run->setting = best;
    run->B = best.B;
    run->G = best.G;
}

/* Prints memory and time with each other level of recomputation. */
static void recompute_print(const Run* run, FILE* f, size_t have_bytes)
{
    fprintf(f, "with other levels of recomputation\n");
    for (int level = 0; level <= (int)Recompute::BLOCKS; level++) {
        Setting s = run->setting;
        s.recompute = (Recompute)level;
        s.segment_layers = 1;
        if (s.recompute != Recompute::BLOCKS) s.offloaded &= ~OFFLOAD_ACTIVATIONS;
        rung_print(run, f, s, have_bytes, setting_estimate(run, s));
    }
}
