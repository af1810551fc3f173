/* gemv.h: the GEMM of gemm.h for a few rows, as generation has them: each weight is read once, in place,
 * and used for all rows at once.
 *   out (M,N) = bias + inp (M,K) * weight      weight as (N,K), or (K,N) row-major; floatX; M <= GEMV_ROWS
 * how     (K,N): each thread has a strip of columns, whose sums stay in the nearest cache while the rows of the weight
 *         pass by. (N,K): VF rows of it are read side by side, VF cells at a time, and transposed in registers, so that
 *         a lane is an element of out. Both fetch ahead what the processor does not foresee: the next rows, and pieces
 *         of VF rows that are far apart
 * exact   the same bits as gemm.h: each element is summed over k in ascending order from its bias, cell by cell,
 *         whatever the number of rows and threads. So a text does not depend on what else is in the batch.
 * cost    N*K*s bytes, judged against memory bandwidth */
#pragma once
#include <utility>
#include "gemm.h"

enum {
    GEMV_ROWS = 8,
    GEMV_STRIP = 1024,          // most columns of a strip: 8 rows of sums are 32 KiB
    GEMV_K = 8,                 // cells of a strip that are added at a time
    GEMV_AHEAD = 8 * VF * GEMM_PAIR,        // elements of each row of a (N,K) weight that are on their way
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

/* VF cells of a row of which `num_k` numbers exist, the others 0. */
SIMD vf gemv_load(const floatX* row, int num_k)
{
    if constexpr (GEMM_PAIR == 1) return num_k >= VF ? vf_load(row) : vf_load_n(row, num_k);
    else {
        if (num_k >= VF * GEMM_PAIR) return vf_load((const float*)row);
        float cells[VF] = {};
        memcpy((void*)cells, row, num_k * sizeof(floatX));
        return vf_load(cells);
    }
}

/* VF elements of each row of out, from `n` on, of which `cols` exist. The rows of inp are cells. */
template <int M> static void gemv_dots(floatX* out, const float* inp, const floatX* weight, const floatX* bias, int n,
                                       int cols, int N, int K)
{
    const int num_cells = gemm_cells(K);
    vf sum[M];
    for (int m = 0; m < M; m++) sum[m] = bias != nullptr ? vf_load_n(bias + n, cols) : vf{};
    const floatX* row = weight + (size_t)n * K;
    for (int first = 0; first < num_cells; first += VF) {
        const int k = first * GEMM_PAIR, over = k + GEMV_AHEAD - K;
        const floatX* ahead = over < 0 ? row + k + GEMV_AHEAD : row + (size_t)VF * K + over;
        vf w[VF];
#pragma GCC unroll 16
        for (int i = 0; i < VF; i++) {
            const floatX* at = row + (size_t)(i < cols ? i : 0) * K + k;
            __builtin_prefetch(ahead + (size_t)i * K, 0, 2);
            w[i] = gemv_load(at, K - k);
        }
        vf_transpose<1>(w);
        if (first + VF <= num_cells) {
#pragma GCC unroll 16
            for (int i = 0; i < VF; i++)
                for (int m = 0; m < M; m++)
                    sum[m] = gemm_add(gemm_cell(inp + (size_t)m * num_cells + first + i), w[i], sum[m]);
        } else {
            for (int i = 0; first + i < num_cells; i++)
                for (int m = 0; m < M; m++)
                    sum[m] = gemm_add(gemm_cell(inp + (size_t)m * num_cells + first + i), w[i], sum[m]);
        }
    }
    for (int m = 0; m < M; m++) vf_store_n(out + (size_t)m * N + n, sum[m], cols);
}

/* VF cells of a (K,N) weight, of which `cols` exist; of a pair the second row need not. */
template <class T> SIMD vf gemv_load_cells(const T* weight, int N, int num_k, int cols)
{
    if constexpr (GEMM_PAIR == 1) return cols >= VF ? vf_load(weight) : vf_load_n(weight, cols);
    else {
        const size_t row_bytes = gemm_min(cols, VF) * sizeof(T);
        T first[VF], second[VF];
        float cells[VF];
        if (cols < VF || num_k == 1) {
            memset((void*)first, 0, sizeof first), memset((void*)second, 0, sizeof second);
            memcpy((void*)first, weight, row_bytes);
            if (num_k > 1) memcpy((void*)second, weight + N, row_bytes);
            pair_rows<vh, vu>(cells, first, second);
        } else pair_rows<vh, vu>(cells, weight, weight + N);
        return vf_load(cells);
    }
}

/* sum (M,cols) += inp (M,NC) * weight (NC,cols), NC in cells, of which the last has num_k numbers; rows are STRIP,
 * num_cells and cells of N apart. */
template <int M, int NC> static void gemv_add(float (&sum)[M][GEMV_STRIP], const float* inp, const floatX* weight,
                                              int cols, int N, int num_cells, int num_k)
{
    const size_t cell_elems = (size_t)GEMM_PAIR * N;
    for (int j = 0; j < cols; j += VF) {
        vf acc[M];
        for (int m = 0; m < M; m++) acc[m] = vf_load(sum[m] + j);
#pragma GCC unroll 8
        for (int c = 0; c < NC; c++) {
            const floatX* at = weight + c * cell_elems + j;
            for (int row = 0; row < GEMM_PAIR; row++) __builtin_prefetch(at + NC * cell_elems + row * N, 0, 2);
            const vf w = gemv_load_cells(at, N, c + 1 < NC ? GEMM_PAIR : num_k, cols - j);
            for (int m = 0; m < M; m++) acc[m] = gemm_add(gemm_cell(inp + (size_t)m * num_cells + c), w, acc[m]);
        }
        for (int m = 0; m < M; m++) vf_store(sum[m] + j, acc[m]);
    }
}

/* Columns n on of out: a strip. */
template <int M> static void gemv_strip(floatX* out, const float* inp, const floatX* weight, const floatX* bias, int n,
                                        int cols, int N, int K)
{
    const int num_cells = gemm_cells(K), num_whole = K / GEMM_PAIR;
    const size_t cell_elems = (size_t)GEMM_PAIR * N;
    float sum[M][GEMV_STRIP] = {};
    for (int m = 0; m < M && bias != nullptr; m++) vf_copy(sum[m], bias + n, cols);
    int c = 0;
    for (; c + GEMV_K <= num_whole; c += GEMV_K)
        gemv_add<M, GEMV_K>(sum, inp + c, weight + c * cell_elems + n, cols, N, num_cells, GEMM_PAIR);
    for (; c < num_cells; c++)
        gemv_add<M, 1>(sum, inp + c, weight + c * cell_elems + n, cols, N, num_cells, K - c * GEMM_PAIR);
    for (int m = 0; m < M; m++) vf_copy(out + (size_t)m * N + n, sum[m], cols);
}

template <int M> static void gemv_rows(floatX* out, const float* inp, const floatX* weight, const floatX* bias, int N,
                                       int K, bool out_in)
{
    const int num_threads = gemm_min(omp_get_max_threads(), gemm_space.num_threads);
    const int share = (int)round_up(gemm_div_up(N, num_threads), VF), width = out_in ? VF : gemm_min(GEMV_STRIP, share);
    #pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int n = 0; n < N; n += width) {
        const int cols = gemm_min(width, N - n);
        if (out_in) gemv_dots<M>(out, inp, weight, bias, n, cols, N, K);
        else gemv_strip<M>(out, inp, weight, bias, n, cols, N, K);
    }
}

/* A row of inp as cells. */
static void gemv_pack(float* cells, const floatX* row, int K)
{
    if (GEMM_PAIR == 1) return vf_copy(cells, row, K);
    memset(cells + gemm_cells(K) - 1, 0, sizeof *cells);
    memcpy((void*)cells, row, K * sizeof(floatX));
}

/* out_in: the weight is (N,K). False, and nothing done, if there are too many rows for this. */
static bool gemv(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int M, int N, int K,
                 bool out_in)
{
    const size_t num_cells = gemm_cells(K);
    if (M > GEMV_ROWS || M * num_cells > GEMM_A_CELLS) return false;
    float* cells = gemm_space.a;            // inp row by row
    for (int m = 0; m < M; m++) gemv_pack(cells + m * num_cells, inp + (size_t)m * K, K);
    switch (M) {
    case 1: gemv_rows<1>(out, cells, weight, bias, N, K, out_in); break;
    case 2: gemv_rows<2>(out, cells, weight, bias, N, K, out_in); break;
    case 4: gemv_rows<4>(out, cells, weight, bias, N, K, out_in); break;
    case 8: gemv_rows<8>(out, cells, weight, bias, N, K, out_in); break;
    default: return false;                  // the decoder pads to a power of two
    }
    return true;
}
