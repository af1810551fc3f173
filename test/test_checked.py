"""train_gpt under the memory checker (races, out-of-bounds, uninitialized reads), in layouts that together use every
stream and collective; the numbers are those of the plain emulated build."""
import subprocess

import init
import pytest
from util import ROOT, gpt2_config, model_write, shard_write, train_gpt

LAYOUTS = [(0, 1), (0, 2), (1, 2), (2, 1), (2, 2)]   # stage, ranks


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checked")
    model_write(folder / "model", gpt2_config(97, 32, 32, L=2, NH=2), {})
    shard_write(folder / "data" / "train_000000.bin", init.tokens(3000, 97, 3), 97)
    shard_write(folder / "data" / "val_000000.bin", init.tokens(200, 97, 4), 97)
    return ["-m", folder / "model", "--from-scratch", "-d", folder / "data", "-n", 2, "-b", 1, "-g", 2, "-t", 32,
            "-l", 1e-3, "--sample-tokens", 0, "--save-every", 1]


@pytest.mark.parametrize("stage,ranks", LAYOUTS)
def test_nothing_found(tmp_path, monkeypatch, flags, stage, ranks):
    plain = train_gpt(*flags, "-z", stage, ranks=ranks, device="emu", out=tmp_path / "plain", OMP_NUM_THREADS="1")
    if not (ROOT / "build/check/train_gpt").exists():
        pytest.skip("the checked variant is not built")
    monkeypatch.setenv("TRAIN_GPT_EMU", "build/check/train_gpt")
    for seed in ("0", "1"):
        run = train_gpt(*flags, "-z", stage, ranks=ranks, device="emu", out=tmp_path / f"checked{seed}",
                        EMU_SEED=seed)
        for key in ("loss", "norm", "state_hash"):
            assert run.series(key) == plain.series(key), key


@pytest.mark.parametrize("precision, how", [("fp32", 1), ("bf16", 1), ("bf16", 2), ("bf16", 3)])
def test_without_epilogues(monkeypatch, precision, how):
    """Where cuBLASLt has no fused epilogue, says so by another status, or fails only when it is called, a separate pass
    is as accurate as the rule requires, and reported once: bias, two bias gradients, and in 16 bits three of GELU."""
    program = ROOT / f"build/emu/test_ops.{precision}"
    if not program.exists():
        pytest.skip("the op tests are not built")
    monkeypatch.setenv("EMU_NO_EPILOGUE", str(how))
    run = subprocess.run([program, "matmul"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    said = [line for line in run.stderr.splitlines() if line.startswith("cuBLASLt has no epilogue")]
    num = 3 if precision == "fp32" else 6
    assert len(said) == num and len({line.split(" for ")[0] for line in said}) == num
