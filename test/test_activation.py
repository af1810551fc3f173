"""Every row of kernels/activation.cuh in a GPT-2: loss and gradients of a step against NumPy in double."""
import math
import re

import init
import numpy as np
import pytest
from util import ROOT, built_devices, gpt2_config, model_write, moments, shard_write, train_gpt

V, C, T, L, B = 67, 12, 6, 2, 2
TABLE = (ROOT / "kernels" / "activation.cuh").read_text()
NAMES = [name for names in re.findall(r'^    A\(\w+, \w+, "([^"]+)"', TABLE, re.M) for name in names.split(", ")]


def gelu_tanh(x):
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


# By their names in transformers' ACT2FN, those that have no row yet too.
REFERENCES = {
    "gelu_new": gelu_tanh, "gelu_pytorch_tanh": gelu_tanh,
    "gelu": lambda x: x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "relu": lambda x: np.maximum(x, 0), "relu2": lambda x: np.maximum(x, 0) ** 2,
    "tanh": np.tanh, "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
}


def norm(x, w, name):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w[name + ".weight"] + w[name + ".bias"]


def linear(x, w, name):
    return x @ w[name + ".weight"] + w[name + ".bias"]


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def loss_of(w, activation, tokens, targets):
    """GPT-2 with one head a layer."""
    x = w["transformer.wte.weight"][tokens] + w["transformer.wpe.weight"]
    for h in (f"transformer.h.{layer}." for layer in range(L)):
        q, k, v = np.split(linear(norm(x, w, h + "ln_1"), w, h + "attn.c_attn"), 3, -1)
        scores = np.where(np.tri(T) > 0, q @ k.swapaxes(1, 2) / math.sqrt(C), -np.inf)
        x = x + linear(softmax(scores) @ v, w, h + "attn.c_proj")
        x = x + linear(activation(linear(norm(x, w, h + "ln_2"), w, h + "mlp.c_fc")), w, h + "mlp.c_proj")
    p = softmax(norm(x, w, "transformer.ln_f") @ w["transformer.wte.weight"].T)
    return -np.log(np.take_along_axis(p, targets[..., None], -1)).mean()


@pytest.mark.parametrize("device", built_devices())
@pytest.mark.parametrize("recompute", ["none", "mlp"])
@pytest.mark.parametrize("name", NAMES)
def test_step(tmp_path, name, recompute, device):
    assert name in REFERENCES, f"no reference in NumPy for the activation {name}"
    config = gpt2_config(V, C, T, L=L, activation_function=name)
    w = init.random_weights(init.gpt2_shapes(config), 1, 0.5)
    model_write(tmp_path / "model", config, w)
    data = init.tokens(B * T + 1, V, 1)
    shard_write(tmp_path / "data" / "train_000000.bin", data, V)
    run = train_gpt("-m", tmp_path / "model", "-d", tmp_path / "data", "-b", B, "-t", T, "-n", 1, "-r", recompute,
                    "--clip", 1e9, "--beta1", 0.9, "--no-shuffle", "--sample-tokens", 0, device=device,
                    out=tmp_path / "run")
    w = {key: value.astype(np.float64) for key, value in w.items()}
    tokens, targets = (np.asarray(part, np.int64).reshape(B, T) for part in (data[:-1], data[1:]))
    assert run.series("loss")[0] == pytest.approx(loss_of(w, REFERENCES[name], tokens, targets), rel=1e-5)
    m, _ = moments(run.checkpoint(1))
    for tensor in ("transformer.h.0.mlp.c_fc.weight", "transformer.h.0.mlp.c_fc.bias", "transformer.h.0.ln_2.weight",
                   "transformer.h.0.mlp.c_proj.weight", "transformer.h.0.attn.c_attn.weight"):
        for i in range(0, w[tensor].size, w[tensor].size // 5):
            losses = []
            for step in (1e-5, -2e-5):
                w[tensor].flat[i] += step
                losses.append(loss_of(w, REFERENCES[name], tokens, targets))
            w[tensor].flat[i] += 1e-5
            ours = m[tensor].flat[i] / 0.1
            assert ours == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=2e-3, abs=2e-5), (tensor, i)
