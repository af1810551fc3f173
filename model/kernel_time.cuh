/* kernel_time.cuh: estimated time of a kernel on a GPU, from what limits it. docs/benchmarks.md has the formulas and
 * what each constant is taken from.
 *   gemm_seconds        a GEMM: its tiles over the multiprocessors, or the bytes
 *   attention_seconds   attention's kernels: tensor cores, shared memory and instructions of a warp
 *   memory_seconds      any other: the bytes */
#pragma once
#include "cost.cuh"
#include "kernels/device.cuh"

static const double MEMORY_SHARE = 0.87, KERNEL_S = 3e-6;

static double memory_seconds(const Device* d, double bytes) { return bytes / (MEMORY_SHARE * d->memory_gbps * 1e9); }

// ------------------------------------------------------------------------------------------------------------- GEMMs
/* What a call costs by itself, and a tile of 128 x 256 before its first and after its last multiplication. */
static const double GEMM_S = 4.5e-6, GEMM_FILL_S = 2e-6;
enum { GEMM_MAX_SPLIT = 8, GEMM_MIN_INNER = 512 };

/* Seconds of a GEMM of (rows,inner) by (inner,cols) in tiles, if the inner dimension is shared out among `split` tiles,
 * whose partial sums in fp32 are added up in a pass of their own. A multiprocessor computes one tile after another. */
static double gemm_tiles_seconds(const Device* d, const Cost* c, int tile_rows, int tile_cols, int split)
{
    const double tiles = ceil_div(c->rows, tile_rows) * (double)ceil_div(c->cols, tile_cols) * split;
    const double waves = ceil(tiles / d->row->num_sms);
    const double sm_flops = d->row->product_share * d->peak_flops / d->row->num_sms;
    const double sums = split > 1 ? 8.0 * split * c->rows * c->cols : 0;
    const double tile = (double)tile_rows * tile_cols;
    return waves * tile * (2.0 * c->inner / split / sm_flops + GEMM_FILL_S / (128 * 256)) + memory_seconds(d, sums);
}

/* With the best of a few tiles, as cuBLASLt chooses. Calls of a row that are smaller than its largest in proportion. */
static double gemm_seconds(const Device* d, const Cost* c)
{
    double best = INFINITY;
    for (int split = 1; split == 1 || (split <= GEMM_MAX_SPLIT && c->inner / split >= GEMM_MIN_INNER); split++) {
        best = fmin(best, gemm_tiles_seconds(d, c, 128, 256, split));
        best = fmin(best, gemm_tiles_seconds(d, c, 256, 128, split));
        best = fmin(best, gemm_tiles_seconds(d, c, 128, 128, split));
    }
    best *= c->flops / (2.0 * c->rows * c->inner * c->cols);
    return fmax(best, memory_seconds(d, c->bytes)) + c->calls * GEMM_S;
}

// --------------------------------------------------------------------------------------------------------- attention
/* mma.sync, which the kernels use, gives this much in a clock and multiprocessor where tensor cores could do more by
 * instructions of a later generation; every access of a warp to shared memory takes four clocks (512 bytes, 128 a
 * clock), every clock issues four instructions. A block waits for its first tile and to write its result. */
static const double MMA_SYNC_FLOPS = 0.63 * 4096, MMA_FLOPS = 4096, ACCESS_CYCLES = 4, ISSUE = 4, BLOCK_CYCLES = 4000;

/* One of the kernels: a warp's rows, the rows of a slice of the other side, what a warp does with a slice, and the
 * shared memory of a block. */
typedef struct AttentionKernel {
    int rows, slice;
    double mma, accesses, instructions, shared_bytes;
} AttentionKernel;

/* `dots` GEMMs over the head, whose left operands are read again for each slice but `held` of them, and `adds` over the
 * slice, for cols of the head's elements: tensor-core instructions, then ldmatrix, then cp.async of two tensors. */
static AttentionKernel attention_kernel(int hsp, int row_tiles, int slice, int dots, int held, int adds, int cols,
                                        double instructions, size_t shared_elems)
{
    const double steps = hsp / 16.0, add_steps = slice / 16.0;
    AttentionKernel k = {16 * row_tiles, slice, 0, 0, instructions, 2.0 * (double)shared_elems};
    k.mma = row_tiles * (dots * steps * slice / 8 + adds * add_steps * cols / 8);
    k.accesses = dots * steps * slice / 16 + (dots - held) * steps * row_tiles + adds * add_steps * cols / 16 +
                 slice * hsp / 512.0;
    return k;
}

/* Forward, dq, and dk with dv. Instructions of a slice that no mask cuts: counted in the machine code for sm_90. */
template <int HSP> static void attention_kernels(AttentionKernel (&kernels)[3], int capability)
{
    typedef MmaShape<HSP> S;
    constexpr int i = HSP == 64 ? 0 : HSP == 128 ? 1 : 2;
    static constexpr double instructions[3][3] = {{700, 450, 330}, {725, 440, 712}, {790, 740, 790}};
    kernels[0] = attention_kernel(HSP, S::M_FORWARD, S::TILE_FORWARD, 1, 0, 1, HSP, instructions[i][0],
                                  S::FORWARD_ELEMS);
    kernels[1] = attention_kernel(HSP, S::M_BACKWARD, S::SLICE_Q, 2, mma_num_held(HSP, 10 * capability), 1, HSP,
                                  instructions[i][1], S::BACKWARD_ELEMS);
    kernels[2] = attention_kernel(HSP, S::M_BACKWARD, S::SLICE_KV, 2, 0, 2, S::COLS, instructions[i][2],
                                  S::BACKWARD_ELEMS);
}

/* How many blocks of four warps a multiprocessor has room for: two at most, for their registers. */
static int attention_blocks(const AttentionKernel* k, int capability)
{
    const double each = k->shared_bytes + 1024;      // of which the runtime takes the last
    return each * 2 <= 1024.0 * gpu_generation(capability)->shared_kib ? 2 : 1;
}

/* Clocks of a multiprocessor for a slice of one warp. The longest of three is always needed; what the other two take is
 * hidden by the other warps of the same scheduler: with W of them 1/W remains. */
static double attention_slice_cycles(const GpuRow* g, const AttentionKernel* k)
{
    const double mma_flops = fmin(MMA_SYNC_FLOPS, 1e3 * g->tensor16_tflops / (g->num_sms * g->clock_ghz));
    const double mma = k->mma * MMA_FLOPS / mma_flops, shared = k->accesses * ACCESS_CYCLES;
    const double issue = k->instructions / ISSUE, longest = fmax(mma, fmax(shared, issue));
    return longest + (mma + shared + issue - longest) / attention_blocks(k, g->capability);
}

/* Slices that a block of queries up to `end` leaves to its warps: those of its last warp four times, since each warp
 * has a scheduler and its tensor core for itself. */
static double attention_block_slices(const AttentionKernel* k, int end, int window)
{
    const int first = end - 4 * k->rows;
    return 4 * ((double)ceil_div(end, k->slice) - spans_first_key(nullptr, window, first > 0 ? first : 0) / k->slice);
}

/* Those of a head. Keys that are rows are seen by as many queries, from the other end. */
static double attention_slices(const AttentionKernel* k, int T, int window)
{
    const int rows = 4 * k->rows;
    double slices = attention_block_slices(k, T, window);
    for (int end = rows; end < T; end += rows) slices += attention_block_slices(k, end, window);
    return slices;
}

/* Seconds of a kernel over num_heads heads, or parts of heads. Blocks are handed out as others end, the longest first,
 * so that all multiprocessors end together; but none ends before its longest block. */
static double attention_kernel_seconds(const GpuRow* g, const AttentionKernel* k, int T, int window, double num_heads)
{
    const double cycles = attention_slice_cycles(g, k), blocks = (double)ceil_div(T, 4 * k->rows);
    const double head = attention_slices(k, T, window) * cycles +
                        blocks * BLOCK_CYCLES / attention_blocks(k, g->capability);
    const double longest = attention_block_slices(k, T, window) * cycles + BLOCK_CYCLES;
    return fmax(num_heads * head / g->num_sms, longest) / (g->clock_ghz * 1e9);
}

/* A call; backward: the pass over out and dout that makes the statistics, dq, then dk and dv. */
template <int HSP> static double attention_call_seconds(const Device* d, const Model* m, int window, bool backward)
{
    const Config* c = &m->config;
    const double heads = (double)m->B * c->NH;
    AttentionKernel kernels[3];
    attention_kernels<HSP>(kernels, d->row->capability);
    if (!backward) return attention_kernel_seconds(d->row, &kernels[0], m->T, window, heads);
    return memory_seconds(d, 2 * heads * m->T * c->HS * ELEM) + KERNEL_S * 2 +
           attention_kernel_seconds(d->row, &kernels[1], m->T, window, heads) +
           attention_kernel_seconds(d->row, &kernels[2], m->T, window, heads * (HSP / MmaShape<HSP>::COLS));
}

/* The 32-bit path does not run on tensor cores; what its own cores reach is a guess. */
static double attention_seconds(const Device* d, const Model* m, const Cost* c)
{
    const int HS = m->config.HS;
    if (sizeof(floatX) == 4 || HS % 8 != 0)
        return c->flops / (0.4 * d->row->fp32_tflops * 1e12) + c->calls * KERNEL_S;
    const bool backward = strstr(c->op, "backward") != nullptr;
    double call_s = KERNEL_S;                        // the mean of layers without and with the window
    for (bool slides : {false, true}) {
        const int window = slides ? m->config.window : 0;
        const double share = (slides ? num_sliding_layers(&m->config) : m->config.L - num_sliding_layers(&m->config)) /
                             (double)m->config.L;
        call_s += share * (HS <= 64 ? attention_call_seconds<64>(d, m, window, backward)
                           : HS <= 128 ? attention_call_seconds<128>(d, m, window, backward)
                                       : attention_call_seconds<256>(d, m, window, backward));
    }
    return c->calls * call_s;
}
