#!/usr/bin/env bash
# hosts.sh: a run over several machines of a hostfile, without a batch system.
#
#   scripts/hosts.sh HOSTFILE scripts/run_gpt2_124m.sh --text /data/fineweb ...
#
# HOSTFILE has a line per machine, "name slots=8", as for Open MPI and DeepSpeed (see scripts/hostfile.sh). The machines
# reach each other by ssh without a password and have this folder and the data under the same path.
# NCCL_SOCKET_IFNAME and NCCL_IB_HCA select the network if NCCL chooses badly; all NCCL_* are forwarded.
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: scripts/hosts.sh HOSTFILE scripts/run_NAME.sh [OPTIONS]" >&2; exit 2; }
hostfile=$(realpath "$1") script=$2
shift 2
machines=$("$(dirname "$0")/hostfile.sh" "$hostfile")
slots=$(awk '{ sum += $2 } END { print sum + 0 }' <<< "$machines")
[ "$slots" -gt 0 ] || { echo "hosts.sh: $hostfile names no machine: a line each, as \"name slots=8\"" >&2; exit 1; }
hosts=$(awk '{ printf "%s%s:%s", (NR > 1 ? "," : ""), $1, $2 }' <<< "$machines")
pass=""
for variable in $(compgen -e | grep -E '^(NCCL_|OMP_NUM_THREADS$)' || true); do pass="$pass -x $variable"; done
export LAUNCH="mpirun --quiet --host $hosts -np $slots --map-by slot --bind-to none$pass"
exec "$script" --ranks "$slots" "$@"
