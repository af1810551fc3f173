#!/usr/bin/env bash
# newest_checkpoint.sh FOLDER: prints the newest complete checkpoint of a run folder, nothing if there is none. Its name
# is exactly step_N: not step_N.tmp, step_N.damaged or step_N.skipped.2.
set -uo pipefail
find "${1:?usage: scripts/newest_checkpoint.sh FOLDER}" -maxdepth 1 -regextype posix-extended \
    -regex '.*/step_[0-9]{8,}' -exec test -e '{}/state.json' \; -print 2> /dev/null | sort -V | tail -n 1
