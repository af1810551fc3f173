"""What happens to a run: signals, lost ranks, numbers that go wrong, and what it holds after many steps."""
import json
import os
import re
import signal
import subprocess
import time

import init
import numpy as np
import pytest
from util import (FULL, ROOT, Run, binary, command, environment, gpt2_config, model_write, ranks_of, read_log,
                  shard_write, train_gpt, weights)

V, T = 97, 16
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(gpt2_config(V, 24, T, L=2, NH=3)))
    for split, count, seed in (("train", 9000, 3), ("val", 60000, 4)):
        shard_write(tmp_path / "data" / f"{split}_000000.bin", init.tokens(count, V, seed), V)
    return tmp_path


def flags(folder, *more):
    return ["-m", folder / "model", "--from-scratch", "-d", folder / "data", "-b", 2, "-l", 1e-3, "--warmup", 2,
            "--sample-tokens", 0, *more]


class Started:
    """A run under way on several ranks; its lines are read as they come."""

    def __init__(self, args, ranks, out=None):
        self.folder = out
        args = [*args, "-o", out] if out else args
        self.process = subprocess.Popen(command(args, ranks, "cpu"), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        text=True, env=environment(**ONE_THREAD), cwd=ROOT, stdin=subprocess.DEVNULL)
        self.seen = ""

    def wait_for(self, words):
        while not (line := self.process.stdout.readline()).startswith(words):
            assert line or self.process.poll() is None, self.process.communicate()
            self.seen += line
        self.seen += line

    def send(self, number, rank=None):
        pid = self.process.pid
        os.kill(pid if rank is None else ranks_of(pid)[rank], number)

    def end(self, code=0):
        out, err = self.process.communicate(timeout=60)
        assert self.process.returncode == code, (out[-1000:], err)
        self.process.stdout, self.process.stderr = self.seen + out, err
        return Run(self.process, self.folder)


def assert_goes_on_as_unbroken(args, ranks, broken, unbroken):
    """Resumed, the run has the log of the unbroken one: every step once, the same losses, validations and state."""
    assert broken.log[-1]["step"] < unbroken.log[-1]["step"]
    train_gpt(*args, "--resume", "auto", ranks=ranks, out=broken.folder, **ONE_THREAD)
    lines = [json.loads(line) for line in (broken.folder / "log.jsonl").read_text().splitlines()]
    seen = [(line["step"], "val_loss" in line) for line in lines if "step" in line]
    assert len(seen) == len(set(seen)), "a step or a validation is logged twice"
    keys = ("step", "loss", "norm", "lr", "val_loss", "val_tokens")
    strip = [[{k: entry[k] for k in keys if k in entry} for entry in run.log] for run in (broken, unbroken)]
    assert strip[0] == strip[1]
    assert broken.log[-1]["state_hash"] == unbroken.log[-1]["state_hash"]


# ---- signals ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("moment,stage,name,rank", [
    ("step", 2, "SIGTERM", 1), ("step", 0, "SIGINT", 2), ("step", 1, "SIGUSR2", None),     # None: to mpirun itself
    ("accumulation", 3, "SIGTERM", 2), ("eval", 3, "SIGTERM", 1), ("save", 2, "SIGTERM", 0)])
def test_asked_to_end(folder, moment, stage, name, rank):
    """A signal to one of three ranks: the step is finished, saved, exit code 0, and the rest is as if unbroken."""
    more = {"step": ["-n", 400], "accumulation": ["-n", 8, "-g", 100], "eval": ["-n", 8, "--eval-every", 3],
            "save": ["-n", 400, "--save-every", 3]}[moment]
    args = flags(folder, "-z", stage, "--timeout", 30, *more)
    run = Started(args, 3, folder / "run")
    run.wait_for("step 3/")
    if moment == "accumulation":
        time.sleep(0.05)
    if moment == "save":
        while not list((folder / "run").glob("*.tmp")):
            assert run.process.poll() is None
    run.send(getattr(signal, name), rank)
    broken = run.end()
    last = broken.log[-1]["step"]
    assert f"asked to end: stops after step {last}" in broken.out
    assert broken.checkpoint(last).is_dir()
    if moment == "eval":
        assert last == 3 and "val_loss" not in broken.log[-1], "the signal came after the validation"
    if moment == "save":
        args = [str(a).replace("400", "8") for a in args] if last < 8 else args
    unbroken = train_gpt(*args, ranks=3, out=folder / "unbroken", **ONE_THREAD)
    assert_goes_on_as_unbroken(args, 3, broken, unbroken)


def test_asked_to_save(folder):
    """SIGUSR1: a checkpoint of the step, and on."""
    args = flags(folder, "-n", 1500, "-z", 1)
    run = Started(args, 2, folder / "run")
    run.wait_for("step 3/")
    run.send(signal.SIGUSR1, 1)
    saved = run.end()
    steps = [int(path.name[5:]) for path in sorted((folder / "run").glob("step_*"))]
    assert len(steps) == 2 and 3 <= steps[0] < 1500 == steps[1]
    rest = train_gpt(*args, "--resume", saved.checkpoint(steps[0]), ranks=2, out=folder / "rest", **ONE_THREAD)
    assert rest.series("loss") == saved.series("loss")[steps[0]:]


def test_asked_twice(folder):
    """A second SIGINT ends the run at once, with exit code 1."""
    run = Started(flags(folder, "-n", 5, "-g", 100000), 1, folder / "run")
    run.wait_for("time ")
    time.sleep(0.5)
    run.send(signal.SIGINT)
    time.sleep(0.2)
    assert run.process.poll() is None
    run.send(signal.SIGINT)
    assert "second SIGINT" in run.end(code=1).err
    assert not list((folder / "run").glob("step_*"))


def test_asked_to_end_with_nowhere_to_save(folder):
    run = Started(flags(folder, "-n", 100000, "--log-every", 1), 1)
    run.wait_for("step 3/")
    run.send(signal.SIGTERM)
    assert "nothing is saved without -o" in run.end().out
