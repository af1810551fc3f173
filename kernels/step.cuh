/* step.cuh: what is decided once per step after the gradients are summed: learning rate, clipping, skip, loss scale.
 *   step_state_update, one thread, from the all-reduced sums S (see StepSum):
 *     grad_scale = nominal_toks / S[NUM_TOKS] / loss_scale      the backward divided by the nominal count
 *     grad_norm  = sqrt(S[SUM_SQUARES]) * grad_scale            before clipping
 *     clip_coef  = min(1, max_norm / (grad_norm + 1e-6))        1 when max_norm is 0
 *     skip when a gradient is Inf or NaN, or no token was counted: then neither t nor the schedule advances
 *     lr = schedule_lr(config, num_applied), t = num_applied + 1, bias corrections 1 - beta^t, all in double
 *     loss scale (fp16): halved or absorbed on overflow, doubled after a window of good steps
 *     spike: loss or norm further above its running mean than spike_deviations; skipped too with spike_skips
 * writes  StepState in place
 * exact   one thread
 * source  loss scaling Micikevicius et al. 2017, arXiv:1710.03740; warm-up, stable, decay: Hu et al. 2024,
 *         arXiv:2404.06395; 1 - sqrt: Hagele et al. 2024, arXiv:2405.18392 */
#pragma once
#include <cfloat>
#include "vec.cuh"

// ---- schedules

/* One row each: name, word, rate in the warm-up, what is left of peak - min after it, how it differs from the others,
 * DeepSpeed's scheduler of that kind, what --help says. Steps are counted from 0: s are applied, W of N are warm-up; x
 * is the share of the others that has passed, tail that of the last --decay of N. To add a schedule, add a row: enum,
 * --schedule, --help and op tests follow, and test/test_optimizer.py asks for a reference. */
#define SCHEDULES(S) \
    S(CONSTANT,   "constant",      rise_from_start, 1.0,              ENDLESS, WarmupLR, "the peak") \
    S(LINEAR,     "linear",        rise_from_start, 1.0 - x,          0, WarmupDecayLR, "falls in a straight line, to --min-lr one step behind the last") \
    S(COSINE,     "cosine",        rise_from_start, 0.5 * (1.0 + cos(3.14159265358979323846 * x)), 0, WarmupCosineLR, "the same along half a cosine") \
    S(WSD,        "wsd",           rise_from_start, 1.0 - tail,       0, none, "the peak; the last --decay share falls in a straight line") \
    S(WSD_SQRT,   "wsd-sqrt",      rise_from_start, 1.0 - sqrt(tail), 0, none, "the same, falling as 1 - sqrt") \
    S(WARMUP_LOG, "warmup-log",    rise_log,        1.0,              ENDLESS | FROM_MIN, none, "from --min-lr up as the logarithm of the step, then the peak") \
    S(ONECYCLE,   "onecycle",      rise_from_min,   fmax(0.0, 1.0 - (s - W + 1.0) / fmax(W, 1.0)), WARMS_UP_HALF | FROM_MIN, OneCycle, "from --min-lr to the peak in the warm-up, back in as many steps, then --min-lr") \
    S(RANGE_TEST, "lr-range-test", rise_from_min,   1.0, WARMS_UP_ALL | FROM_MIN, \
      LRRangeTest, "from --min-lr to the peak over all steps; DeepSpeed's over the warm-up, and on")

enum ScheduleTraits {
    ENDLESS = 1,         // goes on behind the last step; all others are at their minimum there
    WARMS_UP_HALF = 2,   // of the steps, unless --warmup says how many
    WARMS_UP_ALL = 4,    // of the steps, whatever --warmup says
    FROM_MIN = 8         // warms up from --min-lr, in its own way, and not from --warmup-min-lr
};

#define SCHEDULE_ENUM(name, word, rise, fall, traits, deepspeed, help) name,
enum class Schedule { SCHEDULES(SCHEDULE_ENUM) };
#undef SCHEDULE_ENUM

#define SCHEDULE_WORD(name, word, rise, fall, traits, deepspeed, help) "|" word
static const char* const schedule_words = &SCHEDULES(SCHEDULE_WORD)[1];   // "constant|linear|..."
#undef SCHEDULE_WORD

#define SCHEDULE_WORD(name, word, rise, fall, traits, deepspeed, help) "|" #deepspeed "=" word
static const char* const schedules_of_deepspeed = &SCHEDULES(SCHEDULE_WORD)[1];   // "WarmupLR=constant|..."
#undef SCHEDULE_WORD

struct ScheduleRow {
    const char *name, *help, *deepspeed;
    Schedule schedule;
    int traits;
};

#define SCHEDULE_ROW(name, word, rise, fall, traits, deepspeed, help) {word, help, #deepspeed, Schedule::name, traits},
static const ScheduleRow schedule_rows[] = { SCHEDULES(SCHEDULE_ROW) };
#undef SCHEDULE_ROW

static const ScheduleRow* schedule_find(const char* name)
{
    for (const ScheduleRow& row : schedule_rows)
        if (strcmp(row.name, name) == 0) return &row;
    die("--schedule %s: there is no such row: have %s", name, schedule_words);
}

/* DeepSpeed's parameters without a flag of their own: name, default, lowest, highest. --schedule-params takes them. */
#define SCHEDULE_PARAMS(P) \
    P(total_num_steps,          0,    0, 1e18)   /* 0: the run's */ \
    P(cycle_second_step_size,  -1,   -1, 1e18)   /* -1: as many as the first */ \
    P(cycle_first_stair_count,  0,    0, 1e18) \
    P(cycle_second_stair_count, -1,  -1, 1e18)   /* -1: as many as the first */ \
    P(decay_step_size,          0,    0, 1e18) \
    P(decay_lr_rate,            0,    0, 1e18) \
    P(cycle_momentum,           1,    0, 1) \
    P(cycle_min_mom,            0.8,  0, 0.999999) \
    P(cycle_max_mom,            0.9,  0, 0.999999) \
    P(decay_mom_rate,           0,    0, 1e18) \
    P(lr_range_test_staircase,  0,    0, 1)

struct ScheduleParams {
#define SCHEDULE_PARAM(name, fallback, low, high) double name;
    SCHEDULE_PARAMS(SCHEDULE_PARAM)
#undef SCHEDULE_PARAM
};
#define SCHEDULE_PARAM(name, fallback, low, high) fallback,
static constexpr ScheduleParams SCHEDULE_PARAMS_DEFAULT = {SCHEDULE_PARAMS(SCHEDULE_PARAM)};
#undef SCHEDULE_PARAM

/* Everything about a step that the command line fixes. */
struct StepConfig {
    Schedule schedule;
    double peak_lr, min_lr;
    unsigned long long warmup_steps, total_steps;
    double decay_share;                              // of total_steps, for the two wsd
    double beta1, beta2, max_norm;
    double nominal_toks;                             // B*T*G*R, by which the backward has divided
    bool dynamic_loss_scale;
    double min_loss_scale;
    int loss_scale_window, hysteresis;
    bool consecutive_hysteresis;
    double spike_deviations;                         // 0: no spikes
    double spike_window;
    bool spike_skips;                                // a step with a spike changes nothing
    double warmup_min_lr;                            // at which the warm-up starts
    bool warmup_is_log, as_deepspeed;
    bool has_momentum_cycle;                         // OneCycle moves beta1
    ScheduleParams params;                           // for as_deepspeed
};

/* The share of a warm-up of W steps when s have passed, of DeepSpeed's from 0, of this program's from 1. */
HOSTDEV double log_share(double s, double W) { return log(s + 1.0) / log(fmax(2.0, W)); }

HOSTDEV double rise_from_start(const StepConfig& c, double s, double W)
{
    const double height = c.peak_lr - c.warmup_min_lr;
    return c.warmup_min_lr + (c.warmup_is_log ? height * log_share(s, W) : height * (s + 1.0) / W);
}
HOSTDEV double rise_from_min(const StepConfig& c, double s, double W)
{
    return c.min_lr + (c.peak_lr - c.min_lr) * (s + 1.0) / W;
}
HOSTDEV double rise_log(const StepConfig& c, double s, double W)
{
    return c.min_lr + (c.peak_lr - c.min_lr) * log(s + 1.0) / log(fmax(2.0, W));
}

// ---- DeepSpeed's schedulers, as in deepspeed/runtime/lr_schedules.py of 0.19
// t is its last_batch_iteration, -1 in the first step and 0 in the second: both are at the start of the warm-up.

HOSTDEV double deepspeed_warmup_steps(const StepConfig& c) { return fmax(2.0, (double)c.warmup_steps); }
HOSTDEV double deepspeed_total_steps(const StepConfig& c)
{
    return c.params.total_num_steps > 0.0 ? c.params.total_num_steps : (double)c.total_steps;
}

/* The three that warm up: `first` in the first step, `left` of peak - min after the warm-up. */
HOSTDEV double deepspeed_warmup(const StepConfig& c, double t, double first, double left)
{
    const double W = deepspeed_warmup_steps(c);
    if (t < 0.0) return first;
    if (t >= W) return c.min_lr + (c.peak_lr - c.min_lr) * left;
    return c.warmup_min_lr + (c.peak_lr - c.warmup_min_lr) * (c.warmup_is_log ? log_share(t, W) : t / W);
}

HOSTDEV double deepspeed_WarmupLR(const StepConfig& c, double t)
{
    return deepspeed_warmup(c, t, c.warmup_min_lr, 1.0);
}

HOSTDEV double deepspeed_WarmupDecayLR(const StepConfig& c, double t)
{
    const double W = deepspeed_warmup_steps(c), N = deepspeed_total_steps(c);
    return deepspeed_warmup(c, t, c.warmup_min_lr, fmax(0.0, (N - t) / fmax(1.0, N - W)));
}

HOSTDEV double deepspeed_WarmupCosineLR(const StepConfig& c, double t)
{
    const double W = deepspeed_warmup_steps(c), N = deepspeed_total_steps(c);
    const double x = fmin(1.0, (t - W + 1.0) / fmax(1.0, N - W));
    return deepspeed_warmup(c, t, 0.0, 0.5 * (1.0 + cos(3.14159265358979323846 * x)));
}

/* Of the cycle: the steps up, the steps down, and how high the rate is, 0 at the lowest and 1 at the peak. */
HOSTDEV double deepspeed_steps_up(const StepConfig& c) { return fmax(1.0, (double)c.warmup_steps); }
HOSTDEV double deepspeed_cycle_steps(const StepConfig& c)
{
    const double up = deepspeed_steps_up(c), down = c.params.cycle_second_step_size;
    return up + (down < 0.0 ? up : down);
}
HOSTDEV double deepspeed_cycle_height(const StepConfig& c, double t)
{
    const double steps = deepspeed_cycle_steps(c), up = deepspeed_steps_up(c), now = fmod(t + 1.0, steps);
    const double share = now <= up ? now / up : (steps - now) / (steps - up);
    const double second = c.params.cycle_second_stair_count, first = c.params.cycle_first_stair_count;
    const double stairs = now <= up || second < 0.0 ? first : second;
    if (stairs == 0.0) return share;
    return floor(now <= up ? now * stairs / up : (steps - now) * stairs / (steps - up)) / stairs;
}

/* 1 + rate * the steps since the cycle / decay_step_size; 1 within it, and without a decay. */
HOSTDEV double deepspeed_cycle_decay(const StepConfig& c, double t, double rate)
{
    const double steps = deepspeed_cycle_steps(c);
    return t < steps || c.params.decay_step_size == 0.0 ? 1.0
                                                        : 1.0 + rate * (t - steps + 1.0) / c.params.decay_step_size;
}

HOSTDEV double deepspeed_OneCycle(const StepConfig& c, double t)
{
    const double height = t < deepspeed_cycle_steps(c) ? deepspeed_cycle_height(c, t) : 0.0;
    return (c.min_lr + (c.peak_lr - c.min_lr) * height) / deepspeed_cycle_decay(c, t, c.params.decay_lr_rate);
}

/* beta1 while it cycles, low where the rate is high; the first step has the lowest. beta2 is 0.99 then. */
HOSTDEV double deepspeed_momentum(const StepConfig& c, double t)
{
    if (t < 0.0) return c.params.cycle_min_mom;
    const double height = t < deepspeed_cycle_steps(c) ? deepspeed_cycle_height(c, t) : 0.0;
    return (c.params.cycle_max_mom - (c.params.cycle_max_mom - c.params.cycle_min_mom) * height) *
           deepspeed_cycle_decay(c, t, c.params.decay_mom_rate);
}

/* Rises by peak - min in every --warmup steps, for as long as the run goes. */
HOSTDEV double deepspeed_LRRangeTest(const StepConfig& c, double t)
{
    const double share = (t + 1.0) / fmax(1.0, (double)c.warmup_steps);
    return c.min_lr + (c.peak_lr - c.min_lr) * (c.params.lr_range_test_staircase != 0.0 ? floor(share) : share);
}

HOSTDEV double deepspeed_none(const StepConfig& c, double) { return c.peak_lr; }   // rates_refuse lets none through

/* The rate after `applied` steps. A constant rate has no end, nor has warmup-log; a warm-up as long as the run or
 * longer is cut off at its end. */
HOSTDEV double schedule_lr(const StepConfig& config, unsigned long long applied)
{
    const double s = (double)applied, N = (double)config.total_steps;
    switch (config.schedule) {
#define SCHEDULE_LR(name, word, rise, fall, traits, deepspeed, help) \
    case Schedule::name: { \
        if (config.as_deepspeed) return deepspeed_##deepspeed(config, s - 1.0); \
        if (applied >= config.total_steps && !((traits) & ENDLESS)) return config.min_lr; \
        const double W = (traits) & WARMS_UP_ALL ? N : (double)config.warmup_steps; \
        if (s < W) return rise(config, s, W); \
        const double x = (s - W) / (N - W), start = fmax(N * (1.0 - config.decay_share), W); \
        const double tail = s > start ? (s - start) / (N - start) : 0.0; \
        (void)x, (void)tail; \
        return config.min_lr + (fall) * (config.peak_lr - config.min_lr); \
    }
    SCHEDULES(SCHEDULE_LR)
#undef SCHEDULE_LR
    }
    return config.min_lr;
}

// ---- the state of a step

/* The sums over all ranks that a step is decided by; an array of NUM_STEP_SUMS double. */
enum StepSum { SUM_SQUARES, NUM_NONFINITE, NUM_TOKS, SUM_LOSSES, ASKED_TO_SAVE, ASKED_TO_END, NUM_STEP_SUMS };

enum class Skip { NONE, NONFINITE, NO_TOKS, SPIKE };

/* Mean and variance of a series: over all of it up to `window` numbers, then with weights that fall by 1 - 1/window
 * from one number to the one before (Finch 2009, incremental calculation of weighted mean and variance). */
struct Series { double mean, variance; };

/* Of the losses and gradient norms of the steps that were finite. Part of a checkpoint. */
struct Spikes {
    Series loss, norm;
    unsigned long long num_seen;
};

/* Steps seen before any can stand out. */
static constexpr unsigned long long SPIKE_MIN_STEPS = 20;

/* What every element of a step is multiplied by, made once: divisions and roots in double take some GPUs as long as a
 * block of elements. */
struct StepFactors {
    float grad_coef;                                 // grad_scale * clip_coef
    float rsqrt_correction2;                         // 1 / sqrt(bias_correction2)
    double adam_lr, lamb_lr;                         // lr / bias_correction1; the same times sqrt(bias_correction2)
};

/* Lives on the device; the host reads a copy, of a GPU one step late. Part of a checkpoint: counters and loss scale. */
struct StepState {
    double loss;                                     // mean over the counted tokens; NaN when there were none
    double num_toks;                                 // counted tokens of this step, all ranks
    double grad_norm;                                // Inf when a gradient was not finite
    double lr;
    double beta1, beta2;                             // of this step; bias corrections are 1 - beta^t
    double bias_correction1, bias_correction2;
    double grad_scale, clip_coef;                    // the optimizer multiplies gradients by both
    StepFactors factors;
    double loss_scale, used_loss_scale;              // of the next backward, of this step's
    unsigned long long num_steps;                    // = applied + skipped + steps without a counted token
    unsigned long long num_applied, num_skipped, num_skipped_in_a_row;
    int num_good_steps, hysteresis_left;             // see loss_scale_update
    Spikes spikes;
    double loss_deviations, norm_deviations;         // above the mean of the steps before, in standard deviations
    bool is_spike;                                   // one of the two is more than spike_deviations
    Skip skip;                                       // this step's; the optimizer does nothing unless NONE
    bool loss_scale_exhausted;                       // overflow at the smallest loss scale: the run must stop
    bool asked_to_save, asked_to_end;                // by a signal to some rank
};

static StepState step_state_init(const StepConfig& config, double loss_scale)
{
    StepState state = {};
    state.loss_scale = loss_scale;
    state.hysteresis_left = config.hysteresis;
    return state;
}

HOSTDEV void loss_scale_update(StepState* state, const StepConfig& config, bool overflow)
{
    if (overflow) {
        state->num_good_steps = 0;
        if (state->hysteresis_left > 1) {
            state->hysteresis_left--;
        } else if (state->loss_scale <= config.min_loss_scale) {
            state->loss_scale_exhausted = true;
        } else {
            state->loss_scale = fmax(state->loss_scale / 2.0, config.min_loss_scale);
        }
        return;
    }
    if (config.consecutive_hysteresis) state->hysteresis_left = config.hysteresis;
    if (++state->num_good_steps == config.loss_scale_window) {
        state->loss_scale = fmin(state->loss_scale * 2.0, 0x1p127);    // kernels multiply with it as a float
        state->hysteresis_left = config.hysteresis;
        state->num_good_steps = 0;
    }
}

/* How many deviations x is above the mean; adds x to the series, where a spike counts as a value at the limit:
 * a level that stays is the mean after a while. Less than a hundredth of the mean is not taken for a deviation. */
HOSTDEV double series_add(Series* s, double x, unsigned long long num_seen, double window, double limit)
{
    const double deviation = fmax(sqrt(s->variance), 0.01 * fabs(s->mean));
    const double above = deviation > 0.0 ? (x - s->mean) / deviation : 0.0;
    const double n = (double)num_seen + 1.0, weight = 1.0 / fmin(n, window);
    const double d = num_seen >= SPIKE_MIN_STEPS && above > limit ? limit * deviation : x - s->mean;
    s->mean += weight * d;
    s->variance = (1.0 - weight) * (s->variance + weight * d * d);
    return above;
}

HOSTDEV void spikes_update(StepState* state, const StepConfig& config)
{
    Spikes* s = &state->spikes;
    const double limit = config.spike_deviations;
    state->loss_deviations = series_add(&s->loss, state->loss, s->num_seen, config.spike_window, limit);
    state->norm_deviations = series_add(&s->norm, state->grad_norm, s->num_seen, config.spike_window, limit);
    const bool above = state->loss_deviations > limit || state->norm_deviations > limit;
    state->is_spike = s->num_seen >= SPIKE_MIN_STEPS && above;
    s->num_seen++;
}

HOSTDEV StepFactors step_factors(const StepState& s)
{
    return {(float)(s.grad_scale * s.clip_coef), (float)(1.0 / sqrt(s.bias_correction2)), s.lr / s.bias_correction1,
            s.lr * sqrt(s.bias_correction2) / s.bias_correction1};
}

HOSTDEV void step_state_advance(StepState* state, const double* sums, const StepConfig& config)
{
    const bool finite_loss = fabs(sums[SUM_LOSSES]) <= DBL_MAX;
    const bool overflow = sums[NUM_NONFINITE] > 0.0 || !finite_loss, empty = sums[NUM_TOKS] == 0.0;
    state->num_steps++;
    state->asked_to_save = sums[ASKED_TO_SAVE] > 0.0;
    state->asked_to_end = sums[ASKED_TO_END] > 0.0;
    state->num_toks = sums[NUM_TOKS];
    state->used_loss_scale = state->loss_scale;
    state->loss = sums[SUM_LOSSES] / sums[NUM_TOKS];
    state->lr = schedule_lr(config, state->num_applied);
    const bool cycles = config.has_momentum_cycle;
    state->beta1 = cycles ? deepspeed_momentum(config, (double)state->num_applied - 1.0) : config.beta1;
    state->beta2 = cycles ? 0.99 : config.beta2;
    state->is_spike = false;
    state->skip = empty ? Skip::NO_TOKS : overflow ? Skip::NONFINITE : Skip::NONE;
    if (empty) {
        state->grad_norm = 0.0;
        return;
    }
    state->grad_scale = config.nominal_toks / sums[NUM_TOKS] / state->loss_scale;
    state->grad_norm = overflow ? (double)INFINITY : sqrt(sums[SUM_SQUARES]) * state->grad_scale;
    if (config.dynamic_loss_scale) loss_scale_update(state, config, overflow);
    if (overflow) {
        state->num_skipped++;
        state->num_skipped_in_a_row++;
        return;
    }
    state->num_skipped_in_a_row = 0;
    if (config.spike_deviations > 0.0) spikes_update(state, config);
    if (state->is_spike && config.spike_skips) {
        state->skip = Skip::SPIKE;
        state->num_skipped++;
        return;
    }
    state->clip_coef = config.max_norm > 0.0 ? fmin(1.0, config.max_norm / (state->grad_norm + 1e-6)) : 1.0;
    state->num_applied++;
    const double t = (double)state->num_applied;     // 1 - beta^t, without its cancellation when beta is nearly 1
    state->bias_correction1 = -expm1(t * log(state->beta1));
    state->bias_correction2 = -expm1(t * log(state->beta2));
    state->factors = step_factors(*state);
}

#ifndef DEVICE_CPU
static __global__ void step_state_kernel(StepState* state, const double* sums, StepConfig config)
{
    step_state_advance(state, sums, config);
}
#endif

static void step_state_update(StepState* state, const double* sums, StepConfig config, cudaStream_t stream)
{
    OP(stream, 0, 0);
    ON_CPU(step_state_advance(state, sums, config));
#ifndef DEVICE_CPU
    LAUNCH(step_state_kernel, 1, 1, 0, stream, state, sums, config);
    CUDA_CHECK(cudaGetLastError());
#endif
}

#ifdef OP_TESTS
#include "optest.h"

static const StepConfig STEP_TEST_CONFIG = {Schedule::CONSTANT, 1e-3, 0.0, 0, 100, 0.2, 0.9, 0.95, 1.0, 1.0,
                                            false, 1.0, 1000, 2, false, 0.0, 100.0, false, 0.0, false, false, false,
                                            SCHEDULE_PARAMS_DEFAULT};

/* Losses 2 and 4 in turn have mean 3 and deviation 1: 8.5 is 5.5 above, 9.1 is a spike and counts as 9 in the mean. */
static void spike_test(OpRun* run)
{
    StepConfig config = STEP_TEST_CONFIG;
    config.spike_deviations = 6.0;
    config.spike_skips = run->dims[0] != 0;
    StepState s = step_state_init(config, 1.0);
    for (int i = 0; i < 40; i++) {
        const double sums[NUM_STEP_SUMS] = {1.0, 0.0, 1.0, i % 2 ? 4.0 : 2.0};
        step_state_advance(&s, sums, config);
        op_check_value(run, "no spike", s.is_spike, 0.0, 0.0);
    }
    op_check_value(run, "mean", s.spikes.loss.mean, 3.0, 1e-12);
    op_check_value(run, "variance", s.spikes.loss.variance, 1.0, 1e-12);
    StepState below = s;
    const double sums_below[NUM_STEP_SUMS] = {1.0, 0.0, 1.0, 8.5}, sums[NUM_STEP_SUMS] = {1.0, 0.0, 1.0, 9.1};
    step_state_advance(&below, sums_below, config);
    op_check_value(run, "deviations", below.loss_deviations, 5.5, 1e-9);
    op_check_value(run, "spike below the limit", below.is_spike, 0.0, 0.0);
    step_state_advance(&s, sums, config);
    op_check_value(run, "spike", s.is_spike, 1.0, 0.0);
    op_check_value(run, "norm", s.norm_deviations, 0.0, 1e-9);
    op_check_value(run, "mean after", s.spikes.loss.mean, 3.0 + 6.0 / 41.0, 1e-9);
    op_check_value(run, "skip", s.skip == Skip::SPIKE, config.spike_skips, 0.0);
    op_check_value(run, "num_applied", (double)s.num_applied, config.spike_skips ? 40.0 : 41.0, 0.0);
    op_check_value(run, "num_skipped_in_a_row", (double)s.num_skipped_in_a_row, 0.0, 0.0);
    const double bad_loss[NUM_STEP_SUMS] = {1.0, 0.0, 1.0, INFINITY};
    step_state_advance(&s, bad_loss, config);
    op_check_value(run, "skip of a bad loss", s.skip == Skip::NONFINITE, 1.0, 0.0);
    op_check_value(run, "a bad loss is not seen", (double)s.spikes.num_seen, 41.0, 0.0);
}

static void schedule_check(OpRun* run, const char* what, StepConfig config, unsigned long long s, double truth)
{
    op_check_value(run, what, schedule_lr(config, s), truth, 1e-12);
}

/* DeepSpeed's schedulers by hand; test/test_deepspeed.py has the numbers of its own code. */
static void schedule_deepspeed_test(OpRun* run)
{
    StepConfig config = STEP_TEST_CONFIG;
    config.as_deepspeed = config.warmup_is_log = true;
    config.peak_lr = 1.0;
    config.warmup_min_lr = 0.25;
    config.warmup_steps = 4;
    config.total_steps = 8;
    schedule_check(run, "WarmupLR, first step", config, 0, 0.25);
    schedule_check(run, "WarmupLR, second step", config, 1, 0.25);
    schedule_check(run, "WarmupLR, third step", config, 2, 0.25 + 0.75 * 0.5);
    schedule_check(run, "WarmupLR, past the warm-up", config, 5, 1.0);
    config.schedule = Schedule::LINEAR;
    schedule_check(run, "WarmupDecayLR, half", config, 7, 0.5);
    schedule_check(run, "WarmupDecayLR, past the end", config, 99, 0.0);
    config.schedule = Schedule::COSINE;
    schedule_check(run, "WarmupCosineLR, first step", config, 0, 0.0);
    schedule_check(run, "WarmupCosineLR, half", config, 6, 0.5);
    schedule_check(run, "WarmupCosineLR, past the end", config, 99, 0.0);
    config.schedule = Schedule::RANGE_TEST;
    config.min_lr = 0.5;
    schedule_check(run, "LRRangeTest, past the end", config, 10, 0.5 + 0.5 * 2.5);
    config.schedule = Schedule::ONECYCLE;
    config.params.cycle_second_step_size = 2.0;
    config.params.decay_step_size = config.params.decay_lr_rate = 1.0;
    schedule_check(run, "OneCycle, half of the rise", config, 2, 0.75);
    schedule_check(run, "OneCycle, half of the fall", config, 5, 0.75);
    schedule_check(run, "OneCycle, decay", config, 7, 0.25);
    op_check_value(run, "momentum, first step", deepspeed_momentum(config, -1.0), 0.8, 1e-12);
    op_check_value(run, "momentum, second step", deepspeed_momentum(config, 0.0), 0.875, 1e-12);
    op_check_value(run, "momentum, decay", deepspeed_momentum(config, 6.0), 0.9, 1e-12);
}

static void schedule_test(OpRun* run)
{
    StepConfig config = STEP_TEST_CONFIG;
    config.peak_lr = 1.0;
    config.min_lr = 0.1;
    config.warmup_steps = 10;
    config.total_steps = 110;
    schedule_check(run, "first step of warm-up", config, 0, 0.1);
    schedule_check(run, "last step of warm-up", config, 9, 1.0);
    schedule_check(run, "constant, past the end", config, 500, 1.0);
    config.schedule = Schedule::LINEAR;
    schedule_check(run, "linear, start", config, 10, 1.0);
    schedule_check(run, "linear, half", config, 60, 0.55);
    schedule_check(run, "linear, last step", config, 109, 0.109);
    schedule_check(run, "linear, past the end", config, 110, 0.1);
    config.schedule = Schedule::COSINE;
    schedule_check(run, "cosine, a quarter", config, 35, 0.1 + 0.45 * (1.0 + sqrt(0.5)));
    schedule_check(run, "cosine, past the end", config, 12345, 0.1);
    config.schedule = Schedule::WSD;
    config.decay_share = 0.5;                        // from step 55
    schedule_check(run, "wsd, flat", config, 55, 1.0);
    schedule_check(run, "wsd, last step", config, 109, 0.1 + 0.9 / 55.0);
    config.schedule = Schedule::WSD_SQRT;
    schedule_check(run, "wsd-sqrt, last step", config, 109, 0.1 + 0.9 * (1.0 - sqrt(54.0 / 55.0)));
    config.decay_share = 1.0;                        // the tail may not start inside the warm-up
    schedule_check(run, "wsd-sqrt, all tail", config, 10, 1.0);
    config.decay_share = 0.0;
    schedule_check(run, "wsd-sqrt, no tail", config, 109, 1.0);
    config.warmup_steps = 220;
    schedule_check(run, "warm-up beyond the end, last step", config, 109, 0.5);
    schedule_check(run, "warm-up beyond the end, past it", config, 110, 0.1);
}

/* N = 1, warm-ups as long as the run and longer, a run of no steps, lr 0: always finite, never below the first step of
 * a warm-up, and the peak is reached. */
static void schedule_edges_test(OpRun* run)
{
    for (const ScheduleRow& row : schedule_rows) {
        StepConfig config = STEP_TEST_CONFIG;
        config.schedule = row.schedule;
        config.peak_lr = 1.0;
        config.min_lr = 0.25;
        double lowest = 1.0, highest = 0.0, past_the_end = config.min_lr;
        for (unsigned long long total = 0; total <= 5; total++) {
            for (unsigned long long warmup = 0; warmup <= 7; warmup++) {
                for (unsigned long long s = 0; s <= 9; s++) {
                    config.total_steps = total;
                    config.warmup_steps = warmup;
                    const double lr = schedule_lr(config, s);
                    if (!(lr >= lowest)) lowest = lr;
                    if (!(lr <= highest)) highest = lr;
                    if (s >= total && !(row.traits & ENDLESS) && lr != config.min_lr) past_the_end = lr;
                }
            }
        }
        op_check_value(run, row.name, lowest >= 1.0 / 7.0 - 1e-12, 1.0, 0.0);   // warm-up 7, step 1
        op_check_value(run, row.name, highest, 1.0, 0.0);
        op_check_value(run, row.name, past_the_end, config.min_lr, 0.0);
        config.peak_lr = config.min_lr = 0.0;
        op_check_value(run, row.name, schedule_lr(config, 3), 0.0, 0.0);
    }
}

static void step_state_sequence(StepState* state, const double* sums, StepConfig config, const int* rows, int num_rows)
{
    for (int i = 0; i < num_rows; i++) step_state_update(state, sums + rows[i] * NUM_STEP_SUMS, config, 0);
}

/* Good, overflow, overflow, empty, good: counters, norm, clipping, the token correction. */
static void step_state_test(OpRun* run)
{
    StepConfig config = STEP_TEST_CONFIG;
    config.nominal_toks = 100.0;
    const double h_sums[3][NUM_STEP_SUMS] = {{4.0, 0, 50, 150.0}, {1.0, 3, 100, 200.0}, {0.0, 0, 0, 0.0}};
    const StepState s = step_state_init(config, 1.0);
    StepState* state = (StepState*)op_bytes(run, "state", OpKind::INOUT, &s, sizeof s);
    const double* sums = (const double*)op_bytes(run, "sums", OpKind::INPUT, h_sums, sizeof h_sums);
    static const int ROWS[5] = {0, 1, 1, 2, 0};
    const int num_rows = run->dims[0];
    OP_RUN(run, 0, 0, step_state_sequence(state, sums, config, ROWS, num_rows));
    const StepState* ours = (const StepState*)op_result(run, "state");
    static const int APPLIED[5] = {1, 1, 1, 1, 2}, SKIPPED[5] = {0, 1, 2, 2, 2}, IN_A_ROW[5] = {0, 1, 2, 2, 0};
    static const Skip SKIPS[5] = {Skip::NONE, Skip::NONFINITE, Skip::NONFINITE, Skip::NO_TOKS, Skip::NONE};
    const int last = num_rows - 1;
    op_check_value(run, "num_steps", (double)ours->num_steps, num_rows, 0.0);
    op_check_value(run, "num_applied", (double)ours->num_applied, APPLIED[last], 0.0);
    op_check_value(run, "num_skipped", (double)ours->num_skipped, SKIPPED[last], 0.0);
    op_check_value(run, "num_skipped_in_a_row", (double)ours->num_skipped_in_a_row, IN_A_ROW[last], 0.0);
    op_check_value(run, "skip", (double)(int)ours->skip, (double)(int)SKIPS[last], 0.0);
    if (SKIPS[last] == Skip::NO_TOKS) op_check_value(run, "loss is NaN", std::isnan(ours->loss), 1.0, 0.0);
    if (SKIPS[last] != Skip::NONE) return;
    op_check_value(run, "loss", ours->loss, 3.0, 1e-15);
    op_check_value(run, "grad_norm", ours->grad_norm, 4.0, 1e-15);           // sqrt(4) times 100 / 50
    op_check_value(run, "clip_coef", ours->clip_coef, 1.0 / 4.000001, 1e-15);
    op_check_value(run, "bias_correction1", ours->bias_correction1, 1.0 - pow(0.9, APPLIED[last]), 1e-15);
    op_check_value(run, "bias_correction2", ours->bias_correction2, 1.0 - pow(0.95, APPLIED[last]), 1e-15);
}

/* Window 3, hysteresis 2, from 8 down to the floor of 2: each line is one step and the state after it. */
static void loss_scale_test(OpRun* run)
{
    static const struct { bool overflow; double scale; int hysteresis_left; bool exhausted; } STEPS[] = {
        {false, 8, 2, false}, {false, 8, 2, false}, {true, 8, 1, false},     // absorbed, and the count starts again
        {false, 8, 1, false}, {false, 8, 1, false}, {false, 16, 2, false},   // three good ones in a row
        {true, 16, 1, false}, {true, 8, 1, false}, {true, 4, 1, false}, {true, 2, 1, false}, {true, 2, 1, true},
    };
    StepConfig config = STEP_TEST_CONFIG;
    config.dynamic_loss_scale = true;
    config.min_loss_scale = 2.0;
    config.loss_scale_window = 3;
    StepState state = step_state_init(config, 8.0);
    for (size_t i = 0; i < sizeof STEPS / sizeof STEPS[0]; i++) {
        const double scale = state.loss_scale, sums[NUM_STEP_SUMS] = {16.0, STEPS[i].overflow ? 1.0 : 0.0, 1.0, 1.0};
        step_state_advance(&state, sums, config);
        op_check_value(run, "loss_scale", state.loss_scale, STEPS[i].scale, 0.0);
        op_check_value(run, "hysteresis_left", state.hysteresis_left, STEPS[i].hysteresis_left, 0.0);
        op_check_value(run, "exhausted", state.loss_scale_exhausted, STEPS[i].exhausted, 0.0);
        if (!STEPS[i].overflow) op_check_value(run, "norm, scale of this backward", state.grad_norm, 4.0 / scale, 0.0);
    }
    const double good[NUM_STEP_SUMS] = {16.0, 0.0, 1.0, 1.0};
    state = step_state_init(config, 0x1p126);
    for (int i = 0; i < 6; i++) step_state_advance(&state, good, config);
    op_check_value(run, "the largest scale", state.loss_scale, 0x1p127, 0.0);
}

static const OpTest step_tests[] = {
    {"step_state", step_state_test, {1}, OpWhen::ALWAYS},
    {"step_state", step_state_test, {2}, OpWhen::ALWAYS},
    {"step_state", step_state_test, {3}, OpWhen::ALWAYS},
    {"step_state", step_state_test, {4}, OpWhen::ALWAYS},
    {"step_state", step_state_test, {5}, OpWhen::ALWAYS},
    {"loss_scale", loss_scale_test, {}, OpWhen::ALWAYS},
    {"spike", spike_test, {0}, OpWhen::ALWAYS},
    {"spike", spike_test, {1}, OpWhen::ALWAYS},
    {"schedule", schedule_test, {}, OpWhen::ALWAYS},
    {"schedule_deepspeed", schedule_deepspeed_test, {}, OpWhen::ALWAYS},
    {"schedule_edges", schedule_edges_test, {}, OpWhen::ALWAYS},
};

#endif
