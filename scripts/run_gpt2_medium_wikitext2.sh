#!/usr/bin/env bash
# run_gpt2_medium_wikitext2.sh: the run of run_gpt2_medium_wikitext103.sh on WikiText-2.
#
# recipe     the same
# work       about 2.4M tokens an epoch in GPT-2's vocabulary, 880 steps; 2.28 GFLOP a token: 1.6e16 FLOP
# hours      one GPU, bf16, at 40 to 50 % of its peak: H100 0.01, A100 0.03, RTX 4090 0.06. An estimate, not measured
# reference  zero-shot, per word: 22.76 (Radford et al. 2019, table 3, 345M; with detokenizers of their own)
set -euo pipefail
case " $* " in *" --help "* | *" -h "*) sed -n '/^# run_/,/^set/{/^#/s/^# \{0,1\}//p}' "$0" ;; esac
WIKITEXT=wikitext2 exec "$(dirname "$0")/run_gpt2_medium_wikitext103.sh" "$@"
