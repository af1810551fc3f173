/* optimizer.cuh: one step of AdamW, from the step's state (step.cuh).
 *   adamw_update:  g = grad * grad_scale * clip_coef
 *     m = beta1*m + (1-beta1)*g      v = beta2*v + (1-beta2)*g^2
 *     p = p*(1 - lr*weight_decay) - lr * (m/bias_correction1) / (sqrt(v/bias_correction2) + eps)
 * shapes  param (n) floatX; master m v grad (n) fp32
 * writes  param = master = m = v = (param is master rounded; in fp32 it is the master)
 * needs   any n; adamw_update_runs: up to 32 runs of elements, each with its weight decay, one after another
 * exact   each element by itself: same bits on every run and for any number of CPU threads
 * cost    fp32: reads p g m v, writes p m v, 28*n bytes; 16-bit param: 30*n. Judged against memory bandwidth
 * source  Loshchilov & Hutter 2017, arXiv:1711.05101 */
#pragma once
#include "step.cuh"

struct AdamwFactors { float grad_coef, beta1, beta2, step_size, rsqrt_correction2, eps, decay; };

HOSTDEV AdamwFactors adamw_factors(const StepState* state, float weight_decay, float beta1, float beta2, float eps)
{
    AdamwFactors f;
    f.grad_coef = (float)(state->grad_scale * state->clip_coef);
    f.beta1 = beta1;
    f.beta2 = beta2;
    f.step_size = (float)(state->lr / state->bias_correction1);
    f.rsqrt_correction2 = (float)(1.0 / sqrt(state->bias_correction2));
    f.eps = eps;
    f.decay = (float)(state->lr * (double)weight_decay);
    return f;
}

/* Where the weight decay changes along a slice: run i ends before element end[i]. Given to the kernel by value. */
static constexpr int ADAMW_MAX_RUNS = 32;
struct AdamwRuns {
    int num_runs;
    float weight_decay[ADAMW_MAX_RUNS];
    size_t end[ADAMW_MAX_RUNS];
};

/* Lengthens the runs to `end` elements. */
static void adamw_runs_extend(AdamwRuns* runs, size_t end, float weight_decay)
{
    if (runs->num_runs == 0 || runs->weight_decay[runs->num_runs - 1] != weight_decay) {
        ENSURE(runs->num_runs < ADAMW_MAX_RUNS, "weight decay changes more than %d times in a slice", ADAMW_MAX_RUNS);
        runs->weight_decay[runs->num_runs++] = weight_decay;
    }
    runs->end[runs->num_runs - 1] = end;
}

/* The whole rule, for every build: the new parameter. Decay and step are added before p is rounded, so that a decay far
 * below p's last bit is not always rounded the same way. */
HOSTDEV float adamw_element(float p, float g, float* m, float* v, AdamwFactors f)
{
    g *= f.grad_coef;
    *m = f.beta1 * *m + (1.0f - f.beta1) * g;
    *v = f.beta2 * *v + (1.0f - f.beta2) * g * g;
    return p - (f.decay * p + f.step_size * *m / (sqrtf(*v) * f.rsqrt_correction2 + f.eps));
}

#ifdef DEVICE_CPU

static void adamw_update_cpu(floatX* param, float* master, float* m, float* v, const float* grad, size_t n,
                             AdamwFactors f)
{
    if (master == nullptr) master = (float*)param;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) {
        master[i] = adamw_element(master[i], grad[i], &m[i], &v[i], f);
        if (sizeof(floatX) < sizeof(float)) store_f(param + i, master[i]);
    }
}

#else

static constexpr int ADAMW_BLOCK = 256;

/* One vector of W a thread; where a run ends within it, element by element. In fp32 param is the master. At any
 * precision W = 4: a warp's 16 bytes of fp32 a thread lie side by side, and so do the 8 bytes of a 16-bit param; with
 * 8 elements a thread each request touched every sector of twice its bytes. */
template <int W> static __global__ void __launch_bounds__(ADAMW_BLOCK, 5)   // without the 5 it spills on sm_80
adamw_kernel(floatX* param, float* master, float* m, float* v, const float* grad, AdamwRuns runs, float beta1,
             float beta2, float eps, const StepState* state)
{
    const size_t first = ((size_t)blockIdx.x * ADAMW_BLOCK + threadIdx.x) * W, n = runs.end[runs.num_runs - 1];
    if (state->skip != Skip::NONE || first >= n) return;
    size_t i = first;
    int run = 0;
    while (runs.end[run] <= i) run++;
    AdamwFactors f = adamw_factors(state, runs.weight_decay[run], beta1, beta2, eps);
    if (i + W <= runs.end[run]) {
        float p[W], g[W], new_m[W], new_v[W];
        load_vec(p, master + i);
        load_vec(g, grad + i);
        load_vec(new_m, m + i);
        load_vec(new_v, v + i);
#pragma unroll
        for (int k = 0; k < W; k++) p[k] = adamw_element(p[k], g[k], &new_m[k], &new_v[k], f);
        store_vec(m + i, new_m);
        store_vec(v + i, new_v);
        store_vec(master + i, p);
        if (sizeof(floatX) < sizeof(float)) store_vec(param + i, p);
    } else {
        for (; i < first + W && i < n; i++) {
            for (; runs.end[run] <= i; run++)
                f.decay = (float)(state->lr * (double)runs.weight_decay[run + 1]);
            master[i] = adamw_element(master[i], grad[i], &m[i], &v[i], f);
            if (sizeof(floatX) < sizeof(float)) store_f(param + i, master[i]);
        }
    }
}

#endif

#ifdef DEVICE_CPU
static void adamw_update_runs_cpu(floatX* param, float* master, float* m, float* v, const float* grad,
                                  const AdamwRuns* runs, float beta1, float beta2, float eps, const StepState* state)
{
    if (state->skip != Skip::NONE) return;
    size_t first = 0;
    for (int run = 0; run < runs->num_runs; first = runs->end[run++])
        adamw_update_cpu(param + first, master != nullptr ? master + first : nullptr, m + first, v + first,
                         grad + first, runs->end[run] - first,
                         adamw_factors(state, runs->weight_decay[run], beta1, beta2, eps));
}
#endif

/* In one launch. master is null in fp32, and only there. */
static void adamw_update_runs(floatX* param, float* master, float* m, float* v, const float* grad,
                              const AdamwRuns* runs, float beta1, float beta2, float eps, const StepState* state,
                              cudaStream_t stream)
{
    assert((master == nullptr) == (sizeof(floatX) == sizeof(float)));
    if (runs->num_runs == 0) return;
    ON_CPU(adamw_update_runs_cpu(param, master, m, v, grad, runs, beta1, beta2, eps, state));
#ifndef DEVICE_CPU
    if (master == nullptr) master = (float*)param;
    const size_t n = runs->end[runs->num_runs - 1];
    if (is_vec(param, VEC) && is_vec(master, VEC) && is_vec(m, VEC) && is_vec(v, VEC) && is_vec(grad, VEC))
        LAUNCH((adamw_kernel<4>), (unsigned)ceil_div(n, ADAMW_BLOCK * 4), ADAMW_BLOCK, 0, stream, param, master, m,
               v, grad, *runs, beta1, beta2, eps, state);
    else
        LAUNCH((adamw_kernel<1>), (unsigned)ceil_div(n, ADAMW_BLOCK), ADAMW_BLOCK, 0, stream, param, master, m, v, grad,
               *runs, beta1, beta2, eps, state);
    CUDA_CHECK(cudaGetLastError());
#endif
}

static void adamw_update(floatX* param, float* master, float* m, float* v, const float* grad, size_t n,
                         float weight_decay, float beta1, float beta2, float eps, const StepState* state,
                         cudaStream_t stream)
{
    AdamwRuns runs = {};
    if (n > 0) adamw_runs_extend(&runs, n, weight_decay);
    adamw_update_runs(param, master, m, v, grad, &runs, beta1, beta2, eps, state, stream);
}

#ifdef OP_TESTS

template <class R> static void adamw_ref(R* param, R* m, R* v, const R* grad, size_t n, R lr, R coef, R weight_decay,
                                         R beta1, R beta2, R eps, R bias_correction1, R bias_correction2)
{
    for (size_t i = 0; i < n; i++) {
        const R g = grad[i] * coef;
        m[i] = beta1 * m[i] + (1 - beta1) * g;
        v[i] = beta2 * v[i] + (1 - beta2) * g * g;
        const R step = lr * (m[i] / bias_correction1) / (std::sqrt(v[i] / bias_correction2) + eps);
        param[i] = param[i] * (1 - lr * weight_decay) - step;
    }
}

/* A step in the middle of a run: t = 3, clipped, half of the nominal tokens counted. */
static StepState adamw_test_state(bool skip)
{
    StepState state = step_state_init(STEP_TEST_CONFIG, 1.0);
    const double sums[NUM_STEP_SUMS] = {9.0, skip ? 1.0 : 0.0, 0.5, 1.0};
    state.num_applied = 2;
    step_state_advance(&state, sums, STEP_TEST_CONFIG);
    return state;
}

/* Weight decays of a slice of n: 0.1, or with `cuts` also 0 in two runs that end within vectors. */
static AdamwRuns adamw_test_runs(size_t n, bool cuts)
{
    AdamwRuns runs = {};
    if (cuts) adamw_runs_extend(&runs, n / 3 + 1, 0.1f);
    if (cuts) adamw_runs_extend(&runs, n / 3 + 2, 0.0f);
    if (cuts) adamw_runs_extend(&runs, n / 2, 0.1f);
    if (cuts) adamw_runs_extend(&runs, n - 1, 0.0f);
    adamw_runs_extend(&runs, n, 0.1f);
    return runs;
}

/* dims: n, elements by which the tensors are shifted off their alignment, 1 to skip the step, 1 for several runs. */
static void adamw_test(OpRun* run)
{
    const size_t n = (size_t)run->dims[0], shift = (size_t)run->dims[1], whole = n + shift;
    const bool skip = run->dims[2] != 0;
    const float beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f;
    const AdamwRuns runs = adamw_test_runs(n, run->dims[3] != 0);
    OpTensor<float> master = op_inout<float>(run, "master", whole, 0.0, 0.02);
    OpTensor<floatX> param = op_inout<floatX>(run, "param", whole, 0.0, 0.02);
    OpTensor<float> m = op_inout<float>(run, "m", whole, 0.0, 1e-3), v = op_inout<float>(run, "v", whole, 1e-3, 2e-4);
    OpTensor<float> grad = op_input<float>(run, "grad", whole, 0.0, 0.05);
    const StepState s = adamw_test_state(skip);
    const StepState* state = (const StepState*)op_bytes(run, "state", OpKind::INPUT, &s, sizeof s);
    const bool is_16bit = sizeof(floatX) < sizeof(float);
    OP_RUN(run, n * (24.0 + (is_16bit ? 6.0 : 4.0)), 0,
           adamw_update_runs(param.dev + shift, is_16bit ? master.dev + shift : nullptr, m.dev + shift, v.dev + shift,
                             grad.dev + shift, &runs, beta1, beta2, eps, state, 0));
    double* p64 = (is_16bit ? master.f64 : param.f64) + shift;
    float* p32 = (is_16bit ? master.f32 : param.f32) + shift;
    const double coef = s.grad_scale * s.clip_coef;
    if (!skip) {
        for (size_t k = 0, first = 0; k < (size_t)runs.num_runs; first = runs.end[k++]) {
            const size_t at = shift + first, count = runs.end[k] - first;
            const float decay = runs.weight_decay[k];
            adamw_ref(p64 + first, m.f64 + at, v.f64 + at, grad.f64 + at, count, s.lr, coef, (double)decay,
                      (double)beta1, (double)beta2, (double)eps, s.bias_correction1, s.bias_correction2);
            adamw_ref(p32 + first, m.f32 + at, v.f32 + at, grad.f32 + at, count, (float)s.lr, (float)coef, decay, beta1,
                      beta2, eps, (float)s.bias_correction1, (float)s.bias_correction2);
        }
        for (size_t i = shift; is_16bit && i < whole; i++) {
            param.f64[i] = master.f64[i];
            param.f32[i] = master.f32[i];
        }
    }
    op_check(run, master);
    op_check(run, param);
    op_check(run, m);
    op_check_relative(run, v);
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
    OP_RUN(run, 0, 0,
           adamw_update(param, is_16bit ? master : nullptr, m, v, grad, 5, 0.0f, 0.9f, 0.95f, 0.1f, state, 0));
    const float* ours = (const float*)op_result(run, is_16bit ? "master" : "param");
    for (int i = 0; i < 5; i++) op_check_value(run, "param", ours[i], clip ? CLIPPED[i] : PLAIN[i], 6e-8);
    const float* ours_m = (const float*)op_result(run, "m");
    for (int i = 0; i < 5; i++) op_check_value(run, "m", ours_m[i], 0.1 * GRAD[i] * s.clip_coef, 1e-8);
}

/* Decay by itself: gradients of 0, weight decay 1, warm-up 4 of 8 steps, cosine from 0.1 to 0.01. */
static void step_trial_run(StepState* state, const double* sums, StepConfig config, float* param, float* m, float* v,
                           const float* grad, int num_steps)
{
    for (int step = 0; step < num_steps; step++) {
        step_state_update(state, sums, config, 0);
        const bool is_16bit = sizeof(floatX) < sizeof(float);
        floatX* param_x = is_16bit ? (floatX*)(param + 1) : (floatX*)param;
        adamw_update(param_x, is_16bit ? param : nullptr, m, v, grad, 1, 1.0f, 0.9f, 0.95f, 1e-8f, state, 0);
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

static const OpTest optimizer_tests[] = {
    {"adamw", adamw_test, {1}, OpWhen::ALWAYS},
    {"adamw", adamw_test, {4099}, OpWhen::ALWAYS},
    {"adamw", adamw_test, {1000, 3}, OpWhen::ALWAYS},
    {"adamw", adamw_test, {1000, 8, 1}, OpWhen::ALWAYS},
    {"adamw", adamw_test, {4099, 0, 0, 1}, OpWhen::ALWAYS},
    {"adamw", adamw_test, {3001, 1, 0, 1}, OpWhen::ALWAYS},
    {"adamw", adamw_test, {3000001}, OpWhen::LARGE},
    {"adamw_trial", adamw_trial_test, {2}, OpWhen::ALWAYS},
    {"adamw_trial", adamw_trial_test, {1}, OpWhen::ALWAYS},
    {"step_trial", step_trial_test, {4}, OpWhen::ALWAYS},
    {"step_trial", step_trial_test, {8}, OpWhen::ALWAYS},
    {"adamw", adamw_test, {124 * 1000 * 1000}, OpWhen::BENCH},
};

#endif
