/* matmul.cuh: a linear layer, its bias, and their gradients.
 *   out     = inp * weight^T + bias              (bias may be null)
 *   dinp    = dout * weight  or  +=              (accumulate)
 *   dweight += dout^T * inp      dbias += sum_n(dout)
 * shapes  inp dinp (N,IC), out dout (N,OC), bias (OC) floatX; weight (OC,IC) in Layout::OUT_IN (torch's Linear) or
 *         (IC,OC) in Layout::IN_OUT (GPT-2's files) floatX; dweight as weight, dbias (OC), scratch
 *         (matmul_scratch_elems(OC)) fp32
 * writes  forward out =; backward_input dinp = or +=; backward_weight dweight +=, dbias +=
 * needs   matmul_init() once; any N, IC, OC. cuBLASLt's work space is shared, so all calls are to go to one stream.
 * exact   fp32 products in fp32 (no TF32); bf16 and fp16 multiply exactly and sum in fp32. Same bits on every run; on
 *         the CPU for any number of threads; on a GPU, the same bits for the same shapes and card.
 * cost    2*N*IC*OC flops each, judged against the FMA (CPU) or tensor core (GPU) peak
 * source  CPU: cpu/gemm.h. GPU: cuBLASLt. It is column-major: it sees each of our row-major matrices transposed, so a
 *         product is asked for as D^T = B^T * A^T, and a row-major (rows, cols) matrix is given to it as (cols, rows)
 *         with leading dimension cols. */
#pragma once
#include "common.cuh"
#ifdef DEVICE_CPU
#include "cpu/gemm.h"
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
static GemmOperand matmul_weight_cpu(const float* weight, int IC, int OC, Layout layout)
{
    if (layout == Layout::OUT_IN) return {weight, (size_t)IC, true};
    return {weight, (size_t)OC, false};
}

static void matmul_forward_cpu(float* out, const float* inp, const float* weight, const float* bias, int N, int IC,
                               int OC, Layout layout)
{
    gemm(out, OC, {inp, (size_t)IC, false}, matmul_weight_cpu(weight, IC, OC, layout), N, OC, IC, bias, false);
}

static void matmul_backward_input_cpu(float* dinp, const float* dout, const float* weight, int N, int IC, int OC,
                                      Layout layout, bool accumulate)
{
    GemmOperand w = matmul_weight_cpu(weight, IC, OC, layout);
    w.transposed = !w.transposed;
    gemm(dinp, IC, {dout, (size_t)OC, false}, w, N, IC, OC, nullptr, accumulate);
}

/* Threads share out the columns, in strips of a few vectors; each adds the rows in order. */
static void matmul_backward_bias_cpu(float* dbias, const float* dout, int N, int OC)
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
                for (int n = 0; n < N; n++) sum += dout[(size_t)n * OC + col];
                dbias[col] += sum;
            }
        }
    }
}

static void matmul_backward_weight_cpu(float* dweight, float* dbias, const float* dout, const float* inp, int N, int IC,
                                       int OC, Layout layout)
{
    GemmOperand dout_t = {dout, (size_t)OC, true}, inp_t = {inp, (size_t)IC, true};
    if (layout == Layout::OUT_IN) gemm(dweight, IC, dout_t, {inp, (size_t)IC, false}, OC, IC, N, nullptr, true);
    else gemm(dweight, OC, inp_t, {dout, (size_t)OC, false}, IC, OC, N, nullptr, true);
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
typedef struct { int m, n, k, transpose_a, transpose_b, d_is_float, has_bias, alignment_bytes; } MatmulShape;

typedef struct {
    MatmulShape shape;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algo;
    bool bias_fused;
} MatmulPlan;

static constexpr int MATMUL_MAX_PLANS = 512;
static constexpr size_t MATMUL_WORKSPACE_BYTES = (size_t)32 << 20;

static struct {
    cublasLtHandle_t handle;
    void* workspace;
    MatmulPlan plans[MATMUL_MAX_PLANS];
    int num_plans;
    bool said_unfused;
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

/* Asks cuBLASLt for its first choice; false if it has none for this shape and epilogue. */
static bool matmul_plan_ask(MatmulPlan* plan)
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
    cublasLtMatmulHeuristicResult_t result;
    int num_results = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(matmul_state.handle, plan->desc, plan->a, plan->b, plan->d,
                                                           plan->d, preference, 1, &result, &num_results);
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
    if (status != CUBLAS_STATUS_SUCCESS && status != CUBLAS_STATUS_NOT_SUPPORTED) CUBLAS_CHECK(status);
    if (status != CUBLAS_STATUS_SUCCESS || num_results == 0) return false;
    plan->algo = result.algo;
    return true;
}

static void matmul_plan_make(MatmulPlan* plan, MatmulShape s)
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
    if (s.has_bias) {
        matmul_desc_set(plan->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
        matmul_desc_set(plan->desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, FLOATX_CUDA);
        plan->bias_fused = matmul_plan_ask(plan);
        if (plan->bias_fused) return;
        if (!matmul_state.said_unfused)
            fprintf(stderr, "cuBLASLt has no bias epilogue for (%d,%d) x %d: added in a pass of its own\n", s.m, s.n,
                    s.k);
        matmul_state.said_unfused = true;
        matmul_desc_set(plan->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_DEFAULT);
    }
    ENSURE(matmul_plan_ask(plan), "cuBLASLt has no algorithm for a product (%d,%d) x %d of %s aligned to %d bytes",
           s.m, s.n, s.k, FLOATX_NAME, s.alignment_bytes);
}

static MatmulPlan* matmul_plan_find(MatmulShape shape)
{
    for (int i = 0; i < matmul_state.num_plans; i++)
        if (memcmp(&matmul_state.plans[i].shape, &shape, sizeof shape) == 0) return &matmul_state.plans[i];
    ENSURE(matmul_state.num_plans < MATMUL_MAX_PLANS, "more than %d shapes of matrix products", MATMUL_MAX_PLANS);
    MatmulPlan* plan = &matmul_state.plans[matmul_state.num_plans];
    matmul_plan_make(plan, shape);
    matmul_state.num_plans++;
    return plan;
}

/* D = op(A) * op(B) + beta * D (+ bias down each column). Returns whether the bias has been added. */
template<class D> static bool matmul_lt(D* d, const floatX* a, const floatX* b, const floatX* bias, int m, int n, int k,
                                        bool transpose_a, bool transpose_b, float beta, cudaStream_t stream)
{
    const uintptr_t address_bits = (uintptr_t)a | (uintptr_t)b | (uintptr_t)d | (uintptr_t)bias | 256;
    MatmulPlan* plan = matmul_plan_find({m, n, k, transpose_a, transpose_b, sizeof(D) == sizeof(float), bias != nullptr,
                                         (int)(address_bits & -address_bits)});
    if (plan->bias_fused) matmul_desc_set(plan->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, (const void*)bias);
    const float alpha = 1.0f;
    CUBLAS_CHECK(cublasLtMatmul(matmul_state.handle, plan->desc, &alpha, a, plan->a, b, plan->b, &beta, d, plan->d, d,
                                plan->d, &plan->algo, matmul_state.workspace, MATMUL_WORKSPACE_BYTES, stream));
    return plan->bias_fused;
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

static void matmul_forward(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int N, int IC,
                           int OC, Layout layout, cudaStream_t stream)
{
    ON_CPU(matmul_forward_cpu(out, inp, weight, bias, N, IC, OC, layout));
#ifndef DEVICE_CPU
    const bool bias_added = matmul_lt(out, weight, inp, bias, OC, N, IC, layout == Layout::OUT_IN, false, 0.0f, stream);
    if (bias_added || bias == nullptr) return;
    LAUNCH(matmul_bias_kernel, N, 256, 0, stream, out, bias, OC);
    CUDA_CHECK(cudaGetLastError());
#endif
}

static void matmul_backward_input(floatX* dinp, const floatX* dout, const floatX* weight, int N, int IC, int OC,
                                  Layout layout, bool accumulate, cudaStream_t stream)
{
    ON_CPU(matmul_backward_input_cpu(dinp, dout, weight, N, IC, OC, layout, accumulate));
#ifndef DEVICE_CPU
    const float beta = accumulate ? 1.0f : 0.0f;
    matmul_lt(dinp, weight, dout, nullptr, IC, N, OC, layout == Layout::IN_OUT, false, beta, stream);
#endif
}

static void matmul_backward_weight(float* dweight, float* dbias, float* scratch, const floatX* dout, const floatX* inp,
                                   int N, int IC, int OC, Layout layout, cudaStream_t stream)
{
    ON_CPU((void)scratch, matmul_backward_weight_cpu(dweight, dbias, dout, inp, N, IC, OC, layout));
#ifndef DEVICE_CPU
    if (layout == Layout::OUT_IN) matmul_lt(dweight, inp, dout, nullptr, IC, OC, N, false, true, 1.0f, stream);
    else matmul_lt(dweight, dout, inp, nullptr, OC, IC, N, false, true, 1.0f, stream);
    if (dbias == nullptr) return;
    const int num_parts = min(MATMUL_BIAS_PARTS, (int)ceil_div(N, 32));
    LAUNCH(matmul_backward_bias_parts_kernel, dim3(ceil_div(OC, 32), num_parts), 256, 0, stream, scratch, dout, N, OC);
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
                                                         int IC, int OC, Layout layout)
{
    #pragma omp parallel for
    for (int oc = 0; oc < OC; oc++) {
        for (int ic = 0; ic < IC; ic++) {
            R* sum = matmul_at(dweight, oc, ic, IC, OC, layout);
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

/* dims: N, IC, OC, 1 with a bias */
template<Layout layout> static void matmul_backward_weight_test(OpRun* run)
{
    const int N = run->dims[0], IC = run->dims[1], OC = run->dims[2];
    const bool has_bias = run->dims[3] != 0;
    OpTensor<floatX> dout = op_input<floatX>(run, "dout", (size_t)N * OC, 0.0, 1.0);
    OpTensor<floatX> inp = op_input<floatX>(run, "inp", (size_t)N * IC, 0.0, 1.0);
    OpTensor<float> dweight = op_inout<float>(run, "dweight", (size_t)OC * IC, 0.0, 1.0);
    OpTensor<float> dbias = op_inout<float>(run, "dbias", OC, 0.0, 1.0);
    float* scratch = op_scratch<float>(run, matmul_scratch_elems(OC));
    OP_RUN(run, 0, 2.0 * N * IC * OC,
           matmul_backward_weight(dweight.dev, has_bias ? dbias.dev : nullptr, scratch, dout.dev, inp.dev, N, IC, OC,
                                  layout, 0));
    matmul_backward_weight_ref(dweight.f64, has_bias ? dbias.f64 : nullptr, dout.f64, inp.f64, N, IC, OC, layout);
    matmul_backward_weight_ref(dweight.f32, has_bias ? dbias.f32 : nullptr, dout.f32, inp.f32, N, IC, OC, layout);
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

static const OpTest matmul_tests[] = {
    MATMUL_TESTS(matmul_forward), MATMUL_TESTS(matmul_backward_input), MATMUL_TESTS(matmul_backward_weight),
};
#endif
