/* blaslt.cpp: the cuBLASLt calls of cublasLt.h for the emulated build, over cblas_sgemm.
 *   D = epilogue(alpha op(A) op(B) + beta C), all accumulated in fp32, each result rounded once to D's type
 * Types as cuBLASLt has them for 32-bit compute: A and B both bf16, fp16 or fp32; C and D of that type or fp32.
 * Row or column order, transposes, strided batches, and the epilogues BIAS, GELU, their AUX forms, DGELU and the bias
 * gradients BGRADA, BGRADB, DGELU_BGRAD. What a GPU would refuse is CUBLAS_STATUS_NOT_SUPPORTED from the heuristic, so
 * that fall-backs run; what only this file does not know ends the program by name.
 * EMU_NO_EPILOGUE=1 lets the heuristic refuse every fused epilogue, 2 too, as an invalid value; 3 lets the call fail.
 * It offers four algorithms for each GEMM: the sums over k in 1, 2, 4 or 8 stretches, one after another, so that
 * their bits differ. EMU_FAST_ALGO=0..3 makes the others slow, EMU_FAST_EPILOGUE=0 GEMMs with an epilogue of more than
 * a bias, EMU_FAST_EPILOGUE=1 those without. */
#include <cblas.h>
#include <cmath>
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "emu_check.h"

extern "C" void openblas_set_num_threads(int num_threads);

struct cublasLtContext { int unused; };

struct Desc {                                        // in the opaque 256 bytes
    int compute_type, scale_type, trans_a, trans_b;
    uint32_t epilogue;
    int bias_type, aux_type;                         // -1: as D
    void *bias, *aux;
    int64_t aux_ld, bias_stride, aux_stride;
};
struct Layout {
    int type, order;
    uint64_t rows, cols;
    int64_t ld;
    int32_t batch_count;
    int64_t batch_stride;
};
struct Preference { uint64_t max_workspace_bytes; };
static_assert(sizeof(Desc) <= sizeof(cublasLtMatmulDescOpaque_t), "Desc must fit into the opaque struct");
static_assert(sizeof(Layout) <= sizeof(cublasLtMatrixLayoutOpaque_t), "Layout must fit into the opaque struct");

static const uint64_t WANTED_WORKSPACE_BYTES = 64 << 10;   // so that a missing or shared workspace shows

struct Algo { uint64_t workspace_bytes, idx, mark; };       // in the opaque 64 bytes
static const uint64_t NUM_ALGOS = 4, ALGO_MARK = 0x616c676f;

/* ---- elements */

static size_t type_bytes(int type) { return type == CUDA_R_32F ? 4 : 2; }
static bool type_known(int type) { return type == CUDA_R_32F || type == CUDA_R_16F || type == CUDA_R_16BF; }

static float element_load(const void* p, size_t i, int type)
{
    if (type == CUDA_R_32F) return ((const float*)p)[i];
    unsigned short bits = ((const unsigned short*)p)[i];
    return type == CUDA_R_16BF ? bf16_bits_to_float(bits) : fp16_bits_to_float(bits);
}

static void element_store(void* p, size_t i, int type, float x)
{
    if (type == CUDA_R_32F) ((float*)p)[i] = x;
    else ((unsigned short*)p)[i] = type == CUDA_R_16BF ? bf16_bits_from_float(x) : fp16_bits_from_float(x);
}

static size_t element_idx(const Layout* l, size_t row, size_t col)
{
    return l->order == CUBLASLT_ORDER_COL ? col * (size_t)l->ld + row : row * (size_t)l->ld + col;
}

/* All elements of one matrix of a batch, as a dense column-major float matrix. */
static float* matrix_load(const void* p, const Layout* l, int batch)
{
    const char* base = (const char*)p + (size_t)batch * (size_t)l->batch_stride * type_bytes(l->type);
    float* dense = (float*)malloc_checked(l->rows * l->cols * sizeof(float));
    for (size_t col = 0; col < l->cols; col++) {
        for (size_t row = 0; row < l->rows; row++)
            dense[col * l->rows + row] = element_load(base, element_idx(l, row, col), l->type);
    }
    return dense;
}

static void matrix_check(const void* p, const Layout* l, const char* what)
{
    size_t last = element_idx(l, l->rows - 1, l->cols - 1) + (size_t)(l->batch_count - 1) * (size_t)l->batch_stride;
    emu_check_device_range(p, (last + 1) * type_bytes(l->type), what);
}

/* ---- one multiplication */

struct Matmul {
    Desc desc;
    Layout a_layout, b_layout, c_layout, d_layout;
    const void *a, *b, *c;
    void *d, *workspace;
    size_t workspace_bytes;
    float alpha, beta;
    size_t m, n, k;
    uint64_t algo_idx;
};

static bool has_bias(uint32_t e) { return e < 256 && (e & 4) != 0; }
static bool has_gelu(uint32_t e) { return e < 256 && (e & 32) != 0; }
static bool has_dgelu(uint32_t e) { return e < 256 && (e & 64) != 0; }
static bool has_aux(uint32_t e) { return e < 256 && (e & 128) != 0; }
static bool has_bias_gradient(uint32_t e)
{
    return e == CUBLASLT_EPILOGUE_BGRADA || e == CUBLASLT_EPILOGUE_BGRADB || e == CUBLASLT_EPILOGUE_DGELU_BGRAD;
}
static size_t bias_elems(const Matmul* mm) { return mm->desc.epilogue == CUBLASLT_EPILOGUE_BGRADB ? mm->n : mm->m; }

static float gelu(float x) { return 0.5f * x * (1 + tanhf(0.79788456f * (x + 0.044715f * x * x * x))); }

static float gelu_derivative(float x)
{
    float t = tanhf(0.79788456f * (x + 0.044715f * x * x * x));
    return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * 0.79788456f * (1 + 3 * 0.044715f * x * x);
}

/* Sums of op(A) over k (m of them), of op(B) over k (n), or of the result over n (m). */
static void bias_gradient(const Matmul* mm, const float* a, const float* b, const float* out, int batch)
{
    char* bias = (char*)mm->desc.bias + (size_t)batch * (size_t)mm->desc.bias_stride * type_bytes(mm->desc.bias_type);
    bool of_a = mm->desc.epilogue == CUBLASLT_EPILOGUE_BGRADA, of_b = mm->desc.epilogue == CUBLASLT_EPILOGUE_BGRADB;
    for (size_t i = 0; i < bias_elems(mm); i++) {
        float sum = 0;
        for (size_t j = 0; j < (of_a || of_b ? mm->k : mm->n); j++) {
            if (of_a) sum += a[mm->desc.trans_a ? i * mm->k + j : j * mm->m + i];
            else if (of_b) sum += b[mm->desc.trans_b ? j * mm->n + i : i * mm->k + j];
            else sum += out[j * mm->m + i];
        }
        element_store(bias, i, mm->desc.bias_type, sum);
    }
}

static void epilogue_apply(const Matmul* mm, float* out, int batch)
{
    const Desc* desc = &mm->desc;
    char* bias = (char*)desc->bias + (size_t)batch * (size_t)desc->bias_stride * type_bytes(desc->bias_type);
    char* aux = (char*)desc->aux + (size_t)batch * (size_t)desc->aux_stride * type_bytes(desc->aux_type);
    for (size_t col = 0; col < mm->n; col++) {
        for (size_t row = 0; row < mm->m; row++) {
            float x = out[col * mm->m + row];
            size_t aux_idx = col * (size_t)desc->aux_ld + row;
            if (has_bias(desc->epilogue)) x += element_load(bias, row, desc->bias_type);
            if (has_gelu(desc->epilogue)) {
                if (has_aux(desc->epilogue)) element_store(aux, aux_idx, desc->aux_type, x);
                x = gelu(x);
            }
            if (has_dgelu(desc->epilogue)) x *= gelu_derivative(element_load(aux, aux_idx, desc->aux_type));
            out[col * mm->m + row] = x;
        }
    }
}

static void matmul_one(const Matmul* mm, int batch)
{
    const Desc* desc = &mm->desc;
    float* a = matrix_load(mm->a, &mm->a_layout, batch);
    float* b = matrix_load(mm->b, &mm->b_layout, batch);
    float* out = mm->beta != 0 ? matrix_load(mm->c, &mm->c_layout, batch)
                               : (float*)malloc_checked(mm->m * mm->n * sizeof(float));
    if (mm->beta == 0) memset(out, 0, mm->m * mm->n * sizeof(float));
    openblas_set_num_threads(1);   // for the same bits; each time, since it takes OpenMP's number when that changes
    size_t num_parts = size_min((size_t)1 << mm->algo_idx, mm->k);
    for (size_t part = 0; part < num_parts; part++) {
        size_t first = mm->k * part / num_parts, k = mm->k * (part + 1) / num_parts - first;
        const float* a_part = a + (desc->trans_a ? first : first * mm->a_layout.rows);
        const float* b_part = b + (desc->trans_b ? first * mm->b_layout.rows : first);
        cblas_sgemm(CblasColMajor, desc->trans_a ? CblasTrans : CblasNoTrans, desc->trans_b ? CblasTrans : CblasNoTrans,
                    (int)mm->m, (int)mm->n, (int)k, mm->alpha, a_part, (int)mm->a_layout.rows, b_part,
                    (int)mm->b_layout.rows, part == 0 ? mm->beta : 1, out, (int)mm->m);
    }
    epilogue_apply(mm, out, batch);
    if (has_bias_gradient(desc->epilogue)) bias_gradient(mm, a, b, out, batch);
    const Layout* dl = &mm->d_layout;
    char* d = (char*)mm->d + (size_t)batch * (size_t)dl->batch_stride * type_bytes(dl->type);
    for (size_t col = 0; col < mm->n; col++) {
        for (size_t row = 0; row < mm->m; row++)
            element_store(d, element_idx(dl, row, col), dl->type, out[col * mm->m + row]);
    }
    free(a);
    free(b);
    free(out);
}

/* Column by column (row by row): what is between them belongs to others. */
static void matrix_touch(const void* p, const Layout* l, Access access, const char* place)
{
    if (!EMU_CHECKED) return;
    bool by_col = l->order == CUBLASLT_ORDER_COL;
    size_t num_lines = by_col ? l->cols : l->rows, line_elems = by_col ? l->rows : l->cols, size = type_bytes(l->type);
    if (l->ld == (int64_t)line_elems) {
        line_elems *= num_lines;
        num_lines = 1;
    }
    for (int batch = 0; batch < l->batch_count; batch++) {
        for (size_t i = 0; i < num_lines; i++) {
            size_t first = (size_t)batch * (size_t)l->batch_stride + i * (size_t)l->ld;
            check_range((const char*)p + first * size, line_elems * size, access, place);
        }
    }
}

static void matmul_touch(const Matmul* mm)
{
    const Desc* desc = &mm->desc;
    size_t bias_bytes = bias_elems(mm) * type_bytes(desc->bias_type);
    matrix_touch(mm->a, &mm->a_layout, Access::READ, "cublasLtMatmul, A");
    matrix_touch(mm->b, &mm->b_layout, Access::READ, "cublasLtMatmul, B");
    if (mm->beta != 0) matrix_touch(mm->c, &mm->c_layout, Access::READ, "cublasLtMatmul, C");
    if (has_bias(desc->epilogue)) check_range(desc->bias, bias_bytes, Access::READ, "cublasLtMatmul, bias");
    if (has_bias_gradient(desc->epilogue)) check_range(desc->bias, bias_bytes, Access::WRITE, "cublasLtMatmul, bias");
    if (has_aux(desc->epilogue)) {
        Layout aux = {desc->aux_type, CUBLASLT_ORDER_COL, mm->m, mm->n, desc->aux_ld, mm->d_layout.batch_count,
                      desc->aux_stride};
        matrix_touch(desc->aux, &aux, has_dgelu(desc->epilogue) ? Access::READ : Access::WRITE, "cublasLtMatmul, aux");
    }
    matrix_touch(mm->d, &mm->d_layout, Access::WRITE, "cublasLtMatmul, D");
    if (mm->workspace_bytes > 0)
        check_range(mm->workspace, mm->workspace_bytes, Access::WRITE, "cublasLtMatmul, workspace");
}

/* By an option that names the fast ones. It shows in the times between events alone, and so on a busy machine too. */
static void be_slow_unless(const char* option, uint64_t which)
{
    const char* fast = getenv(option);
    if (fast != nullptr && (uint64_t)atoi(fast) != which) emu_pretended_s += 0.05;
}

static bool matmul_run(void* arg)
{
    const Matmul* mm = (const Matmul*)arg;
    emu_work_s += 1e-9 / 64 * (double)mm->m * (double)mm->n * (double)mm->k;
    be_slow_unless("EMU_FAST_ALGO", mm->algo_idx);
    be_slow_unless("EMU_FAST_EPILOGUE", (mm->desc.epilogue & ~5u) != 0);      // 1 is none, 4 a bias
    matmul_touch(mm);
    if (mm->workspace_bytes > 0) memset(mm->workspace, EMU_FILL_BYTE, mm->workspace_bytes);
    for (int batch = 0; batch < mm->d_layout.batch_count; batch++) matmul_one(mm, batch);
    emu_check_device_gaps("cublasLtMatmul");
    return true;
}

static const StreamOpKind matmul_kind = {matmul_run, nullptr, nullptr};

/* ---- what a GPU takes */

static void matmul_fill(Matmul* mm, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                        cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d)
{
    *mm = {};
    mm->desc = *(const Desc*)desc;
    mm->a_layout = *(const Layout*)a;
    mm->b_layout = *(const Layout*)b;
    mm->c_layout = *(const Layout*)c;
    mm->d_layout = *(const Layout*)d;
    if (mm->desc.bias_type < 0) mm->desc.bias_type = mm->d_layout.type;
    if (mm->desc.aux_type < 0) mm->desc.aux_type = mm->d_layout.type;
    mm->m = mm->d_layout.rows;
    mm->n = mm->d_layout.cols;
    mm->k = mm->desc.trans_a ? mm->a_layout.rows : mm->a_layout.cols;
}

static bool layout_fits(const Layout* l)
{
    uint64_t shortest = l->order == CUBLASLT_ORDER_COL ? l->rows : l->cols;
    return l->rows > 0 && l->cols > 0 && l->ld >= (int64_t)shortest && l->batch_count >= 1;
}

static int epilogue_refusal()
{
    const char* how = getenv("EMU_NO_EPILOGUE");
    return how != nullptr ? atoi(how) : 0;
}

static cublasStatus_t matmul_status(const Matmul* mm)
{
    const Layout *a = &mm->a_layout, *b = &mm->b_layout, *c = &mm->c_layout, *d = &mm->d_layout;
    const Desc* desc = &mm->desc;
    if (!layout_fits(a) || !layout_fits(b) || !layout_fits(c) || !layout_fits(d)) return CUBLAS_STATUS_INVALID_VALUE;
    bool shapes_fit = (desc->trans_a ? a->cols : a->rows) == mm->m && (desc->trans_b ? b->rows : b->cols) == mm->n &&
                      (desc->trans_b ? b->cols : b->rows) == mm->k && c->rows == mm->m && c->cols == mm->n;
    if (!shapes_fit) return CUBLAS_STATUS_INVALID_VALUE;
    if (a->batch_count != d->batch_count || b->batch_count != d->batch_count || c->batch_count != d->batch_count)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (a->type != b->type || c->type != d->type || (d->type != a->type && d->type != CUDA_R_32F))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    uint32_t e = desc->epilogue;
    const int refusal = e != CUBLASLT_EPILOGUE_DEFAULT ? epilogue_refusal() : 0;
    if (refusal == 1 || refusal == 2)
        return refusal == 1 ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_INVALID_VALUE;
    bool aux_fits = desc->aux_ld >= (int64_t)mm->m && desc->aux_ld % 8 == 0;
    if (has_aux(e) && (!aux_fits || d->order != CUBLASLT_ORDER_COL)) return CUBLAS_STATUS_NOT_SUPPORTED;
    return CUBLAS_STATUS_SUCCESS;
}

static void attribute_read(void* to, size_t want, const void* buf, size_t size, const char* call, int attr)
{
    if (size != want) emu_die("%s: attribute %d takes %zu bytes, got %zu", call, attr, want, size);
    memcpy(to, buf, want);
}

extern "C" {

size_t cublasLtGetVersion(void) { return 130000; }

const char* cublasLtGetStatusString(cublasStatus_t status)
{
    if (status == CUBLAS_STATUS_SUCCESS) return "CUBLAS_STATUS_SUCCESS";
    if (status == CUBLAS_STATUS_INVALID_VALUE) return "CUBLAS_STATUS_INVALID_VALUE";
    if (status == CUBLAS_STATUS_NOT_SUPPORTED) return "CUBLAS_STATUS_NOT_SUPPORTED";
    return "CUBLAS_STATUS_<another>";
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle)
{
    *handle = (cublasLtHandle_t)malloc_checked(sizeof(cublasLtContext));
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle)
{
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* handle, cublasComputeType_t compute_type,
                                        cudaDataType_t scale_type)
{
    if (compute_type < CUBLAS_COMPUTE_32F || compute_type > CUBLAS_COMPUTE_32F_FAST_TF32)
        emu_die("cublasLtMatmulDescCreate: compute type %d is not emulated", (int)compute_type);
    if (scale_type != CUDA_R_32F) emu_die("cublasLtMatmulDescCreate: scale type %d is not emulated", (int)scale_type);
    *handle = (cublasLtMatmulDesc_t)malloc_checked(sizeof **handle);
    Desc desc = {};
    desc.compute_type = compute_type;
    desc.scale_type = scale_type;
    desc.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    desc.bias_type = desc.aux_type = -1;
    memcpy(*handle, &desc, sizeof desc);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t handle)
{
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

static void epilogue_check(uint32_t e)
{
    switch (e) {
    case CUBLASLT_EPILOGUE_DEFAULT: case CUBLASLT_EPILOGUE_BIAS: case CUBLASLT_EPILOGUE_GELU:
    case CUBLASLT_EPILOGUE_GELU_AUX: case CUBLASLT_EPILOGUE_GELU_BIAS: case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
    case CUBLASLT_EPILOGUE_DGELU: case CUBLASLT_EPILOGUE_DGELU_BGRAD: case CUBLASLT_EPILOGUE_BGRADA:
    case CUBLASLT_EPILOGUE_BGRADB: return;
    default: emu_die("cublasLtMatmul: epilogue %u is not emulated", e);
    }
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t handle, cublasLtMatmulDescAttributes_t attr,
                                              const void* buf, size_t size)
{
    Desc* desc = (Desc*)handle;
    const char* call = "cublasLtMatmulDescSetAttribute";
    int32_t number = 0;
    switch ((int)attr) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
    case CUBLASLT_MATMUL_DESC_TRANSB:
        attribute_read(&number, 4, buf, size, call, attr);
        (attr == CUBLASLT_MATMUL_DESC_TRANSA ? desc->trans_a : desc->trans_b) = number != CUBLAS_OP_N;
        break;
    case CUBLASLT_MATMUL_DESC_POINTER_MODE:
        attribute_read(&number, 4, buf, size, call, attr);
        if (number != CUBLASLT_POINTER_MODE_HOST) emu_die("%s: pointer mode %d is not emulated", call, number);
        break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
        attribute_read(&desc->epilogue, 4, buf, size, call, attr);
        epilogue_check(desc->epilogue);
        break;
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: attribute_read(&desc->bias, 8, buf, size, call, attr); break;
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: attribute_read(&desc->bias_type, 4, buf, size, call, attr); break;
    case CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE: attribute_read(&desc->bias_stride, 8, buf, size, call, attr); break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: attribute_read(&desc->aux, 8, buf, size, call, attr); break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: attribute_read(&desc->aux_ld, 8, buf, size, call, attr); break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE: attribute_read(&desc->aux_type, 4, buf, size, call, attr); break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE:
        attribute_read(&desc->aux_stride, 8, buf, size, call, attr);
        break;
    default: emu_die("%s: attribute %d is not emulated", call, (int)attr);
    }
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* handle, cudaDataType type, uint64_t rows,
                                          uint64_t cols, int64_t ld)
{
    if (!type_known(type)) emu_die("cublasLtMatrixLayoutCreate: data type %d is not emulated", (int)type);
    *handle = (cublasLtMatrixLayout_t)malloc_checked(sizeof **handle);
    Layout layout = {type, CUBLASLT_ORDER_COL, rows, cols, ld, 1, 0};
    memcpy(*handle, &layout, sizeof layout);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t handle)
{
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t handle, cublasLtMatrixLayoutAttribute_t attr,
                                                const void* buf, size_t size)
{
    Layout* l = (Layout*)handle;
    const char* call = "cublasLtMatrixLayoutSetAttribute";
    switch ((int)attr) {
    case CUBLASLT_MATRIX_LAYOUT_TYPE: attribute_read(&l->type, 4, buf, size, call, attr); break;
    case CUBLASLT_MATRIX_LAYOUT_ORDER:
        attribute_read(&l->order, 4, buf, size, call, attr);
        if (l->order != CUBLASLT_ORDER_COL && l->order != CUBLASLT_ORDER_ROW)
            emu_die("%s: order %d is not emulated", call, l->order);
        break;
    case CUBLASLT_MATRIX_LAYOUT_ROWS: attribute_read(&l->rows, 8, buf, size, call, attr); break;
    case CUBLASLT_MATRIX_LAYOUT_COLS: attribute_read(&l->cols, 8, buf, size, call, attr); break;
    case CUBLASLT_MATRIX_LAYOUT_LD: attribute_read(&l->ld, 8, buf, size, call, attr); break;
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: attribute_read(&l->batch_count, 4, buf, size, call, attr); break;
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: attribute_read(&l->batch_stride, 8, buf, size, call, attr); break;
    default: emu_die("%s: attribute %d is not emulated", call, (int)attr);
    }
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* handle)
{
    *handle = (cublasLtMatmulPreference_t)malloc_checked(sizeof **handle);
    memset(*handle, 0, sizeof **handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t handle)
{
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t handle,
                                                    cublasLtMatmulPreferenceAttributes_t attr, const void* buf,
                                                    size_t size)
{
    Preference* preference = (Preference*)handle;
    if (attr == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES)
        attribute_read(&preference->max_workspace_bytes, 8, buf, size, "cublasLtMatmulPreferenceSetAttribute", attr);
    return CUBLAS_STATUS_SUCCESS;                    // the others only rule out algorithms, and none of these
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                              cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference,
                                              int num_asked, cublasLtMatmulHeuristicResult_t* results, int* num_found)
{
    *num_found = 0;
    if (num_asked < 1) return CUBLAS_STATUS_INVALID_VALUE;
    Matmul mm;
    matmul_fill(&mm, desc, a, b, c, d);
    cublasStatus_t status = matmul_status(&mm);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    uint64_t max_bytes = ((const Preference*)preference)->max_workspace_bytes;
    *num_found = (int)size_min(NUM_ALGOS, (size_t)num_asked);
    memset(results, 0, (size_t)*num_found * sizeof *results);
    for (int i = 0; i < *num_found; i++) {
        Algo algo = {size_min(max_bytes, WANTED_WORKSPACE_BYTES), (uint64_t)i, ALGO_MARK};
        memcpy(&results[i].algo, &algo, sizeof algo);
        results[i].workspaceSize = algo.workspace_bytes;
        results[i].state = CUBLAS_STATUS_SUCCESS;
        results[i].wavesCount = 1;
    }
    return CUBLAS_STATUS_SUCCESS;
}

static bool algo_is_ours(const Algo* algo) { return algo->mark == ALGO_MARK && algo->idx < NUM_ALGOS; }

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                       cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t* algo, cublasLtMatmulHeuristicResult_t* result)
{
    Matmul mm;
    matmul_fill(&mm, desc, a, b, c, d);
    const Algo* known = (const Algo*)algo;
    memset(result, 0, sizeof *result);
    result->algo = *algo;
    result->workspaceSize = known->workspace_bytes;
    result->state = algo_is_ours(known) ? matmul_status(&mm) : CUBLAS_STATUS_NOT_SUPPORTED;
    return result->state;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void* alpha, const void* A,
                              cublasLtMatrixLayout_t Adesc, const void* B, cublasLtMatrixLayout_t Bdesc,
                              const void* beta, const void* C, cublasLtMatrixLayout_t Cdesc, void* D,
                              cublasLtMatrixLayout_t Ddesc, const cublasLtMatmulAlgo_t* algo, void* workspace,
                              size_t workspace_bytes, cudaStream_t stream)
{
    Matmul* mm = (Matmul*)malloc_checked(sizeof(Matmul));
    matmul_fill(mm, desc, Adesc, Bdesc, Cdesc, Ddesc);
    mm->a = A;
    mm->b = B;
    mm->c = C;
    mm->d = D;
    mm->alpha = *(const float*)alpha;
    mm->beta = *(const float*)beta;
    mm->workspace = workspace;
    const Algo* known = (const Algo*)algo;
    mm->workspace_bytes = algo != nullptr ? known->workspace_bytes : 0;
    mm->algo_idx = algo != nullptr ? known->idx : 0;
    cublasStatus_t status = matmul_status(mm);
    if (algo != nullptr && !algo_is_ours(known)) status = CUBLAS_STATUS_INVALID_VALUE;
    if (mm->workspace_bytes > workspace_bytes) status = CUBLAS_STATUS_INVALID_VALUE;
    if (mm->desc.epilogue != CUBLASLT_EPILOGUE_DEFAULT && epilogue_refusal() == 3) status = CUBLAS_STATUS_NOT_SUPPORTED;
    if (status != CUBLAS_STATUS_SUCCESS) {
        free(mm);
        return status;
    }
    matrix_check(A, &mm->a_layout, "cublasLtMatmul, A");
    matrix_check(B, &mm->b_layout, "cublasLtMatmul, B");
    if (mm->beta != 0) matrix_check(C, &mm->c_layout, "cublasLtMatmul, C");
    matrix_check(D, &mm->d_layout, "cublasLtMatmul, D");
    if (mm->workspace_bytes > 0) emu_check_device_range(workspace, mm->workspace_bytes, "cublasLtMatmul, workspace");
    if (has_bias(mm->desc.epilogue) || has_bias_gradient(mm->desc.epilogue))
        emu_check_device_range(mm->desc.bias, bias_elems(mm) * type_bytes(mm->desc.bias_type), "cublasLtMatmul, bias");
    if (has_aux(mm->desc.epilogue)) {
        size_t aux_elems = (mm->n - 1) * (size_t)mm->desc.aux_ld + mm->m;
        emu_check_device_range(mm->desc.aux, aux_elems * type_bytes(mm->desc.aux_type), "cublasLtMatmul, aux");
    }
    stream_enqueue(stream, "cublasLtMatmul", &matmul_kind, mm);
    return CUBLAS_STATUS_SUCCESS;
}

}
