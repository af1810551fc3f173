#!/usr/bin/env bash
# Applies dev/examples/*.patch, one on top of the other, to a copy of the tree, builds it in fp32 at -O0 after each and
# runs what the patch's "# test: COMMAND" says. The last line is the sum.
#   dev/examples/check.sh [NAME ...]      gpu: only these patches, gpu.patch ...
set -uo pipefail
cd "$(dirname "$0")/../.." || exit
root=$PWD tree=build/examples/tree logs=build/examples
rm -rf $tree
mkdir -p $tree
git ls-files -co --exclude-standard | tar -cf - --ignore-failed-read -T - 2> /dev/null | tar -xf - -C $tree
[ -d .venv ] && ln -s "$(readlink -f .venv)" $tree/.venv
patches=("${@/%/.patch}")
[ $# = 0 ] && mapfile -t patches < <(cd dev/examples && ls -- *.patch)

# In the copy: apply, build, test.
try() {
    local patch=$root/dev/examples/$1 command
    command=$(sed -n 's/^# test: //p' "$patch")
    [ -n "$command" ] || { echo "$1: no line '# test: COMMAND' before the diff"; return 1; }
    git apply --recount "$patch" || { echo "$1 does not apply: dev/examples/remake.sh"; return 1; }
    make -s DEVICE=cpu DEV=1 OPT=-O0 PREC=fp32 build/dev/train_gpt build/dev/test_ops.fp32 build/dev/test_optimizer &&
        bash -euo pipefail -c "$command"
}

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 TRAIN_GPT_CPU=build/dev/train_gpt MAKEFLAGS=
passed=0 failed=0
cd $tree && git init -q || exit
for patch in "${patches[@]}"; do
    log=$root/$logs/${patch%.patch}.log
    read -r files lines < <(grep -v '^#' "$root/dev/examples/$patch" | git apply --recount --numstat |
                            awk '{ lines += $1 + $2 } END { print NR, lines }')
    if try "$patch" > "$log" 2>&1 < /dev/null; then
        passed=$((passed + 1))
        echo "$patch: $files files, $lines lines: builds, and its test passes"
    else
        failed=$((failed + 1))
        echo "--- $patch: $files files, $lines lines: $log"
        tail -n 20 "$log"
    fi
done
echo "$passed passed, $failed failed, 0 skipped"
[ $failed = 0 ]
