"""Dropout: the same masks for any rank count, stage, split of the batch and level of recomputation, and after a resume;
off at 0. The op tests (dropout, attention) test masks and gradients."""
import json

import init
import pytest
from util import FULL, built_devices, gpt2_config, llama_config, shard_write, train_gpt

STEPS = 6
TRAIN = ["-n", STEPS, "-l", 1e-3, "--dropout", 0.2]


@pytest.fixture(scope="module", params=[d for d in built_devices() if d == "cpu" or FULL])
def device(request):
    return request.param


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def flags(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    config = gpt2_config(97, 24, 16, L=3, NH=3) if request.param == "gpt2" else llama_config(97, 32, 16, L=3, NH=4)
    (folder / "config.json").write_text(json.dumps(config))
    for split, count in (("train", 3000), ("val", 100)):
        shard_write(folder / f"{split}_000000.bin", init.tokens(count, 97, 3), 97)
    return ["-m", folder, "--from-scratch", "-d", folder, "-t", 16, "--sample-tokens", 0]


@pytest.fixture(scope="module")
def whole(flags, device, tmp_path_factory):
    """All 8 sequences of a step at once, on one rank."""
    return train_gpt(*flags, *TRAIN, "-b", 8, "--save-every", 3, device=device,
                     out=tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.parametrize("ranks,stage,b,g", [(1, 0, 2, 4), (2, 2, 2, 2), (4, 3, 1, 2)])
def test_ranks(tmp_path, flags, device, whole, ranks, stage, b, g):
    run = train_gpt(*flags, *TRAIN, "-z", stage, "-b", b, "-g", g, ranks=ranks, device=device, out=tmp_path)
    assert run.series("loss") == pytest.approx(whole.series("loss"), rel=1e-6)
    assert run.series("norm") == pytest.approx(whole.series("norm"), rel=1e-5)


@pytest.mark.parametrize("level", ["cheap", "mlp", "attention", "block", "2"])
def test_recompute(tmp_path, flags, device, whole, level):
    run = train_gpt(*flags, *TRAIN, "-b", 8, "-r", level, device=device, out=tmp_path)
    assert run.series("loss") == whole.series("loss")
    assert run.log[-1]["state_hash"] == whole.log[-1]["state_hash"]


def test_resume(tmp_path, flags, device, whole):
    run = train_gpt(*flags, *TRAIN, "-b", 8, "--resume", whole.checkpoint(3), device=device, out=tmp_path)
    assert run.log[-1]["state_hash"] == whole.log[-1]["state_hash"]


def test_off_is_off(tmp_path, flags, device, whole):
    """0 has the bits of the default. Each kind of dropout changes the first step's loss; validation has none."""
    cases = {"off": [], "zero": ["--dropout", 0], "nearly": ["--dropout", 1e-10], "attention": ["--attn-dropout", 0.2],
             "rest": ["--dropout", 0.2, "--attn-dropout", 0], "seed": ["--dropout", 0.2, "--seed", 43],
             "still": ["--dropout", 0.2, "-l", 0], "still, off": ["-l", 0]}
    runs = {name: train_gpt(*flags, "-b", 8, "-n", 2, *more, device=device, out=tmp_path / name)
            for name, more in cases.items()}
    for name in ("zero", "nearly"):
        assert runs[name].series("loss") == runs["off"].series("loss")
        assert runs[name].log[-1]["state_hash"] == runs["off"].log[-1]["state_hash"]
    first = [runs[name].series("loss")[0] for name in ("off", "attention", "rest", "seed")]
    first.append(whole.series("loss")[0])
    assert len(set(first)) == len(first)
    assert runs["still"].series("loss") != runs["still, off"].series("loss")
    assert runs["still"].series("val_loss") == runs["still, off"].series("val_loss") != []


def test_config_is_said(flags, device):
    """Dropout in config.json is reported, neither applied nor ignored silently."""
    folder = flags[1]
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "gpt2":
        pytest.skip("LLaMA's config names none for these")
    (folder / "named").mkdir(exist_ok=True)
    (folder / "named" / "config.json").write_text(json.dumps({**config, "resid_pdrop": 0.1}))
    run = train_gpt("-m", folder / "named", *flags[2:], "-b", 1, "-n", 1, device=device)
    assert "dropout none: transformers takes 0.1 for " in run.out
    assert "/config.json, --dropout 0.1 turns it on" in run.out
