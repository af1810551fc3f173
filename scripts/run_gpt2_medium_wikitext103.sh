#!/usr/bin/env bash
# shellcheck disable=SC2154,SC2086
# run_gpt2_medium_wikitext103.sh: fine-tunes GPT-2 medium (355M) on WikiText-103, and measures it before and after.
#
# recipe     that of Hugging Face's run_clm: blocks of 1024 tokens, 8 sequences a step, AdamW 0.9 / 0.999 without decay,
#            lr 5e-5 falling linearly to 0, no warm-up, 3 epochs, clipping at 1, seed 42, and the dropout of the model's
#            config.json: 0.1 of embeddings, attention probabilities and residual branches. Without: -- --dropout 0
# work       about 118M tokens an epoch in GPT-2's vocabulary, 43,200 steps; 2.28 GFLOP a token: 8.0e17 FLOP
# hours      one GPU, bf16, at 40 to 50 % of its peak: H100 0.6, A100 1.6, RTX 4090 2.7. An estimate, not measured
# reference  zero-shot, per word: 26.37 (Radford et al. 2019, table 3, 345M; with detokenizers of their own, which this
#            script has not). Fine-tuned, per token: 11.55, and 14.84 for the small gpt2 (README of neulab's
#            knn-transformers, which does not say the stride of its windows)
# compare    with the convention of the number, where it is known: the script prints three. A window of 1024 has 1024
#            targets here, a block of run_clm 1023
set -euo pipefail
source "$(dirname "$0")/run_common.sh"
set_name=${WIKITEXT:-wikitext103}
run_options "gpt2_medium_$set_name" "$@"

have_model openai-community/gpt2-medium gpt2 model.safetensors
have_text "$set_name"
[ -n "$scratch" ] || perplexities "$model" test
every=$([ "$set_name" = wikitext103 ] && echo 2000 || echo 200)
train -m "$model" $scratch -p bf16 -t 1024 -b $((ranks < 8 ? 8 / ranks : 1)) --epochs 3 -l 5e-5 --schedule linear \
    --warmup 0 --min-lr 0 --beta1 0.9 --beta2 0.999 --weight-decay 0 --clip 1 --dropout 0.1 -s 42 \
    --eval-every "$every" --save-every "$every" --log-every 20
perplexities "$trained" test
report
