#!/usr/bin/env bash
# hostfile.sh FILE: prints "HOST SLOTS" for each machine of a hostfile, as Open MPI reads it: "HOST slots=N", 1 without
# slots; also "slots = N"; # begins a comment. A max_slots=N is read over, any other word is refused with its line.
set -uo pipefail
awk '
    { sub(/#.*/, ""); gsub(/\r/, ""); gsub(/[ \t]*=[ \t]*/, "=") }
    NF > 0 {
        slots = 1
        for (i = 2; i <= NF; i++) {
            if ($i ~ /^slots=[0-9]+$/ && length($i) < 12) slots = substr($i, 7) + 0
            else if ($i !~ /^max[-_]slots=[0-9]+$/) {
                printf "%s: line %d: \"%s\" is not known: a line has \"HOST slots=N\"\n", FILENAME, NR, $i \
                    > "/dev/stderr"
                exit 1
            }
        }
        if (slots > 0) print $1, slots
    }' "${1:?usage: scripts/hostfile.sh FILE}"
