#!/usr/bin/env python3
"""spills.py: reads the output of `ptxas -v` and fails if a kernel spills registers. `make spills` feeds it.
   dev/spills.py --table FILE    also writes a table of registers, shared memory and spills (make kernel-table)"""
import re
import subprocess
import sys

NOISE = ("ptxas info", "Function properties", "nvcc", "rm ", "ln ", "make", "mkdir")


def demangled(names):
    done = subprocess.run(["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True)
    short = []
    for name in done.stdout.splitlines():
        name = re.sub(r"\((\w+)\)(-?\d+)", r"\2", name.replace("void ", ""))
        short.append(re.sub(r"\(anonymous namespace\)::", "", name))
    return dict(zip(names, short))


def read(lines):
    """{(kernel, precision): {arch: (registers, shared bytes, spilled bytes)}} and all other lines."""
    kernels, other = {}, []
    precision, name, arch, spilled = "?", "?", "?", 0
    for line in lines:
        if match := re.search(r"-DPREC_(\w+)", line):
            precision = match[1].lower()
        elif match := re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line):
            name, arch = match.groups()
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spilled = int(match[2]) + int(match[3])
        elif match := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            row = kernels.setdefault((name, precision), {})
            row[arch] = int(match[1]), int(shared[1]) if shared else 0, spilled
        elif not line.lstrip().startswith(NOISE) and line.strip():
            other.append(line)
    return kernels, other


def write_table(path, kernels):
    archs = sorted({arch for row in kernels.values() for arch in row}, key=lambda a: int(re.sub(r"\D", "", a)))
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"release ([\d.]+)", version)[1]
    names = demangled(sorted({name for name, _ in kernels}))
    lines = ["# Registers, shared memory and spills of every kernel", "",
             f"Made by `make kernel-table` with nvcc {version}. A cell is registers a thread / static shared bytes a",
             "block / bytes spilled. Dynamic shared memory is left out; template arguments in brackets.",
             "",
             "| kernel | precision | " + " | ".join(archs) + " |", "|---|---|" + "---|" * len(archs)]
    for name, precision in sorted(kernels, key=lambda k: (names[k[0]], k[1])):
        row = kernels[name, precision]
        cells = [" / ".join(map(str, row[arch])) if arch in row else "-" for arch in archs]
        lines.append(f"| `{names[name]}` | {precision} | " + " | ".join(cells) + " |")
    path.write("\n".join(lines) + "\n")


def main():
    kernels, other = read(sys.stdin)
    if not kernels or any("error" in line.lower() for line in other):
        sys.exit("".join(other) + "spills: no kernel was compiled")
    spilling = [(name, precision, arch, values[2]) for (name, precision), row in kernels.items()
                for arch, values in row.items() if values[2]]
    for name, precision, arch, size in spilling:
        print(f"{arch} {precision} {name}: {size} bytes spilled and loaded")
    if sys.argv[1:2] == ["--table"]:
        with open(sys.argv[2], "w") as file:
            write_table(file, kernels)
    print(f"spills: {sum(map(len, kernels.values()))} kernels compiled, {len(spilling)} spill")
    sys.exit(bool(spilling))


if __name__ == "__main__":
    main()
