#!/usr/bin/env python3
"""plot.py: draw the run logs of train_gpt: losses, learning rate and gradient norm against the step.

    scripts/plot.py RUN [RUN ...] [-o loss.png] [--tokens] [--log]

RUN is a run folder or its log (JSONL). Several runs are drawn in one picture, to compare them.
"""
import argparse
import json
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def read_log(path):
    """The step objects of a log. A resumed run repeats steps: the last one said counts. A torn last line is dropped."""
    steps = {}
    lines = path.read_text().splitlines()
    for line_idx, line in enumerate(lines):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            if line_idx == len(lines) - 1:
                break
            sys.exit(f"plot: {path}, line {line_idx + 1}: not JSON: {line[:60]!r}")
        if isinstance(entry, dict) and "step" in entry:
            steps.setdefault(entry["step"], {}).update(entry)
    return [steps[step] for step in sorted(steps)]


def find_log(run):
    path = pathlib.Path(run)
    if path.is_dir():
        logs = sorted(path.glob("*.jsonl"))
        if len(logs) != 1:
            sys.exit(f"plot: {path} holds {len(logs)} logs (*.jsonl), expected one")
        path = logs[0]
    if not path.exists():
        sys.exit(f"plot: there is no {path}")
    return path


def series(log, key, x_key):
    points = [(e[x_key], e[key]) for e in log if e.get(key) is not None and x_key in e]
    return [x for x, _ in points], [y for _, y in points]


def smooth(values, weight=0.9):
    """Exponential mean, corrected for its start."""
    smoothed, mean = [], 0.0
    for n, value in enumerate(values, 1):
        mean = weight * mean + (1 - weight) * value
        smoothed.append(mean / (1 - weight**n))
    return smoothed


def draw(runs, x_key, log_y):
    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(9, 9), sharex=True, height_ratios=[3, 1, 1])
    for run_idx, (name, log) in enumerate(runs):
        color = f"C{run_idx}"
        x, losses = series(log, "loss", x_key)
        top.plot(x, losses, color=color, alpha=0.25, linewidth=0.8)
        top.plot(x, smooth(losses), color=color, label=f"{name}: training")
        x, val_losses = series(log, "val_loss", x_key)
        if x:
            label = f"{name}: validation, last {val_losses[-1]:.4f}"
            top.plot(x, val_losses, "o--", color=color, markersize=4, label=label)
        middle.plot(*series(log, "lr", x_key), color=color)
        bottom.plot(*series(log, "norm", x_key), color=color, linewidth=0.8)
    top.set_ylabel("loss (nats per token)")
    top.legend()
    middle.set_ylabel("learning rate")
    bottom.set_ylabel("gradient norm")
    bottom.set_yscale("log")
    bottom.set_xlabel("tokens" if x_key == "tokens" else "step")
    if log_y:
        top.set_yscale("log")
    for axes in (top, middle, bottom):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    return figure


def main():
    parser = argparse.ArgumentParser(description="draw the run logs of train_gpt")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder or its log")
    parser.add_argument("-o", "--out", help="picture to write (default: loss.png in the first run's folder)")
    parser.add_argument("--tokens", action="store_true", help="tokens instead of steps on the x axis")
    parser.add_argument("--log", action="store_true", help="logarithmic loss axis")
    args = parser.parse_args()
    paths = [find_log(run) for run in args.runs]
    runs = [(path.parent.name or path.name, read_log(path)) for path in paths]
    for path, (_, log) in zip(paths, runs):
        if not any("loss" in entry for entry in log):
            sys.exit(f"plot: {path} holds no step with a loss yet")
    out = args.out or paths[0].parent / "loss.png"
    draw(runs, "tokens" if args.tokens else "step", args.log).savefig(out, dpi=110)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
