#!/usr/bin/env python3
"""spills.py: read the output of `ptxas -v` and fail if a kernel spills registers. `make spills` feeds it."""
import re
import sys

kernel, arch, kernels, spills = "?", "?", 0, []
other = []
for line in sys.stdin:
    if match := re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line):
        kernel, arch = match.groups()
        kernels += 1
    elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
        if int(match[2]) or int(match[3]):
            spills.append(f"{arch} {kernel}: {match[2]} bytes of spill stores, {match[3]} of loads")
    elif "ptxas info" not in line and not line.startswith("nvcc") and "Function properties" not in line:
        other.append(line)

if kernels == 0:
    sys.exit("".join(other) + "spills: no kernel was compiled")
if any("error" in line.lower() for line in other):
    sys.exit("".join(other))
print("\n".join(spills), end="\n" if spills else "")
print(f"spills: {kernels} kernels compiled, {len(spills)} spill")
sys.exit(bool(spills))
