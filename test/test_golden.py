"""Golden losses: the same training as in PyTorch, from the same weights. dev/golden_gpt2.py made test/golden/."""
import json

import init
import numpy as np
import pytest
from util import ROOT, built_devices, moments, shard_write, train_gpt, weights

FP32 = 1e-4   # relative; the two programs add in different orders, and ten steps amplify that


def load(name):
    return json.loads((ROOT / "test" / "golden" / name).read_text())


def run_golden(golden, tmp_path, model, device, *args, **kw):
    h, V = golden["hyper"], golden["config"]["vocab_size"]
    tokens = init.tokens(h["steps"] * h["B"] * h["T"] + 1, V, h["data_seed"])
    shard_write(tmp_path / "data" / "train_000000.bin", tokens, V)
    return train_gpt("-m", *model, "-d", tmp_path / "data", "-t", h["T"], "-n", h["steps"], "-l", h["lr"],
                     "--min-lr", h["min_lr"], "--warmup", h["warmup"], "--beta1", h["beta1"], "--beta2", h["beta2"],
                     "--eps", h["eps"], "--weight-decay", h["weight_decay"], "--clip", h["clip"], "-s", h["seed"],
                     "--schedule", "cosine", "--no-shuffle", "--sample-tokens", 0, *args, device=device,
                     out=tmp_path / "run", timeout=900, **kw)


def tiny_config(tmp_path, golden):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(golden["config"]))
    return [tmp_path / "model", "--from-scratch"]


@pytest.mark.parametrize("device", built_devices())
@pytest.mark.parametrize("ranks,stage,micro_batch,grad_accum", [(1, 0, 4, 1), (2, 2, 1, 2), (4, 1, 1, 1)])
def test_tiny(tmp_path, device, ranks, stage, micro_batch, grad_accum):
    """Odd vocabulary, odd MLP width, erf GELU; every tensor's gradient at the first step."""
    golden = load("gpt2_tiny.json")
    run = run_golden(golden, tmp_path, tiny_config(tmp_path, golden), device, "-z", stage, "-b", micro_batch, "-g",
                     grad_accum, "--save-every", 1, ranks=ranks)
    assert run.series("loss") == pytest.approx(golden["losses"], rel=FP32)
    assert run.series("norm") == pytest.approx(golden["norms"], rel=10 * FP32)
    assert run.series("lr") == pytest.approx(golden["lrs"], rel=1e-6)
    coefficient = min(1, golden["hyper"]["clip"] / (golden["norms"][0] + 1e-6))
    m, _ = moments(run.checkpoint(1))
    assert set(m) == set(golden["first_grad_norms"])
    for name, norm in golden["first_grad_norms"].items():
        ours = np.linalg.norm(m[name].astype(np.float64)) / (0.1 * coefficient)
        assert ours == pytest.approx(norm, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("device", built_devices())
@pytest.mark.parametrize("ranks,stage", [(1, 0), (3, 2)])
def test_init(tmp_path, device, ranks, stage):
    """The weights of step 0 are those of dev/init.py, on any number of ranks: to the last bit of cos() and log()."""
    golden = load("gpt2_tiny.json")
    model = tiny_config(tmp_path, golden)
    train_gpt("-m", *model, "-s", golden["hyper"]["seed"], "--export", tmp_path / "export", "-z", stage, ranks=ranks,
              device=device)
    expected, ours = init.gpt2_weights(golden["config"], golden["hyper"]["seed"]), weights(tmp_path / "export")
    assert set(expected) == set(ours)
    for name in expected:
        assert ours[name] == pytest.approx(expected[name], rel=1.2e-7, abs=1e-12), name


def test_124m(tmp_path):
    golden = load("gpt2_124m.json")
    assert golden["losses"][0] == pytest.approx(10.98, abs=0.05)
    run = run_golden(golden, tmp_path, ["gpt2"], "cpu", "-b", golden["hyper"]["B"])
    assert run.series("loss") == pytest.approx(golden["losses"], rel=FP32)
    assert run.series("norm") == pytest.approx(golden["norms"], rel=10 * FP32)
