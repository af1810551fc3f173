#!/usr/bin/env bash
# Installs what the CPU build, the data scripts and the tests need, on Debian and Ubuntu. It may be run again.
# As root or with sudo it installs the packages; otherwise it names those that are missing and stops.
#   scripts/setup.sh [--tests]   with what only scripts/test.sh needs: clang for the fuzz targets, pyarrow, zstandard
set -euo pipefail
cd "$(dirname "$0")/.."

PACKAGES="gcc g++ make openmpi-bin libopenmpi-dev libopenblas-openmp-dev libcjson-dev libpcre2-dev"
PACKAGES="$PACKAGES bible-kjv python3 python3-venv"
[ "${1:-}" != --tests ] || PACKAGES="$PACKAGES clang libclang-rt-dev"
PYTHON_PACKAGES="numpy tokenizers jinja2 matplotlib pytest pytest-xdist"
[ "${1:-}" != --tests ] || PYTHON_PACKAGES="$PYTHON_PACKAGES pyarrow zstandard"      # data/prepare.py: parquet, .zst

say() { echo "setup: $*"; }
die() { echo "setup: $*" >&2; exit 1; }

# ---- Debian packages --------------------------------------------------------------------------------------------
command -v dpkg-query > /dev/null || die "this is not Debian or Ubuntu; install the like of: $PACKAGES"

missing=""
for package in $PACKAGES; do
    status=$(dpkg-query -W -f '${Status}' "$package" 2> /dev/null || true)
    [ "$status" = "install ok installed" ] || missing="$missing $package"
done

if [ -n "$missing" ]; then
    if [ "$(id -u)" = 0 ]; then
        as_root=""
    elif command -v sudo > /dev/null && { sudo -n true 2> /dev/null || [ -t 0 ]; }; then
        as_root="sudo"
    else
        die "not root and no sudo: ask for  apt-get install$missing"
    fi
    say "installing$missing"
    apt_get() { $as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o Dpkg::Use-Pty=0 "$@"; }
    apt_get update
    # shellcheck disable=SC2086
    apt_get install --no-install-recommends $missing > /dev/null
else
    say "Debian packages are all here"
fi

# ---- Python, in a virtual environment of its own: data preparation, plots and tests; training needs none --------
if [ ! -x .venv/bin/python ]; then
    say "making .venv"
    python3 -m venv .venv
fi
modules=${PYTHON_PACKAGES/pytest-xdist/xdist}
has_python_packages() { .venv/bin/python -c "import ${modules// /, }" 2> /dev/null; }
if ! has_python_packages; then
    say "installing $PYTHON_PACKAGES into .venv"
    # shellcheck disable=SC2086
    .venv/bin/python -m pip install --quiet --disable-pip-version-check $PYTHON_PACKAGES
    has_python_packages || die "pip ran, but .venv cannot import: $PYTHON_PACKAGES"
else
    say "Python packages are all here"
fi

# ---- Open MPI: more ranks than cores, and ranks that wait must not take a core from one that works --------------
mca_file="$HOME/.openmpi/mca-params.conf"
for setting in rmaps_base_oversubscribe mpi_yield_when_idle; do
    if ! grep -qs "^ *$setting *=" "$mca_file"; then
        mkdir -p "$(dirname "$mca_file")"
        echo "$setting = 1" >> "$mca_file"
        say "wrote '$setting = 1' to $mca_file, so that 'mpirun -np 8' works on fewer than 8 cores"
    fi
done

# Open MPI refuses root (the user of most containers) unless two variables are set, and reads them from the
# environment only. A wrapper that comes earlier in PATH sets them in every shell, this one included.
wrapper=/usr/local/bin/mpirun
if [ "$(id -u)" = 0 ] && [ ! -e "$wrapper" ]; then
    real=$(command -v mpirun)
    cat > "$wrapper" << END
#!/bin/bash
# Lets root use mpirun. Written by scripts/setup.sh of train_gpt; remove this file to undo it.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
exec -a mpirun $real "\$@"
END
    chmod 755 "$wrapper"
    say "wrote $wrapper, which lets root use mpirun (remove it to undo)"
fi

# ---- CUDA: NVIDIA's own packages, which are not installed unasked ------------------------------------------------
if nvidia-smi -L > /dev/null 2>&1; then
    nvcc=$(scripts/toolchain.sh nvcc)
    if [ -z "$nvcc" ]; then
        say "a GPU is here, but no nvcc: install cuda-toolkit and libnccl-dev (docs/building.md)"
    else
        scripts/toolchain.sh nccl "$nvcc" || true
    fi
fi
say "done; next: make"
