/* test_emu_traffic.h: part of test_ops.cu in the checked build: test_ops --traffic. Counts what an op moves through
 * memory and compares it with the cost line of its header:
 *   moved        bytes over the op's cost: each byte once per block, because what a block reads again comes from L1;
 *                tensors marked SMALL, which all blocks read, once per operation, because they stay in L2
 *   sectors      the fewest 32-byte sectors that hold what the warps asked for, over those they touched
 *   conflicts    wavefronts of shared memory over those without bank conflicts
 * Sizes are such that whole rows are vectors; the scalar paths of odd sizes are tested for results, not for speed. */
#include "kernels/emu/emu_check.h"

static const double MOST_MOVED = 1.10, LEAST_SECTORS = 0.95, MOST_CONFLICTS = 1.05;
static const int TRAFFIC_MAX_TENSORS = 16;

enum class Reuse { LARGE, SMALL };

struct TrafficRun {
    void* tensors[TRAFFIC_MAX_TENSORS];
    Reuse reuse[TRAFFIC_MAX_TENSORS];
    int num_tensors, num_failed, num_passed;
};

/* n elements on the device, 0 in all bits: a number, a token and a target. */
template <class T> static T* traffic_tensor(TrafficRun* run, size_t n, Reuse reuse = Reuse::LARGE)
{
    ENSURE(run->num_tensors < TRAFFIC_MAX_TENSORS, "more than %d tensors", TRAFFIC_MAX_TENSORS);
    void* p;
    CUDA_CHECK(cudaMalloc(&p, n * sizeof(T)));
    CUDA_CHECK(cudaMemset(p, 0, n * sizeof(T)));
    run->tensors[run->num_tensors] = p;
    run->reuse[run->num_tensors++] = reuse;
    return (T*)p;
}

/* After the op has run: moved, sectors, conflicts; then the tensors are freed. */
static void traffic_check(TrafficRun* run, const char* name, double cost_bytes)
{
    CUDA_CHECK(cudaDeviceSynchronize());
    const EmuTraffic total = emu_traffic();
    uint64_t moved_bytes = 0, sectors = 0, ideal_sectors = 0;
    for (int i = 0; i < run->num_tensors; i++) {
        const EmuTraffic t = emu_traffic_of(run->tensors[i]);
        moved_bytes += run->reuse[i] == Reuse::SMALL ? t.op_bytes : t.block_bytes;
        sectors += t.sectors;
        ideal_sectors += t.ideal_sectors;
    }
    emu_count(false);
    for (int i = 0; i < run->num_tensors; i++) CUDA_CHECK(cudaFree(run->tensors[i]));
    run->num_tensors = 0;
    const double moved = cost_bytes > 0 ? (double)moved_bytes / cost_bytes : 0;
    const double whole = sectors > 0 ? (double)ideal_sectors / (double)sectors : 1;
    const double conflicts = total.ideal_wavefronts > 0 ? (double)total.wavefronts / (double)total.ideal_wavefronts : 1;
    const bool ok = moved <= MOST_MOVED && whole >= LEAST_SECTORS && conflicts <= MOST_CONFLICTS;
    printf("%s traffic %-27s moved %5.3f x cost, sectors %5.1f %% whole, conflicts %5.3f x, %.3f of the asked\n",
           ok ? "ok" : "FAIL", name, moved, 100 * whole, conflicts,
           (double)moved_bytes / (double)(total.read_bytes + total.write_bytes));
    if (ok) run->num_passed++;
    else run->num_failed++;
}

#define TRAFFIC(run, name, cost_bytes, call) do { \
    emu_count(true); \
    call; \
    traffic_check(run, name, (double)(cost_bytes)); \
} while (0)

static const size_t TRAFFIC_N = 128, TRAFFIC_C = 512, TRAFFIC_NC = TRAFFIC_N * TRAFFIC_C, TRAFFIC_S = sizeof(floatX);

static void traffic_embedding(TrafficRun* run)
{
    const int T = 8, B = TRAFFIC_N / T, C = TRAFFIC_C, V = 128;
    int h_tokens[TRAFFIC_N];
    for (size_t i = 0; i < TRAFFIC_N; i++) h_tokens[i] = (int)(i * 37 % V);
    for (bool backward : {false, true}) {
        int* tokens = traffic_tensor<int>(run, TRAFFIC_N, Reuse::SMALL);
        CUDA_CHECK(cudaMemcpy(tokens, h_tokens, sizeof h_tokens, cudaMemcpyHostToDevice));
        floatX* out = traffic_tensor<floatX>(run, TRAFFIC_NC);
        if (!backward) {
            floatX *wte = traffic_tensor<floatX>(run, (size_t)V * C);
            floatX *wpe = traffic_tensor<floatX>(run, (size_t)T * C, Reuse::SMALL);
            TRAFFIC(run, "embedding_rows", 2 * TRAFFIC_NC * TRAFFIC_S,
                    embedding_rows(out, tokens, nullptr, wte, wpe, ALL_TOKENS, B * T, T, C, nullptr));
        } else {
            float *dwte = traffic_tensor<float>(run, (size_t)V * C), *dwpe = traffic_tensor<float>(run, (size_t)T * C);
            const size_t rows = TRAFFIC_NC + (size_t)T * C;
            TRAFFIC(run, "embedding_backward", 2 * TRAFFIC_NC * TRAFFIC_S + 2 * rows * sizeof(float),
                    embedding_backward(dwte, dwpe, out, tokens, nullptr, B, T, C, nullptr));
        }
    }
}

static void traffic_layernorm(TrafficRun* run)
{
    const int N = 16384, C = 256;                    // as many rows as a micro-batch has: partial sums weigh little
    const size_t NC = (size_t)N * C;
    for (int which = 0; which < 3; which++) {
        floatX *a = traffic_tensor<floatX>(run, NC), *b = traffic_tensor<floatX>(run, NC);
        floatX *c = traffic_tensor<floatX>(run, NC), *d = traffic_tensor<floatX>(run, NC);
        floatX* weight = traffic_tensor<floatX>(run, C, Reuse::SMALL);
        floatX* bias = traffic_tensor<floatX>(run, C, Reuse::SMALL);
        float *mean = traffic_tensor<float>(run, N), *rstd = traffic_tensor<float>(run, N);
        if (which == 0)
            TRAFFIC(run, "layernorm_forward", 2 * NC * TRAFFIC_S,
                    layernorm_forward(a, mean, rstd, b, weight, bias, N, C, 1e-5f, nullptr));
        if (which == 1)
            TRAFFIC(run, "residual_layernorm", 4 * NC * TRAFFIC_S,
                    residual_layernorm_forward(a, b, mean, rstd, c, d, weight, bias, N, C, 1e-5f, nullptr));
        if (which == 2) {
            float* dweight = traffic_tensor<float>(run, C, Reuse::SMALL);
            float* dbias = traffic_tensor<float>(run, C, Reuse::SMALL);
            float* scratch = traffic_tensor<float>(run, layernorm_scratch_elems(C), Reuse::SMALL);
            TRAFFIC(run, "layernorm_backward", 4 * NC * TRAFFIC_S,
                    layernorm_backward(a, dweight, dbias, scratch, b, c, weight, mean, rstd, N, C, nullptr));
        }
    }
}

static void traffic_llama(TrafficRun* run)
{
    const int N = 16384, C = 256, F = 2 * TRAFFIC_C, T = 8, HEADS = 8, ROTATED = 6, HS = 64;
    const size_t NC = (size_t)N * C, NF = TRAFFIC_N * F, qkv_elems = TRAFFIC_N * HEADS * HS;
    for (int which = 0; which < 3; which++) {
        floatX *a = traffic_tensor<floatX>(run, NC), *b = traffic_tensor<floatX>(run, NC);
        floatX *c = traffic_tensor<floatX>(run, NC), *d = traffic_tensor<floatX>(run, NC);
        floatX* weight = traffic_tensor<floatX>(run, C, Reuse::SMALL);
        float *rstd = traffic_tensor<float>(run, N), *dweight = traffic_tensor<float>(run, C, Reuse::SMALL);
        float* scratch = traffic_tensor<float>(run, rmsnorm_scratch_elems(C), Reuse::SMALL);
        if (which == 0)
            TRAFFIC(run, "rmsnorm_forward", 2 * NC * TRAFFIC_S,
                    rmsnorm_forward(a, rstd, b, weight, N, C, 1e-5f, nullptr));
        if (which == 1)
            TRAFFIC(run, "residual_rmsnorm", 4 * NC * TRAFFIC_S,
                    residual_rmsnorm_forward(a, b, rstd, c, d, weight, N, C, 1e-5f, nullptr));
        if (which == 2)
            TRAFFIC(run, "rmsnorm_backward", 4 * NC * TRAFFIC_S,
                    rmsnorm_backward(a, dweight, scratch, b, c, weight, rstd, N, C, nullptr));
    }
    floatX *out = traffic_tensor<floatX>(run, NF), *inp = traffic_tensor<floatX>(run, 2 * NF);
    TRAFFIC(run, "swiglu_forward", 3 * NF * TRAFFIC_S, swiglu_forward(out, inp, TRAFFIC_N, F, nullptr));
    floatX *dout = traffic_tensor<floatX>(run, NF), *dinp = traffic_tensor<floatX>(run, 2 * NF);
    inp = traffic_tensor<floatX>(run, 2 * NF);
    TRAFFIC(run, "swiglu_backward", 5 * NF * TRAFFIC_S, swiglu_backward(dinp, dout, inp, TRAFFIC_N, F, nullptr));
    floatX* qkv = traffic_tensor<floatX>(run, qkv_elems);
    float* table = traffic_tensor<float>(run, T * HS, Reuse::SMALL);
    TRAFFIC(run, "rope_forward", 2 * TRAFFIC_N * ROTATED * HS * TRAFFIC_S,
            rope_forward(qkv, table, nullptr, TRAFFIC_N, T, ROTATED, HEADS, HS, nullptr));
}

static void traffic_qk_norm(TrafficRun* run)
{
    const int N = 4096, T = 8, NH = 4, NKV = 2;      // as many rows as let partial sums weigh little
    for (int HS : {64, 128})
        for (bool backward : {false, true}) {
            const size_t row = (size_t)(NH + 2 * NKV) * HS, normed = (size_t)(NH + NKV) * HS;
            floatX* qkv = traffic_tensor<floatX>(run, N * row);
            floatX* out = traffic_tensor<floatX>(run, N * row);
            floatX* weight = traffic_tensor<floatX>(run, HS, Reuse::SMALL);
            float* table = traffic_tensor<float>(run, T * HS, Reuse::SMALL);
            float* dweight = traffic_tensor<float>(run, 2 * HS, Reuse::SMALL);
            float* scratch = traffic_tensor<float>(run, qk_norm_scratch_elems(HS), Reuse::SMALL);
            if (!backward)
                TRAFFIC(run, "qk_norm_rope_forward", 2 * N * row * TRAFFIC_S,
                        qk_norm_rope_forward(out, qkv, weight, weight, table, nullptr, N, T, NH, NKV, HS, 1e-6f,
                                             nullptr));
            else
                TRAFFIC(run, "qk_norm_rope_backward", 3 * N * normed * TRAFFIC_S,
                        qk_norm_rope_backward(out, dweight, dweight + HS, scratch, qkv, weight, weight, table, nullptr,
                                              N, T, NH, NKV, HS, 1e-6f, nullptr));
        }
}

static void traffic_elementwise(TrafficRun* run)
{
    floatX *out = traffic_tensor<floatX>(run, TRAFFIC_NC), *inp = traffic_tensor<floatX>(run, TRAFFIC_NC);
    TRAFFIC(run, "activation_forward", 2 * TRAFFIC_NC * TRAFFIC_S,
            activation_forward(out, inp, TRAFFIC_NC, Activation::GELU_TANH, nullptr));
    out = traffic_tensor<floatX>(run, TRAFFIC_NC);
    inp = traffic_tensor<floatX>(run, TRAFFIC_NC);
    floatX* dout = traffic_tensor<floatX>(run, TRAFFIC_NC);
    TRAFFIC(run, "activation_backward", 3 * TRAFFIC_NC * TRAFFIC_S,
            activation_backward(out, dout, inp, TRAFFIC_NC, Activation::GELU_TANH, nullptr));
    out = traffic_tensor<floatX>(run, TRAFFIC_NC);
    inp = traffic_tensor<floatX>(run, TRAFFIC_NC);
    TRAFFIC(run, "dropout", 2 * TRAFFIC_NC * TRAFFIC_S,
            dropout(out, inp, 0, TRAFFIC_NC, TRAFFIC_NC / 8, dropout_site(1, 0, 0, 0, 0.1), nullptr));
    float *sum = traffic_tensor<float>(run, TRAFFIC_NC), *term = traffic_tensor<float>(run, TRAFFIC_NC);
    TRAFFIC(run, "values_add", 12 * TRAFFIC_NC, values_add(values_of(sum), values_of(term), TRAFFIC_NC, nullptr));
    floatX* narrow = traffic_tensor<floatX>(run, TRAFFIC_NC);
    float* wide = traffic_tensor<float>(run, TRAFFIC_NC);
    TRAFFIC(run, "values_convert", (4 + TRAFFIC_S) * TRAFFIC_NC,
            values_convert(Values{narrow, FLOATX_DTYPE, nullptr}, values_of(wide), TRAFFIC_NC, nullptr));
    sum = traffic_tensor<float>(run, TRAFFIC_NC);
    const Values pieces = {traffic_tensor<floatX>(run, 3 * TRAFFIC_NC), FLOATX_DTYPE, nullptr};
    TRAFFIC(run, "values_sum", (8 + 3 * TRAFFIC_S) * TRAFFIC_NC,
            values_sum(values_of(sum), pieces, 3, TRAFFIC_NC, true, nullptr));
    double* sums = traffic_tensor<double>(run, NUM_STEP_SUMS, Reuse::SMALL);
    float* losses = traffic_tensor<float>(run, 4096);
    int* targets = traffic_tensor<int>(run, 4096);
    TRAFFIC(run, "loss_accumulate", 8 * 4096, loss_accumulate(sums, losses, targets, 4096, nullptr));
    sums = traffic_tensor<double>(run, 2, Reuse::SMALL);
    double* scratch = traffic_tensor<double>(run, global_norm_scratch_elems(), Reuse::SMALL);
    float* grad = traffic_tensor<float>(run, 4 * TRAFFIC_NC);
    TRAFFIC(run, "global_norm", 16 * TRAFFIC_NC,
            global_norm_accumulate(sums, scratch, values_of(grad), 4 * TRAFFIC_NC, nullptr));
    unsigned long long* hash = traffic_tensor<unsigned long long>(run, 1, Reuse::SMALL);
    float* words = traffic_tensor<float>(run, TRAFFIC_NC);
    TRAFFIC(run, "state_hash", 4 * TRAFFIC_NC,
            state_hash_accumulate(hash, values_of(words), TRAFFIC_NC, rectangle_in_line(0), nullptr));
}

static void traffic_classifier(TrafficRun* run)
{
    const int rows = 64, VP = 2048, V = 2000;
    const size_t logits_bytes = (size_t)rows * VP * TRAFFIC_S;
    const LogitsPiece piece = {0, V, VP, true, true};
    for (int which = 0; which < 4; which++) {
        floatX* logits = traffic_tensor<floatX>(run, (size_t)rows * VP);
        float *losses = traffic_tensor<float>(run, rows), *maxima = traffic_tensor<float>(run, rows);
        double* sums = traffic_tensor<double>(run, rows);
        int* targets = traffic_tensor<int>(run, rows);
        if (which < 2)
            TRAFFIC(run, which == 0 ? "classifier, loss" : "classifier, gradient", (which + 1) * logits_bytes,
                    classifier(logits, losses, targets, rows, V, VP, 1.0f, nullptr, which > 0, nullptr));
        if (which == 2)
            TRAFFIC(run, "classifier, piece, loss", logits_bytes,
                    classifier_piece_forward(logits, losses, maxima, sums, targets, rows, piece, nullptr));
        if (which == 3)
            TRAFFIC(run, "classifier, piece, gradient", 2 * logits_bytes,
                    classifier_piece_backward(logits, maxima, sums, targets, rows, piece, 1.0f, nullptr, nullptr));
    }
}

/* Where cuBLASLt has no epilogue for it. */
static void traffic_bias(TrafficRun* run)
{
    const int N = TRAFFIC_N, OC = TRAFFIC_C;
    floatX *out = traffic_tensor<floatX>(run, TRAFFIC_NC), *bias = traffic_tensor<floatX>(run, OC, Reuse::SMALL);
    TRAFFIC(run, "bias", 2 * TRAFFIC_NC * TRAFFIC_S, LAUNCH(matmul_bias_kernel, N, 256, 0, nullptr, out, bias, OC));
    floatX* dout = traffic_tensor<floatX>(run, TRAFFIC_NC);
    float* parts = traffic_tensor<float>(run, 4 * OC, Reuse::SMALL);
    TRAFFIC(run, "bias, gradient", TRAFFIC_NC * TRAFFIC_S,
            LAUNCH(matmul_backward_bias_parts_kernel, dim3(OC / 32, 4), 256, 0, nullptr, parts, dout, N, OC));
}

/* What a pass of an optimizer moves of each element: the weight both ways, states and gradient as the rule says. */
template <class R> static void traffic_pass(TrafficRun* run, const char* name)
{
    const bool is_16bit = sizeof(floatX) < 4, is_bf16 = FLOATX_DTYPE == Dtype::BF16;
    const size_t n = TRAFFIC_NC;
    OptimizerRuns runs = {};
    runs_extend(&runs, n, 0.1f, 1.0f, 0);
    for (const char* storage : {"", ", small", ", split"}) {       // default, all in 16 bits that can be, split master
        const bool small = strcmp(storage, ", small") == 0, split = strcmp(storage, ", split") == 0;
        if (split && !is_bf16) continue;
        const Dtype dtype = small ? Dtype::BF16 : Dtype::FP32, grad_dtype = small ? FLOATX_DTYPE : Dtype::FP32;
        floatX* param = traffic_tensor<floatX>(run, n);
        Values master = {param, split ? Dtype::SPLIT : FLOATX_DTYPE, nullptr};
        if (split) master.low = traffic_tensor<unsigned short>(run, n);
        else if (is_16bit && !(small && is_bf16)) master = values_of(traffic_tensor<float>(run, n));
        OptimizerArrays a = {param, master, {traffic_tensor<float>(run, n), grad_dtype, nullptr}, {}};
        size_t elem_bytes = (R::READS_GRAD + R::WRITES_GRAD) * dtype_bytes(grad_dtype);
        for (int k = 0; k < MAX_STATES; k++) {
            if (R::STATES[k] == nullptr) continue;
            a.states[k] = Values{traffic_tensor<float>(run, n), dtype, nullptr};
            if (R::READS_STATES) elem_bytes += (1 + R::WRITES_STATES) * dtype_bytes(dtype);
        }
        double* sums = traffic_tensor<double>(run, 2, Reuse::SMALL);
        StepState* state = traffic_tensor<StepState>(run, 1, Reuse::SMALL);
        const bool has_master = master.at != (void*)param;
        if (R::READS_PARAM) elem_bytes += has_master ? 8 + TRAFFIC_S : small && is_bf16 ? 4 : 8;
        char title[64];
        snprintf(title, sizeof title, "%s%s", name, storage);
        TRAFFIC(run, title, elem_bytes * n,
                optimizer_update<R>(a, &runs, optimizer_test_config(1e-8f), sums, state, nullptr));
    }
}

template <class R> static void traffic_optimizer(TrafficRun* run, const char* name)
{
    char title[64];
    snprintf(title, sizeof title, "%s, before its phase", name);
    if constexpr (R::PHASE != TensorPhase::NONE) traffic_pass<typename R::First>(run, title);
    traffic_pass<R>(run, name);
}

static void traffic_optimizers(TrafficRun* run)
{
#define OPTIMIZER_TRAFFIC(name, word, R) traffic_optimizer<R>(run, word);
    OPTIMIZERS(OPTIMIZER_TRAFFIC)
#undef OPTIMIZER_TRAFFIC
    OptimizerRuns runs = {};
    runs_extend(&runs, 4 * TRAFFIC_NC, 0.1f, 1.0f, 0);
    const Values p = values_of(traffic_tensor<float>(run, 4 * TRAFFIC_NC));
    const Values m = values_of(traffic_tensor<float>(run, 4 * TRAFFIC_NC));
    const Values v = values_of(traffic_tensor<float>(run, 4 * TRAFFIC_NC));
    double* sums = traffic_tensor<double>(run, 2, Reuse::SMALL);
    double* scratch = traffic_tensor<double>(run, lamb_scratch_elems(), Reuse::SMALL);
    TRAFFIC(run, "lamb, norms", 12 * 4 * TRAFFIC_NC, lamb_norms(sums, scratch, p, m, v, &runs, 1e-8f, nullptr));
}

/* What Muon does beside its GEMMs, with u wider and higher than it is long. */
static void traffic_muon(TrafficRun* run)
{
    const int side = 96, length = 384;
    const size_t n = (size_t)side * length;
    for (bool transposed : {false, true}) {
        const int rows = transposed ? length : side, cols = transposed ? side : length;
        float* u = traffic_tensor<float>(run, n);
        double* parts = traffic_tensor<double>(run, MUON_PARTS, Reuse::SMALL);
        TRAFFIC(run, "muon, norm", 4 * n, muon_sum_squares(parts, u, rows, cols, cols, nullptr));
        u = traffic_tensor<float>(run, n);
        floatX* x = traffic_tensor<floatX>(run, n);
        parts = traffic_tensor<double>(run, MUON_PARTS, Reuse::SMALL);
        TRAFFIC(run, transposed ? "muon, into x^T" : "muon, into x", (4 + TRAFFIC_S) * n,
                muon_copy(x, length, u, cols, rows, cols, transposed, 0.0f, parts, nullptr));
        u = traffic_tensor<float>(run, n);
        x = traffic_tensor<floatX>(run, n);
        TRAFFIC(run, transposed ? "muon, from x^T" : "muon, from x", (4 + TRAFFIC_S) * n,
                muon_copy(u, cols, x, length, side, length, transposed, 1.0f, (const double*)nullptr, nullptr));
    }
    floatX *gram = traffic_tensor<floatX>(run, n), *squared = traffic_tensor<floatX>(run, n);
    TRAFFIC(run, "muon, polynomial", 3 * side * side * TRAFFIC_S, muon_combine(squared, gram, side, nullptr));
}

/* Bank conflicts and sectors only: its cost is arithmetic. Every class of head sizes, grouped heads, dropout. */
static void traffic_attention(TrafficRun* run)
{
    const int B = 1, T = 128, NH = 2, NKV = 1;
    for (int HS : {64, 128, 256})
        for (int which = 0; which < 4; which++) {
            const bool backward = which % 2 != 0, drops = which >= 2;
            const size_t heads = (size_t)B * T * HS, rows = (size_t)B * NH * T;
            floatX* qkv = traffic_tensor<floatX>(run, (NH + 2 * NKV) * heads);
            floatX *out = traffic_tensor<floatX>(run, NH * heads), *dout = traffic_tensor<floatX>(run, NH * heads);
            floatX* dqkv = traffic_tensor<floatX>(run, (NH + 2 * NKV) * heads);
            float* lse = traffic_tensor<float>(run, rows);
            float* scratch = traffic_tensor<float>(run, attention_scratch_elems(B, T, NH, HS));
            const Dropout d = dropout_site(1, 0, 0, 0, drops ? 0.1 : 0.0);
            char name[64];
            snprintf(name, sizeof name, "attention_%s %d%s", backward ? "backward" : "forward", HS,
                     drops ? ", dropout" : "");
            if (!backward)
                TRAFFIC(run, name, 0,
                        attention_forward(out, lse, scratch, qkv, B, T, NH, NKV, HS, 0.125f, nullptr, d));
            else
                TRAFFIC(run, name, 0,
                        attention_backward(dqkv, scratch, dout, out, lse, qkv, B, T, NH, NKV, HS, 0.125f, nullptr, d));
        }
}

static void traffic_attention_cached(TrafficRun* run)
{
    const int N = 4, T = 64, NH = 4, HS = 64;
    const size_t heads = (size_t)N * NH * HS;
    floatX *out = traffic_tensor<floatX>(run, heads), *qkv = traffic_tensor<floatX>(run, 3 * heads);
    floatX *keys = traffic_tensor<floatX>(run, T * heads), *values = traffic_tensor<floatX>(run, T * heads);
    int* slots = traffic_tensor<int>(run, N, Reuse::SMALL);
    int* positions = traffic_tensor<int>(run, N, Reuse::SMALL);
    const int h_slots[N] = {0, 1, 2, 3}, h_positions[N] = {T - 1, T - 1, T - 1, T - 1};
    CUDA_CHECK(cudaMemcpy(slots, h_slots, sizeof h_slots, cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaMemcpy(positions, h_positions, sizeof h_positions, cudaMemcpyHostToDevice));
    TRAFFIC(run, "attention_cached", 2 * T * heads * TRAFFIC_S,
            attention_cached(out, keys, values, qkv, slots, positions, nullptr, N, T, NH, NH, HS, 0.125f, nullptr));
}

static int traffic_main()
{
    TrafficRun run = {};
    traffic_embedding(&run);
    traffic_layernorm(&run);
    traffic_llama(&run);
    traffic_qk_norm(&run);
    traffic_elementwise(&run);
    traffic_classifier(&run);
    traffic_bias(&run);
    traffic_optimizers(&run);
    traffic_muon(&run);
    traffic_attention(&run);
    traffic_attention_cached(&run);
    printf("%d passed, %d failed\n", run.num_passed, run.num_failed);
    return run.num_failed != 0;
}
