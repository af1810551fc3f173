/* test_emu_blaslt.h: part of test_emu.cu: cublasLtMatmul against three loops. Small whole numbers: sums are exact. */

#define LT_CHECK(call) do { \
    cublasStatus_t lt_error_ = (call); \
    if (lt_error_ != CUBLAS_STATUS_SUCCESS) die_at(WHERE, "%s: %s", #call, cublasLtGetStatusString(lt_error_)); \
} while (0)

struct MatmulCase {
    const char* name;
    cudaDataType in_type, out_type;
    bool trans_a, trans_b;
    int order, batch, epilogue;
    float alpha, beta;
};
static const cudaDataType BF = CUDA_R_16BF, HF = CUDA_R_16F, SF = CUDA_R_32F;
static const MatmulCase matmul_cases[] = {
    {"fp32", SF, SF, false, false, CUBLASLT_ORDER_COL, 1, CUBLASLT_EPILOGUE_DEFAULT, 1, 0},
    {"fp32 A^T", SF, SF, true, false, CUBLASLT_ORDER_COL, 1, CUBLASLT_EPILOGUE_DEFAULT, 1, 0},
    {"bf16 B^T", BF, BF, false, true, CUBLASLT_ORDER_COL, 1, CUBLASLT_EPILOGUE_DEFAULT, 1, 0},
    {"bf16 to fp32, accumulated", BF, SF, true, true, CUBLASLT_ORDER_COL, 1, CUBLASLT_EPILOGUE_DEFAULT, 1, 1},
    {"fp16, alpha and beta", HF, HF, true, false, CUBLASLT_ORDER_COL, 1, CUBLASLT_EPILOGUE_DEFAULT, 0.5f, -2},
    {"fp32 row order", SF, SF, false, true, CUBLASLT_ORDER_ROW, 1, CUBLASLT_EPILOGUE_DEFAULT, 1, 0},
    {"bf16 batch of 3", BF, BF, true, false, CUBLASLT_ORDER_COL, 3, CUBLASLT_EPILOGUE_DEFAULT, 1, 0},
    {"bf16 bias", BF, BF, true, false, CUBLASLT_ORDER_COL, 1, CUBLASLT_EPILOGUE_BIAS, 1, 0},
    {"fp32 gelu", SF, SF, true, false, CUBLASLT_ORDER_COL, 1, CUBLASLT_EPILOGUE_GELU, 0.1f, 0},
    {"fp16 gelu and bias", HF, HF, true, false, CUBLASLT_ORDER_COL, 1, CUBLASLT_EPILOGUE_GELU_BIAS, 0.125f, 0},
    {"bf16 gelu, aux, bias", BF, BF, true, false, CUBLASLT_ORDER_COL, 1, CUBLASLT_EPILOGUE_GELU_AUX_BIAS, 0.125f, 0},
    {"bf16 dgelu", BF, BF, false, false, CUBLASLT_ORDER_COL, 1, CUBLASLT_EPILOGUE_DGELU, 1, 0},
    {"bf16 gradient of the bias from B", BF, BF, false, true, CUBLASLT_ORDER_COL, 1, CUBLASLT_EPILOGUE_BGRADB, 1, 0},
    {"bf16 gradient of the bias from A", BF, BF, false, true, CUBLASLT_ORDER_COL, 1, CUBLASLT_EPILOGUE_BGRADA, 1, 0},
};

#ifdef DEVICE_CUDA
static const bool IS_EMULATED = false;
#else
static const bool IS_EMULATED = true;
#endif
static const int LT_M = 24, LT_N = 9, LT_K = 13, LT_AUX_LD = 24;
static const size_t LT_ELEMS = 3 * 24 * 13, LT_WORKSPACE_BYTES = 1 << 20;

static void lt_put(void* p, size_t i, cudaDataType type, float x)
{
    if (type == SF) ((float*)p)[i] = x;
    else if (type == BF) ((__nv_bfloat16*)p)[i] = __float2bfloat16_rn(x);
    else ((__half*)p)[i] = __float2half_rn(x);
}

static float lt_get(const void* p, size_t i, cudaDataType type)
{
    if (type == SF) return ((const float*)p)[i];
    return type == BF ? __bfloat162float(((const __nv_bfloat16*)p)[i]) : __half2float(((const __half*)p)[i]);
}

/* A device array of LT_ELEMS whole numbers, and what they are. */
static void* lt_array(float* values, cudaDataType type, int salt)
{
    char host[LT_ELEMS * 4], *device = device_new<char>(sizeof host);
    for (size_t i = 0; i < LT_ELEMS; i++) {
        values[i] = (float)((int)(i * 7 + (size_t)salt * 5) % 9 - 4);
        lt_put(host, i, type, values[i]);
    }
    upload(device, host, sizeof host);
    CUDA_CHECK(cudaStreamSynchronize(stream));
    return device;
}

static cublasLtMatrixLayout_t lt_layout(const MatmulCase* c, cudaDataType type, int rows, int cols)
{
    cublasLtMatrixLayout_t layout;
    bool row_order = c->order == CUBLASLT_ORDER_ROW;
    int64_t stride = (int64_t)rows * cols;
    int32_t order = c->order, batch = c->batch;
    LT_CHECK(cublasLtMatrixLayoutCreate(&layout, type, (uint64_t)rows, (uint64_t)cols, row_order ? cols : rows));
    LT_CHECK(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_ORDER, &order, sizeof order));
    LT_CHECK(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch));
    LT_CHECK(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                                              sizeof stride));
    return layout;
}

static float lt_at(const float* x, const MatmulCase* c, int batch, int rows, int cols, int row, int col)
{
    int i = c->order == CUBLASLT_ORDER_ROW ? row * cols + col : col * rows + row;
    return x[batch * rows * cols + i];
}

static float lt_gelu(float x) { return 0.5f * x * (1 + tanhf(0.79788456f * (x + 0.044715f * x * x * x))); }

static float lt_dgelu(float x)                       // by central differences, in double
{
    double y[2];
    for (int i = 0; i < 2; i++) {
        double z = x + (i ? 1e-5 : -1e-5);
        y[i] = 0.5 * z * (1 + tanh(0.7978845608028654 * (z + 0.044715 * z * z * z)));
    }
    return (float)((y[1] - y[0]) / 2e-5);
}

struct MatmulArrays { float a[LT_ELEMS], b[LT_ELEMS], d[LT_ELEMS], bias[LT_ELEMS], aux[LT_ELEMS]; };

/* Compares D, the bias gradient and aux with what three loops give. */
static bool lt_compare(const MatmulCase* c, const MatmulArrays* in, const void* d, const void* bias, const void* aux)
{
    bool a_t = c->trans_a, b_t = c->trans_b, ok = true;
    int e = c->epilogue;
    const bool fast_tanh = !IS_EMULATED && e < 256 && (e & (32 | 64)) != 0;      // cuBLASLt's may be the GPU's own
    float tolerance = c->out_type == HF || (c->out_type == SF && fast_tanh) ? 1e-3f : c->out_type == SF ? 1e-5f : 8e-3f;
    for (int i = 0; i < c->batch * LT_M * LT_N; i++) {
        int batch = i / (LT_M * LT_N), row = i / LT_N % LT_M, col = i % LT_N;
        float sum = 0;
        for (int k = 0; k < LT_K; k++)
            sum += lt_at(in->a, c, batch, a_t ? LT_K : LT_M, a_t ? LT_M : LT_K, a_t ? k : row, a_t ? row : k) *
                   lt_at(in->b, c, batch, b_t ? LT_N : LT_K, b_t ? LT_K : LT_N, b_t ? col : k, b_t ? k : col);
        float x = c->alpha * sum + (c->beta != 0 ? c->beta * lt_at(in->d, c, batch, LT_M, LT_N, row, col) : 0);
        if (e < 256 && (e & 4)) x += in->bias[row];
        if (e == CUBLASLT_EPILOGUE_GELU_AUX_BIAS) {
            float saved = lt_get(aux, (size_t)(col * LT_AUX_LD + row), c->out_type);
            ok = ok && fabsf(saved - x) <= tolerance * (1 + fabsf(x));
        }
        if (e < 256 && (e & 32)) x = lt_gelu(x);
        if (e == CUBLASLT_EPILOGUE_DGELU) x *= lt_dgelu(in->aux[col * LT_AUX_LD + row]);
        int at = batch * LT_M * LT_N + (c->order == CUBLASLT_ORDER_ROW ? row * LT_N + col : col * LT_M + row);
        ok = ok && fabsf(lt_get(d, (size_t)at, c->out_type) - x) <= tolerance * (1 + fabsf(x));
    }
    bool of_a = e == CUBLASLT_EPILOGUE_BGRADA, of_b = e == CUBLASLT_EPILOGUE_BGRADB;
    for (int i = 0; (of_a || of_b) && i < (of_a ? LT_M : LT_N); i++) {
        float sum = 0;                               // these cases have A plain and B transposed
        for (int k = 0; k < LT_K; k++) sum += of_a ? in->a[k * LT_M + i] : in->b[k * LT_N + i];
        ok = ok && fabsf(lt_get(bias, (size_t)i, c->out_type) - sum) <= tolerance * (1 + fabsf(sum));
    }
    return ok;
}

static void test_matmul_case(cublasLtHandle_t handle, const MatmulCase* c)
{
    static MatmulArrays in;
    void *a = lt_array(in.a, c->in_type, 1), *b = lt_array(in.b, c->in_type, 2), *d = lt_array(in.d, c->out_type, 3);
    void *bias = lt_array(in.bias, c->out_type, 4), *aux = lt_array(in.aux, c->out_type, 5);
    void* workspace = device_new<char>(LT_WORKSPACE_BYTES);
    cublasLtMatmulDesc_t desc;
    LT_CHECK(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    cublasOperation_t op_a = c->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N, op_b = c->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasLtEpilogue_t epilogue = (cublasLtEpilogue_t)c->epilogue;
    int64_t aux_ld = LT_AUX_LD;
    LT_CHECK(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof op_a));
    LT_CHECK(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof op_b));
    LT_CHECK(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
    if (epilogue != CUBLASLT_EPILOGUE_DEFAULT)
        LT_CHECK(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias));
    if (c->epilogue & 128) {
        LT_CHECK(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &aux, sizeof aux));
        LT_CHECK(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &aux_ld, sizeof aux_ld));
    }
    cublasLtMatrixLayout_t la = lt_layout(c, c->in_type, c->trans_a ? LT_K : LT_M, c->trans_a ? LT_M : LT_K);
    cublasLtMatrixLayout_t lb = lt_layout(c, c->in_type, c->trans_b ? LT_N : LT_K, c->trans_b ? LT_K : LT_N);
    cublasLtMatrixLayout_t ld = lt_layout(c, c->out_type, LT_M, LT_N);
    cublasLtMatmulPreference_t preference;
    LT_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    LT_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                  &LT_WORKSPACE_BYTES, sizeof LT_WORKSPACE_BYTES));
    cublasLtMatmulHeuristicResult_t plan;
    int num_plans = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, desc, la, lb, ld, ld, preference, 1, &plan,
                                                           &num_plans);
    bool ok = status == CUBLAS_STATUS_SUCCESS && num_plans == 1;
    if (ok) {
        LT_CHECK(cublasLtMatmul(handle, desc, &c->alpha, a, la, b, lb, &c->beta, d, ld, d, ld, &plan.algo, workspace,
                                LT_WORKSPACE_BYTES, stream));
        static char h_d[LT_ELEMS * 4], h_bias[LT_ELEMS * 4], h_aux[LT_ELEMS * 4];
        download(h_d, (char*)d, sizeof h_d);
        download(h_bias, (char*)bias, sizeof h_bias);
        download(h_aux, (char*)aux, sizeof h_aux);
        ok = lt_compare(c, &in, h_d, h_bias, h_aux);
    }
    const bool refused = status != CUBLAS_STATUS_SUCCESS || num_plans == 0;
    if (refused && !IS_EMULATED && epilogue != CUBLASLT_EPILOGUE_DEFAULT)       // the program then fuses nothing
        printf("skipped cublasLtMatmul %s: this cuBLASLt does not have it\n", c->name);
    else
        report(ok, "cublasLtMatmul %s", c->name);
    void* const arrays[] = {a, b, d, bias, aux, workspace};
    for (void* p : arrays) CUDA_CHECK(cudaFree(p));
    LT_CHECK(cublasLtMatmulPreferenceDestroy(preference));
    LT_CHECK(cublasLtMatrixLayoutDestroy(la));
    LT_CHECK(cublasLtMatrixLayoutDestroy(lb));
    LT_CHECK(cublasLtMatrixLayoutDestroy(ld));
    LT_CHECK(cublasLtMatmulDescDestroy(desc));
}

static void test_blaslt(void)
{
    cublasLtHandle_t handle;
    LT_CHECK(cublasLtCreate(&handle));
    for (const MatmulCase& c : matmul_cases) test_matmul_case(handle, &c);
    LT_CHECK(cublasLtDestroy(handle));
}
