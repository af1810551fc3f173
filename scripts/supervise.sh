#!/usr/bin/env bash
# Starts a run, and restarts it from its newest complete checkpoint when it dies.
#   scripts/supervise.sh RANKS [--hostfile FILE] [--min-ranks N] [--retries N] ./train_gpt -o FOLDER ARGS...
# A rank that was killed or has no heartbeat is started again. Where ranks are lost again before there is a new
# checkpoint, the next start has so many ranks less. With a hostfile (lines of "HOST slots=N") the hosts that answer are
# counted before each start, and their slots are the most ranks. Fewer ranks keep the global batch: --elastic changes
# the micro-steps, and the number of ranks is lowered until it divides the batch and the first batch of --batch-ramp.
# With --tp it is a multiple of that: replicas of the model are lost as a whole, and it is their number that divides the
# batch. There are never fewer than --min-ranks (1).
# It gives up after --retries (3) starts in a row without a new checkpoint, and on a usage error (exit code 2).
# SIGTERM, SIGINT and SIGUSR2 end the run after a save, or at once between two starts; SIGUSR1 saves. mpirun receives a
# signal that it forwards.
set -uo pipefail

say() { echo "supervise: $*"; }
usage() { sed -n '3p' "$0" | tr -d '#' >&2; exit 2; }

scripts=$(dirname "${BASH_SOURCE[0]}")
asked=${1:-} hostfile="" min_ranks=1 retries=3
[[ $asked =~ ^[1-9][0-9]*$ ]] || usage
shift
while [ $# -gt 0 ]; do
    case $1 in
        --hostfile) hostfile=${2:-}; [ -r "$hostfile" ] || { say "$hostfile: cannot be read"; exit 1; }; shift 2 ;;
        --min-ranks) min_ranks=${2:-}; shift 2 ;;
        --retries) retries=${2:-}; shift 2 ;;
        *) break ;;
    esac
done
[ $# -gt 0 ] || usage
[[ $min_ranks =~ ^[1-9][0-9]*$ && $retries =~ ^[1-9][0-9]*$ ]] || usage
command=("$@") out="" first_batch=0 tp=1 previous=""
for word in "$@"; do
    case $previous:$word in
        -o:* | --out:*) out=$word ;;
        *:--out=*) out=${word#--out=} ;;
        *:-o?*) out=${word#-o} out=${out#=} ;;
        --batch-ramp:[1-9]*:*) first_batch=${word%%:*} ;;
        --tp:[1-9]* | --tensor-model-parallel-size:[1-9]*) tp=$word ;;
        *:--tp=[1-9]* | *:--tensor-model-parallel-size=[1-9]*) tp=${word#*=} ;;
        *:--batch-ramp=[1-9]*:*) first_batch=${word#--batch-ramp=} first_batch=${first_batch%%:*} ;;
    esac
    previous=$word
done
[ -n "$out" ] || { say "the command has no -o: without checkpoints there is nothing to resume from"; exit 2; }

checkpoint() { "$scripts/newest_checkpoint.sh" "$out"; }
step_of() { local step=${1##*/step_}; echo $((10#${step:-0})); }

# The hosts of the hostfile that answer, as mpirun's --host list; `ranks` becomes at most their slots.
count_hosts() {
    local host slots machines total=0
    machines=$("$scripts/hostfile.sh" "$hostfile") || exit 1
    hosts=""
    while read -r host slots; do
        [ -n "$host" ] || continue
        if [ "$host" = localhost ] || [ "$host" = "$(hostname)" ] ||
            timeout 20 ssh -o BatchMode=yes -o ConnectTimeout=10 "$host" true < /dev/null > /dev/null 2>&1; then
            hosts="$hosts,$host:$slots"
            total=$((total + slots))
        else
            say "$host does not answer: not used"
        fi
    done <<< "$machines"
    [ "$ranks" -le "$total" ] || ranks=$total
    hosts=${hosts#,}
}

# Waits for process $1, whose exit code becomes `status`: a signal to this script ends the wait, not the run.
await() {
    wait "$1"
    status=$?
    while kill -0 "$1" 2> /dev/null; do
        wait "$1"
        status=$?
    done
}

pid="" ended=0 status=1
# Asks mpirun until it is gone: while it starts, it has no ranks to forward a signal to, and drops it.
ask_to_end() { while kill -USR2 "$1"; do sleep 1; done > /dev/null 2>&1 & }

# Open MPI's mpirun may hang when a rank dies while it is being started. Under it is nothing then, or a zombie.
end_if_alone() {
    local times=0
    while kill -0 "$1"; do
        if ps -o stat= --ppid "$1" | grep -qv '^Z'; then times=0; else times=$((times + 1)); fi
        [ $times -lt 15 ] || kill -KILL "$1"
        sleep 2
    done > /dev/null 2>&1 &
}
trap 'ended=1; [ -z "$pid" ] || ask_to_end "$pid"' TERM INT USR2
trap '[ -z "$pid" ] || kill -USR1 "$pid" 2> /dev/null' USR1

err=$(mktemp) || exit 1
trap 'rm -f "$err"' EXIT
failures=0 lost_before=0
while :; do
    launch=(mpirun --oversubscribe) ranks=$asked
    if [ -n "$hostfile" ]; then
        count_hosts
        launch+=(--host "$hosts")
    fi
    before=$(checkpoint)
    batch=$(cat "$out/run.json" "$before/state.json" 2> /dev/null | grep -oE '"global_batch": [0-9]+' | tail -n 1)
    batch=$(tr -dc 0-9 <<< "${batch:-0}")
    replicas=$((ranks / tp))
    [ $replicas -gt 0 ] ||
        { say "$ranks ranks remain, --tp $tp needs $tp for a replica of the model: given up"; exit 1; }
    while [ $((batch % replicas + first_batch % replicas)) != 0 ]; do replicas=$((replicas - 1)); done
    ranks=$((replicas * tp))
    [ "$ranks" -ge "$min_ranks" ] || { say "$ranks ranks remain, --min-ranks is $min_ranks: given up"; exit 1; }
    [ $ended = 0 ] || { say "asked to end: not started again, the newest checkpoint is ${before:-none}"; exit $status; }
    say "$ranks ranks, from ${before:-the beginning}"
    exec {to_tee}> >(tee "$err" >&2)
    tee_pid=$!
    "${launch[@]}" -np "$ranks" "${command[@]}" --resume auto --elastic 2>&"$to_tee" {to_tee}>&- &
    pid=$!
    exec {to_tee}>&-
    end_if_alone "$pid"
    [ $ended = 0 ] || ask_to_end "$pid"     # asked a moment ago
    await "$pid"
    pid=""
    if [ $status = 0 ]; then say "done"; exit 0; fi
    [ $ended = 0 ] || { say "asked to end; exit code $status"; exit $status; }
    [ $status != 2 ] || exit 2
    for _ in {1..20}; do kill -0 "$tee_pid" 2> /dev/null && sleep 0.1; done     # $err is complete then
    if [ "$(step_of "$(checkpoint)")" -gt "$(step_of "$before")" ] &&
        ! grep -q 'another run is writing there' "$err"; then
        failures=0 lost_before=0
    else
        failures=$((failures + 1))
    fi
    if [ $failures -ge "$retries" ]; then
        say "exit code $status, $failures starts in a row without a new checkpoint: given up"
        exit 1
    fi
    lost=$(grep -oE 'rank [0-9]+ with PID [0-9]+ on node [^ ]+ exited on signal|rank [0-9]+ has no heartbeat' \
        "$err" | grep -oE '^rank [0-9]+' | sort -u | wc -l)
    say "exit code $status, $lost ranks lost"
    if [ "$lost" -gt 0 ] && [ $lost_before -gt 0 ]; then
        asked=$((ranks - lost > min_ranks ? ranks - lost : min_ranks))
        say "ranks were lost before, too, without a new checkpoint since: at most $asked from here on"
    fi
    lost_before=$lost
    sleep 1
done
