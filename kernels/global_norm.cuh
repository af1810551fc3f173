/* global_norm.cuh: what one rank knows about all its gradients, and a fingerprint of any state.
 *   global_norm_accumulate: result[0] += sum of grad^2 over finite values    result[1] += number of Inf and NaN
 *   nonfinite_find:         found[i] = part i of the gradients is non-finite; of a step skipped for one only
 *   state_hash_accumulate:  result += sum_i mix(index of element i, bits of float i) mod 2^64
 *                         by the indices in a whole of which the values are some (rectangle.h)
 * shapes  grad (n) FP32 or floatX's; values (n) any Dtype; result 2 double, or 1 uint64;
 *         scratch (global_norm_scratch_elems()) double
 * writes  result +=, so units and slices follow one another; the caller zeroes it once and all-reduces it at the end
 * needs   any n; no finite gradient overflows the norm. The CPU squares in double. A GPU squares and adds in pairs of
 *         floats and has 4 operations in double for 64 elements: those with 1 unit for double in 64 would else take
 *         longer than memory, an element a clock and two units
 * exact   norm: fixed order for one n, for any number of CPU threads. Hash: integers, so any order and any cut into
 *         slices gives the same value: ranks, stages and layouts can be compared by one number.
 * cost    what is read, judged against memory bandwidth
 * source  mix is splitmix64's finaliser, Steele, Lea & Flood 2014 */
#pragma once
#include <cfloat>
#include "step.cuh"
#include "values.cuh"

static constexpr int GLOBAL_NORM_PARTS = 1024;

HOSTDEV unsigned long long state_hash_mix(unsigned long long idx, unsigned word)
{
    return mix64((idx + 1) * GOLDEN_GAMMA + word * 0xd1342543de82ef95ull);
}

/* What one rank holds of one tensor's gradient. */
struct GradPart { Values grad; size_t count; };

#ifdef DEVICE_CPU

static void nonfinite_find_cpu(int* found, const GradPart* parts, int num_parts)
{
    for (int i = 0; i < num_parts; i++) {
        found[i] = 0;
        for (size_t k = 0; k < parts[i].count && !found[i]; k++)
            found[i] = !(fabsf(value_load(parts[i].grad, k)) <= FLT_MAX);
    }
}

template <class T> static void global_norm_accumulate_cpu(double* result, double* scratch, const T* grad, size_t n)
{
    const size_t part_elems = round_up(ceil_div(n, GLOBAL_NORM_PARTS), 4096);
    const size_t num_parts = ceil_div(n, part_elems);
    #pragma omp parallel for if (num_parts > 1)
    for (size_t part = 0; part < num_parts; part++) {
        const T* g = grad + part * part_elems;
        const int count = (int)(part + 1 < num_parts ? part_elems : n - part * part_elems);
        double sum = 0.0;
        int num_finite = 0;
        #pragma omp simd reduction(+:sum, num_finite)
        for (int i = 0; i < count; i++) {
            const float value = load_f(g[i]);
            const bool finite = fabsf(value) <= FLT_MAX;
            const double x = (double)(finite ? value : 0.0f);
            sum += x * x;
            num_finite += finite;
        }
        scratch[2 * part] = sum;
        scratch[2 * part + 1] = (double)(count - num_finite);
    }
    for (size_t part = 0; part < num_parts; part++) {
        result[0] += scratch[2 * part];
        result[1] += scratch[2 * part + 1];
    }
}

static void state_hash_accumulate_cpu(unsigned long long* result, const Values& values, size_t n, Rectangle place)
{
    unsigned long long sum = 0;
    #pragma omp parallel for reduction(+:sum)
    for (size_t first = 0; first < n; first += VALUES_PIECE) {
        float buf[VALUES_PIECE];
        const size_t count = n - first < VALUES_PIECE ? n - first : VALUES_PIECE;
        const float* x = values_get(values, first, count, buf);
        for (size_t i = 0, in_row; i < count; i += in_row) {
            const size_t idx = element_index(place, first + i);
            in_row = elements_in_row(place, first + i, count - i);
            #pragma omp simd reduction(+:sum)
            for (size_t k = 0; k < in_row; k++) sum += state_hash_mix(idx + k, float_bits(x[i + k]));
        }
    }
    *result += sum;
}

#else

static constexpr int GLOBAL_NORM_BLOCK = 256;

/* A sum of squares as two floats, the second what the first lacks: together twice the bits of a float, in operations
 * that a GPU has for floats alone (Dekker 1971; Ogita, Rump & Oishi 2005). */
struct SumPair { float sum, rest; };

/* The square is two floats too, by an fma; what a sum is rounded by is computed from its parts. */
DEV void square_add(SumPair* s, float x)
{
    const float square = mul_rn(x, x), square_rest = fmaf(x, x, -square);
    const float sum = add_rn(s->sum, square), added = add_rn(sum, -s->sum);
    const float sum_rest = add_rn(add_rn(s->sum, -add_rn(sum, -added)), add_rn(square, -added));
    s->sum = sum;
    s->rest = add_rn(s->rest, add_rn(sum_rest, square_rest));
}

/* Moves what fits from `rest` to `sum`, so that `rest` stays small and exact. */
DEV void sum_pair_settle(SumPair* s)
{
    const float sum = add_rn(s->sum, s->rest);
    s->rest = add_rn(s->rest, -add_rn(sum, -s->sum));
    s->sum = sum;
}
DEV double sum_pair_value(const SumPair& s) { return (double)s.sum + (double)s.rest; }

/* Squares of finite values. What is so small or large that its square, or the rest of it, leaves the range of a float
 * is scaled by a power of two and summed by itself: there is little of it. */
struct SumSquares { SumPair most, tiny, huge; };
static constexpr float TINY_BELOW = 0x1p-50f, TINY_SCALE = 0x1p100f, HUGE_FROM = 0x1p60f, HUGE_SCALE = 0x1p-96f;

DEV void sum_squares_add(SumSquares* s, float x)
{
    const float size = fabsf(x);
    if (size == 0.0f || (size >= TINY_BELOW && size < HUGE_FROM)) square_add(&s->most, x);
    else if (size < TINY_BELOW) square_add(&s->tiny, x * TINY_SCALE);
    else if (size <= FLT_MAX) square_add(&s->huge, x * HUGE_SCALE);
}
DEV double sum_squares_value(const SumSquares& s)
{
    double sum = sum_pair_value(s.most);
    if (s.tiny.sum > 0.0f) sum += sum_pair_value(s.tiny) / ((double)TINY_SCALE * TINY_SCALE);
    if (s.huge.sum > 0.0f) sum += sum_pair_value(s.huge) / ((double)HUGE_SCALE * HUGE_SCALE);
    return sum;
}

/* Pairs are exact to 1e-13 over so many elements of a thread; then they are added to its double. */
static constexpr int GLOBAL_NORM_PAIR_ELEMS = 64;

template <int W, class T> static __global__ void __launch_bounds__(GLOBAL_NORM_BLOCK, 4)
global_norm_kernel(double* scratch, const T* grad, size_t n)
{
    SHARED(double, partial, [2][32]);
    double sum = 0.0;
    int num_bad = 0;
    const size_t stride = (size_t)gridDim.x * GLOBAL_NORM_BLOCK * W;
    size_t i = ((size_t)blockIdx.x * GLOBAL_NORM_BLOCK + threadIdx.x) * W;
    while (i < n) {
        SumSquares squares = {};
#pragma unroll 1
        for (int count = 0; count < GLOBAL_NORM_PAIR_ELEMS && i < n; count += W, i += stride) {
            float x[W] = {};
            if (i + W <= n) {
                load_vec(x, grad + i);
            } else {
                for (int k = 0; i + k < n; k++) x[k] = load_f(grad[i + k]);
            }
#pragma unroll
            for (int k = 0; k < W; k++) {
                sum_squares_add(&squares, x[k]);
                num_bad += fabsf(x[k]) <= FLT_MAX ? 0 : 1;
            }
            sum_pair_settle(&squares.most);
        }
        sum += sum_squares_value(squares);
    }
    sum = block_sum(sum, partial[0]);
    const double num_nonfinite = block_sum((double)num_bad, partial[1]);
    if (threadIdx.x == 0) {
        scratch[2 * blockIdx.x] = sum;
        scratch[2 * blockIdx.x + 1] = num_nonfinite;
    }
}

static __global__ void __launch_bounds__(GLOBAL_NORM_BLOCK)
global_norm_finish_kernel(double* result, const double* scratch, int num_parts)
{
    SHARED(double, partial, [2][32]);
    double sum = 0.0, num_nonfinite = 0.0;
    for (int part = threadIdx.x; part < num_parts; part += GLOBAL_NORM_BLOCK) {
        sum += scratch[2 * part];
        num_nonfinite += scratch[2 * part + 1];
    }
    sum = block_sum(sum, partial[0]);
    num_nonfinite = block_sum(num_nonfinite, partial[1]);
    if (threadIdx.x == 0) {
        result[0] += sum;
        result[1] += num_nonfinite;
    }
}

/* A block for each part: it runs on in bad steps alone, so that it need not be fast. */
static __global__ void __launch_bounds__(GLOBAL_NORM_BLOCK)
nonfinite_find_kernel(int* found, const GradPart* parts, const StepState* state)
{
    SHARED(double, partial, [32]);
    if (state->skip != Skip::NONFINITE) return;
    const GradPart part = parts[blockIdx.x];
    double count = 0.0;
    for (size_t k = threadIdx.x; k < part.count; k += GLOBAL_NORM_BLOCK)
        count += fabsf(value_load(part.grad, k)) <= FLT_MAX ? 0.0 : 1.0;
    count = block_sum(count, partial);
    if (threadIdx.x == 0) found[blockIdx.x] = count > 0.0;
}

/* Integer atomics: the order in which blocks arrive does not matter. */
static __global__ void __launch_bounds__(GLOBAL_NORM_BLOCK)
state_hash_kernel(unsigned long long* result, Values values, size_t n, Rectangle place)
{
    unsigned long long sum = 0;
    const size_t stride = (size_t)gridDim.x * GLOBAL_NORM_BLOCK;
    for (size_t i = (size_t)blockIdx.x * GLOBAL_NORM_BLOCK + threadIdx.x; i < n; i += stride)
        sum += state_hash_mix(element_index(place, i), float_bits(value_load(values, i)));
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) atomicAdd(result, sum);
}

static unsigned global_norm_grid(size_t n, int width)
{
    const size_t blocks = ceil_div(n, (size_t)GLOBAL_NORM_BLOCK * width);
    return blocks < GLOBAL_NORM_PARTS ? (unsigned)blocks : GLOBAL_NORM_PARTS;
}

#endif

static size_t global_norm_scratch_elems() { return 2 * GLOBAL_NORM_PARTS; }

template <class T>
static void global_norm_accumulate_of(double* result, double* scratch, const T* grad, size_t n, cudaStream_t stream)
{
    ON_CPU(global_norm_accumulate_cpu(result, scratch, grad, n));
#ifndef DEVICE_CPU
    const bool aligned = (uintptr_t)grad % (4 * sizeof(T)) == 0;
    const unsigned grid = global_norm_grid(n, aligned ? 4 : 1);
    if (aligned) LAUNCH((global_norm_kernel<4, T>), grid, GLOBAL_NORM_BLOCK, 0, stream, scratch, grad, n);
    else LAUNCH((global_norm_kernel<1, T>), grid, GLOBAL_NORM_BLOCK, 0, stream, scratch, grad, n);
    CUDA_CHECK(cudaGetLastError());
    LAUNCH(global_norm_finish_kernel, 1, GLOBAL_NORM_BLOCK, 0, stream, result, scratch, (int)grid);
    CUDA_CHECK(cudaGetLastError());
#endif
}

static void global_norm_accumulate(double* result, double* scratch, const Values& grad, size_t n, cudaStream_t stream)
{
    if (n == 0) return;
    OP(stream, 0, (double)n * dtype_bytes(grad.dtype), n);
    if (grad.dtype == Dtype::FP32) global_norm_accumulate_of(result, scratch, (const float*)grad.at, n, stream);
    else global_norm_accumulate_of(result, scratch, (const floatX*)grad.at, n, stream);
}

static void nonfinite_find(int* found, const GradPart* parts, int num_parts, const StepState* state,
                           cudaStream_t stream)
{
    OP(stream, 0, 0, num_parts);
    ON_CPU(if (state->skip == Skip::NONFINITE) nonfinite_find_cpu(found, parts, num_parts));
#ifndef DEVICE_CPU
    LAUNCH(nonfinite_find_kernel, (unsigned)num_parts, GLOBAL_NORM_BLOCK, 0, stream, found, parts, state);
    CUDA_CHECK(cudaGetLastError());
#endif
}

/* values (n): the elements of `place`. */
static void state_hash_accumulate(unsigned long long* result, const Values& values, size_t n, Rectangle place,
                                  cudaStream_t stream)
{
    if (n == 0) return;
    ON_CPU(state_hash_accumulate_cpu(result, values, n, place));
#ifndef DEVICE_CPU
    LAUNCH(state_hash_kernel, global_norm_grid(n, 4), GLOBAL_NORM_BLOCK, 0, stream, result, values, n, place);
    CUDA_CHECK(cudaGetLastError());
#endif
}

#ifdef OP_TESTS
#include "optest.h"

/* dims[1] = 1: the largest finite number, an infinity and a NaN are among the gradients; 2: all are below the smallest
 * normal number or near it, and some are 0; 3: of all sizes that floatX and float have; 4: all the same, so that every
 * sum is rounded to the same side. dims[2]: floatX. */
template <class T> static void global_norm_run(OpRun* run, Dtype dtype)
{
    const size_t n = (size_t)run->dims[0];
    const bool extremes = run->dims[1] == 1, tiny = run->dims[1] == 2, all_sizes = run->dims[1] == 3;
    const int max_exponent = dtype == Dtype::FP16 ? 15 : 127, num_exponents = dtype == Dtype::FP16 ? 40 : 276;
    OpTensor<T> grad = op_input<T>(run, "grad", n, 0.0, 1.0);
    double truth[2] = {tiny ? 0.0 : 3.0, 1.0};
    double* result = (double*)op_bytes(run, "result", OpKind::INOUT, truth, sizeof truth);
    double* scratch = op_scratch<double>(run, global_norm_scratch_elems());
    if (extremes && !run->bench) {
        T* h_grad = (T*)op_start_bytes(run, "grad");
        store_f(&h_grad[0], INFINITY);
        store_f(&h_grad[n / 2], NAN);
        store_f(&h_grad[n - 1], sizeof(T) == 4 ? -FLT_MAX : -65504.0f);
        op_upload(run, "grad");
        for (size_t i = 0; i < n; i++) grad.f64[i] = load_f(h_grad[i]);
    }
    if (all_sizes || run->dims[1] == 4) {
        T* h_grad = (T*)op_start_bytes(run, "grad");
        for (size_t i = 0; i < n; i++) {
            const int below = (int)(i * n % 7 * 97 + i) % num_exponents;
            store_f(&h_grad[i], all_sizes ? ldexpf(1.0f + 0.37f * (float)(i % 3), max_exponent - below) : 1.1f);
        }
        op_upload(run, "grad");
        for (size_t i = 0; i < n; i++) grad.f64[i] = load_f(h_grad[i]);
    }
    if (tiny) {
        T* h_grad = (T*)op_start_bytes(run, "grad");
        const float smallest = dtype == Dtype::FP16 ? 0x1p-14f : FLT_MIN;
        for (size_t i = 0; i < n; i++) store_f(&h_grad[i], i % 5 == 0 ? 0.0f : smallest * (float)grad.f64[i]);
        op_upload(run, "grad");
        for (size_t i = 0; i < n; i++) grad.f64[i] = load_f(h_grad[i]);
    }
    OP_RUN(run, (double)sizeof(T) * n, 0,
           global_norm_accumulate(result, scratch, Values{grad.dev, dtype, nullptr}, n, 0));
    long double sum = truth[0];                      // 17 million equal values: double loses more than the kernel
    for (size_t i = 0; i < n; i++) {
        sum += std::isfinite(grad.f64[i]) ? (long double)grad.f64[i] * grad.f64[i] : 0;
        truth[1] += !std::isfinite(grad.f64[i]);
    }
    truth[0] = (double)sum;
    const double* ours = (const double*)op_result(run, "result");
    op_check_value(run, "sum_squares", ours[0], truth[0], 1e-12 * truth[0]);
    op_check_value(run, "num_nonfinite", ours[1], truth[1], 0.0);
}

static void global_norm_test(OpRun* run)
{
    if (run->dims[2] != 0) global_norm_run<floatX>(run, FLOATX_DTYPE);
    else global_norm_run<float>(run, Dtype::FP32);
}

/* Of seven parts the third and the last are bad, and the fourth is empty; a step that is not skipped finds nothing. */
static void nonfinite_find_test(OpRun* run)
{
    enum { NUM_PARTS = 7 };
    const size_t n = (size_t)run->dims[0];
    const bool skipped = run->dims[1] != 0;
    OpTensor<float> grad = op_input<float>(run, "grad", NUM_PARTS * n, 0.0, 1.0);
    float* h_grad = (float*)op_start_bytes(run, "grad");
    h_grad[3 * n - 1] = NAN;
    h_grad[NUM_PARTS * n - 1] = -INFINITY;
    op_upload(run, "grad");
    GradPart h_parts[NUM_PARTS];
    for (int i = 0; i < NUM_PARTS; i++) h_parts[i] = GradPart{values_of(grad.dev + i * n), i == 3 ? 0 : n};
    StepState s = {};
    s.skip = skipped ? Skip::NONFINITE : Skip::NONE;
    int before[NUM_PARTS];
    for (int& x : before) x = -5;
    const GradPart* parts = (const GradPart*)op_bytes(run, "parts", OpKind::INPUT, h_parts, sizeof h_parts);
    const StepState* state = (const StepState*)op_bytes(run, "state", OpKind::INPUT, &s, sizeof s);
    int* found = (int*)op_bytes(run, "found", OpKind::INOUT, before, sizeof before);
    OP_RUN(run, 0, 0, nonfinite_find(found, parts, NUM_PARTS, state, 0));
    const int* ours = (const int*)op_result(run, "found");
    for (int i = 0; i < NUM_PARTS; i++)
        op_check_value(run, "found", ours[i], skipped ? i == 2 || i == NUM_PARTS - 1 : -5, 0.0);
}

/* In two slices, the later one first: the sum must be that of the whole. */
static void state_hash_two_slices(unsigned long long* result, float* words, size_t n, Rectangle place)
{
    const size_t cut = n / 3;
    state_hash_accumulate(result, values_of(words + cut), n - cut, rectangle_from(place, cut), 0);
    state_hash_accumulate(result, values_of(words), cut, place, 0);
}

static void state_hash_test(OpRun* run)
{
    const size_t n = (size_t)run->dims[0];
    OpTensor<float> words = op_input<float>(run, "words", n, 0.0, 1.0);
    unsigned long long truth = 5;
    unsigned long long* result = (unsigned long long*)op_bytes(run, "result", OpKind::INOUT, &truth, sizeof truth);
    OP_RUN(run, 4.0 * n, 0, state_hash_two_slices(result, words.dev, n, rectangle_in_line(1000)));
    const unsigned* h_words = (const unsigned*)op_start_bytes(run, "words");
    for (size_t i = 0; i < n; i++) truth += state_hash_mix(1000 + i, h_words[i]);
    const unsigned long long ours = *(const unsigned long long*)op_result(run, "result");
    op_check_value(run, "hash", ours == truth, 1.0, 0.0);
    if (n < 2) return;
    unsigned long long swapped = truth;              // the same words, two of them in each other's place
    swapped += state_hash_mix(1000, h_words[1]) - state_hash_mix(1000, h_words[0]);
    swapped += state_hash_mix(1001, h_words[0]) - state_hash_mix(1001, h_words[1]);
    op_check_value(run, "hash of swapped words", swapped != truth, 1.0, 0.0);
}

/* Columns of a matrix, in two slices of which the later may begin within a row. */
static void state_hash_rectangle_test(OpRun* run)
{
    const size_t rows = (size_t)run->dims[0], cols = (size_t)run->dims[1], n = rows * cols;
    const Rectangle place = {1000 + 3, 0, cols, cols + 5};
    OpTensor<float> words = op_input<float>(run, "words", n, 0.0, 1.0);
    unsigned long long truth = 5;
    unsigned long long* result = (unsigned long long*)op_bytes(run, "result", OpKind::INOUT, &truth, sizeof truth);
    OP_RUN(run, 4.0 * n, 0, state_hash_two_slices(result, words.dev, n, place));
    const unsigned* h_words = (const unsigned*)op_start_bytes(run, "words");
    for (size_t row = 0; row < rows; row++)
        for (size_t col = 0; col < cols; col++)
            truth += state_hash_mix(1000 + row * (cols + 5) + 3 + col, h_words[row * cols + col]);
    op_check_value(run, "hash", *(const unsigned long long*)op_result(run, "result") == truth, 1.0, 0.0);
}

static const OpTest global_norm_tests[] = {
    {"global_norm", global_norm_test, {1}, OpWhen::ALWAYS},
    {"global_norm", global_norm_test, {4097}, OpWhen::ALWAYS},
    {"global_norm", global_norm_test, {10007, 1}, OpWhen::ALWAYS},
    {"global_norm", global_norm_test, {10007, 1, 1}, OpWhen::ALWAYS},
    {"global_norm", global_norm_test, {10007, 2}, OpWhen::ALWAYS},
    {"global_norm", global_norm_test, {10007, 2, 1}, OpWhen::ALWAYS},
    {"global_norm", global_norm_test, {10007, 3}, OpWhen::ALWAYS},
    {"global_norm", global_norm_test, {10007, 3, 1}, OpWhen::ALWAYS},
    {"global_norm", global_norm_test, {100, 3}, OpWhen::ALWAYS},
    {"global_norm", global_norm_test, {17000000, 4}, OpWhen::LARGE},
    {"global_norm", global_norm_test, {1100003}, OpWhen::ALWAYS},
    {"global_norm", global_norm_test, {9000001, 1}, OpWhen::LARGE},
    {"nonfinite_find", nonfinite_find_test, {1, 1}, OpWhen::ALWAYS},
    {"nonfinite_find", nonfinite_find_test, {1009, 1}, OpWhen::ALWAYS},
    {"nonfinite_find", nonfinite_find_test, {300, 0}, OpWhen::ALWAYS},
    {"state_hash", state_hash_test, {1}, OpWhen::ALWAYS},
    {"state_hash", state_hash_test, {10007}, OpWhen::ALWAYS},
    {"state_hash_rectangle", state_hash_rectangle_test, {37, 19}, OpWhen::ALWAYS},
    {"state_hash_rectangle", state_hash_rectangle_test, {3, 4097}, OpWhen::ALWAYS},
    {"global_norm", global_norm_test, {124 * 1000 * 1000}, OpWhen::BENCH},
    {"state_hash", state_hash_test, {124 * 1000 * 1000}, OpWhen::BENCH},
};

#endif
