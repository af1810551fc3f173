"""A build without MPI and NCCL: one process, the bits of the others; started as one of two it says what it lacks."""
import json
import re
import subprocess

import init
import pytest
from util import ROOT, environment, gpt2_config, shard_write, train_gpt


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    build = tmp_path_factory.mktemp("alone")
    subprocess.run(["make", "--silent", "NO_MPI=1", "NO_NCCL=1", "PREC=fp32", f"BUILD={build}", f"{build}/train_gpt"],
                   check=True, cwd=ROOT)
    return build / "train_gpt"


def test_trains_alone(tmp_path, alone):
    (tmp_path / "config.json").write_text(json.dumps(gpt2_config(97, 32, 16, L=2, NH=2)))
    shard_write(tmp_path / "data" / "train_000000.bin", init.tokens(2000, 97, 3), 97)
    flags = ["-m", tmp_path, "--from-scratch", "-d", tmp_path / "data", "-t", 16, "-n", 2, "--sample-tokens", 0]
    run = subprocess.run([alone, *map(str, flags)], capture_output=True, text=True, env=environment())
    assert run.returncode == 0, run.stderr
    hashes = [re.search(r"^state hash (\w+)", out, re.M)[1] for out in (run.stdout, train_gpt(*flags).out)]
    assert hashes[0] == hashes[1]


def test_is_not_one_of_two(alone):
    run = subprocess.run([alone, "-n", "1"], capture_output=True, text=True, env=environment(OMPI_COMM_WORLD_SIZE="2"))
    assert run.returncode == 1 and "this binary is built with NO_MPI=1" in run.stderr
