"""Which GPU a rank takes, where launchers show each rank all of them or one of its own, and ranks that share one for
tests. Emulated GPUs have the UUID that EMU_GPU_UUID says."""
import re

import pytest
from util import gpt2_config, model_write, shard_write, train_gpt

RANK = "${OMPI_COMM_WORLD_RANK:-0}"


def run_on(folder, uuid, *flags, ranks=2, **more):
    shard_write(folder / "data" / "train_000000.bin", [i % 31 for i in range(1000)])
    model_write(folder / "model", gpt2_config(31, 16, 16, L=4), {})
    return train_gpt("-m", folder / "model", "--from-scratch", "-d", folder / "data", "-b", 2, *flags, device="emu",
                     ranks=ranks, wrapper=("sh", "-c", f'EMU_GPU_UUID="{uuid}" exec "$0" "$@"'), **more)


@pytest.mark.emu
@pytest.mark.ranks
@pytest.mark.parametrize("uuid, refused", [(f"GPU-{RANK}", False), ("GPU-7", True)], ids=["one-each", "the-same"])
def test_own_gpu(tmp_path, uuid, refused):
    run = run_on(tmp_path, uuid, "-n", 1, ok=not refused)
    if refused:
        assert len(run.complaint) == 1 and "ranks 0 and 1 have the same GPU, emulated GPU GPU-7 on " in run.err


@pytest.mark.emu
@pytest.mark.ranks
@pytest.mark.parametrize("ranks, flags, seed", [
    (2, (0,), 0), (2, (1,), 0), (2, (2, "-p", "bf16"), 3), (2, (3,), 5), (3, (3, "--overlap", 0, "-p", "bf16"), 0),
    (4, (2, "--optimizer", "muon", "--deterministic"), 0)])
def test_shared_gpu(tmp_path, ranks, flags, seed):
    """Collectives staged through pinned memory give the bits of those that read device memory."""
    hashes = []
    for uuid, env in ((f"GPU-{RANK}", {}), ("GPU-7", {"TRAIN_GPT_SHARE_GPU": "1", "EMU_SEED": str(seed)})):
        run = run_on(tmp_path, uuid, "-n", 3, "-g", 2, "-z", *flags, ranks=ranks, verbose=True, **env)
        hashes.append((re.search("state hash [0-9a-f]{16}", run.out)[0], re.search("sent .*", run.out)[0]))
    assert hashes[0] == hashes[1]
