"""Mixtures of data sets: shares, order, epochs of each set, validation by set, the same after a resume."""
import json
import re

import init
import numpy as np
import pytest
from util import gpt2_config, model_write, shard_write, train_gpt

V, T = 16, 4
QUIET = ["--sample-tokens", 0, "--schedule", "constant", "--warmup", 0, "--clip", 0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Set k has windows whose targets are all k: with these weights their loss is that of set 0 less 0.1 k."""
    folder = tmp_path_factory.mktemp("mixture")
    config = gpt2_config(V, 4, T)
    tensors = {name: np.zeros(shape, np.float32) for name, shape in init.gpt2_shapes(config).items()}
    tensors["transformer.wte.weight"][:, 0] = 0.1 * np.arange(V)
    tensors["transformer.ln_f.bias"][0] = 1
    model_write(folder / "model", config, tensors)
    for k, windows in ((0, 40), (1, 7), (2, 3)):
        for part in ("train", "val"):
            shard_write(folder / str(k) / f"{part}_000000.bin", [k] * (windows * T + 1), V)
    return folder


def series(folder, out, *args, data=("0:0.7", "1:0.2", "2:0.1"), **how):
    run = train_gpt("-m", folder / "model", "-d", ",".join(data), "-t", T, "-l", 0, *QUIET, *args, out=out, cwd=folder,
                    **how)
    zero = np.log(np.exp(0.1 * np.arange(V)).sum())
    return run, np.round((zero - np.array(run.series("loss"))) * 10, 3)


def test_shares(folder, tmp_path):
    """Of a thousand windows each set has its share exactly, mixed; sets are used again when they are at their end."""
    run, kinds = series(folder, tmp_path / "a", "-b", 1, "-n", 1000)
    assert [np.sum(kinds == k) for k in range(3)] == [700, 200, 100]
    assert 120 < np.sum(kinds[:200] == 0) < 160                # 140 expected
    assert re.search(r"70.0 % of the windows from 0, which has 40\n.*20.0 % .* from 1, which has 7\n", run.out)
    _, other = series(folder, tmp_path / "b", "-b", 1, "-n", 50, "-s", 1)
    assert (other != kinds[:50]).any()
    assert not np.array_equal(kinds[:50], sorted(kinds[:50]))


def test_resume_and_ranks(folder, tmp_path):
    _, want = series(folder, tmp_path / "a", "-b", 2, "-n", 12)
    series(folder, tmp_path / "b", "-b", 1, "-n", 5, ranks=2)
    _, got = series(folder, tmp_path / "b", "-b", 1, "-g", 2, "-n", 12, "--resume", "auto")
    assert np.array_equal(got, want) and len(set(want)) >= 3


def test_validation_by_set(folder, tmp_path):
    run, _ = series(folder, tmp_path, "-b", 2, "-n", 1)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    by_set = {line["val_set"]: line["val_set_loss"] for line in lines if "val_set" in line}
    zero = np.log(np.exp(0.1 * np.arange(V)).sum())
    assert by_set == {str(k): pytest.approx(zero - 0.1 * k, abs=1e-5) for k in range(3)}
    assert run.series("val_loss") == pytest.approx([zero - 0.1 * (7 + 2 * 3) / 50], abs=1e-5)
    assert run.series("val_tokens") == [50 * T]


def test_repeat(folder, tmp_path):
    """run.json has each set as an absolute path."""
    series(folder, tmp_path, "-b", 2, "-n", 2)
    arguments = json.loads((tmp_path / "run.json").read_text())["arguments"]
    assert f"--data={folder}/0:0.7,{folder}/1:0.2,{folder}/2:0.1" in arguments
    assert "from " in train_gpt("--repeat", tmp_path, cwd=tmp_path).out


def test_many_sets(folder):
    """Of 60 equal shares each is 16 or 17 thousandths, whatever the sum of their roundings."""
    out = train_gpt("-m", folder / "model", "-d", ",".join(["1:1"] * 60), "-t", T, "--plan", cwd=folder).out
    shares = [float(share) for share in re.findall(r"([\d.]+) % of the windows from", out)]
    assert len(shares) == 60 and sum(shares) == pytest.approx(100) and set(shares) == {1.6, 1.7}


@pytest.mark.parametrize("data, words", [
    (["0:1", "9:1"], "9: no file of this name"), (["0:1", "1:0.0001"], "the share of 1 is below a thousandth"),
    (["0:1", "1"], "no file of this name")])
def test_refused(folder, tmp_path, data, words):
    run = train_gpt("-m", folder / "model", "-d", ",".join(data), "-t", T, "-n", 1, ok=False, cwd=folder)
    assert len(run.complaint) == 1 and words in run.complaint[0]
