#!/usr/bin/env bash
# Which lines of device code do the op tests never execute? The CUDA kernels run on the emulator, so gcov counts them.
#   dev/coverage.sh [LEAST]    fails if less than LEAST percent (default 99) of the lines were executed; names the rest
set -euo pipefail
cd "$(dirname "$0")/.."
least=${1:-99}
build=build/coverage
precisions=(fp32 bf16 fp16)

make -s DEVICE=emu COVERAGE=1 "${precisions[@]/#/$build/test_ops.}"
find $build -name '*.gcda' -delete
for precision in "${precisions[@]}"; do
    log=$build/test_ops.$precision.log
    $build/test_ops."$precision" > "$log" 2>&1 || { tail -n 3 "$log"; exit 1; }
    EMU_NO_EPILOGUE=1 $build/test_ops."$precision" matmul > "$log" 2>&1 || { tail -n 3 "$log"; exit 1; }
done
for precision in "${precisions[@]}"; do
    gcov --json-format --stdout $build/test_ops."$precision".gcda > $build/test_ops."$precision".json
done
dev/coverage.py "$least" $build/test_ops.{fp32,bf16,fp16}.json
