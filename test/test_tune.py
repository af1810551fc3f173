"""--tune in the emulated build, whose cuBLASLt offers algorithms that sum in different orders. EMU_FAST_ALGO=n makes
the others slow, so that the n-th is chosen, which shows in the bits."""
import json
import re

import init
import pytest
from util import binary, gpt2_config, llama_config, shard_write, train_gpt

V, T = 97, 16
FAST_BY_RANK = ("sh", "-c", 'EMU_FAST_ALGO=$((OMPI_COMM_WORLD_RANK + 1)) exec "$0" "$@"')


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(gpt2_config(V, 32, T, L=2, NH=2)))
    shard_write(tmp_path / "data" / "train_000000.bin", init.tokens(2000, V, 3), V)
    return tmp_path


def run(folder, *flags, fast=None, cache="cache", steps=2, batch=2, ranks=1, ok=True, wrapper=(), out=None):
    env = {"XDG_CACHE_HOME": str(folder / cache), "OMP_NUM_THREADS": "1"}
    if fast is not None:
        env["EMU_FAST_ALGO"] = str(fast)
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


def test_the_fastest_is_kept_and_cached(folder):
    plain, first, third = run(folder), run(folder, "--tune", fast=0), run(folder, "--tune", fast=2, cache="other")
    assert "tune  " not in plain.out
    num = counts(first)[0]
    assert num > 12 and counts(first) == (num, 0, 0, 0) and counts(third) == (num, 0, 0, num)
    assert state_hash(first) == state_hash(plain) != state_hash(third)
    lines = json.loads((folder / "other/train_gpt/products.json").read_text())["products"]
    assert len(lines) == num and all(" emulated_GPU " in line for line in lines)
    again = run(folder, "--tune", fast=0, cache="other")       # the third again, though now the first is fast
    assert counts(again) == (0, num, 0, num) and state_hash(again) == state_hash(third)


def test_other_shapes_are_measured_and_join_the_cache(folder):
    num = counts(run(folder, "--tune", fast=1))[0]
    other = counts(run(folder, "--tune", batch=3, fast=1))
    assert other[0] > 0 and len(json.loads((folder / "cache/train_gpt/products.json").read_text())["products"]) == (
        num + other[0])


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
    assert len(json.loads(path.read_text())["products"]) == num


def test_what_another_card_chose_is_not_used(folder):
    path = folder / "cache/train_gpt/products.json"
    num = counts(run(folder, "--tune", fast=1))[0]
    lines = [line.split(" ", 1)[1].replace("emulated_GPU", "NVIDIA_H200") for line in
             json.loads(path.read_text())["products"]]
    path.write_text(json.dumps({"products": [f"{fnv(line):016x} {line}" for line in lines]}))
    assert counts(run(folder, "--tune", fast=2))[0] == num
    assert len(json.loads(path.read_text())["products"]) == 2 * num      # those are kept for that GPU


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


def test_refused_where_products_are_our_own():
    if not binary("cpu").exists():
        pytest.skip("the CPU build is not there")
    refused = train_gpt("--tune", "-n", 1, ok=False)
    assert refused.code == 2 and len(refused.complaint) == 1 and "its own" in refused.err
