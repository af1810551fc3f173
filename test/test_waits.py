"""No host synchronization inside a step: no stream, event or device, no synchronous or pageable copy, no freed memory,
and no call to other hosts. The host reads the result of a step; that is the only synchronization of training. On a
GPU, and here with EMU_SEED, it does so when the next one is enqueued; where launches return when their work is done,
at once, and several ranks then agree on signals. The CPU and emulated builds count such calls, even if there was
nothing left to wait for."""
import json
import re

import init
import pytest
from util import gpt2_config, llama_config, shard_write, train_gpt

V, T = 97, 16
MODELS = {"gpt2": gpt2_config(V, 32, T, L=3, NH=2), "llama": llama_config(V, 32, T, L=3, NH=2)}
CASES = [
    ("gpt2", 1, []),
    ("gpt2", 1, ["-z", 1, "-g", 3, "-r", "mlp", "--dropout", 0.1]),
    ("llama", 1, ["-r", "block", "--offload", "activations"]),
    ("gpt2", 2, ["-z", 0, "-g", 3]),
    ("gpt2", 2, ["-z", 1, "--optimizer", "lamb", "--deterministic"]),
    ("llama", 2, ["-z", 2, "-g", 3, "--optimizer", "muon", "--overlap", 0]),
    ("llama", 2, ["-z", 3, "-r", 2, "-g", 2, "--offload", "activations"]),
    ("gpt2", 2, ["-z", 3, "-p", "bf16", "--master", "split", "--state-dtype", "bf16", "--grad-dtype", "bf16"]),
    ("gpt2", 2, ["-z", 2, "-p", "fp16", "-g", 2, "--batch-ramp", "4:4", "--seq-ramp", "8:4"]),
]


def waits(folder, device, model, ranks, flags, steps):
    run = train_gpt("-m", folder, "--from-scratch", "-d", folder / "data", "-t", T, "-b", 2, "-n", steps,
                    "--sample-tokens", 0, "--no-shuffle", *flags, ranks=ranks, device=device, ok=None, verbose=True,
                    EMU_SEED="1")
    if run.code != 0 and "is not in this binary" in run.err:
        pytest.skip(run.err.splitlines()[0])
    assert run.code == 0, run.err
    line = r"^syncs   host synchronizations: (\d+) inside steps, (\d+) for a step's result, (\d+) others"
    return tuple(map(int, re.search(line, run.out, re.M).groups()))


@pytest.mark.parametrize("model, ranks, flags", CASES, ids=lambda x: "".join(map(str, x)) if isinstance(x, list) else x)
@pytest.mark.parametrize("device", ["cpu", "emu"])
def test_host_waits_for_no_step_but_the_one_before(tmp_path, device, model, ranks, flags):
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    shard_write(tmp_path / "data" / "train_000000.bin", init.tokens(2000, V, 3), V)
    few = waits(tmp_path, device, model, ranks, flags, 3)
    many = waits(tmp_path, device, model, ranks, flags, 7)
    per_step = 2 if ranks > 1 and device == "cpu" else 1
    assert few[:2] == (0, 3 * per_step) and many[:2] == (0, 7 * per_step)
    assert few[2] == many[2]                       # of the hash after the last step
