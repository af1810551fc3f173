#!/usr/bin/env python3
"""bench_table.py: the table and the chart of what scripts/bench.sh has measured.

    scripts/bench_table.py FOLDER      reads FOLDER/*.json and *.txt, writes FOLDER/bench.md and bench.png
"""
import json
import pathlib
import platform
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from charts import COLORS  # noqa: E402
from runlog import short  # noqa: E402

PHASES = ["data", "forward", "head", "backward", "recompute", "communication", "optimizer"]


def machine():
    """The processor's name where Linux says it."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration, IndexError):
        return platform.machine()


def complaint(text):
    lines = [line for line in text.splitlines() if line.startswith("train_gpt: ")]
    return lines[-1].removeprefix("train_gpt: ") if lines else "ended without a word"


def cells(name, j):
    step = j["step_ms"]
    return [f"{name} {j['micro_batch']} x {j['seq_len']}", j["precision"], j["recompute"], f"{step['median']:.1f}",
            f"{step['p25']:.1f} to {step['p75']:.1f}", short(j["tokens_per_s"]),
            f"{100 * j['mfu']:.1f}" if j["mfu"] else "", f"{100 * j['product_share']:.1f}",
            f"{j['device_peak_bytes'] / 2**20:.0f}", f"{j['page_faults_per_step']:.1f}"]


def table(rows):
    """rows: (name of the measurement, its JSON or null, what it said)."""
    head = ["model", "precision", "-r", "step, ms", "quartiles", "tok/s", "MFU, %", "of GEMM, %", "device, MiB",
            "page faults"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, j, said in rows:
        row = cells(j["model"], j) if j else [name, *[""] * (len(head) - 2), f"failed: {complaint(said)}"]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def draw(measured):
    """Tokens a second and where the time of a step goes, a bar each."""
    names = [f"{pathlib.Path(j['model']).name} {j['micro_batch']}x{j['seq_len']} {j['precision']} {j['recompute']}"
             for j in measured]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 1.5 + 0.35 * len(names)), sharey=True)
    left.barh(names, [j["tokens_per_s"] for j in measured], color=COLORS[0])
    for i, j in enumerate(measured):
        left.text(j["tokens_per_s"], i, f" {short(j['tokens_per_s'])}", va="center", fontsize=8)
    left.set_xlabel("tokens per second")
    left.invert_yaxis()
    begin = [0.0] * len(names)
    for k, phase in enumerate(PHASES):
        share = [100 * j["phases_ms"][phase] / sum(j["phases_ms"].values()) for j in measured]
        right.barh(names, share, left=begin, color=COLORS[k % len(COLORS)], label=phase)
        begin = [a + b for a, b in zip(begin, share)]
    right.set_xlabel("share of the step, %")
    right.legend(fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.tight_layout()
    return figure


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[1])
    rows = []
    for text in sorted(folder.glob("*.txt"), key=lambda path: path.stat().st_mtime_ns):
        path = text.with_suffix(".json")
        rows.append((text.stem, json.loads(path.read_text()) if path.exists() else None, text.read_text()))
    measured = [j for _, j, _ in rows if j]
    if not measured:
        sys.exit(f"bench_table: nothing was measured in {folder}"
                 + "".join(f"\n  {name}: {complaint(said)}" for name, _, said in rows))
    j = measured[0]
    device = j["device"] if j["device"] != "CPU" else machine()
    ranks = f"{j['num_ranks']} rank{'s' if j['num_ranks'] > 1 else ''} of {j['num_threads']} threads"
    title = f"train_gpt {j['version']} on {device}, {ranks}, {j['date'][:10]}, median of {j['steps']} steps"
    text = f"# {title}\n\n{table(rows)}\n\nMFU: {j['flops_convention']}. GEMM: a large one of the same run.\n"
    (folder / "bench.md").write_text(text)
    figure = draw(measured)
    figure.suptitle(title, fontsize=10, y=1.0, va="bottom")
    figure.savefig(folder / "bench.png", dpi=110, bbox_inches="tight")
    print(text + f"\nwrote {folder}/bench.md, bench.png")
    sys.exit(len(measured) < len(rows))


if __name__ == "__main__":
    main()
