"""What the optimizer keeps, and how: masters whole, split or none, moments in bf16.

Training is that of test_zero.py's model. What is exact must have equal bits, what is rounded at random must be right on
average and must not depend on ranks and stages.
"""
import re

import numpy as np
import pytest
from test_zero import STEPS, assert_bits, batch, start
from util import built_devices, moments, safetensors_read, train_gpt, weights

DEVICES = built_devices()


def bf16(folder, steps=STEPS):
    return [*start(folder, steps=steps), "-p", "bf16"]


def row_mib(run, label):
    return float(re.search(rf"^  {label} +([\d.]+) MiB", run.out, re.M)[1])


@pytest.mark.parametrize("device,stage,ranks", [(d, *layout) for d in DEVICES for layout in [(0, 1), (2, 2), (3, 3)]
                                                if d == "cpu" or layout == (2, 2)])
def test_split_master(tmp_path, device, stage, ranks):
    """bf16 weight and 16 bits below it are the fp32 master: losses, norms, state hashes and checkpoints in all bits."""
    args = [*bf16(tmp_path, STEPS if device == "cpu" else 4), *batch(ranks), "-z", stage, "--hash-every", 1]
    whole = train_gpt(*args, ranks=ranks, device=device, out=tmp_path / "whole")
    split = train_gpt(*args, "--master", "split", ranks=ranks, device=device, out=tmp_path / "split")
    assert_bits(split, whole)
    assert split.series("state_hash") == whole.series("state_hash")
    last = len(whole.log)
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (split.checkpoint(last) / file).read_bytes() == (whole.checkpoint(last) / file).read_bytes()


@pytest.fixture(scope="module", params=DEVICES)
def three_steps(request, tmp_path_factory):
    """A checkpoint with weights and moments that are not round, and the data it was made from."""
    folder = tmp_path_factory.mktemp("three")
    run = train_gpt(*bf16(folder, 3), *batch(1, sequences=12), device=request.param, out=folder / "run")
    run.device, run.data, run.saved = request.param, folder / "data", run.checkpoint(3)
    return run


def decay_only(run, folder, ranks, stage, flags, steps=8):
    """Goes on with gradients clipped to 0: only decay moves weights and moments, the same for every layout."""
    return train_gpt("--resume", run.saved, "-d", run.data, "-p", "bf16", "-n", 3 + steps, "--batch", 12, "-b", 1, "-z",
                     stage, "--clip", 1e-60, "-l", 1e-5, "--weight-decay", 30, "--schedule", "constant",
                     "--sample-tokens", 0, *flags,
                     ranks=ranks, device=run.device, out=folder)


RANDOM = ["--master", "none", "--state-dtype", "bf16"]


def test_random_rounding_has_no_layout(tmp_path, three_steps):
    """Bits come from seed, step and element alone: equal over ranks and stages; another seed gives others."""
    hashes = {decay_only(three_steps, tmp_path / f"{ranks}_{stage}", ranks, stage, RANDOM).log[-1]["state_hash"]
              for ranks, stage in [(1, 0), (2, 0), (3, 1), (4, 2), (3, 3)]}
    assert len(hashes) == 1
    other = decay_only(three_steps, tmp_path / "other", 1, 0, [*RANDOM, "--seed", 7])
    assert other.log[-1]["state_hash"] not in hashes


def test_random_rounding_is_right_on_average(tmp_path, three_steps):
    """A decay of 3e-4 a step is far below a bf16's last bit: rounded to nearest nothing would ever move."""
    exact = weights(decay_only(three_steps, tmp_path / "exact", 1, 0, []).checkpoint(11))
    run = decay_only(three_steps, tmp_path / "run", 1, 0, RANDOM)
    assert "weights, fp32 until now, are rounded" in run.out and "moments, fp32 until now, are rounded" in run.out
    before, after = weights(three_steps.saved), weights(run.checkpoint(11))
    for name in before:
        assert not (after[name].view(np.uint32) & 0xFFFF).any(), f"{name} is not bf16"
    matrices = [name for name in before if before[name].ndim == 2]
    old, new, truth = (np.concatenate([w[name].ravel().astype(np.float64) for name in matrices])
                       for w in (before, after, exact))
    spread = 2**-8 * np.sqrt(9 / old.size)            # a rounding is off by less than 2^-8: 8 steps and the start
    off, moved = (((a - b) * old).sum() / (old * old).sum() for a, b in ((new, truth), (truth, old)))
    assert abs(off) < 5 * spread < -moved / 3
    for ours, theirs, beta in zip(moments(run.checkpoint(11)), moments(three_steps.saved), (0.9, 0.95)):
        old, new = (np.concatenate([w[n].ravel().astype(np.float64) for n in theirs]) for w in (theirs, ours))
        assert (new * old).sum() / (old * old).sum() == pytest.approx(beta**8, rel=5e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_small_storage_trains(tmp_path, device):
    """bf16 moments and no master: as close to fp32 masters as bf16 is to fp32. Stopped and resumed, the same bits."""
    args = [*bf16(tmp_path, 8), *batch(2), "-z", 2]
    whole = train_gpt(*args, ranks=2, device=device, out=tmp_path / "whole")
    small = train_gpt(*args, *RANDOM, "--save-every", 4, ranks=2, device=device, out=tmp_path / "small")
    assert small.series("loss") != whole.series("loss")
    assert small.series("loss") == pytest.approx(whole.series("loss"), rel=2e-3)
    rest = train_gpt("--resume", small.checkpoint(4), *args[3:], *RANDOM, ranks=2, device=device, out=tmp_path / "rest")
    assert_bits(rest, small, first=4)
    assert "are rounded" not in rest.out
    saved = safetensors_read(small.checkpoint(8) / "optimizer.safetensors")
    assert not any((tensor.view(np.uint32) & 0xFFFF).any() for tensor in saved.values())


@pytest.mark.parametrize("flags,words", [
    (["--master", "split"], "fp32 parameters are their own master"),
    (["-p", "fp16", "--master", "split"], "not the upper half of a float"),
    (["-p", "fp16", "--master", "none"], "no room for a small step"),
    (["--state-dtype", "fp16"], "not one of fp32|bf16")])
def test_refused(tmp_path, flags, words):
    run = train_gpt(*start(tmp_path, steps=1), *flags, ok=False)
    assert words in run.complaint[0], run.err
    assert run.code == 2
