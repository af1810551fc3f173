"""The scripts that people start: each run_*.sh in its dry form, every step of it executed; hosts.sh and slurm.sh around
them; prepare.py's other sources of WikiText."""
import os
import re
import subprocess
import sys

import pytest
from util import ROOT, binary, environment, read_log, weights


def script(*words, ok=True, **env):
    if not binary("cpu").exists():
        pytest.skip("cpu is not built")
    env = environment(TRAIN_GPT=str(binary("cpu")), PYTHON=sys.executable, OMP_NUM_THREADS="1",
                      OMPI_MCA_rmaps_base_oversubscribe="1", **env)
    run = subprocess.run(list(map(str, words)), cwd=ROOT, env=env, capture_output=True, text=True, errors="replace",
                         timeout=120)
    assert (run.returncode == 0) == ok, run.stdout + run.stderr
    return run


def check(out, run, perplexities):
    """The run reached its end, changed the weights, was measured as often as it says, and has a page."""
    assert [entry["step"] for entry in read_log(out / "log.jsonl")] == list(range(1, 7))
    page = (out / "report.html").read_text()
    assert "<h2>Memory</h2>" in page and "<h2>Samples</h2>" in page
    assert (out / "step_00000006" / "config.json").exists()
    found = re.findall(r"per token, windows of 32 every 16 +([\d.]+)", run.stdout)
    assert len(found) == perplexities
    assert f"done: {out}" in run.stdout


def test_wikitext103(tmp_path):
    run = script("scripts/run_gpt2_medium_wikitext103.sh", "--dry", "--out", tmp_path, "--", "-l", "1e-3")
    check(tmp_path, run, 2)
    assert "--lr=1e-3" in run.stdout and "--lr=5e-5" not in run.stdout      # what stands behind -- overrides
    assert "dropout 0.1 of embeddings and branches, 0.1 of attention probabilities" in run.stdout
    before, after = weights(tmp_path / "model"), weights(tmp_path / "step_00000006")
    assert any((before[name] != after[name]).any() for name in before)
    three = re.findall(r"^  per .* ([\d.]+)$", run.stdout, re.M)
    assert len(three) == 6 and all(float(x) > 1 for x in three)


def test_wikitext2_from_scratch(tmp_path):
    run = script("scripts/run_gpt2_medium_wikitext2.sh", "--dry", "--from-scratch", "--out", tmp_path, "--",
                 "--dropout", "0")
    check(tmp_path, run, 1)
    assert "--dropout=0 " in run.stdout and "dropout 0.1" not in run.stdout
    again = script("scripts/run_gpt2_medium_wikitext2.sh", "--dry", "--from-scratch", "--out", tmp_path)
    assert "resume" in again.stdout and "is there from before" in again.stdout


def test_124m_on_hosts(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("# this machine twice\nlocalhost slots=2\n")
    run = script("scripts/hosts.sh", hosts, "scripts/run_gpt2_124m.sh", "--dry", "--out", tmp_path / "run")
    check(tmp_path / "run", run, 0)
    assert "2 ranks" in run.stdout and "ZeRO    stage 1" in run.stdout


def test_llama_1b_under_slurm(tmp_path):
    """srun is stood in for by a script that starts the ranks with mpirun."""
    stub = tmp_path / "bin" / "srun"
    stub.parent.mkdir()
    stub.write_text('#!/bin/bash\n[ "$1" = --mpi=pmix ] && [ "$2" = --ntasks=2 ] || exit 3\nshift 3\n'
                    'exec mpirun --oversubscribe --bind-to none -np 2 "$@"\n')
    stub.chmod(0o755)
    run = script("bash", "scripts/slurm.sh", "scripts/run_llama_1b.sh", "--dry", "--out", tmp_path / "run",
                 PATH=f"{stub.parent}:{os.environ['PATH']}", SLURM_NTASKS="2")
    check(tmp_path / "run", run, 0)
    assert "srun --mpi=pmix" in run.stdout and "ZeRO    stage 2" in run.stdout


def test_llama3_8b_finetune(tmp_path):
    run = script("scripts/run_llama3_8b_finetune.sh", "--dry", "--out", tmp_path, "--ranks", 1, "--", "--verbose")
    check(tmp_path, run, 2)
    assert "stage 3, -r attention" in run.stdout


@pytest.mark.parametrize("words,complaint", [
    (["scripts/run_gpt2_124m.sh", "--dri"], "unknown option --dri"),
    (["scripts/run_gpt2_124m.sh", "--out", "{tmp}"], "fineweb.py"),
    (["scripts/run_llama3_8b_finetune.sh", "--out", "{tmp}"], "needs --model"),
    (["scripts/run_gpt2_medium_wikitext2.sh", "--model", "{tmp}", "--out", "{tmp}"], "no config.json"),
    (["scripts/hosts.sh", "/dev/null", "scripts/run_llama_1b.sh"], "names no machine"),
    (["bash", "scripts/slurm.sh", "scripts/run_llama_1b.sh"], "not under Slurm"),
])
def test_refused(tmp_path, words, complaint):
    run = script(*(word.format(tmp=tmp_path) for word in words), ok=False)
    assert complaint in run.stderr


@pytest.mark.parametrize("name", ["gpt2_medium_wikitext103", "gpt2_medium_wikitext2", "gpt2_124m", "llama_1b",
                                  "llama3_8b_finetune"])
def test_header_states_the_run(name):
    """--help says what a run costs and what it is held against, and prints the options."""
    text = script(f"scripts/run_{name}.sh", "--help").stdout
    for word in ("recipe", "work", "FLOP", "hours", "H100", "A100", "reference", "--from-scratch", "--dry"):
        assert word in text, word


@pytest.mark.parametrize("kind", ["raw", "parquet", "mixed"])
def test_local_wikitext(tmp_path, kind):
    """A folder of raw files, or of the hub's parquet files, makes the same shards."""
    lines = [" = Title = \n", "", " Words of a text , as WikiText has them . \n", " " + "more words " * 90 + "\n"]
    source = tmp_path / "source"
    source.mkdir()
    for stem, hub_stem in (("train", "train"), ("valid", "validation"), ("test", "test")):
        if kind == "raw":
            (source / f"wiki.{stem}.raw").write_text("".join(lines))
        elif kind == "parquet":
            pyarrow = pytest.importorskip("pyarrow")
            import pyarrow.parquet
            pyarrow.parquet.write_table(pyarrow.table({"text": lines}), source / f"{hub_stem}-00000-of-00001.parquet")
        elif stem != "valid":
            (source / f"wiki.{stem}.raw").write_text("".join(lines))
    command = [sys.executable, "data/prepare.py", "wikitext2", "--source", source, "--vocab-size", "300", "--out",
               tmp_path / "out"]
    run = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
    if kind == "mixed":
        assert run.returncode == 1 and "has neither wiki.valid.raw nor validation-*.parquet" in run.stderr
    else:
        assert run.returncode == 0, run.stderr
        assert (tmp_path / "out" / "test_000000.bin").exists()
