"""Optimizers, schedules and parameter groups against plain NumPy in double: 50 steps on given gradients at every stage
and on 1 to 4 ranks, the same against torch.optim (a golden file), bytes and memory as planned, checkpoints."""
import collections
import functools
import itertools
import json
import math
import re
import subprocess

import doc_tables
import numpy as np
import pytest
from util import (FULL, ROOT, binary, built_devices, environment, gpt2_config, num_gpus, safetensors_header,
                  shard_write, train_gpt)

SHAPES = {"wte.weight": (37, 8), "h.qkv.weight": (16, 72), "h.qkv.bias": (72,), "h.up.weight": (16, 40),
          "h.down.weight": (40, 16), "norm.weight": (16,)}           # as in test_optimizer.cu
HIDDEN = {"h.qkv.weight": (3, 24 / 16), "h.up.weight": (1, 40 / 16),
          "h.down.weight": (1, 40 / 16)}                              # matrices in it, their fan_out / fan_in
STEPS = 50


# ---- the tables -------------------------------------------------------------------------------------------------
DEVICES = built_devices()
HELP = train_gpt("--help", device=DEVICES[0]).out if DEVICES else ""
ROWS = {flag: dict(doc_tables.rows(HELP, flag)) for flag in ("--optimizer", "--schedule") if HELP}
OPTIMIZERS, SCHEDULES = list(ROWS.get("--optimizer", [])), list(ROWS.get("--schedule", []))


def found(kind, name):
    """The reference of that name, in this file and written by hand."""
    wanted = f"{kind}_{name.replace('-', '_')}"
    if wanted not in globals():
        pytest.fail(f"--{kind} {name} has no reference: write {wanted} in test/test_optimizer.py")
    return globals()[wanted]


# ---- optimizers -------------------------------------------------------------------------------------------------
# optimizer_NAME: tensor k one step on. p and the gradient g are its arrays, s its states by name, which start at 0, t
# the number of the step from 1, lr its rate, wd the decay of a matrix; what follows has the defaults of the program.
LR = 1e-3


def adam_step(g, s, t, beta1, beta2, eps):
    s["m"] = beta1 * s["m"] + (1 - beta1) * g
    s["v"] = beta2 * s["v"] + (1 - beta2) * g * g
    return (s["m"] / (1 - beta1 ** t)) / (np.sqrt(s["v"] / (1 - beta2 ** t)) + eps)


def optimizer_adamw(k, p, g, s, t, lr, wd=0.1, beta1=0.9, beta2=0.95, eps=1e-8):
    return p * (1 - lr * wd) - lr * adam_step(g, s, t, beta1, beta2, eps)


def optimizer_adam(k, p, g, s, t, lr, wd=0, beta1=0.9, beta2=0.95, eps=1e-8):
    return p - lr * adam_step(g + wd * p, s, t, beta1, beta2, eps)


def optimizer_sgd(k, p, g, s, t, lr, wd=0, mu=0.9, damp=0.0, nesterov=False):
    g = g + wd * p
    s["m"] = mu * s["m"] + (1 - damp) * g
    return p - lr * (g + mu * s["m"] if nesterov else s["m"])


def optimizer_lamb(k, p, g, s, t, lr, wd=0.01, beta1=0.9, beta2=0.95, eps=1e-8):
    s["m"] = beta1 * s["m"] + (1 - beta1) * g
    s["v"] = beta2 * s["v"] + (1 - beta2) * g * g
    u = s["m"] / (np.sqrt(s["v"]) + eps) + wd * p
    norms = np.linalg.norm(p), np.linalg.norm(u)
    ratio = min(max(norms[0] / norms[1], 0.01), 10) if min(norms) > 0 else 1
    return p - lr * math.sqrt(1 - beta2 ** t) / (1 - beta1 ** t) * ratio * u


def optimizer_lion(k, p, g, s, t, lr, wd=0.1, beta1=0.9, beta2=0.99):
    c = beta1 * s["m"] + (1 - beta1) * g
    s["m"] = beta2 * s["m"] + (1 - beta2) * g
    return p * (1 - lr * wd) - lr * np.sign(c)


def optimizer_adagrad(k, p, g, s, t, lr, wd=0, eps=1e-8):
    g = g + wd * p
    s["v"] = s["v"] + g * g
    return p - lr * g / (np.sqrt(s["v"]) + eps)


def orthogonal(u):
    x = u / (np.linalg.norm(u) + 1e-7)
    x = x.T if u.shape[0] > u.shape[1] else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if u.shape[0] > u.shape[1] else x


def optimizer_muon(k, p, g, s, t, lr, wd=0.1, muon_lr=0.02, mu=0.95):
    if k not in HIDDEN:
        return optimizer_adamw(k, p, g, s, t, lr, wd)
    s["m"] = mu * s["m"] + (1 - mu) * g
    parts = np.split(g + mu * (s["m"] - g), HIDDEN[k][0], axis=1)
    x = np.concatenate([orthogonal(u) * math.sqrt(max(1, HIDDEN[k][1])) for u in parts], axis=1)
    lr *= muon_lr / LR
    return p * (1 - lr * wd) - lr * x


def reference(name, params, grads, factor=None, decay=None, **hyper):
    """Parameters after all steps, and the names of each tensor's states. factor, decay: by tensor, of the learning rate
    and instead of the weight decay."""
    step, p = found("optimizer", name), {k: v.astype(np.float64) for k, v in params.items()}
    states = {k: collections.defaultdict(float) for k in p}
    for t, grad in enumerate(grads, 1):
        for k, g in grad.items():
            wd = {} if g.ndim == 2 else {"wd": 0}
            wd |= {"wd": decay[k]} if k in (decay or {}) else {}
            p[k] = step(k, p[k], g.astype(np.float64), states[k], t, LR * (factor or {}).get(k, 1), **{**hyper, **wd})
    return p, {k: set(s) for k, s in states.items()}


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


def launch(device, ranks, words, wrapper=(), cwd=ROOT):
    """What test_optimizer prints."""
    program = binary(device).parent / "test_optimizer"
    if not program.exists():
        pytest.skip(f"{program} is not built")
    if device == "cuda" and ranks > num_gpus():
        pytest.skip(f"{ranks} ranks need {ranks} GPUs")
    command = [*wrapper, str(program), *map(str, words), "--schedule", "constant", "--warmup", "0"]
    if ranks > 1:
        command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd,
                          env=environment(OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run(folder, device, ranks, *flags, steps=STEPS, tp=1):
    """The parameters of each of tp parts, or of the only one, and what was printed."""
    folder.mkdir(exist_ok=True)
    params, grads = inputs(steps)
    params.tofile(folder / "params.bin")
    grads.tofile(folder / "grads.bin")
    clip = [] if "--clip" in flags else ["--clip", 0]
    said = launch(device, ranks, [tp, folder, *flags, *clip])
    parts = [split(np.fromfile(folder / f"out.{t}.bin", np.float32)) for t in range(tp)]
    return parts if tp > 1 else parts[0], said


def assert_same(ours, truth):
    for k in SHAPES:
        assert np.abs(ours[k] - truth[k]).max() <= 1e-6, k


CASES = {                                             # flags beside the defaults, and the same for the reference
    "adam": (["--weight-decay", 0.05], dict(wd=0.05)),
    "adagrad": (["--weight-decay", 0.05], dict(wd=0.05)),
    "muon": (["--muon-lr", 0.003], dict(muon_lr=0.003)),
}
LAYOUTS = list(itertools.product((1, 2, 3, 4), (0, 1, 2, 3))) if FULL else [(1, 0), (2, 0), (2, 1), (3, 2), (4, 3)]


@pytest.fixture(scope="module")
def truth():
    """(parameters, states) of the reference, worked out once for each optimizer."""
    params, grads = inputs()
    steps = [split(g) for g in grads]
    return functools.cache(lambda name: reference(name, split(params), steps, **CASES.get(name, ([], {}))[1]))


@pytest.mark.parametrize("ranks,stage", LAYOUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_against_numpy(tmp_path, device, name, ranks, stage, truth):
    if device != "cpu" and not FULL and (ranks, stage) != (2, 1):
        pytest.skip("with --full")
    params, states = truth(name)
    ours, said = run(tmp_path, device, ranks, "--optimizer", name, "-l", LR, "-z", stage, *CASES.get(name, [[]])[0])
    assert_same(ours, params)
    assert set(ROWS["--optimizer"][name].split("|")[1].split()) == set().union(*states.values())
    kept, elems = (int(said.split()[i]) for i in (-4, -1))          # the program itself checks bytes
    least, most = (count(map(len, states.values())) * elems for count in (min, max))
    assert kept == most if least == most else least < kept < most


@pytest.mark.parametrize("flags,hyper", [
    (["--momentum", 0.8, "--dampening", 0.3, "--weight-decay", 0.02], dict(mu=0.8, damp=0.3, wd=0.02)),
    (["--momentum", 0.8, "--nesterov"], dict(mu=0.8, nesterov=True))])
def test_sgd(tmp_path, flags, hyper):
    ours, _ = run(tmp_path, "cpu", 2, "--optimizer", "sgd", "-l", LR, "-z", 2, *flags)
    params, grads = inputs()
    assert_same(ours, reference("sgd", split(params), [split(g) for g in grads], **hyper)[0])


@pytest.mark.parametrize("name", ["adamw", "lamb", "muon"])
def test_groups(tmp_path, name):
    """A later group wins where two fit."""
    ours, _ = run(tmp_path, "cpu", 3, "--optimizer", name, "-l", LR, "-z", 1, "--weight-decay", 0.1, "--param-group",
                  "h.*:lr=0.5,wd=0.3;*.bias:wd=0;h.up.*:lr=2")
    params, grads = inputs()
    factor = {k: 2 if k == "h.up.weight" else 0.5 for k in SHAPES if k.startswith("h.")}
    decay = {"h.qkv.weight": 0.3, "h.qkv.bias": 0, "h.up.weight": 0.3, "h.down.weight": 0.3}
    assert_same(ours, reference(name, split(params), [split(g) for g in grads], factor, decay, wd=0.1)[0])


@pytest.mark.parametrize("name,ranks,tp,stage,flags", [
    ("sgd", 4, 2, 0, []), ("sgd", 4, 2, 1, ["--deterministic"]), ("sgd", 4, 2, 2, []), ("sgd", 4, 2, 3, []),
    ("sgd", 4, 2, 0, ["--deterministic", "--overlap", 0]), ("sgd", 4, 2, 3, ["--deterministic"]),
    ("sgd", 2, 2, 3, []), ("sgd", 3, 3, 1, ["--deterministic"]), ("lamb", 4, 2, 2, []), ("adamw", 4, 2, 1, []),
    ("muon", 4, 2, 1, [])])
def test_groups_of_ranks(tmp_path, device, name, ranks, tp, stage, flags):
    """Tensors of unit 1 are in tp parts, each shared by the ranks that have it; the others are shared by all ranks. So
    to the reference a tensor of unit 1 is its parts one after another, and the norm, by which gradients are clipped,
    counts each once. The gradients of the parts differ by the shares of their ranks."""
    if device != "cpu" and not FULL and (name, stage) not in (("sgd", 3), ("lamb", 2)):
        pytest.skip("with --full")
    steps, clip = 8, 0.5
    params, grads = inputs(steps)
    shares = [sum(2 * (r + 1) / (ranks * (ranks + 1)) for r in range(t, ranks, tp)) for t in range(tp)]
    in_parts = {k for k in SHAPES if k.startswith("h.")}
    whole = {k: np.stack([v] * tp) if k in in_parts else v for k, v in split(params).items()}
    whole_grads = []
    for g in grads:
        g = {k: np.stack([s * v for s in shares]) if k in in_parts else v for k, v in split(g).items()}
        norm = math.sqrt(sum(np.sum(v.astype(np.float64) ** 2) for v in g.values()))
        assert norm > 2 * clip
        whole_grads.append({k: v * (clip / (norm + 1e-6)) for k, v in g.items()})
    decay = {k: 0.1 if len(shape) == 2 else 0 for k, shape in SHAPES.items()}
    ours, _ = run(tmp_path, device, ranks, "--optimizer", name, "-l", LR, "-z", stage, "--clip", clip, "--weight-decay",
                  0.1, *flags, steps=steps, tp=tp)
    if name == "muon":                                # of matrices, each part by itself
        truth = [reference(name, split(params), [{k: v[t] if k in in_parts else v for k, v in g.items()}
                                                 for g in whole_grads], wd=0.1)[0] for t in range(tp)]
    else:
        stacked, _ = reference(name, whole, whole_grads, decay=decay)
        truth = [{k: v[t] if k in in_parts else v for k, v in stacked.items()} for t in range(tp)]
    for t in range(tp):
        assert_same(ours[t], truth[t])


# ---- parts of tensors: test_layouts.h ----------------------------------------------------------------------------
LAYOUT_PARAMS = 2693
WALK = [(4, 2, 1), (1, 1, 0), (4, 4, 3), (3, 1, 2), (8, 4, 0)]       # ranks, tp, stage; two steps each


def layout(folder, device, ranks, tp, stage, steps, *flags, **where):
    """{step: hash of the state}, from the first step on that this run has."""
    words = ["layout", tp, folder, "-n", steps, "-z", stage, "-l", 0.01, "--clip", 0, *flags]
    said = launch(device, ranks, words, **where)
    return {int(step): value for step, value in re.findall(r"^step (\d+) hash (\w+)$", said, re.M)}


@pytest.fixture
def layouts(tmp_path, device):
    """Runs of one rank without a break are the truth."""
    rng = np.random.default_rng(3)
    (0.1 * rng.normal(size=(10, LAYOUT_PARAMS))).astype(np.float32).tofile(tmp_path / "grads.bin")
    return functools.partial(layout, tmp_path, device)


def files_of(folder):
    """Of a checkpoint all but state.json, which says by how many ranks it was written."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "state.json"}


@pytest.mark.parametrize("flags", [[], ["--state-dtype", "bf16"]], ids=["fp32", "bf16-states"])
def test_layouts(tmp_path, layouts, flags):
    """A checkpoint of one layout resumes in another: initial weights, states after each load and step and files have
    the bits of a run of one rank, also where states are rounded stochastically."""
    if flags and not FULL and layouts.args[1] != "cpu":
        pytest.skip("with --full")
    truth = layouts(1, 1, 0, 2 * len(WALK), *flags, "-o", tmp_path / "whole")
    before = []
    for i, (ranks, tp, stage) in enumerate(WALK):
        out, steps = tmp_path / f"run{i}", 2 * i + 2
        assert layouts(ranks, tp, stage, steps, *flags, *before, "-o", out) == {k: truth[k]
                                                                                for k in range(2 * i, steps + 1)}
        before = ["--resume", out / f"step_{steps:08d}"]
    for folder in f"step_{steps:08d}", "export":
        assert files_of(out / folder) == files_of(tmp_path / "whole" / folder)
        assert len(files_of(out / folder)) >= 2


@pytest.mark.parametrize("stage", [0, 1])
def test_layouts_without_a_shared_folder(tmp_path, layouts, stage):
    """Rank 0 writes what the parts of all ranks are, and reads them for all."""
    truth = layouts(1, 1, 0, 4)
    apart = ["sh", "-c", 'mkdir -p host$OMPI_COMM_WORLD_RANK; cd host$OMPI_COMM_WORLD_RANK; exec "$@"', "_"]
    where = {"wrapper": apart, "cwd": tmp_path}
    hashes = layouts(4, 2, stage, 2, "-o", "run", **where)
    assert not (tmp_path / "host1" / "run").exists()
    hashes |= layouts(8, 4, stage, 4, "--resume", "run/step_00000002", **where)
    assert hashes == truth


def test_against_torch(tmp_path):
    """dev/golden_optim.py wrote the file with torch.optim on the same inputs."""
    golden = json.loads((ROOT / "test" / "golden" / "optim.json").read_text())
    for case in golden:
        ours, _ = run(tmp_path, "cpu", 1, *case["flags"])
        flat = np.concatenate([ours[k].ravel() for k in SHAPES])[::case["every"]]
        assert np.abs(flat - np.array(case["params"])).max() <= 2e-6, case["flags"]   # both are fp32


# ---- schedules --------------------------------------------------------------------------------------------------
# schedule_NAME: the rate of step s of N, counted from 0, with a warm-up of W.
PEAK, LOW, DECAY = LR, LR / 10, 0.2


def between(share):
    return LOW + (PEAK - LOW) * share


def fallen(s, N, W, share):
    """A warm-up from 0, then by the share that is left of the way from low to peak; low at the end."""
    return LOW if s >= N else PEAK * (s + 1) / W if s < W else between(share((s - W) / (N - W)))


def tail(s, N, W):
    start = max(N * (1 - DECAY), W)
    return max(0, s - start) / (N - start)


def schedule_constant(s, N, W):
    return PEAK * (s + 1) / W if s < W else PEAK


def schedule_linear(s, N, W):
    return fallen(s, N, W, lambda x: 1 - x)


def schedule_cosine(s, N, W):
    return fallen(s, N, W, lambda x: (1 + math.cos(math.pi * x)) / 2)


def schedule_wsd(s, N, W):
    return fallen(s, N, W, lambda x: 1 - tail(s, N, W))


def schedule_wsd_sqrt(s, N, W):
    return fallen(s, N, W, lambda x: 1 - math.sqrt(tail(s, N, W)))


def schedule_warmup_log(s, N, W):
    return between(math.log(s + 1) / math.log(max(2, W))) if s < W else PEAK


def schedule_onecycle(s, N, W):
    up, down = (s + 1) / W if s < W else 1, 1 - (s - W + 1) / max(W, 1) if s >= W else 1
    return between(max(0, min(up, down))) if s < N else LOW


def schedule_lr_range_test(s, N, W):
    return between((s + 1) / N) if s < N else LOW


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(gpt2_config(97, 8, 8)))
    for split_name in ("train", "val"):
        shard_write(folder / "data" / f"{split_name}_000000.bin", np.arange(900) * 7 % 97, 97)
    return ["-m", folder / "model", "--from-scratch", "-d", folder / "data", "-t", 8, "-b", 1, "--sample-tokens", 0,
            "--eval-batches", 1, "-l", 1e-3, "--min-lr", 1e-4]


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(tmp_path, tiny, name):
    """The rates in the log: an ordinary run, a warm-up as long as the run or longer, no warm-up, one step."""
    truth = found("schedule", name)
    for i, (N, W) in enumerate([(20, 4), (6, 6), (5, 9), (7, 0), (1, 0), (1, 1)]):
        done = train_gpt(*tiny, "-n", N, "--warmup", W, "--schedule", name, out=tmp_path / str(i))
        assert done.series("lr") == pytest.approx([truth(s, N, W) for s in range(N)], rel=1e-12), (N, W)
        assert min(done.series("lr")) > 0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_eps(tmp_path, tiny, name):
    """Where the gradient is 0, as in padding, 0 is not divided by 0."""
    done = train_gpt(*tiny, "-n", 3, "--optimizer", name, "--eps", 0, out=tmp_path)
    assert len(done.series("loss")) == 3 and all(map(math.isfinite, done.series("loss")))
    assert done.series("skipped") == [0, 0, 0]


@pytest.mark.parametrize("name", ["constant", "cosine", "warmup-log"])
def test_resume_past_the_end(tmp_path, tiny, name):
    """Position from the checkpoint, shape from the flags."""
    train_gpt(*tiny, "-n", 6, "--warmup", 2, "--schedule", name, out=tmp_path / "run")
    longer = train_gpt(*tiny, "-n", 9, "--warmup", 2, "--schedule", name, "--resume", "auto", out=tmp_path / "run")
    truth = [found("schedule", name)(s, 6 if s < 6 else 9, 2) for s in range(9)]
    assert longer.series("lr") == pytest.approx(truth, rel=1e-12)


# ---- checkpoints ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resume(tmp_path, tiny, name):
    """A file has the optimizer's states, no more; another rank count and stage resume with the same numbers."""
    flags = [*tiny, "-n", 6, "--warmup", 2, "--optimizer", name]
    whole = train_gpt(*flags, "--save-every", 3, out=tmp_path / "run")
    header = safetensors_header(whole.checkpoint(3) / "optimizer.safetensors")
    names = [k for k in header if k != "__metadata__"]
    params, grads = inputs(1)
    _, states = reference(name, split(params), [split(grads[0])])
    for tensor, like in (("transformer.h.0.attn.c_attn.weight", "h.up.weight"),
                         ("transformer.wte.weight", "wte.weight")):
        assert {k[len(tensor) + 1:] for k in names if k.startswith(tensor)} == states[like]
    flags[flags.index("-b") + 1] = 1
    rest = train_gpt(*flags, "--resume", whole.checkpoint(3), "-z", 3, out=tmp_path / "rest")
    assert rest.series("loss") == pytest.approx(whole.series("loss")[3:], rel=1e-6)
    other = train_gpt(*tiny, "-n", 6, "--resume", whole.checkpoint(3), "--optimizer",
                      "sgd" if name == "adamw" else "adamw", out=tmp_path / "other", ok=False)
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


@pytest.mark.quick
@pytest.mark.parametrize("flag", ROWS)
def test_tables(flag):
    """The words of a flag and its default are rows; every reference here is of one of them."""
    words, default = re.search(rf"^ +{flag} .*; one of (\S+) \[(\S+)\]", HELP, re.M).groups()
    assert words.split("|") == list(ROWS[flag]) and default in ROWS[flag]
    references = {name for name in globals() if name.startswith(flag[2:] + "_")}
    assert references == {f"{flag[2:]}_{name.replace('-', '_')}" for name in ROWS[flag]}


@pytest.mark.quick
def test_docs():
    """docs/optimizers.md has the rows of the program, and no others."""
    page = (ROOT / "docs" / "optimizers.md").read_text()
    right = doc_tables.page(page, HELP)
    wrong = set(page.splitlines()) ^ set(right.splitlines())
    assert page == right, f"dev/doc_tables.py writes docs/optimizers.md anew: {sorted(wrong)}"
