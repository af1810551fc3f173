#!/usr/bin/env python3
"""bench_save.py: what a checkpoint costs training: GPT-2 124M, B=4, T=64, fp32, one rank on all cores of this machine.

One run saves at every 40th step. Wall time of the 20 steps that a save falls into against that of the 20 steps after
them, which none does: so a machine that drifts does not matter. Prints each pair and the mean.
    dev/bench_save.py [NUM_SAVES]      default 3: 140 steps, about 3 minutes on two cores
"""
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "dev"), str(ROOT / "test")]
import init  # noqa: E402
import util  # noqa: E402


def step_times(folder, num_steps):
    """When each step was seen, and what was said of saves."""
    command = [util.binary("cpu"), "-m", "gpt2", "-d", folder / "data", "-b", 4, "-t", 64, "-n", num_steps,
               "--save-every", 40, "--keep", 1, "-o", folder / "run", "--sample-tokens", 0]
    times = {}
    with subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("step "):
                times[int(line[5:].partition("/")[0])] = time.monotonic()
            elif line.startswith("saved"):
                print(f"  step {max(times)}: {line.strip()}", flush=True)
    return times


def main():
    num_saves = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    costs = []
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        folder = pathlib.Path(folder)
        util.shard_write(folder / "data" / "train_000000.bin", init.tokens(100000, 50257, 1), 50257)
        times = step_times(folder, 40 * num_saves + 39)
    for save in range(40, 40 * num_saves + 1, 40):
        begin, middle, end = save - 1, save + 19, save + 39    # the state hash of the save's step is in the first part
        end = min(end, max(times) - 1)
        with_save, without = times[middle] - times[begin], (times[end] - times[middle]) * 20 / (end - middle)
        costs.append(with_save / without - 1)
        print(f"save at step {save}: 20 steps in {with_save:.2f} s, the next 20 in {without:.2f} s: "
              f"{100 * costs[-1]:+.1f} %")
    print(f"one save in 20 steps costs {100 * sum(costs) / len(costs):.1f} % of the step time")


if __name__ == "__main__":
    main()
