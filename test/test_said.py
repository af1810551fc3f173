"""What is printed at the start and at a resume is so: rates, steps, where a model comes from; files' own control
characters do not reach a terminal."""
import json
import subprocess
import sys

import init
import pytest
from util import ROOT, gpt2_config, model_write, shard_write, train_gpt

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


# ---- text of files
ESCAPE = "\x1b[31m"


def test_control_characters(folder, tmp_path):
    """Of an error, of the start, of watch.py: as \\x1b."""
    model = tmp_path / f"red{ESCAPE}"
    model.mkdir()
    for path in (folder / "model").iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    words = flags(folder)
    words[1] = model
    run = train_gpt(*words, "-n", 1, out=tmp_path / f"run{ESCAPE}")
    assert "model   " in run.out and "red\\x1b[31m: gpt2" in run.out
    assert ESCAPE not in run.out
    paste = ["bash", "-c", f"printf '%s\\n' {line(run, 'flags ')[6:]}"]
    assert f"--model={model}" in subprocess.run(paste, capture_output=True, text=True).stdout.splitlines()
    watch = subprocess.run([sys.executable, ROOT / "scripts/watch.py", tmp_path / f"run{ESCAPE}", "--once"],
                           capture_output=True, text=True)
    assert "run\\x1b[31m" in watch.stdout and ESCAPE not in watch.stdout
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"activation_function": ESCAPE + "gelu\x9b2J"}))
    run = train_gpt(*words, "-n", 1, ok=False)
    assert 'is "\\x1b[31mgelu\\x9b2J"' in run.err and ESCAPE not in run.err


def test_control_characters_of_a_model(folder, tmp_path):
    """Of a model's name in what --export prints, and in the keys of its config.json."""
    model = tmp_path / f"red{ESCAPE}"
    model.mkdir()
    for path in (folder / "model").iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "n_innerx" + ESCAPE[:1]: 1}))
    run = train_gpt("-m", model, "--export", tmp_path / f"x{ESCAPE}")
    assert "exported " in run.out and "n_innerx\\x1b" in run.err and ESCAPE[:1] not in run.out + run.err
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"gradient_clipping": 1.0, "wandb": {"enabled": False, "group": ESCAPE}}))
    run = train_gpt(*flags(folder), "--config", config, "--print-config")
    assert ESCAPE[:1] not in run.out


def test_page_is_escaped(folder, tmp_path):
    """Every string of a log, and every key of its settings."""
    bad = "<script>x</script>"
    log = tmp_path / "log.jsonl"
    lines = (folder / "run" / "log.jsonl").read_text().splitlines()
    header = json.loads(lines[0])["run"]
    header = {key: bad if isinstance(value, str) else value for key, value in header.items()} | {bad: bad}
    header["memory"] = {bad: {bad: 1.0}}
    log.write_text("\n".join([json.dumps({"run": header}), *lines[1:], json.dumps({"step": bad, "sample": bad})]))
    page = subprocess.run([sys.executable, ROOT / "scripts/report.py", log, "-o", tmp_path], capture_output=True,
                          text=True)
    assert page.returncode == 0, page.stderr
    text = (tmp_path / "report.html").read_text()
    assert bad not in text and text.count("&lt;script&gt;x") > 20


@pytest.mark.parametrize("name", ["config.json", "ds.json"])
def test_key_twice(folder, tmp_path, name):
    model = tmp_path / "model"
    model.mkdir()
    for path in (folder / "model").iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    (tmp_path / "ds.json").write_text('{"gradient_clipping": 1.0}')
    path = model / name if name == "config.json" else tmp_path / name
    key = "n_layer" if name == "config.json" else "gradient_clipping"
    path.write_text(path.read_text().replace("{", f'{{"{key}": 1, ', 1))
    words = flags(folder)
    words[1] = model
    run = train_gpt(*words, "-n", 1, "--config", tmp_path / "ds.json", ok=False)
    assert f'{path}: has the key "{key}" twice in an object: take one out' in run.complaint[0]
