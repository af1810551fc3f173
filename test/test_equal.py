"""The same training whatever the layout: ranks, ZeRO stages, micro-steps, stops and resumes."""
import json
import re
import shutil

import init
import numpy as np
import pytest
from util import (FULL, built_devices, gpt2_config, in_rank_order, plan_rows, safetensors_read, shard_write, train_gpt,
                  weights)

CONFIG = gpt2_config(97, 48, 24, L=2, NH=3)
STEPS, EVERY = 20, 7                            # steps, a checkpoint every so many
EMU_STEPS, EMU_EVERY = (STEPS, EVERY) if FULL else (6, 2)
BATCHES = {1: (4, 3), 2: (2, 3), 3: (4, 1), 4: (1, 3)}   # ranks: micro-batch, micro-steps; 12 sequences a step


def flags(folder, steps):
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    shard_write(folder / "data" / "train_000000.bin", init.tokens(5000, 97, 3), 97)   # 208 windows: two epochs and more
    return ["-m", folder / "model", "--from-scratch", "-d", folder / "data", "-n", steps, "-l", 1e-3, "--warmup", 4,
            "--sample-tokens", 0]


def layout(ranks, stage):
    micro_batch, grad_accum = BATCHES[ranks]
    return ["-z", stage, "-b", micro_batch, "-g", grad_accum]


@pytest.fixture(scope="module", params=built_devices())
def reference(request, tmp_path_factory):
    """One rank, stage 0, with checkpoints on the way."""
    folder = tmp_path_factory.mktemp("reference")
    steps, every = (STEPS, EVERY) if request.param == "cpu" else (EMU_STEPS, EMU_EVERY)
    run = train_gpt(*flags(folder, steps), *layout(1, 0), "--hash-every", 1, "--save-every", every,
                    device=request.param, out=folder / "run")
    run.device, run.steps, run.every = request.param, steps, every
    run.learnt = 0.3 if steps == STEPS else 0        # how much the loss must have fallen
    return run


def assert_same_losses(run, reference, first=0):
    assert run.series("loss") == pytest.approx(reference.series("loss")[first:], rel=1e-6)
    assert run.series("norm") == pytest.approx(reference.series("norm")[first:], rel=1e-5)


def assert_same_bits(run, reference, first=0):
    for key in ("loss", "norm", "lr"):
        assert run.series(key) == reference.series(key)[first:], key
    assert run.log[-1]["state_hash"] == reference.log[-1]["state_hash"]


def test_head_rows(tmp_path, reference):
    """The head in chunks of any number of rows; a resumed run says that it has another."""
    args = [*flags(tmp_path, reference.steps), *layout(1, 0)]
    run = train_gpt(*args, "--head-rows", 41, device=reference.device, out=tmp_path / "run")
    assert_same_losses(run, reference)
    assert plan_rows(run.out)["logits"] == pytest.approx(41 * 128 * 4 / 2**20, abs=0.1)
    assert "--head-rows=41" in json.loads((run.folder / "run.json").read_text())["arguments"]
    rest = train_gpt("--resume", reference.checkpoint(reference.every), *args[3:], "--head-rows", 41,
                     device=reference.device, out=tmp_path / "rest")
    assert re.findall(r"^        --(\S+) is (\S+), was (\S*)$", rest.out, re.M) == [("head-rows", "41", "0")]
    assert_same_losses(rest, reference, first=reference.every)


def test_learns(reference):
    losses = reference.series("loss")
    assert len(losses) == reference.steps
    assert losses[0] == pytest.approx(np.log(97), abs=0.1) and losses[-1] < losses[0] - reference.learnt


@pytest.mark.pairwise
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_layouts(tmp_path, reference, stage, ranks):
    run = train_gpt(*flags(tmp_path, reference.steps), *layout(ranks, stage), ranks=ranks, device=reference.device,
                    out=tmp_path / "run")
    assert_same_losses(run, reference)


@pytest.mark.parametrize("ranks,stage", [(1, 0), (2, 2), (3, 1), (4, 2)])
def test_repeat_and_resume(tmp_path, reference, ranks, stage):
    """The same run twice, and a run stopped twice, equal in bits; the state hash covers weights and moments."""
    args = [*flags(tmp_path, reference.steps), *layout(ranks, stage), "--hash-every", 1, "--save-every",
            reference.every, *in_rank_order(reference.device)]
    run = {"ranks": ranks, "device": reference.device}
    whole = train_gpt(*args, **run, out=tmp_path / "whole")
    assert_same_bits(train_gpt(*args, **run, out=tmp_path / "again"), whole)
    for stop in (reference.every, 2 * reference.every):
        rest = train_gpt("--resume", whole.checkpoint(stop), *args[3:], **run, out=tmp_path / f"rest{stop}")
        assert_same_bits(rest, whole, first=stop)
        assert rest.series("state_hash") == whole.series("state_hash")[stop:]
        for file in ("model.safetensors", "optimizer.safetensors"):
            one, two = (safetensors_read(r.checkpoint(reference.steps) / file) for r in (whole, rest))
            assert one.keys() == two.keys() and all(one[k].tobytes() == two[k].tobytes() for k in one), file


@pytest.mark.parametrize("ranks,stage", [(2, 1), (3, 2), (4, 0)])
def test_resume_elsewhere(tmp_path, reference, ranks, stage):
    """A checkpoint of one rank resumes at any rank count and stage."""
    run = train_gpt("--resume", reference.checkpoint(reference.every), *flags(tmp_path, reference.steps)[3:],
                    *layout(ranks, stage), ranks=ranks, device=reference.device, out=tmp_path / "run")
    assert_same_losses(run, reference, first=reference.every)


def test_resume_run_folder(tmp_path, reference):
    """A run folder means its newest complete checkpoint; one that was being written is never chosen."""
    folder = tmp_path / "run"
    shutil.copytree(reference.folder, folder)
    shutil.rmtree(folder / f"step_{reference.steps:08d}")
    (folder / f"step_{2 * reference.every:08d}").rename(folder / f"step_{2 * reference.every:08d}.tmp")
    run = train_gpt("--resume", folder, *flags(tmp_path, reference.steps)[3:], *layout(1, 0), device=reference.device,
                    out=tmp_path / "new")
    assert run.log[0]["step"] == reference.every + 1
    assert_same_bits(run, reference, first=reference.every)


def test_resume_auto(tmp_path, reference):
    """`--resume auto`: starts when there is nothing yet, continues in the same folder when there is."""
    args = [*flags(tmp_path, reference.steps), *layout(1, 0), "--resume", "auto"]
    short = list(args)
    short[short.index(reference.steps)] = 5
    first = train_gpt(*short, "--schedule", "constant", device=reference.device, out=tmp_path / "run")
    assert [entry["step"] for entry in first.log] == [1, 2, 3, 4, 5]
    second = train_gpt(*args, "--schedule", "constant", device=reference.device, out=tmp_path / "run")
    assert [entry["step"] for entry in second.log] == list(range(1, reference.steps + 1))


def test_save_does_not_change_training(tmp_path, reference):
    run = train_gpt(*flags(tmp_path, reference.steps), *layout(1, 0), device=reference.device, out=tmp_path / "run")
    assert_same_bits(run, reference)


def test_checkpoint_is_a_model(tmp_path, reference):
    """A checkpoint's weights load as a model: its first loss continues where training stood."""
    args = flags(tmp_path, reference.steps)
    run = train_gpt("-m", reference.checkpoint(reference.steps), *args[3:], *layout(1, 0), device=reference.device,
                    out=tmp_path / "run")
    assert run.log[0]["step"] == 1 and run.series("loss")[0] < reference.series("loss")[0] - reference.learnt
    assert set(weights(reference.checkpoint(reference.steps))) == set(init.gpt2_shapes(CONFIG))
