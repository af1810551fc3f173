#!/usr/bin/env bash
# Step time of GPT-2 124M on this machine's cores, one rank, fp32, and its ratio to the floor: the multiply-adds at the
# measured FMA peak and the optimizer's bytes at the measured triad bandwidth, both measured in the same run.
#   dev/bench_cpu.sh [STEPS]      default 6 steps of each shape; the first of each is dropped
set -euo pipefail
cd "$(dirname "$0")/.."
steps=${1:-6}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

make --silent DEVICE=cpu all build/cpu/bench_floor
PYTHONPATH=dev:test .venv/bin/python - "$folder" << 'END'
import pathlib, sys
import init, util
util.shard_write(pathlib.Path(sys.argv[1]) / "data" / "train_000000.bin", init.tokens(100000, 50257, 1), 50257)
END

# Milliseconds of the floor of one step of GPT-2 124M at B, T: bench_floor's last line ends with it.
floor_ms() { build/cpu/bench_floor 12 768 12 "$2" "$1" 50304 | tee /dev/stderr | awk 'END { print $NF }'; }

for shape in "4 64" "1 1024"; do
    read -r B T <<< "$shape"
    build/cpu/train_gpt -m gpt2 -d "$folder/data" -b "$B" -t "$T" -n "$steps" --sample-tokens 0 > "$folder/log"
    floor=$(floor_ms "$B" "$T")
    grep '^step [0-9]' "$folder/log" | tail -n +2 | sed 's/.*| \([0-9]*\) ms .*/\1/' | sort -n |
        awk -v B="$B" -v T="$T" -v floor="$floor" '
        { ms[NR] = $1 }
        END {
            median = ms[int((NR + 1) / 2)]
            printf "B=%d T=%d: %d ms a step (median of %d, best %d), %.0f tok/s, %.2f x the floor of %.0f ms\n",
                   B, T, median, NR, ms[1], 1000 * B * T / median, median / floor, floor
        }'
done
