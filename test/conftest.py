"""conftest.py: read by pytest first: where tests may import from, what their programs find in the environment, and
kinds of tests, for -m:
    quick   by `make check`: seconds, with the build for the CPU in fp32    ranks   starts several ranks with mpirun
    emu     runs the CUDA kernels on the emulated device                     slow    only with TRAIN_GPT_FULL=1
    pairwise   of the product of its parameters, devices among them, as many as have each pair of values in one of them;
               all of it with TRAIN_GPT_FULL=1
"""
import os
import pathlib
import re
import sys

import pytest
from util import pairwise

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "dev"))
sys.path.append(str(ROOT / "scripts"))      # last: tensorboard.py is not the package of that name
# Else each start measures the CPU's peak, which no test but test_peak.py looks at.
os.environ.setdefault("TRAIN_GPT_PEAK_GFLOPS", "100")

KINDS = {"quick": "seconds, with the CPU build in fp32: make check", "ranks": "several ranks, started by mpirun",
         "emu": "on the emulated device", "slow": "only with TRAIN_GPT_FULL=1",
         "pairwise": "each pair of values of its parameters once; the product with TRAIN_GPT_FULL=1"}
FULL = os.environ.get("TRAIN_GPT_FULL") == "1"


def pytest_configure(config):
    for kind, meaning in KINDS.items():
        config.addinivalue_line("markers", f"{kind}: {meaning}")


def pytest_collection_modifyitems(config, items):
    """ranks and emu by the parameters; a slow test is skipped unless all are asked for."""
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if params.get("device") == "emu":
            item.add_marker("emu")
        if isinstance(params.get("ranks"), int) and params["ranks"] > 1:
            item.add_marker("ranks")
        if item.get_closest_marker("slow") and not FULL:
            item.add_marker(pytest.mark.skip(reason="--full"))
    left_out = without(items)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def axes_of(item):
    """{axis: value} of a test's parameters. Those that one parametrize gives together are one axis."""
    axes = {name: name for name in item.callspec.params}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if isinstance(mark.args[0], str) else ",".join(mark.args[0])
        axes.update({name.strip(): names for name in names.split(",")})
    values = {}
    for name, axis in axes.items():
        values.setdefault(axis, []).append(repr(item.callspec.params[name]))
    return {axis: tuple(value) for axis, value in values.items()}


def without(items):
    """Of each test that is marked pairwise(without=f): parameters for which f is true, and what a pairwise set of the
    rest does not need."""
    products, left_out = {}, set()
    for item in items:
        mark = item.get_closest_marker("pairwise")
        if mark is None or not hasattr(item, "callspec"):
            continue
        if mark.kwargs.get("without", lambda **_: False)(**item.callspec.params):
            left_out.add(item)
        else:
            products.setdefault(item.nodeid.split("[")[0], []).append(item)
    if not FULL:
        for product in products.values():
            left_out |= set(product) - set(pairwise(product, axes_of))
    return left_out


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
