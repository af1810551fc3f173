#!/usr/bin/env python3
"""lint.py: the project's rules that a machine can check. `make lint` runs it on every tracked file.
    dev/lint.py [--words | --order]

Lengths     lines 120 columns (rows of a macro table may be wider), functions 80 lines, files 800 lines. A longer
            function has its reason in the comment above it: "long: why".
Arrows      each folder includes only those below it (ARROWS), no files include each other in a circle, and no file
            declares a function that another one defines: that would be a hidden arrow. --order prints the files of
            model/ and run/ so that each includes only earlier ones.
Parts       a header that cannot be compiled alone has "part of NAME" in its first line, and only NAME includes it. All
            others compile by themselves: `make headers`.
Enums       a switch over one of our enums has no default: the compiler names a missing case (-Werror=switch).
Calls       results of CUDA, MPI, NCCL and cuBLASLt calls are checked, and those of malloc, fread and fwrite.
Kernels     launches through LAUNCH, PTX only in prim.cuh, every __global__ static (one copy per precision).
Scripts     parse, and pass shellcheck where it is installed.
Words       none that dev/words.txt retires; --words counts them, by place.
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
# Absolute paths of one machine, and notes to self.
FORBIDDEN = re.compile(r"(?<![\w.$}])/(?:home|work|root)/\w|\b(?:TODO|FIXME|XXX|HACK)\b")
BELOW = ("data", "kernels", "kernels/cpu", "zero", "model", "run")
FOR_ALL = {"data/error.h", "data/clock.h"}
# What a folder may include beside these: folders, or single files.
ARROWS = {
    "data": ("data",),
    "kernels/cpu": ("kernels/cpu", "kernels/common.cuh"),
    "kernels/emu": ("kernels/emu", "kernels/cpu"),
    "kernels": ("kernels", "kernels/cpu"),
    "zero": BELOW[:4],
    "model": BELOW[:5],
    "run": BELOW,
    ".": BELOW,
}
# Here the emulated build includes its replacement of CUDA.
EMULATED = {("kernels/prim.cuh", "kernels/emu/emu.h"), ("kernels/cpu/runtime.cpp", "kernels/emu/runtime_emu.h"),
            ("kernels/cpu/nccl.cpp", "kernels/emu/emu_check.h"), ("kernels/cpu/nccl.cpp", "kernels/emu/host_mpi.h")}
PART_OF = re.compile(r"/\* [\w.]+: part of (\w+\.\w+)")
# A forward declaration: in column 0, ends with a semicolon, no body, no value.
DECLARED = re.compile(r"^(?:\[\[\w+\]\] |template <[^;{}()]*> )?static\b[^;{}=()#]*?"
                      r"\b(\w+)\s*\([^;{}()]*\)[^;{}=()]*;", re.M)
# One interface with two implementations: memory of the CPU build and of the emulated build.
DECLARED_AHEAD = {("kernels/cpu/runtime_shared.h", "default_budget_bytes"),
                  ("kernels/cpu/runtime_shared.h", "host_available_bytes")}
# Our enumerators, E::NAME or NAME. NVIDIA's libraries may return values that their headers do not have.
ENUM_LABEL = re.compile(r"\bcase\s+(?:\w+::\w+|(?!CUBLAS|CUDA)[A-Z][A-Z0-9_]{2,})\s*:(?!:)")

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


def folder_of(name):
    return str(pathlib.PurePath(name).parent)


def includes_of(path, lines):
    """(line, included file) of the repository, as names from its root."""
    for i, line in enumerate(lines, 1):
        if not (match := re.match(r'\s*#\s*include\s*["<]([^">]+)[">]', line)):
            continue
        for target in (path.parent / match[1], ROOT / match[1]):
            if target.exists():
                yield i, str(target.resolve().relative_to(ROOT))
                break


def check_arrows(path, lines):
    """Complains about files that this one may not include."""
    name = str(path.relative_to(ROOT))
    allowed = ARROWS.get(folder_of(name))
    for i, included in includes_of(path, lines):
        if allowed is not None and included not in FOR_ALL and (name, included) not in EMULATED and \
                folder_of(included) not in allowed and included not in allowed:
            complain(path, i, f"{folder_of(name)}/ does not know {included}")
        whole = PART_OF.match((ROOT / included).read_text())
        if whole and whole[1] != path.name:
            complain(path, i, f"{included} is part of {whole[1]}")


def order(graph):
    """Files, ordered so that each includes only earlier ones. Complains about circles, naming the lines."""
    done, ordered = {}, []

    def visit(name, way):
        if name in done:
            if not done[name]:                           # being visited: on the path to here
                circle = way[[n for n, _ in way].index(name):]
                complain(ROOT / circle[-1][0], circle[-1][1], "a circle: " + ", ".join(
                    f"{n}:{i}" for n, i in circle) + f" includes {name}")
            return
        done[name] = False
        for i, included in sorted(graph.get(name, [])):
            visit(included, [*way, (name, i)])
        done[name] = True
        ordered.append(name)

    for name in sorted(graph):
        visit(name, [])
    return ordered


def check_declarations(code_of):
    """code_of: {file: its lines without comments}. A function is declared only in the file that defines it, or in a
    part of that file."""
    whole_of, defined = {}, {}
    for name, code in code_of.items():
        part = PART_OF.match((ROOT / name).read_text())
        whole_of[name] = part[1] if part else pathlib.PurePath(name).name
        for match in re.finditer(r"^\w[^;{}=#]*?\b(\w+)\s*\([^;{}=]*\)[^;{}=]*\{", "\n".join(code), re.M):
            defined.setdefault(match[1], {})[whole_of[name]] = (name, "\n".join(code)[:match.start(1)].count("\n") + 1)
    for name, code in code_of.items():
        text = "\n".join(code)
        for match in DECLARED.finditer(text):
            places = defined.get(match[1], {})
            if places and whole_of[name] not in places and (name, match[1]) not in DECLARED_AHEAD:
                where = ", ".join(f"{file}:{line}" for file, line in places.values())
                complain(ROOT / name, text[:match.start(1)].count("\n") + 1,
                         f"declares {match[1]}, which {where} defines: an arrow that no include shows")


def check_enums(path, code):
    """Complains about a block of braces that has enumerators as cases, and a default."""
    stack = []
    for i, line in enumerate(code, 1):
        if stack and ENUM_LABEL.search(line):
            stack[-1]["enum"] = True
        if stack and re.search(r"\bdefault\s*:", line):
            stack[-1]["default"] = i
        for brace in re.findall(r"[{}]", line):
            if brace == "{":
                stack.append({})
            elif stack:
                block = stack.pop()
                if "enum" in block and "default" in block:
                    complain(path, block["default"], "default in a switch over an enum: name the cases, so that the "
                                                     "compiler names the one that is missing")


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


# ---- words ------------------------------------------------------------------------------------------------------
COMMENT_OR_STRING = re.compile(r'(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<string>"(?:\\.|[^"\\\n])*")'
                               r"|'(?:\\.|[^'\\\n])*'", re.S)
SCRIPT_COMMENT = re.compile(r'(?P<comment>#[^!\n]*|""".*?""")', re.S)


def only(kind, pattern, text):
    """What is left of the text with one kind of match alone; lines keep their numbers."""
    kept, end = [], 0
    for match in pattern.finditer(text):
        if match[kind] is not None:
            kept += ["\n" * text.count("\n", end, match.start()), " ", match[0]]
            end = match.end()
    return "".join(kept)


def texts_of(path):
    """(place, text) of what a reader reads: pages, --help, messages, comments."""
    name, text = str(path.relative_to(ROOT)), path.read_text()
    if name in ("README.md", "CHANGELOG.md") or name.startswith("docs/"):
        yield "docs/" if name.startswith("docs/") else name, text
    elif name.startswith("test/") or name == "dev/lint.py":
        return
    elif path.suffix in C_SUFFIXES:
        yield "--help" if name == "data/flags.h" else "messages", only("string", COMMENT_OR_STRING, text)
        yield "comments", only("comment", COMMENT_OR_STRING, text)
    elif path.suffix in (".py", ".sh", ""):
        yield "comments", only("comment", SCRIPT_COMMENT, text)


def retired_words():
    """(pattern, what to say instead) of dev/words.txt."""
    for row in (ROOT / "dev/words.txt").read_text().splitlines():
        if row.strip() and not row.startswith("#"):
            pattern, _, instead = row.partition(" -> ")
            yield re.compile(pattern.strip(), re.I), instead.strip()


def check_words(files):
    """Complains about retired words. Returns {pattern: {place: how often}}, and the places."""
    counts, places = {}, {}
    retired = list(retired_words())
    for path in files:
        for place, text in texts_of(path):
            places[place] = True
            for pattern, instead in retired:
                for match in pattern.finditer(text):
                    complain(path, text.count("\n", 0, match.start()) + 1, f"'{match[0]}' is retired: {instead}")
                    row = counts.setdefault(pattern.pattern, {})
                    row[place] = row.get(place, 0) + 1
    return counts, list(places)


def print_words(files):
    counts, places = check_words(files)
    print(f"{'word':36}" + "".join(f"{place:>14}" for place in places))
    for word, row in counts.items():
        print(f"{word[:35]:36}" + "".join(f"{row.get(place, '-'):>14}" for place in places))
    print(*problems, f"words: {len(problems)} retired ones", sep="\n")


def main():
    files = [path for path in tracked_files() if path.suffix in TEXT_SUFFIXES or path.name == "Makefile"]
    if "--words" in sys.argv:
        print_words(files)
        return
    graph, code_of = {}, {}
    for path in files:
        text = path.read_text()
        lines = text.split("\n")
        if lines[-1] != "":
            complain(path, len(lines), "no newline at the end")
        lines = lines[:-1] if lines[-1] == "" else lines
        check_text(path, lines)
        check_script(path, text)
        if path.suffix in C_SUFFIXES:
            name, code = str(path.relative_to(ROOT)), without_comments(lines)
            check_functions(path, lines, code)
            check_calls(path, code)
            check_enums(path, code)
            check_arrows(path, lines)
            graph[name], code_of[name] = list(includes_of(path, lines)), code
    check_words(files)
    ordered = order(graph)
    check_declarations(code_of)
    if "--order" in sys.argv:
        print(*[name for name in ordered if folder_of(name) in ("model", "run")], sep="\n")
        return
    print("\n".join(problems), end="\n" if problems else "")
    print(f"lint: {len(files)} files, {len(problems)} problems")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
