"""conftest.py: read by pytest first: where tests may import from, what their programs find in the environment, and kinds
of tests, for -m:
    quick   by `make check`: seconds, with the build for the CPU in fp32    ranks   starts several ranks with mpirun
    emu     runs the CUDA kernels on the emulated device                     slow    only with TRAIN_GPT_FULL=1
"""
import os
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "dev"))
sys.path.append(str(ROOT / "scripts"))      # last: tensorboard.py is not the package of that name
# Else each start measures the CPU's peak, which no test but test_peak.py looks at.
os.environ.setdefault("TRAIN_GPT_PEAK_GFLOPS", "100")

KINDS = {"quick": "seconds, with the CPU build in fp32: make check", "ranks": "several ranks, started by mpirun",
         "emu": "on the emulated device", "slow": "only with TRAIN_GPT_FULL=1"}


def pytest_configure(config):
    for kind, meaning in KINDS.items():
        config.addinivalue_line("markers", f"{kind}: {meaning}")


def pytest_collection_modifyitems(items):
    """ranks and emu by the parameters; a slow test is skipped unless all are asked for."""
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if params.get("device") == "emu":
            item.add_marker("emu")
        if isinstance(params.get("ranks"), int) and params["ranks"] > 1:
            item.add_marker("ranks")
        if item.get_closest_marker("slow") and os.environ.get("TRAIN_GPT_FULL") != "1":
            item.add_marker(pytest.mark.skip(reason="--full"))


def pytest_make_parametrize_id(val):
    """Names that -k can be given: of dicts, lists and sentences their words, joined by - and cut at 60 letters."""
    def words(value):
        if isinstance(value, dict):
            return " ".join(f"{key} {words(inner)}" for key, inner in value.items())
        if isinstance(value, (list, tuple)):
            return " ".join(map(words, value))
        return getattr(value, "__name__", str(value))

    if isinstance(val, (dict, list, tuple, str)):
        return "-".join(re.findall(r"[\w.]+", words(val)))[:60] or "none"
    return None
