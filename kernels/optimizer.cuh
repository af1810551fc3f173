/* optimizer.cuh: one step of AdamW, from the step's state (step.cuh).
 *   adamw_update:  g = grad * grad_scale * clip_coef
 *     m = beta1*m + (1-beta1)*g      v = beta2*v + (1-beta2)*g^2
 *     p = p*(1 - lr*weight_decay) - lr * (m/bias_correction1) / (sqrt(v/bias_correction2) + eps)
 * shapes  param (n) floatX; master m v grad (n), stored as Values says (values.cuh):
 *         master   FP32: param is it rounded to nearest; in fp32 they are one.   SPLIT: its upper half is param.
 *                  BF16: it is param: there is no master, and the new weight is rounded at random
 *         m v      FP32, or BF16 rounded at random       grad     FP32 or floatX's
 * writes  param = master = m = v =
 * needs   any n; adamw_update_runs: up to 32 runs of elements, each with its weight decay, one after another
 * exact   each element by itself: same bits on every run and for any number of CPU threads. Random roundings come from
 *         the seed, the number of the applied step and the element's index among all parameters, nothing else
 * cost    reads p g m v, writes p m v (and param beside a master): fp32 28*n bytes; 16-bit param with an fp32 master
 *         30*n, split 28*n, none 24*n; m and v in bf16 8*n less, grad in 16 bits 2*n less. Judged against memory
 * source  Loshchilov & Hutter 2017, arXiv:1711.05101 */
#pragma once
#include "step.cuh"
#include "values.cuh"

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

/* Where the weight decay, or the distance between an element's place in a slice and its index among all parameters,
 * changes along the slice: run i ends before element end[i]. Given to the kernel by value. */
static constexpr int ADAMW_MAX_RUNS = 32;
struct AdamwRuns {
    int num_runs;
    float weight_decay[ADAMW_MAX_RUNS];
    size_t end[ADAMW_MAX_RUNS];
    uint64_t index[ADAMW_MAX_RUNS];   // of the slice's element 0, if the run went back to it
};

/* Lengthens the runs to `end` elements. */
static void adamw_runs_extend(AdamwRuns* runs, size_t end, float weight_decay, uint64_t index = 0)
{
    int last = runs->num_runs - 1;
    if (last < 0 || runs->weight_decay[last] != weight_decay || runs->index[last] != index) {
        ENSURE(runs->num_runs < ADAMW_MAX_RUNS, "tensors in a slice: more than %d", ADAMW_MAX_RUNS);
        runs->index[runs->num_runs] = index;
        runs->weight_decay[runs->num_runs++] = weight_decay;
    }
    runs->end[runs->num_runs - 1] = end;
}

/* What a step reads and changes. */
struct AdamwArrays {
    floatX* param;
    Values master, m, v, grad;
};

static AdamwArrays adamw_arrays_from(const AdamwArrays& a, size_t first)
{
    return AdamwArrays{a.param + first, values_from(a.master, first), values_from(a.m, first), values_from(a.v, first),
                       values_from(a.grad, first)};
}

/* For fp32 states and gradients; master null: param is it. */
static AdamwArrays adamw_arrays(floatX* param, float* master, float* m, float* v, float* grad)
{
    Values weights = master != nullptr ? values_of(master) : Values{param, FLOATX_DTYPE, nullptr};
    return AdamwArrays{param, weights, values_of(m), values_of(v), values_of(grad)};
}

HOSTDEV bool adamw_rounds_at_random(const AdamwArrays& a)
{
    return a.master.dtype == Dtype::BF16 || a.m.dtype == Dtype::BF16 || a.v.dtype == Dtype::BF16;
}

/* Is the weight that the model uses kept beside the master? */
HOSTDEV bool adamw_has_copy(const AdamwArrays& a) { return (void*)a.param != a.master.at; }

/* The key of this step's random bits; of an element's 64, the weight takes the lowest 16, then m, then v. */
enum { RANDOM_WEIGHT = 0, RANDOM_M = 16, RANDOM_V = 32 };
HOSTDEV uint64_t adamw_random_key(uint64_t seed, const StepState* state)
{
    return mix64(mix64(seed + GOLDEN_GAMMA) + state->num_applied);
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

/* Elements first.. (n <= VALUES_PIECE). */
static void adamw_piece_cpu(const AdamwArrays& a, size_t first, size_t n, AdamwFactors f, uint64_t key, uint64_t index)
{
    float bufs[4][VALUES_PIECE];
    uint64_t random[VALUES_PIECE];
    float *p = values_get(a.master, first, n, bufs[0]), *m = values_get(a.m, first, n, bufs[1]);
    float *v = values_get(a.v, first, n, bufs[2]), *grad = values_get(a.grad, first, n, bufs[3]);
    #pragma omp simd
    for (size_t i = 0; i < n; i++) p[i] = adamw_element(p[i], grad[i], &m[i], &v[i], f);
    random[0] = random_bits(key, index + first);
    for (size_t i = 1; i < (adamw_rounds_at_random(a) ? n : 0); i++) random[i] = random_bits(key, index + first + i);
    values_put_random(a.m, first, n, m, random, RANDOM_M);
    values_put_random(a.v, first, n, v, random, RANDOM_V);
    values_put_random(a.master, first, n, p, random, RANDOM_WEIGHT);
    #pragma omp simd
    for (size_t i = 0; i < (adamw_has_copy(a) ? n : 0); i++) store_weight(a.param + first + i, p[i]);
}

static void adamw_update_runs_cpu(const AdamwArrays& a, const AdamwRuns* runs, float beta1, float beta2, float eps,
                                  uint64_t seed, const StepState* state)
{
    if (state->skip != Skip::NONE) return;
    size_t first = 0;
    for (int run = 0; run < runs->num_runs; first = runs->end[run++]) {
        const AdamwFactors f = adamw_factors(state, runs->weight_decay[run], beta1, beta2, eps);
        const size_t end = runs->end[run];
        const uint64_t key = adamw_random_key(seed, state), index = runs->index[run];
        #pragma omp parallel for schedule(static)
        for (size_t i = first; i < end; i += VALUES_PIECE)
            adamw_piece_cpu(a, i, end - i < VALUES_PIECE ? end - i : VALUES_PIECE, f, key, index);
    }
}

#else

static constexpr int ADAMW_BLOCK = 256;

DEV void adamw_one(const AdamwArrays& a, size_t i, AdamwFactors f, uint64_t random)
{
    float m = value_load(a.m, i), v = value_load(a.v, i);
    const float p = adamw_element(value_load(a.master, i), value_load(a.grad, i), &m, &v, f);
    value_store_random(a.m, i, m, (uint32_t)(random >> RANDOM_M));
    value_store_random(a.v, i, v, (uint32_t)(random >> RANDOM_V));
    value_store_random(a.master, i, p, (uint32_t)(random >> RANDOM_WEIGHT));
    if (adamw_has_copy(a)) store_weight(a.param + i, p);
}

/* One vector of W a thread; where a run ends within it, element by element. At any precision W = 4: a warp's 16 bytes
 * of fp32 a thread lie side by side, and so do the 8 bytes of what has 16 bits; with 8 elements a thread each request
 * touched every sector of twice its bytes. */
template <int W> static __global__ void __launch_bounds__(ADAMW_BLOCK, 4)
adamw_kernel(AdamwArrays a, AdamwRuns runs, float beta1, float beta2, float eps, uint64_t seed, const StepState* state)
{
    const size_t first = ((size_t)blockIdx.x * ADAMW_BLOCK + threadIdx.x) * W, n = runs.end[runs.num_runs - 1];
    if (state->skip != Skip::NONE || first >= n) return;
    const bool at_random = adamw_rounds_at_random(a);
    const uint64_t key = at_random ? adamw_random_key(seed, state) : 0;
    size_t i = first;
    int run = 0;
    while (runs.end[run] <= i) run++;
    AdamwFactors f = adamw_factors(state, runs.weight_decay[run], beta1, beta2, eps);
    if (i + W <= runs.end[run]) {
        float p[W], g[W], m[W], v[W];
        uint64_t random[W] = {};
        values_load(p, a.master, i);
        values_load(g, a.grad, i);
        values_load(m, a.m, i);
        values_load(v, a.v, i);
#pragma unroll
        for (int k = 0; k < W; k++) {
            p[k] = adamw_element(p[k], g[k], &m[k], &v[k], f);
            if (at_random) random[k] = random_bits(key, runs.index[run] + i + k);
        }
        values_store(a.m, i, m, random, RANDOM_M);
        values_store(a.v, i, v, random, RANDOM_V);
        values_store(a.master, i, p, random, RANDOM_WEIGHT);
        if (adamw_has_copy(a)) weights_store(a.param + i, p);
    } else {
        for (; i < first + W && i < n; i++) {
            for (; runs.end[run] <= i; run++)
                f.decay = (float)(state->lr * (double)runs.weight_decay[run + 1]);
            adamw_one(a, i, f, at_random ? random_bits(key, runs.index[run] + i) : 0);
        }
    }
}

#endif

/* In one launch. */
static void adamw_update_runs(const AdamwArrays& a, const AdamwRuns* runs, float beta1, float beta2, float eps,
                              uint64_t seed, const StepState* state, cudaStream_t stream)
{
    if (runs->num_runs == 0) return;
    ON_CPU(adamw_update_runs_cpu(a, runs, beta1, beta2, eps, seed, state));
#ifndef DEVICE_CPU
    const size_t n = runs->end[runs->num_runs - 1];
    bool vec = (uintptr_t)a.param % (4 * sizeof(floatX)) == 0;
    for (const Values* values : {&a.master, &a.m, &a.v, &a.grad}) vec = vec && values_are_vec(*values, 4);
    if (vec)
        LAUNCH((adamw_kernel<4>), (unsigned)ceil_div(n, ADAMW_BLOCK * 4), ADAMW_BLOCK, 0, stream, a, *runs, beta1,
               beta2, eps, seed, state);
    else
        LAUNCH((adamw_kernel<1>), (unsigned)ceil_div(n, ADAMW_BLOCK), ADAMW_BLOCK, 0, stream, a, *runs, beta1, beta2,
               eps, seed, state);
    CUDA_CHECK(cudaGetLastError());
#endif
}

static void adamw_update(const AdamwArrays& a, size_t n, float weight_decay, float beta1, float beta2, float eps,
                         uint64_t seed, const StepState* state, cudaStream_t stream)
{
    AdamwRuns runs = {};
    if (n > 0) adamw_runs_extend(&runs, n, weight_decay);
    adamw_update_runs(a, &runs, beta1, beta2, eps, seed, state, stream);
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
           adamw_update_runs(adamw_arrays_from(adamw_arrays(param.dev, is_16bit ? master.dev : nullptr, m.dev, v.dev,
                                                            grad.dev), shift),
                             &runs, beta1, beta2, eps, 1, state, 0));
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

/* States of other storage. dims: n, elements by which the tensors are shifted, Dtype of the master (BF16: none), 1 for
 * m and v in bf16, 1 for a gradient in 16 bits. The run's first element is number 77 of all parameters. */
template <class S, class G> static void adamw_storage_run(OpRun* run, Dtype master_dtype)
{
    const size_t n = (size_t)run->dims[0], shift = (size_t)run->dims[1], whole = n + shift;
    AdamwRuns runs = {};
    if (n > 3) adamw_runs_extend(&runs, n / 2 + 1, 0.1f, 77);
    adamw_runs_extend(&runs, n, 0.1f, 78);
    OpTensor<floatX> param = op_inout<floatX>(run, "param", whole, 0.0, 0.02);
    OpTensor<S> m = op_inout<S>(run, "m", whole, 0.0, 1e-3), v = op_inout<S>(run, "v", whole, 1e-3, 2e-4);
    OpTensor<G> grad = op_input<G>(run, "grad", whole, 0.0, 0.05);
    unsigned short* h_low = (unsigned short*)op_host(run, whole);
    for (size_t i = 0; i < whole; i++) h_low[i] = (unsigned short)op_random(99, i);
    const StepState s = adamw_test_state(false);
    const StepState* state = (const StepState*)op_bytes(run, "state", OpKind::INPUT, &s, sizeof s);
    const bool split = master_dtype == Dtype::SPLIT;
    const Dtype state_dtype = sizeof(S) == 2 ? Dtype::BF16 : Dtype::FP32;
    unsigned short* low = nullptr;
    if (split) low = (unsigned short*)op_bytes(run, "low", OpKind::INOUT, h_low, whole * sizeof *h_low);
    const Dtype grad_dtype = sizeof(G) == 2 ? FLOATX_DTYPE : Dtype::FP32;
    const AdamwArrays a = {param.dev, {param.dev, master_dtype, low}, {m.dev, state_dtype, nullptr},
                           {v.dev, state_dtype, nullptr}, {grad.dev, grad_dtype, nullptr}};
    OP_RUN(run, n * (2.0 * sizeof(floatX) + (split ? 4.0 : 0.0) + 4.0 * sizeof(S) + sizeof(G)), 0,
           adamw_update_runs(adamw_arrays_from(a, shift), &runs, 0.9f, 0.95f, 1e-8f, 5, state, 0));
    const unsigned short* h_param = (const unsigned short*)op_start_bytes(run, "param");
    for (size_t i = 0; split && i < whole; i++) param.f64[i] = param.f32[i] = split_join(h_param[i], h_low[i]);
    const double coef = s.grad_scale * s.clip_coef;
    adamw_ref(param.f64 + shift, m.f64 + shift, v.f64 + shift, grad.f64 + shift, n, s.lr, coef, (double)0.1f,
              (double)0.9f, (double)0.95f, (double)1e-8f, s.bias_correction1, s.bias_correction2);
    adamw_ref(param.f32 + shift, m.f32 + shift, v.f32 + shift, grad.f32 + shift, n, (float)s.lr, (float)coef, 0.1f,
              0.9f, 0.95f, 1e-8f, (float)s.bias_correction1, (float)s.bias_correction2);
    op_check(run, param);
    op_check(run, m);
    op_check_relative(run, v);
    if (!split) return;
    const unsigned short *high = (const unsigned short*)op_result(run, "param");
    double err_ours = 0, err_plain = 0, largest = 0;
    low = (unsigned short*)op_result(run, "low");
    for (size_t i = shift; i < whole; i++) {
        err_ours = fmax(err_ours, fabs((double)split_join(high[i], low[i]) - param.f64[i]));
        err_plain = fmax(err_plain, fabs((double)param.f32[i] - param.f64[i]));
        largest = fmax(largest, fabs(param.f64[i]));
    }
    op_verdict(run, "split master", err_ours, 2 * err_plain + largest * op_step((const float*)nullptr));
}

static void adamw_storage_test(OpRun* run)
{
    const Dtype master = (Dtype)run->dims[2];
    if (master == Dtype::SPLIT ? FLOATX_DTYPE != Dtype::BF16 : master != FLOATX_DTYPE) return;
    if (run->dims[3] && run->dims[4]) adamw_storage_run<__nv_bfloat16, floatX>(run, master);
    else if (run->dims[3]) adamw_storage_run<__nv_bfloat16, float>(run, master);
    else if (run->dims[4]) adamw_storage_run<float, floatX>(run, master);
    else adamw_storage_run<float, float>(run, master);
}

/* Three steps with an fp32 master, and three with a split one of the same values: the same bits. */
static void adamw_split_steps(const AdamwArrays& whole, const AdamwArrays& split, size_t n, const StepState* state)
{
    for (int step = 0; step < 3; step++) {
        adamw_update(whole, n, 0.1f, 0.9f, 0.95f, 1e-8f, 1, state, 0);
        adamw_update(split, n, 0.1f, 0.9f, 0.95f, 1e-8f, 1, state, 0);
    }
}

static void adamw_split_test(OpRun* run)
{
    const size_t n = (size_t)run->dims[0];
    if (FLOATX_DTYPE != Dtype::BF16) return;
    OpTensor<float> master = op_inout<float>(run, "master", n, 0.0, 0.02), m = op_inout<float>(run, "m", n, 0.0, 1e-3);
    OpTensor<float> v = op_inout<float>(run, "v", n, 1e-3, 2e-4), grad = op_input<float>(run, "grad", n, 0.0, 0.05);
    floatX* param = (floatX*)op_bytes(run, "param", OpKind::INOUT, nullptr, n * 2);
    unsigned short *h_split = (unsigned short*)op_host(run, n), *h_low = (unsigned short*)op_host(run, n);
    float* h_master = (float*)op_start_bytes(run, "master");
    for (size_t i = 0; i < n; i += 5) h_master[i] = bits_float((float_bits(h_master[i]) & 0xffff0000u) | 0x8000u);
    op_upload(run, "master");                                            // each fifth halfway between two bf16
    for (size_t i = 0; i < n; i++) {
        h_split[i] = bf16_nearest_bits(h_master[i]);
        h_low[i] = split_low(h_master[i]);
        op_check_value(run, "joined", split_join(h_split[i], h_low[i]), h_master[i], 0.0);
        if (run->num_failed > 0) return;
    }
    floatX* split = (floatX*)op_bytes(run, "split", OpKind::INOUT, h_split, n * 2);
    unsigned short* low = (unsigned short*)op_bytes(run, "low", OpKind::INOUT, h_low, n * 2);
    float* m2 = (float*)op_bytes(run, "m2", OpKind::INOUT, op_start_bytes(run, "m"), n * 4);
    float* v2 = (float*)op_bytes(run, "v2", OpKind::INOUT, op_start_bytes(run, "v"), n * 4);
    const StepState s = adamw_test_state(false);
    const StepState* state = (const StepState*)op_bytes(run, "state", OpKind::INPUT, &s, sizeof s);
    const AdamwArrays whole = adamw_arrays(param, master.dev, m.dev, v.dev, grad.dev);
    AdamwArrays other = adamw_arrays(split, nullptr, m2, v2, grad.dev);
    other.master = Values{split, Dtype::SPLIT, low};
    OP_RUN(run, 0, 0, adamw_split_steps(whole, other, n, state));
    const unsigned short *high = (const unsigned short*)op_result(run, "split");
    const unsigned short *rest = (const unsigned short*)op_result(run, "low");
    const float* ours = (const float*)op_result(run, "master");
    double num_different = memcmp(high, op_result(run, "param"), n * 2) != 0;
    for (size_t i = 0; i < n; i++) num_different += float_bits(split_join(high[i], rest[i])) != float_bits(ours[i]);
    op_check_value(run, "different from the fp32 master's", num_different, 0.0, 0.0);
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
    float* grad = (float*)op_bytes(run, "grad", OpKind::INPUT, GRAD, sizeof GRAD);
    const StepState* state = (const StepState*)op_bytes(run, "state", OpKind::INPUT, &s, sizeof s);
    const bool is_16bit = sizeof(floatX) < sizeof(float);
    OP_RUN(run, 0, 0,
           adamw_update(adamw_arrays(param, is_16bit ? master : nullptr, m, v, grad), 5, 0.0f, 0.9f, 0.95f, 0.1f, 1,
                        state, 0));
    const float* ours = (const float*)op_result(run, is_16bit ? "master" : "param");
    for (int i = 0; i < 5; i++) op_check_value(run, "param", ours[i], clip ? CLIPPED[i] : PLAIN[i], 6e-8);
    const float* ours_m = (const float*)op_result(run, "m");
    for (int i = 0; i < 5; i++) op_check_value(run, "m", ours_m[i], 0.1 * GRAD[i] * s.clip_coef, 1e-8);
}

/* Decay by itself: gradients of 0, weight decay 1, warm-up 4 of 8 steps, cosine from 0.1 to 0.01. */
static void step_trial_run(StepState* state, const double* sums, StepConfig config, float* param, float* m, float* v,
                           float* grad, int num_steps)
{
    for (int step = 0; step < num_steps; step++) {
        step_state_update(state, sums, config, 0);
        const bool is_16bit = sizeof(floatX) < sizeof(float);
        floatX* param_x = is_16bit ? (floatX*)(param + 1) : (floatX*)param;
        adamw_update(adamw_arrays(param_x, is_16bit ? param : nullptr, m, v, grad), 1, 1.0f, 0.9f, 0.95f, 1e-8f, 1,
                     state, 0);
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
    float* grad = (float*)op_bytes(run, "grad", OpKind::INPUT, &zero, sizeof zero);
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
    {"adamw_storage", adamw_storage_test, {1000, 0, (int)Dtype::FP32, 1, 0}, OpWhen::ALWAYS},
    {"adamw_storage", adamw_storage_test, {1037, 0, (int)Dtype::SPLIT, 0, 0}, OpWhen::ALWAYS},
    {"adamw_storage", adamw_storage_test, {1037, 3, (int)Dtype::SPLIT, 1, 1}, OpWhen::ALWAYS},
    {"adamw_storage", adamw_storage_test, {4099, 0, (int)Dtype::BF16, 0, 0}, OpWhen::ALWAYS},
    {"adamw_storage", adamw_storage_test, {4099, 1, (int)Dtype::BF16, 1, 0}, OpWhen::ALWAYS},
    {"adamw_storage", adamw_storage_test, {1, 0, (int)Dtype::BF16, 1, 1}, OpWhen::ALWAYS},
    {"adamw_split", adamw_split_test, {4099}, OpWhen::ALWAYS},
    {"adamw_trial", adamw_trial_test, {2}, OpWhen::ALWAYS},
    {"adamw_trial", adamw_trial_test, {1}, OpWhen::ALWAYS},
    {"step_trial", step_trial_test, {4}, OpWhen::ALWAYS},
    {"step_trial", step_trial_test, {8}, OpWhen::ALWAYS},
    {"adamw", adamw_test, {124 * 1000 * 1000}, OpWhen::BENCH},
    {"adamw_storage", adamw_storage_test, {124 * 1000 * 1000, 0, (int)Dtype::SPLIT, 0, 0}, OpWhen::BENCH},
    {"adamw_storage", adamw_storage_test, {124 * 1000 * 1000, 0, (int)Dtype::BF16, 1, 0}, OpWhen::BENCH},
};

#endif
