"""Bad input: every refusal is one sentence that names what is wrong, the exit code is 1 (2 for usage) on every rank,
and nothing that was there is changed."""
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


# ---- the command line -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("flags,words", [
    (["--mikro-batch", 4], ["--mikro-batch", "--micro-batch"]),
    (["--zero=5"], ["--zero", "5"]),
    (["-z", 5], ["--zero", "5"]),
    (["-b", 0], ["--micro-batch", "0"]),
    (["-b", "four"], ["--micro-batch", "four"]),
    (["-b", "2.5"], ["--micro-batch", "2.5"]),
    (["-b"], ["--micro-batch", "value"]),
    (["-l", "-0.1"], ["--lr"]),
    (["-l", "nan"], ["--lr", "nan"]),
    (["-s", 1, "--seed", 2], ["--seed", "twice"]),
    (["-n", 99999999999999999999], ["--steps"]),
    (["--no-shuffle=1"], ["--no-shuffle"]),
    (["--schedule", "cosin"], ["cosin", "cosine"]),
    (["-q"], ["-q"]),
    (["extra"], ["extra"]),
    (["--offload"], ["--offload"]),
    (["--tp", 2], ["--tp"]),
    (["--recompute"], ["--recompute"]),
    (["--resume", "auto"], ["--resume", "-o"]),
], ids=str)
@pytest.mark.parametrize("ranks", [1, 3])
def test_usage(good, flags, words, ranks):
    base = [] if "-n" in flags or "-b" in flags else args(good)
    refused(2, *words, args=[*base, *flags], ranks=ranks)


def test_batch_arithmetic(good):
    refused(2, "--batch", 7, args=args(good, **{"--batch": 7, "-b": 2}), ranks=2)
    run = train_gpt(*args(good, **{"--batch": 12, "-b": 2}), ranks=3, out=good / "run")
    assert run.log[0]["tokens"] == 12 * T


# ---- data -------------------------------------------------------------------------------------------------------
def spoil(path, offset, value):
    data = bytearray(path.read_bytes())
    data[offset:offset + len(value)] = value
    path.write_bytes(data)


def shard(folder):
    return folder / "data" / "train_000000.bin"


@pytest.mark.parametrize("ranks", [1, 3])
def test_data(good, ranks):
    path = shard(good)
    whole = path.read_bytes()
    run = {"args": args(good), "ranks": ranks}

    spoil(path, 0, b"\0\0\0\0")
    refused(1, path, "byte 0", **run)
    path.write_bytes(whole)
    spoil(path, 4, b"\x09")
    refused(1, path, "version", **run)
    path.write_bytes(whole[:-2])
    refused(1, path, 200, 199, **run)
    path.write_bytes(whole[:500])
    refused(1, path, 500, 1024, **run)
    path.write_bytes(b"")
    refused(1, path, **run)
    path.write_bytes(whole)
    spoil(path, 1024 + 2 * 3, (V).to_bytes(2, "little"))
    refused(1, path, 3, V, args=[*args(good), "--no-shuffle"], ranks=ranks)
    shard_write(path, [1, 2, 3])
    refused(1, "data", 3, **run)
    path.unlink()
    refused(1, good / "data", **run)
    refused(1, good / "nowhere", args=args(good, **{"-d": good / "nowhere"}), ranks=ranks)


# ---- models -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("key,value,words", [
    ("model_type", "gpt_neo", ["model_type", "gpt_neo"]),
    ("n_embd", 9, ["n_embd", 9]),
    ("n_embd", -8, ["n_embd", -8]),
    ("n_embd", "8", ["n_embd"]),
    ("n_embd", None, ["n_embd"]),
    ("n_layer", 0, ["n_layer", 0]),
    ("n_layer", 1.5, ["n_layer"]),
    ("n_head", 3, ["n_head", 3]),
    ("vocab_size", 1e12, ["vocab_size"]),
    ("vocab_size", V + 1, ["wte.weight", V, V + 1]),
    ("activation_function", "swish", ["activation_function", "swish"]),
    ("scale_attn_by_inverse_layer_idx", True, ["scale_attn_by_inverse_layer_idx"]),
], ids=str)
def test_config(good, key, value, words):
    path = good / "model" / "config.json"
    config = json.loads(path.read_text())
    config[key] = value
    if value is None:
        del config[key]
    path.write_text(json.dumps(config))
    refused(1, *words, args=args(good))


def test_config_text(good):
    path = good / "model" / "config.json"
    for text in ("", "{", "[1, 2]", '{"model_type": "gpt2",}', "\0" * 100, '{"model_type": "gpt2"} x'):
        path.write_text(text)
        refused(1, path, args=args(good))
    path.unlink()
    refused(1, good / "model", args=args(good), ranks=3)


def test_seq_len_past_context(good):
    refused(1, "16", T, args=args(good, **{"-t": 16}))


@pytest.mark.parametrize("ranks", [1, 3])
def test_weights(good, ranks):
    path = good / "model" / "model.safetensors"
    tensors = safetensors_read(path)
    whole = path.read_bytes()
    run = {"args": args(good), "ranks": ranks}
    name = "transformer.h.1.mlp.c_fc.weight"

    safetensors_write(path, {k: v for k, v in tensors.items() if k != name})
    refused(1, good / "model", name, **run)
    safetensors_write(path, {**tensors, name: tensors[name].T.copy()})
    refused(1, good / "model", name, tensors[name].shape[0], **run)
    safetensors_write(path, {**tensors, name: np.zeros(tensors[name].shape, np.int64)})
    refused(1, good / "model", name, "I64", **run)
    path.write_bytes(whole[:-4])
    refused(1, path, **run)
    path.write_bytes(whole[:4])
    refused(1, path, **run)
    spoil(path, 0, (2**60).to_bytes(8, "little"))
    refused(1, path, **run)
    path.write_bytes(whole)
    spoil(path, 8, b"x")
    refused(1, path, **run)
    path.unlink()
    refused(1, good / "model", **run)


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
    return {p.relative_to(folder): (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


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
