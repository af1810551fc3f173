/* optimizer_tests.h: part of optimizer.cuh: op tests, each row of OPTIMIZERS against its rule_ref. */
#pragma once
#include "optest.h"

static OptimizerConfig optimizer_test_config(float eps)
{
    return {eps, 0.8f, 0.1f, true, 1};
}

/* fp32 states and gradients; master null: param is it. */
static OptimizerArrays optimizer_test_arrays(floatX* param, float* master, float* m, float* v, float* grad)
{
    Values weights = master != nullptr ? values_of(master) : Values{param, FLOATX_DTYPE, nullptr};
    return OptimizerArrays{param, weights, values_of(grad), {values_of(m), values_of(v)}};
}

/* A step in the middle of a run: t = 3, clipped, half of the nominal tokens counted. */
static StepState optimizer_test_state(bool skip)
{
    StepState state = step_state_init(STEP_TEST_CONFIG, 1.0);
    const double sums[NUM_STEP_SUMS] = {9.0, skip ? 1.0 : 0.0, 0.5, 1.0};
    state.num_applied = 2;
    step_state_advance(&state, sums, STEP_TEST_CONFIG);
    return state;
}

/* Rates of a slice of n: one run, or with `cuts` five that end within vectors, each a tensor of its own, the second
 * without decay, the third left out, those behind it with a gap in slot GAPPED_STATE. */
static OptimizerRuns optimizer_test_runs(size_t n, bool cuts)
{
    OptimizerRuns runs = {};
    if (cuts) runs_extend(&runs, n / 3 + 1, 0.1f, 1.0f, 1);
    if (cuts) runs_extend(&runs, n / 3 + 2, 0.0f, 1.0f, 2);
    if (cuts) runs_extend(&runs, n / 2, 0.1f, 1.0f, 3, true);
    const size_t gap = cuts ? n / 2 - (n / 3 + 2) : 0;
    if (cuts) runs_extend(&runs, n - 1, 0.0f, 0.5f, 4, false, gap);
    runs_extend(&runs, n, 0.1f, 0.25f, 0, false, gap);
    return runs;
}

/* Sums of p^2 and u^2 of five tensors: an ordinary ratio, both ends of the clamp, no norm. */
static const double LAMB_TEST_SUMS[10] = {4.0, 1.0, 1.0, 4.0, 1e-9, 1.0, 1e6, 1.0, 0.0, 1.0};

/* One pass after the other, without what an optimizer does between them. */
template <class R> static void optimizer_passes(const OptimizerArrays& a, const OptimizerRuns* runs,
                                                const OptimizerConfig& config, const double* sums,
                                                const StepState* state)
{
    if constexpr (R::PHASE != TensorPhase::NONE) optimizer_update<typename R::First>(a, runs, config, sums, state, 0);
    optimizer_update<R>(a, runs, config, sums, state, 0);
}
template <class R, class T> static void rule_passes_ref(RuleRef<T>* r)
{
    if constexpr (R::PHASE != TensorPhase::NONE) rule_ref(typename R::First{}, r);
    rule_ref(R{}, r);
}

/* Element i of a run with these rates; its gapped state is `gap` elements before it. T: double or float. */
template <class R, class T> static void optimizer_ref(T* p, T* grad, T* const (&states)[MAX_STATES], size_t i,
                                                      size_t gap, double lr, double wd, double ratio,
                                                      const OptimizerConfig& c, const StepState& s)
{
    RuleRef<T> r = {p[i], grad[i] * (T)(s.grad_scale * s.clip_coef), grad[i], {}, (T)lr, (T)wd, (T)ratio,
                    (float)s.beta1, (float)s.beta2, c.eps, c.momentum, c.dampening, (T)s.bias_correction1,
                    (T)s.bias_correction2, c.nesterov, (int)s.num_applied};
    for (int k = 0; k < MAX_STATES; k++)
        if (states[k] != nullptr) r.states[k] = states[k][i - (k == GAPPED_STATE ? gap : 0)];
    rule_passes_ref<R>(&r);
    p[i] = r.p;
    grad[i] = r.grad;
    for (int k = 0; k < MAX_STATES; k++)
        if (states[k] != nullptr) states[k][i - (k == GAPPED_STATE ? gap : 0)] = r.states[k];
}

static bool is_second_moment(const char* state) { return strcmp(state, "v") == 0; }   // positive

/* dims: n, elements by which the tensors are shifted off their alignment, 1 to skip the step, 1 for several runs. */
template <class R> static void optimizer_test(OpRun* run)
{
    const size_t n = (size_t)run->dims[0], shift = (size_t)run->dims[1], whole = n + shift;
    const bool skip = run->dims[2] != 0, is_16bit = sizeof(floatX) < sizeof(float);
    const OptimizerConfig config = optimizer_test_config(1e-8f);
    const OptimizerRuns runs = optimizer_test_runs(n, run->dims[3] != 0);
    OpTensor<float> master = op_inout<float>(run, "master", whole, 0.0, 0.02);
    OpTensor<floatX> param = op_inout<floatX>(run, "param", whole, 0.0, 0.02);
    OpTensor<float> states[MAX_STATES] = {}, grad = op_inout<float>(run, "grad", whole, 0.0, 0.05);
    double* states64[MAX_STATES] = {};
    float* states32[MAX_STATES] = {};
    OptimizerArrays a = optimizer_test_arrays(param.dev, is_16bit ? master.dev : nullptr, nullptr, nullptr, grad.dev);
    for (int k = 0; k < MAX_STATES; k++) {
        if (R::STATES[k] == nullptr) continue;
        const bool positive = is_second_moment(R::STATES[k]);
        states[k] = op_inout<float>(run, R::STATES[k], whole, positive ? 1e-3 : 0.0, positive ? 2e-4 : 1e-3);
        a.states[k] = values_of(states[k].dev);
        states64[k] = states[k].f64 + shift;
        states32[k] = states[k].f32 + shift;
    }
    const double* sums = (const double*)op_bytes(run, "sums", OpKind::INPUT, LAMB_TEST_SUMS, sizeof LAMB_TEST_SUMS);
    const StepState s = optimizer_test_state(skip);
    const StepState* state = (const StepState*)op_bytes(run, "state", OpKind::INPUT, &s, sizeof s);
    OP_RUN(run, n * optimizer_bytes<R>(a), 0,
           optimizer_passes<R>(optimizer_arrays_from(a, shift), &runs, config, sums, state));
    double* p64 = (is_16bit ? master.f64 : param.f64) + shift;
    float* p32 = (is_16bit ? master.f32 : param.f32) + shift;
    for (size_t i = 0, k = 0; i < n && !skip; i++) {
        while (runs.end[k] <= i) k++;
        if (runs.left_out[k]) continue;
        const double lr = s.lr * (double)runs.lr_factor[k], wd = runs.weight_decay[k];
        const double ratio = lamb_ratio(LAMB_TEST_SUMS + 2 * runs.tensor[k]);
        optimizer_ref<R>(p64, grad.f64 + shift, states64, i, runs.gap[k], lr, wd, ratio, config, s);
        optimizer_ref<R>(p32, grad.f32 + shift, states32, i, runs.gap[k], lr, wd, ratio, config, s);
        if (!is_16bit) continue;
        param.f64[shift + i] = p64[i];
        param.f32[shift + i] = p32[i];
    }
    op_check(run, master);
    op_check(run, param);
    op_check(run, grad);
    for (int k = 0; k < MAX_STATES; k++) {
        if (R::STATES[k] != nullptr && is_second_moment(R::STATES[k])) op_check_relative(run, states[k]);
        else if (R::STATES[k] != nullptr) op_check(run, states[k]);
    }
}

/* Five parameters worked out by hand: gradient (0.2, -0.3, -0.05, -0.05, 0.2) with norm 0.418330, one step from zero at
 * lr 0.1, eps 0.1, without and with clipping at 0.1. dims: 1 to clip. */
static void adamw_trial_test(OpRun* run)
{
    static const float GRAD[5] = {0.2f, -0.3f, -0.05f, -0.05f, 0.2f};
    static const double PLAIN[5] = {-0.0666667, 0.0750000, 0.0333333, 0.0333333, -0.0666667};
    static const double CLIPPED[5] = {-0.0323452, 0.0417635, 0.0106762, 0.0106762, -0.0323452};
    const bool clip = run->dims[0] == 1;
    StepConfig config = STEP_TEST_CONFIG;
    config.peak_lr = 0.1;
    config.max_norm = clip ? 0.1 : 0.0;
    config.nominal_toks = 4.0;
    StepState s = step_state_init(config, 1.0);
    double sums[NUM_STEP_SUMS] = {0.0, 0.0, 4.0, 4.0 * 1.609438};
    for (int i = 0; i < 5; i++) sums[SUM_SQUARES] += (double)GRAD[i] * GRAD[i];
    step_state_advance(&s, sums, config);
    op_check_value(run, "grad_norm", s.grad_norm, 0.418330, 5e-7);
    op_check_value(run, "loss", s.loss, 1.609438, 1e-12);
    static const float ZERO[5] = {};
    static const floatX ZERO_X[5] = {};
    floatX* param = (floatX*)op_bytes(run, "param", OpKind::INOUT, ZERO_X, sizeof ZERO_X);
    float* master = (float*)op_bytes(run, "master", OpKind::INOUT, ZERO, sizeof ZERO);
    float* m = (float*)op_bytes(run, "m", OpKind::INOUT, ZERO, sizeof ZERO);
    float* v = (float*)op_bytes(run, "v", OpKind::INOUT, ZERO, sizeof ZERO);
    const float* grad = (const float*)op_bytes(run, "grad", OpKind::INPUT, GRAD, sizeof GRAD);
    const StepState* state = (const StepState*)op_bytes(run, "state", OpKind::INPUT, &s, sizeof s);
    const bool is_16bit = sizeof(floatX) < sizeof(float);
    const OptimizerConfig config_adamw = optimizer_test_config(0.1f);
    OptimizerRuns runs = {};
    runs_extend(&runs, 5, 0.0f, 1.0f);
    OP_RUN(run, 0, 0,
           optimizer_update<Adamw>(optimizer_test_arrays(param, is_16bit ? master : nullptr, m, v, (float*)grad),
                                         &runs, config_adamw, nullptr, state, 0));
    const float* ours = (const float*)op_result(run, is_16bit ? "master" : "param");
    for (int i = 0; i < 5; i++) op_check_value(run, "param", ours[i], clip ? CLIPPED[i] : PLAIN[i], 6e-8);
    const float* ours_m = (const float*)op_result(run, "m");
    for (int i = 0; i < 5; i++) op_check_value(run, "m", ours_m[i], 0.1 * GRAD[i] * s.clip_coef, 1e-8);
}

/* Decay by itself: gradients of 0, weight decay 1, warm-up 4 of 8 steps, cosine from 0.1 to 0.01. */
static void step_trial_run(StepState* state, const double* sums, StepConfig config, float* param, float* m, float* v,
                           const float* grad, int num_steps)
{
    OptimizerRuns runs = {};
    runs_extend(&runs, 1, 1.0f, 1.0f);
    for (int step = 0; step < num_steps; step++) {
        step_state_update(state, sums, config, 0);
        const bool is_16bit = sizeof(floatX) < sizeof(float);
        floatX* param_x = is_16bit ? (floatX*)(param + 1) : (floatX*)param;
        optimizer_update<Adamw>(optimizer_test_arrays(param_x, is_16bit ? param : nullptr, m, v, (float*)grad), &runs,
                                      optimizer_test_config(1e-8f), nullptr, state, 0);
    }
}

static void step_trial_test(OpRun* run)
{
    static const double LR[8] = {0.025, 0.05, 0.075, 0.1, 0.1, 0.0868198, 0.055, 0.0231802};
    const int num_steps = run->dims[0];
    StepConfig config = STEP_TEST_CONFIG;
    config.schedule = Schedule::COSINE;
    config.peak_lr = 0.1;
    config.min_lr = 0.01;
    config.warmup_steps = 4;
    config.total_steps = 8;
    StepState s = step_state_init(config, 1.0);
    const double h_sums[NUM_STEP_SUMS] = {0.0, 0.0, 1.0, 1.386294};
    const float h_param[2] = {1.0f, 0.0f}, zero = 0.0f;
    StepState* state = (StepState*)op_bytes(run, "state", OpKind::INOUT, &s, sizeof s);
    const double* sums = (const double*)op_bytes(run, "sums", OpKind::INPUT, h_sums, sizeof h_sums);
    float* param = (float*)op_bytes(run, "param", OpKind::INOUT, h_param, sizeof h_param);
    float* m = (float*)op_bytes(run, "m", OpKind::INOUT, &zero, sizeof zero);
    float* v = (float*)op_bytes(run, "v", OpKind::INOUT, &zero, sizeof zero);
    const float* grad = (const float*)op_bytes(run, "grad", OpKind::INPUT, &zero, sizeof zero);
    OP_RUN(run, 0, 0, step_trial_run(state, sums, config, param, m, v, grad, num_steps));
    const StepState* ours = (const StepState*)op_result(run, "state");
    op_check_value(run, "num_applied", (double)ours->num_applied, num_steps, 0.0);
    op_check_value(run, "lr", ours->lr, LR[num_steps - 1], 5e-8);
    const float weight = *(const float*)op_result(run, "param");
    op_check_value(run, "weight", weight, num_steps == 4 ? 0.7711031 : 0.5850025, 1e-7);
}

#define OPTIMIZER_TESTS(name, word, R) \
    {word, optimizer_test<R>, {1}, OpWhen::ALWAYS}, {word, optimizer_test<R>, {4099}, OpWhen::ALWAYS}, \
    {word, optimizer_test<R>, {1000, 3}, OpWhen::ALWAYS}, \
    {word, optimizer_test<R>, {1000, 8, 1}, OpWhen::ALWAYS}, \
    {word, optimizer_test<R>, {4099, 0, 0, 1}, OpWhen::ALWAYS}, \
    {word, optimizer_test<R>, {4100, 0, 0, 1}, OpWhen::ALWAYS}, \
    {word, optimizer_test<R>, {3001, 1, 0, 1}, OpWhen::ALWAYS}, \
    {word, optimizer_test<R>, {124 * 1000 * 1000}, OpWhen::BENCH},

static const OpTest optimizer_tests[] = {
    OPTIMIZERS(OPTIMIZER_TESTS)
    {"adamw", optimizer_test<Adamw>, {3000001}, OpWhen::LARGE},
    {"adamw_trial", adamw_trial_test, {2}, OpWhen::ALWAYS},
    {"adamw_trial", adamw_trial_test, {1}, OpWhen::ALWAYS},
    {"step_trial", step_trial_test, {4}, OpWhen::ALWAYS},
    {"step_trial", step_trial_test, {8}, OpWhen::ALWAYS},
};
