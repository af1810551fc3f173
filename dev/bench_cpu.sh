#!/usr/bin/env bash
# Step time on this machine's cores, one rank, fp32, and its ratio to the floor: the multiply-adds at the FMA peak and
# the optimizer's bytes at the triad bandwidth (bench_floor.cpp), both measured in turn with the steps. Medians; the
# first step of each run is dropped.
#   dev/bench_cpu.sh [ROUNDS [STEPS]]      default 3 rounds of 5 steps; about 4 minutes on two cores
# SHAPES="gpt2 4 64" measures that shape alone, PROGRAM=path another build.
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${1:-3} steps=${2:-5}
program=${PROGRAM:-build/cpu/train_gpt}
shapes=${SHAPES:-"gpt2 4 64
gpt2 4 256
gpt2 1 1024
llama-60m 4 256"}                                   # model, sequences, tokens of each
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

make --silent DEVICE=cpu build/cpu/bench_floor
[ -n "${PROGRAM:-}" ] || make --silent DEVICE=cpu all
PYTHONPATH=dev:test .venv/bin/python - "$folder" << 'END'
import pathlib, sys
import init, util
for model, vocabulary in (("gpt2", 50257), ("llama-60m", 32000)):
    util.shard_write(pathlib.Path(sys.argv[1]) / model / "train_000000.bin", init.tokens(100000, vocabulary, 1),
                     vocabulary)
END

floor() {       # MODEL B T
    local sizes="llama 8 512 1376 32000"
    [ "$1" = gpt2 ] && sizes="gpt2 12 768 3072 50304"       # the vocabulary is padded
    # shellcheck disable=SC2086
    build/cpu/bench_floor $sizes "$2" "$3" | tail -n 1
}
column() {      # FILE K: the median of its column K
    awk -v k="$2" '{ print $k }' "$folder/$1" | sort -n | awk '{ x[NR] = $1 } END { print x[int((NR + 1) / 2)] }'
}

while read -r model B T; do
    : > "$folder/floors"
    : > "$folder/steps"
    for ((round = 0; round < rounds; round++)); do
        floor "$model" "$B" "$T" >> "$folder/floors"
        "$program" -m "$model" -d "$folder/$model" -b "$B" -t "$T" -n "$steps" --sample-tokens 0 > "$folder/log"
        grep '^step [0-9]' "$folder/log" | tail -n +2 | sed 's/.*| \([0-9]*\) ms .*/\1/' >> "$folder/steps"
    done
    awk -v what="$model B=$B T=$T" -v toks=$((B * T)) -v ms="$(column steps 1)" -v n="$(wc -l < "$folder/steps")" \
        -v floor="$(column floors 6)" -v peak="$(column floors 2)" -v triad="$(column floors 4)" 'BEGIN {
        printf "%s: %d ms a step (median of %d), %.0f tok/s, %.3f x the floor of %.0f ms (%.0f Gflop/s, %.0f GB/s)\n",
               what, ms, n, 1000 * toks / ms, ms / floor, floor, peak, triad }'
done <<< "$shapes"
