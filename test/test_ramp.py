"""Batch-size ramp and sequence-length curriculum: sizes by step, the data stream without gap or repeat, resume."""
import json

import init
import pytest
from runlog import RunLog
from util import gpt2_config, shard_write, train_gpt

RAMP = ["--batch-ramp", "2:4", "--seq-ramp", "8:6"]                   # of 8 sequences and 32 tokens
SEQUENCES = [2, 2, 4, 6, 8, 8, 8, 8]                                 # by pairs, 2 + 6 * step / 4
TOKENS = [8, 8, 16, 16, 24, 24, 32, 32]                              # by eights, 8 + 24 * step / 6


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ramp")
    (folder / "config.json").write_text(json.dumps(gpt2_config(97, 24, 32, L=2, NH=3)))
    for split, count in (("train", 3000), ("val", 100)):
        shard_write(folder / f"{split}_000000.bin", init.tokens(count, 97, 3), 97)
    return ["-m", folder, "--from-scratch", "-d", folder, "-t", 32, "-l", 1e-3, "--sample-tokens", 0, "--warmup", 2]


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory):
    return train_gpt(*flags, *RAMP, "-b", 2, "-g", 4, "-n", 8, "--save-every", 3, "--dropout", 0.1,
                     out=tmp_path_factory.mktemp("whole") / "run")


def test_sizes(whole):
    assert whole.series("tokens") == [s * t for s, t in zip(SEQUENCES, TOKENS)]
    state = json.loads((whole.checkpoint(6) / "state.json").read_text())
    assert state["position_windows"] == sum(SEQUENCES[:6])
    assert RunLog(whole.folder / "log.jsonl").steps[-1]["tokens_so_far"] == sum(whole.series("tokens"))


@pytest.mark.parametrize("first", [3, 6])
def test_resume(tmp_path, flags, whole, first):
    run = train_gpt(*flags, *RAMP, "-b", 2, "-g", 4, "-n", 8, "--dropout", 0.1, "--resume", whole.checkpoint(first),
                    out=tmp_path)
    assert run.series("loss") == whole.series("loss")[first:]
    assert run.log[-1]["state_hash"] == whole.log[-1]["state_hash"]


@pytest.mark.parametrize("ranks,stage", [(2, 1), (2, 3)])
def test_ranks(tmp_path, flags, whole, ranks, stage):
    run = train_gpt(*flags, *RAMP, "-b", 1, "-g", 4, "-n", 8, "--dropout", 0.1, "-z", stage, ranks=ranks, out=tmp_path)
    assert run.series("loss") == pytest.approx(whole.series("loss"), rel=1e-6)
    assert run.series("tokens") == whole.series("tokens")


def test_epoch(tmp_path, flags):
    """An epoch uses every window once: more steps than without the ramp."""
    run = train_gpt(*flags, "--batch-ramp", "2:4", "-b", 2, "-g", 4, "--epochs", 1, out=tmp_path)
    windows = (3000 - 1) // 32
    assert sum(run.series("tokens")) == 32 * windows
    assert len(run.log) == 4 + -(-(windows - sum(SEQUENCES[:4])) // 8)
    assert f"steps   {len(run.log)} = 1.01 epochs" in run.out        # 14 sequences, then 10 steps of 8, of 93


@pytest.mark.parametrize("ramp,word", [(["--batch-ramp", "3:4"], "multiple of 2"), (["--batch-ramp", "16:4"], "to 8"),
                                       (["--seq-ramp", "8"], "FROM:STEPS"), (["--seq-ramp", "8:0"], "at least 1"),
                                       (["--seq-ramp", "-8:4"], "FROM:STEPS"),
                                       (["--seq-ramp", "12:4"], "multiple of 8")])
def test_refusals(flags, ramp, word):
    run = train_gpt(*flags, *ramp, "-b", 2, "-g", 4, "-n", 1, ok=False)
    assert run.code == 2 and word in run.complaint[0]
