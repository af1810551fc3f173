#!/usr/bin/env bash
# shellcheck disable=SC2154,SC2086
# run_llama_1b.sh: trains a LLaMA of 1.1B parameters from random weights, 22 tokens a parameter.
#
# recipe     1,048,576 tokens a step, 2048 a sequence, AdamW 0.9 / 0.95, decay 0.1, lr 4e-4, warm-up 2000 steps, cosine
#            to a tenth, 23,000 steps = 24 billion tokens; ZeRO-2
# data       --text FOLDER with token shards of a vocabulary of at most 32,000 (train_*.bin, val_*.bin), made by
#            data/prepare.py TEXTS --tokenizer tokenizer.json
# work       6.75 GFLOP a token: 1.6e20 FLOP
# hours      bf16, at 40 % of the peak: 8 x H100 14, 8 x A100 45. An estimate, not measured
# reference  none of exactly this; TinyLlama 1.1B has the same shape and was trained on 3 trillion tokens
#            (arXiv 2401.02385)
set -euo pipefail
source "$(dirname "$0")/run_common.sh"
run_options llama_1b "$@"

if [ -n "$dry" ]; then dry_model llama; else model=${model:-llama-1b}; fi
have_shards "make them with data/prepare.py TEXTS --tokenizer tokenizer.json"
train -m "$model" --from-scratch -p bf16 -z 2 -t 2048 -b 8 --batch 512 -n 23000 -l 4e-4 --warmup 2000 \
    --schedule cosine --beta1 0.9 --beta2 0.95 --weight-decay 0.1 --clip 1 --eval-every 500 --eval-batches 40 \
    --save-every 1000
report
