#!/usr/bin/env bash
# shellcheck disable=SC2154,SC2086
# run_gpt2_124m.sh: trains GPT-2 124M from random weights on 10 billion tokens of FineWeb or OpenWebText.
#
# recipe     llm.c's: 524,288 tokens a step, 1024 a sequence, AdamW 0.9 / 0.95, decay 0.1, lr 6e-4, warm-up 700 steps,
#            cosine to 0, 19,073 steps
# data       --text FOLDER with shards in llm.c's format (fineweb_train_000001.bin ... fineweb_val_000000.bin, made by
#            llm.c's dev/data/fineweb.py, or fetched: hub data set karpathy/fineweb10B-gpt2); nanoGPT's OpenWebText
#            (train.bin, val.bin) with  -- --raw-tokens
# work       0.80 GFLOP a token: 8.0e18 FLOP
# hours      bf16, at 40 % of the peak: 8 x H100 0.7, 8 x A100 2.2, one RTX 4090 34. An estimate, not measured
# reference  OpenAI's GPT-2 124M has a validation loss of 3.29 on FineWeb and 29.4 % on HellaSwag; llm.c's run of this
#            recipe passes both (llm.c, discussion 481)
set -euo pipefail
source "$(dirname "$0")/run_common.sh"
run_options gpt2_124m "$@"

if [ -n "$dry" ]; then dry_model gpt2; else model=${model:-gpt2}; fi
have_shards "make them with llm.c's dev/data/fineweb.py"
train -m "$model" --from-scratch -p bf16 -z 1 -t 1024 -b 32 --batch 512 -n 19073 -l 6e-4 --warmup 700 \
    --schedule cosine --min-lr 0 --beta1 0.9 --beta2 0.95 --weight-decay 0.1 --clip 1 --eval-every 250 \
    --eval-batches 40 --save-every 2000
report
