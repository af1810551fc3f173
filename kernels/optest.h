/* optest.h: the harness behind each op file's test table. Compiled with -DOP_TESTS only.
 *
 * A table row is {name, run function, sizes, when}. A run function reads like this:
 *     const int N = run->dims[0];
 *     OpTensor<floatX> inp = op_input<floatX>(run, "inp", N, 0.0, 1.0);      // mean, standard deviation
 *     OpTensor<floatX> out = op_output<floatX>(run, "out", N);
 *     OP_RUN(run, bytes, flops, square_forward(out.dev, inp.dev, N, 0));     // a bench times this line and returns
 *     square_forward_ref(out.f64, inp.f64, N);                               // one template<class R>, called twice:
 *     square_forward_ref(out.f32, inp.f32, N);                               // the truth, and plain code
 *     op_check(run, out);
 * and, for a backward, OP_CHECK_GRAD compares the double reference with central differences of the double forward.
 *
 * The rule for every tensor: err(ours, double) <= 2 * err(plain, double) + one rounding step of its type, where err is
 * the largest absolute difference (op_check) or relative difference (op_check_relative). Plain results are rounded to
 * the tensor's type. op_check_exact asks for equality, for inputs made by op_grid, whose sums are exact.
 *
 * OP_RUN also sees to what no run function mentions: outputs and scratch start as NaN; inputs are still what they were;
 * nothing outside a tensor is written; a second run, on the CPU with another number of threads, gives the same bits. */
#pragma once
#ifdef _OPENMP
#include <omp.h>
#endif
#include "data/clock.h"
#include "common.cuh"

enum class OpWhen { ALWAYS, LARGE /* in the emulated build only if OP_LARGE is set */, BENCH /* only with --bench */ };

struct OpRun;
struct OpTest {
    const char* name;
    void (*run)(OpRun* run);
    int dims[8];                                     // meaning is the run function's; zeros at the end: not printed
    OpWhen when;
};

enum class OpKind { INPUT, OUTPUT, INOUT, SCRATCH };

struct OpBuffer {
    const char* name;
    OpKind kind;
    size_t size_bytes;
    char* dev;                                       // the tensor; OP_GUARD_BYTES of pattern are on either side
    char* h_start;                                   // with both guards: what was on the device before the op
    char* h_result;                                  // the same after it
    double* f64;
    float* f32;
};

#define OP_MAX_BUFFERS 24
#define OP_MAX_HOST 16
#define OP_GUARD_BYTES 256                           // around an input NaN, which spreads; else numbers, which change

struct OpRun {
    const OpTest* test;
    const int* dims;
    bool bench;
    double best_s, bytes, flops;                     // of a bench
    OpBuffer buffers[OP_MAX_BUFFERS];
    int num_buffers;
    double* host[OP_MAX_HOST];                       // see op_host
    int num_host;
    int num_failed;                                  // checks of this row
};

/* A tensor of a test: the device's copy, and what the two references read or write. f64 and f32 start as the exact
 * values of the device's copy (inputs, inouts) or NaN (outputs, scratch). Null in a bench. */
template <class T> struct OpTensor {
    T* dev;
    double* f64;
    float* f32;
    size_t n;
    int buffer_idx;
};

// ---- random numbers: element i of buffer k is a function of (i, k) alone

static inline uint64_t op_hash(uint64_t x)           // splitmix64's finaliser
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

static inline uint64_t op_random(int buffer_idx, size_t i)
{
    return op_hash((i + 1) * 0x9e3779b97f4a7c15ull + (uint64_t)(buffer_idx + 1) * 0xd1342543de82ef95ull);
}

/* Close to a normal distribution (four uniforms), and never further out than 3.5 standard deviations. */
static inline double op_normal(uint64_t bits)
{
    double sum = 0;
    for (int k = 0; k < 4; k++) sum += (double)((bits >> (16 * k)) & 0xffff) - 32767.5;
    return sum / 65536.0 * 1.7320508075688772;
}

// ---- what a tensor's type means to the checks

static inline float op_round(float x, const float*) { return x; }
static inline float op_round(float x, const double*) { return x; }          // a sum in double of terms in fp32
static inline float op_round(float x, const __nv_bfloat16*) { __nv_bfloat16 y; store_f(&y, x); return load_f(y); }
static inline float op_round(float x, const __half*) { __half y; store_f(&y, x); return load_f(y); }
static inline double op_step(const float*) { return 1.0 / (1 << 23); }
static inline double op_step(const double*) { return 1.0 / (1 << 23); }
static inline double op_step(const __nv_bfloat16*) { return 1.0 / (1 << 7); }
static inline double op_step(const __half*) { return 1.0 / (1 << 10); }

// ---- buffers

static inline void* op_alloc(size_t size_bytes)
{
    void* p = aligned_alloc(64, round_up(size_bytes + 1, 64));
    ENSURE(p != nullptr, "out of host memory: %zu bytes asked for", size_bytes);
    return p;
}

static inline int op_buffer_add(OpRun* run, const char* name, OpKind kind, size_t size_bytes)
{
    ENSURE(run->num_buffers < OP_MAX_BUFFERS, "%s: more than %d tensors", run->test->name, OP_MAX_BUFFERS);
    int idx = run->num_buffers++;
    OpBuffer* b = &run->buffers[idx];
    memset(b, 0, sizeof *b);
    b->name = name;
    b->kind = kind;
    b->size_bytes = size_bytes;
    size_t whole_bytes = size_bytes + 2 * OP_GUARD_BYTES;
    CUDA_CHECK(cudaMalloc((void**)&b->dev, whole_bytes));
    b->dev += OP_GUARD_BYTES;
    b->h_start = (char*)op_alloc(whole_bytes);
    memset(b->h_start, kind == OpKind::INPUT ? 0xff : 0xc5, whole_bytes);
    memset(b->h_start + OP_GUARD_BYTES, 0xff, size_bytes);
    return idx;
}

static inline void op_buffer_upload(OpBuffer* b)
{
    CUDA_CHECK(cudaMemcpy(b->dev - OP_GUARD_BYTES, b->h_start, b->size_bytes + 2 * OP_GUARD_BYTES,
                          cudaMemcpyHostToDevice));
}

template <class T> static OpTensor<T> op_tensor(OpRun* run, int buffer_idx, size_t n)
{
    OpBuffer* b = &run->buffers[buffer_idx];
    op_buffer_upload(b);
    if (!run->bench) {
        const T* values = (const T*)(b->h_start + OP_GUARD_BYTES);
        b->f64 = (double*)op_alloc(n * sizeof(double));
        b->f32 = (float*)op_alloc(n * sizeof(float));
        for (size_t i = 0; i < n; i++) b->f64[i] = b->f32[i] = load_f(values[i]);
    }
    return OpTensor<T>{(T*)b->dev, b->f64, b->f32, n, buffer_idx};
}

template <class T> static OpTensor<T> op_random_tensor(OpRun* run, const char* name, OpKind kind, size_t n, double mean,
                                                       double deviation)
{
    int idx = op_buffer_add(run, name, kind, n * sizeof(T));
    T* values = (T*)(run->buffers[idx].h_start + OP_GUARD_BYTES);
    #pragma omp parallel for
    for (size_t i = 0; i < n; i++) store_f(&values[i], (float)(mean + deviation * op_normal(op_random(idx, i))));
    return op_tensor<T>(run, idx, n);
}

/* Read only. */
template <class T> static OpTensor<T> op_input(OpRun* run, const char* name, size_t n, double mean, double deviation)
{
    return op_random_tensor<T>(run, name, OpKind::INPUT, n, mean, deviation);
}

/* Accumulated into, or changed in place. */
template <class T> static OpTensor<T> op_inout(OpRun* run, const char* name, size_t n, double mean, double deviation)
{
    return op_random_tensor<T>(run, name, OpKind::INOUT, n, mean, deviation);
}

/* Multiples of 1/8 in [-1, 1]: dot products of a few thousand of them are exact in fp32, in any order. */
template <class T> static OpTensor<T> op_grid(OpRun* run, const char* name, OpKind kind, size_t n)
{
    int idx = op_buffer_add(run, name, kind, n * sizeof(T));
    T* values = (T*)(run->buffers[idx].h_start + OP_GUARD_BYTES);
    for (size_t i = 0; i < n; i++) store_f(&values[i], ((int)(op_random(idx, i) % 17) - 8) / 8.0f);
    return op_tensor<T>(run, idx, n);
}

/* Must be overwritten whole. */
template <class T> static OpTensor<T> op_output(OpRun* run, const char* name, size_t n)
{
    return op_tensor<T>(run, op_buffer_add(run, name, OpKind::OUTPUT, n * sizeof(T)), n);
}

/* Work space: may be left in any state. */
template <class T> static T* op_scratch(OpRun* run, size_t n)
{
    int idx = op_buffer_add(run, "scratch", OpKind::SCRATCH, n * sizeof(T));
    op_buffer_upload(&run->buffers[idx]);
    return (T*)run->buffers[idx].dev;
}

/* Bytes as given, for doubles and structs. */
static inline void* op_bytes(OpRun* run, const char* name, OpKind kind, const void* h_bytes, size_t size_bytes)
{
    int idx = op_buffer_add(run, name, kind, size_bytes);
    if (h_bytes != nullptr) memcpy(run->buffers[idx].h_start + OP_GUARD_BYTES, h_bytes, size_bytes);
    op_buffer_upload(&run->buffers[idx]);
    return run->buffers[idx].dev;
}

/* Room for n doubles on the host until the row ends: the forward's result in a gradient check. */
static inline double* op_host(OpRun* run, size_t n)
{
    ENSURE(run->num_host < OP_MAX_HOST, "%s: more than %d host arrays", run->test->name, OP_MAX_HOST);
    return run->host[run->num_host++] = (double*)op_alloc(n * sizeof(double));
}

static inline OpBuffer* op_buffer(OpRun* run, const char* name)
{
    for (int k = 0; k < run->num_buffers; k++)
        if (strcmp(run->buffers[k].name, name) == 0) return &run->buffers[k];
    die("%s: no tensor %s", run->test->name, name);
}

/* What is on the device before OP_RUN, as raw bytes; to change some of them, write here and call op_upload. */
static inline void* op_start_bytes(OpRun* run, const char* name)
{
    return op_buffer(run, name)->h_start + OP_GUARD_BYTES;
}

static inline void op_upload(OpRun* run, const char* name) { op_buffer_upload(op_buffer(run, name)); }

/* What was on the device after OP_RUN. */
static inline const void* op_result(OpRun* run, const char* name)
{
    return op_buffer(run, name)->h_result + OP_GUARD_BYTES;
}

struct OpInts { int* dev; int* h; };

/* n integers in [low, high). */
static inline OpInts op_ints(OpRun* run, const char* name, size_t n, int low, int high)
{
    int idx = op_buffer_add(run, name, OpKind::INPUT, n * sizeof(int));
    int* h = (int*)(run->buffers[idx].h_start + OP_GUARD_BYTES);
    for (size_t i = 0; i < n; i++) h[i] = low + (int)((op_random(idx, i) >> 16) % (uint64_t)(high - low));
    op_buffer_upload(&run->buffers[idx]);
    return OpInts{(int*)run->buffers[idx].dev, h};
}

// ---- running

static inline void op_fail(OpRun* run, const char* tensor, const char* what)
{
    printf("FAIL %s %s: %s\n", run->test->name, tensor, what);
    run->num_failed++;
}

/* After the first run keeps its results and checks guards and inputs; after the second compares. */
static inline void op_after_run(OpRun* run, bool first)
{
    CUDA_CHECK(cudaDeviceSynchronize());
    for (int k = 0; k < run->num_buffers; k++) {
        OpBuffer* b = &run->buffers[k];
        size_t whole_bytes = b->size_bytes + 2 * OP_GUARD_BYTES;
        char* h = (char*)op_alloc(whole_bytes);
        CUDA_CHECK(cudaMemcpy(h, b->dev - OP_GUARD_BYTES, whole_bytes, cudaMemcpyDeviceToHost));
        size_t end = OP_GUARD_BYTES + b->size_bytes;
        if (first && memcmp(h, b->h_start, OP_GUARD_BYTES) != 0) op_fail(run, b->name, "wrote before its start");
        if (first && memcmp(h + end, b->h_start + end, OP_GUARD_BYTES) != 0)
            op_fail(run, b->name, "wrote past its end");
        if (first && b->kind == OpKind::INPUT && memcmp(h, b->h_start, whole_bytes) != 0)
            op_fail(run, b->name, "an input was changed");
        if (!first && b->kind != OpKind::SCRATCH && memcmp(h, b->h_result, whole_bytes) != 0)
            op_fail(run, b->name, "a second run gave other bits");
        if (first) {
            b->h_result = h;
            op_buffer_upload(b);                     // ready for the second run
        } else {
            free(h);
        }
    }
}

static inline int op_threads()
{
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

static inline void op_set_threads(int num_threads)
{
    (void)num_threads;
#ifdef _OPENMP
    omp_set_num_threads(num_threads);
#endif
}

#define OP_RUN(run, op_bytes_moved, op_flops, ...) do { \
    (run)->bytes = (double)(op_bytes_moved); \
    (run)->flops = (double)(op_flops); \
    if ((run)->bench) { \
        __VA_ARGS__;                                 /* warms up */ \
        CUDA_CHECK(cudaDeviceSynchronize()); \
        double end_s_ = now_s() + 1.0; \
        for (int rep_ = 0; rep_ < 100 && (rep_ < 3 || now_s() < end_s_); rep_++) { \
            double start_s_ = now_s(); \
            __VA_ARGS__; \
            CUDA_CHECK(cudaDeviceSynchronize()); \
            double took_s_ = now_s() - start_s_; \
            if (rep_ == 0 || took_s_ < (run)->best_s) (run)->best_s = took_s_; \
        } \
        return; \
    } \
    __VA_ARGS__; \
    op_after_run(run, true); \
    int threads_ = op_threads(); \
    op_set_threads(threads_ == 1 ? 3 : threads_ - 1); \
    __VA_ARGS__; \
    op_set_threads(threads_); \
    op_after_run(run, false); \
} while (0)

// ---- checking

static inline void op_dims_print(const OpTest* test, char* text, size_t size)
{
    int used = 0, num_dims = 8;
    text[0] = 0;
    while (num_dims > 0 && test->dims[num_dims - 1] == 0) num_dims--;
    for (int k = 0; k < num_dims; k++)
        used += snprintf(text + used, size - used, k == 0 ? "%d" : "x%d", test->dims[k]);
}

static inline void op_verdict(OpRun* run, const char* tensor, double err, double bound)
{
    char dims[96];
    op_dims_print(run->test, dims, sizeof dims);
    bool ok = err <= bound;                          // a NaN is not
    printf("%s %s %s %s err %.3g bound %.3g\n", ok ? "ok" : "FAIL", run->test->name, tensor, dims, err, bound);
    if (!ok) run->num_failed++;
}

/* scale: a rounding step is one of max(scale, largest value). */
template <class T> static void op_check_by(OpRun* run, const OpTensor<T>& tensor, bool relative, double plain_weight,
                                           double scale)
{
    const OpBuffer* b = &run->buffers[tensor.buffer_idx];
    const T* ours = (const T*)(b->h_result + OP_GUARD_BYTES);
    double err_ours = 0, err_plain = 0, largest = scale;
    for (size_t i = 0; i < tensor.n; i++) {
        double truth = tensor.f64[i];
        double unit = relative ? fabs(truth) + 1e-300 : 1.0;
        double ours_off = fabs((double)load_f(ours[i]) - truth) / unit;
        double plain_off = fabs((double)op_round(tensor.f32[i], (const T*)nullptr) - truth) / unit;
        if (!(ours_off <= err_ours)) err_ours = std::isnan(ours_off) ? INFINITY : ours_off;
        if (plain_off > err_plain) err_plain = plain_off;
        if (fabs(truth) > largest) largest = fabs(truth);
    }
    double step = op_step((const T*)nullptr) * (relative ? 1.0 : largest);
    op_verdict(run, b->name, err_ours, plain_weight * err_plain + step);
}

template <class T> static void op_check(OpRun* run, const OpTensor<T>& tensor)
{
    op_check_by(run, tensor, false, 2.0, 0.0);
}

/* For sums and differences that may come out smaller than their terms: the rounding step is one of the terms. */
template <class T> static void op_check_terms(OpRun* run, const OpTensor<T>& tensor, double largest_term)
{
    op_check_by(run, tensor, false, 2.0, largest_term);
}

/* Element by element, for positive numbers of very different sizes. */
template <class T> static void op_check_relative(OpRun* run, const OpTensor<T>& tensor)
{
    op_check_by(run, tensor, true, 2.0, 0.0);
}

/* Stricter, where plain code is poor: one rounding step of max(scale, largest value), whatever the plain code does. */
template <class T> static void op_check_step(OpRun* run, const OpTensor<T>& tensor, double scale)
{
    op_check_by(run, tensor, false, 0.0, scale);
}

/* The double reference rounded once to T, and nothing else. */
template <class T> static void op_check_exact(OpRun* run, const OpTensor<T>& tensor)
{
    const OpBuffer* b = &run->buffers[tensor.buffer_idx];
    const T* ours = (const T*)(b->h_result + OP_GUARD_BYTES);
    double err = 0;
    for (size_t i = 0; i < tensor.n; i++) {
        double off = fabs((double)load_f(ours[i]) - (double)op_round((float)tensor.f64[i], (const T*)nullptr));
        if (!(off <= err)) err = std::isnan(off) ? INFINITY : off;
    }
    op_verdict(run, b->name, err, 0);
}

/* A number that a run function has worked out by itself. */
static inline void op_check_value(OpRun* run, const char* what, double ours, double truth, double bound)
{
    op_verdict(run, what, fabs(ours - truth), bound);
}

/* The value a tensor had before the op. */
template <class T> static double op_start(OpRun* run, const OpTensor<T>& tensor, size_t i)
{
    return load_f(((const T*)(run->buffers[tensor.buffer_idx].h_start + OP_GUARD_BYTES))[i]);
}

/* Central differences: at a few elements of `input`, the derivative of `objective` against what the double reference
 * put in (output) or added to (inout) `grad`. The objective is an expression that reads input.f64, such as
 * (square_forward_ref(host_out, inp.f64, N), op_dot(host_out, dout.f64, N)), with host_out = op_host(run, N). */
#define OP_CHECK_GRAD(run, grad, input, objective) do { \
    double worst_ = 0, scale_ = 0; \
    for (int probe_ = 0; probe_ < 12; probe_++) { \
        size_t i_ = op_random(99, probe_) % (input).n; \
        const double x_ = (input).f64[i_], h_ = 1e-5; \
        (input).f64[i_] = x_ + h_; \
        const double up_ = (objective); \
        (input).f64[i_] = x_ - h_; \
        const double down_ = (objective); \
        (input).f64[i_] = x_; \
        const double derivative_ = (up_ - down_) / (2 * h_); \
        const double start_ = (run)->buffers[(grad).buffer_idx].kind == OpKind::INOUT ? op_start(run, grad, i_) : 0.0; \
        const double off_ = fabs((grad).f64[i_] - start_ - derivative_); \
        if (!(off_ <= worst_)) worst_ = off_; \
        scale_ = fmax(scale_, fmax(fabs(derivative_), fabs(up_) * 1e-6)); \
    } \
    op_verdict(run, "gradient of " #input, worst_, 1e-5 * scale_ + 1e-9); \
} while (0)

static inline double op_largest(const double* a, size_t n)
{
    double largest = 0;
    for (size_t i = 0; i < n; i++) largest = fmax(largest, fabs(a[i]));
    return largest;
}

static inline double op_dot(const double* a, const double* b, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

// ---- running the tables

struct OpTotals { int num_passed, num_failed, num_skipped; };

/* memory_gbps: bandwidth of the device's memory (0: not known), for the percentage. */
static inline void op_bench_print(const OpRun* run, double memory_gbps)
{
    char dims[96];
    op_dims_print(run->test, dims, sizeof dims);
    printf("%-28s %-20s %10.3f ms", run->test->name, dims, run->best_s * 1e3);
    if (run->bytes > 0) printf(" %9.2f GB/s", run->bytes / run->best_s * 1e-9);
    if (run->bytes > 0 && memory_gbps > 0) printf(" %5.0f%% of memory", run->bytes / run->best_s * 1e-7 / memory_gbps);
    if (run->flops > 0) printf(" %9.2f GFLOP/s", run->flops / run->best_s * 1e-9);
    printf("\n");
    fflush(stdout);
}

static inline void op_test_row(const OpTest* test, bool bench, double memory_gbps, OpTotals* totals)
{
    if ((test->when == OpWhen::BENCH) != bench) return;
#ifdef DEVICE_EMU
    if (test->when == OpWhen::LARGE && getenv("OP_LARGE") == nullptr) {
        totals->num_skipped++;
        return;
    }
#endif
    OpRun* run = (OpRun*)op_alloc(sizeof *run);
    memset(run, 0, sizeof *run);
    run->test = test;
    run->dims = test->dims;
    run->bench = bench;
    test->run(run);
    if (bench) op_bench_print(run, memory_gbps);
    if (run->num_failed == 0) totals->num_passed++;
    else totals->num_failed++;
    for (int k = 0; k < run->num_buffers; k++) {
        OpBuffer* b = &run->buffers[k];
        CUDA_CHECK(cudaFree(b->dev - OP_GUARD_BYTES));
        free(b->h_start);
        free(b->h_result);
        free(b->f64);
        free(b->f32);
    }
    for (int k = 0; k < run->num_host; k++) free(run->host[k]);
    free(run);
}

/* An empty filter takes every row. */
template <size_t NumRows> static void op_table(const OpTest (&table)[NumRows], const char* filter, bool bench,
                                               double memory_gbps, OpTotals* totals)
{
    for (size_t row = 0; row < NumRows; row++)
        if (strstr(table[row].name, filter) != nullptr) op_test_row(&table[row], bench, memory_gbps, totals);
}
