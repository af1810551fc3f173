#!/usr/bin/env python3
"""coverage.py: reads gcov's JSON for the op tests (dev/coverage.sh makes it) and reports on lines of device code:
bodies of functions that are __global__, DEV or HOSTDEV in kernels/*.cuh. A line counts as executed if it was in any
template instance at any precision. Arguments: the least percentage, then the files."""
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEAD = re.compile(r"(?:^|\s)(?:__global__|DEV|HOSTDEV)\s")


def device_lines(path):
    """Line numbers of the bodies of device functions."""
    text = re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', lambda m: re.sub(r"[^\n]", " ", m[0]), path.read_text(),
                  flags=re.S)
    lines = set()
    for match in HEAD.finditer(text):
        if text[text.rfind("\n", 0, match.end() - 1) + 1:match.end()].lstrip().startswith("#"):
            continue                         # a macro's definition
        open_at = re.compile(r"[{;]").search(text, match.end())
        if open_at is None or open_at[0] == ";":
            continue                         # a declaration
        depth, at = 0, open_at.start()
        while True:
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if depth == 0:
                break
            at += 1
        lines.update(range(text.count("\n", 0, open_at.start()) + 1, text.count("\n", 0, at) + 2))
    return lines


def main():
    least, counts = float(sys.argv[1]), {}
    for name in sys.argv[2:]:
        for file in json.loads(pathlib.Path(name).read_text())["files"]:
            path = ROOT / file["file"]
            if path.suffix != ".cuh" or path.parent != ROOT / "kernels":
                continue
            executed = counts.setdefault(path, {})
            for line in file["lines"]:
                executed[line["line_number"]] = executed.get(line["line_number"], 0) + line["count"]
    total, missed = 0, []
    for path in sorted(counts):
        lines = sorted(device_lines(path) & counts[path].keys())
        absent = [n for n in lines if counts[path][n] == 0]
        total += len(lines)
        missed += [(path, n) for n in absent]
        if lines:
            print(f"{path.relative_to(ROOT)!s:28} {len(lines) - len(absent):4} of {len(lines):4} lines")
    for path, n in missed:
        print(f"never executed: {path.relative_to(ROOT)}:{n}: {path.read_text().splitlines()[n - 1].strip()}")
    percent = 100 * (total - len(missed)) / max(total, 1)
    print(f"device code: {percent:.2f} % of {total} lines executed, at least {least:g} % wanted")
    return total == 0 or percent < least


if __name__ == "__main__":
    sys.exit(main())
