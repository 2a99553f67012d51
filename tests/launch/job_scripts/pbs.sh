#!/bin/bash
#PBS -N demo
#PBS -l select=2:ncpus=4
#PBS -l place=scatter
#PBS -l walltime=00:30:00
#PBS -r y
#PBS -j oe
#PBS -k doe
#PBS -o runs/demo/logs/
# Written by: polarlm submit run.yaml --scheduler pbs --nodes 2 --devices-per-node 4 --walltime 00:30:00 --dry-run

began=$(date +%s)
fail() { echo "error: $1 on $HOSTNAME" >&2; exit 2; }
cd /work/me || fail "this job's folder is not there"

# The Python that submitted this, before any that a module brings.
python=/home/me/venv/bin/python
[[ -x $python ]] || fail "there is no $python (is its file system there?)"
export PATH="${python%/*}:$PATH"
echo "python: $python on $HOSTNAME"

# Trains on every node; tells the run to save before the walltime ends, and keeps jobs.jsonl.
exec "$python" -m polarlm.launch.job runs/demo --scheduler pbs --nodes 2 \
    --walltime-s 1800 --began "$began" -- \
    "$python" -m polarlm train runs/demo --resume --nodes 2
