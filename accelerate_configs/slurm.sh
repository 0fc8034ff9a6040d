#!/usr/bin/env bash
# Slurm: one launcher on each node. The run saves before its time limit, and the job is queued again
# until the run is finished.
# sbatch --nodes 2 --gpus-per-node 4 accelerate_configs/slurm.sh recipes/resnet.py --dataset cifar10
# Do not pass --output-dir or --resume: RUN_DIRECTORY, below, names the run's directory.

# One launcher on each node; it starts the processes itself.
#SBATCH --ntasks-per-node=1
# Longest time before the job is stopped and queued again.
#SBATCH --time=04:00:00
# 120 s before the end, Slurm sends SIGUSR1 to the steps of `srun`: see NODE.
#SBATCH --signal=USR1@120
# Allow `scontrol requeue`, and let Slurm itself queue the job again when a node fails.
#SBATCH --requeue
# Append to the same log after that.
#SBATCH --open-mode=append

# The same after each start, because the job keeps its number.
directory="${RUN_DIRECTORY:-runs/slurm-$SLURM_JOB_ID}"
# Processes on each node: one for each GPU.
export PER_NODE="${PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}"
# Where all processes meet: on the first node, at a port that other jobs do not use. It is below
# 32768, because Linux gives the ports above to outgoing connections.
export MAIN_ADDRESS="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export MAIN_PORT="$((10000 + SLURM_JOB_ID % 20000))"
# Torch's launcher kills its processes 30 s after SIGTERM. Use the whole notice of 120 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110}"

# What each node runs. SIGUSR1 would kill `accelerate launch` and orphan its processes. Instead,
# this shell receives it and sends SIGTERM to the launcher, which then stops its processes and
# waits for them. Slurm also signals the other processes; they ignore SIGUSR1, except the recipe,
# which handles it. A single process runs without a launcher, because a launcher would not wait
# for it.
NODE='
all=$((SLURM_JOB_NUM_NODES * PER_NODE))
launch=(accelerate launch --multi_gpu --num_machines "$SLURM_JOB_NUM_NODES" --num_processes "$all"
  --machine_rank "$SLURM_NODEID" --main_process_ip "$MAIN_ADDRESS" --main_process_port "$MAIN_PORT"
  --mixed_precision no --dynamo_backend no)
if [ "$all" = 1 ]; then launch=(python); fi
(trap "" USR1; exec "${launch[@]}" "$@") &
launcher=$!
trap "kill -TERM $launcher" USR1 TERM
wait "$launcher"; status=$?
while kill -0 "$launcher" 2>/dev/null; do wait "$launcher"; status=$?; done
exit "$status"
'

# Shows whether `status.json` was written by this start of the job or by an earlier one. The file
# is in the run's directory because other file systems have other clocks.
started="$directory/.started"
mkdir -p "$directory" && touch "$started"
# A node that fails must not end the others, which may still be saving.
srun --kill-on-bad-exit=0 bash -c "$NODE" node "$@" --output-dir "$directory" --resume auto &
steps=$!
# This script passes on a signal that only it receives (--signal=B:USR1@120). `srun` forwards
# SIGUSR1, but on SIGTERM it kills everything. SIGTERM means that someone wants the job to end.
trap 'kill -USR1 "$steps"' USR1
trap 'ended=yes; kill -USR1 "$steps"' TERM
wait "$steps"; status=$?
while kill -0 "$steps" 2>/dev/null; do wait "$steps"; status=$?; done

# Queue the job again if the run was stopped or lost a process. After a mistake of yours,
# `status.json` says "resumable": false, or was not written, and the job ends.
if [ "$directory/status.json" -nt "$started" ] && [ -z "${ended:-}" ] &&
  grep -q '"resumable": true' "$directory/status.json"; then
  scontrol requeue "$SLURM_JOB_ID"
fi
rm -f "$started"
rmdir --ignore-fail-on-non-empty "$directory"
exit "$status"
