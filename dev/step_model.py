#!/usr/bin/env python3
"""Estimated tokens per second by `--plan --auto` of a build with bf16, for models and numbers of GPUs. A projection
from rates of single operations (model/step_time.cuh, docs/benchmarks.md), not measured.

  dev/step_model.py [PROGRAM]            default build/cpu/train_gpt; prints the tables of docs/benchmarks.md
  dev/step_model.py --kernels [PROGRAM]  only that of the kernels of one micro-step
"""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
GPUS, RANKS = ["H100", "H200", "B200"], [1, 8, 64]
# Model, tokens per sequence, sequences per step, micro-batches to try. Storage is exact; llama3-8b on one GPU needs
# moments in bf16.
MODELS = [("gpt2", 1024, 512, (8, 64)), ("gpt2-xl", 1024, 1024, (8, 16, 32)), ("llama3-8b", 8192, 128, (1, 2))]

# The second table: models as flags, GPUs, and which operations make a row.
SETTINGS = {"gpt2, -b 32": "-m gpt2 -b 32 -t 1024", "gpt2-xl, -b 16 -z 1": "-m gpt2-xl -b 16 -t 1024 -z 1 --ranks 8",
            "llama3-8b, -z 3": "-m llama3-8b -b 1 -t 8192 -z 3 --ranks 8"}
KERNEL_GPUS = ["H100", "B200", "RTX 4090", "L4"]
ROWS = {"GEMMs of the blocks": r"matmul_\w+ +(qkv|attproj|fc|fcproj) ",
        "head, classifier": r"matmul_\w+ +head |classifier",
        "attention forward": "attention_forward", "attention backward": "attention_backward",
        "norms, activations, biases, RoPE": r"(residual_)?(layer|rms)norm|swiglu|activation|rope|.*bias",
        "gradients cleared": "cudaMemset|ranges_clear", "optimizer, the rest": ""}


def kernels(program, flags, gpu):
    """[ms of each of ROWS, of communication, of the step]."""
    out = subprocess.check_output([program, "--plan", "-d", "none", "-p", "bf16", "-g", "1", "--gpu", gpu,
                                   *flags.split()], text=True, cwd=ROOT)
    ms = dict.fromkeys(ROWS, 0.0)
    listed = re.findall(r"^  (?:forward|backward|recompute|optimizer) +(.*) calls .* (\S+) ms$", out, re.M)
    for operation, value in listed:
        ms[next(row for row, ops in ROWS.items() if re.match(ops, operation))] += float(value)
    step_s, wait_s = re.search(r"estimated (\S+) s \(.* exposed communication ([\d.e-]+)\)", out).groups()
    return [*ms.values(), 1e3 * float(wait_s), 1e3 * float(step_s)]


def print_kernels(program):
    print("| ms | " + " | ".join(f"{setting}: {', '.join(KERNEL_GPUS)}" for setting in SETTINGS) + " |")
    print("|---|" + "---|" * len(SETTINGS))
    columns = [[kernels(program, flags, gpu) for gpu in KERNEL_GPUS] for flags in SETTINGS.values()]
    for i, row in enumerate([*ROWS, "communication", "**step**"]):
        cells = [", ".join(f"{ms[i]:.3g}" if ms[i] < 1000 else f"{ms[i]:.0f}" for ms in column) for column in columns]
        print(f"| {row} | " + " | ".join(cells) + " |")


def plan(program, model, gpu, ranks, T, batch, micro_batches, storage):
    """(tokens per second of all GPUs, share of the peak, setting), or None where nothing fits."""
    best = None
    for B in micro_batches:
        if batch % (B * ranks):
            continue
        run = subprocess.run([program, "--plan", "--auto", "-m", model, "-p", "bf16", "--gpu", gpu,
                              "--ranks", str(ranks), "-t", str(T), "-b", str(B), "--batch", str(batch), "-d", "none",
                              *storage], capture_output=True, text=True, cwd=ROOT)
        found = re.search(r"^time .*estimated (\S+) s .* (\S+) tok/s$", run.stdout, re.M)
        if found is None or not re.search(r"^fits ", run.stdout, re.M):
            continue
        setting = re.search(r"^ZeRO    (stage \d, -r \S+) ", run.stdout, re.M)[1]
        toks = float(found[2])
        if best is None or toks > best[0]:
            best = toks, f"{setting}, -b {B}"
    return best


def main():
    only_kernels = "--kernels" in sys.argv
    paths = [word for word in sys.argv[1:] if not word.startswith("--")]
    program = str(paths[0] if paths else ROOT / "build/cpu/train_gpt")
    print_kernels(program)
    if only_kernels:
        return
    print()
    print("| model, T | GPUs | " + " | ".join(GPUS) + " |")
    print("|---|---|" + "---|" * len(GPUS))
    for model, T, batch, micro_batches in MODELS:
        for ranks in RANKS:
            cells = []
            for gpu in GPUS:
                cell = plan(program, model, gpu, ranks, T, batch, micro_batches, ["--master", "split"])
                mark = ""
                if cell is None:
                    cell = plan(program, model, gpu, ranks, T, batch, micro_batches,
                                ["--master", "split", "--state-dtype", "bf16"])
                    mark = " (moments in bf16)"
                cells.append("does not fit" if cell is None else
                             f"{cell[0] / 1e3:,.1f}k, {cell[0] / ranks / 1e3:,.1f}k each: {cell[1]}{mark}")
            print(f"| {model}, {T} | {ranks} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
