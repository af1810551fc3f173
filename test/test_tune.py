"""--tune in the emulated build, whose cuBLASLt offers algorithms that sum in different orders. EMU_FAST_ALGO=n makes
the others slow, so that the n-th is chosen, which shows in the bits; EMU_FAST_EPILOGUE=1 makes GEMMs without an
epilogue slow, so that every optional one is fused, and 0 those with one."""
import json
import re

import init
import pytest
from util import binary, gpt2_config, llama_config, shard_write, train_gpt

V, T = 97, 16
FAST_BY_RANK = ("sh", "-c", 'EMU_FAST_ALGO=$((OMPI_COMM_WORLD_RANK + 1)) EMU_FAST_EPILOGUE=$OMPI_COMM_WORLD_RANK exec '
                '"$0" "$@"')


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(gpt2_config(V, 32, T, L=2, NH=2)))
    shard_write(tmp_path / "data" / "train_000000.bin", init.tokens(2000, V, 3), V)
    return tmp_path


def run(folder, *flags, fast=None, fuse=0, cache="cache", steps=2, batch=2, ranks=1, ok=True, wrapper=(), out=None,
        **env):
    env |= {"XDG_CACHE_HOME": str(folder / cache), "OMP_NUM_THREADS": "1"}
    if fast is not None:
        env |= {"EMU_FAST_ALGO": str(fast), "EMU_FAST_EPILOGUE": str(fuse)}
    if "--repeat" not in flags:
        flags = ("-m", folder, "--from-scratch", "-d", folder / "data", "-t", T, "-b", batch, "-n", steps,
                 "--sample-tokens", 0, "--no-shuffle", *flags)
    return train_gpt(*flags, device="emu", ranks=ranks, ok=ok, wrapper=wrapper, out=out, **env)


def state_hash(r):
    return re.search(r"^state hash (\w+) after", r.out, re.M)[1]


def counts(r):
    """Numbers of GEMMs: measured, from the cache, as recorded, and not the first choice."""
    found = re.search(r"^tune    \d+ GEMMs: (\d+) measured, (\d+) from \S+, (\d+) as recorded \| for (\d+) another",
                      r.out, re.M)
    return tuple(map(int, found.groups()))


def epilogues(r):
    """Numbers of optional epilogues: fused, unfused, and not by the rule."""
    found = re.search(r"^        optional epilogues: (\d+) fused, (\d+) unfused \| for (\d+) not as w", r.out, re.M)
    return tuple(map(int, found.groups()))


def lines_of(path):
    return json.loads(path.read_text())["products"]


def test_the_fastest_is_kept_and_cached(folder):
    plain, first, third = run(folder), run(folder, "--tune", fast=0), run(folder, "--tune", fast=2, cache="other")
    assert "tune  " not in plain.out
    num = counts(first)[0]
    assert num > 12 and counts(first) == (num, 0, 0, 0) and counts(third) == (num, 0, 0, num)
    assert state_hash(first) == state_hash(plain) != state_hash(third)
    lines = lines_of(folder / "other/train_gpt/products.json")
    assert len(lines) == num and all(" emulated_GPU " in line for line in lines)
    again = run(folder, "--tune", fast=0, cache="other")       # the third again, though now the first is fast
    assert counts(again) == (0, num, 0, num) and state_hash(again) == state_hash(third)


def test_other_shapes_are_measured_and_join_the_cache(folder):
    num = counts(run(folder, "--tune", fast=1))[0]
    other = counts(run(folder, "--tune", batch=3, fast=1))
    assert other[0] > 0 and len(lines_of(folder / "cache/train_gpt/products.json")) == num + other[0]


@pytest.mark.parametrize("damage, says", [
    (lambda text: text[: len(text) // 2], "JSON|json"),
    (lambda text: text.replace("_GPU ", "_GPO ", 1), "a line of \"products\" is damaged"),
    (lambda text: '{"products": [7]}', "a line of \"products\" is damaged"),
    (lambda text: "[]", ""),
], ids=["half", "line", "type", "empty"])
def test_damaged_cache_is_named_and_not_used(folder, damage, says):
    path = folder / "cache/train_gpt/products.json"
    num = counts(run(folder, "--tune", fast=1))[0]
    path.write_text(damage(path.read_text()))
    again = run(folder, "--tune", fast=3)
    assert counts(again) == (num, 0, 0, num)
    if says:
        assert str(path) in again.err and re.search(says, again.err) and "the cache is not used" in again.err
    assert len(lines_of(path)) == num


def test_what_another_gpu_chose_is_not_used(folder):
    path = folder / "cache/train_gpt/products.json"
    num = counts(run(folder, "--tune", fast=1))[0]
    lines = [line.split(" ", 1)[1].replace("emulated_GPU", "NVIDIA_H200") for line in lines_of(path)]
    path.write_text(json.dumps({"products": [f"{fnv(line):016x} {line}" for line in lines]}))
    assert counts(run(folder, "--tune", fast=2))[0] == num
    assert len(lines_of(path)) == 2 * num      # those are kept for that GPU


def fnv(text):
    h = 0xCBF29CE484222325
    for byte in text.encode():
        h = ((h ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return h


def test_resumed_and_repeated_runs_choose_as_before(folder):
    run(folder, "--tune", "--save-every", 2, fast=2, steps=4, out=folder / "whole")
    whole = run(folder, "--repeat", folder / "whole", fast=0, cache="none", out=folder / "again")
    assert "the same bits as the run" in whole.out and counts(whole)[2] == counts(whole)[3] > 0
    part = run(folder, "--resume", folder / "whole" / "step_00000002", fast=0, cache="none", steps=4)   # without --tune
    assert state_hash(part) == state_hash(whole) and counts(part)[:2] == (0, 0)
    record = folder / "whole" / "run.json"
    record.write_text(record.read_text().replace("_GPU ", "_GPO ", 1))
    refused = run(folder, "--repeat", folder / "whole", fast=0, ok=False, out=folder / "third")
    assert len(refused.complaint) == 1 and str(record) in refused.err and "damaged" in refused.err


@pytest.mark.parametrize("family, flags", [("gpt2", ["-z", 1]), ("llama", ["-z", 3, "--optimizer", "muon"])])
def test_rank_0_chooses_for_all(folder, family, flags):
    if family == "llama":
        (folder / "config.json").write_text(json.dumps(llama_config(V, 32, T, L=2, NH=2)))
    mixed = run(folder, "--tune", *flags, ranks=2, wrapper=FAST_BY_RANK)
    alike = run(folder, "--tune", *flags, ranks=2, fast=1, cache="other")
    assert counts(mixed)[0] == counts(mixed)[3] == counts(alike)[3] > 0
    assert state_hash(mixed) == state_hash(alike)


# ---- epilogues ----------------------------------------------------------------------------------------------------
# Of two blocks alike: four bias gradients, in 16 bits GELU and its derivative; GELU's GEMM also without its epilogue.
@pytest.mark.parametrize("precision, capability, num, by_rule", [("fp32", 90, 4, 0), ("bf16", 90, 6, 2),
                                                                 ("bf16", 80, 6, 0)])
def test_epilogues_are_fused_where_that_is_faster(folder, precision, capability, num, by_rule):
    """All fused or none, as measured, with bits of their own; repeated and resumed as recorded, whatever is fast."""
    args = ("-p", precision)
    gpu = {"EMU_CAPABILITY": str(capability)}
    rule = run(folder, *args, **gpu)
    runs = {fuse: run(folder, *args, "--tune", "--save-every", 2, fast=0, fuse=fuse, steps=4, cache=str(fuse),
                      out=folder / f"run{fuse}", **gpu) for fuse in (0, 1)}
    assert epilogues(runs[0]) == (0, num, by_rule) and epilogues(runs[1]) == (num, 0, num - by_rule)
    assert len({state_hash(r) for r in runs.values()}) == 2 and counts(runs[0])[3] == counts(runs[1])[3] == 0
    for fuse, r in runs.items():
        lines = lines_of(folder / f"{fuse}/train_gpt/products.json")
        assert lines == lines_of(folder / f"run{fuse}" / "run.json")
        chosen = [line.split()[-3] for line in lines]
        assert chosen.count("unfused" if fuse == 0 else "fused") == num and chosen.count("fixed") == len(lines) - num
        again = run(folder, *args, "--tune", fast=0, fuse=1 - fuse, steps=4, cache=str(fuse), **gpu)
        rest = run(folder, *args, "--resume", folder / f"run{fuse}" / "step_00000002", fast=0, fuse=1 - fuse, steps=4,
                   cache="none", **gpu)
        assert counts(again)[:3] == (0, len(lines), 0) and counts(rest)[:3] == (0, 0, len(lines))
        assert state_hash(again) == state_hash(rest) == state_hash(r)
        assert "other bits than" not in again.out + rest.out
    short = run(folder, *args, "--tune", fast=0, fuse=0, cache="0", **gpu)
    assert (state_hash(short) == state_hash(rule)) == (by_rule == 0)        # the rule: none is fused there


def test_what_is_not_as_recorded_is_said(folder):
    """Epilogues that a resumed run may not use, or does not have: at least those of four biases and their gradients.
    And lines without their choice."""
    whole = run(folder, "--tune", "--save-every", 2, fast=0, fuse=1, steps=4, out=folder / "whole")
    resume = ("--resume", folder / "whole" / "step_00000002")
    for env in ({"TRAIN_GPT_EPILOGUES": "none"}, {"EMU_NO_EPILOGUE": "1"}):
        rest = run(folder, *resume, fast=0, steps=4, cache="none", **env)
        said = re.search(r"^        (\d+) GEMMs are not as in (\S+), .*: other bits than before had$", rest.out, re.M)
        assert int(said[1]) >= 8 and said[2] == str(folder / "whole" / "run.json")
        assert state_hash(rest) != state_hash(whole)
    record = folder / "whole" / "run.json"
    lines = [line.split(" ", 1)[1].rsplit(" ", 3) for line in lines_of(record)]
    for word in ("", " maybe 1.000 2.000"):
        texts = [line[0] + word for line in lines]
        record.write_text(json.dumps(json.loads(record.read_text()) | {
            "products": [f"{fnv(text):016x} {text}" for text in texts]}))
        rest = run(folder, *resume, fast=0, steps=4, cache="none")
        assert counts(rest)[2] == 0 and re.search(rf"^        {len(lines)} GEMMs are not as in", rest.out, re.M)


def test_environment_word(folder):
    refused = run(folder, ok=False, TRAIN_GPT_EPILOGUES="some")
    assert 'TRAIN_GPT_EPILOGUES is "some": none, or leave it out' in refused.complaint[0]


def test_refused_where_products_are_our_own():
    if not binary("cpu").exists():
        pytest.skip("the CPU build is not there")
    refused = train_gpt("--tune", "-n", 1, ok=False)
    assert refused.code == 2 and len(refused.complaint) == 1 and "its own" in refused.err
