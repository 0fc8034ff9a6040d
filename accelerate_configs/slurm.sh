#!/usr/bin/env bash
# Slurm: one launcher a node; saved before the time is up, then queued again until it is done.
# sbatch --nodes 2 --gpus-per-node 4 accelerate_configs/slurm.sh recipes/resnet.py --dataset cifar10
# Leave --output-dir and --resume out: the run's directory is named by RUN_DIRECTORY, below.

# One launcher on each node; it starts the processes itself.
#SBATCH --ntasks-per-node=1
# Longest time before the job is stopped and queued again.
#SBATCH --time=04:00:00
# 120 s before the end, SIGUSR1 to what `srun` started: see NODE.
#SBATCH --signal=USR1@120
# Allow `scontrol requeue`, and let Slurm itself queue the job again when a node fails.
#SBATCH --requeue
# Go on writing to the same log after that.
#SBATCH --open-mode=append

# The same after each start, as the job keeps its number.
directory="${RUN_DIRECTORY:-runs/slurm-$SLURM_JOB_ID}"
# Processes on each node: one a GPU.
export PER_NODE="${PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}"
# Where all processes meet: the first node, at a port that other jobs do not use.
export MAIN_ADDRESS="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export MAIN_PORT="$((10000 + SLURM_JOB_ID % 50000))"

# What each node runs. SIGUSR1 would kill `accelerate launch` and orphan its processes. This shell
# takes it instead, and sends SIGTERM on, upon which the launcher stops its processes and waits.
# Processes that Slurm signals besides this shell ignore SIGUSR1, but for the recipe's own.
# A single process has no launcher, which would not wait for it.
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

# Tells whether `status.json` is of this start of the job or of one before; in the directory, as
# other file systems have other clocks.
started="$directory/.started"
mkdir -p "$directory" && touch "$started"
# Each node ends by itself: one that failed must not have the others killed while they save.
srun --kill-on-bad-exit=0 bash -c "$NODE" node "$@" --output-dir "$directory" --resume auto &
steps=$!
# A signal to this script alone (--signal=B:USR1@120) is sent on; `srun` passes on SIGUSR1, but
# answers SIGTERM by killing everything. SIGTERM means that someone wants the job to end.
trap 'kill -USR1 "$steps"' USR1
trap 'ended=yes; kill -USR1 "$steps"' TERM
wait "$steps"; status=$?
while kill -0 "$steps" 2>/dev/null; do wait "$steps"; status=$?; done

# Queue the job again if the run was stopped, or lost a process; not after a mistake of yours, for
# which `status.json` says "resumable": false, or is not even written.
if [ "$directory/status.json" -nt "$started" ] && [ -z "${ended:-}" ] &&
  grep -q '"resumable": true' "$directory/status.json"; then
  scontrol requeue "$SLURM_JOB_ID"
fi
rm -f "$started"
rmdir --ignore-fail-on-non-empty "$directory"
exit "$status"
