"""Going on from weights: the default learning rate, the best validation, patience."""
import json
import re

import init
import pytest
from util import gpt2_config, model_write, shard_write, train_gpt

V = 61
# The rate is far too high: the validation loss falls, then rises.
ARGS = ["-t", 16, "-b", 2, "--sample-tokens", 0, "--schedule", "constant", "--warmup", 0]
RISING = [*ARGS, "-l", 0.1, "--eval-every", 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuning")
    config = gpt2_config(V, 16, 16, L=1, NH=2)
    model_write(folder / "model", config, init.gpt2_weights(config, 3))
    for part, seed in (("train", 1), ("val", 2)):
        shard_write(folder / "data" / f"{part}_000000.bin", init.tokens(400, V, seed) // 2, V)
    return folder


def tune(folder, out, *args, **how):
    return train_gpt("-m", folder / "model", "-d", folder / "data", *args, out=out, **how)


def steps_kept(out):
    return sorted(int(path.name[5:]) for path in out.glob("step_*"))


@pytest.mark.parametrize("flags, lr, said", [
    ([], 2e-5, True), (["-l", 1e-3], 1e-3, False), (["--from-scratch"], 6e-4, False)],
                         ids=["weights", "given", "scratch"])
def test_rate(folder, tmp_path, flags, lr, said):
    run = tune(folder, tmp_path, "-n", 1, *ARGS, *flags)
    assert run.series("lr") == [lr] and ("lr 2e-05 since -m names weights" in run.out) == said
    again = train_gpt("--repeat", tmp_path)
    assert "the same" in again.out or "equal" in again.out


@pytest.mark.parametrize("first, then, lr", [([], [], 2e-5), (["-l", 1e-3], [], 1e-3), ([], ["-l", 1e-4], 1e-4)],
                         ids=["default", "kept", "given"])
def test_rate_of_a_resume(folder, tmp_path, first, then, lr):
    """Neither -m nor -l is needed again: the default for new weights would undo what has been learned."""
    tune(folder, tmp_path, "-n", 1, *ARGS, *first)
    run = train_gpt("-d", folder / "data", "-n", 2, "--resume", "auto", *ARGS, *then, out=tmp_path)
    assert run.series("lr")[-1] == lr and f"lr {lr:.3g} " in run.out and "since -m names" not in run.out


def test_eval_at_start(folder, tmp_path):
    run = tune(folder, tmp_path, "-n", 2, "--eval-at-start", *ARGS)
    assert [entry["step"] for entry in run.log if "val_loss" in entry] == [0, 2]
    part = tune(folder, tmp_path, "-n", 3, "--eval-at-start", "--resume", "auto", *ARGS)
    assert len(re.findall(r"val  \d+/", part.out)) == 1


def test_keep_best(folder, tmp_path):
    whole = tune(folder, tmp_path / "whole", "-n", 30, *RISING)
    losses = {entry["step"]: entry["val_loss"] for entry in whole.log if "val_loss" in entry}
    best = min(losses, key=losses.get)
    part = best + 4
    assert 2 <= best and part < 30                             # it rises within the run
    run = tune(folder, tmp_path / "kept", "-n", part, "--keep-best", "--keep", 1, "--save-every", 5, *RISING)
    assert steps_kept(tmp_path / "kept") == [best, part]
    assert re.search(rf"best    validation loss {losses[best]:.6f} after step {best}: .*/step_{best:08d}\n", run.out)
    run = tune(folder, tmp_path / "kept", "-n", 30, "--keep-best", "--keep", 1, "--resume", "auto", *RISING)
    assert steps_kept(tmp_path / "kept") == [best, 30] and f"after step {best}:" in run.out
    state = json.loads((run.checkpoint(30) / "state.json").read_text())
    assert state["best"]["step"] == best and state["best"]["num_since"] == (30 - best) // 2


def test_patience(folder, tmp_path):
    """Also across a resume: validations since the best one are counted in the checkpoint."""
    run = tune(folder, tmp_path / "p", "-n", 40, "--patience", 2, *RISING)
    losses = run.series("val_loss")
    assert len(losses) < 20 and min(losses) == losses[-3] and steps_kept(tmp_path / "p") == [2 * len(losses)]
    assert "2 validations without a lower loss (--patience)" in run.out
    tune(folder, tmp_path / "q", "-n", 2 * len(losses) - 2, *RISING)
    again = tune(folder, tmp_path / "q", "-n", 40, "--patience", 2, "--resume", "auto", *RISING)
    assert again.series("val_loss") == losses


@pytest.mark.parametrize("flags, words", [
    (["--patience", 2], "--patience counts validations: give --eval-every N"),
    (["--keep-best"], "--keep-best needs -o FOLDER to save to"),
    (["--eval-at-start", "-d", "train_000000.bin"], "--eval-at-start needs a validation set"),
    (["--bench", "--eval-at-start"], "--eval-at-start does not go with --bench")])
def test_refused(folder, flags, words):
    data = [] if "-d" in flags or "--bench" in flags else ["-d", folder / "data"]
    run = train_gpt("-m", folder / "model", "-n", 1, "-t", 16, *data, *flags, ok=False, cwd=folder / "data")
    assert len(run.complaint) == 1 and words in run.complaint[0]
