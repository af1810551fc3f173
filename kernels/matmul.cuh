/* matmul.cuh: a linear layer, its bias, the activation behind it, and their gradients.
 *   out     = inp * weight^T + bias              (bias may be null)
 *   pre     = inp * weight^T + bias              out = f(pre)         (forward_act: f of activation.cuh)
 *   dinp    = dout * weight  or  +=              (accumulate)
 *   dpre    = (dout * weight) * f'(pre)                                               (backward_input_act)
 *   dweight = dout^T * inp  or  +=               (accumulate)       dbias += sum_n(dout)
 * shapes  inp dinp (N,IC), out dout (N,OC), bias (OC) floatX; weight (OC,IC) in Layout::OUT_IN (torch's Linear) or
 *         (IC,OC) in Layout::IN_OUT (GPT-2's files) floatX; dweight as weight, dbias (OC), scratch
 *         (matmul_scratch_elems(OC)) fp32
 * writes  forward out =, pre =; backward_input dinp = or +=, dpre =; backward_weight dweight = or +=, dbias +=
 * needs   matmul_init() once; any N, IC, OC. cuBLASLt's work space is shared, so all calls are to go to one stream.
 * exact   fp32 GEMMs in fp32 (no TF32); bf16 and fp16 multiply exactly and sum in fp32. Same bits on every run; on
 *         the CPU for any number of threads; on a GPU, the same bits for the same shapes and GPU.
 * cost    2*N*IC*OC flops each, judged against the FMA (CPU) or tensor core (GPU) peak
 * fused   GPU: bias, tanh GELU and its derivative, and the column sums of dbias can be epilogues of cuBLASLt. The bias
 *         is one; GELU by matmul_fuses_act; dbias is not. Of the last two --tune measures for each shape whether they
 *         are (run/tune.cuh). What cuBLASLt does not have, which is reported once for each kind, is a pass of its own.
 *         With TRAIN_GPT_EPILOGUES=none all are
 * source  CPU: cpu/gemm.h, for a few rows cpu/gemv.h. GPU: cuBLASLt. It is column-major: it sees each of our row-major
 *         matrices transposed, so a GEMM is asked for as D^T = B^T * A^T, and a row-major (rows, cols) matrix goes
 *         to it as (cols, rows) with leading dimension cols. */
#pragma once
#include "activation.cuh"
#ifdef DEVICE_CPU
#include "kernels/cpu/gemv.h"
#else
#include <cublasLt.h>
#endif

enum class Layout { OUT_IN, IN_OUT };

/* Without --tune, is the activation, or its derivative, an epilogue of the GEMM on a GPU of this compute capability (90
 * is 9.0; 0: no GPU)? Tanh GELU alone: below 9.0 such kernels are slower than the two that they replace (llm.c leaves
 * them out there too). Never in fp32, whose tanh they may approximate. */
static bool matmul_fuses_act(Activation kind, int capability)
{
    return activation_epilogue(kind) == Epilogue::GELU && capability >= 90 && sizeof(floatX) < sizeof(float);
}

#ifdef DEVICE_CPU

static void matmul_init() { gemm_init(); }
static void matmul_free() { gemm_free(); }
static int matmul_capability() { return 0; }
static size_t matmul_workspace_bytes() { return 0; }      // of the device; gemm.h's packed operands are host memory
static size_t matmul_scratch_elems(int) { return 1; }

/* The weight as an (IC,OC) matrix. */
static GemmOperand matmul_weight_cpu(const floatX* weight, int IC, int OC, Layout layout)
{
    if (layout == Layout::OUT_IN) return {weight, (size_t)IC, true};
    return {weight, (size_t)OC, false};
}

static void matmul_forward_cpu(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int N, int IC,
                               int OC, Layout layout)
{
    if (gemv(out, inp, weight, bias, N, OC, IC, layout == Layout::OUT_IN)) return;
    gemm(out, OC, {inp, (size_t)IC, false}, matmul_weight_cpu(weight, IC, OC, layout), N, OC, IC, bias, false);
}

static void matmul_backward_input_cpu(floatX* dinp, const floatX* dout, const floatX* weight, int N, int IC, int OC,
                                      Layout layout, bool accumulate)
{
    GemmOperand w = matmul_weight_cpu(weight, IC, OC, layout);
    w.transposed = !w.transposed;
    gemm(dinp, IC, {dout, (size_t)OC, false}, w, N, IC, OC, nullptr, accumulate);
}

/* Threads share out the columns, in strips of a few vectors; each adds the rows in order. */
static void matmul_backward_bias_cpu(float* dbias, const floatX* dout, int N, int OC)
{
    const int strip = 4 * VF;
    #pragma omp parallel for schedule(static)
    for (int first = 0; first < OC; first += strip) {
        if (first + strip <= OC) {
            vf sum[4] = {};
            for (int n = 0; n < N; n++)
                for (int j = 0; j < 4; j++) sum[j] += vf_load(dout + (size_t)n * OC + first + j * VF);
            for (int j = 0; j < 4; j++) vf_store(dbias + first + j * VF, vf_load(dbias + first + j * VF) + sum[j]);
        } else {
            for (int col = first; col < OC; col++) {
                float sum = 0.0f;
                for (int n = 0; n < N; n++) sum += load_f(dout[(size_t)n * OC + col]);
                dbias[col] += sum;
            }
        }
    }
}

static void matmul_backward_weight_cpu(float* dweight, float* dbias, const floatX* dout, const floatX* inp, int N,
                                       int IC, int OC, Layout layout, bool accumulate)
{
    GemmOperand dout_t = {dout, (size_t)OC, true}, inp_t = {inp, (size_t)IC, true};
    if (layout == Layout::OUT_IN) gemm(dweight, IC, dout_t, {inp, (size_t)IC, false}, OC, IC, N, nullptr, accumulate);
    else gemm(dweight, OC, inp_t, {dout, (size_t)OC, false}, IC, OC, N, nullptr, accumulate);
    if (dbias != nullptr) matmul_backward_bias_cpu(dbias, dout, N, OC);
}

#else

static constexpr int MATMUL_BIAS_PARTS = 64;                // runs of rows whose column sums are taken side by side
static size_t matmul_scratch_elems(int OC) { return (size_t)MATMUL_BIAS_PARTS * OC; }

#define CUBLAS_CHECK(call) do { \
    cublasStatus_t cublas_status_ = (call); \
    if (cublas_status_ != CUBLAS_STATUS_SUCCESS) \
        die_at(WHERE, "%s: %s", #call, cublasLtGetStatusString(cublas_status_)); \
} while (0)

/* What a plan is looked up by. D (m,n) = op(A) (m,k) * op(B) (k,n), column-major as cuBLASLt has it; A and B floatX.
 * Plain integers without padding, so that keys can be compared as bytes. */
typedef struct { int m, n, k, transpose_a, transpose_b, d_is_float, epilogue, alignment_bytes; } MatmulShape;

/* What is done to D on the way out. bias: of BIAS added to each column; of BGRADA and BGRADB, which overwrite it, row
 * sums of op(A) and column sums of op(B), in scratch, which are then added to dbias. aux: like D, and gelu's argument:
 * written by GELU_AUX and GELU_AUX_BIAS, read by DGELU. */
typedef struct { cublasLtEpilogue_t kind; const void *bias, *aux; float* dbias; } MatmulEpilogue;
static constexpr MatmulEpilogue MATMUL_PLAIN = {CUBLASLT_EPILOGUE_DEFAULT, nullptr, nullptr, nullptr};

/* D = epilogue(op(A) * op(B) + beta * D). */
typedef struct { void* d; const floatX *a, *b; float beta; MatmulEpilogue epilogue; } MatmulCall;

typedef struct {
    MatmulShape shape;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algo;
    bool fuses;                 // the epilogue is to be used: by the rule, or as measured
    bool asked, exists;         // whether cuBLASLt has it for this shape, if it was asked
    MatmulCall call;            // the newest
} MatmulPlan;

static const struct { cublasLtEpilogue_t kind; const char* name; } matmul_epilogue_rows[] = {
    {CUBLASLT_EPILOGUE_BIAS, "bias"}, {CUBLASLT_EPILOGUE_GELU_AUX, "GELU"},
    {CUBLASLT_EPILOGUE_GELU_AUX_BIAS, "bias and GELU"},
    {CUBLASLT_EPILOGUE_DGELU, "derivative of GELU"},
    {CUBLASLT_EPILOGUE_BGRADA, "bias gradient (A)"}, {CUBLASLT_EPILOGUE_BGRADB, "bias gradient (B)"},
};

/* Which epilogues are used: by the rule or as --tune has measured; none; every optional one too; every optional one,
 * and then again without it, so that both can be measured. */
enum class Fusion { CHOSEN, NONE, ALL, BOTH };

static constexpr int MATMUL_MAX_PLANS = 512, MATMUL_MAX_CHOICES = 8;
static constexpr size_t MATMUL_WORKSPACE_BYTES = (size_t)32 << 20;

static struct {
    cublasLtHandle_t handle;
    void* workspace;
    MatmulPlan plans[MATMUL_MAX_PLANS];
    int num_plans;
    int capability;             // of the GPU
    Fusion fusion;
    bool said_unfused[sizeof matmul_epilogue_rows / sizeof matmul_epilogue_rows[0]];
} matmul_state;

static void matmul_init()
{
    CUBLAS_CHECK(cublasLtCreate(&matmul_state.handle));
    CUDA_CHECK(cudaMalloc(&matmul_state.workspace, MATMUL_WORKSPACE_BYTES));
    matmul_state.capability = gpu_capability();
    const char* epilogues = getenv("TRAIN_GPT_EPILOGUES");
    if (epilogues == nullptr || epilogues[0] == 0) return;
    ENSURE(strcmp(epilogues, "none") == 0, "TRAIN_GPT_EPILOGUES is \"%s\": none, or leave it out", epilogues);
    matmul_state.fusion = Fusion::NONE;
}

static int matmul_capability() { return matmul_state.capability; }
static size_t matmul_workspace_bytes() { return MATMUL_WORKSPACE_BYTES; }

static void matmul_free()
{
    for (int i = 0; i < matmul_state.num_plans; i++) {
        MatmulPlan* plan = &matmul_state.plans[i];
        CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(plan->a));
        CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(plan->b));
        CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(plan->d));
        CUBLAS_CHECK(cublasLtMatmulDescDestroy(plan->desc));
    }
    CUDA_CHECK(cudaFree(matmul_state.workspace));
    CUBLAS_CHECK(cublasLtDestroy(matmul_state.handle));
    memset(&matmul_state, 0, sizeof matmul_state);
}

template<class T> static void matmul_desc_set(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute,
                                              T value)
{
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(desc, attribute, &value, sizeof value));
}

template<class T> static void matmul_preference_set(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, T value)
{
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
}

/* Algorithms that cuBLASLt offers for a GEMM. */
typedef struct { cublasLtMatmulHeuristicResult_t results[MATMUL_MAX_CHOICES]; int count; } MatmulChoices;

/* Up to max_choices of them, its first choice first; none for a shape and epilogue that it does not have. */
static void matmul_choices(const MatmulPlan* plan, MatmulChoices* choices, int max_choices)
{
    cublasLtMatmulPreference_t preference;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    matmul_preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, MATMUL_WORKSPACE_BYTES);
    const uint32_t partial_sums_in_fp32 = 2;                // CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, never 16 bits
    matmul_preference_set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, partial_sums_in_fp32);
    const uint32_t alignment = plan->shape.alignment_bytes;
    matmul_preference_set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment);
    matmul_preference_set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment);
    matmul_preference_set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment);
    matmul_preference_set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment);
    choices->count = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(matmul_state.handle, plan->desc, plan->a, plan->b, plan->d,
                                                           plan->d, preference, max_choices, choices->results,
                                                           &choices->count);
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
    if (status != CUBLAS_STATUS_SUCCESS) choices->count = 0;
    int num_good = 0;                                       // the others carry a status of their own
    for (int i = 0; i < choices->count; i++)
        if (choices->results[i].state == CUBLAS_STATUS_SUCCESS) choices->results[num_good++] = choices->results[i];
    choices->count = num_good;
}

/* Takes cuBLASLt's first choice; false if it has none. */
static bool matmul_plan_ask(MatmulPlan* plan)
{
    MatmulChoices choices;
    matmul_choices(plan, &choices, 1);
    if (choices.count > 0) plan->algo = choices.results[0].algo;
    return choices.count > 0;
}

/* Does this cuBLASLt take an algorithm that it, or another, once offered? */
static bool matmul_choice_works(const MatmulPlan* plan, const cublasLtMatmulAlgo_t* algo)
{
    cublasLtMatmulHeuristicResult_t result;
    return cublasLtMatmulAlgoCheck(matmul_state.handle, plan->desc, plan->a, plan->b, plan->d, plan->d, algo,
                                   &result) == CUBLAS_STATUS_SUCCESS &&
           result.state == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= MATMUL_WORKSPACE_BYTES;
}

static void matmul_epilogue_point(const MatmulPlan* plan, MatmulEpilogue e)
{
    if (e.bias != nullptr) matmul_desc_set(plan->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, e.bias);
    if (e.aux != nullptr) matmul_desc_set(plan->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, e.aux);
}

// ------------------------------------------------------------------------------------------- which epilogues are used
static bool matmul_is_gelu(int kind)
{
    return kind == CUBLASLT_EPILOGUE_GELU_AUX || kind == CUBLASLT_EPILOGUE_GELU_AUX_BIAS ||
           kind == CUBLASLT_EPILOGUE_DGELU;
}

static bool matmul_is_bias_gradient(int kind)
{
    return kind == CUBLASLT_EPILOGUE_BGRADA || kind == CUBLASLT_EPILOGUE_BGRADB;
}

/* Is it worth measuring? GELU only in 16 bits: matmul_fuses_act. */
static bool matmul_is_optional(int kind)
{
    return matmul_is_bias_gradient(kind) || (matmul_is_gelu(kind) && sizeof(floatX) < sizeof(float));
}

/* The rule without a measurement. The sums of a bias gradient make some GEMMs 1.6 times as slow (NVIDIA/
 * CUDALibrarySamples issue 90); a pass over dout costs far less. */
static bool matmul_fuses(int kind)
{
    if (matmul_is_gelu(kind)) return matmul_fuses_act(Activation::GELU_TANH, matmul_state.capability);
    return !matmul_is_bias_gradient(kind);
}

static bool matmul_plan_fuses(const MatmulPlan* plan)
{
    const int kind = plan->shape.epilogue;
    switch (matmul_state.fusion) {
    case Fusion::CHOSEN: return plan->fuses;
    case Fusion::NONE: return kind == CUBLASLT_EPILOGUE_DEFAULT;
    case Fusion::ALL: case Fusion::BOTH: return plan->fuses || matmul_is_optional(kind);
    }
    return false;
}

static void matmul_say_unfused(MatmulShape s)
{
    if (die_rank != 0) return;
    for (size_t i = 0; i < sizeof matmul_epilogue_rows / sizeof matmul_epilogue_rows[0]; i++) {
        if (matmul_epilogue_rows[i].kind != s.epilogue || matmul_state.said_unfused[i]) continue;
        fprintf(stderr, "cuBLASLt has no epilogue with %s for (%d,%d) x %d in %s: a pass of its own\n",
                matmul_epilogue_rows[i].name, s.m, s.n, s.k, FLOATX_NAME);
        matmul_state.said_unfused[i] = true;
    }
}

/* Has cuBLASLt an algorithm? It is asked once, when the epilogue is first to be used. */
static bool matmul_plan_exists(MatmulPlan* plan)
{
    if (plan->asked) return plan->exists;
    const MatmulShape s = plan->shape;
    const bool plain = s.epilogue == CUBLASLT_EPILOGUE_DEFAULT;
    plan->asked = true;                              // an epilogue's own tensors need 16 bytes; it is not asked about
    plan->exists = (plain || s.alignment_bytes >= 16) && matmul_plan_ask(plan);
    ENSURE(plan->exists || !plain, "cuBLASLt has no algorithm for a GEMM (%d,%d) x %d of %s aligned to %d bytes", s.m,
           s.n, s.k, FLOATX_NAME, s.alignment_bytes);
    if (!plan->exists) matmul_say_unfused(s);
    return plan->exists;
}

// -------------------------------------------------------------------------------------------------------------- plans
static void matmul_plan_make(MatmulPlan* plan, MatmulShape s, MatmulEpilogue e)
{
    plan->shape = s;
    plan->fuses = matmul_fuses(s.epilogue);
    const cudaDataType_t d_type = s.d_is_float ? CUDA_R_32F : FLOATX_CUDA;
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&plan->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    matmul_desc_set(plan->desc, CUBLASLT_MATMUL_DESC_TRANSA, s.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    matmul_desc_set(plan->desc, CUBLASLT_MATMUL_DESC_TRANSB, s.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    const int a_rows = s.transpose_a ? s.k : s.m, b_rows = s.transpose_b ? s.n : s.k;
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&plan->a, FLOATX_CUDA, a_rows, s.transpose_a ? s.m : s.k, a_rows));
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&plan->b, FLOATX_CUDA, b_rows, s.transpose_b ? s.k : s.n, b_rows));
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&plan->d, d_type, s.m, s.n, s.m));
    matmul_desc_set(plan->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, e.kind);
    if (e.bias != nullptr) matmul_desc_set(plan->desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, d_type);
    if (e.aux != nullptr) matmul_desc_set(plan->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)s.m);
    matmul_epilogue_point(plan, e);
}

static MatmulPlan* matmul_plan_find(MatmulShape shape, MatmulEpilogue e)
{
    for (int i = 0; i < matmul_state.num_plans; i++)
        if (memcmp(&matmul_state.plans[i].shape, &shape, sizeof shape) == 0) return &matmul_state.plans[i];
    ENSURE(matmul_state.num_plans < MATMUL_MAX_PLANS, "more than %d shapes of GEMMs", MATMUL_MAX_PLANS);
    MatmulPlan* plan = &matmul_state.plans[matmul_state.num_plans];
    matmul_plan_make(plan, shape, e);
    matmul_state.num_plans++;
    return plan;
}

/* The newest call of a plan, with its own algorithm or another. */
static cublasStatus_t matmul_plan_run(const MatmulPlan* plan, const cublasLtMatmulAlgo_t* algo, cudaStream_t stream)
{
    const float alpha = 1.0f;
    const MatmulCall* c = &plan->call;
    return cublasLtMatmul(matmul_state.handle, plan->desc, &alpha, c->a, plan->a, c->b, plan->b, &c->beta, c->d,
                          plan->d, c->d, plan->d, algo, matmul_state.workspace, MATMUL_WORKSPACE_BYTES, stream);
}

/* Where cuBLASLt cannot add the bias: one block a row. */
static __global__ void matmul_bias_kernel(floatX* out, const floatX* bias, int OC)
{
    floatX* row = out + (size_t)blockIdx.x * OC;
    for (int col = threadIdx.x; col < OC; col += blockDim.x) store_f(row + col, load_f(row[col]) + load_f(bias[col]));
}

/* A warp reads 32 columns of a row at a time; the block's 8 warps take rows in turn and are added up at the end. */
static __global__ void matmul_backward_bias_parts_kernel(float* parts, const floatX* dout, int N, int OC)
{
    SHARED(float, sums, [8][32]);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, col = blockIdx.x * 32 + lane;
    const int part_rows = (N + gridDim.y - 1) / gridDim.y;
    const int first = blockIdx.y * part_rows, last = min(first + part_rows, N);
    float sum = 0.0f;
    if (col < OC)
        for (int row = first + warp; row < last; row += 8) sum += load_f(dout[(size_t)row * OC + col]);
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || col >= OC) return;
    for (int w = 1; w < 8; w++) sum += sums[w][lane];
    parts[(size_t)blockIdx.y * OC + col] = sum;
}

static __global__ void matmul_backward_bias_add_kernel(float* dbias, const float* parts, int num_parts, int OC)
{
    const int col = blockIdx.x * blockDim.x + threadIdx.x;
    if (col >= OC) return;
    float sum = 0.0f;
    for (int part = 0; part < num_parts; part++) sum += parts[(size_t)part * OC + col];
    dbias[col] += sum;
}

static void matmul_backward_bias_add(float* dbias, const float* parts, int num_parts, int OC, cudaStream_t stream)
{
    LAUNCH(matmul_backward_bias_add_kernel, ceil_div(OC, 256), 256, 0, stream, dbias, parts, num_parts, OC);
    CUDA_CHECK(cudaGetLastError());
}

static void matmul_backward_bias(float* dbias, float* scratch, const floatX* dout, int N, int OC, cudaStream_t stream)
{
    OP(stream, 0, 1.0 * N * OC * sizeof(floatX), N, OC);
    const int num_parts = min(MATMUL_BIAS_PARTS, (int)ceil_div(N, 32));
    LAUNCH(matmul_backward_bias_parts_kernel, dim3(ceil_div(OC, 32), num_parts), 256, 0, stream, scratch, dout, N, OC);
    CUDA_CHECK(cudaGetLastError());
    matmul_backward_bias_add(dbias, scratch, num_parts, OC, stream);
}

// ----------------------------------------------------------------------------------------------------------- the GEMM
/* The epilogue of a plan's newest call as a pass of its own, behind what is left of it: matmul_lt. */
static void matmul_epilogue_pass(const MatmulPlan* plan, cudaStream_t stream)
{
    const MatmulShape* s = &plan->shape;
    const MatmulCall* c = &plan->call;
    const MatmulEpilogue* e = &c->epilogue;
    floatX* d = (floatX*)c->d;
    if (matmul_is_bias_gradient(e->kind)) {
        const bool of_a = e->kind == CUBLASLT_EPILOGUE_BGRADA;
        matmul_backward_bias(e->dbias, (float*)e->bias, of_a ? c->a : c->b, s->k, of_a ? s->m : s->n, stream);
    } else if (e->kind == CUBLASLT_EPILOGUE_DGELU) {
        activation_backward(d, d, (const floatX*)e->aux, (size_t)s->m * s->n, Activation::GELU_TANH, stream);
    } else if (matmul_is_gelu(e->kind)) {
        activation_forward(d, (const floatX*)e->aux, (size_t)s->m * s->n, Activation::GELU_TANH, stream);
    } else {
        LAUNCH(matmul_bias_kernel, s->n, 256, 0, stream, d, (const floatX*)e->bias, s->m);
        CUDA_CHECK(cudaGetLastError());
    }
}

/* A plan's newest call with its epilogue; false, with nothing done, if that is not to be used or cuBLASLt does not have
 * it: by whatever status its heuristic says so, or the first call. */
static bool matmul_plan_call(MatmulPlan* plan, cudaStream_t stream)
{
    if (!matmul_plan_fuses(plan) || !matmul_plan_exists(plan)) return false;
    const MatmulShape* s = &plan->shape;
    const MatmulEpilogue* e = &plan->call.epilogue;
    matmul_epilogue_point(plan, *e);
    const cublasStatus_t status = matmul_plan_run(plan, &plan->algo, stream);
    if (status != CUBLAS_STATUS_SUCCESS && e->kind == CUBLASLT_EPILOGUE_DEFAULT)
        die_at(WHERE, "cublasLtMatmul (%d,%d) x %d of %s: %s", s->m, s->n, s->k, FLOATX_NAME,
               cublasLtGetStatusString(status));
    if (status != CUBLAS_STATUS_SUCCESS) {
        plan->exists = false;
        matmul_say_unfused(*s);
        return false;
    }
    const int OC = e->kind == CUBLASLT_EPILOGUE_BGRADA ? s->m : s->n;
    if (e->dbias != nullptr) matmul_backward_bias_add(e->dbias, (const float*)e->bias, 1, OC, stream);
    return true;
}

/* A call in one GEMM; or a GEMM with less of the epilogue, and a pass for the rest. The alignment is found here. */
static void matmul_lt(MatmulShape s, MatmulCall call, cudaStream_t stream)
{
    const MatmulEpilogue e = call.epilogue;
    uintptr_t address_bits = 256;
    for (const void* p : {(const void*)call.a, (const void*)call.b, (const void*)call.d, e.bias, e.aux})
        address_bits |= (uintptr_t)p;
    s.alignment_bytes = (int)(address_bits & -address_bits);
    MatmulPlan* plan = matmul_plan_find(s, e);
    plan->call = call;
    const bool done = matmul_plan_call(plan, stream);
    if (done && !(matmul_state.fusion == Fusion::BOTH && matmul_is_optional(e.kind))) return;
    call.epilogue = MATMUL_PLAIN;
    if (e.kind == CUBLASLT_EPILOGUE_GELU_AUX_BIAS) call.epilogue = {CUBLASLT_EPILOGUE_BIAS, e.bias, nullptr, nullptr};
    if (matmul_is_gelu(e.kind) && e.kind != CUBLASLT_EPILOGUE_DGELU) call.d = (void*)e.aux;
    s.epilogue = call.epilogue.kind;
    matmul_lt(s, call, stream);
    matmul_epilogue_pass(plan, stream);
}

static void matmul_lt_forward(floatX* out, const floatX* inp, const floatX* weight, int N, int IC, int OC,
                              Layout layout, MatmulEpilogue e, cudaStream_t stream)
{
    matmul_lt({OC, N, IC, layout == Layout::OUT_IN, false, false, e.kind, 0}, {out, weight, inp, 0.0f, e}, stream);
}

static void matmul_lt_backward_input(floatX* dinp, const floatX* dout, const floatX* weight, int N, int IC, int OC,
                                     Layout layout, float beta, MatmulEpilogue e, cudaStream_t stream)
{
    matmul_lt({IC, N, OC, layout == Layout::IN_OUT, false, false, e.kind, 0}, {dinp, weight, dout, beta, e}, stream);
}

static void matmul_lt_backward_weight(float* dweight, float* dbias, float* scratch, const floatX* dout,
                                      const floatX* inp, int N, int IC, int OC, Layout layout, float beta,
                                      cudaStream_t stream)
{
    const bool out_in = layout == Layout::OUT_IN;
    MatmulEpilogue e = MATMUL_PLAIN;
    if (dbias != nullptr) e = {out_in ? CUBLASLT_EPILOGUE_BGRADB : CUBLASLT_EPILOGUE_BGRADA, scratch, nullptr, dbias};
    if (out_in) matmul_lt({IC, OC, N, false, true, true, e.kind, 0}, {dweight, inp, dout, beta, e}, stream);
    else matmul_lt({OC, IC, N, false, true, true, e.kind, 0}, {dweight, dout, inp, beta, e}, stream);
}

#endif

/* What a GEMM moves at least: two operands in, a result out. */
static double matmul_bytes(double N, double IC, double OC) { return (N * IC + IC * OC + N * OC) * sizeof(floatX); }

/* And what the activation adds, on n elements, by the rule: as an epilogue its argument, as a pass all its operands. */
static double matmul_act_bytes(Activation kind, double n, int num_operands)
{
    return (matmul_fuses_act(kind, matmul_capability()) ? 1 : num_operands) * n * sizeof(floatX);
}

static void matmul_forward(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int N, int IC,
                           int OC, Layout layout, cudaStream_t stream)
{
    OP(stream, 2.0 * N * IC * OC, matmul_bytes(N, IC, OC), N, IC, OC);
    ON_CPU(matmul_forward_cpu(out, inp, weight, bias, N, IC, OC, layout));
#ifndef DEVICE_CPU
    const MatmulEpilogue add_bias = {CUBLASLT_EPILOGUE_BIAS, bias, nullptr, nullptr};
    matmul_lt_forward(out, inp, weight, N, IC, OC, layout, bias != nullptr ? add_bias : MATMUL_PLAIN, stream);
#endif
}

static void matmul_forward_act(floatX* out, floatX* pre, const floatX* inp, const floatX* weight, const floatX* bias,
                                int N, int IC, int OC, Layout layout, Activation kind, cudaStream_t stream)
{
    OP(stream, 2.0 * N * IC * OC, matmul_bytes(N, IC, OC) + matmul_act_bytes(kind, 1.0 * N * OC, 2), N, IC, OC);
#ifndef DEVICE_CPU
    const cublasLtEpilogue_t gelu = bias != nullptr ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    if (activation_epilogue(kind) == Epilogue::GELU)
        return matmul_lt_forward(out, inp, weight, N, IC, OC, layout, {gelu, bias, pre, nullptr}, stream);
#endif
    matmul_forward(pre, inp, weight, bias, N, IC, OC, layout, stream);
    activation_forward(out, pre, (size_t)N * OC, kind, stream);
}

static void matmul_backward_input(floatX* dinp, const floatX* dout, const floatX* weight, int N, int IC, int OC,
                                  Layout layout, bool accumulate, cudaStream_t stream)
{
    OP(stream, 2.0 * N * IC * OC, matmul_bytes(N, IC, OC) + (accumulate ? 1.0 : 0.0) * N * IC * sizeof(floatX), N, IC,
       OC);
    ON_CPU(matmul_backward_input_cpu(dinp, dout, weight, N, IC, OC, layout, accumulate));
#ifndef DEVICE_CPU
    const float beta = accumulate ? 1.0f : 0.0f;
    matmul_lt_backward_input(dinp, dout, weight, N, IC, OC, layout, beta, MATMUL_PLAIN, stream);
#endif
}

static void matmul_backward_input_act(floatX* dpre, const floatX* dout, const floatX* weight, const floatX* pre, int N,
                                       int IC, int OC, Layout layout, Activation kind, cudaStream_t stream)
{
    OP(stream, 2.0 * N * IC * OC, matmul_bytes(N, IC, OC) + matmul_act_bytes(kind, 1.0 * N * IC, 3), N, IC, OC);
#ifndef DEVICE_CPU
    const MatmulEpilogue derivative = {CUBLASLT_EPILOGUE_DGELU, nullptr, pre, nullptr};
    if (activation_epilogue(kind) == Epilogue::GELU)
        return matmul_lt_backward_input(dpre, dout, weight, N, IC, OC, layout, 0.0f, derivative, stream);
#endif
    matmul_backward_input(dpre, dout, weight, N, IC, OC, layout, false, stream);
    activation_backward(dpre, dpre, pre, (size_t)N * IC, kind, stream);
}

static void matmul_backward_weight(float* dweight, float* dbias, float* scratch, const floatX* dout, const floatX* inp,
                                   int N, int IC, int OC, Layout layout, bool accumulate, cudaStream_t stream)
{
    const double operand_elems = N * ((double)IC + (dbias != nullptr ? 2 : 1) * OC);    // dbias reads dout again
    OP(stream, 2.0 * N * IC * OC,
       operand_elems * sizeof(floatX) + (accumulate ? 2.0 : 1.0) * IC * OC * sizeof(float), N, IC, OC);
    ON_CPU((void)scratch, matmul_backward_weight_cpu(dweight, dbias, dout, inp, N, IC, OC, layout, accumulate));
#ifndef DEVICE_CPU
    const float beta = accumulate ? 1.0f : 0.0f;
    matmul_lt_backward_weight(dweight, dbias, scratch, dout, inp, N, IC, OC, layout, beta, stream);
#endif
}

#ifdef OP_TESTS
#include "matmul_tests.h"
#endif
