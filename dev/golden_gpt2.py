#!/usr/bin/env python3
"""golden_gpt2.py: trains GPT-2 in plain PyTorch from dev/init.py's weights and stores the results in test/golden/.

    pip install torch numpy
    python dev/golden_gpt2.py            # about two minutes on two cores, 4 GB of memory

gpt2_124m.json   losses, norms and learning rates of 10 steps of the 124M model at B=4, T=64
gpt2_tiny.json   an odd-sized model (vocabulary 97, MLP 112, erf GELU): the same for 20 steps, and the norm of every
                 tensor's gradient at the first step
gpt2_16bit.json  the odd-sized model in fp64, and in bf16 and fp16 with fp32 master weights: losses of 10 steps
Each file also has everything needed to reproduce it: model, data formula, hyper-parameters.
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
    return F.cross_entropy(logits.view(B * T, -1).to(torch.promote_types(logits.dtype, torch.float32)),
                           targets.reshape(-1))


def learning_rate(step, hyper):
    """Linear warm-up, then cosine to the floor; step counts from 0."""
    if step < hyper["warmup"]:
        return hyper["lr"] * (step + 1) / hyper["warmup"]
    progress = (step - hyper["warmup"]) / (hyper["steps"] - hyper["warmup"])
    return hyper["min_lr"] + 0.5 * (1 + math.cos(math.pi * progress)) * (hyper["lr"] - hyper["min_lr"])


def train(config, hyper, dtype=torch.float32):
    """In 16 bits the fp32 master weights are trained; the model computes with them rounded, the loss is in fp32."""
    master = torch.promote_types(dtype, torch.float32)
    w = {name: torch.from_numpy(a).to(master).requires_grad_()
         for name, a in init.gpt2_weights(config, hyper["seed"]).items()}
    loss_scale = 2.0**16 if dtype == torch.float16 else 1.0
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
        loss = forward({name: p.to(dtype) for name, p in w.items()}, config, idx, targets)
        optimizer.zero_grad()
        (loss * loss_scale).backward()
        for p in w.values():
            p.grad.div_(loss_scale)
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


def write(name, config, hyper, precisions=None):
    torch.manual_seed(0)
    result = {"made_by": "dev/golden_gpt2.py", "torch": torch.__version__, "config": config, "hyper": hyper}
    if precisions is None:
        result.update(train(config, hyper))
    else:
        result["losses"] = {str(dtype)[6:]: train(config, hyper, dtype)["losses"] for dtype in precisions}
    path = GOLDEN / name
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    common = {"seed": 1337, "data_seed": 42, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0}
    write("gpt2_tiny.json", init.TINY, dict(common, B=4, T=24, steps=20, warmup=4, lr=3e-3, min_lr=3e-4))
    write("gpt2_16bit.json", init.TINY, dict(common, B=4, T=24, steps=10, warmup=2, lr=1e-3, min_lr=1e-4),
          [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    write("gpt2_124m.json", init.GPT2_124M, dict(common, B=4, T=64, steps=10, warmup=3, lr=1e-4, min_lr=1e-5))
