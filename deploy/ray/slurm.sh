#!/bin/bash
# A training on machines of Slurm: a Ray cluster over all of them for the length of the job. `sbatch deploy/ray/slurm.sh`
# from the folder of the agent, which all machines see. Change what the first lines ask for.
#SBATCH --job-name=my-training
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --time=24:00:00
set -euo pipefail

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address="$head:6379"
one=(srun --nodes=1 --ntasks=1 --overlap --nodelist="$head")

"${one[@]}" ray start --head --port=6379 --num-cpus="$SLURM_CPUS_PER_TASK" --block &
for _ in $(seq 60); do
    "${one[@]}" ray status --address="$address" >/dev/null 2>&1 && break
    sleep 2
done
if [ "$SLURM_NNODES" -gt 1 ]; then
    srun --nodes=$((SLURM_NNODES - 1)) --ntasks=$((SLURM_NNODES - 1)) --overlap --exclude="$head" \
        ray start --address="$address" --num-cpus="$SLURM_CPUS_PER_TASK" --block &
fi

# The training waits for the machines by itself. The last checkpoint is in the run's folder: add --resume to go on.
"${one[@]}" agl train --agent my_agent.py:agent --tasks tasks.jsonl --model Qwen/Qwen3-4B \
    --backend ray --address "$address" --backend-option engines=4 --backend-option wait_seconds=600 \
    --set ranks=4 --n-runners 8 --run-dir "runs/$SLURM_JOB_ID"
