"""A run folder: its lock, and checkpoints of a streak of skipped steps."""
import fcntl
import json
import os
import pathlib
import re
import shutil
import socket
import struct
import subprocess
import time

import init
import numpy as np
import pytest
from util import ROOT, command, environment, gpt2_config, model_write, shard_write, train_gpt

V, T = 97, 16
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def args(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(gpt2_config(V, 24, T, L=2, NH=3)))
    shard_write(tmp_path / "data" / "train_000000.bin", init.tokens(9000, V, 3), V)
    return ["-m", tmp_path / "model", "--from-scratch", "-d", tmp_path / "data", "-b", 2, "-l", 1e-3, "--warmup", 2,
            "--sample-tokens", 0]


# ---- the lock ---------------------------------------------------------------------------------------------------
@pytest.fixture
def started():
    """Starts a command, which ends with the test."""
    processes = []

    def start(words):
        processes.append(subprocess.Popen(words, cwd=ROOT, env=environment(**ONE_THREAD), stdout=subprocess.DEVNULL,
                                          stderr=subprocess.DEVNULL))
        return processes[-1]

    yield start
    for process in processes:
        process.terminate()
        process.wait(60)


def until(condition, process, limit_s=60):
    end = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.01)


@pytest.mark.parametrize("ranks", [1, 2])
def test_second_run(tmp_path, args, started, ranks):
    """It is refused and changes nothing; other modes are not; after a kill the folder is free at once."""
    out = tmp_path / "run"
    first = train_gpt(*args, "-n", 2, out=out, **ONE_THREAD)
    process = started(command([*args, "-n", 10**7, "-o", out, "--resume", "auto"], ranks, "cpu"))
    lines = len((out / "log.jsonl").read_text().splitlines())
    until(lambda: len((out / "log.jsonl").read_text().splitlines()) > lines + 2, process)
    holder = re.search(r"pid (\d+)", (out / "lock").read_text())[1]
    names = sorted(path.name for path in out.iterdir())
    again = train_gpt(*args, "-n", 9, "--resume", "auto", ranks=ranks, out=out, ok=False, **ONE_THREAD)
    assert again.code == 1 and len(again.complaint) == 1, again.err
    said = f"another run is writing there, process {holder} on host {socket.gethostname()}, since 20"
    assert f"-o {out}: {said}" in again.complaint[0] and f"kill -TERM {holder}" in again.complaint[0]
    assert sorted(path.name for path in out.iterdir()) == names
    train_gpt("--plan", *args, "--resume", "auto", out=out, **ONE_THREAD)
    train_gpt("-m", first.checkpoint(2), "--export", tmp_path / "export", **ONE_THREAD)
    os.kill(int(holder), 9)
    process.wait(60)
    train_gpt(*args, "-n", 3, "--resume", "auto", out=out, **ONE_THREAD)


def test_lock_that_is_left(tmp_path, args):
    """Some network file systems keep a lock: one of this host whose process is gone is taken over, any other is not."""
    out = tmp_path / "run"
    out.mkdir()
    gone = subprocess.Popen(["true"])
    gone.wait()
    started = pathlib.Path(f"/proc/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[19]
    namespace = os.stat("/proc/self/ns/pid").st_ino
    line = f"host {socket.gethostname()} namespace {namespace} pid {{}} started {{}} since X\n"
    with open(out / "lock", "w+") as lock:
        fcntl.fcntl(lock, fcntl.F_OFD_SETLK, struct.pack("hhqqi", fcntl.F_WRLCK, 0, 0, 0, 0))
        for pid, ticks, here in ((os.getpid(), started, True), (gone.pid, started, False), (os.getpid(), 1, False)):
            (out / "lock").write_text(line.format(pid, ticks))
            run = train_gpt(*args, "-n", 1, "--resume", "auto", out=out, ok=not here, **ONE_THREAD)
            assert ("was left locked by a process of this host that is gone" in run.out) == (not here), run.out
        for holder in (line.replace("host ", "host x").format(gone.pid, 1), line.replace("space ", "space 1").format(
                gone.pid, 1), ""):
            (out / "lock").write_text(holder)
            run = train_gpt(*args, "-n", 1, "--resume", "auto", out=out, ok=False, **ONE_THREAD)
            assert "another run is writing there" in run.complaint[0], holder


NO_LOCKS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
static int no_locks(const char* name, int fd, int op, void* arg)
{
    if (op == F_OFD_SETLK) { errno = ENOLCK; return -1; }
    return ((int (*)(int, int, ...))dlsym(RTLD_NEXT, name))(fd, op, arg);
}
int fcntl(int fd, int op, ...) { va_list a; va_start(a, op); return no_locks("fcntl", fd, op, va_arg(a, void*)); }
int fcntl64(int fd, int op, ...) { va_list a; va_start(a, op); return no_locks("fcntl64", fd, op, va_arg(a, void*)); }
"""


def test_file_system_without_locks(tmp_path, args):
    (tmp_path / "no_locks.c").write_text(NO_LOCKS)
    shim = tmp_path / "no_locks.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", shim, tmp_path / "no_locks.c", "-ldl"], check=True)
    run = train_gpt(*args, "-n", 1, out=tmp_path / "run", LD_PRELOAD=str(shim), **ONE_THREAD)
    assert run.out.count("this file system has no locks (No locks available)") == 1
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "lock").symlink_to(tmp_path / "run" / "run.json")
    link = train_gpt(*args, "-n", 1, out=tmp_path / "link", ok=False, **ONE_THREAD)
    assert f"{tmp_path}/link/lock: cannot be written" in link.complaint[0]


# ---- a streak of skipped steps ----------------------------------------------------------------------------------
def names(folder):
    return sorted(path.name[5:].lstrip("0") for path in folder.glob("step_*"))


def test_streak(tmp_path):
    """A NaN at a position that sequences reach at step 7. `--resume auto` leaves the checkpoints of skipped steps, and
    is as if there had been none; where the streak comes again at once, the one before is next."""
    config = gpt2_config(V, 24, T, L=2, NH=3)
    tensors = init.gpt2_weights(config, 1)
    tensors["transformer.wpe.weight"][12] = np.nan
    shard_write(tmp_path / "data" / "train_000000.bin", init.tokens(9000, V, 3), V)
    args = ["-m", model_write(tmp_path / "bad", config, tensors), "-d", tmp_path / "data", "-b", 2, "--schedule",
            "constant", "--warmup", 0, "--sample-tokens", 0, "--save-every", 1, "--keep", 2, "--allow-nonfinite"]
    reaches, stays, out = [*args, "--seq-ramp", "8:6"], [*args, "--seq-ramp", "8:99"], tmp_path / "run"
    train_gpt(*reaches, "-n", 50, out=out, ok=False, **ONE_THREAD)
    shutil.copytree(out, tmp_path / "again")
    plan = train_gpt("--plan", *stays, "-n", 9, "--resume", "auto", out=out, **ONE_THREAD)
    assert "resuming from before it" in plan.out and "7" in names(out)
    rest = train_gpt(*stays, "-n", 9, "--resume", "auto", out=out, **ONE_THREAD)
    assert "skipped checkpoints of steps 7 to 1" in rest.out and "renamed to step_*.skipped" in rest.out
    assert f"resume  {out}/step_00000006" in rest.out
    assert {"8", "9", "7.skipped", "8.skipped"} <= set(names(out)) and "7" not in names(out)
    unbroken = train_gpt(*stays, "-n", 9, out=tmp_path / "unbroken", **ONE_THREAD)
    assert [entry["loss"] for entry in rest.log][6:] == unbroken.series("loss")[6:] and len(rest.log) == 9
    assert rest.log[-1]["state_hash"] == unbroken.log[-1]["state_hash"]
    second = train_gpt(*reaches, "-n", 50, "--resume", "auto", out=tmp_path / "again", ok=False, **ONE_THREAD)
    assert "step_00000006" in second.out and "no step could be taken from the checkpoint" in second.complaint[0]
    assert "6.skipped" in names(tmp_path / "again")
    third = train_gpt(*stays, "-n", 9, "--resume", "auto", out=tmp_path / "again", **ONE_THREAD)
    assert f"resume  {tmp_path}/again/step_00000005" in third.out
    assert third.log[-1]["state_hash"] == unbroken.log[-1]["state_hash"]


def test_streak_of_a_loss_scale(tmp_path, args):
    """With a dynamic loss scale skipped steps are how it is found: up to --hysteresis of them are no streak."""
    if "fp16" not in re.search(r"^precisions .*$", train_gpt("--report").out, re.M)[0]:
        pytest.skip("fp16 is not built")
    args = [*args, "-p", "fp16", "--loss-scale-window", 2, "--save-every", 1, "--initial-scale-power", 14]
    skipped = train_gpt(*args, "-n", 40, out=tmp_path / "whole", **ONE_THREAD).series("skipped")
    end = next(i + 1 for i in range(1, 40) if skipped[i - 1:i + 1] == [0, 1])
    out = tmp_path / "run"
    train_gpt(*args, "-n", end, out=out, **ONE_THREAD)
    rest = train_gpt(*args, "-n", end + 1, "--resume", "auto", out=out, **ONE_THREAD)
    assert f"resume  {out}/step_{end:08d}" in rest.out and not list(out.glob("*.skipped"))
