"""Windows of whole documents: each is as if it were alone, whatever shares its window; the same after a resume and for
any number of ranks; where documents begin and end."""
import json
import re

import init
import numpy as np
import pytest
from util import built_devices, docs_write, gpt2_config, llama_config, model_write, moments, shard_write, train_gpt

V = 61
QUIET = ["--sample-tokens", 0, "-l", 1e-3]
LENGTHS = [17, 10, 15, 17, 10, 15, 10, 15, 17, 17, 10, 15]      # tokens: 16, 9 and 14 inputs


@pytest.fixture(params=built_devices())
def device(request):
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, and documents as shards with flags; of every document a fifth does not count."""
    folder = tmp_path_factory.mktemp("documents")
    gpt2, llama = gpt2_config(V, 32, 64, L=2, NH=2), llama_config(V, 32, 64, L=2, NH=4, num_key_value_heads=2)
    model_write(folder / "gpt2", gpt2, init.gpt2_weights(gpt2, 3))
    model_write(folder / "llama", llama, init.random_weights(init.llama_shapes(llama), 3, 0.2))
    tokens = init.tokens(sum(LENGTHS), V, 5)
    for part in ("train", "val"):
        path = folder / "docs" / f"{part}_000000.bin"
        shard_write(path, tokens, V)
        docs_write(path, np.arange(len(tokens)) % 5 > 0, np.cumsum([0] + LENGTHS[:-1]))
    return folder


def step(folder, model, tmp_path, *args, **how):
    run = train_gpt("-m", folder / model, "-d", folder / "docs", "-n", 1, "--clip", 0, *QUIET, *args, out=tmp_path,
                    **how)
    return run, moments(run.checkpoint(1))[0]


@pytest.mark.pairwise
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_as_if_alone(folder, tmp_path, device, model, recompute, stage):
    """In windows of 16 tokens each document is alone; in those of 48 there are up to four."""
    alone, want = step(folder, model, tmp_path / "a", "-t", 16, "-b", 4, "-g", 3, device=device)
    packed, got = step(folder, model, tmp_path / "p", "-t", 48, "-b", 2, "-g", 1, "-z", stage, "-r", recompute,
                       device=device, ranks=2)
    assert "12 documents in 12 windows of 16" in alone.out and "12 documents in 4 windows of 48" in packed.out
    for key in ("loss", "val_loss"):
        assert packed.series(key) == pytest.approx(alone.series(key), rel=1e-6)
    assert packed.series("tokens") == alone.series("tokens") and packed.series("tokens")[0] < sum(LENGTHS) - 12
    for name in want:
        scale = np.abs(want[name]).max()
        np.testing.assert_allclose(got[name], want[name], atol=2e-6 * scale + 1e-9, err_msg=name)


def test_joined(folder, tmp_path):
    """The stream of tokens, as without documents, still with what counts."""
    run, _ = step(folder, "gpt2", tmp_path, "-t", 16, "-b", 2, "--documents", "joined")
    assert "10 windows of 16" in run.out and "documents in" not in run.out


def test_resume(folder, tmp_path, device):
    """Another number of ranks, in the middle of an epoch, shuffled."""
    args = ["-m", folder / "llama", "-d", folder / "docs", "-t", 32, *QUIET]
    args += ["--schedule", "constant", "--warmup", 1]
    whole = train_gpt(*args, "-b", 2, "-n", 8, device=device, out=tmp_path / "whole")
    train_gpt(*args, "-b", 1, "-n", 3, device=device, ranks=2, out=tmp_path / "part")
    part = train_gpt(*args, "-b", 1, "-g", 2, "-n", 8, "--resume", "auto", device=device, out=tmp_path / "part")
    assert part.series("loss") == pytest.approx(whole.series("loss"), rel=1e-5)


@pytest.mark.parametrize("too_long, said", [("drop", "8 documents in .* 4 documents longer than -t left out"),
                                            ("cut", "16 documents in .* 4 documents longer than -t cut")])
def test_too_long(folder, tmp_path, too_long, said):
    run, _ = step(folder, "gpt2", tmp_path, "-t", 15, "-b", 1, "--too-long", too_long)
    assert re.search(said, run.out)


def test_text_with_end_tokens(folder, tmp_path):
    """Shards of text: the token that ends documents is in meta.json."""
    tokens = np.where(init.tokens(sum(LENGTHS), V, 5) == 7, 8, init.tokens(sum(LENGTHS), V, 5))
    tokens[np.cumsum(LENGTHS) - 1] = 7
    shard_write(tmp_path / "text" / "train_000000.bin", tokens, V)
    args = ["-m", folder / "gpt2", "-d", tmp_path / "text", "-t", 48, "-b", 1, "-n", 1, "--documents", "separate",
            *QUIET]
    refused = train_gpt(*args, ok=False)
    assert "nothing says which token ends a document" in refused.err
    (tmp_path / "text" / "meta.json").write_text(json.dumps({"documents": {"after_ids": []}}))
    refused = train_gpt(*args, ok=False)
    assert "has no documents.after_ids" in refused.err
    (tmp_path / "text" / "meta.json").write_text(json.dumps({"documents": {"after_ids": [3, 7]}}))
    assert "12 documents in 4 windows of 48" in train_gpt(*args).out


def test_flags_lost(folder, tmp_path):
    """A shard whose flags are lost would be trained on whole, questions too."""
    tokens = init.tokens(sum(LENGTHS), V, 5)
    for k in range(2):
        shard_write(tmp_path / f"train_{k:06d}.bin", tokens, V)
    docs_write(tmp_path / "train_000000.bin", np.ones(len(tokens)), [0])
    args = ["-m", folder / "gpt2", "-d", tmp_path, "-t", 16, "-b", 1, "-n", 1, *QUIET]
    assert "train_000001.bin has no .docs beside it" in train_gpt(*args, ok=False).complaint[0]
    train_gpt(*args, "--documents", "joined")


@pytest.mark.parametrize("flags, words", [(["--seq-ramp", "8:4"], "--seq-ramp with separate documents"),
                                          (["--eval-stride", 4], "--eval-stride with separate documents")])
def test_refused(folder, flags, words):
    run = train_gpt("-m", folder / "gpt2", "-d", folder / "docs", "-t", 16, "-n", 1, *flags, ok=False)
    assert run.code == 2 and len(run.complaint) == 1 and words in run.complaint[0]
