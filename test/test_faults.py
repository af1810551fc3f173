"""Faults of a run: signals, lost ranks, non-finite gradients, loss spikes; and memory after many steps."""
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import time

import init
import numpy as np
import pytest
from util import (FULL, ROOT, Run, binary, command, environment, gpt2_config, llama_config, model_write, num_gpus,
                  ranks_of, read_log, saved_bytes, shard_write, train_gpt)

V, T = 97, 16
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(gpt2_config(V, 24, T, L=2, NH=3)))
    for split, count, seed in (("train", 9000, 3), ("val", 200000, 4)):
        shard_write(tmp_path / "data" / f"{split}_000000.bin", init.tokens(count, V, seed), V)
    return tmp_path


def flags(folder, *more, micro_batch=2):
    return ["-m", folder / "model", "--from-scratch", "-d", folder / "data", "-b", micro_batch, "-l", 1e-3,
            "--warmup", 2, "--sample-tokens", 0, *more]


def hears_sighup():
    """Also where the tests run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Started:
    """A run under way on several ranks; its lines are read as they come."""

    def __init__(self, args, ranks, out=None, device="cpu", wrapper=(), **env):
        self.folder = out
        args = [*args, "-o", out] if out else args
        if not binary(device).exists():
            pytest.skip(f"{device} is not built")
        self.process = subprocess.Popen(command(args, ranks, device, wrapper), stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True, env=environment(**ONE_THREAD, **env),
                                        cwd=ROOT, stdin=subprocess.DEVNULL, preexec_fn=hears_sighup)
        self.seen = ""
        self.ranks = {None: self.process.pid}            # None: the launcher

    def wait_for(self, words):
        """Reads up to a line that begins so; first finds the ranks' processes, since that takes a while."""
        self.seen += self.process.stdout.readline()
        self.ranks.update(ranks_of(self.process.pid))
        while not (line := self.process.stdout.readline()).startswith(words):
            assert line or self.process.poll() is None, self.process.communicate()
            self.seen += line
        self.seen += line

    def send(self, number, rank=None):
        os.kill(self.ranks[rank], number)

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
    seen = [(line["step"], "val_loss" in line) for line in lines if "loss" in line or "val_loss" in line]
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
    more = {"step": ["-n", 300, "-g", 12], "accumulation": ["-n", 20, "-g", 200], "eval": ["-n", 8, "--eval-every", 3],
            "save": ["-n", 300, "-g", 8, "--save-every", 3]}[moment]
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
    unbroken = train_gpt(*args, ranks=3, out=folder / "unbroken", **ONE_THREAD)
    assert_goes_on_as_unbroken(args, 3, broken, unbroken)


def test_asked_to_save(folder):
    """SIGUSR1: saves a checkpoint of the step and continues."""
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


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_asked_to_end_with_nowhere_to_save(folder, name):
    run = Started(flags(folder, "-n", 100000, "--log-every", 1), 1)
    run.wait_for("step 3/")
    run.send(getattr(signal, name))
    assert "nothing is saved without -o" in run.end().out


def test_nohup(folder):
    """SIGHUP that is ignored stays ignored."""
    run = Started(flags(folder, "-n", 100000, "--log-every", 1), 1, wrapper=["nohup"])
    run.wait_for("step 3/")
    run.send(signal.SIGHUP)
    time.sleep(0.2)
    run.wait_for("step 4")                 # 40, 400: later ones
    run.send(signal.SIGTERM)
    assert "asked to end" in run.end().out


@pytest.mark.parametrize("ranks,device,seed", [(1, "cpu", 0), (2, "cpu", 0), (2, "emu", 1)])
def test_ends_after_the_step_under_way(folder, ranks, device, seed):
    """A signal is of the step under way when it comes, which is the last: the one after those in the log. With EMU_SEED
    the host reads a result one step late, as on a GPU: one step more, and another one that is not in the log yet."""
    grad_accum = {"cpu": 1500, "emu": 6}[device]
    run = Started(flags(folder, "-n", 100, "-g", grad_accum, "-z", ranks - 1), ranks, folder / "run", device=device,
                  EMU_SEED=str(seed))
    run.wait_for("step 1/")
    time.sleep(0.1)
    run.send(signal.SIGTERM, ranks - 1 if ranks > 1 else None)
    logged = read_log(folder / "run" / "log.jsonl")[-1]["step"]
    last = run.end().log[-1]
    assert logged < last["step"] <= logged + (3 if seed else 1) and "state_hash" in last
    assert run.folder.joinpath(f"step_{last['step']:08d}", "state.json").exists()


def catches(pid, number):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16) >> (number - 1) & 1


@pytest.mark.parametrize("name,ranks", [("SIGTERM", 1), ("SIGINT", 1), ("SIGHUP", 1), ("SIGUSR2", 1), ("SIGTERM", 2)])
def test_signal_during_set_up(folder, name, ranks):
    """Before the first step a signal ends the run at once, with a sentence. Set-up waits at a shard that is a pipe."""
    (folder / "data" / "train_000000.bin").unlink()
    os.mkfifo(folder / "data" / "train_000000.bin")
    run, number, rank = Started(flags(folder), ranks), getattr(signal, name), ranks - 1 or None
    for _ in range(400):
        run.ranks.update(ranks_of(run.process.pid))
        if rank in run.ranks and catches(run.ranks[rank], number):
            break
        time.sleep(0.05)
    run.send(number, rank)
    err = run.end(code=1).err
    if ranks == 1:
        assert err == f"train_gpt: ended by {name} outside of training: nothing is saved\n"
    else:
        assert re.match(r"train_gpt: rank 1: ended by SIGTERM(: step 0, in | outside of training)", err), err


def test_stopped_as_a_whole(folder):
    """All ranks are stopped for longer than --timeout, and continued: the run is finished. test_lost_rank: one rank."""
    run = Started(flags(folder, "-n", 150, "-g", 8, "-z", 2, "--timeout", 3), 2)
    run.wait_for("step 3/")
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for rank in (0, 1):
            run.send(number, rank)
        time.sleep(4.5 if number == signal.SIGSTOP else 0)
    assert "step 150/150" in run.end().out


def test_dead_link(folder):
    """An error of NCCL in what is enqueued ends the run at once, not after --timeout."""
    link = folder / "dead"
    run = Started(flags(folder, "-n", 100000, "-z", 2), 2, TRAIN_GPT_DEAD_LINK=str(link))
    run.wait_for("step 2/")
    link.touch()
    begun = time.monotonic()
    complaint = run.end(code=1).complaint
    assert time.monotonic() - begun < 20 and len(complaint) == 1
    assert re.search(r"rank [01]: NCCL reports: remote process exited or there was a network error: step \d+, in ",
                     complaint[0])


# ---- what must be equal on all ranks -----------------------------------------------------------------------------
def said_apart(folder, first, second):
    """Rank 0 runs one command, rank 1 another; returns the message."""
    words = [str(word) for word in ["mpirun", "--oversubscribe", "-np", 1, *first, ":", "-np", 1, *second]]
    process = subprocess.run(words, capture_output=True, text=True, timeout=60, env=environment(**ONE_THREAD),
                             cwd=folder)
    assert process.returncode == 1, process.stderr
    return Run(process, None).complaint[0]


def test_ranks_that_differ(folder):
    args = ["-m", "d2", "-t", 16, "-d", "data", "-n", 2, "--sample-tokens", 0]
    program, other = binary("cpu"), folder / "other"
    other.write_bytes(program.read_bytes() + b"\0")
    other.chmod(0o755)
    differs = "rank 1 differs from rank 0 in the"
    assert f"{differs} flags" in said_apart(folder, [program, *args], [program, *args, "-s", 7])
    assert f"{differs} executable file" in said_apart(folder, [program, *args], [other, *args])
    for rank in range(2):
        shard_write(folder / str(rank) / "data" / "train_000000.bin", init.tokens(900, V, 3 + rank), V)
    elsewhere = ["sh", "-c", f'cd $OMPI_COMM_WORLD_RANK && exec {program} "$@"', "sh", *args]
    assert f"{differs} token shards" in said_apart(folder, elsewhere, elsewhere)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_refusal_is_one_sentence(folder, ranks):
    """No banner of Open MPI, with --quiet of several ranks; all leave by themselves, so that it has nothing to say."""
    env = environment(**ONE_THREAD)
    if ranks == 1:                                   # as root Open MPI would complain
        for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
            env.pop(name, None)
    for args, code in ((["-m", folder / "nowhere"], 1), (["-m", "d2", "--batch", 3, "-b", 2, "--plan"], 2)):
        words = command(args, ranks, "cpu")
        if ranks > 1:
            words.insert(1, "--quiet")
        process = subprocess.run(words, capture_output=True, text=True, timeout=60, env=env, cwd=ROOT)
        who = "" if ranks == 1 else "rank 0: "
        assert process.returncode == code and process.stderr.count("\n") == 1, process.stderr
        assert process.stderr.startswith(f"train_gpt: {who}")
    if ranks > 1:
        loud = train_gpt("-m", folder / "nowhere", ranks=ranks, ok=False)
        assert len(loud.complaint) == 1 and "MPI_ABORT" not in loud.err, loud.err


@pytest.mark.skipif(os.geteuid() != 0, reason="another file under the same name needs root")
def test_the_rank_that_failed_is_named(folder):
    """Rank 1 alone sees a file of a checkpoint that was cut short, in the folder of all: rank 0, whose file is sound,
    says so of rank 1."""
    run = train_gpt(*flags(folder, "-n", 1), ranks=2, out=folder / "run", **ONE_THREAD)
    weights = run.checkpoint(1) / "model.safetensors"
    (folder / "short").write_bytes(b"")
    script = (f'[ $OMPI_COMM_WORLD_RANK = 0 ] || exec unshare -m sh -c "mount --bind {folder}/short {weights}; '
              'exec \\"\\$@\\"" sh "$@"; exec "$@"')
    refused = train_gpt("--resume", folder / "run", "-d", folder / "data", "-b", 2, "-n", 2, ranks=2,
                        wrapper=["sh", "-c", script, "sh"], ok=False, **ONE_THREAD)
    assert len(refused.complaint) == 1
    assert refused.complaint[0].startswith(f"train_gpt: rank 1: {weights}: has 0 bytes")


@pytest.mark.skipif(os.geteuid() != 0, reason="a second host name needs root")
def test_the_host_is_named(folder):
    """Of several hosts a message has the host too. The second one is this machine under another name."""
    shell = folder / "rsh"
    shell.write_text("#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nhost=$1; shift\n"
                     'exec unshare --uts bash -c \'hostname "$1"; shift; eval "$@"\' - "$host" "$@"\n')
    shell.chmod(0o755)
    hosts = f"{socket.gethostname()}:1,other:1"
    words = ["mpirun", "--quiet", "--mca", "plm_rsh_agent", shell, "--host", hosts, "-np", 2]
    for name in ("oob_tcp_if_include", "btl_tcp_if_include"):
        words[2:2] = ["--mca", name, "lo"]
    at = 'test $OMPI_COMM_WORLD_RANK = 0 || cd /; exec "$@"'
    words += ["sh", "-c", at, "sh", binary("cpu"), "-m", "d2", "-d", "data", "-n", 1]
    process = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=60, cwd=folder,
                             env=environment(**ONE_THREAD))
    # Ahead of it may be the line of a rank 0 that the launcher has ended meanwhile.
    complaints = [line for line in process.stderr.splitlines() if not re.match("train_gpt: rank 0 on .*SIGTERM", line)]
    assert process.returncode == 1 and complaints[0].startswith("train_gpt: rank 1 on other: data: no file of")


def test_another_mpi(folder):
    """Started by the launcher of another MPI, each process would train as the only rank."""
    run = train_gpt(*flags(folder, "-n", 1), ok=False, PMI_SIZE="2", PMI_RANK="1")
    assert run.code == 1 and "the launcher started 2 ranks (PMI_SIZE), MPI finds 1" in run.complaint[0]


def test_no_gpu():
    """The CUDA build, which scripts/test.sh compiles here for its registers, on a machine without a GPU."""
    program = ROOT / "build/spills/train_gpt"
    if not program.exists() or num_gpus() > 0:
        pytest.skip("no CUDA build, or a GPU")
    process = subprocess.run([program, "-n", "1"], capture_output=True, text=True, timeout=60, env=environment())
    said = [line for line in process.stderr.splitlines() if line.startswith("train_gpt: ")]
    assert process.returncode == 1 and len(said) == 1, process.stderr
    assert said[0].startswith("train_gpt: no CUDA device: ") and said[0].endswith("builds for this machine")


# ---- lost ranks --------------------------------------------------------------------------------------------------
def supervise(folder, ranks, *args, more=()):
    words = [str(ROOT / "scripts/supervise.sh"), str(ranks), *more, str(binary("cpu")), *map(str, args)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
                            env=environment(**ONE_THREAD), stdin=subprocess.DEVNULL)


def launcher_of(script):
    """The mpirun that supervise.sh has started; 0 between two starts."""
    found = subprocess.run(["pgrep", "-P", str(script), "mpirun"], capture_output=True, text=True).stdout.split()
    return int(found[0]) if found else 0


def lose_a_rank(process, launcher=0):
    """Kills the second of three ranks of the mpirun under way, another one than `launcher`, which is returned."""
    while True:
        assert process.poll() is None
        running = launcher_of(process.pid)
        if running not in (0, launcher) and len(ranks_of(running)) == 3:
            os.kill(ranks_of(running)[1], signal.SIGKILL)
            return running
        time.sleep(0.01)


def supervise_with_losses(folder, args, awaited):
    """The output if a rank is killed as soon as the run folder has a file, and another in the next start at once."""
    process = supervise(folder, 3, *args, "-o", folder / "run")
    while not list((folder / "run").glob(awaited)):
        assert process.poll() is None
        time.sleep(0.01)
    lose_a_rank(process, lose_a_rank(process))
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert out.count("1 ranks lost") == 2 and out.count("supervise: 3 ranks, from") == 2 and "supervise: done" in out
    return out


def test_supervise(folder):
    """One of three ranks is killed, which is started again, and once more before there is a new checkpoint: two
    continue with the same global batch and reach the losses of an unbroken run."""
    args = flags(folder, "-g", 4, "-n", 60, "--save-every", 10, "-z", 2, "--timeout", 20, micro_batch=1)
    out = supervise_with_losses(folder, args, "step_*0")
    assert "at most 2 from here on" in out and "supervise: 2 ranks, from" in out
    assert "batch   12 sequences = 1 per micro-step x 6 micro-steps x 2 ranks" in out
    unbroken = train_gpt(*args, ranks=3, out=folder / "unbroken", **ONE_THREAD)
    log = read_log(folder / "run" / "log.jsonl")
    assert [entry["step"] for entry in log] == list(range(1, 61))
    assert [entry["loss"] for entry in log] == pytest.approx(unbroken.series("loss"), rel=1e-5)


def test_supervise_one_rank(folder):
    """It is killed and started again, with the bits of an unbroken run; SIGTERM between two starts ends the script."""
    args = flags(folder, "-n", 1500, "--save-every", 500)
    process = supervise(folder, 1, *args, "-o", folder / "run")
    while not (folder / "run" / "step_00000500").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(ranks_of(launcher_of(process.pid))[0], signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and out.count("supervise: 1 ranks, from") == 2, out
    unbroken = train_gpt(*args, out=folder / "unbroken", **ONE_THREAD)
    assert read_log(folder / "run" / "log.jsonl")[-1]["state_hash"] == unbroken.log[-1]["state_hash"]
    process = supervise(folder, 1, "-d", folder / "nowhere", "-o", folder / "other", more=["--retries", "9"])
    while "exit code 1" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "asked to end: not started again" in out and "ranks, from" not in out


@pytest.mark.parametrize("ranks,batch,tp,said", [
    (7, 12, ["--tp", "2"], "supervise: 6 ranks, from"), (7, 4, ["--tp=2"], "supervise: 4 ranks, from"),
    (5, 8, ["--tensor-model-parallel-size", "2"], "supervise: 4 ranks, from"), (7, 12, [], "supervise: 6 ranks, from"),
    (3, 12, ["--tp", "4"], "3 ranks remain, --tp 4 needs 4 for a replica of the model: given up")])
def test_supervise_replicas(tmp_path, ranks, batch, tp, said):
    """With --tp a replica of the model is lost as a whole, and the batch divides over the others."""
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/bash\n")
    mpirun.chmod(0o755)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps({"global_batch": batch}))
    process = subprocess.run([ROOT / "scripts/supervise.sh", str(ranks), "./train_gpt", *tp, "-o", tmp_path / "run"],
                             text=True, capture_output=True, timeout=60,
                             env=environment(PATH=f"{tmp_path}:{os.environ['PATH']}"))
    assert said in process.stdout and process.returncode == ("given up" in said)


def test_supervise_asks_again(tmp_path):
    """mpirun drops a signal while it has no ranks to forward it to: SIGTERM ends the run all the same."""
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/bash\ntrap 'n=$((n + 1)); [ $n -lt 2 ] || exit 0' USR2\necho began\n"
                      "while :; do sleep 0.1; done\n")
    mpirun.chmod(0o755)
    env = environment(PATH=f"{tmp_path}:{os.environ['PATH']}")
    process = subprocess.Popen([ROOT / "scripts/supervise.sh", "1", "./train_gpt", "-o", tmp_path / "run"], text=True,
                               stdout=subprocess.PIPE, env=env)
    while process.stdout.readline() != "began\n":
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 0


@pytest.mark.skipif(not FULL, reason="half a minute: TRAIN_GPT_FULL=1")
def test_supervise_hanging_mpirun(tmp_path):
    """mpirun that hangs without a rank, as it may when one dies while it is being started, is ended."""
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/bash\nsleep 0.1 &\nexec sleep 300\n")      # which does not wait for its child
    mpirun.chmod(0o755)
    run = subprocess.run([ROOT / "scripts/supervise.sh", "1", "--retries", "1", "./train_gpt", "-o", tmp_path / "run"],
                         env=environment(PATH=f"{tmp_path}:{os.environ['PATH']}"), capture_output=True, text=True,
                         timeout=60)
    assert run.returncode == 1 and "exit code 137" in run.stdout


def test_newest_checkpoint(tmp_path):
    for name in ("step_00000007", "step_00000008.damaged.2", "step_00000008.skipped", "step_00000009.tmp",
                 "step_00000010.skipped.3", "step_99999998", "step_100000000", "step_200000000"):
        (tmp_path / name).mkdir()
        if name != "step_200000000":
            (tmp_path / name / "state.json").write_text("{}")
    newest = [ROOT / "scripts/newest_checkpoint.sh", tmp_path]
    assert subprocess.run(newest, capture_output=True, text=True).stdout == f"{tmp_path}/step_100000000\n"
    assert subprocess.run([newest[0], tmp_path / "none"], capture_output=True, text=True).stdout == ""


def hostfile(path, text):
    path.write_bytes(text.encode())
    return subprocess.run([ROOT / "scripts/hostfile.sh", path], capture_output=True, text=True)


@pytest.mark.parametrize("text,slots", [
    ("node1 slots=2\n", [2]), ("node1 slots=2", [2]), ("node1 slots=2 max_slots=4\n", [2]), ("node1\r\n", [1]),
    ("# two\n\nnode1 slots=2 # was slots=7\nnode2  slots = 3\n", [2, 3]), ("node1 slots=0\nnode2 max-slots=2", [0, 2]),
    ("node1\nnode2\nnode1\n", [2, 1]), ("node1 slots=2\nnode1\n", [3]), ("// two\nnode1 slots=2\n", [2])])
def test_hostfile(tmp_path, text, slots):
    """The slots that Open MPI's own reader finds (which does not know CR)."""
    run = hostfile(tmp_path / "hosts", text)
    hosts = dict(line.split() for line in run.stdout.splitlines())
    assert [int(hosts.get(f"node{i + 1}", 0)) for i in range(len(slots))] == slots and run.returncode == 0
    (tmp_path / "plain").write_text(text.replace("\r", ""))
    mpirun = subprocess.run(["mpirun", "--hostfile", tmp_path / "plain", "-np", "1", "--display-allocation",
                             "--do-not-launch", "true"], env=environment(), capture_output=True, text=True)
    assert f"Total slots allocated {sum(slots)}" in mpirun.stdout + mpirun.stderr


@pytest.mark.parametrize("text,line,why", [
    ("node1\nnode2 slots=-3\n", 2, '"slots=-3" is not understood'), ("node1 slots=4x\n", 1, '"slots=4x"'),
    ("node1 gpus=4\n", 1, '"gpus=4"'), ("node1 lots=2\n", 1, '"lots=2"'), ("lots=2\n", 1, '"lots=2" is no name'),
    ("node1 slots=1\nnode2\nnode1 slots=1", 3, "node1 is in line 1 too"), ("node1 slots=1 slots=2\n", 1, '"slots=2"'),
    ("node1 slots=3 max_slots=2\n", 1, "slots=3 is above max_slots=2"), ("node\x1b[31m slots=3\n", 1, '"node?[31m"')])
def test_hostfile_refused(tmp_path, text, line, why):
    run = hostfile(tmp_path / "hosts", text)
    assert run.returncode == 1 and run.stdout == "" and run.stderr.count("\n") == 1
    assert run.stderr.startswith(f"{tmp_path}/hosts: line {line}: {why}")


def test_hostfile_of_hosts(tmp_path):
    """hosts.sh starts what hostfile.sh has read: mpirun would refuse this file itself."""
    (tmp_path / "hosts").write_bytes(b"node1 slots=2\r\nnode2 slots = 4 # fast\r\n")
    show = tmp_path / "show.sh"
    show.write_text('#!/bin/bash\necho "$LAUNCH | $*"\n')
    show.chmod(0o755)
    run = subprocess.run([ROOT / "scripts/hosts.sh", tmp_path / "hosts", show], capture_output=True, text=True)
    assert " --host node1:2,node2:4 -np 6 " in run.stdout and run.stdout.endswith(" | --ranks 6\n")
    run = subprocess.run([ROOT / "scripts/hostfile.sh", tmp_path / "none"], capture_output=True, text=True)
    assert run.returncode == 1 and run.stderr.startswith(f"{tmp_path}/none: cannot be read")


def test_slurm(tmp_path):
    show = tmp_path / "show.sh"
    show.write_text('#!/bin/bash\necho "$LAUNCH | $*"\n')
    show.chmod(0o755)
    slurm = dict(SLURM_NTASKS="4", SLURM_SUBMIT_DIR=str(tmp_path))
    for cpus, word in ({"SLURM_CPUS_PER_TASK": "8"}, " --cpus-per-task=8"), ({}, ""):
        run = subprocess.run([ROOT / "scripts/slurm.sh", show], env=environment(**slurm, **cpus), capture_output=True,
                             text=True)
        assert run.stdout == f"srun --mpi=pmix --ntasks=4{word} --kill-on-bad-exit=1 | --ranks 4\n"


@pytest.mark.parametrize("stops", ["before the first checkpoint", "after it"])
def test_supervise_ramp(folder, stops):
    """A rank of three is killed in two starts, and the first batch of --batch-ramp does not divide over two: one rank
    continues, with the same global batch. Two, given by hand, are refused with numbers."""
    args = flags(folder, "-g", 4, "-n", 40, "--batch-ramp", "3:10", "--save-every", 30 if stops[0] == "b" else 10, "-z",
                 2, "--timeout", 20, micro_batch=1)
    out = supervise_with_losses(folder, args, "step_*0" if stops[0] == "a" else "run.json")
    assert "supervise: 1 ranks, from" in out and out.count("batch   12 sequences") >= 2
    two = train_gpt(*args, "--resume", "auto", "--elastic", ranks=2, out=folder / "run", ok=False, **ONE_THREAD)
    assert two.code == 1 and "or of 3 where --batch-ramp begins, does not divide over 2 ranks" in two.complaint[0]


def test_supervise_gives_up(folder):
    bad = folder / "nowhere"
    process = supervise(folder, 2, "-d", bad, "-o", folder / "run", more=["--retries", "2"])
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "2 starts in a row without a new checkpoint: given up" in out
    process = supervise(folder, 2, "--zero", "9", "-o", folder / "run")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    process = supervise(folder, 2, "-o", folder / "run", more=["--hostfile", folder / "nowhere"])
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and f"{folder}/nowhere: cannot be read" in out
    hosts = folder / "hosts"
    hosts.write_text("localhost slots=1\nno-such-host.invalid slots=4\n")
    process = supervise(folder, 5, *flags(folder, "-n", 2), "-o", folder / "hosted", more=["--hostfile", hosts])
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert "no-such-host.invalid does not answer: not used" in out and "supervise: 1 ranks" in out


def test_elastic(folder):
    args = flags(folder, "-g", 3, "-n", 2)
    run = train_gpt(*args, out=folder / "run", **ONE_THREAD)                             # 6 sequences
    four = train_gpt(*args, "--resume", run.checkpoint(2), "--elastic", ranks=4, ok=False, **ONE_THREAD)
    assert four.code == 1 and "the global batch of 6 sequences in" in four.complaint[0]
    assert "does not divide over 4 ranks; the most that it divides over below that is 3" in four.complaint[0]
    two = train_gpt(*flags(folder, "--batch", 6, "-n", 3), "--resume", run.checkpoint(2), "--elastic", ranks=2,
                    **ONE_THREAD)                                                        # -b 2 does not divide 3
    assert "batch   6 sequences = 1 per micro-step x 3 micro-steps x 2 ranks" in two.out and "step 3/3" in two.out


# ---- non-finite gradients and loss spikes ------------------------------------------------------------------------
@pytest.mark.parametrize("precision,value,ranks,stage", [
    ("fp32", np.nan, 1, 0), ("fp32", -np.inf, 3, 3), ("bf16", np.nan, 2, 0), ("bf16", 3.4e38, 1, 0),
    ("fp16", 65520, 2, 2), ("fp16", np.inf, 1, 0)])
def test_weights_are_finite(folder, precision, value, ranks, stage):
    """Weights that are not finite, or not in the data type of -p, are refused by the name of the first tensor; so is a
    checkpoint. --allow-nonfinite loads them."""
    config = gpt2_config(V, 24, T, L=2, NH=3)
    tensors = init.gpt2_weights(config, 1)
    name = "transformer.h.1.mlp.c_proj.weight"
    tensors[name].reshape(-1)[[70, 1500]] = value
    tensors["transformer.ln_f.weight"][0] = np.nan
    bad = model_write(folder / "bad", config, tensors)
    args = ["-d", folder / "data", "-b", 2, "-p", precision, "-z", stage, "--sample-tokens", 0]
    run = train_gpt("-m", bad, "-n", 1, *args, ranks=ranks, ok=False, **ONE_THREAD)
    assert run.code == 1 and "step 1/" not in run.out and len(run.complaint) == 1
    what = f"too large for {precision}" if np.isfinite(value) else "not finite"
    shown = f"{np.float32(value):g}"
    assert f"{bad}: tensor {name}: element 70 of 2304 is {shown}, the first of 2 that are {what}" in run.complaint[0]
    if ranks > 1:
        return
    saved = train_gpt("-m", bad, "-n", 1, *args, "--allow-nonfinite", out=folder / "run", **ONE_THREAD)
    assert f"element 70 of 2304 is {shown}" in saved.out and "(--allow-nonfinite)" in saved.out
    again = train_gpt("--resume", folder / "run", "-n", 2, *args, ok=False, **ONE_THREAD)
    assert name in again.complaint[0] and "step_00000001: tensor" in again.complaint[0]
    eval_args = ["-m", saved.checkpoint(1), "--eval", "--eval-batches", 1, *args[:6]]
    assert name in train_gpt(*eval_args, ok=False, **ONE_THREAD).complaint[0]
    seen = train_gpt(*eval_args, "--allow-nonfinite", ok=False, **ONE_THREAD)
    assert seen.code == 1 and "--eval: the loss is" in seen.complaint[0]


@pytest.mark.parametrize("ranks,stage", [(1, 0), (3, 2)])
def test_nonfinite_is_named(folder, ranks, stage):
    """A NaN among the weights: each skipped step names it, ten in a row end the run, and the earlier checkpoint
    remains."""
    config = gpt2_config(V, 24, T, L=2, NH=3)
    tensors = init.gpt2_weights(config, 1)
    good = model_write(folder / "good", config, tensors)
    args = ["-d", folder / "data", "-b", 2, "-z", stage, "--sample-tokens", 0]
    run = train_gpt("-m", good, "-n", 2, *args, ranks=ranks, out=folder / "run", **ONE_THREAD)
    before = (run.checkpoint(2) / "model.safetensors").read_bytes()
    tensors["transformer.ln_f.weight"][3] = np.nan
    bad = model_write(folder / "bad", config, tensors)
    run = train_gpt("-m", bad, "-n", 50, *args, "--allow-nonfinite", ranks=ranks, out=folder / "again", ok=False,
                    **ONE_THREAD)
    skipped = re.findall(r"step (\d+)/50 .*SKIPPED: non-finite (.*)", run.out)
    assert [int(step) for step, _ in skipped] == list(range(1, 11))
    assert {name for _, name in skipped} == {run.log[0]["nonfinite"]} == {"weight transformer.ln_f.weight (1 element)"}
    assert "step 10: the gradient is not finite, 10 times in a row" in run.complaint[0]
    assert run.code == 1 and skipped[0][1] in run.complaint[0]
    assert (folder / "run" / "step_00000002" / "model.safetensors").read_bytes() == before


def spoil_weight(name):
    def spoil(tensors):
        tensors[name].reshape(-1)[5] = np.nan
        tensors[name].reshape(-1)[-1] = np.inf
    return spoil, f"weight {name} (2 elements)", "an earlier checkpoint"


def overflow(tensors):
    """Of the MLP of block 1 alone: 1e25 * 1e25."""
    for name in ("up", "down"):
        tensors[f"model.layers.1.mlp.{name}_proj.weight"] *= 1e25


def overflow_backward(tensors):
    """Logits of 1e33 from a stream of 1e-6: its gradient is 1e6 times as large."""
    for name, x in tensors.items():
        if "_proj" in name or "embed" in name:
            x *= 1e-6
    tensors["lm_head.weight"] *= 1e29
    tensors["model.norm.weight"] *= 1e10


@pytest.mark.parametrize("spoil,what,advice", [
    *[spoil_weight(name) for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_norm.weight",
                                      "model.layers.1.self_attn.v_proj.weight", "model.layers.2.mlp.down_proj.weight",
                                      "model.norm.weight", "lm_head.weight")],
    (overflow, "the output of model.layers.1.mlp.down_proj", "overflows"),
    (overflow_backward, "the gradient of model.layers.2.mlp.down_proj", "lower -l")])
def test_first_in_the_forward(folder, spoil, what, advice, request):
    """Of a skipped step: the weight, the activation or the gradient that is not finite first. Some cases at stage 3,
    with the blocks recomputed and the vocabulary in chunks, some with tensor parallelism."""
    config = llama_config(200, 16, T, L=3, NH=2, model_type="qwen3")
    config["head_dim"] = 8
    tensors = init.random_weights(init.llama_shapes(config), 1, 0.1)
    spoil(tensors)
    shard_write(folder / "wide" / "train_000000.bin", init.tokens(400, 200, 5) * (np.arange(400) % 2), 200)
    more, ranks = [(["-z", 3, "-r", 3, "-g", 2], 2), (["--tp", 2], 2), ([], 1), ([], 1)][len(what) % 4]
    run = train_gpt("-m", model_write(folder / "bad", config, tensors), "-d", folder / "wide", "-n", 12, "-b", 1, *more,
                    "--allow-nonfinite", "--sample-tokens", 0, ranks=ranks, ok=False, **ONE_THREAD)
    assert run.code == 1 and f"SKIPPED: non-finite {what}" in run.out
    assert f"the first that is not finite is {what}" in run.complaint[0] and advice in run.complaint[0]


@pytest.mark.parametrize("ranks,stage", [(1, 0), (3, 2)])
def test_good_checkpoint_stays(folder, ranks, stage):
    """A NaN at a position that sequences reach at step 7, saved at every step with --keep 2: saves of skipped steps
    delete no earlier checkpoint; a run resumes from the last good one."""
    config = gpt2_config(V, 24, T, L=2, NH=3)
    tensors = init.gpt2_weights(config, 1)
    tensors["transformer.wpe.weight"][12] = np.nan
    args = ["-m", model_write(folder / "bad", config, tensors), "-d", folder / "data", "-b", 2, "-z", stage,
            "--schedule", "constant", "--warmup", 0, "--sample-tokens", 0, "--save-every", 1, "--keep", 2,
            "--allow-nonfinite"]
    reaches, stays = [*args, "--seq-ramp", "8:6"], [*args, "--seq-ramp", "8:99"]
    good = train_gpt(*reaches, "-n", 6, ranks=ranks, out=folder / "good", **ONE_THREAD).checkpoint(6)
    run = train_gpt(*reaches, "-n", 50, ranks=ranks, out=folder / "run", ok=False, **ONE_THREAD)
    assert run.code == 1 and "step 16: the gradient is not finite, 10 times in a row" in run.complaint[0]
    assert run.series("skipped") == 6 * [0] + 10 * [1]
    kept = [int(path.name[5:]) for path in sorted(folder.glob("run/step_*[0-9]"))]
    assert kept[:3] == [5, 6, 7] and not folder.joinpath("good", "step_00000004").exists()
    for path in good.iterdir():
        assert saved_bytes(path) == saved_bytes(run.checkpoint(6) / path.name), path.name
    rest = train_gpt(*stays, "-n", 9, "--resume", run.checkpoint(6), ranks=ranks, out=folder / "rest", **ONE_THREAD)
    unbroken = train_gpt(*stays, "-n", 9, ranks=ranks, out=folder / "unbroken", **ONE_THREAD)
    assert len(rest.log) == 3 and rest.series("loss") == unbroken.series("loss")[6:]
    assert rest.log[-1]["state_hash"] == unbroken.log[-1]["state_hash"]


def spiky(folder, deviations=4):
    """Thirty steps of text that is easily learned, one of noise, and more text; in file order."""
    text = np.tile(np.arange(4), 30 * 2 * T // 4)
    noise = np.random.default_rng(1).integers(0, V, 2 * T)
    shard_write(folder / "spiky" / "train_000000.bin", np.concatenate([text, noise, text, [0]]), V)
    return ["-m", folder / "model", "--from-scratch", "-d", folder / "spiky", "-l", 1e-3, "--no-shuffle", "-n", 36,
            "--schedule", "constant", "--spike-window", 6, "--spike-deviations", deviations,
            "--sample-tokens", 0]


def test_spike(folder):
    """A loss spike is reported, or with --spike-skip changes nothing; also on two ranks and after a resume."""
    args = spiky(folder)
    run = train_gpt(*args, "-b", 2, out=folder / "run", **ONE_THREAD)
    assert re.findall(r"step (\d+)/36 .*WARNING: (?:loss|norm) \d+\.\d deviations above its mean", run.out)[0] == "31"
    assert run.log[30]["loss_deviations"] > 4 and run.log[30]["skipped"] == 0
    skips = [*args, "--spike-skip", "--save-every", 25]
    one = train_gpt(*skips, "-b", 2, out=folder / "one", **ONE_THREAD)
    two = train_gpt(*skips, "-b", 1, "-z", 2, ranks=2, out=folder / "two", **ONE_THREAD)
    rest = train_gpt(*skips, "-b", 2, "--resume", one.checkpoint(25), out=folder / "rest", **ONE_THREAD)
    for skipping in (one, two):
        assert skipping.series("skipped").index(1) == 30 and skipping.series("lr")[31] == skipping.series("lr")[30]
    assert two.series("loss") == pytest.approx(one.series("loss"), rel=1e-5)
    assert rest.series("loss") == one.series("loss")[25:] and rest.series("skipped") == one.series("skipped")[25:]
    assert rest.log[-1]["state_hash"] == one.log[-1]["state_hash"]
    silent = train_gpt(*spiky(folder, deviations=0), "-b", 2, out=folder / "silent", **ONE_THREAD)
    assert "WARNING" not in silent.out and silent.series("loss") == run.series("loss")


# ---- limits ---------------------------------------------------------------------------------------------------
def test_export_past_the_limit_on_file_sizes(folder):
    run = train_gpt("-m", folder / "model", "--from-scratch", "--export", folder / "out", ok=False,
                    wrapper=["bash", "-c", 'ulimit -f 8; exec "$@"', "-"], **ONE_THREAD)
    assert run.code == 1 and len(run.complaint) == 1 and "out/model.safetensors: needs " in run.complaint[0]
    assert "File too large" in run.complaint[0] and "ulimit -f" in run.complaint[0]


# ---- memory ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks,stage", [(1, 0), (2, 3)])
def test_memory_stays(folder, ranks, stage):
    """A thousand steps with saves and validations: the memory of step 400 is that of step 1000. Threads of the first
    save, at step 250, leave a heap of theirs."""
    args = flags(folder, "-n", 1000, "-z", stage, "--eval-every", 250, "--eval-batches", 20, "--save-every", 250)
    mib = train_gpt(*args, ranks=ranks, out=folder / "run", **ONE_THREAD).series("host_mib")
    assert len(mib) == 1000 and max(mib[400:]) - mib[399] < 0.1, (mib[399], max(mib[400:]))
    assert mib[399] - mib[9] < 0.5, (mib[9], mib[399])


@pytest.mark.parametrize("ranks,stage", [(1, 0), (2, 3)])
def test_no_page_faults(folder, ranks, stage):
    """No page faults after the first step: nothing is allocated in a step."""
    log = train_gpt(*flags(folder, "-n", 8, "-z", stage), ranks=ranks, out=folder / "run", **ONE_THREAD)
    faults = log.series("page_faults")
    assert len(faults) == 8 and not any(faults[1:]), faults


def own_leaks(report):
    """The leaks in LeakSanitizer's report that our own code has allocated. Open MPI has leaks of its own, most of them
    in libraries that are unloaded by then, so that they have no names."""
    frames = [re.findall(r"^\s+#[1-9].*", block, re.M) for block in report.split("\n\n") if " leak of " in block]
    first = [[f for f in stack if "libsanitizer" not in f][:1] for stack in frames]
    return [f[0] for f in first if f and re.search(r"\.(?:cu|cuh|h|cpp):\d+$", f[0])]


@pytest.mark.parametrize("ranks,stage", [(1, 0), (2, 3)])
def test_no_leak(folder, ranks, stage):
    """Three steps with a save and a validation, and a resume, in a build with sanitizers: no leak, no bad address, no
    undefined behaviour. make DEVICE=cpu SANITIZE=1"""
    args = flags(folder, "-z", stage, "--eval-batches", 2, "--save-every", 2)
    clean = {"LSAN_OPTIONS": "exitcode=0", **ONE_THREAD}
    run = train_gpt(*args, "-n", 3, ranks=ranks, device="sanitize", out=folder / "run", **clean)
    rest = train_gpt(*args, "-n", 4, "--resume", "auto", ranks=ranks, device="sanitize", out=folder / "run", **clean)
    for said in (run.err, rest.err):
        assert not own_leaks(said) and "ERROR: AddressSanitizer" not in said and "runtime error" not in said
    planted = "\n\nDirect leak of 8 byte(s)\n    #0 0x1 in malloc libsanitizer/x.cpp:1\n    #1 0x2 in f data/x.h:3\n\n"
    assert len(own_leaks(planted)) == 1
