#!/usr/bin/env python3
"""lint.py: the rules of the house that a machine can check. `make lint` runs it on every tracked file.

Lengths     lines 120 columns (rows of a macro table may be wider), functions 80 lines, files 800 lines. A function
            that is clearer long says so in the comment above it: "long: why".
Layers      kernels include kernels; zero includes kernels, zero and data; data includes data. data/error.h is for all.
Calls       what CUDA, MPI, NCCL and cuBLASLt return is checked; so is what malloc, fread and fwrite return.
Kernels     launches through LAUNCH, PTX only in prim.cuh, every __global__ static (one copy per precision).
Scripts     parse, and pass shellcheck where it is installed.
"""
import ast
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MAX_COLUMNS, MAX_FUNCTION_LINES, MAX_FILE_LINES = 120, 80, 800
C_SUFFIXES = {".cu", ".cuh", ".h", ".cpp", ".c"}
TEXT_SUFFIXES = C_SUFFIXES | {".py", ".sh", ".md", ".yml", ""}
UNCHECKED = re.compile(r"^\s*(\(void\)\s*)?((cuda|cublasLt|nccl|MPI_)[A-Z]\w*|fread|fwrite|malloc|calloc|realloc)\s*\(")
NO_RESULT = {"cudaGetLastError", "ncclGetErrorString", "MPI_Abort", "MPI_CHECK"}
# Absolute paths of one machine, and notes to self: neither means anything to the next reader.
FORBIDDEN = re.compile(r"(?<![\w.$}])/(?:home|work|root)/\w|\b(?:TODO|FIXME|XXX|HACK)\b")
LAYERS = {"kernels": {"kernels"}, "zero": {"kernels", "zero", "data"}, "data": {"data"}}

problems = []


def complain(path, line_idx, text):
    problems.append(f"{path.relative_to(ROOT)}:{line_idx}: {text}")


def tracked_files():
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def check_text(path, lines):
    for i, line in enumerate(lines, 1):
        table_row = re.match(r"\s+[A-Z]\w*\(.*\\$", line)
        if len(line) > MAX_COLUMNS and path.suffix != ".md" and not table_row:
            complain(path, i, f"{len(line)} columns, at most {MAX_COLUMNS}")
        if line != line.rstrip():
            complain(path, i, "blanks at the end")
        if "\t" in line and path.name != "Makefile":
            complain(path, i, "a tab")
        if (match := FORBIDDEN.search(line)) and path.name != "lint.py":
            complain(path, i, f"'{match[0]}' does not belong in the source")
    if len(lines) > MAX_FILE_LINES:
        complain(path, len(lines), f"{len(lines)} lines, at most {MAX_FILE_LINES}: is there a seam?")


def without_comments(lines):
    """The same lines with comments and the insides of strings blanked, so that words in them are not code."""
    text = "\n".join(lines)
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)

    def blank(match):
        kept = '""' if match[0][0] in "\"'" and len(match[0]) > 1 else ""
        return kept + re.sub(r"[^\n]", " ", match[0])[len(kept):]

    return pattern.sub(blank, text).split("\n")


def check_functions(path, lines, code):
    """A body opens with { alone in column 0 (or at the end of a line that starts in column 0) and closes with }."""
    first = None
    for i, line in enumerate(code, 1):
        if re.match(r"\{|[\w].*\)\s*(const)?\s*\{\s*$", line):
            first = i
        elif line.startswith("}") and first is not None:
            if i - first > MAX_FUNCTION_LINES and "long:" not in "\n".join(lines[max(0, first - 8):first]):
                complain(path, first, f"a function of {i - first} lines, at most {MAX_FUNCTION_LINES}")
            first = None


def check_calls(path, code):
    relative = path.relative_to(ROOT)
    in_test = relative.parts[0] == "test"                    # MPI's own handler ends a test: its default
    stands_in = relative.parts[:2] in (("kernels", "cpu"), ("kernels", "emu"))   # they define the CUDA functions
    prim = relative.name == "prim.cuh"
    for i, line in enumerate(code, 1):
        match = UNCHECKED.match(line)
        continues = i > 1 and code[i - 2].rstrip().endswith((",", "(", "=", "&&", "||", "?", ":", "+"))
        if re.search(r"\bstd(out|err)\)", line):
            continue
        own = match and match[2].startswith("MPI_") if in_test else (
            stands_in and match and match[2].startswith(("cuda", "nccl", "cublas")))
        if match and not continues and not own and match[2] not in NO_RESULT:
            complain(path, i, f"the result of {match[2]} is not checked")
        if "<<<" in line and not prim:
            complain(path, i, "a raw launch: use LAUNCH")
        if re.search(r"\basm\b", line) and not prim and not stands_in:
            complain(path, i, "PTX belongs in kernels/prim.cuh")
        if "__global__" in line and "static" not in code[i - 2] + line and not prim and not stands_in:
            complain(path, i, "a kernel that is not static: the objects of two precisions would collide")


def check_layers(path, lines):
    folder = path.relative_to(ROOT).parts[0]
    for i, line in enumerate(lines, 1):
        match = re.match(r'\s*#include "([^"]+)"', line)
        if not match or folder not in LAYERS or path.suffix not in C_SUFFIXES:
            continue
        target = (path.parent / match[1]).resolve()
        if not target.exists():
            target = ROOT / match[1]
        if not target.exists() or ROOT not in target.parents:
            continue
        included = target.relative_to(ROOT)
        if included.parts[0] not in LAYERS[folder] and included != pathlib.Path("data/error.h"):
            complain(path, i, f"{folder}/ does not know {included}")


def check_script(path, text):
    if path.suffix == ".py" or text.startswith("#!/usr/bin/env python3"):
        try:
            ast.parse(text)
        except SyntaxError as error:
            complain(path, error.lineno or 1, str(error))
    elif path.suffix == ".sh" or text.startswith(("#!/usr/bin/env bash", "#!/bin/bash")):
        commands = [["bash", "-n", path]]
        if shutil.which("shellcheck"):
            commands.append(["shellcheck", "--format=gcc", "--severity=warning", path])
        for command in commands:
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode != 0:
                complain(path, 1, (result.stdout + result.stderr).strip())


def main():
    files = [path for path in tracked_files() if path.suffix in TEXT_SUFFIXES or path.name == "Makefile"]
    for path in files:
        text = path.read_text()
        lines = text.split("\n")
        if lines[-1] != "":
            complain(path, len(lines), "no newline at the end")
        lines = lines[:-1] if lines[-1] == "" else lines
        check_text(path, lines)
        check_script(path, text)
        if path.suffix in C_SUFFIXES:
            code = without_comments(lines)
            check_functions(path, lines, code)
            check_calls(path, code)
            check_layers(path, lines)
    print("\n".join(problems), end="\n" if problems else "")
    print(f"lint: {len(files)} files, {len(problems)} problems")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
