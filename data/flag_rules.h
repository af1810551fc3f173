/* flag_rules.h: combinations of flags that are refused, a row each, as far as flags alone decide. Rules that also
 * depend on model, data, ranks or the setting that --auto chooses are in run/run.cuh, run/ramp.h and run/rates.h.
 *
 *   R(flags, condition, sentence, arguments)   each of the flags, if given, is refused where the condition holds.
 *                                              `name` is the flag as it was spelled, f all flags, idx its index */
#pragma once
#include <initializer_list>
#include "flags.h"

static bool flag_is_word(const char* value, const char* word) { return strcmp(value, word) == 0; }

/* How many flags with the attribute MODE are on. */
static int flags_num_modes(const Flags* f)
{
    int num_modes = 0;
    for (int idx = 0; idx < NUM_FLAGS; idx++) num_modes += (flag_rows[idx].is & MODE) != 0 && flag_is_on(f, idx);
    return num_modes;
}

#ifdef DEVICE_CPU
static const bool has_algorithms = false;
#else
static const bool has_algorithms = true;
#endif

#define FLAG_RULES(R) \
    /* ---- precision */ \
    R((FLAG_loss_scale, FLAG_initial_scale_power, FLAG_loss_scale_window, FLAG_hysteresis, FLAG_min_loss_scale, \
       FLAG_consecutive_hysteresis), \
      !flag_is_word(f->precision, "fp16"), \
      "%s is for -p fp16: leave it out", name) \
    R((FLAG_initial_scale_power, FLAG_min_loss_scale), \
      f->loss_scale == 0 && exp2((double)f->initial_scale_power) < f->min_loss_scale, \
      "--initial-scale-power %lld starts the loss scale at %g, below --min-loss-scale %g: raise it, or lower that", \
      (long long)f->initial_scale_power, exp2((double)f->initial_scale_power), f->min_loss_scale) \
    R((FLAG_initial_scale_power, FLAG_loss_scale_window, FLAG_hysteresis, FLAG_min_loss_scale, \
       FLAG_consecutive_hysteresis), \
      f->loss_scale > 0 && f->from[idx] == FROM_COMMAND_LINE, \
      "--loss-scale %g stays as it is, so that %s means nothing: leave one of them out", f->loss_scale, name) \
    R((FLAG_fp32_tensors), \
      f->fp32_tensors[0] && flag_is_word(f->precision, "fp32"), \
      "--fp32-tensors is for -p bf16 and fp16: in fp32 all tensors are; leave it out") \
    R((FLAG_master), \
      !flag_is_word(f->master, "fp32") && flag_is_word(f->precision, "fp32"), \
      "--master %s is for -p bf16: fp32 parameters are their own master", f->master) \
    R((FLAG_master), \
      flag_is_word(f->master, "split") && flag_is_word(f->precision, "fp16"), \
      "--master split is for -p bf16: an fp16 weight is not the upper half of a float") \
    R((FLAG_master), \
      flag_is_word(f->master, "none") && flag_is_word(f->precision, "fp16"), \
      "--master none is for -p bf16: an fp16 weight has no room for a small step: its smallest is 6e-8") \
    R((FLAG_grad_dtype), \
      !flag_is_word(f->grad_dtype, "fp32") && !flag_is_word(f->grad_dtype, f->precision), \
      "--grad-dtype %s with -p %s: gradients are accumulated in fp32, or in the precision of the weights", \
      f->grad_dtype, f->precision) \
    /* ---- the run */ \
    R((FLAG_model), \
      f->as[idx] != nullptr && flag_is_word(name, "--model-name-or-path") && strchr(f->model, '/') == nullptr, \
      "%s %s: weights are read from a folder, write ./%s for one; the preset, with new weights, is -m %s", name, \
      f->model, f->model, f->model) \
    R((FLAG_epochs), \
      f->given[FLAG_steps], \
      "%s and %s both set where the run ends: give one", flag_given_name(f, FLAG_steps, other), name) \
    R((FLAG_elastic), \
      f->elastic && !f->given[FLAG_resume], \
      "--elastic goes with --resume: it keeps a checkpoint's batch") \
    R((FLAG_resume), \
      flag_is_word(f->resume, "auto") && !f->out[0], \
      "--resume auto looks into the folder of -o: give -o") \
    R((FLAG_offload_share), \
      f->given[FLAG_offload] && strstr(f->offload, "optimizer") == nullptr, \
      "--offload-share is of the optimizer's states: give --offload optimizer") \
    R((FLAG_patience), \
      f->patience > 0 && f->eval_every == 0, \
      "--patience counts validations: give --eval-every N") \
    R((FLAG_save_every, FLAG_keep, FLAG_keep_every, FLAG_keep_best, FLAG_on_save_error), \
      !f->out[0], \
      "%s needs -o FOLDER to save to", name) \
    R((FLAG_min_lr), \
      f->min_lr > f->lr, \
      "--min-lr %g is above the peak --lr %g: lower it", f->min_lr, f->lr) \
    R((FLAG_warmup_min_lr), \
      f->warmup_min_lr > f->lr, \
      "--warmup-min-lr %g is above the peak --lr %g: lower it", f->warmup_min_lr, f->lr) \
    R((FLAG_spike_skip), \
      f->spike_skip && f->spike_deviations == 0, \
      "--spike-skip with --spike-deviations 0: no step is a spike; leave one of them out") \
    R((FLAG_tune), \
      f->tune && !has_algorithms, \
      "--tune chooses among cuBLASLt's algorithms; this build multiplies with its own: leave it out") \
    R((FLAG_tune), \
      f->tune && flags_num_modes(f) > f->bench, \
      "--tune goes with training: leave it out") \
    /* ---- modes */ \
    R((FLAG_bench_json), \
      !f->bench, \
      "--bench-json goes with --bench") \
    R((FLAG_data, FLAG_val, FLAG_raw_tokens, FLAG_no_shuffle, FLAG_documents, FLAG_too_long, FLAG_epochs, \
       FLAG_eval_every, FLAG_eval_batches, FLAG_eval_stride, FLAG_eval_at_start, FLAG_patience, FLAG_out, \
       FLAG_save_every, FLAG_keep, FLAG_keep_every, FLAG_keep_best, FLAG_resume, FLAG_elastic, \
       FLAG_hash_every, FLAG_check_replicas, FLAG_batch_ramp, FLAG_seq_ramp), \
      f->bench, \
      "%s does not go with --bench, whose tokens are synthetic, whose steps are all alike, and which writes nothing " \
      "but --bench-json FILE: leave it out", name) \
    R((FLAG_steps), \
      f->bench && f->steps < 1, \
      "-n %lld: --bench needs a step to time", (long long)f->steps) \
    R((FLAG_gpu), \
      !f->plan, \
      "--gpu goes with --plan; a run takes the GPU that is here") \
    R((FLAG_ranks), \
      !f->plan, \
      "--ranks goes with --plan; a run takes its ranks from mpirun -np") \
    R((FLAG_export_dtype, FLAG_shard_bytes), \
      !f->given[FLAG_export_], \
      "--export-dtype and --shard-bytes go with --export; checkpoints hold fp32")

/* Refuses "--bf16 False" together with -p bf16, and two modes at once. */
static void flags_refuse_rest(const Flags* f)
{
    char name[64], buf[64];
    for (const FlagAlias& a : flag_aliases)
        if (f->denied[&a - flag_aliases] && flag_is_word(flag_value(f, &flag_rows[a.idx], buf), a.value))
            die_usage("%s false, but %s is %s: leave one of them out", a.spelling,
                      flag_long_name(&flag_rows[a.idx], name), a.value);
    if (flags_num_modes(f) <= 1) return;
    char modes[256] = "";
    int left = 0;
    for (const FlagRow& row : flag_rows) left += (row.is & MODE) != 0;
    for (const FlagRow& row : flag_rows) {
        if ((row.is & MODE) == 0) continue;
        snprintf(modes + strlen(modes), sizeof modes - strlen(modes), "%s%s", flag_long_name(&row, name),
                 --left > 1 ? ", " : left == 1 ? " and " : "");
    }
    die_usage("%s are different modes: give one", modes);
}

/* A refusal is one line and exit code 2, as in flags_parse. */
static void flags_refuse(const Flags* f)
{
#define FLAG_LIST(...) {__VA_ARGS__}
#define FLAG_RULE(flags, condition, ...) \
    for (FlagIdx idx : FLAG_LIST flags) { \
        [[maybe_unused]] const char* name = flag_given_name(f, idx, buf); \
        if (f->given[idx] && (condition)) die_usage(__VA_ARGS__); \
    }
    char buf[64], other[64];
    FLAG_RULES(FLAG_RULE)
    flags_refuse_rest(f);
#undef FLAG_RULE
#undef FLAG_LIST
}
