/* muon.cuh: a matrix made orthogonal, nearly: all its singular values moved to about 1 (Newton-Schulz).
 *   X = u / (|u| + 1e-7), transposed if rows > cols; 5 times X <- (a I + b A + c A^2) X with A = X X^T; u = scale * X
 * shapes  u (rows,cols) fp32, its rows ld apart; x two of (rows*cols), gram two of (min(rows,cols)^2) floatX,
 *         parts (MUON_PARTS) double
 * writes  u =; x, gram and parts are scratch
 * needs   matmul_init() once; any sizes
 * exact   fixed order of sums: same bits on every run and for any number of CPU threads; the norm is taken in double
 * cost    with m the shorter side and n the longer, 10*m*m*(2*n + m) flops, judged as GEMMs are; beside them u is
 *         read for its norm, 4*m*n bytes, copied to x and back, (4+s)*m*n each, and 5 times 3*m*m*s for the polynomial
 * source  Jordan 2024, kellerjordan.github.io/posts/muon, and its coefficients; Bernstein & Newhouse 2024,
 *         arXiv:2409.20325. GEMMs are those of floatX with sums in fp32: in bf16 as published */
#pragma once
#include "matmul.cuh"
#include "vec.cuh"

static constexpr int MUON_PARTS = 64, MUON_ITERATIONS = 5;
static constexpr float MUON_A = 3.4445f, MUON_B = -4.7750f, MUON_C = 2.0315f;

/* What the loaded matrix is divided by, from the partial sums of its squares. */
HOSTDEV float muon_norm(const double* parts)
{
    double sum = 0.0;
    for (int i = 0; i < MUON_PARTS; i++) sum += parts[i];
    return (float)sqrt(sum) + 1e-7f;
}

/* a I + b A + c A^2 */
HOSTDEV float muon_polynomial(float gram, float squared, bool diagonal)
{
    return MUON_B * gram + MUON_C * squared + (diagonal ? MUON_A : 0.0f);
}

#ifdef DEVICE_CPU

static void muon_sum_squares_cpu(double* parts, const float* u, int rows, int cols, size_t ld)
{
    #pragma omp parallel for
    for (int part = 0; part < MUON_PARTS; part++) {
        parts[part] = 0.0;
        for (int i = part; i < rows; i += MUON_PARTS)
            for (int j = 0; j < cols; j++) parts[part] += (double)u[i * ld + j] * (double)u[i * ld + j];
    }
}

/* dst (cols,rows or rows,cols) = factor * src (rows,cols). */
template <class Dst, class Src> static void muon_copy_cpu(Dst* dst, size_t ld_dst, const Src* src, size_t ld_src,
                                                          int rows, int cols, bool transposed, float factor)
{
    #pragma omp parallel for
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++)
            store_f(dst + (transposed ? j * ld_dst + i : i * ld_dst + j), factor * load_f(src[i * ld_src + j]));
}

static void muon_combine_cpu(floatX* squared, const floatX* gram, int side)
{
    #pragma omp parallel for
    for (int i = 0; i < side; i++)
        for (size_t at = (size_t)i * side; at < (size_t)(i + 1) * side; at++)
            store_f(squared + at, muon_polynomial(load_f(gram[at]), load_f(squared[at]), at % side == (size_t)i));
}

#else

static constexpr int MUON_BLOCK = 256, MUON_TILE = 32;

/* A block a part. */
static __global__ void __launch_bounds__(MUON_BLOCK)
muon_sum_squares_kernel(double* parts, const float* u, int rows, int cols, size_t ld)
{
    SHARED(double, partial, [32]);
    double sum = 0.0;
    for (int i = blockIdx.x; i < rows; i += MUON_PARTS)
        for (int j = threadIdx.x; j < cols; j += MUON_BLOCK) sum += (double)u[i * ld + j] * (double)u[i * ld + j];
    sum = block_sum(sum, partial);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

/* grid (column tiles, row tiles) of src; by way of a tile if transposed, so that both sides move whole rows of it.
 * parts, where they are given, have the factor. */
template <class Dst, class Src> static __global__ void __launch_bounds__(MUON_BLOCK)
muon_copy_kernel(Dst* dst, size_t ld_dst, const Src* src, size_t ld_src, int rows, int cols, bool transposed,
                 float factor, const double* parts)
{
    SHARED(float, tile, [MUON_TILE][MUON_TILE + 1]);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = blockIdx.y * MUON_TILE, col = blockIdx.x * MUON_TILE;
    if (parts != nullptr) factor = 1.0f / muon_norm(parts);
    for (int i = warp; i < MUON_TILE; i += MUON_BLOCK / 32) {
        if (row + i >= rows || col + lane >= cols) continue;
        const float x = factor * load_f(src[(row + i) * ld_src + col + lane]);
        if (transposed) tile[i][lane] = x;
        else store_f(dst + (row + i) * ld_dst + col + lane, x);
    }
    if (!transposed) return;
    __syncthreads();
    for (int i = warp; i < MUON_TILE; i += MUON_BLOCK / 32)
        if (col + i < cols && row + lane < rows) store_f(dst + (col + i) * ld_dst + row + lane, tile[lane][i]);
}

/* A thread an element. */
static __global__ void __launch_bounds__(MUON_BLOCK) muon_combine_kernel(floatX* squared, const floatX* gram, int side)
{
    const size_t at = (size_t)blockIdx.x * MUON_BLOCK + threadIdx.x;
    if (at >= (size_t)side * side) return;
    store_f(squared + at, muon_polynomial(load_f(gram[at]), load_f(squared[at]), at / side == at % side));
}

#endif

static void muon_sum_squares(double* parts, const float* u, int rows, int cols, size_t ld, cudaStream_t stream)
{
    OP(stream, 0, 4.0 * rows * cols, rows, cols);
    ON_CPU(muon_sum_squares_cpu(parts, u, rows, cols, ld));
#ifndef DEVICE_CPU
    LAUNCH(muon_sum_squares_kernel, MUON_PARTS, MUON_BLOCK, 0, stream, parts, u, rows, cols, ld);
    CUDA_CHECK(cudaGetLastError());
#endif
}

template <class Dst, class Src> static void muon_copy(Dst* dst, size_t ld_dst, const Src* src, size_t ld_src, int rows,
                                                      int cols, bool transposed, float factor, const double* parts,
                                                      cudaStream_t stream)
{
    OP(stream, 0, 1.0 * rows * cols * (sizeof(Dst) + sizeof(Src)), rows, cols);
    ON_CPU(muon_copy_cpu(dst, ld_dst, src, ld_src, rows, cols, transposed, parts ? 1.0f / muon_norm(parts) : factor));
#ifndef DEVICE_CPU
    const dim3 grid((unsigned)ceil_div(cols, MUON_TILE), (unsigned)ceil_div(rows, MUON_TILE));
    LAUNCH((muon_copy_kernel<Dst, Src>), grid, MUON_BLOCK, 0, stream, dst, ld_dst, src, ld_src, rows, cols, transposed,
           factor, parts);
    CUDA_CHECK(cudaGetLastError());
#endif
}

static void muon_combine(floatX* squared, const floatX* gram, int side, cudaStream_t stream)
{
    OP(stream, 0, 3.0 * side * side * sizeof(floatX), side);
    ON_CPU(muon_combine_cpu(squared, gram, side));
#ifndef DEVICE_CPU
    LAUNCH(muon_combine_kernel, (unsigned)ceil_div((size_t)side * side, MUON_BLOCK), MUON_BLOCK, 0, stream, squared,
           gram, side);
    CUDA_CHECK(cudaGetLastError());
#endif
}

static void muon_orthogonalise(float* u, floatX* const (&x)[2], floatX* const (&gram)[2], double* parts, int rows,
                               int cols, size_t ld, float scale, cudaStream_t stream)
{
    const bool transposed = rows > cols;
    const int m = transposed ? cols : rows, n = transposed ? rows : cols;   // X is (m,n)
    muon_sum_squares(parts, u, rows, cols, ld, stream);
    muon_copy(x[0], n, u, ld, rows, cols, transposed, 0.0f, parts, stream);
    for (int i = 0; i < MUON_ITERATIONS; i++) {
        floatX *from = x[i % 2], *to = x[(i + 1) % 2];
        matmul_forward(gram[0], from, from, nullptr, m, n, m, Layout::OUT_IN, stream);
        matmul_forward(gram[1], gram[0], gram[0], nullptr, m, m, m, Layout::OUT_IN, stream);
        muon_combine(gram[1], gram[0], m, stream);
        matmul_forward(to, gram[1], from, nullptr, m, m, n, Layout::IN_OUT, stream);
    }
    muon_copy(u, ld, x[MUON_ITERATIONS % 2], n, m, n, transposed, scale, (const double*)nullptr, stream);
}

#ifdef OP_TESTS
#include "optest.h"

/* What plain code in floatX keeps between two GEMMs; the truth rounds nothing. */
static inline double muon_keep(double x) { return x; }
static inline float muon_keep(float x) { return op_round(x, (const floatX*)nullptr); }

/* c (m,n) = a (m,k) * b (k,n), or b^T of (n,k) */
template <class R> static void muon_product_ref(R* c, const R* a, const R* b, int m, int n, int k, bool b_transposed)
{
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            R sum = 0;
            for (int l = 0; l < k; l++) sum += a[i * k + l] * (b_transposed ? b[j * k + l] : b[l * n + j]);
            c[i * n + j] = muon_keep(sum);
        }
}

template <class R> static void muon_ref(R* u, int rows, int cols, size_t ld, R scale)
{
    const bool transposed = rows > cols;
    const int m = transposed ? cols : rows, n = transposed ? rows : cols;
    R *x = (R*)op_alloc((size_t)m * n * sizeof(R)), *y = (R*)op_alloc((size_t)m * n * sizeof(R)), norm = 0;
    R *a = (R*)op_alloc((size_t)m * m * sizeof(R)), *b = (R*)op_alloc((size_t)m * m * sizeof(R));
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++) norm += u[i * ld + j] * u[i * ld + j];
    norm = std::sqrt(norm) + (R)1e-7;
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) x[i * n + j] = muon_keep((transposed ? u[j * ld + i] : u[i * ld + j]) / norm);
    for (int iteration = 0; iteration < 5; iteration++) {
        muon_product_ref(a, x, x, m, m, n, true);
        muon_product_ref(b, a, a, m, m, m, false);
        for (int i = 0; i < m * m; i++) b[i] = muon_keep((R)MUON_B * a[i] + (R)MUON_C * b[i]);
        muon_product_ref(y, b, x, m, n, m, false);
        for (int i = 0; i < m * n; i++) x[i] = muon_keep((R)MUON_A * x[i] + y[i]);
    }
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) u[transposed ? j * ld + i : i * ld + j] = scale * x[i * n + j];
    free(x), free(y), free(a), free(b);
}

/* dims: rows, cols, matrices side by side in the tensor, of which the first is left alone if there are several. Where
 * one has few elements the error of plain code, which decides, would be luck: many of them. */
static void muon_test(OpRun* run)
{
    const int rows = run->dims[0], cols = run->dims[1], num_matrices = run->dims[2], first = num_matrices > 1;
    const size_t ld = (size_t)num_matrices * cols, m = rows < cols ? rows : cols;
    OpTensor<float> u = op_inout<float>(run, "u", rows * ld, 0.0, 1e-3);
    floatX* const x[2] = {op_scratch<floatX>(run, (size_t)rows * cols), op_scratch<floatX>(run, (size_t)rows * cols)};
    floatX* const gram[2] = {op_scratch<floatX>(run, m * m), op_scratch<floatX>(run, m * m)};
    double* parts = op_scratch<double>(run, MUON_PARTS);
    const double n = rows < cols ? cols : rows;
    OP_RUN(run, 0, 10.0 * m * m * (2.0 * n + m) * (num_matrices - first),
           for (int k = first; k < num_matrices; k++)
               muon_orthogonalise(u.dev + k * cols, x, gram, parts, rows, cols, ld, 1.5f, 0));
    for (int k = first; k < num_matrices; k++) {
        muon_ref<double>(u.f64 + k * cols, rows, cols, ld, 1.5);
        muon_ref<float>(u.f32 + k * cols, rows, cols, ld, 1.5f);
    }
    op_check(run, u);
}

static const OpTest muon_tests[] = {
    {"muon", muon_test, {1, 1, 65}, OpWhen::ALWAYS},
    {"muon", muon_test, {3, 5, 65}, OpWhen::ALWAYS},
    {"muon", muon_test, {5, 3, 65}, OpWhen::ALWAYS},
    {"muon", muon_test, {1, 64, 1}, OpWhen::ALWAYS},
    {"muon", muon_test, {24, 24, 1}, OpWhen::ALWAYS},
    {"muon", muon_test, {24, 40, 3}, OpWhen::ALWAYS},
    {"muon", muon_test, {70, 33, 1}, OpWhen::ALWAYS},
    {"muon", muon_test, {40, 24, 3}, OpWhen::ALWAYS},
    {"muon", muon_test, {96, 384, 1}, OpWhen::LARGE},
    {"muon", muon_test, {768, 3072, 1}, OpWhen::BENCH},
};

#endif
