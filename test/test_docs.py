"""README and docs/ are true: every command in them runs, every flag, file and function they name exists, every link
leads somewhere. The README is short, and a reader who searches for the field's words finds the place.

A block fenced as `sh` is run line by line in a folder laid out like the repository, where ./train_gpt stands for the
program with sizes made small: presets become a model of two layers, runs a few steps. Other blocks are output. Builds
and whole test suites are asked of make and bash without being carried out (make -n, bash -n)."""
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import init
import pytest
from util import ROOT, binary, environment, gpt2_config, llama_config, model_write, train_gpt

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
BLOCKS = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
V = 300

# ./train_gpt: the program, with sizes made small. What was trained stands in for the checkpoint that a page names.
SMALL = """#!{python}
import os, pathlib, re, subprocess, sys
letters = dict(m="model", t="seq-len", b="micro-batch", g="grad-accum", n="steps", d="data", o="out")
flags, args = {{}}, sys.argv[1:]
rest = []
while args:
    word = args.pop(0)
    name, equals, value = word.partition("=")
    name = letters.get(name[1:], "") if re.fullmatch("-[a-z]", name) else name[2:]
    if name in letters.values():
        flags[name] = value if equals else args.pop(0)
    else:
        rest.append(word)
names = {{word.partition("=")[0] for word in rest}}
if not names & {{"--plan", "--report", "--print-config", "--repeat"}}:
    model = flags.get("model", "d3")
    if not os.path.isdir(model) and "step_" not in model:
        flags["model"] = "d2"
    if "step_" in model and not os.path.isdir(model):
        flags["model"] = str(max(pathlib.Path(model).parent.glob("step_*")))
    if not names & {{"--eval", "--generate", "--prompts", "--choices", "--export"}}:
        for name, most in (("steps", 4), ("micro-batch", 2), ("grad-accum", 2)):
            flags[name] = str(min(most, int(flags.get(name, most))))
        if names & {{"--batch", "--config"}}:
            flags.pop("grad-accum")
            flags.pop("micro-batch")
        rest += ["--sample-tokens", "4"] if "--sample-tokens" not in names else []
    if not names & {{"--generate", "--prompts"}}:
        flags["seq-len"] = str(min(32, int(flags.get("seq-len", 32))))
words = [word for name, value in flags.items() for word in ("--" + name, value)]
os.execv("{program}", ["{program}", *words, *rest])
"""

# make says what it would do. Targets that call make again would be carried out even so: those must exist.
MAKE = """#!/bin/bash
cd {root} || exit
case " $* " in
    *" spills "* | *" kernel-table "* | *" check "* | *" dev "*) exec grep -qE "^$1:" Makefile ;;
    *) exec {make} -n "$@" > /dev/null ;;
esac
"""


def tokenizer_of(folder):
    return folder / "data" / "sets" / "kjv" / "tokenizer.json"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The repository as a newcomer has it after the quickstart: program, scripts, a data set, and the files that the
    pages call theirs (gpt2-folder, book.txt, ask.jsonl, ds_config.json ...)."""
    if not binary("cpu").exists():
        pytest.skip("cpu is not built")
    place = tmp_path_factory.mktemp("docs")
    for name in ("scripts", "dev"):
        shutil.copytree(ROOT / name, place / name)
    shutil.copytree(ROOT / "data", place / "data", ignore=lambda *_: ["sets"])
    for name in ("README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, place)
    (place / "build" / "cpu").mkdir(parents=True)
    (place / ".venv").symlink_to(sys.prefix)
    program = place / "train_gpt"
    program.write_text(SMALL.format(python=sys.executable, program=binary("cpu")))
    program.chmod(0o755)
    tools = place / "tools"
    tools.mkdir()
    (tools / "make").write_text(MAKE.format(root=ROOT, make=shutil.which("make")))
    (tools / "make").chmod(0o755)
    text = 2 * (ROOT / "README.md").read_text()
    (place / "book.txt").write_text(text)
    (place / "texts").mkdir()
    (place / "texts" / "a.txt").write_text(text)
    prepare = [sys.executable, "data/prepare.py"]
    subprocess.run([*prepare, "book.txt", "--vocab-size", str(V), "--out", "data/sets/kjv"], cwd=place, check=True,
                   capture_output=True)
    shutil.copytree(place / "data" / "sets" / "kjv", place / "data" / "sets" / "book-gpt2")
    shutil.copy(tokenizer_of(place), place / "book-tokenizer.json")
    for name, config in (("gpt2-folder", gpt2_config(V, 32, 64, L=2, NH=2)),
                         ("llama-folder", llama_config(V, 32, 64, L=2, NH=2)),
                         ("chat-folder", llama_config(V, 32, 64, L=2, NH=2))):
        shapes = init.gpt2_shapes(config) if name == "gpt2-folder" else init.llama_shapes(config)
        model_write(place / name, config, init.random_weights(shapes, 1, 0.02))
        shutil.copy(tokenizer_of(place), place / name)
    (place / "chat-folder" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}")
    (place / "chats.jsonl").write_text(40 * '{"prompt": "data", "completion": "run"}\n')
    (place / "ask.jsonl").write_text('{"prompt": "In the", "max_tokens": 4}\n')
    (place / "hellaswag_val.jsonl").write_text(json.dumps({"ctx": "In the", "endings": ["a", "b"], "label": 1}) + "\n")
    (place / "ds_config.json").write_text('{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}')
    (place / "hosts").write_text("localhost slots=2\n")
    return place


def run(place, line):
    path = f"{place}/tools:{place}/.venv/bin:{os.environ['PATH']}"
    env = environment(PATH=path, OMPI_MCA_rmaps_base_oversubscribe="1", OMP_NUM_THREADS="1", PYTHON=sys.executable)
    done = subprocess.run(["bash", "-c", line], cwd=place, env=env, capture_output=True, text=True, errors="replace",
                          timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def pytest_finds_it(arguments):
    done = subprocess.run([sys.executable, "-m", "pytest", "--collect-only", "-q", *arguments], cwd=ROOT,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands(place, page):
    if page.name != "README.md" and "runs/mine" in page.read_text() and not (place / "runs" / "mine").exists():
        run(place, "./train_gpt -o runs/mine")
    if "runs/other" in page.read_text() and not (place / "runs" / "other").exists():
        run(place, "./train_gpt -o runs/other")
    for kind, block in BLOCKS.findall(page.read_text()):
        assert kind == "sh" or not re.match(r"\./|mpirun|scripts/|make\b", block), f"fence it as sh: {block}"
        for line in block.splitlines() if kind == "sh" else []:
            command = line.split(" # ")[0].strip()
            if re.match(r"scripts/(test|quickstart|setup|fuzz|bench|gpu_check)\.sh|dev/bench_cpu\.sh", command):
                run(place, f"bash -n {command.split()[0]}")         # whole suites; CI and test_quickstart run them
            elif match := re.match(r"build/cpu/test_ops\.fp32 (\w+)$", command):
                assert any(f'{{"{match[1]}' in file.read_text() for file in (ROOT / "kernels").glob("*.*h")), command
            elif command.startswith(".venv/bin/python -m pytest "):
                pytest_finds_it(shlex.split(command)[3:])
            elif re.match(r"\.venv/bin/python data/prepare.py kjv$", command):
                assert run(place, command + " --out data/sets/bible") if shutil.which("bible") else True
            elif command and not command.startswith("#"):
                run(place, command)


def test_quickstart(place):
    """All of it, with the sizes made small: install, build, data, train, evaluate, plot, write."""
    (place / "scripts" / "setup.sh").write_text("#!/bin/sh\necho setup\n")
    out = run(place, "scripts/quickstart.sh")
    for step in ("install", "build", "train", "evaluate", "plot", "write", "done"):
        assert f"== {step}" in out
    assert (place / "runs" / "quickstart" / "loss.png").exists()


@pytest.mark.quick
def test_flags_exist():
    """A flag named in code type is one of train_gpt's, of the scripts', or of the tools that the pages compare with."""
    known = set(re.findall(r"--[a-z][a-z0-9-]*", train_gpt("--help").out))
    for script in [*(ROOT / "scripts").glob("*"), ROOT / "data" / "prepare.py", *(ROOT / "dev").glob("*.*")]:
        if script.suffix in (".py", ".sh"):
            known |= set(re.findall(r"--[a-z][a-z0-9-]*", script.read_text()))
    known |= {"--hostfile", "--include", "--start", "--num_gpus", "--nodes", "--bind-to", "--map-by", "--gpus-per-task"}
    for page in PAGES:
        for code in re.findall(r"`([^`\n]+)`", page.read_text()):
            for flag in re.findall(r"(?<!\S)--[a-z][a-z0-9_-]*", code):
                assert flag.replace("_", "-") in known or flag in known, f"{page.name} names {flag}"


@pytest.mark.quick
@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.quick
def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 1200


@pytest.mark.quick
def test_index():
    """The index of docs/ has every page, and so has the README."""
    for index, prefix in ((ROOT / "docs" / "README.md", ""), (ROOT / "README.md", "docs/")):
        linked = set(re.findall(r"\]\(([^)#]+)", index.read_text()))
        for page in (ROOT / "docs").glob("*.md"):
            assert page.name == "README.md" or prefix + page.name in linked, f"{index} has no link to {page.name}"


@pytest.mark.quick
def test_models_are_listed():
    """The two tables of docs/models.md have the presets and the families of model/shapes.cuh, and no others."""
    source, page = (ROOT / "model" / "shapes.cuh").read_text(), (ROOT / "docs" / "models.md").read_text()
    for table, text, more in zip(("presets", "families"), page.split("| `model_type` |"), ({"d2", "d48"}, set())):
        rows = source.split(f" {table}[] = {{")[1].split("};")[0]
        first_cells = "".join(re.findall(r"^\| (`.*?`) \|", text, re.M))
        assert set(re.findall(r"`([^`]+)`", first_cells)) == set(re.findall(r'^    \{"([^"]+)"', rows, re.M)) | more


FOLDERS = ("data", "dev", "kernels", "model", "run", "scripts", "test", "zero")
SOURCES = {path: path.read_text(errors="replace") for folder in FOLDERS for path in (ROOT / folder).rglob("*")
           if path.suffix in (".h", ".cuh", ".cu", ".cpp", ".py", ".sh")}
SOURCES |= {path: path.read_text() for path in (ROOT / "train_gpt.cu", ROOT / "Makefile")}
OTHER_PROGRAMS = {"train.py", "sample.py", "zero_to_fp32.py"}      # of DeepSpeed and nanoGPT


@pytest.mark.quick
@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_names_exist(page):
    """Files by path or by name alone, functions by a call or definition somewhere in the tree."""
    text = "\n".join(SOURCES.values())
    spans = "\n".join(re.findall(r"`([^`\n]+)`", page.read_text()))
    for name in re.findall(r"(?<![\w*.>}/-])[\w./-]*\w\.(?:cuh|cu|cpp|h|py|sh)(?![\w.])", spans):
        exists = name in OTHER_PROGRAMS or (ROOT / name).exists() or any(path.name == name for path in SOURCES)
        assert exists, f"{page.name} names {name}"
    for name in re.findall(r"(?<![\w.])([a-z_]\w+)\(\)", spans):
        assert re.search(rf"\b{name}(<.*>)?\(", text), f"{page.name} names {name}()"


@pytest.mark.quick
@pytest.mark.parametrize("page", ["how-it-works.md", "contributing.md"])
def test_identifiers_exist(page):
    """Tables, types and keys in code type: FLAGS, gpu_rows, stage3_prefetch_bucket_size."""
    text = "\n".join(source for path, source in SOURCES.items() if path.name != "test_docs.py")
    for span in re.findall(r"`([^`\n]+)`", (ROOT / "docs" / page).read_text()):
        if re.fullmatch(r"[A-Za-z]\w*_\w+|[A-Z]{2,}\w*", span):
            assert re.search(rf"\b{span}\b", text), f"{page} names {span}"


TERMS = """gradient checkpointing, activation checkpointing, activation recomputation, stochastic rounding, GEMM,
parameter groups, all-gather, reduce-scatter, all-reduce, prefetch, gradient accumulation, mixed precision, loss
scaling, master weights, offload, roofline, communication volume, communication dtype, gradient clipping, learning rate
schedule, weight decay, fine-tuning, key/value cache, perplexity, resume, add an optimizer, where is a gradient
reduced, one op test, run one test"""


@pytest.mark.quick
@pytest.mark.parametrize("term", re.split(r", ", " ".join(TERMS.split())))
def test_terms_are_found(term):
    """A reader who searches for it finds the place, in the README or in docs/."""
    assert any(term.lower() in page.read_text().lower() for page in PAGES)
