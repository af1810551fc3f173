#!/usr/bin/env bash
# The first nine minutes on a machine with a GPU: do the kernels compute what they should, does a run train as on the
# CPU, how fast is it. From a folder that scripts/gpu_pack.sh made: nothing is built or fetched here.
#   scripts/gpu_check.sh [--dry] [FOLDER]     FOLDER: build/gpu_pack, packed first where it is not there
#                                             --dry: the same rows on the emulated device, tiny sizes
# Into $OUT (build/gpu_check): results.txt, a line for each row as it ends with all lines of a failure, and logs.tar.gz.
# The order is that of what decides most. Each row is a process of its own with a limit of its own: an error that takes
# the device along ends one row. No row begins that cannot end within LIMIT_S (540) seconds.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)

dry=""
if [ "${1:-}" = --dry ]; then dry=1; shift; fi
if [ -e "$here/version" ]; then
    pack=$here                                            # the packed copy of this script
else
    cd "$here/.." || exit
    pack=${1:-build/gpu_pack}
    [ -e "$pack/version" ] || scripts/gpu_pack.sh ${dry:+--dry} "$pack" || exit
fi
out=${OUT:-build/gpu_check}
mkdir -p "$out"
pack=$(realpath "$pack") out=$(realpath "$out") limit_s=${LIMIT_S:-540}
results=$out/results.txt logs=$out/logs work=$(mktemp -d)
read -r steps T < "$pack/size"
rm -rf "$results" "$logs" "$out/logs.tar.gz"
mkdir -p "$logs"
trap 'rm -rf "$work"' EXIT
if [ -z "$dry" ] && ! nvidia-smi -L > /dev/null 2>&1; then
    echo "gpu_check: no GPU here; --dry runs the same rows on the emulated device" >&2
    exit 1
fi

# The packed libraries, and cuBLASLt of the toolkit or of PyTorch.
library_path=$pack/lib
of_torch=$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])' 2> /dev/null)
for folder in /usr/local/cuda*/lib64 "$of_torch"/cu*/lib; do
    [ -d "$folder" ] && library_path=$library_path:$folder
done
export LD_LIBRARY_PATH=$library_path${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
if ldd "$pack/bin/train_gpt" "$pack/bin/mpirun" 2> /dev/null | grep -q 'not found'; then
    LD_LIBRARY_PATH=$LD_LIBRARY_PATH:$pack/lib/usual
fi
if [ -d "$pack/openmpi" ]; then                           # the packed Open MPI finds its files here
    export OPAL_PREFIX=$pack OPAL_BINDIR=$pack/bin OPAL_LIBDIR=$pack/lib OPAL_PKGLIBDIR=$pack/openmpi
    export OPAL_PKGDATADIR=$pack OPAL_SYSCONFDIR=$pack PMIX_MCA_pcompress_base_silence_warning=1
fi
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_btl_vader_single_copy_mechanism=none
export PATH=$pack/bin:$PATH:/usr/local/cuda/bin pack work steps T dry

# ---------------------------------------------------------------- rows
passed=0 failed=0 skipped=0
say() { printf '%s\n' "$*" | tee -a "$results"; }
line() { say "$(printf '%4d s  %-4s  %-32s  %s' "$SECONDS" "$@")"; }

skip() { skipped=$((skipped + 1)); line skip "$1" "$2"; }

# row NAME SECONDS COMMAND...: passes if the command does. Its lines that begin with "= " are the result.
row() {
    local name=$1 limit=${ROW_LIMIT_S:-$2} left=$((limit_s - SECONDS - 5)) status
    local log="$logs/${1//[^a-zA-Z0-9.=-]/_}.log"
    shift 2
    if [ $left -lt 5 ] || [ $left -lt $((limit / 4)) ]; then skip "$name" "no time is left"; return; fi
    [ $limit -lt $left ] || limit=$left
    # Appended, so that two who write it do not overwrite each other: tee opens it once more.
    timeout -k 3 "$limit" bash -o pipefail -c '"$@"' row "$@" >> "$log" 2>&1 < /dev/null
    status=$?
    if [ $status = 0 ]; then
        passed=$((passed + 1))
        line ok "$name" "$(sed -n 's/^= //p' "$log" | paste -sd '|')"
        return
    fi
    failed=$((failed + 1))
    line FAIL "$name" "$([ $status = 124 ] && echo "no end within $limit s" || echo "exit code $status")"
    { grep -E 'FAIL|^(train_gpt|emulator):|[Ee]rror' "$log" || tail -n 5 "$log"; grep '^= ' "$log"; } |
        awk '!seen[$0]++' | head -n 40 | sed 's/^/            /' | tee -a "$results"
}

# ---------------------------------------------------------------- what the rows run
# with_ranks N COMMAND...: runs below are of N ranks on the one GPU.
with_ranks() {
    export ranks=$1 TRAIN_GPT_SHARE_GPU=1
    "${@:2}"
}
launch() { mpirun --oversubscribe --bind-to none -np "${ranks:-1}" "$@"; }

# run NAME MODEL PRECISION FLAGS...: a short training run into $work/NAME, of four sequences a step.
run() {
    local name=$1 model=$2 precision=$3 start=() b=2
    shift 3
    [ -z "${ranks:-}" ] || start=(launch)
    [ "${ranks:-1}" -le 2 ] || b=1
    rm -rf "${work:?}/$name"
    "${start[@]}" train_gpt -m "$pack/models/$model" --from-scratch -d "$pack/data/small" -p "$precision" -b $b \
        -t "$T" -g $((4 / b / ${ranks:-1})) -n "$steps" -l 1e-3 --warmup 2 --sample-tokens 0 -o "$work/$name" "$@"
}

losses_of() { sed -n 's/^{"step": .*"loss": \([^,]*\),.*/\1/p' "$work/$1/log.jsonl"; }

# near LIMIT FILE: are the losses on stdin within LIMIT, relative, of those in FILE?
near() {
    paste - "$2" | awk -v limit="$1" '
        NF != 2 { short = 1 }
        { off = ($1 - $2) / $2; if (off < 0) off = -off; if (!(off <= most)) most = off }
        END {
            printf "= %d losses, at most %.2g off (limit %g), the last %s, want %s\n", NR, most, limit, $1, $2
            exit NR == 0 || short || !(most <= limit)
        }'
}

# As the CPU build's with the same weights and data.
trains_as_cpu() { run "$1-$2" "$1" "$2" && losses_of "$1-$2" | near "$3" "$pack/reference/$1.$2"; }

# The golden run of GPT-2 124M, against PyTorch.
golden() {
    train_gpt -m gpt2 -d "$pack/data/gpt2" -t 64 -b 4 -n 10 -p "$1" -l 1e-4 --min-lr 1e-5 --warmup 3 --beta1 0.9 \
        --beta2 0.95 --eps 1e-8 --weight-decay 0.1 --clip 1 -s 1337 --schedule cosine --no-shuffle --sample-tokens 0 \
        -o "$work/golden-$1" && losses_of "golden-$1" | near "$2" "$pack/reference/gpt2.fp32"
}

hash_of() { grep -oE 'state hash [0-9a-f]+' | tail -n 1 | cut -d ' ' -f 3; }

# same MODEL NAME FLAGS...: the state hash of a bf16 run with these flags is that of one without (first call: makes it).
same() {
    local model=$1 name=$2 want="$work/$1${ranks:-}.hash" got
    shift 2
    [ -s "$want" ] || run "$model-plain" "$model" bf16 | tee -a /dev/stderr | hash_of > "$want"
    got=$(run "$model-$name" "$model" bf16 "$@" | tee -a /dev/stderr | hash_of)
    echo "= $got, want $(cat "$want")"
    [ -n "$got" ] && [ "$got" = "$(cat "$want")" ]
}

resumed() {
    local model=$1 want="$work/$1.hash" got
    run "$model-half" "$model" bf16 --save-every $((steps / 2)) > "$work/$model-half.txt" || return
    [ -s "$want" ] || hash_of < "$work/$model-half.txt" > "$want"
    got=$(run_on "$model" "$work/$model-half/step_$(printf %08d $((steps / 2)))" | tee -a /dev/stderr | hash_of)
    echo "= $got, want $(cat "$want")"
    [ -n "$got" ] && [ "$got" = "$(cat "$want")" ]
}
run_on() {
    train_gpt -m "$pack/models/$1" --resume "$2" -d "$pack/data/small" -p bf16 -b 2 -t "$T" -g 2 -n "$steps" \
        -l 1e-3 --warmup 2 --sample-tokens 0
}

# Dropout does not depend on anything but the seed: two runs.
dropout_twice() {
    local first second
    first=$(run drop-1 gpt bf16 --dropout 0.1 | hash_of) second=$(run drop-2 gpt bf16 --dropout 0.1 -r block | hash_of)
    echo "= $first and $second"
    [ -n "$first" ] && [ "$first" = "$second" ]
}

# bench MODEL B T FLAGS...: of --bench the median step, tokens per second, % of peak and of the measured GEMM peak.
bench() {
    local model=$1 B=$2 T=$3
    shift 3
    [ -d "$pack/models/$model" ] && model=$pack/models/$model
    train_gpt --bench -m "$model" -b "$B" -t "$T" -n "$([ -n "$dry" ] && echo 2 || echo 12)" -l 1e-4 "$@" |
        tee "$work/bench.txt" && sed -nE '/^(step  |flops |ceiling|memory  device|phases)| attention_/s/ +/ /g
            s/^(step |flops |ceiling|memory device|phases).*/= &/p; s/^ .* (attention_.*)/= \1/p' "$work/bench.txt"
}

# A trace of a step.
traced() {
    run traced gpt bf16 --profile 1 && grep -o '"ph":' "$work/traced/trace.json" | wc -l | sed 's/.*/= & events/'
}

# Every collective, type and operation of the stand-in for NCCL: its copies and host functions.
collectives() { launch test_nccl | tee -a /dev/stderr | sed -n '$ s/^/= /p'; }

op_test() { "test_ops.$1" --op "$2" | tee -a /dev/stderr | sed -n '$ s/^/= /p'; }
op_bench() { test_ops.bf16 --bench "$1" | sed 's/^/= /'; }

torch_bench() { python3 "$pack/torch_gpt2.py" -m "$1" -b "$2" -n 10 --eager | sed 's/^/= /'; }

sanitized() { compute-sanitizer --tool "$1" --error-exitcode 9 "${@:2}" && echo "= clean"; }

# One launch of a kernel under Nsight Compute: cycles, what limits it, occupancy. A name: with its template arguments.
profiled() {
    ncu --clock-control none --launch-count 1 --kernel-name-base demangled -k "regex:$1" \
        --section SpeedOfLight --section Occupancy --section LaunchStats \
        test_ops.bf16 --bench "$2" | grep -E 'Duration|Throughput|Occupancy|Registers' | sed -E 's/ +/ /g; s/^/= /'
}

clocks() {
    local fields=name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu
    nvidia-smi --query-gpu=$fields --format=csv,noheader | sed 's/^/= /'
    nvidia-smi
    nvidia-smi -q -d CLOCK,POWER,PERFORMANCE
}

report() {
    ldd "$pack/bin/train_gpt"
    train_gpt --report
}
export -f with_ranks launch run losses_of near trains_as_cpu golden hash_of same resumed run_on dropout_twice bench
export -f traced collectives op_test op_bench torch_bench sanitized profiled clocks report

# ---------------------------------------------------------------- the rows, what decides most first
say "gpu_check $(cat "$pack/version")"
[ -n "$dry" ] || row "machine" 20 clocks
row "report" 30 report
precisions="bf16 fp32 fp16" ops=$(test_ops.fp32 --list)
for precision in $precisions; do
    for op in $ops; do
        row "op $precision $op" 20 op_test "$precision" "$op"
    done
done
row "device, cuBLASLt" 30 test_emu
for model in gpt llama qwen3; do
    row "losses $model fp32" 20 trains_as_cpu $model fp32 1e-5
    row "losses $model bf16" 20 trains_as_cpu $model bf16 2e-2
    row "losses $model fp16" 20 trains_as_cpu $model fp16 2e-2
done
for model in gpt llama; do
    row "bits $model twice" 30 same $model twice -r none
    for level in cheap mlp attention block 2; do row "bits $model -r $level" 15 same $model "r-$level" -r $level; done
    row "bits $model resumed" 30 resumed $model
    for stage in 1 2 3; do row "bits $model -z $stage" 15 same $model "z$stage" -z $stage; done
    row "bits $model --offload" 15 same $model offload -z 3 --offload optimizer,gradients,parameters
    row "bits $model --overlap 0" 15 same $model overlap --overlap 0
done
row "bits gpt dropout" 30 dropout_twice
row "trace" 20 traced

# Streams, events and the host functions of collectives of several ranks, truly at the same time.
if command -v mpirun > /dev/null; then
    row "collectives, 2 ranks" 40 with_ranks 2 collectives
    for ranks in 2 4; do
        row "losses gpt fp32, $ranks ranks" 30 with_ranks $ranks trains_as_cpu gpt fp32 1e-5
        row "losses gpt bf16, $ranks ranks" 30 with_ranks $ranks trains_as_cpu gpt bf16 2e-2
        for stage in 0 1 2 3; do
            row "bits gpt, $ranks ranks -z $stage" 30 with_ranks $ranks same gpt "z$stage" -z $stage
        done
        row "bits gpt, $ranks ranks --overlap 0" 25 with_ranks $ranks same gpt overlap -z 3 --overlap 0
    done
    row "bits gpt, 2 ranks --offload" 25 with_ranks 2 same gpt offload -z 3 --offload optimizer,gradients,parameters
    unset ranks
else
    skip "2 and 4 ranks on this GPU" "no mpirun here, nor in the pack"
fi
if [ -n "$dry" ]; then
    skip "golden gpt2 124M" "too slow in the emulator"
else
    row "golden gpt2 124M fp32" 30 golden fp32 1e-4
    row "golden gpt2 124M bf16" 30 golden bf16 2e-2
fi

if command -v compute-sanitizer > /dev/null; then
    for op in attention matmul optimizer; do row "memcheck $op" 40 sanitized memcheck test_ops.bf16 --op $op; done
    row "memcheck a run" 40 sanitized memcheck train_gpt -m d2 -d "$pack/data/small" -t 64 -b 2 -n 2 --sample-tokens 0
    for op in attention layernorm classifier embedding; do
        row "racecheck $op" 40 sanitized racecheck test_ops.bf16 --op $op
    done
    row "synccheck attention" 40 sanitized synccheck test_ops.bf16 --op attention
else
    skip "memcheck, racecheck, synccheck" "no compute-sanitizer here"
fi

if [ -n "$dry" ]; then
    row "bench d2" 60 bench d2 1 16 -p fp32
    row "bench d2 --offload" 60 bench d2 1 16 -p fp32 -z 3 --offload optimizer,gradients,parameters
    row "op bench step" 30 op_bench step
else
    row "bench gpt2 B=64" 30 bench gpt2 64 1024 -p bf16
    row "bench gpt2 B=64 no epilogues" 30 env TRAIN_GPT_EPILOGUES=none bash -c 'bench "$@"' bench gpt2 64 1024 -p bf16
    row "bench gpt2 B=64 --tune" 40 bench gpt2 64 1024 -p bf16 --tune
    row "bench gpt2-xl B=16" 40 bench gpt2-xl 16 1024 -p bf16
    row "bench qwen2.5-1.5b B=16" 40 bench qwen2.5-1.5b 16 1024 -p bf16
    row "bench llama-1b B=16 T=2048" 40 bench llama-1b 16 2048 -p bf16
    row "bench llama3-8b, 4 layers, T=8192" 40 bench llama3-8b-l4 4 8192 -p bf16 -z 3 -r block
    row "bench gpt2 B=32" 30 bench gpt2 32 1024 -p bf16
    row "bench gpt2 B=32 fp32" 30 bench gpt2 32 1024 -p fp32
    row "bench gpt2 B=64 -z 3" 30 bench gpt2 64 1024 -p bf16 -z 3
    row "bench gpt2 B=64 -z 3 --overlap 0" 30 bench gpt2 64 1024 -p bf16 -z 3 --overlap 0
    row "bench gpt2 B=64 from host memory" 40 bench gpt2 64 1024 -p bf16 -z 3 --offload optimizer,gradients,parameters
    for op in attention layernorm classifier optimizer; do row "op bench $op" 20 op_bench $op; done
fi

if command -v ncu > /dev/null; then
    row "ncu attention forward 64" 25 profiled 'attention_forward_mma_kernel<.*64' attention_forward
    for kernel in q kv; do
        row "ncu attention backward $kernel 128" 25 profiled "attention_backward_${kernel}_mma_kernel<.*128" \
            attention_backward
    done
    row "ncu bias gradient" 25 profiled 'matmul_backward_bias_parts_kernel' matmul_backward_weight
    row "ncu GEMM dW" 25 profiled 'nvjet|gemm|cutlass' matmul_backward_weight
else
    skip "ncu" "no Nsight Compute here"
fi
if [ -z "$dry" ] && python3 -c 'import torch' 2> /dev/null; then
    row "PyTorch eager gpt2 B=64" 40 torch_bench gpt2 64
    row "PyTorch eager gpt2-xl B=16" 40 torch_bench gpt2-xl 16
else
    skip "PyTorch eager" "no torch, or no GPU here"
fi
[ -n "$dry" ] || row "machine afterwards" 20 clocks

say "$passed passed, $failed failed, $skipped skipped, $SECONDS s"
tar -C "$out" -czf "$out/logs.tar.gz" logs
[ $failed = 0 ]
