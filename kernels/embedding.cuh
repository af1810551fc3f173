/* embedding.cuh: token rows plus position rows, and their gradients. With rotary positions wpe and dwpe are null.
 *   out[n] = wte[tokens[n]] + wpe[positions[n]]      positions null: row n, of sequences of T, is at position n % T
 *   of wte there may be some rows only: a range of tokens. Rows of out whose token is not among them stay as they are,
 *   and rows of dout count for no gradient
 *   dwte[v] += sum of dout[n] over the places where tokens[n] == v      dwpe[t] += the same where positions[n] == t
 * shapes  out dout (B,T,C) floatX; tokens positions (B,T) int; wte (V,C) wpe (T,C) floatX or fp32;
 *         dwte (V,C) dwpe (T,C) fp32
 * writes  forward out =; backward dwte +=, dwpe +=
 * needs   any B, T, C >= 1; tokens within wte (the loader has checked them); positions below T, at most t at (b,t)
 * exact   fixed order of additions, no atomics: same bits on every run and for any number of CPU threads
 * cost    forward 2*B*T*C*s bytes; backward B*T*C*s and twice the fp32 rows touched. On a GPU also about B*T reads of
 *         tokens per distinct token, which grows with the square of B*T
 * source  llm.c sorts tokens into buckets on the host; here the first place of a token does the work for all of them */
#pragma once
#include <climits>
#include "vec.cuh"

/* The tokens of a piece of wte: that of its first row, and how many. */
typedef struct { int first, count; double share; } TokenRange;    // share: of all ids, to estimate what is moved
static const TokenRange ALL_TOKENS = {0, INT_MAX, 1};

#ifdef DEVICE_CPU
#include <omp.h>

/* E and P are the types of wte and wpe. */
template <class E, class P> static void embedding_forward_cpu(floatX* out, const int* tokens, const int* positions,
                                                              const E* wte, const P* wpe, TokenRange range, int N,
                                                              int T, int C)
{
    #pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const int place = tokens[n] - range.first;
        if (place < 0 || place >= range.count) continue;
        floatX* row = out + (size_t)n * C;
        const E* token_row = wte + (size_t)place * C;
        if (wpe == nullptr) {
            #pragma omp simd
            for (int c = 0; c < C; c++) store_f(row + c, load_f(token_row[c]));
            continue;
        }
        const P* position_row = wpe + (size_t)(positions ? positions[n] : n % T) * C;
        #pragma omp simd
        for (int c = 0; c < C; c++) store_f(row + c, load_f(token_row[c]) + load_f(position_row[c]));
    }
}

/* Rows collide, columns do not: each thread takes a range of columns, whole cache lines of them, through all rows. */
static void embedding_backward_cpu(float* dwte, float* dwpe, const floatX* dout, const int* tokens,
                                   const int* positions, TokenRange range, int B, int T, int C)
{
    #pragma omp parallel
    {
        const size_t num_lines = ceil_div(C, 16), num_threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const int first = (int)(num_lines * thread / num_threads * 16);
        const int end_line = (int)(num_lines * (thread + 1) / num_threads * 16), end = end_line < C ? end_line : C;
        for (int t = 0; t < T; t++) {
            for (int b = 0; b < B; b++) {
                const size_t n = (size_t)b * T + t;
                const int place = tokens[n] - range.first;
                if (place < 0 || place >= range.count) continue;
                float* token_row = dwte + (size_t)place * C;
                #pragma omp simd
                for (int c = first; c < end; c++) token_row[c] += load_f(dout[n * C + c]);
                if (dwpe == nullptr) continue;
                float* position_row = dwpe + (size_t)(positions ? positions[n] : t) * C;
                #pragma omp simd
                for (int c = first; c < end; c++) position_row[c] += load_f(dout[n * C + c]);
            }
        }
    }
}

#else

static constexpr int EMBEDDING_BLOCK = 256;
static constexpr int EMBEDDING_WARPS = EMBEDDING_BLOCK / 32;
static constexpr int EMBEDDING_LOOKS = 4;            // tokens a thread compares between two barriers
static constexpr int EMBEDDING_CHUNK = EMBEDDING_BLOCK * EMBEDDING_LOOKS;

/* A block a row. */
template <int W, class E, class P> static __global__ void __launch_bounds__(EMBEDDING_BLOCK)
embedding_forward_kernel(floatX* out, const int* tokens, const int* positions, const E* wte, const P* wpe,
                         TokenRange range, int T, int C)
{
    const size_t n = blockIdx.x;
    const int place = tokens[n] - range.first;
    if (place < 0 || place >= range.count) return;
    const size_t t = positions != nullptr ? (size_t)positions[n] : n % (size_t)T;
    for (int c = threadIdx.x * W; c < C; c += blockDim.x * W) {
        float x[W], position[W] = {};
        load_vec(x, wte + (size_t)place * C + c);
        if (wpe != nullptr) load_vec(position, wpe + t * C + c);
#pragma unroll
        for (int k = 0; k < W; k++) x[k] += position[k];
        store_vec(out + n * C + c, x);
    }
}

/* A block a position; with positions it looks for those rows of all, from t on in each sequence. */
template <int W> static __global__ void __launch_bounds__(EMBEDDING_BLOCK)
embedding_backward_wpe_kernel(float* dwpe, const floatX* dout, const int* tokens, const int* positions,
                              TokenRange range, int B, int T, int C)
{
    const int t = blockIdx.x, end = positions != nullptr ? T : t + 1;
    for (int c = threadIdx.x * W; c < C; c += blockDim.x * W) {
        float sum[W] = {}, x[W];
#pragma unroll 4
        for (int b = 0; b < B; b++)
#pragma unroll 1
            for (int n = b * T + t; n < b * T + end; n++) {
                const int place = tokens[n] - range.first;
                if (place < 0 || place >= range.count || (positions != nullptr && positions[n] != t)) continue;
                load_vec(x, dout + (size_t)n * C + c);
#pragma unroll
                for (int k = 0; k < W; k++) sum[k] += x[k];
            }
        load_vec(x, dwpe + (size_t)t * C + c);
#pragma unroll
        for (int k = 0; k < W; k++) x[k] += sum[k];
        store_vec(dwpe + (size_t)t * C + c, x);
    }
}

/* Block n asks whether tokens[n] is also further left; if so it is done, mostly after a few tests. If not, the token is
 * its own: it lists the token's places from n on, a chunk at a time and in order, and adds their rows in registers.
 * blockIdx.y is the range of columns. */
template <int W> static __global__ void __launch_bounds__(EMBEDDING_BLOCK)
embedding_backward_wte_kernel(float* dwte, const floatX* dout, const int* tokens, TokenRange range, int N, int C)
{
    SHARED(unsigned, matches, [EMBEDDING_LOOKS * EMBEDDING_WARPS]);
    SHARED(int, places, [EMBEDDING_CHUNK]);
    const int n = blockIdx.x, token = tokens[n], lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = token - range.first;
    if (row < 0 || row >= range.count) return;
    for (int end = n; end > 0; end -= EMBEDDING_CHUNK) {
        bool found = false;
        for (int look = 0; look < EMBEDDING_LOOKS; look++) {
            const int i = end - 1 - look * EMBEDDING_BLOCK - (int)threadIdx.x;
            if (i >= 0 && tokens[i] == token) found = true;
        }
        if (__syncthreads_or(found)) return;
    }
    const int c = (blockIdx.y * EMBEDDING_BLOCK + threadIdx.x) * W;
    float sum[W] = {}, x[W];
    for (int start = n; start < N; start += EMBEDDING_CHUNK) {
        bool found = false;
        for (int look = 0; look < EMBEDDING_LOOKS; look++) {
            const int i = start + look * EMBEDDING_BLOCK + (int)threadIdx.x;
            const unsigned mask = __ballot_sync(0xffffffffu, i < N && tokens[i] == token);
            if (lane == 0) matches[look * EMBEDDING_WARPS + warp] = mask;
            if (mask != 0) found = true;
        }
        if (!__syncthreads_or(found)) continue;
        int num_places = 0;
        for (int word = 0; word < EMBEDDING_LOOKS * EMBEDDING_WARPS; word++) {
            const unsigned mask = matches[word];
            if (word % EMBEDDING_WARPS == warp && (mask >> lane & 1) != 0)
                places[num_places + __popc(mask & ((1u << lane) - 1))] = start + word * 32 + lane;
            num_places += __popc(mask);
        }
        __syncthreads();
        if (c >= C) continue;
#pragma unroll 4
        for (int place = 0; place < num_places; place++) {
            load_vec(x, dout + (size_t)places[place] * C + c);
#pragma unroll
            for (int k = 0; k < W; k++) sum[k] += x[k];
        }
    }
    if (c >= C) return;
    load_vec(x, dwte + (size_t)row * C + c);
#pragma unroll
    for (int k = 0; k < W; k++) x[k] += sum[k];
    store_vec(dwte + (size_t)row * C + c, x);
}

static unsigned embedding_block(int C, int width)
{
    const size_t threads = round_up(ceil_div(C, width), 32);
    return threads < EMBEDDING_BLOCK ? (unsigned)threads : EMBEDDING_BLOCK;
}

template <int W> static void embedding_backward_launch(float* dwte, float* dwpe, const floatX* dout, const int* tokens,
                                                       const int* positions, TokenRange range, int B, int T, int C,
                                                       cudaStream_t stream)
{
    if (dwpe != nullptr)
        LAUNCH((embedding_backward_wpe_kernel<W>), T, embedding_block(C, W), 0, stream, dwpe, dout, tokens,
               positions, range, B, T, C);
    CUDA_CHECK(cudaGetLastError());
    const dim3 grid(B * T, (unsigned)ceil_div(C, EMBEDDING_BLOCK * W));
    LAUNCH((embedding_backward_wte_kernel<W>), grid, EMBEDDING_BLOCK, 0, stream, dwte, dout, tokens, range, B * T,
           C);
    CUDA_CHECK(cudaGetLastError());
}

#endif

/* positions null: row n is at position n % T. */
template <class E, class P> static void embedding_rows(floatX* out, const int* tokens, const int* positions,
                                                       const E* wte, const P* wpe, TokenRange range, int N, int T,
                                                       int C, cudaStream_t stream)
{
    OP(stream, 0, 2.0 * N * range.share * C * sizeof(floatX), N, C);
    ON_CPU(embedding_forward_cpu(out, tokens, positions, wte, wpe, range, N, T, C));
#ifndef DEVICE_CPU
    if (is_vec(out, C) && is_vec(wte, C) && is_vec(wpe, C))
        LAUNCH((embedding_forward_kernel<VEC, E, P>), N, embedding_block(C, VEC), 0, stream, out, tokens, positions,
               wte, wpe, range, T, C);
    else
        LAUNCH((embedding_forward_kernel<1, E, P>), N, embedding_block(C, 1), 0, stream, out, tokens, positions, wte,
               wpe, range, T, C);
    CUDA_CHECK(cudaGetLastError());
#endif
}

/* Of the tokens in the range as many as it has are taken to be different. */
static double embedding_backward_bytes(bool positions, double B, double T, double C, TokenRange range)
{
    const double rows = B * T * range.share, different = fmin(rows, range.count);
    return rows * C * sizeof(floatX) + 2 * (different + (positions ? T : 0)) * C * sizeof(float);
}

static void embedding_backward(float* dwte, float* dwpe, const floatX* dout, const int* tokens, const int* positions,
                               int B, int T, int C, cudaStream_t stream, TokenRange range = ALL_TOKENS)
{
    OP(stream, 0, embedding_backward_bytes(dwpe != nullptr, B, T, C, range), B, T, C);
    ON_CPU(embedding_backward_cpu(dwte, dwpe, dout, tokens, positions, range, B, T, C));
#ifndef DEVICE_CPU
    if (is_vec(dwte, C) && is_vec(dwpe, C) && is_vec(dout, C))
        embedding_backward_launch<4>(dwte, dwpe, dout, tokens, positions, range, B, T, C, stream);
    else
        embedding_backward_launch<1>(dwte, dwpe, dout, tokens, positions, range, B, T, C, stream);
#endif
}

#ifdef OP_TESTS
#include "optest.h"

template <class R> static void embedding_forward_ref(R* out, const int* tokens, const R* wte, const R* wpe, int B,
                                                     int T, int C, const int* positions = nullptr)
{
    for (int n = 0; n < B * T; n++)
        for (int c = 0; c < C; c++)
            out[(size_t)n * C + c] = wte[(size_t)tokens[n] * C + c] +
                                     (wpe ? wpe[(size_t)(positions ? positions[n] : n % T) * C + c] : 0);
}

template <class R> static void embedding_backward_ref(R* dwte, R* dwpe, const R* dout, const int* tokens, int B, int T,
                                                      int C, const int* positions = nullptr)
{
    for (int n = 0; n < B * T; n++)
        for (int c = 0; c < C; c++) {
            dwte[(size_t)tokens[n] * C + c] += dout[(size_t)n * C + c];
            if (dwpe != nullptr) dwpe[(size_t)(positions ? positions[n] : n % T) * C + c] += dout[(size_t)n * C + c];
        }
}

static void embedding_forward_test(OpRun* run)
{
    const int B = run->dims[0], T = run->dims[1], C = run->dims[2], V = run->dims[3];
    OpInts tokens = op_ints(run, "tokens", (size_t)B * T, 0, V);
    OpTensor<floatX> wte = op_input<floatX>(run, "wte", (size_t)V * C, 0.0, 1.0);
    OpTensor<floatX> wpe = op_input<floatX>(run, "wpe", (size_t)T * C, 0.0, 1.0);
    OpTensor<floatX> out = op_output<floatX>(run, "out", (size_t)B * T * C);
    OP_RUN(run, 2.0 * out.n * sizeof(floatX), 0,
           embedding_rows(out.dev, tokens.dev, nullptr, wte.dev, wpe.dev, ALL_TOKENS, B * T, T, C, 0));
    embedding_forward_ref(out.f64, tokens.h, wte.f64, wpe.f64, B, T, C);
    op_check_exact(run, out);
}

/* Positions as given, here backwards. */
template <class E, class P> static void embedding_at_test(OpRun* run)
{
    const int N = run->dims[0], C = run->dims[1];
    OpInts tokens = op_ints(run, "tokens", N, 0, 5), positions = op_ints(run, "positions", N, 0, 1);
    for (int n = 0; n < N; n++) positions.h[n] = N - 1 - n;
    op_upload(run, "positions");
    OpTensor<E> wte = op_grid<E>(run, "wte", OpKind::INPUT, (size_t)5 * C);
    OpTensor<P> wpe = op_grid<P>(run, "wpe", OpKind::INPUT, (size_t)N * C);
    OpTensor<floatX> out = op_output<floatX>(run, "out", (size_t)N * C);
    OP_RUN(run, 0, 0, embedding_rows(out.dev, tokens.dev, positions.dev, wte.dev, wpe.dev, ALL_TOKENS, N, 1, C, 0));
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++)
            out.f64[n * C + c] = wte.f64[tokens.h[n] * C + c] + wpe.f64[(N - 1 - n) * C + c];
    op_check_exact(run, out);
}

/* Without positions, as rotary models have it, and with wte in two pieces. */
template <class E> static void embedding_rows_test(OpRun* run)
{
    const int B = run->dims[0], T = run->dims[1], C = run->dims[2], V = run->dims[3];
    const size_t N = (size_t)B * T;
    OpInts tokens = op_ints(run, "tokens", N, 0, V);
    OpTensor<E> wte = op_grid<E>(run, "wte", OpKind::INPUT, (size_t)V * C);
    OpTensor<floatX> out = op_output<floatX>(run, "out", N * C);
    OpTensor<floatX> dout = op_grid<floatX>(run, "dout", OpKind::INPUT, N * C);
    OpTensor<float> dwte = op_grid<float>(run, "dwte", OpKind::INOUT, (size_t)V * C);
    const floatX* no_wpe = nullptr;
    float* no_dwpe = nullptr;
    const TokenRange pieces[] = {{0, V / 3, 0.33}, {V / 3, V - V / 3, 0.67}};    // wte in two pieces
    const size_t second = (size_t)pieces[1].first * C;
    OP_RUN(run, 0, 0,
           (embedding_rows(out.dev, tokens.dev, nullptr, wte.dev, no_wpe, pieces[0], N, T, C, 0),
            embedding_rows(out.dev, tokens.dev, nullptr, wte.dev + second, no_wpe, pieces[1], N, T, C, 0),
            embedding_backward(dwte.dev, no_dwpe, dout.dev, tokens.dev, nullptr, B, T, C, 0, pieces[0]),
            embedding_backward(dwte.dev + second, no_dwpe, dout.dev, tokens.dev, nullptr, B, T, C, 0, pieces[1])));
    embedding_forward_ref<double>(out.f64, tokens.h, wte.f64, nullptr, B, T, C);
    embedding_backward_ref<double>(dwte.f64, nullptr, dout.f64, tokens.h, B, T, C);
    op_check_exact(run, out);
    op_check_exact(run, dwte);
}

/* Sums of grid values are exact, so a row added twice or left out shows. With a period (the fifth size) a token's
 * places are exactly that far apart; else every second token is one of a few, so that some lists of places are long.
 * With documents (the seventh) positions begin anew every so many tokens. */
static void embedding_backward_test(OpRun* run)
{
    const int B = run->dims[0], T = run->dims[1], C = run->dims[2], V = run->dims[3], period = run->dims[4];
    const int cut = run->dims[5];                    // the first token of a second piece of wte; 0: one piece
    const int document = run->dims[6];
    const size_t N = (size_t)B * T, num_rows = N < (size_t)V ? N : (size_t)V;
    OpInts tokens = op_ints(run, "tokens", N, 0, V), positions = op_ints(run, "positions", N, 0, 1);
    for (size_t n = 0; document > 0 && n < N; n++) positions.h[n] = (int)(n % T) % document;
    op_upload(run, "positions");
    const int *given = document > 0 ? positions.dev : nullptr, *h_given = document > 0 ? positions.h : nullptr;
    for (size_t n = 0; n < N; n++) {
        if (period > 0) tokens.h[n] = (int)(n % period);
        else if (n % 2 == 0) tokens.h[n] %= V < 8 ? V : 8;
    }
    op_upload(run, "tokens");
    OpTensor<floatX> dout = op_grid<floatX>(run, "dout", OpKind::INPUT, N * C);
    OpTensor<float> dwte = op_grid<float>(run, "dwte", OpKind::INOUT, (size_t)V * C);
    OpTensor<float> dwpe = op_grid<float>(run, "dwpe", OpKind::INOUT, (size_t)T * C);
    const TokenRange low = {0, cut, 0.5}, high = {cut, V - cut, 0.5};
    auto backward = [&] {
        if (cut == 0) return embedding_backward(dwte.dev, dwpe.dev, dout.dev, tokens.dev, given, B, T, C, 0);
        embedding_backward(dwte.dev, dwpe.dev, dout.dev, tokens.dev, given, B, T, C, 0, low);
        embedding_backward(dwte.dev + (size_t)cut * C, dwpe.dev, dout.dev, tokens.dev, given, B, T, C, 0, high);
    };
    OP_RUN(run, (double)dout.n * sizeof(floatX) + 8.0 * C * (num_rows + T), 0, backward());
    double* out = op_host(run, N * C);
    embedding_backward_ref(dwte.f64, dwpe.f64, dout.f64, tokens.h, B, T, C, h_given);
    op_check_exact(run, dwte);
    op_check_exact(run, dwpe);
    double* wte = op_host(run, dwte.n);              // values do not matter to a linear map
    double* wpe = op_host(run, dwpe.n);
    memset(wte, 0, dwte.n * sizeof(double));
    memset(wpe, 0, dwpe.n * sizeof(double));
    OpTensor<float> wte_probe = dwte, wpe_probe = dwpe;
    wte_probe.f64 = wte;
    wpe_probe.f64 = wpe;
#define EMBEDDING_OBJECTIVE \
    (embedding_forward_ref(out, tokens.h, wte, wpe, B, T, C, h_given), op_dot(out, dout.f64, N * C))
    if (N * C < 100000) {
        OP_CHECK_GRAD(run, dwte, wte_probe, EMBEDDING_OBJECTIVE);
        OP_CHECK_GRAD(run, dwpe, wpe_probe, EMBEDDING_OBJECTIVE);
    }
#undef EMBEDDING_OBJECTIVE
}

static const OpTest embedding_tests[] = {
    {"embedding_forward", embedding_forward_test, {1, 1, 1, 1}, OpWhen::ALWAYS},
    {"embedding_forward", embedding_forward_test, {2, 5, 33, 11}, OpWhen::ALWAYS},
    {"embedding_forward", embedding_forward_test, {3, 17, 768, 300}, OpWhen::ALWAYS},
    {"embedding_forward", embedding_forward_test, {4, 256, 1600, 5000}, OpWhen::LARGE},
    {"embedding_at", embedding_at_test<floatX, floatX>, {7, 33}, OpWhen::ALWAYS},
    {"embedding_at", embedding_at_test<floatX, floatX>, {5, 64}, OpWhen::ALWAYS},
    {"embedding_rows", embedding_rows_test<floatX>, {2, 9, 33, 11}, OpWhen::ALWAYS},
    {"embedding_rows", embedding_rows_test<floatX>, {3, 17, 64, 30}, OpWhen::ALWAYS},
#ifndef PREC_FP32
    {"embedding_at, fp32 wte", embedding_at_test<float, floatX>, {5, 64}, OpWhen::ALWAYS},
    {"embedding_at, fp32 wpe", embedding_at_test<floatX, float>, {5, 64}, OpWhen::ALWAYS},
    {"embedding_at, fp32 wte", embedding_at_test<float, float>, {7, 33}, OpWhen::ALWAYS},
    {"embedding_rows, fp32 wte", embedding_rows_test<float>, {2, 9, 33, 11}, OpWhen::ALWAYS},
    {"embedding_rows, fp32 wte", embedding_rows_test<float>, {3, 17, 64, 30}, OpWhen::ALWAYS},
#endif
    {"embedding_backward", embedding_backward_test, {1, 1, 1, 1}, OpWhen::ALWAYS},
    {"embedding_backward", embedding_backward_test, {3, 7, 5, 4}, OpWhen::ALWAYS},
    {"embedding_backward", embedding_backward_test, {2, 100, 40, 50}, OpWhen::ALWAYS},
    {"embedding_backward", embedding_backward_test, {4, 300, 8, 900}, OpWhen::ALWAYS},
    {"embedding_backward", embedding_backward_test, {2, 100, 40, 50, 0, 5}, OpWhen::ALWAYS},
    {"embedding_backward", embedding_backward_test, {3, 40, 7, 30, 11, 9}, OpWhen::ALWAYS},
    {"embedding_backward", embedding_backward_test, {1, 9, 2100, 6}, OpWhen::ALWAYS},
    {"embedding_backward", embedding_backward_test, {5, 220, 4, 1100, 1024}, OpWhen::ALWAYS},
    {"embedding_backward", embedding_backward_test, {5, 220, 4, 1100, 1025}, OpWhen::ALWAYS},
    {"embedding_backward", embedding_backward_test, {2, 70, 33, 20, 0, 0, 9}, OpWhen::ALWAYS},
    {"embedding_backward", embedding_backward_test, {3, 40, 64, 20, 0, 7, 17}, OpWhen::ALWAYS},
    {"embedding_backward", embedding_backward_test, {4, 1024, 771, 2000}, OpWhen::LARGE},
    {"embedding_forward", embedding_forward_test, {16, 1024, 768, 50257}, OpWhen::BENCH},
    {"embedding_backward", embedding_backward_test, {16, 1024, 768, 50257}, OpWhen::BENCH},
};

#endif
