#!/usr/bin/env bash
# shellcheck disable=SC2154,SC2086
# run_llama3_8b_finetune.sh: fine-tunes every weight of LLaMA-3 8B on a text of your own.
#
# recipe     8192 tokens a sequence, 64 sequences a step, AdamW 0.9 / 0.95 without decay, lr 1e-5, warm-up 3 % , cosine
#            to a tenth, 1 epoch; ZeRO-3, recomputing attention: 31 GiB a GPU on eight (train_gpt --plan)
# data       --text FILE or FOLDER of *.txt; --model FOLDER with LLaMA-3 8B (its licence has to be accepted on the hub)
# work       51.5 GFLOP a token and 12 more for activation recomputation: 100M tokens are 6.3e18 FLOP
# hours      100M tokens, bf16, at 40 % of the peak: 8 x H100 0.6, 8 x A100 80 GB 1.8. An estimate, not measured
# reference  the perplexity of the model before, which the script prints first
set -euo pipefail
source "$(dirname "$0")/run_common.sh"
run_options llama3_8b_finetune "$@"

[ -n "$dry$model" ] || fail "needs --model FOLDER with LLaMA-3 8B: config.json, *.safetensors, tokenizer.json"
have_model meta-llama/Meta-Llama-3-8B llama
have_text own
perplexities "$model" val
train -m "$model" -p bf16 -z 3 -r attention -t 8192 -b 1 --batch 64 --epochs 1 -l 1e-5 --schedule cosine --beta1 0.9 \
    --beta2 0.95 --weight-decay 0 --clip 1 --eval-every 50 --eval-batches 20 --save-every 200
perplexities "$trained" val
report
