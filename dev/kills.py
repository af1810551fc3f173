#!/usr/bin/env python3
"""Kills under scripts/supervise.sh, which nobody watches: the run must end with the bits of one that was never stopped.
    dev/kills.py [--kills 200] [--ranks 2] [--steps 40000] [--seed 1] [--binary build/cpu/train_gpt]

A tiny model is trained twice: under supervise.sh, where at random moments, set-up and saves included, one of the ranks
or mpirun itself gets SIGKILL, and unbroken. Compared are every loss and norm of the log and the state hash at the end.
--min-ranks keeps the number of ranks, since other numbers of ranks have other bits.
"""
import argparse
import collections
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "test"), str(ROOT / "dev")]
import init  # noqa: E402
from util import environment, gpt2_config, ranks_of, read_log, shard_write  # noqa: E402

V, T = 97, 16


def launcher_of(script):
    found = subprocess.run(["pgrep", "-P", str(script), "mpirun"], capture_output=True, text=True).stdout.split()
    return int(found[0]) if found else 0


def kill_one(script, chance):
    """SIGKILL to mpirun or one of its ranks; its name, or None if there is none now."""
    launcher = launcher_of(script)
    if launcher == 0:
        return None
    targets = {"mpirun": launcher, **{f"rank {rank}": pid for rank, pid in ranks_of(launcher).items()}}
    name = chance.choice(sorted(targets))
    try:
        os.kill(targets[name], signal.SIGKILL)
    except ProcessLookupError:
        return None
    return name if len(targets) > 1 else "mpirun, in set-up"


def steps_follow(log, script):
    """Waits for the log to grow."""
    def length():
        return log.stat().st_size if log.exists() else 0

    before = length()
    while length() <= before and script.poll() is None:
        time.sleep(0.02)
        before = min(before, length())                               # a resume has cut it


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--binary", default=ROOT / "build/cpu/train_gpt")
    o = parser.parse_args()
    if pathlib.Path(o.binary).name != "train_gpt":
        parser.error("ranks are found by the program's name: give a --binary that is called train_gpt")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kills-"))
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(gpt2_config(V, 24, T, L=2, NH=3)))
    shard_write(folder / "data" / "train_000000.bin", init.tokens(90000, V, 3), V)
    args = [o.binary, "-m", folder / "model", "--from-scratch", "-d", folder / "data", "-b", 2, "-z", 2,
            "-l", 1e-3, "-n", o.steps, "--save-every", 10, "--keep", 3, "--sample-tokens", 0, "--log-every", 1000,
            "--timeout", 20]
    env, ranks = environment(OMP_NUM_THREADS="1"), str(o.ranks)
    print(f"in {folder}", flush=True)
    chance, killed, begun = random.Random(o.seed), collections.Counter(), time.monotonic()
    said = open(folder / "supervise.log", "w")
    script = subprocess.Popen([ROOT / "scripts/supervise.sh", ranks, "--min-ranks", ranks, "--retries", str(o.kills),
                               *map(str, args), "-o", folder / "run"], env=env, stdout=said, stderr=subprocess.STDOUT)
    while sum(killed.values()) < o.kills and script.poll() is None:
        if chance.random() < 0.25:
            time.sleep(chance.uniform(0, 4))                         # any moment
        else:
            steps_follow(folder / "run" / "log.jsonl", script)       # with steps, and saves, since the last kill
            time.sleep(chance.uniform(0, 1.5))
        if name := kill_one(script.pid, chance):
            killed[name] += 1
    if script.poll() is not None:
        print(f"ended with {script.returncode} after {sum(killed.values())} kills, see {folder}/supervise.log; "
              "give more --steps if it was done", flush=True)
    code, took_s = script.wait(), time.monotonic() - begun
    subprocess.run(["mpirun", "--oversubscribe", "-np", ranks, *map(str, args), "-o", folder / "unbroken"], env=env,
                   check=True, stdout=subprocess.DEVNULL)
    series = [[{k: entry.get(k) for k in ("step", "loss", "norm")} for entry in read_log(folder / name / "log.jsonl")]
              for name in ("unbroken", "run")]
    hashes = [read_log(folder / name / "log.jsonl")[-1]["state_hash"] for name in ("unbroken", "run")]
    text = (folder / "supervise.log").read_text()
    print(f"{sum(killed.values())} kills in {took_s:.0f} s ({dict(killed)}), "
          f"{text.count('ranks, from')} starts, {text.count('another run is writing there')} of them refused, "
          f"{len(list((folder / 'run').glob('*.damaged*')))} damaged checkpoints, exit code {code}")
    same = series[0] == series[1] and hashes[0] == hashes[1]
    print(f"state hash {hashes[1]}: {'the bits' if same else 'NOT the bits'} of the unbroken run, "
          f"{len(series[1])} steps")
    sys.exit(not same or code != 0 or sum(killed.values()) < o.kills)


if __name__ == "__main__":
    main()
