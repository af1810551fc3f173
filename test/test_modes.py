"""The other modes: --plan, --eval, --generate, --help; memory as planned; what the log holds."""
import json
import re
import shlex
import subprocess
import sys

import init
import numpy as np
import pytest
from util import ROOT, binary, gpt2_config, model_write, shard_write, train_gpt, weights

V, C, T = 97, 48, 24
RSS_WRAPPER = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:])
_, status, usage = os.wait4(process.pid, 0)
print(f"peak_kib {usage.ru_maxrss}", file=sys.stderr)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modes")
    config = gpt2_config(V, C, T, L=2, NH=3)
    model_write(folder / "model", config, init.gpt2_weights(config, 1))
    for split, count, seed in (("train", 3000, 1), ("val", 700, 2)):
        shard_write(folder / "data" / f"{split}_000000.bin", init.tokens(count, V, seed), V)
    return folder


def args(folder, *more):
    return ["-m", folder / "model", "-d", folder / "data", *more]


def planned_mib(out):
    """{place: MiB} of the totals in the printed plan."""
    found = re.findall(r"(device|host) memory per rank\n(?:.*\n)*?\s+total\s+([\d.]+) MiB", out)
    return {place: float(mib) for place, mib in found}


@pytest.mark.parametrize("ranks,stage,model,micro_batch,seq_len",
                         [(1, 0, "d6", 4, 256), (2, 2, "d8", 2, 256), (2, 1, "d4", 16, 128)])
def test_memory_is_as_planned(tmp_path, ranks, stage, model, micro_batch, seq_len):
    """Peak resident memory of each rank is within 5 % of the plan."""
    shard_write(tmp_path / "data" / "train_000000.bin", init.tokens(40000, 8192, 1), 8192)
    wrapper = [sys.executable, "-c", RSS_WRAPPER]
    run = train_gpt("-m", model, "-d", tmp_path / "data", "-z", stage, "-b", micro_batch, "-t", seq_len, "-n", 2,
                    "--sample-tokens", 0, ranks=ranks, wrapper=wrapper)
    plan = planned_mib(run.out)
    peaks = [int(kib) / 1024 for kib in re.findall(r"peak_kib (\d+)", run.err)]
    assert len(peaks) == ranks
    for peak in peaks:
        assert peak == pytest.approx(plan["device"] + plan["host"], rel=0.05)


def test_plan_for_other_machines(folder):
    """--plan needs no memory of that size and does not train."""
    run = train_gpt("--plan", "-m", "gpt2-xl", "-d", folder / "data", "-z", 2, "-b", 8, "--ranks", 8)
    assert planned_mib(run.out)["device"] > 5000
    assert "step 1/" not in run.out
    one = planned_mib(train_gpt("--plan", "-m", "gpt2", "-d", folder / "data", "-z", 2, "--ranks", 1).out)["device"]
    eight = planned_mib(train_gpt("--plan", "-m", "gpt2", "-d", folder / "data", "-z", 2, "--ranks", 8).out)["device"]
    assert one - eight > 0.5 * 8 * 124e6 / 2**20


def test_eval(folder, tmp_path):
    """--eval gives the validation loss of the run's end, whatever the number of ranks and rows per batch."""
    run = train_gpt(*args(folder, "-n", 3, "-b", 2, "--sample-tokens", 0), out=tmp_path / "run")
    last = run.log[-1]
    assert last["val_tokens"] == 700 - 1   # the short window at the end included
    checkpoint = run.checkpoint(3)
    for ranks, micro_batch in ((1, 1), (1, 5), (2, 4), (3, 3), (4, 16)):
        found = train_gpt("--eval", "-m", checkpoint, "-d", folder / "data", "-b", micro_batch, ranks=ranks)
        loss = float(re.search(r"val .*?loss (\d+\.\d+)", found.out)[1])
        assert loss == pytest.approx(last["val_loss"], rel=2e-6), (ranks, micro_batch)


def test_eval_every(folder, tmp_path):
    run = train_gpt(*args(folder, "-n", 5, "-b", 2, "--eval-every", 2, "--sample-tokens", 0), out=tmp_path / "run")
    assert [entry["step"] for entry in run.log if "val_loss" in entry] == [2, 4, 5]


def test_log(folder, tmp_path):
    run = train_gpt(*args(folder, "-n", 4, "-b", 2, "-g", 3, "--sample-tokens", 0), ranks=2, out=tmp_path / "run")
    assert [entry["step"] for entry in run.log] == [1, 2, 3, 4]
    for entry in run.log:
        assert {"loss", "norm", "lr", "step_ms", "tok_per_s", "tokens"} <= entry.keys()
        assert entry["tokens"] == 2 * 3 * 2 * T
    assert re.fullmatch(r"[0-9a-f]{16}", run.log[-1]["state_hash"])
    line = r"step (\d)/4 \| loss (\d\.\d{6}) \| norm (\d+\.\d{6}) \| lr \d\.\d\de-\d\d \| \d+ ms \| "
    shown = re.findall(line, run.out)
    assert [int(step) for step, _, _ in shown] == [1, 2, 3, 4]
    assert [float(loss) for _, loss, _ in shown] == pytest.approx(run.series("loss"), abs=1e-6)


def test_log_header(folder, tmp_path):
    """Flags in the log are what they are: numbers, true and false, strings."""
    train_gpt(*args(folder, "-n", 1, "-b", 2, "-z", 2, "--lr", "0.00012345678901234", "--deterministic",
                    "--sample-tokens", 0), out=tmp_path / "run")
    header = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[0])["run"]
    assert header["zero"] == 2 and header["micro_batch"] == 2 and header["lr"] == 0.00012345678901234
    assert header["deterministic"] is True and header["no_shuffle"] is False
    assert header["precision"] == "fp32" and header["resume"] == ""


def log_rows():
    """(line, field, unit, docs) of each row of the tables that log.jsonl is written from."""
    rows = []
    for path in sorted((ROOT / "run").glob("*.cuh")):
        for line, body in re.findall(r"#define (\w+)_FIELDS\(F\) \\\n((?:.*\\\n)*.*\n)", path.read_text()):
            for row in body.splitlines():
                found = re.fullmatch(r'    F\((\w+), *\w+, *"([^"]*)",.*, "([^"]*)"\)(?: \\)?', row)
                rows.append((line.lower(), *found.groups()))
    return rows


@pytest.mark.quick
def test_log_fields_are_documented(folder, tmp_path):
    """docs/looking.md has the rows of the code, each once; a run writes no field that is none of them."""
    page = (ROOT / "docs" / "looking.md").read_text()
    documented = re.findall(r"^\| (\w+) \| `(\w+)` \| (.*?) ?\| (.*?) ?\|$", page, re.M)
    assert len(set(log_rows())) == len(log_rows()) > 30
    assert set(log_rows()) - set(documented) == set(), "not in docs/looking.md"
    assert sorted(documented) == sorted(log_rows()), "docs/looking.md has rows that the code has not"
    run = train_gpt(*args(folder, "-n", 2, "-b", 2, "--sample-tokens", 0), out=tmp_path / "run")
    known = {field for line, field, _, _ in log_rows() if line != "run"}
    assert {key for entry in run.log for key in entry} <= known


def test_log_field_without_a_row():
    """What writes a field takes the key that a row makes, no string."""
    for key, compiles in (('LogKey("loss")', True), ('"loss"', False)):
        program = f'#include "data/run_log.h"\nvoid f(RunLog* log) {{ log_real(log, {key}, 1.5); }}\n'
        gcc = subprocess.run(["g++", "-std=c++17", "-fsyntax-only", "-x", "c++", "-I.", "-"], input=program, cwd=ROOT,
                             capture_output=True, text=True)
        assert (gcc.returncode == 0) == compiles and ("LogKey" in gcc.stderr) != compiles, gcc.stderr


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_flags_line_can_be_pasted_back(folder, precision):
    """The line that the start prints, given to a shell: the same flags. Each precision is an object of its own."""
    given = ["-p", precision, "-d", folder / "data", "-m", folder / "model", "--micro_batch", 2, "--learning_rate",
             "0.00012345678901234", "--param-group", "*ln*:lr=0.5,wd=0;*bias:wd=0", "--plan", "--no-shuffle",
             "--deterministic", "False", "--gradient-checkpointing", "--out", "it's a run", "--val", ""]
    line = re.search(r"^flags  (.*)$", train_gpt(*given).out, re.M)[1]
    assert "--micro-batch=2" in line and "--plan" in line and "--lr=0.00012345678901234" in line
    again = shlex.split(line)
    assert train_gpt(*again).out.splitlines()[1] == "flags  " + line
    one, two = (re.sub(", as .*", "", train_gpt(*words, "--print-config").out) for words in (given, again))
    assert one == two


def test_verbose(folder):
    """Communication volume and host synchronizations are printed with --verbose, ZeRO also on several ranks; there the
    CPU build advises stage 1."""
    few = args(folder, "-n", 1, "-b", 2, "--sample-tokens", 0)
    detail = r"^(sent|syncs|ZeRO) "
    assert re.findall(detail, train_gpt(*few).out, re.M) == []
    runs = [train_gpt(*few, "-z", stage, ranks=2).out for stage in (0, 1)]
    assert [re.findall(detail, out, re.M) for out in runs] == [["ZeRO"]] * 2
    assert ["advice  -z 1 is faster" in out for out in runs] == [True, False]
    assert re.findall(detail, train_gpt(*few, verbose=True).out, re.M) == ["ZeRO", "syncs"]
    assert re.findall(detail, train_gpt(*few, verbose=True, ranks=2).out, re.M) == ["ZeRO", "sent", "syncs"]


def test_learning_rate_zero_changes_nothing(folder, tmp_path):
    run = train_gpt(*args(folder, "-n", 2, "-b", 2, "-l", 0, "--sample-tokens", 0), out=tmp_path / "run")
    before, after = weights(folder / "model"), weights(run.checkpoint(2))
    assert before.keys() == after.keys() and all(before[k].tobytes() == after[k].tobytes() for k in before)


def byte_tokenizer(path):
    """A byte-level tokenizer.json with no merges: one token per byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    for n, byte in enumerate(b for b in range(256) if b not in printable):
        letters[byte] = chr(256 + n)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    path.write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {letters[byte]: byte for byte in range(256)}, "merges": []}}))


@pytest.fixture(scope="module")
def speaker(tmp_path_factory):
    """A byte model that has learnt 'abcdefg' going round; windows of 16 start at every letter."""
    folder = tmp_path_factory.mktemp("speaker")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(gpt2_config(256, 32, 16, L=1, NH=2)))
    byte_tokenizer(folder / "model" / "tokenizer.json")
    shard_write(folder / "data" / "train_000000.bin", np.frombuffer(b"abcdefg" * 600, np.uint8), 256)
    run = train_gpt("-m", folder / "model", "--from-scratch", "-d", folder / "data", "-n", 60, "-b", 8, "-l", 1e-2,
                    "--sample-tokens", 0, out=folder / "run")
    return run.checkpoint(60)


@pytest.mark.parametrize("ranks,stage", [(1, 0), (2, 0), (2, 3), (3, 3)])
def test_generate_greedy(speaker, ranks, stage):
    out = train_gpt("-m", speaker, "--generate", "cdef", "--sample-tokens", 12, "--temperature", 0, "-z", stage,
                    ranks=ranks).out
    assert "cdefgabcdefgabcd" in out


def test_generate_is_seeded(speaker):
    def sample(*flags):
        return train_gpt("-m", speaker, "--generate", "ab", "--sample-tokens", 40, "--temperature", 5, *flags).out

    assert sample("-s", 1) == sample("-s", 1) != sample("-s", 2)
    assert "abcdefgabcdefg" in sample("--top-k", 1)


def test_generate_past_the_context(speaker):
    out = train_gpt("-m", speaker, "--generate", "abcdefg" * 10, "--sample-tokens", 14, "--temperature", 0).out
    assert "abcdefg" * 12 in out


def test_help_and_version():
    help_text = train_gpt("--help").out
    for name in ("--model", "--zero", "--micro-batch", "--resume", "--generate", "--plan"):
        assert name in help_text
    for line in help_text.splitlines():                    # each stands for itself: rows move
        assert not re.search(r"\bthe same (for|but|as)\b|^such", line), line
    sections = re.findall(r"\n\n(\w.*)\n  ", help_text)
    assert len(sections) > 10 and "Learning rate" in sections and "ZeRO and communication" in sections
    assert "cpu" in train_gpt("--version").out.lower()
    assert binary("cpu").exists()


def test_report(tmp_path):
    """--report has a row for everything that a run needs; of what is missing it says how to fix it."""
    run = train_gpt("--report", cwd=tmp_path, PATH=f"{tmp_path}:/usr/bin:/bin")
    rows = {line.split()[0]: line for line in run.out.splitlines() if not line.startswith(" ")}
    for name in ("train_gpt", "precisions", "CPU", "SIMD", "memory", "/dev/shm", "MPI", "NCCL", "BLAS", "text", "CUDA"):
        assert re.match(r"\S+ +(ok|MISS) +\S", rows[name]), name
    lines = run.out.splitlines()
    for line, after in zip(lines, lines[1:] + [""]):
        assert ("MISS" in line) == after.strip().startswith("->")
    assert "AVX" in rows["SIMD"] or "SSE" in rows["SIMD"]
