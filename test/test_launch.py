"""Which GPU a rank takes, where launchers show each rank all of them or one of its own. Emulated GPUs have the UUID
that EMU_GPU_UUID says."""
import pytest
from util import gpt2_config, model_write, shard_write, train_gpt

RANK = "${OMPI_COMM_WORLD_RANK:-0}"


@pytest.mark.emu
@pytest.mark.ranks
@pytest.mark.parametrize("uuid, refused", [(f"GPU-{RANK}", False), ("GPU-7", True)], ids=["one-each", "the-same"])
def test_own_gpu(tmp_path, uuid, refused):
    shard_write(tmp_path / "data" / "train_000000.bin", [i % 31 for i in range(400)])
    model_write(tmp_path / "model", gpt2_config(31, 8, 8), {})
    run = train_gpt("-m", tmp_path / "model", "--from-scratch", "-d", tmp_path / "data", "-b", 2, "-n", 1, device="emu",
                    ranks=2, ok=not refused, wrapper=("sh", "-c", f'EMU_GPU_UUID="{uuid}" exec "$0" "$@"'))
    if refused:
        assert len(run.complaint) == 1 and "ranks 0 and 1 have the same GPU, emulated GPU GPU-7 on " in run.err
