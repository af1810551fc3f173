"""Bad input that takes more than a row of test_refusals.py: checkpoints that were good, folders that must stay as they
are, memory that is not there. One sentence names what is wrong, the exit code is 1 (2 for usage) on every rank."""
import json
import re
import shutil

import init
import numpy as np
import pytest
from util import binary, command, gpt2_config, model_write, safetensors_read, safetensors_write, shard_write, train_gpt

V, C, T = 31, 8, 8


@pytest.fixture
def good(tmp_path):
    """A model, data and a command line that works; each test spoils one thing."""
    config = gpt2_config(V, C, T, L=2, NH=2)
    model_write(tmp_path / "model", config, init.gpt2_weights(config, 1))
    shard_write(tmp_path / "data" / "train_000000.bin", np.arange(200) % V, V)
    return tmp_path


def args(folder, **changed):
    flags = {"-m": folder / "model", "-d": folder / "data", "-n": 2, "-b": 2, "--sample-tokens": 0, **changed}
    return [word for pair in flags.items() if pair[1] is not None for word in pair]


def refused(code, *words, **kw):
    """Runs with the flags of kw["args"]; asserts exit code, one complaint and that it holds the words. Several ranks
    see the same; the others wait for the first to end them, but a busy machine may let one of them say it again."""
    run = train_gpt(*kw.pop("args"), ok=False, timeout=60, **kw)
    assert run.code == code, run.err
    assert len({re.sub(r"^train_gpt: (rank \d+: )?", "", line) for line in run.complaint}) == 1, run.err
    for word in words:
        assert str(word) in run.complaint[0], f"'{word}' is not in: {run.complaint[0]}"
    assert "step 2/" not in run.out
    return run


def test_good(good):
    train_gpt(*args(good), out=good / "run")


def test_batch_arithmetic(good):
    refused(2, "--batch", 7, args=args(good, **{"--batch": 7, "-b": 2}), ranks=2)
    run = train_gpt(*args(good, **{"--batch": 12, "-b": 2}), ranks=3, out=good / "run")
    assert run.log[0]["tokens"] == 12 * T


# ---- checkpoints ------------------------------------------------------------------------------------------------
@pytest.fixture
def checkpointed(good):
    run = train_gpt(*args(good), out=good / "run")
    return good, run.checkpoint(2)


def test_resume(checkpointed):
    good, checkpoint = checkpointed
    flags = args(good, **{"-m": None, "--resume": checkpoint, "-n": 4})
    train_gpt(*flags, out=good / "rest")

    def spoiled(change, *words, ranks=1):
        saved = good / "saved"
        shutil.copytree(checkpoint, saved)
        change(checkpoint)
        refused(1, *words, args=[*flags, "-o", good / "never"], ranks=ranks)
        assert not list((good / "never").glob("step_*")) if (good / "never").exists() else True
        shutil.rmtree(checkpoint)
        saved.rename(checkpoint)

    def without_moment(folder):
        tensors = safetensors_read(folder / "optimizer.safetensors")
        tensors.pop("transformer.ln_f.bias.m")
        safetensors_write(folder / "optimizer.safetensors", tensors)
        state = json.loads((folder / "state.json").read_text())     # format 1 has no checksums, which would tell first
        state["format"] = 1
        state.pop("check")
        (folder / "state.json").write_text(json.dumps(state))

    def short_weights(folder):
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-8])

    spoiled(lambda f: (f / "state.json").write_text("{"), "state.json")
    spoiled(lambda f: (f / "state.json").unlink(), checkpoint, ranks=3)
    spoiled(without_moment, "optimizer.safetensors", "transformer.ln_f.bias")
    spoiled(short_weights, "model.safetensors")
    refused(1, good / "nowhere", args=args(good, **{"-m": None, "--resume": good / "nowhere"}))


def snapshot(folder):
    return {p.relative_to(folder): (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*")
            if p.is_file() and p.name != "lock"}


def test_nothing_is_overwritten(checkpointed):
    """A run folder that holds a run, an export target that holds files: refused, and left as they are."""
    good, checkpoint = checkpointed
    before = snapshot(good)
    refused(1, good / "run", args=[*args(good), "-o", good / "run"], ranks=2)
    refused(1, checkpoint, args=["-m", good / "model", "--export", checkpoint])
    assert snapshot(good) == before


def test_out_of_memory(good):
    """A budget too small for the plan: refused before step 0, with need and have."""
    refused(1, "need", "have", "MiB", args=args(good, **{"-b": 4096, "-t": T, "--device-mb": 1}), ranks=2)


def test_cannot_write(good):
    (good / "file").write_text("not a folder")
    refused(1, good / "file", args=[*args(good), "-o", good / "file" / "run"])


def test_every_rank_ends(good):
    """Only rank 0 sees what is wrong with this file of its own; mpirun still ends, with the program's exit code."""
    assert binary("cpu").exists() and command([], 2, "cpu")[0] == "mpirun"
    run = train_gpt(*args(good, **{"-d": good / "nowhere"}), ranks=4, ok=False, timeout=30)
    assert run.code == 1
