/* values.cuh: arrays of numbers whose storage a flag decides, so that its type is known only when the program runs.
 * Arithmetic sees floats. What is stored, by Dtype:
 *   FP32         the float
 *   BF16, FP16   the float rounded to nearest, or (BF16) stochastically: up with the probability that the dropped bits
 *                give, so that the expectation is the float itself and small changes are not always lost
 *   SPLIT        the float exactly, in two places: the bf16 nearest to it, which is the weight that the model uses, and
 *                the 16 bits below:  bits(x) = bits(weight) * 65536 + low,  low from -32768 to 32767.
 *                Halfway cases go away from zero, else low would not say to which side the weight was rounded
 *   values_convert  dst = src     values_add  dst += src     values_sum  dst = pieces[0] + pieces[1] + ..., in fp32
 *   weights_round   the weights beside an fp32 master, rounded as an optimizer does it
 * shapes  dst src (n) of any Dtype; pieces (R,n)
 * needs   any n
 * exact   each element by itself, pieces from left to right: same bits on every run. Stochastic rounding depends on a
 *         key and on the element's index alone (rectangle.h): the same for any number of ranks, stage and layout
 * cost    the bytes of what is read and written, judged against memory bandwidth
 * source  stochastic rounding: Gupta et al. 2015, arXiv:1502.02551 */
#pragma once
#include "rectangle.h"
#include "vec.cuh"

enum class Dtype { FP32, BF16, FP16, SPLIT };
static const char* const dtype_names[] = {"fp32", "bf16", "fp16", "split"};

#if defined(PREC_FP32)
static constexpr Dtype FLOATX_DTYPE = Dtype::FP32;
#elif defined(PREC_BF16)
static constexpr Dtype FLOATX_DTYPE = Dtype::BF16;
#else
static constexpr Dtype FLOATX_DTYPE = Dtype::FP16;
#endif

/* An array. `low` is of SPLIT alone. */
struct Values {
    void* at;
    Dtype dtype;
    unsigned short* low;
};

HOSTDEV size_t dtype_bytes(Dtype dtype) { return dtype == Dtype::FP32 ? 4 : 2; }   // SPLIT: of each half

/* Of an element. */
static double value_bytes(const Values& a) { return (double)dtype_bytes(a.dtype) * (a.low != nullptr ? 2 : 1); }

static Values values_from(Values a, size_t first)
{
    return Values{(char*)a.at + first * dtype_bytes(a.dtype), a.dtype, a.low != nullptr ? a.low + first : nullptr};
}
static Values values_of(float* p) { return Values{p, Dtype::FP32, nullptr}; }

// ---- one element

HOSTDEV uint32_t float_bits(float x) { return __builtin_bit_cast(uint32_t, x); }
HOSTDEV float bits_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }

/* The weight of a split float, or of an fp32 master: the bf16 nearest to x, halfway cases away from zero. */
HOSTDEV unsigned short bf16_nearest_bits(float x)
{
    return x != x ? (unsigned short)0x7fff : (unsigned short)((float_bits(x) + 0x8000u) >> 16);
}
HOSTDEV float split_join(unsigned short weight, unsigned short low)
{
    return bits_float(((uint32_t)weight << 16) + (uint32_t)(int32_t)(int16_t)low);
}
HOSTDEV unsigned short split_low(float x) { return (unsigned short)float_bits(x); }

HOSTDEV void store_weight(float* p, float x) { *p = x; }
HOSTDEV void store_weight(__nv_bfloat16* p, float x) { *p = __ushort_as_bfloat16(bf16_nearest_bits(x)); }
HOSTDEV void store_weight(__half* p, float x) { store_f(p, x); }

/* 64 random bits for element `idx`; 16 are needed to round once. */
HOSTDEV uint64_t random_bits(uint64_t key, uint64_t idx) { return mix64(key + (idx + 1) * GOLDEN_GAMMA); }

/* x rounded to bf16, up with the probability that the dropped bits name: `random` is 0 to 65535. */
HOSTDEV unsigned short bf16_random_bits(float x, uint32_t random)
{
    const uint32_t bits = float_bits(x);
    return (unsigned short)((bits + ((bits & 0x7f800000u) != 0x7f800000u ? random & 0xffffu : 0u)) >> 16);
}

HOSTDEV float value_load(const Values& a, size_t i)
{
    switch (a.dtype) {
    case Dtype::FP32: return ((const float*)a.at)[i];
    case Dtype::BF16: return load_f(((const __nv_bfloat16*)a.at)[i]);
    case Dtype::FP16: return load_f(((const __half*)a.at)[i]);
    case Dtype::SPLIT: return split_join(((const unsigned short*)a.at)[i], a.low[i]);
    }
    return 0.0f;
}

/* Rounded to nearest. */
HOSTDEV void value_store(const Values& a, size_t i, float x)
{
    switch (a.dtype) {
    case Dtype::FP32: ((float*)a.at)[i] = x; break;
    case Dtype::BF16: store_f((__nv_bfloat16*)a.at + i, x); break;
    case Dtype::FP16: store_f((__half*)a.at + i, x); break;
    case Dtype::SPLIT:
        ((unsigned short*)a.at)[i] = bf16_nearest_bits(x);
        a.low[i] = split_low(x);
        break;
    }
}

/* The same, with stochastic rounding to BF16. */
HOSTDEV void value_store_random(const Values& a, size_t i, float x, uint32_t random)
{
    if (a.dtype == Dtype::BF16) ((unsigned short*)a.at)[i] = bf16_random_bits(x, random);
    else value_store(a, i, x);
}

#ifdef DEVICE_CPU

/* Loops over arrays go through pieces that stay in the L1 cache, as floats: what is FP32 is used in place. */
static constexpr size_t VALUES_PIECE = 1024;

/* n <= VALUES_PIECE elements of `a` as floats: where they are, or in buf. What is copied comes in bursts, so the next
 * piece is fetched meanwhile. */
static float* values_get(const Values& a, size_t first, size_t n, float* buf)
{
    const Values from = values_from(a, first);
    if (a.dtype == Dtype::FP32) return (float*)from.at;
    for (size_t i = n; i < 2 * n; i += 32) __builtin_prefetch((const unsigned short*)from.at + i, 0, 2);
    if (a.dtype == Dtype::BF16) vf_copy(buf, (const __nv_bfloat16*)from.at, n);
    if (a.dtype == Dtype::FP16) vf_copy(buf, (const __half*)from.at, n);
    #pragma omp simd
    for (size_t i = 0; i < (a.dtype == Dtype::SPLIT ? n : 0); i++)
        buf[i] = split_join(((const unsigned short*)from.at)[i], from.low[i]);
    return buf;
}

/* The floats x back into `a`, unless they are there. */
static void values_put(const Values& a, size_t first, size_t n, const float* x)
{
    const Values to = values_from(a, first);
    if (a.dtype == Dtype::FP32 && to.at != x) memcpy(to.at, x, n * sizeof(float));
    if (a.dtype == Dtype::BF16) vf_copy((__nv_bfloat16*)to.at, x, n);
    if (a.dtype == Dtype::FP16) vf_copy((__half*)to.at, x, n);
    #pragma omp simd
    for (size_t i = 0; i < (a.dtype == Dtype::SPLIT ? n : 0); i++) {
        ((unsigned short*)to.at)[i] = bf16_nearest_bits(x[i]);
        to.low[i] = split_low(x[i]);
    }
}

/* The same, with BF16 rounded by 16 bits of random (n) from bit `shift` on. */
static void values_put_random(const Values& a, size_t first, size_t n, const float* x, const uint32_t* random,
                              int shift)
{
    if (a.dtype != Dtype::BF16) { values_put(a, first, n, x); return; }
    unsigned short* to = (unsigned short*)a.at + first;
    #pragma omp simd
    for (size_t i = 0; i < n; i++) to[i] = bf16_random_bits(x[i], random[i] >> shift);
}

static void values_sum_cpu(const Values& dst, const Values& pieces, int num_pieces, size_t n, bool adds)
{
    #pragma omp parallel for schedule(static)
    for (size_t first = 0; first < n; first += VALUES_PIECE) {
        const size_t count = n - first < VALUES_PIECE ? n - first : VALUES_PIECE;
        float buf[VALUES_PIECE], piece_buf[VALUES_PIECE], sum[VALUES_PIECE];
        memcpy(sum, values_get(pieces, first, count, piece_buf), count * sizeof(float));
        for (int k = 1; k < num_pieces; k++) {
            const float* piece = values_get(pieces, k * n + first, count, piece_buf);
            #pragma omp simd
            for (size_t i = 0; i < count; i++) sum[i] += piece[i];
        }
        float* out = adds ? values_get(dst, first, count, buf) : sum;
        #pragma omp simd
        for (size_t i = 0; i < (adds ? count : 0); i++) out[i] += sum[i];
        values_put(dst, first, count, out);
    }
}

static void weights_round_cpu(floatX* weights, const float* master, size_t n)
{
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) store_weight(weights + i, master[i]);
}

#else

/* W neighbouring elements. */
template <int W> DEV void load_halves(unsigned short (&x)[W], const unsigned short* p)
{
    if constexpr (W == 4) {
        HalfVec<unsigned short> v = load_whole(reinterpret_cast<const HalfVec<unsigned short>*>(p));
#pragma unroll
        for (int i = 0; i < W; i++) x[i] = v.v[i];
    } else {
#pragma unroll
        for (int i = 0; i < W; i++) x[i] = p[i];
    }
}
template <int W> DEV void store_halves(unsigned short* p, const unsigned short (&x)[W])
{
    if constexpr (W == 4) {
        HalfVec<unsigned short> v;
#pragma unroll
        for (int i = 0; i < W; i++) v.v[i] = x[i];
        store_whole(reinterpret_cast<HalfVec<unsigned short>*>(p), v);
    } else {
#pragma unroll
        for (int i = 0; i < W; i++) p[i] = x[i];
    }
}

template <int W> DEV void values_load(float (&x)[W], const Values& a, size_t i)
{
    if (a.dtype == Dtype::FP32) {
        load_vec(x, (const float*)a.at + i);
        return;
    }
    if (a.dtype == Dtype::FP16) {
        load_vec(x, (const __half*)a.at + i);
        return;
    }
    unsigned short high[W], low[W] = {};
    load_halves(high, (const unsigned short*)a.at + i);
    if (a.dtype == Dtype::SPLIT) load_halves(low, a.low + i);
#pragma unroll
    for (int k = 0; k < W; k++) x[k] = split_join(high[k], low[k]);
}

/* Rounded to nearest; with `random`, BF16 is rounded by its 16 bits from bit `shift` on. */
template <int W> DEV void values_store(const Values& a, size_t i, const float (&x)[W], const uint64_t* random = nullptr,
                                       int shift = 0)
{
    if (a.dtype == Dtype::FP32) {
        store_vec((float*)a.at + i, x);
    } else if (a.dtype == Dtype::FP16) {
        store_vec((__half*)a.at + i, x);
    } else if (a.dtype == Dtype::BF16 && random == nullptr) {
        store_vec((__nv_bfloat16*)a.at + i, x);
    } else {
        unsigned short high[W], low[W];
#pragma unroll
        for (int k = 0; k < W; k++) {
            high[k] = a.dtype == Dtype::SPLIT ? bf16_nearest_bits(x[k])
                                              : bf16_random_bits(x[k], (uint32_t)(random[k] >> shift));
            low[k] = split_low(x[k]);
        }
        store_halves((unsigned short*)a.at + i, high);
        if (a.dtype == Dtype::SPLIT) store_halves(a.low + i, low);
    }
}

/* The weights beside an fp32 master. */
template <int W> DEV void weights_store(floatX* p, const float (&x)[W])
{
    if constexpr (FLOATX_DTYPE == Dtype::BF16) {
        unsigned short bits[W];
#pragma unroll
        for (int k = 0; k < W; k++) bits[k] = bf16_nearest_bits(x[k]);
        store_halves(reinterpret_cast<unsigned short*>(p), bits);
    } else {
        store_vec(p, x);
    }
}

/* Does every vector of W elements start at a multiple of its size? */
static bool values_are_vec(const Values& a, size_t W)
{
    return (uintptr_t)a.at % (W * dtype_bytes(a.dtype)) == 0 && (uintptr_t)a.low % (2 * W) == 0;
}

template <int W> static __global__ void __launch_bounds__(256)
values_sum_kernel(Values dst, Values pieces, int num_pieces, size_t n, bool adds)
{
    size_t i = ((size_t)blockIdx.x * 256 + threadIdx.x) * W;
    if (i + W <= n) {
        float sum[W], x[W];
        values_load(sum, pieces, i);
        for (int p = 1; p < num_pieces; p++) {
            values_load(x, pieces, p * n + i);
#pragma unroll
            for (int k = 0; k < W; k++) sum[k] += x[k];
        }
        if (adds) values_load(x, dst, i);
#pragma unroll
        for (int k = 0; k < W; k++) sum[k] = adds ? x[k] + sum[k] : sum[k];
        values_store(dst, i, sum);
    } else {
        for (; i < n; i++) {
            float sum = value_load(pieces, i);
            for (int p = 1; p < num_pieces; p++) sum += value_load(pieces, p * n + i);
            value_store(dst, i, adds ? value_load(dst, i) + sum : sum);
        }
    }
}

template <int W> static __global__ void __launch_bounds__(256)
weights_round_kernel(floatX* weights, const float* master, size_t n)
{
    size_t i = ((size_t)blockIdx.x * 256 + threadIdx.x) * W;
    if (i + W <= n) {
        float x[W];
        load_vec(x, master + i);
        weights_store(weights + i, x);
    } else {
        for (; i < n; i++) store_weight(weights + i, master[i]);
    }
}

#endif

/* dst (n) = or += the sum of pieces (num_pieces,n). */
static void values_sum(Values dst, Values pieces, int num_pieces, size_t n, bool adds, cudaStream_t stream)
{
    if (n == 0) return;
    OP(stream, 0, n * ((adds ? 2 : 1) * value_bytes(dst) + num_pieces * value_bytes(pieces)), num_pieces, n);
    ON_CPU(values_sum_cpu(dst, pieces, num_pieces, n, adds));
#ifndef DEVICE_CPU
    if (values_are_vec(dst, 4) && values_are_vec(pieces, 4) && (num_pieces == 1 || n % 4 == 0))
        LAUNCH((values_sum_kernel<4>), (unsigned)ceil_div(n, 256 * 4), 256, 0, stream, dst, pieces, num_pieces, n,
               adds);
    else
        LAUNCH((values_sum_kernel<1>), (unsigned)ceil_div(n, 256), 256, 0, stream, dst, pieces, num_pieces, n, adds);
    CUDA_CHECK(cudaGetLastError());
#endif
}
static void values_convert(Values dst, Values src, size_t n, cudaStream_t stream)
{
    OP(stream, 0, n * (value_bytes(dst) + value_bytes(src)), n);
    values_sum(dst, src, 1, n, false, stream);
}
static void values_add(Values dst, Values src, size_t n, cudaStream_t stream)
{
    OP(stream, 0, n * (2 * value_bytes(dst) + value_bytes(src)), n);
    values_sum(dst, src, 1, n, true, stream);
}

/* weights (n) of master (n). */
static void weights_round(floatX* weights, const float* master, size_t n, cudaStream_t stream)
{
    if (n == 0) return;
    OP(stream, 0, (double)n * (sizeof(floatX) + sizeof(float)), n);
    ON_CPU(weights_round_cpu(weights, master, n));
#ifndef DEVICE_CPU
    if ((uintptr_t)weights % (4 * sizeof(floatX)) == 0 && (uintptr_t)master % 16 == 0)
        LAUNCH((weights_round_kernel<4>), (unsigned)ceil_div(n, 256 * 4), 256, 0, stream, weights, master, n);
    else
        LAUNCH((weights_round_kernel<1>), (unsigned)ceil_div(n, 256), 256, 0, stream, weights, master, n);
    CUDA_CHECK(cudaGetLastError());
#endif
}

#ifdef OP_TESTS
#include "optest.h"

template <class D, class S> static void values_sum_run(OpRun* run, Dtype dst_dtype, Dtype src_dtype)
{
    const size_t n = (size_t)run->dims[0], num_pieces = (size_t)run->dims[1];
    const bool adds = run->dims[4] != 0;
    OpTensor<D> dst = op_random_tensor<D>(run, "dst", OpKind::INOUT, n, 0.0, 1.0);
    OpTensor<S> pieces = op_input<S>(run, "pieces", n * num_pieces, 0.0, 1.0);
    const Values to = {dst.dev, dst_dtype, nullptr}, from = {pieces.dev, src_dtype, nullptr};
    OP_RUN(run, n * (sizeof(D) * (adds ? 2.0 : 1.0) + sizeof(S) * num_pieces), 0,
           values_sum(to, from, (int)num_pieces, n, adds, 0));
    for (size_t i = 0; i < n; i++) {
        float sum = pieces.f32[i];
        for (size_t k = 1; k < num_pieces; k++) sum += pieces.f32[k * n + i];
        dst.f64[i] = adds ? dst.f32[i] + sum : sum;
    }
    op_check_exact(run, dst);
}

/* dims: n, pieces, Dtype of dst, of the pieces, 1 to add. */
static void values_sum_test(OpRun* run)
{
    const Dtype dst = (Dtype)run->dims[2], src = (Dtype)run->dims[3];
    if (dst == Dtype::FP32 && src == Dtype::FP32) values_sum_run<float, float>(run, dst, src);
    else if (dst == Dtype::FP32 && src == Dtype::BF16) values_sum_run<float, __nv_bfloat16>(run, dst, src);
    else if (dst == Dtype::FP32) values_sum_run<float, __half>(run, dst, src);
    else if (dst == Dtype::BF16 && src == Dtype::FP32) values_sum_run<__nv_bfloat16, float>(run, dst, src);
    else if (dst == Dtype::BF16) values_sum_run<__nv_bfloat16, __nv_bfloat16>(run, dst, src);
    else values_sum_run<__half, float>(run, dst, src);
}

/* Every float comes back from its two halves; stochastic rounding gives one of the two bf16 neighbours, and on
 * average the float itself: within 5 standard deviations of the mean of n. */
static void values_random_test(OpRun* run)
{
    const int n = run->dims[0];
    double num_wrong = 0;
    for (int i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)random_bits(7, i);
        if (i % 3 == 0) bits = (bits & 0xffff0000u) | 0x8000u;
        const float x = bits_float(bits);
        if (std::isfinite(x)) num_wrong += float_bits(split_join(bf16_nearest_bits(x), split_low(x))) != bits;
        else num_wrong += !(std::isnan(x) ? std::isnan(split_join(bf16_nearest_bits(x), split_low(x))) : true);
        if (std::isnan(x) || std::isinf(x)) continue;
        const unsigned short below = (unsigned short)(bits >> 16);
        const unsigned short random = bf16_random_bits(x, (uint32_t)random_bits(8, i));
        num_wrong += random != below && random != below + 1;
    }
    op_check_value(run, "halves joined, neighbours", num_wrong, 0.0, 0.0);
    for (float x : {1.0f + 1.0f / 512, -3.14159f, 1e-12f, 1e-40f, 0.0f, 1.0f}) {
        const float below = bits_float(float_bits(x) & 0xffff0000u);
        const double step = fabs((double)bits_float((float_bits(x) & 0xffff0000u) + 0x10000u) - below);
        double sum = 0;
        for (int i = 0; i < n; i++)
            sum += bits_float((uint32_t)bf16_random_bits(x, (uint32_t)random_bits(9, i)) << 16) - (double)x;
        const double share = fabs((double)x - below) / step;
        op_check_value(run, "mean of stochastic roundings", sum / n, 0.0, 5 * step * sqrt(share * (1 - share) / n));
    }
}

/* The nearer of the two neighbours, of two as near the one further from zero: every third is half way. dims: n,
 * elements by which both are shifted. */
static void weights_round_test(OpRun* run)
{
    const size_t n = (size_t)run->dims[0], shift = (size_t)run->dims[1], whole = n + shift;
    OpTensor<floatX> weights = op_inout<floatX>(run, "weights", whole, 0.0, 1.0);
    float* h_master = (float*)malloc_checked(whole * sizeof(float));
    for (size_t i = 0; i < whole; i++) {
        uint32_t bits = float_bits((float)((double)random_bits(3, i) / 1.8446744073709552e19 * 4.0 - 2.0));
        h_master[i] = bits_float(i % 3 == 0 ? (bits & 0xffff0000u) | 0x8000u : bits);
    }
    const float* master = (const float*)op_bytes(run, "master", OpKind::INPUT, h_master, whole * sizeof(float));
    OP_RUN(run, n * (sizeof(float) + sizeof(floatX)), 0, weights_round(weights.dev + shift, master + shift, n, 0));
    for (size_t i = shift; i < whole; i++) {
        double x = h_master[i], below = bits_float(float_bits(h_master[i]) & 0xffff0000u);
        double beyond = bits_float((float_bits(h_master[i]) & 0xffff0000u) + 0x10000u);
        weights.f64[i] = FLOATX_DTYPE != Dtype::BF16 ? x : fabs(x - below) < fabs(beyond - x) ? below : beyond;
    }
    op_check_exact(run, weights);
    free(h_master);
}

static const OpTest values_tests[] = {
    {"values_sum", values_sum_test, {1, 1, (int)Dtype::FP32, (int)Dtype::FP32, 0}, OpWhen::ALWAYS},
    {"values_sum", values_sum_test, {4099, 1, (int)Dtype::FP32, (int)Dtype::FP32, 1}, OpWhen::ALWAYS},
    {"values_sum", values_sum_test, {1037, 5, (int)Dtype::FP32, (int)Dtype::BF16, 0}, OpWhen::ALWAYS},
    {"values_sum", values_sum_test, {1036, 3, (int)Dtype::FP32, (int)Dtype::FP16, 1}, OpWhen::ALWAYS},
    {"values_sum", values_sum_test, {4099, 1, (int)Dtype::BF16, (int)Dtype::FP32, 1}, OpWhen::ALWAYS},
    {"values_sum", values_sum_test, {4099, 2, (int)Dtype::BF16, (int)Dtype::BF16, 1}, OpWhen::ALWAYS},
    {"values_sum", values_sum_test, {4099, 1, (int)Dtype::FP16, (int)Dtype::FP32, 0}, OpWhen::ALWAYS},
    {"values_random", values_random_test, {100000}, OpWhen::ALWAYS},
    {"weights_round", weights_round_test, {4099, 0}, OpWhen::ALWAYS},
    {"weights_round", weights_round_test, {1001, 1}, OpWhen::ALWAYS},
    {"values_sum", values_sum_test, {124 * 1000 * 1000, 1, (int)Dtype::FP32, (int)Dtype::FP32, 1}, OpWhen::BENCH},
};

#endif
