#!/usr/bin/env python3
"""watch.py: shows a running run in the terminal: progress bar, time left, losses, speed, and the loss as a sparkline.

    scripts/watch.py RUN [RUN ...] [--every SECONDS] [--once]

RUN is a run folder or its log. Reads only the log, so it works from any machine that sees the folder.
"""
import argparse
import shutil
import sys
import time

from runlog import duration, median, open_runs, plain, short, smooth

BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values, width):
    """Means of `width` pieces, scaled to eighths of a line."""
    if not values:
        return ""
    width = min(width, len(values))
    means = []
    for i in range(width):
        piece = values[i * len(values) // width:(i + 1) * len(values) // width]
        means.append(sum(piece) / len(piece))
    low, span = min(means), max(means) - min(means)
    return "".join(BLOCKS[int((m - low) / span * 7.999) if span else 0] for m in means)


def bar(share, width):
    """Filled to an eighth of a character."""
    eighths = int(share * width * 8)
    partial = " ▏▎▍▌▋▊▉"[eighths % 8] if eighths < width * 8 else ""
    return ("█" * (eighths // 8) + partial).ljust(width)


def picture(log, columns, now):
    header, last = log.header, log.steps[-1]
    step, num_steps = last["step"], max(header.get("num_steps", 0), last["step"])
    recent = [s["step_ms"] for s in log.steps[-50:] if s.get("step_ms")]
    step_s = (median(recent) or 0) / 1e3
    silent_s = now - log.path.stat().st_mtime
    done = step >= num_steps
    state = "done" if done else f"{duration((num_steps - step) * step_s)} left"
    if not done and silent_s > max(60, 10 * step_s):
        state = f"silent for {duration(silent_s)}"
    width = max(10, min(60, columns - 40))
    _, losses = log.series("loss")
    val, bits = log.last("val_loss"), log.last("bits_per_byte")
    ranks = header.get("num_ranks", 1)
    lines = [f"{log.name}   {header.get('model_name', '')}, {short(header.get('num_params'))} parameters, "
             f"{ranks} rank{'s' * (ranks > 1)} on {header.get('device', '?')}",
             f"|{bar(step / max(1, num_steps), width)}| {step}/{num_steps}  {state}"]
    line = "loss " + (f"{losses[-1]:.4f}" if losses else "n/a")
    if len(losses) > 1:
        line += f"  mean {smooth(losses)[-1]:.4f}"
    if val is not None:
        line += f"  val {val:.4f}" + (f" = {bits:.4f} bits per byte" if bits is not None else "")
    lines.append(line)
    lines.append("     " + sparkline(smooth(losses, 0.5), width))
    line = f"lr {last.get('lr') or 0:.2e}  norm {log.last('norm') or 0:.3f}  {step_s * 1e3:.0f} ms  " \
           f"{short(log.last('tok_per_s'))} tok/s  {short(last['tokens_so_far'])} tokens"
    if last.get("loss_scale") is not None:
        line += f"  scale {last['loss_scale']:g}"
    skipped = sum(s.get("skipped", 0) for s in log.steps)
    lines.append(line + (f"  {skipped} skipped" if skipped else ""))
    return [plain(line)[:columns] for line in lines]


def main():
    parser = argparse.ArgumentParser(description="watch runs of train_gpt in the terminal")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder or its log")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two looks (1)")
    parser.add_argument("--once", action="store_true", help="print it once")
    args = parser.parse_args()
    drawn = 0
    while True:
        columns = shutil.get_terminal_size().columns
        logs = open_runs(args.runs, need_loss=False)
        lines = []
        for log in logs:
            lines += picture(log, columns, time.time()) if log.steps else [plain(f"{log.name}   no step yet")]
        if drawn:
            sys.stdout.write(f"\033[{drawn}A\033[J")
        print("\n".join(lines), flush=True)
        drawn = len(lines)
        over = all(log.steps and log.steps[-1]["step"] >= log.header.get("num_steps", 0) for log in logs)
        if args.once or over:
            return
        time.sleep(args.every)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        pass
