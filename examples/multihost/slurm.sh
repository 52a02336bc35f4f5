#!/usr/bin/env bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --kill-on-bad-exit=1
# sbatch examples/multihost/slurm.sh: one process a node, which has all of its GPUs.
set -euo pipefail

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST") # one a line; "head" would end scontrol by SIGPIPE
export TORCHAX_SERVE_COORDINATOR="${nodes%%$'\n'*}:8476" TORCHAX_SERVE_NUM_HOSTS="$SLURM_NNODES"
# shellcheck disable=SC2016  # each node has a number of its own
srun bash -c 'TORCHAX_SERVE_HOST_ID=$SLURM_NODEID exec torchax-serve run qwen3-32b -p "What is JAX?"'
