#!/usr/bin/env python3
"""bench_save.py: the cost of checkpoints to training: GPT-2 124M, B=4, T=64, fp32, one rank on all cores of this
machine.

One run saves at every 20th step. The 10 steps during a save are compared with the 10 steps after it, in wall time and
in CPU time of all threads, so that drift of the machine matters little, and other load even less in CPU time. The
program's own counts are printed too: how long training waited, and the CPU time of the saving threads. The cost of a
save is given as a share of 20 steps without one.
    dev/bench_save.py [NUM_SAVES]      default 4: 100 steps, about 2 minutes on two quiet cores
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "dev"), str(ROOT / "test")]
import init  # noqa: E402
import util  # noqa: E402

WINDOW = 10


def cpu_seconds(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def step_times(folder, num_steps):
    """(wall, CPU) seconds at the end of each step, and the program's counts of each save, whose lines are printed
    too."""
    command = [util.binary("cpu"), "-m", "gpt2", "-d", folder / "data", "-b", 4, "-t", 64, "-n", num_steps,
               "--save-every", 2 * WINDOW, "--keep", 1, "-o", folder / "run", "--sample-tokens", 0]
    times, counted = {}, []
    with subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("step "):     # a step is printed when the next is done, except the last
                times[int(line[5:].partition("/")[0])] = time.monotonic(), cpu_seconds(process.pid)
            elif line.startswith("saved"):
                print(f"step {max(times)}: {line.strip()}", flush=True)
                counted.append(sum(map(float, re.findall(r"(?:waited|took) ([\d.]+) s", line))))
    return times, counted


def main():
    num_saves = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        folder = pathlib.Path(folder)
        util.shard_write(folder / "data" / "train_000000.bin", init.tokens(100000, 50257, 1), 50257)
        times, counted = step_times(folder, 2 * WINDOW * (num_saves + 1))
    for unit, name in enumerate(["wall time", "CPU time of all threads"]):
        costs, steps = [], []
        for save in range(2 * WINDOW, 2 * WINDOW * num_saves + 1, 2 * WINDOW):
            begin, middle, end = (times[save - 1 + i * WINDOW][unit] for i in range(3))   # the save's step is the first
            costs.append(middle - begin - (end - middle))
            steps.append((end - middle) / WINDOW)
        cost, step = sum(costs) / num_saves, sum(steps) / num_saves
        print(f"{name}: a save costs {cost:.2f} s ({', '.join(f'{c:.2f}' for c in costs)}), a step {step:.3f} s: "
              f"{100 * cost / (20 * step):.1f} % at one save in 20 steps")
        if unit == 0:
            cost = sum(counted[:-1]) / num_saves     # the last save is at the end of the run, which waits for the disk
            print(f"counted: training waits and threads work {cost:.2f} s for a save: {100 * cost / (20 * step):.1f} %")


if __name__ == "__main__":
    main()
