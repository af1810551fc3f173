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
 * fused   GPU: bias, tanh GELU and its derivative, and the column sums of dbias are epilogues of cuBLASLt where it
 *         has them for a shape; where not, which is reported once for each kind, they are passes of their own. With
 *         TRAIN_GPT_EPILOGUES=none all are
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

#ifdef DEVICE_CPU

static void matmul_init() { gemm_init(); }
static void matmul_free() { gemm_free(); }
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

typedef struct {
    MatmulShape shape;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algo;
    bool exists;                // cuBLASLt has the epilogue for this shape
    const void *a_data, *b_data;    // of the newest call
    void* d_data;
    float beta;
} MatmulPlan;

/* What is done to D on the way out. bias: of BIAS added to each column, of BGRADA and BGRADB the result, row sums of
 * op(A) and column sums of op(B). aux: like D, and gelu's argument: written by GELU_AUX_BIAS, read by DGELU. */
typedef struct { cublasLtEpilogue_t kind; const void* bias; const void* aux; } MatmulEpilogue;
static constexpr MatmulEpilogue MATMUL_PLAIN = {CUBLASLT_EPILOGUE_DEFAULT, nullptr, nullptr};

static const struct { cublasLtEpilogue_t kind; const char* name; } matmul_epilogue_rows[] = {
    {CUBLASLT_EPILOGUE_BIAS, "bias"},
    {CUBLASLT_EPILOGUE_GELU_AUX_BIAS, "bias and GELU"},
    {CUBLASLT_EPILOGUE_DGELU, "derivative of GELU"},
    {CUBLASLT_EPILOGUE_BGRADA, "bias gradient (A)"},
    {CUBLASLT_EPILOGUE_BGRADB, "bias gradient (B)"},
};

static constexpr int MATMUL_MAX_PLANS = 512, MATMUL_MAX_CHOICES = 8;
static constexpr size_t MATMUL_WORKSPACE_BYTES = (size_t)32 << 20;

static struct {
    cublasLtHandle_t handle;
    void* workspace;
    MatmulPlan plans[MATMUL_MAX_PLANS];
    int num_plans;
    bool said_unfused[sizeof matmul_epilogue_rows / sizeof matmul_epilogue_rows[0]];
} matmul_state;

static void matmul_init()
{
    CUBLAS_CHECK(cublasLtCreate(&matmul_state.handle));
    CUDA_CHECK(cudaMalloc(&matmul_state.workspace, MATMUL_WORKSPACE_BYTES));
}

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

static void matmul_plan_make(MatmulPlan* plan, MatmulShape s, MatmulEpilogue e)
{
    plan->shape = s;
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
    const char* epilogues = getenv("TRAIN_GPT_EPILOGUES");
    const bool aligned = s.alignment_bytes >= 16; // an epilogue's own tensors need that; it is not asked about
    const bool fuses = aligned && (epilogues == nullptr || strcmp(epilogues, "none") != 0);
    plan->exists = (fuses || e.kind == CUBLASLT_EPILOGUE_DEFAULT) && matmul_plan_ask(plan);
    ENSURE(plan->exists || e.kind != CUBLASLT_EPILOGUE_DEFAULT,
           "cuBLASLt has no algorithm for a GEMM (%d,%d) x %d of %s aligned to %d bytes", s.m, s.n, s.k, FLOATX_NAME,
           s.alignment_bytes);
    if (!plan->exists) matmul_say_unfused(s);
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
    return cublasLtMatmul(matmul_state.handle, plan->desc, &alpha, plan->a_data, plan->a, plan->b_data, plan->b,
                          &plan->beta, plan->d_data, plan->d, plan->d_data, plan->d, algo, matmul_state.workspace,
                          MATMUL_WORKSPACE_BYTES, stream);
}

/* D = epilogue(op(A) * op(B) + beta * D). Returns false, with nothing done, if cuBLASLt does not have the epilogue: by
 * whatever status its heuristic says so, or the first call. */
template<class D> static bool matmul_lt(D* d, const floatX* a, const floatX* b, int m, int n, int k, bool transpose_a,
                                        bool transpose_b, float beta, MatmulEpilogue e, cudaStream_t stream)
{
    uintptr_t address_bits = 256;
    for (const void* p : {(const void*)a, (const void*)b, (const void*)d, e.bias, e.aux}) address_bits |= (uintptr_t)p;
    MatmulPlan* plan = matmul_plan_find({m, n, k, transpose_a, transpose_b, sizeof(D) == sizeof(float), e.kind,
                                         (int)(address_bits & -address_bits)}, e);
    if (!plan->exists) return false;
    matmul_epilogue_point(plan, e);
    plan->a_data = a;
    plan->b_data = b;
    plan->d_data = d;
    plan->beta = beta;
    const cublasStatus_t status = matmul_plan_run(plan, &plan->algo, stream);
    if (status == CUBLAS_STATUS_SUCCESS) return true;
    if (e.kind == CUBLASLT_EPILOGUE_DEFAULT)
        die_at(WHERE, "cublasLtMatmul (%d,%d) x %d of %s: %s", m, n, k, FLOATX_NAME, cublasLtGetStatusString(status));
    plan->exists = false;
    matmul_say_unfused(plan->shape);
    return false;
}

/* The GEMMs of a layer, with an epilogue or plain. */
static bool matmul_lt_forward(floatX* out, const floatX* inp, const floatX* weight, int N, int IC, int OC,
                              Layout layout, MatmulEpilogue e, cudaStream_t stream)
{
    return matmul_lt(out, weight, inp, OC, N, IC, layout == Layout::OUT_IN, false, 0.0f, e, stream);
}

static bool matmul_lt_backward_input(floatX* dinp, const floatX* dout, const floatX* weight, int N, int IC, int OC,
                                     Layout layout, float beta, MatmulEpilogue e, cudaStream_t stream)
{
    return matmul_lt(dinp, weight, dout, IC, N, OC, layout == Layout::IN_OUT, false, beta, e, stream);
}

/* With column_sums (OC) also those of dout. */
static bool matmul_lt_backward_weight(float* dweight, float* column_sums, const floatX* dout, const floatX* inp, int N,
                                      int IC, int OC, Layout layout, float beta, cudaStream_t stream)
{
    const bool out_in = layout == Layout::OUT_IN;
    MatmulEpilogue e = MATMUL_PLAIN;
    if (column_sums != nullptr)
        e = {out_in ? CUBLASLT_EPILOGUE_BGRADB : CUBLASLT_EPILOGUE_BGRADA, column_sums, nullptr};
    if (out_in) return matmul_lt(dweight, inp, dout, IC, OC, N, false, true, beta, e, stream);
    return matmul_lt(dweight, dout, inp, OC, IC, N, false, true, beta, e, stream);
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

#endif

/* What a GEMM moves at least: two operands in, a result out. */
static double matmul_bytes(double N, double IC, double OC) { return (N * IC + IC * OC + N * OC) * sizeof(floatX); }

/* And what the activation adds, on n elements: as an epilogue its argument, as a pass of its own all its operands. */
static double matmul_act_bytes(Activation kind, double n, int num_operands)
{
    return (activation_epilogue(kind) == Epilogue::NONE ? num_operands : 1) * n * sizeof(floatX);
}

static void matmul_forward(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int N, int IC,
                           int OC, Layout layout, cudaStream_t stream)
{
    OP(stream, 2.0 * N * IC * OC, matmul_bytes(N, IC, OC), N, IC, OC);
    ON_CPU(matmul_forward_cpu(out, inp, weight, bias, N, IC, OC, layout));
#ifndef DEVICE_CPU
    const MatmulEpilogue add_bias = {CUBLASLT_EPILOGUE_BIAS, bias, nullptr};
    if (bias != nullptr && matmul_lt_forward(out, inp, weight, N, IC, OC, layout, add_bias, stream)) return;
    matmul_lt_forward(out, inp, weight, N, IC, OC, layout, MATMUL_PLAIN, stream);
    if (bias == nullptr) return;
    LAUNCH(matmul_bias_kernel, N, 256, 0, stream, out, bias, OC);
    CUDA_CHECK(cudaGetLastError());
#endif
}

static void matmul_forward_act(floatX* out, floatX* pre, const floatX* inp, const floatX* weight, const floatX* bias,
                                int N, int IC, int OC, Layout layout, Activation kind, cudaStream_t stream)
{
    OP(stream, 2.0 * N * IC * OC, matmul_bytes(N, IC, OC) + matmul_act_bytes(kind, 1.0 * N * OC, 2), N, IC, OC);
#ifndef DEVICE_CPU
    const MatmulEpilogue add_bias_act = {CUBLASLT_EPILOGUE_GELU_AUX_BIAS, bias, pre};
    if (activation_epilogue(kind) == Epilogue::GELU && bias != nullptr &&
        matmul_lt_forward(out, inp, weight, N, IC, OC, layout, add_bias_act, stream)) return;
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
    const MatmulEpilogue derivative = {CUBLASLT_EPILOGUE_DGELU, nullptr, pre};
    if (activation_epilogue(kind) == Epilogue::GELU &&
        matmul_lt_backward_input(dpre, dout, weight, N, IC, OC, layout, 0.0f, derivative, stream)) return;
#endif
    matmul_backward_input(dpre, dout, weight, N, IC, OC, layout, false, stream);
    activation_backward(dpre, dpre, pre, (size_t)N * IC, kind, stream);
}

static void matmul_backward_weight(float* dweight, float* dbias, float* scratch, const floatX* dout, const floatX* inp,
                                   int N, int IC, int OC, Layout layout, bool accumulate, cudaStream_t stream)
{
    OP(stream, 2.0 * N * IC * OC,
       N * ((double)IC + OC) * sizeof(floatX) + (accumulate ? 2.0 : 1.0) * IC * OC * sizeof(float), N, IC, OC);
    ON_CPU((void)scratch, matmul_backward_weight_cpu(dweight, dbias, dout, inp, N, IC, OC, layout, accumulate));
#ifndef DEVICE_CPU
    const float beta = accumulate ? 1.0f : 0.0f;
    int num_parts = 1;
    if (dbias == nullptr || !matmul_lt_backward_weight(dweight, scratch, dout, inp, N, IC, OC, layout, beta, stream)) {
        matmul_lt_backward_weight(dweight, nullptr, dout, inp, N, IC, OC, layout, beta, stream);
        if (dbias == nullptr) return;
        num_parts = min(MATMUL_BIAS_PARTS, (int)ceil_div(N, 32));
        LAUNCH(matmul_backward_bias_parts_kernel, dim3(ceil_div(OC, 32), num_parts), 256, 0, stream, scratch, dout, N,
               OC);
        CUDA_CHECK(cudaGetLastError());
    }
    LAUNCH(matmul_backward_bias_add_kernel, ceil_div(OC, 256), 256, 0, stream, dbias, scratch, num_parts, OC);
    CUDA_CHECK(cudaGetLastError());
#endif
}

#ifdef OP_TESTS
#include "optest.h"

/* Element (oc, ic) of a weight. */
template<class R> static R* matmul_at(R* weight, int oc, int ic, int IC, int OC, Layout layout)
{
    return layout == Layout::OUT_IN ? weight + (size_t)oc * IC + ic : weight + (size_t)ic * OC + oc;
}

template<class R> static void matmul_forward_ref(R* out, const R* inp, const R* weight, const R* bias, int N, int IC,
                                                 int OC, Layout layout)
{
    #pragma omp parallel for
    for (int n = 0; n < N; n++)
        for (int oc = 0; oc < OC; oc++) {
            const R* row = inp + (size_t)n * IC;
            R sum = bias != nullptr ? bias[oc] : 0;
            for (int ic = 0; ic < IC; ic++) sum += row[ic] * *matmul_at(weight, oc, ic, IC, OC, layout);
            out[(size_t)n * OC + oc] = sum;
        }
}

template<class R> static void matmul_backward_input_ref(R* dinp, const R* dout, const R* weight, int N, int IC, int OC,
                                                        Layout layout, bool accumulate)
{
    #pragma omp parallel for
    for (int n = 0; n < N; n++)
        for (int ic = 0; ic < IC; ic++) {
            const R* row = dout + (size_t)n * OC;
            R sum = accumulate ? dinp[(size_t)n * IC + ic] : 0;
            for (int oc = 0; oc < OC; oc++) sum += row[oc] * *matmul_at(weight, oc, ic, IC, OC, layout);
            dinp[(size_t)n * IC + ic] = sum;
        }
}

template<class R> static void matmul_backward_weight_ref(R* dweight, R* dbias, const R* dout, const R* inp, int N,
                                                         int IC, int OC, Layout layout, bool accumulate)
{
    #pragma omp parallel for
    for (int oc = 0; oc < OC; oc++) {
        for (int ic = 0; ic < IC; ic++) {
            R* sum = matmul_at(dweight, oc, ic, IC, OC, layout);
            if (!accumulate) *sum = 0;
            for (int n = 0; n < N; n++) *sum += dout[(size_t)n * OC + oc] * inp[(size_t)n * IC + ic];
        }
        if (dbias != nullptr)
            for (int n = 0; n < N; n++) dbias[oc] += dout[(size_t)n * OC + oc];
    }
}

/* dims: N, IC, OC, 1 with a bias */
template<Layout layout> static void matmul_forward_test(OpRun* run)
{
    const int N = run->dims[0], IC = run->dims[1], OC = run->dims[2];
    const bool has_bias = run->dims[3] != 0;
    OpTensor<floatX> inp = op_input<floatX>(run, "inp", (size_t)N * IC, 0.0, 1.0);
    OpTensor<floatX> weight = op_input<floatX>(run, "weight", (size_t)OC * IC, 0.0, 1.0 / sqrt(IC));
    OpTensor<floatX> bias = op_input<floatX>(run, "bias", OC, 0.0, 1.0);
    OpTensor<floatX> out = op_output<floatX>(run, "out", (size_t)N * OC);
    OP_RUN(run, 0, 2.0 * N * IC * OC,
           matmul_forward(out.dev, inp.dev, weight.dev, has_bias ? bias.dev : nullptr, N, IC, OC, layout, 0));
    matmul_forward_ref(out.f64, inp.f64, weight.f64, has_bias ? bias.f64 : nullptr, N, IC, OC, layout);
    matmul_forward_ref(out.f32, inp.f32, weight.f32, has_bias ? bias.f32 : nullptr, N, IC, OC, layout);
    op_check(run, out);
}

/* dims: N, IC, OC, 1 with a bias. A few rows, as generation has them: on the CPU the bits of the large GEMM. */
template<Layout layout> static void matmul_few_rows_test(OpRun* run)
{
    const int N = run->dims[0], IC = run->dims[1], OC = run->dims[2];
    const bool has_bias = run->dims[3] != 0;
    OpTensor<floatX> inp = op_input<floatX>(run, "inp", (size_t)N * IC, 0.0, 1.0);
    OpTensor<floatX> weight = op_input<floatX>(run, "weight", (size_t)OC * IC, 0.0, 1.0 / sqrt(IC));
    OpTensor<floatX> bias = op_input<floatX>(run, "bias", OC, 0.0, 1.0);
    OpTensor<floatX> out = op_output<floatX>(run, "out", (size_t)N * OC);
    OP_RUN(run, (double)IC * OC * sizeof(floatX), 2.0 * N * IC * OC,
           matmul_forward(out.dev, inp.dev, weight.dev, has_bias ? bias.dev : nullptr, N, IC, OC, layout, 0));
    matmul_forward_ref(out.f64, inp.f64, weight.f64, has_bias ? bias.f64 : nullptr, N, IC, OC, layout);
    matmul_forward_ref(out.f32, inp.f32, weight.f32, has_bias ? bias.f32 : nullptr, N, IC, OC, layout);
    op_check(run, out);
#ifdef DEVICE_CPU
    floatX* large = op_scratch<floatX>(run, (size_t)N * OC);
    gemm(large, OC, {inp.dev, (size_t)IC, false}, matmul_weight_cpu(weight.dev, IC, OC, layout), N, OC, IC,
         has_bias ? bias.dev : nullptr, false);
    size_t num_other = 0;
    for (size_t i = 0; i < out.n; i++) num_other += memcmp(&out.dev[i], &large[i], sizeof large[i]) != 0;
    op_verdict(run, "elements with other bits than gemm's", (double)num_other, 0);
#endif
}

/* dims: N, IC, OC, 1 to accumulate */
template<Layout layout> static void matmul_backward_input_test(OpRun* run)
{
    const int N = run->dims[0], IC = run->dims[1], OC = run->dims[2];
    const bool accumulate = run->dims[3] != 0;
    OpTensor<floatX> dout = op_input<floatX>(run, "dout", (size_t)N * OC, 0.0, 1.0);
    OpTensor<floatX> weight = op_input<floatX>(run, "weight", (size_t)OC * IC, 0.0, 1.0 / sqrt(OC));
    OpTensor<floatX> dinp = accumulate ? op_inout<floatX>(run, "dinp", (size_t)N * IC, 0.0, 1.0)
                                       : op_output<floatX>(run, "dinp", (size_t)N * IC);
    OP_RUN(run, 0, 2.0 * N * IC * OC,
           matmul_backward_input(dinp.dev, dout.dev, weight.dev, N, IC, OC, layout, accumulate, 0));
    matmul_backward_input_ref(dinp.f64, dout.f64, weight.f64, N, IC, OC, layout, accumulate);
    matmul_backward_input_ref(dinp.f32, dout.f32, weight.f32, N, IC, OC, layout, accumulate);
    op_check(run, dinp);
    if ((size_t)N * IC * OC > 1000000) return;
    OpTensor<floatX> inp = op_input<floatX>(run, "inp", (size_t)N * IC, 0.0, 1.0);
    double* out = op_host(run, (size_t)N * OC);
    OP_CHECK_GRAD(run, dinp, inp, (matmul_forward_ref<double>(out, inp.f64, weight.f64, nullptr, N, IC, OC, layout),
                                   op_dot(out, dout.f64, (size_t)N * OC)));
}

/* dims: N, IC, OC, 1 with a bias, and then dweight is added to, or 2: with a bias, and dweight is overwritten */
template<Layout layout> static void matmul_backward_weight_test(OpRun* run)
{
    const int N = run->dims[0], IC = run->dims[1], OC = run->dims[2];
    const bool has_bias = run->dims[3] != 0, accumulate = run->dims[3] == 1;
    OpTensor<floatX> dout = op_input<floatX>(run, "dout", (size_t)N * OC, 0.0, 1.0);
    OpTensor<floatX> inp = op_input<floatX>(run, "inp", (size_t)N * IC, 0.0, 1.0);
    OpTensor<float> dweight = accumulate ? op_inout<float>(run, "dweight", (size_t)OC * IC, 0.0, 1.0)
                                         : op_output<float>(run, "dweight", (size_t)OC * IC);
    OpTensor<float> dbias = op_inout<float>(run, "dbias", OC, 0.0, 1.0);
    float* scratch = op_scratch<float>(run, matmul_scratch_elems(OC));
    OP_RUN(run, 0, 2.0 * N * IC * OC,
           matmul_backward_weight(dweight.dev, has_bias ? dbias.dev : nullptr, scratch, dout.dev, inp.dev, N, IC, OC,
                                  layout, accumulate, 0));
    matmul_backward_weight_ref(dweight.f64, has_bias ? dbias.f64 : nullptr, dout.f64, inp.f64, N, IC, OC, layout,
                               accumulate);
    matmul_backward_weight_ref(dweight.f32, has_bias ? dbias.f32 : nullptr, dout.f32, inp.f32, N, IC, OC, layout,
                               accumulate);
    op_check(run, dweight);
    op_check(run, dbias);
    if ((size_t)N * IC * OC > 1000000) return;
    OpTensor<floatX> weight = op_input<floatX>(run, "weight", (size_t)OC * IC, 0.0, 1.0);
    OpTensor<floatX> bias = op_input<floatX>(run, "bias", OC, 0.0, 1.0);
    double* out = op_host(run, (size_t)N * OC);
    OP_CHECK_GRAD(run, dweight, weight, (matmul_forward_ref(out, inp.f64, weight.f64, bias.f64, N, IC, OC, layout),
                                         op_dot(out, dout.f64, (size_t)N * OC)));
    if (has_bias)
        OP_CHECK_GRAD(run, dbias, bias, (matmul_forward_ref(out, inp.f64, weight.f64, bias.f64, N, IC, OC, layout),
                                         op_dot(out, dout.f64, (size_t)N * OC)));
}

/* dims: N, IC, OC. The activation takes pre before it is rounded or after: both are within the rule. */
template<Layout layout, Activation kind> static void matmul_forward_act_test(OpRun* run)
{
    const int N = run->dims[0], IC = run->dims[1], OC = run->dims[2];
    OpTensor<floatX> inp = op_input<floatX>(run, "inp", (size_t)N * IC, 0.0, 1.0);
    OpTensor<floatX> weight = op_input<floatX>(run, "weight", (size_t)OC * IC, 0.0, 1.0 / sqrt(IC));
    OpTensor<floatX> bias = op_input<floatX>(run, "bias", OC, 0.0, 1.0);
    OpTensor<floatX> pre = op_output<floatX>(run, "pre", (size_t)N * OC);
    OpTensor<floatX> out = op_output<floatX>(run, "out", (size_t)N * OC);
    OP_RUN(run, 0, 2.0 * N * IC * OC,
           matmul_forward_act(out.dev, pre.dev, inp.dev, weight.dev, bias.dev, N, IC, OC, layout, kind, 0));
    matmul_forward_ref(pre.f64, inp.f64, weight.f64, bias.f64, N, IC, OC, layout);
    matmul_forward_ref(pre.f32, inp.f32, weight.f32, bias.f32, N, IC, OC, layout);
    activation_forward_ref(out.f64, pre.f64, out.n, kind);
    activation_forward_ref(out.f32, pre.f32, out.n, kind);
    op_check(run, pre);
    op_check(run, out);
}

/* dims: N, IC, OC */
template<Layout layout, Activation kind> static void matmul_backward_input_act_test(OpRun* run)
{
    const int N = run->dims[0], IC = run->dims[1], OC = run->dims[2];
    OpTensor<floatX> dout = op_input<floatX>(run, "dout", (size_t)N * OC, 0.0, 1.0);
    OpTensor<floatX> weight = op_input<floatX>(run, "weight", (size_t)OC * IC, 0.0, 1.0 / sqrt(OC));
    OpTensor<floatX> pre = op_input<floatX>(run, "pre", (size_t)N * IC, 0.0, 2.0);
    OpTensor<floatX> dpre = op_output<floatX>(run, "dpre", (size_t)N * IC);
    OP_RUN(run, 0, 2.0 * N * IC * OC,
           matmul_backward_input_act(dpre.dev, dout.dev, weight.dev, pre.dev, N, IC, OC, layout, kind, 0));
    matmul_backward_input_ref(dpre.f64, dout.f64, weight.f64, N, IC, OC, layout, false);
    matmul_backward_input_ref(dpre.f32, dout.f32, weight.f32, N, IC, OC, layout, false);
    activation_backward_ref(dpre.f64, dpre.f64, pre.f64, dpre.n, kind);
    activation_backward_ref(dpre.f32, dpre.f32, pre.f32, dpre.n, kind);
    op_check(run, dpre);
}

#define MATMUL_ACT_TESTS(name) \
    {#name, name##_test<Layout::OUT_IN, Activation::GELU_TANH>, {7, 33, 65}, OpWhen::ALWAYS}, \
    {#name, name##_test<Layout::IN_OUT, Activation::GELU_TANH>, {33, 96, 64}, OpWhen::ALWAYS}, \
    {#name, name##_test<Layout::OUT_IN, Activation::GELU_TANH>, {65, 64, 200}, OpWhen::ALWAYS}, \
    {#name, name##_test<Layout::IN_OUT, Activation::GELU_ERF>, {5, 72, 40}, OpWhen::ALWAYS}, \
    {#name, name##_test<Layout::IN_OUT, Activation::GELU_TANH>, {1024, 768, 3072}, OpWhen::BENCH}

#define MATMUL_TEST(name, layout, when, ...) {#name, name##_test<Layout::layout>, {__VA_ARGS__}, OpWhen::when}
#define MATMUL_TESTS(name) \
    MATMUL_TEST(name, OUT_IN, ALWAYS, 1, 1, 1, 1), MATMUL_TEST(name, IN_OUT, ALWAYS, 1, 1, 1, 1), \
    MATMUL_TEST(name, OUT_IN, ALWAYS, 7, 33, 65, 1), MATMUL_TEST(name, IN_OUT, ALWAYS, 7, 33, 65, 1), \
    MATMUL_TEST(name, OUT_IN, ALWAYS, 33, 96, 64), MATMUL_TEST(name, IN_OUT, ALWAYS, 33, 96, 64), \
    MATMUL_TEST(name, OUT_IN, ALWAYS, 130, 1, 257, 1), MATMUL_TEST(name, IN_OUT, ALWAYS, 130, 257, 1, 1), \
    MATMUL_TEST(name, OUT_IN, LARGE, 257, 768, 192, 1), MATMUL_TEST(name, IN_OUT, LARGE, 1030, 384, 1153, 1), \
    MATMUL_TEST(name, OUT_IN, LARGE, 64, 2300, 96, 1), MATMUL_TEST(name, IN_OUT, LARGE, 2000, 100, 130), \
    MATMUL_TEST(name, IN_OUT, BENCH, 256, 768, 3072, 1), MATMUL_TEST(name, IN_OUT, BENCH, 1024, 768, 3072, 1), \
    MATMUL_TEST(name, OUT_IN, BENCH, 256, 768, 50304), MATMUL_TEST(name, IN_OUT, BENCH, 4096, 384, 1536, 1)

#define MATMUL_ROWS_TESTS(layout) \
    MATMUL_TEST(matmul_few_rows, layout, ALWAYS, 1, 70, 300, 1), \
    MATMUL_TEST(matmul_few_rows, layout, ALWAYS, 2, 257, 33), MATMUL_TEST(matmul_few_rows, layout, ALWAYS, 4, 16, 5), \
    MATMUL_TEST(matmul_few_rows, layout, ALWAYS, 8, 131, 64, 1), \
    MATMUL_TEST(matmul_few_rows, layout, LARGE, 1, 768, 2304, 1), \
    MATMUL_TEST(matmul_few_rows, layout, LARGE, 4, 3072, 770, 1), \
    MATMUL_TEST(matmul_few_rows, layout, BENCH, 1, 2048, 5632), \
    MATMUL_TEST(matmul_few_rows, layout, BENCH, 4, 2048, 5632), \
    MATMUL_TEST(matmul_few_rows, layout, BENCH, 8, 2048, 5632)

static const OpTest matmul_tests[] = {
    MATMUL_ROWS_TESTS(OUT_IN), MATMUL_ROWS_TESTS(IN_OUT),
    MATMUL_TESTS(matmul_forward), MATMUL_TESTS(matmul_backward_input), MATMUL_TESTS(matmul_backward_weight),
    MATMUL_TEST(matmul_backward_weight, OUT_IN, ALWAYS, 7, 33, 65, 2),
    MATMUL_TEST(matmul_backward_weight, IN_OUT, ALWAYS, 600, 33, 65, 2),
    MATMUL_ACT_TESTS(matmul_forward_act), MATMUL_ACT_TESTS(matmul_backward_input_act),
};
#endif
