"""What runs beside what, by the emulator's times, in which streams run side by side and an operation always takes the
same (EMU_TIMELINE): a step's updates run beside the next forward, of which each part waits for its own."""
import json

import init
import pytest
from util import gpt2_config, shard_write, train_gpt

V, T = 97, 16
CONFIG = gpt2_config(V, 32, T, L=4, NH=2)


def spans(folder, flags):
    """Operations of two steps: (begin, end, stream, name), by their begin."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shard_write(folder / "data" / "train_000000.bin", init.tokens(2000, V, 3), V)
    run = train_gpt("-m", folder, "--from-scratch", "-d", folder / "data", "-t", T, "-b", 1, "-n", 5, "--profile", 2,
                    "--sample-tokens", 0, *flags, device="emu", out=folder / "run", EMU_TIMELINE="1")
    events = json.loads((run.folder / "trace.json").read_text())["traceEvents"]
    streams = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return sorted((e["ts"], e["ts"] + e["dur"], streams[e["tid"]], e["name"]) for e in events
                  if e["ph"] == "X" and e["cat"] in ("compute", "copy", "communication"))


def beside_next_forward(found):
    """Does the second step's lookup begin before the first step's last update has ended?"""
    updates = [end for _, end, _, name in found if name == "optimizer_update"]
    lookups = [begin for begin, _, _, name in found if name == "embedding_rows"]
    assert len(lookups) == 2 and len(updates) % 2 == 0
    return lookups[1] < updates[len(updates) // 2 - 1]


@pytest.mark.parametrize("flags", [["-z", 0], ["-z", 1, "--optimizer", "lamb"], ["-z", 2, "--offload", "optimizer"],
                                   ["-z", 3, "--offload", "optimizer,gradients,parameters"],
                                   ["-z", 3, "--optimizer", "muon", "--reduce", "step"]])
def test_update_beside_the_next_forward(tmp_path, flags):
    assert beside_next_forward(spans(tmp_path, flags))


def test_without_overlap_after_another(tmp_path):
    assert not beside_next_forward(spans(tmp_path, ["-z", 3, "--overlap", 0]))
