/* optimizer.cuh: one step of an optimizer, from the step's state (step.cuh). g = grad * grad_scale * clip_coef,
 * lr = the step's rate * the run's factor, wd the run's weight decay, bc = 1 - beta^t:
 *   adamw    m = beta1*m + (1-beta1)*g   v = beta2*v + (1-beta2)*g^2
 *            p = p*(1 - lr*wd) - lr*(m/bc1)/(sqrt(v/bc2) + eps)
 *   adam     g += wd*p, then as adamw without its decay
 *   sgd      g += wd*p   m = momentum*m + (1-dampening)*g   p -= lr*m, nesterov: lr*(g + momentum*m)
 *   lamb     m and v as adamw   u = m/(sqrt(v) + eps) + wd*p   p -= lr * sqrt(bc2)/bc1 * ratio * u
 *            ratio = clamp(|p|/|u|, 0.01, 10), 1 where either is 0: of the whole tensor, over all ranks
 *   lion     c = beta1*m + (1-beta1)*g   p = p*(1 - lr*wd) - lr*sign(c)   m = beta2*m + (1-beta2)*g   sign(0) = 0
 *   adagrad  g += wd*p   v += g^2   p -= lr*g/(sqrt(v) + eps)
 *   muon     m = momentum*m + (1-momentum)*g   grad = g + momentum*(m - g)   [muon.cuh makes it orthogonal]
 *            p = p*(1 - lr*wd) - lr*grad
 * LAMB and Muon take two passes with something between them that sees whole tensors; each pass is a rule of its own.
 * shapes  param (n) floatX; sums (tensors,2) double; master, grad, and m and v where the rule has them, (n) stored as
 *         Values says (values.cuh):
 *         master   FP32: param is it rounded to nearest; in fp32 they are one; null: the model uses the master.
 *                  SPLIT: its upper half is param.
 *                  BF16: it is param: there is no master, and the new weight is rounded at random
 *         m v      FP32, or BF16 rounded at random       grad     FP32 or floatX's
 * writes  param = master = m = v =; MUON_MOMENTUM grad =; lamb_norms sums +=
 * needs   any n; up to 32 runs of elements, each with its rates, one after another
 * exact   each element by itself, sums in a fixed order: same bits on every run and for any number of CPU threads.
 *         Random roundings come from the seed, the number of the applied step and the element's index among all
 *         parameters, nothing else
 * cost    adamw in fp32 reads p g m v and writes p m v, 28*n bytes; a 16-bit param beside a master adds 2*n, a split
 *         master is 28*n, none 24*n; m and v in bf16 save 8*n, a gradient in 16 bits 2*n. adam the same; sgd, lion and
 *         adagrad 8*n less; lamb 20*n and norms 12*n and 16*n; muon 16*n and 12*n. Judged against memory bandwidth
 * source  AdamW: Loshchilov & Hutter 2017, arXiv:1711.05101. LAMB: You et al. 2019, arXiv:1904.00962, in DeepSpeed's
 *         variant. Lion: Chen et al. 2023, arXiv:2302.06675. Adagrad: Duchi et al. 2011. Muon: Jordan 2024,
 *         kellerjordan.github.io/posts/muon */
#pragma once
#include "step.cuh"
#include "values.cuh"

// ---- the optimizers

enum class Optimizer { ADAMW, ADAM, SGD, LAMB, LION, ADAGRAD, MUON };

/* What an optimizer keeps for each element, and its defaults where they are its own. */
struct OptimizerRow {
    const char* name;
    Optimizer optimizer;
    bool has_m, has_v;                               // Muon: v only for what is not a hidden matrix
    double beta2, momentum, weight_decay;
};

static const OptimizerRow optimizer_rows[] = {
    {"adamw", Optimizer::ADAMW, true, true, 0.95, 0, 0.1},
    {"adam", Optimizer::ADAM, true, true, 0.95, 0, 0},
    {"sgd", Optimizer::SGD, true, false, 0.95, 0.9, 0},
    {"lamb", Optimizer::LAMB, true, true, 0.95, 0, 0.01},
    {"lion", Optimizer::LION, true, false, 0.99, 0, 0.1},
    {"adagrad", Optimizer::ADAGRAD, false, true, 0.95, 0, 0},
    {"muon", Optimizer::MUON, true, true, 0.95, 0.95, 0.1},
};

/* data/flags.h lets no other name through. */
static const OptimizerRow* optimizer_find(const char* name)
{
    for (const OptimizerRow& row : optimizer_rows)
        if (strcmp(row.name, name) == 0) return &row;
    return nullptr;
}

struct OptimizerConfig {
    Optimizer optimizer;
    float beta1, beta2, eps, momentum, dampening;
    bool nesterov;
    uint64_t seed;                                   // of random roundings
};

/* What a step reads and changes. param null: the model uses the master. */
struct OptimizerArrays {
    floatX* param;
    Values master, m, v, grad;
};

static OptimizerArrays optimizer_arrays_from(const OptimizerArrays& a, size_t first)
{
    floatX* param = a.param != nullptr ? a.param + first : nullptr;
    return OptimizerArrays{param, values_from(a.master, first), values_from(a.m, first), values_from(a.v, first),
                           values_from(a.grad, first)};
}

/* For fp32 states and gradients; master null: param is it. */
static OptimizerArrays optimizer_arrays(floatX* param, float* master, float* m, float* v, float* grad)
{
    Values weights = master != nullptr ? values_of(master) : Values{param, FLOATX_DTYPE, nullptr};
    return OptimizerArrays{param, weights, values_of(m), values_of(v), values_of(grad)};
}

HOSTDEV bool rounds_at_random(const OptimizerArrays& a)
{
    return a.master.dtype == Dtype::BF16 || a.m.dtype == Dtype::BF16 || a.v.dtype == Dtype::BF16;
}

/* Is the weight that the model uses kept beside the master? */
HOSTDEV bool has_copy(const OptimizerArrays& a) { return a.param != nullptr && (void*)a.param != a.master.at; }

/* The key of this step's random bits; of an element's 64, the weight takes the lowest 16, then m, then v. */
enum { RANDOM_WEIGHT = 0, RANDOM_M = 16, RANDOM_V = 32 };
HOSTDEV uint64_t random_key(uint64_t seed, const StepState* state)
{
    return mix64(mix64(seed + GOLDEN_GAMMA) + state->num_applied);
}

// ---- the rules

/* A pass over the elements. */
enum class Rule { ADAMW, ADAM, SGD, LAMB_STATES, LAMB_STEP, LION, ADAGRAD, MUON_MOMENTUM, MUON_STEP };

HOSTDEV constexpr bool reads_grad(Rule r) { return r != Rule::LAMB_STEP; }
HOSTDEV constexpr bool writes_grad(Rule r) { return r == Rule::MUON_MOMENTUM; }
HOSTDEV constexpr bool reads_param(Rule r) { return r != Rule::LAMB_STATES && r != Rule::MUON_MOMENTUM; }
HOSTDEV constexpr bool reads_m(Rule r) { return r != Rule::ADAGRAD && r != Rule::MUON_STEP; }
HOSTDEV constexpr bool reads_v(Rule r)
{
    return r == Rule::ADAMW || r == Rule::ADAM || r == Rule::LAMB_STATES || r == Rule::LAMB_STEP || r == Rule::ADAGRAD;
}
HOSTDEV constexpr bool writes_states(Rule r) { return r != Rule::LAMB_STEP && r != Rule::MUON_STEP; }

struct OptimizerFactors {
    float grad_coef, beta1, beta2, step_size, rsqrt_correction2, eps, decay, momentum, dampening;
    bool nesterov;
};

HOSTDEV constexpr bool decay_is_coupled(Rule r)
{
    return r == Rule::ADAM || r == Rule::SGD || r == Rule::LAMB_STEP || r == Rule::ADAGRAD;
}

/* The factor of p: in a step of its own, or within the gradient. */
template <Rule rule> HOSTDEV float decay_factor(const StepState* state, float lr_factor, float weight_decay)
{
    return decay_is_coupled(rule) ? weight_decay : (float)(state->lr * (double)lr_factor * (double)weight_decay);
}

/* What p is moved by: lr, with the bias corrections that belong to it. LAMB's also takes the tensor's ratio. */
template <Rule rule> HOSTDEV float step_factor(const StepState* state, float lr_factor, double ratio)
{
    const double lr = state->lr * (double)lr_factor;
    if (rule == Rule::ADAMW || rule == Rule::ADAM) return (float)(lr / state->bias_correction1);
    if (rule == Rule::LAMB_STEP) return (float)(lr * sqrt(state->bias_correction2) / state->bias_correction1 * ratio);
    return (float)lr;
}

template <Rule rule> HOSTDEV OptimizerFactors optimizer_factors(const StepState* state, const OptimizerConfig& config,
                                                                float lr_factor, float weight_decay, double ratio)
{
    OptimizerFactors f;
    f.grad_coef = (float)(state->grad_scale * state->clip_coef);
    f.beta1 = config.beta1;
    f.beta2 = config.beta2;
    f.step_size = step_factor<rule>(state, lr_factor, ratio);
    f.rsqrt_correction2 = (float)(1.0 / sqrt(state->bias_correction2));
    f.eps = config.eps;
    f.decay = decay_factor<rule>(state, lr_factor, weight_decay);
    f.momentum = config.momentum;
    f.dampening = config.dampening;
    f.nesterov = config.nesterov;
    return f;
}

/* LAMB's ratio from the sums of p^2 and u^2 of a tensor. */
HOSTDEV double lamb_ratio(const double* sums)
{
    return sums[0] > 0.0 && sums[1] > 0.0 ? fmin(fmax(sqrt(sums[0] / sums[1]), 0.01), 10.0) : 1.0;
}

/* What a step is divided by. 1 where v and eps are 0: there was no gradient, as in padding, and m is 0 too. */
HOSTDEV float divisor(float root, float eps)
{
    const float sum = root + eps;
    return sum == 0.0f ? 1.0f : sum;
}

HOSTDEV float lamb_direction(float p, float m, float v, float eps, float weight_decay)
{
    return m / divisor(sqrtf(v), eps) + weight_decay * p;
}

/* The whole rule, for every build: the new parameter. Decay and step are added before p is rounded, so that a decay far
 * below p's last bit is not always rounded the same way. */
template <Rule rule> HOSTDEV float optimizer_element(float p, float* grad, float* m, float* v, OptimizerFactors f)
{
    if constexpr (rule == Rule::LAMB_STEP) return p - f.step_size * lamb_direction(p, *m, *v, f.eps, f.decay);
    if constexpr (rule == Rule::MUON_STEP) return p - (f.decay * p + f.step_size * *grad);
    float g = *grad * f.grad_coef;
    if constexpr (rule == Rule::MUON_MOMENTUM) {
        *m = f.momentum * *m + (1.0f - f.momentum) * g;
        *grad = g + f.momentum * (*m - g);
        return p;
    }
    if constexpr (decay_is_coupled(rule)) g += f.decay * p;
    if constexpr (rule == Rule::SGD) {
        *m = f.momentum * *m + (1.0f - f.dampening) * g;
        return p - f.step_size * (f.nesterov ? g + f.momentum * *m : *m);
    }
    if constexpr (rule == Rule::LION) {
        const float c = f.beta1 * *m + (1.0f - f.beta1) * g;
        *m = f.beta2 * *m + (1.0f - f.beta2) * g;
        return p - (f.decay * p + (c > 0.0f ? f.step_size : c < 0.0f ? -f.step_size : 0.0f));
    }
    if constexpr (rule == Rule::ADAGRAD) {
        *v += g * g;
        return p - f.step_size * g / divisor(sqrtf(*v), f.eps);
    }
    *m = f.beta1 * *m + (1.0f - f.beta1) * g;
    *v = f.beta2 * *v + (1.0f - f.beta2) * g * g;
    if constexpr (rule == Rule::LAMB_STATES) return p;
    const float step = f.step_size * *m / divisor(sqrtf(*v) * f.rsqrt_correction2, f.eps);
    return rule == Rule::ADAM ? p - step : p - (f.decay * p + step);
}

// ---- runs: where the rates change along a slice

/* Run i ends before element end[i]; element e of it has its v at e - v_gap[i], and is number index[i] + e of all
 * parameters. A run that is left out keeps its place. Given to the kernels by value. */
static constexpr int OPTIMIZER_MAX_RUNS = 32;
struct OptimizerRuns {
    int num_runs;
    size_t end[OPTIMIZER_MAX_RUNS], v_gap[OPTIMIZER_MAX_RUNS];
    float weight_decay[OPTIMIZER_MAX_RUNS], lr_factor[OPTIMIZER_MAX_RUNS];
    int tensor[OPTIMIZER_MAX_RUNS];                  // its place in LAMB's sums; -1 for all where nobody asks
    bool left_out[OPTIMIZER_MAX_RUNS];
    uint64_t index[OPTIMIZER_MAX_RUNS];
};

/* Adds a run up to `end`, or lengthens the last one if it is of the same kind. */
static void runs_extend(OptimizerRuns* runs, size_t end, float weight_decay, float lr_factor, int tensor = -1,
                        bool left_out = false, size_t v_gap = 0, uint64_t index = 0)
{
    const int last = runs->num_runs - 1;
    if (last < 0 || runs->weight_decay[last] != weight_decay || runs->lr_factor[last] != lr_factor ||
        runs->tensor[last] != tensor || runs->left_out[last] != left_out || runs->v_gap[last] != v_gap ||
        runs->index[last] != index) {
        ENSURE(runs->num_runs < OPTIMIZER_MAX_RUNS, "the rates change more than %d times in a slice: fewer "
               "--param-group", OPTIMIZER_MAX_RUNS);
        const int i = runs->num_runs++;
        runs->weight_decay[i] = weight_decay;
        runs->lr_factor[i] = lr_factor;
        runs->tensor[i] = tensor;
        runs->left_out[i] = left_out;
        runs->v_gap[i] = v_gap;
        runs->index[i] = index;
    }
    runs->end[runs->num_runs - 1] = end;
}

static size_t runs_elems(const OptimizerRuns* runs) { return runs->num_runs > 0 ? runs->end[runs->num_runs - 1] : 0; }

#ifdef DEVICE_CPU

/* n <= VALUES_PIECE elements of one run from the arrays' first on; the first is number `index` of all parameters. */
template <Rule rule> static void optimizer_piece_cpu(const OptimizerArrays& a, size_t n, OptimizerFactors f,
                                                     uint64_t key, uint64_t index)
{
    float bufs[4][VALUES_PIECE];
    uint64_t random[VALUES_PIECE];
    float* p = reads_param(rule) ? values_get(a.master, 0, n, bufs[0]) : nullptr;
    float* grad = reads_grad(rule) ? values_get(a.grad, 0, n, bufs[1]) : nullptr;
    float *m = reads_m(rule) ? values_get(a.m, 0, n, bufs[2]) : nullptr;
    float *v = reads_v(rule) ? values_get(a.v, 0, n, bufs[3]) : nullptr;
    #pragma omp simd
    for (size_t i = 0; i < n; i++) {
        float g = reads_grad(rule) ? grad[i] : 0.0f, new_m = reads_m(rule) ? m[i] : 0.0f;
        float new_v = reads_v(rule) ? v[i] : 0.0f;
        const float new_p = optimizer_element<rule>(reads_param(rule) ? p[i] : 0.0f, &g, &new_m, &new_v, f);
        if (reads_m(rule) && writes_states(rule)) m[i] = new_m;
        if (reads_v(rule) && writes_states(rule)) v[i] = new_v;
        if (writes_grad(rule)) grad[i] = g;
        if (reads_param(rule)) p[i] = new_p;
    }
    random[0] = random_bits(key, index);
    for (size_t i = 1; i < (rounds_at_random(a) ? n : 0); i++) random[i] = random_bits(key, index + i);
    if (reads_m(rule) && writes_states(rule)) values_put_random(a.m, 0, n, m, random, RANDOM_M);
    if (reads_v(rule) && writes_states(rule)) values_put_random(a.v, 0, n, v, random, RANDOM_V);
    if (writes_grad(rule)) values_put(a.grad, 0, n, grad);
    if (reads_param(rule)) values_put_random(a.master, 0, n, p, random, RANDOM_WEIGHT);
    #pragma omp simd
    for (size_t i = 0; i < (reads_param(rule) && has_copy(a) ? n : 0); i++) store_weight(a.param + i, p[i]);
}

template <Rule rule> static void optimizer_update_cpu(const OptimizerArrays& a, const OptimizerRuns* runs,
                                                      const OptimizerConfig& config, const double* sums,
                                                      const StepState* state)
{
    if (state->skip != Skip::NONE) return;
    const uint64_t key = random_key(config.seed, state);
    for (int run = 0; run < runs->num_runs; run++) {
        const size_t first = run > 0 ? runs->end[run - 1] : 0, end = runs->end[run], v_gap = runs->v_gap[run];
        const double ratio = rule == Rule::LAMB_STEP ? lamb_ratio(sums + 2 * runs->tensor[run]) : 1.0;
        const uint64_t index = runs->index[run];
        if (runs->left_out[run]) continue;
        const OptimizerFactors f = optimizer_factors<rule>(state, config, runs->lr_factor[run],
                                                           runs->weight_decay[run], ratio);
        #pragma omp parallel for schedule(static)
        for (size_t i = first; i < end; i += VALUES_PIECE) {
            OptimizerArrays piece = optimizer_arrays_from(a, i);
            piece.v = values_from(a.v, i - v_gap);
            optimizer_piece_cpu<rule>(piece, end - i < VALUES_PIECE ? end - i : VALUES_PIECE, f, key, index + i);
        }
    }
}

#else

static constexpr int OPTIMIZER_BLOCK = 256;

/* One vector of W a thread; where a run ends within it, element by element. In fp32 param is the master. At any
 * precision W = 4: a warp's 16 bytes of fp32 a thread lie side by side, and so do the 8 bytes of a 16-bit param; with
 * 8 elements a thread each request touched every sector of twice its bytes. */
template <Rule rule, int W> static __global__ void __launch_bounds__(OPTIMIZER_BLOCK, 4)
optimizer_kernel(OptimizerArrays a, OptimizerRuns runs, OptimizerConfig config, const double* sums,
                 const StepState* state)
{
    const size_t first = ((size_t)blockIdx.x * OPTIMIZER_BLOCK + threadIdx.x) * W, n = runs.end[runs.num_runs - 1];
    if (state->skip != Skip::NONE || first >= n) return;
    const bool at_random = rounds_at_random(a);
    const uint64_t key = at_random ? random_key(config.seed, state) : 0;
    size_t i = first;
    int run = 0;
    while (runs.end[run] <= i) run++;
    const double ratio = rule == Rule::LAMB_STEP ? lamb_ratio(sums + 2 * runs.tensor[run]) : 1.0;
    OptimizerFactors f = optimizer_factors<rule>(state, config, runs.lr_factor[run], runs.weight_decay[run], ratio);
    if (i + W <= runs.end[run]) {
        if (runs.left_out[run]) return;
        const size_t v_at = i - runs.v_gap[run];
        float p[W] = {}, g[W] = {}, m[W] = {}, v[W] = {};
        uint64_t random[W] = {};
        if constexpr (reads_param(rule)) values_load(p, a.master, i);
        if constexpr (reads_grad(rule)) values_load(g, a.grad, i);
        if constexpr (reads_m(rule)) values_load(m, a.m, i);
        if constexpr (reads_v(rule)) values_load(v, a.v, v_at);
#pragma unroll
        for (int k = 0; k < W; k++) {
            p[k] = optimizer_element<rule>(p[k], &g[k], &m[k], &v[k], f);
            if (at_random) random[k] = random_bits(key, runs.index[run] + i + k);
        }
        if constexpr (reads_m(rule) && writes_states(rule)) values_store(a.m, i, m, random, RANDOM_M);
        if constexpr (reads_v(rule) && writes_states(rule)) values_store(a.v, v_at, v, random, RANDOM_V);
        if constexpr (writes_grad(rule)) values_store(a.grad, i, g);
        if constexpr (reads_param(rule)) values_store(a.master, i, p, random, RANDOM_WEIGHT);
        if (reads_param(rule) && has_copy(a)) weights_store(a.param + i, p);
    } else {
        for (; i < first + W && i < n; i++) {
            for (; runs.end[run] <= i; run++) {
                const double next = rule == Rule::LAMB_STEP ? lamb_ratio(sums + 2 * runs.tensor[run + 1]) : 1.0;
                f.decay = decay_factor<rule>(state, runs.lr_factor[run + 1], runs.weight_decay[run + 1]);
                f.step_size = step_factor<rule>(state, runs.lr_factor[run + 1], next);
            }
            if (runs.left_out[run]) continue;
            const size_t v_at = i - runs.v_gap[run];
            const uint64_t random = at_random ? random_bits(key, runs.index[run] + i) : 0;
            float g = reads_grad(rule) ? value_load(a.grad, i) : 0.0f, m = reads_m(rule) ? value_load(a.m, i) : 0.0f;
            float v = reads_v(rule) ? value_load(a.v, v_at) : 0.0f;
            const float p = optimizer_element<rule>(reads_param(rule) ? value_load(a.master, i) : 0.0f, &g, &m, &v, f);
            if constexpr (reads_m(rule) && writes_states(rule))
                value_store_random(a.m, i, m, (uint32_t)(random >> RANDOM_M));
            if constexpr (reads_v(rule) && writes_states(rule))
                value_store_random(a.v, v_at, v, (uint32_t)(random >> RANDOM_V));
            if constexpr (writes_grad(rule)) value_store(a.grad, i, g);
            if constexpr (reads_param(rule))
                value_store_random(a.master, i, p, (uint32_t)(random >> RANDOM_WEIGHT));
            if (reads_param(rule) && has_copy(a)) store_weight(a.param + i, p);
        }
    }
}

#endif

/* What a rule moves: of one element, and of how many. */
static double optimizer_bytes(Rule rule, const OptimizerArrays& a)
{
    const double visits = writes_states(rule) ? 2 : 1, copy = has_copy(a) ? sizeof(floatX) : 0;
    return (reads_param(rule) ? 2 * value_bytes(a.master) + copy : 0) +
           (reads_m(rule) ? visits * value_bytes(a.m) : 0) + (reads_v(rule) ? visits * value_bytes(a.v) : 0) +
           (reads_grad(rule) + writes_grad(rule)) * value_bytes(a.grad);
}
static size_t optimizer_elems(const OptimizerRuns* runs)
{
    size_t n = 0;
    for (int run = 0; run < runs->num_runs; run++)
        if (!runs->left_out[run]) n += runs->end[run] - (run > 0 ? runs->end[run - 1] : 0);
    return n;
}

/* One rule over all runs, in one launch. sums is LAMB's. */
template <Rule rule> static void optimizer_update(const OptimizerArrays& a, const OptimizerRuns* runs,
                                                  OptimizerConfig config, const double* sums, const StepState* state,
                                                  cudaStream_t stream)
{
    const size_t num_updated = optimizer_elems(runs);
    if (num_updated == 0) return;
    OP(stream, 0, optimizer_bytes(rule, a) * num_updated, num_updated);
    ON_CPU(optimizer_update_cpu<rule>(a, runs, config, sums, state));
#ifndef DEVICE_CPU
    const size_t n = runs_elems(runs);
    bool vec = (uintptr_t)a.param % (4 * sizeof(floatX)) == 0;
    for (const Values* values : {&a.master, &a.m, &a.v, &a.grad}) vec = vec && values_are_vec(*values, 4);
    for (int run = 0; run < runs->num_runs; run++) vec = vec && runs->v_gap[run] % 4 == 0;
    if (vec)
        LAUNCH((optimizer_kernel<rule, 4>), (unsigned)ceil_div(n, OPTIMIZER_BLOCK * 4), OPTIMIZER_BLOCK, 0, stream, a,
               *runs, config, sums, state);
    else
        LAUNCH((optimizer_kernel<rule, 1>), (unsigned)ceil_div(n, OPTIMIZER_BLOCK), OPTIMIZER_BLOCK, 0, stream, a,
               *runs, config, sums, state);
    CUDA_CHECK(cudaGetLastError());
#endif
}

// ---- LAMB: norms of tensors

static constexpr int LAMB_PARTS = 64;                // partial sums of a run
static size_t lamb_scratch_elems() { return (size_t)OPTIMIZER_MAX_RUNS * LAMB_PARTS * 2; }

#ifdef DEVICE_CPU

static void lamb_norms_cpu(double* sums, double* scratch, const Values& master, const Values& m, const Values& v,
                           const OptimizerRuns* runs, float eps)
{
    #pragma omp parallel for
    for (int idx = 0; idx < runs->num_runs * LAMB_PARTS; idx++) {
        const int run = idx / LAMB_PARTS, part = idx % LAMB_PARTS;
        const size_t first = run > 0 ? runs->end[run - 1] : 0, n = runs->end[run] - first;
        double p2 = 0.0, u2 = 0.0;
        for (size_t i = first + n * part / LAMB_PARTS; i < first + n * (part + 1) / LAMB_PARTS; i++) {
            const float p = value_load(master, i);
            const float u = lamb_direction(p, value_load(m, i), value_load(v, i), eps, runs->weight_decay[run]);
            p2 += (double)p * (double)p;
            u2 += (double)u * (double)u;
        }
        scratch[2 * idx] = p2;
        scratch[2 * idx + 1] = u2;
    }
    for (int idx = 0; idx < runs->num_runs * LAMB_PARTS; idx++)
        for (int k = 0; k < 2; k++) sums[2 * runs->tensor[idx / LAMB_PARTS] + k] += scratch[2 * idx + k];
}

#else

/* grid (LAMB_PARTS, runs) */
static __global__ void __launch_bounds__(OPTIMIZER_BLOCK)
lamb_norms_kernel(double* scratch, Values master, Values m, Values v, OptimizerRuns runs, float eps)
{
    SHARED(double, partial, [2][32]);
    const int run = blockIdx.y;
    const float weight_decay = runs.weight_decay[run];
    double p2 = 0.0, u2 = 0.0;
    size_t i = (run > 0 ? runs.end[run - 1] : 0) + (size_t)blockIdx.x * OPTIMIZER_BLOCK + threadIdx.x;
    for (; i < runs.end[run]; i += (size_t)LAMB_PARTS * OPTIMIZER_BLOCK) {
        const float p = value_load(master, i);
        const float u = lamb_direction(p, value_load(m, i), value_load(v, i), eps, weight_decay);
        p2 += (double)p * (double)p;
        u2 += (double)u * (double)u;
    }
    p2 = block_sum(p2, partial[0]);
    u2 = block_sum(u2, partial[1]);
    if (threadIdx.x == 0) {
        scratch[2 * (run * LAMB_PARTS + blockIdx.x)] = p2;
        scratch[2 * (run * LAMB_PARTS + blockIdx.x) + 1] = u2;
    }
}

/* A block of LAMB_PARTS threads a run: no two runs of a launch are of one tensor. */
static __global__ void __launch_bounds__(LAMB_PARTS)
lamb_norms_finish_kernel(double* sums, const double* scratch, OptimizerRuns runs)
{
    SHARED(double, partial, [2][32]);
    const double* mine = scratch + 2 * (blockIdx.x * LAMB_PARTS + threadIdx.x);
    const double p2 = block_sum(mine[0], partial[0]), u2 = block_sum(mine[1], partial[1]);
    if (threadIdx.x > 0) return;
    sums[2 * runs.tensor[blockIdx.x]] += p2;
    sums[2 * runs.tensor[blockIdx.x] + 1] += u2;
}

#endif

/* Adds the sums of p^2 and u^2 of each run to those of its tensor. */
static void lamb_norms(double* sums, double* scratch, Values master, Values m, Values v, const OptimizerRuns* runs,
                       float eps, cudaStream_t stream)
{
    if (runs->num_runs == 0) return;
    OP(stream, 0, (value_bytes(master) + value_bytes(m) + value_bytes(v)) * runs_elems(runs), runs_elems(runs));
    ON_CPU(lamb_norms_cpu(sums, scratch, master, m, v, runs, eps));
#ifndef DEVICE_CPU
    LAUNCH(lamb_norms_kernel, dim3(LAMB_PARTS, runs->num_runs), OPTIMIZER_BLOCK, 0, stream, scratch, master, m, v,
           *runs, eps);
    CUDA_CHECK(cudaGetLastError());
    LAUNCH(lamb_norms_finish_kernel, runs->num_runs, LAMB_PARTS, 0, stream, sums, scratch, *runs);
    CUDA_CHECK(cudaGetLastError());
#endif
}

#ifdef OP_TESTS

static OptimizerConfig optimizer_test_config(float eps)
{
    return {Optimizer::ADAMW, 0.9f, 0.95f, eps, 0.8f, 0.1f, true, 1};
}

/* One element by the formulas at the top; g is unscaled and clipped. */
template <class R> static void optimizer_ref(Rule rule, R* param, R* grad, R* m, R* v, R g, R lr, R wd, R ratio,
                                             const OptimizerConfig& c, const StepState* s)
{
    const R b1 = c.beta1, b2 = c.beta2, eps = c.eps, mu = c.momentum, bc1 = (R)s->bias_correction1;
    const R bc2 = (R)s->bias_correction2, p = *param;
    const bool coupled = rule == Rule::ADAM || rule == Rule::SGD || rule == Rule::ADAGRAD;
    if (coupled) g += wd * p;
    if (rule == Rule::SGD) {
        *m = mu * *m + (1 - (R)c.dampening) * g;
        *param = p - lr * (c.nesterov ? g + mu * *m : *m);
    } else if (rule == Rule::LION) {
        const R sum = b1 * *m + (1 - b1) * g;
        *param = p * (1 - lr * wd) - lr * (R)((sum > 0) - (sum < 0));
        *m = b2 * *m + (1 - b2) * g;
    } else if (rule == Rule::ADAGRAD) {
        *v += g * g;
        *param = p - lr * g / (std::sqrt(*v) + eps);
    } else if (rule == Rule::MUON_MOMENTUM) {
        *m = mu * *m + (1 - mu) * g;
        *grad = g + mu * (*m - g);
    } else if (rule == Rule::MUON_STEP) {
        *param = p * (1 - lr * wd) - lr * *grad;
    } else if (rule == Rule::LAMB_STEP) {
        *param = p - lr * std::sqrt(bc2) / bc1 * ratio * (*m / (std::sqrt(*v) + eps) + wd * p);
    } else {
        *m = b1 * *m + (1 - b1) * g;
        *v = b2 * *v + (1 - b2) * g * g;
        const R step = lr * (*m / bc1) / (std::sqrt(*v / bc2) + eps);
        if (rule == Rule::ADAMW) *param = p * (1 - lr * wd) - step;
        if (rule == Rule::ADAM) *param = p - step;
    }
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
 * without decay, the third left out, those behind it with a v that has a gap. */
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

/* dims: n, elements by which the tensors are shifted off their alignment, 1 to skip the step, 1 for several runs. */
template <Rule rule> static void optimizer_test(OpRun* run)
{
    const size_t n = (size_t)run->dims[0], shift = (size_t)run->dims[1], whole = n + shift;
    const bool skip = run->dims[2] != 0, is_16bit = sizeof(floatX) < sizeof(float);
    const OptimizerConfig config = optimizer_test_config(1e-8f);
    const OptimizerRuns runs = optimizer_test_runs(n, run->dims[3] != 0);
    OpTensor<float> master = op_inout<float>(run, "master", whole, 0.0, 0.02);
    OpTensor<floatX> param = op_inout<floatX>(run, "param", whole, 0.0, 0.02);
    OpTensor<float> m = op_inout<float>(run, "m", whole, 0.0, 1e-3), v = op_inout<float>(run, "v", whole, 1e-3, 2e-4);
    OpTensor<float> grad = op_inout<float>(run, "grad", whole, 0.0, 0.05);
    const double* sums = (const double*)op_bytes(run, "sums", OpKind::INPUT, LAMB_TEST_SUMS, sizeof LAMB_TEST_SUMS);
    const StepState s = optimizer_test_state(skip);
    const StepState* state = (const StepState*)op_bytes(run, "state", OpKind::INPUT, &s, sizeof s);
    const double bytes = reads_param(rule) * (is_16bit ? 10 : 8) + (reads_m(rule) + reads_v(rule)) *
                         (writes_states(rule) ? 8 : 4) + reads_grad(rule) * 4 + writes_grad(rule) * 4;
    OP_RUN(run, n * bytes, 0,
           optimizer_update<rule>(optimizer_arrays_from(optimizer_arrays(param.dev, is_16bit ? master.dev : nullptr,
                                                                         m.dev, v.dev, grad.dev), shift),
                                  &runs, config, sums, state, 0));
    double* p64 = (is_16bit ? master.f64 : param.f64) + shift;
    float* p32 = (is_16bit ? master.f32 : param.f32) + shift;
    const double coef = s.grad_scale * s.clip_coef;
    for (size_t i = 0, k = 0; i < n && !skip; i++) {
        while (runs.end[k] <= i) k++;
        if (runs.left_out[k]) continue;
        const size_t at = shift + i, v_at = at - runs.v_gap[k];
        const double lr = s.lr * (double)runs.lr_factor[k], wd = runs.weight_decay[k];
        const double ratio = lamb_ratio(LAMB_TEST_SUMS + 2 * runs.tensor[k]);
        optimizer_ref<double>(rule, p64 + i, grad.f64 + at, m.f64 + at, v.f64 + v_at, grad.f64[at] * coef, lr, wd,
                              ratio, config, &s);
        optimizer_ref<float>(rule, p32 + i, grad.f32 + at, m.f32 + at, v.f32 + v_at, grad.f32[at] * (float)coef,
                             (float)lr, (float)wd, (float)ratio, config, &s);
        if (!is_16bit || !reads_param(rule)) continue;
        param.f64[at] = master.f64[at];
        param.f32[at] = master.f32[at];
    }
    op_check(run, master);
    op_check(run, param);
    op_check(run, m);
    op_check(run, grad);
    op_check_relative(run, v);
}

/* LAMB's sums. dims: n, shift, unused, 1 for several runs. */
static void lamb_norms_test(OpRun* run)
{
    const size_t n = (size_t)run->dims[0], shift = (size_t)run->dims[1], whole = n + shift;
    const OptimizerRuns runs = optimizer_test_runs(n, run->dims[3] != 0);
    OpTensor<float> p = op_input<float>(run, "p", whole, 0.0, 0.02), m = op_input<float>(run, "m", whole, 0.0, 1e-3);
    OpTensor<float> v = op_input<float>(run, "v", whole, 1e-3, 2e-4);
    double *scratch = op_scratch<double>(run, lamb_scratch_elems()), h_sums[10], truth[10] = {};
    for (int k = 0; k < 10; k++) h_sums[k] = truth[k] = k;   // added to
    double* sums = (double*)op_bytes(run, "sums", OpKind::INOUT, h_sums, sizeof h_sums);
    OP_RUN(run, 12.0 * n, 0, lamb_norms(sums, scratch, values_of(p.dev + shift), values_of(m.dev + shift),
                                        values_of(v.dev + shift), &runs, 1e-8f, 0));
    for (size_t i = 0, k = 0; i < n; i++) {
        while (runs.end[k] <= i) k++;
        const double x = p.f64[shift + i];
        const double u = m.f64[shift + i] / (sqrt(v.f64[shift + i]) + 1e-8) + (double)runs.weight_decay[k] * x;
        truth[2 * runs.tensor[k]] += x * x;
        truth[2 * runs.tensor[k] + 1] += u * u;
    }
    const double* ours = (const double*)op_result(run, "sums");
    for (int k = 0; k < 10; k++) op_check_value(run, "sum", ours[k], truth[k], 1e-6 * truth[k]);   // u is a float
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
           optimizer_update<Rule::ADAMW>(optimizer_arrays(param, is_16bit ? master : nullptr, m, v, (float*)grad),
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
        optimizer_update<Rule::ADAMW>(optimizer_arrays(param_x, is_16bit ? param : nullptr, m, v, (float*)grad), &runs,
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

#define OPTIMIZER_TESTS(name, rule) \
    {name, optimizer_test<rule>, {1}, OpWhen::ALWAYS}, {name, optimizer_test<rule>, {4099}, OpWhen::ALWAYS}, \
    {name, optimizer_test<rule>, {1000, 3}, OpWhen::ALWAYS}, \
    {name, optimizer_test<rule>, {1000, 8, 1}, OpWhen::ALWAYS}, \
    {name, optimizer_test<rule>, {4099, 0, 0, 1}, OpWhen::ALWAYS}, \
    {name, optimizer_test<rule>, {4100, 0, 0, 1}, OpWhen::ALWAYS}, \
    {name, optimizer_test<rule>, {3001, 1, 0, 1}, OpWhen::ALWAYS}

static const OpTest optimizer_tests[] = {
    OPTIMIZER_TESTS("adamw", Rule::ADAMW),
    OPTIMIZER_TESTS("adam", Rule::ADAM),
    OPTIMIZER_TESTS("sgd", Rule::SGD),
    OPTIMIZER_TESTS("lamb_states", Rule::LAMB_STATES),
    OPTIMIZER_TESTS("lamb_step", Rule::LAMB_STEP),
    OPTIMIZER_TESTS("lion", Rule::LION),
    OPTIMIZER_TESTS("adagrad", Rule::ADAGRAD),
    OPTIMIZER_TESTS("muon_momentum", Rule::MUON_MOMENTUM),
    OPTIMIZER_TESTS("muon_step", Rule::MUON_STEP),
    {"adamw", optimizer_test<Rule::ADAMW>, {3000001}, OpWhen::LARGE},
    {"lamb_norms", lamb_norms_test, {1}, OpWhen::ALWAYS},
    {"lamb_norms", lamb_norms_test, {40001, 1, 0, 1}, OpWhen::ALWAYS},
    {"adamw_trial", adamw_trial_test, {2}, OpWhen::ALWAYS},
    {"adamw_trial", adamw_trial_test, {1}, OpWhen::ALWAYS},
    {"step_trial", step_trial_test, {4}, OpWhen::ALWAYS},
    {"step_trial", step_trial_test, {8}, OpWhen::ALWAYS},
    {"adamw", optimizer_test<Rule::ADAMW>, {124 * 1000 * 1000}, OpWhen::BENCH},
    {"sgd", optimizer_test<Rule::SGD>, {124 * 1000 * 1000}, OpWhen::BENCH},
    {"lion", optimizer_test<Rule::LION>, {124 * 1000 * 1000}, OpWhen::BENCH},
};

#endif
