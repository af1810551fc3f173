"""--bench: its figures agree with each other and with formulas for the model; --profile: a trace that Perfetto opens;
phases in the log."""
import json
import re
import subprocess

import init
import pytest
from util import ROOT, binary, environment, gpt2_config, llama_config, shard_write, train_gpt

V, VP, C, NH, L, T, B, F = 97, 128, 32, 2, 3, 16, 2, 48
MODELS = {"gpt2": gpt2_config(V, C, T, L=L, NH=NH), "llama": llama_config(V, C, T, L=L, NH=NH, F=F)}
NUM_PARAMS = {"gpt2": V * C + T * C + L * (12 * C * C + 13 * C) + 2 * C,
              "llama": 2 * V * C + L * (4 * C * C + 3 * C * F + 2 * C) + C}
WEIGHTS = {"gpt2": 12 * C * C, "llama": 4 * C * C + 3 * C * F}      # of the GEMMs of a block
PHASES = ["data", "forward", "head", "backward", "recompute", "communication", "optimizer"]
DEVICES = ["cpu", "emu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    shard_write(folder / "data" / "train_000000.bin", init.tokens(20000, V, 1), V)
    return folder


def bench(folder, tmp_path, family, *flags, **kw):
    """The JSON and the text of a bench of 4 steps."""
    run = train_gpt("--bench", "-m", folder / family, "--from-scratch", "-t", T, "-b", B, "-n", 4, "--bench-json",
                    tmp_path / "bench.json", *flags, OMP_NUM_THREADS="1", cwd=tmp_path, **kw)
    return json.loads((tmp_path / "bench.json").read_text()), run.out


def total(j, key, **match):
    return sum(row[key] for row in j["ops"] if all(row[k] == v for k, v in match.items()))


def check_figures(j, family, ranks, G):
    step, all_ms = j["step_ms"], sorted(j["step_ms"]["all"])
    assert len(all_ms) == j["steps"] == 4 and all_ms[0] > 0
    assert [step[k] for k in ("min", "p25", "median", "p75", "max")] == [all_ms[i] for i in (0, 1, 2, 3, 3)]
    assert step["mean"] == pytest.approx(sum(all_ms) / 4)
    assert 4e-3 * step["mean"] <= j["wall_s"] * 1.02
    assert j["tokens_per_step"] == B * G * T * ranks
    assert j["tokens_per_s"] * step["median"] * 1e-3 == pytest.approx(j["tokens_per_step"])
    assert j["num_params"] == NUM_PARAMS[family]
    assert j["flops_per_token"] == 6 * NUM_PARAMS[family] + 6 * L * C * T
    assert j["flop_per_s"] == pytest.approx(j["tokens_per_s"] * j["flops_per_token"] / ranks)
    assert j["product_share"] == pytest.approx(j["flop_per_s"] / j["product_flop_per_s"])
    assert j["mfu"] * j["peak_flop_per_s"] == pytest.approx(j["flop_per_s"] if j["peak_flop_per_s"] else 0)
    assert j["hfu"] * j["peak_flop_per_s"] * step["median"] == pytest.approx(
        j["op_flops"] * 1e3 if j["peak_flop_per_s"] else 0)
    assert list(j["phases_ms"]) == PHASES
    assert sum(j["phases_ms"].values()) == pytest.approx(step["median"], rel=1e-5)
    assert j["communication_exposed_ms"] == j["phases_ms"]["communication"]
    assert j["device_peak_bytes"] == j["device_plan_bytes"]
    assert j["skipped_steps"] == 0 and j["warmup_steps"] >= 3
    assert j["memory_byte_per_s"] > 0 and j["page_faults_per_step"] >= 0 and j["host_syncs_per_step"] >= 0


def check_ops(j):
    """Operations on one stream follow one another within the step."""
    assert total(j, "ms", kind="compute") == pytest.approx(j["op_compute_ms"], rel=1e-3, abs=1e-3)
    assert j["op_compute_ms"] + j["op_communication_ms"] - j["communication_hidden_ms"] + j["op_other_ms"] == \
        pytest.approx(j["op_step_ms"])
    assert 0 <= j["communication_hidden_ms"] <= j["op_communication_ms"] and j["op_other_ms"] > -1e-3
    assert j["op_flops"] == total(j, "flops")
    for row in j["ops"]:
        assert row["ms"] > 0 and row["phase"] in PHASES and row["calls"] > 0
        assert row["gflop_per_s"] * row["ms"] == pytest.approx(row["flops"] * 1e-6)
        assert row["gb_per_s"] * row["ms"] == pytest.approx(row["bytes"] * 1e-6)
        flops_ms, bytes_ms = (1e3 * row[k] / j[rate] for k, rate in (("flops", "product_flop_per_s"),
                                                                     ("bytes", "memory_byte_per_s")))
        assert row["roof_ms"] == pytest.approx(max(flops_ms, bytes_ms))
        assert row["bound"] == ("GEMM" if flops_ms > bytes_ms else "memory")


def expected_calls(family, G):
    """Of a step without recomputation: launchers and how often each is called."""
    norm = "rmsnorm" if family == "llama" else "layernorm"
    calls = {"attention_forward": L, "attention_backward": L, f"{norm}_forward": 1, f"residual_{norm}_forward": 2 * L,
             f"{norm}_backward": 2 * L + 1, "embedding_rows": 1, "embedding_backward": 1, "classifier": 1,
             "loss_accumulate": 1, "matmul_backward_weight": 4 * L + 1}
    if family == "llama":
        calls |= {"matmul_forward": 4 * L + 1, "matmul_backward_input": 4 * L + 1, "rope_forward": L,
                  "rope_backward": L, "swiglu_forward": L, "swiglu_backward": L}
    else:
        calls |= {"matmul_forward": 3 * L + 1, "matmul_forward_act": L, "matmul_backward_input": 3 * L + 1,
                  "matmul_backward_input_act": L}
    return {op: n * G for op, n in calls.items()} | {"optimizer_update": L + 2, "global_norm_accumulate": L + 2,
                                                     "step_state_update": 1}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family, ranks, stage, G", [("gpt2", 1, 0, 2), ("llama", 1, 2, 1), ("gpt2", 2, 1, 1),
                                                     ("llama", 2, 0, 1), ("gpt2", 2, 2, 2), ("llama", 2, 3, 1)])
def test_figures(folder, tmp_path, device, family, ranks, stage, G):
    j, text = bench(folder, tmp_path, family, "-z", stage, "-g", G, ranks=ranks, device=device)
    check_figures(j, family, ranks, G)
    check_ops(j)
    assert (j["zero"], j["num_ranks"], j["precision"], j["micro_batch"]) == (stage, ranks, "fp32", B)
    seen = {op: total(j, "calls", op=op) for op in expected_calls(family, G)}
    assert seen == expected_calls(family, G)
    N, head = G * B * T, 6 * VP * C
    gemms = N * (6 * L * WEIGHTS[family] + head)
    assert total(j, "flops") == pytest.approx(gemms + 7 * N * L * C * (T + 1))
    assert total(j, "bytes", op="optimizer_update") == pytest.approx(
        28 * j["num_params"] / (ranks if stage else 1), rel=0.25)       # and the padding of the vocabulary
    assert j["phases_ms"]["recompute"] == 0
    assert (j["phases_ms"]["communication"] > 0) == (j["sent_bytes_per_step"] > 0) == (ranks > 1)
    sent = total(j, "bytes", kind="communication")
    assert sent == pytest.approx(j["sent_bytes_per_step"], rel=1e-6)
    if device == "cpu":                                 # each call does its work before it returns
        assert j["communication_hidden_ms"] == 0
    longest = max(j["ops"], key=lambda row: row["ms"])  # which operations are too short for a line may differ
    for words in (f"{j['tokens_per_s']:.1f} tok/s", f"{j['step_ms']['median']:.2f} ms median", longest["op"],
                  f"{longest['ms']:.3f}", "page faults"):
        assert words in text


@pytest.mark.parametrize("level, again", [("mlp", {"matmul_forward_act": 1}), ("attention", {"attention_forward": 1}),
                                          ("block", {"attention_forward": 1, "matmul_forward": 3})])
def test_what_is_made_again(folder, tmp_path, level, again):
    j, _ = bench(folder, tmp_path, "gpt2", "-r", level)
    check_figures(j, "gpt2", 1, 1)
    check_ops(j)
    for op, calls in again.items():
        assert total(j, "calls", op=op, phase="recompute") == (L - 1) * calls
    assert j["phases_ms"]["recompute"] > 0 and j["recompute"] == level
    assert total(j, "flops", phase="recompute") > 0


@pytest.mark.parametrize("level", ["none", "attention", "2"])
def test_window(folder, tmp_path, level):
    """Layers 1 and 2 have a window of 5: attention costs what they see, and the plan is what a step records."""
    (tmp_path / "window").mkdir()
    (tmp_path / "window" / "config.json").write_text(json.dumps(llama_config(
        V, C, T, L=L, NH=NH, F=F, model_type="qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1)))
    (tmp_path / "data").symlink_to(folder / "data")
    j, _ = bench(tmp_path, tmp_path, "window", "-r", level)
    full, window = B * T * (T + 1) / 2, B * (5 * 6 / 2 + (T - 5) * 5)
    assert total(j, "flops", op="attention_backward") == 10 * C * (full + 2 * window)
    again = {"none": 0, "attention": full + window, "2": full + window}[level]         # not the topmost block
    assert total(j, "flops", op="attention_forward", phase="recompute") == 4 * C * again
    plan = train_gpt("--plan", "-m", tmp_path / "window", "-t", T, "-b", B, "-r", level, cwd=tmp_path).out
    for op in ("attention_spans", "attention_forward", "attention_backward"):
        rows = re.findall(rf"^  \w+ +{op} +(\d+) calls +(\S+) Gflop", plan, re.M)
        assert total(j, "calls", op=op) == sum(int(calls) for calls, _ in rows) > 0
        assert total(j, "flops", op=op) == pytest.approx(sum(float(gflop) for _, gflop in rows) * 1e9, rel=1e-3)
    assert j["flops_per_token"] == 6 * j["num_params"] + 12 * C * ((full + 2 * window) / (B * T) - L / 2)


@pytest.mark.parametrize("precision, flags", [("bf16", ["--master", "split", "--grad-dtype", "bf16"]), ("fp16", [])])
def test_other_precisions(folder, tmp_path, precision, flags):
    """In fp16 the loss scale falls during the warm-up, so that no timed step is skipped."""
    j, _ = bench(folder, tmp_path, "gpt2", "-p", precision, *flags)
    check_figures(j, "gpt2", 1, 1)
    check_ops(j)
    assert j["precision"] == precision


# ---- the trace ---------------------------------------------------------------------------------------------------
def spans_of(path):
    """{(rank, track): [(begin, end, name, kind, arguments)]}, in order; checks the format."""
    trace = json.loads(path.read_text())
    named, spans = {}, {}
    for event in trace["traceEvents"]:
        assert event["ph"] in "MX" and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "M":
            named[event["name"], event["pid"], event["tid"]] = event["args"]["name"]
        else:
            assert event["dur"] >= 0 and event["ts"] >= 0
            key = event["pid"], named["thread_name", event["pid"], event["tid"]]
            begin_ns, dur_ns = round(event["ts"] * 1000), round(event["dur"] * 1000)
            spans.setdefault(key, []).append((begin_ns / 1000, (begin_ns + dur_ns) / 1000, event["name"], event["cat"],
                                              event["args"]))
    for (rank, _), track in spans.items():
        assert named["process_name", rank, 0] == f"rank {rank}"
        track.sort(key=lambda x: (x[0], -x[1]))
        open_ends = []
        for begin, end, *_ in track:                    # nested: a span that begins within another ends within it
            while open_ends and begin >= open_ends[-1]:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)
    return spans


def within(track, outer, kind):
    return [x for x in track if x[3] == kind and outer[0] <= x[0] and x[1] <= outer[1]]


@pytest.mark.parametrize("device, ranks, stage", [("cpu", 1, 0), ("cpu", 2, 3), ("emu", 2, 2)])
def test_trace_of_training(folder, tmp_path, device, ranks, stage):
    flags = ["-m", folder / "gpt2", "--from-scratch", "-d", folder / "data", "-t", T, "-b", B, "-g", 2, "-z", stage]
    run = train_gpt(*flags, "-n", 6, "--profile", 2, "-r", "block", ranks=ranks, device=device, out=tmp_path / "run",
                    OMP_NUM_THREADS="1")
    spans = spans_of(tmp_path / "run" / "trace.json")
    assert {rank for rank, _ in spans} == set(range(ranks))
    for rank in range(ranks):
        track = spans[rank, "compute"]
        steps = [x for x in track if x[3] == "step"]
        assert len(steps) == 2
        for step in steps:
            phases, ops = within(track, step, "phase"), within(track, step, "compute")
            assert sum(end - begin for begin, end, *_ in phases) == pytest.approx(step[1] - step[0], abs=0.1)
            assert sum(end - begin for begin, end, *_ in ops) <= (step[1] - step[0]) * 1.001
            assert [x[2] for x in ops].count("attention_forward") == 2 * (L + L - 1)
            qkv = next(x for x in ops if x[2] == "matmul_forward")[4]
            assert (qkv["N"], qkv["IC"], qkv["OC"]) == (B * T, C, 3 * C) and qkv["phase"] == "forward"
            assert qkv["flops"] == 2 * B * T * C * 3 * C and qkv["bytes"] == 4 * (B * T * C + 3 * C * C + B * T * 3 * C)
            assert {x[2] for x in phases} >= {"data", "forward", "head", "backward", "recompute", "optimizer"}
    if ranks > 1:
        moves = [x for (rank, _), track in spans.items() for x in track if x[3] == "communication"]
        assert {"reduce_gradients", "comm_all_reduce"} <= {x[2] for x in moves}
    # what is looked at is the run itself
    plain = train_gpt(*flags, "-n", 6, "-r", "block", ranks=ranks, device=device, out=tmp_path / "plain",
                      OMP_NUM_THREADS="1")
    assert run.series("state_hash") == plain.series("state_hash")


def joined(intervals):
    out = []
    for begin, end in sorted(intervals):
        if out and begin <= out[-1][1]:
            out[-1][1] = max(end, out[-1][1])
        else:
            out.append([begin, end])
    return out


@pytest.mark.parametrize("device", DEVICES)
def test_bench_and_its_trace_agree(folder, tmp_path, device):
    """For one step both have the same spans."""
    j, _ = bench(folder, tmp_path, "llama", "-z", 2, "-g", 2, "--profile", 1, ranks=2, device=device)
    spans = spans_of(tmp_path / "trace.json")
    step, = [x for x in spans[0, "compute"] if x[3] == "step"]
    assert step[1] - step[0] == pytest.approx(1e3 * j["op_step_ms"], abs=0.01)
    kinds = {kind: joined((max(x[0], step[0]), min(x[1], step[1])) for (rank, _), track in spans.items() for x in track
                          if rank == 0 and x[3] == kind and x[0] < step[1] and x[1] > step[0])
             for kind in ("compute", "communication")}
    length = {kind: sum(end - begin for begin, end in parts) * 1e-3 for kind, parts in kinds.items()}
    both = sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in kinds["compute"] for b in kinds["communication"])
    assert length["compute"] == pytest.approx(j["op_compute_ms"], rel=0.01, abs=0.05)
    assert length["communication"] == pytest.approx(j["op_communication_ms"], rel=0.01, abs=0.05)
    assert both * 1e-3 == pytest.approx(j["communication_hidden_ms"], rel=0.01, abs=0.05)


# ---- the log -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("device, ranks, stage, flags, extra", [
    ("cpu", 1, 0, [], set()), ("cpu", 2, 3, ["-r", "mlp"], {"recompute", "communication"}),
    ("emu", 2, 1, [], {"communication"}), ("cpu", 1, 0, ["-g", 700, "-t", 8, "-b", 1], set())])
def test_phases_in_the_log(folder, tmp_path, device, ranks, stage, flags, extra):
    """They are the step; the last of these has more micro-steps than are looked at."""
    size = [] if "-t" in flags else ["-t", T, "-b", B]
    run = train_gpt("-m", folder / "gpt2", "--from-scratch", "-d", folder / "data", "-n", 3, "-z", stage, *size, *flags,
                    ranks=ranks, device=device, out=tmp_path, OMP_NUM_THREADS="1")
    for entry in run.log:
        phases = {name: entry[f"{name}_ms"] for name in PHASES if f"{name}_ms" in entry}
        assert set(phases) == {"data", "forward", "head", "backward", "optimizer"} | extra
        assert sum(phases.values()) == pytest.approx(entry["step_ms"], rel=1e-3)
        assert all(ms > 0 for ms in phases.values())
    if "-g" in flags:                                   # 700 of them are not lost in one phase
        assert all(entry["forward_ms"] > 0.05 * entry["step_ms"] for entry in run.log)


# ---- refusals ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("flags, words", [
    (["--bench", "--resume", "x"], "--resume does not go with --bench"),
    (["--bench", "-d", "x"], "--data does not go with --bench"),
    (["--bench", "-o", "x"], "--out does not go with --bench"),
    (["--bench", "--batch-ramp", "1:2"], "--batch-ramp does not go with --bench"),
    (["--bench", "--eval"], "different modes: give one"),
    (["--bench-json", "x"], "--bench-json goes with --bench"),
    (["--bench", "-n", "0"], "needs a step to time"),
    (["--profile", "1001"], "out of range"),
])
def test_refused_by_the_command_line(tmp_path, flags, words):
    run = train_gpt(*flags, ok=False, cwd=tmp_path)
    assert run.code == 2 and len(run.complaint) == 1 and words in run.complaint[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_cannot_be_written_is_said_first(folder, tmp_path, ranks):
    flags = ["-m", folder / "gpt2", "--from-scratch", "-t", T]
    run = train_gpt("--bench", *flags, "--bench-json", tmp_path / "no" / "x.json", ok=False, ranks=ranks)
    assert "--bench-json: " in run.complaint[0] and "cannot be written: No such file" in run.complaint[0]
    assert "ms median" not in run.out
    (tmp_path / "trace.json").mkdir()
    run = train_gpt(*flags, "-d", folder / "data", "-n", 9, "--profile", 2, ok=False, ranks=ranks, cwd=tmp_path)
    assert "--profile: ./trace.json cannot be written: Is a directory" in run.complaint[0]
    run = train_gpt(*flags, "-d", folder / "data", "-n", 4, "--profile", 2, ok=False, ranks=ranks, cwd=tmp_path)
    assert "only 4 are left: raise -n" in run.complaint[0]


# ---- the sweep ---------------------------------------------------------------------------------------------------
def sweep(folder, tmp_path, *words):
    return subprocess.run([ROOT / "scripts" / "bench.sh", "-n", "2", "-o", tmp_path / "out", *map(str, words)],
                          env=environment(TRAIN_GPT=str(binary("cpu")), OMP_NUM_THREADS="1"), capture_output=True,
                          text=True, timeout=120)


def test_sweep(folder, tmp_path):
    """A row for each setting, one with the reason of its failure, a picture, and the program's figures in the table."""
    run = sweep(folder, tmp_path, "-m", f"{folder}/gpt2:2:16 {folder}/llama:1:8", "-p", "fp32", "-r", "none nonsense",
                "--", "--from-scratch", "-g", 2)
    table = [line for line in (tmp_path / "out" / "bench.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert run.returncode == 1 and len(table) == 4
    assert sum("failed: -r nonsense: have none" in row for row in table) == 2
    j = json.loads((tmp_path / "out" / "gpt2_2x16_fp32_none.json").read_text())
    assert j["grad_accum"] == 2 and j["steps"] == 2 and f"| {j['step_ms']['median']:.1f} |" in table[0]
    assert (tmp_path / "out" / "bench.png").read_bytes()[:4] == b"\x89PNG"
    assert f"train_gpt {j['version']} on " in run.stdout and j["date"][:10] in run.stdout


def test_sweep_refused(folder, tmp_path):
    run = sweep(folder, tmp_path, "-m", "gpt2")
    assert run.returncode == 2 and "-m gpt2 is not PRESET:SEQUENCES:TOKENS" in run.stderr
    run = sweep(folder, tmp_path, "-m", "nowhere:1:8", "-p", "fp32", "-r", "none")
    assert run.returncode == 1 and "nothing was measured" in run.stderr and "neither a preset" in run.stderr
