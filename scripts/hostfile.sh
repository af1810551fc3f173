#!/usr/bin/env bash
# hostfile.sh FILE: prints "HOST SLOTS" for each machine of a hostfile, with the slots that Open MPI gives it: of "HOST
# slots=N" N, of "HOST max_slots=N" N, else 1, and one more for each further line of the host. "slots = N" is the same;
# # and // begin a comment; lines may end in CR, or not at all. What is not understood is refused with its line.
set -uo pipefail
file=${1:?usage: scripts/hostfile.sh FILE}
[ ! -d "$file" ] && [ -r "$file" ] ||
    { echo "$file: cannot be read: a hostfile has lines of \"HOST slots=N\"" >&2; exit 1; }
awk '
    function refuse(why) {
        gsub(/[[:cntrl:]]/, "?", why)
        printf "%s: line %d: %s: a line has \"HOST slots=N\"\n", FILENAME, NR, why > "/dev/stderr"
        failed = 1
        exit 1
    }
    { sub(/(#|\/\/).*/, ""); gsub(/\r/, ""); gsub(/[ \t]*=[ \t]*/, "=") }
    NF > 0 {
        host = $1
        given = most = ""                      # slots= and max_slots=
        if (host !~ /^[A-Za-z0-9_.:@-]+$/) refuse("\"" host "\" is no name of a machine")
        for (i = 2; i <= NF; i++) {
            value = $i
            sub(/^[^=]*=/, "", value)
            known = value ~ /^[0-9]+$/ && length(value) < 6
            if (known && $i ~ /^slots=/ && given == "") given = value + 0
            else if (known && $i ~ /^max[-_]slots=/) most = value + 0
            else refuse("\"" $i "\" is not understood")
        }
        if (given != "" && most != "" && given > most) refuse("slots=" given " is above max_slots=" most)
        if (given != "" && host in line_of)
            refuse(host " is in line " line_of[host] " too, and slots= can be given once")
        if (!(host in line_of)) hosts[++num_hosts] = host
        line_of[host] = NR
        slots[host] += given != "" ? given : most != "" && slots[host] == 0 ? most : 1
    }
    END {
        for (i = 1; i <= num_hosts && !failed; i++) if (slots[hosts[i]] > 0) print hosts[i], slots[hosts[i]]
    }' "$file"
