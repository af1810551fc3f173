#!/usr/bin/env python3
"""golden_deepspeed.py: trains a small GPT-2 with DeepSpeed's engine on a CPU, with each of its schedulers in several
settings, and stores configurations, losses, learning rates and betas of 20 steps in test/golden/deepspeed.json.

    pip install torch numpy deepspeed==0.19.6
    DS_ACCELERATOR=cpu python dev/golden_deepspeed.py

The model is golden_gpt2.py's, in fp32; torch_adam takes PyTorch's AdamW, as DeepSpeed's own needs a compiler."""
import json
import os
import pathlib

import deepspeed
import torch

import golden_gpt2
import init

GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "test" / "golden"
MODEL = {"model_type": "gpt2", "vocab_size": 61, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2,
         "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
HYPER = {"seed": 5, "data_seed": 3, "steps": 20, "B": 4, "T": 16}
SCHEDULERS = [
    ("WarmupLR", {"warmup_max_lr": 0.004, "warmup_num_steps": 8}),
    ("WarmupLR", {"warmup_min_lr": 0.0005, "warmup_num_steps": 10, "warmup_type": "linear"}),
    ("WarmupDecayLR", {"warmup_max_lr": 0.006, "warmup_num_steps": 6, "total_num_steps": 20}),
    ("WarmupDecayLR", {"warmup_min_lr": 0.001, "warmup_max_lr": 0.006, "warmup_num_steps": 5, "total_num_steps": 15,
                       "warmup_type": "linear"}),
    ("WarmupDecayLR", {"warmup_min_lr": 0.0001, "warmup_num_steps": 30, "total_num_steps": 20}),
    ("WarmupCosineLR", {"warmup_num_steps": 6, "total_num_steps": 20}),
    ("WarmupCosineLR", {"warmup_min_ratio": 0.1, "cos_min_ratio": 0.05, "warmup_num_steps": 4, "total_num_steps": 40,
                        "warmup_type": "linear"}),
    ("OneCycle", {"cycle_min_lr": 0.001, "cycle_max_lr": 0.006, "cycle_first_step_size": 7}),
    ("OneCycle", {"cycle_min_lr": 0.001, "cycle_max_lr": 0.006, "cycle_first_step_size": 6,
                  "cycle_first_stair_count": 3, "cycle_second_step_size": 8, "cycle_second_stair_count": 4,
                  "decay_step_size": 2, "decay_lr_rate": 0.5, "cycle_min_mom": 0.75,
                  "cycle_max_mom": 0.85, "decay_mom_rate": 0.01}),
    ("OneCycle", {"cycle_min_lr": 0.001, "cycle_max_lr": 0.006, "cycle_first_step_size": 30, "cycle_momentum": False}),
    ("LRRangeTest", {"lr_range_test_min_lr": 0.0005, "lr_range_test_step_size": 5, "lr_range_test_step_rate": 1.5}),
    ("LRRangeTest", {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 6, "lr_range_test_staircase": True}),
]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.names = {}
        for name, a in init.gpt2_weights(MODEL, HYPER["seed"]).items():
            self.names[name] = name.replace(".", "_")
            self.register_parameter(self.names[name], torch.nn.Parameter(torch.from_numpy(a)))

    def forward(self, idx, targets):
        w = {name: getattr(self, attribute) for name, attribute in self.names.items()}
        return golden_gpt2.forward(w, MODEL, idx, targets)


def train(config):
    model = Model()
    engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    B, T = HYPER["B"], HYPER["T"]
    data = torch.from_numpy(init.tokens(HYPER["steps"] * B * T + 1, MODEL["vocab_size"], HYPER["data_seed"]))
    result = {"losses": [], "lrs": [], "betas": []}
    for step in range(HYPER["steps"]):
        first = step * B * T
        idx, targets = data[first:first + B * T].view(B, T), data[first + 1:first + B * T + 1].view(B, T)
        loss = engine(idx, targets)
        engine.backward(loss)
        group = engine.optimizer.param_groups[0]
        result["losses"].append(float(f"{loss.item():.9g}"))
        result["lrs"].append(group["lr"])
        result["betas"].append(list(group["betas"]))
        engine.step()
    return result


def main():
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    cases = []
    for kind, params in SCHEDULERS:
        config = {"train_batch_size": HYPER["B"], "zero_optimization": {"stage": 0},
                  "optimizer": {"type": "AdamW", "params": {"lr": 0.005, "weight_decay": 0, "torch_adam": True}},
                  "scheduler": {"type": kind, "params": params}}
        cases.append({"config": config, **train(json.loads(json.dumps(config)))})
        print(kind, params, cases[-1]["losses"][-1])
    head = {"deepspeed": deepspeed.__version__, "torch": torch.__version__, "model": MODEL, "hyper": HYPER}
    lines = ",\n ".join(json.dumps(case) for case in cases)
    (GOLDEN / "deepspeed.json").write_text(json.dumps(head)[:-1] + f',\n"cases": [\n {lines}\n]}}\n')


if __name__ == "__main__":
    main()
