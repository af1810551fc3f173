#!/usr/bin/env bash
# Every row of the op tests, the largest too, in every precision: 5 seeds of the plain emulator, 2 of the checked one.
#   dev/ops_seeds.sh [PRECISION ...]    prints a line per run, as many at a time as there are cores, also into
#                                       build/logs/ops_seeds.out
set -uo pipefail
cd "$(dirname "$0")/.." || exit
precisions=("$@")
[ $# = 0 ] && precisions=(fp32 bf16 fp16)
num_cores=$(nproc)                   # OMP_NUM_THREADS would change what it says
export OP_LARGE=1 OMP_NUM_THREADS=1 logs=build/logs
mkdir -p $logs
make -s DEVICE=emu "${precisions[@]/#/build/emu/test_ops.}" || exit
make -s DEVICE=emu CHECK=1 "${precisions[@]/#/build/check/test_ops.}" || exit

# VARIANT PRECISION SEED
run() {
    local start=$SECONDS log=$logs/ops_$1.$2.$3.log
    EMU_SEED=$3 "build/$1/test_ops.$2" > "$log" 2>&1 || echo "ends with $?" >> "$log"
    printf '%-5s %s seed %s: %s; %d s\n' "$1" "$2" "$3" "$(tail -n 1 "$log")" $((SECONDS - start))
}
export -f run

{
    for seed in 0 1; do printf "check %s $seed\n" "${precisions[@]}"; done
    for seed in 0 1 2 3 4; do printf "emu %s $seed\n" "${precisions[@]}"; done
} | xargs -P "$num_cores" -I{} bash -c "run {}" | tee $logs/ops_seeds.out
num_passed=$(grep -c " passed, 0 failed" $logs/ops_seeds.out) num_runs=$((7 * ${#precisions[@]}))
echo "$num_passed passed, $((num_runs - num_passed)) failed"
[ "$num_passed" = $num_runs ]
