"""--eval in its conventions, against log-likelihoods computed here from the logits that --prompts gives."""
import json
import math
import re

import init
import numpy as np
import pytest
from util import gpt2_config, model_write, train_gpt

V, C, T, COUNT, BYTES, WORDS = 61, 16, 12, 75, 300, 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("perplexity")
    config = gpt2_config(V, C, T, L=2, NH=2)
    weights = init.gpt2_weights(config, 1)                             # made larger, so that losses differ
    model_write(folder / "model", config, {name: 4 * w if w.ndim == 2 else w for name, w in weights.items()})
    header = np.zeros(256, np.int32)
    header[:9] = 20240520, 1, COUNT, 0, V, BYTES, 0, WORDS, 0
    tokens = np.asarray(init.tokens(COUNT, V, 3), np.uint16)
    (folder / "data").mkdir()
    for split in ("train", "val"):
        (folder / "data" / f"{split}_000000.bin").write_bytes(header.tobytes() + tokens.tobytes())
    return folder, [int(t) for t in tokens]


def log_likelihoods(folder, tokens):
    """{(first token of the window, target): log p}, of every window and place in it that some convention asks for."""
    wanted = [(first, last) for first in range(0, COUNT - 1) for last in range(first, min(first + T, COUNT - 1))]
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"ids": tokens[first:last + 1], "max_tokens": 0, "logits": True}) + "\n"
                            for first, last in wanted))
    run = train_gpt("-m", folder / "model", "--prompts", path, "-b", 16)
    found = {}
    for line in map(json.loads, run.out.splitlines()):
        first, last = wanted[line["index"]]
        logits = np.array(line["logits"])
        top = logits.max()
        found[first, last + 1] = logits[tokens[last + 1]] - top - math.log(np.exp(logits - top).sum())
    return found


def test_conventions(folder):
    """Every target but the first token counts once, from the window of its convention: as in Hugging Face's page on
    perplexity, with T targets in the first window."""
    folder, tokens = folder
    known = log_likelihoods(folder, tokens)
    for stride, ranks, micro_batch in ((T, 1, 4), (5, 1, 3), (5, 2, 2), (1, 1, 8), (6, 3, 1)):
        seen, total, first = 0, 0.0, 0
        while seen < COUNT - 1:
            end = min(first + T, COUNT - 1)
            total += sum(known[first, target] for target in range(seen + 1, end + 1))
            seen, first = end, first + stride
        given = [] if stride == T else ["--eval-stride", stride]
        run = train_gpt("--eval", "-m", folder / "model", "-d", folder / "data", "-b", micro_batch, *given,
                        ranks=ranks)
        loss, per_token, count, bits, per_word = map(float, re.search(
            r"loss (\S+) \| perplexity (\S+) per token, (\d+) tokens \| (\S+) bits per byte \| perplexity (\S+) per",
            run.out).groups())
        assert count == COUNT - 1
        want = -total / count
        assert loss == pytest.approx(want, abs=2e-6), (stride, ranks)
        assert per_token == pytest.approx(math.exp(want), abs=1e-3)
        assert bits == pytest.approx(want / math.log(2) * COUNT / BYTES, abs=1e-4)
        assert per_word == pytest.approx(math.exp(want * COUNT / WORDS), rel=1e-4)
        assert ("windows of 12 every" in run.out) == (stride != T)


def test_stride_above_the_window_is_refused(folder):
    folder, _ = folder
    run = train_gpt("--eval", "-m", folder / "model", "-d", folder / "data", "--eval-stride", T + 1, ok=False)
    assert run.code == 2 and "--eval-stride 13" in run.complaint[0]
