#!/usr/bin/env bash
# Presets x precisions x recomputation, each timed by train_gpt --bench: a table and a chart in build/bench, with the
# machine, the date and the version.
#   scripts/bench.sh [-m "gpt2:4:64 d6:4:256"] [-p "fp32 bf16"] [-r "none block"] [-n STEPS] [-j RANKS] [-o FOLDER]
#                    [-- FLAGS]
# A model is PRESET:SEQUENCES:TOKENS or FOLDER:SEQUENCES:TOKENS. Default: small models on a CPU, larger common ones on a
# GPU. A setting that does not fit or fails is a row with the reason. The program is ./train_gpt or TRAIN_GPT; -- passes
# flags to it (-- -z 2 -g 4).
set -uo pipefail
cd "$(dirname "$0")/.." || exit

program=${TRAIN_GPT:-./train_gpt} ranks=1 out=build/bench python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
if nvidia-smi -L > /dev/null 2>&1; then
    models="gpt2:32:1024 gpt2-medium:16:1024 gpt2-xl:8:1024 llama-1b:4:2048" precisions="bf16" levels="none cheap block"
    steps=20
else
    models="d4:4:256 gpt2:4:64 llama-60m:2:128" precisions="fp32 bf16" levels="none block" steps=4
fi
usage() { sed -n '4,8s/^# //p' "$0" >&2; exit 2; }
while getopts "m:p:r:n:j:o:" letter; do
    case $letter in
        m) models=$OPTARG ;;
        p) precisions=$OPTARG ;;
        r) levels=$OPTARG ;;
        n) steps=$OPTARG ;;
        j) ranks=$OPTARG ;;
        o) out=$OPTARG ;;
        *) usage ;;
    esac
done
shift $((OPTIND - 1))
for model in $models; do
    [[ $model =~ ^[^:]+:[0-9]+:[0-9]+$ ]] || { echo "bench.sh: -m $model is not PRESET:SEQUENCES:TOKENS" >&2; exit 2; }
done
[ -x "$program" ] || { echo "bench.sh: there is no $program: make, or TRAIN_GPT=build/cpu/train_gpt" >&2; exit 1; }
mkdir -p "$out" && rm -f "$out"/*.json "$out"/*.txt || exit
launch=()
[ "$ranks" -gt 1 ] && launch=(mpirun -np "$ranks")
for model in $models; do
    IFS=: read -r name B T <<< "$model"
    for precision in $precisions; do
        for level in $levels; do
            row=$out/$(basename "$name")_${B}x${T}_${precision}_$level
            echo "== $model -p $precision -r $level"
            "${launch[@]}" "$program" --bench -m "$name" -b "$B" -t "$T" -p "$precision" -r "$level" -n "$steps" \
                --bench-json "$row.json" "$@" > "$row.txt" 2>&1 < /dev/null || rm -f "$row.json"
            grep -E '^step |^train_gpt: ' "$row.txt"
        done
    done
done
$python scripts/bench_table.py "$out"
