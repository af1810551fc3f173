/* bench.cuh: --bench: the time of a step and of each operation in it, on synthetic tokens, so that no data are needed.
 *   ceilings   measured first: the rate of a large GEMM in the run's precision, and memory bandwidth
 *   warm-up    BENCH_WARMUP_STEPS steps; more in fp16, until the loss scale has stopped falling
 *   steps      -n steps as in training, timed by events; the host reads a step's result when the next is enqueued. The
 *              median step is the result, and its phases are printed
 *   operations a few more steps with every operation timed; the table is of the median one: estimated flops and bytes
 *              of each operation, its rates, and its % of roofline. The roofline is the longer of flops at the GEMM
 *              ceiling and bytes at the memory ceiling
 * Model flops per token are 6 N + 6 L Q T: N all parameters, attention causal (Q is C in every preset), forward and
 * backward, without recomputation. That is llm.c's convention; the % of peak of step lines counts GEMMs and attention
 * only. --bench-json FILE has all figures, units in the names. */
#pragma once
#include <sys/resource.h>
#include "trace.cuh"
#include "train_step.cuh"

enum { BENCH_WARMUP_STEPS = 3, BENCH_MAX_WARMUP_STEPS = 30, BENCH_OP_STEPS = 3 };

typedef struct Ceilings { int product_side; double product_flops, memory_bps; } Ceilings;   // per second
typedef struct BenchStep { double step_ms, phases_ms[NUM_PHASES]; bool skipped; } BenchStep;

/* An operation with its sizes, in one phase of a step. */
typedef struct BenchOp { const Span* span; int calls; double ms, flops, bytes; } BenchOp;

typedef struct Bench {
    Ceilings ceilings;
    int num_warmup, num_steps, num_skipped;
    BenchStep* steps;
    int* order;                      // (num_steps) from the fastest to the slowest
    double wall_s, page_faults, host_syncs;     // of the timed steps; per step
    size_t device_peak_bytes, host_bytes;    // host: the process, in CPU and emulated builds with the device
    BenchOp* ops;
    int num_ops;
    double op_step_ms, compute_ms, moving_ms, hidden_ms, other_ms, done_flops;
} Bench;

// -------------------------------------------------------------------------------------------------------- ceilings
/* Milliseconds of the fastest of a few calls, after one to warm up. */
template <class F> static double best_ms(cudaStream_t stream, F call)
{
    cudaEvent_t begin, end;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    double best = 1e30;
    call();
    for (int i = 0; i < 5; i++) {
        float ms;
        CUDA_CHECK(cudaEventRecord(begin, stream));
        call();
        CUDA_CHECK(cudaEventRecord(end, stream));
        CUDA_CHECK(cudaEventSynchronize(end));
        CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (ms < best) best = ms;
    }
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    return best;
}

/* Called before the run's own memory is allocated; on all ranks at once, since they share resources as in a step. */
static Ceilings ceilings_measure(const Run* run)
{
#if defined(DEVICE_CUDA)
    size_t side = 8192, elems = (size_t)128 << 20;
#elif defined(DEVICE_EMU)
    size_t side = 64, elems = (size_t)4 << 10;
#else
    size_t side = 1536, elems = (size_t)64 << 20;
#endif
    const size_t have_bytes = device_free_bytes(run) / 2;
    while (3 * side * side * sizeof(floatX) > have_bytes) side /= 2;
    while (2 * elems * sizeof(float) > have_bytes) elems /= 2;
    Plan plan = {};
    floatX *a, *b, *d;
    float *x, *y;
    for (floatX** p : {&a, &b, &d}) plan_add(&plan, "GEMM ceiling", Place::DEVICE, p, side * side);
    for (float** p : {&x, &y}) plan_add(&plan, "memory ceiling", Place::DEVICE, p, elems);
    plan_add_bytes(&plan, "workspace", Place::DEVICE, matmul_workspace_bytes(), nullptr);
    plan_allocate(&plan);
    cudaStream_t stream;
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    comm_barrier(&run->comm);
    const int n = (int)side;
    double product_ms = best_ms(stream, [&] { matmul_forward(d, a, b, nullptr, n, n, n, Layout::OUT_IN, stream); });
    double add_ms = best_ms(stream, [&] { values_add(values_of(y), values_of(x), elems, stream); });
    double copy_ms = best_ms(stream, [&] {
        CUDA_CHECK(cudaMemcpyAsync(y, x, elems * sizeof(float), cudaMemcpyDeviceToDevice, stream));
    });
    CUDA_CHECK(cudaStreamDestroy(stream));
    plan_free(&plan);
#ifndef DEVICE_CUDA
    device_forget_peak();
#endif
    const double bytes = (double)elems * sizeof(float);
    return Ceilings{n, 2e3 * n * n * n / product_ms, 1e3 * fmax(3 * bytes / add_ms, 2 * bytes / copy_ms)};
}

// ----------------------------------------------------------------------------------------------------------- steps
/* Synthetic tokens with the frequencies of text (Zipf's law), different in each rank and micro-step. */
static void tokens_make_up(Run* run)
{
    const double V = run->model.config.V;
    const size_t n = (size_t)STEPS_IN_FLIGHT * run->G * run->B * run->T;
    for (int* h : {run->h_tokens, run->h_targets})
        for (size_t i = 0; i < n; i++) {
            const uint64_t seed = (uint64_t)run->flags->seed + 2 * (uint64_t)run->replica + (h == run->h_targets);
            h[i] = (int)(pow(V, (mix64(mix64(seed) + i) >> 11) * 0x1p-53)) - 1;
        }
}

static long page_faults_so_far(void)
{
    struct rusage usage;
    ENSURE(getrusage(RUSAGE_SELF, &usage) == 0, "getrusage: %s", strerror(errno));
    return usage.ru_minflt;
}

static double host_syncs_so_far(void)
{
#ifdef DEVICE_CUDA
    return NAN;                      // not counted on a GPU
#else
    return (double)host_sync_count();
#endif
}

static bool step_was_skipped(const Run* run, int slot)
{
    Skip skip = run->zero.h_state[slot].skip;
    return skip == Skip::NONFINITE || skip == Skip::SPIKE;
}

/* One more step; returns its host synchronizations. */
static double bench_step(Run* run)
{
    double before = host_syncs_so_far();
    train_step(run);
    run->step++;
    return host_syncs_so_far() - before;
}

/* The times of this rank only: the all-reduce at the end of a step keeps ranks together. */
static void bench_step_read(const Run* run, size_t step, BenchStep* s)
{
    int slot = (int)(step % STEPS_IN_FLIGHT);
    profile_step_wait(slot);
    s->step_ms = profile_phases_ms(slot, s->phases_ms);
    s->skipped = step_was_skipped(run, slot);
}

static void bench_warm_up(Run* run, Bench* b)
{
    for (bool skipped = false; b->num_warmup < BENCH_WARMUP_STEPS ||
         (skipped && b->num_warmup < BENCH_MAX_WARMUP_STEPS); b->num_warmup++) {
        BenchStep s;
        bench_step(run);
        bench_step_read(run, run->step - 1, &s);
        skipped = s.skipped;
    }
}

static void bench_steps(Run* run, Bench* b)
{
    b->steps = (BenchStep*)malloc_checked(b->num_steps * sizeof(BenchStep));
    b->order = (int*)malloc_checked(b->num_steps * sizeof(int));
    memset((void*)b->steps, 0, b->num_steps * sizeof(BenchStep));
    comm_barrier(&run->comm);
    const size_t first = run->step;
    const long faults_before = page_faults_so_far();
    const double begin_s = now_s();
    for (int i = 0; i < b->num_steps; i++) {
        b->host_syncs += bench_step(run) / b->num_steps;
        if (i > 0) bench_step_read(run, first + i - 1, &b->steps[i - 1]);
    }
    bench_step_read(run, run->step - 1, &b->steps[b->num_steps - 1]);
    b->wall_s = now_s() - begin_s;
    b->page_faults = comm_max_host(&run->comm, (double)(page_faults_so_far() - faults_before) / b->num_steps);
    for (int i = 0; i < b->num_steps; i++) {
        int at = i;
        for (; at > 0 && b->steps[b->order[at - 1]].step_ms > b->steps[i].step_ms; at--)
            b->order[at] = b->order[at - 1];
        b->order[at] = i;
        b->num_skipped += b->steps[i].skipped;
    }
}

/* The step at quantile q. */
static const BenchStep* bench_quantile(const Bench* b, double q)
{
    int at = (int)(q * b->num_steps);
    return &b->steps[b->order[at < b->num_steps ? at : b->num_steps - 1]];
}

// ------------------------------------------------------------------------------------------------------ operations
typedef struct Interval { double begin, end; } Interval;

static int interval_compare(const void* a, const void* b)
{
    const double x = ((const Interval*)a)->begin, y = ((const Interval*)b)->begin;
    return x < y ? -1 : x > y;
}

/* Sorts intervals and merges those that overlap, in place; returns how many are left. */
static int intervals_join(Interval* x, int n)
{
    int last = -1;
    qsort(x, n, sizeof *x, interval_compare);
    for (int i = 0; i < n; i++) {
        if (last >= 0 && x[i].begin <= x[last].end) x[last].end = fmax(x[last].end, x[i].end);
        else x[++last] = x[i];
    }
    return last + 1;
}

static double intervals_length(const Interval* x, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++) sum += x[i].end - x[i].begin;
    return sum;
}

/* Total overlap of two sets of merged intervals. */
static double intervals_overlap(const Interval* x, int num_x, const Interval* y, int num_y)
{
    double sum = 0;
    for (int i = 0, j = 0; i < num_x && j < num_y;) {
        sum += fmax(0, fmin(x[i].end, y[j].end) - fmax(x[i].begin, y[j].begin));
        if (x[i].end < y[j].end) i++;
        else j++;
    }
    return sum;
}

static bool is_same_op(const Span* a, const Span* b)
{
    return a->kind == b->kind && a->phase == b->phase && strcmp(a->name, b->name) == 0 &&
           memcmp(a->sizes, b->sizes, sizeof a->sizes) == 0;
}

static void bench_op_add(Bench* b, const Span* span)
{
    int i = 0;
    while (i < b->num_ops && !is_same_op(b->ops[i].span, span)) i++;
    if (i == b->num_ops) b->ops[b->num_ops++] = BenchOp{span, 0, 0, 0, 0};
    BenchOp* op = &b->ops[i];
    op->calls++;
    op->ms += span->end_ms - span->begin_ms;
    op->flops += span->flops;
    op->bytes += span->bytes;
}

static int op_compare(const void* a, const void* b)
{
    const double x = ((const BenchOp*)a)->ms, y = ((const BenchOp*)b)->ms;
    return x > y ? -1 : x < y;
}

/* The operations within the span of a step, and how much of the communication they hide. */
static void bench_ops_of_step(Bench* b, const Span* step)
{
    Interval* computes = (Interval*)malloc_checked(2 * profile.num_spans * sizeof(Interval));
    Interval* moves = computes + profile.num_spans;
    int num_computes = 0, num_moves = 0;
    b->ops = (BenchOp*)malloc_checked(profile.num_spans * sizeof(BenchOp));
    for (int i = 0; i < profile.num_spans; i++) {
        const Span* span = &profile.spans[i];
        if (span->kind >= SpanKind::PHASE) continue;
        Interval x = {fmax(span->begin_ms, step->begin_ms), fmin(span->end_ms, step->end_ms)};
        if (x.begin >= x.end) continue;
        if (span->kind == SpanKind::COMPUTE) computes[num_computes++] = x;
        if (span->kind == SpanKind::COMMUNICATION) moves[num_moves++] = x;
        if (span->begin_ms < step->begin_ms) continue;       // a gather of the previous step that is still running
        bench_op_add(b, span);
        b->done_flops += span->flops;
    }
    num_computes = intervals_join(computes, num_computes);
    num_moves = intervals_join(moves, num_moves);
    b->op_step_ms = step->end_ms - step->begin_ms;
    b->compute_ms = intervals_length(computes, num_computes);
    b->moving_ms = intervals_length(moves, num_moves);
    b->hidden_ms = intervals_overlap(computes, num_computes, moves, num_moves);
    b->other_ms = b->op_step_ms - b->compute_ms - (b->moving_ms - b->hidden_ms);
    free(computes);
    qsort(b->ops, b->num_ops, sizeof *b->ops, op_compare);
}

/* Steps with every operation timed; the first only creates the events. */
static void bench_ops(Run* run, Bench* b)
{
    const int num_steps = run->flags->profile > 0 ? (int)run->flags->profile : (int)BENCH_OP_STEPS;
    trace_begin(run);
    for (int i = 0; i <= num_steps; i++) bench_step(run);
    profile_read();
    const Span** steps = (const Span**)malloc_checked(num_steps * sizeof *steps);
    int num_seen = 0;
    double from_ms = 0;
    for (int i = 1; i < profile.num_spans; i++) {
        const Span* span = &profile.spans[i];
        if (span->kind != SpanKind::STEP) continue;
        if (num_seen == 0) from_ms = span->begin_ms;
        int at = num_seen++;
        for (; at > 0 && steps[at - 1]->end_ms - steps[at - 1]->begin_ms > span->end_ms - span->begin_ms; at--)
            steps[at] = steps[at - 1];
        steps[at] = span;
    }
    bench_ops_of_step(b, steps[num_seen / 2]);
    free(steps);
    if (run->flags->profile > 0) trace_write(run, from_ms);
}

// -------------------------------------------------------------------------------------------------------- figures
/* Figures of the whole step. Rates are of one rank. */
typedef struct BenchFigures {
    double median_ms, min_ms, p25_ms, p75_ms, max_ms, mean_ms;
    double toks_per_s, flops_per_token, model_flops, done_flops;    // flops per second
    double mfu, hfu, product_share;                                 // hfu: with recomputation; 0: peak unknown
    double exposed_ms, host_plan_bytes;
} BenchFigures;

static size_t device_peak_now(void)
{
#ifdef DEVICE_CUDA
    size_t free_bytes, total_bytes;                  // includes CUDA, cuBLAS, NCCL and other processes
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    return total_bytes - free_bytes;
#else
    return device_peak_bytes();
#endif
}

static BenchFigures bench_figures(const Run* run, const Bench* b)
{
    const Config* c = &run->model.whole;
    BenchFigures x = {};
    x.median_ms = bench_quantile(b, 0.5)->step_ms;
    x.min_ms = bench_quantile(b, 0)->step_ms;
    x.p25_ms = bench_quantile(b, 0.25)->step_ms;
    x.p75_ms = bench_quantile(b, 0.75)->step_ms;
    x.max_ms = bench_quantile(b, 1)->step_ms;
    for (int i = 0; i < b->num_steps; i++) x.mean_ms += b->steps[i].step_ms / b->num_steps;
    x.toks_per_s = 1e3 * (double)(run->global_batch * run->T) / x.median_ms;
    x.flops_per_token = 6.0 * run->model.shard.num_params + attention_flops_per_token(c, run->T);
    x.model_flops = x.toks_per_s * x.flops_per_token / run->comm.num_ranks;
    x.done_flops = 1e3 * b->done_flops / x.median_ms;
    if (run->device.peak_flops > 0) {
        x.mfu = x.model_flops / run->device.peak_flops;
        x.hfu = x.done_flops / run->device.peak_flops;
    }
    x.product_share = x.model_flops / b->ceilings.product_flops;
    x.exposed_ms = bench_quantile(b, 0.5)->phases_ms[(int)Phase::COMMUNICATION];
    x.host_plan_bytes = (double)plan_bytes(&run->plan, Place::HOST);
#ifndef DEVICE_CUDA
    x.host_plan_bytes += (double)plan_bytes(&run->plan, Place::DEVICE);
#endif
    return x;
}

/* Milliseconds that an operation would take at the ceilings. */
static double op_roof_ms(const Ceilings* c, const BenchOp* op)
{
    return 1e3 * fmax(op->flops / c->product_flops, op->bytes / c->memory_bps);
}
static bool op_is_of_products(const Ceilings* c, const BenchOp* op)
{
    return op->flops / c->product_flops > op->bytes / c->memory_bps;
}

/* "256 x 768 x 2304" */
static const char* sizes_text(const Span* span, char (&text)[64])
{
    int length = 0;
    text[0] = 0;
    const char* name = span->size_names;
    for (int i = 0; *name; i++) {
        length += snprintf(text + length, sizeof text - length, "%s%.0f", i > 0 ? " x " : "", span->sizes[i]);
        name += strcspn(name, ",");
        name += strspn(name, ", ");
    }
    return text;
}

static void bench_print_ops(const Bench* b)
{
    const Ceilings* c = &b->ceilings;
    printf("operations of the median of a few more steps, every operation timed: %.2f ms\n", b->op_step_ms);
    printf("  %-13s %-27s %-22s %6s %10s %6s %9s %9s  %s\n", "phase", "operation", "sizes", "calls", "ms", "share",
           "Gflop/s", "GB/s", "% of roofline");
    double small_ms = 0;
    for (int i = 0; i < b->num_ops; i++) {
        const BenchOp* op = &b->ops[i];
        const Span* span = op->span;
        if (op->ms < 5e-4 * b->op_step_ms) { small_ms += op->ms; continue; }
        char sizes[64], flops[16] = "-", bytes[16] = "-", roof[32] = "";
        if (op->flops > 0) snprintf(flops, sizeof flops, "%.1f", op->flops * 1e-6 / op->ms);
        if (op->bytes > 0) snprintf(bytes, sizeof bytes, "%.2f", op->bytes * 1e-6 / op->ms);
        if (span->kind == SpanKind::COMPUTE && op->ms > 0 && op_roof_ms(c, op) > 0)
            snprintf(roof, sizeof roof, "%5.1f%% %s", 100 * op_roof_ms(c, op) / op->ms,
                     op_is_of_products(c, op) ? "GEMM" : "memory");
        printf("  %-13s %-27s %-22s %6d %10.3f %5.1f%% %9s %9s  %s\n", phase_names[(int)span->phase], span->name,
               sizes_text(span, sizes), op->calls, op->ms, 100 * op->ms / b->op_step_ms, flops, bytes, roof);
    }
    printf("  smaller ones %.3f ms\n  compute %.2f ms, exposed communication %.2f ms, idle %.2f ms\n",
           small_ms, b->compute_ms, b->moving_ms - b->hidden_ms, b->other_ms);
}

static void bench_print(const Run* run, const Bench* b, const BenchFigures* x)
{
    const BenchStep* median = bench_quantile(b, 0.5);
    printf("bench   %d steps after %d to warm up", b->num_steps, b->num_warmup);
    if (b->num_skipped > 0)
        printf(" | %d were SKIPPED (non-finite gradients), which takes less time: lower -l", b->num_skipped);
    printf("\nstep    %.2f ms median | %.2f fastest | %.2f to %.2f quartiles | %.2f slowest | %.1f tok/s\n",
           x->median_ms, x->min_ms, x->p25_ms, x->p75_ms, x->max_ms, x->toks_per_s);
    printf("flops   %.4g Gflop/s per rank (6 N + 6 L C T per token, N all parameters, causal)", x->model_flops * 1e-9);
    if (x->mfu > 0) printf(" | %.1f%% MFU of %.4g | %.1f%% HFU, with recomputation", 100 * x->mfu,
                           run->device.peak_flops * 1e-9, 100 * x->hfu);
    printf("\nceiling %.1f%% of a GEMM of %d x %d x %d at %.4g Gflop/s | memory %.1f GB/s\n", 100 * x->product_share,
           b->ceilings.product_side, b->ceilings.product_side, b->ceilings.product_side,
           b->ceilings.product_flops * 1e-9, b->ceilings.memory_bps * 1e-9);
    printf("memory  device %.1f MiB peak, planned %.1f | process %.1f MiB, planned %.1f\n",
           b->device_peak_bytes / 1048576.0, plan_bytes(&run->plan, Place::DEVICE) / 1048576.0,
           b->host_bytes / 1048576.0, x->host_plan_bytes / 1048576.0);
    printf("host    %.1f page faults per step", b->page_faults);
    if (std::isfinite(b->host_syncs)) printf(" | %.1f host synchronizations per step", b->host_syncs);
    printf("\nphases ");
    for (int i = 0; i < NUM_PHASES; i++)
        if (median->phases_ms[i] > 0)
            printf(" %s %.2f ms (%.1f%%)", phase_names[i], median->phases_ms[i],
                   100 * median->phases_ms[i] / median->step_ms);
    printf("\nsent    communication volume per step and rank %zu bytes | %.2f ms exposed, %.2f ms hidden\n",
           sent_bytes_per_step(run), x->exposed_ms, b->hidden_ms);
    bench_print_ops(b);
}

static void bench_json_ops(cJSON* j, const Bench* b)
{
    const Ceilings* c = &b->ceilings;
    cJSON* list = json_add_array(j, "ops");
    for (int i = 0; i < b->num_ops; i++) {
        const BenchOp* op = &b->ops[i];
        JsonText sizes = {};
        json_text_add(&sizes, "{");
        sizes_as_members(&sizes, op->span);
        if (sizes.length > 1) sizes.length -= 2;     // overwrites the last comma
        sizes.text[sizes.length] = 0;
        json_text_add(&sizes, "}");
        cJSON* row = json_new_object();
        json_add_string(row, "op", op->span->name);
        json_add_string(row, "phase", phase_names[(int)op->span->phase]);
        json_add_string(row, "kind", span_kind_names[(int)op->span->kind]);
        cJSON_AddItemToObject(row, "sizes", json_added(cJSON_Parse(sizes.text), "sizes"));
        json_add_int(row, "calls", op->calls);
        json_add_float(row, "ms", op->ms);
        json_add_float(row, "flops", op->flops);
        json_add_float(row, "bytes", op->bytes);
        json_add_float(row, "gflop_per_s", op->ms > 0 ? op->flops * 1e-6 / op->ms : 0);
        json_add_float(row, "gb_per_s", op->ms > 0 ? op->bytes * 1e-6 / op->ms : 0);
        json_add_string(row, "bound", op_is_of_products(c, op) ? "GEMM" : "memory");
        json_add_float(row, "roof_ms", op_roof_ms(c, op));
        cJSON_AddItemToArray(list, row);
        json_text_free(&sizes);
    }
}

static void bench_json_step(cJSON* j, const Bench* b, const BenchFigures* x)
{
    cJSON* step = json_add_object(j, "step_ms");
    json_add_float(step, "median", x->median_ms);
    json_add_float(step, "min", x->min_ms);
    json_add_float(step, "p25", x->p25_ms);
    json_add_float(step, "p75", x->p75_ms);
    json_add_float(step, "max", x->max_ms);
    json_add_float(step, "mean", x->mean_ms);
    cJSON* all = json_add_array(step, "all");
    for (int i = 0; i < b->num_steps; i++)
        cJSON_AddItemToArray(all, json_added(cJSON_CreateNumber(b->steps[i].step_ms), "all"));
    cJSON* phases = json_add_object(j, "phases_ms");
    for (int i = 0; i < NUM_PHASES; i++)
        json_add_float(phases, phase_names[i], bench_quantile(b, 0.5)->phases_ms[i]);
}

/* Writes --bench-json: the run's settings, then every figure. */
static void bench_json(const Run* run, const Bench* b, const BenchFigures* x, const char* model_name)
{
    const Setting* s = &run->setting;
    char level[16], now[32];
    time_t seconds = time(nullptr);
    strftime(now, sizeof now, "%Y-%m-%dT%H:%M:%SZ", gmtime(&seconds));
    cJSON* j = json_new_object();
    for (auto member : {std::initializer_list<const char*>{"version", VERSION}, {"date", now},
                        {"device", run->device.name}, {"model", model_name}, {"precision", FLOATX_NAME},
                        {"optimizer", run->flags->optimizer}, {"recompute", recompute_name(*s, level)},
                        {"flops_convention", "6 N + 6 L C T per token: N all parameters, attention causal"}})
        json_add_string(j, member.begin()[0], member.begin()[1]);
    const struct { const char* key; double value; } figures[] = {
        {"num_ranks", (double)run->comm.num_ranks}, {"num_threads", (double)run->device.num_threads},
        {"num_params", (double)run->model.shard.num_params}, {"zero", (double)s->stage},
        {"micro_batch", (double)run->B}, {"grad_accum", (double)run->G}, {"seq_len", (double)run->T},
        {"tokens_per_step", (double)(run->global_batch * run->T)},
        {"warmup_steps", (double)b->num_warmup}, {"steps", (double)b->num_steps}, {"wall_s", b->wall_s},
        {"skipped_steps", (double)b->num_skipped}, {"tokens_per_s", x->toks_per_s},
        {"flops_per_token", x->flops_per_token}, {"peak_flop_per_s", run->device.peak_flops},
        {"flop_per_s", x->model_flops}, {"mfu", x->mfu}, {"hfu", x->hfu},
        {"product_flop_per_s", b->ceilings.product_flops}, {"product_side", (double)b->ceilings.product_side},
        {"product_share", x->product_share}, {"memory_byte_per_s", b->ceilings.memory_bps},
        {"device_plan_bytes", (double)plan_bytes(&run->plan, Place::DEVICE)},
        {"device_peak_bytes", (double)b->device_peak_bytes},
        {"host_plan_bytes", x->host_plan_bytes}, {"host_bytes", (double)b->host_bytes},
        {"page_faults_per_step", b->page_faults}, {"host_syncs_per_step", b->host_syncs},
        {"sent_bytes_per_step", (double)sent_bytes_per_step(run)}, {"communication_exposed_ms", x->exposed_ms},
        {"communication_hidden_ms", b->hidden_ms}, {"op_step_ms", b->op_step_ms}, {"op_compute_ms", b->compute_ms},
        {"op_communication_ms", b->moving_ms}, {"op_other_ms", b->other_ms}, {"op_flops", b->done_flops}};
    for (const auto& figure : figures) json_add_float(j, figure.key, figure.value);
    bench_json_step(j, b, x);
    bench_json_ops(j, b);
    json_write_file(run->flags->bench_json, j);
    cJSON_Delete(j);
}

// -------------------------------------------------------------------------------------------------------- the mode
static size_t bench_num_steps(const Flags* f) { return f->given[FLAG_steps] ? (size_t)f->steps : 20; }

/* Steps in all, with warm-up and timed operations: the length of the schedule. */
static size_t bench_total_steps(const Flags* f)
{
    size_t num_op_steps = f->profile > 0 ? (size_t)f->profile : (size_t)BENCH_OP_STEPS;
    return BENCH_WARMUP_STEPS + bench_num_steps(f) + 1 + num_op_steps;
}

static void bench(Run* run, Ceilings ceilings, const char* model_name)
{
    Bench b = {};
    b.ceilings = ceilings;
    b.num_steps = (int)bench_num_steps(run->flags);
    if (run->flags->bench_json[0] && run->comm.rank == 0)
        fclose(file_to_write(run->flags->bench_json, "--bench-json"));
    trace_open(run);
    tokens_make_up(run);
    bench_warm_up(run, &b);
    bench_steps(run, &b);
    b.device_peak_bytes = device_peak_now();
    b.host_bytes = resident_bytes();
    bench_ops(run, &b);
    BenchFigures x = bench_figures(run, &b);
    if (run->comm.rank == 0) {
        bench_print(run, &b, &x);
        if (run->flags->bench_json[0]) bench_json(run, &b, &x, model_name);
    }
    free(b.steps);
    free(b.order);
    free(b.ops);
}
