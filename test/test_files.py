"""Hugging Face folders: memory of reading, exports, and damaged files."""
import json
import re
import sys

import init
import numpy as np
import pytest
from util import (built_devices, gpt2_config, llama_config, model_write, safetensors_header,
                  safetensors_read, safetensors_write, shard_write, train_gpt, weights)

QUIET = ["--no-shuffle", "--sample-tokens", 0, "--schedule", "constant", "--warmup", 0]


@pytest.fixture(params=built_devices())
def device(request):
    return request.param


def tiny_llama(folder, **more):
    config = llama_config(61, 32, 16, L=2, NH=4, F=48, num_key_value_heads=2, **more)
    return model_write(folder, config, init.random_weights(init.llama_shapes(config), 3, 0.3))


# ---- memory of an import ----------------------------------------------------------------------------------------
# Runs a program and prints its peak memory; small itself, since a child starts at its parent's size.
PEAK = ("import os, sys\npid = os.fork()\nif pid == 0: os.execv(sys.argv[1], sys.argv[1:])\n"
        "_, status, usage = os.wait4(pid, 0)\nos.write(2, b'peak %d\\n' % usage.ru_maxrss)\n"
        "sys.exit(os.waitstatus_to_exitcode(status))")


def peak_bytes(model, folder, *args, ranks):
    run = train_gpt("-m", model, "--export", folder, *args, ranks=ranks, OMP_NUM_THREADS="1",
                    wrapper=[sys.executable, "-S", "-c", PEAK])
    peaks = [int(kib) * 1024 for kib in re.findall(r"peak (\d+)", run.err)]
    assert len(peaks) == ranks
    return max(peaks)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """118 MB of fp32, nearly all of it in 12 blocks, in three files; and the same with nothing in it."""
    folder, rng = tmp_path_factory.mktemp("memory"), np.random.default_rng(1)
    made = []
    for name, C, L in (("large", 448, 12), ("small", 8, 1)):
        config = gpt2_config(64, C, 16, L=L, NH=4, architectures=["GPT2LMHeadModel"])
        tensors = {key: rng.standard_normal(shape, np.float32) for key, shape in init.gpt2_shapes(config).items()}
        model_write(folder / name, config, tensors)
        made.append((folder / name, sum(a.nbytes for a in tensors.values())))
    assert made[0][1] > 100e6
    return made


@pytest.mark.parametrize("stage,ranks", [(0, 1), (2, 2), (3, 4)])
def test_memory(models, tmp_path, stage, ranks):
    """Above what a model of no size takes: 1.2 times what a rank keeps, which at stage 3 is its slice and a double
    buffer of blocks. A copy of a tensor, a file or the model in host memory would show."""
    (large, size_bytes), (small, _) = models
    share = size_bytes if stage < 3 else size_bytes / ranks + 2 * size_bytes / 12
    used, base = (peak_bytes(model, tmp_path / model.name, "-z", stage, ranks=ranks) for model in (large, small))
    assert 0.99 * share < used - base < 1.2 * share
    before, after = weights(large), weights(tmp_path / "large")
    assert all(np.array_equal(after[key], before[key]) for key in before)


# ---- export -----------------------------------------------------------------------------------------------------
def to_dtype(x, dtype):
    """As it is stored: fp32, fp16, or the upper halves of fp32, rounded to nearest even."""
    if dtype == "bf16":
        bits = x.astype(np.float32).view(np.uint32)
        return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return x.astype({"fp32": np.float32, "fp16": np.float16}[dtype])


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype,name,word", [("fp32", "F32", "float32"), ("bf16", "BF16", "bfloat16"),
                                             ("fp16", "F16", "float16")])
@pytest.mark.parametrize("stage,ranks", [(0, 1), (1, 2), (2, 3), (3, 4)])
def test_export_dtype(tmp_path, device, dtype, name, word, stage, ranks):
    """Each tensor rounded once, whatever the layout; exported again, the same file."""
    model = tiny_llama(tmp_path / "model", dtype="float32", tie_word_embeddings=stage % 2 == 1)
    layout = dict(ranks=ranks, device=device)
    train_gpt("-m", model, "--export", tmp_path / "a", "--export-dtype", dtype, "-z", stage, **layout)
    before, after = weights(model), weights(tmp_path / "a")
    header = safetensors_header(tmp_path / "a" / "model.safetensors")
    assert header.pop("__metadata__") == {"format": "pt"} and set(after) == set(before)
    for key, tensor in before.items():
        assert header[key]["dtype"] == name and header[key]["shape"] == list(tensor.shape)
        assert after[key].tobytes() == to_dtype(tensor, dtype).tobytes(), key
    config = (tmp_path / "a" / "config.json").read_text()
    assert config == (model / "config.json").read_text().replace("float32", word)
    train_gpt("-m", tmp_path / "a", "--export", tmp_path / "b", "--export-dtype", dtype, "-z", 3 - stage, **layout)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize("stage,ranks", [(0, 1), (3, 3)])
def test_export_in_several_files(tmp_path, stage, ranks):
    """As huggingface_hub splits them, with an index; and back in one."""
    model = tiny_llama(tmp_path / "model")
    split = tmp_path / "split"
    train_gpt("-m", model, "--export", split, "--shard-bytes", 20000, "-z", stage, ranks=ranks)
    index = json.loads((split / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in split.glob("*.safetensors"))
    assert len(files) > 2 and files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    before = weights(model)
    assert set(index["weight_map"]) == set(before)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in before.values())
    held = {}
    for file in files:
        tensors = safetensors_read(split / file)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 20000
        assert all(index["weight_map"][key] == file for key in tensors)
        held.update(tensors)
    assert all(held[key].tobytes() == before[key].tobytes() for key in before)
    train_gpt("-m", split, "--export", tmp_path / "whole", "-z", stage, ranks=ranks)
    assert all(tensor.tobytes() == before[key].tobytes() for key, tensor in weights(tmp_path / "whole").items())
    run = train_gpt("-m", model, "--export", split, ok=False)
    assert "not overwritten" in run.err


@pytest.mark.parametrize("stage,ranks", [(0, 1), (2, 2), (3, 3)])
def test_export_of_a_checkpoint(tmp_path, stage, ranks):
    """In bf16 training the fp32 master is saved and exported."""
    model = tiny_llama(tmp_path / "model")
    shard_write(tmp_path / "data" / "train_000000.bin", init.tokens(8 * 16 + 1, 61, 1), 61)
    run = train_gpt("-m", model, "-d", tmp_path / "data", "-z", stage, "-b", 1, "-n", 2, "-t", 16, "-p", "bf16", *QUIET,
                    ranks=ranks, out=tmp_path / "run")
    folder = run.checkpoint(2)
    kept = weights(folder)
    assert any((tensor.view(np.uint32) & 0xffff).any() for tensor in kept.values())
    for precision, export in (("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")):
        out = tmp_path / f"{precision}-{export}"
        train_gpt("-m", folder, "--export", out, "-p", precision, "--export-dtype", export, "-z", stage, ranks=ranks)
        for key, tensor in weights(out).items():
            assert tensor.tobytes() == to_dtype(kept[key], export).tobytes(), key
        assert not (out / "optimizer.safetensors").exists()


def test_export_flags(tmp_path):
    for flag, value in (("--export-dtype", "bf16"), ("--shard-bytes", 100)):
        run = train_gpt("-m", "d2", flag, value, ok=False)
        assert run.code == 2 and "--export" in run.err


# ---- damaged files ----------------------------------------------------------------------------------------------
def header_of(data):
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8:8 + size]), data[8 + size:]


def file_of(header, data):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def changed(change):
    def apply(data):
        header, rest = header_of(data)
        rest = change(header, rest) or rest
        return file_of(header, rest)
    return apply


def shift(header, _):
    header["model.norm.weight"]["data_offsets"] = header["lm_head.weight"]["data_offsets"][:1] * 2


def overlap(header, _):
    a, b = (header[f"model.layers.{i}.input_layernorm.weight"] for i in (0, 1))
    a["data_offsets"] = b["data_offsets"]


def of_bool(header, _):
    entry = header["model.norm.weight"]
    entry["dtype"], entry["shape"] = "BOOL", [entry["data_offsets"][1] - entry["data_offsets"][0]]


def rename(header, _):
    header["model.other.weight"] = header.pop("model.norm.weight")


REFUSED = {
    "of 0 bytes": (lambda data: b"", "0 bytes"),
    "of 7 bytes": (lambda data: data[:7], "7 bytes"),
    "cut in the header": (lambda data: data[:100], "cut short"),
    "cut in the data": (lambda data: data[:-1], "cut short"),
    "with bytes added": (lambda data: data + b"x", "added"),
    "with a huge header": (lambda data: (10**15).to_bytes(8, "little") + data[8:], "1000000000000000"),
    "with a header of -1": (lambda data: b"\xff" * 8 + data[8:], "18446744073709551615"),
    "with no JSON": (lambda data: data[:8] + b"x" + data[9:], "line 1"),
    "with a list": (lambda data: (2).to_bytes(8, "little") + b"[]", "object"),
    "with overlapping tensors": (changed(overlap), "overlap"),
    "with an empty range": (changed(shift), "model.norm.weight"),
    "with bools": (changed(of_bool), "shape 128"),
    "without a tensor": (changed(rename), "model.norm.weight"),
    "of 4-byte int": (changed(lambda header, _: header["model.norm.weight"].update(dtype="I32")), "I32"),
    "of an unknown type": (changed(lambda header, _: header["model.norm.weight"].update(dtype="Q4")), "Q4"),
    "with a negative size": (changed(lambda header, _: header["model.norm.weight"].update(shape=[-32])), "shape"),
    "with a size past 2^64": (changed(lambda header, _: header["model.norm.weight"].update(shape=[2**40, 2**40])),
                              "model.norm.weight"),
    "with another shape": (changed(lambda header, _: header["model.norm.weight"].update(shape=[4, 8])), "4x8"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(tmp_path, what):
    change, complaint = REFUSED[what]
    file = tiny_llama(tmp_path / "model") / "model.safetensors"
    file.write_bytes(change(file.read_bytes()))
    run = train_gpt("-m", tmp_path / "model", "--export", tmp_path / "export", ok=False)
    assert run.code == 1 and len(run.complaint) == 1
    assert complaint in run.complaint[0] and str(tmp_path / "model") in run.complaint[0]


def without_metadata(header, _):
    del header["__metadata__"]


ACCEPTED = {
    "without metadata": changed(without_metadata),
    "with other metadata": changed(lambda header, _: header["__metadata__"].update(author="x", epoch="3")),
    "with an empty tensor": changed(lambda header, data: header.update(
        {"h.0.attn.bias": {"dtype": "F32", "shape": [0], "data_offsets": [len(data)] * 2}})),
}


@pytest.mark.parametrize("what", ACCEPTED)
def test_accepted(tmp_path, what):
    model = tiny_llama(tmp_path / "model")
    before, file = weights(model), model / "model.safetensors"
    file.write_bytes(ACCEPTED[what](file.read_bytes()))
    train_gpt("-m", model, "--export", tmp_path / "export")
    after = weights(tmp_path / "export")
    assert set(after) == set(before) and all(after[key].tobytes() == before[key].tobytes() for key in before)


def split_by_hand(model):
    """In two files with an index."""
    tensors = weights(model)
    (model / "model.safetensors").unlink()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    half = len(tensors) // 2
    parts = [dict(list(tensors.items())[:half]), dict(list(tensors.items())[half:])]
    for name, part in zip(names, parts):
        safetensors_write(model / name, part)
    index = {"metadata": {}, "weight_map": {key: name for name, part in zip(names, parts) for key in part}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    return index, tensors


@pytest.mark.parametrize("what", ["whole", "file missing", "other file", "unknown tensor", "path", "no map",
                                  "stale copy"])
def test_index(tmp_path, what):
    model = tiny_llama(tmp_path / "model")
    index, tensors = split_by_hand(model)
    first, second = sorted(set(index["weight_map"].values()))
    if what == "file missing":
        (model / second).unlink()
    elif what == "other file":
        index["weight_map"]["model.norm.weight"] = (first if index["weight_map"]["model.norm.weight"] == second
                                                    else second)
    elif what == "unknown tensor":
        index["weight_map"]["model.norm.bias"] = second
    elif what == "path":
        index["weight_map"]["model.norm.weight"] = "../" + second
    elif what == "no map":
        del index["weight_map"]
    elif what == "stale copy":
        stale = {key: value + 1 for key, value in tensors.items() if index["weight_map"][key] == first}
        safetensors_write(model / second, {**tensors, **stale})
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    run = train_gpt("-m", model, "--export", tmp_path / "export", ok=what in ("whole", "stale copy"))
    if run.code != 0:
        assert run.code == 1 and len(run.complaint) == 1 and "model" in run.complaint[0]
        return
    after = weights(tmp_path / "export")                 # the index says which copy counts
    assert all(after[key].tobytes() == tensors[key].tobytes() for key in tensors)
