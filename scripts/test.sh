#!/usr/bin/env bash
# Builds and runs every test; the last line is the sum of all: "N passed, N failed, N skipped".
#   scripts/test.sh [--full] [DEVICE ...]   DEVICE: cpu, emu, check, cuda; default all, cuda where nvcc is
# check is the memory checker of emu: races, out-of-bounds, uninitialized reads of kernels and host code.
# Without a GPU the cuda build is compiled and linked (and must not spill), not run. --full adds the long tests, all
# combinations of settings where CI runs pairwise sets (test/conftest.py), the kernels of fp32 and fp16 for every
# architecture, dev/examples and ten minutes of fuzzing instead of fifteen seconds.
# Each test's own output is written to build/logs/ and shown when it fails.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

full=0
devices=()
for arg in "$@"; do
    case $arg in
        --full) full=1 ;;
        cpu | emu | check | cuda) devices+=("$arg") ;;
        *) echo "usage: scripts/test.sh [--full] [cpu|emu|check|cuda ...]" >&2; exit 2 ;;
    esac
done
if [ ${#devices[@]} = 0 ]; then
    devices=(cpu emu check cuda)
fi

logs=build/logs
mkdir -p "$logs"
rm -f "$logs"/*.counts

# The last "N passed, N failed, N skipped" of a log, in any order and with any of them left out (pytest: errors fail).
count_of() { grep -oE "[0-9]+ $1" <<< "$2" | tail -n 1 | grep -oE '^[0-9]+' || echo 0; }

# run NAME COMMAND...: a program that prints its counts, or one test if it prints none. The counts go to a file, so that
# what runs in the background counts too.
run() {
    local name=$1 log="$logs/$1.log" start=$SECONDS status line p f s text
    shift
    nice -n 5 "$@" > "$log" 2>&1 < /dev/null
    status=$?
    line=$(grep -E '[0-9]+ (passed|failed|skipped|errors?)\b' "$log" | tail -n 1)
    p=$(count_of passed "$line") f=$(count_of failed "$line") s=$(count_of skipped "$line")
    f=$((f + $(count_of error "$line")))
    if [ -z "$line" ] && [ $status = 0 ]; then p=1; fi
    if [ $status != 0 ] && [ "$f" = 0 ]; then f=1; fi        # it crashed, or failed without counting
    echo "$p $f $s" > "$logs/$name.counts"
    printf -v text '%-28s %5d ok %4d failed %4d skipped  %4d s' "$name" "$p" "$f" "$s" $((SECONDS - start))
    if [ "$f" != 0 ]; then
        text+=$'\n'"--- $log (exit $status)"$'\n'$(grep -vE '^ok ' "$log" | tail -n 60)$'\n'"---"
    fi
    echo "$text"
    return "$((f != 0))"
}

# As run, beside one other: for programs of one thread. `wait` ends the last ones.
run_beside() {
    while [ "$(jobs -rp | wc -l)" -ge 2 ]; do wait -n; done
    run "$@" &
}

skip() {
    echo "0 0 1" > "$logs/$1.counts"
    printf '%-28s skipped: %s\n' "$1" "$2"
}

have_gpu() { nvidia-smi -L > /dev/null 2>&1; }

# Programs that need mpirun: test_nccl runs at several rank counts.
run_programs() {
    local device=$1 program name
    for program in $(make -s DEVICE="$device" list-tests); do
        name=$(basename "$program")
        case $name in
            test_nccl)
                for ranks in 1 2 3 4; do run "$device-$name-$ranks" mpirun -np $ranks "$program"; done
                [ "$device" = emu ] && TRAIN_GPT_SHARE_GPU=1 run "$device-$name-shared" mpirun -np 3 "$program" ;;
            test_optimizer) ;;                         # pytest runs it: test_optimizer.py
            *) run "$device-$name" "$program" ;;
        esac
    done
}

# One precision with sanitizers, and the CPU build for other instruction sets than this machine's best.
run_variants() {
    local isa
    run_beside sanitize-build make DEVICE=cpu SANITIZE=1 PREC=fp32 build/sanitize/train_gpt
    run_beside portable-build make DEVICE=cpu DEV=1 ISA="avx512bf16 avx512 avx2 sse2" PREC="fp32 bf16" \
        BUILD=build/portable build/portable/train_gpt
    run_beside avx512-build make DEVICE=cpu DEV=1 ISA=avx512 PREC=bf16 BUILD=build/avx512 build/avx512/test_ops.bf16
    for isa in avx2 sse2; do
        run_beside "$isa-build" make DEVICE=cpu ISA=$isa PREC=fp32 BUILD=build/$isa build/$isa/test_ops.fp32
    done
    wait
    for isa in avx2 sse2; do run "cpu-test_ops.fp32-$isa" build/$isa/test_ops.fp32; done
    run cpu-test_ops.bf16-avx512 build/avx512/test_ops.bf16 matmul
}

# The fallbacks if cuBLASLt refuses an epilogue.
run_unfused() {
    local program name
    for program in build/emu/test_ops.*[a-z0-9]; do
        case $program in *.o | *.d) continue ;; esac
        name=$(basename "$program")
        EMU_NO_EPILOGUE=1 run "emu-$name-unfused" "$program" matmul
    done
}

run_checked() {
    local program name
    for program in $(make -s DEVICE=emu CHECK=1 list-tests); do
        name=$(basename "$program")
        case $name in
            test_emu) run_beside "check-$name" "$program" ;;
            test_nccl) run_beside "check-$name-2" mpirun -np 2 "$program" ;;
            test_ops.*)
                run_beside "check-$name" "$program"
                run_beside "check-$name-traffic" "$program" --traffic ;;
        esac
    done
    wait
}

if ! scripts/setup.sh --tests > "$logs/setup.log" 2>&1; then
    cat "$logs/setup.log"
    exit 1
fi
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_mpi_yield_when_idle=1

run lint make -s lint
run headers make -s DEVICE=cpu headers
for device in "${devices[@]}"; do
    if [ "$device" = cuda ] && [ -z "$(scripts/toolchain.sh nvcc)" ]; then
        skip cuda-build "no nvcc here"
        continue
    fi
    if [ "$device" = check ]; then
        run check-build make DEVICE=emu CHECK=1 all tests && run_checked
        continue
    fi
    if [ "$device" = cuda ]; then
        # Compiles and links it, bf16 for all architectures, the other precisions for one of them.
        if [ $full = 1 ]; then
            run cuda-spills make spills
        else
            run cuda-spills make spills PREC=bf16
            run cuda-spills-sm_90 make spills PREC="fp32 fp16" ARCH=90     # the last: test_faults.py runs its program
        fi
        if ! have_gpu; then
            skip cuda-run "compiled and linked; no GPU here to run it on"
            continue
        fi
    fi
    run "$device-build" make DEVICE="$device" all tests || continue
    [ "$device" = cpu ] && run_variants
    run_programs "$device"
    [ "$device" = emu ] && run_unfused
    export "TRAIN_GPT_${device^^}=build/$device/train_gpt"
done
run fuzz scripts/fuzz.sh $((full ? 600 : 15))
if [ $full = 1 ]; then
    run op-seeds dev/ops_seeds.sh
    run coverage dev/coverage.sh
    run mutations dev/mutate.py
    run examples dev/examples/check.sh
fi
export TRAIN_GPT_FULL=$full
run pytest .venv/bin/python -m pytest -q -p no:cacheprovider -n 2 --durations 40 test

passed=0 failed=0 skipped=0
while read -r p f s; do
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
done < <(cat "$logs"/*.counts)
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
