#!/usr/bin/env bash
# Everything worth knowing on a machine with a GPU, within five minutes, as one table: build, op tests, trials,
# the steps of GPT-2 124M and 1.5B, the same models in PyTorch, and the measured GEMM peak and bandwidth.
#   scripts/gpu_check.sh [--dry]     --dry: the same steps on the emulated device with tiny sizes, to test this script
# A step that fails is a row that says so, and the next one runs. The logs are in build/gpu_check.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

device=cuda precisions=(fp32 bf16 fp16) filter="" steps=12 trials="not test_x"
models=("gpt2 16 1024" "gpt2-xl 4 1024")     # preset, micro-batch, tokens
case ${1:-} in
    "") ;;
    --dry) device=emu precisions=(fp32) filter=gelu steps=2
        trials="test_z and not z2" models=("d2 1 16" "d3 1 16") ;;
    *) echo "usage: scripts/gpu_check.sh [--dry]" >&2; exit 2 ;;
esac
make_args=("DEVICE=$device")
command -v mpicc > /dev/null || make_args+=(NO_MPI=1 NO_NCCL=1)
build=build/$device logs=build/gpu_check table=build/gpu_check/table.md
program=$build/train_gpt
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
mkdir -p $logs
rm -f $logs/*.json

if [ "$device" = cuda ] && ! nvidia-smi -L > /dev/null 2>&1; then
    echo "gpu_check: no GPU here; --dry tries the script itself on the emulated device" >&2
    exit 1
fi

num_failed=0
row() { printf '| %-30s | %-66s | %5d s |\n' "$1" "$2" "$3" | tee -a $table; }

# step NAME SECONDS PATTERN COMMAND...: the last line of the output that matches PATTERN is the result.
step() {
    local name=$1 limit=$2 pattern=$3 log="$logs/${1//[^a-zA-Z0-9]/_}.log" start=$SECONDS status result
    shift 3
    timeout -k 5 "$limit" bash -o pipefail -c '"$@"' step "$@" > "$log" 2>&1 < /dev/null
    status=$?
    result=$(grep -E "$pattern" "$log" | tail -n 1)
    if [ $status != 0 ] || [ -z "$result" ]; then
        num_failed=$((num_failed + 1))
        [ $status = 124 ] && result="no result within $limit s"
        result="FAILED ($status): ${result:-$(tail -n 1 "$log")}"
    fi
    row "$name" "$result" $((SECONDS - start))
    return $status
}

# bench FILE MODEL B T PRECISION [FLAGS]: of --bench the median, tokens per second, % of peak and of measured
# GEMM peak.
bench() {
    local file=$logs/$1.json model=$2 B=$3 T=$4 precision=$5
    shift 5
    "$program" --bench -m "$model" -b "$B" -t "$T" -n $steps -p "$precision" -l 1e-4 --bench-json "$file" "$@" &&
        $python - "$file" << 'PYTHON'
import json, sys
j = json.load(open(sys.argv[1]))
print(f"bench: {j['step_ms']['median']:.2f} ms | {j['tokens_per_s']:.4g} tok/s | {100 * j['mfu']:.1f}% MFU | "
      f"{100 * j['product_share']:.1f}% of GEMM peak")
PYTHON
}

# ceilings JSON: what the device gave at best in that run.
ceilings() {
    $python - "$1" << 'PYTHON'
import json, sys
j = json.load(open(sys.argv[1]))
side = round(j["product_side"])
print(f"GEMM {side}x{side}x{side} {j['product_flop_per_s'] / 1e12:.4g} TFLOP/s | memory "
      f"{j['memory_byte_per_s'] / 1e9:.4g} GB/s")
PYTHON
}

build() { make "$@" && echo "built: ${*: -1}"; }

# The CUDA toolkit's, or the one that comes with PyTorch.
find_cuobjdump() {
    command -v cuobjdump || $python - 2> /dev/null << 'PYTHON'
import os, sys, triton
path = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
sys.exit(not os.path.exists(path) or print(path))
PYTHON
}

# sass CUOBJDUMP: how many of attention's instructions are GEMMs on tensor cores; without a GPU in what nvcc makes
# for one.
sass() {
    local file=$program
    if [ "$device" != cuda ]; then
        file=$logs/attention.cubin
        nvcc -x cu -arch=sm_90 -std=c++17 -O3 -DDEVICE_CUDA -DPREC_BF16 -I. -cubin -o "$file" - << 'CUDA' || return
#include "kernels/common.cuh"
#include "kernels/attention.cuh"
void* kept[] = {(void*)attention_forward, (void*)attention_backward};
CUDA
    fi
    "$1" -sass "$file" | awk '/Function :/ { ours = /attention/ } ours && /HMMA/ { n++ } END { print n + 0, "HMMA" }'
}

has_torch() { $python -c 'import torch' 2> /dev/null; }

export -f build bench sass
export python logs program steps device

: > $table
row "gpu_check $(git rev-parse --short HEAD 2> /dev/null)" "$(nvidia-smi --query-gpu=name,driver_version,power.limit \
    --format=csv,noheader 2> /dev/null || echo "emulated device, tiny sizes: no figure here means anything")" 0
targets=("${precisions[@]/#/$build/test_ops.}" "$build/test_emu" all)
step "build" 180 "^built" build "${make_args[@]}" "${targets[@]}" || exit 1
step "device tests" 60 "passed" "$build/test_emu"
for precision in "${precisions[@]}"; do
    step "op tests $precision" 60 "passed" "$build/test_ops.$precision" $filter
done
if ! command -v nvcc > /dev/null; then
    row "tensor cores in SASS" "skipped: no nvcc here" 0
elif ! cuobjdump=$(find_cuobjdump); then
    row "tensor cores in SASS" "skipped: no cuobjdump here" 0
else
    step "tensor cores in SASS" 120 "^[1-9][0-9]* HMMA" sass "$cuobjdump"
fi
for model in "${models[@]}"; do
    read -r name B T <<< "$model"
    for precision in "${precisions[@]}"; do
        [ "$precision" = fp16 ] && continue          # as fast as bf16
        [ "$name $precision" = "gpt2-xl fp32" ] && continue
        step "bench $name B=$B T=$T $precision" 60 "^bench: " bench "bench_${name}_$precision" "$name" "$B" "$T" \
            "$precision"
    done
    step "the same from host memory" 60 "^bench: " bench "offload_$name" "$name" "$B" "$T" \
        "${precisions[1]:-fp32}" -z 3 --offload optimizer,gradients,parameters
    if [ "$device" = cuda ] && has_torch; then
        step "torch.compile $name" 120 "^torch" $python dev/torch_gpt2.py -m "$name" -b "$B" -t "$T" -n $steps
    else
        row "torch.compile $name" "skipped: no torch here, or no GPU" 0
    fi
done
for file in "$logs"/bench_*.json; do
    [ -f "$file" ] && row "ceilings: $(basename "$file" .json)" "$(ceilings "$file")" 0
done
if $python -c 'import pytest, numpy' 2> /dev/null; then
    step "trials" 90 "passed" $python -m pytest -q -p no:cacheprovider test/test_trials.py \
        -k "$device and $trials"
else
    row "trials" "skipped: no pytest here" 0
fi
echo "gpu_check: $num_failed steps failed, $SECONDS s in all; the table is $table"
[ $num_failed = 0 ]
