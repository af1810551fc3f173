"""scripts/toolchain.sh and the Makefile with the compilers and GPUs of other machines: programs that print what those
of a cluster print."""
import os
import shutil
import subprocess

import pytest
from util import ROOT

# What the wrapper compiler prints; None: it is not there.
OPEN_MPI = """case $1 in
--showme:compile) echo "{compile}" ;;
--showme:link) echo "{link}" ;;
*) exit 1 ;;
esac"""
MPICH = """[ "$1" = -show ] && echo '{show}' || exit 1"""
WRAPPERS = {
    "debian": (OPEN_MPI.format(compile="-I/usr/lib/openmpi/include -I/usr/lib/openmpi/include/openmpi",
                               link="-L/usr/lib/openmpi/lib -lmpi"),
               "-I/usr/lib/openmpi/include -I/usr/lib/openmpi/include/openmpi", "-L/usr/lib/openmpi/lib -lmpi"),
    "hpcx": (OPEN_MPI.format(compile="-I/opt/hpcx/ompi/include -pthread",
                             link="-pthread -L/opt/hpcx/ompi/lib -Wl,-rpath -Wl,/opt/hpcx/ompi/lib "
                                  "-Wl,--enable-new-dtags,-z,now -lmpi"),
             "-I/opt/hpcx/ompi/include -Xcompiler -pthread",
             "-Xcompiler -pthread -L/opt/hpcx/ompi/lib -Xlinker -rpath -Xlinker /opt/hpcx/ompi/lib "
             "-Xlinker --enable-new-dtags -Xlinker -z -Xlinker now -lmpi"),
    "mpich": (MPICH.format(show="gcc -Wl,-z,relro -g -O2 -flto=auto -I/usr/include/mpich -L/usr/lib/mpich -lmpich"),
              "-I/usr/include/mpich", "-Xlinker -z -Xlinker relro -L/usr/lib/mpich -lmpich"),
    "intel": (MPICH.format(show='gcc -I"/opt/intel/mpi/include" -L"/opt/intel/mpi/lib/release" -L"/opt/intel/mpi/lib" '
                                '-Xlinker --enable-new-dtags -Xlinker -rpath -Xlinker "/opt/intel/mpi/lib/release" '
                                "-lmpifort -lmpi -ldl -lrt -lpthread"),
              "-I/opt/intel/mpi/include",
              "-L/opt/intel/mpi/lib/release -L/opt/intel/mpi/lib -Xlinker --enable-new-dtags -Xlinker -rpath "
              "-Xlinker /opt/intel/mpi/lib/release -lmpifort -lmpi -ldl -lrt -lpthread"),
}
KNOWN = {"12.4": "50 52 53 60 61 62 70 72 75 80 86 87 89 90",
         "12.8": "50 52 53 60 61 62 70 72 75 80 86 87 89 90 100 101 120",
         "13.0": "75 80 86 87 88 89 90 100 103 110 120 121"}
NEEDED = ("bash", "sh", "grep", "sed", "sort", "tail", "head", "tr", "xargs", "cat", "mkdir", "cmp", "dirname", "uname",
          "nproc", "echo", "find", "basename", "date")


def program(folder, name, text):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def machine(tmp_path):
    """A folder that is all of PATH: the programs of scripts and Makefile; others are added by the tests."""
    for name in NEEDED:
        (tmp_path / "bin").mkdir(exist_ok=True)
        os.symlink(shutil.which(name), tmp_path / "bin" / name)
    return tmp_path / "bin"


def add_nvcc(folder, version):
    program(folder, "nvcc", f"""case $* in
*--list-gpu-arch*) printf 'compute_%s\\n' {KNOWN[version]} ;;
*--version*) echo "Cuda compilation tools, release {version}, V{version}.1" ;;
*-E*) exit 0 ;;
esac""")


def add_gpus(folder, *gpus):
    names, capabilities = zip(*gpus)
    program(folder, "nvidia-smi", f"""case $1 in
-L) echo "GPU 0: {names[0]} (UUID: GPU-1234)" ;;
*name*) printf '%s\\n' {' '.join(f"'{name}'" for name in names)} ;;
*compute_cap*) printf '%s\\n' {' '.join(capabilities)} ;;
esac""")


def ask(folder, *words, **env):
    return subprocess.run(["bash", ROOT / "scripts" / "toolchain.sh", *words], capture_output=True, text=True,
                          env={"PATH": str(folder), **env})


def make(folder, *words, **env):
    return subprocess.run([shutil.which("make"), "-n", *words], capture_output=True, text=True, cwd=ROOT,
                          env={"PATH": str(folder), **env})


@pytest.mark.parametrize("kind", WRAPPERS)
def test_mpi(machine, kind):
    """nvcc does not know -pthread and -Wl; the wrapper's own -O2 and -flto are not ours."""
    text, compiles, links = WRAPPERS[kind]
    program(machine, "mpicc", text)
    for what, want in (("compile", compiles), ("link", links)):
        assert ask(machine, "mpi", what, "nvcc").stdout.strip() == want
        assert ask(machine, "mpi", what, "gcc").stdout.strip() == want.replace("-Xcompiler -pthread", "-pthread")
    add_nvcc(machine, "13.0")
    said = make(machine, "DEVICE=cuda", "PREC=bf16", "BUILD=build/none")
    assert said.returncode == 0 and compiles in said.stdout and links in said.stdout, said.stderr


def test_real_nvcc_takes_the_words(machine, tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc here")
    (tmp_path / "x.cu").write_text("int main() { return 0; }\n")
    for _, compiles, links in WRAPPERS.values():
        said = subprocess.run([nvcc, "--dryrun", *compiles.split(), *links.split(), tmp_path / "x.cu"],
                              capture_output=True, text=True)
        assert said.returncode == 0, said.stderr[-500:]


def test_no_mpi(machine):
    said = make(machine, "DEVICE=cpu")
    assert "mpicc is not here: run scripts/setup.sh, or build for one process with NO_MPI=1" in said.stderr
    assert make(machine, "DEVICE=cpu", "NO_MPI=1", "BUILD=build/none").returncode == 0
    program(machine, "mpicc", "exit 1")
    assert "neither with --showme:compile" in make(machine, "DEVICE=cpu").stderr


def test_mpi_of_pkg_config(machine):
    program(machine, "pkg-config", '[ "${!#}" = mpich ] && echo "-I/x/include -L/x/lib -lmpich"')
    assert ask(machine, "mpi", "link", "nvcc").stdout.strip() == "-L/x/lib -lmpich"


@pytest.mark.parametrize("version, gpus, given, want", [
    ("13.0", [], "", "80 86 89 90 100 120"),
    ("12.4", [], "", "80 86 89 90"),
    ("12.8", [], "", "80 86 89 90 100 120"),
    ("12.4", [], "80 90a", "80 90a"),
    ("13.0", [("NVIDIA H100 80GB HBM3", "9.0")] * 8, "", "90"),
    ("13.0", [("NVIDIA GeForce GT 710", "3.5"), ("NVIDIA GeForce RTX 4090", "8.9")], "", "89"),
    ("12.4", [("NVIDIA GeForce RTX 5090", "12.0")], "", "90"),          # its PTX is compiled at the first start
    ("12.8", [("NVIDIA B300", "10.3")], "", "100"),
    ("13.0", [("NVIDIA GB10", "12.1")], "", "121"),
    ("13.0", [("NVIDIA H100", "9.0")], "80", "80")])
def test_architectures(machine, version, gpus, given, want):
    add_nvcc(machine, version)
    if gpus:
        add_gpus(machine, *gpus)
    said = ask(machine, "arch", "nvcc", *given.split())
    assert (said.stdout.strip(), said.returncode) == (want, 0)
    program(machine, "mpicc", WRAPPERS["debian"][0])
    said = make(machine, "DEVICE=cuda", "PREC=fp32", "BUILD=build/none", *([f"ARCH={given}"] if given else []))
    *older, newest = want.split()
    assert all(f"arch=compute_{each},code=sm_{each} " in said.stdout for each in older), said.stderr
    assert f"arch=compute_{newest},code=[sm_{newest},compute_{newest}] " in said.stdout, said.stderr


@pytest.mark.parametrize("version, gpus, given, sentence", [
    ("13.0", [("Tesla V100-SXM2-16GB", "7.0")], "", "Tesla V100-SXM2-16GB has compute capability 7.0, train_gpt needs "
                                                    "8.0 (Ampere) or later: build for the CPU with DEVICE=cpu"),
    ("12.4", [("Tesla T4", "7.5")], "", "Tesla T4 has compute capability 7.5"),
    ("13.0", [], "75", "ARCH=75: train_gpt needs compute capability 8.0"),
    ("12.4", [], "80 100", "ARCH=100 is not known to nvcc (CUDA 12.4), which has 50 52"),
    ("13.0", [], "9.0", "ARCH=9.0: compute capabilities without the point")])
def test_refused_architectures(machine, version, gpus, given, sentence):
    add_nvcc(machine, version)
    program(machine, "mpicc", WRAPPERS["debian"][0])
    if gpus:
        add_gpus(machine, *gpus)
    said = make(machine, "DEVICE=cuda", *([f"ARCH={given}"] if given else []), NVCC="nvcc")
    assert said.returncode != 0 and sentence in said.stderr and len(said.stderr.strip().splitlines()) == 1


def test_gpu_without_nvcc(machine):
    """The build for the CPU must be asked for."""
    add_gpus(machine, ("NVIDIA H100 80GB HBM3", "9.0"))
    program(machine, "mpicc", WRAPPERS["debian"][0])
    script = """for folder in /usr/local/cuda*; do [ ! -d "$folder" ] || mount -t tmpfs none "$folder" || exit 77; done
                export PATH=$0; exec "$@" """
    hidden = ["unshare", "-m", "bash", "-c", script, machine, shutil.which("make")]
    said = subprocess.run([*hidden, "-n"], capture_output=True, text=True, cwd=ROOT)
    if said.returncode == 77 or "unshare" in said.stderr:
        pytest.skip("/usr/local/cuda cannot be hidden here")
    assert "GPU 0: NVIDIA H100 80GB HBM3" in said.stderr and "no nvcc in PATH, CUDA_HOME" in said.stderr
    assert "-DDEVICE_CPU" in make(machine, "DEVICE=cpu", "BUILD=build/none").stdout


def test_nvcc_is_found(machine, tmp_path):
    """In CUDA_HOME before PATH; both before /usr/local."""
    add_nvcc(machine, "13.0")
    assert ask(machine, "nvcc").stdout.strip() == str(machine / "nvcc")
    add_nvcc(tmp_path / "cuda", "12.4")
    (tmp_path / "cuda").rename(tmp_path / "bin_of_cuda")
    (tmp_path / "cuda").mkdir()
    (tmp_path / "bin_of_cuda").rename(tmp_path / "cuda" / "bin")
    assert ask(machine, "nvcc", CUDA_HOME=str(tmp_path / "cuda")).stdout.strip() == str(tmp_path / "cuda/bin/nvcc")


def test_no_nccl(machine):
    program(machine, "mpicc", WRAPPERS["debian"][0])
    add_nvcc(machine, "13.0")
    program(machine, "nvcc", (machine / "nvcc").read_text().replace("*-E*) exit 0", "*-E*) exit 1"))
    assert "nccl.h is not found: install libnccl-dev" in make(machine, "DEVICE=cuda").stderr
    assert make(machine, "DEVICE=cuda", "NO_NCCL=1", "BUILD=build/none").returncode == 0
    shared = make(machine, "DEVICE=cuda", "SHARE_GPU=1", "BUILD=build/none")
    assert shared.returncode == 0 and "-lnccl" not in shared.stdout and "kernels/cpu/nccl.cpp" in shared.stdout
