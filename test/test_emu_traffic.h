/* test_emu_traffic.h: part of test_ops.cu in the checked build: test_ops --traffic. What an op moves through memory is
 * held to the cost line of its header, counted and not estimated:
 *   moved        bytes over the op's cost: each byte once per block, because what a block reads again comes from L1;
 *                tensors marked SMALL, which all blocks read, once per operation, because they stay in L2
 *   sectors      the fewest 32-byte sectors that hold what the warps asked for, over those they touched
 *   conflicts    wavefronts of shared memory over those without bank conflicts
 * Sizes are such that whole rows are vectors; the scalar paths of odd sizes are tested for results, not for speed. */
#include "kernels/cpu/emu_check.h"

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
    printf("%s traffic %-24s moved %5.3f x cost, sectors %5.1f %% whole, conflicts %5.3f x, %.3f of the asked\n",
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
            TRAFFIC(run, "embedding_forward", 2 * TRAFFIC_NC * TRAFFIC_S,
                    embedding_forward(out, tokens, wte, wpe, B, T, C, nullptr));
        } else {
            float *dwte = traffic_tensor<float>(run, (size_t)V * C), *dwpe = traffic_tensor<float>(run, (size_t)T * C);
            const size_t rows = TRAFFIC_NC + (size_t)T * C;
            TRAFFIC(run, "embedding_backward", 2 * TRAFFIC_NC * TRAFFIC_S + 2 * rows * sizeof(float),
                    embedding_backward(dwte, dwpe, out, tokens, B, T, C, nullptr));
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

static void traffic_elementwise(TrafficRun* run)
{
    floatX *out = traffic_tensor<floatX>(run, TRAFFIC_NC), *inp = traffic_tensor<floatX>(run, TRAFFIC_NC);
    TRAFFIC(run, "gelu_forward", 2 * TRAFFIC_NC * TRAFFIC_S, gelu_forward(out, inp, TRAFFIC_NC, Gelu::TANH, nullptr));
    out = traffic_tensor<floatX>(run, TRAFFIC_NC);
    inp = traffic_tensor<floatX>(run, TRAFFIC_NC);
    floatX* dout = traffic_tensor<floatX>(run, TRAFFIC_NC);
    TRAFFIC(run, "gelu_backward", 3 * TRAFFIC_NC * TRAFFIC_S,
            gelu_backward(out, dout, inp, TRAFFIC_NC, Gelu::TANH, nullptr));
    float *sum = traffic_tensor<float>(run, TRAFFIC_NC), *term = traffic_tensor<float>(run, TRAFFIC_NC);
    TRAFFIC(run, "values_add", 12 * TRAFFIC_NC, values_add(values_of(sum), values_of(term), TRAFFIC_NC, nullptr));
    floatX* narrow = traffic_tensor<floatX>(run, TRAFFIC_NC);
    float* wide = traffic_tensor<float>(run, TRAFFIC_NC);
    TRAFFIC(run, "values_convert", (4 + TRAFFIC_S) * TRAFFIC_NC,
            values_convert(Values{narrow, FLOATX_DTYPE, nullptr}, values_of(wide), TRAFFIC_NC, nullptr));
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
    TRAFFIC(run, "state_hash", 4 * TRAFFIC_NC, state_hash_accumulate(hash, values_of(words), TRAFFIC_NC, 0, nullptr));
}

static void traffic_classifier(TrafficRun* run)
{
    const int rows = 64, VP = 2048, V = 2000;
    for (bool backward : {false, true}) {
        floatX* logits = traffic_tensor<floatX>(run, (size_t)rows * VP);
        float* losses = traffic_tensor<float>(run, rows);
        int* targets = traffic_tensor<int>(run, rows);
        TRAFFIC(run, backward ? "classifier, gradient" : "classifier, loss",
                (backward ? 2 : 1) * (size_t)rows * VP * TRAFFIC_S,
                classifier(logits, losses, targets, rows, V, VP, 1.0f, nullptr, backward, nullptr));
    }
}

/* With the storage of this precision's default, and with everything in 16 bits that can be. */
static void traffic_adamw(TrafficRun* run)
{
    const bool is_16bit = sizeof(floatX) < 4, is_bf16 = FLOATX_DTYPE == Dtype::BF16;
    const size_t n = TRAFFIC_NC;
    const OptimizerConfig config = optimizer_test_config(1e-8f);
    OptimizerRuns runs = {};
    runs_extend(&runs, n, 0.1f, 1.0f);
    for (bool small : {false, true}) {
        floatX* param = traffic_tensor<floatX>(run, n);
        const Dtype dtype = small ? Dtype::BF16 : Dtype::FP32;
        Values m = {traffic_tensor<float>(run, n), dtype, nullptr}, v = {traffic_tensor<float>(run, n), dtype, nullptr};
        Values master = {param, FLOATX_DTYPE, nullptr}, grad = {traffic_tensor<float>(run, n), Dtype::FP32, nullptr};
        if (is_16bit && !(small && is_bf16)) master = Values{traffic_tensor<float>(run, n), Dtype::FP32, nullptr};
        if (small) grad = Values{traffic_tensor<floatX>(run, n), FLOATX_DTYPE, nullptr};
        StepState* state = traffic_tensor<StepState>(run, 1, Reuse::SMALL);
        const size_t weight = !is_16bit ? 8 : small && is_bf16 ? 4 : 10, rest = 4 * dtype_bytes(dtype);
        TRAFFIC(run, small ? "adamw_update, small storage" : "adamw_update",
                (weight + rest + dtype_bytes(grad.dtype)) * n,
                optimizer_update<Rule::ADAMW>(OptimizerArrays{param, master, m, v, grad}, &runs, config, nullptr, state,
                                              nullptr));
    }
    floatX* param = traffic_tensor<floatX>(run, n);
    unsigned short* low = traffic_tensor<unsigned short>(run, n);
    Values split = {param, Dtype::SPLIT, low}, m = values_of(traffic_tensor<float>(run, n));
    Values v = values_of(traffic_tensor<float>(run, n)), grad = values_of(traffic_tensor<float>(run, n));
    StepState* state = traffic_tensor<StepState>(run, 1, Reuse::SMALL);
    if (is_bf16)
        TRAFFIC(run, "adamw_update, split master", 28 * n,
                optimizer_update<Rule::ADAMW>(OptimizerArrays{param, split, m, v, grad}, &runs, config, nullptr, state,
                                              nullptr));
}

/* Rules that keep one state, with the storage of this precision's default. */
template <Rule rule> static void traffic_rule(TrafficRun* run, const char* name)
{
    const bool is_16bit = sizeof(floatX) < 4;
    const size_t n = TRAFFIC_NC;
    floatX* param = traffic_tensor<floatX>(run, n);
    float* master = is_16bit ? traffic_tensor<float>(run, n) : nullptr;
    float *m = traffic_tensor<float>(run, n), *v = traffic_tensor<float>(run, n), *grad = traffic_tensor<float>(run, n);
    StepState* state = traffic_tensor<StepState>(run, 1, Reuse::SMALL);
    OptimizerRuns runs = {};
    runs_extend(&runs, n, 0.1f, 1.0f);
    TRAFFIC(run, name, (is_16bit ? 22 : 20) * n,
            optimizer_update<rule>(optimizer_arrays(param, master, m, v, grad), &runs, optimizer_test_config(1e-8f),
                                   nullptr, state, nullptr));
}

/* Bank conflicts and sectors only: its cost is arithmetic. */
static void traffic_attention(TrafficRun* run)
{
    const int B = 1, T = 128, NH = 2, HS = 64;
    const size_t heads = (size_t)B * T * NH * HS, rows = (size_t)B * NH * T;
    for (bool backward : {false, true}) {
        floatX *qkv = traffic_tensor<floatX>(run, 3 * heads), *out = traffic_tensor<floatX>(run, heads);
        float* lse = traffic_tensor<float>(run, rows);
        float* scratch = traffic_tensor<float>(run, attention_scratch_elems(B, T, NH, HS));
        floatX *dqkv = traffic_tensor<floatX>(run, 3 * heads), *dout = traffic_tensor<floatX>(run, heads);
        if (!backward)
            TRAFFIC(run, "attention_forward", 0,
                    attention_forward(out, lse, scratch, qkv, B, T, NH, NH, HS, 0.125f, nullptr));
        else
            TRAFFIC(run, "attention_backward", 0,
                    attention_backward(dqkv, scratch, dout, out, lse, qkv, B, T, NH, NH, HS, 0.125f, nullptr));
    }
}

static int traffic_main()
{
    TrafficRun run = {};
    traffic_embedding(&run);
    traffic_layernorm(&run);
    traffic_llama(&run);
    traffic_elementwise(&run);
    traffic_classifier(&run);
    traffic_adamw(&run);
    traffic_rule<Rule::SGD>(&run, "sgd");
    traffic_rule<Rule::LION>(&run, "lion");
    traffic_rule<Rule::ADAGRAD>(&run, "adagrad");
    traffic_attention(&run);
    printf("%d passed, %d failed\n", run.num_passed, run.num_failed);
    return run.num_failed != 0;
}
