"""Every system call on a file may fail: at every call of a start, of saves and of a load nothing is lost, nothing is
renamed that is not damaged, nothing begins anew, and a run that ends says why in a sentence.

syscalls.c makes the n-th call of a kind fail, come up short or kill the process. Each such run is followed by one
without failures, which must reach the bits of a run that was never disturbed. With TRAIN_GPT_FULL=1 every call is made
to fail in every way, and some of the second of two ranks; else some calls of each kind, the ways in turn."""
import errno
import itertools
import json
import os
import re
import shutil
import subprocess

import init
import pytest
from util import FULL, ROOT, Run, binary, command, environment, gpt2_config, shard_write, train_gpt

V, T, STEPS = 61, 8, 6
OPS = "open read pread write pwrite fsync close rename mkdir unlink rmdir ftruncate fallocate stat readdir".split()
ERRORS = {op: ["EIO", "ENOSPC", "EINTR"] for op in OPS}
ERRORS["open"] = ["EMFILE", "EIO", "EINTR", "ENOSPC", "EACCES", "ESTALE"]
ERRORS["stat"] = ["EIO", "EACCES", "ESTALE"]
ERRORS["readdir"] = ["EIO"]
MOVES = ["read", "pread", "write", "pwrite"]                       # may come up short
LASTING = 1000000
# What happens, and to how many calls in a row. A signal does not come for ever.
WAYS = {op: [(error, count) for error in ERRORS[op] for count in (1, 5 if error == "EINTR" else LASTING)] +
        [("short", 1), ("short", LASTING)] * (op in MOVES) + [("kill", 1)] for op in OPS}


def compiled(folder, *more):
    library = folder / f"syscalls{len(more)}.so"
    subprocess.run(["mpicc", "-O1", "-shared", "-fPIC", "-o", library, ROOT / "test/syscalls.c", "-ldl", *more],
                   check=True)
    return library


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="module")
def second_rank(tmp_path_factory):
    """A wrapper: only the second rank's calls fail."""
    library = compiled(tmp_path_factory.mktemp("second"), "-DREAL_MPI")
    return ["sh", "-c", f'[ "$OMPI_COMM_WORLD_RANK" = 0 ] || export LD_PRELOAD={library}\nexec "$@"', "_"]


def start(shim, folder, fail="", count="", steps=STEPS, save_every=2, part=None, wrapper=(), ranks=1):
    """The run in `folder`; fail: as in syscalls.c, of calls on files whose path contains `part`. shim: a library to
    preload, or for several ranks a wrapper that does it."""
    if not binary("cpu").exists():
        pytest.skip("cpu is not built")
    args = ["-m", folder / "model", "--from-scratch", "-d", folder / "data", "-b", 1, "-t", T, "-n", steps, "-o",
            folder / "run", "--save-every", save_every, "--keep", 2, "-l", 1e-3, "--warmup", 2, "--sample-tokens", 0,
            "--schedule", "constant", "--resume", "auto"]
    env = environment(OMP_NUM_THREADS="1", SYSCALL_PATH=str(part or folder), SYSCALL_FAIL=fail,
                      SYSCALL_COUNT=str(count), **({"LD_PRELOAD": str(shim)} if ranks == 1 else {}))
    words = command([*args, "-z", ranks - 1], ranks, "cpu", wrapper if ranks == 1 else shim)
    process = subprocess.run(words, capture_output=True, text=True, timeout=60, env=env, stdin=subprocess.DEVNULL)
    return Run(process, folder / "run")


def prepare(folder):
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(gpt2_config(V, 16, T, L=1, NH=2)))
    (folder / "data").mkdir()
    (folder / "data" / "tokenizer.json").write_text("{}")
    for split, seed in (("train", 3), ("val", 4)):
        shard_write(folder / "data" / f"{split}_000000.bin", init.tokens(600, V, seed), V)
    return folder


def complete(folder):
    """Steps of the complete checkpoints."""
    return sorted(int(path.parent.name[5:]) for path in folder.glob("run/step_*[0-9]/state.json"))


def log_steps(folder):
    path = folder / "run" / "log.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [entry["step"] for entry in entries if "loss" in entry]


def saved_or_not(run):
    """The steps that were said to be saved, and not to be."""
    return ([int(step) for step in re.findall(r"^saved \S*step_(\d+) ", run.out, re.M)],
            [int(step) for step in re.findall(r"step_(\d+) is not saved: ", run.err)])


class Scenario:
    """A folder as it is before the run that is disturbed; what that run and an undisturbed one give."""

    def __init__(self, shim, folder, name, ranks):
        self.shim, self.ranks = shim, ranks
        self.before, self.trials = prepare(folder / "before"), folder / "trials"
        if name == "load":       # checkpoints of steps 2 and 4, a log up to 5, and what a killed save has left
            assert start(shim, self.before, steps=5, ranks=ranks).code == 0
            shutil.rmtree(self.before / "run" / "step_00000005")
            shutil.copytree(self.before / "run" / "step_00000004", self.before / "run" / "step_00000005.tmp")
        whole = self.copy("whole")
        counts = folder / "counts"
        self.whole = start(shim, whole, count=counts, ranks=ranks)
        assert self.whole.code == 0 and complete(whole) == [4, 6] and log_steps(whole) == list(range(1, STEPS + 1))
        self.counts = {op: int(n) for op, n in map(str.split, counts.read_text().splitlines())}

    def copy(self, name):
        folder = self.trials / name
        shutil.copytree(self.before, folder)
        return folder

    def check(self, op, number, how, count):
        """One run that is disturbed, and one after it that is not."""
        folder = self.copy(f"{op}-{number}-{how}-{count}")
        steps_before = complete(folder)
        error = str(getattr(errno, how, how))
        run = start(self.shim, folder, fail=f"{op} {number} {count} {error}", ranks=self.ranks)
        steps, said = complete(folder), f"{op} {number} {how} {count}: exit {run.code}\n{run.out}\n{run.err}"
        assert not list(folder.glob("run/*damaged*")), said
        assert steps_before == [] or steps and steps[-1] >= steps_before[-1], said
        saved, not_saved = saved_or_not(run)
        assert all(step in steps or step < steps[-1] for step in saved), said
        assert not set(steps) & set(not_saved), said
        if how == "kill":
            assert run.code in (-9, 137), said                     # mpirun's own for a killed rank
        elif how in ("EINTR", "short") and op != "close":
            assert run.code == 0 and run.complaint == [] and steps == [4, 6], said
        else:
            assert run.code in (0, 1) and (run.code == 0 or run.complaint), said
            assert all(len(line) < 1000 for line in run.complaint), said
        if steps and "cannot be written" not in run.err:
            assert log_steps(folder)[:steps[-1]] == list(range(1, steps[-1] + 1)), said
        again = start(self.shim, folder, ranks=self.ranks)
        said += f"\nafter it: exit {again.code}\n{again.out}\n{again.err}"
        assert again.code == 0 and not list(folder.glob("run/*damaged*")), said
        resumed = re.search(r"^resume .*: step (\d+),", again.out, re.M)
        assert int(resumed[1]) == steps[-1] if steps else resumed is None, said
        assert complete(folder)[-1] == STEPS, said
        for name in ("model", "optimizer"):
            path = f"run/step_{STEPS:08d}/{name}.safetensors"
            assert (folder / path).read_bytes() == (self.trials / "whole" / path).read_bytes(), said
        for name in ("run.json", "config.json", "tokenizer.json"):
            assert (folder / "run" / name).exists(), said
        if "cannot be written" not in run.err:
            assert log_steps(folder) == list(range(1, STEPS + 1)), said
        shutil.rmtree(folder)
        return run.code


def test_no_descriptor_is_lost(shim, tmp_path):
    """Forty saves fail, then there is room again: with few descriptors to lose, the last is saved."""
    folder = prepare(tmp_path / "it")
    few = ["sh", "-c", 'ulimit -n 40; exec "$@"', "_"]
    run = start(shim, folder, fail=f"write 1 40 {errno.ENOSPC}", part="state.json", steps=60, save_every=1,
                wrapper=few)
    assert run.code == 0 and len(saved_or_not(run)[1]) == 40 and complete(folder) == [59, 60], run.err


@pytest.mark.parametrize("error,room", [("ENOSPC", True), ("EDQUOT", True), ("EIO", False), ("EROFS", False)])
def test_room_is_asked_for_where_it_is_missing(shim, tmp_path, error, room):
    run = start(shim, prepare(tmp_path), fail=f"write 1 1 {getattr(errno, error)}", part="state.json", steps=2)
    said = [line for line in run.err.splitlines() if "is not saved" in line]
    assert said and os.strerror(getattr(errno, error)) in said[0] and ("make room" in said[0]) == room


def test_what_cannot_be_removed_is_saved(shim, tmp_path):
    """The folder of an old checkpoint stays: said, and the new one is saved."""
    folder = prepare(tmp_path / "it")
    run = start(shim, folder, fail=f"rmdir 1 {LASTING} {errno.EIO}")
    assert run.code == 0 and saved_or_not(run) == ([2, 4, 6], []) and complete(folder) == [4, 6]
    assert len(run.complaint) == 1 and "step_00000002.tmp: cannot be removed and stays: Input/output" in run.err


@pytest.mark.parametrize("part", ["state.json", "model.safetensors"])
def test_a_rank_cannot_read(shim, second_rank, tmp_path, part):
    """Of two ranks the second cannot open a file of the newest checkpoint: the run ends, and nothing is renamed."""
    folder = prepare(tmp_path / "it")
    assert start(shim, folder).code == 0
    run = train_gpt("-m", folder / "model", "-d", folder / "data", "-b", 1, "-t", T, "-n", STEPS + 1, "-z", 1,
                    "--resume", "auto", "--sample-tokens", 0, ranks=2, out=folder / "run", ok=False,
                    wrapper=second_rank, SYSCALL_PATH=part,
                    SYSCALL_FAIL=f"open 1 {LASTING} {errno.EIO}")
    assert part + ": cannot be opened: Input/output error" in run.complaint[0], run.err
    assert complete(folder) == [4, 6] and not list(folder.glob("run/*damaged*"))


@pytest.fixture(scope="module")
def scenarios(shim, second_rank, tmp_path_factory):
    made = {}

    def scenario(name, ranks):
        if (name, ranks) not in made:
            preload = shim if ranks == 1 else second_rank
            made[name, ranks] = Scenario(preload, tmp_path_factory.mktemp(name), name, ranks)
        return made[name, ranks]
    return scenario


def chosen(op, num_calls, all_of_them, most=7):
    """Which call fails in which way."""
    ways, calls = WAYS[op], range(1, num_calls + 1)
    if all_of_them:
        return list(itertools.product(calls, ways))
    some = sorted({1 + i * (num_calls - 1) // (most - 1) for i in range(most)}) if num_calls > most else calls
    rows = max(len(some), len(ways))
    return [(some[i % len(some)], ways[i % len(ways)]) for i in range(rows)] if num_calls > 0 else []


def fail_in_turn(scenario, what, op, all_of_them):
    codes = [scenario.check(op, number, *way) for number, way in chosen(op, scenario.counts[op], all_of_them)]
    print(f"{what} {op}: {scenario.counts[op]} calls, {len(codes)} runs disturbed, {sum(code == 0 for code in codes)} "
          f"of them went on to the end, {sum(code == 1 for code in codes)} said why not, "
          f"{sum(code not in (0, 1) for code in codes)} killed")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["start", "load"])
def test_every_call(scenarios, name, op):
    fail_in_turn(scenarios(name, 1), name, op, all_of_them=FULL)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_calls_of_a_second_rank(scenarios, op):
    """At stage 1 of two ranks, which read and write their slices of the same files."""
    fail_in_turn(scenarios("load", 2), "load, second of two ranks,", op, all_of_them=False)
