/* optimizer.cuh: one step of an optimizer, from the step's state (step.cuh): the UPDATE of each rule below, with
 *   g = grad * grad_scale * clip_coef   lr = the step's rate * the run's factor   wd the run's weight decay
 *   bc = 1 - beta^t, t counts applied steps
 * LAMB and Muon take two passes over the elements, First and the rule itself, and see whole tensors between them.
 * To add an optimizer: a struct beside the others, a row in OPTIMIZERS, a rule_ref for the op tests, and a reference in
 * test/test_optimizer.py; a missing one is named. Enum, --optimizer, --help, kernels, files follow.
 * shapes  param (n) floatX; sums (tensors,2) double; master, grad and the states that the rule has, (n) stored as
 *         Values says (values.cuh):
 *         master   FP32: param is it rounded to nearest; in fp32 they are one; null: the model uses the master.
 *                  SPLIT: its upper half is param.
 *                  BF16: it is param: there is no master, and the new weight is rounded stochastically
 *         states   FP32, or BF16 rounded stochastically       grad     FP32 or floatX's
 * writes  param = master = states =; MuonMomentum grad =
 * needs   any n; up to 32 runs of elements, each with its rates, one after another
 * exact   each element by itself: same bits on every run and for any number of CPU threads. Stochastic rounding depends
 *         on the seed, the number of the applied step and the element's index among all parameters, nothing else
 * cost    adamw in fp32 reads p g m v and writes p m v, 28*n bytes; a 16-bit param beside a master adds 2*n, a split
 *         master is 28*n, none 24*n; m and v in bf16 save 8*n, a gradient in 16 bits 2*n. adam the same; sgd, lion and
 *         adagrad 8*n less; lamb 20*n and 16*n; muon 16*n and 12*n. Judged against memory bandwidth
 * source  AdamW: Loshchilov & Hutter 2017, arXiv:1711.05101. LAMB: You et al. 2019, arXiv:1904.00962, in DeepSpeed's
 *         variant. Lion: Chen et al. 2023, arXiv:2302.06675. Adagrad: Duchi et al. 2011. Muon: Jordan 2024,
 *         kellerjordan.github.io/posts/muon */
#pragma once
#include <climits>
#include "step.cuh"
#include "values.cuh"

struct OptimizerConfig {
    float eps, momentum, dampening;                  // beta1 and beta2 are StepState's
    bool nesterov;
    uint64_t seed;                                   // of stochastic rounding
};

/* What a step reads and changes. param null: the model uses the master. */
static constexpr int MAX_STATES = 4;
struct OptimizerArrays {
    floatX* param;
    Values master, grad, states[MAX_STATES];
};

static OptimizerArrays optimizer_arrays_from(const OptimizerArrays& a, size_t first)
{
    OptimizerArrays from = {a.param != nullptr ? a.param + first : nullptr, values_from(a.master, first),
                            values_from(a.grad, first), {}};
    for (int k = 0; k < MAX_STATES; k++) from.states[k] = values_from(a.states[k], first);
    return from;
}

HOSTDEV bool rounds_at_random(const OptimizerArrays& a)
{
    bool at_random = a.master.dtype == Dtype::BF16;
    for (int k = 0; k < MAX_STATES; k++) at_random = at_random || a.states[k].dtype == Dtype::BF16;
    return at_random;
}

/* Is the weight that the model uses kept beside the master? */
HOSTDEV bool has_copy(const OptimizerArrays& a) { return a.param != nullptr && (void*)a.param != a.master.at; }

/* The key of this step's random bits. Of an element's 64 the weight takes the lowest 16, then slots 0, 1 and 2 of the
 * states; slot 3 takes those of their mix64. */
HOSTDEV uint64_t random_key(uint64_t seed, const StepState* state)
{
    return mix64(mix64(seed + GOLDEN_GAMMA) + state->num_applied);
}
HOSTDEV uint64_t state_random(uint64_t random, int slot) { return slot < 3 ? random : mix64(random); }
HOSTDEV int state_shift(int slot) { return slot < 3 ? 16 * (slot + 1) : 0; }

// ---- the rules

/* What an optimizer does with whole tensors between its two passes over the elements. */
enum class TensorPhase { NONE, NORMS, MATRICES };   // LAMB's, Muon's: lamb.cuh, muon.cuh, zero/update.h

/* One run of elements in one step, of which a rule makes its constants. */
struct RuleRun {
    const StepState* state;
    double lr, lr_factor, ratio;                     // lr = state->lr * lr_factor; ratio: LAMB's
    float weight_decay;
};

/* A rule is a pass over the elements: what it moves, and `element`, the new parameter of the old one, a gradient and
 * the states. The last pass of an optimizer also says what belongs to the optimizer. What a rule leaves out is this: */
struct Rule {
    static constexpr bool READS_PARAM = true;        // and writes it
    static constexpr bool READS_GRAD = true, WRITES_GRAD = false;
    static constexpr bool READS_STATES = true, WRITES_STATES = true;
    static constexpr bool DECAY_IS_COUPLED = false;  // decay: wd, to be added to the gradient; else lr*wd, a step

    static constexpr TensorPhase PHASE = TensorPhase::NONE;
    typedef void First;                              // the pass before that phase, and
    typedef void Rest;                               // with MATRICES the rule of all but hidden matrices
    static constexpr int HIDDEN_STATES = MAX_STATES; // how many of the states hidden matrices have
    static constexpr const char* FLAGS = "beta1 beta2 eps";   // of data/flags.h, beside --lr and --weight-decay
    static constexpr double BETA1 = -1, BETA2 = -1, MOMENTUM = -1, WEIGHT_DECAY = -1;   // -1: the flag's own default

    struct Factors {
        float grad_coef, beta1, beta2, step_size, rsqrt_correction2, eps, decay, momentum, dampening;
        bool nesterov;
    };
    HOSTDEV void adjust(Factors* f, const RuleRun& run) {}             // by default step_size is lr
};

/* The one slot that may have gaps, where hidden matrices have no state: see OptimizerRuns. */
static constexpr int GAPPED_STATE = 1;

/* What a step is divided by. 1 where v and eps are 0: there was no gradient, as in padding, and m is 0 too. */
HOSTDEV float divisor(float root, float eps)
{
    const float sum = root + eps;
    return sum == 0.0f ? 1.0f : sum;
}

/* Decay and step are added before p is rounded, so that a decay far below p's last bit is not always rounded the same
 * way. */
struct Adamw : Rule {
    static constexpr const char* STATES[MAX_STATES] = {"m", "v"};
    static constexpr const char* UPDATE =
        "m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g g; "
        "p *= 1 - lr wd; p -= lr (m / bc1) / (sqrt(v / bc2) + eps)";
    HOSTDEV void adjust(Factors* f, const RuleRun& run)
    {
        f->step_size = (float)(run.state->factors.adam_lr * run.lr_factor);
    }
    HOSTDEV float step(float g, float* m, float* v, const Factors& f)
    {
        *m = f.beta1 * *m + (1.0f - f.beta1) * g;
        *v = f.beta2 * *v + (1.0f - f.beta2) * g * g;
        return f.step_size * *m / divisor(sqrtf(*v) * f.rsqrt_correction2, f.eps);
    }
    HOSTDEV float element(float p, float* grad, float* states, const Factors& f)
    {
        return p - (f.decay * p + step(*grad * f.grad_coef, &states[0], &states[1], f));
    }
};

struct Adam : Adamw {
    static constexpr const char* UPDATE =
        "g += wd p first, then as adamw without its decay";
    static constexpr bool DECAY_IS_COUPLED = true;
    static constexpr double WEIGHT_DECAY = 0;
    HOSTDEV float element(float p, float* grad, float* states, const Factors& f)
    {
        return p - step(*grad * f.grad_coef + f.decay * p, &states[0], &states[1], f);
    }
};

struct Sgd : Rule {
    static constexpr const char* STATES[MAX_STATES] = {"m"};
    static constexpr const char* UPDATE =
        "g += wd p; m = momentum m + (1 - dampening) g; p -= lr m, nesterov: lr (g + momentum m)";
    static constexpr bool DECAY_IS_COUPLED = true;
    static constexpr const char* FLAGS = "momentum dampening nesterov";
    static constexpr double MOMENTUM = 0.9, WEIGHT_DECAY = 0;
    HOSTDEV float element(float p, float* grad, float* states, const Factors& f)
    {
        const float g = *grad * f.grad_coef + f.decay * p;
        float& m = states[0];
        m = f.momentum * m + (1.0f - f.dampening) * g;
        return p - f.step_size * (f.nesterov ? g + f.momentum * m : m);
    }
};

HOSTDEV float lamb_direction(float p, float m, float v, float eps, float weight_decay)
{
    return m / divisor(sqrtf(v), eps) + weight_decay * p;
}

/* From the sums of p^2 and u^2 of a tensor. */
HOSTDEV double lamb_ratio(const double* sums)
{
    return sums[0] > 0.0 && sums[1] > 0.0 ? fmin(fmax(sqrt(sums[0] / sums[1]), 0.01), 10.0) : 1.0;
}

struct LambStates : Adamw {
    static constexpr bool READS_PARAM = false;
    HOSTDEV float element(float p, float* grad, float* states, const Factors& f)
    {
        step(*grad * f.grad_coef, &states[0], &states[1], f);
        return p;
    }
};

struct Lamb : Rule {
    static constexpr const char* STATES[MAX_STATES] = {"m", "v"};
    static constexpr const char* UPDATE =
        "m and v as adamw, then u = m / (sqrt(v) + eps) + wd p; p -= lr sqrt(bc2) / bc1 ratio u, "
        "ratio = norm of p / norm of u within 0.01 and 10, of each tensor";
    static constexpr bool READS_GRAD = false, WRITES_STATES = false, DECAY_IS_COUPLED = true;
    static constexpr TensorPhase PHASE = TensorPhase::NORMS;
    typedef LambStates First;
    static constexpr double WEIGHT_DECAY = 0.01;
    HOSTDEV void adjust(Factors* f, const RuleRun& run)
    {
        f->step_size = (float)(run.state->factors.lamb_lr * run.lr_factor * run.ratio);
    }
    HOSTDEV float element(float p, float* grad, float* states, const Factors& f)
    {
        return p - f.step_size * lamb_direction(p, states[0], states[1], f.eps, f.decay);
    }
};

struct Lion : Rule {
    static constexpr const char* STATES[MAX_STATES] = {"m"};
    static constexpr const char* UPDATE =
        "c = beta1 m + (1 - beta1) g; p *= 1 - lr wd; p -= lr sign(c); m = beta2 m + (1 - beta2) g";
    static constexpr const char* FLAGS = "beta1 beta2";
    static constexpr double BETA2 = 0.99;
    HOSTDEV float element(float p, float* grad, float* states, const Factors& f)
    {
        const float g = *grad * f.grad_coef;
        float& m = states[0];
        const float c = f.beta1 * m + (1.0f - f.beta1) * g;
        m = f.beta2 * m + (1.0f - f.beta2) * g;
        return p - (f.decay * p + (c > 0.0f ? f.step_size : c < 0.0f ? -f.step_size : 0.0f));
    }
};

/* v is in AdamW's slot: the slot decides a state's random bits and its part of the state hash. */
struct Adagrad : Rule {
    static constexpr const char* STATES[MAX_STATES] = {nullptr, "v"};
    static constexpr const char* UPDATE =
        "g += wd p; v += g g; p -= lr g / (sqrt(v) + eps)";
    static constexpr bool DECAY_IS_COUPLED = true;
    static constexpr const char* FLAGS = "eps";
    static constexpr double WEIGHT_DECAY = 0;
    HOSTDEV float element(float p, float* grad, float* states, const Factors& f)
    {
        const float g = *grad * f.grad_coef + f.decay * p;
        float& v = states[1];
        v += g * g;
        return p - f.step_size * g / divisor(sqrtf(v), f.eps);
    }
};

/* Of hidden matrices: the gradient becomes what muon.cuh makes orthogonal, and then the direction of Muon's step. */
struct MuonMomentum : Rule {
    static constexpr const char* STATES[MAX_STATES] = {"m"};
    static constexpr bool READS_PARAM = false, WRITES_GRAD = true;
    HOSTDEV float element(float p, float* grad, float* states, const Factors& f)
    {
        const float g = *grad * f.grad_coef;
        float& m = states[0];
        m = f.momentum * m + (1.0f - f.momentum) * g;
        *grad = g + f.momentum * (m - g);
        return p;
    }
};

struct Muon : Rule {
    static constexpr const char* STATES[MAX_STATES] = {"m", "v"};
    static constexpr const char* UPDATE =
        "hidden matrices: m = momentum m + (1 - momentum) g; u = g + momentum (m - g), then u is "
        "made orthogonal by five Newton-Schulz steps; p *= 1 - lr wd; p -= lr u. "
        "They keep no v. The rest by adamw";
    static constexpr bool READS_STATES = false;
    static constexpr TensorPhase PHASE = TensorPhase::MATRICES;
    typedef MuonMomentum First;
    typedef Adamw Rest;
    static constexpr int HIDDEN_STATES = 1;
    static constexpr const char* FLAGS = "beta1 beta2 eps momentum muon_lr";
    static constexpr double MOMENTUM = 0.95;
    HOSTDEV float element(float p, float* grad, float* states, const Factors& f)
    {
        return p - (f.decay * p + f.step_size * *grad);
    }
};

// ---- the optimizers

#define OPTIMIZERS(O) \
    O(ADAMW,   "adamw",   Adamw) \
    O(ADAM,    "adam",    Adam) \
    O(SGD,     "sgd",     Sgd) \
    O(LAMB,    "lamb",    Lamb) \
    O(LION,    "lion",    Lion) \
    O(ADAGRAD, "adagrad", Adagrad) \
    O(MUON,    "muon",    Muon)

#define OPTIMIZER_ENUM(name, word, R) name,
enum class Optimizer { OPTIMIZERS(OPTIMIZER_ENUM) };
#undef OPTIMIZER_ENUM

#define OPTIMIZER_WORD(name, word, R) "|" word
static const char* const optimizer_words = &OPTIMIZERS(OPTIMIZER_WORD)[1];   // "adamw|adam|..."
#undef OPTIMIZER_WORD

/* A row with its types erased. */
struct OptimizerRow {
    const char *name, *update;
    Optimizer optimizer;
    TensorPhase phase;
    const char* const* states;                       // (MAX_STATES) names, which files have too; null: not kept
    int hidden_states;
    const char* flags;
    double beta1, beta2, momentum, weight_decay;
};

#define OPTIMIZER_ROW(name, word, R) \
    {word, R::UPDATE, Optimizer::name, R::PHASE, R::STATES, R::HIDDEN_STATES, R::FLAGS, R::BETA1, R::BETA2, \
     R::MOMENTUM, R::WEIGHT_DECAY},
static const OptimizerRow optimizer_rows[] = { OPTIMIZERS(OPTIMIZER_ROW) };
#undef OPTIMIZER_ROW

static const OptimizerRow* optimizer_find(const char* name)
{
    for (const OptimizerRow& row : optimizer_rows)
        if (strcmp(row.name, name) == 0) return &row;
    die("--optimizer %s: there is no such row: have %s", name, optimizer_words);
}

/* Bit k: is there a state in slot k? Of a pass: which it reads. */
static constexpr unsigned states_mask(const char* const (&names)[MAX_STATES])
{
    unsigned mask = 0;
    for (int k = 0; k < MAX_STATES; k++) mask |= (names[k] != nullptr ? 1u : 0u) << k;
    return mask;
}
#define OPTIMIZER_CHECK(name, word, R) \
    static_assert((states_mask(R::STATES) >> R::HIDDEN_STATES << R::HIDDEN_STATES & ~(1u << GAPPED_STATE)) == 0, \
                  word ": hidden matrices can be without slot GAPPED_STATE alone");
OPTIMIZERS(OPTIMIZER_CHECK)
#undef OPTIMIZER_CHECK

template <class R> static constexpr unsigned STATES_READ = R::READS_STATES ? states_mask(R::STATES) : 0;

// ---- runs: where the rates change along a slice

/* Run i ends before element end[i]; element e of it has its state of slot GAPPED_STATE at e - gap[i], and is number
 * element_index(place[i], e) of all parameters (rectangle.h). A run that is left out keeps its place. Given to the
 * kernels by value. */
static constexpr int OPTIMIZER_MAX_RUNS = 32;
struct OptimizerRuns {
    int num_runs;
    size_t end[OPTIMIZER_MAX_RUNS], gap[OPTIMIZER_MAX_RUNS];
    float weight_decay[OPTIMIZER_MAX_RUNS], lr_factor[OPTIMIZER_MAX_RUNS];
    int tensor[OPTIMIZER_MAX_RUNS];                  // its place in LAMB's sums; -1 for all where nobody asks
    bool left_out[OPTIMIZER_MAX_RUNS];
    Rectangle place[OPTIMIZER_MAX_RUNS];
};

/* Adds a run up to `end`, or lengthens the last one if it is of the same kind. */
static void runs_extend(OptimizerRuns* runs, size_t end, float weight_decay, float lr_factor, int tensor = -1,
                        bool left_out = false, size_t gap = 0, Rectangle place = rectangle_in_line(0))
{
    const int last = runs->num_runs - 1;
    if (last < 0 || runs->weight_decay[last] != weight_decay || runs->lr_factor[last] != lr_factor ||
        runs->tensor[last] != tensor || runs->left_out[last] != left_out || runs->gap[last] != gap ||
        !rectangle_equals(runs->place[last], place)) {
        ENSURE(runs->num_runs < OPTIMIZER_MAX_RUNS, "the rates change more than %d times in a slice: fewer "
               "--param-group", OPTIMIZER_MAX_RUNS);
        const int i = runs->num_runs++;
        runs->weight_decay[i] = weight_decay;
        runs->lr_factor[i] = lr_factor;
        runs->tensor[i] = tensor;
        runs->left_out[i] = left_out;
        runs->gap[i] = gap;
        runs->place[i] = place;
    }
    runs->end[runs->num_runs - 1] = end;
}

static size_t runs_elems(const OptimizerRuns* runs) { return runs->num_runs > 0 ? runs->end[runs->num_runs - 1] : 0; }

/* The constants of a run. */
template <class R> HOSTDEV typename R::Factors run_factors(const OptimizerRuns& runs, int run,
                                                           const OptimizerConfig& config, const double* sums,
                                                           const StepState* state)
{
    typename R::Factors f;
    const float weight_decay = runs.weight_decay[run];
    const double lr_factor = runs.lr_factor[run], lr = state->lr * lr_factor;
    const double ratio = R::PHASE == TensorPhase::NORMS ? lamb_ratio(sums + 2 * runs.tensor[run]) : 1.0;
    f.grad_coef = state->factors.grad_coef;
    f.beta1 = (float)state->beta1;
    f.beta2 = (float)state->beta2;
    f.step_size = (float)lr;
    f.rsqrt_correction2 = state->factors.rsqrt_correction2;
    f.eps = config.eps;
    f.decay = R::DECAY_IS_COUPLED ? weight_decay : (float)(lr * (double)weight_decay);
    f.momentum = config.momentum;
    f.dampening = config.dampening;
    f.nesterov = config.nesterov;
    R::adjust(&f, RuleRun{state, lr, lr_factor, ratio, weight_decay});
    return f;
}

#ifdef DEVICE_CPU

/* Element i. A function of its own, since an array inside of a loop under `omp simd` keeps it from being vectorised. */
template <class R> static inline void optimizer_element(float* p, float* grad, float* const (&states)[MAX_STATES],
                                                        size_t i, const typename R::Factors& f)
{
    float s[MAX_STATES], g = R::READS_GRAD ? grad[i] : 0.0f;
    for (int k = 0; k < MAX_STATES; k++) s[k] = STATES_READ<R> >> k & 1 ? states[k][i] : 0.0f;
    const float new_p = R::element(R::READS_PARAM ? p[i] : 0.0f, &g, s, f);
    for (int k = 0; k < MAX_STATES; k++)
        if ((STATES_READ<R> >> k & 1) && R::WRITES_STATES) states[k][i] = s[k];
    if (R::WRITES_GRAD) grad[i] = g;
    if (R::READS_PARAM) p[i] = new_p;
}

/* n <= VALUES_PIECE elements of one run from the arrays' first on, those of `place` among all parameters. */
template <class R> static void optimizer_piece_cpu(const OptimizerArrays& a, size_t n, typename R::Factors f,
                                                   uint64_t key, Rectangle place)
{
    constexpr unsigned STATES = STATES_READ<R>;
    float bufs[MAX_STATES + 2][VALUES_PIECE];
    uint32_t random[2][VALUES_PIECE];                // halves of the 64 bits: lanes as wide as those of the floats
    float* p = R::READS_PARAM ? values_get(a.master, 0, n, bufs[0]) : nullptr;
    float* grad = R::READS_GRAD || R::WRITES_GRAD ? values_get(a.grad, 0, n, bufs[1]) : nullptr;
    float* states[MAX_STATES] = {};
    for (int k = 0; k < MAX_STATES; k++)
        if (STATES >> k & 1) states[k] = values_get(a.states[k], 0, n, bufs[2 + k]);
    #pragma omp simd
    for (size_t i = 0; i < n; i++) optimizer_element<R>(p, grad, states, i, f);
    random[0][0] = random[1][0] = 0;
    for (size_t i = 0, in_row; i < (rounds_at_random(a) ? n : 0); i += in_row) {
        const size_t index = element_index(place, i);
        in_row = elements_in_row(place, i, n - i);
        for (size_t k = 0; k < in_row; k++) {
            const uint64_t bits = random_bits(key, index + k);
            random[0][i + k] = (uint32_t)bits;
            random[1][i + k] = (uint32_t)(bits >> 32);
        }
    }
    if (R::WRITES_GRAD) values_put(a.grad, 0, n, grad);
    if (R::READS_PARAM) values_put_random(a.master, 0, n, p, random[0], 0);
    #pragma omp simd
    for (size_t i = 0; i < (R::READS_PARAM && has_copy(a) ? n : 0); i++) store_weight(a.param + i, p[i]);
    for (int k = 0; k < MAX_STATES; k++) {
        if (!(STATES >> k & 1) || !R::WRITES_STATES) continue;
        for (size_t i = 0; i < (k < 3 ? 0 : n); i++) {
            const uint64_t bits = state_random((uint64_t)random[1][i] << 32 | random[0][i], k);
            random[0][i] = (uint32_t)bits;
            random[1][i] = (uint32_t)(bits >> 32);
        }
        values_put_random(a.states[k], 0, n, states[k], random[state_shift(k) / 32], state_shift(k) % 32);
    }
}

template <class R> static void optimizer_update_cpu(const OptimizerArrays& a, const OptimizerRuns* runs,
                                                    const OptimizerConfig& config, const double* sums,
                                                    const StepState* state)
{
    if (state->skip != Skip::NONE) return;
    const uint64_t key = random_key(config.seed, state);
    for (int run = 0; run < runs->num_runs; run++) {
        const size_t first = run > 0 ? runs->end[run - 1] : 0, end = runs->end[run], gap = runs->gap[run];
        if (runs->left_out[run]) continue;
        const typename R::Factors f = run_factors<R>(*runs, run, config, sums, state);
        #pragma omp parallel for schedule(static)
        for (size_t i = first; i < end; i += VALUES_PIECE) {
            OptimizerArrays piece = optimizer_arrays_from(a, i);
            piece.states[GAPPED_STATE] = values_from(a.states[GAPPED_STATE], i - gap);
            optimizer_piece_cpu<R>(piece, end - i < VALUES_PIECE ? end - i : VALUES_PIECE, f, key,
                                   rectangle_from(runs->place[run], i));
        }
    }
}

#else

static constexpr int OPTIMIZER_BLOCK = 256;

/* Slot GAPPED_STATE, to be indexed as the others. */
HOSTDEV Values optimizer_gapped(const OptimizerArrays& a, size_t gap)
{
    Values gapped = a.states[GAPPED_STATE];
    gapped.at = (char*)gapped.at - gap * dtype_bytes(gapped.dtype);
    return gapped;
}

/* A vector of W elements from element i on. Where a run ends within it, element by element. */
template <class R, int W> DEV void optimizer_vec(const OptimizerArrays& a, const OptimizerRuns& runs,
                                                 const typename R::Factors* factors, bool at_random, uint64_t key,
                                                 size_t i)
{
    constexpr unsigned STATES = STATES_READ<R>, WRITTEN = R::WRITES_STATES ? STATES : 0;
    const size_t end = min(i + W, runs.end[runs.num_runs - 1]);
    int run = 0;
    while (runs.end[run] <= i) run++;
    typename R::Factors f = factors[run];
    if (i + W <= runs.end[run]) {
        if (runs.left_out[run]) return;
        const Values gapped = optimizer_gapped(a, runs.gap[run]);
        float p[W] = {}, g[W] = {}, s[MAX_STATES][W] = {};
        uint64_t random[W] = {};
        Element e = at_random ? element_at(runs.place[run], i) : Element{};
        if constexpr (R::READS_PARAM) values_load(p, a.master, i);
        if constexpr (R::READS_GRAD) values_load(g, a.grad, i);
#pragma unroll
        for (int k = 0; k < MAX_STATES; k++)
            if (STATES >> k & 1) values_load(s[k], k == GAPPED_STATE ? gapped : a.states[k], i);
#pragma unroll
        for (int w = 0; w < W; w++) {
            float of_element[MAX_STATES];
#pragma unroll
            for (int k = 0; k < MAX_STATES; k++) of_element[k] = s[k][w];
            p[w] = R::element(p[w], &g[w], of_element, f);
#pragma unroll
            for (int k = 0; k < MAX_STATES; k++) s[k][w] = of_element[k];
            if (!at_random) continue;
            random[w] = random_bits(key, e.index);
            element_next(runs.place[run], &e);
        }
#pragma unroll
        for (int k = 0; k < MAX_STATES; k++) {
            uint64_t of_state[W];
            if (!(WRITTEN >> k & 1)) continue;
#pragma unroll
            for (int w = 0; w < W; w++) of_state[w] = state_random(random[w], k);
            values_store(k == GAPPED_STATE ? gapped : a.states[k], i, s[k], of_state, state_shift(k));
        }
        if constexpr (R::WRITES_GRAD) values_store(a.grad, i, g);
        if constexpr (R::READS_PARAM) values_store(a.master, i, p, random);
        if (R::READS_PARAM && has_copy(a)) weights_store(a.param + i, p);
    } else {
        for (; i < end; i++) {
            for (; runs.end[run] <= i; run++) f = factors[run + 1];
            if (runs.left_out[run]) continue;
            const Values gapped = optimizer_gapped(a, runs.gap[run]);
            const uint64_t random = at_random ? random_bits(key, element_index(runs.place[run], i)) : 0;
            float g = R::READS_GRAD ? value_load(a.grad, i) : 0.0f, s[MAX_STATES] = {};
#pragma unroll
            for (int k = 0; k < MAX_STATES; k++)
                if (STATES >> k & 1) s[k] = value_load(k == GAPPED_STATE ? gapped : a.states[k], i);
            const float p = R::element(R::READS_PARAM ? value_load(a.master, i) : 0.0f, &g, s, f);
#pragma unroll
            for (int k = 0; k < MAX_STATES; k++)
                if (WRITTEN >> k & 1)
                    value_store_random(k == GAPPED_STATE ? gapped : a.states[k], i, s[k],
                                       (uint32_t)(state_random(random, k) >> state_shift(k)));
            if constexpr (R::WRITES_GRAD) value_store(a.grad, i, g);
            if constexpr (R::READS_PARAM) value_store_random(a.master, i, p, (uint32_t)random);
            if (R::READS_PARAM && has_copy(a)) store_weight(a.param + i, p);
        }
    }
}

/* In fp32 param is the master. At any precision W = 4: a warp's 16 bytes of fp32 a thread lie side by side, and so do
 * the 8 bytes of a 16-bit param; with 8 elements a thread each request touched every sector of twice its bytes.
 * Each block computes the constants of all runs first, a thread a run. What they have in common is computed once a step
 * (StepFactors); of operations in double, of which some GPUs do one in the time of 64, a few are left. */
template <class R, int W> static __global__ void __launch_bounds__(OPTIMIZER_BLOCK, 4)
optimizer_kernel(OptimizerArrays a, OptimizerRuns runs, OptimizerConfig config, const double* sums,
                 const StepState* state)
{
    SHARED(typename R::Factors, factors, [OPTIMIZER_MAX_RUNS]);
    if (state->skip != Skip::NONE) return;
    const int run = threadIdx.x;
    if (run < runs.num_runs) factors[run] = run_factors<R>(runs, run, config, sums, state);
    __syncthreads();
    const bool at_random = rounds_at_random(a);
    const uint64_t key = at_random ? random_key(config.seed, state) : 0;
    const size_t n = runs.end[runs.num_runs - 1], stride = (size_t)gridDim.x * OPTIMIZER_BLOCK * W;
    for (size_t i = ((size_t)blockIdx.x * OPTIMIZER_BLOCK + threadIdx.x) * W; i < n; i += stride)
        optimizer_vec<R, W>(a, runs, factors, at_random, key, i);
}

#endif

/* What a pass moves: of one element, and of how many. */
template <class R> static double optimizer_bytes(const OptimizerArrays& a)
{
    double bytes = (R::READS_GRAD + R::WRITES_GRAD) * value_bytes(a.grad);
    if (R::READS_PARAM) bytes += 2 * value_bytes(a.master) + (has_copy(a) ? sizeof(floatX) : 0);
    for (int k = 0; k < MAX_STATES; k++)
        if (STATES_READ<R> >> k & 1) bytes += (1 + R::WRITES_STATES) * value_bytes(a.states[k]);
    return bytes;
}
static size_t optimizer_elems(const OptimizerRuns* runs)
{
    size_t n = 0;
    for (int run = 0; run < runs->num_runs; run++)
        if (!runs->left_out[run]) n += runs->end[run] - (run > 0 ? runs->end[run - 1] : 0);
    return n;
}

/* One pass over all runs, in one launch of at most max_blocks blocks. sums is LAMB's. */
template <class R> static void optimizer_update(const OptimizerArrays& a, const OptimizerRuns* runs,
                                                OptimizerConfig config, const double* sums, const StepState* state,
                                                cudaStream_t stream, size_t max_blocks = INT_MAX)
{
    const size_t num_updated = optimizer_elems(runs);
    if (num_updated == 0) return;
    OP(stream, 0, optimizer_bytes<R>(a) * num_updated, num_updated);
    ON_CPU(optimizer_update_cpu<R>(a, runs, config, sums, state));
#ifndef DEVICE_CPU
    const size_t n = runs_elems(runs);
    bool vec = (uintptr_t)a.param % (4 * sizeof(floatX)) == 0 && values_are_vec(a.master, 4);
    vec = vec && values_are_vec(a.grad, 4);
    for (int k = 0; k < MAX_STATES; k++) vec = vec && (!(STATES_READ<R> >> k & 1) || values_are_vec(a.states[k], 4));
    for (int run = 0; run < runs->num_runs; run++) vec = vec && runs->gap[run] % 4 == 0;
    const size_t num_blocks = ceil_div(n, OPTIMIZER_BLOCK * (vec ? 4 : 1));
    const unsigned grid = (unsigned)(num_blocks < max_blocks ? num_blocks : max_blocks);
    if (vec) LAUNCH((optimizer_kernel<R, 4>), grid, OPTIMIZER_BLOCK, 0, stream, a, *runs, config, sums, state);
    else LAUNCH((optimizer_kernel<R, 1>), grid, OPTIMIZER_BLOCK, 0, stream, a, *runs, config, sums, state);
    CUDA_CHECK(cudaGetLastError());
#endif
}

#ifdef OP_TESTS

/* One element as plain code has it, of double (the truth) or float, to which each rule has the formulas at the top. */
template <class T> struct RuleRef {
    T p, g, grad, states[MAX_STATES];                // g: unscaled and clipped; grad: as it is stored
    T lr, wd, ratio, beta1, beta2, eps, mu, damp, bc1, bc2;
    bool nesterov;
    int t;                                           // applied steps, with this one
};

template <class T> static void rule_ref(LambStates, RuleRef<T>* r)
{
    T &m = r->states[0], &v = r->states[1];
    m = r->beta1 * m + (1 - r->beta1) * r->g;
    v = r->beta2 * v + (1 - r->beta2) * r->g * r->g;
}
template <class T> static T adam_step_ref(RuleRef<T>* r)
{
    rule_ref(LambStates{}, r);
    return r->lr * (r->states[0] / r->bc1) / (std::sqrt(r->states[1] / r->bc2) + r->eps);
}
template <class T> static void rule_ref(Adamw, RuleRef<T>* r)
{
    const T step = adam_step_ref(r);
    r->p = r->p * (1 - r->lr * r->wd) - step;
}
template <class T> static void rule_ref(Adam, RuleRef<T>* r)
{
    r->g += r->wd * r->p;
    r->p -= adam_step_ref(r);
}
template <class T> static void rule_ref(Sgd, RuleRef<T>* r)
{
    T g = r->g + r->wd * r->p, &m = r->states[0];
    m = r->mu * m + (1 - r->damp) * g;
    r->p -= r->lr * (r->nesterov ? g + r->mu * m : m);
}
template <class T> static void rule_ref(Lamb, RuleRef<T>* r)
{
    const T u = r->states[0] / (std::sqrt(r->states[1]) + r->eps) + r->wd * r->p;
    r->p -= r->lr * std::sqrt(r->bc2) / r->bc1 * r->ratio * u;
}
template <class T> static void rule_ref(Lion, RuleRef<T>* r)
{
    T &m = r->states[0], sum = r->beta1 * m + (1 - r->beta1) * r->g;
    r->p = r->p * (1 - r->lr * r->wd) - r->lr * (T)((sum > 0) - (sum < 0));
    m = r->beta2 * m + (1 - r->beta2) * r->g;
}
template <class T> static void rule_ref(Adagrad, RuleRef<T>* r)
{
    T g = r->g + r->wd * r->p, &v = r->states[1];
    v += g * g;
    r->p -= r->lr * g / (std::sqrt(v) + r->eps);
}
template <class T> static void rule_ref(MuonMomentum, RuleRef<T>* r)
{
    T& m = r->states[0];
    m = r->mu * m + (1 - r->mu) * r->g;
    r->grad = r->g + r->mu * (m - r->g);
}
template <class T> static void rule_ref(Muon, RuleRef<T>* r)
{
    r->p = r->p * (1 - r->lr * r->wd) - r->lr * r->grad;
}

#include "optimizer_tests.h"
#endif
