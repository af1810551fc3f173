"""The CPU's peak: measured where it is printed or used, and only there, or given by TRAIN_GPT_PEAK_GFLOPS."""
import re

import pytest
from util import gpt2_config, model_write, shard_write, train_gpt

pytestmark = pytest.mark.quick


@pytest.fixture
def words(tmp_path):
    shard_write(tmp_path / "data" / "train_000000.bin", [i % 31 for i in range(400)])
    shard_write(tmp_path / "data" / "val_000000.bin", [i % 31 for i in range(100)])
    model_write(tmp_path / "model", gpt2_config(31, 8, 8), {})
    return ["-m", tmp_path / "model", "--from-scratch", "-d", tmp_path / "data", "-b", 2, "-n", 2]


def start_line(run):
    return re.search(r"peak (\S+) Gflop/s per rank( \(.*\))?", run.out)


def test_given(words):
    run = train_gpt(*words, TRAIN_GPT_PEAK_GFLOPS="1e-6")
    assert start_line(run).groups() == ("1e-06", " (TRAIN_GPT_PEAK_GFLOPS)")
    shares = [float(share) for share in re.findall(r"([\d.]+)% peak", run.out)]
    assert len(shares) == 2 and min(shares) > 100, "not shares of what was given"


def test_measured(words):
    peak, source = start_line(train_gpt(*words, TRAIN_GPT_PEAK_GFLOPS="")).groups()
    assert 1 < float(peak) < 1e5 and source is None


@pytest.mark.parametrize("given", ["much", "0", "-5", "inf", "nan", "5 "])
def test_refused(words, given):
    run = train_gpt(*words, TRAIN_GPT_PEAK_GFLOPS=given, ok=False)
    assert run.complaint == [f'train_gpt: TRAIN_GPT_PEAK_GFLOPS is "{given}": a number above 0, or leave it out to '
                             'have it measured'], run.err


def test_not_measured(words):
    """What does not train and estimates nothing would refuse the figure if it looked for it."""
    train_gpt(*words[:-4], "--eval", TRAIN_GPT_PEAK_GFLOPS="much")
    train_gpt("--plan", "-m", "d2", "--gpu", "h100", TRAIN_GPT_PEAK_GFLOPS="much")
    train_gpt("--report", TRAIN_GPT_PEAK_GFLOPS="much")
