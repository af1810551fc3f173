/* attention.cuh: causal self-attention with grouped keys and values, tile by tile: no T x T matrix is ever stored. A
 * query sees all keys up to itself, or those from its first key on: documents, sliding windows (attention_spans.cuh).
 *   s[i,j] = scale * q[i] . k[j]  for first_key[i] <= j <= i; without spans for j <= i
 *   lse[i] = log sum_j exp(s[i,j])           p[i,j] = exp(s[i,j] - lse[i])
 *   out[i] = sum_j p[i,j] * v[j]             with dropout, k[i,j] * p[i,j], where k is 0 or 1/(1 - drop)
 *   ds[i,j] = p[i,j] * (k[i,j] * dout[i] . v[j] - delta[i])      delta[i] = dout[i] . out[i]
 *   dq[i] = scale * sum_j ds[i,j] * k[j]    dk[j] = scale * sum_i ds[i,j] * q[i]    dv[j] = sum_i p[i,j] * dout[i]
 * shapes  qkv dqkv (B,T,(NH+2*NKV)*HS) floatX, a row holding q heads, k heads, v heads; out dout (B,T,NH*HS) floatX;
 *         lse (B,NH,T) fp32; scratch (attention_scratch_elems(B,T,NH,HS)) fp32
 * writes  forward out =, lse =; backward dqkv =
 * needs   NH % NKV == 0: query head h reads key/value head h / (NH/NKV); any B, T; any HS on the CPU, <= 256 on a GPU
 * exact   every sum is taken in a fixed order by one thread or warp, without atomics: same bits on every run and for
 *         any number of CPU threads. Arithmetic is fp32, but on a GPU in bf16 and fp16 as attention_mma.cuh says, and
 *         in bf16 on a CPU with AVX512_BF16: GEMMs multiply pairs of bf16 (gemm.h), p and ds are rounded before them.
 * cost    forward 2, backward 5 GEMMs of HS multiply-adds for each query head and each pair of a query and a key that
 *         it sees, T*(T+1)/2 of a whole sequence, judged against the FMA peak; tiles that hold no such pair are skipped
 * source  Dao et al. 2022, arXiv:2205.14135 (tiles, online softmax, recomputation); the transposed scores of the CPU
 *         code are our own */
#pragma once
#include "attention_dims.cuh"
#include "attention_mma.cuh"
#ifdef DEVICE_CPU
#include "kernels/cpu/gemm.h"
#endif

#ifdef DEVICE_CPU

/* A block of queries is one panel of NR columns. Scores are kept transposed, s[key][query]: a column is a query, so the
 * softmax runs down the vectors without a horizontal sum, and s and p are the packed operand that the next GEMM
 * wants. Every GEMM below is a gemm_tile over gemm.h's cells; where those are pairs, p and ds become pairs first.
 * Keys come in tiles whose scores stay in the nearest caches. */
enum { ATTENTION_QUERIES = GEMM_NR, ATTENTION_KEYS_FORWARD = 512, ATTENTION_KEYS_BACKWARD = 128 };

/* One head's matrices, packed, and the tiles of one thread. Rows beyond T and head elements beyond HS are zero. */
typedef struct {
    float *k_rows, *v_rows;         // panels of MR keys: [T/MR][cells of HS][MR]
    float *k_cols, *v_cols;         // panels of MR head elements: [HS/MR][cells of T][MR]
    float *dk, *dv;                 // (T, HS in whole vectors)
    float *p, *ds;                  // a tile of scores: [key][query]
    float *q_t, *dout_t;            // a block of queries, transposed: [cells of HS][query]
    float *acc_t;                   // [head element][query]: becomes out or dq
    float *q, *dout;                // the block as rows: [cells of queries][HS in whole vectors]
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

/* What one of several threads takes of a head: every step-th block of queries, or tile of keys. */
typedef struct { int first, step; } AttentionShare;
static constexpr AttentionShare ATTENTION_ALL = {0, 1};

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

static void attention_pack_rows(float* dst, const floatX* src, size_t ld, int T, int HS)
{
    for (int t = 0; t < T; t += GEMM_MR)
        gemm_pack(dst + (size_t)t * gemm_cells(HS), GEMM_MR, src + t * ld, ld, false, HS, gemm_min(GEMM_MR, T - t));
}

/* Of k_cols and v_cols. */
static size_t attention_panel_elems(int T) { return round_up(T, GEMM_MR) / GEMM_PAIR * GEMM_MR; }

static void attention_pack_cols(float* dst, const floatX* src, size_t ld, int T, int HS)
{
    const int cells = gemm_cells(T);
    const size_t panel_elems = attention_panel_elems(T);
    for (int d = 0; d < HS; d += GEMM_MR, dst += panel_elems) {
        gemm_pack(dst, GEMM_MR, src + d, ld, true, T, gemm_min(GEMM_MR, HS - d));
        memset(dst + (size_t)cells * GEMM_MR, 0, (panel_elems - (size_t)cells * GEMM_MR) * sizeof(float));
    }
}

/* s[key][query] = sum_d rows[key][d] * cols_t[d][query] for num_keys keys; num_vectors of queries, here and below. */
static void attention_scores(float* s, const float* rows, const float* cols_t, int num_keys, int num_vectors, int HS)
{
    static const float zeros[GEMM_NR] = {};
    const int cells = gemm_cells(HS);
    for (int j = 0; j < num_keys; j += GEMM_MR)
        gemm_tile_any<false>(num_vectors, s + j * GEMM_NR, GEMM_NR, zeros, 0, rows + j * cells, 0, cols_t, GEMM_NR,
                             cells);
}

/* A tile as the right operand of a GEMM over keys, [cells of keys][query]: itself, or pairs of its rows, in `pairs`,
 * which may be the tile. */
static const float* attention_key_cells(float* pairs, const float* p, int num_keys, int num_vectors)
{
    if constexpr (GEMM_PAIR == 1) return p;
    else
        for (int j = 0; j < num_keys; j += 2)
            for (int col = 0; col < num_vectors * VF; col += VF)
                vf_store(pairs + j / 2 * GEMM_NR + col,
                         vf_pair(vf_load(p + j * GEMM_NR + col), vf_load(p + (j + 1) * GEMM_NR + col)));
    return pairs;
}

/* A tile as the left operand of a GEMM over queries, in place: rows of cells. */
static const float* attention_query_cells(float* p, int num_keys, int num_vectors)
{
    if constexpr (GEMM_PAIR > 1)
        for (int j = 0; j < num_keys; j++)
            for (int i = 0; i < num_vectors; i++)
                pair_store_row(p + j * GEMM_NR + i * VF / 2, vf_load(p + j * GEMM_NR + i * VF));
    return p;
}

/* acc_t[d][query] += sum_key cols[d][key] * p[key][query]; the panels of cols are panel_elems apart. */
static void attention_gather(float* acc_t, const float* cols, size_t panel_elems, const float* p, int num_keys,
                             int num_vectors, int HS)
{
    for (int d = 0; d < HS; d += GEMM_MR, cols += panel_elems) {
        float* c = acc_t + d * GEMM_NR;
        gemm_tile_any<false>(num_vectors, c, GEMM_NR, c, GEMM_NR, cols, 0, p, GEMM_NR, num_keys / GEMM_PAIR);
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
                                rows + first * VF, width, gemm_cells(num_queries));
        }
}

/* Scores of keys that their query does not see become -inf. first and key: of the block and of the tile. */
static void attention_mask(float* s, AttentionDims a, int b, int first, int key, int num_keys)
{
    const int ahead = key - first;
    for (int j = ahead < 0 ? -ahead : 0; j < num_keys; j++)
        for (int query = 0; query < ahead + j && query < ATTENTION_QUERIES; query++) s[j * GEMM_NR + query] = -INFINITY;
    for (int query = 0; a.spans.first_key != nullptr && query < ATTENTION_QUERIES; query++) {
        const int num_before = attention_first_key(a, b, first + query) - key;
        for (int j = 0; j < num_before && j < num_keys; j++) s[j * GEMM_NR + query] = -INFINITY;
    }
}

/* The keys of the tiles of a block of queries, in whole panels: those that one of its queries sees. */
typedef struct { int begin, end; } KeyRange;

static KeyRange attention_keys(AttentionDims a, int b, int first, int num_queries)
{
    const int begin = attention_first_key(a, b, first);
    return {begin - begin % GEMM_MR, (int)round_up(first + num_queries, GEMM_MR)};
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

/* Multiplies a tile by k. */
static void attention_drop(float* s, DropoutKey drop_key, const Dropout& d, int query, int key, int num_keys, int T)
{
    for (int j = 0; j < num_keys; j++) {
        #pragma omp simd
        for (int i = 0; i < ATTENTION_QUERIES; i++)
            s[j * GEMM_NR + i] *= attention_keep(drop_key, d, query + i, key + j, T);
    }
}

static void attention_forward_head(floatX* out, float* lse, const AttentionSpace* s, const floatX* q, AttentionDims a,
                                   int b, DropoutKey drop_key, const Dropout& d, AttentionShare queries)
{
    const int T = a.T, HS = a.HS, cells = gemm_cells(HS);
    const size_t ld = attention_ld_qkv(a), ld_out = attention_ld_out(a);
    const size_t panel_elems = attention_panel_elems(T);
    for (int first = queries.first * ATTENTION_QUERIES; first < T; first += queries.step * ATTENTION_QUERIES) {
        const int num_queries = gemm_min(ATTENTION_QUERIES, T - first), num_vectors = gemm_div_up(num_queries, VF);
        const KeyRange keys = attention_keys(a, b, first, num_queries);
        float max[GEMM_NR], sum[GEMM_NR] = {};
        for (float& m : max) m = ATTENTION_MIN_SCORE;
        gemm_pack(s->q_t, GEMM_NR, q + first * ld, ld, false, HS, num_queries);
        memset(s->acc_t, 0, round_up(HS, GEMM_MR) * GEMM_NR * sizeof(float));
        for (int key = keys.begin; key < keys.end; key += ATTENTION_KEYS_FORWARD) {
            const int num_keys = gemm_min(ATTENTION_KEYS_FORWARD, keys.end - key);
            attention_scores(s->p, s->k_rows + (size_t)key * cells, s->q_t, num_keys, num_vectors, HS);
            attention_mask(s->p, a, b, first, key, num_keys);
            attention_softmax(s->p, max, sum, s->acc_t, num_keys, num_vectors, HS, a.scale);
            if (d.threshold > 0) attention_drop(s->p, drop_key, d, first, key, num_keys, T);
            const float* p = attention_key_cells(s->p, s->p, num_keys, num_vectors);
            attention_gather(s->acc_t, s->v_cols + key / GEMM_PAIR * GEMM_MR, panel_elems, p, num_keys, num_vectors,
                             HS);
        }
        for (int col = 0; col < num_vectors * VF; col += VF) {
            const vf inverse = 1.0f / vf_load(sum + col);
            for (int d = 0; d < HS; d++) {
                float* o = s->acc_t + d * GEMM_NR + col;
                vf_store(o, vf_load(o) * inverse);
            }
        }
        gemm_transpose<1>(out + first * ld_out, ld_out, s->acc_t, GEMM_NR, num_queries, HS);
        for (int i = 0; i < num_queries; i++) lse[first + i] = max[i] + logf(sum[i]);
    }
}

/* From scores s and dp[key][query] = v . dout: s becomes p, dp becomes scale * ds. */
static void attention_softmax_backward(float* s, float* dp, const float* lse, const float* delta, int num_keys,
                                       int num_vectors, float scale)
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

/* One query head: writes dq unless that is null, adds to s->dk and s->dv if `adds_kv`. */
static void attention_backward_head(floatX* dq, bool adds_kv, const AttentionSpace* s, const floatX* dout,
                                    const floatX* out, const float* lse, const floatX* q, AttentionDims a, int b,
                                    DropoutKey drop_key, const Dropout& d, AttentionShare queries, AttentionShare keys)
{
    const int T = a.T, HS = a.HS, cells = gemm_cells(HS);
    const size_t ld = attention_ld_qkv(a), ld_out = attention_ld_out(a), width = round_up(HS, VF);
    const size_t panel_elems = attention_panel_elems(T);
    for (int first = queries.first * ATTENTION_QUERIES; first < T; first += queries.step * ATTENTION_QUERIES) {
        const int num_queries = gemm_min(ATTENTION_QUERIES, T - first), num_vectors = gemm_div_up(num_queries, VF);
        const KeyRange seen = attention_keys(a, b, first, num_queries);
        float block_lse[GEMM_NR] = {}, delta[GEMM_NR] = {};
        memcpy(block_lse, lse + first, num_queries * sizeof(float));
        gemm_pack(s->q_t, GEMM_NR, q + first * ld, ld, false, HS, num_queries);
        gemm_pack(s->dout_t, GEMM_NR, dout + first * ld_out, ld_out, false, HS, num_queries);
        gemm_pack(s->acc_t, GEMM_NR, out + first * ld_out, ld_out, false, HS, num_queries);
        for (int d = 0; d < cells; d++)
            for (int col = d * GEMM_NR, i = 0; i < GEMM_NR; i += VF)
                vf_store(delta + i, gemm_add(vf_load(s->dout_t + col + i), vf_load(s->acc_t + col + i),
                                             vf_load(delta + i)));
        gemm_pack(s->q, width, q + first * ld, ld, true, num_queries, HS);
        gemm_pack(s->dout, width, dout + first * ld_out, ld_out, true, num_queries, HS);
        memset(s->acc_t, 0, round_up(HS, GEMM_MR) * GEMM_NR * sizeof(float));
        const int first_tile = keys.first * ATTENTION_KEYS_BACKWARD, step = keys.step * ATTENTION_KEYS_BACKWARD;
        for (int tile = first_tile; tile < seen.end; tile += step) {
            const int key = tile < seen.begin ? seen.begin : tile;
            const int num_keys = gemm_min(tile + ATTENTION_KEYS_BACKWARD, seen.end) - key;
            if (num_keys <= 0) continue;             // all before what the queries see
            attention_scores(s->p, s->k_rows + (size_t)key * cells, s->q_t, num_keys, num_vectors, HS);
            attention_scores(s->ds, s->v_rows + (size_t)key * cells, s->dout_t, num_keys, num_vectors, HS);
            attention_mask(s->p, a, b, first, key, num_keys);
            if (d.threshold > 0) attention_drop(s->ds, drop_key, d, first, key, num_keys, T);
            attention_softmax_backward(s->p, s->ds, block_lse, delta, num_keys, num_vectors, a.scale);
            if (d.threshold > 0) attention_drop(s->p, drop_key, d, first, key, num_keys, T);
            if (adds_kv) {
                const float* p = attention_query_cells(s->p, num_keys, num_vectors);
                attention_scatter(s->dv + key * width, p, s->dout, num_keys, num_queries, HS);
            }
            if (dq != nullptr) {
                const float* ds = attention_key_cells(s->p, s->ds, num_keys, num_vectors);
                attention_gather(s->acc_t, s->k_cols + key / GEMM_PAIR * GEMM_MR, panel_elems, ds, num_keys,
                                 num_vectors, HS);
            }
            if (adds_kv) {
                const float* ds = attention_query_cells(s->ds, num_keys, num_vectors);
                attention_scatter(s->dk + key * width, ds, s->q, num_keys, num_queries, HS);
            }
        }
        if (dq != nullptr) gemm_transpose<1>(dq + first * ld, ld, s->acc_t, GEMM_NR, num_queries, HS);
    }
}

/* How many threads take shares of one head, so that all are busy; num_shares: how many there can be. */
static int attention_num_parts(int num_heads, int num_shares)
{
    const int num_threads = attention_num_threads();
    if (num_heads % num_threads == 0 || num_heads >= 4 * num_threads) return 1;
    return gemm_min(gemm_div_up(2 * num_threads, num_heads), num_shares);
}

/* Threads share out the query heads, few of them by blocks of queries: the sums of a query do not depend on it. */
static void attention_forward_cpu(floatX* out, float* lse, float* scratch, const floatX* qkv, AttentionDims a,
                                  const Dropout& d)
{
    const size_t ld = attention_ld_qkv(a), thread_elems = attention_thread_elems(a.T, a.HS);
    const int num_parts = attention_num_parts(a.B * a.NH, gemm_div_up(a.T, ATTENTION_QUERIES));
    #pragma omp parallel for schedule(dynamic) num_threads(attention_num_threads())
    for (int item = 0; item < a.B * a.NH * num_parts; item++) {
        const int head = item / num_parts, b = head / a.NH, h = head % a.NH, kv_head = h / (a.NH / a.NKV);
        AttentionSpace s;
        attention_space(&s, scratch + omp_get_thread_num() * thread_elems, a.T, a.HS);
        attention_pack_rows(s.k_rows, qkv + attention_k(a, b, kv_head), ld, a.T, a.HS);
        attention_pack_cols(s.v_cols, qkv + attention_v(a, b, kv_head), ld, a.T, a.HS);
        attention_forward_head(out + attention_o(a, b, h), lse + attention_l(a, b, h), &s,
                               qkv + attention_q(a, b, h), a, b, dropout_key(d, b, h), d,
                               {item % num_parts, num_parts});
    }
}

typedef struct { floatX* dqkv; const floatX *dout, *out; const float* lse; const floatX* qkv; } AttentionBackward;

/* The query heads that read a key/value head, h0 to h1, one after the other: they add up its dk and dv. */
static void attention_backward_heads(const AttentionBackward& x, AttentionSpace* s, AttentionDims a, const Dropout& d,
                                     int b, int h0, int h1, bool has_dq, bool adds_kv, AttentionShare queries,
                                     AttentionShare keys)
{
    const int T = a.T, HS = a.HS, kv_head = h0 / (a.NH / a.NKV);
    const size_t ld = attention_ld_qkv(a), width = round_up(HS, VF);
    const size_t k = attention_k(a, b, kv_head), v = attention_v(a, b, kv_head);
    attention_pack_rows(s->k_rows, x.qkv + k, ld, T, HS);
    attention_pack_rows(s->v_rows, x.qkv + v, ld, T, HS);
    attention_pack_cols(s->k_cols, x.qkv + k, ld, T, HS);
    memset(s->dk, 0, round_up(T, GEMM_MR) * width * sizeof(float));
    memset(s->dv, 0, round_up(T, GEMM_MR) * width * sizeof(float));
    for (int h = h0; h < h1; h++) {
        const size_t q = attention_q(a, b, h), o = attention_o(a, b, h);
        attention_backward_head(has_dq ? x.dqkv + q : nullptr, adds_kv, s, x.dout + o, x.out + o,
                                x.lse + attention_l(a, b, h), x.qkv + q, a, b, dropout_key(d, b, h), d, queries,
                                keys);
    }
    for (int t = 0; t < T && adds_kv; t++) {
        if (t / ATTENTION_KEYS_BACKWARD % keys.step != keys.first) continue;
        vf_copy(x.dqkv + k + t * ld, s->dk + t * width, HS);
        vf_copy(x.dqkv + v + t * ld, s->dv + t * width, HS);
    }
}

/* Threads share out the key/value heads. If there are too few, then first their tiles of keys, for dk and dv, and after
 * that the blocks of queries of all query heads, for dq: 7 GEMMs instead of 5, but by all threads. Each sum is
 * the same in the same order. */
static void attention_backward_cpu(floatX* dqkv, float* scratch, const floatX* dout, const floatX* out,
                                   const float* lse, const floatX* qkv, AttentionDims a, const Dropout& d)
{
    const AttentionBackward x = {dqkv, dout, out, lse, qkv};
    const int num_threads = attention_num_threads(), num_kv = a.B * a.NKV, group = a.NH / a.NKV;
    const bool in_one = 7 * num_kv >= 5 * num_threads;
    const int num_tiles = gemm_div_up(a.T, ATTENTION_KEYS_BACKWARD), num_blocks = gemm_div_up(a.T, ATTENTION_QUERIES);
    const int key_parts = in_one ? 1 : attention_num_parts(num_kv, num_tiles);
    const int query_parts = attention_num_parts(a.B * a.NH, num_blocks);
    const size_t thread_elems = attention_thread_elems(a.T, a.HS);
    #pragma omp parallel num_threads(num_threads)
    {
        AttentionSpace s;
        attention_space(&s, scratch + omp_get_thread_num() * thread_elems, a.T, a.HS);
        #pragma omp for schedule(dynamic) nowait
        for (int item = 0; item < num_kv * key_parts; item++) {
            const int b = item / key_parts / a.NKV, kv_head = item / key_parts % a.NKV;
            attention_backward_heads(x, &s, a, d, b, kv_head * group, (kv_head + 1) * group, in_one, true,
                                     ATTENTION_ALL, {item % key_parts, key_parts});
        }
        #pragma omp for schedule(dynamic)
        for (int item = 0; item < (in_one ? 0 : a.B * a.NH * query_parts); item++) {
            const int b = item / query_parts / a.NH, h = item / query_parts % a.NH;
            attention_backward_heads(x, &s, a, d, b, h, h + 1, true, false, {item % query_parts, query_parts},
                                     ATTENTION_ALL);
        }
    }
}

#else

/* A block has 4 warps, and each warp R rows: queries, or keys for dk and dv. The other side comes in tiles of 32, one
 * to each lane. Head elements are padded with zeros to HSP, a multiple of 32, of which a lane sums every 32nd. Shared
 * memory is fp32. */
static constexpr int ATTENTION_WARPS = 4, ATTENTION_BLOCK = 32 * ATTENTION_WARPS, ATTENTION_TILE = 32;
template<int HSP> struct AttentionShape {
    static constexpr int R = HSP <= 128 ? 8 : 4, ROWS = ATTENTION_WARPS * R;
    static constexpr int LANE = HSP / 32;           // head elements of a lane
    static constexpr int STRIDE = HSP + 4;          // of a tile: 8 lanes that read 16 bytes each hit 32 different banks
    static constexpr int TILE_ELEMS = ATTENTION_TILE * STRIDE, ROWS_ELEMS = ROWS * HSP;
    static constexpr int WEIGHT_ELEMS = ROWS * ATTENTION_TILE;
};

/* dst (num_rows, stride) = rows first.. of a head's (T, HS) matrix; zero past T and HS. By the whole block. */
template<int HSP> DEV void attention_load(float* dst, int stride, int num_rows, const floatX* src, size_t ld, int first,
                                          AttentionDims a)
{
    for (int i = threadIdx.x; i < num_rows * HSP; i += ATTENTION_BLOCK) {
        const int row = i / HSP, d = i % HSP;
        const bool inside = first + row < a.T && d < a.HS;
        dst[row * stride + d] = inside ? load_f(src[(first + row) * ld + d]) : 0.0f;
    }
}

template<int HSP> DEV void attention_load_tile(float* dst, const floatX* src, size_t ld, int first, AttentionDims a)
{
    attention_load<HSP>(dst, AttentionShape<HSP>::STRIDE, ATTENTION_TILE, src, ld, first, a);
}

template<int HSP> DEV void attention_load_rows(float* dst, const floatX* src, size_t ld, int first, AttentionDims a)
{
    attention_load<HSP>(dst, HSP, AttentionShape<HSP>::ROWS, src, ld, first, a);
}

/* The first tile of the other side that a block of rows needs: the one with this row. */
DEV int attention_tile_of(int row) { return row - row % ATTENTION_TILE; }

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

/* Scores that the spans hide become -inf: of R queries from `query` on and the lane's key, from `key` on. Then of R
 * keys and the lane's query. Lane r loads the bound of row r: one each in R registers would not fit. */
template<int R> DEV void attention_hide_keys(float (&s)[R], int query, int key, int b, AttentionDims a)
{
    if (a.spans.first_key == nullptr) return;
    const int lane = threadIdx.x % 32, first_key = attention_first_key(a, b, query + lane % R);
#pragma unroll
    for (int r = 0; r < R; r++)
        if (key + lane < __shfl_sync(0xffffffffu, first_key, r)) s[r] = -INFINITY;
}
template<int R> DEV void attention_hide_queries(float (&s)[R], int key, int query, int b, AttentionDims a)
{
    if (a.spans.last_query == nullptr) return;
    const int lane = threadIdx.x % 32, last_query = attention_last_query(a, b, key + lane % R);
#pragma unroll
    for (int r = 0; r < R; r++)
        if (query + lane > __shfl_sync(0xffffffffu, last_query, r)) s[r] = -INFINITY;
}

/* sum[r][c] += sum_j weight[r][j] * tile[j][lane + 32 c]. The weights are the warp's own, in shared memory. */
template<int HSP> DEV void attention_add(float (&sum)[AttentionShape<HSP>::R][AttentionShape<HSP>::LANE],
                                         const float* weight, const float* tile)
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

/* grid (query blocks, NH, B), the longest first. Rows are queries, lanes keys. */
template<int HSP, bool DROPS> static __global__ void __launch_bounds__(ATTENTION_BLOCK, 3)
attention_forward_kernel(floatX* out, float* lse, const floatX* qkv, AttentionDims a, Dropout d)
{
    typedef AttentionShape<HSP> S;
    DYN_SHARED(float, shared);
    float *tile = shared, *queries = tile + S::TILE_ELEMS, *weights = queries + S::ROWS_ELEMS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int h = blockIdx.y, b = blockIdx.z, kv_head = h / (a.NH / a.NKV);
    const int first = (gridDim.x - 1 - blockIdx.x) * S::ROWS, row = first + warp * S::R;
    const size_t ld = attention_ld_qkv(a);
    const floatX *k = qkv + attention_k(a, b, kv_head), *v = qkv + attention_v(a, b, kv_head);
    float max_score[S::R], sum[S::R], acc[S::R][S::LANE] = {};
#pragma unroll
    for (int r = 0; r < S::R; r++) max_score[r] = ATTENTION_MIN_SCORE, sum[r] = 0.0f;
    attention_load_rows<HSP>(queries, qkv + attention_q(a, b, h), ld, first, a);
    queries += warp * S::R * HSP, weights += warp * S::R * ATTENTION_TILE;

    for (int key = attention_tile_of(attention_first_key(a, b, first)); key < min(first + S::ROWS, a.T);
         key += ATTENTION_TILE) {
        __syncthreads();
        attention_load_tile<HSP>(tile, k, ld, key, a);
        __syncthreads();
        float p[S::R];
        attention_dots<HSP>(p, queries, tile);
        attention_hide_keys(p, row, key, b, a);
#pragma unroll
        for (int r = 0; r < S::R; r++) {
            const float score = key + lane <= row + r ? a.scale * p[r] : -INFINITY;
            const float new_max = fmaxf(max_score[r], warp_max(score)), shrink = expf(max_score[r] - new_max);
            const float weight = expf(score - new_max);
            max_score[r] = new_max;
            sum[r] = sum[r] * shrink + weight;                  // of this lane's keys
            weights[r * ATTENTION_TILE + lane] = weight;
            if constexpr (DROPS)
                weights[r * ATTENTION_TILE + lane] =
                    weight * attention_keep(dropout_key(d, b, h), d, row + r, key + lane, a.T);
#pragma unroll
            for (int c = 0; c < S::LANE; c++) acc[r][c] *= shrink;
        }
        __syncthreads();
        attention_load_tile<HSP>(tile, v, ld, key, a);
        __syncthreads();
        attention_add<HSP>(acc, weights, tile);
    }
#pragma unroll
    for (int r = 0; r < S::R; r++) {
        const float total = warp_sum(sum[r]);
        if (row + r >= a.T) break;
        floatX* o = out + attention_o(a, b, h) + (row + r) * attention_ld_out(a);
#pragma unroll
        for (int c = 0; c < S::LANE; c++)
            if (lane + 32 * c < a.HS) store_f(o + lane + 32 * c, acc[r][c] / total);
        if (lane == 0) lse[attention_l(a, b, h) + row + r] = max_score[r] + logf(total);
    }
}

/* delta (B,NH,T): a warp an element */
static __global__ void attention_delta_kernel(float* delta, const floatX* dout, const floatX* out, AttentionDims a)
{
    const size_t idx = (size_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, T = a.T, NH = a.NH;
    if (idx >= a.B * NH * T) return;
    const size_t t = idx % T, h = idx / T % NH, b = idx / T / NH, start = ((b * T + t) * NH + h) * a.HS;
    float sum = 0.0f;
    for (int d = threadIdx.x % 32; d < a.HS; d += 32) sum += load_f(dout[start + d]) * load_f(out[start + d]);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) delta[idx] = sum;
}

/* grid (query blocks, NH, B), the longest first. Rows are queries, lanes keys. */
template<int HSP, bool DROPS> static __global__ void __launch_bounds__(ATTENTION_BLOCK, 3)
attention_backward_q_kernel(floatX* dqkv, const floatX* dout, const float* lse, const float* delta, const floatX* qkv,
                            AttentionDims a, Dropout d)
{
    typedef AttentionShape<HSP> S;
    DYN_SHARED(float, shared);
    float *tile = shared, *queries = tile + S::TILE_ELEMS, *douts = queries + S::ROWS_ELEMS;
    float* weights = douts + S::ROWS_ELEMS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int h = blockIdx.y, b = blockIdx.z, kv_head = h / (a.NH / a.NKV);
    const int first = (gridDim.x - 1 - blockIdx.x) * S::ROWS, row = first + warp * S::R;
    const size_t ld = attention_ld_qkv(a), q = attention_q(a, b, h);
    const floatX *k = qkv + attention_k(a, b, kv_head), *v = qkv + attention_v(a, b, kv_head);
    const float *row_lse = lse + attention_l(a, b, h) + row, *row_delta = delta + attention_l(a, b, h) + row;
    float dq[S::R][S::LANE] = {};
    attention_load_rows<HSP>(queries, qkv + q, ld, first, a);
    attention_load_rows<HSP>(douts, dout + attention_o(a, b, h), attention_ld_out(a), first, a);
    queries += warp * S::R * HSP, douts += warp * S::R * HSP, weights += warp * S::R * ATTENTION_TILE;

    for (int key = attention_tile_of(attention_first_key(a, b, first)); key < min(first + S::ROWS, a.T);
         key += ATTENTION_TILE) {
        float dp[S::R], s[S::R];
        __syncthreads();
        attention_load_tile<HSP>(tile, v, ld, key, a);
        __syncthreads();
        attention_dots<HSP>(dp, douts, tile);
        __syncthreads();
        attention_load_tile<HSP>(tile, k, ld, key, a);
        __syncthreads();
        attention_dots<HSP>(s, queries, tile);
        attention_hide_keys(s, row, key, b, a);
#pragma unroll
        for (int r = 0; r < S::R; r++) {
            const bool seen = key + lane <= row + r && row + r < a.T;
            if constexpr (DROPS) dp[r] *= attention_keep(dropout_key(d, b, h), d, row + r, key + lane, a.T);
            const float ds = seen ? expf(a.scale * s[r] - row_lse[r]) * (dp[r] - row_delta[r]) : 0.0f;
            weights[r * ATTENTION_TILE + lane] = a.scale * ds;
        }
        __syncwarp();
        attention_add<HSP>(dq, weights, tile);
    }
#pragma unroll
    for (int r = 0; r < S::R; r++)
#pragma unroll
        for (int c = 0; c < S::LANE; c++)
            if (row + r < a.T && lane + 32 * c < a.HS) store_f(dqkv + q + (row + r) * ld + lane + 32 * c, dq[r][c]);
}

/* grid (key blocks, NKV, B). Rows are keys, lanes queries, of one query head of the group after another. */
template<int HSP, bool DROPS> static __global__ void __launch_bounds__(ATTENTION_BLOCK, 2)
attention_backward_kv_kernel(floatX* dqkv, const floatX* dout, const float* lse, const float* delta, const floatX* qkv,
                             AttentionDims a, Dropout d)
{
    typedef AttentionShape<HSP> S;
    DYN_SHARED(float, shared);
    float *tile = shared, *keys = tile + S::TILE_ELEMS, *values = keys + S::ROWS_ELEMS;
    float* weights = values + S::ROWS_ELEMS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int kv_head = blockIdx.y, b = blockIdx.z, group = a.NH / a.NKV;
    const int first = blockIdx.x * S::ROWS, row = first + warp * S::R;
    const size_t ld = attention_ld_qkv(a), ld_out = attention_ld_out(a);
    const size_t k = attention_k(a, b, kv_head), v = attention_v(a, b, kv_head);
    const int last_query = attention_last_query(a, b, first + S::ROWS - 1);
    float dk[S::R][S::LANE] = {}, dv[S::R][S::LANE] = {};
    attention_load_rows<HSP>(keys, qkv + k, ld, first, a);
    attention_load_rows<HSP>(values, qkv + v, ld, first, a);
    keys += warp * S::R * HSP, values += warp * S::R * HSP, weights += warp * S::R * ATTENTION_TILE;

    for (int h = kv_head * group; h < (kv_head + 1) * group; h++) {
        const floatX *q = qkv + attention_q(a, b, h), *dout_head = dout + attention_o(a, b, h);
        for (int query = attention_tile_of(first); query <= last_query; query += ATTENTION_TILE) {
            const bool exists = query + lane < a.T;
            const float query_lse = exists ? lse[attention_l(a, b, h) + query + lane] : 0.0f;
            const float query_delta = exists ? delta[attention_l(a, b, h) + query + lane] : 0.0f;
            float s[S::R], dp[S::R];
            __syncthreads();
            attention_load_tile<HSP>(tile, q, ld, query, a);
            __syncthreads();
            attention_dots<HSP>(s, keys, tile);
            attention_hide_queries(s, row, query, b, a);
#pragma unroll
            for (int r = 0; r < S::R; r++) {
                const bool seen = row + r <= query + lane && exists;
                s[r] = seen ? expf(a.scale * s[r] - query_lse) : 0.0f;
                weights[r * ATTENTION_TILE + lane] = s[r];
                if constexpr (DROPS)
                    weights[r * ATTENTION_TILE + lane] *=
                        attention_keep(dropout_key(d, b, h), d, query + lane, row + r, a.T);
            }
            __syncthreads();
            attention_load_tile<HSP>(tile, dout_head, ld_out, query, a);
            __syncthreads();
            attention_dots<HSP>(dp, values, tile);
            if constexpr (DROPS)
#pragma unroll
                for (int r = 0; r < S::R; r++)
                    dp[r] *= attention_keep(dropout_key(d, b, h), d, query + lane, row + r, a.T);
            attention_add<HSP>(dv, weights, tile);
            __syncwarp();
#pragma unroll
            for (int r = 0; r < S::R; r++) weights[r * ATTENTION_TILE + lane] = a.scale * s[r] * (dp[r] - query_delta);
            __syncthreads();
            attention_load_tile<HSP>(tile, q, ld, query, a);
            __syncthreads();
            attention_add<HSP>(dk, weights, tile);
        }
    }
#pragma unroll
    for (int r = 0; r < S::R; r++)
#pragma unroll
        for (int c = 0; c < S::LANE; c++)
            if (row + r < a.T && lane + 32 * c < a.HS) {
                const size_t at = (row + r) * ld + lane + 32 * c;
                store_f(dqkv + k + at, dk[r][c]);
                store_f(dqkv + v + at, dv[r][c]);
            }
}

template<int HSP, bool DROPS> static void attention_forward_launch(floatX* out, float* lse, const floatX* qkv,
                                                                   AttentionDims a, Dropout d, cudaStream_t stream)
{
    typedef AttentionShape<HSP> S;
    const dim3 grid(ceil_div(a.T, S::ROWS), a.NH, a.B);
    const size_t bytes = (S::TILE_ELEMS + S::ROWS_ELEMS + S::WEIGHT_ELEMS) * sizeof(float);
    attention_allow_shared(attention_forward_kernel<HSP, DROPS>, bytes);
    LAUNCH((attention_forward_kernel<HSP, DROPS>), grid, ATTENTION_BLOCK, bytes, stream, out, lse, qkv, a, d);
    CUDA_CHECK(cudaGetLastError());
}

template<int HSP, bool DROPS> static void attention_backward_launch(floatX* dqkv, float* delta, const floatX* dout,
                                                                    const floatX* out, const float* lse,
                                                                    const floatX* qkv, AttentionDims a, Dropout d,
                                                                    cudaStream_t stream)
{
    typedef AttentionShape<HSP> S;
    const size_t bytes = (S::TILE_ELEMS + 2 * S::ROWS_ELEMS + S::WEIGHT_ELEMS) * sizeof(float);
    const dim3 grid_q(ceil_div(a.T, S::ROWS), a.NH, a.B), grid_kv(ceil_div(a.T, S::ROWS), a.NKV, a.B);
    LAUNCH(attention_delta_kernel, ceil_div((size_t)a.B * a.NH * a.T, 8), 256, 0, stream, delta, dout, out, a);
    CUDA_CHECK(cudaGetLastError());
    attention_allow_shared(attention_backward_q_kernel<HSP, DROPS>, bytes);
    LAUNCH((attention_backward_q_kernel<HSP, DROPS>), grid_q, ATTENTION_BLOCK, bytes, stream, dqkv, dout, lse, delta,
           qkv, a, d);
    CUDA_CHECK(cudaGetLastError());
    attention_allow_shared(attention_backward_kv_kernel<HSP, DROPS>, bytes);
    LAUNCH((attention_backward_kv_kernel<HSP, DROPS>), grid_kv, ATTENTION_BLOCK, bytes, stream, dqkv, dout, lse, delta,
           qkv, a, d);
    CUDA_CHECK(cudaGetLastError());
}

#ifdef PREC_FP32
static bool attention_uses_mma(AttentionDims, std::initializer_list<const void*>) { return false; }
static size_t attention_scratch_elems(int B, int T, int NH, int HS) { (void)HS; return (size_t)B * NH * T; }
#else
/* The statistics of the rows, or for head sizes of the 32-bit path delta alone, which is less. */
static size_t attention_scratch_elems(int B, int T, int NH, int HS)
{
    return 2 * stats_elems({B, T, NH, NH, HS, 1.0f, {}});
}
#endif

#define ATTENTION_FOR(HS, drops, launch, ...) \
    ((HS) <= 64 ? launch<64, drops>(__VA_ARGS__) \
     : (HS) <= 128 ? launch<128, drops>(__VA_ARGS__) : launch<256, drops>(__VA_ARGS__))
#define ATTENTION_FOR_HEAD_SIZE(HS, d, launch, ...) \
    ((d).threshold > 0 ? ATTENTION_FOR(HS, true, launch, __VA_ARGS__) : ATTENTION_FOR(HS, false, launch, __VA_ARGS__))
#endif

static AttentionDims attention_dims(int B, int T, int NH, int NKV, int HS, float scale, const AttentionSpans& spans)
{
    ENSURE(NKV > 0 && NH % NKV == 0, "%d query heads cannot be shared out among %d key/value heads", NH, NKV);
#ifndef DEVICE_CPU
    ENSURE(HS <= 256, "head size %d: at most 256 on a GPU", HS);
#endif
    AttentionDims a = {B, T, NH, NKV, HS, scale, spans};
    if (spans.first_key == nullptr) a.spans.pairs = B * spans_pairs(T, 0);
    return a;
}

/* What the ops cost: of so many GEMMs the pairs of a query and a key that it sees, and so many rows of a head in and
 * out, with lse. */
static double attention_flops(int num_products, AttentionDims a)
{
    return 2.0 * num_products * a.NH * a.HS * a.spans.pairs;
}
static double attention_bytes(int num_heads, int B, int T, int NH, int HS)
{
    return (double)B * T * ((double)num_heads * HS * sizeof(floatX) + NH * sizeof(float));
}

static void attention_forward(floatX* out, float* lse, float* scratch, const floatX* qkv, int B, int T, int NH, int NKV,
                              int HS, float scale, cudaStream_t stream, Dropout d = {},
                              const AttentionSpans& spans = {})
{
    const AttentionDims a = attention_dims(B, T, NH, NKV, HS, scale, spans);
    OP(stream, attention_flops(2, a), attention_bytes(2 * (NH + NKV), B, T, NH, HS), B, T, NH, HS);
    ON_CPU(attention_forward_cpu(out, lse, scratch, qkv, a, d));
#ifndef DEVICE_CPU
    (void)scratch;
    if (!attention_uses_mma(a, {out, qkv}))
        ATTENTION_FOR_HEAD_SIZE(HS, d, attention_forward_launch, out, lse, qkv, a, d, stream);
#ifndef PREC_FP32
    else ATTENTION_FOR_HEAD_SIZE(HS, d, attention_forward_mma, out, lse, qkv, a, d, stream);
#endif
#endif
}

static void attention_backward(floatX* dqkv, float* scratch, const floatX* dout, const floatX* out, const float* lse,
                               const floatX* qkv, int B, int T, int NH, int NKV, int HS, float scale,
                               cudaStream_t stream, Dropout d = {}, const AttentionSpans& spans = {})
{
    const AttentionDims a = attention_dims(B, T, NH, NKV, HS, scale, spans);
    OP(stream, attention_flops(5, a), attention_bytes(4 * (NH + NKV), B, T, NH, HS), B, T, NH, HS);
    ON_CPU(attention_backward_cpu(dqkv, scratch, dout, out, lse, qkv, a, d));
#ifndef DEVICE_CPU
    if (!attention_uses_mma(a, {dqkv, scratch, dout, out, qkv}))
        ATTENTION_FOR_HEAD_SIZE(HS, d, attention_backward_launch, dqkv, scratch, dout, out, lse, qkv, a, d, stream);
#ifndef PREC_FP32
    else ATTENTION_FOR_HEAD_SIZE(HS, d, attention_backward_mma, dqkv, scratch, dout, out, lse, qkv, a, d, stream);
#endif
#endif
}

#ifdef OP_TESTS
#include "attention_tests.h"
#endif
