#!/bin/bash
# A run on Slurm that goes on by itself when its time is over:
#     sbatch docs/slurm.sh RUN datasets/ [options of ddp_train.py]
# from the repository's folder, which all nodes must see. Two minutes before the end Slurm sends SIGUSR1 to this script,
# which lets the run save and leave, and puts the job into the queue again. A run that has finished or failed stays ended.
# SIGTERM, as a preemption sends it, lets the run save and leave too; Slurm decides whether the job comes back.
#SBATCH --job-name=isobatch
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --open-mode=append
#SBATCH --output=isobatch-%j.log

# What a shell needs to find torchrun comes here, and all nodes take it over: module load ..., source .venv/bin/activate

first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000)) # another one for each job that might share a node

# One torchrun a node. If one ends with a failure, srun ends the others: torchrun itself does not tell them.
# Since Slurm 22.05 srun does not take over the cores that sbatch was asked for: they are named again.
srun --kill-on-bad-exit=1 ${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"} torchrun \
    --nnodes "$SLURM_NNODES" --nproc_per_node "${SLURM_GPUS_ON_NODE:-1}" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "$first_node:$port" --rdzv-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" \
    ddp_train.py "$@" --resume auto &
training=$!

requeue=no
preempted=no
leave() {
    kill -TERM "$training" 2>/dev/null # srun sends it on to each torchrun, and that to its workers
}
trap 'requeue=yes; leave' USR1
trap 'preempted=yes; leave' TERM

wait "$training"
while kill -0 "$training" 2>/dev/null; do # a signal has ended the wait, not the training
    wait "$training"
done
wait "$training" # once more: its own status, whatever has ended the last wait
status=$?
if [ "$requeue" = yes ] && [ "$status" -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
elif [ "$preempted" = yes ] && [ "$status" -ne 0 ]; then
    sleep 600 # Slurm puts back a job that it ends itself, when its grace time is over, and none that has ended before
fi
exit "$status"
