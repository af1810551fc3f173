#!/usr/bin/env python3
"""Makes test/golden/optim.json: parameters after torch.optim's steps in test/test_optimizer.py, in fp32.
Needs PyTorch; the tests do not."""
import json
import pathlib
import sys

import numpy as np
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "test"))
import test_optimizer as test                                         # noqa: E402

EVERY = 7
T = torch.optim
BETAS = dict(betas=(0.9, 0.95), eps=1e-8)
CASES = [
    (["--optimizer", "adamw"], lambda p: T.AdamW(p, lr=1e-3, weight_decay=0.1, **BETAS)),
    (["--optimizer", "adam", "--weight-decay", 0.05], lambda p: T.Adam(p, lr=1e-3, weight_decay=0.05, **BETAS)),
    (["--optimizer", "sgd", "--momentum", 0], lambda p: T.SGD(p, lr=1e-3)),
    (["--optimizer", "sgd", "--momentum", 0.9, "--nesterov", "--weight-decay", 0.02],
     lambda p: T.SGD(p, lr=1e-3, momentum=0.9, nesterov=True, weight_decay=0.02)),
    (["--optimizer", "adagrad", "--weight-decay", 0.05],
     lambda p: T.Adagrad(p, lr=1e-3, weight_decay=0.05, eps=1e-8)),
]


def main():
    params, grads = test.inputs()
    out = []
    for flags, make in CASES:
        tensors = {k: torch.nn.Parameter(torch.tensor(v)) for k, v in test.split(params).items()}
        decayed = [p for p in tensors.values() if p.ndim == 2]
        others = [p for p in tensors.values() if p.ndim == 1]
        optimizer = make([{"params": decayed}, {"params": others, "weight_decay": 0}])
        for step in grads:
            for k, g in test.split(step).items():
                tensors[k].grad = torch.tensor(g)
            optimizer.step()
        flat = np.concatenate([tensors[k].detach().numpy().ravel() for k in test.SHAPES])
        out.append({"torch": torch.__version__, "flags": [*flags, "-l", 1e-3], "every": EVERY,
                    "params": [float(f"{x:.9g}") for x in flat[::EVERY]]})
    path = ROOT / "test" / "golden" / "optim.json"
    path.write_text("[" + ",\n".join(json.dumps(case) for case in out) + "]\n")


if __name__ == "__main__":
    main()
