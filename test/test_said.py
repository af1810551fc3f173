"""What is printed at the start and at a resume is so: rates, steps, where a model comes from; files' own control
characters do not reach a terminal."""
import init
import pytest
from util import gpt2_config, model_write, shard_write, train_gpt

V, C, T = 61, 16, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("said")
    config = gpt2_config(V, C, T, L=1, NH=2)
    model_write(folder / "model", config, init.gpt2_weights(config, 1))
    shard_write(folder / "data" / "train_000000.bin", init.tokens(40 * T + 1, V, 1), V)
    train_gpt(*flags(folder), "-n", 4, "--save-every", 2, out=folder / "run")
    return folder


def flags(folder, batch=2):
    return ["-m", folder / "model", "-d", folder / "data", "-t", T, "-b", batch, "--sample-tokens", 0]


def line(run, word):
    return next(text for text in run.out.splitlines() if text.startswith(word))


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "warmup-log"])
def test_rate_of_the_last_step(folder, tmp_path, schedule):
    run = train_gpt(*flags(folder), "-n", 7, "--lr", 1e-3, "--schedule", schedule, "--warmup", 1, out=tmp_path / "run")
    said = line(run, "steps ").split("|")[1].strip()
    if schedule in ("constant", "warmup-log"):
        assert said == f"lr 0.001 {schedule}, warm-up 1 steps"
    else:
        assert said == f"lr 0.001 {schedule} to {run.series('lr')[-1]:.3g} at step 7, warm-up 1 steps"
        assert run.series("lr")[-1] > 1e-4                      # --min-lr would come a step later


def test_steps_after_a_resume(folder, tmp_path):
    """Four steps of 2 of 40 windows, then of 4: the 32 that are left are 8 more."""
    run = train_gpt(*flags(folder, 4), "--resume", folder / "run", out=tmp_path / "run")
    assert line(run, "steps ").startswith("steps   12 = 1.00 epochs |") and "step 12/12 |" in run.out
    assert "the global batch is 4, was 2" in run.out and "nothing is left" not in run.out


def test_nothing_left(folder):
    run = train_gpt(*flags(folder), "-n", 4, "--resume", folder / "run")
    assert "nothing is left to do: the run ends at step 4; raise -n or --epochs" in run.out


def test_run_folder_as_model(folder, tmp_path):
    words = flags(folder)
    words[1] = folder / "run"
    run = train_gpt(*words, "-n", 1, out=tmp_path / "run")
    assert line(run, "model ").startswith(f"model   {folder}/run/step_00000004: gpt2,")
    words[1] = folder / "run" / "step_00000004"
    assert run.series("loss") == train_gpt(*words, "-n", 1, out=tmp_path / "again").series("loss")
    (tmp_path / "begun").mkdir()
    for name in ("run.json", "config.json"):
        (tmp_path / "begun" / name).write_bytes((folder / "run" / name).read_bytes())
    words[1] = tmp_path / "begun"
    run = train_gpt(*words, "-n", 1, ok=False)
    assert "is a run folder without a checkpoint yet: --from-scratch takes its config.json alone" in run.complaint[0]
    train_gpt(*words, "-n", 1, "--from-scratch")
