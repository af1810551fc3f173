"""One CPU binary for several instruction sets (kernels/cpu/isa.h): each trains, and what cannot run is refused. The
kernels of each set are tested by test_ops, which scripts/test.sh builds for each of them."""
import json
import pathlib

import init
import pytest
from util import ROOT, gpt2_config, shard_write, train_gpt

PORTABLE = ROOT / "build/portable/train_gpt"
pytestmark = pytest.mark.skipif(not PORTABLE.exists(), reason="build/portable is not built")
AVX512 = ["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"]
ISAS = {"avx512bf16": AVX512 + ["avx512_bf16"], "avx512": AVX512, "avx2": ["avx2", "fma", "bmi2"], "sse2": []}


def runs_here(isa):
    cpu = pathlib.Path("/proc/cpuinfo").read_text()
    return all(f" {feature} " in cpu.replace("\n", " ") for feature in ISAS[isa])


def train(folder, monkeypatch, isa=None, precision="fp32", **more):
    monkeypatch.setenv("TRAIN_GPT_CPU", str(PORTABLE))
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(gpt2_config(97, 48, 24, L=2, NH=3)))
    shard_write(folder / "data" / "train_000000.bin", init.tokens(5000, 97, 3), 97)
    env = dict(OMP_NUM_THREADS="1", **({"TRAIN_GPT_ISA": isa} if isa else {}))
    return train_gpt("-m", folder / "model", "--from-scratch", "-p", precision, "-d", folder / "data", "-b", 4,
                     "-n", 10, "-l", 1e-3, "--sample-tokens", 0, "--hash-every", 1,
                     out=folder / f"{precision}-{isa or 'own'}", **env, **more)


def test_each_trains(tmp_path, monkeypatch):
    """Losses agree; the best that the machine has is taken unless another is named, which the last bits tell. In fp32
    avx512bf16 is avx512."""
    here = [isa for isa in ISAS if runs_here(isa)]
    runs = {isa: train(tmp_path, monkeypatch, isa) for isa in here}
    for run in runs.values():
        assert run.series("loss") == pytest.approx(runs["sse2"].series("loss"), rel=1e-5)
    hashes = {isa: run.series("state_hash") for isa, run in runs.items()}
    assert len({tuple(series) for series in hashes.values()}) == len(set(here) - {"avx512bf16"})
    assert train(tmp_path, monkeypatch).series("state_hash") == hashes[here[0]]


@pytest.mark.skipif(not runs_here("avx512bf16"), reason="this CPU has no AVX512_BF16")
def test_pairs_of_bf16(tmp_path, monkeypatch):
    """Taken where the machine has them, and no further from fp32 than bf16 without them."""
    fp32 = train(tmp_path, monkeypatch).series("loss")
    with_them, without, own = (train(tmp_path, monkeypatch, isa, "bf16") for isa in ("avx512bf16", "avx512", None))
    assert own.series("state_hash") == with_them.series("state_hash") != without.series("state_hash")
    off = [max(abs(a - b) for a, b in zip(run.series("loss"), fp32)) for run in (with_them, without)]
    assert off[0] <= 2 * off[1], off


@pytest.mark.parametrize("isa", ["neon", ""])
def test_not_there(tmp_path, monkeypatch, isa):
    monkeypatch.setenv("TRAIN_GPT_ISA", isa)
    run = train(tmp_path, monkeypatch, ok=False)
    assert run.code == 2 and run.complaint == [
        f"train_gpt: TRAIN_GPT_ISA is {isa}: this binary has avx512bf16 avx512 avx2 sse2 in fp32; name one that this "
        "machine can run"]
