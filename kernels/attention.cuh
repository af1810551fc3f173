/* attention.cuh: causal self-attention with grouped keys and values, in one pass over keys: no T x T matrix is ever stored.
 *   s[i,j] = scale * q[i] . k[j] for j <= i    lse[i] = log sum_j exp(s[i,j])    p = exp(s - lse)    out[i] = sum_j p[i,j] * v[j]
 *   dv[j] = sum_i p[i,j] * dout[i]     ds = p * (dout[i] . v[j] - delta[i])     delta[i] = dout[i] . out[i]
 *   dq[i] = scale * sum_j ds[i,j] * k[j]     dk[j] = scale * sum_i ds[i,j] * q[i]
 * shapes  qkv dqkv (B,T,(NH+2*NKV)*HS) floatX, a row holding q heads, k heads, v heads; out dout (B,T,NH*HS) floatX;
 *         lse (B,NH,T) fp32; scratch (attention_scratch_elems(B,T,NH,HS)) fp32
 * writes  forward out =, lse =; backward dqkv =
 * needs   NH % NKV == 0: query head h reads key/value head h / (NH/NKV). Any B, T; any HS on the CPU, HS <= 256 on a GPU
 * exact   every sum is taken in a fixed order by one thread or warp, without atomics: same bits on every run and for any number of
 *         CPU threads. Arithmetic is fp32 whatever floatX is.
 * cost    forward 2, backward 5 products of T*T/2*HS multiply-adds per query head, judged against the FMA peak
 * source  Dao et al. 2022, arXiv:2205.14135 (tiles, online softmax, recomputation); the transposed scores of the CPU code are ours */
#pragma once
#include "common.cuh"
#ifdef DEVICE_CPU
#include "cpu/gemm.h"
#endif

#ifdef DEVICE_CPU

/* A block of queries is one panel of NR columns. Scores are kept transposed, s[key][query]: a column is a query, so the softmax runs
 * down the vectors without a horizontal sum, and s and p are the packed operand that the next product wants. Every product below is a
 * gemm_tile. Keys come in tiles whose scores stay in the nearest caches. */
enum { ATTENTION_QUERIES = GEMM_NR, ATTENTION_KEYS_FORWARD = 512, ATTENTION_KEYS_BACKWARD = 128 };

/* One head's matrices, packed, and the tiles of one thread. Rows beyond T and head elements beyond HS are zero. */
typedef struct {
    float *k_rows, *v_rows;         // panels of MR keys: [T/MR][HS][MR]
    float *k_cols, *v_cols;         // panels of MR head elements: [HS/MR][T][MR]
    float *dk, *dv;                 // (T, HS in whole vectors)
    float *p, *ds;                  // a tile of scores: [key][query]
    float *q_t, *dout_t, *acc_t;    // a block of queries, transposed: [head element][query]. acc_t becomes out or dq
    float *q, *dout;                // the same as rows: [query][HS in whole vectors]
} AttentionSpace;

/* Lays the parts out from `base` on; returns where they end. */
static float* attention_space(AttentionSpace* s, float* base, int T, int HS)
{
    const size_t keys = round_up(T, GEMM_MR), rows = round_up(HS, GEMM_MR), width = round_up(HS, VF);
    struct { float** part; size_t elems; } parts[] = {
        {&s->k_rows, keys * HS}, {&s->v_rows, keys * HS}, {&s->k_cols, keys * rows}, {&s->v_cols, keys * rows},
        {&s->dk, keys * width}, {&s->dv, keys * width},
        {&s->p, ATTENTION_KEYS_FORWARD * GEMM_NR}, {&s->ds, ATTENTION_KEYS_BACKWARD * GEMM_NR},
        {&s->q_t, rows * GEMM_NR}, {&s->dout_t, rows * GEMM_NR}, {&s->acc_t, rows * GEMM_NR},
        {&s->q, width * GEMM_NR}, {&s->dout, width * GEMM_NR},
    };
    for (auto& p : parts) {
        *p.part = base;
        base += round_up(p.elems, 16);
    }
    return base;
}

/* As many threads as there were when the scratch was sized. */
static int attention_num_threads()
{
    static const int num_sized = omp_get_max_threads();
    return gemm_min(omp_get_max_threads(), num_sized);
}

static size_t attention_thread_elems(int T, int HS)
{
    AttentionSpace space;
    return (size_t)(attention_space(&space, nullptr, T, HS) - (float*)nullptr);
}

static size_t attention_scratch_elems(int B, int T, int NH, int HS)
{
    (void)B, (void)NH;
    return attention_num_threads() * attention_thread_elems(T, HS);
}

static void attention_pack_rows(float* dst, const float* src, size_t ld, int T, int HS)
{
    for (int t = 0; t < T; t += GEMM_MR)
        gemm_pack(dst + (size_t)t * HS, GEMM_MR, src + t * ld, ld, false, HS, gemm_min(GEMM_MR, T - t));
}

static void attention_pack_cols(float* dst, const float* src, size_t ld, int T, int HS)
{
    const int keys = (int)round_up(T, GEMM_MR);
    for (int d = 0; d < HS; d += GEMM_MR, dst += (size_t)keys * GEMM_MR) {
        gemm_pack(dst, GEMM_MR, src + d, ld, true, T, gemm_min(GEMM_MR, HS - d));
        memset(dst + (size_t)T * GEMM_MR, 0, (size_t)(keys - T) * GEMM_MR * sizeof(float));
    }
}

/* s[key][query] = sum_d rows[key][d] * cols_t[d][query] for num_keys keys from `key` on. num_vectors of queries, here and below. */
static void attention_scores(float* s, const float* rows, const float* cols_t, int key, int num_keys, int num_vectors, int HS)
{
    static const float zeros[GEMM_NR] = {};
    for (int j = 0; j < num_keys; j += GEMM_MR)
        gemm_tile_any<false>(num_vectors, s + j * GEMM_NR, GEMM_NR, zeros, 0, rows + (size_t)(key + j) * HS, 0, cols_t, GEMM_NR, HS);
}

/* acc_t[d][query] += sum_key cols[d][key] * p[key][query] */
static void attention_gather(float* acc_t, const float* cols, const float* p, int key, int num_keys, int num_vectors, int T, int HS)
{
    const size_t keys = round_up(T, GEMM_MR);
    for (int d = 0; d < HS; d += GEMM_MR) {
        float* c = acc_t + d * GEMM_NR;
        gemm_tile_any<false>(num_vectors, c, GEMM_NR, c, GEMM_NR, cols + d * keys + (size_t)key * GEMM_MR, 0, p, GEMM_NR, num_keys);
    }
}

/* d[key][:] += sum_query p[key][query] * rows[query][:] */
static void attention_scatter(float* d, const float* p, const float* rows, int num_keys, int num_queries, int HS)
{
    const int width = (int)round_up(HS, VF), num_vectors = width / VF;
    const int num_tiles = gemm_div_up(num_vectors, GEMM_NV), per_tile = gemm_div_up(num_vectors, num_tiles);
    for (int first = 0; first < num_vectors; first += per_tile)
        for (int j = 0; j < num_keys; j += GEMM_MR) {
            float* c = d + (size_t)j * width + first * VF;
            gemm_tile_any<true>(gemm_min(per_tile, num_vectors - first), c, width, c, width, p + j * GEMM_NR, GEMM_NR,
                                rows + first * VF, width, num_queries);
        }
}

/* Scores of keys after their query become -inf. `ahead` is the first key's position after the first query. */
static void attention_mask(float* s, int ahead, int num_keys)
{
    for (int j = ahead < 0 ? -ahead : 0; j < num_keys; j++)
        for (int query = 0; query < ahead + j && query < ATTENTION_QUERIES; query++) s[j * GEMM_NR + query] = -INFINITY;
}

/* One tile of the online softmax: s becomes exp(scale * s - max), and max, sum and acc_t move to the new maximum. */
static void attention_softmax(float* s, float* max, float* sum, float* acc_t, int num_keys, int num_vectors, int HS,
                              float scale)
{
    for (int col = 0; col < num_vectors * VF; col += VF) {
        const vf old_max = vf_load(max + col);
        vf new_max = old_max, new_sum[2] = {};
        for (int j = 0; j < num_keys; j++) new_max = vf_max(new_max, scale * vf_load(s + j * GEMM_NR + col));
        for (int j = 0; j < num_keys; j += 2)
            for (int i = 0; i < 2; i++) {
                float* p = s + (j + i) * GEMM_NR + col;
                const vf e = vf_exp(scale * vf_load(p) - new_max);
                new_sum[i] += e;
                vf_store(p, e);
            }
        const vf shrink = vf_exp(old_max - new_max);
        vf_store(max + col, new_max);
        vf_store(sum + col, vf_load(sum + col) * shrink + (new_sum[0] + new_sum[1]));
        for (int d = 0; d < HS; d++) vf_store(acc_t + d * GEMM_NR + col, vf_load(acc_t + d * GEMM_NR + col) * shrink);
    }
}

static void attention_forward_head(float* out, size_t ld_out, float* lse, const float* q, const float* k, const float* v, size_t ld,
                                   float* scratch, int T, int HS, float scale)
{
    AttentionSpace s;
    attention_space(&s, scratch, T, HS);
    attention_pack_rows(s.k_rows, k, ld, T, HS);
    attention_pack_cols(s.v_cols, v, ld, T, HS);
    for (int first = 0; first < T; first += ATTENTION_QUERIES) {
        const int num_queries = gemm_min(ATTENTION_QUERIES, T - first);
        const int num_vectors = gemm_div_up(num_queries, VF), seen = (int)round_up(gemm_min(first + ATTENTION_QUERIES, T), GEMM_MR);
        float max[GEMM_NR], sum[GEMM_NR] = {};
        for (float& m : max) m = -INFINITY;
        gemm_pack(s.q_t, GEMM_NR, q + first * ld, ld, false, HS, num_queries);
        memset(s.acc_t, 0, round_up(HS, GEMM_MR) * GEMM_NR * sizeof(float));
        for (int key = 0; key < seen; key += ATTENTION_KEYS_FORWARD) {
            const int num_keys = gemm_min(ATTENTION_KEYS_FORWARD, seen - key);
            attention_scores(s.p, s.k_rows, s.q_t, key, num_keys, num_vectors, HS);
            attention_mask(s.p, key - first, num_keys);
            attention_softmax(s.p, max, sum, s.acc_t, num_keys, num_vectors, HS, scale);
            attention_gather(s.acc_t, s.v_cols, s.p, key, num_keys, num_vectors, T, HS);
        }
        for (int col = 0; col < num_vectors * VF; col += VF) {
            const vf inverse = 1.0f / vf_load(sum + col);
            for (int d = 0; d < HS; d++) vf_store(s.acc_t + d * GEMM_NR + col, vf_load(s.acc_t + d * GEMM_NR + col) * inverse);
        }
        gemm_transpose(out + first * ld_out, ld_out, s.acc_t, GEMM_NR, num_queries, HS);
        for (int i = 0; i < num_queries; i++) lse[first + i] = max[i] + logf(sum[i]);
    }
}

/* A block of rows in whole vectors; what sticks out is zero. */
static void attention_copy_rows(float* dst, const float* src, size_t ld, int num_rows, int HS)
{
    const size_t width = round_up(HS, VF);
    for (int i = 0; i < num_rows; i++) {
        memcpy(dst + i * width, src + i * ld, HS * sizeof(float));
        memset(dst + i * width + HS, 0, (width - HS) * sizeof(float));
    }
}

/* From scores s and dp[key][query] = v . dout: s becomes p, dp becomes scale * ds. */
static void attention_softmax_backward(float* s, float* dp, const float* lse, const float* delta, int num_keys, int num_vectors,
                                       float scale)
{
    for (int col = 0; col < num_vectors * VF; col += VF) {
        const vf lse_col = vf_load(lse + col), delta_col = vf_load(delta + col);
        for (int j = 0; j < num_keys; j++) {
            const vf p = vf_exp(scale * vf_load(s + j * GEMM_NR + col) - lse_col);
            vf_store(s + j * GEMM_NR + col, p);
            vf_store(dp + j * GEMM_NR + col, scale * p * (vf_load(dp + j * GEMM_NR + col) - delta_col));
        }
    }
}

/* One query head: writes dq, adds to s.dk and s.dv. */
static void attention_backward_head(float* dq, AttentionSpace s, const float* dout, const float* out, size_t ld_out, const float* lse,
                                    const float* q, size_t ld, int T, int HS, float scale)
{
    const size_t width = round_up(HS, VF);
    for (int first = 0; first < T; first += ATTENTION_QUERIES) {
        const int num_queries = gemm_min(ATTENTION_QUERIES, T - first);
        const int num_vectors = gemm_div_up(num_queries, VF), seen = (int)round_up(gemm_min(first + ATTENTION_QUERIES, T), GEMM_MR);
        float block_lse[GEMM_NR] = {}, delta[GEMM_NR] = {};
        memcpy(block_lse, lse + first, num_queries * sizeof(float));
        gemm_pack(s.q_t, GEMM_NR, q + first * ld, ld, false, HS, num_queries);
        gemm_pack(s.dout_t, GEMM_NR, dout + first * ld_out, ld_out, false, HS, num_queries);
        gemm_pack(s.acc_t, GEMM_NR, out + first * ld_out, ld_out, false, HS, num_queries);
        for (int d = 0; d < HS; d++)
            for (int i = 0; i < GEMM_NR; i++) delta[i] += s.dout_t[d * GEMM_NR + i] * s.acc_t[d * GEMM_NR + i];
        attention_copy_rows(s.q, q + first * ld, ld, num_queries, HS);
        attention_copy_rows(s.dout, dout + first * ld_out, ld_out, num_queries, HS);
        memset(s.acc_t, 0, round_up(HS, GEMM_MR) * GEMM_NR * sizeof(float));
        for (int key = 0; key < seen; key += ATTENTION_KEYS_BACKWARD) {
            const int num_keys = gemm_min(ATTENTION_KEYS_BACKWARD, seen - key);
            attention_scores(s.p, s.k_rows, s.q_t, key, num_keys, num_vectors, HS);
            attention_scores(s.ds, s.v_rows, s.dout_t, key, num_keys, num_vectors, HS);
            attention_mask(s.p, key - first, num_keys);
            attention_softmax_backward(s.p, s.ds, block_lse, delta, num_keys, num_vectors, scale);
            attention_scatter(s.dv + key * width, s.p, s.dout, num_keys, num_queries, HS);
            attention_scatter(s.dk + key * width, s.ds, s.q, num_keys, num_queries, HS);
            attention_gather(s.acc_t, s.k_cols, s.ds, key, num_keys, num_vectors, T, HS);
        }
        gemm_transpose(dq + first * ld, ld, s.acc_t, GEMM_NR, num_queries, HS);
    }
}

/* Threads share out the query heads. */
static void attention_forward_cpu(float* out, float* lse, float* scratch, const float* qkv, int B, int T, int NH, int NKV, int HS,
                                  float scale)
{
    const size_t ld = (size_t)(NH + 2 * NKV) * HS, ld_out = (size_t)NH * HS, thread_elems = attention_thread_elems(T, HS);
    #pragma omp parallel for schedule(dynamic) num_threads(attention_num_threads())
    for (int item = 0; item < B * NH; item++) {
        const int b = item / NH, h = item % NH, kv_head = h / (NH / NKV);
        const float *row = qkv + b * T * ld, *k = row + (size_t)(NH + kv_head) * HS;
        attention_forward_head(out + b * T * ld_out + (size_t)h * HS, ld_out, lse + (size_t)item * T, row + (size_t)h * HS,
                               k, k + (size_t)NKV * HS, ld, scratch + omp_get_thread_num() * thread_elems, T, HS, scale);
    }
}

/* Threads share out the key/value heads: the query heads that read one follow each other and add up its dk and dv. */
static void attention_backward_cpu(float* dqkv, float* scratch, const float* dout, const float* out, const float* lse, const float* qkv,
                                   int B, int T, int NH, int NKV, int HS, float scale)
{
    const size_t ld = (size_t)(NH + 2 * NKV) * HS, ld_out = (size_t)NH * HS, width = round_up(HS, VF);
    const size_t thread_elems = attention_thread_elems(T, HS);
    #pragma omp parallel for schedule(dynamic) num_threads(attention_num_threads())
    for (int item = 0; item < B * NKV; item++) {
        const int b = item / NKV, kv_head = item % NKV, group = NH / NKV;
        const size_t row = b * T * ld, k = row + (size_t)(NH + kv_head) * HS, v = k + (size_t)NKV * HS;
        AttentionSpace s;
        attention_space(&s, scratch + omp_get_thread_num() * thread_elems, T, HS);
        attention_pack_rows(s.k_rows, qkv + k, ld, T, HS);
        attention_pack_rows(s.v_rows, qkv + v, ld, T, HS);
        attention_pack_cols(s.k_cols, qkv + k, ld, T, HS);
        memset(s.dk, 0, round_up(T, GEMM_MR) * width * sizeof(float));
        memset(s.dv, 0, round_up(T, GEMM_MR) * width * sizeof(float));
        for (int h = kv_head * group; h < (kv_head + 1) * group; h++) {
            const size_t o = b * T * ld_out + (size_t)h * HS, q = row + (size_t)h * HS;
            attention_backward_head(dqkv + q, s, dout + o, out + o, ld_out, lse + ((size_t)b * NH + h) * T, qkv + q, ld, T, HS, scale);
        }
        for (int t = 0; t < T; t++) {
            memcpy(dqkv + k + t * ld, s.dk + t * width, HS * sizeof(float));
            memcpy(dqkv + v + t * ld, s.dv + t * width, HS * sizeof(float));
        }
    }
}

#else

/* A block has 4 warps, and each warp R rows: queries, or keys for dk and dv. The other side comes in tiles of 32, one to each lane.
 * Head elements are padded with zeros to HSP, a multiple of 32, of which a lane sums every 32nd. Shared memory is fp32. */
static constexpr int ATTENTION_WARPS = 4, ATTENTION_TILE = 32;
template<int HSP> struct AttentionShape {
    static constexpr int R = HSP <= 128 ? 8 : 4, ROWS = ATTENTION_WARPS * R;
    static constexpr int LANE = HSP / 32;           // head elements of a lane
    static constexpr int STRIDE = HSP + 4;          // of a tile's row: lanes reading 16 bytes of 8 rows hit 32 different banks
    static constexpr int TILE_ELEMS = ATTENTION_TILE * STRIDE, ROWS_ELEMS = ROWS * HSP, WEIGHT_ELEMS = ROWS * ATTENTION_TILE;
};

/* dst (num_rows, stride) = rows first.. of a head's (T, HS) matrix; zero past T and HS. By the whole block. */
template<int HSP> DEV void attention_load(float* dst, int stride, int num_rows, const floatX* src, size_t ld, int first, int T, int HS)
{
    for (int i = threadIdx.x; i < num_rows * HSP; i += ATTENTION_WARPS * 32) {
        const int row = i / HSP, d = i % HSP;
        const bool inside = first + row < T && d < HS;
        dst[row * stride + d] = inside ? load_f(src[(first + row) * ld + d]) : 0.0f;
    }
}

/* dot[r] = rows[r] . tile[lane] */
template<int HSP> DEV void attention_dots(float (&dot)[AttentionShape<HSP>::R], const float* rows, const float* tile)
{
    const float* mine = tile + threadIdx.x % 32 * AttentionShape<HSP>::STRIDE;
#pragma unroll
    for (int r = 0; r < AttentionShape<HSP>::R; r++) dot[r] = 0.0f;
#pragma unroll 2
    for (int d = 0; d < HSP; d += 4) {
        const Vec128<float> a = ld128(mine + d);
#pragma unroll
        for (int r = 0; r < AttentionShape<HSP>::R; r++) {
            const Vec128<float> b = ld128(rows + r * HSP + d);
#pragma unroll
            for (int i = 0; i < 4; i++) dot[r] += a[i] * b[i];
        }
    }
}

/* sum[r][c] += sum_j weight[r][j] * tile[j][lane + 32 c]. The weights are the warp's own, in shared memory. */
template<int HSP> DEV void attention_add(float (&sum)[AttentionShape<HSP>::R][AttentionShape<HSP>::LANE], const float* weight, const float* tile)
{
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int j = 0; j < ATTENTION_TILE; j += 4) {
        Vec128<float> w[AttentionShape<HSP>::R];
#pragma unroll
        for (int r = 0; r < AttentionShape<HSP>::R; r++) w[r] = ld128(weight + r * ATTENTION_TILE + j);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int c = 0; c < AttentionShape<HSP>::LANE; c++) {
                const float value = tile[(j + i) * AttentionShape<HSP>::STRIDE + lane + 32 * c];
#pragma unroll
                for (int r = 0; r < AttentionShape<HSP>::R; r++) sum[r][c] += w[r][i] * value;
            }
    }
}

/* grid (query blocks, NH, B), the longest first */
template<int HSP> __global__ void __launch_bounds__(ATTENTION_WARPS * 32, 3)
attention_forward_kernel(floatX* out, float* lse, const floatX* qkv, int T, int NH, int NKV, int HS, float scale)
{
    typedef AttentionShape<HSP> S;
    DYN_SHARED(float, shared);
    float *tile = shared, *queries = tile + S::TILE_ELEMS, *weights = queries + S::ROWS_ELEMS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, h = blockIdx.y, b = blockIdx.z;
    const int first = (gridDim.x - 1 - blockIdx.x) * S::ROWS, row = first + warp * S::R;
    const size_t ld = (size_t)(NH + 2 * NKV) * HS;
    const floatX *q = qkv + b * T * ld + (size_t)h * HS, *k = qkv + b * T * ld + (size_t)(NH + h / (NH / NKV)) * HS;
    const floatX* v = k + (size_t)NKV * HS;
    float max_score[S::R], sum[S::R], acc[S::R][S::LANE] = {};
#pragma unroll
    for (int r = 0; r < S::R; r++) max_score[r] = -INFINITY, sum[r] = 0.0f;
    attention_load<HSP>(queries, HSP, S::ROWS, q, ld, first, T, HS);
    queries += warp * S::R * HSP, weights += warp * S::R * ATTENTION_TILE;

    for (int key = 0; key < min(first + S::ROWS, T); key += ATTENTION_TILE) {
        __syncthreads();
        attention_load<HSP>(tile, S::STRIDE, ATTENTION_TILE, k, ld, key, T, HS);
        __syncthreads();
        float p[S::R];
        attention_dots<HSP>(p, queries, tile);
#pragma unroll
        for (int r = 0; r < S::R; r++) {
            const float score = key + lane <= row + r ? scale * p[r] : -INFINITY;
            const float new_max = fmaxf(max_score[r], warp_max(score)), shrink = expf(max_score[r] - new_max);
            const float weight = expf(score - new_max);
            max_score[r] = new_max;
            sum[r] = sum[r] * shrink + weight;                  // of this lane's keys
            weights[r * ATTENTION_TILE + lane] = weight;
#pragma unroll
            for (int c = 0; c < S::LANE; c++) acc[r][c] *= shrink;
        }
        __syncthreads();
        attention_load<HSP>(tile, S::STRIDE, ATTENTION_TILE, v, ld, key, T, HS);
        __syncthreads();
        attention_add<HSP>(acc, weights, tile);
    }
#pragma unroll
    for (int r = 0; r < S::R; r++) {
        const float total = warp_sum(sum[r]);
        if (row + r >= T) break;
        floatX* o = out + ((size_t)b * T + row + r) * NH * HS + (size_t)h * HS;
#pragma unroll
        for (int c = 0; c < S::LANE; c++)
            if (lane + 32 * c < HS) store_f(o + lane + 32 * c, acc[r][c] / total);
        if (lane == 0) lse[((size_t)b * NH + h) * T + row + r] = max_score[r] + logf(total);
    }
}

/* delta (B,NH,T): a warp an element */
__global__ void attention_delta_kernel(float* delta, const floatX* dout, const floatX* out, int B, int T, int NH, int HS)
{
    const size_t idx = (size_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (idx >= (size_t)B * NH * T) return;
    const size_t t = idx % T, h = idx / T % NH, b = idx / T / NH, offset = ((b * T + t) * NH + h) * HS;
    float sum = 0.0f;
    for (int d = threadIdx.x % 32; d < HS; d += 32) sum += load_f(dout[offset + d]) * load_f(out[offset + d]);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) delta[idx] = sum;
}

/* grid (query blocks, NH, B). Rows are queries, lanes keys. */
template<int HSP> __global__ void __launch_bounds__(ATTENTION_WARPS * 32, 3)
attention_backward_q_kernel(floatX* dqkv, const floatX* dout, const float* lse, const float* delta, const floatX* qkv,
                            int T, int NH, int NKV, int HS, float scale)
{
    typedef AttentionShape<HSP> S;
    DYN_SHARED(float, shared);
    float *tile = shared, *queries = tile + S::TILE_ELEMS, *douts = queries + S::ROWS_ELEMS, *weights = douts + S::ROWS_ELEMS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, h = blockIdx.y, b = blockIdx.z;
    const int first = (gridDim.x - 1 - blockIdx.x) * S::ROWS, row = first + warp * S::R;
    const size_t ld = (size_t)(NH + 2 * NKV) * HS, ld_out = (size_t)NH * HS;
    const size_t q = b * T * ld + (size_t)h * HS, k = b * T * ld + (size_t)(NH + h / (NH / NKV)) * HS, v = k + (size_t)NKV * HS;
    const float *row_lse = lse + ((size_t)b * NH + h) * T + row, *row_delta = delta + ((size_t)b * NH + h) * T + row;
    float dq[S::R][S::LANE] = {};
    attention_load<HSP>(queries, HSP, S::ROWS, qkv + q, ld, first, T, HS);
    attention_load<HSP>(douts, HSP, S::ROWS, dout + b * T * ld_out + (size_t)h * HS, ld_out, first, T, HS);
    queries += warp * S::R * HSP, douts += warp * S::R * HSP, weights += warp * S::R * ATTENTION_TILE;

    for (int key = 0; key < min(first + S::ROWS, T); key += ATTENTION_TILE) {
        float dp[S::R], s[S::R];
        __syncthreads();
        attention_load<HSP>(tile, S::STRIDE, ATTENTION_TILE, qkv + v, ld, key, T, HS);
        __syncthreads();
        attention_dots<HSP>(dp, douts, tile);
        __syncthreads();
        attention_load<HSP>(tile, S::STRIDE, ATTENTION_TILE, qkv + k, ld, key, T, HS);
        __syncthreads();
        attention_dots<HSP>(s, queries, tile);
#pragma unroll
        for (int r = 0; r < S::R; r++) {
            float ds = 0.0f;
            if (key + lane <= row + r && row + r < T) ds = expf(scale * s[r] - row_lse[r]) * (dp[r] - row_delta[r]);
            weights[r * ATTENTION_TILE + lane] = scale * ds;
        }
        __syncwarp();
        attention_add<HSP>(dq, weights, tile);
    }
#pragma unroll
    for (int r = 0; r < S::R; r++)
#pragma unroll
        for (int c = 0; c < S::LANE; c++)
            if (row + r < T && lane + 32 * c < HS) store_f(dqkv + q + (row + r) * ld + lane + 32 * c, dq[r][c]);
}

/* grid (key blocks, NKV, B). Rows are keys, lanes queries, of one query head of the group after another. */
template<int HSP> __global__ void __launch_bounds__(ATTENTION_WARPS * 32, 2)
attention_backward_kv_kernel(floatX* dqkv, const floatX* dout, const float* lse, const float* delta, const floatX* qkv,
                             int T, int NH, int NKV, int HS, float scale)
{
    typedef AttentionShape<HSP> S;
    DYN_SHARED(float, shared);
    float *tile = shared, *keys = tile + S::TILE_ELEMS, *values = keys + S::ROWS_ELEMS, *weights = values + S::ROWS_ELEMS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, kv_head = blockIdx.y, b = blockIdx.z, group = NH / NKV;
    const int first = blockIdx.x * S::ROWS, row = first + warp * S::R;
    const size_t ld = (size_t)(NH + 2 * NKV) * HS, ld_out = (size_t)NH * HS;
    const size_t k = b * T * ld + (size_t)(NH + kv_head) * HS, v = k + (size_t)NKV * HS;
    float dk[S::R][S::LANE] = {}, dv[S::R][S::LANE] = {};
    attention_load<HSP>(keys, HSP, S::ROWS, qkv + k, ld, first, T, HS);
    attention_load<HSP>(values, HSP, S::ROWS, qkv + v, ld, first, T, HS);
    keys += warp * S::R * HSP, values += warp * S::R * HSP, weights += warp * S::R * ATTENTION_TILE;

    for (int h = kv_head * group; h < (kv_head + 1) * group; h++) {
        const floatX *q = qkv + b * T * ld + (size_t)h * HS, *dout_head = dout + b * T * ld_out + (size_t)h * HS;
        for (int query = first / ATTENTION_TILE * ATTENTION_TILE; query < T; query += ATTENTION_TILE) {
            const size_t stat = ((size_t)b * NH + h) * T + query + lane;
            const float query_lse = query + lane < T ? lse[stat] : 0.0f, query_delta = query + lane < T ? delta[stat] : 0.0f;
            float s[S::R], dp[S::R];
            __syncthreads();
            attention_load<HSP>(tile, S::STRIDE, ATTENTION_TILE, q, ld, query, T, HS);
            __syncthreads();
            attention_dots<HSP>(s, keys, tile);
#pragma unroll
            for (int r = 0; r < S::R; r++) {
                const bool sees = row + r <= query + lane && query + lane < T;
                s[r] = sees ? expf(scale * s[r] - query_lse) : 0.0f;
                weights[r * ATTENTION_TILE + lane] = s[r];
            }
            __syncthreads();
            attention_load<HSP>(tile, S::STRIDE, ATTENTION_TILE, dout_head, ld_out, query, T, HS);
            __syncthreads();
            attention_dots<HSP>(dp, values, tile);
            attention_add<HSP>(dv, weights, tile);
            __syncwarp();
#pragma unroll
            for (int r = 0; r < S::R; r++) weights[r * ATTENTION_TILE + lane] = scale * s[r] * (dp[r] - query_delta);
            __syncthreads();
            attention_load<HSP>(tile, S::STRIDE, ATTENTION_TILE, q, ld, query, T, HS);
            __syncthreads();
            attention_add<HSP>(dk, weights, tile);
        }
    }
#pragma unroll
    for (int r = 0; r < S::R; r++)
#pragma unroll
        for (int c = 0; c < S::LANE; c++)
            if (row + r < T && lane + 32 * c < HS) {
                const size_t at = (row + r) * ld + lane + 32 * c;
                store_f(dqkv + k + at, dk[r][c]);
                store_f(dqkv + v + at, dv[r][c]);
            }
}

static size_t attention_scratch_elems(int B, int T, int NH, int HS) { (void)HS; return (size_t)B * NH * T; }

/* What a block may use without asking is 48 KiB. */
template<class Kernel> static size_t attention_shared_bytes(Kernel kernel, size_t elems)
{
    const size_t bytes = elems * sizeof(float);
    if (bytes > 48 * 1024)
        CUDA_CHECK(cudaFuncSetAttribute((const void*)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    return bytes;
}

template<int HSP> static void attention_forward_launch(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, int NKV, int HS,
                                                       float scale, cudaStream_t stream)
{
    typedef AttentionShape<HSP> S;
    const size_t bytes = attention_shared_bytes(attention_forward_kernel<HSP>, S::TILE_ELEMS + S::ROWS_ELEMS + S::WEIGHT_ELEMS);
    LAUNCH((attention_forward_kernel<HSP>), dim3(ceil_div(T, S::ROWS), NH, B), ATTENTION_WARPS * 32, bytes, stream,
           out, lse, qkv, T, NH, NKV, HS, scale);
}

template<int HSP> static void attention_backward_launch(floatX* dqkv, float* delta, const floatX* dout, const floatX* out, const float* lse,
                                                        const floatX* qkv, int B, int T, int NH, int NKV, int HS, float scale,
                                                        cudaStream_t stream)
{
    typedef AttentionShape<HSP> S;
    const size_t elems = S::TILE_ELEMS + 2 * S::ROWS_ELEMS + S::WEIGHT_ELEMS;
    LAUNCH(attention_delta_kernel, ceil_div((size_t)B * NH * T, 8), 256, 0, stream, delta, dout, out, B, T, NH, HS);
    LAUNCH((attention_backward_q_kernel<HSP>), dim3(ceil_div(T, S::ROWS), NH, B), ATTENTION_WARPS * 32,
           attention_shared_bytes(attention_backward_q_kernel<HSP>, elems), stream, dqkv, dout, lse, delta, qkv, T, NH, NKV, HS, scale);
    LAUNCH((attention_backward_kv_kernel<HSP>), dim3(ceil_div(T, S::ROWS), NKV, B), ATTENTION_WARPS * 32,
           attention_shared_bytes(attention_backward_kv_kernel<HSP>, elems), stream, dqkv, dout, lse, delta, qkv, T, NH, NKV, HS, scale);
}

#endif

static void attention_check(int NH, int NKV, int HS)
{
    ENSURE(NKV > 0 && NH % NKV == 0, "%d query heads cannot be shared out among %d key/value heads", NH, NKV);
#ifndef DEVICE_CPU
    ENSURE(HS <= 256, "head size %d: at most 256 on a GPU", HS);
#endif
    (void)HS;
}

static void attention_forward(floatX* out, float* lse, float* scratch, const floatX* qkv, int B, int T, int NH, int NKV, int HS,
                              float scale, cudaStream_t stream)
{
    attention_check(NH, NKV, HS);
    ON_CPU(attention_forward_cpu(out, lse, scratch, qkv, B, T, NH, NKV, HS, scale));
#ifndef DEVICE_CPU
    (void)scratch;
    if (HS <= 64) attention_forward_launch<64>(out, lse, qkv, B, T, NH, NKV, HS, scale, stream);
    else if (HS <= 128) attention_forward_launch<128>(out, lse, qkv, B, T, NH, NKV, HS, scale, stream);
    else attention_forward_launch<256>(out, lse, qkv, B, T, NH, NKV, HS, scale, stream);
    CUDA_CHECK(cudaGetLastError());
#endif
}

static void attention_backward(floatX* dqkv, float* scratch, const floatX* dout, const floatX* out, const float* lse, const floatX* qkv,
                               int B, int T, int NH, int NKV, int HS, float scale, cudaStream_t stream)
{
    attention_check(NH, NKV, HS);
    ON_CPU(attention_backward_cpu(dqkv, scratch, dout, out, lse, qkv, B, T, NH, NKV, HS, scale));
#ifndef DEVICE_CPU
    if (HS <= 64) attention_backward_launch<64>(dqkv, scratch, dout, out, lse, qkv, B, T, NH, NKV, HS, scale, stream);
    else if (HS <= 128) attention_backward_launch<128>(dqkv, scratch, dout, out, lse, qkv, B, T, NH, NKV, HS, scale, stream);
    else attention_backward_launch<256>(dqkv, scratch, dout, out, lse, qkv, B, T, NH, NKV, HS, scale, stream);
    CUDA_CHECK(cudaGetLastError());
#endif
}

#ifdef OP_TESTS
#include "optest.h"

/* Plain attention, row by row, with the row's probabilities. p has room for T. */
template<class R> static void attention_row_ref(R* p, R* lse, const R* q, const R* k, size_t ld, int i, int HS, R scale)
{
    R max = -INFINITY, sum = 0;
    for (int j = 0; j <= i; j++) {
        p[j] = 0;
        for (int d = 0; d < HS; d++) p[j] += q[d] * k[j * ld + d];
        p[j] *= scale;
        if (p[j] > max) max = p[j];
    }
    for (int j = 0; j <= i; j++) sum += p[j] = std::exp(p[j] - max);
    for (int j = 0; j <= i; j++) p[j] /= sum;
    *lse = max + std::log(sum);
}

template<class R> static void attention_forward_ref(R* out, R* lse, const R* qkv, int B, int T, int NH, int NKV, int HS, R scale)
{
    const size_t ld = (size_t)(NH + 2 * NKV) * HS;
    #pragma omp parallel for
    for (int item = 0; item < B * NH; item++) {
        const int b = item / NH, h = item % NH;
        const R *q = qkv + b * T * ld + (size_t)h * HS, *k = qkv + b * T * ld + (size_t)(NH + h / (NH / NKV)) * HS, *v = k + NKV * HS;
        R* p = (R*)op_alloc(T * sizeof(R));
        for (int i = 0; i < T; i++) {
            attention_row_ref(p, &lse[(size_t)item * T + i], q + i * ld, k, ld, i, HS, scale);
            for (int d = 0; d < HS; d++) {
                R sum = 0;
                for (int j = 0; j <= i; j++) sum += p[j] * v[j * ld + d];
                out[((size_t)b * T + i) * NH * HS + h * HS + d] = sum;
            }
        }
        free(p);
    }
}

/* As the op: from what the forward left in out and lse. */
template<class R> static void attention_backward_ref(R* dqkv, const R* dout, const R* out, const R* lse, const R* qkv,
                                                     int B, int T, int NH, int NKV, int HS, R scale)
{
    const size_t ld = (size_t)(NH + 2 * NKV) * HS;
    memset(dqkv, 0, B * T * ld * sizeof(R));
    #pragma omp parallel for
    for (int b = 0; b < B; b++)
        for (int h = 0; h < NH; h++)
            for (int i = 0; i < T; i++) {
                const size_t q = (b * T + i) * ld + h * HS, k = b * T * ld + (NH + h / (NH / NKV)) * HS, v = k + NKV * HS;
                const size_t o = ((size_t)b * T + i) * NH * HS + h * HS;
                R delta = 0;
                for (int d = 0; d < HS; d++) delta += dout[o + d] * out[o + d];
                for (int j = 0; j <= i; j++) {
                    R score = 0, dp = 0;
                    for (int d = 0; d < HS; d++) score += qkv[q + d] * qkv[k + j * ld + d];
                    for (int d = 0; d < HS; d++) dp += dout[o + d] * qkv[v + j * ld + d];
                    const R p = std::exp(score * scale - lse[((size_t)b * NH + h) * T + i]), ds = p * (dp - delta) * scale;
                    for (int d = 0; d < HS; d++) {
                        dqkv[q + d] += ds * qkv[k + j * ld + d];
                        dqkv[k + j * ld + d] += ds * qkv[q + d];
                        dqkv[v + j * ld + d] += p * dout[o + d];
                    }
                }
            }
}

/* dims: B, T, NH, NKV, HS */
static void attention_forward_test(OpRun* run)
{
    const int B = run->dims[0], T = run->dims[1], NH = run->dims[2], NKV = run->dims[3], HS = run->dims[4];
    const float scale = 1.0f / sqrtf((float)HS);
    OpTensor<floatX> qkv = op_input<floatX>(run, "qkv", (size_t)B * T * (NH + 2 * NKV) * HS, 0.0, 1.5);
    OpTensor<floatX> out = op_output<floatX>(run, "out", (size_t)B * T * NH * HS);
    OpTensor<float> lse = op_output<float>(run, "lse", (size_t)B * NH * T);
    float* scratch = op_scratch<float>(run, attention_scratch_elems(B, T, NH, HS));
    OP_RUN(run, 0, 2.0 * B * NH * T * (T + 1) * HS,
           attention_forward(out.dev, lse.dev, scratch, qkv.dev, B, T, NH, NKV, HS, scale, 0));
    attention_forward_ref<double>(out.f64, lse.f64, qkv.f64, B, T, NH, NKV, HS, scale);
    attention_forward_ref<float>(out.f32, lse.f32, qkv.f32, B, T, NH, NKV, HS, scale);
    op_check(run, out);
    op_check(run, lse);
}

/* dims: B, T, NH, NKV, HS. The double reference continues from out and lse in double; ours and the plain one from those rounded. */
static void attention_backward_test(OpRun* run)
{
    const int B = run->dims[0], T = run->dims[1], NH = run->dims[2], NKV = run->dims[3], HS = run->dims[4];
    const size_t num_out = (size_t)B * T * NH * HS, num_lse = (size_t)B * NH * T;
    const float scale = 1.0f / sqrtf((float)HS);
    OpTensor<floatX> qkv = op_input<floatX>(run, "qkv", (size_t)B * T * (NH + 2 * NKV) * HS, 0.0, 1.5);
    OpTensor<floatX> dout = op_input<floatX>(run, "dout", num_out, 0.0, 1.0);
    OpTensor<floatX> dqkv = op_output<floatX>(run, "dqkv", qkv.n);
    double *out64 = op_host(run, num_out), *lse64 = op_host(run, num_lse);
    memset(out64, 0, num_out * sizeof(double)), memset(lse64, 0, num_lse * sizeof(double));
    if (!run->bench) attention_forward_ref<double>(out64, lse64, qkv.f64, B, T, NH, NKV, HS, scale);
    floatX* h_out = (floatX*)op_alloc(num_out * sizeof(floatX));
    float *out32 = (float*)op_alloc(num_out * sizeof(float)), *lse32 = (float*)op_alloc(num_lse * sizeof(float));
    for (size_t i = 0; i < num_lse; i++) lse32[i] = (float)lse64[i];
    for (size_t i = 0; i < num_out; i++) {
        store_f(&h_out[i], (float)out64[i]);
        out32[i] = load_f(h_out[i]);
    }
    const floatX* out = (const floatX*)op_bytes(run, "out", OpKind::INPUT, h_out, num_out * sizeof(floatX));
    const float* lse = (const float*)op_bytes(run, "lse", OpKind::INPUT, lse32, num_lse * sizeof(float));
    float* scratch = op_scratch<float>(run, attention_scratch_elems(B, T, NH, HS));
    OP_RUN(run, 0, 5.0 * B * NH * T * (T + 1) * HS,
           attention_backward(dqkv.dev, scratch, dout.dev, out, lse, qkv.dev, B, T, NH, NKV, HS, scale, 0));
    attention_backward_ref<double>(dqkv.f64, dout.f64, out64, lse64, qkv.f64, B, T, NH, NKV, HS, scale);
    attention_backward_ref<float>(dqkv.f32, dout.f32, out32, lse32, qkv.f32, B, T, NH, NKV, HS, scale);
    op_check(run, dqkv);
    free(h_out);
    free(out32);
    free(lse32);
    if (T > 100) return;
    OP_CHECK_GRAD(run, dqkv, qkv, (attention_forward_ref<double>(out64, lse64, qkv.f64, B, T, NH, NKV, HS, scale),
                                   op_dot(out64, dout.f64, num_out)));
}

#define ATTENTION_TESTS(name) \
    {#name, name##_test, {1, 1, 1, 1, 1}, OpWhen::ALWAYS}, {#name, name##_test, {2, 7, 2, 2, 5}, OpWhen::ALWAYS}, \
    {#name, name##_test, {1, 33, 3, 1, 16}, OpWhen::ALWAYS}, {#name, name##_test, {2, 64, 4, 2, 32}, OpWhen::ALWAYS}, \
    {#name, name##_test, {1, 65, 1, 1, 64}, OpWhen::ALWAYS}, {#name, name##_test, {1, 100, 2, 1, 67}, OpWhen::ALWAYS}, \
    {#name, name##_test, {1, 40, 1, 1, 128}, OpWhen::ALWAYS}, {#name, name##_test, {1, 37, 2, 1, 200}, OpWhen::ALWAYS}, \
    {#name, name##_test, {1, 35, 1, 1, 256}, OpWhen::ALWAYS}, {#name, name##_test, {2, 257, 6, 3, 64}, OpWhen::LARGE}, \
    {#name, name##_test, {1, 1024, 4, 4, 64}, OpWhen::LARGE}, {#name, name##_test, {1, 1600, 1, 1, 24}, OpWhen::LARGE}, \
    {#name, name##_test, {4, 64, 12, 12, 64}, OpWhen::BENCH}, {#name, name##_test, {1, 1024, 12, 12, 64}, OpWhen::BENCH}, \
    {#name, name##_test, {4, 256, 6, 6, 64}, OpWhen::BENCH}, {#name, name##_test, {1, 4096, 4, 2, 128}, OpWhen::BENCH}

static const OpTest attention_tests[] = {ATTENTION_TESTS(attention_forward), ATTENTION_TESTS(attention_backward)};
#endif
