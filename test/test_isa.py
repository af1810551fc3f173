"""test_isa.py: one CPU binary for several instruction sets: each of them trains, and the one that is not there is
refused. scripts/test.sh builds build/portable; the kernels of each set are held against their references by test_ops.
"""
import numpy as np
import pytest

from util import ROOT, binary, train_gpt

PORTABLE = "build/portable/train_gpt"
TINY = ("-m", "d2", "-t", 32, "-b", 2, "-n", 5, "--sample-tokens", 0, "-d", ROOT / "data/sets/kjv")


def run(isa, folder, **more):
    if not (ROOT / PORTABLE).exists():
        pytest.skip("build/portable is not built")
    flags = dict(TRAIN_GPT_CPU=PORTABLE, OMP_NUM_THREADS="1", **more)
    return train_gpt(*TINY, out=folder / isa, TRAIN_GPT_ISA=isa, **flags)
