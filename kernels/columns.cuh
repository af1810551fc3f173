/* columns.cuh: copies some columns of a matrix to columns of another.
 *   out[r * out_stride + c] = inp[r * inp_stride + c]        0 <= r < rows, 0 <= c < cols
 * shapes  out (rows,out_stride), inp (rows,inp_stride) floatX; the pointers are to the first column that is copied
 * writes  out =, these columns only
 * needs   cols <= both strides; out and inp do not overlap
 * exact   a copy
 * cost    2*rows*cols*sizeof(floatX) bytes, judged against memory bandwidth */
#pragma once
#include "vec.cuh"

#ifdef DEVICE_CPU

static void columns_copy_cpu(floatX* out, size_t out_stride, const floatX* inp, size_t inp_stride, int rows, int cols)
{
    #pragma omp parallel for
    for (int r = 0; r < rows; r++) memcpy((void*)(out + r * out_stride), inp + r * inp_stride, cols * sizeof(floatX));
}

#else

static constexpr int COLUMNS_BLOCK = 256;

/* Each thread copies W elements, one vector. */
template <int W> static __global__ void __launch_bounds__(COLUMNS_BLOCK)
columns_copy_kernel(floatX* out, size_t out_stride, const floatX* inp, size_t inp_stride, int rows, int cols)
{
    const size_t at = ((size_t)blockIdx.x * COLUMNS_BLOCK + threadIdx.x) * W, r = at / cols, c = at % cols;
    if (r >= (size_t)rows) return;
    float x[W];
    load_vec(x, inp + r * inp_stride + c);
    store_vec(out + r * out_stride + c, x);
}

#endif

static void columns_copy(floatX* out, size_t out_stride, const floatX* inp, size_t inp_stride, int rows, int cols,
                         cudaStream_t stream)
{
    OP(stream, 0, 2.0 * rows * cols * sizeof(floatX), rows, cols);
    ON_CPU(columns_copy_cpu(out, out_stride, inp, inp_stride, rows, cols));
#ifndef DEVICE_CPU
    const size_t elems = (size_t)rows * cols;
    if (is_vec(out, cols) && is_vec(inp, cols) && out_stride % VEC == 0 && inp_stride % VEC == 0)
        LAUNCH((columns_copy_kernel<VEC>), (unsigned)ceil_div(elems, COLUMNS_BLOCK * VEC), COLUMNS_BLOCK, 0, stream,
               out, out_stride, inp, inp_stride, rows, cols);
    else
        LAUNCH((columns_copy_kernel<1>), (unsigned)ceil_div(elems, COLUMNS_BLOCK), COLUMNS_BLOCK, 0, stream, out,
               out_stride, inp, inp_stride, rows, cols);
    CUDA_CHECK(cudaGetLastError());
#endif
}

#ifdef OP_TESTS
#include "optest.h"

/* dims: rows, columns, strides of out and inp, the first column in each */
static void columns_copy_test(OpRun* run)
{
    const int rows = run->dims[0], cols = run->dims[1], to = run->dims[4], from = run->dims[5];
    const size_t out_stride = run->dims[2], inp_stride = run->dims[3];
    OpTensor<floatX> out = op_grid<floatX>(run, "out", OpKind::INOUT, rows * out_stride);
    OpTensor<floatX> inp = op_grid<floatX>(run, "inp", OpKind::INPUT, rows * inp_stride);
    OP_RUN(run, 2.0 * rows * cols * sizeof(floatX), 0,
           columns_copy(out.dev + to, out_stride, inp.dev + from, inp_stride, rows, cols, 0));
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < cols; c++) out.f64[r * out_stride + to + c] = inp.f64[r * inp_stride + from + c];
    op_check_exact(run, out);
}

static const OpTest columns_tests[] = {
    {"columns_copy", columns_copy_test, {1, 1, 1, 1}, OpWhen::ALWAYS},
    {"columns_copy", columns_copy_test, {7, 24, 72, 24, 48}, OpWhen::ALWAYS},
    {"columns_copy", columns_copy_test, {9, 5, 5, 17, 0, 3}, OpWhen::ALWAYS},
    {"columns_copy", columns_copy_test, {300, 64, 192, 128, 64, 64}, OpWhen::ALWAYS},
    {"columns_copy", columns_copy_test, {8192, 256, 5120, 256, 4096}, OpWhen::BENCH},
};

#endif
