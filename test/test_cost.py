"""The table of a step's operations that --plan prints: floating-point operations against the formula for a transformer,
calls and bytes against the counts of the checked emulator in a real step."""
import json
import re

import init
import pytest
from util import ROOT, gpt2_config, llama_config, plan_rows, shard_write, train_gpt

ROW = re.compile(r"^  (forward|backward|recompute|optimizer) +(\w+) +(\w*) +(\d+) calls +(\S+) Gflop +(\S+) MB", re.M)
V, VP, C, NH, T, L, F_LLAMA = 97, 128, 64, 4, 16, 3, 176
# Config, widths of q and of q, k and v together, weights of the MLP.
MODELS = {
    "gpt2": (gpt2_config(V, C, T, L=L, NH=NH), C, 3 * C, C * (4 + 4) * C),
    "llama": (llama_config(V, C, T, L=L, NH=NH, F=F_LLAMA, num_key_value_heads=2), C, 2 * C, C * 3 * F_LLAMA),
    "qwen3": (llama_config(V, C, T, L=L, NH=NH, F=F_LLAMA, model_type="qwen3", num_key_value_heads=2, head_dim=24),
              96, 192, C * 3 * F_LLAMA),
}


def model_folder(folder, family, tokens=T):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS[family][0]))
    shard_write(folder / "data" / "train_000000.bin", init.tokens(tokens + 1, V, 3), V)
    return folder


def costs(folder, *flags, device="cpu", **env):
    """[(part, operation, product, calls, flops, bytes)] of one step."""
    run = train_gpt("--plan", "-m", folder, "-d", folder / "data", "-t", T, *flags, device=device, **env)
    rows = [(part, op, product, int(calls), float(gflop) * 1e9, float(mb) * 1e6)
            for part, op, product, calls, gflop, mb in ROW.findall(run.out)]
    assert rows, run.out
    return rows


def flops_of(rows, **match):
    fields = dict(part=0, op=1, product=2)
    return sum(row[4] for row in rows if all(re.fullmatch(v, row[fields[k]]) for k, v in match.items()))


# ---- floating-point operations -----------------------------------------------------------------------------------
@pytest.mark.parametrize("family", MODELS)
def test_flops_are_six_for_each_weight_and_token(tmp_path, family):
    _, Q, QKV, mlp = MODELS[family]
    B, G = 3, 5
    rows = costs(model_folder(tmp_path / "m", family), "-b", B, "-g", G)
    N, weights = B * G * T, L * (C * QKV + Q * C + mlp) + VP * C
    assert flops_of(rows, product=r"\w+") == pytest.approx(6 * N * weights, rel=1e-5)
    attention = N * L * Q * (T + 1)            # of one GEMM over the causal half
    assert flops_of(rows, op="attention_forward") == pytest.approx(2 * attention, rel=1e-5)
    assert flops_of(rows, op="attention_backward") == pytest.approx(5 * attention, rel=1e-5)
    assert flops_of(rows, part="recompute") == 0


@pytest.mark.parametrize("level, products, attention", [
    ("none", [], 0), ("cheap", [], 0), ("mlp", ["fc"], 0), ("attention", ["fc", "qkv"], 1),
    ("block", ["fc", "qkv", "attproj", "fcproj"], 1)])
@pytest.mark.parametrize("family", MODELS)
def test_flops_of_recomputation(tmp_path, family, level, products, attention):
    """From the second of these levels on, each GEMM of all blocks but the topmost, once."""
    B = 2
    rows = costs(model_folder(tmp_path / "m", family), "-b", B, "-r", level)
    for product in ["qkv", "attproj", "fc", "fcproj"]:
        forward = flops_of(rows, part="forward", product=product)
        expected = forward * (L - 1) / L if product in products else 0
        assert flops_of(rows, part="recompute", product=product) == pytest.approx(expected, rel=1e-5)
    assert flops_of(rows, part="recompute", op="attention_forward") == pytest.approx(
        attention * 2 * B * T * (L - 1) * MODELS[family][1] * (T + 1), rel=1e-5)


# ---- calls and bytes ---------------------------------------------------------------------------------------------
# Operations whose kernel or library call is the same; what its runs move must be at least the ideal and at most this
# much more: statistics, weights and partial sums that all rows share, of which so few rows have a large part
# (test_traffic.py looks at what one more row costs).
GROUPS = [
    (r"matmul_(?!backward_bias).*", r"cublasLtMatmul, (A|B|C|D|aux)", 1.001),
    (r"matmul_backward_bias", r"matmul_backward_bias_parts_kernel", 1.2),
    (r"activation_\w+", r"activation_kernel.*", 1.01),
    (r"(residual_)?(layer|rms)norm_forward", r"(layer|rms)norm_forward_kernel.*", 1.15),
    (r"(layer|rms)norm_backward", r"norm_backward_kernel.*", 2.5),
    (r"rope_\w+", r"rope_kernel.*", 1.2),
    (r"qk_norm_rope_forward", r"qk_norm_rope_forward_kernel.*", 1.3),
    (r"qk_norm_rope_backward", r"qk_norm_rope_backward_kernel.*", 1.6),
    (r"swiglu_forward", r"swiglu_forward_kernel.*", 1.01),
    (r"swiglu_backward", r"swiglu_backward_kernel.*", 1.01),
    (r"dropout", r"dropout_kernel.*", 1.01),
    (r"classifier", r"classifier_kernel.*", 1.1),
    (r"embedding_rows", r"embedding_forward_kernel.*", 1.6),
    (r"embedding_backward", r"embedding_backward_wte_kernel.*", 9),   # looks for a token among all
    (r"attention_forward", r"attention_forward_mma_kernel.*", 9),     # keys and values once for each tile of queries
    (r"attention_backward", r"attention_backward_q_mma_kernel.*", None),
    (r"loss_accumulate", r"loss_accumulate_kernel", 1.01),
    (r"cudaMemsetAsync", r"cudaMemsetAsync", 1.01),
    (r"ranges_clear", r"ranges_clear_kernel", 1.01),
    (r"values_sum", r"values_sum_kernel.*", 1.01),
    (r"global_norm_accumulate", r"global_norm_kernel.*", 1.01),
    (r"optimizer_update", r"optimizer_kernel.*", 1.01),
    (r"lamb_norms", r"lamb_norms_kernel", 1.05),
    (r"muon_sum_squares", r"muon_sum_squares_kernel", 1.05),
    (r"muon_copy", r"muon_copy_kernel.*", 1.05),
    (r"muon_combine", r"muon_combine_kernel", 1.01),
]
EXTRA_RUNS = {"cudaMemsetAsync": 2}            # the step's sums, and the hash after the last step
RUNS = [("gpt2", 80, ["-g", 2]), ("gpt2", 90, ["-r", "block", "--dropout", 0.1]), ("llama", 90, ["-r", "attention"]),
        ("llama", 80, ["-r", 2, "--optimizer", "muon"]),
        ("gpt2", 90, ["-r", "mlp", "--optimizer", "lamb", "--master", "split", "--state-dtype", "bf16"]),
        ("llama", 90, ["-g", 2, "--optimizer", "sgd", "--grad-dtype", "bf16"]), ("qwen3", 90, ["-r", "cheap"])]


@pytest.mark.parametrize("family, capability, flags", RUNS,
                         ids=lambda x: "-".join(map(str, x)) if isinstance(x, list) else x)
def test_calls_and_bytes_of_a_step(tmp_path, monkeypatch, family, capability, flags, B=16):
    if not (ROOT / "build/check/train_gpt").exists():
        pytest.skip("the checked variant is not built")
    monkeypatch.setenv("TRAIN_GPT_EMU", "build/check/train_gpt")
    monkeypatch.setenv("EMU_CAPABILITY", str(capability))
    micro = flags[flags.index("-g") + 1] if "-g" in flags else 1
    folder = model_folder(tmp_path / "m", family, B * T * micro)
    flags = [*flags, "-b", B, "-p", "bf16"]
    run = train_gpt("-m", folder, "--from-scratch", "-d", folder / "data", "-t", T, "-n", 1, "--sample-tokens", 0,
                    *flags, device="emu", EMU_COUNT="moved", OMP_NUM_THREADS="1")
    moved = {name: (int(size), int(runs)) for name, size, runs in
             re.findall(r"^moved by \(?(.*?)\)?: (\d+) bytes in (\d+) runs$", run.err, re.M)}
    rows, wrong = costs(folder, *flags, device="emu"), []
    for ops, kernels, most in GROUPS:
        known = [row for row in rows if re.fullmatch(ops, row[1])]
        seen = [moved[name] for name in moved if re.fullmatch(kernels, name)]
        size, runs = sum(s for s, _ in seen), sum(r for _, r in seen)
        calls, ideal = sum(row[3] for row in known), sum(row[5] for row in known)
        if kernels.startswith("cublasLt"):
            runs = moved["cublasLtMatmul, A"][1]
        least = 0.97 if ops == "optimizer_update" else 0.999     # the padding of a vocabulary is not updated
        print(f"{ops:40} {calls:4} calls, {runs:4} runs; {ideal / 1e3:10.2f} kB ideal, {size / 1e3:10.2f} moved")
        if runs != calls + EXTRA_RUNS.get(ops, 0) or (most and not ideal * least <= size <= most * ideal + 64):
            wrong.append(ops)
    assert wrong == []
    assert {row[1] for row in rows} == {row[1] for row in rows for ops, _, _ in GROUPS if re.fullmatch(ops, row[1])}


# ---- chunks of the head -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("flags, rows, mib", [
    (["--gpu", "h100"], [4736] * 6 + [4352], 909), (["--gpu", "h100", "-p", "bf16"], [8192] * 4, 786),
    ([], [331] * 98 + [330], 63.5), (["--gpu", "h100", "--head-rows", 10000], [10000] * 3 + [2768], 1919)])
def test_head_rows(flags, rows, mib):
    """Chunks of 32768 rows of GPT-2's logits: on a GPU at most 1 GiB, on a CPU 64 MiB, of about the same size."""
    out = train_gpt("--plan", "-m", "gpt2", "-b", 32, "-t", 1024, *flags).out
    calls = [int(row[3]) for row in ROW.findall(out) if row[2] == "head"]
    assert calls == [len(rows)] * 3
    size = 2 if "bf16" in flags else 4
    assert plan_rows(out)["logits"] == pytest.approx(max(rows) * 50304 * size / 2**20, abs=0.1)
    assert plan_rows(out)["logits"] == pytest.approx(mib, rel=1e-3)


def test_head_rows_of_a_chunked_vocabulary(tmp_path):
    """All rows of the widest piece fit, so that no chunk is needed, and no room for rows of the whole vocabulary."""
    out = train_gpt("--plan", "-m", "llama3-8b", "-p", "bf16", "--gpu", "h100", "--ranks", 8, "-z", 3, "-b", 1, "-t",
                    8192).out
    assert [int(row[3]) for row in ROW.findall(out) if row[2] == "head"] == [3] * 4
    assert plan_rows(out)["logits"] == pytest.approx(8192 * 42752 * 2 / 2**20, abs=0.1)


# ---- what a run records -------------------------------------------------------------------------------------------
# All of them together have every operation of the plan. A vocabulary of whole rows of 64, since padding is planned and
# not updated.
RECORDED = [(family, 1, [*flags, "-p", "bf16"]) for family, _, flags in RUNS] + [
    ("gpt2", 1, ["-g", 2, "--dropout", 0.1]), ("gpt2", 2, ["-z", 2, "-g", 2, "--optimizer", "lamb"]),
    ("llama", 2, ["-z", 3, "-r", 2]), ("window", 1, ["-r", "cheap", "--optimizer", "adagrad"]),
    ("arcee", 1, ["-r", "mlp"]), ("arcee", 2, ["-z", 1, "-r", "attention", "--optimizer", "muon"]),
    ("gelu", 1, ["-r", "cheap", "-p", "bf16", "--fp32-tensors", "wte"]),
    ("untied", 2, ["-z", 3, "-p", "bf16", "-g", 2, "--optimizer", "lion"]),
    ("qwen3", 2, ["-z", 2, "-p", "bf16", "-g", 2, "--comm-dtype", "bf16"]),
    ("qwen3", 4, ["--tp", 4, "-z", 1, "-r", "attention"]), ("gpt2", 2, ["--tp", 2, "-r", 2, "--dropout", 0.1]),
    ("untied", 4, ["--tp", 2, "-z", 3, "-r", "mlp", "-g", 2]),
]
# On the host, or a few numbers; of communication the plan has the bytes sent.
SMALL = {"load_batch", "nonfinite_find", "step_state_update", "reduce_gradients", "gather_parameters", "move_matrices"}
# Rows of the plan that a run records as part of the operation which launches them.
PART_OF = {"activation_forward": "matmul_forward_act", "activation_backward": "matmul_backward_input_act",
           "matmul_backward_bias": "matmul_backward_weight"}


def recorded_models(V):
    small = dict(L=L, NH=NH)
    return {"gpt2": gpt2_config(V, C, T, **small), "gelu": gpt2_config(V, C, T, activation_function="gelu", **small),
            "llama": llama_config(V, C, T, F=F_LLAMA, num_key_value_heads=2, **small),
            "window": llama_config(V, C, T, F=F_LLAMA, model_type="mistral", sliding_window=T // 3,
                                   num_key_value_heads=2, **small),
            "untied": llama_config(16 * V, C, T, F=F_LLAMA, **small),      # its vocabulary is chunked at stage 3
            "qwen3": llama_config(V, C, T, F=F_LLAMA, model_type="qwen3", num_key_value_heads=2, head_dim=32, **small),
            "arcee": llama_config(V, C, T, F=F_LLAMA, model_type="arcee", hidden_act="relu2", mlp_bias=True, **small)}


def by_operation(rows):
    """{(phase, operation): [calls, flops, bytes]}; phases are the update, recomputation, and all else."""
    found = {}
    for phase, op, calls, *figures in rows:
        key = phase if phase in ("optimizer", "recompute") else "pass", PART_OF.get(op, op)
        found[key] = [a + b for a, b in zip(found.get(key, [0, 0, 0]), [0 if op in PART_OF else calls, *figures])]
    return found


def recorded_flags(tmp_path, model, flags, B=4):
    (tmp_path / model).mkdir(exist_ok=True)
    (tmp_path / model / "config.json").write_text(json.dumps(recorded_models(128)[model]))
    return ["-m", tmp_path / model, "--from-scratch", "-t", T, "-b", B, *flags]


def plan_of(ranks, flags):
    """[(part, operation, calls, flops, bytes)]; the head is a part of its own."""
    run = train_gpt("--plan", *flags, "--ranks", ranks, "-d", "none")
    return [("head" if product == "head" else part, op, int(calls), float(gflop) * 1e9, float(mb) * 1e6)
            for part, op, product, calls, gflop, mb in ROW.findall(run.out)]


def test_all_operations_of_the_plan_are_recorded(tmp_path):
    """Each launcher that model/cost.cuh names is in the plan of one of the settings."""
    launchers = {name for path in ROOT.glob("kernels/*.cuh")
                 for name in re.findall(r"\bstatic void (\w+)\(", path.read_text())}
    named = set(re.findall(r'"(\w+)"', (ROOT / "model/cost.cuh").read_text())) & (launchers | {"cudaMemsetAsync"})
    planned = {name for model, ranks, flags in RECORDED
               for part, op, *_ in plan_of(ranks, recorded_flags(tmp_path, model, flags)) for name in (part, op)}
    assert len(named) > 30 and named - planned == set()


@pytest.mark.parametrize("model, ranks, flags", RECORDED,
                         ids=lambda x: "-".join(map(str, x)) if isinstance(x, list) else x)
def test_recorded_as_planned(tmp_path, model, ranks, flags):
    """Every operation that a run records is planned with the same calls, flops and bytes, and the other way round."""
    flags = recorded_flags(tmp_path, model, flags)
    train_gpt("--bench", *flags, "-n", 2, "--bench-json", tmp_path / "bench.json", ranks=ranks, cwd=tmp_path,
              OMP_NUM_THREADS="1")
    planned = by_operation(plan_of(ranks, flags))
    recorded = by_operation((row["phase"], row["op"], row["calls"], row["flops"], row["bytes"])
                            for row in json.loads((tmp_path / "bench.json").read_text())["ops"]
                            if row["kind"] != "communication" and row["op"] not in SMALL)
    wrong = []
    for phase, op in sorted(planned.keys() | recorded.keys()):
        plans, records = (figures.get((phase, op)) for figures in (planned, recorded))
        if plans is None or records is None:
            wrong.append(f"{phase}: {op} is {'recorded, not planned' if plans is None else 'planned, not recorded'}")
            continue
        for name, a, b in zip(("calls", "flops", "bytes"), plans, records):
            if b != pytest.approx(a, rel=1e-5):
                wrong.append(f"{phase}: {op}: {name} planned {a:.6g}, recorded {b:.6g}")
    assert not wrong, "\n".join(wrong)


# ---- epilogues ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("flags, fuses", [
    (["--gpu", "h100", "-p", "bf16"], True), (["--gpu", "b200", "-p", "fp16"], True), (["--gpu", "h100"], False),
    (["--gpu", "rtx 4090", "-p", "bf16"], False), (["--gpu", "a100", "-p", "bf16"], False), (["-p", "bf16"], False)])
def test_fused_by_the_gpu_of_the_plan(tmp_path, flags, fuses):
    """GELU is an epilogue of the GEMMs in 16 bits from compute capability 9.0 on. The bias gradient never is."""
    B, elem_bytes = 4, 2 if "-p" in flags else 4
    rows = costs(model_folder(tmp_path / "m", "gpt2"), "-b", B, "-g", 1, *flags)
    assert [row[1] for row in rows if row[1].startswith("activation")] == (
        [] if fuses else ["activation_forward", "activation_backward"])
    act = next(row for row in rows if row[1] == "matmul_forward_act")
    assert act[5] == pytest.approx(L * elem_bytes * (B * T * (5 + 4 * fuses) * C + 4 * C * C), rel=1e-5)
    bias = next(row for row in rows if row[1] == "matmul_backward_bias")
    assert bias[3] == 4 * L and bias[5] == pytest.approx(L * elem_bytes * B * T * (3 + 1 + 4 + 1) * C, rel=1e-5)


def test_bias_gradients_of_the_biases_there_are(tmp_path):
    """LLaMA has none, Qwen2 that of the queries, keys and values."""
    rows = costs(model_folder(tmp_path / "m", "llama"), "-b", 4)
    assert not any(row[1] == "matmul_backward_bias" for row in rows)
    (tmp_path / "m" / "config.json").write_text(json.dumps(MODELS["llama"][0] | {"model_type": "qwen2"}))
    rows = costs(tmp_path / "m", "-b", 4, "-g", 1)
    assert next(row[3:] for row in rows if row[1] == "matmul_backward_bias") == (
        L, 0, pytest.approx(L * 4 * 4 * T * 2 * C, rel=1e-5))


# ---- sizes that a plan does not walk through ----------------------------------------------------------------------
def gathered(folder, *more):
    """MiB of parameters that a rank's step gathers at stage 3."""
    run = train_gpt("--plan", "-m", folder, "-d", folder / "data", "-z", 3, "--ranks", 4, *more, timeout=20)
    return float(re.search(r"all-gather of parameters (\S+),", run.out)[1])


def test_many_micro_steps(tmp_path):
    """Each micro-step but the first gathers the same, also the millionth, and the plan of that many is as quick."""
    folder = model_folder(tmp_path / "m", "gpt2", tokens=9000)
    few = [gathered(folder, "-g", g) for g in (1, 2, 10, 110)]
    assert few[0] > 0 and few[1] > 0
    each = (few[3] - few[2]) / 100
    assert few[2] == pytest.approx(few[1] + 8 * each, abs=0.02)
    assert gathered(folder, "-g", 1 << 20) == pytest.approx(few[2] + ((1 << 20) - 10) * each, rel=2e-3)


def test_many_rows_and_steps(tmp_path):
    """The head's chunks of a huge micro-batch are not walked one by one, nor the steps of a ramp that hardly rises."""
    folder = model_folder(tmp_path / "m", "gpt2", tokens=9000)
    few, many = (flops_of(costs(folder, "-b", b), product="head") for b in (1 << 10, 1 << 20))
    assert many == pytest.approx(1024 * few, rel=1e-5)
    run = train_gpt("--plan", "-m", folder, "-d", folder / "data", "-b", 1, "-g", 4, "-n", "9223372036854775807",
                    "--batch-ramp", f"1:{1 << 40}", timeout=20)
    assert re.search(r"steps   9223372036854775807 = 6\.56e\+16 epochs|= 6\d{16}\.\d\d epochs", run.out), run.out


# ---- estimated times of kernels on a GPU ---------------------------------------------------------------------------
TIMED = re.compile(r"^  \w+ +(\w+) +(\w*) +(\d+) calls +(\S+) Gflop +\S+ MB +(\S+) ms", re.M)


def tflops(folder, config, B, T, gpu, *flags):
    """{(operation, product): TFLOP/s} of an estimate in bf16, attention's as its two and five GEMMs."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    run = train_gpt("--plan", "-m", folder, "-d", "none", "-b", B, "-g", 1, "-t", T, "-p", "bf16", "--gpu", gpu, *flags)
    return {(op, product): float(gflop) / float(ms) for op, product, _, gflop, ms in TIMED.findall(run.out)}


@pytest.mark.parametrize("side, measured", [(1024, 178), (2048, 555), (4096, 733), (8192, 762)])
def test_gemm_of_a_cube(tmp_path, side, measured):
    """cuBLAS on an H100 (docs/benchmarks.md), in a short run: estimates are below it by what clocks fall under load."""
    rates = tflops(tmp_path / "m", gpt2_config(97, side, 1024, L=1, NH=16), side // 1024, 1024, "h100")
    assert 0.8 < rates["matmul_forward", "attproj"] / measured < 1.05


def attention_tflops(T, HS, sms, ghz, mma_flops, blocks, kernels):
    """Formula of docs/benchmarks.md. kernels: rows of a warp, rows of a slice, HMMA, accesses of shared memory and
    instructions of a slice."""
    seconds = 0
    for rows, slice_rows, mma, accesses, instructions in kernels:
        parts = sorted([mma * 4096 / mma_flops, accesses * 4, instructions / 4])
        cycles = parts[2] + (parts[0] + parts[1]) / blocks
        ends = [min(end, T) for end in range(4 * rows, T + 4 * rows, 4 * rows)]
        slices = 4 * sum(-(-end // slice_rows) for end in ends)
        seconds += (slices * cycles + len(ends) * 4000 / blocks) / (sms * ghz * 1e9)
    flops = (2 if len(kernels) == 1 else 5) * HS * T * (T + 1)
    return flops / seconds / 1e12


# Counted in the machine code for sm_90: HMMA, ldmatrix and cp.async, instructions of a slice.
FORWARD = {64: [(32, 64, 128, 48, 700)], 128: [(32, 32, 128, 56, 725)]}
BACKWARD = {64: [(32, 32, 96, 28, 450), (32, 16, 64, 34, 330)], 128: [(16, 32, 96, 56, 440), (16, 32, 128, 88, 712)]}


@pytest.mark.parametrize("gpu, HS, sms, ghz, mma_flops, blocks", [
    ("h100", 64, 132, 1.83, 0.63 * 4096, (2, 2)), ("h100", 128, 132, 1.83, 0.63 * 4096, (2, 2)),
    ("a100-sxm", 64, 108, 1.41, 2048, (2, 2)), ("rtx 4090", 64, 128, 2.52, 512, (2, 1)),
    ("l4", 128, 58, 2.04, 1024, (1, 1))])
def test_attention_rates(tmp_path, gpu, HS, sms, ghz, mma_flops, blocks, T=4096):
    rates = tflops(tmp_path / "m", gpt2_config(97, 16 * HS, T, L=1, NH=16), 8, T, gpu)
    forward = attention_tflops(T, HS, sms, ghz, mma_flops, blocks[0], FORWARD[HS])
    backward = attention_tflops(T, HS, sms, ghz, mma_flops, blocks[1], BACKWARD[HS])
    assert rates["attention_forward", ""] == pytest.approx(forward, rel=0.02)
    assert 0.94 * backward < rates["attention_backward", ""] <= backward           # the pass of the statistics
    if gpu == "h100":        # FlashAttention 2's kernels, built alike, reach 299 and 333
        assert rates["attention_forward", ""] == pytest.approx({64: 299, 128: 333}[HS], rel=0.15)


def test_small_chunks_of_the_head_are_slower(tmp_path):
    config = gpt2_config(50257, 768, 1024, L=1, NH=12)
    few, many = (tflops(tmp_path / str(rows), config, 32, 1024, "h100", "--head-rows", rows) for rows in (656, 8192))
    assert few["matmul_backward_input", "head"] < 0.8 * many["matmul_backward_input", "head"]
    assert few["matmul_backward_weight", "head"] < 0.8 * many["matmul_backward_weight", "head"]
