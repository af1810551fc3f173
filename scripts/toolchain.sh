#!/usr/bin/env bash
# What the Makefile asks about this machine's compilers and GPUs. If it cannot be used: one sentence, exit code 1.
#   toolchain.sh nvcc                      path of nvcc, nothing if there is none: of $CUDA_HOME, of PATH, or the newest
#                                          of /usr/local/cuda*
#   toolchain.sh mpi compile|link nvcc|gcc flags of $MPICC (default mpicc) in the words of that compiler
#   toolchain.sh nccl NVCC                 nothing if nccl.h can be included
#   toolchain.sh arch NVCC [CAPABILITY..]  compute capabilities to compile for: those given, else those of the GPUs that
#                                          are here, else the usual ones
set -uo pipefail

OLDEST=80                                # bf16 on tensor cores and cp.async: Ampere
USUAL="80 86 89 90 100 120"

fail() { echo "$*"; exit 1; }

gpus() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2> /dev/null; }

find_nvcc() {
    local path newest
    newest=$(printf '%s\n' /usr/local/cuda*/bin/nvcc | sort -V | tail -n 1)
    for path in "${CUDA_HOME:+$CUDA_HOME/bin/nvcc}" "$(command -v nvcc)" /usr/local/cuda/bin/nvcc "$newest"; do
        if [ -x "$path" ]; then echo "$path"; return; fi
    done
}

# The words of the wrapper compiler: Open MPI (HPC-X too) prints flags of one kind, MPICH and Intel MPI all of the
# command. Quotes around a path are taken off.
mpi_words() {
    local mpicc=${MPICC:-mpicc} text="" package
    if command -v "$mpicc" > /dev/null; then
        text=$("$mpicc" "--showme:$1" 2> /dev/null) || text=$("$mpicc" -show 2> /dev/null) ||
            fail "$mpicc prints its flags neither with --showme:$1 (Open MPI) nor with -show (MPICH, Intel MPI)"
    elif [ -z "${MPICC:-}" ]; then
        for package in ompi-c mpich impi; do
            text=$(pkg-config --silence-errors --cflags --libs "$package" 2> /dev/null) && break
        done
    fi
    [ -n "$text" ] || fail "$mpicc is not here: run scripts/setup.sh, or build for one process with NO_MPI=1"
    xargs -n 1 <<< "$text"
}

# Only what names headers and libraries: the wrapper's -O, -g and warnings are for its own compiler. nvcc does not know
# -pthread and -Wl.
mpi() {
    local kind=$1 compiler=$2 words word comma flags=()
    words=$(mpi_words "$kind") || fail "$words"
    mapfile -t words <<< "$words"
    while [ ${#words[@]} -gt 0 ]; do
        word=${words[0]} words=("${words[@]:1}")
        case $kind,$word in
            compile,-[ID]*) flags+=("$word") ;;
            compile,-isystem) flags+=("$word" "${words[0]}"); words=("${words[@]:1}") ;;
            link,-[Ll]* | link,*.so | link,*.a) flags+=("$word") ;;
            link,-Xlinker) flags+=("$word" "${words[0]}"); words=("${words[@]:1}") ;;
            link,-Wl,*)
                IFS=, read -ra comma <<< "${word#-Wl,}"
                for word in "${comma[@]}"; do flags+=(-Xlinker "$word"); done ;;
            *,-pthread)
                if [ "$compiler" = nvcc ]; then flags+=(-Xcompiler); fi
                flags+=(-pthread) ;;
        esac
    done
    echo "${flags[*]}"
}

nccl() {
    "$1" -E -x cu - > /dev/null 2>&1 <<< '#include <nccl.h>' ||
        fail "nccl.h is not found: install libnccl-dev (docs/building.md), or build for one GPU with NO_NCCL=1"
}

# $1 if nvcc knows it, else the largest of the usual ones of its generation up to $1, whose code runs on it: those of
# boards (8.7, 10.1) do not.
known_for() {
    local found="" each
    for each in $USUAL "$1"; do
        [ "$each" -le "$1" ] && [ $((each / 10)) = $(($1 / 10)) ] && grep -qx "$each" <<< "$known" && found=$each
    done
    echo "$found"
}

arch() {
    local nvcc=$1 version each chosen=() here
    shift
    known=$("$nvcc" --list-gpu-arch | grep -oE '[0-9]+$' | sort -n)
    version=$("$nvcc" --version | grep -oE 'release [0-9.]+')
    [ -n "$known" ] || fail "$nvcc --list-gpu-arch prints nothing: train_gpt needs CUDA 12.4 or later"
    for each in "$@"; do
        [[ $each =~ ^[0-9]+[af]?$ ]] ||
            fail "ARCH=$each: compute capabilities without the point, for example ARCH='80 90'"
        [ "${each%[af]}" -ge $OLDEST ] || fail "ARCH=$each: train_gpt needs compute capability 8.0 (Ampere) or later"
        grep -qx "${each%[af]}" <<< "$known" ||
            fail "ARCH=$each is not known to $nvcc (${version/release/CUDA}), which has ${known//$'\n'/ }"
        chosen+=("$each")
    done
    here=$(gpus compute_cap | tr -d . | grep -x '[0-9]*' | sort -nu)
    if [ ${#chosen[@]} = 0 ] && [ -n "$here" ]; then
        for each in $here; do
            if [ "$each" -ge $OLDEST ]; then chosen+=("$(known_for "$each")"); fi
        done
        [ ${#chosen[@]} -gt 0 ] || fail "$(gpus name | head -n 1) has compute capability" \
            "$(gpus compute_cap | head -n 1), train_gpt needs 8.0 (Ampere) or later: build for the CPU with DEVICE=cpu"
    elif [ ${#chosen[@]} = 0 ]; then
        for each in $USUAL; do
            if grep -qx "$each" <<< "$known"; then chosen+=("$each"); fi
        done
    fi
    each=$(xargs -n 1 <<< "${chosen[*]}" | sort -Vu | xargs)
    echo "${each:-$(tail -n 1 <<< "$known")}"          # a generation later than this nvcc: from PTX of the newest
}

case ${1:-} in
    nvcc) find_nvcc ;;
    mpi | nccl | arch) "$@" ;;
    *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
