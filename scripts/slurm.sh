#!/usr/bin/env bash
#SBATCH --job-name=train_gpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --exclusive
#SBATCH --output=slurm-%j.out
#SBATCH --signal=TERM@120
# slurm.sh: a run under Slurm, one rank a GPU.
#
#   sbatch --nodes 4 scripts/slurm.sh scripts/run_llama_1b.sh --text /data/shards ...
#
# Preparation runs on the first node, the program on all by srun (Slurm's PMIx starts Open MPI's ranks). The folder is
# shared. Two minutes before the time limit SIGTERM ends the run: the step under way is finished, on a GPU also the
# next, and saved. If that takes longer, raise @120. Submitted again, it resumes from that checkpoint.
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: sbatch scripts/slurm.sh scripts/run_NAME.sh [OPTIONS]" >&2; exit 2; }
cd "${SLURM_SUBMIT_DIR:-.}"
script=$1
shift
ranks=${SLURM_NTASKS:?not under Slurm: submit it with sbatch, or use scripts/hosts.sh}
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
cpus=${SLURM_CPUS_PER_TASK:+ --cpus-per-task=$SLURM_CPUS_PER_TASK}         # since Slurm 22.05 srun does not inherit it
export LAUNCH="srun --mpi=pmix --ntasks=$ranks$cpus --kill-on-bad-exit=1"
exec "$script" --ranks "$ranks" "$@"
