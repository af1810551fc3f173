/* classifier.cuh: softmax, cross-entropy and its gradient in one pass; the gradient replaces the logits.
 *   loss_n   = log(sum_v exp(z_nv - m_n)) + m_n - z_n,target      m_n = max_v z_nv, over the V real columns
 *   dlogits  = dloss * loss_scale * (softmax(z) - onehot(target))    columns V..VP-1 are out of the softmax: gradient 0
 *   classifier_piece_forward   a row's maximum and sum of exponentials over a piece of the columns join those of the
 *                              pieces before; with the last piece comes the loss
 *   classifier_piece_backward  dlogits of a piece, from the maxima and sums of all
 *   classifier_merge           where each of P ranks has the pieces of its own columns (tensor parallelism): maxima,
 *                              sums and the targets' logits of all ranks to those of the whole row, and its loss
 *   a row whose target is negative is not counted: loss 0, gradient 0
 * shapes  logits (rows,VP) floatX; losses maxima (rows) fp32; sums (rows) double; targets (rows) int; loss_scale (1)
 *         double on the device, null: 1; of P ranks: (P,rows)
 * writes  losses =; logits = dlogits when backward, else untouched
 * needs   1 <= V <= VP, VP % 64 == 0, targets < V
 * exact   fixed reduction order: same bits on every run and for any number of CPU threads. Sums over V run in fp32 over
 *         short stretches and in double across them, so a loss over 50257 columns is good to the last bit or two.
 * cost    forward rows*VP*s bytes, with backward 2*rows*VP*s as a row stays in the cache, in pieces 3*rows*VP*s
 * source  in-place gradient as in llm.c; the running maximum is Milakov & Gimelshein 2018, arXiv:1805.02867 */
#pragma once
#include <cfloat>
#include "vec.cuh"

/* Columns first.. of the vocabulary: `count` real ones, maybe none, in rows of `stride`. `starts`: no piece came before
 * it on this rank; `last`: none follows on any rank. */
typedef struct { int first, count, stride; bool starts, last; } LogitsPiece;

/* What the columns so far say about each row: the target's logit, or with all columns the loss; the maximum, and the
 * sum of exponentials relative to it. */
typedef struct { float *losses, *maxima; double* sums; } ClassifierRows;

HOSTDEV void classifier_merge_row(ClassifierRows whole, ClassifierRows parts, int num_parts, const int* targets,
                                  int rows, int row)
{
    float m = parts.maxima[row], z_target = 0.0f;
    double sum = 0.0;
    for (int p = 1; p < num_parts; p++) m = fmaxf(m, parts.maxima[(size_t)p * rows + row]);
    for (int p = 0; p < num_parts; p++) {
        const size_t at = (size_t)p * rows + row;
        sum += parts.sums[at] * exp((double)parts.maxima[at] - m);
        z_target += parts.losses[at];                // 0 on the ranks that do not have it
    }
    whole.maxima[row] = m;
    whole.sums[row] = sum;
    whole.losses[row] = targets[row] < 0 ? 0.0f : (float)(log(sum) + (double)m - (double)z_target);
}

#ifdef DEVICE_CPU

static constexpr int CLASSIFIER_STRETCH = 1024;      // columns summed in fp32 before double takes over

static constexpr bool CLASSIFIER_KEEPS = sizeof(floatX) == sizeof(float);

/* The row's tail beyond whole vectors; lanes that are not there are -inf, and so have no part in maximum and sum. */
SIMD vf classifier_load_tail(const floatX* p, int lanes)
{
    float lane[VF];
    for (int i = 0; i < VF; i++) lane[i] = i < lanes ? load_f(p[i]) : -INFINITY;
    return vf_load(lane);
}

static float classifier_max_cpu(const floatX* z, int V)
{
    vf m0 = vf_set(-FLT_MAX), m1 = m0;
    int v = 0;
    for (; v + 2 * VF <= V; v += 2 * VF) {
        m0 = vf_max(m0, vf_load(z + v));
        m1 = vf_max(m1, vf_load(z + v + VF));
    }
    for (; v < V; v += VF)
        m0 = vf_max(m0, v + VF <= V ? vf_load(z + v) : classifier_load_tail(z + v, V - v));
    return vf_hmax(vf_max(m0, m1));
}

/* sum_v exp(z - m); with KEEP the exponentials replace z. */
template <bool KEEP> static double classifier_exp_sum_cpu(floatX* z, float m, int V)
{
    double total = 0.0;
    for (int start = 0; start < V; start += CLASSIFIER_STRETCH) {
        const int end = start + CLASSIFIER_STRETCH < V ? start + CLASSIFIER_STRETCH : V;
        vf sum0 = {}, sum1 = {};
        int v = start;
        for (; v + 2 * VF <= end; v += 2 * VF) {
            const vf e0 = vf_exp(vf_load(z + v) - m), e1 = vf_exp(vf_load(z + v + VF) - m);
            if (KEEP) vf_store(z + v, e0);
            if (KEEP) vf_store(z + v + VF, e1);
            sum0 += e0;
            sum1 += e1;
        }
        for (; v < end; v += VF) {
            const int lanes = end - v < VF ? end - v : VF;
            const vf e = vf_exp(classifier_load_tail(z + v, lanes) - m);
            if (KEEP) vf_store_n(z + v, e, lanes);
            sum0 += e;
        }
        total += (double)vf_sum(sum0 + sum1);
    }
    return total;
}

/* From the logits z, or in fp32 from the exponentials that classifier_exp_sum_cpu has kept in their place: in 16 bits
 * they would be rounded twice. */
static void classifier_gradient_cpu(floatX* z, float m, float scale, int V)
{
    if (CLASSIFIER_KEEPS) {
        #pragma omp simd
        for (int v = 0; v < V; v++) z[v] = z[v] * scale;
        return;
    }
    for (int v = 0; v < V; v += VF) {
        if (v + VF <= V) vf_store(z + v, vf_exp(vf_load(z + v) - m) * scale);
        else vf_store_n(z + v, vf_exp(classifier_load_tail(z + v, V - v) - m) * scale, V - v);
    }
}

static void classifier_cpu(floatX* logits, float* losses, const int* targets, int rows, int V, int VP, float dloss,
                           bool backward)
{
    #pragma omp parallel for
    for (int row = 0; row < rows; row++) {
        floatX* z = logits + (size_t)row * VP;
        const int target = targets[row];
        if (target < 0) {
            losses[row] = 0.0f;
            if (backward) memset((void*)z, 0, (size_t)VP * sizeof(floatX));
            continue;
        }
        assert(target < V);
        const float m = classifier_max_cpu(z, V), z_target = load_f(z[target]);
        const double sum = backward ? classifier_exp_sum_cpu<CLASSIFIER_KEEPS>(z, m, V)
                                    : classifier_exp_sum_cpu<false>(z, m, V);
        losses[row] = (float)(log(sum) + (double)m - (double)z_target);
        if (!backward) continue;
        const float scale = (float)((double)dloss / sum);
        classifier_gradient_cpu(z, m, scale, V);
        store_f(z + target, expf(z_target - m) * scale - dloss);
        for (int v = V; v < VP; v++) store_f(z + v, 0.0f);
    }
}

static void classifier_piece_forward_cpu(const floatX* logits, float* losses, float* maxima, double* sums,
                                         const int* targets, int rows, LogitsPiece piece)
{
    #pragma omp parallel for
    for (int row = 0; row < rows; row++) {
        floatX* z = (floatX*)logits + (size_t)row * piece.stride;      // not written to without KEEP
        const int target = targets[row], place = target - piece.first;
        const float m = classifier_max_cpu(z, piece.count), m_before = piece.starts ? -FLT_MAX : maxima[row];
        const float m_all = m > m_before ? m : m_before;
        const double before = piece.starts ? 0.0 : sums[row] * exp((double)m_before - m_all);
        maxima[row] = m_all;
        sums[row] = before + classifier_exp_sum_cpu<false>(z, m, piece.count) * exp((double)m - m_all);
        if (place >= 0 && place < piece.count) losses[row] = load_f(z[place]);
        else if (piece.starts) losses[row] = 0.0f;
        if (!piece.last) continue;
        losses[row] = target < 0 ? 0.0f : (float)(log(sums[row]) + (double)m_all - (double)losses[row]);
    }
}

static void classifier_merge_cpu(ClassifierRows whole, ClassifierRows parts, int num_parts, const int* targets,
                                 int rows)
{
    #pragma omp parallel for
    for (int row = 0; row < rows; row++) classifier_merge_row(whole, parts, num_parts, targets, rows, row);
}

static void classifier_piece_backward_cpu(floatX* logits, const float* maxima, const double* sums, const int* targets,
                                          int rows, LogitsPiece piece, float dloss)
{
    #pragma omp parallel for
    for (int row = 0; row < rows; row++) {
        floatX* z = logits + (size_t)row * piece.stride;
        const int place = targets[row] - piece.first;
        if (targets[row] < 0) {
            memset((void*)z, 0, (size_t)piece.stride * sizeof(floatX));
            continue;
        }
        const float m = maxima[row], scale = (float)((double)dloss / sums[row]);
        const bool has_target = place >= 0 && place < piece.count;
        const float z_target = has_target ? load_f(z[place]) : 0.0f;
        for (int v = 0; v < piece.count; v += VF) {
            const int lanes = piece.count - v < VF ? piece.count - v : VF;
            vf_store_n(z + v, vf_exp(classifier_load_tail(z + v, lanes) - m) * scale, lanes);
        }
        if (has_target) store_f(z + place, expf(z_target - m) * scale - dloss);
        for (int v = piece.count; v < piece.stride; v++) store_f(z + v, 0.0f);
    }
}

#else

static constexpr int CLASSIFIER_MAX_BLOCK = 1024;    // few long rows at a time: each is still in L2 for pass two
static constexpr int CLASSIFIER_MERGE_BLOCK = 128;

/* W columns of a row; those from V on read as -inf. */
template <int W> DEV void classifier_load(float (&x)[W], const floatX* z, int v, int V)
{
    load_vec(x, z + v);
#pragma unroll
    for (int k = 0; k < W; k++)
        if (v + k >= V) x[k] = -INFINITY;
}

/* One thread's maximum m over its columns of a row, from m on, and its sum of exponentials relative to it. */
template <int W> DEV void classifier_visit(float& m, float& sum, const floatX* z, int V, int first, int stride)
{
    float x[W];
    for (int v = first; v < V; v += stride) {
        classifier_load(x, z, v, V);
        float m_new = m;
#pragma unroll
        for (int k = 0; k < W; k++) m_new = fmaxf(m_new, x[k]);
        float stretch = 0.0f;
#pragma unroll
        for (int k = 0; k < W; k++) stretch += __expf(x[k] - m_new);
        sum = sum * __expf(m - m_new) + stretch;
        m = m_new;
    }
}

/* A block a row. Pass one: each thread's running maximum and sum relative to it. Pass two: the gradient. */
template <int W> static __global__ void __launch_bounds__(CLASSIFIER_MAX_BLOCK)
classifier_kernel(floatX* logits, float* losses, const int* targets, int V, int VP, float dloss,
                  const double* loss_scale, bool backward)
{
    SHARED(float, partial_max, [32]);
    SHARED(double, partial_sum, [32]);
    floatX* z = logits + (size_t)blockIdx.x * VP;
    const int target = targets[blockIdx.x], first = threadIdx.x * W, stride = blockDim.x * W;
    float x[W];
    if (target < 0) {
        if (threadIdx.x == 0) losses[blockIdx.x] = 0.0f;
#pragma unroll
        for (int k = 0; k < W; k++) x[k] = 0.0f;
        for (int v = first; backward && v < VP; v += stride) store_vec(z + v, x);
        return;
    }
    const float z_target = load_f(z[target]);        // read by all before the barrier, overwritten by one after it
    float m = -FLT_MAX, sum = 0.0f;
    classifier_visit<W>(m, sum, z, V, first, stride);
    const float row_max = block_max(m, partial_max);
    const double row_sum = block_sum((double)(sum * __expf(m - row_max)), partial_sum);
    if (threadIdx.x == 0) losses[blockIdx.x] = (float)(log(row_sum) + (double)row_max - (double)z_target);
    if (!backward) return;
    if (loss_scale != nullptr) dloss *= (float)*loss_scale;
    const float scale = (float)((double)dloss / row_sum);
    for (int v = first; v < VP; v += stride) {
        classifier_load(x, z, v, V);
#pragma unroll
        for (int k = 0; k < W; k++) x[k] = __expf(x[k] - row_max) * scale - (v + k == target ? dloss : 0.0f);
        store_vec(z + v, x);
    }
}

/* A block a row. */
template <int W> static __global__ void __launch_bounds__(CLASSIFIER_MAX_BLOCK)
classifier_piece_forward_kernel(const floatX* logits, float* losses, float* maxima, double* sums, const int* targets,
                                LogitsPiece piece)
{
    SHARED(float, partial_max, [32]);
    SHARED(double, partial_sum, [32]);
    const size_t row = blockIdx.x;
    const floatX* z = logits + row * piece.stride;
    float m = -FLT_MAX, sum = 0.0f;
    classifier_visit<W>(m, sum, z, piece.count, threadIdx.x * W, blockDim.x * W);
    const float row_max = block_max(m, partial_max);
    const double row_sum = block_sum((double)(sum * __expf(m - row_max)), partial_sum);
    if (threadIdx.x != 0) return;
    const float m_before = piece.starts ? -FLT_MAX : maxima[row], m_all = fmaxf(row_max, m_before);
    const double before = piece.starts ? 0.0 : sums[row] * exp((double)m_before - m_all);
    const double sum_all = before + row_sum * exp((double)row_max - m_all);
    const int target = targets[row], place = target - piece.first;
    maxima[row] = m_all;
    sums[row] = sum_all;
    float z_target = 0.0f;                           // of this piece or, in losses, of one before
    if (place >= 0 && place < piece.count) z_target = load_f(z[place]);
    else if (!piece.starts && target >= 0) z_target = losses[row];
    losses[row] = !piece.last ? z_target : target < 0 ? 0.0f : (float)(log(sum_all) + (double)m_all - (double)z_target);
}

/* A block a row. */
template <int W> static __global__ void __launch_bounds__(CLASSIFIER_MAX_BLOCK)
classifier_piece_backward_kernel(floatX* logits, const float* maxima, const double* sums, const int* targets,
                                 LogitsPiece piece, float dloss, const double* loss_scale)
{
    const size_t row = blockIdx.x;
    floatX* z = logits + row * piece.stride;
    const int target = targets[row], place = target - piece.first;
    if (loss_scale != nullptr) dloss *= (float)*loss_scale;
    const float m = maxima[row], scale = target < 0 ? 0.0f : (float)((double)dloss / sums[row]);
    float x[W];
    for (int v = threadIdx.x * W; v < piece.stride; v += blockDim.x * W) {
        classifier_load(x, z, v, piece.count);
#pragma unroll
        for (int k = 0; k < W; k++)
            x[k] = __expf(x[k] - m) * scale - (target >= 0 && v + k == place ? dloss : 0.0f);
        store_vec(z + v, x);
    }
}

/* A thread a row. */
static __global__ void __launch_bounds__(CLASSIFIER_MERGE_BLOCK)
classifier_merge_kernel(ClassifierRows whole, ClassifierRows parts, int num_parts, const int* targets, int rows)
{
    const int row = blockIdx.x * CLASSIFIER_MERGE_BLOCK + threadIdx.x;
    if (row < rows) classifier_merge_row(whole, parts, num_parts, targets, rows, row);
}

static unsigned classifier_block(int VP, int width)
{
    const size_t threads = round_up(ceil_div(VP, width), 32);
    return threads < CLASSIFIER_MAX_BLOCK ? (unsigned)threads : CLASSIFIER_MAX_BLOCK;
}

#endif

static void classifier(floatX* logits, float* losses, const int* targets, int rows, int V, int VP, float dloss,
                       const double* loss_scale, bool backward, cudaStream_t stream)
{
    OP(stream, 0, (backward ? 2.0 : 1.0) * rows * VP * sizeof(floatX), rows, VP);
    ENSURE(1 <= V && V <= VP && VP % 64 == 0, "vocabulary of %d, padded to %d: the padded one must be a multiple of 64",
           V, VP);
    ON_CPU(classifier_cpu(logits, losses, targets, rows, V, VP, loss_scale ? dloss * (float)*loss_scale : dloss,
                          backward));
#ifndef DEVICE_CPU
    if (is_vec(logits, VP))
        LAUNCH((classifier_kernel<VEC>), rows, classifier_block(VP, VEC), 0, stream, logits, losses, targets, V, VP,
               dloss, loss_scale, backward);
    else
        LAUNCH((classifier_kernel<1>), rows, classifier_block(VP, 1), 0, stream, logits, losses, targets, V, VP, dloss,
               loss_scale, backward);
    CUDA_CHECK(cudaGetLastError());
#endif
}

/* losses = after the last piece; until then the target's logit. */
static void classifier_piece_forward(const floatX* logits, float* losses, float* maxima, double* sums,
                                     const int* targets, int rows, LogitsPiece piece, cudaStream_t stream)
{
    OP(stream, 0, 1.0 * rows * piece.stride * sizeof(floatX), rows, piece.stride);
    ENSURE(0 <= piece.count && piece.count <= piece.stride && piece.stride % 64 == 0,
           "a piece of %d columns, padded to %d: the padded ones must be a multiple of 64", piece.count, piece.stride);
    ON_CPU(classifier_piece_forward_cpu(logits, losses, maxima, sums, targets, rows, piece));
#ifndef DEVICE_CPU
    if (is_vec(logits, piece.stride))
        LAUNCH((classifier_piece_forward_kernel<VEC>), rows, classifier_block(piece.stride, VEC), 0, stream, logits,
               losses, maxima, sums, targets, piece);
    else
        LAUNCH((classifier_piece_forward_kernel<1>), rows, classifier_block(piece.stride, 1), 0, stream, logits, losses,
               maxima, sums, targets, piece);
    CUDA_CHECK(cudaGetLastError());
#endif
}

/* logits = dlogits, from the maxima and sums of all pieces. */
static void classifier_piece_backward(floatX* logits, const float* maxima, const double* sums, const int* targets,
                                      int rows, LogitsPiece piece, float dloss, const double* loss_scale,
                                      cudaStream_t stream)
{
    OP(stream, 0, 2.0 * rows * piece.stride * sizeof(floatX), rows, piece.stride);
    ON_CPU(classifier_piece_backward_cpu(logits, maxima, sums, targets, rows, piece,
                                         loss_scale ? dloss * (float)*loss_scale : dloss));
#ifndef DEVICE_CPU
    if (is_vec(logits, piece.stride))
        LAUNCH((classifier_piece_backward_kernel<VEC>), rows, classifier_block(piece.stride, VEC), 0, stream, logits,
               maxima, sums, targets, piece, dloss, loss_scale);
    else
        LAUNCH((classifier_piece_backward_kernel<1>), rows, classifier_block(piece.stride, 1), 0, stream, logits,
               maxima, sums, targets, piece, dloss, loss_scale);
    CUDA_CHECK(cudaGetLastError());
#endif
}

/* Bytes that a row's part and its merge move. */
static double classifier_merge_bytes(double rows, double num_parts) { return 16 * rows * (num_parts + 1); }

/* whole (rows) from the parts (num_parts,rows) of all ranks. */
static void classifier_merge(ClassifierRows whole, ClassifierRows parts, int num_parts, const int* targets, int rows,
                             cudaStream_t stream)
{
    OP(stream, 0, classifier_merge_bytes(rows, num_parts), rows, num_parts);
    ON_CPU(classifier_merge_cpu(whole, parts, num_parts, targets, rows));
#ifndef DEVICE_CPU
    LAUNCH(classifier_merge_kernel, (unsigned)ceil_div(rows, CLASSIFIER_MERGE_BLOCK), CLASSIFIER_MERGE_BLOCK, 0, stream,
           whole, parts, num_parts, targets, rows);
    CUDA_CHECK(cudaGetLastError());
#endif
}

#ifdef OP_TESTS
#include "optest.h"

template <class R> static void classifier_forward_ref(R* losses, const R* logits, const int* targets, int rows, int V,
                                                      int VP)
{
    for (int row = 0; row < rows; row++) {
        const R* z = logits + (size_t)row * VP;
        R m = z[0], sum = 0;
        for (int v = 1; v < V; v++) m = z[v] > m ? z[v] : m;
        for (int v = 0; v < V; v++) sum += std::exp(z[v] - m);
        losses[row] = targets[row] < 0 ? R(0) : std::log(sum) + m - z[targets[row]];
    }
}

template <class R> static void classifier_backward_ref(R* dlogits, const R* logits, const int* targets, int rows, int V,
                                                       int VP, R dloss)
{
    for (int row = 0; row < rows; row++) {
        const R* z = logits + (size_t)row * VP;
        R* dz = dlogits + (size_t)row * VP;
        R m = z[0], sum = 0;
        for (int v = 1; v < V; v++) m = z[v] > m ? z[v] : m;
        for (int v = 0; v < V; v++) sum += std::exp(z[v] - m);
        for (int v = 0; v < VP; v++) {
            const bool counted = v < V && targets[row] >= 0;
            dz[v] = counted ? (std::exp(z[v] - m) / sum - (v == targets[row] ? 1 : 0)) * dloss : R(0);
        }
    }
}

/* Logits are far from each other (deviation 4) as in a trained model, and are around -30 or 30, where exp without the
 * maximum taken off would vanish or overflow. About one target in eight is not counted. */
static OpInts classifier_test_targets(OpRun* run, int rows, int V)
{
    return op_ints(run, "targets", rows, -(V / 8), V);
}

static void classifier_forward_test(OpRun* run)
{
    const int rows = run->dims[0], V = run->dims[1], VP = (int)round_up(V, 64);
    OpTensor<floatX> logits = op_input<floatX>(run, "logits", (size_t)rows * VP, -30.0, 4.0);
    OpInts targets = classifier_test_targets(run, rows, V);
    OpTensor<float> losses = op_output<float>(run, "losses", rows);
    OP_RUN(run, 1.0 * rows * VP * sizeof(floatX), 0,
           classifier(logits.dev, losses.dev, targets.dev, rows, V, VP, 1.0f, nullptr, false, 0));
    classifier_forward_ref(losses.f64, logits.f64, targets.h, rows, V, VP);
    classifier_forward_ref(losses.f32, logits.f32, targets.h, rows, V, VP);
    op_check_step(run, losses, 1.0);
}

static void classifier_test(OpRun* run)
{
    const int rows = run->dims[0], V = run->dims[1], VP = (int)round_up(V, 64);
    const size_t n = (size_t)rows * VP;
    const float dloss = 0.25f;
    const double scale = run->dims[2] != 0 ? run->dims[2] : 1;
    const double* loss_scale = (const double*)op_bytes(run, "loss_scale", OpKind::INPUT, &scale, sizeof scale);
    OpTensor<floatX> logits = op_inout<floatX>(run, "logits", n, 30.0, 4.0);
    OpInts targets = classifier_test_targets(run, rows, V);
    OpTensor<float> losses = op_output<float>(run, "losses", rows);
    OP_RUN(run, 2.0 * n * sizeof(floatX), 0,
           classifier(logits.dev, losses.dev, targets.dev, rows, V, VP, dloss, loss_scale, true, 0));
    classifier_forward_ref(losses.f64, logits.f64, targets.h, rows, V, VP);
    classifier_forward_ref(losses.f32, logits.f32, targets.h, rows, V, VP);
    classifier_backward_ref(logits.f64, logits.f64, targets.h, rows, V, VP, dloss * scale);
    classifier_backward_ref(logits.f32, logits.f32, targets.h, rows, V, VP, dloss * (float)scale);
    op_check_step(run, losses, 1.0);
    op_check(run, logits);
}

/* The vocabulary in pieces of `width` columns, their logits one piece after another: against the whole. With dims[3]
 * each piece is that of another rank, and a merge follows. */
static void classifier_piece_test(OpRun* run)
{
    const int rows = run->dims[0], V = run->dims[1], width = run->dims[2];
    const bool merges = run->dims[3] != 0;
    const int VP = (int)round_up(V, merges ? width : 64), num_pieces = (int)ceil_div(VP, width);
    const double scale = 8;
    const double* loss_scale = (const double*)op_bytes(run, "loss_scale", OpKind::INPUT, &scale, sizeof scale);
    OpTensor<floatX> logits = op_inout<floatX>(run, "logits", (size_t)rows * VP, 30.0, 4.0);
    OpInts targets = classifier_test_targets(run, rows, V);
    OpTensor<float> losses = op_output<float>(run, "losses", rows), maxima = op_output<float>(run, "maxima", rows);
    OpTensor<double> sums = op_output<double>(run, "sums", rows);
    const size_t num_parts = merges ? (size_t)rows * num_pieces : 1;
    OpTensor<float> part_losses = op_output<float>(run, "part_losses", num_parts);
    OpTensor<float> part_maxima = op_output<float>(run, "part_maxima", num_parts);
    OpTensor<double> part_sums = op_output<double>(run, "part_sums", num_parts);
    LogitsPiece* pieces = (LogitsPiece*)malloc_checked(num_pieces * sizeof *pieces);
    for (int p = 0; p < num_pieces; p++) {
        const int first = p * width, stride = VP - first < width ? VP - first : width;
        const int left = V - first > 0 ? V - first : 0, count = left < stride ? left : stride;
        pieces[p] = LogitsPiece{first, count, stride, merges || p == 0, !merges && p == num_pieces - 1};
    }
    const ClassifierRows whole = {losses.dev, maxima.dev, sums.dev};
    auto rows_of = [&](int p) {
        const size_t at = (size_t)rows * p;
        return merges ? ClassifierRows{part_losses.dev + at, part_maxima.dev + at, part_sums.dev + at} : whole;
    };
    auto all_pieces = [&] {
        for (int p = 0; p < num_pieces; p++) {
            const ClassifierRows r = rows_of(p);
            classifier_piece_forward(logits.dev + (size_t)rows * pieces[p].first, r.losses, r.maxima, r.sums,
                                     targets.dev, rows, pieces[p], 0);
        }
        if (merges) classifier_merge(whole, rows_of(0), num_pieces, targets.dev, rows, 0);
        for (int p = num_pieces - 1; p >= 0; p--)
            classifier_piece_backward(logits.dev + (size_t)rows * pieces[p].first, maxima.dev, sums.dev, targets.dev,
                                      rows, pieces[p], 0.25f, loss_scale, 0);
    };
    OP_RUN(run, 3.0 * logits.n * sizeof(floatX), 0, all_pieces());
    auto reference = [&](auto* z, auto* out_losses, auto* out_maxima, auto* out_sums) {
        typedef std::remove_reference_t<decltype(*z)> R;
        R* whole = (R*)malloc_checked(2 * logits.n * sizeof(R));
        R* gradients = whole + logits.n;
        auto place = [&](int row, int v) {
            const LogitsPiece* p = &pieces[v / width];
            return (size_t)rows * p->first + (size_t)row * p->stride + (v - p->first);
        };
        for (int row = 0; row < rows; row++)
            for (int v = 0; v < VP; v++) whole[(size_t)row * VP + v] = z[place(row, v)];
        classifier_forward_ref(out_losses, whole, targets.h, rows, V, VP);
        classifier_backward_ref(gradients, whole, targets.h, rows, V, VP, R(0.25 * scale));
        for (int row = 0; row < rows; row++) {
            R m = whole[(size_t)row * VP], sum = 0;
            for (int v = 1; v < V; v++) m = whole[(size_t)row * VP + v] > m ? whole[(size_t)row * VP + v] : m;
            for (int v = 0; v < V; v++) sum += std::exp(whole[(size_t)row * VP + v] - m);
            out_maxima[row] = m;
            out_sums[row] = sum;
            for (int v = 0; v < VP; v++) z[place(row, v)] = gradients[(size_t)row * VP + v];
        }
        free(whole);
    };
    reference(logits.f64, losses.f64, maxima.f64, sums.f64);
    reference(logits.f32, losses.f32, maxima.f32, sums.f32);
    op_check_step(run, losses, 1.0);
    op_check_step(run, maxima, 1.0);
    op_check(run, logits);
    free(pieces);
}

/* Six columns on three ranks, with losses, maxima and sums worked out by hand. */
static void classifier_merge_trial(OpRun* run)
{
    const int rows = run->dims[0], num_parts = run->dims[1];
    const double z[2][6] = {{1, 2, 0.5, -1, 3, 0}, {0, 0, 0, 4, 1, -2}}, max[3][2] = {{2, 0}, {0.5, 4}, {3, 1}};
    const double losses_ref[] = {1.50283524, 0.10184581}, max_ref[] = {3, 4}, sums_ref[] = {1.653402, 1.107213};
    OpInts targets = op_ints(run, "targets", rows, 1, 4);
    OpTensor<floatX> logits = op_input<floatX>(run, "logits", (size_t)num_parts * rows * 64, 0.0, 1.0);
    OpTensor<float> losses = op_output<float>(run, "losses", rows), maxima = op_output<float>(run, "maxima", rows);
    OpTensor<double> sums = op_output<double>(run, "sums", rows);
    OpTensor<float> part_losses = op_output<float>(run, "part_losses", (size_t)num_parts * rows);
    OpTensor<float> part_maxima = op_output<float>(run, "part_maxima", (size_t)num_parts * rows);
    OpTensor<double> part_sums = op_output<double>(run, "part_sums", (size_t)num_parts * rows);
    floatX* h_logits = (floatX*)op_start_bytes(run, "logits");
    for (int row = 0; row < rows; row++) {
        targets.h[row] = row == 0 ? 1 : 3;
        for (int v = 0; v < 6; v++) store_f(&h_logits[((v / 2) * rows + row) * 64 + v % 2], (float)z[row][v]);
    }
    op_upload(run, "targets");
    op_upload(run, "logits");
    const ClassifierRows whole = {losses.dev, maxima.dev, sums.dev};
    const ClassifierRows parts = {part_losses.dev, part_maxima.dev, part_sums.dev};
    auto all_ranks = [&] {
        for (int p = 0; p < num_parts; p++)
            classifier_piece_forward(logits.dev + (size_t)p * rows * 64, part_losses.dev + p * rows,
                                     part_maxima.dev + p * rows, part_sums.dev + p * rows, targets.dev, rows,
                                     LogitsPiece{2 * p, 2, 64, true, false}, 0);
        classifier_merge(whole, parts, num_parts, targets.dev, rows, 0);
    };
    OP_RUN(run, 0, 0, all_ranks());
    const float *h_losses = (const float*)op_result(run, "losses"), *h_maxima = (const float*)op_result(run, "maxima");
    const float* h_parts = (const float*)op_result(run, "part_maxima");
    const double* h_sums = (const double*)op_result(run, "sums");
    for (int row = 0; row < rows; row++) {
        op_check_value(run, "loss", h_losses[row], losses_ref[row], 1e-6);
        op_check_value(run, "maximum", h_maxima[row], max_ref[row], 0);
        op_check_value(run, "sum", h_sums[row], sums_ref[row], 1e-6);
        for (int p = 0; p < num_parts; p++)
            op_check_value(run, "maximum of a rank", h_parts[p * rows + row], max[p][row], 0);
    }
}

static void classifier_gradient_test(OpRun* run)
{
    const int rows = run->dims[0], V = run->dims[1], VP = (int)round_up(V, 64);
    OpTensor<floatX> logits = op_input<floatX>(run, "logits", (size_t)rows * VP, 0.0, 2.0);
    OpInts targets = classifier_test_targets(run, rows, V);
    OpTensor<float> dlosses = op_input<float>(run, "dlosses", rows, 0.25, 0.0);
    OpTensor<floatX> dlogits = op_output<floatX>(run, "dlogits", (size_t)rows * VP);
    double* losses = op_host(run, rows);
    classifier_backward_ref(dlogits.f64, logits.f64, targets.h, rows, V, VP, 0.25);
    OP_CHECK_GRAD(run, dlogits, logits, (classifier_forward_ref(losses, logits.f64, targets.h, rows, V, VP),
                                         op_dot(losses, dlosses.f64, rows)));
}

static const OpTest classifier_tests[] = {
    {"classifier_forward", classifier_forward_test, {1, 1}, OpWhen::ALWAYS},
    {"classifier_forward", classifier_forward_test, {7, 1000}, OpWhen::ALWAYS},
    {"classifier_forward", classifier_forward_test, {3, 50257}, OpWhen::ALWAYS},
    {"classifier_forward", classifier_forward_test, {256, 50257}, OpWhen::LARGE},
    {"classifier", classifier_test, {1, 5}, OpWhen::ALWAYS},
    {"classifier", classifier_test, {33, 64}, OpWhen::ALWAYS},
    {"classifier", classifier_test, {3, 100, 1024}, OpWhen::ALWAYS},
    {"classifier", classifier_test, {9, 1031}, OpWhen::ALWAYS},
    {"classifier", classifier_test, {2, 50257}, OpWhen::ALWAYS},
    {"classifier", classifier_test, {128, 50257}, OpWhen::LARGE},
    {"classifier", classifier_test, {16, 128256}, OpWhen::LARGE},
    {"classifier_piece", classifier_piece_test, {5, 50, 64}, OpWhen::ALWAYS},
    {"classifier_piece", classifier_piece_test, {7, 1000, 192}, OpWhen::ALWAYS},
    {"classifier_piece", classifier_piece_test, {3, 257, 64}, OpWhen::ALWAYS},
    {"classifier_piece", classifier_piece_test, {33, 50257, 16768}, OpWhen::LARGE},
    {"classifier_merge", classifier_piece_test, {5, 50, 64, 1}, OpWhen::ALWAYS},
    {"classifier_merge", classifier_piece_test, {130, 257, 128, 1}, OpWhen::ALWAYS},
    {"classifier_merge", classifier_piece_test, {7, 1000, 256, 1}, OpWhen::ALWAYS},
    {"classifier_merge, 3 ranks", classifier_merge_trial, {2, 3}, OpWhen::ALWAYS},
    {"classifier_gradient", classifier_gradient_test, {3, 64}, OpWhen::ALWAYS},
    {"classifier_gradient", classifier_gradient_test, {5, 128}, OpWhen::ALWAYS},
    {"classifier_forward", classifier_forward_test, {1024, 50257}, OpWhen::BENCH},
    {"classifier", classifier_test, {1024, 50257}, OpWhen::BENCH},
};

#endif
