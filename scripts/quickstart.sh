#!/usr/bin/env bash
# From nothing to a trained model: installs, builds, tokenizes the King James Bible, trains a small GPT-2 on two ranks
# with ZeRO stage 2, evaluates it on held-out text, plots its loss and generates text. Under 8 minutes on 2 cores.
# A second run neither resumes nor overwrites the first: it trains from the start into runs/quickstart-2 and so on.
set -euo pipefail
cd "$(dirname "$0")/.."
start=$SECONDS
step() { printf '\n== %s   [%d s]\n' "$*" $((SECONDS - start)); }

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_mpi_yield_when_idle=1

out=runs/quickstart
for ((n = 2; ; n++)); do
    [ -e "$out" ] || break
    out=runs/quickstart-$n
done
[ "$out" = runs/quickstart ] || echo "runs/quickstart is there from before: this run goes to $out"

step "install"
scripts/setup.sh

step "build"
make --silent

step "data"
if [ -e data/sets/kjv/meta.json ]; then
    echo "data/sets/kjv is there from before"
else
    .venv/bin/python data/prepare.py kjv
fi

step "train: mpirun -np 2 ./train_gpt -z 2 -m d3 -o $out"
mpirun -np 2 ./train_gpt -z 2 -m d3 -b 4 -n 800 -l 3e-3 --warmup 40 --eval-every 200 --log-every 20 -o "$out"

step "evaluate on the last 5 % of the text"
model=$(scripts/newest_checkpoint.sh "$out")
mpirun -np 2 ./train_gpt --eval -m "$model"
sed -n 's/.*"gzip9_bits_per_byte": \([0-9.]*\).*/gzip -9 packs the same text to \1 bits per byte/p' \
    data/sets/kjv/meta.json

step "plot"
.venv/bin/python scripts/plot.py "$out"

step "write"
./train_gpt -m "$model" --generate "In the beginning" --sample-tokens 100

step "done: $out holds loss.png, the log and the model"
