#!/bin/bash
#SBATCH --job-name=demo
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --partition=gpu
#SBATCH --gres=gpu:8
#SBATCH --output=runs/demo/logs/job-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@510
# Written by: polarlm submit run.yaml --scheduler slurm --nodes 3 --gpus-per-node 8 --walltime 24:00:00 --queue gpu --chain 4 --option=--gres=gpu:8 --dry-run

began=$(date +%s)
fail() { echo "error: $1 on $HOSTNAME" >&2; exit 2; }
cd /work/me || fail "this job's folder is not there"

# The Python that submitted this, before any that a module brings.
export PYTHONPATH='/home/me/two words'
python=/home/me/venv/bin/python
[[ -x $python ]] || fail "there is no $python (is its file system there?)"
export PATH="${python%/*}:$PATH"
echo "python: $python on $HOSTNAME"

# Variables that were set where this was submitted.
export HF_HOME='line one
line '"'"'two'"'"''

# Trains on every node; tells the run to save before the walltime ends, and keeps jobs.jsonl.
exec "$python" -m polarlm.launch.job runs/demo --scheduler slurm --nodes 3 \
    --walltime-s 86400 --began "$began" --chain -- \
    "$python" -m polarlm train runs/demo --resume --nodes 3
