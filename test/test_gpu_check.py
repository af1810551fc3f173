"""scripts/gpu_check.sh, tried on the emulated device: every step runs, and its table has a row for each."""
import subprocess

import pytest
from util import FULL, ROOT, binary, environment


@pytest.mark.skipif(not FULL, reason="--full: builds and runs for a minute")
def test_dry_run():
    if not binary("emu").exists():
        pytest.skip("emu is not built")
    done = subprocess.run(["scripts/gpu_check.sh", "--dry"], cwd=ROOT, env=environment(), capture_output=True,
                          text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    table = (ROOT / "build" / "gpu_check" / "table.md").read_text()
    for name in ("build", "op tests fp32", "bench d2", "bench d3", "ceilings: bench_d2", "ceilings: bench_d3"):
        assert f"| {name}" in table, table
    assert "FAILED" not in table
