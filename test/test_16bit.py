"""bf16 and fp16: ten steps of a two-layer model on the kernels, in the emulator or on a GPU, against the CPU build's
plain code and against PyTorch. test/golden/gpt2_16bit.json (dev/golden_gpt2.py) has the losses of PyTorch's runs in
fp64, bf16 and fp16.

The rule is that of the op tests: err(kernels) <= 2 * err(plain code of the same precision) + one rounding step, where
err is the largest distance from the run in full precision."""
import numpy as np
import pytest
from test_golden import load, run_golden, tiny_config
from util import FULL, built_devices, weights

DEVICE = "cuda" if "cuda" in built_devices() else "emu"
STEP = 2.0**-23   # of losses, norms and master weights, which are fp32
NAMES = {"bf16": "bfloat16", "fp16": "float16"}
ALL = [(stage, ranks) for stage in range(4) for ranks in (1, 2, 4)]
LAYOUTS = {"bf16": ALL if FULL else [(0, 1), (1, 2), (2, 4), (3, 2)],
           "fp16": ALL if FULL else [(2, 2), (1, 4), (3, 1)]}


def train(folder, device, precision, stage=0, ranks=1):
    folder.mkdir()
    golden = load("gpt2_16bit.json")
    return run_golden(golden, folder, tiny_config(folder, golden), device, "-p", precision, "-z", stage, "-b", 1,
                      "-g", golden["hyper"]["B"] // ranks, "--save-every", golden["hyper"]["steps"], ranks=ranks)


@pytest.fixture(scope="module")
def cpu(tmp_path_factory):
    """The CPU build's runs on one rank, by precision."""
    folder = tmp_path_factory.mktemp("cpu")
    return {precision: train(folder / precision, "cpu", precision) for precision in ("fp32", *NAMES)}


def largest(a, b):
    return np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max()


def assert_rule(name, ours, plain, truth):
    bound = 2 * largest(plain, truth) + STEP * np.abs(truth).max()
    print(f"{name}: {largest(ours, truth):.2e}, plain {largest(plain, truth):.2e}, bound {bound:.2e}")
    assert largest(ours, truth) <= bound, name


def trained(run):
    """All weights as one vector. The gradient of a key's bias is 0 but for noise, of which AdamW makes full steps."""
    found = {name: w.astype(np.float64) for name, w in weights(run.checkpoint(10)).items()}
    for name in found:
        if name.endswith("c_attn.bias"):
            found[name] = np.delete(found[name].reshape(3, -1), 1, axis=0)
    return np.concatenate([found[name].ravel() for name in sorted(found)])


@pytest.mark.parametrize("precision,stage,ranks", [(p, *layout) for p in LAYOUTS for layout in LAYOUTS[p]])
def test_kernels(tmp_path, cpu, precision, stage, ranks):
    run = train(tmp_path / "run", DEVICE, precision, stage, ranks)
    losses = load("gpt2_16bit.json")["losses"]
    full, plain = cpu["fp32"], cpu[precision]
    assert len(run.series("loss")) == 10 and not any(run.series("skipped"))
    assert_rule("loss", run.series("loss"), plain.series("loss"), losses["float64"])
    assert_rule("norm", run.series("norm"), plain.series("norm"), full.series("norm"))
    assert_rule("weights", trained(run), trained(plain), trained(full))


@pytest.mark.parametrize("precision,times", [("bf16", 1), ("fp16", 2)])
def test_pytorch(tmp_path, cpu, precision, times):
    """No further from full precision than PyTorch's bf16, than twice its fp16 (the three are equally far, give or take
    the luck of ten steps); and 16 bits it is."""
    losses = load("gpt2_16bit.json")["losses"]
    assert largest(cpu["fp32"].series("loss"), losses["float64"]) < 1e-5
    theirs = largest(losses[NAMES[precision]], losses["float64"])
    for run in (cpu[precision], train(tmp_path / "run", DEVICE, precision, 2, 2)):
        assert theirs / 100 < largest(run.series("loss"), losses["float64"]) <= times * theirs
