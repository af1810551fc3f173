/* norm.cuh: what layernorm.cuh and rmsnorm.cuh share: how a forward reads its rows, and the whole backward on a GPU. Of
 * it qk_norm.cuh has the partial sums.
 *   CENTERED (LayerNorm)    xhat = (inp - mean) * rstd   dinp += rstd * (g - mean_c(g) - xhat * mean_c(g * xhat))
 *   without it (RMSNorm)    xhat = inp * rstd            dinp += rstd * (g - xhat * mean_c(g * xhat))
 *   dweight += sum_n(dout * xhat)   dbias += sum_n(dout), CENTERED only                           g = dout * weight
 * exact   The rows are cut into at most NORM_PARTS parts. Each part sums its own dweight (and dbias) into scratch,
 *         (parts, 1 or 2, C) fp32, and the parts are added in order: the same bits on every run and for any number of
 *         CPU threads. */
#pragma once
#include "vec.cuh"

#ifdef DEVICE_CPU

static constexpr int NORM_PARTS = 64;

static void norm_residual_row_cpu(floatX* residual, const floatX* a, const floatX* b, int C)
{
    #pragma omp simd
    for (int c = 0; c < C; c++) store_f(residual + c, load_f(a[c]) + load_f(b[c]));
}

/* backward_row(n, dweight, dbias) does row n and adds to the sums of its part. dbias null: there is none. */
template <class Row> static void norm_backward_cpu(float* dweight, float* dbias, float* scratch, int N, int C,
                                                   Row backward_row)
{
    const int num_parts = N < NORM_PARTS ? N : NORM_PARTS;
    const size_t part_elems = (size_t)(dbias != nullptr ? 2 : 1) * C;
    #pragma omp parallel for
    for (int part = 0; part < num_parts; part++) {
        float* part_dweight = scratch + part * part_elems;
        memset(part_dweight, 0, part_elems * sizeof(float));
        const size_t end = (size_t)N * (part + 1) / num_parts;
        for (size_t n = (size_t)N * part / num_parts; n < end; n++) backward_row(n, part_dweight, part_dweight + C);
    }
    #pragma omp parallel for
    for (int start = 0; start < C; start += 128) {
        const int end = start + 128 < C ? start + 128 : C;
        for (int part = 0; part < num_parts; part++) {
            const float* part_dweight = scratch + part * part_elems;
            #pragma omp simd
            for (int c = start; c < end; c++) dweight[c] += part_dweight[c];
            if (dbias == nullptr) continue;
            #pragma omp simd
            for (int c = start; c < end; c++) dbias[c] += part_dweight[C + c];
        }
    }
}

#else

static constexpr int NORM_PARTS = 512;               // enough blocks to fill a GPU, few enough to add up cheaply
static constexpr int NORM_BLOCK = 256;
static constexpr int NORM_MAX_BLOCK = 1024;

/* x = W columns of a forward's input: of a, or with RESIDUAL of a + b, which is stored too. */
template <bool RESIDUAL, int W> DEV void norm_input(float (&x)[W], floatX* residual, const floatX* a, const floatX* b)
{
    load_vec(x, a);
    if (!RESIDUAL) return;
    float y[W];
    load_vec(y, b);
#pragma unroll
    for (int k = 0; k < W; k++) x[k] = round_x(x[k] + y[k]);
    store_vec(residual, x);
}

template <bool CENTERED> DEV float norm_xhat(float x, float mean, float rstd)
{
    return CENTERED ? (x - mean) * rstd : x * rstd;
}

/* What row n does to W columns of dinp, and to their share of dweight and dbias. means: of g * xhat and of g. */
template <bool CENTERED, int W, class P> DEV void norm_backward_columns(floatX* dinp, float (&dweight)[W],
                                                                        float (&dbias)[W], const floatX* dout,
                                                                        const floatX* inp, const P* weight, float mean,
                                                                        float rstd, float mean_g_xhat, float mean_g)
{
    float dy[W], x[W], w[W], dx[W];
    load_vec(dy, dout);
    load_vec(x, inp);
    load_vec(w, weight);
    load_vec(dx, dinp);
#pragma unroll
    for (int k = 0; k < W; k++) {
        const float xhat = norm_xhat<CENTERED>(x[k], mean, rstd), g = dy[k] * w[k];
        dx[k] += rstd * ((CENTERED ? g - mean_g : g) - xhat * mean_g_xhat);
        dweight[k] += dy[k] * xhat;
        if (CENTERED) dbias[k] += dy[k];
    }
    store_vec(dinp, dx);
}

/* A block a part, its rows one after another, one barrier each. A thread owns W columns and keeps their sums in
 * registers; in rows too long for the block it owns more, and keeps the sums of those in scratch. */
template <bool CENTERED, int W, class P> static __global__ void __launch_bounds__(NORM_MAX_BLOCK)
norm_backward_kernel(floatX* dinp, float* scratch, const floatX* dout, const floatX* inp, const P* weight,
                     const float* mean, const float* rstd, int N, int C)
{
    constexpr int NUM_SUMS = CENTERED ? 2 : 1;
    SHARED(float, partial, [2][NUM_SUMS][32]);       // alternates, so that one barrier a row is enough
    const int first = threadIdx.x * W, stride = blockDim.x * W, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int num_warps = blockDim.x / 32;
    float *part_dweight = scratch + (size_t)blockIdx.x * NUM_SUMS * C, *part_dbias = part_dweight + C;
    float dweight[W] = {}, dbias[W] = {}, more_dweight[W] = {}, more_dbias[W] = {};
    for (int c = first + stride; c < C; c += stride) {
        store_vec(part_dweight + c, more_dweight);
        if (CENTERED) store_vec(part_dbias + c, more_dbias);
    }
    const size_t end = (size_t)N * (blockIdx.x + 1) / gridDim.x;
    for (size_t n = (size_t)N * blockIdx.x / gridDim.x; n < end; n++) {
        const float m = CENTERED ? mean[n] : 0.0f, r = rstd[n];
        float sum_g = 0.0f, sum_g_xhat = 0.0f, mean_g = 0.0f;
        for (int c = first; c < C; c += stride) {
            float dy[W], x[W], w[W];
            load_vec(dy, dout + n * C + c);
            load_vec(x, inp + n * C + c);
            load_vec(w, weight + c);
#pragma unroll
            for (int k = 0; k < W; k++) {
                if (CENTERED) sum_g += dy[k] * w[k];
                sum_g_xhat += dy[k] * w[k] * norm_xhat<CENTERED>(x[k], m, r);
            }
        }
        if (CENTERED) sum_g = warp_sum(sum_g);
        sum_g_xhat = warp_sum(sum_g_xhat);
        if (lane == 0) {
            partial[n % 2][0][warp] = sum_g_xhat;
            if (CENTERED) partial[n % 2][NUM_SUMS - 1][warp] = sum_g;
        }
        __syncthreads();
        if (CENTERED) mean_g = warp_sum(lane < num_warps ? partial[n % 2][NUM_SUMS - 1][lane] : 0.0f) / (float)C;
        const float mean_g_xhat = warp_sum(lane < num_warps ? partial[n % 2][0][lane] : 0.0f) / (float)C;
        if (first < C)
            norm_backward_columns<CENTERED>(dinp + n * C + first, dweight, dbias, dout + n * C + first,
                                            inp + n * C + first, weight + first, m, r, mean_g_xhat, mean_g);
        for (int c = first + stride; c < C; c += stride) {
            load_vec(more_dweight, part_dweight + c);
            if (CENTERED) load_vec(more_dbias, part_dbias + c);
            norm_backward_columns<CENTERED>(dinp + n * C + c, more_dweight, more_dbias, dout + n * C + c,
                                            inp + n * C + c, weight + c, m, r, mean_g_xhat, mean_g);
            store_vec(part_dweight + c, more_dweight);
            if (CENTERED) store_vec(part_dbias + c, more_dbias);
        }
    }
    if (first >= C) return;
    store_vec(part_dweight + first, dweight);
    if (CENTERED) store_vec(part_dbias + first, dbias);
}

/* A block adds 32 columns of all parts: warp w takes parts w, w + 8, ..., then warp 0 adds the warps in order. Row y of
 * the grid: dweight, dbias. */
static __global__ void __launch_bounds__(NORM_BLOCK)
norm_reduce_kernel(float* dweight, float* dbias, const float* scratch, int num_parts, int C)
{
    static constexpr int NUM_WARPS = NORM_BLOCK / 32;
    SHARED(float, partial, [NUM_WARPS][32]);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = blockIdx.x * 32 + lane;
    const size_t part_elems = (size_t)gridDim.y * C;
    float sum = 0.0f;
    if (c < C)
        for (int part = warp; part < num_parts; part += NUM_WARPS)
            sum += scratch[part * part_elems + (size_t)blockIdx.y * C + c];
    partial[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || c >= C) return;
    for (int w = 1; w < NUM_WARPS; w++) sum += partial[w][lane];
    (blockIdx.y == 0 ? dweight : dbias)[c] += sum;
}

/* Adds what the parts left in scratch (num_parts,num_sums,C) to dweight (C), and the second sums, if any, to dbias. */
static void norm_reduce_launch(float* dweight, float* dbias, const float* scratch, int num_parts, int num_sums, int C,
                               cudaStream_t stream)
{
    LAUNCH(norm_reduce_kernel, dim3((unsigned)ceil_div(C, 32), num_sums), NORM_BLOCK, 0, stream, dweight, dbias,
           scratch, num_parts, C);
    CUDA_CHECK(cudaGetLastError());
}

static unsigned norm_backward_block(int C, int width)
{
    const size_t threads = round_up(ceil_div(C, width), 32);
    return threads < NORM_MAX_BLOCK ? (unsigned)threads : NORM_MAX_BLOCK;
}

/* W: columns of a thread where rows are whole vectors. dbias and mean are null unless CENTERED. */
template <bool CENTERED, int W, class P> static void norm_backward_launch(float* dweight, float* dbias, floatX* dinp,
                                                                          float* scratch, const floatX* dout,
                                                                          const floatX* inp, const P* weight,
                                                                          const float* mean, const float* rstd, int N,
                                                                          int C, cudaStream_t stream)
{
    const int num_parts = N < NORM_PARTS ? N : NORM_PARTS;
    if (is_vec(dinp, C) && is_vec(dout, C) && is_vec(inp, C) && is_vec(weight, C) && is_vec(scratch, C))
        LAUNCH((norm_backward_kernel<CENTERED, W, P>), num_parts, norm_backward_block(C, W), 0, stream, dinp, scratch,
               dout, inp, weight, mean, rstd, N, C);
    else
        LAUNCH((norm_backward_kernel<CENTERED, 1, P>), num_parts, norm_backward_block(C, 1), 0, stream, dinp, scratch,
               dout, inp, weight, mean, rstd, N, C);
    CUDA_CHECK(cudaGetLastError());
    norm_reduce_launch(dweight, dbias, scratch, num_parts, CENTERED ? 2 : 1, C, stream);
}

#endif
