#!/usr/bin/env python3
"""plot.py: draw the run logs of train_gpt: losses, learning rate and gradient norm against the step.

    scripts/plot.py RUN [RUN ...] [-o loss.png] [--tokens] [--log]

RUN is a run folder or its log (JSONL). Several runs are drawn in one picture, to compare them. scripts/report.py makes
a page of all that a log holds.
"""
import argparse

from charts import COLORS
from runlog import open_runs, pyplot, smooth


def draw(logs, x_key, log_y):
    plt = pyplot()
    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(9, 9), sharex=True, height_ratios=[3, 1, 1])
    for log_idx, log in enumerate(logs):
        color = COLORS[log_idx % len(COLORS)]
        x, losses = log.series("loss", x_key)
        top.plot(x, losses, color=color, alpha=0.25, linewidth=0.8)
        top.plot(x, smooth(losses), color=color, label=f"{log.name}: training")
        x, val_losses = log.series("val_loss", x_key)
        if x:
            label = f"{log.name}: validation, last {val_losses[-1]:.4f}"
            top.plot(x, val_losses, "o--", color=color, markersize=4, label=label)
        middle.plot(*log.series("lr", x_key), color=color)
        bottom.plot(*log.series("norm", x_key), color=color, linewidth=0.8)
    top.set_ylabel("loss (nats per token)")
    top.legend()
    middle.set_ylabel("learning rate")
    bottom.set_ylabel("gradient norm")
    bottom.set_yscale("log")
    bottom.set_xlabel("step" if x_key == "step" else "tokens")
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
    logs = open_runs(args.runs)
    out = args.out or logs[0].path.parent / "loss.png"
    draw(logs, "tokens_so_far" if args.tokens else "step", args.log).savefig(out, dpi=110)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
