/* clear.cuh: zeroes ranges of an array, in one launch.
 *   out[i] = 0 for each i in [first[r], end[r])
 * shapes  out fp32
 * writes  out =, in the ranges alone
 * needs   any ranges, at most CLEAR_MAX_RANGES
 * exact   yes
 * cost    4 bytes of each element, judged against memory bandwidth */
#pragma once
#include "profile.h"

static constexpr int CLEAR_MAX_RANGES = 16;
struct ClearRanges {
    int num_ranges;
    size_t first[CLEAR_MAX_RANGES], end[CLEAR_MAX_RANGES];
};

/* An empty range is left out. */
static void ranges_extend(ClearRanges* ranges, size_t first, size_t end)
{
    if (first == end) return;
    ENSURE(ranges->num_ranges < CLEAR_MAX_RANGES, "more than %d ranges to be cleared", CLEAR_MAX_RANGES);
    ranges->first[ranges->num_ranges] = first;
    ranges->end[ranges->num_ranges++] = end;
}

static size_t ranges_elems(const ClearRanges* ranges)
{
    size_t n = 0;
    for (int r = 0; r < ranges->num_ranges; r++) n += ranges->end[r] - ranges->first[r];
    return n;
}

#ifdef DEVICE_CPU
static void ranges_clear_cpu(float* out, const ClearRanges* ranges)
{
    for (int r = 0; r < ranges->num_ranges; r++) {
        #pragma omp parallel for simd if (ranges->end[r] - ranges->first[r] > 65536)
        for (size_t i = ranges->first[r]; i < ranges->end[r]; i++) out[i] = 0.0f;
    }
}
#else
static constexpr int CLEAR_BLOCK = 256, CLEAR_BLOCK_ELEMS = 8 * CLEAR_BLOCK;

/* blockIdx.y is the range. */
static __global__ void __launch_bounds__(CLEAR_BLOCK) ranges_clear_kernel(float* out, ClearRanges ranges)
{
    const size_t end = ranges.end[blockIdx.y];
    size_t i = ranges.first[blockIdx.y] + (size_t)blockIdx.x * CLEAR_BLOCK_ELEMS + threadIdx.x;
#pragma unroll
    for (int k = 0; k < CLEAR_BLOCK_ELEMS / CLEAR_BLOCK; k++, i += CLEAR_BLOCK)
        if (i < end) out[i] = 0.0f;
}
#endif

static void ranges_clear(float* out, const ClearRanges* ranges, cudaStream_t stream)
{
    const size_t n = ranges_elems(ranges);
    if (n == 0) return;
    OP(stream, 0, (double)n * sizeof(float), n);
    ON_CPU(ranges_clear_cpu(out, ranges));
#ifndef DEVICE_CPU
    size_t longest = 0;
    for (int r = 0; r < ranges->num_ranges; r++)
        if (ranges->end[r] - ranges->first[r] > longest) longest = ranges->end[r] - ranges->first[r];
    const dim3 grid((unsigned)ceil_div(longest, CLEAR_BLOCK_ELEMS), (unsigned)ranges->num_ranges);
    LAUNCH(ranges_clear_kernel, grid, CLEAR_BLOCK, 0, stream, out, *ranges);
    CUDA_CHECK(cudaGetLastError());
#endif
}

#ifdef OP_TESTS
#include "optest.h"

/* dims: n, number of ranges, each of them every other stretch of n / (2 ranges) elements. */
static void ranges_clear_test(OpRun* run)
{
    const size_t n = (size_t)run->dims[0], num_ranges = (size_t)run->dims[1], stretch = n / (2 * num_ranges);
    OpTensor<float> out = op_inout<float>(run, "out", n, 1.0, 1.0);
    ClearRanges ranges = {};
    for (size_t r = 0; r < num_ranges; r++) {
        ranges_extend(&ranges, 2 * r * stretch, (2 * r + 1) * stretch);
        ranges_extend(&ranges, n - 1, n - 1);
        for (size_t i = 2 * r * stretch; i < (2 * r + 1) * stretch; i++) out.f64[i] = out.f32[i] = 0;
    }
    OP_RUN(run, (double)sizeof(float) * ranges_elems(&ranges), 0, ranges_clear(out.dev, &ranges, 0));
    op_check_exact(run, out);
}

static const OpTest clear_tests[] = {
    {"ranges_clear", ranges_clear_test, {7, 1}, OpWhen::ALWAYS},
    {"ranges_clear", ranges_clear_test, {30007, 5}, OpWhen::ALWAYS},
    {"ranges_clear", ranges_clear_test, {400000, 1}, OpWhen::ALWAYS},
    {"ranges_clear", ranges_clear_test, {124 * 1000 * 1000, 2}, OpWhen::BENCH},
};
#endif
