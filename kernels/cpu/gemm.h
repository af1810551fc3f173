/* gemm.h: the CPU build's own GEMM; sums are in fp32 whatever is stored.
 *   C (M,N) = init + op(A) (M,K) * op(B) (K,N)     all row-major; op transposes when asked; A, B floatX, C that or fp32
 *   init    is C itself (accumulate), a row added to every row of C (a bias), or zero
 * how     A tile of MR x NR of C stays in registers while K runs. A is packed once per block, by all threads for all,
 *         into panels of MR rows; each thread packs one panel of NR columns of B at a time into its nearest cache and
 *         runs it against all of A, while the next panel's source lines are prefetched. Packing and prefetching are
 *         what matters here: with few rows (a micro-batch of 256 tokens) each weight is used for little arithmetic, and
 *         there libraries lose most of their time reading B. A 16-bit C is summed over the whole of K in fp32, and
 *         rounded once.
 * cells   What a tile multiplies: 32 bits of packed A and B. With AVX512_BF16 and bf16 stored a cell is a pair that
 *         follows each other in k, and one instruction (vdpbf16ps) multiplies and adds both; an odd K gets a zero.
 *         Else a cell is an fp32 number, to which 16 bits are widened when packed.
 * exact   each element of C is summed over k in ascending order, cell by cell, whatever the number of threads: same
 *         bits. (OpenBLAS 0.3.21 with its Haswell kernels gives other bits with two threads than with one.) vdpbf16ps
 *         multiplies exactly, rounds each of its additions to nearest, and takes denormals, operands and sums, as 0
 * source  the tiling is that of Goto & van de Geijn 2008 and of BLIS; A shared, B streamed by panels is our choice */
#pragma once
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <omp.h>
#include <sys/mman.h>
#include <type_traits>
#include "kernels/common.cuh"
#include "simd.h"

#ifdef __AVX512F__
enum { GEMM_MR = 8 };           // 8 x 3 accumulators + 3 of B + 1 of A in 32 registers
#else
enum { GEMM_MR = 4 };           // 4 x 3 + 3 + 1 in 16 registers
#endif
enum {
    GEMM_NV = 3,                // vectors across a tile
    GEMM_NR = GEMM_NV * VF,
    GEMM_PAIR = VF_BF16_PAIRS && std::is_same<floatX, __nv_bfloat16>::value ? 2 : 1,     // terms of K in a cell
    GEMM_KC = 512 * GEMM_PAIR,  // k run in one go: a panel of B, KC x NR, is what stays in the second-level cache
    GEMM_KB = 3 * GEMM_KC,
    GEMM_MB = 1024,             // largest block of A, MB x KB: 6 MiB of cells, for the last-level cache
    GEMM_A_CELLS = GEMM_MB * GEMM_KB / GEMM_PAIR,
    GEMM_SUMS = 1 << 20,        // of a 16-bit C whose K does not fit one block of A
    GEMM_STRIP = 8 * GEMM_MR,   // rows of A that are packed together
    GEMM_PACK_AHEAD = 16,       // rows of a transposed A that are on their way meanwhile
};

static int gemm_min(int a, int b) { return a < b ? a : b; }
static int gemm_max(int a, int b) { return a > b ? a : b; }
static int gemm_div_up(int a, int b) { return (a + b - 1) / b; }
static int gemm_cells(int K) { return gemm_div_up(K, GEMM_PAIR); }

/* A thread's share of a loop: items first to end, in one word, so that two threads can take from it. */
typedef struct { alignas(64) uint64_t first_end; } GemmRun;

/* Room for packed A, shared; for packed B and the share of the work, one each; for the sums of a 16-bit C, a panel each
 * or one for each panel of C. */
static struct { float *a, *b, *c; GemmRun* runs; int num_threads; } gemm_space;
static constexpr bool GEMM_IS_16BIT = sizeof(floatX) < sizeof(float);

static float* gemm_alloc(size_t elems)
{
    const size_t huge_page_bytes = 2 << 20;
    const size_t bytes = (elems * sizeof(float) + huge_page_bytes - 1) / huge_page_bytes * huge_page_bytes;
    float* p = (float*)aligned_alloc(huge_page_bytes, bytes);
    ENSURE(p != NULL, "cannot allocate %zu bytes for packed matrices", bytes);
    madvise(p, bytes, MADV_HUGEPAGE);
    memset(p, 0, bytes);         // touched now: no page fault in a step
    return p;
}

static void gemm_init()
{
    if (gemm_space.a) return;
    gemm_space.num_threads = omp_get_max_threads();
    gemm_space.a = gemm_alloc(GEMM_A_CELLS);
    gemm_space.b = gemm_alloc((size_t)gemm_space.num_threads * gemm_cells(GEMM_KC) * GEMM_NR);
    gemm_space.runs = (GemmRun*)gemm_alloc((size_t)gemm_space.num_threads * sizeof(GemmRun) / sizeof(float));
    if (GEMM_IS_16BIT) gemm_space.c = gemm_alloc(gemm_max(gemm_space.num_threads * GEMM_MB * GEMM_NR, GEMM_SUMS));
}

/* Each thread goes through a run of its own, so that it knows what comes next and can fetch it ahead; one that is done
 * takes from the ends of the others', so that none that shares its core holds up the rest. */
static void gemm_run_begin(int thread, int first, int end)
{
    __atomic_store_n(&gemm_space.runs[thread].first_end, (uint64_t)first << 32 | (uint32_t)end, __ATOMIC_RELEASE);
}

/* The next item of this thread, or -1. */
static int gemm_run_take(int thread, int num_threads)
{
    for (int i = 0; i < num_threads; i++) {
        uint64_t* run = &gemm_space.runs[(thread + i) % num_threads].first_end;
        uint64_t old = __atomic_load_n(run, __ATOMIC_ACQUIRE);
        while ((uint32_t)(old >> 32) < (uint32_t)old) {
            const uint64_t taken = i == 0 ? old + (1ull << 32) : old - 1;
            if (__atomic_compare_exchange_n(run, &old, taken, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
                return i == 0 ? (int)(old >> 32) : (int)(uint32_t)taken;
        }
    }
    return -1;
}

static void gemm_free()
{
    free(gemm_space.a);
    free(gemm_space.b);
    free(gemm_space.c);
    free(gemm_space.runs);
    gemm_space = {};
}

/* A cell in all lanes: as bits, since a pair is no number. */
SIMD vf gemm_cell(const float* a)
{
    if (GEMM_PAIR == 1) return vf_set(*a);
    int bits;
    memcpy(&bits, a, sizeof bits);
    return (vf)(bits - (vi){});
}

SIMD vf gemm_add(vf a, vf b, vf sum)
{
    if constexpr (GEMM_PAIR == 1) return vf_fma(a, b, sum);
    else return vf_dot_pair(a, b, sum);
}

/* c (MR rows, NV vectors) = init + a * b over K cells. The rows of b, one per cell, are ldb apart. a is a packed panel,
 * a[k][MR], or MR rows that are lda apart. */
template<int NV, bool A_IN_ROWS>
__attribute__((noinline)) static void gemm_tile(float* c, size_t ldc, const float* init, size_t ld_init, const float* a,
                                                size_t lda, const float* b, size_t ldb, int K)
{
    vf acc[GEMM_MR][NV];
#pragma GCC unroll 8
    for (int i = 0; i < GEMM_MR; i++)
#pragma GCC unroll 3
        for (int j = 0; j < NV; j++) acc[i][j] = vf_load(init + i * ld_init + j * VF);
    int k = K;                  // at least 1
    do {
        vf bk[NV];
#pragma GCC unroll 3
        for (int j = 0; j < NV; j++) bk[j] = vf_load(b + j * VF);
#pragma GCC unroll 8
        for (int i = 0; i < GEMM_MR; i++) {
            vf aik = gemm_cell(a + (A_IN_ROWS ? i * lda : i));
#pragma GCC unroll 3
            for (int j = 0; j < NV; j++) acc[i][j] = gemm_add(aik, bk[j], acc[i][j]);
        }
        a += A_IN_ROWS ? 1 : GEMM_MR;
        b += ldb;
    } while (--k > 0);
#pragma GCC unroll 8
    for (int i = 0; i < GEMM_MR; i++)
#pragma GCC unroll 3
        for (int j = 0; j < NV; j++) vf_store(c + i * ldc + j * VF, acc[i][j]);
}

/* The same for a number of vectors that is known at run time. */
template<bool A_IN_ROWS>
static void gemm_tile_any(int num_vectors, float* c, size_t ldc, const float* init, size_t ld_init, const float* a,
                          size_t lda, const float* b, size_t ldb, int K)
{
    switch (num_vectors) {
    case 1: gemm_tile<1, A_IN_ROWS>(c, ldc, init, ld_init, a, lda, b, ldb, K); break;
    case 2: gemm_tile<2, A_IN_ROWS>(c, ldc, init, ld_init, a, lda, b, ldb, K); break;
    default: gemm_tile<3, A_IN_ROWS>(c, ldc, init, ld_init, a, lda, b, ldb, K); break;
    }
}

/* A tile that sticks out of C goes through a full-sized copy. */
static void gemm_tile_edge(int num_vectors, float* c, size_t ldc, const float* init, size_t ld_init,
                           const float* a, const float* b, int K, int rows, int cols)
{
    float tile[GEMM_MR * GEMM_NR] = {};
    for (int i = 0; i < rows; i++) memcpy(tile + i * GEMM_NR, init + i * ld_init, cols * sizeof(float));
    gemm_tile_any<false>(num_vectors, tile, GEMM_NR, tile, GEMM_NR, a, 0, b, num_vectors * VF, K);
    for (int i = 0; i < rows; i++) memcpy(c + i * ldc, tile + i * GEMM_NR, cols * sizeof(float));
}

/* Four cells as a matrix holds them in a row: numbers, or pairs as they are. */
template <int CELL, class S> SIMD vf4 gemm_load_cells(const S* p)
{
    if constexpr (CELL == 1) return vf4_load(p);
    else return vf4_load((const float*)p);
}

template <int CELL, class D, class S>
SIMD void gemm_transpose4x4(D* dst, size_t ld_dst, const S* src, size_t ld_src)
{
    vf4 a = gemm_load_cells<CELL>(src), b = gemm_load_cells<CELL>(src + ld_src);
    vf4 c = gemm_load_cells<CELL>(src + 2 * ld_src), d = gemm_load_cells<CELL>(src + 3 * ld_src);
    vf4 ab01 = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd01 = __builtin_shufflevector(c, d, 0, 4, 1, 5);
    vf4 ab23 = __builtin_shufflevector(a, b, 2, 6, 3, 7), cd23 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    a = __builtin_shufflevector(ab01, cd01, 0, 1, 4, 5);
    b = __builtin_shufflevector(ab01, cd01, 2, 3, 6, 7);
    c = __builtin_shufflevector(ab23, cd23, 0, 1, 4, 5);
    d = __builtin_shufflevector(ab23, cd23, 2, 3, 6, 7);
    vf4_store(dst, a);
    vf4_store(dst + ld_dst, b);
    vf4_store(dst + 2 * ld_dst, c);
    vf4_store(dst + 3 * ld_dst, d);
}

/* dst (rows, cols) = transpose of src (cols, rows), whose elements are cells of CELL numbers */
template <int CELL, class D, class S>
static void gemm_transpose(D* dst, size_t ld_dst, const S* src, size_t ld_src, int rows, int cols)
{
    for (int col = 0; col < cols; col += 4) {
        int row = 0;
        if (col + 4 <= cols)
            for (; row + 4 <= rows; row += 4)
                gemm_transpose4x4<CELL>(dst + row * ld_dst + col, ld_dst, src + col * ld_src + row * CELL, ld_src);
        for (; row < rows; row++)
            for (int i = col; i < col + 4 && i < cols; i++)
                if constexpr (CELL == 1) store_f(dst + row * ld_dst + i, load_f(src[i * ld_src + row]));
                else memcpy(dst + row * ld_dst + i, src + i * ld_src + row * CELL, sizeof *dst);
    }
}

/* WIDTH elements, a multiple of 4. */
template <int WIDTH, class T> SIMD void gemm_copy(float* dst, const T* src)
{
    if (sizeof(T) == sizeof(float)) { memcpy(dst, src, WIDTH * sizeof(float)); return; }
    for (int j = 0; j < WIDTH; j += 4) vf4_store(dst + j, vf4_load(src + j));
}

/* `cols` cells from a source that holds them k by k; of a pair the second row need not exist. */
template <class T> SIMD void gemm_pack_cells(float* dst, const T* src, size_t ld, int num_k, int cols)
{
    if constexpr (GEMM_PAIR == 1) {
        if (cols == GEMM_NR) gemm_copy<GEMM_NR>(dst, src);
        else if (cols == GEMM_MR) gemm_copy<GEMM_MR>(dst, src);
        else vf_copy(dst, src, cols);
    } else {
        int j = 0;
        if (num_k > 1) {
            for (; j + VF <= cols; j += VF) pair_rows<vh, vu>(dst + j, src + j, src + ld + j);
            for (; j + 8 <= cols; j += 8) pair_rows<vh8, vu8>(dst + j, src + j, src + ld + j);
        }
        for (; j < cols; j++) pair_store(dst + j, src[j], num_k > 1 ? src[ld + j] : T(0.0f));
    }
}

/* A panel dst[k][width] for the cells of k < K, from a source that holds it k by k (k_major) or column by column.
 * Columns past `cols` become 0. Widths are multiples of 4. */
template <class T>
static void gemm_pack(float* dst, int width, const T* src, size_t ld, bool k_major, int K, int cols)
{
    const int num_cells = gemm_cells(K), num_whole = K / GEMM_PAIR;
    if (k_major) {
        for (int i = 0; i < num_cells; i++)
            gemm_pack_cells(dst + i * width, src + i * GEMM_PAIR * ld, ld, K - i * GEMM_PAIR, cols);
    } else {
        gemm_transpose<GEMM_PAIR>(dst, width, src, ld, num_whole, cols);
        if constexpr (GEMM_PAIR > 1)
            for (int j = 0; j < cols && num_whole < num_cells; j++)
                pair_store(dst + num_whole * width + j, src[j * ld + K - 1], T(0.0f));
    }
    if (cols < width)
        for (int i = 0; i < num_cells; i++) memset(dst + i * width + cols, 0, (width - cols) * sizeof(float));
}

/* A matrix as the caller stores it, transposed or not. */
typedef struct { const floatX* p; size_t ld; bool transposed; } GemmOperand;

SIMD const floatX* gemm_at(GemmOperand x, int row, int col)
{
    return x.transposed ? x.p + (size_t)col * x.ld + row : x.p + (size_t)row * x.ld + col;
}

/* Walks the cache lines of a part of a matrix, a few at a time. */
typedef struct { const char* row; size_t ld_bytes; int num_rows, row_bytes, offset; } GemmPrefetch;

static GemmPrefetch gemm_prefetch_start(GemmOperand x, int row, int col, int num_rows, int num_cols)
{
    const char* first = (const char*)gemm_at(x, row, col);
    const int elem_bytes = sizeof(floatX);
    if (x.transposed) return { first, x.ld * elem_bytes, num_cols, num_rows * elem_bytes, 0 };
    return { first, x.ld * elem_bytes, num_rows, num_cols * elem_bytes, 0 };
}

SIMD void gemm_prefetch(GemmPrefetch* p, int num_lines)
{
    for (; num_lines > 0 && p->num_rows > 0; num_lines--) {
        __builtin_prefetch(p->row + p->offset, 0, 2);
        p->offset += 64;
        if (p->offset < p->row_bytes) continue;
        p->offset = 0;
        p->row += p->ld_bytes;
        p->num_rows--;
    }
}

/* The rows of C below a tile, so that the next one does not wait for them: its loads would come all at once. Into the
 * second-level cache: rows that are a multiple of 4 KiB apart would drive one another out of the nearest. */
SIMD void gemm_prefetch_tile(const float* c, size_t ldc, int rows, int cols)
{
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j += 16) __builtin_prefetch(c + i * ldc + j, 0, 2);
}

/* c (rows, cols) = init + packed A * packed B over K cells, tile by tile, with `next` prefetched on the way. */
static void gemm_panel(float* c, size_t ldc, const float* init, size_t ld_init, const float* a, const float* b,
                       int rows, int cols, int K, GemmPrefetch next)
{
    const int num_vectors = gemm_div_up(cols, VF), num_tiles = gemm_div_up(rows, GEMM_MR);
    const int lines_per_tile = gemm_div_up(next.num_rows * gemm_div_up(next.row_bytes, 64), num_tiles);
    for (int m = 0; m < rows; m += GEMM_MR, a += GEMM_MR * K, c += GEMM_MR * ldc, init += GEMM_MR * ld_init) {
        gemm_prefetch(&next, lines_per_tile);
        gemm_prefetch_tile(c + GEMM_MR * ldc, ldc, gemm_min(GEMM_MR, rows - m - GEMM_MR), cols);
        if (m + GEMM_MR <= rows && cols == num_vectors * VF)
            gemm_tile_any<false>(num_vectors, c, ldc, init, ld_init, a, 0, b, cols, K);
        else
            gemm_tile_edge(num_vectors, c, ldc, init, ld_init, a, b, K, gemm_min(GEMM_MR, rows - m), cols);
    }
}

/* One GEMM, and the block of A that is packed: rows m0 on, k0 <= k < k1. */
template <class TC> struct GemmJob {
    TC* C;
    size_t ldc;
    GemmOperand A, B;
    int M, N, K;
    const floatX* bias;
    bool accumulate;
    int kc, kb, mb;             // GEMM_KC, KB, MB, made smaller so that the pieces of K and M come out alike
};
typedef struct { int m0, num_rows, k0, k1; } GemmBlock;

/* Where panel m (a multiple of MR) of the block's piece k is. */
static float* gemm_packed_a(GemmBlock block, int m, int k, int num_k)
{
    const size_t padded_rows = (size_t)gemm_div_up(block.num_rows, GEMM_MR) * GEMM_MR;
    return gemm_space.a + (k - block.k0) / GEMM_PAIR * padded_rows + (size_t)m * gemm_cells(num_k);
}

/* A strip of panels. Where A is stored k by k all of them are filled at once, so that its lines are read whole. */
template <class TC> static void gemm_pack_a(const GemmJob<TC>* g, GemmBlock block, int first, int k)
{
    const int num_k = gemm_min(g->kc, block.k1 - k), end = gemm_min(first + GEMM_STRIP, block.num_rows);
    if (g->A.transposed && first + GEMM_STRIP <= block.num_rows) {
        float* dst = gemm_packed_a(block, first, k, num_k);
        const floatX* src = gemm_at(g->A, block.m0 + first, k);
        for (int i = 0; i < num_k; i += GEMM_PAIR, src += GEMM_PAIR * g->A.ld, dst += GEMM_MR) {
            for (int row = GEMM_PACK_AHEAD; row < GEMM_PACK_AHEAD + GEMM_PAIR; row++)
                for (int m = 0; m < GEMM_STRIP; m += 64 / (int)sizeof(floatX))
                    __builtin_prefetch(src + (i + row < num_k ? row * g->A.ld : 0) + m);
            for (int m = 0; m < GEMM_STRIP; m += GEMM_MR)
                gemm_pack_cells(dst + (size_t)m * gemm_cells(num_k), src + m, g->A.ld, num_k - i, GEMM_MR);
        }
        return;
    }
    for (int m = first; m < end; m += GEMM_MR)
        gemm_pack(gemm_packed_a(block, m, k, num_k), GEMM_MR, gemm_at(g->A, block.m0 + m, k), g->A.ld,
                  g->A.transposed, num_k, gemm_min(GEMM_MR, end - m));
}

/* The piece of B that is packed for columns n on and k on; nothing past the last. */
template <class TC> static GemmPrefetch gemm_prefetch_b(const GemmJob<TC>* g, GemmBlock block, int n, int k)
{
    if (n >= g->N) return {};
    return gemm_prefetch_start(g->B, k, n, gemm_min(g->kc, block.k1 - k), gemm_min(GEMM_NR, g->N - n));
}

/* Columns n on, one panel of them, of C's rows m .. m + rows of the block; `sums`: the panel of a 16-bit C. */
template <class TC>
static void gemm_columns(const GemmJob<TC>* g, GemmBlock block, int n, int m, int rows, float* packed_b, float* sums)
{
    constexpr bool IN_PLACE = sizeof(TC) == sizeof(float);
    const int cols = gemm_min(GEMM_NR, g->N - n), width = gemm_div_up(cols, VF) * VF;
    TC* result = g->C + (size_t)(block.m0 + m) * g->ldc + n;
    float *c = IN_PLACE ? (float*)result : sums + m * GEMM_NR, bias[GEMM_NR] = {};
    const size_t ldc = IN_PLACE ? g->ldc : (size_t)GEMM_NR;
    if (g->bias != nullptr) vf_copy(bias, g->bias + n, cols);
    if (!IN_PLACE && g->accumulate && block.k0 == 0)
        for (int i = 0; i < rows; i++) vf_copy(c + i * GEMM_NR, result + i * g->ldc, cols);
    for (int k = block.k0; k < block.k1; k += g->kc) {
        const int num_k = gemm_min(g->kc, block.k1 - k);
        gemm_pack(packed_b, width, gemm_at(g->B, k, n), g->B.ld, !g->B.transposed, num_k, cols);
        const bool from_c = k > 0 || g->accumulate;
        gemm_panel(c, ldc, from_c ? c : bias, from_c ? ldc : 0, gemm_packed_a(block, m, k, num_k), packed_b, rows, cols,
                   gemm_cells(num_k), k + g->kc < block.k1 ? gemm_prefetch_b(g, block, n, k + g->kc)
                                                           : gemm_prefetch_b(g, block, n + GEMM_NR, block.k0));
    }
    if (!IN_PLACE && block.k1 == g->K)
        for (int i = 0; i < rows; i++) vf_copy(result + i * g->ldc, c + i * GEMM_NR, cols);
}

/* How many pieces the rows are cut into, beside the panels of columns, so that all threads are busy to the end. */
static int gemm_num_cuts(int num_panels, int M, int num_threads)
{
    if (num_panels < 4 * num_threads) return gemm_min(4, gemm_div_up(M, GEMM_STRIP));
    const bool uneven = num_panels % num_threads != 0 && num_panels < 16 * num_threads;
    return uneven && M >= 512 ? 2 : 1;              // each cut packs B again: with fewer rows that costs more
}

/* C (M,N) = A * B, + C (accumulate) or + bias in every row (or null). Called by one thread; works with all. */
template <class TC>
static void gemm(TC* C, size_t ldc, GemmOperand A, GemmOperand B, int M, int N, int K, const floatX* bias,
                 bool accumulate)
{
    const int num_panels = gemm_div_up(N, GEMM_NR), num_pieces = gemm_div_up(K, GEMM_KC);
    const int kc = gemm_cells(gemm_div_up(K, num_pieces)) * GEMM_PAIR;
    const bool in_place = sizeof(TC) == sizeof(float);
    int kb = kc * gemm_min(num_pieces, GEMM_KB / GEMM_KC), most_rows = GEMM_A_CELLS / (kb / GEMM_PAIR);
    if (!in_place) {            // a panel of sums for all of K, or where that leaves few rows, for each panel of C
        const int kb_whole = kc * num_pieces, rows_whole = gemm_min(GEMM_MB, GEMM_A_CELLS / (kb_whole / GEMM_PAIR));
        most_rows = gemm_min(GEMM_MB, gemm_min(most_rows, GEMM_SUMS / (num_panels * GEMM_NR)));
        if (rows_whole >= most_rows) kb = kb_whole, most_rows = rows_whole;
    }
    const bool sums_per_panel = kb < K;
    most_rows = most_rows / GEMM_MR * GEMM_MR;
    ENSURE(most_rows > 0, "a GEMM of %d columns over %d terms in %s: at most %d columns, or %d terms", N, K,
           FLOATX_NAME, GEMM_SUMS / GEMM_MR, GEMM_A_CELLS / GEMM_MR * GEMM_PAIR);
    const int mb = gemm_div_up(gemm_div_up(M, gemm_div_up(M, most_rows)), GEMM_MR) * GEMM_MR;
    const GemmJob<TC> job = {C, ldc, A, B, M, N, K, bias, accumulate, kc, kb, mb};
    const int most_threads = gemm_min(omp_get_max_threads(), gemm_space.num_threads);
    const int num_cuts = gemm_num_cuts(num_panels, gemm_min(M, mb), most_threads);
    const long num_items = (long)num_panels * num_cuts;
    #pragma omp parallel num_threads(most_threads)
    {
        const int thread = omp_get_thread_num(), num_threads = omp_get_num_threads();
        const int first = (int)(num_items * thread / num_threads), end = (int)(num_items * (thread + 1) / num_threads);
        float* packed_b = gemm_space.b + (size_t)thread * gemm_cells(GEMM_KC) * GEMM_NR;
        for (int m0 = 0; m0 < M; m0 += mb)
            for (int k0 = 0; k0 < K; k0 += kb) {
                const GemmBlock block = {m0, gemm_min(mb, M - m0), k0, gemm_min(k0 + kb, K)};
                GemmPrefetch first_panel = gemm_prefetch_b(&job, block, first / num_cuts * GEMM_NR, k0);
                gemm_prefetch(&first_panel, INT_MAX);
                gemm_run_begin(thread, first, end);
                #pragma omp for collapse(2) schedule(dynamic)
                for (int k = block.k0; k < block.k1; k += kc)
                    for (int m = 0; m < block.num_rows; m += GEMM_STRIP) gemm_pack_a(&job, block, m, k);
                const int cut_rows = gemm_div_up(gemm_div_up(block.num_rows, num_cuts), GEMM_MR) * GEMM_MR;
                for (int item; (item = gemm_run_take(thread, num_threads)) >= 0; ) {
                    const int m = item % num_cuts * cut_rows, rows = gemm_min(cut_rows, block.num_rows - m);
                    const size_t panel = sums_per_panel ? item / num_cuts : thread;
                    float* sums = in_place ? nullptr : gemm_space.c + panel * mb * GEMM_NR;
                    if (rows > 0) gemm_columns(&job, block, item / num_cuts * GEMM_NR, m, rows, packed_b, sums);
                }
                #pragma omp barrier
            }
    }
}
