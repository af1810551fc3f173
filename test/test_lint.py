"""Faults planted in a copy of the source: each is named, with file and line, by lint, by `make headers` or by the
compiler; and what a pairwise set covers."""
import itertools
import re
import shutil
import subprocess
import sys

import pytest
from util import ROOT, environment, pairwise


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """The source without tests and documents."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("data", "kernels", "model", "run", "zero"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "sets"))
    for folder in ("dev", "scripts"):
        (copy / folder).mkdir()
    for name in ("Makefile", "train_gpt.cu", "dev/lint.py", "dev/words.txt", "scripts/toolchain.sh"):
        shutil.copy(ROOT / name, copy / name)
    subprocess.run(["git", "init", "-q"], cwd=copy, check=True)
    return copy


class Planted:
    """Changes files of the tree; undo() restores them."""

    def __init__(self, tree):
        self.tree, self.before = tree, {}

    def __call__(self, name, old, new):
        path = self.tree / name
        text = path.read_text() if path.exists() else None
        self.before.setdefault(path, text)
        assert text is None or re.search(old, text, re.M), f"{name} has no {old}"
        path.write_text(new if text is None else re.sub(old, lambda _: new, text, count=1, flags=re.M))

    def undo(self):
        for path, text in self.before.items():
            path.unlink() if text is None else path.write_text(text)


@pytest.fixture
def plant(tree):
    planted = Planted(tree)
    yield planted
    planted.undo()


def lint(tree):
    done = subprocess.run([sys.executable, "dev/lint.py"], cwd=tree, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()


def compiler(tree, header):
    """Exit code and errors of `make headers` for one header."""
    shutil.rmtree(tree / "build", ignore_errors=True)
    done = subprocess.run(["make", "-s", "DEVICE=cpu", f"build/headers/cpu/{header}"], cwd=tree, capture_output=True,
                          text=True, env=environment())
    return done.returncode, done.stderr.splitlines()


def test_nothing_planted(tree):
    code, said = lint(tree)
    assert code == 0, "\n".join(said)


INCLUDE = r"^#pragma once$"
# File, what is replaced by what, and the line that lint prints.
FAULTS = {
    "up": ("model/shapes.cuh", INCLUDE, '#pragma once\n#include "run/rates.h"',
           r"model/shapes.cuh:\d+: model/ does not know run/rates.h"),
    "up-in-angles": ("zero/shard.h", INCLUDE, "#pragma once\n#  include <run/ramp.h>",
                     r"zero/shard.h:\d+: zero/ does not know run/ramp.h"),
    "op-in-cpu": ("kernels/cpu/simd.h", INCLUDE, '#pragma once\n#include "kernels/rope.cuh"',
                  r"kernels/cpu/simd.h:\d+: kernels/cpu/ does not know kernels/rope.cuh"),
    "circle": ("run/ramp.h", INCLUDE, '#pragma once\n#include "run.cuh"',
               r"run/r\w+.c?u?h:\d+: a circle: .*(run/ramp.h:\d+.*run/run.cuh:\d+|run/run.cuh:\d+.*run/ramp.h:\d+)"),
    "declared": ("model/passes.cuh", INCLUDE, "#pragma once\nstatic double\n    now_s(void);",
                 r"model/passes.cuh:\d+: declares now_s, which data/clock.h:\d+ defines"),
    "declared-otherwise": ("model/shapes.cuh", INCLUDE, "#pragma once\n[[noreturn]] static int now_s(int a = 0);",
                           r"model/shapes.cuh:\d+: declares now_s, which data/clock.h:\d+ defines"),
    "part": ("zero/init.h", INCLUDE, '#pragma once\n#include "kernels/attention_tests.h"',
             r"zero/init.h:\d+: kernels/attention_tests.h is part of attention.cuh"),
    "default": ("model/units.cuh", r"^    case Dim::ONE: break;$", "    default: break;",
                r"model/units.cuh:\d+: default in a switch over an enum"),
    "default-of-plain-enumerators": ("data/flags.h", r"^    case ONEOF: return ", "    default: return ",
                                     r"data/flags.h:\d+: default in a switch over an enum"),
    "word-in-comment": ("zero/plan.h", INCLUDE, "#pragma once\n/* A card. */",
                        r"zero/plan.h:\d+: 'card' is retired: GPU"),
    "word-in-message": ("zero/save.h", "is not on all hosts", "lies elsewhere",
                        r"zero/save.h:\d+: 'lies' is retired: is stored, is located"),
    "word-in-help": ("data/flags.h", '"print this list"', '"print all, estimated on paper"',
                     r"data/flags.h:\d+: 'on paper' is retired: estimated"),
}


@pytest.fixture(scope="module")
def said_of_all(tree):
    planted = Planted(tree)
    for name, old, new, _ in FAULTS.values():
        planted(name, old, new)
    code, said = lint(tree)
    planted.undo()
    assert code == 1
    return said


@pytest.mark.parametrize("fault", FAULTS)
def test_named_by_lint(said_of_all, fault):
    assert any(re.match(FAULTS[fault][3], line) for line in said_of_all), "\n".join(said_of_all)


def test_default_that_may_be(tree, plant):
    """Of a switch over numbers, and of one inside which there is a switch over an enum."""
    plant("run/planted.h", "", """/* planted.h: . */
#pragma once
static int f(int a, E e)
{
    switch (a) {
    case 1:
        switch (e) {
        case E::ONE: return 1;
        }
        return 2;
    default: return 3;
    }
}
""")
    assert lint(tree)[0] == 0


def test_header_that_needs_another_first(tree, plant):
    plant("run/planted.h", "", "/* planted.h: . */\n#pragma once\nstatic size_t f(const Config* c) { return c->C; }\n")
    code, said = compiler(tree, "run/planted.h")
    assert code != 0 and any(line.startswith("run/planted.h:3:") for line in said), "\n".join(said)


def test_enumerator_without_a_name(tree, plant):
    plant("model/model.cuh", r"^enum class Recompute \{", "enum class Recompute { PLANTED,")
    code, said = compiler(tree, "run/run.cuh")
    assert code != 0 and any("run/run.cuh" in line and "a name for each level" in line for line in said), said


def test_enumerator_without_a_case(tree, plant):
    plant("model/tensors.cuh", r"^enum class Dim \{ ONE,", "enum class Dim { ONE, PLANTED,")
    code, said = compiler(tree, "model/units.cuh")
    assert code != 0 and any(re.match(r"model/units.cuh:\d+.*PLANTED.* not handled in switch", line) for line in said)


def test_schedule_without_a_case(tree, plant):
    """A schedule of which a part is left out. Where rows are a macro's, the row is named."""
    if "#define SCHEDULES(" in (tree / "kernels/step.cuh").read_text():
        plant("kernels/step.cuh", r"^    S\(LINEAR,", '    S(PLANTED, "planted") \\\n    S(LINEAR,')
        message = r"kernels/step.cuh:\d+.*(macro .* requires|given|PLANTED)"
    else:
        plant("kernels/step.cuh", r"^enum class Schedule \{", "enum class Schedule { PLANTED,")
        message = r"kernels/step.cuh:\d+.*PLANTED.* not handled in switch"
    code, said = compiler(tree, "kernels/step.cuh")
    assert code != 0 and any(re.match(message, line) for line in said), "\n".join(said)


@pytest.mark.parametrize("sizes", [(4, 7, 2, 2), (2, 4, 4), (3, 1), (5,)])
def test_pairwise(sizes):
    rows = list(itertools.product(*map(range, sizes)))
    chosen = pairwise(rows, lambda row: dict(enumerate(row)))
    for i, j in itertools.combinations(range(len(sizes)), 2):
        assert {(row[i], row[j]) for row in chosen} == set(itertools.product(range(sizes[i]), range(sizes[j])))
    least = max([a * b for a, b in itertools.combinations(sizes, 2)], default=sizes[0])
    assert least <= len(chosen) <= 1.2 * least and len(set(chosen)) == len(chosen)
