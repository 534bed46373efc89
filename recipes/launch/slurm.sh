#!/bin/bash
# A run on several nodes under SLURM: sbatch recipes/launch/slurm.sh [arguments of `lowbit fit`]
#
# Lightning takes ranks and addresses from SLURM, where srun starts one task per GPU: --nodes and --ntasks-per-node must
# be num_nodes and devices of the configuration, or it stops with an error that says so. (It takes a job whose name is
# `bash` or `interactive` for a terminal.)
#
# Five minutes before the time is up SLURM sends USR1 to this script, which interrupts the tasks. `GracefulInterrupt` then
# ends the step on all ranks, writes a checkpoint and stops; the job goes back into the queue and resumes from its newest
# checkpoint. The rest of a step, a validation that is due and a save must fit into the five minutes. A run that fails is
# not queued again: submit it with `--ckpt_path last`.
#
#SBATCH --job-name=lowbit
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -uo pipefail

# source venv/bin/activate

export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"

arguments=(--config c4 --config llama_7b --config multi_node "$@")
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
  arguments+=(--ckpt_path last)
fi

requeue=false
stop() {
  requeue=true
  scancel --signal=INT "$SLURM_JOB_ID" # the tasks of the job, not this script
}
trap stop USR1

# Since SLURM 22.05 srun has to be told of the CPUs of a task again.
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=0 \
  python -m lightning_lowbit.cli fit "${arguments[@]}" &
tasks=$!
wait "$tasks"
status=$?
if "$requeue"; then # the signal ended the wait, and not the tasks
  wait "$tasks"
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
fi
exit "$status"
