/* test_storage.h: op tests of the optimizer on states of other storage than fp32. Part of test_ops.cu. */
#pragma once
#include "kernels/optimizer.cuh"

/* States of other storage. dims: n, elements by which the tensors are shifted, Dtype of the master (BF16: none), 1 for
 * m and v in bf16, 1 for a gradient in 16 bits. The run's first element is number 77 of all parameters. */
template <class S, class G> static void adamw_storage_run(OpRun* run, Dtype master_dtype)
{
    const size_t n = (size_t)run->dims[0], shift = (size_t)run->dims[1], whole = n + shift;
    OptimizerRuns runs = {};
    if (n > 3) runs_extend(&runs, n / 2 + 1, 0.1f, 1.0f, -1, false, 0, rectangle_in_line(77));
    runs_extend(&runs, n, 0.1f, 1.0f, -1, false, 0, rectangle_in_line(78));
    OpTensor<floatX> param = op_inout<floatX>(run, "param", whole, 0.0, 0.02);
    OpTensor<S> m = op_inout<S>(run, "m", whole, 0.0, 1e-3), v = op_inout<S>(run, "v", whole, 1e-3, 2e-4);
    OpTensor<G> grad = op_input<G>(run, "grad", whole, 0.0, 0.05);
    unsigned short* h_low = (unsigned short*)op_host(run, whole);
    for (size_t i = 0; i < whole; i++) h_low[i] = (unsigned short)op_random(99, i);
    const StepState s = optimizer_test_state(false);
    const StepState* state = (const StepState*)op_bytes(run, "state", OpKind::INPUT, &s, sizeof s);
    const OptimizerConfig config = optimizer_test_config(1e-8f);
    const bool split = master_dtype == Dtype::SPLIT;
    const Dtype state_dtype = sizeof(S) == 2 ? Dtype::BF16 : Dtype::FP32;
    unsigned short* low = nullptr;
    if (split) low = (unsigned short*)op_bytes(run, "low", OpKind::INOUT, h_low, whole * sizeof *h_low);
    const Dtype grad_dtype = sizeof(G) == 2 ? FLOATX_DTYPE : Dtype::FP32;
    const OptimizerArrays a = {param.dev, {param.dev, master_dtype, low}, {grad.dev, grad_dtype, nullptr},
                               {{m.dev, state_dtype, nullptr}, {v.dev, state_dtype, nullptr}}};
    OP_RUN(run, n * (2.0 * sizeof(floatX) + (split ? 4.0 : 0.0) + 4.0 * sizeof(S) + sizeof(G)), 0,
           optimizer_update<Adamw>(optimizer_arrays_from(a, shift), &runs, config, nullptr, state, 0));
    const unsigned short* h_param = (const unsigned short*)op_start_bytes(run, "param");
    for (size_t i = 0; split && i < whole; i++) param.f64[i] = param.f32[i] = split_join(h_param[i], h_low[i]);
    double* const states64[MAX_STATES] = {m.f64, v.f64};
    float* const states32[MAX_STATES] = {m.f32, v.f32};
    for (size_t i = shift; i < whole; i++) {
        optimizer_ref<Adamw>(param.f64, grad.f64, states64, i, 0, s.lr, 0.1f, 1.0, config, s);
        optimizer_ref<Adamw>(param.f32, grad.f32, states32, i, 0, s.lr, 0.1f, 1.0, config, s);
    }
    op_check(run, param);
    op_check(run, m);
    op_check_relative(run, v);
    if (!split) return;
    const unsigned short *high = (const unsigned short*)op_result(run, "param");
    double err_ours = 0, err_plain = 0, largest = 0;
    low = (unsigned short*)op_result(run, "low");
    for (size_t i = shift; i < whole; i++) {
        err_ours = fmax(err_ours, fabs((double)split_join(high[i], low[i]) - param.f64[i]));
        err_plain = fmax(err_plain, fabs((double)param.f32[i] - param.f64[i]));
        largest = fmax(largest, fabs(param.f64[i]));
    }
    op_verdict(run, "split master", err_ours, 2 * err_plain + largest * op_step((const float*)nullptr));
}

static void adamw_storage_test(OpRun* run)
{
    const Dtype master = (Dtype)run->dims[2];
    if (master == Dtype::SPLIT ? FLOATX_DTYPE != Dtype::BF16 : master != FLOATX_DTYPE) return;
    if (run->dims[3] && run->dims[4]) adamw_storage_run<__nv_bfloat16, floatX>(run, master);
    else if (run->dims[3]) adamw_storage_run<__nv_bfloat16, float>(run, master);
    else if (run->dims[4]) adamw_storage_run<float, floatX>(run, master);
    else adamw_storage_run<float, float>(run, master);
}

/* Three steps with an fp32 master, and three with a split one of the same values: the same bits. */
static void adamw_split_steps(const OptimizerArrays& whole, const OptimizerArrays& split, size_t n,
                              const StepState* state)
{
    OptimizerRuns runs = {};
    runs_extend(&runs, n, 0.1f, 1.0f);
    for (int step = 0; step < 3; step++)
        for (const OptimizerArrays* arrays : {&whole, &split})
            optimizer_update<Adamw>(*arrays, &runs, optimizer_test_config(1e-8f), nullptr, state, 0);
}

static void adamw_split_test(OpRun* run)
{
    const size_t n = (size_t)run->dims[0];
    if (FLOATX_DTYPE != Dtype::BF16) return;
    OpTensor<float> master = op_inout<float>(run, "master", n, 0.0, 0.02), m = op_inout<float>(run, "m", n, 0.0, 1e-3);
    OpTensor<float> v = op_inout<float>(run, "v", n, 1e-3, 2e-4), grad = op_input<float>(run, "grad", n, 0.0, 0.05);
    floatX* param = (floatX*)op_bytes(run, "param", OpKind::INOUT, nullptr, n * 2);
    unsigned short *h_split = (unsigned short*)op_host(run, n), *h_low = (unsigned short*)op_host(run, n);
    float* h_master = (float*)op_start_bytes(run, "master");
    for (size_t i = 0; i < n; i += 5) h_master[i] = bits_float((float_bits(h_master[i]) & 0xffff0000u) | 0x8000u);
    op_upload(run, "master");                                            // each fifth halfway between two bf16
    for (size_t i = 0; i < n; i++) {
        h_split[i] = bf16_nearest_bits(h_master[i]);
        h_low[i] = split_low(h_master[i]);
        op_check_value(run, "joined", split_join(h_split[i], h_low[i]), h_master[i], 0.0);
        if (run->num_failed > 0) return;
    }
    floatX* split = (floatX*)op_bytes(run, "split", OpKind::INOUT, h_split, n * 2);
    unsigned short* low = (unsigned short*)op_bytes(run, "low", OpKind::INOUT, h_low, n * 2);
    float* m2 = (float*)op_bytes(run, "m2", OpKind::INOUT, op_start_bytes(run, "m"), n * 4);
    float* v2 = (float*)op_bytes(run, "v2", OpKind::INOUT, op_start_bytes(run, "v"), n * 4);
    const StepState s = optimizer_test_state(false);
    const StepState* state = (const StepState*)op_bytes(run, "state", OpKind::INPUT, &s, sizeof s);
    const OptimizerArrays whole = optimizer_test_arrays(param, master.dev, m.dev, v.dev, grad.dev);
    OptimizerArrays other = optimizer_test_arrays(split, nullptr, m2, v2, grad.dev);
    other.master = Values{split, Dtype::SPLIT, low};
    OP_RUN(run, 0, 0, adamw_split_steps(whole, other, n, state));
    const unsigned short *high = (const unsigned short*)op_result(run, "split");
    const unsigned short *rest = (const unsigned short*)op_result(run, "low");
    const float* ours = (const float*)op_result(run, "master");
    double num_different = memcmp(high, op_result(run, "param"), n * 2) != 0;
    for (size_t i = 0; i < n; i++) num_different += float_bits(split_join(high[i], rest[i])) != float_bits(ours[i]);
    op_check_value(run, "different from the fp32 master's", num_different, 0.0, 0.0);
}

/* A matrix whose states, and weights without a master, are rounded stochastically, and its left and right columns as
 * two parts of it: the same bits. dims: rows, columns, of which the left part has, elements before the matrix. */
static void adamw_whole_and_parts(const OptimizerArrays (&a)[3], const size_t (&cols)[3], size_t rows, size_t first,
                                  const StepState* state)
{
    for (int k = 0; k < 3; k++) {
        OptimizerRuns runs = {};
        Rectangle place = {first + (k == 2 ? cols[1] : 0), 0, cols[k], cols[0]};
        if (k == 0) place = rectangle_in_line(first);
        runs_extend(&runs, rows * cols[k] / 2 + 1, 0.1f, 1.0f, -1, false, 0, place);      // ends within a row
        runs_extend(&runs, rows * cols[k], 0.1f, 1.0f, 0, false, 0, place);
        optimizer_update<Adamw>(a[k], &runs, optimizer_test_config(1e-8f), nullptr, state, 0);
    }
}

static void adamw_parts_test(OpRun* run)
{
    typedef __nv_bfloat16 S;
    const size_t rows = (size_t)run->dims[0], cols[3] = {(size_t)run->dims[1], (size_t)run->dims[2],
                                                         (size_t)(run->dims[1] - run->dims[2])};
    static const char* const names[3][4] = {{"param", "m", "v", "grad"},
                                            {"left param", "left m", "left v", "left grad"},
                                            {"right param", "right m", "right v", "right grad"}};
    static const size_t elem_bytes[4] = {sizeof(floatX), sizeof(S), sizeof(S), sizeof(float)};
    const size_t n = rows * cols[0];
    char* whole[4] = {(char*)op_inout<floatX>(run, names[0][0], n, 0.0, 0.02).dev,
                      (char*)op_inout<S>(run, names[0][1], n, 0.0, 1e-3).dev,
                      (char*)op_inout<S>(run, names[0][2], n, 1e-3, 2e-4).dev,
                      (char*)op_inout<float>(run, names[0][3], n, 0.0, 0.05).dev};
    OptimizerArrays a[3];
    for (int k = 0; k < 3; k++) {
        void* at[4];
        for (int i = 0; i < 4; i++) {
            const size_t row_bytes = cols[k] * elem_bytes[i], left = k == 2 ? cols[1] * elem_bytes[i] : 0;
            const char* from = (const char*)op_start_bytes(run, names[0][i]);
            char* part = (char*)op_host(run, rows * cols[k]);                  // of doubles: room enough
            for (size_t row = 0; row < rows; row++)
                memcpy(part + row * row_bytes, from + row * cols[0] * elem_bytes[i] + left, row_bytes);
            at[i] = k == 0 ? whole[i] : (char*)op_bytes(run, names[k][i], OpKind::INOUT, part, rows * row_bytes);
        }
        a[k] = {(floatX*)at[0], {at[0], FLOATX_DTYPE, nullptr}, values_of((float*)at[3]),
                {{at[1], Dtype::BF16, nullptr}, {at[2], Dtype::BF16, nullptr}}};
    }
    const StepState s = optimizer_test_state(false);
    const StepState* state = (const StepState*)op_bytes(run, "state", OpKind::INPUT, &s, sizeof s);
    OP_RUN(run, 0, 0, adamw_whole_and_parts(a, cols, rows, (size_t)run->dims[3], state));
    double num_different = 0;
    for (int k = 1; k < 3; k++)
        for (int i = 0; i < 3; i++) {
            const size_t row_bytes = cols[k] * elem_bytes[i], left = k == 2 ? cols[1] * elem_bytes[i] : 0;
            const char* truth = (const char*)op_result(run, names[0][i]);
            const char* ours = (const char*)op_result(run, names[k][i]);
            for (size_t row = 0; row < rows; row++)
                num_different += memcmp(ours + row * row_bytes, truth + row * cols[0] * elem_bytes[i] + left,
                                        row_bytes) != 0;
        }
    op_check_value(run, "rows different from the whole's", num_different, 0.0, 0.0);
}

static const OpTest storage_tests[] = {
    {"adamw_storage", adamw_storage_test, {1000, 0, (int)Dtype::FP32, 1, 0}, OpWhen::ALWAYS},
    {"adamw_storage", adamw_storage_test, {1037, 0, (int)Dtype::SPLIT, 0, 0}, OpWhen::ALWAYS},
    {"adamw_storage", adamw_storage_test, {1037, 3, (int)Dtype::SPLIT, 1, 1}, OpWhen::ALWAYS},
    {"adamw_storage", adamw_storage_test, {4099, 0, (int)Dtype::BF16, 0, 0}, OpWhen::ALWAYS},
    {"adamw_storage", adamw_storage_test, {4099, 1, (int)Dtype::BF16, 1, 0}, OpWhen::ALWAYS},
    {"adamw_storage", adamw_storage_test, {1, 0, (int)Dtype::BF16, 1, 1}, OpWhen::ALWAYS},
    {"adamw_split", adamw_split_test, {4099}, OpWhen::ALWAYS},
    {"adamw_parts", adamw_parts_test, {24, 96, 32, 1000}, OpWhen::ALWAYS},
    {"adamw_parts", adamw_parts_test, {301, 9, 2, 7}, OpWhen::ALWAYS},
    {"adamw_storage", adamw_storage_test, {124 * 1000 * 1000, 0, (int)Dtype::SPLIT, 0, 0}, OpWhen::BENCH},
    {"adamw_storage", adamw_storage_test, {124 * 1000 * 1000, 0, (int)Dtype::BF16, 1, 0}, OpWhen::BENCH},
};
