"""Optimizers, schedules and groups of rates against plain NumPy in double: 50 steps on given gradients at every stage
and on 1 to 4 ranks, the same against torch.optim (a kept file), bytes and memory as planned, checkpoints."""
import itertools
import json
import math
import pathlib
import subprocess

import numpy as np
import pytest
from util import (FULL, ROOT, binary, built_devices, environment, gpt2_config, num_gpus, safetensors_header,
                  shard_write, train_gpt)

SHAPES = {"wte.weight": (37, 8), "h.qkv.weight": (16, 72), "h.qkv.bias": (72,), "h.up.weight": (16, 40),
          "h.down.weight": (40, 16), "norm.weight": (16,)}           # as in test_optimizer.cu
HIDDEN = {"h.qkv.weight": (3, 24 / 16), "h.up.weight": (1, 40 / 16),
          "h.down.weight": (1, 40 / 16)}                              # matrices in it, their fan_out / fan_in
STEPS = 50


# ---- the reference ----------------------------------------------------------------------------------------------
def orthogonal(u):
    x = u / (np.linalg.norm(u) + 1e-7)
    x = x.T if u.shape[0] > u.shape[1] else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if u.shape[0] > u.shape[1] else x


def reference(name, params, grads, lr, wd, beta1=0.9, beta2=0.95, eps=1e-8, mu=0.9, damp=0.0, nesterov=False,
              muon_lr=0.02, factor=None, decay=None):
    """factor, decay: by tensor name, of the learning rate and instead of wd."""
    p = {k: v.astype(np.float64) for k, v in params.items()}
    m, v = ({k: np.zeros(SHAPES[k]) for k in p} for _ in range(2))
    for t, step in enumerate(grads, 1):
        for k, g in step.items():
            g, rate = g.astype(np.float64), lr * (factor or {}).get(k, 1)
            w = (decay or {}).get(k, wd * (g.ndim == 2))
            if name in ("adam", "sgd", "adagrad"):
                g = g + w * p[k]
            if name == "sgd":
                m[k] = mu * m[k] + (1 - damp) * g
                p[k] -= rate * (g + mu * m[k] if nesterov else m[k])
            elif name == "lion":
                c = beta1 * m[k] + (1 - beta1) * g
                p[k] = p[k] * (1 - rate * w) - rate * np.sign(c)
                m[k] = beta2 * m[k] + (1 - beta2) * g
            elif name == "adagrad":
                v[k] += g * g
                p[k] -= rate * g / (np.sqrt(v[k]) + eps)
            elif name == "muon" and k in HIDDEN:
                m[k] = mu * m[k] + (1 - mu) * g
                parts = np.split(g + mu * (m[k] - g), HIDDEN[k][0], axis=1)
                x = np.concatenate([orthogonal(u) * math.sqrt(max(1, HIDDEN[k][1])) for u in parts], axis=1)
                rate *= muon_lr / lr
                p[k] = p[k] * (1 - rate * w) - rate * x
            else:
                m[k] = beta1 * m[k] + (1 - beta1) * g
                v[k] = beta2 * v[k] + (1 - beta2) * g * g
                bc1, bc2 = 1 - beta1 ** t, 1 - beta2 ** t
                if name == "lamb":
                    u = m[k] / (np.sqrt(v[k]) + eps) + w * p[k]
                    norms = np.linalg.norm(p[k]), np.linalg.norm(u)
                    ratio = min(max(norms[0] / norms[1], 0.01), 10) if min(norms) > 0 else 1
                    p[k] -= rate * math.sqrt(bc2) / bc1 * ratio * u
                else:
                    p[k] = p[k] * (1 - rate * w * (name != "adam")) - rate * (m[k] / bc1) / (np.sqrt(v[k] / bc2) + eps)
    return p



# ---- the program ------------------------------------------------------------------------------------------------
def split(flat):
    out, at = {}, 0
    for name, shape in SHAPES.items():
        count = math.prod(shape)
        out[name] = flat[at:at + count].reshape(shape)
        at += count
    assert at == flat.size
    return out


def inputs(steps=STEPS):
    """Parameters of usual size and gradients with a drift, so that Lion's sum is rarely near 0."""
    rng = np.random.default_rng(7)
    count = sum(math.prod(s) for s in SHAPES.values())
    params = rng.normal(0, 0.1, count).astype(np.float32)
    grads = (0.1 * rng.normal(0, 1, (steps, count)) + 0.1 * rng.normal(0, 1, count)).astype(np.float32)
    return params, grads


@pytest.fixture(scope="module", params=built_devices())
def device(request):
    return request.param


def run(folder, device, ranks, *flags, steps=STEPS):
    program = binary(device).parent / "test_optimizer"
    if not program.exists():
        pytest.skip(f"{program} is not built")
    if device == "cuda" and ranks > num_gpus():
        pytest.skip(f"{ranks} ranks need {ranks} GPUs")
    folder.mkdir(exist_ok=True)
    params, grads = inputs(steps)
    params.tofile(folder / "params.bin")
    grads.tofile(folder / "grads.bin")
    command = [str(program), str(folder), *map(str, flags), "--schedule", "constant", "--warmup", "0", "--clip", "0"]
    if ranks > 1:
        command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300,
                          env=environment(OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stdout + done.stderr
    return split(np.fromfile(folder / "out.bin", np.float32)), done.stdout


def assert_same(ours, truth):
    for k in SHAPES:
        assert np.abs(ours[k] - truth[k]).max() <= 1e-6, k


CASES = {                                                           # flags; the same for the reference; states kept
    "adamw": (["--weight-decay", 0.1], dict(lr=1e-3, wd=0.1), 2),
    "adam": (["--weight-decay", 0.05], dict(lr=1e-3, wd=0.05), 2),
    "sgd": ([], dict(lr=1e-3, wd=0), 1),
    "lamb": ([], dict(lr=1e-3, wd=0.01), 2),
    "lion": ([], dict(lr=1e-3, wd=0.1, beta2=0.99), 1),
    "adagrad": (["--weight-decay", 0.05], dict(lr=1e-3, wd=0.05), 1),
    "muon": (["--muon-lr", 0.003], dict(lr=1e-3, wd=0.1, mu=0.95, muon_lr=0.003), None),
}
LAYOUTS = list(itertools.product((1, 2, 3, 4), (0, 1, 2, 3))) if FULL else [(1, 0), (2, 0), (2, 1), (3, 2), (4, 3)]


@pytest.fixture(scope="module")
def truths():
    params, grads = inputs()
    steps = [split(g) for g in grads]
    return {name: reference(name, split(params), steps, **hyper) for name, (_, hyper, _) in CASES.items()}


@pytest.mark.parametrize("ranks,stage", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_against_numpy(tmp_path, device, name, ranks, stage, truths):
    if device != "cpu" and not FULL and (ranks, stage) != (2, 1):
        pytest.skip("with --full")
    flags, _, num_states = CASES[name]
    ours, said = run(tmp_path, device, ranks, "--optimizer", name, "-l", 1e-3, "-z", stage, *flags)
    assert_same(ours, truths[name])
    kept, elems = (int(said.split()[i]) for i in (-4, -1))          # bytes are held by the program itself
    if num_states is not None:
        assert kept == num_states * elems
    else:
        assert elems < kept < 2 * elems


@pytest.mark.parametrize("flags,hyper", [
    (["--momentum", 0.8, "--dampening", 0.3, "--weight-decay", 0.02], dict(mu=0.8, damp=0.3, wd=0.02)),
    (["--momentum", 0.8, "--nesterov"], dict(mu=0.8, nesterov=True, wd=0))])
def test_sgd(tmp_path, flags, hyper):
    ours, _ = run(tmp_path, "cpu", 2, "--optimizer", "sgd", "-l", 1e-3, "-z", 2, *flags)
    params, grads = inputs()
    assert_same(ours, reference("sgd", split(params), [split(g) for g in grads], lr=1e-3, **hyper))


@pytest.mark.parametrize("name", ["adamw", "lamb", "muon"])
def test_groups(tmp_path, name):
    """A later group wins where two fit."""
    ours, _ = run(tmp_path, "cpu", 3, "--optimizer", name, "-l", 1e-3, "-z", 1, "--weight-decay", 0.1, "--param-group",
                  "h.*:lr=0.5,wd=0.3;*.bias:wd=0;h.up.*:lr=2")
    params, grads = inputs()
    factor = {k: 2 if k == "h.up.weight" else 0.5 for k in SHAPES if k.startswith("h.")}
    decay = {"h.qkv.weight": 0.3, "h.qkv.bias": 0, "h.up.weight": 0.3, "h.down.weight": 0.3}
    assert_same(ours, reference(name, split(params), [split(g) for g in grads], lr=1e-3, wd=0.1, factor=factor,
                                decay=decay, mu=0.95))


def test_against_torch(tmp_path):
    """dev/golden_optim.py wrote the file with torch.optim on the same inputs."""
    golden = json.loads((ROOT / "test" / "golden" / "optim.json").read_text())
    for case in golden:
        ours, _ = run(tmp_path, "cpu", 1, *case["flags"])
        flat = np.concatenate([ours[k].ravel() for k in SHAPES])[::case["every"]]
        assert np.abs(flat - np.array(case["params"])).max() <= 2e-6, case["flags"]   # both are fp32


# ---- schedules --------------------------------------------------------------------------------------------------
def lr_reference(name, s, N, W, peak=1e-3, low=1e-4, decay=0.2):
    """Of step s of N, counted from 0."""
    if name == "warmup-log":
        return low + (peak - low) * math.log(s + 1) / math.log(max(2, W)) if s < W else peak
    if s >= N and name != "constant":
        return low
    if name == "lr-range-test":
        return low + (peak - low) * (s + 1) / N
    if name == "onecycle":
        up, down = (s + 1) / W if s < W else 1, 1 - (s - W + 1) / max(W, 1) if s >= W else 1
        return low + (peak - low) * max(0, min(up, down))
    if s < W:
        return peak * (s + 1) / W
    start = max(N * (1 - decay), W)
    tail = (s - start) / (N - start) if s > start else 0
    fall = {"constant": 1, "linear": 1 - (s - W) / (N - W), "cosine": (1 + math.cos(math.pi * (s - W) / (N - W))) / 2,
            "wsd": 1 - tail, "wsd-sqrt": 1 - math.sqrt(tail)}[name]
    return low + (peak - low) * fall


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(gpt2_config(97, 8, 8)))
    for split_name in ("train", "val"):
        shard_write(folder / "data" / f"{split_name}_000000.bin", np.arange(900) * 7 % 97, 97)
    return ["-m", folder / "model", "--from-scratch", "-d", folder / "data", "-t", 8, "-b", 1, "--sample-tokens", 0,
            "--eval-batches", 1, "-l", 1e-3, "--min-lr", 1e-4]


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd", "wsd-sqrt", "warmup-log", "onecycle",
                                  "lr-range-test"])
def test_schedules(tmp_path, tiny, name):
    """The rates in the log: an ordinary run, a warm-up as long as the run or longer, no warm-up, one step."""
    for i, (N, W) in enumerate([(20, 4), (6, 6), (5, 9), (7, 0), (1, 0), (1, 1)]):
        done = train_gpt(*tiny, "-n", N, "--warmup", W, "--schedule", name, out=tmp_path / str(i))
        assert done.series("lr") == pytest.approx([lr_reference(name, s, N, W) for s in range(N)], rel=1e-12), (N, W)
        assert min(done.series("lr")) > 0


@pytest.mark.parametrize("name", ["adamw", "adam", "lamb", "adagrad"])
def test_no_eps(tmp_path, tiny, name):
    """Where no gradient is, as in padding, nothing is divided by nothing."""
    done = train_gpt(*tiny, "-n", 3, "--optimizer", name, "--eps", 0, out=tmp_path)
    assert len(done.series("loss")) == 3 and all(map(math.isfinite, done.series("loss")))
    assert done.series("skipped") == [0, 0, 0]


@pytest.mark.parametrize("name", ["constant", "cosine", "warmup-log"])
def test_resume_past_the_end(tmp_path, tiny, name):
    """Position from the checkpoint, shape from the flags."""
    train_gpt(*tiny, "-n", 6, "--warmup", 2, "--schedule", name, out=tmp_path / "run")
    longer = train_gpt(*tiny, "-n", 9, "--warmup", 2, "--schedule", name, "--resume", "auto", out=tmp_path / "run")
    truth = [lr_reference(name, s, 6 if s < 6 else 9, 2) for s in range(9)]
    assert longer.series("lr") == pytest.approx(truth, rel=1e-12)


# ---- checkpoints ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name,suffixes", [("sgd", {"m"}), ("lion", {"m"}), ("adagrad", {"v"}), ("muon", {"m", "v"}),
                                           ("lamb", {"m", "v"})])
def test_resume(tmp_path, tiny, name, suffixes):
    """A file has what the optimizer keeps, no more; another rank count and stage go on with the same numbers."""
    flags = [*tiny, "-n", 6, "--warmup", 2, "--optimizer", name]
    whole = train_gpt(*flags, "--save-every", 3, out=tmp_path / "run")
    header = safetensors_header(whole.checkpoint(3) / "optimizer.safetensors")
    names = [k for k in header if k != "__metadata__"]
    assert {k.rsplit(".", 1)[1] for k in names} == suffixes
    matrix = "transformer.h.0.attn.c_attn.weight"
    assert (f"{matrix}.v" in names) == (name not in ("sgd", "lion", "muon"))
    flags[flags.index("-b") + 1] = 1
    rest = train_gpt(*flags, "--resume", whole.checkpoint(3), "-z", 3, out=tmp_path / "rest")
    assert rest.series("loss") == pytest.approx(whole.series("loss")[3:], rel=1e-6)
    other = train_gpt(*tiny, "-n", 6, "--resume", whole.checkpoint(3), out=tmp_path / "other", ok=False)
    assert "--optimizer" in other.complaint[0] and name in other.complaint[0]


# ---- refusals ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("flags,word", [
    (["--optimizer", "1bit-adam"], "not there yet"), (["--optimizer", "onebitlamb"], "not there yet"),
    (["--momentum", 0.5], "--momentum"), (["--muon-lr", 0.1, "--optimizer", "lion"], "--muon-lr"),
    (["--nesterov", "--optimizer", "adam"], "--nesterov"), (["--optimizer", "adamW2"], "adamw"),
    (["--param-group", "*.weight"], "PATTERN"), (["--param-group", "*.weight:lr=x"], "lr=x"),
    (["--param-group", "nothing*:lr=1"], "nothing*"), (["--param-group", "*:wd=-1"], "wd=-1")])
def test_refusals(tiny, flags, word):
    run = train_gpt(*tiny, "-n", 1, *flags, ok=False)
    assert run.code == 2 and word in run.complaint[0]
