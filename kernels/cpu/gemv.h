/* gemv.h: the GEMM of gemm.h for a few rows, as generation has them: each weight is read once, in place,
 * and used for all rows at once.
 *   out (M,N) = bias + inp (M,K) * weight      weight as (N,K), or (K,N) row-major; floatX; M <= GEMV_ROWS
 * how     (K,N): a strip of out stays in the nearest cache while the rows of the weight pass by. (N,K): VF rows of it
 *         are read side by side, VF terms at a time, and transposed in registers, so that a lane is an element of out
 * exact   the same bits as gemm.h: each element is summed over k in ascending order from its bias, whatever the number
 *         of rows and threads. So a text does not depend on what else is in the batch.
 * cost    N*K*s bytes, judged against memory bandwidth */
#pragma once
#include <utility>
#include "gemm.h"

enum {
    GEMV_ROWS = 8,
    GEMV_STRIP = 512,           // columns of a strip: 8 rows of sums are 16 KiB
    GEMV_K = 8,                 // rows of a strip that are added at a time
};

/* Lanes D apart change places between two vectors: a step of a transposition. */
template <int D, int... I> SIMD void vf_exchange(vf* a, vf* b, std::integer_sequence<int, I...>)
{
    vf low = __builtin_shufflevector(*a, *b, (I & D ? VF + I - D : I)...);
    *b = __builtin_shufflevector(*a, *b, (I & D ? VF + I : I + D)...);
    *a = low;
}

/* rows (VF,VF) = its transpose; D = 1 */
template <int D> SIMD void vf_transpose(vf* rows)
{
#pragma GCC unroll 16
    for (int i = 0; i < VF; i++)
        if (!(i & D)) vf_exchange<D>(&rows[i], &rows[i + D], std::make_integer_sequence<int, VF>());
    if constexpr (2 * D < VF) vf_transpose<2 * D>(rows);
}

/* VF elements of each row of out, from `n` on, of which `cols` exist. */
template <int M> static void gemv_dots(floatX* out, const float* inp, const floatX* weight, const floatX* bias, int n,
                                       int cols, int N, int K)
{
    vf sum[M];
    for (int m = 0; m < M; m++) sum[m] = bias != nullptr ? vf_load_n(bias + n, cols) : vf{};
    const floatX* row = weight + (size_t)n * K;
    for (int k = 0; k < K; k += VF) {
        const int num_k = gemm_min(VF, K - k);
        vf w[VF];
#pragma GCC unroll 16
        for (int i = 0; i < VF; i++) {
            const floatX* at = row + (size_t)(i < cols ? i : 0) * K + k;
            w[i] = num_k == VF ? vf_load(at) : vf_load_n(at, num_k);
        }
        vf_transpose<1>(w);
        if (num_k == VF) {
#pragma GCC unroll 16
            for (int i = 0; i < VF; i++)
                for (int m = 0; m < M; m++) sum[m] = vf_fma(vf_set(inp[(size_t)m * K + k + i]), w[i], sum[m]);
        } else {
            for (int i = 0; i < num_k; i++)
                for (int m = 0; m < M; m++) sum[m] = vf_fma(vf_set(inp[(size_t)m * K + k + i]), w[i], sum[m]);
        }
    }
    for (int m = 0; m < M; m++) vf_store_n(out + (size_t)m * N + n, sum[m], cols);
}

/* sum (M,cols) += inp (M,NK) * weight (NK,cols); their rows are STRIP, K and N apart. */
template <int M, int NK> static void gemv_add(float (&sum)[M][GEMV_STRIP], const float* inp, const floatX* weight,
                                              int cols, int N, int K)
{
    for (int j = 0; j < cols; j += VF) {
        vf acc[M];
        for (int m = 0; m < M; m++) acc[m] = vf_load(sum[m] + j);
#pragma GCC unroll 8
        for (int k = 0; k < NK; k++) {
            const floatX* at = weight + (size_t)k * N + j;
            vf w = j + VF <= cols ? vf_load(at) : vf_load_n(at, cols - j);
            for (int m = 0; m < M; m++) acc[m] = vf_fma(vf_set(inp[(size_t)m * K + k]), w, acc[m]);
        }
        for (int m = 0; m < M; m++) vf_store(sum[m] + j, acc[m]);
    }
}

/* Columns n to n + cols of each row of out, from a weight that has them side by side. */
template <int M> static void gemv_strip(floatX* out, const float* inp, const floatX* weight, const floatX* bias, int n,
                                        int cols, int N, int K)
{
    float sum[M][GEMV_STRIP] = {};
    for (int m = 0; m < M && bias != nullptr; m++) vf_copy(sum[m], bias + n, cols);
    int k = 0;
    for (; k + GEMV_K <= K; k += GEMV_K) gemv_add<M, GEMV_K>(sum, inp + k, weight + (size_t)k * N + n, cols, N, K);
    for (; k < K; k++) gemv_add<M, 1>(sum, inp + k, weight + (size_t)k * N + n, cols, N, K);
    for (int m = 0; m < M; m++) vf_copy(out + (size_t)m * N + n, sum[m], cols);
}

template <int M> static void gemv_rows(floatX* out, const float* inp, const floatX* weight, const floatX* bias, int N,
                                       int K, bool out_in)
{
    const int width = out_in ? VF : GEMV_STRIP;
    const int num_threads = gemm_min(omp_get_max_threads(), gemm_space.num_threads);
    #pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int n = 0; n < N; n += width) {
        const int cols = gemm_min(width, N - n);
        if (out_in) gemv_dots<M>(out, inp, weight, bias, n, cols, N, K);
        else gemv_strip<M>(out, inp, weight, bias, n, cols, N, K);
    }
}

/* out_in: the weight is (N,K). False, and nothing done, if there are too many rows for this. */
static bool gemv(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int M, int N, int K,
                 bool out_in)
{
    if (M > GEMV_ROWS || (size_t)M * K > (size_t)GEMM_MB * GEMM_KB) return false;
    float* wide = gemm_space.a;             // inp in fp32
    vf_copy(wide, inp, (size_t)M * K);
    switch (M) {
    case 1: gemv_rows<1>(out, wide, weight, bias, N, K, out_in); break;
    case 2: gemv_rows<2>(out, wide, weight, bias, N, K, out_in); break;
    case 4: gemv_rows<4>(out, wide, weight, bias, N, K, out_in); break;
    case 8: gemv_rows<8>(out, wide, weight, bias, N, K, out_in); break;
    default: return false;                  // the decoder pads to a power of two
    }
    return true;
}
