/* test_storage.h: op tests of the optimizer on states of other storage than fp32. Part of test_ops.cu. */
#pragma once
#include "kernels/optimizer.cuh"

/* States of other storage. dims: n, elements by which the tensors are shifted, Dtype of the master (BF16: none), 1 for
 * m and v in bf16, 1 for a gradient in 16 bits. The run's first element is number 77 of all parameters. */
template <class S, class G> static void adamw_storage_run(OpRun* run, Dtype master_dtype)
{
    const size_t n = (size_t)run->dims[0], shift = (size_t)run->dims[1], whole = n + shift;
    OptimizerRuns runs = {};
    if (n > 3) runs_extend(&runs, n / 2 + 1, 0.1f, 1.0f, -1, false, 0, 77);
    runs_extend(&runs, n, 0.1f, 1.0f, -1, false, 0, 78);
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

static const OpTest storage_tests[] = {
    {"adamw_storage", adamw_storage_test, {1000, 0, (int)Dtype::FP32, 1, 0}, OpWhen::ALWAYS},
    {"adamw_storage", adamw_storage_test, {1037, 0, (int)Dtype::SPLIT, 0, 0}, OpWhen::ALWAYS},
    {"adamw_storage", adamw_storage_test, {1037, 3, (int)Dtype::SPLIT, 1, 1}, OpWhen::ALWAYS},
    {"adamw_storage", adamw_storage_test, {4099, 0, (int)Dtype::BF16, 0, 0}, OpWhen::ALWAYS},
    {"adamw_storage", adamw_storage_test, {4099, 1, (int)Dtype::BF16, 1, 0}, OpWhen::ALWAYS},
    {"adamw_storage", adamw_storage_test, {1, 0, (int)Dtype::BF16, 1, 1}, OpWhen::ALWAYS},
    {"adamw_split", adamw_split_test, {4099}, OpWhen::ALWAYS},
    {"adamw_storage", adamw_storage_test, {124 * 1000 * 1000, 0, (int)Dtype::SPLIT, 0, 0}, OpWhen::BENCH},
    {"adamw_storage", adamw_storage_test, {124 * 1000 * 1000, 0, (int)Dtype::BF16, 1, 0}, OpWhen::BENCH},
};
