#!/usr/bin/env python3
"""golden_gpt2.py: train GPT-2 in plain PyTorch from dev/init.py's weights and keep what it says in test/golden/.

    pip install torch numpy
    python dev/golden_gpt2.py            # about two minutes on two cores, 4 GB of memory

gpt2_124m.json   losses, norms and learning rates of 10 steps of the 124M model at B=4, T=64
gpt2_tiny.json   an odd-sized model (vocabulary 97, MLP 112, erf GELU): the same for 20 steps, and the norm of every
                 tensor's gradient at the first step
Each file also holds everything needed to run it again: model, data formula, hyper-parameters.
"""
import json
import math
import pathlib
import time

import torch
import torch.nn.functional as F

import init

GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "test" / "golden"


def forward(w, config, idx, targets):
    """Mean loss of one batch; w holds the tensors by name, (in, out) as in the file."""
    B, T = idx.shape
    C, NH, eps = config["n_embd"], config["n_head"], config["layer_norm_epsilon"]
    approximate = {"gelu_new": "tanh", "gelu": "none"}[config["activation_function"]]

    def norm(x, name):
        return F.layer_norm(x, (C,), w[name + ".weight"], w[name + ".bias"], eps)

    def linear(x, name):
        return x @ w[name + ".weight"] + w[name + ".bias"]

    def heads(x):
        return x.view(B, T, NH, C // NH).transpose(1, 2)

    x = w["transformer.wte.weight"][idx] + w["transformer.wpe.weight"][:T]
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    for l in range(config["n_layer"]):
        h = f"transformer.h.{l}."
        q, k, v = (heads(part) for part in linear(norm(x, h + "ln_1"), h + "attn.c_attn").split(C, dim=-1))
        scores = (q @ k.transpose(2, 3)) / math.sqrt(C // NH)
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        x = x + linear((weights @ v).transpose(1, 2).reshape(B, T, C), h + "attn.c_proj")
        inner = F.gelu(linear(norm(x, h + "ln_2"), h + "mlp.c_fc"), approximate=approximate)
        x = x + linear(inner, h + "mlp.c_proj")
    logits = norm(x, "transformer.ln_f") @ w["transformer.wte.weight"].T
    return F.cross_entropy(logits.view(B * T, -1), targets.reshape(-1))


def learning_rate(step, hyper):
    """Linear warm-up, then cosine to the floor; step counts from 0."""
    if step < hyper["warmup"]:
        return hyper["lr"] * (step + 1) / hyper["warmup"]
    progress = (step - hyper["warmup"]) / (hyper["steps"] - hyper["warmup"])
    return hyper["min_lr"] + 0.5 * (1 + math.cos(math.pi * progress)) * (hyper["lr"] - hyper["min_lr"])


def train(config, hyper):
    w = {name: torch.from_numpy(a).requires_grad_() for name, a in init.gpt2_weights(config, hyper["seed"]).items()}
    groups = [{"params": [p for p in w.values() if p.dim() == 2], "weight_decay": hyper["weight_decay"]},
              {"params": [p for p in w.values() if p.dim() == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=hyper["lr"], betas=(hyper["beta1"], hyper["beta2"]), eps=hyper["eps"])
    B, T = hyper["B"], hyper["T"]
    data = torch.from_numpy(init.tokens(hyper["steps"] * B * T + 1, config["vocab_size"], hyper["data_seed"]))
    result = {"losses": [], "norms": [], "lrs": [], "first_grad_norms": {}}
    for step in range(hyper["steps"]):
        start = time.time()
        first = step * B * T
        idx, targets = data[first:first + B * T].view(B, T), data[first + 1:first + B * T + 1].view(B, T)
        loss = forward(w, config, idx, targets)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            result["first_grad_norms"] = {name: p.grad.double().norm().item() for name, p in w.items()}
        norm = torch.stack([p.grad.double().norm() for p in w.values()]).norm().item()
        coefficient = min(1.0, hyper["clip"] / (norm + 1e-6))
        for p in w.values():
            p.grad.mul_(coefficient)
        lr = learning_rate(step, hyper)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        result["losses"].append(loss.item())
        result["norms"].append(norm)
        result["lrs"].append(lr)
        print(f"step {step + 1} | loss {loss.item():.6f} | norm {norm:.6f} | lr {lr:.6e} | {time.time() - start:.1f} s")
    return result


def write(name, config, hyper):
    torch.manual_seed(0)
    result = {"made_by": "dev/golden_gpt2.py", "torch": torch.__version__, "config": config, "hyper": hyper}
    result.update(train(config, hyper))
    path = GOLDEN / name
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    common = {"seed": 1337, "data_seed": 42, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0}
    write("gpt2_tiny.json", init.TINY, dict(common, B=4, T=24, steps=20, warmup=4, lr=3e-3, min_lr=3e-4))
    write("gpt2_124m.json", init.GPT2_124M, dict(common, B=4, T=64, steps=10, warmup=3, lr=1e-4, min_lr=1e-5))
