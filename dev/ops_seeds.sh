#!/usr/bin/env bash
# Every row of the op tests, the largest too, in every precision: 5 seeds of the plain emulator, 2 of the checked one.
#   dev/ops_seeds.sh [PRECISION ...]    prints a line per run; dev/ops_seeds.log keeps the last complete one
set -uo pipefail
cd "$(dirname "$0")/.." || exit
precisions=("$@")
[ $# = 0 ] && precisions=(fp32 bf16 fp16)
export OP_LARGE=1 OMP_NUM_THREADS=1
logs=build/logs
mkdir -p $logs
make -s DEVICE=emu "${precisions[@]/#/build/emu/test_ops.}" || exit
make -s DEVICE=emu CHECK=1 "${precisions[@]/#/build/check/test_ops.}" || exit

failed=0
for precision in "${precisions[@]}"; do
    for run in "emu 0" "emu 1" "emu 2" "emu 3" "emu 4" "check 0" "check 1"; do
        read -r variant seed <<< "$run"
        start=$SECONDS log=$logs/ops_$variant.$precision.$seed.log
        EMU_SEED=$seed "build/$variant/test_ops.$precision" > "$log" 2>&1 || failed=$((failed + 1))
        printf '%-5s %s seed %s: %s; %d s\n' "$variant" "$precision" "$seed" "$(tail -n 1 "$log")" $((SECONDS - start))
    done
done
echo "$((7 * ${#precisions[@]} - failed)) passed, $failed failed"
[ $failed = 0 ]
