#!/usr/bin/env python3
"""Estimated tokens per second: what `--plan --auto` of a build with bf16 makes of models, GPUs and numbers of them. A
projection, from rates of single operations (model/step_time.cuh, docs/benchmarks.md); no run has been made.

  dev/step_model.py [PROGRAM]          default build/cpu/train_gpt; prints the table of docs/benchmarks.md
"""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CARDS, RANKS = ["H100", "H200", "B200"], [1, 8, 64]
# Model, tokens of a sequence, sequences of a step, micro-batches to try. The storage is that which loses nothing; one
# GPU of llama3-8b needs moments in bf16 too.
MODELS = [("gpt2", 1024, 512, (8, 64)), ("gpt2-xl", 1024, 1024, (8, 16, 32)), ("llama3-8b", 8192, 128, (1, 2))]


def plan(program, model, card, ranks, T, batch, micro_batches, storage):
    """(tokens per second of all GPUs, share of the peak, setting), or None where nothing fits."""
    best = None
    for B in micro_batches:
        if batch % (B * ranks):
            continue
        run = subprocess.run([program, "--plan", "--auto", "-m", model, "-p", "bf16", "--gpu", card,
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
    program = str(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build/cpu/train_gpt")
    print("| model, T | GPUs | " + " | ".join(CARDS) + " |")
    print("|---|---|" + "---|" * len(CARDS))
    for model, T, batch, micro_batches in MODELS:
        for ranks in RANKS:
            cells = []
            for card in CARDS:
                cell = plan(program, model, card, ranks, T, batch, micro_batches, ["--master", "split"])
                mark = ""
                if cell is None:
                    cell = plan(program, model, card, ranks, T, batch, micro_batches,
                                ["--master", "split", "--state-dtype", "bf16"])
                    mark = " (moments in bf16)"
                cells.append("does not fit" if cell is None else
                             f"{cell[0] / 1e3:,.1f}k, {cell[0] / ranks / 1e3:,.1f}k each: {cell[1]}{mark}")
            print(f"| {model}, {T} | {ranks} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
