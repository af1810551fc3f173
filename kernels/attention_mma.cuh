/* attention_mma.cuh: attention on tensor cores, the 16-bit half of attention.cuh, which has the formulas and shapes.
 * GEMMs multiply bf16 or fp16 and sum in fp32; probabilities and ds are rounded to floatX between two GEMMs.
 * how     A block has 4 warps, each with 16 or 32 rows of one side: queries (forward, dq) or keys (dk and dv). The
 *         other side comes in tiles through two buffers, copied by cp.async while the one before is worked on: one
 *         barrier a tile. What a warp computes of a tile, scores and ds, stays in its registers: an accumulator's
 *         layout is that of the next GEMM's left operand. All three kernels are made of the same two GEMMs,
 *         mma_dot and mma_add. Head elements are padded with zeros to HSP: 64, 128 or 256. Rows are in shared memory in
 *         chunks of 16 bytes, chunk c of row r at c ^ (r % 8), so that the 8 rows of an ldmatrix hit 32 banks.
 * needs   HS % 8 == 0, 16-byte aligned tensors, scale > 0; any T. Other head sizes take the 32-bit path.
 * exact   no atomics, no block waits for another: dq is summed over keys by the block of its queries, dk and dv over
 *         queries and the query heads of a group by the block of their keys. The price is that the backward computes
 *         scores and dp twice: 7 GEMMs instead of 5.
 * source  Dao 2023, arXiv:2307.08691 */
#pragma once
#include "attention_dims.cuh"

/* ---- shapes, which estimates of the time read too (model/kernel_time.cuh) */

static constexpr int MMA_BLOCK = 128;                // 4 warps

/* What a warp and a block take of each side. The sizes keep a block within 99 KiB of shared memory, what the
 * smallest GPU has, and a thread within 255 registers. */
template <int HSP, bool DROPS = false> struct MmaShape {
    static constexpr int CHUNKS = HSP / 8;                                     // of 16 bytes, in a row
    static constexpr int M_FORWARD = HSP <= (DROPS ? 64 : 128) ? 2 : 1;        // 16-row tiles of a warp
    static constexpr int M_BACKWARD = HSP <= 64 ? 2 : 1;
    static constexpr int ROWS_FORWARD = 64 * M_FORWARD, ROWS_BACKWARD = 64 * M_BACKWARD;
    static constexpr int TILE_FORWARD = HSP <= 64 ? 64 : 32;                   // rows of a tile of the other side
    static constexpr int TILE_BACKWARD = HSP <= 64 ? 64 : HSP <= 128 ? 32 : 16;
    static constexpr int SLICE_Q = HSP <= 128 ? 32 : 16;                       // rows of it between two roundings
    static constexpr int SLICE_KV = HSP == 128 ? 32 : 16;
    static constexpr int COLS = HSP <= 128 ? HSP : 128;                        // of dk and dv in one block
    static constexpr size_t FORWARD_ELEMS = (size_t)(ROWS_FORWARD + 4 * TILE_FORWARD) * HSP;
    static constexpr size_t BACKWARD_ELEMS = (size_t)(2 * ROWS_BACKWARD + 4 * TILE_BACKWARD) * HSP;
};

/* How many of the left operands, q and dout, a warp of the kernel of dq keeps in registers rather than read them from
 * shared memory for each slice, which bounds that kernel: as many as ptxas fits into 255 registers without a spill.
 * arch is compute capability times 100, as __CUDA_ARCH__ has it; 0 is the emulator. */
HOSTDEV constexpr int mma_num_held(int hsp, int arch)
{
    const bool one = hsp == 64 ? arch >= 1200 : arch >= 1000 && arch < 1200;
    return hsp > 128 ? 0 : one ? 1 : 2;
}

#if !defined(DEVICE_CPU) && !defined(PREC_FP32)

static constexpr int STATS_ROWS = 128;               // rows of statistics are padded to whole blocks of queries

/* Statistics of the rows as the backward kernels read them: log2(e) * lse, then delta, (B,NH,rows) each. Rows past T
 * have lse = inf, which makes every p = exp(s - lse) of theirs 0. */
HOSTDEV size_t stats_rows(AttentionDims a) { return ((size_t)a.T + STATS_ROWS - 1) / STATS_ROWS * STATS_ROWS; }
HOSTDEV size_t stats_first(AttentionDims a, int b, int h) { return ((size_t)b * a.NH + h) * stats_rows(a); }
HOSTDEV size_t stats_elems(AttentionDims a) { return stats_first(a, a.B, 0); }

static constexpr float LOG2_E = 1.44269504f, LN_2 = 0.69314718f;

/* ---- pieces */

DEV uint32_t pack_pair(float lo, float hi)
{
#ifdef PREC_BF16
    const __nv_bfloat162 pair = __floats2bfloat162_rn(lo, hi);
#else
    const __half2 pair = __floats2half2_rn(lo, hi);
#endif
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}

/* Where element 8 * chunk of a row is in a tile. */
template <int HSP> DEV int swizzled(int row, int chunk) { return row * HSP + ((chunk ^ (row & 7)) << 3); }

/* Starts to copy rows first.. of a head's (T, HS) matrix to a tile; zeros past T and HS. By the whole block. */
template <int HSP, int ROWS> DEV void mma_load(floatX* tile, const floatX* src, size_t ld, int first, AttentionDims a)
{
    constexpr int CHUNKS = HSP / 8, STEP = MMA_BLOCK / CHUNKS;
    const int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    src += (size_t)(first + row) * ld + chunk * 8;   // not read where it is outside
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP)
        cp_async16(tile + swizzled<HSP>(row + i, chunk), src + i * ld, first + row + i < a.T && chunk * 8 < a.HS);
}

/* a[m] = elements 16 k .. of rows[16 m ..], for M tiles of 16 rows: the left operand of a GEMM over the head. rows
 * points at row 0 or 16 of eight of its tile, as cols does below: swizzling depends on the lane alone. */
template <int HSP, int M> DEV void mma_left(uint32_t (&a)[M][4], const floatX* rows, int k)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < M; m++)
        ldmatrix_x4(a[m], rows + m * 16 * HSP + swizzled<HSP>(lane & 15, 2 * k + (lane >> 4)));
}

/* The left operand of the whole head, to stay in registers. */
template <int HSP, int M> DEV void mma_hold(uint32_t (&held)[HSP / 16][M][4], const floatX* rows)
{
#pragma unroll
    for (int k = 0; k < HSP / 16; k++) mma_left<HSP>(held[k], rows, k);
}

/* dot[m][n] += a[m] . elements 16 k .. of cols[8 n ..], for N tiles of 8 columns. */
template <int HSP, int M, int N> DEV void mma_dot_step(float (&dot)[M][N][4], const uint32_t (&a)[M][4],
                                                       const floatX* cols, int k)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        uint32_t b[4];
        ldmatrix_x4(b, cols + n * 8 * HSP + swizzled<HSP>((lane & 7) + (lane >> 4) * 8, 2 * k + (lane >> 3 & 1)));
        const uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
#pragma unroll
        for (int m = 0; m < M; m++) {
            mma_m16n8k16<floatX>(dot[m][n], a[m], b0);
            mma_m16n8k16<floatX>(dot[m][n + 1], a[m], b1);
        }
    }
}

template <int M, int N> DEV void mma_zero(float (&dot)[M][N][4])
{
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++) dot[m][n][0] = dot[m][n][1] = dot[m][n][2] = dot[m][n][3] = 0.0f;
}

/* dot[m][n] = rows[16 m ..] . cols[8 n ..] over the whole head; the rows come from shared memory, or are held. */
template <int HSP, int M, int N> DEV void mma_dot(float (&dot)[M][N][4], const floatX* rows, const floatX* cols)
{
    mma_zero(dot);
#pragma unroll 4
    for (int k = 0; k < HSP / 16; k++) {             // after 4 the swizzling repeats
        uint32_t a[M][4];
        mma_left<HSP>(a, rows, k);
        mma_dot_step<HSP>(dot, a, cols, k);
    }
}
template <int HSP, int M, int N> DEV void mma_dot(float (&dot)[M][N][4], const uint32_t (&held)[HSP / 16][M][4],
                                                  const floatX* cols)
{
    mma_zero(dot);
#pragma unroll
    for (int k = 0; k < HSP / 16; k++) mma_dot_step<HSP>(dot, held[k], cols, k);
}

/* sum[m][c] += sum_j weight[m][j] * tile[j][first_chunk + c], for N tiles of 8 rows j and C of 8 head elements. */
template <int HSP, int M, int N, int C> DEV void mma_add(float (&sum)[M][C][4], const float (&weight)[M][N][4],
                                                         const floatX* tile, int first_chunk)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < N; j += 2) {
        uint32_t a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
            a[m][0] = pack_pair(weight[m][j][0], weight[m][j][1]);
            a[m][1] = pack_pair(weight[m][j][2], weight[m][j][3]);
            a[m][2] = pack_pair(weight[m][j + 1][0], weight[m][j + 1][1]);
            a[m][3] = pack_pair(weight[m][j + 1][2], weight[m][j + 1][3]);
        }
#pragma unroll
        for (int c = 0; c < C; c += 2) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, tile + j * 8 * HSP + swizzled<HSP>(lane & 15, first_chunk + c + (lane >> 4)));
            const uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_m16n8k16<floatX>(sum[m][c], a[m], b0);
                mma_m16n8k16<floatX>(sum[m][c + 1], a[m], b1);
            }
        }
    }
}

/* Writes factor[m][i] * sum to rows first.. of a head's (T, HS) matrix, element 8 * first_chunk on, in whole chunks: by
 * way of `staging`, the warp's own rows of a tile, which it has read for the last time. */
template <int HSP, int M, int C>
DEV void mma_store(floatX* dst, size_t ld, floatX* staging, const float (&sum)[M][C][4], const float (&factor)[M][2],
                   int first, int first_chunk, AttentionDims a)
{
    const int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int c = 0; c < C; c++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = 16 * m + 8 * i + lane / 4;
                uint32_t* pair = reinterpret_cast<uint32_t*>(staging + swizzled<HSP>(row, first_chunk + c));
                pair[lane % 4] = pack_pair(factor[m][i] * sum[m][c][2 * i], factor[m][i] * sum[m][c][2 * i + 1]);
            }
    __syncwarp();
#pragma unroll 4
    for (int idx = lane; idx < 16 * M * C; idx += 32) {
        const int row = idx / C, chunk = first_chunk + idx % C;
        if (first + row < a.T && chunk * 8 < a.HS)
            st128(dst + (size_t)(first + row) * ld + chunk * 8, ld128(staging + swizzled<HSP>(row, chunk)));
    }
}

/* ---- forward */

/* Scores of the pairs that are hidden, by their indices, become -inf. row and col: the first of the warp's and of the
 * tile's. */
template <int M, int N, class Hidden> DEV void mma_mask(float (&s)[M][N][4], int row, int col, Hidden is_hidden)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (is_hidden(row + 16 * m + 8 * (e / 2) + lane / 4, col + 8 * n + 2 * (lane % 4) + e % 2))
                    s[m][n][e] = -INFINITY;
}

/* Of 16 * M queries from `query` on and 8 * N keys from `key` on: the pairs in which the query does not see the key. */
template <int M, int N> DEV void mma_mask_keys(float (&s)[M][N][4], int query, int key, int b, AttentionDims a)
{
    if (key + 8 * N - 1 > query) mma_mask(s, query, key, [](int row, int col) { return col > row; });
    if (key < attention_first_key(a, b, query + 16 * M - 1))
        mma_mask(s, query, key, [=](int row, int col) { return col < attention_first_key(a, b, row); });
}

/* Multiplies a tile by dropout's factors; query and key as in mma_mask_keys. */
template <int M, int N> DEV void mma_drop(float (&s)[M][N][4], DropoutKey drop_key, const Dropout& d, int query,
                                          int key, int T)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const unsigned first = (unsigned)(query + 16 * m + 8 * i + lane / 4) * T + key + 2 * (lane % 4);
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    s[m][n][2 * i + e] *= dropout_keeps(drop_key, first + 8 * n + e, d.threshold) ? d.scale : 0.0f;
        }
}

/* One tile of the online softmax: s becomes exp(scale * (s - max)), and max, sum and acc move to the new maximum. sum
 * is of this lane's keys only; max is of the row. */
template <int M, int N, int C>
DEV void mma_softmax(float (&s)[M][N][4], float (&max_score)[M][2], float (&sum)[M][2], float (&acc)[M][C][4],
                     float scale_log2)
{
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float top = max_score[m][i], part = 0.0f;
#pragma unroll
            for (int n = 0; n < N; n++) top = fmaxf(top, fmaxf(s[m][n][2 * i], s[m][n][2 * i + 1]));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            const float shrink = exp2_fast((max_score[m][i] - top) * scale_log2), top_log2 = top * scale_log2;
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 2 * i; e < 2 * i + 2; e++) {
                    s[m][n][e] = exp2_fast(s[m][n][e] * scale_log2 - top_log2);
                    part += s[m][n][e];
                }
#pragma unroll
            for (int c = 0; c < C; c++) {
                acc[m][c][2 * i] *= shrink;
                acc[m][c][2 * i + 1] *= shrink;
            }
            max_score[m][i] = top;
            sum[m][i] = sum[m][i] * shrink + part;
        }
}

/* grid (query blocks, NH, B), the longest first. Rows are queries, tiles keys. */
template <int HSP, bool DROPS> static __global__ void __launch_bounds__(MMA_BLOCK, 2)
attention_forward_mma_kernel(floatX* out, float* lse, const floatX* qkv, AttentionDims a, Dropout d)
{
    typedef MmaShape<HSP, DROPS> S;
    constexpr int M = S::M_FORWARD, ROWS = S::ROWS_FORWARD, TILE = S::TILE_FORWARD;
    DYN_SHARED(floatX, queries);
    floatX *keys = queries + ROWS * HSP, *values = keys + 2 * TILE * HSP;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int h = blockIdx.y, b = blockIdx.z, kv_head = h / (a.NH / a.NKV);
    const int first = (gridDim.x - 1 - blockIdx.x) * ROWS, row = first + warp * 16 * M;
    const size_t ld = attention_ld_qkv(a);
    const floatX *k = qkv + attention_k(a, b, kv_head), *v = qkv + attention_v(a, b, kv_head);
    floatX* own = queries + warp * 16 * M * HSP;
    float max_score[M][2], sum[M][2] = {}, acc[M][S::CHUNKS][4] = {};
#pragma unroll
    for (int m = 0; m < M; m++) max_score[m][0] = max_score[m][1] = ATTENTION_MIN_SCORE;
    const int first_tile = attention_first_key(a, b, first) / TILE, at = first_tile % 2 * TILE * HSP;
    mma_load<HSP, ROWS>(queries, qkv + attention_q(a, b, h), ld, first, a);
    mma_load<HSP, TILE>(keys + at, k, ld, first_tile * TILE, a);
    mma_load<HSP, TILE>(values + at, v, ld, first_tile * TILE, a);
    cp_async_commit();

    const int num_tiles = (min(first + ROWS, a.T) + TILE - 1) / TILE;
    for (int tile = first_tile; tile < num_tiles; tile++) {
        const int key = tile * TILE, now = tile % 2 * TILE * HSP, next = TILE * HSP - now;
        cp_async_wait<0>();
        __syncthreads();                             // the tile is there for all, and all are done with the one before
        if (tile + 1 < num_tiles) {
            mma_load<HSP, TILE>(keys + next, k, ld, key + TILE, a);
            mma_load<HSP, TILE>(values + next, v, ld, key + TILE, a);
            cp_async_commit();
        }
        if (key > row + 16 * M - 1) continue;        // all behind this warp's queries
        float s[M][TILE / 8][4];
        mma_dot<HSP>(s, own, keys + now);
        mma_mask_keys(s, row, key, b, a);
        mma_softmax(s, max_score, sum, acc, a.scale * LOG2_E);
        if constexpr (DROPS) mma_drop(s, dropout_key(d, b, h), d, row, key, a.T);
        mma_add<HSP>(acc, s, values + now, 0);
    }
    float factor[M][2];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float total = sum[m][i] + __shfl_xor_sync(0xffffffffu, sum[m][i], 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            const int query = row + 16 * m + 8 * i + lane / 4;
            factor[m][i] = 1.0f / total;
            if (query < a.T && lane % 4 == 0)
                lse[attention_l(a, b, h) + query] = max_score[m][i] * a.scale + logf(total);
        }
    mma_store<HSP>(out + attention_o(a, b, h), attention_ld_out(a), own, acc, factor, row, 0, a);
}

/* ---- backward */

/* GROUP lanes a row of out, 8 elements each; the rows of one head after another, as the statistics are stored. */
template <int HSP> static __global__ void __launch_bounds__(256)
attention_stats_kernel(float* stats, const floatX* dout, const floatX* out, const float* lse, AttentionDims a)
{
    constexpr int GROUP = HSP / 8;
    const size_t idx = ((size_t)blockIdx.x * 256 + threadIdx.x) / GROUP, rows = stats_rows(a), T = a.T;
    const size_t t = idx % rows, h = idx / rows % a.NH, b = idx / rows / a.NH;
    const int d = threadIdx.x % GROUP * 8;
    float sum = 0.0f;
    if (b < (size_t)a.B && t < T && d < a.HS) {
        float x[8], y[8];
        load_vec(x, dout + ((b * T + t) * a.NH + h) * a.HS + d);
        load_vec(y, out + ((b * T + t) * a.NH + h) * a.HS + d);
#pragma unroll
        for (int i = 0; i < 8; i++) sum += x[i] * y[i];
    }
#pragma unroll
    for (int offset = GROUP / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (b >= (size_t)a.B || d > 0) return;
    stats[idx] = t < T ? LOG2_E * lse[(b * a.NH + h) * T + t] : INFINITY;
    stats[stats_elems(a) + idx] = sum;
}

static constexpr int HELD_THAT_FIT = -1;             // mma_num_held; the bits are the same with any number
#ifdef __CUDA_ARCH__
static constexpr int MMA_ARCH = __CUDA_ARCH__;
#else
static constexpr int MMA_ARCH = 0;
#endif

/* grid (query blocks, NH, B), the longest first. Rows are queries, tiles keys. */
template <int HSP, bool DROPS, int NUM_HELD> static __global__ void __launch_bounds__(MMA_BLOCK, 2)
attention_backward_q_mma_kernel(floatX* dqkv, const floatX* dout, const float* stats, const floatX* qkv,
                                AttentionDims a, Dropout d)
{
    typedef MmaShape<HSP> S;
    constexpr int M = S::M_BACKWARD, ROWS = S::ROWS_BACKWARD, TILE = S::TILE_BACKWARD;
    DYN_SHARED(floatX, queries);
    floatX *douts = queries + ROWS * HSP, *keys = douts + ROWS * HSP, *values = keys + 2 * TILE * HSP;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int h = blockIdx.y, b = blockIdx.z, kv_head = h / (a.NH / a.NKV);
    const int first = (gridDim.x - 1 - blockIdx.x) * ROWS, row = first + warp * 16 * M;
    const size_t ld = attention_ld_qkv(a);
    const floatX *k = qkv + attention_k(a, b, kv_head), *v = qkv + attention_v(a, b, kv_head);
    floatX *own_q = queries + warp * 16 * M * HSP, *own_dout = douts + warp * 16 * M * HSP;
    float lse_log2[M][2], delta[M][2], factor[M][2], dq[M][S::CHUNKS][4] = {};
    constexpr int HELD = NUM_HELD == HELD_THAT_FIT ? mma_num_held(HSP, MMA_ARCH) : NUM_HELD;
    uint32_t held_q[HSP / 16][M][4], held_dout[HSP / 16][M][4];
    mma_load<HSP, ROWS>(queries, qkv + attention_q(a, b, h), ld, first, a);
    mma_load<HSP, ROWS>(douts, dout + attention_o(a, b, h), attention_ld_out(a), first, a);
    const int first_tile = attention_first_key(a, b, first) / TILE, at = first_tile % 2 * TILE * HSP;
    mma_load<HSP, TILE>(keys + at, k, ld, first_tile * TILE, a);
    mma_load<HSP, TILE>(values + at, v, ld, first_tile * TILE, a);
    cp_async_commit();
    stats += stats_first(a, b, h) + row;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            lse_log2[m][i] = stats[16 * m + 8 * i + lane / 4];
            delta[m][i] = stats[stats_elems(a) + 16 * m + 8 * i + lane / 4];
            factor[m][i] = a.scale;
        }

    const int num_tiles = (min(first + ROWS, a.T) + TILE - 1) / TILE;
    for (int tile = first_tile; tile < num_tiles; tile++) {
        const int now = tile % 2 * TILE * HSP, next = TILE * HSP - now;
        cp_async_wait<0>();
        __syncthreads();                             // as in the forward
        if (tile + 1 < num_tiles) {
            mma_load<HSP, TILE>(keys + next, k, ld, (tile + 1) * TILE, a);
            mma_load<HSP, TILE>(values + next, v, ld, (tile + 1) * TILE, a);
            cp_async_commit();
        }
        if (tile == first_tile) {
            if constexpr (HELD >= 1) mma_hold<HSP>(held_q, own_q);
            if constexpr (HELD == 2) mma_hold<HSP>(held_dout, own_dout);
        }
#pragma unroll 1
        for (int slice = 0; slice < TILE; slice += S::SLICE_Q) {
            const int key = tile * TILE + slice;
            if (key > row + 16 * M - 1) break;
            if (key + S::SLICE_Q <= attention_first_key(a, b, row)) continue;
            float s[M][S::SLICE_Q / 8][4], ds[M][S::SLICE_Q / 8][4];
            if constexpr (HELD >= 1) mma_dot<HSP>(s, held_q, keys + now + slice * HSP);
            else mma_dot<HSP>(s, own_q, keys + now + slice * HSP);
            if constexpr (HELD == 2) mma_dot<HSP>(ds, held_dout, values + now + slice * HSP);
            else mma_dot<HSP>(ds, own_dout, values + now + slice * HSP);
            mma_mask_keys(s, row, key, b, a);
            if constexpr (DROPS) mma_drop(ds, dropout_key(d, b, h), d, row, key, a.T);
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int n = 0; n < S::SLICE_Q / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        ds[m][n][e] = exp2_fast(s[m][n][e] * (a.scale * LOG2_E) - lse_log2[m][e / 2]) *
                                      (ds[m][n][e] - delta[m][e / 2]);
            mma_add<HSP>(dq, ds, keys + now + slice * HSP, 0);
        }
    }
    mma_store<HSP>(dqkv + attention_q(a, b, h), ld, own_q, dq, factor, row, 0, a);
}

/* Starts to copy a tile of queries, their douts and their statistics: lse_log2 of all, then delta of all. */
template <int HSP> DEV void mma_load_queries(floatX* queries, floatX* douts, float* tile_stats, const floatX* dout,
                                             const float* stats, const floatX* qkv, int b, int h, int first,
                                             AttentionDims a)
{
    constexpr int TILE = MmaShape<HSP>::TILE_BACKWARD;
    mma_load<HSP, TILE>(queries, qkv + attention_q(a, b, h), attention_ld_qkv(a), first, a);
    mma_load<HSP, TILE>(douts, dout + attention_o(a, b, h), attention_ld_out(a), first, a);
    const int idx = threadIdx.x, part = idx * 4 / TILE, offset = idx * 4 % TILE;
    if (part < 2)
        cp_async16(tile_stats + part * TILE + offset,
                   stats + part * stats_elems(a) + stats_first(a, b, h) + first + offset);
    cp_async_commit();
}

/* p and ds of one slice, transposed: from the scores s and dp (in ds). A column is a query. */
template <int M, int N> DEV void mma_slice_backward(float (&s)[M][N][4], float (&ds)[M][N][4], const float* lse_log2,
                                                    const float* delta, float scale_log2)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int query = 8 * n + 2 * (lane % 4) + e;
            const float query_lse = lse_log2[query], query_delta = delta[query];
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int i = e; i < 4; i += 2) {
                    s[m][n][i] = exp2_fast(s[m][n][i] * scale_log2 - query_lse);
                    ds[m][n][i] = s[m][n][i] * (ds[m][n][i] - query_delta);
                }
        }
}

/* As mma_mask_keys, rows being keys and columns queries. */
template <int M, int N> DEV void mma_mask_queries(float (&s)[M][N][4], int key, int query, int b, AttentionDims a)
{
    if (query < key + 16 * M - 1) mma_mask(s, key, query, [](int row, int col) { return row > col; });
    if (query + 8 * N - 1 > attention_last_query(a, b, key))
        mma_mask(s, key, query, [=](int row, int col) { return col > attention_last_query(a, b, row); });
}

/* As mma_drop, rows being keys and columns queries. */
template <int M, int N> DEV void mma_drop_transposed(float (&s)[M][N][4], DropoutKey drop_key, const Dropout& d,
                                                     int key, int query, int T)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[m][n][e] *= attention_keep(drop_key, d, query + 8 * n + 2 * (lane % 4) + e % 2,
                                             key + 16 * m + 8 * (e / 2) + lane / 4, T);
}

/* grid (key blocks, NKV * HSP/COLS, B): a block sums COLS of the head's elements. Rows are keys, tiles queries, of one
 * query head of the group after another. */
template <int HSP, bool DROPS> static __global__ void __launch_bounds__(MMA_BLOCK, 2)
attention_backward_kv_mma_kernel(floatX* dqkv, const floatX* dout, const float* stats, const floatX* qkv,
                                 AttentionDims a, Dropout d)
{
    typedef MmaShape<HSP> S;
    constexpr int M = S::M_BACKWARD, ROWS = S::ROWS_BACKWARD, TILE = S::TILE_BACKWARD, N = S::SLICE_KV / 8;
    DYN_SHARED(floatX, keys);
    floatX *values = keys + ROWS * HSP, *queries = values + ROWS * HSP, *douts = queries + 2 * TILE * HSP;
    float* tile_stats = reinterpret_cast<float*>(douts + 2 * TILE * HSP);              // (2,2,TILE)
    const int warp = threadIdx.x / 32, b = blockIdx.z, group = a.NH / a.NKV;
    const int kv_head = blockIdx.y / (HSP / S::COLS), first_chunk = blockIdx.y % (HSP / S::COLS) * (S::COLS / 8);
    const int first = blockIdx.x * ROWS, row = first + warp * 16 * M;
    const size_t ld = attention_ld_qkv(a), k = attention_k(a, b, kv_head), v = attention_v(a, b, kv_head);
    floatX *own_k = keys + warp * 16 * M * HSP, *own_v = values + warp * 16 * M * HSP;
    float dk[M][S::COLS / 8][4] = {}, dv[M][S::COLS / 8][4] = {};
    const int first_query = first / TILE * TILE, last_query = attention_last_query(a, b, first + ROWS - 1);
    const int tiles_per_head = (last_query - first_query) / TILE + 1;
    mma_load<HSP, ROWS>(keys, qkv + k, ld, first, a);
    mma_load<HSP, ROWS>(values, qkv + v, ld, first, a);
    mma_load_queries<HSP>(queries, douts, tile_stats, dout, stats, qkv, b, kv_head * group, first_query, a);

    const int num_tiles = group * tiles_per_head;
    for (int tile = 0; tile < num_tiles; tile++) {
        const int now = tile % 2, next = 1 - now;
        cp_async_wait<0>();
        __syncthreads();                             // as in the forward
        if (tile + 1 < num_tiles)
            mma_load_queries<HSP>(queries + next * TILE * HSP, douts + next * TILE * HSP, tile_stats + next * 2 * TILE,
                                  dout, stats, qkv, b, kv_head * group + (tile + 1) / tiles_per_head,
                                  first_query + (tile + 1) % tiles_per_head * TILE, a);
        const float *lse_log2 = tile_stats + now * 2 * TILE, *delta = lse_log2 + TILE;
#pragma unroll 1
        for (int slice = 0; slice < TILE; slice += S::SLICE_KV) {
            const int query = first_query + tile % tiles_per_head * TILE + slice, at = (now * TILE + slice) * HSP;
            if (query + S::SLICE_KV - 1 < row) continue;        // all before this warp's keys
            if (query > attention_last_query(a, b, row + 16 * M - 1)) break;         // none sees them
            float s[M][N][4], ds[M][N][4];
            mma_dot<HSP>(s, own_k, queries + at);
            mma_dot<HSP>(ds, own_v, douts + at);
            mma_mask_queries(s, row, query, b, a);
            DropoutKey drop_key = {};
            if constexpr (DROPS) {
                drop_key = dropout_key(d, b, kv_head * group + tile / tiles_per_head);
                mma_drop_transposed(ds, drop_key, d, row, query, a.T);
            }
            mma_slice_backward(s, ds, lse_log2 + slice, delta + slice, a.scale * LOG2_E);
            if constexpr (DROPS) mma_drop_transposed(s, drop_key, d, row, query, a.T);
            mma_add<HSP>(dv, s, douts + at, first_chunk);
            mma_add<HSP>(dk, ds, queries + at, first_chunk);
        }
    }
    float factor_k[M][2], factor_v[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) factor_k[m][0] = factor_k[m][1] = a.scale, factor_v[m][0] = factor_v[m][1] = 1.0f;
    mma_store<HSP>(dqkv + k, ld, own_k, dk, factor_k, row, first_chunk, a);
    mma_store<HSP>(dqkv + v, ld, own_v, dv, factor_v, row, first_chunk, a);
}

/* ---- launchers */

static bool attention_uses_mma(AttentionDims a, std::initializer_list<const void*> tensors)
{
    for (const void* p : tensors)
        if ((uintptr_t)p % 16 != 0) return false;
    return a.HS % 8 == 0;
}

template <int HSP, bool DROPS> static void attention_forward_mma(floatX* out, float* lse, const floatX* qkv,
                                                                 AttentionDims a, Dropout d, cudaStream_t stream)
{
    typedef MmaShape<HSP, DROPS> S;
    const size_t bytes = S::FORWARD_ELEMS * sizeof(floatX);
    const dim3 grid(ceil_div(a.T, S::ROWS_FORWARD), a.NH, a.B);
    attention_allow_shared(attention_forward_mma_kernel<HSP, DROPS>, bytes);
    LAUNCH((attention_forward_mma_kernel<HSP, DROPS>), grid, MMA_BLOCK, bytes, stream, out, lse, qkv, a, d);
    CUDA_CHECK(cudaGetLastError());
}

template <int HSP, bool DROPS, int NUM_HELD = HELD_THAT_FIT>
static void attention_backward_q_mma(floatX* dqkv, const floatX* dout, const float* stats, const floatX* qkv,
                                     AttentionDims a, Dropout d, cudaStream_t stream)
{
    typedef MmaShape<HSP> S;
    const size_t bytes = S::BACKWARD_ELEMS * sizeof(floatX);
    const dim3 grid(ceil_div(a.T, S::ROWS_BACKWARD), a.NH, a.B);
    attention_allow_shared(attention_backward_q_mma_kernel<HSP, DROPS, NUM_HELD>, bytes);
    LAUNCH((attention_backward_q_mma_kernel<HSP, DROPS, NUM_HELD>), grid, MMA_BLOCK, bytes, stream, dqkv, dout, stats,
           qkv, a, d);
    CUDA_CHECK(cudaGetLastError());
}

template <int HSP, bool DROPS> static void attention_backward_mma(floatX* dqkv, float* stats, const floatX* dout,
                                                                  const floatX* out, const float* lse,
                                                                  const floatX* qkv, AttentionDims a, Dropout d,
                                                                  cudaStream_t stream)
{
    typedef MmaShape<HSP> S;
    const size_t bytes = S::BACKWARD_ELEMS * sizeof(floatX) + 4 * S::TILE_BACKWARD * sizeof(float);
    const dim3 grid_kv(ceil_div(a.T, S::ROWS_BACKWARD), a.NKV * (HSP / S::COLS), a.B);
    LAUNCH((attention_stats_kernel<HSP>), ceil_div(stats_elems(a) * (HSP / 8), 256), 256, 0, stream, stats,
           dout, out, lse, a);
    CUDA_CHECK(cudaGetLastError());
    attention_backward_q_mma<HSP, DROPS>(dqkv, dout, stats, qkv, a, d, stream);
    attention_allow_shared(attention_backward_kv_mma_kernel<HSP, DROPS>, bytes);
    LAUNCH((attention_backward_kv_mma_kernel<HSP, DROPS>), grid_kv, MMA_BLOCK, bytes, stream, dqkv, dout, stats, qkv, a,
           d);
    CUDA_CHECK(cudaGetLastError());
}

#endif
