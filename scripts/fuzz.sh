#!/usr/bin/env bash
# Runs every fuzz target of build/fuzz at the same time; the last line is the sum: "N passed, N failed, 0 skipped".
#   scripts/fuzz.sh SECONDS [TARGET ...]
# Each starts from test/corpus/TARGET and from what earlier runs have found (build/fuzz/found/TARGET). An
# input that breaks a parser is left as build/fuzz/TARGET-*: `build/fuzz/TARGET FILE` shows it again.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
seconds=${1:?"usage: scripts/fuzz.sh SECONDS [TARGET ...]"}
shift
make -s DEVICE=cpu fuzz || exit 1
names=("$@")
[ ${#names[@]} -gt 0 ] || mapfile -t names < <(ls test/corpus)

declare -A pids
for name in "${names[@]}"; do
    rm -f "build/fuzz/$name-"*
    mkdir -p "build/fuzz/found/$name"
    "build/fuzz/$name" -max_total_time="$seconds" -timeout=20 -max_len=4096 -close_fd_mask=3 -print_final_stats=1 \
        -artifact_prefix="build/fuzz/$name-" "build/fuzz/found/$name" "test/corpus/$name" \
        > "build/fuzz/$name.log" 2>&1 < /dev/null &
    pids[$name]=$!
done
passed=0 failed=0
for name in "${names[@]}"; do
    if wait "${pids[$name]}"; then
        passed=$((passed + 1))
        printf '%-14s %s inputs, %s edges and features\n' "$name" \
            "$(sed -n 's/stat::number_of_executed_units: *//p' "build/fuzz/$name.log")" \
            "$(grep -oE 'cov: [0-9]+ ft: [0-9]+' "build/fuzz/$name.log" | tail -n 1 | tr -dc '0-9 ')"
    else
        failed=$((failed + 1))
        echo "--- $name"
        tail -n 40 "build/fuzz/$name.log"
    fi
done
echo "$passed passed, $failed failed, 0 skipped"
[ $failed = 0 ]
