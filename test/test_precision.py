"""Storage of the optimizer: master weights whole, split or none, moments in bf16.

Training is that of test_zero.py's model. Exact storage must give equal bits; stochastic rounding must be right on
average and must not depend on ranks and stages.
"""
import re

import numpy as np
import pytest
from test_zero import STEPS, assert_bits, batch, start
from util import (FULL, assert_sent_as_planned, built_devices, gpt2_config, in_rank_order, moments, safetensors_read,
                  train_gpt, weights)

DEVICES = built_devices()


def bf16(folder, steps=STEPS):
    return [*start(folder, steps=steps), "-p", "bf16"]


def row_mib(run, label):
    return float(re.search(rf"^  {label} +([\d.]+) MiB", run.out, re.M)[1])


@pytest.mark.parametrize("device,stage,ranks", [(d, *layout) for d in DEVICES for layout in [(0, 1), (2, 2), (3, 3)]
                                                if d == "cpu" or layout == (2, 2)])
def test_split_master(tmp_path, device, stage, ranks):
    """bf16 weight and 16 bits below it are the fp32 master: losses, norms, state hashes and checkpoints in all bits."""
    args = [*bf16(tmp_path, STEPS if device == "cpu" else 4), *batch(ranks), "-z", stage, "--hash-every", 1,
            *in_rank_order(device)]
    whole = train_gpt(*args, ranks=ranks, device=device, out=tmp_path / "whole")
    split = train_gpt(*args, "--master", "split", ranks=ranks, device=device, out=tmp_path / "split")
    assert_bits(split, whole)
    assert split.series("state_hash") == whole.series("state_hash")
    last = len(whole.log)
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (split.checkpoint(last) / file).read_bytes() == (whole.checkpoint(last) / file).read_bytes()


@pytest.fixture(scope="module", params=DEVICES)
def three_steps(request, tmp_path_factory):
    """A checkpoint with weights and moments that bf16 cannot represent, and its data."""
    folder = tmp_path_factory.mktemp("three")
    run = train_gpt(*bf16(folder, 3), *batch(1, sequences=12), device=request.param, out=folder / "run")
    run.device, run.data, run.saved = request.param, folder / "data", run.checkpoint(3)
    return run


def decay_only(run, folder, ranks, stage, flags, steps=8):
    """Resumes with gradients clipped to 0: only decay changes weights and moments, the same for every layout."""
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
    args = [*bf16(tmp_path, 8), *batch(2), "-z", 2, *in_rank_order(device)]
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


# ---- gradients ----------------------------------------------------------------------------------------------------
def wire(run):
    assert_sent_as_planned(run, len(run.log))
    return float(re.search(r"of gradients ([\d.]+)", run.out)[1])


SHORT = ["--grad-dtype", "bf16"], ["--comm-dtype", "bf16"], ["--comm-dtype", "fp16"], \
    ["--grad-dtype", "bf16", "--comm-dtype", "fp32"], ["--grad-dtype", "bf16", "--deterministic"], \
    ["--comm-dtype", "bf16", "--deterministic"]


@pytest.fixture(scope="module")
def fp32_gradients(tmp_path_factory):
    runs = {}

    def get(stage):
        if stage not in runs:
            folder = tmp_path_factory.mktemp("fp32_gradients")
            runs[stage] = train_gpt(*bf16(folder, 6), *batch(3), "-z", stage, ranks=3, out=folder / "run",
                                    verbose=True)
        return runs[stage]

    return get


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("flags", SHORT, ids=" ".join)
def test_short_gradients(tmp_path, fp32_gradients, stage, flags):
    """Summed or sent in 16 bits: other numbers, near those of fp32 sums; bytes as planned, half where 16 are sent."""
    if not FULL and (SHORT.index(flags) + stage) % 2:
        pytest.skip("half of the combinations; --full runs all")
    run = train_gpt(*bf16(tmp_path, 6), *batch(3), "-z", stage, *flags, ranks=3, out=tmp_path / "run", verbose=True)
    full = fp32_gradients(stage)
    assert run.series("loss") != full.series("loss")
    assert run.series("loss") == pytest.approx(full.series("loss"), rel=1e-3)
    assert run.series("norm") == pytest.approx(full.series("norm"), rel=2e-2)
    share = 1 if flags[-1] == "fp32" else 0.5
    assert wire(run) == pytest.approx(share * wire(full), abs=0.011)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision,flags", [("bf16", ["--grad-dtype", "bf16"]), ("fp32", ["--comm-dtype", "bf16"])])
def test_short_gradients_have_no_order(tmp_path, device, precision, flags):
    """In rank order: the same bits over buckets, overlap, stages 2 and 3, and resume."""
    args = [*start(tmp_path, steps=4), *batch(3), "-p", precision, *flags, "--deterministic"]
    run = {"ranks": 3, "device": device}
    reference = train_gpt(*args, "-z", 2, "--save-every", 2, **run, out=tmp_path / "reference")
    other = train_gpt(*args, "-z", 3, "--overlap", 0, "--reduce-bucket", 15000, **run, out=tmp_path / "other")
    assert_bits(other, reference)
    rest = train_gpt("--resume", reference.checkpoint(2), *args[3:], "-z", 2, **run, out=tmp_path / "rest")
    assert_bits(rest, reference, first=2)
    once = train_gpt(*args, "-z", 2, "--reduce", "step", **run, out=tmp_path / "once")
    assert_bits(train_gpt(*args, "-z", 1, "--reduce-bucket", 15000, **run, out=tmp_path / "one"), once)


def test_fp16_gradients_overflow(tmp_path):
    """Accumulated in fp16 they overflow at a scale at which fp32 sums do not, and the loss scale falls."""
    args = [*start(tmp_path, steps=6), *batch(2), "-p", "fp16", "--initial-scale-power", 18]
    kept = [train_gpt(*args, "--grad-dtype", dtype, "-z", 2, ranks=2, out=tmp_path / dtype)
            for dtype in ("fp32", "fp16")]
    skips = [sum(run.series("skipped")) for run in kept]
    assert skips[0] < skips[1] < 6
    applied = kept[1].series("skipped").index(0)
    assert kept[1].series("norm")[applied] < 100


# ---- the table of model states -------------------------------------------------------------------------------------
def test_zero_table_allocated(tmp_path, capsys):
    """docs/precision.md's table in both gradient precisions, from what runs have allocated."""
    config = gpt2_config(97, 192, 16, L=6, NH=3)
    block, ends = 12 * 192**2 + 13 * 192, (97 + 16) * 192
    psi, mib = 6 * block + ends + 2 * 192, 2**20
    theory = {0: lambda g, R: (14 + g, 0), 1: lambda g, R: (2 + g, 12), 2: lambda g, R: (2, 12 + g),
              3: lambda g, R: (0, 14 + g)}                                          # bytes: whole, sliced
    lines = []
    for g, grad_dtype in ((2, "bf16"), (4, "fp32")):
        for stage, whole_sliced in theory.items():
            ranks = 1 if stage == 0 else 4
            run = train_gpt(*start(tmp_path, config, 1), "-b", 1, "-z", stage, "-p", "bf16", "--grad-dtype", grad_dtype,
                            ranks=ranks, out=tmp_path / f"{grad_dtype}{stage}")
            block_of_rows = run.out.split("device memory per rank\n")[1].split("host memory")[0]
            rows = {k.strip(): float(v) for k, v in re.findall(r"  (.+?) +([\d.]+) MiB\n", block_of_rows)}
            states = sum(rows.get(label, 0) for label in (
                "parameters", "parameters, slice", "master weights", "gradients", "gradients, slice",
                "optimizer states"))
            words = ("double buffer", "persistent", "head", "fp32")
            beside = {k: v for k, v in rows.items() if any(word in k for word in words)}
            whole, sliced = whole_sliced(g, ranks)
            asked = (whole + sliced / ranks) * psi / mib
            kept_in_fp32 = g * (ends + 384) / mib if g == 2 and stage < 2 else 0    # beside, and in fp32
            kept_whole = 2 * (ends + 384) / ranks / mib if stage == 3 else 0
            assert states == pytest.approx(asked - kept_in_fp32 - kept_whole, abs=0.2, rel=0.005), (stage, g)
            lines.append(f"  {stage}  {ranks}  {grad_dtype}  {asked:7.1f}  {states:7.1f}   "
                         + ", ".join(f"{k} {v}" for k, v in beside.items()))
    with capsys.disabled():
        print(f"\nmodel states of {psi} parameters in bf16, MiB\n  -z R  grads  by hand  allocated   beside")
        print("\n".join(lines))


# ---- the error rule ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stage,ranks", [(0, 2), (1, 3), (2, 2), (3, 3)])
def test_bf16_by_the_error_rule(tmp_path, stage, ranks):
    """Off fp32 by at most twice what bf16 on one rank at stage 0 is off."""
    args = [*start(tmp_path, steps=10), "--batch", 12]
    truth, plain = (train_gpt(*args, "-b", 4, "-p", p, out=tmp_path / p) for p in ("fp32", "bf16"))
    run = train_gpt(*args, "-b", 2, "-p", "bf16", "-z", stage, ranks=ranks, out=tmp_path / "run")
    for key in ("loss", "norm"):
        exact = np.array(truth.series(key))
        ours, theirs = (np.abs(np.array(r.series(key)) - exact).max() for r in (run, plain))
        assert 0 < ours <= 2 * theirs + exact.max() * 2**-23, key
