# shellcheck shell=bash disable=SC2034
# run_common.sh: functions of the run_*.sh scripts, which source it. Each describes its run, then calls these steps:
#   run_options NAME "$@"       reads the command line; see run_usage. Sets $out $text $model $ranks $dry $more
#   have_model NAME             a Hugging Face folder in $model: given, there from before, or fetched; --dry: a tiny one
#   have_text SET               token shards in $shards, with the model's tokenizer: from a data set by name or --text
#   have_shards URL-HINT        token shards that are there already, in $shards
#   train FLAGS                 the run into $out; resumes from its newest checkpoint if there is one
#   perplexities MODEL PART     in three conventions, named with each
#   report                      a page about the run
# Commands are shown before they run. The launcher is mpirun --quiet -np RANKS, or $LAUNCH (hosts.sh, slurm.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
train_gpt=${TRAIN_GPT:-./train_gpt}
python=${PYTHON:-.venv/bin/python}
hub=${HF_ENDPOINT:-https://huggingface.co}
run_start=$SECONDS

step() { printf '\n== %s   [%d s]\n' "$*" $((SECONDS - run_start)); }
fail() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit 1; }
show() { printf '+ %s\n' "$*"; "$@"; }

run_usage() {
    sed -n "/^# run_/,/^set/{/^#/s/^# \{0,1\}//p}" "$0"
    cat << 'END'

options
  --text PATH     a local copy of the text: file, folder, zip or parquet, as data/prepare.py takes it; or token shards
  --model PATH    a local Hugging Face folder instead of the one from the hub
  --from-scratch  random weights of that shape
  --out FOLDER    where the run goes (runs/NAME); a run that was stopped resumes there
  --ranks N       processes (default: the GPUs of this machine, or 1)
  --dry           every step in small: a tiny model, a few lines of text, a few steps
  -- FLAGS        what follows goes to train_gpt as it is, behind the recipe's own flags
END
}

run_options() {
    name=$1 text="" model="" scratch="" out="" ranks="" dry="" more=()
    shift
    while [ $# -gt 0 ]; do
        case $1 in
            --text) text=${2:?--text needs a path}; shift ;;
            --model) model=${2:?--model needs a folder}; shift ;;
            --out) out=${2:?--out needs a folder}; shift ;;
            --ranks) ranks=${2:?--ranks needs a number}; shift ;;
            --from-scratch) scratch=--from-scratch ;;
            --dry) dry=1 ;;
            -h | --help) run_usage; exit 0 ;;
            --) shift; more=("$@"); break ;;
            *) fail "unknown option $1 (--help lists them; flags of train_gpt go behind --)" ;;
        esac
        shift
    done
    out=${out:-runs/$name${dry:+-dry}}
    work=$out
    if [ -z "$ranks" ]; then
        ranks=$(nvidia-smi -L 2> /dev/null | grep -c '^GPU' || true)
        [ "$ranks" -gt 0 ] || ranks=1
    fi
    [ -x "$train_gpt" ] || show make --silent
    mkdir -p "$work"
}

launch() {
    if [ -n "${LAUNCH:-}" ]; then
        # shellcheck disable=SC2086
        show $LAUNCH "$train_gpt" "$@"
    elif [ "$ranks" = 1 ]; then
        show "$train_gpt" "$@"
    else
        show mpirun --quiet -np "$ranks" "$train_gpt" "$@"
    fi
}

# The text of a dry run: files of this repository, split like WikiText, so that the same reader works.
dry_text() {
    mkdir -p "$work/text"
    cat README.md CHANGELOG.md > "$work/text/wiki.train.raw"
    head -c 6000 LICENSE > "$work/text/wiki.valid.raw"
    tail -c 1500 README.md > "$work/text/wiki.test.raw"
}

# A folder like one of the hub: config.json, weights, tokenizer. KIND is gpt2 or llama.
dry_model() {
    local kind=$1 dims
    dry_text
    [ -e "$work/tiny/meta.json" ] ||
        show "$python" data/prepare.py wikitext2 --source "$work/text" --vocab-size 320 --out "$work/tiny"
    if [ "$kind" = gpt2 ]; then
        dims='"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64'
    else
        dims='"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
              "num_key_value_heads": 1, "intermediate_size": 64, "max_position_embeddings": 64'
    fi
    mkdir -p "$work/shape"
    echo "{$dims, \"vocab_size\": 320, \"tie_word_embeddings\": true}" > "$work/shape/config.json"
    cp "$work/tiny/tokenizer.json" "$work/shape/"
    model=$work/model
    [ -e "$model/config.json" ] ||
        show "$train_gpt" -m "$work/shape" -d "$work/tiny" --from-scratch --export "$model"
}

# have_model HUB-NAME KIND [FILE ...]
have_model() {
    local from=$1 kind=$2 file
    shift 2
    step "model: ${model:-$from}"
    if [ -n "$dry" ]; then
        dry_model "$kind"
    elif [ -n "$model" ]; then
        [ -e "$model/config.json" ] || fail "--model $model: no config.json there"
    else
        model=models/$(basename "$from")
        mkdir -p "$model"
        for file in config.json tokenizer.json "$@"; do
            if [ -e "$model/$file" ]; then continue; fi
            if [ -n "$scratch" ] && [[ $file == *.safetensors* ]]; then continue; fi
            show curl -fL --retry 3 -o "$model/$file.part" "$hub/$from/resolve/main/$file" ||
                fail "$file of $from cannot be fetched; get the folder elsewhere and give it: --model PATH"
            mv "$model/$file.part" "$model/$file"
        done
    fi
}

have_text() {
    local set=$1
    step "text: ${text:-$set}"
    if [ -n "$dry" ]; then text=$work/text set=wikitext2; fi
    shards=${dry:+$work/shards}
    shards=${shards:-data/sets/$set-$(basename "$model")}
    if [ -e "$shards/meta.json" ]; then
        echo "$shards is there from before"
    elif [ -n "$text" ] && compgen -G "$text/*train*.bin" > /dev/null; then
        shards=$text
    else
        local what=("$set")
        if [[ $set != wikitext* ]]; then what=("${text:?this run needs --text PATH}")
        elif [ -n "$text" ]; then what+=(--source "$text"); fi
        show "$python" data/prepare.py "${what[@]}" --tokenizer "$model/tokenizer.json" --out "$shards"
    fi
}

# Shards made elsewhere (llm.c's layout): not fetched, since they are large; the error names them.
have_shards() {
    local hint=$1
    step "token shards: ${text:-none given}"
    if [ -n "$dry" ]; then
        shards=$work/tiny
    else
        [ -n "$text" ] || fail "needs --text FOLDER with train and val shards: $hint"
        shards=$text
    fi
}

# merge FLAGS...: adds to the list `flags`; if a flag is given twice the last one counts, so that flags after `--`
# override the recipe. -n and --epochs replace each other, and -g replaces --batch.
merge() {
    local -A value=() letters=([m]=model [d]=data [v]=val [o]=out [z]=zero [b]=micro-batch [g]=grad-accum [t]=seq-len
                               [n]=steps [l]=lr [p]=precision [r]=recompute [s]=seed)
    local name text
    while [ $# -gt 0 ]; do
        case $1 in
            --*=*) name=${1%%=*} name=${name#--} text="=${1#*=}" ;;
            --*) name=${1#--} text="" ;;
            -?) name=${letters[${1#-}]:?unknown flag $1} text="" ;;
            *) fail "'$1' is no flag of train_gpt" ;;
        esac
        shift
        if [ -z "$text" ] && [ $# -gt 0 ] && [[ ! $1 =~ ^-[-a-z] ]]; then text="=$1"; shift; fi
        case $name in
            steps) unset "value[epochs]" ;;
            epochs) unset "value[steps]" ;;
            grad-accum) unset "value[batch]" ;;
        esac
        value[$name]=$text
    done
    flags=()
    for name in "${!value[@]}"; do flags+=("--$name${value[$name]}"); done
    mapfile -t flags < <(printf '%s\n' "${flags[@]}" | sort)
}

# train FLAGS...: the recipe; a dry run replaces its sizes by small ones.
train() {
    local small=()
    step "train into $out"
    if [ -n "$dry" ]; then
        small=(-t 32 -b 2 -g 1 -n 6 --warmup 1 --eval-every 3 --eval-batches 2 --save-every 0 -p fp32 --sample-tokens 8)
    fi
    merge -d "$shards" -o "$out" --resume auto "$@" "${small[@]}" "${more[@]}"
    launch "${flags[@]}"
    trained=$(scripts/newest_checkpoint.sh "$out")
}

# perplexities MODEL PART: PART is val or test. A window of T tokens has T targets here; blocks of Hugging Face's
# run_clm have T - 1, since labels are shifted within the block.
perplexities() {
    local folder=$1 part=$2 T=1024 stride=512 log="$work/perplexity.log"
    if [ -n "$dry" ]; then T=32 stride=16; fi
    step "perplexity of $folder on $part"
    local eval=(--eval -m "$folder" -d "$shards" -v "$shards/${part}_000000.bin" -t "$T" -b 1)
    launch "${eval[@]}" | tee "$log"
    launch "${eval[@]}" --eval-stride $stride | tee -a "$log"
    perplexity_of() { grep -oE "perplexity [0-9.]+ per $1" "$log" | sed -n "$2s/[^0-9.]//gp"; }
    echo "perplexity of $folder, $part part:"
    echo "  per token, windows of $T beside one another       $(perplexity_of token 1)"
    echo "  per token, windows of $T every $stride             $(perplexity_of token 2)"
    echo "  per word of the raw text, windows every $stride    $(perplexity_of word 2)"
}

report() {
    step "report"
    show "$python" scripts/report.py "$out"
    step "done: $out holds report.html, the log and the model"
}
